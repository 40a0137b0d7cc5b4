"""Linear layer and cross entropy without the matrix of logits: launches, autograd.Function and
torch.library ops.

There are two ways.  Where the loss is one number, the forward pass takes a few thousand tokens at a
time: a matrix product writes their logits into a buffer, the kernel turns the buffer into their
gradient, and two more products follow, of which the one for the weight is accumulated in float32.  The
backward pass then only scales.  Otherwise the backward pass computes the logits once more, for all
tokens and a part of the vocabulary at a time.  Then every element of dweight is one product over all
tokens, and nothing of the weight's size is kept except dweight itself.

A float32 dweight is its own sum.  Float32 logits are computed once more by exactly the products of the
forward pass, a chunk of tokens at a time, because products of other shapes round differently.  A
softmax is only p (1 - p) times as sensitive as its scores if its sum was made of the same scores.

low_memory is half of each way: the forward pass accumulates the rows of dweight of one half of the
vocabulary, and computes the logits of the other half once more.  That is 3.5 products where the first
way takes 3 and the second 4, and it takes half the memory of the first in float32.  Where dweight is
its own sum there is nothing to save.

Legend: h [T, D]; weight [V, D]; bias, class_weight [V]; targets [T]; a chunk of the logits is
[tokens, V] or [T, classes], in h's dtype.  Outputs and options as in cross_entropy.py.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor
from torch.compiler import is_dynamo_compiling

from .. import configs
from ..kernels.cross_entropy import scale_unless_one_kernel
from .call import FirstDerivative, steps, through_op
from .cross_entropy import (
    Options,
    class_weights,
    empty_losses,
    fake_losses,
    rows_backward,
    rows_forward,
    total,
)
from .device import cdiv, multiprocessors
from .library import kernel_op, own_ops
from .linear_cross_entropy_products import (
    column_sums,
    hidden_gradient,
    logits_of,
    memory_of_logits,
    padded,
    product,
    weight_gradient,
    zero_padding,
)
from .private import one_by_one, watched


def linear_cross_entropy(
    h: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    targets: Tensor,
    class_weight: Tensor | None,
    options: Options,
    reduction: str,
    need_lse: bool,
    chunk_size: int,
    low_memory: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    """Returns (loss, z, lse) as cross_entropy; h and targets are [T, D] and [T].

    weight and bias are converted to h's dtype for the products; their gradients are not.
    """
    needs = [False] * 3
    # Where a gradient waits for its scale in float32, recomputing takes less memory.
    later = need_lse or reduction == "none" or (low_memory and kept_dtype(h) != h.dtype)
    if torch.is_grad_enabled() and not later:
        needs = [x is not None and x.requires_grad for x in (h, weight, bias)]
    arguments = (
        h,
        weight,
        bias,
        targets,
        class_weight,
        *options,
        reduction,
        need_lse,
        chunk_size,
        low_memory,
        *needs,
    )
    if through_op((h, weight, bias, targets, class_weight)):
        return own_ops().linear_cross_entropy(*arguments)[:3]
    return LinearCrossEntropyFunction.apply(*arguments)[:3]


# --- launches ------------------------------------------------------------------------------------


def kept_dtype(x: Tensor) -> torch.dtype:
    """The dtype of a gradient that waits to be scaled: float16 lacks the range before it is."""
    return torch.float32 if x.dtype == torch.float16 else x.dtype


def gradient_buffers(
    h: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    needs: tuple[bool, bool, bool],
    classes: int,
    kept: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    """(dh, dweight, dbias), uninitialised, the latter two with `classes` classes.  Gradients that are
    not needed are empty.  kept: they wait to be scaled."""

    def empty(x: Tensor | None, need: bool, rows: int) -> Tensor:
        if x is None or not need:
            return h.new_empty(0)
        return x.new_empty(rows, *x.shape[1:], dtype=kept_dtype(x) if kept else x.dtype)

    return (
        empty(h, needs[0], h.shape[0]),
        empty(weight, needs[1], classes),
        empty(bias, needs[2], classes),
    )


def without_padding(x: Tensor, V: int) -> Tensor:
    """The first V classes of x; the others stay in its memory."""
    return x.resize_(V, *x.shape[1:]) if x.shape[0] > V else x


def divisors_of(denominator: Tensor, targets: Tensor, ignore_index: int) -> tuple[Tensor, Tensor]:
    """The divisors that turn gradients of "sum" into those of "mean": for each row [T, 1], and for all.
    Gradients of ignored rows stay 0 where the denominator is NaN."""
    kept = targets != ignore_index
    return torch.where(kept, denominator, 1.0)[:, None], torch.where(kept.any(), denominator, 1.0)


def gradient_slices(
    dloss: Tensor,
    dlse: Tensor | None,
    h: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    targets: Tensor,
    weights: tuple[Tensor | None, Tensor | None],
    denominator: Tensor | None,
    state: tuple[Tensor, Tensor, Tensor],
    options: Options,
    classes: int,
    start: int = 0,
) -> Iterator[tuple[slice, Tensor, Tensor]]:
    """(part, W, dlogits), `classes` classes at a time, from `start` on: weight[part] in h's dtype and
    the gradient [T, classes] of these logits, which lasts until the next; the last part padded."""
    V = weight.shape[0]
    memory = memory_of_logits(h, h.shape[0], classes)
    for first in range(start, V, classes):
        part = slice(first, min(first + classes, V))
        W = padded(weight[part], h.dtype)
        b = None if bias is None else padded(bias[part], h.dtype)
        chunk = logits_of(h, W, b, memory)
        logits = chunk[:, : part.stop - first]
        rows_backward(
            dloss, dlse, logits, targets, weights, denominator, state, logits, options, V, first
        )
        zero_padding(chunk, logits)
        yield slice(first, first + W.shape[0]), W, chunk


def linear_cross_entropy_forward(
    h: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    targets: Tensor,
    class_weight: Tensor | None,
    ignore_index: int,
    label_smoothing: float,
    z_loss: float,
    softcap: float,
    reduction: str,
    need_lse: bool,
    chunk_size: int,
    low_memory: bool,
    need_dh: bool,
    need_dweight: bool,
    need_dbias: bool,
) -> tuple[Tensor, ...]:
    """(loss, z, lse, m, l, denominator, dh, dweight, dbias), chunk_size tokens at a time; the gradients
    are those for dloss = 1, where they are needed."""
    options = Options(ignore_index, label_smoothing, z_loss, softcap)
    (T, D), V = h.shape, weight.shape[0]
    losses = empty_losses(h, targets.shape)
    weights = class_weights(class_weight, label_smoothing)
    W, b = padded(weight, h.dtype), None if bias is None else padded(bias, h.dtype)
    all_classes = W.shape[0]
    mean = reduction == "mean"
    denominator = total(targets, weights[0], None, V, ignore_index, mean)[2] if mean else None
    divisors = None if denominator is None else divisors_of(denominator, targets, ignore_index)
    # dweight takes the place of the logits, unless it is float32 and so its own sum.
    own_sum = need_dweight and kept_dtype(weight) == torch.float32
    summed = configs.classes_summed(V, low_memory and not own_sum)
    summed = all_classes if summed == V else summed
    dh, dweight, dbias = gradient_buffers(
        h, weight, bias, (need_dh, own_sum, need_dbias), all_classes, kept=True
    )
    dweight_sum = dweight
    if need_dweight and not own_sum:
        dweight_sum = h.new_empty(summed, D, dtype=torch.float32)
    dbias_sum = dbias.new_empty(dbias.shape, dtype=torch.float32)
    classes = configs.classes_at_once(T, V, chunk_size) if T else V
    tokens = min(chunk_size, T)
    memory = memory_of_logits(h, tokens, V)
    product_dh = h.new_empty(tokens if need_dh else 0, D, dtype=torch.float32)
    for start in range(0, T, chunk_size):
        part = slice(start, min(start + chunk_size, T))
        n = part.stop - start
        chunk = logits_of(h[part], W, b, memory)
        logits = chunk[:, :V]
        rows_forward(
            logits,
            targets[part],
            weights,
            None,
            tuple(row[part] for row in losses),
            logits if need_dh or need_dweight or need_dbias else None,
            options,
            need_lse,
        )
        zero_padding(chunk, logits)
        if need_dh:
            hidden_gradient(chunk, W, product_dh[:n], classes)
            torch.div(product_dh[:n], 1.0 if divisors is None else divisors[0][part], out=dh[part])
        if need_dweight:
            product(chunk[:, :summed].t(), h[part], dweight_sum, add=start > 0)
        if need_dbias:
            column_sums(chunk, dbias_sum, add=start > 0)
        del chunk, logits  # of memory
    del memory, product_dh, W
    divisor = 1.0 if divisors is None else divisors[1]
    if need_dbias:
        torch.div(dbias_sum, divisor, out=dbias) if T else dbias.zero_()
    if need_dweight:
        dweight = dweight if own_sum else weight.new_empty(all_classes, D)
        torch.div(dweight_sum, divisor, out=dweight[:summed]) if T else dweight.zero_()
    del dweight_sum
    if need_dweight and summed < V and T:
        for rest, _, dlogits in gradient_slices(
            h.new_ones((), dtype=torch.float32),
            None,
            h,
            weight,
            bias,
            targets,
            weights,
            denominator,
            (losses[2], losses[3], losses[4]),
            options,
            classes,
            summed,
        ):
            weight_gradient(dlogits, h, dweight[rest])
    loss, z, *state = losses
    if reduction != "none":
        loss, z, _ = total(targets, weights[0], (loss, z), V, ignore_index, mean)
    denominator = loss.new_empty(0) if denominator is None else denominator
    return (loss, z, *state, denominator, dh, without_padding(dweight, V), without_padding(dbias, V))


def linear_cross_entropy_backward(
    dloss: Tensor | None,
    dlse: Tensor | None,
    h: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    targets: Tensor,
    class_weight: Tensor | None,
    lse: Tensor,
    m: Tensor,
    l: Tensor,
    denominator: Tensor,
    ignore_index: int,
    label_smoothing: float,
    z_loss: float,
    softcap: float,
    chunk_size: int,
    need_dh: bool,
    need_dweight: bool,
    need_dbias: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    """(dh, dweight, dbias) from logits that are computed again: in float32 chunk_size tokens at a time,
    else as many classes at a time as take the same memory.  Gradients that are not needed are empty."""
    options = Options(ignore_index, label_smoothing, z_loss, softcap)
    T, V = h.shape[0], weight.shape[0]
    dh, dweight, dbias = gradient_buffers(
        h,
        weight,
        bias,
        (need_dh, need_dweight, need_dbias),
        configs.product_classes(V, h.element_size()) if T else V,
        kept=False,
    )
    if T == 0:
        return dh, dweight.zero_(), dbias.zero_()
    dloss = lse.new_zeros(()) if dloss is None else dloss.contiguous()
    dlse = None if dlse is None else dlse.contiguous()
    weights = class_weights(class_weight, label_smoothing)
    divisor = denominator if denominator.numel() else None
    classes = configs.classes_at_once(T, V, chunk_size)
    if h.dtype == weight.dtype == torch.float32:
        b = None if bias is None else bias.to(h.dtype)
        memory = memory_of_logits(h, min(chunk_size, T), V)
        for start in range(0, T, chunk_size):
            rows = slice(start, min(start + chunk_size, T))
            chunk = logits_of(h[rows], weight, b, memory)
            rows_backward(
                dloss[rows] if dloss.ndim else dloss,
                None if dlse is None else dlse[rows],
                chunk,
                targets[rows],
                weights,
                divisor,
                (lse[rows], m[rows], l[rows]),
                chunk,
                options,
                V,
            )
            if need_dh:
                hidden_gradient(chunk, weight, dh[rows], classes)
            if need_dweight:
                product(chunk.t(), h[rows], dweight, add=start > 0)
            if need_dbias:
                column_sums(chunk, dbias, add=start > 0)
        return dh, dweight, dbias
    dh_sum = dh if h.dtype == torch.float32 else h.new_empty(dh.shape, dtype=torch.float32)
    for part, W, dlogits in gradient_slices(
        dloss, dlse, h, weight, bias, targets, weights, divisor, (lse, m, l), options, classes
    ):
        if need_dh:
            product(dlogits, W, dh_sum, add=part.start > 0)
        if need_dweight:
            weight_gradient(dlogits, h, dweight[part])
        if need_dbias:
            column_sums(dlogits, dbias[part])
    if need_dh and dh_sum is not dh:
        dh.copy_(dh_sum)
    return dh, without_padding(dweight, V), without_padding(dbias, V)


def scaled(gradient: Tensor, factor: Tensor, dtype: torch.dtype) -> Tensor:
    """gradient * factor in `dtype`; in the memory of `gradient` if the dtype is the same."""
    if gradient.dtype != dtype:
        return torch.mul(gradient, factor, out=gradient.new_empty(gradient.shape, dtype=dtype))
    # Without its version counter: changes of the result do not concern the graph that saved `gradient`.
    gradient = gradient.data
    if gradient.numel():
        steps(_scale_unless_one, [gradient, factor], ())
    return gradient


def _scale_unless_one(recipe, tensors):
    gradient, factor = tensors
    N = gradient.numel()
    config = configs.gradient_scale(gradient.element_size())
    programs = min(cdiv(N, config.tile), config.programs * multiprocessors(gradient.device))
    recipe.launch(
        scale_unless_one_kernel, programs, gradient, factor, N, config.tile, num_warps=config.num_warps
    )


# --- autograd ------------------------------------------------------------------------------------


def setup_context(ctx, inputs, output) -> None:
    *tensors, _, ctx.need_lse, ctx.chunk_size, _, _, _, _ = inputs
    ctx.options = tensors[5:]
    ctx.save_for_backward(*tensors[:5], *output[2:])
    ctx.mark_non_differentiable(output[1], *output[3 if ctx.need_lse else 2 :])
    ctx.set_materialize_grads(False)


class LinearCrossEntropyFunction(torch.autograd.Function):
    """For eager calls."""

    @staticmethod
    def forward(*args):
        return linear_cross_entropy_forward(*args)

    @staticmethod
    def setup_context(ctx, inputs, output):
        setup_context(ctx, inputs, output)
        ctx.at_once = any(inputs[-3:])

    @staticmethod
    def backward(ctx, dloss, dz, dlse, *_):
        *saved, dh, dweight, dbias = ctx.saved_tensors
        needs = ctx.needs_input_grad[:3]
        # What the forward pass computed can be given away once.
        if ctx.at_once and dloss is not None and not (is_dynamo_compiling() or watched()):
            ctx.at_once = False
            gradients = FirstDerivative.apply(
                scale_gradients, dloss, dh, dweight, dbias, *saved[:3], needs
            )
        else:
            gradients = one_by_one(
                lambda *tensors: again(*tensors, *ctx.options, ctx.chunk_size, *needs),
                (dloss, dlse, *saved),
            )
        return *(g if need else None for g, need in zip(gradients, needs, strict=True)), *(None,) * 13


def again(*arguments):
    """linear_cross_entropy_backward, by its op where something wants to see it."""
    if through_op(arguments[:7]):
        return own_ops().linear_cross_entropy_backward(*arguments)
    return FirstDerivative.apply(linear_cross_entropy_backward, *arguments)


def scale_gradients(dloss, dh, dweight, dbias, h, weight, bias, needs) -> tuple[Tensor | None, ...]:
    """(dh, dweight, dbias) for dloss from those for 1."""
    return tuple(
        scaled(dx, dloss, x.dtype) if need else None
        for dx, x, need in zip((dh, dweight, dbias), (h, weight, bias), needs, strict=True)
    )


# --- ops of torch.library --------------------------------------------------------------------------

TENSORS = "Tensor h, Tensor weight, Tensor? bias, Tensor targets, Tensor? class_weight, "
OPTIONS = "SymInt ignore_index, float label_smoothing, float z_loss, float softcap, "
NEEDS = "bool need_dh, bool need_dweight, bool need_dbias"


def _fake(h, weight, bias, targets, class_weight, *options):
    losses = fake_losses(h, targets, options[4])
    return *losses, *gradient_buffers(h, weight, bias, options[-3:], weight.shape[0], kept=True)


def _fake_backward(dloss, dlse, h, weight, bias, *rest):
    return gradient_buffers(h, weight, bias, rest[-3:], weight.shape[0], kept=False)


linear_cross_entropy_op = kernel_op(
    "linear_cross_entropy",
    linear_cross_entropy_forward,
    f"({TENSORS}{OPTIONS}str reduction, bool need_lse, SymInt chunk_size, bool low_memory, {NEEDS}) -> "
    f"({', '.join(['Tensor'] * 9)})",
    _fake,
)
linear_cross_entropy_backward_op = kernel_op(
    "linear_cross_entropy_backward",
    linear_cross_entropy_backward,
    f"(Tensor? dloss, Tensor? dlse, {TENSORS}Tensor lse, Tensor m, Tensor l, "
    f"Tensor denominator, {OPTIONS}SymInt chunk_size, {NEEDS}) -> (Tensor, Tensor, Tensor)",
    _fake_backward,
)


def _backward(ctx, dloss, dz, dlse, *_):
    *saved, dh, dweight, dbias = ctx.saved_tensors
    needs = ctx.needs_input_grad[:3]
    if any(x.numel() for x in (dh, dweight, dbias)) and dloss is not None:
        gradients = tuple(
            None if x is None else (dx * dloss).to(x.dtype)
            for x, dx in zip(saved[:3], (dh, dweight, dbias), strict=True)
        )
    else:
        gradients = one_by_one(
            lambda *tensors: again(*tensors, *ctx.options, ctx.chunk_size, *needs),
            (dloss, dlse, *saved),
        )
    return *(g if need else None for g, need in zip(gradients, needs, strict=True)), *(None,) * 13


linear_cross_entropy_op.register_autograd(_backward, setup_context=setup_context)
