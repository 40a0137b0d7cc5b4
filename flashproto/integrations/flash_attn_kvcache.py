"""flash-attn 2.8's attention with a cache; flash_attn.py has it too."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ..checks.errors import described, matches, refuse, refuse_shape
from ..checks.options import check_flag, check_integer
from ..checks.reading import is_readable
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
from .refusals import refuse_not_yet

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
    *,
    cu_seqlens_q: Tensor | None = None,
    cu_seqlens_k_new: Tensor | None = None,
    max_seqlen_q: Any = None,
) -> Tensor | tuple[Tensor, Tensor]:
    """flash_attn.flash_attn_with_kvcache: new keys and values are written into the cache in place, and
    queries see all that is there then.

    Args:
        q: [B, Sq, Hq, D], float16, bfloat16 or float32.
        k_cache, v_cache: [B, S, Hkv, D], or with a block_table [pages, page_size, Hkv, D], of any
            page_size.
        k, v: [B, n, Hkv, D], new ones, put behind the cache_seqlens that are there; None for none.
        rotary_cos, rotary_sin: [length, R], 2 R <= D, beside k and v: key cache_seqlens + i is rotated
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
        cu_seqlens_q: of version 3: int32 [B + 1], where the tokens of each sequence begin that lie side
            by side, q [T, Hq, D], and k and v [T, Hkv, D] of the same tokens: cu_seqlens_k_new is the
            same tensor.  max_seqlen_q is not read.

    Returns: out as q lies; with return_softmax_lse (out, lse) with lse [B, Hq, Sq], or [Hq, T], which
        is +inf for a query that sees no key.  There is no gradient: tensors that are differentiated
        are refused.
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
    dims = "BSHD" if cu_seqlens_q is None else "THD"
    check_layout(NAME, dims, q=q)
    check_layout(NAME, "BSHD", k_cache=k_cache, v_cache=v_cache)
    if cu_seqlens_q is not None:
        check_int32(NAME, "cu_seqlens_q", cu_seqlens_q, (None,), q.device)
        if not cu_seqlens_q.shape[0]:
            refuse(NAME, "cu_seqlens_q", "empty", "int32 [B + 1]", "Begin it with 0.")
    B = q.shape[0] if cu_seqlens_q is None else cu_seqlens_q.shape[0] - 1
    if cu_seqlens_k_new is not None:
        _check_same(cu_seqlens_k_new, cu_seqlens_q, B)
    if k is not None or v is not None:
        check_layout(NAME, dims, k=k, v=v)
        assert k is not None and v is not None
        tokens = (B, k.shape[1]) if cu_seqlens_q is None else (q.shape[0],)
        _check_new("k", k, (*tokens, *k_cache.shape[2:]))
        _check_new("v", v, (*tokens, *v_cache.shape[2:]))
    for argument, x in (("cache_batch_idx", cache_batch_idx), ("cache_leftpad", cache_leftpad)):
        if x is not None:
            check_int32(NAME, argument, x, (B,), q.device)
    if block_table is not None:
        rows = B if cache_batch_idx is None else None
        check_int32(NAME, "block_table", block_table, (rows, None), q.device)
    pages = 1 if block_table is None else block_table.shape[1]
    lengths = _lengths(cache_seqlens, k, B, q.device, k_cache.shape[1] * pages)
    tables, k_new, v_new = _tables(rotary_cos, rotary_sin, k), k, v
    is_apart = options["causal"] or window is not None  # each query at a position of its own
    if cu_seqlens_q is not None and tables is not None:
        at = _places(lengths, cu_seqlens_q, q.shape[0])
        q = _turned(q, at[0] + at[1] if is_apart else at[0], tables, interleaved)
        k_new = _turned(k, at[0] + at[1], tables, interleaved)
        tables = None
    elif cu_seqlens_q is None:
        q = q.transpose(1, 2)
        k_new, v_new = (None if x is None else x.transpose(1, 2) for x in (k, v))
    if k_new is not None and tables is not None:
        Sq = q.shape[2]
        is_apart = is_apart or Sq == 1
        if not is_apart or k_new.shape[2] != Sq or cache_leftpad is not None:
            # Positions are not those of attention_with_kv_cache's own rope.
            where: Any = {"offset": lengths}
            if not is_apart:
                where = {"positions": lengths[:, None].expand(B, Sq)}
            q = rope(q, None, *tables, interleaved=interleaved, **where)
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
        cu_seqlens_q=cu_seqlens_q,
        rope=tables,
        interleaved=interleaved,
        **options,
    )
    out, lse = made if options["return_lse"] else (made, None)
    out = out.contiguous() if cu_seqlens_q is not None else tokens_first(out)
    return out if lse is None else (out, with_infinity(lse))


def _check_same(new: Tensor, queries: Tensor | None, B: int) -> None:
    """New keys are of the same tokens as queries; the numbers are compared where that is no waiting."""
    argument = "cu_seqlens_k_new"
    if queries is None:
        do = "Pass both, or tokens [B, n, Hkv, D]."
        refuse(NAME, argument, described(new), "None without cu_seqlens_q", do)
    check_int32(NAME, argument, new, (B + 1,), queries.device)
    if new is not queries and not (is_readable(new) and torch.equal(new, queries)):
        refuse_not_yet(NAME, argument, described(new), "new_keys_apart")


def _places(lengths: Tensor, cu_seqlens: Tensor, T: int) -> tuple[Tensor, Tensor]:
    """Of each token [T] how many keys its sequence has before the call, and its number among the new
    ones; 0 behind the last sequence."""
    token = torch.arange(T, device=lengths.device, dtype=torch.int32)
    sequence = torch.searchsorted(cu_seqlens, token, right=True) - 1
    before = torch.cat([lengths, lengths.new_zeros(1)])[sequence]
    return before, (token - cu_seqlens[sequence]) * (sequence < len(lengths))


def _turned(x: Any, positions: Tensor, tables: Any, interleaved: bool) -> Tensor:
    """x [T, H, D] by RoPE."""
    heads = x.transpose(0, 1)[None]
    return rope(heads, None, *tables, interleaved=interleaved, positions=positions)[0].transpose(0, 1)


def _check_new(argument: str, x: Tensor, shape: tuple[int, ...]) -> None:
    if not matches(x.shape, shape):
        do = "Pass as many tokens of both; tokens come before heads."
        refuse_shape(NAME, argument, x, lambda: str(list(shape)), do)


def _lengths(given: Any, k: Tensor | None, B: int, device: torch.device, capacity: int) -> Tensor:
    """cache_seqlens as int32 [B]."""
    if isinstance(given, Tensor):
        check_int32(NAME, "cache_seqlens", given, (B,), device)
        return given
    if given is None and k is not None:
        do = "Pass how many keys there are before."
        refuse(NAME, "cache_seqlens", None, "an integer or int32 [B] beside k and v", do)

    def takes() -> str:
        return f"0 to {capacity} keys, int32 [B], or None"

    n = capacity if given is None else given
    check_integer(NAME, "cache_seqlens", n, 0, capacity, takes, "Make a longer cache.")
    return torch.full((B,), n, dtype=torch.int32, device=device)


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
