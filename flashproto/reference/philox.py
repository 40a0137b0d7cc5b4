"""Random bits by Philox-4x32, in integers of 64 bits: which probabilities attention's dropout keeps.

Source: Salmon et al., "Parallel Random Numbers: As Easy as 1, 2, 3" (2011).
"""

from __future__ import annotations

import torch
from torch import Tensor

KEYS = 0x9E3779B9, 0xBB67AE85
FACTORS = 0xD2511F53, 0xCD9E8D57
WORD = 0xFFFFFFFF


def philox(
    seed: Tensor, c0: Tensor, c1: Tensor, c2: Tensor, c3: Tensor, rounds: int = 7
) -> tuple[Tensor, ...]:
    """The four words of 32 bits for these four counters; all int64."""

    def product(x: Tensor, factor: int) -> tuple[Tensor, Tensor]:
        low, high = x * (factor & 0xFFFF), x * (factor >> 16)  # of 48 bits each, in signed 64
        whole = (low >> 16) + high
        return whole >> 16, ((whole << 16) | (low & 0xFFFF)) & WORD

    k0, k1 = seed & WORD, (seed >> 32) & WORD
    for _ in range(rounds):
        (high0, low0), (high2, low2) = product(c0, FACTORS[0]), product(c2, FACTORS[1])
        c0, c1, c2, c3 = high2 ^ c1 ^ k0, low2, high0 ^ c3 ^ k1, low0
        k0, k1 = (k0 + KEYS[0]) & WORD, (k1 + KEYS[1]) & WORD
    return c0, c1, c2, c3


def kept(seed: Tensor, head: Tensor, i: Tensor, j: Tensor, p: float) -> Tensor:
    """Which probabilities dropout keeps, of query i and key j of a head, as kernels/philox.py says it;
    integers that broadcast, p a multiple of 1/65536."""
    words = philox(seed, j // 16 * 4 + j % 8 // 2, i // 16 * 8 + i % 8, head, torch.ones_like(head))
    low, high = (torch.where(j // 8 % 2 == 0, words[n], words[n + 1]) for n in (0, 2))
    word = torch.where(i // 8 % 2 == 0, low, high)
    return (word >> (j % 2 * 16)) & 0xFFFF >= round(p * 65536)


def kept_factor(p: float) -> float:
    """What those that are kept are multiplied by; 0 where none is."""
    return 1 / (1 - p) if p < 1 else 0.0
