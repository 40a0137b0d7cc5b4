"""Chunks of the rows of a matrix in shared memory, for kernels that need every element of a row twice.

    request   begin to copy a chunk of a row to shared memory (cp.async), which takes no registers
    receive   wait for it, and put a given number past the end of the row
    slice_of  a slice of it in registers, as often as needed

A chunk of C = K * S columns is K slices [S], of each of which a thread holds 16 bytes.  A program works
on a slice at a time, so it needs few registers however wide the chunk is, and a multiprocessor has as
many bytes in flight as its shared memory holds.

Every slice is a buffer of its own.  If the slices were parts of one buffer, the compiler would put a
barrier between a write to one and a read of another.

All pieces of 16 bytes must be aligned, and the compiler must be able to prove it.  So rows start at
multiples of 16 bytes, N is a multiple of what 16 bytes hold, and kernels get both in such units, see
`units`.
"""

# ruff: noqa: RUF005  (Triton has no starred expressions in tuples)

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy

from .gluon_names import copy_to_shared


@gluon.constexpr_function
def units(dtype):
    """How many elements 16 bytes hold."""
    return 128 // dtype.primitive_bitwidth


@gluon.constexpr_function
def slice_layout(dtype, num_warps):
    """Slices [S] over the threads of a program."""
    return gl.BlockedLayout([units(dtype)], [32], [num_warps], [0])


@gluon.constexpr_function
def slice_count(smem):
    """K of a chunk."""
    return len(smem)


@gluon.constexpr_function
def slice_size(smem):
    """S of a chunk."""
    return smem[0].shape[0]


@gluon.jit
def buffers(dtype: gl.constexpr, C: gl.constexpr):
    """Shared memory for a chunk of C columns."""
    S: gl.constexpr = units(dtype) * 32 * gl.num_warps()
    gl.static_assert(C % S == 0)
    LAYOUT: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, order=[0])
    smem = ()
    for _ in gl.static_range(C // S):
        smem = smem + (gl.allocate_shared_memory(dtype, [S], LAYOUT),)
    return smem


@gluon.jit
def columns_of(smem, k: gl.constexpr):
    """Columns of slice k within the chunk [S]."""
    LAYOUT: gl.constexpr = slice_layout(smem[0].dtype, gl.num_warps())
    S: gl.constexpr = slice_size(smem)
    return k * S + gl.arange(0, S, LAYOUT)


@gluon.jit
def slice_of(smem, k: gl.constexpr):
    """Slice k of a chunk in registers [S]."""
    LAYOUT: gl.constexpr = slice_layout(smem[0].dtype, gl.num_warps())
    return smem[k].load(LAYOUT)


@gluon.jit
def request(smem, x_ptr, first, N, WHOLE: gl.constexpr):
    """Begin to copy the columns from `first` on of the row at x_ptr.  WHOLE: all of them are there."""
    for k in gl.static_range(slice_count(smem)):
        cols = first + columns_of(smem, k)
        if WHOLE:
            copy_to_shared(smem[k], x_ptr + cols)
        else:
            copy_to_shared(smem[k], x_ptr + cols, mask=cols < N)
        async_copy.commit_group()


@gluon.jit
def receive(smem, first, N, outside: gl.constexpr, WHOLE: gl.constexpr):
    """Wait for all that was requested; what lies past the end of the row becomes `outside`."""
    async_copy.wait_group(0)
    if not WHOLE:
        if first + slice_count(smem) * slice_size(smem) > N:
            for k in gl.static_range(slice_count(smem)):
                inside = first + columns_of(smem, k) < N
                smem[k].store(gl.where(inside, slice_of(smem, k), outside).to(smem[0].dtype))


@gluon.jit
def widened(x):
    """x in float32, in assembly.

    A bfloat16 is the upper half of a float32, so this takes one instruction each, where the compiler
    takes two.  And the compiler moves no assembly out of a loop, where the results would take more
    registers than x.
    """
    if x.dtype == gl.bfloat16:
        bits = gl.inline_asm_elementwise(
            "shl.b32 $0, $2, 16; and.b32 $1, $2, 0xffff0000;",
            "=&r,=r,r",
            [x],
            dtype=gl.int32,
            is_pure=True,
            pack=2,
        )
        return bits.to(gl.float32, bitcast=True)
    elif x.dtype == gl.float16:
        return gl.inline_asm_elementwise(
            "{ .reg .b16 a, b; mov.b32 {a, b}, $2; cvt.f32.f16 $0, a; cvt.f32.f16 $1, b; }",
            "=&f,=f,r",
            [x],
            dtype=gl.float32,
            is_pure=True,
            pack=2,
        )
    else:
        return x.to(gl.float32)
