"""Tiles of the kernels that work on rows: norms and softmax.

Chosen from the width and dtype of the rows alone: what a row gives never depends on how many
others there are.  itemsize: bytes of an element of x, or of total where a residual is added.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from .sizes import power_of_two

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
