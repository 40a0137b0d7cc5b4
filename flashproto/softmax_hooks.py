"""Scale, mask and causal of softmax as one prologue: see hooks.py, kernels/softmax_hooks.py."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from . import backends, hooks
from .checks.errors import refuse_shape
from .checks.options import check_scale
from .checks.tensors import check_broadcasts, check_mask_tensor

if backends.HAS_TRITON:
    from .kernels import softmax_hooks as device


def scores(
    operator: str, x: Tensor, scale: float | None, mask: Tensor | None, causal: bool
) -> hooks.Call | None:
    """The prologue that makes x the scores of softmax; None where there is nothing to do.

    Raises TypeError, ValueError: an argument does not fit.
    """
    scale = check_scale(operator, scale, "Pass None for 1.")
    kind, operands = "scale", []
    if mask is not None:
        check_mask_tensor(operator, "mask", mask)
        check_broadcasts(operator, "mask", mask, x)
        kind += "_mask" if mask.dtype == torch.bool else "_bias"
        operands.append(mask)
    if causal:
        if x.ndim < 2:
            takes = "2 dimensions [..., S, N] with causal=True"
            refuse_shape(operator, "x", x, takes, "Pass causal=False.")
        kind += "_limit"
        operands.append(causal_limit(x.shape, x.device))
    if scale is None and not operands:
        return None
    return hooks.call(kind, *operands, 1.0 if scale is None else scale)


def causal_limit(shape: torch.Size, device: torch.device) -> Tensor:
    """The index [..., S, 1] in x [..., S, N] of the first element that each row does not see."""
    *lead, S, N = shape
    rows = torch.arange(math.prod(lead) * S, device=device).view(*lead, S, 1)
    seen = (torch.arange(S, device=device) + (N - S + 1)).clamp(min=0)[:, None]
    return rows * N + seen


def _register(name: str, operands: int, reference: Callable[..., Tensor]) -> None:
    forward, backward = (
        getattr(device, name + suffix) if backends.HAS_TRITON else None for suffix in ("", "_backward")
    )
    arguments: dict[str, Any] = {"operands": operands, "scalars": 1, "needs_value": False}
    hooks.register(name, forward=forward, backward=backward, reference=reference, **arguments)


_register("scale", 0, lambda x, i, factor: x * factor)
_register("scale_bias", 1, lambda x, i, bias, factor: x * factor + bias)
_register("scale_mask", 1, lambda x, i, mask, factor: torch.where(mask, x * factor, -math.inf))
_register("scale_limit", 1, lambda x, i, limit, factor: torch.where(i < limit, x * factor, -math.inf))
_register(
    "scale_bias_limit",
    2,
    lambda x, i, bias, limit, factor: torch.where(i < limit, x * factor + bias, -math.inf),
)
_register(
    "scale_mask_limit",
    2,
    lambda x, i, mask, limit, factor: torch.where(mask & (i < limit), x * factor, -math.inf),
)
