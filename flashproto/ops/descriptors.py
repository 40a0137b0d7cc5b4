"""TMA descriptors: how the copy engine of Hopper finds a box of a tensor.

A descriptor is a function of an address, a dtype, a shape, strides and a box.  Triton takes several
microseconds to check all these and make one.  Boxes keep what all addresses have in common, and the
descriptors of the last addresses.  They hold no memory of the tensors.
"""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import torch
from triton.experimental.gluon.language import NVMMASharedLayout, bfloat16, float16, float32
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from . import private
from .recipe import Boxed, Operand

LANGUAGE_TYPES = {torch.float16: float16, torch.bfloat16: bfloat16, torch.float32: float32}
# For a dimension of one entry, whose stride is never used and may be one that TMA does not accept.
UNUSED_STRIDE = 1 << 23
CAPACITY = 256  # addresses, each about 700 bytes; a training step uses one for each layer or two

Shape = tuple[int, ...]


class Memory(NamedTuple):
    """What Triton asks of a descriptor's tensor: where it starts, and its dtype."""

    address: int
    dtype: torch.dtype

    def data_ptr(self) -> int:
        return self.address


class Descriptor(TensorDescriptor):
    """A descriptor; encoded: what is handed to the kernel, made at the first launch."""

    encoded: tuple[Any, ...] | None = None

    def encode(self, wanted: dict[str, Any]) -> None:
        self.encoded = private.encode_descriptor(self, wanted)

    def at(self, address: int) -> Descriptor:
        """The same of another address, which is a multiple of 16 too."""
        other = Descriptor.__new__(Descriptor)
        memory = self.base._replace(address=address)
        other.__dict__ = self.__dict__ | {"base": memory, "encoded": None}
        return other


class Boxes(dict[int, Descriptor]):
    """Descriptors of tensors that differ in nothing but their addresses, multiples of 16, by these."""

    def __init__(self, first: Descriptor) -> None:
        self.first = first

    def __missing__(self, address: int) -> Descriptor:
        if len(self) >= CAPACITY:
            self.clear()
        made = self[address] = self.first.at(address)
        return made


@functools.lru_cache(1024)
def boxes(device: torch.device, dtype: torch.dtype, shape: Shape, strides: Shape, box: Shape) -> Boxes:
    """Boxes of tensors on `device` that TMA reads, with zeros past the end."""
    used = [s if n > 1 else UNUSED_STRIDE for n, s in zip(shape[:-1], strides[:-1], strict=True)]
    # As wide as rows allow.
    layout = NVMMASharedLayout.get_default_for(list(box), LANGUAGE_TYPES[dtype])
    return Boxes(Descriptor(Memory(0, dtype), list(shape), [*used, 1], list(box), layout))


def boxed(x: Operand, shape: Shape, strides: Shape, box: Shape) -> Boxed:
    """x as an argument: boxes of its memory seen as [*shape] with `strides`."""
    return Boxed(x, boxes(x.device, x.dtype, tuple(shape), tuple(strides), box))


def tma_reads(x: Operand) -> bool:
    """Whether x starts at a multiple of 16 bytes, its last dimension is contiguous and the other
    strides are positive multiples of 16 bytes."""
    others = [s for n, s in zip(x.shape[:-1], x.strides[:-1], strict=True) if n > 1]
    return (
        x.aligned
        and x.strides[-1] == 1
        and all(s > 0 and s * x.element_size() % 16 == 0 for s in others)
    )


def readable(x: Operand) -> Operand:
    """x, or a contiguous copy where TMA cannot read it."""
    return x if tma_reads(x) else x.clone()
