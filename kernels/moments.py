"""The moments state (n, mean, M2): count, mean, sum of squared deviations from the mean.

    mean = 1/n sum_i x_i          M2 = sum_i (x_i - mean)^2          variance = M2 / n   (biased)

Two states merge without cancellation (Chan, Golub and LeVeque, 1979):

    n = n1 + n2      delta = mean2 - mean1
    mean = mean1 + delta * n2 / n
    M2 = M2_1 + M2_2 + delta^2 * n1 * n2 / n

The merge joins tiles of a row, splits of a row and shards of a hidden dimension.  Sums of x and x^2
would be cheaper and wrong: at mean 1e4 and deviation 1 float32 gives a variance of 8.

RMSNorm is the degenerate case CENTERED = False: deviations are taken from zero, mean stays 0,
M2 is the sum of squares, and the same merge applies with delta = 0.

A mean in float32 is off by what its sum has lost, several units in its last place over many elements,
and it is rounded.  Deviations from such a mean are exact, or nearly.  So their own mean is what it is
off by, and what M2 is too large by is n times the square of that: see moments_corrected.

States of equal counts, which kernels know beforehand, need no n: moments_merge_equals and
moments_join_equals.

Shapes: tiles are [R, C] (R rows, C columns); n, mean and M2 are [R], float32.
"""

import triton
import triton.language as tl

from .interpreter import INTERPRETED

LARGEST = tl.constexpr(3.4028234663852886e38)  # of float32


@triton.jit
def moments_start(R: tl.constexpr):
    """The state of no elements: n = 0, mean = 0, M2 = 0, each [R]."""
    return tl.zeros([R], tl.float32), tl.zeros([R], tl.float32), tl.zeros([R], tl.float32)


@triton.jit
def moments_of_tile(x, mask, n, CENTERED: tl.constexpr):
    """The state of a tile x [R, C] of which `mask` selects n elements in each row (n may be 0).

    Three passes over registers: the mean, what it is off by, and the squared deviations from it.  The
    division is rounded to nearest: where a row's mean is large beside its deviation, the last digit
    matters.
    """
    if CENTERED:
        count = tl.maximum(n, 1.0)
        mean = tl.div_rn(tl.sum(tl.where(mask, x, 0.0), 1), count)
        mean += tl.div_rn(tl.sum(tl.where(mask, x - mean[:, None], 0.0), 1), count)
        deviation = tl.where(mask, x - mean[:, None], 0.0)
    else:
        deviation = tl.where(mask, x, 0.0)
        mean = tl.zeros([x.shape[0]], tl.float32)
    return n, mean, tl.sum(deviation * deviation, 1)


@triton.jit
def moments_merge(n1, mean1, M2_1, n2, mean2, M2_2):
    """Chan's merge of two states, either of which may be empty."""
    n = n1 + n2
    delta = mean2 - mean1
    share = n2 / tl.maximum(n, 1)
    # delta^2 alone may overflow where an empty state's n1 * share = 0 must give 0.
    return n, mean1 + delta * share, M2_1 + M2_2 + delta * (n1 * share) * delta


@triton.jit
def moments_join(n, mean, M2):
    """Chan's merge of all states of a row at once: n, mean, M2 [R, G] of G states to [R].

    M2 = sum M2_i + sum n_i (mean_i - mean)^2.  A state may be empty, its mean and M2 0, but not all.
    """
    total = tl.sum(n, 1)
    whole = tl.div_rn(tl.sum(n * mean, 1), total)
    deviation = mean - whole[:, None]
    return total, whole, tl.sum(M2 + n * deviation * deviation, 1)


@triton.jit
def moments_corrected(n, rest, M2, COUNT: tl.constexpr = 0):
    """What a mean is off by, and M2 about the right one, from the sums over n elements of the
    deviations from it (rest) and of their squares (M2); COUNT: see average.

    M2 stays at least 0, and infinite where it is.
    """
    low = average(rest, n, COUNT)
    return low, M2 - tl.minimum(rest * low, tl.minimum(M2, LARGEST))


@triton.jit
def add_both(a1, b1, a2, b2):
    return a1 + a2, b1 + b2


@triton.jit
def add_three(a1, b1, c1, a2, b2, c2):
    return a1 + a2, b1 + b2, c1 + c2


@triton.jit
def sums_of_both(a, b):
    """Sums [R] over the columns of two tiles [R, C], in one reduction."""
    if INTERPRETED:  # where the two at once take a step of Python an element
        return tl.sum(a, 1), tl.sum(b, 1)
    else:
        return tl.reduce((a, b), 1, add_both)


@triton.jit
def moments_merge_equals(s1, q1, s2, q2):
    """moments_merge of two states of n elements each of a row of N, given as s = mean * n / N and
    q = M2 * n / N^2: so it needs no n, and of all N elements s is the mean and q the variance.

    Products are added by fma here, so that the compiler has no choice, wherever this is inlined.
    """
    difference = s1 - s2
    return s1 + s2, tl.fma(difference, difference, 2.0 * (q1 + q2))


@triton.jit
def moments_join_equals(means, M2, here, n, count, reciprocal):
    """moments_join of the states [G] of one row that are `here`, `count` of them, of n elements each;
    the others are 0.  reciprocal: see average_by_reciprocal."""
    mean = average_by_reciprocal(tl.sum(means, 0), count, reciprocal)
    deviation = tl.where(here, means - mean, 0.0)
    return mean, tl.sum(M2 + deviation * deviation * n, 0)


@triton.jit
def average(total, n, COUNT: tl.constexpr = 0):
    """total / n rounded to nearest.  COUNT is n where it is known at compile time, else 0: for a power
    of two a product gives the same without a division, which branches."""
    if COUNT > 0 and COUNT & (COUNT - 1) == 0:
        return total * (1.0 / COUNT)
    else:
        return tl.div_rn(total, n)


@triton.jit
def average_by_reciprocal(total, n, reciprocal):
    """total / n rounded to nearest, by 1 / n rounded to nearest (Markstein, 1990).

    A division has branches, and between them the compiler works on one row at a time.
    """
    q = total * reciprocal
    nearest = tl.fma(tl.fma(q * -1.0, n, total), reciprocal, q)
    return tl.where(nearest == nearest, nearest, q)  # of infinity the remainder is not a number


@triton.jit
def reciprocal_deviation(variance, eps):
    """1 / sqrt(variance + eps) [R], within about one unit in the last place.

    The hardware's approximation and a step of Newton's: a root and a quotient rounded to nearest would
    branch.  The hardware takes subnormal numbers for zeros, hence the scale.  Of 0 and of infinity it
    is right, and the step not a number.
    """
    x = variance + tl.cast(eps, tl.float32)
    small = x < 2.0**-100
    x *= tl.where(small, 2.0**100, 1.0)
    y = tl.rsqrt(x)
    better = y + 0.5 * y * (1.0 - x * y * y)
    y = tl.where(better == better, better, y)
    return y * tl.where(small, 2.0**50, 1.0)


@triton.jit
def moments_finish(n, M2, eps):
    """reciprocal_deviation of M2 / n, as in LayerNorm (or RMSNorm) [R]."""
    return reciprocal_deviation(average(M2, n), eps)
