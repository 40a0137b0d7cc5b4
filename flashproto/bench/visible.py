"""What a mask shows, on the host: how many pairs of a query and a key, counted by an interval for each
key, or one by one where a mask has none; and intervals of keys for each query."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from .. import masks
from ..mask_values import TILE

ROWS = 512  # of queries that are looked at at once


def queries_of_keys(mask: masks.Mask, Sq: int, Sk: int) -> tuple[Tensor, Tensor]:
    """(begin, end), int64 [Sk] or [B | 1, H | 1, Sk]: the queries begin[j] ... end[j] - 1 see key j."""
    high, low, first = mask.diagonals(Sq, Sk)
    j = torch.arange(Sk)
    begin, end = torch.zeros_like(j), torch.full_like(j, Sq)
    if high is not None:
        begin = torch.maximum(begin, j - high)
    if low is not None:
        end = torch.where(j < first, end, torch.minimum(end, j - low + 1))
    found = mask.intervals(Sq, Sk)
    if found is not None:
        begin, end = torch.maximum(begin, found[0].long()), torch.minimum(end, found[1].long())
    return begin, end


def visible_pairs(mask: masks.Mask, B: int, H: int, Sq: int, Sk: int) -> int:
    """How many pairs of a query and a key that it sees there are, in B x H heads."""
    if mask.rule is not None:
        parts = (mask.visible(Sq, Sk, range(i, min(i + ROWS, Sq))) for i in range(0, Sq, ROWS))
        return sum(int(seen.sum()) * (B * H // seen.shape[:2].numel()) for seen in parts)
    begin, end = queries_of_keys(mask, Sq, Sk)
    return int((end - begin).clamp(min=0).expand(B, H, Sk).sum())


def visited_pairs(mask: masks.Mask, B: int, H: int, Sq: int, Sk: int, tile: int = TILE) -> int:
    """How many pairs, hidden ones too, there are in tiles of tile x tile with a visible one."""
    if mask.rule is not None:
        return round(mask.share(Sq, Sk, tile) * B * H * -(-Sq // tile) * -(-Sk // tile)) * tile**2
    begin, end = (x.expand(B, H, Sk).reshape(-1, Sk) for x in queries_of_keys(mask, Sq, Sk))
    tiles_q, tiles_k = -(-Sq // tile), -(-Sk // tile)
    key_tile = (torch.arange(Sk) // tile).expand_as(begin)
    row = torch.arange(begin.shape[0])[:, None].expand_as(begin)
    # By how much more keys of a key tile are seen by one query tile than by that before it.
    more = torch.zeros(begin.shape[0], tiles_k, tiles_q + 1, dtype=torch.int32)
    seen = (end > begin).int()
    nowhere = torch.full_like(begin, tiles_q)
    for edge, sign in ((begin // tile, 1), ((end - 1) // tile + 1, -1)):
        at = torch.where(seen.bool(), edge, nowhere)
        more.index_put_((row, key_tile, at), sign * seen, accumulate=True)
    return int((more.cumsum(-1) > 0).sum()) * tile**2


def keys_of_queries(mask: masks.Mask, B: int, Sq: int, Sk: int) -> Tensor:
    """int32 [1, n, B * Sq], n odd, of a mask that all heads share: what a query sees are the keys of
    [0, F[0]), [F[1], F[2]), [F[3], F[4]) ...; the intervals that it has no use for are empty, at Sk."""
    rows, places, keys, most = [], [], [], 1
    for i in range(0, Sq, ROWS):
        seen = mask.visible(Sq, Sk, range(i, min(i + ROWS, Sq)))
        seen = seen.expand(B, 1, -1, Sk)[:, 0]
        # Between a visible key in front and a hidden one behind, changes are the ends in their order.
        edge = seen.new_ones(B, seen.shape[1], 1)
        changes = torch.cat([edge, seen], -1) != torch.cat([seen, ~edge], -1)
        count = changes.sum(-1).flatten()
        b, row, key = changes.nonzero(as_tuple=True)
        rows.append(b * Sq + i + row)
        places.append(torch.arange(len(key)) - (count.cumsum(0) - count).repeat_interleave(count))
        keys.append(key.int())
        most = max(most, int(count.max()))
    made = torch.full((1, most, B * Sq), Sk, dtype=torch.int32)
    made[0, torch.cat(places), torch.cat(rows)] = torch.cat(keys)
    return made


def keys_before(lengths: Sequence[int]) -> Tensor:
    """The same of sequences side by side whose masks are causal, with keys counted in each."""
    return torch.cat([torch.arange(1, n + 1, dtype=torch.int32) for n in lengths])[None, None]
