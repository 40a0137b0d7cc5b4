"""What happens to a tile of scores between attention's two matrix products, and its derivative.

Between S = Q K^T and P V a variant of attention may mask scores or change them.  Both happen here and
nowhere else: a mask is a condition in `visible` (and, to skip work, a range in schedule.py); a change
of score is a line in `modified`, with its derivative in `modified_gradient`.  Behind `modified` and
before the mask comes a user's function, SCORE_MOD: see hooks.py.

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
from .hooks import load_operand
from .interpreter import INTERPRETED
from .online_softmax import LN2, LOG2E
from .philox import kept

TILE = tl.constexpr(128)  # queries and keys of a tile of a mask's table


class Given(NamedTuple):
    """What a kernel is given of a variant; a field that is None is no argument."""

    left: Any = None  # numbers
    first: Any = None
    softcap: Any = None
    sinks: Any = None  # pointers to [Hq]
    alibi_slopes: Any = None
    bias: Any = None  # pointer, and its strides: 0 where one number is for all
    bias_batch: Any = None
    bias_head: Any = None
    bias_row: Any = None
    bias_column: Any = None
    relative_bias: Any = None  # pointer to [Hq|1, R]
    relative_row: Any = None  # rows from head to head: 1 or 0
    relative_columns: Any = None  # R, as `counts` has it
    relative_offset: Any = None  # the column of distance 0, times 4 and 2 more, for the same reason
    score_mod: Any = None  # (operands, scalars), see score_operand
    dropout_p: Any = None  # a multiple of 1/65536
    dropout_seed: Any = None  # pointer to one int64
    begin: Any = None  # pointers to the intervals, [B|1, H|1, Sk]
    end: Any = None
    bits: Any = None  # pointers to what mask_table.py makes of any mask
    table: Any = None
    cu_seqlens_q: Any = None  # pointers to [sequences + 1]
    cu_seqlens_k: Any = None
    seqused_q: Any = None  # pointers to [sequences], how many of their tokens count
    seqused_k: Any = None
    work: Any = None  # pointer to what intervals_kernel, visits_kernel or order_kernel made
    columns: Any = None  # and to what columns_kernel made
    row_of_batch: Any = None  # which row of the intervals a head has: their sum
    row_of_head: Any = None
    table_of_batch: Any = None  # the same of bits and table
    table_of_head: Any = None
    sequences: Any = None  # how many, see `counts`
    queries: Any = None
    keys: Any = None
    max_score: Any = None  # pointers to what is made, [B, Hq, Sq] as lse
    entropy: Any = None
    rest: Any = None  # what rounding took: of out, see rounding.py, [B, Hq, Sq, DV]; or of lse2, as lse
    slope_sums: Any = None
    entropy_gradient: Any = None  # of the entropy, and what the backward makes of it, as lse
    entropy_weights: Any = None
    sink_delta: Any = None
    beside_delta: Any = None  # what delta has beside rowsum(P * dP), where it is made anew
    bias_gradient: Any = None  # [B, Hq, Sq, Sk]
    ends: Any = None  # of a table by distance, see ends_of: [programs, 2] float32
    heads: Any = None  # Hq, for that
    rows: Any = None  # Sq, as `counts` has it, for the Hopper backward
    pages: Any = None  # pointer to a cache's page table
    page_stride: Any = None  # of its rows, and the room of a sequence, both as `counts` has them
    room: Any = None


class Head(NamedTuple):
    """What of_head makes of it for one head.

    sink, slope: numbers.  begin, end: pointers to [Sk].  diagonal: Sk - Sq.  tiles: pointer to what
    intervals_kernel says of the head's key tiles.  bias, bias_gradient, relative_bias: pointers to the
    head's.  Sq, Sk: for these.  number: of the head, of all batch entries or sequences.  seed, dropped:
    of dropout, see dropped_of.  bits, table: pointers to the head's, see mask_table.py.  b, h: for a
    user's function.
    """

    sink: Any = 0.0
    slope: Any = 0.0
    begin: Any = 0
    end: Any = 0
    diagonal: Any = 0
    tiles: Any = 0
    bias: Any = 0
    bias_gradient: Any = 0
    relative_bias: Any = 0
    Sq: Any = 0
    Sk: Any = 0
    number: Any = 0
    seed: Any = 0
    dropped: Any = 0
    bits: Any = 0
    table: Any = 0
    b: Any = 0
    h: Any = 0


class Variables(NamedTuple):
    """given: for the numbers that all heads share.  head: Head, or what the caller has in its place.

    Made by callers, since Triton 3.6 returns no None from a function.
    """

    given: Any
    head: Any


@triton.jit
def of_head(given, b, h, Sq, Sk, BLOCK_N: tl.constexpr, KIND: tl.constexpr, number=0):
    """Head for query head h of batch entry b, of Sq queries and Sk keys, in tiles of BLOCK_N; number:
    see Head."""
    sink, slope, begin, end, tiles = 0.0, 0.0, 0, 0, 0
    bias, bias_gradient, relative, queries, keys = 0, 0, 0, 0, 0
    seed, dropped = 0, 0
    bits, table = 0, 0
    batch, query_head = 0, 0
    if KIND.SINKS:
        sink = tl.load(given.sinks + h).to(tl.float32)
    if KIND.ALIBI:
        slope = tl.load(given.alibi_slopes + h).to(tl.float32)
    if KIND.INTERVALS:
        row = b * given.row_of_batch + h * given.row_of_head
        begin = given.begin + row * Sk
        end = given.end + row * Sk
        tiles = given.work + row * (4 * tl.cdiv(Sk, BLOCK_N))
    if KIND.TABLE:
        row = b * given.table_of_batch + h * given.table_of_head
        query_tiles, key_tiles = tl.cdiv(Sq, TILE), tl.cdiv(Sk, TILE)
        table = given.table + row * query_tiles * key_tiles
        bits = given.bits + row * query_tiles * key_tiles * (4 * TILE)
    if KIND.BIAS:
        bias = given.bias + b * given.bias_batch + h * given.bias_head
        queries, keys = Sq, Sk
        if given.bias_gradient is not None:
            bias_gradient = given.bias_gradient + (b * given.heads + h) * Sq * Sk
    if KIND.RELATIVE_BIAS:
        relative = given.relative_bias + h * given.relative_row * (given.relative_columns >> 1)
    if KIND.SCORE_MOD:
        batch, query_head = b, h
        queries, keys = Sq, Sk
    if KIND.DROPOUT:
        seed = tl.load(given.dropout_seed)
        dropped = dropped_of(given)
    return Head(
        sink, slope, begin, end, Sk - Sq, tiles,
        bias, bias_gradient, relative, queries, keys, number, seed, dropped, bits, table,
        batch, query_head,
    )  # fmt: skip


@triton.jit
def counts(given):
    """How many sequences, queries and keys there are.  As arguments they are odd and above 1, since
    Triton compiles anew for an integer that is 1, or a multiple of 16 where another was none."""
    return given.sequences >> 1, given.queries >> 1, given.keys >> 1


# --- which pairs meet ----------------------------------------------------------------------------


@triton.jit
def visible(i, j, j0, Sk, offset, variables, KIND: tl.constexpr):
    """True where query i may attend to key j: the key exists and each of these that KIND has holds:
    CAUSAL, j <= i + offset; WINDOW, j >= i + offset - left or, FIRST, j < first; INTERVALS,
    begin[j] <= i < end[j]; TABLE, its bit is 1.  j0: the first of keys j, a whole tile."""
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
    if KIND.TABLE:
        # A row's words one by one: an address for each pair takes too many registers.
        row = tl.minimum(i, Sk - 1 - variables.head.diagonal).to(tl.int64)
        at = variables.head.bits + row * (4 * tl.cdiv(Sk, TILE)) + (j0 >> 5)
        word = tl.load(at)
        for n in tl.static_range(1, j.shape[0] * j.shape[1] // 32):
            word = tl.where((j - j0) >> 5 == n, tl.load(at + n), word)
        seen = seen & (((word >> (j & 31)) & 1) != 0)
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
    if KIND.BIAS:
        s += LOG2E * bias_of(i, j, variables)
    if KIND.RELATIVE_BIAS:
        s += LOG2E * relative_bias_of(i, j, variables)
    return s


@triton.jit
def modified_gradient(ds, s, scale, variables, KIND: tl.constexpr):
    """Gradient of the scaled raw scores from ds, that of the modified ones; s: raw scores."""
    if KIND.SOFTCAP:
        t = tanh(s * (scale * LN2 / variables.given.softcap), KIND.SOFTCAP == 2)
        ds *= 1.0 - t * t
    return ds


@triton.jit
def user_modified(s, i, j, variables, SCORE_MOD: tl.constexpr, BOUNDED: tl.constexpr = False):
    """Modified scores s behind the user's function, which has them without the factor of base 2.  What
    a bias has hidden stays so.  BOUNDED: so is what lies behind the last query or key, where operands
    are 0 and the function may say anything."""
    head = variables.head
    operands, scalars = variables.given.score_mod
    values = [score_operand(operand, i, j, head) for operand in operands]
    made = LOG2E * SCORE_MOD(s * LN2, head.b, head.h, i, j, *values, *scalars)
    if BOUNDED:
        there = ((i < head.Sq) & (j < head.Sk)) & (s != -float("inf"))
        return tl.where(there, made, -float("inf"))
    else:
        return tl.where(s == -float("inf"), s, made)


@triton.jit
def user_gradient(
    ds, p, s, i, j, variables, SCORE_MOD_BACKWARD: tl.constexpr, RESULT: tl.constexpr = 0
):
    """Gradient of modified scores s from ds, that of what the user's function makes of them; RESULT: n
    for that of its operand n - 1.  Where no probability p depends on them, whatever the derivative."""
    head = variables.head
    operands, scalars = variables.given.score_mod
    values = [score_operand(operand, i, j, head) for operand in operands]
    gradients = SCORE_MOD_BACKWARD(ds, s * LN2, head.b, head.h, i, j, *values, *scalars)
    return tl.where(p == 0.0, 0.0, gradients[RESULT])


@triton.jit
def score_operand(operand, i, j, head):
    """An operand (pointer, strides of batch, head, query and key; None of what it is the same for)."""
    pointer, batch, of_head, row, column = operand
    base = pointer + head.b * batch + head.h * of_head
    return load_operand((base, row, column), i.to(tl.int64), j.to(tl.int64), head.Sq, head.Sk)


@triton.jit
def distance(i, j, variables):
    """From query i's position to key j, as a float."""
    return tl.abs(i + variables.head.diagonal - j).to(tl.float32)


