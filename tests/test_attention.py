"""Attention on the kernel backends against float64, eager PyTorch and SDPA."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from attention_problem import (
    ATOL,
    Problem,
    accepted,
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
from flashproto import backends, configs
from flashproto.variant import Kind

ON_GPU = torch.cuda.is_available()
CASES, LONGEST, MOST_HEADS = (300, 4096, 8) if ON_GPU else (48, 96, 3)
PLAIN = Problem(torch.float32, 1, 2, 2, 33, 33, 16, 16, causal=False)


@pytest.fixture(params=["triton", pytest.param("hopper", marks=pytest.mark.gpu)])
def impl(request: pytest.FixtureRequest, device: str) -> str:
    """A backend with kernels of its own."""
    against = backends.device_reasons(request.param, torch.device(device))
    if against:
        pytest.skip("; ".join(against))
    return request.param


@pytest.fixture
def half(impl: str) -> torch.dtype:
    """A dtype for tests of shapes and values: float32 where the backend takes it."""
    return torch.bfloat16 if impl == "hopper" else torch.float32


def run(problem: Problem, inputs, impl: str):
    return flashproto.attention(
        *inputs, causal=problem.causal, scale=problem.scale, return_lse=True, impl=impl
    )


def check(problem: Problem, device: str, impl: str) -> None:
    problem = accepted(problem, impl)
    print(problem)
    inputs, gradients = make(problem, device)
    exact, plain = exact_and_eager(problem, inputs, gradients)
    got = results(run(problem, inputs, impl), inputs, gradients)
    assert got["out"].dtype == problem.dtype and got["lse"].dtype == torch.float32
    assert_within_bound(got, exact, plain, problem.dtype)


def assert_same(got: dict, expected: dict, impl: str) -> None:
    """Equal bits, but for Hopper's dq, which is summed in no fixed order."""
    for name, value in got.items():
        if impl == "hopper" and name == "dq":
            torch.testing.assert_close(value, expected[name], rtol=2.0**-7, atol=1e-4)
        else:
            assert torch.equal(value, expected[name]), name


@pytest.mark.parametrize("index", range(CASES))
def test_random_problems_against_float64(
    index: int, impl: str, device: str, seed: int, monkeypatch
) -> None:
    poison(monkeypatch)
    check(draw(random.Random(seed), LONGEST, MOST_HEADS), device, impl)


@pytest.mark.parametrize("dtype", list(ATOL))
@pytest.mark.parametrize("Sq, Sk", [(1, 1), (1, 50), (50, 1), (37, 64), (64, 37), (17, 17)])
def test_causal_is_aligned_bottom_right(Sq: int, Sk: int, dtype, impl: str, device: str) -> None:
    check(replace(PLAIN, dtype=dtype, Sq=Sq, Sk=Sk, causal=True), device, impl)


def test_rows_without_a_key_give_zero(impl: str, device: str) -> None:
    problem = accepted(replace(PLAIN, Sq=40, Sk=10, causal=True), impl)
    inputs, gradients = make(problem, device)
    got = results(run(problem, inputs, impl), inputs, gradients)
    assert (got["out"][:, :, :30] == 0).all() and (got["lse"][:, :, :30] == -torch.inf).all()
    assert (got["dq"][:, :, :30] == 0).all()
    assert all(got[name].isfinite().all() for name in ("out", "dq", "dk", "dv"))


@pytest.mark.gpu
@pytest.mark.parametrize("D, Dv", [(16, 256), (64, 64), (72, 160), (128, 128), (192, 192), (256, 16)])
def test_float32_scores_of_one_key_have_no_gradient(D: int, Dv: int, device: str) -> None:
    """A softmax over one key is constant, so that dq and dk are 0, exactly as in eager PyTorch."""
    problem = replace(PLAIN, B=2, Hq=4, Sq=700, Sk=1, D=D, Dv=Dv, lse_gradient=False)
    inputs, gradients = make(problem, device)
    got = results(run(problem, inputs, "triton"), inputs, gradients)
    assert not got["dq"].any() and not got["dk"].any()


def test_float32_sums_over_queries_and_heads_keep_their_digits(device: str) -> None:
    """dv of one key, which has all the probability, is the sum of dout, to the last place."""
    problem = replace(PLAIN, Hq=4, Hkv=1, Sq=700, Sk=1, scale=0.0)
    inputs, _ = make(problem, device)
    out, _ = run(problem, inputs, "triton")
    dout = torch.rand_like(out)
    (dv,) = torch.autograd.grad(out, inputs[2], dout)
    exact = dout.double().sum((1, 2), keepdim=True)
    assert error(dv, exact) <= torch.finfo(torch.float32).eps * exact.max().item()


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
def test_nan_stays_nan(where: str, impl: str, half: torch.dtype, device: str) -> None:
    tensors = {name: torch.randn(1, 1, 20, 16, device=device, dtype=half) for name in "qkv"}
    tensors[where][0, 0, 7, 3] = torch.nan
    out = flashproto.attention(*tensors.values(), impl=impl)
    expected = flashproto.attention(*tensors.values(), impl="reference")
    assert torch.equal(out.isnan(), expected.isnan()) and out.isnan().any()


