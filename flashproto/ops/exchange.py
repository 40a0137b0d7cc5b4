"""What launches of kernels whose programs exchange partial results need; see kernels/exchange.py."""

from __future__ import annotations

import torch
from torch import Tensor

from .. import backends, configs
from .launch import cdiv

# How often a program looks for the others of its row, about a microsecond each, before it does their
# work.  The interpreter runs one program after another: there is nothing to wait for.
POLLS = 1 if backends.INTERPRETED else 1024


def exchange(x: Tensor, M: int, N: int, config: configs.RowConfig) -> tuple[int, Tensor, int]:
    """(splits, words, LANES) for M rows of N columns split by `config`; words are zero."""
    splits = cdiv(N, config.columns)
    words = x.new_zeros((M, splits), dtype=torch.int64)
    return splits, words, configs.power_of_two(splits)
