"""Tile shapes, warps and pipeline stages, in plain Python: no torch, no triton."""

from __future__ import annotations

import heapq
from dataclasses import dataclass, replace

# --- rows: norms and softmax ---------------------------------------------------------------------
#
# Chosen from the width and dtype of the rows alone: what a row gives never depends on how many
# others there are.  itemsize: bytes of an element of x, or of total where a residual is added.

MAX_TILE_ROWS = 256
MAX_ROW_WARPS = 16


@dataclass(frozen=True)
class RowConfig:
    """Tiles [rows, columns] of a kernel that works on the rows of a matrix.

    looped: rows are wider than a tile and looped over, one row a program.
    stages: depth of the pipeline over the tiles of one program, where it takes several.
    programs: programs a multiprocessor, where each takes several tiles.
    max_registers: a cap for the compiler, where room for one more program a multiprocessor pays.
    """

    rows: int
    columns: int
    num_warps: int
    looped: bool = False
    stages: int = 1
    programs: int = 1
    max_registers: int | None = None


def power_of_two(n: int) -> int:
    """The smallest power of two that is at least n."""
    return 1 << max(n - 1, 0).bit_length()


def _row_tile(
    N: int,
    itemsize: int,
    thread_bytes: int,
    widest: int,
    loop: RowConfig,
    most_warps: int = MAX_ROW_WARPS,
) -> RowConfig:
    """Whole rows, several of them a program where four warps with `thread_bytes` a thread have room
    for more than one; `loop` for rows of more than `widest` columns."""
    columns = power_of_two(N)
    if columns > widest:
        return loop
    per_warp = 32 * thread_bytes // itemsize
    rows = min(max(4 * per_warp // columns, 1), MAX_TILE_ROWS)
    return RowConfig(rows, columns, min(max(rows * columns // per_warp, 1), most_warps))


def norm_forward(
    N: int, itemsize: int, residual: bool, centered: bool, capability: tuple[int, int]
) -> RowConfig:
    """Forward of the norms: x, perhaps a residual, and weight and bias beside it."""
    tile = _row_tile(N, itemsize, 64, 16384, RowConfig(1, 8192, 8, looped=True))
    if tile == RowConfig(1, 8192, 8) and not residual and capability[0] == 9:
        if centered and N <= 5120:
            # Two reductions in a row leave a half-filled tile waiting; small loops overlap better.
            return RowConfig(1, 2048, 2, looped=True)
        # LayerNorm would take 71 registers: three programs a multiprocessor, not four.
        return replace(tile, max_registers=64)
    return tile


def norm_backward(N: int, itemsize: int, weight_gradients: bool) -> RowConfig:
    """Backward of the norms: x and dy; with weight_gradients two tiles of partial sums beside them,
    and a few programs a multiprocessor, each of which takes many tiles."""
    tile = _row_tile(N, itemsize, 32, 8192, RowConfig(1, 4096, 8, looped=True))
    if not weight_gradients or tile.looped:
        return tile
    return replace(tile, stages=2, programs=MAX_ROW_WARPS // tile.num_warps)


def norm_weight_gradient() -> RowConfig:
    """Partial sums of dweight and dbias down the columns of wide rows."""
    return RowConfig(8, 512, 8, programs=4)


def column_sums(N: int) -> RowConfig:
    """Sums of the partial sums: narrow tiles where there are few columns to go round."""
    return RowConfig(128, 32, 4) if N <= 8192 else RowConfig(16, 256, 4)


def softmax_forward(N: int, itemsize: int) -> RowConfig:
    """Forward of softmax and log_softmax.  A thread adds up 16 float32 elements and no more, so that
    the sum of a wide row is as exact as torch's."""
    loop = RowConfig(1, 8192, 4 * itemsize, looped=True)
    return _row_tile(N, itemsize, 64, 16384, loop, 8 * itemsize)


def softmax_backward(N: int, itemsize: int) -> RowConfig:
    """Backward of softmax and log_softmax: y and dy."""
    return _row_tile(N, itemsize, 32, 8192, RowConfig(1, 4096, 8, looped=True))


def logsumexp(N: int, itemsize: int) -> RowConfig:
    """Forward and backward of logsumexp: one kernel of each, which loops where rows are wider."""
    return _row_tile(N, itemsize, 64, 8192, RowConfig(1, 8192, 8, looped=True))


# --- attention -----------------------------------------------------------------------------------
#
# Chosen from the architecture, the size of an element and the padded head dimensions.  Each entry is
# the fastest measured on an H200 (sm_90) among those that keep every register up to head_dim 128;
# other architectures take the largest tiles that fit their registers and shared memory.

SHARED_KIB = {80: 163, 86: 99, 87: 163, 89: 99, 90: 227, 100: 227, 103: 227, 120: 99}


@dataclass(frozen=True)
class AttentionConfig:
    """Tile shapes of an attention kernel: block_m queries by block_n keys."""

    block_m: int
    block_n: int
    num_warps: int
    num_stages: int


def padded_head_dim(head_dim: int) -> int:
    """The head dimension as the tensor cores see it: a power of two, at least 16."""
    return max(power_of_two(head_dim), 16)


def shared_bytes(capability: tuple[int, int]) -> int:
    """Shared memory a program can have on this architecture; the smallest known for unknown ones."""
    major, minor = capability
    return SHARED_KIB.get(10 * major + minor, min(SHARED_KIB.values())) * 1024


def _fitted(config: AttentionConfig, fixed: int, per_stage: int, budget: int) -> AttentionConfig:
    """`config` with as many pipeline stages as fit: fixed + stages * per_stage bytes in `budget`."""
    stages = config.num_stages
    while stages > 1 and fixed + stages * per_stage > budget:
        stages -= 1
    return replace(config, num_stages=stages)


def _family(capability: tuple[int, int]) -> str:
    """The generation whose tiles this architecture takes."""
    return {9: "hopper", 10: "blackwell"}.get(capability[0], "ampere")


# (block_m, block_n, num_warps, num_stages) by padded head_dim.
_HALF = {
    ("forward", "ampere"): {
        16: (64, 64, 4, 2),
        32: (64, 64, 4, 3),
        64: (128, 64, 4, 3),
        128: (128, 32, 8, 3),
        256: (64, 32, 4, 2),
    },
    ("forward", "hopper"): {
        16: (128, 64, 4, 3),
        32: (128, 64, 4, 3),
        64: (64, 64, 4, 3),
        128: (64, 64, 4, 3),
        256: (128, 64, 8, 2),
    },
    ("forward", "blackwell"): {
        16: (64, 64, 4, 3),
        32: (128, 64, 4, 3),
        64: (128, 64, 4, 3),
        128: (128, 64, 8, 3),
        256: (128, 32, 8, 2),
    },
    ("keys", "ampere"): {
        16: (64, 64, 4, 2),
        32: (64, 64, 4, 2),
        64: (32, 64, 4, 2),
        128: (64, 64, 8, 2),
        256: (32, 64, 8, 2),
    },
    ("keys", "hopper"): {
        16: (64, 64, 4, 3),
        32: (64, 64, 4, 3),
        64: (64, 64, 4, 3),
        128: (64, 128, 8, 3),
        256: (64, 64, 8, 2),
    },
    ("keys", "blackwell"): {
        16: (64, 128, 8, 3),
        32: (64, 128, 8, 3),
        64: (64, 128, 8, 3),
        128: (64, 128, 8, 3),
        256: (32, 64, 8, 2),
    },
    ("queries", "ampere"): {
        16: (128, 64, 4, 3),
        32: (128, 64, 4, 3),
        64: (128, 64, 8, 3),
        128: (64, 64, 8, 2),
        256: (64, 32, 8, 2),
    },
    ("queries", "hopper"): {
        16: (128, 64, 4, 3),
        32: (128, 64, 4, 3),
        64: (64, 64, 4, 3),
        128: (128, 64, 8, 3),
        256: (128, 32, 8, 2),
    },
    ("queries", "blackwell"): {
        16: (128, 64, 4, 3),
        32: (128, 64, 4, 3),
        64: (128, 64, 8, 3),
        128: (128, 64, 8, 3),
        256: (64, 32, 8, 2),
    },
}
# float32 products run on the ordinary cores, from registers: tiles are small everywhere.
_FLOAT32 = {
    "forward": {
        16: (64, 16, 4, 2),
        32: (32, 32, 4, 2),
        64: (64, 32, 8, 2),
        128: (32, 16, 8, 2),
        256: (16, 32, 8, 1),
    },
    "keys": {
        16: (16, 32, 4, 2),
        32: (16, 32, 4, 2),
        64: (32, 32, 8, 2),
        128: (16, 16, 8, 2),
        256: (16, 16, 8, 1),
    },
    "queries": {
        16: (32, 32, 4, 2),
        32: (32, 32, 4, 2),
        64: (32, 32, 8, 2),
        128: (32, 32, 8, 2),
        256: (16, 16, 8, 1),
    },
}


def _attention(
    kernel: str, capability: tuple[int, int], itemsize: int, head_dim: int, head_dim_v: int
) -> AttentionConfig:
    D, Dv = padded_head_dim(head_dim), padded_head_dim(head_dim_v)
    table = _FLOAT32[kernel] if itemsize == 4 else _HALF[kernel, _family(capability)]
    config = AttentionConfig(*table[max(D, Dv)])
    if kernel == "forward":
        fixed, per_stage = config.block_m * D, config.block_n * (D + Dv)
    elif kernel == "keys":
        fixed, per_stage = config.block_n * (D + Dv), config.block_m * (D + Dv)
    else:
        fixed, per_stage = config.block_m * (D + Dv), config.block_n * (D + Dv)
    return _fitted(config, fixed * itemsize, per_stage * itemsize, shared_bytes(capability))


def attention_forward(
    capability: tuple[int, int], itemsize: int, head_dim: int, head_dim_v: int
) -> AttentionConfig:
    """Forward, for elements of `itemsize` bytes."""
    return _attention("forward", capability, itemsize, head_dim, head_dim_v)


def attention_backward(
    capability: tuple[int, int], itemsize: int, head_dim: int, head_dim_v: int, causal: bool
) -> tuple[AttentionConfig, AttentionConfig]:
    """Backward: the kernel of dK and dV, and that of dQ."""
    keys = _attention("keys", capability, itemsize, head_dim, head_dim_v)
    D, Dv = padded_head_dim(head_dim), padded_head_dim(head_dim_v)
    if causal and keys == AttentionConfig(64, 128, 8, 3):
        # The diagonal takes the registers of the third stage, and on Hopper padding takes those of half
        # the tile.
        padded = head_dim != D or head_dim_v != Dv
        half = padded and _family(capability) == "hopper"
        keys = AttentionConfig(32, 128, 8, 3) if half else AttentionConfig(64, 128, 8, 2)
    if Dv != D and keys == AttentionConfig(64, 64, 8, 2):
        keys = AttentionConfig(32, 64, 4, 2)
    return keys, _attention("queries", capability, itemsize, head_dim, head_dim_v)


# --- attention on Hopper -------------------------------------------------------------------------
#
# For kernels/hopper.  Chosen among the configurations that fit in registers and in 227 KiB of shared
# memory by what an H200 measured at 1024, 4096 and 16384 tokens (README, "How the Hopper kernels came
# about"); lengths between go to the nearer side.  Triton's cache on disk knows a configuration by its
# fields alone: after a change of a property or of a named barrier's number, empty it.

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
