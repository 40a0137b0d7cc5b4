"""Which cases of parametrised tests run without --all: of each test so many that each value of each of
its parameters occurs, drawn by the run's seed.  Those for a GPU are drawn apart from the others, and
all run of a test marked whole.  Of one marked few(n) at most n of these run without --slow."""

from __future__ import annotations

import random
from collections import defaultdict
from collections.abc import Iterable
from typing import Any

import pytest

FEW = 4  # cases of a test that all run


def covering(cases: list[dict[str, Any]], generator: random.Random) -> list[int]:
    """Numbers of cases that have all the values that all cases have: {parameter: value}.

    Values are told apart as objects, in whose place stands the first case that has them: processes then
    choose alike, whatever their memory.
    """
    first: dict[tuple[str, int], int] = {}
    of_case = [
        {(name, first.setdefault((name, id(value)), i)) for name, value in case.items()}
        for i, case in enumerate(cases)
    ]
    order = list(range(len(cases)))
    generator.shuffle(order)
    unseen, chosen = set().union(*of_case), []
    while unseen:
        chosen.append(max(order, key=lambda i: len(of_case[i] & unseen)))
        unseen -= of_case[chosen[-1]]
    return sorted(chosen)


def left_out(items: Iterable[pytest.Item], seed: str, slow: bool) -> set[pytest.Item]:
    """Those that do not run.  slow: whether slow tests do."""
    tests: dict[tuple[str, bool], list[Any]] = defaultdict(list)
    for item in items:
        if hasattr(item, "callspec") and not item.get_closest_marker("whole"):
            needs_gpu = item.get_closest_marker("gpu") is not None
            tests[item.nodeid.partition("[")[0], needs_gpu].append(item)
    out: set[pytest.Item] = set()
    for (name, _), cases in tests.items():
        generator = random.Random(seed + name)
        chosen = list(range(len(cases)))
        if len(cases) > FEW:
            chosen = covering([x.callspec.params for x in cases], generator)
        few = None if slow else cases[0].get_closest_marker("few")
        if few is not None and len(chosen) > few.args[0]:
            chosen = generator.sample(chosen, few.args[0])
        out.update(x for i, x in enumerate(cases) if i not in chosen)
    return out
