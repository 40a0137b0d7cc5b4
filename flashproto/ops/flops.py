"""Floating-point operations of the operators with matrix products, for torch.utils.flop_counter.

They are counted as torch counts its own attention: two for a multiplication and an addition, products
only, and all scores, causal or not.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from torch.utils.flop_counter import register_flop_formula

from . import attention, attention_decode, linear_cross_entropy  # noqa: F401, they define the ops
from .library import own_ops

Shape = Sequence[int]
ops = own_ops()


@register_flop_formula(ops.attention_forward)
def attention_forward_flops(q: Shape, k: Shape, v: Shape, *_: Any, **__: Any) -> int:
    """q k^T and p v."""
    return _scores(q, k) * (q[-1] + v[-1])


@register_flop_formula(ops.attention_backward)
def attention_backward_flops(
    dout: Shape | None,
    dlse: Shape | None,
    dmax: None,
    dentropy: None,
    q: Shape,
    k: Shape,
    v: Shape,
    *rest: Any,
    **_: Any,
) -> int:
    """q k^T again and dout v^T; then ds k for dq, and p^T dout and ds^T q for dv and dk."""
    D, Dv, (need_dq, need_dk, need_dv, *_) = q[-1], v[-1], rest[-1]
    return _scores(q, k) * (D + Dv + need_dq * D + (need_dk or need_dv) * (D + Dv))


@register_flop_formula(ops.attention_qkv_forward)
def attention_qkv_forward_flops(qkv: Shape, *rest: Any, **_: Any) -> int:
    return attention_forward_flops(*_heads(qkv, *rest[-2:]))


@register_flop_formula(ops.attention_qkv_backward)
def attention_qkv_backward_flops(
    dout: Shape | None, dlse: Shape | None, qkv: Shape, *rest: Any, **_: Any
) -> int:
    q_heads, k_heads, _ = rest[-3:]
    return attention_backward_flops(
        dout, dlse, None, None, *_heads(qkv, q_heads, k_heads), (True, True, True)
    )


@register_flop_formula(ops.attention_kv_cache)
def attention_kv_cache_flops(
    q: Shape,
    k_cache: Shape,
    v_cache: Shape,
    lengths: Shape,
    page_table: Shape | None,
    *_: Any,
    **__: Any,
) -> int:
    """With all keys that a sequence has room for: lengths are not read."""
    room = k_cache[1] * (1 if page_table is None else page_table[1])
    return 2 * math.prod(q[:-1]) * room * (q[-1] + v_cache[3])


@register_flop_formula(ops.linear_cross_entropy)
def linear_cross_entropy_flops(h: Shape, weight: Shape, *rest: Any, **_: Any) -> int:
    """The logits; the gradients of h and weight where they are made with the loss."""
    need_dh, need_dweight, _ = rest[-3:]
    return 2 * h[0] * h[1] * weight[0] * (1 + need_dh + need_dweight)


@register_flop_formula(ops.linear_cross_entropy_backward)
def linear_cross_entropy_backward_flops(
    dloss: Shape | None, dlse: Shape | None, h: Shape, weight: Shape, *rest: Any, **_: Any
) -> int:
    """The logits again, and the gradients of h and weight."""
    return linear_cross_entropy_flops(h, weight, *rest)


def _scores(q: Shape, k: Shape) -> int:
    """Operations of a product over all scores for each dimension of a head; of sequences side by side
    with all tokens of all, as their lengths are not read."""
    return 2 * q[0] * q[1] * k[0] if len(q) == 3 else 2 * q[0] * q[1] * q[2] * k[2]


def _heads(qkv: Shape, q_heads: int, k_heads: int) -> tuple[Shape, Shape, Shape]:
    """The shapes of q, k and v."""
    B, S, width = qkv
    D = width // (q_heads + 2 * k_heads)
    k = (B, k_heads, S, D)
    return (B, q_heads, S, D), k, k
