"""What Triton's interpreter gets wrong about bfloat16, put right; on a GPU nothing here costs anything.

The interpreter truncates where a conversion from float32 to bfloat16 should round, and multiplies
bfloat16 operands of tl.dot into garbage (Triton 3.6 and 3.9).
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
    return x.to(dtype)


@triton.jit
def operand(x):
    """An operand of tl.dot; float32 holds a bfloat16 one exactly."""
    if INTERPRETED:
        x = x.to(tl.float32)
    return x
