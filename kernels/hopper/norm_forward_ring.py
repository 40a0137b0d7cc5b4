"""LayerNorm and RMSNorm forward on Hopper, in Gluon: wide rows of 16-bit elements, programs that stay.

norm_forward.py gives each program columns of one row.  So weight and bias come from the cache for
every row, which are as many bytes again as x and y, and every program waits for the words of its row.
Here a program keeps to C columns and walks down the rows, with a ring of TURNS rows.  It loads weight
and bias once, and waits for nothing; see rings.py, which also says what LAG is.

A step's instructions and its chain of reductions then limit the speed.  So the elements of a row are
read twice and not three times, a step has few branches, and a program may be one warp, whose reductions
need no barriers.

Legend: as in norm_forward.py, without a residual; C a power of two that divides the row; strides and N
are in units of 16 bytes.
"""

# ruff: noqa: RUF005  (Triton has no starred expressions in tuples)

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy

from ..exchange import clear, pack, publish, unpack
from ..moments import (
    average_by_reciprocal,
    moments_join_equals,
    moments_merge_equals,
    reciprocal_deviation,
)
from .norm_forward import result, store_statistics
from .rings import at, held, lanes_of, peek_words, request, ring
from .rows_in_shared import columns_of, slice_count, slice_of, slice_size, units, widened


