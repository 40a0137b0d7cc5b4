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
# Items for each program among heads that are mixed in the backward, so that a group's longest ones do
# not end alone; in order, so that the items of one head start far enough apart not to wait (by a
# simulation of the schedule: at 2, 3, 4, 6 calls without a mask take up to 6%, 4%, 4%, 3% longer,
# causal ones up to 48%, 28%, 22%, 15%).
ROUNDS, ORDERED_ROUNDS, ORDERED_CAUSAL_ROUNDS, ORDERED_CAUSAL_SHORT_ROUNDS = 2, 3, 6, 4
SHORT = 2048  # keys; of such rows so many heads would be mixed that none shares a query tile in L2


@dataclass(frozen=True)
class HopperForward:
    """The forward kernel at compile time.

    D: head_dim padded; BN: keys of a tile; W: consumer warpgroups of 64 query rows; KS, VS: buffers in
    the rings of keys and values; OVERLAP: a consumer's softmax runs under its own P V, which takes
    registers for P twice.
    """

    CAUSAL: bool
    D: int
    BN: int
    W: int
    KS: int
    VS: int
    OVERLAP: bool

    @property
    def BM(self) -> int:
        """Query rows of a work item."""
        return 64 * self.W

    # Named barriers, from the top: V and K buffers, Q buffers, turns to issue products.
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
        return self.QB - self.W


@dataclass(frozen=True)
class HopperBackward:
    """The main backward kernel at compile time.

    ORDERED: dQ is summed in a fixed order; D: head_dim padded; BM, BN: queries and keys of a tile; DQ:
    how dQ leaves: 0, vector atomics; 1, bulk adds from shared memory; 2, one warpgroup each way; KV:
    buffers for keys and for values; DOWN: from the last query tile down, heads of a group within it;
    FIRST: the first key tile stores its part of dQ, on which the others wait, instead of all adding to
    zeros; ORDERED needs DOWN and FIRST.
    """

    CAUSAL: bool
    ORDERED: bool
    D: int
    BM: int
    BN: int
    DQ: int
    KV: int
    DOWN: bool
    FIRST: bool

    @property
    def NQ(self) -> int:
        """Columns of the part of dQ that one warpgroup makes."""
        return 128 if self.D == 256 else 64

    @property
    def TILES(self) -> int:
        """Tiles that the warpgroups exchange: dS twice; at head_dim 256 P twice and dS."""
        return 3 if self.D == 256 else 2

    @property
    def STEP(self) -> int:
        """Of the inner loop: heads in order, else queries."""
        return 1 if self.DOWN else self.BM

    @property
    def LATE(self) -> bool:
        """Whether lse and delta are read when needed, for want of registers to read them ahead."""
        return self.BM == 128

    # Named barriers, from the top; P at head_dim 256, where FULL is not in use.  Triton uses 0 to 3.
    DS = 15
    OB = 13
    QB = 11
    FULL = 9
    PS = 9
    EMPTY = 7
    DONE = 6
    TURN = 160  # threads at EMPTY that wait for turns: a warpgroup, and the warp that takes them


def hopper_head_dim(head_dim: int) -> int:
    """The head dimension as the Hopper kernels see it."""
    return max(padded_head_dim(head_dim), 64)


def attention_forward_hopper(head_dim: int, Sk: int, causal: bool) -> HopperForward:
    """Forward.  Three consumers at head_dim 64, unless rows are short and their tiles' ends many; a
    third buffer of keys pays in long full rows of head_dim 128."""
    D = hopper_head_dim(head_dim)
    if D == 64 and causal and Sk < 1536:
        return HopperForward(causal, D, BN=128, W=2, KS=4, VS=4, OVERLAP=True)
    if D == 64:
        return HopperForward(causal, D, BN=128, W=3, KS=3, VS=2, OVERLAP=False)
    if D == 128:
        KS = 2 if causal or Sk <= 2048 else 3
        return HopperForward(causal, D, BN=128, W=2, KS=KS, VS=2, OVERLAP=True)
    return HopperForward(causal, D, BN=64, W=2, KS=2, VS=2, OVERLAP=False)


def attention_backward_hopper(
    head_dim: int, Sk: int, causal: bool, ordered: bool = False
) -> HopperBackward:
    """Backward: bulk adds are fastest where shared memory has room for them.  In long rows of head_dim
    64 zeros cost less than the waits for the first key tile."""
    D = hopper_head_dim(head_dim)
    BM, BN, DQ = {64: (128, 128, 2), 128: (64, 128, 1), 256: (64, 64, 0)}[D]
    KV = 2 if D == 64 else 1
    first = ordered or D != 64 or Sk < (8192 if causal else 1536)
    down = ordered or (causal and first)
    return HopperBackward(causal, ordered, D, BM, BN, DQ, KV, DOWN=down, FIRST=first)


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
    some rounds of programs; if possible such that all groups are whole, as a last one with few heads
    would leave programs without work (by the simulation 5% of 16 heads in groups of 3).

    In order, short rows: no more heads than fit or, under a causal mask, than leave four programs to
    each.  With twice to four times as many an H200 took 16-38% longer than in no order, though by the
    simulation waits are 0-9%.
    """
    heads = B * Hkv
    fit, rounds = L2_SHARE // (8 * Sq * config.D * (Hq // Hkv)), ROUNDS
    if config.ORDERED:
        rounds = ORDERED_ROUNDS
        if config.CAUSAL:
            rounds = ORDERED_CAUSAL_SHORT_ROUNDS if Sk <= SHORT else ORDERED_CAUSAL_ROUNDS
    elif not config.CAUSAL:
        fit, rounds = 1, 1  # all items are alike and, but for the first, wait for none
    items = rounds * multiprocessors * 9 // 10  # 32 heads of 8 tiles will do for two rounds of 132
    enough = -(-items // -(-Sk // config.BN))
    if config.ORDERED and Sk <= SHORT:
        enough = min(enough, max(fit, multiprocessors * 9 // 40 if config.CAUSAL else 1))
    least = min(heads, max(1, fit, enough))
    whole = (n for n in range(least, min(2 * least, heads) + 1) if heads % n == 0)
    return next(whole, _even_groups(heads, least))


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
