"""softmax and log_softmax over the rows of a matrix, forward and backward, with hooks.

Both are the online-softmax state (m, l) of online_softmax.py, finished differently:

    softmax        y = exp(x - m) / l              dx = y * (dy - sum(y * dy))
    log_softmax    y = (x - m) - log(l)            dx = dy - exp(y) * sum(dy)

A row that is all -inf gives NaN, as in torch.

Other element-wise work comes in as functions of hooks.py: PROLOGUE acts on x, EPILOGUE on y.  With
either of them the backward takes x and the logsumexp of the scores, and computes y again.

There are three regimes, chosen by the width alone.  A tile [R, C] with C >= N holds R whole rows in
registers.  Wider rows are split: each program holds a tile [1, C] of a row, and the programs of a row
exchange their partial states (exchange.py), so that the row is read once.  Rows too wide for that are
looped over in tiles [1, C]: once for the state, and once backwards for the result, so that what was
read last is still in cache.

PRECISE: the softmax is in float32, and has the state and quotients of online_softmax_precise.py.

Legend: M rows, N columns, R x C the tile; x, dy [M, N] with unit column stride and a row stride of
their own; y, dx [M, N] contiguous; lse [M] float32, None where there is no hook; words, used
[M, splits] int64, used or None, and LANES, POLLS: see exchange.py; prologue, epilogue: arguments of the
hooks, and ..._gradients where those of their operands go.  Any float dtype in memory, float32 in
registers.
"""

import triton
import triton.language as tl

from .exchange import clear, collect, pack, publish, unpack
from .hooks import apply_hook, apply_hook_backward
from .interpreter import INTERPRETED
from .online_softmax import (
    LOG2E,
    exponentials,
    online_softmax_finish,
    online_softmax_join,
    online_softmax_start,
    online_softmax_update,
    shift_of,
)
from .online_softmax_precise import (
    hardware_exponential,
    precise_join,
    precise_state,
    precise_update,
    quotient,
)
from .rounding import load, load_own, store


@triton.jit
def opaque(x):
    """x unchanged, in a way that the compiler cannot see through: it keeps nothing that it made of x
    before.

    Float32 values of 16-bit elements take twice their registers, which halves the programs that have
    room while they wait for memory or for one another.  Converting again costs nothing.
    """
    if INTERPRETED or x.dtype.primitive_bitwidth != 16:
        return x
    else:
        return tl.inline_asm_elementwise(
            "mov.b32 $0, $1;", "=r,r", [x], dtype=x.dtype, is_pure=True, pack=2
        )


@triton.jit
def state_of(x, PRECISE: tl.constexpr = False, m=None):
    """The state (m, l) [R] of a tile x [R, C] of any float dtype, as online_softmax_update of an empty
    state gives it; m: the maximum, if it is known."""
    if PRECISE:
        return precise_state(x.to(tl.float32), m)
    else:
        if m is None:
            m = tl.max(x.to(tl.float32), 1)
        x = opaque(x).to(tl.float32)
        return m, tl.sum(exponentials(x, shift_of(m)[:, None], LOG2E, True), 1)


@triton.jit
def join(words, splits, lanes=None):
    """The state [1] of a row from its splits' states, packed in words [LANES]; lanes: see collect."""
    m, l = unpack(words)
    if lanes is None:
        lanes = tl.arange(0, words.shape[0])
    here = lanes < splits
    m, l = tl.where(here, m, -float("inf")), tl.where(here, l, 0.0)
    return online_softmax_join(m[None, :], l[None, :], LOG2E)


@triton.jit
def normalized(x, m, l, LOG: tl.constexpr, PRECISE: tl.constexpr):
    """softmax or log_softmax of x [R, C], elements of rows that have the state m, l [R].

    The empty state, which attention finishes as 0, is NaN here: (-inf) - (-inf), or 0 * (1 / 0).
    """
    if LOG:
        return (x - m[:, None]) - tl.log(l)[:, None]
    elif PRECISE:
        return quotient(hardware_exponential(x - shift_of(m)[:, None]), l[:, None])
    else:
        return exponentials(x, shift_of(m)[:, None], LOG2E, True) * tl.div_rn(1.0, l)[:, None]


@triton.jit
def load_scores(x_ptr, x_stride, prologue, PROLOGUE: tl.constexpr, rows, cols, M, N):
    """x [R, C] as in memory, or in float32 after its hook; -inf outside the matrix."""
    mask = (rows < M) & (cols < N)
    x = load_own(x_ptr, rows * x_stride + cols, mask, -float("inf"))
    if PROLOGUE is not None:
        x = apply_hook(PROLOGUE, prologue, x.to(tl.float32), rows, cols, M, N)
        x = tl.where(mask, x, -float("inf"))
    return x


