"""Which tokens a rank holds, and which of them meet.

Of a sequence cut into 2 n chunks rank r of n holds the chunks r and 2 n - 1 - r, one behind the other:
so all ranks have the same share of a causal mask's work (head-tail order).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from ..checks.errors import described, refuse
from ..checks.options import check_integer
from ..mask_values import Diagonals
from ..reference import compute_dtype
from .agreement import agreed, all_in_backward
from .group import NOT_TRACED, Group, check_plain, check_untransformed, group_of, once

Range = tuple[int, int]  # from the first to before the second
Band = tuple[bool, int, int | None, int]


def ranges(rank: int, size: int, length: int) -> list[Range]:
    """The positions of a rank's `length` tokens, rising; adjoining chunks are one range."""
    if size == 1:
        return [(0, length)]
    chunk = length // 2
    head, tail = rank * chunk, (2 * size - 1 - rank) * chunk
    if head + chunk == tail:
        return [(head, tail + chunk)]
    return [(head, head + chunk), (tail, tail + chunk)]


def pieces(held: list[Range], start: int, stop: int) -> list[Range]:
    """The positions of tokens `start` to `stop` of those held."""
    found, at = [], 0
    for low, high in held:
        first, last = max(start - at, 0), min(stop - at, high - low)
        if first < last:
            found.append((low + first, low + last))
        at += high - low
    return found


def cut(x: Tensor, at: Sequence[Range], dim: int) -> Tensor:
    """The elements of these ranges along a dimension, side by side."""
    return torch.cat([x.narrow(dim, start, stop - start) for start, stop in at], dim)


def in_order(shards: list[Tensor], dim: int) -> Tensor:
    """The whole sequence from the shards of all ranks."""
    if len(shards) == 1:
        return shards[0]
    halves = [x.chunk(2, dim) for x in shards]
    return torch.cat([head for head, _ in halves] + [tail for _, tail in reversed(halves)], dim)


# --- which queries see which keys -------------------------------------------------------------------


class Part(NamedTuple):
    """One call of attention: of queries and keys that a rank holds, numbered as they lie there.

    band: (causal, offset, left, first), as of the kernels, of these queries and keys.
    """

    queries: Range
    keys: Range
    band: Band


WHOLE: Band = False, 0, None, 0  # every query sees every key


def parts(queries: list[Range], keys: list[Range], seen: Diagonals) -> list[Part]:
    """The calls that together have every pair of a query and a key that see each other once.

    seen: query i sees key j if j - i <= high, and j - i >= low or j < first, by their positions.
    """
    if queries == keys and seen.low is None and seen.high in (None, 0):
        everything = 0, sum(stop - start for start, stop in queries)
        band = WHOLE if seen.high is None else (True, 0, None, 0)
        return [Part(everything, everything, band)] if everything[1] else []
    found, row = [], 0
    for q_start, q_stop in queries:
        column = 0
        for k_start, k_stop in keys:
            part = trimmed((q_start, q_stop), (k_start, k_stop), row, column, seen)
            found += [] if part is None else [part]
            column += k_stop - k_start
        row += q_stop - q_start
    whole = [part for part in found if part.band == WHOLE]
    return joined(whole) + [part for part in found if part.band != WHOLE]


def trimmed(queries: Range, keys: Range, row: int, column: int, seen: Diagonals) -> Part | None:
    """The queries of a range that see a key of a range, and the keys that one of them sees; they begin
    at `row` and `column` of what is held."""
    (q0, q1), (k0, k1), (high, low, first) = queries, keys, seen
    row, column = row - q0, column - k0  # of position 0
    low = None if k1 <= first else low
    i0, i1, j0, j1 = q0, q1, k0, k1
    if high is not None:
        i0, j1 = max(q0, k0 - high), min(k1, q1 + high)
    if low is not None and first <= k0:
        i1, j0 = min(q1, k1 - low), max(k0, q0 + low)
    if i0 >= i1 or j0 >= j1:
        return None
    if high is not None and j1 - 1 - i0 <= high:
        high = None
    if low is not None and j0 - (i1 - 1) >= low:
        low = None
    band = WHOLE
    if high is not None or low is not None:
        low = None if low is None else low + i0 - j0
        offset = max(low or 0, 0) if high is None else high + i0 - j0
        left = None if low is None else offset - low
        band = high is not None, offset, left, 0 if low is None else max(first - j0, 0)
    return Part((i0 + row, i1 + row), (j0 + column, j1 + column), band)


def joined(whole: list[Part]) -> list[Part]:
    """Parts side by side, and then such as are above one another, as one."""
    wide: list[Part] = []
    for part in whole:
        last = wide[-1] if wide else None
        if last and last.queries == part.queries and last.keys[1] == part.keys[0]:
            wide[-1] = last._replace(keys=(last.keys[0], part.keys[1]))
        else:
            wide.append(part)
    high: list[Part] = []
    for part in wide:
        last = high[-1] if high else None
        if last and last.keys == part.keys and last.queries[1] == part.queries[0]:
            high[-1] = last._replace(queries=(last.queries[0], part.queries[1]))
        else:
            high.append(part)
    return high


# --- public -----------------------------------------------------------------------------------------


