"""What every launch needs to know about the device."""

from __future__ import annotations

import contextlib
import functools

import torch

# Under the interpreter there is no device; kernels get the tiles of the smallest GPU that is supported.
INTERPRETER_CAPABILITY = (8, 0)


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


def on_device(device: torch.device) -> contextlib.AbstractContextManager[object]:
    """Make `device` current for a launch, where it is not already: Triton launches on the current
    device and its current stream."""
    if device.type == "cpu" or device.index in (None, torch.cuda.current_device()):
        return contextlib.nullcontext()
    return torch.cuda.device(device)


def allows_tf32() -> bool:
    """Whether the user allowed tf32 products through torch's own switch."""
    return torch.backends.cuda.matmul.fp32_precision == "tf32"
