"""Tiles and schedules of the attention backward kernel in kernels/hopper; chosen as hopper.py says."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from .hopper import (
    L2_SHARE,
    MULTIPROCESSORS,
    even_groups,
    hopper_head_dim,
    more_columns,
    named_barriers,
)

if TYPE_CHECKING:
    from ..variant import Kind

# docs/hopper.md has the measurements behind these thresholds.  Pairs of values are those without a
# mask and under the causal one.

# Items for each program among the heads that are mixed in the causal backward, so that the longest
# items of a group do not end alone.
ROUNDS = 2
# The same of masks with a table, whose longest lists may be several times as long as the mean.
LISTED_ROUNDS = 4
# In order, by head_dim: keys of the heads that are mixed, and the most heads.  With fewer heads the
# items of a head start so close together that they wait; more share too little in L2.
ORDERED_HEADS = {
    64: ((65536, 64), (131072, 64)),
    128: ((65536, 16), (32768, 32)),
    256: ((16384, 8), (32768, 32)),
}
# Keys of a row from which on key tiles of 256 are faster at head_dim 64.
PAIRED_ROWS = (512, 2048)
# Keys of a row from which on zeros are faster than the first key tile's store, by head_dim and keys of
# a tile: without a mask, under the causal one, and there with grouped heads.
ZEROED_ROWS = {
    (64, 128): (256, 8192, math.inf),
    (64, 256): (3072, 3072, 0),
    (128, 128): (1536, 8192, 3072),
    (256, 64): (math.inf, math.inf, math.inf),
}
# Rounds of 132 work items up to which zeros are faster in shorter rows too, at head_dim 128, in the
# same three cases: with the store, the programs of the first round begin at one query tile of each
# head, and wait for it.
ZEROED_ROUNDS = (4, 8, 2)
# Keys of a row below which alternate walks are faster in no order too, by head_dim.
ALTERNATE_ROWS = {64: 3072, 128: 3072, 256: 0}
# Keys of a row from which on grouped heads walk in waves, if not in pairs: in no order and in order.
WAVED_ROWS = {64: (2048, math.inf), 128: (0, 3072), 256: (0, 6144)}
# Keys of the rows in which grouped heads walk down side by side, without a mask and from zeros.
SIDE_BY_SIDE_ROWS = range(3072, 12288)
# Under the causal mask, keys of the heads that are mixed, and the most heads, since programs that walk
# together queue for the sums of few heads; not where they begin with different heads.
SPREAD_HEADS = (65536, 8)
# Keys of all heads from which on tiles of 256 make three rounds of 132 programs.  With fewer, the last
# round would cost more than the larger tiles gain.
PAIRED_KEYS = 3 * MULTIPROCESSORS * 256


# How the consumers of a key tile walk through the query tiles that see it:
#   by_head    head by head, each from its first query tile to the last
#   round      so too, but programs that start together begin apart and go round
#   down       from the last query tile to the first, through all heads of the group at each
#   waves      down, and every other round of programs up from the diagonal
#   alternate  down, and half of the heads up from the diagonal
Walk = Literal["by_head", "round", "down", "waves", "alternate"]
# How the sums of dQ begin, and in which order key tiles add to them:
#   zeros      all add to zeros, in any order
#   store      the first key tile stores its part; the others wait for it, and add in any order
#   ordered    the first stores, and the others add in order: the same bits every time
Sums = Literal["zeros", "store", "ordered"]
WALKS: dict[Sums, tuple[Walk, ...]] = {
    "zeros": ("by_head", "round", "down", "waves"),
    "store": ("by_head", "down", "waves", "alternate"),
    "ordered": ("down", "waves", "alternate"),
}
CAUSAL_WALKS: tuple[Walk, ...] = ("waves", "alternate")


@dataclass(frozen=True)
class HopperBackward:
    """The main backward kernel at compile time.

    D: head_dim padded; BM, BN: queries and keys of a tile; DQ: how dQ leaves: 0, vector atomics; 1,
    bulk adds from shared memory; 2, one warpgroup each way; KV: buffers for keys and for values; WALK
    and SUMS: see above; MORE: columns that queries and keys have beside D, that of values: none or, at
    128 with DQ 0 and zeros, 64.

    Raises ValueError: the sums do not allow the walk; a walk that goes up from the diagonal has no
    causal mask, or one that goes round has one, or no bulk adds.
    """

    KIND: Kind
    D: int
    BM: int
    BN: int
    DQ: int
    KV: int
    WALK: Walk
    SUMS: Sums
    MORE: int = 0

    def __post_init__(self) -> None:
        allowed = self.WALK in WALKS[self.SUMS] and (self.KIND.CAUSAL or self.WALK not in CAUSAL_WALKS)
        if self.WALK == "round":
            allowed = allowed and self.DQ == 1 and not self.KIND.CAUSAL
        if not allowed:
            what = f"{self.KIND.name} attention with sums {self.SUMS!r} and DQ {self.DQ}"
            raise ValueError(f"{what} has no walk {self.WALK!r}")

    @property
    def ORDERED(self) -> bool:
        """Whether dQ is summed in a fixed order."""
        return self.SUMS == "ordered"

    @property
    def FIRST(self) -> bool:
        """Whether the first key tile stores its part of dQ, for which the others wait."""
        return self.SUMS != "zeros"

    @property
    def ROUND(self) -> bool:
        """Whether walks begin one behind the other and go round."""
        return self.WALK == "round"

    @property
    def DOWN(self) -> bool:
        """Whether a walk takes the heads of a group within each query tile, and some or all go down."""
        return self.WALK not in ("by_head", "round")

    @property
    def WAVES(self) -> bool:
        """Whether every other round of programs goes up."""
        return self.WALK == "waves"

    @property
    def ALTERNATE(self) -> bool:
        """Whether half of the heads are walked up, and take key tiles from the last to the first."""
        return self.WALK == "alternate"

    @property
    def BOTH(self) -> bool:
        """Whether some walks go up and others down."""
        return self.ALTERNATE or self.WAVES

    @property
    def ROTATE(self) -> bool:
        """Whether walks begin with different heads of a group at each query tile; consumers that add by
        atomics would have to know the head."""
        return self.DQ == 1 and self.DOWN and not self.FIRST

    @property
    def COUNTED(self) -> bool:
        """Whether finished items are counted, so that the postprocess may begin with the sums of some
        heads while others are added to: without a mask, where heads follow one another and the last
        round leaves programs without work."""
        return self.KIND.PLAIN and not self.KIND.CAUSAL

    @property
    def name(self) -> str:
        """What tells it from the others that are chosen."""
        return (
            f"backward-{f'{self.D + self.MORE}-' * (self.MORE > 0)}{self.D}"
            f"-{self.KIND.name}{'-ordered' * self.ORDERED}"
            f"{'-alternate' * self.ALTERNATE}{'-waves' * self.WAVES}{'-zeros' * (not self.FIRST)}"
            f"{'-pairs' * self.PAIRS}{'-rotate' * (self.ROTATE and not self.KIND.CAUSAL)}"
        )

    @property
    def PAIRS(self) -> bool:
        """Whether each warpgroup owns a pair of blocks of 64 keys, and the two make dQ in turns; needs
        DQ 1."""
        return self.BN == 256

    @property
    def ONCE(self) -> bool:
        """Whether descriptors of K's rows and of V are worked out once an item, not once a step: where
        registers are left for them."""
        return self.D == 64 and not self.ALTERNATE

    @property
    def KV_IN_REGS(self) -> bool:
        """Whether a consumer keeps half of the columns of its keys or values in registers: at head_dim
        128, where shared memory is the limit."""
        return self.D == 128 and not self.MORE

    @property
    def SELECTOR(self) -> bool:
        """Whether the ones that add lse and delta lie in shared memory: where registers are short."""
        return self.D == 128

    @property
    def CHUNKS(self) -> int:
        """Parts of the sums of dQ of a query tile, of NQ columns each."""
        return 3 if self.MORE else 2

    @property
    def PEELED(self) -> bool:
        """Whether the steps that may need a mask are loops of their own.  It was tried where
        KV_IN_REGS, with the causal mask and with none."""
        return self.KV_IN_REGS and self.KIND.PLAIN

    @property
    def TERMS_FIRST(self) -> bool:
        """Whether lse and delta are added to scores and dP first, not last: it is faster without a
        mask, where the first key tile stores and the order is free."""
        return self.KV_IN_REGS and self.FIRST and not (self.KIND.CAUSAL or self.ORDERED)

    @property
    def K_IN_REGS(self) -> int:
        """Columns of the keys that stay in registers: under the causal mask, and without one where
        TERMS_FIRST."""
        causal = self.KIND.CAUSAL and not self.KIND.ALIBI
        return 64 * (self.KV_IN_REGS and (causal or self.TERMS_FIRST))

    @property
    def V_IN_REGS(self) -> int:
        """Columns of the values that stay in registers: where no columns of the keys do.  ALiBi leaves
        no registers for either: ptxas of Triton 3.6 would have each product wait for the one before."""
        return 64 * (self.KV_IN_REGS and not self.K_IN_REGS and not self.KIND.ALIBI)

    @property
    def ITEM_IN_SMEM(self) -> bool:
        """Whether a consumer keeps its item's number in shared memory, not in a register and global
        memory.  It is for the order in which ptxas then puts the loops."""
        return self.KV_IN_REGS and self.KIND.CAUSAL and not (self.FIRST or self.WAVES)

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
        """Of the inner loop: heads in order or places of a list, else queries."""
        return 1 if self.DOWN or self.KIND.TABLE else self.BM

    # Named barriers: how many of each, who waits there, and for what.
    BARRIERS = named_barriers(
        DS=1,  # consumers: dS is written; in pairs, that of even steps
        OB=2,  # the producer: a buffer of dO has been read
        QB=2,  # the producer: a buffer of Q has been read and, in an item's last step, K and V
        FULL=2,  # the producer: a warpgroup's part of dQ lies in shared memory
        EMPTY=2,  # a consumer: its part has been read or, of atomics, its turn to add has come
        DONE=1,  # the producer's third warp: the bulk adds are complete
        ODD=1,  # consumers, in pairs: dS of odd steps is written
    )
    DS, OB, QB, FULL, EMPTY, DONE, ODD = BARRIERS.values()
    PS = FULL  # consumers, at head_dim 256, which does not use FULL: P is written
    TURN = 160  # threads at EMPTY that wait for turns: a warpgroup, and the warp that takes them


def attention_backward_hopper(
    head_dim: int,
    Sk: int,
    kind: Kind,
    ordered: bool = False,
    heads: int = 1024,
    group: int = 1,
    head_dim_v: int | None = None,
) -> HopperBackward:
    """The backward's configuration; heads: key heads of all sequences, each with `group` query heads;
    head_dim_v: that of values, where it is another.

    Bulk adds are fastest where shared memory has room for them.  At head_dim 64 key tiles of 256 halve
    what is read and added, but there are few of them in short rows of few heads.  In long rows, and
    where work items are few, zeros cost less than the order that the first key tile's store imposes; at
    head_dim 128 causal walks go down with them too.  With alternate walks key heads of one query head
    wait less, in order and in short rows; key heads of eight would wait more, and walk in waves.

    All this holds for the causal mask and for none.  Other kinds take the plain walk: from zeros, head
    by head, from the first query tile that sees the keys to the last, in no order.  So do keys wider
    than values, but down under the causal mask; for these no other walk was measured."""
    if more := more_columns(head_dim, head_dim_v):
        assert not ordered, "dq has a fixed order where queries and values have one head_dim"
        walk: Walk = "down" if kind.PLAIN and kind.CAUSAL else "by_head"
        return HopperBackward(kind, 128, 64, 128, 0, 1, walk, SUMS="zeros", MORE=more)
    D = hopper_head_dim(head_dim)
    BM, BN, DQ, KV = {64: (128, 128, 2, 2), 128: (64, 128, 1, 1), 256: (64, 64, 0, 1)}[D]
    if not kind.PLAIN:
        assert not ordered, f"dq has a fixed order where attention is causal or full, not {kind.name}"
        return HopperBackward(kind, D, BM, BN, DQ, KV, WALK="by_head", SUMS="zeros")
    causal = kind.CAUSAL
    pairs = D == 64 and Sk >= PAIRED_ROWS[causal] and heads * Sk >= PAIRED_KEYS
    if pairs:
        BM, BN, DQ, KV = 64, 256, 1, 1
    grouped = causal and group > 1
    alternate = causal and not grouped and (ordered or Sk < ALTERNATE_ROWS[D])
    tiles, case = -(-Sk // BN), causal + grouped
    few = D == 128 and tiles > 1 and heads * tiles <= ZEROED_ROUNDS[case] * MULTIPROCESSORS
    first = ordered or (Sk < ZEROED_ROWS[D, BN][case] and (alternate or not few))
    waves = grouped and not pairs and Sk >= WAVED_ROWS[D][ordered]
    side_by_side = D == 128 and group > 1 and not causal and Sk in SIDE_BY_SIDE_ROWS and not first
    sums: Sums = "ordered" if ordered else "store" if first else "zeros"
    walk = "by_head"
    if alternate:
        walk = "alternate"
    elif waves:
        walk = "waves"
    elif ordered or side_by_side or (causal and (first or D == 128)):
        walk = "down"
    elif DQ == 1 and not (causal or first):
        walk = "round"
    return HopperBackward(kind, D, BM, BN, DQ, KV, walk, sums)


def heads_together_backward(
    config: HopperBackward, B: int, Hq: int, Hkv: int, Sq: int, Sk: int, multiprocessors: int
) -> int:
    """How many key heads have their tiles mixed.

    They are those whose queries fit in L2 together, but so many that there are key tiles for some
    rounds of programs, and heads to add to; in order, as many as were measured fastest, two at least.
    If possible all groups are whole: a last group with few heads would leave programs without work (5%
    for 16 heads in groups of 3, by a simulation of the schedule).
    """
    heads = B * Hkv
    keys, most = ORDERED_HEADS[config.D][config.KIND.CAUSAL]
    if config.ORDERED and config.ALTERNATE == config.KIND.CAUSAL:
        wanted = min(most, max(2, keys // Sk))
    else:
        columns = 8 * config.D + 6 * config.MORE
        fit, rounds = L2_SHARE // (columns * Sq * (Hq // Hkv)), ROUNDS
        spread = 1 if config.ROTATE and Hq > Hkv else min(SPREAD_HEADS[1], SPREAD_HEADS[0] // Sk)
        if config.KIND.TABLE:
            rounds = LISTED_ROUNDS
        elif not config.KIND.CAUSAL:
            # all items are alike and, but for the first, wait for none
            fit = rounds = spread = 1
        items = rounds * multiprocessors * 9 // 10  # 32 heads of 8 tiles will do for two rounds of 132
        wanted = max(1, fit, spread, -(-items // -(-Sk // config.BN)))
        if config.ORDERED:
            wanted = min(wanted, most)
    least = min(heads, wanted)
    whole = (n for n in range(least, min(2 * least, heads) + 1) if heads % n == 0)
    return next(whole, even_groups(heads, least))