def check_dim(operator: str, x: Tensor, dim: int) -> int:
    if not isinstance(x, Tensor):
        refuse(operator, "x", described(x), "a torch.Tensor", "Pass a tensor.", TypeError)
    takes = f"a dimension of x, {-x.ndim} to {x.ndim - 1}"
    return check_integer(operator, "dim", dim, -x.ndim, x.ndim - 1, takes, "Pass that of the tokens.")


def check_length(operator: str, argument: str, length: int, size: int) -> None:
    if size > 1 and length % (2 * size):
        refuse(
            operator,
            argument,
            length,
            f"a multiple of {2 * size}: two chunks for each of {size} ranks",
            f"Pad the sequence to {-(-length // (2 * size)) * 2 * size} tokens.",
        )


def shard(x: Tensor, dim: int, group: dist.ProcessGroup | None = None) -> Tensor:
    """This rank's tokens of a whole sequence, in the order in which ring_attention wants them.

    Rank r of n holds the chunks r and 2 n - 1 - r of 2 n (head-tail order).  Nothing travels; but with
    FLASHPROTO_CHECKED=1 in the environment all ranks have to call it, and compare x.

    Args:
        x: the whole sequence, the same on every rank: [B, S, C], [B, H, S, D], token numbers [B, S].
        dim: the dimension of the tokens, whose length is a multiple of 2 n.
        group: the ranks; None is the default group.

    Returns: x with S / n tokens; of one rank all of them.
    Raises: TypeError, ValueError: an argument does not fit; RuntimeError: there is no group.
    Source: the load balancing of torch's context parallelism and of Megatron-LM.

    Example:
        >>> tokens = torch.arange(8)[None]
        >>> distributed.shard(tokens, dim=1)  # of 2 ranks: [[0, 1, 6, 7]] and [[2, 3, 4, 5]]
        tensor([[0, 1, 2, 3, 4, 5, 6, 7]])
    """
    dim, ranks = agreed("shard", check_whole, {"x": x, "dim": dim, "group": group})
    held = ranges(ranks.rank, ranks.size, x.shape[dim] // ranks.size)
    return cut(x, held, dim)


def check_whole(x, dim, group):
    name = "shard"
    ranks, dim = group_of(name, group), check_dim(name, x, dim)
    check_plain(name, x=x)
    check_length(name, f"dimension {dim} of x", x.shape[dim], ranks.size)
    return dim, ranks


def positions(
    length: int, group: dist.ProcessGroup | None = None, *, device: torch.device | str | None = None
) -> Tensor:
    """The positions of this rank's tokens in a sequence of `length`, for rope and position embeddings.

    Args: length: of the whole sequence, a multiple of 2 n; group: the ranks; device: of the result.
    Returns: [length / n], int64, rising.  Errors as shard.

    Example:
        >>> distributed.positions(8)  # of 2 ranks: [0, 1, 6, 7] and [2, 3, 4, 5]
        tensor([0, 1, 2, 3, 4, 5, 6, 7])
    """
    name = "positions"
    ranks = group_of(name, group)
    takes, do = "an integer of 0 or more", "Pass the length of the whole sequence."
    length = check_integer(name, "length", length, 0, 2**62, takes, do)
    check_length(name, "length", length, ranks.size)
    held = ranges(ranks.rank, ranks.size, length // ranks.size)
    return torch.cat([torch.arange(start, stop, device=device) for start, stop in held])


@torch.compiler.disable(reason=NOT_TRACED)
def unshard(x: Tensor, dim: int, group: dist.ProcessGroup | None = None) -> Tensor:
    """The whole sequence from every rank's shard, on every rank: undoes shard.

    Args: x: this rank's shard, of the same shape and dtype on all, which FLASHPROTO_CHECKED=1 in the
        environment compares; dim, group: as shard.
    Returns: x with n times the tokens, in the order of the sequence.  Its gradient is that of the sum
        of all ranks' losses, summed in at least float32.
    Raises: as shard; NotImplementedError: a second derivative is asked for.

    Example:
        >>> x = torch.randn(1, 8, 16)
        >>> torch.equal(distributed.unshard(distributed.shard(x, dim=1), dim=1), x)
        True
    """
    return Unshard.apply(x, *agreed("unshard", check_shard, locals(), own=("x",)))


def check_shard(x, dim, group):
    name = "unshard"
    ranks, dim = group_of(name, group), check_dim(name, x, dim)
    check_plain(name, x=x)
    check_untransformed(name, x=x)
    check_length(name, "the whole length", x.shape[dim] * ranks.size, ranks.size)
    return dim, ranks


class Unshard(torch.autograd.Function):
    """unshard."""

    @staticmethod
    def forward(ctx, x: Tensor, dim: int, ranks: Group) -> Tensor:
        ctx.dim, ctx.ranks, ctx.length = dim, ranks, x.shape[dim]
        return in_order(ranks.all_gather(x), dim)

    @staticmethod
    def backward(ctx, gradient):
        ranks, dim = ctx.ranks, ctx.dim
        all_in_backward("unshard", ranks, gradient)
        with torch.no_grad():
            total = gradient.to(compute_dtype(gradient.dtype), copy=True).contiguous()
            dist.all_reduce(total, group=ranks.group)
            held = ranges(ranks.rank, ranks.size, ctx.length)
        return *once("unshard", [cut(total, held, dim).to(gradient.dtype)]), None, None
