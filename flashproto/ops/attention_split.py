"""Attention with split keys, and to a cache of keys and values: launches.

Legend: q [B, Hq, Sq, D], or with cu_seqlens [1, Hq, T, D], tokens of B sequences side by side; k
[pages, page size, Hkv, D], v [.., Dv], where without a page table a page is a row, all that a sequence
has; out [B, Hq, Sq, Dv], lse [B, Hq, Sq].  See kernels/attention_decode.py.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import torch

from .. import configs
from ..kernels.attention_decode import attention_decode_kernel, merge_kernel
from ..kernels.scores import Given
from ..variant import Variant, is_strided
from .device import capability, cdiv, has_dependent_launches, multiprocessors
from .private import allows_tf32
from .recipe import New, Operand, Recipe

LOG2E = math.log2(math.e)
# Scores times this are 0 in float32: a scale of 0 means a uniform softmax, and stays positive.
SMALLEST_SCALE = 2.0**-100


class Cache(NamedTuple):
    """What says where keys are, None for what there is not.

    new: how many keys each sequence has beside lengths, or with cu_seqlens 1 if one for each query.
    position: of a sequence's first key.
    """

    lengths: Operand | None = None
    page_table: Operand | None = None
    cache_index: Operand | None = None
    starts: Operand | None = None
    cu_seqlens: Operand | None = None
    cos: Operand | None = None
    sin: Operand | None = None
    k_scale: Operand | None = None
    v_scale: Operand | None = None
    new: int = 0
    position: int = 0
    interleaved: bool = False

    def sequences(self, q: Operand) -> int:
        return q.shape[0] if self.cu_seqlens is None else self.cu_seqlens.shape[0] - 1

    def constants(self, B: int) -> dict[str, Any]:
        """Those that the kernels share."""
        return {
            "BLOCK_B": configs.power_of_two(B + 1),
            "HALF": 0 if self.cos is None else self.cos.shape[1],
            "INTERLEAVED": self.interleaved,
            "SCALES": 0 if self.k_scale is None else 1 if self.k_scale.ndim == 1 else 2,
        }

    def capacity(self, k: Operand) -> int:
        """How many keys of a sequence there is room for; k: the cache."""
        return k.shape[1] * (1 if self.page_table is None else self.page_table.shape[1])

    def table_strides(self) -> list[int]:
        return [0 if x is None else x.stride(0) for x in (self.page_table, self.cos, self.sin)]

    def scale_strides(self) -> list[int]:
        """Over pages, tokens and heads, of scales for each token."""
        scales = (self.k_scale, self.v_scale)
        return [n for x in scales for n in ((0, 0, 0) if x is None or x.ndim == 1 else x.stride())]


def is_wide(*caches: Operand) -> bool:
    """Whether offsets in a row of the cache, tiles' overhang included, can pass 2^31 elements."""
    return any((x.shape[1] + 256) * x.stride(1) + 512 * x.stride(3) >= 2**31 for x in caches)


def reads_pairs(q: Operand, v: Operand) -> bool:
    """Whether values of 8 bits can be read two at a time: neighbours, all at even places."""
    width = v.shape[3]
    return (
        v.element_size() == 1
        and q.element_size() == 2
        and v.stride(3) == 1
        and v.aligned
        and not any(n % 2 for n in v.strides[:3])
        and width == configs.padded_head_dim(width)
    )


def page_size(cache: Cache, k: Operand) -> int:
    """As a constant: 0 without pages."""
    return 0 if cache.page_table is None else k.shape[1]


def given_of(variant: Variant) -> Any:
    """What kernels take of a variant, but for what launches make: Given, or () of a plain kind."""
    if variant.kind.PLAIN:
        return ()
    named = {
        name: x.contiguous() if isinstance(x, Operand) and not is_strided(name) else x
        for name, x in variant.named.items()
    }
    given = Given(**named)
    if variant.kind.RELATIVE_BIAS:
        rows, columns = given.relative_bias.shape
        given = given._replace(
            relative_row=1 if rows > 1 else 0,
            relative_columns=2 * columns + 1,
            relative_offset=4 * given.relative_offset + 2,
        )
    if variant.kind.INTERVALS:
        batch, heads, _ = given.begin.shape
        given = given._replace(
            row_of_batch=heads if batch > 1 else 0, row_of_head=1 if heads > 1 else 0
        )
    if variant.kind.TABLE:
        batch, heads, *_ = given.table.shape
        given = given._replace(
            table_of_batch=heads if batch > 1 else 0, table_of_head=1 if heads > 1 else 0
        )
    return given


def splits_keys(q: Any, k: Any, variant: Variant) -> bool:
    """Whether attention without a cache splits its keys, see configs; k [B, Hkv, Sk, D]."""
    (B, Hq, Sq, _), (_, Hkv, Sk, _) = q.shape, k.shape
    return configs.attention_splits_keys(variant.kind, B, Hq, Hkv, Sq, Sk, multiprocessors(q.device))


