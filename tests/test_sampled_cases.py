"""The sample of parametrised cases that run without --all."""

from __future__ import annotations

import itertools
import random
import types
from typing import Any

import sampled_cases


def cases_of(*values: list[Any]) -> list[dict[str, Any]]:
    names = [f"parameter {n}" for n in range(len(values))]
    return [dict(zip(names, case, strict=True)) for case in itertools.product(*values)]


def test_a_sample_has_all_values_and_few_cases(seed: int) -> None:
    cases = cases_of(list("abcdefgh"), [object() for _ in range(5)], [1, 2])
    chosen = sampled_cases.covering(cases, random.Random(seed))
    for name in cases[0]:
        assert {id(cases[i][name]) for i in chosen} == {id(case[name]) for case in cases}
    assert chosen == sorted(set(chosen)) and len(chosen) <= 15 < len(cases)


def test_a_seed_gives_one_sample_in_all_processes(seed: int) -> None:
    """Though objects lie at other places there."""
    first, second = ([object() for _ in range(4)] for _ in range(2))
    samples = [
        sampled_cases.covering(cases_of(objects, list(range(9))), random.Random(seed))
        for objects in (first, second)
    ]
    assert samples[0] == samples[1]
    cases = cases_of(first, list(range(9)))
    others = {tuple(sampled_cases.covering(cases, random.Random(n))) for n in range(9)}
    assert len(others) > 1


def test_each_case_is_in_some_sample() -> None:
    cases = cases_of([1, 2, 3], ["a", "b", "c"])
    met = {i for n in range(60) for i in sampled_cases.covering(cases, random.Random(n))}
    assert met == set(range(9))


class Item:
    """As far as left_out looks at one."""

    def __init__(self, n: int, **marks: tuple[int, ...]) -> None:
        self.nodeid, self.marks = f"test_it[{n}]", marks
        self.callspec = types.SimpleNamespace(params={"n": n})

    def get_closest_marker(self, name: str) -> Any:
        return types.SimpleNamespace(args=self.marks[name]) if name in self.marks else None


def test_few_are_few_without_slow_tests_alone() -> None:
    items: list[Any] = [Item(n, few=(3,)) for n in range(9)]
    run = [set(items) - sampled_cases.left_out(items, str(n), False) for n in range(20)]
    assert {len(x) for x in run} == {3} and set().union(*run) == set(items)
    assert sampled_cases.left_out(items, "0", True) == set()
    items = [Item(n, few=(3,), whole=()) for n in range(9)]
    assert sampled_cases.left_out(items, "0", False) == set()
