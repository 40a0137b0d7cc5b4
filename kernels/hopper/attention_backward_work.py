"""Attention backward on Hopper: which program does what when, and how it walks the query tiles.

A work item is one key tile of one key head: the query tiles that see it, of every query head of the
group.  Items are numbered so that tiles of several heads are mixed, with the first keys of each head
first: under a causal mask most queries see those, and the short tiles fill the gaps at the end.  Of a
mask with a table the lists say which tiles are long (numbered).

There is one program for each multiprocessor.  It takes its items one by one (items.py), each two steps
before the consumers need it.  They ask for the number before they store dK and dV of the item before,
so that nobody waits.  When the number of item n is written, the consumers have ended all steps but the
last two.  They are then at the end of item n - 3 at the earliest, where they read the numbers of n - 3
and n - 2.  A consumer keeps the number it read, or asks for it again.  Under CFG.ITEM_IN_SMEM it keeps
it in shared memory that no other warpgroup uses.

The walk of an item (CFG.WALK):

    by_head    head by head, from the first query tile to the last.
    round      the same, but each walk begins behind the one before it and goes round: at the queries
               opposite its own keys or, with key tiles of 256, a 32nd of the way on.  Programs that
               start together then do not read the same tiles and add to the same sums.  It needs bulk
               adds, and no mask.
    down       from the last query tile down, through the heads of the group at each.  Programs that
               start together are at the same query tile whatever their keys, and share it in L2.  With
               bulk adds to zeros (CFG.ROTATE) each key tile begins with another head of the group, so
               that not all add to the same sums at a time.
    waves      down, and every other round of programs up from the diagonal.  Under a causal mask
               programs that go down do not stay together: tiles of the last keys end first, and their
               programs start the next items at the last queries, which nobody else reads any more.  Of
               grouped heads, what lies between the two is more than L2 holds.  In a round that goes up,
               the tile of the first keys begins first, and the others follow as fast as the diagonal
               rises.  So they walk side by side until all end at the last queries, and start down
               again.  (This holds where a round takes all keys of some heads.  If it takes half of
               them, the other half begins in the middle, where those are that still go down.)
    alternate  half of the heads that are mixed go the other way: up from the diagonal, with key tiles
               from the last one to the first.  It is for a causal mask where no query heads share a key
               head.

In order (CFG.ORDERED) the float32 sums of dQ are added to in the order of the key tiles, so that they
are the same bits every time.  A counter for each query tile says how many key tiles have added to it;
the n-th to add does so when the counter says n.

Where the first key tile only stores and the others wait for it (CFG.FIRST), the same counters are 0
until it has done so.  Alternate walks help here too: the heads that go up have the last key tile as the
first to store.  For both:

- No program waits for ever.  A key tile waits only for those before it of its own head, which are items
  of lower numbers.  A program takes items in increasing order, and only programs that are running take
  any.  Consider the lowest of the items that are taken and not finished.  All lower ones were taken
  before, and are finished.  So its program is at work on it and waits for none.  What a program has
  added is counted without a wait for what it adds next (release_dq_turn, wait_for_dq_turn: two warps).
  This holds however few of the programs are on the device at once, and when other kernels share it.
- Hardly any program waits for long.  Downwards, what a key tile visits is the beginning of what the one
  before it visits, in the same order, so it follows one turn behind from its first tile on.  (From the
  diagonal up, programs that start at the same time would have to wait until the one before arrives
  there from its own first tile; head by head, long tiles would hold up short ones at each head.)  In
  waves, the programs that go up do not start at the same time, but each when the one before it has come
  to where it begins.  In alternate walks, a key tile that goes up begins where none adds before it, and
  comes late to what others have visited; but the longest tiles come last.  So a group of heads begins
  upwards, which sets programs apart, and ends downwards.  Programs that are apart stay so, and need not
  wait again at later items.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from ..schedule import LIST, RECORD, clamp, query_range
from .items import TURNS, item_of_lists, take_item
from .warpgroups import opaque_zero

# What turns_ptr points at, beside what items.py says: from FIRST_TURN on the counters of query tiles;
# from [-1] backwards those of finished items of key heads.  They start at 0.
FIRST_TURN = TURNS
# At least so many bulk adds have followed those of an item when it is counted as finished, if items
# have LEAST_STEPS steps; see count_item.
PENDING = gl.constexpr(4)
LEAST_STEPS = gl.constexpr(PENDING.value + 2)
BOUND = gl.constexpr(2**30)  # rows of a head, as TMA descriptors of sequences have them


@gluon.jit
def first_item(turns_ptr, CFG: gl.constexpr):
    """The number of a program's first work item; known without asking, unless items wait for others."""
    if CFG.FIRST:
        return take_item(turns_ptr, False)
    else:
        return gl.program_id(0)


