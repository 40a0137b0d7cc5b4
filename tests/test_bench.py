"""The benchmarks: what they refuse to report, what they keep, and that every subject runs."""

from __future__ import annotations

import dataclasses
import itertools
import json
import os
import re
import subprocess
import sys
import types
from collections.abc import Callable
from functools import partial
from importlib import import_module
from importlib.machinery import ModuleSpec
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from flashproto import attention as flash_attention
from flashproto import backends, configs, nn, reference
from flashproto.bench import __main__ as bench
from flashproto.bench import (
    attention,
    block,
    gpt,
    launch,
    norm,
    report,
    sanitize,
    search,
    softmax,
    warm,
)
from flashproto.bench.measure import Prepared, Work, compare, far_behind, measure_cell, memory
from flashproto.bench.timing import interleaved, wall_clock
from flashproto.ops import call
from flashproto.variant import Kind

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


class OnGpu(torch.Tensor):
    """A tensor of the CPU that says it is on a GPU."""

    device = torch.device("cuda")


def test_memory_is_what_forward_keeps_and_the_peak_of_a_step(monkeypatch: pytest.MonkeyPatch) -> None:
    assert memory(prepared()) == {}
    x = torch.randn(4).as_subclass(OnGpu).requires_grad_()
    gib = [20, 5]  # allocated since the peak was reset

    def call() -> torch.Tensor:
        y = 2 * x
        gib.extend((8, 7))
        y.register_hook(lambda _: gib.extend((9, 6)))
        return y

    def reset() -> None:
        gib[:] = gib[-1:]

    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda: gib[-1] * 2**30)
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda: max(gib) * 2**30)
    monkeypatch.setattr(torch.cuda, "reset_peak_memory_stats", reset)
    found = memory(Prepared(call, [x], torch.ones(4), lambda out, grads: None))
    assert found == {"kept_gib": 2.0, "peak_gib": 4.0}


def test_mfu_is_of_the_peak_that_the_trainer_takes(monkeypatch: pytest.MonkeyPatch) -> None:
    p = gpt.Problem("gpt2-124m", 1024, 16, torch.bfloat16)
    work, gpu = gpt.work(p), torch.device("cuda")
    assert bench.value_at_peak(work, CPU) is None
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "NVIDIA H200")
    assert bench.value_at_peak(WORK, gpu) is None
    per_token = nn.GPT(p.config, device="meta").flops_per_token()
    assert bench.value_at_peak(work, gpu) == pytest.approx(989e12 / per_token / 1e3)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "another card")
    assert bench.value_at_peak(work, gpu) is None


def test_plain_models_on_liger_s_kernels_compute_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    """Here on stand-ins for its operators."""

    def operator(function: Callable[..., Any]) -> types.SimpleNamespace:
        return types.SimpleNamespace(apply=function)

    def rms_norm(x: Tensor, weight: Tensor, eps: float, *_: Any) -> Tensor:
        return F.rms_norm(x, weight.shape, weight, eps)

    def layer_norm(x: Tensor, weight: Tensor, bias: Tensor, eps: float) -> Tensor:
        return F.layer_norm(x, weight.shape, weight, bias, eps)

    def silu_mul(gate: Tensor, up: Tensor) -> Tensor:
        assert gate.is_contiguous() and up.is_contiguous()
        return F.silu(gate) * up

    def linear_cross_entropy(h: Tensor, weight: Tensor, targets: Tensor) -> tuple[Tensor, None]:
        assert h.dtype == weight.dtype
        return F.cross_entropy((h @ weight.t()).float(), targets), None

    operators = {
        "rms_norm.LigerRMSNormFunction": rms_norm,
        "layer_norm.LigerLayerNormFunction": layer_norm,
        "swiglu.LigerSiLUMulFunction": silu_mul,
        "fused_linear_cross_entropy.LigerFusedLinearCrossEntropyFunction": linear_cross_entropy,
    }
    for name, function in operators.items():
        module, _, attribute = f"liger_kernel.ops.{name}".rpartition(".")
        stand_in = types.ModuleType(module)
        setattr(stand_in, attribute, operator(function))
        monkeypatch.setitem(sys.modules, module, stand_in)
    for package in ("liger_kernel", "liger_kernel.ops"):
        stand_in = types.ModuleType(package)
        stand_in.__spec__ = ModuleSpec(package, None)
        monkeypatch.setitem(sys.modules, package, stand_in)
    cases = [block.Problem(kind, 32, 2, 16, 2, torch.float32) for kind in block.KINDS]
    cases += [gpt.Problem("tiny", 32, 2, dtype) for dtype in (torch.float32, torch.bfloat16)]
    for p in cases:
        module = gpt if isinstance(p, gpt.Problem) else block
        assert "liger" not in module.contenders(p, CPU, [], False)
        with monkeypatch.context() as patched:
            patched.setattr(module, "has_liger", lambda device: True)
            made = module.contenders(p, CPU, [], False)
        if p.key.startswith("attention"):
            assert "liger" not in made
            continue
        liger = made["liger"]()
        out = liger.call()
        assert liger.check(out, torch.autograd.grad(out, liger.inputs, liger.grad)) is None


