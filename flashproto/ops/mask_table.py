"""Any mask as bits and a table of tiles: what kernels/mask_table.py makes of a boolean tensor."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ..kernels.mask_table import mask_table_kernel
from .call import steps
from .recipe import Recipe


def fill(seen: Tensor, bits: Tensor, table: Tensor) -> None:
    """bits and table of seen [batch, heads, Sq, Sk], boolean, of any strides.

    bits and table: see reference/mask_table.py; parts of larger ones too."""
    steps(_fill, [bytes_of(seen), bits, table], (seen.shape[3],))


def bytes_of(seen: Tensor) -> Tensor:
    """As words of four bytes where these lie behind each other, else as bytes."""
    starts = (seen.storage_offset(), seen.shape[3], *seen.stride()[:3])
    words = seen.stride(3) == 1 and not any(n % 4 for n in starts)
    return seen.view(torch.int32 if words else torch.uint8)


def _fill(recipe: Recipe, operands: list[Any], Sk: int) -> None:
    seen, bits, table = operands
    _, heads, Sq, _ = seen.shape
    recipe.launch(
        mask_table_kernel,
        table.numel(),
        seen,
        bits,
        table,
        *seen.stride(),
        *bits.stride()[:3],
        *table.stride()[:3],
        heads,
        Sq,
        Sk,
        WORDS=seen.dtype == torch.int32,
        num_warps=4 if seen.dtype == torch.int32 else 8,
    )