def test_large_scores_do_not_overflow(device: str) -> None:
    q = torch.full((1, 1, 4, 16), 1e4, device=device)
    k = torch.randn(1, 1, 30, 16, device=device)
    out = flashproto.attention(q, k, k, impl="triton")
    expected = flashproto.attention(q.double(), k.double(), k.double(), impl="reference")
    assert error(out, expected) < 1e-2  # scores of 1e5, of which float32 keeps 1e-2


def test_output_keeps_the_memory_order_of_the_query(impl: str, half: torch.dtype, device: str) -> None:
    q = lay_out(torch.randn(2, 3, 5, 16, device=device, dtype=half), "tokens first").requires_grad_()
    out = flashproto.attention(q, q, q, impl=impl)
    assert out.transpose(1, 2).is_contiguous()
    (gradient,) = torch.autograd.grad(out.sum(), q)
    assert gradient.shape == q.shape


def test_gradients_only_where_wanted(impl: str, half: torch.dtype, device: str) -> None:
    q, k, v = (torch.randn(1, 1, 20, 16, device=device, dtype=half) for _ in range(3))
    expected = torch.autograd.grad(
        flashproto.attention(q.requires_grad_(), k.requires_grad_(), v, impl=impl).sum(), [q, k]
    )
    for x, dx, name in zip((q, k), expected, ("dq", "dk"), strict=True):
        alone = [t.detach().requires_grad_(t is x) for t in (q, k, v)]
        flashproto.attention(*alone, impl=impl).sum().backward()
        (got,) = (t.grad for t in alone if t.grad is not None)
        assert_same({name: got}, {name: dx}, impl)


@pytest.mark.parametrize("D", [64, 128, 256] if ON_GPU else [16])
@pytest.mark.parametrize("causal", [False, True])
def test_same_bits_every_time(causal: bool, D: int, impl: str, device: str) -> None:
    problem = replace(PLAIN, dtype=torch.float16, Hq=4, Sq=70, Sk=90, D=D, Dv=D, causal=causal)
    if ON_GPU:
        problem = replace(problem, Hq=16, Hkv=4, Sq=1000, Sk=1100)
    inputs, gradients = make(problem, device)
    first = results(run(problem, inputs, impl), inputs, gradients)
    for _ in range(100 if ON_GPU else 2):
        again = results(run(problem, inputs, impl), inputs, gradients)
        assert_same(again, first, impl)


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
def test_agrees_with_sdpa(backend, dtype, causal: bool, shape, impl, device, monkeypatch) -> None:
    if impl == "hopper" and dtype == torch.float32:
        pytest.skip("the Hopper kernels take float16 and bfloat16")
    monkeypatch.setattr(backends, "_default", impl)
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


@pytest.mark.parametrize("sizes", [(0, 5), (5, 0), (0, 0)], ids=str)
@pytest.mark.parametrize("queries", [1, None], ids=["one row", "expanded"])
def test_masks_of_keys_of_no_query_or_no_key(sizes: tuple[int, int], queries, device: str) -> None:
    Sq, Sk = sizes
    q, k = (torch.randn(2, 3, n, 8, device=device) for n in sizes)
    mask = torch.ones(2, 1, 1, Sk, dtype=torch.bool, device=device).expand(-1, -1, queries or Sq, -1)
    out = flashproto.scaled_dot_product_attention(q, k, k, mask)
    assert out.shape == q.shape and (out == 0).all()


# --- sizes, streams and graphs of a real GPU -----------------------------------------------------


@pytest.mark.gpu
@pytest.mark.gib(70)
def test_more_than_2_31_elements(impl: str) -> None:
    B, H, S, D = 1, 2**15 + 1, 1024, 64  # 2^31 + 2^16 elements
    q, k, v = (
        torch.randn(B, H, S, D, device="cuda", dtype=torch.bfloat16).requires_grad_() for _ in range(3)
    )
    out = flashproto.attention(q, k, v, causal=True, impl=impl)
    dout = torch.randn_like(out)
    dq, dk, dv = torch.autograd.grad(out, [q, k, v], dout)
    last = [t[:, -1:].detach().requires_grad_() for t in (q, k, v)]
    problem = Problem(torch.bfloat16, B, 1, 1, S, S, D, D, causal=True, lse_gradient=False)
    zero = torch.zeros(B, 1, S, device="cuda")
    exact, plain = exact_and_eager(problem, last, [dout[:, -1:], zero])
    got = {"out": out[:, -1:], "dq": dq[:, -1:], "dk": dk[:, -1:], "dv": dv[:, -1:]}
    assert_within_bound(got, exact, plain, torch.bfloat16)


