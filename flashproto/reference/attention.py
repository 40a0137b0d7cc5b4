"""Attention.  q [B, Hq, Sq, D], k [B, Hkv, Sk, D], v [B, Hkv, Sk, Dv], lse [B, Hq, Sq].

What happens to a score, in this order: scale, softcap, ALiBi and biases, score_mod, mask; then the
softmax with the sink; then dropout of the probabilities.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from .mask_table import unpacked
from .philox import kept, kept_factor
from .states import compute_dtype, online_softmax_finish

ScoreMod = Callable[[Tensor, Tensor, Tensor, Tensor, Tensor], Tensor]
OF_GAPS = (0.0, -math.inf, -math.inf, 0.0)  # out, lse, the largest score and the entropy there


class Pairs(NamedTuple):
    """Which queries and keys there are: i [Sq, 1] and j [1, Sk], counted within their sequences;
    diagonal: by how much a key's index exceeds that of the query at its position; together: which are
    of one sequence, None if all are; sequence: the number of each query's; gaps: which queries [Sq] are
    between sequences, None if none is."""

    i: Tensor
    j: Tensor
    diagonal: Tensor | int
    together: Tensor | None
    sequence: Tensor | int = 0
    gaps: Tensor | None = None


def causal_mask(Sq: int, Sk: int, offset: int, device: torch.device) -> Tensor:
    """[Sq, Sk], True where query i may see key j: j <= i + offset.

    offset = 0 aligns the mask top-left (torch's is_causal), offset = Sk - Sq bottom-right
    (flash-attention): the last query sees every key.
    """
    pairs = dense_pairs(Sq, Sk, torch.empty(0, device=device))
    return pairs.j <= pairs.i + offset


def indices(S: int, like: Tensor) -> Tensor:
    """0 to S - 1, a tensor as `like`: where that is a DTensor, only others go with it."""
    return like.new_ones(S, dtype=torch.int64).cumsum(0) - 1


def dense_pairs(Sq: int, Sk: int, like: Tensor) -> Pairs:
    """Of one sequence, whose last query is at the position of the last key."""
    return Pairs(indices(Sq, like)[:, None], indices(Sk, like)[None, :], Sk - Sq, None)


def packed_pairs(
    Sq: int,
    Sk: int,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    seqused_q: Tensor | None = None,
    seqused_k: Tensor | None = None,
) -> tuple[Pairs, Tensor, Tensor]:
    """Of sequences side by side, number s with the tokens from cu_seqlens[s] on, seqused[s] or else all
    to cu_seqlens[s + 1] - 1.  Tokens of gaps, and behind the last one, see nothing.  With the pairs
    which queries [Sq] and keys [Sk] are of no sequence."""
    count = cu_seqlens_q.shape[0] - 1

    def places(S: int, starts: Tensor, used: Tensor | None) -> tuple[Tensor, ...]:
        """The number of each token's sequence, its index in it, how many each has, whether the token is
        in a gap."""
        token = indices(S, starts)
        sequence = (token[:, None] >= starts).sum(-1) - 1
        index, lengths = token - starts[sequence], starts.diff() if used is None else used
        ends = torch.cat([lengths, lengths.new_full((1,), S + 1)])[sequence]
        return sequence, index, lengths, index >= ends

    sequence_q, i, lengths_q, gaps_q = places(Sq, cu_seqlens_q, seqused_q)
    sequence_k, j, lengths_k, gaps_k = places(Sk, cu_seqlens_k, seqused_k)
    longer = (lengths_k - lengths_q).long()
    diagonal = torch.cat([longer, longer.new_zeros(1)])[sequence_q]
    unused_q, unused_k = gaps_q | (sequence_q >= count), gaps_k | (sequence_k >= count)
    together = (sequence_q[:, None] == sequence_k) & ~unused_q[:, None] & ~unused_k
    gaps = None if seqused_q is None else gaps_q
    pairs = Pairs(i[:, None], j[None, :], diagonal[:, None], together, sequence_q[:, None], gaps)
    return pairs, unused_q, unused_k


def visible(
    pairs: Pairs,
    causal: bool,
    offset: Tensor | int,
    left: int | None,
    first: int,
    begin: Tensor | None,
    end: Tensor | None,
    bits: Tensor | None = None,
) -> Tensor:
    """True where a query may see a key: [Sq, Sk], or [B | 1, H | 1, Sq, Sk] where there are intervals
    or bits.

    causal: j <= i + offset.  left: j >= i + offset - left, or j < first.
    begin, end [B | 1, H | 1, Sk]: begin[j] <= i < end[j].  bits: see mask_table.py.
    """
    i, j, together = pairs.i, pairs.j, pairs.together
    seen = (j <= i + offset) if causal else (j >= 0) & (i >= 0)
    if left is not None:
        seen = seen & ((j >= i + offset - left) | (j < first))
    if begin is not None and end is not None:
        seen = seen & (begin[..., None, :] <= i) & (i < end[..., None, :])
    if bits is not None:
        seen = seen & unpacked(bits, *seen.shape[-2:])
    return seen if together is None else seen & together


def modified(
    scores: Tensor,
    pairs: Pairs,
    softcap: float | None,
    alibi_slopes: Tensor | None,
    bias: Tensor | None = None,
    relative_bias: Tensor | None = None,
    relative_offset: int = 0,
    score_mod: ScoreMod | None = None,
) -> Tensor:
    """Scaled scores as the variant changes them: softcap tanh(s / softcap) - slope |position - j|, then
    with bias, and with relative_bias[h, position - j + relative_offset] or the nearest column added;
    of this score_mod(s, b, h, i, j)."""
    if softcap is not None:
        scores = softcap * torch.tanh(scores / softcap)
    if alibi_slopes is not None:
        distance = (pairs.i + pairs.diagonal - pairs.j).abs()
        scores = scores - alibi_slopes.to(scores.dtype)[:, None, None] * distance
    if bias is not None:
        scores = scores + bias.to(scores.dtype)
    if relative_bias is not None:
        column = pairs.i + pairs.diagonal - pairs.j + relative_offset
        column = column.clamp(0, relative_bias.shape[1] - 1)
        scores = scores + relative_bias.to(scores.dtype)[:, column]
    if score_mod is not None:
        b, h = (indices(n, scores) for n in scores.shape[:2])
        hidden = scores == -math.inf  # by a bias, and they stay so
        places = b[:, None, None, None], h[:, None, None], pairs.i, pairs.j
        scores = score_mod(scores.masked_fill(hidden, 0.0), *places).masked_fill(hidden, -math.inf)
    return scores


def dropped(p: Tensor, pairs: Pairs, dropout_p: float, dropout_seed: Tensor) -> Tensor:
    """Probabilities p [B, H, Sq, Sk], those that are kept times 1 / (1 - dropout_p), others 0."""
    B, H = p.shape[:2]
    batch, head = (indices(n, dropout_seed) for n in (B, H))
    numbers = (batch[:, None, None, None] + pairs.sequence) * H + head[:, None, None]
    keep = kept(dropout_seed, numbers, pairs.i, pairs.j, dropout_p)
    return torch.where(keep, p * kept_factor(dropout_p), 0.0)


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
    bias: Tensor | None = None,
    relative_bias: Tensor | None = None,
    relative_offset: int = 0,
    score_mod: ScoreMod | None = None,
    begin: Tensor | None = None,
    end: Tensor | None = None,
    bits: Tensor | None = None,
    table: Tensor | None = None,
    cu_seqlens_q: Tensor | None = None,
    cu_seqlens_k: Tensor | None = None,
    seqused_q: Tensor | None = None,
    seqused_k: Tensor | None = None,
    dropout_p: float = 0.0,
    dropout_seed: Tensor | None = None,
    sequence: int = 0,
    scale: float | None = None,
    return_aux: bool = False,
) -> tuple[Tensor, ...]:
    """softmax(scale * q k^T) v, and the rows' logsumexp.

    k and v may have fewer heads than q (GQA): query head h reads key head h // (Hq // Hkv).
    causal_offset defaults to Sk - Sq (bottom-right); scale to 1 / sqrt(D).  What a query sees: see
    `visible`; how scores change: see `modified`.  sinks [Hq] is one more score of each row, without a
    value.  table says of bits what kernels leave out, and changes nothing.  With cu_seqlens (of one
    batch entry) causal_offset counts from the bottom-right diagonal of each sequence; NaN in one
    reaches the others, unless `each_sequence` takes them apart.  seqused [sequences]: how many of each
    one's tokens count; those behind them are a gap, which is not read.  A query with no visible key
    gives a constant 0, and lse = -inf, or its sink; in a gap -inf.  dropout_p, a multiple of 1/65536,
    is the share of the probabilities that is dropped, see `kept`; sequence: the number of this one
    there, or of the first.
    Returns out [B, Hq, Sq, Dv] in q's dtype, lse [B, Hq, Sq] in the computing dtype; with return_aux
    also, for each row, the largest of scale * q k^T before softcap over the visible keys (-inf without
    one), and the entropy of the keys' probabilities, the sink left out (0 without a key).
    """
    group = q.shape[1] // max(k.shape[1], 1)
    scale = q.shape[3] ** -0.5 if scale is None else scale
    dtype = compute_dtype(q.dtype)
    q, k, v, pairs, offset = placed(
        q, k, v, causal_offset, cu_seqlens_q, cu_seqlens_k, seqused_q, seqused_k
    )
    pairs = pairs._replace(sequence=pairs.sequence + sequence)
    k, v = (t.to(dtype).repeat_interleave(group, 1) for t in (k, v))
    scores = (q.to(dtype) @ k.mT) * scale  # [B, Hq, Sq, Sk]
    hidden = ~visible(pairs, causal, offset, left, first, begin, end, bits)
    raw, biases = scores, (bias, relative_bias, relative_offset)
    scores = modified(scores, pairs, softcap, alibi_slopes, *biases, score_mod)
    if bias is not None or relative_bias is not None or score_mod is not None:
        hidden = hidden | (scores == -math.inf)
    max_score = largest(raw.masked_fill(hidden, -math.inf))
    scores = scores.masked_fill(hidden, -math.inf)
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
    if pairs.gaps is not None:
        lse = lse.masked_fill(pairs.gaps, -math.inf)
    if dropout_seed is not None:
        p = dropped(p, pairs, dropout_p, dropout_seed)
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
    seqused_q: Tensor | None = None,
    seqused_k: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor, Pairs, Tensor | int]:
    """q, k and v, their pairs, and by how much a key's index exceeds that of the query that sees it as
    its last one under causal."""
    if cu_seqlens_q is None or cu_seqlens_k is None:
        pairs = dense_pairs(q.shape[2], k.shape[2], q)
        return q, k, v, pairs, pairs.diagonal if causal_offset is None else causal_offset
    ends = cu_seqlens_q, cu_seqlens_k, seqused_q, seqused_k
    pairs, unused_q, unused_k = packed_pairs(q.shape[2], k.shape[2], *ends)
    # Behind a sequence there may be anything, which times 0 may be NaN.
    q = q.masked_fill(unused_q[:, None], 0.0)
    k, v = (x.masked_fill(unused_k[:, None], 0.0) for x in (k, v))
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
    used_q: Sequence[int] | None = None,
    used_k: Sequence[int] | None = None,
) -> tuple[Tensor, ...]:
    """What function(q, k, v) gives of each sequence by itself, with the tokens from starts[s] on,
    used[s] of them or all to starts[s + 1] - 1, and of the queries behind the last one, which see no
    key; side by side, with OF_GAPS between them."""
    parts, gaps = [], []
    for x, starts, used in ((q, starts_q, used_q), (k, starts_k, used_k), (v, starts_k, used_k)):
        lengths = [b - a for a, b in zip(starts, [*starts[1:], x.shape[2]], strict=True)]
        own = [*(lengths[:-1] if used is None else used), lengths[-1]]
        gaps.append([n - m for n, m in zip(lengths, own, strict=True)])
        parts.append(x.split([n for pair in zip(own, gaps[-1], strict=True) for n in pair], 2)[::2])
    parts[1:] = ([*x[:-1], x[-1][:, :, :0]] for x in parts[1:])
    made = [function(*sequence) for sequence in zip(*parts, strict=True)]
    joined = []
    for results, value in zip(zip(*made, strict=True), OF_GAPS, strict=False):
        rows = []
        for x, n in zip(results, gaps[0], strict=True):
            rows += [x, x.new_full((*x.shape[:2], n, *x.shape[3:]), value)] if n else [x]
        joined.append(torch.cat(rows, 2))
    return tuple(joined)


def largest(x: Tensor) -> Tensor:
    """The largest of the last dimension, -inf if it is empty."""
    return x.amax(-1) if x.shape[-1] else x.new_full(x.shape[:-1], -math.inf)
