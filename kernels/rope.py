"""Rotary position embedding of q and k in one launch, forward and backward; v may come along, copied.

Dimensions are taken in pairs, each turned by the angle that the tables hold for its token:

    y1 = x1 cos - x2 sin        y2 = x2 cos + x1 sin

A rotation's transpose turns back, so the backward pass is the same kernel with -sin (INVERSE).
Pair i is dimensions (i, i + HALF), as in GPT-NeoX and Llama, or with INTERLEAVED (2i, 2i + 1), as in
RoFormer and GPT-J; dimensions from 2 HALF on are left as they are.

The row of the tables for token s of sequence b is offset + s, or offset + positions[b, s], or with
COUNT offset + positions[b] + s; a row that the tables do not have gives NaN.

Legend: B batch, S tokens, D head_dim; q [B, Hq, S, D], k, v [B, Hkv, S, D] and their results have
unit stride over D and any other strides; cos, sin [length, HALF] with unit column stride; positions
integers.  A tile is T tokens by H heads of one sequence, seen as R = T H rows of C >= HALF pairs.
A program takes a group of STEPS tiles: other heads of the same tokens.  It loads their angles once,
since those of a tile in float32 are as many bytes as a tile of 16 bits.  Any float dtype in memory,
float32 in registers.  A pointer that is None leaves out its part.
"""

import triton
import triton.language as tl

from .rounding import load, store


