"""logsumexp over the rows of a matrix, forward and backward: the online-softmax state (m, l), finished.

    y = m + log(l), one a row          dx = exp(x - y) * dy

A row that is all -inf gives -inf, one with +inf gives +inf, as in torch.

Forward: a program takes R rows in tiles [R, C], as many as there are.  Wide rows are split over
programs, the first of which waits for the others' states (exchange.py).  Backward: one tile a program.

Legend: M rows, N columns, R x C the tile; x [M, N] with unit column stride; dx [M, N] contiguous; lse,
dlse [M] float32; words [M, splits] int64 and LANES, POLLS: see exchange.py.
"""

import triton
import triton.language as tl

from .exchange import collect, pack, publish
from .online_softmax import (
    LOG2E,
    online_softmax_finish,
    online_softmax_start,
    online_softmax_update,
)
from .rounding import load, store
from .softmax import join


@triton.jit
def scan(x_ptr, offsets, first, last, mask, C: tl.constexpr):
    """The largest score and l [R] of the columns from `first` to `last` of rows at offsets [R, 1].

    A score of +inf would make l NaN: l is the sum of the others, and finish puts +inf back.
    """
    m, l = online_softmax_start(offsets.shape[0])
    infinite = m > 0  # nowhere yet
    for start in range(first, last, C):
        cols = start + tl.arange(0, C)[None, :]  # [1, C]
        x = load(x_ptr, offsets + cols, mask & (cols < last), -float("inf"))
        infinite = infinite | (tl.max(x, 1) == float("inf"))
        x = tl.where(x == float("inf"), -float("inf"), x)
        m, l, _, _ = online_softmax_update(m, l, x, LOG2E, True)
    return tl.where(infinite, float("inf"), m), l


@triton.jit
def finish(largest, l):
    """The logsumexp from the largest score and l; l is NaN where the row holds a NaN."""
    lse, _ = online_softmax_finish(largest, l, LOG2E)
    return tl.where((largest == float("inf")) & (l == l), float("inf"), lse)


@triton.jit(do_not_specialize=["M"])
def logsumexp_forward_kernel(x_ptr, lse_ptr, x_stride, M, N, R: tl.constexpr, C: tl.constexpr):
    """Program i takes rows i * R to i * R + R - 1, in tiles [R, C], whatever the width."""
    row = tl.program_id(0).to(tl.int64) * R + tl.arange(0, R)  # [R]
    rows = row[:, None]
    largest, l = scan(x_ptr, rows * x_stride, 0, N, rows < M, C)
    tl.store(lse_ptr + row, finish(largest, l), mask=row < M)


@triton.jit(do_not_specialize=["M"])
def logsumexp_forward_split_kernel(
    x_ptr, lse_ptr, words_ptr, x_stride, M, N, C: tl.constexpr, LANES: tl.constexpr, POLLS: tl.constexpr
):
    """Program i takes split i % splits of row i // splits.  The first of a row waits for the others
    and stores the result."""
    splits = tl.cdiv(N, C)
    row = (tl.program_id(0) // splits).to(tl.int64)
    own = tl.program_id(0) % splits
    words_ptr += row * splits
    offsets = row * x_stride + tl.zeros([1, 1], tl.int64)
    words = tl.zeros([LANES], tl.int64)
    missing, split = splits, own
    while missing > 0:
        largest, l = scan(x_ptr, offsets, split * C, tl.minimum(split * C + C, N), True, C)
        publish(words_ptr, split, pack(largest, l))
        if own > 0:
            missing = 0
        elif split == 0:
            words, missing = collect(words_ptr, splits, LANES, POLLS)
        split = tl.where(split + 1 < splits, split + 1, 0)
    if own == 0:
        largest, l = join(words, splits)
        tl.store(lse_ptr + row + tl.arange(0, 1), finish(largest, l))


@triton.jit(do_not_specialize=["M"])
def logsumexp_backward_kernel(
    dlse_ptr, x_ptr, lse_ptr, dx_ptr, x_stride, M, N, R: tl.constexpr, C: tl.constexpr
):
    """Program (r, c) writes the tile [R, C] of dx at rows r * R, columns c * C."""
    column_tiles = tl.cdiv(N, C)
    row = (tl.program_id(0) // column_tiles).to(tl.int64) * R + tl.arange(0, R)  # [R]
    rows = row[:, None]
    cols = (tl.program_id(0) % column_tiles) * C + tl.arange(0, C)[None, :]  # [1, C]
    mask = (rows < M) & (cols < N)
    lse = tl.load(lse_ptr + row, mask=row < M, other=0.0)
    dlse = tl.load(dlse_ptr + row, mask=row < M, other=0.0)
    x = load(x_ptr, rows * x_stride + cols, mask, -float("inf"))
    dx = tl.exp(x - lse[:, None]) * dlse[:, None]
    store(dx_ptr, rows * N + cols, dx, mask)
