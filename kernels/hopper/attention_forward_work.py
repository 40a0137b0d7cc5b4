"""The Hopper forward's work items, and the producer, which brings their tiles.

A work item is the queries of one tile of one head or, with PACK > 1, those of all query heads of a key
head; with SPLIT, these and one part of their key tiles.  attention_forward.py says what is done with
it, and explains the names used here.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier

from ..schedule import LIST, RECORD, first_tiles, key_ranges
from .gluon_names import reinterpreted, tma_load
from .items import item_of_lists, put_item, take_item
from .warpgroups import bar_sync, exit_threads, opaque_zero, static_sync

MOST_PAGES = gl.constexpr(2**30)  # more than a cache has

# --- rings and work items ------------------------------------------------------------------------


@gluon.jit
def advance(slot, phase, DEPTH: gl.constexpr):
    """The next slot of a ring of DEPTH buffers, and its parity."""
    slot += 1
    wrap = slot == DEPTH
    return gl.where(wrap, 0, slot), gl.where(wrap, phase ^ 1, phase)


@gluon.jit
def quotient(a, b):
    """a // b of int32 that are not negative, in half of the instructions of a signed division."""
    return (a.to(gl.uint32) // b.to(gl.uint32)).to(gl.int32)


@gluon.jit
def work_index(r, work_table, total, CFG: gl.constexpr):
    """This program's r-th work item, `total` when there is none.  It comes from work_table [rounds,
    programs] if there is one; otherwise it is every num_programs-th item.  If DYNAMIC only the first
    is known so."""
    if CFG.HAS_WORK_TABLE:
        return gl.load(work_table + r * gl.num_programs(0) + gl.program_id(0))
    else:
        return gl.minimum(r * gl.num_programs(0) + gl.program_id(0), total)


@gluon.jit
def next_item(r, work_table, total, CFG: gl.constexpr):
    """work_index for the producer, who takes it where work_table is what items.py counts with."""
    if CFG.DYNAMIC:
        return gl.minimum(take_item(work_table, True), total)
    else:
        return work_index(r, work_table, total, CFG)


@gluon.jit
def within(t, total, CFG: gl.constexpr):
    """t, or the last work item where there is none, if what tile_of reads of it is in memory."""
    if CFG.KIND.LISTS or CFG.RECORDS:
        return gl.minimum(t, total - 1)
    else:
        return t


@gluon.jit
def first_item(work_table, total, CFG: gl.constexpr):
    """work_index of the first round.  Where sequences have fewer items than there are programs, some
    take the last one too, and write the same."""
    return within(work_index(0, work_table, total, CFG), total, CFG)


@gluon.jit
def items_of(total, NT, BH, given, CFG: gl.constexpr):
    """(total, NT): how many work items and query tiles of a head there are; of sequences the device
    knows."""
    if CFG.RECORDS:
        NT = gl.load(given.work)
        return NT * BH, NT
    else:
        return total, NT


@gluon.jit
def sequence_at(b, row, Sq, Sk, offset, given, CFG: gl.constexpr):
    """What tile_of called `row` as (batch, first query, token, key, Sq, Sk, offset, low); token, key:
    where the sequence begins.  Of a cache, key: its row there, or of the page table; low: its first key
    that counts."""
    if CFG.RECORDS:
        record = given.work + (1 + row) * RECORD
        row, token = gl.load(record + 1), gl.load(record + 2)
        Sq, key, Sk = gl.load(record + 3), gl.load(record + 4), gl.load(record + 5)
        low = 0
        if CFG.CACHE:
            b, low = gl.load(record + 6), gl.load(record + 7)
        return b, row, token, key, Sq, Sk, offset + Sk - Sq, low
    else:
        return b, row, 0, 0, Sq, Sk, offset, 0


@gluon.jit
def line_of(b, h, tile, NT, Sk, given, CFG: gl.constexpr):
    """Where visits_kernel has the line of a query tile, of NT of a head."""
    if CFG.KIND.TABLE:
        row = b * given.table_of_batch + h * given.table_of_head
    else:
        row = b * given.row_of_batch + h * given.row_of_head
    return given.work + (row * NT + tile).to(gl.int64) * (LIST + gl.cdiv(Sk, CFG.BN))


@gluon.jit
def walk_of(b, h, row, NT, Sk, offset, given, CFG: gl.constexpr, skipped=0, low=0):
    """Which key tiles a work item with queries from `row` on visits, for tile_at.

    Of a band (first, jump): the tiles before `first`, and those from first + jump on, up to the end of
    key_ranges.  Of intervals or a table: where the list of visits_kernel begins, and nothing.  Behind
    these, with SPLIT, how many of them are `skipped`, since they are in parts to the left.  low: of a
    cache, the first key that counts.
    """
    KIND: gl.constexpr = CFG.KIND
    if KIND.LISTS:
        return line_of(b, h, row // CFG.BQ, NT, Sk, given, CFG) + LIST, 0, skipped
    elif CFG.CACHE:
        begin, _, _, _ = key_ranges(row, Sk, offset, given, CFG.BQ, CFG.BN, KIND)
        return 0, gl.maximum(begin, low // CFG.BN), skipped
    elif KIND.WINDOW:
        begin, _, _, _ = key_ranges(row, Sk, offset, given, CFG.BQ, CFG.BN, KIND)
        first = first_tiles(begin, given, CFG.BN, KIND)
        return first, begin - first, skipped
    else:
        return 0, 0, skipped


@gluon.jit
def tile_at(s, walk, CFG: gl.constexpr):
    """The key tile that has s visited ones to its left; in a list as visits_kernel has it."""
    KIND: gl.constexpr = CFG.KIND
    if CFG.SPLIT:
        s += walk[2]
    if KIND.LISTS:
        return gl.load(walk[0] + s)
    elif KIND.FIRST:
        first, jump, _ = walk
        return gl.where(s < first, s, s + jump)
    elif KIND.WINDOW or CFG.CACHE:
        return s + walk[1]
    else:
        return s


@gluon.jit
def part_of(n, part, parts):
    """Of n key tiles, at least one, those of a part: (how many are to the left of it, how many it has).
    A part may have none; there is a tile to the right of the first number all the same."""
    each = quotient(n, parts)
    more = n - each * parts
    skipped = part * each + gl.minimum(part, more)
    return gl.minimum(skipped, n - 1), gl.where(part < more, each + 1, each)


@gluon.jit
def part_of_cache(n, part, parts, CFG: gl.constexpr):
    """As part_of, where the host knows but the room: parts have LEAST_KEYS keys or more, and so many
    that `parts` suffice, so that those behind the last key have none."""
    each = gl.maximum(quotient(n + parts - 1, parts), CFG.LEAST_KEYS // CFG.BN)
    skipped = part * each
    return gl.minimum(skipped, n - 1), gl.maximum(gl.minimum(n - skipped, each), 0)


@gluon.jit
def tile_of(t, NT, H, BH, HG, parts, Sk, offset, given, CFG: gl.constexpr):
    """Work item t as (batch, head of H, first query, key tiles to visit, at least one, part).  Of
    sequences, instead of the first query, which of the slots in their order it is, for sequence_at.

    part: with SPLIT (entry, skipped), the batch entry of its results, of which there are `parts` for
    each of q, and how many key tiles are in parts to its left.  A part without keys has the entry's
    complement, which is negative, and visits a tile for nothing.  Of a cache, entry: as if q had one.
    """
    BQ: gl.constexpr = CFG.BQ
    KIND: gl.constexpr = CFG.KIND
    if KIND.LISTS and CFG.DYNAMIC:
        bh, mi = item_of_lists(t, NT, BH, HG)
        row = mi * BQ
    elif CFG.HAS_WORK_TABLE or CFG.DYNAMIC or CFG.RECORDS:
        # among HG heads, whose keys and values share L2, the longest items first
        per = HG * NT
        grp = quotient(t, per)
        r = t - grp * per
        hg = gl.maximum(gl.minimum(HG, BH - grp * HG), 1)
        mi = quotient(r, hg)
        bh = grp * HG + (r - mi * hg)
        if CFG.RECORDS:
            row = mi
        elif not KIND.CAUSAL:
            row = mi * BQ
        elif CFG.PROGRAMS > 1:
            row = (NT - 1 - mi) * BQ
        else:
            # NT - 1 would be kept in a register over all tiles.  (With three programs, ptxas of Triton
            # 3.9 spills more this way.)
            row = (NT - mi) * BQ - BQ
    else:
        bh = quotient(t, NT)
        mi = t - bh * NT
        if KIND.CAUSAL and not KIND.LISTS:  # the longest first
            mi = NT - 1 - mi
        row = mi * BQ
    if CFG.RECORDS:
        b, h = 0, bh
        if CFG.SPLIT:
            b = quotient(bh, H)
            h = bh - b * H
        end = gl.load(given.work + (1 + row) * RECORD)
    else:
        _, _, _, end = key_ranges(row, Sk, offset, given, BQ, CFG.BN, KIND)
        if CFG.D == 256:
            b = bh // H  # unsigned, ptxas of Triton 3.9 spills 8 bytes more
        else:
            b = quotient(bh, H)
        h = bh - b * H
    if CFG.SPLIT:
        entry = b
        b = 0 if CFG.CACHE else quotient(entry, parts)
    if KIND.LISTS:
        # in the order of order_lists_kernel
        line = line_of(b, h, mi, NT, Sk, given, CFG)
        row, end = gl.load(line) * BQ, gl.load(line + 1)
    elif KIND.WINDOW and not CFG.RECORDS:
        _, jump, _ = walk_of(b, h, row, NT, Sk, offset, given, CFG)
        end -= jump
    n = gl.maximum(end, 1)
    if CFG.SPLIT:
        if CFG.CACHE:
            skipped, n = part_of_cache(n, entry, parts, CFG)
        else:
            skipped, n = part_of(n, entry - b * parts, parts)
        entry = gl.where(n > 0, entry, ~entry)
        return b, h, row, gl.maximum(n, 1), (entry, skipped)
    else:
        return b, h, row, n, (0, 0)


@gluon.jit
def query_of_row(row, R: gl.constexpr, CFG: gl.constexpr):
    """The queries of a consumer's 64 rows, of which the first is `row`."""
    if CFG.PACK > 1:
        return row + gl.arange(0, 64, R) // CFG.PACK
    else:
        return row + gl.arange(0, 64, R)


@gluon.jit
def head_of_row(h, GROUP, R: gl.constexpr, CFG: gl.constexpr):
    """The query heads of a consumer's 64 rows in a work item of head h."""
    if CFG.PACK > 1:
        return h * GROUP + gl.arange(0, 64, R) % CFG.PACK
    else:
        return h


@gluon.jit
def end_of_row(GROUP, Sq, R: gl.constexpr, CFG: gl.constexpr):
    """Where the queries of a consumer's 64 rows end; at 0 for heads that the group does not have."""
    if CFG.PACK > 1:
        # The compiler must not know that the group stays the same: see store_tile of
        # attention_forward_consumers.py.
        return gl.where(gl.arange(0, 64, R) % CFG.PACK < GROUP + opaque_zero(), Sq, 0)
    else:
        return Sq


# --- mbarriers -----------------------------------------------------------------------------------


@gluon.jit
def make_mbarriers(q_full, k_full, v_full, CFG: gl.constexpr):
    """Make the mbarriers ready; by the first partition, for which the others wait."""
    W: gl.constexpr = CFG.W
    KS: gl.constexpr = CFG.KS
    VS: gl.constexpr = CFG.VS
    for i in gl.static_range(W):
        mbarrier.init(q_full.index(i), count=1)
    for i in gl.static_range(KS):
        mbarrier.init(k_full.index(i), count=1)
    for i in gl.static_range(VS):
        mbarrier.init(v_full.index(i), count=1)
    fence_async_shared()


# --- the producer --------------------------------------------------------------------------------


@gluon.jit
def part_at(buffers, slot, CFG: gl.constexpr):
    """Of buffers with MORE columns the one in a slot, 0 where there are none."""
    if CFG.MORE:
        return buffers.index(slot)
    else:
        return 0


@gluon.jit
def load_tile(
    desc,
    b,
    h,
    col,
    keys,
    bar,
    buf,
    given,
    CFG: gl.constexpr,
    more_desc=0,
    more=0,
    MORE: gl.constexpr = 0,
):
    """Fetch a tile of keys or values from key `col` on, of a sequence with so many keys, and MORE
    columns behind its D, to `more`.

    b: batch entry, or row of a cache or of its page table.  A tile in one page is one box.  Else a page
    is a box for each 64 columns, which is how they lie in shared memory; of a page without keys TMA
    brings zeros, since no tensor has a page of that number.
    """
    mbarrier.expect(bar, CFG.BN * (CFG.D + MORE) * 2)
    if CFG.ROLLS:
        room = given.room >> 1
        slot = col - quotient(col, room) * room
    else:
        slot = col
    if CFG.CACHE <= 1:
        tma_load(desc, [b, h, slot, 0], bar, buf)
        if MORE:
            tma_load(more_desc, [b, h, slot, CFG.D], bar, more)
    else:
        PAGE: gl.constexpr = CFG.CACHE
        pages = given.pages + b.to(gl.int64) * (given.page_stride >> 1)
        if PAGE >= CFG.BN:
            page = gl.load(pages + slot // PAGE, col < keys, MOST_PAGES)
            tma_load(desc, [page, h, slot % PAGE, 0], bar, buf)
        else:
            PANELS: gl.constexpr = CFG.D // 64
            EACH: gl.constexpr = CFG.BN // PAGE
            boxes = reinterpreted(buf, [PANELS * EACH, 1, 1, PAGE, 64])
            for i in gl.static_range(EACH):
                at = slot + i * PAGE
                if CFG.ROLLS:
                    at = gl.where(at >= room, at - room, at)
                page = gl.load(pages + at // PAGE, col + i * PAGE < keys, MOST_PAGES)
                for panel in gl.static_range(PANELS):
                    tma_load(desc, [page, h, 0, 64 * panel], bar, boxes.index(panel * EACH + i))


@gluon.jit
def load_v(v_desc, b, h, col, keys, loaded, vslot, vs, v_full, given, CFG: gl.constexpr):
    """Fetch one tile of values when its buffer is empty; returns the next buffer."""
    if loaded > CFG.VS:
        bar_sync(CFG.VB + vslot, CFG.ALL)
    load_tile(v_desc, b, h, col, keys, v_full.index(vslot), vs.index(vslot), given, CFG)
    return gl.where(vslot == CFG.VS - 1, 0, vslot + 1)


@gluon.jit
def load_q(q_desc, b, h, row, bar, buf, more_desc, more, CFG: gl.constexpr):
    """Fetch a consumer's 64 rows, queries from `row` on, and with MORE the columns behind their D to
    `more`."""
    mbarrier.expect(bar, 64 * (CFG.D + CFG.MORE) * 2)
    if CFG.PACK > 1:
        tma_load(q_desc, [b, h, row, 0, 0], bar, buf)
        if CFG.MORE:
            tma_load(more_desc, [b, h, row, 0, CFG.D], bar, more)
    else:
        tma_load(q_desc, [b, h, row, 0], bar, buf)
        if CFG.MORE:
            tma_load(more_desc, [b, h, row, CFG.D], bar, more)


@gluon.jit
def producer(args, CFG: gl.constexpr):
    """Bring every tile in the order in which the consumers wait for them."""
    (
        q_desc, k_desc, v_desc, qs, ks, vs, q_full, k_full, v_full,
        work_table, total, NT, H, GROUP, BH, HG, parts, Sk, offset, given,
        more_q_desc, more_k_desc, more_qs, more_ks,
    ) = args  # fmt: skip
    BN: gl.constexpr = CFG.BN
    W: gl.constexpr = CFG.W
    if CFG.PRODUCERS == 4:
        make_mbarriers(q_full, k_full, v_full, CFG)
    static_sync(CFG.KB, CFG.ALL)
    kslot = 0
    vslot = 0
    loaded = 0
    r = 0
    total, NT = items_of(total, NT, BH, given, CFG)
    t = first_item(work_table, total, CFG)
    b_v = 0
    h_v = 0
    col_v = 0
    keys_v = 0
    while t < total:
        b, h, row, n, part = tile_of(t, NT, H, BH, HG, parts, Sk, offset, given, CFG)
        hk = h if CFG.PACK > 1 else quotient(h, GROUP)
        b, row, token, key, _, keys, diagonal, low = sequence_at(b, row, 0, Sk, offset, given, CFG)
        walk = walk_of(b, h, row, NT, keys, diagonal, given, CFG, part[1], low)
        of_keys = b
        if CFG.CACHE:
            of_keys, key = key, 0
        this = t
        r += 1
        t = next_item(r, work_table, total, CFG)  # early: it takes as long as a tile
        for i in range(n):
            # K is one tile ahead of V, across work items too
            tile = tile_at(n - 1 - i, walk, CFG)
            if CFG.KIND.LISTS:
                tile = tile >> 1
            col = key + tile * BN
            if loaded >= CFG.KS:
                bar_sync(CFG.KB + kslot, CFG.ALL)
            load_tile(
                k_desc,
                of_keys,
                hk,
                col,
                keys,
                k_full.index(kslot),
                ks.index(kslot),
                given,
                CFG,
                more_k_desc,
                part_at(more_ks, kslot, CFG),
                CFG.MORE,
            )
            kslot = gl.where(kslot == CFG.KS - 1, 0, kslot + 1)
            if loaded > 0:
                vslot = load_v(v_desc, b_v, h_v, col_v, keys_v, loaded, vslot, vs, v_full, given, CFG)
            if i == 0:
                if CFG.DYNAMIC:
                    put_item(work_table, r - 1, this)
                for c in gl.static_range(W):
                    if r > 1:
                        static_sync(CFG.QB + c, CFG.TWO)
                    load_q(
                        q_desc,
                        b,
                        h,
                        token + row + CFG.CQ * c,
                        q_full.index(c),
                        qs.index(c),
                        more_q_desc,
                        part_at(more_qs, c, CFG),
                        CFG,
                    )
            loaded += 1
            b_v = of_keys
            h_v = hk
            col_v = col
            keys_v = keys
    # A phantom K and Q: the consumers look one key tile ahead without asking whether there is one.
    if loaded >= CFG.KS:
        bar_sync(CFG.KB + kslot, CFG.ALL)
    mbarrier.expect(k_full.index(kslot), 0)
    load_v(v_desc, b_v, h_v, col_v, keys_v, loaded, vslot, vs, v_full, given, CFG)
    if CFG.DYNAMIC:
        put_item(work_table, r, total)
    for c in gl.static_range(W):
        static_sync(CFG.QB + c, CFG.TWO)
        mbarrier.expect(q_full.index(c), 0)
    exit_threads()
