"""softmax, log_softmax and logsumexp over the last dimension: the operators' recipes.

Legend: x, y, dy, dx [..., N], seen as [M, N]; lse [...] float32.  Operands of hooks, the prologue's
first, broadcast to x.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .. import configs
from ..kernels.logsumexp import (
    logsumexp_backward_kernel,
    logsumexp_forward_kernel,
    logsumexp_forward_split_kernel,
)
from ..kernels.softmax import (
    softmax_backward_kernel,
    softmax_backward_looped_kernel,
    softmax_backward_split_kernel,
    softmax_forward_kernel,
    softmax_forward_looped_kernel,
    softmax_forward_split_kernel,
)
from .call import Operator
from .device import cdiv, has_hopper_kernels
from .hook_arguments import NO_HOOK, HookArguments, hooks_of, stores_of, summed
from .recipe import New, Operand, Recipe
from .rows import launch_splits, needed_like, tile_of

FORWARD = softmax_forward_kernel, softmax_forward_split_kernel, softmax_forward_looped_kernel
BACKWARD = softmax_backward_kernel, softmax_backward_split_kernel, softmax_backward_looped_kernel


class Settings(NamedTuple):
    """dtype: the result's; in the backward, that of x."""

    log: bool
    dtype: torch.dtype


def makes(settings: Settings, x: Any) -> tuple[New]:
    return (New.contiguous(x.shape, settings.dtype, x.device),)


def forward(recipe: Recipe, settings: Settings, inputs: list[Operand], outputs: list[Operand]) -> None:
    fill_result(recipe, inputs[0], outputs[0], None, settings.log)


def saves(settings: Settings, inputs: list[Any], outputs: list[Any]) -> list[Any]:
    return outputs


def context(settings: Settings, inputs: list[Any]) -> Settings:
    return settings._replace(dtype=inputs[0].dtype)


def gradients(settings: Settings, grads, saved, needs) -> tuple[New]:
    return makes(settings, saved[0])


def backward(recipe: Recipe, settings: Settings, grads, saved, made) -> None:
    fill_gradient(recipe, grads[0], saved[0], None, None, made[0], settings.log)


softmax = Operator(
    "softmax",
    inputs="x",
    outputs=1,
    settings=Settings,
    makes=makes,
    forward=forward,
    saved="y",
    saves=saves,
    context=context,
    gradients=gradients,
    backward=backward,
)


# --- with hooks or split rows ---------------------------------------------------------------------


class HookedSettings(NamedTuple):
    """split_rows: see functional/softmax.py.  A hook is its name, "" for none, and its scalars."""

    log: bool
    dtype: torch.dtype
    split_rows: bool
    prologue: str
    prologue_scalars: tuple[float, ...]
    epilogue: str
    epilogue_scalars: tuple[float, ...]


def hooked_makes(settings: HookedSettings, x: Any, *operands: Any) -> tuple[New, New]:
    """y, and the logsumexp of prologue(x)."""
    return (
        New.contiguous(x.shape, settings.dtype, x.device),
        New.contiguous(x.shape[:-1], torch.float32, x.device),
    )


def hooked_forward(recipe: Recipe, settings: HookedSettings, inputs, outputs) -> None:
    (x, *operands), (y, lse) = inputs, outputs
    if lse is None:  # not asked for, but one kernel does for all calls
        lse = recipe.make(hooked_makes(settings, x)[1])
    hooks = hooks_of(settings, operands, x.shape, 1)
    fill_result(recipe, x, y, lse, settings.log, *hooks, settings.split_rows)


def hooked_saves(settings: HookedSettings, inputs: list[Any], outputs: list[Any]) -> list[Any]:
    x, *operands = inputs
    return [x, outputs[1], *operands]


def hooked_gradients(settings: HookedSettings, grads, saved, needs) -> list[New | None]:
    x, _, *operands = saved
    return needed_like([x, *operands], needs)


def hooked_backward(
    recipe: Recipe, settings: HookedSettings, grads, saved, made
) -> Sequence[Operand | None] | None:
    (dy,), (x, lse, *operands), (dx, *by_operand) = grads, saved, made
    if x.numel() == 0:
        for gradient in by_operand:
            if gradient is not None:
                gradient.zero_()
        return None
    stores = stores_of(by_operand, x.shape)
    hooks = hooks_of(settings, operands, x.shape, 1, stores)
    to = dx or recipe.make(New.contiguous(x.shape, x.dtype, x.device))
    fill_gradient(recipe, dy, None, x, lse, to, settings.log, *hooks, settings.split_rows)
    return [dx, *summed(stores, by_operand)]


hooked_softmax = Operator(
    "hooked_softmax",
    inputs="x, *operands",
    outputs=2,
    settings=HookedSettings,
    makes=hooked_makes,
    forward=hooked_forward,
    saved="x, lse, *operands",
    saves=hooked_saves,
    gradients=hooked_gradients,
    backward=hooked_backward,
)


# --- steps, without and with hooks ----------------------------------------------------------------


