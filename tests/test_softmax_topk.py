"""The k largest of a softmax on the kernels against float64, in order, with ties, NaN and gradients."""

from __future__ import annotations

import math

import pytest
import torch
from rows import LAYOUTS, assert_no_worse, in_memory, poison
from torch import Tensor

import flashproto
from flashproto import configs, reference

pytest.importorskip("triton")

DTYPES = (torch.float16, torch.bfloat16, torch.float32)
INF, NAN = math.inf, math.nan


def softmax_topk(x: Tensor, k: int, renormalize: bool, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    return flashproto.softmax_topk(x, k, renormalize=renormalize, dtype=dtype, impl="triton")


def outcomes(f, x: Tensor, dv: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Values, indices, and the gradient for dv."""
    x = x.detach().requires_grad_()
    values, indices = f(x)
    return values.detach(), indices, torch.autograd.grad(values, x, dv.to(values.dtype))[0]


def eager(x: Tensor, indices: Tensor, renormalize: bool, dtype: torch.dtype) -> Tensor:
    """The probabilities at `indices` by torch."""
    values = torch.softmax(x, -1, dtype=dtype).gather(-1, indices)
    return values / values.sum(-1, keepdim=True) if renormalize else values


def check(
    device: str,
    x: Tensor,
    k: int,
    renormalize: bool = False,
    dtype: torch.dtype | None = None,
    layout: str = "contiguous",
) -> None:
    """Indices exactly, values and gradient no worse than eager's, of one call on x [M, N]."""
    dtype = dtype or x.dtype
    wanted = reference.softmax_topk(x.double(), k)[1]
    dv = torch.randn(wanted.shape, device=device).to(dtype)

    def at(indices: Tensor, dtype: torch.dtype):
        return lambda x: (eager(x, indices, renormalize, dtype), indices)

    exact = outcomes(at(wanted, torch.float64), x.double(), dv.double())
    yardstick = outcomes(at(wanted, dtype), x, dv)
    if layout != "contiguous":
        x, dv = in_memory(x, layout), in_memory(dv, layout)
    values, indices, dx = outcomes(lambda x: softmax_topk(x, k, renormalize, dtype), x, dv)
    assert torch.equal(indices, wanted)
    # Under the interpreter NumPy chooses the order of a sum: a few roundings of l are its own.
    own = exact[0].abs().max().item() if device == "cpu" else 0.0
    assert_no_worse("values", values, yardstick[0], exact[0], own)
    terms = exact[0].max().item() * dv.abs().double().sum(-1).max().item()
    assert_no_worse("dx", dx, yardstick[2], exact[2], terms)


def scores(M: int, N: int, device: str, dtype: torch.dtype = torch.float32) -> Tensor:
    """Random scores; 16-bit ones hold many ties."""
    return (3 * torch.randn(M, N, device=device)).to(dtype)


@pytest.mark.parametrize("renormalize", [False, True], ids=["", "renormalize"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(
    ("N", "k"), [(1, 1), (3, 2), (8, 8), (64, 6), (100, 64), (256, 8), (1000, 1), (5000, 3), (33000, 5)]
)
def test_against_float64(device, monkeypatch, N, k, dtype, renormalize) -> None:
    poison(monkeypatch)
    # Rows enough, where they cost little, that eager's largest error is not a matter of luck.
    rows = 40 if N < 300 else 2
    check(device, scores(rows if device == "cpu" else 2000, N, device, dtype), k, renormalize)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", DTYPES[1:], ids=str)
@pytest.mark.parametrize("k", [1, 8, 64])
@pytest.mark.parametrize("N", [64, 128, 256, 2048, 4096, 4097, 32768, 50257, 128256, 1_000_003])
def test_at_every_width(device, monkeypatch, N, k, dtype) -> None:
    poison(monkeypatch)
    check(device, scores(max(min(5000, 2**23 // N), 8), N, device, dtype), k)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_any_strides(device, monkeypatch, layout) -> None:
    poison(monkeypatch)
    for N in (64, 9000):
        check(device, scores(5, N, device), 4, layout=layout)


def test_values_of_another_dtype(device) -> None:
    x = scores(20, 128, device, torch.bfloat16)
    check(device, x, 8, dtype=torch.float32)
    check(device, x.float(), 8, dtype=torch.bfloat16)
    with torch.autocast(device, torch.bfloat16):
        assert flashproto.softmax_topk(x, 2, impl="triton")[0].dtype == torch.softmax(x, -1).dtype


@pytest.mark.parametrize("N", [33, 6000])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_equal_scores_by_index(device, dtype, N) -> None:
    x = torch.randn(5, N, device=device).to(dtype)
    x[0] = 1.0
    x[1] = -INF
    x[1, N // 2] = 0.0
    x[2] = torch.where(torch.arange(N, device=device) % 3 == 0, 0.0, -0.0).to(dtype)
    x[3] = x[3].round()
    x[4] = torch.arange(N, device=device).div(7, rounding_mode="floor").to(dtype)
    check(device, x, 20)


@pytest.mark.parametrize("dtype", DTYPES[1:], ids=str)
@pytest.mark.parametrize("N", [1, 2, 7, 17, 64, 127, 200, 513, 1000, 1500, 3000, 4096])
def test_order_in_and_between_blocks(device, dtype, N) -> None:
    """Every block in order, or with as many equal ones around it, or with one score for all."""
    i = torch.arange(N, device=device)
    x = 3 * torch.randn(9, N, device=device)
    x[0], x[1] = 20 * i / N, -20 * i / N
    x[2], x[3] = i // 9 % 50, (i + 3) // 8 % 2
    x[4], x[5] = x[4].round(), (x[5] > 1).float()
    x[6] = -INF
    x[6, :: max(N // 7, 1)] = 0.0
    x[7], x[8] = x[7].sort().values, x[8].sort(descending=True).values
    for k in sorted({1, min(N, 6), min(N, 20), min(N, 64)}):
        check(device, x.to(dtype), k, renormalize=k == 20)


@pytest.mark.parametrize("renormalize", [False, True], ids=["", "renormalize"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("N", [9, 500, 33000])
def test_infinities_and_nan(device, N, dtype, renormalize) -> None:
    k = 4
    x = torch.randn(6, N, device=device).to(dtype)
    x[0] = -INF
    x[1, N - 1], x[2, N // 2], x[3, 0] = NAN, INF, -NAN
    x[4] = NAN
    x[5, 0], x[5, N - 1] = INF, NAN
    values, indices = softmax_topk(x, k, renormalize, dtype)
    assert values.isnan().all()
    assert ((indices >= 0) & (indices < N)).all()
    assert all(len(set(row)) == k for row in indices.tolist())
    assert indices[0].tolist() == [0, 1, 2, 3]
    assert indices[2, 0] == N // 2


@pytest.mark.parametrize("N", [24, 6000])
def test_rows_do_not_depend_on_each_other_and_repeat_bitwise(device, N) -> None:
    M, k = (37, 6) if N < 5000 else (3, 6)
    x, dv = scores(M, N, device, torch.bfloat16), torch.randn(M, k, device=device)

    def f(x: Tensor) -> tuple[Tensor, Tensor]:
        return softmax_topk(x, k, False, torch.float32)

    whole = outcomes(f, x, dv)
    for _ in range(1 if device == "cpu" else 100):
        assert all(map(torch.equal, whole, outcomes(f, x, dv)))
    for rows in (slice(0, 1), slice(M // 3, M)):
        part = outcomes(f, x[rows], dv[rows])
        assert all(torch.equal(a[rows], b) for a, b in zip(whole, part, strict=True))


def test_public_function(device) -> None:
    x = torch.randn(4, 3, 50, device=device)
    got = {impl: flashproto.softmax_topk(x, 5, impl=impl) for impl in ("triton", "reference", "torch")}
    for values, indices in got.values():
        assert values.shape == indices.shape == (4, 3, 5)
        torch.testing.assert_close(values, got["reference"][0])
        assert torch.equal(indices, got["reference"][1])
    for impl in got:
        values, _ = flashproto.softmax_topk(x, 5, renormalize=True, impl=impl)
        torch.testing.assert_close(values.sum(-1), torch.ones(4, 3, device=device))
    for k in (0, 51):
        with pytest.raises(
            ValueError, match=f"softmax_topk: k is {k}; it takes 1 to the width of x, 50"
        ):
            flashproto.softmax_topk(x, k)
    wide = torch.randn(2, 100, device=device)
    with pytest.raises(flashproto.BackendError, match="k is 65; the kernels keep up to 64"):
        flashproto.softmax_topk(wide, 65, impl="triton")
    assert flashproto.softmax_topk(wide, 65)[1].shape == (2, 65)


def test_no_rows(device) -> None:
    x = torch.randn(0, 8, device=device, requires_grad=True)
    values, indices = flashproto.softmax_topk(x, 2, impl="triton")
    assert values.shape == indices.shape == (0, 2)
    assert torch.autograd.grad(values.sum(), x)[0].shape == (0, 8)


@pytest.mark.parametrize("renormalize", [False, True])
def test_opcheck(device, renormalize) -> None:
    op = torch.ops.flashproto
    x = torch.randn(3, 20, device=device, requires_grad=True)
    torch.library.opcheck(op.softmax_topk.default, (x, 4, renormalize, torch.float32))
    with torch.no_grad():
        values, indices, states = op.softmax_topk(x, 4, renormalize, torch.float32)
    arguments = (values, indices, x.detach(), states, 4, renormalize, torch.float32, [True])
    torch.library.opcheck(op.softmax_topk_backward.default, arguments)


def test_compiles_in_one_graph(device) -> None:
    x = torch.randn(6, 40, device=device, dtype=torch.bfloat16)
    dv = torch.randn(6, 3, device=device)

    def f(x: Tensor) -> tuple[Tensor, Tensor]:
        return flashproto.softmax_topk(x * 2, 3, renormalize=True, impl="triton")

    backend = "inductor" if device == "cuda" else "aot_eager"
    compiled = outcomes(torch.compile(f, fullgraph=True, backend=backend), x, dv)
    for a, b in zip(compiled, outcomes(f, x, dv), strict=True):
        torch.testing.assert_close(a, b)


def test_tangents_and_second_derivatives_raise(device) -> None:
    def f(x: Tensor) -> Tensor:
        return flashproto.softmax_topk(x, 2, impl="triton")[0]

    x = torch.randn(3, 8, device=device, requires_grad=True)
    with pytest.raises(RuntimeError):
        torch.func.jvp(f, (x.detach(),), (x.detach(),))
    (dx,) = torch.autograd.grad(f(x).sum(), x, create_graph=True)
    with pytest.raises(NotImplementedError, match="second derivative"):
        torch.autograd.grad(dx.sum(), x)


@pytest.mark.gpu
@pytest.mark.gib(30)
def test_more_than_2_to_31_elements(device) -> None:
    for shape in ((2**31 // 256 + 37, 256), (2**31 // 40_000 + 37, 40_000)):
        x = torch.randn(shape, device=device, dtype=torch.bfloat16)
        dv = torch.randn(shape[0], 4, device=device)
        whole, tail = (
            outcomes(lambda x: softmax_topk(x, 4, False, torch.float32), x[rows], dv[rows])
            for rows in (slice(None), slice(-50, None))
        )
        for a, b in zip(whole, tail, strict=True):
            assert torch.equal(a[-50:], b)


def test_columns_fit_into_keys() -> None:
    """A 16-bit score leaves 16 bits of a key for the column."""
    for N in (1, 4096, 4097, 2**20):
        assert all(configs.softmax_topk_span(N, k) <= 2**16 for k in (1, 64))
        config = configs.softmax_topk(N, 2, 8)
        assert config.split or config.columns <= 2**16


@pytest.mark.parametrize("itemsize", [2, 4])
def test_enough_blocks_to_choose_from(itemsize) -> None:
    for N in (*range(1, 300), 511, 512, 513, 1000, 2049, 4096):
        for k in range(1, min(N, 64) + 1):
            config = configs.softmax_topk(N, itemsize, k)
            assert config.rows >= 1 and config.columns >= N and not config.split
            assert config.columns // config.block >= configs.power_of_two(k)
            assert config.block % config.part == 0
