"""Cross entropy, of logits and of what a linear layer makes into logits: the public functions."""

from __future__ import annotations

import math
import sys

import torch
from torch import Tensor, logsumexp

# As it is before anybody puts flashproto's in its place.
from torch.nn.functional import cross_entropy as torch_cross_entropy
from torch.nn.functional import linear

from .. import backends, configs, reference
from ..backends import autocast_dtype, float64_reasons, refuses_values
from ..checks.calls import told
from ..checks.errors import refuse, refuse_shape
from ..checks.options import check_flag, check_integer
from ..checks.rows import check_classes, check_cross_entropy, check_loss_options
from ..checks.tensors import check_on, check_shape, check_tensor
from .cached import cached

if backends.HAS_TRITON:
    from ..ops import cross_entropy as op
    from ..ops import linear_cross_entropy as linear_op


@cached
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
    class_dim: int = -1,
    impl: str | None = None,
) -> Tensor | tuple[Tensor, ...]:
    """torch.nn.functional.cross_entropy over the last dimension, with the options of language models.

    On backend "triton", outside torch.compile, the gradient of a loss that is one number, of logits
    that are not float16, is written with the loss: two passes over the logits' memory instead of three.
    Where that loss is scaled before backward() (loss / steps) it is written again: four; there
    inplace_backward, return_lse and reduction="none" are faster, which take three always.

    Args:
        logits: [..., V], any floating dtype and strides, any number of classes V.
        targets: [...] int64 or int32, the class of each row: the shape of logits without class_dim.
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
        class_dim: the dimension of logits that holds the classes; 1 for torch's [N, V, d1, ...].
        impl: the backend by name; None chooses.

    Returns: the loss in float32 (float64 for float64 logits), where torch rounds it to the dtype of
    the logits: one number, or [...] with reduction="none"; then lse and z_loss, if asked for.  The mean
    over no rows, or over rows whose class weights sum to 0, is NaN, as in torch.  A target that is
    neither a class nor ignore_index makes the loss NaN, and the gradient of its row (torch stops the
    process's use of the GPU).  On a CPU it raises ValueError, but on backends "triton" and "reference"
    asked for by name, under torch.compile, torch.func and dispatch modes.
    Raises: TypeError, ValueError: an argument does not fit; BackendError: `impl` cannot run.
    Source: Milakov and Gimelshein, "Online normalizer calculation for softmax" (2018).

    Example:
        >>> logits, tokens = torch.randn(2, 5, 100), torch.randint(100, (2, 5))
        >>> loss = flashproto.cross_entropy(logits, tokens)
        >>> torch.allclose(loss, torch.nn.functional.cross_entropy(logits.mT, tokens), atol=1e-5)
        True
        >>> torch.equal(flashproto.cross_entropy(logits.mT, tokens, class_dim=1), loss)
        True
    """
    name = "cross_entropy"
    logits_shape = logits.shape if isinstance(logits, Tensor) else ()
    if type(class_dim) is not int or class_dim != -1:
        logits = _classes_last(name, logits, class_dim)
    check_tensor(name, "logits", logits)
    if logits.ndim == 0:
        refuse(name, "logits", "a scalar", "at least one dimension", "Pass logits [..., V].")
    shape, V = logits.shape[:-1], logits.shape[-1]
    check_cross_entropy(
        name, targets, shape, V, logits.device, weight, "weight", logits_shape, class_dim
    )
    options = check_loss_options(name, ignore_index, label_smoothing, z_loss, softcap, reduction)
    return_lse = check_flag(name, "return_lse", return_lse)
    return_z_loss = check_flag(name, "return_z_loss", return_z_loss)
    inplace_backward = check_flag(name, "inplace_backward", inplace_backward)
    tensors = [x for x in (logits, targets, weight) if x is not None]
    backend = backends.choose(name, impl, tensors, lambda b: float64_reasons(b, [logits]))
    looks = logits.device.type == "cpu" and refuses_values(impl, backend)
    if looks:
        check_classes(name, targets, V, options[0])
    if backend == "triton":
        how = reduction, return_lse, inplace_backward
        settings = op.settings_of(logits, op.Options(*options[:3], options[3] or 0.0), *how)
        returns = (0, *((1,) if return_lse else ()), *((2,) if return_z_loss else ()))
        # What is kept is of the tensors as they are given, and looks at none of them.
        run = op.cross_entropy if looks or class_dim != -1 else op.cross_entropy.bind
        return run((logits, targets, weight), settings, returns)
    results = _in_torch(backend, logits, targets, weight, return_lse, reduction, options)
    return _wanted(results, return_lse, return_z_loss)


