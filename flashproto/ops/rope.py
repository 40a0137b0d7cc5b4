"""Rotary position embedding: launches of the kernel, its autograd.Functions and torch.library ops.

Legend: q [B, Hq, S, D], k, v [B, Hkv, S, D]; qkv [B, S, (Hq + 2 Hkv) D], every token's heads of q, k
and v side by side; cos, sin [length, R], 2 R the dimensions that are rotated.  The rows of the tables
are said by Rows.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor
from torch._functorch.utils import unwrap_dead_wrappers

from .. import configs
from ..configs import HeadConfig
from ..kernels.rope import rope_kernel
from .autograd import FirstDerivative, KernelFunction, fake_of, kernel_op, use_op
from .launch import cdiv, launcher

launch_rope = launcher(rope_kernel, tensors=9)


class Rows(NamedTuple):
    """Token s of sequence b has row offset + s of the tables, or offset + positions[b, s], or if
    `count_up` offset + positions[b, 0] + s; a positions of one row or column serves all."""

    positions: Tensor | None
    offset: int
    count_up: bool


def rope(
    q: Tensor, k: Tensor | None, cos: Tensor, sin: Tensor, rows: Rows, interleaved: bool
) -> tuple[Tensor, Tensor | None]:
    """q and k rotated, in memory laid out as q and k are: tokens or heads first."""
    apply = torch.ops.flashproto.rope if use_op() else RopeFunction.apply
    q_out, k_out = apply(q, k, cos, sin, *rows, interleaved, False)
    return q_out, None if k is None else k_out


def rope_in_place(
    q: Tensor, k: Tensor | None, cos: Tensor, sin: Tensor, rows: Rows, interleaved: bool
) -> None:
    """Rotate q and k where they are; they carry no gradient."""
    apply = torch.ops.flashproto.rope_ if use_op() else rope_inplace_forward
    apply(q, k, cos, sin, *rows, interleaved)


def rope_packed(
    qkv: Tensor, q_heads: int, k_heads: int, cos: Tensor, sin: Tensor, rows: Rows, interleaved: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """(q, k, v) of qkv, q and k rotated, in memory of their own; the gradient of qkv is one tensor."""
    apply = torch.ops.flashproto.rope_packed if use_op() else RopePackedFunction.apply
    return apply(qkv, q_heads, k_heads, cos, sin, *rows, interleaved)


# --- heads in memory -------------------------------------------------------------------------------


def empty_heads(x: Tensor) -> Tensor:
    """An uninitialised tensor of x's shape [B, H, S, D], heads or tokens first as in x."""
    B, H, S, D = x.shape
    if x.stride(1) < x.stride(2):
        return x.new_empty(B, S, H, D).transpose(1, 2)
    return x.new_empty(B, H, S, D)


def unit_columns(x: Tensor) -> Tensor:
    return x if x.stride(-1) == 1 or x.shape[-1] == 1 else x.contiguous()


def split_heads(qkv: Tensor, q_heads: int, k_heads: int) -> tuple[Tensor, Tensor, Tensor]:
    """Views q, k, v [B, H, S, D] of qkv."""
    B, S, width = qkv.shape
    D = width // (q_heads + 2 * k_heads)
    stride_b, stride_s, stride_d = qkv.stride()
    views, first = [], qkv.storage_offset()
    for heads in (q_heads, k_heads, k_heads):
        strides = (stride_b, D * stride_d, stride_s, stride_d)
        views.append(qkv.as_strided((B, heads, S, D), strides, first))
        first += heads * D * stride_d
    return views[0], views[1], views[2]


def strides_of(*tensors: Tensor | None) -> list[int]:
    """The strides over batch, heads and tokens of each, zeros for None."""
    return [n for t in tensors for n in ((0, 0, 0) if t is None else t.stride()[:3])]


def table_strides(cos: Tensor | None, sin: Tensor | None, positions: Tensor | None) -> list[int]:
    """Row strides of cos and sin, and strides of positions over batch and tokens, 0 along one of 1."""
    over = [0, 0]
    if positions is not None:
        over = [0 if n == 1 else m for n, m in zip(positions.shape, positions.stride(), strict=True)]
    return [*(0 if t is None else t.stride(0) for t in (cos, sin)), *over]


def groups_of(config: HeadConfig, B: int, S: int, *heads: int) -> int:
    """How many groups of tiles there are of tensors with so many heads each."""
    return B * cdiv(S, config.tokens) * sum(cdiv(n, config.heads * config.steps) for n in heads)


