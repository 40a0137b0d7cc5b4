"""LayerNorm and RMSNorm with hooks, another dtype or split rows: the operator's recipes.

Legend: norm_types.py, hook_arguments.py.  Operands, the prologue's first, broadcast to x.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch

from .. import hooks
from .call import Gradient, Operator
from .hook_arguments import gradients_like as operand_gradients_like
from .hook_arguments import (
    hook_arguments,
    parts_of,
    stores_of,
    summed,
)
from .norm_launch import gradients_like, launch_backward, launch_forward, outputs_like
from .norm_types import NormSettings, statistics_in, statistics_like
from .recipe import New, Operand, Recipe


class Settings(NamedTuple):
    """dtype: y's.  A hook is its name, "" for none, and its scalars."""

    normalized_ndim: int
    eps: float
    centered: bool
    casting: str
    dtype: torch.dtype
    split_rows: bool
    prologue: str
    prologue_scalars: tuple[float, ...]
    epilogue: str
    epilogue_scalars: tuple[float, ...]


class Context(NamedTuple):
    """What the backward knows of a call beside the saved tensors."""

    normalized_ndim: int
    centered: bool
    casting: str
    split_rows: bool
    prologue: str
    prologue_scalars: tuple[float, ...]
    epilogue: str
    epilogue_scalars: tuple[float, ...]
    has_residual: bool
    x_dtype: torch.dtype
    residual_dtype: torch.dtype
    bias_dtype: torch.dtype


def makes(settings: Settings, x: Any, residual: Any, *_: Any) -> list[New | None]:
    """y, total, statistics."""
    statistics = statistics_like(x, settings.normalized_ndim, settings.centered)
    return [*outputs_like(x, residual, settings.dtype), statistics]


def forward(recipe: Recipe, settings: Settings, inputs: Any, outputs: list[Operand | None]) -> None:
    x, residual, weight, bias, *operands = inputs
    y, total, statistics = outputs
    assert y is not None
    if y.numel() == 0:
        if statistics is not None:
            statistics.zero_()
        return
    ndim, eps, centered, casting, _, split_rows, prologue, scalars, epilogue, after_scalars = settings
    before, after = parts_of(prologue, operands)
    how = NormSettings(
        ndim,
        eps,
        centered,
        casting,
        hook_arguments(prologue, before, scalars, x.shape, ndim),
        hook_arguments(epilogue, after, after_scalars, x.shape, ndim),
        split_rows,
    )
    filled = y, total, *statistics_in(statistics, centered)
    launch_forward(recipe, (x, residual, weight, bias), filled, how)


def saves(settings: Settings, inputs: Any, outputs: Any) -> list[Any]:
    """input is x, where there is a total to be saved as x, and the prologue's derivative reads it."""
    x, residual, weight, bias, *operands = inputs
    _, total, statistics = outputs
    reads = residual is not None and settings.prologue and hooks.get(settings.prologue).needs_value
    return [
        x if residual is None else total,
        x if reads else None,
        weight,
        bias if settings.epilogue else None,
        statistics,
        *operands,
    ]


def context(settings: Any, inputs: Any) -> Context:
    x, residual, _, bias, *_ = inputs
    ndim, _, centered, casting, _, *rest = settings
    dtypes = [x.dtype if t is None else t.dtype for t in (x, residual, bias)]
    return Context(*[ndim, centered, casting, *rest, residual is not None, *dtypes])


def gradients(context: Context, grads: Any, saved: Any, needs: Any) -> list[Gradient]:
    """With a prologue the gradient of the residual differs from that of x."""
    x, _, weight, _, _, *operands = saved
    dy = x if grads[0] is None else grads[0]  # without one the hooks have gradients, too
    apart = bool(context.prologue)
    made = gradients_like(x, weight, context, (dy, grads[1]), needs[:4], apart)
    return [*made, *operand_gradients_like(operands, needs[4:])]


def backward(recipe: Recipe, context: Context, grads: Any, saved: Any, made: Any) -> Any:
    dy, dtotal = grads
    x, input, weight, bias, statistics, *operands = saved
    if dy is None:
        dy = recipe.make(New.contiguous(x.shape, context.x_dtype, x.device)).zero_()
    ndim, centered, casting, split_rows, prologue, scalars, epilogue, after_scalars = context[:8]
    stores = stores_of(made[4:], x.shape)
    (before, after), (before_stores, after_stores) = (parts_of(prologue, t) for t in (operands, stores))
    first = hook_arguments(prologue, before, scalars, x.shape, ndim, before_stores)
    last = hook_arguments(epilogue, after, after_scalars, x.shape, ndim, after_stores)
    if context.has_residual:
        first = first._replace(forward=None)  # total holds its result
    elif prologue and hooks.get(prologue).needs_value:
        input = x
    how = NormSettings(ndim, 0.0, centered, casting, first, last, split_rows)
    tensors = x, input, weight, bias, *statistics_in(statistics, centered)
    dtotal = dtotal if context.has_residual else None
    launch_backward(recipe, dy, dtotal, tensors, made[:4], how)
    if x.numel() == 0:
        for store in stores:
            if store is not None:
                store.zero_()
    return [*made[:4], *summed(stores, made[4:])]


hooked_norm = Operator(
    "hooked_norm",
    inputs="x, residual?, weight?, bias?, *operands",
    outputs=3,
    settings=Settings,
    makes=makes,
    forward=forward,
    saved="x, input?, weight?, bias?, statistics, *operands",
    saves=saves,
    context=context,
    context_type=Context,
    gradients=gradients,
    backward=backward,
    differentiable=2,
)
