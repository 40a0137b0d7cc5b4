"""softmax and log_softmax of scaled and masked scores, and with hooks, against float64."""

from __future__ import annotations

import math
from functools import partial

import pytest
import torch
from rows import assert_no_worse, poison
from test_softmax import eager, outcomes
from torch import Tensor

import flashproto
from flashproto import hooks

pytest.importorskip("triton")

OPERATORS = ("softmax", "log_softmax")
INF, NAN = math.inf, math.nan


def by_hand(operator: str, scale: float, mask: Tensor | None, causal: bool, x: Tensor) -> Tensor:
    """The same in PyTorch, each step rounded to x's dtype."""
    s = x * scale
    if mask is not None:
        s = s.masked_fill(~mask, -INF) if mask.dtype == torch.bool else s + mask.to(x.dtype)
    if causal:
        S, N = x.shape[-2:]
        seen = torch.ones(S, N, dtype=torch.bool, device=x.device).tril(N - S)
        s = s.masked_fill(~seen, -INF)
    return getattr(torch, operator)(s, -1)


MASKS = {"none": None, "whole": (2, 3, 5), "keys": (2, 1, 1), "pairs": (5,), "heads": (3, 1)}


def random_mask(kind: str, shape: tuple[int, ...], dtype: torch.dtype, device: str) -> Tensor:
    """A bias, or booleans of which a few are False, none of them where that would empty a row."""
    mask = torch.randn(shape, device=device)
    if kind == "bias":
        return mask.to(dtype)
    mask = mask > -1
    mask[..., 0] = True
    return mask


@pytest.mark.parametrize("operator", OPERATORS)
@pytest.mark.parametrize("causal", [False, True], ids=["", "causal"])
@pytest.mark.parametrize("kind", ["bool", "bias"])
@pytest.mark.parametrize("where", MASKS)
def test_scale_mask_and_causal(device, monkeypatch, where, kind, causal, operator) -> None:
    """x [2, 3, 5, N] with masks that broadcast in every way."""
    poison(monkeypatch)
    wide = (where, kind, causal, operator) == ("pairs", "bias", True, "softmax")
    for N, dtype in ((40, torch.bfloat16), (40, torch.float32), *[(9000, torch.float32)] * wide):
        x = torch.randn(2, 3, 5, N, device=device).to(dtype)
        mask, dy = None, torch.randn_like(x)
        if MASKS[where] is not None:
            shape = (*MASKS[where], 1 if where == "heads" else N)
            mask = random_mask(kind, shape, dtype, device)
        function = partial(getattr(flashproto, operator), scale=0.3, mask=mask, causal=causal)
        composed = partial(by_hand, operator, 0.3, mask, causal)
        y, dx = outcomes(partial(function, impl="triton"), x, dy)
        exact, exact_dx = outcomes(composed, x.double(), dy.double())
        rounded, rounded_dx = outcomes(composed, x, dy)
        assert torch.equal(y.isinf(), exact.isinf())
        y, exact, rounded = (t.masked_fill(exact.isinf(), 0.0) for t in (y, exact, rounded))
        # Scores of float32, where eager rounds them to x's dtype; the interpreter's sums: see check.
        assert_no_worse("y", y, rounded, exact, exact.abs().max().item())
        terms = dy.abs().double().sum(-1).max().item() if operator == "log_softmax" else 1.0
        assert_no_worse("dx", dx, rounded_dx, exact_dx, terms)


@pytest.mark.parametrize("operator", OPERATORS)
def test_gradients_of_bias_and_hooks(device, operator) -> None:
    for N in (30, 9000):
        x, z = (torch.randn(2, 3, N, device=device, requires_grad=True) for _ in range(2))
        bias = torch.randn(3, N, device=device, requires_grad=True)
        factor = torch.rand(2, 1, 1, device=device, requires_grad=True)
        dy = torch.randn(2, 3, N, device=device)
        results = []
        for impl in ("triton", "reference"):
            f = getattr(flashproto, operator)
            silu, multiply = hooks.call("silu_gate", z), hooks.call("multiply", factor)
            y = f(x, scale=2.0, mask=bias, epilogue=silu, impl=impl)
            w = f(x, prologue=multiply, dtype=torch.float64 if impl == "reference" else None, impl=impl)
            grads = torch.autograd.grad(y, (x, bias, z), dy)
            results.append((y, w.float(), *grads, *torch.autograd.grad(w, (x, factor), dy.to(w.dtype))))
        for a, b in zip(*results, strict=True):
            torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-4)


