"""Attention in parts, and attention whose keys and values are kept from call to call."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .attention import Pairs, largest, modified, visible
from .rope import rope
from .states import (
    compute_dtype,
    online_softmax_finish,
    online_softmax_merge,
    online_softmax_start,
)


def merge_attention(outs: Sequence[Tensor], lses: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
    """Attention over the union of sets of keys from what attention over each of them gave.

    outs [..., Dv] are averages of values by weights that sum to exp(lse), lses [...]:

        lse = log(sum_i exp(lse_i))         out = sum_i exp(lse_i - lse) out_i

    Each is the online softmax's state (lse, 1), with out beside it.  They are merged as they come, in
    float32 (float64 if one of them is).  A part without a key of a row (lse -inf) counts for nothing,
    whatever its out is; rows without a key anywhere give 0 and -inf.
    """
    dtype = compute_dtype(outs[0].dtype)
    for x in (*outs[1:], *lses):
        dtype = torch.promote_types(dtype, x.dtype)
    m, l = online_softmax_start(lses[0].shape, lses[0].to(dtype))
    total = outs[0].new_zeros(outs[0].shape, dtype=dtype)
    for out, lse in zip(outs, lses, strict=True):
        values = out.masked_fill(lse.isneginf()[..., None], 0.0)
        m, l, w1, w2 = online_softmax_merge(m, l, lse.to(dtype), torch.ones_like(l))
        total = w1[..., None] * total + w2[..., None] * values
    lse, normaliser = online_softmax_finish(m, l)
    own = outs[0].dtype
    for x in outs[1:]:
        own = torch.promote_types(own, x.dtype)
    return (normaliser[..., None] * total).to(own), lse


LARGEST = 448.0  # of float8_e4m3fn


class Slots(NamedTuple):
    """Where the keys of sequences are.

    row: [B], each sequence's in the cache, or of pages [rows, n], None for a cache without pages.
    size: of a page, or of a row without pages.  rolls: whether key j is in slot j % capacity.
    """

    row: Tensor
    pages: Tensor | None
    size: int
    capacity: int
    rolls: bool

    def place(self, j: Tensor, exists: Tensor) -> tuple[Tensor, Tensor]:
        """(page, slot in it) of key j [B, n] of each sequence; of those that exist."""
        slot = torch.where(exists, j % max(self.capacity, 1) if self.rolls else j, 0)
        row = self.row[:, None].expand_as(slot)
        if self.pages is None:
            return row, slot
        page = self.pages[row, slot // self.size]
        return torch.where(exists, page, 0), slot % self.size


class Filled(NamedTuple):
    """A cache with the new tokens in it, of B sequences.

    q: [B, Hq, Sq, D], turned.  queries, keys, start: [B], their numbers, and the first key that counts.
    tokens: of sequences side by side, each token's index in its sequence, and the number of that.
    """

    q: Tensor
    queries: Tensor
    keys: Tensor
    start: Tensor
    slots: Slots
    tokens: tuple[Tensor, Tensor] | None


def fill_kv_cache(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    lengths: Tensor,
    k: Tensor | None,
    v: Tensor | None,
    page_table: Tensor | None,
    cache_index: Tensor | None,
    starts: Tensor | None,
    cu_seqlens_q: Tensor | None,
    k_scale: Tensor | None,
    v_scale: Tensor | None,
    *,
    P: int,
    cos: Tensor | None,
    sin: Tensor | None,
    interleaved: bool,
    rolls: bool,
) -> Filled:
    """What attention_with_kv_cache does before attention; behind a prefix of P keys."""
    dtype = compute_dtype(q.dtype)
    device, B = q.device, lengths.shape[0]
    if cu_seqlens_q is None:
        sequence = torch.arange(B, device=device)
        queries = torch.full_like(sequence, q.shape[2])
        tokens = None
    else:
        # The number of each token's sequence, and its index in it.
        T = q.shape[0]
        token = torch.arange(T, device=device)
        sequence = torch.searchsorted(cu_seqlens_q, token.to(torch.int32), right=True) - 1
        tokens = token - cu_seqlens_q[sequence], sequence
        queries = cu_seqlens_q.diff().long()
    lengths = lengths.long()
    start = torch.zeros_like(lengths) if starts is None else starts.long()
    new = torch.zeros_like(lengths)
    if k is not None:
        new = queries if cu_seqlens_q is not None else torch.full_like(lengths, k.shape[2])
    keys = lengths + new
    if page_table is not None and not k_cache.shape[0]:  # no page for a slot to be in
        page_table = page_table[:, :0]
    capacity = k_cache.shape[1] * (1 if page_table is None else page_table.shape[1])
    rows = torch.arange(B, device=device) if cache_index is None else cache_index.long()
    slots = Slots(rows, page_table, k_cache.shape[1], capacity, rolls)

    def dense(x: Tensor) -> Tensor:
        """[T, H, D] as [B, H, T, D], in which rows behind a sequence's last token count for nothing."""
        if tokens is None:
            return x
        i, s = tokens
        made = x.new_zeros(B + 1, x.shape[0], *x.shape[1:])
        return made.index_put((s, i), x)[:B].transpose(1, 2)

    def turn(x: Tensor, first: Tensor) -> Tensor:
        """x [B, H, n, D], whose first tokens are at positions `first`."""
        if cos is None or sin is None:
            return x
        return rope(x, cos, sin, offset=P + first - start, interleaved=interleaved)

    q = turn(dense(q), keys - queries)
    if k is not None and v is not None and B and k.numel():
        given = [x.transpose(1, 2) for x in (turn(dense(k), lengths), dense(v))]  # [B, n, Hkv, D]
        if cu_seqlens_q is None or tokens is None:
            n = given[0].shape[1]
            i, s = torch.arange(n, device=device).expand(B, n), sequence[:, None].expand(B, n)
        else:
            # Tokens behind the last sequence's are its last one once more.
            again = torch.minimum(token, (cu_seqlens_q[-1] - 1).clamp_min(0))
            i, s = (x[again][:, None] for x in tokens)
        is_token, s = s < B, s.clamp(max=B - 1)
        if not rolls:
            # Those without room are the last one that has some; a full cache keeps what it has there.
            i = torch.minimum(i, capacity - 1 - lengths[s])
        exists, i = is_token & (i >= 0), i.clamp_min(0)
        j = lengths[s] + i
        j = j if rolls else j.clamp(max=capacity - 1)
        at = slots._replace(row=rows[s[:, 0]]).place(j, is_token)
        given = [x[s, i] for x in given]
        for x, cache, by in zip(given, (k_cache, v_cache), (k_scale, v_scale), strict=True):
            scales = by
            if by is not None and by.ndim > 1:
                largest = x.to(dtype).abs().amax(-1)
                scales = (largest / LARGEST).clamp_min(2.0**-126).to(by.dtype)
                by[at] = torch.where(exists[..., None], scales, by[at])
            if scales is not None:
                x = (x.to(dtype) / scales.to(dtype)[..., None]).clamp(-LARGEST, LARGEST)
            cache[at] = torch.where(exists[..., None, None], x.to(cache.dtype), cache[at])
    return Filled(q, queries, keys, start, slots, tokens)


