"""What patch() does with a gated MLP's activation: its backward pass makes it again."""

from __future__ import annotations

import functools
import gc
import weakref

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import flashproto
from flashproto.nn.recompute import through_activation

pytest.importorskip("triton")

from rows import record_launches

swiglu = functools.partial(flashproto.swiglu, impl="triton")


class Layer(nn.Linear):
    """Remembers what it was given, without keeping it."""

    given: weakref.ref[Tensor]

    def forward(self, x: Tensor) -> Tensor:
        self.given = weakref.ref(x)
        return super().forward(x)


class Lora(nn.Module):
    """A frozen layer, and two that are trained beside it."""

    def __init__(self, layer: nn.Linear) -> None:
        super().__init__()
        self.layer = layer.requires_grad_(False)
        self.a = nn.Linear(layer.in_features, 2, bias=False)
        self.b = nn.Linear(2, layer.out_features, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x) + self.b(self.a(x))


def problem(device, layer=Layer) -> tuple[nn.Module, list[Tensor]]:
    torch.manual_seed(0)
    made = layer(Layer(16, 8)) if layer is Lora else layer(16, 8)
    inputs = [torch.randn(2, 5, 16, device=device, requires_grad=True) for _ in range(2)]
    return made.to(device), inputs


def dout_of(out: Tensor) -> Tensor:
    return torch.cos(torch.arange(8.0, device=out.device)).expand_as(out)


def gradients(out: Tensor, layer: nn.Module, inputs: list[Tensor], **options) -> list[Tensor]:
    wanted = [*inputs, *(p for p in layer.parameters() if p.requires_grad)]
    return [
        *torch.autograd.grad(
            out, wanted, torch.cos(torch.arange(8.0, device=out.device)).expand_as(out), **options
        )
    ]


def assert_same(a: list[Tensor], b: list[Tensor]) -> None:
    assert len(a) == len(b)
    assert all(torch.equal(x, y) for x, y in zip(a, b, strict=True))


@pytest.mark.parametrize("kind", [Layer, Lora])
def test_gradients_have_the_same_bits_and_the_activation_is_not_kept(device, kind) -> None:
    layer, inputs = problem(device, kind)
    wanted = gradients(layer(swiglu(*inputs)), layer, inputs)
    out = through_activation(layer, swiglu, *inputs)
    assert (layer.layer if kind is Lora else layer).given() is None
    assert_same(gradients(out, layer, inputs, retain_graph=True), wanted)
    assert_same(gradients(out, layer, inputs), wanted)
    with pytest.raises(RuntimeError, match="a second time"):
        gradients(out, layer, inputs)


def test_one_launch_more_where_the_layer_needs_it(device, monkeypatch) -> None:
    layer, inputs = problem(device)
    out = through_activation(layer, swiglu, *inputs)
    seen = record_launches(monkeypatch)
    gradients(out, layer, inputs)
    assert [name for name, _ in seen] == ["glu_forward_kernel", "glu_backward_kernel"]
    layer.requires_grad_(False)  # whose input is then not kept
    out = through_activation(layer, swiglu, *inputs)
    seen.clear()
    gradients(out, layer, inputs)
    assert [name for name, _ in seen] == ["glu_backward_kernel"]


def test_what_a_hook_changes_is_kept(device) -> None:
    layer, inputs = problem(device)
    layer.register_forward_pre_hook(lambda _, given: given[0].mul_(3.0))
    wanted = gradients(layer(swiglu(*inputs)), layer, inputs)
    assert_same(gradients(through_activation(layer, swiglu, *inputs), layer, inputs), wanted)


def test_inputs_that_are_changed_later_are_an_error(device) -> None:
    layer, inputs = problem(device)
    gate = inputs[0] * 1
    out = through_activation(layer, swiglu, gate, inputs[1])
    gate.add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        gradients(out, layer, inputs)


