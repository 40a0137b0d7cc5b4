"""cross_entropy against float64, with torch's own float32 computation as the yardstick."""

from __future__ import annotations

import math
import random

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from rows import LAYOUTS, assert_no_worse, in_memory, poison
from torch import Tensor

import flashproto
from flashproto import configs, nn, reference

pytest.importorskip("triton")

DTYPES = (torch.float16, torch.bfloat16, torch.float32)
# One class; several rows a program; one tile; whole tiles with and without a rest; unaligned rows.
WIDTHS = [1, 2, 10, 100, 1000, 8192, 20001]
GPU_WIDTHS = [*WIDTHS, 32768, 50257, 50304, 128256, 262144]
INF, NAN = math.inf, math.nan
REDUCTIONS = ("mean", "sum", "none")
OPTIONS = {
    "plain": {},
    "smoothing": {"label_smoothing": 0.1},
    "weight": {"weight": True},
    "weight and smoothing": {"weight": True, "label_smoothing": 0.3},
    "z-loss": {"z_loss": 1e-2},
    "softcap": {"softcap": 5.0},
    "all": {"weight": True, "label_smoothing": 0.1, "z_loss": 1e-2, "softcap": 3.0, "ignore_index": 0},
}


def problem(M: int, V: int, dtype: torch.dtype, device: str) -> tuple[Tensor, Tensor]:
    """Logits, and targets of which some are ignored by the usual index."""
    x = (3 * torch.randn(M, V, device=device)).to(dtype)
    t = torch.randint(V, (M,), device=device)
    if M > 1:
        t[torch.randperm(M, device=device)[: max(M // 5, 1)]] = -100
    return x, t


def upstream(y: Tensor, up: Tensor | None) -> Tensor:
    if up is None:
        up = torch.linspace(0.5, 1.5, y.numel(), device=y.device) if y.ndim else torch.ones_like(y)
        up = up.view(y.shape)
    return up.to(y.dtype).expand(y.shape)


def outcomes(x: Tensor, t: Tensor, impl: str, up: Tensor | None = None, **options):
    """(the loss and whatever else is returned, the gradient for `up`; None gives each row another)."""
    leaf = x.detach().requires_grad_()
    y = flashproto.cross_entropy(leaf, t, impl=impl, **options)
    y = y if isinstance(y, tuple) else (y,)
    ups = [upstream(o, up) for o in y]
    pairs = [(o, u) for o, u in zip(y, ups, strict=True) if o.requires_grad]
    (dx,) = torch.autograd.grad([o for o, _ in pairs], leaf, [u for _, u in pairs])
    return [o.detach() for o in y], dx


def check(
    device: str, x: Tensor, t: Tensor, layout: str = "contiguous", up: Tensor | None = None, **options
) -> None:
    """Every result and the gradient of one call on x [M, V]."""
    options = dict(options)
    if options.get("weight") is True:
        options["weight"] = torch.rand(x.shape[-1], device=device) + 0.1
    if options.get("ignore_index", -100) >= 0:
        t = torch.where(t < 0, options["ignore_index"], t)
    exact, exact_dx = outcomes(x.double(), t, "reference", up, **options)
    eager, eager_dx = outcomes(x, t, "torch", up, **options)
    got, dx = outcomes(in_memory(x, layout), t, "triton", up, **options)
    # The loss of a row is a difference of numbers of the size of its logits, that of all a sum.
    plain = {k: v for k, v in options.items() if not k.startswith("return")}
    rows = reference.cross_entropy(x.double(), t, **plain | {"reduction": "none"})[0]
    magnitude = x.abs().max().item() * (x.shape[0] if options.get("reduction") == "sum" else 1)
    largest = max(rows.abs().max().item(), magnitude)
    for name, a, b, c in zip(("loss", "second", "third"), got, eager, exact, strict=False):
        assert_no_worse(name, a, b, c, largest)
    # A gradient is a difference of probabilities times what reaches its row.
    weight = options.get("weight")
    if weight is None:
        weight = torch.ones(x.shape[-1], device=device)
    reaches = weight.max().item() * max(upstream(y, up).abs().max().item() for y in got)
    if options.get("reduction", "mean") == "mean":
        counted = (t >= 0) & (t != options.get("ignore_index", -100))
        reaches /= weight[t[counted]].sum().item()
    assert_no_worse("dx", dx, eager_dx, exact_dx, max(exact_dx.abs().max().item(), reaches))


@pytest.mark.parametrize("reduction", REDUCTIONS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("V", WIDTHS)
def test_against_float64(device, monkeypatch, V, dtype, reduction) -> None:
    poison(monkeypatch)
    check(device, *problem(100 if V < 300 else 6, V, dtype, device), reduction=reduction)


@pytest.mark.gpu
@pytest.mark.parametrize("reduction", REDUCTIONS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("V", GPU_WIDTHS)
def test_no_worse_than_eager_at_every_width(device, monkeypatch, V, dtype, reduction) -> None:
    poison(monkeypatch)
    check(device, *problem(min(3000, 2**23 // V), V, dtype, device), reduction=reduction)


@pytest.mark.parametrize("reduction", REDUCTIONS)
@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
@pytest.mark.parametrize(("V", "dtype"), [(37, torch.float32), (9000, torch.bfloat16)], ids=str)
def test_options(device, monkeypatch, V, dtype, options, reduction) -> None:
    poison(monkeypatch)
    x, t = problem(5, V, dtype, device)
    check(device, x, t, reduction=reduction, **options)
    check(device, x, t, reduction=reduction, return_lse=True, return_z_loss=True, **options)


@settings(max_examples=25)
@given(st.data())
def test_any_combination(data) -> None:
    device = "cuda" if torch.cuda.is_available() else "cpu"
    draw = data.draw
    torch.manual_seed(draw(st.integers(0, 2**31)))
    # In few rows eager may be right by luck, and is no yardstick.
    M, V = draw(st.integers(8, 20)), draw(st.sampled_from([2, 5, 8, 64, 300, 5000]))
    x, t = problem(M, V, draw(st.sampled_from(DTYPES)), device)
    options = {
        "reduction": draw(st.sampled_from(REDUCTIONS)),
        "label_smoothing": draw(st.sampled_from([0.0, 0.1, 1.0])),
        "z_loss": draw(st.sampled_from([0.0, 1e-3, 0.5])),
        "softcap": draw(st.sampled_from([None, 1.0, 30.0])),
        "weight": draw(st.sampled_from([None, True])),
        "ignore_index": draw(st.sampled_from([-100, 0, 1, V - 1])),
        "return_lse": draw(st.booleans()),
    }
    ignored = (t < 0) | (t == options["ignore_index"])  # a mean over no rows is NaN: tested elsewhere
    if ignored.all():
        t[0] = (options["ignore_index"] + 1) % V
    check(device, x, t, draw(st.sampled_from(LAYOUTS)), torch.rand((), device=device), **options)


@pytest.mark.parametrize("reduction", REDUCTIONS)
@pytest.mark.parametrize("label_smoothing", [0.0, 0.2])
@pytest.mark.parametrize("weighted", [False, True])
def test_equals_torch(device, weighted, label_smoothing, reduction) -> None:
    """Term by term what torch.nn.functional.cross_entropy computes, on all backends."""
    x, t = problem(40, 30, torch.float32, device)
    weight = torch.rand(30, device=device) if weighted else None
    wanted = F.cross_entropy(x, t, weight, reduction=reduction, label_smoothing=label_smoothing)
    for impl in ("triton", "reference", "torch"):
        got = flashproto.cross_entropy(
            x, t, weight=weight, reduction=reduction, label_smoothing=label_smoothing, impl=impl
        )
        torch.testing.assert_close(got, wanted)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_any_strides(device, monkeypatch, layout) -> None:
    poison(monkeypatch)
    for V in (64, 9000):
        check(device, *problem(5, V, torch.float32, device), layout)


def test_many_dimensions_and_int32_targets(device) -> None:
    x = torch.randn(4, 20, 3, 7, device=device).movedim(1, -1)
    t = torch.randint(20, (4, 3, 7), device=device)
    for reduction in REDUCTIONS:
        up = torch.tensor(0.7, device=device)
        got = outcomes(x, t.int(), "triton", up, reduction=reduction, return_lse=True)
        wanted = outcomes(x, t, "reference", up, reduction=reduction, return_lse=True)
        for a, b in zip([*got[0], got[1]], [*wanted[0], wanted[1]], strict=True):
            torch.testing.assert_close(a, b)


@pytest.mark.slow
@pytest.mark.parametrize("impl", ["triton", "torch", "reference"])
@pytest.mark.parametrize("name", OPTIONS)
def test_classes_in_another_dimension(device, name, impl) -> None:
    """class_dim=1 is torch's layout; the gradient has the shape of the logits."""
    options = dict(OPTIONS[name])
    if "weight" in options:
        options["weight"] = torch.rand(20, device=device)
    t = torch.randint(20, (4, 3, 7), device=device)
    for dim in (0, 1, 2, -2, -1, 3):
        base = torch.randn(4, 3, 7, 20, device=device)
        x = base.movedim(-1, dim).contiguous()
        for reduction in REDUCTIONS:
            got = outcomes(x, t, impl, reduction=reduction, class_dim=dim, return_lse=True, **options)
            wanted = outcomes(base, t, impl, reduction=reduction, return_lse=True, **options)
            assert got[1].shape == x.shape
            for a, b in zip([*got[0], got[1].movedim(dim, -1)], [*wanted[0], wanted[1]], strict=True):
                torch.testing.assert_close(a, b)


@pytest.mark.parametrize("impl", ["triton", "torch", "reference"])
@pytest.mark.parametrize("shape", [(5, 20), (5, 20, 3), (5, 20, 3, 7), (20,)])
def test_layouts_of_torch(device, shape, impl) -> None:
    """Values and gradients of torch.nn.CrossEntropyLoss by its positional arguments, compiled too."""
    torch.compiler.reset()
    x = torch.randn(shape, device=device, requires_grad=True)
    dim = min(1, len(shape) - 1)
    t = torch.randint(20, shape[:dim] + shape[dim + 1 :], device=device)
    weight = torch.rand(20, device=device)
    arguments = (weight, None, 3, None, "sum", 0.1)
    wanted = torch.nn.CrossEntropyLoss(*arguments)(x, t)
    (wanted_dx,) = torch.autograd.grad(wanted, x)
    module = nn.CrossEntropyLoss(*arguments, class_dim=dim, impl=impl)
    compiled = torch.compile(module, fullgraph=True, backend="aot_eager")
    for f in (module, compiled, module, module):
        y = f(x, t)
        torch.testing.assert_close(y, wanted)
        (dx,) = torch.autograd.grad(y, x)
        assert dx.shape == x.shape
        torch.testing.assert_close(dx, wanted_dx)


def test_targets_that_fit_torchs_layout_alone_are_told_of_class_dim(device) -> None:
    x = torch.randn(4, 20, 3, 7, device=device)
    t = torch.zeros(4, 3, 7, dtype=torch.long, device=device)
    with pytest.raises(ValueError, match=r"targets is of shape \[4, 3, 7\].*class_dim=1"):
        flashproto.cross_entropy(x, t)
    with pytest.raises(ValueError, match=r"targets is of shape \[4, 3\].*class_dim of logits, -1\."):
        flashproto.cross_entropy(x, t[..., 0])


@pytest.mark.parametrize("factor", [1.0, 0.25, 3.0])
def test_upstream_gradient_and_repeated_backward(device, factor) -> None:
    """The gradient that the forward pass wrote serves once, for an upstream of 1; whatever else is
    asked is computed anew, and what was handed out before is left alone."""
    x, t = problem(6, 9000, torch.bfloat16, device)
    leaf = x.requires_grad_()
    loss = flashproto.cross_entropy(leaf, t, impl="triton")
    exact = outcomes(x.double(), t, "reference")[1]
    up = torch.tensor(factor, device=device)
    (first,) = torch.autograd.grad(loss, leaf, up, retain_graph=True)
    for scale in (1.0, 2.0):
        (dx,) = torch.autograd.grad(loss, leaf, up * 0 + scale, retain_graph=True)
        torch.testing.assert_close(dx.double(), exact * scale, rtol=2**-7, atol=0.0)
    torch.testing.assert_close(first.double(), exact * factor, rtol=2**-7, atol=0.0)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_gradients_of_repeated_backward_passes_add_up(device, dtype) -> None:
    """Also where the gradient that the forward pass wrote is what the others are added to."""
    x, t = problem(6, 1000, dtype, device)
    exact = outcomes(x.double(), t, "reference")[1]
    leaf = x.requires_grad_()
    loss = flashproto.cross_entropy(leaf, t, impl="triton")
    for times in (1, 2, 3):
        loss.backward(retain_graph=True)
        allowed = 4 * torch.finfo(dtype).eps
        torch.testing.assert_close(
            leaf.grad.double(), times * exact, rtol=allowed, atol=allowed * exact.abs().max().item()
        )


def check_scaled(device: str, V: int, dtype: torch.dtype, name: str, reduction: str) -> None:
    """A gradient is the same to the last bit whatever the upstream gradients of the calls before."""
    x, t = problem(3, V, dtype, device)
    options = OPTIONS[name] | {"reduction": reduction}
    if "weight" in options:
        options["weight"] = torch.rand(V, device=device)
    t[t < 0] = options.get("ignore_index", -100)
    wanted: dict[float, Tensor] = {}
    for factor in (0.3, 0.3, 1.0, 2.0, 0.3, 1.0, 2.0, 1.0):
        dx = outcomes(x, t, "triton", torch.tensor(factor, device=device), **options)[1]
        assert torch.equal(dx, wanted.setdefault(factor, dx))


@pytest.mark.parametrize(
    ("V", "dtype", "name", "reduction"),
    [
        (40, torch.float16, "softcap", "sum"),
        (9000, torch.bfloat16, "plain", "mean"),
        (5000, torch.float32, "all", "sum"),
        *((40, torch.float32, name, "mean") for name in OPTIONS),
    ],
    ids=str,
)
def test_scaled_losses(device, V, dtype, name, reduction) -> None:
    check_scaled(device, V, dtype, name, reduction)


@pytest.mark.gpu
@pytest.mark.parametrize("name", OPTIONS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("V", [1000, 50257, 50304, 128256])
def test_scaled_losses_at_every_width(device, V, dtype, name) -> None:
    check_scaled(device, V, dtype, name, "mean")


def test_several_losses_before_one_backward_pass(device) -> None:
    """Two losses before one backward pass, and one loss that needs no gradient in the end."""
    x, t = problem(5, 60, torch.float32, device)
    for factor in (0.5, 3.0):
        up = torch.tensor(factor, device=device)
        exact = outcomes(x.double(), t, "reference", up)[1] + outcomes(x.double(), t, "reference")[1]
        leaf = x.detach().requires_grad_()
        one, other, _ = (flashproto.cross_entropy(leaf, t, impl="triton") for _ in range(3))
        (dx,) = torch.autograd.grad(one * up + other, leaf)
        torch.testing.assert_close(dx.double(), exact, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_gradient_in_the_memory_of_the_logits(device, layout) -> None:
    x, t = problem(5, 9000, torch.float32, device)
    expected = outcomes(x, t, "triton")[1]
    leaf = in_memory(x, layout).requires_grad_()
    logits = leaf * 1 if layout == "contiguous" else leaf  # the product is nobody else's
    before = logits.detach().clone()
    loss = flashproto.cross_entropy(logits, t, inplace_backward=True, impl="triton")
    assert torch.equal(logits, before)
    (dx,) = torch.autograd.grad(loss, logits, retain_graph=True)
    torch.testing.assert_close(dx, expected)
    rows = layout in ("contiguous", "rows apart", "offset")
    assert (dx.data_ptr() == logits.data_ptr()) == rows
    if rows:
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            loss.backward()


@pytest.mark.parametrize("V", [7, 9000])
def test_infinities_and_nan_as_in_torch(device, V) -> None:
    x = torch.randn(9, V, device=device)
    t = torch.randint(1, V - 1, (9,), device=device)
    x[0] = -INF
    x[1, : V - 1] = -INF
    x[2, 0], x[3, V - 1] = INF, NAN
    x[4, t[4]] = -INF
    x[5] = -1e30
    x[6], t[6] = NAN, -100
    x[7, 0] = -INF
    for reduction in ("none", "sum"):
        got, wanted = (outcomes(x, t, impl, reduction=reduction) for impl in ("triton", "torch"))
        torch.testing.assert_close(got[0], wanted[0], rtol=1e-4, atol=1e-3, equal_nan=True)
        # torch multiplies an ignored row of NaN by 0; here it is not read.
        assert (got[1][6] == 0).all()
        kept = [0, 1, 2, 3, 4, 5, 7, 8]
        torch.testing.assert_close(got[1][kept], wanted[1][kept], rtol=1e-4, atol=1e-5, equal_nan=True)


@pytest.mark.parametrize("V", [10, 9000])
def test_targets_that_are_no_class_make_nan_of_their_row(device, V) -> None:
    x, t = torch.randn(6, V, device=device), torch.arange(6, device=device)
    t[2], t[4] = V, -1
    for impl in ("triton", "reference"):
        (loss,), dx = outcomes(x, t, impl, reduction="none")
        assert loss.isnan().tolist() == [False, False, True, False, True, False]
        assert torch.equal(dx.isnan().any(-1), loss.isnan())
        (loss,), dx = outcomes(x, t, impl)
        assert loss.isnan()
        assert torch.equal(dx.isnan().all(-1).nonzero().flatten().cpu(), torch.tensor([2, 4]))


def test_all_rows_ignored_as_in_torch(device) -> None:
    for V in (10, 9000):
        x, t = torch.randn(4, V, device=device), torch.full((4,), -100, device=device)
        for reduction in REDUCTIONS:
            got, wanted = (outcomes(x, t, impl, reduction=reduction) for impl in ("triton", "torch"))
            torch.testing.assert_close(got, wanted, equal_nan=True)
            assert not got[1].any()


@pytest.mark.parametrize("strip", [256, 2], ids=["one program", "several"])
@pytest.mark.parametrize("z_loss", [0.0, 0.1])
@pytest.mark.parametrize("label_smoothing", [0.0, 0.1])
@pytest.mark.parametrize("targets", [[0, 0, 0, 0], [0, -100, 0, -100], [1, 2, -100, 0]], ids=str)
def test_a_mean_by_class_weights_that_sum_to_0_is_nan(
    device, monkeypatch, targets, label_smoothing, z_loss, strip
) -> None:
    """Also what is added to a loss of NaN, and the gradients but of ignored rows, on every backend."""
    config = configs.StripConfig(length=strip, tile=2, num_warps=1)
    monkeypatch.setattr(configs, "cross_entropy_total", lambda: config)
    t, weight = torch.tensor(targets, device=device), torch.tensor([0.0, 1.0, -1.0], device=device)
    options = {"label_smoothing": label_smoothing, "z_loss": z_loss, "return_z_loss": True}
    x = torch.randn(4, 3, device=device)
    for impl in ("triton", "torch", "reference"):
        for inplace in (False, True):
            (loss, z), dx = outcomes(
                x.clone(), t, impl, weight=weight, inplace_backward=inplace, **options
            )
            assert loss.isnan() and z.isnan()
            assert dx[t != -100].isnan().all() and not dx[t == -100].any()


@pytest.mark.parametrize("shape", [(0, 8), (3, 0, 8)])
def test_no_rows(device, shape) -> None:
    x, t = torch.randn(shape, device=device), torch.zeros(shape[:-1], dtype=torch.long, device=device)
    for reduction in REDUCTIONS:
        (loss, lse), dx = outcomes(x, t, "triton", reduction=reduction, return_lse=True)
        assert dx.shape == shape and lse.shape == shape[:-1]
        (wanted,), _ = outcomes(x, t, "reference", reduction=reduction)
        torch.testing.assert_close(loss, wanted, equal_nan=True)
        outcomes(x, t, "triton", reduction=reduction)


def test_large_logits(device) -> None:
    """Subtracting the maximum before anything else keeps the digits that are left."""
    for V in (100, 9000):
        x, t = problem(3, V, torch.float32, device)
        for shifted in (x + 1e4, x - 1e4, 1e4 * x):
            check(device, shifted, t)
            check(device, shifted, t, return_lse=True)


def test_logits_whose_square_is_no_number_of_float32(device) -> None:
    """Without z_loss nothing is 0 times infinity."""
    x = torch.tensor([[1e30, -1e30, 2.0], [-1e30, -2e30, -3e30], [3e38, 1.0, 0.0]], device=device)
    t = torch.tensor([0, 0, 0], device=device)
    for reduction in REDUCTIONS:
        for impl in ("triton", "torch", "reference"):
            options = {"reduction": reduction, "return_lse": True, "return_z_loss": True}
            (loss, lse, z), dx = outcomes(x, t, impl, torch.ones((), device=device), **options)
            assert not loss.any()
            assert not z.any()
            assert torch.equal(lse, x[:, 0])
            assert torch.equal(dx[:, 1:], torch.zeros_like(dx[:, 1:]))
            assert dx.isfinite().all()
    assert all(y.isfinite().all() for y in reference.cross_entropy(x[:2], t[:2], label_smoothing=0.1))


def test_tanh(device) -> None:
    """The softcap over its whole range, small logits included, within roundings of float32."""
    x = torch.linspace(-12, 12, 4001, device=device)[None]
    x = torch.cat([x, x * 1e-3, x * 1e-6], 1)
    for target in (0, 6000):
        check(device, x, torch.tensor([target], device=device), softcap=1.0)


@pytest.mark.parametrize("V", [24, 1000, 17000, 17001])
def test_rows_do_not_depend_on_each_other_and_repeat_bitwise(device, V) -> None:
    M = 37 if V < 5000 else 5
    x, t = problem(M, V, torch.bfloat16, device)
    up = torch.rand((), device=device)
    options = {"reduction": "none", "label_smoothing": 0.1, "z_loss": 0.1}
    (loss,), dx = outcomes(x, t, "triton", up, **options)
    for _ in range(1 if device == "cpu" else 100):
        (again,), dx_again = outcomes(x, t, "triton", up, **options)
        assert torch.equal(loss, again) and torch.equal(dx, dx_again)
    for rows in (slice(0, 1), slice(M // 3, M // 2), slice(M - 1, M)):
        (part,), dx_part = outcomes(x[rows], t[rows], "triton", up, **options)
        assert torch.equal(loss[rows], part) and torch.equal(dx[rows], dx_part)


def test_gradient_at_once_equals_that_of_the_backward_pass(device) -> None:
    """But for the order of the sums over a row."""
    x, t = problem(6, 9000, torch.bfloat16, device)
    one = torch.tensor(1.0, device=device)
    at_once, _ = (outcomes(x, t, "triton")[1] for _ in range(2))
    later = outcomes(x, t, "triton", one, inplace_backward=True)[1]
    assert (at_once.double() - later.double()).abs().max() <= 2**-8 * at_once.double().abs().max()


def test_more_rows_than_one_program_adds_up(device, monkeypatch) -> None:
    """Totals of several programs; strips made short, so that there are many of them."""
    strip = configs.StripConfig(length=16, tile=8, num_warps=1)
    monkeypatch.setattr(configs, "cross_entropy_total", lambda: strip)
    for reduction in ("mean", "sum"):
        check(device, *problem(100, 12, torch.float32, device), weight=True, reduction=reduction)


@pytest.mark.parametrize("dtype", DTYPES[1:], ids=str)
def test_autocast_keeps_the_logits(device, dtype) -> None:
    """torch's autocast returns float32 too, though of log-probabilities in the logits' dtype."""
    x, t = problem(5, 50, dtype, device)
    exact = F.cross_entropy(x.double(), t)
    with torch.autocast(device, torch.bfloat16):
        got = flashproto.cross_entropy(x, t, impl="triton")
        eager = F.cross_entropy(x, t)
    assert_no_worse("loss", got, eager, exact, x.abs().max().item())


def test_refuses(device) -> None:
    x, t = torch.randn(4, 10, device=device), torch.zeros(4, dtype=torch.long, device=device)
    f = flashproto.cross_entropy
    for arguments, options, kind, match in (
        ((x, t.float()), {}, TypeError, "int64 or int32"),
        ((x, t[:3]), {}, ValueError, r"targets is of shape \[3\]"),
        ((x[:, :0], t), {}, ValueError, "number of classes"),
        ((x, t), {"weight": x[0, :3]}, ValueError, "weight a class"),
        ((x, t), {"weight": x[0].clone().requires_grad_()}, ValueError, "requires grad"),
        ((x, t), {"label_smoothing": 1.5}, ValueError, "label_smoothing"),
        ((x, t), {"z_loss": INF}, ValueError, "z_loss"),
        ((x, t), {"softcap": 0.0}, ValueError, "softcap"),
        ((x, t), {"reduction": "max"}, ValueError, "reduction"),
        ((x.double(), t), {"impl": "triton"}, flashproto.BackendError, "float64"),
    ):
        with pytest.raises(kind, match=match):
            f(*arguments, **options)


@pytest.mark.parametrize("return_lse", [False, True])
@pytest.mark.parametrize("reduction", REDUCTIONS)
def test_compiles_in_one_graph(device, reduction, return_lse) -> None:
    x, t = problem(6, 40, torch.bfloat16, device)
    up = torch.tensor(0.5, device=device)

    def f(x):
        y = flashproto.cross_entropy(
            x * 2, t, reduction=reduction, return_lse=return_lse, z_loss=0.1, impl="triton"
        )
        return y if isinstance(y, tuple) else (y,)

    backend = "inductor" if device == "cuda" else "aot_eager"
    got = []
    for function in (torch.compile(f, fullgraph=True, backend=backend), f):
        leaf = x.detach().requires_grad_()
        y = function(leaf)
        ups = [up.expand(o.shape) for o in y]
        got.append((*y, *torch.autograd.grad(y, leaf, ups)))
    for a, b in zip(*got, strict=True):
        torch.testing.assert_close(a, b)


def test_z_loss_is_for_logging(device) -> None:
    x, t = problem(5, 8, torch.float32, device)
    x.requires_grad_()
    for impl in ("triton", "torch", "reference"):
        loss, z = flashproto.cross_entropy(x, t, z_loss=0.1, return_z_loss=True, impl=impl)
        plain = flashproto.cross_entropy(x, t, impl=impl)
        torch.testing.assert_close(loss, plain + z)
        assert not z.requires_grad


def test_module(device) -> None:
    x, t = problem(2 * 7, 20, torch.float32, device)
    weight = torch.rand(20, device=device)
    options = {"label_smoothing": 0.1, "z_loss": 0.1, "softcap": 4.0}
    for impl in ("triton", "torch"):
        module = nn.CrossEntropyLoss(weight, reduction="sum", impl=impl, **options).to(device)
        wanted = flashproto.cross_entropy(x, t, weight=weight, reduction="sum", **options)
        torch.testing.assert_close(module(x.view(2, 7, 20), t.view(2, 7)), wanted)


def test_configurations_depend_on_the_vocabulary_alone() -> None:
    for V in random.sample(range(1, 300_000), 50):
        for itemsize in (2, 4):
            for choose in (
                configs.cross_entropy_forward,
                configs.cross_entropy_forward_gradient,
                configs.cross_entropy_backward,
            ):
                config = choose(V, itemsize)
                assert config.rows == 1 or config.columns >= V
                assert config.elements * itemsize == 16
                assert config.rows * config.columns >= 32 * config.num_warps


# --- on a GPU only -------------------------------------------------------------------------------


@pytest.mark.gpu
@pytest.mark.gib(30)
@pytest.mark.parametrize("V", [8, 4096, 50304])
def test_many_rows_and_more_than_2_to_31_elements(device, V) -> None:
    M = 2**31 // V + 37
    x = torch.randn(M, V, device=device, dtype=torch.bfloat16)
    t = torch.randint(V, (M,), device=device)
    one = torch.ones((), device=device)
    for options in (
        {"reduction": "sum"},
        {"reduction": "none"},
        {"reduction": "sum", "return_lse": True},
    ):
        whole, dx = outcomes(x, t, "triton", one, **options)
        part, dx_part = outcomes(x[-50:], t[-50:], "triton", one, **options)
        assert torch.equal(dx[-50:], dx_part)
        for a, b in zip(whole, part, strict=True):
            assert a.ndim == 0 or torch.equal(a[-50:], b)
        del dx


@pytest.mark.gpu
def test_second_stream_and_cuda_graph(device) -> None:
    x, t = problem(512, 3000, torch.bfloat16, device)
    wanted, late = outcomes(x, t, "triton"), torch.empty_like(x)
    stream = torch.cuda.Stream()
    torch.cuda.synchronize()
    with torch.cuda.stream(stream):
        torch.cuda._sleep(200_000_000)
        late.copy_(x)
        got = outcomes(late, t, "triton")
    stream.synchronize()
    assert torch.equal(got[0][0], wanted[0][0]) and torch.equal(got[1], wanted[1])
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = outcomes(late, t, "triton")
    late.normal_()
    graph.replay()
    again = outcomes(late, t, "triton")
    assert torch.equal(captured[0][0], again[0][0]) and torch.equal(captured[1], again[1])
