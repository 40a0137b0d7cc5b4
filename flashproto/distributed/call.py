"""What one call of ring_attention does: its steps, their parts, and the attention of a part."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .. import backends, reference
from ..backends import KERNELS
from ..functional.attention_request import Request
from ..mask_values import Diagonals
from ..variant import variant_of
from .group import Group
from .order import Part, Range, cut, parts, pieces

NAME = "ring_attention"


class Call(NamedTuple):
    """What a call is beside its tensors.

    held: of each rank the positions of its tokens.  seen: which queries see which keys, by positions.
    numbers: options of attention that are numbers.  names: of the variant's tensors, but for sinks.
    """

    ranks: Group
    held: list[list[Range]]
    seen: Diagonals
    gather: bool
    numbers: dict[str, float]
    names: tuple[str, ...]
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

    def request(
        self, part: Part, q: Tensor, k: Tensor, v: Tensor, tensors: dict[str, Tensor]
    ) -> Request:
        """Attention of a part, whose tensors these are."""
        causal, offset, left, first = part.band
        named = {"left": left, "first": first or None, **self.numbers, **tensors}
        variant = variant_of(causal, offset, named, exact=q.dtype in (torch.float32, torch.float64))
        return Request(NAME, q, k, v, variant, self.scale, (0, 1), {"q": q, "k": k, "v": v})

    def of_part(self, part: Part, step: int, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
        """Of the variant's tensors those of a part."""
        at, own = pieces(self.keys(step), *part.keys), self.held[self.ranks.rank]
        by_key = (n for n in ("begin", "end") if n in tensors)
        return tensors | {n: numbered(cut(tensors[n], at, -1), own, part) for n in by_key}

    def backend(self, q: Tensor, k: Tensor, v: Tensor, tensors: dict[str, Tensor]) -> str:
        """What runs all parts."""
        every = [part for step in self.steps for part in self.parts(step)]
        by_band = {part.band: self.request(part, q, k, v, tensors) for part in every}

        def reasons(backend: str) -> Iterator[backends.Reason]:
            for request in by_band.values():
                yield from request.reasons(backend)

        return backends.choose(NAME, self.impl, (q, k, v), reasons)

    def attention(self, request: Request) -> tuple[Tensor, Tensor]:
        """(out, lse) of a part; by the reference out is not rounded."""
        if self.impl in KERNELS:
            return request.made_by(str(self.impl))
        q, k, v = (x.to(reference.compute_dtype(x.dtype)) for x in (request.q, request.k, request.v))
        return request._replace(q=q, k=k, v=v).made_by(str(self.impl))

    def gradients(
        self, request: Request, rows: Rows, needs: Needs
    ) -> tuple[Tensor | None, Tensor | None, Tensor | None, dict[str, Tensor]]:
        """Those of q, k and v from a part, and of the variant's tensors by their names."""
        wanted = dict(zip(self.names, needs.tensors, strict=True))
        if self.impl in KERNELS:
            return request.gradients(str(self.impl), rows, (needs.q, needs.keys, needs.keys), wanted)
        return self.defined_gradients(request, rows, [name for name, need in wanted.items() if need])

    def defined_gradients(self, request: Request, rows: Rows, names: list[str]) -> Any:
        """`gradients` by the reference's own: a part has the share exp(its lse - lse) of the whole."""
        dout, dlse, out, lse = rows
        q, k, v = (x.detach().to(lse.dtype).requires_grad_() for x in (request.q, request.k, request.v))
        named = request.variant.named
        leaves = {n: named[n].detach().requires_grad_() for n in names}
        variant = request.variant._replace(named=named | leaves)
        with torch.enable_grad():
            part, part_lse = self.attention(request._replace(q=q, k=k, v=v, variant=variant))
        share = torch.where(part_lse == -math.inf, 0.0, torch.exp(part_lse - lse))
        dout = torch.zeros_like(part) if dout is None else dout.to(lse.dtype)
        d_lse = (dout * (part.detach() - out)).sum(-1)
        d_lse = d_lse if dlse is None else d_lse + dlse
        grads = [share[..., None] * dout, share * d_lse]
        made = torch.autograd.grad([part, part_lse], [q, k, v, *leaves.values()], grads)
        return *made[:3], dict(zip(leaves, made[3:], strict=True))


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


class Needs(NamedTuple):
    """Of which gradients are wanted; tensors: the variant's, but for sinks."""

    q: bool
    keys: bool
    sinks: bool
    tensors: tuple[bool, ...]


def numbered(x: Tensor, queries: list[Range], part: Part) -> Tensor:
    """Positions x as numbers of a part's queries: of those before each."""
    first, last = part.queries
    before = torch.zeros_like(x)
    for start, stop in queries:
        before = before + (x - start).clamp(0, stop - start)
    return (before - first).clamp(0, last - first)
