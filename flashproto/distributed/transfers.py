"""What travels in the steps of ring_attention, each while this rank works on steps before."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from ..reference import compute_dtype
from .call import Call, Needed
from .order import Range, in_order
from .sums import Sum

# How many steps before its own the keys and values of a step are asked for.  The kernel that receives
# them finds no multiprocessor while attention has all of them: what is asked for beside a step begins
# as that step ends, and has the next one to arrive in.  Each step more takes memory for one more shard.
AHEAD = 2


class Transfer(NamedTuple):
    """What is on its way: works to wait for; the span of keys that it is of, and their tensors.

    sent: what this rank sends meanwhile, whose memory nobody else may have before that.
    """

    works: list[dist.Work]
    span: Range
    tensors: list[Tensor]
    sent: list[tuple[Tensor, int]]

    def arrived(self) -> tuple[Range, list[Tensor]]:
        for work in self.works:
            work.wait()
        return self.span, self.tensors


def at_hand(*tensors: Tensor) -> Transfer:
    """Tensors that are here, of all their tokens; or none."""
    return Transfer([], (0, tensors[0].shape[2]) if tensors else (0, 0), [*tensors], [])


def begin(
    call: Call,
    sends: list[tuple[Tensor, int]],
    wanted: Needed | None,
    dtype: torch.dtype,
    like: tuple[Tensor, Tensor],
    source: int,
) -> Transfer:
    """Begin to send, and to receive from a rank what is wanted of keys and values like these."""
    made = []
    if wanted is not None:
        start, stop = wanted.span
        made = [x.new_empty(*x.shape[:2], stop - start, x.shape[3], dtype=dtype) for x in like]
    works = call.ranks.exchange(sends, [(x, source) for x in made])
    return Transfer(works, (0, 0) if wanted is None else wanted.span, made, sends)


def fetch(call: Call, step: int, k: Tensor, v: Tensor) -> Transfer:
    """Begin to move the keys and values of a step."""
    (source, target), rank = call.peers(step), call.ranks.rank
    sends: list[tuple[Tensor, int]] = []
    if (wanted := call.needed(target, rank)) is not None:
        sends = [(x[:, :, slice(*wanted.span)].contiguous(), target) for x in (k, v)]
    return begin(call, sends, call.needed(rank, source), k.dtype, (k, v), source)


def arriving(call: Call, k: Tensor, v: Tensor) -> Iterator[tuple[int, Range, list[Tensor]]]:
    """(step, span, [keys, values]) of each step, while those of the next ones are on their way; there
    are no tensors in a step that needs none."""
    if call.gather:
        whole = [in_order(call.ranks.all_gather(x), 2) for x in (k, v)]
        yield 0, *at_hand(*whole).arrived()
        return
    coming = deque([at_hand(k, v)])
    coming += [fetch(call, step, k, v) for step in call.steps[1:AHEAD]]
    for step in call.steps:
        arrived = coming.popleft().arrived()
        if step + AHEAD < len(call.steps):
            coming.append(fetch(call, step + AHEAD, k, v))
        yield step, *arrived


def give_back(call: Call, step: int, sums: Sequence[Sum], k: Tensor, v: Tensor) -> Transfer:
    """Begin to move the gradients of a step's keys and values to the rank that holds them."""
    if step == 0:
        return at_hand(*(x.finish() for x in sums))
    (source, target), rank = call.peers(step), call.ranks.rank
    sends: list[tuple[Tensor, int]] = []
    if (wanted := call.needed(rank, source)) is not None:
        sends = [(x.finish().to(dtype_back(wanted, k)).contiguous(), source) for x in sums]
    wanted = call.needed(target, rank)
    return begin(call, sends, wanted, dtype_back(wanted, k), (k, v), target)


def dtype_back(wanted: Needed | None, k: Tensor) -> torch.dtype:
    """The gradient of one part goes as it is, in the dtype of the keys; a sum of several is not rounded
    on its way."""
    return compute_dtype(k.dtype) if wanted is not None and wanted.parts > 1 else k.dtype
