"""Attention backward on Hopper, in Gluon: TMA, asynchronous wgmma, warp specialisation.

    q, out, dout, dq [B, Hq, Sq, D], k, v, dk, dv [B, Hkv, Sk, D], lse, dlse [B, Hq, Sq]
    D: head_dim padded to 64, 128 or 256; BM queries and BN keys a tile

With P = exp(scale Q K^T - lse), dP = dO V^T, dS = P * (dP - delta), delta = rowsum(dO * O) - dlse:

    dV = P^T dO        dK = scale dS^T Q        dQ = scale dS K

There are three launches:

    preprocess     lse in base 2 and delta, one after the other for each tile of queries
    main kernel    dK, dV, and the sums of dQ.  A work item is a key tile and the query tiles of every
                   query head of its group, so dK and dV are summed in registers
    postprocess    the sums of dQ to the output

The last two are dependent launches (dependent_launches.py): each begins while the one before it ends.
Without a mask the postprocess begins even earlier: where programs of the last round have no work left,
with heads whose items are all counted as finished (CFG.COUNTED).  It waits for each head's count.

The main kernel has one program a multiprocessor, which takes items one after another:

    producer   keeps Q, lse and delta, and dO in two buffers each, K and V in one or two; it also
               issues the bulk adds of dQ from shared memory, where there are any
    consumers  two warpgroups; each owns 64 keys and all columns of its dK and dV

Scores are computed transposed, with keys in rows: S^T = K Q^T, dP^T = V dO^T [64, BM].  So P^T and dS^T
feed dV and dK from registers.  dS also goes to shared memory, where each warpgroup reads what both
wrote to make its half of dQ.  lse and delta are subtracted by products too: see `product_with_term`.
At head_dim 128 half of the left operand of one product stays in registers: see consumer.  At 256
registers allow only 64 keys: see wide_consumer.  At 64 they allow 256 in all: see
attention_backward_pairs.py.  Where queries and keys have MORE columns than values, 192 and 128: see
attention_backward_wider_keys.py.

A buffer is full when its mbarrier has counted the bytes that TMA brought.  It is empty when both
consumers have arrived at its named barrier.  The configuration lists the named barriers
(HopperBackward.BARRIERS).

The steps of all items are one sequence, in which the producer is two ahead.  While the consumers store
dK and dV of one item, K, V, Q and dO of the next arrive.  The consumers look one step ahead without
asking whether there is one: phantoms of no bytes follow the last item.

K and V are indexed by a zero made of the step's number (`it >> 30`).  Otherwise ptxas works out the
matrix descriptors of K and V before the loop and keeps them in registers that are not there.  At
head_dim 64 it would keep those of two products in five.

dQ is summed over key tiles by float32 adds, which are half of this kernel's traffic.  The first key
tile stores its part, so that nobody has to write zeros before, and the others wait for it (CFG.FIRST).
By default they add in no fixed order, so the last bits of dQ differ from run to run (those of dK and dV
do not).  In order (CFG.ORDERED) they are the same bits every time, for a wait here and there.

Sequences side by side (KIND.VARLEN; B = 1, their tokens in the place of Sq and Sk):

    work       An item has keys of one sequence.  key_slots_kernel and order_kernel of schedule.py note
               on the device, before the preprocess, what each is and how many there are, those that
               visit most queries first.  Programs may find that there is none for them.
    queries    Sequence s has the query tiles from cu_seqlens[s] // BM + s on, so that a tile has rows
               of one sequence and the others have no query: the sums of dQ, lse and delta are laid out
               so, T // BM + sequences + 1 tiles for each head, whatever the lengths are.
    TMA        Boxes of Q, dO, K and V have zeros past the end of the sequence, whatever lies there, as
               they have past the end of a tensor (boxes_of_heads of ops/attention_hopper.py).  So the
               consumers need no other masks.
    zeros      Keys that no query sees have an item, which stores zeros: those of a sequence without
               queries, and those behind the last sequence.  Queries without keys keep the zeros with
               which their sums begin.

The files beside this one: attention_backward_work.py says which program does what when, and why waiting
in order cannot deadlock; _consumers.py and _pairs.py have the consumers, _masks.py their masks;
_sums.py says how dQ leaves, and what keeps its order; _rows.py has the launches before and after.

Sources: Dao, "FlashAttention-2" (2023), algorithm 2; Shah et al., "FlashAttention-3" (2024), appendix
B.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier, tma

from .attention_backward_consumers import consumer, wide_consumer
from .attention_backward_pairs import pair_consumer
from .attention_backward_rows import COLUMNS, store_selector
from .attention_backward_sums import (
    count_item,
    release_dq_buffer,
    release_dq_turn,
    send_tile,
    wait_for_dq_turn,
)
from .attention_backward_work import (
    BOUND,
    PENDING,
    dq_rank,
    first_head,
    first_item,
    first_tile,
    key_tile,
    key_tiles,
    listed_steps,
    listed_tile,
    next_tile,
    numbered,
    rows_at,
)
from .dependent_launches import let_next_begin, wait_for_launch_before
from .gluon_names import tma_load
from .items import put_item, take_item
from .warpgroups import bar_sync, exit_threads, static_sync

# --- the producer --------------------------------------------------------------------------------


@gluon.jit
def load_rows(desc, b, h, row, stop, count, full, to, CFG: gl.constexpr, COLUMN: gl.constexpr = 0):
    """Fetch a head's rows from `row` on and columns from COLUMN on, with zeros past the end.

    Of sequences, rows are those of one, and its `count` rows end at token `stop`: see boxes_of_heads of
    ops/attention_hopper.py.
    """
    KIND: gl.constexpr = CFG.KIND
    if KIND.VARLEN:
        tma_load(desc, [BOUND, stop, h, BOUND - count + row, COLUMN], full, to)
    else:
        tma_load(desc, [b, h, row, COLUMN], full, to)


@gluon.jit
def load_q(
    q_descs,
    lse_delta_desc,
    b,
    h,
    m,
    stop,
    count,
    H,
    M,
    full,
    qs,
    slot,
    lse_delta,
    more,
    CFG: gl.constexpr,
):
    """Fetch the queries of one tile, and their lse and delta; a phantom of no bytes at the end.

    q_descs, qs: pairs, of D columns and, with MORE, as many more.
    """
    if more:
        mbarrier.expect(full, CFG.BM * (CFG.D + CFG.MORE + COLUMNS) * 2)
        load_rows(q_descs[0], b, h, m * CFG.BM, stop, count, full, qs[0].index(slot), CFG)
        if CFG.MORE:
            to = qs[1].index(slot)
            load_rows(q_descs[1], b, h, m * CFG.BM, stop, count, full, to, CFG, CFG.D)
        tma_load(lse_delta_desc, [((b * H + h) * M + m) * CFG.BM, 0], full, lse_delta)
    else:
        mbarrier.expect(full, 0)


@gluon.jit
def load_do(do_desc, b, h, m, stop, count, full, do, more, CFG: gl.constexpr):
    if more:
        mbarrier.expect(full, CFG.BM * CFG.D * 2)
        load_rows(do_desc, b, h, m * CFG.BM, stop, count, full, do, CFG)
    else:
        mbarrier.expect(full, 0)


@gluon.jit
def load_keys(
    k_descs,
    v_desc,
    t,
    r,
    ks,
    vs,
    k_full,
    v_full,
    NB,
    M,
    Hk,
    GROUP,
    BH,
    HG,
    offset,
    given,
    CFG: gl.constexpr,
):
    """Fetch keys and values of item t, the program's r-th; k_descs, ks: pairs as in load_q."""
    at = r % CFG.KV
    if t < NB * BH:
        b, h, col, _, _, _ = key_tile(t, NB, M, Hk, GROUP, BH, HG, offset, given, CFG)
        b, _, _, stop, count = rows_at(b, given, CFG)
        mbarrier.expect(k_full.index(at), CFG.BN * (CFG.D + CFG.MORE) * 2)
        load_rows(k_descs[0], b, h, col, stop, count, k_full.index(at), ks[0].index(at), CFG)
        if CFG.MORE:
            to = ks[1].index(at)
            load_rows(k_descs[1], b, h, col, stop, count, k_full.index(at), to, CFG, CFG.D)
        mbarrier.expect(v_full.index(at), CFG.BN * CFG.D * 2)
        load_rows(v_desc, b, h, col, stop, count, v_full.index(at), vs.index(at), CFG)
    else:
        mbarrier.expect(k_full.index(at), 0)


