"""Every operator in plain PyTorch: the definition of correct.

Nothing here is fast.  Everything is differentiable as often as wanted, in reverse and forward mode,
runs on any device, and computes in float64 when given float64 (half-precision inputs are computed in
float32 and rounded once at the end).  The kernels are tested against this file; both states below
carry the names they have in the device code.

Legend: q [B, Hq, Sq, D], k [B, Hkv, Sk, D], v [B, Hkv, Sk, Dv], lse [B, Hq, Sq]; x [..., N].
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor


def compute_dtype(dtype: torch.dtype) -> torch.dtype:
    """The dtype in which an operator on `dtype` is computed: at least float32."""
    return torch.promote_types(dtype, torch.float32)


# --- online softmax: the state (m, l), see kernels/online_softmax.py -----------------------------


def online_softmax_start(shape: Sequence[int], like: Tensor) -> tuple[Tensor, Tensor]:
    """The state of no scores: m = -inf, l = 0, both of `shape`, with the dtype and device of `like`."""
    return like.new_full(shape, -math.inf), like.new_zeros(shape)


def online_softmax_update(m: Tensor, l: Tensor, x: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Take in scores x [..., C] (natural-log units); returns (m, l, p [..., C], alpha)."""
    m_new = torch.maximum(m, x.amax(-1)) if x.shape[-1] else m
    shift = torch.where(m_new == -math.inf, 0.0, m_new)
    p = torch.exp(x - shift[..., None])
    alpha = torch.exp(m - shift)
    return m_new, l * alpha + p.sum(-1), p, alpha


def online_softmax_merge(
    m1: Tensor, l1: Tensor, m2: Tensor, l2: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Join two states; returns (m, l, w1, w2), where payloads combine as w1 * a1 + w2 * a2."""
    m = torch.maximum(m1, m2)
    shift = torch.where(m == -math.inf, 0.0, m)
    w1, w2 = torch.exp(m1 - shift), torch.exp(m2 - shift)
    return m, l1 * w1 + l2 * w2, w1, w2


def online_softmax_finish(m: Tensor, l: Tensor) -> tuple[Tensor, Tensor]:
    """Returns (lse, 1 / l); an empty state gives (-inf, 0)."""
    empty = l == 0
    divisor = torch.where(empty, 1.0, l)
    lse = torch.where(empty, -math.inf, torch.where(empty, 0.0, m) + torch.log(divisor))
    return lse, torch.where(empty, 0.0, 1.0 / divisor)


# --- moments: the state (n, mean, M2), see kernels/moments.py ------------------------------------


def moments_of_tile(x: Tensor, centered: bool = True) -> tuple[Tensor, Tensor, Tensor]:
    """The state (n, mean, M2) of the last dimension of x; deviations from 0 if not centered."""
    n = x.new_full(x.shape[:-1], x.shape[-1])
    mean = x.sum(-1) / n.clamp(min=1) if centered else torch.zeros_like(n)
    deviation = x - mean[..., None]
    return n, mean, (deviation * deviation).sum(-1)


def moments_merge(
    n1: Tensor, mean1: Tensor, M2_1: Tensor, n2: Tensor, mean2: Tensor, M2_2: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Chan's merge of two states, either of which may be empty."""
    n = n1 + n2
    delta = mean2 - mean1
    share = n2 / n.clamp(min=1)
    return n, mean1 + delta * share, M2_1 + M2_2 + delta * delta * n1 * share


def moments_finish(n: Tensor, M2: Tensor, eps: float) -> Tensor:
    """1 / sqrt(M2 / n + eps)."""
    return torch.rsqrt(M2 / n + eps)


# --- attention -----------------------------------------------------------------------------------


def causal_mask(Sq: int, Sk: int, offset: int, device: torch.device) -> Tensor:
    """[Sq, Sk], True where query i may see key j: j <= i + offset.

    offset = 0 aligns the mask top-left (torch's is_causal), offset = Sk - Sq bottom-right
    (flash-attention): the last query sees every key.
    """
    i = torch.arange(Sq, device=device)[:, None]
    j = torch.arange(Sk, device=device)[None, :]
    return j <= i + offset


def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    causal: bool = False,
    causal_offset: int | None = None,
    scale: float | None = None,
) -> tuple[Tensor, Tensor]:
    """softmax(scale * q k^T) v, and the rows' logsumexp.

    k and v may have fewer heads than q (GQA): query head h reads key head h // (Hq // Hkv).
    causal_offset defaults to Sk - Sq (bottom-right); scale to 1 / sqrt(D).  A query with no visible
    key gives 0 and lse = -inf.  Returns out [B, Hq, Sq, Dv] in q's dtype, lse [B, Hq, Sq] in the
    computing dtype.
    """
    Sq, Sk, group = q.shape[2], k.shape[2], q.shape[1] // max(k.shape[1], 1)
    scale = q.shape[3] ** -0.5 if scale is None else scale
    dtype = compute_dtype(q.dtype)
    k, v = (t.to(dtype).repeat_interleave(group, 1) for t in (k, v))
    scores = (q.to(dtype) @ k.mT) * scale  # [B, Hq, Sq, Sk]
    if causal:
        offset = Sk - Sq if causal_offset is None else causal_offset
        scores = scores.masked_fill(~causal_mask(Sq, Sk, offset, q.device), -math.inf)
    # The softmax does not depend on the shift m, so m is a constant to every derivative.
    m = scores.detach().amax(-1) if Sk else scores.new_full(scores.shape[:-1], -math.inf)
    p = torch.exp(scores - torch.where(m == -math.inf, 0.0, m)[..., None])
    lse, normaliser = online_softmax_finish(m, p.sum(-1))
    return ((p @ v) * normaliser[..., None]).to(q.dtype), lse


