"""softmax, log_softmax and logsumexp over the last dimension: launches of the kernels, their
autograd.Functions and torch.library ops.

Legend: x, y, dy, dx [..., N], seen as [M, N]; lse, dlse [...] float32.
"""

from __future__ import annotations

import math

import torch
import triton
from torch import Tensor

from .. import configs
from ..kernels.softmax import (
    logsumexp_backward_kernel,
    logsumexp_forward_kernel,
    softmax_backward_kernel,
    softmax_backward_looped_kernel,
    softmax_forward_kernel,
    softmax_forward_looped_kernel,
)
from .autograd import FirstDerivative, refuse_tangents, use_op
from .launch import on_device
from .rows import as_rows


def softmax(x: Tensor) -> Tensor:
    """exp(x) / sum(exp(x)) in x's dtype, computed in float32."""
    return _softmax(x, False)


def log_softmax(x: Tensor) -> Tensor:
    """x - logsumexp(x) in x's dtype, computed in float32."""
    return _softmax(x, True)


def _softmax(x: Tensor, log: bool) -> Tensor:
    if use_op():
        return torch.ops.flashproto.softmax(x, log)
    return SoftmaxFunction.apply(x, log)


def logsumexp(x: Tensor) -> Tensor:
    """log(sum(exp(x))) of shape [...] in x's dtype; computed, and kept for backward, in float32."""
    if use_op():
        return torch.ops.flashproto.logsumexp(x).to(x.dtype)
    return LogsumexpFunction.apply(x).to(x.dtype)


# --- launches ------------------------------------------------------------------------------------


def softmax_forward(x: Tensor, log: bool) -> Tensor:
    """Launch the forward kernel of softmax or log_softmax."""
    y = x.new_empty(x.shape)
    if y.numel() == 0:
        return y
    x = as_rows(x)
    M, N = x.shape
    arguments = (x, y, x.stride(0), M, N, log)
    config = configs.softmax_forward(N, x.element_size())
    with on_device(x.device):
        if config.looped:
            softmax_forward_looped_kernel[(M,)](
                *arguments, C=config.columns, num_warps=config.num_warps
            )
        else:
            softmax_forward_kernel[(triton.cdiv(M, config.rows),)](
                *arguments, R=config.rows, C=config.columns, num_warps=config.num_warps
            )
    return y


def softmax_backward(dy: Tensor, y: Tensor, log: bool) -> Tensor:
    """Launch the backward kernel of softmax or log_softmax; y is what the forward returned."""
    dx = y.new_empty(y.shape)
    if dx.numel() == 0:
        return dx
    dy, y = as_rows(dy), as_rows(y)
    M, N = y.shape
    arguments = (dy, y, dx, dy.stride(0), y.stride(0), M, N, log)
    config = configs.softmax_backward(N, y.element_size())
    with on_device(y.device):
        if config.looped:
            softmax_backward_looped_kernel[(M,)](
                *arguments, C=config.columns, num_warps=config.num_warps
            )
        else:
            softmax_backward_kernel[(triton.cdiv(M, config.rows),)](
                *arguments, R=config.rows, C=config.columns, num_warps=config.num_warps
            )
    return dx


def logsumexp_forward(x: Tensor) -> Tensor:
    """Launch the forward kernel of logsumexp; returns lse in float32."""
    lse = x.new_empty(x.shape[:-1], dtype=torch.float32)
    if x.numel() == 0:
        return lse.fill_(-math.inf)
    x = as_rows(x)
    M, N = x.shape
    config = configs.logsumexp(N, x.element_size())
    with on_device(x.device):
        logsumexp_forward_kernel[(triton.cdiv(M, config.rows),)](
            x, lse, x.stride(0), M, N,
            R=config.rows, C=config.columns, num_warps=config.num_warps,
        )  # fmt: skip
    return lse


