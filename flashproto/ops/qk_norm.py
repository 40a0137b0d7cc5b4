"""QK norm with rotary embedding: launches of the kernels, autograd.Functions and torch.library ops.

Legend: ops/rope.py; q_weight, k_weight [D]; without cos and sin nothing is rotated.
"""

from __future__ import annotations

import torch
from torch import Tensor

from .. import configs
from ..kernels.qk_norm import qk_norm_backward_kernel, qk_norm_forward_kernel
from .autograd import FirstDerivative, KernelFunction, fake_of, kernel_op, use_op
from .column_sums import column_sums_of
from .launch import launcher, multiprocessors
from .rope import (
    Rows,
    empty_packed,
    empty_rotated,
    empty_split,
    groups_of,
    split_heads,
    strides_of,
    table_strides,
    unit_columns,
)
from .rows import contiguous

launch_forward = launcher(qk_norm_forward_kernel, tensors=11)
launch_backward = launcher(qk_norm_backward_kernel, tensors=15)


def qk_norm(
    q: Tensor,
    k: Tensor | None,
    q_weight: Tensor | None,
    k_weight: Tensor | None,
    cos: Tensor | None,
    sin: Tensor | None,
    rows: Rows,
    interleaved: bool,
    eps: float,
    casting: str,
) -> tuple[Tensor, Tensor | None]:
    """q and k normalized and rotated, in memory laid out as q and k are."""
    apply = torch.ops.flashproto.qk_norm if use_op() else QKNormFunction.apply
    q_out, k_out = apply(q, k, q_weight, k_weight, cos, sin, *rows, interleaved, eps, casting)
    return q_out, None if k is None else k_out


def qk_norm_packed(
    qkv: Tensor,
    q_heads: int,
    k_heads: int,
    q_weight: Tensor | None,
    k_weight: Tensor | None,
    cos: Tensor | None,
    sin: Tensor | None,
    rows: Rows,
    interleaved: bool,
    eps: float,
    casting: str,
) -> tuple[Tensor, Tensor, Tensor]:
    """(q, k, v) of qkv, q and k normalized and rotated; the gradient of qkv is one tensor."""
    apply = torch.ops.flashproto.qk_norm_packed if use_op() else QKNormPackedFunction.apply
    return apply(qkv, q_heads, k_heads, q_weight, k_weight, cos, sin, *rows, interleaved, eps, casting)


# --- launches ------------------------------------------------------------------------------------


def tables(cos: Tensor | None, sin: Tensor | None, D: int) -> tuple[Tensor | None, Tensor | None, int]:
    """(cos, sin, rotary_dim); without tables the pairs are those of the whole head."""
    if cos is None or sin is None:
        return None, None, D - D % 2
    return unit_columns(cos), unit_columns(sin), 2 * cos.shape[1]


def forward_launch(inputs, outputs, q_weight, k_weight, cos, sin, rows, interleaved, eps, casting):
    """Normalize and rotate q and k, copy v: of `inputs` to `outputs`."""
    q, k, v = inputs
    B, q_heads, S, D = q.shape
    k_heads = 0 if k is None else k.shape[1]
    cos, sin, rotary_dim = tables(cos, sin, D)
    config = configs.heads(D, rotary_dim, S, max(q_heads, k_heads), q.element_size())
    programs = groups_of(config, B, S, q_heads, k_heads, 0 if v is None else k_heads)
    if programs == 0 or D == 0:
        return
    launch_forward(
        programs,
        q, k, v, contiguous(q_weight), contiguous(k_weight), cos, sin, rows.positions, *outputs,
        *strides_of(*inputs, *outputs), *table_strides(cos, sin, rows.positions),
        S, q_heads, k_heads, rows.offset, 0 if cos is None else cos.shape[0], eps,
        D=D, HALF=rotary_dim // 2, INTERLEAVED=interleaved, COUNT=rows.count_up, CASTING=casting,
        T=config.tokens, H=config.heads, STEPS=config.steps, C=config.pairs, REST=config.rest,
        WHOLE=config.whole, num_warps=config.num_warps,
    )  # fmt: skip


