"""What happens to a tile of scores between attention's two matrix products, and its derivative.

Between S = Q K^T and P V a variant of attention may mask scores or change them.  Both happen here and
nowhere else: a mask is a condition in `visible` (and, to skip work, a range in schedule.py); a change
of score is a function of the raw score with its derivative beside it.

Everything is given with broadcast indices, so that the same code serves a tile [BM, BN] and the
transposed tile [BN, BM] of the backward pass: i is [BM, 1] or [1, BM], j is [1, BN] or [BN, 1].
"""

import triton
import triton.language as tl


@triton.jit
def visible(i, j, Sk, offset, CAUSAL: tl.constexpr):
    """True where query i may attend to key j: the key exists and, if CAUSAL, j <= i + offset."""
    if CAUSAL:
        return (j < Sk) & (j <= i + offset)
    else:
        return (j < Sk) & (i >= 0)


@triton.jit
def probabilities(s, lse2, scale):
    """The softmax of raw scores s from their saved logsumexp: 2^(scale * s - lse2).

    scale and lse2 are in base-2 units; lse2 = +inf marks a row to be ignored and gives 0.
    """
    return tl.exp2(s * scale - lse2)


@triton.jit
def score_gradient(p, dp, delta):
    """Gradient of the scaled scores: P * (dP - delta), delta = rowsum(dO * O) - dlse."""
    return p * (dp - delta)
