"""What launches of kernels whose programs exchange partial results need; see kernels/exchange.py."""

from __future__ import annotations

import torch
from torch import Tensor

from .. import backends, configs
from .device import cdiv, multiprocessors

# How often a program looks for the others of its row, about a microsecond each, before it does their
# work.  The interpreter runs one program after another: there is nothing to wait for.
POLLS = 1 if backends.INTERPRETED else 1024


def exchange(N: int, config: configs.RowConfig, rows: int) -> tuple[int, int, int]:
    """(splits, count of words, LANES) for rows of N columns split by `config`."""
    splits = cdiv(N, config.columns)
    return splits, rows * splits, configs.power_of_two(splits)


def exchange_words(x: Tensor, M: int, N: int, config: configs.RowConfig) -> tuple[int, Tensor, int]:
    """`exchange` with the words themselves, all zero, for M rows."""
    splits, _, lanes = exchange(N, config, M)
    return splits, x.new_zeros((M, splits), dtype=torch.int64), lanes


def programs_at_once(device: torch.device, config: configs.RowConfig) -> int:
    """How many programs run at once, or clusters of programs, where each takes many rows.

    A cluster stays within one GPC, which leaves some multiprocessors over: of the 132 of an H200 12 in
    clusters of 4 or 8 and 20 in clusters of 16.
    """
    count = multiprocessors(device)
    if config.cluster > 1:
        count = max(count * 15 // 16 // config.cluster, 1)
    return count * config.programs
