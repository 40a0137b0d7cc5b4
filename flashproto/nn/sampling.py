"""The next token from logits: functions of tensors alone, which a CUDA graph can hold.

Legend: V tokens of the vocabulary; logits [..., V].
"""

from __future__ import annotations

import math
import sys
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from ..checks.options import LARGEST, SMALLEST, check_integer, check_number


class Sampling(NamedTuple):
    """How tokens are drawn, see GPT.generate; None and 1 leave a part out."""

    temperature: float = 1.0
    top_k: int | None = None
    top_p: float | None = None
    min_p: float | None = None
    repetition_penalty: float = 1.0

    def checked(self, name: str) -> Sampling:
        """Itself; ValueError or TypeError for a number that does not fit."""
        takes, do = "a finite number, 0 or more", "Try 0.8."
        t = check_number(name, "temperature", self.temperature, 0.0, LARGEST, takes, do)
        do = "Pass None to keep every token."
        if self.top_k is not None:
            takes = "an integer of at least 1, or None"
            check_integer(name, "top_k", self.top_k, 1, sys.maxsize, takes, do)
        for argument, share in (("top_p", self.top_p), ("min_p", self.min_p)):
            if share is not None:
                check_number(name, argument, share, 0.0, 1.0, "0 to 1, or None", do)
        takes, do, penalty = "a positive number", "Pass 1.0 for none.", self.repetition_penalty
        check_number(name, "repetition_penalty", penalty, SMALLEST, LARGEST, takes, do)
        return self._replace(temperature=t)


def seeds_of(
    name: str,
    seeds: Sequence[int] | None,
    B: int,
    generator: torch.Generator | None,
    device: torch.device,
) -> Tensor:
    """int64 [B], those given or drawn."""
    if seeds is None:
        return torch.randint(2**63 - 1, (B,), generator=generator, device=device)
    takes, do = "integers of 64 bits", "Pass range(B), say."
    numbers = [check_integer(name, "seeds", seed, -(2**63), 2**63 - 1, takes, do) for seed in seeds]
    return torch.tensor(numbers, dtype=torch.int64, device=device)


def sample(logits: Tensor, seeds: Tensor, index: Tensor, how: Sampling, seen: Tensor | None) -> Tensor:
    """Tokens [...] int64 of logits [..., V].

    seeds, index: int64 [...], a sequence's seed and how many tokens it has drawn before this one: they
    alone say which numbers are drawn.  seen: bool [..., V], tokens that the sequence has.

    Token v is where log p_v - log e_v is largest, for numbers e of the exponential distribution: its
    probability is p_v, and no sum has to be taken in an order.
    """
    logits = logits.float()
    if seen is not None:
        logits = penalized(logits, seen, how.repetition_penalty)
    if how.temperature == 0.0:
        return logits.argmax(-1)
    scores = filtered(logits, how)
    return (scores - exponentials(seeds, index, logits.shape[-1]).log()).argmax(-1)


def penalized(logits: Tensor, seen: Tensor, penalty: float) -> Tensor:
    """Logits of tokens that were seen, divided by the penalty above 0 and multiplied by it below.

    Source: Keskar et al., "CTRL" (2019), section 4.1.
    """
    return torch.where(seen, torch.where(logits > 0, logits / penalty, logits * penalty), logits)


def filtered(logits: Tensor, how: Sampling) -> Tensor:
    """log p up to a constant, the largest 0, and -inf for tokens that are left out: float32 logits
    divided by the temperature, of which top_k, then top_p, then min_p keep some.

    The largest logit becomes 0 before the division and stays 0 after it, however small the temperature
    is: the limits at 0 and infinity are those of the formula.  Within the bounds a temperature is a
    float32 number, and so is its reciprocal, by which a GPU multiplies.
    """
    bounds = torch.finfo(torch.float32)
    scores = logits - logits.amax(-1, keepdim=True)
    scores = scores / min(max(how.temperature, bounds.tiny), bounds.max)
    if how.top_k is not None and how.top_k < logits.shape[-1]:
        least = logits.topk(how.top_k).values[..., -1:]
        scores = scores.masked_fill(logits < least, -torch.inf)
    if how.top_p is not None and how.top_p < 1.0:
        scores = scores.masked_fill(~nucleus(torch.softmax(scores, -1), how.top_p), -torch.inf)
    if how.min_p:
        scores = scores.masked_fill(scores < math.log(how.min_p), -torch.inf)
    return scores


def nucleus(p: Tensor, top_p: float) -> Tensor:
    """Which of the probabilities p [..., V] float32 are the fewest of the largest whose sum is at least
    top_p; of equal ones all.

    The least of them is found by halving: numbers of one sign are in the order of their bits.  It takes
    no sort, and gives the same bits every time.
    Source: Holtzman et al., "The Curious Case of Neural Text Degeneration" (2020).
    """
    bits = p.view(torch.int32)
    high = bits.amax(-1, keepdim=True)
    low = torch.zeros_like(high)
    for _ in range(31):
        middle = low + (high - low + 1) // 2
        is_enough = (p * (bits >= middle)).sum(-1, keepdim=True) >= top_p
        low, high = torch.where(is_enough, middle, low), torch.where(is_enough, high, middle - 1)
    return bits >= low


def exponentials(seeds: Tensor, index: Tensor, size: int) -> Tensor:
    """float32 [..., size], independent numbers of the exponential distribution, for seeds and index
    [...] int64.

    A number is a hash of seed, index and place.  Small numbers, which win, have all bits of a float32.
    """
    place = torch.arange(1, size + 1, device=seeds.device)
    key = _mixed(_mixed(seeds) + index * _GAMMA)
    bits = _shifted(_mixed(key[..., None] + place * _GAMMA), 11)
    u = ((bits.float() + 0.5) * 2.0**-53).clamp(max=1 - 2.0**-24)
    return -torch.log1p(-u)


# SplitMix64's increment and its two multipliers, as signed numbers: Steele, Lea and Flood, "Fast
# splittable pseudorandom number generators" (2014).  Products are taken modulo 2^64.
_GAMMA, _FIRST, _SECOND = (
    x - 2**64 for x in (0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB)
)


def _shifted(x: Tensor, n: int) -> Tensor:
    """x >> n of 64 bits without a sign."""
    return (x >> n) & ((1 << (64 - n)) - 1)


def _mixed(x: Tensor) -> Tensor:
    """Any 64 bits to others, one to one."""
    x = (x ^ _shifted(x, 30)) * _FIRST
    x = (x ^ _shifted(x, 27)) * _SECOND
    return x ^ _shifted(x, 31)
