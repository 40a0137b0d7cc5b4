"""The Hopper forward's consumers: scores, softmax and P V of their query rows, and the stores.

attention_forward.py says who they are and in which order they do this, and has the names used here.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from ..online_softmax import LN2
from ..schedule import key_ranges
from ..scores import TILE, Variables, modified, of_head, unit_of
from .attention_forward_work import (
    advance,
    end_of_row,
    first_item,
    head_of_row,
    items_of,
    make_mbarriers,
    query_of_row,
    sequence_at,
    tile_at,
    tile_of,
    walk_of,
    within,
    work_index,
)
from .gluon_names import barrier
from .items import get_item
from .online_softmax import (
    UNSEEN,
    lane_maxima,
    lanes,
    rescaled,
    softmax_finish,
    softmax_tile,
    softmax_with_sink,
    unpack_halves,
)
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

# --- scores of a key tile ------------------------------------------------------------------------


@gluon.constexpr_function
def along(layout, dim, rank=4):
    """The layout of one dimension of a tensor with `rank` of them."""
    for d in reversed(range(rank)):
        if d != dim:
            layout = gl.SliceLayout(d, layout)
    return layout


@gluon.jit
def by_column(x):
    """x [64, C] as [64, C / 8, 4, 2], its column 8 i + 2 lane + j at [:, i, lane, j]."""
    return x.reshape([64, x.shape[1] // 8, 4, 2])


@gluon.jit
def columns(y):
    """Of y [64, C / 8, 4, 2]: a thread's columns as constants, and the lane's part, 2 lane."""
    L: gl.constexpr = y.type.layout
    tile = gl.arange(0, y.shape[1], along(L, 1))
    lane = gl.arange(0, 4, along(L, 2))
    pair = gl.arange(0, 2, along(L, 3))
    return tile[None, :, None, None] * 8 + pair[None, None, None, :], lane[None, None, :, None] * 2


@gluon.jit
def of_rows(a, y):
    """a [64], one value for each row, in the layout of y [64, C / 8, 4, 2] and its shape."""
    a = gl.convert_layout(a, along(y.type.layout, 0), assert_trivial=True)
    return a[:, None, None, None]


@gluon.jit
def mask_by_bits(x, row, col, Sk, bits):
    """x [64, BN], scores of queries from `row` on and keys from `col` on, -inf where a head's `bits` of
    a mask are 0, see ../mask_table.py; keys that do not exist have none.

    A thread loads the bits of its two rows, 64 keys at a time.  The lane's part of a column is a shift,
    so that a bit is a constant.
    """
    WORDS: gl.constexpr = x.shape[1] // 64
    y = x.reshape([64, WORDS, 8, 4, 2])  # row, word, tile, lane, pair
    L: gl.constexpr = y.type.layout
    W: gl.constexpr = gl.SliceLayout(2, gl.SliceLayout(3, gl.SliceLayout(4, L)))
    i = (row + gl.arange(0, 64, gl.SliceLayout(1, W))).to(gl.int64)[:, None]
    word = col // 64 + gl.arange(0, WORDS, gl.SliceLayout(0, W))[None, :]
    at = bits.to(gl.pointer_type(gl.int64)) + i * (2 * gl.cdiv(Sk, TILE)) + word
    words = gl.load(at)[:, :, None, None, None]
    tile = gl.arange(0, 8, along(L, 2, 5))[None, None, :, None, None]
    lane = gl.arange(0, 4, along(L, 3, 5))[None, None, None, :, None]
    pair = gl.arange(0, 2, along(L, 4, 5))[None, None, None, None, :]
    seen = (words >> (lane * 2)) & (gl.full([1, 1, 1, 1, 1], 1, gl.int64, L) << (tile * 8 + pair))
    y = gl.where(seen != 0, y, -float("inf"))
    return gl.convert_layout(y.reshape(x.shape), x.type.layout, assert_trivial=True)


@gluon.jit
def mask_scores(
    x, row, col, Sk, offset, low, variables, CFG: gl.constexpr, INTERVALS: gl.constexpr = False
):
    """x [64, BN], scores of queries from `row` on and keys from `col` on, -inf where not visible by
    the band and, if INTERVALS, by these; with STARTS keys before `low` are not.

    The lane's part of a column is moved into the limit, a row's last visible column, so that the
    comparisons are with constants.
    """
    KIND: gl.constexpr = CFG.KIND
    R: gl.constexpr = gl.SliceLayout(1, x.type.layout)
    if KIND.CAUSAL or (KIND.PLAIN and not CFG.CACHE):  # of which the full one has the offset Sk
        limit = gl.minimum(Sk - 1 - col, query_of_row(row + (offset - col), R, CFG))
    else:
        limit = gl.full([64], Sk - 1 - col, gl.int32, R)
    y = by_column(x)
    column, lane = columns(y)
    seen = column <= of_rows(limit, y) - lane
    if KIND.WINDOW:
        lowest = query_of_row(row + (offset - variables.given.left - col), R, CFG)
        near = column >= of_rows(lowest, y) - lane
        if KIND.FIRST:
            near = near | (column < variables.given.first - col - lane)
        seen = seen & near
    if CFG.STARTS:
        seen = seen & (column >= low - col - lane)
    if INTERVALS:
        j = col + column + lane
        i = of_rows(query_of_row(row, R, CFG), y)
        begin = gl.load(variables.head.begin + j, j < Sk, 0)
        end = gl.load(variables.head.end + j, j < Sk, 0)
        seen = seen & (begin <= i) & (i < end)
    y = gl.where(seen, y, -float("inf"))
    return gl.convert_layout(y.reshape(x.shape), x.type.layout, assert_trivial=True)


@gluon.jit
def mask_key_tile(x, j, clear, row, ranges, Sk, offset, variables, CFG: gl.constexpr):
    """Scores of key tile j, masked if it is not among those that all rows see, in uniform branches.

    ranges, of this consumer's rows, say so of the band, see key_ranges, and if KIND has LISTS `clear`
    of intervals or a table.  With SKIP they count half tiles, and halves from their end on stay as they
    are.
    """
    _, clear_begin, whole, end, low = ranges
    if CFG.SKIP:
        H: gl.constexpr = CFG.BN // 2
        L: gl.constexpr = x.type.layout
        if 2 * j + 1 >= whole:
            a, b = gl.split(x.reshape([64, 2, H]).permute((0, 2, 1)))
            if (2 * j >= whole) & (2 * j < end):
                a = mask_scores(a, row, j * CFG.BN, Sk, offset, low, variables, CFG)
            if 2 * j + 1 < end:
                b = mask_scores(b, row, j * CFG.BN + H, Sk, offset, low, variables, CFG)
            x = gl.join(a, b).permute((0, 2, 1)).reshape([64, 2 * H])
            x = gl.convert_layout(x, L, assert_trivial=True)
    elif CFG.KIND.TABLE:
        if clear == 0:
            x = mask_by_bits(x, row, j * CFG.BN, Sk, variables.head.bits)
        if CFG.KIND.CAUSAL or CFG.KIND.WINDOW:
            if (j < clear_begin) | (j >= whole):
                x = mask_scores(x, row, j * CFG.BN, Sk, offset, low, variables, CFG)
    elif CFG.KIND.INTERVALS:
        if clear == 0:
            x = mask_scores(x, row, j * CFG.BN, Sk, offset, low, variables, CFG, True)
        elif CFG.KIND.CAUSAL or CFG.KIND.WINDOW:
            if (j < clear_begin) | (j >= whole):
                x = mask_scores(x, row, j * CFG.BN, Sk, offset, low, variables, CFG)
    elif CFG.KIND.WINDOW or CFG.STARTS:
        if (j < clear_begin) | (j >= whole):
            x = mask_scores(x, row, j * CFG.BN, Sk, offset, low, variables, CFG)
    else:
        if j >= whole:
            x = mask_scores(x, row, j * CFG.BN, Sk, offset, low, variables, CFG)
    return x


@gluon.jit
def modify_scores(x, row, col, scale, variables, CFG: gl.constexpr):
    """`modified` of x [64, BN], scores of queries from `row` on and keys from `col` on."""
    KIND: gl.constexpr = CFG.KIND
    if KIND.ALIBI:
        y = by_column(x)
        column, lane = columns(y)
        # As floats, of which a thread's columns are constants.
        i = of_rows(query_of_row(row - col, gl.SliceLayout(1, x.type.layout), CFG), y) - lane
        y = modified(y, scale, variables, KIND, i.to(gl.float32), column.to(gl.float32))
        return gl.convert_layout(y.reshape(x.shape), x.type.layout, assert_trivial=True)
    else:
        return modified(x, scale, variables, KIND)


@gluon.jit
def take_scores(
    state,
    x,
    j,
    row,
    ranges,
    keys,
    offset,
    scale,
    variables,
    dt: gl.constexpr,
    MASKED: gl.constexpr,
    CFG: gl.constexpr,
):
    """Take in raw scores x of key tile j, as tile_at gives it; MASKED: whether it may need a mask.

    state: (shift, l, top), `top` the largest raw score of each row and lane if KIND has MAX_SCORE.
    Returns it, p and alpha, see softmax_tile.
    """
    shift, l, top = state
    KIND: gl.constexpr = CFG.KIND
    _, _, _, end, _ = ranges
    clear = 0
    if KIND.LISTS:
        clear = j & 1
        j = j >> 1
    if KIND.MAX_SCORE:
        if MASKED:
            x = mask_key_tile(x, j, clear, row, ranges, keys, offset, variables, CFG)
        top = gl.maximum(top, lane_maxima(x))
    x = modify_scores(x, row, j * CFG.BN, scale, variables, CFG)
    if MASKED and (KIND.UNHIDES or not KIND.MAX_SCORE):
        x = mask_key_tile(x, j, clear, row, ranges, keys, offset, variables, CFG)
    shift, l, p, alpha = softmax_tile(shift, l, x, unit_of(scale, KIND), end - 2 * j, dt, CFG.SKIP)
    return (shift, l, top), p, alpha


# --- turns ---------------------------------------------------------------------------------------


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
    """The first Q_IN_REGS columns of q, a pair as in `scores`, in registers, in two parts: 64 of them,
    and the others."""
    q, _ = q
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
    """Issue Q K^T of a tile; z [64, BN] zeros.  q, ks: pairs of D columns and, with MORE, as many
    more."""
    q, more_q = q
    ks, more_ks = ks
    if CFG.MORE:
        more_k = matrix(more_ks.index(slot), CFG.BN, CFG.MORE).permute((1, 0))
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
    else:
        x = warpgroup_mma(q, k.permute((1, 0)), z, use_acc=False, is_async=True)
    if CFG.MORE:
        x = warpgroup_mma(more_q, more_k, x, is_async=True)
    return x


@gluon.jit
def clear_values(v, limit, CFG: gl.constexpr, low=0):
    """Zeros in the rows of v [BN, D] from `limit` on, and with STARTS in those before `low`.

    They are tokens of another sequence, or of none, and need not be numbers, but then 0 times them is
    none either.  Each consumer does this before it reads them.  Another one may read meanwhile: what it
    sees written are the values that it has written itself.
    """
    L: gl.constexpr = gl.BlockedLayout([1, 8], [256 // CFG.D, CFG.D // 8], [4, 1], [1, 0])
    BN: gl.constexpr = CFG.BN
    for first in gl.static_range(0, BN, 16):
        hides = first + 16 > limit
        if CFG.STARTS:
            hides = hides | (first < low)
        if hides:
            part = v.slice(first, 16, dim=0)
            values = part.load(L)
            rows = first + gl.arange(0, 16, gl.SliceLayout(1, L))
            there = rows < limit
            if CFG.STARTS:
                there = there & (rows >= low)
            part.store(gl.where(there[:, None], values, gl.zeros_like(values)))
    fence_async_shared()
    barrier()


# --- stores --------------------------------------------------------------------------------------


@gluon.jit
def store_rows(values, ptr, b, h, row, H, GROUP, Sq, rows_of_head, CFG: gl.constexpr):
    """values [64] of queries from `row` on, as lse lies in memory."""
    L: gl.constexpr = values.type.layout
    rows = query_of_row(row, L, CFG)
    gl.store(
        ptr + head_of_row(b * H + h, GROUP, L, CFG).to(gl.int64) * rows_of_head + rows,
        values,
        mask=rows < end_of_row(GROUP, Sq, L, CFG),
    )


@gluon.jit
def store_tile(acc, o_ptr, b, h, row, GROUP, Sq, so_b, so_h, so_s, D_out, dt, CFG: gl.constexpr):
    """64 rows of the output, queries from `row` on, in pieces of 16 bytes; with SPLIT in float32, of
    which four lanes of the accumulator have a sector."""
    D: gl.constexpr = acc.shape[1]
    out = acc
    if not CFG.SPLIT:
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
    c: gl.constexpr, buffers, output, items, q, q_regs, z, x, b, h, row, n, part, r, NT, keys, offset,
    scale_log2, given, kslot, kphase, vslot, vphase, CFG: gl.constexpr,
):  # fmt: skip
    """Attend with this consumer's rows of its r-th work item, counted from 1, to its n key tiles; x:
    raw scores of the rightmost tile.  Returns those of the next item, where the rings are then and, if
    DYNAMIC, the next item."""
    ks, vs, q_full, k_full, v_full = buffers
    work_table, total, BH, HG, parts, all_keys, diagonal = items
    o_ptr, lse_ptr, H, GROUP, Sq, so_b, so_h, so_s, D_out = output
    BN: gl.constexpr = CFG.BN
    D: gl.constexpr = CFG.D
    O: gl.constexpr = accumulator(D)
    A: gl.constexpr = left_operand(O)
    dt: gl.constexpr = vs.dtype
    KIND: gl.constexpr = CFG.KIND
    WIDTH: gl.constexpr = BN // 2 if CFG.SKIP else BN
    rows_of_head = Sq
    b, first, token, _, Sq, keys, offset, low = sequence_at(
        b, row - CFG.CQ * c, Sq, keys, offset, given, CFG
    )
    if CFG.RECORDS:
        row = first + CFG.CQ * c
        o_ptr += token.to(gl.int64) * so_s * 8
    walk = walk_of(b, h, first, NT, keys, offset, given, CFG, part[1], low)
    head = of_head(given, b.to(gl.int64), h.to(gl.int64), Sq, keys, BN, KIND)
    variables = Variables(given, head)
    begin, clear, whole, end = key_ranges(row, keys, offset, given, CFG.CQ, WIDTH, KIND)
    if CFG.SKIP:
        end = gl.where(row < Sq, end, 0)
    if CFG.STARTS:
        clear = gl.maximum(clear, gl.cdiv(low, BN))
    ranges = begin, clear, whole, end, low
    shift = gl.full([64, 4], UNSEEN, gl.float32, lanes())
    l = gl.zeros([64, 4], gl.float32, lanes())
    top = gl.full([64, 4], -float("inf"), gl.float32, lanes()) if KIND.MAX_SCORE else l
    state = shift, l, top
    acc = gl.zeros([64, D], gl.float32, O)
    bar_arrive(CFG.KB + kslot, CFG.ALL)
    if n == 1:
        static_arrive(CFG.QB + c, CFG.TWO)
    kslot, kphase = advance(kslot, kphase, CFG.KS)
    mbarrier.wait(k_full.index(kslot), kphase)
    if CFG.RECORDS:
        j = tile_at(n - 1, walk, CFG)
        if (j + 1) * BN > keys:
            mbarrier.wait(v_full.index(vslot), vphase)
            clear_values(matrix(vs.index(vslot), BN, D), keys - j * BN, CFG)
    if CFG.OVERLAP:
        j = tile_at(n - 1, walk, CFG)
        state, p, _ = take_scores(
            state, x, j, row, ranges, keys, offset, scale_log2, variables, dt, True, CFG
        )
        mbarrier.wait(v_full.index(vslot), vphase)
    for i in range(0, n - 1):
        if not CFG.OVERLAP:
            j = tile_at(n - 1 - i, walk, CFG)
            state, p, alpha = take_scores(
                state, x, j, row, ranges, keys, offset, scale_log2, variables, dt, True, CFG
            )
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
            j = tile_at(n - 2 - i, walk, CFG)
            state, p, alpha = take_scores(
                state, x, j, row, ranges, keys, offset, scale_log2, variables, dt, CFG.MASKS, CFG
            )
            mbarrier.wait(v_full.index(vslot), vphase)
        acc = warpgroup_mma_wait(0, deps=(acc,))
        bar_arrive(CFG.VB + used, CFG.ALL)
        if CFG.OVERLAP:
            acc = rescaled(acc, alpha)
    if not CFG.OVERLAP:
        j = tile_at(0, walk, CFG)
        state, p, alpha = take_scores(
            state, x, j, row, ranges, keys, offset, scale_log2, variables, dt, True, CFG
        )
        mbarrier.wait(v_full.index(vslot), vphase)
        acc = rescaled(acc, alpha)
    if CFG.STARTS:
        j = tile_at(0, walk, CFG)
        if j * BN < low:
            clear_values(matrix(vs.index(vslot), BN, D), BN, CFG, low - j * BN)
    # The last P V of this work item, and behind it the first scores of the next one.
    pingpong_wait(c, CFG)
    acc = warpgroup_mma(unpack_halves(p, A, dt), matrix(vs.index(vslot), BN, D), acc, is_async=True)
    mbarrier.wait(q_full.index(c), r & 1)
    q_regs = queries_in_registers(q, CFG)
    x = scores(q, q_regs, ks, kslot, z, CFG)
    pingpong_signal(c, CFG)
    following = 0, 0, 0, 0, 0
    if CFG.DYNAMIC:
        t = get_item(work_table, r)
        b1, h1, row1, n1, _ = tile_of(
            within(t, total, CFG), NT, H, BH, HG, parts, all_keys, diagonal, given, CFG
        )
        following = t, b1, h1, row1, n1
    shift, l, top = state
    R: gl.constexpr = gl.SliceLayout(1, z.type.layout)
    if KIND.SINKS and not CFG.SPLIT:  # of parts, the merge takes it in
        sink = variables.head.sink
        if CFG.PACK > 1:
            there = end_of_row(GROUP, 1, R, CFG) > 0
            sink = gl.load(given.sinks + head_of_row(h, GROUP, R, CFG), there, 0.0).to(gl.float32)
        lse, normaliser = softmax_with_sink(shift, l, sink, R)
    else:
        lse, normaliser = softmax_finish(shift, l, R)
    entry = b
    if CFG.SPLIT:
        entry, _ = part
        lse = gl.where(entry < 0, -float("inf"), lse)
        entry = gl.maximum(entry, ~entry)
        if CFG.CACHE:
            entry += b * parts
    store_rows(lse, lse_ptr + token, entry, h, row, H, GROUP, Sq, rows_of_head, CFG)
    if KIND.MAX_SCORE:
        top = gl.convert_layout(gl.max(top, 1), R) * (scale_log2 * LN2)
        store_rows(top, given.max_score + token, b, h, row, H, GROUP, Sq, rows_of_head, CFG)
    acc = warpgroup_mma_wait(1, deps=(acc,))
    bar_arrive(CFG.VB + vslot, CFG.ALL)
    vslot, vphase = advance(vslot, vphase, CFG.VS)
    acc = acc * gl.convert_layout(normaliser, gl.SliceLayout(1, O))[:, None]
    store_tile(acc, o_ptr, entry, h, row, GROUP, Sq, so_b, so_h, so_s, D_out, dt, CFG)
    x = warpgroup_mma_wait(0, deps=(x,))
    return x, q_regs, kslot, kphase, vslot, vphase, following


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
        work_table, total, NT, H, GROUP, BH, HG, parts, Sq, Sk, offset, so_b, so_h, so_s, D_out,
        scale_log2, given, more_qs, more_ks,
    ) = args  # fmt: skip
    BN: gl.constexpr = CFG.BN
    S: gl.constexpr = accumulator(BN)
    z = gl.zeros([64, BN], gl.float32, S)
    q = matrix(qs.index(c), 64, CFG.D), 0
    ks = ks, more_ks
    if CFG.MORE:
        q = q[0], matrix(more_qs.index(c), 64, CFG.MORE)
    if CFG.PRODUCERS == 1 and c == 0:
        make_mbarriers(q_full, k_full, v_full, CFG)
    static_sync(CFG.KB, CFG.ALL)
    buffers = ks, vs, q_full, k_full, v_full
    output = o_ptr, lse_ptr, H, GROUP, Sq, so_b, so_h, so_s, D_out

    r = 0
    total, NT = items_of(total, NT, BH, given, CFG)
    t = first_item(work_table, total, CFG)
    if not CFG.DYNAMIC:
        following = work_index(1, work_table, total, CFG)
    b, h, row0, n, part = tile_of(t, NT, H, BH, HG, parts, Sk, offset, given, CFG)
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
        if not CFG.DYNAMIC:
            # Work out early where the next item is: the divisions would hold up the last product.
            t = following
            b1, h1, row1, n1, part1 = tile_of(
                within(t, total, CFG), NT, H, BH, HG, parts, keys, offset, given, CFG
            )
            if t < total:
                following = work_index(r + 1, work_table, total, CFG)
        items = work_table, total, BH, HG, parts, keys, offset
        if CFG.IDLE and c > 0:
            if row < Sq:
                x, _, kslot, kphase, vslot, vphase, _ = attend(
                    c, buffers, output, items, q, q_regs, z, x, b, h, row, n, part, r, NT, keys, offset,
                    scale_log2, given, kslot, kphase, vslot, vphase, CFG,
                )  # fmt: skip
            else:
                x, kslot, kphase, vslot, vphase = skip_item(
                    c, ks, q_full, k_full, v_full, q, z, n, r, kslot, kphase, vslot, vphase, CFG
                )
        else:
            x, q_regs, kslot, kphase, vslot, vphase, taken = attend(
                c, buffers, output, items, q, q_regs, z, x, b, h, row, n, part, r, NT, keys, offset,
                scale_log2, given, kslot, kphase, vslot, vphase, CFG,
            )  # fmt: skip
            if CFG.DYNAMIC:
                t, b1, h1, row1, n1 = taken
        b = b1
        h = h1
        row0 = row1
        n = n1
        if CFG.SPLIT:
            part = part1
    # ptxas sees through neither of the two ways to exit.  The first lets it keep a word more in
    # registers with four consumers, and gives the causal loop of head_dim 128 the better order.  It
    # also compiles 1 to 1.5 seconds faster with an exit: MLIR's canonicalizer asks again and again if
    # the body has effects, from its last block backwards, and would read past the epilogue to a store.
    if CFG.W == 4 or (CFG.D == 128 and CFG.KIND.CAUSAL):
        exit_threads_if(t, total)
    else:
        exit_threads()
