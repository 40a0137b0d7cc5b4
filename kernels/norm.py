"""Forward of LayerNorm and RMSNorm over the rows of a matrix, with fused residual add and hooks.

For one row of x (or of total = x + residual, rounded as it is stored):

    xhat = (x - mean) * rstd        rstd = 1 / sqrt(variance + eps)        y = xhat * weight + bias

where (mean, variance) come from the moments state of moments.py; CENTERED = False is RMSNorm, whose
mean is 0 and whose variance is the mean square.

Whatever else is element-wise comes in as functions of hooks.py: PROLOGUE acts on x before the residual
is added, EPILOGUE on y.  CASTING says how xhat meets the weight: "torch" rounds nothing before the
result, "llama" rounds xhat to the dtype of x, "gemma" multiplies by 1 + weight.

Two regimes, by the width alone.  norm_forward_kernel holds R whole rows in registers, each of K chunks
of C columns, so that widths of 3, 5 or 7 times a power of two leave no lane idle.  Wider rows are split
over programs, which take C columns of a row each and exchange their moments (exchange.py) while their
columns wait in the cache, so that those too are read once from memory (norm_forward_split_kernel).  On
Hopper they wait in shared memory instead: hopper/norm_forward.py, or norm_forward_unaligned.py where N
is no multiple of 16 bytes.

A mean in float32 is off by several units in its last place, which its sum has lost, and xhat by rstd
times that: much where the elements of a row are large and nearly equal.  Of float32 rows (PRECISE) the
deviations from it are summed beside their squares; their mean, low, is that error, and is taken from
the mean and from M2 (moments_corrected).  The mean is then off by no more than its rounding.  Programs
that share a row make known how far their means are from the row's first element: float32 has digits
enough for that, unless this element alone makes up the row's deviation.

That rounding too may be large beside dx, a difference, in a row of two or three elements, since it adds
its multiple of the averages of g and of g * xhat (norm_backward.py).  Float32 rows of at most SHORT
elements are therefore shifted by the rounded mean first; the mean of what is left, whose own rounding
does not count, is taken as that of other rows.  Over more elements those averages are small.  Elements
of 16 bits are equal or further apart than units in the last place of their mean.

Legend: M rows, N columns; x, residual [M, N] with unit column stride and a row stride of their own;
y, total [M, N] contiguous; weight, bias [N]; mean, rstd [M] float32; words [M, splits] int64, zeros.
Any float dtype in memory, float32 in registers.  A pointer that is None leaves out its part.  WHOLE
says that the columns fill the tiles to the last: no element needs a mask.
"""

# ruff: noqa: RUF005  (Triton has no starred expressions in tuples)

import triton
import triton.language as tl

from .exchange import collect, pack, publish, unpack
from .hooks import apply_hook
from .moments import (
    average,
    moments_corrected,
    moments_finish,
    moments_join,
    reciprocal_deviation,
    sums_of_both,
)
from .rounding import load, load_own, rounded, store

SHORT = tl.constexpr(64)


@triton.jit
def columns_of(
    chunk, N, C: tl.constexpr, WHOLE: tl.constexpr, K: tl.constexpr = 1, CLUSTER: tl.constexpr = 1
):  # fmt: skip
    """Columns of a chunk of a row [1, C], or of that of every program of a cluster [CLUSTER, C], and
    which of them there are."""
    cols = chunk * C + tl.arange(0, C)[None, :]
    if CLUSTER > 1:
        cols += tl.arange(0, CLUSTER)[:, None] * (K * C)
    if WHOLE:
        return cols, cols >= 0
    else:
        return cols, cols < N


@triton.jit
def scaled(xhat, weight, CASTING: tl.constexpr, dtype: tl.constexpr):
    """xhat [R, C] times the weight; dtype is that of x."""
    tl.static_assert(CASTING == "torch" or CASTING == "llama" or CASTING == "gemma")
    if CASTING == "llama":
        xhat = rounded(xhat, dtype).to(tl.float32)
    if CASTING == "gemma":
        weight += 1
    return xhat * weight


