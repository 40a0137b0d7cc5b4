"""Attention backward on Hopper: what runs before and after the main kernel, row by row.

Both are bound by memory.  The preprocess reads 4 D bytes a row of out and dout, the postprocess reads
4 D of sums and writes 2 D of dQ.  Where the first key tile adds its part of dQ too instead of storing
it (FIRST is false), the preprocess also writes 4 D of zeros; else it zeroes only query tiles that no
key tile visits.  Without a mask most of the postprocess runs beside the last round of the main kernel,
see wait_for_items.

lse and delta go to the main kernel as 16 bfloat16 numbers for each query.  The kernel adds them to the
scores and to dP by a product with ones:

    LSE ... LSE + 2         -lse / scale, which makes raw scores the logarithms of P; with a softcap,
                            which lies between the two, -lse in base 2
    DELTA ... DELTA + 2     -delta
    the others              zeros

Each is three numbers: the value rounded, the remainder rounded, and what then remains.  Together they
are as good as float32.  Rows that see no key or do not exist have a finite number for -lse, because the
product multiplies it by zeros for the other term.  Where delta is not finite, P is NaN.
"""

import triton
import triton.language as tl
from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from ..online_softmax import LOG2E
from ..schedule import sequence_of, tokens_of
from ..scores import counts
from .attention_backward_sums import register_offsets
from .attention_backward_work import FIRST_TURN
from .dependent_launches import wait_for_launch_before

COLUMNS = gl.constexpr(16)  # the least that a product takes
LSE = gl.constexpr(0)
DELTA = gl.constexpr(3)
NOTHING = gl.constexpr(-(2.0**126))  # times any scale and LOG2E less than any exponent


