"""LayerNorm and RMSNorm forward on Hopper, in Gluon: wide rows of 16-bit elements, programs that stay.

norm_forward.py gives each program columns of one row.  So weight and bias come from the cache for
every row, as many bytes again as x and y, and every program waits for the words of its row.  Here a
program keeps to C columns and walks down the rows, in a ring of TURNS of them: weight and bias are
loaded once, and nothing is waited for; see rings.py, which also says what LAG is.

Legend: as in norm_forward.py; strides and N are in units of 16 bytes.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy

from ..exchange import clear, pack, publish, unpack
from ..moments import moments_finish
from ..norm import elements_of
from ..norm_backward import add_both
from .norm_forward import add, moments_of, result
from .rings import at, held, lanes_of, look, request, ring
from .rows_in_shared import columns_of, slice_count, slice_of, units, widened


@gluon.jit
def request_row(
    chunk, residual_chunk, x_ptr, residual_ptr, x_step, residual_step, row, first, N,
    WHOLE: gl.constexpr,
):  # fmt: skip
    """Begin to copy the columns from `first` on of a row of x, and of the residual if there is one."""
    request(chunk, x_ptr + row * x_step, first, N, WHOLE)
    if residual_ptr is not None:
        request(residual_chunk, residual_ptr + row * residual_step, first, N, WHOLE)


@gluon.jit
def publish_moments(
    words_ptr, total_ptr, row, split, splits, chunk, residual_chunk, N,
    C: gl.constexpr, CENTERED: gl.constexpr, WHOLE: gl.constexpr,
):  # fmt: skip
    """Make the moments of one split of a row, which is here, known to the row's programs; with a
    residual those of the sum, which is stored, and left in `chunk`."""
    first = split * C
    if total_ptr is not None:
        add(chunk, residual_chunk, total_ptr + row * N, first, N, WHOLE)
    mean, M2 = moments_of(chunk, first, elements_of(split, N, C), N, CENTERED, WHOLE)
    publish(words_ptr + row * splits, split, pack(mean, M2))


@gluon.jit
def moments_of_words(words, N, C: gl.constexpr, LANES: gl.constexpr, CENTERED: gl.constexpr):
    """mean and M2 of a row, as moments_join, from the words of its splits, if none are missing; and how
    many are."""
    means, M2 = unpack(words)
    missing = (words == 0).to(gl.int32)
    if CENTERED:
        n = elements_of(lanes_of(LANES), N, C)  # 0 behind the last split
        total, missing = gl.reduce((n * means, missing), 0, add_both)
        mean = gl.div_rn(total, N.to(gl.float32))
        deviation = means - mean
        return mean, gl.sum(M2 + n * deviation * deviation, 0), missing
    else:
        M2, missing = gl.reduce((M2, missing), 0, add_both)
        return M2 * 0.0, M2, missing


@gluon.jit
def collect(
    words_ptr, words, splits, N, C: gl.constexpr, LANES: gl.constexpr, POLLS: gl.constexpr,
    CENTERED: gl.constexpr,
):  # fmt: skip
    """moments_of_words after one look, which is `words`, to POLLS."""
    mean, M2, missing = moments_of_words(words, N, C, LANES, CENTERED)
    polls = 1
    while (missing > 0) & (polls < POLLS):
        words = look(words_ptr, splits, LANES)
        mean, M2, missing = moments_of_words(words, N, C, LANES, CENTERED)
        polls += 1
    return mean, M2, missing


@gluon.jit(do_not_specialize=["M", "G"])
def norm_forward_ring_kernel(
    x_ptr, residual_ptr, weight_ptr, bias_ptr,  # in
    y_ptr, total_ptr, mean_ptr, rstd_ptr, words_ptr, used_ptr,  # out
    x_stride, residual_stride, M, N, G, eps,
    CENTERED: gl.constexpr, CASTING: gl.constexpr, WHOLE: gl.constexpr,
    C: gl.constexpr, TURNS: gl.constexpr, LAG: gl.constexpr, LANES: gl.constexpr, POLLS: gl.constexpr,
):  # fmt: skip
    """Program i takes split i % splits of every G-th row, starting with row i // splits."""
    gl.static_assert(TURNS > LAG + 1)
    dtype: gl.constexpr = y_ptr.dtype.element_ty
    UNITS: gl.constexpr = units(x_ptr.dtype.element_ty)
    N *= UNITS
    splits = gl.cdiv(N, C)
    group, own = (gl.program_id(0) // splits).to(gl.int64), gl.program_id(0) % splits
    first = own * C
    x_step, residual_step = x_stride.to(gl.int64) * UNITS, residual_stride.to(gl.int64) * UNITS
    xs, residuals = ring(x_ptr.dtype.element_ty, C, TURNS), ()
    if residual_ptr is not None:
        residuals = ring(x_ptr.dtype.element_ty, C, TURNS)

    for i in gl.static_range(TURNS - 1):
        row = group + i * G
        if row < M:
            request_row(
                at(xs, i), at(residuals, i), x_ptr, residual_ptr, x_step, residual_step, row, first, N,
                WHOLE,
            )  # fmt: skip
        async_copy.commit_group()
    weights, biases = held(weight_ptr, at(xs, 0), first, N), held(bias_ptr, at(xs, 0), first, N)
    async_copy.wait_group(TURNS - 1 - LAG)
    for i in gl.static_range(LAG):
        row = group + i * G
        if row < M:
            publish_moments(
                words_ptr, total_ptr, row, own, splits, at(xs, i), at(residuals, i), N,
                C, CENTERED, WHOLE,
            )  # fmt: skip

    turn = 0
    for row in range(group, M, G):
        row_words_ptr = words_ptr + row * splits
        if used_ptr is not None:
            clear(used_ptr + row * splits, own)
        words = look(row_words_ptr, splits, LANES)

        later = row + (TURNS - 1) * G
        turn_later = gl.where(turn == 0, TURNS - 1, turn - 1)
        if later < M:
            request_row(
                at(xs, turn_later), at(residuals, turn_later), x_ptr, residual_ptr,
                x_step, residual_step, later, first, N, WHOLE,
            )  # fmt: skip
        async_copy.commit_group()

        async_copy.wait_group(TURNS - 1 - LAG)
        ahead = row + LAG * G
        turn_ahead = gl.where(turn + LAG < TURNS, turn + LAG, turn + LAG - TURNS)
        if ahead < M:
            publish_moments(
                words_ptr, total_ptr, ahead, own, splits, at(xs, turn_ahead), at(residuals, turn_ahead),
                N, C, CENTERED, WHOLE,
            )  # fmt: skip

        chunk, residual_chunk = at(xs, turn), at(residuals, turn)
        mean, M2, missing = collect(row_words_ptr, words, splits, N, C, LANES, POLLS, CENTERED)
        split = own
        while missing > 0:  # others are late: their splits too, its own again, and one more look
            split = gl.where(split + 1 < splits, split + 1, 0)
            request_row(
                chunk, residual_chunk, x_ptr, residual_ptr, x_step, residual_step, row, split * C, N,
                WHOLE,
            )  # fmt: skip
            async_copy.commit_group()
            async_copy.wait_group(0)
            publish_moments(
                words_ptr, total_ptr, row, split, splits, chunk, residual_chunk, N, C, CENTERED, WHOLE
            )
            if split == own:
                words = look(row_words_ptr, splits, LANES)
                mean, M2, missing = collect(row_words_ptr, words, splits, N, C, LANES, POLLS, CENTERED)
        rstd = moments_finish(N.to(gl.float32), M2, eps)
        if own == 0:
            if mean_ptr is not None:
                gl.store(mean_ptr + row, mean)
            if rstd_ptr is not None:
                gl.store(rstd_ptr + row, rstd)

        for k in gl.static_range(slice_count(chunk)):
            y = result(
                widened(slice_of(chunk, k)), mean, rstd, weight_ptr, weights[k], bias_ptr, biases[k],
                CENTERED, CASTING, dtype,
            )  # fmt: skip
            cols = first + columns_of(chunk, k)
            if WHOLE:
                gl.store(y_ptr + row * N + cols, y)
            else:
                gl.store(y_ptr + row * N + cols, y, mask=cols < N)
        turn = gl.where(turn + 1 < TURNS, turn + 1, 0)
