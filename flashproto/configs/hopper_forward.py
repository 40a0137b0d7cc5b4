"""Tiles and schedules of the attention forward kernel in kernels/hopper; chosen as hopper.py says."""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from .attention import padded_head_dim
from .hopper import (
    L2_SHARE,
    MULTIPROCESSORS,
    even_groups,
    hopper_head_dim,
    more_columns,
    named_barriers,
)
from .sizes import power_of_two

if TYPE_CHECKING:
    from ..variant import Kind

# docs/hopper.md has the measurements behind these thresholds.  Pairs of values are those without a
# mask and under the causal one.

# The time of a full work item with rows for one, two or all of three consumers, as a share of the last;
# balanced_work orders the work by it.
IDLE_SHARES = {1: 0.75, 2: 0.84, 3: 1.0}
# Queries up to which consumers without rows skip an item at head_dim 64.
IDLE_QUERIES = 2048
# Keys below which three programs share a multiprocessor at head_dim 64.
SHORT_ROWS = (736, 1120)
# Keys below which, at head_dim 64 without a mask, four consumers take the rows where they pad no more
# of them than three do.  It was not measured where heads are so few that tiles of 256 rows do not fill
# the multiprocessors.
FOUR_CONSUMERS = 6144
# Keys from which on two consumers keep queries in registers at head_dim 128.
Q_IN_REGS_ROWS = (2048, 3072)
# Keys from which on three consumers replace those two, unless the last round of programs gives them 3%
# more to do than it gives two.
THREE_ROWS = (2048, 6144)
THREE_SHARE = 0.97
# Under a causal mask, from so many keys on, the most key heads that are mixed.
MIXED_KEYS, MIXED_HEADS = 512, 16
# The forward's last groups of such heads are mixed too, as many as have so many items for each program,
# by head_dim, where that saves half a percent by what items cost.
TAIL_ROUNDS, TAIL_SHARE = {64: 3, 128: 2, 256: 2}, 0.995
# Packed work items over unpacked ones, at most: a smaller gain is not worth another kernel to compile.
PACKED_SHARE = 7 / 8
# Numbers of heads packed at head_dim 256 with which two consumers need 40 bytes of stack or 48 (ptxas
# of Triton 3.9).  With fewer heads they need 32 at most, and one consumer needs none.
ALONE_PACKED = (16, 32)

# At head_dim 64, the longest causal window for which heads of a group are packed, with three programs
# on a multiprocessor.
PACKED_WINDOW = 1024

# Split keys.  docs/hopper.md has what these numbers give; no others were tried.
# The most queries of a call whose keys are split, and the fewest keys of a part.
SPLIT_QUERIES, SPLIT_KEYS = 1024, 1024
# What an item costs beside its keys, in keys: its beginning and end, its state to memory and back.
SPLIT_COST = 512
# The most rounds of programs that parts take, which bounds the memory for their states; and their time
# over that of whole items, at most.
SPLIT_ROUNDS, SPLIT_SHARE = 4, 7 / 8


