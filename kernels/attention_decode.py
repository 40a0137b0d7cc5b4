"""Attention to keys and values that are kept from call to call, and attention with split keys.

A new token's queries see all keys before it, and each key is used by few of them: what counts is that
keys and values are read once, by the whole card, at the speed of memory.

 -  The rows of a tile are a key head's queries: GROUP query heads by the tokens, row r being head
    r % GROUP of token r // GROUP.  So keys and values are read once for all of them.
 -  The grid does not depend on lengths.  The key tiles of all sequences and heads stand in one row,
    which is cut into as many equal parts as there are programs (stream-K: Osama et al., 2023).  A
    program walks over its part; where that goes on in the next tile of queries, it writes one result, a
    piece, and begins another.  Every program has as much to do, however long the sequences are, and one
    CUDA graph serves all lengths.
 -  A tile of queries whose keys one program has seen is done.  Of the others, a second launch merges
    the pieces of each row in the order of the keys (online_softmax.py), and takes in the sink.  Piece
    number p + n belongs to program p and query tile n: along the row of tiles one of the two is always
    larger than before.  Nothing waits, nothing is added atomically: same bits always.

Legend: that of kv_cache.py; B sequences; q [B, Hq, Sq, D], or with cu_seqlens [1, Hq, T, D], tokens
side by side.  A sequence has `keys` keys; its last query is at its last key.  Tiles: BLOCK_M rows by
BLOCK_N keys.  `scale` is in base 2.  given: see scores.py.
"""

import triton
import triton.language as tl

from .interpreter import rounded
from .kv_cache import ONE, as_float16, float16_of_pairs, offsets_of, place_of, row_of, turned
from .online_softmax import (
    LOG2E,
    online_softmax_finish,
    online_softmax_merge,
    online_softmax_start,
    online_softmax_update,
)
from .scores import Head, Variables, modified, unit_of, visible
from .tiles import dot

# --- sequences -----------------------------------------------------------------------------------


@triton.jit
def queries_and_keys(b, lengths_ptr, cu_seqlens_ptr, B, Sq, Sk, new):
    """(token, queries, keys) of sequences b, one or a tile of them: where its queries begin, how many
    it has, and how many keys.  Sequence number B is of the tokens behind the last one, without keys.

    new: how many keys are added to lengths; of sequences side by side 1, if there is one a query.
    """
    if cu_seqlens_ptr is None:
        token = b * 0
        queries = tl.where(b < B, Sq, 0)
        if lengths_ptr is None:
            keys = tl.where(b < B, Sk, 0)
        else:
            keys = tl.load(lengths_ptr + b, b < B, 0) + tl.where(b < B, new, 0)
    else:
        token = tl.load(cu_seqlens_ptr + b, b <= B, Sq)
        queries = tl.load(cu_seqlens_ptr + b + 1, b < B, Sq) - token
        keys = tl.load(lengths_ptr + b, b < B, 0) + tl.where(b < B, new * queries, 0)
    return token, queries, keys


@triton.jit
def key_interval(
    b, first, last, diagonal, keys, starts_ptr, B, capacity, offset, left,
    KIND: tl.constexpr, ROLLS: tl.constexpr,
):  # fmt: skip
    """(low, high): outside of it, queries first ... last of sequence b see no key."""
    low = b * 0
    if starts_ptr is not None:
        low = tl.maximum(tl.load(starts_ptr + b, b < B, 0), 0)
    high = keys
    if not ROLLS:
        high = tl.minimum(high, capacity)
    if KIND.CAUSAL:
        high = tl.minimum(high, last + diagonal + offset + 1)
    if KIND.WINDOW:
        low = tl.maximum(low, first + diagonal + offset - left)
    return low, tl.maximum(high, 0)


