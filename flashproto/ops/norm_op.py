"""LayerNorm and RMSNorm: the torch.library ops, which compiled code calls; they follow plans.

Legend: norm_launch.py.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from .. import plans
from .autograd import fake_of, kernel_op
from .launch import takes_addresses
from .memory import New, aligned, maker
from .norm import backward as gradients
from .norm import setup_context
from .norm_launch import (
    How,
    empty_gradients,
    empty_outputs,
    forward_launch,
    keeps_statistics,
    norm_backward,
    norm_forward,
)
from .norm_plan import bind_gradients

# --- forward -------------------------------------------------------------------------------------


def forward(
    x: Tensor,
    residual: Tensor | None,
    weight: Tensor | None,
    bias: Tensor | None,
    normalized_ndim: int,
    eps: float,
    centered: bool,
    casting: str = "torch",
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """norm_forward, by a plan where there is one."""
    inputs, how = (x, residual, weight, bias), (normalized_ndim, eps, centered, casting)
    tensors = [t for t in inputs if t is not None]
    kind = "norm op", residual is None, weight is None, bias is None, *how
    if (plan := plans.find(kind, tensors)) is not None:
        return plan(*tensors)
    plans.keep(plans.key(kind, tensors), lambda: plan_forward(inputs, how))
    return norm_forward(*inputs, *how)


def plan_forward(inputs: Any, how: tuple[int, float, bool, str]) -> plans.Plan:
    """norm_forward as a function of those of x, residual, weight and bias that are given, for such as
    are like these."""
    given = [t is not None for t in inputs]

    def anyhow(*tensors):
        rest = iter(tensors)
        return norm_forward(*[next(rest) if there else None for there in given], *how)

    x, residual, _, _ = inputs
    if x.numel() == 0 or not takes_addresses(x.device):
        return anyhow
    normalized_ndim, _, centered, _ = how
    kept = keeps_statistics(x, normalized_ndim)
    results = empty_outputs(x, residual, normalized_ndim, centered, kept)
    inputs = tuple(t if t is None else aligned(t) for t in inputs)
    outputs: Any = tuple(New.like(t) if t.numel() else None for t in results)
    launch = forward_launch(inputs, outputs, How(*how))
    fill = launch.bind(*inputs, making=True)
    if fill is None:
        return anyhow
    nothing = [None if t.numel() else maker(t) for t in results]
    alone = nothing.count(None) == 1

    def planned(*tensors):
        made = fill(*tensors)
        rest = iter((made,) if alone else made)
        return tuple(next(rest) if new is None else new() for new in nothing)

    return plans.where_aligned(planned, anyhow) if launch.aligned else planned


# --- backward ------------------------------------------------------------------------------------


def backward(
    dy: Tensor,
    dtotal: Tensor | None,
    x: Tensor,
    weight: Tensor | None,
    mean: Tensor,
    rstd: Tensor,
    *settings: Any,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """norm_backward, by a plan where there is one."""
    saved = dy, dtotal, x, weight, mean, rstd
    tensors = [t for t in saved if t is not None]
    kind = "norm backward op", dtotal is None, weight is None, *settings
    if (plan := plans.find(kind, tensors)) is not None:
        return plan(*tensors)
    plans.keep(plans.key(kind, tensors), lambda: plan_backward(saved, *settings))
    return norm_backward(*saved, *settings)


def plan_backward(
    saved: Any, normalized_ndim: int, eps: float, centered: bool, x_dtype: torch.dtype,
    residual_dtype: torch.dtype, bias_dtype: torch.dtype, need_dweight: bool, need_dbias: bool,
    casting: str = "torch",
) -> plans.Plan:  # fmt: skip
    """norm_backward as a function of those of its tensors that are given, for such as these."""
    dtypes, wanted = (x_dtype, residual_dtype, bias_dtype), (need_dweight, need_dbias)
    has_dtotal, has_weight = saved[1] is not None, saved[3] is not None

    def all_six(dy, *rest):
        dtotal, *rest = rest if has_dtotal else (None, *rest)
        x, weight, mean, rstd = rest if has_weight else (rest[0], None, *rest[1:])
        return dy, dtotal, x, weight, mean, rstd

    def anyhow(*tensors):
        return norm_backward(
            *all_six(*tensors), normalized_ndim, eps, centered, *dtypes, *wanted, casting
        )

    dy, dtotal, x, weight, mean, rstd = saved
    if x.numel() == 0 or not takes_addresses(x.device):
        return anyhow
    kept = keeps_statistics(x, normalized_ndim)
    has_mean = kept and centered
    statistics = mean if has_mean else None, rstd if kept else None
    how = How(normalized_ndim, eps, centered, casting)
    bound = bind_gradients(x, weight, *statistics, dy, dtotal, wanted, how, dtypes)
    if bound is None:
        return anyhow
    compute = bound.compute
    made = empty_gradients(x, weight, *dtypes, normalized_ndim, *wanted)
    nothing = [None if t.numel() else maker(t) for t in made]

    def planned(*tensors):
        dy, dtotal, x, weight, mean, rstd = all_six(*tensors)
        at_mean = mean.data_ptr() if has_mean else None
        at_rstd = rstd.data_ptr() if kept else None
        made = compute(x, weight, at_mean, at_rstd, dy, dtotal)
        return tuple(t if new is None else new() for t, new in zip(made, nothing, strict=True))

    return plans.where_aligned(planned, anyhow) if bound.aligned else planned


# --- compile: torch.library ops ------------------------------------------------------------------

norm_op = kernel_op(
    "flashproto::norm",
    forward,
    schema="(Tensor x, Tensor? residual, Tensor? weight, Tensor? bias, int normalized_ndim, "
    'float eps, bool centered, str casting="torch") -> (Tensor, Tensor, Tensor, Tensor)',
)
norm_backward_op = kernel_op(
    "flashproto::norm_backward",
    backward,
    schema="(Tensor dy, Tensor? dtotal, Tensor x, Tensor? weight, Tensor mean, Tensor rstd, "
    "int normalized_ndim, float eps, bool centered, ScalarType x_dtype, ScalarType residual_dtype, "
    'ScalarType bias_dtype, bool need_dweight, bool need_dbias, str casting="torch") '
    "-> (Tensor, Tensor, Tensor, Tensor)",
)


@fake_of(norm_op)
def _(x, residual, weight, bias, normalized_ndim, eps, centered, casting="torch"):
    kept = keeps_statistics(x, normalized_ndim)
    return empty_outputs(x, residual, normalized_ndim, centered, kept)


@fake_of(norm_backward_op)
def _(
    dy, dtotal, x, weight, mean, rstd, normalized_ndim, eps, centered, x_dtype, residual_dtype,
    bias_dtype, need_dweight, need_dbias, casting="torch",
):  # fmt: skip
    return empty_gradients(
        x, weight, x_dtype, residual_dtype, bias_dtype, normalized_ndim, need_dweight, need_dbias
    )


def _backward(ctx, dy, dtotal, dmean, drstd):
    launch = torch.ops.flashproto.norm_backward
    return gradients(ctx.saved_tensors, ctx.needs_input_grad, launch, ctx.settings, dy, dtotal)


norm_op.register_autograd(_backward, setup_context=setup_context)
