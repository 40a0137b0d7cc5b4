"""A linear layer of one row: y = act(x W^T + bias), with the residual add and the norm before it.

One row leaves nothing to do but to read the weights, once and as fast as they come.  A program
multiplies the row by BLOCK_N rows of W and sums, on the ordinary cores.  BLOCK_N may be as small as the
number of programs wants, since a row of W is long and lies in one piece.  The norm of one row is cheap
beside that: each program works it out again, and program 0 writes the sum of x and residual, which
others read later.  The first of the weights are on their way meanwhile.

What modules round, the kernel rounds: the norm, and what the linear layer gives before the activation,
gate and up each (glu.py).

Legend: x, residual [1, K] with unit column stride; weight [N, K] with unit column stride, or with UP
[2N, K], gates first, then as many rows of up; bias [N] or [2N]; y [1, N] and total [1, K] contiguous.
16 bits in memory, float32 in registers.  A pointer that is None leaves out its part.  NORM: "", "rms"
or "layer".  WHOLE: K fills its tiles to the last.  PDL: the launch begins before the one before it has
ended, and reads weights, but not x and residual, before it waits for that; and allows the next one the
same.
"""

# ruff: noqa: RUF005  (Triton has no starred expressions in tuples)

import triton
import triton.language as tl

from .glu import activation
from .moments import average, reciprocal_deviation
from .norm import columns_of, load_parameters, load_sum, moments_of_chunks, y_from
from .rounding import rounded, store


@triton.jit
def load_bias(bias_ptr, cols, inside, N, UP: tl.constexpr):
    """Those of both products, float32, 0 where there is none."""
    bias, up_bias = 0.0, 0.0
    if bias_ptr is not None:
        bias = tl.load(bias_ptr + cols, mask=inside, other=0.0).to(tl.float32)
        if UP:
            up_bias = tl.load(bias_ptr + N + cols, mask=inside, other=0.0).to(tl.float32)
    return bias, up_bias


@triton.jit
def finished(gate, up, ACT: tl.constexpr, UP: tl.constexpr, dtype: tl.constexpr):
    """y of what the linear layer gives, which is rounded first; float32 all."""
    y = rounded(gate, dtype).to(tl.float32)
    if ACT != "":
        y, _ = activation(y, ACT)
    if UP:
        y *= rounded(up, dtype).to(tl.float32)
    return y


