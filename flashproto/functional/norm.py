"""LayerNorm and RMSNorm, with and without a residual: the public functions."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from .. import backends, hooks, plans, reference
from ..checks import check_casting, check_norm
from .autocast import autocast_float32
from .reasons import float64_reasons

if backends.HAS_TRITON:
    from ..ops import hooked_norm as hooked_norm_op
    from ..ops import norm as norm_op


def layer_norm(
    x: Tensor,
    normalized_shape: int | Sequence[int],
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float = 1e-5,
    *,
    casting: str = "torch",
    prologue: hooks.Call | None = None,
    epilogue: hooks.Call | None = None,
    dtype: torch.dtype | None = None,
    impl: str | None = None,
) -> Tensor:
    """(x - mean) / sqrt(variance + eps) * weight + bias over the trailing `normalized_shape`.

    Args:
        x: [..., *normalized_shape], any floating dtype and strides; any width.
        normalized_shape: trailing dimensions to normalize over, an int for the last one.
        weight, bias: of shape normalized_shape, of any floating dtype, or None.
        eps: added to the (biased) variance.
        casting: how xhat = (x - mean) / sqrt(...) meets the weight: "torch" rounds nothing before the
            result, "llama" rounds xhat to x's dtype first, "gemma" multiplies by 1 + weight.
        prologue, epilogue: element-wise functions of x (before all else) and of y (after all else),
            fused into the kernel; made by flashproto.hooks.call.
        dtype: y's, x's by default; one of 8 bits is forward only.
        impl: the backend by name; None chooses.

    Returns: y of x's shape, computed in float32 (float64 for float64) and rounded once.
    Raises: TypeError, ValueError: an argument does not fit; BackendError: `impl` cannot run.
    Source: Ba, Kiros and Hinton, "Layer Normalization" (2016); Chan et al. (1979) for the moments.
    """
    options = casting, prologue, epilogue, dtype
    return _norm("layer_norm", x, None, normalized_shape, weight, bias, eps, True, impl, *options)


def rms_norm(
    x: Tensor,
    normalized_shape: int | Sequence[int],
    weight: Tensor | None = None,
    eps: float | None = None,
    *,
    casting: str = "torch",
    prologue: hooks.Call | None = None,
    epilogue: hooks.Call | None = None,
    dtype: torch.dtype | None = None,
    impl: str | None = None,
) -> Tensor:
    """x / sqrt(mean(x^2) + eps) * weight over the trailing `normalized_shape`.

    Arguments, result and errors as layer_norm; eps=None is torch.finfo(x.dtype).eps, as in torch.
    Source: Zhang and Sennrich, "Root Mean Square Layer Normalization" (2019).
    """
    options = casting, prologue, epilogue, dtype
    return _norm("rms_norm", x, None, normalized_shape, weight, None, eps, False, impl, *options)


def add_layer_norm(
    x: Tensor,
    residual: Tensor,
    normalized_shape: int | Sequence[int],
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float = 1e-5,
    *,
    casting: str = "torch",
    prologue: hooks.Call | None = None,
    epilogue: hooks.Call | None = None,
    dtype: torch.dtype | None = None,
    impl: str | None = None,
) -> tuple[Tensor, Tensor]:
    """layer_norm(x + residual) and the sum, in one pass.

    residual has x's shape and may have a wider dtype.  Returns (y in x's dtype, total in the wider of
    the two dtypes); the norm is that of the total as stored, so the pair equals the two operators one
    after the other; a prologue acts on x alone, before the sum, which is rounded once.  Arguments and
    errors otherwise as layer_norm.
    """
    options = casting, prologue, epilogue, dtype
    return _norm(
        "add_layer_norm", x, residual, normalized_shape, weight, bias, eps, True, impl, *options
    )


def add_rms_norm(
    x: Tensor,
    residual: Tensor,
    normalized_shape: int | Sequence[int],
    weight: Tensor | None = None,
    eps: float | None = None,
    *,
    casting: str = "torch",
    prologue: hooks.Call | None = None,
    epilogue: hooks.Call | None = None,
    dtype: torch.dtype | None = None,
    impl: str | None = None,
) -> tuple[Tensor, Tensor]:
    """rms_norm(x + residual) and the sum, in one pass; otherwise as add_layer_norm."""
    options = casting, prologue, epilogue, dtype
    return _norm(
        "add_rms_norm", x, residual, normalized_shape, weight, None, eps, False, impl, *options
    )


def _norm(
    operator, x, residual, normalized_shape, weight, bias, eps, centered, impl,
    casting, prologue, epilogue, dtype,
):  # fmt: skip
    key = None
    if prologue is None and epilogue is None and dtype is None:
        trailing = normalized_shape if isinstance(normalized_shape, int) else tuple(normalized_shape)
        key = plans.key((operator, trailing, eps, casting, impl), x, residual, weight, bias)
        if (plan := plans.find(key)) is not None:
            return plan(x, residual, weight, bias)
    shape = [normalized_shape] if isinstance(normalized_shape, int) else list(normalized_shape)
    check_norm(operator, x, shape, weight, bias, residual)
    aten = "layer_norm" if centered else "rms_norm"
    x, residual, weight, bias = autocast_float32(aten, x, residual, weight, bias)
    eps = torch.finfo(x.dtype).eps if eps is None else float(eps)
    tensors = [t for t in (x, residual, weight, bias) if t is not None]
    if prologue is not None or epilogue is not None or dtype not in (None, x.dtype):
        return _hooked_norm(
            operator, x, residual, shape, weight, bias, eps, centered, impl, casting,
            prologue, epilogue, x.dtype if dtype is None else dtype, tensors,
        )  # fmt: skip
    if casting != "torch":
        check_casting(operator, casting)
    backend = backends.choose(operator, impl, x.device, lambda b: _reasons(b, tensors, casting))
    if backend == "triton":
        arguments = (x, residual, weight, bias, len(shape), eps, centered, casting)
        plans.keep(key, lambda: norm_op.plan(*arguments))
        return norm_op.norm(*arguments)
    if backend == "torch":
        total = x if residual is None else x + residual
        y = _torch_norm(total, shape, weight, bias, eps, centered).to(x.dtype)
        return y if residual is None else (y, total)
    if residual is None:
        return reference.norm(x, shape, weight, bias, eps, centered=centered, casting=casting)
    return reference.add_norm(x, residual, shape, weight, bias, eps, centered=centered, casting=casting)


def _reasons(backend: str, tensors: Sequence[Tensor], casting: str) -> Sequence[str]:
    if backend == "torch" and casting != "torch":
        return (f"PyTorch's norms have no casting {casting!r}",)
    return float64_reasons(backend, tensors)


def _hooked_norm(
    operator, x, residual, shape, weight, bias, eps, centered, impl, casting,
    prologue, epilogue, dtype, tensors,
):  # fmt: skip
    check_casting(operator, casting)
    for argument, made in (("prologue", prologue), ("epilogue", epilogue)):
        hooks.check(operator, argument, made, x)
        tensors = [*tensors, *(() if made is None else made.operands)]
    hooks.check_dtype(operator, dtype, tensors)
    backend = backends.choose(operator, impl, x.device, lambda b: _hook_reasons(b, tensors, dtype))
    if backend == "triton":
        return hooked_norm_op.hooked_norm(
            x, residual, weight, bias, len(shape), eps, centered, casting, dtype, prologue, epilogue
        )
    options: dict[str, Any] = {
        "centered": centered, "casting": casting, "dtype": dtype,
        "before": partial(hooks.define, prologue), "after": partial(hooks.define, epilogue),
    }  # fmt: skip
    if residual is None:
        return reference.norm(x, shape, weight, bias, eps, **options)
    return reference.add_norm(x, residual, shape, weight, bias, eps, **options)


def _hook_reasons(backend: str, tensors: Sequence[Tensor], dtype: torch.dtype) -> Sequence[str]:
    if backend == "torch":
        return ("PyTorch's norms take no hooks and no dtype",)
    device = tensors[0].device
    if backend == "triton" and dtype.itemsize == 1 and device.type == "cuda":
        capability = torch.cuda.get_device_capability(device)
        if capability < (8, 9):
            return (f"compute capability is {capability[0]}.{capability[1]}; 8-bit floats need 8.9",)
    return float64_reasons(backend, tensors)


def _torch_norm(x, shape, weight, bias, eps, centered):
    if any(t is not None and t.dtype != x.dtype for t in (weight, bias)):
        dtype = reference.compute_dtype(x.dtype)
        x, weight, bias = (None if t is None else t.to(dtype) for t in (x, weight, bias))
    if centered:
        return F.layer_norm(x, shape, weight, bias, eps)
    return F.rms_norm(x, shape, weight, eps)
