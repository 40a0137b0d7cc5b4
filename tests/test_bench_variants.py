"""The benchmark of attention's variants: what it counts, that contenders compute what their cell is of,
its goals, and what the documentation shows of it."""

from __future__ import annotations

import json
import math
import random
import shutil
import sys
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from attention_problem import Problem as Shape
from torch import Tensor
from variant_problem import FEATURES, drawn

from flashproto import masks
from flashproto.bench import __main__ as bench
from flashproto.bench import docs, first_calls, peers, report, speed, variants
from flashproto.bench.measure import Prepared, Work, compare, measure_cell
from flashproto.bench.variant_problems import Problem, mask_of, pairs, plainer, problems, tiles, work
from flashproto.bench.visible import visible_pairs, visited_pairs

CPU, GPU = torch.device("cpu"), torch.device("cuda")
SEEN = ("causal", "top_left", "left_window", "right_window", "first_keys")
SEEN += ("documents", "padding", "prefix", "tree", "intervals")


def cells(quick: bool = False, device: torch.device = CPU) -> dict[str, Problem]:
    return {p.key: p for p in problems(quick, device)}


# --- pairs ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "names", [*((name,) for name in SEEN), ("causal", "tree"), ("first_keys", "prefix")]
)
def test_pairs_are_counted_one_by_one(names: tuple[str, ...], seed: int) -> None:
    """As the predicates of the tests' own table of features have them, not as masks have."""
    generator = random.Random(seed)
    for Sq, Sk in ((23, 23), (9, 30), (30, 9)):
        if Sq != Sk and any(FEATURES[name].square for name in names):
            continue
        shape = Shape(torch.float32, 2, 3, 3, Sq, Sk, 16, 16, causal=False)
        call = drawn(generator, shape, names, "cpu")
        mask = call.options.get("mask", masks.Mask())
        if "window" in call.options:
            mask = mask & masks.window(*call.options["window"])
        if call.options["causal"]:
            mask = mask & masks.causal()
        seen = call.visible(CPU)
        assert visible_pairs(mask, 2, 3, Sq, Sk) == int(seen.sum())
        for tile in (1, 4, 16):
            padded = torch.nn.functional.pad(seen, (0, -Sk % tile, 0, -Sq % tile))
            met = padded.unflatten(-1, (-1, tile)).any(-1).unflatten(-2, (-1, tile)).any(-2)
            assert visited_pairs(mask, 2, 3, Sq, Sk, tile) == int(met.sum()) * tile**2


def triangle(n: int) -> int:
    return n * (n + 1) // 2


def test_pairs_of_the_cells() -> None:
    S, found = 16384, cells(device=GPU)
    by_hand = {
        "window 1024 D128 S16384": S * 1024 - triangle(1023),
        "8 documents of 2048 D128 S16384": 8 * triangle(2048),
        "tree of 8x1024 on 4096 D128 S12288": triangle(4096) + 8 * (1024 * 4096 + triangle(1024)),
        "softcap 30 D128 S4096": triangle(4096),
        "key padding D128 S4096": 4096 * (4096 + 3000 + 2100 + 1050) // 4,
        "window 128, sinks D64 S16384 GQA 64/8": S * 128 - triangle(127),
    }
    for key, count in by_hand.items():
        p = found[key]
        assert pairs(p) == p.B * p.Hq * count
        assert work(p).forward == 4 * pairs(p) * p.D / 1e9
        assert work(p).backward == 2.5 * 4 * pairs(p) * p.D / 1e9
    p = found["16 sequences of 128 to 4096 D128 S16384"]
    assert sum(p.lengths) == S and len(p.lengths) == 16
    assert pairs(p) == p.Hq * sum(map(triangle, p.lengths))
    # Tiles of 128: a window of 1024 visits 9 for 8, but in the first rows.
    assert tiles(found["window 1024 D128 S16384"]) == pytest.approx(9 / 8, rel=1e-2)
    assert tiles(found["softcap 30 D128 S4096"]) == pytest.approx(33 / 32, rel=1e-3)
    for p in found.values():
        assert p.Hq * p.D == (4096 if p.Hkv < p.Hq else 2048)
        simple = plainer(p)
        assert simple is None or (simple.S, simple.B) == (p.S, p.B)
        assert (simple is None) == ((p.window > 0 and not p.score) or p.kind == "padding")


