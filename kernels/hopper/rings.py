"""Rings of rows in shared memory, for kernels whose programs keep to C columns and walk down the rows.

    ring        shared memory for chunks of TURNS rows (rows_in_shared.py)
    at          the chunk of one row
    request     begin to copy a row's columns there; the caller commits
    held        a program's columns of weight or bias, loaded once for all rows
    peek_words  the words of a row (exchange.py) as they are, without waiting for them

The programs of a row exchange partial results, which takes as long as the memory traffic of some rows.
With several rows in hand no step of a row has to wait for the one before it:

    row i + TURNS - 1   is requested
    row i + LAG         has arrived: what its columns add is published
    row i               was published by all programs LAG steps ago: its result is written

The words of row i are loaded at the start of a step, and checked when row i + LAG is done.  So no
program waits for the memory or the exchange, unless another falls behind by LAG rows.
"""

# ruff: noqa: RUF005  (Triton has no starred expressions in tuples)

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from .gluon_names import copy_to_shared
from .rows_in_shared import columns_of, slice_count, slice_size, units


@gluon.jit
def ring(dtype: gl.constexpr, C: gl.constexpr, TURNS: gl.constexpr):
    """Shared memory for chunks of C columns of TURNS rows: K slices [TURNS, S]."""
    S: gl.constexpr = units(dtype) * 32 * gl.num_warps()
    gl.static_assert(C % S == 0)
    LAYOUT: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, order=[0])
    smem = ()
    for _ in gl.static_range(C // S):
        smem = smem + (gl.allocate_shared_memory(dtype, [TURNS, S], LAYOUT),)
    return smem


@gluon.jit
def at(smem, turn):
    """The chunk of one row of a ring."""
    chunk = ()
    for k in gl.static_range(len(smem)):
        chunk = chunk + (smem[k].index(turn),)
    return chunk


@gluon.jit
def request(smem, x_ptr, first, N, WHOLE: gl.constexpr):
    """Begin to copy a chunk of the row at x_ptr; 0 behind its end."""
    x_ptrs = x_ptr + (first + columns_of(smem, 0))  # computed once: a slice's distance is a constant
    for k in gl.static_range(slice_count(smem)):
        if WHOLE:
            copy_to_shared(smem[k], x_ptrs + k * slice_size(smem))
        else:
            mask = first + columns_of(smem, k) < N
            copy_to_shared(smem[k], x_ptrs + k * slice_size(smem), mask=mask)


@gluon.jit
def held(ptr, smem, first, N):
    """Weight or bias of a chunk that begins at column `first`, slices in the dtype of memory; numbers
    where there is none."""
    parameters = ()
    for k in gl.static_range(slice_count(smem)):
        if ptr is not None:
            cols = first + columns_of(smem, k)
            parameters = parameters + (gl.load(ptr + cols, mask=cols < N, other=0.0),)
        else:
            parameters = parameters + (0.0,)
    return parameters


@gluon.jit
def lanes_of(LANES: gl.constexpr):
    """The splits whose words the threads of a program read, LANES or more.

    Each thread has a lane of its own, so that no two threads see different words of one split.
    """
    THREADS: gl.constexpr = 32 * gl.num_warps()
    LAYOUT: gl.constexpr = gl.BlockedLayout([1], [32], [gl.num_warps()], [0])
    return gl.arange(0, LANES if LANES > THREADS else THREADS, LAYOUT)


@gluon.jit
def peek_words(words_ptr, splits, LANES: gl.constexpr):
    """The words of a row as they are now, each read by one thread; past the last, the words of two
    zeros."""
    lanes = lanes_of(LANES)
    return gl.load(words_ptr + lanes, mask=lanes < splits, other=-(2**63), volatile=True)
