"""Cross entropy, of logits and of what a linear layer makes into logits: the public functions."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from .. import backends, configs, plans, reference
from ..checks import check_cross_entropy, check_on, check_rows, check_tensor, refuse
from .autocast import autocast_dtype
from .reasons import float64_reasons

if backends.HAS_TRITON:
    from ..ops import cross_entropy as op
    from ..ops import cross_entropy_plan as op_plan
    from ..ops import linear_cross_entropy as linear_op

Losses = Tensor | tuple[Tensor, ...]


def cross_entropy(
    logits: Tensor,
    targets: Tensor,
    *,
    weight: Tensor | None = None,
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
    softcap: float | None = None,
    reduction: str = "mean",
    return_lse: bool = False,
    return_z_loss: bool = False,
    inplace_backward: bool = False,
    impl: str | None = None,
) -> Losses:
    """torch.nn.functional.cross_entropy over the last dimension, with the options of language models.

    On backend "triton", outside torch.compile, the gradient of a loss that is one number, of logits
    that are not float16, is written with the loss: two passes over the logits' memory instead of three.
    Where that loss is scaled before backward() (loss / steps) it is written again: four; there
    inplace_backward, return_lse and reduction="none" are faster, which take three always.

    Args:
        logits: [..., V], any floating dtype and strides, any number of classes V.
        targets: [...] int64 or int32, the class of each row.
        weight: [V], a factor of each class's loss, or None.
        ignore_index: rows of this target have loss 0 and no gradient.
        label_smoothing: share of the target that is spread over all classes.
        z_loss: factor of lse^2, which is added to the loss of each row (PaLM).
        softcap: the logits are softcap * tanh(logits / softcap) first (Gemma 2), None for as they are.
        reduction: "mean" (over the rows not ignored, by their targets' class weights), "sum", "none".
        return_lse: also return the logsumexp [...] of the (softcapped) logits, differentiable.
        return_z_loss: also return the part of the loss that is z_loss, for logging, without gradient.
        inplace_backward: let the backward pass write the gradient over the logits; nothing else may
            need them then.  Where their memory is not one matrix of rows, where the backend is not
            "triton", and under torch.compile the gradient takes memory of its own.
        impl: the backend by name; None chooses.

    Returns: the loss in float32 (float64 for float64 logits), where torch rounds it to the dtype of
        the logits: one number, or [...] with reduction="none"; then lse and z_loss, if asked for.
        The mean over no rows is NaN, as in torch.  A target that is neither a class nor ignore_index
        makes the loss NaN, and the gradient of its row (torch stops the process's use of the GPU);
        on backend "torch" it raises.
    Raises: TypeError, ValueError: an argument does not fit; BackendError: `impl` cannot run.
    Source: Milakov and Gimelshein, "Online normalizer calculation for softmax" (2018).
    """
    name = "cross_entropy"
    kind = (
        name, ignore_index, label_smoothing, z_loss, softcap, reduction, return_lse, return_z_loss,
        inplace_backward, impl,
    )  # fmt: skip
    tensors = (logits, targets) if weight is None else (logits, targets, weight)
    plan = plans.find(kind, tensors)
    if plan is not None and (weight is None or not weight.requires_grad):
        return _wanted(plan(logits, targets, weight), return_lse, return_z_loss)
    key = plans.key(kind, tensors)
    check_rows(name, logits)
    check_cross_entropy(
        name, targets, logits.shape[:-1], logits.shape[-1], logits.device,
        weight, "weight", label_smoothing, z_loss, softcap, reduction,
    )  # fmt: skip
    backend = backends.choose(name, impl, tensors, lambda b: float64_reasons(b, [logits]))
    if backend == "triton":
        options = (ignore_index, label_smoothing, z_loss, softcap or 0.0)
        arguments = (weight, options, reduction, return_lse, inplace_backward)
        plans.keep(key, lambda: op_plan.plan(logits, targets, *arguments, return_z_loss))
        results = op.cross_entropy(logits, targets.contiguous(), *arguments)
    else:
        results = _in_torch(
            backend, logits, targets, weight, return_lse, ignore_index=ignore_index,
            label_smoothing=label_smoothing, z_loss=z_loss, softcap=softcap, reduction=reduction,
        )  # fmt: skip
    return _wanted(results, return_lse, return_z_loss)


def linear_cross_entropy(
    h: Tensor,
    weight: Tensor,
    targets: Tensor,
    bias: Tensor | None = None,
    *,
    class_weight: Tensor | None = None,
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
    softcap: float | None = None,
    reduction: str = "mean",
    return_lse: bool = False,
    return_z_loss: bool = False,
    chunk_size: int | None = None,
    low_memory: bool = False,
    impl: str | None = None,
) -> Losses:
    """cross_entropy(h weight^T + bias, targets), the logits of all tokens never in memory together.

    The gradients are exact: every class of every token counts, and weight's gradient is summed in
    float32 and rounded once.  On backend "triton" a loss that is one number has its gradients computed
    with it, a chunk of tokens at a time, and the backward pass only scales them.  With
    reduction="none" or return_lse the backward pass computes the logits a second time, a part of the
    vocabulary at a time: a third more work, and nothing kept but h and weight.  In 16 bits a V that is
    a multiple of 8 saves a padded copy of weight.

    Args:
        h: [..., D], hidden states.
        weight: [V, D], the output matrix.  Under torch.autocast h is converted to its dtype, and weight
            to h's inside, so that its gradient is not rounded; else weight and bias have h's dtype.
        targets: [...] int64 or int32, the class of each token.
        bias: [V] or None.
        class_weight: what `weight` is in cross_entropy.
        chunk_size: tokens whose logits are held at once (as much memory wherever they are computed a
            second time); None for as many as cost no memory at the peak, or a few thousand.
        low_memory: keep a float32 copy of one half of weight's gradient at most, and compute the logits
            of the other half twice: a sixth more work, for half that memory.  With float16, whose
            gradients wait for the loss scale in float32, as with return_lse.
        The others, results and errors: as cross_entropy.

    Source: Wijmans et al., "Cut Your Losses in Large-Vocabulary Language Models" (2024), for the
    problem; Hsu et al., "Liger Kernel" (2024), for gradients computed with the loss.
    """
    name = "linear_cross_entropy"
    h = _check_linear(name, h, weight, bias, chunk_size)
    V, D = weight.shape
    check_cross_entropy(
        name, targets, h.shape[:-1], V, h.device,
        class_weight, "class_weight", label_smoothing, z_loss, softcap, reduction,
    )  # fmt: skip
    tensors = [x for x in (h, weight, bias, targets, class_weight) if x is not None]
    backend = backends.choose(name, impl, tensors, lambda b: float64_reasons(b, [h, weight]))
    if backend == "triton":
        options = (ignore_index, label_smoothing, z_loss, softcap or 0.0)
        loss, z, lse = linear_op.linear_cross_entropy(
            h.reshape(-1, D), weight, bias, targets.reshape(-1), class_weight, options, reduction,
            return_lse, chunk_size or configs.tokens_at_once(D, low_memory), low_memory,
        )  # fmt: skip
        shape = targets.shape
        if reduction == "none":
            loss, z = loss.view(shape), z.view(shape)
        results = loss, z, lse.view(shape)
    else:
        results = _in_torch(
            backend, F.linear(h, weight, bias), targets, class_weight, return_lse,
            ignore_index=ignore_index, label_smoothing=label_smoothing, z_loss=z_loss, softcap=softcap,
            reduction=reduction,
        )  # fmt: skip
    return _wanted(results, return_lse, return_z_loss)


def _wanted(results: tuple[Tensor, Tensor, Tensor], return_lse: bool, return_z_loss: bool) -> Losses:
    loss, z, lse = results
    if return_z_loss:
        return (loss, lse, z.detach()) if return_lse else (loss, z.detach())
    return (loss, lse) if return_lse else loss


def _check_linear(name, h, weight, bias, chunk_size) -> Tensor:
    """h as autocast wants it, once the shapes and dtypes of the linear layer fit."""
    check_tensor(name, "h", h)
    check_tensor(name, "weight", weight)
    D = h.shape[-1] if h.ndim else None
    if weight.ndim != 2 or weight.shape[1] != D:
        refuse(
            name, "weight", f"of shape {list(weight.shape)}", f"[V, D] for h of shape {list(h.shape)}",
            "Pass the weight of the output layer, not transposed.",
        )  # fmt: skip
    tensors = {"weight": weight}
    if bias is not None:
        check_tensor(name, "bias", bias)
        if bias.shape != weight.shape[:1]:
            refuse(
                name, "bias", f"of shape {list(bias.shape)}", f"[V], [{weight.shape[0]}]",
                "Pass bias=None for none.",
            )  # fmt: skip
        tensors["bias"] = bias
    if chunk_size is not None and chunk_size < 1:
        refuse(name, "chunk_size", chunk_size, "at least 1, or None", "Pass None for the default.")
    dtype = None if h.dtype == torch.float64 else autocast_dtype(h)
    if dtype is not None:
        h = h.to(dtype)
    for other, x in tensors.items():
        check_on(name, other, x, h.device)
        if x.dtype != h.dtype and dtype is None:
            refuse(
                name, other, f"of dtype {x.dtype}", f"the dtype of h, {h.dtype}",
                f"Convert it, say {other}.to(h.dtype), or use torch.autocast.", TypeError,
            )  # fmt: skip
    return h


def _in_torch(backend, logits, targets, weight, need_lse, **options) -> tuple[Tensor, Tensor, Tensor]:
    """(loss, z, lse) on the backends that take the logits of all rows."""
    if backend == "reference":
        return reference.cross_entropy(logits, targets, weight, **options)
    return _torch_cross_entropy(logits, targets, weight, need_lse, **options)


def _torch_cross_entropy(
    logits, targets, weight, need_lse, *,
    ignore_index, label_smoothing, z_loss, softcap, reduction,
):  # fmt: skip
    """(loss, z, lse) by torch's own operators; without z_loss and need_lse the last two are 0."""
    x = logits.to(reference.compute_dtype(logits.dtype))
    if softcap is not None:
        x = softcap * torch.tanh(x / softcap)
    rows, t = x.reshape(-1, x.shape[-1]), targets.reshape(-1).long()
    w = None if weight is None else weight.to(x.dtype)
    loss = F.cross_entropy(
        rows, t, w, ignore_index=ignore_index, reduction=reduction, label_smoothing=label_smoothing
    )
    if not z_loss and not need_lse:
        zeros = torch.zeros_like(t, dtype=x.dtype).view(targets.shape)
        loss = loss.view(targets.shape) if reduction == "none" else loss
        return loss, zeros if reduction == "none" else torch.zeros_like(loss), zeros
    lse = torch.logsumexp(rows, -1)
    kept = t != ignore_index
    z = torch.where(kept, z_loss * lse.square(), 0.0)
    if reduction != "none":
        z = z.sum()
        if reduction == "mean":
            ones = kept.to(x.dtype) if w is None else torch.where(kept, w[torch.where(kept, t, 0)], 0.0)
            z = z / ones.sum()
    else:
        loss, z = loss.view(targets.shape), z.view(targets.shape)
    return loss + z if z_loss else loss, z, lse.view(targets.shape)
