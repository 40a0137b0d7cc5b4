"""Decoding: attention in parts, and with a cache of keys and values."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from .. import backends, reference
from ..backends import Reason, autocast_dtype, float64_reasons
from ..checks import FLOATS, check_flag, check_scale, check_states, refuse
from ..variant import Variant, pack
from .attention import _band, _variant, attention
from .autocast import without_autocast
from .decode_checks import (
    check_apart,
    check_cache,
    check_constants,
    check_lengths,
    check_prefix,
    check_rope,
)
from .rope import rope as turn

if backends.HAS_TRITON:
    from ..ops import attention_decode as decode_op


def merge_attention(
    outs: Tensor | Sequence[Tensor], lses: Tensor | Sequence[Tensor]
) -> tuple[Tensor, Tensor]:
    """Attention over all keys, from the results of attention over some of the keys each.

        lse = log(sum_i exp(lse_i))         out = sum_i exp(lse_i - lse) out_i

    It joins splits of a sequence, a prefix that sequences share with what each has of its own, and
    the shards of ring attention.  With sinks, one of the parts alone may have them.

    Args:
        outs: tensors [..., Dv] of one shape, or all stacked [n, ..., Dv]; any floating dtypes.
        lses: as many [...], natural logarithm, as return_lse gives them (of attention_varlen lse.mT,
            to lie as out does).  A part in which a row sees no key has -inf there.

    Returns: (out, lse) of attention over all keys: out [..., Dv] in the widest dtype of outs, lse [...]
        in float32 (float64 if anything is float64), in which sums are taken.  A row that sees no key in
        any part gives 0 and -inf.  Differentiable in all outs and lses.
    Raises: TypeError, ValueError: an argument does not fit.
    Source: Milakov and Gimelshein (2018), section 3.1.

    Example:
        >>> q, k, v = torch.randn(2, 4, 1, 16), torch.randn(2, 2, 9, 16), torch.randn(2, 2, 9, 16)
        >>> parts = [(k[:, :, :4], v[:, :, :4]), (k[:, :, 4:], v[:, :, 4:])]
        >>> outs, lses = zip(*[flashproto.attention(q, *kv, return_lse=True) for kv in parts])
        >>> out, lse = flashproto.merge_attention(outs, lses)
        >>> torch.allclose(out, flashproto.attention(q, k, v), atol=1e-6)
        True
    """
    check_states("merge_attention", outs, lses)
    distributed = backends.has_dtensors((outs[0],))
    for name, states in (("outs", outs), ("lses", lses)):
        if any(backends.has_dtensors((x,)) != distributed for x in states):
            kinds = ("a plain tensor", "a DTensor") if distributed else ("a DTensor", "a plain tensor")
            got, do = "{} beside {} outs[0]".format(*kinds), "Pass the .to_local() of all DTensors."
            refuse("merge_attention", name, got, "all DTensors, or all plain", do, TypeError)
    return reference.merge_attention(list(outs), list(lses))


def attention_with_kv_cache(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    *,
    lengths: Tensor,
    k: Tensor | None = None,
    v: Tensor | None = None,
    page_table: Tensor | None = None,
    cache_index: Tensor | None = None,
    starts: Tensor | None = None,
    cu_seqlens_q: Tensor | None = None,
    k_scale: Tensor | None = None,
    v_scale: Tensor | None = None,
    prefix: Sequence[Tensor] | None = None,
    rope: Sequence[Tensor] | None = None,
    interleaved: bool = False,
    causal: bool = True,
    window: Sequence[int | None] | None = None,
    softcap: float | None = None,
    sinks: Tensor | None = None,
    alibi_slopes: Tensor | None = None,
    scale: float | None = None,
    return_lse: bool = False,
    impl: str | None = None,
) -> Tensor | tuple[Tensor, Tensor]:
    """Attention to keys and values that are kept from call to call, with the new tokens' put there
    first.

    A sequence has its keys in the order of its tokens, key j in slot j of its row or of its pages.
    This call's k and v, if there are any, are written behind the lengths[b] that are there; k and q are
    turned by RoPE where tables are given.  The last query sees the last key.  Nothing is read by the
    host: one CUDA graph serves all lengths, and the time follows the lengths and not the room in the
    cache.

    Args:
        q: [B, Hq, Sq, D], any number of tokens; with cu_seqlens_q [T, Hq, D].  float16, bfloat16,
            float32 (float64 on the reference backend), any strides.
        k_cache: [B, S, Hkv, D], tokens before heads, or with a page_table [pages, page_size, Hkv, D];
            of q's dtype, or float8_e4m3fn; any strides.  v_cache: the same with Dv.
        lengths: int32 [B], on the device: how many keys each sequence has before this call.  It is not
            changed: add the number of new tokens to it afterwards.
        k, v: [B, Hkv, n, D] and [.., Dv], or with cu_seqlens_q [T, Hkv, D], keys and values of new
            tokens, which are written into the cache in place.  None: the cache is only read.
        page_table: int32 [B, n], which page has the keys from page_size * i on.  Any page_size.  Pages
            may be in any order, and be shared by sequences that only read them.
        cache_index: int32 [B], which row of the cache, or of page_table, a sequence has; b by default.
        starts: int32 [B], the first key that counts, behind left padding; 0 by default.
        cu_seqlens_q: int32 [B + 1], where each sequence's queries begin, as attention_varlen takes
            them, for sequences with other numbers of queries than one another.
        k_scale, v_scale: of a cache of 8 bits, float32, whose values are the cache's times the scale:
            positive, [Hkv], by head, by which new tokens are divided (what is larger than 448 scales
            becomes that); or as the cache lies, [B, S, Hkv], by token and head: they are found for new
            tokens, and written beside them.
        prefix: (k [P, Hkv, D], v [P, Hkv, Dv]), already turned, in q's dtype: keys that all sequences
            see before their own, read once for all of them.  Own keys then begin at position P; lengths
            do not count the prefix.  Not with window or alibi_slopes.
        rope: (cos, sin), tables as in flashproto.rope.  Key j is at position j - starts[b] (+ P); a
            position that they do not have gives NaN.  interleaved: as in flashproto.rope.
        causal, window, softcap, sinks, alibi_slopes, scale: as in attention, for a query's position
            among the keys.  With a bound on the left (window) the cache rolls: key j is in slot
            j modulo the room of the sequence, which has to be as much as the window and the new tokens.
        return_lse: also return the logsumexp.
        impl: the backend by name; None chooses.

    Returns: out as q lies, with Dv, and with return_lse behind it lse [B, Hq, Sq], or [Hq, T], float32.
        A query that sees no key gives 0 and -inf or its sink; so do tokens behind the last sequence.

    There is no gradient: tensors that are differentiated are refused.  Lengths, pages or rows that do
    not exist are memory that is not the cache's: on a GPU such a call reads other tensors, or writes
    over them.  On a CPU they are refused, and with FLASHPROTO_CHECKED=1 in the environment on a GPU
    too, outside of CUDA graphs and torch.compile; each call then waits for the GPU.

    Raises: TypeError, ValueError: an argument does not fit; BackendError: `impl` cannot run this call.
    Source: Dao et al., "Flash-Decoding for long-context inference" (2023); Osama et al., "Stream-K"
    (2023); Kwon et al., "PagedAttention" (2023); Juravsky et al., "Hydragen" (2024, prefix).

    Example:
        >>> k_cache, v_cache = torch.zeros(2, 32, 2, 16), torch.zeros(2, 32, 2, 16)
        >>> lengths = torch.zeros(2, dtype=torch.int32)
        >>> q, k, v = torch.randn(2, 4, 8, 16), torch.randn(2, 2, 8, 16), torch.randn(2, 2, 8, 16)
        >>> parts = []
        >>> for new in (slice(0, 5), slice(5, 6), slice(6, 8)):  # a prompt of 5 tokens, then 1, then 2
        ...     queries, keys, values = [x[:, :, new] for x in (q, k, v)]
        ...     part = flashproto.attention_with_kv_cache(
        ...         queries, k_cache, v_cache, lengths=lengths, k=keys, v=values
        ...     )
        ...     parts.append(part)
        ...     lengths += queries.shape[2]
        >>> torch.allclose(torch.cat(parts, 2), flashproto.attention(q, k, v, causal=True), atol=1e-5)
        True
    """
    name = "attention_with_kv_cache"
    listed = isinstance(prefix, (tuple, list))
    q, k, v, *pair = _autocast(k_cache, q, k, v, *((prefix or ()) if listed else ()))
    prefix = pair if listed else prefix
    check_cache(
        q,
        k_cache,
        v_cache,
        lengths,
        k,
        v,
        page_table,
        cache_index,
        starts,
        cu_seqlens_q,
        k_scale,
        v_scale,
    )
    ragged = cu_seqlens_q is not None
    heads, k_heads, v_heads = (
        x.transpose(0, 1)[None] if ragged and x is not None else x for x in (q, k, v)
    )
    D = k_cache.shape[3]
    interleaved = check_flag(name, "interleaved", interleaved)
    causal = check_flag(name, "causal", causal)
    return_lse = check_flag(name, "return_lse", return_lse)
    scale = check_scale(name, scale)
    band = _band(name, causal, window, None, 0, 0)
    by_head = {"sinks": sinks, "alibi_slopes": alibi_slopes}
    variant = _variant(name, heads, band, (softcap,), by_head, ())
    is_causal, offset, left, _ = band
    P = check_prefix(prefix, q, k_cache, v_cache, left is not None or alibi_slopes is not None)
    cos, sin = check_rope(rope, D, P, q.device)
    check_constants(
        {
            "q": q,
            "k": k,
            "v": v,
            "k_cache": k_cache,
            "v_cache": v_cache,
            "k_scale": k_scale,
            "v_scale": v_scale,
            "rope[0]": cos,
            "rope[1]": sin,
            "sinks": sinks,
            "alibi_slopes": alibi_slopes,
            "lengths": lengths,
            "page_table": page_table,
            "cache_index": cache_index,
            "starts": starts,
            "cu_seqlens_q": cu_seqlens_q,
            **{f"prefix[{i}]": x for i, x in enumerate(prefix or ())},
        }
    )
    if k is not None:
        check_apart("k_cache", k_cache, "v_cache", v_cache)
        if k_scale is not None and v_scale is not None and k_scale.ndim > 1:
            check_apart("k_scale", k_scale, "v_scale", v_scale)
    backend = backends.choose(
        name, impl, (q, k_cache, v_cache), lambda b: _cache_reasons(b, heads, k_cache, v_cache)
    )
    new = 0 if k is None else 1 if ragged else k.shape[2]
    where = (page_table, cache_index, starts, cu_seqlens_q)
    behind = None if left is None else left - offset
    rows = None if cos is None else cos.shape[0] - P
    check_lengths(heads, k_cache, lengths, new, *where, behind, rows)
    if backend == "reference":
        with without_autocast(q):
            out, lse = reference.attention_with_kv_cache(
                q,
                k_cache,
                v_cache,
                lengths,
                k=k,
                v=v,
                page_table=page_table,
                cache_index=cache_index,
                starts=starts,
                cu_seqlens_q=cu_seqlens_q,
                k_scale=k_scale,
                v_scale=v_scale,
                prefix=prefix,
                cos=cos,
                sin=sin,
                interleaved=interleaved,
                causal=is_causal,
                causal_offset=offset,
                left=left,
                scale=scale,
                softcap=softcap,
                **by_head,
            )
        return (out, lse) if return_lse else out
    if k is not None:
        by_token = k_scale is not None and k_scale.ndim > 1
        scales = (k_scale, v_scale, None, None) if by_token else (None, None, k_scale, v_scale)
        torch.ops.flashproto.append_kv_cache_(
            k_cache,
            v_cache,
            *scales[:2],
            k_heads,
            v_heads,
            *scales[2:],
            lengths,
            *where,
            cos,
            sin,
            P,
            interleaved,
            left is not None,
        )
    scale = D**-0.5 if scale is None else float(scale)
    if scale < 0:
        heads, scale = -heads, -scale
    states: tuple[Tensor | None, Tensor | None] = (None, None)
    if prefix is not None:
        if cos is not None and sin is not None:
            first = lengths + (P if ragged else P + new - heads.shape[2])
            first = first if starts is None else first - starts
            heads = _turned(heads, cos, sin, first, cu_seqlens_q, new, interleaved)
            cos = sin = None
        states = _of_prefix(heads, prefix, softcap, scale, impl)
    made = _attend(
        heads,
        k_cache,
        v_cache,
        lengths,
        where,
        (cos, sin, k_scale, v_scale),
        states,
        variant,
        (scale, new, P, interleaved),
        return_lse,
    )
    if not ragged:
        return made
    if return_lse:
        return made[0][0].transpose(0, 1), made[1][0]
    return made[0].transpose(0, 1)


def _autocast(cache: Tensor, *tensors: Tensor | None) -> tuple[Any, ...]:
    """Where autocast is on, tensors in the dtype of the cache, or of autocast beside 8 bits."""
    first = tensors[0]
    dtype = autocast_dtype(first) if isinstance(first, Tensor) else None
    if dtype is None:
        return tensors
    if isinstance(cache, Tensor) and cache.dtype in FLOATS:
        dtype = cache.dtype
    return tuple(x.to(dtype) if isinstance(x, Tensor) and x.is_floating_point() else x for x in tensors)


def _cache_reasons(backend: str, q: Tensor, k_cache: Tensor, v_cache: Tensor) -> Iterator[Reason]:
    yield from float64_reasons(backend, (q,))
    if backend == "torch":
        yield "PyTorch has no attention with a cache"
    if backend == "triton":
        if max(q.shape[3], v_cache.shape[3]) > 256:
            yield "head_dim is {}; the kernels take up to 256", max(q.shape[3], v_cache.shape[3])
        capability = backends.capability_of(q.device) if q.device.type == "cuda" else None
        if k_cache.dtype == torch.float8_e4m3fn and capability is not None and capability < (8, 9):
            yield "the cache is of 8 bits, for which kernels need compute capability 8.9"


def _turned(
    q: Tensor,
    cos: Tensor,
    sin: Tensor,
    first: Tensor,
    cu_seqlens: Tensor | None,
    new: int,
    interleaved: bool,
) -> Tensor:
    """q [B, Hq, Sq, D], the first queries at positions `first` [B]; with cu_seqlens [1, Hq, T, D],
    where they are at first + new queries - queries."""
    if cu_seqlens is None:
        return turn(q, None, cos, sin, offset=first, interleaved=interleaved, impl="triton")
    if new == 0:
        first = first - cu_seqlens.diff()
    token = torch.arange(q.shape[2], device=q.device, dtype=torch.int32)
    sequence = torch.searchsorted(cu_seqlens, token, right=True) - 1
    shift = torch.cat([first, first.new_zeros(1)]) - cu_seqlens
    return turn(
        q, None, cos, sin, positions=token + shift[sequence], interleaved=interleaved, impl="triton"
    )


def _of_prefix(
    q: Tensor, prefix: Sequence[Tensor], softcap: float | None, scale: float, impl: str | None
) -> tuple[Tensor, Tensor]:
    """(out, lse) of all queries to keys that they share: one sequence of them all."""
    B, H, Sq, D = q.shape
    together = q.transpose(0, 1).reshape(1, H, B * Sq, D)
    k, v = (x.transpose(0, 1)[None] for x in prefix)
    with without_autocast(q):
        out, lse = attention(together, k, v, softcap=softcap, scale=scale, return_lse=True, impl=impl)
    out, lse = (x[0].unflatten(1, (B, Sq)).transpose(0, 1) for x in (out, lse))
    return out, lse


def _attend(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    lengths: Tensor,
    where: tuple[Tensor | None, ...],
    tables: tuple[Tensor | None, ...],
    states: tuple[Tensor | None, Tensor | None],
    variant: Variant,
    values: tuple[float, int, int, bool],
    return_lse: bool,
) -> Any:
    tensors, ints, floats, text = pack(variant)
    settings = decode_op.Settings(tuple(ints), tuple(floats), text, *values)
    inputs = (q, k_cache, v_cache, lengths, *where, *tables, *states, *tensors)
    return decode_op.attention_kv_cache(inputs, settings, (0, 1) if return_lse else (0,))
