"""Attention to a cache of keys and values: the operators.  Legend: attention_split.py; with cu_seqlens
q [T, Hq, D], k [T, Hkv, D] and v [T, Hkv, Dv] are tokens of sequences side by side."""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch

from .. import configs
from ..kernels.kv_cache import append_kernel
from ..variant import Form
from .attention import as_heads, as_rows, like_tensor
from .attention_split import Cache, launch, page_size
from .call import Operator
from .device import cdiv
from .recipe import New, Recipe
from .rope import unit_columns

NO_GRADIENT = "flashproto: attention_with_kv_cache has no gradient; call it under torch.no_grad()"


# --- a cache, read ----------------------------------------------------------------------------------


class Settings(NamedTuple):
    """form: of the variant, whose tensors are the last inputs; scale >= 0; backend: hopper or triton;
    new, position, interleaved: see Cache; num_splits: see attention_split.launch."""

    form: Form
    scale: float
    backend: str
    new: int
    position: int
    interleaved: bool
    num_splits: int = 0


def makes(settings: Settings, q: Any, k: Any, v: Any, *tensors: Any) -> tuple[New, New]:
    """out and lse."""
    shape = q.shape[:3] if q.ndim == 4 else (q.shape[1], q.shape[0])
    return like_tensor(q, v.shape[3]), New.contiguous(shape, torch.float32, q.device)


def forward(recipe: Recipe, settings: Settings, inputs: Any, outputs: Any) -> None:
    (q, k, v, *rest), news = inputs, makes(settings, *inputs)
    if 0 in q.shape:
        return
    out, lse = (recipe.make(new) if x is None else x for x, new in zip(outputs, news, strict=True))
    q, out, lse = as_heads(q), as_heads(out), as_rows(lse)
    where, (prefix_out, prefix_lse), tensors = rest[:9], rest[9:11], rest[11:]
    cache = cache_of(where, settings.new, settings.position, settings.interleaved)
    variant = settings.form.variant(tensors)
    if settings.backend == "hopper":
        # Gluon is not in every Triton.
        hopper = importlib.import_module(".attention_cache_hopper", __package__)
        of_all = settings.scale, settings.num_splits
        return hopper.launch(recipe, q, k, v, out, lse, cache, variant, *of_all)
    prefix = None
    if prefix_out is not None:
        prefix = as_heads(prefix_out), as_rows(prefix_lse.contiguous())
    of_all = settings.scale, settings.num_splits
    launch(recipe, q, k, v, out, lse, cache, variant, *of_all, prefix)


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


class AppendSettings(NamedTuple):
    """position, interleaved: see Cache; rolls: whether keys go round in the room of a sequence."""

    position: int
    interleaved: bool
    rolls: bool


def append(recipe: Recipe, settings: AppendSettings, inputs: Any, outputs: Any) -> None:
    """Put k, rotated, and v behind the keys that the cache holds.  Scales of 8 bits: k_token_scale, as
    the cache lies, are written; k_scale [Hkv] are read."""
    k_cache, v_cache, k_token, v_token, k, v, k_scale, v_scale, *where = inputs
    scales = (k_scale, v_scale) if k_token is None else (k_token, v_token)
    cache = cache_of([*where, *scales], 0, settings.position, settings.interleaved)
    k, v = as_heads(k), as_heads(v)
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
        B, tokens, Hkv, cache.capacity(k_cache), settings.position,
        0 if cache.cos is None else cache.cos.shape[0],
        D=D, DV=Dv, BLOCK_D=block_d, BLOCK_DV=block_dv, BLOCK_H=block_h,
        PAGE_SIZE=page_size(cache, k_cache), ROLLS=settings.rolls, **constants, num_warps=4,
    )  # fmt: skip


append_kv_cache = Operator(
    "append_kv_cache_",
    inputs="k_cache, v_cache, k_token_scale?, v_token_scale?, k, v, k_scale?, v_scale?, lengths, "
    "page_table?, cache_index?, starts?, cu_seqlens?, cos?, sin?",
    outputs=0,
    settings=AppendSettings,
    makes=lambda settings, *inputs: (),
    forward=append,
    writes=("k_cache", "v_cache", "k_token_scale", "v_token_scale"),
)
