"""Rotary embedding on the kernel against float64 and against complex numbers."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from rows import assert_no_worse, poison
from torch import Tensor

import flashproto
from flashproto import nn, reference

pytest.importorskip("triton")


f16, bf16, f32 = torch.float16, torch.bfloat16, torch.float32
MEMORY = ("heads first", "tokens first", "part of a projection", "transposed")


def heads(memory: str, B: int, H: int, S: int, D: int, dtype: torch.dtype, device: str) -> Tensor:
    """Random [B, H, S, D] that lies in memory as said."""
    if memory == "heads first":
        return torch.randn(B, H, S, D, device=device).to(dtype)
    if memory == "tokens first":
        return torch.randn(B, S, H, D, device=device).to(dtype).transpose(1, 2)
    if memory == "part of a projection":
        wide = torch.randn(B, S, (H + 3) * D, device=device).to(dtype)
        return wide[..., D : (H + 1) * D].unflatten(-1, (H, D)).transpose(1, 2)
    return torch.randn(B, H, D, S, device=device).to(dtype).mT


def leaf(t: Tensor) -> Tensor:
    return t.detach().requires_grad_()


def tables(length: int, half: int, device: str) -> nn.attention.Rope:
    return nn.rope_tables(length, 2 * half, 100.0, device)


def check(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, **where: Any) -> None:
    """q, k and their gradients; the yardstick is the definition with every step in their dtype."""

    def eager(x: Tensor, c: Tensor, s: Tensor) -> Tensor:
        return reference.rope(x, c, s, **where)

    inputs = [leaf(q), leaf(k)]
    got = flashproto.rope(*inputs, cos, sin, impl="triton", **where)
    grads = [torch.randn_like(t) for t in got]
    got = [*got, *torch.autograd.grad(got, inputs, grads)]
    exact = [leaf(t.double()) for t in inputs]
    wanted = [eager(t, cos, sin) for t in exact]
    wanted += torch.autograd.grad(wanted, exact, [g.double() for g in grads])
    once = [eager(t, cos, sin) for t in inputs]
    once += torch.autograd.grad(once, inputs, grads)
    for a, b, c in zip(got, once, wanted, strict=True):
        assert_no_worse("rope", a, b, c.detach(), c.abs().max().item() if c.numel() else 0.0)


@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("dtype", [f16, bf16, f32])
@pytest.mark.parametrize(("D", "half"), [(16, 8), (64, 16), (80, 40), (7, 2), (2, 1), (24, 3)])
def test_against_float64(device, monkeypatch, D, half, dtype, interleaved) -> None:
    poison(monkeypatch)
    q = heads("tokens first", 2, 5, 9, D, dtype, device)
    k = heads("tokens first", 2, 2, 9, D, dtype, device)
    check(q, k, *tables(9, half, device), interleaved=interleaved)


@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("memory", MEMORY)
def test_any_strides(device, monkeypatch, memory, interleaved) -> None:
    poison(monkeypatch)
    q, k = heads(memory, 2, 3, 5, 16, bf16, device), heads("tokens first", 2, 1, 5, 16, bf16, device)
    cos, sin = tables(5, 6, device)
    check(q, k, cos, sin, interleaved=interleaved)
    check(q, q, cos.repeat(1, 2)[:, :6], sin.mT.contiguous().mT, interleaved=interleaved)
    check(q, k[:, :, :1].expand(-1, -1, 5, -1), cos, sin, interleaved=interleaved)
    if memory != "transposed":
        q_out, _ = flashproto.rope(q, k, cos, sin, impl="triton")
        assert (q_out.stride(1) < q_out.stride(2)) == (memory != "heads first")


def test_positions_and_offsets(device) -> None:
    q, k = (heads("tokens first", 3, n, 4, 16, f32, device) for n in (4, 2))
    cos, sin = tables(20, 8, device)
    wheres: list[dict[str, Any]] = [
        {"offset": 16},
        {"offset": torch.tensor([0, 5, 16], device=device)},
        {"positions": torch.tensor([3, 1, 1, 19], device=device)},
        {"positions": torch.randint(20, (3, 4), device=device, dtype=torch.int32)},
        {"positions": torch.randint(20, (4, 3), device=device).mT},
        {"positions": torch.randint(12, (3, 4), device=device), "offset": 8},
    ]
    for where in wheres:
        check(q, k, cos, sin, **where)
    late = flashproto.rope(q[:, :, 2:], None, cos, sin, offset=2, impl="triton")
    assert torch.equal(late, flashproto.rope(q, None, cos, sin, impl="triton")[:, :, 2:])


def test_rows_that_the_tables_lack_give_nan(device) -> None:
    q, (cos, sin) = torch.randn(2, 1, 3, 8, device=device), tables(5, 2, device)
    positions = torch.tensor([[0, 5, 4], [-1, 1, 2**40]], device=device)
    bad = (positions < 0) | (positions >= 5)
    for impl in ("triton", "reference"):
        y = flashproto.rope(q, None, cos, sin, positions=positions, impl=impl)[:, 0]
        assert torch.equal(y[..., :4].isnan().all(-1), bad)
        assert not y[~bad].isnan().any()
        assert torch.equal(y[..., 4:], q[:, 0, :, 4:])


def test_interleaved_is_multiplication_by_complex_numbers(device) -> None:
    q, (cos, sin) = torch.randn(2, 3, 6, 10, device=device), tables(6, 5, device)
    y = flashproto.rope(q, None, cos, sin, interleaved=True, impl="triton")
    turned = torch.view_as_complex(q.unflatten(-1, (5, 2))) * torch.complex(cos, sin)
    torch.testing.assert_close(y, torch.view_as_real(turned).flatten(-2))


@pytest.mark.parametrize("memory", MEMORY)
@pytest.mark.parametrize("impl", ["triton", "reference"])
def test_in_place(device, memory, impl) -> None:
    q, (cos, sin) = heads(memory, 2, 3, 5, 16, bf16, device), tables(9, 6, device)
    k = torch.randn(2, 1, 5, 16, device=device, dtype=bf16)
    wanted = flashproto.rope(q, k, cos, sin, offset=4, impl=impl)
    q_out, k_out = flashproto.rope(q, k, cos, sin, offset=4, inplace=True, impl=impl)
    assert q_out is q
    assert k_out is k
    assert torch.equal(q, wanted[0])
    assert torch.equal(k, wanted[1])


def test_in_place_leaves_the_rest_of_a_projection(device) -> None:
    qkv, (cos, sin) = torch.randn(2, 5, 6 * 8, device=device), tables(5, 4, device)
    before = qkv.clone()
    q, k, v = reference.split_heads(qkv, 4, 1)
    wanted = flashproto.rope(q, k, cos, sin, impl="reference")
    flashproto.rope(q, k, cos, sin, inplace=True, impl="triton")
    torch.testing.assert_close((q, k), wanted)
    assert torch.equal(v, reference.split_heads(before, 4, 1)[2])
    compiled = torch.compile(
        lambda q, k: flashproto.rope(q, k, cos, sin, inplace=True, impl="triton"),
        fullgraph=True,
        backend="aot_eager",
    )
    q, k, _ = reference.split_heads(before, 4, 1)
    compiled(q, k)
    assert torch.equal(before, qkv)


@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("dtype", [bf16, f32])
def test_qkv_is_splitting_and_rope(device, monkeypatch, dtype, interleaved) -> None:
    poison(monkeypatch)
    base = torch.randn(2, 5, 8 * 10 + 4, device=device).to(dtype)
    cos, sin = tables(11, 4, device)
    where = {"offset": torch.tensor([6, 1], device=device), "interleaved": interleaved}
    out = []
    for impl in ("triton", "reference"):
        qkv = leaf(base[..., :80])
        y = flashproto.rope_qkv(qkv, 4, 2, cos, sin, impl=impl, **where)
        dy = [torch.linspace(-1, 1, t.numel(), device=device).view_as(t).to(dtype) for t in y]
        out.append((*y, *torch.autograd.grad(y, qkv, dy)))
        assert [tuple(t.shape) for t in y] == [(2, 4, 5, 10), (2, 2, 5, 10), (2, 2, 5, 10)]
        (dv,) = torch.autograd.grad(
            flashproto.rope_qkv(qkv, 4, 2, cos, sin, impl=impl, **where)[2].sum(), qkv
        )
        assert not dv[..., :60].any()
        assert (dv[..., 60:] == 1).all()
    torch.testing.assert_close(*out)


def test_qkv_is_not_kept_for_backward(device) -> None:
    kept: list[Tensor] = []
    qkv, (cos, sin) = torch.randn(2, 5, 40, device=device, requires_grad=True), tables(5, 4, device)
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t) or t, lambda t: t):
        flashproto.rope_qkv(qkv, 3, 1, cos, sin, impl="triton")
    assert {t.data_ptr() for t in kept} == {cos.data_ptr(), sin.data_ptr()}


def test_derivatives_of_any_order(device) -> None:
    q, (cos, sin) = torch.randn(1, 2, 3, 8, device=device, requires_grad=True), tables(3, 4, device)
    y = flashproto.rope(q, None, cos, sin, impl="triton")
    (dq,) = torch.autograd.grad((y**3).sum(), q, create_graph=True)
    (twice,) = torch.autograd.grad((dq**2).sum(), q)
    y = flashproto.rope(q, None, cos, sin, impl="reference")
    (dq,) = torch.autograd.grad((y**3).sum(), q, create_graph=True)
    torch.testing.assert_close(twice, torch.autograd.grad((dq**2).sum(), q)[0], rtol=1e-4, atol=1e-4)


def test_learned_tables_go_where_they_get_a_gradient(device) -> None:
    q, (cos, sin) = torch.randn(1, 2, 3, 8, device=device), tables(3, 4, device)
    cos.requires_grad_()
    flashproto.rope(q, None, cos, sin).sum().backward()
    assert cos.grad is not None
    with pytest.raises(flashproto.BackendError, match="cos or sin needs a gradient"):
        flashproto.rope(q, None, cos, sin, impl="triton")


@pytest.mark.parametrize("shape", [(0, 2, 3, 8), (2, 0, 3, 8), (2, 2, 0, 8)])
def test_no_elements(device, shape) -> None:
    q = torch.randn(shape, device=device, requires_grad=True)
    y, _ = flashproto.rope(q, q, *tables(4, 4, device), impl="triton")
    assert torch.autograd.grad(y.sum(), q)[0].shape == shape
    if shape[1]:
        qkv = torch.randn(shape[0], shape[2], 4 * 8, device=device, requires_grad=True)
        q, _, _ = flashproto.rope_qkv(qkv, 2, 1, *tables(4, 4, device), impl="triton")
        assert torch.autograd.grad(q.sum(), qkv)[0].shape == qkv.shape


def test_no_rotated_dimensions(device) -> None:
    q, (cos, sin) = torch.randn(1, 2, 3, 8, device=device), tables(3, 4, device)
    assert torch.equal(flashproto.rope(q, None, cos[:, :0], sin[:, :0], impl="triton"), q)


Q, COS = torch.zeros(2, 4, 3, 16), torch.zeros(8, 8)
REFUSED = {
    "rank": (lambda: flashproto.rope(Q[0], None, COS, COS), "q is of shape"),
    "k": (lambda: flashproto.rope(Q, Q[:, :, 1:], COS, COS), "k is of shape"),
    "wide": (lambda: flashproto.rope(Q[..., :8], None, COS, COS), "cos is of shape"),
    "unlike": (lambda: flashproto.rope(Q, None, COS, COS[1:]), "sin is of shape"),
    "short": (lambda: flashproto.rope(Q, None, COS[:2], COS[:2]), "cos is of 2 rows"),
    "short for the offsets": (
        lambda: flashproto.rope(Q, None, COS[:2], COS[:2], offset=torch.zeros(2).long()),
        "cos is of 2 rows; it takes a row for each of 3 tokens",
    ),
    "no rows": (
        lambda: flashproto.rope(Q, None, COS[:0], COS[:0], positions=torch.zeros(3).long()),
        "cos is of 0 rows",
    ),
    "offset": (lambda: flashproto.rope(Q, None, COS, COS, offset=6), "offset is 6"),
    "before": (lambda: flashproto.rope(Q, None, COS, COS, offset=-1), "offset is -1"),
    "positions": (
        lambda: flashproto.rope(Q, None, COS, COS, positions=torch.zeros(4).long()),
        "positions is torch.int64 of shape",
    ),
    "floats": (
        lambda: flashproto.rope(Q, None, COS, COS, positions=torch.zeros(3)),
        "positions is torch.float32",
    ),
    "both": (
        lambda: flashproto.rope(
            Q, None, COS, COS, positions=torch.zeros(3).long(), offset=torch.zeros(2).long()
        ),
        "offset is a tensor",
    ),
    "in place": (
        lambda: flashproto.rope(Q.clone().requires_grad_(), None, COS, COS, inplace=True),
        "inplace is True",
    ),
    "packed": (lambda: flashproto.rope_qkv(Q[0], 3, 1, COS, COS), "qkv is 16 wide"),
    "packed rank": (lambda: flashproto.rope_qkv(Q, 2, 1, COS, COS), "qkv is of shape"),
    "no heads": (lambda: flashproto.rope_qkv(Q[0], 4, 0, COS, COS), "n_kv_heads is 0"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_bad_input_is_refused(case) -> None:
    call, text = REFUSED[case]
    with pytest.raises((TypeError, ValueError), match=text) as caught:
        call()
    assert "; it takes " in str(caught.value)


def test_opcheck(device) -> None:
    q = heads("tokens first", 2, 3, 4, 8, f32, device).requires_grad_()
    k = heads("heads first", 2, 1, 4, 8, f32, device).requires_grad_()
    cos, sin = tables(9, 3, device)
    rows = (torch.tensor([[3], [1]], device=device), 0, True)
    for arguments in (
        (q, k, cos, sin, None, 2, False, False, False),
        (q, None, cos, sin, *rows, True, True),
    ):
        torch.library.opcheck(torch.ops.flashproto.rope.default, arguments)
    plain = (q.detach(), k.detach())
    torch.library.opcheck(torch.ops.flashproto.rope_.default, (*plain, cos, sin, *rows, True))
    qkv = torch.randn(2, 4, 40, device=device, requires_grad=True)
    how = (cos, sin, rows[0], 3, 1, *rows[1:], False)
    torch.library.opcheck(torch.ops.flashproto.rope_packed.default, (qkv, *how))
    needs = [True, False, False, False]
    gradients = (*plain, plain[1].clone(), *how, needs)
    torch.library.opcheck(torch.ops.flashproto.rope_packed_backward.default, gradients)
    gradients = (*plain, cos, sin, *rows, False, False, [True, True, False, False, False])
    torch.library.opcheck(torch.ops.flashproto.rope_backward.default, gradients)


def test_compiles_in_one_graph(device) -> None:
    torch.compiler.reset()
    qkv, (cos, sin) = torch.randn(2, 5, 40, device=device, requires_grad=True), tables(9, 3, device)
    offset = torch.tensor([2, 4], device=device)

    def f(qkv: Tensor) -> list[Tensor]:
        q, k, v = flashproto.rope_qkv(qkv, 3, 1, cos, sin, impl="triton")
        q, k = flashproto.rope(q, k, cos, sin, offset=offset, interleaved=True, impl="triton")
        return [q, k, v]

    backend = "inductor" if device == "cuda" else "aot_eager"
    out = []
    for call in (torch.compile(f, fullgraph=True, backend=backend), f):
        y = call(qkv)
        out.append([*y, *torch.autograd.grad(sum((t**2).sum() for t in y), qkv)])
    torch.testing.assert_close(*out)


@pytest.mark.gpu
def test_more_than_2_to_the_31_elements(device) -> None:
    B, H, S, D = 5, 32, 2**17, 128  # 2.7e9 elements
    q = torch.empty(B, S, H, D, device=device, dtype=bf16).normal_().transpose(1, 2)
    cos, sin = nn.rope_tables(S, D, device=device)
    y = flashproto.rope(q, None, cos, sin)
    last = slice(S - 3, S)
    wanted = reference.rope(q[-1:, :, last].double(), cos, sin, offset=S - 3)
    torch.testing.assert_close(y[-1:, :, last].double(), wanted, rtol=1e-2, atol=1e-2)
