"""Merges the states of attention to parts of the keys, each (out, lse), into that of all keys.

All rows have as many parts: those of the Hopper forward in one tensor, those of merge_attention each in
memory of its own, with gradients.  (Those of attention_decode.py begin and end wherever a program does,
and its own merge finds them.)  A part in which a row sees no key has lse -inf there, and counts for
nothing, whatever its out holds.
"""

from typing import Any, NamedTuple

import triton
import triton.language as tl

from .interpreter import rounded
from .online_softmax import (
    LOG2E,
    exponentials,
    online_softmax_finish,
    online_softmax_merge,
    online_softmax_start,
    online_softmax_update,
    shift_of,
)


@triton.jit(do_not_specialize=["H", "Sq", "parts"])
def attention_merge_kernel(
    outs_ptr,  # [B, parts, H, Sq, D] float32
    lses_ptr,  # [B, parts, H, Sq]
    out_ptr,  # [B, H, Sq, D]
    lse_ptr,  # [B, H, Sq]
    sinks_ptr,  # [H] or None: one more score of each row, without a value
    stride_ob, stride_oh, stride_os,
    H, Sq, parts,
    D: tl.constexpr, BLOCK_D: tl.constexpr, PARTS: tl.constexpr,
):  # fmt: skip
    """Program: one row, PARTS parts at a time.  The out of a part without keys is not read."""
    row = tl.program_id(0)
    rows = H * Sq
    b = (row // rows).to(tl.int64)
    d = tl.arange(0, BLOCK_D)[None, :]
    m, l = online_softmax_start(1)
    acc = tl.zeros([1, BLOCK_D], tl.float32)
    for first in range(0, parts, PARTS):
        part = first + tl.arange(0, PARTS)
        place = (b * parts + part) * rows + row % rows
        x = tl.load(lses_ptr + place, part < parts, -float("inf"))
        has_keys = (x != -float("inf"))[:, None]
        values = tl.load(outs_ptr + place[:, None] * D + d, has_keys & (d < D), 0.0)  # [PARTS, BLOCK_D]
        m, l, p, alpha = online_softmax_update(m, l, x[None, :], LOG2E, True)
        acc = acc * alpha[:, None] + tl.sum(tl.trans(p) * values, 0)[None, :]
    head = row // Sq % H
    if sinks_ptr is not None:
        sink = tl.load(sinks_ptr + head + tl.zeros([1], tl.int64)).to(tl.float32)
        m, l, w, _ = online_softmax_merge(m, l, sink, 1.0, LOG2E)
        acc *= w[:, None]
    lse, normaliser = online_softmax_finish(m, l, LOG2E)
    place = b * stride_ob + head.to(tl.int64) * stride_oh + (row % Sq).to(tl.int64) * stride_os
    out = rounded(acc * normaliser[:, None], out_ptr.dtype.element_ty)
    tl.store(out_ptr + place + d, out, d < D)
    tl.store(lse_ptr + row + tl.zeros([1], tl.int64), lse)


# --- parts in memory of their own ---------------------------------------------------------------------


class Rows(NamedTuple):
    """A tensor's rows, which are counted in three dimensions: where the first begins, and strides."""

    start: Any
    outer: Any
    middle: Any
    inner: Any


@triton.jit
def rows_of_program(M, middle, inner, ROWS: tl.constexpr):
    """(indices over the three dimensions, which rows exist) of this program's rows [ROWS]."""
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    at = row // inner // middle, row // inner % middle, row % inner
    return at, row < M


@triton.jit
def starts(x, at, ALIGNED: tl.constexpr = False):
    """Pointers to the beginnings of rows [ROWS]; ALIGNED: whether they are multiples of 16 bytes."""
    outer, middle, inner = at
    place = outer.to(tl.int64) * x.outer + middle.to(tl.int64) * x.middle
    place += inner.to(tl.int64) * x.inner
    if ALIGNED:
        return tl.multiple_of(x.start + place, 16)
    else:
        return x.start + place


@triton.jit
def elements(x, at, BLOCK_D: tl.constexpr, ALIGNED: tl.constexpr):
    """Pointers to rows' elements [ROWS, BLOCK_D]."""
    return starts(x, at, ALIGNED)[:, None] + tl.arange(0, BLOCK_D)[None, :]


@triton.jit
def mask_of(rows, D: tl.constexpr, BLOCK_D: tl.constexpr):
    """Which elements of these rows exist [ROWS, BLOCK_D], or [ROWS, 1] where a row has no others."""
    if D == BLOCK_D:
        return rows[:, None]
    else:
        return rows[:, None] & (tl.arange(0, BLOCK_D) < D)[None, :]


@triton.jit
def load_lse(lse, at, inside):
    return tl.load(starts(lse, at), inside, -float("inf")).to(tl.float32)


@triton.jit
def state_of_parts(lses, at, inside):
    """The state (m, l) of all parts [ROWS]."""
    m, l = online_softmax_start(inside.shape[0])
    for i in tl.static_range(len(lses)):
        m, l, _, _ = online_softmax_merge(m, l, load_lse(lses[i], at, inside), 1.0, LOG2E)
    return m, l


@triton.jit(do_not_specialize=["M"])
def merge_parts_kernel(
    outs, lses,  # in: Rows of each part
    out, lse,  # Rows
    M, middle, inner,  # how many rows there are, and how many in the last two of their dimensions
    D: tl.constexpr, BLOCK_D: tl.constexpr, ROWS: tl.constexpr, ALIGNED: tl.constexpr,
):  # fmt: skip
    """Program: ROWS rows.  The out of a part without keys is not read.

    ALIGNED: whether rows of D elements begin at multiples of 16 bytes.
    """
    at, inside = rows_of_program(M, middle, inner, ROWS)
    m, l = state_of_parts(lses, at, inside)
    acc = tl.zeros([ROWS, BLOCK_D], tl.float32)
    for i in tl.static_range(len(outs)):
        x = load_lse(lses[i], at, inside)
        mask = mask_of(x != -float("inf"), D, BLOCK_D)
        values = tl.load(elements(outs[i], at, BLOCK_D, ALIGNED), mask, 0.0).to(tl.float32)
        acc += exponentials(x, shift_of(m), LOG2E, True)[:, None] * values
    merged, normaliser = online_softmax_finish(m, l, LOG2E)
    made = rounded(acc * normaliser[:, None], out.start.dtype.element_ty)
    tl.store(elements(out, at, BLOCK_D, ALIGNED), made, mask_of(inside, D, BLOCK_D))
    tl.store(starts(lse, at), merged, inside)


@triton.jit(do_not_specialize=["M"])
def merge_parts_backward_kernel(
    dout, dlse,  # in: Rows, or None
    outs, lses,  # in: Rows of each part
    douts, dlses,  # Rows of each part, or None for one that nobody asks for
    M, middle, inner,
    D: tl.constexpr, BLOCK_D: tl.constexpr, ROWS: tl.constexpr, ALIGNED: tl.constexpr,
    LSES: tl.constexpr,
):  # fmt: skip
    """Gradients of the parts.  With weights w_i = exp(lse_i - lse) and s_i = dout . out_i,

        dout_i = w_i dout        dlse_i = w_i (s_i - sum_j w_j s_j + dlse)

    and all are 0 of a part without keys.  LSES: whether any dlse_i is asked for, else no out is read.
    """
    at, inside = rows_of_program(M, middle, inner, ROWS)
    m, l = state_of_parts(lses, at, inside)
    _, normaliser = online_softmax_finish(m, l, LOG2E)
    shared = tl.zeros([ROWS], tl.float32)
    if dlse is not None:
        shared -= tl.load(starts(dlse, at), inside, 0.0).to(tl.float32)
    if dout is not None:
        whole = mask_of(inside, D, BLOCK_D)
        gradient = tl.load(elements(dout, at, BLOCK_D, ALIGNED), whole, 0.0).to(tl.float32)
    products = ()
    for i in tl.static_range(len(outs)):
        x = load_lse(lses[i], at, inside)
        has_keys = x != -float("inf")
        w = exponentials(x, shift_of(m), LOG2E, True) * normaliser
        product = tl.zeros([ROWS], tl.float32)
        if dout is not None:
            if LSES:
                mask = mask_of(has_keys, D, BLOCK_D)
                values = tl.load(elements(outs[i], at, BLOCK_D, ALIGNED), mask, 0.0).to(tl.float32)
                product = tl.sum(values * gradient, 1)
            if douts[i] is not None:
                made = tl.where(has_keys[:, None], w[:, None] * gradient, 0.0)
                made = rounded(made, douts[i].start.dtype.element_ty)
                tl.store(elements(douts[i], at, BLOCK_D, ALIGNED), made, whole)
        shared += tl.where(has_keys, w * product, 0.0)
        products += (product,)
    for i in tl.static_range(len(outs)):
        if dlses[i] is not None:
            x = load_lse(lses[i], at, inside)
            w = exponentials(x, shift_of(m), LOG2E, True) * normaliser
            made = tl.where(x != -float("inf"), w * (products[i] - shared), 0.0)
            made = rounded(made, dlses[i].start.dtype.element_ty)
            tl.store(starts(dlses[i], at), made, inside)
