"""Memory for results and for what lies between kernels, and what launches know of it.

    new_y = maker(y)             # a function that returns uninitialised memory like y
    y = New.like(y)              # an argument of a launch: memory that each call makes, see launch.py
    mean = statistics.behind(8)  # an argument of that launch: a part of what it makes

Compiled code asks for memory past torch's dispatcher, which would take longer than a small launch does.
Here it is asked for where compiled code asks, on the current GPU.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor
from torch._C._dynamo import guards

# A torch without CUDA has no such function, or none that works.
current_device: Any = getattr(torch._C, "_cuda_getDevice", None)
empty_strided_cuda: Any = getattr(guards, "_empty_strided_cuda", None)


Made = TypeVar("Made")


def apart(make: Callable[[], Made], device: torch.device) -> Made:
    """make(), on the current stream of `device`, a GPU, for memory that outlives the call.

    In a thread of its own, since a private memory pool of the calling thread (torch.compile's CUDA
    graphs make one to warm up) would take the memory back.
    """
    stream = torch.cuda.current_stream(device)

    def on_stream() -> Made:
        with torch.cuda.stream(stream):
            return make()

    with ThreadPoolExecutor(1) as thread:
        return thread.submit(on_stream).result()


class Memory:
    """What kernels know of a tensor: where it starts, its dtype, and the index of its device."""

    __slots__ = ("address", "device", "dtype")

    def __init__(self, address: int, dtype: torch.dtype, device: int) -> None:
        self.address, self.dtype, self.device = address, dtype, device

    def at(self, address: int) -> Memory:
        return Memory(address, self.dtype, self.device)

    def tensor_at(self, address: int) -> Tensor:
        """For the interpreter, which wants tensors but goes by addresses: one element on the CPU."""
        element = (ctypes.c_char * self.dtype.itemsize).from_address(address)
        return torch.frombuffer(element, dtype=self.dtype)

    def data_ptr(self) -> int:
        return self.address

    def get_device(self) -> int:
        return self.device


class New:
    """Memory that each call of a bound launch makes, uninitialised, and returns."""

    __slots__ = ("device", "dtype", "shape", "strides")

    def __init__(
        self, shape: tuple[int, ...], strides: tuple[int, ...], dtype: torch.dtype, device: torch.device
    ) -> None:
        self.shape, self.strides, self.dtype, self.device = shape, strides, dtype, device

    @classmethod
    def like(cls, made: Tensor) -> New:
        return cls(tuple(made.shape), made.stride(), made.dtype, made.device)

    @property
    def new(self) -> New:
        """Itself, as of a Part."""
        return self

    @property
    def layout(self) -> tuple[tuple[int, ...], tuple[int, ...], torch.dtype]:
        return self.shape, self.strides, self.dtype

    def element_size(self) -> int:
        return self.dtype.itemsize

    @property
    def past_dispatcher(self) -> bool:
        """Whether empty_strided_cuda makes it, where its device is the current one."""
        return self.device.type == "cuda" and empty_strided_cuda is not None

    def make(self) -> Tensor:
        return torch.empty_strided(self.shape, self.strides, dtype=self.dtype, device=self.device)

    def behind(self, elements: int) -> Part:
        """What is behind the first elements of a vector, 16 bytes or a multiple of them."""
        if elements * self.dtype.itemsize % 16 != 0 or len(self.shape) != 1:
            raise ValueError(f"elements is {elements}; it takes a number of whole 16 bytes of a vector")
        return Part(self, elements)

    def maker(self) -> Callable[[], Tensor]:
        """A function that returns such memory."""
        (shape, strides, dtype), index = self.layout, self.device.index

        def on_current_device() -> Any:
            if current_device() == index:
                return empty_strided_cuda(shape, strides, dtype)
            return self.make()

        return on_current_device if self.past_dispatcher else self.make


class Part(NamedTuple):
    """A part of memory that a bound launch makes, as one of its arguments."""

    new: New
    elements: int

    @property
    def bytes(self) -> int:
        return self.elements * self.new.dtype.itemsize


def maker(made: Tensor | None) -> Callable[[], Any]:
    """A function that returns uninitialised memory like `made`; None where that is None."""
    return (lambda: None) if made is None else New.like(made).maker()


def aligned(x: Tensor) -> Tensor:
    """x, or where it begins at no multiple of 16 bytes, uninitialised memory like it that does: for a
    plan, which follows from no address."""
    if x.data_ptr() % 16 == 0:
        return x
    return torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device=x.device)
