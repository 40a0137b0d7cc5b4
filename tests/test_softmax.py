"""softmax, log_softmax and logsumexp on the kernels against float64; eager is the yardstick."""

from __future__ import annotations

import math
from functools import partial

import pytest
import torch
from rows import LAYOUTS, assert_no_worse, in_memory, patched, poison
from torch import Tensor

import flashproto
from flashproto import configs

pytest.importorskip("triton")

from flashproto.ops import rows as ops_rows
from flashproto.ops.softmax import LogsumexpSettings, logsumexp

OPERATORS = ("softmax", "log_softmax", "logsumexp")
DTYPES = (torch.float16, torch.bfloat16, torch.float32)
WIDTHS = [1, 2, 3, 31, 64, 100, 257, 1000, 9000, 13000]
GPU_WIDTHS = [1, 2, 7, 32, 100, 256, 768, 1000, 2048, 4096, 5120, 8192, 12288, 16384, 32768, 50257,
              65536, 131072, 262144, 1_000_003, 2**21]  # fmt: skip
INF, NAN = math.inf, math.nan


def outcomes(f, x: Tensor, dy: Tensor) -> tuple[Tensor, Tensor]:
    """The result, and the gradient for dy."""
    x = x.detach().requires_grad_()
    y = f(x)
    return y.detach(), torch.autograd.grad(y, x, dy.to(y.dtype))[0]


def function(operator: str):
    return partial(getattr(flashproto, operator), impl="triton")


def eager(name: str):
    return lambda x: getattr(torch, name)(x, -1)


def gradient_from(lse: Tensor, x: Tensor, dy: Tensor) -> Tensor:
    """Of logsumexp, eagerly."""
    return (x - lse[:, None]).exp() * dy[:, None]


def check(device, operator: str, x: Tensor, layout: str = "contiguous") -> None:
    """The result and the gradient of one call on x [M, N]."""
    dy = torch.randn(x.shape if operator != "logsumexp" else x.shape[:1], device=device).to(x.dtype)
    exact = outcomes(eager(operator), x.double(), dy.double())
    yardstick = outcomes(eager(operator), x, dy)
    if layout != "contiguous":
        x = in_memory(x, layout)
        dy = in_memory(dy, layout) if dy.ndim == 2 else torch.stack([dy, dy], 1)[:, 0]
    y, dx = outcomes(function(operator), x, dy)
    # Under the interpreter NumPy chooses the order of a sum: a few roundings of l are its own.
    own = exact[0].abs().max().item() if device == "cpu" else 0.0
    assert_no_worse("y", y, yardstick[0], exact[0], own)
    if operator == "softmax":
        terms = exact[0] * dy.abs().double().amax(-1, keepdim=True)
    elif operator == "log_softmax":
        terms = dy.abs().double() + exact[0].exp() * dy.abs().double().sum(-1, keepdim=True)
    else:
        # Of the logsumexp that the forward keeps; and of the exact one, of which dx shows a rounding
        # |y| times, eager's dx too.
        lse = logsumexp((x,), LogsumexpSettings(torch.float32))
        same = gradient_from(lse, x.float(), dy).to(x.dtype)
        wanted = gradient_from(lse.double(), x.double(), dy.double())
        assert_no_worse("dx from lse", dx, same, wanted, wanted.abs().max().item())
        terms = exact[1].abs() * (1 + exact[0].abs() / 4)[:, None]
    assert_no_worse("dx", dx, yardstick[1], exact[1], terms.abs().max().item())


