"""Rows of a matrix in memory: any float dtype there, rounded from float32 in registers; and what is
lost by that."""

import triton
import triton.language as tl

from .interpreter import rounded


@triton.jit
def load(ptr, offsets, mask, other: tl.constexpr = 0.0):
    """A tile as float32, `other` outside the mask."""
    return tl.load(ptr + offsets, mask=mask, other=other).to(tl.float32)


@triton.jit
def load_own(ptr, offsets, mask, other: tl.constexpr = 0.0):
    """A tile [R, C] of rows that are this program's own, in the dtype of memory.

    L2 keeps wide ones longer than what is written meanwhile: on an H200 1 to 4% faster from 1024
    columns on, up to 2% slower below 512 (and 2 to 9% slower marked the other way).  Perhaps because
    the lines that L2 gives up are then written ones, in the order in which they were written.
    """
    POLICY: tl.constexpr = "evict_last" if offsets.shape[1] >= 512 else ""
    return tl.load(ptr + offsets, mask=mask, other=other, eviction_policy=POLICY)


@triton.jit
def store(ptr, offsets, x, mask):
    """Write a float32 tile, rounded to the dtype in memory."""
    tl.store(ptr + offsets, rounded(x, ptr.dtype.element_ty), mask=mask)


@triton.jit
def rest_of(x, short):
    """How many float32 numbers lie between `short`, the rounding of x to 16 bits, and x, as int16.
    It is all that was lost, unless `short` is infinite or a subnormal float16: then it is cut off."""
    apart = x.to(tl.int32, bitcast=True) - short.to(tl.float32).to(tl.int32, bitcast=True)
    return tl.minimum(tl.maximum(apart, -32768), 32767).to(tl.int16)


@triton.jit
def with_rest(short, rest):
    """The float32 numbers that rest_of was given."""
    bits = short.to(tl.float32).to(tl.int32, bitcast=True) + rest.to(tl.int32)
    return bits.to(tl.float32, bitcast=True)
