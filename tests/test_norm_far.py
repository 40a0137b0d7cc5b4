"""LayerNorm of float32 rows far from zero: the rounding of their mean does not show.

    x = mean + sigma * z,  |mean| up to 1e5

There the mean's last place is up to 8e-3, its sum off by several of them.  The regimes are whole rows
in one tile, in one that they do not fill, in several, and rows split over programs, by their width or
on request; the backward works the statistics out again, or is given them, for whole rows or split ones.
"""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from rows import poison
from torch import Tensor

import flashproto
from flashproto import hooks

pytest.importorskip("triton")

EPS = 1e-5
ULP = torch.finfo(torch.float32).eps
SPLIT = {"split_rows": True}
# (N, options), narrow to wide.  Tiles are chosen from the width alone.
REGIMES = [
    (2, {}),  # rows of two or three elements, whose gradients are small differences
    (3, {}),
    (48, {}),
    (65, {}),
    (256, {}),
    (768, {}),  # several tiles
    (1000, {}),  # from here on the statistics are kept
    (1536, {}),
    (5120, {}),
    (8192, {}),
    (12000, {}),  # from here on the rows of the backward are split
    (16384, {}),
    (17000, {}),  # and those of the forward
    (40, SPLIT),
    (600, SPLIT),
    (4096, SPLIT),
]
WIDE = [(20480, {}), (30000, {}), (32768, {}), (50257, {}), (131072, {}), (2**20, {}), (30000, SPLIT)]
DRAWS = 100