@triton.jit
def token_and_head(group, groups, S, T: tl.constexpr, H: tl.constexpr):
    """(batch, tokens [T H], heads [T H] of the first tile, which group of heads) of group number
    `group` of tiles, where every T tokens have so many groups; int64 but for the last."""
    head_group = group % groups
    token_tiles = tl.cdiv(S, T)
    token_tile = (group // groups) % token_tiles
    b = (group // groups // token_tiles).to(tl.int64)
    row = tl.arange(0, T * H)
    return b, token_tile.to(tl.int64) * T + row // H, (row % H).to(tl.int64), head_group


@triton.jit
def group_of_program(
    q_heads, k_heads, S, WITH_V: tl.constexpr, T: tl.constexpr, H: tl.constexpr, STEPS: tl.constexpr
):
    """(groups of q's heads, of k's, and token_and_head of this program), where every T tokens have the
    groups of q, then those of k, then those of v: neighbours find their angles in cache."""
    q_groups = tl.cdiv(q_heads, H * STEPS)
    k_groups = tl.cdiv(k_heads, H * STEPS)
    groups = q_groups + k_groups
    if WITH_V:
        groups += k_groups
    b, s, h, group = token_and_head(tl.program_id(0), groups, S, T, H)
    return q_groups, k_groups, b, s, h, group


@triton.jit
def angles(
    cos_ptr,
    sin_ptr,
    positions_ptr,
    cos_stride,
    sin_stride,
    positions_stride_b,
    positions_stride_s,
    b,
    s,
    S,
    offset,
    length,
    HALF: tl.constexpr,
    C: tl.constexpr,
    INVERSE: tl.constexpr,
    COUNT: tl.constexpr,
):
    """(cos, sin), each [R, C] float32, of tokens s [R] of sequence b."""
    row = s
    if positions_ptr is not None:
        positions = positions_ptr + b * positions_stride_b + s * positions_stride_s
        row = tl.load(positions, mask=s < S, other=0).to(tl.int64)
        if COUNT:
            row += s
    row = (row + offset)[:, None]
    cols = tl.arange(0, C)[None, :]
    exists = (row >= 0) & (row < length)
    mask = exists & (cols < HALF)
    cos = tl.where(exists, load(cos_ptr, row * cos_stride + cols, mask), float("nan"))
    sin = tl.where(exists, load(sin_ptr, row * sin_stride + cols, mask), float("nan"))
    if INVERSE:
        sin = -sin
    return cos, sin


@triton.jit
def rotated(x1, x2, cos, sin):
    return x1 * cos - x2 * sin, x2 * cos + x1 * sin


@triton.jit
def load_pairs(ptr, offsets, mask, HALF: tl.constexpr, C: tl.constexpr, INTERLEAVED: tl.constexpr):
    """The two members of every pair, each [R, C] float32, of rows that begin at offsets [R, 1]."""
    if INTERLEAVED:
        cols = tl.arange(0, 2 * C)[None, :]
        x = load(ptr, offsets + cols, mask & (cols < 2 * HALF))
        return tl.split(tl.reshape(x, (x.shape[0], C, 2)))
    else:
        cols = tl.arange(0, C)[None, :]
        inside = mask & (cols < HALF)
        return load(ptr, offsets + cols, inside), load(ptr, offsets + HALF + cols, inside)


@triton.jit
def store_pairs(
    ptr, offsets, x1, x2, mask, HALF: tl.constexpr, C: tl.constexpr, INTERLEAVED: tl.constexpr
):
    if INTERLEAVED:
        cols = tl.arange(0, 2 * C)[None, :]
        x = tl.reshape(tl.join(x1, x2), (x1.shape[0], 2 * C))
        store(ptr, offsets + cols, x, mask & (cols < 2 * HALF))
    else:
        cols = tl.arange(0, C)[None, :]
        inside = mask & (cols < HALF)
        store(ptr, offsets + cols, x1, inside)
        store(ptr, offsets + HALF + cols, x2, inside)


@triton.jit
def copy_columns(
    x_ptr, y_ptr, x_offsets, y_offsets, mask, FIRST: tl.constexpr, D: tl.constexpr, C: tl.constexpr
):
    """Columns FIRST to D - 1, C or fewer, as they are."""
    cols = FIRST + tl.arange(0, C)[None, :]
    inside = mask & (cols < D)
    tl.store(y_ptr + y_offsets + cols, tl.load(x_ptr + x_offsets + cols, mask=inside), mask=inside)


@triton.jit
def copy_heads(
    x_ptr, y_ptr, x_stride_b, x_stride_h, x_stride_s, y_stride_b, y_stride_h, y_stride_s,
    b, s, h, group, S, heads, D: tl.constexpr, C: tl.constexpr, H: tl.constexpr, STEPS: tl.constexpr,
):  # fmt: skip
    """A group of tiles of v, all D <= C columns of them."""
    h += group * (H * STEPS)
    for _ in tl.static_range(STEPS):
        copy_columns(
            x_ptr,
            y_ptr,
            head_offsets(b, s, h, x_stride_b, x_stride_h, x_stride_s),
            head_offsets(b, s, h, y_stride_b, y_stride_h, y_stride_s),
            ((s < S) & (h < heads))[:, None],
            0,
            D,
            C,
        )
        h += H


@triton.jit
def head_offsets(b, s, h, stride_b, stride_h, stride_s):
    """Where the rows of a tile begin, [R, 1]."""
    return (b * stride_b + h * stride_h + s * stride_s)[:, None]


@triton.jit
def rotate_heads(
    x_ptr, y_ptr, x_stride_b, x_stride_h, x_stride_s, y_stride_b, y_stride_h, y_stride_s,
    b, s, h, group, S, heads, cos, sin,
    D: tl.constexpr, HALF: tl.constexpr, C: tl.constexpr, REST: tl.constexpr,
    INTERLEAVED: tl.constexpr, H: tl.constexpr, STEPS: tl.constexpr,
):  # fmt: skip
    """A group of tiles of q or k."""
    h += group * (H * STEPS)
    for _ in tl.static_range(STEPS):
        mask = ((s < S) & (h < heads))[:, None]
        x_offsets = head_offsets(b, s, h, x_stride_b, x_stride_h, x_stride_s)
        y_offsets = head_offsets(b, s, h, y_stride_b, y_stride_h, y_stride_s)
        x1, x2 = load_pairs(x_ptr, x_offsets, mask, HALF, C, INTERLEAVED)
        y1, y2 = rotated(x1, x2, cos, sin)
        store_pairs(y_ptr, y_offsets, y1, y2, mask, HALF, C, INTERLEAVED)
        if REST:
            copy_columns(x_ptr, y_ptr, x_offsets, y_offsets, mask, 2 * HALF, D, REST)
        h += H


@triton.jit(do_not_specialize=["S", "offset", "length"])
def rope_kernel(
    q_ptr, k_ptr, v_ptr, cos_ptr, sin_ptr, positions_ptr,  # in
    q_out_ptr, k_out_ptr, v_out_ptr,  # out
    q_stride_b, q_stride_h, q_stride_s, k_stride_b, k_stride_h, k_stride_s,
    v_stride_b, v_stride_h, v_stride_s, q_out_stride_b, q_out_stride_h, q_out_stride_s,
    k_out_stride_b, k_out_stride_h, k_out_stride_s, v_out_stride_b, v_out_stride_h, v_out_stride_s,
    cos_stride, sin_stride, positions_stride_b, positions_stride_s,
    S, q_heads, k_heads, offset, length,
    D: tl.constexpr, HALF: tl.constexpr, INTERLEAVED: tl.constexpr, INVERSE: tl.constexpr,
    COUNT: tl.constexpr, T: tl.constexpr, H: tl.constexpr, STEPS: tl.constexpr, C: tl.constexpr,
    REST: tl.constexpr, WHOLE: tl.constexpr,
):  # fmt: skip
    """Program i rotates a group of tiles of q or k, or copies one of v."""
    q_groups, k_groups, b, s, h, group = group_of_program(
        q_heads, k_heads, S, v_ptr is not None, T, H, STEPS
    )
    if group < q_groups + k_groups:
        cos, sin = angles(
            cos_ptr,
            sin_ptr,
            positions_ptr,
            cos_stride,
            sin_stride,
            positions_stride_b,
            positions_stride_s,
            b,
            s,
            S,
            offset,
            length,
            HALF,
            C,
            INVERSE,
            COUNT,
        )
        if group < q_groups:
            rotate_heads(
                q_ptr, q_out_ptr, q_stride_b, q_stride_h, q_stride_s,
                q_out_stride_b, q_out_stride_h, q_out_stride_s, b, s, h, group, S, q_heads, cos, sin,
                D, HALF, C, REST, INTERLEAVED, H, STEPS,
            )  # fmt: skip
        elif k_ptr is not None:
            rotate_heads(
                k_ptr, k_out_ptr, k_stride_b, k_stride_h, k_stride_s,
                k_out_stride_b, k_out_stride_h, k_out_stride_s,
                b, s, h, group - q_groups, S, k_heads, cos, sin,
                D, HALF, C, REST, INTERLEAVED, H, STEPS,
            )  # fmt: skip
    elif v_ptr is not None:
        copy_heads(
            v_ptr,
            v_out_ptr,
            v_stride_b,
            v_stride_h,
            v_stride_s,
            v_out_stride_b,
            v_out_stride_h,
            v_out_stride_s,
            b,
            s,
            h,
            group - q_groups - k_groups,
            S,
            k_heads,
            D,
            WHOLE,
            H,
            STEPS,
        )