@triton.jit
def load_sum(
    x_ptr, x_stride, residual_ptr, residual_stride, total_ptr, prologue, PROLOGUE: tl.constexpr,
    rows, cols, mask, M, N,
):  # fmt: skip
    """What is normalized [R, C]: x as in memory, or in float32 after its hook; with a residual their
    sum, as it is to be stored in total."""
    x = load_own(x_ptr, rows * x_stride + cols, mask)
    if PROLOGUE is not None:
        x = apply_hook(PROLOGUE, prologue, x.to(tl.float32), rows, cols, M, N)
    if residual_ptr is not None:
        residual = load_own(residual_ptr, rows * residual_stride + cols, mask).to(tl.float32)
        x = rounded(x.to(tl.float32) + residual, total_ptr.dtype.element_ty)
    return x


@triton.jit
def load_total(
    x_ptr, x_stride, residual_ptr, residual_stride, total_ptr, prologue, PROLOGUE: tl.constexpr,
    rows, cols, mask, M, N,
):  # fmt: skip
    """load_sum, and with a residual its result stored in total."""
    x = load_sum(
        x_ptr, x_stride, residual_ptr, residual_stride, total_ptr, prologue, PROLOGUE,
        rows, cols, mask, M, N,
    )  # fmt: skip
    if residual_ptr is not None:
        tl.store(total_ptr + rows * N + cols, x, mask=mask)
    return x


@triton.jit
def mean_of_chunks(chunks, n, N, C: tl.constexpr, WHOLE: tl.constexpr):
    """The mean [R] of rows of n [R] elements in tiles [R, C]."""
    sums = tl.zeros(chunks[0].shape, tl.float32)
    for k in tl.static_range(len(chunks)):
        _, inside = columns_of(k, N, C, WHOLE)
        x = chunks[k].to(tl.float32)
        sums += x if WHOLE else tl.where(inside, x, 0.0)
    return average(tl.sum(sums, 1), n, len(chunks) * C if WHOLE else 0)


@triton.jit
def moments_of_chunks(
    chunks, n, N, C: tl.constexpr, WHOLE: tl.constexpr, CENTERED: tl.constexpr, PRECISE: tl.constexpr
):
    """mean and M2 [R] of rows of n [R] elements in tiles [R, C].

    In two passes over registers, the mean first.
    """
    mean = tl.zeros(n.shape, tl.float32)
    if CENTERED:
        mean = mean_of_chunks(chunks, n, N, C, WHOLE)
    sums = tl.zeros(chunks[0].shape, tl.float32)
    if PRECISE:
        rests = tl.zeros(chunks[0].shape, tl.float32)
    for k in tl.static_range(len(chunks)):
        _, inside = columns_of(k, N, C, WHOLE)
        x = chunks[k].to(tl.float32)
        deviation = x - mean[:, None] if CENTERED else x
        deviation = deviation if WHOLE else tl.where(inside, deviation, 0.0)
        sums += deviation * deviation
        if PRECISE:
            rests += deviation
    if PRECISE:
        rest, M2 = sums_of_both(rests, sums)
        low, M2 = moments_corrected(n, rest, M2, len(chunks) * C if WHOLE else 0)
        return mean + low, M2
    else:
        return mean, tl.sum(sums, 1)


@triton.jit
def load_parameters(weight_ptr, bias_ptr, cols, inside):
    """Weight and bias of columns, in the dtype of memory, where given."""
    weight, bias = 0.0, 0.0
    if weight_ptr is not None:
        weight = tl.load(weight_ptr + cols, mask=inside, other=0.0)
    if bias_ptr is not None:
        bias = tl.load(bias_ptr + cols, mask=inside, other=0.0)
    return weight, bias


@triton.jit
def y_from(
    xhat, weight_ptr, bias_ptr, weight, bias, epilogue, EPILOGUE: tl.constexpr, CASTING: tl.constexpr,
    rows, cols, M, N, dtype: tl.constexpr,
):  # fmt: skip
    """y [R, C] from xhat: what load_parameters has returned, then the hook."""
    y = xhat
    if weight_ptr is not None:
        y = scaled(y, weight.to(tl.float32), CASTING, dtype)
    if bias_ptr is not None:
        y += bias.to(tl.float32)
    return apply_hook(EPILOGUE, epilogue, y, rows, cols, M, N)


