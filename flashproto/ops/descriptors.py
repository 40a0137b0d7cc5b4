"""TMA descriptors: how the copy engine of Hopper finds a box of a tensor.

A descriptor is a function of an address, a dtype, a shape, strides and a box.  Making one takes Triton
several microseconds, so those made last are kept; they hold no memory of the tensors.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import Tensor
from triton.experimental.gluon.language import NVMMASharedLayout, bfloat16, float16, float32
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from . import triton_entry

LANGUAGE_TYPES = {torch.float16: float16, torch.bfloat16: bfloat16, torch.float32: float32}
# The stride of a dimension of one entry, which is never used: what it is may not be what TMA accepts.
UNUSED_STRIDE = 1 << 23
KEPT = 4096  # of about 2 KiB; a training step of a large model has a few hundred


class Memory:
    """The part of a tensor that a descriptor needs; it does not keep the tensor alive."""

    def __init__(self, address: int, dtype: torch.dtype) -> None:
        self.address, self.dtype = address, dtype

    def data_ptr(self) -> int:
        return self.address


class Descriptor(TensorDescriptor):
    """A descriptor as launchers take it.

    type: says what a kernel is compiled for.  encoded: what is handed to it, made at the first launch.
    """

    type: str
    device: int
    encoded: tuple[Any, ...] | None = None

    def get_device(self) -> int:
        return self.device

    def encode(self, wanted: dict[str, Any]) -> None:
        self.encoded = triton_entry.encode_descriptor(self, wanted)


@functools.cache
def layout(dtype: torch.dtype, box: tuple[int, ...]) -> NVMMASharedLayout:
    """How TMA leaves a box in shared memory: swizzled as widely as its rows allow."""
    return NVMMASharedLayout.get_default_for(list(box), LANGUAGE_TYPES[dtype])


@functools.lru_cache(KEPT)
def descriptor(
    address: int,
    device: int,
    dtype: torch.dtype,
    shape: tuple[int, ...],
    strides: tuple[int, ...],
    box: tuple[int, ...],
) -> Descriptor | None:
    """Boxes of the tensor at `address`, with zeros past its end; None where TMA cannot read it."""
    if not tma_reads(address, dtype.itemsize, shape, strides):
        return None
    used = [s if n > 1 else UNUSED_STRIDE for n, s in zip(shape[:-1], strides[:-1], strict=True)]
    made = Descriptor(Memory(address, dtype), list(shape), [*used, 1], list(box), layout(dtype, box))
    made.type, made.device = f"{dtype}{box}", device
    return made


def tma_reads(address: int, itemsize: int, shape: tuple[int, ...], strides: tuple[int, ...]) -> bool:
    """Whether the last dimension is contiguous, the other strides are positive multiples of 16 bytes,
    and so is the address."""
    others = [s for n, s in zip(shape[:-1], strides[:-1], strict=True) if n > 1]
    steps = all(s > 0 and s * itemsize % 16 == 0 for s in others)
    return steps and strides[-1] == 1 and address % 16 == 0


def describe(x: Tensor, box: tuple[int, ...]) -> tuple[Tensor, Descriptor]:
    """x and its descriptor; or those of a contiguous copy, where TMA cannot read x."""
    made = descriptor(x.data_ptr(), x.get_device(), x.dtype, x.shape, x.stride(), box)
    if made is None:
        x = x.clone(memory_format=torch.contiguous_format)
        made = descriptor(x.data_ptr(), x.get_device(), x.dtype, x.shape, x.stride(), box)
        assert made is not None, "a contiguous copy with rows of whole 16 bytes can be read"
    return x, made
