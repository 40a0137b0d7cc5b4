"""softmax and log_softmax with hooks or split rows: launches, autograd.Function and torch.library ops.

Legend: as in softmax.py.  A hook travels as its name, its operands and its scalars, since the schema of
an operator takes no functions; "" is none.  Operands broadcast to x.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from .. import hooks
from .autograd import FirstDerivative, KernelFunction, fake_of, kernel_op, use_op
from .hook_arguments import HOOKS, hook_arguments, named
from .softmax import run_backward, run_forward


def hooked_softmax(
    x: Tensor,
    log: bool,
    dtype: torch.dtype,
    split_rows: bool,
    prologue: hooks.Call | None,
    epilogue: hooks.Call | None,
) -> Tensor:
    """epilogue(softmax(prologue(x))) in `dtype`; every operand is differentiable that the hook has a
    gradient for.  split_rows: see functional/softmax.py."""
    before, after = named(prologue), named(epilogue)
    if use_op():
        return torch.ops.flashproto.hooked_softmax(x, log, dtype, split_rows, *before, *after)[0]
    operands = (*before[1], *after[1])
    rest = (before[0], before[2], after[0], after[2], len(before[1]))
    return HookedSoftmaxFunction.apply(x, log, dtype, split_rows, *rest, *operands)[0]


# --- launches ------------------------------------------------------------------------------------


def hooked_softmax_forward(
    x: Tensor,
    log: bool,
    dtype: torch.dtype,
    split_rows: bool,
    prologue: str,
    prologue_operands: Sequence[Tensor],
    prologue_scalars: Sequence[float],
    epilogue: str,
    epilogue_operands: Sequence[Tensor],
    epilogue_scalars: Sequence[float],
) -> tuple[Tensor, Tensor]:
    """Launch the forward kernel; returns y and the logsumexp of prologue(x) in float32."""
    y, lse = x.new_empty(x.shape, dtype=dtype), x.new_empty(x.shape[:-1], dtype=torch.float32)
    before = hook_arguments(prologue, prologue_operands, prologue_scalars, x.shape, 1)
    after = hook_arguments(epilogue, epilogue_operands, epilogue_scalars, x.shape, 1)
    run_forward(x, y, lse, log, before, after, split_rows)
    return y, lse


def empty_gradients(x: Tensor, operands: Sequence[Tensor], needed: Sequence[bool]) -> list[Tensor]:
    """[dx, *gradients of the operands], uninitialised; one that is not asked for is of no elements.

    The gradient of an operand has one element for each of x, float32 where they are to be summed.
    """
    by_operand = [
        x.new_empty(x.shape if need else 0, dtype=t.dtype if t.shape == x.shape else torch.float32)
        for t, need in zip(operands, needed, strict=True)
    ]
    return [x.new_empty(x.shape), *by_operand]


def hooked_softmax_backward(
    dy: Tensor,
    x: Tensor,
    lse: Tensor,
    log: bool,
    split_rows: bool,
    prologue: str,
    prologue_operands: Sequence[Tensor],
    prologue_scalars: Sequence[float],
    epilogue: str,
    epilogue_operands: Sequence[Tensor],
    epilogue_scalars: Sequence[float],
    needed: Sequence[bool],
) -> list[Tensor]:
    """Launch the backward kernel; results as empty_gradients.  needed: which operands' gradients are
    asked for, the prologue's first."""
    gradients = empty_gradients(x, [*prologue_operands, *epilogue_operands], needed)
    dx, *by_operand = gradients
    wanted = [t if need else None for t, need in zip(by_operand, needed, strict=True)]
    n = len(prologue_operands)
    before = hook_arguments(prologue, prologue_operands, prologue_scalars, x.shape, 1, wanted[:n])
    after = hook_arguments(epilogue, epilogue_operands, epilogue_scalars, x.shape, 1, wanted[n:])
    run_backward(dy, None, x, lse, dx, log, before, after, split_rows)
    return gradients


# --- autograd ------------------------------------------------------------------------------------


