"""softmax, log_softmax and logsumexp over the last dimension: the operators' recipes.

Legend: x, y, dy, dx [..., N], seen as [M, N]; lse [...] float32.
"""

from __future__ import annotations

import math
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
from .hook_arguments import NO_HOOK, HookArguments
from .recipe import New, Operand, Recipe
from .rows import launch_splits

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
    options = {"C": config.columns, "num_warps": config.num_warps, "maxnreg": config.max_registers}
    if config.looped:
        recipe.launch(looped, M, *tensors, *numbers, **options)
    else:
        recipe.launch(rows, cdiv(M, config.rows), *tensors, *numbers, R=config.rows, **options)


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
        if config.split:
            kernel = logsumexp_forward_split_kernel
            launch_splits(recipe, kernel, config, (x, lse), (x.stride(0), M, N))
        else:
            recipe.launch(
                logsumexp_forward_kernel,
                cdiv(M, config.rows),
                x,
                lse,
                x.stride(0),
                M,
                N,
                R=config.rows,
                C=config.columns,
                num_warps=config.num_warps,
            )
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
    recipe.launch(
        logsumexp_backward_kernel,
        cdiv(M, config.rows) * cdiv(N, config.columns),
        dy.to(torch.float32).contiguous(),
        x,
        lse.contiguous(),
        dx,
        x.stride(0),
        M,
        N,
        R=config.rows,
        C=config.columns,
        num_warps=config.num_warps,
    )


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
