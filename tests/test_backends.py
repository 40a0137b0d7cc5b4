"""The choice of a backend: automatic, by name, by default, and why one cannot be had."""

from __future__ import annotations

import logging
import os
import subprocess
import sys
from collections.abc import Iterator

import pytest
import torch

import flashproto
from flashproto import backends

CPU = [torch.empty(0)]


@pytest.fixture(autouse=True)
def automatic_choice() -> Iterator[None]:
    before = backends.get_default()
    backends.set_default(None)
    yield
    backends.set_default(before)


def nothing_against(backend: str) -> list[str]:
    return []


def test_automatic_choice_takes_the_first_that_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(backends, "INTERPRETED", False)
    assert backends.choose("op", None, CPU, nothing_against) == "torch"
    only_reference = lambda b: [] if b == "reference" else ["no"]  # noqa: E731
    assert backends.choose("op", None, CPU, only_reference) == "reference"


@pytest.mark.skipif(not backends.HAS_TRITON, reason="triton is not installed")
def test_interpreter_makes_triton_run_on_the_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(backends, "INTERPRETED", True)
    assert backends.choose("op", None, CPU, nothing_against) == "triton"


def test_request_by_name_never_falls_back(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(backends, "INTERPRETED", False)
    with pytest.raises(flashproto.BackendError) as caught:
        backends.choose("attention", "triton", CPU, lambda b: ["reason one", "reason two"])
    text = str(caught.value)
    assert text.startswith("attention: backend 'triton' cannot run this call")
    assert "CPU" in text or "not installed" in text
    assert "reason one" in text
    assert "reason two" in text
    assert "impl=None" in text


def test_request_by_name_through_public_functions() -> None:
    x = torch.randn(3, 8)
    q = torch.randn(1, 1, 4, 8)
    for call in (
        lambda: flashproto.softmax(x, impl="hopper"),
        lambda: flashproto.rms_norm(x, 8, impl="hopper"),
        lambda: flashproto.attention(q, q, q, impl="hopper"),
    ):
        with pytest.raises(flashproto.BackendError, match="hopper"):
            call()
    with pytest.raises(flashproto.BackendError, match="float64"):
        flashproto.softmax(x.double(), impl="triton")


@pytest.mark.parametrize("impl", ["cuda", "", "Triton"])
def test_unknown_name_is_refused(impl: str) -> None:
    with pytest.raises(ValueError, match="it takes one of 'hopper'"):
        flashproto.softmax(torch.randn(3), impl=impl)
    with pytest.raises(ValueError, match="it takes one of 'hopper'"):
        backends.set_default(impl)


def test_default_applies_to_calls_that_name_none() -> None:
    x = torch.randn(3, 8)
    backends.set_default("reference")
    assert backends.get_default() == "reference"
    assert backends.choose("op", None, CPU, nothing_against) == "reference"
    assert backends.choose("op", "torch", CPU, nothing_against) == "torch"
    backends.set_default("hopper")
    with pytest.raises(flashproto.BackendError, match="hopper"):
        flashproto.softmax(x)


def test_environment_variable_sets_the_default() -> None:
    code = "import flashproto.backends as b; print(b.get_default())"
    environment = os.environ | {
        "FLASHPROTO_IMPL": "reference",
        "PYTHONPATH": os.pathsep.join(sys.path),
    }
    done = subprocess.run(
        [sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True
    )
    assert done.stdout.strip() == "reference"


def test_choice_is_logged_once(caplog: pytest.LogCaptureFixture) -> None:
    backends._logged.clear()
    with caplog.at_level(logging.INFO, logger="flashproto"):
        for _ in range(3):
            backends.choose("op", None, CPU, lambda b: [] if b == "torch" else ["no"])
    assert [r.getMessage() for r in caplog.records] == [
        "op runs on backend 'torch' for cpu tensors (chosen automatically)"
    ]


def test_public_functions_without_triton() -> None:
    code = (
        "import sys; sys.modules['triton'] = None; import torch, flashproto; "
        "x = torch.randn(1, 2, 8, 16, requires_grad=True); w = torch.ones(16); "
        "calls = [lambda: flashproto.attention(x, x, x, causal=True), lambda: flashproto.softmax(x), "
        "lambda: flashproto.layer_norm(x, 16, w, w), lambda: flashproto.attention(*[x.half()] * 3)]; "
        "[call().sum().backward() for call in calls for _ in range(3)]"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
