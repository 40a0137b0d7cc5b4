"""What happens to a tile of scores between attention's two matrix products, and its derivative.

Between S = Q K^T and P V a variant of attention may mask scores or change them.  Both happen here and
nowhere else: a mask is a condition in `visible` (and, to skip work, a range in schedule.py); a change
of score is a line in `modified`, with its derivative in `modified_gradient`.

KIND, of flashproto/variant.py, says at compile time what the variant has.  A kernel gets its numbers
and tensors as one tuple, None where it has none, which `of_head` makes into the `variables` that all
other functions take.  Nothing reads what its KIND has not, so that the plain kinds may pass ().

Everything is given with broadcast indices, so that the same code serves a tile [BM, BN] and the
transposed tile [BN, BM] of the backward pass: i is [BM, 1] or [1, BM], j is [1, BN] or [BN, 1].
"""

import triton
import triton.language as tl

from .cross_entropy import tanh as exact_tanh
from .interpreter import INTERPRETED
from .online_softmax import LN2, LOG2E

# Places in what a kernel is given, which begins with VARIABLES of flashproto/variant.py, and in
# `variables`, where they are those of one head: numbers, the sink and the slope, and pointers to the
# vectors of intervals.
LEFT = tl.constexpr(0)
FIRST = tl.constexpr(1)
SOFTCAP = tl.constexpr(2)
SINK = tl.constexpr(3)
SLOPE = tl.constexpr(4)
BEGIN = tl.constexpr(5)
END = tl.constexpr(6)
CU_SEQLENS_Q = tl.constexpr(7)  # in what a kernel is given alone
CU_SEQLENS_K = tl.constexpr(8)
DIAGONAL = tl.constexpr(7)  # in `variables` alone, in their place: Sk - Sq
TILES = tl.constexpr(8)  # pointer to what intervals_kernel says of the key tiles
GIVEN = 9
# In what a kernel is given alone, added by the launch behind these.
TILES_OF_ALL = tl.constexpr(GIVEN)
# In its place in the Hopper forward: what visits_kernel says of them, or order_kernel of slots.
VISITS = tl.constexpr(GIVEN)
SLOTS = tl.constexpr(GIVEN)
ROW_OF_BATCH = tl.constexpr(GIVEN + 1)  # which row of the intervals a head has
ROW_OF_HEAD = tl.constexpr(GIVEN + 2)
COUNTS = tl.constexpr(GIVEN + 3)  # of sequences, queries and keys, see `counts`
MAX_SCORE = tl.constexpr(GIVEN + 6)  # pointers to what is made, as lse
ENTROPY = tl.constexpr(GIVEN + 7)
SLOPE_SUMS = tl.constexpr(GIVEN + 8)
QUERIES = tl.constexpr(GIVEN + 9)  # for the Hopper backward: Sq, as `counts` has it


@triton.jit
def of_head(given, b, h, Sq, Sk, BLOCK_N: tl.constexpr, KIND: tl.constexpr):
    """`variables` for query head h of batch entry b, of Sq queries and Sk keys, in tiles of BLOCK_N."""
    left, first, softcap, sink, slope = 0, 0, 0.0, 0.0, 0.0
    begin, end, tiles = 0, 0, 0
    if KIND.WINDOW:
        left = given[LEFT]
    if KIND.FIRST:
        first = given[FIRST]
    if KIND.SOFTCAP:
        softcap = given[SOFTCAP]
    if KIND.SINKS:
        sink = tl.load(given[SINK] + h).to(tl.float32)
    if KIND.ALIBI:
        slope = tl.load(given[SLOPE] + h).to(tl.float32)
    if KIND.INTERVALS:
        row = b * given[ROW_OF_BATCH] + h * given[ROW_OF_HEAD]
        begin = given[BEGIN] + row * Sk
        end = given[END] + row * Sk
        tiles = given[TILES_OF_ALL] + row * (4 * tl.cdiv(Sk, BLOCK_N))
    return left, first, softcap, sink, slope, begin, end, Sk - Sq, tiles


@triton.jit
def counts(given):
    """How many sequences, queries and keys there are.  As arguments they are odd and above 1, since
    Triton compiles anew for an integer that is 1, or a multiple of 16 where another was none."""
    return given[COUNTS] >> 1, given[COUNTS + 1] >> 1, given[COUNTS + 2] >> 1


# --- which pairs meet ----------------------------------------------------------------------------


@triton.jit
def visible(i, j, Sk, offset, variables, KIND: tl.constexpr):
    """True where query i may attend to key j: the key exists and each of these that KIND has holds:
    CAUSAL, j <= i + offset; WINDOW, j >= i + offset - left or, FIRST, j < first; INTERVALS,
    begin[j] <= i < end[j]."""
    if KIND.CAUSAL:
        seen = (j < Sk) & (j <= i + offset)
    else:
        seen = (j < Sk) & (i >= 0)
    if KIND.WINDOW:
        near = j >= i + offset - variables[LEFT]
        if KIND.FIRST:
            near = near | (j < variables[FIRST])
        seen = seen & near
    if KIND.INTERVALS:
        begin = tl.load(variables[BEGIN] + j, j < Sk, 0)
        end = tl.load(variables[END] + j, j < Sk, 0)
        seen = seen & (begin <= i) & (i < end)
    return seen


# --- scores --------------------------------------------------------------------------------------


@triton.jit
def tanh(x, EXACT: tl.constexpr):
    """EXACT: within two roundings of float32; else the card's own, within 2^-11 of its value."""
    if EXACT or INTERPRETED:
        return exact_tanh(x)
    else:
        return tl.inline_asm_elementwise(
            "tanh.approx.f32 $0, $1;", "=f,f", [x], dtype=tl.float32, is_pure=True, pack=1
        )


@triton.jit
def unit_of(scale, KIND: tl.constexpr):
    """What modified scores are multiplied by for base 2: `scale` if they are raw, else 1."""
    if KIND.SOFTCAP or KIND.ALIBI:
        return 1.0
    else:
        return scale


@triton.jit
def modified(s, scale, variables, KIND: tl.constexpr, i=None, j=None):
    """Raw scores as the variant changes them, before the mask, in units of unit_of(scale)."""
    if KIND.SOFTCAP:
        cap = variables[SOFTCAP]
        s = (cap * LOG2E) * tanh(s * (scale * LN2 / cap), KIND.SOFTCAP == 2)
    elif KIND.ALIBI:
        s = s * scale
    if KIND.ALIBI:
        s -= (variables[SLOPE] * LOG2E) * distance(i, j, variables)
    return s


@triton.jit
def modified_gradient(ds, s, scale, variables, KIND: tl.constexpr):
    """Gradient of the scaled raw scores from ds, that of the modified ones; s: raw scores."""
    if KIND.SOFTCAP:
        t = tanh(s * (scale * LN2 / variables[SOFTCAP]), KIND.SOFTCAP == 2)
        ds *= 1.0 - t * t
    return ds


@triton.jit
def distance(i, j, variables):
    """From query i's position to key j, as a float."""
    return tl.abs(i + variables[DIAGONAL] - j).to(tl.float32)


@triton.jit
def probabilities(s, lse2, unit):
    """The softmax of modified scores s from their saved logsumexp: 2^(unit * s - lse2).

    unit and lse2 are in base-2 units; lse2 = +inf marks a row to be ignored and gives 0.
    """
    return tl.exp2(s * unit - lse2)


@triton.jit
def score_gradient(p, dp, delta):
    """Gradient of the scaled scores: P * (dP - delta), delta = rowsum(dO * O) - dlse."""
    return p * (dp - delta)
