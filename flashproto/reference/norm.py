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


def quantized(y: Tensor, normalized_ndim: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """(y / scale in `dtype`, scale): y [..., *normalized_shape], with one float32 scale a row
    [..., 1, ...] that makes the largest |y| of the row the largest number of `dtype`; it is at least
    2^-126."""
    rows = y.flatten(y.ndim - normalized_ndim).abs()
    largest = rows.amax(-1) if rows.shape[-1] else rows.sum(-1)
    scale = (largest / torch.finfo(dtype).max).clamp_min(2.0**-126)
    scale = scale[(..., *(None,) * normalized_ndim)]
    return (y / scale).to(dtype), scale.to(torch.float32)


def recoverable(weight: Tensor, casting: str) -> tuple[Tensor, str]:
    """The weight, none of it smaller than 2^-64, and the casting for it, of a norm that can get xhat
    back from y; see kernels/norm_recover.py.  Its gradient is that of the weight itself."""
    w = weight.to(compute_dtype(weight.dtype)) + (1 if casting == "gemma" else 0)
    clamped = torch.where(w.abs() < 2.0**-64, 2.0**-64, w)
    return w + (clamped - w).detach(), "torch" if casting == "gemma" else casting


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