@triton.jit
def bias_of(i, j, variables):
    """The bias of pairs, 0 where there is no query or key."""
    given, head = variables.given, variables.head
    at = head.bias + i.to(tl.int64) * given.bias_row + j.to(tl.int64) * given.bias_column
    return tl.load(at, (i < head.Sq) & (j < head.Sk), 0.0).to(tl.float32)


@triton.jit
def relative_bias_of(i, j, variables):
    """The bias of pairs by the distance from query i's position to key j."""
    given = variables.given
    column = i + variables.head.diagonal - j + (given.relative_offset >> 2)
    column = tl.minimum(tl.maximum(column, 0), (given.relative_columns >> 1) - 1)
    return gathered(variables.head.relative_bias + column).to(tl.float32)


@triton.jit
def ends_of(i, j0, variables, BLOCK: tl.constexpr):
    """Of queries i whether all pairs of their tile of BLOCK x BLOCK with key j0 have the first column
    of the table by distance, and whether all have the last one and it is another."""
    given = variables.given
    column = (i // BLOCK - j0 // BLOCK) * BLOCK + variables.head.diagonal + (given.relative_offset >> 2)
    first = column + (BLOCK - 1) <= 0
    return first, (column - (BLOCK - 1) >= (given.relative_columns >> 1) - 1) & (first == 0)


@triton.jit
def gathered(pointers):
    """tl.load of pointers near each other.  In a loop Triton would bring tl.load's numbers into shared
    memory ahead of their use, where many threads that read one address wait for each other."""
    if INTERPRETED:
        return tl.load(pointers)
    dtype: tl.constexpr = pointers.dtype.element_ty
    if dtype.primitive_bitwidth == 32:
        bits = tl.inline_asm_elementwise(
            "ld.global.nc.b32 $0, [$1];", "=r,l", [pointers], dtype=tl.int32, is_pure=True, pack=1
        )
    else:
        bits = tl.inline_asm_elementwise(
            "ld.global.nc.b16 $0, [$1];", "=h,l", [pointers], dtype=tl.int16, is_pure=True, pack=1
        )
    return bits.to(dtype, bitcast=True)


@triton.jit
def probabilities(s, lse2, unit, KIND: tl.constexpr = None):
    """The softmax of modified scores s from their saved logsumexp: 2^(unit * s - lse2).

    unit and lse2 are in base-2 units; lse2 = +inf marks a row to be ignored and gives 0.  With a bias
    or a user's function scores may be so far from 0 that the rounding of lse2 makes powers that are
    above 1, or infinite.
    """
    p = tl.exp2(s * unit - lse2)
    if KIND is not None:
        if (KIND.BIAS or KIND.RELATIVE_BIAS) or KIND.SCORE_MOD:
            p = tl.where(p > 1.0, 1.0, p)
    return p


@triton.jit
def rest_of_lse2(lse2_ptr, given, KIND: tl.constexpr):
    """The pointer to what rounding took from lse2, where the forward kept that; else one that nothing
    reads."""
    rest = lse2_ptr
    if KIND.RESCALES:
        if given.rest is not None:
            rest = given.rest
    return rest


@triton.jit
def saved_lse(lse2_ptr, rest_ptr, at, inside, given, KIND: tl.constexpr):
    """(lse2, what its rounding took) of rows, for saved_probabilities."""
    lse2 = tl.load(lse2_ptr + at, inside, float("inf"))
    rest = lse2
    if KIND.RESCALES:
        if given.rest is not None:
            rest = tl.load(rest_ptr + at, inside, 0.0)
    return lse2, rest


@triton.jit
def saved_probabilities(s, lse, unit, given, KIND: tl.constexpr, ACROSS: tl.constexpr = False):
    """`probabilities` from saved_lse of a tile's rows, or with ACROSS of its columns.

    Far from 0 an lse2 of float32 is rounded by more than eager's softmax rounds, which subtracts the
    largest score first; and that is the same for a whole row, whose gradients it scales.
    """
    lse2, rest = lse
    if ACROSS:
        lse2, rest = lse2[None, :], rest[None, :]
    else:
        lse2, rest = lse2[:, None], rest[:, None]
    if KIND.RESCALES:
        if given.rest is not None:
            s, lse2 = s * unit - lse2, rest
            unit = 1.0
    return probabilities(s, lse2, unit, KIND)


@triton.jit
def score_gradient(p, dp, delta):
    """Gradient of the scaled scores: P * (dP - delta), delta = rowsum(dO * O) - dlse."""
    return p * (dp - delta)


@triton.jit
def entropy_part(p, weight):
    """What the gradient of the rows' entropy adds to that, beside its part of delta: see
    attention_backward.py."""
    return -weight * (p * tl.log2(tl.where(p == 0.0, 1.0, p)))


# --- dropout -------------------------------------------------------------------------------------


@triton.jit
def dropped_of(given):
    """How many of 65536 probabilities dropout drops."""
    return tl.cast(given.dropout_p * 65536, tl.int32)


@triton.jit
def kept_of(
    i0, j0, variables, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, ACROSS: tl.constexpr = False
):
    """Which probabilities of a tile from query i0 and key j0 on dropout keeps, see `kept`."""
    head = variables.head
    if ACROSS and BLOCK_N == 8:
        keep = kept(head.seed, head.number, i0, j0 // 16 * 16, head.dropped, BLOCK_M, 16, True)
        return half_of(keep, j0 % 16 // 8)
    elif BLOCK_M == 8:
        keep = kept(head.seed, head.number, i0 // 16 * 16, j0, head.dropped, 16, BLOCK_N, False)
        return half_of(keep, i0 % 16 // 8)
    else:
        return kept(head.seed, head.number, i0, j0, head.dropped, BLOCK_M, BLOCK_N, ACROSS)


@triton.jit
def half_of(keep, half):
    """The first 8 rows of 16, or with half = 1 the others."""
    halves = tl.reshape(keep, [2, 8, keep.shape[1]])
    return tl.sum(tl.where(tl.arange(0, 2)[:, None, None] == half, halves.to(tl.int32), 0), 0) != 0


@triton.jit
def kept_factor(given):
    """What those that are kept are multiplied by, 1 / (1 - p); 0 where none is."""
    left = 65536 - dropped_of(given)
    return tl.where(left > 0, 65536.0 / tl.maximum(left, 1).to(tl.float32), 0.0)
