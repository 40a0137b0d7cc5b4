"""Lets kernels/schedule.py, and `visible` of kernels/scores.py, run as Python, for tests of them."""

from __future__ import annotations

import random
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from flashproto.kernels import schedule, scores
from flashproto.reference.mask_table import TILE


class Pointer:
    """Into a vector of integers."""

    def __init__(self, memory: Tensor, at: Any = 0) -> None:
        self.memory, self.at = memory, torch.as_tensor(at)

    def __add__(self, more: Any) -> Pointer:
        return Pointer(self.memory, self.at + more)

    def __sub__(self, less: Any) -> Pointer:
        return Pointer(self.memory, self.at - less)


def load(pointer: Pointer, mask: Any = True, other: Any = 0) -> Tensor:
    at, mask = torch.broadcast_tensors(pointer.at, torch.as_tensor(mask))
    assert ((at >= 0) & (at < pointer.memory.numel()) | ~mask).all(), "past the end"
    memory = pointer.memory if pointer.memory.numel() else pointer.memory.new_zeros(1)
    loaded = memory[torch.where(mask, at, 0)]
    return torch.where(mask, loaded, torch.as_tensor(other, dtype=loaded.dtype))


def store(pointer: Pointer, value: Any, mask: Any = True) -> None:
    at, value, mask = torch.broadcast_tensors(pointer.at, *map(torch.as_tensor, (value, mask)))
    pointer.memory[at[mask]] = value[mask].to(pointer.memory.dtype)


def where(condition: Any, a: Any, b: Any) -> Tensor:
    return torch.where(*map(torch.as_tensor, (condition, a, b)))


def minimum(a: Any, b: Any) -> Any:
    return torch.minimum(*map(torch.as_tensor, (a, b))) if getattr(a, "ndim", 0) else min(a, b)


LANGUAGE = {
    "minimum": minimum,
    "maximum": max,
    "cdiv": lambda a, b: -(-a // b),
    "arange": lambda start, stop: torch.arange(start, int(stop)),
    "where": where,
    "min": lambda x, axis: x.min(axis).values,
    "max": lambda x, axis: x.max(axis).values,
    "sum": lambda x, axis: x.sum(axis),
    "static_range": range,
    "load": load,
    "store": store,
    "int32": torch.int32,
    "int64": torch.int64,
}
FUNCTIONS = (
    "clamp",
    "first_tiles",
    "visits",
    "next_run",
    "queries_of_keys",
    "listed_queries",
    "query_tile_order",
    "sequence_of",
    "tokens_of",
)


def blocks(generator: random.Random, shape: tuple[int, ...], device: str = "cpu") -> Tensor:
    """A boolean tensor with tiles of all kinds."""
    seed = torch.Generator().manual_seed(generator.randrange(2**31))
    coarse = [*shape[:-2], -(-shape[-2] // TILE), -(-shape[-1] // TILE)]
    density = torch.randint(0, 4, coarse, generator=seed) / 2 - 0.25  # below 0, above 1 or between
    density = density.repeat_interleave(TILE, -2).repeat_interleave(TILE, -1)
    density = density[..., : shape[-2], : shape[-1]]
    return (torch.rand(shape, generator=seed) < density).to(device)


def ranges_on_the_host(monkeypatch: pytest.MonkeyPatch, **others: Any) -> None:
    """Let the functions of a tile's range take plain numbers, as `schedule.key_ranges.fn`.

    others: more of triton.language, program_id say.
    """
    language = SimpleNamespace(**LANGUAGE | others)
    monkeypatch.setattr(schedule, "tl", language)
    monkeypatch.setattr(scores, "tl", language)
    for name in FUNCTIONS:
        monkeypatch.setattr(schedule, name, getattr(schedule, name).fn)
    monkeypatch.setattr(schedule, "counts", scores.counts.fn)
    monkeypatch.setattr(schedule, "LOOKED_AT", 4)
    for module in (schedule, scores):
        monkeypatch.setattr(module, "TILE", scores.TILE.value)
    monkeypatch.setattr(schedule, "NEVER", schedule.NEVER.value)
