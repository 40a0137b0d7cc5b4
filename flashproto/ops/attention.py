"""Attention: launches of the portable kernels, and the autograd.Function and torch.library ops of both
kernel backends, "triton" and "hopper" (whose launches are in attention_hopper.py).

Legend: q [B, Hq, Sq, D], k [B, Hkv, Sk, D], v [B, Hkv, Sk, Dv]; out [B, Hq, Sq, Dv]; lse [B, Hq, Sq].
"""

from __future__ import annotations

import math

import torch
import triton
from torch import Tensor

from .. import configs
from ..kernels.attention_backward import (
    attention_backward_keys_kernel,
    attention_backward_queries_kernel,
    attention_backward_rows_kernel,
)
from ..kernels.attention_forward import attention_forward_kernel
from .autograd import FirstDerivative, refuse_tangents, use_op
from .launch import allows_tf32, capability, on_device

LOG2E = math.log2(math.e)
# Scores times this are 0 in float32: a scale of 0 means a uniform softmax, and stays positive.
SMALLEST_SCALE = 2.0**-100
ROWS_BLOCK_M = 64


def attention(
    q: Tensor, k: Tensor, v: Tensor, causal: bool, offset: int, scale: float, backend: str
) -> tuple[Tensor, Tensor]:
    """Returns (out, lse), both differentiable.  Query i sees key j if j <= i + offset, when causal."""
    if scale < 0:
        q, scale = -q, -scale
    apply = torch.ops.flashproto.attention_forward if use_op() else AttentionFunction.apply
    return apply(q, k, v, causal, offset, scale, backend)


# --- launches ------------------------------------------------------------------------------------


def empty_like_heads(x: Tensor, head_dim: int) -> Tensor:
    """An uninitialised [B, H, S, head_dim] in the memory order of x's heads and tokens, so that what
    arrives as a transposed [B, S, H, D] leaves as one."""
    B, H, S, _ = x.shape
    if x.stride(1) < x.stride(2):
        return x.new_empty(B, S, H, head_dim).transpose(1, 2)
    return x.new_empty(B, H, S, head_dim)


