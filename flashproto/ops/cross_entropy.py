"""Cross entropy of logits: the operator's recipes.

Legend: logits [..., V], seen as x [M, V]; targets [...]; weight [V]; loss [...] or one number; z, lse,
m, l [...] float32.  What a call needs beside its results (the losses of the rows, the state that the
gradient is computed from, the denominator) lies in one piece of memory, `state`, float32:

    loss, z, lse, m, l: [M] each, padded to whole 16 bytes; the sum of z; the denominator

Where the loss is one number, the forward pass already writes the gradient, while the logits are in
cache.  The backward pass then has nothing left to do, unless the upstream gradient is not 1 (see
kernels/cross_entropy.py).  With float16 logits it is hardly ever 1: their gradients need a loss scale,
without which most are too small for float16.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .. import configs
from ..kernels.cross_entropy import (
    cross_entropy_backward_kernel,
    cross_entropy_forward_kernel,
    cross_entropy_total_kernel,
)
from . import call
from .call import Operator, steps
from .device import cdiv, multiprocessors
from .recipe import New, Operand, Recipe

f32 = torch.float32


class Options(NamedTuple):
    """softcap: 0 for none."""

    ignore_index: int
    label_smoothing: float
    z_loss: float
    softcap: float


class Settings(NamedTuple):
    """Options, and: at_once, whether the forward writes the gradient where one is wanted; inplace,
    whether the backward may write it over the logits."""

    ignore_index: int
    label_smoothing: float
    z_loss: float
    softcap: float
    reduction: str
    need_lse: bool
    at_once: bool
    inplace: bool

    @property
    def options(self) -> Options:
        return Options(*self[:4])


def settings_of(
    logits: Tensor, options: Options, reduction: str, need_lse: bool, inplace: bool
) -> Settings:
    """The settings of a call.  Where something wants to see the call's op, the op decides: it gives no
    memory away."""
    at_once = reduction != "none" and not need_lse and not inplace and logits.dtype != torch.float16
    if torch.compiler.is_compiling() or call.transforms_active():
        at_once = inplace = False
    elif call.through_op([logits]):
        at_once, inplace = at_once and call.wants_grad([logits]), False
    return Settings(*options, reduction, need_lse, at_once, inplace)


# --- the state in memory --------------------------------------------------------------------------


def row_bytes(M: int) -> int:
    """Bytes of a number for each of M rows, padded."""
    return 16 * cdiv(M, 4)


def new_state(M: int, device: torch.device) -> New:
    return New.contiguous((5 * row_bytes(M) // 4 + 8,), f32, device)


def rows_of(state: Operand, M: int) -> list[Operand]:
    """loss, z, lse, m, l, each [M]."""
    return [state.part(i * row_bytes(M), f32, M) for i in range(5)]


def totals_of(state: Operand, M: int) -> tuple[Operand, Operand]:
    """The sum of z and the denominator, each one number."""
    end = 5 * row_bytes(M)
    return state.part(end, f32), state.part(end + 16, f32)


# --- steps, also those of linear_cross_entropy.py ---------------------------------------------------

Weights = tuple[Operand | None, Operand | None]
"""The class weights as a kernel takes them, and their sum where it is needed."""


def constants(recipe: Recipe, weight: Operand | None, label_smoothing: float) -> Weights:
    if weight is None:
        return None, None
    total = None
    if label_smoothing:
        total = recipe.compute(sum_in_float32, weight, like=New.contiguous((), f32, weight.device))
    return weight.contiguous(), total


def sum_in_float32(x: Tensor) -> Tensor:
    return x.sum(dtype=f32)


def launch_forward(
    recipe: Recipe,
    x: Operand,
    targets: Operand,
    weights: Weights,
    denominator: Operand | None,
    losses: Sequence[Operand],
    dx: Operand | None,
    options: Options,
    keep: bool,
) -> None:
    """Fill `losses` (loss, z, lse, m, l) [M] of x [M, V] and targets [M], and dx, which may be x."""
    M, V = x.shape
    ignore_index, smoothing, z_loss, softcap = options
    choose = configs.cross_entropy_forward if dx is None else configs.cross_entropy_forward_gradient
    config = choose(V, x.element_size())
    # By the stride alone: a row's sums then have one order, wherever the row is in the matrix.
    aligned = x.stride(0) * x.element_size() % 16 == 0
    recipe.launch(
        cross_entropy_forward_kernel, cdiv(M, config.rows),
        x, targets, *weights, denominator, *losses, dx,
        x.stride(0), 0 if dx is None else dx.stride(0), M, V, ignore_index, float(smoothing),
        float(z_loss), float(softcap or 1), smoothing != 0, softcap != 0, keep,
        aligned, config.rows, config.groups, config.elements,
        num_warps=config.num_warps, maxnreg=config.max_registers,
    )  # fmt: skip


def launch_backward(
    recipe: Recipe,
    dloss: Operand,
    dlse: Operand | None,
    x: Operand,
    targets: Operand,
    weights: Weights,
    denominator: Operand | None,
    state: Sequence[Operand],
    dx: Operand,
    options: Options,
    V: int,
    first: int = 0,
    done: bool = False,
) -> None:
    """Fill dx, which may be x [M, N], columns `first` and on of V; state is (lse, m, l).  done: where
    the number dloss is 1, dx is left as it is."""
    M, N = x.shape
    ignore_index, smoothing, z_loss, softcap = options
    config = configs.cross_entropy_backward(N, x.element_size())
    tiles = cdiv(M, config.rows) * cdiv(N, config.columns)
    recipe.launch(
        cross_entropy_backward_kernel, min(tiles, config.programs * multiprocessors(x.device)),
        dloss, dlse, x, targets, *weights, denominator, *state, dx,
        x.stride(0), dx.stride(0), 0 if dloss.ndim == 0 else 1, M, N, V, first, tiles, ignore_index,
        float(smoothing), float(z_loss), float(softcap or 1), done, smoothing != 0, softcap != 0,
        config.rows, config.groups, config.elements,
        num_warps=config.num_warps, maxnreg=config.max_registers,
    )  # fmt: skip


def add_up(
    recipe: Recipe,
    targets: Operand,
    weight: Operand | None,
    losses: Sequence[Operand] | None,
    sums: Sequence[Operand | None],
    V: int,
    ignore_index: int,
    mean: bool,
) -> None:
    """Fill `sums` (loss, z, denominator), one number each, from `losses` (loss, z) of all rows and
    their targets; without losses the denominator alone.  They are summed in a fixed order.  mean: loss
    and z are divided by the denominator, which is NaN in place of 0."""
    config = configs.cross_entropy_total()
    P = cdiv(targets.numel(), config.length)
    partial = [
        recipe.make(New.contiguous((P,), f32, targets.device)) if P != 1 or x is None else x
        for x in sums
    ]
    if P:
        recipe.launch(
            cross_entropy_total_kernel,
            P,
            targets,
            weight,
            *(losses or (None, None)),
            *partial,
            targets.numel(),
            V,
            ignore_index,
            mean and P == 1,
            config.length,
            config.tile,
            num_warps=config.num_warps,
        )
    if P == 1:
        return
    *results, denominator = sums
    total = recipe.make(New.contiguous((), f32, targets.device)) if denominator is None else denominator
    recipe.compute(functools.partial(add_denominators, mean=mean), total, partial[2])
    if losses is not None:
        for result, parts in zip(results, partial[:2], strict=True):
            if result is not None:
                recipe.compute(functools.partial(add_into, mean=mean), result, parts, total)


def add_denominators(result: Tensor, parts: Tensor, mean: bool) -> None:
    total = parts.sum()
    result.copy_(torch.where(total == 0, math.nan, total) if mean else total)


def add_into(result: Tensor, parts: Tensor, divisor: Tensor, mean: bool) -> None:
    """The sum of the parts, divided if it is to be a mean."""
    total = parts.sum()
    result.copy_(total / divisor if mean else total)


STATE = 3  # the number of that output

# --- the operator -----------------------------------------------------------------------------------


def makes(settings: Settings, logits: Any, targets: Any, weight: Any) -> tuple[New | None, ...]:
    """loss, lse, z, state, dlogits."""
    device = logits.device
    loss = New.contiguous(targets.shape if settings.reduction == "none" else (), f32, device)
    return (
        loss,
        New.contiguous(targets.shape, f32, device) if settings.need_lse else None,
        loss,
        new_state(math.prod(targets.shape), device),
        New.contiguous(logits.shape, logits.dtype, device) if settings.at_once else None,
    )


def forward(recipe: Recipe, settings: Settings, inputs: list[Any], outputs: list[Any]) -> None:
    logits, targets, weight = inputs
    loss, lse, z, state, dlogits = outputs
    M, V = targets.numel(), logits.shape[-1]
    options, mean = settings.options, settings.reduction == "mean"
    one_number = settings.reduction != "none"
    targets, x = targets.contiguous().reshape(M), logits.rows()
    state = recipe.make(new_state(M, logits.device)) if state is None else state
    if STATE in recipe.asked_for:  # an op's outputs have no elements that nobody wrote
        state.zero_()
    weights = constants(recipe, weight, options.label_smoothing)
    losses, (total_z, denominator) = rows_of(state, M), totals_of(state, M)
    if lse is not None:
        losses[2] = lse
    if not one_number:
        losses[0], losses[1] = loss, losses[1] if z is None else z
    ignore_index = options.ignore_index
    if dlogits is not None and mean:
        add_up(recipe, targets, weights[0], None, (None, None, denominator), V, ignore_index, mean)
    if logits.numel():
        above = denominator if dlogits is not None and mean else None
        dx = None if dlogits is None else dlogits.rows()
        launch_forward(recipe, x, targets, weights, above, losses, dx, options, settings.need_lse)
    if one_number:
        sums = loss, total_z if z is None else z, denominator
        add_up(recipe, targets, weights[0], losses[:2], sums, V, ignore_index, mean)


def saves(settings: Settings, inputs: Sequence[Any], outputs: Sequence[Any]) -> list[Any]:
    _, lse, _, state, dlogits = outputs
    return [*inputs, lse, state, dlogits]


def gradients(settings: Settings, grads: Any, saved: Any, needs: Any) -> list[New | None]:
    logits = saved[0]
    return [New.contiguous(logits.shape, logits.dtype, logits.device), None, None]


def backward(
    recipe: Recipe, settings: Settings, grads: Any, saved: Any, made: Any
) -> list[Operand | None]:
    (dloss, dlse), (logits, targets, weight, lse, state, done) = grads, saved
    M, V = targets.numel(), logits.shape[-1]
    options, x, dlogits = settings.options, logits.rows(), made[0]
    if dloss is None:
        dloss = recipe.make(New.contiguous((), f32, logits.device)).zero_()
    if done is not None:
        # Without its version counter: changes of the gradient do not concern the graph that saved it.
        like = New.contiguous(logits.shape, logits.dtype, logits.device)
        dlogits = recipe.compute(contiguous_data, done, like=like)
    elif settings.inplace and not recipe.functional and is_matrix_in_place(logits, x):
        like = New(logits.shape, logits.strides, logits.dtype, logits.device)
        dlogits = recipe.compute(claimed, logits, like=like)
    if logits.numel():
        state = state.contiguous()  # hooks of saved tensors need not keep strides
        rows = rows_of(state, M)[2:]
        if lse is not None:
            rows[0] = lse.contiguous()
        divisor = totals_of(state, M)[1] if settings.reduction == "mean" else None
        launch_backward(
            recipe,
            dloss.contiguous(),
            None if dlse is None else dlse.contiguous(),
            x,
            targets.contiguous().reshape(M),
            constants(recipe, weight, options.label_smoothing),
            divisor,
            rows,
            dlogits.rows(),
            options,
            V,
            done=done is not None,
        )
    return [dlogits, None, None]


def is_matrix_in_place(logits: Operand, x: Operand) -> bool:
    """Whether rows x are the logits' own memory, and no two overlap."""
    return x.variable == logits.variable and (x.stride(0) >= x.shape[1] or x.shape[0] <= 1)


