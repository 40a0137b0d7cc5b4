"""softmax and log_softmax: the plans of eager calls, see plans.py.

Legend: softmax.py.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from .. import plans
from .autograd import differentiates, recorder
from .memory import New, aligned, maker
from .softmax import (
    SoftmaxBackwardFunction,
    backward_launch,
    forward_launch,
    log_softmax,
    softmax,
    softmax_backward,
)


def recorder_of(
    compute: Callable[[Tensor], Tensor], gradient: Callable[[Tensor, Tensor], Tensor], log: bool,
    dtype: torch.dtype,
) -> Callable[..., Any]:  # fmt: skip
    """What records a call of a plan, a Function of the plan's own: an argument would take time.

    compute: x to y; gradient: (dy, y) to dx, see plan_gradient; dtype: x's.
    """

    class PlannedSoftmaxFunction(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            y = compute(x)
            ctx.save_for_backward(y)
            return y

        @staticmethod
        def backward(ctx, dy):
            (y,) = ctx.saved_tensors
            if differentiates():
                return SoftmaxBackwardFunction.apply(dy, y, log, dtype)
            return gradient(dy, y)

    return recorder(PlannedSoftmaxFunction)


def plan(x: Tensor, log: bool, dtype: torch.dtype) -> plans.Plan:
    """softmax or log_softmax as a function of x, for such as are like this one."""

    def anyhow(x):
        return log_softmax(x, dtype) if log else softmax(x, dtype)

    if x.numel() == 0:
        return anyhow
    x = aligned(x)
    y: Any = New.like(x.new_empty(x.shape, dtype=dtype))
    launch = forward_launch(x, y, None, log)
    compute = launch.bind(x, making=True)
    if compute is None:  # a copy of x
        return anyhow
    record = recorder_of(compute, plan_gradient(log, x.dtype), log, x.dtype)
    planned = plans.ByGrad(record, compute)
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
            kinds[key] = None if fill is None else (fill, maker(dx))
        found = kinds[key]
        if found is None:
            return softmax_backward(dy, y, log, dtype)
        fill, new_dx = found
        dx = new_dx()
        fill(dy, y, None, None, dx)
        return dx

    return gradient
