"""Attention of a sequence that lies in shards on several ranks (ring attention).

Keys and values travel, queries stay.  What a rank has of attention of a part of the keys is a state
of the online softmax, (lse, 1) with out beside it, and states of parts merge in float32.  The backward
pass knows out and lse of all keys, so that the gradients of each part are exact by themselves: they are
summed in float32, those of keys and values on the rank that holds them.

In step s a rank works on what it needs of the keys of the rank s before it, while those for step s + 1
come.  They come from that rank itself and not by way of neighbours: so only what is needed travels, and
gradients go back as they are, where a ring would carry sums in float32.  What is needed follows from
numbers that all ranks know, so both sides of a transfer agree, and parts that see nothing are left out.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from .. import masks
from ..backends import KERNELS
from ..checks.attention import check_attention
from ..checks.errors import refuse
from ..checks.options import check_choice
from ..functional.attention_request import attention_request
from ..functional.autocast import autocast_low_precision
from ..mask_values import Diagonals
from ..variant import NUMBERS
from .agreement import agreed, all_in_backward
from .call import NAME, Call, Needs, Rows
from .group import NOT_TRACED, check_plain, check_untransformed, group_of, once
from .order import Part, Range, check_length, cut, ranges
from .sums import Merged, Sum
from .transfers import Transfer, arriving, at_hand, give_back

METHODS = ("ring", "all_gather")


@torch.compiler.disable(reason=NOT_TRACED)
def ring_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    group: dist.ProcessGroup | None = None,
    *,
    causal: bool = False,
    window: Sequence[int | None] | None = None,
    softcap: float | None = None,
    sinks: Tensor | None = None,
    alibi_slopes: Tensor | None = None,
    mask: masks.Mask | None = None,
    scale: float | None = None,
    return_lse: bool = False,
    method: str = "ring",
    impl: str | None = None,
) -> Tensor | tuple[Tensor, Tensor]:
    """flashproto.attention of a whole sequence, of which each rank of a group holds a shard.

    Shards are what flashproto.distributed.shard makes of a whole sequence: of n ranks rank r holds the
    chunks r and 2 n - 1 - r of 2 n, so that all have the same work under a causal mask.  Positions in
    masks and windows are those of the whole sequence.

    All ranks of the group make the same call, with shards of the same shape, and the same tensors
    require gradients on all.  Otherwise the process ends, waits, or returns wrong numbers; with
    FLASHPROTO_CHECKED=1 in the environment all ranks raise an error that says what differs.  A backward
    pass moves keys, values and their gradients again, and so has to run on all ranks too.  Activation
    checkpointing repeats the transfers, in the same order on all.  torch.compile does not trace it: it
    breaks the graph there, and fullgraph=True raises.

    Args:
        q: [B, Hq, S / n, D], this rank's shard, as attention takes it.
        k, v: [B, Hkv, S / n, D] and [B, Hkv, S / n, Dv], of the same tokens.
        group: the ranks; None is the default group.
        causal, window, softcap, scale: as attention.
        sinks: [Hq], as attention, the same on every rank; they count once.
        alibi_slopes: [Hq], as attention; only with causal=True and method="all_gather".
        mask: a value of flashproto.masks for the whole sequence, the same on every rank.
        return_lse: also return lse.
        method: "ring": keys and values of one rank at a time are on another one, and travel while it
            works on those before.  "all_gather": all keys and values are gathered first, for two calls
            of attention.  That is for sequences so short that the start of n steps counts; it takes
            the memory of all keys and values.
        impl: the backend of each part by name; None chooses.  "torch" gives no lse, and is refused.

    Returns:
        out [B, Hq, S / n, Dv] in q's dtype; with return_lse behind it lse [B, Hq, S / n].
        Of both there are gradients for q, k, v, sinks and alibi_slopes.  Those of k and v are from all
        ranks' queries.  Those of sinks and alibi_slopes are from this rank's: sum them over the group,
        as those of all parameters that ranks share.  Of 16-bit tensors each part is rounded once to
        that dtype; merges and sums are in float32.

    Raises:
        TypeError, ValueError: an argument does not fit; RuntimeError: there is no group; BackendError:
        `impl` cannot run this call; NotImplementedError: a second derivative is asked for.

    Source: Liu, Zaharia and Abbeel, "Ring Attention with Blockwise Transformers" (2023); Milakov and
    Gimelshein (2018) for the merge; head-tail order as in torch's context parallelism.

    Example:
        >>> q, k, v = (torch.randn(2, 4, 8, 16) for _ in range(3))  # whole, or made of shards of tokens
        >>> shards = [distributed.shard(x, dim=2) for x in (q, k, v)]
        >>> out = distributed.unshard(distributed.ring_attention(*shards, causal=True), dim=2)
        >>> torch.allclose(out, flashproto.attention(q, k, v, causal=True), atol=1e-5)
        True
    """
    call, *tensors = agreed(NAME, call_of, locals(), own=("q", "k", "v"))
    out, lse = RingAttention.apply(call, *tensors)
    return (out, lse) if return_lse else out


def call_of(q, k, v, group, method, impl, **options):
    """What RingAttention takes, of arguments that fit; nothing travels here."""
    name = NAME
    ranks = group_of(name, group)
    q, k, v = autocast_low_precision(q, k, v)
    check_attention(name, q, k, v)
    check_plain(name, q=q, k=k, v=v, **options)
    check_untransformed(name, q=q, k=k, v=v, **options)
    length = q.shape[2]
    S = length * ranks.size
    if k.shape[2] != length:
        got, takes = f"of {k.shape[2]} tokens", f"those of q, {length}"
        refuse(name, "k", got, takes, "Shard queries and keys of the same sequence alike.")
    check_length(name, "the length of all shards", S, ranks.size)
    check_choice(name, "method", method, METHODS, "Pass 'ring' for long sequences.")
    if options["mask"] is not None:
        masks.check_without_rule(name, options["mask"])
    request = attention_request(name, q, k, v, lengths=(S, S), **options)
    gather, slopes = method == "all_gather", options["alibi_slopes"]
    if slopes is not None and not (options["causal"] and gather):
        takes = "None, unless causal=True and method='all_gather'"
        refuse(name, "alibi_slopes", slopes, takes, "Pass these two, or window=.")
    (kind, offset, _), named, scale = request.variant, request.variant.named, request.scale
    of_keys: dict[str, Tensor] = {n: x for n, x in named.items() if isinstance(x, Tensor)}
    of_keys.pop("sinks", None)
    if scale is not None and scale < 0:
        q, scale = -q, -scale
    call = Call(
        ranks,
        [ranges(r, ranks.size, length) for r in range(ranks.size)],
        Diagonals(
            offset if kind.CAUSAL else None,
            offset - named["left"] if kind.WINDOW else None,
            named.get("first", 0),
        ),
        gather,
        {n: x for n, x in named.items() if n in NUMBERS},
        tuple(of_keys),
        scale,
        impl,
    )
    call = call._replace(impl=call.backend(q, k, v, of_keys))
    return call, q, k, v, options["sinks"], *of_keys.values()


class RingAttention(torch.autograd.Function):
    """(out, lse) of this rank's queries."""

    @staticmethod
    def forward(ctx, call, q, k, v, sinks, *tensors):
        with torch.autocast(q.device.type, enabled=False):
            named = dict(zip(call.names, tensors, strict=True))
            out, lse = forward(call, q, k, v, sinks, named)
        ctx.call = call
        ctx.save_for_backward(q, k, v, out, lse, sinks, *tensors)
        ctx.set_materialize_grads(False)
        return out, lse

    @staticmethod
    def backward(ctx, dout, dlse):
        _, q, k, v, sinks, *tensors = ctx.needs_input_grad
        needs = Needs(q, k or v, sinks, tuple(tensors))
        q, k, v, out, lse, sinks, *tensors = ctx.saved_tensors
        all_in_backward(NAME, ctx.call.ranks, q)
        named = dict(zip(ctx.call.names, tensors, strict=True))
        with torch.no_grad(), torch.autocast(q.device.type, enabled=False):
            made = backward(ctx.call, needs, Rows(dout, dlse, out, lse), q, k, v, sinks, named)
        return None, *once(NAME, made)


