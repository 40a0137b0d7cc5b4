"""Decoding: attention in parts, and with a cache of keys and values."""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from .. import backends, reference
from ..backends import Reason, autocast_dtype, float64_reasons
from ..checks.attention import check_states
from ..checks.errors import refuse
from ..checks.options import check_flag
from ..checks.reading import is_readable
from ..checks.tensors import FLOATS
from ..ops.attention_hopper_reasons import hopper_cache_reasons
from ..variant import LARGEST_HEAD_DIM, NUMBERS
from .attention import attention
from .attention_request import Call, Request, attention_request
from .autocast import without_autocast
from .cached import cached
from .decode_checks import (
    Cache,
    are_values_checked,
    check_apart,
    check_cache,
    check_constants,
    check_prefix,
    check_rope,
    check_values_of,
    memory_check,
    values_check,
    written_apart,
)
from .rope import rope as turn

if backends.HAS_TRITON:
    from ..ops import attention_decode as decode_op
    from ..ops import attention_merge as merge_op


@cached
def merge_attention(
    outs: Tensor | Sequence[Tensor],
    lses: Tensor | Sequence[Tensor],
    *,
    impl: str | None = None,
) -> tuple[Tensor, Tensor]:
    """Attention over all keys, from the results of attention over some of the keys each.

        lse = log(sum_i exp(lse_i))         out = sum_i exp(lse_i - lse) out_i

    It joins splits of a sequence, a prefix that sequences share with what each has of its own, and
    the shards of ring attention.  With sinks, one of the parts alone may have them.

    Args:
        outs: tensors [..., Dv] of one shape, or all stacked [n, ..., Dv]; any floating dtypes.
        lses: as many [...], natural logarithm, as return_lse gives them (of attention_varlen lse.mT,
            to lie as out does).  A part in which a row sees no key has -inf there.  Such a part counts
            for nothing, whatever its out is, and its gradients are 0.
        impl: the backend by name; None chooses.

    Returns: (out, lse) of attention over all keys: out [..., Dv] in the widest dtype of outs, lse [...]
        in float32 (float64 if anything is float64), in which sums are taken.  A row that sees no key in
        any part gives 0 and -inf.  Differentiable in all outs and lses.
    Raises: TypeError, ValueError: an argument does not fit; BackendError: `impl` cannot run this call.
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
    for name, given in (("outs", outs), ("lses", lses)):
        if any(backends.has_dtensors((x,)) != distributed for x in given):
            kinds = ("a plain tensor", "a DTensor") if distributed else ("a DTensor", "a plain tensor")
            got, do = "{} beside {} outs[0]".format(*kinds), "Pass the .to_local() of all DTensors."
            refuse("merge_attention", name, got, "all DTensors, or all plain", do, TypeError)
    stacked = isinstance(outs, Tensor) and isinstance(lses, Tensor)
    states: Any = (outs, lses) if stacked else (*outs, *lses)
    backend = backends.choose("merge_attention", impl, states, lambda b: _merge_reasons(b, states))
    if backend != "triton":
        return reference.merge_attention(list(outs), list(lses))
    dtype = functools.reduce(torch.promote_types, [x.dtype for x in states[: len(states) // 2]])
    if len(outs) > MOST_PARTS:
        return _merge_many(list(outs), list(lses), dtype)
    settings = merge_op.Settings(stacked, dtype)
    if isinstance(outs, Tensor) != isinstance(lses, Tensor):  # not all states are the caller's tensors
        return merge_op.attention_merge(states, settings, (0, 1))
    names = [f"{x}[{i}]" for x in ("outs", "lses") for i in range(len(states) // 2)]
    return merge_op.attention_merge.bind(states, settings, (0, 1), names)


LARGEST_MERGED = 1024  # head dim, of which a program has whole rows in registers
MOST_PARTS = 16  # of one launch, whose kernel is written out for their number


def _merge_reasons(backend: str, states: Sequence[Tensor]) -> Iterator[Reason]:
    yield from float64_reasons(backend, states)
    if backend == "triton" and states[0].shape[-1] > LARGEST_MERGED:
        yield "head_dim is {}; the kernels take up to {}", states[0].shape[-1], LARGEST_MERGED


def _merge_many(outs: Sequence[Tensor], lses: Sequence[Tensor], dtype: torch.dtype) -> Any:
    """In groups, whose results in float32 are parts again."""
    settings = merge_op.Settings(False, torch.float32)
    while len(outs) > MOST_PARTS:
        groups = [slice(i, i + MOST_PARTS) for i in range(0, len(outs), MOST_PARTS)]
        made = [
            merge_op.attention_merge((*outs[group], *lses[group]), settings, (0, 1)) for group in groups
        ]
        outs, lses = zip(*made, strict=True)
    settings = merge_op.Settings(False, dtype)
    return merge_op.attention_merge((*outs, *lses), settings, (0, 1))


@cached
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
    num_splits: int | None = None,
    impl: str | None = None,
) -> Tensor | tuple[Tensor, Tensor]:
    """Attention to keys and values that are kept from call to call, with the new tokens' put there
    first.

    A sequence has its keys in the order of its tokens, key j in slot j of its row or of its pages.
    This call's k and v, if there are any, are written behind the lengths[b] that are there; k and q are
    rotated by RoPE where tables are given.  The last query sees the last key.  Nothing is read by the
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
        prefix: (k [P, Hkv, D], v [P, Hkv, Dv]), already rotated, in q's dtype: keys that all sequences
            see before their own, read once for all of them.  Own keys then begin at position P; lengths
            do not count the prefix.  Not with window or alibi_slopes.
        rope: (cos, sin), tables as in flashproto.rope.  Key j is at position j - starts[b] (+ P); a
            position that they do not have gives NaN.  interleaved: as in flashproto.rope.
        causal, window, softcap, sinks, alibi_slopes, scale: as in attention, for a query's position
            among the keys.  With a bound on the left (window) the cache rolls: key j is in slot
            j modulo the room of the sequence, which has to be as much as the window and the new tokens.
        return_lse: also return the logsumexp.
        num_splits: into how many parts at most the keys of sequences that are as long as each other are
            split; 1: never, but behind a prefix.  None chooses.
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
    cache = Cache(
        k_cache, v_cache, lengths, k, v, page_table, cache_index, starts, cu_seqlens_q, k_scale, v_scale
    )
    check_cache(q, cache)
    interleaved = check_flag(name, "interleaved", interleaved)
    by_head: dict[str, Any] = {"sinks": sinks, "alibi_slopes": alibi_slopes}
    pairs = {"rope": rope, "prefix": prefix}
    held = {
        f"{name}[{i}]": x
        for name, pair_of in pairs.items()
        if isinstance(pair_of, (tuple, list))
        for i, x in enumerate(pair_of)
    }
    check_constants({"q": q, **cache._asdict(), **by_head, **held})
    ragged = cu_seqlens_q is not None
    request = attention_request(
        name,
        q.transpose(0, 1)[None] if ragged else q,
        *(x.transpose(1, 2) for x in (k_cache, v_cache)),
        inputs={"q": q},
        lengths=(0, 0),
        causal=causal,
        window=window,
        scale=scale,
        return_lse=return_lse,
        num_splits=num_splits,
        softcap=softcap,
        **by_head,
    )
    variant = request.variant
    left = variant.named.get("left")
    P = check_prefix(prefix, q, k_cache, v_cache, left is not None or alibi_slopes is not None)
    cos, sin = check_rope(rope, k_cache.shape[3], P, q.device)
    given: dict[str, Any] = {"q": q, **cache._asdict(), "rope[0]": cos, "rope[1]": sin}
    apart = written_apart(cache)
    for names in apart:
        check_apart(names, *map(given.__getitem__, names))
    any_of = backends.is_any(impl)
    backend = backends.choose(
        name, impl, (q, k_cache, v_cache), lambda b: _cache_reasons(b, request, cache, P, any_of)
    )
    limits = (
        None if left is None else left - variant.offset,
        None if cos is None else cos.shape[0] - P,
    )
    check_values_of(q, cache, *limits)
    if backend == "torch":
        with without_autocast(q):
            return _by_torch(request, q, cache, cos=cos, sin=sin, interleaved=interleaved)
    if backend == "reference":
        with without_autocast(q):
            out, lse = reference.attention_with_kv_cache(
                q,
                **cache._asdict(),
                prefix=prefix,
                cos=cos,
                sin=sin,
                interleaved=interleaved,
                causal=variant.kind.CAUSAL,
                causal_offset=variant.offset,
                scale=request.scale,
                **variant.named,
            )
        return (out, lse) if len(request.results) > 1 else out
    place = (P, interleaved)
    appended = None if k is None else _append(given, *place, left is not None)
    scale = k_cache.shape[3] ** -0.5 if request.scale is None else float(request.scale)
    if prefix is None and scale >= 0:
        made = _attend(request, given, scale, backend, cache.new, *place)
        if isinstance(made, Call):
            made = made if appended is None else made.behind(appended)
            for names in apart:
                made = made.checked(names, memory_check(names, *map(given.__getitem__, names)))
            if are_values_checked(lengths):
                present = ["q", *(x for x in Cache._fields if given[x] is not None)]
                made = made.checked(present, values_check(present, limits))
        return made
    if isinstance(appended, Call):
        appended(*map(given.__getitem__, appended.names or ()))
    if prefix is not None:
        heads = -request.q if scale < 0 else request.q
        if cos is not None and sin is not None:
            first = lengths + (P if ragged else P + cache.new - heads.shape[2])
            first = first if starts is None else first - starts
            heads = _turned(heads, cos, sin, first, cu_seqlens_q, cache.new, interleaved)
        options = {n: x for n, x in variant.named.items() if n in NUMBERS}
        states = _of_prefix(heads, prefix, -scale if scale < 0 else scale, impl, options)
        q = heads[0].transpose(0, 1) if ragged else heads
        if ragged:
            states = states[0][0].transpose(0, 1), states[1][0]
        given |= {"q": q, "rope[0]": None, "rope[1]": None}
        given |= dict(zip(("prefix_out", "prefix_lse"), states, strict=True))
    else:
        given["q"] = -q
    scale = -scale if scale < 0 else scale
    made = _attend(request, given, scale, backend, cache.new, *place)
    return made(*map(given.__getitem__, made.names or ())) if isinstance(made, Call) else made


