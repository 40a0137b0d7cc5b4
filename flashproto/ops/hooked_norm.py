"""LayerNorm and RMSNorm with hooks or split rows: launches, autograd.Function and torch.library ops.

Legend: norm_launch.py, hook_arguments.py.  Operands broadcast to x.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from .. import hooks
from .autograd import FirstDerivative, KernelFunction, fake_of, kernel_op, use_op
from .hook_arguments import HOOKS, hook_arguments, named
from .norm_launch import How, empty_gradients, empty_outputs, run_backward, run_forward


def hooked_norm(
    x: Tensor,
    residual: Tensor | None,
    weight: Tensor | None,
    bias: Tensor | None,
    normalized_ndim: int,
    eps: float,
    centered: bool,
    casting: str,
    dtype: torch.dtype,
    split_rows: bool,
    prologue: hooks.Call | None,
    epilogue: hooks.Call | None,
) -> Tensor | tuple[Tensor, Tensor]:
    """norm.norm with prologue(x) for x, epilogue(y) for y, and y of `dtype`; every operand is
    differentiable that the hook has a gradient for.  split_rows: see functional/norm.py."""
    before, after = named(prologue), named(epilogue)
    options = (normalized_ndim, eps, centered, casting, dtype, split_rows)
    if use_op():
        y, total, _, _ = torch.ops.flashproto.hooked_norm(
            x, residual, weight, bias, *options, *before, *after
        )
    else:
        y, total, _, _ = HookedNormFunction.apply(
            x, residual, weight, bias, *options, before[0], before[2], after[0], after[2],
            len(before[1]), *before[1], *after[1],
        )  # fmt: skip
    return y if residual is None else (y, total)


# --- launches ---------------------------------------------------------------------------------------


def hooked_norm_forward(
    x, residual, weight, bias, normalized_ndim, eps, centered, casting, dtype, split_rows,
    prologue, prologue_operands, prologue_scalars, epilogue, epilogue_operands, epilogue_scalars,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """Launch the forward kernel; returns (y, total, mean, rstd)."""
    y, total, mean, rstd = empty_outputs(x, residual, normalized_ndim, centered)
    y = y if dtype == x.dtype else x.new_empty(x.shape, dtype=dtype)
    before, after = (
        hook_arguments(name, operands, scalars, x.shape, normalized_ndim)
        for name, operands, scalars in (
            (prologue, prologue_operands, prologue_scalars),
            (epilogue, epilogue_operands, epilogue_scalars),
        )
    )
    outputs = y, total, mean, rstd
    how = How(normalized_ndim, eps, centered, casting, before, after, split_rows)
    run_forward((x, residual, weight, bias), outputs, how)
    return outputs


def empty_hooked_gradients(
    x, weight, x_dtype, residual_dtype, bias_dtype, normalized_ndim, need_dweight, need_dbias,
    has_residual, prologue, operands, needed,
) -> list[Tensor]:  # fmt: skip
    """[dx, dresidual, dweight, dbias, *gradients of the operands], uninitialised; one that is not asked
    for is of no elements.

    Behind a prologue dresidual is never dx.  The gradient of an operand has one element for each of
    x, float32 where they are still to be summed.
    """
    dx, dresidual, dweight, dbias = empty_gradients(
        x, weight, x_dtype, residual_dtype, bias_dtype, normalized_ndim, need_dweight, need_dbias
    )
    if has_residual and prologue:
        dresidual = x.new_empty(x.shape, dtype=residual_dtype)
    by_operand = [
        x.new_empty(x.shape if need else 0, dtype=t.dtype if t.shape == x.shape else torch.float32)
        for t, need in zip(operands, needed, strict=True)
    ]
    return [dx, dresidual, dweight, dbias, *by_operand]


def hooked_norm_backward(
    dy, dtotal, x, input, weight, bias, mean, rstd, normalized_ndim, centered, casting, split_rows,
    prologue, prologue_operands, prologue_scalars, epilogue, epilogue_operands, epilogue_scalars,
    has_residual, x_dtype, residual_dtype, bias_dtype, need_dweight, need_dbias, needed,
) -> list[Tensor]:  # fmt: skip
    """Launch the backward kernels; results as empty_hooked_gradients.

    x is total where a residual was added; input is the x of the forward where the prologue's
    derivative reads it; bias is given for an epilogue.  needed: which operands' gradients are asked
    for, the prologue's first.
    """
    operands = [*prologue_operands, *epilogue_operands]
    gradients = empty_hooked_gradients(
        x, weight, x_dtype, residual_dtype, bias_dtype, normalized_ndim, need_dweight, need_dbias,
        has_residual, prologue, operands, needed,
    )  # fmt: skip
    dx, dresidual, dweight, dbias = gradients[:4]
    by_operand = [t if need else None for t, need in zip(gradients[4:], needed, strict=True)]
    n = len(prologue_operands)
    before = hook_arguments(
        prologue, prologue_operands, prologue_scalars, x.shape, normalized_ndim, by_operand[:n]
    )
    if has_residual:
        before = before._replace(forward=None)  # total holds its result
    after = hook_arguments(
        epilogue, epilogue_operands, epilogue_scalars, x.shape, normalized_ndim, by_operand[n:]
    )
    run_backward(
        dy, dtotal, (x, input, weight, bias, mean, rstd), (dx, dresidual, dweight, dbias),
        How(normalized_ndim, 0.0, centered, casting, before, after, split_rows),
    )  # fmt: skip
    if x.numel() == 0:
        for gradient in gradients[4:]:
            gradient.zero_()
    return gradients


# --- autograd ---------------------------------------------------------------------------------------


def save(
    ctx, x, residual, weight, bias, options, prologue, before, before_scalars, epilogue, after,
    after_scalars, output,
) -> None:  # fmt: skip
    """Keep what the backward needs; before, after: operands of the two hooks."""
    _, total, mean, rstd = output
    normalized_ndim, _, centered, casting, _, split_rows = options
    ctx.how = normalized_ndim, centered, casting, split_rows
    ctx.hooks = prologue, before_scalars, epilogue, after_scalars
    ctx.n_before, ctx.has_residual = len(before), residual is not None
    ctx.dtypes = [
        x.dtype,
        x.dtype if residual is None else residual.dtype,
        x.dtype if bias is None else bias.dtype,
    ]
    input = x if prologue and hooks.get(prologue).needs_value else None
    ctx.save_for_backward(
        x if residual is None else total, input, weight, bias if epilogue else None, mean, rstd,
        *before, *after,
    )  # fmt: skip
    ctx.set_materialize_grads(False)


def backward(
    ctx, launch, dy: Tensor | None, dtotal: Tensor | None, needs: Sequence[bool], needed: list[bool]
) -> tuple[list[Tensor | None], list[Tensor | None]]:
    """Gradients of (x, residual, weight, bias), which `needs` asks for, and of the operands, which
    `needed` asks for; `launch` calls hooked_norm_backward."""
    x, input, weight, bias, mean, rstd, *operands = ctx.saved_tensors
    before, after = operands[: ctx.n_before], operands[ctx.n_before :]
    prologue, before_scalars, epilogue, after_scalars = ctx.hooks
    if dy is None and dtotal is None:
        return [None] * 4, [None] * len(operands)
    if dy is None:
        dy = torch.zeros((), dtype=ctx.dtypes[0], device=x.device).expand(x.shape)
    dx, dresidual, dweight, dbias, *by_operand = launch(
        dy, dtotal if ctx.has_residual else None, x, input, weight, bias, mean, rstd,
        *ctx.how, prologue, before, before_scalars,
        epilogue, after, after_scalars, ctx.has_residual, *ctx.dtypes, needs[2], needs[3], needed,
    )  # fmt: skip
    if not dresidual.numel():
        dresidual = dx
    gradients = [
        t if need else None for t, need in zip((dx, dresidual, dweight, dbias), needs, strict=True)
    ]
    return gradients, [
        gradient.sum_to_size(t.shape).to(t.dtype) if need else None
        for gradient, t, need in zip(by_operand, operands, needed, strict=True)
    ]


class HookedNormFunction(KernelFunction):
    """For eager calls.  It has no jvp: forward-mode differentiation raises."""

    @staticmethod
    def forward(
        x, residual, weight, bias, normalized_ndim, eps, centered, casting, dtype, split_rows,
        prologue, before_scalars, epilogue, after_scalars, n_before, *operands,
    ):  # fmt: skip
        return hooked_norm_forward(
            x, residual, weight, bias, normalized_ndim, eps, centered, casting, dtype, split_rows,
            prologue, operands[:n_before], before_scalars,
            epilogue, operands[n_before:], after_scalars,
        )  # fmt: skip

    @staticmethod
    def setup_context(ctx, inputs, output):
        prologue, before_scalars, epilogue, after_scalars, n, *operands = inputs[10:]
        save(
            ctx, *inputs[:4], inputs[4:10], prologue, operands[:n], before_scalars,
            epilogue, operands[n:], after_scalars, output,
        )  # fmt: skip
        ctx.mark_non_differentiable(*output[2:])

    @staticmethod
    def backward(ctx, dy, dtotal, dmean, drstd):
        needs = ctx.needs_input_grad
        gradients, by_operand = backward(
            ctx, HookedNormBackwardFunction.launch, dy, dtotal, needs[:4], list(needs[15:])
        )
        return (*gradients, *(None,) * 11, *by_operand)


class HookedNormBackwardFunction(FirstDerivative):
    """hooked_norm_backward, its lists of operands flattened."""

    @classmethod
    def launch(cls, *args):
        (prologue, before, before_scalars, epilogue, after, after_scalars), rest = (
            args[12:18],
            args[18:],
        )
        return cls.apply(
            *args[:12], prologue, before_scalars, epilogue, after_scalars, rest, len(before),
            *before, *after,
        )  # fmt: skip

    @staticmethod
    def forward(*args):
        prologue, before_scalars, epilogue, after_scalars, rest, n, *operands = args[12:]
        return tuple(
            hooked_norm_backward(
                *args[:12], prologue, operands[:n], before_scalars, epilogue, operands[n:],
                after_scalars, *rest,
            )
        )  # fmt: skip


# --- compile: torch.library ops ---------------------------------------------------------------------

hooked_norm_op = kernel_op(
    "flashproto::hooked_norm",
    hooked_norm_forward,
    schema="(Tensor x, Tensor? residual, Tensor? weight, Tensor? bias, int normalized_ndim, float eps, "
    f"bool centered, str casting, ScalarType dtype, bool split_rows, {HOOKS}) "
    "-> (Tensor, Tensor, Tensor, Tensor)",
)
hooked_norm_backward_op = kernel_op(
    "flashproto::hooked_norm_backward",
    hooked_norm_backward,
    schema="(Tensor dy, Tensor? dtotal, Tensor x, Tensor? input, Tensor? weight, Tensor? bias, "
    f"Tensor mean, Tensor rstd, int normalized_ndim, bool centered, str casting, bool split_rows, "
    f"{HOOKS}, "
    "bool has_residual, ScalarType x_dtype, ScalarType residual_dtype, ScalarType bias_dtype, "
    "bool need_dweight, bool need_dbias, bool[] needed) -> Tensor[]",
)


@fake_of(hooked_norm_op)
def _(x, residual, weight, bias, normalized_ndim, eps, centered, casting, dtype, *_):
    y, *others = empty_outputs(x, residual, normalized_ndim, centered)
    return y.to(dtype), *others


@fake_of(hooked_norm_backward_op)
def _(
    dy, dtotal, x, input, weight, bias, mean, rstd, normalized_ndim, centered, casting, split_rows,
    prologue, before, before_scalars, epilogue, after, after_scalars,
    has_residual, x_dtype, residual_dtype, bias_dtype, need_dweight, need_dbias, needed,
):  # fmt: skip
    return empty_hooked_gradients(
        x, weight, x_dtype, residual_dtype, bias_dtype, normalized_ndim, need_dweight, need_dbias,
        has_residual, prologue, [*before, *after], needed,
    )  # fmt: skip


def _setup_context(ctx, inputs, output):
    save(ctx, *inputs[:4], inputs[4:10], *inputs[10:], output)


def _backward(ctx, dy, dtotal, dmean, drstd):
    needs = ctx.needs_input_grad
    before, after = list(needs[11]), list(needs[14])
    gradients, by_operand = backward(
        ctx, torch.ops.flashproto.hooked_norm_backward, dy, dtotal, needs[:4], before + after
    )
    n = len(before)
    # torch.library takes a list of no scalars for one of no tensors, which wants no gradients back.
    before_scalars, after_scalars = (None if scalars else [] for scalars in ctx.hooks[1::2])
    return (
        *gradients, *(None,) * 7, by_operand[:n], before_scalars, None, by_operand[n:], after_scalars
    )  # fmt: skip


hooked_norm_op.register_autograd(_backward, setup_context=_setup_context)