def backward(ctx, launch, dy: Tensor, needed: list[bool]) -> tuple[Tensor, list[Tensor | None]]:
    """dx, and the gradients of the operands that `needed` asks for; `launch` calls
    hooked_softmax_backward."""
    x, lse, *operands = ctx.saved_tensors
    prologue, before_scalars, epilogue, after_scalars = ctx.hooks
    before, after = operands[: ctx.n_before], operands[ctx.n_before :]
    dx, *by_operand = launch(
        dy, x, lse, *ctx.how, prologue, before, before_scalars, epilogue, after, after_scalars, needed
    )
    return dx, [
        gradient.sum_to_size(t.shape).to(t.dtype) if need else None
        for gradient, t, need in zip(by_operand, operands, needed, strict=True)
    ]


class HookedSoftmaxFunction(KernelFunction):
    """For eager calls; returns y and lse.  It has no jvp: forward-mode differentiation raises."""

    @staticmethod
    def forward(
        x, log, dtype, split_rows, prologue, before_scalars, epilogue, after_scalars, n, *operands
    ):
        before, after = operands[:n], operands[n:]
        return hooked_softmax_forward(
            x, log, dtype, split_rows,
            prologue, before, before_scalars, epilogue, after, after_scalars,
        )  # fmt: skip

    @staticmethod
    def setup_context(ctx, inputs, output):
        x, log, _, split_rows, *ctx.hooks, ctx.n_before = inputs[:9]
        ctx.how = log, split_rows
        ctx.save_for_backward(x, output[1], *inputs[9:])
        ctx.mark_non_differentiable(output[1])

    @staticmethod
    def backward(ctx, dy, dlse):
        launch = HookedSoftmaxBackwardFunction.launch
        dx, by_operand = backward(ctx, launch, dy, list(ctx.needs_input_grad[9:]))
        return (dx, *(None,) * 8, *by_operand)


class HookedSoftmaxBackwardFunction(FirstDerivative):
    """hooked_softmax_backward, its lists of operands flattened."""

    @classmethod
    def launch(
        cls, dy, x, lse, log, split_rows, prologue, before, before_scalars, epilogue, after, *rest
    ):
        names = (prologue, before_scalars, epilogue, *rest)
        return cls.apply(dy, x, lse, log, split_rows, *names, len(before), *before, *after)

    @staticmethod
    def forward(*args):
        prologue, before_scalars, epilogue, after_scalars, needed, n, *operands = args[5:]
        before, after = operands[:n], operands[n:]
        return tuple(
            hooked_softmax_backward(
                *args[:5], prologue, before, before_scalars, epilogue, after, after_scalars, needed
            )
        )


# --- compile: torch.library ops ------------------------------------------------------------------

hooked_softmax_op = kernel_op(
    "flashproto::hooked_softmax",
    hooked_softmax_forward,
    schema=f"(Tensor x, bool log, ScalarType dtype, bool split_rows, {HOOKS}) -> (Tensor, Tensor)",
)
hooked_softmax_backward_op = kernel_op(
    "flashproto::hooked_softmax_backward",
    hooked_softmax_backward,
    schema=f"(Tensor dy, Tensor x, Tensor lse, bool log, bool split_rows, {HOOKS}, bool[] needed) "
    "-> Tensor[]",
)


@fake_of(hooked_softmax_op)
def _(x, log, dtype, *_):
    return x.new_empty(x.shape, dtype=dtype), x.new_empty(x.shape[:-1], dtype=torch.float32)


@fake_of(hooked_softmax_backward_op)
def _(dy, x, lse, log, split_rows, prologue, before, _1, epilogue, after, _2, needed):
    return empty_gradients(x, [*before, *after], needed)


def _setup_context(ctx, inputs, output):
    x, log, _, split_rows, prologue, before, before_scalars, epilogue, after, after_scalars = inputs
    ctx.how = log, split_rows
    ctx.hooks = prologue, before_scalars, epilogue, after_scalars
    ctx.n_before = len(before)
    ctx.save_for_backward(x, output[1], *before, *after)


def _backward(ctx, dy, dlse):
    before, after = list(ctx.needs_input_grad[5]), list(ctx.needs_input_grad[8])
    launch = torch.ops.flashproto.hooked_softmax_backward
    dx, by_operand = backward(ctx, launch, dy, before + after)
    n = len(before)
    # torch wants an empty list back for one that it was given, of whatever type.
    scalars = [None if given else [] for given in (ctx.hooks[1], ctx.hooks[3])]
    return dx, None, None, None, None, by_operand[:n], scalars[0], None, by_operand[n:], scalars[1]


hooked_softmax_op.register_autograd(_backward, setup_context=_setup_context)
