"""Peers of the benchmarks: which of them a cell has, what they are given, and runs of some of them."""

from __future__ import annotations

import json
import shutil
import sys
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import Any

import fake_peers
import pytest
import torch
from test_bench_variants import CPU, GPU, SPEEDS, cells, made_up, once, rows_of_goals

from flashproto import env, masks
from flashproto.bench import __main__ as bench
from flashproto.bench import attention, docs, peers, speed
from flashproto.bench.measure import Prepared, Work, measure_cell
from flashproto.bench.variant_problems import mask_of
from flashproto.bench.visible import keys_before, keys_of_queries

# --- masks as intervals ---------------------------------------------------------------------------


@pytest.mark.parametrize("key", [key for key, p in cells().items() if p.kind != "boolean"])
def test_intervals_are_what_the_mask_shows(key: str) -> None:
    p = cells()[key]
    keys = keys_of_queries(mask_of(p), p.B, p.S, p.S)
    want = mask_of(p).visible(p.S, p.S).expand(p.B, 1, -1, -1)[:, 0]
    assert keys.dtype == torch.int32 and torch.equal(fake_peers.visible(keys[0], p.B, p.S), want)


def test_as_many_intervals_as_the_mask_has(monkeypatch: pytest.MonkeyPatch) -> None:
    found = {p.kind: keys_of_queries(mask_of(p), p.B, p.S, p.S).shape[1] for p in cells().values()}
    assert (found["padding"], found["global tokens"], found["block diffusion"]) == (1, 3, 5)
    (tiles,) = (p for p in cells(device=GPU).values() if p.kind == "tiles")
    assert keys_of_queries(mask_of(tiles), tiles.B, tiles.S, tiles.S).shape[1] <= 17
    seen = torch.rand(2, 1, 40, 30) < 0.5
    seen[0, 0, 3] = False
    seen[1, 0, 4] = True
    whole = keys_of_queries(masks.boolean(seen), 2, 40, 30)
    assert torch.equal(fake_peers.visible(whole[0], 2, 30), seen[:, 0])
    monkeypatch.setattr("flashproto.bench.visible.ROWS", 7)
    assert torch.equal(keys_of_queries(masks.boolean(seen), 2, 40, 30), whole)


def test_keys_before_are_causal() -> None:
    (lengths, square) = ((5, 1, 7), (6, 6))
    causal = [keys_of_queries(masks.causal(), 1, n, n) for n in lengths]
    assert torch.equal(keys_before(lengths), torch.cat(causal, -1))
    assert torch.equal(keys_before(square), keys_of_queries(masks.causal(), 2, 6, 6))


# --- contenders -----------------------------------------------------------------------------------


