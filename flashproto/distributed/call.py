"""What one call of ring_attention does: its steps, their parts, and the attention of a part."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from .. import backends, reference
from ..backends import KERNELS

# What flashproto.attention is made of, once its arguments are checked.
from ..functional.attention import _attention_reasons, _variant, attention_by
from ..mask_values import Diagonals
from ..variant import Variant, pack, tensors_of
from .group import Group
from .order import Part, Range, cut, parts, pieces

if backends.HAS_TRITON:
    from ..ops import attention as attention_op

NAME = "ring_attention"


class Call(NamedTuple):
    """What a call is beside its tensors.

    held: of each rank the positions of its tokens.  seen: which queries see which keys, by positions.
    """

    ranks: Group
    held: list[list[Range]]
    seen: Diagonals
    gather: bool
    softcap: float | None
    scale: float | None
    impl: str | None

    # --- steps ---

    @property
    def steps(self) -> range:
        return range(1 if self.gather else self.ranks.size)

    def peers(self, step: int) -> tuple[int, int]:
        """The rank whose keys this one works on in a step, and the rank that works on this one's."""
        _, rank, size = self.ranks
        return (rank - step) % size, (rank + step) % size

    def keys(self, step: int) -> list[Range]:
        """The positions of the keys of which those of a step are some."""
        if not self.gather:
            return self.held[self.peers(step)[0]]
        return [(0, sum(stop - start for held in self.held for start, stop in held))]

    def parts(self, step: int) -> list[Part]:
        return parts(self.held[self.ranks.rank], self.keys(step), self.seen)

    def needed(self, rank: int, source: int) -> Needed | None:
        """What `rank` needs of the keys of rank `source`; both know it."""
        found = parts(self.held[rank], self.held[source], self.seen)
        if not found:
            return None
        span = min(part.keys[0] for part in found), max(part.keys[1] for part in found)
        return Needed(span, len(found))

    # --- parts ---

    def variant(self, part: Part, step: int, q: Tensor, tensors: Tensors) -> Variant:
        slopes, begin, end = tensors
        if begin is not None and end is not None:
            at, own = pieces(self.keys(step), *part.keys), self.held[self.ranks.rank]
            begin, end = (numbered(cut(x, at, -1), own, part) for x in (begin, end))
        return self.variant_of(part, q, Tensors(slopes, begin, end))

    def variant_of(self, part: Part, q: Tensor, tensors: Tensors) -> Variant:
        """Of a part whose tensors are these."""
        return _variant(NAME, q, part.band, (self.softcap,), tensors._asdict(), ())

    def backend(self, q: Tensor, k: Tensor, v: Tensor, tensors: Tensors) -> str:
        """What runs all parts."""
        every = [part for step in self.steps for part in self.parts(step)]
        variants = {part.band: self.variant_of(part, q, tensors) for part in every}.values()

        def reasons(backend: str) -> Iterator[backends.Reason]:
            for variant in variants:
                yield from _attention_reasons(backend, variant, q, k, v, True)

        return backends.choose(NAME, self.impl, (q, k, v), reasons)

    def attention(self, q: Tensor, k: Tensor, v: Tensor, variant: Variant) -> tuple[Tensor, Tensor]:
        """(out, lse) of a part; by the reference out is not rounded."""
        if self.impl not in KERNELS:
            q, k, v = (x.to(reference.compute_dtype(x.dtype)) for x in (q, k, v))
        return attention_by(self.impl, q, k, v, variant, self.scale, True, ())

    def gradients(
        self, q: Tensor, k: Tensor, v: Tensor, rows: Rows, variant: Variant, needs: Needs
    ) -> tuple[Tensor | None, ...]:
        """Those of q, k, v and alibi_slopes from a part."""
        if self.impl not in KERNELS:
            return self.defined_gradients(q, k, v, rows, variant)
        tensors, ints, floats, text = pack(variant)
        scale = q.shape[3] ** -0.5 if self.scale is None else float(self.scale)
        settings = attention_op.Settings(tuple(ints), tuple(floats), text, scale, str(self.impl))
        names = tensors_of(text)
        wanted = needs.q, needs.keys, needs.keys, *(needs.slopes and n == "alibi_slopes" for n in names)
        given = rows.dout, rows.dlse, None, None, q, k, v, rows.out, rows.lse, *tensors
        dq, dk, dv, *others = attention_op.attention.gradients_visibly(settings, wanted, given)
        return dq, dk, dv, dict(zip(names, others, strict=True)).get("alibi_slopes")

    def defined_gradients(
        self, q: Tensor, k: Tensor, v: Tensor, rows: Rows, variant: Variant
    ) -> tuple[Tensor | None, ...]:
        """`gradients` by the reference's own: a part has the share exp(its lse - lse) of the whole."""
        dout, dlse, out, lse = rows
        q, k, v = (x.detach().to(lse.dtype).requires_grad_() for x in (q, k, v))
        slopes = variant.named.get("alibi_slopes")
        with torch.enable_grad():
            part, part_lse = self.attention(q, k, v, variant)
        share = torch.where(part_lse == -math.inf, 0.0, torch.exp(part_lse - lse))
        dout = torch.zeros_like(part) if dout is None else dout.to(lse.dtype)
        d_lse = (dout * (part.detach() - out)).sum(-1)
        d_lse = d_lse if dlse is None else d_lse + dlse
        leaves = [q, k, v] if slopes is None else [q, k, v, slopes]
        made = torch.autograd.grad([part, part_lse], leaves, [share[..., None] * dout, share * d_lse])
        return (*made, None)[:4]


class Rows(NamedTuple):
    """Of queries, what is known of all keys: gradients of out and of lse, out and lse."""

    dout: Tensor | None
    dlse: Tensor | None
    out: Tensor
    lse: Tensor

    def of(self, part: Part) -> Rows:
        return Rows(*(None if x is None else x[:, :, slice(*part.queries)] for x in self))  # type: ignore[arg-type]


class Needed(NamedTuple):
    """Keys, numbered as they lie there, and for how many parts they are."""

    span: Range
    parts: int


class Tensors(NamedTuple):
    """Those of a variant, by its names for them; of the whole sequence or of a part."""

    alibi_slopes: Tensor | None
    begin: Tensor | None
    end: Tensor | None


class Needs(NamedTuple):
    """Of which gradients are wanted."""

    q: bool
    keys: bool
    sinks: bool
    slopes: bool


def numbered(x: Tensor, queries: list[Range], part: Part) -> Tensor:
    """Positions x as numbers of a part's queries: of those before each."""
    first, last = part.queries
    before = torch.zeros_like(x)
    for start, stop in queries:
        before = before + (x - start).clamp(0, stop - start)
    return (before - first).clamp(0, last - first)
