"""Calls that are traced or transformed: sizes and numbers that are symbols, vmap, DTensor, fake and
meta tensors.  One table of all public functions for all of it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._dynamo.testing import CompileCounter, CompileCounterWithBackend
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx

import flashproto
from flashproto import backends, hooks, nn
from flashproto.functional.attention_request import Request
from flashproto.variant import Kind, Variant

fp = flashproto
IMPLS = ("triton", "torch", "reference")
LENGTHS = (5, 8, 11)
Shape = tuple[int, ...]


@dataclass(frozen=True)
class Function:
    """A public function on tensors of the shapes that a length gives: `call` returns what is
    differentiated.  integers: the tensor of that index holds classes or positions below 5.
    constants: those of these indices need no gradient.  torch: whether that backend can run it."""

    call: Callable[..., Tensor]
    shapes: Callable[[int], Sequence[Shape]]
    integers: int | None = None
    constants: tuple[int, ...] = ()
    torch: bool = True

    def inputs(self, S: int, device: str, lead: Shape = ()) -> list[Tensor]:
        made = []
        for i, shape in enumerate(self.shapes(S)):
            if i == self.integers:
                made.append(torch.randint(5, (*lead, *shape), device=device))
            else:
                x = torch.randn(*lead, *shape, device=device)
                made.append(x.requires_grad_(i not in self.constants))
        return made


def total(results: Any) -> Tensor:
    return sum(x.sum() for x in results) if isinstance(results, tuple) else results


def rows(*others: Shape) -> Callable[[int], Sequence[Shape]]:
    return lambda S: ((2, S, 16), *others)


def heads(S: int) -> Sequence[Shape]:
    return (2, 4, S, 16), (2, 2, S, 16)


def attends(S: int) -> Sequence[Shape]:
    return *heads(S), (2, 2, S, 24)


def longer_keys(S: int) -> Sequence[Shape]:
    return (2, 4, S, 16), (2, 2, S + 3, 16), (2, 2, S + 3, 16)


def prefix(q: Tensor) -> fp.masks.Mask:
    return fp.masks.prefix(torch.full(q.shape[:1], 3, device=q.device))


def thirds(q: Tensor) -> Tensor:
    """cu_seqlens of two sequences, and tokens behind them."""
    return torch.arange(3, device=q.device, dtype=torch.int32) * (q.shape[0] // 3)


def with_tables(shapes: Callable[[int], Sequence[Shape]]) -> Callable[[int], Sequence[Shape]]:
    return lambda S: (*shapes(S), (S + 5, 4), (S + 5, 4))


def packed(S: int) -> Sequence[Shape]:
    return ((2, S, 64),)


FUNCTIONS: dict[str, Function] = {
    "attention": Function(lambda q, k, v, **o: fp.attention(q, k, v, causal=True, **o), attends),
    "attention, longer keys": Function(
        lambda q, k, v, **o: total(fp.attention(q, k, v, causal=True, return_lse=True, **o)),
        longer_keys, torch=False,
    ),
    "attention, transposed": Function(
        lambda q, k, v, **o: fp.attention(q.mT, k.mT, v.mT, **o),
        lambda S: ((2, 4, 12, S), (2, 2, 12, S), (2, 2, 12, S)),
    ),
    "attention, variants": Function(
        lambda q, k, v, sinks, slopes, **o: total(
            fp.attention(
                q, k, v, window=(5, 1), softcap=3.0, sinks=sinks, alibi_slopes=slopes,
                return_lse=True, **o,
            )
        ),
        lambda S: (*attends(S), (4,), (4,)), torch=False,
    ),
    "attention, documents": Function(
        lambda q, k, v, ids, **o: fp.attention(
            q, k, v, mask=fp.masks.causal() & fp.masks.documents(ids.cumsum(-1)), **o
        ),
        lambda S: (*attends(S), (2, S)), 3, torch=False,
    ),
    "attention, statistics": Function(
        lambda q, k, v, **o: total(
            tuple(
                x.detach() if i else x
                for i, x in enumerate(
                    fp.attention(q, k, v, return_aux=("max_score", "entropy"), mask=prefix(q), **o)
                )
            )
        ),
        longer_keys, torch=False,
    ),
    "attention_varlen": Function(
        lambda q, k, v, **o: fp.attention_varlen(q, k, v, *[thirds(q)] * 2, causal=True, **o),
        lambda S: ((S, 4, 16), (S, 2, 16), (S, 2, 24)), torch=False,
    ),
    "attention_varlen, gaps": Function(
        lambda q, k, v, **o: fp.attention_varlen(
            q, k, v, *[thirds(q)] * 2, seqused_q=thirds(q).diff() - 1,
            seqused_k=thirds(q).diff() // 2, **o,
        ),
        lambda S: ((S, 4, 16), (S, 2, 16), (S, 2, 24)), torch=False,
    ),
    "attention_with_kv_cache": Function(
        lambda q, k, v, **o: total(
            fp.attention_with_kv_cache(
                q, k, v, lengths=q.new_full(q.shape[:1], 3, dtype=torch.int32), window=(2, 0),
                return_lse=True, **o,
            )
        ),
        lambda S: ((2, 4, S, 16), (2, 2 * S, 2, 16), (2, 2 * S, 2, 24)), None, (0, 1, 2), torch=False,
    ),
    "merge_attention": Function(
        lambda a, b, s, t, **o: total(fp.merge_attention((a, b), (s, t), **o)),
        lambda S: ((2, S, 16), (2, S, 16), (2, S), (2, S)),
    ),
    "attention_qkv": Function(lambda x, **o: fp.attention_qkv(x, 2, 1, causal=True, **o), packed),
    "scaled_dot_product_attention": Function(
        lambda q, k, v, impl=None: with_default(
            impl, lambda: fp.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        ),
        longer_keys,
    ),
    "layer_norm": Function(
        lambda x, w, b, **o: fp.layer_norm(x, x.shape[-1], w, b, **o), rows((16,), (16,))
    ),
    "rms_norm": Function(lambda x, w, **o: fp.rms_norm(x, x.shape[-1], w, **o), rows((16,))),
    "rms_norm, width": Function(
        lambda x, w, **o: fp.rms_norm(x, x.shape[-1:], w, **o), lambda S: ((3, 3 * S), (3 * S,))
    ),
    "rms_norm, hooks": Function(
        lambda x, w, z, **o: fp.rms_norm(x, x.shape[-1], w, prologue=hooks.call("multiply", z), **o),
        rows((16,), (16,)), torch=False,
    ),
    "rms_norm, memory_efficient": Function(
        lambda x, w, **o: fp.rms_norm(x, x.shape[-1], w, memory_efficient=True, **o),
        rows((16,)), torch=False,
    ),
    "add_layer_norm": Function(
        lambda x, r, w, **o: total(fp.add_layer_norm(x, r, x.shape[-1], w, **o)),
        lambda S: ((2, S, 16), (2, S, 16), (16,)),
    ),
    "add_rms_norm": Function(
        lambda x, r, w, **o: total(fp.add_rms_norm(x, r, x.shape[-1], w, **o)),
        lambda S: ((2, S, 16), (2, S, 16), (16,)),
    ),
    "layer_norm_fp8": Function(
        lambda x, **o: fp.layer_norm_fp8(x, x.shape[-1], **o)[1], rows(), None, (0,), torch=False
    ),
    "rms_norm_fp8": Function(
        lambda x, **o: fp.rms_norm_fp8(x, x.shape[-1], **o)[0].float(), rows(), None, (0,), torch=False
    ),
    "softmax": Function(lambda x, **o: fp.softmax(x, **o), rows()),
    "softmax, masked": Function(
        lambda x, m, **o: fp.softmax(x, scale=0.5, mask=m, causal=True, **o),
        lambda S: ((2, S, S + 2), (S, S + 2)), torch=False,
    ),
    "log_softmax": Function(lambda x, **o: fp.log_softmax(x, **o), rows()),
    "logsumexp": Function(lambda x, **o: fp.logsumexp(x, **o), rows()),
    "softmax_topk": Function(lambda x, **o: fp.softmax_topk(x, 4, **o)[0], rows()),
    "cross_entropy": Function(
        lambda x, t, **o: fp.cross_entropy(x, t, **o), lambda S: ((2, S, 16), (2, S)), 1
    ),
    "cross_entropy, all options": Function(
        lambda x, t, w, **o: total(
            fp.cross_entropy(
                x, t, weight=w, label_smoothing=0.1, z_loss=0.1, softcap=3.0, return_lse=True,
                reduction="none", **o,
            )
        ),
        lambda S: ((2, S, 16), (2, S), (16,)), 1, (2,), torch=False,  # which fixes the classes
    ),
    "linear_cross_entropy": Function(
        lambda h, W, t, b, **o: fp.linear_cross_entropy(h, W, t, b, **o),
        lambda S: ((2, S, 8), (16, 8), (2, S), (16,)), 2,
    ),
    "swiglu": Function(lambda x, **o: fp.swiglu(x, **o), rows()),
    "geglu": Function(
        lambda x, y, **o: fp.geglu(x, y, approximate="tanh", **o), lambda S: ((2, S, 16),) * 2
    ),
    "reglu": Function(lambda x, **o: fp.reglu(x, **o), rows()),
    "gelu": Function(lambda x, **o: fp.gelu(x, **o), rows()),
    "rope": Function(
        lambda q, k, c, s, **o: total(fp.rope(q, k, c, s, offset=2, **o)), with_tables(heads),
        None, (2, 3),
    ),
    "rope_qkv": Function(
        lambda x, c, s, **o: total(fp.rope_qkv(x, 2, 1, c, s, **o)), with_tables(packed), None, (1, 2)
    ),
    "qk_norm": Function(
        lambda q, k, w, **o: total(fp.qk_norm(q, k, w, None, **o)), lambda S: (*heads(S), (16,))
    ),
    "qk_norm_qkv": Function(
        lambda x, c, s, **o: total(fp.qk_norm_qkv(x, 2, 1, None, None, c, s, **o)),
        with_tables(packed), None, (1, 2),
    ),
}  # fmt: skip


def with_default(impl: str | None, call: Callable[[], Tensor]) -> Tensor:
    """scaled_dot_product_attention has torch's signature, and so no impl."""
    if torch.compiler.is_compiling() or impl is None:
        return call()
    before = backends.get_default()
    backends.set_default(impl)
    try:
        return call()
    finally:
        backends.set_default(before)


