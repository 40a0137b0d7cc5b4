"""Attention to a cache of keys and values, and attention with split keys: launches and operators.

Legend: q [B, Hq, Sq, D], or with cu_seqlens [1, Hq, T, D], tokens of B sequences side by side; k_cache
[pages, page size, Hkv, D], v_cache [.., Dv], where without a page table a page is a row, all that a
sequence has; out [B, Hq, Sq, Dv], lse [B, Hq, Sq].  See kernels/attention_decode.py.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .. import configs
from ..kernels.attention_decode import append_kernel, attention_decode_kernel, merge_kernel
from ..variant import NUMBERS, TENSORS, Kind, Variant, kind_of, unpack
from .attention import like_heads
from .attention_triton import LOG2E, SMALLEST_SCALE
from .call import Operator, steps
from .device import capability, cdiv, multiprocessors
from .library import kernel_op
from .private import allows_tf32
from .recipe import New, Operand, Recipe
from .rope import unit_columns

NO_GRADIENT = "flashproto: attention_with_kv_cache has no gradient; call it under torch.no_grad()"


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


def page_size(cache: Cache, k: Operand) -> int:
    """As a constant: 0 without pages."""
    return 0 if cache.page_table is None else k.shape[1]


def given_to(variant: Variant) -> tuple[Any, ...]:
    """What the kernels take of a variant, in the order of kernels/scores.py."""
    if variant.kind.TUNED:
        return ()
    named = {name: x.contiguous() if isinstance(x, Operand) else x for name, x in variant.named.items()}
    rows: tuple[int | None, int | None] = (None, None)
    if variant.kind.INTERVALS:
        batch, heads, _ = named["begin"].shape
        rows = heads if batch > 1 else 0, 1 if heads > 1 else 0
    return (*tuple(map(named.get, (*NUMBERS, *TENSORS)))[:7], *rows)


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
    prefix: tuple[Operand, Operand] | None = None,
) -> None:
    """Fill out and lse, of some elements; k and v as a cache lies, in whose pages B sequences have
    their keys, or without lengths all k.shape[1] of each."""
    kind = variant.kind
    entries, Hq, Sq, D = q.shape
    Hkv, Dv = k.shape[2], v.shape[3]
    B, group, room = cache.sequences(q), Hq // Hkv, cache.capacity(k)
    tokens = Sq if cache.cu_seqlens is None else cdiv(Sq, max(B, 1))
    paged = cache.page_table is not None
    config = configs.attention_decode(
        capability(q.device), q.element_size(), k.element_size(), D, Dv, group * tokens, paged
    )
    query_tiles = cdiv(group * Sq, config.block_m)
    most = B * query_tiles if cache.cu_seqlens is None else query_tiles + B + 1
    at_once = multiprocessors(q.device) * config.programs
    split = prefix is not None or configs.splits_cache(
        cdiv(group * tokens, config.block_m), most * Hkv, at_once
    )
    given = given_to(variant)
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
    to, lse_to = out, lse
    if split:
        programs = max(min(at_once, programs * cdiv(room, config.block_n)), 1)
        pieces = programs + most * Hkv
        rows = (pieces, config.block_m)
        to = recipe.make(New.contiguous((*rows, Dv), torch.float32, q.device))
        lse_to = recipe.make(New.contiguous(rows, torch.float32, q.device))
    numbers = (B, Hkv, Sq, k.shape[1], cache.new, room, variant.offset)
    recipe.launch(
        attention_decode_kernel,
        programs,
        q,
        k,
        v,
        to,
        lse_to,
        *cache[:9],
        *q.stride(),
        *k.stride(),
        *v.stride(),
        *((0, 0, 0, 1) if split else out.stride()),
        *cache.scale_strides(),
        *cache.table_strides(),
        *numbers,
        cache.position,
        0 if cache.cos is None else cache.cos.shape[0],
        max(scale, SMALLEST_SCALE) * LOG2E,
        given,
        D=D,
        BLOCK_D=configs.padded_head_dim(D),
        BY_HEAD=kind.INTERVALS and bool(given[8]),
        PAGE_SIZE=page_size(cache, k),
        SPLIT=split,
        EXACT=q.dtype == torch.float32,
        TF32=q.dtype == torch.float32 and allows_tf32(),
        WIDE=is_wide(k, v),
        **shared,
        **constants,
        num_warps=config.num_warps,
        num_stages=config.num_stages,
    )
    if split:
        prefix_out, prefix_lse = prefix or (None, None)
        recipe.launch(
            merge_kernel,
            entries * Hq * Sq,
            to,
            lse_to,
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
            given,
            BLOCK_B=constants["BLOCK_B"],
            PIECES=config.pieces,
            **shared,
            num_warps=4,
        )


# --- a cache, read ----------------------------------------------------------------------------------


class Settings(NamedTuple):
    """ints, floats, variant: of a packed Variant, whose tensors are the last inputs; scale >= 0; new,
    position, interleaved: see Cache."""

    ints: tuple[int, ...]
    floats: tuple[float, ...]
    variant: str
    scale: float
    new: int
    position: int
    interleaved: bool

    @property
    def kind(self) -> Kind:
        return kind_of(self.variant.split("/")[0])

    def unpacked(self, tensors: Sequence[Any]) -> Variant:
        return unpack(tensors, self.ints, self.floats, self.variant)


def makes(settings: Settings, q: Any, k: Any, v: Any, *tensors: Any) -> tuple[New, New]:
    """out and lse."""
    return like_heads(q, v.shape[3]), New.contiguous(q.shape[:3], torch.float32, q.device)


def forward(recipe: Recipe, settings: Settings, inputs: Any, outputs: Any) -> None:
    (q, k, v, *rest), news = inputs, makes(settings, *inputs)
    if 0 in q.shape:
        return
    out, lse = (recipe.make(new) if x is None else x for x, new in zip(outputs, news, strict=True))
    where, (prefix_out, prefix_lse), tensors = rest[:9], rest[9:11], rest[11:]
    cache = cache_of(where, settings.new, settings.position, settings.interleaved)
    prefix = None if prefix_out is None else (prefix_out, prefix_lse.contiguous())
    launch(recipe, q, k, v, out, lse, cache, settings.unpacked(tensors), settings.scale, prefix)


def cache_of(tensors: Sequence[Any], new: int, position: int, interleaved: bool) -> Cache:
    """Of the tensors of Cache, as the kernels read them."""
    lengths, page_table, cache_index, starts, cu_seqlens, cos, sin, k_scale, v_scale = tensors
    lengths, cache_index, starts, cu_seqlens = (
        None if x is None else x.contiguous() for x in (lengths, cache_index, starts, cu_seqlens)
    )
    page_table, cos, sin = (None if x is None else unit_columns(x) for x in (page_table, cos, sin))
    if k_scale is not None and k_scale.ndim == 1:
        k_scale, v_scale = k_scale.contiguous(), v_scale.contiguous()
    return Cache(
        lengths, page_table, cache_index, starts, cu_seqlens, cos, sin, k_scale, v_scale,
        new, position, interleaved,
    )  # fmt: skip


attention_kv_cache = Operator(
    "attention_kv_cache",
    inputs="q, k_cache, v_cache, lengths, page_table?, cache_index?, starts?, cu_seqlens?, cos?, sin?, "
    "k_scale?, v_scale?, prefix_out?, prefix_lse?, *tensors",
    outputs=2,
    settings=Settings,
    makes=makes,
    forward=forward,
    differentiable=2,
    no_gradient=NO_GRADIENT,
)


# --- a cache, added to ------------------------------------------------------------------------------


def append_in_place(
    k_cache: Tensor,
    v_cache: Tensor,
    k_token_scale: Tensor | None,
    v_token_scale: Tensor | None,
    k: Tensor,
    v: Tensor,
    k_scale: Tensor | None,
    v_scale: Tensor | None,
    lengths: Tensor,
    page_table: Tensor | None,
    cache_index: Tensor | None,
    starts: Tensor | None,
    cu_seqlens: Tensor | None,
    cos: Tensor | None,
    sin: Tensor | None,
    position: int,
    interleaved: bool,
    rolls: bool,
) -> None:
    """Put k [B, Hkv, S, D], turned, and v [B, Hkv, S, Dv] behind the keys that the cache holds, with
    cu_seqlens [1, Hkv, T, D] of sequences side by side.  Scales of 8 bits: k_token_scale as the cache
    lies are written, k_scale [Hkv] are read."""
    given = (k_cache, v_cache, k_token_scale, v_token_scale, k, v, k_scale, v_scale)
    where = (lengths, page_table, cache_index, starts, cu_seqlens, cos, sin)
    steps(_append, [*given, *where], (position, interleaved, rolls))


def _append(recipe, tensors, position, interleaved, rolls):
    k_cache, v_cache, k_token, v_token, k, v, k_scale, v_scale, *where = tensors
    scales = (k_scale, v_scale) if k_token is None else (k_token, v_token)
    cache = cache_of([*where, *scales], 0, position, interleaved)
    entries, Hkv, tokens, D = k.shape
    Dv, B = v.shape[3], cache.sequences(k)
    if 0 in k.shape or not B:
        return
    block_d, block_dv = configs.padded_head_dim(D), configs.padded_head_dim(Dv)
    block_h = min(configs.power_of_two(Hkv), max(4096 // max(block_d, block_dv), 1))
    constants = cache.constants(B)
    recipe.launch(
        append_kernel, entries * tokens * cdiv(Hkv, block_h),
        k, v, k_cache, v_cache, cache.k_scale, cache.v_scale, *cache[:7],
        *k.stride(), *v.stride(), *k_cache.stride(), *v_cache.stride(),
        *cache.scale_strides(), *cache.table_strides(),
        B, tokens, Hkv, cache.capacity(k_cache), position,
        0 if cache.cos is None else cache.cos.shape[0],
        D=D, DV=Dv, BLOCK_D=block_d, BLOCK_DV=block_dv, BLOCK_H=block_h,
        PAGE_SIZE=page_size(cache, k_cache), ROLLS=rolls, **constants, num_warps=4,
    )  # fmt: skip


append_op = kernel_op(
    "flashproto::append_kv_cache_",
    append_in_place,
    "(Tensor(a!) k_cache, Tensor(b!) v_cache, Tensor(c!)? k_token_scale, Tensor(d!)? v_token_scale, "
    "Tensor k, Tensor v, Tensor? k_scale, Tensor? v_scale, Tensor lengths, Tensor? page_table, "
    "Tensor? cache_index, Tensor? starts, Tensor? cu_seqlens, Tensor? cos, Tensor? sin, "
    "SymInt position, bool interleaved, bool rolls) -> ()",
    lambda *_: None,
    mutates_args=("k_cache", "v_cache", "k_token_scale", "v_token_scale"),
)