@dataclass(frozen=True)
class HopperForward:
    """The forward kernel at compile time.

    D           head_dim padded, that of values
    MORE        columns that queries and keys have beside D: none or, at 128, 64
    BN          keys of a tile
    W           consumer warpgroups, each with 64 query rows
    KS, VS      buffers in the rings of keys and values
    OVERLAP     a consumer's softmax runs under its own P V, which takes registers for P twice
    Q_IN_REGS   columns of its queries that a consumer keeps in registers: none, 64, or 64 and a smaller
                power of two
    SKIP        halves of key tiles that none of a consumer's rows may see, and rows past the end, take
                no softmax
    PACK        1, or the query heads of a key head, rounded up to a power of two, where a work item
                takes them together
    IDLE        consumers all of whose rows are past the end skip the item; needs no mask, no Q_IN_REGS
    PROGRAMS    on a multiprocessor at a time: 1 or, with one consumer each, 3
    SPLIT       work items are parts of the keys, whose states are merged; needs no IDLE, and a kind
                that runs on "split", see variant.FEATURES: its lengths are known on the host, and it
                leaves out and lse alone
    CACHE       keys and values are a cache's: 1 of one with a row for each sequence, or else the
                page size, which divides BN or is a multiple of it; lengths are known on the device
    STARTS      its sequences have a first key that counts
    ROLLS       key j is in slot j modulo the room of a sequence, a multiple of BN and of the page size
    """

    KIND: Kind
    D: int
    BN: int
    W: int
    KS: int
    VS: int
    OVERLAP: bool
    Q_IN_REGS: int = 0
    SKIP: bool = False
    PACK: int = 1
    IDLE: bool = False
    PROGRAMS: int = 1
    SPLIT: bool = False
    CACHE: int = 0
    STARTS: bool = False
    ROLLS: bool = False
    MORE: int = 0

    @property
    def name(self) -> str:
        """What tells it from the others that are chosen."""
        return (
            f"forward-{f'{self.D + self.MORE}-' * (self.MORE > 0)}{self.D}"
            f"-{self.KIND.name}-{self.W}-{self.KS}-{self.VS}"
            f"{'-overlap' * self.OVERLAP}{f'-kept-{self.Q_IN_REGS}' * (self.Q_IN_REGS > 0)}"
            f"{'-skip' * self.SKIP}"
            f"{f'-{self.PACK}-heads' * (self.PACK > 1)}{'-idle' * self.IDLE}"
            f"{'-split' * self.SPLIT}"
            f"{'' if not self.CACHE else '-cache' if self.CACHE == 1 else f'-pages-{self.CACHE}'}"
            f"{'-starts' * self.STARTS}{'-rolls' * self.ROLLS}"
        )

    @property
    def RECORDS(self) -> bool:
        """Whether items are of sequences, whose tiles the device counts, see kernels/schedule.py."""
        return self.KIND.VARLEN or self.CACHE > 0

    @property
    def HAS_WORK_TABLE(self) -> bool:
        """Whether the order of work comes from balanced_work: where items are of different lengths
        that the host knows.  (Parts are nearly of one length.)"""
        kind = self.KIND
        return (kind.CAUSAL and not (kind.LISTS or self.RECORDS or self.SPLIT)) or self.IDLE

    @property
    def DYNAMIC(self) -> bool:
        """Whether programs take their items one by one: where only the device knows their lengths."""
        return (self.KIND.LISTS or self.RECORDS) and not self.SPLIT

    @property
    def LEAST_KEYS(self) -> int:
        """Of a part of a cache's keys."""
        return SPLIT_KEYS

    @property
    def MASKS(self) -> bool:
        """Whether key tiles to the left of the rightmost may need a mask."""
        return self.KIND.CAUSAL or self.KIND.WINDOW or self.KIND.LISTS or self.STARTS

    @property
    def BM(self) -> int:
        """Query rows of a work item."""
        return 64 * self.W

    @property
    def CQ(self) -> int:
        """Queries of a consumer."""
        return 64 // self.PACK

    @property
    def BQ(self) -> int:
        """Queries of a work item."""
        return self.CQ * self.W

    @property
    def max_registers(self) -> int | None:
        """Registers of a thread at the start, where Triton must be told: with one consumer it would ask
        for 256, which ptxas refuses, and with four for 102.  (Two start with 168, three with 128.)  A
        multiprocessor has 65536."""
        return {1: {1: 168, 3: 80}[self.PROGRAMS], 4: 96}.get(self.W)

    @property
    def REGISTERS(self) -> int:
        """Registers of a consumer's thread: what the program starts with, less the producer's 24.  (A
        single consumer is not asked: it has what is left.)"""
        return {1: {1: 248, 3: 136}[self.PROGRAMS], 2: 240, 3: 160, 4: 112}[self.W]

    @property
    def PRODUCERS(self) -> int:
        """Warps of the producer.  Of four, three do nothing useful, but take up to a sixth of the
        instructions that a multiprocessor issues.  With one, the first consumer begins where the kernel
        does, which costs it registers: with more than two consumers, and with two at head_dim 256 or
        with MORE, none are left (Triton 3.9)."""
        return 1 if self.W == 1 or (self.W == 2 and self.D == 128 and not self.MORE) else 4

    # Threads at a named barrier: all, and one consumer with the producer.
    @property
    def ALL(self) -> int:
        return 128 * self.W + 32 * self.PRODUCERS

    @property
    def TWO(self) -> int:
        return 128 + 32 * self.PRODUCERS

    @property
    def PINGPONG(self) -> bool:
        """Whether the consumers take turns to issue products; more than two are faster without, if they
        can issue P V of one tile and the scores of the next together."""
        return self.W == 2 or (self.W == 3 and not self.OVERLAP)

    @property
    def BARRIERS(self) -> dict[str, int]:
        """Named barriers: how many of each, who waits there, and for what."""
        return named_barriers(
            VB=self.VS,  # the producer: a buffer of values has been read
            KB=self.KS,  # the producer: a buffer of keys has been read
            QB=self.W,  # the producer: a consumer has read its queries
            PB=self.W * self.PINGPONG,  # a consumer: its turn to issue products has come
        )

    @property
    def VB(self) -> int:
        return self.BARRIERS["VB"]

    @property
    def KB(self) -> int:
        return self.BARRIERS["KB"]

    @property
    def QB(self) -> int:
        return self.BARRIERS["QB"]

    @property
    def PB(self) -> int:
        return self.BARRIERS["PB"]