def test_public_names_are_covered_here() -> None:
    functions = {
        n
        for n in flashproto.__all__
        if getattr(flashproto, n).__module__.startswith("flashproto.functional")
    }
    assert {name.split(",")[0] for name in FUNCTIONS} == functions - {"dropout_mask"}  # test_dropout.py


@pytest.fixture(autouse=True)
def fresh() -> Iterator[None]:
    torch.compiler.reset()
    yield
    torch.compiler.reset()


def derivatives(y: Tensor, inputs: Sequence[Tensor]) -> list[Tensor]:
    """y, and the gradients of its sum."""
    wanted = [x for x in inputs if x.requires_grad]
    return [y.detach(), *(torch.autograd.grad(y.sum(), wanted) if wanted else ())]


# --- sizes that are symbols ----------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("impl", IMPLS)
@pytest.mark.parametrize("name", FUNCTIONS)
def test_one_graph_for_all_sizes(name: str, impl: str, device: str) -> None:
    """Every size is a symbol, which torch refuses to compile if one is fixed; forward and backward."""
    f = FUNCTIONS[name]
    if impl == "torch" and not f.torch:
        impl = "reference"
    count = CompileCounterWithBackend("aot_eager" if impl == "triton" else "eager")
    compiled = torch.compile(f.call, fullgraph=True, backend=count)
    for S in LENGTHS:
        inputs = f.inputs(S, device)
        for x in inputs:
            torch._dynamo.mark_dynamic(x, list(range(x.ndim)))
        y = compiled(*inputs, impl=impl)
    got, want = derivatives(y, inputs), derivatives(f.call(*inputs, impl=impl), inputs)
    torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-5)
    assert count.frame_count == 1


