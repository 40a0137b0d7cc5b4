"""QK norm, with and without rotary embedding, on the kernels against float64."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from rows import assert_no_worse, poison
from torch import Tensor

import flashproto
from flashproto import nn, reference

pytest.importorskip("triton")

from flashproto.ops import qk_norm as ops

EPS = 1e-5
f16, bf16, f32 = torch.float16, torch.bfloat16, torch.float32
CASTINGS = ("torch", "llama", "gemma")


def leaf(t: Tensor) -> Tensor:
    return t.detach().requires_grad_()


def tables(length: int, half: int, device: str) -> tuple[Tensor, Tensor] | tuple[None, None]:
    """None where nothing is rotated."""
    return nn.rope_tables(length, 2 * half, 100.0, device) if half else (None, None)


def tokens_first(B: int, H: int, S: int, D: int, dtype: torch.dtype, device: str) -> Tensor:
    """[B, H, S, D], a part of a wider projection."""
    wide = torch.randn(B, S, (H + 2) * D, device=device).to(dtype)
    return wide[..., D : (H + 1) * D].unflatten(-1, (H, D)).transpose(1, 2)


def eager(x: Tensor, weight: Tensor | None, casting: str, *rotation: Any, interleaved: bool) -> Tensor:
    """Every step rounded to x's dtype, but for torch's own rms_norm."""
    D = x.shape[-1]
    if casting == "torch":
        y = x if weight is None else x.to(torch.promote_types(x.dtype, weight.dtype))
        y = torch.nn.functional.rms_norm(y, (D,), weight, EPS).to(x.dtype)
    else:
        wide = torch.promote_types(x.dtype, f32)
        y = x.to(wide)
        y = y * (y.square().mean(-1, keepdim=True) + EPS).rsqrt()
        if casting == "llama":
            y = y.to(x.dtype) if weight is None else weight.to(x.dtype) * y.to(x.dtype)
        elif weight is not None:
            y = y * (1 + weight.to(wide))
        y = y.to(x.dtype)
    cos, *_ = rotation
    return y if cos is None else reference.rope(y, *rotation, interleaved=interleaved)


def check(
    q: Tensor,
    k: Tensor,
    weights: list[Tensor | None],
    rotation: tuple[Any, ...],
    casting: str = "torch",
    interleaved: bool = False,
) -> None:
    """q, k and every gradient."""
    cos, sin, positions, offset = rotation
    inputs = [leaf(q), leaf(k), *(None if w is None else leaf(w) for w in weights)]
    leaves = [t for t in inputs if t is not None]
    got = flashproto.qk_norm(
        *inputs,
        cos,
        sin,
        positions=positions,
        offset=offset,
        interleaved=interleaved,
        eps=EPS,
        casting=casting,
        impl="triton",
    )
    grads = [torch.randn_like(t) for t in got]
    got = [*got, *torch.autograd.grad(got, leaves, grads)]

    once = [
        eager(x, w, casting, *rotation, interleaved=interleaved)
        for x, w in zip(inputs[:2], inputs[2:], strict=True)
    ]
    once += torch.autograd.grad(once, leaves, grads)

    exact = [None if t is None else leaf(t.double()) for t in inputs]
    wanted = [
        reference.qk_norm(x, w, *rotation, EPS, interleaved=interleaved, casting=casting)
        for x, w in zip(exact[:2], exact[2:], strict=True)
    ]
    exact_leaves = [t for t in exact if t is not None]
    wanted += torch.autograd.grad(wanted, exact_leaves, [g.double() for g in grads])

    for i, (a, b, c) in enumerate(zip(got, once, wanted, strict=True)):
        c = c.detach()
        # dx is a difference of terms of the size of dy * weight * rstd, dweight a sum that cancels.
        x = inputs[i % 2].detach().double()
        rstd = (x.square().mean(-1, keepdim=True) + EPS).rsqrt()
        dy = grads[i % 2].double().abs()
        terms = (dy * x.abs() * rstd).sum() if i >= 4 else 4 * (dy.amax() + 1) * rstd.amax()
        if casting == "llama" and i >= 4:
            # Half a unit of x's dtype in every xhat, which the definition rounds; float64 does not.
            terms *= 1 + torch.finfo(q.dtype).eps / 2 / (4 * torch.finfo(f32).eps)
        assert_no_worse(f"result {i}", a, b, c, terms.item() if c.numel() else 0.0)


@pytest.mark.parametrize("casting", CASTINGS)
@pytest.mark.parametrize("dtype", [f16, bf16, f32])
@pytest.mark.parametrize(
    ("D", "half", "interleaved"),
    [(16, 8, False), (64, 16, True), (80, 40, False), (24, 9, True), (9, 0, False), (2, 1, True)],
)
def test_against_float64(device, monkeypatch, D, half, interleaved, dtype, casting) -> None:
    poison(monkeypatch)
    monkeypatch.setattr(ops, "multiprocessors", lambda device: 2)  # more than one partial sum
    q, k = (tokens_first(2, n, 7, D, dtype, device) for n in (5, 2))
    weights = [(torch.randn(D, device=device) + (casting != "gemma")).to(t) for t in (f32, dtype)]
    check(q, k, weights, (*tables(7, half, device), None, 0), casting, interleaved)


@pytest.mark.parametrize("casting", CASTINGS)
def test_without_weights(device, monkeypatch, casting) -> None:
    poison(monkeypatch)
    q, k = (tokens_first(2, n, 5, 16, f32, device) for n in (3, 1))
    weight = torch.randn(16, device=device)
    rotation = (*tables(5, 6, device), None, 0)
    check(q, k, [None, None], rotation, casting)
    check(q, k, [weight, None], rotation, casting)
    check(q, k, [None, weight], rotation, casting)


def test_any_strides_positions_and_offsets(device) -> None:
    weights = [torch.randn(8, device=device).repeat_interleave(2)[::2] for _ in range(2)]
    cos, sin = tables(20, 3, device)
    k = torch.randn(3, 4, 2, 8, device=device).transpose(1, 2)
    for q in (
        torch.randn(3, 5, 4, 8, device=device),
        torch.randn(3, 5, 8, 4, device=device).mT,
        torch.randn(3, 1, 4, 8, device=device).expand(-1, 5, -1, -1),
    ):
        for positions, offset in (
            (None, 16),
            (None, torch.tensor([0, 5, 16], device=device)),
            (torch.randint(18, (4,), device=device), 2),
            (torch.randint(20, (3, 4), device=device, dtype=torch.int32), 0),
        ):
            check(q, k, weights, (cos, sin, positions, offset))


def test_is_rms_norm_then_rope(device) -> None:
    q, k = (torch.randn(2, n, 5, 16, device=device) for n in (3, 1))
    weights = [torch.randn(16, device=device) for _ in range(2)]
    cos, sin = tables(5, 8, device)
    normed = [flashproto.rms_norm(t, 16, w) for t, w in zip((q, k), weights, strict=True)]
    wanted = flashproto.rope(*normed, cos, sin)
    for impl in ("triton", "torch", "reference"):
        got = flashproto.qk_norm(q, k, *weights, cos, sin, impl=impl)
        torch.testing.assert_close(got, wanted)
        torch.testing.assert_close(flashproto.qk_norm(q, k, *weights, impl=impl), tuple(normed))
        alone = flashproto.qk_norm(q, None, weights[0], impl=impl)
        torch.testing.assert_close(alone, normed[0])


def test_gradients_of_q_alone(device) -> None:
    out = []
    q, weight = torch.randn(2, 3, 4, 8, device=device), torch.randn(8, device=device)
    for impl in ("triton", "reference"):
        leaves = leaf(q), leaf(weight)
        y = flashproto.qk_norm(leaves[0], None, leaves[1], *[None] * 3, impl=impl)
        out.append(torch.autograd.grad((y**3).sum(), leaves))
        y = flashproto.qk_norm(leaves[0], None, weight, impl=impl)
        out[-1] += torch.autograd.grad((y**3).sum(), leaves[0])
        y = flashproto.qk_norm(q, q, weight, leaves[1], impl=impl)[1]
        out[-1] += torch.autograd.grad((y**3).sum(), leaves[1])
    torch.testing.assert_close(*out, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("half", [0, 4])
@pytest.mark.parametrize("dtype", [bf16, f32])
def test_qkv_is_splitting_and_qk_norm(device, monkeypatch, dtype, half) -> None:
    poison(monkeypatch)
    base = torch.randn(2, 5, 8 * 10 + 4, device=device).to(dtype)
    weights = [torch.randn(10, device=device) for _ in range(2)]
    out = []
    for impl in ("triton", "reference"):
        qkv, *w = leaf(base[..., :80]), *map(leaf, weights)
        y = flashproto.qk_norm_qkv(qkv, 4, 2, *w, *tables(5, half, device), eps=EPS, impl=impl)
        dy = [torch.linspace(-1, 1, t.numel(), device=device).view_as(t).to(dtype) for t in y]
        out.append((*y, *torch.autograd.grad(y, (qkv, *w), dy)))
    torch.testing.assert_close(*out, rtol=2e-2 if dtype == bf16 else 1e-4, atol=1e-5)
    assert torch.equal(out[0][2], out[1][2])


def test_backward_keeps_the_inputs_alone(device) -> None:
    kept: list[Tensor] = []
    qkv, w = torch.randn(2, 5, 40, device=device, requires_grad=True), torch.randn(8, device=device)
    cos, sin = tables(5, 4, device)
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t) or t, lambda t: t):
        flashproto.qk_norm_qkv(qkv, 3, 1, w, w, cos, sin, impl="triton")
    assert {t.data_ptr() for t in kept} == {t.data_ptr() for t in (qkv, w, cos, sin)}


def test_repeats_bitwise_and_tokens_do_not_depend_on_each_other(device, monkeypatch) -> None:
    monkeypatch.setattr(ops, "multiprocessors", lambda device: 3)
    q, k = (torch.randn(3, n, 7, 16, device=device, dtype=bf16) for n in (4, 2))
    w = torch.randn(16, device=device)

    def run(b: slice) -> list[Tensor]:
        leaves = [leaf(t) for t in (q[b], k[b], w, w)]
        y = flashproto.qk_norm(*leaves, *tables(7, 8, device), impl="triton")
        return [*y, *torch.autograd.grad(y, leaves, y)]

    whole = run(slice(None))
    for _ in range(1 if device == "cpu" else 100):
        assert all(map(torch.equal, whole, run(slice(None))))
    assert all(torch.equal(a[1:2], b) for a, b in zip(whole[:4], run(slice(1, 2))[:4], strict=True))


def test_rows_of_zeros_and_large_values(device) -> None:
    q = torch.zeros(1, 1, 3, 8, device=device)
    q[0, 0, 1], q[0, 0, 2] = 1e12, 1e-12
    q.requires_grad_()
    y = flashproto.qk_norm(q, None, eps=1e-30, impl="triton")
    assert not y[0, 0, 0].any()
    torch.testing.assert_close(y[0, 0, 1:], torch.ones_like(y[0, 0, 1:]))
    assert torch.autograd.grad(y.sum(), q)[0][0, 0, :2].isfinite().all()


@pytest.mark.parametrize("shape", [(0, 2, 3, 8), (2, 0, 3, 8), (2, 2, 0, 8)])
def test_no_elements(device, shape) -> None:
    q, w = torch.randn(shape, device=device, requires_grad=True), torch.ones(8, device=device)
    w.requires_grad_()
    y, _ = flashproto.qk_norm(q, q, w, w, *tables(4, 4, device), impl="triton")
    dq, dw = torch.autograd.grad(y.sum(), (q, w))
    assert dq.shape == shape
    assert not dw.any()


Q = torch.zeros(2, 4, 3, 16)
REFUSED = {
    "weight": (lambda: flashproto.qk_norm(Q, Q, Q[0, 0, 0, :3]), "q_weight is of shape"),
    "k_weight": (lambda: flashproto.qk_norm(Q, Q, None, Q[0, 0, 0].int()), "k_weight is of dtype"),
    "elsewhere": (
        lambda: flashproto.qk_norm(Q, Q, torch.zeros(16, device="meta")),
        "q_weight is on meta",
    ),
    "casting": (lambda: flashproto.qk_norm(Q, Q, casting="t5"), "casting is 't5'"),
    "half a table": (lambda: flashproto.qk_norm(Q, Q, cos=Q[0, 0, :, :8]), "sin is None"),
    "positions": (
        lambda: flashproto.qk_norm(Q, Q, positions=torch.zeros(3).long()),
        "positions is given",
    ),
    "packed": (lambda: flashproto.qk_norm_qkv(Q[0], 3, 1), "qkv is 16 wide"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_bad_input_is_refused(case) -> None:
    call, text = REFUSED[case]
    with pytest.raises((TypeError, ValueError), match=text) as caught:
        call()
    assert "; it takes " in str(caught.value)


def test_opcheck(device) -> None:
    q, k = (torch.randn(2, 4, n, 8, device=device).transpose(1, 2) for n in (3, 1))
    w, qkv = torch.randn(8, device=device), torch.randn(2, 4, 40, device=device)
    tensors = (*tables(9, 3, device), torch.tensor([[3], [1]], device=device))
    how, plain, rest = (0, True, False, EPS, "torch"), (None,) * 5, (0, False, False, EPS, "llama")
    library, no = torch.ops.flashproto, [False] * 3
    torch.library.opcheck(library.qk_norm.default, (leaf(q), leaf(k), leaf(w), w, *tensors, *how))
    torch.library.opcheck(library.qk_norm.default, (leaf(q), None, *plain, *rest))
    saved = q, k, w, w, *tensors
    torch.library.opcheck(library.qk_norm_backward.default, (q, k, *saved, *how, [True] * 4 + no))
    needs = [True, False, False, False, *no]
    torch.library.opcheck(library.qk_norm_backward.default, (q, None, q, None, *plain, *rest, needs))
    packed = (leaf(w), w, *tensors, 3, 1, *how)
    torch.library.opcheck(library.qk_norm_packed.default, (leaf(qkv), *packed))
    gradients = (q, k, k.clone(), qkv, w, w, *tensors, 3, 1, *how, [True, True, False, *no])
    torch.library.opcheck(library.qk_norm_packed_backward.default, gradients)


def test_compiles_in_one_graph(device) -> None:
    torch.compiler.reset()
    qkv, w = (torch.randn(s, device=device, requires_grad=True) for s in ((2, 5, 40), (8,)))
    cos, sin = tables(9, 3, device)

    def f(qkv: Tensor, w: Tensor) -> list[Tensor]:
        q, k, v = flashproto.qk_norm_qkv(qkv, 3, 1, w, w, cos, sin, impl="triton")
        q, k = flashproto.qk_norm(q, k, w, casting="gemma", impl="triton")
        return [q, k, v]

    backend = "inductor" if device == "cuda" else "aot_eager"
    out = []
    for call in (torch.compile(f, fullgraph=True, backend=backend), f):
        y = call(qkv, w)
        out.append([*y, *torch.autograd.grad(sum((t**2).sum() for t in y), (qkv, w))])
    torch.testing.assert_close(*out)
