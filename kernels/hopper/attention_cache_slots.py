"""What the Hopper forward does with a cache: the tiles of its sequences' queries, whose keys the device
counts.

Legend: that of ../kv_cache.py and ../attention_decode.py.  A slot is a tile of BLOCK_M queries of a
sequence, or of none; its record is what `sequence_at` of attention_forward_work.py reads.
"""

import triton
import triton.language as tl

from ..attention_decode import queries_and_keys
from ..interpreter import rounded
from ..kv_cache import turned
from ..schedule import RECORD, key_ranges, sequences_of


@triton.jit
def cache_slots(
    slots, lengths_ptr, cu_seqlens_ptr, starts_ptr, B, Sq, new, room, offset, given,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, KIND: tl.constexpr, ROLLS: tl.constexpr,
):  # fmt: skip
    """Of slots [N]: (tiles, b, i0, token, queries, keys, low).  tiles: how many key tiles it visits, at
    least 1; 0 of a slot without queries.  low: the first key that counts."""
    if cu_seqlens_ptr is None:
        each = tl.cdiv(Sq, BLOCK_M)
        b, tile = slots // each, slots % each
    else:
        b, tile = sequences_of(slots, cu_seqlens_ptr, B, BLOCK_M)
    token, queries, keys = queries_and_keys(b, lengths_ptr, cu_seqlens_ptr, B, Sq, 0, new)
    if not ROLLS:
        keys = tl.minimum(keys, room)
    diagonal = offset + keys - queries
    i0 = tile * BLOCK_M
    low = b * 0
    if starts_ptr is not None:
        low = tl.maximum(tl.load(starts_ptr + b, b < B, 0), 0)
    begin, _, _, end = key_ranges(i0, keys, diagonal, given, BLOCK_M, BLOCK_N, KIND)
    tiles = tl.maximum(end - tl.maximum(begin, low // BLOCK_N), 1)
    return tl.where(i0 < queries, tiles, 0), b, i0, token, queries, keys, low


@triton.jit(do_not_specialize=["B", "Sq", "new", "room", "offset", "n_slots"])
def cache_slots_kernel(
    ordered_ptr, lengths_ptr, cu_seqlens_ptr, cache_index_ptr, starts_ptr,
    B, Sq, new, room, offset, n_slots, given,
    BLOCK: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, KIND: tl.constexpr,
    ROLLS: tl.constexpr,
):  # fmt: skip
    """Program: the record of one slot, at its place among all, those that visit more key tiles first.
    It counts the tiles of all slots itself, BLOCK at a time.

    ordered [1 + slots, RECORD]; its first word: how many slots have queries.
    """
    index = tl.program_id(0)
    tiles, b, i0, token, queries, keys, low = cache_slots(
        index, lengths_ptr, cu_seqlens_ptr, starts_ptr, B, Sq, new, room, offset, given,
        BLOCK_M, BLOCK_N, KIND, ROLLS,
    )  # fmt: skip
    rank, count = 0, 0
    for at in range(0, n_slots, BLOCK):
        other = at + tl.arange(0, BLOCK)
        theirs, _b, _i0, _token, _queries, _keys, _low = cache_slots(
            other, lengths_ptr, cu_seqlens_ptr, starts_ptr, B, Sq, new, room, offset, given,
            BLOCK_M, BLOCK_N, KIND, ROLLS,
        )  # fmt: skip
        theirs = tl.where(other < n_slots, theirs, -1)
        earlier = (theirs > tiles) | ((theirs == tiles) & (other < index))
        rank += tl.sum(earlier.to(tl.int32), 0)
        count += tl.sum((theirs > 0).to(tl.int32), 0)
    row = b
    if cache_index_ptr is not None:
        row = tl.load(cache_index_ptr + b, b < B, 0)
    to = ordered_ptr + (1 + rank) * RECORD
    tl.store(to, tiles)
    tl.store(to + 1, i0)
    tl.store(to + 2, token)
    tl.store(to + 3, queries)
    tl.store(to + 4, tl.where(b < B, row, 0))
    tl.store(to + 5, keys)
    if cu_seqlens_ptr is None:
        tl.store(to + 6, b)
    else:
        tl.store(to + 6, 0)
    tl.store(to + 7, low)
    tl.store(ordered_ptr, count, index == 0)


@triton.jit(do_not_specialize=["B", "Sq", "new", "position", "length"])
def turn_queries_kernel(
    q_ptr, out_ptr, lengths_ptr, starts_ptr, cu_seqlens_ptr, cos_ptr, sin_ptr,
    stride_qb, stride_qh, stride_qs, stride_qd, stride_ob, stride_oh, stride_os, cos_stride, sin_stride,
    B, Hq, Sq, new, position, length,
    D: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_H: tl.constexpr, BLOCK_B: tl.constexpr,
    HALF: tl.constexpr, INTERLEAVED: tl.constexpr,
):  # fmt: skip
    """Program: BLOCK_H heads of one query, turned by the angles of its position."""
    blocks = tl.cdiv(Hq, BLOCK_H)
    h = tl.program_id(0) % blocks * BLOCK_H + tl.arange(0, BLOCK_H)
    at = tl.program_id(0) // blocks
    if cu_seqlens_ptr is None:
        b, at = at // Sq, at % Sq
        entry = b.to(tl.int64)
    else:
        every = tl.arange(0, BLOCK_B)
        stop = tl.load(cu_seqlens_ptr + every + 1, every < B, Sq + 1)
        b = tl.sum((stop <= at).to(tl.int32), 0)
        entry = tl.zeros([], tl.int64)
    token, queries, keys = queries_and_keys(b, lengths_ptr, cu_seqlens_ptr, B, Sq, 0, new)
    start = 0
    if starts_ptr is not None:
        start = tl.load(starts_ptr + b, b < B, 0)
    mask = h < Hq
    h = h.to(tl.int64)
    i = at if cu_seqlens_ptr is None else at - token
    positions = tl.zeros([BLOCK_H], tl.int32) + (position + i + keys - queries - start)
    rows = entry * stride_qb + h * stride_qh + at.to(tl.int64) * stride_qs
    x = turned(
        q_ptr, rows[:, None], stride_qd, mask[:, None], positions, cos_ptr, sin_ptr, cos_stride,
        sin_stride, length, D, BLOCK_D, HALF, INTERLEAVED,
    )  # fmt: skip
    d = tl.arange(0, BLOCK_D)[None, :]
    to = entry * stride_ob + h * stride_oh + at.to(tl.int64) * stride_os
    x = rounded(x, out_ptr.dtype.element_ty)
    tl.store(out_ptr + to[:, None] + d, x, mask[:, None] & (d < D))
