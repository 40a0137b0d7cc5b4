"""Biases of attention: how they lie in memory, their gradients, and rows that they hide."""

from __future__ import annotations

import itertools
import math

import pytest
import torch
from operators import launches, sizes_made
from rows import poison
from torch import Tensor

import flashproto
from flashproto import masks
from flashproto.ops import call_cache

IMPLS = ("triton", "reference")
B, H, SQ, SK = 2, 2, 40, 45


def heads(device: str) -> list[Tensor]:
    shapes = ((H, SQ), (1, SK), (1, SK))
    return [torch.randn(B, h, n, 16, device=device, requires_grad=True) for h, n in shapes]


def dense(inputs: list[Tensor], bias: Tensor, causal: bool) -> Tensor:
    """By definition, in float64."""
    q, k, v = (x.double() for x in inputs)
    k, v = (x.repeat_interleave(H // k.shape[1], 1) for x in (k, v))
    s = q @ k.mT * 16**-0.5 + bias
    seen = torch.ones(SQ, SK, dtype=torch.bool, device=q.device).tril(SK - SQ if causal else SK)
    return torch.softmax(s.masked_fill(~seen, -math.inf), -1) @ v


SHAPES = [
    tuple(n if own else 1 for n, own in zip((B, H, SQ, SK), dims, strict=True))
    for dims in itertools.product((False, True), repeat=4)
]


@pytest.mark.few(6)
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_gradients_have_the_shape_of_the_bias(
    shape: tuple[int, ...], causal: bool, device: str
) -> None:
    inputs, bias = heads(device), torch.randn(shape, device=device, requires_grad=True)
    leaves = [*inputs, bias]
    out = flashproto.attention(*inputs, bias=bias, causal=causal, impl="triton")
    wanted = dense(inputs, bias.double(), causal)
    torch.testing.assert_close(out.double(), wanted, rtol=1e-4, atol=1e-5)
    dout = torch.randn_like(out)
    got = torch.autograd.grad(out, leaves, dout)
    exact = torch.autograd.grad(wanted, leaves, dout.double())
    assert got[3].shape == shape
    for a, b in zip(got, exact, strict=True):
        torch.testing.assert_close(a, b.to(a.dtype), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("shape", [(1, H, SQ, SK), (B, 1, SQ, SK), (SQ, SK), (B, 1, 1, SK)], ids=str)
def test_nothing_of_the_size_of_the_scores_is_made(shape, device: str, monkeypatch) -> None:
    """Neither is the bias copied, where it is expanded, nor is there more for its gradient."""
    made = sizes_made(monkeypatch)
    call_cache.forget()
    inputs, bias = heads(device), torch.randn(shape, device=device, requires_grad=True)
    out = flashproto.attention(*inputs, bias=bias, impl="triton")
    torch.autograd.grad(out.square().sum(), [*inputs, bias])
    expanded = bias.detach().expand(B, H, SQ, SK)
    torch.testing.assert_close(flashproto.attention(*inputs, bias=expanded, impl="triton"), out)
    assert made and max(made) < B * H * SQ * SK


@pytest.mark.slow
@pytest.mark.parametrize("how", ["transposed", "every other", "expanded", "float16", "offset"])
def test_biases_of_any_strides(how: str, device: str) -> None:
    """As a contiguous one of the same numbers and dtype, to the bit."""
    bias = torch.randn(H, SQ, SK, device=device).half().float()
    view = {
        "transposed": lambda: bias.mT.contiguous().mT,
        "every other": lambda: torch.stack([bias, bias], -1).flatten(2)[..., ::2],
        "expanded": lambda: bias.expand(B, H, SQ, SK),
        "float16": bias.half,
        "offset": lambda: torch.cat([bias.new_zeros(3), bias.flatten()])[3:].view(H, SQ, SK),
    }[how]()
    inputs = heads(device)
    results = []
    for x in (view, bias):
        x = x.detach().requires_grad_()
        out = flashproto.attention(*inputs, bias=x, causal=True, impl="triton")
        results.append([out, *torch.autograd.grad(out.square().sum(), [*inputs, x])])
    *got, dview = results[0]
    *wanted, dbias = results[1]
    for name, x, y in zip(("out", "dq", "dk", "dv"), got, wanted, strict=True):
        # Of another dtype it is another kernel, in which other products and sums are fused.
        bits = {"rtol": 1e-5, "atol": 1e-5} if how == "float16" else {"rtol": 0, "atol": 0}
        torch.testing.assert_close(x, y, **bits, msg=lambda text, name=name: f"{name}: {text}")
    summed = dview.sum(0) if how == "expanded" else dview
    torch.testing.assert_close(summed.float(), dbias, rtol=2e-3, atol=1e-4)


@pytest.mark.parametrize("impl", IMPLS)
@pytest.mark.parametrize("lowest", [-math.inf, torch.finfo(torch.float32).min, -1e30, -1e10])
def test_rows_that_a_bias_hides(lowest: float, impl: str, device: str) -> None:
    """-inf: 0, lse -inf, no gradients.  A row far below 0 gives finite numbers at least, and nothing
    where its output has no gradient, as padding has none."""
    inputs, bias = heads(device), torch.zeros(B, 1, SQ, SK, device=device)
    bias[0, 0, :9] = lowest
    bias[1, 0, :, 30:] = lowest
    bias.requires_grad_()
    out, lse = flashproto.attention(*inputs, bias=bias, return_lse=True, impl=impl)
    if lowest == -math.inf:
        assert not out[0, :, :9].any() and (lse[0, :, :9] == -math.inf).all()
    part = [
        flashproto.attention(x[1:], k[1:, :, :30], v[1:, :, :30], impl=impl) for x, k, v in [inputs]
    ]
    torch.testing.assert_close(out[1:], part[0], rtol=1e-4, atol=1e-5)
    dout = torch.randn_like(out)
    dout[0, :, :9] = 0
    grads = torch.autograd.grad(out, [*inputs, bias], dout)
    assert all(x.isfinite().all() for x in grads)
    assert not grads[0][0, :, :9].any() and not grads[3][0, 0, :9].any()
    assert not grads[3][1, 0, :, 30:].any() and not grads[1][1, :, 30:].any()
    clean = [x.detach()[:1].requires_grad_() for x in inputs]
    rest = flashproto.attention(clean[0][:, :, 9:], *clean[1:], impl="reference")
    wanted = torch.autograd.grad(rest, clean, dout[:1, :, 9:])
    for a, b in zip(grads[:3], wanted, strict=True):
        torch.testing.assert_close(a[:1], b, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("impl", IMPLS)
def test_keys_hidden_by_a_bias_have_no_part_in_statistics(impl: str, device: str) -> None:
    q, k, v = heads(device)
    bias = torch.zeros(SK, device=device)
    bias[31:] = -math.inf
    options = {"return_lse": True, "return_aux": ("max_score", "entropy"), "impl": impl}
    got = flashproto.attention(q, k, v, bias=bias, **options)
    wanted = flashproto.attention(q, k[:, :, :31], v[:, :, :31], **options)
    for a, b in zip(got, wanted, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)


# --- by distance ----------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("dropout_p", [0.0, 0.25])
@pytest.mark.parametrize(
    "shape", [(1, 2, 300, 300), (2, 300, 300), (300, 300), (1, 1, 300), ()], ids=str
)
def test_gradients_beside_a_table_and_dropout(
    shape: tuple[int, ...], dropout_p: float, device: str, monkeypatch
) -> None:
    """Whole tiles are hidden; memory that is made is NaN at first."""
    poison(monkeypatch)
    seen = torch.rand(300, 300, device=device) < 0.8
    seen[:128, :128] = seen[128:256, 128:] = False
    q, k, v, dout = (torch.randn(1, 2, 300, 32, device=device, requires_grad=True) for _ in range(4))
    seed = torch.tensor([5], device=device)
    bias, found = torch.randn(shape, device=device, requires_grad=True), []
    for impl in ("triton", "reference"):
        out = flashproto.attention(
            q,
            k,
            v,
            bias=bias,
            mask=masks.boolean(seen),
            dropout_p=dropout_p,
            dropout_seed=seed,
            impl=impl,
        )
        found.append((out, *torch.autograd.grad(out, (q, k, v, bias), dout)))
    for got, want in zip(*found, strict=True):
        torch.testing.assert_close(got, want, rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("impl", IMPLS)
def test_columns_count_from_the_position_of_a_query(impl: str, device: str) -> None:
    """The last query stands at the last key; of a causal call column 0 is for the query's own key."""
    q = torch.zeros(1, 1, 2, 16, device=device)
    k = torch.zeros(1, 1, 4, 16, device=device)
    v = torch.eye(4, 16, device=device)[None, None]
    table = torch.tensor([[5.0, 0.0, -5.0]], device=device)
    for offset, columns in ((0, [[2, 1, 0, 0], [2, 2, 1, 0]]), (1, [[2, 2, 1, 0], [2, 2, 2, 1]])):
        options = {"relative_bias": table, "relative_offset": offset, "impl": impl}
        got = flashproto.attention(q, k, v, **options)[0, 0, :, :4]
        torch.testing.assert_close(got, torch.softmax(table[0][torch.tensor(columns)], -1))


@pytest.mark.slow
@pytest.mark.parametrize("R", [1, 6, 300])
@pytest.mark.parametrize("rows", [1, H])
def test_gradients_of_tables(rows: int, R: int, device: str) -> None:
    inputs, table = heads(device), torch.randn(rows, R, device=device, requires_grad=True)
    i, j = torch.arange(SQ, device=device)[:, None] + SK - SQ, torch.arange(SK, device=device)
    for offset, causal in ((0, True), (R // 2 - 2, False)):
        leaves, options = [*inputs, table], {"relative_bias": table, "relative_offset": offset}
        out = flashproto.attention(*inputs, causal=causal, impl="triton", **options)
        wanted = dense(inputs, table.double()[:, (i - j + offset).clamp(0, R - 1)], causal)
        dout = torch.randn_like(out)
        got = torch.autograd.grad(out, leaves, dout)
        exact = torch.autograd.grad(wanted, leaves, dout.double())
        for a, b in zip(got, exact, strict=True):
            torch.testing.assert_close(a, b.to(a.dtype), rtol=1e-4, atol=1e-4)


def test_a_table_needs_memory_of_the_rows_alone(device: str, monkeypatch) -> None:
    made = sizes_made(monkeypatch)
    q = torch.randn(1, 1, 200, 16, device=device, requires_grad=True)
    table = torch.randn(1, 40, device=device, requires_grad=True)
    out = flashproto.attention(q, q, q, relative_bias=table, causal=True, impl="triton")
    torch.autograd.grad(out.square().sum(), [q, table])
    assert made and max(made) <= 200 * 16  # q's own gradient


def test_another_bias_compiles_nothing(device: str) -> None:
    """Nor another table, of more columns: Triton compiles anew for an integer that is 1, and where one
    is a multiple of 16 and was none."""
    q = torch.randn(1, 2, 33, 16, device=device, requires_grad=True)
    seen = set()
    for n in (1, 15, 32):
        table = torch.randn(2, n, device=device, requires_grad=True)
        bias = torch.randn(2, 33, 33, device=device)
        options = {"relative_bias": table, "relative_offset": n // 2, "bias": bias, "impl": "triton"}
        with launches() as launched:
            flashproto.attention(q, q, q, **options).sum().backward()
        for launch in launched:
            if launch.kernel != "attention_backward_relative_kernel":  # has R, which is not specialised
                given = launch.arguments.get("given", ())
                seen.add(
                    (
                        launch.kernel,
                        tuple("1" if x == 1 else x % 16 == 0 for x in given if type(x) is int),
                    )
                )
    assert len({kernel for kernel, _ in seen}) == len(seen) > 2