@gluon.constexpr_function
def stash_layout():
    """Layout of a number [1], the same in all threads."""
    return gl.BlockedLayout([1], [32], [4], [0])


@gluon.jit
def stash_item(stash, t):
    """Keep the number of a warpgroup's item in a word of shared memory [1] that no other reads."""
    stash.store(gl.full([1], t, gl.int32, stash_layout()))


@gluon.jit
def stashed_item(stash):
    """What stash_item keeps."""
    return gl.sum(stash.load(stash_layout()), 0)


@gluon.jit
def tile_of_intervals(b, h, n, NB, given):
    """Where intervals_kernel's numbers of key tile n are for query head h; they are NB apart."""
    row = b * given.row_of_batch + h * given.row_of_head
    return given.work + row * (4 * NB) + n


@gluon.jit
def queries_of_tile(b, hk, n, NB, GROUP, given):
    """(begin, end): outside of it no query of the heads of key head hk sees a key of key tile n."""
    at = tile_of_intervals(b, hk * GROUP, n, NB, given)
    begin, end = gl.load(at), gl.load(at + NB)
    if given.row_of_head != 0:
        for member in range(1, GROUP):
            at = tile_of_intervals(b, hk * GROUP + member, n, NB, given)
            begin = gl.minimum(begin, gl.load(at))
            end = gl.maximum(end, gl.load(at + NB))
    return begin, end


@gluon.jit
def list_of(b, h, n, NB, M, given):
    """Where columns_kernel lists the query tiles of query head h that key tile n visits, of M there
    are: 2 tile, and 1 more for one that is clear.  The word before the list says how many.  The two
    words before that one are of place n in the order of key tiles, see order_lists_kernel."""
    row = b * given.table_of_batch + h * given.table_of_head
    return given.columns + (row * NB + n).to(gl.int64) * (LIST + M) + LIST


@gluon.jit
def listed_tile(b, h, n, place, NB, M, given):
    """The query tile at a place of that list, and how many there are."""
    listed = list_of(b, h, n, NB, M, given)
    return gl.load(listed + place) >> 1, gl.load(listed - 1)


@gluon.jit
def listed_steps(b, h0, n, NB, M, GROUP, given):
    """How many query tiles key tile n visits of all heads of the group from h0 on."""
    steps = gl.load(list_of(b, h0, n, NB, M, given) - 1)
    if given.table_of_head != 0:
        for member in range(1, GROUP):
            steps += gl.load(list_of(b, h0 + member, n, NB, M, given) - 1)
    else:
        steps *= GROUP
    return steps