def launch(
    recipe: Recipe,
    q: Operand,
    k: Operand,
    v: Operand,
    out: Operand,
    lse: Operand,
    cache: Cache,
    variant: Variant,
    scale: float,
    num_splits: int = 0,
    prefix: tuple[Operand, Operand] | None = None,
) -> None:
    """Fill out and lse, of some elements; k and v as a cache lies, in whose pages B sequences have
    their keys, or without lengths all k.shape[1] of each.  num_splits: into how many parts the keys of
    sequences that are as long as each other are cut at most; 0, as many as are best."""
    kind = variant.kind
    _, Hq, Sq, D = q.shape
    Hkv, Dv = k.shape[2], v.shape[3]
    B, group, room = cache.sequences(q), Hq // Hkv, cache.capacity(k)
    tokens = Sq if cache.cu_seqlens is None else cdiv(Sq, max(B, 1))
    paged = cache.page_table is not None
    given = given_of(variant)
    by_head = kind.INTERVALS and bool(given.row_of_head)
    config = configs.attention_decode(
        capability(q.device), q.element_size(), k.element_size(), D, Dv, group * tokens, paged, by_head
    )
    query_tiles = cdiv(group * Sq, config.block_m)
    most = B * query_tiles if cache.cu_seqlens is None else query_tiles + B + 1
    at_once = multiprocessors(q.device) * config.programs
    split = prefix is not None or (
        num_splits != 1
        and configs.splits_cache(cdiv(group * tokens, config.block_m), most * Hkv, at_once)
    )
    rolls = kind.WINDOW and cache.lengths is not None
    shared = {
        "GROUP": group,
        "DV": Dv,
        "BLOCK_DV": configs.padded_head_dim(Dv),
        "BLOCK_M": config.block_m,
        "BLOCK_N": config.block_n,
        "KIND": kind,
        "ROLLS": rolls,
    }
    constants = cache.constants(B)
    programs = most * Hkv
    pieces, piece_lse, dependent = None, None, False
    if split:
        if num_splits:  # a program's part of all work may begin in any tile, and end in another
            at_once = min(at_once, programs * max(num_splits - 1, 1))
        programs = max(min(at_once, programs * cdiv(room, config.block_n)), 1)
        rows = (programs + most * Hkv, config.block_m)
        pieces = recipe.make(New.contiguous((*rows, Dv), torch.float32, q.device))
        piece_lse = recipe.make(New.contiguous(rows, torch.float32, q.device))
        dependent = has_dependent_launches(q.device)
    numbers = (B, Hkv, Sq, k.shape[1], cache.new, room, variant.offset)
    recipe.launch(
        attention_decode_kernel,
        programs,
        q,
        k,
        v,
        out,
        lse,
        pieces,
        piece_lse,
        *cache[:9],
        *q.stride(),
        *k.stride(),
        *v.stride(),
        *out.stride(),
        *cache.scale_strides(),
        *cache.table_strides(),
        *numbers,
        cache.position,
        0 if cache.cos is None else cache.cos.shape[0],
        max(scale, SMALLEST_SCALE) * LOG2E,
        given,
        D=D,
        BLOCK_D=configs.padded_head_dim(D),
        BY_HEAD=by_head,
        PAGE_SIZE=page_size(cache, k),
        SPLIT=split,
        PREFIX=prefix is not None,
        EXACT=q.dtype == torch.float32,
        TF32=q.dtype == torch.float32 and allows_tf32(),
        WIDE=is_wide(k, v),
        PAIRS=reads_pairs(q, v),
        PDL=dependent,
        **shared,
        **constants,
        num_warps=config.num_warps,
        num_stages=config.num_stages,
    )
    if split:
        prefix_out, prefix_lse = prefix or (None, None)
        rows_of_tile = min(group * Sq, config.block_m)
        merged = configs.decode_merge(rows_of_tile, most * Hkv, programs, Dv, multiprocessors(q.device))
        slices = cdiv(rows_of_tile, merged.rows)
        recipe.launch(
            merge_kernel,
            most * Hkv * slices,
            pieces,
            piece_lse,
            out,
            lse,
            prefix_out,
            prefix_lse,
            cache.lengths,
            cache.starts,
            cache.cu_seqlens,
            *out.stride(),
            *((0, 0, 0, 0) if prefix_out is None else prefix_out.stride()),
            *numbers,
            programs,
            slices,
            given,
            BLOCK_B=constants["BLOCK_B"],
            ROWS=merged.rows,
            PIECES=merged.pieces,
            PDL=dependent,
            **shared,
            num_warps=merged.num_warps,
            launch_pdl=dependent or None,
        )
