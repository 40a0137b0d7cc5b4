"""LayerNorm and RMSNorm: launches of the kernels, their autograd.Function and torch.library ops.

Legend: x, residual, y, total [..., *normalized_shape], seen as [M, N]; weight, bias [N] once
flattened; mean, rstd [M] float32.
"""

from __future__ import annotations

import math

import torch
import triton
from torch import Tensor

from .. import configs
from ..kernels.norm import (
    column_sums_kernel,
    norm_backward_kernel,
    norm_backward_looped_kernel,
    norm_forward_kernel,
    norm_forward_looped_kernel,
    norm_weight_gradient_kernel,
)
from .autograd import FirstDerivative, refuse_tangents, use_op
from .launch import capability, multiprocessors, on_device
from .rows import as_rows


def norm(
    x: Tensor,
    residual: Tensor | None,
    weight: Tensor | None,
    bias: Tensor | None,
    normalized_ndim: int,
    eps: float,
    centered: bool,
) -> Tensor | tuple[Tensor, Tensor]:
    """Returns y, or with a residual (y, total); all of them differentiable.

    y is the norm of x over its last `normalized_ndim` dimensions, or that of total = x + residual
    as rounded to the wider of the two dtypes.  centered is LayerNorm, otherwise RMSNorm.
    """
    apply = torch.ops.flashproto.norm if use_op() else NormFunction.apply
    y, total, _, _ = apply(x, residual, weight, bias, normalized_ndim, eps, centered)
    return y if residual is None else (y, total)


# --- launches ------------------------------------------------------------------------------------


def sizes(x: Tensor, normalized_ndim: int) -> tuple[int, int]:
    """(M, N): how many rows, how many elements in each."""
    lead = x.ndim - normalized_ndim
    return math.prod(x.shape[:lead]), math.prod(x.shape[lead:])


