"""The bench of the host's time: its rows make the calls of their names, and two trees take turns."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from flashproto import backends
from flashproto.bench import __main__ as bench
from flashproto.bench import launch, launch_beside

ROOT = Path(__file__).parents[1]
NEW = "mask=documents|varlen|key mask|kv_cache|one query|forward and backward"


@pytest.fixture(autouse=True)
def default_backend() -> Iterator[None]:
    before = backends.get_default()
    yield
    backends.set_default(before)


def rows_of(impl: str, device: str) -> tuple[dict[str, torch.Tensor], dict[str, str]]:
    torch.manual_seed(0)
    running, errors = launch.running_rows(impl, torch.device(device), NEW)
    return {name: call() for name, call in running.items()}, errors


def test_rows_make_the_calls_of_their_names(device: str) -> None:
    """Beside torch's of the same name, and on the reference backend; a cache's beside attention's."""
    pytest.importorskip("triton")
    tolerance = {"rtol": 0, "atol": 1e-5 if device == "cpu" else 0.06}  # of bfloat16 on a GPU
    found, errors = rows_of("triton", device)
    exact, _ = rows_of("reference", device)
    varlen = {f"torch attention_varlen{kind}" for kind in launch.KINDS}
    assert set(errors) == (varlen if device == "cpu" else set()), errors
    assert set(found) == set(exact)
    for name, result in found.items():
        torch.testing.assert_close(result, exact[name], **tolerance)
        theirs = found.get(name.replace("flashproto.", "torch "))
        if theirs is not None:
            torch.testing.assert_close(result, theirs, **tolerance)
        elif "kv_cache" not in name:
            assert name.replace("flashproto.", "torch ") in errors
    one = found["flashproto.attention one query"]
    for which in ("read", "paged"):
        got = found[f"flashproto.attention_with_kv_cache {which}"]
        torch.testing.assert_close(got, one, **tolerance)
    appended = found["flashproto.attention_with_kv_cache append + RoPE"]
    assert (appended - one).abs().max() > 0.1


@pytest.mark.parametrize(
    ("name", "row"),
    [
        ("flashproto.attention_varlen", "flashproto.attention"),
        ("torch attention mask=documents with grad", "flashproto.attention with grad"),
        (f"torch attention_varlen{launch.BOTH}", f"flashproto.attention{launch.BOTH}"),
        ("flashproto.attention backward, its node", None),
        (f"torch attention backward{launch.IN_ONE_GRAPH}", None),
        ("flashproto.softmax with grad", None),
    ],
)
def test_rows_are_compared_with_attention_of_their_kind(name: str, row: str | None) -> None:
    assert launch.attention_row(name) == row


def test_text_has_ratios_and_names_what_does_not_run() -> None:
    figures = {
        "impl": "triton",
        "import_torch_s": 1.0,
        "import_flashproto_s": 1.2,
        "import_ratio": 1.2,
        "first_attention_s": {"forward": 1.0, "backward": 2.0},
        "host_us": {"flashproto.attention": (30.0, 20.0), "flashproto.attention_varlen": (40.0, 35.0)},
        "errors": {"torch attention_varlen": "NotImplementedError: no such kernel"},
    }
    *_, attention, varlen, error = launch.launch_text(figures).splitlines()
    assert attention.endswith("30.0    20.0    1.00x") and varlen.endswith("40.0    35.0    1.75x")
    assert error == "  torch attention_varlen: NotImplementedError: no such kernel"


@pytest.fixture
def other_tree(tmp_path: Path) -> Path:
    """This tree, with an attention that waits for 30 ms, and one function less."""
    tree = tmp_path / "trees" / "other"
    ignored = shutil.ignore_patterns("__pycache__")
    shutil.copytree(ROOT / "flashproto", tree / "flashproto", symlinks=True, ignore=ignored)
    shutil.copytree(ROOT / "kernels", tree / "kernels", ignore=ignored)
    (tree / "flashproto" / "bench" / "launch.py").unlink()  # the rows are this tree's
    init = tree / "flashproto" / "__init__.py"
    added = """
def _wait(attend=attention):
    def attention(*args, **named):
        __import__("time").sleep(0.03)
        return attend(*args, **named)
    return attention

attention = _wait()

def attention_varlen(*args, **named):
    raise NotImplementedError("not yet")
"""
    init.write_text(init.read_text() + added)
    return tree


@pytest.mark.slow
def test_two_trees_take_turns(
    other_tree: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(launch_beside, "ROUNDS", 2)
    monkeypatch.setattr(launch_beside, "TIMES", 2)
    monkeypatch.setattr(launch_beside, "CALLS", 1)
    cores = os.sched_getaffinity(0)
    command = ["launch", "--beside", str(other_tree), "--impl", "reference", "--device", "cpu"]
    command += ["--contenders", r"^flashproto\.(attention|attention_varlen|softmax)$"]
    bench.main([*command, "--out", str(tmp_path / "out")])
    assert os.sched_getaffinity(0) == cores
    data = json.loads((tmp_path / "out" / "launch_beside.json").read_text())
    (run,), (figures,) = data["runs"], data["launch"]
    assert run["beside"] == {"commit": "other", "dirty": None}
    assert run["environment"]["versions"]["torch"] == torch.__version__
    assert list(figures["host_us"]) == ["flashproto.softmax", "flashproto.attention"]
    before, after = figures["host_us"]["flashproto.attention"]
    assert before > 30e3 > after > 0
    assert figures["host_us"]["flashproto.softmax"][0] < 30e3
    assert figures["errors"] == [{"flashproto.attention_varlen": "NotImplementedError: not yet"}, {}]
    text = capsys.readouterr().out
    assert "flashproto.attention_varlen in other: NotImplementedError: not yet" in text


def test_text_marks_what_is_slower() -> None:
    figures = {
        "impl": "triton",
        "host_us": {
            "flashproto.attention": [20.0, 20.55],  # beyond 0.5 us, within 3%
            "flashproto.attention_varlen": [100.0, 40.0],
            "flashproto.softmax": [10.0, 10.45],  # beyond 3%, within 0.5 us
            "flashproto.rms_norm": [10.0, 10.6],
        },
        "errors": [{"a": "no kernel", "b": "not yet"}, {"a": "no kernel"}],
    }
    _, attention, varlen, softmax, norm, *errors, last = launch_beside.beside_text(
        figures, ("old", "new")
    ).splitlines()
    assert errors == ["  b in old: not yet", "  a: no kernel"]
    assert attention.endswith("20.00    20.55   1.028    1.03x")
    assert varlen.endswith("100.00    40.00   0.400    2.00x")
    assert softmax.rstrip().endswith("1.045")
    assert norm.endswith("  slower")
    assert last == "rows slower by more than 0.5 us and 3%: 1 of 4"


def test_worker_of_a_tree_that_does_not_import_says_so(tmp_path: Path) -> None:
    (tmp_path / "flashproto").mkdir()
    (tmp_path / "flashproto" / "__init__.py").write_text("raise RuntimeError('broken')")
    with pytest.raises(RuntimeError, match=f"the worker of {tmp_path} ended with 1"):
        launch_beside.measure_beside("reference", torch.device("cpu"), tmp_path)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["norm", "--beside", str(ROOT)], "takes the subject launch alone"),
        (["launch", "--beside", str(ROOT / "tests")], "holds no flashproto"),
    ],
)
def test_bad_trees_are_refused(
    arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        bench.main(arguments)
    assert message in capsys.readouterr().err
