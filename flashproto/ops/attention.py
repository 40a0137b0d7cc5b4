"""Attention: the autograd.Function and torch.library ops of the kernel backends "triton" and "hopper",
whose launches are in attention_triton.py and attention_hopper.py.

Legend: q [B, Hq, Sq, D], k [B, Hkv, Sk, D], v [B, Hkv, Sk, Dv]; out [B, Hq, Sq, Dv]; lse [B, Hq, Sq].
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from types import ModuleType
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .. import plans
from ..variant import SCHEMA, Variant, pack, unpack
from .attention_triton import SMALLEST_SCALE, forward_launch, launch_backward
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


def attention(
    q: Tensor, k: Tensor, v: Tensor, variant: Variant, scale: float, backend: str
) -> tuple[Tensor, Tensor]:
    """Returns (out, lse), both differentiable."""
    if scale < 0:
        q, scale = -q, -scale
    if use_op():
        return torch.ops.flashproto.attention_forward(q, k, v, *pack(variant), scale, backend)
    return AttentionFunction.apply(q, k, v, variant, scale, backend)


# --- launches ------------------------------------------------------------------------------------


def empty_like_heads(x: Tensor, head_dim: int) -> Tensor:
    """An uninitialised [B, H, S, head_dim] in the memory order of x's heads and tokens, so that what
    arrives as a transposed [B, S, H, D] leaves as one."""
    B, H, S, D = x.shape
    if head_dim == D and x.is_contiguous():
        return torch.empty_like(x)
    _, head, token, _ = x.stride()
    heads_inside = head < token
    strides = (head_dim, H * head_dim) if heads_inside else (S * head_dim, head_dim)
    return torch.empty_strided(
        (B, H, S, head_dim), (H * S * head_dim, *strides, 1), dtype=x.dtype, device=x.device
    )


def empty_gradients(
    q: Tensor, k: Tensor, v: Tensor, need_dq: bool, need_dkv: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """(dq, dk, dv), uninitialised, dv in k's memory order; one that is not needed is of no elements."""
    q, k = q if need_dq else q[:0], k if need_dkv else k[:0]
    D, Dv = q.shape[3], v.shape[3]
    return empty_like_heads(q, D), empty_like_heads(k, D), empty_like_heads(k, Dv)


@functools.cache
def hopper() -> ModuleType:
    """The launches of backend "hopper", which need Gluon: not every Triton has it."""
    from . import attention_hopper

    return attention_hopper


def hopper_settings(variant: Variant, scale: float) -> Any:
    """Settings of the launches of backend "hopper"; scale >= 0."""
    return hopper().Settings(variant, scale, max(scale, SMALLEST_SCALE))


def attention_forward(
    q: Tensor, k: Tensor, v: Tensor, variant: Variant, scale: float, backend: str
) -> tuple[Tensor, Tensor]:
    """Launch the forward kernel of `backend`; scale >= 0."""
    B, Hq, Sq, _ = q.shape
    out = empty_like_heads(q, v.shape[3])
    lse = torch.empty(B, Hq, Sq, dtype=torch.float32, device=q.device)
    if out.numel() == 0:
        return out, lse
    if backend == "hopper":
        positive_scale = max(scale, SMALLEST_SCALE)
        hopper().attention_forward(q, k, v, out, lse, variant, positive_scale)
        return out, lse
    forward_launch(q, k, v, out, lse, variant, scale)()
    return out, lse


