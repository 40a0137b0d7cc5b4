"""The benchmarks: what they refuse to report, what they keep, and that every subject runs."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from flashproto.bench import __main__ as bench
from flashproto.bench import attention, block, norm, report, softmax
from flashproto.bench.measure import Prepared, Work, compare, measure_cell
from flashproto.bench.timing import interleaved, wall_clock

CPU = torch.device("cpu")
WORK = Work("GB/s", 2.0, 3.0)
EXAMPLE = Path(__file__).parents[1] / "examples" / "time_layers.py"


def prepared(factor: float = 1.0, gradient: float = 1.0) -> Prepared:
    """Doubles x [4, 8]; `factor` and `gradient` other than 1 make it wrong."""
    x = torch.randn(4, 8, requires_grad=True)
    grad = torch.randn(4, 8)

    def call() -> torch.Tensor:
        y = 2 * x * gradient
        return y + (2 * x * factor - y).detach()

    def check(y: torch.Tensor, grads: Any) -> str | None:
        got = {"y": y} if grads is None else {"y": y, "dx": grads[0]}
        return compare(got, {"y": 2 * x.detach(), "dx": 2 * grad})

    return Prepared(call, [x], grad, check)


def fail() -> Prepared:
    raise RuntimeError("no such kernel\nsecond line")


def test_wrong_results_and_errors_get_no_time() -> None:
    contenders = {
        "right": prepared,
        "wrong": lambda: prepared(factor=1.5),
        "wrong gradient": lambda: prepared(gradient=1.5),
        "nan": lambda: prepared(factor=float("nan")),
        "fails": fail,
    }
    results = measure_cell(contenders, WORK, lambda fn: wall_clock(fn, 0.1), 2)
    assert set(results) == {"forward", "backward"}
    for passed in ("forward", "backward"):
        right = results[passed]["right"]
        assert 0 < right["low_ms"] <= right["ms"] <= right["high_ms"]
        for name in ("wrong", "nan"):
            assert "wrong result: y" in results[passed][name]["error"]
            assert "ms" not in results[passed][name]
        assert results[passed]["fails"] == {"error": "RuntimeError: no such kernel"}
    assert "ms" in results["forward"]["wrong gradient"]
    assert "wrong result: dx" in results["backward"]["wrong gradient"]["error"]


def test_contenders_take_turns() -> None:
    order: list[str] = []
    functions = {"a": lambda: order.append("a"), "b": lambda: order.append("b")}

    def timer(fn: Any) -> float:
        fn()
        return float(len(order))

    times = interleaved(functions, timer, 3)
    assert order == ["a", "b"] * 3
    assert times == {"a": [1.0, 3.0, 5.0], "b": [2.0, 4.0, 6.0]}


def test_conventions_of_counting() -> None:
    full = attention.Problem(4, 16, 16, 4096, 128, False, torch.bfloat16)
    assert attention.work(full).forward == 4 * 4 * 16 * 4096**2 * 128 / 1e9
    assert attention.work(full).backward == 2.5 * attention.work(full).forward
    causal = attention.Problem(4, 16, 16, 4096, 128, True, torch.bfloat16)
    assert attention.work(causal).forward == attention.work(full).forward / 2
    for p in attention.problems(False, torch.device("cuda")):
        assert p.Hq != p.Hkv or (p.B * p.S == 16384 and p.Hq * p.D == 2048)
    assert [norm.rows_for(N) for N in (8192, 16384, 131072)] == [49152, 3072, 384]
    p = softmax.Problem(10, 100, torch.bfloat16)
    assert (softmax.work(p).forward, softmax.work(p).backward) == (4000 / 1e6, 6000 / 1e6)


@pytest.mark.parametrize("module", [attention, norm, softmax, block])
def test_problems_have_names_of_their_own(module: Any) -> None:
    for device in (CPU, torch.device("cuda")):
        for quick in (True, False):
            keys = [p.key for p in module.problems(quick, device)]
            assert keys
            assert len(set(keys)) == len(keys)


@pytest.mark.parametrize(
    ("subject", "cell"),
    [("attention", "D64 S128 causal"), ("norm", "512x256"), ("softmax", "512x256"), ("block", "")],
)
def test_subject_runs_without_a_gpu(
    subject: str, cell: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = [subject, "--quick", "--device", "cpu", "--cells", cell, "--out", str(tmp_path)]
    bench.main([*arguments, "--repeats", "1", "--rep-ms", "1"])
    text = capsys.readouterr().out
    assert "ours/best peer" in text
    assert "copy" in text
    data = json.loads((tmp_path / f"{subject}.json").read_text())
    assert data["runs"][0]["environment"]["versions"]["torch"] == torch.__version__
    assert {"date", "commit", "dirty", "ceilings"} <= set(data["runs"][0])
    for result in data["cells"].values():
        for by_name in result["passes"].values():
            assert {"flashproto[torch]", "flashproto[reference]"} <= set(by_name)
            for name, figures in by_name.items():
                assert figures.get("ms", 0) > 0, (name, figures)
    assert (tmp_path / f"{subject}.png").stat().st_size > 1000


def test_parts_add_up_and_nothing_is_overwritten(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    common = ["softmax", "--quick", "--device", "cpu", "--out", str(tmp_path)]
    common += ["--repeats", "1", "--rep-ms", "1", "--contenders", "torch"]
    bench.main([*common, "--cells", "x256$"])
    before = (tmp_path / "softmax.json").read_text()
    with pytest.raises(SystemExit, match="--resume"):
        bench.main(common)
    assert (tmp_path / "softmax.json").read_text() == before
    bench.main([*common, "--resume"])
    after = json.loads((tmp_path / "softmax.json").read_text())
    old = json.loads(before)
    assert after["cells"]["softmax 512x256"] == old["cells"]["softmax 512x256"]
    assert [cell["run"] for cell in after["cells"].values()] == [0, 1]
    bench.main([*common, "--resume"])
    assert "no cell left" in capsys.readouterr().out
    (tmp_path / "softmax.json").write_text("{}")
    with pytest.raises(SystemExit, match="cannot be resumed"):
        bench.main([*common, "--resume"])


def test_budget_stops_before_the_next_cell(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["softmax", "--quick", "--device", "cpu", "--out", str(tmp_path), "--budget", "0"]
    bench.main(arguments)
    assert "2 cells left" in capsys.readouterr().out
    assert not (tmp_path / "softmax.json").exists()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["softmax", "--impl", "cuda", "--device", "cpu"], "it takes hopper"),
        (["softmax", "--cells", "("], "regular expression"),
        (["softmax", "--repeats", "0"], "at least 1"),
        (["softmax", "--peers-path", "/nowhere/at/all"], "no directory"),
        (["dropout"], "invalid choice"),
    ],
)
def test_bad_options_are_refused(
    arguments: list[str], message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as caught:
        bench.main([*arguments, "--out", str(tmp_path)])
    assert message in capsys.readouterr().err + str(caught.value)
    assert not list(tmp_path.iterdir())


def test_ratio_compares_with_the_best_peer() -> None:
    results = {
        "flashproto[triton]": {"ms": 2.0},
        "flashproto[torch]": {"ms": 4.0},
        "torch": {"ms": 6.0},
        "compile": {"ms": 3.0},
        "liger": {"error": "none"},
    }
    assert report.ratio(results) == 1.5
    assert report.ratio(results, "torch") == 3.0
    assert report.ratio(results, "liger") is None


def test_time_layers_example(tmp_path: Path) -> None:
    small = ["--d-model", "64", "--length", "32", "--batch", "1", "--repeats", "1", "--no-compile"]
    if torch.cuda.is_available():
        small += ["--heads", "1"]
    command = [sys.executable, str(EXAMPLE), *small, "--out", str(tmp_path / "layers.png")]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    for name in block.KINDS:
        assert f"\n{name} " in done.stdout
    assert "error" not in done.stdout
    assert (tmp_path / "layers.png").stat().st_size > 1000
