"""softmax, log_softmax and logsumexp over the rows of a matrix, forward and backward.

All three are the online-softmax state (m, l) of online_softmax.py, finished differently:

    softmax        y = exp(x - m) / l              dx = y * (dy - sum(y * dy))
    log_softmax    y = (x - m) - log(l)            dx = dy - exp(y) * sum(dy)
    logsumexp      y = m + log(l), one a row       dx = exp(x - y) * dy

A row that is all -inf gives NaN in the first two and -inf in the third, as in torch.

Two regimes.  A tile [R, C] with C >= N holds R whole rows in registers.  Wider rows are looped over
in tiles [1, C]: once for the state, once more backwards for the result, so that what was read last
is found in cache.

Legend: M rows, N columns, R x C the tile; x, dy [M, N] with unit column stride and a row stride of
their own; y, dx [M, N] contiguous; lse, dlse [M] float32.  Any float dtype in memory, float32 in
registers.
"""

import triton
import triton.language as tl

from .online_softmax import (
    LOG2E,
    exponentials,
    online_softmax_finish,
    online_softmax_start,
    online_softmax_update,
    shift_of,
)
from .rows import load, store


@triton.jit
def normalized(x, m, l, LOG: tl.constexpr, DIVIDE: tl.constexpr):
    """softmax or log_softmax of x [R, C], elements of rows with the state m, l [R].

    DIVIDE spares the rounding of 1 / l, which only a float32 result shows.  The empty state, which
    attention finishes as 0, is NaN here: (-inf) - (-inf), 0 / 0 or 0 * (1 / 0).
    """
    if LOG:
        return (x - m[:, None]) - tl.log(l)[:, None]
    else:
        p = exponentials(x, shift_of(m)[:, None], LOG2E, True)
        if DIVIDE:
            return tl.div_rn(p, tl.broadcast_to(l[:, None], p.shape))
        else:
            return p * tl.div_rn(1.0, l)[:, None]


@triton.jit(do_not_specialize=["M"])
def softmax_forward_kernel(
    x_ptr, y_ptr, x_stride, M, N,
    LOG: tl.constexpr, R: tl.constexpr, C: tl.constexpr,
):  # fmt: skip
    """Program i takes rows i * R to i * R + R - 1, held whole in registers."""
    rows = (tl.program_id(0).to(tl.int64) * R + tl.arange(0, R))[:, None]  # [R, 1]
    cols = tl.arange(0, C)[None, :]  # [1, C]
    mask = (rows < M) & (cols < N)
    x = load(x_ptr, rows * x_stride + cols, mask, -float("inf"))
    m, l = online_softmax_start(R)
    m, l, _, _ = online_softmax_update(m, l, x, LOG2E, True)
    y = normalized(x, m, l, LOG, y_ptr.dtype.element_ty == tl.float32)
    store(y_ptr, rows * N + cols, y, mask)


@triton.jit(do_not_specialize=["M"])
def softmax_forward_looped_kernel(
    x_ptr, y_ptr, x_stride, M, N,
    LOG: tl.constexpr, C: tl.constexpr,
):  # fmt: skip
    """Program i takes row i, in tiles [1, C]."""
    row = tl.program_id(0).to(tl.int64)
    lanes = tl.arange(0, C)[None, :]  # [1, C]
    tiles = tl.cdiv(N, C)
    m, l = online_softmax_start(1)
    for i in range(0, tiles):
        cols = i * C + lanes
        x = load(x_ptr, row * x_stride + cols, cols < N, -float("inf"))
        m, l, _, _ = online_softmax_update(m, l, x, LOG2E, True)
    for i in range(0, tiles):
        cols = (tiles - 1 - i) * C + lanes
        x = load(x_ptr, row * x_stride + cols, cols < N, -float("inf"))
        y = normalized(x, m, l, LOG, y_ptr.dtype.element_ty == tl.float32)
        store(y_ptr, row * N + cols, y, cols < N)


@triton.jit
def gradient_term(y, dy, LOG: tl.constexpr):
    """What the gradient of a row needs summed [R, C]."""
    if LOG:
        return dy
    else:
        return y * dy


