"""softmax and log_softmax whose rows are split on request: against float64, and what bits depend on."""

from __future__ import annotations

import pytest
import torch
from rows import assert_no_worse, poison
from torch import Tensor

import flashproto
from flashproto import configs, hooks

pytest.importorskip("triton")

OPERATORS = ("softmax", "log_softmax")


def outcomes(f, x: Tensor, dy: Tensor) -> tuple[Tensor, Tensor]:
    """The result, and the gradient for dy."""
    x = x.detach().requires_grad_()
    y = f(x)
    return y.detach(), torch.autograd.grad(y, x, dy)[0]


def split(operator: str):
    return lambda x: getattr(flashproto, operator)(x, split_rows=True, impl="triton")


@pytest.mark.parametrize("operator", OPERATORS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("N", [1, 100, 512, 1000, 4096, 9000])
def test_against_float64(device, monkeypatch, N, dtype, operator) -> None:
    poison(monkeypatch)
    x, dy = ((3 * torch.randn(3, N, device=device)).to(dtype) for _ in range(2))

    def eager(x):
        return getattr(torch, operator)(x, -1)

    y, dx = outcomes(split(operator), x, dy)
    yardstick, exact = outcomes(eager, x, dy), outcomes(eager, x.double(), dy.double())
    own = exact[0].abs().max().item() if device == "cpu" else 0.0
    assert_no_worse("y", y, yardstick[0], exact[0], own)
    # The gradient takes y again, from x and the logsumexp, whose roundings count like those of x.
    p = exact[0] if operator == "softmax" else exact[0].exp()
    g = dy.double().abs()
    terms = p * g.amax(-1, keepdim=True) if operator == "softmax" else g + p * g.sum(-1, keepdim=True)
    assert_no_worse("dx", dx, yardstick[1], exact[1], (1 + x.abs().max().item()) * terms.max().item())


@pytest.mark.parametrize("operator", OPERATORS)
def test_rows_do_not_depend_on_each_other_and_repeat_bitwise(device, operator) -> None:
    x, dy = (torch.randn(7, 2000, device=device, dtype=torch.bfloat16) for _ in range(2))
    whole = outcomes(split(operator), x, dy)
    for _ in range(1 if device == "cpu" else 100):
        assert all(map(torch.equal, whole, outcomes(split(operator), x, dy)))
    assert all(map(torch.equal, (t[2:3] for t in whole), outcomes(split(operator), x[2:3], dy[2:3])))


def test_mask_and_hooks(device) -> None:
    x, z = (torch.randn(2, 5, 1500, device=device, requires_grad=True) for _ in range(2))
    mask = torch.randn(1500, device=device) > -1
    options = {"scale": 0.5, "mask": mask, "causal": True, "epilogue": hooks.call("multiply", z)}
    results = []
    for how in ({"split_rows": True, "impl": "triton"}, {"impl": "reference"}):
        y = flashproto.softmax(x, **options, **how)
        results.append([y, *torch.autograd.grad(y.square().sum(), (x, z))])
    torch.testing.assert_close(*results, rtol=1e-4, atol=1e-5)


def test_compiles_in_one_graph(device) -> None:
    x, dy = torch.randn(4, 1100, device=device), torch.randn(4, 1100, device=device)
    backend = "inductor" if device == "cuda" else "aot_eager"
    compiled = torch.compile(split("softmax"), fullgraph=True, backend=backend)
    torch.testing.assert_close(outcomes(compiled, x, dy), outcomes(split("softmax"), x, dy))


def test_configurations() -> None:
    for itemsize in (2, 4):
        for N in [1, 100, 513, 1000, 4096, 12288, 16384, 10**6, 2**20]:
            config = configs.softmax_split(N, itemsize)
            assert config.split
            assert config.columns // (32 * config.num_warps) <= 16
        assert configs.softmax_split(2**20 + 1, itemsize).looped


@pytest.mark.gpu
@pytest.mark.parametrize("N", [1024, 4096, 16384, 50257])
def test_bits_do_not_depend_on_timing(device, N) -> None:
    x = torch.randn(4000, N, device=device, dtype=torch.bfloat16)
    wanted = flashproto.softmax(x, split_rows=True)
    for rows in (1, 8, 300):
        assert torch.equal(flashproto.softmax(x[:rows], split_rows=True), wanted[:rows])
