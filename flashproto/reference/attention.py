"""Attention.  q [B, Hq, Sq, D], k [B, Hkv, Sk, D], v [B, Hkv, Sk, Dv], lse [B, Hq, Sq].

What happens to a score, in this order: scale, softcap, ALiBi, mask; then the softmax with the sink.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from .states import compute_dtype, online_softmax_finish


class Pairs(NamedTuple):
    """Which queries and keys there are: i [Sq, 1] and j [1, Sk], counted within their sequences;
    diagonal: by how much a key's index exceeds that of the query at its position; together: which are
    of one sequence, None if all are."""

    i: Tensor
    j: Tensor
    diagonal: Tensor | int
    together: Tensor | None


def causal_mask(Sq: int, Sk: int, offset: int, device: torch.device) -> Tensor:
    """[Sq, Sk], True where query i may see key j: j <= i + offset.

    offset = 0 aligns the mask top-left (torch's is_causal), offset = Sk - Sq bottom-right
    (flash-attention): the last query sees every key.
    """
    i, j, _, _ = dense_pairs(Sq, Sk, torch.empty(0, device=device))
    return j <= i + offset


def indices(S: int, like: Tensor) -> Tensor:
    """0 to S - 1, a tensor as `like`: where that is a DTensor, only others go with it."""
    return like.new_ones(S, dtype=torch.int64).cumsum(0) - 1


def dense_pairs(Sq: int, Sk: int, like: Tensor) -> Pairs:
    """Of one sequence, whose last query is at the position of the last key."""
    return Pairs(indices(Sq, like)[:, None], indices(Sk, like)[None, :], Sk - Sq, None)


def packed_pairs(Sq: int, Sk: int, cu_seqlens_q: Tensor, cu_seqlens_k: Tensor) -> Pairs:
    """Of sequences side by side, number s with the tokens cu_seqlens[s] ... cu_seqlens[s + 1] - 1.
    Tokens behind the last one see nothing."""
    count = cu_seqlens_q.shape[0] - 1

    def places(S: int, starts: Tensor) -> tuple[Tensor, Tensor]:
        """The number of each token's sequence, and its index in it."""
        token = indices(S, starts)
        sequence = (token[:, None] >= starts).sum(-1) - 1
        return sequence, token - starts[sequence]

    sequence_q, i = places(Sq, cu_seqlens_q)
    sequence_k, j = places(Sk, cu_seqlens_k)
    longer = (cu_seqlens_k.diff() - cu_seqlens_q.diff()).long()
    diagonal = torch.cat([longer, longer.new_zeros(1)])[sequence_q]
    together = (sequence_q[:, None] == sequence_k) & (sequence_k < count)
    return Pairs(i[:, None], j[None, :], diagonal[:, None], together)


def visible(
    pairs: Pairs,
    causal: bool,
    offset: Tensor | int,
    left: int | None,
    first: int,
    begin: Tensor | None,
    end: Tensor | None,
) -> Tensor:
    """True where a query may see a key: [Sq, Sk], or [B | 1, H | 1, Sq, Sk] where there are intervals.

    causal: j <= i + offset.  left: j >= i + offset - left, or j < first.
    begin, end [B | 1, H | 1, Sk]: begin[j] <= i < end[j].
    """
    i, j, _, together = pairs
    seen = (j <= i + offset) if causal else (j >= 0) & (i >= 0)
    if left is not None:
        seen = seen & ((j >= i + offset - left) | (j < first))
    if begin is not None and end is not None:
        seen = seen & (begin[..., None, :] <= i) & (i < end[..., None, :])
    return seen if together is None else seen & together


def modified(
    scores: Tensor, pairs: Pairs, softcap: float | None, alibi_slopes: Tensor | None
) -> Tensor:
    """Scaled scores as the variant changes them: softcap tanh(s / softcap) - slope |position - j|."""
    if softcap is not None:
        scores = softcap * torch.tanh(scores / softcap)
    if alibi_slopes is not None:
        distance = (pairs.i + pairs.diagonal - pairs.j).abs()
        scores = scores - alibi_slopes.to(scores.dtype)[:, None, None] * distance
    return scores


def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    causal: bool = False,
    causal_offset: int | None = None,
    left: int | None = None,
    first: int = 0,
    softcap: float | None = None,
    sinks: Tensor | None = None,
    alibi_slopes: Tensor | None = None,
    begin: Tensor | None = None,
    end: Tensor | None = None,
    cu_seqlens_q: Tensor | None = None,
    cu_seqlens_k: Tensor | None = None,
    scale: float | None = None,
    return_aux: bool = False,
) -> tuple[Tensor, ...]:
    """softmax(scale * q k^T) v, and the rows' logsumexp.

    k and v may have fewer heads than q (GQA): query head h reads key head h // (Hq // Hkv).
    causal_offset defaults to Sk - Sq (bottom-right); scale to 1 / sqrt(D).  What a query sees: see
    `visible`; how scores change: see `modified`.  sinks [Hq] is one more score of each row, without a
    value.  With cu_seqlens (of one batch entry) causal_offset counts from the bottom-right diagonal of
    each sequence; NaN in one reaches the others, unless `each_sequence` takes them apart.  A query with
    no visible key gives a constant 0, and lse = -inf, or its sink.
    Returns out [B, Hq, Sq, Dv] in q's dtype, lse [B, Hq, Sq] in the computing dtype; with return_aux
    also, for each row, the largest of scale * q k^T before softcap over the visible keys (-inf without
    one), and the entropy of the keys' probabilities, the sink left out (0 without a key).
    """
    group = q.shape[1] // max(k.shape[1], 1)
    scale = q.shape[3] ** -0.5 if scale is None else scale
    dtype = compute_dtype(q.dtype)
    q, k, v, pairs, offset = placed(q, k, v, causal_offset, cu_seqlens_q, cu_seqlens_k)
    k, v = (t.to(dtype).repeat_interleave(group, 1) for t in (k, v))
    scores = (q.to(dtype) @ k.mT) * scale  # [B, Hq, Sq, Sk]
    hidden = ~visible(pairs, causal, offset, left, first, begin, end)
    max_score = largest(scores.masked_fill(hidden, -math.inf))
    scores = modified(scores, pairs, softcap, alibi_slopes).masked_fill(hidden, -math.inf)
    # The softmax does not depend on the shift m, so m is a constant to every derivative.
    m = largest(scores.detach())
    if sinks is not None:
        sink = sinks.to(dtype)[:, None].expand(m.shape)
        m = torch.maximum(m, sink.detach())
    shift = torch.where(m == -math.inf, 0.0, m)
    shifted = scores - shift[..., None]
    p = torch.exp(shifted)
    l = p.sum(-1)
    keys, _ = online_softmax_finish(torch.zeros_like(m), l)  # the logarithm of l
    mean = (p * shifted.masked_fill(hidden, 0.0)).sum(-1) / torch.where(l == 0, 1.0, l)
    entropy = torch.where(l == 0, 0.0, keys - mean)
    lse, normaliser = online_softmax_finish(m, l if sinks is None else l + torch.exp(sink - shift))
    keyless = hidden.all(-1, keepdim=True)
    out = ((p @ v) * normaliser[..., None]).masked_fill(keyless, 0.0).to(q.dtype)
    return (out, lse, max_score, entropy) if return_aux else (out, lse)


