"""Attention on the Triton backend against float64, eager PyTorch and SDPA."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from attention_problem import (
    ATOL,
    Problem,
    assert_within_bound,
    draw,
    error,
    exact_and_eager,
    lay_out,
    make,
    results,
)
from rows import poison
from torch.nn.attention import SDPBackend, sdpa_kernel

import flashproto
from flashproto import configs

ON_GPU = torch.cuda.is_available()
CASES, LONGEST, MOST_HEADS = (240, 4096, 8) if ON_GPU else (48, 96, 3)
PLAIN = Problem(torch.float32, 1, 2, 2, 33, 33, 16, 16, causal=False)


def triton_attention(problem: Problem, inputs):
    return flashproto.attention(
        *inputs, causal=problem.causal, scale=problem.scale, return_lse=True, impl="triton"
    )


def check(problem: Problem, device: str) -> None:
    inputs, gradients = make(problem, device)
    exact, plain = exact_and_eager(problem, inputs, gradients)
    got = results(triton_attention(problem, inputs), inputs, gradients)
    assert got["out"].dtype == problem.dtype and got["lse"].dtype == torch.float32
    assert_within_bound(got, exact, plain, problem.dtype)


@pytest.mark.parametrize("index", range(CASES))
def test_random_problems_against_float64(index: int, device: str, seed: int, monkeypatch) -> None:
    poison(monkeypatch)
    problem = draw(random.Random(seed), LONGEST, MOST_HEADS)
    print(problem)
    check(problem, device)


@pytest.mark.parametrize("dtype", list(ATOL))
@pytest.mark.parametrize("Sq, Sk", [(1, 1), (1, 50), (50, 1), (37, 64), (64, 37), (17, 17)])
def test_causal_is_aligned_bottom_right(Sq: int, Sk: int, dtype, device: str) -> None:
    check(replace(PLAIN, dtype=dtype, Sq=Sq, Sk=Sk, causal=True), device)


def test_rows_without_a_key_give_zero(device: str) -> None:
    problem = replace(PLAIN, Sq=40, Sk=10, causal=True)
    inputs, gradients = make(problem, device)
    got = results(triton_attention(problem, inputs), inputs, gradients)
    assert (got["out"][:, :, :30] == 0).all() and (got["lse"][:, :, :30] == -torch.inf).all()
    assert (got["dq"][:, :, :30] == 0).all()
    assert all(got[name].isfinite().all() for name in ("out", "dq", "dk", "dv"))


@pytest.mark.parametrize("B, H, Sq, Sk", [(0, 2, 5, 5), (1, 2, 0, 5), (1, 2, 5, 0), (1, 0, 5, 5)])
def test_empty_tensors(B: int, H: int, Sq: int, Sk: int, device: str) -> None:
    q = torch.randn(B, H, Sq, 16, device=device, requires_grad=True)
    k = torch.randn(B, H, Sk, 16, device=device, requires_grad=True)
    out, lse = flashproto.attention(q, k, k, return_lse=True, impl="triton")
    assert out.shape == q.shape and lse.shape == q.shape[:3]
    if not Sk:
        assert (out == 0).all() and (lse == -torch.inf).all()
    out.sum().backward()
    assert (q.grad == 0).all() and (k.grad == 0).all()


@pytest.mark.parametrize("where", ["q", "k", "v"])
def test_nan_stays_nan(where: str, device: str) -> None:
    tensors = {name: torch.randn(1, 1, 20, 16, device=device) for name in "qkv"}
    tensors[where][0, 0, 7, 3] = torch.nan
    out = flashproto.attention(*tensors.values(), impl="triton")
    expected = flashproto.attention(*tensors.values(), impl="reference")
    assert torch.equal(out.isnan(), expected.isnan()) and out.isnan().any()


def test_large_scores_do_not_overflow(device: str) -> None:
    q = torch.full((1, 1, 4, 16), 1e4, device=device)
    k = torch.randn(1, 1, 30, 16, device=device)
    out = flashproto.attention(q, k, k, impl="triton")
    expected = flashproto.attention(q.double(), k.double(), k.double(), impl="reference")
    assert error(out, expected) < 1e-2  # scores of 1e5, of which float32 keeps 1e-2


def test_output_keeps_the_memory_order_of_the_query(device: str) -> None:
    q = lay_out(torch.randn(2, 3, 5, 16, device=device), "tokens first").requires_grad_()
    out = flashproto.attention(q, q, q, impl="triton")
    assert out.transpose(1, 2).is_contiguous()
    (gradient,) = torch.autograd.grad(out.sum(), q)
    assert gradient.shape == q.shape


def test_gradients_only_where_wanted(device: str) -> None:
    q, k, v = (torch.randn(1, 1, 20, 16, device=device) for _ in range(3))
    expected = torch.autograd.grad(
        flashproto.attention(q.requires_grad_(), k.requires_grad_(), v, impl="triton").sum(), [q, k]
    )
    for x, dx in zip((q, k), expected, strict=True):
        alone = [t.detach().requires_grad_(t is x) for t in (q, k, v)]
        flashproto.attention(*alone, impl="triton").sum().backward()
        (got,) = (t.grad for t in alone if t.grad is not None)
        assert torch.equal(got, dx)


def test_same_bits_every_time(device: str) -> None:
    problem = replace(PLAIN, dtype=torch.float16, Hq=4, Sq=70, Sk=90, causal=True)
    inputs, gradients = make(problem, device)
    first = results(triton_attention(problem, inputs), inputs, gradients)
    for _ in range(20 if ON_GPU else 2):
        again = results(triton_attention(problem, inputs), inputs, gradients)
        assert all(torch.equal(first[name], again[name]) for name in first)


# --- against torch's own operator ----------------------------------------------------------------

BACKENDS = (
    SDPBackend.MATH,
    SDPBackend.FLASH_ATTENTION,
    SDPBackend.EFFICIENT_ATTENTION,
    SDPBackend.CUDNN_ATTENTION,
)
SDPA_SHAPES = [(2, 4, 257, 257, 64), (1, 2, 1024, 1024, 128), (1, 2, 300, 300, 256)]
SDPA_SHAPES = SDPA_SHAPES if ON_GPU else [(1, 2, 40, 40, 32)]


@pytest.mark.parametrize("backend", BACKENDS, ids=lambda b: b.name.lower())
@pytest.mark.parametrize("dtype", list(ATOL))
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("shape", SDPA_SHAPES)
def test_agrees_with_sdpa(backend, dtype, causal: bool, shape, device: str) -> None:
    B, H, Sq, Sk, D = shape
    problem = Problem(dtype, B, H, H, Sq, Sk, D, D, causal, lse_gradient=False)
    inputs, gradients = make(problem, device)
    dout = gradients[0]
    try:
        with sdpa_kernel(backend):
            out = F.scaled_dot_product_attention(*inputs, is_causal=causal)
            theirs = [out, *torch.autograd.grad(out, inputs, dout)]
    except RuntimeError as refusal:
        pytest.skip(f"torch's {backend.name} does not accept this case: {refusal}")
    exact, plain = exact_and_eager(problem, inputs, gradients)
    out = flashproto.scaled_dot_product_attention(*inputs, is_causal=causal)
    ours = [out, *torch.autograd.grad(out, inputs, dout)]
    for name, a, b in zip(("out", "dq", "dk", "dv"), ours, theirs, strict=True):
        assert error(a, exact[name]) <= 2 * error(plain[name], exact[name]) + ATOL[dtype], name
        apart = 2 * error(plain[name], exact[name]) + error(b, exact[name]) + ATOL[dtype]
        assert error(a, b) <= apart, name


# --- sizes, streams and graphs of a real GPU -----------------------------------------------------


@pytest.mark.gpu
def test_more_than_2_31_elements() -> None:
    B, H, S, D = 1, 2**15 + 1, 1024, 64  # 2^31 + 2^16 elements
    q, k, v = (
        torch.randn(B, H, S, D, device="cuda", dtype=torch.bfloat16).requires_grad_() for _ in range(3)
    )
    out = flashproto.attention(q, k, v, causal=True, impl="triton")
    dout = torch.randn_like(out)
    dq, dk, dv = torch.autograd.grad(out, [q, k, v], dout)
    last = [t[:, -1:].detach().requires_grad_() for t in (q, k, v)]
    problem = Problem(torch.bfloat16, B, 1, 1, S, S, D, D, causal=True, lse_gradient=False)
    zero = torch.zeros(B, 1, S, device="cuda")
    exact, plain = exact_and_eager(problem, last, [dout[:, -1:], zero])
    got = {"out": out[:, -1:], "dq": dq[:, -1:], "dk": dk[:, -1:], "dv": dv[:, -1:]}
    assert_within_bound(got, exact, plain, torch.bfloat16)


@pytest.mark.gpu
def test_one_head_spanning_more_than_2_31_elements() -> None:
    stride = 2**25 + 16
    memory = torch.randn(65 * stride, device="cuda", dtype=torch.bfloat16)
    x = memory.as_strided((1, 1, 65, 64), (0, 0, stride, 1))
    problem = Problem(torch.bfloat16, 1, 1, 1, 65, 65, 64, 64, causal=True)
    inputs = [x.detach().requires_grad_() for _ in range(3)]
    gradients = make(problem, "cuda")[1]
    exact, plain = exact_and_eager(problem, [t.detach().clone() for t in inputs], gradients)
    got = results(triton_attention(problem, inputs), inputs, gradients)
    assert_within_bound(got, exact, plain, problem.dtype)


@pytest.mark.gpu
def test_more_heads_than_the_grid_is_high() -> None:
    check(replace(PLAIN, dtype=torch.bfloat16, B=70000, Hq=1, Hkv=1, Sq=5, Sk=7), "cuda")


@pytest.mark.gpu
def test_runs_on_the_current_stream() -> None:
    problem = replace(PLAIN, dtype=torch.bfloat16, Sq=2048, Sk=2048, D=64, Dv=64)
    inputs, gradients = make(problem, "cuda")
    expected = results(triton_attention(problem, inputs), inputs, gradients)
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        torch.cuda._sleep(50_000_000)
        late = [(t.detach() + 0).requires_grad_() for t in inputs]
        got = results(triton_attention(problem, late), late, gradients)
    stream.synchronize()
    assert all(torch.equal(got[name], expected[name]) for name in got)


@pytest.mark.gpu
def test_cuda_graph() -> None:
    q, k, v = (torch.randn(2, 4, 200, 64, device="cuda", dtype=torch.bfloat16) for _ in range(3))
    inputs = [t.requires_grad_() for t in (q, k, v)]

    def step():
        out = flashproto.attention(*inputs, causal=True, impl="triton")
        return out, *torch.autograd.grad(out, inputs, torch.ones_like(out))

    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        step()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = step()
    with torch.no_grad():
        for t in inputs:
            t.copy_(torch.randn_like(t))
    graph.replay()
    for got, expected in zip(captured, step(), strict=True):
        assert torch.equal(got, expected)


# --- configurations ------------------------------------------------------------------------------


@pytest.mark.parametrize("capability", [(8, 0), (8, 6), (8, 9), (9, 0), (10, 0), (12, 0), (13, 0)])
@pytest.mark.parametrize("itemsize", [2, 4])
@pytest.mark.parametrize("D, Dv", [(1, 1), (16, 256), (64, 64), (96, 128), (256, 256)])
def test_configurations_fit(capability, itemsize: int, D: int, Dv: int) -> None:
    budget = configs.shared_bytes(capability)
    forward = configs.attention_forward(capability, itemsize, D, Dv)
    keys, queries = configs.attention_backward(capability, itemsize, D, Dv, causal=True)
    for config in (forward, keys, queries):
        assert min(config.block_m, config.block_n) >= 16
        assert config.num_stages >= 1 and config.num_warps in (4, 8)
    width = configs.padded_head_dim(D) + configs.padded_head_dim(Dv)
    tiles = keys.block_n * width + keys.num_stages * keys.block_m * width
    assert keys.num_stages == 1 or tiles * itemsize <= budget
