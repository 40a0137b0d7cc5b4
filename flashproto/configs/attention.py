"""Tiles of the portable attention kernels.

Chosen from the architecture, the size of an element and the padded head dimensions.  Each entry is
the fastest measured on an H200 (sm_90) among those that keep every register up to head_dim 128;
other architectures take the largest tiles that fit their registers and shared memory.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from .sizes import power_of_two

if TYPE_CHECKING:
    from ..variant import Kind

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
        512: (64, 16, 8, 2),
    },
    ("forward", "hopper"): {
        16: (128, 64, 4, 3),
        32: (128, 64, 4, 3),
        64: (64, 64, 4, 3),
        128: (64, 64, 4, 3),
        256: (128, 64, 8, 2),
        512: (32, 32, 8, 3),
    },
    ("forward", "blackwell"): {
        16: (64, 64, 4, 3),
        32: (128, 64, 4, 3),
        64: (128, 64, 4, 3),
        128: (128, 64, 8, 3),
        256: (128, 32, 8, 2),
        512: (64, 32, 8, 2),
    },
    ("keys", "ampere"): {
        16: (64, 64, 4, 2),
        32: (64, 64, 4, 2),
        64: (32, 64, 4, 2),
        128: (64, 64, 8, 2),
        256: (32, 64, 8, 2),
        512: (16, 32, 8, 2),
    },
    ("keys", "hopper"): {
        16: (64, 64, 4, 3),
        32: (64, 64, 4, 3),
        64: (64, 64, 4, 3),
        128: (64, 128, 8, 3),
        256: (64, 64, 8, 2),
        512: (16, 32, 8, 3),
    },
    ("keys", "blackwell"): {
        16: (64, 128, 8, 3),
        32: (64, 128, 8, 3),
        64: (64, 128, 8, 3),
        128: (64, 128, 8, 3),
        256: (32, 64, 8, 2),
        512: (16, 32, 8, 3),
    },
    ("queries", "ampere"): {
        16: (128, 64, 4, 3),
        32: (128, 64, 4, 3),
        64: (128, 64, 8, 3),
        128: (64, 64, 8, 2),
        256: (64, 32, 8, 2),
        512: (32, 16, 8, 2),
    },
    ("queries", "hopper"): {
        16: (128, 64, 4, 3),
        32: (128, 64, 4, 3),
        64: (64, 64, 4, 3),
        128: (128, 64, 8, 3),
        256: (128, 32, 8, 2),
        512: (32, 16, 8, 3),
    },
    ("queries", "blackwell"): {
        16: (128, 64, 4, 3),
        32: (128, 64, 4, 3),
        64: (128, 64, 8, 3),
        128: (128, 64, 8, 3),
        256: (64, 32, 8, 2),
        512: (32, 16, 8, 3),
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
        512: (16, 16, 8, 2),
    },
    "keys": {
        16: (16, 32, 4, 2),
        32: (16, 32, 4, 2),
        64: (32, 32, 8, 2),
        128: (16, 16, 8, 2),
        256: (16, 16, 8, 1),
        512: (16, 8, 8, 2),
    },
    "queries": {
        16: (32, 32, 4, 2),
        32: (32, 32, 4, 2),
        64: (32, 32, 8, 2),
        128: (32, 32, 8, 2),
        256: (16, 16, 8, 1),
        512: (16, 16, 8, 2),
    },
}
# By bytes of an element: heads wider than 256 on cards with less shared memory than sm_80.
_LITTLE_SHARED = {
    2: {"forward": (32, 16, 8, 2), "keys": (16, 16, 8, 2), "queries": (16, 16, 8, 2)},
    4: {"forward": (16, 16, 8, 1), "keys": (16, 8, 8, 2), "queries": (8, 16, 8, 2)},
}


def _has_little_shared(capability: tuple[int, int]) -> bool:
    return shared_bytes(capability) < shared_bytes((8, 0))


def attention_takes_tf32(capability: tuple[int, int], head_dim: int, head_dim_v: int) -> bool:
    """Whether the tiles of float32 fit as operands of tensor cores too, which take more of shared
    memory."""
    return max(head_dim, head_dim_v) <= 256 or not _has_little_shared(capability)


# On Hopper and in 16 bits, kinds that add one thing alone to scores take the tiles of plain kinds, or
# these: by kernel, what is added, and head_dim.
_ALONE = {
    ("forward", "BIAS", 128): (128, 64, 8, 3),
    ("keys", "BIAS", 128): (32, 64, 4, 3),
    ("queries", "BIAS", 64): (64, 32, 4, 3),
    ("queries", "RELATIVE_BIAS", 64): (64, 32, 4, 3),
    ("queries", "BIAS", 128): (64, 32, 4, 3),
    ("queries", "SCORE_MOD", 128): (64, 32, 4, 3),
}


def _added_alone(
    capability: tuple[int, int],
    itemsize: int,
    head_dim: int,
    head_dim_v: int,
    kind: Kind | None,
    dense: bool,
) -> str:
    """What a kind adds to scores, if it has nothing else but a band and sinks, which take few
    registers, and tiles of such kinds were measured; else "".

    dense: whether a user's function reads a number for each pair.  Such tiles take shared memory, and
    there may be any number of them."""
    if kind is None or dense or itemsize != 2 or _family(capability) != "hopper":
        return ""
    added = {*kind.given} - {"CAUSAL", "WINDOW", "SINKS"}
    one = len(added) == 1 and added <= {"BIAS", "RELATIVE_BIAS", "SCORE_MOD"}
    return added.pop() if one and head_dim == head_dim_v and head_dim in (64, 128) else ""


def _attention(
    kernel: str,
    capability: tuple[int, int],
    itemsize: int,
    head_dim: int,
    head_dim_v: int,
    kind: Kind | None = None,
    dense: bool = False,
) -> AttentionConfig:
    """kind: of the variant, whose bias takes registers, and shared memory for each stage, as what a
    user's function reads does; but none where all of it is read by distance.  dense: see
    _added_alone."""
    D, Dv = padded_head_dim(head_dim), padded_head_dim(head_dim_v)
    table = _FLOAT32[kernel] if itemsize == 4 else _HALF[kernel, _family(capability)]
    wide = max(D, Dv) > 256
    if wide and _has_little_shared(capability):
        config = AttentionConfig(*_LITTLE_SHARED[itemsize][kernel])
    else:
        config = AttentionConfig(*table[max(D, Dv)])
    biased = kind is not None and (kind.BIAS or kind.RELATIVE_BIAS or kind.SCORE_MOD)
    read = kind is not None and (kind.BIAS or kind.SCORE_MOD)
    alone = _added_alone(capability, itemsize, head_dim, head_dim_v, kind, dense)
    if alone:
        config = AttentionConfig(*_ALONE.get((kernel, alone, D), table[D]))
    elif biased and kernel == "keys":
        config = replace(config, block_m=min(config.block_m, 32), block_n=min(config.block_n, 64))
    elif biased:
        most = (64 if max(D, Dv) <= 32 else 128), (16 if itemsize == 4 else 32)
        tile = min(config.block_m, most[0]), min(config.block_n, most[1])
        config = replace(config, block_m=tile[0], block_n=tile[1])
    if wide:  # whose stages were counted in what is compiled: one tile less than below
        return config
    if kernel == "forward":
        fixed, per_stage = config.block_m * D, config.block_n * (D + Dv)
    elif kernel == "keys":
        fixed, per_stage = config.block_n * (D + Dv), config.block_m * (D + Dv)
    else:
        fixed, per_stage = config.block_m * (D + Dv), config.block_n * (D + Dv)
    per_stage = per_stage * itemsize + (4 * config.block_m * config.block_n if read else 0)
    return _fitted(config, fixed * itemsize, per_stage, shared_bytes(capability))


def attention_forward(
    capability: tuple[int, int],
    itemsize: int,
    head_dim: int,
    head_dim_v: int,
    kind: Kind | None = None,
    dense: bool = False,
) -> AttentionConfig:
    """Forward, for elements of `itemsize` bytes."""
    return _attention("forward", capability, itemsize, head_dim, head_dim_v, kind, dense)


# block, num_warps, num_stages of tiles [block, block].
_BIAS = {
    16: (64, 4, 3),
    32: (64, 4, 3),
    64: (64, 4, 3),
    128: (64, 8, 2),
    256: (32, 8, 2),
    512: (16, 8, 2),
}
_BIAS_FLOAT32 = {
    16: (32, 4, 2),
    32: (32, 4, 2),
    64: (32, 8, 2),
    128: (32, 8, 1),
    256: (16, 8, 1),
    512: (16, 8, 1),
}


def attention_backward_bias(
    capability: tuple[int, int],
    itemsize: int,
    head_dim: int,
    head_dim_v: int,
    kind: Kind | None = None,
    dense: bool = False,
) -> AttentionConfig:
    """Backward: the kernels of the gradients of biases and of operands."""
    if head_dim == 128 and _added_alone(capability, itemsize, head_dim, head_dim_v, kind, dense):
        return AttentionConfig(128, 64, 8, 2)
    D, Dv = padded_head_dim(head_dim), padded_head_dim(head_dim_v)
    block, warps, stages = (_BIAS_FLOAT32 if itemsize == 4 else _BIAS)[max(D, Dv)]
    if kind is not None and kind.SCORE_MOD and itemsize == 4:  # pipelined, its operands spill
        stages = 1
    config = AttentionConfig(block, block, warps, stages)
    return _fitted(config, 0, 2 * block * (D + Dv) * itemsize, shared_bytes(capability))


def attention_backward_distances(
    capability: tuple[int, int],
    itemsize: int,
    head_dim: int,
    head_dim_v: int,
    kind: Kind | None = None,
) -> AttentionConfig:
    """Backward: the kernel of the gradients of biases by distance, of square tiles."""
    if itemsize == 2 and max(map(padded_head_dim, (head_dim, head_dim_v))) == 128:
        if _family(capability) == "ampere":  # larger ones spill
            return AttentionConfig(32, 32, 4, 2)
        if _added_alone(capability, itemsize, head_dim, head_dim_v, kind, False):
            return AttentionConfig(64, 64, 4, 1)
    return attention_backward_bias(capability, itemsize, head_dim, head_dim_v, kind)


def attention_sums_ends(capability: tuple[int, int], itemsize: int, kind: Kind) -> bool:
    """Whether the kernel of dQ sums the tiles in which all pairs have one column of a table by
    distance: in 16 bits, where it makes delta anew, and on Hopper, where it has registers for that."""
    there = kind.RELATIVE_BIAS and not (kind.ENTROPY or kind.SCORE_MOD)
    return there and itemsize == 2 and _family(capability) == "hopper"


def attention_backward(
    capability: tuple[int, int],
    itemsize: int,
    head_dim: int,
    head_dim_v: int,
    kind: Kind,
    slopes: bool = False,
    dense: bool = False,
) -> tuple[AttentionConfig, AttentionConfig]:
    """Backward: the kernel of dK and dV, and that of dQ; slopes: with the gradient of alibi_slopes."""
    keys = _attention("keys", capability, itemsize, head_dim, head_dim_v, kind, dense)
    D, Dv = padded_head_dim(head_dim), padded_head_dim(head_dim_v)
    if kind.CAUSAL and keys == AttentionConfig(64, 128, 8, 3):
        # The diagonal takes the registers of the third stage, and on Hopper padding takes those of half
        # the tile.
        padded = head_dim != D or head_dim_v != Dv
        half = padded and _family(capability) == "hopper"
        keys = AttentionConfig(32, 128, 8, 3) if half else AttentionConfig(64, 128, 8, 2)
    if Dv != D and keys == AttentionConfig(64, 64, 8, 2):
        keys = AttentionConfig(32, 64, 4, 2)
    queries = _attention("queries", capability, itemsize, head_dim, head_dim_v, kind, dense)
    if kind.TABLE and kind.RESCALES:  # bits beside changed scores spill
        keys = replace(keys, block_m=min(keys.block_m, 32))
    if kind.TABLE and (kind.BIAS or kind.SCORE_MOD) and kind.CURVED:
        queries = replace(queries, block_n=16)
    if slopes:
        # What is summed for them takes the registers of half a tile.
        queries = replace(queries, block_n=min(queries.block_n, 32))
    return keys, queries


def attention_delta(
    capability: tuple[int, int], itemsize: int, head_dim: int, head_dim_v: int, queries: AttentionConfig
) -> AttentionConfig:
    """The kernel of dQ where it makes delta alone, from its own configuration: Triton 3.6 may give its
    loads, and a bias, one stage more than it is told."""
    D, Dv = padded_head_dim(head_dim), padded_head_dim(head_dim_v)
    wide = max(D, Dv) > 256
    if wide and itemsize == 2:
        return replace(queries, num_stages=max(queries.num_stages - 1, 1))
    fixed = 0 if wide else queries.block_m * (D + Dv) * itemsize
    per_stage = queries.block_n * (D + Dv) * itemsize + 4 * queries.block_m * queries.block_n
    return _fitted(queries, fixed + per_stage, per_stage, shared_bytes(capability))
