"""Tiles of the rows of a matrix in memory: any float dtype there, float32 in registers."""

import triton
import triton.language as tl

from .interpreter import rounded


@triton.jit
def load(ptr, offsets, mask, other: tl.constexpr = 0.0):
    """A tile as float32, `other` outside the mask."""
    return tl.load(ptr + offsets, mask=mask, other=other).to(tl.float32)


@triton.jit
def store(ptr, offsets, x, mask):
    """Write a float32 tile, rounded to the dtype in memory."""
    tl.store(ptr + offsets, rounded(x, ptr.dtype.element_ty), mask=mask)