def logsumexp_backward(dlse: Tensor, x: Tensor, lse: Tensor) -> Tensor:
    """Launch the backward kernel of logsumexp; dlse and lse are float32."""
    dx = x.new_empty(x.shape)
    if dx.numel() == 0:
        return dx
    x = as_rows(x)
    M, N = x.shape
    config = configs.logsumexp(N, x.element_size())
    programs = triton.cdiv(M, config.rows) * triton.cdiv(N, config.columns)
    with on_device(x.device):
        logsumexp_backward_kernel[(programs,)](
            dlse.contiguous(), x, lse.contiguous(), dx, x.stride(0), M, N,
            R=config.rows, C=config.columns, num_warps=config.num_warps,
        )  # fmt: skip
    return dx


# --- eager: autograd.Functions, without a jvp, so that forward-mode differentiation raises -------


class SoftmaxFunction(torch.autograd.Function):
    """softmax, or log_softmax if `log`."""

    @staticmethod
    def forward(x, log):
        return softmax_forward(x, log)

    @staticmethod
    def setup_context(ctx, inputs, output):
        ctx.log = inputs[1]
        ctx.save_for_backward(output)

    @staticmethod
    def backward(ctx, dy):
        (y,) = ctx.saved_tensors
        return SoftmaxBackwardFunction.apply(dy, y, ctx.log), None


class SoftmaxBackwardFunction(FirstDerivative):
    """softmax_backward."""

    @staticmethod
    def forward(*args):
        return softmax_backward(*args)


class LogsumexpFunction(torch.autograd.Function):
    """logsumexp in float32."""

    @staticmethod
    def forward(x):
        return logsumexp_forward(x)

    @staticmethod
    def setup_context(ctx, inputs, output):
        ctx.save_for_backward(*inputs, output)

    @staticmethod
    def backward(ctx, dlse):
        return LogsumexpBackwardFunction.apply(dlse, *ctx.saved_tensors)


class LogsumexpBackwardFunction(FirstDerivative):
    """logsumexp_backward."""

    @staticmethod
    def forward(*args):
        return logsumexp_backward(*args)


# --- compile: torch.library ops ------------------------------------------------------------------

softmax_op = torch.library.custom_op(
    "flashproto::softmax", softmax_forward, mutates_args=(), schema="(Tensor x, bool log) -> Tensor"
)
softmax_backward_op = torch.library.custom_op(
    "flashproto::softmax_backward",
    softmax_backward,
    mutates_args=(),
    schema="(Tensor dy, Tensor y, bool log) -> Tensor",
)
logsumexp_op = torch.library.custom_op(
    "flashproto::logsumexp", logsumexp_forward, mutates_args=(), schema="(Tensor x) -> Tensor"
)
logsumexp_backward_op = torch.library.custom_op(
    "flashproto::logsumexp_backward",
    logsumexp_backward,
    mutates_args=(),
    schema="(Tensor dlse, Tensor x, Tensor lse) -> Tensor",
)


@softmax_op.register_fake
def _(x, log):
    return x.new_empty(x.shape)


@softmax_backward_op.register_fake
def _(dy, y, log):
    return y.new_empty(y.shape)


@logsumexp_op.register_fake
def _(x):
    return x.new_empty(x.shape[:-1], dtype=torch.float32)


@logsumexp_backward_op.register_fake
def _(dlse, x, lse):
    return x.new_empty(x.shape)


def _softmax_backward(ctx, dy):
    (y,) = ctx.saved_tensors
    return torch.ops.flashproto.softmax_backward(dy, y, ctx.log), None


def _logsumexp_backward(ctx, dlse):
    return torch.ops.flashproto.logsumexp_backward(dlse, *ctx.saved_tensors)


softmax_op.register_autograd(_softmax_backward, setup_context=SoftmaxFunction.setup_context)
logsumexp_op.register_autograd(_logsumexp_backward, setup_context=LogsumexpFunction.setup_context)
refuse_tangents(softmax_op)
refuse_tangents(logsumexp_op)
