"""The K largest of a softmax in one pass over the rows, forward and backward.

A row's state (m, l) and its K largest scores are gathered in one pass, so neither the probabilities nor
anything else of the row's length is written (Milakov and Gimelshein, "Online normalizer calculation for
softmax", 2018, section 4).  For the chosen columns k, in descending order,

    v_k = exp(x_k - m) / l             dx_i = [i chosen] p_i dv_i - p_i * total
    p_i = exp(x_i - m) / l             total = sum over k of dv_k p_k

and with RENORMALIZE, where v is the softmax of the chosen scores alone, p is v and 0 elsewhere.

topk.py says how the largest scores are found.  There are two regimes.  A tile [R, C] with C >= N holds
R whole rows in registers.  The largest scores of blocks of W columns, the largest of which is m, tell
which K blocks hold the K largest of all; with PART > 1 then which parts of those, of PART columns each.
Wider rows are split over programs.  Each keeps its K best while it loops over tiles [C], and skips a
tile whose largest score is below them; a second kernel joins the splits.

The state of float32 scores, and the exponential and quotient of float32 values, are those of
online_softmax_precise.py.

Legend: M rows, N columns; x [M, N] with unit column stride; values, indices, dvalues [M, K], states
[2, M] float32 (m, then l), words [M, splits] (states, see exchange.py), keys [M, splits, K] int64, dx
[M, N] contiguous; KP a power of two, at least K; SORT: see topk.py.
"""

import triton
import triton.language as tl

from .exchange import pack
from .online_softmax import (
    LOG2E,
    exponentials,
    online_softmax_start,
    online_softmax_update,
    shift_of,
)
from .online_softmax_precise import (
    exact_part,
    exponential,
    precise_join,
    precise_update,
    quotient,
)
from .rounding import load, store
from .softmax import join, normalized, state_of
from .topk import (
    LOWEST,
    LOWEST32,
    in_row,
    index_of,
    keys_of,
    largest_below,
    scores_and_columns,
    select,
    totals,
)


