"""The public functions as their users meet them: errors, autocast, torch.compile, torch.func, SDPA."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from operators import launches
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.autograd import forward_ad
from torch.utils._python_dispatch import TorchDispatchMode

import flashproto
from flashproto import backends, reference
from flashproto.ops import private
from flashproto.variant import Kind, Variant

IMPLS = ("triton", "torch", "reference")
# On a CPU the interpreter cannot run inside what Inductor generates any faster; tracing is the same.
BACKEND = "inductor" if torch.cuda.is_available() else "aot_eager"


def attention(x: Tensor, impl: str) -> Tensor:
    q, k, v = x.view(1, 3, 8, 16).unbind(1)
    return flashproto.attention(q[:, None], k[:, None], v[:, None], causal=True, impl=impl)


def heads(x: Tensor) -> list[Tensor]:
    return list(x.view(1, 12, 4, 8).transpose(1, 2).chunk(2, 1))


def tables(x: Tensor) -> tuple[Tensor, Tensor]:
    angles = torch.linspace(0, 3, 48, device=x.device).view(12, 4)
    return angles.cos(), angles.sin()


def starts(x: Tensor) -> Tensor:
    return torch.arange(0, 12, 5, device=x.device, dtype=torch.int32)


def targets(x: Tensor) -> Tensor:
    return torch.arange(12, device=x.device)


FUNCTIONS: dict[str, Callable[[Tensor, str], Tensor]] = {
    "attention": attention,
    "attention_qkv": lambda x, impl: flashproto.attention_qkv(x[None], 2, 1, causal=True, impl=impl),
    "attention_varlen": lambda x, impl: flashproto.attention_varlen(
        *x.view(12, 2, 16).split(1, 1),
        x.view(12, 2, 16)[:, :1],
        starts(x),
        starts(x),
        causal=True,
        impl="reference" if impl == "torch" else impl,  # which has no such function
    ),
    "merge_attention": lambda x, impl: flashproto.merge_attention(
        [x, x * x], [x[:, 0], x[:, 1]], impl=impl
    )[0],
    "layer_norm": lambda x, impl: flashproto.layer_norm(x, 32, impl=impl),
    "rms_norm": lambda x, impl: flashproto.rms_norm(x, 32, impl=impl),
    "add_layer_norm": lambda x, impl: sum(flashproto.add_layer_norm(x, x * x, 32, impl=impl)),
    "add_rms_norm": lambda x, impl: sum(flashproto.add_rms_norm(x, x * x, 32, impl=impl)),
    "softmax": lambda x, impl: flashproto.softmax(x, impl=impl),
    "log_softmax": lambda x, impl: flashproto.log_softmax(x, impl=impl),
    "logsumexp": lambda x, impl: flashproto.logsumexp(x, impl=impl),
    "softmax_topk": lambda x, impl: flashproto.softmax_topk(x, 8, impl=impl)[0],
    "cross_entropy": lambda x, impl: flashproto.cross_entropy(x, targets(x), impl=impl),
    "linear_cross_entropy": lambda x, impl: flashproto.linear_cross_entropy(
        x, x * x, targets(x), impl=impl
    ),
    "swiglu": lambda x, impl: flashproto.swiglu(x, impl=impl),
    "geglu": lambda x, impl: flashproto.geglu(x, x * x, approximate="tanh", impl=impl),
    "reglu": lambda x, impl: flashproto.reglu(x, impl=impl),
    "gelu": lambda x, impl: flashproto.gelu(x, impl=impl),
    "rope": lambda x, impl: sum(flashproto.rope(*heads(x), *tables(x), impl=impl)),
    "rope_qkv": lambda x, impl: sum(flashproto.rope_qkv(x[None], 2, 1, *tables(x), impl=impl)[1:]),
    "qk_norm": lambda x, impl: sum(flashproto.qk_norm(*heads(x), x[0, :8], None, impl=impl)),
    "qk_norm_qkv": lambda x, impl: sum(
        flashproto.qk_norm_qkv(x[None], 2, 1, x[0, :8], x[1, :8], *tables(x), impl=impl)[1:]
    ),
}


@pytest.fixture
def x(device: str) -> Tensor:
    return torch.randn(12, 32, device=device)


def test_public_names_are_covered_here() -> None:
    functions = {
        n
        for n in flashproto.__all__
        if getattr(flashproto, n).__module__.startswith("flashproto.functional")
    }
    forward_only = {"layer_norm_fp8", "rms_norm_fp8"}  # tests/test_norm_fp8.py
    others = {"attention_with_kv_cache", "dropout_mask"}  # tests/test_decode.py, test_dropout.py
    assert functions == {*FUNCTIONS, *forward_only, *others, "scaled_dot_product_attention"}


# --- what is refused ------------------------------------------------------------------------------

Q = torch.zeros(2, 4, 8, 16)
K = torch.zeros(2, 2, 8, 16)
CACHE = torch.zeros(2, 8, 2, 16)
E4M3 = torch.float8_e4m3fn


def cached(**changed: object) -> object:
    lengths = torch.tensor([0, 3], dtype=torch.int32)
    given = {"q": Q, "k_cache": CACHE, "v_cache": CACHE.clone(), "lengths": lengths} | changed
    return flashproto.attention_with_kv_cache(**given)


REFUSED = {
    "q has 3 dimensions": (lambda: flashproto.attention(Q[0], K, K), "q is of shape"),
    "k is no tensor": (lambda: flashproto.attention(Q, [1.0], K), "k is list"),
    "integers": (lambda: flashproto.attention(Q.int(), K.int(), K.int()), "q is of dtype torch.int32"),
    "dtypes": (lambda: flashproto.attention(Q, K.half(), K), "k is of dtype torch.float16"),
    "devices": (lambda: flashproto.attention(Q, K.to("meta"), K), "k is on meta"),
    "batch": (lambda: flashproto.attention(Q, K[:1], K), "k is of batch size 1"),
    "keys and values": (lambda: flashproto.attention(Q, K, K[:, :, 1:]), "v is of heads and length"),
    "head_dim": (lambda: flashproto.attention(Q, K[..., 1:], K), "k is of head_dim 15"),
    "no head_dim": (lambda: flashproto.attention(Q, K, K[..., :0]), "v is of head_dim 0"),
    "heads": (lambda: flashproto.attention(Q[:, :3], K, K), "q is of 3 heads"),
    "no key heads": (lambda: flashproto.attention(Q, K[:, :0], K[:, :0]), "k is of 0 heads"),
    "scale": (lambda: flashproto.attention(Q, K, K, scale=math.inf), "scale is inf"),
    "window": (
        lambda: flashproto.attention(Q, K, K, window=(-2, 0)),
        r"window is -2; it takes ",
    ),
    "cache, heads first": (
        lambda: cached(k_cache=K, v_cache=K),
        r"k_cache is .* call .transpose\(1, 2\)",
    ),
    "cache, q of tokens first": (
        lambda: cached(q=Q[:, :3], k_cache=K.new_zeros(2, 7, 4, 16), v_cache=K.new_zeros(2, 7, 4, 16)),
        r"\[2, 7, 4, 16\], 4 heads; .* q's; q has 3, as .* = \[2, 3, 8, 16\]. Where q, k and v .* call",
    ),
    "cache, other heads": (
        lambda: cached(q=Q[:, :3, :1], k_cache=CACHE[:, :7], v_cache=CACHE[:, :7]),
        "k_cache is .* q's; q has 3, as .* Pass as many query heads for each head of the cache",
    ),
    "cache, sparse": (lambda: cached(k_cache=CACHE.to_sparse()), "k_cache is of layout"),
    "cache, tokens first": (lambda: cached(k=CACHE, v=CACHE), r"k is .* \[2, 2, n, 16\]. Heads come"),
    "cache, values of others": (lambda: cached(k=K, v=K[:, :, :1]), r"v is .* takes \[2, 2, 8, 16\]"),
    "cache, lengths in a list": (lambda: cached(lengths=[3, 5]), "Make one of torch.int32"),
    "cache, a scale": (
        lambda: cached(k_cache=CACHE.to(E4M3), v_cache=CACHE.to(E4M3), k_scale=1.0, v_scale=1.0),
        "k_scale is 1.0.*Make one of torch.float32",
    ),
    "cache, rope": (
        lambda: cached(prefix=(CACHE[0],) * 2, rope=(CACHE[0, :7, 0, :8],) * 2),
        "rope is of 7 rows; it takes more rows than the 8 tokens of the prefix",
    ),
    "sdpa heads": (lambda: flashproto.scaled_dot_product_attention(Q, K, K), "enable_gqa=True"),
    "sdpa, a mask": (
        lambda: flashproto.scaled_dot_product_attention(Q, Q, Q, attn_mask=flashproto.masks.causal()),
        r"attn_mask is one of flashproto.masks; .* Call flashproto.attention\(q, k, v, mask=",
    ),
    "sdpa vectors": (
        lambda: flashproto.scaled_dot_product_attention(Q[0, 0, 0], Q[0, 0, 0], Q[0, 0, 0]),
        "query, key or value",
    ),
    "normalized_shape": (lambda: flashproto.rms_norm(Q, 17), "normalized_shape is \\[17\\]"),
    "no normalized_shape": (lambda: flashproto.layer_norm(Q, []), "normalized_shape is \\[\\]"),
    "weight": (lambda: flashproto.rms_norm(Q, 16, Q[0, 0, 0, :3]), "weight is of shape"),
    "bias": (lambda: flashproto.layer_norm(Q, 16, None, Q[0, 0]), "bias is of shape"),
    "residual": (lambda: flashproto.add_rms_norm(Q, K, 16), "residual is of shape"),
    "weight elsewhere": (
        lambda: flashproto.rms_norm(Q, 16, torch.zeros(16, device="meta")),
        "weight is on meta",
    ),
    "scalar": (lambda: flashproto.softmax(torch.tensor(1.0)), "x is a scalar"),
    "sparse": (lambda: flashproto.softmax(Q[0, 0].to_sparse()), "x is of layout"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_bad_input_is_refused_with_what_where_and_how(case: str) -> None:
    call, text = REFUSED[case]
    with pytest.raises((TypeError, ValueError), match=text) as caught:
        call()
    message = str(caught.value)
    assert "; it takes " in message and message.rstrip().endswith(".")


# --- torch.compile, autocast, torch.func ------------------------------------------------------------


@pytest.mark.parametrize("impl", IMPLS)
@pytest.mark.parametrize("name", FUNCTIONS)
def test_compiles_in_one_graph_forward_and_backward(name: str, impl: str, x: Tensor) -> None:
    torch.compiler.reset()
    f = FUNCTIONS[name]
    a, b = x.clone().requires_grad_(), x.clone().requires_grad_()
    expected = f(a, impl)
    got = torch.compile(f, fullgraph=True, backend=BACKEND)(b, impl)
    dy = torch.randn_like(expected)
    expected.backward(dy)
    got.backward(dy)
    torch.testing.assert_close(got, expected, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(b.grad, a.grad, rtol=1e-4, atol=1e-5)


@pytest.mark.slow
def test_compiles_with_the_default_backend_of_torch(x: Tensor) -> None:
    torch.compiler.reset()

    def everything(x: Tensor) -> Tensor:
        return sum(f(x, impl).sum() for f in FUNCTIONS.values() for impl in ("triton", "torch"))

    a, b = x.clone().requires_grad_(), x.clone().requires_grad_()
    torch.compile(everything, fullgraph=True)(a).backward()
    everything(b).backward()
    torch.testing.assert_close(a.grad, b.grad, rtol=1e-4, atol=1e-4)


def test_inductor_knows_an_op_before_it_would_write_its_arguments(
    x: Tensor, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """What it would write grows with the depth of the graph, beyond all bounds."""
    from torch._inductor import config, graph, lowering

    op = torch.ops.flashproto.softmax.default
    written: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: written.append(record.msg)  # type: ignore[method-assign]
    monkeypatch.setattr(graph.log, "handlers", [handler])
    monkeypatch.setattr(graph.log, "propagate", False)
    caplog.set_level(logging.INFO, graph.log.name)

    def compiled(tells: bool) -> Tensor:
        monkeypatch.setattr(private, "WRITES_ARGUMENTS", tells)
        monkeypatch.delitem(lowering.lowerings, op, raising=False)
        written.clear()
        with config.patch(force_disable_caches=True):
            torch.compiler.reset()
            return torch.compile(lambda x: flashproto.softmax(x, impl="triton"), fullgraph=True)(x)

    asked = "Creating implicit fallback for:\n%s"
    want = flashproto.softmax(x, impl="triton")
    torch.testing.assert_close(compiled(tells=False), want)
    assert asked in written  # so this would notice
    torch.testing.assert_close(compiled(tells=True), want)
    assert asked not in written and op in lowering.lowerings


@pytest.mark.parametrize("requires_grad", [False, True])
@pytest.mark.parametrize("causal", [False, True])
def test_opcheck_of_attention(causal: bool, requires_grad: bool, device: str) -> None:
    q = torch.randn(1, 2, 9, 16, device=device, requires_grad=requires_grad)
    k = torch.randn(1, 1, 7, 16, device=device).mT.contiguous().mT.requires_grad_(requires_grad)
    settings = ([], *Variant(Kind(CAUSAL=causal), -2).form.flat(), 0.25, "triton", False, 0)
    torch.library.opcheck(torch.ops.flashproto.attention_forward.default, (q, k, k, *settings))
    out, lse, *_ = torch.ops.flashproto.attention_forward(q, k, k, *settings)
    grads = torch.randn_like(out), torch.randn_like(lse), None, None
    saved = [*(t.detach() for t in (q, k, k, out, lse)), None, None]
    torch.library.opcheck(
        torch.ops.flashproto.attention_backward.default,
        (*grads, *saved, *settings, [True, requires_grad, requires_grad]),
    )


@pytest.mark.parametrize("name", FUNCTIONS)
@pytest.mark.parametrize("route", ["jvp", "dual numbers", "jvp in compile", "compiled, dual numbers"])
def test_tangents_raise_and_are_never_zero(name: str, route: str, x: Tensor) -> None:
    torch.compiler.reset()
    torch._dynamo.config.suppress_errors = False

    def f(x: Tensor) -> Tensor:
        return FUNCTIONS[name](x, "triton")

    def dual(f: Callable[[Tensor], Tensor]) -> None:
        with forward_ad.dual_level():
            f(forward_ad.make_dual(x, torch.ones_like(x)))

    compiled = torch.compile(f, fullgraph=True, backend="aot_eager")
    routes: dict[str, Callable[[], object]] = {
        "jvp": lambda: torch.func.jvp(f, (x,), (x,)),
        "dual numbers": lambda: dual(f),
        "jvp in compile": lambda: torch.compile(
            lambda x: torch.func.jvp(f, (x,), (x,)), fullgraph=True, backend="aot_eager"
        )(x),
        "compiled, dual numbers": lambda: dual(compiled),
    }
    with pytest.raises((NotImplementedError, RuntimeError), match=r"jvp|forward"):
        routes[route]()


def test_tangents_raise_in_the_ops_themselves(device: str) -> None:
    q = torch.randn(1, 1, 5, 16, device=device)
    ops, of_attention = torch.ops.flashproto, (*Variant().form.flat(), 1.0, "triton", False, 0)
    for call in (
        lambda q: ops.attention_forward(q, q, q, [], *of_attention)[0],
        lambda q: ops.norm(q, None, None, None, 1, 1e-5, True, "torch", False)[0],
        lambda q: ops.softmax(q, False, q.dtype),
        lambda q: ops.logsumexp(q, q.dtype)[0],
    ):
        with pytest.raises(NotImplementedError, match="jvp"):
            torch.func.jvp(call, (q,), (q,))


class Seen(TorchDispatchMode):
    """Notes the ops that are called."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.names.append(func.name())
        return func(*args, **(kwargs or {}))