def contiguous_data(x: Tensor) -> Tensor:
    return x.contiguous().data


def claimed(logits: Tensor) -> Tensor:
    """The memory of the logits, which nothing else needs any more."""
    torch.autograd.graph.increment_version(logits)
    return logits.detach()


cross_entropy = Operator(
    "cross_entropy",
    inputs="logits, targets, weight?",
    outputs=5,
    settings=Settings,
    makes=makes,
    forward=forward,
    saved="logits, targets, weight?, lse?, state, dlogits?",
    saves=saves,
    gradients=gradients,
    backward=backward,
    differentiable=2,
    gives_away=5,
)


# --- for linear_cross_entropy.py, of tensors --------------------------------------------------------


def rows_forward(x, targets, weights, denominator, losses, dx, options: Options, keep: bool) -> None:
    """launch_forward."""
    steps(_rows_forward, [x, targets, *weights, denominator, *losses, dx], (options, keep))


def _rows_forward(recipe, tensors, options, keep):
    x, targets, weight, weight_sum, denominator, *losses, dx = tensors
    weights = weight, weight_sum
    launch_forward(recipe, x, targets, weights, denominator, losses, dx, options, keep)


def rows_backward(
    dloss, dlse, x, targets, weights, denominator, state, dx, options: Options, V: int, first: int = 0
) -> None:
    """launch_backward."""
    steps(
        _rows_backward,
        [dloss, dlse, x, targets, *weights, denominator, *state, dx],
        (options, V, first),
    )


