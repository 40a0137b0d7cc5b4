"""The two states, with the names of kernels/online_softmax.py and kernels/moments.py."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor


def compute_dtype(dtype: torch.dtype) -> torch.dtype:
    """The dtype in which an operator on `dtype` is computed: at least float32."""
    return torch.promote_types(dtype, torch.float32)


# --- online softmax: the state (m, l), see kernels/online_softmax.py ---


def online_softmax_start(shape: Sequence[int], like: Tensor) -> tuple[Tensor, Tensor]:
    """The state of no scores: m = -inf, l = 0, both of `shape`, with the dtype and device of `like`."""
    return like.new_full(shape, -math.inf), like.new_zeros(shape)


def online_softmax_update(m: Tensor, l: Tensor, x: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Take in scores x [..., C] (natural-log units); returns (m, l, p [..., C], alpha)."""
    m_new = torch.maximum(m, x.amax(-1)) if x.shape[-1] else m
    shift = torch.where(m_new == -math.inf, 0.0, m_new)
    p = torch.exp(x - shift[..., None])
    alpha = torch.exp(m - shift)
    return m_new, l * alpha + p.sum(-1), p, alpha


def online_softmax_merge(
    m1: Tensor, l1: Tensor, m2: Tensor, l2: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Join two states; returns (m, l, w1, w2), where payloads combine as w1 * a1 + w2 * a2."""
    m = torch.maximum(m1, m2)
    shift = torch.where(m == -math.inf, 0.0, m)
    w1, w2 = torch.exp(m1 - shift), torch.exp(m2 - shift)
    return m, l1 * w1 + l2 * w2, w1, w2


def online_softmax_finish(m: Tensor, l: Tensor) -> tuple[Tensor, Tensor]:
    """Returns (lse, 1 / l); an empty state gives (-inf, 0)."""
    empty = l == 0
    divisor = torch.where(empty, 1.0, l)
    lse = torch.where(empty, -math.inf, torch.where(empty, 0.0, m) + torch.log(divisor))
    return lse, torch.where(empty, 0.0, 1.0 / divisor)


# --- moments: the state (n, mean, M2), see kernels/moments.py ---


def moments_of_tile(x: Tensor, centered: bool = True) -> tuple[Tensor, Tensor, Tensor]:
    """The state (n, mean, M2) of the last dimension of x; deviations from 0 if not centered."""
    n = x.new_full(x.shape[:-1], x.shape[-1])
    mean = torch.zeros_like(n)
    if centered:
        mean = x.sum(-1) / n.clamp(min=1)
        mean = mean + (x - mean[..., None]).sum(-1) / n.clamp(min=1)
    deviation = x - mean[..., None]
    return n, mean, (deviation * deviation).sum(-1)


def moments_merge(
    n1: Tensor, mean1: Tensor, M2_1: Tensor, n2: Tensor, mean2: Tensor, M2_2: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Chan's merge of two states, either of which may be empty."""
    n = n1 + n2
    delta = mean2 - mean1
    share = n2 / n.clamp(min=1)
    return n, mean1 + delta * share, M2_1 + M2_2 + delta * delta * n1 * share


def moments_finish(n: Tensor, M2: Tensor, eps: float) -> Tensor:
    """1 / sqrt(M2 / n + eps)."""
    return torch.rsqrt(M2 / n + eps)
