"""Gated linear units and GELU on the kernels against float64; eager PyTorch is the yardstick."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from rows import LAYOUTS, assert_no_worse, in_memory, poison, record_launches
from torch import Tensor

import flashproto
from flashproto import configs, reference

pytest.importorskip("triton")

from flashproto.ops.glu import Settings, glu

f16, bf16, f32 = torch.float16, torch.bfloat16, torch.float32
ACTIVATIONS = tuple(reference.ACTIVATIONS)
KINDS = ("two tensors", "halves", "alone")


def leaf(t: Tensor) -> Tensor:
    return t.detach().requires_grad_()


def inputs_of(kind: str, gate: Tensor, up: Tensor) -> list[Tensor]:
    if kind == "halves":
        return [leaf(torch.cat((gate, up), -1))]
    return [leaf(gate), leaf(up)] if kind == "two tensors" else [leaf(gate)]


def parts(kind: str, inputs: list[Tensor]) -> list[Tensor]:
    return list(inputs[0].chunk(2, -1)) if kind == "halves" else inputs


def eager(activation: str, gate: Tensor, *up: Tensor) -> Tensor:
    y = reference.ACTIVATIONS[activation](gate)
    return y * up[0] if up else y


def run(kind: str, activation: str, inputs: list[Tensor]) -> Tensor:
    gate, up = inputs[0], inputs[1] if len(inputs) == 2 else None
    return glu((gate, up), Settings(activation, kind == "halves"))


def check(kind: str, activation: str, inputs: list[Tensor], dy: Tensor) -> None:
    """y and every gradient of one call."""
    y = run(kind, activation, inputs)
    got = torch.autograd.grad(y, inputs, dy)
    y_eager = eager(activation, *parts(kind, inputs))
    got_eager = torch.autograd.grad(y_eager, inputs, dy)
    exact = [leaf(t.double()) for t in inputs]
    y_exact = eager(activation, *parts(kind, exact))
    wanted = torch.autograd.grad(y_exact, exact, dy.double())
    # Slopes are sums of terms of up to 1 + |x| that cancel.
    x, *up = (t.detach().double() for t in parts(kind, inputs))
    terms = dy.double().abs() * (1 + x.abs()) * (up[0].abs() if up else 1.0)
    terms = terms.max().item() if terms.numel() else 0.0
    assert_no_worse("y", y, y_eager, y_exact.detach(), terms)
    for a, b, c in zip(got, got_eager, wanted, strict=True):
        assert_no_worse("gradient", a, b, c, terms)


@pytest.mark.parametrize("dtype", [f16, bf16, f32])
@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize("kind", KINDS)
def test_against_float64(device, monkeypatch, kind, activation, dtype) -> None:
    poison(monkeypatch)
    for shape in ((300, 1), (3, 5, 7), (37, 64), (4, 1100)):
        gate, up, dy = (2 * torch.randn(shape, device=device).to(dtype) for _ in range(3))
        check(kind, activation, inputs_of(kind, gate, up), dy)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("kind", KINDS)
def test_any_strides(device, monkeypatch, kind, layout) -> None:
    poison(monkeypatch)
    gate, up, dy = (torch.randn(9, 40, device=device, dtype=bf16) for _ in range(3))
    inputs = [leaf(in_memory(t.detach(), layout)) for t in inputs_of(kind, gate, up)]
    check(kind, "silu", inputs, in_memory(dy, layout))
    check(kind, "silu", inputs, dy[:1].expand(9, 40))


def test_halves_are_read_and_written_in_place(device, monkeypatch) -> None:
    """No copy of a half, forward or backward, also where x itself is a part of a wider tensor."""
    seen = record_launches(monkeypatch)
    x = leaf(torch.randn(2, 5, 96, device=device)[..., :64])
    y = flashproto.swiglu(x, impl="triton")
    (dx,) = torch.autograd.grad(y, x, torch.ones_like(y))
    (_, forward), (_, backward) = seen
    for launch in (forward, backward):
        assert launch["gate_ptr"].data_ptr() == x.data_ptr()
        assert launch["up_ptr"].data_ptr() == x[..., 32:].data_ptr()
    assert backward["dgate_ptr"].data_ptr() == dx.data_ptr()
    assert backward["dup_ptr"].data_ptr() == dx[..., 32:].data_ptr()
    assert dx.is_contiguous()


@pytest.mark.parametrize("kind", KINDS)
def test_backward_keeps_the_inputs_alone(device, kind) -> None:
    kept: list[Tensor] = []
    inputs = inputs_of(kind, torch.randn(4, 8, device=device), torch.randn(4, 8, device=device))
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t) or t, lambda t: t):
        run(kind, "silu", inputs)
    assert {t.data_ptr() for t in kept} == {t.data_ptr() for t in inputs}


@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_extreme_values_as_in_torch(device, activation) -> None:
    x = torch.tensor(
        [0.0, -0.0, 1e-20, 30.0, -30.0, 90.0, -90.0, 1e4, -1e4, 1e12, -1e12, float("nan")],
        device=device,
        requires_grad=True,
    )
    y, wanted = glu((x, None), Settings(activation, False)), reference.ACTIVATIONS[activation](x)
    torch.testing.assert_close(y, wanted, equal_nan=True, rtol=1e-5, atol=1e-6)
    dx, dx_wanted = (torch.autograd.grad(t.sum(), x)[0] for t in (y, wanted))
    torch.testing.assert_close(dx, dx_wanted, equal_nan=True, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("shape", [(0, 8), (3, 0, 8), (3, 0)])
def test_no_elements(device, shape) -> None:
    x = torch.randn(shape, device=device, requires_grad=True)
    for y in (flashproto.swiglu(x, impl="triton"), flashproto.swiglu(x, x, impl="triton")):
        (dx,) = torch.autograd.grad(y.sum(), x)
        assert dx.shape == x.shape
    assert flashproto.gelu(x, impl="triton").shape == shape


def test_only_some_gradients(device) -> None:
    gate, up = (torch.randn(5, 40, device=device, requires_grad=True) for _ in range(2))
    y = flashproto.reglu(gate.detach(), up, impl="triton")
    torch.testing.assert_close(torch.autograd.grad(y.sum(), up)[0], gate.detach().relu())
    y = flashproto.reglu(gate, up.detach(), impl="triton")
    (dgate,) = torch.autograd.grad(y.sum(), gate)
    torch.testing.assert_close(dgate, up.detach() * (gate > 0))


def test_public_functions(device) -> None:
    x = torch.randn(3, 4, 20, device=device)
    gate, up = x.chunk(2, -1)
    plain = {
        flashproto.swiglu: F.silu(gate) * up,
        flashproto.geglu: F.gelu(gate) * up,
        flashproto.reglu: F.relu(gate) * up,
    }
    for f, wanted in plain.items():
        for impl in ("triton", "torch", "reference"):
            torch.testing.assert_close(f(x, impl=impl), wanted)
            torch.testing.assert_close(f(gate, up, impl=impl), wanted)
    for impl in ("triton", "torch", "reference"):
        for approximate in ("none", "tanh"):
            wanted = F.gelu(x, approximate=approximate)
            torch.testing.assert_close(flashproto.gelu(x, approximate=approximate, impl=impl), wanted)
        assert flashproto.gelu(x[0, 0, 0], impl=impl).shape == ()


@pytest.mark.parametrize("kind", KINDS)
def test_compiles_in_one_graph(device, kind) -> None:
    torch.compiler.reset()
    inputs = inputs_of(kind, *(torch.randn(4, 6, device=device) for _ in range(2)))

    def f(*inputs):
        if kind == "alone":
            return flashproto.gelu(*inputs, impl="triton") * 2
        return flashproto.swiglu(*inputs, impl="triton") * 2

    backend = "inductor" if device == "cuda" else "aot_eager"
    compiled = torch.compile(f, fullgraph=True, backend=backend)
    dy = torch.randn(4, 6, device=device)
    for call in (compiled, f):
        y = call(*inputs)
        gradients = torch.autograd.grad(y, inputs, dy)
        if call is compiled:
            kept = [y, *gradients]
    torch.testing.assert_close(kept, [y, *gradients])


def test_tiles_fit_the_widths() -> None:
    assert configs.glu(5632, 2).columns == 512
    assert configs.glu(11008, 2).columns == 256
    assert configs.glu(8192, 2).columns == 1024
    for itemsize in (2, 4):
        for N in (1, 3, 200, 257, 1000, 2**33):
            config = configs.glu(N, itemsize)
            assert config.rows * config.columns * itemsize == 2048


@pytest.mark.gpu
@pytest.mark.gib(34)
@pytest.mark.parametrize("kind", ["two tensors", "halves"])
def test_more_than_2_to_the_31_elements(device, kind) -> None:
    M, N = 2**16 + 8, 2**15
    gate, up = torch.empty(M, 2 * N, device=device, dtype=bf16).normal_().chunk(2, -1)
    inputs = inputs_of(kind, gate, up)
    y = flashproto.swiglu(*inputs)
    (dx,) = torch.autograd.grad(y, inputs[:1], torch.ones_like(y))
    for rows in (slice(0, 8), slice(M - 8, M)):
        g, u = gate[rows].double().requires_grad_(), up[rows].double()
        wanted = F.silu(g) * u
        torch.testing.assert_close(y[rows].double(), wanted.detach(), rtol=1e-2, atol=1e-2)
        (dg,) = torch.autograd.grad(wanted.sum(), g)
        torch.testing.assert_close(dx[rows, :N].double(), dg, rtol=1e-2, atol=1e-2)