# --- launches ------------------------------------------------------------------------------------


def launch(
    inputs: tuple[Tensor, Tensor | None, Tensor | None],
    outputs: tuple[Tensor, Tensor | None, Tensor | None],
    cos: Tensor,
    sin: Tensor,
    rows: Rows,
    interleaved: bool,
    inverse: bool,
) -> None:
    """Rotate q and k, copy v: of `inputs` to `outputs`, all of unit column stride."""
    q, k, v = inputs
    B, q_heads, S, D = q.shape
    k_heads = 0 if k is None else k.shape[1]
    cos, sin = unit_columns(cos), unit_columns(sin)
    rotary_dim = 2 * cos.shape[1]
    config = configs.heads(D, rotary_dim, S, max(q_heads, k_heads), q.element_size())
    programs = groups_of(config, B, S, q_heads, k_heads, 0 if v is None else k_heads)
    if programs == 0 or D == 0:
        return
    launch_rope(
        programs,
        q, k, v, cos, sin, rows.positions, *outputs, *strides_of(*inputs, *outputs),
        *table_strides(cos, sin, rows.positions), S, q_heads, k_heads, rows.offset, cos.shape[0],
        D=D, HALF=rotary_dim // 2, INTERLEAVED=interleaved, INVERSE=inverse, COUNT=rows.count_up,
        T=config.tokens, H=config.heads, STEPS=config.steps, C=config.pairs, REST=config.rest,
        WHOLE=config.whole, num_warps=config.num_warps,
    )  # fmt: skip


def rope_forward(
    q: Tensor,
    k: Tensor | None,
    cos: Tensor,
    sin: Tensor,
    positions: Tensor | None,
    offset: int,
    count: bool,
    interleaved: bool,
    inverse: bool,
) -> tuple[Tensor, Tensor]:
    """(q, k) rotated, backwards if `inverse`; k of no elements where it is None."""
    q_out, k_out = empty_rotated(q, k)
    inputs = (unit_columns(q), None if k is None else unit_columns(k), None)
    outputs = (q_out, None if k is None else k_out, None)
    launch(inputs, outputs, cos, sin, Rows(positions, offset, count), interleaved, inverse)
    return q_out, k_out


def empty_rotated(q: Tensor, k: Tensor | None) -> tuple[Tensor, Tensor]:
    return empty_heads(q), q.new_empty(0) if k is None else empty_heads(k)


def rope_inplace_forward(
    q: Tensor,
    k: Tensor | None,
    cos: Tensor,
    sin: Tensor,
    positions: Tensor | None,
    offset: int,
    count: bool,
    interleaved: bool,
) -> None:
    """Rotate q and k where they are."""
    rotated_q, rotated_k = unit_columns(q), None if k is None else unit_columns(k)
    tensors = (rotated_q, rotated_k, None)
    launch(tensors, tensors, cos, sin, Rows(positions, offset, count), interleaved, False)
    if rotated_q is not q:
        q.copy_(rotated_q)
    if k is not None and rotated_k is not None and rotated_k is not k:
        k.copy_(rotated_k)