@pytest.mark.parametrize("dynamic", [None, True])
@pytest.mark.parametrize("impl", ["triton", "reference"])
def test_few_graphs_for_many_lengths(impl: str, dynamic: bool | None, device: str) -> None:
    f = FUNCTIONS["rms_norm, width"]
    count = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(f.call, fullgraph=True, backend=count, dynamic=dynamic)
    for S in range(4, 16):
        inputs = f.inputs(S, device)
        got = derivatives(compiled(*inputs, impl=impl), inputs)
    torch.testing.assert_close(got, derivatives(f.call(*inputs, impl=impl), inputs))
    assert count.frame_count <= 2


@pytest.mark.slow
def test_inductor_compiles_symbols(device: str) -> None:
    def step(x: Tensor, w: Tensor, W: Tensor, t: Tensor) -> Tensor:
        h = flashproto.rms_norm(x, x.shape[-1], w, impl="triton")
        q = h.unflatten(-1, (2, -1)).transpose(1, 2)
        h = flashproto.attention(q, q, q, causal=True, impl="triton").transpose(1, 2).flatten(2)
        return flashproto.linear_cross_entropy(h, W, t, impl="triton")

    compiled = torch.compile(step, fullgraph=True, dynamic=True)
    for S in LENGTHS:
        x, w, W = (
            torch.randn(s, device=device, requires_grad=True) for s in ((2, S, 16), (16,), (9, 16))
        )
        inputs = [x, w, W, torch.randint(9, (2, S), device=device)]
        got, want = (derivatives(f(*inputs), inputs) for f in (compiled, step))
        torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-5)