@triton.jit
def y_of(
    xhat, weight_ptr, bias_ptr, epilogue, EPILOGUE: tl.constexpr, CASTING: tl.constexpr,
    rows, cols, inside, M, N, dtype: tl.constexpr,
):  # fmt: skip
    """y [R, C] from xhat, weight and bias not loaded before."""
    weight, bias = load_parameters(weight_ptr, bias_ptr, cols, inside)
    return y_from(
        xhat, weight_ptr, bias_ptr, weight, bias, epilogue, EPILOGUE, CASTING, rows, cols, M, N, dtype
    )


@triton.jit
def hold_rows(
    x_ptr, x_stride, residual_ptr, residual_stride, total_ptr, prologue, PROLOGUE: tl.constexpr,
    rows, M, N, eps,
    CENTERED: tl.constexpr, C: tl.constexpr, K: tl.constexpr, WHOLE: tl.constexpr,
):  # fmt: skip
    """What load_sum returns of whole rows [R, 1], in K tiles [R, C], shifted if they are short, and [R]
    each the mean and rstd of the tiles, and the mean of the rows."""
    chunks = ()
    for k in tl.static_range(K):
        cols, inside = columns_of(k, N, C, WHOLE)
        x = load_sum(
            x_ptr, x_stride, residual_ptr, residual_stride, total_ptr, prologue, PROLOGUE,
            rows, cols, (rows < M) & inside, M, N,
        )  # fmt: skip
        chunks = chunks + (x,)
    if residual_ptr is not None:  # only now: no load is moved above a store
        for k in tl.static_range(K):
            cols, inside = columns_of(k, N, C, WHOLE)
            tl.store(total_ptr + rows * N + cols, chunks[k], mask=(rows < M) & inside)
    n = tl.zeros([rows.shape[0]], tl.float32) + N
    FLOAT32: tl.constexpr = CENTERED and chunks[0].dtype == tl.float32
    SHIFTED: tl.constexpr = FLOAT32 and K * C <= SHORT
    if SHIFTED:
        tl.static_assert(K == 1)
        shift = mean_of_chunks(chunks, n, N, C, WHOLE)
        chunks = (chunks[0] - shift[:, None],)
    mean, M2 = moments_of_chunks(chunks, n, N, C, WHOLE, CENTERED, FLOAT32 and not SHIFTED)
    rstd = reciprocal_deviation(average(M2, n, K * C if WHOLE else 0), eps)
    return chunks, mean, rstd, shift + mean if SHIFTED else mean


@triton.jit(do_not_specialize=["M"])
def norm_forward_kernel(
    x_ptr, residual_ptr, weight_ptr, bias_ptr,  # in
    y_ptr, total_ptr, mean_ptr, rstd_ptr,  # out
    x_stride, residual_stride, M, N, eps, prologue, epilogue,
    CENTERED: tl.constexpr, CASTING: tl.constexpr, PROLOGUE: tl.constexpr, EPILOGUE: tl.constexpr,
    R: tl.constexpr, C: tl.constexpr, K: tl.constexpr, WHOLE: tl.constexpr,
):  # fmt: skip
    """Program i normalizes rows i * R to i * R + R - 1, held whole in registers."""
    row = tl.program_id(0).to(tl.int64) * R + tl.arange(0, R)  # [R]
    rows = row[:, None]
    # Weights of narrow rows are on their way before x is, and as tiles [R, C]: those of one row [1, C]
    # would go through shared memory into the layout of x.
    EARLY: tl.constexpr = K == 1 and C <= 512
    if EARLY:
        cols, inside = columns_of(0, N, C, WHOLE)
        weight, bias = load_parameters(weight_ptr, bias_ptr, cols + tl.zeros([R, 1], tl.int32), inside)
    chunks, mean, rstd, row_mean = hold_rows(
        x_ptr, x_stride, residual_ptr, residual_stride, total_ptr, prologue, PROLOGUE,
        rows, M, N, eps, CENTERED, C, K, WHOLE,
    )  # fmt: skip
    for k in tl.static_range(K):
        cols, inside = columns_of(k, N, C, WHOLE)
        x = chunks[k].to(tl.float32)
        xhat = (x - mean[:, None] if CENTERED else x) * rstd[:, None]
        if not EARLY:
            weight, bias = load_parameters(weight_ptr, bias_ptr, cols, inside)
        y = y_from(
            xhat, weight_ptr, bias_ptr, weight, bias, epilogue, EPILOGUE, CASTING,
            rows, cols, M, N, x_ptr.dtype.element_ty,
        )  # fmt: skip
        store(y_ptr, rows * N + cols, y, (rows < M) & inside)
    if CENTERED and mean_ptr is not None:
        tl.store(mean_ptr + row, row_mean, mask=row < M)
    if rstd_ptr is not None:
        tl.store(rstd_ptr + row, rstd, mask=row < M)


