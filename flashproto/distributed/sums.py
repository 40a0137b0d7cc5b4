"""What parts of attention add up to, in at least float32."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from .. import backends, reference
from .order import Range

if backends.HAS_TRITON:
    from ..ops import attention_merge as merge_op


class Sum:
    """A sum of gradients of tokens [B, H, S, D], like a tensor, in at least float32."""

    def __init__(self, like: Tensor) -> None:
        self.like = like
        self.dtype = reference.compute_dtype(like.dtype)
        self.total: Tensor | None = None

    def add(self, tokens: Range, x: Tensor | None) -> None:
        if x is None:
            return
        if self.total is None and x.shape == self.like.shape:
            self.total = x  # as it is, if it stays the only one
            return
        if self.total is None:
            self.total = torch.zeros_like(self.like, dtype=self.dtype)
        self.total = self.total.to(self.dtype)
        self.total[:, :, slice(*tokens)] += x

    def finish(self) -> Tensor:
        return torch.zeros_like(self.like) if self.total is None else self.total


class Merged:
    """Attention of each query to parts of the keys, (out, lse), merged in at least float32.

    pieces: of ranges of queries, in order, what they have so far; the others have seen no key.  Each
    piece is memory of its own, so that nothing is copied into a whole before the end.
    """

    def __init__(self, q: Tensor, v: Tensor, by_kernel: bool) -> None:
        self.shape, self.by_kernel = (*q.shape[:3], v.shape[3]), by_kernel
        self.like = q.new_empty(0, dtype=reference.compute_dtype(q.dtype))
        self.pieces: list[Piece] = []

    def add(self, queries: Range, out: Tensor, lse: Tensor) -> None:
        given = [*self.pieces, Piece(queries, out, lse)]
        edges = sorted({edge for piece in given for edge in piece.queries})
        states = [
            (at, [piece.of(at) for piece in given if piece.has(at)]) for at in itertools.pairwise(edges)
        ]
        self.pieces = [Piece(at, *self.merged(*zip(*own, strict=True))) for at, own in states if own]

    def merged(self, outs: Sequence[Tensor], lses: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
        if len(outs) == 1:
            return outs[0], lses[0]
        if self.by_kernel:
            settings = merge_op.Settings(False, self.like.dtype)
            return merge_op.attention_merge((*outs, *lses), settings, (0, 1))
        return reference.merge_attention([x.to(self.like.dtype) for x in outs], lses)

    def finish(self, sinks: Tensor | None, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """(out in this dtype, lse); a sink is a part of the keys, whose value is 0."""
        everything = 0, self.shape[2]
        if sinks is not None:
            zeros = self.like.new_zeros(self.shape[3:]).expand(self.shape)
            self.add(everything, zeros, sinks.to(self.like.dtype)[:, None].expand(self.shape[:3]))
        if len(self.pieces) == 1 and self.pieces[0].queries == everything:
            return self.pieces[0].out.to(dtype), self.pieces[0].lse.contiguous()
        out = self.like.new_zeros(self.shape, dtype=dtype)
        lse = self.like.new_full(self.shape[:3], -math.inf)
        for piece in self.pieces:
            at = slice(*piece.queries)
            out[:, :, at], lse[:, :, at] = piece.out, piece.lse
        return out, lse


class Piece(NamedTuple):
    """Attention of some queries, out [B, H, n, D] and lse [B, H, n]."""

    queries: Range
    out: Tensor
    lse: Tensor

    def has(self, at: Range) -> bool:
        return self.queries[0] <= at[0] and at[1] <= self.queries[1]

    def of(self, at: Range) -> tuple[Tensor, Tensor]:
        first = self.queries[0]
        own = slice(at[0] - first, at[1] - first)
        return self.out[:, :, own], self.lse[:, :, own]