@pytest.mark.parametrize("operator", OPERATORS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("N", WIDTHS)
def test_against_float64(device, monkeypatch, N, dtype, operator) -> None:
    poison(monkeypatch)
    # Rows enough that eager's largest error is not a matter of luck.
    rows = 2000 if device != "cpu" else 60 if N < 300 else 10 if N < 2000 else 3
    check(device, operator, (3 * torch.randn(rows, N, device=device)).to(dtype))


@pytest.mark.gpu
@pytest.mark.parametrize("operator", OPERATORS)
@pytest.mark.parametrize("dtype", DTYPES[1:], ids=str)
@pytest.mark.parametrize("N", GPU_WIDTHS)
def test_no_worse_than_eager_at_every_width(device, monkeypatch, N, dtype, operator) -> None:
    poison(monkeypatch)
    rows = max(min(5000, 2**22 // N), 8)
    check(device, operator, (3 * torch.randn(rows, N, device=device)).to(dtype))


@pytest.mark.parametrize("operator", OPERATORS)
def test_rows_wider_than_any_split(device, monkeypatch, operator) -> None:
    """Rows of more than 2^20 columns are looped over; here, narrower ones are."""
    poison(monkeypatch)
    others = {}
    for name in ("softmax_forward", "softmax_backward", "logsumexp"):
        looped = getattr(configs, name)(2**20 + 1, 4)
        assert looped.looped
        assert not looped.split
        others[name] = lambda *_, looped=looped: looped
    with patched(configs, **others):
        for N in (5000, 8192):
            check(device, operator, 3 * torch.randn(3, N, device=device))


@pytest.mark.gpu
@pytest.mark.parametrize("operator", OPERATORS)
@pytest.mark.parametrize("N", [50_257, 40_008, 131_072])
def test_programs_that_do_not_wait_find_the_same(device, N, operator) -> None:
    """A program that gives up on the others of its row does their work, to the same bits."""
    x, dy = (torch.randn(200, N, device=device, dtype=torch.bfloat16) for _ in range(2))
    dy = dy if operator != "logsumexp" else dy[:, 0]
    waited = outcomes(function(operator), x, dy)
    for polls in (0, 1):
        with patched(ops_rows, POLLS=polls):
            for _ in range(20):
                assert all(map(torch.equal, waited, outcomes(function(operator), x, dy)))


@pytest.mark.gpu
@pytest.mark.parametrize("operator", OPERATORS)
@pytest.mark.parametrize("N", [2**19, 2**20])
def test_rows_split_on_several_streams_at_once(device, N, operator) -> None:
    """More programs wait for one another than the GPU holds."""
    x, dy = (torch.randn(300, N, device=device, dtype=torch.bfloat16) for _ in range(2))
    dy = dy if operator != "logsumexp" else dy[:, 0]
    wanted = outcomes(function(operator), x, dy)
    streams = [torch.cuda.Stream() for _ in range(8)]
    torch.cuda.synchronize()
    got = []
    for stream in streams:
        with torch.cuda.stream(stream):
            got.append(outcomes(function(operator), x[:40], dy[:40]))
    torch.cuda.synchronize()
    for a in got:
        assert all(torch.equal(w[:40], g) for w, g in zip(wanted, a, strict=True))


@pytest.mark.parametrize("operator", OPERATORS)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_any_strides(device, monkeypatch, layout, operator) -> None:
    poison(monkeypatch)
    for N in (64, 9000):
        check(device, operator, torch.randn(5, N, device=device), layout)


@pytest.mark.parametrize("operator", OPERATORS)
def test_many_dimensions_and_expanded_gradients(device, operator) -> None:
    x = torch.randn(3, 7, 4, 20, device=device).transpose(0, 2)
    got = []
    for f in (function(operator), eager(operator)):
        leaf = x.detach().requires_grad_()
        y = f(leaf)
        got.append((y, torch.autograd.grad(y.sum(), leaf)[0]))
    for a, b in zip(*got, strict=True):
        torch.testing.assert_close(a, b)


@pytest.mark.parametrize("operator", OPERATORS)
@pytest.mark.parametrize("N", [7, 9000])
def test_infinities_and_nan_as_in_torch(device, N, operator) -> None:
    x = torch.randn(8, N, device=device)
    x[0] = -INF
    x[1, : N - 1] = -INF
    x[2, 0], x[3, N - 1], x[4, N // 2] = INF, NAN, -INF
    x[5, 0], x[5, N - 1] = INF, NAN
    x[6, 0], x[6, 1:] = INF, -INF
    x[7] = -1e30
    dy = torch.randn(8, N, device=device)
    dy = dy if operator != "logsumexp" else dy[:, 0]
    got, wanted = outcomes(function(operator), x, dy), outcomes(eager(operator), x, dy)
    for a, b in zip(got, wanted, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-3, equal_nan=True)


@pytest.mark.parametrize("operator", OPERATORS)
def test_large_scores(device, operator) -> None:
    """Subtracting the maximum before anything else keeps the digits that are left."""
    for N in (100, 9000):
        check(device, operator, torch.randn(3, N, device=device) + 1e4)
        check(device, operator, torch.randn(3, N, device=device) - 1e4)
        check(device, operator, 1e4 * torch.randn(3, N, device=device))


@pytest.mark.parametrize("shape", [(0, 8), (3, 0, 8), (3, 0)])
def test_no_elements(device, shape) -> None:
    x = torch.randn(shape, device=device, requires_grad=True)
    for operator in OPERATORS:
        y = getattr(flashproto, operator)(x, impl="triton")
        (dx,) = torch.autograd.grad(y.sum(), x)
        assert y.shape == (shape if operator != "logsumexp" else shape[:-1])
        assert dx.shape == shape
    assert (y == -INF).all()


@pytest.mark.parametrize("operator", OPERATORS)
@pytest.mark.parametrize("N", [24, 1000, 9000])
def test_rows_do_not_depend_on_each_other_and_repeat_bitwise(device, N, operator) -> None:
    M = 37 if N < 5000 else 4
    x, dy = (torch.randn(M, N, device=device, dtype=torch.bfloat16) for _ in range(2))
    dy = dy if operator != "logsumexp" else dy[:, 0]
    f = function(operator)
    y, dx = outcomes(f, x, dy)
    for _ in range(1 if device == "cpu" else 100):
        assert all(map(torch.equal, (y, dx), outcomes(f, x, dy)))
    for rows in (slice(0, 1), slice(M // 3, M // 2), slice(M - 1, M)):
        assert all(map(torch.equal, (y[rows], dx[rows]), outcomes(f, x[rows], dy[rows])))


def test_public_functions(device) -> None:
    x = torch.randn(4, 3, 10, device=device)
    for operator in OPERATORS:
        got, plain, torchs = (
            getattr(flashproto, operator)(x, impl=impl) for impl in ("triton", "reference", "torch")
        )
        torch.testing.assert_close(got, plain)
        torch.testing.assert_close(got, torchs)
    y = flashproto.softmax(x.bfloat16(), dtype=torch.float32, impl="triton")
    torch.testing.assert_close(y, torch.softmax(x.bfloat16(), -1, dtype=torch.float32))


@pytest.mark.parametrize("dtype", DTYPES[1:], ids=str)
def test_opcheck(device, dtype) -> None:
    op = torch.ops.flashproto
    x = torch.randn(3, 20, device=device, dtype=dtype, requires_grad=True)
    y, lse = torch.softmax(x, -1).detach(), torch.logsumexp(x, -1).detach().float()
    for log in (False, True):
        torch.library.opcheck(op.softmax.default, (x, log, torch.float32))
        torch.library.opcheck(op.softmax_backward.default, (y, y, log, dtype, [True]))
    for result in (torch.float32, torch.bfloat16):
        torch.library.opcheck(op.logsumexp.default, (x, result))
        arguments = (lse.to(result), x.detach(), lse, result, [True])
        torch.library.opcheck(op.logsumexp_backward.default, arguments)


@pytest.mark.parametrize("operator", OPERATORS)
def test_compiles_in_one_graph(device, operator) -> None:
    x = torch.randn(6, 40, device=device, dtype=torch.bfloat16)
    dy = torch.randn(x.shape if operator != "logsumexp" else x.shape[:1], device=device)

    def f(x):
        return getattr(flashproto, operator)(x * 2, impl="triton")

    backend = "inductor" if device == "cuda" else "aot_eager"
    compiled = outcomes(torch.compile(f, fullgraph=True, backend=backend), x, dy)
    for a, b in zip(compiled, outcomes(f, x, dy), strict=True):
        torch.testing.assert_close(a, b)


@pytest.mark.parametrize("operator", OPERATORS)
def test_tangents_and_second_derivatives_raise(device, operator) -> None:
    x = torch.randn(3, 8, device=device)

    def f(x):
        return getattr(flashproto, operator)(x, impl="triton")

    with pytest.raises(RuntimeError):
        torch.func.jvp(f, (x,), (x,))
    with pytest.raises(RuntimeError):
        torch.compile(lambda x, t: torch.func.jvp(f, (x,), (t,)), fullgraph=True, backend="aot_eager")(
            x, x
        )
    leaf = x.clone().requires_grad_()
    (dx,) = torch.autograd.grad(f(leaf).square().sum(), leaf, create_graph=True)
    with pytest.raises(RuntimeError):
        dx.sum().backward()
    torch.testing.assert_close(
        torch.func.grad(lambda x: f(x).square().sum())(x),
        torch.func.grad(lambda x: eager(operator)(x).square().sum())(x),
    )


# --- on a GPU only -------------------------------------------------------------------------------


@pytest.mark.gpu
@pytest.mark.parametrize("operator", OPERATORS)
@pytest.mark.parametrize("N", [2**20, 10**6])
def test_a_million_columns(device, monkeypatch, N, operator) -> None:
    poison(monkeypatch)
    check(device, operator, torch.randn(9, N, device=device).bfloat16())


@pytest.mark.gpu
@pytest.mark.gib(30)
@pytest.mark.parametrize("operator", OPERATORS)
def test_many_rows_and_more_than_2_to_31_elements(device, operator) -> None:
    f = function(operator)
    for shape in (
        (70_000, 8),
        (300_000, 3),
        (2**31 // 4096 + 37, 4096),
        (2**31 // 20_480 + 37, 20_480),
    ):
        x = torch.randn(shape, device=device, dtype=torch.bfloat16)
        dy = x if operator != "logsumexp" else x[:, 0]
        whole, tail = outcomes(f, x, dy), outcomes(f, x[-50:], dy[-50:])
        for a, b in zip(whole, tail, strict=True):
            assert torch.equal(a[-50:], b)


@pytest.mark.gpu
@pytest.mark.parametrize("operator", OPERATORS)
@pytest.mark.parametrize("N", [3000, 20_480, 131_072])
def test_second_stream_and_cuda_graph(device, N, operator) -> None:
    f = function(operator)
    x = torch.randn(512, N, device=device, dtype=torch.bfloat16)
    dy = torch.randn_like(x) if operator != "logsumexp" else torch.randn_like(x[:, 0])
    wanted, late = outcomes(f, x, dy), torch.empty_like(x)
    stream = torch.cuda.Stream()
    torch.cuda.synchronize()
    with torch.cuda.stream(stream):
        torch.cuda._sleep(200_000_000)
        late.copy_(x)
        got = outcomes(f, late, dy)
    stream.synchronize()
    assert all(map(torch.equal, got, wanted))
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = outcomes(f, late, dy)
    late.normal_()
    graph.replay()
    assert all(map(torch.equal, captured, outcomes(f, late, dy)))
