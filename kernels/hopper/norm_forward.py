"""LayerNorm and RMSNorm forward on Hopper, in Gluon: wide rows of 16-bit elements in shared memory.

The algorithm is that of kernels/norm.py.  There a row waits for its moments in registers or in the
cache.  Here it waits in shared memory (rows_in_shared.py) and is widened to float32 as often as needed,
and a program has registers only for a slice of it.  So a multiprocessor has enough bytes in flight for
the memory's full bandwidth.

A program takes C columns of R rows.  So weight and bias, which the cache delivers beside x, are read
once for R rows.

Legend: as in kernels/norm.py, without hooks; x, residual, y and total are of one 16-bit dtype; the C
columns of a program are K slices [S] of rows_in_shared.py, WHOLE says that the last program's are all
there; words, used [M, splits] int64, used or None, and LANES, POLLS: see kernels/exchange.py.  Strides
and N are in units of 16 bytes.
"""

# ruff: noqa: RUF005  (Triton has no starred expressions in tuples)

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from ..exchange import clear, collect, pack, publish
from ..moments import moments_finish
from ..norm import elements_of, join_moments, scaled
from .gluon_names import barrier
from .rows_in_shared import (
    buffers,
    columns_of,
    receive,
    request,
    slice_count,
    slice_of,
    units,
    widened,
)


@gluon.constexpr_function
def slices_ahead(ptr):
    """How many slices of weight or bias a thread holds before their turn: 64 bytes."""
    return 4 if ptr is None else 64 // ptr.dtype.element_ty.primitive_bitwidth


@gluon.jit
def buffers_of_rows(dtype: gl.constexpr, C: gl.constexpr, R: gl.constexpr, HAS_RESIDUAL: gl.constexpr):
    """Shared memory for R rows of x, and as many of the residual if there is one."""
    smem = ()
    for _ in gl.static_range(R):
        smem = smem + ((buffers(dtype, C), buffers(dtype, C) if HAS_RESIDUAL else ()),)
    return smem


@gluon.jit
def row_of(tile, r: gl.constexpr, M, R: gl.constexpr):
    """Row r of a tile of R rows; the last tile may take the last row more than once."""
    return gl.minimum(tile.to(gl.int64) * R + r, M - 1)


@gluon.jit
def fetch(
    smem,
    x_ptr,
    residual_ptr,
    total_ptr,
    x_stride,
    residual_stride,
    tile,
    first,
    M,
    N,
    WHOLE: gl.constexpr,
):
    """The part of a tile that is normalized: the columns from `first` on of its rows of x, or of total,
    which is stored; 0 past the end of a row."""
    R: gl.constexpr = slice_count(smem)
    UNITS: gl.constexpr = units(x_ptr.dtype.element_ty)
    for r in gl.static_range(R):
        row = row_of(tile, r, M, R)
        request(smem[r][0], x_ptr + row * x_stride * UNITS, first, N, WHOLE)
        if residual_ptr is not None:
            request(smem[r][1], residual_ptr + row * residual_stride * UNITS, first, N, WHOLE)
    for r in gl.static_range(R):
        receive(smem[r][0], first, N, 0.0, WHOLE)
        if residual_ptr is not None:
            receive(smem[r][1], first, N, 0.0, WHOLE)
            row = row_of(tile, r, M, R)
            add(smem[r][0], smem[r][1], total_ptr + row * N, first, N, WHOLE)


@gluon.jit
def add(smem, residual_smem, total_ptr, first, N, WHOLE: gl.constexpr):
    """Add a chunk of the residual to that of x, and store total."""
    for k in gl.static_range(slice_count(smem)):
        cols = first + columns_of(smem, k)
        total = widened(slice_of(smem, k)) + widened(slice_of(residual_smem, k))
        total = total.to(smem[0].dtype)
        smem[k].store(total)
        if WHOLE:
            gl.store(total_ptr + cols, total)
        else:
            gl.store(total_ptr + cols, total, mask=cols < N)


@gluon.jit
def squares(smem, k: gl.constexpr, first, mean, N, CENTERED: gl.constexpr, WHOLE: gl.constexpr):
    """Squared deviations of slice k of a chunk; 0 past the end of the row."""
    deviation = widened(slice_of(smem, k))
    if CENTERED:
        deviation -= mean
        if not WHOLE:
            deviation = gl.where(first + columns_of(smem, k) < N, deviation, 0.0)
    return deviation * deviation


