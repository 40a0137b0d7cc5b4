"""What the machine itself reaches in this run: a copy and a matrix product."""

from __future__ import annotations

import statistics

import torch

from .timing import Timer, make_timer


def copy_speed(nbytes: int, device: torch.device, timer: Timer) -> float:
    """GB/s of a device-to-device copy, bytes read and written; the median of three measurements."""
    source = torch.empty(nbytes, dtype=torch.uint8, device=device).random_()
    target = torch.empty_like(source)
    ms = statistics.median(timer(lambda: target.copy_(source)) for _ in range(3))
    return 2 * nbytes / ms / 1e6


def measure_ceilings(device: torch.device) -> dict[str, float | str]:
    """GB/s of a device-to-device copy (bytes read and written) and TFLOP/s of a square matmul."""
    timer = make_timer(device, 200.0)
    gpu = device.type == "cuda"
    nbytes, size = (2**30, 8192) if gpu else (2**26, 1024)
    dtype = torch.bfloat16 if gpu else torch.float32
    a, b = (torch.randn(size, size, device=device, dtype=dtype) for _ in range(2))
    matmul = timer(lambda: a @ b)
    return {
        "copy_gb_s": copy_speed(nbytes, device, timer),
        "matmul_tflop_s": 2 * size**3 / matmul / 1e9,
        "matmul": f"{size}x{size}x{size} {str(dtype).removeprefix('torch.')}",
    }
