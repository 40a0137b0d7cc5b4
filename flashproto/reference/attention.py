"""Attention.  q [B, Hq, Sq, D], k [B, Hkv, Sk, D], v [B, Hkv, Sk, Dv], lse [B, Hq, Sq]."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from .states import compute_dtype, online_softmax_finish


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
