"""Norms that keep their output for the backward pass: gradients against float64, and what is kept."""

from __future__ import annotations

import pytest
import torch
from rows import poison
from torch import Tensor

import flashproto
from flashproto import hooks, reference
from flashproto.nn import LayerNorm, RMSNorm

pytest.importorskip("triton")

EPS = 1e-5
SMALLEST = 2.0**-64  # weights smaller than this count as this
bf16, f32 = torch.bfloat16, torch.float32
NAMES = ("layer_norm", "rms_norm", "add_layer_norm", "add_rms_norm")


def call(name: str, tensors: dict[str, Tensor], N: int, **options) -> list[Tensor]:
    """[y] or [y, total]."""
    inputs = [tensors[n] for n in ("x", "residual") if n in tensors]
    affine = [tensors.get("weight"), *([None] if "layer" in name else [])]
    out = getattr(flashproto, name)(*inputs, N, *affine, EPS, **options)
    return list(out) if isinstance(out, tuple) else [out]


def weights_of(kind: str, N: int, dtype: torch.dtype, device: str) -> Tensor | None:
    """Weights, many of them next to nothing."""
    if kind == "none":
        return None
    weight = torch.randn(N, device=device)
    if kind == "zero":
        weight[::3] = 0.0
    elif kind == "all zero":
        weight.zero_()
    elif kind == "tiny":
        weight *= 10.0 ** -torch.randint(0, 38, (N,), device=device)
    elif kind == "huge":
        weight *= 1e15
    elif kind == "minus one":  # Gemma's zero
        weight[::3] = -1.0
    return weight.to(dtype)


def problem(
    name: str, shape: tuple[int, ...], dtype: torch.dtype, kind: str, device: str
) -> tuple[dict[str, Tensor], list[Tensor]]:
    """(inputs, gradients of the outputs)."""
    tensors = {"x": (torch.randn(shape, device=device) * 3 + 1).to(dtype)}
    grads = [torch.randn(shape, device=device).to(dtype)]
    if "add" in name:
        tensors["residual"] = torch.randn(shape, device=device)  # a float32 residual stream
        grads.append(torch.randn(shape, device=device))
    weight = weights_of(kind, shape[-1], dtype, device)
    if weight is not None:
        tensors["weight"] = weight
    return tensors, grads


def gradients(name, tensors, grads, **options) -> tuple[list[Tensor], list[Tensor]]:
    leaves = {n: t.detach().requires_grad_() for n, t in tensors.items()}
    out = call(name, leaves, tensors["x"].shape[-1], **options)
    return out, list(torch.autograd.grad(out, list(leaves.values()), grads))


def exact(name, tensors, grads, casting) -> tuple[list[Tensor], list[Tensor], Tensor, list[Tensor]]:
    """Outputs and gradients in float64 of the total as rounded, a bound on the error of y, and one on
    what one rounding of y does to each gradient.

    Before y is rounded it is off by a few float32 epsilons of the row's largest xhat, times the weight
    of its own column: a row may have its largest y where xhat is small.  SMALLEST stands for weights
    that are smaller.

    xhat comes back as xhat (1 + d) with |d| <= u, half an epsilon (twice that with "llama", which
    rounds twice), so that to first order the averages of g xhat, and with them dx and dweight, are off
    by no more than u times the sums of the absolute values of their terms.
    """
    dtype, N = tensors["x"].dtype, tensors["x"].shape[-1]
    total = tensors["x"] + tensors["residual"] if "residual" in tensors else tensors["x"]
    t = total.double().requires_grad_()
    w = tensors["weight"].double().requires_grad_() if "weight" in tensors else None
    y = reference.norm(t, [N], w, None, EPS, centered="layer" in name, casting=casting)
    got = torch.autograd.grad(y, [t] if w is None else [t, w], grads[0].double())
    dt = got[0] if len(grads) == 1 else got[0] + grads[1].double()
    one = 1.0 if w is None else w.detach() + (1 if casting == "gemma" else 0)
    d = t.detach()
    d = d - d.mean(-1, keepdim=True) if "layer" in name else d
    rstd = (d.square().mean(-1, keepdim=True) + EPS).rsqrt()
    xhat, g = (d * rstd).abs(), (grads[0].double() * one).abs()
    u = torch.finfo(dtype).eps / 2 * (2 if casting == "llama" else 1)
    units = 8 * torch.finfo(f32).eps * abs(one) + 2 * SMALLEST
    of_y = u * y.detach().abs() + units * xhat.amax(-1, keepdim=True)
    bound = 2 * u * rstd * xhat * (g * xhat).mean(-1, keepdim=True)
    bounds = [bound] * (2 if "residual" in tensors else 1)
    if w is not None:
        bounds.append(u * (grads[0].double().abs() * xhat).flatten(0, -2).sum(0))
    wanted = [dt] * (2 if "residual" in tensors else 1) + list(got[1:])
    return [y.detach(), total], wanted, of_y, bounds


