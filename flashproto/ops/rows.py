"""Tensors as matrices of rows, which is how the kernels of norms and softmax see them; and launches of
kernels that split a row over programs, which exchange partial results (kernels/exchange.py)."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from torch import Tensor

from .. import backends, configs
from .device import cdiv
from .recipe import Exchange, New, Recipe

# How often a program polls for the others of its row, about a microsecond each, before it does their
# work itself.  The interpreter runs one program after another, so there is nothing to wait for.
POLLS = 1 if backends.INTERPRETED else 1024


def as_rows(x: Tensor, ndim: int = 1) -> Tensor:
    """x [..., *trailing] as [M, N], where N is the product of the last `ndim` dimensions: a view with
    unit column stride where x allows it, else a contiguous copy."""
    if x.ndim == 2 and ndim == 1 and x.stride()[1] == 1:
        return x
    M = math.prod(x.shape[: x.ndim - ndim])
    N = math.prod(x.shape[x.ndim - ndim :])
    rows = x.reshape(M, N)
    return rows if N <= 1 or rows.stride(1) == 1 else rows.contiguous()


def contiguous(x: Any) -> Any:
    """x, or a contiguous copy; None for None."""
    return None if x is None else x.contiguous()


def needed_like(tensors: Sequence[Any], needs: Sequence[bool]) -> list[New | None]:
    """Memory for the gradients of those tensors that are given and need one."""
    return [
        New.contiguous(x.shape, x.dtype, x.device) if x is not None and need else None
        for x, need in zip(tensors, needs, strict=True)
    ]


def tile_of(config: configs.RowConfig) -> dict[str, Any]:
    """What all kernels of rows take by name."""
    return {"C": config.columns, "num_warps": config.num_warps, "maxnreg": config.max_registers}


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
    """Launch a kernel for rows that `config` splits.  It takes `tensors`, the first of them [M, N],
    then words, with `clears` also those of the launch before, then `numbers`."""
    M, N = tensors[0].shape
    splits, count, lanes = exchange(N, config, M)
    words = (Exchange(count), Exchange(count, used=True)) if clears else (Exchange(count),)
    options = {"LANES": lanes, "POLLS": POLLS, **tile_of(config)}
    recipe.launch(kernel, M * splits, *tensors, *words, *numbers, **options)
