"""The benchmark of attention's variants: what it counts, that contenders compute what their cell is of,
its goals, and what the documentation shows of it."""

from __future__ import annotations

import json
import random
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import fake_peers
import pytest
import torch
from attention_problem import Problem as Shape
from torch import Tensor
from variant_problem import FEATURES, drawn

import flashproto
from flashproto import masks
from flashproto.bench import __main__ as bench
from flashproto.bench import attention as exact_attention
from flashproto.bench import docs, first_calls, peers, report, speed, variant_goals, variants
from flashproto.bench.measure import Prepared, Work, compare, measure_cell
from flashproto.bench.variant_problems import (
    DROPOUT,
    LEARNED,
    RULES,
    Problem,
    learned,
    mask_of,
    options,
    pairs,
    plainer,
    problems,
    tiles,
    work,
)
from flashproto.bench.visible import visible_pairs, visited_pairs
from flashproto.reference.mask_table import packed

CPU, GPU = torch.device("cpu"), torch.device("cuda")
SEEN = ("causal", "top_left", "left_window", "right_window", "first_keys")
SEEN += ("documents", "padding", "prefix", "tree", "intervals", "boolean", "either")


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
        "bias D128 S2048": 2048**2,
        "relative bias 4095 D128 S2048": 2048**2,
        "boolean tiles D128 S2048": 2048**2 // 2,
        # 256 blocks: noisy with themselves, noisy with clean ones before, clean with clean ones.
        "block diffusion 16 D128 S8192": 16**2 * (256 + triangle(255) + triangle(256)),
        # 64 rows and columns, and what is behind them of the window of 257.
        "global tokens D128 S8192": 128 * 8192 - 64**2 + 257 * (8192 - 64) - 2 * triangle(128),
        "dropout 0.1 D128 S4096": triangle(4096),
        "causal D512 S4096": triangle(4096),
        "causal D192/128 S4096": triangle(4096),
        "max_score D128 S16384": triangle(S),
    }
    for key, count in by_hand.items():
        p = found[key]
        assert pairs(p) == p.B * p.Hq * count
        flops = 2 * pairs(p) * (p.D + (p.Dv or p.D))
        assert work(p).forward == flops / 1e9
        assert work(p).backward == 2.5 * flops / 1e9
        assert work(p).forward_only == (p.score == "max_score")
    assert pairs(found["boolean 0.9 D128 S2048"]) == pytest.approx(0.9 * 64 * 2048**2, rel=1e-3)
    assert tiles(found["boolean tiles D128 S2048"]) == 1.0
    p = found["16 sequences of 128 to 4096 D128 S16384"]
    assert sum(p.lengths) == S and len(p.lengths) == 16
    assert pairs(p) == p.Hq * sum(map(triangle, p.lengths))
    # Tiles of 128: a window of 1024 visits 9 for 8, but in the first rows.
    assert tiles(found["window 1024 D128 S16384"]) == pytest.approx(9 / 8, rel=1e-2)
    assert tiles(found["softcap 30 D128 S4096"]) == pytest.approx(33 / 32, rel=1e-3)
    for p in found.values():
        assert p.Hq * (p.Dv or p.D) == (4096 if p.Hkv < p.Hq else 2048)
        simple = plainer(p)
        assert simple is None or (simple.S, simple.B) == (p.S, p.B)
        alone = (p.window > 0 and not p.score) or p.kind in ("padding", *RULES) or p.Dv > 0
        alone = alone or p.D > 256
        assert (simple is None) == alone


# --- contenders -----------------------------------------------------------------------------------


