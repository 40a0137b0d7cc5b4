"""LayerNorm and RMSNorm: the operator's recipes.

Legend: norm_types.py.  y is the norm of x over its last `normalized_ndim` dimensions, or that of
total = x + residual as rounded to the wider of the two dtypes.  centered is LayerNorm, otherwise
RMSNorm.  casting: see kernels/norm.py.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch

from .. import configs
from .call import Gradient, Operator
from .norm_launch import (
    gradients_like,
    launch_backward,
    launch_forward,
    outputs_like,
    through_sum,
)
from .norm_types import NormSettings, sizes, statistics_in, statistics_like
from .recipe import New, Operand, Recipe


class Settings(NamedTuple):
    normalized_ndim: int
    eps: float
    centered: bool
    casting: str


class Context(NamedTuple):
    """What the backward knows of a call beside the saved tensors."""

    normalized_ndim: int
    eps: float
    centered: bool
    casting: str
    has_residual: bool
    x_dtype: torch.dtype
    residual_dtype: torch.dtype
    bias_dtype: torch.dtype


def makes(settings: Settings, x: Any, residual: Any, weight: Any, bias: Any) -> list[New | None]:
    """y, total, statistics; of narrow rows the backward works the statistics out again."""
    statistics = None
    if configs.norm_keeps_statistics(sizes(x, settings.normalized_ndim)[1]):
        statistics = statistics_like(x, settings.normalized_ndim, settings.centered)
    return [*outputs_like(x, residual, x.dtype), statistics]


def forward(recipe: Recipe, settings: Settings, inputs: Any, outputs: list[Operand | None]) -> None:
    y, total, statistics = outputs
    assert y is not None
    if y.numel() == 0:
        if statistics is not None:
            statistics.zero_()
        return
    filled = y, total, *statistics_in(statistics, settings.centered)
    launch_forward(recipe, inputs, filled, NormSettings(*settings))


def saves(settings: Settings, inputs: list[Any], outputs: list[Any]) -> list[Any]:
    x, residual, weight, _ = inputs
    _, total, statistics = outputs
    return [x if residual is None else total, weight, statistics]


def context(settings: Settings, inputs: Any) -> Context:
    x, residual, _, *bias = inputs
    dtypes = [x.dtype if t is None else t.dtype for t in (x, residual, *bias, x)]
    return Context(*settings, residual is not None, *dtypes[:3])


def gradients(context: Context, grads: Any, saved: Any, needs: Any) -> list[Gradient]:
    x, weight, _ = saved
    return gradients_like(x, weight, context, grads, needs)


def backward(recipe: Recipe, context: Context, grads: Any, saved: Any, made: Any) -> Any:
    (dy, dtotal), (x, weight, statistics) = grads, saved
    dtotal = dtotal if context.has_residual else None
    if dy is None:
        return None if dtotal is None else [*through_sum(dtotal, made), None, None]
    saved = x, None, weight, None, *statistics_in(statistics, context.centered)
    settings = NormSettings(*context[:4])
    launch_backward(recipe, dy, dtotal, saved, made, settings)
    return None


norm = Operator(
    "norm",
    inputs="x, residual?, weight?, bias?",
    outputs=3,
    settings=Settings,
    makes=makes,
    forward=forward,
    saved="x, weight?, statistics?",
    saves=saves,
    context=context,
    context_type=Context,
    gradients=gradients,
    backward=backward,
    differentiable=2,
)
