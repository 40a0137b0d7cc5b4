"""TMA descriptors: how the copy engine of Hopper finds a box of a tensor.

A descriptor is a function of an address, a dtype, a shape, strides and a box.  Checking all these and
having one made takes Triton several microseconds; Boxes keep what all addresses have in common, and the
descriptors of the addresses seen last.  They hold no memory of the tensors.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import Tensor
from triton.experimental.gluon.language import NVMMASharedLayout, bfloat16, float16, float32
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from . import triton_entry
from .memory import Memory

LANGUAGE_TYPES = {torch.float16: float16, torch.bfloat16: bfloat16, torch.float32: float32}
# The stride of a dimension of one entry, which is never used: what it is may not be what TMA accepts.
UNUSED_STRIDE = 1 << 23
KEPT = 256  # addresses, each about 700 bytes; a training step uses one for each layer or two


class Descriptor(TensorDescriptor):
    """A descriptor as launchers take it.

    type: says what a kernel is compiled for.  encoded: what is handed to it, made at the first launch.
    """

    type: str
    encoded: tuple[Any, ...] | None = None

    def get_device(self) -> int:
        return self.base.device

    def encode(self, wanted: dict[str, Any]) -> None:
        self.encoded = triton_entry.encode_descriptor(self, wanted)

    def at(self, address: int) -> Descriptor:
        """The same of another address, which is a multiple of 16 too."""
        other = Descriptor.__new__(Descriptor)
        other.__dict__ = self.__dict__ | {"base": self.base.at(address), "encoded": None}
        return other


class Boxes(dict[int, Descriptor]):
    """Descriptors of tensors that differ in nothing but their addresses, multiples of 16, by these."""

    def __init__(self, first: Descriptor) -> None:
        self.first = first

    def __missing__(self, address: int) -> Descriptor:
        if len(self) >= KEPT:
            self.clear()
        made = self[address] = self.first.at(address)
        return made


@functools.lru_cache(1024)
def boxes(
    device: int,
    dtype: torch.dtype,
    shape: tuple[int, ...],
    strides: tuple[int, ...],
    box: tuple[int, ...],
) -> Boxes:
    """Boxes of tensors that TMA reads, with zeros past the end."""
    used = [s if n > 1 else UNUSED_STRIDE for n, s in zip(shape[:-1], strides[:-1], strict=True)]
    layout = NVMMASharedLayout.get_default_for(
        list(box), LANGUAGE_TYPES[dtype]
    )  # as wide as rows allow
    first = Descriptor(Memory(0, dtype, device), list(shape), [*used, 1], list(box), layout)
    first.type = f"{dtype}{box}"
    return Boxes(first)


@functools.lru_cache(1024)
def tma_reads(itemsize: int, shape: tuple[int, ...], strides: tuple[int, ...]) -> bool:
    """Whether the last dimension is contiguous and the other strides are positive multiples of 16
    bytes, so that TMA reads such a tensor at an address that is one."""
    others = [s for n, s in zip(shape[:-1], strides[:-1], strict=True) if n > 1]
    return strides[-1] == 1 and all(s > 0 and s * itemsize % 16 == 0 for s in others)


def readable(x: Tensor) -> Tensor:
    """x, or a contiguous copy where TMA cannot read it."""
    if x.data_ptr() % 16 == 0 and tma_reads(x.element_size(), x.shape, x.stride()):
        return x
    return x.clone(memory_format=torch.contiguous_format)