def _by_torch(request: Request, q: Tensor, cache: Cache, **turns: Any) -> Tensor:
    """Sequence by sequence, whose keys are read where they lie if they lie side by side."""
    rolls = "left" in request.variant.named
    filled = reference.fill_kv_cache(q, *cache, P=0, rolls=rolls, **turns)
    slots, made = filled.slots, []
    numbers = zip(*(x.tolist() for x in filled[1:4]), slots.row.tolist(), strict=True)
    for b, (queries, keys, start, row) in enumerate(numbers):
        at: Any = slice(row, row + 1), slice(start, max(start, keys))
        if rolls or slots.pages is not None:
            first = max(start, keys - slots.capacity)
            j = torch.arange(first, max(first, keys))[None]
            own = slots._replace(row=slots.row[b : b + 1])
            at = own.place(j, torch.ones_like(j, dtype=torch.bool))
        k, v = (x[at].transpose(1, 2) for x in (cache.k_cache, cache.v_cache))
        if queries:
            made.append(request.of_sequence(filled.q[b : b + 1, :, :queries], k, v).run_by("torch"))
    if cache.cu_seqlens_q is None:
        return torch.cat(made)
    out = q.new_zeros(*q.shape[:2], cache.v_cache.shape[3])
    if made:
        together = torch.cat(made, 2)[0].transpose(0, 1)
        out[: together.shape[0]] = together
    return out


