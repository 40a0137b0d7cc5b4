"""RMSNorm of every head of q and k, and the rotary embedding that follows it, in one pass each way.

For a head x [D] of q or k, with the weight [D] that all heads of q (or of k) share:

    y = rotation(xhat * weight)        xhat = x * rstd        rstd = 1 / sqrt(mean(x^2) + eps)

Backward, with g = rotation^T(dy) and averages over D:

    dweight = sum over heads and tokens of g * xhat
    dx = rstd * (g * weight - xhat * average(g * weight * xhat))

A head is held whole in registers, so rstd is computed again in the backward pass and nothing but q
and k is kept.  dweight is summed in two steps of fixed order: every program adds up its tiles in
registers and writes one float32 row of partial sums for q and one for k, and column_sums_kernel
of norm_backward.py adds those.

CASTING says where rounding happens and what the weight means, as in norms: "torch" not at all before
the result; "llama" rounds xhat to the dtype of x; "gemma" multiplies by 1 + weight.

Legend and tables: rope.py; P programs; a row is three tiles, its pairs' first and second members
[R, C] and the dimensions that are not rotated [R, REST] (of no use where REST = 0).
"""

import triton
import triton.language as tl

from .rope import (
    angles,
    copy_heads,
    group_of_program,
    head_offsets,
    load_pairs,
    rotated,
    store_pairs,
    token_and_head,
)
from .rounding import load, rounded, store


@triton.jit
def load_head(
    ptr,
    offsets,
    mask,
    D: tl.constexpr,
    HALF: tl.constexpr,
    C: tl.constexpr,
    REST: tl.constexpr,
    INTERLEAVED: tl.constexpr,
):
    """The three tiles of rows that begin at offsets [R, 1]; the third is a zero where REST = 0."""
    x1, x2 = load_pairs(ptr, offsets, mask, HALF, C, INTERLEAVED)
    if REST:
        cols = 2 * HALF + tl.arange(0, REST)[None, :]
        x3 = load(ptr, offsets + cols, mask & (cols < D))
    else:
        x3 = tl.zeros([1, 1], tl.float32)
    return x1, x2, x3


@triton.jit
def store_head(
    ptr,
    offsets,
    x1,
    x2,
    x3,
    mask,
    D: tl.constexpr,
    HALF: tl.constexpr,
    C: tl.constexpr,
    REST: tl.constexpr,
    INTERLEAVED: tl.constexpr,
):
    store_pairs(ptr, offsets, x1, x2, mask, HALF, C, INTERLEAVED)
    if REST:
        cols = 2 * HALF + tl.arange(0, REST)[None, :]
        store(ptr, offsets + cols, x3, mask & (cols < D))


@triton.jit
def load_weight(
    ptr,
    D: tl.constexpr,
    HALF: tl.constexpr,
    C: tl.constexpr,
    REST: tl.constexpr,
    INTERLEAVED: tl.constexpr,
    CASTING: tl.constexpr,
):
    """What xhat is multiplied by, as three tiles of one row."""
    if ptr is not None:
        one = tl.zeros([1, 1], tl.int32)
        w1, w2, w3 = load_head(ptr, one, one == 0, D, HALF, C, REST, INTERLEAVED)
    else:
        w1 = tl.full([1, C], 0.0 if CASTING == "gemma" else 1.0, tl.float32)
        w2 = w1
        w3 = tl.full([1, 1], 0.0 if CASTING == "gemma" else 1.0, tl.float32)
    if CASTING == "gemma":
        w1, w2, w3 = 1.0 + w1, 1.0 + w2, 1.0 + w3
    return w1, w2, w3


@triton.jit
def row_sum(a1, a2, a3, REST: tl.constexpr):
    """The sum of every row's elements, [R, 1]."""
    total = tl.sum(a1 + a2, 1)
    if REST:
        total += tl.sum(a3, 1)
    return total[:, None]


@triton.jit
def cast_xhat(xhat, dtype: tl.constexpr, CASTING: tl.constexpr):
    if CASTING == "llama":
        xhat = rounded(xhat, dtype).to(tl.float32)
    return xhat


