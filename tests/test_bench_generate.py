"""python -m flashproto.bench generate, with tiny models on a CPU."""

from __future__ import annotations

import json
import math
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from flashproto import backends
from flashproto.bench import __main__ as bench
from flashproto.bench import generate, workers
from flashproto.bench.plain_decoder import writer

TINY = ["--tiny", "--prompt", "40", "--new", "24"]


@pytest.fixture(autouse=True)
def by_torch(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(generate, "device_of_this_machine", lambda: torch.device("cpu"))
    before = backends.get_default()
    backends.set_default("torch")  # and not by the interpreter
    yield
    backends.set_default(before)


@pytest.mark.parametrize("kind", ["sdpa", "flex"])
@pytest.mark.parametrize("model", ["124m", "1b"])
def test_the_plain_model_writes_the_same_text(model: str, kind: str) -> None:
    """Of weights so large that it writes many tokens; past a block of FlexAttention's keys."""
    options = generate.parse(["--tiny"])
    ours = generate.model_of(generate.config_of(model, options), torch.device("cpu"))
    with torch.no_grad():
        for p in ours.parameters():
            p += torch.randn_like(p) * 0.1
    prompts = torch.randint(97, (3, 120))
    text = generate.by_cache(ours, prompts, 256)(24)
    assert len(text[:, 120:].unique()) > 3
    assert torch.equal(writer(ours, prompts, 256, kind, False)(24), text)


@pytest.fixture
def here(monkeypatch: pytest.MonkeyPatch) -> None:
    """Workers run in this process; one of them takes too long."""
    ordinary = subprocess.run

    def run(command: Sequence[str], **options: Any) -> Any:
        if list(command[:4]) != [sys.executable, "-m", "flashproto.bench", "generate"]:
            return ordinary(command, **options)
        part, *about = json.loads(command[-1])
        if about[-1] == "flex":
            raise subprocess.TimeoutExpired(command, options["timeout"])
        made = generate.WORKERS[part](*about, generate.parse(command[4:-2])) | {"device": "cpu"}
        return SimpleNamespace(returncode=0, stdout=f"a word before\n{json.dumps(made)}\n", stderr="")

    monkeypatch.setattr(workers.subprocess, "run", run)
    monkeypatch.setattr(generate, "CPU_SIZES", (4, 6))


@pytest.mark.usefixtures("here")
def test_every_part_is_measured(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    others = ["--contenders", "sdpa,flex,plain,recomputed"]
    ours = ["--contenders", "flashproto,8 guesses"]
    for i, chosen in enumerate((others, ours)):
        given = [*TINY, "--batches", "2", "--models", "1b", "--seconds", "7", *chosen]
        bench.main(["generate", *given, "--out", str(tmp_path / str(i))])
    bench.main(["generate", "--join", str(tmp_path / "0/generate.json"), "--out", str(tmp_path / "1")])
    data = json.loads((tmp_path / "1/generate.json").read_text())
    assert len(data["runs"]) == 2
    assert data["cells"]["decode B2 1b"]["flex"] == {"error": "took longer than 7 s", "run": 1}
    for cell, names in {
        "decode B2 1b": ("flashproto", "sdpa"),
        "lookup B1 124m round": ("8 guesses", "plain"),
        "lookup B1 124m quotes": ("8 guesses", "plain"),
        "cpu B1 124m": ("flashproto", "recomputed"),
    }.items():
        found = data["cells"][cell]
        assert [found[name]["run"] for name in names] == [0, 1]
        assert all(math.isfinite(found[name]["tokens_s"]) for name in names)
        assert found[names[0]]["tokens"] == found[names[1]]["tokens"]
    said = capsys.readouterr().out
    assert "100% of the first tokens as ours" in said and "times the best other's" in said


def test_texts_repeat_themselves() -> None:
    options = generate.parse(["--prompt", "64", "--new", "100"])
    round_, quotes = (generate.text_of(kind, options, 50257).tolist() for kind in generate.TEXTS)
    assert len(round_) == len(quotes) == 164 and round_[32:] == round_[:-32]
    assert len({*quotes[:64]}) == 64
    for start in (64, 96, 128):  # 8 new tokens, then 24 of the prompt
        first = quotes.index(quotes[start + 8])
        assert quotes[start + 8 : start + 32] == quotes[first : first + 24] and first < 64
        assert not {*quotes[start : start + 8]} & {*quotes[:64]}


def test_a_part_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(SystemExit, match="it takes decode, lookup, cpu"):
        bench.main(["generate", "--parts", "all", "--out", str(tmp_path)])
