"""python -m flashproto.bench parallel, with tiny models in two processes of a CPU."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from flashproto.bench import __main__ as bench
from flashproto.bench import parallel, speed

TINY = "--preset toy --n-layers 1 --d-model 32 --context 32"


@pytest.fixture(autouse=True)
def without_interpreter(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)


@pytest.mark.slow
def test_one_process_and_two(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    given = ["--processes", "2", "--device", "cpu", "--train", TINY, "--sequences", "2", "--steps", "4"]
    bench.main(["parallel", *given, "--out", str(tmp_path)])
    data = json.loads((tmp_path / "parallel.json").read_text())
    found = data["cells"][TINY]
    assert [found[way]["processes"] for way in ("one", "ddp", "fsdp")] == [1, 2, 2]
    # One process has half the sequences, so the losses are of other steps; the two ways have the same.
    assert found["ddp"]["loss"] == pytest.approx(found["fsdp"]["loss"], rel=1e-5)
    for way in ("ddp", "fsdp"):
        ratio = found[way]["tokens_s"] / found["one"]["tokens_s"]
        assert found[way]["share"] == pytest.approx(ratio / 2)
    assert "of 2 times one" in capsys.readouterr().out
    page = "\n".join(speed.parallel_section(data))
    assert f"| {TINY} | --parallel fsdp | 2 |" in page


def test_a_run_that_fails_is_told(tmp_path: Path) -> None:
    options = parallel.parse(["--processes", "2", "--device", "cpu", "--train", "--context 0"])
    case = parallel.chosen(options)["--context 0"]
    for way in (None, "ddp"):
        found = parallel.trained(case, way, options)
        assert "--context" in found["error"], found
    assert parallel.text("ddp", found, None).startswith("  ddp: error: ")


def test_one_sequence_is_trained_by_all_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    options = parallel.parse(["--processes", "4", "--device", "cpu", "--cases", "one sequence"])
    (case,) = parallel.chosen(options).values()
    lines = []

    def train(case: parallel.Case, way: str | None, options: object) -> dict[str, object]:
        lines.append(" ".join(parallel.command(case, way, options, Path("folder"))))
        return {"error": "not run"}

    monkeypatch.setattr(parallel, "trained", train)
    assert list(parallel.measured(case, options)) == ["fsdp"]
    (line,) = lines
    for part in ("--nproc-per-node 4", "--context-parallel 4", "--batch-size 1", "--parallel fsdp"):
        assert part in line


REFUSED = [
    *("--processes=0", "--steps=1", "--sequences=0"),
    *("--device=tpu", "--cases=nothing", "--cases=(", "--train='"),
]


@pytest.mark.parametrize("given", REFUSED)
def test_what_does_not_fit_is_refused(given: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        parallel.parse(["--device", "cpu", given])
    assert given.partition("=")[0] in capsys.readouterr().err.splitlines()[-1]
