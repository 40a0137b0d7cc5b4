"""Attention backward: the gradients of biases, which are sums of dS, and of what a user's function of
scores reads.

A bias [B|1, Hq|1, Sq|1, Sk|1] that is broadcast has the sum of dS over what shares it: one program owns
a tile of the bias and walks over batch entries, heads and tiles in a fixed order, so that nothing of
size [B, Hq, Sq, Sk] is made.  A bias by distance [Hq|1, R] has sums along diagonals: one program walks
down a diagonal of square tiles, all of which have their distances at the same places, and takes the
diagonals of their sum apart at the end.  Both compute the scores and dP again: two products.  With
ENDS tiles so far from the diagonal that all their pairs have the first or the last column are left to
the kernel of dQ: it has their sums on its way.

A bias that each head of each batch entry has for itself gets dS from the kernel of dQ.  An operand of a
SCORE_MOD is summed as a bias is, of the term that SCORE_MOD_BACKWARD has for it in the place of dS.

Legend: as attention_backward.py.  `scale` is in base 2.
"""

import triton
import triton.language as tl

from .interpreter import rounded
from .schedule import key_ranges, query_range, sequence_of, tokens_of
from .scores import (
    Variables,
    counts,
    entropy_part,
    kept_factor,
    kept_of,
    modified,
    of_head,
    rest_of_lse2,
    saved_lse,
    saved_probabilities,
    score_gradient,
    unit_of,
    user_gradient,
    user_modified,
    visible,
)
from .tiles import dot, load_tile


@triton.jit
def score_gradients_of_tile(
    q_base, k_base, v_base, dout_base, lse2_base, rest_base, delta_base, weight_base,
    stride_qs, stride_qd, stride_ks, stride_kd, stride_vs, stride_vd, stride_gs, stride_gd,
    i0, j0, Sq, Sk, offset, scale, variables,
    D: tl.constexpr, DV: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_DV: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, KIND: tl.constexpr,
    TF32: tl.constexpr, WIDE: tl.constexpr,
    SCORE_MOD: tl.constexpr, SCORE_MOD_BACKWARD: tl.constexpr, RESULT: tl.constexpr = 0,
):  # fmt: skip
    """dS [BM, BN] of the queries from i0 and the keys from j0 on, of the modified scores; RESULT: n for
    the terms of operand n - 1 of the SCORE_MOD."""
    i = i0 + tl.arange(0, BLOCK_M)
    q = load_tile(q_base, i0, stride_qs, stride_qd, Sq, BLOCK_M, BLOCK_D, D, True, WIDE)  # [BM, D]
    k = load_tile(k_base, j0, stride_ks, stride_kd, Sk, BLOCK_N, BLOCK_D, D, True, WIDE)  # [BN, D]
    s = dot(q, tl.trans(k), tl.zeros([BLOCK_M, BLOCK_N], tl.float32), TF32)
    j = j0 + tl.arange(0, BLOCK_N)[None, :]
    lse = saved_lse(lse2_base, rest_base, i, i < Sq, variables.given, KIND)
    delta = tl.load(delta_base + i, i < Sq, 0.0)
    s = modified(s, scale, variables, KIND, i[:, None], j)
    if KIND.SCORE_MOD:
        before = s
        s = user_modified(before, i[:, None], j, variables, SCORE_MOD, BOUNDED=True)
    p = saved_probabilities(s, lse, unit_of(scale, KIND), variables.given, KIND)
    p = tl.where(visible(i[:, None], j, j0, Sk, offset, variables, KIND), p, 0.0)
    dout = load_tile(dout_base, i0, stride_gs, stride_gd, Sq, BLOCK_M, BLOCK_DV, DV, True, WIDE)
    v = load_tile(v_base, j0, stride_vs, stride_vd, Sk, BLOCK_N, BLOCK_DV, DV, True, WIDE)  # [BN, DV]
    dp = dot(dout, tl.trans(v), tl.zeros([BLOCK_M, BLOCK_N], tl.float32), TF32)
    if KIND.DROPOUT:
        keep = kept_of(i0, j0, variables, BLOCK_M, BLOCK_N)
        dp = tl.where(keep, dp * kept_factor(variables.given), 0.0)
    ds = score_gradient(p, dp, delta[:, None])
    if KIND.ENTROPY:
        ds += entropy_part(p, tl.load(weight_base + i, i < Sq, 0.0)[:, None])
    if KIND.SCORE_MOD:
        ds = user_gradient(ds, p, before, i[:, None], j, variables, SCORE_MOD_BACKWARD, RESULT)
    return ds