@gluon.jit
def key_tile(t, NB, M, Hk, GROUP, BH, HG, offset, given, CFG: gl.constexpr):
    """Work item t as (batch, key head, first key, first query tile that sees it, end of these, 1 if its
    walk goes up and else 0).  Of sequences, instead of the batch, which of the slots in their order it
    is, for rows_at and keys_at.

    Keys that no query sees get a query tile, fully masked, so that no item is empty.  Of a table the
    query tiles are in lists, see list_of, and places in these take the place of numbers from 0 on.
    """
    KIND: gl.constexpr = CFG.KIND
    up = 0
    if (KIND.CAUSAL and not KIND.TABLE) or KIND.VARLEN or CFG.FIRST:
        # mixed among HG heads that share L2
        if KIND.VARLEN:
            NB = key_tiles(NB, given, CFG)
        per = HG * NB
        grp = t // per
        r = t - grp * per
        bh = grp * HG
        hg = gl.maximum(gl.minimum(HG, BH - bh), 1)
        if CFG.ALTERNATE:
            # the first half of the heads upwards, from the last keys to the first
            ups = hg // 2
            up = gl.where(r < ups * NB, 1, 0)
            r -= (1 - up) * (ups * NB)
            bh += (1 - up) * ups
            hg = gl.where(up == 1, ups, hg - ups)
        nb = r // hg
        bh += r - nb * hg
        if CFG.ALTERNATE:
            nb = gl.where(up == 1, NB - 1 - nb, nb)
        elif CFG.WAVES:
            up = r // gl.num_programs(0) & 1
        col = nb * CFG.BN
    else:
        bh = t // NB
        col = (t - bh * NB) * CFG.BN
    if KIND.VARLEN:
        b, hk = nb, bh
        record = given.work + (1 + nb) * RECORD
        col = gl.load(record + 1)
        m0 = gl.load(record + 7)
        m1 = m0 + gl.load(record)
    elif KIND.TABLE:
        b = bh // Hk
        hk = bh - b * Hk
        m0, m1 = 0, M
    else:
        m0, m1 = query_range(col, M * CFG.BM, offset, given, CFG.BM, KIND, CFG.BN)
        b = bh // Hk
        hk = bh - b * Hk
        if KIND.INTERVALS:
            begin, end = queries_of_tile(b, hk, col // CFG.BN, NB, GROUP, given)
            m0 = gl.maximum(m0, clamp(begin, 0, M * CFG.BM) // CFG.BM)
            m1 = gl.minimum(m1, gl.cdiv(clamp(end, 0, M * CFG.BM), CFG.BM))
        m0 = gl.minimum(m0, M - 1)
        if KIND.WINDOW or KIND.INTERVALS:
            m1 = gl.maximum(m1, m0 + 1)
        else:
            m1 = M
    return b, hk, col, m0, m1, up


@gluon.jit
def numbered(turn, total, NB, Hk, GROUP, BH, HG, M, given, CFG: gl.constexpr):
    """The item that comes in turn, of `total`, as key_tile knows it: NB * BH or more if there is none.

    Of a table key tiles with long lists go first: those of a key head in the order of the lists of its
    first query head."""
    KIND: gl.constexpr = CFG.KIND
    if KIND.VARLEN:
        return gl.where(turn < total, turn, NB * BH)
    elif KIND.TABLE:
        bh, place = item_of_lists(gl.minimum(turn, total - 1), NB, BH, HG)
        b = bh // Hk
        n = gl.load(list_of(b, (bh - b * Hk) * GROUP, place, NB, M, given) - LIST)
        return gl.where(turn < total, bh * NB + n, turn)
    else:
        return turn


# --- sequences side by side -----------------------------------------------------------------------
# Queries are numbered through the slots of sequence_of, CFG.BM each, so that each sequence begins with
# a query tile of its own.  Keys are numbered from the beginning of their sequence.


@gluon.jit
def key_tiles(NB, given, CFG: gl.constexpr):
    """How many key tiles a head has; of sequences the device knows, and NB is the most."""
    KIND: gl.constexpr = CFG.KIND
    if KIND.VARLEN:
        return gl.load(given.work)
    else:
        return NB


@gluon.jit
def keys_at(b, Sk, offset, given, CFG: gl.constexpr):
    """What key_tile called b as (batch, where the sequence's keys begin, Sk, offset)."""
    KIND: gl.constexpr = CFG.KIND
    if KIND.VARLEN:
        record = given.work + (1 + b) * RECORD
        Sq, key, Sk = gl.load(record + 3), gl.load(record + 4), gl.load(record + 5)
        return 0, key, Sk, offset + Sk - Sq - gl.load(record + 6) * CFG.BM
    else:
        return b, 0, Sk, offset


@gluon.jit
def rows_at(b, given, CFG: gl.constexpr):
    """What key_tile called b as (batch, end of the sequence's queries, their number, end of its keys,
    theirs), for load_rows: ends in tokens, numbers as queries and keys are numbered here.

    Keys that meet no queries, those behind the last sequence among them, may be no numbers.  They count
    as none, so that zeros come.
    """
    KIND: gl.constexpr = CFG.KIND
    if KIND.VARLEN:
        record = given.work + (1 + b) * RECORD
        Sq, Sk = gl.load(record + 3), gl.load(record + 5)
        queries, keys = gl.load(record + 2) + Sq, gl.load(record + 4) + Sk
        return 0, queries, Sq + gl.load(record + 6) * CFG.BM, keys, gl.where(Sq > 0, Sk, 0)
    else:
        return b, 0, 0, 0, 0


@gluon.jit
def dq_rank(m, n, up, NB, M, offset, CFG: gl.constexpr):
    """How many key tiles add to query tile m before key tile n does, in order."""
    if CFG.ALTERNATE:
        last = gl.minimum((m * CFG.BM + CFG.BM - 1 + offset) // CFG.BN, NB - 1)
        last = gl.where(m == M - 1, NB - 1, last)  # it also takes the keys that no query sees
        n = gl.where(up == 1, last - n, n)
    return n


@gluon.jit
def comes_first(i, col, m0, up, NB, M, offset, CFG: gl.constexpr):
    """Whether the key tile from key `col` on is the first to add to the i-th query tile of its walk."""
    if CFG.ALTERNATE:
        m = gl.where(up == 1, m0 + i, M - 1 - i)
        return dq_rank(m, col // CFG.BN, up, NB, M, offset, CFG) == 0
    else:
        return col == 0


# --- the walk, for the producer --------------------------------------------------------------------


@gluon.jit
def first_tile(col, m0, M, up, CFG: gl.constexpr):
    """The query tile with which the walk of the key tile from key `col` on begins."""
    if CFG.BOTH:
        return gl.where(up == 1, m0, M - 1)
    elif CFG.DOWN:
        return M - 1
    elif CFG.ROUND:
        if CFG.PAIRS:
            return col // CFG.BN % 32 * M // 32
        else:
            return col // CFG.BM % M
    else:
        return m0


@gluon.jit
def first_head(h0, col, GROUP, CFG: gl.constexpr):
    """The head with which that walk begins, of the group from h0 on."""
    if CFG.ROTATE:
        h0 += col // CFG.BN % GROUP
    return h0


@gluon.jit
def next_tile(h, m, h0, began, m0, m1, start, up, GROUP, CFG: gl.constexpr):
    """The (head, query tile) after query tile m of head h.  h0: the first head of the group; began: the
    head with which the walk began; start: the first tile of each head."""
    if CFG.DOWN:
        h += 1
        h = gl.where(h == h0 + GROUP, h0, h)
        m = gl.where(h == began, m + 2 * up - 1, m)
    else:
        m += 1
        m = gl.where(m == m1, m0, m)
        h = gl.where(m == start, h + 1, h)
    return h, m


# --- the same walk as two nested loops, for the consumers -------------------------------------------
# The outer loop runs over heads and the inner one over query tiles or, where CFG.DOWN, the other way
# round.  `last_key` is the last key that a tile's first query sees, counted from the warpgroup's first
# key; it lies between low and high.  `tile` numbers the query tiles of all heads.
# Of a table the inner loop runs over the places of a head's list; `tile` and `last_key` are those of
# the head's first query.


@gluon.jit
def loops(low, high, m0, m1, up, GROUP, CFG: gl.constexpr):
    """(steps of the outer loop, begin and end of the inner one, whose step is CFG.STEP, first
    last_key).  Of a table the end of the inner one is in a head's list."""
    KIND: gl.constexpr = CFG.KIND
    if CFG.BOTH:
        return m1 - m0, 0, GROUP, gl.where(up == 1, low, high - CFG.BM)
    elif CFG.DOWN:
        return m1 - m0, 0, GROUP, high - CFG.BM
    elif KIND.TABLE:
        return GROUP, 0, m1, low
    else:
        return GROUP, low, high, low


@gluon.jit
def listed_step(index, last_key, tile, listed, CFG: gl.constexpr):
    """Of the step at a place of a head's list: last_visible_key, the query tile, and 1 if it is
    clear."""
    marked = gl.load(listed + index)
    m = marked >> 1
    return last_key + m * CFG.BM, tile + m, marked & 1


@gluon.jit
def last_visible_key(index, last_key, CFG: gl.constexpr):
    """last_key, where the inner loop is at `index`."""
    if CFG.DOWN:
        # The compiler must not know that it stays the same: it would keep the masks' comparisons in
        # registers.
        return last_key + opaque_zero()
    else:
        return index


@gluon.jit
def inner_step(tile, M, CFG: gl.constexpr):
    KIND: gl.constexpr = CFG.KIND
    if CFG.DOWN:
        return tile + M
    elif KIND.TABLE:  # the first tile of the head
        return tile
    else:
        return tile + 1


@gluon.jit
def outer_step(tile, last_key, m0, m1, M, up, GROUP, CFG: gl.constexpr):
    KIND: gl.constexpr = CFG.KIND
    if CFG.DOWN:
        by = 2 * up - 1
        return tile - GROUP * M + by, last_key + by * CFG.BM
    elif KIND.TABLE:
        return tile + M, last_key
    elif KIND.WINDOW or KIND.INTERVALS or KIND.VARLEN:
        return tile + (M - m1 + m0), last_key
    else:
        return tile + m0, last_key
