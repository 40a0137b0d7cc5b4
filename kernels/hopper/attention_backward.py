"""Attention backward on Hopper, in Gluon: TMA, asynchronous wgmma, warp specialisation.

    q, out, dout, dq [B, Hq, Sq, D], k, v, dk, dv [B, Hkv, Sk, D], lse, dlse [B, Hq, Sq]
    D: head_dim padded to 64, 128 or 256; BM queries and BN keys a tile

With P = exp(scale Q K^T - lse), dP = dO V^T, dS = P * (dP - delta), delta = rowsum(dO * O) - dlse:

    dV = P^T dO        dK = scale dS^T Q        dQ = scale dS K

Three launches: preprocess (lse in base 2 and delta, one after the other for each tile of queries; zeros
to the sums of dQ), the main kernel (one program a key tile, which walks the query tiles of every query
head of its group, so that dK and dV are summed in registers), postprocess (sums of dQ to the output).

In the main kernel:

    producer   keeps Q, lse and delta, and dO in two buffers each, and K and V in one; also issues the
               bulk adds of dQ from shared memory, where there are any
    consumers  two warpgroups; each owns 64 keys and all columns of its dK and dV

Scores are computed transposed, keys in rows: S^T = K Q^T, dP^T = V dO^T [64, BM].  So P^T and dS^T feed
dV and dK from registers.  dS also goes to shared memory, where each warpgroup reads what both wrote to
make its half of dQ.  At head_dim 256 registers allow 64 keys only: see wide_consumer.

A buffer is full when its mbarrier has counted the bytes that TMA brought, and empty when both consumers
have arrived at its named barrier (OB for dO, QB for Q).  DS: both have written dS.  FULL and EMPTY: a
part of dQ lies in shared memory, or has been read from there.

dQ is summed by float32 atomics in no fixed order: its last bits differ from run to run; those of dK
and dV do not.
Half the traffic of this kernel are those adds.  How they leave is the configuration's DQ: 1, bulk adds
by TMA from shared memory; 0, vector atomics from registers; 2, one warpgroup each way.  The sums lie in
chunks of 64 rows in the accumulator's register order, which the postprocess undoes.

Sources: Dao, "FlashAttention-2" (2023), algorithm 2; Shah et al., "FlashAttention-3" (2024), appendix
B.
"""

import triton
import triton.language as tl
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from ..online_softmax import LOG2E
from ..schedule import query_tiles
from ..scores import probabilities, score_gradient
from .gluon_names import tma_add, tma_load
from .warpgroups import bar_arrive, bar_sync, matrix, static_arrive, static_sync, wide_rows


@gluon.constexpr_function
def by_tma(mode, c):
    """Whether warpgroup c adds its part of dQ by bulk reduce."""
    return mode == 1 or (mode == 2 and c == 0)


# --- work ----------------------------------------------------------------------------------------


@gluon.jit
def key_tile(t, NB, M, Hk, BH, HG, offset, CFG: gl.constexpr):
    """Work item t as (batch, key head, first key, first query tile that sees it)."""
    if CFG.CAUSAL:
        # the longest first among HG heads that share L2: the first keys are seen by most queries
        per = HG * NB
        grp = t // per
        r = t - grp * per
        hg = gl.maximum(gl.minimum(HG, BH - grp * HG), 1)
        nb = r // hg
        bh = grp * HG + (r - nb * hg)
        col = nb * CFG.BN
    else:
        bh = t // NB
        col = (t - bh * NB) * CFG.BN
    m0, _ = query_tiles(col, M * CFG.BM, offset, CFG.BM, CFG.CAUSAL)
    b = bh // Hk
    return b, bh - b * Hk, col, m0


# --- the producer --------------------------------------------------------------------------------


@gluon.jit
def reduce_chunk(c: gl.constexpr, chunk, dq_desc, stages, CFG: gl.constexpr):
    """Add warpgroup c's part of dQ from shared memory, once it lies there."""
    if by_tma(CFG.DQ, c):
        static_sync(CFG.FULL + c, 256)
        tma_add(dq_desc, [(chunk + c) * 128, 0], stages.index(c))


