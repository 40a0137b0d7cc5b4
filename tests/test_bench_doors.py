"""python -m flashproto.bench doors, with a tiny model on a CPU."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

pytest.importorskip("transformers", reason="transformers is not installed")

from flashproto import backends
from flashproto.bench import __main__ as bench
from flashproto.bench import doors, workers

SIZES = ["--tiny", "--tokens", "32", "--batch", "1", "--prompts", "2", "--prompt", "5", "--new", "4"]


@pytest.fixture(autouse=True)
def by_torch() -> Iterator[None]:
    before = backends.get_default()
    backends.set_default("torch")  # and not by the interpreter
    yield
    backends.set_default(before)


@pytest.fixture(autouse=True)
def on_a_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doors, "device_of_this_machine", lambda: torch.device("cpu"))


@pytest.fixture
def here(monkeypatch: pytest.MonkeyPatch) -> None:
    """Workers run in this process."""

    ordinary = subprocess.run

    def run(command: Sequence[str], **options: Any) -> Any:
        if list(command[:4]) != [sys.executable, "-m", "flashproto.bench", "doors"]:
            return ordinary(command, **options)
        if "liger" in command[-1]:
            raise subprocess.TimeoutExpired(command, options["timeout"])
        part, contender, batch = json.loads(command[-1])
        given = doors.parse(command[4:-2])
        made = {
            "intervals": lambda: doors.intervals(given),
            "train": lambda: doors.train(contender, given),
            "generate": lambda: doors.generate(contender, batch, given),
        }[part]()
        return SimpleNamespace(returncode=0, stdout=f"a word before\n{json.dumps(made)}\n", stderr="")

    monkeypatch.setattr(workers.subprocess, "run", run)


@pytest.mark.slow
@pytest.mark.usefixtures("here")
def test_a_tiny_model_is_measured(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    chosen = ["--contenders", "sdpa,flashproto Cache,liger", "--seconds", "7"]
    bench.main(["doors", *SIZES, *chosen, "--out", str(tmp_path)])
    parts = json.loads((tmp_path / "doors.json").read_text())["parts"]
    assert set(parts["intervals"]) == {f"D{D} {x}" for D in (64, 128) for x in ("forward", "backward")}
    assert all(ms > 0 for x in parts["intervals"].values() for ms in x.values())
    assert parts["train"]["sdpa"]["ms"] > 0 and parts["train"]["sdpa"]["loss"] < 20
    assert parts["train"]["liger"] == {"error": "took longer than 7 s"}
    (made,) = parts["generate"].values()
    assert made["tokens_s"] > 0 and len(made["last"]) == 2
    assert "flashproto Cache, 2 prompts: first token" in capsys.readouterr().out


def test_a_worker_that_fails_says_why(monkeypatch: pytest.MonkeyPatch) -> None:
    done = SimpleNamespace(returncode=1, stdout="", stderr="Traceback\nImportError: no liger\n")
    monkeypatch.setattr(workers.subprocess, "run", lambda *_, **__: done)
    assert workers.in_process("doors", ["train", "liger", 0], [], 1.0) == {
        "error": "ImportError: no liger"
    }


def test_a_part_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(SystemExit, match="it takes intervals, train, generate"):
        bench.main(["doors", "--parts", "training", "--out", str(tmp_path)])