def attention_forward_hopper(
    head_dim: int,
    Sk: int,
    kind: Kind,
    Sq: int = 16384,
    heads: int = 1024,
    group: int = 1,
    multiprocessors: int = MULTIPROCESSORS,
    seen: int | None = None,
    most_parts: int = 0,
    left: int | None = None,
    head_dim_v: int | None = None,
) -> HopperForward:
    """The forward's configuration; heads: key heads of all sequences, each with `group` query heads;
    seen: how many keys a query tile sees at most, Sk if None; most_parts: see forward_parts; left: of a
    window; head_dim_v: that of values, where it is another.

    Where items are too few to fill the card and see many keys, these are split: see forward_parts.
    At head_dim 256 that leaves no registers for overlap.
    """
    if more := more_columns(head_dim, head_dim_v):
        head_dim = 128
    given = head_dim, Sk, kind, Sq, heads, group, multiprocessors
    seen = Sk if seen is None else seen
    packed = _packed_window(hopper_head_dim(head_dim), kind, Sq, group, left)
    if packed is not None:
        return packed
    config = _forward(*given, spread=False)
    items = heads if config.PACK > 1 else heads * group
    if forward_parts(config, items, Sq, seen, multiprocessors, most_parts) > 1:
        config = replace(config, SPLIT=True, IDLE=False, OVERLAP=config.OVERLAP and config.D < 256)
    else:
        config = _forward(*given, spread=True)
    return _wider_keys(config, more) if more else config


def _wider_keys(config: HopperForward, more: int) -> HopperForward:
    """The same with more columns of queries and keys: tiles of 128 keys in two buffers, which is what
    shared memory has room for.  Two consumers have registers for 64 columns of their queries, and three
    have not enough.  (Other tiles were not measured.)"""
    W = min(config.W, 2)
    kept = 64 * (W == 2 and config.KIND.PLAIN)
    return replace(config, MORE=more, BN=128, W=W, KS=2, VS=2, Q_IN_REGS=kept)


