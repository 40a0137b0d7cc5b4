"""Any mask as bits and a table of tiles, from a boolean tensor that is read once.

Legend: seen [batch, heads, Sq, Sk] of any strides, bytes of 0 and 1, or WORDS of four such bytes.
bits int32 [batch, heads, TILE Tq, 4 Tk], table int8 [batch, heads, Tq, Tk]: what `visible` and the
walks of schedule.py read.
"""

import triton
import triton.language as tl

from .scores import TILE


@triton.jit(do_not_specialize=["heads", "Sq"])
def mask_table_kernel(
    seen_ptr, bits_ptr, table_ptr,
    stride_sb, stride_sh, stride_sq, stride_sk,
    stride_bb, stride_bh, stride_bq,
    stride_tb, stride_th, stride_tq,
    heads, Sq, Sk,
    WORDS: tl.constexpr,
):  # fmt: skip
    """Program: one tile of TILE queries and TILE keys of one row.

    Of WORDS the strides count words; four bytes become four bits by one product, whose other terms do
    not meet in the upper bits.
    """
    query_tiles, key_tiles = tl.cdiv(Sq, TILE), tl.cdiv(Sk, TILE)
    row = tl.program_id(0) // (query_tiles * key_tiles)
    tile = tl.program_id(0) % (query_tiles * key_tiles)
    b, h = (row // heads).to(tl.int64), (row % heads).to(tl.int64)
    i0, j0 = tile // key_tiles * TILE, tile % key_tiles * TILE
    i = i0 + tl.arange(0, TILE)
    PER: tl.constexpr = 4 if WORDS else 1
    j = j0 // PER + tl.arange(0, TILE // PER)
    at = seen_ptr + b * stride_sb + h * stride_sh
    at += i.to(tl.int64)[:, None] * stride_sq + j.to(tl.int64)[None, :] * stride_sk
    seen = tl.load(at, (i < Sq)[:, None] & (j < Sk // PER)[None, :], 0)  # [TILE, TILE / PER]
    if WORDS:
        seen = (seen * 0x10204080).to(tl.uint32, bitcast=True) >> 28
    else:
        seen = (seen != 0).to(tl.uint32)
    of_word = tl.reshape(seen, [TILE, 4, 32 // PER]) << (tl.arange(0, 32 // PER) * PER)[None, None, :]
    bits = tl.sum(of_word, 2).to(tl.int32, bitcast=True)  # [TILE, 4]
    word = tl.arange(0, 4)
    to = bits_ptr + b * stride_bb + h * stride_bh + j0 // 32
    tl.store(to + i.to(tl.int64)[:, None] * stride_bq + word[None, :], bits)
    last = tl.minimum(tl.maximum(Sk - j0 - word * 32, 0), 32)  # keys of each word
    every = tl.where(last < 32, (1 << (last & 31)) - 1, -1)
    whole = (bits == every[None, :]) | (i >= Sq)[:, None]
    some = tl.max((bits != 0).to(tl.int32))
    clear = tl.min(whole.to(tl.int32))
    to = table_ptr + b * stride_tb + h * stride_th + tile // key_tiles * stride_tq + tile % key_tiles
    tl.store(to, (some + some * clear).to(tl.int8))
