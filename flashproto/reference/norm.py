"""LayerNorm and RMSNorm of x [..., N]."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from .states import compute_dtype, moments_finish, moments_of_tile


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
