"""LayerNorm and RMSNorm on the kernels against float64; eager PyTorch is the yardstick."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from norms import fill, norm
from rows import LAYOUTS, assert_no_worse, in_memory, poison
from torch import Tensor

import flashproto
from flashproto import configs, reference
from flashproto.nn import RMSNorm

pytest.importorskip("triton")

from flashproto.ops import call_cache, norm_launch

EPS = 1e-5
f16, bf16, f32 = torch.float16, torch.bfloat16, torch.float32

# centered, then the dtypes of x, residual, weight, bias; None is not given.
COMBINATIONS = [
    (True, f32, None, f32, f32),
    (True, bf16, None, f32, bf16),
    (True, f16, f32, None, f16),
    (True, bf16, bf16, bf16, None),
    (False, f32, None, f32, None),
    (False, bf16, f32, f32, None),
    (False, f16, f16, None, None),
    (False, f32, bf16, bf16, f32),
    (False, bf16, bf16, bf16, bf16),
]
WIDTHS = [1, 2, 3, 31, 64, 100, 257, 768, 1000, 12288, 17000]
GPU_WIDTHS = [
    1,
    2,
    7,
    32,
    100,
    256,
    768,
    1000,
    2048,
    4096,
    5120,
    8192,
    12288,
    16384,
    32768,
    50257,
    65536,
    131072,
]


def eager(x, residual, weight, bias, ndim, centered):
    """PyTorch's own operators one after the other, in the dtypes given; mixed dtypes in float32."""
    total = x if residual is None else x + residual
    shape = total.shape[total.ndim - ndim :]
    dtype = total.dtype if all(p is None or p.dtype == total.dtype for p in (weight, bias)) else f32
    t, w, b = (None if p is None else p.to(dtype) for p in (total, weight, bias))
    if centered:
        y = F.layer_norm(t, shape, w, b, EPS)
    else:
        y = F.rms_norm(t, shape, w, EPS)
        y = y if b is None else y + b
    return y.to(x.dtype), total


def exact(x, residual, weight, bias, ndim, centered):
    """The definition in float64, of total as it is rounded."""
    total = x if residual is None else x + residual
    t, w, b = (None if p is None else p.detach().double() for p in (total, weight, bias))
    leaves = [p.requires_grad_() for p in (t, w, b) if p is not None]
    shape = t.shape[t.ndim - ndim :]
    return reference.norm(t, shape, w, b, EPS, centered=centered), t, leaves


def given(*tensors):
    return [t for t in tensors if t is not None]


def check(device, shape, combination, ndim=1, layout="contiguous", loc=0.0) -> None:
    """y, total and every gradient of one call."""
    centered, x_dtype, *others = combination
    N = torch.Size(shape[-ndim:])

    def draw(dims, dtype, loc=0.0):
        return None if dtype is None else (torch.randn(dims, device=device) + loc).to(dtype)

    def leaf(t):
        return None if t is None else t.detach().requires_grad_()

    x, residual = draw(shape, x_dtype, loc), draw(shape, others[0])
    weight, bias = draw(N, others[1], 1.0), draw(N, others[2])
    dy, dtotal = draw(shape, x_dtype), None
    if residual is not None:
        dtotal = draw(shape, torch.promote_types(x.dtype, residual.dtype))
    if layout != "contiguous":
        x, residual, dy, dtotal = (
            None if t is None else in_memory(t, layout) for t in (x, residual, dy, dtotal)
        )
    x, residual, weight, bias = (leaf(t) for t in (x, residual, weight, bias))
    inputs = given(x, residual, weight, bias)

    result = norm(x, residual, weight, bias, ndim, EPS, centered)
    y, total = (result, None) if residual is None else result
    got = torch.autograd.grad(given(y, total), inputs, given(dy, dtotal))
    y_eager, total_eager = eager(x, residual, weight, bias, ndim, centered)
    outputs_eager = given(y_eager, None if total is None else total_eager)
    got_eager = torch.autograd.grad(outputs_eager, inputs, given(dy, dtotal))
    y_exact, t, leaves = exact(x, residual, weight, bias, ndim, centered)
    dt, *dparameters = torch.autograd.grad(y_exact, leaves, dy.double())
    dt = dt if dtotal is None else dt + dtotal.double()
    wanted = [dt] * (1 if residual is None else 2) + dparameters

    # The size of the terms whose sums or differences these are, where they may cancel.
    def rows(t):
        return t.detach().double().reshape(-1, N.numel())

    z = rows(t)
    rstd = (z.var(-1, correction=0) if centered else z.square().mean(-1)).add(EPS).rsqrt()[:, None]
    w = 1.0 if weight is None else weight.detach().double().flatten()
    g = rows(dy).abs()
    dx_terms = (g * w).abs().amax(-1, keepdim=True) * rstd
    y_terms = z.abs().amax(-1, keepdim=True) * rstd * w
    magnitudes = {
        "x": dx_terms,
        "residual": dx_terms,
        "weight": (g * z.abs() * rstd).sum(0),
        "bias": g.sum(0),
    }

    assert_no_worse("y", y, y_eager, y_exact.detach(), y_terms.abs().max().item())
    if total is not None:
        assert torch.equal(total, total_eager)
    names = [n for n, p in zip(magnitudes, (x, residual, weight, bias), strict=True) if p is not None]
    for name, a, b, c in zip(names, got, got_eager, wanted, strict=True):
        assert_no_worse(f"d{name}", a, b, c, magnitudes[name].max().item())


