"""Hooks of softmax for scores that are scaled, biased and masked; conventions: hooks.py.

    scale * x + bias, or scale * x where the mask is true, and -inf elsewhere

`limit` masks as well: an element counts if its index is below that of its row, so that one number a
row says how many of its first columns count (causal masks, lengths).
"""

import triton
import triton.language as tl


@triton.jit
def scale(x, index, factor):
    return x * factor


@triton.jit
def scale_backward(dy, x, index, factor):
    return dy * factor, 0.0


@triton.jit
def scale_bias(x, index, bias, factor):
    return x * factor + bias


@triton.jit
def scale_bias_backward(dy, x, index, bias, factor):
    return dy * factor, dy


@triton.jit
def scale_mask(x, index, mask, factor):
    return tl.where(mask, x * factor, -float("inf"))


@triton.jit
def scale_mask_backward(dy, x, index, mask, factor):
    return tl.where(mask, dy * factor, 0.0), 0.0


@triton.jit
def scale_limit(x, index, limit, factor):
    return tl.where(index < limit, x * factor, -float("inf"))


@triton.jit
def scale_limit_backward(dy, x, index, limit, factor):
    return tl.where(index < limit, dy * factor, 0.0), 0.0


@triton.jit
def scale_bias_limit(x, index, bias, limit, factor):
    return tl.where(index < limit, x * factor + bias, -float("inf"))


@triton.jit
def scale_bias_limit_backward(dy, x, index, bias, limit, factor):
    dy = tl.where(index < limit, dy, 0.0)
    return dy * factor, dy, 0.0


@triton.jit
def scale_mask_limit(x, index, mask, limit, factor):
    return tl.where(mask & (index < limit), x * factor, -float("inf"))


@triton.jit
def scale_mask_limit_backward(dy, x, index, mask, limit, factor):
    return tl.where(mask & (index < limit), dy * factor, 0.0), 0.0, 0.0