@triton.jit
def attention_backward_bias_kernel(
    q_ptr, k_ptr, v_ptr, dout_ptr, lse2_ptr, delta_ptr, gradient_ptr,
    stride_qb, stride_qh, stride_qs, stride_qd,
    stride_kb, stride_kh, stride_ks, stride_kd,
    stride_vb, stride_vh, stride_vs, stride_vd,
    stride_gb, stride_gh, stride_gs, stride_gd,
    B, Hq, GROUP, Sq, Sk, offset, scale, i_tiles, j_tiles,
    given,  # of the variant, see scores.py
    D: tl.constexpr, DV: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_DV: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, KIND: tl.constexpr,
    TF32: tl.constexpr, WIDE: tl.constexpr,
    BATCH: tl.constexpr, HEADS: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
    SCORE_MOD: tl.constexpr = None, SCORE_MOD_BACKWARD: tl.constexpr = None,
    RESULT: tl.constexpr = 0,
):  # fmt: skip
    """Program: for one entry of the bias's batch and heads, i_tiles by j_tiles tiles of pairs.

    BATCH, HEADS, ROWS, COLUMNS: whether the bias has that dimension; else it is summed over: over rows
    and columns those of the program alone.  i_tiles is 1 with ROWS, j_tiles with COLUMNS.
    gradient [parts of rows and columns, entries, Sq | 1, Sk | 1].
    """
    n_rows, n_columns = tl.cdiv(Sq, BLOCK_M), tl.cdiv(Sk, BLOCK_N)
    parts_of_columns = tl.cdiv(n_columns, j_tiles)
    parts = tl.cdiv(n_rows, i_tiles) * parts_of_columns
    entry = (tl.program_id(0) // parts).to(tl.int64)
    entries = tl.num_programs(0) // parts
    part = tl.program_id(0) % parts
    i_first = part // parts_of_columns * i_tiles
    j_first = part % parts_of_columns * j_tiles
    i_last, j_last = tl.minimum(i_first + i_tiles, n_rows), tl.minimum(j_first + j_tiles, n_columns)
    i_own, j_own = i_first * BLOCK_M, j_first * BLOCK_N
    if ROWS:  # and of its columns those that a band shows
        begin, _, _, end = key_ranges(i_own, Sk, offset, given, BLOCK_M, BLOCK_N, KIND)
        j_last = tl.minimum(j_last, end)
        if not KIND.FIRST:
            j_first = tl.maximum(j_first, begin)
    elif COLUMNS:
        begin, end = query_range(j_own, Sq, offset, given, BLOCK_M, KIND, BLOCK_N)
        i_first, i_last = tl.maximum(i_first, begin), tl.minimum(i_last, end)
    width = tl.maximum(j_last - j_first, 0)
    tiles = tl.maximum(i_last - i_first, 0) * width
    first, step, members = 0, 1, B * Hq
    if BATCH and HEADS:
        first, members = entry, 1
    elif BATCH:
        first, members = entry * Hq, Hq
    elif HEADS:
        first, step, members = entry, Hq, B
    all_visits = members * tiles
    width, tiles = tl.maximum(width, 1), tl.maximum(tiles, 1)

    weights, rest_ptr = delta_ptr, rest_of_lse2(lse2_ptr, given, KIND)
    if KIND.ENTROPY:
        weights = given.entropy_weights
    ds = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    for visit in range(all_visits):
        member = visit // tiles
        tile = visit - member * tiles
        head = first + member * step
        b = (head // Hq).to(tl.int64)
        h = (head % Hq).to(tl.int64)
        row = (b * Hq + h) * Sq
        ds += score_gradients_of_tile(
            q_ptr + b * stride_qb + h * stride_qh,
            k_ptr + b * stride_kb + h // GROUP * stride_kh,
            v_ptr + b * stride_vb + h // GROUP * stride_vh,
            dout_ptr + b * stride_gb + h * stride_gh,
            lse2_ptr + row, rest_ptr + row, delta_ptr + row, weights + row,
            stride_qs, stride_qd, stride_ks, stride_kd, stride_vs, stride_vd, stride_gs, stride_gd,
            (i_first + tile // width) * BLOCK_M, (j_first + tile % width) * BLOCK_N,
            Sq, Sk, offset, scale,
            Variables(given, of_head(given, b, h, Sq, Sk, BLOCK_N, KIND, head)),
            D, DV, BLOCK_D, BLOCK_DV, BLOCK_M, BLOCK_N, KIND, TF32, WIDE,
            SCORE_MOD, SCORE_MOD_BACKWARD, RESULT,
        )  # fmt: skip

    i = i_own + tl.arange(0, BLOCK_M)
    j = j_own + tl.arange(0, BLOCK_N)
    dtype: tl.constexpr = gradient_ptr.dtype.element_ty
    if ROWS and COLUMNS:
        at = gradient_ptr + (entry * Sq + i[:, None]) * Sk + j[None, :]
        tl.store(at, rounded(ds, dtype), (i[:, None] < Sq) & (j[None, :] < Sk))
    else:
        to = part.to(tl.int64) * entries + entry
        if ROWS:
            to = ((part % parts_of_columns).to(tl.int64) * entries + entry) * Sq
            tl.store(gradient_ptr + to + i, rounded(tl.sum(ds, 1), dtype), i < Sq)
        elif COLUMNS:
            to = ((part // parts_of_columns).to(tl.int64) * entries + entry) * Sk
            tl.store(gradient_ptr + to + j, rounded(tl.sum(ds, 0), dtype), j < Sk)
        else:
            tl.store(gradient_ptr + to, rounded(tl.sum(tl.sum(ds, 1), 0), dtype))


# --- by distance ---------------------------------------------------------------------------------


@triton.jit
def attention_backward_distances_kernel(
    q_ptr, k_ptr, v_ptr, dout_ptr, lse2_ptr, delta_ptr, sums_ptr, columns_ptr,
    stride_qb, stride_qh, stride_qs, stride_qd,
    stride_kb, stride_kh, stride_ks, stride_kd,
    stride_vb, stride_vh, stride_vs, stride_vd,
    stride_gb, stride_gh, stride_gs, stride_gd,
    Hq, GROUP, Sq, Sk, offset, scale,
    given,  # of the variant, see scores.py
    D: tl.constexpr, DV: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_DV: tl.constexpr,
    BLOCK: tl.constexpr, KIND: tl.constexpr, TF32: tl.constexpr, WIDE: tl.constexpr,
    ENDS: tl.constexpr = False,
    SCORE_MOD: tl.constexpr = None, SCORE_MOD_BACKWARD: tl.constexpr = None,
):  # fmt: skip
    """Program: down one diagonal of tiles [BLOCK, BLOCK] of one head: from a tile of queries and the
    first keys on, or from the first queries and a tile of keys.  ENDS: but for tiles whose sums the
    kernel of dQ has made, see there.

    sums [B, Hq, diagonals of tiles, 2 BLOCK + 2] float32: at n, 0 < n < 2 BLOCK, of the pairs that have
    column `columns` + n of the table; before the first column and behind the last one at 0 and 2 BLOCK.
    """
    if KIND.VARLEN:
        sequences, queries, keys = counts(given)
        of_queries = queries // BLOCK + sequences + 1
        slots = of_queries + keys // BLOCK + sequences + 1
    else:
        of_queries = tl.cdiv(Sq, BLOCK)
        slots = of_queries + tl.cdiv(Sk, BLOCK)
    head = tl.program_id(0) // slots
    slot = tl.program_id(0) % slots
    b = (head // Hq).to(tl.int64)
    h = (head % Hq).to(tl.int64)
    q_base = q_ptr + b * stride_qb + h * stride_qh
    k_base = k_ptr + b * stride_kb + h // GROUP * stride_kh
    v_base = v_ptr + b * stride_vb + h // GROUP * stride_vh
    dout_base = dout_ptr + b * stride_gb + h * stride_gh
    row = (b * Hq + h) * Sq
    s = 0
    tile = tl.where(slot < of_queries, slot, slot - of_queries)
    if KIND.VARLEN:
        starts = given.cu_seqlens_q
        if slot >= of_queries:
            starts = given.cu_seqlens_k
        s, tile = sequence_of(tile, starts, sequences, BLOCK)
        token, Sq = tokens_of(s, given.cu_seqlens_q, given.seqused_q, sequences, queries, False)
        key, Sk = tokens_of(s, given.cu_seqlens_k, given.seqused_k, sequences, keys, False)
        offset += Sk - Sq
        q_base += token.to(tl.int64) * stride_qs
        k_base += key.to(tl.int64) * stride_ks
        v_base += key.to(tl.int64) * stride_vs
        dout_base += token.to(tl.int64) * stride_gs
        row = h * queries + token
    it, jt = tl.where(slot < of_queries, tile, 0), tl.where(slot < of_queries, 0, tile)
    tiles = tl.minimum(tl.cdiv(Sq, BLOCK) - it, tl.cdiv(Sk, BLOCK) - jt)
    tiles = tl.where((slot >= of_queries) & (tile == 0), 0, tiles)  # which the queries have too
    apart = (jt - it) * BLOCK
    if KIND.CAUSAL:
        tiles = tl.where(apart - BLOCK < offset, tiles, 0)
    if KIND.WINDOW:
        if not KIND.FIRST:
            tiles = tl.where(apart + BLOCK > offset - given.left, tiles, 0)
    last = (given.relative_columns >> 1) - 1
    columns = Sk - Sq - apart - BLOCK + (given.relative_offset >> 2)
    if ENDS:
        tiles = tl.where((columns + 2 * BLOCK - 1 <= 0) | (columns + 1 >= last), 0, tiles)
    number = s * Hq + head
    variables = Variables(given, of_head(given, b, h, Sq, Sk, BLOCK, KIND, number))

    weights, rest_ptr = delta_ptr, rest_of_lse2(lse2_ptr, given, KIND)
    if KIND.ENTROPY:
        weights = given.entropy_weights
    ds = tl.zeros([BLOCK, BLOCK], tl.float32)
    for step in range(tiles):
        ds += score_gradients_of_tile(
            q_base, k_base, v_base, dout_base,
            lse2_ptr + row, rest_ptr + row, delta_ptr + row, weights + row,
            stride_qs, stride_qd, stride_ks, stride_kd, stride_vs, stride_vd, stride_gs, stride_gd,
            (it + step) * BLOCK, (jt + step) * BLOCK, Sq, Sk, offset, scale, variables,
            D, DV, BLOCK_D, BLOCK_DV, BLOCK, BLOCK, KIND, TF32, WIDE,
            SCORE_MOD, SCORE_MOD_BACKWARD,
        )  # fmt: skip

    # Column n of the rows side by side, each shifted by its number: of ds with i - j = n - BLOCK.
    at = tl.arange(0, 2 * BLOCK)[None, :]
    column = tl.arange(0, BLOCK)[:, None] + BLOCK - at
    inside = (column >= 0) & (column < BLOCK)
    shifted = tl.gather(ds, tl.where(inside, column, 0), 1)  # [BLOCK, 2 BLOCK]
    sums = tl.sum(tl.where(inside, shifted, 0.0), 0)
    at = tl.arange(0, 2 * BLOCK)
    to = sums_ptr + tl.program_id(0).to(tl.int64) * (2 * BLOCK + 2)
    tl.store(to + at, sums, at > 0)
    tl.store(to, tl.sum(tl.where(columns + at <= 0, sums, 0.0), 0))
    beyond = (columns + at >= last) & (columns + at > 0)
    tl.store(to + 2 * BLOCK, tl.sum(tl.where(beyond, sums, 0.0), 0))
    tl.store(to + 2 * BLOCK + 1, 0.0)
    tl.store(columns_ptr + slot, columns, head == 0)


@triton.jit(do_not_specialize=["diagonals", "programs", "R"])
def attention_backward_relative_kernel(
    sums_ptr, columns_ptr, ends_ptr, gradient_ptr, diagonals, programs, R,
    BLOCK: tl.constexpr, LOOKED_AT: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """Program: the gradient of COLUMNS columns of one row of the table, from sums [rows, diagonals,
    2 BLOCK + 2] and, of the first and the last column, ends [rows, programs, 2], if there are some;
    those of all batch entries."""
    parts = tl.cdiv(R, COLUMNS)
    row = (tl.program_id(0) // parts).to(tl.int64)
    column = tl.program_id(0) % parts * COLUMNS + tl.arange(0, COLUMNS)
    beyond = tl.where(R == 1, diagonals, 0)  # a single column is the first and the last one
    total = tl.zeros([COLUMNS], tl.float32)
    for first in range(0, diagonals, LOOKED_AT):
        diagonal = first + tl.arange(0, LOOKED_AT)[:, None]
        there = diagonal < diagonals
        place = column[None, :] - tl.load(columns_ptr + diagonal, there, 0)
        inside = (place > 0) & (place < 2 * BLOCK)
        # The ends of the table have what is beyond them too.
        place = tl.where(column[None, :] == R - 1, 2 * BLOCK, place)
        place = tl.where(column[None, :] == 0, 0, place)
        inside = (inside | (column[None, :] == 0)) | (column[None, :] == R - 1)
        own = sums_ptr + (row * diagonals + diagonal) * (2 * BLOCK + 2)
        total += tl.sum(tl.load(own + place, inside & there, 0.0), 0)
        total += tl.sum(tl.load(own + 2 * BLOCK + 0 * place, diagonal < beyond, 0.0), 0)
    if ends_ptr is not None:
        first_sum = tl.zeros([LOOKED_AT], tl.float32)
        last_sum = tl.zeros([LOOKED_AT], tl.float32)
        for first in range(0, programs, LOOKED_AT):
            program = first + tl.arange(0, LOOKED_AT)
            own = ends_ptr + (row * programs + program) * 2
            first_sum += tl.load(own, program < programs, 0.0)
            last_sum += tl.load(own + 1, program < programs, 0.0)
        total += tl.where(column == 0, tl.sum(first_sum, 0), 0.0)
        total += tl.where(column == R - 1, tl.sum(last_sum, 0), 0.0)
    gradient_ptr += row * R
    tl.store(gradient_ptr + column, rounded(total, gradient_ptr.dtype.element_ty), column < R)