# --- attention's check --------------------------------------------------------------------------


def rounded_as_fused(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, grad: torch.Tensor, causal: bool
) -> dict[str, torch.Tensor]:
    """Attention and its gradients with a fused kernel's roundings: P, out and dS in the inputs' dtype,
    delta from the rounded out."""

    def rounded(x: torch.Tensor) -> torch.Tensor:
        return x.to(q.dtype).float()

    exact_q, exact_k, exact_v, dout = (t.float() for t in (q, k, v, grad))
    scale = q.shape[3] ** -0.5
    scores = scale * exact_q @ exact_k.mT
    if causal:
        scores = scores.masked_fill(scores.new_ones(scores.shape[2:]).triu(1).bool(), -torch.inf)
    p = torch.softmax(scores, -1)
    out = rounded(rounded(p) @ exact_v)
    ds = rounded(p * (dout @ exact_v.mT - (dout * out).sum(-1, keepdim=True)))
    results = {
        "out": out,
        "dq": scale * ds @ exact_k,
        "dk": scale * ds.mT @ exact_q,
        "dv": rounded(p).mT @ dout,
    }
    return {name: value.to(q.dtype) for name, value in results.items()}


def attention_cell(
    S: int, heads: int, causal: bool
) -> tuple[attention.Sampled, dict[str, torch.Tensor]]:
    """A cell whose heads are all checked, and right results of it in bfloat16."""
    p = attention.Problem(1, heads, heads, S, 128, causal, torch.bfloat16)
    q, k, v, grad = (torch.randn(1, heads, S, 128).bfloat16() for _ in range(4))
    sampled = attention.Sampled(p, q, k, v, grad)
    sampled.parts = [(slice(0, 1), slice(h, h + 1), slice(h, h + 1)) for h in range(heads)]
    return sampled, rounded_as_fused(q, k, v, grad, causal)


def complaint(sampled: attention.Sampled, got: dict[str, torch.Tensor]) -> str | None:
    found = sampled.check(got["out"], None)
    return found or sampled.check(got["out"], [got[name] for name in ("dq", "dk", "dv")])


@pytest.mark.parametrize("causal", [False, True])
def test_right_attention_passes_the_check(causal: bool) -> None:
    torch.manual_seed(0)
    sampled, got = attention_cell(64, 96, causal)
    assert complaint(sampled, got) is None
    # A share of the row's norm alone would refuse some first rows of a causal dq.
    refused = [compare({"dq": got["dq"][:, h : h + 1]}, want) for h, want in enumerate(sampled.want)]
    assert any(refused) == causal
    for text in filter(None, refused):
        assert int(text.rstrip(")").split()[-1]) < 16, text


def test_allowance_for_rounding_is_eager_s_own_error() -> None:
    torch.manual_seed(0)
    sampled, _ = attention_cell(256, 24, True)
    leaves = [t.requires_grad_() for t in sampled.given[:3]]
    scores = (leaves[0] @ leaves[1].mT) * 128**-0.5
    hidden = torch.ones(256, 256).triu(1).bool()
    out = torch.softmax(scores.masked_fill(hidden, -torch.inf), -1) @ leaves[2]
    (eager_dq,) = torch.autograd.grad(out, leaves[:1], sampled.given[3])
    want, allowed = (torch.cat([part[n] for part in sampled.want], 1) for n in ("dq", "rounding"))
    error = (eager_dq - want).norm(dim=-1)
    assert allowed[..., 1:8].max() < 4 * error[..., 1:8].max()
    # It is below the share of the norm, which stays the bound, from a few keys a row on.
    assert (allowed < 0.05 * want.norm(dim=-1))[..., 32:].all()


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("name", ["out", "dq", "dk", "dv"])
@pytest.mark.parametrize(("first", "rows"), [(0, 64), (137, 1), (192, 64), (255, 1)])
def test_a_wrong_row_or_tile_is_refused(name: str, first: int, rows: int, causal: bool) -> None:
    sampled, got = attention_cell(256, 2, causal)
    assert complaint(sampled, got) is None
    size = got[name].float().norm(dim=-1, keepdim=True)
    direction = torch.nn.functional.normalize(torch.randn((*size.shape[:-1], 128)), dim=-1)
    slightly = 0.06 * (size + 0.1 * size.mean()) * direction
    wrong = got[name].clone()
    wrong[:, 1, first : first + rows] += slightly[:, 1, first : first + rows].bfloat16()
    assert f"wrong result: {name}" in (complaint(sampled, got | {name: wrong}) or "")


