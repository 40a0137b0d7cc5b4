"""Tiles of the kernels that work on rows: norms and softmax.

They are chosen from the width and dtype of the rows alone, so a row's result never depends on how many
other rows there are.  itemsize: bytes of an element of x, or of total where a residual is added.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass, replace

from .sizes import power_of_two

# A choice takes longer than a small kernel, so the last ones are kept.
cached = functools.lru_cache(1024)

MAX_TILE_ROWS = 256
MAX_ROW_WARPS = 16
WIDEST_SPLIT = 2**20
WIDEST_WITHOUT_STATISTICS = 768


@dataclass(frozen=True)
class RowConfig:
    """Tiles [rows, columns] of a kernel that works on the rows of a matrix.

    looped: rows are wider than a tile and looped over, one row a program.
    split: rows are wider than a tile and split over programs, which exchange partial results;
        `columns` of a row a program.
    chunks: tiles of which a row is made, all held in registers, where it is not one.
    stages: depth of the pipeline over the tiles of one program, where it takes several.
    programs: programs a multiprocessor, where each takes several tiles.
    max_registers: a cap for the compiler, where room for one more program a multiprocessor pays.
    cluster: programs of a thread block cluster that share a row, of columns * chunks each.
    """

    rows: int
    columns: int
    num_warps: int
    looped: bool = False
    split: bool = False
    chunks: int = 1
    stages: int = 1
    programs: int = 1
    max_registers: int | None = None
    cluster: int = 1


@dataclass(frozen=True)
class TopkConfig(RowConfig):
    """block: columns of a block, whose largest scores are compared first; 1 where all scores are.
    part: columns of the parts of the best blocks that are compared next, before their scores; 1: none.
    sort: whether the largest are found by sorting, else one after another.
    """

    block: int = 1
    part: int = 1
    sort: bool = False


def has_clusters(capability: tuple[int, int]) -> bool:
    """Whether clusters of 16 programs with all of a Hopper multiprocessor's shared memory fit."""
    return capability[0] in (9, 10)


