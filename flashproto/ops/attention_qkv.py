"""Attention on a fused projection: the kernels of ops/attention.py, with one gradient tensor.

Legend: qkv [B, S, (Hq + 2 Hkv) D], every token's heads of q, k and v side by side; out [B, Hq, S, D];
lse [B, Hq, S].
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from .. import plans
from ..variant import SCHEMA, Variant, pack, unpack
from .attention import (
    attention_forward,
    fill_gradients,
    hopper,
    hopper_settings,
    no_gradients,
    plan_forward,
)
from .autograd import (
    FirstDerivative,
    KernelFunction,
    differentiates,
    fake_of,
    kernel_op,
    recorder,
    use_op,
)
from .memory import maker


def attention_qkv(
    qkv: Tensor, q_heads: int, k_heads: int, variant: Variant, scale: float, backend: str
) -> tuple[Tensor, Tensor]:
    """Returns (out, lse), both differentiable; scale >= 0."""
    if use_op():
        forward = torch.ops.flashproto.attention_qkv_forward
        return forward(qkv, q_heads, k_heads, *pack(variant), scale, backend)
    return AttentionQkvFunction.apply(qkv, q_heads, k_heads, variant, scale, backend)


def split_heads(qkv: Tensor, q_heads: int, k_heads: int) -> tuple[Tensor, Tensor, Tensor]:
    """Views q [B, Hq, S, D], k and v [B, Hkv, S, D] of qkv."""
    heads = qkv.unflatten(2, (q_heads + 2 * k_heads, -1)).transpose(1, 2)
    q, k, v = heads.split((q_heads, k_heads, k_heads), 1)
    return q, k, v


def splitter(
    like: Tensor, q_heads: int, k_heads: int
) -> Callable[[Tensor], tuple[Tensor, Tensor, Tensor]]:
    """split_heads in less time, as a function of tensors of one shape and strides."""
    q, k, v = split_heads(like, q_heads, k_heads)
    q_shape, k_shape, strides = q.shape, k.shape, q.stride()
    to_k, to_v = (x.storage_offset() - like.storage_offset() for x in (k, v))

    def split(x):
        at = x.storage_offset()
        return (
            x.as_strided(q_shape, strides, at),
            x.as_strided(k_shape, strides, at + to_k),
            x.as_strided(k_shape, strides, at + to_v),
        )

    return split


def attention_qkv_forward(
    qkv: Tensor, q_heads: int, k_heads: int, variant: Variant, scale: float, backend: str
) -> tuple[Tensor, Tensor]:
    q, k, v = split_heads(qkv, q_heads, k_heads)
    return attention_forward(q, k, v, variant, scale, backend)


def attention_qkv_backward(
    qkv: Tensor, out: Tensor, lse: Tensor, dout: Tensor, dlse: Tensor | None,
    q_heads: int, k_heads: int, variant: Variant, scale: float, backend: str,
) -> Tensor:  # fmt: skip
    """The gradient of qkv, written once: contiguous, q's, k's and v's parts in place."""
    gradient = torch.empty(qkv.shape, dtype=qkv.dtype, device=qkv.device)
    fill_gradients(
        *split_heads(qkv, q_heads, k_heads), out, lse, dout, dlse,
        *split_heads(gradient, q_heads, k_heads), variant, scale, backend, True, True,
    )  # fmt: skip
    return gradient


# --- eager: autograd.Function --------------------------------------------------------------------


def setup_context(ctx, inputs, output) -> None:
    qkv, *ctx.settings = inputs
    ctx.save_for_backward(qkv, *output)
    ctx.set_materialize_grads(False)


def backward(ctx, launch, settings, dout: Tensor | None, dlse: Tensor | None):
    """Gradients of attention_qkv's six arguments, of which `settings` are the last five; `launch` calls
    attention_qkv_backward."""
    qkv, out, lse = ctx.saved_tensors
    if dout is None and dlse is None:
        return (None,) * 6
    if dout is None:
        dout = out.new_zeros(()).expand_as(out)
    return launch(qkv, out, lse, dout, dlse, *settings), *(None,) * 5


class AttentionQkvFunction(KernelFunction):
    """It has no jvp, so forward-mode differentiation raises instead of returning zeros."""

    forward = staticmethod(attention_qkv_forward)
    setup_context = staticmethod(setup_context)

    @staticmethod
    def backward(ctx, dout, dlse):
        return backward(ctx, AttentionQkvBackwardFunction.apply, ctx.settings, dout, dlse)


