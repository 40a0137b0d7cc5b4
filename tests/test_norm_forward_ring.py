"""Forward of norms of wide rows by programs that stay for many of them, on Hopper; on other GPUs the
same is asked of the other kernels."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from rows import assert_bits_stay, assert_no_worse, poison
from torch import Tensor

import flashproto
from flashproto import reference

pytest.importorskip("triton")

from flashproto.ops import call_cache, norm_hopper
from flashproto.ops.norm_hopper import even_groups

EPS = 1e-5
WIDTHS = [16_384, 18_432, 40_960, 131_072, 262_144, 2**19]


def norm(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    N = x.shape[-1]
    if bias is None:
        return flashproto.rms_norm(x, N, weight, eps=EPS, impl="triton")
    return flashproto.layer_norm(x, N, weight, bias, eps=EPS, impl="triton")


def tensors(M: int, N: int, dtype: torch.dtype, centered: bool, device: str):
    x = (torch.randn(M, N, device=device) + 3 * centered).to(dtype)
    weight, bias = (torch.randn(N, device=device).to(dtype) for _ in range(2))
    return x, weight, bias if centered else None


@pytest.mark.parametrize("M", [1, 2, 7, 48, 49, 97, 768])
def test_even_groups(M) -> None:
    for most in (0, 1, 12, 49):
        groups = even_groups(M, most)
        largest = -(-M // groups)
        assert 1 <= groups <= max(most, 1)
        assert largest == -(-M // max(most, 1))
        assert groups == 1 or (groups - 1) * largest < M


@pytest.mark.gpu
@pytest.mark.parametrize("centered", [True, False])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("N", WIDTHS)
def test_against_float64(device, monkeypatch, N, dtype, centered) -> None:
    poison(monkeypatch)
    x, weight, bias = tensors(101, N, dtype, centered, device)
    got = norm(x, weight, bias)
    eager = F.layer_norm(x, [N], weight, bias, EPS) if centered else F.rms_norm(x, [N], weight, EPS)
    exact = (None if t is None else t.double() for t in (weight, bias))
    wanted = reference.norm(x.double(), [N], *exact, EPS, centered=centered)
    assert_no_worse("y", got, eager, wanted, wanted.abs().max().item())


@pytest.mark.gpu
@pytest.mark.parametrize("centered", [True, False])
@pytest.mark.parametrize("N", WIDTHS)
def test_bits_do_not_depend_on_timing_place_or_other_rows(device, N, centered) -> None:
    x, weight, bias = tensors(130, N, torch.bfloat16, centered, device)
    slices = slice(0, 1), slice(7, 20), slice(3, 103)
    assert_bits_stay(lambda x: [norm(x, weight, bias)], [x], slices)
    spread = torch.empty(130, N + 24, device=device, dtype=x.dtype)[:, 8 : N + 8].copy_(x)
    assert torch.equal(norm(spread, weight, bias), norm(x, weight, bias))


@pytest.mark.gpu
@pytest.mark.parametrize("polls", [1, 2])
def test_programs_that_do_not_wait_do_the_others_work(device, monkeypatch, polls) -> None:
    x, weight, bias = tensors(200, 131_072, torch.bfloat16, True, device)
    wanted = norm(x, weight, bias)
    monkeypatch.setattr(norm_hopper, "POLLS", polls)
    for _ in range(5):
        call_cache.forget()
        assert torch.equal(norm(x, weight, bias), wanted)
    call_cache.forget()