def test_first_causal_rows_are_not_exempt() -> None:
    sampled, got = attention_cell(256, 2, True)
    swapped = got["dq"].clone()
    swapped[:, 0, [2, 3]] = swapped[:, 0, [3, 2]]
    assert "wrong result: dq" in (complaint(sampled, got | {"dq": swapped}) or "")
    unwritten = got["dk"].clone()
    unwritten[0, 1, 200, 5] = torch.nan
    assert "dk is not finite" in (complaint(sampled, got | {"dk": unwritten}) or "")


def test_exact_attention_in_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    q, k, v, grad = (torch.randn(1, heads, 70, 16) for heads in (2, 1, 1, 2))
    for causal in (False, True):
        whole = attention.exact(q, k, v, grad, causal)
        monkeypatch.setattr(attention, "PIECE", 70 * 9)
        for name, value in attention.exact(q, k, v, grad, causal).items():
            torch.testing.assert_close(value, whole[name])
        monkeypatch.undo()


# --- turns and figures --------------------------------------------------------------------------


def test_contenders_take_turns() -> None:
    order: list[str] = []
    functions = {"a": lambda: order.append("a"), "b": lambda: order.append("b")}

    def timer(fn: Any) -> float:
        fn()
        return float(len(order))

    times = interleaved(functions, timer, 8)
    rounds = list(zip(order[::2], order[1::2], strict=True))
    assert rounds[0] == ("a", "b")
    assert set(rounds) == {("a", "b"), ("b", "a")}, "neither always follows the other"
    for name, found in times.items():
        assert found == [i + 1.0 for i, turn in enumerate(order) if turn == name]


def test_who_is_far_behind_is_timed_once_and_marked() -> None:
    names = {"flashproto[a]": 9.0, "flashproto[b]": 8.0, "peer": 1.0, "close": 1.2, "slow": 1.4}
    assert far_behind(names, 1.3) == ["slow"]
    for other in ("flashproto[a]-deterministic", "flashproto[a] varlen", "(plain, a)"):
        assert far_behind({"flashproto[a]": 1.0, other: 1.5}, 1.3) == []
    contenders = dict.fromkeys(names, prepared)
    order = iter([*names.values(), 9.0, 8.0, 1.0, 1.2] * 2)
    results = measure_cell(contenders, WORK, lambda fn: next(order), 2, drop_slower=1.3)
    for by_name in results.values():
        assert [n for n, r in by_name.items() if r.get("dropped")] == ["slow"]
        assert by_name["slow"]["ms"] == 1.4
    assert report.entry(results["forward"]["slow"], "ms").endswith("*")


def test_goals_name_the_cells_below() -> None:
    def cell(ours: float, peer: float) -> dict[str, Any]:
        results = {n: {"ms": 100 / v, "value": v} for n, v in (("flashproto[x]", ours), ("p", peer))}
        return {"unit": "TFLOP/s", "ceiling": 800.0, "passes": {"forward": results}}

    cells = {"fast": cell(700, 500), "at ceiling": cell(790, 780), "slow": cell(510, 500)}
    text = report.targets(cells, "forward", 1.05, 1.10, at_ceiling=1.0)
    assert "1 of 3 cells: slow (1.020 of p)" in text
    assert "88% of the ceiling" in text
    assert "geometric mean 1.131, wanted 1.1: yes" in text
    text = report.targets(cells, "forward", 1.0, 1.2, floor=lambda key: 0.7)
    assert "1 of 3 cells: slow (63.7% of the ceiling)" in text
    assert "wanted 1.2: NO" in text