@pytest.mark.gpu
@pytest.mark.gib(30)
def test_one_head_spanning_more_than_2_31_elements(impl: str) -> None:
    stride = 2**25 + 16
    memory = torch.randn(65 * stride, device="cuda", dtype=torch.bfloat16)
    x = memory.as_strided((1, 1, 65, 64), (0, 0, stride, 1))
    problem = Problem(torch.bfloat16, 1, 1, 1, 65, 65, 64, 64, causal=True)
    inputs = [x.detach().requires_grad_() for _ in range(3)]
    gradients = make(problem, "cuda")[1]
    exact, plain = exact_and_eager(problem, [t.detach().clone() for t in inputs], gradients)
    got = results(run(problem, inputs, impl), inputs, gradients)
    assert_within_bound(got, exact, plain, problem.dtype)


@pytest.mark.gpu
@pytest.mark.parametrize("causal", [False, True])
def test_more_heads_than_the_grid_is_high(causal: bool, impl: str) -> None:
    many = replace(PLAIN, dtype=torch.bfloat16, B=70000, Hq=1, Hkv=1, Sq=5, Sk=7, causal=causal)
    check(many, "cuda", impl)


@pytest.mark.gpu
def test_runs_on_the_current_stream(impl: str) -> None:
    problem = replace(PLAIN, dtype=torch.bfloat16, Sq=2048, Sk=2048, D=64, Dv=64, causal=True)
    inputs, gradients = make(problem, "cuda")
    expected = results(run(problem, inputs, impl), inputs, gradients)
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        torch.cuda._sleep(50_000_000)
        late = [(t.detach() + 0).requires_grad_() for t in inputs]
        got = results(run(problem, late, impl), late, gradients)
    stream.synchronize()
    assert_same(got, expected, impl)


@pytest.mark.gpu
def test_cuda_graph(impl: str) -> None:
    q, k, v = (torch.randn(2, 4, 200, 64, device="cuda", dtype=torch.bfloat16) for _ in range(3))
    inputs = [t.requires_grad_() for t in (q, k, v)]

    def step():
        out = flashproto.attention(*inputs, causal=True, impl=impl)
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
    names = ("out", "dq", "dk", "dv")
    assert_same(dict(zip(names, captured, strict=True)), dict(zip(names, step(), strict=True)), impl)


@pytest.mark.gpu
def test_two_thousand_launches_of_mixed_shapes(impl: str, seed: int) -> None:
    shapes = [(1, 4, 2, 130, 200, 64), (2, 8, 8, 1024, 1024, 64), (1, 8, 1, 1000, 3000, 128)]
    shapes += [(1, 2, 2, 70, 5000, 128), (1, 4, 4, 600, 600, 256), (1, 2, 1, 4096, 4096, 96)]
    calls = []
    for B, Hq, Hkv, Sq, Sk, D in shapes:
        for causal in (False, True):
            problem = Problem(torch.bfloat16, B, Hq, Hkv, Sq, Sk, D, D, causal)
            inputs, gradients = make(problem, "cuda")
            expected = results(run(problem, inputs, impl), inputs, gradients)
            calls.append((problem, inputs, gradients, expected))
    generator = random.Random(seed)
    wrong = torch.zeros((), device="cuda", dtype=torch.int64)
    for i in range(2000):
        problem, inputs, gradients, expected = generator.choice(calls)
        if i % 8:
            wrong += (run(problem, inputs, impl)[0] != expected["out"]).sum()
        else:
            got = results(run(problem, inputs, impl), inputs, gradients)
            wrong += sum((got[name] != expected[name]).sum() for name in ("out", "dk", "dv"))
    assert wrong.item() == 0


# --- configurations ------------------------------------------------------------------------------


@pytest.mark.parametrize("capability", [(8, 0), (8, 6), (8, 9), (9, 0), (10, 0), (12, 0), (13, 0)])
@pytest.mark.parametrize("itemsize", [2, 4])
@pytest.mark.parametrize(
    "D, Dv", [(1, 1), (16, 256), (64, 64), (96, 128), (256, 256), (512, 512), (96, 512)]
)
def test_configurations_fit(capability, itemsize: int, D: int, Dv: int) -> None:
    budget = configs.shared_bytes(capability)
    forward = configs.attention_forward(capability, itemsize, D, Dv)
    keys, queries = configs.attention_backward(capability, itemsize, D, Dv, Kind(CAUSAL=True))
    for config in (forward, keys, queries):
        assert min(config.block_m, config.block_n) >= (16 if max(D, Dv) <= 256 else 8)
        assert config.num_stages >= 1 and config.num_warps in (4, 8)
    width = configs.padded_head_dim(D) + configs.padded_head_dim(Dv)
    stages = keys.num_stages if max(D, Dv) <= 256 else max(keys.num_stages - 1, 1)
    tiles = keys.block_n * width + stages * keys.block_m * width
    assert keys.num_stages == 1 or tiles * itemsize <= budget
