"""Variants of attention as calls: torch.compile, opcheck, checkpointing, vmap, autocast, what is
compiled anew, what has no gradient; by one table of features."""

from __future__ import annotations

import contextlib
import random
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from attention_problem import Problem
from operators import Recorder, launches
from torch import Tensor
from torch._dynamo.testing import CompileCounter
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    create_selective_checkpoint_contexts,
)
from variant_problem import FEATURES, Call, drawn, make, make_packed, outputs_of, run, starts

import flashproto
from flashproto import masks
from flashproto.bench import first_calls
from flashproto.functional import sdpa
from flashproto.ops import call_cache
from flashproto.variant import Kind, Variant, kind_of

ON_GPU = torch.cuda.is_available()
BACKEND = "inductor" if ON_GPU else "aot_eager"
SMALL = Problem(torch.float32, 1, 2, 1, 10, 13, 16, 16, causal=False)
# Every feature once, each with others.
SETS = {
    "bands": ("causal", "first_keys", "softcap", "max_score"),
    "windows": ("window", "sinks", "alibi", "entropy"),
    "documents": ("top_left", "documents", "padding", "sinks"),
    "trees": ("tree", "intervals", "alibi", "softcap"),
    "prefixes": ("prefix", "left_window", "max_score", "entropy"),
    "right": ("right_window", "sinks", "softcap", "dropout"),
    "biases": ("causal", "bias", "softcap", "max_score"),
    "tables": ("window", "relative_bias", "alibi", "entropy"),
    "functions": ("causal", "score_mod", "bias", "sinks", "entropy"),
}
if others := FEATURES.keys() - {n for names in SETS.values() for n in names}:
    SETS["others"] = tuple(sorted(others))
LENGTHS = [(5, 5), (0, 3)]
PACKED = {name: names for name, names in SETS.items() if all(FEATURES[n].packed for n in names)}


@pytest.fixture(params=[*SETS, *(f"{name}, packed" for name in PACKED)])
def case(request: pytest.FixtureRequest, device: str, seed: int) -> tuple[Call, Any, list, list]:
    """(a call, lengths or None, its inputs, gradients of its outputs)."""
    name, _, packed = request.param.partition(", ")
    call = drawn(random.Random(seed), SMALL, SETS[name], device)
    if packed:
        return call, LENGTHS, *make_packed(call, LENGTHS, (2, 1), device)
    return call, None, *make(call, device)


def assert_close(got: dict[str, Tensor], wanted: dict[str, Tensor], **tolerance: float) -> None:
    for name, value in wanted.items():
        torch.testing.assert_close(got[name], value, msg=lambda m, n=name: f"{n}: {m}", **tolerance)


@pytest.mark.slow
def test_compiles_in_one_graph(case) -> None:
    """The mask is an argument, as are sinks and slopes; forward and backward."""
    torch.compiler.reset()
    call, lengths, inputs, gradients = case
    wanted = run(call, inputs, gradients, "triton", lengths)

    def compiled(attend: Any) -> Any:
        return torch.compile(lambda *x, **o: attend(*x, **o), fullgraph=True, backend=BACKEND)

    got = run(call, inputs, gradients, "triton", lengths, compiled)
    assert_close(got, wanted, rtol=1e-5, atol=1e-5)