def test_floors_of_the_norms() -> None:
    assert norm.floor("forward", "RMSNorm 49152x512") is None
    assert norm.floor("forward", "RMSNorm 49152x1024") == 0.92
    assert norm.floor("backward", "LayerNorm 3072x16384") == 0.8
    assert norm.floor("backward", "LayerNorm 192x262144") == 0.65
    assert norm.floor("backward", "LayerNorm 1001x50257") is None


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


@pytest.mark.parametrize("module", [import_module(f"flashproto.bench.{n}") for n in bench.SUBJECTS])
def test_problems_have_names_of_their_own(module: Any) -> None:
    for device in (CPU, torch.device("cuda")):
        for quick in (True, False):
            keys = [p.key for p in module.problems(quick, device)]
            assert keys
            assert len(set(keys)) == len(keys)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("subject", "cell"),
    [
        ("attention", "D64 S128 causal"),
        ("views", ""),
        ("merge", ""),
        ("norm", "512x256"),
        ("norm_float32", "512x256"),
        ("add_norm", ""),
        ("softmax", "512x256"),
        ("softmax_topk", ""),
        ("cross_entropy", ""),
        ("linear_cross_entropy", ""),
        ("oneflow", "x32$"),
        ("rms_norm_article", ""),
        ("online_softmax", ""),
        ("block", ""),
        ("gpt", ""),
    ],
)
def test_subject_runs_without_a_gpu(
    subject: str, cell: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = [subject, "--quick", "--device", "cpu", "--cells", cell, "--out", str(tmp_path)]
    bench.main([*arguments, "--repeats", "1", "--rep-ms", "1"])
    text = capsys.readouterr().out
    assert "times best peer" in text
    assert "wanted" not in text
    assert "goal" not in text
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
    bench.main([*arguments, "--resume", "--goals"])
    text = capsys.readouterr().out
    has_goals = hasattr(import_module(f"flashproto.bench.{subject}"), "goals")
    assert ("goal" in text or "wanted" in text) == has_goals


def test_without_matplotlib_results_are_kept(tmp_path: Path, capsys, monkeypatch) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    machine = {"gpus": [], "machine": {"cpu": "a CPU"}, "versions": {"torch": "2"}}
    timed = {"flashproto[torch]": {"ms": 1.0, "value": 1.0}, "torch": {"ms": 2.0, "value": 0.5}}
    cells = {"a": {"unit": "GB/s", "passes": {"forward": timed}}}
    path, data = tmp_path / "softmax.json", {"cells": cells, "runs": [{"environment": machine}]}
    bench.conclude(bench.Plan("softmax", softmax, [], path, data, []))
    *table, last = capsys.readouterr().out.splitlines()
    assert "2.00" in "".join(table)
    assert last.startswith(f"wrote {path} without a picture (")
    assert last.endswith('pip install ".[bench]", and run it again with --resume')


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


@pytest.mark.slow
def test_several_subjects_and_compiling_ahead(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    common = ["--quick", "--device", "cpu", "--repeats", "1", "--rep-ms", "1", "--contenders", "torch"]
    lines: list[list[str]] = []
    monkeypatch.setattr(warm, "run_all", lambda commands, processes: lines.extend(commands))
    bench.main(["add_norm", "softmax_topk", *common, "--out", str(tmp_path), "--ahead", "2"])
    assert [line[3] for line in lines] == ["add_norm"] * 2 + ["softmax_topk"] * 2
    for subject in ("add_norm", "softmax_topk"):
        assert json.loads((tmp_path / f"{subject}.json").read_text())["cells"]
    capsys.readouterr()
    bench.main(lines[-1][3:])  # the others than compiled ones, in this process
    assert "error" not in capsys.readouterr().out


def test_commands_that_compile_ahead_split_the_contenders() -> None:
    names = ("flashproto[triton]", "compile", "flex", "flashproto[triton]+compile", "torch")

    def chosen(*impls: str) -> list[list[str]]:
        lines = warm.commands(["norm"], {"a": ["RMSNorm 64x256"]}, "flashproto|compile|flex", impls)
        for line in lines:
            assert re.search(line[-3], "RMSNorm 64x256") and not re.search(line[-3], "RMSNorm 64x2560")
        return [[n for n in names if re.search(line[-1], n)] for line in lines]

    assert chosen() == [["compile", "flex"], ["flashproto[triton]"]]
    assert chosen("hopper", "triton") == [[], ["flashproto[triton]+compile"], *chosen()]


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
        (["launch", "norm"], "measured alone"),
    ],
)
def test_bad_options_are_refused(
    arguments: list[str], message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as caught:
        bench.main([*arguments, "--out", str(tmp_path)])
    assert message in capsys.readouterr().err + str(caught.value)
    assert not list(tmp_path.iterdir())


def test_host_times_are_given_as_on_the_host_of_the_limits() -> None:
    """Here on one that takes twice as long, of whatever torch does."""
    host_us = {name: (9.9 * us, 2 * us) for name, us in launch.TORCH_THERE.items()}
    figures = {
        "impl": "triton",
        "import_torch_s": 1.0,
        "import_flashproto_s": 1.2,
        "import_ratio": 1.2,
        "first_attention_s": {"forward": 1.0, "backward": 2.0},
        "host_us": host_us | {"flashproto.softmax with grad": (40.0, 24.0)},
    }
    line = launch.launch_text(figures, goals=True).splitlines()[-1]
    assert line.endswith("40.0    24.0 (at most 15)    12.0")


def test_host_times_of_a_backward_call() -> None:
    """By autograd, by autograd in one thread, of the node alone, and each of several in one graph: one
    limit for all, and the same gradients; autograd is left as it was."""
    q, k, v = (torch.randn(1, 2, 4, 8, requires_grad=True) for _ in range(3))
    attend = partial(flash_attention, impl="torch")
    rows = launch.backward_rows("attention", attend, (q, k, v))
    kinds = ("", ", in one thread", ", its node", launch.IN_ONE_GRAPH)
    assert list(rows) == [f"attention backward{kind}" for kind in kinds]
    expected, again, _, layers = (call() for call in rows.values())
    assert all(torch.equal(a, b) for a, b in zip(expected, again, strict=True))
    x = q
    for _ in range(launch.LAYERS):
        x = attend(x, k, v)
    of_q, of_k, of_v = torch.autograd.grad(x.sum(), (q, k, v))
    torch.testing.assert_close(layers[0], of_q)
    torch.testing.assert_close(torch.stack(layers[1::2]).sum(0), of_k)
    torch.testing.assert_close(torch.stack(layers[2::2]).sum(0), of_v)
    assert torch.autograd.is_multithreading_enabled()
    figures = {
        "impl": "hopper",
        "import_torch_s": 1.0,
        "import_flashproto_s": 1.2,
        "import_ratio": 1.2,
        "first_attention_s": {"forward": 1.0, "backward": 2.0},
        "host_us": {"torch attention": (14.0, 14.0)}
        | {name: (40.0, 24.0) for row in rows for name in (f"flashproto.{row}", f"torch {row}")},
    }
    assert "at most" not in launch.launch_text(figures)
    lines = launch.launch_text(figures, goals=True).splitlines()[-8:]
    assert [line.split()[0] for line in lines if "(at most 60)" in line] == ["flashproto.attention"] * 4


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


@pytest.mark.slow
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


def test_sanitize_covers_every_hopper_configuration() -> None:
    calls = sanitize.calls()
    forward = {dataclasses.replace(c.config, PACK=min(c.config.PACK, 2)) for c in calls}
    forward |= {c.chosen for c in calls}
    # Sq, heads, group
    queries = ((16384, 1024, 1), (4096, 64, 1), (1, 8, 1), (1, 8, 2), (33, 1024, 8))
    for D, how in itertools.product((64, 80, 128, 192, 256), queries):
        for length in (1, 512, 1024, 2048, 3000, 4096, 8192, 16384, 32768):
            for causal in (False, True):
                config = configs.attention_forward_hopper(D, length, Kind(causal), *how)
                assert dataclasses.replace(config, PACK=min(config.PACK, 2)) in forward
    backward = {(c.D, c.causal, c.deterministic) for c in calls if c.backward}
    assert len(backward) == 4 * len(sanitize.HEAD_DIMS)
    chosen = {c.chosen for c in calls}
    for D, length, causal, ordered, heads, group in itertools.product(
        (64, 80, 128, 192, 256),
        (1, 512, 1024, 2048, 3000, 4096, 8192, 16384, 32768),
        (False, True),
        (False, True),
        (1, 40, 1024),
        (1, 8),
    ):
        assert (
            configs.attention_backward_hopper(D, length, Kind(causal), ordered, heads, group) in chosen
        )
    assert len({c.key for c in calls}) == len(calls)


@pytest.mark.parametrize("name", ["window", "boolean", "documents", sanitize.SEQUENCES])
def test_sanitize_compares_variants(name, monkeypatch) -> None:
    assert len({c.key for c in sanitize.variant_calls()}) == len(sanitize.variant_calls())
    call = sanitize.VariantCall(name, 64, 64, True)
    assert sanitize.variant_checked(call, "torch", "cpu") is None
    right = sanitize.VariantCall.attend

    def wrong(call: Any, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, impl: str) -> torch.Tensor:
        factor = 1.0 if impl == "reference" else 1.5  # of the gradient alone
        return right(call, q, k, v.detach() + factor * (v - v.detach()), impl)

    monkeypatch.setattr(sanitize.VariantCall, "attend", wrong)
    assert "dv is off" in str(sanitize.variant_checked(call, "torch", "cpu"))


@pytest.mark.parametrize("page, packed", [(0, False), (16, False), (16, True)])
def test_sanitize_compares_caches(page, packed, monkeypatch) -> None:
    call = sanitize.CacheCall("triton", 64, page, 5, packed)
    assert sanitize.cache_checked(call, "cpu") is None
    right = reference.attention_with_kv_cache

    def wrong(*args: Any, **options: Any) -> tuple[torch.Tensor, torch.Tensor]:
        out, lse = right(*args, **options)
        return out + 1, lse

    monkeypatch.setattr(reference, "attention_with_kv_cache", wrong)
    assert "out" in (sanitize.cache_checked(call, "cpu") or "")


def test_sanitize_names_calls_of_caches_apart() -> None:
    calls = sanitize.cache_calls()
    assert len({call.key for call in calls}) == len(calls)
    assert {call.impl for call in calls} == {"hopper", "triton"}


def test_sanitize_says_what_it_needs() -> None:
    if torch.cuda.is_available():
        pytest.skip("there is a GPU")
    for options in ([], ["--controls"], ["--variants"], ["--caches"]):
        with pytest.raises(SystemExit, match="compute capability"):
            bench.main(["sanitize", *options])


@pytest.mark.parametrize("options", ["[]", "['--controls']"])
def test_sanitize_says_so_without_triton(options: str) -> None:
    code = (
        "import sys; sys.modules['triton'] = None; from flashproto.bench import sanitize; "
        f"sanitize.main({options})"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 1
    assert done.stderr.startswith("flashproto.bench sanitize: the package triton is not installed")


@pytest.mark.gpu
@pytest.mark.parametrize("name", sanitize.CONTROLS)
def test_sanitize_controls_are_right(name: str) -> None:
    against = backends.device_reasons("hopper", torch.device("cuda"))
    if against:
        pytest.skip("; ".join(against))
    assert sanitize.control(name) is None


@pytest.mark.parametrize("which", ["forward", "backward"])
def test_search_has_candidates_that_fit(which: str) -> None:
    for D in (64, 128, 256):
        p = attention.Problem(4, 2048 // D, 2048 // D, 4096, D, True, torch.bfloat16)
        base = search.present(which, p)
        found = search.candidates(base, search.VARIED[which])
        if (which, D) == ("backward", 256):  # no other tiles fit
            assert found == [base]
            found = search.candidates(base, {"WALK": ("waves", "down", "round")})
        assert found[0] == base and len(set(found)) == len(found) > 1
        assert all(map(search.fits, found))
        names = [search.difference(config, base) for config in found]
        assert names[0] == "present" and len(set(names)) == len(names)
        with search.Chosen(which) as chosen:
            call.OPERATORS["attention_forward"].keep("a call", len)
            chosen.set(found[1])
            assert not call.OPERATORS["attention_forward"].kept, "of another configuration"
            assert not chosen.asked
            assert search.present(which, p) == found[1] and chosen.asked
        assert search.present(which, p) == base


def test_search_knows_what_fits() -> None:
    chosen = sanitize.forward_configurations()
    assert all(map(search.fits, [*chosen, *sanitize.backward_configurations()]))
    for D, columns in ((64, {0, 64}), (128, {0, 64, 96, 128})):
        for config in (c for c in chosen if c.D == D):
            kept = {
                n
                for n in (0, 32, 64, 96, 100, 128, 192)
                if search.fits(dataclasses.replace(config, Q_IN_REGS=n))
            }
            assert kept == columns
    backward = configs.attention_backward_hopper(128, 4096, Kind())
    assert not search.fits(dataclasses.replace(backward, KV=2))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["forward", "--vary", "KS=two"], "NAME=VALUE"),
        (["forward", "--vary", "XX=2"], "--vary names XX"),
        (["sideways"], "invalid choice"),
    ],
)
def test_bad_search_options_are_refused(
    arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        bench.main(["search", *arguments])
    assert message in capsys.readouterr().err
