"""softmax and log_softmax of wide rows, which lie in shared memory on Hopper; the same is asked of
the kernels that other GPUs take."""

from __future__ import annotations

import math

import pytest
import torch
from rows import LAYOUTS, assert_no_worse, in_memory, poison
from torch import Tensor

import flashproto
from flashproto import configs

pytest.importorskip("triton")

from flashproto.ops import recipe, softmax_hopper

OPERATORS = ("softmax", "log_softmax")
DTYPES = (torch.float16, torch.bfloat16)
# A row a program, two programs and more; whole chunks and parts of them; multiples of 8, not of 16.
WIDTHS = [16_392, 24_576, 32_768, 32_776, 40_008, 65_536, 128_256, 131_072, 262_144, 2**19 - 8]
# The same of float32; multiples of 4, not of 8.
FLOAT32_WIDTHS = [8196, 10_000, 16_384, 16_388, 32_768, 50_260, 65_536, 262_144, 10**6, 2**20]
KINDS = [(dtype, N) for dtype in DTYPES for N in WIDTHS]
KINDS += [(torch.float32, N) for N in FLOAT32_WIDTHS]
INF, NAN = math.inf, math.nan


def function(operator: str):
    """The operator as users call it: with plans, from the second call of a kind on."""
    return lambda x: getattr(flashproto, operator)(x, impl="triton")


def scores(device, M: int, N: int, dtype: torch.dtype) -> Tensor:
    return (3 * torch.randn(M, N, device=device)).to(dtype)


