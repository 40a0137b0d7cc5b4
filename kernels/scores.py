"""What happens to a tile of scores between attention's two matrix products, and its derivative.

Between S = Q K^T and P V a variant of attention may mask scores or change them.  Both happen here and
nowhere else: a mask is a condition in `visible` (and, to skip work, a range in schedule.py); a change
of score is a line in `modified`, with its derivative in `modified_gradient`.

KIND, of flashproto/variant.py, says at compile time what the variant has.  A kernel gets its numbers
and tensors as `given`; with what `of_head` makes of it for a head they are the `variables` that all
other functions take.  Nothing reads what its KIND has not, so that the plain kinds may pass ().

Everything is given with broadcast indices, so that the same code serves a tile [BM, BN] and the
transposed tile [BN, BM] of the backward pass: i is [BM, 1] or [1, BM], j is [1, BN] or [BN, 1].
"""

from typing import Any, NamedTuple

import triton
import triton.language as tl

from .cross_entropy import tanh as exact_tanh
from .interpreter import INTERPRETED
from .online_softmax import LN2, LOG2E


class Given(NamedTuple):
    """What a kernel is given of a variant; a field that is None is no argument."""

    left: Any = None  # numbers
    first: Any = None
    softcap: Any = None
    sinks: Any = None  # pointers to [Hq]
    alibi_slopes: Any = None
    begin: Any = None  # pointers to the intervals, [B|1, H|1, Sk]
    end: Any = None
    cu_seqlens_q: Any = None  # pointers to [sequences + 1]
    cu_seqlens_k: Any = None
    work: Any = None  # pointer to what intervals_kernel, visits_kernel or order_kernel made
    row_of_batch: Any = None  # which row of the intervals a head has: their sum
    row_of_head: Any = None
    sequences: Any = None  # how many, see `counts`
    queries: Any = None
    keys: Any = None
    max_score: Any = None  # pointers to what is made, [B, Hq, Sq] as lse
    entropy: Any = None
    slope_sums: Any = None
    rows: Any = None  # Sq, as `counts` has it, for the Hopper backward
    pages: Any = None  # pointer to a cache's page table
    page_stride: Any = None  # of its rows, and the room of a sequence, both as `counts` has them
    room: Any = None


class Head(NamedTuple):
    """What of_head makes of it for one head.

    sink, slope: numbers.  begin, end: pointers to [Sk].  diagonal: Sk - Sq.  tiles: pointer to what
    intervals_kernel says of the head's key tiles.
    """

    sink: Any = 0.0
    slope: Any = 0.0
    begin: Any = 0
    end: Any = 0
    diagonal: Any = 0
    tiles: Any = 0


class Variables(NamedTuple):
    """given: for the numbers that all heads share.  head: Head, or what the caller has in its place.

    Made by callers, since Triton 3.6 returns no None from a function.
    """

    given: Any
    head: Any


@triton.jit
def of_head(given, b, h, Sq, Sk, BLOCK_N: tl.constexpr, KIND: tl.constexpr):
    """Head for query head h of batch entry b, of Sq queries and Sk keys, in tiles of BLOCK_N."""
    sink, slope, begin, end, tiles = 0.0, 0.0, 0, 0, 0
    if KIND.SINKS:
        sink = tl.load(given.sinks + h).to(tl.float32)
    if KIND.ALIBI:
        slope = tl.load(given.alibi_slopes + h).to(tl.float32)
    if KIND.INTERVALS:
        row = b * given.row_of_batch + h * given.row_of_head
        begin = given.begin + row * Sk
        end = given.end + row * Sk
        tiles = given.work + row * (4 * tl.cdiv(Sk, BLOCK_N))
    return Head(sink, slope, begin, end, Sk - Sq, tiles)


@triton.jit
def counts(given):
    """How many sequences, queries and keys there are.  As arguments they are odd and above 1, since
    Triton compiles anew for an integer that is 1, or a multiple of 16 where another was none."""
    return given.sequences >> 1, given.queries >> 1, given.keys >> 1


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
        near = j >= i + offset - variables.given.left
        if KIND.FIRST:
            near = near | (j < variables.given.first)
        seen = seen & near
    if KIND.INTERVALS:
        begin = tl.load(variables.head.begin + j, j < Sk, 0)
        end = tl.load(variables.head.end + j, j < Sk, 0)
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
    if KIND.RESCALES:
        return 1.0
    else:
        return scale


@triton.jit
def modified(s, scale, variables, KIND: tl.constexpr, i=None, j=None):
    """Raw scores as the variant changes them, before the mask, in units of unit_of(scale)."""
    if KIND.SOFTCAP:
        cap = variables.given.softcap
        s = (cap * LOG2E) * tanh(s * (scale * LN2 / cap), KIND.SOFTCAP == 2)
    elif KIND.RESCALES:
        s = s * scale
    if KIND.ALIBI:
        s -= (variables.head.slope * LOG2E) * distance(i, j, variables)
    return s


@triton.jit
def modified_gradient(ds, s, scale, variables, KIND: tl.constexpr):
    """Gradient of the scaled raw scores from ds, that of the modified ones; s: raw scores."""
    if KIND.SOFTCAP:
        t = tanh(s * (scale * LN2 / variables.given.softcap), KIND.SOFTCAP == 2)
        ds *= 1.0 - t * t
    return ds


@triton.jit
def distance(i, j, variables):
    """From query i's position to key j, as a float."""
    return tl.abs(i + variables.head.diagonal - j).to(tl.float32)


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
