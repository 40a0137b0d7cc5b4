"""What docs/determinism.md claims, for each function on each backend that runs here."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hopper_attention import determinism as torchs_switch
from torch import Tensor

from flashproto import backends
from flashproto.bench import determinism, docs
from flashproto.bench.determinism import CASES, Case

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


@pytest.fixture(
    params=[(c, b) for c in CASES for b in c.backends], ids=lambda p: f"{p[0].title}, {p[1]}"
)
def claim(request: pytest.FixtureRequest, device: str) -> tuple[Case, str]:
    case, backend = request.param
    against = backends.device_reasons(backend, torch.device(device))
    if against:
        pytest.skip("; ".join(against))
    return case, backend


@pytest.fixture(params=DTYPES)
def dtype(request: pytest.FixtureRequest, claim: tuple[Case, str], device: str) -> torch.dtype:
    if device == "cpu" and request.param == "bfloat16":
        pytest.skip("on a CPU float32 will do")
    if claim[1] == "hopper" and request.param == "float32":
        pytest.skip("attention of float32 does not run on backend 'hopper'")
    return DTYPES[request.param]


def made(case: Case, B: int, dtype: torch.dtype, device: str) -> dict[str, Tensor]:
    floats = {
        name: x.to(device, dtype) for name, x in case.inputs(B, 700 if device == "cuda" else 40).items()
    }
    of_float32 = "sinks", "alibi_slopes", "relative_bias", "lse1", "lse2"
    return {n: x.float() if n in of_float32 else x for n, x in floats.items()}


def results(case: Case, backend: str, given: dict[str, Tensor], dout: Tensor | None = None) -> dict:
    """The output, and the gradients of all inputs."""
    has_gradient = case.name != "attention_with_kv_cache"
    leaves = {name: x.detach().clone().requires_grad_(has_gradient) for name, x in given.items()}
    out = case.call(**leaves, impl=backend)
    found = {"out": out.detach()}
    if has_gradient:
        dout = torch.ones_like(out) if dout is None else dout
        grads = torch.autograd.grad(out, list(leaves.values()), dout)
        found |= dict(zip(leaves, grads, strict=True))
    return found


def differing(got: dict[str, Tensor], wanted: dict[str, Tensor]) -> list[str]:
    return [name for name, x in wanted.items() if not torch.equal(got[name], x)]


@pytest.mark.slow
def test_run_to_run(claim: tuple[Case, str], dtype: torch.dtype, device: str) -> None:
    case, backend = claim
    given = made(case, 2, dtype, device)
    dout = torch.randn_like(results(case, backend, given)["out"])
    wanted = results(case, backend, given, dout)
    unordered = {*case.unordered.get(backend, ())}
    for _ in range(20 if device == "cuda" else 1):
        assert not {*differing(results(case, backend, given, dout), wanted)} - unordered
    if unordered:
        with torchs_switch():
            wanted = results(case, backend, given, dout)
            assert not differing(results(case, backend, given, dout), wanted)


@pytest.mark.slow
def test_in_another_batch(claim: tuple[Case, str], dtype: torch.dtype, device: str) -> None:
    case, backend = claim
    if backend not in case.alone:
        pytest.skip("the page says that it may differ")
    given = made(case, 2, dtype, device)
    dout = torch.randn_like(results(case, backend, given)["out"])
    together = results(case, backend, given, dout)
    for n in range(2):
        of_one = {name: x if name in case.of_all else x[n : n + 1] for name, x in given.items()}
        alone = results(case, backend, of_one, dout[n : n + 1])
        wanted = {name: x[n : n + 1] for name, x in together.items() if name not in case.of_all}
        assert not {*differing(alone, wanted)} - {*case.unordered.get(backend, ())}


def test_page_says_what_is_claimed() -> None:
    page = (docs.ROOT / "docs" / "determinism.md").read_text()
    for case in CASES:
        for backend in set(case.backends) & set(determinism.KERNELS):
            (line,) = (x for x in page.splitlines() if x.startswith(f'| {case.title} | `"{backend}"`'))
            assert ("deterministic=True" in line) == bool(case.unordered.get(backend))
            assert line.count("may differ") == (backend not in case.alone)


def test_cost_is_the_ratio_of_two_backwards() -> None:
    def timed(plain: float, ordered: float) -> dict[str, Any]:
        names = {determinism.HOPPER: plain, f"{determinism.HOPPER}-deterministic": ordered}
        return {"passes": {"backward": {name: {"ms": ms} for name, ms in names.items()}}}

    cells = {"D64 S1024 causal": timed(1.0, 2.0), "D64 S2048 causal": timed(1.0, 1.0)}
    run = {"environment": {"gpus": [{"name": "A card"}]}}
    (text,) = determinism.cost({"attention": {"cells": cells, "runs": [run]}})
    assert text.splitlines()[2:] == ["| 64 | causal | 2 | 0.71 | 0.50 | 1.00 |"]
    assert "On one A card:" in determinism.costs([{"attention": {"cells": cells, "runs": [run]}}])
    assert determinism.costs([{}]) == "Not measured."


def test_cost_of_variants_is_that_of_the_other_backend() -> None:
    def timed(hopper: float, triton: float) -> dict[str, Any]:
        names = {determinism.HOPPER: hopper, determinism.TRITON: triton}
        return {"passes": {"backward": {name: {"ms": ms} for name, ms in names.items()}}}

    cells = {"window 1024 D64 S16384": timed(1.0, 2.0), "sinks D128 S4096": timed(1.0, 3.0)}
    assert determinism.elsewhere({"variants": {"cells": cells}}) == {"window 1024 D64 S16384": 0.5}