def test_a_row_without_scores_is_nan(device) -> None:
    x = torch.randn(4, 9, device=device)
    mask = torch.ones(4, 1, dtype=torch.bool, device=device)
    mask[2] = False
    for impl in ("triton", "reference"):
        y = flashproto.softmax(x, mask=mask, impl=impl)
        assert torch.equal(y.isnan().all(1), ~mask[:, 0])
        assert torch.equal(y.isnan().any(1), ~mask[:, 0])
    y = flashproto.softmax(x[:, :3], causal=True)  # the first row sees no column
    assert y[0].isnan().all()
    assert not y[1:].isnan().any()


def test_arguments_that_do_not_fit(device) -> None:
    x = torch.randn(4, 9, device=device)
    for operator in ("softmax", "log_softmax"):
        f = getattr(flashproto, operator)
        with pytest.raises(ValueError, match=f"{operator}: mask is of shape"):
            f(x, mask=torch.ones(3, 9, dtype=torch.bool, device=device))
        with pytest.raises(TypeError, match=f"{operator}: mask is of dtype torch.int64"):
            f(x, mask=torch.ones(4, 9, dtype=torch.int64, device=device))
        with pytest.raises(ValueError, match=f"{operator}: scale is nan"):
            f(x, scale=NAN)
        with pytest.raises(ValueError, match=f"{operator}: prologue is given beside"):
            f(x, scale=2.0, prologue=hooks.call("multiply", x))
        with pytest.raises(ValueError, match="2 dimensions"):
            f(x[0], causal=True)
        with pytest.raises(flashproto.BackendError, match="PyTorch fuses neither"):
            f(x, scale=2.0, impl="torch")


def test_results_of_another_dtype(device) -> None:
    """float32 of 16 bits is computed from them directly; what is narrower is rounded first, as in
    torch."""
    x, dy = (torch.randn(5, 40, device=device) for _ in range(2))
    for operator in ("softmax", "log_softmax"):
        f = getattr(flashproto, operator)
        got = outcomes(partial(f, dtype=torch.float32, impl="triton"), x.bfloat16(), dy)
        wanted = outcomes(eager(operator), x.bfloat16().float(), dy)
        torch.testing.assert_close(got, (wanted[0], wanted[1].bfloat16()))
        narrow = outcomes(partial(f, dtype=torch.bfloat16, impl="triton"), x, dy)
        wanted = outcomes(partial(f, impl="triton"), x.bfloat16(), dy)
        assert torch.equal(narrow[0], wanted[0])
        assert torch.equal(narrow[1], wanted[1].float())
        with torch.autocast(device, torch.bfloat16):
            y = getattr(flashproto, operator)(x.bfloat16(), impl="triton")
            assert y.dtype == getattr(torch, operator)(x.bfloat16(), -1).dtype
            y = getattr(flashproto, operator)(x.bfloat16(), scale=2.0, impl="triton")
            assert y.dtype == getattr(torch, operator)(x.bfloat16(), -1).dtype


@pytest.mark.parametrize("shape", [(0, 8), (3, 0), (3, 0, 8)])
def test_no_elements(device, monkeypatch, shape) -> None:
    """The gradient of what is broadcast to no element is 0, and the logsumexp of none -inf."""
    poison(monkeypatch)
    x = torch.randn(shape, device=device, requires_grad=True)
    factor = torch.randn(1, device=device, requires_grad=True)
    y = flashproto.softmax(x, prologue=hooks.call("multiply", factor), impl="triton")
    dx, dfactor = torch.autograd.grad(y.sum(), (x, factor))
    assert y.shape == dx.shape == shape
    assert dfactor.tolist() == [0.0]
    settings = (False, torch.float32, False, "multiply", [], "", [])
    _, lse = torch.ops.flashproto.hooked_softmax(x.detach(), [factor.detach()], *settings)
    assert lse.shape == shape[:-1]
    assert (lse == -INF).all()


def test_hooks_compile_in_one_graph(device) -> None:
    x, dy = (torch.randn(2, 6, 40, device=device) for _ in range(2))
    mask = torch.randn(40, device=device) > -1

    def f(x):
        y = flashproto.softmax(x * 2, scale=0.5, mask=mask, causal=True, impl="triton")
        return flashproto.log_softmax(y, epilogue=hooks.call("multiply", x), impl="triton")

    backend = "inductor" if device == "cuda" else "aot_eager"
    compiled = outcomes(torch.compile(f, fullgraph=True, backend=backend), x, dy)
    for a, b in zip(compiled, outcomes(f, x, dy), strict=True):
        torch.testing.assert_close(a, b)
