"""Backward of LayerNorm and RMSNorm on Hopper, in Gluon: very wide rows of 16-bit elements.

The algorithm is that of norm_backward_split_kernel in kernels/norm_backward.py: a program keeps to C
columns and walks down the rows, and the programs of a row exchange their parts of the two averages.
There rows wait in registers.  These are too few, so the memory idles while a program asks for the words
of a row.  Here rows wait in shared memory, in a ring of TURNS rows; see rings.py, which also says what
LAG is.

Legend: as in kernels/norm_backward.py; x, dy, dx of 16-bit floats; C the columns of a program, K slices
[S] of rows_in_shared.py; used as words, or None; x_stride, dy_stride and N are in units of 16 bytes.
"""

# ruff: noqa: RUF005  (Triton has no starred expressions in tuples)

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy

from ..exchange import clear, pack, publish, unpack
from ..moments import add_both, add_three
from ..norm_backward import normalize, through_scale
from .rings import at, held, peek_words, request, ring
from .rows_in_shared import (
    columns_of,
    slice_count,
    slice_layout,
    slice_of,
    slice_size,
    units,
    widened,
)


@gluon.jit
def statistics(mean_ptr, rstd_ptr, row, M):
    """mean (0 where there is none) and rstd of a row; of none behind the last."""
    rstd = gl.load(rstd_ptr + row, mask=row < M, other=0.0)
    if mean_ptr is not None:
        return gl.load(mean_ptr + row, mask=row < M, other=0.0), rstd
    else:
        return 0.0, rstd


@gluon.jit
def publish_sums(
    words_ptr,
    split,
    xs,
    dys,
    weight_ptr,
    weights,
    mean,
    rstd,
    CENTERED: gl.constexpr,
    CASTING: gl.constexpr,
):
    """Publish to the programs of a row what the chunks xs, dys of one split add to its two sums."""
    LAYOUT: gl.constexpr = slice_layout(xs[0].dtype, gl.num_warps())
    g_xhat = gl.zeros([slice_size(xs)], gl.float32, LAYOUT)
    g_alone = g_xhat
    for k in gl.static_range(slice_count(xs)):
        xhat = normalize(widened(slice_of(xs, k)), mean, rstd, CENTERED)
        dy = widened(slice_of(dys, k))
        g, _ = through_scale(dy, xhat, weight_ptr, weights[k], CASTING, xs[0].dtype)
        g_xhat += g * xhat
        g_alone += g
    if CENTERED:
        a, b = gl.reduce((g_xhat, g_alone), 0, add_both)
        publish(words_ptr, split, pack(a, b))
    else:
        a = gl.sum(g_xhat, 0)
        publish(words_ptr, split, pack(a, a))


@gluon.jit
def sums_of_words(words, CENTERED: gl.constexpr):
    """The two sums of a row if no words are missing, and how many words are missing.  Only LayerNorm
    needs the second sum."""
    a, b = unpack(words)
    missing = (words == 0).to(gl.int32)
    if CENTERED:
        return gl.reduce((a, b, missing), 0, add_three)
    else:
        a, missing = gl.reduce((a, missing), 0, add_both)
        return a, a, missing


@gluon.jit
def collect(words_ptr, words, splits, LANES: gl.constexpr, POLLS: gl.constexpr, CENTERED: gl.constexpr):
    """sums_of_words after up to POLLS reads, of which `words` is the first."""
    a, b, missing = sums_of_words(words, CENTERED)
    polls = 1
    while (missing > 0) & (polls < POLLS):
        a, b, missing = sums_of_words(peek_words(words_ptr, splits, LANES), CENTERED)
        polls += 1
    return a, b, missing