def test_weights_that_are_changed_later_are_an_error(device) -> None:
    _, inputs = problem(device)
    layer = nn.Linear(16, 8, device=device)
    out = through_activation(layer, swiglu, *inputs)
    with torch.no_grad():
        layer.weight.mul_(2)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        torch.autograd.grad(out.sum(), inputs)


def test_what_keeps_its_own_result_goes(device) -> None:
    """As sigmoid does, whose node would hold itself."""
    _, inputs = problem(device)
    layer = nn.Sequential(nn.Linear(16, 8, device=device), nn.Sigmoid())
    gate = inputs[0] * 1
    out = through_activation(layer, swiglu, gate, inputs[1])
    seen = weakref.ref(gate)
    del gate, out
    gc.collect()
    assert seen() is None


def test_weights_without_plain_memory_are_kept(device) -> None:
    _, inputs = problem(device)
    weight = torch.randn(8, 16, device=device).to_sparse_csr()

    def layer(h: Tensor) -> Tensor:
        return (weight @ h.flatten(0, -2).t()).t()

    made = through_activation(layer, swiglu, *inputs), layer(swiglu(*inputs))
    found, wanted = (torch.autograd.grad(out.square().sum(), inputs) for out in made)
    torch.testing.assert_close(found, wanted)


@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpointing_decides_what_is_kept(device, reentrant) -> None:
    layer, inputs = problem(device)
    wanted = gradients(layer(swiglu(*inputs)), layer, inputs)
    run = functools.partial(through_activation, layer, swiglu)
    out = checkpoint(run, *inputs, use_reentrant=reentrant)
    if reentrant:  # which takes .backward() alone
        out.backward(dout_of(out))
        found = [x.grad for x in (*inputs, *layer.parameters())]
    else:
        found = gradients(out, layer, inputs)
    assert_same(found, wanted)


def test_offloading_sees_the_activation(device) -> None:
    layer, inputs = problem(device)
    kept: list[Tensor] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t) or t, lambda t: t):
        through_activation(layer, swiglu, *inputs)
    assert layer.given().data_ptr() in {t.data_ptr() for t in kept}


def test_autocast_keeps_what_it_makes(device) -> None:
    layer, inputs = problem(device)
    with torch.autocast(torch.device(device).type, torch.bfloat16):
        wanted = gradients(layer(swiglu(*inputs)), layer, inputs)
        out = through_activation(layer, swiglu, *inputs)
    assert_same(gradients(out, layer, inputs), wanted)


def test_without_gradients_and_without_kernels(device) -> None:
    layer, inputs = problem(device)
    with torch.no_grad():
        assert torch.equal(through_activation(layer, swiglu, *inputs), layer(swiglu(*inputs)))
    plain = functools.partial(flashproto.swiglu, impl="reference")
    wanted = gradients(layer(plain(*inputs)), layer, inputs)
    assert_same(gradients(through_activation(layer, plain, *inputs), layer, inputs), wanted)


def test_functional_gradients(device) -> None:
    layer, inputs = problem(device)
    wanted = gradients(layer(swiglu(*inputs)), layer, inputs)[:2]
    dout = torch.cos(torch.arange(8.0, device=device))
    loss = torch.func.grad(lambda *x: (through_activation(layer, swiglu, *x) * dout).sum(), (0, 1))
    for found, right in zip(loss(*inputs), wanted, strict=True):
        torch.testing.assert_close(found, right)


def test_compiled(device) -> None:
    """torch.compile decides by itself what is kept."""
    layer, inputs = problem(device, nn.Linear)
    wanted = gradients(layer(swiglu(*inputs)), layer, inputs)
    torch._dynamo.reset()
    run = functools.partial(through_activation, layer, swiglu)
    out = torch.compile(run, backend="aot_eager", fullgraph=True)(*inputs)
    for found, right in zip(gradients(out, layer, inputs), wanted, strict=True):
        torch.testing.assert_close(found, right)
