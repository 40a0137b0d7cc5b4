"""Sums over the rows of partial sums [P, N]: the second step of the gradients of weights and biases."""

from __future__ import annotations

from typing import Any

import torch

from .. import backends, configs
from ..kernels.norm_backward import column_sums_kernel
from .device import cdiv, has_dependent_launches
from .recipe import New, Operand, Recipe

Pair = tuple[Operand | None, Operand | None]
"""Partial sums of dweight and dbias; None for a gradient that is not needed."""


def partial_sums(recipe: Recipe, P: int, N: int, sums: Pair) -> Pair:
    """Float32 [P, N] for each of the two sums, in one piece of memory, at multiples of 16 bytes."""
    wanted = [x is not None for x in sums]
    words = 4 * cdiv(P * N, 4)
    memory = recipe.make(New.contiguous((sum(wanted) * words,), torch.float32, recipe.device))
    first = memory.part(0, torch.float32, P, N)
    second = memory.part(4 * words * wanted[0], torch.float32, P, N)
    return first if wanted[0] else None, second if wanted[1] else None


def column_sums(recipe: Recipe, partials: Pair, sums: Pair) -> None:
    """Add the launch that adds up the partial sums in a fixed order, where there are any."""
    if any(x is not None for x in sums):
        programs, arguments, options = column_sums_launch(partials, sums)
        recipe.launch(column_sums_kernel, programs, *arguments, **options)


def column_sums_launch(partials: Any, sums: Any) -> tuple[int, tuple[Any, ...], dict[str, Any]]:
    """(programs, arguments, constants and options) of the launch."""
    partial = next(x for x in partials if x is not None)
    P, N = partial.shape
    config = configs.column_sums(N)
    columns = 1024 if backends.INTERPRETED else config.columns  # it takes a millisecond a program
    dependent = has_dependent_launches(partial.device)
    options = {
        "R": config.rows,
        "C": columns,
        "num_warps": config.num_warps,
        "PDL": dependent,
        "launch_pdl": dependent or None,
    }
    return sum(x is not None for x in sums) * cdiv(N, columns), (*partials, *sums, P, N), options