@gluon.jit(do_not_specialize=["M", "G"])
def norm_backward_shared_kernel(
    dy_ptr, x_ptr, weight_ptr, mean_ptr, rstd_ptr,  # in
    dx_ptr,  # out
    dweight_ptr, dbias_ptr,  # out [G, N] float32, one row of partial sums a group
    words_ptr, used_ptr,
    dy_stride, x_stride, M, N, G,
    CENTERED: gl.constexpr, CASTING: gl.constexpr, C: gl.constexpr, WHOLE: gl.constexpr,
    TURNS: gl.constexpr, LAG: gl.constexpr, LANES: gl.constexpr, POLLS: gl.constexpr,
):  # fmt: skip
    """Program i takes split i % splits of every G-th row, starting with row i // splits."""
    gl.static_assert(TURNS > LAG + 1)
    UNITS: gl.constexpr = units(x_ptr.dtype.element_ty)
    N *= UNITS
    splits = gl.cdiv(N, C)
    group, own = (gl.program_id(0) // splits).to(gl.int64), gl.program_id(0) % splits
    first = own * C
    x_step, dy_step = x_stride.to(gl.int64) * UNITS, dy_stride.to(gl.int64) * UNITS
    xs, dys = ring(x_ptr.dtype.element_ty, C, TURNS), ring(dy_ptr.dtype.element_ty, C, TURNS)
    LAYOUT: gl.constexpr = slice_layout(x_ptr.dtype.element_ty, gl.num_warps())
    S: gl.constexpr = UNITS * 32 * gl.num_warps()
    weights = held(weight_ptr, at(xs, 0), first, N)
    dweights, dbiases = (), ()
    for _ in gl.static_range(C // S):
        if dweight_ptr is not None:
            dweights = dweights + (gl.zeros([S], gl.float32, LAYOUT),)
        if dbias_ptr is not None:
            dbiases = dbiases + (gl.zeros([S], gl.float32, LAYOUT),)

    for i in gl.static_range(TURNS - 1):
        row = group + i * G
        if row < M:
            request(at(xs, i), x_ptr + row * x_step, first, N, WHOLE)
            request(at(dys, i), dy_ptr + row * dy_step, first, N, WHOLE)
        async_copy.commit_group()
    means, rstds = (), ()  # of rows i to i + LAG
    for i in gl.static_range(LAG + 1):
        mean, rstd = statistics(mean_ptr, rstd_ptr, group + i * G, M)
        means, rstds = means + (mean,), rstds + (rstd,)
    async_copy.wait_group(TURNS - 1 - LAG)
    for i in gl.static_range(LAG):
        row = group + i * G
        if row < M:
            publish_sums(
                words_ptr + row * splits,
                own,
                at(xs, i),
                at(dys, i),
                weight_ptr,
                weights,
                means[i],
                rstds[i],
                CENTERED,
                CASTING,
            )

    turn = 0
    for row in range(group, M, G):
        row_words_ptr = words_ptr + row * splits
        if used_ptr is not None:
            clear(used_ptr + row * splits, own)
        words = peek_words(row_words_ptr, splits, LANES)
        mean_later, rstd_later = statistics(mean_ptr, rstd_ptr, row + (LAG + 1) * G, M)

        later = row + (TURNS - 1) * G
        turn_later = gl.where(turn == 0, TURNS - 1, turn - 1)
        if later < M:
            request(at(xs, turn_later), x_ptr + later * x_step, first, N, WHOLE)
            request(at(dys, turn_later), dy_ptr + later * dy_step, first, N, WHOLE)
        async_copy.commit_group()

        async_copy.wait_group(TURNS - 1 - LAG)
        ahead = row + LAG * G
        turn_ahead = gl.where(turn + LAG < TURNS, turn + LAG, turn + LAG - TURNS)
        if ahead < M:
            publish_sums(
                words_ptr + ahead * splits,
                own,
                at(xs, turn_ahead),
                at(dys, turn_ahead),
                weight_ptr,
                weights,
                means[LAG],
                rstds[LAG],
                CENTERED,
                CASTING,
            )

        mean, rstd = means[0], rstds[0]
        chunk_x, chunk_dy = at(xs, turn), at(dys, turn)
        g_xhat, g_alone, missing = collect(row_words_ptr, words, splits, LANES, POLLS, CENTERED)
        split = own
        while missing > 0:  # others are late: their splits too, its own again, and one more look
            split = gl.where(split + 1 < splits, split + 1, 0)
            request(chunk_x, x_ptr + row * x_step, split * C, N, WHOLE)
            request(chunk_dy, dy_ptr + row * dy_step, split * C, N, WHOLE)
            async_copy.commit_group()
            async_copy.wait_group(0)
            publish_sums(
                row_words_ptr,
                split,
                chunk_x,
                chunk_dy,
                weight_ptr,
                held(weight_ptr, chunk_x, split * C, N),
                mean,
                rstd,
                CENTERED,
                CASTING,
            )
            if split == own:
                words = peek_words(row_words_ptr, splits, LANES)
                g_xhat, g_alone, missing = collect(row_words_ptr, words, splits, LANES, POLLS, CENTERED)
        average_g_xhat, average_g = g_xhat / N, g_alone / N

        dweights_now, dbiases_now = (), ()
        for k in gl.static_range(slice_count(chunk_x)):
            cols = first + columns_of(chunk_x, k)
            xhat = normalize(widened(slice_of(chunk_x, k)), mean, rstd, CENTERED)
            dy = widened(slice_of(chunk_dy, k))
            g, dweight = through_scale(dy, xhat, weight_ptr, weights[k], CASTING, chunk_x[0].dtype)
            dx = g - xhat * average_g_xhat
            if CENTERED:
                dx -= average_g
            if dweight_ptr is not None:
                dweights_now = dweights_now + (dweights[k] + dweight,)
            if dbias_ptr is not None:
                dbiases_now = dbiases_now + (dbiases[k] + dy,)
            dx = (dx * rstd).to(dx_ptr.dtype.element_ty)
            if WHOLE:
                gl.store(dx_ptr + row * N + cols, dx)
            else:
                gl.store(dx_ptr + row * N + cols, dx, mask=cols < N)
        dweights, dbiases = dweights_now, dbiases_now

        means_now, rstds_now = (), ()
        for i in gl.static_range(LAG):
            means_now, rstds_now = means_now + (means[i + 1],), rstds_now + (rstds[i + 1],)
        means, rstds = means_now + (mean_later,), rstds_now + (rstd_later,)
        turn = gl.where(turn + 1 < TURNS, turn + 1, 0)

    for k in gl.static_range(C // S):
        cols = first + columns_of(at(xs, 0), k)
        if dweight_ptr is not None:
            gl.store(dweight_ptr + group * N + cols, dweights[k], mask=cols < N)
        if dbias_ptr is not None:
            gl.store(dbias_ptr + group * N + cols, dbiases[k], mask=cols < N)