class AttentionQkv(NamedTuple):
    """A plan's parts.

    compute: qkv to (out, lse); gradient: (qkv, out, lse, dout) to that of qkv, None where backward goes
    its usual way; settings: of attention_qkv.
    """

    compute: Callable[[Tensor], tuple[Tensor, Tensor]]
    gradient: Callable[[Tensor, Tensor, Tensor, Tensor], Tensor] | None
    settings: tuple[int, int, Variant, float, str]


class PlannedAttentionQkvFunction(torch.autograd.Function):
    """For calls that follow a plan, see `plan`: `record` is all that such a call takes."""

    @staticmethod
    def forward(ctx, qkv, plan):
        out, lse = plan.compute(qkv)
        ctx.save_for_backward(qkv, out, lse)
        ctx.plan = plan
        return out

    @staticmethod
    def backward(ctx, dout):
        _, gradient, settings = ctx.plan
        if gradient is None or differentiates():
            return backward(ctx, AttentionQkvBackwardFunction.apply, settings, dout, None)[:2]
        return gradient(*ctx.saved_tensors, dout), None


record = recorder(PlannedAttentionQkvFunction)


def plan(
    qkv: Tensor, q_heads: int, k_heads: int, variant: Variant, scale: float, backend: str
) -> plans.Plan:
    """attention_qkv's out as a function of qkv, for such as are like this one; scale >= 0."""
    settings = q_heads, k_heads, variant, scale, backend
    q, k, v = split_heads(qkv, q_heads, k_heads)
    of_heads = plan_forward(q, k, v, variant, scale, backend)
    if of_heads is None:
        return lambda qkv: attention_qkv(qkv, *settings)[0]
    split = splitter(qkv, q_heads, k_heads)

    def compute(qkv):
        return of_heads(*split(qkv))

    gradient = None
    if backend == "hopper":
        strides, made = qkv.stride(), torch.empty(qkv.shape, dtype=qkv.dtype, device=qkv.device)
        new, split_new = maker(made), splitter(made, q_heads, k_heads)
        fill = hopper().plan_gradients(hopper_settings(variant, scale))

        def gradient(qkv, out, lse, dout):
            made = new()
            heads = split(qkv) if qkv.stride() == strides else split_heads(qkv, q_heads, k_heads)
            fill(*heads, out, lse, dout, None, *split_new(made))
            return made

    parts = AttentionQkv(compute, gradient, settings)
    return plans.ByGrad(lambda qkv: record(qkv, parts), lambda qkv: compute(qkv)[0])


class AttentionQkvBackwardFunction(FirstDerivative):
    """attention_qkv_backward."""

    forward = staticmethod(attention_qkv_backward)


# --- compile: torch.library ops ------------------------------------------------------------------


def forward_of_packed(qkv, q_heads, k_heads, tensors, ints, floats, variant, scale, backend):
    unpacked = unpack(tensors, ints, floats, variant)
    return attention_qkv_forward(qkv, q_heads, k_heads, unpacked, scale, backend)


def backward_of_packed(
    qkv, out, lse, dout, dlse, q_heads, k_heads, tensors, ints, floats, variant, scale, backend
):
    unpacked = unpack(tensors, ints, floats, variant)
    return attention_qkv_backward(qkv, out, lse, dout, dlse, q_heads, k_heads, unpacked, scale, backend)


SETTINGS = f"SymInt q_heads, SymInt k_heads, {SCHEMA}, float scale, str backend"
attention_qkv_forward_op = kernel_op(
    "flashproto::attention_qkv_forward",
    forward_of_packed,
    schema=f"(Tensor qkv, {SETTINGS}) -> (Tensor, Tensor)",
)
attention_qkv_backward_op = kernel_op(
    "flashproto::attention_qkv_backward",
    backward_of_packed,
    schema=f"(Tensor qkv, Tensor out, Tensor lse, Tensor dout, Tensor? dlse, {SETTINGS}) -> Tensor",
)


@fake_of(attention_qkv_forward_op)
def _(qkv, q_heads, k_heads, *settings):
    B, S, width = qkv.shape
    out = qkv.new_empty(B, S, q_heads, width // (q_heads + 2 * k_heads)).transpose(1, 2)
    return out, qkv.new_empty(B, q_heads, S, dtype=torch.float32)


@fake_of(attention_qkv_backward_op)
def _(qkv, *others):
    return qkv.new_empty(qkv.shape)


def _backward(ctx, dout, dlse):
    gradient, *_ = backward(ctx, torch.ops.flashproto.attention_qkv_backward, ctx.settings, dout, dlse)
    return gradient, *no_gradients(ctx.settings)


attention_qkv_forward_op.register_autograd(_backward, setup_context=setup_context)