@pytest.mark.parametrize("combination", range(len(COMBINATIONS)))
@pytest.mark.parametrize("N", WIDTHS)
def test_against_float64(device, monkeypatch, N, combination) -> None:
    poison(monkeypatch)
    rows = 300 if 16 < N < 128 else 5 if N < 5000 else 3
    check(device, (rows, N), COMBINATIONS[combination])


@pytest.mark.gpu
@pytest.mark.parametrize("combination", [0, 1, 3, 5, 6])
@pytest.mark.parametrize("N", GPU_WIDTHS)
def test_no_worse_than_eager_at_every_width(device, monkeypatch, N, combination) -> None:
    poison(monkeypatch)
    check(device, (min(5000, 2**22 // N), N), COMBINATIONS[combination])


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("N", [64, 9000])
def test_any_strides(device, monkeypatch, N, layout) -> None:
    poison(monkeypatch)
    check(device, (5, N), COMBINATIONS[3], layout=layout)
    check(device, (5, N), COMBINATIONS[4], layout=layout)


@pytest.mark.parametrize("shape", [(4, 3, 7, 5), (2, 70, 1), (6, 13)])
@pytest.mark.parametrize("combination", [0, 5])
def test_multi_dimensional_normalized_shape(device, monkeypatch, shape, combination) -> None:
    poison(monkeypatch)
    check(device, shape, COMBINATIONS[combination], ndim=2)


def test_expanded_gradients_and_inputs(device) -> None:
    x = torch.randn(1, 40, device=device, requires_grad=True)
    weight = torch.randn(40, device=device, requires_grad=True)
    xs, out = x.expand(6, 40), []
    for f in (norm, lambda *a: flashproto.rms_norm(a[0], 40, a[2], EPS, impl="reference")):
        y = f(xs, None, weight, None, 1, EPS, False)
        out.append((y, *torch.autograd.grad(y.sum(), (x, weight))))
    for a, b in zip(*out, strict=True):
        torch.testing.assert_close(a, b)


@pytest.mark.parametrize("N", [1000, 17000])
def test_large_mean_and_small_deviation(device, N) -> None:
    """E[x^2] - E[x]^2 in float32 gives a deviation of 0 to 3 here."""
    x = torch.randn(4, N, device=device) + 1e4
    y = norm(x, None, None, None, 1, 0.0, True)
    wanted = reference.norm(x.double(), [N], None, None, 0.0, centered=True)
    assert (y.double() - wanted).abs().max() < 4e-3  # the mean itself is rounded to 1e-3
    assert (y.double().std(-1, correction=0) - 1).abs().max() < 1e-4


@pytest.mark.parametrize("N", [2, 3, 7, 31, 64])
def test_short_rows_of_nearly_equal_elements(device, monkeypatch, N) -> None:
    """Deviations of 1 to 1e-3 at a mean of 100, in float32: eager, whose mean is rounded, keeps one to
    three digits of y and of dx; here its rounding does not show.

    A row may be off by eight roundings, 2^-24 each, of its largest term: one each of x - mean, of what
    is left less its mean, and of two products; of rstd one each for quotient, sum, root and reciprocal,
    those before the root halved, and half of what the sum of squares is off by.  Sums over more
    elements add one a level at worst, but of either sign.
    """
    poison(monkeypatch)
    x = 100 + torch.randn(300, N, device=device) * 10 ** (-3 * torch.rand(300, 1, device=device))
    weight, dy = torch.randn(N, device=device) + 1, torch.randn(300, N, device=device)

    def gradients(f, *leaves):
        leaves = [t.detach().requires_grad_() for t in leaves]
        y = f(*leaves)
        return [y.detach(), *torch.autograd.grad(y, leaves, dy.to(y.dtype))]

    got = gradients(lambda x, w: norm(x, None, w, None, 1, EPS, True), x, weight)
    z, w = x.double(), weight.double()
    wanted = gradients(lambda x, w: reference.norm(x, [N], w, None, EPS, centered=True), z, w)
    rstd = (z.var(-1, correction=0) + EPS).rsqrt()[:, None]
    xhat, g = (z - z.mean(-1, keepdim=True)).abs() * rstd, dy.double().abs()
    largest = xhat.amax(-1, keepdim=True)
    terms = (largest * w.abs().max(), (g * w.abs()).amax(-1, keepdim=True) * rstd, (g * largest).sum(0))
    for name, a, b, c in zip(("y", "dx", "dweight"), got, wanted, terms, strict=True):
        # terms of rows of equal elements are 0, and so is the error of those
        excess = ((a.double() - b).abs() - 4 * torch.finfo(f32).eps * c).max().item()
        assert excess <= 0, f"{name} is off by {excess:.3g} more than its terms allow"


@pytest.mark.parametrize("N", [100, 17000])
@pytest.mark.parametrize("centered", [True, False])
def test_nan_stays_in_its_row(device, N, centered) -> None:
    x = torch.randn(6, N, device=device)
    x[1, N // 2], x[4, N - 1] = float("nan"), float("inf")
    y = norm(x, None, None, None, 1, EPS, centered)
    assert y[1].isnan().all()
    assert y[4].isnan().any()
    assert not y[[0, 2, 3, 5]].isnan().any()


@pytest.mark.parametrize("N", [100, 17000])
@pytest.mark.parametrize("centered", [True, False])
def test_rows_of_zeros(device, N, centered) -> None:
    x, weight = torch.zeros(2, N, device=device, requires_grad=True), torch.randn(N, device=device)
    y = norm(x, None, weight, None, 1, EPS, centered)
    assert not y.any()
    (dx,) = torch.autograd.grad(y, x, torch.zeros_like(y))
    assert not dx.any()


@pytest.mark.parametrize("shape", [(0, 8), (3, 0, 8), (3, 0)])
def test_no_elements(device, shape) -> None:
    x = torch.randn(shape, device=device, requires_grad=True)
    weight = torch.randn(shape[-1], device=device, requires_grad=True)
    y, total = flashproto.add_layer_norm(x, x, shape[-1], weight, weight, impl="triton")
    dx, dweight = torch.autograd.grad((y.sum() + total.sum()), (x, weight))
    assert y.shape == total.shape == dx.shape == shape
    assert dweight.shape == weight.shape
    assert not dweight.any()


@pytest.mark.parametrize("N", [24, 1000, 17000])
@pytest.mark.parametrize("centered", [True, False])
def test_rows_do_not_depend_on_each_other_and_repeat_bitwise(device, N, centered) -> None:
    check_rows(device, N, centered)


def check_rows(device, N, centered) -> None:
    """Bits depend on the row alone, and those of the sums over rows on the rows alone."""
    slow = device == "cpu" and N > 5000
    M = 3 if slow else 37
    x, dy = (torch.randn(M, N, device=device, dtype=bf16) for _ in range(2))
    weight = torch.randn(N, device=device)

    def run(rows: slice) -> list[Tensor]:
        xs, w = x[rows].detach().requires_grad_(), weight.detach().requires_grad_()
        y = norm(xs, None, w, w, 1, EPS, centered)
        return [y.detach(), *torch.autograd.grad(y, (xs, w), dy[rows])]

    y, dx, dweight = run(slice(None))
    for _ in range(1 if device == "cpu" else 100):
        assert all(map(torch.equal, (y, dx, dweight), run(slice(None))))
    for rows in (slice(0, 1), slice(M // 3, M // 2), slice(M - 1, M))[2 if slow else 0 :]:
        assert all(map(torch.equal, (y[rows], dx[rows]), run(rows)))


def test_only_some_gradients(device) -> None:
    x, residual = (torch.randn(5, 40, device=device) for _ in range(2))
    weight, bias = (torch.randn(40, device=device) for _ in range(2))
    bias.requires_grad_()
    y, total = norm(x, residual, weight, bias, 1, EPS, True)
    y.sum().backward()
    torch.testing.assert_close(bias.grad, torch.full_like(bias, 5.0))
    residual = residual.to(bf16).requires_grad_()
    _, total = norm(x, residual, weight, None, 1, EPS, True)  # y is unused
    dtotal = torch.randn_like(total)
    (dresidual,) = torch.autograd.grad(total, residual, dtotal)
    assert torch.equal(dresidual, dtotal.to(bf16))


def test_public_functions(device) -> None:
    x, residual = (torch.randn(5, 4, 10, device=device) for _ in range(2))
    weight, bias = (torch.randn(4, 10, device=device) for _ in range(2))
    for f, args in (
        (flashproto.layer_norm, (x, (4, 10), weight, bias, 1e-3)),
        (flashproto.rms_norm, (x, (4, 10), weight)),
        (flashproto.add_layer_norm, (x, residual, (4, 10), weight, bias)),
        (flashproto.add_rms_norm, (x, residual, 10, None, 1e-6)),
        (partial(flashproto.rms_norm, bias=bias), (x, (4, 10), weight)),
        (partial(flashproto.add_rms_norm, bias=bias[0]), (x, residual, 10)),
    ):
        got = f(*args, impl="triton")
        torch.testing.assert_close(got, f(*args, impl="reference"))
        torch.testing.assert_close(got, f(*args, impl="torch"))


def test_module_of_rms_norm_with_a_bias(device) -> None:
    module = RMSNorm(24, bias=True, device=device)
    assert list(module.state_dict()) == ["weight", "bias"]
    assert not module.bias.any()
    torch.nn.init.normal_(module.bias)
    x = torch.randn(4, 24, device=device)
    torch.testing.assert_close(module(x), F.rms_norm(x, (24,)) + module.bias)
    assert list(RMSNorm(24).state_dict()) == ["weight"]


OP_CASES = [
    (True, f32, None, f32, f32),
    (True, bf16, f32, f32, None),
    (False, f32, f32, None, None),
    (False, bf16, None, f32, None),
]


@pytest.mark.parametrize("centered", [True, False])
def test_ops_return_nothing_that_is_not_written(device, monkeypatch, centered) -> None:
    """Statistics of 3 rows, which are not whole 16 bytes."""
    poison(monkeypatch)
    x = torch.randn(3, 1000, device=device)
    ops, settings = torch.ops.flashproto, (1, EPS, centered, "torch")
    results = [
        *ops.norm(x, None, None, None, *settings, False),
        *ops.hooked_norm(x, None, None, None, [], *settings, False, f32, True, "", [], "", []),
        *ops.norm(x, None, None, None, *settings, True),
    ]
    assert sum(t.numel() > 0 for t in results) == 6
    assert not any(t.isnan().any() for t in results)


def test_gradients_where_nothing_reaches_y(device) -> None:
    """They are that of the sum; an op's results may not lie in the memory of its arguments."""
    x, residual = (torch.randn(5, 40, device=device, requires_grad=True) for _ in range(2))
    dtotal = torch.randn(5, 40, device=device)
    _, total = norm(x, residual, None, None, 1, EPS, True)
    assert all(torch.equal(g, dtotal) for g in torch.autograd.grad(total, (x, residual), dtotal))
    settings = 1, EPS, True, "torch", False, True, f32, f32, f32
    needs = [True, True, False, False]
    dx, *none = torch.ops.flashproto.norm_backward(
        None, dtotal, total.detach(), None, None, *settings, needs
    )
    assert torch.equal(dx, dtotal)
    assert dx.data_ptr() != dtotal.data_ptr()
    assert not any(t.numel() for t in none)


@pytest.mark.parametrize("combination", OP_CASES)
def test_compiles_in_one_graph(device, combination) -> None:
    centered, x_dtype, *others = combination
    x, residual, weight, bias = (
        None if d is None else torch.randn(s, device=device, dtype=d, requires_grad=True)
        for s, d in zip(((6, 40), (6, 40), (40,), (40,)), (x_dtype, *others), strict=True)
    )
    name = ("add_" if residual is not None else "") + ("layer_norm" if centered else "rms_norm")
    f = getattr(flashproto, name)
    args = (*given(x, residual), 40, weight, *((bias,) if centered else ()), EPS)

    def run(call) -> list[Tensor]:
        out = call(lambda *a: f(*a, impl="triton"))(*args)
        out = out if isinstance(out, tuple) else (out,)
        loss = sum((o.float() ** 2).sum() for o in out)
        return [*out, *torch.autograd.grad(loss, given(x, residual, weight, bias))]

    backend = "inductor" if device == "cuda" else "aot_eager"
    compiled = run(lambda g: torch.compile(g, fullgraph=True, backend=backend))
    for a, b in zip(compiled, run(lambda g: g), strict=True):
        torch.testing.assert_close(a, b)


def test_works_under_func_grad(device) -> None:
    x = torch.randn(4, 12, device=device)
    grads = [
        torch.func.grad(lambda x, i=impl: flashproto.rms_norm(x, 12, impl=i).pow(3).sum())(x)
        for impl in ("triton", "reference")
    ]
    torch.testing.assert_close(*grads)


def test_configurations() -> None:
    for itemsize in (2, 4):
        for N in [*range(1, 70), 192, 320, 704, 768, 1000, 4096, 8193, 12288, 16384, 16385, 10**6]:
            for config in (
                configs.norm_forward(N, itemsize, False, True, (9, 0)),
                *(
                    configs.norm_backward(N, itemsize, sums, centered, capability, residual, bias)
                    for residual in (False, True)
                    for bias in (False, True)
                    for sums in (False, True)
                    for centered in (False, True)
                    for capability in ((8, 0), (9, 0))
                ),
                *(
                    configs.norm_backward(N, itemsize, sums, True, (9, 0), statistics=False)
                    for sums in ((False, True) if not configs.norm_keeps_statistics(N) else ())
                ),
                configs.softmax_forward(N, itemsize),
                configs.softmax_backward(N, itemsize),
                configs.logsumexp(N, itemsize),
            ):
                for size in (config.rows, config.columns, config.num_warps):
                    assert size > 0
                    assert size & (size - 1) == 0
                if config.looped or config.split:
                    assert config.rows == 1
                else:
                    assert config.columns * config.chunks * config.cluster >= N
                elements = config.rows * config.columns * config.chunks
                assert elements // (32 * config.num_warps) <= 64
                assert config.num_warps <= 8 * itemsize
                assert config.programs >= 1


@pytest.fixture
def clusters(device, monkeypatch) -> Iterator[None]:
    """Tiles as on Hopper, where a GPU is not; as they are, where it is."""
    if device == "cpu":
        monkeypatch.setattr(norm_launch, "capability", lambda device: (9, 0))
    call_cache.forget()
    yield
    call_cache.forget()


@pytest.mark.usefixtures("clusters")
@pytest.mark.parametrize("combination", [0, 1, 3, 5, 6])
def test_rows_shared_by_clusters(device, monkeypatch, combination) -> None:
    poison(monkeypatch)
    assert configs.norm_backward(8464, 2, True, True, (9, 0)).cluster == 4
    check(device, (5, 8464), COMBINATIONS[combination])


@pytest.mark.parametrize("centered", [False, True])
def test_variance_below_normal_numbers(device, centered) -> None:
    x = torch.randn(5, 256, device=device) * 1e-20
    y, mean, rstd = torch.empty_like(x), *torch.empty(2, 5, device=device).unbind()
    fill(x, y, mean if centered else None, rstd, 0.0)
    row = x.double() - x.double().mean(1, keepdim=True) * centered
    want = row.square().mean(1).rsqrt()
    torch.testing.assert_close(rstd.double(), want, rtol=1e-4, atol=0)
    torch.testing.assert_close(y.double(), row * want[:, None], rtol=1e-4, atol=1e-5)


@pytest.mark.usefixtures("clusters")
@pytest.mark.parametrize("combination", [3, 6])
def test_rows_and_residuals_shared_by_clusters(device, monkeypatch, combination) -> None:
    poison(monkeypatch)
    assert configs.norm_backward(14352, 2, True, True, (9, 0), True).cluster == 8
    check(device, (3, 14352), COMBINATIONS[combination])


# --- on a GPU only -------------------------------------------------------------------------------


@pytest.mark.gpu
@pytest.mark.parametrize("N", [8208, 12288, 16384, 36864, 50257, 65536, 131072])
@pytest.mark.parametrize("centered", [True, False])
def test_wide_rows_do_not_depend_on_each_other_and_repeat_bitwise(device, N, centered) -> None:
    check_rows(device, N, centered)


@pytest.mark.gpu
@pytest.mark.parametrize("N", [2**20, 10**6])
@pytest.mark.parametrize("combination", [3, 4])
def test_a_million_columns(device, monkeypatch, N, combination) -> None:
    poison(monkeypatch)
    check(device, (9, N), COMBINATIONS[combination])


@pytest.mark.gpu
@pytest.mark.parametrize("N", [16392, 20_480, 32768, 50_264, 65536, 140_000, 262_144])
@pytest.mark.parametrize("combination", range(len(COMBINATIONS)))
def test_rows_in_shared_memory(device, monkeypatch, N, combination) -> None:
    """On Hopper; elsewhere they wait in the cache."""
    poison(monkeypatch)
    check(device, (5, N), COMBINATIONS[combination])


@pytest.mark.gpu
@pytest.mark.parametrize("N", [8208, 10_240, 12_304, 20_480, 24_592, 28_672, 40_960, 49_168, 61_440])
@pytest.mark.parametrize("combination", range(len(COMBINATIONS)))
def test_clusters_of_every_size(device, monkeypatch, N, combination) -> None:
    """Whole chunks and parts of them, several rows to each program; no clusters before Hopper."""
    poison(monkeypatch)
    check(device, (200, N), COMBINATIONS[combination])


@pytest.mark.gpu
@pytest.mark.parametrize("casting", ["torch", "llama", "gemma"])
@pytest.mark.parametrize("N", [32768, 65536])
def test_unaligned_wide_rows_are_as_aligned_ones(device, N, casting) -> None:
    x, residual = (torch.randn(7, N + 3, device=device, dtype=bf16)[:, 3:] for _ in range(2))
    weight, bias = torch.randn(2, N, device=device).unbind()

    def run(x, residual):
        return norm(x, residual, weight, bias, 1, EPS, True, casting)

    for got, wanted in zip(run(x, residual), run(x.contiguous(), residual.contiguous()), strict=True):
        assert torch.equal(got, wanted)
    assert torch.equal(run(x, None), run(x.contiguous(), None))


@pytest.mark.gpu
def test_many_rows(device) -> None:
    for shape in ((70_000, 8), (300_000, 3), (66_000, 17_000)):
        x = torch.randn(shape, device=device, dtype=bf16, requires_grad=True)
        y = norm(x, None, None, None, 1, EPS, False)
        y.backward(y)
        tail = x.detach()[-5:].requires_grad_()
        y_tail = norm(tail, None, None, None, 1, EPS, False)
        y_tail.backward(y_tail)
        assert torch.equal(y[-5:], y_tail)
        assert torch.equal(x.grad[-5:], tail.grad)


@pytest.mark.gpu
@pytest.mark.gib(30)
@pytest.mark.parametrize("N", [4096, 20_480])
def test_more_than_2_to_31_elements(device, N) -> None:
    M = 2**31 // N + 37
    x = torch.randn(M, N, device=device, dtype=bf16)
    weight = torch.randn(N, device=device, requires_grad=True)

    def run(x):
        x = x.detach().requires_grad_()
        y, total = norm(x, x.detach(), weight, None, 1, EPS, True)
        (dx,) = torch.autograd.grad((y, total), x, (x.detach(), x.detach()))
        return y.detach(), total.detach(), dx

    for whole, tail in zip(run(x), run(x[-50:]), strict=True):
        assert torch.equal(whole[-50:], tail)


@pytest.mark.gpu
def test_second_stream(device) -> None:
    x = torch.randn(4096, 4096, device=device, dtype=bf16)
    weight = torch.randn(4096, device=device, requires_grad=True)
    wanted = norm(x, None, weight, None, 1, EPS, False)
    stream = torch.cuda.Stream()
    late = torch.empty_like(x)
    torch.cuda.synchronize()
    with torch.cuda.stream(stream):
        torch.cuda._sleep(200_000_000)
        late.copy_(x)
        y = norm(late, None, weight, None, 1, EPS, False)
    stream.synchronize()
    assert torch.equal(y, wanted)


@pytest.mark.gpu
@pytest.mark.parametrize("N", [768, 20_480])
def test_cuda_graph(device, N) -> None:
    x, residual = (torch.randn(64, N, device=device, dtype=bf16, requires_grad=True) for _ in range(2))
    weight = torch.randn(N, device=device, requires_grad=True)
    inputs = (x, residual, weight)

    def run():
        out = norm(x, residual, weight, None, 1, EPS, True)
        return [*out, *torch.autograd.grad(out, inputs, out)]

    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        run()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = run()
    with torch.no_grad():
        for t in inputs:
            t.normal_()
    graph.replay()
    assert all(map(torch.equal, captured, run()))
