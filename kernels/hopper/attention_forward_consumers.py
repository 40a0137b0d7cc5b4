"""The Hopper forward's consumers: scores, softmax and P V of their query rows, and the stores.

attention_forward.py says who they are and in which order they do this, and has the names used here.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from ..schedule import key_ranges
from ..scores import modified
from .attention_forward_work import (
    advance,
    end_of_row,
    head_of_row,
    make_mbarriers,
    query_of_row,
    tile_of,
    work_index,
)
from .online_softmax import UNSEEN, lanes, rescaled, softmax_finish, softmax_tile, unpack_halves
from .warpgroups import (
    accumulator,
    bar_arrive,
    exit_threads,
    exit_threads_if,
    left_operand,
    matrix,
    opaque_zero,
    static_arrive,
    static_sync,
    wide_rows,
)

# --- masks and turns -----------------------------------------------------------------------------


@gluon.jit
def mask_scores(x, row, col, Sk, offset, variables, CFG: gl.constexpr):
    """x [64, BN], scores of queries from `row` on and keys from `col` on, -inf where not visible.

    A thread holds columns 8 i + 2 lane + j.  The lane's part is moved into the limit, a row's last
    visible column, so that the comparisons are with constants.
    """
    BN: gl.constexpr = x.shape[1]
    R: gl.constexpr = gl.SliceLayout(1, x.type.layout)
    limit = gl.minimum(Sk - 1 - col, query_of_row(row + (offset - col), R, CFG))
    y = x.reshape([64, BN // 8, 4, 2])
    L: gl.constexpr = y.type.layout
    rows = gl.convert_layout(
        limit, gl.SliceLayout(1, gl.SliceLayout(2, gl.SliceLayout(3, L))), assert_trivial=True
    )
    tile = gl.arange(0, BN // 8, gl.SliceLayout(0, gl.SliceLayout(2, gl.SliceLayout(3, L))))
    lane = gl.arange(0, 4, gl.SliceLayout(0, gl.SliceLayout(1, gl.SliceLayout(3, L))))
    pair = gl.arange(0, 2, gl.SliceLayout(0, gl.SliceLayout(1, gl.SliceLayout(2, L))))
    seen = rows[:, None, None, None] - lane[None, None, :, None] * 2
    y = gl.where(tile[None, :, None, None] * 8 + pair[None, None, None, :] <= seen, y, -float("inf"))
    return gl.convert_layout(y.reshape([64, BN]), x.type.layout, assert_trivial=True)


@gluon.jit
def mask_key_tile(x, j, row, whole, end, Sk, offset, variables, CFG: gl.constexpr):
    """Scores of key tile j, masked if it is not among the first `whole`, in uniform branches.

    With SKIP `whole` and `end` count half tiles, and halves from `end` on are left as they are.
    """
    if CFG.SKIP:
        H: gl.constexpr = CFG.BN // 2
        L: gl.constexpr = x.type.layout
        if 2 * j + 1 >= whole:
            a, b = gl.split(x.reshape([64, 2, H]).permute((0, 2, 1)))
            if (2 * j >= whole) & (2 * j < end):
                a = mask_scores(a, row, j * CFG.BN, Sk, offset, variables, CFG)
            if 2 * j + 1 < end:
                b = mask_scores(b, row, j * CFG.BN + H, Sk, offset, variables, CFG)
            x = gl.join(a, b).permute((0, 2, 1)).reshape([64, 2 * H])
            x = gl.convert_layout(x, L, assert_trivial=True)
    else:
        if j >= whole:
            x = mask_scores(x, row, j * CFG.BN, Sk, offset, variables, CFG)
    return x


@gluon.jit
def pingpong_wait(c: gl.constexpr, CFG: gl.constexpr):
    """Wait until the other consumers have issued their products."""
    if CFG.PINGPONG:
        static_sync(CFG.PB + c, 256)


@gluon.jit
def pingpong_signal(c: gl.constexpr, CFG: gl.constexpr):
    if CFG.PINGPONG:
        static_arrive(CFG.PB + (c + 1) % CFG.W, 256)


# --- products ------------------------------------------------------------------------------------


@gluon.jit
def queries_in_registers(q, CFG: gl.constexpr):
    """The first Q_IN_REGS columns of q [64, D] in registers, in two parts: 64 of them, and the
    others."""
    S: gl.constexpr = accumulator(CFG.BN)
    A: gl.constexpr = left_operand(S)
    if CFG.Q_IN_REGS > 64:
        return q.slice(0, 64, dim=1).load(A), q.slice(64, CFG.Q_IN_REGS - 64, dim=1).load(A)
    elif CFG.Q_IN_REGS:
        return q.slice(0, 64, dim=1).load(A), 0
    else:
        return 0, 0


@gluon.jit
def scores(q, q_regs, ks, slot, z, CFG: gl.constexpr):
    """Issue Q K^T of a tile; z [64, BN] zeros."""
    k = matrix(ks.index(slot), CFG.BN, CFG.D)
    if CFG.Q_IN_REGS:
        first = k.slice(0, 64, dim=1).permute((1, 0))
        x = warpgroup_mma(q_regs[0], first, z, use_acc=False, is_async=True)
        if CFG.Q_IN_REGS > 64:
            second = k.slice(64, CFG.Q_IN_REGS - 64, dim=1).permute((1, 0))
            x = warpgroup_mma(q_regs[1], second, x, is_async=True)
        if CFG.Q_IN_REGS < CFG.D:
            REST: gl.constexpr = CFG.D - CFG.Q_IN_REGS
            rest = k.slice(CFG.Q_IN_REGS, REST, dim=1).permute((1, 0))
            x = warpgroup_mma(q.slice(CFG.Q_IN_REGS, REST, dim=1), rest, x, is_async=True)
        return x
    else:
        return warpgroup_mma(q, k.permute((1, 0)), z, use_acc=False, is_async=True)


# --- stores --------------------------------------------------------------------------------------


@gluon.jit
def store_lse(lse, lse_ptr, b, h, row, H, GROUP, Sq, CFG: gl.constexpr):
    """lse [64] of queries from `row` on."""
    L: gl.constexpr = lse.type.layout
    rows = query_of_row(row, L, CFG)
    gl.store(
        lse_ptr + head_of_row(b * H + h, GROUP, L, CFG).to(gl.int64) * Sq + rows,
        lse,
        mask=rows < end_of_row(GROUP, Sq, L, CFG),
    )


@gluon.jit
def store_tile(acc, o_ptr, b, h, row, GROUP, Sq, so_b, so_h, so_s, D_out, dt, CFG: gl.constexpr):
    """64 rows of the output, queries from `row` on, in pieces of 16 bytes."""
    D: gl.constexpr = acc.shape[1]
    out = gl.convert_layout(acc.to(dt), wide_rows(D))
    L: gl.constexpr = out.type.layout
    R: gl.constexpr = gl.SliceLayout(1, L)
    rows = query_of_row(row, R, CFG)
    heads = head_of_row(h, GROUP, R, CFG)
    ends = end_of_row(GROUP, Sq, R, CFG)
    if CFG.PACK > 1:
        heads = heads[:, None]
    cols = gl.arange(0, D, gl.SliceLayout(0, L))
    # The compiler must not know that the strides stay the same: it would keep what follows from them in
    # registers over all tiles.  The lane's part of a column is moved to the other side, as in
    # mask_scores.
    zero = opaque_zero()
    base = o_ptr + (b.to(gl.int64) * (so_b + zero) + heads.to(gl.int64) * (so_h + zero)) * 8
    gl.store(
        base + rows.to(gl.int64)[:, None] * (so_s + zero) * 8 + cols[None, :],
        out,
        mask=(rows < ends)[:, None] & (cols // 32 * 4 < (D_out + zero) // 8 - cols // 8 % 4)[None, :],
    )


# --- work items ----------------------------------------------------------------------------------


@gluon.jit
def attend(
    c: gl.constexpr, buffers, output, q, q_regs, z, x, b, h, row, n, r, keys, offset, scale_log2,
    variables, kslot, kphase, vslot, vphase, CFG: gl.constexpr,
):  # fmt: skip
    """Attend with this consumer's rows of its r-th work item, counted from 1, to its n key tiles; x:
    raw scores of the rightmost tile.  Returns those of the next item, and where the rings are then."""
    ks, vs, q_full, k_full, v_full = buffers
    o_ptr, lse_ptr, H, GROUP, Sq, so_b, so_h, so_s, D_out = output
    BN: gl.constexpr = CFG.BN
    D: gl.constexpr = CFG.D
    O: gl.constexpr = accumulator(D)
    A: gl.constexpr = left_operand(O)
    dt: gl.constexpr = vs.dtype
    KIND: gl.constexpr = CFG.KIND
    WIDTH: gl.constexpr = BN // 2 if CFG.SKIP else BN
    _, _, whole, end = key_ranges(row, keys, offset, variables, CFG.CQ, WIDTH, KIND)
    if CFG.SKIP:
        end = gl.where(row < Sq, end, 0)
    shift = gl.full([64, 4], UNSEEN, gl.float32, lanes())
    l = gl.zeros([64, 4], gl.float32, lanes())
    acc = gl.zeros([64, D], gl.float32, O)
    bar_arrive(CFG.KB + kslot, CFG.ALL)
    if n == 1:
        static_arrive(CFG.QB + c, CFG.TWO)
    kslot, kphase = advance(kslot, kphase, CFG.KS)
    mbarrier.wait(k_full.index(kslot), kphase)
    if CFG.OVERLAP:
        x = modified(x, scale_log2, variables, KIND)
        x = mask_key_tile(x, n - 1, row, whole, end, keys, offset, variables, CFG)
        shift, l, p, _ = softmax_tile(shift, l, x, scale_log2, end - 2 * (n - 1), dt, CFG.SKIP)
        mbarrier.wait(v_full.index(vslot), vphase)
    for i in range(0, n - 1):
        if not CFG.OVERLAP:
            x = modified(x, scale_log2, variables, KIND)
            x = mask_key_tile(x, n - 1 - i, row, whole, end, keys, offset, variables, CFG)
            seen = end - 2 * (n - 1 - i)
            shift, l, p, alpha = softmax_tile(shift, l, x, scale_log2, seen, dt, CFG.SKIP)
            mbarrier.wait(v_full.index(vslot), vphase)
            acc = rescaled(acc, alpha)
        pingpong_wait(c, CFG)
        x = scores(q, q_regs, ks, kslot, z, CFG)
        acc = warpgroup_mma(unpack_halves(p, A, dt), matrix(vs.index(vslot), BN, D), acc, is_async=True)
        pingpong_signal(c, CFG)
        x = warpgroup_mma_wait(1, deps=(x,))
        bar_arrive(CFG.KB + kslot, CFG.ALL)
        if i == n - 2:
            static_arrive(CFG.QB + c, CFG.TWO)
        kslot, kphase = advance(kslot, kphase, CFG.KS)
        mbarrier.wait(k_full.index(kslot), kphase)
        used = vslot
        vslot, vphase = advance(vslot, vphase, CFG.VS)
        if CFG.OVERLAP:
            x = modified(x, scale_log2, variables, KIND)
            if KIND.CAUSAL:  # otherwise only the rightmost tile is masked
                x = mask_key_tile(x, n - 2 - i, row, whole, end, keys, offset, variables, CFG)
            seen = end - 2 * (n - 2 - i)
            shift, l, p, alpha = softmax_tile(shift, l, x, scale_log2, seen, dt, CFG.SKIP)
            mbarrier.wait(v_full.index(vslot), vphase)
        acc = warpgroup_mma_wait(0, deps=(acc,))
        bar_arrive(CFG.VB + used, CFG.ALL)
        if CFG.OVERLAP:
            acc = rescaled(acc, alpha)
    if not CFG.OVERLAP:
        x = modified(x, scale_log2, variables, KIND)
        x = mask_key_tile(x, 0, row, whole, end, keys, offset, variables, CFG)
        shift, l, p, alpha = softmax_tile(shift, l, x, scale_log2, end, dt, CFG.SKIP)
        mbarrier.wait(v_full.index(vslot), vphase)
        acc = rescaled(acc, alpha)
    # The last P V of this work item, and behind it the first scores of the next one.
    pingpong_wait(c, CFG)
    acc = warpgroup_mma(unpack_halves(p, A, dt), matrix(vs.index(vslot), BN, D), acc, is_async=True)
    mbarrier.wait(q_full.index(c), r & 1)
    q_regs = queries_in_registers(q, CFG)
    x = scores(q, q_regs, ks, kslot, z, CFG)
    pingpong_signal(c, CFG)
    lse, normaliser = softmax_finish(shift, l, gl.SliceLayout(1, z.type.layout))
    store_lse(lse, lse_ptr, b, h, row, H, GROUP, Sq, CFG)
    acc = warpgroup_mma_wait(1, deps=(acc,))
    bar_arrive(CFG.VB + vslot, CFG.ALL)
    vslot, vphase = advance(vslot, vphase, CFG.VS)
    acc = acc * gl.convert_layout(normaliser, gl.SliceLayout(1, O))[:, None]
    store_tile(acc, o_ptr, b, h, row, GROUP, Sq, so_b, so_h, so_s, D_out, dt, CFG)
    x = warpgroup_mma_wait(0, deps=(x,))
    return x, q_regs, kslot, kphase, vslot, vphase


@gluon.jit
def skip_item(
    c: gl.constexpr,
    ks,
    q_full,
    k_full,
    v_full,
    q,
    z,
    n,
    r,
    kslot,
    kphase,
    vslot,
    vphase,
    CFG: gl.constexpr,
):
    """As attend, for a work item of which this consumer has no rows.  It gives each buffer back once it
    is full, and takes its turns without products, until the first scores of the next item."""
    bar_arrive(CFG.KB + kslot, CFG.ALL)
    if n == 1:
        static_arrive(CFG.QB + c, CFG.TWO)
    kslot, kphase = advance(kslot, kphase, CFG.KS)
    for i in range(0, n - 1):
        pingpong_wait(c, CFG)
        pingpong_signal(c, CFG)
        mbarrier.wait(k_full.index(kslot), kphase)
        bar_arrive(CFG.KB + kslot, CFG.ALL)
        if i == n - 2:
            static_arrive(CFG.QB + c, CFG.TWO)
        kslot, kphase = advance(kslot, kphase, CFG.KS)
        mbarrier.wait(v_full.index(vslot), vphase)
        bar_arrive(CFG.VB + vslot, CFG.ALL)
        vslot, vphase = advance(vslot, vphase, CFG.VS)
    mbarrier.wait(k_full.index(kslot), kphase)
    mbarrier.wait(v_full.index(vslot), vphase)
    pingpong_wait(c, CFG)
    mbarrier.wait(q_full.index(c), r & 1)
    x = scores(q, (0, 0), ks, kslot, z, CFG)
    pingpong_signal(c, CFG)
    bar_arrive(CFG.VB + vslot, CFG.ALL)
    vslot, vphase = advance(vslot, vphase, CFG.VS)
    x = warpgroup_mma_wait(0, deps=(x,))
    return x, kslot, kphase, vslot, vphase


@gluon.jit
def consumer(c: gl.constexpr, args, CFG: gl.constexpr):
    """Warpgroup c: query rows 64 c ... 64 c + 63 of every work item."""
    (
        o_ptr, lse_ptr, qs, ks, vs, q_full, k_full, v_full,
        work_table, total, NT, H, GROUP, BH, HG, Sq, Sk, offset, so_b, so_h, so_s, D_out, scale_log2,
        variables,
    ) = args  # fmt: skip
    BN: gl.constexpr = CFG.BN
    S: gl.constexpr = accumulator(BN)
    z = gl.zeros([64, BN], gl.float32, S)
    q = matrix(qs.index(c), 64, CFG.D)
    if CFG.PRODUCERS == 1 and c == 0:
        make_mbarriers(q_full, k_full, v_full, CFG)
    static_sync(CFG.KB, CFG.ALL)
    buffers = ks, vs, q_full, k_full, v_full
    output = o_ptr, lse_ptr, H, GROUP, Sq, so_b, so_h, so_s, D_out

    r = 0
    t = work_index(0, work_table, total, CFG)
    following = work_index(1, work_table, total, CFG)
    b, h, row0, n = tile_of(t, NT, H, BH, HG, Sk, offset, variables, CFG)
    kslot = 0
    kphase = 0
    vslot = 0
    vphase = 0
    if c == CFG.W - 1:
        pingpong_signal(c, CFG)
    mbarrier.wait(k_full.index(0), 0)
    mbarrier.wait(q_full.index(c), 0)
    q_regs = queries_in_registers(q, CFG)
    pingpong_wait(c, CFG)
    x = scores(q, q_regs, ks, 0, z, CFG)
    pingpong_signal(c, CFG)
    x = warpgroup_mma_wait(0, deps=(x,))
    while t < total:
        row = row0 + CFG.CQ * c
        keys = Sk + opaque_zero()  # as in store_tile
        r += 1
        # Work out early where the next item is: the divisions would hold up the last product.
        t = following
        b1, h1, row1, n1 = tile_of(t, NT, H, BH, HG, keys, offset, variables, CFG)
        if t < total:
            following = work_index(r + 1, work_table, total, CFG)
        if CFG.IDLE and c > 0:
            if row < Sq:
                x, _, kslot, kphase, vslot, vphase = attend(
                    c, buffers, output, q, q_regs, z, x, b, h, row, n, r, keys, offset, scale_log2,
                    variables, kslot, kphase, vslot, vphase, CFG,
                )  # fmt: skip
            else:
                x, kslot, kphase, vslot, vphase = skip_item(
                    c, ks, q_full, k_full, v_full, q, z, n, r, kslot, kphase, vslot, vphase, CFG
                )
        else:
            x, q_regs, kslot, kphase, vslot, vphase = attend(
                c, buffers, output, q, q_regs, z, x, b, h, row, n, r, keys, offset, scale_log2,
                variables, kslot, kphase, vslot, vphase, CFG,
            )  # fmt: skip
        b = b1
        h = h1
        row0 = row1
        n = n1
    # ptxas sees through neither of the two ways to exit.  The first lets it keep a word more in
    # registers with four consumers, and gives the causal loop of head_dim 128 the better order.  It
    # also compiles 1 to 1.5 seconds faster with an exit: MLIR's canonicalizer asks again and again if
    # the body has effects, from its last block backwards, and would read past the epilogue to a store.
    if CFG.W == 4 or (CFG.D == 128 and CFG.KIND.CAUSAL):
        exit_threads_if(t, total)
    else:
        exit_threads()
