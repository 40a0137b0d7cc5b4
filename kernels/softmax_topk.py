"""The K largest of a softmax in one pass over the rows, forward and backward.

A row's state (m, l) and its K largest scores are gathered together, so that neither the probabilities
nor anything else of the row's length is written (Milakov and Gimelshein, "Online normalizer calculation
for softmax", 2018, section 4).  For the chosen columns k, in descending order,

    v_k = exp(x_k - m) / l             dx_i = [i chosen] p_i dv_i - p_i * total
    p_i = exp(x_i - lse)               total = sum over k of dv_k p_k

and with RENORMALIZE, where v is the softmax of the chosen scores alone, p is v and 0 elsewhere.

Scores are compared as keys: integers that order like (score, -column), so that all keys of a row
differ and equal scores go by their columns.  A NaN's key is above all others.

Two regimes.  A tile [R, C] with C >= N holds R whole rows in registers.  Wider rows are split over
programs, each of which keeps its K best while it loops over tiles [C], and passes over a tile whose
largest score is no match for them; a second kernel joins the splits.

Float32 scores have the state, and float32 values the exponential and quotient, of precise.py.

Legend: M rows, N columns; x [M, N] with unit column stride; values, indices, dvalues [M, K], lse [M]
float32, words [M, splits] (states, see exchange.py), keys [M, splits, K] int64, dx [M, N] contiguous;
KP a power of two, at least K.  Keys in registers are int32 where 16 bits hold a score and 16 a column.
"""

import triton
import triton.language as tl

from .exchange import pack
from .online_softmax import (
    LOG2E,
    online_softmax_finish,
    online_softmax_start,
    online_softmax_update,
    shift_of,
)
from .precise import exponential, precise_join, precise_state, precise_update, quotient, sum_in_parts
from .rows import load, store
from .softmax import join, normalized, state_of

# The lowest integers, of int32 and int64 keys: 64 and more below the key of any score.
LOWEST32 = tl.constexpr(-(2**31))
LOWEST = tl.constexpr(-(2**63))

# From so many on sorting is faster than searching again and again.
SORTED = tl.constexpr(16)


@triton.jit
def folded(bits, SIGN: tl.constexpr):
    """Integers in the order of the floats with these bits, and back: its own inverse."""
    return bits ^ ((bits >> SIGN) & ((1 << SIGN) - 1))


@triton.jit
def keys_of(x, cols, mask):
    """Keys of scores x, of the dtype in memory: int32 for 16-bit scores, whose cols are below 2^16,
    else int64.  The lowest integer outside the mask."""
    value = x.to(tl.float32)
    number = value == value
    x = tl.where(value == 0.0, 0.0, value).to(x.dtype)  # -0.0 equals 0.0
    if x.dtype.primitive_bitwidth == 16:
        rank = folded(x.to(tl.int16, bitcast=True).to(tl.int32), 15)
        rank = tl.where(number, rank, 0x7FFF)
        return tl.where(mask, (rank << 16) | (0xFFFF - cols), LOWEST32)
    else:
        rank = folded(x.to(tl.int32, bitcast=True), 31)
        rank = tl.where(number, rank, 0x7FFFFFFF).to(tl.int64)
        return tl.where(mask, (rank << 32) | (0xFFFFFFFF - cols.to(tl.int64)), LOWEST)


@triton.jit
def in_row(keys, first):
    """int64 keys, columns counted from the row's start, of keys whose columns count from `first`."""
    if keys.dtype == tl.int32:
        cols = first + 0xFFFF - (keys & 0xFFFF).to(tl.int64)
        return ((keys >> 16).to(tl.int64) << 32) | (0xFFFFFFFF - cols)
    else:
        return keys - first


@triton.jit
def scores_and_columns(keys, dtype: tl.constexpr):
    """The scores (float32) and columns (int64) of int64 keys of a score of `dtype`."""
    rank = (keys >> 32).to(tl.int32)
    if dtype.primitive_bitwidth == 16:
        x = folded(rank, 15).to(tl.int16).to(dtype, bitcast=True)
    else:
        x = folded(rank, 31).to(dtype, bitcast=True)
    return x.to(tl.float32), 0xFFFFFFFF - (keys & 0xFFFFFFFF)


@triton.jit
def largest_below(keys, last):
    """The largest of keys [R, C] below last [R]; the largest of all if last is the lowest integer.

    Counting upwards from `last` without a sign, keys above it come first and those below it, having
    wrapped around, last: one subtraction and one maximum an element.
    """
    unsigned: tl.constexpr = tl.uint32 if keys.dtype == tl.int32 else tl.uint64
    above = (keys - last[:, None]).to(unsigned, bitcast=True)
    return tl.max(above, 1).to(keys.dtype, bitcast=True) + last


