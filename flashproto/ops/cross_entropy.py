"""Cross entropy of logits: launches of the kernels, their autograd.Function and torch.library ops.

Legend: logits [..., V], seen as x [M, V]; targets [...]; weight [V]; loss [...] or one number; z, lse,
m, l [...] float32; denominator one number, of no elements unless the reduction is the mean.
options: ignore_index, label_smoothing, z_loss, and softcap, 0 for none.
"""

from __future__ import annotations

import torch
from torch import Tensor

from .. import configs
from ..kernels.cross_entropy import (
    cross_entropy_backward_kernel,
    cross_entropy_forward_kernel,
    cross_entropy_total_kernel,
)
from .autograd import FirstDerivative, KernelFunction, fake_of, kernel_op, use_op
from .launch import Launch, cdiv, launcher, multiprocessors
from .memory import Memory
from .rows import as_rows

launch_forward = launcher(cross_entropy_forward_kernel, tensors=11)
launch_backward = launcher(cross_entropy_backward_kernel, tensors=11)
launch_total = launcher(cross_entropy_total_kernel, tensors=7)

Options = tuple[int, float, float, float]
Numbers = Tensor | Memory  # float32, which only kernels read


def cross_entropy(
    logits: Tensor,
    targets: Tensor,
    weight: Tensor | None,
    options: Options,
    reduction: str,
    need_lse: bool,
    inplace_backward: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    """Returns (loss, z, lse); lse is differentiable, and there for ignored rows, if need_lse.

    Where the gradient will be that of one number, it is written by the forward pass already, while the
    logits are in cache; the backward pass then has nothing left to do, unless the gradient from above
    is not 1 (see kernels/cross_entropy.py).  With float16 logits it hardly ever is 1: their gradients
    need a loss scale, without which most are too small for float16.
    """
    if use_op():
        op = torch.ops.flashproto.cross_entropy
        return op(logits, targets, weight, *options, reduction, need_lse)[:3]
    one_number = reduction != "none" and not need_lse
    recorded = torch.is_grad_enabled() and logits.requires_grad
    at_once = recorded and one_number and not inplace_backward and logits.dtype != torch.float16
    arguments = (logits, targets, weight, *options, reduction, need_lse, at_once, inplace_backward)
    return CrossEntropyFunction.apply(*arguments)[:3]


# --- launches ------------------------------------------------------------------------------------


def empty_losses(logits: Tensor, shape: torch.Size) -> tuple[Tensor, ...]:
    """(loss, z, lse, m, l) of rows, uninitialised."""
    return tuple(logits.new_empty(shape, dtype=torch.float32) for _ in range(5))


def constants(weight: Tensor | None, label_smoothing: float) -> tuple[Tensor | None, Tensor | None]:
    """The class weights as a kernel takes them, and their sum where it is needed."""
    if weight is None:
        return None, None
    return weight.contiguous(), weight.sum(dtype=torch.float32) if label_smoothing else None


def rows_forward(
    x: Tensor,
    targets: Tensor,
    weights: tuple[Tensor | None, Tensor | None],
    denominator: Tensor | None,
    losses: tuple[Tensor, ...],
    dx: Tensor | None,
    options: Options,
    keep: bool,
) -> None:
    """Launch the forward kernel on x [M, V] and targets [M], M at least 1: fills `losses`, of [M], and
    dx, which may be x."""
    forward_launch(x, targets, weights, denominator, losses, dx, options, keep)()


def forward_launch(
    x: Tensor,
    targets: Tensor,
    weights: tuple[Tensor | None, Tensor | None],
    denominator: Numbers | None,
    losses: tuple[Numbers, ...],
    dx: Tensor | None,
    options: Options,
    keep: bool,
) -> Launch:
    """The launch of rows_forward."""
    M, V = x.shape
    ignore_index, smoothing, z_loss, softcap = options
    choose = configs.cross_entropy_forward if dx is None else configs.cross_entropy_forward_gradient
    config = choose(V, x.element_size())
    # By the stride alone: a row's sums are then in one order wherever in the matrix it stands.
    aligned = x.stride(0) * x.element_size() % 16 == 0
    arguments = (
        x, targets, *weights, denominator, *losses, dx,
        x.stride(0), 0 if dx is None else dx.stride(0), M, V, ignore_index, float(smoothing),
        float(z_loss), float(softcap or 1), smoothing != 0, softcap != 0, keep,
        aligned, config.rows, config.groups, config.elements,
    )  # fmt: skip
    launch_options = {"num_warps": config.num_warps, "maxnreg": config.max_registers}
    return Launch(launch_forward, cdiv(M, config.rows), arguments, launch_options)


def rows_backward(
    dloss: Tensor,
    dlse: Tensor | None,
    x: Tensor,
    targets: Tensor,
    weights: tuple[Tensor | None, Tensor | None],
    denominator: Tensor | None,
    state: tuple[Tensor, Tensor, Tensor],
    dx: Tensor,
    options: Options,
    V: int,
    first: int = 0,
    done: bool = False,
) -> None:
    """Launch the backward kernel on x [M, N], columns `first` and on of V; state is (lse, m, l), dx
    may be x.  done: where the number dloss is 1, dx is left as it is."""
    backward_launch(
        dloss, dlse, x, targets, weights, denominator, state, dx, options, V, first, done
    )()  # fmt: skip


def backward_launch(
    dloss: Tensor,
    dlse: Tensor | None,
    x: Tensor,
    targets: Tensor,
    weights: tuple[Tensor | None, Tensor | None],
    denominator: Numbers | None,
    state: tuple[Numbers, Numbers, Numbers],
    dx: Tensor,
    options: Options,
    V: int,
    first: int,
    done: bool,
) -> Launch:
    """The launch of rows_backward."""
    M, N = x.shape
    ignore_index, smoothing, z_loss, softcap = options
    config = configs.cross_entropy_backward(N, x.element_size())
    tiles = cdiv(M, config.rows) * cdiv(N, config.columns)
    programs = min(tiles, config.programs * multiprocessors(x.device))
    arguments = (
        dloss, dlse, x, targets, *weights, denominator, *state, dx,
        x.stride(0), dx.stride(0), 0 if dloss.ndim == 0 else 1, M, N, V, first, tiles, ignore_index,
        float(smoothing), float(z_loss), float(softcap or 1), done, smoothing != 0, softcap != 0,
        config.rows, config.groups, config.elements,
    )  # fmt: skip
    launch_options = {"num_warps": config.num_warps, "maxnreg": config.max_registers}
    return Launch(launch_backward, programs, arguments, launch_options)


def total(
    targets: Tensor,
    weight: Tensor | None,
    losses: tuple[Tensor, Tensor] | None,
    V: int,
    ignore_index: int,
    mean: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    """(loss, z, denominator) of all rows, from (loss, z) of each and their targets; without `losses`
    the denominator alone.  Summed in a fixed order."""
    P = total_programs(targets)
    shape = () if P == 1 else (P,)
    loss, z, denominator = (
        torch.empty(shape, dtype=torch.float32, device=targets.device) for _ in range(3)
    )
    if P:
        sums = loss, z, denominator
        total_launch(targets, weight, losses, sums, V, ignore_index, mean and P == 1)()
    if P != 1:
        denominator = denominator.sum()
        if losses is not None:
            divisor = denominator if mean else 1.0
            loss, z = loss.sum() / divisor, z.sum() / divisor
    return loss, z, denominator


def total_programs(targets: Tensor) -> int:
    """Programs that add up rows; what each of them found is then to be added up."""
    return cdiv(targets.numel(), configs.cross_entropy_total().length)


def total_launch(
    targets: Tensor,
    weight: Tensor | None,
    losses: tuple[Numbers, Numbers] | None,
    sums: tuple[Numbers, Numbers, Numbers],
    V: int,
    ignore_index: int,
    divide: bool,
) -> Launch:
    """The launch of `total`, whose programs fill `sums`."""
    config = configs.cross_entropy_total()
    arguments = (
        targets, weight, *(losses or (None, None)), *sums,
        targets.numel(), V, ignore_index, divide, config.length, config.tile,
    )  # fmt: skip
    options = {"num_warps": config.num_warps}
    return Launch(launch_total, total_programs(targets), arguments, options)


def cross_entropy_forward(
    logits: Tensor,
    targets: Tensor,
    weight: Tensor | None,
    ignore_index: int,
    label_smoothing: float,
    z_loss: float,
    softcap: float,
    reduction: str,
    need_lse: bool,
    at_once: bool = False,
) -> tuple[Tensor, ...]:
    """Launch the forward kernels: loss, z, lse, m, l, denominator, and with at_once dlogits for an
    upstream gradient of 1."""
    options = (ignore_index, label_smoothing, z_loss, softcap)
    losses = empty_losses(logits, targets.shape)
    dlogits = logits.new_empty(logits.shape) if at_once else None
    targets, V = targets.reshape(-1), logits.shape[-1]
    weights = constants(weight, label_smoothing)
    mean = reduction == "mean"
    denominator = None
    if at_once and mean:
        denominator = total(targets, weights[0], None, V, ignore_index, mean)[2]
    if logits.numel():
        dx = None if dlogits is None else dlogits.view(-1, V)
        rows_forward(as_rows(logits), targets, weights, denominator, losses, dx, options, need_lse)
    loss, z, *state = losses
    if reduction != "none":
        loss, z, divisor = total(targets, weights[0], (loss, z), V, ignore_index, mean)
        denominator = divisor if denominator is None else denominator
    if denominator is None or not mean:
        denominator = loss.new_empty(0)
    results = (loss, z, *state, denominator)
    return results if dlogits is None else (*results, dlogits)


def cross_entropy_backward(
    dloss: Tensor | None,
    dlse: Tensor | None,
    logits: Tensor,
    targets: Tensor,
    weight: Tensor | None,
    lse: Tensor,
    m: Tensor,
    l: Tensor,
    denominator: Tensor,
    ignore_index: int,
    label_smoothing: float,
    z_loss: float,
    softcap: float,
    done: Tensor | None = None,
    inplace: bool = False,
) -> Tensor:
    """Launch the backward kernel; returns dlogits.

    done: dlogits for dloss = 1, which becomes the result.  inplace: the result takes the memory of
    the logits, if they are one matrix of rows there.
    """
    if dloss is None:
        dloss = lse.new_zeros(())
    x, V = as_rows(logits), logits.shape[-1]
    # Hooks of saved tensors need not keep strides.
    targets, lse, m, l = (t.contiguous() for t in (targets, lse, m, l))
    if done is not None:
        # Without its version: what is done to the gradient is no matter of the graph that saved `done`.
        dlogits = done.contiguous().data
    elif inplace and x.data_ptr() == logits.data_ptr() and (x.stride(0) >= V or x.shape[0] <= 1):
        dlogits = logits.detach()
        torch.autograd.graph.increment_version(logits)
    else:
        dlogits = logits.new_empty(logits.shape)
    if logits.numel():
        rows_backward(
            dloss.contiguous(), None if dlse is None else dlse.contiguous(), x, targets.reshape(-1),
            constants(weight, label_smoothing), denominator if denominator.numel() else None,
            (lse, m, l), as_rows(dlogits), (ignore_index, label_smoothing, z_loss, softcap), V,
            done=done is not None,
        )  # fmt: skip
    return dlogits


# --- autograd ------------------------------------------------------------------------------------


class CrossEntropyFunction(KernelFunction):
    """For eager calls."""

    @staticmethod
    def forward(logits, targets, weight, *options_and_flags):
        *arguments, _ = options_and_flags
        return cross_entropy_forward(logits, targets, weight, *arguments)

    @staticmethod
    def setup_context(ctx, inputs, output):
        logits, targets, weight, *options, _, need_lse, at_once, ctx.inplace = inputs
        setup_context(ctx, (logits, targets, weight, *options), output)
        ctx.at_once = at_once
        if not need_lse:
            ctx.mark_non_differentiable(output[1], *output[2:])

    @staticmethod
    def backward(ctx, dloss, dz, dlse, *_):
        logits, targets, weight, *state = ctx.saved_tensors
        # What the forward pass wrote can be given away once.
        *state, done = state if len(state) == 5 else (*state, None)
        if not ctx.at_once:
            done = None
        ctx.at_once = False
        dlogits = CrossEntropyBackwardFunction.apply(
            dloss, dlse, logits, targets, weight, *state, *ctx.options, done, ctx.inplace
        )
        return dlogits, *(None,) * 10


class CrossEntropyBackwardFunction(FirstDerivative):
    """cross_entropy_backward."""

    @staticmethod
    def forward(*args):
        return cross_entropy_backward(*args)


def setup_context(ctx, inputs, output) -> None:
    logits, targets, weight, *ctx.options = inputs[:7]
    ctx.save_for_backward(logits, targets, weight, *output[2:])
    ctx.mark_non_differentiable(output[1], *output[3:])
    ctx.set_materialize_grads(False)


# --- compile: torch.library ops; the gradient is written by the backward pass ---------------------

cross_entropy_op = kernel_op(
    "flashproto::cross_entropy",
    cross_entropy_forward,
    schema="(Tensor logits, Tensor targets, Tensor? weight, SymInt ignore_index, "
    "float label_smoothing, float z_loss, float softcap, str reduction, bool need_lse) "
    "-> (Tensor, Tensor, Tensor, Tensor, Tensor, Tensor)",
)
cross_entropy_backward_op = kernel_op(
    "flashproto::cross_entropy_backward",
    cross_entropy_backward,
    schema="(Tensor? dloss, Tensor? dlse, Tensor logits, Tensor targets, Tensor? weight, Tensor lse, "
    "Tensor m, Tensor l, Tensor denominator, SymInt ignore_index, float label_smoothing, float z_loss, "
    "float softcap) -> Tensor",
)


def fake_losses(logits: Tensor, targets: Tensor, reduction: str) -> tuple[Tensor, ...]:
    """(loss, z, lse, m, l, denominator)."""
    losses = empty_losses(logits, targets.shape)
    denominator = losses[0].new_empty(() if reduction == "mean" else 0)
    if reduction == "none":
        return *losses, denominator
    return losses[0].new_empty(()), losses[1].new_empty(()), *losses[2:], denominator


@fake_of(cross_entropy_op)
def _(logits, targets, weight, ignore_index, label_smoothing, z_loss, softcap, reduction, need_lse):
    return fake_losses(logits, targets, reduction)


@fake_of(cross_entropy_backward_op)
def _(dloss, dlse, logits, *_):
    return logits.new_empty(logits.shape)


def _backward(ctx, dloss, dz, dlse, *_):
    op = torch.ops.flashproto.cross_entropy_backward
    return op(dloss, dlse, *ctx.saved_tensors, *ctx.options), *(None,) * 8


cross_entropy_op.register_autograd(_backward, setup_context=setup_context)
