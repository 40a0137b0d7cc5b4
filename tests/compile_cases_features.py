"""Hopper's kernels with and without each option of attention that FEATURES sends there.

    python tests/compile_cases_features.py [MADE_UP]

prints a line of JSON for each option and direction: forward or backward, the field of Kind, and digests
of the kernel as Triton has it before LLVM, with the option and without it.  All else is the same: what
the kernel is given, the configuration, and what its Kind says of RESCALES, CURVED and UNHIDES.  With a
second name it adds that field to Kind, and a row to FEATURES that says Hopper's kernels have it.
"""

from __future__ import annotations

import copy
import json
import os
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import make_dataclass, replace
from typing import Any

import compile_cases_hopper as hopper
from compile_case import TYPES, Case
from kernel_instructions import representation

from flashproto import configs, variant
from flashproto.kernels.scores import Given
from flashproto.variant import Kind

HEAD_DIM = 64
# Everything there is, so that no option shows in the kernel's arguments alone.
GIVEN = Given(**TYPES)


def kinds_of(field: str, kind: type[Kind]) -> tuple[Kind, Kind]:
    """With and without a field, beside another one that takes both from the plain kinds' ways."""
    other = "SOFTCAP" if field == "WINDOW" else "WINDOW"
    given = kind(**{other: True, field: True})
    without = copy.copy(given)
    object.__setattr__(without, field, False)
    return given, without


def cases(backward: bool, kind: type[Kind] = Kind) -> Iterator[tuple[str, Case, Case]]:
    """(field, with it, without it) of each option that runs there."""
    for field in variant.fields_on("hopper", backward):
        given, without = kinds_of(field, kind)
        if backward:
            config: Any = configs.attention_backward_hopper(HEAD_DIM, 4096, given)
            case_of = hopper.backward_case
        else:
            config = configs.attention_forward_hopper(HEAD_DIM, 4096, given)
            case_of = hopper.forward_case
        made = []
        for one in (given, without):
            case = case_of("bf16", replace(config, KIND=one))
            constexprs = {n: x for n, x in case.constexprs.items() if isinstance(n, str)}
            signature = case.signature | {"given": GIVEN}
            made.append(replace(case, signature=signature, constexprs=constexprs))
        yield field, *made


def made_up(field: str) -> type[Kind]:
    """A Kind with one field more, of which FEATURES says that it is everywhere and does everything."""
    variant.FEATURES += (
        variant.Feature(field, field.lower(), rescales=True, curved=True, unhides=True),
    )
    return make_dataclass("MadeUp", [(field, bool, False)], bases=(Kind,), frozen=True)


def main() -> None:
    kind = made_up(sys.argv[1]) if len(sys.argv) > 1 else Kind
    code: dict[str, str] = {}  # of each case once: many options have the same one without them
    with tempfile.TemporaryDirectory() as cache:
        os.environ |= {"TRITON_CACHE_DIR": cache, "MLIR_DISABLE_MULTITHREADING": "1"}
        for backward in (False, True):
            for field, *pair in cases(backward, kind):
                if len(sys.argv) > 1 and field != sys.argv[1]:
                    continue
                for case in pair:
                    if repr(case) not in code:
                        code[repr(case)] = representation(case, 90)[0]
                found = [code[repr(case)] for case in pair]
                print(json.dumps(("backward" if backward else "forward", field, *found)), flush=True)


if __name__ == "__main__":
    main()