def forward(
    call: Call, q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None, tensors: dict[str, Tensor]
) -> tuple[Tensor, Tensor]:
    merged = Merged(q, v, call.impl in KERNELS)
    for step, span, here in arriving(call, k, v):
        for part in call.parts(step):
            own = call.of_part(part, step, tensors)
            request = call.request(part, *of_part(part, span, q, *here), own)
            merged.add(part.queries, *call.attention(request))
    return merged.finish(sinks, q.dtype)


def backward(
    call: Call,
    needs: Needs,
    rows: Rows,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    sinks: Tensor | None,
    tensors: dict[str, Tensor],
) -> list[Tensor | None]:
    """The gradients of q, k, v, sinks and the variant's other tensors."""
    dtensors: dict[str, Tensor] = {}
    dq, dkv = Sum(q), [Sum(k), Sum(v)]
    returning = at_hand()
    for step, span, here in arriving(call, k, v):
        sums = [Sum(x) for x in here]
        for part in call.parts(step):
            own = call.of_part(part, step, tensors)
            request = call.request(part, *of_part(part, span, q, *here), own)
            dq_part, *dkv_part, others = call.gradients(request, rows.of(part), needs)
            dq.add(part.queries, dq_part)
            for total, gradient in zip(sums, dkv_part, strict=True):
                total.add((part.keys[0] - span[0], part.keys[1] - span[0]), gradient)
            for name, dx in others.items():
                dtensors[name] = dtensors[name] + dx if name in dtensors else dx
        if needs.keys and call.gather:
            for total, x in zip(dkv, sums, strict=True):
                pieces = [cut(x.finish().to(x.dtype), held, 2) for held in call.held]
                total.add((0, 0), call.ranks.sum_of(pieces))
        elif needs.keys:
            # What came back of the step before, while this one was worked on.
            add_all(dkv, returning)
            returning = give_back(call, step, sums, k, v)
    add_all(dkv, returning)
    dsinks = gradient_of_sinks(rows, sinks) if needs.sinks and sinks is not None else None
    finished = [x.finish().to(x.like.dtype) for x in (dq, *dkv)]
    return [*finished, dsinks, *map(dtensors.get, call.names)]


def of_part(part: Part, span: Range, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """The queries of a part, and its keys and values from those that are here, a span of all."""
    start, stop = (x - span[0] for x in part.keys)
    return q[:, :, slice(*part.queries)], k[:, :, start:stop], v[:, :, start:stop]


def add_all(sums: Sequence[Sum], transfer: Transfer) -> None:
    span, tensors = transfer.arrived()
    for total, x in zip(sums, tensors, strict=False):
        total.add(span, x)


def gradient_of_sinks(rows: Rows, sinks: Tensor) -> Tensor:
    """A sink is a score without a value: its probability times what all of a row's scores share."""
    dout, dlse, out, lse = rows
    shared = torch.zeros_like(lse) if dlse is None else -dlse
    if dout is not None:
        shared = shared + (dout.to(lse.dtype) * out).sum(-1)
    # Where lse is -inf the row sees no key and its sink is -inf: the weight is 0.
    weight = torch.exp(sinks.to(lse.dtype)[:, None] - lse.masked_fill(lse.isneginf(), 0))
    return -(weight * shared).sum((0, 2)).to(sinks.dtype)
