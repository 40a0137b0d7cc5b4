"""LayerNorm and RMSNorm over the rows of a matrix, forward and backward, with fused residual add.

Forward, for one row of x (or of total = x + residual, rounded as it is stored):

    xhat = (x - mean) * rstd        rstd = 1 / sqrt(variance + eps)        y = xhat * weight + bias

where (mean, variance) come from the moments state of moments.py; CENTERED = False is RMSNorm, whose
mean is 0 and whose variance is the mean square.

Backward, with g = dy * weight and averages over the N columns of the row:

    dx = rstd * (g - xhat * average(g * xhat) - average(g))        (the last term only if CENTERED)
    dweight = sum over rows of dy * xhat        dbias = sum over rows of dy

and the gradient of total, where a residual was added, is that dx plus the gradient that reaches
total from elsewhere (dtotal).  dweight and dbias are summed in two steps of fixed order: every
program adds up its rows in registers and writes one float32 row of partial sums, and
column_sums_kernel adds those.

Two regimes.  A tile [R, C] with C >= N holds R whole rows in registers (norm_forward_kernel,
norm_backward_kernel).  Wider rows are looped over in tiles [1, C]: once for the statistics, once
more backwards for the result, so that what was read last is found in cache (the *_looped_kernel);
there dweight and dbias get a kernel of their own that walks down columns.

Legend: M rows, N columns, R x C the tile, P programs; x, residual, dy, dtotal [M, N] with unit
column stride and a row stride of their own; y, total, dx, dresidual [M, N] contiguous; weight, bias
[N]; mean, rstd [M] float32.  Any float dtype in memory, float32 in registers.  A pointer that is
None leaves out its part.
"""

import triton
import triton.language as tl

from .moments import moments_finish, moments_merge, moments_of_tile, moments_start
from .rows import load, rounded, store


@triton.jit
def load_total(x_ptr, x_offsets, residual_ptr, residual_offsets, total_ptr, offsets, mask):
    """x [R, C]; with a residual their sum, stored in total and returned as rounded there."""
    x = load(x_ptr, x_offsets, mask)
    if residual_ptr is not None:
        total = rounded(x + load(residual_ptr, residual_offsets, mask), total_ptr.dtype.element_ty)
        tl.store(total_ptr + offsets, total, mask=mask)
        x = total.to(tl.float32)
    return x


@triton.jit
def scale_and_shift(xhat, weight_ptr, bias_ptr, cols, inside):
    """xhat [R, C] * weight + bias, each of them where given."""
    y = xhat
    if weight_ptr is not None:
        y = y * load(weight_ptr, cols, inside)
    if bias_ptr is not None:
        y = y + load(bias_ptr, cols, inside)
    return y


@triton.jit(do_not_specialize=["M"])
def norm_forward_kernel(
    x_ptr, residual_ptr, weight_ptr, bias_ptr,  # in
    y_ptr, total_ptr, mean_ptr, rstd_ptr,  # out
    x_stride, residual_stride, M, N, eps,
    CENTERED: tl.constexpr, R: tl.constexpr, C: tl.constexpr,
):  # fmt: skip
    """Program i normalizes rows i * R to i * R + R - 1, held whole in registers."""
    row = tl.program_id(0).to(tl.int64) * R + tl.arange(0, R)  # [R]
    rows = row[:, None]  # [R, 1]
    cols = tl.arange(0, C)[None, :]  # [1, C]
    inside = cols < N  # [1, C]
    mask = (rows < M) & inside  # [R, C]
    offsets = rows * N + cols

    x = load_total(
        x_ptr, rows * x_stride + cols,
        residual_ptr, rows * residual_stride + cols,
        total_ptr, offsets, mask,
    )  # fmt: skip
    n = tl.full([R], 0.0, tl.float32) + N
    n, mean, M2 = moments_of_tile(x, inside, n, CENTERED)
    rstd = moments_finish(n, M2, eps)
    if CENTERED:
        x -= mean[:, None]
        tl.store(mean_ptr + row, mean, mask=row < M)
    tl.store(rstd_ptr + row, rstd, mask=row < M)
    store(y_ptr, offsets, scale_and_shift(x * rstd[:, None], weight_ptr, bias_ptr, cols, inside), mask)