def _row_tile(
    N: int,
    itemsize: int,
    thread_bytes: int,
    widest: int,
    loop: RowConfig,
    most_warps: int = MAX_ROW_WARPS,
) -> RowConfig:
    """Tiles of whole rows, several for each program where four warps with `thread_bytes` a thread have
    room for more than one; `loop` for rows of more than `widest` columns."""
    columns = power_of_two(N)
    if columns > widest:
        return loop
    per_warp = 32 * thread_bytes // itemsize
    rows = min(max(4 * per_warp // columns, 1), MAX_TILE_ROWS)
    return RowConfig(rows, columns, min(max(rows * columns // per_warp, 1), most_warps))


def _chunks(N: int, largest: int, counts: tuple[int, ...]) -> tuple[int, int]:
    """(columns, chunks) of a row in equal tiles of a power of two, at least 256 and at most `largest`;
    chunks is 1 where their number is not one of `counts`."""
    columns = min(N & -N, largest)
    chunks = N // columns
    return (columns, chunks) if columns >= 256 and chunks in counts else (power_of_two(N), 1)


@cached
def norm_forward(
    N: int, itemsize: int, residual: bool, centered: bool, capability: tuple[int, int]
) -> RowConfig:
    """Forward of the norms: x, perhaps a residual, and weight and bias beside it."""
    widest = 8192 if residual and itemsize == 4 else 16384
    if power_of_two(N) > widest:
        if itemsize == 2 and N % 8 != 0 and N <= 65536:
            return RowConfig(1, 2048, 2, split=True)
        if itemsize == 2:
            return RowConfig(1, 4096 if centered or N <= 65536 else 8192, 4, split=True)
        if not residual:
            return RowConfig(1, 4096, 4, split=True)
        return RowConfig(1, 4096, 8, split=True, max_registers=80)
    columns, chunks = (N // 4, 4) if N in (8192, 16384) else _chunks(N, 2048, (3, 5, 6, 7))
    if N == 16384 and itemsize == 4 and centered:  # whose deviations are summed twice
        columns, chunks = N // 2, 2
    if chunks > 1:  # 16 bytes a load, 8 where the few threads that this leaves are too few
        few = columns <= 256 or (columns <= 1024 and chunks < 7 and not centered)
        warps = min(max(columns * itemsize // (32 * (8 if few else 16)), 1), MAX_ROW_WARPS)
        if centered and itemsize == 2:
            warps = min(warps, 8)
        return RowConfig(1, columns, warps, chunks=chunks)
    if columns > 4096:
        return _row_tile(N, itemsize, 64, widest, RowConfig(1, 4096, 8, split=True))
    per_warp, fewest = 1024 // itemsize, 4
    if centered and 16 * itemsize <= columns // 2 <= 128:
        per_warp, fewest = 1024, 1
    elif centered and 256 < columns <= 1024:
        fewest = 2
    warps = min(max(columns // per_warp, fewest), 8)
    rows = min(max(warps * per_warp // columns, 1), MAX_TILE_ROWS)
    # The cap is above what it needs; it makes the compiler load all rows before it adds up the first.
    cap = 64 if columns == 256 and itemsize == 2 and not centered else None
    if centered and itemsize == 4 and columns == 2048:  # eight programs a multiprocessor
        cap = 32
    return RowConfig(rows, columns, warps, max_registers=cap)


def norm_keeps_statistics(N: int) -> bool:
    """Whether the forward of the norms keeps the mean and rstd of each row for the backward.

    Of narrow rows the backward works them out again, in about the same time (figures: docs/hopper.md);
    memory for them, asked for and kept, takes the host a tenth of a small call.
    """
    return N > WIDEST_WITHOUT_STATISTICS


@cached
def norm_forward_shared(
    N: int, itemsize: int, residual: bool, centered: bool, parameters: int
) -> RowConfig | None:
    """Forward of the norms on Hopper, with rows in shared memory.  None for narrow rows, and for rows
    that cannot all start at multiples of 16 bytes.

    parameters: bytes of weight and bias for each column.  Where a program's registers have room for its
    own, and its columns divide the row, it stays for many tiles of rows, `stages` of which lie in
    shared memory.  It is then one warp, whose reductions need no barriers.  More rows in a tile mean
    fewer instructions for each row; fewer columns mean more warps and more words for each row.

    Other programs take a whole row of up to 32768 columns, or of fewer than 16384 of x and a residual;
    of wider rows as many columns as leave room for several programs a multiprocessor.  At most 32
    programs share a row, so that one warp reads their words.
    """
    if itemsize != 2 or N % 8 != 0 or not 12288 < N <= 2**19:
        return None
    if N < 16384 and residual:
        return RowConfig(1, -(-N // 2048) * 2048, 4 if centered else 8, max_registers=80)
    if N <= 16384 and (residual or not centered):
        return None
    if N > 16384 and N % 2048 == 0 and not residual and parameters <= 4:
        stays = RowConfig(1, 2048, 1, split=True, stages=4, programs=12, max_registers=168)
        if N > 2**18:
            return replace(stays, columns=4096, num_warps=2, programs=6)
        if not centered:
            return stays
        if 32768 < N <= 2**17:
            return replace(stays, rows=3, columns=1024, stages=3)
        return replace(stays, rows=2, stages=3, programs=8, max_registers=255)
    if N <= 32768 and not residual:
        cap = 80 if centered and N >= 16384 else 64
        return RowConfig(1, -(-N // 2048) * 2048, 8, max_registers=cap)
    columns = 8192 if N <= 2**18 else 16384
    return RowConfig(1, columns, columns // 4096, split=True, max_registers=96)


@cached
def norm_forward_unaligned(N: int, itemsize: int, residual: bool, centered: bool) -> RowConfig | None:
    """Forward of the norms on Hopper, with rows in shared memory that cannot all start at multiples of
    16 bytes.  None for narrow rows.

    A program's columns are a chunk in shared memory, less the 8 elements by which its start may vary.
    """
    if itemsize != 2 or N % 8 == 0 or not 12288 < N <= 2**19:
        return None
    columns = 4096 if centered and N <= 2**17 else 8192 if N <= 2**18 else 16384
    cap = 80 if centered or residual else 64
    return RowConfig(1, columns - 8, columns // 2048, split=True, max_registers=cap)


@cached
def norm_backward(
    N: int,
    itemsize: int,
    weight_gradients: bool,
    centered: bool,
    capability: tuple[int, int],
    residual: bool = False,
    bias: bool = False,
    statistics: bool = True,
) -> RowConfig:
    """Backward of the norms: x and dy, perhaps the gradient that reaches a sum with a residual; with
    weight_gradients two tiles of partial sums beside them, and a few programs a multiprocessor, each of
    which takes many tiles.  statistics: whether mean and rstd are given.

    All programs of a split row must run at once.  The caps on registers make sure that as many fit as
    `programs` says, and the widest rows are split less.
    """
    if not statistics and power_of_two(N) * itemsize >= 256:
        return _one_warp(N, itemsize, weight_gradients)
    clusters = itemsize == 2 and has_clusters(capability)
    if clusters and not centered and N % 4096 == 0 and 65536 < N <= 131072:
        return RowConfig(1, 4096, 8, split=True, programs=2, max_registers=128)
    if clusters and 8192 < N <= 131072 and N % 16 == 0:
        return _cluster(N, centered or bias, residual)
    columns, chunks = _chunks(N, 2048, (3, 5, 6))
    if N in (5 * 2048, 6 * 2048) and itemsize == 2:
        return RowConfig(1, columns, 16, chunks=chunks, stages=2 if weight_gradients else 1)
    if power_of_two(N) > 8192:
        columns = 4096 // itemsize
        if 256 * columns >= N:
            return RowConfig(1, columns, 4, split=True, programs=3, max_registers=168)
        return RowConfig(1, 4 * columns, 16, split=True, programs=1, max_registers=128)
    if chunks == 5 or (chunks == 3 and columns >= 1024):
        warps = min(max(columns * itemsize // (512 if chunks == 5 else 256), 1), MAX_ROW_WARPS)
        rows = max(2 // warps, 1)
        tile = RowConfig(rows, columns, rows * warps, chunks=chunks)
    else:
        columns, per_warp, fewest = power_of_two(N), 1024 // itemsize, 4
        if columns in (256, 512):
            per_warp, fewest = (2 * per_warp, 2) if columns == 256 else (per_warp, 2)
        warps = min(max(columns // per_warp, fewest), MAX_ROW_WARPS)
        tile = RowConfig(min(max(warps * per_warp // columns, 1), MAX_TILE_ROWS), columns, warps)
    if not weight_gradients:
        return tile
    stages = 2 if itemsize == 4 else 4 if N < columns in (2048, 8192) else 3
    programs = 4 if columns == 256 else max(MAX_ROW_WARPS // tile.num_warps, 1)
    return replace(tile, stages=stages, programs=programs)


def _one_warp(N: int, itemsize: int, weight_gradients: bool) -> RowConfig:
    """Backward of the norms that computes the statistics again, one reduction after another.  It has no
    barriers, and so many programs that others have work meanwhile."""
    columns = min(N & -N, 256)
    chunks = N // columns
    if columns < 64 or chunks not in (3, 5):
        columns, chunks = power_of_two(N), 1
    held = columns * chunks
    rows = 1 if held > 640 else (8 if held <= 128 else 4) // itemsize
    tile = RowConfig(rows, columns, 1, chunks=chunks)
    if not weight_gradients:
        return tile
    stages = 4 if chunks == 3 or columns in (64, 256, 1024) else 3
    return replace(tile, stages=stages, programs=12 if held <= 256 else 8)


@cached
def norm_backward_shared(N: int, itemsize: int, centered: bool) -> RowConfig | None:
    """Backward of the norms on Hopper, with `stages` rows in shared memory.  None for narrower rows,
    and for rows that cannot all start at multiples of 16 bytes.

    All programs of a row must run at once.
    """
    if itemsize != 2 or N % 8 != 0 or not 65536 < N <= 2**19:
        return None
    tile = RowConfig(1, 4096, 8, split=True, stages=6, programs=2, max_registers=128)
    if not centered:
        return tile
    if N > 2**18:
        return replace(tile, num_warps=4, max_registers=None)
    return replace(tile, columns=1024, num_warps=1, programs=8, max_registers=None)


def _cluster(N: int, bias: bool, residual: bool) -> RowConfig:
    """Rows shared by a cluster of as few programs as hold them in five chunks of 512 columns each, in
    four with the tensors of both a bias and a residual.  Eight bytes a load, so that the partial sums
    are stored as they are added up, and many small programs, whose reductions are short.

    Wider rows have larger chunks: with more of them Triton 3.6 gives the last one another layout, and
    fails.
    """
    most = 4 if bias and residual else 5
    for cluster in (4, 8, 16):
        chunks = -(-N // (512 * cluster))
        if chunks <= most:
            programs = {3: 5 if bias else 4, 4: 4, 5: 3}[chunks]
            cap = {3: 168, 4: 128, 5: 96}[programs]
            stages = 3 if residual else 4
            return RowConfig(
                1,
                512,
                4,
                chunks=chunks,
                stages=stages,
                programs=programs,
                max_registers=cap,
                cluster=cluster,
            )
    if N > 65536:
        return RowConfig(1, 2048, 16, chunks=-(-N // 32768), stages=3, cluster=16)
    chunks = -(-N // 16384)
    tile = RowConfig(1, 1024, 8, chunks=chunks, stages=3, programs=2, cluster=16)
    if chunks > 3:
        return tile
    if bias:  # more rows at once, so that as many bytes are on their way
        return replace(tile, stages=4)
    return replace(tile, programs=3, max_registers=80)


@cached
def norm_split(N: int, itemsize: int) -> RowConfig:
    """Norms, forward and backward, whose rows are split however narrow they are, for calls of few rows:
    up to 16 programs a row, of 512 columns or more."""
    columns = min(max(power_of_two(N) // 16, 512), 4096)
    warps = max(columns * itemsize // 1024, 2)
    return RowConfig(1, columns, min(warps, 16), split=True, programs=1)


@cached
def column_sums(N: int) -> RowConfig:
    """Sums of the partial sums.  The fewer columns there are, the narrower are the tiles, so that there
    are enough of them, and the more rows of partial sums a tile has."""
    if N <= 4096:
        return RowConfig(512, 8, 8)
    if N <= 8192:
        return RowConfig(256, 16, 4)
    return RowConfig(64, 32, 4) if N <= 32768 else RowConfig(16, 128, 4)


def _split(N: int, itemsize: int, most: int, max_registers: int | None) -> RowConfig:
    """Rows split over programs of four warps, or of eight for rows of more than `most` columns, where
    many programs read many words.  Rows wider than WIDEST_SPLIT are looped over.

    The cap is above what the compiler needs: without one it aims lower, and spills.  Hooks have no cap.
    """
    warps = 8 if most < N else 4
    columns = warps * 2048 // itemsize
    if N > WIDEST_SPLIT:
        return RowConfig(1, columns, warps, looped=True)
    return RowConfig(1, columns, warps, split=True, max_registers=max_registers)


@cached
def softmax_forward(N: int, itemsize: int, hooked: bool = False) -> RowConfig:
    """Forward of softmax and log_softmax.

    A thread adds up 16 elements of a wide row in float32 and no more, so that its sum is as exact as
    torch's.
    """
    columns, per_warp = power_of_two(N), 2048 // itemsize
    if hooked and N > WIDEST_SPLIT:
        return RowConfig(1, 8192 // itemsize, 8, looped=True)
    if N > 16384 or 8192 < N <= 12288:
        held = 80 if itemsize == 4 else 56 if N <= 65536 else 64
        return _split(N, itemsize, 65536, None if hooked else held)
    rows = min(max(2 * per_warp // columns, 1), MAX_TILE_ROWS)
    warps = max(rows * columns // per_warp, 2)
    if itemsize == 2 and N == 8192:
        warps = 16
    if itemsize == 2 and N > 8192:
        warps = 8
    return RowConfig(rows, columns, warps, max_registers=64 if warps == 32 else None)


@cached
def softmax_forward_shared(N: int, itemsize: int) -> RowConfig | None:
    """Forward of softmax and log_softmax on Hopper, with rows in shared memory.  None for narrow rows,
    and for rows that cannot all start at multiples of 16 bytes.

    A program takes a whole row of up to 64 KiB; of wider rows as many columns as leave room for several
    programs a multiprocessor.  Each of its threads reads one word of its row, or two.
    """
    if itemsize == 4:
        if N % 4 != 0 or not 8192 < N <= WIDEST_SPLIT:
            return None
        if N <= 16384:
            return RowConfig(1, -(-N // 512) * 512, 4, max_registers=96)
        return RowConfig(1, 8192 if N <= 2**18 else 16384, 4, split=True, max_registers=128)
    if itemsize != 2 or N % 8 != 0 or not 16384 < N <= 2**19:
        return None
    if N <= 32768:
        return RowConfig(1, -(-N // 2048) * 2048, 8, max_registers=64)
    if N <= 65536:
        return RowConfig(1, 8192, 2, split=True)
    return RowConfig(1, 16384, 4, split=True)


@cached
def softmax_backward(N: int, itemsize: int, hooked: bool = False) -> RowConfig:
    """Backward of softmax and log_softmax: y and dy."""
    columns = power_of_two(N)
    if itemsize == 2 and 12288 < N <= 16384 and not hooked:
        return RowConfig(1, columns, 16, max_registers=64)
    if columns > 8192:
        return _split(N, itemsize, 131072, None if hooked else 64)
    rows = min(max(512 // columns, 2 if columns <= 1024 else 1), MAX_TILE_ROWS)
    warps = min(max(columns // 256, 2), MAX_ROW_WARPS)
    if itemsize == 2 and 4096 < N < 8192:
        warps = 8
    return RowConfig(rows, columns, warps)


@cached
def softmax_split(N: int, itemsize: int) -> RowConfig:
    """softmax and log_softmax, forward and backward, whose rows are split however narrow they are, for
    calls of few rows; the widest are looped over, as always."""
    return softmax_forward(N, itemsize, True) if N > WIDEST_SPLIT else norm_split(N, itemsize)


@cached
def logsumexp(N: int, itemsize: int) -> RowConfig:
    """Forward and backward of logsumexp; the tiles of the backward are independent."""
    return _row_tile(N, itemsize, 64, 8192, _split(N, itemsize, 65536, None))


@cached
def softmax_topk(N: int, itemsize: int, k: int) -> TopkConfig:
    """Forward of softmax_topk.

    Rows of up to 4096 columns are held whole, by one warp where its registers have room, so that little
    goes through shared memory.  The width of blocks makes the sum of their number and the number of
    scores in the best ones smallest, up to a load of 16 bytes; parts make up for that bound where
    sorting is much of the work.  Sorting costs more for each key, searching costs more for each of the
    k.  So searching suits many scores, above all of 16 bits: one instruction finds the largest of their
    keys in a warp.

    Where rows are split, a program loops over softmax_topk_span columns in tiles.  They are small,
    since their size decides how many scores are read twice.
    """
    columns, largest = power_of_two(N), power_of_two(k)
    if columns > 4096:
        if N <= 131072:
            return TopkConfig(1, 1024, 2, split=True)
        return TopkConfig(1, 8192 // itemsize, 4, split=True)
    rows = min(max(2048 // itemsize // columns, 1), MAX_TILE_ROWS)
    if columns == 256 and k > 8:
        rows = 2
    warps = max(columns * itemsize // 8192, 1)
    blocks = [w for w in (1, 2, 4, 8) if w == 1 or columns >= 2 * w * largest]
    block = min(blocks, key=lambda w: (columns // w + largest * w, abs(w - 4)))
    part = 4 if block == 8 and k > 32 else 1
    sort = columns < 1024 or k > (32 if columns == 4096 else 16) * 2 // itemsize
    return TopkConfig(rows, columns, warps, block=block, part=part, sort=sort)


@cached
def softmax_topk_span(N: int, k: int) -> int:
    """Columns of a row for each program of softmax_topk, where rows are split.  The more there are, the
    fewer scores enter the k largest so far and leave them again; the fewer, the more programs share one
    row.

    At most 2^16: a 16-bit score and the column share a 32-bit key.
    """
    if N > 131072:
        return 2**14
    return 2**15 if k <= 16 else 2**16


@cached
def softmax_topk_join(splits: int, k: int) -> TopkConfig:
    """Tiles of the kernel that joins the int64 keys that the splits of a row have kept."""
    candidates = power_of_two(splits * k)
    return TopkConfig(1, candidates, min(max(candidates // 256, 1), 8), sort=k > 8)


@cached
def softmax_topk_backward(N: int, itemsize: int) -> RowConfig:
    """Backward of softmax_topk: tiles of the matrix, each by itself."""
    columns = min(power_of_two(N), 4096)
    rows = min(max(256 // columns, 1), MAX_TILE_ROWS)
    return RowConfig(rows, columns, max(columns // 512, 1))
