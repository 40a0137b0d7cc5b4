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
]
"""(x, input, weight, bias, mean, rstd) of kernels/norm_backward.py; mean is None where x has mean 0,
both statistics where the backward is to work them out again"""
Gradients: TypeAlias = tuple[Operand, Operand | None, Operand | None, Operand | None]
"""(dx, dresidual, dweight, dbias); None where one is not needed, dresidual also where it is dx"""


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


# --- statistics: one tensor [1 or 2, M], rstd and behind it mean ------------------------------------


def statistics_like(x: Any, normalized_ndim: int, centered: bool) -> New:
    """Memory for the statistics of x.  Both rows start at multiples of 16 bytes, so that kernels are
    compiled once for all M."""
    M, _ = sizes(x, normalized_ndim)
    return New((1 + centered, M), (4 * cdiv(M, 4), 1), torch.float32, x.device)


def statistics_in(memory: Operand | None, centered: bool) -> tuple[Operand | None, Operand | None]:
    """(mean, rstd); hooks of saved tensors may have given them other strides."""
    if memory is None:
        return None, None
    if memory.strides[1] != 1:
        memory = memory.clone()
    rows, M = memory.strides[0], memory.shape[1]
    mean = memory.as_strided((M,), (1,), rows) if centered else None
    return mean, memory.as_strided((M,), (1,))