@triton.jit
def block_maxima(x, W: tl.constexpr):
    """The largest scores [R, C / W], float32, of blocks of W columns of x [R, C]."""
    if W == 1:
        return x.to(tl.float32)
    else:
        return tl.max(tl.reshape(x, [x.shape[0], x.shape[1] // W, W]).to(tl.float32), 2)


@triton.jit
def best_parts(
    x_ptr,
    rows,
    blocks,
    x_stride,
    M,
    N,
    K,
    W: tl.constexpr,
    PART: tl.constexpr,
    KP: tl.constexpr,
    SORT: tl.constexpr,
):
    """Keys [R, KP] of the K best parts, PART columns each, of blocks [R, B] of W columns in rows."""
    R: tl.constexpr = blocks.shape[0]
    P: tl.constexpr = blocks.shape[1] * (W // PART)
    cols = blocks[:, :, None] * W + tl.arange(0, W)[None, None, :]  # [R, B, W]
    mask = (rows < M)[:, None, None] & (cols < N)
    x = tl.load(x_ptr + rows[:, None, None] * x_stride + cols, mask=mask, other=-float("inf"))
    best = block_maxima(tl.reshape(x, [R, P * PART]), PART).to(x.dtype)
    parts = blocks[:, :, None] * (W // PART) + tl.arange(0, W // PART)[None, None, :]
    parts = tl.reshape(parts, [R, P])
    keys = keys_of(best, parts, (rows[:, None] < M) & (parts * PART < N))
    return select(keys, K, KP, SORT)


@triton.jit
def store_result(
    values_ptr,
    indices_ptr,
    states_ptr,
    best,
    m,
    l,
    rows,
    M,
    K,
    dtype: tl.constexpr,
    RENORMALIZE: tl.constexpr,
    KP: tl.constexpr,
):
    """Store values and indices of the int64 keys `best` [R, KP] of rows [R] with the state m, l [R]."""
    lanes = tl.arange(0, KP)[None, :]
    mask = (rows[:, None] < M) & (lanes < K)
    x, cols = scores_and_columns(best, dtype)
    tl.store(states_ptr + rows, m, mask=rows < M)
    tl.store(states_ptr + M + rows, l, mask=rows < M)
    number = (l == l)[:, None]
    if values_ptr.dtype.element_ty == tl.float32:
        # Keys are in descending order, so that m is the score of the first also of those chosen.
        p = exponential(x - shift_of(m)[:, None])
        if RENORMALIZE:
            chosen = tl.where(lanes < K, p, 0.0)
            high = exact_part(chosen, KP)
            l = totals(high, True) + totals(chosen - high, True)
        v = quotient(p, l[:, None])
    else:
        if RENORMALIZE:
            p = exponentials(x, shift_of(m)[:, None], LOG2E, True)
            l = totals(tl.where(lanes < K, p, 0.0), True)
        v = normalized(x, m, l, False, False)
    if RENORMALIZE:
        # A row that holds a NaN, chosen or not.  [R, 1]: of [R] the compiler would move the layout of
        # the sum above to where it comes from, and add up the whole row a second time.
        v = tl.where(number, v, float("nan"))
    offsets = rows[:, None] * K + lanes
    store(values_ptr, offsets, v, mask)
    tl.store(indices_ptr + offsets, cols, mask=mask)


@triton.jit(do_not_specialize=["M", "K"])
def softmax_topk_kernel(
    x_ptr,
    values_ptr,
    indices_ptr,
    states_ptr,
    x_stride,
    M,
    N,
    K,
    RENORMALIZE: tl.constexpr,
    R: tl.constexpr,
    C: tl.constexpr,
    W: tl.constexpr,
    PART: tl.constexpr,
    KP: tl.constexpr,
    SORT: tl.constexpr,
):
    """Program i takes rows i * R to i * R + R - 1, held whole in registers.  C / W at least KP."""
    rows = tl.program_id(0).to(tl.int64) * R + tl.arange(0, R)  # [R]
    cols = tl.arange(0, C)[None, :]  # [1, C]
    mask = (rows[:, None] < M) & (cols < N)
    x = tl.load(x_ptr + rows[:, None] * x_stride + cols, mask=mask, other=-float("inf"))
    best = block_maxima(x, W)  # [R, C / W]
    m, l = state_of(x, x.dtype == tl.float32, tl.max(best, 1))
    blocks = tl.arange(0, C // W)[None, :]
    keys = keys_of(best.to(x.dtype), blocks, (rows[:, None] < M) & (blocks * W < N))
    keys = select(keys, K, KP, SORT)
    if W > 1:
        keys = best_parts(x_ptr, rows, index_of(keys), x_stride, M, N, K, W, PART, KP, SORT)
    if PART > 1:
        keys = best_parts(x_ptr, rows, index_of(keys), x_stride, M, N, K, PART, 1, KP, SORT)
    best = in_row(keys, 0)
    store_result(
        values_ptr,
        indices_ptr,
        states_ptr,
        best,
        m,
        l,
        rows,
        M,
        K,
        x_ptr.dtype.element_ty,
        RENORMALIZE,
        KP,
    )


@triton.jit(do_not_specialize=["M", "K"])
def softmax_topk_split_kernel(
    x_ptr, keys_ptr, words_ptr, x_stride, M, N, K, SPAN: tl.constexpr, C: tl.constexpr, KP: tl.constexpr
):
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
    found = tl.where(chosen < lowest + KP, LOWEST, in_row(chosen, first))
    tl.store(keys_ptr + tl.program_id(0).to(tl.int64) * K + lanes, found, mask=lanes < K)


@triton.jit(do_not_specialize=["M", "K"])
def softmax_topk_join_kernel(
    x_ptr,
    keys_ptr,
    words_ptr,
    values_ptr,
    indices_ptr,
    states_ptr,
    M,
    K,
    splits,
    RENORMALIZE: tl.constexpr,
    LANES: tl.constexpr,
    C: tl.constexpr,
    KP: tl.constexpr,
    SORT: tl.constexpr,
):
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
    best = select(keys, K, KP, SORT)
    store_result(
        values_ptr,
        indices_ptr,
        states_ptr,
        best,
        m,
        l,
        row + tl.arange(0, 1),
        M,
        K,
        x_ptr.dtype.element_ty,
        RENORMALIZE,
        KP,
    )


@triton.jit(do_not_specialize=["M", "K"])
def softmax_topk_backward_kernel(
    dvalues_ptr,
    indices_ptr,
    x_ptr,
    states_ptr,
    dx_ptr,
    x_stride,
    M,
    N,
    K,
    RENORMALIZE: tl.constexpr,
    R: tl.constexpr,
    C: tl.constexpr,
    KP: tl.constexpr,
):
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
        m = tl.load(states_ptr + row, mask=row < M, other=0.0)[:, None]
        inverse = (1.0 / tl.load(states_ptr + M + row, mask=row < M, other=1.0))[:, None]
        p = tl.exp(x - m) * inverse
    total = tl.sum(p * dv, 1)[:, None]
    if R == 1:  # a scalar suits tiles of any layout, where [1, 1] is first spread over C, then moved
        total = tl.sum(total)
    if RENORMALIZE:
        dx = tl.zeros([R, C], tl.float32)
    else:
        x = load(x_ptr, rows * x_stride + cols, (rows < M) & (cols < N), -float("inf"))
        dx = -tl.exp(x - m) * inverse * total
    store(dx_ptr, rows * N + cols, dx, (rows < M) & (cols < N))
    tl.debug_barrier()  # the chosen ones are written over
    here = here & (chosen >= first) & (chosen < first + C)
    store(dx_ptr, rows * N + chosen, p * (dv - total), here)