def far(M: int, N: int, device: str) -> Tensor:
    """Rows of random means and deviations, the first few of special ones."""
    mean = 10 ** (7 * torch.rand(M, 1) - 2) * torch.randn(M, 1).sign()
    mean[:3] = torch.tensor([0.0, 1e5, -1e5])[:, None]
    x = mean + torch.randn(M, N) * 10 ** (2 * torch.rand(M, 1) - 1)
    for row, value in enumerate((0.0, 1e5, -3.3, 1 / 3, 12345.678), 3):
        x[row] = value  # no deviation
    x[8, : N // 2] += 1e5  # two means
    x[9, 0] = 1e5  # one element of another kind
    x[10, N - 1] = -1e5
    return x.to(device)


def gradients(f, tensors: tuple[Tensor, ...], dy: Tensor) -> list[Tensor]:
    """y, and the gradients of the tensors."""
    leaves = [t.detach().requires_grad_() for t in tensors]
    y = f(*leaves)
    return [y.detach(), *torch.autograd.grad(y, leaves, dy.to(y.dtype))]


def layer_norm(N: int, **options):
    return lambda x, *affine: flashproto.layer_norm(x, N, *affine, eps=EPS, **options)


def eager(N: int):
    return lambda x, *affine: F.layer_norm(x, [N], *affine, eps=EPS)


class Exact:
    """y, dx, dweight and dbias in float64, and the sizes of what they are made of: a row's, but of
    dweight and dbias a column's."""

    def __init__(self, x: Tensor, weight: Tensor, bias: Tensor, dy: Tensor) -> None:
        N, w, g = x.shape[1], weight.double(), dy.double()
        z = x.double()
        self.results = gradients(eager(N), (z, w, bias.double()), g)
        mean = z.mean(1, keepdim=True)
        rstd = (z.var(1, correction=0, keepdim=True) + EPS).rsqrt()
        xhat = (z - mean) * rstd
        largest, h = xhat.abs().amax(1, keepdim=True), g * w
        # What xhat is off by where the mean is off by a unit in its last place.
        self.off = off = ULP * mean.abs() * rstd
        self.terms = [
            (largest * w.abs() + bias.double().abs()).amax(1),
            h.abs().amax(1) * rstd[:, 0] * largest.clamp_min(1)[:, 0],
            (g.abs() * largest).sum(0),
            g.abs().sum(0),
        ]
        # What that adds to each result.
        average, average_xhat = h.mean(1, keepdim=True), (h * xhat).mean(1, keepdim=True)
        self.of_mean = [
            (off * w.abs()).amax(1),
            (off * rstd * (average_xhat.abs() + (largest + off) * average.abs()))[:, 0],
            (off * g.abs()).sum(0),
            torch.zeros(N, device=x.device, dtype=z.dtype),
        ]


def errors(got: list[Tensor], exact: Exact) -> list[Tensor]:
    """The largest of each row, or of each column of dweight and dbias."""
    y, dx, dweight, dbias = ((a.double() - b).abs() for a, b in zip(got, exact.results, strict=True))
    return [y.amax(1), dx.amax(1), dweight, dbias]


def draw(N: int, device: str, M: int = DRAWS) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """x, weight, bias, dy."""
    x, dy = far(M, N, device), torch.randn(M, N).to(device)
    return x, torch.randn(N).to(device) + 1, torch.randn(N).to(device), dy


def check(device: str, N: int, options: dict[str, bool], M: int = DRAWS) -> None:
    """y and the gradients are off by 8 roundings of their largest term, 2^-24 each (see
    test_short_rows_of_nearly_equal_elements), and by what one unit in the mean's last place gives, but
    in short rows, which are shifted by their mean.

    They are also off by at most twice what eager is, and such a unit; for results that do not depend on
    the mean, one rounding.
    """
    x, weight, bias, dy = draw(N, device, M)
    got = gradients(layer_norm(N, impl="triton", **options), (x, weight, bias), dy)
    exact = Exact(x, weight, bias, dy)
    off, off_eager = errors(got, exact), errors(gradients(eager(N), (x, weight, bias), dy), exact)
    short = N <= 64 and not options
    for i, name in enumerate(("y", "dx", "dweight", "dbias")):
        assert not got[i].isnan().any(), name
        allowed = 4 * ULP * exact.terms[i] + (0 if short else exact.of_mean[i])
        excess = (off[i] - allowed).max().item()
        assert excess <= 0, f"{name} is off by {excess:.3g} more than its terms allow"
        rounding = ULP * exact.results[i].abs().max()
        allowed = 2 * off_eager[i].max() + exact.of_mean[i].max() + rounding
        assert off[i].max() <= allowed, f"{name}: {off[i].max():.3g}, eager {off_eager[i].max():.3g}"


@pytest.mark.few(5)
@pytest.mark.parametrize(("N", "options"), REGIMES)
def test_against_float64(device, monkeypatch, N, options) -> None:
    poison(monkeypatch)
    check(device, N, options, 24 if device == "cpu" and N > 2000 else DRAWS)


@pytest.mark.gpu
@pytest.mark.parametrize(("N", "options"), [*REGIMES[-6:], *WIDE])
def test_against_float64_at_every_width(device, monkeypatch, N, options) -> None:
    poison(monkeypatch)
    check(device, N, options)


def check_y(device: str, N: int, f, x: Tensor, weight: Tensor, options: dict[str, bool]) -> None:
    """y of f, without a bias, of what is normalized, x: as `check`."""
    nothing = torch.zeros(N, device=device)
    exact = Exact(x, weight, nothing, torch.zeros_like(x))
    off = (f(weight, **options).double() - exact.results[0]).abs().amax(1)
    excess = (off - 4 * ULP * exact.terms[0] - exact.of_mean[0]).max().item()
    assert excess <= 0, f"y is off by {excess:.3g} more than its terms allow"


@pytest.mark.parametrize(
    ("N", "options"), [(48, {}), (1000, {}), (5120, {}), (17000, {}), (600, SPLIT)]
)
def test_forms(device, monkeypatch, N, options) -> None:
    """With a residual, whose sum is what is normalized; with a hook, whose result is; where y is kept
    instead of x."""
    poison(monkeypatch)
    x, residual = far(16, N, device), torch.randn(16, N).to(device)
    weight = torch.randn(N).to(device) + 1

    def add(weight, **options):
        y, total = flashproto.add_layer_norm(x, residual, N, weight, eps=EPS, impl="triton", **options)
        assert torch.equal(total, x + residual)
        return y

    def hooked(weight, **options):
        half = hooks.call("multiply", torch.full((N,), 0.5, device=device))
        return flashproto.layer_norm(x, N, weight, eps=EPS, prologue=half, impl="triton", **options)

    def kept(weight, **options):
        leaf = weight.detach().requires_grad_()
        return flashproto.layer_norm(x, N, leaf, eps=EPS, memory_efficient=True, impl="triton").detach()

    check_y(device, N, add, x + residual, weight, options)
    check_y(device, N, hooked, x * 0.5, weight, options)
    if not options:
        check_y(device, N, kept, x, weight, options)


@pytest.mark.parametrize("impl", ["triton", "reference"])
@pytest.mark.parametrize(("N", "options"), [(3, {}), (1000, {}), (1536, {}), (17000, {}), (600, SPLIT)])
def test_rows_of_one_number(device, N, options, impl) -> None:
    """Such a row is the bias to the last bit."""
    x = torch.tensor([0.0, 1e5, -3.3, 1 / 3, 12345.678], device=device)[:, None].expand(5, N)
    bias = torch.randn(N, device=device)
    y = layer_norm(N, impl=impl, **options)(x.contiguous(), torch.ones_like(bias), bias)
    assert torch.equal(y, bias.expand(5, N))


@pytest.mark.parametrize("N", [3, 1000, 17000])
def test_numbers_whose_squares_are_infinite(device, N) -> None:
    """1 / sqrt(inf) is 0, as in eager, and no NaN."""
    x = torch.randn(3, N, device=device) * 1e28
    x[2] = 1e30
    y = layer_norm(N, impl="triton")(x)
    assert not y.isnan().any()
    assert not y[:2].any()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("N", "options"), [(48, {}), (1000, {}), (1536, {}), (17000, {}), (600, SPLIT)]
)
def test_rows_do_not_depend_on_each_other(device, N, options) -> None:
    x, weight, bias, dy = draw(N, device, 13)
    f = layer_norm(N, impl="triton", **options)
    y, dx, *_ = gradients(f, (x, weight, bias), dy)
    for rows in (slice(0, 1), slice(3, 8), slice(12, 13)):
        alone = gradients(f, (x[rows], weight, bias), dy[rows])
        assert torch.equal(y[rows], alone[0])
        assert torch.equal(dx[rows], alone[1])


@pytest.mark.parametrize("N", [1000, 17000])
def test_reference_rounds_the_mean_alone(device, N) -> None:
    """The state there holds one number for the mean: y is off by half a unit in its last place."""
    x, weight, bias, dy = draw(N, device, 16)
    exact = Exact(x, weight, bias, dy)
    y = layer_norm(N, impl="reference")(x, weight, bias)
    off = (y.double() - exact.results[0]).abs().amax(1)
    assert (off <= 4 * ULP * exact.terms[0] + exact.of_mean[0]).all()
