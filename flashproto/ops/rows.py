"""Tensors as matrices of rows, which is how the kernels of norms and softmax see them."""

from __future__ import annotations

import math
from typing import Any

from torch import Tensor


def as_rows(x: Tensor, ndim: int = 1) -> Tensor:
    """x [..., *trailing] as [M, N], N the product of the last `ndim` dimensions: columns of stride
    1, rows of any one stride.  A view where x allows it, else a contiguous copy."""
    if x.ndim == 2 and ndim == 1 and x.stride()[1] == 1:
        return x
    M = math.prod(x.shape[: x.ndim - ndim])
    N = math.prod(x.shape[x.ndim - ndim :])
    rows = x.reshape(M, N)
    return rows if N <= 1 or rows.stride(1) == 1 else rows.contiguous()


def contiguous(x: Any) -> Any:
    """x, or a contiguous copy; None for None."""
    return None if x is None else x.contiguous()
