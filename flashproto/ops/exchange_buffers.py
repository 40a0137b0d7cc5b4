"""Exchange buffers: the words through which programs of a launch exchange partial results
(kernels/exchange.py).

Words must be 0 before a launch, and the launch leaves values in them.  Zeroing new words is a launch of
its own, which takes some microseconds before one of fifty.  A kernel that clears words avoids it: a
pair of sets of words serves launch after launch.  Each launch publishes in one set and clears the
other, in which the launch before it published.

Invariant: the words that a launch is given are 0.  Only launches on one stream use a pair, with one
count of words, and they run one after another.  The set in which a launch publishes is either new and
zeroed on that stream, or the launch before has cleared all of it and has ended.

Who might break the invariant, and why they cannot:
 -  Two threads, or a call within a call.  `take` removes the pair from a dictionary in one step, and
    `give` puts it back behind the launch.  So nobody else holds the same pair: the second finds none
    and makes a new one.  What is put back last is kept.
 -  A launch that raises or is interrupted gives nothing back: nobody knows what it left.
 -  A CUDA graph, which replays.  What it captures takes no pair, but zeroes words of its own at each
    replay.
 -  Another stream under the same handle.  Streams are known by their handles, as they are to torch's
    allocator, whose memory pairs are.  CUDA releases what belongs to a destroyed stream once its work
    is done: a stream that gets its handle comes after that.  The one handle that is another stream in
    each thread gets a new pair each time, which is not kept.
 -  A private memory pool that is on while the pair is made, and takes the memory back: a pair is made
    outside of it (device.py).

`zeroed` gives words to launches whose kernels clear none, made many at a time, under the same rules.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from .device import cdiv, outside_memory_pool
from .private import current_stream, is_capturing

CAPACITY = 64  # pairs in all; one has some thousandth of the bytes of the rows it was made for
PER_THREAD = 2  # cudaStreamPerThread
TOGETHER = 256  # what `zeroed` makes at once

Key = tuple[int, int, int]  # device, stream, count of words


class Pair(NamedTuple):
    """fresh: words that are 0; used: those to be cleared; key: None for a pair that is not kept."""

    fresh: Tensor
    used: Tensor
    key: Key | None


_pairs: dict[Key, tuple[Tensor, Tensor]] = {}
_zeroed: dict[Key, list[Tensor]] = {}


def forget() -> None:
    """All that is kept."""
    _pairs.clear()
    _zeroed.clear()


def zeros(device: torch.device, *shape: int, dtype: torch.dtype = torch.int64) -> Tensor:
    return torch.zeros(shape, dtype=dtype, device=device)


def take(device: torch.device, count: int) -> Pair:
    """A pair of `count` words each for the next launch on the current stream of `device`, which is the
    current device."""
    index = device.index
    stream = current_stream(index)
    if stream == PER_THREAD:
        return Pair(zeros(device, count), zeros(device, count), None)
    key = index, stream, count
    found = _pairs.pop(key, None)
    if found is None:
        found = outside_memory_pool(lambda: (zeros(device, count), zeros(device, count)), device)
    return Pair(*found, key)


def give(pair: Pair) -> None:
    """Put the pair back after its launch: the set that was published in is cleared next."""
    if pair.key is not None:
        if len(_pairs) >= CAPACITY:
            _pairs.clear()
        _pairs[pair.key] = pair.used, pair.fresh


def zeroed(device: torch.device, count: int) -> Tensor:
    """[count] of int32 that are 0 and nobody else's, for a launch on the current stream of `device`,
    which is the current device."""
    stream = PER_THREAD if is_capturing() else current_stream(device.index)
    if stream == PER_THREAD:
        return zeros(device, count, dtype=torch.int32)
    kept = _zeroed.setdefault((device.index, stream, count), [])
    try:
        return kept.pop()
    except IndexError:
        shape = TOGETHER, 4 * cdiv(count, 4)  # each starts at a multiple of 16 bytes
        made = outside_memory_pool(lambda: zeros(device, *shape, dtype=torch.int32), device)
        kept += made[:, :count].unbind()
        return kept.pop()