# --- norms ---------------------------------------------------------------------------------------


def norm(
    x: Tensor,
    normalized_shape: Sequence[int],
    weight: Tensor | None,
    bias: Tensor | None,
    eps: float,
    *,
    centered: bool,
) -> Tensor:
    """(x - mean) / sqrt(variance + eps) * weight + bias over the trailing `normalized_shape`.

    centered=True is LayerNorm; centered=False is RMSNorm: mean is 0, variance the mean square.
    Computed in at least float32; returned in x's dtype.
    """
    dtype = compute_dtype(x.dtype)
    rows = x.to(dtype).flatten(x.ndim - len(normalized_shape))
    n, mean, M2 = moments_of_tile(rows, centered)
    y = (rows - mean[..., None]) * moments_finish(n, M2, eps)[..., None]
    y = y.reshape(x.shape)
    if weight is not None:
        y = y * weight.to(dtype)
    if bias is not None:
        y = y + bias.to(dtype)
    return y.to(x.dtype)


def add_norm(
    x: Tensor,
    residual: Tensor,
    normalized_shape: Sequence[int],
    weight: Tensor | None,
    bias: Tensor | None,
    eps: float,
    *,
    centered: bool,
) -> tuple[Tensor, Tensor]:
    """total = x + residual, rounded to the wider of the two dtypes; norm of that rounded total.

    Returns (y in x's dtype, total): the same as the two operators one after the other.
    """
    total = x + residual
    return norm(total, normalized_shape, weight, bias, eps, centered=centered).to(x.dtype), total


# --- softmax family ------------------------------------------------------------------------------


def softmax(x: Tensor) -> Tensor:
    """exp(x - m) / l over the last dimension; NaN for a row of -inf, as in torch."""
    x_ = x.to(compute_dtype(x.dtype))
    e = torch.exp(x_ - x_.detach().amax(-1, keepdim=True)) if x.shape[-1] else x_
    return (e / e.sum(-1, keepdim=True)).to(x.dtype)


def log_softmax(x: Tensor) -> Tensor:
    """x - logsumexp(x) over the last dimension; NaN for a row of -inf, as in torch."""
    x_ = x.to(compute_dtype(x.dtype))
    shifted = x_ - x_.detach().amax(-1, keepdim=True) if x.shape[-1] else x_
    return (shifted - torch.log(torch.exp(shifted).sum(-1, keepdim=True))).to(x.dtype)


def logsumexp(x: Tensor) -> Tensor:
    """log(sum(exp(x))) over the last dimension; -inf for a row of -inf or of no elements."""
    x_ = x.to(compute_dtype(x.dtype))
    if not x.shape[-1]:
        return x.new_full(x.shape[:-1], -math.inf)
    m = x_.detach().amax(-1)
    shift = torch.where(m.isinf(), 0.0, m)
    return (shift + torch.log(torch.exp(x_ - shift[..., None]).sum(-1))).to(x.dtype)