def backward_launch(
    grads, inputs, outputs, q_weight, k_weight, cos, sin, rows, interleaved, eps, casting,
    need_dq_weight, need_dk_weight,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Gradients of q, k, v from those of the results, `grads`, into `outputs`; v is None or copied.

    Returns the gradients of the weights, of no elements where they are not asked for.
    """
    q, k = inputs
    B, q_heads, S, D = q.shape
    k_heads = 0 if k is None else k.shape[1]
    dq_weight, dk_weight = empty_weight_gradients(q, q_weight, k_weight, need_dq_weight, need_dk_weight)
    cos, sin, rotary_dim = tables(cos, sin, D)
    config = configs.qk_norm_backward(D, rotary_dim, S, max(q_heads, k_heads), q.element_size())
    tiles = groups_of(config, B, S, max(q_heads, k_heads))
    if tiles == 0 or D == 0:
        return dq_weight.zero_(), dk_weight.zero_()
    P = min(tiles, config.programs * multiprocessors(q.device))
    dq_partial, dk_partial = (
        q.new_empty(P, D, dtype=torch.float32) if need else None
        for need in (need_dq_weight, need_dk_weight)
    )
    launch_backward(
        P,
        *grads, q, k, contiguous(q_weight), contiguous(k_weight), cos, sin, rows.positions,
        *outputs, dq_partial, dk_partial, *strides_of(*grads, q, k, *outputs),
        *table_strides(cos, sin, rows.positions),
        B, S, q_heads, k_heads, rows.offset, 0 if cos is None else cos.shape[0], eps,
        D=D, HALF=rotary_dim // 2, INTERLEAVED=interleaved, COUNT=rows.count_up, CASTING=casting,
        T=config.tokens, H=config.heads, C=config.pairs, REST=config.rest, WHOLE=config.whole,
        num_warps=config.num_warps,
    )  # fmt: skip
    if need_dq_weight or need_dk_weight:
        column_sums_of(
            dq_partial, dk_partial,
            dq_weight if need_dq_weight else None, dk_weight if need_dk_weight else None,
        )  # fmt: skip
    return dq_weight, dk_weight


def empty_weight_gradients(
    q: Tensor, q_weight: Tensor | None, k_weight: Tensor | None, need_q: bool, need_k: bool
) -> tuple[Tensor, Tensor]:
    """Uninitialised, each of its weight's shape and dtype; of no elements if not asked for."""
    return (
        q_weight.new_empty(q_weight.shape) if q_weight is not None and need_q else q.new_empty(0),
        k_weight.new_empty(k_weight.shape) if k_weight is not None and need_k else q.new_empty(0),
    )


def qk_norm_forward(
    q, k, q_weight, k_weight, cos, sin, positions, offset, count, interleaved, eps, casting
) -> tuple[Tensor, Tensor]:
    """(q, k) normalized and rotated; k of no elements where it is None."""
    q_out, k_out = empty_rotated(q, k)
    forward_launch(
        (unit_columns(q), None if k is None else unit_columns(k), None),
        (q_out, None if k is None else k_out, None),
        q_weight, k_weight, cos, sin, Rows(positions, offset, count), interleaved, eps, casting,
    )  # fmt: skip
    return q_out, k_out


def qk_norm_backward(
    dq_out, dk_out, q, k, q_weight, k_weight, cos, sin, positions, offset, count, interleaved, eps,
    casting, need_dq_weight, need_dk_weight,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """Gradients of q, k and the weights; one without a part to play is of no elements."""
    dq, dk = empty_rotated(q, k)
    weights = backward_launch(
        (unit_columns(dq_out), None if k is None else unit_columns(dk_out), None),
        (unit_columns(q), None if k is None else unit_columns(k)),
        (dq, None if k is None else dk, None),
        q_weight, k_weight, cos, sin, Rows(positions, offset, count), interleaved, eps, casting,
        need_dq_weight, need_dk_weight,
    )  # fmt: skip
    return dq, dk, *weights


def qk_norm_packed_forward(
    qkv, q_heads, k_heads, q_weight, k_weight, cos, sin, positions, offset, count, interleaved, eps,
    casting,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """(q, k, v) of qkv, q and k normalized and rotated."""
    outputs = empty_split(qkv, q_heads, k_heads)
    forward_launch(
        split_heads(unit_columns(qkv), q_heads, k_heads), outputs,
        q_weight, k_weight, cos, sin, Rows(positions, offset, count), interleaved, eps, casting,
    )  # fmt: skip
    return outputs


def qk_norm_packed_backward(
    dq_out, dk_out, dv_out, qkv, q_weight, k_weight, cos, sin, positions, offset, count,
    interleaved, eps, casting, need_dq_weight, need_dk_weight,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """Gradients of qkv, one tensor, and of the weights."""
    q_heads, k_heads = dq_out.shape[1], dk_out.shape[1]
    dqkv = empty_packed(dq_out, dk_out)
    q, k, _ = split_heads(unit_columns(qkv), q_heads, k_heads)
    weights = backward_launch(
        (unit_columns(dq_out), unit_columns(dk_out), unit_columns(dv_out)), (q, k),
        split_heads(dqkv, q_heads, k_heads),
        q_weight, k_weight, cos, sin, Rows(positions, offset, count), interleaved, eps, casting,
        need_dq_weight, need_dk_weight,
    )  # fmt: skip
    return dqkv, *weights


# --- autograd --------------------------------------------------------------------------------------


def setup_context(ctx, inputs, output) -> None:
    ctx.save_for_backward(*inputs[:7])
    ctx.how = inputs[7:]


def backward(ctx, launch, dq: Tensor, dk: Tensor):
    """Gradients of qk_norm's twelve arguments; `launch` calls qk_norm_backward."""
    q, k, *others = ctx.saved_tensors
    needs = ctx.needs_input_grad[:4]
    grads = launch(dq, None if k is None else dk, q, k, *others, *ctx.how, *needs[2:])
    return *(g if need else None for g, need in zip(grads, needs, strict=True)), *(None,) * 8


class QKNormFunction(KernelFunction):
    """qk_norm."""

    forward = staticmethod(qk_norm_forward)
    setup_context = staticmethod(setup_context)

    @staticmethod
    def backward(ctx, *grads):
        return backward(ctx, QKNormBackwardFunction.apply, *grads)


class QKNormBackwardFunction(FirstDerivative):
    """qk_norm_backward."""

    forward = staticmethod(qk_norm_backward)


def packed_setup_context(ctx, inputs, output) -> None:
    ctx.save_for_backward(inputs[0], *inputs[3:8])
    ctx.how = inputs[8:]


def packed_backward(ctx, launch, dq: Tensor, dk: Tensor, dv: Tensor):
    """Gradients of qk_norm_packed's thirteen arguments; `launch` calls qk_norm_packed_backward."""
    needs = (ctx.needs_input_grad[0], *ctx.needs_input_grad[3:5])
    grads = launch(dq, dk, dv, *ctx.saved_tensors, *ctx.how, *needs[1:])
    dqkv, *weights = (g if need else None for g, need in zip(grads, needs, strict=True))
    return dqkv, None, None, *weights, *(None,) * 8


class QKNormPackedFunction(KernelFunction):
    """qk_norm_packed."""

    forward = staticmethod(qk_norm_packed_forward)
    setup_context = staticmethod(packed_setup_context)

    @staticmethod
    def backward(ctx, *grads):
        return packed_backward(ctx, QKNormPackedBackwardFunction.apply, *grads)


class QKNormPackedBackwardFunction(FirstDerivative):
    """qk_norm_packed_backward."""

    forward = staticmethod(qk_norm_packed_backward)


# --- compile: torch.library ops ------------------------------------------------------------------

HOW = (
    "Tensor? q_weight, Tensor? k_weight, Tensor? cos, Tensor? sin, Tensor? positions, "
    "SymInt offset, bool count, bool interleaved, float eps, str casting"
)
NEEDS = "bool need_dq_weight, bool need_dk_weight"

qk_norm_op = kernel_op(
    "flashproto::qk_norm",
    qk_norm_forward,
    schema=f"(Tensor q, Tensor? k, {HOW}) -> (Tensor, Tensor)",
)
qk_norm_backward_op = kernel_op(
    "flashproto::qk_norm_backward",
    qk_norm_backward,
    schema=f"(Tensor dq_out, Tensor? dk_out, Tensor q, Tensor? k, {HOW}, {NEEDS}) "
    "-> (Tensor, Tensor, Tensor, Tensor)",
)
qk_norm_packed_op = kernel_op(
    "flashproto::qk_norm_packed",
    qk_norm_packed_forward,
    schema=f"(Tensor qkv, int q_heads, int k_heads, {HOW}) -> (Tensor, Tensor, Tensor)",
)
qk_norm_packed_backward_op = kernel_op(
    "flashproto::qk_norm_packed_backward",
    qk_norm_packed_backward,
    schema=f"(Tensor dq_out, Tensor dk_out, Tensor dv_out, Tensor qkv, {HOW}, {NEEDS}) "
    "-> (Tensor, Tensor, Tensor)",
)


@fake_of(qk_norm_op)
def _(q, k, *how):
    return empty_rotated(q, k)


@fake_of(qk_norm_backward_op)
def _(dq_out, dk_out, q, k, q_weight, k_weight, *how_and_needs):
    return *empty_rotated(q, k), *empty_weight_gradients(q, q_weight, k_weight, *how_and_needs[-2:])


@fake_of(qk_norm_packed_op)
def _(qkv, q_heads, k_heads, *how):
    return empty_split(qkv, q_heads, k_heads)


@fake_of(qk_norm_packed_backward_op)
def _(dq_out, dk_out, dv_out, qkv, q_weight, k_weight, *how_and_needs):
    weights = empty_weight_gradients(qkv, q_weight, k_weight, *how_and_needs[-2:])
    return empty_packed(dq_out, dk_out), *weights


def _backward(ctx, dq, dk):
    return backward(ctx, torch.ops.flashproto.qk_norm_backward, dq, dk)


def _packed_backward(ctx, dq, dk, dv):
    return packed_backward(ctx, torch.ops.flashproto.qk_norm_packed_backward, dq, dk, dv)


qk_norm_op.register_autograd(_backward, setup_context=setup_context)
qk_norm_packed_op.register_autograd(_packed_backward, setup_context=packed_setup_context)
