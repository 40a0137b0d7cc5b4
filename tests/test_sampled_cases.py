"""The sample of parametrised cases that run without --all."""

from __future__ import annotations

import itertools
import random
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