WHERE = ("lengths", "page_table", "cache_index", "starts", "cu_seqlens_q", "rope[0]", "rope[1]")


def _append(given: dict[str, Any], P: int, interleaved: bool, rolls: bool) -> Any:
    """Puts the new tokens into the cache: a Call, or done."""
    scales: tuple[Any, ...] = ("k_scale", "v_scale", None, None)
    if given["k_scale"] is None or given["k_scale"].ndim == 1:
        scales = (None, None, "k_scale", "v_scale")
    names = ("k_cache", "v_cache", *scales[:2], "k", "v", *scales[2:], *WHERE)
    settings = decode_op.AppendSettings(P, interleaved, rolls)
    return _bind(decode_op.append_kv_cache, given, names, settings, ())


def _attend(
    request: Request,
    given: dict[str, Any],
    scale: float,
    backend: str,
    new: int,
    P: int,
    interleaved: bool,
) -> Any:
    """Attention to the cache: a Call, or its results."""
    place = new, P, interleaved, request.num_splits
    settings = decode_op.Settings(request.variant.form, scale, backend, *place)
    own = request.variant.tensors
    names = ("q", "k_cache", "v_cache", *WHERE, "k_scale", "v_scale", "prefix_out", "prefix_lse", *own)
    given |= own
    return _bind(decode_op.attention_kv_cache, given, names, settings, request.results)


