"""LayerNorm and RMSNorm into 8-bit floats, with a scale for each row that is found in the same pass.

    y = what norm.py computes        scale = max over the row |y| / LARGEST        out = y / scale

LARGEST is the largest number of the format (448 of e4m3, 57344 of e5m2), so that the whole range is
used, and out * scale is y again but for one rounding.  A row of zeros gets the scale 2^-126, as does
any whose own would be less, where float32 runs out of digits.

The regimes are those of norm.py.  Where rows are split over programs, these exchange the moments first
and then the largest |y|.

Legend: norm.py; out [M, N] contiguous, of 8 bits; scale [M] float32; words [2, M, splits] int64, zeros:
those of the moments, then those of the largest |y|.
"""

# ruff: noqa: RUF005  (Triton has no starred expressions in tuples)

import triton
import triton.language as tl

from .exchange import collect, pack, publish, unpack
from .moments import moments_finish
from .norm import (
    columns_of,
    first_of_row,
    hold_rows,
    join_moments,
    load_again,
    load_total,
    precise,
    publish_moments,
    y_of,
)
from .rounding import store


@triton.jit
def scale_of(largest, LARGEST: tl.constexpr):
    """The scale [R] of rows whose largest |y| is `largest` [R]; NaN stays NaN."""
    scale = tl.div_rn(largest, tl.zeros(largest.shape, tl.float32) + LARGEST)
    return tl.where(scale < 2.0**-126, 2.0**-126, scale)


@triton.jit(do_not_specialize=["M"])
def norm_quantize_kernel(
    x_ptr, residual_ptr, weight_ptr, bias_ptr,  # in
    out_ptr, total_ptr, scale_ptr,  # out
    x_stride, residual_stride, M, N, eps, prologue, epilogue,
    CENTERED: tl.constexpr, CASTING: tl.constexpr, PROLOGUE: tl.constexpr, EPILOGUE: tl.constexpr,
    LARGEST: tl.constexpr,
    R: tl.constexpr, C: tl.constexpr, K: tl.constexpr, WHOLE: tl.constexpr,
):  # fmt: skip
    """Program i takes rows i * R to i * R + R - 1, held whole in registers."""
    row = tl.program_id(0).to(tl.int64) * R + tl.arange(0, R)  # [R]
    rows = row[:, None]
    chunks, mean, rstd, _ = hold_rows(
        x_ptr, x_stride, residual_ptr, residual_stride, total_ptr, prologue, PROLOGUE,
        rows, M, N, eps, CENTERED, C, K, WHOLE,
    )  # fmt: skip
    ys = ()
    largest = tl.zeros([R, C], tl.float32)
    for k in tl.static_range(K):
        cols, inside = columns_of(k, N, C, WHOLE)
        x = chunks[k].to(tl.float32)
        xhat = (x - mean[:, None] if CENTERED else x) * rstd[:, None]
        y = y_of(
            xhat, weight_ptr, bias_ptr, epilogue, EPILOGUE, CASTING, rows, cols, inside, M, N,
            x_ptr.dtype.element_ty,
        )  # fmt: skip
        ys = ys + (y,)
        largest = tl.maximum(largest, tl.where(inside, tl.abs(y), 0.0))
    scale = scale_of(tl.max(largest, 1), LARGEST)
    tl.store(scale_ptr + row, scale, mask=row < M)
    for k in tl.static_range(K):
        cols, inside = columns_of(k, N, C, WHOLE)
        store(out_ptr, rows * N + cols, ys[k] / scale[:, None], (rows < M) & inside)


@triton.jit
def publish_largest(
    x, weight_ptr, bias_ptr, words_ptr, epilogue, mean, rstd, rows, split, M, N,
    CENTERED: tl.constexpr, CASTING: tl.constexpr, EPILOGUE: tl.constexpr,
    C: tl.constexpr, WHOLE: tl.constexpr, dtype: tl.constexpr,
):  # fmt: skip
    """Make the largest |y| of one split x [1, C] of a row known to the other programs of the row;
    returns y."""
    cols, inside = columns_of(split, N, C, WHOLE)
    xhat = (x - mean if CENTERED else x) * rstd
    y = y_of(xhat, weight_ptr, bias_ptr, epilogue, EPILOGUE, CASTING, rows, cols, inside, M, N, dtype)
    largest = tl.max(tl.where(inside, tl.abs(y), 0.0), 1)
    publish(words_ptr, split, pack(largest, tl.zeros(largest.shape, tl.float32)))
    return y


