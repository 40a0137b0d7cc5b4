"""variant.FEATURES: what its rows say is so."""

from __future__ import annotations

import inspect
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

import flashproto
from flashproto import variant
from flashproto.distributed import ring_attention
from flashproto.kernels.scores import Given
from flashproto.variant import FEATURES, FUNCTIONS, Feature, Kind, fields_on

pytest.importorskip("triton")

ROWS = {row.field: row for row in FEATURES}
DIRECTIONS = ("forward", "backward")
RUNS = [(d, field) for d in DIRECTIONS for field in fields_on("hopper", d == "backward")]


# --- Hopper's kernels ----------------------------------------------------------------------------


def code_of(*arguments: str) -> dict[tuple[str, str], list[str]]:
    """What compile_cases_features.py says, without the interpreter."""
    script = Path(__file__).with_name("compile_cases_features.py")
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    environment |= {"OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(sys.path)}
    command = [sys.executable, str(script), *arguments]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    lines = [json.loads(line) for line in done.stdout.splitlines()]
    return {(direction, field): code for direction, field, *code in lines}


@pytest.fixture(scope="module")
def code() -> dict[tuple[str, str], list[str]]:
    return code_of()


def check(code: dict[tuple[str, str], list[str]], direction: str, field: str) -> None:
    given, without = code[direction, field]
    assert given != without, f"FEATURES sends {field} to Hopper's {direction}, which has no code for it"


@pytest.mark.slow
@pytest.mark.parametrize(("direction", "field"), RUNS)
def test_hopper_has_code_for_what_it_is_sent(
    direction: str, field: str, code: dict[tuple[str, str], list[str]]
) -> None:
    assert code.keys() == set(RUNS)
    check(code, direction, field)


@pytest.fixture(scope="module")
def without_code() -> dict[tuple[str, str], list[str]]:
    return code_of("MADE_UP")


@pytest.mark.slow
@pytest.mark.parametrize("direction", DIRECTIONS)
def test_a_row_without_code_fails(
    direction: str, without_code: dict[tuple[str, str], list[str]]
) -> None:
    with pytest.raises(AssertionError, match=f"MADE_UP to Hopper's {direction}"):
        check(without_code, direction, "MADE_UP")


# --- the table -----------------------------------------------------------------------------------


def test_every_field_and_what_is_given_has_a_row() -> None:
    fields = [name for name, x in Kind.__dataclass_fields__.items() if x.init]
    assert sorted(ROWS) == sorted(fields) and len(ROWS) == len(FEATURES)
    assert variant.VARIABLES.keys() <= set(Given._fields)
    assert all(bool(r.variables) != (r.what in (variant.FLAG, variant.STATISTIC)) for r in FEATURES)


def argument_of(row: Feature, function: str) -> str:
    """By which a call asks for it; of sequences and statistics there is one for several."""
    if function == "scaled_dot_product_attention":
        of_torch = {"causal": "is_causal", "dropout_p": "dropout_p"}
        of_torch |= dict.fromkeys(
            ("masks.intervals(begin, end)", "masks.boolean(x)", "bias"), "attn_mask"
        )
        return of_torch.get(row.option, "")
    if row.what == variant.STATISTIC:
        return "return_aux"
    return "mask" if row.option.startswith("masks.") else row.option


REFUSED_BY_KIND = {
    ("attention_varlen", "INTERVALS"),
    ("attention_varlen", "TABLE"),
    ("ring_attention", "TABLE"),
}


@pytest.mark.parametrize("function", FUNCTIONS)
def test_functions_take_what_the_table_says(function: str) -> None:
    """Masks alone are told by their kinds, and not by the signature: attention_varlen takes bands, and
    ring_attention no tables."""
    of = ring_attention if function == "ring_attention" else getattr(flashproto, function)
    names = inspect.signature(of).parameters
    for row in FEATURES:
        argument = argument_of(row, function)
        there = function in row.functions
        if (function, row.field) in REFUSED_BY_KIND:
            assert "mask" in names and not there
        else:
            assert (argument in names) == there, row.option


def test_an_edited_row_is_another_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    """Triton's key has the text of a Kind, and of a configuration that has one."""
    was = Kind(SINKS=True)
    edited = [row._replace(curved=True) if row.field == "SINKS" else row for row in FEATURES]
    monkeypatch.setattr(variant, "FEATURES", edited)
    now = Kind(SINKS=True)
    assert now.CURVED and not was.CURVED and not Kind(ALIBI=True).CURVED
    assert str(now) != str(was) and now.name == was.name == "sinks" and now != was


def test_what_follows_from_the_table() -> None:
    kind = Kind(CAUSAL=True, SOFTCAP=2, ENTROPY=True)
    assert (kind.RESCALES, kind.CURVED, kind.UNHIDES) == (True, True, True)
    assert (Kind(ALIBI=True).RESCALES, Kind(ALIBI=True).CURVED) == (True, False)
    assert kind.unsupported_by("hopper") == ["entropy"] and kind.unsupported_by("triton") == []
    assert kind.unsupported_by("hopper", backward=True) == ["entropy"]
    assert Kind(FIRST=True, WINDOW=True).unsupported_by("decode") == ["first"]
    assert variant.NUMBERS["softcap"].takes == "a number from 1e-30 to 1e30, or None"