def empty_outputs(
    x: Tensor, residual: Tensor | None, normalized_ndim: int, centered: bool
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """(y, total, mean, rstd), uninitialised; one without a part to play is of no elements."""
    M, _ = sizes(x, normalized_ndim)
    y = x.new_empty(x.shape)
    total = x.new_empty(0)
    if residual is not None:
        total = x.new_empty(x.shape, dtype=torch.promote_types(x.dtype, residual.dtype))
    mean = x.new_empty(M if centered else 0, dtype=torch.float32)
    return y, total, mean, x.new_empty(M, dtype=torch.float32)


def norm_forward(
    x: Tensor,
    residual: Tensor | None,
    weight: Tensor | None,
    bias: Tensor | None,
    normalized_ndim: int,
    eps: float,
    centered: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Launch the forward kernel; returns (y, total, mean, rstd) as empty_outputs describes them."""
    M, N = sizes(x, normalized_ndim)
    y, total, mean, rstd = empty_outputs(x, residual, normalized_ndim, centered)
    if y.numel() == 0:
        return y, total, mean.zero_(), rstd.zero_()
    x = as_rows(x, normalized_ndim)
    residual = None if residual is None else as_rows(residual, normalized_ndim)
    arguments = (
        x, residual, contiguous(weight), contiguous(bias),
        y, None if residual is None else total, mean if centered else None, rstd,
        x.stride(0), 0 if residual is None else residual.stride(0), M, N, eps, centered,
    )  # fmt: skip
    itemsize = (x if residual is None else total).element_size()
    config = configs.norm_forward(N, itemsize, residual is not None, centered, capability(x.device))
    with on_device(x.device):
        if config.looped:
            norm_forward_looped_kernel[(M,)](*arguments, C=config.columns, num_warps=config.num_warps)
        else:
            norm_forward_kernel[(triton.cdiv(M, config.rows),)](
                *arguments, R=config.rows, C=config.columns, num_warps=config.num_warps,
                maxnreg=config.max_registers,
            )  # fmt: skip
    return y, total, mean, rstd


def contiguous(parameter: Tensor | None) -> Tensor | None:
    return None if parameter is None else parameter.contiguous()


def empty_gradients(
    x: Tensor,
    weight: Tensor | None,
    x_dtype: torch.dtype,
    residual_dtype: torch.dtype,
    bias_dtype: torch.dtype,
    normalized_ndim: int,
    need_dweight: bool,
    need_dbias: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """(dx, dresidual, dweight, dbias), uninitialised; one that is not asked for is of no elements.

    dresidual of the same dtype as dx is dx itself, hence not asked for.
    """
    shape = x.shape[x.ndim - normalized_ndim :]
    dx = x.new_empty(x.shape, dtype=x_dtype)
    dresidual = x.new_empty(x.shape if residual_dtype != x_dtype else 0, dtype=residual_dtype)
    dweight = x.new_empty(shape if need_dweight else 0, dtype=None if weight is None else weight.dtype)
    return dx, dresidual, dweight, x.new_empty(shape if need_dbias else 0, dtype=bias_dtype)


def norm_backward(
    dy: Tensor,
    dtotal: Tensor | None,
    x: Tensor,
    weight: Tensor | None,
    mean: Tensor,
    rstd: Tensor,
    normalized_ndim: int,
    centered: bool,
    x_dtype: torch.dtype,
    residual_dtype: torch.dtype,
    bias_dtype: torch.dtype,
    need_dweight: bool,
    need_dbias: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Launch the backward kernels; x is total where a residual was added, dtotal the gradient that
    reaches it from elsewhere.  Arguments otherwise and results as empty_gradients."""
    M, N = sizes(x, normalized_ndim)
    gradients = empty_gradients(
        x, weight, x_dtype, residual_dtype, bias_dtype, normalized_ndim, need_dweight, need_dbias
    )
    if x.numel() == 0:
        for gradient in gradients:
            gradient.zero_()
        return gradients
    dx, dresidual, dweight, dbias = (t if t.numel() else None for t in gradients)
    x, dy = as_rows(x, normalized_ndim), as_rows(dy, normalized_ndim)
    dtotal = None if dtotal is None else as_rows(dtotal, normalized_ndim)
    weight, mean_ = contiguous(weight), mean if centered else None
    inputs = (dy, dtotal, x, weight, mean_, rstd, dx, dresidual)
    strides = (dy.stride(0), 0 if dtotal is None else dtotal.stride(0), x.stride(0))
    sums = need_dweight or need_dbias
    config = configs.norm_backward(N, x.element_size(), sums)
    with on_device(x.device):
        if config.looped:
            norm_backward_looped_kernel[(M,)](
                *inputs, *strides, M, N, centered, C=config.columns, num_warps=config.num_warps
            )
            if sums:
                weight_gradient(dy, x, mean_, rstd, dweight, dbias, centered)
            return gradients
        tiles = triton.cdiv(M, config.rows)
        P = min(tiles, config.programs * multiprocessors(x.device)) if sums else tiles
        partials = partial_sums(P, N, dweight, dbias)
        norm_backward_kernel[(P,)](
            *inputs, *partials, *strides, M, N, centered,
            R=config.rows, C=config.columns, STAGES=config.stages, num_warps=config.num_warps,
        )  # fmt: skip
        if sums:
            column_sums(*partials, dweight, dbias)
    return gradients


def weight_gradient(dy, x, mean, rstd, dweight, dbias, centered: bool) -> None:
    """dweight and dbias of rows too wide for sums in registers beside dx; dy and x are [M, N]."""
    M, N = x.shape
    config = configs.norm_weight_gradient()
    column_tiles = triton.cdiv(N, config.columns)
    wanted = triton.cdiv(config.programs * multiprocessors(x.device), column_tiles)
    P = min(triton.cdiv(M, config.rows), wanted)
    partials = partial_sums(P, N, dweight, dbias)
    norm_weight_gradient_kernel[(column_tiles * P,)](
        dy, x, mean, rstd, *partials, dy.stride(0), x.stride(0), M, N, P, centered,
        R=config.rows, C=config.columns, num_warps=config.num_warps,
    )  # fmt: skip
    column_sums(*partials, dweight, dbias)


def partial_sums(
    P: int, N: int, dweight: Tensor | None, dbias: Tensor | None
) -> tuple[Tensor | None, Tensor | None]:
    """Float32 [P, N] for either output that is asked for."""
    dweight, dbias = (
        None if t is None else torch.empty(P, N, dtype=torch.float32, device=t.device)
        for t in (dweight, dbias)
    )
    return dweight, dbias


def column_sums(dweight_partial, dbias_partial, dweight, dbias) -> None:
    """Add up the partial sums [P, N] in a fixed order."""
    P, N = (dbias_partial if dweight_partial is None else dweight_partial).shape
    config = configs.column_sums(N)
    column_sums_kernel[(triton.cdiv(N, config.columns),)](
        dweight_partial, dbias_partial, dweight, dbias, P, N,
        R=config.rows, C=config.columns, num_warps=config.num_warps,
    )  # fmt: skip


# --- autograd ------------------------------------------------------------------------------------


def setup_context(ctx, inputs, output) -> None:
    x, residual, weight, bias, ctx.normalized_ndim, _, ctx.centered = inputs
    _, total, mean, rstd = output
    ctx.has_residual = residual is not None
    ctx.dtypes = [
        x.dtype,
        x.dtype if residual is None else residual.dtype,
        x.dtype if bias is None else bias.dtype,
    ]
    ctx.save_for_backward(x if residual is None else total, weight, mean, rstd)
    ctx.set_materialize_grads(False)


def backward(ctx, launch, dy: Tensor | None, dtotal: Tensor | None):
    """Gradients of norm's seven arguments; `launch` calls norm_backward."""
    x, weight, mean, rstd = ctx.saved_tensors
    need_x, need_residual, need_dweight, need_dbias = ctx.needs_input_grad[:4]
    dtotal = dtotal if ctx.has_residual else None
    x_dtype, residual_dtype, _ = ctx.dtypes
    if dy is not None:
        dx, dresidual, dweight, dbias = launch(
            dy, dtotal, x, weight, mean, rstd, ctx.normalized_ndim, ctx.centered, *ctx.dtypes,
            need_dweight, need_dbias,
        )  # fmt: skip
        dresidual = dx if residual_dtype == x_dtype else dresidual
    elif dtotal is not None:
        dx, dresidual, dweight, dbias = dtotal.to(x_dtype), dtotal.to(residual_dtype), None, None
    else:
        return (None,) * 7
    return (
        dx if need_x else None,
        dresidual if need_residual else None,
        dweight if need_dweight else None,
        dbias if need_dbias else None,
        *(None,) * 3,
    )


class NormFunction(torch.autograd.Function):
    """For eager calls.  It has no jvp: forward-mode differentiation raises."""

    @staticmethod
    def forward(x, residual, weight, bias, normalized_ndim, eps, centered):
        return norm_forward(x, residual, weight, bias, normalized_ndim, eps, centered)

    @staticmethod
    def setup_context(ctx, inputs, output):
        setup_context(ctx, inputs, output)
        ctx.mark_non_differentiable(*output[2:])

    @staticmethod
    def backward(ctx, dy, dtotal, dmean, drstd):
        return backward(ctx, NormBackwardFunction.apply, dy, dtotal)


class NormBackwardFunction(FirstDerivative):
    """norm_backward."""

    @staticmethod
    def forward(*args):
        return norm_backward(*args)


# --- compile: torch.library ops ------------------------------------------------------------------

norm_op = torch.library.custom_op(
    "flashproto::norm",
    norm_forward,
    mutates_args=(),
    schema="(Tensor x, Tensor? residual, Tensor? weight, Tensor? bias, int normalized_ndim, "
    "float eps, bool centered) -> (Tensor, Tensor, Tensor, Tensor)",
)
norm_backward_op = torch.library.custom_op(
    "flashproto::norm_backward",
    norm_backward,
    mutates_args=(),
    schema="(Tensor dy, Tensor? dtotal, Tensor x, Tensor? weight, Tensor mean, Tensor rstd, "
    "int normalized_ndim, bool centered, ScalarType x_dtype, ScalarType residual_dtype, "
    "ScalarType bias_dtype, bool need_dweight, bool need_dbias) "
    "-> (Tensor, Tensor, Tensor, Tensor)",
)


@norm_op.register_fake
def _(x, residual, weight, bias, normalized_ndim, eps, centered):
    return empty_outputs(x, residual, normalized_ndim, centered)


@norm_backward_op.register_fake
def _(dy, dtotal, x, weight, mean, rstd, ndim, centered, *dtypes_and_needs):
    *dtypes, need_dweight, need_dbias = dtypes_and_needs
    return empty_gradients(x, weight, *dtypes, ndim, need_dweight, need_dbias)


def _backward(ctx, dy, dtotal, dmean, drstd):
    return backward(ctx, torch.ops.flashproto.norm_backward, dy, dtotal)


norm_op.register_autograd(_backward, setup_context=setup_context)
refuse_tangents(norm_op)