@triton.jit(do_not_specialize=["M"])
def norm_forward_looped_kernel(
    x_ptr, residual_ptr, weight_ptr, bias_ptr,  # in
    y_ptr, total_ptr, mean_ptr, rstd_ptr,  # out
    x_stride, residual_stride, M, N, eps,
    CENTERED: tl.constexpr, C: tl.constexpr,
):  # fmt: skip
    """Program i normalizes row i, in tiles [1, C]."""
    row = tl.program_id(0).to(tl.int64)
    lanes = tl.arange(0, C)[None, :]  # [1, C]
    tiles = tl.cdiv(N, C)

    n, mean, M2 = moments_start(1)
    for i in range(0, tiles):
        cols = i * C + lanes
        inside = cols < N
        x = load_total(
            x_ptr, row * x_stride + cols,
            residual_ptr, row * residual_stride + cols,
            total_ptr, row * N + cols, inside,
        )  # fmt: skip
        n_tile = tl.zeros([1], tl.float32) + tl.minimum(N - i * C, C)
        n_tile, mean_tile, M2_tile = moments_of_tile(x, inside, n_tile, CENTERED)
        n, mean, M2 = moments_merge(n, mean, M2, n_tile, mean_tile, M2_tile)
    rstd = moments_finish(n, M2, eps)
    one = row + tl.arange(0, 1)
    if CENTERED:
        tl.store(mean_ptr + one, mean)
    tl.store(rstd_ptr + one, rstd)

    tl.debug_barrier()  # total is read back by other threads than wrote it
    for i in range(0, tiles):
        cols = (tiles - 1 - i) * C + lanes
        inside = cols < N
        if residual_ptr is not None:
            x = load(total_ptr, row * N + cols, inside)
        else:
            x = load(x_ptr, row * x_stride + cols, inside)
        if CENTERED:
            x -= mean[:, None]
        y = scale_and_shift(x * rstd[:, None], weight_ptr, bias_ptr, cols, inside)
        store(y_ptr, row * N + cols, y, inside)


@triton.jit
def normalize(x, mean_ptr, rstd, row, valid, CENTERED: tl.constexpr):
    """xhat [R, C] from x and the statistics saved for its rows."""
    if CENTERED:
        x -= load(mean_ptr, row, valid)[:, None]
    return x * rstd[:, None]


@triton.jit
def store_dx(dx, dtotal_ptr, dtotal_offsets, dx_ptr, dresidual_ptr, offsets, mask):
    """Add the gradient that reaches total from elsewhere; one copy for each dtype asked for."""
    if dtotal_ptr is not None:
        dx += load(dtotal_ptr, dtotal_offsets, mask)
    store(dx_ptr, offsets, dx, mask)
    if dresidual_ptr is not None:
        store(dresidual_ptr, offsets, dx, mask)