@pytest.mark.gpu
@pytest.mark.parametrize("operator", OPERATORS)
@pytest.mark.parametrize(("dtype", "N"), KINDS, ids=str)
def test_against_float64(device, monkeypatch, N, dtype, operator) -> None:
    poison(monkeypatch)
    f, eager = function(operator), getattr(torch, operator)
    x = scores(device, max(2**23 // N, 37), N, dtype)
    for moved in (x, x + 300, 100 * x):
        y, exact = f(moved), eager(moved.double(), -1)
        assert_no_worse("y", y, eager(moved, -1), exact)
        if operator == "softmax":  # each as exact as its dtype has it, small ones too
            seen = exact > 1e-3
            relative = ((y.double() - exact).abs() / exact)[seen]
            # In float32 that is a few units: the rounding of its logarithm, and the power of 2.
            units = 8 if dtype is torch.float32 else 0.51
            assert not relative.numel() or relative.max().item() <= units * torch.finfo(dtype).eps


@pytest.mark.gpu
@pytest.mark.parametrize("operator", OPERATORS)
@pytest.mark.parametrize(("dtype", "N"), KINDS, ids=str)
def test_infinities_and_nan_as_in_torch(device, N, dtype, operator) -> None:
    x = scores(device, 37, N, dtype)
    x[0] = -INF
    x[1, : N - 1] = -INF
    x[2, 0], x[3, N - 1], x[4, N // 2] = INF, NAN, -INF
    x[5, 0], x[5, N - 1] = INF, NAN
    x[6, 0], x[6, 1:] = INF, -INF
    x[7], x[8] = -6e4, NAN
    x[9, : N // 2] = -INF
    x[10, N // 2 :] = -INF
    got, wanted = function(operator)(x), getattr(torch, operator)(x, -1)
    torch.testing.assert_close(got, wanted, equal_nan=True)


@pytest.mark.gpu
@pytest.mark.parametrize("operator", OPERATORS)
@pytest.mark.parametrize(("dtype", "N"), KINDS[len(WIDTHS) :], ids=str)
def test_bits_depend_on_the_row_alone(device, N, dtype, operator) -> None:
    """Not on its neighbours, nor on where it lies, nor on time."""
    f, x = function(operator), scores(device, 300, N, dtype)
    y = f(x)
    for _ in range(100):
        assert torch.equal(f(x), y)
    for layout in LAYOUTS:
        assert torch.equal(f(in_memory(x, layout)), y), layout
    for rows in (slice(0, 1), slice(7, 90), slice(299, 300)):
        assert torch.equal(f(x[rows]), y[rows])
    assert torch.equal(f(x[41]), y[41])
    padded = torch.zeros(300, N + 3, device=device, dtype=x.dtype)[:, :N].copy_(x)
    assert torch.equal(f(padded), y)
    assert torch.equal(f(padded[41]), y[41])
    assert torch.equal(f(x[41].expand(5, N)), y[41].expand(5, N))


@pytest.mark.gpu
@pytest.mark.parametrize("operator", OPERATORS)
@pytest.mark.parametrize(
    ("x_dtype", "y_dtype"),
    [DTYPES, DTYPES[::-1], (DTYPES[0], torch.float32), (torch.float32, DTYPES[0])],
)
def test_results_of_another_dtype(device, x_dtype, y_dtype, operator) -> None:
    for N in (24_576, 65_536):
        x = scores(device, 40, N, x_dtype)
        y = getattr(flashproto, operator)(x, dtype=y_dtype, impl="triton")
        exact = getattr(torch, operator)(x.to(y_dtype).double(), -1)  # x is converted first
        assert_no_worse("y", y, getattr(torch, operator)(x, -1, dtype=y_dtype), exact)


@pytest.mark.gpu
def test_gradients(device) -> None:
    for operator in OPERATORS:
        x, dy = (scores(device, 40, 40_008, torch.bfloat16) for _ in range(2))
        leaf = x.clone().requires_grad_()
        (dx,) = torch.autograd.grad(function(operator)(leaf), leaf, dy)
        y, log = function(operator)(x), operator == "log_softmax"
        assert torch.equal(dx, torch.ops.flashproto.softmax_backward(dy, y, log, x.dtype, [True]))


@pytest.mark.parametrize(("itemsize", "narrowest", "widest"), [(2, 16_392, 2**19), (4, 8196, 2**20)])
def test_chunks_are_whole_slices(itemsize, narrowest, widest) -> None:
    """A thread holds 16 bytes of a slice; no chunk lies wholly behind the end of a row."""
    per_unit = 16 // itemsize
    for N in (*range(narrowest, widest, 1000 * per_unit), widest):
        config = configs.softmax_forward_shared(N, itemsize)
        assert config is not None
        assert config.columns % (config.num_warps * 32 * per_unit) == 0
        chunks = -(-N // config.columns)
        assert chunks <= 64 if config.split else chunks == 1
    for N in (narrowest - per_unit, 20_001, 40_000 + per_unit // 2, widest + per_unit):
        assert configs.softmax_forward_shared(N, itemsize) is None


@pytest.mark.parametrize("layout", [*LAYOUTS, "padded"])
def test_rows_are_handed_over_aligned(monkeypatch, layout) -> None:
    handed: list[Tensor] = []
    monkeypatch.setattr(recipe, "launch", lambda _0, _1, named, _2: handed.append(named["x_ptr"]))
    for N, dtype in ((16_392, torch.bfloat16), (40_008, torch.bfloat16), (40_004, torch.float32)):
        x = torch.randn(3, N).to(dtype)
        if layout == "padded":
            laid = torch.zeros(3, N + 1, dtype=x.dtype)[:, :N].copy_(x)
        else:
            laid = in_memory(x, layout)
        config = configs.softmax_forward_shared(N, dtype.itemsize)
        assert config is not None
        steps = recipe.Recipe(x.device)
        rows = steps.input(laid).rows()
        y = steps.make(recipe.New.contiguous(x.shape, dtype, x.device))
        softmax_hopper.launch_forward_hopper(steps, rows, y, False, config)
        steps.execute(laid)
        assert torch.equal(handed[-1], x)
        assert handed[-1].data_ptr() % 16 == 0
        assert handed[-1].stride(0) % (16 // dtype.itemsize) == 0
    assert len(handed) == 3
