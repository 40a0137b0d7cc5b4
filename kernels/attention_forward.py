"""Attention forward: O = softmax(scale Q K^T) V, one pass over K and V for each tile of queries.

For a tile of queries Q [BM, D], over key tiles K [BN, D], V [BN, DV]:

    S = Q K^T                                   [BM, BN]   first product
    m', l', P, alpha = update(m, l, S)          online softmax: P = 2^(scale (S - m')), float32
    acc = alpha acc + P V                       [BM, DV]   second product
    ...
    O = acc / l        lse = scale m ln 2 + ln l

With dropout P V is of the probabilities that it keeps, and O is multiplied by 1 / (1 - p); l is of all.

The scores never leave the chip: memory traffic is O(S D) and not O(S^2).  Source: Dao et al.,
"FlashAttention" (2022); Dao, "FlashAttention-2" (2023), algorithm 1.

Legend: q [B, Hq, Sq, D], k [B, Hkv, Sk, D], v [B, Hkv, Sk, DV], out [B, Hq, Sq, DV], lse [B, Hq, Sq]
float32, natural log.  Query head h reads key head h // GROUP.  `scale` is in base 2: softmax scale
times log2(e), positive.  BLOCK_D and BLOCK_DV are D and DV padded to powers of two.
"""

import triton
import triton.language as tl

from .interpreter import rounded
from .online_softmax import (
    LN2,
    LOG2E,
    entropy_finish,
    entropy_update,
    online_softmax_finish,
    online_softmax_merge,
    online_softmax_start,
    online_softmax_update,
)
from .rounding import rest_of
from .schedule import first_tiles, key_ranges, next_run, problem_of_queries
from .scores import (
    Variables,
    kept_factor,
    kept_of,
    modified,
    of_head,
    unit_of,
    user_modified,
    visible,
)
from .tiles import dot, load_tile, store_tile


@triton.jit
def attend_to_tiles(
    state, q, k_base, v_base, stride_ks, stride_kd, stride_vs, stride_vd,
    i0, first, last, Sk, offset, scale, variables,
    D: tl.constexpr, DV: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_DV: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, KIND: tl.constexpr, MASKED: tl.constexpr,
    EXACT: tl.constexpr, TF32: tl.constexpr, WIDE: tl.constexpr, SCORE_MOD: tl.constexpr,
):  # fmt: skip
    """Key tiles first ... last - 1 into the state: m [BM], l [BM], acc [BM, DV] and, where KIND has
    them, the largest raw score and the weighted sum for the entropy [BM]."""
    m, l, acc, top, weighted = state
    unit = unit_of(scale, KIND)
    for tile in range(first, last):
        j0 = tile * BLOCK_N
        k = load_tile(
            k_base, j0, stride_ks, stride_kd, Sk, BLOCK_N, BLOCK_D, D, MASKED, WIDE
        )  # [BN, D]
        if BLOCK_D != BLOCK_DV:
            # Where loads are not pipelined (unaligned tensors), K and V would share one buffer in
            # turns, and ptxas 12.8 confuses the wgmma descriptors of its two swizzles.
            v = load_tile(
                v_base, j0, stride_vs, stride_vd, Sk, BLOCK_N, BLOCK_DV, DV, MASKED, WIDE
            )  # [BN, DV]
        raw = dot(q, tl.trans(k), tl.zeros([BLOCK_M, BLOCK_N], tl.float32), TF32)  # [BM, BN]
        i = i0 + tl.arange(0, BLOCK_M)[:, None]
        j = j0 + tl.arange(0, BLOCK_N)[None, :]
        s = modified(raw, scale, variables, KIND, i, j)
        if KIND.SCORE_MOD:
            s = user_modified(s, i, j, variables, SCORE_MOD)
        if MASKED:
            seen = visible(i, j, j0, Sk, offset, variables, KIND)
            s = tl.where(seen, s, -float("inf"))
            if KIND.MAX_SCORE:
                raw = tl.where(seen, raw, -float("inf"))
        if KIND.MAX_SCORE and ((KIND.BIAS or KIND.RELATIVE_BIAS) or KIND.SCORE_MOD):
            raw = tl.where(s == -float("inf"), s, raw)
        if KIND.MAX_SCORE:
            top = tl.maximum(top, tl.max(raw, 1))
        m_old, l_old = m, l
        m, l, p, alpha = online_softmax_update(m, l, s, unit, EXACT)
        if KIND.ENTROPY:
            weighted = entropy_update(weighted, m_old, l_old, m, s, p, alpha, unit)
        if KIND.DROPOUT:
            p = tl.where(kept_of(i0, j0, variables, BLOCK_M, BLOCK_N), p, 0.0)
        if BLOCK_D == BLOCK_DV:
            v = load_tile(
                v_base, j0, stride_vs, stride_vd, Sk, BLOCK_N, BLOCK_DV, DV, MASKED, WIDE
            )  # [BN, DV]
        acc = dot(rounded(p, v.dtype), v, acc * alpha[:, None], TF32)
    return m, l, acc, top, weighted