@triton.jit
def reciprocal_rms(x1, x2, x3, eps, D: tl.constexpr, REST: tl.constexpr):
    """rstd, [R, 1]."""
    return tl.rsqrt(row_sum(x1 * x1, x2 * x2, x3 * x3, REST) / D + eps)


@triton.jit
def forward_heads(
    x_ptr, weight_ptr, y_ptr, x_stride_b, x_stride_h, x_stride_s, y_stride_b, y_stride_h, y_stride_s,
    b, s, h, group, S, heads, cos, sin, eps,
    D: tl.constexpr, HALF: tl.constexpr, C: tl.constexpr, REST: tl.constexpr,
    INTERLEAVED: tl.constexpr, CASTING: tl.constexpr, ROTATE: tl.constexpr,
    H: tl.constexpr, STEPS: tl.constexpr,
):  # fmt: skip
    """A group of tiles of q or k."""
    w1, w2, w3 = load_weight(weight_ptr, D, HALF, C, REST, INTERLEAVED, CASTING)
    dtype: tl.constexpr = x_ptr.dtype.element_ty
    h += group * (H * STEPS)
    for _ in tl.static_range(STEPS):
        mask = ((s < S) & (h < heads))[:, None]
        x_offsets = head_offsets(b, s, h, x_stride_b, x_stride_h, x_stride_s)
        y_offsets = head_offsets(b, s, h, y_stride_b, y_stride_h, y_stride_s)
        x1, x2, x3 = load_head(x_ptr, x_offsets, mask, D, HALF, C, REST, INTERLEAVED)
        rstd = reciprocal_rms(x1, x2, x3, eps, D, REST)
        y1 = cast_xhat(x1 * rstd, dtype, CASTING) * w1
        y2 = cast_xhat(x2 * rstd, dtype, CASTING) * w2
        y3 = cast_xhat(x3 * rstd, dtype, CASTING) * w3
        if ROTATE:
            y1, y2 = rotated(y1, y2, cos, sin)
        store_head(y_ptr, y_offsets, y1, y2, y3, mask, D, HALF, C, REST, INTERLEAVED)
        h += H


