"""What Triton's interpreter gets wrong about short floats, put right; on a GPU it costs nothing.

The interpreter truncates where a conversion from float32 to bfloat16 should round, loses the carry
where one to float8_e4m3fn rounds up to a power of two, and multiplies bfloat16 operands of tl.dot
into garbage (Triton 3.6 and 3.9).
"""

import os

import triton
import triton.language as tl

INTERPRETED = tl.constexpr(os.environ.get("TRITON_INTERPRET", "0") == "1")


@triton.jit
def rounded(x, dtype: tl.constexpr):
    """A float32 tile in `dtype`, rounded to nearest even."""
    if INTERPRETED and dtype == tl.bfloat16:
        # Round here, so that nothing is left for the conversion to cut off.
        bits = x.to(tl.int32, bitcast=True)
        bits = (bits + 0x7FFF + ((bits >> 16) & 1)) & -0x10000
        x = tl.where(x == x, bits.to(tl.float32, bitcast=True), x)
    if INTERPRETED and dtype == tl.float8e4nv:
        bits = x.to(tl.int32, bitcast=True)
        bits = (bits + 0x7FFFF + ((bits >> 20) & 1)) & -0x100000
        normal = tl.where(x == x, bits.to(tl.float32, bitcast=True), x)
        # Below 2^-6 the spacing is 2^-9, that of float32 at 24576.
        x = tl.where(tl.abs(x) < 0.015625, (x + 24576.0) - 24576.0, normal)
    return x.to(dtype)


@triton.jit
def operand(x):
    """An operand of tl.dot; float32 holds a bfloat16 one exactly."""
    if INTERPRETED:
        x = x.to(tl.float32)
    return x
