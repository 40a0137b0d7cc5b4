"""LayerNorm and RMSNorm, with and without a residual: the public functions."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from .. import backends, reference
from ..checks import check_norm
from .autocast import autocast_float32
from .reasons import float64_reasons

if backends.HAS_TRITON:
    from ..ops import norm as norm_op


def layer_norm(
    x: Tensor,
    normalized_shape: int | Sequence[int],
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float = 1e-5,
    *,
    impl: str | None = None,
) -> Tensor:
    """(x - mean) / sqrt(variance + eps) * weight + bias over the trailing `normalized_shape`.

    Args:
        x: [..., *normalized_shape], any floating dtype and strides; any width.
        normalized_shape: trailing dimensions to normalize over, an int for the last one.
        weight, bias: of shape normalized_shape, of any floating dtype, or None.
        eps: added to the (biased) variance.
        impl: the backend by name; None chooses.

    Returns: y of x's shape and dtype, computed in float32 (float64 for float64).
    Raises: TypeError, ValueError: an argument does not fit; BackendError: `impl` cannot run.
    Source: Ba, Kiros and Hinton, "Layer Normalization" (2016); Chan et al. (1979) for the moments.
    """
    return _norm("layer_norm", x, None, normalized_shape, weight, bias, eps, True, impl)


def rms_norm(
    x: Tensor,
    normalized_shape: int | Sequence[int],
    weight: Tensor | None = None,
    eps: float | None = None,
    *,
    impl: str | None = None,
) -> Tensor:
    """x / sqrt(mean(x^2) + eps) * weight over the trailing `normalized_shape`.

    Arguments, result and errors as layer_norm; eps=None is torch.finfo(x.dtype).eps, as in torch.
    Source: Zhang and Sennrich, "Root Mean Square Layer Normalization" (2019).
    """
    return _norm("rms_norm", x, None, normalized_shape, weight, None, eps, False, impl)


def add_layer_norm(
    x: Tensor,
    residual: Tensor,
    normalized_shape: int | Sequence[int],
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float = 1e-5,
    *,
    impl: str | None = None,
) -> tuple[Tensor, Tensor]:
    """layer_norm(x + residual) and the sum, in one pass.

    residual has x's shape and may have a wider dtype.  Returns (y in x's dtype, total in the wider of
    the two dtypes); the norm is that of the total as stored, so the pair equals the two operators one
    after the other.  Arguments and errors otherwise as layer_norm.
    """
    return _norm("add_layer_norm", x, residual, normalized_shape, weight, bias, eps, True, impl)


def add_rms_norm(
    x: Tensor,
    residual: Tensor,
    normalized_shape: int | Sequence[int],
    weight: Tensor | None = None,
    eps: float | None = None,
    *,
    impl: str | None = None,
) -> tuple[Tensor, Tensor]:
    """rms_norm(x + residual) and the sum, in one pass; otherwise as add_layer_norm."""
    return _norm("add_rms_norm", x, residual, normalized_shape, weight, None, eps, False, impl)


def _norm(operator, x, residual, normalized_shape, weight, bias, eps, centered, impl):
    shape = [normalized_shape] if isinstance(normalized_shape, int) else list(normalized_shape)
    check_norm(operator, x, shape, weight, bias, residual)
    aten = "layer_norm" if centered else "rms_norm"
    x, residual, weight, bias = autocast_float32(aten, x, residual, weight, bias)
    eps = torch.finfo(x.dtype).eps if eps is None else float(eps)
    tensors = [t for t in (x, residual, weight, bias) if t is not None]
    backend = backends.choose(operator, impl, x.device, lambda b: float64_reasons(b, tensors))
    if backend == "triton":
        return norm_op.norm(x, residual, weight, bias, len(shape), eps, centered)
    if backend == "torch":
        total = x if residual is None else x + residual
        y = _torch_norm(total, shape, weight, bias, eps, centered).to(x.dtype)
        return y if residual is None else (y, total)
    if residual is None:
        return reference.norm(x, shape, weight, bias, eps, centered=centered)
    return reference.add_norm(x, residual, shape, weight, bias, eps, centered=centered)


def _torch_norm(x, shape, weight, bias, eps, centered):
    if any(t is not None and t.dtype != x.dtype for t in (weight, bias)):
        dtype = reference.compute_dtype(x.dtype)
        x, weight, bias = (None if t is None else t.to(dtype) for t in (x, weight, bias))
    if centered:
        return F.layer_norm(x, shape, weight, bias, eps)
    return F.rms_norm(x, shape, weight, eps)
