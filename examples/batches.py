"""Which sequences a step trains on."""

from __future__ import annotations

from typing import Protocol, overload

import numpy as np
import torch
from errors import OptionError
from settings import Settings
from torch import Tensor


class Ids(Protocol):
    """Token ids [N], in memory (a tensor) or in files (shards.Tokens)."""

    def __len__(self) -> int: ...

    @overload
    def __getitem__(self, where: slice) -> Tensor: ...
    @overload
    def __getitem__(self, where: Tensor) -> Tensor: ...
    def __getitem__(self, where: slice | Tensor) -> Tensor:
        """int64, of the shape of the places."""


class Batches:
    """Sequences from random places of the ids, each of context + 1: the inputs, and one more for the
    last target.

    The batch_size sequences of a step are a function of the seed and the step alone.  They are dealt
    out in order: to the micro steps, and the part of a micro step to the `world` processes, or to so
    many groups of processes that share sequences.  So a step has the same sequences however many there
    are of any.

        batch = Batches(ids, settings, rank=0, world=1)(step, micro)
    """

    def __init__(self, ids: Ids, settings: Settings, rank: int = 0, world: int = 1) -> None:
        self.ids, self.settings, self.rank, self.world = ids, settings, rank, world
        parts = settings.accumulate * world
        if settings.batch_size % parts:
            n = settings.context_parallel
            many = f"{world} groups of {n} processes" if n > 1 else f"{world} processes"
            of = f"--accumulate {settings.accumulate}" + f" and {many}" * (world > 1)
            raise OptionError(
                f"--batch-size is {settings.batch_size}; with {of} "
                f"it takes a multiple of {parts}. Pass {-(-settings.batch_size // parts) * parts}"
                + (", or start another number of processes." if world > 1 else ".")
            )
        self.rows = settings.batch_size // parts

    def starts(self, step: int) -> np.ndarray:
        """Where the sequences of a step begin [batch_size], those of all processes."""
        s = self.settings
        draw = np.random.default_rng([s.seed, step])
        return draw.integers(len(self.ids) - s.context, size=s.batch_size)

    def seed(self, step: int, micro: int) -> int:
        """Of what is dropped in a micro step of this process, however often the run was stopped."""
        numbers = [self.settings.seed, step, micro, self.rank]
        return int(np.random.SeedSequence(numbers).generate_state(1, np.uint64)[0] >> 1)

    def __call__(self, step: int, micro: int) -> Tensor:
        """The sequences of this process in a micro step [rows, context + 1]."""
        first = (micro * self.world + self.rank) * self.rows
        starts = torch.from_numpy(self.starts(step)[first : first + self.rows])
        return self.ids[starts[:, None] + torch.arange(self.settings.context + 1)]
