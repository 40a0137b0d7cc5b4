"""linear_cross_entropy against float64; torch's linear layer and cross_entropy are the yardstick."""

from __future__ import annotations

import random

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from rows import assert_no_worse, poison
from torch import Tensor

import flashproto
from flashproto import configs, nn

pytest.importorskip("triton")

from flashproto.ops.linear_cross_entropy_products import logits_of, memory_of_logits, padded

DTYPES = (torch.float16, torch.bfloat16, torch.float32)
REDUCTIONS = ("mean", "sum", "none")


def problem(
    T: int, D: int, V: int, dtype: torch.dtype, device: str, bias: bool = False
) -> tuple[list[Tensor], Tensor]:
    """([h, weight, perhaps bias], targets), of which some are ignored."""
    h, weight, b = (torch.randn(shape, device=device) for shape in ((T, D), (V, D), (V,)))
    t = torch.randint(V, (T,), device=device)
    if T > 1:
        t[torch.randperm(T, device=device)[: max(T // 5, 1)]] = -100
    inputs = [h, 2 * D**-0.5 * weight] + [b] * bias
    return [x.to(dtype) for x in inputs], t


def outcomes(inputs: list[Tensor], t: Tensor, impl: str, factor: float = 1.0, **options):
    """(results, the gradients of `inputs`); rows weigh differently where there are several."""
    leaves = [x.detach().requires_grad_() for x in inputs]
    y = flashproto.linear_cross_entropy(leaves[0], leaves[1], t, *leaves[2:], impl=impl, **options)
    y = y if isinstance(y, tuple) else (y,)
    ups = [
        factor * torch.linspace(0.5, 1.5, o.numel(), device=o.device).view(o.shape)
        if o.ndim
        else torch.full_like(o, factor)
        for o in y
    ]
    pairs = [(o, u.to(o.dtype)) for o, u in zip(y, ups, strict=True) if o.requires_grad]
    gradients = torch.autograd.grad([o for o, _ in pairs], leaves, [u for _, u in pairs])
    return [o.detach() for o in y], gradients


def check(
    inputs: list[Tensor],
    t: Tensor,
    factor: float = 1.0,
    chunk_size: int | None = None,
    low_memory: bool = False,
    **options,
) -> None:
    exact, exact_gradients = outcomes([x.double() for x in inputs], t, "reference", factor, **options)
    eager, eager_gradients = outcomes(inputs, t, "torch", factor, **options)
    got, gradients = outcomes(
        inputs, t, "triton", factor, chunk_size=chunk_size, low_memory=low_memory, **options
    )
    # Logits and their gradients are rounded to the inputs' dtype in either way, sums in another order.
    eps = torch.finfo(inputs[0].dtype).eps / torch.finfo(torch.float32).eps
    h, weight, *bias = (x.double() for x in inputs)
    logits = torch.nn.functional.linear(h, weight, *bias).abs().max().item()
    for a, b, c in zip(got, eager, exact, strict=True):
        # A loss is a difference of logits, in float32 whatever the dtype.
        assert_no_worse("loss", a, b, c, max(eps * c.abs().max().item(), logits))
    others = weight.abs().max().item(), h.abs().max().item(), 1.0
    for name, a, b, c, other in zip(
        ("dh", "dweight", "dbias"), gradients, eager_gradients, exact_gradients, others, strict=False
    ):
        # A gradient is of a probability less 1, likewise.
        assert_no_worse(name, a, b, c, max(eps * c.abs().max().item(), factor * other / len(t)))


@pytest.mark.parametrize("low_memory", [False, True])
@pytest.mark.parametrize("reduction", REDUCTIONS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(
    ("T", "D", "V", "chunk_size"), [(1, 8, 5, None), (40, 16, 37, 16), (23, 24, 700, 4)]
)
def test_against_float64(
    device, monkeypatch, T, D, V, chunk_size, dtype, reduction, low_memory
) -> None:
    poison(monkeypatch)
    inputs, t = problem(T, D, V, dtype, device, bias=True)
    check(inputs, t, chunk_size=chunk_size, low_memory=low_memory, reduction=reduction)


@settings(max_examples=20)
@given(st.data())
def test_any_combination(data) -> None:
    device = "cuda" if torch.cuda.is_available() else "cpu"
    draw = data.draw
    torch.manual_seed(draw(st.integers(0, 2**31)))
    T, D, V = draw(st.integers(1, 30)), draw(st.sampled_from([8, 24])), draw(st.integers(2, 400))
    inputs, t = problem(T, D, V, draw(st.sampled_from(DTYPES)), device, draw(st.booleans()))
    options = {
        "reduction": draw(st.sampled_from(REDUCTIONS)),
        "label_smoothing": draw(st.sampled_from([0.0, 0.1])),
        "z_loss": draw(st.sampled_from([0.0, 1e-2])),
        "softcap": draw(st.sampled_from([None, 2.0, 30.0])),
        "class_weight": draw(st.sampled_from([None, torch.rand(V, device=device) + 0.1])),
        "ignore_index": draw(st.sampled_from([-100, 0])),
        "return_lse": draw(st.booleans()),
    }
    t = torch.where(t < 0, options["ignore_index"], t)
    if (t == options["ignore_index"]).all():
        t[0] = 1
    check(
        inputs,
        t,
        draw(st.sampled_from([1.0, 0.5, 3.0])),
        draw(st.sampled_from([1, 7, 16, None])),
        draw(st.booleans()),
        **options,
    )


@pytest.mark.parametrize("low_memory", [False, True])
def test_some_inputs_need_no_gradient(device, low_memory) -> None:
    inputs, t = problem(20, 16, 50, torch.float32, device, bias=True)
    _, wanted = outcomes(inputs, t, "torch")
    for needs in (
        (True, False, False),
        (False, True, False),
        (False, False, True),
        (True, True, False),
    ):
        leaves = [x.detach().requires_grad_(need) for x, need in zip(inputs, needs, strict=True)]
        h, weight, bias = leaves
        flashproto.linear_cross_entropy(
            h, weight, t, bias, chunk_size=8, low_memory=low_memory, impl="triton"
        ).backward()
        for x, need, expected in zip(leaves, needs, wanted, strict=True):
            assert (x.grad is not None) == need
            if need:
                torch.testing.assert_close(x.grad, expected)
    with torch.no_grad():
        loss = flashproto.linear_cross_entropy(h, weight, t, bias, chunk_size=8, impl="triton")
    torch.testing.assert_close(loss, F.cross_entropy(F.linear(h, weight, bias), t))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_upstream_gradient_and_repeated_backward(device, dtype) -> None:
    """What the forward pass computed serves once, and what was handed out is left alone."""
    inputs, t = problem(20, 16, 50, dtype, device)
    leaves = [x.requires_grad_() for x in inputs]
    _, exact = outcomes([x.double() for x in inputs], t, "reference")
    loss = flashproto.linear_cross_entropy(*leaves, t, chunk_size=8, impl="triton")
    first: tuple[Tensor, ...] = ()
    tolerance = 16 * torch.finfo(dtype).eps
    for factor in (0.7, 1.0, 2.0):
        up = torch.full_like(loss, factor)
        got = torch.autograd.grad(loss, leaves, up, retain_graph=True)
        first = first or got
        for a, b in zip(got, exact, strict=True):
            assert (a.double() - factor * b).abs().max() <= tolerance * factor * b.abs().max()
    for a, b in zip(first, exact, strict=True):
        assert (a.double() - 0.7 * b).abs().max() <= tolerance * b.abs().max()


def test_gradients_of_repeated_backward_passes_add_up(device) -> None:
    """Also where the gradients that the forward pass wrote are what the others are added to."""
    inputs, t = problem(20, 16, 50, torch.float32, device)
    leaves = [x.requires_grad_() for x in inputs]
    _, once = outcomes(inputs, t, "torch")
    loss = flashproto.linear_cross_entropy(*leaves, t, impl="triton")
    for times in (1, 2, 3):
        loss.backward(retain_graph=True)
        for leaf, dx in zip(leaves, once, strict=True):
            torch.testing.assert_close(leaf.grad, times * dx)


def test_float16_gradients_wait_for_the_loss_scale_in_float32(device) -> None:
    """Gradients under float16's smallest number become representable by the scale, as in torch."""
    inputs, t = problem(200, 16, 50, torch.float16, device)
    inputs[0] = inputs[0] * 1e-3
    scale = 2.0**15
    _, exact = outcomes([x.double() for x in inputs], t, "reference", scale * 1e-4)
    leaves = [x.detach().requires_grad_() for x in inputs]
    loss = flashproto.linear_cross_entropy(*leaves, t, chunk_size=64, impl="triton")
    (loss * 1e-4 * scale).backward()
    for leaf, wanted in zip(leaves, exact, strict=True):
        assert (leaf.grad.double() - wanted).abs().max() <= 2**-8 * wanted.abs().max()


def test_accumulates_the_weight_gradient_in_float32(device) -> None:
    """Many chunks: in bfloat16 the sum would lose what each adds."""
    inputs, t = problem(256, 8, 4, torch.bfloat16, device)
    _, exact = outcomes([x.double() for x in inputs], t, "reference", reduction="sum")
    _, few = outcomes(inputs, t, "triton", chunk_size=256, reduction="sum")
    _, many = outcomes(inputs, t, "triton", chunk_size=2, reduction="sum")
    error, allowed = ((g[1].double() - exact[1]).abs().max() for g in (many, few))
    assert error <= allowed + 2**-8 * exact[1].abs().max()


@pytest.mark.parametrize("reduction", REDUCTIONS)
def test_many_dimensions_and_strides(device, reduction) -> None:
    (h, weight), t = problem(24, 16, 50, torch.float32, device)
    h, t = h.view(2, 12, 16).transpose(0, 1), t.view(2, 12).t()
    weight = weight.t().contiguous().t()
    for low_memory in (False, True):
        got, gradients = outcomes(
            [h, weight],
            t,
            "triton",
            reduction=reduction,
            return_lse=True,
            chunk_size=10,
            low_memory=low_memory,
        )
        wanted, expected = outcomes([h, weight], t, "torch", reduction=reduction, return_lse=True)
        torch.testing.assert_close([*got, *gradients], [*wanted, *expected])
        got, gradients = outcomes([h, weight], t, "triton", reduction=reduction, low_memory=low_memory)
        wanted, expected = outcomes([h, weight], t, "torch", reduction=reduction)
        torch.testing.assert_close([*got, *gradients], [*wanted, *expected])


def test_no_tokens(device) -> None:
    inputs, t = problem(0, 16, 50, torch.float32, device, bias=True)
    for reduction in REDUCTIONS:
        for low_memory in (False, True):
            got, gradients = outcomes(inputs, t, "triton", reduction=reduction, low_memory=low_memory)
            wanted, _ = outcomes(inputs, t, "torch", reduction=reduction)
            torch.testing.assert_close(got, wanted, equal_nan=True)
            assert [g.shape for g in gradients] == [x.shape for x in inputs]
            assert not any(g.any() for g in gradients)


MEANS = (
    {},
    {"low_memory": True},
    {"chunk_size": 3},
    {"return_lse": True},
    {"z_loss": 0.1},
    {"softcap": 5.0},
    {"label_smoothing": 0.1},
    {"weighted": True},
    {"weighted": True, "low_memory": True},
    {"compiled": True},
)


def mean_gradients(
    inputs: list[Tensor], t: Tensor, weighted: bool = False, compiled: bool = False, **options
) -> tuple[Tensor, ...]:
    """The loss and the gradients of `inputs`; `weighted`: the first three classes count for nothing."""
    leaves = [x.detach().requires_grad_() for x in inputs]
    w = torch.ones(leaves[1].shape[0], device=t.device)
    w[:3] = 0
    options["class_weight"] = w if weighted else None
    f = flashproto.linear_cross_entropy
    if compiled:
        torch.compiler.reset()
        f = torch.compile(f, fullgraph=True, backend="aot_eager")
    loss = f(leaves[0], leaves[1], t, leaves[2], **options)
    loss = loss[0] if isinstance(loss, tuple) else loss
    return loss.detach(), *torch.autograd.grad(loss, leaves)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("options", MEANS, ids=str)
def test_the_mean_over_no_tokens_has_gradients_of_zero(device, options, dtype) -> None:
    inputs, t = problem(5, 8, 11, dtype, device, bias=True)
    loss, *gradients = mean_gradients(inputs, t.fill_(-100), impl="triton", **options)
    assert loss.isnan()
    assert all((g == 0).all() for g in gradients)


@pytest.mark.parametrize("ignored", [0, 1])
@pytest.mark.parametrize("options", [o for o in MEANS if "weighted" in o], ids=str)
def test_tokens_of_no_weight_have_gradients_of_nan(device, options, ignored) -> None:
    """0 / 0, as in torch, but for tokens that are ignored."""
    inputs, t = problem(4, 8, 11, torch.float32, device, bias=True)
    t = torch.tensor([0, 1, 2, -100 if ignored else 0], device=device)
    got = mean_gradients(inputs, t, impl="triton", **options)
    want = mean_gradients(inputs, t, impl="torch", **options)
    assert want[1].isnan().all(1).sum() == 4 - ignored
    torch.testing.assert_close(got, want, equal_nan=True)


@pytest.mark.parametrize("low_memory", [False, True])
def test_autocast_leaves_the_weight_gradient_unrounded(device, low_memory) -> None:
    inputs, t = problem(30, 16, 50, torch.float32, device, bias=True)
    with torch.autocast(device, torch.bfloat16):
        got, gradients = outcomes(inputs, t, "triton", chunk_size=8, low_memory=low_memory)
    rounded = [x.bfloat16() for x in inputs]
    exact, exact_gradients = outcomes([x.double() for x in rounded], t, "reference")
    eager, eager_gradients = outcomes(rounded, t, "torch")
    assert [g.dtype for g in gradients] == [torch.float32] * 3
    for a, b, c in zip(gradients, eager_gradients, exact_gradients, strict=True):
        assert (a.double() - c).abs().max() <= (b.double() - c).abs().max() + 2**-8 * c.abs().max()
    assert (got[0].double() - exact[0]).abs() <= (eager[0].double() - exact[0]).abs() + 2**-8
    h, weight, bias = inputs
    with pytest.raises(TypeError, match="dtype of h"):
        flashproto.linear_cross_entropy(h.bfloat16(), weight, t, bias)


def test_refuses(device) -> None:
    (h, weight), t = problem(4, 8, 10, torch.float32, device)
    f = flashproto.linear_cross_entropy
    for arguments, options, match in (
        ((h, weight.t(), t), {}, r"weight is of shape \[8, 10\]"),
        ((h, weight, t[:3]), {}, "targets"),
        ((h, weight, t, h[0]), {}, "bias"),
        ((h, weight, t), {"chunk_size": 0}, "chunk_size"),
        ((h, weight, t), {"class_weight": h[0, :3]}, "class_weight"),
        ((h, weight, t), {"softcap": -1.0}, "softcap"),
    ):
        with pytest.raises(ValueError, match=match):
            f(*arguments, **options)


def test_repeats_bitwise(device) -> None:
    inputs, t = problem(50, 32, 300, torch.bfloat16, device)
    for options in ({}, {"low_memory": True}):
        got, gradients = outcomes(inputs, t, "triton", chunk_size=16, **options)
        for _ in range(1 if device == "cpu" else 100):
            again, gradients_again = outcomes(inputs, t, "triton", chunk_size=16, **options)
            assert all(map(torch.equal, (*got, *gradients), (*again, *gradients_again)))


@pytest.mark.parametrize("tied", [False, True])
def test_language_model_without_logits(device, tied) -> None:
    config = nn.GPTConfig.preset("toy", vocab_size=50, n_layers=1, d_model=32, tie_weights=tied)
    model = nn.GPT(config, impl="triton" if device == "cuda" else None).to(device)
    tokens, targets = torch.randint(50, (2, 2, 12), device=device)
    targets[0, 3] = -100
    got = []
    for return_logits in (True, False):
        logits, loss = model(tokens, targets, return_logits=return_logits)
        assert (logits is None) == (not return_logits)
        got.append((loss.detach(), *torch.autograd.grad(loss, list(model.parameters()))))
    torch.testing.assert_close(got[0], got[1], rtol=1e-4, atol=1e-5)


def test_buffers_are_aligned_and_cover_the_vocabulary() -> None:
    for _ in range(100):
        T, V, chunk = (random.randrange(1, n) for n in (100_000, 300_000, 20_000))
        classes = configs.classes_at_once(T, V, chunk)
        assert 1 <= classes <= V
        assert configs.classes_summed(V, False) == V
        assert min(V, 64) <= configs.classes_summed(V, True) <= V
        assert configs.padded_classes(V) >= V and configs.padded_classes(V) % 64 == 0
        if chunk < T:
            assert T * classes <= 2 * chunk * V + 64 * T


def test_products_of_16_bits_take_whole_16_bytes() -> None:
    for V in range(1, 200):
        assert configs.product_classes(V, 2) in range(V, V + 8)
        assert configs.product_classes(V, 2) % 8 == 0
        assert configs.product_classes(V, 2) <= configs.padded_classes(V)
        assert configs.product_classes(V, 4) == V


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("V", [1, 50, 64, 207])
def test_a_bias_is_added_before_logits_are_rounded(device, V, dtype) -> None:
    """In 16 bits hardly any logit is not the float64 one rounded once; elsewhere rows lie apart."""
    (h, weight, b), _ = problem(30, 64, V, dtype, device, bias=True)
    W, b = padded(weight, dtype), padded(b, dtype)
    memory = memory_of_logits(h, 30, V)
    for rows in (30, 7):
        logits = logits_of(h[:rows], W, b, memory)
        exact = h[:rows].double() @ W.double().T + b.double()
        if dtype == torch.float32:
            torch.testing.assert_close(logits.double(), exact, rtol=1e-5, atol=1e-5)
        else:
            assert (logits != exact.to(dtype)).sum() <= 0.01 * logits.numel() + 1
        assert logits.is_contiguous() == (dtype != torch.float32 or V % 64 == 0)
        assert logits_of(h[:rows], W, None, memory).stride() == (configs.padded_classes(V), 1)


@pytest.mark.parametrize(
    "options", [{}, {"low_memory": True}, {"reduction": "none"}, {"chunk_size": 2}], ids=str
)
@pytest.mark.parametrize("V", [1, 9, 70, 207])
def test_padding_shows_nowhere(device, monkeypatch, V, options) -> None:
    """An ignored row that is not finite has a gradient of zeros, whatever the padding's logits are."""
    inputs, t = problem(5, 16, V, torch.bfloat16, device, bias=True)
    h = inputs[0]
    t[:] = 0
    t[3] = -100
    h[3, 0] = torch.inf
    poison(monkeypatch)
    _, gradients = outcomes(inputs, t, "triton", **options)
    for x, gradient in zip(inputs, gradients, strict=True):
        assert gradient.shape == x.shape and gradient.is_contiguous()
    dh, dweight, dbias = gradients
    assert not dh[3].any() and dh.isfinite().all() and dbias.isfinite().all()
    assert dweight[:, 1:].isfinite().all()
    dweight.mul_(2)  # in place, as optimizers do


@pytest.mark.parametrize(
    ("reduction", "low_memory"), [("none", False), ("mean", True), ("mean", False)]
)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_many_rows_whose_class_is_among_the_last_few(device, dtype, reduction, low_memory) -> None:
    """Where one of these has most of the probability, 1 - p shows logits that are not the sum's."""
    for seed in range(200 if device == "cuda" else 2):
        torch.manual_seed(seed)
        inputs, t = problem(23, 24, 700, dtype, device, bias=True)
        check(inputs, t, chunk_size=4, low_memory=low_memory, reduction=reduction)


@pytest.mark.parametrize("need_gradients", [False, True])
def test_opcheck(device, need_gradients) -> None:
    op = torch.ops.flashproto
    (h, weight, bias), t = problem(6, 8, 20, torch.float32, device, bias=True)
    leaves = [x.requires_grad_() for x in (h, weight, bias)]
    options, needs = (-100, 0.1, 0.1, 5.0), (need_gradients,) * 3
    arguments = (*leaves, t, torch.rand(20, device=device), *options, "mean", True, 4, True, *needs)
    torch.library.opcheck(op.linear_cross_entropy.default, arguments)
    loss, _, lse, *state = (y.detach() for y in op.linear_cross_entropy(*arguments)[:6])
    arguments = (
        torch.ones_like(loss),
        torch.ones_like(lse),
        *(x.detach() for x in leaves),
        *arguments[3:5],
        lse,
        *state,
        *options,
        4,
        True,
        True,
        True,
    )
    torch.library.opcheck(op.linear_cross_entropy_backward.default, arguments)


@pytest.mark.parametrize("options", [{}, {"low_memory": True}, {"reduction": "none"}], ids=str)
def test_compiles_in_one_graph(device, options) -> None:
    inputs, t = problem(20, 8, 50, torch.bfloat16, device)

    def f(h, weight):
        return flashproto.linear_cross_entropy(h * 2, weight, t, chunk_size=8, impl="triton", **options)

    backend = "inductor" if device == "cuda" else "aot_eager"
    got = []
    for function in (torch.compile(f, fullgraph=True, backend=backend), f):
        leaves = [x.detach().requires_grad_() for x in inputs]
        y = function(*leaves)
        got.append((y, *torch.autograd.grad(y, leaves, torch.full_like(y, 0.7))))
    for a, b in zip(*got, strict=True):
        assert (a.double() - b.double()).abs().max() <= 2**-6 * b.double().abs().max()


def test_tangents_and_second_derivatives_raise(device) -> None:
    (h, weight), t = problem(5, 8, 20, torch.float32, device)

    def f(h):
        return flashproto.linear_cross_entropy(h, weight, t, impl="triton")

    with pytest.raises(RuntimeError):
        torch.func.jvp(f, (h,), (h,))
    leaf = h.clone().requires_grad_()
    (dh,) = torch.autograd.grad(f(leaf).square(), leaf, create_graph=True)
    with pytest.raises(RuntimeError):
        dh.sum().backward()
    torch.testing.assert_close(
        torch.func.grad(lambda h: f(h).square())(h),
        torch.func.grad(lambda h: F.cross_entropy(F.linear(h, weight), t).square())(h),
    )


# --- on a GPU only -------------------------------------------------------------------------------


@pytest.mark.gpu
@pytest.mark.parametrize("low_memory", [False, True])
@pytest.mark.parametrize("V", [50257, 50304])
def test_a_language_model_head(device, V, low_memory) -> None:
    inputs, t = problem(3000, 256, V, torch.bfloat16, device)
    check(inputs, t, chunk_size=1024, low_memory=low_memory)


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("T", "D", "V", "low_memory", "gib"),
    [
        (32768, 768, 50304, False, 0.6),
        (16384, 4096, 128256, False, 3.6),
        (16384, 4096, 128256, True, 2.5),
        (16384, 4096, 128255, False, 4.6),
        (16384, 4096, 128255, True, 3.5),
    ],
)
def test_peak_memory(device, T, D, V, low_memory, gib) -> None:
    """Gradients included; the logits alone would take 3.1 and 3.9 GiB.  An odd number of classes adds a
    padded copy of the weight."""
    inputs, t = problem(T, D, V, torch.bfloat16, device)
    leaves = [x.requires_grad_() for x in inputs]
    for _ in range(2):  # the first time also makes what stays, say cuBLAS's workspace
        for x in leaves:
            x.grad = None
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        flashproto.linear_cross_entropy(*leaves, t, low_memory=low_memory).backward()
        used = torch.cuda.max_memory_allocated() - before
    assert used <= gib * 2**30