class Fixed(torch.nn.Module):
    """A call beside buffers, whose sizes are numbers where those of x are symbols."""

    def __init__(self, call: Callable[[Any, Tensor], Tensor]) -> None:
        super().__init__()
        self.call = call
        self.register_buffer("bias", torch.randn(1, 4, 5, 5))
        self.register_buffer("keys", torch.ones(2, 1, 1, 5).bool())
        self.register_buffer("bools", torch.ones(5, 8).bool())
        self.register_buffer("rows", torch.arange(5))
        self.register_buffer("ids", torch.zeros(2, 5).int())
        self.register_buffer("table", torch.ones(9, 4))

    def forward(self, x: Tensor) -> Tensor:
        return self.call(self, x)


SDPA = fp.scaled_dot_product_attention
BESIDE_FIXED: dict[str, Callable[..., Tensor]] = {
    "bias": lambda m, x, **o: SDPA(x, x, x, m.bias),
    "keys": lambda m, x, **o: SDPA(x, x, x, m.keys, is_causal=True),
    "documents": lambda m, x, **o: fp.attention(x, x, x, mask=fp.masks.documents(m.ids), **o),
    "padding": lambda m, x, **o: fp.attention(x, x, x, mask=fp.masks.padding(m.ids[:, 0] + 3), **o),
    "softmax": lambda m, x, **o: fp.softmax(x, mask=m.bools, **o),
    "hook": lambda m, x, **o: fp.rms_norm(x, 8, prologue=hooks.call("multiply", m.bias[..., :1]), **o),
    "rope": lambda m, x, **o: fp.rope(x, None, m.table, m.table, positions=m.rows, **o)[0],
}


@pytest.mark.slow
@pytest.mark.parametrize("impl", ["triton", "reference"])
@pytest.mark.parametrize("name", BESIDE_FIXED)
def test_fixed_sizes_beside_symbols(name: str, impl: str, device: str) -> None:
    model = Fixed(lambda m, x: BESIDE_FIXED[name](m, x, impl=impl)).to(device)
    compiled = torch.compile(model, dynamic=True, fullgraph=True, backend="aot_eager")
    x = torch.randn(2, 4, 5, 8, device=device)
    torch.testing.assert_close(compiled(x), model(x))


@pytest.mark.slow
@pytest.mark.parametrize("impl", ["triton", "torch"])
@pytest.mark.parametrize("grad", [False, True])
def test_inductor_compiles_numbers(grad: bool, impl: str, device: str) -> None:
    """Each call gets its own, also where a number is of several ops and of torch's."""

    def step(x: Tensor, w: Tensor, number: float) -> Tensor:
        q = x[:, None]
        h = flashproto.attention(q, q, q, causal=True, impl=impl, scale=number * 0.5)
        h = flashproto.rms_norm(h * 2, x.shape[-1], w, eps=number * 1e-1, impl=impl)
        return h.square().sum() * number

    compiled = torch.compile(step, fullgraph=True)
    for n in range(4):
        inputs = [torch.randn(s, device=device, requires_grad=grad) for s in ((2, 5, 16), (16,))]
        got, want = (derivatives(f(*inputs, 0.1 + n / 16), inputs) for f in (compiled, step))
        torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-5)


