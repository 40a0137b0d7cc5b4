"""Tiles of the element-wise kernels: gated linear units, rotary embedding, QK norm, attention in
parts."""

from __future__ import annotations

from dataclasses import dataclass

from .sizes import power_of_two

VECTOR_BYTES = 16  # the widest load of a thread
GLU_WARPS = 4
HEAD_WARPS = 4
HEAD_STEPS = 4
MAX_HEADS = 8
MERGE_WARPS = 4
MERGE_VECTORS = 2
QK_NORM_PROGRAMS = 5  # as many as 96 registers a thread leave room for


@dataclass(frozen=True)
class TileConfig:
    """A tile [rows, columns] a program."""

    rows: int
    columns: int
    num_warps: int


@dataclass(frozen=True)
class HeadConfig:
    """A tile of tokens x heads, each row of it `pairs` pairs of dimensions, `rest` dimensions that are
    not rotated, `whole` dimensions in all, padded to powers of two.

    steps: tiles a program, of other heads of the same tokens.
    programs: programs a multiprocessor, where each takes several tiles.
    """

    tokens: int
    heads: int
    pairs: int
    rest: int
    whole: int
    num_warps: int
    steps: int = 1
    programs: int = 1


def glu(N: int, itemsize: int) -> TileConfig:
    """Tiles for rows of N columns: one vector a thread of each tensor, in the widest tile that wastes
    least of its columns past N."""
    elements = GLU_WARPS * 32 * VECTOR_BYTES // itemsize
    widths = [C for C in (1024, 512, 256) if elements >= C]
    columns = power_of_two(N)
    if columns > widths[-1]:
        columns = min(widths, key=lambda C: -(-N // C) * C)
    return TileConfig(elements // columns, columns, GLU_WARPS)


def merge_parts(D: int, itemsize: int, aligned: bool) -> TileConfig:
    """Tiles for rows of D columns, whole: as many rows as make MERGE_VECTORS vectors a thread of each
    part.  aligned: whether rows begin at multiples of 16 bytes; a thread that reads single elements has
    them in many rows, and an address for each."""
    columns = power_of_two(D)
    vector = VECTOR_BYTES // itemsize if aligned else 1
    rows = MERGE_WARPS * 32 * MERGE_VECTORS * vector // columns
    return TileConfig(max(rows, 1), columns, MERGE_WARPS)


def heads(D: int, rotary_dim: int, S: int, n_heads: int, itemsize: int) -> HeadConfig:
    """Heads of D dimensions, the first `rotary_dim` rotated, of S tokens: one vector a thread of the
    first members of the pairs, one of the second.  A tile has as few heads as fill it, so that the
    next ones share the angles of its tokens."""
    pairs, rest, rows = _head_tile(D, rotary_dim, itemsize)
    tokens = min(rows, power_of_two(S))
    together = min(power_of_two(n_heads), rows // tokens)
    steps = max(min(HEAD_STEPS, -(-n_heads // together)), 1)
    return HeadConfig(tokens, together, pairs, rest, power_of_two(D), HEAD_WARPS, steps)


def qk_norm_backward(D: int, rotary_dim: int, S: int, n_heads: int, itemsize: int) -> HeadConfig:
    """Tiles as for the forward.  A few programs a multiprocessor take many tiles each, with up to
    MAX_HEADS neighbouring heads in a tile, and add up the weights' gradients."""
    pairs, rest, rows = _head_tile(D, rotary_dim, itemsize)
    together = min(power_of_two(n_heads), MAX_HEADS, rows)
    tokens = min(rows // together, power_of_two(S))
    whole = power_of_two(D)
    return HeadConfig(tokens, together, pairs, rest, whole, HEAD_WARPS, programs=QK_NORM_PROGRAMS)


def _head_tile(D: int, rotary_dim: int, itemsize: int) -> tuple[int, int, int]:
    """(pairs, rest, rows) of a tile of heads."""
    pairs = power_of_two(max(rotary_dim // 2, 1))
    rest = power_of_two(D - rotary_dim) if rotary_dim < D else 0
    rows = HEAD_WARPS * 32 * VECTOR_BYTES // itemsize * 2 // (2 * pairs + rest)
    return pairs, rest, max(power_of_two(rows + 1) // 2, 1)  # rounded down