@triton.jit
def attention_forward_kernel(
    q_ptr, k_ptr, v_ptr, out_ptr, lse_ptr,
    stride_qb, stride_qh, stride_qs, stride_qd,
    stride_kb, stride_kh, stride_ks, stride_kd,
    stride_vb, stride_vh, stride_vs, stride_vd,
    stride_ob, stride_oh, stride_os, stride_od,
    Hq, GROUP, Sq, Sk, offset, scale,
    given,  # of the variant, see scores.py
    D: tl.constexpr, DV: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_DV: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, KIND: tl.constexpr,
    EXACT: tl.constexpr, TF32: tl.constexpr, WIDE: tl.constexpr, SCORE_MOD: tl.constexpr = None,
):  # fmt: skip
    """Program: one tile of BLOCK_M queries of one head.  Tiles of a head are neighbours in the grid,
    so that its keys and values stay in the L2 cache."""
    problem = problem_of_queries(Hq, Sq, Sk, offset, given, BLOCK_M, KIND)
    head, i0, token, key = problem.head, problem.first, problem.token, problem.key
    Sq, Sk, offset, rows = problem.Sq, problem.Sk, problem.offset, problem.rows
    b = (head // Hq).to(tl.int64)
    h = (head % Hq).to(tl.int64)
    q_base = q_ptr + b * stride_qb + h * stride_qh
    k_base = k_ptr + b * stride_kb + h // GROUP * stride_kh
    v_base = v_ptr + b * stride_vb + h // GROUP * stride_vh
    out_base = out_ptr + b * stride_ob + h * stride_oh
    if KIND.VARLEN:
        q_base += token.to(tl.int64) * stride_qs
        k_base += key.to(tl.int64) * stride_ks
        v_base += key.to(tl.int64) * stride_vs
        out_base += token.to(tl.int64) * stride_os
    number = problem.sequence * Hq + head
    variables = Variables(given, of_head(given, b, h, Sq, Sk, BLOCK_N, KIND, number))

    q = load_tile(q_base, i0, stride_qs, stride_qd, Sq, BLOCK_M, BLOCK_D, D, True, WIDE)  # [BM, D]
    m, l = online_softmax_start(BLOCK_M)
    acc = tl.zeros([BLOCK_M, BLOCK_DV], tl.float32)
    state = m, l, acc, m, l
    ranges = key_ranges(i0, Sk, offset, given, BLOCK_M, BLOCK_N, KIND)
    begin, clear_begin, clear_end, end = ranges
    if KIND.INTERVALS or KIND.TABLE:
        tile, last, clear = next_run(0, i0, Sq, Sk, ranges, variables, BLOCK_M, BLOCK_N, KIND)
        while tile < end:
            if clear:
                state = attend_to_tiles(
                    state, q, k_base, v_base, stride_ks, stride_kd, stride_vs, stride_vd,
                    i0, tile, last, Sk, offset, scale, variables,
                    D, DV, BLOCK_D, BLOCK_DV, BLOCK_M, BLOCK_N, KIND, False, EXACT, TF32, WIDE,
                    SCORE_MOD,
                )  # fmt: skip
            else:
                state = attend_to_tiles(
                    state, q, k_base, v_base, stride_ks, stride_kd, stride_vs, stride_vd,
                    i0, tile, last, Sk, offset, scale, variables,
                    D, DV, BLOCK_D, BLOCK_DV, BLOCK_M, BLOCK_N, KIND, True, EXACT, TF32, WIDE,
                    SCORE_MOD,
                )  # fmt: skip
            tile, last, clear = next_run(last, i0, Sq, Sk, ranges, variables, BLOCK_M, BLOCK_N, KIND)
    else:
        if KIND.FIRST:
            state = attend_to_tiles(
                state, q, k_base, v_base, stride_ks, stride_kd, stride_vs, stride_vd,
                i0, 0, first_tiles(begin, given, BLOCK_N, KIND), Sk, offset, scale, variables,
                D, DV, BLOCK_D, BLOCK_DV, BLOCK_M, BLOCK_N, KIND, True, EXACT, TF32, WIDE,
                SCORE_MOD,
            )  # fmt: skip
        state = attend_to_tiles(
            state, q, k_base, v_base, stride_ks, stride_kd, stride_vs, stride_vd,
            i0, begin, clear_begin, Sk, offset, scale, variables,
            D, DV, BLOCK_D, BLOCK_DV, BLOCK_M, BLOCK_N, KIND, True, EXACT, TF32, WIDE,
            SCORE_MOD,
        )  # fmt: skip
        state = attend_to_tiles(
            state, q, k_base, v_base, stride_ks, stride_kd, stride_vs, stride_vd,
            i0, clear_begin, clear_end, Sk, offset, scale, variables,
            D, DV, BLOCK_D, BLOCK_DV, BLOCK_M, BLOCK_N, KIND, False, EXACT, TF32, WIDE,
            SCORE_MOD,
        )  # fmt: skip
        state = attend_to_tiles(
            state, q, k_base, v_base, stride_ks, stride_kd, stride_vs, stride_vd,
            i0, clear_end, end, Sk, offset, scale, variables,
            D, DV, BLOCK_D, BLOCK_DV, BLOCK_M, BLOCK_N, KIND, True, EXACT, TF32, WIDE,
            SCORE_MOD,
        )  # fmt: skip

    m, l, acc, top, weighted = state
    unit = unit_of(scale, KIND)
    if KIND.ENTROPY:
        entropy = entropy_finish(weighted, l)
    if KIND.SINKS:
        m, l, alpha, _ = online_softmax_merge(m, l, variables.head.sink * LOG2E / unit, 1.0, unit)
        acc *= alpha[:, None]
    lse, normaliser = online_softmax_finish(m, l, unit)
    if KIND.DROPOUT:
        normaliser *= kept_factor(given)
    acc *= normaliser[:, None]
    store_tile(out_base, acc, i0, stride_os, stride_od, Sq, BLOCK_M, BLOCK_DV, DV, WIDE)
    row = head.to(tl.int64) * rows
    if KIND.VARLEN:
        row += token
    if KIND.DROPOUT and not EXACT:
        if given.rest is not None:
            rest = rest_of(acc, rounded(acc, out_ptr.dtype.element_ty))
            store_tile(given.rest + row * DV, rest, i0, DV, 1, Sq, BLOCK_M, BLOCK_DV, DV, WIDE)
    i = i0 + tl.arange(0, BLOCK_M)
    tl.store(lse_ptr + row + i, lse, i < Sq)
    if KIND.RESCALES and EXACT:
        if given.rest is not None:
            # The backward's lse2 is this product, which the compiler would not round by itself.
            rest = m - tl.fma(lse, LOG2E, 0.0) + tl.log2(l)
            tl.store(given.rest + row + i, tl.where(l == 0.0, 0.0, rest), i < Sq)
    if KIND.MAX_SCORE:
        tl.store(given.max_score + row + i, top * (scale * LN2), i < Sq)
    if KIND.ENTROPY:
        tl.store(given.entropy + row + i, entropy, i < Sq)
