"""LayerNorm and RMSNorm of x [..., N]."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from .states import compute_dtype, moments_finish, moments_of_tile

Hook = Callable[[Tensor], Tensor]


def unchanged(x: Tensor) -> Tensor:
    return x


def norm(
    x: Tensor,
    normalized_shape: Sequence[int],
    weight: Tensor | None,
    bias: Tensor | None,
    eps: float,
    *,
    centered: bool,
    casting: str = "torch",
    before: Hook = unchanged,
    after: Hook = unchanged,
    dtype: torch.dtype | None = None,
) -> Tensor:
    """(x - mean) / sqrt(variance + eps) * weight + bias over the trailing `normalized_shape`.

    centered=True is LayerNorm; centered=False is RMSNorm: mean is 0, variance the mean square.
    casting says how xhat meets the weight: "torch" rounds nothing before the result, "llama" rounds
    xhat to x's dtype, "gemma" multiplies by 1 + weight.  before and after are element-wise functions
    of x and of y.  Computed in at least float32; returned in `dtype`, x's if None.
    """
    xhat = _normalized(before(x.to(compute_dtype(x.dtype))), normalized_shape, eps, centered)
    return _finished(xhat, weight, bias, casting, x.dtype, after, dtype)


def add_norm(
    x: Tensor,
    residual: Tensor,
    normalized_shape: Sequence[int],
    weight: Tensor | None,
    bias: Tensor | None,
    eps: float,
    *,
    centered: bool,
    casting: str = "torch",
    before: Hook = unchanged,
    after: Hook = unchanged,
    dtype: torch.dtype | None = None,
) -> tuple[Tensor, Tensor]:
    """total = before(x) + residual, rounded to the wider of the two dtypes; norm of that rounded total.

    Returns (y in `dtype`, x's if None, total): without `before` the same as the two operators one
    after the other.  Arguments otherwise as norm.
    """
    wider = torch.promote_types(x.dtype, residual.dtype)
    compute = compute_dtype(wider)
    total = (before(x.to(compute)) + residual.to(compute)).to(wider)
    xhat = _normalized(total.to(compute), normalized_shape, eps, centered)
    return _finished(xhat, weight, bias, casting, x.dtype, after, dtype), total


def _normalized(x: Tensor, normalized_shape: Sequence[int], eps: float, centered: bool) -> Tensor:
    """xhat of x, in x's dtype."""
    rows = x.flatten(x.ndim - len(normalized_shape))
    n, mean, M2 = moments_of_tile(rows, centered)
    xhat = (rows - mean[..., None]) * moments_finish(n, M2, eps)[..., None]
    return xhat.reshape(x.shape)


def _finished(
    xhat: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    casting: str,
    x_dtype: torch.dtype,
    after: Hook,
    dtype: torch.dtype | None,
) -> Tensor:
    y = xhat.to(x_dtype).to(xhat.dtype) if casting == "llama" else xhat
    if weight is not None:
        y = y * (weight.to(y.dtype) + (1 if casting == "gemma" else 0))
    if bias is not None:
        y = y + bias.to(y.dtype)
    return after(y).to(x_dtype if dtype is None else dtype)