@triton.jit
def rows_of_sequence(first, padded, given, BM: tl.constexpr):
    """Of sequences padded to whole tiles, which lie in the slots of sequence_of: the rows `padded`, of
    one slot, from `first` on, as (token of each, whether there is one, whether it lies behind the last
    sequence)."""
    sequences, queries, _ = counts(given)
    s, tile = sequence_of(first // BM, given.cu_seqlens_q, sequences, BM)
    token, length = tokens_of(s, given.cu_seqlens_q, given.seqused_q, sequences, queries, True)
    i = padded - first + (tile * BM + first % BM)
    return token + i, i < length, s == sequences


@triton.jit(
    do_not_specialize=[
        "Sq",
        "Sp",
        "zeroed",
        "H",
        "D_out",
        "so_b",
        "so_h",
        "so_s",
        "sd_b",
        "sd_h",
        "sd_s",
        "scale",
    ]
)
def preprocess_kernel(
    o_ptr, do_ptr, lse_ptr, dlse_ptr, lse_delta_ptr, dq_ptr, turns_ptr,
    Sq, Sp,  # queries, and queries padded to whole tiles
    zeroed,  # of those the first ones, whose sums of dQ start at zero
    H, D_out,
    so_b, so_h, so_s, sd_b, sd_h, sd_s,  # strides of out and dout, in units of 8 elements
    scale,  # of the scores, positive
    HAS_DLSE: tl.constexpr, FIRST: tl.constexpr,
    D: tl.constexpr, R: tl.constexpr, BM: tl.constexpr, PDL: tl.constexpr = False,
    lse2_ptr=None, delta_ptr=None,
    given=(),  # of sequences, see scores.py
    VARLEN: tl.constexpr = False,
    MORE: tl.constexpr = 0,
):  # fmt: skip
    """Write lse and delta of each query, see above, and zeros to the counters and to the sums of dQ of
    the first queries.  R rows a program.  PDL: the next launch is a dependent one.

    lse2, delta [B, H, Sq] float32: lse in base 2 and delta, for the gradients of sinks, or None.
    VARLEN: what is padded to whole tiles is each sequence, see rows_of_sequence.
    MORE: columns that dQ has beside D."""
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
    pid = tl.program_id(0)
    n = Sp // R
    bh = pid // n
    b = (bh // H).to(tl.int64)
    h = (bh % H).to(tl.int64)
    first = (pid % n) * R
    padded = first + tl.arange(0, R)
    d = tl.arange(0, D)
    # strides come in eighths and columns in eights, so that the compiler sees pieces of 16 bytes
    if VARLEN:
        r, there, behind = rows_of_sequence(first, padded, given, BM)
        seeing = there & (not behind)  # out is 0 behind the last sequence, whatever dout is
    else:
        r, there = padded, padded < Sq
        seeing = there
    mask = seeing[:, None] & (d // 8 < D_out // 8)[None, :]
    rows = r.to(tl.int64)[:, None]
    o = tl.load(o_ptr + (b * so_b + h * so_h + rows * so_s) * 8 + d[None, :], mask, 0.0)
    do = tl.load(do_ptr + (b * sd_b + h * sd_h + rows * sd_s) * 8 + d[None, :], mask, 0.0)
    if first < zeroed:
        sums = dq_ptr + pid.to(tl.int64) * (R * (D + MORE))
        tl.store(sums + tl.arange(0, R * D), tl.zeros([R * D], tl.float32))
        if MORE:
            more = sums + R * D + tl.arange(0, R * MORE)
            tl.store(more, tl.zeros([R * MORE], tl.float32))
    tl.store(turns_ptr, 0, pid == 0)
    tile = (bh * Sp + first) // BM
    tl.store(turns_ptr + FIRST_TURN + tile, 0, first % BM == 0)
    tl.store(turns_ptr - 1 - bh, 0, first == 0)
    lse = tl.load(lse_ptr + bh.to(tl.int64) * Sq + r, there, -float("inf"))
    delta = tl.sum(o.to(tl.float32) * do.to(tl.float32), 1)
    if HAS_DLSE:
        delta -= tl.load(dlse_ptr + bh.to(tl.int64) * Sq + r, there, 0.0)
    empty = lse == -float("inf")
    if delta_ptr is not None:
        row = bh.to(tl.int64) * Sq + r
        tl.store(lse2_ptr + row, tl.where(empty, float("inf"), lse * LOG2E), there)
        tl.store(delta_ptr + row, delta, there)
    if VARLEN:
        empty = empty | behind  # they see no key, but a sink gives them an lse
    logarithm = tl.where(empty, NOTHING, -lse / scale)
    column = tl.arange(0, COLUMNS)[None, :]
    term = tl.where(column < DELTA, logarithm[:, None], tl.where(empty, 0.0, -delta)[:, None])
    part = column - tl.where(column < DELTA, LSE, DELTA)
    high = term.to(tl.bfloat16)
    rest = term - high.to(tl.float32)
    middle = rest.to(tl.bfloat16)
    low = (rest - middle.to(tl.float32)).to(tl.bfloat16)
    parts = tl.where(part == 0, high, tl.where(part == 1, middle, tl.where(part == 2, low, 0.0)))
    at = lse_delta_ptr + (bh.to(tl.int64) * Sp + padded)[:, None] * COLUMNS + column
    tl.store(at, parts.to(tl.bfloat16))


# --- what adds lse and delta to a product ----------------------------------------------------------


@gluon.jit
def select_columns(TERM: gl.constexpr, LAYOUT: gl.constexpr):
    """Ones in the three columns of LSE or DELTA, and zeros: bfloat16 [64, COLUMNS]."""
    column = gl.arange(0, COLUMNS, gl.SliceLayout(0, LAYOUT))
    ones = gl.where((column >= TERM) & (column < TERM + 3), 1.0, 0.0).to(gl.bfloat16)
    return gl.zeros([64, COLUMNS], gl.bfloat16, LAYOUT) + ones[None, :]


@gluon.jit
def store_selector(selector):
    """Write the selector of LSE and that of DELTA [2, 64, COLUMNS]; by four warps."""
    L: gl.constexpr = gl.BlockedLayout([1, 8], [16, 2], [4, 1], [1, 0])
    selector.index(0).store(select_columns(LSE, L))
    selector.index(1).store(select_columns(DELTA, L))


# --- after the main kernel ------------------------------------------------------------------------


@gluon.jit
def wait_for_items(turns_ptr, head, items):
    """Wait until so many items of a key head have been counted.  The read acquires, so their adds are
    visible afterwards (count_item)."""
    gl.inline_asm_elementwise(
        """{
        .reg .pred p;
        .reg .u32 x;
        LOOK:
        ld.acquire.gpu.global.u32 x, [$1];
        setp.ge.u32 p, x, $2;
        @p bra END;
        nanosleep.u32 256;
        bra LOOK;
        END:
        mov.u32 $0, 0;
        }""",
        "=r,l,r",
        [(turns_ptr - 1 - head).to(gl.int64), items],
        dtype=gl.int32,
        is_pure=False,
        pack=1,
    )


@gluon.jit(do_not_specialize=["items", "Sq", "tiles", "H", "GROUP", "D_out", "s_b", "s_h", "s_s"])
def postprocess_kernel(
    dq_ptr,
    out_ptr,
    turns_ptr,  # counters, see attention_backward_work.py
    items,  # of a key head, or 0 where they are not counted
    Sq,
    tiles,  # queries, and tiles of 64 of them
    H,
    GROUP,  # query heads, query heads a key head
    D_out,
    s_b,
    s_h,
    s_s,  # strides of out, in units of 8 elements
    scale,
    given,  # of sequences, as the preprocess has them
    D: gl.constexpr,
    N: gl.constexpr,
    BM: gl.constexpr,
    VARLEN: gl.constexpr,
):
    """Write one chunk of dQ's sums (64 x N in register order) to rows of dq, scaled.  It is a dependent
    launch, so it waits for the items that add to the chunk or, where they are not counted, for the
    launch before."""
    LO: gl.constexpr = gl.BlockedLayout([1, 8], [256 // N, N // 8], [4, 1], [1, 0])
    pid = gl.program_id(0)
    parts: gl.constexpr = D // N
    part = pid % parts
    tile = pid // parts
    bh = tile // tiles
    if items > 0:
        wait_for_items(turns_ptr, bh // GROUP, items)
    else:
        wait_for_launch_before()
    x = gl.load(dq_ptr + pid.to(gl.int64) * (64 * N) + register_offsets(N))
    x = gl.permute(gl.reshape(x, [N // 8, 4, 8, 4, 2, 2]), [1, 4, 2, 0, 3, 5])
    x = gl.convert_layout((gl.reshape(x, [64, N]) * scale).to(out_ptr.dtype.element_ty), LO)
    b = (bh // H).to(gl.int64)
    h = (bh % H).to(gl.int64)
    first = (tile % tiles) * 64
    r = first + gl.arange(0, 64, gl.SliceLayout(1, LO))
    if VARLEN:
        r, there, _ = rows_of_sequence(first, r, given, BM)
    else:
        there = r < Sq
    d = part * N + gl.arange(0, N, gl.SliceLayout(0, LO))
    at = out_ptr + (b * s_b + h * s_h + r.to(gl.int64)[:, None] * s_s) * 8 + d[None, :]
    gl.store(at, x, mask=there[:, None] & (d // 8 < D_out // 8)[None, :])
    if pid == gl.num_programs(0) - 1:
        wait_for_launch_before()