@triton.jit(do_not_specialize=["M"])
def norm_quantize_split_kernel(
    x_ptr, residual_ptr, weight_ptr, bias_ptr,  # in
    out_ptr, total_ptr, scale_ptr, words_ptr,  # out
    x_stride, residual_stride, M, N, eps, prologue, epilogue,
    CENTERED: tl.constexpr, CASTING: tl.constexpr, PROLOGUE: tl.constexpr, EPILOGUE: tl.constexpr,
    LARGEST: tl.constexpr,
    C: tl.constexpr, WHOLE: tl.constexpr, LANES: tl.constexpr, POLLS: tl.constexpr,
):  # fmt: skip
    """Program i takes split i % splits of row i // splits."""
    PRECISE: tl.constexpr = precise(x_ptr, total_ptr, PROLOGUE, CENTERED)
    splits = tl.cdiv(N, C)
    row = (tl.program_id(0) // splits).to(tl.int64) + tl.arange(0, 1)  # [1]
    own = tl.program_id(0) % splits
    rows = row[:, None]
    moments_ptr = words_ptr + (tl.program_id(0) // splits).to(tl.int64) * splits
    largest_ptr = moments_ptr + tl.cast(M, tl.int64) * splits
    first = first_of_row(
        x_ptr, x_stride, residual_ptr, residual_stride, total_ptr, prologue, PROLOGUE,
        rows, M, N, PRECISE,
    )  # fmt: skip
    publish_moments(
        x_ptr, x_stride, residual_ptr, residual_stride, total_ptr, moments_ptr, prologue, PROLOGUE,
        first, rows, own, M, N, C, WHOLE, CENTERED, PRECISE,
    )  # fmt: skip
    words, missing = collect(moments_ptr, splits, LANES, POLLS)
    split = own
    while missing > 0:  # others are late: their splits too, its own again, and one more look
        split = tl.where(split + 1 < splits, split + 1, 0)
        publish_moments(
            x_ptr, x_stride, residual_ptr, residual_stride, total_ptr, moments_ptr, prologue, PROLOGUE,
            first, rows, split, M, N, C, WHOLE, CENTERED, PRECISE,
        )  # fmt: skip
        if split == own:
            words, missing = collect(moments_ptr, splits, LANES, POLLS)
    n, mean, M2 = join_moments(words, splits, N, C)
    mean = first + mean if PRECISE else mean
    rstd = moments_finish(n, M2, eps)
    cols, inside = columns_of(own, N, C, WHOLE)
    x = load_again(x_ptr, x_stride, total_ptr, prologue, PROLOGUE, rows, cols, inside, M, N)
    y = publish_largest(
        x, weight_ptr, bias_ptr, largest_ptr, epilogue, mean, rstd, rows, own, M, N,
        CENTERED, CASTING, EPILOGUE, C, WHOLE, x_ptr.dtype.element_ty,
    )  # fmt: skip
    words, missing = collect(largest_ptr, splits, LANES, POLLS)
    while missing > 0:
        split = tl.where(split + 1 < splits, split + 1, 0)
        cols_there, inside_there = columns_of(split, N, C, WHOLE)
        # The total that another program writes may not have arrived: add it up again.
        x = load_total(
            x_ptr, x_stride, residual_ptr, residual_stride, total_ptr, prologue, PROLOGUE,
            rows, cols_there, inside_there, M, N,
        ).to(tl.float32)  # fmt: skip
        publish_largest(
            x, weight_ptr, bias_ptr, largest_ptr, epilogue, mean, rstd, rows, split, M, N,
            CENTERED, CASTING, EPILOGUE, C, WHOLE, x_ptr.dtype.element_ty,
        )  # fmt: skip
        if split == own:
            words, missing = collect(largest_ptr, splits, LANES, POLLS)
    largest, _ = unpack(words)
    largest = tl.where(tl.arange(0, LANES) < splits, largest, 0.0)
    scale = scale_of(tl.max(largest[None, :], 1), LARGEST)
    if own == 0:
        tl.store(scale_ptr + row, scale)
    store(out_ptr, rows * N + cols, y / scale[:, None], inside)