def attention_backward(
    q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, dout: Tensor, dlse: Tensor | None,
    variant: Variant, scale: float, backend: str, need_dq: bool, need_dkv: bool,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """Launch the backward kernels; returns (dq, dk, dv) as empty_gradients describes them.

    Backend "hopper" copies a dout that TMA cannot read (expanded, or of odd strides).
    """
    gradients = empty_gradients(q, k, v, need_dq, need_dkv)
    fill_gradients(
        q, k, v, out, lse, dout, dlse, *gradients, variant, scale, backend, need_dq, need_dkv
    )
    return gradients


def fill_gradients(
    q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, dout: Tensor, dlse: Tensor | None,
    dq: Tensor, dk: Tensor, dv: Tensor,
    variant: Variant, scale: float, backend: str, need_dq: bool, need_dkv: bool,
) -> None:  # fmt: skip
    """attention_backward into given tensors, of which dk and dv have the same strides."""
    if q.numel() == 0 or k.numel() == 0:
        for gradient in (dq, dk, dv):
            gradient.zero_()
        return
    lse = lse.contiguous()  # hooks of saved tensors need not keep strides
    if dout.dtype != q.dtype:
        dout = dout.to(q.dtype)
    if backend == "hopper":
        shared = hopper_settings(variant, scale)
        hopper().attention_backward(q, k, v, out, lse, dout, dlse, dq, dk, dv, shared)
        return
    launch_backward(q, k, v, out, lse, dout, dlse, dq, dk, dv, variant, scale, need_dq, need_dkv)


# --- eager: autograd.Function --------------------------------------------------------------------


def setup_context(ctx, inputs, output) -> None:
    q, k, v, *ctx.settings = inputs
    ctx.save_for_backward(q, k, v, *output)
    ctx.set_materialize_grads(False)


def backward(ctx, launch, settings, dout: Tensor | None, dlse: Tensor | None):
    """Gradients of attention's six arguments, of which `settings` are the last three; `launch` calls
    attention_backward."""
    q, k, v, out, lse = ctx.saved_tensors
    if dout is None and dlse is None:
        return (None,) * 6
    if dout is None:
        dout = out.new_zeros(()).expand_as(out)
    need_q, need_k, need_v = ctx.needs_input_grad[:3]
    dq, dk, dv = launch(q, k, v, out, lse, dout, dlse, *settings, need_q, need_k or need_v)
    return dq if need_q else None, dk if need_k else None, dv if need_v else None, *(None,) * 3


class AttentionFunction(KernelFunction):
    """It has no jvp, so forward-mode differentiation raises instead of returning zeros."""

    forward = staticmethod(attention_forward)
    setup_context = staticmethod(setup_context)

    @staticmethod
    def backward(ctx, dout, dlse):
        return backward(ctx, AttentionBackwardFunction.apply, ctx.settings, dout, dlse)


class Attention(NamedTuple):
    """A plan's parts.

    compute: (q, k, v) to (out, lse); gradients: (q, k, v, out, lse, dout, dlse) to (dq, dk, dv), None
    where backward goes its usual way; settings: of attention.
    """

    compute: Callable[..., tuple[Tensor, Tensor]]
    gradients: Callable[..., tuple[Tensor, Tensor, Tensor]] | None
    settings: tuple[Variant, float, str]
    return_lse: bool


class PlannedAttentionFunction(torch.autograd.Function):
    """For calls that follow a plan, see `plan`: `record` is all that such a call takes."""

    @staticmethod
    def forward(ctx, q, k, v, plan):
        out, lse = plan.compute(q, k, v)
        ctx.save_for_backward(q, k, v, out, lse)
        ctx.plan = plan
        ctx.set_materialize_grads(False)
        return (out, lse) if plan.return_lse else out

    @staticmethod
    def backward(ctx, dout, dlse=None):
        _, gradients, settings, _ = ctx.plan
        if gradients is None or dout is None or differentiates():
            return backward(ctx, AttentionBackwardFunction.apply, settings, dout, dlse)[:4]
        dq, dk, dv = gradients(*ctx.saved_tensors, dout, dlse)
        need_q, need_k, need_v, _ = ctx.needs_input_grad
        return dq if need_q else None, dk if need_k else None, dv if need_v else None, None


record = recorder(PlannedAttentionFunction)


def plan(
    q: Tensor, k: Tensor, v: Tensor, variant: Variant, scale: float, backend: str, return_lse: bool
) -> plans.Plan:
    """attention as a function of its tensors, for such as are like these; returns out or (out, lse)."""
    settings = variant, scale, backend

    def anyhow(q, k, v):
        results = attention(q, k, v, *settings)
        return results if return_lse else results[0]

    compute = None if scale < 0 else plan_forward(q, k, v, *settings)
    if compute is None:
        return anyhow
    gradients = None
    if backend == "hopper":
        D = q.shape[3]
        new_dq, new_dk = (maker(empty_like_heads(x, D)) for x in (q, k))
        fill = hopper().plan_gradients(hopper_settings(variant, scale))

        def gradients(q, k, v, out, lse, dout, dlse):
            dq, dk, dv = new_dq(), new_dk(), new_dk()
            fill(q, k, v, out, lse, dout, dlse, dq, dk, dv)
            return dq, dk, dv

    parts = Attention(compute, gradients, settings, return_lse)

    def recorded(q, k, v):
        return record(q, k, v, parts)

    def without_lse(q, k, v):
        return compute(q, k, v)[0]

    return plans.ByGrad(recorded, compute if return_lse else without_lse)


def plan_forward(
    q: Tensor, k: Tensor, v: Tensor, variant: Variant, scale: float, backend: str
) -> Callable[..., tuple[Tensor, Tensor]] | None:
    """attention_forward as a function of (q, k, v), for such as are like these; None for empty ones."""
    B, Hq, Sq, _ = q.shape
    out = empty_like_heads(q, v.shape[3])
    if out.numel() == 0 or k.numel() == 0:
        return None
    lse = torch.empty(B, Hq, Sq, dtype=torch.float32, device=q.device)
    new_out, new_lse = maker(out), maker(lse)
    if backend == "hopper":
        positive_scale = max(scale, SMALLEST_SCALE)
        fill = hopper().plan_forward(
            q.shape, k.shape, variant, positive_scale, q.device, q.dtype,
            q.stride(), k.stride(), v.stride(), out.stride(),
        )  # fmt: skip
    else:
        tensors = (q, k, v, out, lse)
        fill = forward_launch(*tensors, variant, scale).bind(*tensors)

    def compute(q, k, v):
        out, lse = new_out(), new_lse()
        fill(q, k, v, out, lse)
        return out, lse

    return compute


class AttentionBackwardFunction(FirstDerivative):
    """attention_backward."""

    forward = staticmethod(attention_backward)


# --- compile: torch.library ops ------------------------------------------------------------------


def forward_of_packed(q, k, v, tensors, ints, floats, variant, scale, backend):
    return attention_forward(q, k, v, unpack(tensors, ints, floats, variant), scale, backend)


def no_gradients(settings: Sequence[object]) -> list[list[None] | None]:
    """Of an op's settings, as torch.library wants them: a list for one of tensors or of nothing."""

    def of(x: object) -> list[None] | None:
        if not isinstance(x, list) or any(not isinstance(y, Tensor) for y in x):
            return None
        return [None] * len(x)

    return [of(x) for x in settings]


def backward_of_packed(
    q, k, v, out, lse, dout, dlse, tensors, ints, floats, variant, scale, backend, need_dq, need_dkv
):
    unpacked = unpack(tensors, ints, floats, variant)
    return attention_backward(
        q, k, v, out, lse, dout, dlse, unpacked, scale, backend, need_dq, need_dkv
    )


attention_forward_op = kernel_op(
    "flashproto::attention_forward",
    forward_of_packed,
    schema=f"(Tensor q, Tensor k, Tensor v, {SCHEMA}, float scale, str backend) -> (Tensor, Tensor)",
)
attention_backward_op = kernel_op(
    "flashproto::attention_backward",
    backward_of_packed,
    schema="(Tensor q, Tensor k, Tensor v, Tensor out, Tensor lse, Tensor dout, Tensor? dlse, "
    f"{SCHEMA}, float scale, str backend, bool need_dq, bool need_dkv) -> (Tensor, Tensor, Tensor)",
)


@fake_of(attention_forward_op)
def _(q, k, v, *settings):
    return empty_like_heads(q, v.shape[3]), q.new_empty(q.shape[:3], dtype=torch.float32)


@fake_of(attention_backward_op)
def _(q, k, v, out, lse, dout, dlse, *settings):
    *_, need_dq, need_dkv = settings
    return empty_gradients(q, k, v, need_dq, need_dkv)


def _backward(ctx, dout, dlse):
    dq, dk, dv, *_ = backward(ctx, torch.ops.flashproto.attention_backward, ctx.settings, dout, dlse)
    return dq, dk, dv, *no_gradients(ctx.settings)


attention_forward_op.register_autograd(_backward, setup_context=setup_context)
