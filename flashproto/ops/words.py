"""The words through which programs of a launch exchange partial results (kernels/exchange.py), for
launches that follow a plan.

Words must be 0 before a launch, which leaves something in them.  Zeroing new ones is a launch of its
own, of some microseconds before one of fifty.  A kernel that clears can do without: a pair of sets of
words serves launch after launch, each of which publishes in one set and clears the other, where the
launch before it published.

Why the words of such a launch are 0.  Only launches on one stream use a pair, with one count of words;
they run one after another, in the order in which they were made.  The set that a launch publishes in is
new, zeroed on that stream, or the launch before it has cleared all of it, and has ended.
 -  Who launches takes the pair out of a dictionary, in one step, and puts it back behind the launch.
    So no two threads ever hold the same pair, nor a call and another within it: the second finds none
    and makes a new one.  What is put back last is kept.
 -  A launch that raises or is interrupted puts nothing back: nobody knows what it left.
 -  What a CUDA graph captures takes no pair, but zeroes words of its own at each replay.
 -  Streams are known by their handles, as they are to torch's allocator, whose memory pairs are.  CUDA
    releases what belongs to a destroyed stream once its work is done: a stream that gets its handle
    comes after that.  The one handle that is another stream in each thread takes no pair.
 -  A pair outlives the call that made it, so that it is made where no private memory pool is (apart).
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

from .memory import apart

KEPT = 64  # pairs in all; one has some thousandth of the bytes of the rows it was made for
PER_THREAD = 2  # cudaStreamPerThread

# By device, stream and count of words: the set that is 0, and the other.
_pairs: dict[tuple[int, int, int], tuple[Tensor, Tensor]] = {}

current_device: Any = getattr(torch._C, "_cuda_getDevice", None)
current_stream: Any = getattr(torch._C, "_cuda_getCurrentRawStream", None)
is_capturing: Any = getattr(torch._C, "_cuda_isCurrentStreamCapturing", None)


def forget() -> None:
    """All pairs."""
    _pairs.clear()


def zeros_like(words: Tensor) -> Callable[[], Tensor]:
    """A function that returns as many new words, all 0."""
    count, device = words.numel(), words.device
    return lambda: torch.zeros(count, dtype=torch.int64, device=device)


def with_new(launch: Callable[..., Any], words: Tensor) -> Callable[..., Any]:
    """launch(*tensors, words) as a function of `tensors`."""
    zeros = zeros_like(words)
    return lambda *tensors: launch(*tensors, zeros())


def with_pairs(
    clearing: Callable[..., Any], ordinary: Callable[..., Any], words: Tensor, *no_used: None
) -> Callable[..., Any]:
    """clearing(*tensors, words, used) as a function of `tensors`.

    ordinary(*tensors, words, *no_used), which clears none, is taken where there can be no pair; it is
    what calls without a plan launch, so that nothing is compiled while a CUDA graph is captured.
    """
    count, index, zeros = words.numel(), words.get_device(), zeros_like(words)
    new_pair = partial(apart, lambda: (zeros(), zeros()), words.device)

    def without_pair(*tensors: Any) -> Any:
        return ordinary(*tensors, zeros(), *no_used)

    def with_pair(*tensors: Any) -> Any:
        if current_device() != index:
            with torch.cuda.device(index):
                return with_pair(*tensors)
        stream = current_stream(index)
        if stream == PER_THREAD or is_capturing():
            return without_pair(*tensors)
        key = index, stream, count
        pair = _pairs.pop(key, None)
        fresh, used = new_pair() if pair is None else pair
        made = clearing(*tensors, fresh, used)
        if len(_pairs) >= KEPT:
            _pairs.clear()
        _pairs[key] = used, fresh
        return made

    return with_pair if words.is_cuda else without_pair