def _rows_backward(recipe, tensors, options, V, first):
    dloss, dlse, x, targets, weight, weight_sum, denominator, *state, dx = tensors
    weights = weight, weight_sum
    launch_backward(recipe, dloss, dlse, x, targets, weights, denominator, state, dx, options, V, first)


def total(
    targets: Tensor,
    weight: Tensor | None,
    losses: Sequence[Tensor] | None,
    V: int,
    ignore_index: int,
    mean: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    """(loss, z, denominator) by add_up; without losses the denominator alone is filled."""
    loss, z, denominator = (torch.empty((), dtype=f32, device=targets.device) for _ in range(3))
    steps(
        _total,
        [targets, weight, *(losses or (None, None)), loss, z, denominator],
        (V, ignore_index, mean),
    )
    return loss, z, denominator


def _total(recipe, tensors, V, ignore_index, mean):
    targets, weight, loss, z, *sums = tensors
    losses = None if loss is None else (loss, z)
    add_up(recipe, targets, weight, losses, sums, V, ignore_index, mean)


def empty_losses(logits: Tensor, shape: torch.Size) -> tuple[Tensor, ...]:
    """(loss, z, lse, m, l) of rows, uninitialised."""
    return tuple(logits.new_empty(shape, dtype=f32) for _ in range(5))


def class_weights(weight: Tensor | None, label_smoothing: float) -> tuple[Tensor | None, Tensor | None]:
    """`constants` of tensors."""
    if weight is None:
        return None, None
    return weight.contiguous(), sum_in_float32(weight) if label_smoothing else None


def fake_losses(logits: Tensor, targets: Tensor, reduction: str) -> tuple[Tensor, ...]:
    """(loss, z, lse, m, l, denominator)."""
    losses = empty_losses(logits, targets.shape)
    denominator = losses[0].new_empty(() if reduction == "mean" else 0)
    if reduction == "none":
        return *losses, denominator
    return losses[0].new_empty(()), losses[1].new_empty(()), *losses[2:], denominator
