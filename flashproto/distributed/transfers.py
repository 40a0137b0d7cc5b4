"""What travels in the steps of ring_attention, each while this rank works on the step before."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from ..reference import compute_dtype
from .call import Call, Needed
from .order import Range, cut, in_order
from .sums import Sum

NOTHING = 0, 0


class Transfer(NamedTuple):
    """What is on its way: works to wait for; the span of keys that it is of, and their tensors."""

    works: list[dist.Work]
    span: Range
    tensors: list[Tensor]

    def arrived(self) -> tuple[Range, list[Tensor]]:
        for work in self.works:
            work.wait()
        return self.span, self.tensors


def fetch(call: Call, step: int, k: Tensor, v: Tensor) -> Transfer:
    """Begin to move the keys and values of a step."""
    (source, target), rank = call.peers(step), call.ranks.rank
    sends: list[tuple[Tensor, int]] = []
    if (wanted := call.needed(target, rank)) is not None:
        sends = [(cut(x, [wanted.span], 2).contiguous(), target) for x in (k, v)]
    if (wanted := call.needed(rank, source)) is None:
        return Transfer(call.ranks.exchange(sends, []), NOTHING, [])
    made = [empty(x, wanted.span, x.dtype) for x in (k, v)]
    return Transfer(call.ranks.exchange(sends, [(x, source) for x in made]), wanted.span, made)


def arriving(call: Call, k: Tensor, v: Tensor) -> Iterator[tuple[int, Range, list[Tensor]]]:
    """(step, span, [keys, values]) of each step, while those of the next one are on their way; there
    are no tensors in a step that needs none."""
    if call.gather:
        whole = [in_order(call.ranks.all_gather(x), 2) for x in (k, v)]
        yield 0, (0, whole[0].shape[2]), whole
        return
    coming = Transfer([], (0, k.shape[2]), [k, v])
    for step in call.steps:
        arrived = coming.arrived()
        if step + 1 < len(call.steps):
            coming = fetch(call, step + 1, k, v)
        yield step, *arrived


def give_back(call: Call, step: int, sums: Sequence[Sum], k: Tensor, v: Tensor) -> Transfer:
    """Begin to move the gradients of a step's keys and values to the rank that holds them."""
    if step == 0:
        return Transfer([], (0, k.shape[2]), [x.finish() for x in sums])
    (source, target), rank = call.peers(step), call.ranks.rank
    sends: list[tuple[Tensor, int]] = []
    if (wanted := call.needed(rank, source)) is not None:
        sends = [(x.finish().to(dtype_back(wanted, k)).contiguous(), source) for x in sums]
    if (wanted := call.needed(target, rank)) is None:
        return Transfer(call.ranks.exchange(sends, []), NOTHING, [])
    made = [empty(x, wanted.span, dtype_back(wanted, k)) for x in (k, v)]
    return Transfer(call.ranks.exchange(sends, [(x, target) for x in made]), wanted.span, made)


def empty(x: Tensor, span: Range, dtype: torch.dtype) -> Tensor:
    """Memory for some of the tokens of x [B, H, S, D]."""
    B, H, _, D = x.shape
    return x.new_empty(B, H, span[1] - span[0], D, dtype=dtype)


def dtype_back(wanted: Needed, k: Tensor) -> torch.dtype:
    """The gradient of one part goes as it is, in the dtype of the keys; a sum of several is not rounded
    on its way."""
    return k.dtype if wanted.parts == 1 else compute_dtype(k.dtype)
