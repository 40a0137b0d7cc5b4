"""Gated linear units of gate, up [..., N]."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn.functional import gelu, relu, silu

from .states import compute_dtype

ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "silu": silu,
    "gelu": gelu,
    "gelu_tanh": lambda x: gelu(x, approximate="tanh"),
    "relu": relu,
    "sigmoid": torch.sigmoid,
}


def glu(gate: Tensor, up: Tensor | None, activation: str) -> Tensor:
    """act(gate) * up, or act(gate) where up is None; computed in at least float32, rounded once."""
    dtype = compute_dtype(gate.dtype)
    y = ACTIVATIONS[activation](gate.to(dtype))
    if up is not None:
        y = y * up.to(dtype)
    return y.to(gate.dtype)
