"""Norms whose rows are split over programs on request: against float64, and what bits depend on."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from rows import assert_no_worse, poison
from torch import Tensor

import flashproto
from flashproto import configs, hooks, reference
from flashproto.nn import LayerNorm

pytest.importorskip("triton")

EPS = 1e-5
bf16, f32 = torch.bfloat16, torch.float32


def gradients(f, tensors: tuple[Tensor, ...], dy: Tensor) -> list[Tensor]:
    """y, and the gradients of the tensors."""
    leaves = [t.detach().requires_grad_() for t in tensors]
    y = f(*leaves)
    return [y.detach(), *torch.autograd.grad(y, leaves, dy)]


@pytest.mark.parametrize("centered", [True, False])
@pytest.mark.parametrize("dtype", [f32, bf16])
@pytest.mark.parametrize("N", [1, 100, 512, 1000, 4096, 9000])
def test_against_float64(device, monkeypatch, N, dtype, centered) -> None:
    poison(monkeypatch)
    x, dy = (torch.randn(3, N, device=device).to(dtype) for _ in range(2))
    weight = torch.randn(N, device=device).to(dtype)

    def split(x, weight):
        norm = flashproto.layer_norm if centered else flashproto.rms_norm
        return norm(x, N, weight, eps=EPS, split_rows=True, impl="triton")

    def eager(x, weight):
        if centered:
            return F.layer_norm(x, [N], weight, None, EPS)
        return F.rms_norm(x, [N], weight, EPS)

    def exact(x, weight):
        return reference.norm(x, [N], weight, None, EPS, centered=centered)

    got, eager_ = (gradients(f, (x, weight), dy) for f in (split, eager))
    wanted = gradients(exact, (x.double(), weight.double()), dy.double())
    z, g = x.double(), dy.double().abs()
    rstd = (z.var(-1, correction=0) if centered else z.square().mean(-1)).add(EPS).rsqrt()[:, None]
    magnitudes = [
        (z.abs() * rstd * weight.double().abs()).max(),
        ((g * weight.double().abs()).amax(-1, keepdim=True) * rstd).max(),
        (g * z.abs() * rstd).sum(0).max(),
    ]
    for name, a, b, c, m in zip(("y", "dx", "dweight"), got, eager_, wanted, magnitudes, strict=True):
        assert_no_worse(name, a, b, c, m.item())


@pytest.mark.parametrize("centered", [True, False])
def test_rows_do_not_depend_on_each_other_and_repeat_bitwise(device, centered) -> None:
    N = 2000
    x, dy = (torch.randn(7, N, device=device, dtype=bf16) for _ in range(2))
    weight = torch.randn(N, device=device)
    norm = flashproto.layer_norm if centered else flashproto.rms_norm

    def run(rows: slice) -> list[Tensor]:
        f = lambda x, w: norm(x, N, w, eps=EPS, split_rows=True, impl="triton")  # noqa: E731
        return gradients(f, (x[rows], weight), dy[rows])

    whole = run(slice(None))
    for _ in range(1 if device == "cpu" else 100):
        assert all(map(torch.equal, whole, run(slice(None))))
    assert all(map(torch.equal, (t[2:3] for t in whole[:2]), run(slice(2, 3))))


def test_residual_and_hooks(device) -> None:
    x, residual, z = (torch.randn(4, 1500, device=device, requires_grad=True) for _ in range(3))
    outputs = []
    for options in ({"split_rows": True, "impl": "triton"}, {"impl": "reference"}):
        y, total = flashproto.add_layer_norm(
            x, residual, 1500, epilogue=hooks.call("silu_gate", z), **options
        )
        loss = y.square().sum() + total.sum()
        outputs.append([y, total, *torch.autograd.grad(loss, (x, residual, z))])
    for a, b in zip(*outputs, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-4)


def test_compiles_in_one_graph_and_module(device) -> None:
    x = torch.randn(4, 1100, device=device, requires_grad=True)
    module = LayerNorm(1100, device=device, split_rows=True, impl="triton")
    backend = "inductor" if device == "cuda" else "aot_eager"
    results = []
    for f in (module, torch.compile(module, fullgraph=True, backend=backend)):
        y = f(x)
        results.append([y, *torch.autograd.grad(y.square().sum(), (x, module.weight, module.bias))])
    torch.testing.assert_close(*results)
    torch.testing.assert_close(results[0][0], F.layer_norm(x, [1100]))


def test_configurations() -> None:
    for itemsize in (2, 4):
        for N in [1, 100, 513, 1000, 4096, 12288, 16384, 10**6]:
            config = configs.norm_split(N, itemsize)
            assert config.split
            assert (
                config.columns & (config.columns - 1) == config.num_warps & (config.num_warps - 1) == 0
            )
            assert 512 <= config.columns <= 4096
            assert config.columns // (32 * config.num_warps) <= 16


@pytest.mark.gpu
@pytest.mark.parametrize("N", [1024, 4096, 16384, 50257])
def test_bits_do_not_depend_on_timing(device, N) -> None:
    x = torch.randn(4000, N, device=device, dtype=bf16)
    wanted = flashproto.rms_norm(x, N, split_rows=True)
    for rows in (1, 8, 300):
        assert torch.equal(flashproto.rms_norm(x[:rows], N, split_rows=True), wanted[:rows])