def placed(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    causal_offset: int | None,
    cu_seqlens_q: Tensor | None,
    cu_seqlens_k: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor, Pairs, Tensor | int]:
    """q, k and v, their pairs, and by how much a key's index exceeds that of the query that sees it as
    its last one under causal."""
    if cu_seqlens_q is None or cu_seqlens_k is None:
        pairs = dense_pairs(q.shape[2], k.shape[2], q)
        return q, k, v, pairs, pairs.diagonal if causal_offset is None else causal_offset
    pairs = packed_pairs(q.shape[2], k.shape[2], cu_seqlens_q, cu_seqlens_k)
    # Behind the last sequence there may be anything, which times 0 may be NaN.
    q, k, v = (
        x.masked_fill((indices(x.shape[2], starts) >= starts[-1])[:, None], 0.0)
        for x, starts in ((q, cu_seqlens_q), (k, cu_seqlens_k), (v, cu_seqlens_k))
    )
    return q, k, v, pairs, pairs.diagonal + (causal_offset or 0)


def attention_gradients(
    dout: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    *,
    causal: bool = False,
    causal_offset: int | None = None,
    left: int | None = None,
    first: int = 0,
    cu_seqlens_q: Tensor | None = None,
    cu_seqlens_k: Tensor | None = None,
    scale: float | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """dq, dk and dv by their formulas, for who has no autograd: of `attention` of these arguments, out
    and lse what it gave, dout the gradient of out.  A row of lse that is inf or -inf saw no key."""
    dtype, group = lse.dtype, q.shape[1] // max(k.shape[1], 1)
    scale = q.shape[3] ** -0.5 if scale is None else scale
    q, k, v, pairs, offset = placed(q, k, v, causal_offset, cu_seqlens_q, cu_seqlens_k)
    dout, x, y, z = (t.to(dtype) for t in (dout, q, k, v))
    y, z = (t.repeat_interleave(group, 1) for t in (y, z))
    hidden = ~visible(pairs, causal, offset, left, first, None, None)
    p = torch.exp((x @ y.mT) * scale - lse[..., None]).masked_fill(hidden, 0.0)
    delta = (dout * out.to(dtype)).sum(-1, keepdim=True)
    ds = p * (dout @ z.mT - delta) * scale
    dk, dv = ((a.mT @ b).unflatten(1, (-1, group)).sum(2) for a, b in ((ds, x), (p, dout)))
    return (ds @ y).to(q.dtype), dk.to(k.dtype), dv.to(v.dtype)


def each_sequence(
    function: Callable[[Tensor, Tensor, Tensor], tuple[Tensor, ...]],
    q: Tensor,
    k: Tensor,
    v: Tensor,
    starts_q: Sequence[int],
    starts_k: Sequence[int],
) -> tuple[Tensor, ...]:
    """What function(q, k, v) gives of each sequence by itself, with the tokens starts[s] to
    starts[s + 1] - 1, and of the queries behind the last one, which see no key; side by side."""
    parts = [
        x.split([b - a for a, b in zip(starts, [*starts[1:], x.shape[2]], strict=True)], 2)
        for x, starts in ((q, starts_q), (k, starts_k), (v, starts_k))
    ]
    made = [function(*sequence) for sequence in zip(*(x[:-1] for x in parts), strict=True)]
    behind, *empty = (x[-1] for x in parts)
    made.append(function(behind, *(x[:, :, :0] for x in empty)))
    return tuple(torch.cat(x, 2) for x in zip(*made, strict=True))


def largest(x: Tensor) -> Tensor:
    """The largest of the last dimension, -inf if it is empty."""
    return x.amax(-1) if x.shape[-1] else x.new_full(x.shape[:-1], -math.inf)
