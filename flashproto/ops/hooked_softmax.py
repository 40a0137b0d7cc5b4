"""softmax and log_softmax with hooks or split rows: the operator's recipes.

Legend: as in softmax.py.  A hook travels as its name and its scalars, since the schema of an operator
takes no functions; "" is none.  operands: those of the prologue, then those of the epilogue; each
broadcasts to x.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .. import hooks
from .call import Operator
from .hook_arguments import (
    HookArguments,
    hook_arguments,
    named,
    parts_of,
    stores_of,
    summed,
)
from .recipe import New, Operand, Recipe
from .rows import needed_like
from .softmax import fill_gradient, fill_result


class Settings(NamedTuple):
    """split_rows: see functional/softmax.py."""

    log: bool
    dtype: torch.dtype
    split_rows: bool
    prologue: str
    prologue_scalars: tuple[float, ...]
    epilogue: str
    epilogue_scalars: tuple[float, ...]


def arguments_of(
    x: Tensor,
    log: bool,
    dtype: torch.dtype,
    split_rows: bool,
    prologue: hooks.Call | None,
    epilogue: hooks.Call | None,
) -> tuple[tuple[Tensor, ...], Settings]:
    """The operator's inputs and settings for epilogue(softmax(prologue(x))) in `dtype`."""
    before, after = named(prologue), named(epilogue)
    settings = Settings(log, dtype, split_rows, before[0], before[2], after[0], after[2])
    return (x, *before[1], *after[1]), settings


def makes(settings: Settings, x: Any, *operands: Any) -> tuple[New, New]:
    """y, and the logsumexp of prologue(x)."""
    return (
        New.contiguous(x.shape, settings.dtype, x.device),
        New.contiguous(x.shape[:-1], torch.float32, x.device),
    )


def forward(recipe: Recipe, settings: Settings, inputs, outputs) -> None:
    (x, *operands), (y, lse) = inputs, outputs
    if lse is None:  # not asked for, but one kernel does for all calls
        lse = recipe.make(makes(settings, x)[1])
    before, after = hooks_of(settings, x, operands)
    fill_result(recipe, x, y, lse, settings.log, before, after, settings.split_rows)


def saves(settings: Settings, inputs: list[Any], outputs: list[Any]) -> list[Any]:
    x, *operands = inputs
    return [x, outputs[1], *operands]


def gradients(settings: Settings, grads, saved, needs) -> list[New | None]:
    x, _, *operands = saved
    return needed_like([x, *operands], needs)


def backward(recipe: Recipe, settings: Settings, grads, saved, made) -> list[Operand | None] | None:
    (dy,), (x, lse, *operands), (dx, *by_operand) = grads, saved, made
    if x.numel() == 0:
        for gradient in by_operand:
            if gradient is not None:
                gradient.zero_()
        return None
    stores = stores_of(by_operand, x.shape)
    before, after = hooks_of(settings, x, operands, stores)
    to = dx or recipe.make(New.contiguous(x.shape, x.dtype, x.device))
    fill_gradient(recipe, dy, None, x, lse, to, settings.log, before, after, settings.split_rows)
    return [dx, *summed(stores, by_operand)]


def hooks_of(
    settings: Settings, x: Operand, operands: list[Operand], stores: Sequence[Operand | None] = ()
) -> tuple[HookArguments, HookArguments]:
    """Prologue and epilogue as the kernels take them; stores: for the gradients of their operands."""
    first, last = parts_of(settings.prologue, operands)
    first_stores, last_stores = parts_of(settings.prologue, stores)
    how = x.shape, 1
    return (
        hook_arguments(settings.prologue, first, settings.prologue_scalars, *how, first_stores),
        hook_arguments(settings.epilogue, last, settings.epilogue_scalars, *how, last_stores),
    )


hooked_softmax = Operator(
    "hooked_softmax",
    inputs="x, *operands",
    outputs=2,
    settings=Settings,
    makes=makes,
    forward=forward,
    saved="x, lse, *operands",
    saves=saves,
    gradients=gradients,
    backward=backward,
)
