"""Attention to a cache of keys and values: launches of the Hopper forward.  Legend: attention_split.py.

Three launches, or four with parts of the keys: the slots of queries, whose keys the device counts; the
forward; the merge.  RoPE rotates the queries before, in one more.
"""

from __future__ import annotations

from typing import Any

import torch

from .. import configs
from ..kernels.hopper.attention_cache_slots import cache_slots_kernel, turn_queries_kernel
from ..kernels.hopper.attention_forward import attention_forward_kernel
from ..kernels.hopper.items import MOST_PROGRAMS, TURNS
from ..kernels.scores import Given
from ..variant import Variant
from .attention_hopper import boxes_of_queries, eighths, merge, records
from .attention_split import LOG2E, SMALLEST_SCALE, Cache, given_of
from .descriptors import boxed, readable
from .device import cdiv, multiprocessors
from .recipe import New, Operand, Recipe, Zeroed


def odd(n: int) -> int:
    """n as `counts` of kernels/scores.py has it."""
    return 2 * n + 1


def turned(recipe: Recipe, q: Operand, cache: Cache) -> Operand:
    """q, rotated by the angles of its positions."""
    if cache.cos is None or cache.sin is None:
        return q
    _, Hq, Sq, D = q.shape
    B = cache.sequences(q)
    out = recipe.make(New.contiguous(q.shape, q.dtype, q.device))
    block_d = configs.padded_head_dim(D)
    block_h = min(configs.power_of_two(Hq), max(4096 // block_d, 1))
    recipe.launch(
        turn_queries_kernel, q.shape[0] * Sq * cdiv(Hq, block_h),
        q, out, cache.lengths, cache.starts, cache.cu_seqlens, cache.cos, cache.sin,
        *q.stride(), *out.stride()[:3], cache.cos.stride(0), cache.sin.stride(0),
        B, Hq, Sq, cache.new, cache.position, cache.cos.shape[0],
        D=D, BLOCK_D=block_d, BLOCK_H=block_h, BLOCK_B=configs.power_of_two(B + 1),
        HALF=cache.cos.shape[1], INTERLEAVED=cache.interleaved, num_warps=4,
    )  # fmt: skip
    return out


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
) -> None:
    """Fill out and lse, of some elements.  num_splits: of the keys at most; 0, as many as are best.
    What TMA cannot read is copied, as a later cache that starts at no multiple of 16 bytes."""
    q, k, v = map(readable, (turned(recipe, q, cache), k, v))
    kind = variant.kind
    (entries, Hq, Sq, D), Hkv, most = q.shape, k.shape[2], multiprocessors(q.device)
    B, group, room = cache.sequences(q), Hq // Hkv, cache.capacity(k)
    ragged, paged = cache.cu_seqlens is not None, cache.page_table is not None
    tokens = cdiv(Sq, max(B, 1)) if ragged else Sq
    config, parts = configs.attention_cache_hopper(
        D,
        room,
        kind,
        tokens,
        B * Hkv,
        group,
        most,
        page=k.shape[1] if paged else 0,
        starts=cache.starts is not None,
        left=variant.named.get("left"),
        most_parts=num_splits,
    )
    heads = Hq if config.PACK == 1 else Hkv  # of work items
    slots = Sq // config.BQ + B + 1 if ragged else B * cdiv(Sq, config.BQ)
    total = slots * heads * parts
    to, lse_to = out, lse
    if config.SPLIT:
        rows = (entries * parts, Hq, Sq)
        to = recipe.make(New.contiguous((*rows, D), torch.float32, q.device))
        lse_to = recipe.make(New.contiguous(rows, torch.float32, q.device))
    programs = min(total, most * config.PROGRAMS)
    order: Any = lse  # which is not read
    if config.DYNAMIC:
        programs = min(programs, MOST_PROGRAMS.value)
        order = Zeroed(TURNS.value)
    # Of all sequences, since the longest of their slots come first.
    together = configs.heads_together_forward(config, 1, Hq, Hkv, B * room)
    work, given = records(recipe, slots, q.device), given_of(variant)
    recipe.launch(
        cache_slots_kernel, slots,
        work, cache.lengths, cache.cu_seqlens, cache.cache_index, cache.starts,
        B, Sq, cache.new, room, variant.offset, slots, given,
        BLOCK=256, BLOCK_M=config.BQ, BLOCK_N=config.BN, KIND=kind, ROLLS=config.ROLLS, num_warps=1,
    )  # fmt: skip
    given = (given or Given())._replace(work=work)
    if config.ROLLS:
        given = given._replace(room=odd(room))
    if cache.page_table is not None:
        given = given._replace(pages=cache.page_table, page_stride=odd(cache.page_table.stride(0)))
    box = (1, 1, config.BN, config.D)
    if paged and k.shape[1] < config.BN:
        box = (1, 1, k.shape[1], 64)
    recipe.launch(
        attention_forward_kernel, programs,
        boxed(q, *boxes_of_queries(config, q.shape, q.strides, group)),
        *(boxed(x, *by_heads(x), box) for x in (k, v)),
        to, lse_to, order, total, slots, heads, group, heads * parts, together, Sq, room,
        variant.offset, *eighths(to.strides), D, max(scale, SMALLEST_SCALE) * LOG2E, given,
        parts if config.SPLIT else None,
        CFG=config, num_warps=4, maxnreg=config.max_registers,
    )  # fmt: skip
    if config.SPLIT:
        merge(recipe, to, lse_to, out, lse, variant.named.get("sinks"))


def by_heads(x: Operand) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """(shape, strides) of a cache [pages, page size, Hkv, D] as [pages, Hkv, page size, D]."""
    order = 0, 2, 1, 3
    return tuple(x.shape[i] for i in order), tuple(x.strides[i] for i in order)
