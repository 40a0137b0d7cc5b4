"""Attention backward on Hopper: the consumers of attention_backward.py, and their stores."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from ..scores import Variables, modified_gradient, probabilities, score_gradient, unit_of
from .attention_backward_masks import (
    AHEAD,
    ASKED,
    CLEAR,
    MASKED,
    as_seen_from,
    clear_outer_steps,
    first_clear,
    mask,
    mask_if_needed,
    modify,
)
from .attention_backward_products import add_product, add_term, product_with_term
from .attention_backward_rows import DELTA, LSE
from .attention_backward_sums import accumulate_dq
from .attention_backward_wider_keys import wider_keys_loop
from .attention_backward_work import (
    comes_first,
    first_tile,
    inner_step,
    key_tile,
    keys_at,
    last_visible_key,
    listed_step,
    loops,
    outer_step,
    stash_item,
    stashed_item,
)
from .items import get_item
from .warpgroups import (
    accumulator,
    bar_arrive,
    exit_threads,
    left_operand,
    matrix,
    opaque_zero,
    static_arrive,
    static_sync,
    wide_rows,
)

# --- stores ----------------------------------------------------------------------------------------


@gluon.jit
def store_rows(ptr, x, n, s_row, D_out, D: gl.constexpr):
    """Store the first n rows and D_out columns of x [64, D], in pieces of 16 bytes."""
    x = gl.convert_layout(x, wide_rows(D))
    L: gl.constexpr = x.type.layout
    r = gl.arange(0, 64, gl.SliceLayout(1, L))
    d = gl.arange(0, D, gl.SliceLayout(0, L))
    gl.store(
        ptr + (r * (s_row * 8))[:, None] + d[None, :],
        x,
        mask=(r < n)[:, None] & (d // 8 < D_out // 8)[None, :],
    )


# --- head_dim up to 128 -----------------------------------------------------------------------------


@gluon.jit
def inner_loop(
    c: gl.constexpr,
    MASK: gl.constexpr,
    shared,
    own,
    dk,
    dv,
    it,
    tile,
    first,
    begin,
    end,
    last_key,
    M,
    scale_log2,
    variables,
    CFG: gl.constexpr,
):
    """The inner loop of a walk from index `begin` to `end`, a query tile a step.  MASK: what is known
    of its masks.  Returns dk, dv and what comes next: step and query tile."""
    dq_ptr, qs, dos, ks, vs, lse_deltas, dss, stages, selector, q_full, do_full, _ = shared
    at, once_k, once_v, regs, limit = own
    BM: gl.constexpr = CFG.BM
    BN: gl.constexpr = CFG.BN
    D: gl.constexpr = CFG.D
    KIND: gl.constexpr = CFG.KIND
    ST: gl.constexpr = accumulator(BM)
    AC: gl.constexpr = accumulator(D)
    QA: gl.constexpr = accumulator(64)
    A: gl.constexpr = left_operand(AC)
    dt: gl.constexpr = qs.dtype
    for index in range(begin, end, CFG.STEP):
        place, to, clear = index, tile, 0
        if KIND.TABLE:
            place, to, clear = listed_step(index, last_key, tile, variables.head.listed, CFG)
        slot = it & 1
        q = matrix(qs.index(slot), BM, D)
        do = matrix(dos.index(slot), BM, D)
        lse_delta = lse_deltas.index(slot)
        here = at + (it >> 30)
        k = matrix(ks.index(here), BN, D)
        if CFG.ONCE:
            kc = once_k
            vc = once_v
        else:
            kc = k.slice(64 * c, 64, 0)
            vc = matrix(vs.index(here), BN, D).slice(64 * c, 64, 0)
        if KIND.CURVED:
            x = add_product(gl.zeros([64, BM], gl.float32, ST), kc, q, regs, CFG.K_IN_REGS, False)
        else:
            x = product_with_term(
                kc,
                q,
                lse_delta,
                LSE,
                ST,
                selector,
                regs,
                CFG.K_IN_REGS,
                CFG.KV_IN_REGS,
                CFG.TERMS_FIRST,
            )
        if CFG.KV_IN_REGS:
            mbarrier.wait(do_full.index(slot), (it >> 1) & 1)
        dp = product_with_term(
            vc, do, lse_delta, DELTA, ST, selector, regs, CFG.V_IN_REGS, CFG.KV_IN_REGS, CFG.TERMS_FIRST
        )
        if KIND.CURVED:
            # lse stands outside of the change, and so is added after it.  P is a factor of dS, so that
            # the derivative may be one of dP, before the scores give way to P.
            x, dp = warpgroup_mma_wait(0, deps=(x, dp))
            dp = modified_gradient(dp, x, scale_log2, variables, KIND)
            x = modify(x, last_visible_key(place, last_key, CFG), scale_log2, variables, KIND)
            x = add_term(x, lse_delta, LSE, ST, selector, CFG.KV_IN_REGS)
            x = warpgroup_mma_wait(0, deps=(x,))
        else:
            # Wait for all but the products that make dP.
            x = warpgroup_mma_wait(3 if CFG.V_IN_REGS else 2, deps=(x,))
            if not KIND.PLAIN:
                x = modify(x, last_visible_key(place, last_key, CFG), scale_log2, variables, KIND)
        if MASK == ASKED:
            at_query = last_visible_key(place, last_key, CFG)
            x = mask_if_needed(x, limit, at_query, variables, KIND, clear)
        elif MASK == MASKED:
            x = mask(x, limit, last_visible_key(place, last_key, CFG), variables, KIND)
        p = probabilities(x, 0.0, unit_of(scale_log2, KIND))
        if KIND.CURVED:
            ds = score_gradient(p, dp, 0.0).to(dt)
            dv = warpgroup_mma(gl.convert_layout(p.to(dt), A), do, dv, is_async=True)
        elif CFG.KV_IN_REGS:
            if KIND.CAUSAL:
                # It is there already.  This keeps ptxas from moving the exponentials behind the wait
                # for dP.
                mbarrier.wait(do_full.index(slot), (it >> 1) & 1)
            dp = warpgroup_mma_wait(0, deps=(dp,))
            ds = score_gradient(p, dp, 0.0).to(dt)
            dv = warpgroup_mma(gl.convert_layout(p.to(dt), A), do, dv, is_async=True)
        else:
            dv = warpgroup_mma(gl.convert_layout(p.to(dt), A), do, dv, is_async=True)
            dp = warpgroup_mma_wait(1, deps=(dp,))
            ds = score_gradient(p, dp, 0.0).to(dt)
        dsw = dss.index(slot)
        dsw.slice(64 * c, 64, 0).store(ds)
        fence_async_shared()
        static_sync(CFG.DS, 256)
        zq = gl.zeros([64, 64], gl.float32, QA)
        if D == 128:
            dq = warpgroup_mma(
                dsw.permute((1, 0)), k.slice(64 * c, 64, 1), zq, use_acc=False, is_async=True
            )
        else:
            dq = warpgroup_mma(
                dsw.slice(64 * c, 64, 1).permute((1, 0)), k, zq, use_acc=False, is_async=True
            )
        dk = warpgroup_mma(gl.convert_layout(ds, A), q, dk, is_async=True)
        dv, dq = warpgroup_mma_wait(1, deps=(dv, dq))
        bar_arrive(CFG.OB + slot, 384)
        accumulate_dq(c, to, first, dq_ptr, stages, dq, CFG)
        it += 1
        # These waits also keep ptxas from waiting for dK before dQ leaves.
        mbarrier.wait(q_full.index(it & 1), (it >> 1) & 1)
        if not CFG.KV_IN_REGS:
            mbarrier.wait(do_full.index(it & 1), (it >> 1) & 1)
        dk = warpgroup_mma_wait(0, deps=(dk,))
        bar_arrive(CFG.QB + slot, 384)
        tile = inner_step(tile, M, CFG)
    return dk, dv, it, tile


@gluon.jit
def outer_loop(
    c: gl.constexpr,
    MASK: gl.constexpr,
    shared,
    own,
    walk,
    dk,
    dv,
    it,
    tile,
    start,
    stop,
    begin,
    end,
    last_key,
    scale_log2,
    given,
    CFG: gl.constexpr,
):
    """The outer loop of a walk from step `start` to `stop`.  MASK: what is known of its steps' masks.
    Returns dk, dv and what comes next: step, query tile and last_key."""
    col, m0, m1, up, NB, M, GROUP, offset, b, h0, moved = walk
    _, _, _, _, limit = own
    KIND: gl.constexpr = CFG.KIND
    for i in range(start, stop):
        if KIND.PLAIN:
            seen = given
        else:  # whose walk goes head by head
            row = col + 64 * c
            head = as_seen_from(row, b, h0 + i, given, limit + 1 + row, offset, moved, NB, CFG)
            seen = Variables(given, head)
        if KIND.TABLE:
            end = gl.load(seen.head.listed - 1)
        first = comes_first(i, col, m0, up, NB, M, offset, CFG)
        if MASK == AHEAD:
            clear = first_clear(begin, end, limit, CFG)
            dk, dv, it, tile = inner_loop(
                c,
                MASKED,
                shared,
                own,
                dk,
                dv,
                it,
                tile,
                first,
                begin,
                clear,
                last_key,
                M,
                scale_log2,
                seen,
                CFG,
            )
            dk, dv, it, tile = inner_loop(
                c,
                CLEAR,
                shared,
                own,
                dk,
                dv,
                it,
                tile,
                first,
                clear,
                end,
                last_key,
                M,
                scale_log2,
                seen,
                CFG,
            )
        elif CFG.MORE:
            dk, dv, it, tile = wider_keys_loop(
                c, shared, own, dk, dv, it, tile, first, begin, end, last_key, M, scale_log2, seen, CFG
            )
        else:
            dk, dv, it, tile = inner_loop(
                c,
                MASK,
                shared,
                own,
                dk,
                dv,
                it,
                tile,
                first,
                begin,
                end,
                last_key,
                M,
                scale_log2,
                seen,
                CFG,
            )
        tile, last_key = outer_step(tile, last_key, m0, m1, M, up, GROUP, CFG)
    return dk, dv, it, tile, last_key


@gluon.jit
def consumer(c: gl.constexpr, selector, stash, args, more, CFG: gl.constexpr):
    """Warpgroup c, head_dim up to 128: keys 64 c ... 64 c + 63 of the tile.

    At head_dim 128 shared memory is the limit.  So half of the columns of its keys or its values stay
    in registers, from which the tensor cores take them in every step (CFG.KV_IN_REGS).  That leaves no
    registers for P in 16 bits beside P and dP in 32, so dV begins when dS is there, not as soon as P
    is.  stash: a word of shared memory, this warpgroup's own, for the number of its item
    (CFG.ITEM_IN_SMEM).
    """
    (
        dk_ptr, dv_ptr, dq_ptr, turns_ptr, qs, dos, ks, vs, lse_deltas, dss, stages,
        k_full, v_full, q_full, do_full,
        NB, M, H, GROUP, BH, HG, Sk, offset, s_b, s_h, s_s, D_out, scale, scale_log2,
        given,
    ) = args  # fmt: skip
    BM: gl.constexpr = CFG.BM
    BN: gl.constexpr = CFG.BN
    D: gl.constexpr = CFG.D
    ST: gl.constexpr = accumulator(BM)
    AC: gl.constexpr = accumulator(D)
    AT: gl.constexpr = left_operand(ST)
    MORE: gl.constexpr = CFG.MORE
    dt: gl.constexpr = qs.dtype
    more_qs, more_ks, v_b, v_h, v_s, D_v = more
    more_columns = more_qs, more_ks
    shared = dq_ptr, qs, dos, ks, vs, lse_deltas, dss, stages, selector, q_full, do_full, more_columns
    r = 0
    it = 0
    static_sync(CFG.OB, 384)
    mbarrier.wait(q_full.index(0), 0)
    following = get_item(turns_ptr, 0)
    if CFG.ITEM_IN_SMEM:
        stash_item(stash, following)
    mbarrier.wait(k_full.index(0), 0)
    if not CFG.KV_IN_REGS:
        mbarrier.wait(do_full.index(0), 0)
    t = stashed_item(stash) if CFG.ITEM_IN_SMEM else following
    while t < NB * BH:
        b, hk, col, m0, m1, up = key_tile(t, NB, M, H // GROUP, GROUP, BH, HG, offset, given, CFG)
        b, _, keys, diagonal = keys_at(b, Sk, offset, given, CFG)
        row = col + 64 * c
        at = r % CFG.KV
        if CFG.ONCE:
            kc = matrix(ks.index(at + opaque_zero()), BN, D).slice(64 * c, 64, 0)
            vc = matrix(vs.index(at + opaque_zero()), BN, D).slice(64 * c, 64, 0)
        else:
            kc = 0
            vc = 0
        dk = gl.zeros([64, D], gl.float32, AC)
        if CFG.MORE:
            dk = dk, gl.zeros([64, MORE], gl.float32, accumulator(MORE))
        dv = gl.zeros([64, D], gl.float32, AC)
        # the last key there is; like last_key counted from this warpgroup's first
        limit = keys - 1 - row
        tile = (b * H + hk * GROUP) * M + first_tile(col, m0, M, up, CFG)
        low = m0 * BM + diagonal - row
        high = m1 * BM + diagonal - row
        outer, begin, end, last_key = loops(low, high, m0, m1, up, GROUP, CFG)
        mbarrier.wait(v_full.index(at), (r // CFG.KV) & 1)
        if CFG.K_IN_REGS or CFG.V_IN_REGS:
            rows = matrix((ks if CFG.K_IN_REGS else vs).index(at), BN, D).slice(64 * c, 64, 0)
            regs = rows.slice(0, CFG.K_IN_REGS + CFG.V_IN_REGS, 1).load(AT)
        else:
            regs = 0
        own = at, kc, vc, regs, limit
        walk = col, m0, m1, up, NB, M, GROUP, diagonal, b, hk * GROUP, offset
        if CFG.PEELED and CFG.DOWN:
            clear, behind = clear_outer_steps(low, high, limit, outer, up, CFG)
            if CFG.BOTH:
                dk, dv, it, tile, last_key = outer_loop(
                    c,
                    MASKED,
                    shared,
                    own,
                    walk,
                    dk,
                    dv,
                    it,
                    tile,
                    0,
                    clear,
                    begin,
                    end,
                    last_key,
                    scale_log2,
                    given,
                    CFG,
                )
            dk, dv, it, tile, last_key = outer_loop(
                c,
                CLEAR,
                shared,
                own,
                walk,
                dk,
                dv,
                it,
                tile,
                clear,
                behind,
                begin,
                end,
                last_key,
                scale_log2,
                given,
                CFG,
            )
            dk, dv, it, tile, last_key = outer_loop(
                c,
                MASKED,
                shared,
                own,
                walk,
                dk,
                dv,
                it,
                tile,
                behind,
                outer,
                begin,
                end,
                last_key,
                scale_log2,
                given,
                CFG,
            )
        else:
            dk, dv, it, tile, last_key = outer_loop(
                c,
                AHEAD if CFG.PEELED else ASKED,
                shared,
                own,
                walk,
                dk,
                dv,
                it,
                tile,
                0,
                outer,
                begin,
                end,
                last_key,
                scale_log2,
                given,
                CFG,
            )
        following = get_item(turns_ptr, r + 1)
        # Read and worked out again, so that they take no registers in the loop.
        t = stashed_item(stash) if CFG.ITEM_IN_SMEM else get_item(turns_ptr, r)
        b, hk, col, m0, m1, up = key_tile(t, NB, M, H // GROUP, GROUP, BH, HG, offset, given, CFG)
        b, key, keys, _ = keys_at(b, Sk, offset, given, CFG)
        row = col + 64 * c
        base = (b.to(gl.int64) * s_b + hk.to(gl.int64) * s_h + (key + row).to(gl.int64) * s_s) * 8
        if CFG.MORE:
            # The compiler must not know that strides stay the same: it would keep what follows from
            # them in registers over all items.
            zero = opaque_zero()
            at_v = b.to(gl.int64) * (v_b + zero) + hk.to(gl.int64) * (v_h + zero)
            at_v = (at_v + (key + row).to(gl.int64) * (v_s + zero)) * 8
            store_rows(dv_ptr + at_v, dv.to(dt), keys - row, v_s + zero, D_v + zero, D)
            dk, more_dk = dk
            to, more_dk = dk_ptr + base, (more_dk * scale).to(dt)
            store_rows(to, (dk * scale).to(dt), keys - row, s_s + zero, D_out + zero, D)
            store_rows(to + D, more_dk, keys - row, s_s + zero, D_out + zero - D, MORE)
        else:
            store_rows(dv_ptr + base, dv.to(dt), keys - row, s_s, D_out, D)
            if CFG.ITEM_IN_SMEM:
                stash_item(stash, following)
            store_rows(dk_ptr + base, (dk * scale).to(dt), keys - row, s_s, D_out, D)
        r += 1
        mbarrier.wait(k_full.index(r % CFG.KV), (r // CFG.KV) & 1)
        t = stashed_item(stash) if CFG.ITEM_IN_SMEM else following
    exit_threads()


# --- head_dim 256 ---------------------------------------------------------------------------------


@gluon.jit
def wide_consumer(c: gl.constexpr, args, CFG: gl.constexpr):
    """Warpgroup c at head_dim 256: both own the same 64 keys and half the columns of dK, dV and dQ.

    The first makes P, the second makes dP and dS.  They exchange these in shared memory (PS: P is
    written).  With a softcap the first also writes the cap's derivative to where dS will be, once the
    second has no more use for dS of the step before (ODD).
    """
    (
        dk_ptr, dv_ptr, dq_ptr, turns_ptr, qs, dos, ks, vs, lse_deltas, dss, stages,
        k_full, v_full, q_full, do_full,
        NB, M, H, GROUP, BH, HG, Sk, offset, s_b, s_h, s_s, D_out, scale, scale_log2,
        given,
    ) = args  # fmt: skip
    BM: gl.constexpr = CFG.BM
    D: gl.constexpr = CFG.D
    KIND: gl.constexpr = CFG.KIND
    N: gl.constexpr = D // 2
    ST: gl.constexpr = accumulator(BM)
    AC: gl.constexpr = accumulator(N)
    dt: gl.constexpr = qs.dtype
    r = 0
    it = 0
    static_sync(CFG.OB, 384)
    mbarrier.wait(q_full.index(0), 0)
    t = get_item(turns_ptr, 0)
    mbarrier.wait(k_full.index(0), 0)
    while t < NB * BH:
        b, hk, col, m0, m1, up = key_tile(t, NB, M, H // GROUP, GROUP, BH, HG, offset, given, CFG)
        b, _, keys, diagonal = keys_at(b, Sk, offset, given, CFG)
        dsw = dss.index(2)
        dk = gl.zeros([64, N], gl.float32, AC)
        dv = gl.zeros([64, N], gl.float32, AC)
        limit = keys - 1 - col
        tile = (b * H + hk * GROUP) * M + first_tile(col, m0, M, up, CFG)
        low = m0 * BM + diagonal - col
        high = m1 * BM + diagonal - col
        outer, begin, end, last_key = loops(low, high, m0, m1, up, GROUP, CFG)
        mbarrier.wait(v_full.index(0), r & 1)
        for i in range(outer):
            first = comes_first(i, col, m0, up, NB, M, diagonal, CFG)
            if KIND.PLAIN:
                seen = given
            else:  # whose walk goes head by head
                h = hk * GROUP + i
                head = as_seen_from(col, b, h, given, keys, diagonal, offset, NB, CFG)
                seen = Variables(given, head)
            if KIND.TABLE:
                end = gl.load(seen.head.listed - 1)
            for index in range(begin, end, CFG.STEP):
                place, to, clear = index, tile, 0
                if KIND.TABLE:
                    place, to, clear = listed_step(index, last_key, tile, seen.head.listed, CFG)
                slot = it & 1
                ps = dss.index(slot)
                k = matrix(ks.index(it >> 30), 64, D)
                v = matrix(vs.index(it >> 30), 64, D)
                q = matrix(qs.index(slot), BM, D)
                do = matrix(dos.index(slot), BM, D)
                mbarrier.wait(q_full.index(slot), (it >> 1) & 1)
                if c == 0:
                    if KIND.CURVED:
                        x = add_product(gl.zeros([64, BM], gl.float32, ST), k, q, 0, 0, False)
                    else:
                        x = product_with_term(k, q, lse_deltas.index(slot), LSE, ST)
                    mbarrier.wait(do_full.index(slot), (it >> 1) & 1)
                    x = warpgroup_mma_wait(0, deps=(x,))
                    place = last_visible_key(place, last_key, CFG)
                    if KIND.CURVED:
                        ones = gl.full([64, BM], 1.0, gl.float32, ST)
                        slope = modified_gradient(ones, x, scale_log2, seen, KIND)
                        static_sync(CFG.ODD, 256)
                        dsw.store(slope.to(dt))
                        x = modify(x, place, scale_log2, seen, KIND)
                        x = add_term(x, lse_deltas.index(slot), LSE, ST)
                        x = warpgroup_mma_wait(0, deps=(x,))
                    else:
                        x = modify(x, place, scale_log2, seen, KIND)
                    x = mask_if_needed(x, limit, place, seen, KIND, clear)
                    ps.store(probabilities(x, 0.0, unit_of(scale_log2, KIND)).to(dt))
                    fence_async_shared()
                    static_sync(CFG.PS, 256)
                    dv = warpgroup_mma(ps, do.slice(N * c, N, 1), dv, is_async=True)
                else:
                    if KIND.CURVED:
                        static_arrive(CFG.ODD, 256)
                    mbarrier.wait(do_full.index(slot), (it >> 1) & 1)
                    dp = product_with_term(v, do, lse_deltas.index(slot), DELTA, ST)
                    dp = warpgroup_mma_wait(0, deps=(dp,))
                    static_sync(CFG.PS, 256)
                    p = ps.load(ST).to(gl.float32)
                    dv = warpgroup_mma(ps, do.slice(N * c, N, 1), dv, is_async=True)
                    if KIND.CURVED:
                        dp *= dsw.load(ST).to(gl.float32)
                    dsw.store(score_gradient(p, dp, 0.0).to(dt))
                    fence_async_shared()
                static_sync(CFG.DS, 256)
                zq = gl.zeros([64, N], gl.float32, AC)
                dq = warpgroup_mma(
                    dsw.permute((1, 0)), k.slice(N * c, N, 1), zq, use_acc=False, is_async=True
                )
                dk = warpgroup_mma(dsw, q.slice(N * c, N, 1), dk, is_async=True)
                dv, dq = warpgroup_mma_wait(1, deps=(dv, dq))
                bar_arrive(CFG.OB + slot, 384)
                accumulate_dq(c, to, first, dq_ptr, stages, dq, CFG)
                it += 1
                # This wait keeps ptxas from waiting for dK before the adds.
                mbarrier.wait(q_full.index(it & 1), (it >> 1) & 1)
                dk = warpgroup_mma_wait(0, deps=(dk,))
                bar_arrive(CFG.QB + slot, 384)
                tile = inner_step(tile, M, CFG)
            tile, last_key = outer_step(tile, last_key, m0, m1, M, up, GROUP, CFG)
        following = get_item(turns_ptr, r + 1)
        t = get_item(turns_ptr, r)
        b, hk, col, m0, m1, up = key_tile(t, NB, M, H // GROUP, GROUP, BH, HG, offset, given, CFG)
        b, key, keys, _ = keys_at(b, Sk, offset, given, CFG)
        base = b.to(gl.int64) * s_b + hk.to(gl.int64) * s_h + (key + col).to(gl.int64) * s_s
        base = base * 8 + c * N
        store_rows(dv_ptr + base, dv.to(dt), keys - col, s_s, D_out - c * N, N)
        store_rows(dk_ptr + base, (dk * scale).to(dt), keys - col, s_s, D_out - c * N, N)
        r += 1
        mbarrier.wait(k_full.index(0), r & 1)
        t = following
    exit_threads()