@gluon.jit
def make_mbarriers(k_full, v_full, q_full, do_full, CFG: gl.constexpr):
    """Make the mbarriers ready; by the first partition, for which the others wait."""
    KV: gl.constexpr = CFG.KV
    for i in gl.static_range(KV):
        mbarrier.init(k_full.index(i), count=1)
        mbarrier.init(v_full.index(i), count=1)
    for i in gl.static_range(2):
        mbarrier.init(q_full.index(i), count=1)
        mbarrier.init(do_full.index(i), count=1)


@gluon.jit
def producer(args, CFG: gl.constexpr):
    """Bring every tile, and send dQ away, in the order in which the consumers meet them.

    Steps are counted through all work items.  The tiles of step g replace those of step g - 2, whose dQ
    leaves meanwhile.  In the two steps after the last item nothing comes.
    """
    (
        q_descs, do_desc, k_descs, v_desc, lse_delta_desc, dq_desc, turns_ptr, qs, dos, ks, vs,
        lse_deltas, stages, selector, k_full, v_full, q_full, do_full, NB, M, H, GROUP,
        BH, HG, offset, given,
    ) = args  # fmt: skip
    # steps after the last item that still need a buffer for dQ: in pairs each of the last two steps has
    # its own
    LEFT: gl.constexpr = 0 if CFG.PAIRS else 1
    KIND: gl.constexpr = CFG.KIND
    total = NB * BH
    make_mbarriers(k_full, v_full, q_full, do_full, CFG)
    if CFG.SELECTOR:
        store_selector(selector)
    fence_async_shared()
    wait_for_launch_before()
    if KIND.VARLEN:  # which launches before have counted
        total = key_tiles(NB, given, CFG) * BH
    static_sync(CFG.OB, 384)
    g = 0
    r = 0  # items whose keys have been asked for
    taken = 0  # items whose numbers have been written
    # the query tiles and dq_ranks of the last two steps; `began`: the last step's item if that step was
    # its first one, else -1
    tile1, tile2 = 0, 0
    dq_rank1, dq_rank2 = 0, 0
    began = -1
    head, head1 = -1, -1  # key heads of the last two items
    turn = first_item(turns_ptr, CFG)
    t = numbered(turn, total, NB, H // GROUP, GROUP, BH, HG, M, given, CFG)
    if t < total:
        release_dq_buffer(0, CFG)
    more = 1
    while more == 1:
        more = gl.where(t < total, 1, 0)
        b, hk, col, m0, m1, up = key_tile(
            gl.minimum(t, total - 1), NB, M, H // GROUP, GROUP, BH, HG, offset, given, CFG
        )
        b, stop, count, _, _ = rows_at(b, given, CFG)
        n = col // CFG.BN
        h0 = hk * GROUP
        h1 = first_head(h0, col, GROUP, CFG)
        h = h1
        start = first_tile(col, m0, M, up, CFG)
        m = start
        put_item(turns_ptr, taken, t)
        taken += 1
        if (turn if KIND.TABLE else t) >= total - gl.num_programs(0):
            let_next_begin()
        if CFG.COUNTED:
            if head1 >= 0:
                count_item(turns_ptr, head1, PENDING, CFG)
            head, head1 = b * (H // GROUP) + hk, head
        steps = (m1 - m0) * GROUP
        if KIND.TABLE:
            steps = listed_steps(b, h0, n, NB, M, GROUP, given)
        cnt = gl.where(more == 1, steps, 2)
        for j in range(cnt):
            slot = g & 1
            at = m
            if KIND.TABLE:
                at, m1 = listed_tile(b, h, n, m, NB, M, given)
            begins = gl.where((j == 0) & (g > 0), t, -1)
            item = begins if CFG.KV == 2 else began  # whose keys may come now
            if g >= 2:
                bar_sync(CFG.OB + slot, 384)
                load_do(
                    do_desc,
                    b,
                    h,
                    at,
                    stop,
                    count,
                    do_full.index(slot),
                    dos.index(slot),
                    more == 1,
                    CFG,
                )
                # dQ is ready before Q is free.  In order, others wait for its adds; otherwise the adds
                # would only hold up the queries.
                if CFG.ORDERED:
                    send_tile(g - 2, tile2, dq_rank2, dq_desc, stages, CFG)
                bar_sync(CFG.QB + slot, 384)
                if CFG.DQ == 0:
                    release_dq_turn(turns_ptr, tile2, dq_rank2, CFG)
                load_q(
                    q_descs,
                    lse_delta_desc,
                    b,
                    h,
                    at,
                    stop,
                    count,
                    H,
                    M,
                    q_full.index(slot),
                    qs,
                    slot,
                    lse_deltas.index(slot),
                    more == 1,
                    CFG,
                )
                if not CFG.ORDERED:
                    send_tile(g - 2, tile2, dq_rank2, dq_desc, stages, CFG)
            else:
                if g == 0:
                    item = t
                load_q(
                    q_descs,
                    lse_delta_desc,
                    b,
                    h,
                    at,
                    stop,
                    count,
                    H,
                    M,
                    q_full.index(slot),
                    qs,
                    slot,
                    lse_deltas.index(slot),
                    more == 1,
                    CFG,
                )
                load_do(
                    do_desc,
                    b,
                    h,
                    at,
                    stop,
                    count,
                    do_full.index(slot),
                    dos.index(slot),
                    more == 1,
                    CFG,
                )
            # The last step of an item gives back its keys with its queries.
            if item >= 0:
                load_keys(
                    k_descs,
                    v_desc,
                    item,
                    r,
                    ks,
                    vs,
                    k_full,
                    v_full,
                    NB,
                    M,
                    H // GROUP,
                    GROUP,
                    BH,
                    HG,
                    offset,
                    given,
                    CFG,
                )
                r += 1
            if CFG.PAIRS:
                if (g == 1) & (more == 1):
                    release_dq_buffer(1, CFG)
            if (more == 1) | (j < LEFT):
                if g >= 2:
                    release_dq_buffer(g, CFG)
            if (more == 1) | (j < 1):
                if g >= 1:
                    # of step g - 1, with all that it and the next one read under way
                    wait_for_dq_turn(turns_ptr, tile1, dq_rank1, CFG)
            if CFG.DQ:
                if g >= 2:
                    release_dq_turn(turns_ptr, tile2, dq_rank2, CFG)
            tile1, tile2 = (b * H + h) * M + at, tile1
            dq_rank1, dq_rank2 = dq_rank(at, n, up, NB, M, offset, CFG), dq_rank1
            began = begins
            g += 1
            h, m = next_tile(h, m, h0, h1, m0, m1, start, up, GROUP, CFG)
            if KIND.TABLE:  # whose list is read behind the last step too
                h = gl.minimum(h, h0 + GROUP - 1)
        if more == 1:
            turn = take_item(turns_ptr, not CFG.FIRST)
            t = numbered(turn, total, NB, H // GROUP, GROUP, BH, HG, M, given, CFG)
    if CFG.COUNTED:
        if head1 >= 0:
            count_item(turns_ptr, head1, 0, CFG)
    elif CFG.DQ:
        tma.store_wait(0)
    exit_threads()


# --- the main kernel -----------------------------------------------------------------------------

VARYING = (
    "NB",
    "M",
    "H",
    "GROUP",
    "BH",
    "HG",
    "Sk",
    "offset",
    "s_b",
    "s_h",
    "s_s",
    "D_out",
    "v_b",
    "v_h",
    "v_s",
    "D_v",
)


@gluon.jit(do_not_specialize=VARYING)
def attention_backward_kernel(
    q_desc,
    do_desc,
    k_desc,
    v_desc,  # TMA boxes [1, 1, BM, D] and [1, 1, BN, D], of sequences [1, 1, 1, BM or BN, D]
    lse_delta_desc,  # boxes [BM, 16]: lse and delta, as the preprocess leaves them
    dq_desc,
    dq_ptr,  # float32 sums of dQ, as boxes [128, 32] and as a pointer
    turns_ptr,  # counters and numbers of items, see attention_backward_work.py
    dk_ptr,
    dv_ptr,
    NB,
    M,  # key tiles of a key head, query tiles of a query head
    H,
    GROUP,  # query heads, query heads a key head
    BH,
    HG,  # B * key heads; of which the tiles of HG at a time are mixed
    Sk,
    offset,  # query i sees key j <= i + offset
    s_b,
    s_h,
    s_s,  # strides of dk and of dv, in units of 8 elements
    D_out,  # head_dim as it is in memory, a multiple of 8
    scale,
    scale_log2,  # of the scores, and times log2(e)
    given,  # of the variant, see scores.py
    CFG: gl.constexpr,  # HopperBackward
    more_q_desc=None,
    more_k_desc=None,  # boxes of 64 columns of q and k if MORE
    v_b=None,
    v_h=None,
    v_s=None,
    D_v=None,  # strides of dv and head_dim of values if MORE, else as those of dk
):
    BM: gl.constexpr = CFG.BM
    BN: gl.constexpr = CFG.BN
    D: gl.constexpr = CFG.D
    KV: gl.constexpr = CFG.KV
    dt: gl.constexpr = q_desc.dtype
    if CFG.KIND.VARLEN:
        qs = gl.allocate_shared_memory(dt, [2, 1, 1, 1, BM, D], q_desc.layout)
        dos = gl.allocate_shared_memory(dt, [2, 1, 1, 1, BM, D], do_desc.layout)
        ks = gl.allocate_shared_memory(dt, [KV, 1, 1, 1, BN, D], k_desc.layout)
        vs = gl.allocate_shared_memory(dt, [KV, 1, 1, 1, BN, D], v_desc.layout)
    else:
        qs = gl.allocate_shared_memory(dt, [2, 1, 1, BM, D], q_desc.layout)
        dos = gl.allocate_shared_memory(dt, [2, 1, 1, BM, D], do_desc.layout)
        ks = gl.allocate_shared_memory(dt, [KV, 1, 1, BN, D], k_desc.layout)
        vs = gl.allocate_shared_memory(dt, [KV, 1, 1, BN, D], v_desc.layout)
    more_qs = 0
    more_ks = 0
    if CFG.MORE:
        if CFG.KIND.VARLEN:
            more_qs = gl.allocate_shared_memory(dt, [2, 1, 1, 1, BM, CFG.MORE], more_q_desc.layout)
            more_ks = gl.allocate_shared_memory(dt, [KV, 1, 1, 1, BN, CFG.MORE], more_k_desc.layout)
        else:
            more_qs = gl.allocate_shared_memory(dt, [2, 1, 1, BM, CFG.MORE], more_q_desc.layout)
            more_ks = gl.allocate_shared_memory(dt, [KV, 1, 1, BN, CFG.MORE], more_k_desc.layout)
    lse_deltas = gl.allocate_shared_memory(gl.bfloat16, [2, BM, COLUMNS], lse_delta_desc.layout)
    dss = gl.allocate_shared_memory(
        dt, [CFG.TILES, BN, BM], gl.NVMMASharedLayout.get_default_for([BN, BM], dt)
    )
    if CFG.SELECTOR:
        L: gl.constexpr = gl.NVMMASharedLayout.get_default_for([64, COLUMNS], gl.bfloat16)
        selector = gl.allocate_shared_memory(gl.bfloat16, [2, 64, COLUMNS], L)
    else:
        selector = 0
    if CFG.ITEM_IN_SMEM:
        stashes = gl.allocate_shared_memory(gl.int32, [2, 1], gl.SwizzledSharedLayout(1, 1, 1, [0]))
        stash0, stash1 = stashes.index(0), stashes.index(1)
    else:
        stash0, stash1 = 0, 0
    if CFG.DQ:
        stages = gl.allocate_shared_memory(
            gl.float32, [2 if CFG.DQ == 1 else 1, 128, 32], dq_desc.layout
        )
    else:
        stages = 0
    ML: gl.constexpr = mbarrier.MBarrierLayout()
    k_full = gl.allocate_shared_memory(gl.int64, [KV, 1], ML)
    v_full = gl.allocate_shared_memory(gl.int64, [KV, 1], ML)
    q_full = gl.allocate_shared_memory(gl.int64, [2, 1], ML)
    do_full = gl.allocate_shared_memory(gl.int64, [2, 1], ML)
    produce = (
        (q_desc, more_q_desc), do_desc, (k_desc, more_k_desc), v_desc, lse_delta_desc, dq_desc,
        turns_ptr, (qs, more_qs), dos, (ks, more_ks), vs,
        lse_deltas, stages, selector, k_full, v_full, q_full, do_full, NB, M, H, GROUP,
        BH, HG, offset, given,
    )  # fmt: skip
    consume = (
        dk_ptr, dv_ptr, dq_ptr, turns_ptr, qs, dos, ks, vs, lse_deltas, dss, stages,
        k_full, v_full, q_full, do_full,
        NB, M, H, GROUP, BH, HG, Sk, offset, s_b, s_h, s_s, D_out, scale, scale_log2,
        given,
    )  # fmt: skip
    more = more_qs, more_ks, v_b, v_h, v_s, D_v
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
    elif CFG.PAIRS:
        gl.warp_specialize(
            [
                (producer, (produce, CFG)),
                (pair_consumer, (gl.constexpr(0), consume, CFG)),
                (pair_consumer, (gl.constexpr(1), consume, CFG)),
            ],
            [4, 4],
            [240, 240],
        )
    else:
        gl.warp_specialize(
            [
                (producer, (produce, CFG)),
                (consumer, (gl.constexpr(0), selector, stash0, consume, more, CFG)),
                (consumer, (gl.constexpr(1), selector, stash1, consume, more, CFG)),
            ],
            [4, 4],
            [240, 240],
        )
