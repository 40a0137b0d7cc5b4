"""What torch.autocast does to the arguments of PyTorch's functions of the same names."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext

import torch
from torch import Tensor

from .. import backends
from ..backends import autocast_dtype


def autocast_float32(aten_name: str, *tensors: Tensor | None) -> tuple[Tensor | None, ...]:
    """Cast to float32 where autocast does so for torch's operator of that name on this device."""
    first = next(t for t in tensors if t is not None)
    if autocast_dtype(first) is None or not _autocasts(aten_name, first.device.type):
        return tensors
    return tuple(t.float() if t is not None and _is_cast(t) else t for t in tensors)


@backends.constant_under_compile
def _autocasts(aten_name: str, device: str) -> bool:
    key = {"cuda": "AutocastCUDA", "cpu": "AutocastCPU"}.get(device)
    return key is not None and torch._C._dispatch_has_kernel_for_dispatch_key(f"aten::{aten_name}", key)


def without_autocast(x: Tensor) -> AbstractContextManager[object]:
    """Where autocast is on, it is off within: products are in the dtype of what they are made of."""
    return nullcontext() if autocast_dtype(x) is None else torch.autocast(x.device.type, enabled=False)


def autocast_low_precision(*tensors: Tensor) -> tuple[Tensor, ...]:
    """Cast to the autocast dtype, as torch does for scaled_dot_product_attention."""
    dtype = autocast_dtype(tensors[0]) if isinstance(tensors[0], Tensor) else None
    if dtype is None:
        return tensors
    return tuple(t.to(dtype) if _is_cast(t) else t for t in tensors)


def _is_cast(x: object) -> bool:
    """Autocast leaves float64 alone, and what no operator takes to the operator's checks."""
    return isinstance(x, Tensor) and x.is_floating_point() and x.dtype != torch.float64
