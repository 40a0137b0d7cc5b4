"""Attention backward on Hopper: masks of scores, keys in rows, and which steps of a walk need them.

A step needs no mask where its first query sees all 64 keys of the warpgroup (`last_key`), and there are
that many (`limit`).  Hardly any step needs one, but asking in every step costs 2 to 6% of head_dim
128's cycles, because ptxas moves nothing across the branch.  So there (CFG.PEELED) the walk is cut into
pieces.  Where there are 64 keys, only queries at the diagonal need a mask: a walk up begins with them,
a walk down ends with them.  Where there are fewer keys, all steps need one.
"""

from typing import Any, NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from ..schedule import clamp
from ..scores import TILE, modified
from .attention_backward_work import list_of, tile_of_intervals
from .warpgroups import accumulator

# What is known of the steps of a piece: none needs a mask (CLEAR); each gets one (MASKED); the first
# ones get one, and the others need none (AHEAD); nothing, so each asks (ASKED).
CLEAR, MASKED, AHEAD, ASKED = (gl.constexpr(kind) for kind in range(4))


@gluon.constexpr_function
def along(layout, dim, rank=6):
    """The layout of one dimension of a tensor with `rank` of them."""
    for d in reversed(range(rank)):
        if d != dim:
            layout = gl.SliceLayout(d, layout)
    return layout


# --- places ----------------------------------------------------------------------------------------
# Keys are counted from the warpgroup's first one.  A query's place is the last key that it sees under
# the causal mask, counted so too.  The place of the first query of a tile is `last_key`.

EVERYWHERE = gl.constexpr(2**30)


class Seen(NamedTuple):
    """In place of Head of kernels/scores.py: what is seen of a head from a key, in places.

    first: a key.  begin, end [64]: places.  diagonal: what a key at a query's position is beyond its
    place.  whole_begin, whole_end: queries from one place on and before the other see all of the tile's
    keys.  bits: where a query at place 0 would have those of the 64 keys, see ../mask_table.py; width:
    words from one query to the next.  listed: see list_of.
    """

    first: Any
    slope: Any
    begin: Any
    end: Any
    diagonal: Any
    whole_begin: Any
    whole_end: Any
    bits: Any = 0
    width: Any = 0
    listed: Any = 0


