"""LayerNorm and RMSNorm: what the launches of all their kernels have in common.

Legend: x, residual, y, total [..., *normalized_shape], seen as [M, N]; weight, bias [N] once
flattened; mean, rstd [M] float32.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple, TypeAlias

import torch

from .device import cdiv
from .hook_arguments import NO_HOOK, HookArguments
from .recipe import New, Operand

Inputs: TypeAlias = tuple[Operand, Operand | None, Operand | None, Operand | None]
"""(x, residual, weight, bias)"""
Outputs: TypeAlias = tuple[Operand, Operand | None, Operand | None, Operand | None]
"""(y, total, mean, rstd); total is None without a residual, mean where x has mean 0, and both
statistics where nobody keeps them"""
Saved: TypeAlias = tuple[
    Operand, Operand | None, Operand | None, Operand | None, Operand | None, Operand | None
]  # fmt: skip
"""(x, input, weight, bias, mean, rstd) of kernels/norm_backward.py; mean is None where x has mean 0,
both statistics where the backward is to work them out again"""
Gradients: TypeAlias = tuple[Operand, Operand | None, Operand | None, Operand | None]
"""(dx, dresidual, dweight, dbias); None where nobody asks for one, dresidual also where it is dx"""


class NormSettings(NamedTuple):
    """Settings of a norm's launches; see functional/norm.py.  The backward reads eps only where it is
    not given the statistics."""

    normalized_ndim: int
    eps: float
    centered: bool
    casting: str
    prologue: HookArguments = NO_HOOK
    epilogue: HookArguments = NO_HOOK
    split_rows: bool = False

    @property
    def hooked(self) -> bool:
        return self.prologue is not NO_HOOK or self.epilogue is not NO_HOOK


def sizes(x: Any, normalized_ndim: int) -> tuple[int, int]:
    """(M, N): how many rows, how many elements in each."""
    lead = x.ndim - normalized_ndim
    return math.prod(x.shape[:lead]), math.prod(x.shape[lead:])


# --- statistics: one piece of memory, mean behind rstd, each of whole 16 bytes ----------------------


def statistics_like(x: Any, normalized_ndim: int, centered: bool) -> New:
    """Memory for the statistics of x."""
    M, _ = sizes(x, normalized_ndim)
    return New.contiguous(((1 + centered) * padded(M),), torch.float32, x.device)


def statistics_in(
    memory: Operand | None, M: int, centered: bool
) -> tuple[Operand | None, Operand | None]:
    """(mean, rstd) of M rows in this memory."""
    if memory is None:
        return None, None
    mean = memory.part(4 * padded(M), torch.float32, M) if centered else None
    return mean, memory.part(0, torch.float32, M)


def padded(count: int) -> int:
    """float32 of whole 16 bytes that hold `count` of them."""
    return 4 * cdiv(count, 4)