def _bind(
    operator: Any, given: dict[str, Any], names: Sequence[Any], settings: Any, returns: tuple[int, ...]
) -> Any:
    inputs = [given.get(name) for name in names]
    there = [name for name, x in zip(names, inputs, strict=True) if x is not None]
    return operator.bind(inputs, settings, returns, there)


def _autocast(cache: Tensor, *tensors: Tensor | None) -> tuple[Any, ...]:
    """Where autocast is on, tensors in the dtype of the cache, or of autocast beside 8 bits."""
    first = tensors[0]
    dtype = autocast_dtype(first) if isinstance(first, Tensor) else None
    if dtype is None:
        return tensors
    if isinstance(cache, Tensor) and cache.dtype in FLOATS:
        dtype = cache.dtype
    return tuple(x.to(dtype) if isinstance(x, Tensor) and x.is_floating_point() else x for x in tensors)


def _cache_reasons(
    backend: str, request: Request, cache: Cache, P: int, any_of: bool
) -> Iterator[Reason]:
    """any_of: whether no backend was asked for."""
    q, k_cache, v_cache = request.q, cache.k_cache, cache.v_cache
    if backend == "torch":
        yield from request.reasons(backend)
        if P or k_cache.dtype != q.dtype:
            yield "it takes no prefix and no cache of 8 bits"
        if not all(is_readable(x) for x in cache if x is not None):
            yield "it takes sequences one by one, and their lengths cannot be read here"
    if backend == "hopper":
        yield from request.reasons(backend)
        if q.shape[3] != v_cache.shape[3]:
            yield "the cache has values of head_dim {} and q has {}", v_cache.shape[3], q.shape[3]
        rolls = "left" in request.variant.named
        sequences = cache.lengths.shape[0]
        table = cache.page_table
        yield from hopper_cache_reasons(q, k_cache, table, sequences, P > 0, rolls, any_of)
    if backend == "triton":
        yield from float64_reasons(backend, (q,))
        widest = max(q.shape[3], v_cache.shape[3])
        if widest > LARGEST_HEAD_DIM:
            yield "head_dim is {}; the kernels take up to {}", widest, LARGEST_HEAD_DIM
        capability = backends.capability_of(q.device) if q.device.type == "cuda" else None
        if k_cache.dtype == torch.float8_e4m3fn and capability is not None and capability < (8, 9):
            yield "the cache has 8 bits, for which kernels need compute capability 8.9"


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
    q: Tensor, prefix: Sequence[Tensor], scale: float, impl: str | None, options: dict[str, Any]
) -> tuple[Tensor, Tensor]:
    """(out, lse) of all queries to keys that they share: one sequence of them all."""
    B, H, Sq, D = q.shape
    together = q.transpose(0, 1).reshape(1, H, B * Sq, D)
    k, v = (x.transpose(0, 1)[None] for x in prefix)
    with without_autocast(q):
        out, lse = attention(together, k, v, scale=scale, return_lse=True, impl=impl, **options)
    out, lse = (x[0].unflatten(1, (B, Sq)).transpose(0, 1) for x in (out, lse))
    return out, lse
