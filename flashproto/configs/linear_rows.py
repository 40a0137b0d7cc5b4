"""Tiles of the linear layers of few rows (kernels/linear_rows.py)."""

from __future__ import annotations

from dataclasses import dataclass

from .sizes import power_of_two

MOST_ROWS = 64
MOST_NORMALIZED = 4096  # columns of a row that each program normalizes by itself
PROGRAMS = 2  # a multiprocessor, at least
TILE = 2048  # weights of a warp that are on their way at once
MOST_SPLITS = 16


@dataclass(frozen=True)
class LinearRowConfig:
    """columns of y a program, which takes `inner` of K at a time."""

    columns: int
    inner: int
    num_warps: int


@dataclass(frozen=True)
class LinearRowsConfig:
    """A tile [rows, columns] of y a program, or `splits` programs, which take `inner` of K at a time,
    each `steps` times."""

    rows: int
    columns: int
    inner: int
    splits: int
    steps: int
    num_warps: int
    num_stages: int


def linear_row(N: int, K: int, norm: bool, up: bool, multiprocessors: int) -> LinearRowConfig:
    """For one row: as few columns as make PROGRAMS a multiprocessor.  norm: whether each program holds
    the whole row, to normalize it; up: whether columns are of two products each."""
    columns = 8 if up else 16
    while columns > 1 and -(-N // columns) < PROGRAMS * multiprocessors:
        columns //= 2
    num_warps = 8 if norm and K > 1024 else 4
    inner = min(power_of_two(K), TILE * num_warps // (columns * (1 + up)))
    return LinearRowConfig(columns, max(inner, 16), num_warps)


def linear_rows(M: int, N: int, K: int, up: bool, multiprocessors: int, tiles: int) -> LinearRowsConfig:
    """For up to MOST_ROWS rows.  tiles: of how many a split can count its programs; 0: no splits."""
    rows = max(power_of_two(M), 16)
    columns = 16 if rows == 16 or up else 32
    inner = 128 if rows < 64 else 64
    every, found = -(-K // inner), -(-N // columns)
    splits = min(PROGRAMS * multiprocessors // max(found, 1), MOST_SPLITS, every // 2)
    splits = max(splits, 1) if found <= tiles else 1
    steps = -(-every // splits)
    return LinearRowsConfig(rows, columns, inner, -(-every // steps), steps, 4, 4)
