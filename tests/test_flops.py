"""What torch.utils.flop_counter counts of the operators with matrix products."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

pytest.importorskip("triton")

import flashproto

OPS = torch.ops.flashproto


def flops(call, *inputs: Tensor) -> int:
    """Of call and, where inputs need gradients, of the backward pass."""
    with FlopCounterMode(display=False) as mode:
        out = call(*inputs)
        out = out[0] if isinstance(out, tuple) else out
        if out.requires_grad:
            out.sum().backward()
    return mode.get_total_flops()


@pytest.mark.parametrize("requires_grad", [False, True])
@pytest.mark.parametrize("causal", [False, True])
def test_attention_is_counted_as_torchs(device: str, causal: bool, requires_grad: bool) -> None:
    """A causal call as a full one.  The backward pass of plain products makes no scores again."""
    shapes = (2, 4, 9, 16), (2, 4, 7, 16), (2, 4, 7, 24)
    q, k, v = (torch.randn(s, device=device, requires_grad=requires_grad) for s in shapes)
    got = flops(lambda *x: flashproto.attention(*x, causal=causal, impl="triton"), q, k, v)

    def eager(q, k, v):
        return torch.bmm(torch.bmm(q.flatten(0, 1), k.flatten(0, 1).mT), v.flatten(0, 1))

    products = flops(eager, *(x.detach().requires_grad_(requires_grad) for x in (q, k, v)))
    again = 2 * 2 * 4 * 9 * 7 * 16 if requires_grad else 0
    assert got == products + again
    assert products == 2 * 2 * 4 * 9 * 7 * (16 + 24) * (3 if requires_grad else 1)


def test_attention_with_fewer_key_heads_and_fewer_gradients(device: str) -> None:
    q = torch.randn(1, 4, 9, 16, device=device, requires_grad=True)
    k, v = torch.randn(1, 2, 7, 16, device=device), torch.randn(1, 2, 7, 24, device=device)
    forward = 2 * 4 * 9 * 7 * (16 + 24)
    got = flops(lambda *x: flashproto.attention(*x, impl="triton"), q, k, v)
    assert got == forward + forward + 2 * 4 * 9 * 7 * 16


@pytest.mark.parametrize("requires_grad", [False, True])
def test_attention_qkv_is_counted_as_attention(device: str, requires_grad: bool) -> None:
    qkv = torch.randn(2, 5, 8 * 16, device=device, requires_grad=requires_grad)
    got = flops(lambda x: flashproto.attention_qkv(x, 4, 2, causal=True, impl="triton"), qkv)
    product = 2 * 2 * 4 * 5 * 5 * 16
    assert got == product * (2 + 5 * requires_grad)


@pytest.mark.parametrize("pages", [0, 3])
@pytest.mark.parametrize("impl", ["reference", "triton"])
def test_a_cache_is_counted_with_all_its_room(device: str, impl: str, pages: int) -> None:
    q, k = torch.randn(2, 4, 3, 16, device=device), torch.randn(2, 8, 2, 16, device=device)
    v = torch.randn(2, 8, 2, 24, device=device)
    ints = {"lengths": torch.zeros(2, device=device).int()}
    if pages:
        ints["page_table"] = torch.zeros(2, pages, device=device).int()
    got = flops(lambda *x: flashproto.attention_with_kv_cache(*x, impl=impl, **ints), q, k, v)
    assert got == 2 * 2 * 4 * 3 * (8 * max(pages, 1)) * (16 + 24)


@pytest.mark.parametrize("reduction", ["mean", "none"])
@pytest.mark.parametrize("requires_grad", [False, True])
def test_linear_cross_entropy(device: str, requires_grad: bool, reduction: str) -> None:
    """With "none" the backward pass makes the logits again."""
    h = torch.randn(6, 8, device=device, requires_grad=requires_grad)
    weight = torch.randn(10, 8, device=device, requires_grad=requires_grad)
    t = torch.randint(10, (6,), device=device)
    options = {"reduction": reduction, "chunk_size": 4, "impl": "triton"}
    got = flops(lambda h, w: flashproto.linear_cross_entropy(h, w, t, **options), h, weight)
    inputs = (x.detach().requires_grad_(requires_grad) for x in (h, weight))
    products = flops(lambda h, w: F.cross_entropy(F.linear(h, w), t, reduction=reduction), *inputs)
    product = 2 * 6 * 8 * 10
    assert products == product * (3 if requires_grad else 1)
    assert got == products + (product if requires_grad and reduction == "none" else 0)


@pytest.mark.parametrize("causal", [False, True])
def test_as_much_as_torchs_fused_attention(causal: bool) -> None:
    """By the formulas for shapes: torch has no such operator on every device."""
    from torch.utils.flop_counter import flop_registry, sdpa_backward_flop_count, sdpa_flop_count

    q, k, v = (2, 4, 9, 16), (2, 4, 7, 16), (2, 4, 7, 24)
    q_, k_, v_ = (torch.empty(s, device="meta") for s in (q, k, v))
    lse, out = q_[..., 0], torch.empty(2, 4, 9, 24, device="meta")
    settings = ([], [0], [], "causal/" if causal else "full/", 1.0, "triton", False, 0)
    assert flop_registry[OPS.attention_forward](q_, k_, v_, *settings) == sdpa_flop_count(q, k, v)
    tensors, needs = (out, None, None, None, q_, k_, v_, out, lse, None, None), [True] * 3
    got = flop_registry[OPS.attention_backward](*tensors, *settings, needs)
    assert got == sdpa_backward_flop_count(out.shape, q, k, v)
