"""attention(deterministic=True): the ordered backward for that call alone."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hopper_attention import determinism, half
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

pytest.importorskip("triton")

import flashproto
from flashproto.functional import attention_request
from flashproto.ops import attention as ops
from flashproto.ops import attention_hopper
from flashproto.ops.recipe import Launch
from flashproto.variant import Kind, Variant

WINDOW = Variant(Kind(CAUSAL=True, WINDOW=True), 0, {"left": 5})


def launches(variant: Variant, deterministic: bool) -> list[tuple[str, Any]]:
    """Of the backward on "hopper", by name, with the tiles and how sums are made."""
    q = half(1, 4, 300, 64)
    settings = ops.Settings(variant.form, 0.125, "hopper", deterministic)
    out, lse = torch.empty_like(q), torch.empty(q.shape[:3])
    tensors = ops.backward_inputs((out, None, out, lse), q, q, q)
    recipe = ops.attention.backward_recipe(tensors, settings, (True,) * 3, False)
    steps = [step for step in recipe.steps if isinstance(step, Launch)]
    return [(step.kernel.__name__, step.arguments.get("CFG")) for step in steps]


@pytest.mark.parametrize("variant", [Variant(), Variant(Kind(CAUSAL=True)), WINDOW])
def test_backward_is_that_of_torchs_switch(variant: Variant, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attention_hopper, "multiprocessors", lambda device: 132)
    plain, ordered = launches(variant, False), launches(variant, True)
    assert plain != ordered
    with determinism():
        assert launches(variant, False) == launches(variant, True) == ordered
    assert launches(variant, False) == plain


class Backwards(TorchDispatchMode):
    """Whether each backward of attention is deterministic."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[bool] = []

    def __torch_dispatch__(self, op: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if op is torch.ops.flashproto.attention_backward.default:
            self.seen.append(args[-3])  # before num_splits and what is wanted
        elif op is torch.ops.flashproto.attention_qkv_backward.default:
            self.seen.append(args[-4])
        return op(*args, **kwargs or {})


@pytest.mark.slow
def test_no_other_call_is(device: str) -> None:
    """Of calls that are alike otherwise, whichever backward comes first."""
    q = torch.randn(1, 2, 9, 16, device=device, requires_grad=True)
    qkv = torch.randn(1, 9, 96, device=device, requires_grad=True)
    cu = torch.tensor([0, 2], dtype=torch.int32, device=device)

    def outputs(deterministic: bool) -> list[Tensor]:
        options: Any = {"deterministic": deterministic, "impl": "triton"}
        heads = flashproto.attention(q, q, q, **options)
        tokens = flashproto.attention_varlen(q[0, :2], q[0, :2], q[0, :2], cu, cu, **options)
        return [heads, tokens, flashproto.attention_qkv(qkv, 2, 2, **options)]

    with Backwards() as backwards:
        for first, second in ((True, False), (False, True)):
            for x, y in zip(outputs(first), outputs(second), strict=True):
                y.sum().backward()
                x.sum().backward()
    assert backwards.seen == [False, True] * 3 + [True, False] * 3
    assert not torch.are_deterministic_algorithms_enabled()


def test_torchs_kernels_on_a_gpu_are_for_torchs_switch() -> None:
    q = torch.empty(1, 2, 9, 16, device="meta")
    for deterministic, taken in ((True, False), (False, True)):
        request = attention_request.attention_request("attention", q, q, q, deterministic=deterministic)
        assert (not [*request.reasons("torch")]) == taken
        with determinism():
            assert not [*request.reasons("torch")]


@pytest.mark.gpu
@pytest.mark.parametrize("window", [None, (100, 0)])
def test_gradients_are_the_same_bits(window: Any, hopper: None) -> None:
    x = [half(2, 8, 1300, 64).cuda().requires_grad_() for _ in range(3)]
    dout = torch.randn_like(x[0])

    def gradients() -> tuple[Tensor, ...]:
        out = flashproto.attention(*x, causal=True, window=window, deterministic=True, impl="hopper")
        return torch.autograd.grad(out, x, dout)

    first = gradients()
    for _ in range(20):
        assert all(map(torch.equal, first, gradients()))