def empty_gradients(
    q: Tensor, k: Tensor, v: Tensor, need_dq: bool, need_dkv: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """(dq, dk, dv), uninitialised, dv in k's memory order; one that is not needed is of no elements."""
    q, k = q if need_dq else q[:0], k if need_dkv else k[:0]
    D, Dv = q.shape[3], v.shape[3]
    return empty_like_heads(q, D), empty_like_heads(k, D), empty_like_heads(k, Dv)


def is_wide(*tensors: Tensor) -> bool:
    """Whether offsets inside the matrix of one batch entry and head, tiles' overhang included, can
    pass 2^31 elements."""
    return any((t.shape[2] + 256) * t.stride(2) + 512 * t.stride(3) >= 2**31 for t in tensors)


def kernel_arguments(q: Tensor, k: Tensor, v: Tensor, causal: bool) -> dict[str, object]:
    """The compile-time facts that every attention kernel shares."""
    D, Dv = q.shape[3], v.shape[3]
    return {
        "D": D,
        "DV": Dv,
        "BLOCK_D": configs.padded_head_dim(D),
        "BLOCK_DV": configs.padded_head_dim(Dv),
        "CAUSAL": causal,
        "TF32": q.dtype == torch.float32 and allows_tf32(),
    }


def attention_forward(
    q: Tensor, k: Tensor, v: Tensor, causal: bool, offset: int, scale: float, backend: str
) -> tuple[Tensor, Tensor]:
    """Launch the forward kernel of `backend`; scale >= 0."""
    B, Hq, Sq, D = q.shape
    Hkv, Sk, Dv = v.shape[1], v.shape[2], v.shape[3]
    out = empty_like_heads(q, Dv)
    lse = torch.empty(B, Hq, Sq, dtype=torch.float32, device=q.device)
    if out.numel() == 0:
        return out, lse
    if backend == "hopper":
        from . import attention_hopper  # needs Gluon, which not every Triton and device has

        positive_scale = max(scale, SMALLEST_SCALE)
        attention_hopper.attention_forward(q, k, v, out, lse, causal, offset, positive_scale)
        return out, lse
    config = configs.attention_forward(capability(q.device), q.dtype.itemsize, D, Dv)
    grid = (triton.cdiv(Sq, config.block_m) * B * Hq,)
    with on_device(q.device):
        attention_forward_kernel[grid](
            q, k, v, out, lse, *q.stride(), *k.stride(), *v.stride(), *out.stride(),
            Hq, Hq // Hkv, Sq, Sk, offset, max(scale, SMALLEST_SCALE) * LOG2E,
            **kernel_arguments(q, k, v, causal), BLOCK_M=config.block_m, BLOCK_N=config.block_n,
            EXACT=q.dtype == torch.float32,
            WIDE=is_wide(q, k, v, out),
            num_warps=config.num_warps, num_stages=config.num_stages,
        )  # fmt: skip
    return out, lse


def attention_backward(
    q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, dout: Tensor, dlse: Tensor | None,
    causal: bool, offset: int, scale: float, backend: str, need_dq: bool, need_dkv: bool,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """Launch the backward kernels; returns (dq, dk, dv) as empty_gradients describes them.

    Backend "hopper" copies a dout that TMA cannot read (expanded, or of odd strides).
    """
    B, Hq, Sq, D = q.shape
    Hkv, Sk, Dv = v.shape[1], v.shape[2], v.shape[3]
    gradients = dq, dk, dv = empty_gradients(q, k, v, need_dq, need_dkv)
    if q.numel() == 0 or k.numel() == 0:
        dq, dk, dv = (t.zero_() for t in gradients)
        return dq, dk, dv
    dout = dout.to(q.dtype)
    if backend == "hopper":
        from . import attention_hopper

        attention_hopper.attention_backward(
            q, k, v, out, lse, dout, dlse, dq, dk, dv, causal, offset, scale, max(scale, SMALLEST_SCALE)
        )
        return gradients
    lse2, delta = torch.empty_like(lse), torch.empty_like(lse)
    arguments = kernel_arguments(q, k, v, causal)
    keys, queries = configs.attention_backward(capability(q.device), q.dtype.itemsize, D, Dv, causal)
    sizes = (Hq, Hq // Hkv, Sq, Sk, offset, max(scale, SMALLEST_SCALE) * LOG2E, scale)
    strides = (*q.stride(), *k.stride(), *v.stride(), *dout.stride())
    wide = is_wide(q, k, v, out, dout, *gradients)
    with on_device(q.device):
        attention_backward_rows_kernel[(triton.cdiv(Sq, ROWS_BLOCK_M) * B * Hq,)](
            out, dout, lse, dlse, lse2, delta, *out.stride(), *dout.stride(),
            *((0, 0, 0) if dlse is None else dlse.stride()),
            Hq, Sq, DV=Dv, BLOCK_DV=arguments["BLOCK_DV"], BLOCK_M=ROWS_BLOCK_M,
            HAS_DLSE=dlse is not None, WIDE=wide, num_warps=4,
        )  # fmt: skip
        if need_dkv:
            attention_backward_keys_kernel[(triton.cdiv(Sk, keys.block_n) * B * Hkv,)](
                q, k, v, dout, lse2, delta, dk, dv, *strides, *dk.stride(), *dv.stride(), *sizes,
                **arguments, BLOCK_M=keys.block_m, BLOCK_N=keys.block_n, WIDE=wide,
                num_warps=keys.num_warps, num_stages=keys.num_stages,
            )  # fmt: skip
        if need_dq:
            attention_backward_queries_kernel[(triton.cdiv(Sq, queries.block_m) * B * Hq,)](
                q, k, v, dout, lse2, delta, dq, *strides, *dq.stride(), *sizes,
                **arguments, BLOCK_M=queries.block_m, BLOCK_N=queries.block_n, WIDE=wide,
                num_warps=queries.num_warps, num_stages=queries.num_stages,
            )  # fmt: skip
    return gradients


# --- eager: autograd.Function --------------------------------------------------------------------


def setup_context(ctx, inputs, output) -> None:
    q, k, v, ctx.causal, ctx.offset, ctx.scale, ctx.backend = inputs
    ctx.save_for_backward(q, k, v, *output)
    ctx.set_materialize_grads(False)


def backward(ctx, launch, dout: Tensor | None, dlse: Tensor | None):
    """Gradients of attention's seven arguments; `launch` calls attention_backward."""
    q, k, v, out, lse = ctx.saved_tensors
    if dout is None and dlse is None:
        return (None,) * 7
    if dout is None:
        dout = out.new_zeros(()).expand_as(out)
    need_q, need_k, need_v = ctx.needs_input_grad[:3]
    dq, dk, dv = launch(
        q, k, v, out, lse, dout, dlse, ctx.causal, ctx.offset, ctx.scale, ctx.backend,
        need_q, need_k or need_v,
    )  # fmt: skip
    return (
        dq if need_q else None,
        dk if need_k else None,
        dv if need_v else None,
        *(None,) * 4,
    )


class AttentionFunction(torch.autograd.Function):
    """It has no jvp, so forward-mode differentiation raises instead of returning zeros."""

    @staticmethod
    def forward(q, k, v, causal, offset, scale, backend):
        return attention_forward(q, k, v, causal, offset, scale, backend)

    @staticmethod
    def setup_context(ctx, inputs, output):
        setup_context(ctx, inputs, output)

    @staticmethod
    def backward(ctx, dout, dlse):
        return backward(ctx, AttentionBackwardFunction.apply, dout, dlse)


class AttentionBackwardFunction(FirstDerivative):
    """attention_backward."""

    @staticmethod
    def forward(*args):
        return attention_backward(*args)


# --- compile: torch.library ops ------------------------------------------------------------------


attention_forward_op = torch.library.custom_op(
    "flashproto::attention_forward",
    attention_forward,
    mutates_args=(),
    schema="(Tensor q, Tensor k, Tensor v, bool causal, SymInt offset, float scale, str backend) "
    "-> (Tensor, Tensor)",
)
attention_backward_op = torch.library.custom_op(
    "flashproto::attention_backward",
    attention_backward,
    mutates_args=(),
    schema="(Tensor q, Tensor k, Tensor v, Tensor out, Tensor lse, Tensor dout, Tensor? dlse, "
    "bool causal, SymInt offset, float scale, str backend, bool need_dq, bool need_dkv) "
    "-> (Tensor, Tensor, Tensor)",
)


@attention_forward_op.register_fake
def _(q, k, v, causal, offset, scale, backend):
    return empty_like_heads(q, v.shape[3]), q.new_empty(q.shape[:3], dtype=torch.float32)


@attention_backward_op.register_fake
def _(q, k, v, out, lse, dout, dlse, causal, offset, scale, backend, need_dq, need_dkv):
    return empty_gradients(q, k, v, need_dq, need_dkv)


def _backward(ctx, dout, dlse):
    return backward(ctx, torch.ops.flashproto.attention_backward, dout, dlse)


attention_forward_op.register_autograd(_backward, setup_context=setup_context)
refuse_tangents(attention_forward_op)