def attention_with_kv_cache(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    lengths: Tensor,
    *,
    k: Tensor | None = None,
    v: Tensor | None = None,
    page_table: Tensor | None = None,
    cache_index: Tensor | None = None,
    starts: Tensor | None = None,
    cu_seqlens_q: Tensor | None = None,
    k_scale: Tensor | None = None,
    v_scale: Tensor | None = None,
    prefix: Sequence[Tensor] | None = None,
    cos: Tensor | None = None,
    sin: Tensor | None = None,
    interleaved: bool = False,
    causal: bool = True,
    causal_offset: int = 0,
    left: int | None = None,
    softcap: float | None = None,
    sinks: Tensor | None = None,
    alibi_slopes: Tensor | None = None,
    scale: float | None = None,
) -> tuple[Tensor, Tensor]:
    """Attention of q [B, Hq, Sq, D] to the keys that a cache [B, S, Hkv, D] or [pages, page size, Hkv,
    D] holds, once k and v [B, Hkv, n, D], turned, are put behind them in place; or of [T, Hq, D] and so
    on, the tokens of B sequences side by side.  See flashproto.attention_with_kv_cache.

    Key j of a sequence is in slot j, and under a window (left) in slot j % capacity.  Its position is
    j - starts, and behind a prefix [P, Hkv, D] P more.  causal_offset and left count from the diagonal
    on which the last query meets the last key, as `visible` has them. Returns out as q lies, lse [B,
    Hq, Sq] or [Hq, T] in the computing dtype.
    """
    dtype = compute_dtype(q.dtype)
    device, B = q.device, lengths.shape[0]
    Hkv, D = k_cache.shape[2:]
    group = q.shape[-2 if cu_seqlens_q is not None else 1] // max(Hkv, 1)
    scale = D**-0.5 if scale is None else scale
    cache = k_cache, v_cache, lengths, k, v, page_table, cache_index, starts, cu_seqlens_q
    P = 0 if prefix is None else prefix[0].shape[0]
    turns: Any = {"P": P, "cos": cos, "sin": sin, "interleaved": interleaved}
    filled = fill_kv_cache(q, *cache, k_scale, v_scale, rolls=left is not None, **turns)
    q, queries, keys, start, slots, tokens = filled
    capacity = slots.capacity

    # Which key each slot holds: the last one that belongs there.
    slot = torch.arange(capacity, device=device).expand(B, -1)
    j = slot
    if left is not None:
        last = keys[:, None] - 1
        j = last - (last - slot) % max(capacity, 1)
    exists = (j >= start[:, None]) & (j < keys[:, None])
    page, slot = slots.place(j, exists)

    def gathered(cache: Tensor, by: Tensor | None) -> Tensor:
        """[B, Hq, capacity, D], 0 where there is no key."""
        x = cache[page, slot].to(dtype)
        if by is not None:
            x = x * (by[page, slot] if by.ndim > 1 else by).to(dtype)[..., None]
        x = x.masked_fill(~exists[..., None, None], 0.0)
        return x.transpose(1, 2).repeat_interleave(group, 1)

    wide = [x[:, None, None, None] for x in (keys - queries, keys)]
    i = torch.arange(q.shape[2], device=device)[:, None]
    pairs = Pairs(i, j[:, None, None, :], wide[0], None)
    seen = visible(pairs, causal, wide[0] + causal_offset, left, 0, None, None)
    seen = seen & exists[:, None, None, :]
    scores = (q.to(dtype) @ gathered(k_cache, k_scale).mT) * scale
    out, lse = softmax_times(scores, pairs, seen, softcap, alibi_slopes, gathered(v_cache, v_scale))
    if prefix is not None:
        k, v = (
            x.to(dtype).transpose(0, 1).repeat_interleave(group, 0).expand(B, -1, -1, -1)
            for x in prefix
        )
        everywhere = torch.ones((), dtype=torch.bool, device=device)
        own = softmax_times((q.to(dtype) @ k.mT) * scale, pairs, everywhere, softcap, None, v)
        out, lse = merge_attention((out, own[0]), (lse, own[1]))
    if tokens is not None:
        i, s = tokens
        out = torch.cat([out, out.new_zeros(1, *out.shape[1:])]).transpose(1, 2)[s, i]
        lse = torch.cat([lse, lse.new_full((1, *lse.shape[1:]), -math.inf)]).transpose(1, 2)[s, i].mT
    if sinks is not None:  # one more state of each row, of a key without a value
        sink = sinks.to(dtype)[:, None].expand(lse.shape)
        rows_of_out = out if tokens is None else out.transpose(0, 1)
        out, lse = merge_attention((rows_of_out, torch.zeros_like(rows_of_out)), (lse, sink))
        out = out if tokens is None else out.transpose(0, 1)
    return out.to(q.dtype), lse


def softmax_times(
    scores: Tensor,
    pairs: Pairs,
    seen: Tensor,
    softcap: float | None,
    alibi_slopes: Tensor | None,
    v: Tensor,
) -> tuple[Tensor, Tensor]:
    """(out, lse) of scaled scores [B, H, Sq, Sk] between the pairs that are seen."""
    scores = modified(scores.to(v.dtype), pairs, softcap, alibi_slopes).masked_fill(~seen, -math.inf)
    m = largest(scores)
    p = torch.exp(scores - torch.where(m == -math.inf, 0.0, m)[..., None])
    lse, normaliser = online_softmax_finish(m, p.sum(-1))
    return (p @ v) * normaliser[..., None], lse
