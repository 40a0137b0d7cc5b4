"""Which tiles meet: the key tiles that a query tile visits, and the query tiles that a key tile visits.

Each range is split where the mask stops mattering, so that the long loop runs without it.  A variant of
attention that leaves tiles out (a window, documents) changes these ranges; the condition on single
scores is `visible` in scores.py, which also says what KIND and `variables` are.

With the causal condition j <= i + offset, offset = Sk - Sq aligns the mask bottom-right, 0 top-left.

A band (causal, window) is a range of tiles.  Of intervals, intervals_kernel notes for each key tile
which queries see some of it and which see all of it; of any mask there is a table of tiles.  `next_run`
finds from these, many at a time, the next tiles that are visited.
"""

from typing import Any, NamedTuple

import triton
import triton.language as tl

from .scores import TILE, Head, Variables, counts

LOOKED_AT = tl.constexpr(64)  # tiles that next_run looks at together
NEVER = tl.constexpr(2**31 - 1)
LIST = tl.constexpr(3)  # words before a list: two of order_lists_kernel, and its length


@triton.jit
def clamp(x, low, high):
    return tl.minimum(tl.maximum(x, low), high)


@triton.jit
def query_tile_order(index, n_tiles, KIND: tl.constexpr):
    """The index-th query tile to start: under a causal mask the longest rows go first, so that the
    short ones fill the gaps at the end."""
    if KIND.CAUSAL:
        return n_tiles - 1 - index
    else:
        return index


# --- bands ---------------------------------------------------------------------------------------