MADE = {
    "documents": lambda x: masks.documents(x // 5),
    "documents of both sides": lambda x: masks.documents(x // 5, x // 4),
    "padding": lambda x: masks.padding(x[-1:]),
    "prefix": lambda x: masks.prefix(x[2:3]) & masks.window(3),
    "tree": lambda x: masks.causal() & masks.tree(x - 1 - x % 2),
    "tree by what is below": lambda x: masks.tree(x, x + 2),
    "intervals": lambda x: masks.intervals(x // 2, x + 1),
    "chunks": lambda x: masks.causal() & masks.chunks(4),
    "boolean": lambda x: masks.boolean(x[:, None] >= 2 * x),
    "from_function": lambda x: masks.from_function(lambda b, h, i, j: x[i] % 3 == x[j] % 3),
    "either": lambda x: masks.window(1) | masks.tree(x - 1) | masks.global_tokens(2),
    "block_diffusion": lambda x: masks.block_diffusion(4) | masks.causal(),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", MADE)
def test_masks_made_of_other_lengths_compile_nothing(name: str, device: str) -> None:
    def attend(q: Tensor, x: Tensor) -> Tensor:
        return flashproto.attention(q, q, q, mask=MADE[name](x), impl="reference")

    torch.compiler.reset()
    counter = CompileCounter()
    compiled = torch.compile(attend, fullgraph=True, backend=counter)
    for n in (10, 16, 34):
        q, x = torch.randn(1, 2, n, 8, device=device), torch.arange(n, device=device)
        torch._dynamo.mark_dynamic(q, 2)
        torch._dynamo.mark_dynamic(x, 0)
        torch.testing.assert_close(compiled(q, x), attend(q, x))
    assert counter.frame_count == 1


@pytest.mark.slow
def test_ops_are_sound(case) -> None:
    call, lengths, inputs, gradients = case
    recorder = Recorder()
    with recorder:
        run(call, inputs, gradients, "triton", lengths)
    assert len(recorder.own) == 2
    for dispatched in recorder.own:
        # What else it does is in the test before, and slow under the interpreter.
        checks = {} if ON_GPU else {"test_utils": ("test_schema", "test_faketensor")}
        torch.library.opcheck(dispatched.op, dispatched.arguments, **checks)


OP = torch.ops.flashproto.attention_forward.default


@pytest.mark.parametrize("keeps", [None, (), (OP,)], ids=["plain", "selective", "selective, kept"])
def test_checkpoints(case, keeps: tuple[Any, ...] | None) -> None:
    """The same bits when the forward is made again for the backward, and when its results are kept."""
    call, lengths, inputs, gradients = case
    wanted = run(call, inputs, gradients, "triton", lengths)

    def policy(context: Any, op: Any, *arguments: Any, **options: Any) -> CheckpointPolicy:
        return CheckpointPolicy.MUST_SAVE if op in keeps else CheckpointPolicy.PREFER_RECOMPUTE

    how = {} if keeps is None else {"context_fn": partial(create_selective_checkpoint_contexts, policy)}

    def checkpointed(attend: Any) -> Any:
        return lambda *x, **o: checkpoint(partial(attend, **o), *x, use_reentrant=False, **how)

    with launches() as seen:
        got = run(call, inputs, gradients, "triton", lengths, checkpointed)
    assert_close(got, wanted, rtol=0, atol=0)
    forwards = [launch.kernel for launch in seen].count("attention_forward_kernel")
    assert forwards == (1 if keeps else 2)


def test_under_vmap_a_backend_that_can_runs(case) -> None:
    """Outputs, and gradients of each sample, of what has gradients too."""
    call, lengths, inputs, gradients = case
    samples = [torch.stack([x.detach(), 0.5 * x.detach().flip(0)]) for x in inputs]
    names = list(call.parameters)
    shared = [x.detach() for x in call.parameters.values()]

    def outputs(*given: Tensor, impl: str | None = None) -> tuple[Tensor, ...]:
        parameters = dict(zip(names, given[3:], strict=True))
        return tuple(outputs_of(call, given[:3], impl, lengths, **parameters).values())

    def loss(*given: Tensor, impl: str | None = None) -> Tensor:
        out, lse, *_ = outputs(*given, impl=impl)
        seen = torch.where(lse.isinf(), 0.0, lse)
        return (out * gradients[0]).sum() + (seen * gradients[1]).sum()

    every = tuple(range(3 + len(shared)))
    dims = (0, 0, 0, *[None] * len(shared))
    for function in (outputs, torch.func.grad(loss, every)):
        got = torch.func.vmap(function, dims)(*samples, *shared)
        one_by_one = [
            function(*sample, *shared, impl="reference") for sample in zip(*samples, strict=True)
        ]
        for made, wanted in zip(got, zip(*one_by_one, strict=True), strict=True):
            torch.testing.assert_close(made, torch.stack(wanted), rtol=1e-4, atol=1e-5)


def test_autocast(case) -> None:
    """q, k and v are rounded; sinks, slopes and lse stay float32."""
    call, lengths, inputs, gradients = case
    low = [x.detach().bfloat16().requires_grad_() for x in inputs]
    wanted = run(call, low, gradients, "triton", lengths)
    with torch.autocast(inputs[0].device.type, torch.bfloat16):
        got = run(call, inputs, gradients, "triton", lengths)
    assert got["out"].dtype == torch.bfloat16 and got["lse"].dtype == torch.float32
    assert got["dq"].dtype == torch.float32
    for name, value in wanted.items():
        torch.testing.assert_close(got[name].to(value.dtype), value, rtol=0, atol=0)


def test_the_same_bits_every_time(case) -> None:
    call, lengths, inputs, gradients = case
    wanted = run(call, inputs, gradients, "triton", lengths)
    for _ in range(20 if ON_GPU else 1):
        assert_close(run(call, inputs, gradients, "triton", lengths), wanted, rtol=0, atol=0)


# --- a statistic without a gradient -----------------------------------------------------------------


@pytest.mark.parametrize("how", ["triton", "op"])
def test_a_gradient_of_max_score_is_refused_by_kernels(how: str, device: str) -> None:
    """Alone and in a sum with what has one."""
    q = torch.randn(1, 1, 9, 16, device=device, requires_grad=True)

    def attend(q: Tensor) -> tuple[Tensor, ...]:
        return flashproto.attention(q, q, q, return_aux=("max_score",), impl="triton")

    for loss in (lambda out, x: x.sum(), lambda out, x: out.sum() + x.sum()):
        with Recorder() if how == "op" else contextlib.nullcontext():
            made = attend(q)
        with pytest.raises(NotImplementedError, match=r"max_score has no .*; pass impl='reference'"):
            torch.autograd.grad(loss(*made), q)
    out, x = attend(q)
    (gradient,) = torch.autograd.grad(out.sum() + x.detach().sum(), q)
    assert gradient.isfinite().all()


@pytest.mark.parametrize("impl", ["triton", "reference"])
def test_statistics_under_compile(impl: str, device: str) -> None:
    """What has no gradient is a constant."""
    torch.compiler.reset()
    q = torch.randn(1, 1, 9, 16, device=device, requires_grad=True)

    def attend(q: Tensor) -> tuple[Tensor, ...]:
        return flashproto.attention(q, q, q, return_aux=("max_score", "entropy"), impl=impl)

    made = torch.compile(attend, fullgraph=True, backend="aot_eager")(q)
    assert [x.requires_grad for x in made] == [True, impl == "reference", True]
    out, _, entropy = attend(q)
    wanted = torch.autograd.grad(out.sum() + entropy.sum(), q)
    torch.testing.assert_close(torch.autograd.grad(made[0].sum() + made[2].sum(), q), wanted)


@pytest.mark.parametrize("impl", ["triton", "torch", "reference"])
def test_masks_made_under_inference_mode_serve_training(impl: str, device: str) -> None:
    """Of each mask, and of a tensor of keys, which are seen and used without gradients first."""
    if impl == "torch" and device != "cpu":
        pytest.skip("off a CPU torch takes no such mask")
    q, k, v = (torch.randn(2, 2, 9, 16, device=device) for _ in range(3))
    ids, lengths = torch.arange(9, device=device) // 4, torch.tensor([3, 9], device=device)
    keys = (torch.arange(9, device=device) < lengths[:, None])[:, None, None]
    tree = torch.arange(-1, 8, device=device)

    def made() -> list[masks.Mask]:
        documents = masks.documents(ids)
        return [documents, masks.tree(tree), masks.padding(lengths), documents & masks.prefix(lengths)]

    def results(made: list[masks.Mask], impl: str) -> list[Tensor]:
        outputs = [flashproto.attention(*inputs, mask=mask, impl=impl) for mask in made]
        if impl != "reference":
            outputs.append(flashproto.scaled_dot_product_attention(*inputs, keys))
        else:
            seen = keys.expand(2, 1, 9, 9)
            outputs.append(torch.nn.functional.scaled_dot_product_attention(*inputs, seen))
        return outputs

    inputs = [x.requires_grad_() for x in (q, k, v)]
    call_cache.forget()
    sdpa._always.cache_clear()
    with torch.inference_mode():
        early = made()
        results(early, impl)
    for got, wanted in zip(results(early, impl), results(made(), "reference"), strict=True):
        torch.testing.assert_close(got, wanted, atol=2e-3, rtol=2e-3)
        gradients = [torch.autograd.grad(x.square().sum(), inputs) for x in (got, wanted)]
        torch.testing.assert_close(*gradients, atol=5e-3, rtol=5e-3)


# --- rows without a key -----------------------------------------------------------------------------


@pytest.mark.parametrize("impl", ["triton", "reference"])
@pytest.mark.parametrize("sinks", [False, True])
def test_rows_without_a_key(sinks: bool, impl: str, device: str) -> None:
    """0; lse -inf or the sink, whose gradient is that of lse; max_score -inf, entropy 0."""
    q, k = torch.randn(1, 2, 6, 16, device=device), torch.randn(1, 2, 4, 16, device=device)
    inputs = [x.requires_grad_() for x in (q, k, k.clone())]
    sink = torch.tensor([0.5, -torch.inf], device=device, requires_grad=True) if sinks else None
    out, lse, top, entropy = flashproto.attention(
        *inputs,
        sinks=sink,
        mask=masks.padding(torch.tensor([0], device=device)),
        return_lse=True,
        return_aux=("max_score", "entropy"),
        impl=impl,
    )
    assert not out.any() and not entropy.any() and (top == -torch.inf).all()
    expected = sink.detach() if sinks else torch.full((2,), -torch.inf, device=device)
    torch.testing.assert_close(lse, expected[None, :, None].expand(1, 2, 6))
    dlse = torch.ones_like(lse)
    if not sinks:
        dlse = torch.zeros_like(lse)
    else:
        dlse[:, 1] = 0
    leaves = [*inputs, *([sink] if sinks else [])]
    *grads, last = torch.autograd.grad([out, lse], leaves, [torch.ones_like(out), dlse])
    assert not any(g.any() for g in grads)
    assert last.tolist() == [6.0, 0.0] if sinks else not last.any()


# --- what is compiled anew --------------------------------------------------------------------------


def changing(device: str) -> dict[str, Callable[[int], Any]]:
    """Calls of one kind with other tensors each time, and varlen with other lengths."""
    q = torch.randn(1, 2, 96, 16, device=device, requires_grad=True)
    tokens = torch.randn(200, 1, 16, device=device, requires_grad=True)

    def sequences(n: int) -> Tensor:
        lengths = [(7, 0, 20), (64, 17, 3), (16, 16), (32,)][n]
        total = sum(lengths) + n
        x, cu = tokens[:total], starts([(m, m) for m in lengths], device)
        return flashproto.attention_varlen(x, x, x, *cu, causal=True, impl="triton")

    return {
        "documents": lambda n: flashproto.attention(
            q, q, q, mask=masks.documents(torch.arange(96, device=device) // (n + 9)), impl="triton"
        ),
        "sinks and slopes": lambda n: flashproto.attention(
            q,
            q,
            q,
            sinks=torch.full((2,), float(n), device=device),
            alibi_slopes=torch.full((2,), n + 0.5, device=device),
            impl="triton",
        ),
        "softcap": lambda n: flashproto.attention(q, q, q, softcap=1.0 + n, impl="triton"),
        "lengths": sequences,
    }


@pytest.mark.gpu
@pytest.mark.parametrize("what", ["documents", "sinks and slopes", "softcap", "lengths"])
def test_nothing_is_compiled_anew(what: str) -> None:
    call = changing("cuda")[what]
    call(0).sum().backward()
    with first_calls.compiled_meanwhile() as compiled:
        for n in (1, 2, 3):
            call(n).sum().backward()
    assert not compiled


def test_lengths_are_no_constants_of_a_kernel(device: str) -> None:
    """Triton compiles anew for an integer of 1, and where one is a multiple of 16 and was not."""
    if ON_GPU:
        pytest.skip("the GPU counts what is compiled")
    seen = set()
    call = changing(device)["lengths"]
    for n in (0, 2, 3):
        with launches() as launched:
            call(n).sum().backward()
        for launch in launched:
            for name, value in launch.arguments.items():
                values = value if isinstance(value, tuple) else (value,)
                ints = [x for x in values if type(x) is int]
                kinds = tuple("1" if x == 1 else x % 16 == 0 for x in ints)
                seen.add((launch.kernel, name, kinds))
    assert len({(kernel, name) for kernel, name, _ in seen}) == len(seen)


# --- varlen on a GPU --------------------------------------------------------------------------------


@pytest.mark.gpu
def test_a_graph_is_replayed_with_other_lengths() -> None:
    """Nothing of the lengths is on the host: neither while captured nor anywhere else."""
    T, H = 700, 4
    inputs = [
        torch.randn(T, H, 64, device="cuda", dtype=torch.bfloat16).requires_grad_() for _ in "qkv"
    ]
    cu = torch.tensor([0, 100, 100, 400, 650], device="cuda", dtype=torch.int32)

    def step() -> tuple[Tensor, ...]:
        out = flashproto.attention_varlen(*inputs, cu, cu, causal=True, impl="triton")
        return out, *torch.autograd.grad(out, inputs, torch.ones_like(out))

    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        step()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = step()
    for lengths in ([1, 2, 3, 4], [0, 0, 0, 700], [300, 0, 17, 200]):
        cu[1:] = torch.tensor(lengths, device="cuda").cumsum(0)
        graph.replay()
        torch.cuda.synchronize()
        torch.cuda.set_sync_debug_mode("error")
        try:
            wanted = step()
        finally:
            torch.cuda.set_sync_debug_mode("default")
        for a, b in zip(captured, wanted, strict=True):
            assert torch.equal(a, b)


@pytest.mark.gpu
def test_masks_wait_for_nothing() -> None:
    q = torch.randn(1, 4, 512, 64, device="cuda", dtype=torch.bfloat16)
    ids = torch.arange(512, device="cuda") // 100
    parents = torch.arange(-1, 511, device="cuda")
    flashproto.attention(q, q, q, causal=True, mask=masks.documents(ids), impl="triton")
    torch.cuda.set_sync_debug_mode("error")
    try:
        mask = masks.documents(ids) & masks.tree(parents) & masks.padding(ids[:1] + 500)
        flashproto.attention(q, q, q, causal=True, mask=mask, impl="triton")
    finally:
        torch.cuda.set_sync_debug_mode("default")


# --- where it runs ----------------------------------------------------------------------------------

PLAIN = {Kind(), Kind(CAUSAL=True)}


def test_torch_says_what_it_does_not_take() -> None:
    from flashproto.variant import reasons

    q = torch.zeros(1, 1, 8, 16)
    for text in (
        "causal",
        "full",
        "causal+window",
        "softcap=1",
        "alibi",
        "sinks",
        "intervals",
        "varlen",
    ):
        kind = kind_of(text)
        against = list(reasons("torch", Variant(kind), q, q, q, False))
        assert bool(against) == bool(kind.given.keys() & {"SOFTCAP", "ALIBI", "SINKS"})
        if against:
            assert kind.name.partition("=")[0] in against[0]
        elsewhere = list(reasons("torch", Variant(kind), *[q.to("meta")] * 3, False))
        assert bool(elsewhere) == (kind not in PLAIN)


@pytest.mark.parametrize("names", SETS.values(), ids=SETS)
def test_a_variant_that_nothing_else_takes_runs_where_it_can(names, device: str, seed: int) -> None:
    """impl=None: the same as by name."""
    call = drawn(random.Random(seed), replace(SMALL, Sq=9, Sk=9), names, device)
    inputs, gradients = make(call, device)
    assert_close(run(call, inputs, gradients, None), run(call, inputs, gradients, "triton"))
