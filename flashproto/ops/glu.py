"""Gated linear units: launches of the kernels, their autograd.Function and torch.library ops.

Legend: gate, up, y, dy [..., N]; with `halves` gate is x [..., 2N], whose halves are gate and up, and
its gradient is one tensor [..., 2N].
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from .. import configs
from ..kernels.glu import glu_backward_kernel, glu_forward_kernel
from .autograd import FirstDerivative, KernelFunction, fake_of, kernel_op, use_op
from .launch import Launch, cdiv, launcher
from .memory import New
from .rows import as_rows

launch_forward = launcher(glu_forward_kernel, tensors=3)
launch_backward = launcher(glu_backward_kernel, tensors=5)


def glu(gate: Tensor, up: Tensor | None, activation: str, halves: bool) -> Tensor:
    """act(gate) * up, act(gate) where up is None, or with halves act(gate[..., :N]) * gate[..., N:]."""
    if use_op():
        return torch.ops.flashproto.glu(gate, up, activation, halves)
    return GluFunction.apply(gate, up, activation, halves)


# --- launches ------------------------------------------------------------------------------------


def parts_of(gate: Tensor, up: Tensor | None, halves: bool) -> tuple[Tensor, Tensor | None]:
    """(gate, up) [M, N] of unit column stride: views where memory allows."""
    if not halves:
        return as_rows(gate), None if up is None else as_rows(up)
    x = as_rows(gate)
    N = x.shape[1] // 2
    return x[:, :N], x[:, N:]


def one_row(*tensors: Tensor | None) -> Any:
    """The matrices, each as one row where all of them are contiguous."""
    if all(t is None or t.is_contiguous() for t in tensors):
        return [None if t is None else t.view(1, -1) for t in tensors]
    return tensors


def glu_forward(gate: Tensor, up: Tensor | None, activation: str, halves: bool) -> Tensor:
    """Launch the forward kernel."""
    y = empty_output(gate, halves)
    if y.numel() > 0:
        forward_launch(gate, up, y, activation, halves)()
    return y


def forward_launch(
    gate: Tensor, up: Tensor | None, y: Tensor | New, activation: str, halves: bool
) -> Launch:
    """The launch that fills y, of some elements."""
    gate, up = one_row(*parts_of(gate, up, halves))
    numbers = gate.stride(0), 0 if up is None else up.stride(0), *gate.shape
    return launch_of_tiles(launch_forward, gate, (gate, up, y, *numbers), activation)


def launch_of_tiles(launch: Any, like: Tensor, arguments: tuple[Any, ...], activation: str) -> Launch:
    """The launch of a kernel that goes over matrices like this one by tiles."""
    M, N = like.shape
    config = configs.glu(N, like.element_size())
    programs = cdiv(M, config.rows) * cdiv(N, config.columns)
    options = {
        "ACT": activation, "R": config.rows, "C": config.columns, "num_warps": config.num_warps
    }  # fmt: skip
    return Launch(launch, programs, arguments, options)


def empty_output(gate: Tensor, halves: bool) -> Tensor:
    shape = gate.shape
    return gate.new_empty((*shape[:-1], shape[-1] // 2) if halves else shape)


def empty_gradients(
    gate: Tensor, up: Tensor | None, need_dgate: bool, need_dup: bool
) -> tuple[Tensor, Tensor]:
    """(dgate, dup), uninitialised; one that is not asked for is of no elements."""
    dgate = gate.new_empty(gate.shape if need_dgate else 0)
    return dgate, gate.new_empty(gate.shape if need_dup and up is not None else 0)


def glu_backward(
    dy: Tensor,
    gate: Tensor,
    up: Tensor | None,
    activation: str,
    halves: bool,
    need_dgate: bool,
    need_dup: bool,
) -> tuple[Tensor, Tensor]:
    """Launch the backward kernel; results as empty_gradients, with halves one in dgate."""
    gradients = empty_gradients(gate, up, need_dgate, need_dup)
    if dy.numel() > 0:
        backward_launch(dy, gate, up, gradients, activation, halves)()
    return gradients


def backward_launch(
    dy: Tensor, gate: Tensor, up: Tensor | None, gradients: tuple[Tensor, Tensor], activation: str,
    halves: bool,
) -> Launch:  # fmt: skip
    """The launch that fills those gradients that have elements."""
    inputs = parts_of(gate, up, halves)
    if halves:
        outputs: tuple[Tensor | None, ...] = parts_of(gradients[0], None, True)
    else:
        outputs = tuple(as_rows(t) if t.numel() else None for t in gradients)
    dy, gate, up, dgate, dup = tensors = one_row(as_rows(dy), *inputs, *outputs)
    numbers = (
        dy.stride(0), gate.stride(0), 0 if up is None else up.stride(0),
        (dup if dgate is None else dgate).stride(0), *gate.shape,
    )  # fmt: skip
    return launch_of_tiles(launch_backward, gate, (*tensors, *numbers), activation)


# --- autograd --------------------------------------------------------------------------------------


def setup_context(ctx, inputs, output) -> None:
    gate, up, ctx.activation, ctx.halves = inputs
    ctx.save_for_backward(gate, up)


def backward(ctx, launch, dy: Tensor):
    """Gradients of glu's four arguments; `launch` calls glu_backward."""
    needs = ctx.needs_input_grad[:2]
    gradients = launch(dy, *ctx.saved_tensors, ctx.activation, ctx.halves, *needs)
    return *(g if need else None for g, need in zip(gradients, needs, strict=True)), None, None


class GluFunction(KernelFunction):
    """glu."""

    @staticmethod
    def forward(gate, up, activation, halves):
        return glu_forward(gate, up, activation, halves)

    @staticmethod
    def setup_context(ctx, inputs, output):
        setup_context(ctx, inputs, output)

    @staticmethod
    def backward(ctx, dy):
        return backward(ctx, GluBackwardFunction.apply, dy)


class GluBackwardFunction(FirstDerivative):
    """glu_backward."""

    @staticmethod
    def forward(*args):
        return glu_backward(*args)


# --- compile: torch.library ops ------------------------------------------------------------------

glu_op = kernel_op(
    "flashproto::glu",
    glu_forward,
    schema="(Tensor gate, Tensor? up, str activation, bool halves) -> Tensor",
)
glu_backward_op = kernel_op(
    "flashproto::glu_backward",
    glu_backward,
    schema="(Tensor dy, Tensor gate, Tensor? up, str activation, bool halves, bool need_dgate, "
    "bool need_dup) -> (Tensor, Tensor)",
)


@fake_of(glu_op)
def _(gate, up, activation, halves):
    return empty_output(gate, halves)


@fake_of(glu_backward_op)
def _(dy, gate, up, activation, halves, need_dgate, need_dup):
    return empty_gradients(gate, up, need_dgate, need_dup)


def _backward(ctx, dy):
    return backward(ctx, torch.ops.flashproto.glu_backward, dy)


glu_op.register_autograd(_backward, setup_context=setup_context)