@triton.jit
def key_ranges(i0, Sk, offset, given, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, KIND: tl.constexpr):
    """Key tiles for the queries i0 ... i0 + BLOCK_M - 1: (begin, clear_begin, clear_end, end).

    No query sees a key of the tiles before `begin`, but for `first_tiles`, and from `end` on; all see
    all keys of the tiles [clear_begin, clear_end), which need no mask but that of intervals.
    """
    if KIND.CAUSAL:
        clear_end = clamp(i0 + offset + 1, 0, Sk) // BLOCK_N
        end = tl.cdiv(clamp(i0 + BLOCK_M + offset, 0, Sk), BLOCK_N)
    else:
        clear_end = Sk // BLOCK_N
        end = tl.cdiv(Sk, BLOCK_N)
    if KIND.WINDOW:
        lowest = i0 + offset - given.left  # that the first query sees
        begin = tl.minimum(clamp(lowest, 0, Sk) // BLOCK_N, end)
        clear_begin = clamp(tl.cdiv(clamp(lowest + BLOCK_M - 1, 0, Sk), BLOCK_N), begin, end)
        clear_end = clamp(clear_end, clear_begin, end)
        return begin, clear_begin, clear_end, end
    else:
        return 0, 0, clear_end, end


@triton.jit
def first_tiles(begin, given, BLOCK_N: tl.constexpr, KIND: tl.constexpr):
    """The end of the key tiles from 0 on that are visited beside those from `begin` on."""
    if KIND.FIRST:
        return tl.minimum(tl.cdiv(given.first, BLOCK_N), begin)
    else:
        return 0


@triton.jit
def query_range(
    j0, Sq, offset, given, BLOCK_M: tl.constexpr, KIND: tl.constexpr, BLOCK_N: tl.constexpr = 1
):
    """Query tiles for the keys j0 ... j0 + BLOCK_N - 1: (begin, end); no other sees any of them."""
    if KIND.CAUSAL:
        begin = clamp(j0 - offset, 0, Sq) // BLOCK_M
    else:
        begin = 0
    end = tl.cdiv(Sq, BLOCK_M)
    if KIND.WINDOW:
        last = tl.cdiv(clamp(j0 + BLOCK_N - offset + given.left, 0, Sq), BLOCK_M)
        if KIND.FIRST:
            last = tl.where(j0 < given.first, end, last)
        end = tl.maximum(last, begin)
    return begin, end


# --- intervals, and tables -----------------------------------------------------------------------


@triton.jit
def intervals_kernel(begin_ptr, end_ptr, tiles_ptr, Sk, BLOCK_N: tl.constexpr):
    """Program: of one tile of keys of one row of begin and end [rows, Sk], the interval [0], [1] of the
    queries that may see some of it, and [2], [3] of those that see all.  tiles [rows, 4, tiles]."""
    n_tiles = tl.cdiv(Sk, BLOCK_N)
    row = (tl.program_id(0) // n_tiles).to(tl.int64)
    tile = tl.program_id(0) % n_tiles
    j = tile * BLOCK_N + tl.arange(0, BLOCK_N)
    begin = tl.load(begin_ptr + row * Sk + j, j < Sk, NEVER)
    end = tl.load(end_ptr + row * Sk + j, j < Sk, 0)
    some = begin < end
    to = tiles_ptr + row * (4 * n_tiles) + tile
    tl.store(to, tl.min(tl.where(some, begin, NEVER), 0))
    tl.store(to + n_tiles, tl.max(tl.where(some, end, 0), 0))
    tl.store(to + 2 * n_tiles, tl.max(begin, 0))
    tl.store(to + 3 * n_tiles, tl.min(end, 0))


@triton.jit
def visits(
    tile,
    i0,
    Sq,
    n_tiles,
    ranges,
    variables,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    KIND: tl.constexpr,
):
    """Of key tiles: 0 for one that is left out, 1 for one that needs the mask, 2 for one that is clear.

    ranges: of the band, see key_ranges.
    """
    begin, clear_begin, clear_end, end = ranges
    inside = tile < end
    some = inside & ((tile >= begin) | (tile < first_tiles(begin, variables.given, BLOCK_N, KIND)))
    at = variables.head.tiles + tile
    if KIND.INTERVALS:
        some = some & (tl.load(at, inside, NEVER) < i0 + BLOCK_M)
        some = some & (tl.load(at + n_tiles, inside, 0) > i0)
    clear = some & (tile >= clear_begin) & (tile < clear_end)
    if KIND.INTERVALS:
        clear = clear & (tl.load(at + 2 * n_tiles, inside, NEVER) <= i0)
        clear = clear & (tl.load(at + 3 * n_tiles, inside, 0) >= tl.minimum(i0 + BLOCK_M, Sq))
    if KIND.TABLE:
        row = variables.head.table + i0 // TILE * tl.cdiv(n_tiles * BLOCK_N, TILE)
        what = tl.load(row + tile * BLOCK_N // TILE, inside, 0)
        some = some & (what > 0)
        clear = clear & (what > 1)
    return some.to(tl.int32) + clear.to(tl.int32)


@triton.jit
def next_run(
    tile,
    i0,
    Sq,
    Sk,
    ranges,
    variables,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    KIND: tl.constexpr,
):
    """The next key tiles from `tile` on that are visited, side by side and alike: (first, last, clear);
    first = last = the end where there are none."""
    n_tiles = tl.cdiv(Sk, BLOCK_N)
    _, _, _, end = ranges
    first = end
    at = tile
    while (at < end) & (first == end):
        t = at + tl.arange(0, LOOKED_AT)
        found = visits(t, i0, Sq, n_tiles, ranges, variables, BLOCK_M, BLOCK_N, KIND)
        first = tl.min(tl.where(found > 0, t, end), 0)
        at = at + LOOKED_AT
    what = visits(first, i0, Sq, n_tiles, ranges, variables, BLOCK_M, BLOCK_N, KIND)
    last = end
    at = first + 1
    while (at < end) & (last == end):
        t = at + tl.arange(0, LOOKED_AT)
        found = visits(t, i0, Sq, n_tiles, ranges, variables, BLOCK_M, BLOCK_N, KIND)
        last = tl.min(tl.where(found != what, t, end), 0)
        at = at + LOOKED_AT
    return first, last, what == 2


@triton.jit(do_not_specialize=["Sq", "Sk", "offset"])
def visits_kernel(
    visits_ptr,
    Sq,
    Sk,
    offset,
    given,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    KIND: tl.constexpr,
):
    """Program: of one tile of queries and one row of the intervals or the table, the key tiles that it
    visits, from left to right.  visits [rows, query tiles, LIST + key tiles]: word LIST - 1 says how
    many, the words behind it which: 2 tile + 1 for one that needs no mask but the band's, else 2 tile.
    One that visits none is given tile 0.

    given.work: what intervals_kernel made.  Of a table BLOCK_M and BLOCK_N are at most TILE.
    """
    query_tiles, n_tiles = tl.cdiv(Sq, BLOCK_M), tl.cdiv(Sk, BLOCK_N)
    row = (tl.program_id(0) // query_tiles).to(tl.int64)
    i0 = tl.program_id(0) % query_tiles * BLOCK_M
    begin, _, _, end = key_ranges(i0, Sk, offset, given, BLOCK_M, BLOCK_N, KIND)
    if KIND.TABLE:  # which does not tell that keys are missing in the last tile
        table = given.table + row * tl.cdiv(Sq, TILE) * tl.cdiv(Sk, TILE)
        variables = Variables(given, Head(table=table))
        ranges = begin, 0, Sk // BLOCK_N, end
    else:
        variables = Variables(given, Head(tiles=given.work + row * (4 * n_tiles)))
        ranges = begin, 0, end, end
    to = visits_ptr + tl.program_id(0).to(tl.int64) * (LIST + n_tiles) + LIST
    count = 0
    for at in range(0, end, LOOKED_AT):
        t = at + tl.arange(0, LOOKED_AT)
        found = visits(t, i0, Sq, n_tiles, ranges, variables, BLOCK_M, BLOCK_N, KIND)
        some = (found > 0).to(tl.int32)
        # Not by a scan: Triton 3.6 gets some wrong (tests/lanes.py).
        place = count + tl.sum(tl.where(t[None, :] < t[:, None], some[None, :], 0), 1)
        tl.store(to + place, 2 * t + (found == 2).to(tl.int32), found > 0)
        count += tl.sum(some, 0)
    tl.store(to, 0, count == 0)
    tl.store(to - 1, tl.maximum(count, 1))


@triton.jit
def rank_of(index, counts_ptr, stride, n, BLOCK: tl.constexpr):
    """(rank, some) of n counts, `stride` words apart, of which more come first, and of equal ones those
    of lower index: the place of one, and how many are not 0."""
    own = tl.load(counts_ptr + index * stride)
    rank, some = 0, 0
    for at in range(0, n, BLOCK):
        other = at + tl.arange(0, BLOCK)
        theirs = tl.load(counts_ptr + other * stride, other < n, -1)
        earlier = (theirs > own) | ((theirs == own) & (other < index))
        rank += tl.sum(earlier.to(tl.int32), 0)
        some += tl.sum((theirs > 0).to(tl.int32), 0)
    return rank, some


@triton.jit(do_not_specialize=["tiles", "words"])
def order_lists_kernel(lists_ptr, tiles, words, BLOCK: tl.constexpr):
    """Program: the place of one tile's list among those of its row, longer ones first.  At that place,
    in the first two words of the line: the tile, and how long its list is.

    lists [rows, tiles, words]: of visits_kernel, or of columns_kernel if MARKED.
    """
    tile = tl.program_id(0) % tiles
    lines = lists_ptr + (tl.program_id(0) - tile).to(tl.int64) * words
    rank, _ = rank_of(tile, lines + LIST - 1, words, tiles, BLOCK)
    tl.store(lines + rank * words, tile)
    tl.store(lines + rank * words + 1, tl.load(lines + tile * words + LIST - 1))


@triton.jit(do_not_specialize=["Sq", "Sk", "offset"])
def columns_kernel(
    columns_ptr,
    table_ptr,
    Sq,
    Sk,
    offset,
    given,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    KIND: tl.constexpr,
    MARKED: tl.constexpr = False,
):
    """Program: of one tile of keys and one row of the table, the query tiles that see some of it, by
    the table and the band.  columns [rows, key tiles, 1 + query tiles]: how many, then which, in order.

    MARKED: lists as visits_kernel has them, [rows, key tiles, LIST + query tiles], of tiles that need
    no mask but the band's and that of keys that do not exist.
    """
    HEAD: tl.constexpr = LIST if MARKED else 1
    n_tiles, query_tiles = tl.cdiv(Sk, BLOCK_N), tl.cdiv(Sq, BLOCK_M)
    row = (tl.program_id(0) // n_tiles).to(tl.int64)
    j0 = tl.program_id(0) % n_tiles * BLOCK_N
    begin, end = query_range(j0, Sq, offset, given, BLOCK_M, KIND, BLOCK_N)
    width = tl.cdiv(Sk, TILE)
    column = table_ptr + row * tl.cdiv(Sq, TILE) * width + j0 // TILE
    to = columns_ptr + tl.program_id(0).to(tl.int64) * (HEAD + query_tiles) + HEAD
    count = 0
    for at in range(begin, end, LOOKED_AT):
        t = at + tl.arange(0, LOOKED_AT)
        what = tl.load(column + t * BLOCK_M // TILE * width, t < end, 0)
        found = what > 0
        some = found.to(tl.int32)
        # Not by a scan: Triton 3.6 gets some wrong (tests/lanes.py).
        place = count + tl.sum(tl.where(t[None, :] < t[:, None], some[None, :], 0), 1)
        if MARKED:
            t = 2 * t + (what > 1).to(tl.int32)
        tl.store(to + place, t, found)
        count += tl.sum(some, 0)
    if MARKED:
        tl.store(to, 0, count == 0)
        count = tl.maximum(count, 1)
    tl.store(to - 1, count)


@triton.jit
def listed_queries(place, b, h, j0, Sq, Sk, given, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr):
    """Of what columns_kernel lists for the keys from j0 on: how many query tiles, and the first query
    of the one at `place`; behind the last one, a place behind all queries."""
    query_tiles = tl.cdiv(Sq, BLOCK_M)
    row = b * given.table_of_batch + h * given.table_of_head
    at = given.columns + (row * tl.cdiv(Sk, BLOCK_N) + j0 // BLOCK_N) * (1 + query_tiles)
    count = tl.load(at)
    return count, tl.load(at + 1 + place, place < count, query_tiles) * BLOCK_M


@triton.jit
def queries_of_keys(j0, Sk, head, BLOCK_N: tl.constexpr):
    """(begin, end): outside of it no query sees one of the keys j0 ... j0 + BLOCK_N - 1."""
    j = j0 + tl.arange(0, BLOCK_N)
    begin = tl.load(head.begin + j, j < Sk, NEVER)
    end = tl.load(head.end + j, j < Sk, 0)
    some = begin < end
    return tl.min(tl.where(some, begin, NEVER), 0), tl.max(tl.where(some, end, 0), 0)


# --- sequences side by side ----------------------------------------------------------------------


@triton.jit
def sequence_of(slot, cu_seqlens_ptr, sequences, BLOCK: tl.constexpr):
    """(s, tile): slot is tile number `tile` of sequence s.

    Sequence s has the slots from cu_seqlens[s] // BLOCK + s on, at least as many as it has tiles; what
    is behind the last sequence is one more, number `sequences`.
    """
    low, high = 0, sequences
    while low < high:
        middle = (low + high + 1) // 2
        inside = tl.load(cu_seqlens_ptr + middle) // BLOCK + middle <= slot
        low = tl.where(inside, middle, low)
        high = tl.where(inside, high, middle - 1)
    return low, slot - (tl.load(cu_seqlens_ptr + low) // BLOCK + low)


@triton.jit
def sequences_of(slots, cu_seqlens_ptr, sequences, BLOCK: tl.constexpr):
    """sequence_of for many slots, 0 or more each."""
    low, step = slots * 0, 1
    while 2 * step <= sequences:
        step *= 2
    while step > 0:
        middle = tl.minimum(low + step, sequences)
        inside = tl.load(cu_seqlens_ptr + middle) // BLOCK + middle <= slots
        low = tl.where(inside, middle, low)
        step = step // 2
    return low, slots - (tl.load(cu_seqlens_ptr + low) // BLOCK + low)


@triton.jit
def tokens_of(s, cu_seqlens_ptr, seqused_ptr, sequences, total, BEHIND: tl.constexpr):
    """(start, length) of sequence s, of `total` tokens; BEHIND: what is behind the last one has all
    tokens that are left, else none.  With seqused only so many of a sequence's tokens are its own, and
    those behind them nobody's."""
    start = tl.load(cu_seqlens_ptr + s)
    stop = tl.load(cu_seqlens_ptr + s + 1, s < sequences, 0)
    length = tl.where(s < sequences, stop, total if BEHIND else start) - start
    if seqused_ptr is not None:
        length = tl.minimum(length, tl.load(seqused_ptr + s, s < sequences, NEVER))
    return start, length


class Problem(NamedTuple):
    """What a program does with a tile of queries, or of keys.

    head: the query head, or the key head, counted through all batch entries.  first: the first query,
    or key.  Sq, Sk, offset: of the tile's sequence.  token, key: where its queries and keys begin.
    rows: of lse for a query head.  sequence: its number, 0 of batch entries.
    """

    head: Any
    first: Any
    Sq: Any
    Sk: Any
    offset: Any
    token: Any
    key: Any
    rows: Any
    sequence: Any


@triton.jit
def problem_of_queries(Hq, Sq, Sk, offset, given, BLOCK_M: tl.constexpr, KIND: tl.constexpr):
    """Problem of this program, of a tile of BLOCK_M queries."""
    if KIND.VARLEN:
        sequences, queries, keys = counts(given)
        slots = queries // BLOCK_M + sequences + 1
        head = tl.program_id(0) // slots
        slot = query_tile_order(tl.program_id(0) % slots, slots, KIND)
        s, tile = sequence_of(slot, given.cu_seqlens_q, sequences, BLOCK_M)
        token, Sq = tokens_of(s, given.cu_seqlens_q, given.seqused_q, sequences, queries, True)
        key, Sk = tokens_of(s, given.cu_seqlens_k, given.seqused_k, sequences, keys, False)
        i0 = tile * BLOCK_M
        offset += Sk - Sq
        Sk = tl.where(i0 < Sq, Sk, 0)
        rows = queries
    else:
        n_tiles = tl.cdiv(Sq, BLOCK_M)
        head = tl.program_id(0) // n_tiles
        i0 = query_tile_order(tl.program_id(0) % n_tiles, n_tiles, KIND) * BLOCK_M
        token, key, rows, s = 0, 0, Sq, 0
    return Problem(head, i0, Sq, Sk, offset, token, key, rows, s)


@triton.jit
def problem_of_keys(Sq, Sk, offset, given, BLOCK_N: tl.constexpr, KIND: tl.constexpr):
    """Problem of this program, of a tile of BLOCK_N keys."""
    if KIND.VARLEN:
        sequences, queries, keys = counts(given)
        slots = keys // BLOCK_N + sequences + 1
        head = tl.program_id(0) // slots
        s, tile = sequence_of(tl.program_id(0) % slots, given.cu_seqlens_k, sequences, BLOCK_N)
        token, Sq = tokens_of(s, given.cu_seqlens_q, given.seqused_q, sequences, queries, False)
        key, Sk = tokens_of(s, given.cu_seqlens_k, given.seqused_k, sequences, keys, True)
        j0, rows = tile * BLOCK_N, queries
        offset += Sk - Sq
        Sq = tl.where(j0 < Sk, Sq, 0)
    else:
        n_tiles = tl.cdiv(Sk, BLOCK_N)
        head = tl.program_id(0) // n_tiles
        j0 = tl.program_id(0) % n_tiles * BLOCK_N
        token, key, rows, s = 0, 0, Sq, 0
    return Problem(head, j0, Sq, Sk, offset, token, key, rows, s)


# What query_slots_kernel and key_slots_kernel say of a slot, one word each: how many tiles it visits,
# at least 1, or 0 for a slot without tokens; its first token; where its sequence's queries begin, and
# how many these are; the same of keys.
RECORD = tl.constexpr(8)


@triton.jit
def key_tiles_of(
    i0, Sq, Sk, offset, given, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, KIND: tl.constexpr
):
    """How many key tiles the queries from i0 on visit, at least 1; 0 for a tile without queries."""
    begin, _, _, end = key_ranges(i0, Sk, offset, given, BLOCK_M, BLOCK_N, KIND)
    tiles = tl.maximum(end - begin + first_tiles(begin, given, BLOCK_N, KIND), 1)
    return tl.where(i0 < Sq, tiles, 0)


@triton.jit(do_not_specialize=["offset", "n_slots"])
def query_slots_kernel(
    ordered_ptr,
    offset,
    given,
    n_slots,
    BLOCK: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    KIND: tl.constexpr,
):
    """Program: the record of one slot of queries, at its place among all, those that visit more key
    tiles first.  It counts the tiles of all slots itself, BLOCK at a time.

    ordered [1 + slots, RECORD]; its first word: how many slots have queries.
    """
    index = tl.program_id(0)
    own = problem_of_queries(1, 0, 0, offset, given, BLOCK_M, KIND)
    tiles = key_tiles_of(own.first, own.Sq, own.Sk, own.offset, given, BLOCK_M, BLOCK_N, KIND)
    sequences, queries, keys = counts(given)
    rank, count = 0, 0
    for at in range(0, n_slots, BLOCK):
        other = at + tl.arange(0, BLOCK)
        slots = tl.maximum(query_tile_order(other, n_slots, KIND), 0)
        s, tile = sequences_of(slots, given.cu_seqlens_q, sequences, BLOCK_M)
        _starts, lengths = tokens_of(s, given.cu_seqlens_q, given.seqused_q, sequences, queries, True)
        _starts_k, lengths_k = tokens_of(s, given.cu_seqlens_k, given.seqused_k, sequences, keys, False)
        diagonals = offset + lengths_k - lengths
        theirs = key_tiles_of(
            tile * BLOCK_M, lengths, lengths_k, diagonals, given, BLOCK_M, BLOCK_N, KIND
        )
        theirs = tl.where(other < n_slots, theirs, -1)
        earlier = (theirs > tiles) | ((theirs == tiles) & (other < index))
        rank += tl.sum(earlier.to(tl.int32), 0)
        count += tl.sum((theirs > 0).to(tl.int32), 0)
    to = ordered_ptr + (1 + rank) * RECORD
    tl.store(to, tiles)
    tl.store(to + 1, own.first)
    tl.store(to + 2, own.token)
    tl.store(to + 3, own.Sq)
    tl.store(to + 4, own.key)
    tl.store(to + 5, own.Sk)
    if given.seqused_q is not None:  # all may be gaps, but programs take one slot or more
        count = tl.maximum(count, 1)
    tl.store(ordered_ptr, count, index == 0)


@triton.jit(do_not_specialize=["offset"])
def key_slots_kernel(
    slots_ptr, offset, given, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, KIND: tl.constexpr
):
    """Program: of one slot of keys, its record, with query tiles for key tiles and keys for queries;
    behind these the first slot of its sequence's queries, and the first of those that it visits.

    Keys that no query sees visit one query tile, the first of a sequence without queries."""
    sequences, _, _ = counts(given)
    s, _ = sequence_of(tl.program_id(0), given.cu_seqlens_k, sequences, BLOCK_N)
    own = problem_of_keys(0, 0, offset, given, BLOCK_N, KIND)
    begin, end = query_range(own.first, own.Sq, own.offset, given, BLOCK_M, KIND, BLOCK_N)
    begin = tl.minimum(begin, tl.maximum(tl.cdiv(own.Sq, BLOCK_M) - 1, 0))
    slot = tl.load(given.cu_seqlens_q + s) // BLOCK_M + s
    to = slots_ptr + tl.program_id(0) * RECORD
    tiles = tl.where(own.first < own.Sk, tl.maximum(end - begin, 1), 0)
    if given.seqused_k is not None:  # all may be gaps, but programs take one slot or more
        tiles = tl.where(tl.program_id(0) == 0, tl.maximum(tiles, 1), tiles)
    tl.store(to, tiles)
    tl.store(to + 1, own.first)
    tl.store(to + 2, own.token)
    tl.store(to + 3, own.Sq)
    tl.store(to + 4, own.key)
    tl.store(to + 5, own.Sk)
    tl.store(to + 6, slot)
    tl.store(to + 7, slot + begin)


@triton.jit(do_not_specialize=["n_slots"])
def order_kernel(slots_ptr, ordered_ptr, n_slots, BLOCK: tl.constexpr):
    """Program: one slot's record to its place among all, those that visit more tiles first.

    ordered [1 + slots, RECORD]; its first word: how many slots have tokens.
    """
    slot = tl.program_id(0)
    rank, count = rank_of(slot, slots_ptr, RECORD, n_slots, BLOCK)
    word = tl.arange(0, RECORD)
    record = tl.load(slots_ptr + slot * RECORD + word)
    tl.store(ordered_ptr + (1 + rank) * RECORD + word, record)
    tl.store(ordered_ptr, count, slot == 0)