def rope_packed_forward(
    qkv: Tensor,
    q_heads: int,
    k_heads: int,
    cos: Tensor,
    sin: Tensor,
    positions: Tensor | None,
    offset: int,
    count: bool,
    interleaved: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    """(q, k, v) of qkv, q and k rotated."""
    outputs = empty_split(qkv, q_heads, k_heads)
    inputs = split_heads(unit_columns(qkv), q_heads, k_heads)
    launch(inputs, outputs, cos, sin, Rows(positions, offset, count), interleaved, False)
    return outputs


def empty_split(qkv: Tensor, q_heads: int, k_heads: int) -> tuple[Tensor, Tensor, Tensor]:
    B, S, width = qkv.shape
    D = width // (q_heads + 2 * k_heads)
    q, k, v = (qkv.new_empty(B, S, n, D).transpose(1, 2) for n in (q_heads, k_heads, k_heads))
    return q, k, v


def rope_packed_backward(
    dq: Tensor,
    dk: Tensor,
    dv: Tensor,
    cos: Tensor,
    sin: Tensor,
    positions: Tensor | None,
    offset: int,
    count: bool,
    interleaved: bool,
) -> Tensor:
    """The gradient of qkv, one tensor."""
    dqkv = empty_packed(dq, dk)
    inputs = (unit_columns(dq), unit_columns(dk), unit_columns(dv))
    outputs = split_heads(dqkv, dq.shape[1], dk.shape[1])
    launch(inputs, outputs, cos, sin, Rows(positions, offset, count), interleaved, True)
    return dqkv


def empty_packed(q: Tensor, k: Tensor) -> Tensor:
    B, q_heads, S, D = q.shape
    return q.new_empty(B, S, (q_heads + 2 * k.shape[1]) * D)


# --- autograd --------------------------------------------------------------------------------------


def setup_context(ctx, inputs, output) -> None:
    ctx.has_k = inputs[1] is not None
    ctx.save_for_backward(*inputs[2:5])
    ctx.how = inputs[5:]


def backward(ctx, apply, dq: Tensor, dk: Tensor):
    """Gradients of rope's nine arguments: `apply`, which is rope itself, turns back."""
    *rows_and_layout, inverse = ctx.how
    dq, dk = apply(dq, dk if ctx.has_k else None, *ctx.saved_tensors, *rows_and_layout, not inverse)
    need_dq, need_dk = ctx.needs_input_grad[:2]
    return dq if need_dq else None, dk if need_dk else None, *(None,) * 7


class RopeFunction(KernelFunction):
    """rope; linear, and so its backward pass is differentiable too."""

    forward = staticmethod(rope_forward)
    setup_context = staticmethod(setup_context)

    @staticmethod
    def backward(ctx, dq, dk):
        return backward(ctx, RopeFunction.again, dq, dk)

    @staticmethod
    def again(*args):
        # As FirstDerivative does: a pullback may be called late.
        return RopeFunction.apply(*unwrap_dead_wrappers(args))


def packed_setup_context(ctx, inputs, output) -> None:
    ctx.save_for_backward(*inputs[3:6])
    ctx.how = inputs[6:]


def packed_backward(ctx, launch, dq: Tensor, dk: Tensor, dv: Tensor):
    return launch(dq, dk, dv, *ctx.saved_tensors, *ctx.how), *(None,) * 8


class RopePackedFunction(KernelFunction):
    """rope_packed."""

    forward = staticmethod(rope_packed_forward)
    setup_context = staticmethod(packed_setup_context)

    @staticmethod
    def backward(ctx, *grads):
        return packed_backward(ctx, RopePackedBackwardFunction.apply, *grads)


class RopePackedBackwardFunction(FirstDerivative):
    """rope_packed_backward."""

    forward = staticmethod(rope_packed_backward)


# --- compile: torch.library ops ------------------------------------------------------------------

TABLES = "Tensor cos, Tensor sin, Tensor? positions, SymInt offset, bool count, bool interleaved"

rope_op = kernel_op(
    "flashproto::rope",
    rope_forward,
    schema=f"(Tensor q, Tensor? k, {TABLES}, bool inverse) -> (Tensor, Tensor)",
)
rope_inplace_op = kernel_op(
    "flashproto::rope_",
    rope_inplace_forward,
    mutates_args=("q", "k"),
    schema=f"(Tensor(a!) q, Tensor(b!)? k, {TABLES}) -> ()",
)
rope_packed_op = kernel_op(
    "flashproto::rope_packed",
    rope_packed_forward,
    schema=f"(Tensor qkv, int q_heads, int k_heads, {TABLES}) -> (Tensor, Tensor, Tensor)",
)
rope_packed_backward_op = kernel_op(
    "flashproto::rope_packed_backward",
    rope_packed_backward,
    schema=f"(Tensor dq, Tensor dk, Tensor dv, {TABLES}) -> Tensor",
)


@fake_of(rope_op)
def _(q, k, *tables_and_inverse):
    return empty_rotated(q, k)


@fake_of(rope_inplace_op)
def _(q, k, *tables):
    return None


@fake_of(rope_packed_op)
def _(qkv, q_heads, k_heads, *tables):
    return empty_split(qkv, q_heads, k_heads)


@fake_of(rope_packed_backward_op)
def _(dq, dk, dv, *tables):
    return empty_packed(dq, dk)


def _backward(ctx, dq, dk):
    return backward(ctx, torch.ops.flashproto.rope, dq, dk)


def _packed_backward(ctx, dq, dk, dv):
    return packed_backward(ctx, torch.ops.flashproto.rope_packed_backward, dq, dk, dv)


rope_op.register_autograd(_backward, setup_context=setup_context)
rope_packed_op.register_autograd(_packed_backward, setup_context=packed_setup_context)
