"""What torch.autocast does to the arguments of PyTorch's functions of the same names."""

from __future__ import annotations

import torch
from torch import Tensor

from .. import backends


def autocast_float32(aten_name: str, *tensors: Tensor | None) -> tuple[Tensor | None, ...]:
    """Cast to float32 where autocast does so for torch's operator of that name on this device."""
    if not torch._C._is_any_autocast_enabled():
        return tensors
    device = next(t for t in tensors if t is not None).device.type
    if not torch.is_autocast_enabled(device) or not _autocasts(aten_name, device):
        return tensors
    return tuple(t.float() if t is not None and t.dtype != torch.float64 else t for t in tensors)


@backends.constant_under_compile
def _autocasts(aten_name: str, device: str) -> bool:
    key = {"cuda": "AutocastCUDA", "cpu": "AutocastCPU"}.get(device)
    return key is not None and torch._C._dispatch_has_kernel_for_dispatch_key(f"aten::{aten_name}", key)


def autocast_low_precision(*tensors: Tensor) -> tuple[Tensor, ...]:
    """Cast to the autocast dtype, as torch does for scaled_dot_product_attention."""
    if not torch._C._is_any_autocast_enabled():
        return tensors
    device = tensors[0].device.type
    if not torch.is_autocast_enabled(device):
        return tensors
    dtype = torch.get_autocast_dtype(device)
    return tuple(t.to(dtype) if t.dtype != torch.float64 else t for t in tensors)