def check(name, shape, dtype, kind, casting, device) -> None:
    tensors, grads = problem(name, shape, dtype, kind, device)
    options = {"casting": casting, "memory_efficient": True, "impl": "triton"}
    out, got = gradients(name, tensors, grads, **options)
    outputs, wanted, of_y, bounds = exact(name, tensors, grads, casting)
    assert ((out[0].double() - outputs[0]).abs() <= of_y).all()
    if "add" in name:
        assert torch.equal(out[1], outputs[1])
    u = torch.finfo(dtype).eps / 2 * (2 if casting == "llama" else 1)
    for a, b, bound in zip(got, wanted, bounds, strict=True):
        assert not a.isnan().any()
        own = torch.finfo(a.dtype).eps / 2 * b.abs()  # the gradient's own rounding
        slack = 32 * torch.finfo(f32).eps * max(b.abs().max().item(), bound.max().item() / u)
        assert ((a.double() - b).abs() <= bound + own + slack).all(), (a.double() - b).abs().max()


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("dtype", [f32, bf16])
@pytest.mark.parametrize("kind", ["none", "ordinary", "zero", "all zero", "tiny", "huge"])
def test_against_float64(device, monkeypatch, name, dtype, kind) -> None:
    poison(monkeypatch)
    check(name, (2, 3, 100), dtype, kind, "torch", device)


@pytest.mark.parametrize("name", ["layer_norm", "add_rms_norm"])
@pytest.mark.parametrize("N", [1, 3, 768, 9000, 17000])
def test_widths(device, monkeypatch, name, N) -> None:
    poison(monkeypatch)
    check(name, (3, N), bf16, "zero", "torch", device)


@pytest.mark.parametrize(("casting", "kind"), [("llama", "zero"), ("gemma", "minus one")])
@pytest.mark.parametrize("dtype", [f32, bf16])
def test_castings(device, monkeypatch, casting, kind, dtype) -> None:
    poison(monkeypatch)
    check("rms_norm", (5, 200), dtype, kind, casting, device)


def test_only_y_is_kept(device) -> None:
    x = torch.randn(6, 64, device=device, dtype=bf16, requires_grad=True)
    residual = torch.randn(6, 64, device=device, requires_grad=True)
    weight = torch.randn(64, device=device, requires_grad=True)
    kept: list[Tensor] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t) or t, lambda t: t):
        y, _ = flashproto.add_rms_norm(x, residual, 64, weight, memory_efficient=True, impl="triton")
    large = [t for t in kept if t.numel() >= x.numel()]
    assert [t.data_ptr() for t in large] == [y.data_ptr()]


def test_y_must_stay_as_it_is(device) -> None:
    x = torch.randn(3, 8, device=device, requires_grad=True)
    y = flashproto.rms_norm(x, 8, memory_efficient=True, impl="triton")
    y.mul_(2)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.sum().backward()


@pytest.mark.parametrize("name", NAMES)
def test_reference(device, name) -> None:
    tensors, grads = problem(name, (4, 24), f32, "zero", device)
    got = [
        gradients(name, tensors, grads, memory_efficient=True, impl=impl)
        for impl in ("triton", "reference")
    ]
    for a, b in zip(*(out + grads for out, grads in got), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("name", ["add_layer_norm", "rms_norm"])
def test_compiles_in_one_graph(device, name) -> None:
    tensors, grads = problem(name, (4, 24), f32, "zero", device)
    inputs = {n: t.requires_grad_() for n, t in tensors.items()}
    backend = "inductor" if device == "cuda" else "aot_eager"

    def run(f) -> list[Tensor]:
        out = f(inputs)
        return [*out, *torch.autograd.grad(out, list(inputs.values()), grads)]

    def eager(tensors):
        return call(name, tensors, 24, memory_efficient=True, impl="triton")

    compiled = run(torch.compile(eager, fullgraph=True, backend=backend))
    for a, b in zip(compiled, run(eager), strict=True):
        torch.testing.assert_close(a, b)


@pytest.mark.parametrize("shape", [(0, 8), (3, 0)])
def test_no_elements(device, shape) -> None:
    x = torch.randn(shape, device=device, requires_grad=True)
    weight = torch.randn(shape[-1], device=device, requires_grad=True)
    y, total = flashproto.add_rms_norm(x, x, shape[-1], weight, memory_efficient=True, impl="triton")
    dx, dweight = torch.autograd.grad(y.sum() + total.sum(), (x, weight))
    assert y.shape == total.shape == dx.shape == shape
    assert not dweight.any()


def test_modules(device) -> None:
    x = torch.randn(4, 24, device=device, requires_grad=True)
    for module in (
        RMSNorm(24, memory_efficient=True, device=device),
        LayerNorm(24, bias=False, memory_efficient=True, device=device),
    ):
        torch.nn.init.zeros_(module.weight)  # as in zero-initialized branches
        dy = torch.randn_like(x)
        module(x).backward(dy)
        kind = "layer" if isinstance(module, LayerNorm) else "rms"
        eps = torch.finfo(f32).eps if module.eps is None else module.eps
        xhat = reference.norm(x.detach(), [24], None, None, eps, centered=kind == "layer")
        torch.testing.assert_close(module.weight.grad, (dy * xhat).sum(0))


def test_errors(device) -> None:
    x, weight = torch.randn(3, 8, device=device), torch.randn(8, device=device)
    with pytest.raises(ValueError, match="bias is given; it takes None where memory_efficient"):
        flashproto.layer_norm(x, 8, weight, weight, memory_efficient=True)
    with pytest.raises(TypeError, match=r"x is of dtype torch.float16"):
        flashproto.rms_norm(x.half(), 8, memory_efficient=True)
    with pytest.raises(ValueError, match="memory_efficient is True"):
        flashproto.rms_norm(x, 8, memory_efficient=True, dtype=bf16)
    with pytest.raises(ValueError, match="memory_efficient is True"):
        gate = hooks.call("silu_gate", x)
        flashproto.rms_norm(x, 8, memory_efficient=True, epilogue=gate)
    with pytest.raises(flashproto.BackendError, match="keep their input"):
        flashproto.rms_norm(x, 8, memory_efficient=True, impl="torch")
