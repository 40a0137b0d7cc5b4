"""LayerNorm and RMSNorm that save y for the backward pass, not x or total; see kernels/norm_recover.py.

Legend: norm_launch.py.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from ..kernels.norm_recover import (
    recoverable_weight_kernel,
    recovered,
    recovered_unweighted,
)
from .autograd import FirstDerivative, KernelFunction, fake_of, kernel_op, use_op
from .hook_arguments import HookArguments, operand_rows
from .launch import cdiv, launcher
from .norm_launch import How, empty_gradients, empty_outputs, run_backward, run_forward

launch_recoverable_weight = launcher(recoverable_weight_kernel, tensors=2)


def memory_efficient_norm(
    x: Tensor,
    residual: Tensor | None,
    weight: Tensor | None,
    normalized_ndim: int,
    eps: float,
    centered: bool,
    casting: str,
) -> Tensor | tuple[Tensor, Tensor]:
    """norm.norm without a bias, which keeps nothing as large as x but y."""
    op = torch.ops.flashproto.memory_efficient_norm
    apply = op if use_op() else MemoryEfficientNormFunction.apply
    y, total, _ = apply(x, residual, weight, normalized_ndim, eps, centered, casting)
    return y if residual is None else (y, total)


# --- launches ------------------------------------------------------------------------------------


def weight_shift(casting: str) -> float:
    """What casting adds to the weight."""
    return 1.0 if casting == "gemma" else 0.0


def recoverable_weight(weight: Tensor, casting: str) -> Tensor:
    """What xhat is multiplied by, float32."""
    weight = weight.contiguous()
    out = torch.empty_like(weight, dtype=torch.float32)
    N = out.numel()
    if N:
        launch_recoverable_weight(cdiv(N, 1024), weight, out, N, weight_shift(casting), C=1024)
    return out


def memory_efficient_norm_forward(
    x: Tensor,
    residual: Tensor | None,
    weight: Tensor | None,
    normalized_ndim: int,
    eps: float,
    centered: bool,
    casting: str,
) -> tuple[Tensor, Tensor, Tensor]:
    """Launch the forward kernel; returns (y, total, rstd), total of no elements without a residual."""
    if weight is not None:
        weight = recoverable_weight(weight, casting)
        casting = "torch" if casting == "gemma" else casting
    y, total, mean, rstd = empty_outputs(x, residual, normalized_ndim, centered)
    how = How(normalized_ndim, eps, centered, casting)
    run_forward((x, residual, weight, None), (y, total, mean, rstd), how)
    return y, total, rstd


def memory_efficient_norm_backward(
    dy: Tensor,
    dtotal: Tensor | None,
    y: Tensor,
    weight: Tensor | None,
    rstd: Tensor,
    normalized_ndim: int,
    centered: bool,
    casting: str,
    x_dtype: torch.dtype,
    residual_dtype: torch.dtype,
    need_dweight: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    """(dx, dresidual, dweight) as empty_gradients."""
    gradients = empty_gradients(
        y, weight, x_dtype, residual_dtype, x_dtype, normalized_ndim, need_dweight, False
    )
    lead = (*y.shape[: y.ndim - normalized_ndim], *(1,) * normalized_ndim)
    operands = [rstd.view(lead), *([] if weight is None else [weight])]
    rows = tuple(operand_rows(t, y.shape, normalized_ndim) for t in operands)
    scalars = () if weight is None else (weight_shift(casting),)
    hook = recovered_unweighted if weight is None else recovered
    prologue = HookArguments(forward=hook, arguments=(rows, scalars))
    how = How(normalized_ndim, 0.0, centered, casting, prologue)
    run_backward(dy, dtotal, (y, None, weight, None, None, rstd), gradients, how)
    return gradients[:3]


# --- autograd ------------------------------------------------------------------------------------


class Settings(NamedTuple):
    """What backward knows of a call beside the saved tensors; dtypes: of x and residual."""

    normalized_ndim: int
    centered: bool
    casting: str
    dtypes: tuple[torch.dtype, torch.dtype]
    has_residual: bool


def setup_context(ctx, inputs, output) -> None:
    x, residual, weight, normalized_ndim, _, centered, casting = inputs
    y, _, rstd = output
    dtypes = x.dtype, x.dtype if residual is None else residual.dtype
    ctx.settings = Settings(normalized_ndim, centered, casting, dtypes, residual is not None)
    ctx.save_for_backward(y, weight, rstd)
    ctx.set_materialize_grads(False)


def backward(ctx, launch, dy: Tensor | None, dtotal: Tensor | None):
    """Gradients of the seven arguments; `launch` calls memory_efficient_norm_backward."""
    y, weight, rstd = ctx.saved_tensors
    normalized_ndim, centered, casting, dtypes, has_residual = ctx.settings
    dtotal = dtotal if has_residual else None
    needs = ctx.needs_input_grad[:3]
    if dy is None and dtotal is None:
        return (None,) * 7
    if dy is None:
        dy = torch.zeros((), dtype=y.dtype, device=y.device).expand(y.shape)
    dx, dresidual, dweight = launch(
        dy, dtotal, y, weight, rstd, normalized_ndim, centered, casting, *dtypes, needs[2]
    )
    dresidual = dresidual if dresidual.numel() else dx
    gradients = (dx, dresidual, dweight)
    return *(g if need else None for g, need in zip(gradients, needs, strict=True)), *(None,) * 4


class MemoryEfficientNormFunction(KernelFunction):
    """For eager calls.  It has no jvp: forward-mode differentiation raises."""

    forward = staticmethod(memory_efficient_norm_forward)

    @staticmethod
    def setup_context(ctx, inputs, output):
        setup_context(ctx, inputs, output)
        ctx.mark_non_differentiable(output[2])

    @staticmethod
    def backward(ctx, dy, dtotal, drstd):
        return backward(ctx, MemoryEfficientNormBackwardFunction.apply, dy, dtotal)


class MemoryEfficientNormBackwardFunction(FirstDerivative):
    """memory_efficient_norm_backward."""

    forward = staticmethod(memory_efficient_norm_backward)


# --- compile: torch.library ops ------------------------------------------------------------------

memory_efficient_norm_op = kernel_op(
    "flashproto::memory_efficient_norm",
    memory_efficient_norm_forward,
    schema="(Tensor x, Tensor? residual, Tensor? weight, int normalized_ndim, float eps, "
    "bool centered, str casting) -> (Tensor, Tensor, Tensor)",
)
memory_efficient_norm_backward_op = kernel_op(
    "flashproto::memory_efficient_norm_backward",
    memory_efficient_norm_backward,
    schema="(Tensor dy, Tensor? dtotal, Tensor y, Tensor? weight, Tensor rstd, int normalized_ndim, "
    "bool centered, str casting, ScalarType x_dtype, ScalarType residual_dtype, bool need_dweight) "
    "-> (Tensor, Tensor, Tensor)",
)


@fake_of(memory_efficient_norm_op)
def _(x, residual, weight, normalized_ndim, eps, centered, casting):
    y, total, _, rstd = empty_outputs(x, residual, normalized_ndim, centered)
    return y, total, rstd


@fake_of(memory_efficient_norm_backward_op)
def _(
    dy, dtotal, y, weight, rstd, normalized_ndim, centered, casting, x_dtype, residual_dtype,
    need_dweight,
):  # fmt: skip
    return empty_gradients(
        y, weight, x_dtype, residual_dtype, x_dtype, normalized_ndim, need_dweight, False
    )[:3]


def _backward(ctx, dy, dtotal, drstd):
    return backward(ctx, torch.ops.flashproto.memory_efficient_norm_backward, dy, dtotal)


memory_efficient_norm_op.register_autograd(_backward, setup_context=setup_context)
