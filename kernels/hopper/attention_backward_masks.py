"""Attention backward on Hopper: masks of scores, keys in rows, and which steps of a walk need them.

A step needs no mask where its first query sees all 64 keys of the warpgroup (`last_key`), and there are
that many (`limit`).  Hardly any step needs one, but asking in every step costs 2 to 6% of head_dim
128's cycles, because ptxas moves nothing across the branch.  So there (CFG.PEELED) the walk is cut into
pieces.  Where there are 64 keys, only queries at the diagonal need a mask: a walk up begins with them,
a walk down ends with them.  Where there are fewer keys, all steps need one.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

# What is known of the steps of a piece: none needs a mask (CLEAR); each gets one (MASKED); the first
# ones get one, and the others need none (AHEAD); nothing, so each asks (ASKED).
CLEAR, MASKED, AHEAD, ASKED = (gl.constexpr(kind) for kind in range(4))


@gluon.constexpr_function
def along(layout, dim):
    """The layout of one dimension of a six-dimensional tensor."""
    for d in reversed(range(6)):
        if d != dim:
            layout = gl.SliceLayout(d, layout)
    return layout


@gluon.jit
def mask_keys(x, limit, last_key):
    """x [64 keys, BM] with -inf where key > min(query + last_key, limit), counted from the tile's
    first.

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
    seen = (half * 8 - tile * 8 - pair <= last_key - low + lane * 2) & (half * 8 <= limit - low)
    y = gl.where(seen, y, -float("inf"))
    return gl.convert_layout(y.reshape([64, BM]), x.type.layout, assert_trivial=True)


@gluon.jit
def mask(x, limit, last_key, variables, KIND: gl.constexpr):
    """x [64 keys, BM] with -inf where a query may not see a key.

    limit: the last key there is; last_key: the last key that the tile's first query sees; both counted
    from the warpgroup's first.
    """
    if KIND.CAUSAL:
        return mask_keys(x, limit, last_key)
    else:
        keys = gl.arange(0, 64, gl.SliceLayout(1, x.type.layout))
        return gl.where((keys <= limit)[:, None], x, -float("inf"))


@gluon.jit
def mask_if_needed(x, limit, last_key, variables, KIND: gl.constexpr):
    """`mask` in a uniform branch, as most tiles are whole."""
    if KIND.CAUSAL:
        if gl.minimum(limit, last_key) < 63:
            x = mask(x, limit, last_key, variables, KIND)
    else:
        if limit < 63:
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
