"""Forward of norms of wide 16-bit rows that cannot all begin at multiples of 16 bytes, on Hopper; on
other GPUs the same is asked of the other kernels."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
import torch.nn.functional as F
from norms import fill, norm
from rows import assert_no_worse, poison
from torch import Tensor

import flashproto
from flashproto import configs, reference

pytest.importorskip("triton")

from flashproto.ops import call_cache

EPS = 1e-5
bf16, f16, f32 = torch.bfloat16, torch.float16, torch.float32
# Rows of one program and more, of whole chunks and of a few columns more or less; at any N modulo 8.
WIDTHS = [*range(12289, 12304, 2), 16366, 16367, 16369, 20001, 50257, 65535, 100_003, 2**19 - 1]


@pytest.fixture(autouse=True)
def nothing_kept() -> Iterator[None]:
    call_cache.forget()
    yield
    call_cache.forget()


def exact(x: Tensor, weight: Tensor | None, bias: Tensor | None, centered: bool) -> Tensor:
    parameters = (None if p is None else p.double() for p in (weight, bias))
    return reference.norm(x.double(), x.shape[1:], *parameters, EPS, centered=centered)


def eager(x: Tensor, weight: Tensor | None, bias: Tensor | None, centered: bool) -> Tensor:
    weight, bias = (None if p is None else p.to(x.dtype) for p in (weight, bias))
    if centered:
        return F.layer_norm(x, x.shape[1:], weight, bias, EPS)
    y = F.rms_norm(x, x.shape[1:], weight, EPS)
    return y if bias is None else y + bias


def check(
    x: Tensor, residual: Tensor | None, weight: Tensor | None, bias: Tensor | None, centered: bool
) -> None:
    result = norm(x, residual, weight, bias, 1, EPS, centered)
    y, total = (result, x) if residual is None else result
    if residual is not None:
        assert torch.equal(total, x + residual)
    wanted = exact(total, weight, bias, centered)
    assert_no_worse("y", y, eager(total, weight, bias, centered), wanted, wanted.abs().max().item())


@pytest.mark.gpu
@pytest.mark.parametrize("centered", [True, False])
@pytest.mark.parametrize(
    ("dtype", "parameters"), [(bf16, bf16), (bf16, f32), (f16, f16), (bf16, None)], ids=str
)
@pytest.mark.parametrize("N", WIDTHS)
def test_against_float64(device, monkeypatch, N, dtype, parameters, centered) -> None:
    poison(monkeypatch)
    x, residual = (torch.randn(13, N, device=device).to(dtype) for _ in range(2))
    weight, bias = (
        None if parameters is None else torch.randn(N, device=device).to(parameters) for _ in range(2)
    )
    for r in (None, residual):
        check(x, r, weight, bias, centered)
        check(x, r, weight, None, centered)


@pytest.mark.gpu
@pytest.mark.parametrize("casting", ["torch", "llama", "gemma"])
@pytest.mark.parametrize("N", [12289, 50257])
def test_castings(device, N, casting) -> None:
    x, weight = torch.randn(5, N, device=device, dtype=bf16), torch.randn(N, device=device, dtype=bf16)
    y = norm(x, None, weight, None, 1, EPS, False, casting)
    xhat = exact(x, None, None, False)
    if casting == "llama":
        xhat = xhat.to(bf16).double()
    wanted = xhat * (weight.double() + (casting == "gemma"))
    one_rounding = 2.0**-8 * (2 if casting == "llama" else 1)
    assert ((y.double() - wanted).abs() <= one_rounding * 1.01 * wanted.abs() + 1e-6).all()


@pytest.mark.gpu
@pytest.mark.parametrize("centered", [True, False])
@pytest.mark.parametrize("N", [12290, 50257, 100_003])
def test_bits_do_not_depend_on_timing_place_or_other_rows(device, monkeypatch, N, centered) -> None:
    poison(monkeypatch)
    x, residual = (torch.randn(50, N, device=device, dtype=bf16) * 3 + 1 for _ in range(2))
    weight = torch.randn(N, device=device)

    def run(x: Tensor, residual: Tensor) -> list[Tensor]:
        y, total = norm(x, residual, weight, weight, 1, EPS, centered)
        return [y, total, norm(x, None, weight, weight, 1, EPS, centered)]

    wanted = run(x, residual)
    for _ in range(50):
        assert all(map(torch.equal, run(x, residual), wanted))
    for row in range(9):  # at every shift from a multiple of 16 bytes, and from none
        for rows in (x[row : row + 3], x[row : row + 1].clone()):
            these = slice(row, row + len(rows))
            assert all(map(torch.equal, run(rows, residual[these]), [t[these] for t in wanted]))
    for before in range(1, 8):
        moved = torch.empty(50 * N + before, device=device, dtype=bf16)[before:].view(50, N).copy_(x)
        assert all(map(torch.equal, run(moved, residual), wanted))
    for stride in (N + 1, N + 8, N + 13):
        apart = torch.full((50, stride), float("nan"), device=device, dtype=bf16)[:, :N].copy_(x)
        assert all(map(torch.equal, run(apart, apart), run(x, x)))


@pytest.mark.gpu
@pytest.mark.parametrize("N", [12289, 50257])
def test_neighbours_that_are_not_finite(device, N) -> None:
    """Rows share their first and last 16 bytes with others."""
    x = torch.randn(17, N, device=device, dtype=bf16)
    wanted = norm(x, None, None, None, 1, EPS, True)
    x[1::2, 0] = x[1::2, -1] = float("nan")
    x[3::4, -1] = float("inf")
    y = norm(x, None, None, None, 1, EPS, True)
    assert torch.equal(y[::2], wanted[::2])
    assert y[1::2].isnan().all()


@pytest.mark.gpu
@pytest.mark.parametrize("N", [20001, 50257])
def test_writes_nothing_else(device, N) -> None:
    memory = torch.full((11 * N + 64,), 7.0, device=device, dtype=bf16)
    y = memory[: 11 * N].view(11, N)
    x = torch.randn(11, N, device=device, dtype=bf16)
    fill(x, y, None, torch.empty(11, device=device), EPS)
    assert (memory[11 * N :] == 7).all()
    assert torch.equal(y, norm(x, None, None, None, 1, EPS, False))


@pytest.mark.gpu
@pytest.mark.gib(10)
def test_many_rows(device) -> None:
    """More elements than int32 counts."""
    M, N = 2**31 // 50257 + 100, 50257
    x = torch.empty(M, N, device=device, dtype=bf16).normal_()
    y = flashproto.rms_norm(x, N, eps=EPS)
    for rows in (slice(0, 5), slice(M // 2, M // 2 + 5), slice(M - 5, M)):
        assert torch.equal(y[rows], flashproto.rms_norm(x[rows].clone(), N, eps=EPS))


def test_configurations() -> None:
    for residual in (False, True):
        for centered in (False, True):
            for N in [12289, 16385, 50257, 131_073, 2**19 - 1]:
                config = configs.norm_forward_unaligned(N, 2, residual, centered)
                assert config is not None
                assert config.split
                chunk = config.columns + 8
                assert chunk % (256 * config.num_warps) == 0
                assert -(-N // config.columns) <= 64  # words of a row
            for N in (12287, 12296, 50264, 2**19 + 1):
                assert configs.norm_forward_unaligned(N, 2, residual, centered) is None
            assert configs.norm_forward_unaligned(50257, 4, residual, centered) is None