@triton.jit
def store_result(y_ptr, x, m, l, epilogue, EPILOGUE: tl.constexpr, LOG: tl.constexpr, rows, cols, M, N):
    """y after its hook, from scores x [R, C] of rows that have the state m, l [R]."""
    y = normalized(opaque(x).to(tl.float32), m, l, LOG, y_ptr.dtype.element_ty == tl.float32)
    y = apply_hook(EPILOGUE, epilogue, y, rows, cols, M, N)
    store(y_ptr, rows * N + cols, y, (rows < M) & (cols < N))


@triton.jit
def store_lse(lse_ptr, m, l, row, M):
    """The logsumexp of rows [R], where one is wanted."""
    if lse_ptr is not None:
        lse, _ = online_softmax_finish(m, l, LOG2E)
        tl.store(lse_ptr + row, lse, mask=row < M)


@triton.jit(do_not_specialize=["M"])
def softmax_forward_kernel(
    x_ptr,
    y_ptr,
    lse_ptr,
    x_stride,
    M,
    N,
    prologue,
    epilogue,
    LOG: tl.constexpr,
    PROLOGUE: tl.constexpr,
    EPILOGUE: tl.constexpr,
    R: tl.constexpr,
    C: tl.constexpr,
):
    """Program i takes rows i * R to i * R + R - 1, held whole in registers."""
    row = tl.program_id(0).to(tl.int64) * R + tl.arange(0, R)  # [R]
    rows, cols = row[:, None], tl.arange(0, C)[None, :]
    x = load_scores(x_ptr, x_stride, prologue, PROLOGUE, rows, cols, M, N)
    m, l = state_of(x, not LOG and y_ptr.dtype.element_ty == tl.float32)
    store_result(y_ptr, x, m, l, epilogue, EPILOGUE, LOG, rows, cols, M, N)
    store_lse(lse_ptr, m, l, row, M)


