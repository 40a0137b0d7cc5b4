"""Hooks as the kernels take them: see kernels/hooks.py.

In the settings of an operator, which hold no functions, a hook is its name and its scalars; "" is none.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .. import hooks
from .recipe import New, Operand


def with_hooks(
    prologue: hooks.Call | None, epilogue: hooks.Call | None
) -> tuple[list[Tensor], tuple[Any, ...]]:
    """(operands, names and scalars) of two hooks, as Settings end in."""
    operands: list[Tensor] = []
    values: list[Any] = []
    for made in (prologue, epilogue):
        operands += () if made is None else made.operands
        values += ("", ()) if made is None else (made.hook.name, made.scalars)
    return operands, tuple(values)


def parts_of(prologue: str, operands: Sequence[Any]) -> tuple[Sequence[Any], Sequence[Any]]:
    """(operands of the prologue, operands of the epilogue); a prologue "" has none."""
    n = hooks.defined(prologue).operands if prologue else 0
    return operands[:n], operands[n:]


class HookArguments(NamedTuple):
    """What the kernels take for one hook, see kernels/hooks.py; gradients only in the backward."""

    forward: Any = None
    backward: Any = None
    arguments: tuple[Any, Any] | None = None
    gradients: tuple[Tensor | Operand | None, ...] | None = None


NO_HOOK = HookArguments()


def operand_rows(t: Tensor | Operand, shape: Sequence[int], normalized_ndim: int) -> tuple[Any, ...]:
    """(tensor, row stride, column stride) of an operand that broadcasts to `shape`, see
    kernels/hooks.py."""
    lead = len(shape) - normalized_ndim
    padded = (1,) * (len(shape) - t.ndim) + tuple(t.shape)
    t = t.reshape(*padded)
    by_row, by_column = math.prod(padded[:lead]) != 1, math.prod(padded[lead:]) != 1
    M, N = math.prod(shape[:lead]), math.prod(shape[lead:])
    if by_row and by_column:
        t = t.expand(*shape).reshape(M, N)
        return t, t.stride(0), t.stride(1)
    if by_row:
        t = t.expand(*shape[:lead], *padded[lead:]).reshape(M)
        return t, t.stride(0), None
    if by_column:
        t = t.expand(*padded[:lead], *shape[lead:]).reshape(N)
        return t, None, t.stride(0)
    return t, None, None


def hooks_of(
    settings: Any,
    operands: Sequence[Any],
    shape: Sequence[int],
    normalized_ndim: int,
    stores: Sequence[Operand | None] = (),
) -> tuple[HookArguments, HookArguments]:
    """Prologue and epilogue as the kernels take them, of settings that name both; stores: for the
    gradients of their operands."""
    prologue, epilogue = settings.prologue, settings.epilogue
    (first, last), (first_stores, last_stores) = (parts_of(prologue, t) for t in (operands, stores))
    how = shape, normalized_ndim
    return (
        hook_arguments(prologue, first, settings.prologue_scalars, *how, first_stores),
        hook_arguments(epilogue, last, settings.epilogue_scalars, *how, last_stores),
    )


def hook_arguments(
    name: str,
    operands: Sequence[Tensor | Operand],
    scalars: Sequence[float],
    shape: Sequence[int],
    normalized_ndim: int,
    gradients: Sequence[Tensor | Operand | None] = (),
) -> HookArguments:
    if not name:
        return NO_HOOK
    hook = hooks.defined(name)
    rows = tuple(operand_rows(t, shape, normalized_ndim) for t in operands)
    return HookArguments(hook.forward, hook.backward, (rows, tuple(scalars)), tuple(gradients))


def score_mod_arguments(made: hooks.Call, scores: Sequence[int]) -> tuple[Any, Any]:
    """(operands, scalars) of a hook of scores [B, Hq, Sq, Sk], as kernels/scores.py has them."""

    def strides(t: Any) -> tuple[int | None, ...]:
        shape = (*(1,) * (4 - t.ndim), *t.shape)
        batch, head, *of_pair = t.expand(*scores).stride()
        return batch, head, *(None if n == 1 else s for n, s in zip(shape[2:], of_pair, strict=True))

    return tuple((t, *strides(t)) for t in made.operands), made.scalars


# --- gradients of operands ------------------------------------------------------------------------


def stores_of(gradients: Sequence[Operand | None], shape: Sequence[int]) -> list[Operand | None]:
    """Where the kernels store these gradients of operands that broadcast to `shape`: one element for
    each of `shape`, in float32 where they must still be summed."""
    return [
        g
        if g is None or g.shape == tuple(shape)
        else g.recipe.make(New.contiguous(shape, torch.float32, g.device))
        for g in gradients
    ]


def summed(
    stores: Sequence[Operand | None], gradients: Sequence[Operand | None]
) -> list[Operand | None]:
    """The gradients, summed from what the kernels have stored; they are returned in its place."""

    def sum_up(store: Operand | None, gradient: Operand | None) -> Operand | None:
        if store is None or gradient is None or store is gradient:
            return gradient
        shape, dtype = gradient.shape, gradient.dtype
        like = New.contiguous(shape, dtype, gradient.device)
        return store.recipe.compute(partial(sum_to, shape=shape, dtype=dtype), store, like=like)

    return list(map(sum_up, stores, gradients))


def sum_to(x: Tensor, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    return x.sum_to_size(shape).to(dtype)
