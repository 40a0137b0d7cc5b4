"""The K largest of rows of scores in registers, with their columns.

Scores are compared as keys: integers that order like (score, -index).  So all keys of a row differ, and
equal scores go by their index.  A NaN's key is above all others.

The index is that of a column, or of a block of W contiguous columns, whose score is its largest.  The K
largest scores of a row lie in its K best blocks: a score in another block has at least K scores above
it, those of the best blocks.  This holds for equal scores too: since blocks are contiguous, a better
block of the same score has smaller columns.  So of N columns only N / W keys need to be looked at, and
then the K * W keys of those blocks, which are loaded again.  (The largest score of a block may leave a
NaN out; the scores of a row that holds one have no order.)

Legend: keys [R, C] in registers are int32 where 16 bits hold a score and 16 an index, else int64; KP a
power of two, at least K.
"""

import triton
import triton.language as tl

# The lowest integers, of int32 and int64 keys: 64 and more below the key of any score.
LOWEST32 = tl.constexpr(-(2**31))
LOWEST = tl.constexpr(-(2**63))


@triton.jit
def folded(bits, SIGN: tl.constexpr):
    """Integers in the order of the floats with these bits, and back: its own inverse."""
    return bits ^ ((bits >> SIGN) & ((1 << SIGN) - 1))


@triton.jit
def keys_of(x, index, mask):
    """Keys of scores x, of the dtype in memory: int32 for 16-bit scores, whose index is below 2^16,
    else int64.  The lowest integer outside the mask."""
    value = x.to(tl.float32)
    number = value == value
    x = tl.where(value == 0.0, 0.0, value).to(x.dtype)  # -0.0 equals 0.0
    if x.dtype.primitive_bitwidth == 16:
        rank = folded(x.to(tl.int16, bitcast=True).to(tl.int32), 15)
        rank = tl.where(number, rank, 0x7FFF)
        return tl.where(mask, (rank << 16) | (0xFFFF - index), LOWEST32)
    else:
        rank = folded(x.to(tl.int32, bitcast=True), 31)
        rank = tl.where(number, rank, 0x7FFFFFFF).to(tl.int64)
        return tl.where(mask, (rank << 32) | (0xFFFFFFFF - index.to(tl.int64)), LOWEST)


@triton.jit
def index_of(keys):
    """The index of keys; of the lowest integer, and of 0, one beyond any row."""
    if keys.dtype == tl.int32:
        return 0xFFFF - (keys & 0xFFFF)
    else:
        return 0xFFFFFFFF - (keys & 0xFFFFFFFF)


@triton.jit
def in_row(keys, first):
    """int64 keys, columns counted from the row's start, of keys whose columns count from `first`."""
    if keys.dtype == tl.int32:
        cols = first + index_of(keys).to(tl.int64)
        return ((keys >> 16).to(tl.int64) << 32) | (0xFFFFFFFF - cols)
    else:
        return keys - first


@triton.jit
def scores_and_columns(keys, dtype: tl.constexpr):
    """The scores (float32) and columns (int64) of int64 keys of a score of `dtype`."""
    rank = (keys >> 32).to(tl.int32)
    if dtype.primitive_bitwidth == 16:
        x = folded(rank, 15).to(tl.int16).to(dtype, bitcast=True)
    else:
        x = folded(rank, 31).to(dtype, bitcast=True)
    return x.to(tl.float32), index_of(keys)


# --- selection -----------------------------------------------------------------------------------


@triton.jit
def select(keys, K, KP: tl.constexpr, SORT: tl.constexpr):
    """The K largest of keys [R, C], C at least KP, in descending order [R, KP]; SORT: by sorting, else
    one after another, by a search for each."""
    if SORT:
        return sorted_best(keys, KP)
    else:
        return searched(keys, K, KP)


