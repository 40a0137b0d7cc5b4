"""Element-wise functions fused into the kernels of rows and of attention: how they are called, and some
of them.

A hook is a @triton.jit function of float32 tiles,

    forward(x, index, *operands, *scalars) -> y
    backward(dy, x, index, *operands, *scalars) -> (dx, d(operand 0), d(operand 1), ...)

x, y, dy, dx: [R, C], a tile of a matrix [M, N].  index: [R, C] int64, where in that matrix each
element stands, row * N + column.  operands: further tensors, each of them [R, C] (the same element),
[R, 1] (one value a row), [1, C] (one value a column) or a scalar; floating point ones in float32,
others in their own dtype.  scalars: float32 numbers.  What backward returns for an operand without a
gradient is ignored: it may return 0.0.

A kernel takes a hook as two arguments: HOOK, the function as a tl.constexpr or None for no hook, and
`arguments`, the pair (operands, scalars), or None where HOOK is None.  An operand is the triple
(pointer, row stride, column stride), a stride None where the operand does not vary that way.

A hook of attention's scores has the places of the elements for their index,

    forward(score, b, h, i, j, *operands, *scalars) -> score
    backward(dscore, score, b, h, i, j, *operands, *scalars) -> (dscore, d(operand 0), ...)

score: a tile [M, N], or [N, M] where the backward has it transposed; b, h: the batch entry and the
query head, int64 scalars; i: the queries' indices, [M, 1] or [1, M] int32; j: the keys', [1, N] or
[N, 1].  So operands are of the tile's shape, of 1 in one of its dimensions, or scalars, and functions
are written with broadcasting alone.  scores.py calls them.
"""

import triton
import triton.language as tl

from .philox import philox
from .rounding import store


@triton.jit
def load_operand(operand, rows, cols, M, N):
    """One operand at rows [R, 1] and cols [1, C]: of shape [R, C], [R, 1], [1, C] or a scalar."""
    ptr, row_stride, col_stride = operand
    if row_stride is None and col_stride is None:
        x = tl.load(ptr)
    elif row_stride is None:
        x = tl.load(ptr + cols * col_stride, mask=cols < N, other=0)
    elif col_stride is None:
        x = tl.load(ptr + rows * row_stride, mask=rows < M, other=0)
    else:
        x = tl.load(ptr + rows * row_stride + cols * col_stride, mask=(rows < M) & (cols < N), other=0)
    if ptr.dtype.element_ty.is_floating():
        x = x.to(tl.float32)
    return x


@triton.jit
def apply_hook(HOOK: tl.constexpr, arguments, x, rows, cols, M, N):
    """x [R, C] after the hook; x itself where there is none."""
    if HOOK is None:
        return x
    else:
        operands, scalars = arguments
        values = [load_operand(operand, rows, cols, M, N) for operand in operands]
        return HOOK(x, rows.to(tl.int64) * N + cols, *values, *scalars)


@triton.jit
def apply_hook_backward(HOOK: tl.constexpr, arguments, gradients, dy, x, rows, cols, M, N):
    """dx [R, C]; stores the gradients of the operands.

    HOOK: the hook's backward.  gradients: for each operand a pointer to [M, N], or None if it is not
    wanted; () for none of them.  The launcher sums over what the operand was broadcast along.
    """
    if HOOK is None:
        return dy
    else:
        operands, scalars = arguments
        values = [load_operand(operand, rows, cols, M, N) for operand in operands]
        offsets = rows.to(tl.int64) * N + cols
        results = HOOK(dy, x, offsets, *values, *scalars)
        wanted = [gradient is not None for gradient in gradients]  # len() takes no tuple with None
        for i in tl.static_range(len(wanted)):
            if gradients[i] is not None:
                store(gradients[i], offsets, results[i + 1], (rows < M) & (cols < N))
        return results[0]


# --- functions of PyTorch that are element-wise; their definitions are in flashproto/hooks.py ------


@triton.jit
def multiply(x, index, factor):
    return x * factor


@triton.jit
def multiply_backward(dy, x, index, factor):
    return dy * factor, dy * x


@triton.jit
def silu_gate(x, index, z):
    return x * z * tl.sigmoid(z)


@triton.jit
def silu_gate_backward(dy, x, index, z):
    sigmoid = tl.sigmoid(z)
    gate = z * sigmoid
    return dy * gate, dy * x * (sigmoid + gate * (1 - sigmoid))


@triton.jit
def keep_mask(index, seed, p):
    """Whether dropout keeps each element: Philox with the counter `index` and the key `seed`."""
    low, high = (index & 0xFFFFFFFF).to(tl.uint32), (index >> 32).to(tl.uint32)
    zero = low * 0
    random, _, _, _ = philox(seed, low, high, zero, zero)
    return tl.uint_to_uniform_float(random) >= p


@triton.jit
def dropout(x, index, seed, p):
    return tl.where(keep_mask(index, seed, p), x * (1 / (1 - p)), 0.0)


@triton.jit
def dropout_backward(dy, x, index, seed, p):
    return dropout(dy, index, seed, p), 0.0


@triton.jit
def quantize_e4m3(x, index, scale):
    return tl.clamp(x / scale, -448.0, 448.0, propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def quantize_e5m2(x, index, scale):
    return tl.clamp(x / scale, -57344.0, 57344.0, propagate_nan=tl.PropagateNan.ALL)