@gluon.jit
def as_seen_from(row, b, h, given, Sk, offset, moved, NB, CFG: gl.constexpr):
    """Seen of query head h from key `row`; moved: the variant's offset, from which that of a
    sequence counts."""
    KIND: gl.constexpr = CFG.KIND
    first, slope, diagonal = 0, 0.0, 0
    begin, end, whole_begin, whole_end = 0, 0, 0, 0
    bits, width, listed = 0, 0, 0
    if KIND.FIRST:
        first = given.first - row
    if KIND.ALIBI:
        slope = gl.load(given.alibi_slopes + h).to(gl.float32)
        if KIND.VARLEN:
            diagonal = -moved
        else:
            diagonal = Sk - (given.rows >> 1) - offset
    if KIND.INTERVALS:
        Sq = given.rows >> 1
        at = tile_of_intervals(b, h, row // CFG.BN, NB, given)
        whole_begin = clamp(gl.load(at + 2 * NB), 0, EVERYWHERE) + (offset - row)
        whole_end = gl.load(at + 3 * NB)
        whole_end = gl.where(whole_end >= Sq, EVERYWHERE, gl.maximum(whole_end, 0) + (offset - row))
        j = row + gl.arange(0, 64, gl.SliceLayout(1, accumulator(CFG.BM)))
        line = (b * given.row_of_batch + h * given.row_of_head).to(gl.int64) * Sk
        begin = clamp(gl.load(given.begin + line + j, j < Sk, 0), 0, EVERYWHERE) + (offset - row)
        end = clamp(gl.load(given.end + line + j, j < Sk, 0), 0, EVERYWHERE) + (offset - row)
    if KIND.TABLE:
        Sq = given.rows >> 1
        listed = list_of(b, h, row // CFG.BN, NB, gl.cdiv(Sq, CFG.BM), given)
        width = 4 * gl.cdiv(Sk, TILE)
        line = (b * given.table_of_batch + h * given.table_of_head).to(gl.int64)
        query = line * (gl.cdiv(Sq, TILE) * TILE) - (offset - row)
        bits = given.bits + query * width + row // 32
    return Seen(first, slope, begin, end, diagonal, whole_begin, whole_end, bits, width, listed)


@gluon.jit
def modify(x, last_key, scale, variables, KIND: gl.constexpr):
    """`modified` of raw scores x [64 keys, BM]."""
    if KIND.ALIBI:
        BM: gl.constexpr = x.shape[1]
        y = x.reshape([4, 2, 8, BM // 8, 4, 2])  # as in mask_keys
        L: gl.constexpr = y.type.layout
        warp = gl.arange(0, 4, along(L, 0))[:, None, None, None, None, None]
        half = gl.arange(0, 2, along(L, 1))[None, :, None, None, None, None]
        row = gl.arange(0, 8, along(L, 2))[None, None, :, None, None, None]
        tile = gl.arange(0, BM // 8, along(L, 3))[None, None, None, :, None, None]
        lane = gl.arange(0, 4, along(L, 4))[None, None, None, None, :, None]
        pair = gl.arange(0, 2, along(L, 5))[None, None, None, None, None, :]
        # As floats, of which all but a lane's part are constants.
        i = (last_key + lane * 2 - warp * 16 - row).to(gl.float32)
        j = (half * 8 - tile * 8 - pair).to(gl.float32)
        y = modified(y, scale, variables, KIND, i, j)
        return gl.convert_layout(y.reshape([64, BM]), x.type.layout, assert_trivial=True)
    else:
        return modified(x, scale, variables, KIND)


# --- masks -----------------------------------------------------------------------------------------


@gluon.jit
def of_keys(a, y):
    """a [64], one number for each key, for y [warp, half, row, tile, lane, pair]."""
    L: gl.constexpr = gl.SliceLayout(3, gl.SliceLayout(4, gl.SliceLayout(5, y.type.layout)))
    a = gl.convert_layout(a.reshape([4, 2, 8]), L, assert_trivial=True)
    return a[:, :, :, None, None, None]


@gluon.jit
def bits_of_keys(y, last_key, head):
    """Which of y [warp, half, row, tile, lane, pair], keys and queries, a table shows."""
    L: gl.constexpr = y.type.layout
    Q: gl.constexpr = gl.SliceLayout(1, gl.SliceLayout(2, L))  # of [warp, tile, lane, pair]
    tile = gl.arange(0, y.shape[3], along(Q, 1, 4))[None, :, None, None]
    lane = gl.arange(0, 4, along(Q, 2, 4))[None, None, :, None]
    pair = gl.arange(0, 2, along(Q, 3, 4))[None, None, None, :]
    of_warp = gl.arange(0, 4, along(Q, 0, 4))[:, None, None, None] // 2
    query = (last_key + lane * 2 + (tile * 8 + pair)).to(gl.int64)
    words = gl.load(head.bits + query * head.width + of_warp)[:, None, None, :, :, :]
    warp = gl.arange(0, 4, along(L, 0))[:, None, None, None, None, None]
    half = gl.arange(0, 2, along(L, 1))[None, :, None, None, None, None]
    row = gl.arange(0, 8, along(L, 2))[None, None, :, None, None, None]
    return ((words >> (warp % 2 * 16 + row)) & (1 << (half * 8))) != 0


@gluon.jit
def mask_keys(x, limit, last_key, variables, KIND: gl.constexpr):
    """x [64 keys, BM] with -inf where key > limit, and where a query's place or window does not let it
    see the key.

    Each lane's part is moved to one side of the comparison, so that the other side is a constant.
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
    if KIND.CAUSAL:
        seen = (half * 8 - tile * 8 - pair <= last_key - low + lane * 2) & (half * 8 <= limit - low)
    else:
        seen = half * 8 <= limit - low
    if KIND.WINDOW:
        near = half * 8 - tile * 8 - pair >= last_key - variables.given.left - low + lane * 2
        if KIND.FIRST:
            near = near | (half * 8 < variables.head.first - low)
        seen = seen & near
    if KIND.INTERVALS:
        to = last_key + lane * 2
        seen = seen & (tile * 8 + pair >= of_keys(variables.head.begin, y) - to)
        seen = seen & (tile * 8 + pair < of_keys(variables.head.end, y) - to)
    if KIND.TABLE:
        seen = seen & bits_of_keys(y, last_key, variables.head)
    y = gl.where(seen, y, -float("inf"))
    return gl.convert_layout(y.reshape([64, BM]), x.type.layout, assert_trivial=True)


@gluon.jit
def mask(x, limit, last_key, variables, KIND: gl.constexpr):
    """x [64 keys, BM] with -inf where a query may not see a key.

    limit: the last key there is; last_key: the place of the tile's first query.
    """
    if KIND.CAUSAL or KIND.WINDOW or KIND.LISTS:
        return mask_keys(x, limit, last_key, variables, KIND)
    else:
        keys = gl.arange(0, 64, gl.SliceLayout(1, x.type.layout))
        return gl.where((keys <= limit)[:, None], x, -float("inf"))


@gluon.jit
def mask_if_needed(x, limit, last_key, variables, KIND: gl.constexpr, clear=0):
    """`mask` in a uniform branch, as most tiles are whole; clear: whether a table says that this is."""
    if KIND.CAUSAL:
        needed = gl.minimum(limit, last_key) < 63
    else:
        needed = limit < 63
    if KIND.WINDOW:
        needed = needed | (last_key + (x.shape[1] - 1) > variables.given.left)
    if KIND.INTERVALS:
        needed = needed | (last_key < variables.head.whole_begin)
        needed = needed | (last_key + x.shape[1] > variables.head.whole_end)
    if KIND.TABLE:
        needed = needed | (clear == 0)
    if needed:
        x = mask(x, limit, last_key, variables, KIND)
    return x


@gluon.jit
def first_clear(low, high, limit, CFG: gl.constexpr):
    """The last_key of the first step that needs no mask, where steps go from `low` up to `high`."""
    if CFG.KIND.CAUSAL:
        clear = gl.minimum(high, low + gl.maximum(63 - low + CFG.BM - 1, 0) // CFG.BM * CFG.BM)
    else:
        clear = low
    if limit < 63:
        clear = high
    return clear


@gluon.jit
def clear_outer_steps(low, high, limit, count, up, CFG: gl.constexpr):
    """(first, end) of the outer steps that need no mask, of `count` that take all query tiles in
    turn."""
    begin = 0
    if CFG.KIND.CAUSAL:
        end = gl.minimum(count, gl.maximum(high - 63, 0) // CFG.BM)
    else:
        end = count
    if limit < 63:
        end = 0
    if CFG.BOTH:
        begin = up * ((first_clear(low, high, limit, CFG) - low) // CFG.BM)
        end = gl.where(up == 1, count, end)
    return begin, end
