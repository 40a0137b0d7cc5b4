"""Sets of Kinds for tests that cannot take all: one in which every two fields have all their values
together, and a sample of the others."""

from __future__ import annotations

import functools
import itertools
import os
import random
from collections.abc import Sequence
from typing import Any

from flashproto.variant import Kind

# Of Kind, in its order: what a kind is made of.
FIELDS = tuple(name for name, x in Kind.__dataclass_fields__.items() if x.init)
Pairs = frozenset[tuple[tuple[str, bool], tuple[str, bool]]]


@functools.cache
def kinds(fields: tuple[str, ...], place: str = "triton") -> tuple[Kind, ...]:
    """All that calls can have, of these fields, which kernels of a place have all."""
    found = []
    for values in itertools.product((False, True), repeat=len(fields)):
        on: dict[str, Any] = {name: True for name, v in zip(fields, values, strict=True) if v}
        if "SOFTCAP" in on:
            on["SOFTCAP"] = 1
        kind = Kind(**on)
        # The first keys are those of a window; sequences are documents already, and of any lengths.
        if (
            kind.WINDOW >= kind.FIRST
            and not ((kind.INTERVALS or kind.TABLE or kind.BIAS or kind.SCORE_MOD) and kind.VARLEN)
            and not kind.unsupported_by(place)
        ):
            found.append(kind)
    return tuple(found)


def pairs(kind: Kind, fields: tuple[str, ...]) -> Pairs:
    """Of every two fields, whether they are on."""
    return frozenset(itertools.combinations(((name, bool(getattr(kind, name))) for name in fields), 2))


@functools.cache
def covering(
    fields: tuple[str, ...], given: tuple[Kind, ...] = (), place: str = "triton"
) -> tuple[Kind, ...]:
    """What joins the given kinds so that together they have all pairs that any has; few, not fewest."""
    every = kinds(fields, place)
    of_kind = {kind: pairs(kind, fields) for kind in every}
    left = set().union(*of_kind.values()).difference(*(pairs(kind, fields) for kind in given))
    chosen: list[Kind] = []
    while left:
        best = max(every, key=lambda kind: len(left & of_kind[kind]))
        chosen.append(best)
        left -= of_kind[best]
    return tuple(chosen)


def seed() -> str:
    """The run's, which pytest prints."""
    return os.environ.get("FLASHPROTO_TEST_SEED", "0")


def sample(
    fields: tuple[str, ...], without: Sequence[Kind], generator: random.Random, place: str = "triton"
) -> Kind:
    """One of the others, neither causal nor full alone."""
    return generator.choice([x for x in kinds(fields, place) if x not in without and not x.PLAIN])
