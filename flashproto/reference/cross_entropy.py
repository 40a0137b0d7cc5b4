"""Cross entropy of logits [..., V] with class targets [...]."""

from __future__ import annotations

import math

import torch
from torch import Tensor
from torch.nn.functional import linear

from .softmax import logsumexp
from .states import compute_dtype


def cross_entropy(
    logits: Tensor,
    targets: Tensor,
    weight: Tensor | None = None,
    *,
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
    softcap: float | None = None,
    reduction: str = "mean",
) -> tuple[Tensor, Tensor, Tensor]:
    """(loss, z, lse), in float32 (float64 for float64 logits).

    Of a row x with target t, c = w_t, W = sum(w_j), lse = logsumexp(x):
        z    = z_loss lse^2
        loss = (1 - label_smoothing) c (lse - x_t) + label_smoothing / V sum(w_j (lse - x_j)) + z
    0 where t is ignore_index, NaN where it is no class; "mean" divides the sum by that of the c, and is
    NaN where that is 0.
    """
    x = logits.to(compute_dtype(logits.dtype))
    if softcap is not None:
        x = softcap * torch.tanh(x / softcap)
    V = x.shape[-1]
    w = x.new_ones(V) if weight is None else weight.to(x.dtype)
    kept = targets != ignore_index
    valid = kept & (targets >= 0) & (targets < V)
    t = torch.where(valid, targets, 0).long()[..., None]
    c = torch.where(valid, w[t][..., 0], 0.0).masked_fill(kept & ~valid, math.nan)
    lse = logsumexp(x)
    logp = x - lse[..., None]
    z = z_loss * lse.square() if z_loss else torch.zeros_like(lse)  # not 0 * inf where lse is large
    loss = (1.0 - label_smoothing) * c * -logp.gather(-1, t)[..., 0] + z
    if label_smoothing:
        loss = loss - label_smoothing / V * (w * logp).sum(-1)
    loss, z = (torch.where(kept, row, 0.0) for row in (loss, z))
    if reduction == "none":
        return loss, z, lse
    if reduction == "sum":
        return loss.sum(), z.sum(), lse
    divisor = torch.where(valid, c, 0.0).sum()
    divisor = torch.where(divisor == 0, math.nan, divisor)
    return loss.sum() / divisor, z.sum() / divisor, lse


def linear_cross_entropy(
    h: Tensor,
    weight: Tensor,
    targets: Tensor,
    bias: Tensor | None = None,
    class_weight: Tensor | None = None,
    **options,
) -> tuple[Tensor, Tensor, Tensor]:
    """cross_entropy of the logits h weight^T + bias; h [..., D], weight [V, D], bias [V]."""
    return cross_entropy(linear(h, weight, bias), targets, class_weight, **options)
