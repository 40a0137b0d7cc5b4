"""Attention backward: the scores are computed again, tile by tile, from Q, K and the saved lse.

With P = exp(scale Q K^T - lse), O = P V, and the gradients dO of O and dlse of lse:

    delta = rowsum(dO * O) - dlse               [Sq]       (a derivative of lse adds P * dlse to dS)
    dP = dO V^T          dS = P * (dP - delta)  [Sq, Sk]
    dV = P^T dO          dK = scale dS^T Q      dQ = scale dS K

Kernels: delta, one tile of rows at a time; dK and dV, one program for a tile of keys, over the
query tiles (and over the query heads that share the key head, so that GQA sums its gradients here);
dQ, one program for a tile of queries, over the key tiles; the gradients of sinks and slopes, one
program for a head.  Scores are computed twice, seven products and not five, and in return nothing is
added atomically: results are the same bits every time.
A gradient dH of the entropy H = -sum_j p_j ln p_j of a row, p being the probabilities of keys without
the sink's, P / Z with Z = 1 - P_sink, adds -dH p (ln p + H) to dS.  With c = dH / Z that is
-c P (ln P + H - ln Z): c (H - ln Z) goes into delta, but not into the sink's, of which p is free, and
c ln 2 is the weight of P log2 P.  Z is of the saved lse: where the sink has all but 1e-5 of the
probability its rounding is 1%.
Dropout keeps a probability with the factor 1 / (1 - p), or makes it 0: dP is multiplied by that, dV is
of what is kept, and delta is right as it stands, since O is of what is kept too.
But O of 16 bits is rounded, and dS of a row is off by P times what its rounding makes of dO * O.  Where
one key has all of a row dS should be 0.  Without dropout O is its V there, and delta exact; 1 / (1 - p)
times its V is rounded, and in dK the errors of all such rows would add up: the forward keeps what
rounding took from O, and delta has it.  In the gradient of a bias errors add up too, where the terms of
a row should cancel.  There delta is rowsum(P * dP), see the kernel of dQ.
Of float32 the forward keeps what rounding took from the lse of changed scores, which may lie far from
0, and P has it.
Source: Dao, "FlashAttention-2" (2023), algorithm 2.

Legend: as attention_forward.py; dout as out; delta and lse2 [B, Hq, Sq] float32.  In these kernels
scale is in base 2 (softmax scale times log2(e)) and `scale_natural` is the softmax scale itself.
"""

import triton
import triton.language as tl