@triton.jit
def select(keys, K, lowest, KP: tl.constexpr):
    """The K largest of keys [R, C] in descending order [R, KP], one after another where they are few;
    else runs of KP keys are sorted and merged in pairs, of which the better half is kept."""
    if KP >= SORTED:
        return tl.topk(keys, KP)
    else:
        lanes = tl.arange(0, KP)[None, :]
        last = tl.zeros([keys.shape[0]], keys.dtype) + lowest
        best = tl.zeros([keys.shape[0], KP], keys.dtype)
        for k in range(0, K):
            last = largest_below(keys, last)
            best = tl.where(lanes == k, last[:, None], best)
        return best


@triton.jit
def store_result(
    values_ptr, indices_ptr, lse_ptr, best, m, l, rows, M, K, dtype: tl.constexpr,
    RENORMALIZE: tl.constexpr, KP: tl.constexpr,
):  # fmt: skip
    """Values and indices of the int64 keys best [R, KP] of rows [R] with the state m, l [R]."""
    lanes = tl.arange(0, KP)[None, :]
    mask = (rows[:, None] < M) & (lanes < K)
    x, cols = scores_and_columns(best, dtype)
    lse, _ = online_softmax_finish(m, l, LOG2E)
    tl.store(lse_ptr + rows, lse, mask=rows < M)
    if values_ptr.dtype.element_ty == tl.float32:
        # Keys are in descending order, so that m is the score of the first also of those chosen.
        p = exponential(x - shift_of(m)[:, None])
        if RENORMALIZE:
            high, low = sum_in_parts(tl.where(lanes < K, p, 0.0))
            l = tl.where(l == l, high + low, l)  # NaN where the row holds a NaN, chosen or not
        v = quotient(p, l)
    else:
        if RENORMALIZE:
            m, chosen = state_of(tl.where(lanes < K, x, -float("inf")))
            l = tl.where(l == l, chosen, l)
        v = normalized(x, m, l, False, False)
    offsets = rows[:, None] * K + lanes
    store(values_ptr, offsets, v, mask)
    tl.store(indices_ptr + offsets, cols, mask=mask)


@triton.jit(do_not_specialize=["M", "K"])
def softmax_topk_kernel(
    x_ptr, values_ptr, indices_ptr, lse_ptr, x_stride, M, N, K,
    RENORMALIZE: tl.constexpr, R: tl.constexpr, C: tl.constexpr, KP: tl.constexpr,
):  # fmt: skip
    """Program i takes rows i * R to i * R + R - 1, held whole in registers."""
    rows = tl.program_id(0).to(tl.int64) * R + tl.arange(0, R)  # [R]
    cols = tl.arange(0, C)[None, :]  # [1, C]
    mask = (rows[:, None] < M) & (cols < N)
    x = tl.load(x_ptr + rows[:, None] * x_stride + cols, mask=mask, other=-float("inf"))
    if x.dtype == tl.float32:
        m, l = precise_state(x)
    else:
        m, l = state_of(x)
    keys = keys_of(x, cols, mask)
    lowest: tl.constexpr = LOWEST32 if keys.dtype == tl.int32 else LOWEST
    best = in_row(select(keys, K, lowest, KP), 0)
    store_result(
        values_ptr, indices_ptr, lse_ptr, best, m, l, rows, M, K, x_ptr.dtype.element_ty,
        RENORMALIZE, KP,
    )  # fmt: skip


