"""Which tiles meet: the key tiles that a query tile visits, and the query tiles that a key tile visits.

Each range is split where the mask stops mattering, so that the long loop runs without it.  A variant of
attention that leaves tiles out (a window, documents) changes these ranges; the condition on single
scores is `visible` in scores.py, which also says what KIND and `variables` are.

With the causal condition j <= i + offset, offset = Sk - Sq aligns the mask bottom-right, 0 top-left.
"""

import triton
import triton.language as tl


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


@triton.jit
def key_ranges(
    i0, Sk, offset, variables, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, KIND: tl.constexpr
):  # fmt: skip
    """Key tiles for the queries i0 ... i0 + BLOCK_M - 1: (begin, clear_begin, clear_end, end).

    No query sees a key of the tiles before `begin` and from `end` on; all see all keys of the tiles
    [clear_begin, clear_end), which need no mask.
    """
    if KIND.CAUSAL:
        clear_end = clamp(i0 + offset + 1, 0, Sk) // BLOCK_N
        end = tl.cdiv(clamp(i0 + BLOCK_M + offset, 0, Sk), BLOCK_N)
    else:
        clear_end = Sk // BLOCK_N
        end = tl.cdiv(Sk, BLOCK_N)
    return 0, 0, clear_end, end


@triton.jit
def query_range(j0, Sq, offset, variables, BLOCK_M: tl.constexpr, KIND: tl.constexpr):
    """Query tiles for the keys from j0 on: (begin, end); no other query sees any of them."""
    if KIND.CAUSAL:
        begin = clamp(j0 - offset, 0, Sq) // BLOCK_M
    else:
        begin = 0
    return begin, tl.cdiv(Sq, BLOCK_M)
