"""Tiles of a strided matrix, and their products: what the attention kernels share below the algorithm.

A tile is addressed as a 64-bit base (the matrix of one batch entry and head) and offsets, which are
32-bit unless WIDE: the launcher sets it where that one matrix spans 2^31 elements of memory.
"""

import triton
import triton.language as tl

from .interpreter import operand, rounded


@triton.jit
def tile_offsets(stride_row, stride_col, ROWS: tl.constexpr, COLS: tl.constexpr, WIDE: tl.constexpr):
    """Offsets of a tile's elements from its first one [ROWS, COLS]."""
    row = tl.arange(0, ROWS)
    col = tl.arange(0, COLS)
    if WIDE:
        row = row.to(tl.int64)
        col = col.to(tl.int64)
    return row[:, None] * stride_row + col[None, :] * stride_col


@triton.jit
def tile_mask(start, n_rows, ROWS: tl.constexpr, COLS: tl.constexpr, N_COLS: tl.constexpr):
    """True inside the matrix [ROWS, COLS]: rows below n_rows, columns below N_COLS."""
    inside = (start + tl.arange(0, ROWS) < n_rows)[:, None]
    return inside & (tl.arange(0, COLS) < N_COLS)[None, :]


@triton.jit
def load_tile(
    base,
    start,
    stride_row,
    stride_col,
    n_rows,
    ROWS: tl.constexpr,
    COLS: tl.constexpr,
    N_COLS: tl.constexpr,
    MASK_ROWS: tl.constexpr,
    WIDE: tl.constexpr,
):
    """Rows start ... start + ROWS - 1 of a matrix with N_COLS columns [ROWS, COLS], 0 outside it.

    MASK_ROWS = False promises that all rows exist; columns are checked where COLS was padded.
    """
    pointers = base + tl.cast(start, tl.int64) * stride_row
    pointers += tile_offsets(stride_row, stride_col, ROWS, COLS, WIDE)
    if MASK_ROWS:
        return tl.load(pointers, tile_mask(start, n_rows, ROWS, COLS, N_COLS), 0.0)
    elif COLS != N_COLS:
        return tl.load(pointers, (tl.arange(0, COLS) < N_COLS)[None, :], 0.0)
    else:
        return tl.load(pointers)


@triton.jit
def load_tile_clamped(
    base,
    start,
    stride_row,
    stride_col,
    n_rows,
    ROWS: tl.constexpr,
    COLS: tl.constexpr,
    N_COLS: tl.constexpr,
    WIDE: tl.constexpr,
):
    """As load_tile, but rows past the end repeat the last one: for a loop that gives such rows no
    weight, and whose registers are too few to hold a predicate for each of them."""
    row = tl.minimum(start + tl.arange(0, ROWS), n_rows - 1)
    col = tl.arange(0, COLS)
    if WIDE:
        row = row.to(tl.int64)
        col = col.to(tl.int64)
    pointers = base + (row[:, None] * stride_row + col[None, :] * stride_col)
    if COLS != N_COLS:
        return tl.load(pointers, (col < N_COLS)[None, :], 0.0)
    else:
        return tl.load(pointers)


@triton.jit
def store_tile(
    base,
    tile,
    start,
    stride_row,
    stride_col,
    n_rows,
    ROWS: tl.constexpr,
    COLS: tl.constexpr,
    N_COLS: tl.constexpr,
    WIDE: tl.constexpr,
):
    """Write the part of `tile` [ROWS, COLS] that lies inside the matrix, in the matrix's dtype."""
    pointers = base + tl.cast(start, tl.int64) * stride_row
    pointers += tile_offsets(stride_row, stride_col, ROWS, COLS, WIDE)
    mask = tile_mask(start, n_rows, ROWS, COLS, N_COLS)
    tl.store(pointers, rounded(tile, base.dtype.element_ty), mask)


@triton.jit
def dot(a, b, acc, TF32: tl.constexpr):
    """acc + a b in float32; float32 operands are multiplied as float32 unless TF32 is allowed.

    Float32 products are summed apart from acc, so that the error over thousands of rows grows with the
    tiles and not with the rows.  (Written as a subtraction, since Triton folds a sum into the product.)
    """
    if TF32:
        return tl.dot(operand(a), operand(b), acc, input_precision="tf32")
    elif a.dtype == tl.float32:
        return acc - tl.dot(-a, b, input_precision="ieee")
    else:
        return tl.dot(operand(a), operand(b), acc)


@triton.jit
def add_product(high, low, a, b, TF32: tl.constexpr):
    """high + low + a b, for the sum over all queries, which has no bound: float32 keeps in `low` what
    rounding takes from `high` (Kahan, 1965).  Other types leave `low` alone."""
    if TF32:
        return dot(a, b, high, TF32), low
    elif a.dtype == tl.float32:
        part = tl.dot(a, b, low, input_precision="ieee")
        total = high + part
        return total, part - (total - high)
    else:
        return dot(a, b, high, TF32), low
