"""Hooks as the kernels take them: see kernels/hooks.py.

In the schema of an operator, which takes no functions, a hook is its name, its operands and its scalars
(HOOKS); "" is none.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .. import hooks
from .launch import Launcher, launcher

HOOKS = (
    "str prologue, Tensor[] prologue_operands, float[] prologue_scalars, "
    "str epilogue, Tensor[] epilogue_operands, float[] epilogue_scalars"
)


def named(made: hooks.Call | None) -> tuple[str, tuple[Tensor, ...], tuple[float, ...]]:
    """A hook as the schema of an operator takes it."""
    return ("", (), ()) if made is None else (made.hook.name, made.operands, made.scalars)


class HookArguments(NamedTuple):
    """What the kernels take for one hook, see kernels/hooks.py; gradients only in the backward."""

    forward: Any = None
    backward: Any = None
    arguments: tuple[Any, Any] | None = None
    gradients: tuple[Tensor | None, ...] | None = None


NO_HOOK = HookArguments()


def launchers(kernel: Any, tensors: int) -> tuple[Launcher, Launcher]:
    """Launchers of a kernel: for calls without hooks, and for such with."""
    names = ("prologue", "prologue_gradients", "epilogue", "epilogue_gradients")
    tuples = [name for name in names if name in kernel.arg_names]
    return launcher(kernel, tensors=tensors), launcher(kernel, tensors=tensors, tuples=tuples)


def operand_rows(t: Tensor, shape: torch.Size, normalized_ndim: int) -> tuple[Any, ...]:
    """(tensor, row stride, column stride) of an operand that broadcasts to `shape`, see
    kernels/hooks.py."""
    lead = len(shape) - normalized_ndim
    padded = (1,) * (len(shape) - t.ndim) + tuple(t.shape)
    t = t.reshape(padded)
    by_row, by_column = math.prod(padded[:lead]) != 1, math.prod(padded[lead:]) != 1
    M, N = math.prod(shape[:lead]), math.prod(shape[lead:])
    if by_row and by_column:
        t = t.expand(shape).reshape(M, N)
        return t, t.stride(0), t.stride(1)
    if by_row:
        t = t.expand(*shape[:lead], *padded[lead:]).reshape(M)
        return t, t.stride(0), None
    if by_column:
        t = t.expand(*padded[:lead], *shape[lead:]).reshape(N)
        return t, None, t.stride(0)
    return t, None, None


def hook_arguments(
    name: str,
    operands: Sequence[Tensor],
    scalars: Sequence[float],
    shape: torch.Size,
    normalized_ndim: int,
    gradients: Sequence[Tensor | None] = (),
) -> HookArguments:
    if not name:
        return NO_HOOK
    hook = hooks.get(name)
    rows = tuple(operand_rows(t, shape, normalized_ndim) for t in operands)
    return HookArguments(hook.forward, hook.backward, (rows, tuple(scalars)), tuple(gradients))
