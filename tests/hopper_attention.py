"""What the tests of the Hopper attention kernels share."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch
from torch import Tensor

from flashproto.variant import Kind

FULL, CAUSAL = Kind(), Kind(CAUSAL=True)


def half(*shape: int) -> Tensor:
    return torch.randn(shape).bfloat16()


def with_gaps(t: Tensor) -> Tensor:
    """t with something between its rows."""
    return torch.stack((t, t), 1)[:, 0]


def late(t: Tensor) -> Tensor:
    """t at an address that is no multiple of 16."""
    return torch.empty(t.numel() + 1, dtype=t.dtype, device=t.device)[1:].view(t.shape).copy_(t)


@contextlib.contextmanager
def determinism() -> Iterator[None]:
    torch.use_deterministic_algorithms(True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(False)


FITS = half(2, 3, 5, 64)