from .interpreter import rounded
from .online_softmax import LN2, LOG2E
from .rounding import with_rest
from .schedule import (
    clamp,
    first_tiles,
    key_ranges,
    listed_queries,
    next_run,
    problem_of_keys,
    problem_of_queries,
    queries_of_keys,
    query_range,
)
from .scores import (
    Variables,
    counts,
    distance,
    ends_of,
    entropy_part,
    kept_factor,
    kept_of,
    modified,
    modified_gradient,
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
from .tiles import add_product, dot, load_tile, load_tile_clamped, store_tile


@triton.jit
def row_sums(a, b):
    """rowsum(a * b) [R] of tiles [R, C].

    Of float32 the diagonal of a b^T, which is summed in the order of dP = dO V^T: where one key has all
    the probability of a row, O is its V, and dP - delta is exactly 0 as in eager's softmax.  A sum in
    another order would leave a rounding, which dK adds up over the queries.
    """
    if a.dtype == tl.float32:
        products = dot(a, tl.trans(b), tl.zeros([a.shape[0], a.shape[0]], tl.float32), False)
        row = tl.arange(0, a.shape[0])
        return tl.sum(tl.where(row[:, None] == row[None, :], products, 0.0), 1)
    else:
        return tl.sum(a.to(tl.float32) * b.to(tl.float32), 1)


@triton.jit
def sink_probability(sink_ptr, lse2):
    """Of rows with these lse2."""
    return tl.exp2(tl.load(sink_ptr).to(tl.float32) * LOG2E - lse2)


@triton.jit
def saved_sink_probability(sink_ptr, lse, given, KIND: tl.constexpr):
    """Of rows with this saved_lse: what the probabilities of their keys leave of 1."""
    lse2, rest = lse
    probability = sink_probability(sink_ptr, lse2)
    if KIND.RESCALES:
        if given.rest is not None:
            # The forward's sink is this product, rounded.
            sink2 = tl.fma(tl.load(sink_ptr).to(tl.float32), LOG2E, 0.0)
            probability = tl.exp2(sink2 - lse2 - rest)
    return probability


@triton.jit
def attention_backward_rows_kernel(
    out_ptr, dout_ptr, lse_ptr, dlse_ptr, lse2_ptr, delta_ptr,
    stride_ob, stride_oh, stride_os, stride_od,
    stride_gb, stride_gh, stride_gs, stride_gd,
    stride_lb, stride_lh, stride_ls,
    Hq, Sq,
    given,  # of the variant, see scores.py
    DV: tl.constexpr, BLOCK_DV: tl.constexpr, BLOCK_M: tl.constexpr, KIND: tl.constexpr,
    HAS_DLSE: tl.constexpr, WIDE: tl.constexpr, SLOPES: tl.constexpr = False,
):  # fmt: skip
    """Program: delta and lse2 of BLOCK_M queries, as one tile or, of float32 and of wide heads with
    dropout, as tiles of 16.  lse2 is lse in base 2; rows that saw no key get +inf, which makes their
    probabilities 0.

    With SLOPES also what each row of dS sums to, dlse + delta * the sink's probability.  Where delta
    is made anew, also what it has beside rowsum(P * dP).
    """
    end = Sq
    if KIND.VARLEN:
        sequences, Sq, _ = counts(given)
        end = tl.load(given.cu_seqlens_q + sequences)  # dout behind it may be anything
    SHORT: tl.constexpr = out_ptr.dtype.element_ty != tl.float32
    SMALL: tl.constexpr = not SHORT or (KIND.DROPOUT and BLOCK_DV > 128)
    ROWS: tl.constexpr = 16 if SMALL else BLOCK_M
    n_tiles = tl.cdiv(Sq, BLOCK_M)
    head = tl.program_id(0) // n_tiles
    first = tl.program_id(0) % n_tiles * BLOCK_M
    b = (head // Hq).to(tl.int64)
    h = (head % Hq).to(tl.int64)
    out_base = out_ptr + b * stride_ob + h * stride_oh
    dout_base = dout_ptr + b * stride_gb + h * stride_gh
    for part in tl.static_range(0, BLOCK_M, ROWS):
        i0 = first + part
        out = load_tile(out_base, i0, stride_os, stride_od, Sq, ROWS, BLOCK_DV, DV, True, WIDE)
        dout = load_tile(dout_base, i0, stride_gs, stride_gd, end, ROWS, BLOCK_DV, DV, True, WIDE)
        delta = row_sums(out, dout)
        if KIND.DROPOUT and SHORT:
            if given.rest is not None:
                rest_base = given.rest + head.to(tl.int64) * Sq * DV
                rest = load_tile(rest_base, i0, DV, 1, Sq, ROWS, BLOCK_DV, DV, True, WIDE)
                delta = tl.sum(with_rest(out, rest) * dout.to(tl.float32), 1)
        i = i0 + tl.arange(0, ROWS)
        ds_sum = tl.zeros([ROWS], tl.float32)
        beside = tl.zeros([ROWS], tl.float32)
        if HAS_DLSE:
            dlse_base = dlse_ptr + b * stride_lb + h * stride_lh
            dlse = tl.load(dlse_base + i.to(tl.int64) * stride_ls, i < Sq, 0.0)
            delta -= dlse
            beside -= dlse
            ds_sum += dlse
        row = head.to(tl.int64) * Sq + i
        lse = tl.load(lse_ptr + row, i < Sq, 0.0)
        lse2 = tl.where(lse == -float("inf"), float("inf"), lse * LOG2E)
        if KIND.VARLEN:
            if given.seqused_q is not None:  # dout of gaps, whose lse is -inf, may be anything too
                delta = tl.where(lse == -float("inf"), 0.0, delta)
                ds_sum = tl.where(lse == -float("inf"), 0.0, ds_sum)
        tl.store(lse2_ptr + row, lse2, i < Sq)
        shifted = delta
        of_sink = delta  # which nothing reads
        if KIND.SINKS:
            if SHORT:
                of_sink = sink_probability(given.sinks + h, lse2)
            else:
                rest = lse2
                if KIND.RESCALES:
                    if given.rest is not None:
                        rest = tl.load(given.rest + row, i < Sq, 0.0)
                of_sink = saved_sink_probability(given.sinks + h, (lse2, rest), given, KIND)
        if KIND.ENTROPY:
            weight = tl.load(given.entropy_gradient + row, i < Sq, 0.0)
            entropy = tl.load(given.entropy + row, i < Sq, 0.0)
            if KIND.SINKS:
                of_keys = 1.0 - of_sink
                there = of_keys > 0.0
                of_keys = tl.where(there, of_keys, 1.0)
                weight = tl.where(there, weight / of_keys, 0.0)
                entropy -= tl.log(of_keys)
            shifted += weight * entropy
            beside += weight * entropy
            tl.store(given.entropy_weights + row, weight * LN2, i < Sq)
            if given.sink_delta is not None:
                tl.store(given.sink_delta + row, delta, i < Sq)
        tl.store(delta_ptr + row, shifted, i < Sq)
        if (KIND.DROPOUT or KIND.SCORE_MOD) or (KIND.BIAS or KIND.RELATIVE_BIAS):
            if given.beside_delta is not None:
                tl.store(given.beside_delta + row, beside, i < Sq)
        if SLOPES:
            if KIND.SINKS:
                ds_sum += delta * of_sink
            if KIND.VARLEN:
                ds_sum = tl.where(i < end, ds_sum, 0.0)
            tl.store(given.slope_sums + row, ds_sum, i < Sq)


@triton.jit
def attention_backward_keys_kernel(
    q_ptr, k_ptr, v_ptr, dout_ptr, lse2_ptr, delta_ptr, dk_ptr, dv_ptr,
    stride_qb, stride_qh, stride_qs, stride_qd,
    stride_kb, stride_kh, stride_ks, stride_kd,
    stride_vb, stride_vh, stride_vs, stride_vd,
    stride_gb, stride_gh, stride_gs, stride_gd,
    stride_dkb, stride_dkh, stride_dks, stride_dkd,
    stride_dvb, stride_dvh, stride_dvs, stride_dvd,
    Hq, GROUP, Sq, Sk, offset, scale, scale_natural,
    given,  # of the variant, see scores.py
    D: tl.constexpr, DV: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_DV: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, KIND: tl.constexpr,
    TF32: tl.constexpr, WIDE: tl.constexpr,
    SCORE_MOD: tl.constexpr = None, SCORE_MOD_BACKWARD: tl.constexpr = None,
):  # fmt: skip
    """Program: dK and dV of one tile of BLOCK_N keys of one key head.

    One loop runs over the query heads of the group and their query tiles.  Scores are held transposed,
    [BN, BM], so that P^T and dS^T are left operands as they stand.  Queries past Sq have lse2 = +inf.
    Float32 compensates its sums here, and not in dQ, whose terms are weighted by the probabilities of
    one row: those of dK and dV may add up to the number of queries.
    This kernel lives at the edge of its registers (dK and dV alone take 128 at head_dim 128): the order
    of its lines, the mask on every tile and the clamped loads are what Triton 3.6 and 3.9 compile
    without spilling, pipelined.
    """
    problem = problem_of_keys(Sq, Sk, offset, given, BLOCK_N, KIND)
    head, j0, token, key = problem.head, problem.first, problem.token, problem.key
    Sq, Sk, offset, rows = problem.Sq, problem.Sk, problem.offset, problem.rows
    Hkv = Hq // GROUP
    b = (head // Hkv).to(tl.int64)
    h = (head % Hkv).to(tl.int64)
    k_base = k_ptr + b * stride_kb + h * stride_kh
    v_base = v_ptr + b * stride_vb + h * stride_vh
    if KIND.VARLEN:
        k_base += key.to(tl.int64) * stride_ks
        v_base += key.to(tl.int64) * stride_vs
    k = load_tile(k_base, j0, stride_ks, stride_kd, Sk, BLOCK_N, BLOCK_D, D, True, WIDE)  # [BN, D]
    v = load_tile(v_base, j0, stride_vs, stride_vd, Sk, BLOCK_N, BLOCK_DV, DV, True, WIDE)  # [BN, DV]
    dk = tl.zeros([BLOCK_N, BLOCK_D], tl.float32)
    dk_low = tl.zeros([BLOCK_N, BLOCK_D], tl.float32)
    dv = tl.zeros([BLOCK_N, BLOCK_DV], tl.float32)
    dv_low = tl.zeros([BLOCK_N, BLOCK_DV], tl.float32)
    unit = unit_of(scale, KIND)
    begin, end = query_range(j0, Sq, offset, given, BLOCK_M, KIND, BLOCK_N)
    if KIND.INTERVALS:
        low, high = Sq, 0
        for member in range(GROUP):
            of_member = of_head(given, b, h * GROUP + member, Sq, Sk, BLOCK_N, KIND)
            first, last = queries_of_keys(j0, Sk, of_member, BLOCK_N)
            low, high = tl.minimum(low, first), tl.maximum(high, last)
        begin = tl.maximum(begin, clamp(low, 0, Sq) // BLOCK_M)
        end = tl.maximum(tl.minimum(end, tl.cdiv(clamp(high, 0, Sq), BLOCK_M)), begin)
    visits = end - begin
    if KIND.TABLE:
        visits = 0
        for member in range(GROUP):
            count, _ = listed_queries(0, b, h * GROUP + member, j0, Sq, Sk, given, BLOCK_M, BLOCK_N)
            visits = tl.maximum(visits, count)
    all_visits = GROUP * visits
    if KIND.INTERVALS or KIND.TABLE:
        visits = tl.maximum(visits, 1)  # Triton 3.6 divides by 0 itself where it knows that visits < 2

    for visit in range(all_visits):
        member = visit // visits
        hq = h * GROUP + member
        i0 = (begin + visit - member * visits) * BLOCK_M
        if KIND.TABLE:
            place = visit - member * visits
            _, i0 = listed_queries(place, b, hq, j0, Sq, Sk, given, BLOCK_M, BLOCK_N)
        q_base = q_ptr + b * stride_qb + hq * stride_qh
        dout_base = dout_ptr + b * stride_gb + hq * stride_gh
        if KIND.VARLEN:
            q_base += token.to(tl.int64) * stride_qs
            dout_base += token.to(tl.int64) * stride_gs
            row = hq * rows + token
        else:
            row = (b * Hq + hq) * rows
        number = (problem.sequence + b) * Hq + hq
        of_query = Variables(given, of_head(given, b, hq, Sq, Sk, BLOCK_N, KIND, number))
        i = i0 + tl.arange(0, BLOCK_M)
        j = j0 + tl.arange(0, BLOCK_N)
        q = load_tile_clamped(q_base, i0, stride_qs, stride_qd, Sq, BLOCK_M, BLOCK_D, D, WIDE)
        dout = load_tile_clamped(dout_base, i0, stride_gs, stride_gd, Sq, BLOCK_M, BLOCK_DV, DV, WIDE)
        rest_ptr = rest_of_lse2(lse2_ptr, given, KIND)
        lse = saved_lse(lse2_ptr, rest_ptr, row + i, i < Sq, given, KIND)
        s = dot(k, tl.trans(q), tl.zeros([BLOCK_N, BLOCK_M], tl.float32), TF32)
        changed = modified(s, scale, of_query, KIND, i[None, :], j[:, None])
        if KIND.SCORE_MOD:
            before = changed
            changed = user_modified(before, i[None, :], j[:, None], of_query, SCORE_MOD, BOUNDED=True)
        p = saved_probabilities(changed, lse, unit, given, KIND, ACROSS=True)
        p = tl.where(visible(i[None, :], j[:, None], j0, Sk, offset, of_query, KIND), p, 0.0)
        dp = dot(v, tl.trans(dout), tl.zeros([BLOCK_N, BLOCK_M], tl.float32), TF32)
        if KIND.DROPOUT:
            keep = kept_of(i0, j0, of_query, BLOCK_M, BLOCK_N, ACROSS=True)
            dp = tl.where(keep, dp * kept_factor(given), 0.0)
            dropped = tl.where(keep, p, 0.0)
            dv, dv_low = add_product(dv, dv_low, rounded(dropped, dout.dtype), dout, TF32)
        else:
            dv, dv_low = add_product(dv, dv_low, rounded(p, dout.dtype), dout, TF32)
        delta = tl.load(delta_ptr + row + i, i < Sq, 0.0)
        ds = score_gradient(p, dp, delta[None, :])
        if KIND.ENTROPY:
            ds += entropy_part(p, tl.load(given.entropy_weights + row + i, i < Sq, 0.0)[None, :])
        if KIND.SCORE_MOD:
            ds = user_gradient(ds, p, before, i[None, :], j[:, None], of_query, SCORE_MOD_BACKWARD)
        ds = modified_gradient(ds, s, scale, of_query, KIND)
        dk, dk_low = add_product(dk, dk_low, rounded(ds, q.dtype), q, TF32)

    dk_base = dk_ptr + b * stride_dkb + h * stride_dkh
    dv_base = dv_ptr + b * stride_dvb + h * stride_dvh
    if KIND.VARLEN:
        dk_base += key.to(tl.int64) * stride_dks
        dv_base += key.to(tl.int64) * stride_dvs
    dk *= scale_natural
    if KIND.DROPOUT:
        dv *= kept_factor(given)
    store_tile(dk_base, dk, j0, stride_dks, stride_dkd, Sk, BLOCK_N, BLOCK_D, D, WIDE)
    store_tile(dv_base, dv, j0, stride_dvs, stride_dvd, Sk, BLOCK_N, BLOCK_DV, DV, WIDE)


@triton.jit
def store_bias_gradient(ds, i, j, variables):
    """dS of one tile, into the gradient of a bias that is of its own for each head."""
    head = variables.head
    at = head.bias_gradient + i.to(tl.int64) * head.Sk + j
    tl.store(at, rounded(ds, at.dtype.element_ty), (i < head.Sq) & (j < head.Sk))


@triton.jit
def query_gradients_from_tiles(
    sums, q, dout, lse, delta, weight, k_base, v_base,
    stride_ks, stride_kd, stride_vs, stride_vd,
    i0, first, last, Sk, offset, scale, variables,
    D: tl.constexpr, DV: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_DV: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, KIND: tl.constexpr, MASKED: tl.constexpr,
    SLOPES: tl.constexpr, DELTA: tl.constexpr, ENDS: tl.constexpr, TF32: tl.constexpr,
    WIDE: tl.constexpr, SCORE_MOD: tl.constexpr, SCORE_MOD_BACKWARD: tl.constexpr,
):  # fmt: skip
    """Key tiles first ... last - 1 into dq [BM, D] and, with SLOPES, the sums [BM] of dS * distance, of
    dS and of P * distance; with DELTA into those of P * dP and of P, without dq if it is 2, and with
    ENDS into the same of tiles that have the first column of a table by distance alone, and the last.
    With SCORE_MOD the dS of the second one is behind it, and the distances are multiplied by its
    derivative too."""
    dq, slope_sums, ds_sums, distances, dp_sums, p_sums, ends = sums
    unit = unit_of(scale, KIND)
    for tile in range(first, last):
        j0 = tile * BLOCK_N
        k = load_tile(k_base, j0, stride_ks, stride_kd, Sk, BLOCK_N, BLOCK_D, D, MASKED, WIDE)
        s = dot(q, tl.trans(k), tl.zeros([BLOCK_M, BLOCK_N], tl.float32), TF32)  # [BM, BN]
        # Indices behind p, where only the mask takes them: before it ptxas would order the loop anew.
        if KIND.SCORE_MOD:
            i = i0 + tl.arange(0, BLOCK_M)[:, None]
            j = j0 + tl.arange(0, BLOCK_N)[None, :]
            before = modified(s, scale, variables, KIND, i, j)
            changed = user_modified(before, i, j, variables, SCORE_MOD, BOUNDED=True)
            p = saved_probabilities(changed, lse, unit, variables.given, KIND)
        elif KIND.ALIBI or (KIND.BIAS or KIND.RELATIVE_BIAS):
            i = i0 + tl.arange(0, BLOCK_M)[:, None]
            j = j0 + tl.arange(0, BLOCK_N)[None, :]
            changed = modified(s, scale, variables, KIND, i, j)
            p = saved_probabilities(changed, lse, unit, variables.given, KIND)
        else:
            changed = modified(s, scale, variables, KIND)
            p = saved_probabilities(changed, lse, unit, variables.given, KIND)
        if MASKED:
            i = i0 + tl.arange(0, BLOCK_M)[:, None]
            j = j0 + tl.arange(0, BLOCK_N)[None, :]
            p = tl.where(visible(i, j, j0, Sk, offset, variables, KIND), p, 0.0)
        v = load_tile(v_base, j0, stride_vs, stride_vd, Sk, BLOCK_N, BLOCK_DV, DV, MASKED, WIDE)
        dp = dot(dout, tl.trans(v), tl.zeros([BLOCK_M, BLOCK_N], tl.float32), TF32)
        if KIND.DROPOUT:
            keep = kept_of(i0, j0, variables, BLOCK_M, BLOCK_N)
            dp = tl.where(keep, dp * kept_factor(variables.given), 0.0)
        if DELTA:
            dp_of_tile, p_of_tile = tl.sum(p * dp, 1), tl.sum(p, 1)
            dp_sums += dp_of_tile
            p_sums += p_of_tile
            if ENDS:
                first_dp, first_p, last_dp, last_p = ends
                of_first, of_last = ends_of(i0 + tl.arange(0, BLOCK_M), j0, variables, ENDS)
                first_dp += tl.where(of_first, dp_of_tile, 0.0)
                first_p += tl.where(of_first, p_of_tile, 0.0)
                last_dp += tl.where(of_last, dp_of_tile, 0.0)
                last_p += tl.where(of_last, p_of_tile, 0.0)
                ends = first_dp, first_p, last_dp, last_p
        if DELTA != 2:
            ds = score_gradient(p, dp, delta[:, None])
            if KIND.ENTROPY:
                ds += entropy_part(p, weight[:, None])
            behind, shares = ds, p  # and before a user's function
            if KIND.SCORE_MOD:
                ds = user_gradient(behind, p, before, i, j, variables, SCORE_MOD_BACKWARD)
                if SLOPES:
                    shares = user_gradient(p, p, before, i, j, variables, SCORE_MOD_BACKWARD)
            if SLOPES:
                apart = distance(i, j, variables)
                slope_sums += tl.sum(ds * apart, 1)
                ds_sums += tl.sum(behind, 1)
                distances += tl.sum(shares * apart, 1)
            if KIND.BIAS:
                if variables.given.bias_gradient is not None:
                    store_bias_gradient(ds, i, j, variables)
            ds = modified_gradient(ds, s, scale, variables, KIND)
            dq = dot(rounded(ds, k.dtype), k, dq, TF32)
    return dq, slope_sums, ds_sums, distances, dp_sums, p_sums, ends


@triton.jit
def attention_backward_queries_kernel(
    q_ptr, k_ptr, v_ptr, dout_ptr, lse2_ptr, delta_ptr, dq_ptr,
    stride_qb, stride_qh, stride_qs, stride_qd,
    stride_kb, stride_kh, stride_ks, stride_kd,
    stride_vb, stride_vh, stride_vs, stride_vd,
    stride_gb, stride_gh, stride_gs, stride_gd,
    stride_dqb, stride_dqh, stride_dqs, stride_dqd,
    Hq, GROUP, Sq, Sk, offset, scale, scale_natural,
    given,  # of the variant, see scores.py
    D: tl.constexpr, DV: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_DV: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, KIND: tl.constexpr,
    TF32: tl.constexpr, WIDE: tl.constexpr, SLOPES: tl.constexpr = False, DELTA: tl.constexpr = 0,
    ENDS: tl.constexpr = 0,
    SCORE_MOD: tl.constexpr = None, SCORE_MOD_BACKWARD: tl.constexpr = None,
):  # fmt: skip
    """Program: dQ of one tile of BLOCK_M queries of one head, and each query's sum of dS * distance for
    the gradient of its head's slope, where that is wanted.

    DELTA: 1, delta is also made anew, of P * dP, for the kernels that come after this one; 2, it is all
    that is made.  Of lse as it is rounded P does not sum to 1 exactly: the sum is divided by that of P.

    ENDS: with DELTA, the size of the tiles of attention_backward_distances_kernel.  Far from the
    diagonal all pairs of a tile have the first or the last column of a table by distance, whose
    gradients have the sums of their dS: these are made here, and that kernel leaves such tiles out.
    """
    problem = problem_of_queries(Hq, Sq, Sk, offset, given, BLOCK_M, KIND)
    head, i0, token, key = problem.head, problem.first, problem.token, problem.key
    Sq, Sk, offset, rows = problem.Sq, problem.Sk, problem.offset, problem.rows
    b = (head // Hq).to(tl.int64)
    h = (head % Hq).to(tl.int64)
    q_base = q_ptr + b * stride_qb + h * stride_qh
    k_base = k_ptr + b * stride_kb + h // GROUP * stride_kh
    v_base = v_ptr + b * stride_vb + h // GROUP * stride_vh
    dout_base = dout_ptr + b * stride_gb + h * stride_gh
    if DELTA != 2:
        dq_base = dq_ptr + b * stride_dqb + h * stride_dqh
    if KIND.VARLEN:
        q_base += token.to(tl.int64) * stride_qs
        k_base += key.to(tl.int64) * stride_ks
        v_base += key.to(tl.int64) * stride_vs
        dout_base += token.to(tl.int64) * stride_gs
        if DELTA != 2:
            dq_base += token.to(tl.int64) * stride_dqs
    number = problem.sequence * Hq + head
    variables = Variables(given, of_head(given, b, h, Sq, Sk, BLOCK_N, KIND, number))
    row = head.to(tl.int64) * rows
    if KIND.VARLEN:
        row += token
    i = i0 + tl.arange(0, BLOCK_M)

    q = load_tile(q_base, i0, stride_qs, stride_qd, Sq, BLOCK_M, BLOCK_D, D, True, WIDE)  # [BM, D]
    dout = load_tile(dout_base, i0, stride_gs, stride_gd, Sq, BLOCK_M, BLOCK_DV, DV, True, WIDE)
    rest_ptr = rest_of_lse2(lse2_ptr, given, KIND)
    lse = saved_lse(lse2_ptr, rest_ptr, row + i, i < Sq, given, KIND)
    delta = tl.load(delta_ptr + row + i, i < Sq, 0.0)
    weight = delta  # which nothing reads
    if KIND.ENTROPY:
        weight = tl.load(given.entropy_weights + row + i, i < Sq, 0.0)
    none = tl.zeros([BLOCK_M], tl.float32)
    dq = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
    sums = dq, none, none, none, none, none, (none, none, none, none)
    ranges = key_ranges(i0, Sk, offset, given, BLOCK_M, BLOCK_N, KIND)
    begin, clear_begin, clear_end, end = ranges
    if KIND.INTERVALS or KIND.TABLE:
        tile, last, clear = next_run(0, i0, Sq, Sk, ranges, variables, BLOCK_M, BLOCK_N, KIND)
        while tile < end:
            if clear:
                sums = query_gradients_from_tiles(
                    sums, q, dout, lse, delta, weight, k_base, v_base,
                    stride_ks, stride_kd, stride_vs, stride_vd,
                    i0, tile, last, Sk, offset, scale, variables,
                    D, DV, BLOCK_D, BLOCK_DV, BLOCK_M, BLOCK_N, KIND, False, SLOPES, DELTA, ENDS, TF32,
                    WIDE, SCORE_MOD, SCORE_MOD_BACKWARD,
                )  # fmt: skip
            else:
                sums = query_gradients_from_tiles(
                    sums, q, dout, lse, delta, weight, k_base, v_base,
                    stride_ks, stride_kd, stride_vs, stride_vd,
                    i0, tile, last, Sk, offset, scale, variables,
                    D, DV, BLOCK_D, BLOCK_DV, BLOCK_M, BLOCK_N, KIND, True, SLOPES, DELTA, ENDS, TF32,
                    WIDE, SCORE_MOD, SCORE_MOD_BACKWARD,
                )  # fmt: skip
            tile, last, clear = next_run(last, i0, Sq, Sk, ranges, variables, BLOCK_M, BLOCK_N, KIND)
    else:
        if KIND.FIRST:
            first = first_tiles(begin, given, BLOCK_N, KIND)
            sums = query_gradients_from_tiles(
                sums, q, dout, lse, delta, weight, k_base, v_base,
                stride_ks, stride_kd, stride_vs, stride_vd,
                i0, 0, first, Sk, offset, scale, variables,
                D, DV, BLOCK_D, BLOCK_DV, BLOCK_M, BLOCK_N, KIND, True, SLOPES, DELTA, ENDS, TF32,
                WIDE, SCORE_MOD, SCORE_MOD_BACKWARD,
            )  # fmt: skip
        sums = query_gradients_from_tiles(
            sums, q, dout, lse, delta, weight, k_base, v_base,
            stride_ks, stride_kd, stride_vs, stride_vd,
            i0, begin, clear_begin, Sk, offset, scale, variables,
            D, DV, BLOCK_D, BLOCK_DV, BLOCK_M, BLOCK_N, KIND, True, SLOPES, DELTA, ENDS, TF32,
            WIDE, SCORE_MOD, SCORE_MOD_BACKWARD,
        )  # fmt: skip
        sums = query_gradients_from_tiles(
            sums, q, dout, lse, delta, weight, k_base, v_base,
            stride_ks, stride_kd, stride_vs, stride_vd,
            i0, clear_begin, clear_end, Sk, offset, scale, variables,
            D, DV, BLOCK_D, BLOCK_DV, BLOCK_M, BLOCK_N, KIND, False, SLOPES, DELTA, ENDS, TF32,
            WIDE, SCORE_MOD, SCORE_MOD_BACKWARD,
        )  # fmt: skip
        sums = query_gradients_from_tiles(
            sums, q, dout, lse, delta, weight, k_base, v_base,
            stride_ks, stride_kd, stride_vs, stride_vd,
            i0, clear_end, end, Sk, offset, scale, variables,
            D, DV, BLOCK_D, BLOCK_DV, BLOCK_M, BLOCK_N, KIND, True, SLOPES, DELTA, ENDS, TF32,
            WIDE, SCORE_MOD, SCORE_MOD_BACKWARD,
        )  # fmt: skip
    dq, slope_sums, ds_sums, distances, dp_sums, p_sums, ends = sums
    if DELTA != 2:
        dq *= scale_natural
        store_tile(dq_base, dq, i0, stride_dqs, stride_dqd, Sq, BLOCK_M, BLOCK_D, D, WIDE)
    if SLOPES:
        # delta is of O as it was rounded: dS lacks P * off, which the distances would weigh too much.
        slope_sums_ptr = given.slope_sums + row + i
        off = tl.load(slope_sums_ptr, i < Sq, 0.0) - ds_sums
        tl.store(slope_sums_ptr, slope_sums + off * distances, i < Sq)
    if DELTA:
        anew = dp_sums / tl.where(p_sums > 0.0, p_sums, 1.0)
        if KIND.SINKS:
            anew *= 1.0 - saved_sink_probability(given.sinks + h, lse, given, KIND)
        anew += tl.load(given.beside_delta + row + i, i < Sq, 0.0)
        tl.store(delta_ptr + row + i, anew, i < Sq)
        if ENDS:
            first_dp, first_p, last_dp, last_p = ends
            to = given.ends + 2 * tl.program_id(0)
            tl.store(to, tl.sum(tl.where(i < Sq, first_dp - anew * first_p, 0.0), 0))
            tl.store(to + 1, tl.sum(tl.where(i < Sq, last_dp - anew * last_p, 0.0), 0))


@triton.jit
def attention_backward_heads_kernel(
    rows_ptr,
    lse2_ptr,
    sinks_ptr,
    gradient_ptr,
    Hq,
    B,
    Sq,
    given,  # of the variant, see scores.py
    KIND: tl.constexpr,
    SINKS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Program: the gradient of a head's sink or slope, minus a sum over all its rows, in a fixed order.

    Of the sink, rows are delta, weighted by its probability; of the slope, the sums of dS * distance.
    """
    if KIND.VARLEN:
        _, Sq, _ = counts(given)
    h = tl.program_id(0).to(tl.int64)
    total = tl.zeros([BLOCK], tl.float32)
    for b in range(B):
        for i0 in range(0, Sq, BLOCK):
            i = i0 + tl.arange(0, BLOCK)
            at = (b * Hq + h) * Sq + i
            x = tl.load(rows_ptr + at, i < Sq, 0.0)
            if SINKS:
                rest_ptr = rest_of_lse2(lse2_ptr, given, KIND)
                lse = saved_lse(lse2_ptr, rest_ptr, at, i < Sq, given, KIND)
                x *= saved_sink_probability(sinks_ptr + h, lse, given, KIND)
            total -= x
    tl.store(gradient_ptr + h, rounded(tl.sum(total, 0), gradient_ptr.dtype.element_ty))
