"""softmax, log_softmax and logsumexp: the public functions."""

from __future__ import annotations

import torch
from torch import Tensor

from .. import backends, reference
from ..checks import check_rows
from .autocast import autocast_float32
from .reasons import float64_reasons

if backends.HAS_TRITON:
    from ..ops import softmax as softmax_op


def softmax(x: Tensor, *, dtype: torch.dtype | None = None, impl: str | None = None) -> Tensor:
    """exp(x_i) / sum_j exp(x_j) over the last dimension, any width.

    Args:
        x: [..., N], any floating dtype and strides.
        dtype: the result's dtype, to which x is converted first, as in torch.softmax.
        impl: the backend by name; None chooses.

    Returns: y of x's shape; NaN in a row that is all -inf, as in torch.
    Raises: TypeError, ValueError: an argument does not fit; BackendError: `impl` cannot run.
    Source: Milakov and Gimelshein, "Online normalizer calculation for softmax" (2018).
    """
    return _softmax("softmax", x, dtype, impl)


def log_softmax(x: Tensor, *, dtype: torch.dtype | None = None, impl: str | None = None) -> Tensor:
    """x - logsumexp(x) over the last dimension; arguments, result and errors as softmax."""
    return _softmax("log_softmax", x, dtype, impl)


def logsumexp(x: Tensor, *, impl: str | None = None) -> Tensor:
    """log(sum(exp(x))) over the last dimension: [..., N] to [...], in x's dtype.

    -inf for a row that is all -inf or of no elements.  Arguments and errors otherwise as softmax.
    """
    return _softmax("logsumexp", x, None, impl)


def _softmax(operator, x, dtype, impl):
    check_rows(operator, x)
    if dtype is not None:
        x = x.to(dtype)
    else:
        (x,) = autocast_float32(operator if operator == "logsumexp" else f"{operator}.int", x)
    backend = backends.choose(operator, impl, x.device, lambda b: float64_reasons(b, [x]))
    if backend == "triton":
        return getattr(softmax_op, operator)(x)
    if backend == "reference":
        return getattr(reference, operator)(x)
    return getattr(torch, operator)(x, -1)
