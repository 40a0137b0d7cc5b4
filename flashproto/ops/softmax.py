"""softmax, log_softmax and logsumexp over the last dimension: launches of the kernels, their
autograd.Functions and torch.library ops.

Legend: x, y, dy, dx [..., N], seen as [M, N]; lse, dlse [...] float32.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from .. import configs
from ..kernels.logsumexp import (
    logsumexp_backward_kernel,
    logsumexp_forward_kernel,
    logsumexp_forward_split_kernel,
)
from ..kernels.softmax import (
    softmax_backward_kernel,
    softmax_backward_looped_kernel,
    softmax_backward_split_kernel,
    softmax_forward_kernel,
    softmax_forward_looped_kernel,
    softmax_forward_split_kernel,
)
from .autograd import FirstDerivative, KernelFunction, fake_of, kernel_op, use_op
from .exchange import POLLS, exchange_words
from .hook_arguments import NO_HOOK, HookArguments, launchers
from .launch import Launch, Launcher, cdiv, has_hopper_kernels, launcher
from .rows import as_rows

# Each without and with hooks.
launch_forward = launchers(softmax_forward_kernel, tensors=3)
launch_forward_looped = launchers(softmax_forward_looped_kernel, tensors=3)
launch_forward_split = launchers(softmax_forward_split_kernel, tensors=4)
launch_backward = launchers(softmax_backward_kernel, tensors=5)
launch_backward_looped = launchers(softmax_backward_looped_kernel, tensors=5)
launch_backward_split = launchers(softmax_backward_split_kernel, tensors=7)
launch_logsumexp_forward = launcher(logsumexp_forward_kernel, tensors=2)
launch_logsumexp_forward_split = launcher(logsumexp_forward_split_kernel, tensors=3)
launch_logsumexp_backward = launcher(logsumexp_backward_kernel, tensors=4)


def softmax(x: Tensor, dtype: torch.dtype | None = None) -> Tensor:
    """exp(x) / sum(exp(x)) in `dtype`, x's by default, computed in float32."""
    return _softmax(x, False, dtype)


def log_softmax(x: Tensor, dtype: torch.dtype | None = None) -> Tensor:
    """x - logsumexp(x) in `dtype`, x's by default, computed in float32."""
    return _softmax(x, True, dtype)


def _softmax(x: Tensor, log: bool, dtype: torch.dtype | None) -> Tensor:
    if use_op():
        return torch.ops.flashproto.softmax(x, log, dtype)
    return SoftmaxFunction.apply(x, log, dtype)


def logsumexp(x: Tensor, dtype: torch.dtype | None = None) -> Tensor:
    """log(sum(exp(x))) of shape [...] in `dtype`, x's by default; computed, and kept for
    backward, in float32."""
    apply = torch.ops.flashproto.logsumexp if use_op() else LogsumexpFunction.apply
    return apply(x).to(x.dtype if dtype is None else dtype)


# --- launches ------------------------------------------------------------------------------------


def launch_of_splits(
    launch: Launcher, config: configs.RowConfig, tensors: tuple, numbers: tuple
) -> Launch:
    """The launch of a kernel that takes `tensors`, the first of them [M, N], words, and `numbers`."""
    M, N = tensors[0].shape
    splits, words, lanes = exchange_words(tensors[0], M, N, config)
    options = {
        "C": config.columns, "LANES": lanes, "POLLS": POLLS,
        "num_warps": config.num_warps, "maxnreg": config.max_registers,
    }  # fmt: skip
    return Launch(launch, M * splits, (*tensors, words, *numbers), options, words)


def softmax_forward(x: Tensor, log: bool, dtype: torch.dtype | None = None) -> Tensor:
    """Launch the forward kernel of softmax or log_softmax; y is of `dtype`, x's by default."""
    y = x.new_empty(x.shape, dtype=dtype)
    run_forward(x, y, None, log)
    return y