@told
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
) -> Tensor | tuple[Tensor, ...]:
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
        ignore_index, label_smoothing, z_loss, softcap, reduction: as in cross_entropy.
        return_lse, return_z_loss: as in cross_entropy.
        chunk_size: tokens whose logits are held at once (as much memory wherever they are computed a
            second time); None for as many as cost no memory at the peak, or a few thousand.
        low_memory: keep a float32 copy of one half of weight's gradient at most, and compute the logits
            of the other half twice: a sixth more work, for half that memory.  With float16, whose
            gradients wait for the loss scale in float32, as with return_lse.
        impl: the backend by name; None chooses.

    Returns: what cross_entropy returns of these logits.
    Raises: TypeError, ValueError: an argument does not fit; BackendError: `impl` cannot run.

    Source: Wijmans et al., "Cut Your Losses in Large-Vocabulary Language Models" (2024), for the
    problem; Hsu et al., "Liger Kernel" (2024), for gradients computed with the loss.

    Example:
        >>> h, weight = torch.randn(2, 5, 16), torch.randn(100, 16)
        >>> tokens = torch.randint(100, (2, 5))
        >>> loss = flashproto.linear_cross_entropy(h, weight, tokens)
        >>> torch.allclose(loss, flashproto.cross_entropy(h @ weight.T, tokens), atol=1e-4)
        True
    """
    name = "linear_cross_entropy"
    h = _check_linear(name, h, weight, targets, bias)
    if chunk_size is not None:
        takes, do = "an integer of at least 1, or None", "Pass None for the default."
        chunk_size = check_integer(name, "chunk_size", chunk_size, 1, sys.maxsize, takes, do)
    V, D = weight.shape
    check_cross_entropy(name, targets, h.shape[:-1], V, h.device, class_weight, "class_weight")
    options = check_loss_options(name, ignore_index, label_smoothing, z_loss, softcap, reduction)
    return_lse = check_flag(name, "return_lse", return_lse)
    return_z_loss = check_flag(name, "return_z_loss", return_z_loss)
    low_memory = check_flag(name, "low_memory", low_memory)
    tensors = [x for x in (h, weight, bias, targets, class_weight) if x is not None]
    backend = backends.choose(name, impl, tensors, lambda b: float64_reasons(b, [h, weight]))
    if refuses_values(impl, backend):
        check_classes(name, targets, V, options[0])
    if backend == "triton":
        loss, z, lse = linear_op.linear_cross_entropy(
            h.reshape(targets.numel(), D),
            weight,
            bias,
            targets.reshape(-1),
            class_weight,
            op.Options(*options[:3], options[3] or 0.0),
            reduction,
            return_lse,
            chunk_size or configs.tokens_at_once(D, low_memory),
            low_memory,
        )
        shape = targets.shape
        if reduction == "none":
            loss, z = loss.view(shape), z.view(shape)
        results = loss, z, lse.view(shape)
    else:
        logits = linear(h, weight, bias)
        results = _in_torch(backend, logits, targets, class_weight, return_lse, reduction, options)
    return _wanted(results, return_lse, return_z_loss)


def _wanted(
    results: tuple[Tensor, Tensor, Tensor], return_lse: bool, return_z_loss: bool
) -> Tensor | tuple[Tensor, ...]:
    loss, z, lse = results
    if return_z_loss:
        return (loss, lse, z.detach()) if return_lse else (loss, z.detach())
    return (loss, lse) if return_lse else loss


def _classes_last(name: str, logits: Tensor, class_dim: int) -> Tensor:
    """logits [..., V] of such whose classes are dimension class_dim: a view."""
    check_tensor(name, "logits", logits)
    n = logits.ndim
    takes = f"a dimension of logits, {-n} to {n - 1}"
    class_dim = check_integer(
        name, "class_dim", class_dim, -n, n - 1, takes, "Pass -1 for the last one."
    )
    return logits.movedim(class_dim, -1)


def _check_linear(name, h, weight, targets, bias) -> Tensor:
    """h as autocast wants it, once the shapes and dtypes of the linear layer fit."""
    check_tensor(name, "h", h)
    check_tensor(name, "weight", weight)
    misfit = isinstance(targets, Tensor) and h.ndim == 2 and h.shape[:-1] != targets.shape
    if misfit and weight.shape == (*targets.shape, h.shape[1]):
        got = f"of shape {list(h.shape)}, and weight {list(weight.shape)} has a row for each target"
        takes = "hidden states [..., D], with weight [V, D] behind them"
        refuse(name, "h", got, takes, "Pass the hidden states first.")
    D = h.shape[-1] if h.ndim else None
    if weight.ndim != 2 or weight.shape[1] != D:
        takes = f"[V, D] for h of shape {list(h.shape)}"
        do = "Pass the weight of the output layer, not transposed."
        refuse_shape(name, "weight", weight, takes, do)
    tensors = {"weight": weight}
    if bias is not None:
        check_tensor(name, "bias", bias)
        check_shape(name, "bias", bias, weight.shape[:1], "[V]", "Pass bias=None for none.")
        tensors["bias"] = bias
    dtype = None if h.dtype == torch.float64 else autocast_dtype(h)
    if dtype is not None:
        h = h.to(dtype)
    for other, x in tensors.items():
        check_on(name, other, x, h.device)
        if x.dtype != h.dtype and dtype is None:
            refuse(
                name,
                other,
                f"of dtype {x.dtype}",
                f"the dtype of h, {h.dtype}",
                f"Convert it, say {other}.to(h.dtype), or use torch.autocast.",
                TypeError,
            )
    return h


def _in_torch(
    backend, logits, targets, weight, need_lse, reduction, options
) -> tuple[Tensor, Tensor, Tensor]:
    """(loss, z, lse) on the backends that take the logits of all rows."""
    if backend == "reference":
        named = dict(
            zip(("ignore_index", "label_smoothing", "z_loss", "softcap"), options, strict=True)
        )
        return reference.cross_entropy(logits, targets, weight, reduction=reduction, **named)
    return _torch_cross_entropy(logits, targets, weight, need_lse, reduction, *options)


def _torch_cross_entropy(
    logits, targets, weight, need_lse, reduction, ignore_index, label_smoothing, z_loss, softcap
):
    """(loss, z, lse) by torch's own operators; without z_loss and need_lse the last two are 0."""
    x = logits.to(reference.compute_dtype(logits.dtype))
    if softcap is not None:
        x = softcap * torch.tanh(x / softcap)
    rows, t = x.reshape(-1, x.shape[-1]), targets.reshape(-1).long()
    w = None if weight is None else weight.to(x.dtype)
    loss = torch_cross_entropy(
        rows,
        t,
        w,
        ignore_index=ignore_index,
        reduction="none" if reduction == "none" else "sum",
        label_smoothing=label_smoothing,
    )
    kept = t != ignore_index
    lse = logsumexp(rows, -1) if z_loss or need_lse else torch.zeros_like(t, dtype=x.dtype)
    # Not 0 times the square of a large lse, which is inf.
    z = torch.where(kept, z_loss * lse.square(), 0.0) if z_loss else torch.zeros_like(lse)
    z = z if reduction == "none" else z.sum()
    loss = loss + z if z_loss else loss
    if reduction == "none":
        loss, z = loss.view(targets.shape), z.view(targets.shape)
    if reduction == "mean":
        ones = kept.to(x.dtype) if w is None else torch.where(kept, w[torch.where(kept, t, 0)], 0.0)
        divisor = ones.sum()
        divisor = torch.where(divisor == 0, math.nan, divisor)
        loss, z = loss / divisor, z / divisor
    return loss, z, lse.view(targets.shape)
