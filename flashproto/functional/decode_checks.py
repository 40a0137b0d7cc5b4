"""What attention_with_kv_cache refuses: shapes and dtypes always, what is in lengths and page tables
where it can be read for nothing, or in the checked mode."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from operator import mul
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch._C import _are_functorch_transforms_active as transforms_active
from torch.compiler import is_compiling

from .. import backends
from ..checks import reading
from ..checks.attention import check_attention, converted
from ..checks.errors import described, matches, refuse
from ..checks.heads import check_tables
from ..checks.reading import can_be_read, check_values, watched
from ..checks.tensors import check_on, check_tensor

NAME = "attention_with_kv_cache"


def check_int32(argument: str, x: object, device: torch.device, shape: Sequence[int | None]) -> None:
    """x int32 of `shape`, None for any size."""
    words = ", ".join("n" if n is None else str(n) for n in shape) if not is_compiling() else "..."
    if not isinstance(x, Tensor) or x.dtype != torch.int32:
        takes = f"an int32 tensor [{words}]"
        refuse(NAME, argument, *converted(argument, x, "int", "torch.int32", takes), TypeError)
    check_on(NAME, argument, x, device)
    if x.ndim != len(shape) or any(
        n is not None and n != m for n, m in zip(shape, x.shape, strict=True)
    ):
        do = "Pass one for each sequence."
        refuse(NAME, argument, f"of shape {list(x.shape)}", f"int32 of shape [{words}]", do)


class Cache(NamedTuple):
    """What attention_with_kv_cache is given beside q, by its names."""

    k_cache: Tensor
    v_cache: Tensor
    lengths: Tensor
    k: Tensor | None
    v: Tensor | None
    page_table: Tensor | None
    cache_index: Tensor | None
    starts: Tensor | None
    cu_seqlens_q: Tensor | None
    k_scale: Tensor | None
    v_scale: Tensor | None

    @property
    def capacity(self) -> int:
        """How many keys of a sequence there is room for."""
        return self.k_cache.shape[1] * (1 if self.page_table is None else self.page_table.shape[1])

    @property
    def new(self) -> int:
        """How many keys each sequence gets; with cu_seqlens_q 1 if one for each query."""
        if self.k is None:
            return 0
        return self.k.shape[2] if self.cu_seqlens_q is None else 1


def check_cache(q: Tensor, cache: Cache) -> None:
    """Shapes, dtypes and devices of what says where queries and keys are."""
    k_cache, v_cache, lengths, k, v, page_table, cache_index, starts, cu_seqlens_q, *scales = cache
    check_tensor(NAME, "q", q)
    ragged = cu_seqlens_q is not None
    if cu_seqlens_q is not None:
        check_int32("cu_seqlens_q", cu_seqlens_q, q.device, [None])
        if cu_seqlens_q.shape[0] == 0:
            refuse(NAME, "cu_seqlens_q", "empty", "int32 [B + 1]", "Begin with 0.")
    if q.ndim != (3 if ragged else 4):
        takes = "[T, Hq, D] with cu_seqlens_q" if ragged else "4 dimensions [B, Hq, Sq, D]"
        do = "Put the tokens of all sequences side by side, or leave cu_seqlens_q out."
        refuse(NAME, "q", f"of shape {list(q.shape)}", takes, do)
    dtypes = (q.dtype, torch.float8_e4m3fn)
    for name, x in (("k_cache", k_cache), ("v_cache", v_cache)):
        if not isinstance(x, Tensor):
            refuse(NAME, name, described(x), "a torch.Tensor", "Pass a tensor.", TypeError)
        if x.dtype not in dtypes:
            takes = f"q's dtype, {q.dtype}, or torch.float8_e4m3fn"
            refuse(NAME, name, f"of dtype {x.dtype}", takes, "Make a cache of that dtype.", TypeError)
        if x.layout != torch.strided:
            refuse(NAME, name, f"of layout {x.layout}", "a strided tensor", "Call .to_dense().")
        if x.ndim != 4:
            takes = "[B, S, Hkv, D], or [pages, page_size, Hkv, D]"
            refuse(NAME, name, f"of shape {list(x.shape)}", takes, "Tokens come before heads.")
    wanted = (*k_cache.shape[:3], k_cache.dtype)
    if (*v_cache.shape[:3], v_cache.dtype) != wanted:
        got = f"{v_cache.dtype} of shape {list(v_cache.shape)}"
        same = f"that of k_cache, {k_cache.dtype} {list(k_cache.shape)}, but for head_dim"
        refuse(NAME, "v_cache", got, same, "Pass keys and values of the same tokens.")
    heads = q.transpose(0, 1)[None] if ragged else q
    _check_heads(q, heads, k_cache, v_cache, page_table is not None)
    B = q.shape[0] if cu_seqlens_q is None else cu_seqlens_q.shape[0] - 1
    check_int32("lengths", lengths, q.device, [B])
    for name, optional in (("starts", starts), ("cache_index", cache_index)):
        if optional is not None:
            check_int32(name, optional, q.device, [B])
    rows = B if cache_index is None else None
    if page_table is not None:
        check_int32("page_table", page_table, q.device, [rows, None])
    elif rows is not None and k_cache.shape[0] != rows:
        do = "Pass cache_index to say which rows they have."
        refuse(NAME, "k_cache", f"of {k_cache.shape[0]} rows", f"a row for each of {B} sequences", do)
    _check_new(q, k_cache, v_cache, k, v, ragged, cache.capacity)
    _check_scales(k_cache, *scales)


def _check_heads(given, q, k_cache, v_cache, in_pages):
    """Heads and head dims of q [B, Hq, Sq, D], made of the one given, and the caches."""
    (B, Hq, Sq), (S, Hkv) = q.shape[:3], k_cache.shape[1:3]
    if Hkv and Hq % Hkv:
        dims = "[B, Hq, Sq, D]" if given.ndim == 4 else "[T, Hq, D]"
        takes = lambda: (  # noqa: E731
            f"a number of heads that divides q's; q has {Hq}, as {dims} = {list(given.shape)}"
        )
        do = "Pass as many query heads for each head of the cache"
        if given.ndim == 4 and Sq and Sq % Hkv == 0:
            do = "Where q, k and v are [B, S, H, D], call .transpose(1, 2) of each"
        elif S and Hkv > S and Hq % S == 0 and not in_pages:
            do = "Where the caches are [B, Hkv, S, D], call .transpose(1, 2) of each"
        refuse(NAME, "k_cache", f"of shape {list(k_cache.shape)}, {Hkv} heads", takes, f"{do}.")
    like = [x.new_empty((B, x.shape[2], 0, x.shape[3]), dtype=q.dtype) for x in (k_cache, v_cache)]
    check_attention(NAME, q, *like, ("q", "k_cache", "v_cache"))


def _check_new(q, k_cache, v_cache, k, v, ragged, capacity):
    if (k is None) != (v is None):
        missing = "k" if k is None else "v"
        refuse(NAME, missing, None, "the new tokens' own, as the other", "Pass both or neither.")
    if k is None:
        return
    _, _, Hkv, D = k_cache.shape
    for name, x, width in (("k", k, D), ("v", v, v_cache.shape[3])):
        check_tensor(NAME, name, x)
        check_on(NAME, name, x, q.device)
        if x.dtype != q.dtype:
            takes, do = f"the dtype of q, {q.dtype}", f"Convert it: {name}.to(q.dtype)."
            refuse(NAME, name, f"of dtype {x.dtype}", takes, do, TypeError)
        if ragged:
            fits = x.ndim == 3 and x.shape == (q.shape[0], Hkv, width)
            takes = lambda: f"{[q.shape[0], Hkv, width]}, a token for each query"  # noqa: B023, E731
        else:
            n = k.shape[2] if name == "v" else "n"
            fits = x.ndim == 4 and x.shape == (q.shape[0], Hkv, k.shape[2], width)
            takes = lambda: f"[{q.shape[0]}, {Hkv}, {n}, {width}]"  # noqa: B023, E731
        if not fits:
            do = "Heads come before tokens in q, k and v, but for tokens side by side (cu_seqlens_q)."
            refuse(NAME, name, f"of shape {list(x.shape)}", takes, do)
    if not ragged and k.shape[2] > capacity:
        takes = lambda: f"at most the {capacity} tokens that the cache has room for"  # noqa: E731
        refuse(NAME, "k", f"of {k.shape[2]} tokens", takes, "Make a longer cache.")


def _check_scales(k_cache, k_scale, v_scale):
    eight = k_cache.dtype == torch.float8_e4m3fn
    for name, x in (("k_scale", k_scale), ("v_scale", v_scale)):
        if eight and x is None:
            takes = "float32 [Hkv], or [B, S, Hkv] as the cache lies"
            refuse(NAME, name, None, takes, "Scales are needed with a cache of 8 bits.")
        if x is None:
            continue
        if not eight:
            refuse(NAME, name, described(x), "None beside a cache of q's dtype", "Leave it out.")
        if not isinstance(x, Tensor) or x.dtype != torch.float32:
            takes = "a float32 tensor, [Hkv], or [B, S, Hkv] as the cache lies"
            refuse(NAME, name, *converted(name, x, "float", "torch.float32", takes), TypeError)
        check_on(NAME, name, x, k_cache.device)
        if not any(matches(x.shape, k_cache.shape[d:3]) for d in (0, 2)) or x.ndim != k_scale.ndim:
            takes = lambda: f"{[k_cache.shape[2]]} or {list(k_cache.shape[:3])}, both alike"  # noqa: E731
            refuse(NAME, name, f"of shape {list(x.shape)}", takes, "Pass scales by head or by token.")


def check_scales(k_scale: Tensor | None, v_scale: Tensor | None) -> None:
    """The values of scales by head."""
    for name, x in (("k_scale", k_scale), ("v_scale", v_scale)):
        if x is None or x.ndim > 1 or not can_be_read(x):
            continue
        if (wrong := ~((x > 0) & x.isfinite())).any():
            at = int(wrong.nonzero()[0])
            takes, do = "positive finite numbers", "Pass 1 for a head whose keys are all 0."
            refuse(NAME, name, f"{float(x[at])} at [{at}]", takes, do)


def check_rope(rope: Any, D: int, P: int, device: torch.device) -> tuple[Tensor | None, Tensor | None]:
    """(cos, sin) [length, R], 2 R <= D, with rows for a prefix of P keys."""
    if rope is None:
        return None, None
    if not isinstance(rope, (tuple, list)) or len(rope) != 2:
        do = "flashproto.nn.rope_tables makes them."
        refuse(NAME, "rope", described(rope), "(cos, sin), tables of angles", do, TypeError)
    cos, sin = rope
    check_tables(NAME, 1, 0, D, device, cos, sin, None, 0)
    if cos.shape[0] < P:
        takes = lambda: f"more rows than the {P} tokens of the prefix"  # noqa: E731
        do = "Make longer tables: flashproto.nn.rope_tables."
        refuse(NAME, "rope", f"of {cos.shape[0]} rows", takes, do)
    return cos, sin


def check_prefix(prefix: Any, q: Tensor, k_cache: Tensor, v_cache: Tensor, others: bool) -> int:
    """How many tokens it has; prefix (k [P, Hkv, D], v [P, Hkv, Dv]) of q's dtype, or None.

    others: whether there is a window or ALiBi.
    """
    if prefix is None:
        return 0
    pair = isinstance(prefix, (tuple, list)) and len(prefix) == 2
    if not pair or not all(isinstance(x, Tensor) for x in prefix):
        do = "Pass one row of a cache."
        refuse(NAME, "prefix", described(prefix), "(k, v), [P, Hkv, D] each", do, TypeError)
    if others:
        takes, do = "None beside window and alibi_slopes", "Copy the prefix into each cache."
        refuse(NAME, "prefix", "given", takes, do)
    for x, cache in zip(prefix, (k_cache, v_cache), strict=True):
        check_on(NAME, "prefix", x, q.device)
        if x.dtype != q.dtype or x.ndim != 3 or x.shape[1:] != cache.shape[2:]:
            fits = f"{q.dtype} of shape [P, {cache.shape[2]}, {cache.shape[3]}]"
            refuse(NAME, "prefix", f"{x.dtype} of shape {list(x.shape)}", fits, "Pass (k, v).")
    if prefix[0].shape[0] != prefix[1].shape[0]:
        takes = "keys and values of the same tokens"
        refuse(NAME, "prefix", f"of {prefix[1].shape[0]} values", takes, "Pass (k, v).")
    return prefix[0].shape[0]


def check_constants(tensors: dict[str, Any]) -> None:
    """No DTensor and no tensor that is differentiated; what is no tensor is for other checks."""
    recording = torch.is_grad_enabled()
    given = {name: x for name, x in tensors.items() if isinstance(x, Tensor)}
    for name, x in given.items():
        if backends.is_dtensor(x):
            refuse(NAME, name, "a DTensor", "a plain tensor", f"Pass {name}.to_local().", TypeError)
        if recording and x.requires_grad:
            takes, do = "constants: there is no gradient", "Call it under torch.no_grad()."
            refuse(NAME, name, "a tensor that requires grad", takes, do)
    if backends.has_tangents(list(given.values())):
        name = next(name for name, x in given.items() if backends.has_tangents([x]))
        takes, do = (
            "constants: there is no gradient",
            "Call it outside of forward mode.",
        )
        refuse(NAME, name, "a tensor with a tangent", takes, do)


def written_apart(cache: Cache) -> list[tuple[str, str]]:
    """Names of what is written in pairs."""
    if cache.k is None:
        return []
    by_token = cache.k_scale is not None and cache.k_scale.ndim > 1
    return [("k_cache", "v_cache"), *([("k_scale", "v_scale")] if by_token else [])]


def memory_check(names: tuple[str, str], x: Tensor, y: Tensor) -> Callable[[Tensor, Tensor], None]:
    """check_apart for tensors like x and y, quick where one lies behind the other."""
    x_bytes, y_bytes = (
        z.element_size() * (1 + sum((n - 1) * s for n, s in zip(z.shape, z.stride(), strict=True)))
        for z in (x, y)
    )

    def check(x: Tensor, y: Tensor) -> None:
        if -y_bytes < y.data_ptr() - x.data_ptr() < x_bytes:
            check_apart(names, x, y)

    return check


def check_apart(names: tuple[str, str], x: Tensor, y: Tensor) -> None:
    """That what is written into x and y lies apart: no element of x or y in the place of another.  What
    can be told from strides, in eager calls."""
    if is_compiling() or watched() or transforms_active():
        return
    (name, other), strides = names, (x.stride(), y.stride())
    for argument, z, own in zip((name, other), (x, y), strides, strict=True):
        if 0 in own and any(n > 1 and stride == 0 for n, stride in zip(z.shape, own, strict=True)):
            takes = "memory of its own for each element where tokens are written"
            refuse(NAME, argument, "an expanded tensor", takes, f"Call {argument}.contiguous().")
    if x.is_meta:  # which has no memory
        return
    first, second = sorted((x.data_ptr(), y.data_ptr()))
    distance = (second - first) / x.element_size()
    sizes = x.shape if first == x.data_ptr() else y.shape
    if strides[0] == strides[1] and distance < max(map(mul, sizes, strides[0])):
        for size, stride in sorted(zip(sizes, strides[0], strict=True), key=lambda n: -n[1]):
            distance -= min(distance // max(stride, 1), size - 1) * stride
    if x.numel() and distance == 0:
        takes = f"other memory than {name} where tokens are written"
        do = "Make two caches, or write the tokens first and leave k and v out."
        refuse(NAME, other, f"in the memory of {name}", takes, do)


# --- what is in them ------------------------------------------------------------------------------


def are_values_checked(x: Tensor) -> bool:
    """Whether calls with tensors like x look at values, as far as they can be read."""
    return x.is_cpu or reading.CHECKED


def values_check(present: Sequence[str], limits: tuple[Any, Any]) -> Callable[..., None]:
    """check_values_of as a function of q and those tensors of a Cache that are present."""
    absent = dict.fromkeys(Cache._fields)

    def check(*tensors: Tensor) -> None:
        named: Any = absent | dict(zip(present, tensors, strict=True))
        check_values_of(named.pop("q"), Cache(**named), *limits)

    return check


def check_values_of(q: Tensor, cache: Cache, left: int | None, rows_of_rope: int | None) -> None:
    """That all keys and pages which the call reads or writes are there, and scales are positive.

    left: how far behind itself a query sees, None for all.  rows_of_rope: behind those of a prefix.
    """
    k_cache, _, lengths, _, _, page_table, cache_index, starts, cu_seqlens_q, *scales = cache
    check_scales(*scales)
    if not can_be_read(lengths) or not lengths.shape[0]:
        return
    new, capacity = cache.new, cache.capacity
    queries: Tensor | int = q.shape[2] if cu_seqlens_q is None else cu_seqlens_q.diff()
    if cu_seqlens_q is not None:
        wrong = torch.cat([cu_seqlens_q[:1] != 0, cu_seqlens_q.diff() < 0]) | (
            cu_seqlens_q > q.shape[0]
        )
        takes = f"0 first, not less than before, at most the {q.shape[0]} tokens"
        check_values(NAME, "cu_seqlens_q", cu_seqlens_q, wrong, takes, "Pass the sum of lengths.")
    added = new * queries if cu_seqlens_q is not None else new
    keys = lengths + added
    do = "Count the keys that a sequence has before the call."
    check_values(NAME, "lengths", lengths, lengths < 0, "0 or more keys", do)
    wrong = keys > capacity
    takes = f"what leaves room for the new tokens in a cache of {capacity} keys"
    if left is not None:  # which may roll
        wrong = wrong & (torch.full_like(lengths, left, dtype=torch.int64) + queries > capacity)
        takes += ", more only where the cache holds all of the window"
    check_values(NAME, "lengths", lengths, wrong, takes, "Make a longer cache.")
    first = torch.zeros_like(lengths)
    if starts is not None:
        wrong = (starts < 0) | (starts > keys)
        takes = "0 to the keys that its sequence has"
        check_values(NAME, "starts", starts, wrong, takes, "Pass the length of its padding.")
        first = starts
    if rows_of_rope is not None:
        takes = f"up to {rows_of_rope} keys, the rows of rope's tables behind a prefix"
        do = "Make longer tables: flashproto.nn.rope_tables."
        check_values(NAME, "lengths", lengths, keys - first > rows_of_rope, takes, do)
    rows = k_cache.shape[0] if page_table is None else page_table.shape[0]
    if cache_index is not None:
        wrong = (cache_index < 0) | (cache_index >= rows)
        check_values(NAME, "cache_index", cache_index, wrong, f"rows 0 to {rows - 1}", "Pass rows.")
    t = torch.arange(int((keys - lengths).max()), device=keys.device)
    written = t < (keys - lengths)[:, None]
    slot = (lengths.long()[:, None] + t) % max(capacity, 1)  # of new tokens
    if page_table is None:
        if cache_index is not None:
            _check_own_slots("cache_index", cache_index[:, None], slot, written, capacity)
        return
    table = page_table if cache_index is None else page_table[cache_index.long()]
    size, columns = k_cache.shape[1], page_table.shape[1]
    if left is not None:
        first = torch.maximum(first, lengths + added - queries - left)
    begin = (first // max(size, 1))[:, None]
    column = torch.arange(columns, device=table.device)
    used = begin + (column - begin) % max(columns, 1) <= (keys[:, None] - 1) // max(size, 1)
    wrong = used & ((table < 0) | (table >= k_cache.shape[0]))
    takes = f"pages 0 to {k_cache.shape[0] - 1} where a sequence has keys"
    check_values(NAME, "page_table", table, wrong, takes, "Give each sequence its pages.")
    if t.shape[0]:
        pages = table.gather(1, slot // size)
        _check_own_slots("page_table", pages, slot % size, written, size)


def _check_own_slots(name: str, page: Tensor, slot: Tensor, written: Tensor, size: int) -> None:
    """That no two new tokens are put into the same slot [B, n] of the same page [B, n | 1]."""
    places, counts = (page.long() * size + slot)[written].unique(return_counts=True)
    if (counts > 1).any():
        place = int(places[counts > 1][0])
        of = "page" if name == "page_table" else "row"
        got = f"one that puts several new tokens into slot {place % size} of {of} {place // size}"
        do = "Copy what sequences share before they write to it."
        refuse(NAME, name, got, "a slot for each new token", do)