@pytest.fixture
def every_peer(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """All are there; FlexAttention is not compiled and has gradients.  It returns flash-attn-4."""
    monkeypatch.setattr(variants, "learned", in_bfloat16)
    return fake_peers.install(monkeypatch)


def in_bfloat16(p: Problem, device: torch.device) -> Tensor | None:
    """What is learned, as FlashAttention-3 takes it."""
    made = learned(p, device)
    return None if made is None else made.bfloat16().to(made.dtype)


def measured(p: Problem, impls: tuple[str, ...] = ("torch", "reference")) -> dict[str, Any]:
    made = variants.contenders(p, CPU, impls, with_compile=True)
    return measure_cell(made, work(p), once, 1)


def once(function: Callable[[], Any]) -> float:
    function()
    return 2.0


def expected(p: Problem) -> set[str]:
    """The contenders of the forward pass."""
    if p.D > 256:
        return {"flashproto[reference]", "sdpa", "flex", "ffpa", "ffpa-cutedsl"}
    ours, one, plain_scores = "flashproto[reference]", p.kind == "sequences", p.score in ("", "sinks")
    there = {
        ours: True,
        f"{ours} varlen": p.packed,
        "(plain, reference)": plainer(p) is not None,
        "sdpa": p.kind in ("padding", "boolean", "tiles") or p.score in ("bias", "dropout") or p.Dv,
        "flex": p.score not in ("sinks", "dropout", "max_score"),
        "flex-flash": not p.score,
        "fa4": one and (plain_scores or p.score == "softcap"),
        "fa3": one and plain_scores and not p.Dv,
        "cudnn-flex": p.kind != "boolean" and (plain_scores or p.score == "max_score"),
        "cudnn-flex varlen": p.packed,
    }
    return {name for name, is_there in there.items() if is_there}


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
@pytest.mark.parametrize("key", list(cells()))
def test_every_contender_computes_what_the_cell_is_of(key: str, every_peer: ModuleType) -> None:
    p = cells()[key]
    found = measured(p)
    assert set(found) == ({"forward"} if p.score == "max_score" else {"forward", "backward"})
    for which, results in found.items():
        assert set(results) == expected(p) - ({"fa3"} if which == "backward" else set())
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
    and a softcap that is off by as much as the card's tanh.

    added: sinks, a bias or a table of relative biases; factor: of probabilities after the softmax."""

    @staticmethod
    def forward(ctx, q, k, v, added, p, bias, factor):
        q, k, v = (t.float() for t in (q, k, v))
        k, v = (t.repeat_interleave(p.Hq // p.Hkv, 1) for t in (k, v))
        s, slope = q @ k.mT * p.D**-0.5, 1.0
        if p.score == "softcap":
            t = torch.tanh(s / 30) * (1 + 5e-4 * (2 * torch.rand_like(s) - 1))
            s, slope = 30 * t, 1 - t * t
        s = s + bias
        if p.score == "bias":
            s = s + added
        if p.score == "relative bias":
            s = s + added[:, columns(p)]
        every = [s]
        if p.score == "sinks":
            every.append(added[:, None, None].expand(*s.shape[:3], 1))
        lse = torch.logsumexp(torch.cat(every, -1), -1, keepdim=True)
        probabilities = torch.exp(s - lse)
        out = rounded(probabilities * factor) @ v
        ctx.kept = p, q, k, v, added, lse, probabilities, slope, rounded(out), factor
        return out.bfloat16()

    @staticmethod
    def backward(ctx, dout):
        p, q, k, v, added, lse, probabilities, slope, out, factor = ctx.kept
        delta = (dout.float() * out).sum(-1, keepdim=True)
        of_scores = rounded(probabilities * (dout.float() @ v.mT * factor - delta) * slope)
        ds = of_scores * p.D**-0.5
        dk, dv = ds.mT @ q, rounded(probabilities * factor).mT @ dout.float()
        of_groups = [t.unflatten(1, (p.Hkv, -1)).sum(2) for t in (dk, dv)]
        grads = [t.bfloat16() for t in (ds @ k, *of_groups)]
        dadded = None
        if p.score == "sinks":
            dadded = -(torch.exp(added[:, None, None] - lse) * delta).sum((0, 2, 3))
        if p.score == "bias":
            dadded = of_scores.sum(0).bfloat16()
        if p.score == "relative bias":
            places = columns(p).flatten()
            dadded = torch.zeros_like(added).index_add(1, places, of_scores.sum(0).flatten(1))
        return *grads, dadded, None, None, None


def columns(p: Problem) -> Tensor:
    """Of a table of relative biases, for each pair."""
    i = torch.arange(p.S)
    return (i[:, None] - i + p.columns // 2).clamp(0, p.columns - 1)


def factor(p: Problem) -> Tensor:
    """Of probabilities: what dropout makes of them."""
    if p.score != "dropout":
        return torch.ones(())
    given = options(p, CPU)
    kept = flashproto.dropout_mask(DROPOUT, given["dropout_seed"], (p.B, p.Hq, p.S, p.S))
    return kept / (1 - round(DROPOUT * 65536) / 65536)


@pytest.mark.slow
@pytest.mark.parametrize("key", list(cells()))
def test_right_results_in_bfloat16_pass_the_check(key: str, monkeypatch: pytest.MonkeyPatch) -> None:
    p = replace(cells()[key], dtype=torch.bfloat16)
    bias = torch.zeros(()).masked_fill(~mask_of(p).visible(p.S, p.S), -torch.inf)
    if p.score == "alibi":
        distance = torch.arange(p.S)[:, None] - torch.arange(p.S)
        bias = bias - 2.0 ** (-8 * torch.arange(1, p.Hq + 1) / p.Hq)[:, None, None] * distance

    def attention(impl: str, given: dict[str, Any], name: str | None = None) -> Callable[..., Any]:
        def call(q: Tensor, k: Tensor, v: Tensor, added: Tensor | None = None) -> Any:
            out = RoundedAsFused.apply(q, k, v, added, p, bias, factor(p))
            if p.score != "max_score":
                return out
            return out, (q.float() @ k.float().mT * p.D**-0.5 + bias).amax(-1)

        return call

    monkeypatch.setattr(variants, "attention", attention)
    monkeypatch.setattr(variants, "by_default", attention)
    # One draw: so few terms of a sink's gradient may cancel, which leaves more than 5% of rounding.
    torch.manual_seed(0)
    made = variants.contenders(p, CPU, ("reference",), with_compile=False)
    name = "flashproto[reference]"
    for results in measure_cell({name: made[name]}, work(p), once, 1).values():
        assert "error" not in results[name], results


def test_a_peer_that_is_set_up_wrongly_gets_no_time(every_peer: Any) -> None:
    flash_attn_func = fake_peers.flash_attn_func

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


def test_wrong_biases_masks_and_maxima_get_no_time(monkeypatch: pytest.MonkeyPatch) -> None:
    wrong: dict[str, Callable[[dict[str, Any]], dict[str, Any]]] = {
        "bias": lambda given: given | {"bias": given["bias"].detach() + given["bias"] * 0},
        "relative bias 9": lambda given: given | {"relative_offset": given["relative_offset"] + 1},
        "boolean 0.9": lambda given: given | {"mask": given["mask"] | masks.global_tokens(1)},
        "block diffusion": lambda given: given | {"mask": masks.block_diffusion(32)},
        "global tokens": lambda given: given | {"mask": given["mask"] | masks.window(0, 5)},
        "dropout": lambda given: given | {"dropout_seed": given["dropout_seed"] + 1},
        "max_score": lambda given: given | {"return_aux": ("entropy",)},
    }
    right = flashproto.attention
    for name, change in wrong.items():
        monkeypatch.setattr(
            flashproto,
            "attention",
            lambda q, k, v, change=change, **given: right(q, k, v, **change(given)),
        )
        p = next(p for key, p in cells().items() if key.startswith(name))
        found = {which: r["flashproto[reference]"] for which, r in measured(p).items()}
        if name == "bias":  # right forward, no gradient
            assert "ms" in found.pop("forward")
            assert "wrong result: dbias" in found["backward"]["error"]
        if name == "max_score":
            assert "wrong result: max_score" in found["forward"]["error"]
        assert all("wrong result" in figures["error"] for figures in found.values()), name


def test_dropout_of_a_peer_is_checked_in_the_mean(monkeypatch: pytest.MonkeyPatch) -> None:
    p = next(p for p in cells().values() if p.score == "dropout")
    p = replace(p, lengths=(512,))  # many rows, so that a tenth is beyond what they differ by
    assert "ms" in measured(p)["backward"]["sdpa"]
    right = peers.sdpa

    def without_the_factor(backend: Any, **options: Any) -> Callable[..., Tensor]:
        call = right(backend, **options)
        return lambda *tensors: call(*tensors) * (1 - DROPOUT)

    monkeypatch.setattr(peers, "sdpa", without_the_factor)
    assert "wrong result: out has 0." in measured(p)["forward"]["sdpa"]["error"]


@pytest.mark.parametrize(
    "key", ["bias D128 S64", "relative bias 9 D128 S64", "global tokens D128 S256"]
)
def test_the_exact_result_is_the_same_in_pieces(key: str, monkeypatch: pytest.MonkeyPatch) -> None:
    p = cells()[key]
    q, k, v, grad = (torch.randn(p.B, p.Hq, p.S, p.D) for _ in range(4))
    variant: dict[str, Any] = {n: x for n, x in options(p, CPU).items() if n == "relative_offset"}
    if p.score:
        variant[LEARNED[p.score]] = learned(p, CPU)
    else:
        variant["bits"] = packed(mask_of(p).visible(p.S, p.S))[0]
    found = []
    for most in (p.S**2, 24 * p.S):
        monkeypatch.setattr(exact_attention, "PIECE", most)
        found.append(exact_attention.Sampled(p, q, k, v, grad, **variant).want)
    for whole, pieces in zip(*found, strict=True):
        torch.testing.assert_close(pieces, whole, rtol=1e-4, atol=1e-5)


def test_dropout_of_the_exact_result_is_that_of_dropout_mask() -> None:
    p = Problem(2, 4, 2, (24,), 8, torch.float32, score="dropout")
    q, k, v, grad = (torch.randn(2, n, 24, 8, requires_grad=True) for n in (4, 2, 2, 4))
    given = {n: x for n, x in options(p, CPU).items() if n.startswith("dropout")}
    sampled = exact_attention.Sampled(p, q, k, v, grad, **given)
    s = q @ k.repeat_interleave(2, 1).mT * 8**-0.5
    probabilities = torch.softmax(s.masked_fill(torch.ones(24, 24).triu(1) > 0, -torch.inf), -1)
    out = probabilities * factor(p) @ v.repeat_interleave(2, 1)
    assert len(sampled.parts) == 2 and sampled.check(out, None) is None
    assert sampled.check(out, torch.autograd.grad(out, (q, k, v), grad.detach())) is None


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "others"),
    [
        ("sequences", {}),
        ("padding", {}),
        ("full", {"score": "bias"}),
        ("full", {"score": "relative bias", "columns": 9}),
        ("tiles", {}),
        ("block diffusion", {"lengths": (64,)}),
        ("global tokens", {"lengths": (128,)}),
        ("sequences", {"score": "dropout", "lengths": (32,)}),
        ("sequences", {"D": 24, "Dv": 16, "lengths": (32,)}),
        ("sequences", {"score": "max_score", "lengths": (32,)}),
    ],
)
def test_contenders_of_kernels(kind: str, others: dict[str, Any]) -> None:
    """In Triton's interpreter, small."""
    if torch.cuda.is_available():
        pytest.skip("the interpreter is for a CPU")
    several = 2 if kind in ("padding", "tiles") or others.get("score") in LEARNED else 1
    p = Problem(several, 2, 1, (18, 14), 16, torch.float32, kind=kind)
    p = replace(p, **others)
    made = variants.contenders(p, CPU, ("triton",), with_compile=False)
    names = {name for name in made if "triton" in name}
    assert names == {
        name.replace("reference", "triton") for name in expected(p) if "[" in name or "(" in name
    }
    for results in measure_cell({n: made[n] for n in names}, work(p), once, 1).values():
        assert set(results) == names
        assert not [figures for figures in results.values() if "error" in figures]


def test_a_backend_that_does_not_take_a_cell_says_why() -> None:
    p = next(p for p in cells().values() if p.score == "bias")
    for results in measured(p, ("hopper",)).values():
        assert results["flashproto[hopper]"]["error"].startswith("BackendError: ")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("which", "keys"),
    [
        (["--quick", "--cells", "documents"], ["8 documents of 64 D128 S512"]),
        (["--cells", "tiles|max_score"], ["boolean tiles D128 S64", "max_score D128 S512"]),
    ],
)
def test_the_subject_runs_without_a_gpu(
    which: list[str], keys: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = ["variants", *which, "--device", "cpu", "--out", str(tmp_path)]
    bench.main([*arguments, "--repeats", "1", "--rep-ms", "1"])
    text = capsys.readouterr().out
    assert "times best peer" in text and "wanted" not in text
    data = json.loads((tmp_path / "variants.json").read_text())
    assert list(data["cells"]) == keys
    for cell in data["cells"].values():
        for by_name in cell["passes"].values():
            assert all(figures["ms"] > 0 for figures in by_name.values())
    assert (tmp_path / "variants.png").stat().st_size > 1000
    bench.main([*arguments, "--resume", "--goals"])
    assert "below a goal: 18 of 18" in capsys.readouterr().out


# --- goals ----------------------------------------------------------------------------------------

SPEEDS = {  # TFLOP/s, forward and backward
    "flashproto[hopper]": (600.0, 500.0),
    "flashproto[hopper] varlen": (580.0, 480.0),
    "flashproto[triton]": (300.0, 200.0),
    "(plain, hopper)": (620.0, 520.0),
    "(plain, triton)": (310.0, 210.0),
    "fa4": (500.0, 470.0),
    "flex": (300.0, 310.0),
    "flex-flash": (400.0, 390.0),
}


def made_up(keys: list[str], speeds: dict[str, tuple[float, float]] | None = None) -> dict[str, Any]:
    """A result file of cells that all are as fast."""
    known = cells(device=GPU)
    run = report.describe_run({"copy_gb_s": 4000.0, "matmul_tflop_s": 800.0, "matmul": "8x8"}, {})
    data: dict[str, Any] = {"subject": "variants", "runs": [run], "cells": {}}
    for key in keys:
        passes: dict[str, Any] = {}
        for i, which in enumerate(("forward", "backward")):
            flops = getattr(work(known[key]), which)
            passes[which] = {
                n: {"value": v[i], "ms": flops / v[i]} for n, v in (speeds or SPEEDS).items()
            }
        data["cells"][key] = {"run": 0, "unit": "TFLOP/s", "passes": passes, "ceiling": 800.0}
    return data


def test_goals_are_of_cells_that_there_are() -> None:
    every, quick = list(cells(device=GPU)), list(cells(True, GPU))
    assert set(quick) < set(every)
    for goal in variant_goals.GOALS:
        assert len([key for key in every if key.startswith(goal.cell)]) == 1
    assert all(any(key.startswith(goal.cell) for goal in variant_goals.GOALS) for key in quick)
    # Beside those of a quick run, of what a bias, a table or a mask of any kind is in.
    later = {
        goal.cell for goal in variant_goals.GOALS if not any(key.startswith(goal.cell) for key in quick)
    }
    assert len(later) == 11 and "bias D128 " in later


def rows_of_goals(data: dict[str, Any]) -> list[str]:
    return [" ".join(line.split()) for line in variants.goals(data).splitlines()]


def test_goals_say_what_is_reached() -> None:
    rows = rows_of_goals(made_up(list(cells(True, GPU))))
    window = "window 1024 D128 S16384"
    assert f"{window} forward flashproto[hopper] 1.200 x fa4 wanted 1.05 yes" in rows
    assert f"{window} backward flashproto[hopper] 1.064 x fa4 wanted 1.0 yes" in rows
    packed = "8 documents of 2048 D128 S16384"
    assert f"{packed} backward flashproto[hopper] varlen 1.021 x fa4 wanted 1.05 NO" in rows
    assert f"{packed} forward flashproto[hopper] varlen 0.935 x (plain, hopper) wanted 0.9 yes" in rows
    assert "softcap 30 D128 S4096 forward flashproto[hopper] 1.200 x fa4 wanted 1.5 NO" in rows
    assert f"{window} tiles of 128 hold 1.125 times the visible pairs" in rows
    below = sum(row.endswith(" NO") for row in rows)
    unmeasured = [row for row in rows if "not measured" in row]
    assert len(unmeasured) == 15
    assert "dropout 0.1 D128 forward: not measured beside (plain, own)" in unmeasured
    assert rows[-1] == f"below a goal: {below + 15} of 36" and below == 3
    assert rows[-2] == "not counted are goals against cudnn-flex, cudnn-flex varlen, which no cell has"
    assert rows_of_goals({"cells": {}})[-1] == "below a goal: 0 of 0"


def test_goals_of_the_second_half() -> None:
    later = [key for key in cells(device=GPU) if key not in cells(True, GPU)]
    data = made_up(later)
    rows = rows_of_goals(data)
    bias = "bias D128 S2048"
    assert f"{bias} backward flashproto[hopper] 1.613 x flex wanted 1.2 yes" in rows
    assert not [row for row in rows if row.startswith(bias) and "(plain" in row]
    diffusion = "block diffusion 16 D128 S8192"
    assert f"{diffusion} forward flashproto[hopper] 1.500 x flex-flash wanted 1.1 yes" in rows
    dims, largest = "causal D192/128 S4096", "max_score D128 S16384"
    assert f"{dims} forward flashproto[hopper] 2.000 x flex" in rows  # no goal
    assert f"{largest} forward flashproto[hopper] 0.968 x (plain, hopper)" in rows
    # Where hopper does not take a cell, the portable backend is compared with itself.
    for cell in data["cells"].values():
        for results in cell["passes"].values():
            results["flashproto[hopper]"] = {"error": "BackendError: its kernels have no bias"}
    rows = rows_of_goals(data)
    relative = "relative bias 257 D128 S2048"
    for key in (bias, relative):
        text = f"{key} forward flashproto[triton] 0.968 x (plain, triton) wanted"
        assert [row.startswith(text) for row in rows].count(True) == 1
    dropout = "dropout 0.1 D128 S4096 forward flashproto[triton]"
    assert f"{dropout} 0.968 x (plain, triton) wanted 0.7 yes" in rows
    # A wrong result is no reason to leave its goal out.
    for results in data["cells"][bias]["passes"].values():
        results["flashproto[hopper]"] = {"error": "wrong result: dbias"}
    assert "bias D128 forward: not measured beside flex" in rows_of_goals(data)


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
        if measured_already.stem.startswith(("variants", "first_calls")):
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