@gluon.jit
def moments_of(chunk, C: gl.constexpr, CENTERED: gl.constexpr):
    """mean and M2 of a chunk, scalars: each thread makes two passes over its elements, as
    moments_of_tile does, and the threads' moments are joined, in one reduction."""
    gl.static_assert(C & (C - 1) == 0)
    THREADS: gl.constexpr = 32 * gl.num_warps()
    xs = ()
    for k in gl.static_range(slice_count(chunk)):
        x = widened(slice_of(chunk, k))
        xs = xs + (gl.reshape(x, [THREADS, slice_size(chunk) // THREADS]),)
    if CENTERED:
        sums = xs[0]
        for k in gl.static_range(1, slice_count(chunk)):
            sums += xs[k]
        means = gl.sum(sums, 1) * (THREADS / C)
        deviation = xs[0] - means[:, None]
        squares = deviation * deviation
        for k in gl.static_range(1, slice_count(chunk)):
            deviation = xs[k] - means[:, None]
            squares = gl.fma(deviation, deviation, squares)
        M2 = gl.sum(squares, 1)
        mean, variance = gl.reduce(
            (means * (1 / THREADS), M2 * (1 / (C * THREADS))), 0, moments_merge_equals
        )
        return mean, variance * C
    else:
        squares = xs[0] * xs[0]
        for k in gl.static_range(1, slice_count(chunk)):
            squares = gl.fma(xs[k], xs[k], squares)
        M2 = gl.sum(gl.sum(squares, 1), 0)
        return M2 * 0.0, M2


@gluon.jit
def moments_of_words(
    words, splits, reciprocal, C: gl.constexpr, LANES: gl.constexpr, CENTERED: gl.constexpr
):
    """mean and M2 of a row from the words of its splits, if none are missing; reciprocal: 1 /
    splits."""
    means, M2 = unpack(words)
    if CENTERED:
        here = lanes_of(LANES) < splits
        return moments_join_equals(means, M2, here, C, splits.to(gl.float32), reciprocal)
    else:
        M2 = gl.sum(M2, 0)
        return M2 * 0.0, M2


@gluon.jit
def rows_of(tile, M, R: gl.constexpr):
    """The rows of a tile; the last tile may take the last row more than once."""
    rows = ()
    for r in gl.static_range(R):
        rows = rows + (gl.minimum(tile * R + r, M - 1),)
    return rows


@gluon.jit
def wide_product(a, b):
    """a * b in int64.

    For int32 that is one instruction, but the compiler takes five if it widens b before a loop.
    """
    if a.dtype == gl.int32 and b.dtype == gl.int32:
        return gl.inline_asm_elementwise(
            "mul.wide.s32 $0, $1, $2;", "=l,r,r", [a, b], dtype=gl.int64, is_pure=True, pack=1
        )
    else:
        return a.to(gl.int64) * b


@gluon.jit
def request_tile(smem, turn, x_ptr, x_stride, rows, first, N):
    """Begin to copy the columns from `first` on of some rows to a turn of their rings."""
    UNITS: gl.constexpr = units(x_ptr.dtype.element_ty)
    for r in gl.static_range(slice_count(rows)):
        request(at(smem[r], turn), x_ptr + wide_product(rows[r], x_stride) * UNITS, first, N, True)


@gluon.jit
def moments_of_tile(smem, turn, C: gl.constexpr, CENTERED: gl.constexpr):
    """The words of a program's part of a tile."""
    words = ()
    for r in gl.static_range(slice_count(smem)):
        mean, M2 = moments_of(at(smem[r], turn), C, CENTERED)
        words = words + (pack(mean, M2),)
    return words


@gluon.jit
def publish_tile(words_ptr, words, rows, split, splits):
    for r in gl.static_range(slice_count(words)):
        publish(words_ptr + wide_product(rows[r], splits), split, words[r])


@gluon.jit
def look_at_tile(words_ptr, rows, splits, LANES: gl.constexpr):
    words = ()
    for r in gl.static_range(slice_count(rows)):
        words = words + (peek_words(words_ptr + wide_product(rows[r], splits), splits, LANES),)
    return words


@gluon.jit
def join_tile(words, splits, reciprocal, C: gl.constexpr, LANES: gl.constexpr, CENTERED: gl.constexpr):
    """moments_of_words of the rows of a tile, and whether words are missing of any."""
    missing = (words[0] == 0).to(gl.int32)
    for r in gl.static_range(1, slice_count(words)):
        missing |= (words[r] == 0).to(gl.int32)
    missing = gl.max(missing, 0)  # of integers, and alone: an instruction of its own
    means, M2s = (), ()
    for r in gl.static_range(slice_count(words)):
        mean, M2 = moments_of_words(words[r], splits, reciprocal, C, LANES, CENTERED)
        means, M2s = means + (mean,), M2s + (M2,)
    return means, M2s, missing


@gluon.jit(do_not_specialize=["M", "G"])
def norm_forward_ring_kernel(
    x_ptr, residual_ptr, weight_ptr, bias_ptr,  # in
    y_ptr, total_ptr, mean_ptr, rstd_ptr, words_ptr, used_ptr,  # out
    x_stride, residual_stride, M, N, G, eps,
    CENTERED: gl.constexpr, CASTING: gl.constexpr, WHOLE: gl.constexpr, C: gl.constexpr,
    R: gl.constexpr, TURNS: gl.constexpr, LAG: gl.constexpr, LANES: gl.constexpr, POLLS: gl.constexpr,
):  # fmt: skip
    """Program i takes split i % splits of every G-th tile of R rows, starting with tile i // splits."""
    gl.static_assert(TURNS > LAG + 1)
    gl.static_assert(WHOLE and residual_ptr is None)
    dtype: gl.constexpr = y_ptr.dtype.element_ty
    UNITS: gl.constexpr = units(x_ptr.dtype.element_ty)
    units_N, N = N, N * UNITS
    splits, tiles = N // C, gl.cdiv(M, R)
    group, own = gl.program_id(0) // splits, gl.program_id(0) % splits
    first, n = own * C, N.to(gl.float32)
    reciprocal, reciprocal_n = gl.div_rn(1.0, splits.to(gl.float32)), gl.div_rn(1.0, n)
    xs = ()
    for _ in gl.static_range(R):  # a ring each: what is written to one is no other's matter
        xs = xs + (ring(x_ptr.dtype.element_ty, C, TURNS),)
    chunk = at(xs[0], 0)

    for i in gl.static_range(TURNS - 1):
        if group + i * G < tiles:
            request_tile(xs, i, x_ptr, x_stride, rows_of(group + i * G, M, R), first, N)
        async_copy.commit_group()
    weights, biases = held(weight_ptr, chunk, first, N), held(bias_ptr, chunk, first, N)
    async_copy.wait_group(TURNS - 1 - LAG)
    for i in gl.static_range(LAG):
        if group + i * G < tiles:
            words = moments_of_tile(xs, i, C, CENTERED)
            publish_tile(words_ptr, words, rows_of(group + i * G, M, R), own, splits)

    turn = 0
    for tile in range(group, tiles, G):
        rows = rows_of(tile, M, R)
        if used_ptr is not None:
            for r in gl.static_range(R):
                clear(used_ptr + wide_product(rows[r], splits), own)
        words = look_at_tile(words_ptr, rows, splits, LANES)

        later = tile + (TURNS - 1) * G
        if later < tiles:
            turn_later = gl.where(turn == 0, TURNS - 1, turn - 1)
            request_tile(xs, turn_later, x_ptr, x_stride, rows_of(later, M, R), first, N)
        async_copy.commit_group()

        async_copy.wait_group(TURNS - 1 - LAG)
        ahead = tile + LAG * G
        turn_ahead = gl.where(turn + LAG < TURNS, turn + LAG, turn + LAG - TURNS)
        if ahead < tiles:
            words_ahead = moments_of_tile(xs, turn_ahead, C, CENTERED)
            publish_tile(words_ptr, words_ahead, rows_of(ahead, M, R), own, splits)

        means, M2s, missing = join_tile(words, splits, reciprocal, C, LANES, CENTERED)
        polls, split = 1, own
        while missing > 0:
            if polls == POLLS:  # others are late: their splits too, its own again, and so on
                split = gl.where(split + 1 < splits, split + 1, 0)
                request_tile(xs, turn, x_ptr, x_stride, rows, split * C, N)
                async_copy.commit_group()
                async_copy.wait_group(0)
                publish_tile(words_ptr, moments_of_tile(xs, turn, C, CENTERED), rows, split, splits)
                polls = gl.where(split == own, 0, polls)
            if polls < POLLS:
                words = look_at_tile(words_ptr, rows, splits, LANES)
                means, M2s, missing = join_tile(words, splits, reciprocal, C, LANES, CENTERED)
                polls += 1
        rstds = ()
        for r in gl.static_range(R):
            rstds = rstds + (reciprocal_deviation(average_by_reciprocal(M2s[r], n, reciprocal_n), eps),)
        if own == 0:
            store_statistics(mean_ptr, rstd_ptr, means, rstds, tile, M)

        y_ptrs = ()
        for r in gl.static_range(R):
            row_ptr = y_ptr + wide_product(rows[r], units_N) * UNITS
            y_ptrs = y_ptrs + (row_ptr + (first + columns_of(chunk, 0)),)
        for k in gl.static_range(slice_count(chunk)):
            for r in gl.static_range(R):
                y = result(
                    widened(slice_of(at(xs[r], turn), k)),
                    means[r],
                    rstds[r],
                    weight_ptr,
                    weights[k],
                    bias_ptr,
                    biases[k],
                    CENTERED,
                    CASTING,
                    dtype,
                )
                gl.store(y_ptrs[r] + k * slice_size(chunk), y)
        turn = gl.where(turn + 1 < TURNS, turn + 1, 0)
