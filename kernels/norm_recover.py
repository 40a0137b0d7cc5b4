"""Norms that keep their output for the backward pass instead of their input.

The backward pass of a norm reads the input for xhat alone, and xhat = y / weight.  Two things could go
wrong with that quotient, and do not:

    Digits.  Where there is no bias, y is xhat * weight with a relative error of one rounding, and so is
    what comes back, however small the weight is, as long as y does not underflow.

    Underflow.  A weight of 0 would leave nothing of xhat, which its own gradient and those of the other
    columns need.  So no weight counts as smaller than SMALLEST, 2^-64.  What that adds to y is less
    than 1e-19 of xhat, which does not matter beside columns of ordinary weight.  bfloat16 and float32,
    whose numbers go down to 2^-126, still hold it with all their digits.

float16 does not go down that far.  A bias takes digits of xhat away, because y = bias + xhat * weight
is rounded to the digits of the larger of the two.  Neither is allowed here.
"""

import triton
import triton.language as tl

from .rounding import load, store

SMALLEST = tl.constexpr(2.0**-64)


@triton.jit
def recoverable(weight):
    """The weight or, where it is too small, the smallest weight that keeps xhat in y."""
    return tl.where(tl.abs(weight) < SMALLEST, SMALLEST, weight)


@triton.jit
def recoverable_weight_kernel(weight_ptr, out_ptr, N, shift, C: tl.constexpr):
    """out [N] = recoverable(weight + shift), in float32."""
    col = tl.program_id(0) * C + tl.arange(0, C)
    store(out_ptr, col, recoverable(load(weight_ptr, col, col < N) + shift), col < N)


@triton.jit
def recovered(y, index, rstd, weight, shift):
    """A hook (see hooks.py) that gives xhat / rstd for y, which has mean 0 where xhat has."""
    return y / recoverable(weight + shift) * (1 / rstd)


@triton.jit
def recovered_unweighted(y, index, rstd):
    return y * (1 / rstd)
