"""softmax and log_softmax forward on Hopper, in Gluon: wide rows in shared memory.

The algorithm is that of kernels/softmax.py.  There a row waits in registers for its state.  Here it
waits in shared memory (rows_in_shared.py) and is read three times, for the maximum, the sum and the
result, and a program has registers only for a slice of it.  So a multiprocessor has enough bytes in
flight for the memory's full bandwidth, and a program holds a whole row of up to 64 KiB.

Rows of float32 are computed with kernels/online_softmax_precise.py.

Legend: M rows, N columns; x [M, N] of unit column stride, y [M, N] contiguous, both float32 or 16-bit
floats; C the columns of a program, K slices [S] of rows_in_shared.py; WHOLE says that the last
program's are all there; words, used [M, splits] int64, used or None, and POLLS: see
kernels/exchange.py.  x_stride and N count units of 16 bytes.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from ..exchange import clear, pack, publish
from ..online_softmax import LOG2E, exponentials, shift_of
from ..online_softmax_precise import exact_part, hardware_exponential, precise_join, quotient
from ..softmax import join
from .gluon_names import barrier
from .rows_in_shared import (
    buffers,
    columns_of,
    receive,
    request,
    slice_count,
    slice_of,
    slice_size,
    units,
    widened,
)


@gluon.constexpr_function
def power_of_two(smem):
    """The columns of a chunk, rounded up."""
    return 1 << (slice_count(smem) * slice_size(smem) - 1).bit_length()


@gluon.jit
def larger(a, b):
    """The larger of two floats, 16-bit ones two at a time; of a number and NaN the number."""
    if a.dtype == gl.float32:
        return gl.maximum(a, b)
    else:
        MAX: gl.constexpr = (
            "max.bf16x2 $0, $1, $2;" if a.dtype == gl.bfloat16 else "max.f16x2 $0, $1, $2;"
        )
        return gl.inline_asm_elementwise(MAX, "=r,r,r", [a, b], dtype=a.dtype, is_pure=True, pack=2)


@gluon.jit
def state_of(smem):
    """The state (m, l) of a chunk, scalars."""
    top = slice_of(smem, 0)
    for k in gl.static_range(1, slice_count(smem)):
        top = larger(top, slice_of(smem, k))
    m = gl.max(top.to(gl.float32), 0)
    barrier()  # so that the slices are read again, and not kept in registers
    shift = shift_of(m)
    if smem[0].dtype == gl.float32:
        high, low = exponentials_in_parts(smem, 0, shift)
        for k in gl.static_range(1, slice_count(smem)):
            more_high, more_low = exponentials_in_parts(smem, k, shift)
            high += more_high
            low += more_low
        return m, gl.sum(high, 0) + gl.sum(low, 0)
    else:
        sums = exponentials(widened(slice_of(smem, 0)), shift, LOG2E, True)
        for k in gl.static_range(1, slice_count(smem)):
            sums += exponentials(widened(slice_of(smem, k)), shift, LOG2E, True)
        return m, gl.sum(sums, 0)


@gluon.jit
def exponentials_in_parts(smem, k: gl.constexpr, shift):
    """The exponentials of slice k of a chunk, in two parts, of which the first is added up exactly."""
    p = hardware_exponential(slice_of(smem, k) - shift)
    high = exact_part(p, power_of_two(smem))
    return high, p - high


@gluon.jit
def known_anew(N, UNITS: gl.constexpr):
    """N, a multiple of UNITS, in a way that the compiler cannot see through: it keeps no masks that it
    made of N before."""
    n = gl.inline_asm_elementwise(
        "mov.b32 $0, $1;", "=r,r", [N // UNITS], dtype=gl.int32, is_pure=False, pack=1
    )
    return n * UNITS


@gluon.jit
def store_result(y_ptr, smem, m, l, first, N, LOG: gl.constexpr, WHOLE: gl.constexpr):
    """y of a chunk that begins at column `first` of a row with the state m, l.

    The empty state gives NaN: (-inf) - (-inf).
    """
    barrier()  # as in state_of
    if not WHOLE and smem[0].dtype == gl.float32:
        N = known_anew(N, units(smem[0].dtype))
    shift = shift_of(m)
    part = gl.log(l) if LOG else gl.log2(l)
    for k in gl.static_range(slice_count(smem)):
        cols = first + columns_of(smem, k)
        x = widened(slice_of(smem, k))
        if LOG:
            y = (x - m) - part
        elif smem[0].dtype == gl.float32:
            y = quotient(hardware_exponential(x - shift), l)
        else:
            y = gl.exp2((x - shift) * LOG2E - part)
        if WHOLE:
            gl.store(y_ptr + cols, y.to(y_ptr.dtype.element_ty))
        else:
            gl.store(y_ptr + cols, y.to(y_ptr.dtype.element_ty), mask=cols < N)


@gluon.jit(do_not_specialize=["M"])
def softmax_forward_shared_kernel(
    x_ptr, y_ptr, x_stride, M, N, LOG: gl.constexpr, WHOLE: gl.constexpr, C: gl.constexpr
):
    """Program i takes row i, of at most C columns."""
    UNITS: gl.constexpr = units(x_ptr.dtype.element_ty)
    row, N = gl.program_id(0).to(gl.int64), N * UNITS
    x_ptr, y_ptr = x_ptr + row * x_stride * UNITS, y_ptr + row * N
    smem = buffers(x_ptr.dtype.element_ty, C)
    request(smem, x_ptr, 0, N, WHOLE)
    receive(smem, 0, N, -float("inf"), WHOLE)
    m, l = state_of(smem)
    store_result(y_ptr, smem, m, l, 0, N, LOG, WHOLE)


@gluon.jit
def collect(words_ptr, splits, lanes, POLLS: gl.constexpr):
    """collect of kernels/exchange.py with plain loads: one thread reads each word, so all threads find
    the same number missing."""
    words = load_words(words_ptr, splits, lanes)
    missing = gl.sum((words == 0).to(gl.int32), 0)
    polls = 1
    while (missing > 0) & (polls < POLLS):
        words = load_words(words_ptr, splits, lanes)
        missing = gl.sum((words == 0).to(gl.int32), 0)
        polls += 1
    return words, missing


@gluon.jit
def load_words(words_ptr, splits, lanes):
    return gl.load(words_ptr + lanes, mask=lanes < splits, other=-(2**63), volatile=True)


@gluon.jit(do_not_specialize=["M"])
def softmax_forward_shared_split_kernel(
    x_ptr,
    y_ptr,
    words_ptr,
    used_ptr,
    x_stride,
    M,
    N,
    LOG: gl.constexpr,
    WHOLE: gl.constexpr,
    C: gl.constexpr,
    LANES: gl.constexpr,
    POLLS: gl.constexpr,
):
    """Program i takes split i % splits of row i // splits."""
    UNITS: gl.constexpr = units(x_ptr.dtype.element_ty)
    THREADS: gl.constexpr = 32 * gl.num_warps()
    LANES_LAYOUT: gl.constexpr = gl.BlockedLayout([1, 1], [1, 32], [1, gl.num_warps()], [1, 0])
    # One a thread at least, so that no two threads have the same.
    lanes = gl.arange(0, LANES if LANES > THREADS else THREADS, gl.SliceLayout(0, LANES_LAYOUT))
    N *= UNITS
    splits = gl.cdiv(N, C)
    row, own = (gl.program_id(0) // splits).to(gl.int64), gl.program_id(0) % splits
    x_ptr, y_ptr, words_ptr = x_ptr + row * x_stride * UNITS, y_ptr + row * N, words_ptr + row * splits
    if used_ptr is not None:
        clear(used_ptr + row * splits, own)
    smem = buffers(x_ptr.dtype.element_ty, C)
    missing, split = splits, own
    while missing > 0:  # once, unless others are late: then their splits too, and its own again
        first = split * C
        request(smem, x_ptr, first, N, WHOLE)
        receive(smem, first, N, -float("inf"), WHOLE)
        m, l = state_of(smem)
        publish(words_ptr, split, pack(m, l))
        if split == own:
            words, missing = collect(words_ptr, splits, lanes, POLLS)
            if missing == 0:
                if x_ptr.dtype.element_ty == gl.float32:
                    row_m, row_l = precise_join(words, splits, lanes)  # [1]
                else:
                    row_m, row_l = join(words, splits, lanes)
                row_m, row_l = gl.sum(row_m, 0), gl.sum(row_l, 0)
                store_result(y_ptr, smem, row_m, row_l, first, N, LOG, WHOLE)
        split = gl.where(split + 1 < splits, split + 1, 0)