def run_forward(
    x: Tensor,
    y: Tensor,
    lse: Tensor | None,
    log: bool,
    prologue: HookArguments = NO_HOOK,
    epilogue: HookArguments = NO_HOOK,
    split_rows: bool = False,
) -> None:
    """Fill y and, where it is wanted, lse."""
    if y.numel() > 0:
        forward_launch(x, y, lse, log, prologue, epilogue, split_rows)()


def forward_launch(
    x: Tensor,
    y: Tensor,
    lse: Tensor | None,
    log: bool,
    prologue: HookArguments = NO_HOOK,
    epilogue: HookArguments = NO_HOOK,
    split_rows: bool = False,
) -> Launch:
    """The launch that fills y, of some elements, and lse; hooks and split_rows want an lse."""
    x = as_rows(x)
    M, N = x.shape
    if lse is None and y.element_size() == x.element_size():
        config = configs.softmax_forward_shared(N, x.element_size())
        if config is not None and has_hopper_kernels(x.device):
            from .softmax_hopper import forward_launch_hopper

            return forward_launch_hopper(x, y, log, config)
    tensors = (x, y, lse)
    numbers = (
        x.stride(0), M, N, prologue.arguments, epilogue.arguments,
        log, prologue.forward, epilogue.forward,
    )  # fmt: skip
    hooked = lse is not None
    if split_rows:
        config = configs.softmax_split(N, x.element_size())
    else:
        config = configs.softmax_forward(N, x.element_size(), hooked)
    options = {
        "C": config.columns, "num_warps": config.num_warps, "maxnreg": config.max_registers
    }  # fmt: skip
    if config.split:
        return launch_of_splits(launch_forward_split[hooked], config, tensors, numbers)
    if config.looped:
        return Launch(launch_forward_looped[hooked], M, (*tensors, *numbers), options)
    programs, options = cdiv(M, config.rows), {"R": config.rows, **options}
    return Launch(launch_forward[hooked], programs, (*tensors, *numbers), options)


def softmax_backward(dy: Tensor, y: Tensor, log: bool, dtype: torch.dtype | None = None) -> Tensor:
    """Launch the backward kernel of softmax or log_softmax; y is what the forward returned, dx is of
    `dtype`, y's by default."""
    dx = y.new_empty(y.shape, dtype=dtype)
    run_backward(dy, y, None, None, dx, log)
    return dx


def run_backward(
    dy: Tensor,
    y: Tensor | None,
    x: Tensor | None,
    lse: Tensor | None,
    dx: Tensor,
    log: bool,
    prologue: HookArguments = NO_HOOK,
    epilogue: HookArguments = NO_HOOK,
    split_rows: bool = False,
) -> None:
    """Fill dx and the gradients of the hooks, from y or, as hooks and split_rows want, x and lse."""
    if dx.numel() == 0:
        for gradient in (*(prologue.gradients or ()), *(epilogue.gradients or ())):
            if gradient is not None:
                gradient.zero_()
        return
    backward_launch(dy, y, x, lse, dx, log, prologue, epilogue, split_rows)()


def backward_launch(
    dy: Tensor,
    y: Tensor | None,
    x: Tensor | None,
    lse: Tensor | None,
    dx: Tensor,
    log: bool,
    prologue: HookArguments = NO_HOOK,
    epilogue: HookArguments = NO_HOOK,
    split_rows: bool = False,
) -> Launch:
    """The launch of run_backward, of some elements."""
    dy = as_rows(dy)
    M, N = dy.shape
    y, x = (None if t is None else as_rows(t) for t in (y, x))
    tensors = (dy, y, x, None if lse is None else lse.contiguous(), dx)
    numbers = (
        dy.stride(0), 0 if y is None else y.stride(0), 0 if x is None else x.stride(0), M, N,
        prologue.arguments, prologue.gradients, epilogue.arguments, epilogue.gradients,
        log, prologue.forward, prologue.backward, epilogue.backward,
    )  # fmt: skip
    hooked = x is not None
    if split_rows:
        config = configs.softmax_split(N, dx.element_size())
    else:
        config = configs.softmax_backward(N, dx.element_size(), hooked)
    options = {
        "C": config.columns, "num_warps": config.num_warps, "maxnreg": config.max_registers
    }  # fmt: skip
    if config.split:
        split = launch_of_splits(launch_backward_split[hooked], config, tensors, (None, *numbers))
        return split._replace(clears=True)
    if config.looped:
        return Launch(launch_backward_looped[hooked], M, (*tensors, *numbers), options)
    programs, options = cdiv(M, config.rows), {"R": config.rows, **options}
    return Launch(launch_backward[hooked], programs, (*tensors, *numbers), options)