@triton.jit(do_not_specialize=["S", "offset", "length"])
def qk_norm_forward_kernel(
    q_ptr, k_ptr, v_ptr, q_weight_ptr, k_weight_ptr, cos_ptr, sin_ptr, positions_ptr,  # in
    q_out_ptr, k_out_ptr, v_out_ptr,  # out
    q_stride_b, q_stride_h, q_stride_s, k_stride_b, k_stride_h, k_stride_s,
    v_stride_b, v_stride_h, v_stride_s, q_out_stride_b, q_out_stride_h, q_out_stride_s,
    k_out_stride_b, k_out_stride_h, k_out_stride_s, v_out_stride_b, v_out_stride_h, v_out_stride_s,
    cos_stride, sin_stride, positions_stride_b, positions_stride_s,
    S, q_heads, k_heads, offset, length, eps,
    D: tl.constexpr, HALF: tl.constexpr, INTERLEAVED: tl.constexpr, COUNT: tl.constexpr,
    CASTING: tl.constexpr, T: tl.constexpr, H: tl.constexpr, STEPS: tl.constexpr, C: tl.constexpr,
    REST: tl.constexpr, WHOLE: tl.constexpr,
):  # fmt: skip
    """Program i takes a group of tiles of q, k or v (which is copied), as in rope.py."""
    q_groups, k_groups, b, s, h, group = group_of_program(
        q_heads, k_heads, S, v_ptr is not None, T, H, STEPS
    )
    if group < q_groups + k_groups:
        ROTATE: tl.constexpr = cos_ptr is not None
        cos, sin = 1.0, 0.0
        if ROTATE:
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
                False,
                COUNT,
            )
        if group < q_groups:
            forward_heads(
                q_ptr, q_weight_ptr, q_out_ptr, q_stride_b, q_stride_h, q_stride_s,
                q_out_stride_b, q_out_stride_h, q_out_stride_s,
                b, s, h, group, S, q_heads, cos, sin, eps,
                D, HALF, C, REST, INTERLEAVED, CASTING, ROTATE, H, STEPS,
            )  # fmt: skip
        elif k_ptr is not None:
            forward_heads(
                k_ptr, k_weight_ptr, k_out_ptr, k_stride_b, k_stride_h, k_stride_s,
                k_out_stride_b, k_out_stride_h, k_out_stride_s,
                b, s, h, group - q_groups, S, k_heads, cos, sin, eps,
                D, HALF, C, REST, INTERLEAVED, CASTING, ROTATE, H, STEPS,
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


@triton.jit
def backward_tiles(
    dy_ptr, x_ptr, weight_ptr, dx_ptr, dweight_ptr, cos_ptr, sin_ptr, positions_ptr,
    dy_stride_b, dy_stride_h, dy_stride_s, x_stride_b, x_stride_h, x_stride_s,
    dx_stride_b, dx_stride_h, dx_stride_s,
    cos_stride, sin_stride, positions_stride_b, positions_stride_s,
    B, S, heads, offset, length, eps,
    D: tl.constexpr, HALF: tl.constexpr, INTERLEAVED: tl.constexpr, COUNT: tl.constexpr,
    CASTING: tl.constexpr, T: tl.constexpr, H: tl.constexpr, C: tl.constexpr, REST: tl.constexpr,
):  # fmt: skip
    """dx of every P-th tile of q or of k, and the partial sums of dweight."""
    program = tl.program_id(0)
    w1, w2, w3 = load_weight(weight_ptr, D, HALF, C, REST, INTERLEAVED, CASTING)
    dw1 = tl.zeros([T * H, C], tl.float32)
    dw2 = tl.zeros([T * H, C], tl.float32)
    dw3 = tl.zeros([T * H if REST else 1, REST if REST else 1], tl.float32)
    head_tiles = tl.cdiv(heads, H)
    # Programs of one tile a step: neighbours in memory are at work at the same time.
    for i in range(program, B * tl.cdiv(S, T) * head_tiles, tl.num_programs(0)):
        b, s, h, tile = token_and_head(i, head_tiles, S, T, H)
        h += tile * H
        mask = ((s < S) & (h < heads))[:, None]
        x_offsets = head_offsets(b, s, h, x_stride_b, x_stride_h, x_stride_s)
        dy_offsets = head_offsets(b, s, h, dy_stride_b, dy_stride_h, dy_stride_s)
        x1, x2, x3 = load_head(x_ptr, x_offsets, mask, D, HALF, C, REST, INTERLEAVED)
        g1, g2, g3 = load_head(dy_ptr, dy_offsets, mask, D, HALF, C, REST, INTERLEAVED)
        if cos_ptr is not None:
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
                True,
                COUNT,
            )
            # A row past the end may have angles of NaN, but no gradient.
            g1, g2 = rotated(g1, g2, tl.where(mask, cos, 0.0), tl.where(mask, sin, 0.0))
        rstd = reciprocal_rms(x1, x2, x3, eps, D, REST)
        x1, x2, x3 = x1 * rstd, x2 * rstd, x3 * rstd
        if dweight_ptr is not None:
            dtype: tl.constexpr = x_ptr.dtype.element_ty
            dw1 += g1 * cast_xhat(x1, dtype, CASTING)
            dw2 += g2 * cast_xhat(x2, dtype, CASTING)
            if REST:
                dw3 += g3 * cast_xhat(x3, dtype, CASTING)
        g1, g2, g3 = g1 * w1, g2 * w2, g3 * w3
        average = row_sum(g1 * x1, g2 * x2, g3 * x3, REST) / D
        dx1, dx2, dx3 = (g1 - x1 * average) * rstd, (g2 - x2 * average) * rstd, g3
        if REST:
            dx3 = (g3 - x3 * average) * rstd
        dx_offsets = head_offsets(b, s, h, dx_stride_b, dx_stride_h, dx_stride_s)
        store_head(dx_ptr, dx_offsets, dx1, dx2, dx3, mask, D, HALF, C, REST, INTERLEAVED)
    if dweight_ptr is not None:
        one = tl.zeros([1, 1], tl.int32)
        store_head(
            dweight_ptr + program.to(tl.int64) * D,
            one,
            tl.sum(dw1, 0)[None, :],
            tl.sum(dw2, 0)[None, :],
            tl.sum(dw3, 0)[None, :],
            one == 0,
            D,
            HALF,
            C,
            REST,
            INTERLEAVED,
        )


