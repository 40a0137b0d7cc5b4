"""LayerNorm and RMSNorm forward on Hopper, in Gluon: wide rows of 16-bit elements that begin anywhere.

This is norm_forward.py for any N.  There all rows begin at multiples of 16 bytes; here a row begins
`shift` elements, 0 to 7, after such a multiple.  Copies to shared memory, by cp.async or TMA, are of 16
bytes at multiples of 16, so all of these pieces that hold an element of the row are copied.  The row
then lies in shared memory `shift` elements after the beginning, with a few elements of its neighbours
at either end, which are made zeros.  Before the first row and after the last, these are up to 14 bytes
that are not the tensor's.  They may be read: no memory of a GPU begins or ends within 16 bytes.

    word      two elements in 32 bits; the lower half (lo) is the first
    position  of an element in shared memory: its column within the chunk + shift

Sums must not depend on where a row begins.  A thread adds up elements that lie a slice apart, lower and
upper halves of words separately.  These are sums over columns a slice apart.  They are the same for
every shift, but in other threads and other halves: `column_sum` brings them into the order of columns,
and adds them.

Rows of x, residual, y and total have one shift, so words of x become words of y.  A word at either end
of a chunk may belong to two rows or to two programs, each of which stores its half.

A program takes COLUMNS = C - 8 columns, which fit into C positions at any shift.

Legend: as in norm_forward.py; x, residual, y and total are multiples of 16 bytes, and strides equal N
modulo 8.  Strides and N are in elements; `shift` and `end` are the positions of a chunk's first column
and behind its last.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy

from ..exchange import clear, collect, pack, publish
from ..moments import moments_finish
from ..norm import join_moments, scaled
from .gluon_names import barrier
from .rows_in_shared import (
    buffers,
    columns_of,
    request,
    slice_count,
    slice_of,
    slice_size,
)


@gluon.jit
def words_at(ptr, start):
    """Pointer to the words from the multiple of 16 bytes on at or before element `start`."""
    return ptr.to(gl.pointer_type(gl.int32), bitcast=True) + (start >> 3) * 4


@gluon.jit
def halves(words, dtype: gl.constexpr):
    """(lo, hi) of words in float32."""
    if dtype == gl.bfloat16:
        lo, hi = words << 16, words & -65536
        return lo.to(gl.float32, bitcast=True), hi.to(gl.float32, bitcast=True)
    else:
        lo, hi = words.to(gl.int16), (words >> 16).to(gl.int16)
        lo, hi = lo.to(dtype, bitcast=True), hi.to(dtype, bitcast=True)
        return lo.to(gl.float32), hi.to(gl.float32)


@gluon.jit
def joined(lo, hi, dtype: gl.constexpr):
    """Words whose halves are lo and hi, rounded to dtype."""
    NAME: gl.constexpr = "bf16" if dtype == gl.bfloat16 else "f16"
    return gl.inline_asm_elementwise(
        "cvt.rn." + NAME + "x2.f32 $0, $2, $1;",
        "=r,r,r",
        [lo, hi],
        dtype=gl.int32,
        is_pure=True,
        pack=1,
    )


@gluon.jit
def inside(words, first, shift, end):
    """Which halves (lo, hi) of words are columns of the chunk.

    first: the first word of their slice, from which `words` count.  So a thread compares the same
    numbers for every slice, and the offsets of its addresses are the same too.
    """
    lo, hi, shift, end = words * 2, words * 2 + 1, shift - first * 2, end - first * 2
    return (lo >= shift) & (lo < end), (hi >= shift) & (hi < end)


@gluon.jit
def store_halves(ptr, start, smem, k: gl.constexpr, words, lo, hi, shift, end, WHOLE: gl.constexpr):
    """Store lo and hi, float32 halves of the words of slice k of a chunk whose first column is element
    `start` of ptr; words: as in `inside`."""
    LAST: gl.constexpr = slice_count(smem) - 1
    dtype: gl.constexpr = ptr.dtype.element_ty
    FIRST: gl.constexpr = k * slice_size(smem)
    both, words_ptr = joined(lo, hi, dtype), words_at(ptr, start)
    if WHOLE and k > 0 and k < LAST:
        gl.store(words_ptr + words + FIRST, both)
    else:
        halves_ptr = words_ptr.to(gl.pointer_type(dtype), bitcast=True) + words * 2 + 2 * FIRST
        lo_inside, hi_inside = inside(words, FIRST, shift, end)
        gl.store(words_ptr + words + FIRST, both, mask=lo_inside & hi_inside)
        if k == 0:
            gl.store(halves_ptr + 1, hi.to(dtype), mask=hi_inside & (words * 2 < shift))
        if k == LAST or not WHOLE:
            gl.store(halves_ptr, lo.to(dtype), mask=lo_inside & (words * 2 + 1 >= end - 2 * FIRST))


@gluon.jit
def receive(
    smem, residual_smem, total_ptr, start, shift, end, dtype: gl.constexpr, WHOLE: gl.constexpr
):
    """Wait for what was requested; add the residual, if there is one, and store total.  Positions that
    are no column of the chunk become 0.  WHOLE: only the first slice and the last have such
    positions."""
    async_copy.wait_group(0)
    LAST: gl.constexpr = slice_count(smem) - 1
    for k in gl.static_range(slice_count(smem)):
        if total_ptr is not None or k == 0 or k == LAST or not WHOLE:
            words, content = columns_of(smem, 0), slice_of(smem, k)
            if total_ptr is not None:
                lo, hi = halves(content, dtype)
                residual_lo, residual_hi = halves(slice_of(residual_smem, k), dtype)
                lo, hi = lo + residual_lo, hi + residual_hi
                store_halves(total_ptr, start, smem, k, words, lo, hi, shift, end, WHOLE)
                content = joined(lo, hi, dtype)
            if k == 0 or k == LAST or not WHOLE:
                lo_inside, hi_inside = inside(words, k * slice_size(smem), shift, end)
                content &= gl.where(lo_inside, 0xFFFF, 0) | gl.where(hi_inside, -65536, 0)
            smem[k].store(content)


@gluon.jit
def single_words(smem):
    """The words of a slice, neighbours in neighbouring threads."""
    return gl.arange(0, slice_size(smem), gl.BlockedLayout([1], [32], [gl.num_warps()], [0]))


@gluon.jit
def column_sum(lo, hi, shift):
    """The sum of lo and hi [S / 2], sums at positions of words, in an order that columns decide."""
    S: gl.constexpr = lo.shape[0]
    L: gl.constexpr = gl.BlockedLayout([1], [32], [gl.num_warps()], [0])
    pair, odd = gl.arange(0, S, L), shift % 2 != 0
    evens = gl.gather(gl.where(odd, hi, lo), (pair + shift // 2) % S, 0)
    odds = gl.gather(gl.where(odd, lo, hi), (pair + (shift + 1) // 2) % S, 0)
    return gl.sum(evens + odds, 0)


@gluon.jit
def squares(
    lo_sums,
    hi_sums,
    smem,
    k: gl.constexpr,
    mean,
    shift,
    end,
    dtype: gl.constexpr,
    CENTERED: gl.constexpr,
    MASKED: gl.constexpr,
):
    """Add the squared deviations of slice k, 0 outside of the row."""
    lo, hi = halves(slice_of(smem, k), dtype)
    if CENTERED:
        lo, hi = lo - mean, hi - mean
        if MASKED:
            lo_inside, hi_inside = inside(columns_of(smem, 0), k * slice_size(smem), shift, end)
            lo, hi = gl.where(lo_inside, lo, 0.0), gl.where(hi_inside, hi, 0.0)
    return gl.fma(lo, lo, lo_sums), gl.fma(hi, hi, hi_sums)


@gluon.jit
def moments_of(smem, n, shift, end, dtype: gl.constexpr, CENTERED: gl.constexpr, WHOLE: gl.constexpr):
    """mean and M2 of a chunk of n elements, scalars, in two passes, as moments_of_tile."""
    LAST: gl.constexpr = slice_count(smem) - 1
    mean, zeros = n * 0.0, slice_of(smem, 0).to(gl.float32) * 0.0
    if CENTERED:
        lo_sums, hi_sums = zeros, zeros
        for k in gl.static_range(slice_count(smem)):
            lo, hi = halves(slice_of(smem, k), dtype)
            lo_sums, hi_sums = lo_sums + lo, hi_sums + hi
        mean = gl.div_rn(column_sum(lo_sums, hi_sums, shift), n)
        barrier()  # so that the slices are read again, and not kept in registers
    lo_sums, hi_sums = zeros, zeros
    for k in gl.static_range(slice_count(smem)):
        lo_sums, hi_sums = squares(
            lo_sums,
            hi_sums,
            smem,
            k,
            mean,
            shift,
            end,
            dtype,
            CENTERED,
            k == 0 or k == LAST or not WHOLE,
        )
    return mean, column_sum(lo_sums, hi_sums, shift)


@gluon.jit
def parameter(ptr, smem, k: gl.constexpr, shift, end, WHOLE: gl.constexpr):
    """((lo, hi),) of weight or bias that go with slice k, as in memory; () where there is none."""
    if ptr is None or k >= slice_count(smem):
        return ()
    else:
        FIRST: gl.constexpr = k * slice_size(smem)
        words = single_words(smem)
        at = ptr - shift + words * 2 + 2 * FIRST
        if WHOLE and k > 0 and k < slice_count(smem) - 1:
            return ((gl.load(at), gl.load(at + 1)),)
        else:
            lo, hi = inside(words, FIRST, shift, end)
            return ((gl.load(at, mask=lo, other=0.0), gl.load(at + 1, mask=hi, other=0.0)),)


@gluon.jit
def result(
    x,
    weights,
    biases,
    k: gl.constexpr,
    h: gl.constexpr,
    mean,
    rstd,
    dtype: gl.constexpr,
    CENTERED: gl.constexpr,
    CASTING: gl.constexpr,
):
    """y in float32 of half h of slice k."""
    y = (x - mean if CENTERED else x) * rstd
    if slice_count(weights) > 0:
        y = scaled(y, weights[k][h].to(gl.float32), CASTING, dtype)
    if slice_count(biases) > 0:
        y += biases[k][h].to(gl.float32)
    return y


@gluon.jit
def store_result(
    weight_ptr,
    bias_ptr,
    y_ptr,
    smem,
    mean,
    rstd,
    start,
    shift,
    end,
    CENTERED: gl.constexpr,
    CASTING: gl.constexpr,
    WHOLE: gl.constexpr,
):
    """y of a chunk whose first column is element `start` of y, and goes with the first weight and bias.

    These are loaded a slice before their turn: the compiler moves no load over a store.
    """
    dtype: gl.constexpr = y_ptr.dtype.element_ty
    words = single_words(smem)
    weights = parameter(weight_ptr, smem, 0, shift, end, WHOLE)
    biases = parameter(bias_ptr, smem, 0, shift, end, WHOLE)
    barrier()  # as in moments_of
    for k in gl.static_range(slice_count(smem)):
        weights = weights + parameter(weight_ptr, smem, k + 1, shift, end, WHOLE)
        biases = biases + parameter(bias_ptr, smem, k + 1, shift, end, WHOLE)
        lo, hi = halves(smem[k].load(words.type.layout), dtype)
        lo = result(lo, weights, biases, k, 0, mean, rstd, dtype, CENTERED, CASTING)
        hi = result(hi, weights, biases, k, 1, mean, rstd, dtype, CENTERED, CASTING)
        store_halves(y_ptr, start, smem, k, words, lo, hi, shift, end, WHOLE)


@gluon.jit
def fetch(
    smem,
    residual_smem,
    x_ptr,
    residual_ptr,
    total_ptr,
    x_stride,
    residual_stride,
    row,
    first,
    start,
    shift,
    end,
    CENTERED: gl.constexpr,
    WHOLE: gl.constexpr,
):
    """Bring the columns from `first` on of what is normalized to shared memory, and store total.
    Returns their mean and M2."""
    dtype: gl.constexpr = x_ptr.dtype.element_ty
    words = gl.cdiv(end, 8) * 4
    request(smem, words_at(x_ptr, row * x_stride + first), 0, words, False)
    if residual_ptr is not None:
        request(residual_smem, words_at(residual_ptr, row * residual_stride + first), 0, words, False)
    receive(smem, residual_smem, total_ptr, start, shift, end, dtype, WHOLE)
    return moments_of(smem, (end - shift).to(gl.float32), shift, end, dtype, CENTERED, WHOLE)


@gluon.jit(do_not_specialize=["M"])
def norm_forward_unaligned_kernel(
    x_ptr,
    residual_ptr,
    weight_ptr,
    bias_ptr,  # in
    y_ptr,
    total_ptr,
    mean_ptr,
    rstd_ptr,
    words_ptr,
    used_ptr,  # out
    x_stride,
    residual_stride,
    M,
    N,
    eps,
    CENTERED: gl.constexpr,
    CASTING: gl.constexpr,
    C: gl.constexpr,
    LANES: gl.constexpr,
    POLLS: gl.constexpr,
):
    """Program i takes split i % splits of row i // splits.  LANES: at least 32, so that no two threads
    of a warp have the same."""
    COLUMNS: gl.constexpr = C - 8
    LANES_LAYOUT: gl.constexpr = gl.BlockedLayout([1, 1], [1, 32], [gl.num_warps(), 1], [1, 0])
    lanes = gl.arange(0, LANES, gl.SliceLayout(0, LANES_LAYOUT))
    splits = gl.cdiv(N, COLUMNS)
    row, own = (gl.program_id(0) // splits).to(gl.int64), gl.program_id(0) % splits
    smem = buffers(gl.int32, C // 2)
    residual_smem = buffers(gl.int32, C // 2) if residual_ptr is not None else ()
    if used_ptr is not None:
        clear(used_ptr + row * splits, own)
    shift = (row * N % 8).to(gl.int32)
    missing, split = splits, own
    while missing > 0:  # once, unless others are late: then their splits too, and its own again
        first = split * COLUMNS
        start, end = row * N + first, shift + gl.minimum(N - first, COLUMNS)
        whole = end - shift == COLUMNS
        if whole:
            mean, M2 = fetch(
                smem,
                residual_smem,
                x_ptr,
                residual_ptr,
                total_ptr,
                x_stride,
                residual_stride,
                row,
                first,
                start,
                shift,
                end,
                CENTERED,
                True,
            )
        else:
            mean, M2 = fetch(
                smem,
                residual_smem,
                x_ptr,
                residual_ptr,
                total_ptr,
                x_stride,
                residual_stride,
                row,
                first,
                start,
                shift,
                end,
                CENTERED,
                False,
            )
        publish(words_ptr + row * splits, split, pack(mean, M2))
        if split == own:
            words, missing = collect(words_ptr + row * splits, splits, LANES, POLLS, lanes)
            if missing == 0:
                n, mean, M2 = join_moments(words, splits, N, COLUMNS, lanes)
                rstd = moments_finish(n, M2, eps)
                if own == 0:
                    if mean_ptr is not None:
                        gl.store(mean_ptr + row, mean)
                    if rstd_ptr is not None:
                        gl.store(rstd_ptr + row, rstd)
                weights = None if weight_ptr is None else weight_ptr + first
                biases = None if bias_ptr is None else bias_ptr + first
                if whole:
                    store_result(
                        weights,
                        biases,
                        y_ptr,
                        smem,
                        mean,
                        rstd,
                        start,
                        shift,
                        end,
                        CENTERED,
                        CASTING,
                        True,
                    )
                else:
                    store_result(
                        weights,
                        biases,
                        y_ptr,
                        smem,
                        mean,
                        rstd,
                        start,
                        shift,
                        end,
                        CENTERED,
                        CASTING,
                        False,
                    )
        split = gl.where(split + 1 < splits, split + 1, 0)