@triton.jit
def load_again(
    x_ptr, x_stride, total_ptr, prologue, PROLOGUE: tl.constexpr, rows, cols, mask, M, N
):  # fmt: skip
    """What load_total returned, in float32, from cache.

    Registers that would hold it meanwhile are better spent on other programs, which hide its wait.
    """
    if total_ptr is not None:
        return load(total_ptr, rows * N + cols, mask)
    else:
        x = load(x_ptr, rows * x_stride + cols, mask)
        return apply_hook(PROLOGUE, prologue, x, rows, cols, M, N)


@triton.constexpr_function
def precise(x_ptr, total_ptr, PROLOGUE, CENTERED):
    """Whether what load_sum returns is float32, and has a mean."""
    if total_ptr is None and PROLOGUE is not None:
        return CENTERED
    what = x_ptr if total_ptr is None else total_ptr
    return CENTERED and what.dtype.element_ty == tl.float32


@triton.jit
def elements_of(split, N, C: tl.constexpr):
    """How many of the N elements of a row are in each split of C columns, in float32."""
    return tl.maximum(tl.minimum(N - split * C, C), 0).to(tl.float32)


@triton.jit
def first_of_row(
    x_ptr, x_stride, residual_ptr, residual_stride, total_ptr, prologue, PROLOGUE: tl.constexpr,
    rows, M, N, PRECISE: tl.constexpr,
):  # fmt: skip
    """The first element of what load_sum returns of a row [1, 1], a scalar; 0 unless PRECISE."""
    first = 0.0
    if PRECISE:
        x = load_sum(
            x_ptr, x_stride, residual_ptr, residual_stride, total_ptr, prologue, PROLOGUE,
            rows, tl.zeros_like(rows), rows >= 0, M, N,
        )  # fmt: skip
        first = tl.sum(tl.sum(x, 1), 0)
    return first


@triton.jit
def publish_moments(
    x_ptr, x_stride, residual_ptr, residual_stride, total_ptr, words_ptr, prologue,
    PROLOGUE: tl.constexpr, first, rows, split, M, N,
    C: tl.constexpr, WHOLE: tl.constexpr, CENTERED: tl.constexpr, PRECISE: tl.constexpr,
):  # fmt: skip
    """Make the moments of one split of a row known to the other programs of the row; the mean less
    first_of_row."""
    cols, inside = columns_of(split, N, C, WHOLE)
    n = tl.zeros([1], tl.float32) + elements_of(split, N, C)
    mean = tl.zeros([1], tl.float32)
    x = load_total(
        x_ptr, x_stride, residual_ptr, residual_stride, total_ptr, prologue, PROLOGUE,
        rows, cols, inside, M, N,
    ).to(tl.float32)  # fmt: skip
    if CENTERED:
        mean = tl.div_rn(tl.sum(x if WHOLE else tl.where(inside, x, 0.0), 1), n)
        x = load_again(x_ptr, x_stride, total_ptr, prologue, PROLOGUE, rows, cols, inside, M, N)
        x -= mean[:, None]
    x = x if WHOLE else tl.where(inside, x, 0.0)
    if PRECISE:
        rest, M2 = sums_of_both(x, x * x)
        low, M2 = moments_corrected(n, rest, M2)
        publish(words_ptr, split, pack(mean - first + low, M2))
    else:
        publish(words_ptr, split, pack(mean, tl.sum(x * x, 1)))


