"""Tiles of the linear layer of one row (kernels/linear_row.py)."""

from __future__ import annotations

from dataclasses import dataclass

from .sizes import power_of_two

MOST_NORMALIZED = 4096  # columns of a row that each program normalizes by itself
PROGRAMS = 2  # a multiprocessor, at least
TILE = 2048  # weights of a warp that are on their way at once


@dataclass(frozen=True)
class LinearRowConfig:
    """columns of y a program, which takes `inner` of K at a time."""

    columns: int
    inner: int
    num_warps: int


def linear_row(N: int, K: int, norm: bool, up: bool, multiprocessors: int) -> LinearRowConfig:
    """As few columns as make PROGRAMS a multiprocessor.  norm: whether each program holds the whole
    row, to normalize it; up: whether columns are of two products each."""
    columns = 8 if up else 16
    while columns > 1 and -(-N // columns) < PROGRAMS * multiprocessors:
        columns //= 2
    num_warps = 8 if norm and K > 1024 else 4
    inner = min(power_of_two(K), TILE * num_warps // (columns * (1 + up)))
    return LinearRowConfig(columns, max(inner, 16), num_warps)