@triton.jit
def gradient(y, dy, total, LOG: tl.constexpr):
    """dx [R, C] from the sum of the terms [R, 1]."""
    if LOG:
        return dy - tl.exp(y) * total
    else:
        return y * (dy - total)


@triton.jit(do_not_specialize=["M"])
def softmax_backward_kernel(
    dy_ptr, y_ptr, dx_ptr, dy_stride, y_stride, M, N,
    LOG: tl.constexpr, R: tl.constexpr, C: tl.constexpr,
):  # fmt: skip
    """Program i takes rows i * R to i * R + R - 1, held whole in registers."""
    rows = (tl.program_id(0).to(tl.int64) * R + tl.arange(0, R))[:, None]  # [R, 1]
    cols = tl.arange(0, C)[None, :]  # [1, C]
    mask = (rows < M) & (cols < N)
    y = load(y_ptr, rows * y_stride + cols, mask)
    dy = load(dy_ptr, rows * dy_stride + cols, mask)
    total = tl.sum(gradient_term(y, dy, LOG), 1)[:, None]  # [R, 1]
    store(dx_ptr, rows * N + cols, gradient(y, dy, total, LOG), mask)


@triton.jit(do_not_specialize=["M"])
def softmax_backward_looped_kernel(
    dy_ptr, y_ptr, dx_ptr, dy_stride, y_stride, M, N,
    LOG: tl.constexpr, C: tl.constexpr,
):  # fmt: skip
    """Program i takes row i, in tiles [1, C]."""
    row = tl.program_id(0).to(tl.int64)
    lanes = tl.arange(0, C)[None, :]  # [1, C]
    tiles = tl.cdiv(N, C)
    sums = tl.zeros([1, C], tl.float32)
    for i in range(0, tiles):
        cols = i * C + lanes
        dy = load(dy_ptr, row * dy_stride + cols, cols < N)
        y = load(y_ptr, row * y_stride + cols, cols < N)  # not read if LOG
        sums += gradient_term(y, dy, LOG)
    total = tl.sum(sums, 1)[:, None]  # [1, 1]
    for i in range(0, tiles):
        cols = (tiles - 1 - i) * C + lanes
        dy = load(dy_ptr, row * dy_stride + cols, cols < N)
        y = load(y_ptr, row * y_stride + cols, cols < N)
        store(dx_ptr, row * N + cols, gradient(y, dy, total, LOG), cols < N)


@triton.jit(do_not_specialize=["M"])
def logsumexp_forward_kernel(
    x_ptr, lse_ptr, x_stride, M, N,
    R: tl.constexpr, C: tl.constexpr,
):  # fmt: skip
    """Program i takes rows i * R to i * R + R - 1, in tiles [R, C], whatever the width."""
    row = tl.program_id(0).to(tl.int64) * R + tl.arange(0, R)  # [R]
    rows = row[:, None]
    m, l = online_softmax_start(R)
    largest = m
    for start in range(0, N, C):
        cols = start + tl.arange(0, C)[None, :]  # [1, C]
        x = load(x_ptr, rows * x_stride + cols, (rows < M) & (cols < N), -float("inf"))
        largest = tl.maximum(largest, tl.max(x, 1))
        # A score of +inf would make l NaN; it is left out here and put back below.
        x = tl.where(x == float("inf"), -float("inf"), x)
        m, l, _, _ = online_softmax_update(m, l, x, LOG2E, True)
    lse, _ = online_softmax_finish(m, l, LOG2E)
    infinite = (largest == float("inf")) & (l == l)  # l is NaN where the row holds a NaN
    tl.store(lse_ptr + row, tl.where(infinite, float("inf"), lse), mask=row < M)


@triton.jit(do_not_specialize=["M"])
def logsumexp_backward_kernel(
    dlse_ptr, x_ptr, lse_ptr, dx_ptr, x_stride, M, N,
    R: tl.constexpr, C: tl.constexpr,
):  # fmt: skip
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
