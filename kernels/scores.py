"""What happens to a tile of scores between attention's two matrix products, and its derivative.

Between S = Q K^T and P V a variant of attention may mask scores or change them.  Both happen here and
nowhere else: a mask is a condition in `visible` (and, to skip work, a range in schedule.py); a change
of score is a line in `modified`, with its derivative in `modified_gradient`.

KIND, of flashproto/variant.py, says at compile time what the variant has; `variables` are its numbers
and pointers, None where it has none.

Everything is given with broadcast indices, so that the same code serves a tile [BM, BN] and the
transposed tile [BN, BM] of the backward pass: i is [BM, 1] or [1, BM], j is [1, BN] or [BN, 1].
"""

import triton
import triton.language as tl


@triton.jit
def visible(i, j, Sk, offset, variables, KIND: tl.constexpr):
    """True where query i may attend to key j: the key exists and, if CAUSAL, j <= i + offset."""
    if KIND.CAUSAL:
        return (j < Sk) & (j <= i + offset)
    else:
        return (j < Sk) & (i >= 0)


@triton.jit
def modified(s, scale, variables, KIND: tl.constexpr):
    """Raw scores as the variant changes them, before the mask; scale multiplies them afterwards."""
    return s


@triton.jit
def modified_gradient(ds, s, scale, variables, KIND: tl.constexpr):
    """Gradient of the raw scores s from ds, that of modified(s)."""
    return ds


@triton.jit
def probabilities(s, lse2, scale):
    """The softmax of modified scores s from their saved logsumexp: 2^(scale * s - lse2).

    scale and lse2 are in base-2 units; lse2 = +inf marks a row to be ignored and gives 0.
    """
    return tl.exp2(s * scale - lse2)


@triton.jit
def score_gradient(p, dp, delta):
    """Gradient of the scaled scores: P * (dP - delta), delta = rowsum(dO * O) - dlse."""
    return p * (dp - delta)