@triton.jit(do_not_specialize=["B", "S", "offset", "length"])
def qk_norm_backward_kernel(
    dq_out_ptr, dk_out_ptr, dv_out_ptr, q_ptr, k_ptr,  # in: gradients of the results, and q, k
    q_weight_ptr, k_weight_ptr, cos_ptr, sin_ptr, positions_ptr,
    dq_ptr, dk_ptr, dv_ptr,  # out
    dq_weight_ptr, dk_weight_ptr,  # out [P, D] float32, one row of partial sums a program
    dq_out_stride_b, dq_out_stride_h, dq_out_stride_s,
    dk_out_stride_b, dk_out_stride_h, dk_out_stride_s,
    dv_out_stride_b, dv_out_stride_h, dv_out_stride_s,
    q_stride_b, q_stride_h, q_stride_s, k_stride_b, k_stride_h, k_stride_s,
    dq_stride_b, dq_stride_h, dq_stride_s, dk_stride_b, dk_stride_h, dk_stride_s,
    dv_stride_b, dv_stride_h, dv_stride_s,
    cos_stride, sin_stride, positions_stride_b, positions_stride_s,
    B, S, q_heads, k_heads, offset, length, eps,
    D: tl.constexpr, HALF: tl.constexpr, INTERLEAVED: tl.constexpr, COUNT: tl.constexpr,
    CASTING: tl.constexpr, T: tl.constexpr, H: tl.constexpr, C: tl.constexpr, REST: tl.constexpr,
    WHOLE: tl.constexpr,
):  # fmt: skip
    """Program p takes every P-th tile of q, starting with tile p; then of k, then of v (copied)."""
    backward_tiles(
        dq_out_ptr, q_ptr, q_weight_ptr, dq_ptr, dq_weight_ptr, cos_ptr, sin_ptr, positions_ptr,
        dq_out_stride_b, dq_out_stride_h, dq_out_stride_s, q_stride_b, q_stride_h, q_stride_s,
        dq_stride_b, dq_stride_h, dq_stride_s,
        cos_stride, sin_stride, positions_stride_b, positions_stride_s,
        B, S, q_heads, offset, length, eps,
        D, HALF, INTERLEAVED, COUNT, CASTING, T, H, C, REST,
    )  # fmt: skip
    if k_ptr is not None:
        backward_tiles(
            dk_out_ptr, k_ptr, k_weight_ptr, dk_ptr, dk_weight_ptr, cos_ptr, sin_ptr, positions_ptr,
            dk_out_stride_b, dk_out_stride_h, dk_out_stride_s, k_stride_b, k_stride_h, k_stride_s,
            dk_stride_b, dk_stride_h, dk_stride_s,
            cos_stride, sin_stride, positions_stride_b, positions_stride_s,
            B, S, k_heads, offset, length, eps,
            D, HALF, INTERLEAVED, COUNT, CASTING, T, H, C, REST,
        )  # fmt: skip
    if dv_ptr is not None:
        head_tiles = tl.cdiv(k_heads, H)
        for i in range(tl.program_id(0), B * tl.cdiv(S, T) * head_tiles, tl.num_programs(0)):
            b, s, h, tile = token_and_head(i, head_tiles, S, T, H)
            copy_heads(
                dv_out_ptr, dv_ptr, dv_out_stride_b, dv_out_stride_h, dv_out_stride_s,
                dv_stride_b, dv_stride_h, dv_stride_s, b, s, h, tile, S, k_heads, D, WHOLE, H, 1,
            )  # fmt: skip
