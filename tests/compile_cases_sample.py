"""Kinds of attention that no other compile case has: other ones in each run, by its seed."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import replace

import compile_cases_attention as portable
import compile_cases_hopper as hopper
from compile_case import Case
from kinds import sample, seed

STACK = 2048  # for any kind; what is compiled in every run has tighter budgets


def sample_cases(arch: int) -> Iterator[Case]:
    generator = random.Random(f"{seed()} {arch}")
    kind = sample(portable.FIELDS, portable.COVERING, generator)
    cases = [*portable.variant_cases(arch, [(kind, generator.choice(portable.SHAPES))])]
    if arch == 90:
        kind = sample(hopper.FORWARD, [kind for _, kind in hopper.VARIANTS], generator, "hopper")
        cases += hopper.variant_cases([(generator.choice(hopper.HEAD_DIMS), kind)])
    for case in cases:
        yield replace(case, max_stack=STACK)