def forward_parts(
    config: HopperForward,
    heads: int,
    Sq: int,
    seen: int,
    multiprocessors: int,
    most_parts: int = 0,
) -> int:
    """Into how many parts the keys of a work item are split, 1 for none.

    heads: of work items; seen: how many keys one sees at most; most_parts: a bound, 0 for none.  Time
    is rounds of programs, times what a part costs.  Of numbers of parts as quick, the smallest.
    """
    if Sq > SPLIT_QUERIES or config.KIND.unsupported_by("split"):
        return 1
    items, programs = heads * -(-Sq // config.BQ), multiprocessors * config.PROGRAMS

    def time(parts: int) -> int:
        return -(-items * parts // programs) * (-(-seen // parts) + SPLIT_COST)

    most = max(min(seen // SPLIT_KEYS, SPLIT_ROUNDS * programs // max(items, 1)), 1)
    most = min(most, most_parts or most)
    parts = min(range(1, most + 1), key=time)
    return parts if time(parts) <= SPLIT_SHARE * time(1) else 1


def attention_cache_hopper(
    head_dim: int,
    room: int,
    kind: Kind,
    Sq: int,
    heads: int,
    group: int,
    multiprocessors: int,
    page: int = 0,
    starts: bool = False,
    left: int | None = None,
    most_parts: int = 0,
) -> tuple[HopperForward, int]:
    """The forward's configuration for a cache, and into how many parts its keys are split at most.

    room: for the keys of a sequence, which are counted on the device: what suits as many.  heads: key
    heads of all sequences, of Sq queries each.  page: the page size, 0 without.  left: of a window,
    with which the cache rolls.  most_parts: see forward_parts.
    """
    given = head_dim, room, kind, Sq, heads, group, multiprocessors
    config = _forward(*given, spread=False)
    if config.PROGRAMS > 1:
        config = _plain(config.D, Sq, kind)
    config = replace(
        config, SKIP=False, IDLE=False, CACHE=page or 1, STARTS=starts, ROLLS=left is not None
    )
    items = heads if config.PACK > 1 else heads * group
    seen = room if left is None else min(room, left + Sq)
    parts = forward_parts(config, items, Sq, seen, multiprocessors, most_parts)
    if parts > 1:
        config = replace(config, SPLIT=True, OVERLAP=config.OVERLAP and config.D < 256)
    return config, parts


@dataclass(frozen=True)
class MergeConfig:
    """Tiles of a row's states, `parts` of them at a time."""

    parts: int
    block_d: int
    num_warps: int


def attention_merge(parts: int, head_dim: int) -> MergeConfig:
    """Tiles for the merge of so many parts: of 8192 elements at most, 512 or more for each warp."""
    block_d = padded_head_dim(head_dim)
    at_once = min(power_of_two(parts), 8192 // block_d)
    return MergeConfig(at_once, block_d, max(min(at_once * block_d // 512, 4), 1))


def _forward(
    head_dim: int,
    Sk: int,
    kind: Kind,
    Sq: int,
    heads: int,
    group: int,
    multiprocessors: int,
    spread: bool,
) -> HopperForward:
    """The configuration of whole items; spread: whether small ones reach more multiprocessors, as parts
    would.

    A work item takes as long as its keys are many, whether its rows are queries or padding.  So with
    few queries those of a group are packed, where that leaves fewer items.  One consumer is enough for
    64 rows, and faster where two leave multiprocessors without work (short rows of head_dim 64 have one
    in any case); 16 or 32 heads packed at head_dim 256 leave two no registers (ALONE_PACKED).  Of three
    consumers at head_dim 64, those that would have only padding in the last item of a head skip it.
    Four replace them where they have no more padding and rows are not long.  In long rows of head_dim
    128 three consumers replace two, which read keys and values more often.  Kinds for which nothing was
    measured have tiles by head_dim alone.
    """
    causal = kind.CAUSAL
    if not kind.PLAIN:
        return _plain(hopper_head_dim(head_dim), Sq, kind)
    config = _many_queries(hopper_head_dim(head_dim), Sk, kind)
    pack = 1 << (group - 1).bit_length()
    alone = config.D == 256 and pack in ALONE_PACKED
    packed, unpacked = -(-Sq * pack // (64 if alone else config.BM)), group * -(-Sq // config.BM)
    if pack > 64 or packed > PACKED_SHARE * unpacked:  # 64: a consumer's rows
        pack, alone = 1, False
    items_of_one = heads * -(-Sq * pack // 64)
    few = alone or Sq * pack <= 64 or (spread and pack > 1 and items_of_one <= multiprocessors)
    if few and config.PROGRAMS == 1:
        config = _few_queries(config.D, kind)
    if config.D == 64 and config.W == 3 and not causal and pack == 1:
        four = HopperForward(kind, config.D, BN=64, W=4, KS=3, VS=3, OVERLAP=True)
        if Sk < FOUR_CONSUMERS and _padded(four, Sq) <= _padded(config, Sq):
            return four
        idle = Sq <= IDLE_QUERIES and _last_consumers(config, Sq) < config.W
        return replace(config, IDLE=idle)
    if config.D == 128 and config.W == 2 and pack == 1 and Sk >= THREE_ROWS[causal]:
        three = HopperForward(kind, config.D, BN=64, W=3, KS=4, VS=4, OVERLAP=True)
        queries = Sq, heads * group, multiprocessors
        if THREE_SHARE * _share(three, *queries) < _share(config, *queries):
            return three
    return replace(config, PACK=pack)


def _share(config: HopperForward, Sq: int, heads: int, multiprocessors: int) -> float:
    """Query rows, with padding, that the busiest program takes with all keys each; under the causal
    mask half of the average, but no less than the last item."""
    items = heads * -(-Sq // config.BM)
    if config.KIND.CAUSAL:
        return config.BM * max(1.0, items / multiprocessors / 2)
    return float(config.BM * -(-items // multiprocessors))


def _padded(config: HopperForward, Sq: int) -> int:
    """Rows of a head with those that are padding."""
    return -(-Sq // config.BM) * config.BM


def _last_consumers(config: HopperForward, Sq: int) -> int:
    """How many consumers have rows in the last work item of a head."""
    return -(-((Sq - 1) % config.BQ + 1) // config.CQ)


def _plain(D: int, Sq: int, kind: Kind) -> HopperForward:
    """For kinds that are not PLAIN."""
    if Sq <= 64:
        return _few_queries(D, kind)
    BN, W, KS, VS = {64: (128, 3, 3, 2), 128: (128, 2, 2, 2), 256: (64, 2, 2, 2)}[D]
    if D == 64 and kind.LISTS:  # three have not the registers for them
        W = 2
    return HopperForward(kind, D, BN, W, KS, VS, OVERLAP=D < 256 and W == 2)


def _packed_window(D: int, kind: Kind, Sq: int, group: int, left: int | None) -> HopperForward | None:
    """With the heads of a group in one tile, which then has fewer queries, and sees fewer keys beside
    the window; None where that was not measured."""
    pack = 1 << (group - 1).bit_length()
    measured = kind.CAUSAL and replace(kind, WINDOW=False, SINKS=False).PLAIN
    if left is None or left >= PACKED_WINDOW or not measured or D != 64 or Sq <= 64:
        return None
    if not 1 < pack <= 64 or group < PACKED_SHARE * pack:
        return None
    return HopperForward(kind, D, BN=64, W=1, KS=3, VS=3, OVERLAP=True, PACK=pack, PROGRAMS=3)


def _few_queries(D: int, kind: Kind) -> HopperForward:
    """One consumer: it has the tensor cores for itself, and more tiles are on their way."""
    BN, KS, VS = {64: (128, 5, 5), 128: (128, 3, 3), 256: (64, 3, 2)}[D]
    return HopperForward(kind, D, BN, W=1, KS=KS, VS=VS, OVERLAP=D < 256)


def _many_queries(D: int, Sk: int, kind: Kind) -> HopperForward:
    """Three consumers at head_dim 64.  Short rows, whose tiles begin and end all the time, have one
    consumer in each of three programs, which do so at different times.  In long rows queries in
    registers pay at head_dim 128, and overlap pays without a mask at head_dim 256.  SKIP pays at
    head_dim 64, except in short full rows."""
    causal = kind.CAUSAL
    if D == 64 and Sk < SHORT_ROWS[causal]:
        return HopperForward(kind, D, BN=64, W=1, KS=3, VS=3, OVERLAP=True, Q_IN_REGS=64, PROGRAMS=3)
    if D == 64:
        skip = causal or Sk >= 2048
        return HopperForward(kind, D, BN=128, W=3, KS=3, VS=2, OVERLAP=False, SKIP=skip)
    if D == 128:
        kept = 96 if Sk >= Q_IN_REGS_ROWS[causal] else 0
        return HopperForward(kind, D, BN=128, W=2, KS=2, VS=2, OVERLAP=True, Q_IN_REGS=kept)
    overlap = not causal and Sk > 2048
    return HopperForward(kind, D, BN=64, W=2, KS=2, VS=2, OVERLAP=overlap)


def heads_together_forward(config: HopperForward, B: int, Hq: int, Hkv: int, Sk: int) -> int:
    """How many heads of work items (key heads if packed, else query heads) are mixed: those whose keys
    and values fit in L2 together; under a causal mask at most MIXED_HEADS, if rows are not short."""
    fit = L2_SHARE // (2 * Sk * (2 * config.D + config.MORE))
    if config.KIND.CAUSAL and Sk >= MIXED_KEYS:
        fit = min(fit, MIXED_HEADS)
    together = even_groups(B * Hkv, fit)
    return together if config.PACK > 1 else together * (Hq // Hkv)


def balanced_work(
    config: HopperForward,
    heads: int,
    together: int,
    Sq: int,
    Sk: int,
    offset: int,
    programs: int,
    left: int = 0,
) -> list[list[int]]:
    """The work items of each program, where HAS_WORK_TABLE.

    Within a group of `together` heads heavy items come first, and each goes to the program that is free
    first (list scheduling).  The last groups are dealt out as one where that ends earlier
    (TAIL_ROUNDS): otherwise long items come late, and no short ones are left to fill the gaps.

    Items are numbered group by group and, within a group, tile by tile in the order of item_costs, the
    heads of a tile one after the other.
    """
    costs = item_costs(config, Sq, Sk, offset, left)
    groups = range(0, heads, together)  # by the first of their heads

    def deal(mixed: Sequence[int], free: list[tuple[float, int]], items: list[list[int]]) -> None:
        """Hand out the items of some groups as of one."""
        for tile, cost in enumerate(costs):
            for first in mixed:
                size = min(together, heads - first)
                begin = first * len(costs) + tile * size
                for item in range(begin, begin + size):
                    at, program = free[0]
                    heapq.heapreplace(free, (at + cost, program))
                    items[program].append(item)

    tail = min(-(-TAIL_ROUNDS[config.D] * programs // (together * len(costs))), len(groups))
    free = [(0.0, program) for program in range(programs)]
    items: list[list[int]] = [[] for _ in range(programs)]
    for first in groups[:-tail]:
        deal([first], free, items)
    mixed_free, mixed_items = free.copy(), [own.copy() for own in items]
    for first in groups[-tail:]:
        deal([first], free, items)
    deal(groups[-tail:], mixed_free, mixed_items)
    return mixed_items if max(mixed_free)[0] < TAIL_SHARE * max(free)[0] else items


def item_costs(config: HopperForward, Sq: int, Sk: int, offset: int, left: int = 0) -> list[float]:
    """What the work items of a head cost, heavy first: their key tiles and one more.  Under a causal
    mask they go from the last query tile to the first; else from the first to the last, which may have
    fewer consumers.  left: of a window."""
    BQ, BN = config.BQ, config.BN
    tiles = range(-(-Sq // BQ))
    if config.KIND.CAUSAL:
        ends = [min(Sk, (tile + 1) * BQ + offset) for tile in reversed(tiles)]
        starts = [0] * len(ends)
        if config.KIND.WINDOW:
            starts = [max(tile * BQ + offset - left, 0) // BN for tile in reversed(tiles)]
        both = zip(starts, ends, strict=True)
        return [float(max(-(-end // BN) - start, 1) + 1) for start, end in both]
    whole = -(-Sk // BN) + 1
    return [float(whole) for _ in tiles[1:]] + [whole * IDLE_SHARES[_last_consumers(config, Sq)]]
