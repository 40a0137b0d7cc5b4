"""Tiles and schedules of the attention kernels in kernels/hopper.

Chosen among the configurations that fit in registers and in 227 KiB of shared
memory by what an H200 measured at 1024, 4096 and 16384 tokens (README, "How the Hopper kernels came
about"); lengths between go to the nearer side.  Triton's cache on disk knows a configuration by its
fields alone: after a change of a property or of a named barrier's number, empty it.
"""

from __future__ import annotations

import heapq
from dataclasses import dataclass

from .attention import padded_head_dim

L2_SHARE = 32 << 20  # bytes of L2 that the tiles of concurrent programs may take


@dataclass(frozen=True)
class HopperForward:
    """The forward kernel at compile time.

    D: head_dim padded; BN: keys of a tile; W: consumer warpgroups of 64 query rows; KS, VS: buffers in
    the rings of keys and values; PP: ping-pong; WIDE: the output is shuffled to 16-byte stores, for
    which full rings of three leave no shared memory.
    """

    CAUSAL: bool
    D: int
    BN: int
    W: int
    KS: int
    VS: int
    PP: bool
    WIDE: bool

    @property
    def BM(self) -> int:
        """Query rows of a work item."""
        return 64 * self.W

    # Named barriers, from the top: V and K buffers, Q buffers, turns of the ping-pong.
    @property
    def VB(self) -> int:
        return 16 - self.VS

    @property
    def KB(self) -> int:
        return self.VB - self.KS

    @property
    def QB(self) -> int:
        return self.KB - self.W

    @property
    def PB(self) -> int:
        return self.QB - 2


@dataclass(frozen=True)
class HopperBackward:
    """The main backward kernel at compile time.

    D: head_dim padded; BM, BN: queries and keys of a tile; DQ: how dQ leaves: 0, vector atomics;
    1, bulk adds from shared memory; 2, one warpgroup each way.
    """

    CAUSAL: bool
    D: int
    BM: int
    BN: int
    DQ: int

    @property
    def NQ(self) -> int:
        """Columns of the part of dQ that one warpgroup makes."""
        return 128 if self.D == 256 else 64

    @property
    def TILES(self) -> int:
        """Tiles that the warpgroups exchange: dS twice; at head_dim 256 P twice and dS."""
        return 3 if self.D == 256 else 2

    @property
    def LATE(self) -> bool:
        """Whether lse and delta are read when needed, for want of registers to read them ahead."""
        return self.BM == 128

    # Named barriers, from the top; P at head_dim 256, where FULL is not in use.
    DS = 15
    OB = 13
    QB = 11
    FULL = 9
    PS = 9
    EMPTY = 7


def hopper_head_dim(head_dim: int) -> int:
    """The head dimension as the Hopper kernels see it."""
    return max(padded_head_dim(head_dim), 64)


def attention_forward_hopper(head_dim: int, Sk: int, causal: bool) -> HopperForward:
    """Forward: deep rings pay where a program sees many key tiles; wide stores where it ends often."""
    D = hopper_head_dim(head_dim)
    if D == 64:
        W = 2 if causal and Sk <= 2048 else 3
        return HopperForward(causal, D, 128, W, 4, 4, PP=False, WIDE=True)
    if D == 128:
        if Sk <= (4096 if causal else 2048):
            KS, VS = 2, 2
        else:
            KS, VS = (3, 3) if causal else (3, 2)
        return HopperForward(causal, D, 128, 2, KS, VS, PP=True, WIDE=KS + VS < 6)
    KS = 2 if Sk <= 8192 else 3
    return HopperForward(causal, D, 64, 2, KS, 2, PP=True, WIDE=KS == 2)


def attention_backward_hopper(head_dim: int, causal: bool) -> HopperBackward:
    """Backward: bulk adds are fastest where shared memory has room for them."""
    D = hopper_head_dim(head_dim)
    BM, BN, DQ = {64: (128, 128, 2), 128: (64, 128, 1), 256: (64, 64, 0)}[D]
    return HopperBackward(causal, D, BM, BN, DQ)


def _even_groups(heads: int, fit: int) -> int:
    """About `fit` heads, such that groups of that size have no short last one."""
    return -(-heads // -(-heads // max(1, fit)))


def heads_together_forward(config: HopperForward, B: int, Hq: int, Hkv: int, Sk: int) -> int:
    """Query heads whose work items are mixed: those whose keys and values fit in L2 together."""
    return _even_groups(B * Hkv, L2_SHARE // (4 * Sk * config.D)) * (Hq // Hkv)


def heads_together_backward(
    config: HopperBackward, B: int, Hq: int, Hkv: int, Sq: int, Sk: int, multiprocessors: int
) -> int:
    """Key heads whose tiles are mixed: those whose queries fit in L2 together, and enough key tiles for
    two rounds of programs, or a group's longest end alone."""
    fit = L2_SHARE // (8 * Sq * config.D * (Hq // Hkv))
    rounds = -(-2 * multiprocessors // -(-Sk // config.BN))
    return _even_groups(B * Hkv, max(fit, rounds))


def balanced_plan(
    config: HopperForward, heads: int, together: int, Sq: int, Sk: int, offset: int, programs: int
) -> list[list[int]]:
    """Work items of each program under a causal mask, heavy first within a group of `together` heads,
    each to the program that is free first (list scheduling).

    Items are numbered group by group and, within a group, from the last query tile to the first, the
    heads of a tile one after the other.  An item costs its key tiles and one more.
    """
    tiles = -(-Sq // config.BM)
    free = [(0, program) for program in range(programs)]
    items: list[list[int]] = [[] for _ in range(programs)]
    item = 0
    for first in range(0, heads, together):
        for tile in reversed(range(tiles)):
            cost = max(-(-min(Sk, (tile + 1) * config.BM + offset) // config.BN), 1) + 1
            for _ in range(min(together, heads - first)):
                at, program = free[0]
                heapq.heapreplace(free, (at + cost, program))
                items[program].append(item)
                item += 1
    return items
