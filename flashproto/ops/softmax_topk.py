"""The k largest of a softmax over the last dimension: launches of the kernels, autograd.Function and
torch.library ops.

Legend: x, dx [..., N], seen as [M, N]; values, indices, dvalues [..., k]; states [2, ...] float32, the
rows' m and l.
"""

from __future__ import annotations

import torch
from torch import Tensor

from .. import configs
from ..kernels.softmax_topk import (
    softmax_topk_backward_kernel,
    softmax_topk_join_kernel,
    softmax_topk_kernel,
    softmax_topk_split_kernel,
)
from .autograd import FirstDerivative, KernelFunction, fake_of, kernel_op, use_op
from .launch import cdiv, launcher
from .rows import as_rows

MAX_K = 64

launch_rows = launcher(softmax_topk_kernel, tensors=4)
launch_split = launcher(softmax_topk_split_kernel, tensors=3)
launch_join = launcher(softmax_topk_join_kernel, tensors=6)
launch_backward = launcher(softmax_topk_backward_kernel, tensors=5)


def softmax_topk(x: Tensor, k: int, renormalize: bool, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Values in `dtype` and int64 indices, computed in float32."""
    apply = torch.ops.flashproto.softmax_topk if use_op() else SoftmaxTopkFunction.apply
    values, indices, _ = apply(x, k, renormalize, dtype)
    return values, indices


# --- launches ------------------------------------------------------------------------------------


def softmax_topk_forward(
    x: Tensor, k: int, renormalize: bool, dtype: torch.dtype
) -> tuple[Tensor, Tensor, Tensor]:
    """Launch the forward kernels; returns values, indices and states."""
    values, indices, states = _results(x, k, dtype)
    if x.numel() == 0:
        return values, indices, states
    x = as_rows(x)
    M, N = x.shape
    KP = configs.power_of_two(k)
    config = configs.softmax_topk(N, x.element_size(), k)
    if not config.split:
        launch_rows(
            cdiv(M, config.rows), x, values, indices, states, x.stride(0), M, N, k, renormalize,
            R=config.rows, C=config.columns, W=config.block, PART=config.part, KP=KP, SORT=config.sort,
            num_warps=config.num_warps,
        )  # fmt: skip
        return values, indices, states
    span = configs.softmax_topk_span(N, k)
    splits = cdiv(N, span)
    keys = x.new_empty(M, splits, k, dtype=torch.int64)
    words = x.new_empty(M, splits, dtype=torch.int64)
    launch_split(
        M * splits, x, keys, words, x.stride(0), M, N, k,
        SPAN=span, C=config.columns, KP=KP, num_warps=config.num_warps,
    )  # fmt: skip
    config = configs.softmax_topk_join(splits, k)
    launch_join(
        M, x, keys, words, values, indices, states, M, k, splits, renormalize,
        LANES=configs.power_of_two(splits), C=config.columns, KP=KP, SORT=config.sort,
        num_warps=config.num_warps,
    )  # fmt: skip
    return values, indices, states


def _results(x: Tensor, k: int, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    shape = (*x.shape[:-1], k)
    values, indices = x.new_empty(shape, dtype=dtype), x.new_empty(shape, dtype=torch.int64)
    return values, indices, x.new_empty((2, *x.shape[:-1]), dtype=torch.float32)


def softmax_topk_backward(
    dvalues: Tensor, indices: Tensor, x: Tensor, states: Tensor, renormalize: bool
) -> Tensor:
    """Launch the backward kernel; indices and states are what the forward returned."""
    dx = x.new_empty(x.shape)
    if dx.numel() == 0:
        return dx
    x = as_rows(x)
    M, N = x.shape
    k = indices.shape[-1]
    config = configs.softmax_topk_backward(N, x.element_size())
    launch_backward(
        cdiv(M, config.rows) * cdiv(N, config.columns),
        dvalues.contiguous(), indices.contiguous(), x, states.contiguous(), dx, x.stride(0), M, N, k,
        renormalize, R=config.rows, C=config.columns, KP=configs.power_of_two(k),
        num_warps=config.num_warps,
    )  # fmt: skip
    return dx


# --- eager: autograd.Functions, without a jvp, so that forward-mode differentiation raises -------


class SoftmaxTopkFunction(KernelFunction):
    """softmax_topk; returns values, indices and states, of which values alone have a gradient."""

    @staticmethod
    def forward(x, k, renormalize, dtype):
        return softmax_topk_forward(x, k, renormalize, dtype)

    @staticmethod
    def setup_context(ctx, inputs, output):
        x, _, ctx.renormalize, _ = inputs
        _, indices, states = output
        ctx.mark_non_differentiable(indices, states)
        ctx.save_for_backward(indices, x, states)

    @staticmethod
    def backward(ctx, dvalues, dindices, dstates):
        dx = SoftmaxTopkBackwardFunction.apply(dvalues, *ctx.saved_tensors, ctx.renormalize)
        return dx, None, None, None


class SoftmaxTopkBackwardFunction(FirstDerivative):
    """softmax_topk_backward."""

    @staticmethod
    def forward(*args):
        return softmax_topk_backward(*args)


# --- compile: torch.library ops ------------------------------------------------------------------

softmax_topk_op = kernel_op(
    "flashproto::softmax_topk",
    softmax_topk_forward,
    schema="(Tensor x, SymInt k, bool renormalize, ScalarType dtype) -> (Tensor, Tensor, Tensor)",
)
softmax_topk_backward_op = kernel_op(
    "flashproto::softmax_topk_backward",
    softmax_topk_backward,
    schema="(Tensor dvalues, Tensor indices, Tensor x, Tensor states, bool renormalize) -> Tensor",
)


@fake_of(softmax_topk_op)
def _(x, k, renormalize, dtype):
    return _results(x, k, dtype)


@fake_of(softmax_topk_backward_op)
def _(dvalues, indices, x, states, renormalize):
    return x.new_empty(x.shape)


def _setup_context(ctx, inputs, output):
    x, _, ctx.renormalize, _ = inputs
    _, indices, states = output
    ctx.save_for_backward(indices, x, states)


def _backward(ctx, dvalues, dindices, dstates):
    dx = torch.ops.flashproto.softmax_topk_backward(dvalues, *ctx.saved_tensors, ctx.renormalize)
    return dx, None, None, None


softmax_topk_op.register_autograd(_backward, setup_context=_setup_context)
