"""What parts of attention add up to, in at least float32."""

from __future__ import annotations

import torch
from torch import Tensor

from .. import reference
from .order import Range


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
    """The online softmax's state (m, l) of each query, with out beside it, in at least float32."""

    def __init__(self, q: Tensor, v: Tensor) -> None:
        self.shape = *q.shape[:3], v.shape[3]
        self.like = q.new_empty(0, dtype=reference.compute_dtype(q.dtype))
        self.out: Tensor | None = None

    def begun(self) -> Tensor:
        """out, of which nothing is known yet if no part came in."""
        if self.out is None:
            self.m, self.l = reference.online_softmax_start(self.shape[:3], self.like)
            self.out = self.like.new_zeros(self.shape)
        return self.out

    def add(self, queries: Range, out: Tensor, lse: Tensor) -> None:
        """Attention of a part is the state (lse, 1) with out beside it."""
        if self.out is None and out.shape == self.shape:
            self.m, self.l, self.out = lse, torch.ones_like(lse), out.to(self.like.dtype)
            return
        total, at = self.begun(), slice(*queries)
        m, l, w1, w2 = reference.online_softmax_merge(
            self.m[:, :, at], self.l[:, :, at], lse, torch.ones_like(lse)
        )
        self.m[:, :, at], self.l[:, :, at] = m, l
        total[:, :, at].mul_(w1[..., None]).addcmul_(out, w2[..., None])

    def finish(self, sinks: Tensor | None, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """(out in this dtype, lse); sinks are the state (sink, 1) with nothing beside it."""
        total = self.begun()
        if sinks is not None:
            sink = sinks.to(self.m.dtype)[:, None].expand_as(self.m)
            self.m, self.l, w1, _ = reference.online_softmax_merge(
                self.m, self.l, sink, torch.ones_like(sink)
            )
            total.mul_(w1[..., None])
        lse, normaliser = reference.online_softmax_finish(self.m, self.l)
        made = torch.empty_like(total, dtype=dtype)
        return torch.mul(total, normaliser[..., None], out=made), lse
