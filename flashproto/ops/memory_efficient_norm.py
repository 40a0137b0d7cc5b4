"""LayerNorm and RMSNorm that save y for the backward pass, not x or total: the operator's recipes; see
kernels/norm_recover.py.

Legend: norm_types.py.
"""

from __future__ import annotations

from typing import Any

import torch

from ..kernels.norm_recover import (
    recoverable_weight_kernel,
    recovered,
    recovered_unweighted,
)
from .call import Gradient, Operator
from .device import cdiv
from .hook_arguments import HookArguments, operand_rows
from .norm import Context, Settings, context
from .norm_launch import gradients_like, launch_backward, launch_forward, outputs_like
from .norm_types import NormSettings, statistics_in, statistics_like
from .recipe import New, Operand, Recipe


def weight_shift(casting: str) -> float:
    """What casting adds to the weight."""
    return 1.0 if casting == "gemma" else 0.0


def recoverable_weight(recipe: Recipe, weight: Operand, casting: str) -> Operand:
    """What xhat is multiplied by, float32."""
    weight = weight.contiguous()
    out = recipe.make(New.contiguous(weight.shape, torch.float32, weight.device))
    N = out.numel()
    shift = weight_shift(casting)
    recipe.launch(recoverable_weight_kernel, cdiv(N, 1024), weight, out, N, shift, C=1024)
    return out


def makes(settings: Settings, x: Any, residual: Any, weight: Any) -> list[New | None]:
    """y, total, rstd."""
    rstd = statistics_like(x, settings.normalized_ndim, False)
    return [*outputs_like(x, residual, x.dtype), rstd]


def forward(recipe: Recipe, settings: Settings, inputs: Any, outputs: list[Operand | None]) -> None:
    x, residual, weight = inputs
    y, total, rstd = outputs
    assert y is not None
    if y.numel() == 0:
        if rstd is not None:
            rstd.zero_()
        return
    ndim, eps, centered, casting = settings
    if weight is not None:
        weight = recoverable_weight(recipe, weight, casting)
        casting = "torch" if casting == "gemma" else casting
    filled = y, total, *statistics_in(rstd, False)
    how = NormSettings(ndim, eps, centered, casting)
    launch_forward(recipe, (x, residual, weight, None), filled, how)


def saves(settings: Settings, inputs: Any, outputs: Any) -> list[Any]:
    y, _, rstd = outputs
    return [y, inputs[2], rstd]


def gradients(context: Context, grads: Any, saved: Any, needs: Any) -> list[Gradient]:
    y, weight, _ = saved
    dy = y if grads[0] is None else grads[0]  # without one it is 0
    return gradients_like(y, weight, context, (dy, grads[1]), (*needs, False))[:3]


def backward(recipe: Recipe, context: Context, grads: Any, saved: Any, made: Any) -> None:
    (dy, dtotal), (y, weight, rstd) = grads, saved
    if dy is None:
        dy = recipe.make(New.contiguous(y.shape, y.dtype, y.device)).zero_()
    ndim, casting = context.normalized_ndim, context.casting
    own_rstd: Any = statistics_in(rstd, False)[1]
    lead = (*y.shape[: y.ndim - ndim], *(1,) * ndim)
    operands = [own_rstd.reshape(*lead), *([] if weight is None else [weight])]
    rows = tuple(operand_rows(t, y.shape, ndim) for t in operands)
    scalars = () if weight is None else (weight_shift(casting),)
    hook = recovered_unweighted if weight is None else recovered
    prologue = HookArguments(forward=hook, arguments=(rows, scalars))
    how = NormSettings(ndim, 0.0, context.centered, casting, prologue)
    tensors = y, None, weight, None, None, own_rstd
    launch_backward(recipe, dy, dtotal if context.has_residual else None, tensors, (*made, None), how)


memory_efficient_norm = Operator(
    "memory_efficient_norm",
    inputs="x, residual?, weight?",
    outputs=3,
    settings=Settings,
    makes=makes,
    forward=forward,
    saved="y, weight?, rstd",
    saves=saves,
    context=context,
    context_type=Context,
    gradients=gradients,
    backward=backward,
    differentiable=2,
)