@gluon.jit
def moments_of(smem, first, n, N, CENTERED: gl.constexpr, WHOLE: gl.constexpr):
    """mean and M2 of a chunk of n elements, scalars; in two passes, as moments_of_tile."""
    mean = n * 0.0
    if CENTERED:
        sums = widened(slice_of(smem, 0))
        for k in gl.static_range(1, slice_count(smem)):
            sums += widened(slice_of(smem, k))
        mean = gl.div_rn(gl.sum(sums, 0), n)
        barrier()  # so that the slices are read again, and not kept in registers
    sums = squares(smem, 0, first, mean, N, CENTERED, WHOLE)
    for k in gl.static_range(1, slice_count(smem)):
        sums += squares(smem, k, first, mean, N, CENTERED, WHOLE)
    return mean, gl.sum(sums, 0)


@gluon.jit
def result(
    x,
    mean,
    rstd,
    weight_ptr,
    weight,
    bias_ptr,
    bias,
    CENTERED: gl.constexpr,
    CASTING: gl.constexpr,
    dtype: gl.constexpr,
):
    """y of a slice x in float32, of `dtype`; weight and bias as in memory, where there are any."""
    y = (x - mean if CENTERED else x) * rstd
    if weight_ptr is not None:
        y = scaled(y, widened(weight), CASTING, dtype)
    if bias_ptr is not None:
        y += widened(bias)
    return y.to(dtype)


@gluon.jit
def parameter(ptr, smem, k: gl.constexpr, first, N, WHOLE: gl.constexpr):
    """(the slice of weight or bias that goes with slice k,), as in memory; (0.0,) without a weight or
    bias, () where there is no slice k."""
    if k >= slice_count(smem):
        return ()
    elif ptr is None:
        return (0.0,)
    else:
        cols = first + columns_of(smem, k)
        return (gl.load(ptr + cols) if WHOLE else gl.load(ptr + cols, mask=cols < N, other=0.0),)


