"""softmax and log_softmax: the plans of eager calls, see plans.py.

Legend: softmax.py.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from .. import plans
from .autograd import differentiates, recorder
from .softmax import (
    SoftmaxBackwardFunction,
    backward_launch,
    forward_launch,
    log_softmax,
    softmax,
    softmax_backward,
)


class Softmax(NamedTuple):
    """A plan's parts.

    compute: x to y; gradient: (dy, y) to dx, see plan_gradient; dtype: x's.
    """

    compute: Callable[[Tensor], Tensor]
    gradient: Callable[[Tensor, Tensor], Tensor]
    log: bool
    dtype: torch.dtype


class PlannedSoftmaxFunction(torch.autograd.Function):
    """For calls that follow a plan, see `plan`: `record` is all that such a call takes."""

    @staticmethod
    def forward(ctx, x, plan):
        y = plan.compute(x)
        ctx.save_for_backward(y)
        ctx.plan = plan
        return y

    @staticmethod
    def backward(ctx, dy):
        (y,), (_, gradient, log, dtype) = ctx.saved_tensors, ctx.plan
        if differentiates():
            return SoftmaxBackwardFunction.apply(dy, y, log, dtype), None
        return gradient(dy, y), None


record = recorder(PlannedSoftmaxFunction)


def plan(x: Tensor, log: bool, dtype: torch.dtype) -> plans.Plan:
    """softmax or log_softmax as a function of x, for such as are like this one."""

    def anyhow(x):
        return log_softmax(x, dtype) if log else softmax(x, dtype)

    if x.numel() == 0:
        return anyhow
    x = plans.aligned(x)
    y = x.new_empty(x.shape, dtype=dtype)
    launch = forward_launch(x, y, None, log)
    lse = () if launch.aligned else (None,)  # the kernels of aligned rows take none
    fill = launch.bind(x, y, *lse)
    if fill is None:  # a copy of x
        return anyhow

    new_y = plans.maker(y)

    def compute(x):
        y = new_y()
        fill(x, y, *lse)
        return y

    parts = Softmax(compute, plan_gradient(log, x.dtype), log, x.dtype)

    def recorded(x):
        return record(x, parts)

    planned = plans.ByGrad(recorded, compute)
    return plans.where_aligned(planned, anyhow) if launch.aligned else planned


def plan_gradient(log: bool, dtype: torch.dtype) -> Callable[[Tensor, Tensor], Tensor]:
    """softmax_backward as a function of (dy, y), for tensors of one shape, dtype and device; strides
    may differ, as hooks of saved tensors do not keep them."""
    kinds: dict[tuple[object, ...], tuple[Callable[..., None], Callable[[], Tensor]] | None] = {}

    def gradient(dy: Tensor, y: Tensor) -> Tensor:
        key = dy.stride(), y.stride()
        if key not in kinds:
            dx = y.new_empty(y.shape, dtype=dtype)
            fill = backward_launch(dy, y, None, None, dx, log).bind(dy, y, None, None, dx)
            kinds[key] = None if fill is None else (fill, plans.maker(dx))
        found = kinds[key]
        if found is None:
            return softmax_backward(dy, y, log, dtype)
        fill, new_dx = found
        dx = new_dx()
        fill(dy, y, None, None, dx)
        return dx

    return gradient
