"""How many pairs of a query and a key a mask shows, counted on the host: by an interval for each key,
or one by one where a mask has none."""

from __future__ import annotations

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
