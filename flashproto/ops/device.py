"""What launches need to know about the device."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

import torch

from .. import backends, configs

# Under the interpreter there is no device; kernels get the tiles of the smallest GPU that is supported.
INTERPRETER_CAPABILITY = (8, 0)

Made = TypeVar("Made")


@functools.cache
def capability(device: torch.device) -> tuple[int, int]:
    """Compute capability (major, minor)."""
    if device.type == "cpu":
        return INTERPRETER_CAPABILITY
    return torch.cuda.get_device_capability(device)


@functools.cache
def multiprocessors(device: torch.device) -> int:
    """Number of streaming multiprocessors; 1 under the interpreter."""
    if device.type == "cpu":
        return 1
    return torch.cuda.get_device_properties(device).multi_processor_count


def programs_at_once(device: torch.device, config: configs.RowConfig) -> int:
    """How many programs run at once, or clusters of programs, where each takes many rows.

    A cluster stays within one GPC, so some multiprocessors are left over: of an H200's 132, clusters of
    4 or 8 leave 12, and clusters of 16 leave 20.
    """
    count = multiprocessors(device)
    if config.cluster > 1:
        count = max(count * 15 // 16 // config.cluster, 1)
    return count * config.programs


@functools.cache
def has_hopper_kernels(device: torch.device) -> bool:
    """Whether `device` takes the kernels of kernels/hopper."""
    return not backends.device_reasons("hopper", device)


@functools.cache
def has_dependent_launches(device: torch.device) -> bool:
    """Whether a launch with launch_pdl begins as soon as every program of the launch before has ended
    or allowed it.  Its programs must then wait themselves for what that launch writes."""
    return not backends.INTERPRETED and capability(device)[0] >= 9


def on_device(device: torch.device) -> contextlib.AbstractContextManager[object]:
    """Make `device` current, where it is not already."""
    if device.type == "cpu" or device.index in (None, torch.cuda.current_device()):
        return contextlib.nullcontext()
    return torch.cuda.device(device)


def outside_memory_pool(make: Callable[[], Made], device: torch.device) -> Made:
    """make(), on the current stream of `device`, a GPU, for memory that outlives the call.

    It runs in a thread of its own: a private memory pool of the calling thread (torch.compile's CUDA
    graphs make one to warm up) would take the memory back.
    """
    stream = torch.cuda.current_stream(device)

    def on_stream() -> Made:
        with torch.cuda.stream(stream):
            return make()

    with ThreadPoolExecutor(1) as thread:
        return thread.submit(on_stream).result()


def cdiv(a: int, b: int) -> int:
    """a / b rounded up; triton.cdiv takes a microsecond and more outside a kernel."""
    return -(-a // b)