def fill_result(
    recipe: Recipe,
    x: Operand,
    y: Operand,
    lse: Operand | None,
    log: bool,
    prologue: HookArguments = NO_HOOK,
    epilogue: HookArguments = NO_HOOK,
    split_rows: bool = False,
) -> None:
    """Fill y and lse; hooks and split_rows want an lse."""
    if y.numel() == 0:
        if lse is not None:
            lse.fill_(-math.inf)
        return
    x = x.rows()
    M, N = x.shape
    if lse is None and y.element_size() == x.element_size():
        config = configs.softmax_forward_shared(N, x.element_size())
        if config is not None and has_hopper_kernels(x.device):
            from .softmax_hopper import launch_forward_hopper  # which needs Gluon, as in norm_launch.py

            return launch_forward_hopper(recipe, x, y, log, config)
    if split_rows:
        config = configs.softmax_split(N, x.element_size())
    else:
        config = configs.softmax_forward(N, x.element_size(), lse is not None)
    numbers = (
        x.stride(0),
        M,
        N,
        prologue.arguments,
        epilogue.arguments,
        log,
        prologue.forward,
        epilogue.forward,
    )
    launch(recipe, FORWARD, config, (x, y, lse), numbers)


def fill_gradient(
    recipe: Recipe,
    dy: Operand,
    y: Operand | None,
    x: Operand | None,
    lse: Operand | None,
    dx: Operand,
    log: bool,
    prologue: HookArguments = NO_HOOK,
    epilogue: HookArguments = NO_HOOK,
    split_rows: bool = False,
) -> None:
    """Fill dx and the gradients of the hooks, from y or, as hooks and split_rows want, x and lse."""
    if dx.numel() == 0:
        return
    dy = dy.rows()
    M, N = dy.shape
    y, x = (None if t is None else t.rows() for t in (y, x))
    if split_rows:
        config = configs.softmax_split(N, dx.element_size())
    else:
        config = configs.softmax_backward(N, dx.element_size(), x is not None)
    tensors = (dy, y, x, None if lse is None else lse.contiguous(), dx)
    numbers = (
        dy.stride(0),
        0 if y is None else y.stride(0),
        0 if x is None else x.stride(0),
        M,
        N,
        prologue.arguments,
        prologue.gradients,
        epilogue.arguments,
        epilogue.gradients,
        log,
        prologue.forward,
        prologue.backward,
        epilogue.backward,
    )
    launch(recipe, BACKWARD, config, tensors, numbers, clears=True)


def launch(
    recipe: Recipe,
    kernels: tuple[Any, Any, Any],
    config: configs.RowConfig,
    tensors: tuple[Any, ...],
    numbers: tuple[Any, ...],
    clears: bool = False,
) -> None:
    """Launch the kernel that `config` calls for, of (rows a program, rows split, rows looped over).

    clears: whether the kernel for split rows does.
    """
    rows, split, looped = kernels
    if config.split:
        return launch_splits(recipe, split, config, tensors, numbers, clears)
    M = tensors[0].shape[0]
    if config.looped:
        recipe.launch(looped, M, *tensors, *numbers, **tile_of(config))
    else:
        programs = cdiv(M, config.rows)
        recipe.launch(rows, programs, *tensors, *numbers, R=config.rows, **tile_of(config))


# --- logsumexp ------------------------------------------------------------------------------------


class LogsumexpSettings(NamedTuple):
    dtype: torch.dtype


def logsumexp_makes(settings: LogsumexpSettings, x: Any) -> tuple[New, New | None]:
    """The result and, where it is not float32, also a float32 one, which the backward reads."""
    y, lse = (
        New.contiguous(x.shape[:-1], dtype, x.device) for dtype in (settings.dtype, torch.float32)
    )
    return y, None if settings.dtype == torch.float32 else lse


def logsumexp_forward(recipe: Recipe, settings: LogsumexpSettings, inputs, outputs) -> None:
    (x,), (y, lse) = inputs, outputs
    if settings.dtype == torch.float32:
        lse = y
    elif lse is None:
        lse = recipe.make(New.contiguous(y.shape, torch.float32, y.device))
    if x.numel() == 0:
        lse.fill_(-math.inf)
    else:
        x = x.rows()
        M, N = x.shape
        config = configs.logsumexp(N, x.element_size())
        tensors, numbers = (x, lse), (x.stride(0), M, N)
        if config.split:
            launch_splits(recipe, logsumexp_forward_split_kernel, config, tensors, numbers)
        else:
            programs, tile = cdiv(M, config.rows), tile_of(config)
            recipe.launch(logsumexp_forward_kernel, programs, *tensors, *numbers, R=config.rows, **tile)
    if lse is not y:
        recipe.compute(Tensor.copy_, y, lse)


def logsumexp_saves(settings: LogsumexpSettings, inputs, outputs) -> list[Any]:
    y, lse = outputs
    return [*inputs, y if lse is None else lse]


def logsumexp_gradients(settings: LogsumexpSettings, grads, saved, needs) -> tuple[New]:
    x, _ = saved
    return (New.contiguous(x.shape, x.dtype, x.device),)


def logsumexp_backward(recipe: Recipe, settings: LogsumexpSettings, grads, saved, made) -> None:
    (dy,), (x, lse), (dx,) = grads, saved, made
    if dx.numel() == 0:
        return
    x = x.rows()
    M, N = x.shape
    config = configs.logsumexp(N, x.element_size())
    programs = cdiv(M, config.rows) * cdiv(N, config.columns)
    tensors = dy.to(torch.float32).contiguous(), x, lse.contiguous(), dx
    numbers, tile = (x.stride(0), M, N), tile_of(config)
    recipe.launch(logsumexp_backward_kernel, programs, *tensors, *numbers, R=config.rows, **tile)


logsumexp = Operator(
    "logsumexp",
    inputs="x",
    outputs=2,
    settings=LogsumexpSettings,
    makes=logsumexp_makes,
    forward=logsumexp_forward,
    saved="x, lse",
    saves=logsumexp_saves,
    gradients=logsumexp_gradients,
    backward=logsumexp_backward,
)
