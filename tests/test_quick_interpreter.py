"""The interpreter as the tests use it (quick_interpreter.py) does what Triton's own does."""

from __future__ import annotations

import math
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

pytest.importorskip("triton")

import triton.language as tl

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
    out = [y.detach(), dx, values, flashproto.attention(q, q, q, causal=True, impl="triton")]
    q, k = (torch.randn(2, 4, 37, 24, dtype=torch.bfloat16, requires_grad=True) for _ in range(2))
    mask, seed = flashproto.masks.boolean(torch.rand(37, 37) < 0.7), torch.tensor([5])
    y = flashproto.attention(
        q, k, k, softcap=5.0, mask=mask, dropout_p=0.3, dropout_seed=seed, impl="triton"
    )
    return [*out, y.detach(), *torch.autograd.grad(y.square().sum(), (q, k))]
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
    assert tl.core.is_builtin(tl.load)  # so after the launches of other tests
    before = {name: getattr(tl, name) for name in quick_interpreter.builtins(tl)}
    before |= {name: getattr(tl, name) for name in ("range", "static_range", "reduce")}
    x = torch.randn(3, 40)
    flashproto.softmax(x, impl="triton")
    assert not quick_interpreter.replaced
    assert all(getattr(tl, name) is member for name, member in before.items())


def test_types_and_tiles_have_their_own_fields() -> None:
    """Those of a type made twice, of one with another element, and of one that Triton made itself."""
    block, scalar = tl.block_type, tl.float32
    first, second = block(scalar, [4, 8]), block(scalar, (4, 8))
    assert first == second and list(first.shape) == [4, 8] and first.numel == 32
    assert first.scalar == scalar and first.name == second.name
    other = first.with_element_ty(tl.int32)
    assert other != first and other.scalar == tl.int32 and list(other.shape) == [4, 8]
    earlier = object.__new__(block)  # as before install()
    earlier.__dict__.update({k: v for k, v in other.__dict__.items() if k != "of_tensors"})
    for kind in first, other, earlier, scalar:
        for _ in range(2):
            tile = tl.tensor(None, kind)
            sizes = list(kind.shape) if kind.is_block() else []
            assert tile.type is kind and tile.dtype == kind.scalar
            assert [x.value for x in tile.shape] == sizes and tile.numel.value == math.prod(sizes)
    with pytest.raises(ValueError, match="power of 2"):
        block(scalar, [3])
    with pytest.raises(TypeError):
        block(scalar, [])
