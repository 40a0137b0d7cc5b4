"""Merges the states of attention to parts of the keys, each (out, lse), into that of all keys.

All rows have as many parts.  (Those of attention_decode.py begin and end wherever a program does, and
its own merge finds them.)
"""

import triton
import triton.language as tl

from .interpreter import rounded
from .online_softmax import (
    LOG2E,
    online_softmax_finish,
    online_softmax_merge,
    online_softmax_start,
    online_softmax_update,
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
