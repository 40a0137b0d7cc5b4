"""A score_mod of the tests of attention's variants: in Triton, in plain PyTorch, and registered."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from flashproto import backends, hooks

if backends.HAS_TRITON:
    import triton
    import triton.language as tl

    @triton.jit
    def bent(score, b, h, i, j, factor, curve, step):
        y = factor * score + curve * score / (1.0 + tl.abs(score)) + step * (i - j + b - h)
        return tl.where((i + 3 * j) % 11 == 5, -float("inf"), y)

    @triton.jit
    def bent_backward(dscore, score, b, h, i, j, factor, curve, step):
        dscore = tl.where((i + 3 * j) % 11 == 5, 0.0, dscore)
        width = 1.0 + tl.abs(score)
        return dscore * (factor + curve / (width * width)), dscore * score, dscore * (score / width)


def by_definition(
    score: Tensor,
    b: Tensor,
    h: Tensor,
    i: Tensor,
    j: Tensor,
    factor: Tensor,
    curve: Tensor,
    step: float,
) -> Tensor:
    """factor and curve broadcast to score [B, H, Sq, Sk]."""
    y = factor * score + curve * score / (1 + score.abs()) + step * (i - j + b - h).to(score.dtype)
    return torch.where((i + 3 * j) % 11 == 5, -math.inf, y)


hooks.register(
    "test_bent",
    signature="score",
    forward=bent if backends.HAS_TRITON else None,
    backward=bent_backward if backends.HAS_TRITON else None,
    reference=by_definition,
    operands=2,
    scalars=1,
)