def causal(offset: int) -> Variant:
    return Variant(Kind(CAUSAL=True), offset)


LAYOUTS: dict[str, Callable[[int], Tensor]] = {
    "contiguous": lambda S: torch.zeros(2, 4, S, 64, dtype=torch.bfloat16),
    "tokens first": lambda S: torch.zeros(2, S, 4, 64, dtype=torch.bfloat16).transpose(1, 2),
    "head_dim 12": lambda S: torch.zeros(2, 4, S, 12, dtype=torch.bfloat16),
    "transposed": lambda S: torch.zeros(2, 4, 64, S, dtype=torch.bfloat16).mT,
    "odd offset": lambda S: torch.zeros(8 * S * 64 + 1, dtype=torch.bfloat16)[1:].view(2, 4, S, 64),
    "rows apart": lambda S: torch.zeros(2, 4, S, 68, dtype=torch.bfloat16)[..., :64],
    "cut": lambda S: torch.zeros(2, 4, 20, 64, dtype=torch.bfloat16)[:, :, :S],
}


def request_of(variant: Variant, q: Tensor, k: Tensor) -> Request:
    return Request("attention", q, k, k, variant, None, (0,), {"q": q, "k": k, "v": k})


@pytest.mark.parametrize("more_keys", [0, 3])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_hopper_is_asked_without_fixing_sizes(
    layout: str, more_keys: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Which backend attention takes where Hopper's kernels can run, found while sizes are symbols."""
    nothing = backends.constant_under_compile(lambda backend, device: ())
    monkeypatch.setattr(backends, "device_reasons", nothing)

    def chosen(q: Tensor, k: Tensor) -> Tensor:
        backend = backends.choose(
            "attention",
            None,
            [q, k],
            request_of(causal(k.shape[2] - q.shape[2]), q, k).reasons,
        )
        return q.new_full((), backends.BACKENDS.index(backend))

    count = CompileCounter()
    compiled = torch.compile(chosen, fullgraph=True, backend=count)
    fits = layout in ("contiguous", "tokens first", "cut", "odd offset")  # offsets are not traced
    for S in range(4, 16):
        found = compiled(LAYOUTS[layout](S), LAYOUTS[layout](S + more_keys))
        assert backends.BACKENDS[int(found)] == ("hopper" if fits else "triton")
    assert count.frame_count <= 3


# --- numbers that are symbols --------------------------------------------------------------------


NUMBERS: dict[str, Callable[[Tensor, float, str], Tensor]] = {
    "scale of attention": lambda x, v, impl: fp.attention(*[x[:, None]] * 3, scale=v, impl=impl),
    "negative scale": lambda x, v, impl: fp.attention(*[x[:, None]] * 3, scale=-v, impl=impl),
    "scale of a size": lambda x, v, impl: fp.attention(
        *[x[:, None]] * 3, scale=v / x.shape[1], impl=impl
    ),
    "softcap of attention": lambda x, v, impl: fp.attention(*[x[:, None]] * 3, softcap=v, impl=impl),
    "scale of attention_with_kv_cache": lambda x, v, impl: fp.attention_with_kv_cache(
        x[:, None], *[x[:, :, None]] * 2, lengths=x.new_full((2,), 3, dtype=torch.int32), scale=v,
        impl=impl,
    ),
    "scale of sdpa": lambda x, v, impl: SDPA(x, x, x, scale=v),
    "dropout_p of sdpa": lambda x, v, impl: SDPA(x, x, torch.zeros_like(x), dropout_p=v),
    "scale of attention_qkv": lambda x, v, impl: fp.attention_qkv(x, 2, 1, scale=v, impl=impl),
    "scale of softmax": lambda x, v, impl: fp.softmax(x, scale=v, impl=impl),
    "scalar of a hook": lambda x, v, impl: fp.softmax(
        x, epilogue=hooks.call("dropout", torch.tensor(5, device=x.device), v), impl=impl
    ),
    "eps of layer_norm": lambda x, v, impl: fp.layer_norm(x, 16, eps=v, impl=impl),
    "eps of rms_norm": lambda x, v, impl: fp.rms_norm(x, 16, eps=v, impl=impl),
    "eps of add_rms_norm": lambda x, v, impl: total(fp.add_rms_norm(x, x, 16, eps=v, impl=impl)),
    "eps where memory_efficient": lambda x, v, impl: fp.rms_norm(
        x, 16, eps=v, memory_efficient=True, impl=impl
    ),
    "eps of rms_norm_fp8": lambda x, v, impl: fp.rms_norm_fp8(x.detach(), 16, eps=v, impl=impl)[1],
    "eps of qk_norm": lambda x, v, impl: fp.qk_norm(x[:, None], None, eps=v, impl=impl),
    "theta of rope_tables": lambda x, v, impl: nn.rope_tables(5, 16, v, x.device)[0],
    **{
        f"{option} of {name}": lambda x, v, impl, name=name, option=option: losses(
            name, x, impl, **{option: v}
        )
        for name in ("cross_entropy", "linear_cross_entropy")
        for option in ("z_loss", "softcap", "label_smoothing")
    },
}  # fmt: skip
INTEGERS: dict[str, Callable[[Tensor, int, str], Tensor]] = {
    "k": lambda x, v, impl: fp.softmax_topk(x, v, impl=impl)[0],
    "ignore_index of cross_entropy": lambda x, v, impl: losses(
        "cross_entropy", x, impl, ignore_index=v
    ),
    "ignore_index of linear_cross_entropy": lambda x, v, impl: losses(
        "linear_cross_entropy", x, impl, ignore_index=v
    ),
    "chunk_size": lambda x, v, impl: losses("linear_cross_entropy", x, impl, chunk_size=v),
    "offset": lambda x, v, impl: fp.rope(
        x[:, None], None, *[torch.ones(20, 4, device=x.device)] * 2, offset=v, impl=impl
    ),
}


def losses(name: str, x: Tensor, impl: str, **options: Any) -> Tensor:
    t = torch.arange(3, device=x.device).expand(2, 3)
    if name == "linear_cross_entropy":
        return fp.linear_cross_entropy(x, x[0], t, impl=impl, **options)
    return fp.cross_entropy(x, t, impl=impl, **options)


@pytest.mark.slow
@pytest.mark.parametrize("impl", ["triton", "reference"])
@pytest.mark.parametrize("case", NUMBERS)
def test_numbers_change(case: str, impl: str, device: str) -> None:
    """torch compiles anew for a number that meets an operator, its own as ours; no graph breaks.  No
    operator takes a symbol, for which Inductor may put the number of an earlier call, but sums and
    products of tensors and numbers."""
    taken = []

    def backend(graph: torch.fx.GraphModule, inputs: Sequence[Tensor]) -> Callable[..., Any]:
        for node in graph.graph.nodes:
            if node.op == "call_function" and node.target.__module__ != "_operator":
                given = [x.meta.get("example_value") for x in node.all_input_nodes]
                taken.extend(node.target for x in given if isinstance(x, torch.SymFloat))
        return graph

    def step(x: Tensor, value: float) -> Tensor:
        return NUMBERS[case](x, value, impl) * value

    x = torch.randn(2, 3, 16 * (4 if "qkv" in case else 1), device=device)
    compiled = torch.compile(step, fullgraph=True, backend=backend)
    for value in (0.25, 0.5, 0.75):
        torch.testing.assert_close(compiled(x, value), step(x, value))
    assert taken == []


@pytest.mark.parametrize("impl", ["triton", "reference"])
@pytest.mark.parametrize("case", INTEGERS)
def test_integers_are_symbols(case: str, impl: str, device: str) -> None:
    x = torch.randn(2, 3, 16, device=device)
    count = CompileCounter()
    compiled = torch.compile(INTEGERS[case], fullgraph=True, backend=count)
    for value in (2, 3, 5, 7):
        torch.testing.assert_close(compiled(x, value, impl), INTEGERS[case](x, value, impl))
    assert count.frame_count <= 2


# --- other traces --------------------------------------------------------------------------------


@pytest.mark.parametrize("kv_heads", [2, 4])
def test_heads_of_attention_are_traced(kv_heads: int) -> None:
    q, k, more = (torch.randn(2, h, s, 8) for h, s in ((4, 5), (kv_heads, 5), (4, 7)))

    def f(q: Tensor, k: Tensor) -> Tensor:
        return flashproto.attention(q, k, k, impl="torch")

    traced = torch.jit.trace(f, (q, k), check_trace=False)
    torch.testing.assert_close(traced(q, k), f(q, k))
    symbolic = make_fx(f, tracing_mode="symbolic")(q, k)
    torch.testing.assert_close(symbolic(more, more[:, :kv_heads]), f(more, more[:, :kv_heads]))


# --- torch.func.vmap -----------------------------------------------------------------------------


@pytest.mark.parametrize("name", FUNCTIONS)
def test_vmap_takes_a_backend_that_can(name: str, device: str) -> None:
    f = FUNCTIONS[name]
    inputs = [x.detach() for x in f.inputs(5, device, lead=(3,))]
    got = torch.func.vmap(f.call)(*inputs)
    want = torch.stack([f.call(*(x[i] for x in inputs), impl="reference") for i in range(3)])
    torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("name", [n for n, f in FUNCTIONS.items() if 0 not in f.constants])
def test_gradients_per_sample(name: str, device: str) -> None:
    """vmap over grad, with what all samples share not batched."""
    f = FUNCTIONS[name]
    x, *others = [t.detach() for t in f.inputs(5, device)]
    xs = torch.stack([x, 2 * x])
    loss = lambda x, *others, **how: f.call(x, *others, **how).square().sum()  # noqa: E731
    got = torch.func.vmap(torch.func.grad(loss), (0, *(None,) * len(others)))(xs, *others)
    for i in range(2):
        want = torch.func.grad(lambda x: loss(x, *others, impl="reference"))(xs[i])
        torch.testing.assert_close(got[i], want, rtol=1e-3, atol=1e-4)


@pytest.mark.skipif(not backends.HAS_TRITON, reason="triton is not installed")
def test_kernels_asked_for_inside_vmap_are_refused(device: str) -> None:
    x = torch.randn(3, 4, 8, device=device)
    with pytest.raises(flashproto.BackendError, match=r"vmap.*Call it outside of vmap\.$"):
        torch.func.vmap(lambda x: flashproto.softmax(x, impl="triton"))(x)
    with pytest.raises(flashproto.BackendError, match="vmap"):
        torch.func.vmap(torch.func.grad(lambda x: flashproto.softmax(x, impl="triton").sum()))(x)
    chosen: list[str] = []

    def f(x: Tensor) -> Tensor:
        chosen.append(backends.choose("softmax", None, [x], lambda b: ["no"] * (b == "hopper")))
        return x.sum()

    f(x)
    torch.func.grad(f)(x)
    torch.func.vmap(f)(x)
    torch.func.grad(lambda x: torch.func.vmap(f)(x).sum())(x)
    assert chosen == ["triton", "triton", "torch", "torch"]


def test_vmap_compiles(device: str) -> None:
    x = torch.randn(3, 4, 8, device=device)
    mapped = torch.func.vmap(lambda x: flashproto.softmax(x))
    compiled = torch.compile(mapped, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(compiled(x), x.softmax(-1))
    inner = torch.compile(lambda x: flashproto.softmax(x), backend="aot_eager")
    torch.testing.assert_close(inner(x), x.softmax(-1))
    torch.testing.assert_close(torch.func.vmap(inner)(x), x.softmax(-1))


# --- DTensor -------------------------------------------------------------------------------------


@pytest.fixture
def mesh(tmp_path: Path, device: str) -> Iterator[Any]:
    dist = pytest.importorskip("torch.distributed")
    if not dist.is_available():
        pytest.skip("torch.distributed is not available")
    from torch.distributed.device_mesh import init_device_mesh

    where = f"file://{tmp_path / 'store'}"
    dist.init_process_group("nccl" if device == "cuda" else "gloo", where, rank=0, world_size=1)
    yield init_device_mesh(device, (1,))
    dist.destroy_process_group()


# Where torch's own operators know what to do with shards.
SHARDED = ("rms_norm", "layer_norm", "softmax", "log_softmax", "swiglu", "gelu", "cross_entropy")


@pytest.mark.parametrize("name", SHARDED)
def test_dtensors_take_a_backend_that_can(name: str, mesh: Any, device: str) -> None:
    from torch.distributed.tensor import DTensor, Replicate, distribute_tensor

    f = FUNCTIONS[name]
    inputs = f.inputs(5, device)
    shards = [
        distribute_tensor(x.detach(), mesh, [Replicate()]).requires_grad_(x.requires_grad)
        for x in inputs
    ]
    y = f.call(*shards)
    assert isinstance(y, DTensor)
    want = derivatives(f.call(*inputs, impl="reference"), inputs)
    got = [x.full_tensor() for x in derivatives(y, shards)]
    torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-5)
    with pytest.raises(flashproto.BackendError, match=r"DTensor.*Pass its \.to_local\(\)\.$"):
        f.call(*shards, impl="triton")
    compiled = torch.compile(f.call, fullgraph=True, backend="eager")(*shards)
    torch.testing.assert_close(compiled.full_tensor(), want[0], rtol=1e-4, atol=1e-5)


def test_dtensors_are_found_in_what_transforms_wrap(mesh: Any, device: str) -> None:
    from torch.distributed.tensor import Replicate, distribute_tensor

    x = distribute_tensor(torch.randn(3, 8, device=device), mesh, [Replicate()])
    with pytest.raises(flashproto.BackendError, match="DTensor"):
        torch.func.grad(lambda x: flashproto.softmax(x, impl="triton").square().sum())(x)


# --- fake tensors --------------------------------------------------------------------------------


def test_fake_tensors_choose_as_real_ones_would(device: str) -> None:
    x = torch.randn(2, 8, device=device)
    with FakeTensorMode() as mode:
        real, fake = (
            backends.choose("softmax", None, [t], lambda b: ["no"] * (b == "hopper"))
            for t in (x, mode.from_tensor(x))
        )
    assert real == fake


def test_fake_tensors_of_a_gpu_choose_by_what_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(backends, "INTERPRETED", False)
    with FakeTensorMode():
        q = torch.empty(1, 1, 8, 16, device="cuda", dtype=torch.bfloat16)
    reasons = request_of(causal(0), q, q).reasons
    for capability, wanted in (
        ((9, 0), "hopper"),
        ((8, 0), "triton"),
        ((7, 5), "torch"),
        (None, "torch"),
    ):

        def capability_of(device: torch.device, found: Any = capability) -> tuple[int, int]:
            if found is None:
                raise RuntimeError("no NVIDIA driver")
            return found

        monkeypatch.setattr(torch.cuda, "get_device_capability", capability_of)
        backends._usable.cache_clear()
        assert backends.choose("attention", None, [q], reasons) == wanted
    backends._usable.cache_clear()


# --- the meta device -----------------------------------------------------------------------------


@pytest.mark.parametrize("autocasts", [False, True])
@pytest.mark.parametrize("name", FUNCTIONS)
def test_meta_tensors_have_the_shapes_of_real_ones(name: str, autocasts: bool) -> None:
    f, found = FUNCTIONS[name], []
    for device in ("cpu", "meta"):
        inputs = f.inputs(5, device)
        with torch.autocast("cpu", torch.bfloat16, enabled=autocasts and device == "meta"):
            results = derivatives(f.call(*inputs), inputs)
        found.append([(x.shape, x.dtype) for x in results])
        assert {x.device.type for x in results} == {device}
    assert found[0] == found[1]


@pytest.mark.parametrize("autocasts", [False, True])
@pytest.mark.parametrize("modern", [False, True])
def test_modules_on_meta(modern: bool, autocasts: bool) -> None:
    options: dict[str, Any] = {"norm": "rms", "mlp": "swiglu", "positions": "rope"} if modern else {}
    with torch.device("meta"):
        model = nn.GPT(nn.GPTConfig(17, 8, 1, 2, 16, **options))
        tokens = torch.zeros(2, 8, dtype=torch.long)
        gated = nn.GatedRMSNorm(16)
        x = torch.randn(2, 16)
    with torch.autocast("cpu", torch.bfloat16, enabled=autocasts):
        _, loss = model(tokens, tokens)
        loss = loss + gated(x, x).sum() + nn.CrossEntropyLoss()(x, tokens[:, 0])
    loss.backward()
    assert loss.device.type == "meta"
    assert all(p.grad is not None and p.grad.shape == p.shape for p in model.parameters())