@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
@pytest.mark.parametrize("heads", [(4, 4), (4, 2)])
@pytest.mark.parametrize("causal", [False, True])
def test_peers_of_attention(
    causal: bool, heads: tuple[int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    fake_peers.install(monkeypatch)
    p = attention.Problem(2, *heads, 48, 64, causal, torch.float32)
    made = attention.contenders(p, CPU, ("reference",), with_compile=True)
    found = measure_cell(made, attention.work(p), once, 1)
    assert set(found["forward"]) == {"flashproto[reference]", "sdpa", "flex", "fa3", "cudnn-flex"}
    assert set(found["backward"]) == set(found["forward"]) - {"fa3"}
    assert not [x for results in found.values() for x in results.values() if "error" in x]


def test_no_peer_that_is_not_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("cudnn", "flash_attn_3", "liger_kernel", "cutlass"):
        monkeypatch.setitem(sys.modules, name, None)
    assert not (peers.has_cudnn_flex(GPU) or peers.has_flash_attn_3(GPU) or peers.has_liger_cutedsl())
    p = attention.Problem(1, 2, 2, 8, 16, True, torch.float32)
    assert not {"fa3", "cudnn-flex"} & set(attention.contenders(p, CPU, (), False))
    fake_peers.install(monkeypatch)
    assert {"fa3", "cudnn-flex"} <= set(attention.contenders(p, CPU, (), False))


def test_what_has_no_backward_is_not_asked_for_one() -> None:
    x = torch.randn(2, 3, requires_grad=True)

    def prepared(forward_only: bool) -> Prepared:
        return Prepared(
            lambda: x.detach() * 2, [x], x.detach(), lambda *a: None, forward_only=forward_only
        )

    made = {str(only): lambda only=only: prepared(only) for only in (False, True)}
    found = measure_cell(made, Work("TFLOP/s", 8.0, 20.0), once, 1)
    assert set(found["forward"]) == {"False", "True"} and set(found["backward"]) == {"False"}
    assert "error" in found["backward"]["False"]


def norm(x: torch.Tensor, *more: Any, impl: str) -> torch.Tensor:
    assert impl == "nvidia-cutedsl"
    *parameters, eps = more
    if len(parameters) == 2:
        return torch.nn.functional.layer_norm(x, x.shape[-1:], *parameters, eps)
    return torch.nn.functional.rms_norm(x, x.shape[-1:], *parameters, eps)


def cross_entropy(x: torch.Tensor, targets: torch.Tensor, *, impl: str) -> tuple[torch.Tensor, None]:
    """In place, as Liger's: of a leaf that wants a gradient."""
    assert impl == "nvidia-cutedsl"
    return InPlace.apply(x, targets), None


class InPlace(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        loss = torch.nn.functional.cross_entropy(x, targets)
        if x.requires_grad:
            gradient = torch.softmax(x, -1)
            gradient[torch.arange(len(x)), targets] -= 1
            x.data.copy_(gradient / len(x))
            ctx.made = x.data
        return loss

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, None]:
        return ctx.made * grads[0], None


@pytest.mark.parametrize("subject", ["norm", "cross_entropy"])
def test_kernels_of_cutedsl_of_liger(subject: str, monkeypatch: pytest.MonkeyPatch) -> None:
    fake = ModuleType("liger_kernel.functional")
    fake.layer_norm = fake.rms_norm = norm  # type: ignore[attr-defined]
    fake.cross_entropy = cross_entropy  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "liger_kernel.functional", fake)
    monkeypatch.setenv("LIGER_KERNEL_STRICT", "")
    module = import_module(f"flashproto.bench.{subject}")
    for place in (peers, module):
        monkeypatch.setattr(place, "has_liger_cutedsl", lambda: True, raising=False)
        monkeypatch.setattr(place, "is_importable", lambda name: False, raising=False)
    for p in module.problems(True, CPU):
        made = module.contenders(p, CPU, ("torch",), with_compile=False)
        found = measure_cell({"liger-cutedsl": made["liger-cutedsl"]}, module.work(p), once, 2)
        assert len(found) == 2
        assert not [x for results in found.values() for x in results.values() if "error" in x], found


# --- a run of some contenders ---------------------------------------------------------------------


def test_packages_of_a_site_directory_are_taken_first(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "path", [str(tmp_path / "older"), *sys.path])
    for folder in ("older", "site/packages", "other"):
        (tmp_path / folder).mkdir(parents=True)
        (tmp_path / folder / "a_peer_of_tests.py").write_text(f"where = {folder!r}")
    (tmp_path / "site" / "more.pth").write_text("packages\n")
    bench.add_peers(tmp_path / "other")
    bench.add_peers(tmp_path / "site")
    assert sys.path[:3] == [str(tmp_path / name) for name in ("site", "site/packages", "other")]
    assert import_module("a_peer_of_tests").where == "site/packages"
    monkeypatch.delitem(sys.modules, "a_peer_of_tests")


def test_a_run_of_other_contenders_has_a_file_of_its_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "path", [*sys.path])
    arguments = ["softmax", "--quick", "--device", "cpu", "--out", str(tmp_path), "--cells", "x256$"]
    arguments += ["--repeats", "1", "--rep-ms", "1", "--contenders", r"\[torch\]"]
    bench.main([*arguments, "--suffix", "cudnn", "--peers-path", str(tmp_path)])
    assert sys.path[0] == str(tmp_path)
    assert {path.name for path in tmp_path.iterdir()} == {"softmax_cudnn.json", "softmax_cudnn.png"}
    data = json.loads((tmp_path / "softmax_cudnn.json").read_text())
    assert data["subject"] == "softmax" and set(data["runs"][0]["environment"]["peers"]) == set(
        env.PEERS
    )
    bench.main([*arguments, "--suffix", "cudnn", "--resume"])


