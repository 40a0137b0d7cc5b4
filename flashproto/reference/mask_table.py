"""Any mask as bits, 32 keys in a word, and as a table of tiles that says which of them take no look.

Legend: seen boolean [B | 1, H | 1, Sq, Sk], True where a query sees a key; of TILE queries by TILE keys
there are Tq x Tk tiles, the last ones with pairs that do not exist, which nobody sees.
bits int32 [B | 1, H | 1, TILE Tq, 4 Tk]: bit n of word w is key 32 w + n.
table int8 [B | 1, H | 1, Tq, Tk]: 0 for a tile that is hidden, 2 for one that is seen whole, else 1.
"""

from __future__ import annotations

import torch
from torch import Tensor

TILE = 128
WORD = 32


def packed(seen: Tensor) -> tuple[Tensor, Tensor]:
    """bits and table of `seen`."""
    Sq, Sk = seen.shape[-2:]
    padded = torch.nn.functional.pad(seen, (0, -Sk % TILE, 0, -Sq % TILE))
    place = torch.arange(WORD, dtype=torch.int32, device=seen.device)
    bits = (padded.unflatten(-1, (-1, WORD)).int() << place).sum(-1, dtype=torch.int32)
    count = padded.unflatten(-1, (-1, TILE)).unflatten(-3, (-1, TILE)).sum((-3, -1))
    queries, keys = (
        (S - torch.arange(0, S, TILE, device=seen.device)).clamp_max(TILE) for S in (Sq, Sk)
    )
    whole = count == queries[:, None] * keys
    return bits, ((count > 0).to(torch.int8) + (whole & (count > 0)).to(torch.int8))


def unpacked(bits: Tensor, Sq: int, Sk: int) -> Tensor:
    """What `bits` are of, [B | 1, H | 1, Sq, Sk]."""
    place = torch.arange(WORD, dtype=torch.int32, device=bits.device)
    return ((bits[..., :Sq, :, None] >> place) & 1).bool().flatten(-2)[..., :Sk]
