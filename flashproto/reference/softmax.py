"""softmax, log_softmax, logsumexp and softmax_topk of x [..., N]."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from .states import compute_dtype


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


def softmax_topk(
    x: Tensor, k: int, renormalize: bool = False, dtype: torch.dtype | None = None
) -> tuple[Tensor, Tensor]:
    """The k largest of softmax(x), descending, equal ones by their indices; values and indices.

    Scores are compared as given: probabilities that only rounding makes equal are not.
    """
    x_ = x.to(compute_dtype(x.dtype))
    indices = torch.sort(x_.detach(), descending=True, stable=True).indices[..., :k]
    values = softmax(x_.gather(-1, indices)) if renormalize else softmax(x_).gather(-1, indices)
    return values.to(dtype or x.dtype), indices