@triton.jit(do_not_specialize=["M"])
def norm_backward_kernel(
    dy_ptr, dtotal_ptr, x_ptr, weight_ptr, mean_ptr, rstd_ptr,  # in; x is total where there is one
    dx_ptr, dresidual_ptr,  # out
    dweight_ptr, dbias_ptr,  # out [P, N] float32, one row of partial sums a program
    dy_stride, dtotal_stride, x_stride, M, N,
    CENTERED: tl.constexpr, R: tl.constexpr, C: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Program p takes every P-th tile of R rows, starting with tile p."""
    program = tl.program_id(0)
    cols = tl.arange(0, C)[None, :]  # [1, C]
    inside = cols < N
    if weight_ptr is not None:
        weight = load(weight_ptr, cols, inside)
    if dweight_ptr is not None:
        dweight = tl.zeros([R, C], tl.float32)
    if dbias_ptr is not None:
        dbias = tl.zeros([R, C], tl.float32)

    for tile in tl.range(program, tl.cdiv(M, R), tl.num_programs(0), num_stages=STAGES):
        row = tl.cast(tile, tl.int64) * R + tl.arange(0, R)  # [R]
        rows = row[:, None]
        mask = (rows < M) & inside  # [R, C]
        x = load(x_ptr, rows * x_stride + cols, mask)
        dy = load(dy_ptr, rows * dy_stride + cols, mask)
        rstd = load(rstd_ptr, row, row < M)
        xhat = normalize(x, mean_ptr, rstd, row, row < M, CENTERED)
        g = dy
        if weight_ptr is not None:
            g = dy * weight
        # dy is 0 outside the mask, and with it g: the sums need no mask of their own.
        dx = g - xhat * (tl.sum(g * xhat, 1) / N)[:, None]
        if CENTERED:
            dx -= (tl.sum(g, 1) / N)[:, None]
        store_dx(
            dx * rstd[:, None], dtotal_ptr, rows * dtotal_stride + cols,
            dx_ptr, dresidual_ptr, rows * N + cols, mask,
        )  # fmt: skip
        if dweight_ptr is not None:
            dweight += dy * xhat
        if dbias_ptr is not None:
            dbias += dy

    partial = program.to(tl.int64) * N + tl.arange(0, C)  # [C]
    if dweight_ptr is not None:
        tl.store(dweight_ptr + partial, tl.sum(dweight, 0), mask=tl.arange(0, C) < N)
    if dbias_ptr is not None:
        tl.store(dbias_ptr + partial, tl.sum(dbias, 0), mask=tl.arange(0, C) < N)


@triton.jit(do_not_specialize=["M"])
def norm_backward_looped_kernel(
    dy_ptr, dtotal_ptr, x_ptr, weight_ptr, mean_ptr, rstd_ptr,  # in; x is total where there is one
    dx_ptr, dresidual_ptr,  # out
    dy_stride, dtotal_stride, x_stride, M, N,
    CENTERED: tl.constexpr, C: tl.constexpr,
):  # fmt: skip
    """Program i computes dx of row i, in tiles [1, C]."""
    row = tl.program_id(0).to(tl.int64)
    lanes = tl.arange(0, C)[None, :]  # [1, C]
    tiles = tl.cdiv(N, C)
    one = row + tl.arange(0, 1)
    rstd = tl.load(rstd_ptr + one)

    sum_g_xhat = tl.zeros([1, C], tl.float32)
    sum_g = tl.zeros([1, C], tl.float32)
    for i in range(0, tiles):
        cols = i * C + lanes
        inside = cols < N
        g = load(dy_ptr, row * dy_stride + cols, inside)
        if weight_ptr is not None:
            g *= load(weight_ptr, cols, inside)
        x = load(x_ptr, row * x_stride + cols, inside)
        sum_g_xhat += g * normalize(x, mean_ptr, rstd, one, one < M, CENTERED)
        if CENTERED:
            sum_g += g
    average_g_xhat = tl.sum(sum_g_xhat, 1) / N
    average_g = tl.sum(sum_g, 1) / N

    for i in range(0, tiles):
        cols = (tiles - 1 - i) * C + lanes
        inside = cols < N
        g = load(dy_ptr, row * dy_stride + cols, inside)
        if weight_ptr is not None:
            g *= load(weight_ptr, cols, inside)
        x = load(x_ptr, row * x_stride + cols, inside)
        xhat = normalize(x, mean_ptr, rstd, one, one < M, CENTERED)
        dx = g - xhat * average_g_xhat[:, None]
        if CENTERED:
            dx -= average_g[:, None]
        store_dx(
            dx * rstd[:, None], dtotal_ptr, row * dtotal_stride + cols,
            dx_ptr, dresidual_ptr, row * N + cols, inside,
        )  # fmt: skip


@triton.jit(do_not_specialize=["M", "P"])
def norm_weight_gradient_kernel(
    dy_ptr, x_ptr, mean_ptr, rstd_ptr,  # in; x is total where there is one
    dweight_ptr, dbias_ptr,  # out [P, N] float32
    dy_stride, x_stride, M, N, P,
    CENTERED: tl.constexpr, R: tl.constexpr, C: tl.constexpr,
):  # fmt: skip
    """Program (c, p) walks down columns c * C to c * C + C - 1 of every P-th tile of R rows."""
    column_tiles = tl.cdiv(N, C)
    p = tl.program_id(0) // column_tiles
    col = (tl.program_id(0) % column_tiles) * C + tl.arange(0, C)  # [C]
    cols = col[None, :]
    inside = cols < N
    dweight = tl.zeros([R, C], tl.float32)
    dbias = tl.zeros([R, C], tl.float32)
    for tile in range(p, tl.cdiv(M, R), P):
        row = tl.cast(tile, tl.int64) * R + tl.arange(0, R)  # [R]
        rows = row[:, None]
        mask = (rows < M) & inside
        dy = load(dy_ptr, rows * dy_stride + cols, mask)
        if dweight_ptr is not None:
            x = load(x_ptr, rows * x_stride + cols, mask)
            rstd = load(rstd_ptr, row, row < M)
            dweight += dy * normalize(x, mean_ptr, rstd, row, row < M, CENTERED)
        if dbias_ptr is not None:
            dbias += dy
    partial = p.to(tl.int64) * N + col
    if dweight_ptr is not None:
        tl.store(dweight_ptr + partial, tl.sum(dweight, 0), mask=col < N)
    if dbias_ptr is not None:
        tl.store(dbias_ptr + partial, tl.sum(dbias, 0), mask=col < N)


@triton.jit
def column_sum(partial_ptr, out_ptr, P, N, R: tl.constexpr, C: tl.constexpr):
    """out [N] = the sum over the P rows of partial [P, N], columns of this program."""
    cols = tl.program_id(0) * C + tl.arange(0, C)[None, :]  # [1, C]
    total = tl.zeros([R, C], tl.float32)
    for start in range(0, P, R):
        rows = start + tl.arange(0, R)[:, None]
        total += load(partial_ptr, rows.to(tl.int64) * N + cols, (rows < P) & (cols < N))
    col = tl.program_id(0) * C + tl.arange(0, C)
    store(out_ptr, col, tl.sum(total, 0), col < N)


@triton.jit(do_not_specialize=["P"])
def column_sums_kernel(
    dweight_partial_ptr, dbias_partial_ptr,  # in [P, N] float32
    dweight_ptr, dbias_ptr,  # out [N]
    P, N, R: tl.constexpr, C: tl.constexpr,
):  # fmt: skip
    """The second step of dweight and dbias: program c adds up columns c * C to c * C + C - 1."""
    if dweight_ptr is not None:
        column_sum(dweight_partial_ptr, dweight_ptr, P, N, R, C)
    if dbias_ptr is not None:
        column_sum(dbias_partial_ptr, dbias_ptr, P, N, R, C)
