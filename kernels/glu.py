"""Gated linear units y = act(gate) * up, and act alone, forward and backward, element by element.

    dgate = dy * up * act'(gate)        dup = dy * act(gate)

Nothing of the forward pass is kept but gate and up themselves: act is cheaper to compute again than
to read.  With s = 1 / (1 + exp(-x)), Phi and phi the normal distribution and its density, and
u = 2 sqrt(2 / pi) (x + 0.044715 x^3):

    silu        x s(x)          s (1 + x (1 - s))
    gelu        x Phi(x)        Phi + x phi
    gelu_tanh   x s(u)          s + x s (1 - s) u'        since (1 + tanh(u / 2)) / 2 = s(u)
    relu        max(x, 0)       1 where x > 0             NaN stays NaN, as in torch
    sigmoid     s               s (1 - s)

Legend: M rows, N columns, R x C the tile; gate, up, dy [M, N] with unit column stride and a row
stride of their own; y [M, N] contiguous; dgate, dup [M, N] of one row stride (halves of one tensor
have 2N).  Any float dtype in memory, float32 in registers.  A pointer that is None leaves out its
part.
"""

import triton
import triton.language as tl

from .rounding import load, store

SQRT_HALF = tl.constexpr(0.7071067811865476)
DENSITY_AT_0 = tl.constexpr(0.3989422804014327)  # 1 / sqrt(2 pi)
TANH_SCALE = tl.constexpr(1.5957691216057308)  # 2 sqrt(2 / pi)
TANH_CUBIC = tl.constexpr(0.044715)


@triton.jit
def activation(x, ACT: tl.constexpr):
    """(act(x), act'(x)) of a float32 tile; the compiler drops the one that is not used."""
    if ACT == "silu":
        s = tl.sigmoid(x)
        return x * s, s * (1.0 + x * (1.0 - s))
    elif ACT == "gelu":
        cdf = 0.5 + 0.5 * tl.erf(x * SQRT_HALF)
        return x * cdf, cdf + x * DENSITY_AT_0 * tl.exp(-0.5 * x * x)
    elif ACT == "gelu_tanh":
        # Constants on the right: to Triton 3.9's interpreter a constant times a tensor is a constant.
        s = tl.sigmoid((x + x * x * x * TANH_CUBIC) * TANH_SCALE)
        slope = (1.0 + x * x * (3.0 * TANH_CUBIC)) * TANH_SCALE
        return x * s, s + x * s * (1.0 - s) * slope
    elif ACT == "relu":
        return tl.where(x <= 0.0, 0.0, x), tl.where(x <= 0.0, 0.0, 1.0)
    else:
        tl.static_assert(ACT == "sigmoid")
        s = tl.sigmoid(x)
        return s, s * (1.0 - s)


@triton.jit
def tile_of_program(N, R: tl.constexpr, C: tl.constexpr):
    """(rows [R, 1], columns [1, C]) of this program: columns go round first."""
    column_tiles = tl.cdiv(N, C)
    rows = (tl.program_id(0) // column_tiles).to(tl.int64) * R + tl.arange(0, R)
    cols = (tl.program_id(0) % column_tiles).to(tl.int64) * C + tl.arange(0, C)
    return rows[:, None], cols[None, :]


@triton.jit(do_not_specialize=["M"])
def glu_forward_kernel(
    gate_ptr,
    up_ptr,
    y_ptr,
    gate_stride,
    up_stride,
    M,
    N,
    ACT: tl.constexpr,
    R: tl.constexpr,
    C: tl.constexpr,
):
    """One tile [R, C] a program; without up, act(gate) alone."""
    rows, cols = tile_of_program(N, R, C)
    mask = (rows < M) & (cols < N)
    y, _ = activation(load(gate_ptr, rows * gate_stride + cols, mask), ACT)
    if up_ptr is not None:
        y *= load(up_ptr, rows * up_stride + cols, mask)
    store(y_ptr, rows * N + cols, y, mask)


@triton.jit(do_not_specialize=["M"])
def glu_backward_kernel(
    dy_ptr,
    gate_ptr,
    up_ptr,  # in
    dgate_ptr,
    dup_ptr,  # out
    dy_stride,
    gate_stride,
    up_stride,
    gradient_stride,
    M,
    N,
    ACT: tl.constexpr,
    R: tl.constexpr,
    C: tl.constexpr,
):
    """One tile [R, C] a program; without up, the gradient of act(gate) alone."""
    rows, cols = tile_of_program(N, R, C)
    mask = (rows < M) & (cols < N)
    dy = load(dy_ptr, rows * dy_stride + cols, mask)
    act, slope = activation(load(gate_ptr, rows * gate_stride + cols, mask), ACT)
    out = rows * gradient_stride + cols
    if dgate_ptr is not None:
        dgate = dy * slope
        if up_ptr is not None:
            dgate *= load(up_ptr, rows * up_stride + cols, mask)
        store(dgate_ptr, out, dgate, mask)
    if dup_ptr is not None:
        store(dup_ptr, out, dy * act, mask)
