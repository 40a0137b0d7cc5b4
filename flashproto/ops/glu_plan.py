"""Gated linear units: the plans of eager calls, see plans.py.

Legend: glu.py.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from .. import plans
from .autograd import differentiates, recorder
from .glu import (
    GluBackwardFunction,
    backward_launch,
    empty_gradients,
    empty_output,
    forward_launch,
    glu,
    glu_backward,
)
from .launch import Launch, takes_addresses
from .memory import Memory, New, maker


def recorder_of(
    compute: Callable[..., Tensor], gradients: Callable[..., tuple[Tensor | None, ...]],
    activation: str, halves: bool,
) -> Callable[..., Any]:  # fmt: skip
    """What records a call of a plan, a Function of the plan's own: an argument would take time.

    compute: gate and up, if it is given, to y; gradients: see plan_gradients.
    """

    class PlannedGluFunction(torch.autograd.Function):
        @staticmethod
        def forward(ctx, *inputs):
            ctx.save_for_backward(*inputs)
            return compute(*inputs)

        @staticmethod
        def backward(ctx, dy):
            inputs, needs = ctx.saved_tensors, ctx.needs_input_grad
            if not differentiates():
                return gradients(dy, inputs, needs)
            given = inputs if len(inputs) == 2 else (*inputs, None)
            wanted = needs if len(needs) == 2 else (*needs, False)
            made = GluBackwardFunction.apply(dy, *given, activation, halves, *wanted)
            return pick(made, needs)

    return recorder(PlannedGluFunction)


def pick(made: tuple[Tensor, Tensor], needs: tuple[bool, ...]) -> tuple[Tensor | None, ...]:
    """The gradients of as many inputs as there are, None where one is not needed."""
    return tuple(gradient if need else None for gradient, need in zip(made, needs, strict=False))


def addresses(launch: Launch, at: tuple[int, ...]) -> Launch:
    """The launch with the arguments of these places bound as Memory."""
    arguments = list(launch.arguments)
    for i in at:
        arguments[i] = Memory(0, arguments[i].dtype, arguments[i].get_device())
    return launch._replace(arguments=tuple(arguments))


def plan(gate: Tensor, up: Tensor | None, activation: str, halves: bool) -> plans.Plan:
    """glu as a function of gate and, if it is given, up, for such as are like these."""

    def anyhow(gate, up=None):
        return glu(gate, up, activation, halves)

    y = empty_output(gate, halves)
    if y.numel() == 0 or not takes_addresses(gate.device):
        return anyhow
    new_y: Any = New.like(y)
    launch = forward_launch(gate, up, new_y, activation, halves)
    behind = y.shape[-1] * y.element_size()
    if not halves:
        compute = launch.bind(gate, up, making=True)
    elif launch.arguments[0].data_ptr() != gate.data_ptr():
        compute = None
    else:
        of_halves = addresses(launch, (0, 1)).bound(making=True)

        def compute(x):
            at = x.data_ptr()
            return of_halves(at, at + behind)

    if compute is None:  # a copy of gate or up
        return anyhow
    gradients = plan_gradients(activation, halves, behind)
    return plans.ByGrad(recorder_of(compute, gradients, activation, halves), compute)


def plan_gradients(
    activation: str, halves: bool, behind: int
) -> Callable[..., tuple[Tensor | None, ...]]:
    """The gradients as a function of (dy, the inputs, which of these need one), for tensors of one
    shape, dtype and device; strides may differ, as hooks of saved tensors do not keep them.

    behind: bytes from gate to up where they are halves.
    """
    kinds: dict[tuple[object, ...], Callable[..., tuple[Tensor | None, ...]]] = {}

    def gradients(dy, inputs, needs):
        key = dy.stride(), *(x.stride() for x in inputs), needs
        found = kinds.get(key)
        if found is None:
            found = kinds[key] = plan_gradients_like(dy, inputs, needs, activation, halves, behind)
        return found(dy, *inputs)

    return gradients


def plan_gradients_like(
    dy: Tensor, inputs: tuple[Tensor, ...], needs: tuple[bool, ...], activation: str, halves: bool,
    behind: int,
) -> Callable[..., tuple[Tensor | None, ...]]:  # fmt: skip
    """plan_gradients of tensors like these: of their strides too."""
    need_dgate, need_dup = needs if len(needs) == 2 else (*needs, False)

    def anyhow(dy, gate, up=None):
        return pick(glu_backward(dy, gate, up, activation, halves, need_dgate, need_dup), needs)

    gate, up = inputs[0], inputs[1] if len(inputs) == 2 else None
    made = empty_gradients(gate, up, need_dgate, need_dup)
    launch = backward_launch(dy, gate, up, made, activation, halves)
    own = launch.arguments
    if halves:
        if (own[0].data_ptr(), own[1].data_ptr()) != (dy.data_ptr(), gate.data_ptr()):
            return anyhow
        new, fill_halves = maker(made[0]), addresses(launch, (1, 2, 3, 4)).bound()

        def of_halves(dy, x):
            dx = new()
            at, to = x.data_ptr(), dx.data_ptr()
            fill_halves(dy, at, at + behind, to, to + behind)
            return dx

        return of_halves
    fill = launch.bind(dy, gate, up)
    if fill is None:
        return anyhow
    new_dgate, new_dup = (maker(t if t.numel() else None) for t in made)

    def planned(dy, gate, up=None):
        dgate, dup = new_dgate(), new_dup()
        fill(dy, gate, up, dgate, dup)
        return (dgate, dup) if len(needs) == 2 else dgate

    return planned
