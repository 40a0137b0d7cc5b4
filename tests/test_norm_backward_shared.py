"""Backward of norms of very wide rows in shared memory, on Hopper; on other GPUs the same is asked of
the other kernels."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from rows import assert_bits_stay, assert_no_worse, poison
from torch import Tensor

import flashproto
from flashproto import reference

pytest.importorskip("triton")

EPS = 1e-5
# Whole chunks and parts of them; multiples of 8, not of 16.
WIDTHS = [65_544, 100_000, 131_072, 262_144, 2**19 - 8]


def gradients(f, x: Tensor, weight: Tensor, dy: Tensor) -> list[Tensor]:
    leaves = [t.detach().requires_grad_() for t in (x, weight)]
    return list(torch.autograd.grad(f(*leaves), leaves, dy))


def function(N: int, centered: bool):
    norm = flashproto.layer_norm if centered else flashproto.rms_norm
    return lambda x, w: norm(x, N, w, eps=EPS, impl="triton")


@pytest.mark.gpu
@pytest.mark.parametrize("centered", [True, False])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("N", WIDTHS)
def test_against_float64(device, monkeypatch, N, dtype, centered) -> None:
    poison(monkeypatch)
    x, dy = (torch.randn(37, N, device=device).to(dtype) for _ in range(2))
    weight = torch.randn(N, device=device).to(dtype)

    def eager(x, w):
        return F.layer_norm(x, [N], w, None, EPS) if centered else F.rms_norm(x, [N], w, EPS)

    def exact(x, w):
        return reference.norm(x, [N], w, None, EPS, centered=centered)

    got, eager_ = (gradients(f, x, weight, dy) for f in (function(N, centered), eager))
    wanted = gradients(exact, x.double(), weight.double(), dy.double())
    z, g = x.double(), dy.double().abs()
    rstd = (z.var(-1, correction=0) if centered else z.square().mean(-1)).add(EPS).rsqrt()[:, None]
    magnitudes = [
        ((g * weight.double().abs()).amax(-1, keepdim=True) * rstd).max(),
        (g * z.abs() * rstd).sum(0).max(),
    ]
    for name, a, b, c, m in zip(("dx", "dweight"), got, eager_, wanted, magnitudes, strict=True):
        assert_no_worse(name, a, b, c, m.item())


@pytest.mark.gpu
@pytest.mark.parametrize("N", WIDTHS)
def test_bits_do_not_depend_on_timing_place_or_other_rows(device, N) -> None:
    x, dy = (torch.randn(50, N, device=device, dtype=torch.bfloat16) for _ in range(2))
    weight = torch.randn(N, device=device, dtype=torch.bfloat16)
    f = function(N, True)
    assert_bits_stay(lambda x, dy: gradients(f, x, weight, dy), [x, dy], [slice(0, 1), slice(7, 20)])
    moved = torch.empty(50 * N + 1, device=device, dtype=x.dtype)[1:].view(50, N).copy_(x)
    assert all(map(torch.equal, gradients(f, moved, weight, dy), gradients(f, x, weight, dy)))