@triton.jit
def largest_below(keys, last):
    """The largest of keys [R, C] below last [R]; the largest of all if last is the lowest integer.

    Counting upwards from `last` without a sign, keys above it come first and those below it, having
    wrapped around, last: one subtraction and one maximum an element.
    """
    unsigned: tl.constexpr = tl.uint32 if keys.dtype == tl.int32 else tl.uint64
    above = (keys - last[:, None]).to(unsigned, bitcast=True)
    return tl.max(above, 1).to(keys.dtype, bitcast=True) + last


@triton.jit
def searched(keys, K, KP: tl.constexpr):
    """select, of one row (of more, see `totals`); 0 in the places beyond K."""
    tl.static_assert(keys.shape[0] == 1)
    lanes = tl.arange(0, KP)[None, :]
    lowest: tl.constexpr = LOWEST32 if keys.dtype == tl.int32 else LOWEST
    last = tl.zeros([keys.shape[0]], keys.dtype) + lowest
    best = tl.zeros([keys.shape[0], KP], keys.dtype)
    for k in range(0, K):
        last = largest_below(keys, last)
        best = tl.where(lanes == k, last[:, None], best)
    return best


@triton.jit
def sorted_best(keys, KP: tl.constexpr):
    """select by sorting: runs of KP keys are sorted and merged in pairs, and the better half is kept.

    That is tl.topk, with a third fewer instructions for int32 and an eighth for int64.  Keys are places
    of a cube [2] * n, n bits of a number, row first.
    """
    if KP == 1:
        return totals(keys, False)[:, None]
    else:
        stages: tl.constexpr = log2(KP)
        last: tl.constexpr = log2(keys.shape[1])
        cube = tl.reshape(keys, [2] * log2(keys.numel))
        for stage in tl.static_range(1, stages + 1):
            cube = merged(cube, stage, stage == last)
        for stage in tl.static_range(stages + 1, last + 1):
            # Neighbouring runs, one sorted down and one up: the better of each two are the better half.
            cube = tl.max(cube, log2(cube.numel) - 1 - stages)
            cube = merged(cube, stages, stage == last)
        return tl.reshape(cube, [keys.shape[0], KP])


@triton.jit
def totals(x, SUM: tl.constexpr):
    """The sums, or else the maxima, [R] of rows of x [R, C].

    Where reshapes have left a row in lanes that are no neighbours, tl.sum and tl.max take other
    elements too (Triton 3.6.0).  Over one dimension of two after the other they are right.
    """
    n: tl.constexpr = log2(x.shape[1])
    x = tl.reshape(x, [x.shape[0]] + [2] * n)
    for i in tl.static_range(n):
        x = tl.sum(x, n - i, keep_dims=True) if SUM else tl.max(x, n - i, keep_dims=True)
    return tl.reshape(x, [x.shape[0]])


@triton.jit
def merged(keys, stage: tl.constexpr, LAST: tl.constexpr):
    """Sorts bitonic runs of 2^stage keys in a cube, every other one downwards; the LAST stage all."""
    down = 1
    if not LAST:
        down = 1 - bit(log2(keys.numel), stage)
    for i in tl.static_range(stage):
        keys = exchanged(keys, down, stage - 1 - i)
    return keys


@triton.jit
def exchanged(keys, down, i: tl.constexpr):
    """Order each two keys of a cube whose places differ in bit i: the larger first where `down` is 1,
    last where it is 0."""
    n: tl.constexpr = log2(keys.numel)
    others = tl.sum(keys, n - 1 - i, True) - keys
    larger = down != bit(n, i)
    if keys.dtype == tl.int32:
        return tl.where(larger, tl.maximum(keys, others), tl.minimum(keys, others))
    else:  # of which no instruction makes a maximum
        return tl.where((keys > others) == larger, keys, others)


@triton.jit
def bit(n: tl.constexpr, i: tl.constexpr):
    """Bit i, the last dimension's being 0, of the places of a cube [2] * n."""
    return tl.reshape(tl.arange(0, 2), shape_of_bit(n, i))


@triton.constexpr_function
def shape_of_bit(n, i):
    return [1] * (n - 1 - i) + [2] + [1] * i


@triton.constexpr_function
def log2(n):
    """Of a power of two."""
    return n.bit_length() - 1