@triton.jit(do_not_specialize=["M", "K"])
def softmax_topk_split_kernel(
    x_ptr, keys_ptr, words_ptr, x_stride, M, N, K,
    SPAN: tl.constexpr, C: tl.constexpr, KP: tl.constexpr,
):  # fmt: skip
    """Program i takes split i % splits, SPAN columns, of row i // splits; writes its state and its K
    best keys, in no order."""
    splits = tl.cdiv(N, SPAN)
    row = (tl.program_id(0) // splits).to(tl.int64)
    first = (tl.program_id(0) % splits) * SPAN
    x_ptr += row * x_stride + first
    columns = tl.minimum(SPAN, N - first)
    lanes = tl.arange(0, KP)
    m, l = online_softmax_start(1)
    l_low = l
    # Places without a key yet hold integers below any key; those beyond K, one above.
    narrow: tl.constexpr = x_ptr.dtype.element_ty.primitive_bitwidth == 16
    lowest: tl.constexpr = LOWEST32 if narrow else LOWEST
    highest: tl.constexpr = -(lowest + 1)
    chosen = tl.where(lanes < K, lanes.to(tl.int32 if narrow else tl.int64) + lowest, highest)
    least = tl.min(chosen, 0)
    for start in range(0, columns, C):
        cols = start + tl.arange(0, C)[None, :]  # [1, C]
        x = tl.load(x_ptr + cols, mask=cols < columns, other=-float("inf"))
        largest = tl.max(x.to(tl.float32), 1)
        if x.dtype == tl.float32:
            m, l, l_low = precise_update(m, l, l_low, x)
        else:
            m, l, _, _ = online_softmax_update(m, l, x.to(tl.float32), LOG2E, True)
        # No key of this tile is above that of its largest score in its first column.
        bound = tl.max(keys_of(largest.to(x.dtype), start + tl.zeros([1], tl.int32), True), 0)
        if bound > least:
            keys = keys_of(x, cols, cols < columns)
            best = tl.max(tl.max(keys, 1), 0)
            while best > least:
                chosen = tl.where(chosen == least, best, chosen)
                least = tl.min(chosen, 0)
                best = tl.max(largest_below(keys, best + tl.zeros([1], keys.dtype)), 0)
    words = pack(m, l + l_low)
    tl.store(words_ptr + tl.program_id(0) + tl.arange(0, 1), words)
    kept = tl.where(chosen < lowest + KP, LOWEST, in_row(chosen, first))
    tl.store(keys_ptr + tl.program_id(0).to(tl.int64) * K + lanes, kept, mask=lanes < K)


@triton.jit(do_not_specialize=["M", "K"])
def softmax_topk_join_kernel(
    x_ptr, keys_ptr, words_ptr, values_ptr, indices_ptr, lse_ptr, M, K, splits,
    RENORMALIZE: tl.constexpr, LANES: tl.constexpr, C: tl.constexpr, KP: tl.constexpr,
):  # fmt: skip
    """Program i joins the splits of row i; of x only the dtype is used.  LANES at least splits, C at
    least splits * K."""
    row = tl.program_id(0).to(tl.int64)
    lanes, cols = tl.arange(0, LANES), tl.arange(0, C)[None, :]
    words = tl.load(words_ptr + row * splits + lanes, mask=lanes < splits, other=0)
    if x_ptr.dtype.element_ty == tl.float32:
        m, l = precise_join(words, splits)
    else:
        m, l = join(words, splits)
    candidates = splits * K
    keys = tl.load(keys_ptr + row * candidates + cols, mask=cols < candidates, other=LOWEST)
    best = select(keys, K, LOWEST, KP)
    store_result(
        values_ptr, indices_ptr, lse_ptr, best, m, l, row + tl.arange(0, 1), M, K,
        x_ptr.dtype.element_ty, RENORMALIZE, KP,
    )  # fmt: skip


@triton.jit(do_not_specialize=["M", "K"])
def softmax_topk_backward_kernel(
    dvalues_ptr, indices_ptr, x_ptr, lse_ptr, dx_ptr, x_stride, M, N, K,
    RENORMALIZE: tl.constexpr, R: tl.constexpr, C: tl.constexpr, KP: tl.constexpr,
):  # fmt: skip
    """Program (r, c) writes the tile [R, C] of dx at rows r * R, columns c * C."""
    column_tiles = tl.cdiv(N, C)
    row = (tl.program_id(0) // column_tiles).to(tl.int64) * R + tl.arange(0, R)  # [R]
    rows = row[:, None]
    first = (tl.program_id(0) % column_tiles) * C
    cols = first + tl.arange(0, C)[None, :]  # [1, C]
    lanes = tl.arange(0, KP)[None, :]
    here = (rows < M) & (lanes < K)
    chosen = tl.load(indices_ptr + rows * K + lanes, mask=here, other=0)  # [R, KP]
    dv = load(dvalues_ptr, rows * K + lanes, here)
    x = load(x_ptr, rows * x_stride + chosen, here, -float("inf"))
    if RENORMALIZE:
        m, l = state_of(x)
        p = tl.where(here, normalized(x, m, l, False, True), 0.0)
    else:
        lse = tl.load(lse_ptr + row, mask=row < M, other=0.0)[:, None]
        p = tl.exp(x - lse)
    total = tl.sum(p * dv, 1)[:, None]
    if R == 1:  # a scalar suits tiles of any layout, where [1, 1] is first spread over C, then moved
        total = tl.sum(total)
    if RENORMALIZE:
        dx = tl.zeros([R, C], tl.float32)
    else:
        x = load(x_ptr, rows * x_stride + cols, (rows < M) & (cols < N), -float("inf"))
        dx = -tl.exp(x - lse) * total
    store(dx_ptr, rows * N + cols, dx, (rows < M) & (cols < N))
    tl.debug_barrier()  # the chosen ones are written over
    here = here & (chosen >= first) & (chosen < first + C)
    store(dx_ptr, rows * N + chosen, p * (dv - total), here)