@gluon.jit
def first_parameters(weight_ptr, bias_ptr, smem, first, N, WHOLE: gl.constexpr):
    """The first slices of weight and bias, which are loaded while x is."""
    weights, biases = (), ()
    for k in gl.static_range(slices_ahead(weight_ptr) // 2):
        weights = weights + parameter(weight_ptr, smem, k, first, N, WHOLE)
        biases = biases + parameter(bias_ptr, smem, k, first, N, WHOLE)
    return weights, biases


@gluon.jit
def store_result(
    weight_ptr,
    bias_ptr,
    weights,
    biases,
    y_ptr,
    smem,
    means,
    rstds,
    tile,
    first,
    M,
    N,
    CENTERED: gl.constexpr,
    CASTING: gl.constexpr,
    WHOLE: gl.constexpr,
):
    """y of a tile whose columns begin at `first`, of rows with the statistics means, rstds; weights,
    biases: first_parameters.

    The others are loaded some slices before their turn: the compiler moves no load over a store.
    """
    AHEAD: gl.constexpr = slices_ahead(weight_ptr)
    R: gl.constexpr = slice_count(smem)
    dtype: gl.constexpr = y_ptr.dtype.element_ty
    chunk = smem[0][0]
    for k in gl.static_range(slice_count(weights), AHEAD):
        weights = weights + parameter(weight_ptr, chunk, k, first, N, WHOLE)
        biases = biases + parameter(bias_ptr, chunk, k, first, N, WHOLE)
    barrier()  # as in moments_of
    for k in gl.static_range(slice_count(chunk)):
        weights = weights + parameter(weight_ptr, chunk, k + AHEAD, first, N, WHOLE)
        biases = biases + parameter(bias_ptr, chunk, k + AHEAD, first, N, WHOLE)
        cols = first + columns_of(chunk, k)
        for r in gl.static_range(R):
            y = result(
                widened(slice_of(smem[r][0], k)),
                means[r],
                rstds[r],
                weight_ptr,
                weights[k],
                bias_ptr,
                biases[k],
                CENTERED,
                CASTING,
                dtype,
            )
            row_ptr = y_ptr + row_of(tile, r, M, R) * N
            if WHOLE:
                gl.store(row_ptr + cols, y)
            else:
                gl.store(row_ptr + cols, y, mask=cols < N)


@gluon.jit
def store_statistics(mean_ptr, rstd_ptr, means, rstds, tile, M):
    R: gl.constexpr = slice_count(means)
    for r in gl.static_range(R):
        row = row_of(tile, r, M, R)
        if mean_ptr is not None:
            gl.store(mean_ptr + row, means[r])
        if rstd_ptr is not None:
            gl.store(rstd_ptr + row, rstds[r])


@gluon.jit(do_not_specialize=["M"])
def norm_forward_shared_kernel(
    x_ptr,
    residual_ptr,
    weight_ptr,
    bias_ptr,  # in
    y_ptr,
    total_ptr,
    mean_ptr,
    rstd_ptr,  # out
    x_stride,
    residual_stride,
    M,
    N,
    eps,
    CENTERED: gl.constexpr,
    CASTING: gl.constexpr,
    WHOLE: gl.constexpr,
    C: gl.constexpr,
    R: gl.constexpr,
):
    """Program i takes rows i * R to i * R + R - 1, of at most C columns."""
    UNITS: gl.constexpr = units(x_ptr.dtype.element_ty)
    tile, N = gl.program_id(0), N * UNITS
    smem = buffers_of_rows(x_ptr.dtype.element_ty, C, R, residual_ptr is not None)
    weights, biases = first_parameters(weight_ptr, bias_ptr, smem[0][0], 0, N, WHOLE)
    fetch(smem, x_ptr, residual_ptr, total_ptr, x_stride, residual_stride, tile, 0, M, N, WHOLE)
    means, rstds = (), ()
    for r in gl.static_range(R):
        mean, M2 = moments_of(smem[r][0], 0, N.to(gl.float32), N, CENTERED, WHOLE)
        means, rstds = means + (mean,), rstds + (moments_finish(N.to(gl.float32), M2, eps),)
    store_statistics(mean_ptr, rstd_ptr, means, rstds, tile, M)
    store_result(
        weight_ptr,
        bias_ptr,
        weights,
        biases,
        y_ptr,
        smem,
        means,
        rstds,
        tile,
        0,
        M,
        N,
        CENTERED,
        CASTING,
        WHOLE,
    )


@gluon.jit(do_not_specialize=["M"])
def norm_forward_shared_split_kernel(
    x_ptr, residual_ptr, weight_ptr, bias_ptr,  # in
    y_ptr, total_ptr, mean_ptr, rstd_ptr, words_ptr, used_ptr,  # out
    x_stride, residual_stride, M, N, eps,
    CENTERED: gl.constexpr, CASTING: gl.constexpr, WHOLE: gl.constexpr,
    C: gl.constexpr, R: gl.constexpr, LANES: gl.constexpr, POLLS: gl.constexpr,
):  # fmt: skip
    """Program i takes split i % splits of tile i // splits of R rows."""
    UNITS: gl.constexpr = units(x_ptr.dtype.element_ty)
    LANES_LAYOUT: gl.constexpr = gl.BlockedLayout([1, 1], [1, 32], [gl.num_warps(), 1], [1, 0])
    # A warp's worth at least, so that no two threads have the same.
    lanes = gl.arange(0, LANES if LANES > 32 else 32, gl.SliceLayout(0, LANES_LAYOUT))
    N *= UNITS
    splits = gl.cdiv(N, C)
    tile, own = gl.program_id(0) // splits, gl.program_id(0) % splits
    smem = buffers_of_rows(x_ptr.dtype.element_ty, C, R, residual_ptr is not None)
    if used_ptr is not None:
        for r in gl.static_range(R):
            clear(used_ptr + row_of(tile, r, M, R) * splits, own)
    weights, biases = first_parameters(weight_ptr, bias_ptr, smem[0][0], own * C, N, WHOLE)
    missing, split = splits, own
    while missing > 0:  # once, unless others are late: then their splits too, and its own again
        first = split * C
        fetch(smem, x_ptr, residual_ptr, total_ptr, x_stride, residual_stride, tile, first, M, N, WHOLE)
        for r in gl.static_range(R):
            mean, M2 = moments_of(smem[r][0], first, elements_of(split, N, C), N, CENTERED, WHOLE)
            publish(words_ptr + row_of(tile, r, M, R) * splits, split, pack(mean, M2))
        if split == own:
            missing = splits * 0
            means, rstds = (), ()
            for r in gl.static_range(R):
                row_words_ptr = words_ptr + row_of(tile, r, M, R) * splits
                words, absent = collect(row_words_ptr, splits, LANES, POLLS, lanes)
                missing += absent
                n, mean, M2 = join_moments(words, splits, N, C, lanes)
                means, rstds = means + (mean,), rstds + (moments_finish(n, M2, eps),)
            if missing == 0:
                if own == 0:
                    store_statistics(mean_ptr, rstd_ptr, means, rstds, tile, M)
                store_result(
                    weight_ptr,
                    bias_ptr,
                    weights,
                    biases,
                    y_ptr,
                    smem,
                    means,
                    rstds,
                    tile,
                    first,
                    M,
                    N,
                    CENTERED,
                    CASTING,
                    WHOLE,
                )
        split = gl.where(split + 1 < splits, split + 1, 0)
