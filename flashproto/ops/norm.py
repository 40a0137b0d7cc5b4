"""LayerNorm and RMSNorm: the autograd.Functions of eager calls and the torch.library ops.

Legend: norm_launch.py.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from .autograd import FirstDerivative, KernelFunction, use_op
from .norm_launch import (
    How,
    keeps_statistics,
    needed_outputs,
    norm_backward,
    run_forward,
)


def norm(
    x: Tensor,
    residual: Tensor | None,
    weight: Tensor | None,
    bias: Tensor | None,
    normalized_ndim: int,
    eps: float,
    centered: bool,
    casting: str = "torch",
) -> Tensor | tuple[Tensor, Tensor]:
    """Returns y, or with a residual (y, total); all of them differentiable.

    y is the norm of x over its last `normalized_ndim` dimensions, or that of total = x + residual
    as rounded to the wider of the two dtypes.  centered is LayerNorm, otherwise RMSNorm.  casting:
    see kernels/norm.py.
    """
    apply = torch.ops.flashproto.norm if use_op() else NormFunction.apply
    y, total, _, _ = apply(x, residual, weight, bias, normalized_ndim, eps, centered, casting)
    return y if residual is None else (y, total)


# --- autograd ------------------------------------------------------------------------------------


class Settings(NamedTuple):
    """What backward knows of a call beside the saved tensors; dtypes: of x, residual and bias."""

    normalized_ndim: int
    eps: float
    centered: bool
    casting: str
    has_residual: bool
    dtypes: tuple[torch.dtype, torch.dtype, torch.dtype]


def settings(x, residual, bias, normalized_ndim, eps, centered, casting) -> Settings:
    residual_dtype, bias_dtype = (x.dtype if t is None else t.dtype for t in (residual, bias))
    dtypes = x.dtype, residual_dtype, bias_dtype
    return Settings(normalized_ndim, eps, centered, casting, residual is not None, dtypes)


def setup_context(ctx, inputs, output) -> None:
    x, residual, weight, bias, *how = inputs
    _, total, mean, rstd = output
    ctx.settings = settings(x, residual, bias, *how)
    ctx.save_for_backward(x if residual is None else total, weight, mean, rstd)
    ctx.set_materialize_grads(False)


def backward(saved, needs, launch, settings: Settings, dy: Tensor | None, dtotal: Tensor | None):
    """Gradients of norm's eight arguments, the first four of which `needs` asks for; saved: x or total,
    weight, mean, rstd; `launch` calls norm_backward."""
    x, weight, mean, rstd = saved
    need_x, need_residual, need_dweight, need_dbias = needs[:4]
    normalized_ndim, eps, centered, casting, has_residual, dtypes = settings
    dtotal = dtotal if has_residual else None
    x_dtype, residual_dtype, _ = dtypes
    if dy is not None:
        dx, dresidual, dweight, dbias = launch(
            dy, dtotal, x, weight, mean, rstd, normalized_ndim, eps, centered, *dtypes,
            need_dweight, need_dbias, casting,
        )  # fmt: skip
        dresidual = dx if residual_dtype == x_dtype else dresidual
    elif dtotal is not None:
        dx, dresidual, dweight, dbias = dtotal.to(x_dtype), dtotal.to(residual_dtype), None, None
    else:
        return (None,) * 8
    return (
        dx if need_x else None,
        dresidual if need_residual else None,
        dweight if need_dweight else None,
        dbias if need_dbias else None,
        *(None,) * 4,
    )


class NormFunction(KernelFunction):
    """For eager calls.  It has no jvp: forward-mode differentiation raises."""

    @staticmethod
    def forward(x, residual, weight, bias, normalized_ndim, eps, centered, casting):
        kept = keeps_statistics(x, normalized_ndim)
        outputs = needed_outputs(x, residual, normalized_ndim, centered, kept)
        how = How(normalized_ndim, eps, centered, casting)
        run_forward((x, residual, weight, bias), outputs, how)
        return outputs

    @staticmethod
    def setup_context(ctx, inputs, output):
        setup_context(ctx, inputs, output)
        ctx.mark_non_differentiable(*(t for t in output[2:] if t is not None))

    @staticmethod
    def backward(ctx, dy, dtotal, dmean, drstd):
        launch = NormBackwardFunction.apply
        return backward(ctx.saved_tensors, ctx.needs_input_grad, launch, ctx.settings, dy, dtotal)


class NormBackwardFunction(FirstDerivative):
    """norm_backward."""

    forward = staticmethod(norm_backward)
