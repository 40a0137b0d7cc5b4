"""LayerNorm and RMSNorm into 8-bit floats with a scale for each row: launches, autograd.Function and
torch.library op.

Legend: norm_launch.py, hook_arguments.py; out of x's shape, scale [..., 1, ...] one number a row.
"""

from __future__ import annotations

import torch
from torch import Tensor

from .. import configs, hooks
from ..kernels.norm_quantize import norm_quantize_kernel, norm_quantize_split_kernel
from .autograd import KernelFunction, fake_of, kernel_op, use_op
from .hook_arguments import HOOKS, hook_arguments, launchers, named
from .launch import capability
from .norm_launch import How, forward_arguments, launch_of_rows, sizes

WHOLE = launchers(norm_quantize_kernel, tensors=7)
SPLIT = launchers(norm_quantize_split_kernel, tensors=8)


def quantized_norm(
    x: Tensor,
    residual: Tensor | None,
    weight: Tensor | None,
    bias: Tensor | None,
    normalized_ndim: int,
    eps: float,
    centered: bool,
    casting: str,
    dtype: torch.dtype,
    prologue: hooks.Call | None,
    epilogue: hooks.Call | None,
) -> tuple[Tensor, Tensor] | tuple[Tensor, Tensor, Tensor]:
    """(out, scale), or with a residual (out, scale, total); forward only."""
    before, after = named(prologue), named(epilogue)
    options = (normalized_ndim, eps, centered, casting, dtype)
    if use_op():
        out, scale, total = torch.ops.flashproto.quantized_norm(
            x, residual, weight, bias, *options, *before, *after
        )
    else:
        out, scale, total = QuantizedNormFunction.apply(
            x, residual, weight, bias, *options, before[0], before[2], after[0], after[2],
            len(before[1]), *before[1], *after[1],
        )  # fmt: skip
    return (out, scale) if residual is None else (out, scale, total)


def empty_quantized(
    x: Tensor, residual: Tensor | None, normalized_ndim: int, dtype: torch.dtype
) -> tuple[Tensor, Tensor, Tensor]:
    """(out, scale, total), uninitialised; total of no elements without a residual."""
    total = x.new_empty(0)
    if residual is not None:
        total = x.new_empty(x.shape, dtype=torch.promote_types(x.dtype, residual.dtype))
    rows = (*x.shape[: x.ndim - normalized_ndim], *(1,) * normalized_ndim)
    return x.new_empty(x.shape, dtype=dtype), x.new_empty(rows, dtype=torch.float32), total


def quantized_norm_forward(
    x, residual, weight, bias, normalized_ndim, eps, centered, casting, dtype,
    prologue, prologue_operands, prologue_scalars, epilogue, epilogue_operands, epilogue_scalars,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """Launch the kernel; results as empty_quantized."""
    outputs = empty_quantized(x, residual, normalized_ndim, dtype)
    out, scale, total = outputs
    if x.numel() == 0:
        scale.fill_(SMALLEST_SCALE)
        return outputs
    before = hook_arguments(prologue, prologue_operands, prologue_scalars, x.shape, normalized_ndim)
    after = hook_arguments(epilogue, epilogue_operands, epilogue_scalars, x.shape, normalized_ndim)
    how = How(normalized_ndim, eps, centered, casting, before, after)
    M, N = sizes(x, normalized_ndim)
    rows, numbers = forward_arguments((x, residual, weight, bias), how)
    tensors = (*rows, out, None if residual is None else total, scale)
    # The whole row waits for its scale in float32: as much to hold as with a residual.
    config = configs.norm_forward(N, 4, True, centered, capability(x.device))
    launches = WHOLE[how.hooked], SPLIT[how.hooked]
    numbers = (*numbers, torch.finfo(dtype).max)
    launch_of_rows(launches, config, M, N, tensors, numbers, exchanges=2)()
    return outputs


SMALLEST_SCALE = 2.0**-126


# --- autograd ------------------------------------------------------------------------------------


class QuantizedNormFunction(KernelFunction):
    """For eager calls, the lists of operands flattened.  It has no jvp and no backward."""

    @staticmethod
    def forward(
        x, residual, weight, bias, normalized_ndim, eps, centered, casting, dtype,
        prologue, before_scalars, epilogue, after_scalars, n_before, *operands,
    ):  # fmt: skip
        return quantized_norm_forward(
            x, residual, weight, bias, normalized_ndim, eps, centered, casting, dtype,
            prologue, operands[:n_before], before_scalars,
            epilogue, operands[n_before:], after_scalars,
        )  # fmt: skip

    @staticmethod
    def setup_context(ctx, inputs, output):
        """Keeps nothing: there is no derivative.  torch wants it where forward has no ctx."""

    @staticmethod
    def backward(ctx, *grads):
        _backward(ctx, *grads)


def _backward(ctx, *grads):
    raise NotImplementedError("flashproto: norms into 8-bit floats have no gradient")


# --- compile: torch.library op -------------------------------------------------------------------

quantized_norm_op = kernel_op(
    "flashproto::quantized_norm",
    quantized_norm_forward,
    schema="(Tensor x, Tensor? residual, Tensor? weight, Tensor? bias, int normalized_ndim, float eps, "
    f"bool centered, str casting, ScalarType dtype, {HOOKS}) -> (Tensor, Tensor, Tensor)",
)


@fake_of(quantized_norm_op)
def _(x, residual, weight, bias, normalized_ndim, eps, centered, casting, dtype, *_):
    return empty_quantized(x, residual, normalized_ndim, dtype)


quantized_norm_op.register_autograd(_backward)
