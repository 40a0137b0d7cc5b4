"""The online-softmax state of float32 scores, to the last digits that a float32 softmax shows.

A plain float32 softmax has three errors that do not show in 16 bits.  A sum of thousands of terms, the
largest of which is 1, loses the last digits of the others.  log2(e) as a float32 makes every term too
small by the same 1.3e-8 of its logarithm.  A product with 1 / l is off by a unit in the last place.

Here a sum has two parts, one of which is exact; log2(e) has two parts as well; and a quotient is
rounded as a division is.  What remains is the hardware's power of 2, which is off by up to two units in
the last place, though not for the largest term.  The weights of a merge, and values that are few, do
not use it.

Shapes: p, x [R, C]; m, l [R], float32; see online_softmax.py.
"""

import triton
import triton.language as tl

from .exchange import unpack
from .online_softmax import LOG2E, shift_of

# log2(e) less its float32.
LOG2E_LOW = tl.constexpr(1.9259629911266175e-08)

# Added to |x| < 2^22 it leaves no binary places: the sum rounds x to an integer.
INTEGERS = tl.constexpr(12582912.0)


@triton.jit
def exponential(x):
    """exp(x) of x <= 0, within about one unit in the last place: 2^n, which is exact, times the series
    of 2^f, |f| <= 1/2, whose next term is below 2^-27."""
    x = tl.where(x < -110.0, -110.0, x)  # 0 either way; a NaN stays
    n = (x * LOG2E + INTEGERS) - INTEGERS
    f = tl.fma(x, LOG2E, -n) + x * LOG2E_LOW
    p = f * 1.5252734e-5 + 1.5403530e-4
    p = p * f + 1.3333558e-3
    p = p * f + 9.6181291e-3
    p = p * f + 5.5504109e-2
    p = p * f + 2.4022651e-1
    p = p * f + 6.9314718e-1
    return (p * f + 1.0) * tl.exp2(n)


@triton.jit
def hardware_exponential(x):
    """exp(x), off by the hardware's power of 2 and by a rounding of its argument."""
    return tl.exp2(tl.fma(x, LOG2E, x * LOG2E_LOW))


@triton.jit
def quotient(p, l):
    """p / l, where l [R, 1] or a scalar is the divisor of a row: the product with 1 / l, which is off
    by a unit in the last place, corrected by its remainder, which is divided the same way."""
    inverse = tl.div_rn(1.0, l)
    q = p * inverse
    return tl.fma(tl.fma(-q, l, p), inverse, q)


@triton.jit
def exact_part(p, COLUMNS: tl.constexpr):
    """p, 0 <= p <= 1, rounded to multiples of a unit; p is elements of rows of COLUMNS, a power of two.

    The unit is 2^-24 times the columns, but at least 2^-12.  So these parts are added without rounding,
    in any order, since the sums are at most 2^24 units.  The rests are so small that their roundings do
    not count.
    """
    columns: tl.constexpr = COLUMNS if COLUMNS > 4096 else 4096
    middle: tl.constexpr = 0.75 * columns  # from columns / 2 to columns the last place is a unit
    return (p + middle) - middle


@triton.jit
def sum_in_parts(p):
    """(high, low) [R], whose sum is that of the rows of p [R, C], 0 <= p <= 1; high is exact."""
    high = exact_part(p, p.shape[1])
    return tl.sum(high, 1), tl.sum(p - high, 1)


@triton.jit
def precise_state(x, m=None):
    """The state (m, l) of scores x [R, C]; m [R] if it is known."""
    if m is None:
        m = tl.max(x, 1)
    high, low = sum_in_parts(hardware_exponential(x - shift_of(m)[:, None]))
    return m, high + low


@triton.jit
def precise_update(m, l, l_low, x):
    """online_softmax_update by scores x [R, C], with the sum in two parts, l + l_low."""
    m_new = tl.maximum(m, tl.max(x, 1))
    shift = shift_of(m_new)
    alpha = exponential(m - shift)
    high, low = sum_in_parts(hardware_exponential(x - shift[:, None]))
    scaled = l * alpha
    total = scaled + high
    # What the roundings of the product and of the sum left out.
    part = total - scaled
    lost = (scaled - (total - part)) + (high - part)
    return m_new, total, l_low * alpha + (tl.fma(l, alpha, -scaled) + lost + low)


@triton.jit
def precise_join(words, splits, lanes=None):
    """The state [1] of a row from those of its splits, packed in words [LANES]; lanes: see collect."""
    m, l = unpack(words)
    if lanes is None:
        lanes = tl.arange(0, words.shape[0])
    here = lanes < splits
    m = tl.where(here, m, -float("inf"))[None, :]
    whole = tl.max(m, 1)
    weights = tl.where(m == whole[:, None], 1.0, exponential(m - shift_of(whole)[:, None]))
    return whole, tl.sum(tl.where(here[None, :], l[None, :] * weights, 0.0), 1)
