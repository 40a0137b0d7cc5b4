"""A cache of keys and values: where its keys lie, its 8 bits, and how new tokens are put there.

Legend: cache of k [pages, page size, Hkv, D] and of v [.., DV], any strides; page_table [rows, pages of
each], or None where a sequence's keys lie in one page, a row.  Key number j of a sequence is in slot j,
or with ROLLS in slot j % capacity.  lengths, starts, cache_index [B], cu_seqlens [B + 1] int32.
SCALES, of a cache of 8 bits: 1, a scale [Hkv] for each head; 2, one for each token and head, which lie
as the cache does.
"""

import triton
import triton.language as tl

from .interpreter import INTERPRETED, rounded
from .norm_quantize import scale_of
from .schedule import clamp

# --- places --------------------------------------------------------------------------------------


@triton.jit
def place_of(
    j, inside, pages_ptr, capacity, PAGE_SIZE: tl.constexpr, ROLLS: tl.constexpr, WIDE: tl.constexpr
):
    """(page, slot in it) of keys j; without pages the page is 0 and counts for nothing."""
    if ROLLS:
        j = j % capacity
    page = 0
    if PAGE_SIZE:
        page = tl.load(pages_ptr + j // PAGE_SIZE, inside, 0).to(tl.int64)
        j = j % PAGE_SIZE
    if WIDE:
        j = j.to(tl.int64)
    return page, j


@triton.jit
def offsets_of(page, slot, stride_page, stride_token, PAGE_SIZE: tl.constexpr):
    if PAGE_SIZE:
        return page * stride_page + slot * stride_token
    else:
        return slot * stride_token


@triton.jit
def row_of(b, page_table_ptr, cache_index_ptr, table_stride, PAGE_SIZE: tl.constexpr):
    """(row of a cache without pages, pointer to the pages of one with them) of sequence b."""
    row = b
    if cache_index_ptr is not None:
        row = tl.load(cache_index_ptr + b)
    row = row.to(tl.int64)
    if PAGE_SIZE:
        return row * 0, page_table_ptr + row * table_stride
    else:
        return row, 0


@triton.jit
def turned(
    x_ptr, offsets, stride_d, mask, position, cos_ptr, sin_ptr, cos_stride, sin_stride, length,
    D: tl.constexpr, BLOCK_D: tl.constexpr, HALF: tl.constexpr, INTERLEAVED: tl.constexpr,
):  # fmt: skip
    """Rows at offsets [R, 1] as float32 [R, BLOCK_D], turned by the angles of their positions [R]:
    each dimension with its partner, see rope.py.  A position that the tables do not have gives NaN."""
    d = tl.arange(0, BLOCK_D)[None, :]
    mask = mask & (d < D)
    x = tl.load(x_ptr + offsets + d * stride_d, mask, 0.0).to(tl.float32)
    if cos_ptr is None:
        return x
    else:
        if INTERLEAVED:
            partner, angle, second = d ^ 1, d // 2, d % 2 == 1
        else:
            second = d >= HALF
            partner = tl.where(second, d - HALF, d + HALF)
            angle = tl.where(second, d - HALF, d)
        turns = d < 2 * HALF
        other = tl.load(x_ptr + offsets + partner * stride_d, mask & turns, 0.0).to(tl.float32)
        row = position[:, None].to(tl.int64)
        exists = (row >= 0) & (row < length)
        cos = tl.load(cos_ptr + row * cos_stride + angle, exists & turns, 0.0).to(tl.float32)
        sin = tl.load(sin_ptr + row * sin_stride + angle, exists & turns, 0.0).to(tl.float32)
        cos = tl.where(exists, cos, float("nan"))
        y = x * cos + tl.where(second, other, -other) * sin
        return tl.where(turns, y, x)


# --- 8 bits ----------------------------------------------------------------------------------------
#
# float16 has all values of float8_e4m3fn, and an instruction that makes two of them; for bfloat16 it
# takes many.  So keys and values of 8 bits are multiplied as float16, and what meets them is brought
# into its range by powers of two: rows of q, and probabilities, of which small ones then stay exact.

ONE = tl.constexpr(32768.0)  # what a probability of 1 is


@triton.jit
def as_float16(x):
    """A bfloat16 tile [R, C] as float16, and what its rows have to be multiplied by [R]: so that the
    largest of each is between 2^14 and 2^15, and what is 2^-32 of that is exact still."""
    x = x.to(tl.float32)
    exponent = tl.maximum(tl.max(tl.abs(x), 1).to(tl.int32, bitcast=True) >> 23, 15)
    power = ((exponent - 14) << 23).to(tl.float32, bitcast=True)
    inverse = ((268 - exponent) << 23).to(tl.float32, bitcast=True)
    return rounded(x * inverse[:, None], tl.float16), power


@triton.jit
def float16_of_pairs(x):
    """The first and the second of each two float8_e4m3fn, read as an int16."""
    if INTERPRETED:
        first = (x & 0xFF).to(tl.uint8).to(tl.float8e4nv, bitcast=True)
        second = ((x >> 8) & 0xFF).to(tl.uint8).to(tl.float8e4nv, bitcast=True)
        return first.to(tl.float16), second.to(tl.float16)
    else:
        return tl.inline_asm_elementwise(
            """{
            .reg .b32 sorted;
            .reg .b16 first, second;
            prmt.b32 sorted, $2, 0, 0x3120;
            mov.b32 {first, second}, sorted;
            cvt.rn.f16x2.e4m3x2 $0, first;
            cvt.rn.f16x2.e4m3x2 $1, second;
            }""",
            "=r,=r,r",
            [x],
            dtype=(tl.float16, tl.float16),
            is_pure=True,
            pack=2,
        )


# --- appending -----------------------------------------------------------------------------------


@triton.jit
def write_tokens(
    x, cache_ptr, offsets, stride_d, scale_ptr, scale_offsets, mask,
    D: tl.constexpr, BLOCK_D: tl.constexpr, SCALES: tl.constexpr,
):  # fmt: skip
    """x [R, BLOCK_D] float32 to rows of the cache, in 8 bits as SCALES says."""
    d = tl.arange(0, BLOCK_D)[None, :]
    if SCALES == 1:
        x = x / tl.load(scale_ptr + scale_offsets, mask, 1.0)[:, None]
    if SCALES == 2:
        scale = scale_of(tl.max(tl.where(d < D, tl.abs(x), 0.0), 1), 448.0)
        tl.store(scale_ptr + scale_offsets, scale, mask)
        x = tl.div_rn(x, scale[:, None] + tl.zeros(x.shape, tl.float32))
    if SCALES:
        x = tl.where(x == x, clamp(x, -448.0, 448.0), x)
    x = rounded(x, cache_ptr.dtype.element_ty)
    tl.store(cache_ptr + offsets[:, None] + d * stride_d, x, mask[:, None] & (d < D))


@triton.jit(do_not_specialize=["B", "tokens", "capacity", "position", "length"])
def append_kernel(
    k_ptr, v_ptr, k_cache_ptr, v_cache_ptr, k_scale_ptr, v_scale_ptr,
    lengths_ptr, page_table_ptr, cache_index_ptr, starts_ptr, cu_seqlens_ptr, cos_ptr, sin_ptr,
    stride_kb, stride_kh, stride_ks, stride_kd, stride_vb, stride_vh, stride_vs, stride_vd,
    stride_cp, stride_ct, stride_ch, stride_cd, stride_wp, stride_wt, stride_wh, stride_wd,
    stride_kp, stride_kt, stride_kk, stride_vp, stride_vt, stride_vk,  # of scales
    table_stride, cos_stride, sin_stride, B, tokens, Hkv, capacity, position, length,
    D: tl.constexpr, DV: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_DV: tl.constexpr,
    BLOCK_H: tl.constexpr, BLOCK_B: tl.constexpr, HALF: tl.constexpr, INTERLEAVED: tl.constexpr,
    PAGE_SIZE: tl.constexpr, ROLLS: tl.constexpr, SCALES: tl.constexpr,
):  # fmt: skip
    """Program: BLOCK_H heads of one new token of k [B, Hkv, tokens, D] and v; or of [1, Hkv, tokens,
    D], sequences side by side.  position: of a sequence's first key."""
    blocks = tl.cdiv(Hkv, BLOCK_H)
    h = tl.program_id(0) % blocks * BLOCK_H + tl.arange(0, BLOCK_H)
    token = tl.program_id(0) // blocks
    if cu_seqlens_ptr is None:
        b = token // tokens
        t = token % tokens
        entry, at = b.to(tl.int64), t
        heads = Hkv
    else:
        every = tl.arange(0, BLOCK_B)
        stop = tl.load(cu_seqlens_ptr + every + 1, every < B, tokens + 1)
        b = tl.sum((stop <= token).to(tl.int32), 0)
        heads = tl.where(b < B, Hkv, 0)
        b = tl.minimum(b, B - 1)
        entry, at = tl.zeros([], tl.int64), token
        t = token - tl.load(cu_seqlens_ptr + b)
    j = tl.load(lengths_ptr + b) + t
    if not ROLLS:
        heads = tl.where(j < capacity, heads, 0)
    start = 0
    if starts_ptr is not None:
        start = tl.load(starts_ptr + b)
    row, pages_ptr = row_of(b, page_table_ptr, cache_index_ptr, table_stride, PAGE_SIZE)
    page, slot = place_of(j, heads > 0, pages_ptr, capacity, PAGE_SIZE, ROLLS, True)
    page += row
    mask = h < heads
    h = h.to(tl.int64)
    scale_at = h
    where = tl.zeros([BLOCK_H], tl.int64) + at
    if SCALES == 2:
        scale_at = page * stride_kp + slot * stride_kt + h * stride_kk
    at_position = tl.zeros([BLOCK_H], tl.int32) + (position + j - start)
    k_rows = (entry * stride_kb + h * stride_kh + where * stride_ks)[:, None]
    v_rows = (entry * stride_vb + h * stride_vh + where * stride_vs)[:, None]
    k = turned(
        k_ptr, k_rows, stride_kd, mask[:, None], at_position, cos_ptr, sin_ptr, cos_stride, sin_stride,
        length, D, BLOCK_D, HALF, INTERLEAVED,
    )  # fmt: skip
    k = rounded(k, k_ptr.dtype.element_ty).to(tl.float32)
    write_tokens(
        k, k_cache_ptr, page * stride_cp + slot * stride_ct + h * stride_ch, stride_cd,
        k_scale_ptr, scale_at, mask, D, BLOCK_D, SCALES,
    )  # fmt: skip
    if SCALES == 2:
        scale_at = page * stride_vp + slot * stride_vt + h * stride_vk
    v = turned(
        v_ptr, v_rows, stride_vd, mask[:, None], where, None, None, 0, 0, 0, DV, BLOCK_DV, 0, False,
    )  # fmt: skip
    write_tokens(
        v, v_cache_ptr, page * stride_wp + slot * stride_wt + h * stride_wh, stride_wd,
        v_scale_ptr, scale_at, mask, DV, BLOCK_DV, SCALES,
    )  # fmt: skip