@triton.jit
def join_moments(words, splits, N, C: tl.constexpr, lanes=None):
    """(n, mean, M2) of a row, scalars, from those of its splits, packed in words [LANES]; lanes: see
    collect.

    Scalars, since tiles [1, C] of which [1] are a part are converted from their layout whole.
    """
    if lanes is None:
        lanes = tl.arange(0, words.shape[0])
    here = lanes < splits
    n = elements_of(lanes, N, C)
    means, M2 = unpack(words)
    means, M2 = tl.where(here, means, 0.0), tl.where(here, M2, 0.0)
    n, mean, M2 = moments_join(n[None, :], means[None, :], M2[None, :])
    return tl.sum(n, 0), tl.sum(mean, 0), tl.sum(M2, 0)


@triton.jit(do_not_specialize=["M"])
def norm_forward_split_kernel(
    x_ptr, residual_ptr, weight_ptr, bias_ptr,  # in
    y_ptr, total_ptr, mean_ptr, rstd_ptr, words_ptr,  # out
    x_stride, residual_stride, M, N, eps, prologue, epilogue,
    CENTERED: tl.constexpr, CASTING: tl.constexpr, PROLOGUE: tl.constexpr, EPILOGUE: tl.constexpr,
    C: tl.constexpr, WHOLE: tl.constexpr, LANES: tl.constexpr, POLLS: tl.constexpr,
):  # fmt: skip
    """Program i takes split i % splits of row i // splits."""
    PRECISE: tl.constexpr = precise(x_ptr, total_ptr, PROLOGUE, CENTERED)
    splits = tl.cdiv(N, C)
    row = (tl.program_id(0) // splits).to(tl.int64) + tl.arange(0, 1)  # [1]
    own = tl.program_id(0) % splits
    rows = row[:, None]
    words_ptr += (tl.program_id(0) // splits).to(tl.int64) * splits
    first = first_of_row(
        x_ptr, x_stride, residual_ptr, residual_stride, total_ptr, prologue, PROLOGUE,
        rows, M, N, PRECISE,
    )  # fmt: skip
    publish_moments(
        x_ptr, x_stride, residual_ptr, residual_stride, total_ptr, words_ptr, prologue, PROLOGUE,
        first, rows, own, M, N, C, WHOLE, CENTERED, PRECISE,
    )  # fmt: skip
    words, missing = collect(words_ptr, splits, LANES, POLLS)
    split = own
    while missing > 0:  # others are late: their splits too, its own again, and one more look
        split = tl.where(split + 1 < splits, split + 1, 0)
        publish_moments(
            x_ptr, x_stride, residual_ptr, residual_stride, total_ptr, words_ptr, prologue, PROLOGUE,
            first, rows, split, M, N, C, WHOLE, CENTERED, PRECISE,
        )  # fmt: skip
        if split == own:
            words, missing = collect(words_ptr, splits, LANES, POLLS)
    n, mean, M2 = join_moments(words, splits, N, C)
    mean = first + mean if PRECISE else mean
    rstd = moments_finish(n, M2, eps)
    if own == 0:
        if CENTERED:
            tl.store(mean_ptr + row, mean)
        tl.store(rstd_ptr + row, rstd)
    cols, inside = columns_of(own, N, C, WHOLE)
    x = load_again(x_ptr, x_stride, total_ptr, prologue, PROLOGUE, rows, cols, inside, M, N)
    xhat = (x - mean if CENTERED else x) * rstd
    y = y_of(
        xhat, weight_ptr, bias_ptr, epilogue, EPILOGUE, CASTING,
        rows, cols, inside, M, N, x_ptr.dtype.element_ty,
    )  # fmt: skip
    store(y_ptr, rows * N + cols, y, inside)
