"""What launches of kernels whose programs exchange partial results need; see kernels/exchange.py."""

from __future__ import annotations

from typing import Any

import torch

from .. import backends, configs
from .device import cdiv, multiprocessors
from .recipe import Exchange, Recipe

# How often a program looks for the others of its row, about a microsecond each, before it does their
# work.  The interpreter runs one program after another: there is nothing to wait for.
POLLS = 1 if backends.INTERPRETED else 1024


def exchange(N: int, config: configs.RowConfig, rows: int) -> tuple[int, int, int]:
    """(splits, count of words, LANES) for rows of N columns split by `config`."""
    splits = cdiv(N, config.columns)
    return splits, rows * splits, configs.power_of_two(splits)


def launch_splits(
    recipe: Recipe,
    kernel: Any,
    config: configs.RowConfig,
    tensors: tuple[Any, ...],
    numbers: tuple[Any, ...],
    clears: bool = False,
) -> None:
    """The launch of a kernel for rows that `config` splits, which takes `tensors`, the first of them
    [M, N], words, if it `clears` also those of the launch before, and `numbers`."""
    M, N = tensors[0].shape
    splits, count, lanes = exchange(N, config, M)
    words = (Exchange(count), Exchange(count, used=True)) if clears else (Exchange(count),)
    recipe.launch(
        kernel, M * splits, *tensors, *words, *numbers,
        C=config.columns, LANES=lanes, POLLS=POLLS,
        num_warps=config.num_warps, maxnreg=config.max_registers,
    )  # fmt: skip


def programs_at_once(device: torch.device, config: configs.RowConfig) -> int:
    """How many programs run at once, or clusters of programs, where each takes many rows.

    A cluster stays within one GPC, which leaves some multiprocessors over: of the 132 of an H200 12 in
    clusters of 4 or 8 and 20 in clusters of 16.
    """
    count = multiprocessors(device)
    if config.cluster > 1:
        count = max(count * 15 // 16 // config.cluster, 1)
    return count * config.programs
