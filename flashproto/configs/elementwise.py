"""Tiles of the element-wise kernels: gated linear units, rotary embedding, QK norm."""

from __future__ import annotations

from dataclasses import dataclass, replace

from .sizes import power_of_two

VECTOR_BYTES = 16  # the widest load of a thread
GLU_WARPS = 4
HEAD_WARPS = 4
HEAD_STEPS = 4
QK_NORM_WARPS = 2
QK_NORM_REGISTERS = 112
QK_NORM_PROGRAMS = 9  # as many as those registers leave room for


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
    max_registers: a cap for the compiler, for as many programs.
    """

    tokens: int
    heads: int
    pairs: int
    rest: int
    whole: int
    num_warps: int
    steps: int = 1
    programs: int = 1
    max_registers: int | None = None


def glu(N: int, itemsize: int) -> TileConfig:
    """Rows of N: one vector a thread of each tensor, in the widest tile that wastes least of its
    columns past N."""
    elements = GLU_WARPS * 32 * VECTOR_BYTES // itemsize
    widths = [C for C in (1024, 512, 256) if elements >= C]
    columns = power_of_two(N)
    if columns > widths[-1]:
        columns = min(widths, key=lambda C: -(-N // C) * C)
    return TileConfig(elements // columns, columns, GLU_WARPS)


def heads(
    D: int, rotary_dim: int, S: int, n_heads: int, itemsize: int, warps: int = HEAD_WARPS
) -> HeadConfig:
    """Heads of D dimensions, the first `rotary_dim` rotated, of S tokens: one vector a thread of the
    first members of the pairs, one of the second."""
    pairs = power_of_two(max(rotary_dim // 2, 1))
    rest = power_of_two(D - rotary_dim) if rotary_dim < D else 0
    rows = warps * 32 * VECTOR_BYTES // itemsize * 2 // (2 * pairs + rest)
    rows = max(power_of_two(rows + 1) // 2, 1)  # rounded down
    tokens = min(rows, power_of_two(S))
    together = min(power_of_two(n_heads), rows // tokens)
    steps = max(min(HEAD_STEPS, -(-n_heads // together)), 1)
    return HeadConfig(tokens, together, pairs, rest, power_of_two(D), warps, steps)


def qk_norm_backward(D: int, rotary_dim: int, S: int, n_heads: int, itemsize: int) -> HeadConfig:
    """As heads, one tile at a time; a few small programs a multiprocessor, each of which takes many and
    adds up the weights' gradients."""
    tile = heads(D, rotary_dim, S, n_heads, itemsize, QK_NORM_WARPS)
    return replace(tile, steps=1, programs=QK_NORM_PROGRAMS, max_registers=QK_NORM_REGISTERS)
