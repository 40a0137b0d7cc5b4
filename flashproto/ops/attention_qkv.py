"""Attention on a fused projection: the kernels of ops/attention.py, with one gradient tensor.

Legend: qkv [B, S, (Hq + 2 Hkv) D], every token's heads of q, k and v side by side; out [B, Hq, S, D];
lse [B, Hq, S].
"""

from __future__ import annotations

import torch
from torch import Tensor

from .attention import attention_forward, fill_gradients
from .autograd import FirstDerivative, KernelFunction, refuse_tangents, use_op


def attention_qkv(
    qkv: Tensor, q_heads: int, k_heads: int, causal: bool, scale: float, backend: str
) -> tuple[Tensor, Tensor]:
    """Returns (out, lse), both differentiable; scale >= 0."""
    apply = torch.ops.flashproto.attention_qkv_forward if use_op() else AttentionQkvFunction.apply
    return apply(qkv, q_heads, k_heads, causal, scale, backend)


def split_heads(qkv: Tensor, q_heads: int, k_heads: int) -> tuple[Tensor, Tensor, Tensor]:
    """Views q [B, Hq, S, D], k and v [B, Hkv, S, D] of qkv."""
    heads = qkv.unflatten(2, (q_heads + 2 * k_heads, -1)).transpose(1, 2)
    q, k, v = heads.split((q_heads, k_heads, k_heads), 1)
    return q, k, v


def attention_qkv_forward(
    qkv: Tensor, q_heads: int, k_heads: int, causal: bool, scale: float, backend: str
) -> tuple[Tensor, Tensor]:
    q, k, v = split_heads(qkv, q_heads, k_heads)
    return attention_forward(q, k, v, causal, 0, scale, backend)


def attention_qkv_backward(
    qkv: Tensor, out: Tensor, lse: Tensor, dout: Tensor, dlse: Tensor | None,
    q_heads: int, k_heads: int, causal: bool, scale: float, backend: str,
) -> Tensor:  # fmt: skip
    """The gradient of qkv, written once: contiguous, q's, k's and v's parts in place."""
    gradient = torch.empty(qkv.shape, dtype=qkv.dtype, device=qkv.device)
    fill_gradients(
        *split_heads(qkv, q_heads, k_heads), out, lse, dout, dlse,
        *split_heads(gradient, q_heads, k_heads), causal, 0, scale, backend, True, True,
    )  # fmt: skip
    return gradient


# --- eager: autograd.Function --------------------------------------------------------------------


def setup_context(ctx, inputs, output) -> None:
    qkv, *ctx.settings = inputs
    ctx.save_for_backward(qkv, *output)
    ctx.set_materialize_grads(False)


def backward(ctx, launch, dout: Tensor | None, dlse: Tensor | None):
    """Gradients of attention_qkv's six arguments; `launch` calls attention_qkv_backward."""
    qkv, out, lse = ctx.saved_tensors
    if dout is None and dlse is None:
        return (None,) * 6
    if dout is None:
        dout = out.new_zeros(()).expand_as(out)
    return launch(qkv, out, lse, dout, dlse, *ctx.settings), *(None,) * 5


class AttentionQkvFunction(KernelFunction):
    """It has no jvp, so forward-mode differentiation raises instead of returning zeros."""

    forward = staticmethod(attention_qkv_forward)
    setup_context = staticmethod(setup_context)

    @staticmethod
    def backward(ctx, dout, dlse):
        return backward(ctx, AttentionQkvBackwardFunction.apply, dout, dlse)


class AttentionQkvBackwardFunction(FirstDerivative):
    """attention_qkv_backward."""

    forward = staticmethod(attention_qkv_backward)


# --- compile: torch.library ops ------------------------------------------------------------------


attention_qkv_forward_op = torch.library.custom_op(
    "flashproto::attention_qkv_forward",
    attention_qkv_forward,
    mutates_args=(),
    schema="(Tensor qkv, SymInt q_heads, SymInt k_heads, bool causal, float scale, str backend) "
    "-> (Tensor, Tensor)",
)
attention_qkv_backward_op = torch.library.custom_op(
    "flashproto::attention_qkv_backward",
    attention_qkv_backward,
    mutates_args=(),
    schema="(Tensor qkv, Tensor out, Tensor lse, Tensor dout, Tensor? dlse, SymInt q_heads, "
    "SymInt k_heads, bool causal, float scale, str backend) -> Tensor",
)


@attention_qkv_forward_op.register_fake
def _(qkv, q_heads, k_heads, causal, scale, backend):
    B, S, width = qkv.shape
    out = qkv.new_empty(B, S, q_heads, width // (q_heads + 2 * k_heads)).transpose(1, 2)
    return out, qkv.new_empty(B, q_heads, S, dtype=torch.float32)


@attention_qkv_backward_op.register_fake
def _(qkv, out, lse, dout, dlse, q_heads, k_heads, causal, scale, backend):
    return qkv.new_empty(qkv.shape)


def _backward(ctx, dout, dlse):
    return backward(ctx, torch.ops.flashproto.attention_qkv_backward, dout, dlse)


attention_qkv_forward_op.register_autograd(_backward, setup_context=setup_context)
refuse_tangents(attention_qkv_forward_op)
