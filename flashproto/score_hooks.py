"""Hooks of attention's scores that are built in: see hooks.py, kernels/score_hooks.py.

multiply_score: the score times an operand, as a learned temperature of each head [Hq, 1, 1].
forget: the score plus an operand for the query and minus one for the key.  With c = cumsum(log f) of
gates f [B, Hq, S], a key fades by the gates between it and the query: operands c[..., None] and
c[:, :, None], beside causal=True.  Source: Lin et al., "Forgetting Transformer" (2025).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor

from . import backends, hooks

if backends.HAS_TRITON:
    from .kernels import score_hooks as device


def _register(name: str, operands: int, reference: Callable[..., Tensor]) -> None:
    forward, backward = (
        getattr(device, name + suffix) if backends.HAS_TRITON else None for suffix in ("", "_backward")
    )
    functions: dict[str, Any] = {"forward": forward, "backward": backward, "reference": reference}
    hooks.register(name, signature="score", operands=operands, **functions)


_register("multiply_score", 1, lambda s, b, h, i, j, factor: s * factor)
_register("forget", 2, lambda s, b, h, i, j, of_query, of_key: s + (of_query - of_key))