def logsumexp_forward(x: Tensor) -> Tensor:
    """Launch the forward kernel of logsumexp; returns lse in float32."""
    lse = x.new_empty(x.shape[:-1], dtype=torch.float32)
    if x.numel() == 0:
        return lse.fill_(-math.inf)
    x = as_rows(x)
    M, N = x.shape
    config = configs.logsumexp(N, x.element_size())
    if config.split:
        launch_of_splits(launch_logsumexp_forward_split, config, (x, lse), (x.stride(0), M, N))()
    else:
        launch_logsumexp_forward(
            cdiv(M, config.rows), x, lse, x.stride(0), M, N,
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
    programs = cdiv(M, config.rows) * cdiv(N, config.columns)
    launch_logsumexp_backward(
        programs, dlse.contiguous(), x, lse.contiguous(), dx, x.stride(0), M, N,
        R=config.rows, C=config.columns, num_warps=config.num_warps,
    )  # fmt: skip
    return dx


# --- eager: autograd.Functions, without a jvp, so that forward-mode differentiation raises -------


class SoftmaxFunction(KernelFunction):
    """softmax, or log_softmax if `log`."""

    @staticmethod
    def forward(x, log, dtype):
        return softmax_forward(x, log, dtype)

    @staticmethod
    def setup_context(ctx, inputs, output):
        x, ctx.log, _ = inputs
        ctx.dtype = x.dtype
        ctx.save_for_backward(output)

    @staticmethod
    def backward(ctx, dy):
        (y,) = ctx.saved_tensors
        return SoftmaxBackwardFunction.apply(dy, y, ctx.log, ctx.dtype), None, None


class SoftmaxBackwardFunction(FirstDerivative):
    """softmax_backward."""

    @staticmethod
    def forward(*args):
        return softmax_backward(*args)


class LogsumexpFunction(KernelFunction):
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

softmax_op = kernel_op(
    "flashproto::softmax",
    softmax_forward,
    schema="(Tensor x, bool log, ScalarType? dtype=None) -> Tensor",
)
softmax_backward_op = kernel_op(
    "flashproto::softmax_backward",
    softmax_backward,
    schema="(Tensor dy, Tensor y, bool log, ScalarType? dtype=None) -> Tensor",
)
logsumexp_op = kernel_op("flashproto::logsumexp", logsumexp_forward, schema="(Tensor x) -> Tensor")
logsumexp_backward_op = kernel_op(
    "flashproto::logsumexp_backward",
    logsumexp_backward,
    schema="(Tensor dlse, Tensor x, Tensor lse) -> Tensor",
)


@fake_of(softmax_op)
def _(x, log, dtype=None):
    return x.new_empty(x.shape, dtype=dtype)


@fake_of(softmax_backward_op)
def _(dy, y, log, dtype=None):
    return y.new_empty(y.shape, dtype=dtype)


@fake_of(logsumexp_op)
def _(x):
    return x.new_empty(x.shape[:-1], dtype=torch.float32)


@fake_of(logsumexp_backward_op)
def _(dlse, x, lse):
    return x.new_empty(x.shape)


def _softmax_backward(ctx, dy):
    (y,) = ctx.saved_tensors
    return torch.ops.flashproto.softmax_backward(dy, y, ctx.log, ctx.dtype), None, None


def _logsumexp_backward(ctx, dlse):
    return torch.ops.flashproto.logsumexp_backward(dlse, *ctx.saved_tensors)


softmax_op.register_autograd(_softmax_backward, setup_context=SoftmaxFunction.setup_context)
logsumexp_op.register_autograd(_logsumexp_backward, setup_context=LogsumexpFunction.setup_context)
