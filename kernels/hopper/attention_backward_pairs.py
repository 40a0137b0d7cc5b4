"""Attention backward on Hopper: consumers of 128 keys each, for head_dim 64 where keys are many.

A tile has 256 keys, twice those of attention_backward_consumers.py.  So Q and dO are read, and dQ is
added to, half as often, which is what long rows wait for.  A warpgroup owns a pair of blocks of 64
keys, 128 apart, and has room for the scores of one block: the second's scores are made while it works
out dS of the first.

One product makes dQ [BM queries, head_dim] of all four blocks.  The warpgroups take turns: the first
makes it in even steps, the second in odd ones.  The one that makes it waits for the other's dS (at DS
or ODD); the other only arrives there and goes on to its next step.  So the two are half a step apart.
dQ leaves by bulk adds.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from ..scores import probabilities, score_gradient
from .attention_backward_consumers import store_rows
from .attention_backward_masks import mask_if_needed
from .attention_backward_products import product_with_term
from .attention_backward_rows import DELTA, LSE
from .attention_backward_sums import accumulate_dq
from .attention_backward_work import key_tile, last_visible_key, loops, outer_step
from .items import get_item
from .warpgroups import (
    accumulator,
    bar_arrive,
    exit_threads,
    left_operand,
    matrix,
    static_arrive,
    static_sync,
)


@gluon.jit
def pair_consumer(c: gl.constexpr, args, CFG: gl.constexpr):
    """Warpgroup c: keys 64 c ... 64 c + 63 of the tile, and those 128 behind them."""
    (
        dk_ptr, dv_ptr, dq_ptr, turns_ptr, qs, dos, ks, vs, lse_deltas, dss, stages,
        k_full, v_full, q_full, do_full,
        NB, M, H, GROUP, BH, HG, Sk, offset, s_b, s_h, s_s, D_out, scale, scale_log2,
        given,
    ) = args  # fmt: skip
    BM: gl.constexpr = CFG.BM
    BN: gl.constexpr = CFG.BN
    D: gl.constexpr = CFG.D
    KIND: gl.constexpr = CFG.KIND
    MY_TURN: gl.constexpr = CFG.DS if c == 0 else CFG.ODD
    OTHERS_TURN: gl.constexpr = CFG.ODD if c == 0 else CFG.DS
    AC: gl.constexpr = accumulator(64)
    A: gl.constexpr = left_operand(AC)
    dt: gl.constexpr = qs.dtype
    r = 0
    it = 0
    static_sync(CFG.OB, 384)
    mbarrier.wait(q_full.index(0), 0)
    t = get_item(turns_ptr, 0)
    mbarrier.wait(k_full.index(0), 0)
    mbarrier.wait(do_full.index(0), 0)
    while t < NB * BH:
        b, hk, col, m0, m1, up = key_tile(t, NB, M, H // GROUP, GROUP, BH, HG, offset, given, CFG)
        row = col + 64 * c
        dk0 = gl.zeros([64, D], gl.float32, AC)
        dv0 = gl.zeros([64, D], gl.float32, AC)
        dk1 = gl.zeros([64, D], gl.float32, AC)
        dv1 = gl.zeros([64, D], gl.float32, AC)
        # the last key there is; like last_key counted from the first block's first
        limit = Sk - 1 - row
        low = m0 * BM + offset - row
        high = m1 * BM + offset - row
        outer, begin, end, last_key = loops(low, high, m0, m1, up, GROUP, CFG)
        mbarrier.wait(v_full.index(0), r & 1)
        for _ in range(outer):
            for index in range(begin, end, CFG.STEP):
                slot = it & 1
                q = matrix(qs.index(slot), BM, D)
                do = matrix(dos.index(slot), BM, D)
                k = matrix(ks.index(it >> 30), BN, D)
                v = matrix(vs.index(it >> 30), BN, D)
                dsw = dss.index(slot)
                lse_delta = lse_deltas.index(slot)
                k0, v0 = k.slice(64 * c, 64, 0), v.slice(64 * c, 64, 0)
                x = product_with_term(k0, q, lse_delta, LSE, AC)
                dp = product_with_term(v0, do, lse_delta, DELTA, AC)
                x = warpgroup_mma_wait(2, deps=(x,))
                x = mask_if_needed(x, limit, last_visible_key(index, last_key, CFG), given, KIND)
                p = probabilities(x, 0.0, scale_log2)
                dv0 = warpgroup_mma(gl.convert_layout(p.to(dt), A), do, dv0, is_async=True)
                dp = warpgroup_mma_wait(1, deps=(dp,))
                ds = score_gradient(p, dp, 0.0).to(dt)
                dsw.slice(64 * c, 64, 0).store(ds)
                dv0 = warpgroup_mma_wait(0, deps=(dv0,))
                k1, v1 = k.slice(128 + 64 * c, 64, 0), v.slice(128 + 64 * c, 64, 0)
                x = product_with_term(k1, q, lse_delta, LSE, AC)
                dk0 = warpgroup_mma(gl.convert_layout(ds, A), q, dk0, is_async=True)
                x, dk0 = warpgroup_mma_wait(0, deps=(x, dk0))
                dp = product_with_term(v1, do, lse_delta, DELTA, AC)
                x = mask_if_needed(
                    x, limit - 128, last_visible_key(index, last_key, CFG) - 128, given, KIND
                )
                p = probabilities(x, 0.0, scale_log2)
                dv1 = warpgroup_mma(gl.convert_layout(p.to(dt), A), do, dv1, is_async=True)
                dp = warpgroup_mma_wait(1, deps=(dp,))
                ds = score_gradient(p, dp, 0.0).to(dt)
                dsw.slice(128 + 64 * c, 64, 0).store(ds)
                mine = slot == c
                if not mine:
                    static_arrive(OTHERS_TURN, 256)
                dk1 = warpgroup_mma(gl.convert_layout(ds, A), q, dk1, is_async=True)
                # These waits also keep ptxas from waiting earlier for what is in flight.
                it += 1
                mbarrier.wait(do_full.index(it & 1), (it >> 1) & 1)
                dv1 = warpgroup_mma_wait(1, deps=(dv1,))
                bar_arrive(CFG.OB + slot, 384)
                if mine:
                    static_sync(MY_TURN, 256)
                    fence_async_shared()  # for all that the barrier has brought
                    zq = gl.zeros([64, D], gl.float32, AC)
                    dq = warpgroup_mma(dsw.permute((1, 0)), k, zq, use_acc=False, is_async=True)
                    dq = warpgroup_mma_wait(0, deps=(dq,))
                    # The producer knows which query tile it is of.
                    accumulate_dq(c, 0, False, dq_ptr, stages, dq, CFG)
                mbarrier.wait(q_full.index(it & 1), (it >> 1) & 1)
                dk1 = warpgroup_mma_wait(0, deps=(dk1,))
                bar_arrive(CFG.QB + slot, 384)
            _, last_key = outer_step(0, last_key, m0, m1, M, up, GROUP, CFG)
        following = get_item(turns_ptr, r + 1)
        # Read and worked out again, so that they take no registers in the loop.
        t = get_item(turns_ptr, r)
        b, hk, col, _, _, _ = key_tile(t, NB, M, H // GROUP, GROUP, BH, HG, offset, given, CFG)
        row = col + 64 * c
        base = (b.to(gl.int64) * s_b + hk.to(gl.int64) * s_h + row.to(gl.int64) * s_s) * 8
        far = base + s_s.to(gl.int64) * (8 * 128)
        store_rows(dv_ptr + base, dv0.to(dt), Sk - row, s_s, D_out, D)
        store_rows(dk_ptr + base, (dk0 * scale).to(dt), Sk - row, s_s, D_out, D)
        store_rows(dv_ptr + far, dv1.to(dt), Sk - row - 128, s_s, D_out, D)
        store_rows(dk_ptr + far, (dk1 * scale).to(dt), Sk - row - 128, s_s, D_out, D)
        r += 1
        mbarrier.wait(k_full.index(0), r & 1)
        t = following
    exit_threads()