@gluon.jit
def reduce_tile(chunk, dq_desc, stages, CFG: gl.constexpr):
    """Add both parts of one query tile's dQ."""
    reduce_chunk(0, chunk, dq_desc, stages, CFG)
    reduce_chunk(1, chunk, dq_desc, stages, CFG)


@gluon.jit
def hand_back(CFG: gl.constexpr):
    """Wait until the adds have read shared memory, and tell the consumers."""
    tma.store_wait(0)
    if by_tma(CFG.DQ, 0):
        static_arrive(CFG.EMPTY, 256)
    if by_tma(CFG.DQ, 1):
        static_arrive(CFG.EMPTY + 1, 256)


@gluon.jit
def producer(args, CFG: gl.constexpr):
    """Bring every tile, and send dQ away, in the order in which the consumers meet them."""
    (
        q_desc, do_desc, k_desc, v_desc, ld_desc, dq_desc, qs, dos, ks, vs, lds, stages,
        k_full, v_full, q_full, do_full, NB, M, H, GROUP, BH, HG, offset,
    ) = args  # fmt: skip
    BM: gl.constexpr = CFG.BM
    BN: gl.constexpr = CFG.BN
    D: gl.constexpr = CFG.D
    b, hk, col, m0 = key_tile(gl.program_id(0), NB, M, H // GROUP, BH, HG, offset, CFG)
    cnt = (M - m0) * GROUP
    if cnt > 0:
        mbarrier.expect(k_full, BN * D * 2)
        tma_load(k_desc, [b, hk, col, 0], k_full, ks)
        if CFG.DQ:
            hand_back(CFG)
        m = m0
        h = hk * GROUP
        slot = 0
        old_m = m0
        old_h = h
        for j in range(cnt):
            # in the order in which the consumers finish step j - 2: dO, dQ, Q
            if j >= 2:
                bar_sync(CFG.OB + slot, 384)
            else:
                # nothing to wait for yet: Q is needed first
                mbarrier.expect(q_full.index(slot), BM * D * 2 + BM * 8)
                tma_load(q_desc, [b, h, m * BM, 0], q_full.index(slot), qs.index(slot))
                tma_load(
                    ld_desc, [((b * H + h) * M + m) * (2 * BM)], q_full.index(slot), lds.index(slot)
                )
                if j == 0:
                    mbarrier.expect(v_full, BN * D * 2)
                    tma_load(v_desc, [b, hk, col, 0], v_full, vs)
            mbarrier.expect(do_full.index(slot), BM * D * 2)
            tma_load(do_desc, [b, h, m * BM, 0], do_full.index(slot), dos.index(slot))
            if j >= 2:
                if CFG.DQ:
                    reduce_tile(((b * H + old_h) * M + old_m) * 2, dq_desc, stages, CFG)
                    old_m += 1
                    old_h = gl.where(old_m == M, old_h + 1, old_h)
                    old_m = gl.where(old_m == M, m0, old_m)
                bar_sync(CFG.QB + slot, 384)
                mbarrier.expect(q_full.index(slot), BM * D * 2 + BM * 8)
                tma_load(q_desc, [b, h, m * BM, 0], q_full.index(slot), qs.index(slot))
                tma_load(
                    ld_desc, [((b * H + h) * M + m) * (2 * BM)], q_full.index(slot), lds.index(slot)
                )
                if CFG.DQ:
                    hand_back(CFG)
            slot ^= 1
            m += 1
            h = gl.where(m == M, h + 1, h)
            m = gl.where(m == M, m0, m)
        # The last two steps: every arrival of a consumer meets one here.  Phantoms of what would come
        # next, as the consumers look one step ahead without asking whether there is one.
        if cnt == 1:
            mbarrier.expect(q_full.index(1), 0)
            mbarrier.expect(do_full.index(1), 0)
        for j in range(gl.maximum(cnt - 2, 0), cnt):
            bar_sync(CFG.OB + (j & 1), 384)
            mbarrier.expect(do_full.index(j & 1), 0)
            if CFG.DQ:
                reduce_tile(((b * H + old_h) * M + old_m) * 2, dq_desc, stages, CFG)
                old_m += 1
                old_h = gl.where(old_m == M, old_h + 1, old_h)
                old_m = gl.where(old_m == M, m0, old_m)
            bar_sync(CFG.QB + (j & 1), 384)
            mbarrier.expect(q_full.index(j & 1), 0)
            if CFG.DQ:
                if j < cnt - 1:
                    hand_back(CFG)
        if CFG.DQ:
            tma.store_wait(0)


# --- a consumer ----------------------------------------------------------------------------------


@gluon.constexpr_function
def along(layout, dim):
    """The layout of one dimension of a six-dimensional tensor."""
    for d in reversed(range(6)):
        if d != dim:
            layout = gl.SliceLayout(d, layout)
    return layout


@gluon.jit
def mask_keys(x, limit, dist):
    """-inf where key > min(query + dist, limit), both counted from the tile's first; x [64 keys, BM].

    Each lane's part is moved to one side, so that the comparisons are with constants.
    """
    BM: gl.constexpr = x.shape[1]
    y = x.reshape([4, 2, 8, BM // 8, 4, 2])  # warp, half, row, tile, lane, pair
    L: gl.constexpr = y.type.layout
    warp = gl.arange(0, 4, along(L, 0))[:, None, None, None, None, None]
    half = gl.arange(0, 2, along(L, 1))[None, :, None, None, None, None]
    row = gl.arange(0, 8, along(L, 2))[None, None, :, None, None, None]
    tile = gl.arange(0, BM // 8, along(L, 3))[None, None, None, :, None, None]
    lane = gl.arange(0, 4, along(L, 4))[None, None, None, None, :, None]
    pair = gl.arange(0, 2, along(L, 5))[None, None, None, None, None, :]
    low = warp * 16 + row
    seen = (half * 8 - tile * 8 - pair <= dist - low + lane * 2) & (half * 8 <= limit - low)
    y = gl.where(seen, y, -float("inf"))
    return gl.convert_layout(y.reshape([64, BM]), x.type.layout, assert_trivial=True)


@gluon.jit
def masked(x, limit, dist, CAUSAL: gl.constexpr):
    """x with -inf where a query may not see a key, under a uniform branch: most tiles are whole.

    limit: the last key there is; dist: the last key that the tile's first query sees.
    """
    if CAUSAL:
        if gl.minimum(limit, dist) < 63:
            x = mask_keys(x, limit, dist)
    else:
        if limit < 63:
            keys = gl.arange(0, 64, gl.SliceLayout(1, x.type.layout))
            x = gl.where((keys <= limit)[:, None], x, -float("inf"))
    return x


@gluon.jit
def hidden_zero():
    """A zero that the compiler cannot see through."""
    return gl.inline_asm_elementwise("mov.u32 $0, 0;", "=r", [], dtype=gl.int32, is_pure=False, pack=1)


@gluon.constexpr_function
def register_order(N):
    """Layout [N / 8, 128, 4]: the [64, N] accumulator as each thread's pieces of four floats."""
    return gl.BlockedLayout([N // 8, 1, 4], [1, 32, 1], [1, 4, 1], [2, 1, 0])


@gluon.jit
def register_offsets(N: gl.constexpr):
    """Where those pieces lie in a chunk of 64 N floats [N / 8, 128, 4]."""
    RB: gl.constexpr = register_order(N)
    i0 = gl.arange(0, N // 8, gl.SliceLayout(1, gl.SliceLayout(2, RB)))[:, None, None]
    i1 = gl.arange(0, 128, gl.SliceLayout(0, gl.SliceLayout(2, RB)))[None, :, None]
    i2 = gl.arange(0, 4, gl.SliceLayout(0, gl.SliceLayout(1, RB)))[None, None, :]
    return i0 * 512 + i1 * 4 + i2


@gluon.jit
def put_dq(c: gl.constexpr, chunk, dq_ptr, stages, dq, CFG: gl.constexpr):
    """Add a [64, N] accumulator to 64 N consecutive floats, four of a thread at a time."""
    N: gl.constexpr = dq.shape[1]
    x = gl.reshape(dq, [4, 2, 8, N // 8, 4, 2])  # warp, half, row, tile, lane, pair
    x = gl.permute(x, [3, 0, 2, 4, 1, 5])  # tile, warp, row, lane, half, pair
    x = gl.convert_layout(gl.reshape(x, [N // 8, 128, 4]), register_order(N), assert_trivial=True)
    if by_tma(CFG.DQ, c):
        static_sync(CFG.EMPTY + c, 256)
        stages.index(c).store(gl.reshape(x, [128, 32]))
        fence_async_shared()
        static_arrive(CFG.FULL + c, 256)
    else:
        gl.atomic_add(dq_ptr + chunk.to(gl.int64) * (64 * N) + register_offsets(N), x, sem="relaxed")


@gluon.jit
def store_rows(ptr, x, n, s_row, D_out, D: gl.constexpr):
    """The first n rows of x [64, D], and D_out columns, in pieces of 16 bytes."""
    x = gl.convert_layout(x, wide_rows(D))
    L: gl.constexpr = x.type.layout
    r = gl.arange(0, 64, gl.SliceLayout(1, L))
    d = gl.arange(0, D, gl.SliceLayout(0, L))
    gl.store(
        ptr + (r * (s_row * 8))[:, None] + d[None, :],
        x,
        mask=(r < n)[:, None] & (d // 8 < D_out // 8)[None, :],
    )


@gluon.jit
def consumer(c: gl.constexpr, args, CFG: gl.constexpr):
    """Warpgroup c, head_dim up to 128: keys 64 c ... 64 c + 63 of the tile."""
    (
        dk_ptr, dv_ptr, dq_ptr, qs, dos, ks, vs, lds, dss, stages,
        k_full, v_full, q_full, do_full,
        NB, M, H, GROUP, BH, HG, Sk, offset, s_b, s_h, s_s, D_out, scale, scale_log2,
    ) = args  # fmt: skip
    BM: gl.constexpr = CFG.BM
    BN: gl.constexpr = CFG.BN
    D: gl.constexpr = CFG.D
    ST: gl.constexpr = gl.NVMMADistributedLayout(
        version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, BM, 16]
    )
    AC: gl.constexpr = gl.NVMMADistributedLayout(
        version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, D, 16]
    )
    QA: gl.constexpr = gl.NVMMADistributedLayout(
        version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, 64, 16]
    )
    A: gl.constexpr = gl.DotOperandLayout(operand_index=0, parent=AC, k_width=2)
    CL: gl.constexpr = gl.SliceLayout(0, ST)
    dt: gl.constexpr = qs.dtype
    b, hk, col, m0 = key_tile(gl.program_id(0), NB, M, H // GROUP, BH, HG, offset, CFG)
    cnt = (M - m0) * GROUP
    dk = gl.zeros([64, D], gl.float32, AC)
    dv = gl.zeros([64, D], gl.float32, AC)
    row = col + 64 * c
    if cnt > 0:
        kc = matrix(ks, BN, D).slice(64 * c, 64, 0)
        vc = matrix(vs, BN, D).slice(64 * c, 64, 0)
        chunk = ((b * H + hk * GROUP) * M + m0) * 2 + c
        limit = Sk - 1 - row  # the last key there is, counted from this warpgroup's first
        it = 0
        mbarrier.wait(k_full, 0)
        mbarrier.wait(q_full.index(0), 0)
        if not CFG.LATE:
            lse = lds.index(0).slice(0, BM).load(CL)
        mbarrier.wait(v_full, 0)
        mbarrier.wait(do_full.index(0), 0)
        for _ in range(GROUP):
            # dist: the last key that the query tile's first query sees, from this warpgroup's first
            for dist in range(m0 * BM + offset - row, M * BM + offset - row, BM):
                slot = it & 1
                q = matrix(qs.index(slot), BM, D)
                do = matrix(dos.index(slot), BM, D)
                z = gl.zeros([64, BM], gl.float32, ST)
                x = warpgroup_mma(kc, q.permute((1, 0)), z, use_acc=False, is_async=True)
                dp = warpgroup_mma(vc, do.permute((1, 0)), z, use_acc=False, is_async=True)
                x = warpgroup_mma_wait(1, deps=(x,))
                x = masked(x, limit, dist, CFG.CAUSAL)
                if CFG.LATE:
                    lse = lds.index(slot).slice(0, BM).load(CL)
                p = probabilities(x, lse[None, :], scale_log2)
                dv = warpgroup_mma(gl.convert_layout(p.to(dt), A), do, dv, is_async=True)
                if CFG.LATE:
                    dp = warpgroup_mma_wait(1, deps=(dp,))
                    delta = lds.index(slot).slice(BM, BM).load(CL)
                else:
                    delta = lds.index(slot).slice(BM, BM).load(CL)
                    dp = warpgroup_mma_wait(1, deps=(dp,))
                ds = score_gradient(p, dp, delta[None, :]).to(dt)
                dsw = dss.index(slot)
                dsw.slice(64 * c, 64, 0).store(ds)
                fence_async_shared()
                static_sync(CFG.DS, 256)
                zq = gl.zeros([64, 64], gl.float32, QA)
                k = matrix(ks, BN, D)
                if D == 128:
                    dq = warpgroup_mma(
                        dsw.permute((1, 0)), k.slice(64 * c, 64, 1), zq, use_acc=False, is_async=True
                    )
                else:
                    dq = warpgroup_mma(
                        dsw.slice(64 * c, 64, 1).permute((1, 0)), k, zq, use_acc=False, is_async=True
                    )
                dk = warpgroup_mma(gl.convert_layout(ds, A), q, dk, is_async=True)
                # The next lse comes before the adds, or it queues behind them; both waits also hold
                # ptxas from waiting earlier for what is in flight.
                it += 1
                mbarrier.wait(q_full.index(it & 1), (it >> 1) & 1)
                if not CFG.LATE:
                    lse = lds.index(it & 1).slice(0, BM).load(CL)
                dv, dq = warpgroup_mma_wait(1, deps=(dv, dq))
                bar_arrive(CFG.OB + slot, 384)
                put_dq(c, chunk, dq_ptr, stages, dq, CFG)
                mbarrier.wait(do_full.index(it & 1), (it >> 1) & 1)
                dk = warpgroup_mma_wait(0, deps=(dk,))
                bar_arrive(CFG.QB + slot, 384)
                chunk += 2
            chunk += 2 * m0
    # worked out again, from a zero that the compiler cannot see, so as to take no registers in the loop
    b, hk, col, m0 = key_tile(gl.program_id(0) + hidden_zero(), NB, M, H // GROUP, BH, HG, offset, CFG)
    row = col + 64 * c
    base = (b.to(gl.int64) * s_b + hk.to(gl.int64) * s_h + row.to(gl.int64) * s_s) * 8
    store_rows(dv_ptr + base, dv.to(dt), Sk - row, s_s, D_out, D)
    store_rows(dk_ptr + base, (dk * scale).to(dt), Sk - row, s_s, D_out, D)


@gluon.jit
def wide_consumer(c: gl.constexpr, args, CFG: gl.constexpr):
    """Warpgroup c at head_dim 256: both own the same 64 keys and half the columns of dK, dV and dQ.

    The first makes P, the second dP and dS; they meet in shared memory (PS: P has been written).
    """
    (
        dk_ptr, dv_ptr, dq_ptr, qs, dos, ks, vs, lds, dss, stages,
        k_full, v_full, q_full, do_full,
        NB, M, H, GROUP, BH, HG, Sk, offset, s_b, s_h, s_s, D_out, scale, scale_log2,
    ) = args  # fmt: skip
    BM: gl.constexpr = CFG.BM
    D: gl.constexpr = CFG.D
    N: gl.constexpr = D // 2
    ST: gl.constexpr = gl.NVMMADistributedLayout(
        version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, BM, 16]
    )
    AC: gl.constexpr = gl.NVMMADistributedLayout(
        version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, N, 16]
    )
    CL: gl.constexpr = gl.SliceLayout(0, ST)
    dt: gl.constexpr = qs.dtype
    b, hk, col, m0 = key_tile(gl.program_id(0), NB, M, H // GROUP, BH, HG, offset, CFG)
    cnt = (M - m0) * GROUP
    dk = gl.zeros([64, N], gl.float32, AC)
    dv = gl.zeros([64, N], gl.float32, AC)
    if cnt > 0:
        k = matrix(ks, 64, D)
        dsw = dss.index(2)
        chunk = ((b * H + hk * GROUP) * M + m0) * 2 + c
        limit = Sk - 1 - col
        it = 0
        mbarrier.wait(k_full, 0)
        mbarrier.wait(v_full, 0)
        for _ in range(GROUP):
            for dist in range(m0 * BM + offset - col, M * BM + offset - col, BM):
                slot = it & 1
                ps = dss.index(slot)
                q = matrix(qs.index(slot), BM, D)
                do = matrix(dos.index(slot), BM, D)
                z = gl.zeros([64, BM], gl.float32, ST)
                mbarrier.wait(q_full.index(slot), (it >> 1) & 1)
                if c == 0:
                    x = warpgroup_mma(k, q.permute((1, 0)), z, use_acc=False, is_async=True)
                    lse = lds.index(slot).slice(0, BM).load(CL)
                    mbarrier.wait(do_full.index(slot), (it >> 1) & 1)
                    x = warpgroup_mma_wait(0, deps=(x,))
                    x = masked(x, limit, dist, CFG.CAUSAL)
                    ps.store(probabilities(x, lse[None, :], scale_log2).to(dt))
                    fence_async_shared()
                    static_sync(CFG.PS, 256)
                    dv = warpgroup_mma(ps, do.slice(N * c, N, 1), dv, is_async=True)
                else:
                    mbarrier.wait(do_full.index(slot), (it >> 1) & 1)
                    dp = warpgroup_mma(
                        matrix(vs, 64, D), do.permute((1, 0)), z, use_acc=False, is_async=True
                    )
                    delta = lds.index(slot).slice(BM, BM).load(CL)
                    dp = warpgroup_mma_wait(0, deps=(dp,))
                    static_sync(CFG.PS, 256)
                    p = ps.load(ST).to(gl.float32)
                    dv = warpgroup_mma(ps, do.slice(N * c, N, 1), dv, is_async=True)
                    dsw.store(score_gradient(p, dp, delta[None, :]).to(dt))
                    fence_async_shared()
                static_sync(CFG.DS, 256)
                zq = gl.zeros([64, N], gl.float32, AC)
                dq = warpgroup_mma(
                    dsw.permute((1, 0)), k.slice(N * c, N, 1), zq, use_acc=False, is_async=True
                )
                dk = warpgroup_mma(dsw, q.slice(N * c, N, 1), dk, is_async=True)
                dv, dq = warpgroup_mma_wait(1, deps=(dv, dq))
                bar_arrive(CFG.OB + slot, 384)
                put_dq(c, chunk, dq_ptr, stages, dq, CFG)
                it += 1
                # this wait holds ptxas from waiting for dK before the adds
                mbarrier.wait(q_full.index(it & 1), (it >> 1) & 1)
                dk = warpgroup_mma_wait(0, deps=(dk,))
                bar_arrive(CFG.QB + slot, 384)
                chunk += 2
            chunk += 2 * m0
    b, hk, col, m0 = key_tile(gl.program_id(0) + hidden_zero(), NB, M, H // GROUP, BH, HG, offset, CFG)
    base = (b.to(gl.int64) * s_b + hk.to(gl.int64) * s_h + col.to(gl.int64) * s_s) * 8 + c * N
    store_rows(dv_ptr + base, dv.to(dt), Sk - col, s_s, D_out - c * N, N)
    store_rows(dk_ptr + base, (dk * scale).to(dt), Sk - col, s_s, D_out - c * N, N)


# --- the main kernel -----------------------------------------------------------------------------

VARYING = (
    "NB", "M", "H", "GROUP", "BH", "HG", "Sk", "offset", "s_b", "s_h", "s_s", "D_out",
)  # fmt: skip


@gluon.jit(do_not_specialize=VARYING)
def attention_backward_kernel(
    q_desc, do_desc, k_desc, v_desc,  # TMA boxes [1, 1, BM, D] and [1, 1, BN, D]
    ld_desc,  # boxes [2 BM] of lse in base 2 and delta, as the preprocess leaves them
    dq_desc, dq_ptr,  # float32 sums of dQ, as boxes [128, 32] and as a pointer
    dk_ptr, dv_ptr,
    NB, M,  # key tiles of a key head, query tiles of a query head
    H, GROUP,  # query heads, query heads a key head
    BH, HG,  # B * key heads; of which the tiles of HG at a time are mixed
    Sk,
    offset,  # query i sees key j <= i + offset
    s_b, s_h, s_s,  # strides of dk and of dv, in units of 8 elements
    D_out,  # head_dim as it is in memory, a multiple of 8
    scale, scale_log2,  # of the scores, and times log2(e)
    CFG: gl.constexpr,  # HopperBackward
):  # fmt: skip
    BM: gl.constexpr = CFG.BM
    BN: gl.constexpr = CFG.BN
    D: gl.constexpr = CFG.D
    dt: gl.constexpr = q_desc.dtype
    qs = gl.allocate_shared_memory(dt, [2, 1, 1, BM, D], q_desc.layout)
    dos = gl.allocate_shared_memory(dt, [2, 1, 1, BM, D], do_desc.layout)
    ks = gl.allocate_shared_memory(dt, [1, 1, BN, D], k_desc.layout)
    vs = gl.allocate_shared_memory(dt, [1, 1, BN, D], v_desc.layout)
    lds = gl.allocate_shared_memory(gl.float32, [2, 2 * BM], ld_desc.layout)
    dss = gl.allocate_shared_memory(
        dt, [CFG.TILES, BN, BM], gl.NVMMASharedLayout.get_default_for([BN, BM], dt)
    )
    if CFG.DQ:
        stages = gl.allocate_shared_memory(
            gl.float32, [2 if CFG.DQ == 1 else 1, 128, 32], dq_desc.layout
        )
    else:
        stages = 0
    ML: gl.constexpr = mbarrier.MBarrierLayout()
    k_full = gl.allocate_shared_memory(gl.int64, [1], ML)
    v_full = gl.allocate_shared_memory(gl.int64, [1], ML)
    q_full = gl.allocate_shared_memory(gl.int64, [2, 1], ML)
    do_full = gl.allocate_shared_memory(gl.int64, [2, 1], ML)
    mbarrier.init(k_full, count=1)
    mbarrier.init(v_full, count=1)
    for i in gl.static_range(2):
        mbarrier.init(q_full.index(i), count=1)
        mbarrier.init(do_full.index(i), count=1)
    fence_async_shared()
    produce = (
        q_desc, do_desc, k_desc, v_desc, ld_desc, dq_desc, qs, dos, ks, vs, lds, stages,
        k_full, v_full, q_full, do_full, NB, M, H, GROUP, BH, HG, offset,
    )  # fmt: skip
    consume = (
        dk_ptr, dv_ptr, dq_ptr, qs, dos, ks, vs, lds, dss, stages,
        k_full, v_full, q_full, do_full,
        NB, M, H, GROUP, BH, HG, Sk, offset, s_b, s_h, s_s, D_out, scale, scale_log2,
    )  # fmt: skip
    if D == 256:
        gl.warp_specialize(
            [
                (producer, (produce, CFG)),
                (wide_consumer, (gl.constexpr(0), consume, CFG)),
                (wide_consumer, (gl.constexpr(1), consume, CFG)),
            ],
            [4, 4],
            [240, 240],
        )
    else:
        gl.warp_specialize(
            [
                (producer, (produce, CFG)),
                (consumer, (gl.constexpr(0), consume, CFG)),
                (consumer, (gl.constexpr(1), consume, CFG)),
            ],
            [4, 4],
            [240, 240],
        )


# --- before and after ----------------------------------------------------------------------------


@triton.jit(
    do_not_specialize=[
        "Sq", "Sp", "H", "D_out", "so_b", "so_h", "so_s", "sd_b", "sd_h", "sd_s",
    ]
)  # fmt: skip
def preprocess_kernel(
    o_ptr, do_ptr, lse_ptr, dlse_ptr, ld_ptr, dq_ptr,
    Sq, Sp,  # queries, and queries padded to whole tiles
    H, D_out,
    so_b, so_h, so_s, sd_b, sd_h, sd_s,  # strides of out and dout, in units of 8 elements
    HAS_DLSE: tl.constexpr, D: tl.constexpr, R: tl.constexpr, BM: tl.constexpr,
):  # fmt: skip
    """For each tile of BM queries, BM of lse in base 2, then BM of delta; inf and 0 for rows that see
    no key or do not exist.  Zeros to the sums of dQ.  R rows a program."""
    pid = tl.program_id(0)
    n = Sp // R
    bh = pid // n
    b = (bh // H).to(tl.int64)
    h = (bh % H).to(tl.int64)
    r = (pid % n) * R + tl.arange(0, R)
    d = tl.arange(0, D)
    # strides come in eighths and columns in eights, so that the compiler sees pieces of 16 bytes
    mask = (r < Sq)[:, None] & (d // 8 < D_out // 8)[None, :]
    rows = r.to(tl.int64)[:, None]
    o = tl.load(o_ptr + (b * so_b + h * so_h + rows * so_s) * 8 + d[None, :], mask, 0.0)
    do = tl.load(do_ptr + (b * sd_b + h * sd_h + rows * sd_s) * 8 + d[None, :], mask, 0.0)
    base = pid.to(tl.int64) * (R * D)
    tl.store(dq_ptr + base + tl.arange(0, R * D), tl.zeros([R * D], tl.float32))
    lse = tl.load(lse_ptr + bh.to(tl.int64) * Sq + r, r < Sq, -float("inf"))
    delta = tl.sum(o.to(tl.float32) * do.to(tl.float32), 1)
    if HAS_DLSE:
        delta -= tl.load(dlse_ptr + bh.to(tl.int64) * Sq + r, r < Sq, 0.0)
    empty = lse == -float("inf")
    at = ld_ptr + bh.to(tl.int64) * (2 * Sp) + r // BM * (2 * BM) + r % BM
    tl.store(at, tl.where(empty, float("inf"), lse * LOG2E))
    tl.store(at + BM, tl.where(empty, 0.0, delta))


@gluon.jit(do_not_specialize=["Sq", "tiles", "H", "D_out", "s_b", "s_h", "s_s"])
def postprocess_kernel(
    dq_ptr, out_ptr,
    Sq, tiles,  # queries, and tiles of 64 of them
    H, D_out,
    s_b, s_h, s_s,  # strides of out, in units of 8 elements
    scale,
    D: gl.constexpr, N: gl.constexpr,
):  # fmt: skip
    """One chunk of dQ's sums (64 x N in register order) to rows of dq, scaled."""
    LO: gl.constexpr = gl.BlockedLayout([1, 8], [256 // N, N // 8], [4, 1], [1, 0])
    pid = gl.program_id(0)
    x = gl.load(dq_ptr + pid.to(gl.int64) * (64 * N) + register_offsets(N))
    x = gl.permute(gl.reshape(x, [N // 8, 4, 8, 4, 2, 2]), [1, 4, 2, 0, 3, 5])
    x = gl.convert_layout((gl.reshape(x, [64, N]) * scale).to(out_ptr.dtype.element_ty), LO)
    parts: gl.constexpr = D // N
    part = pid % parts
    tile = pid // parts
    bh = tile // tiles
    b = (bh // H).to(gl.int64)
    h = (bh % H).to(gl.int64)
    r = (tile % tiles) * 64 + gl.arange(0, 64, gl.SliceLayout(1, LO))
    d = part * N + gl.arange(0, N, gl.SliceLayout(0, LO))
    at = out_ptr + (b * s_b + h * s_h + r.to(gl.int64)[:, None] * s_s) * 8 + d[None, :]
    gl.store(at, x, mask=(r < Sq)[:, None] & (d // 8 < D_out // 8)[None, :])