CUDNN = {
    **{name: v for name, v in SPEEDS.items() if name.startswith("flashproto[hopper]")},
    "cudnn-flex": (590.0, 510.0),
    "cudnn-flex varlen": (570.0, 475.0),
}


def test_goals_of_a_run_beside_cudnn() -> None:
    rows = rows_of_goals(made_up(list(cells(device=GPU)), CUDNN))
    documents = "8 documents of 2048 D128 S16384"
    assert f"{documents} forward flashproto[hopper] 1.017 x cudnn-flex wanted 1.0 yes" in rows
    ratio = "flashproto[hopper] varlen 1.011 x cudnn-flex varlen wanted 1.02 NO"
    assert f"{documents} backward {ratio}" in rows
    assert f"16 sequences of 128 to 4096 D128 S16384 backward {ratio}" in rows
    dims = "causal D192/128 S4096"
    assert f"{dims} forward flashproto[hopper] 1.017 x cudnn-flex wanted 0.95 yes" in rows
    assert f"{dims} backward flashproto[hopper] 0.980 x cudnn-flex wanted 0.85 yes" in rows
    for key in ("key padding D128 S4096", "max_score D128 S16384"):
        assert f"{key} forward flashproto[hopper] 1.017 x cudnn-flex wanted 1.0 yes" in rows
    assert rows[-2].startswith("not counted are goals against fa4, (plain problem), flex, flex-flash,")
    assert rows[-1] == "below a goal: 2 of 8"


def test_documentation_has_a_table_for_each_run(tmp_path: Path) -> None:
    root = tmp_path / "checkout"
    folder = root / "docs" / "results" / "card"
    folder.mkdir(parents=True)
    shutil.copy(docs.ROOT / "docs" / "results" / "h200" / "norm.json", folder)
    keys = list(cells(True, GPU))
    for name, speeds, version in (("", SPEEDS, "4.7.1"), ("_cudnn", CUDNN, "4.8.1")):
        data = made_up(keys, speeds)
        run = data["runs"][0]
        run["date"] = f"2026-12-0{len(speeds)}T00:00:00+00:00"
        run["environment"]["peers"] |= {
            "flash_attn.cute": "4.0.0b36",
            "cudnn.flex_attention": "1.32.0",
            "cutlass": version,
        }
        (folder / f"variants{name}.json").write_text(json.dumps(data))
    text = speed.page(speed.machines(root), [])
    assert text.count("## Attention's variants: `variants`") == 1
    assert text.count("cudnn.flex_attention of nvidia-cudnn-frontend") == 1
    first, second = text.split("Beside other peers, in a run of their own:\n\n")
    head, _, _ = second.partition("\n")
    assert head.startswith("Measured 2026-12-04 on") and f"torch {torch.__version__}" in head
    assert "cudnn.flex_attention 1.32.0, CUTLASS DSL 4.8.1." in head and "flash-attn-4" not in head
    assert "flash-attn-4 4.0.0b36, CUTLASS DSL 4.7.1." in first
    row = next(line for line in second.splitlines() if line.startswith("| tree of 8x1024"))
    assert "590 / 510" in row and row.endswith("| 1.017 / 0.980 |")
    row = next(line for line in first.splitlines() if line.startswith("| tree of 8x1024"))
    assert row.endswith("| 1.200 / 1.064 |")
