"""The online-softmax state (m, l): one running maximum, one running sum of exponentials.

For scores x_1 ... x_n of one row and a positive multiplier `scale`, in base 2:

    m = max_i x_i                                   (raw units, before scaling)
    l = sum_i 2^(scale * (x_i - m))
    y_i = 2^(scale * (x_i - m)) / l                 (the softmax, when scale = log2(e) * temperature)
    lse = scale * m * ln(2) + ln(l)                 (natural log of the sum of exponentials)

The state is built from tiles in any order, because two states merge associatively:

    m = max(m1, m2)      l = l1 * 2^(scale (m1 - m)) + l2 * 2^(scale (m2 - m))

and whatever was accumulated beside l (attention's P V) takes the same two weights.  The same merge
joins elements of a tile, tiles of a loop, splits of a row, and shards on several GPUs.  Source:
Milakov and Gimelshein, "Online normalizer calculation for softmax" (2018), algorithm 3 and section 3.1.

Empty states are ordinary: start() is (-inf, 0), a fully masked tile leaves a state as it was, and
finish() of an empty state is (lse = -inf, 1/l = 0).  A NaN among the scores makes l NaN, and stays.

Shapes: scores are [R, C] (R rows, C columns of a tile); m, l, lse are [R], float32.
"""

import triton
import triton.language as tl

LOG2E = tl.constexpr(1.4426950408889634)
LN2 = tl.constexpr(0.6931471805599453)


@triton.jit
def shift_of(m):
    """The maximum as a shift: 0 where nothing was seen yet, so that -inf - (-inf) never happens."""
    return tl.where(m == -float("inf"), 0.0, m)


@triton.jit
def exponentials(x, shift, scale, EXACT: tl.constexpr):
    """2^(scale * (x - shift)).

    EXACT subtracts first: no cancellation when |x| is large, as a plain softmax needs, and exactly 1
    where x is the shift, as the weights of a merge need.  Otherwise scale * x - scale * shift becomes
    one fused multiply-add, as attention wants for its tiles.
    """
    if EXACT:
        return tl.exp2((x - shift) * scale)
    else:
        return tl.exp2(x * scale - shift * scale)


@triton.jit
def online_softmax_start(R: tl.constexpr):
    """The state of no scores at all: m = -inf [R], l = 0 [R]."""
    return tl.full([R], -float("inf"), tl.float32), tl.zeros([R], tl.float32)


@triton.jit
def online_softmax_update(m, l, x, scale, EXACT: tl.constexpr = False):
    """Take in a tile of raw scores x [R, C].

    Returns (m, l, p, alpha): the new state, the tile's exponentials p [R, C] relative to the new
    maximum, and the factor alpha [R] by which everything accumulated before must be multiplied.
    """
    m_new = tl.maximum(m, tl.max(x, 1))
    shift = shift_of(m_new)
    p = exponentials(x, shift[:, None], scale, EXACT)
    alpha = exponentials(m, shift, scale, True)
    return m_new, l * alpha + tl.sum(p, 1), p, alpha


@triton.jit
def online_softmax_merge(m1, l1, m2, l2, scale):
    """Join two states.  Returns (m, l, w1, w2); payloads combine as w1 * a1 + w2 * a2."""
    m = tl.maximum(m1, m2)
    shift = shift_of(m)
    w1 = exponentials(m1, shift, scale, True)
    w2 = exponentials(m2, shift, scale, True)
    return m, l1 * w1 + l2 * w2, w1, w2


@triton.jit
def online_softmax_join(m, l, scale):
    """Merge all states of a row at once: m, l [R, G] of G states to m, l [R].

    A weight is 1 wherever m is the maximum, also where both are infinite.
    """
    whole = tl.max(m, 1)
    weights = exponentials(m, shift_of(whole)[:, None], scale, True)
    weights = tl.where(m == whole[:, None], 1.0, weights)
    return whole, tl.sum(l * weights, 1)


@triton.jit
def online_softmax_finish(m, l, scale):
    """Returns (lse, 1 / l): the natural-log logsumexp, -inf for an empty state, and the payload's
    normaliser, 0 for an empty state."""
    empty = l == 0.0
    divisor = tl.where(empty, 1.0, l)
    lse = tl.where(empty, -float("inf"), m * (scale * LN2) + tl.log(divisor))
    return lse, tl.where(empty, 0.0, 1.0 / divisor)


@triton.jit
def entropy_update(weighted, m, l, m_new, x, p, alpha, scale):
    """The sum of p_j u_j, u_j = scale (x_j - m) in base 2, [R] beside the state (m, l), once
    online_softmax_update took in a tile x and gave m_new, p and alpha."""
    shift = shift_of(m_new)
    moved = tl.where(l == 0.0, 0.0, (m - shift) * scale)
    u = tl.where(p == 0.0, 0.0, (x - shift[:, None]) * scale)
    return alpha * (weighted + l * moved) + tl.sum(p * u, 1)


@triton.jit
def entropy_finish(weighted, l):
    """-sum p ln p of the probabilities whose state is (m, l), in nats; 0 for an empty state."""
    divisor = tl.where(l == 0.0, 1.0, l)
    return tl.log(divisor) - LN2 * (weighted / divisor)
