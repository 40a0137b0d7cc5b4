"""flash-attn 2.8's attention with a cache; flash_attn.py has it too."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ..checks import check_flag, check_integer, matches, refuse, refuse_shape
from ..functional import attention_with_kv_cache, rope
from .flash_attn_options import (
    Window,
    check_int32,
    check_layout,
    options_of,
    taking_later_names,
    tokens_first,
    window_of,
    with_infinity,
)

NAME = "flash_attn_with_kvcache"


@taking_later_names
def flash_attn_with_kvcache(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    k: Tensor | None = None,
    v: Tensor | None = None,
    rotary_cos: Tensor | None = None,
    rotary_sin: Tensor | None = None,
    cache_seqlens: int | Tensor | None = None,
    cache_batch_idx: Tensor | None = None,
    cache_leftpad: Tensor | None = None,
    block_table: Tensor | None = None,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: Window = (-1, -1),
    softcap: float = 0.0,
    rotary_interleaved: bool = True,
    alibi_slopes: Tensor | None = None,
    num_splits: int = 0,
    return_softmax_lse: bool = False,
) -> Tensor | tuple[Tensor, Tensor]:
    """flash_attn.flash_attn_with_kvcache: new keys and values are written into the cache in place, and
    queries see all that is there then.

    Args:
        q: [B, Sq, Hq, D], float16, bfloat16 or float32.
        k_cache, v_cache: [B, S, Hkv, D], or with a block_table [pages, page_size, Hkv, D], of any
            page_size.
        k, v: [B, n, Hkv, D], new ones, put behind the cache_seqlens that are there; None for none.
        rotary_cos, rotary_sin: [length, R], 2 R <= D, beside k and v: key cache_seqlens + i is turned
            by that row, and so is query i if causal or a window is given; otherwise all queries are at
            cache_seqlens.  Rows count from the beginning of the cache, padding included.
        cache_seqlens: an integer, or int32 [B]: how many keys there are; None: the cache is full.
        cache_batch_idx: int32 [B], which row of the cache, or of block_table, a sequence has.
        cache_leftpad: int32 [B], the first key that counts.
        block_table: int32 [B, m], the pages of each sequence.
        softmax_scale, causal, window_size, softcap, alibi_slopes: as flash_attn_func.
        rotary_interleaved: pair i is dimensions (2i, 2i + 1); otherwise (i, i + R).
        num_splits: into how many parts keys are split at most; 1: never; 0 lets flashproto choose.
        return_softmax_lse: also return lse.

    Returns: out [B, Sq, Hq, D]; with return_softmax_lse (out, lse) with lse [B, Hq, Sq], which is +inf
        for a query that sees no key.  There is no gradient: tensors that are differentiated are
        refused.
    Raises: TypeError, ValueError: an argument does not fit; NotImplementedError: it is not taken.
    Source: flash-attn 2.8, https://github.com/Dao-AILab/flash-attention.

    Example:
        >>> k_cache, v_cache = torch.zeros(2, 32, 2, 16), torch.zeros(2, 32, 2, 16)
        >>> q, k, v = torch.randn(2, 8, 4, 16), torch.randn(2, 8, 2, 16), torch.randn(2, 8, 2, 16)
        >>> out = flash_attn.flash_attn_with_kvcache(
        ...     q, k_cache, v_cache, k, v, cache_seqlens=0, causal=True
        ... )
        >>> torch.equal(k_cache[:, :8], k)
        True
        >>> torch.allclose(out, flash_attn.flash_attn_func(q, k, v, causal=True), atol=1e-5)
        True
    """
    window = window_of(NAME, window_size)
    options = options_of(
        NAME,
        softmax_scale=softmax_scale,
        causal=causal,
        window=window,
        softcap=softcap,
        alibi_slopes=alibi_slopes,
        return_lse=return_softmax_lse,
        return_name="return_softmax_lse",
        num_splits=num_splits,
    )
    interleaved = check_flag(NAME, "rotary_interleaved", rotary_interleaved)
    check_layout(NAME, "BSHD", q=q, k_cache=k_cache, v_cache=v_cache)
    B, Sq = q.shape[:2]
    if k is not None or v is not None:
        check_layout(NAME, "BSHD", k=k, v=v)
        assert k is not None and v is not None
        _check_new("k", k, (B, k.shape[1], *k_cache.shape[2:]))
        _check_new("v", v, (B, k.shape[1], *v_cache.shape[2:]))
    for argument, x in (("cache_batch_idx", cache_batch_idx), ("cache_leftpad", cache_leftpad)):
        if x is not None:
            check_int32(NAME, argument, x, (B,), q.device)
    if block_table is not None:
        rows = B if cache_batch_idx is None else None
        check_int32(NAME, "block_table", block_table, (rows, None), q.device)
    pages = 1 if block_table is None else block_table.shape[1]
    lengths = _lengths(cache_seqlens, k, q, k_cache.shape[1] * pages)
    q = q.transpose(1, 2)
    k_new, v_new = (None if x is None else x.transpose(1, 2) for x in (k, v))
    tables = _tables(rotary_cos, rotary_sin, k)
    if k_new is not None and tables is not None:
        apart = options["causal"] or window is not None or Sq == 1
        if not apart or k_new.shape[2] != Sq or cache_leftpad is not None:
            # Positions are not those of attention_with_kv_cache's own rope.
            at: Any = {"offset": lengths} if apart else {"positions": lengths[:, None].expand(B, Sq)}
            q = rope(q, None, *tables, interleaved=interleaved, **at)
            k_new = rope(k_new, None, *tables, interleaved=interleaved, offset=lengths)
            tables = None
    made: Any = attention_with_kv_cache(
        q,
        k_cache,
        v_cache,
        lengths=lengths,
        k=k_new,
        v=v_new,
        page_table=block_table,
        cache_index=cache_batch_idx,
        starts=cache_leftpad,
        rope=tables,
        interleaved=interleaved,
        **options,
    )
    if not options["return_lse"]:
        return tokens_first(made)
    return tokens_first(made[0]), with_infinity(made[1])


def _check_new(argument: str, x: Tensor, shape: tuple[int, ...]) -> None:
    if not matches(x.shape, shape):
        do = "Pass as many tokens of both; tokens come before heads."
        refuse_shape(NAME, argument, x, lambda: str(list(shape)), do)


def _lengths(given: Any, k: Tensor | None, q: Tensor, capacity: int) -> Tensor:
    """cache_seqlens as int32 [B]."""
    if isinstance(given, Tensor):
        check_int32(NAME, "cache_seqlens", given, (q.shape[0],), q.device)
        return given
    if given is None and k is not None:
        do = "Pass how many keys there are before."
        refuse(NAME, "cache_seqlens", None, "an integer or int32 [B] beside k and v", do)

    def takes() -> str:
        return f"0 to {capacity} keys, int32 [B], or None"

    n = capacity if given is None else given
    check_integer(NAME, "cache_seqlens", n, 0, capacity, takes, "Make a longer cache.")
    return torch.full((q.shape[0],), n, dtype=torch.int32, device=q.device)


def _tables(cos: Tensor | None, sin: Tensor | None, k: Tensor | None) -> Any:
    """(cos, sin), or None."""
    if cos is None and sin is None:
        return None
    if cos is None or sin is None:
        missing = "rotary_cos" if cos is None else "rotary_sin"
        refuse(NAME, missing, None, "the table beside the other", "Pass both or neither.")
    if k is None:
        do = "Turn q before the call where there are no new keys."
        refuse(NAME, "rotary_cos", "given without k and v", "None without them", do)
    return cos, sin
