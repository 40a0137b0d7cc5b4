"""Tiles of attention to a cache and of attention with split keys, and where keys are split.

Such calls read keys and values once and do little else.  Memory at 4.8 TB/s that answers in about a
microsecond wants 4.8 MB on their way, 36 KiB for each of 132 multiprocessors.  A program has
num_stages - 1 tiles of keys and values under way, of block_n (D + Dv) elements each: with tiles of 64
keys, head_dim 128 and four stages in 16 bits that is 96 KiB less what it works on, and twice as much
for the two programs that a multiprocessor holds.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from .attention import padded_head_dim, shared_bytes
from .sizes import power_of_two

if TYPE_CHECKING:
    from ..variant import Kind


RESERVED = 1024  # of shared memory, by the system, for each program


@dataclass(frozen=True)
class DecodeConfig:
    """Tiles of block_m rows by block_n keys.

    programs: how many of them a multiprocessor holds.
    """

    block_m: int
    block_n: int
    num_warps: int
    num_stages: int
    programs: int


def attention_decode(
    capability: tuple[int, int],
    itemsize: int,
    cache_itemsize: int,
    D: int,
    Dv: int,
    rows: int,
    paged: bool = False,
    by_head: bool = False,
) -> DecodeConfig:
    """For `rows` rows of a key head: query heads of its group by tokens.  itemsize: of an element of q.

    paged: whether there is a page table.  Triton then loads page numbers in one half of its stages and
    keys in the other.  by_head: whether each head has intervals of its own, which are loaded for each
    score, and wait in shared memory as keys do; so do numbers of pages and scales, for each key.
    """
    BLOCK_D, BLOCK_DV = padded_head_dim(D), padded_head_dim(Dv)
    widest = max(BLOCK_D, BLOCK_DV)
    hopper = capability[0] == 9
    most = 32 if itemsize == 4 else 64 if widest > 128 else 128
    if widest > 256:
        most //= 2
    if hopper and cache_itemsize == 1:
        # ptxas 12.8 loses where the values of a warpgroup's product lie, once keys are turned into
        # float16 for another: it reads a register that nothing has written.
        most = 32
    block_m = min(max(power_of_two(rows), 16), most)
    large = block_m == 128 or widest > 128
    block_n = 32 if itemsize == 4 or widest > 128 or (large and not hopper) else 64
    if widest > 256:
        block_n = 16
    # A warpgroup multiplies 64 rows on Hopper; elsewhere four warps have not the registers for as many.
    num_warps = 8 if large or (block_m == 64 and not hopper) else 4
    tile = block_n * ((BLOCK_D + BLOCK_DV) * cache_itemsize + 8 * (block_m if by_head else 1) + 16)
    # A warpgroup's product reads a tile from shared memory while it runs, which takes one more there;
    # elsewhere probabilities go through shared memory from the layout of a result to an operand's.
    warpgroups = hopper and block_m >= 64 and itemsize < 4
    buffers = 0 if warpgroups else -1
    fixed = block_m * (BLOCK_D + (0 if warpgroups else block_n)) * itemsize + RESERVED
    budget = shared_bytes(capability) + RESERVED
    programs = 1 if large else 2
    stages = 4
    while stages > 2 and programs * (fixed + (stages + buffers) * tile) > budget:
        stages -= 1
    return DecodeConfig(block_m, block_n, num_warps, 2 * stages - 1 if paged else stages, programs)


@dataclass(frozen=True)
class MergeConfig:
    """A program merges `rows` rows of a tile of queries, of each `pieces` at a time."""

    rows: int
    pieces: int
    num_warps: int


def decode_merge(
    rows_of_tile: int, tiles_of_heads: int, programs: int, Dv: int, multiprocessors: int
) -> MergeConfig:
    """rows_of_tile: rows in a tile of queries; tiles_of_heads: of queries, in all; programs: of the
    launch before.

    Few rows a program where rows are few, for their pieces are as many; else more, since each program
    first finds out where it is.  Pieces as many as rows have in sequences of one length, all at once as
    far as 16 warps hold them, 64 elements a thread: each further round waits for memory anew.
    """
    rows = 1
    while rows < min(rows_of_tile, 16) and tiles_of_heads * rows_of_tile >= 8 * rows * multiprocessors:
        rows *= 2
    pieces = max(power_of_two(programs // max(tiles_of_heads, 1) + 2), 4)
    width = rows * padded_head_dim(Dv)
    num_warps = 4
    while num_warps < 16 and pieces * width > 2048 * num_warps:
        num_warps *= 2
    return MergeConfig(rows, max(min(pieces, 2048 * num_warps // width), 1), num_warps)


def splits_cache(query_tiles: int, tiles_of_heads: int, programs: int) -> bool:
    """Whether the work of a call with a cache is cut into equal parts; else a program has a tile of
    queries, as in a prefill: query_tiles of each key head, tiles_of_heads in all."""
    return query_tiles == 1 or tiles_of_heads < 4 * programs


def attention_splits_keys(
    kind: Kind, B: int, Hq: int, Hkv: int, Sq: int, Sk: int, multiprocessors: int
) -> bool:
    """Whether attention without a cache splits its keys on backend "triton": where they are long, and
    tiles of queries too few for the card."""
    if Sk < 1024 or Sq > 1024 or not Hkv or kind.unsupported_by("decode"):
        return False
    rows = Hq // Hkv * Sq
    # A program for each 64 rows would leave half of the card without work.
    if 2 * B * Hkv * -(-rows // 64) <= multiprocessors:
        return True
    return rows <= 64 and B * Hkv <= 4 * multiprocessors