@triton.jit
def held_row(
    x_ptr, residual_ptr, norm_weight_ptr, norm_bias_ptr, total_ptr, K, eps,
    NORM: tl.constexpr, CASTING: tl.constexpr, C: tl.constexpr, CHUNKS: tl.constexpr,
    WHOLE: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """The norm of the row, in CHUNKS tiles [1, C]."""
    CENTERED: tl.constexpr = NORM == "layer"
    parameters, chunks, made = (), (), ()
    for k in tl.static_range(CHUNKS):
        cols, inside = columns_of(k, K, C, WHOLE)
        parameters = parameters + (load_parameters(norm_weight_ptr, norm_bias_ptr, cols, inside),)
    if PDL:
        tl.extra.cuda.gdc_wait()
    for k in tl.static_range(CHUNKS):
        cols, inside = columns_of(k, K, C, WHOLE)
        x = load_sum(x_ptr, 0, residual_ptr, 0, total_ptr, (), None, 0, cols, inside, 1, K)
        chunks = chunks + (x,)
    if residual_ptr is not None:
        if tl.program_id(0) == 0:
            for k in tl.static_range(CHUNKS):
                cols, inside = columns_of(k, K, C, WHOLE)
                tl.store(total_ptr + cols, chunks[k], mask=inside)
    n = tl.zeros([1], tl.float32) + K
    mean, M2 = moments_of_chunks(chunks, n, K, C, WHOLE, CENTERED, False)
    rstd = reciprocal_deviation(average(M2, n, CHUNKS * C if WHOLE else 0), eps)
    dtype: tl.constexpr = x_ptr.dtype.element_ty
    for k in tl.static_range(CHUNKS):
        cols, inside = columns_of(k, K, C, WHOLE)
        x = chunks[k].to(tl.float32)
        xhat = (x - mean[:, None] if CENTERED else x) * rstd[:, None]
        weight, bias = parameters[k]
        y = y_from(
            xhat, norm_weight_ptr, norm_bias_ptr, weight, bias, (), None, CASTING, 0, cols, 1, K, dtype
        )
        made = made + (rounded(y if WHOLE else tl.where(inside, y, 0.0), dtype),)
    return made


@triton.jit
def load_weights(weight_ptr, rows, weight_stride, inside, cols, K, WHOLE: tl.constexpr):
    """Rows of W [BLOCK_N, C], which nobody reads again soon."""
    mask = inside if WHOLE else inside & (cols < K)
    return tl.load(
        weight_ptr + rows * weight_stride + cols, mask=mask, other=0.0, eviction_policy="evict_first"
    )


@triton.jit
def linear_row_kernel(
    x_ptr, residual_ptr, norm_weight_ptr, norm_bias_ptr, weight_ptr, bias_ptr,  # in
    y_ptr, total_ptr,  # out
    weight_stride, N, K, eps,
    NORM: tl.constexpr, CASTING: tl.constexpr, ACT: tl.constexpr, UP: tl.constexpr,
    BLOCK_N: tl.constexpr, C: tl.constexpr, CHUNKS: tl.constexpr, WHOLE: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """Program i computes columns i * BLOCK_N to i * BLOCK_N + BLOCK_N - 1 of y [1, N]."""
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
    col = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    rows, inside = col.to(tl.int64)[:, None], (col < N)[:, None]
    cols, _ = columns_of(0, K, C, WHOLE)
    w = load_weights(weight_ptr, rows, weight_stride, inside, cols, K, WHOLE)
    if UP:
        v = load_weights(weight_ptr, rows + N, weight_stride, inside, cols, K, WHOLE)
    bias, up_bias = load_bias(bias_ptr, col, col < N, N, UP)
    gate, up = tl.zeros([BLOCK_N, C], tl.float32), tl.zeros([BLOCK_N, C], tl.float32)
    if NORM != "":
        chunks = held_row(
            x_ptr, residual_ptr, norm_weight_ptr, norm_bias_ptr, total_ptr, K, eps,
            NORM, CASTING, C, CHUNKS, WHOLE, PDL,
        )  # fmt: skip
        for k in tl.static_range(CHUNKS):
            cols, _ = columns_of(k, K, C, WHOLE)
            x = chunks[k].to(tl.float32)
            if k > 0:
                w = load_weights(weight_ptr, rows, weight_stride, inside, cols, K, WHOLE)
            gate += w.to(tl.float32) * x
            if UP:
                if k > 0:
                    v = load_weights(weight_ptr, rows + N, weight_stride, inside, cols, K, WHOLE)
                up += v.to(tl.float32) * x
    else:
        if PDL:
            tl.extra.cuda.gdc_wait()
        for k in range(CHUNKS):
            cols, there = columns_of(k, K, C, WHOLE)
            x = tl.load(x_ptr + cols, mask=there, other=0.0).to(tl.float32)
            gate += w.to(tl.float32) * x
            if UP:
                up += v.to(tl.float32) * x
            # Those of the next turn; behind the last one there are none.
            cols, _ = columns_of(k + 1, K, C, WHOLE)
            ahead = inside & (k + 1 < CHUNKS)
            w = load_weights(weight_ptr, rows, weight_stride, ahead, cols, K, WHOLE)
            if UP:
                v = load_weights(weight_ptr, rows + N, weight_stride, ahead, cols, K, WHOLE)
    dtype: tl.constexpr = y_ptr.dtype.element_ty
    y = finished(tl.sum(gate, 1) + bias, tl.sum(up, 1) + up_bias, ACT, UP, dtype)
    store(y_ptr, col, y, col < N)