@triton.jit
def plan(
    lengths_ptr, cu_seqlens_ptr, starts_ptr, B, Hkv, Sq, Sk, new, capacity, offset, left,
    GROUP: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_B: tl.constexpr,
    KIND: tl.constexpr, ROLLS: tl.constexpr, SPLIT: tl.constexpr,
):  # fmt: skip
    """(query_tiles, tiles, work) [BLOCK_B] of all sequences: tiles of queries of a head; key tiles that
    each of them visits, of some perhaps fewer; and the steps of work in all heads."""
    b = tl.arange(0, BLOCK_B)
    _, queries, keys = queries_and_keys(b, lengths_ptr, cu_seqlens_ptr, B, Sq, Sk, new)
    query_tiles = tl.cdiv(queries * GROUP, BLOCK_M)
    low, high = key_interval(
        b, 0, queries - 1, keys - queries, keys, starts_ptr, B, capacity, offset, left, KIND, ROLLS
    )
    tiles = tl.maximum(tl.cdiv(high, BLOCK_N) - low // BLOCK_N, 0)
    if KIND.CAUSAL and KIND.WINDOW:
        # The tokens of a tile, and as many keys more as a query sees beside its own position's.
        seen = tl.minimum(left, capacity) + (BLOCK_M - 1 + GROUP - 1) // GROUP + 1
        tiles = tl.minimum(tiles, (seen + BLOCK_N - 2) // BLOCK_N + 1)
    tiles = tl.where(queries > 0, tiles, 0)
    work = query_tiles * Hkv
    if SPLIT:
        work *= tiles
    return query_tiles, tiles, work


@triton.jit
def sequence_of_step(step, work, BLOCK_B: tl.constexpr):
    """(b, first): the sequence that a step of all work belongs to, and the first step of its work."""
    every = tl.arange(0, BLOCK_B)
    low, high, first = step * 0, step * 0 + (BLOCK_B - 1), step * 0
    while low < high:
        middle = (low + high + 1) // 2
        begins = tl.sum(tl.where(every < middle, work, 0), 0)
        low = tl.where(begins <= step, middle, low)
        high = tl.where(begins <= step, high, middle - 1)
        first = tl.where(begins <= step, begins, first)
    return low, first


@triton.jit
def part_of(program, programs, total):
    """The first step of a program's part of `total` steps; the first programs have one step each where
    there are fewer steps than programs."""
    programs = tl.maximum(tl.minimum(programs, total), 1)
    return (tl.minimum(program, programs).to(tl.int64) * total // programs).to(tl.int32)


@triton.jit
def program_of(step, programs, total):
    """Whose part a step is in: the inverse of part_of."""
    programs = tl.minimum(programs, total)
    return (((step + 1).to(tl.int64) * programs - 1) // tl.maximum(total, 1)).to(tl.int32)


@triton.jit
def of_heads(given, b, h, g, diagonal, Sk, KIND: tl.constexpr, BY_HEAD: tl.constexpr):
    """Head of scores.py for the rows [BM, 1] of heads h * GROUP + g; h: of query heads."""
    slope, begin, end = 0.0, 0, 0
    head = (h + g)[:, None]
    if KIND.ALIBI:
        slope = tl.load(given.alibi_slopes + head).to(tl.float32)
    if KIND.INTERVALS:
        row = b * given.row_of_batch
        if BY_HEAD:
            row = row + head * given.row_of_head
        begin = given.begin + row * Sk
        end = given.end + row * Sk
    return Head(0.0, slope, begin, end, diagonal)


# --- attention -----------------------------------------------------------------------------------


@triton.jit(do_not_specialize=["B", "Sq", "Sk", "new", "capacity", "offset", "position", "length"])
def attention_decode_kernel(
    q_ptr, k_ptr, v_ptr, out_ptr, lse_ptr, pieces_ptr, piece_lse_ptr,
    lengths_ptr, page_table_ptr, cache_index_ptr, starts_ptr, cu_seqlens_ptr, cos_ptr, sin_ptr,
    k_scale_ptr, v_scale_ptr,
    stride_qb, stride_qh, stride_qs, stride_qd,
    stride_kp, stride_kt, stride_kh, stride_kd,
    stride_vp, stride_vt, stride_vh, stride_vd,
    stride_ob, stride_oh, stride_os, stride_od,
    scale_kp, scale_kt, scale_kh, scale_vp, scale_vt, scale_vh,  # strides of scales
    table_stride, cos_stride, sin_stride,
    B, Hkv, Sq, Sk, new, capacity, offset, position, length, scale, given,
    GROUP: tl.constexpr, D: tl.constexpr, DV: tl.constexpr, BLOCK_D: tl.constexpr,
    BLOCK_DV: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_B: tl.constexpr,
    KIND: tl.constexpr, BY_HEAD: tl.constexpr, HALF: tl.constexpr, INTERLEAVED: tl.constexpr,
    PAGE_SIZE: tl.constexpr, ROLLS: tl.constexpr, SCALES: tl.constexpr, SPLIT: tl.constexpr,
    PREFIX: tl.constexpr, EXACT: tl.constexpr, TF32: tl.constexpr, WIDE: tl.constexpr,
    PAIRS: tl.constexpr = False, PDL: tl.constexpr = False,
):  # fmt: skip
    """Program: one tile of queries, with its sink; out as q is, lse [B, Hq, Sq] or [1, Hq, T]; and
    tokens behind the last sequence get what sees no key.  Or SPLIT: a program's part of all work.  Then
    tiles of queries that it has not wholly, or with PREFIX all, are pieces for merge_kernel: pieces
    [programs + query tiles, BLOCK_M, DV] and piece_lse [.., BLOCK_M] float32; and tiles without work
    are left to it.  PAIRS: values of 8 bits are read as pairs of int16, which shared memory turns, as
    it does not single bytes.  PDL: merge_kernel is launched with launch_pdl."""
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
    left = 0
    if KIND.WINDOW:
        left = given.left
    query_tiles, tiles, work = plan(
        lengths_ptr, cu_seqlens_ptr, starts_ptr, B, Hkv, Sq, Sk, new, capacity, offset, left,
        GROUP, BLOCK_M, BLOCK_N, BLOCK_B, KIND, ROLLS, SPLIT,
    )  # fmt: skip
    total = tl.sum(work, 0)
    every = tl.arange(0, BLOCK_B)
    program = tl.program_id(0)
    if SPLIT:
        step = part_of(program, tl.num_programs(0), total)
        stop = part_of(program + 1, tl.num_programs(0), total)
    else:
        step = program
        stop = tl.minimum(program + 1, total)
    while step < stop:
        b, begun = sequence_of_step(step, work, BLOCK_B)
        before = every < b
        own = every == b
        rest = step - begun
        own_tiles = tl.sum(tl.where(own, tiles, 0), 0)
        own_query_tiles = tl.sum(tl.where(own, query_tiles, 0), 0)
        if SPLIT:
            item = rest // own_tiles
            skipped = rest % own_tiles
            count = tl.minimum(own_tiles - skipped, stop - step)
            step += count
        else:
            item, skipped, count = rest, 0, own_tiles
            step += 1
        h = item // own_query_tiles
        m = item % own_query_tiles
        if KIND.CAUSAL and not SPLIT:
            m = own_query_tiles - 1 - m  # the longest first

        token, queries, keys = queries_and_keys(b, lengths_ptr, cu_seqlens_ptr, B, Sq, Sk, new)
        diagonal = keys - queries
        r = m * BLOCK_M + tl.arange(0, BLOCK_M)
        i, g = r // GROUP, r % GROUP
        i_first = m * BLOCK_M // GROUP
        i_last = tl.minimum((m * BLOCK_M + BLOCK_M - 1) // GROUP, queries - 1)
        low, high = key_interval(
            b, i_first, i_last, diagonal, keys, starts_ptr, B, capacity, offset, left, KIND, ROLLS
        )
        # Between these all queries of the tile see all keys, but for intervals.
        clear_low, clear_high = low, high
        if KIND.CAUSAL:
            clear_high = tl.minimum(high, i_first + diagonal + offset + 1)
        if KIND.WINDOW:
            clear_low = tl.maximum(low, i_last + diagonal + offset - left)
        first = low // BLOCK_N + skipped
        last = tl.minimum(first + count, tl.cdiv(high, BLOCK_N))

        entry = tl.zeros([], tl.int64)
        if cu_seqlens_ptr is None:
            entry += b
        start = 0
        if starts_ptr is not None:
            start = tl.load(starts_ptr + b, b < B, 0)
        head = (h * GROUP + g).to(tl.int64)
        at = entry * stride_qb + head * stride_qh + (token + i).to(tl.int64) * stride_qs
        q = turned(
            q_ptr,
            at[:, None],
            stride_qd,
            (i < queries)[:, None],
            position + i + diagonal - start,
            cos_ptr,
            sin_ptr,
            cos_stride,
            sin_stride,
            length,
            D,
            BLOCK_D,
            HALF,
            INTERLEAVED,
        )  # [BM, D]
        q = rounded(q, q_ptr.dtype.element_ty)
        q_scale = 1.0
        if SCALES and q.dtype == tl.bfloat16:
            q, q_scale = as_float16(q)
            q_scale = q_scale[:, None]
        heads = of_heads(given, b, h * GROUP, g, diagonal, Sk, KIND, BY_HEAD)
        variables = Variables(given, heads)
        tile_scale = scale
        if SCALES == 1:
            tile_scale = scale * tl.load(k_scale_ptr + h)
        unit = unit_of(tile_scale, KIND)
        row, pages_ptr = row_of(
            tl.minimum(b, B - 1), page_table_ptr, cache_index_ptr, table_stride, PAGE_SIZE
        )
        k_base = k_ptr + row * stride_kp + h.to(tl.int64) * stride_kh
        v_base = v_ptr + row * stride_vp + h.to(tl.int64) * stride_vh
        k_scales, v_scales = k_scale_ptr, v_scale_ptr
        if SCALES == 2:
            k_scales = k_scale_ptr + row * scale_kp + h.to(tl.int64) * scale_kh
            v_scales = v_scale_ptr + row * scale_vp + h.to(tl.int64) * scale_vh
        d = tl.arange(0, BLOCK_D)[None, :]
        dv = tl.arange(0, BLOCK_DV)[None, :]
        ms, ls = online_softmax_start(BLOCK_M)
        largest = 2.0**-100  # of the scales of values so far
        WIDTH: tl.constexpr = BLOCK_DV // 2 if PAIRS else BLOCK_DV
        acc = tl.zeros([BLOCK_M, WIDTH], tl.float32)
        if PAIRS:
            acc_of_second = acc
        for tile in range(first, last):
            j = tile * BLOCK_N + tl.arange(0, BLOCK_N)
            inside = (j >= low) & (j < high)
            if PAGE_SIZE and PAGE_SIZE % BLOCK_N == 0:  # a tile is in one page
                begin = tile * BLOCK_N
                page, slot = place_of(begin, begin < high, pages_ptr, capacity, PAGE_SIZE, ROLLS, WIDE)
                slot += tl.arange(0, BLOCK_N)
            else:
                page, slot = place_of(j, inside, pages_ptr, capacity, PAGE_SIZE, ROLLS, WIDE)
            k_rows = offsets_of(page, slot, stride_kp, stride_kt, PAGE_SIZE)[:, None]
            v_rows = offsets_of(page, slot, stride_vp, stride_vt, PAGE_SIZE)[:, None]
            if BLOCK_D == D:
                k = tl.load(k_base + k_rows + d * stride_kd, inside[:, None], 0.0)  # [BN, D]
            else:
                k = tl.load(k_base + k_rows + d * stride_kd, inside[:, None] & (d < D), 0.0)
            if PAIRS:
                pair = (v_base + v_rows).to(tl.pointer_type(tl.int16)) + tl.arange(0, WIDTH)[None, :]
                v = tl.load(pair, inside[:, None], 0)  # [BN, DV / 2]
            elif BLOCK_DV == DV:
                v = tl.load(v_base + v_rows + dv * stride_vd, inside[:, None], 0.0)  # [BN, DV]
            else:
                v = tl.load(v_base + v_rows + dv * stride_vd, inside[:, None] & (dv < DV), 0.0)
            raw = dot(q, tl.trans(k.to(q.dtype)), tl.zeros([BLOCK_M, BLOCK_N], tl.float32), TF32)
            if SCALES:
                raw *= q_scale
            if SCALES == 2:
                k_at = offsets_of(page, slot, scale_kp, scale_kt, PAGE_SIZE)
                raw *= tl.load(k_scales + k_at, inside, 0.0)[None, :]
            s = modified(raw, tile_scale, variables, KIND, i[:, None], j[None, :])
            if KIND.INTERVALS or tile * BLOCK_N < clear_low or tile * BLOCK_N + BLOCK_N > clear_high:
                seen = visible(
                    i[:, None], j[None, :], tile * BLOCK_N, high, diagonal + offset, variables, KIND
                )
                s = tl.where(seen & (j >= low)[None, :], s, -float("inf"))
            ms, ls, p, alpha = online_softmax_update(ms, ls, s, unit, EXACT)
            if SCALES == 1:
                p *= ONE
            if SCALES == 2:
                v_at = offsets_of(page, slot, scale_vp, scale_vt, PAGE_SIZE)
                scales = tl.load(v_scales + v_at, inside, 0.0)
                before_tile, largest = largest, tl.maximum(largest, tl.max(scales, 0))
                p *= (scales * (ONE / largest))[None, :]
                alpha *= before_tile / largest
            p = rounded(p, q.dtype)
            if PAIRS:
                v, second = float16_of_pairs(v)
                acc_of_second = dot(p, second, acc_of_second * alpha[:, None], TF32)
            acc = dot(p, v.to(q.dtype), acc * alpha[:, None], TF32)

        if PAIRS:
            acc = tl.join(acc, acc_of_second).reshape(BLOCK_M, BLOCK_DV)
        whole = True
        if SPLIT:
            whole = False if PREFIX else count == own_tiles
        if KIND.SINKS:
            sink = tl.load(given.sinks + head).to(tl.float32) * LOG2E / unit
            sink = tl.where(whole, sink, -float("inf"))
            ms, ls, alpha, _ = online_softmax_merge(ms, ls, sink, 1.0, unit)
            acc *= alpha[:, None]
        lse, normaliser = online_softmax_finish(ms, ls, unit)
        if SCALES == 1:
            normaliser *= tl.load(v_scale_ptr + h) / ONE
        if SCALES == 2:
            normaliser *= largest / ONE
        acc *= normaliser[:, None]
        exists = i < queries
        if whole:
            to = entry * stride_ob + head * stride_oh + (token + i).to(tl.int64) * stride_os
            to = out_ptr + to[:, None] + dv * stride_od
            tl.store(to, rounded(acc, out_ptr.dtype.element_ty), exists[:, None] & (dv < DV))
            tl.store(lse_ptr + (entry * Hkv * GROUP + head) * Sq + token + i, lse, exists)
        elif SPLIT:
            items = tl.sum(tl.where(before, query_tiles, 0), 0) * Hkv
            piece = (program + items + item).to(tl.int64) * BLOCK_M + tl.arange(0, BLOCK_M)
            tl.store(pieces_ptr + piece[:, None] * DV + dv, acc, exists[:, None] & (dv < DV))
            tl.store(piece_lse_ptr + piece, lse, exists)


@triton.jit(do_not_specialize=["B", "Sq", "Sk", "new", "capacity", "offset", "programs", "slices"])
def merge_kernel(
    pieces_ptr, piece_lse_ptr, out_ptr, lse_ptr, prefix_ptr, prefix_lse_ptr,
    lengths_ptr, starts_ptr, cu_seqlens_ptr,
    stride_ob, stride_oh, stride_os, stride_od, stride_pb, stride_ph, stride_ps, stride_pd,
    B, Hkv, Sq, Sk, new, capacity, offset, programs, slices, given,
    GROUP: tl.constexpr, DV: tl.constexpr, BLOCK_DV: tl.constexpr, BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr, BLOCK_B: tl.constexpr, ROWS: tl.constexpr, PIECES: tl.constexpr,
    KIND: tl.constexpr, ROLLS: tl.constexpr, PDL: tl.constexpr = False,
):  # fmt: skip
    """Program: of ROWS rows, one of the slices of a tile of queries, the pieces of
    attention_decode_kernel, PIECES at a time; then the state of a prefix, prefix [B, Hq, Sq, DV] with
    its lse, and the sink.

    PDL: the launch is a dependent one (launch_pdl), which waits for what the launch before has written.
    """
    left = 0
    if KIND.WINDOW:
        left = given.left
    query_tiles, tiles, work = plan(
        lengths_ptr, cu_seqlens_ptr, starts_ptr, B, Hkv, Sq, Sk, new, capacity, offset, left,
        GROUP, BLOCK_M, BLOCK_N, BLOCK_B, KIND, ROLLS, True,
    )  # fmt: skip
    items = query_tiles * Hkv
    item = tl.program_id(0) // slices
    b, begun = sequence_of_step(item, items, BLOCK_B)
    every = tl.arange(0, BLOCK_B)
    own_tiles = tl.sum(tl.where(every == b, tiles, 0), 0)
    own_query_tiles = tl.maximum(tl.sum(tl.where(every == b, query_tiles, 0), 0), 1)
    # The program that has the first of its steps, and how many programs have some.
    step = tl.sum(tl.where(every < b, work, 0), 0) + (item - begun) * own_tiles
    total = tl.sum(work, 0)
    first = program_of(step, programs, total)
    count = tl.where(own_tiles > 0, program_of(step + own_tiles - 1, programs, total) - first + 1, 0)
    unmerged = item < tl.sum(items, 0)
    if prefix_ptr is None:
        unmerged = unmerged & (count != 1)
    if PDL:
        tl.extra.cuda.gdc_wait()
    if unmerged:
        token, queries, _ = queries_and_keys(b, lengths_ptr, cu_seqlens_ptr, B, Sq, Sk, new)
        entry = tl.zeros([], tl.int64)
        if cu_seqlens_ptr is None:
            entry += b
        in_tile = tl.program_id(0) % slices * ROWS + tl.arange(0, ROWS)
        r = (item - begun) % own_query_tiles * BLOCK_M + in_tile
        i = r // GROUP
        head = ((item - begun) // own_query_tiles * GROUP + r % GROUP).to(tl.int64)
        exists = i < queries
        at = (token + i).to(tl.int64)
        lse_at = (entry * Hkv * GROUP + head) * Sq + at
        dv = tl.arange(0, BLOCK_DV)[None, :]
        mask = exists[:, None] & (dv < DV)

        m, l = online_softmax_start(ROWS)
        acc = tl.zeros([ROWS, BLOCK_DV], tl.float32)
        for n in range(0, count, PIECES):
            piece = n + tl.arange(0, PIECES)[None, :]
            place = (first + item + piece).to(tl.int64) * BLOCK_M + in_tile[:, None]
            there = exists[:, None] & (piece < count)  # [ROWS, PIECES]
            x = tl.load(piece_lse_ptr + place, there, -float("inf"))
            values = tl.load(
                pieces_ptr + place[:, :, None] * DV + dv[:, None, :],
                there[:, :, None] & (dv < DV)[:, None, :],
                0.0,
            )  # [ROWS, PIECES, DV]
            m, l, p, alpha = online_softmax_update(m, l, x, LOG2E, True)
            acc = acc * alpha[:, None] + tl.sum(p[:, :, None] * values, 1)
        if prefix_ptr is not None:
            # Tokens behind the last sequence have no prefix either.
            place = (entry * stride_pb + head * stride_ph + at * stride_ps)[:, None] + dv * stride_pd
            has_one = i < tl.where(b < B, queries, 0)
            values = tl.load(prefix_ptr + place, has_one[:, None] & (dv < DV), 0.0).to(tl.float32)
            x = tl.load(prefix_lse_ptr + lse_at, has_one, -float("inf"))
            m, l, w1, w2 = online_softmax_merge(m, l, x, 1.0, LOG2E)
            acc = acc * w1[:, None] + values * w2[:, None]
        if KIND.SINKS:
            x = tl.load(given.sinks + head, exists, 0.0).to(tl.float32)
            m, l, w1, _ = online_softmax_merge(m, l, x, 1.0, LOG2E)
            acc *= w1[:, None]
        lse, normaliser = online_softmax_finish(m, l, LOG2E)
        to = out_ptr + (entry * stride_ob + head * stride_oh + at * stride_os)[:, None] + dv * stride_od
        tl.store(to, rounded(acc * normaliser[:, None], out_ptr.dtype.element_ty), mask)
        tl.store(lse_ptr + lse_at, lse, exists)
