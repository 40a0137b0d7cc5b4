"""What calls of attention's variants compile: nothing for other values in tensors of masks, lengths of
sequences, sinks and slopes; how long the first one takes."""

from __future__ import annotations

import functools
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from flashproto import backends
from flashproto.bench import first_calls

SCRIPT = Path(__file__).with_name("compile_keys.py")
LENGTHS = {"Sq", "Sk"}


@functools.cache
def compiled() -> dict[str, dict[str, list[list[tuple[str, list[str]]]]]]:
    """By backend, see `compiled` of compile_keys.py."""
    path = os.pathsep.join(sys.path)
    done = subprocess.run(
        [sys.executable, str(SCRIPT)],
        env=os.environ | {"PYTHONPATH": path, "TRITON_INTERPRET": "0", "CUDA_VISIBLE_DEVICES": ""},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    found: dict[str, dict[str, Any]] = json.loads(done.stdout.splitlines()[-1])
    assert all(set(by_name) == set(first_calls.NAMES) for by_name in found.values())
    return found


@pytest.mark.slow
@pytest.mark.parametrize("name", first_calls.NAMES)
@pytest.mark.parametrize("impl", ["hopper", "triton"])
def test_kernels_are_compiled_for_no_value_and_no_length(impl: str, name: str) -> None:
    """By the launches' arguments, without a GPU.  Portable kernels look at whether lengths are
    multiples of 16: those that are not have a second kernel."""
    first, *later = compiled()[impl][name]
    assert {kernel for kernel, _ in first} >= {"attention_forward_kernel"}
    main = "attention_backward_kernel" if impl == "hopper" else "attention_backward_keys_kernel"
    assert {main, "attention_backward_keys_kernel"} & {kernel for kernel, _ in first}
    for step, what in zip(later, first_calls.CHANGES, strict=True):
        if what == "values" or name in first_calls.VALUES_ALONE:
            assert step == []
    assert all(set(parameters) <= LENGTHS for step in later for _, parameters in step)
    assert later[1] == [], "both lengths are multiples of 16"
    assert later[3] == [], "neither length is"
    if impl == "hopper":
        assert "attention_forward_kernel" not in {kernel for kernel, _ in later[2]}


def test_the_keys_are_triton_s() -> None:
    """A number that is 1 or a multiple of 16 is another kernel, unless the kernel says that it looks at
    none; in a tuple every number is looked at."""
    from compile_keys import key_of

    assert len({key_of(n, True, True) for n in (1, 16, 17)}) == 3
    assert len({key_of(n, False, False) for n in (1, 16, 17)}) == 1
    assert len({key_of((n, 3), False, False) for n in (1, 16, 17)}) == 3
    assert len({key_of(n, False, False) for n in (17, 1 << 40)}) == 2


# --- on a GPU -------------------------------------------------------------------------------------


@functools.cache
def measured(impl: str) -> dict[str, dict[str, Any]]:
    """The figures of every variant, some measured at once."""
    at_once = max(1, (os.cpu_count() or 1) // 4)
    found = first_calls.measure([impl], torch.device("cuda"), at_once)
    return {figures["variant"]: figures for figures in found}


@pytest.mark.gpu
@pytest.mark.slow
@pytest.mark.parametrize("name", first_calls.NAMES)
@pytest.mark.parametrize("impl", ["hopper", "triton"])
def test_first_calls(impl: str, name: str) -> None:
    against = backends.device_reasons(impl, torch.device("cuda"))
    if against:
        pytest.skip("; ".join(against))
    found = measured(impl)[name]
    assert "error" not in found, found
    assert found["compiled"] and found["anew"]["values"] == []
    for_lengths = {kernel for step in compiled()[impl][name][1:] for kernel, _ in step}
    assert set(found["anew"]["lengths"]) <= for_lengths
    if int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", "1")) > 1:
        return  # others compile on the same cores: seconds are those of a run without -n
    for which, most in first_calls.LIMITS.items():
        assert found[which] <= most, found
