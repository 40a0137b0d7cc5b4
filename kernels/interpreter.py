"""Corrections of what Triton's interpreter gets wrong about short floats; on a GPU they cost nothing.

The interpreter of Triton 3.6 and 3.9 truncates where a conversion from float32 to bfloat16 should
round.  It loses the carry where a conversion to a float of 8 bits rounds up to a power of two, turns
NaN into a number of float8_e4m3fn, and gives wrong products of bfloat16 operands in tl.dot.
"""

import os

import triton
import triton.language as tl

INTERPRETED = tl.constexpr(os.environ.get("TRITON_INTERPRET", "0") == "1")


@triton.jit
def rounded_short(x, CUT: tl.constexpr, NORMAL: tl.constexpr, AT: tl.constexpr):
    """A float32 tile rounded to nearest even: without its last CUT digits and, below NORMAL, at the
    spacing that float32 has at AT."""
    bits = x.to(tl.int32, bitcast=True)
    bits = (bits + ((1 << (CUT - 1)) - 1) + ((bits >> CUT) & 1)) & -(1 << CUT)
    normal = tl.where(x == x, bits.to(tl.float32, bitcast=True), x)
    return tl.where(tl.abs(x) < NORMAL, (x + AT) - AT, normal)


@triton.jit
def rounded(x, dtype: tl.constexpr):
    """A float32 tile in `dtype`, rounded to nearest even."""
    if INTERPRETED and dtype == tl.bfloat16:
        # Round here, so that nothing is left for the conversion to cut off.
        bits = x.to(tl.int32, bitcast=True)
        bits = (bits + 0x7FFF + ((bits >> 16) & 1)) & -0x10000
        x = tl.where(x == x, bits.to(tl.float32, bitcast=True), x)
    if INTERPRETED and dtype == tl.float8e4nv:
        # Below 2^-6 the spacing is 2^-9, that of float32 at 24576.
        x = rounded_short(x, 20, 0.015625, 24576.0)
    if INTERPRETED and dtype == tl.float8e5:
        # Below 2^-14 the spacing is 2^-16, that of float32 at 192.
        x = rounded_short(x, 21, 0.00006103515625, 192.0)
    y = x.to(dtype)
    if INTERPRETED and dtype == tl.float8e4nv:
        y = tl.where(x == x, y.to(tl.uint8, bitcast=True), 0x7F).to(dtype, bitcast=True)
    return y


@triton.jit
def operand(x):
    """An operand of tl.dot; float32 holds a bfloat16 one exactly."""
    if INTERPRETED:
        x = x.to(tl.float32)
    return x