@triton.jit(do_not_specialize=["M"])
def softmax_forward_split_kernel(
    x_ptr,
    y_ptr,
    lse_ptr,
    words_ptr,
    x_stride,
    M,
    N,
    prologue,
    epilogue,
    LOG: tl.constexpr,
    PROLOGUE: tl.constexpr,
    EPILOGUE: tl.constexpr,
    C: tl.constexpr,
    LANES: tl.constexpr,
    POLLS: tl.constexpr,
):
    """Program i takes split i % splits of row i // splits, held in registers."""
    PRECISE: tl.constexpr = not LOG and y_ptr.dtype.element_ty == tl.float32
    splits = tl.cdiv(N, C)
    row = (tl.program_id(0) // splits).to(tl.int64) + tl.arange(0, 1)  # [1]
    own = tl.program_id(0) % splits
    rows, lanes = row[:, None], tl.arange(0, C)[None, :]
    words_ptr += (tl.program_id(0) // splits).to(tl.int64) * splits
    missing, split = splits, own
    while missing > 0:  # once, unless others are late: then their splits too, and its own again
        cols = split * C + lanes
        x = load_scores(x_ptr, x_stride, prologue, PROLOGUE, rows, cols, M, N)
        m, l = state_of(x, PRECISE)
        publish(words_ptr, split, pack(m, l))
        if split == own:
            words, missing = collect(words_ptr, splits, LANES, POLLS)
            if missing == 0:  # in here, so that no tile has to live through the loop
                m, l = precise_join(words, splits) if PRECISE else join(words, splits)
                store_result(y_ptr, x, m, l, epilogue, EPILOGUE, LOG, rows, cols, M, N)
                if own == 0:
                    store_lse(lse_ptr, m, l, row, M)
        split = tl.where(split + 1 < splits, split + 1, 0)


@triton.jit(do_not_specialize=["M"])
def softmax_forward_looped_kernel(
    x_ptr,
    y_ptr,
    lse_ptr,
    x_stride,
    M,
    N,
    prologue,
    epilogue,
    LOG: tl.constexpr,
    PROLOGUE: tl.constexpr,
    EPILOGUE: tl.constexpr,
    C: tl.constexpr,
):
    """Program i takes row i, in tiles [1, C]."""
    row = tl.program_id(0).to(tl.int64) + tl.arange(0, 1)  # [1]
    rows, lanes = row[:, None], tl.arange(0, C)[None, :]
    tiles = tl.cdiv(N, C)
    m, l = online_softmax_start(1)
    l_low = l
    for i in range(0, tiles):
        x = load_scores(x_ptr, x_stride, prologue, PROLOGUE, rows, i * C + lanes, M, N).to(tl.float32)
        if not LOG and y_ptr.dtype.element_ty == tl.float32:
            m, l, l_low = precise_update(m, l, l_low, x)
        else:
            m, l, _, _ = online_softmax_update(m, l, x, LOG2E, True)
    l += l_low
    for i in range(0, tiles):
        cols = (tiles - 1 - i) * C + lanes
        x = load_scores(x_ptr, x_stride, prologue, PROLOGUE, rows, cols, M, N)
        store_result(y_ptr, x, m, l, epilogue, EPILOGUE, LOG, rows, cols, M, N)
    store_lse(lse_ptr, m, l, row, M)


# --- backward ------------------------------------------------------------------------------------


@triton.jit
def gradient_term(y, dy, LOG: tl.constexpr):
    """The terms [R, C] whose sum the gradient of a row needs."""
    y, dy = y.to(tl.float32), dy.to(tl.float32)
    if LOG:
        return dy
    else:
        return y * dy


@triton.jit
def gradient(y, dy, total, LOG: tl.constexpr):
    """dx [R, C] from the sum of the terms [R, 1]."""
    y, dy = opaque(y).to(tl.float32), opaque(dy).to(tl.float32)
    if LOG:
        return dy - tl.exp(y) * total
    else:
        return y * (dy - total)


@triton.jit
def load_result(
    dy_ptr,
    y_ptr,
    x_ptr,
    lse_ptr,
    dy_stride,
    y_stride,
    x_stride,
    prologue,
    epilogue,
    epilogue_gradients,
    LOG: tl.constexpr,
    PROLOGUE: tl.constexpr,
    EPILOGUE: tl.constexpr,
    rows,
    cols,
    M,
    N,
):
    """y [R, C] before its hook, and its gradient dy: as in memory or, with hooks, computed again from x
    in float32; 0 outside.

    EPILOGUE is the backward of that hook.
    """
    mask = (rows < M) & (cols < N)
    dy = load_own(dy_ptr, rows * dy_stride + cols, mask)
    if x_ptr is None:
        return load_own(y_ptr, rows * y_stride + cols, mask), dy
    else:
        lse = tl.load(lse_ptr + rows, mask=rows < M, other=0.0)
        x = load_scores(x_ptr, x_stride, prologue, PROLOGUE, rows, cols, M, N)
        y = x.to(tl.float32) - lse
        y = tl.where(mask, y if LOG else tl.exp(y), 0.0)
        dy = dy.to(tl.float32)
        dy = apply_hook_backward(EPILOGUE, epilogue, epilogue_gradients, dy, y, rows, cols, M, N)
        return y, tl.where(mask, dy, 0.0)


@triton.jit
def store_gradient(
    dx_ptr,
    y,
    dy,
    total,
    x_ptr,
    x_stride,
    prologue,
    prologue_gradients,
    LOG: tl.constexpr,
    PROLOGUE: tl.constexpr,
    rows,
    cols,
    M,
    N,
):
    """dx [R, C] from y, dy and the sum of the terms [R, 1].  PROLOGUE is the backward of that hook."""
    mask = (rows < M) & (cols < N)
    dx = gradient(y, dy, total, LOG)
    if PROLOGUE is not None:
        x = load(x_ptr, rows * x_stride + cols, mask)
        dx = apply_hook_backward(PROLOGUE, prologue, prologue_gradients, dx, x, rows, cols, M, N)
    store(dx_ptr, rows * N + cols, dx, mask)


@triton.jit(do_not_specialize=["M"])
def softmax_backward_kernel(
    dy_ptr, y_ptr, x_ptr, lse_ptr, dx_ptr, dy_stride, y_stride, x_stride, M, N,
    prologue, prologue_gradients, epilogue, epilogue_gradients,
    LOG: tl.constexpr, PROLOGUE: tl.constexpr, PROLOGUE_BACKWARD: tl.constexpr,
    EPILOGUE_BACKWARD: tl.constexpr, R: tl.constexpr, C: tl.constexpr,
):  # fmt: skip
    """Program i takes rows i * R to i * R + R - 1, held whole in registers."""
    rows = (tl.program_id(0).to(tl.int64) * R + tl.arange(0, R))[:, None]  # [R, 1]
    cols = tl.arange(0, C)[None, :]  # [1, C]
    y, dy = load_result(
        dy_ptr,
        y_ptr,
        x_ptr,
        lse_ptr,
        dy_stride,
        y_stride,
        x_stride,
        prologue,
        epilogue,
        epilogue_gradients,
        LOG,
        PROLOGUE,
        EPILOGUE_BACKWARD,
        rows,
        cols,
        M,
        N,
    )
    total = tl.sum(gradient_term(y, dy, LOG), 1)[:, None]  # [R, 1]
    store_gradient(
        dx_ptr,
        y,
        dy,
        total,
        x_ptr,
        x_stride,
        prologue,
        prologue_gradients,
        LOG,
        PROLOGUE_BACKWARD,
        rows,
        cols,
        M,
        N,
    )


@triton.jit(do_not_specialize=["M"])
def softmax_backward_split_kernel(
    dy_ptr, y_ptr, x_ptr, lse_ptr, dx_ptr, words_ptr, used_ptr, dy_stride, y_stride, x_stride, M, N,
    prologue, prologue_gradients, epilogue, epilogue_gradients,
    LOG: tl.constexpr, PROLOGUE: tl.constexpr, PROLOGUE_BACKWARD: tl.constexpr,
    EPILOGUE_BACKWARD: tl.constexpr, C: tl.constexpr, LANES: tl.constexpr, POLLS: tl.constexpr,
):  # fmt: skip
    """Program i takes split i % splits of row i // splits, held in registers."""
    splits = tl.cdiv(N, C)
    rows = (tl.program_id(0) // splits).to(tl.int64) + tl.arange(0, 1)[:, None]  # [1, 1]
    own = tl.program_id(0) % splits
    lanes = tl.arange(0, C)[None, :]  # [1, C]
    words_ptr += (tl.program_id(0) // splits).to(tl.int64) * splits
    if used_ptr is not None:
        clear(used_ptr + (tl.program_id(0) // splits).to(tl.int64) * splits, own)
    there = tl.full([1], 1.0, tl.float32)
    missing, split = splits, own
    while missing > 0:  # as in the forward kernel
        cols = split * C + lanes
        y, dy = load_result(
            dy_ptr,
            y_ptr,
            x_ptr,
            lse_ptr,
            dy_stride,
            y_stride,
            x_stride,
            prologue,
            epilogue,
            epilogue_gradients,
            LOG,
            PROLOGUE,
            EPILOGUE_BACKWARD,
            rows,
            cols,
            M,
            N,
        )
        publish(words_ptr, split, pack(there, tl.sum(gradient_term(y, dy, LOG), 1)))
        if split == own:
            words, missing = collect(words_ptr, splits, LANES, POLLS)
            if missing == 0:
                _, totals = unpack(words)
                total = tl.sum(tl.where(tl.arange(0, LANES) < splits, totals, 0.0), 0)
                store_gradient(
                    dx_ptr,
                    y,
                    dy,
                    total,
                    x_ptr,
                    x_stride,
                    prologue,
                    prologue_gradients,
                    LOG,
                    PROLOGUE_BACKWARD,
                    rows,
                    cols,
                    M,
                    N,
                )
        split = tl.where(split + 1 < splits, split + 1, 0)


@triton.jit(do_not_specialize=["M"])
def softmax_backward_looped_kernel(
    dy_ptr,
    y_ptr,
    x_ptr,
    lse_ptr,
    dx_ptr,
    dy_stride,
    y_stride,
    x_stride,
    M,
    N,
    prologue,
    prologue_gradients,
    epilogue,
    epilogue_gradients,
    LOG: tl.constexpr,
    PROLOGUE: tl.constexpr,
    PROLOGUE_BACKWARD: tl.constexpr,
    EPILOGUE_BACKWARD: tl.constexpr,
    C: tl.constexpr,
):
    """Program i takes row i, in tiles [1, C]."""
    rows = tl.program_id(0).to(tl.int64) + tl.arange(0, 1)[:, None]  # [1, 1]
    lanes = tl.arange(0, C)[None, :]  # [1, C]
    tiles = tl.cdiv(N, C)
    sums = tl.zeros([1, C], tl.float32)
    for i in range(0, tiles):
        y, dy = load_result(
            dy_ptr,
            y_ptr,
            x_ptr,
            lse_ptr,
            dy_stride,
            y_stride,
            x_stride,
            prologue,
            epilogue,
            (),
            LOG,
            PROLOGUE,
            EPILOGUE_BACKWARD,
            rows,
            i * C + lanes,
            M,
            N,
        )
        sums += gradient_term(y, dy, LOG)
    total = tl.sum(sums, 1)[:, None]  # [1, 1]
    for i in range(0, tiles):
        cols = (tiles - 1 - i) * C + lanes
        y, dy = load_result(
            dy_ptr,
            y_ptr,
            x_ptr,
            lse_ptr,
            dy_stride,
            y_stride,
            x_stride,
            prologue,
            epilogue,
            epilogue_gradients,
            LOG,
            PROLOGUE,
            EPILOGUE_BACKWARD,
            rows,
            cols,
            M,
            N,
        )
        store_gradient(
            dx_ptr,
            y,
            dy,
            total,
            x_ptr,
            x_stride,
            prologue,
            prologue_gradients,
            LOG,
            PROLOGUE_BACKWARD,
            rows,
            cols,
            M,
            N,
        )
