"""Attention on the portable kernels, backend "triton": launches.

Legend: q [B, Hq, Sq, D], k [B, Hkv, Sk, D], v [B, Hkv, Sk, Dv]; out [B, Hq, Sq, Dv]; lse [B, Hq, Sq].
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch

from .. import configs
from ..kernels.attention_backward import (
    attention_backward_heads_kernel,
    attention_backward_keys_kernel,
    attention_backward_queries_kernel,
    attention_backward_rows_kernel,
)
from ..kernels.attention_forward import attention_forward_kernel
from ..kernels.schedule import intervals_kernel
from ..variant import Kind, Variant
from . import attention_split, private
from .attention_split import LOG2E, SMALLEST_SCALE, given_of
from .device import capability, cdiv
from .recipe import New, Operand, Recipe

ROWS_BLOCK_M = 64


def is_wide(*tensors: Operand | None) -> bool:
    """Whether offsets inside the matrix of one batch entry and head, tiles' overhang included, can
    pass 2^31 elements."""
    for t in tensors:
        if t is not None:
            _, _, token, element = t.stride()
            if (t.shape[2] + 256) * token + 512 * element >= 2**31:
                return True
    return False


def constants(config: configs.AttentionConfig, q: Operand, Dv: int, kind: Kind) -> dict[str, Any]:
    """The constants that the kernels share, and the options."""
    D = q.shape[3]
    return {
        "D": D,
        "DV": Dv,
        "BLOCK_D": configs.padded_head_dim(D),
        "BLOCK_DV": configs.padded_head_dim(Dv),
        "BLOCK_M": config.block_m,
        "BLOCK_N": config.block_n,
        "KIND": kind,
        "TF32": q.dtype == torch.float32 and private.allows_tf32(),
        "num_warps": config.num_warps,
        "num_stages": config.num_stages,
    }


def given_to(
    recipe: Recipe,
    variant: Variant,
    q: Operand,
    k: Operand,
    block_n: int,
    keeping: bool = True,
    **made: Operand | None,
) -> Any:
    """given_of for kernels with key tiles of block_n, what they make included, and the steps before.

    keeping: whether what these make is kept with a mask."""
    given = given_of(variant)
    if variant.kind.PLAIN:
        return given
    given = given._replace(**made)
    if variant.kind.INTERVALS:
        batch, heads, Sk = given.begin.shape
        n_tiles, rows = cdiv(Sk, block_n), batch * heads
        start = len(recipe.steps)
        tiles = recipe.make(New.contiguous((rows, 4, n_tiles), torch.int32, q.device))
        if rows * n_tiles:
            pair = given.begin, given.end
            recipe.launch(
                intervals_kernel, rows * n_tiles, *pair, tiles, Sk, BLOCK_N=block_n, num_warps=1
            )
        if keeping:
            recipe.keep(start, tiles, given.begin, ("tiles", block_n))
        given = given._replace(work=tiles)
    if variant.kind.VARLEN:
        sizes = given.cu_seqlens_q.shape[0] - 1, q.shape[2], k.shape[2]
        sequences, queries, keys = (2 * n + 1 for n in sizes)  # see `counts` of kernels/scores.py
        given = given._replace(sequences=sequences, queries=queries, keys=keys)
    return given


def programs(variant: Variant, tokens: int, block: int, heads: int) -> int:
    """One for each tile of a head, or of sequences each slot that a tile may take."""
    if variant.kind.VARLEN:
        sequences = variant.named["cu_seqlens_q"].shape[0] - 1
        return (tokens // block + sequences + 1) * heads
    return cdiv(tokens, block) * heads


def lengths(variant: Variant, q: Operand, k: Operand) -> tuple[int, int]:
    """Sq and Sk as arguments; those of sequences are on the device."""
    return (0, 0) if variant.kind.VARLEN else (q.shape[2], k.shape[2])


def forward(
    recipe: Recipe,
    q: Operand,
    k: Operand,
    v: Operand,
    out: Operand,
    lse: Operand,
    variant: Variant,
    scale: float,
    num_splits: int = 0,
    max_score: Operand | None = None,
    entropy: Operand | None = None,
) -> None:
    """Fill out, lse and the statistics that are not None, of some elements.  num_splits: of the keys at
    most; 0, as many as are best."""
    B, Hq, Sq, D = q.shape
    _, Hkv, _, Dv = v.shape
    if num_splits != 1 and attention_split.splits_keys(q, k, variant):
        k, v = k.transpose(1, 2), v.transpose(1, 2)
        variant = variant._replace(offset=variant.offset - (k.shape[1] - Sq))
        cache = attention_split.Cache()
        attention_split.launch(recipe, q, k, v, out, lse, cache, variant, scale, num_splits)
        return
    config = configs.attention_forward(capability(q.device), q.element_size(), D, Dv)
    given = given_to(recipe, variant, q, k, config.block_n, max_score=max_score, entropy=entropy)
    recipe.launch(
        attention_forward_kernel,
        programs(variant, Sq, config.block_m, B * Hq),
        q,
        k,
        v,
        out,
        lse,
        *q.stride(),
        *k.stride(),
        *v.stride(),
        *out.stride(),
        Hq,
        Hq // Hkv,
        *lengths(variant, q, k),
        variant.offset,
        max(scale, SMALLEST_SCALE) * LOG2E,
        given,
        EXACT=q.dtype == torch.float32,
        WIDE=is_wide(q, k, v, out),
        **constants(config, q, Dv, variant.kind),
    )


def backward(
    recipe: Recipe,
    q: Operand,
    k: Operand,
    v: Operand,
    out: Operand,
    lse: Operand,
    dout: Operand,
    dlse: Operand | None,
    dq: Operand | None,
    dk: Operand | None,
    dv: Operand | None,
    variant: Variant,
    scale: float,
    ordered: bool,
    sinks: Operand | None = None,
    alibi_slopes: Operand | None = None,
) -> None:
    """Fill those of the gradients that are not None; lse is contiguous, dk and dv have the same
    strides.  ordered: they are summed in a fixed order here anyway.  sinks, alibi_slopes: the gradients
    of these."""
    B, Hq, Sq, D = q.shape
    _, Hkv, Sk, Dv = v.shape
    kind = replace(variant.kind, MAX_SCORE=False, ENTROPY=False)
    variant = variant._replace(kind=kind) if not kind.PLAIN else Variant(kind, variant.offset)
    for_keys, for_queries = configs.attention_backward(
        capability(q.device), q.element_size(), D, Dv, kind, alibi_slopes is not None
    )
    rows = New.contiguous(lse.shape, lse.dtype, lse.device)
    lse2, delta = recipe.make(rows), recipe.make(rows)
    slope_sums = None if alibi_slopes is None else recipe.make(rows)
    Sq_given, Sk_given = lengths(variant, q, k)
    sizes = (
        Hq,
        Hq // Hkv,
        Sq_given,
        Sk_given,
        variant.offset,
        max(scale, SMALLEST_SCALE) * LOG2E,
        scale,
    )
    strides = (*q.stride(), *k.stride(), *v.stride(), *dout.stride())
    wide = is_wide(q, k, v, out, dout, dq, dk, dv)
    given = given_to(recipe, variant, q, k, for_queries.block_n, slope_sums=slope_sums)
    recipe.launch(
        attention_backward_rows_kernel,
        cdiv(Sq, ROWS_BLOCK_M) * B * Hq,
        out,
        dout,
        lse,
        dlse,
        lse2,
        delta,
        *out.stride(),
        *dout.stride(),
        *((0, 0, 0) if dlse is None else dlse.stride()),
        Hq,
        Sq_given,
        given,
        KIND=kind,
        HAS_DLSE=dlse is not None,
        SLOPES=slope_sums is not None,
        WIDE=wide,
        DV=Dv,
        BLOCK_DV=configs.padded_head_dim(Dv),
        BLOCK_M=ROWS_BLOCK_M,
        num_warps=4,
    )
    if dk is not None and dv is not None:
        recipe.launch(
            attention_backward_keys_kernel,
            programs(variant, Sk, for_keys.block_n, B * Hkv),
            q,
            k,
            v,
            dout,
            lse2,
            delta,
            dk,
            dv,
            *strides,
            *dk.stride(),
            *dv.stride(),
            *sizes,
            given,
            WIDE=wide,
            **constants(for_keys, q, Dv, kind),
        )
    if dq is None and slope_sums is not None:
        dq = recipe.make(New.contiguous(q.shape, q.dtype, q.device))
    if dq is not None:
        recipe.launch(
            attention_backward_queries_kernel,
            programs(variant, Sq, for_queries.block_m, B * Hq),
            q,
            k,
            v,
            dout,
            lse2,
            delta,
            dq,
            *strides,
            *dq.stride(),
            *sizes,
            given,
            WIDE=wide,
            SLOPES=slope_sums is not None,
            **constants(for_queries, q, Dv, kind),
        )
    for gradient, terms in ((sinks, delta), (alibi_slopes, slope_sums)):
        if gradient is not None:
            recipe.launch(
                attention_backward_heads_kernel,
                Hq,
                terms,
                lse2,
                variant.named.get("sinks"),
                gradient,
                Hq,
                B,
                Sq_given,
                given,
                KIND=kind,
                SINKS=terms is delta,
                BLOCK=1024,
                num_warps=4,
            )