def test_an_op_goes_straight_to_its_function_where_nobody_else_wants_to_see_it(
    device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    straight: list[bool] = []
    goes = private.goes_straight

    def noting(keyset: object) -> bool:
        straight.append(goes(keyset))
        return straight[-1]

    monkeypatch.setattr(private, "goes_straight", noting)
    x = torch.randn(3, 8, device=device, requires_grad=True)
    softmax = torch.ops.flashproto.softmax
    with torch.no_grad():
        y = softmax(x, False, x.dtype)
        assert straight == [True]
        assert y.grad_fn is None
        assert not y.requires_grad
        with Seen() as seen:
            torch.testing.assert_close(softmax(x, False, x.dtype), y)
        assert straight == [True, False]
        assert "flashproto::softmax" in seen.names
        with FakeTensorMode() as fake:
            assert type(softmax(fake.from_tensor(x), False, x.dtype)) is FakeTensor
        assert straight == [True, False, False]
        mapped = torch.func.functionalize(lambda x: softmax(x, False, x.dtype))(x.detach())
        torch.testing.assert_close(mapped, y)
    recorded = softmax(x, False, x.dtype)
    assert recorded.requires_grad
    torch.testing.assert_close(recorded, y)


@pytest.mark.parametrize("name", FUNCTIONS)
def test_reference_has_tangents(name: str, x: Tensor) -> None:
    x = x.double()
    t = torch.randn_like(x)
    _, dy = torch.func.jvp(lambda x: FUNCTIONS[name](x, "reference"), (x,), (t,))
    plus, minus = (FUNCTIONS[name](x + s * 1e-6 * t, "reference") for s in (1, -1))
    torch.testing.assert_close(dy, (plus - minus) / 2e-6, rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("name", FUNCTIONS)
def test_gradients_of_torch_func(name: str, x: Tensor) -> None:
    got, expected = (
        torch.func.grad(lambda x, impl=impl: FUNCTIONS[name](x, impl).square().sum())(x)
        for impl in ("triton", "reference")
    )
    torch.testing.assert_close(got, expected, rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("impl", IMPLS)
def test_autocast_as_in_torch(impl: str, device: str) -> None:
    x = torch.randn(1, 2, 8, 16, device=device)
    half = x.to(torch.bfloat16)
    with torch.autocast(device, torch.bfloat16):
        assert flashproto.attention(x, x, x, impl=impl).dtype == torch.bfloat16
        pairs = [
            (flashproto.layer_norm(half, 16, impl=impl), F.layer_norm(half, [16])),
            (flashproto.rms_norm(half, 16, impl=impl), F.rms_norm(half, [16])),
            (flashproto.softmax(half, impl=impl), torch.softmax(half, -1)),
            (flashproto.log_softmax(half, impl=impl), torch.log_softmax(half, -1)),
            (flashproto.logsumexp(half, impl=impl), torch.logsumexp(half, -1)),
        ]
    for ours, theirs in pairs:
        assert ours.dtype == theirs.dtype
        torch.testing.assert_close(ours.float(), theirs.float(), rtol=2e-2, atol=2e-2)


# --- scaled_dot_product_attention -------------------------------------------------------------------

SDPA_SHAPES = {
    "4 dimensions": ((2, 4, 9, 16), (2, 4, 7, 16), (2, 4, 7, 24)),
    "3 dimensions": ((4, 9, 16), (4, 7, 16), (4, 7, 24)),
    "2 dimensions": ((9, 16), (7, 16), (7, 24)),
    "5 dimensions": ((3, 2, 4, 9, 16), (3, 2, 4, 7, 16), (3, 2, 4, 7, 16)),
    "broadcast batch": ((2, 4, 9, 16), (1, 4, 7, 16), (1, 4, 7, 16)),
}


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("case", SDPA_SHAPES)
def test_sdpa_takes_what_torch_takes(case: str, causal: bool, device: str) -> None:
    q, k, v = (torch.randn(s, device=device, requires_grad=True) for s in SDPA_SHAPES[case])
    got = flashproto.scaled_dot_product_attention(q, k, v, is_causal=causal, scale=0.3)
    expected = F.scaled_dot_product_attention(q, k, v, is_causal=causal, scale=0.3)
    torch.testing.assert_close(got, expected, rtol=1e-4, atol=1e-5)
    dy = torch.randn_like(got)
    for a, b in zip(
        torch.autograd.grad(got, [q, k, v], dy),
        torch.autograd.grad(expected, [q, k, v], dy),
        strict=True,
    ):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)


def test_sdpa_gqa_masks_and_dropout(device: str) -> None:
    q, k = torch.randn(2, 4, 9, 16, device=device), torch.randn(2, 2, 7, 16, device=device)
    got = flashproto.scaled_dot_product_attention(q, k, k, enable_gqa=True)
    torch.testing.assert_close(
        got, F.scaled_dot_product_attention(q, k, k, enable_gqa=True), rtol=1e-4, atol=1e-5
    )
    mask = torch.rand(9, 7, device=device) > 0.3
    got = flashproto.scaled_dot_product_attention(q, k, k, mask, enable_gqa=True)
    torch.testing.assert_close(got, F.scaled_dot_product_attention(q, k, k, mask, enable_gqa=True))
    assert flashproto.scaled_dot_product_attention(q, q, q, dropout_p=0.5).shape == q.shape


MASKS_OF_KEYS = {
    "one for all": ("2 4 9 16", (7,), (1, 7)),
    "by batch": ("2 4 9 16", (2, 1, 1, 7), None),
    "by head": ("2 4 9 16", (4, 1, 7), None),
    "by both, expanded": ("2 4 9 16", (2, 4, 1, 7), (2, 4, 9, 7)),
    "of two dimensions": ("9 16", (1, 7), (9, 7)),
    "of three dimensions": ("4 9 16", (4, 1, 7), None),
    "of five dimensions": ("3 2 4 9 16", (2, 1, 1, 7), None),
    "of five dimensions, batched": ("3 2 4 9 16", (3, 1, 4, 1, 7), None),
    "the same for all keys": ("2 4 9 16", (2, 1, 1, 1), None),
}


@pytest.mark.slow
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("case", MASKS_OF_KEYS)
def test_sdpa_runs_masks_of_keys_on_the_kernels(case: str, causal: bool, device: str) -> None:
    sizes, shape, expanded = MASKS_OF_KEYS[case]
    *lead, L, E = map(int, sizes.split())
    q, k, v = (torch.randn(*lead, n, E, device=device, requires_grad=True) for n in (L, 7, 7))
    mask = torch.rand(shape, device=device) > 0.4
    mask = mask if expanded is None else mask.expand(expanded)
    whole = mask & torch.ones(L, 7, dtype=torch.bool, device=device).tril() if causal else mask
    with launches() as seen:
        got = flashproto.scaled_dot_product_attention(q, k, v, mask, is_causal=causal)
    assert "attention_forward_kernel" in [launch.kernel for launch in seen]
    scores = (q @ k.mT * E**-0.5).masked_fill(~whole, -math.inf)
    keyless = ~whole.any(-1, keepdim=True)
    expected = torch.softmax(scores.masked_fill(keyless, 0.0), -1).masked_fill(keyless, 0.0) @ v
    torch.testing.assert_close(got, expected, rtol=1e-4, atol=1e-5)
    dy = torch.randn_like(got)
    gradients = [torch.autograd.grad(y, [q, k, v], dy) for y in (got, expected)]
    for a, b in zip(*gradients, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)


# Shapes of query, key, value and attn_mask, and options.
ADDED: dict[str, tuple[Any, ...]] = {
    "of pairs": ((2, 4, 9, 16), (2, 4, 7, 16), (2, 4, 7, 24), (9, 7), {}),
    "of everything": ((2, 4, 9, 16), (2, 4, 7, 16), (2, 4, 7, 16), (2, 4, 9, 7), {}),
    "of heads": ((2, 4, 9, 16), (2, 4, 7, 16), (2, 4, 7, 16), (4, 9, 7), {}),
    "of one head": ((2, 4, 9, 16), (2, 4, 7, 16), (2, 4, 7, 16), (2, 1, 9, 7), {}),
    "of keys": ((2, 4, 9, 16), (2, 4, 7, 16), (2, 4, 7, 16), (2, 1, 1, 7), {}),
    "of queries": ((2, 4, 9, 16), (2, 4, 7, 16), (2, 4, 7, 16), (4, 9, 1), {}),
    "groups": ((2, 4, 9, 16), (2, 2, 7, 16), (2, 2, 7, 16), (4, 9, 7), {"enable_gqa": True}),
    "groups, one head of values": (
        (2, 4, 9, 16), (2, 2, 7, 16), (2, 1, 7, 16), (9, 7), {"enable_gqa": True}
    ),
    "groups, one head of keys": (
        (2, 4, 9, 16), (2, 1, 7, 16), (2, 2, 7, 16), (9, 7), {"enable_gqa": True}
    ),
    "one query head": ((2, 1, 9, 16), (2, 3, 7, 16), (2, 3, 7, 16), (3, 9, 7), {}),
    "one key head": ((2, 3, 9, 16), (2, 1, 7, 16), (2, 3, 7, 16), (9, 7), {}),
    "one head but of values": ((2, 1, 9, 16), (2, 1, 7, 16), (2, 3, 7, 16), None, {}),
    "matrices": ((9, 16), (7, 16), (7, 16), (9, 7), {}),
    "matrices, of keys": ((9, 16), (7, 16), (7, 16), (7,), {}),
    "a matrix of queries": ((9, 16), (3, 7, 16), (3, 7, 16), (3, 9, 7), {}),
    "five dimensions": ((2, 3, 4, 9, 16), (1, 3, 4, 7, 16), (2, 1, 4, 7, 16), (3, 1, 9, 7), {}),
    "five, of one": ((2, 3, 4, 9, 16), (2, 3, 4, 7, 16), (2, 3, 4, 7, 16), (1, 1, 4, 1, 7), {}),
    "a scale of no dimensions": (
        (2, 4, 9, 16), (2, 4, 7, 16), (2, 4, 7, 16), (9, 7), {"scale": torch.tensor(0.3)}
    ),
}  # fmt: skip


@pytest.mark.parametrize("impl", ["triton", "torch"])
@pytest.mark.parametrize("case", ADDED)
def test_sdpa_adds_masks_of_numbers(case: str, impl: str, device: str, monkeypatch) -> None:
    """With their gradients, as torch does, wherever torch broadcasts; on the kernels."""
    monkeypatch.setattr(backends, "_default", impl)
    *shapes, options = ADDED[case]
    tensors = [torch.randn(s, device=device, requires_grad=True) for s in shapes if s is not None]
    with launches() as seen:
        got = flashproto.scaled_dot_product_attention(*tensors, **options)
        again = flashproto.scaled_dot_product_attention(*tensors, **options)
    ran = "attention_forward_kernel" in [launch.kernel for launch in seen]
    assert ran == (impl == "triton") and torch.equal(got, again)
    wanted = F.scaled_dot_product_attention(*tensors, **options)
    torch.testing.assert_close(got, wanted, rtol=1e-4, atol=1e-5)
    dy = torch.randn_like(got)
    gradients = [torch.autograd.grad(y, tensors, dy) for y in (got, wanted)]
    for a, b in zip(*gradients, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("impl", ["triton", "torch", "reference"])
def test_sdpa_adds_masks_of_numbers_beside_is_causal(impl: str, device: str, monkeypatch) -> None:
    monkeypatch.setattr(backends, "_default", impl)
    q, mask = torch.randn(2, 4, 9, 16, device=device), torch.randn(9, 9, device=device)
    got = flashproto.scaled_dot_product_attention(q, q, q, mask, is_causal=True)
    hidden = ~torch.ones(9, 9, dtype=torch.bool, device=device).tril()
    wanted = F.scaled_dot_product_attention(q, q, q, mask.masked_fill(hidden, -math.inf))
    torch.testing.assert_close(got, wanted)


@pytest.mark.parametrize("impl", ["torch", "reference"])
@pytest.mark.parametrize("queries", [1, 9])
def test_sdpa_takes_boolean_masks_on_every_backend(queries: int, impl: str, monkeypatch) -> None:
    monkeypatch.setattr(backends, "_default", impl)
    q, mask = torch.randn(2, 4, 9, 16), torch.rand(2, 1, queries, 9) > 0.3
    mask[..., 0] = True
    for causal in (False, True):
        got = flashproto.scaled_dot_product_attention(q, q, q, mask, is_causal=causal)
        whole = mask & torch.ones(9, 9, dtype=torch.bool).tril() if causal else mask
        torch.testing.assert_close(got, F.scaled_dot_product_attention(q, q, q, whole))


@pytest.mark.parametrize("impl", ["triton", "torch", "reference"])
def test_sdpa_takes_a_boolean_mask_of_one_dimension(impl: str, device: str, monkeypatch) -> None:
    monkeypatch.setattr(backends, "_default", impl)
    q, mask = torch.randn(9, 16, device=device), torch.arange(9, device=device) % 3 > 0
    got = flashproto.scaled_dot_product_attention(q, q, q, mask)
    torch.testing.assert_close(got, F.scaled_dot_product_attention(q, q, q, mask))


SCALES = (0.0, -0.0, -0.2, 0.3, 1e-46, -1e-46, 1e-40)


@pytest.mark.parametrize(
    "dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64], ids=str
)
@pytest.mark.parametrize("call", ["causal", "full", "is_causal", "attn_mask"])
def test_scales_that_are_not_positive(call: str, dtype: torch.dtype, device: str) -> None:
    """On every backend, values and gradients: torch's own causal attention on a CPU takes none."""
    q, k, v = (torch.randn(1, 2, 24, 16, device=device).to(dtype) for _ in range(3))
    mask = torch.ones(24, 24, dtype=torch.bool, device=device).tril()
    sdpa = flashproto.scaled_dot_product_attention
    names = {"causal": True, "full": False}
    for scale in SCALES:
        exact = [x.double().requires_grad_() for x in (q, k, v)]
        s = exact[0] @ exact[1].mT * scale
        s = s if call == "full" else s.masked_fill(~mask, -math.inf)
        wanted = torch.softmax(s, -1) @ exact[2]
        dy = torch.randn_like(wanted)
        wanted_gradients = torch.autograd.grad(wanted, exact, dy)
        for impl in IMPLS if call in names else (None,):
            if (impl == "triton" and dtype == torch.float64) or (
                impl is None and dtype != torch.float32
            ):
                continue
            leaves = [x.detach().requires_grad_() for x in (q, k, v)]
            if impl is not None:
                y = flashproto.attention(*leaves, causal=names[call], scale=scale, impl=impl)
            elif call == "is_causal":
                y = sdpa(*leaves, is_causal=True, scale=scale)
            else:
                y = sdpa(*leaves, mask, scale=scale)
            tolerance = (
                {"rtol": 2e-2, "atol": 2e-2} if dtype.itemsize == 2 else {"rtol": 1e-4, "atol": 1e-5}
            )
            torch.testing.assert_close(y.double(), wanted, **tolerance)
            gradients = torch.autograd.grad(y, leaves, dy.to(dtype))
            for got, gradient in zip(gradients, wanted_gradients, strict=True):
                torch.testing.assert_close(got.double(), gradient, **tolerance)


def test_reference_states_agree_with_torch() -> None:
    x = torch.randn(5, 40, dtype=torch.float64)
    m, l = reference.online_softmax_start((5,), x)
    for tile in x.split(7, -1):
        m, l, _, _ = reference.online_softmax_update(m, l, tile)
    lse, _ = reference.online_softmax_finish(m, l)
    torch.testing.assert_close(lse, torch.logsumexp(x, -1))
