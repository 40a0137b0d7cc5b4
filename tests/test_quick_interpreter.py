"""The interpreter as the tests use it (quick_interpreter.py) does what Triton's own does."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

pytest.importorskip("triton")

from triton import language

import flashproto
from flashproto import backends

if not backends.INTERPRETED:
    pytest.skip("kernels are compiled here, not interpreted", allow_module_level=True)

import quick_interpreter

ROOT = Path(__file__).resolve().parents[1]
CALLS = """
import torch, flashproto
def results():
    torch.manual_seed(0)
    x, w = torch.randn(5, 70, requires_grad=True), torch.randn(70)
    q = torch.randn(1, 2, 20, 16)
    y = flashproto.layer_norm(x, 70, w, w, impl="triton")
    (dx,) = torch.autograd.grad(y.square().sum(), x)
    values, _ = flashproto.softmax_topk(x.detach(), 3, impl="triton")
    return [y.detach(), dx, values, flashproto.attention(q, q, q, causal=True, impl="triton")]
"""


def test_same_bits(tmp_path: Path) -> None:
    code = f"{CALLS}\ntorch.save(results(), 'plain.pt')"
    environment = os.environ | {"PYTHONPATH": str(ROOT), "TRITON_INTERPRET": "1"}
    subprocess.run([sys.executable, "-c", code], cwd=tmp_path, env=environment, check=True)
    names: dict = {}
    exec(CALLS, names)
    for plain, quick in zip(torch.load(tmp_path / "plain.pt"), names["results"](), strict=True):
        assert torch.equal(plain, quick)


def test_restores_the_language() -> None:
    assert language.core.is_builtin(language.load)  # so after the launches of other tests
    before = {name: getattr(language, name) for name in quick_interpreter.builtins(language)}
    before |= {name: getattr(language, name) for name in ("range", "static_range", "reduce")}
    x = torch.randn(3, 40)
    flashproto.softmax(x, impl="triton")
    assert not quick_interpreter.replaced
    assert all(getattr(language, name) is member for name, member in before.items())