# --- contenders -----------------------------------------------------------------------------------


def dense(
    q: Tensor, k: Tensor, v: Tensor, left: int | None, softcap: float, sinks: Tensor | None
) -> Tensor:
    """Causal attention of [B, S, H, D], written down plainly."""
    q, k, v = (t.transpose(1, 2) for t in (q, k, v))
    k, v = (t.repeat_interleave(q.shape[1] // k.shape[1], 1) for t in (k, v))
    i, j = torch.arange(q.shape[2])[:, None], torch.arange(k.shape[2])
    seen = (j <= i) & (j >= i - (len(j) if left is None else left))
    s = q @ k.mT / math.sqrt(q.shape[3])
    s = softcap * torch.tanh(s / softcap) if softcap else s
    s = s.masked_fill(~seen, -torch.inf)
    if sinks is not None:
        s = torch.cat([s, sinks[:, None, None].expand(*s.shape[:3], 1)], -1)
    return (torch.softmax(s, -1)[..., : len(j)] @ v).transpose(1, 2)


def flash_attn_func(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    causal: bool = False,
    window_size: tuple[int | None, int | None] = (None, None),
    learnable_sink: Tensor | None = None,
    softcap: float = 0.0,
) -> tuple[Tensor, None]:
    """In place of flash-attn-4's, whose arguments these are."""
    assert causal and window_size[1] in (None, 0)
    return dense(q, k, v, window_size[0], softcap, learnable_sink), None


def flash_attn_varlen_func(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    causal: bool = False,
) -> tuple[Tensor, None]:
    assert causal and cu_seqlens_q.dtype == torch.int32 and torch.equal(cu_seqlens_q, cu_seqlens_k)
    assert max_seqlen_q == max_seqlen_k == int(cu_seqlens_q.diff().max())
    parts = zip(*(x.split(cu_seqlens_q.diff().tolist()) for x in (q, k, v)), strict=True)
    made = [dense(*(x[None] for x in part), None, 0.0, None)[0] for part in parts]
    return torch.cat(made), None


def differentiable(
    flex: Callable[..., Tensor],
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    score_mod: Callable[..., Tensor] | None,
    block_mask: Any,
    enable_gqa: bool,
) -> Tensor:
    """FlexAttention by its own modifications, which on a CPU has no gradient itself."""
    options = {"score_mod": score_mod, "block_mask": block_mask, "enable_gqa": enable_gqa}
    with torch.no_grad():
        wanted = flex(*(t.detach() for t in (q, k, v)), **options)
    k, v = (t.repeat_interleave(q.shape[1] // k.shape[1], 1) for t in (k, v))
    sizes = (*q.shape[:3], k.shape[2])
    places = [
        torch.arange(n).view([-1 if d == i else 1 for d in range(4)]) for i, n in enumerate(sizes)
    ]
    s = q @ k.mT / math.sqrt(q.shape[3])
    s = s if score_mod is None else score_mod(s, *places)
    seen = block_mask.mask_mod(*places)
    out = torch.softmax(s.masked_fill(~seen, -torch.inf), -1) @ v
    torch.testing.assert_close(out.detach(), wanted, rtol=1e-4, atol=1e-4)
    return out


@pytest.fixture
def every_peer(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """flash-attn-4 is there, and FlexAttention is not compiled and has gradients."""
    fake = ModuleType("flash_attn.cute")
    fake.flash_attn_func = flash_attn_func  # type: ignore[attr-defined]
    fake.flash_attn_varlen_func = flash_attn_varlen_func  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "flash_attn", ModuleType("flash_attn"))
    monkeypatch.setitem(sys.modules, "flash_attn.cute", fake)
    monkeypatch.setattr(peers, "has_flash_attn_4", lambda device: True)
    monkeypatch.setattr(peers, "compiled", lambda flex: partial(differentiable, flex))
    return fake


def measured(p: Problem, impls: tuple[str, ...] = ("torch", "reference")) -> dict[str, Any]:
    made = variants.contenders(p, CPU, impls, with_compile=True)
    return measure_cell(made, work(p), once, 1)


def once(function: Callable[[], Any]) -> float:
    function()
    return 2.0


def expected(p: Problem) -> set[str]:
    ours, plain = "flashproto[reference]", "(plain, reference)"
    if p.kind == "padding":
        return {ours, "sdpa", "flex"}
    if p.kind == "tree":
        return {ours, plain, "flex"}
    names = {ours, "fa4", *(["flex"] if p.score != "sinks" else []), *([plain] if plainer(p) else [])}
    if p.score == "alibi":
        names -= {"fa4"}
    return names | {f"{ours} varlen"} if p.packed else names


@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
@pytest.mark.parametrize("key", list(cells()))
def test_every_contender_computes_what_the_cell_is_of(key: str, every_peer: ModuleType) -> None:
    p = cells()[key]
    found = measured(p)
    assert set(found) == {"forward", "backward"}
    for which, results in found.items():
        assert set(results) == expected(p)
        for name, figures in results.items():
            assert "error" not in figures, (which, name, figures)
            flops = getattr(work(p), which)
            if name.startswith("(plain"):
                flops *= pairs(plainer(p)) / pairs(p)
            assert figures["value"] == pytest.approx(flops / 2.0)


def rounded(x: Tensor) -> Tensor:
    return x.bfloat16().float()


class RoundedAsFused(torch.autograd.Function):
    """Attention with a fused kernel's roundings to bfloat16, of P, out and dS, delta from that out,
    and a softcap that is off by as much as the card's tanh."""

    @staticmethod
    def forward(ctx, q, k, v, sinks, p, bias):
        q, k, v = (t.float() for t in (q, k, v))
        k, v = (t.repeat_interleave(p.Hq // p.Hkv, 1) for t in (k, v))
        s, slope = q @ k.mT * p.D**-0.5, 1.0
        if p.score == "softcap":
            t = torch.tanh(s / 30) * (1 + 5e-4 * (2 * torch.rand_like(s) - 1))
            s, slope = 30 * t, 1 - t * t
        s = s + bias
        every = [s] if sinks is None else [s, sinks[:, None, None].expand(*s.shape[:3], 1)]
        lse = torch.logsumexp(torch.cat(every, -1), -1, keepdim=True)
        probabilities = torch.exp(s - lse)
        out = rounded(probabilities) @ v
        ctx.kept = p, q, k, v, sinks, lse, probabilities, slope, rounded(out)
        return out.bfloat16()

    @staticmethod
    def backward(ctx, dout):
        p, q, k, v, sinks, lse, probabilities, slope, out = ctx.kept
        delta = (dout.float() * out).sum(-1, keepdim=True)
        ds = rounded(probabilities * (dout.float() @ v.mT - delta) * slope) * p.D**-0.5
        dk, dv = ds.mT @ q, rounded(probabilities).mT @ dout.float()
        of_groups = [t.unflatten(1, (p.Hkv, -1)).sum(2) for t in (dk, dv)]
        grads = [t.bfloat16() for t in (ds @ k, *of_groups)]
        dsinks = None
        if sinks is not None:
            dsinks = -(torch.exp(sinks[:, None, None] - lse) * delta).sum((0, 2, 3))
        return *grads, dsinks, None, None


@pytest.mark.parametrize("key", list(cells()))
def test_right_results_in_bfloat16_pass_the_check(key: str, monkeypatch: pytest.MonkeyPatch) -> None:
    p = replace(cells()[key], dtype=torch.bfloat16)
    bias = torch.zeros(()).masked_fill(~mask_of(p).visible(p.S, p.S), -torch.inf)
    if p.score == "alibi":
        distance = torch.arange(p.S)[:, None] - torch.arange(p.S)
        bias = bias - 2.0 ** (-8 * torch.arange(1, p.Hq + 1) / p.Hq)[:, None, None] * distance

    def attention(impl: str, given: dict[str, Any]) -> Callable[..., Tensor]:
        return lambda q, k, v, sinks=None: RoundedAsFused.apply(q, k, v, sinks, p, bias)

    monkeypatch.setattr(variants, "attention", attention)
    monkeypatch.setattr(variants, "by_default", attention)
    # One draw: so few terms of a sink's gradient may cancel, which leaves more than 5% of rounding.
    torch.manual_seed(0)
    made = variants.contenders(p, CPU, ("reference",), with_compile=False)
    name = "flashproto[reference]"
    for results in measure_cell({name: made[name]}, work(p), once, 1).values():
        assert "error" not in results[name], results


def test_a_peer_that_is_set_up_wrongly_gets_no_time(every_peer: Any) -> None:
    def one_key_more(*tensors: Tensor, window_size: Any, **options: Any) -> Any:
        return flash_attn_func(*tensors, window_size=(window_size[0] + 1, 0), **options)

    def without_sinks(*tensors: Tensor, learnable_sink: Tensor, **options: Any) -> Any:
        sinks = learnable_sink.detach() + 0 * learnable_sink  # right forward, no gradient
        return flash_attn_func(*tensors, learnable_sink=sinks, **options)

    found = cells()
    every_peer.flash_attn_func = one_key_more
    results = measured(found["window 32 D64 S512"])
    for which in ("forward", "backward"):
        assert "wrong result: out" in results[which]["fa4"]["error"]
    every_peer.flash_attn_func = without_sinks
    results = measured(found["sinks D128 S128"])
    assert "ms" in results["forward"]["fa4"]
    assert "wrong result: dsinks" in results["backward"]["fa4"]["error"]
    every_peer.flash_attn_func = lambda *t, softcap, **o: flash_attn_func(*t, softcap=softcap / 20, **o)
    assert "wrong result" in measured(found["softcap 30 D64 S128"])["forward"]["fa4"]["error"]


@pytest.mark.parametrize(
    ("kind", "names"),
    [
        ("sequences", {"flashproto[triton]", "flashproto[triton] varlen", "(plain, triton)"}),
        ("padding", {"flashproto[triton]"}),
    ],
)
def test_contenders_of_kernels(kind: str, names: set[str]) -> None:
    """In Triton's interpreter, small."""
    if torch.cuda.is_available():
        pytest.skip("the interpreter is for a CPU")
    p = Problem(2 if kind == "padding" else 1, 2, 1, (18, 14), 16, torch.float32, kind=kind)
    made = variants.contenders(p, CPU, ("triton",), with_compile=False)
    for results in measure_cell({n: made[n] for n in names}, work(p), once, 1).values():
        assert set(results) == names
        assert not [figures for figures in results.values() if "error" in figures]


def test_the_subject_runs_without_a_gpu(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = [
        "variants",
        "--quick",
        "--device",
        "cpu",
        "--cells",
        "documents",
        "--out",
        str(tmp_path),
    ]
    bench.main([*arguments, "--repeats", "1", "--rep-ms", "1"])
    text = capsys.readouterr().out
    assert "ours/best peer" in text and "wanted" not in text
    data = json.loads((tmp_path / "variants.json").read_text())
    for cell in data["cells"].values():
        for by_name in cell["passes"].values():
            assert all(figures["ms"] > 0 for figures in by_name.values())
    assert (tmp_path / "variants.png").stat().st_size > 1000
    bench.main([*arguments, "--resume", "--goals"])
    assert f"below a goal: {2 * len(variants.GOALS)} of" in capsys.readouterr().out


# --- goals ----------------------------------------------------------------------------------------

SPEEDS = {  # TFLOP/s, forward and backward
    "flashproto[hopper]": (600.0, 500.0),
    "flashproto[hopper] varlen": (580.0, 480.0),
    "flashproto[triton]": (300.0, 200.0),
    "(plain, hopper)": (620.0, 520.0),
    "(plain, triton)": (310.0, 210.0),
    "fa4": (500.0, 470.0),
    "flex": (300.0, 310.0),
}


def made_up(keys: list[str]) -> dict[str, Any]:
    """A result file of cells that all are as fast."""
    known = cells(device=GPU)
    run = report.describe_run({"copy_gb_s": 4000.0, "matmul_tflop_s": 800.0, "matmul": "8x8"}, {})
    data: dict[str, Any] = {"subject": "variants", "runs": [run], "cells": {}}
    for key in keys:
        passes: dict[str, Any] = {}
        for i, which in enumerate(("forward", "backward")):
            flops = getattr(work(known[key]), which)
            passes[which] = {n: {"value": v[i], "ms": flops / v[i]} for n, v in SPEEDS.items()}
        data["cells"][key] = {"run": 0, "unit": "TFLOP/s", "passes": passes, "ceiling": 800.0}
    return data


def test_goals_are_of_cells_that_a_quick_run_has() -> None:
    quick = list(cells(True, GPU))
    assert set(quick) < set(cells(device=GPU))
    for goal in variants.GOALS:
        assert len([key for key in cells(device=GPU) if key.startswith(goal.cell)]) == 1
        assert [key for key in quick if key.startswith(goal.cell)]
    assert all(any(key.startswith(goal.cell) for goal in variants.GOALS) for key in quick)


def test_goals_say_what_is_reached() -> None:
    text = variants.goals(made_up(list(cells(True, GPU))))
    rows = [" ".join(line.split()) for line in text.splitlines()]
    window = "window 1024 D128 S16384"
    assert f"{window} forward flashproto[hopper] 1.200 x fa4 wanted 1.05 yes" in rows
    assert f"{window} backward flashproto[hopper] 1.064 x fa4 wanted 1.0 yes" in rows
    packed = "8 documents of 2048 D128 S16384"
    assert f"{packed} backward flashproto[hopper] varlen 1.021 x fa4 wanted 1.05 NO" in rows
    assert f"{packed} forward flashproto[hopper] varlen 0.935 x (plain, hopper) wanted 0.9 yes" in rows
    assert "softcap 30 D128 S4096 forward flashproto[hopper] 1.200 x fa4 wanted 1.5 NO" in rows
    assert f"{window} tiles of 128 hold 1.125 times the visible pairs" in rows
    below = sum(row.endswith(" NO") for row in rows)
    assert rows[-1] == f"below a goal: {below} of 20" and below == 3
    nothing = variants.goals({"cells": {}}).splitlines()
    assert len(nothing) == 21 and nothing[-1] == "below a goal: 20 of 20"


def test_a_plain_problem_is_no_peer_and_not_ours() -> None:
    results = {name: {"ms": 1 / v[0]} for name, v in SPEEDS.items()}
    assert report.ratio(results) == pytest.approx(600 / 500)
    assert speed.best_peer(results) == "fa4"
    by_cell = {"a": {"unit": "TFLOP/s", "passes": {"forward": dict(reversed(results.items()))}}}
    assert report.contenders(by_cell)[2].startswith("flashproto")
    assert report.contenders(by_cell)[3].startswith("(plain")


def test_the_work_of_a_contender_may_be_another() -> None:
    x = torch.randn(2, 3, requires_grad=True)

    def check(out: Tensor, grads: Any) -> str | None:
        return compare({"out": out}, {"out": 2 * x})

    made = {
        n: lambda s=s: Prepared(lambda: 2 * x, [x], x.detach(), check, share=s)
        for n, s in (("a", 1.0), ("b", 0.5))
    }
    found = measure_cell(made, Work("TFLOP/s", 8.0, 20.0), once, 1)
    assert {n: r["value"] for n, r in found["forward"].items()} == {"a": 4.0, "b": 2.0}
    assert {n: r["value"] for n, r in found["backward"].items()} == {"a": 10.0, "b": 5.0}


# --- first calls ----------------------------------------------------------------------------------


def test_first_calls_measure_and_count(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    first_calls.one("varlen", "reference", "cpu")
    found = json.loads(capsys.readouterr().out)
    assert found["forward"] > 0 and found["backward"] > 0
    assert (found["compiled"], found["anew"]) == ([], {"values": [], "lengths": []})

    def figures(name: str, impl: str, device: torch.device) -> dict[str, Any]:
        told = {"variant": name, "impl": impl}
        if name == "alibi":
            return told | {"error": "no such kernel"}
        return told | {
            "forward": 7.0,
            "backward": 13.0,
            "compiled": ["a", "b"],
            "anew": {"values": [], "lengths": ["a"]},
        }

    monkeypatch.setattr(first_calls, "figures", figures)
    bench.main(["variants", "--first-calls", "--device", "cpu", "--goals", "--out", str(tmp_path)])
    lines = [line for line in capsys.readouterr().out.splitlines() if " reference " in line]
    lines = [line for line in lines if line.split()[0] in first_calls.NAMES]
    assert [line.split()[0] for line in lines] == list(first_calls.NAMES)
    assert "forward  7.00 s (at most 8: yes), backward 13.00 s (at most 12: NO)" in lines[0]
    assert "2 kernels; nothing compiled for other values; a compiled for other lengths" in lines[0]
    assert lines[-1].endswith("error: no such kernel")
    data = json.loads((tmp_path / "first_calls.json").read_text())
    assert len(data["first_calls"]) == len(first_calls.NAMES)
    page = speed.page([{"first_calls": data}], [])
    assert "| window | reference | 7.0 | 13.0 | none compiled | 1 compiled |" in page
    with pytest.raises(SystemExit):
        bench.main(["variants", "norm", "--first-calls"])
    assert "variants alone" in capsys.readouterr().err


def test_first_calls_of_a_process_that_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(first_calls, "CODE", "raise SystemExit('no GPU: ' + {arguments!r}[0])")
    found = first_calls.figures("window", "hopper", CPU)
    assert found == {
        "variant": "window",
        "impl": "hopper",
        "error": "no GPU: window",
    }


def test_kernels_that_are_compiled_are_counted() -> None:
    compilation = pytest.importorskip("triton").knobs.compilation
    before = compilation.listener
    with first_calls.compiled_meanwhile() as names:
        source = SimpleNamespace(name="a_kernel")
        compilation.listener(src=source, metadata={}, metadata_group={}, times=None, cache_hit=False)
    assert names == ["a_kernel"]
    assert compilation.listener is before


# --- what the documentation shows -----------------------------------------------------------------


def test_documentation_shows_the_results_where_there_are_some(tmp_path: Path) -> None:
    root = tmp_path / "checkout"
    shutil.copytree(docs.ROOT / "docs" / "results", root / "docs" / "results")
    (root / "README.md").write_text((docs.ROOT / "README.md").read_text())
    for measured_already in (root / "docs" / "results").glob("*/*"):
        if measured_already.stem in ("variants", "first_calls"):
            measured_already.unlink()
    speed_md = root / "docs" / "speed.md"
    without = docs.texts(root)[speed_md]
    assert without is not None and "variants" not in without
    target = root / "docs" / "results" / "another" / "variants.json"  # a card with nothing else
    target.parent.mkdir()
    target.write_text(json.dumps(made_up(list(cells(device=GPU)))))
    text = docs.texts(root)[speed_md]
    assert text is not None
    assert "## Attention's variants: `variants`" in text
    assert "![Attention's variants, forward and backward](pictures/variants.png)" in text
    row = next(line for line in text.splitlines() if line.startswith("| tree of 8x1024"))
    assert "600 / 500" in row and "620 / 520" in row and row.endswith("| 1.200 / 1.064 |")
    picture = docs.PICTURES["variants"]
    assert set(picture.cells) <= set(cells(True, GPU))
    pictures = docs.draw([{}, {"variants": json.loads(target.read_text())}], tmp_path)
    assert [path.name for path in pictures] == ["variants.png"]
    assert pictures[0].stat().st_size > 1000
