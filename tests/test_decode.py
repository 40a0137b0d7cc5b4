"""Attention with a cache of keys and values."""

from __future__ import annotations

import functools
import math
import random
import re
from dataclasses import replace
from typing import Any

import pytest
import torch
from attention_problem import HEAD_DIMS
from attention_problem import draw as variant_draw
from decode_problem import Problem, Sequences, draw, next_call, play
from operators import launches
from rows import poison
from torch import Tensor
from torch._dynamo.testing import CompileCounterWithBackend
from torch.utils._python_dispatch import TorchDispatchMode
from variant_problem import (
    FEATURES,
    assert_within_bound,
    compatible,
    drawn,
    exact_and_eager,
    make,
    run,
)

import flashproto
from flashproto import backends, configs
from flashproto.checks import reading
from flashproto.variant import Kind

pytest.importorskip("triton")

from flashproto.ops import attention_split, call_cache

# --- a cache -----------------------------------------------------------------------------------------

ON_GPU = torch.cuda.is_available()


@pytest.mark.parametrize("index", range(24))
def test_the_reference_follows_the_definition(index: int, device: str, seed: int) -> None:
    """In float64; of 8 bits in float32, as they are."""
    generator = random.Random(seed)
    problem = draw(generator, 90, 8, (8, 16))
    if not problem.eight:
        problem = replace(problem, dtype=torch.float64)
    play(problem, device, generator, "reference")


@pytest.mark.parametrize("index", range(24))
def test_torch_follows_the_definition(index: int, seed: int) -> None:
    """On a CPU, and leaves the same cache as the reference; its lse is that of the reference."""
    generator = random.Random(seed)
    drawn = draw(generator, 90, 8, (8, 16))
    options = {n: x for n, x in drawn.options.items() if n != "softcap"}
    options |= {"alibi": False, "sinks": False}
    problem = replace(drawn, dtype=torch.float64, eight=0, prefix=0, options=options)

    def call(q: Tensor, *caches: Tensor, return_lse: bool, impl: str, **options: Any) -> Any:
        copies, function = [x.clone() for x in caches], flashproto.attention_with_kv_cache
        _, lse = function(q, *copies, return_lse=return_lse, impl="reference", **options)
        out = function(q, *caches, impl=impl, **options)
        torch.testing.assert_close(caches, tuple(copies), rtol=0, atol=0, equal_nan=True)
        return out, lse

    play(problem, "cpu", generator, "torch", call)


def test_torch_takes_what_it_can(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a CPU without the interpreter."""
    monkeypatch.setattr(backends, "INTERPRETED", False)
    q, k, v = (torch.randn(2, *shape, 8) for shape in ((4, 1), (9, 2), (9, 2)))
    options = {"lengths": torch.tensor([3, 9], dtype=torch.int32)}
    prefix = torch.randn(5, 2, 8), torch.randn(5, 2, 8)
    found: list[str] = []
    with backends.watch_choices(lambda operator, chosen, against: found.append(chosen)):
        got = flashproto.attention_with_kv_cache(q, k, v, **options)
        for more in (
            {"softcap": 3.0},
            {"sinks": q[0, :, 0, 0]},
            {"return_lse": True},
            {"prefix": prefix},
        ):
            flashproto.attention_with_kv_cache(q, k, v, **options, **more)
    assert found == ["torch", *["reference"] * 4]
    seen = torch.compile(flashproto.attention_with_kv_cache, backend="eager")(q, k, v, **options)
    torch.testing.assert_close(seen, got)


SIZES = (700, 32, HEAD_DIMS) if ON_GPU else (150, 4, (16, 24))
FIRST = None if ON_GPU else "reference"  # the interpreter takes long for many queries


@pytest.mark.parametrize("index", range(120 if ON_GPU else 5))
def test_the_kernels_follow_the_definition(index: int, device: str, seed: int, monkeypatch) -> None:
    """Where there is no card, with the programs of one of some size."""
    poison(monkeypatch)
    generator = random.Random(seed)
    if not ON_GPU:
        count = generator.choice((1, 3, 20))
        monkeypatch.setattr(attention_split, "multiprocessors", lambda device: count)
        call_cache.forget()
    play(draw(generator, *SIZES), device, generator, "triton", first=FIRST)
    call_cache.forget()


@pytest.mark.parametrize("ragged", [False, True])
def test_whole_tiles_of_queries(ragged: bool, device: str, seed: int, monkeypatch) -> None:
    """As in a prefill, where nothing is merged."""
    monkeypatch.setattr(configs, "splits_cache", lambda *_: False)
    call_cache.forget()
    poison(monkeypatch)
    counts = ((5, 9), (4, 0)) if ragged else ((9, 9), (1, 1))
    options = {"causal": True, "scale": None, "window": (6, None), "sinks": True}
    problem = Problem(
        torch.float16, 2, 4, 2, 16, 24, 32, 16, counts, ragged=ragged, rope="halves", options=options
    )
    play(problem, device, random.Random(seed), "triton")
    call_cache.forget()


@pytest.mark.gpu
@pytest.mark.gib(8)
@pytest.mark.parametrize("eight", [0, 1, 2])
def test_long_sequences_in_pages(eight: int, seed: int) -> None:
    counts = ((1500, 1, 0, 700), (3, 3, 3, 3), (1, 1, 1, 1))
    options = {"causal": True, "scale": None}
    problem = Problem(
        torch.bfloat16,
        4,
        32,
        8,
        128,
        128,
        32768,
        64,
        counts,
        ragged=True,
        rope="halves",
        eight=eight,
        options=options,
    )
    play(problem, "cuda", random.Random(seed), "triton")


# --- what a call is ----------------------------------------------------------------------------------


class NothingIsRead(TorchDispatchMode):
    """Fails where the host would wait for what is in a tensor."""

    READS = ("_local_scalar_dense", "nonzero", "is_nonzero", "equal", "masked_select", "unique")

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = function.overloadpacket.__name__
        assert not name.startswith(self.READS), f"{function} reads a tensor"
        if name.startswith("index"):
            assert all(x is None or x.dtype != torch.bool for x in args[1]), (
                f"{function} reads a tensor"
            )
        if name in ("_to_copy", "copy_"):
            made = (kwargs or {}).get("device") or args[0].device
            assert torch.device(made).type == args[-1].device.type, f"{function} leaves the device"
        return function(*args, **(kwargs or {}))


READING = {
    "appending": {"rope": "halves"},
    "pages, a window, padding": {
        "page": 8,
        "padded": True,
        "indexed": True,
        "eight": 2,
        "options": {"causal": True, "scale": None, "window": (9, None), "sinks": True, "alibi": True},
    },
    "side by side behind a prefix": {"ragged": True, "prefix": 5, "rope": "neighbours"},
}


def small(seed: int, **fields: Any) -> Problem:
    options = {"causal": True, "scale": None}
    base = Problem(torch.float32, 2, 2, 1, 16, 16, 32, 0, ((7, 7), (1, 1)), options=options)
    return replace(base, **fields)


@pytest.mark.parametrize("impl", ["reference", "triton"])
@pytest.mark.parametrize("name", READING)
def test_nothing_is_read_by_the_host(name: str, impl: str, device: str, seed: int) -> None:
    """Under a mode that sees every operator; and on a GPU as PyTorch itself watches."""

    def call(*args: Any, **options: Any) -> Any:
        if options["impl"] != impl:
            return flashproto.attention_with_kv_cache(*args, **options)
        with NothingIsRead():
            made = flashproto.attention_with_kv_cache(*args, **options)
        if ON_GPU:
            torch.cuda.set_sync_debug_mode("error")
            try:
                keep = [x.clone() for x in made]
                made = flashproto.attention_with_kv_cache(*args, **options)
            finally:
                torch.cuda.set_sync_debug_mode("default")
            torch.testing.assert_close(made, tuple(keep), rtol=0, atol=0, equal_nan=True)
        return made

    play(small(seed, **READING[name]), device, random.Random(seed), impl, call, first=FIRST)


def test_a_mode_sees_reads() -> None:
    x = torch.ones(3)
    for read in (lambda: x[0].item(), lambda: x[x > 0], lambda: x.to("meta"), lambda: bool(x.any())):
        with pytest.raises(AssertionError), NothingIsRead():
            read()


@pytest.mark.slow
@pytest.mark.parametrize("name", ["pages, a window, padding", "side by side behind a prefix"])
def test_it_compiles_whole(name: str, device: str, seed: int) -> None:
    """In one graph, the writes into the cache included; other lengths compile nothing anew."""
    count = CompileCounterWithBackend("aot_eager")
    call = torch.compile(flashproto.attention_with_kv_cache, fullgraph=True, backend=count)
    problem = small(seed, counts=((2, 2), (2, 2), (2, 2)), **READING[name])
    try:
        play(problem, device, random.Random(seed), "triton", call)
        assert count.frame_count == 2  # with new tokens and without
    finally:
        torch.compiler.reset()


def test_the_ops_are_what_their_schemas_say(device: str) -> None:
    cache = [torch.zeros(2, 8, 1, 16, device=device) for _ in range(2)]
    new = [torch.randn(2, 1, 3, 16, device=device) for _ in range(2)]
    lengths = torch.tensor([2, 5], dtype=torch.int32, device=device)
    torch.library.opcheck(
        torch.ops.flashproto.append_kv_cache_,
        (*cache, None, None, *new, None, None, lengths, *[None] * 6, 0, False, False),
        test_utils=("test_schema", "test_faketensor"),
    )
    settings = ([0], [], "causal///", 0.25, "triton", 0, 0, False, 0)
    torch.library.opcheck(
        torch.ops.flashproto.attention_kv_cache,
        (new[0], *cache, lengths, *[None] * 10, [], *settings),
        test_utils=("test_schema", "test_faketensor"),
    )


@pytest.mark.gpu
@pytest.mark.parametrize("page", [0, 16])
def test_one_graph_serves_all_lengths(page: int, seed: int) -> None:
    generator = random.Random(seed)
    options = {"causal": True, "scale": None}
    counts = ((1,) * 3,) * 2
    problem = Problem(
        torch.bfloat16, 3, 8, 2, 64, 64, 2048, page, counts, rope="halves", options=options
    )
    state = Sequences(problem, "cuda", generator)
    made = next_call(state, counts[0])
    lengths = state.options["lengths"]
    options = state.options | {"lengths": lengths, "k": made.k, "v": made.v, "return_lse": True}

    def call() -> Any:
        return flashproto.attention_with_kv_cache(made.q, *state.caches, **options)

    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        replayed = call()
    for x in state.caches:
        x.normal_()
    for _ in range(20):
        wanted = [generator.choice((0, 1, 63, 64, generator.randrange(2047), 2047)) for _ in range(3)]
        lengths.copy_(torch.tensor(wanted))
        for x in (made.q, made.k, made.v):
            x.normal_()
        graph.replay()
        got = [x.clone() for x in replayed]
        for x, want in zip(got, reference_of(made, state, options), strict=True):
            torch.testing.assert_close(x.double(), want.double(), rtol=2e-2, atol=2e-2)


def reference_of(made: Any, state: Sequences, options: dict[str, Any]) -> Any:
    """By the reference in float64, on copies."""
    doubled = [x.double() for x in (made.q, *state.caches)]
    new = {n: options[n].double() for n in ("k", "v")}
    return flashproto.attention_with_kv_cache(*doubled, **options | new, impl="reference")


def test_gradients_are_refused(device: str) -> None:
    q, cache = torch.randn(1, 2, 1, 16, device=device), torch.randn(1, 8, 1, 16, device=device)
    lengths = torch.tensor([3], dtype=torch.int32, device=device)
    for tensors in ((q.clone().requires_grad_(), cache), (q, cache.clone().requires_grad_())):
        with pytest.raises(ValueError, match=r"there is no gradient. Call it under torch.no_grad"):
            flashproto.attention_with_kv_cache(tensors[0], tensors[1], cache, lengths=lengths)
        with torch.no_grad():
            flashproto.attention_with_kv_cache(tensors[0], tensors[1], cache, lengths=lengths)


def test_an_argument_that_is_differentiated_is_named(device: str) -> None:
    q, cache = torch.randn(1, 2, 1, 16, device=device), torch.randn(1, 8, 1, 16, device=device)
    lengths = torch.tensor([3], dtype=torch.int32, device=device)
    sinks = torch.nn.Parameter(torch.zeros(2, device=device))
    with pytest.raises(ValueError, match="cache: sinks is a tensor that requires grad"):
        flashproto.attention_with_kv_cache(q, cache, cache, lengths=lengths, sinks=sinks)
    with pytest.raises(ValueError, match="cache: q is a tensor with a tangent"):
        torch.func.jvp(
            lambda x: flashproto.attention_with_kv_cache(x, cache, cache, lengths=lengths), (q,), (q,)
        )


def test_what_is_written_lies_apart(device: str) -> None:
    """Caches in one memory are refused where they overlap and new tokens come, and only there."""
    q, k, v = (torch.randn(2, h, 1, 16, device=device) for h in (4, 2, 2))
    lengths = torch.tensor([3, 5], dtype=torch.int32, device=device)
    both = torch.zeros(2, 8, 2, 2, 40, device=device)
    call = flashproto.attention_with_kv_cache
    for x, y in (
        (both[..., 0, :16], both[..., 1, :16]),
        (both[..., 0, :16], both[..., 0, 16:32]),
        (both[:, ::2, :, 0, :16], both[:, 1::2, :, 0, :16]),
        (both[..., 0, :32:2], both[..., 0, 1:32:2]),
        (both[..., 0, 8:24], both[..., 0, :8]),
    ):
        call(q, x, y, lengths=lengths % 3, k=k, v=v[..., : y.shape[3]])
    cache, row = both[..., 0, :16], both[:1, ..., 0, :16].expand(2, -1, -1, -1)
    wrong = {
        "v_cache is in the memory of k_cache": [
            (cache, cache),
            (cache, both[..., 0, 8:24]),
            (both[..., 0, 8:24], cache),
        ],
        "k_cache is an expanded tensor": [(row, cache)],
        "v_cache is an expanded tensor": [(cache, row)],
    }
    for message, pairs in wrong.items():
        for x, y in pairs:
            with pytest.raises(ValueError, match=message):
                call(q, x, y, lengths=lengths, k=k, v=v)
            call(q, x, y, lengths=lengths)
    eight = [torch.zeros(2, 8, 2, 16, device=device).to(torch.float8_e4m3fn) for _ in "kv"]
    scale = torch.ones(2, 8, 2, device=device)
    with pytest.raises(ValueError, match="v_scale is in the memory of k_scale"):
        call(q, *eight, lengths=lengths, k=k, v=v, k_scale=scale, v_scale=scale)
    by_head = scale[0, 0]
    call(q, *eight, lengths=lengths, k=k, v=v, k_scale=by_head, v_scale=by_head)


@pytest.mark.parametrize("ragged", [False, True])
def test_tokens_without_room_are_dropped_where_lengths_are_not_looked_at(
    ragged: bool, device: str
) -> None:
    """As under a dispatch mode; the last slot is taken, and no other."""
    q, k = torch.randn(1, 4, 3, 16, device=device), torch.randn(1, 2, 3, 16, device=device)
    q, k = (x[0].transpose(0, 1) for x in (q, k)) if ragged else (q, k)
    lengths = torch.tensor([7], dtype=torch.int32, device=device)
    cu = torch.tensor([0, 3], dtype=torch.int32, device=device) if ragged else None
    for impl in ("reference", "triton"):
        caches = [torch.randn(1, 8, 2, 16, device=device) for _ in "kv"]
        before = [x.clone() for x in caches]
        with NothingIsRead():
            flashproto.attention_with_kv_cache(
                q, *caches, lengths=lengths, k=k, v=k, cu_seqlens_q=cu, impl=impl
            )
        first = k[0] if ragged else k[0, :, 0]
        for x, old in zip(caches, before, strict=True):
            torch.testing.assert_close(x, torch.cat([old[:, :7], first[None, None]], 1), rtol=0, atol=0)


@pytest.mark.parametrize("ragged", [False, True])
@pytest.mark.parametrize("page", [0, 4])
def test_tokens_without_room_leave_those_with_room_alone(page: int, ragged: bool, device: str) -> None:
    """A full sequence beside an empty one, whose first slot is the first of all memory."""
    lengths = torch.tensor([0, 8, 7], dtype=torch.int32, device=device)
    new = torch.randn(3, 2, 2, 16, device=device)  # [B, Hkv, n, D]
    cu = torch.tensor([0, 2, 4, 6], dtype=torch.int32, device=device) if ragged else None
    given = new.transpose(1, 2).flatten(0, 1) if ragged else new
    table = torch.arange(6, dtype=torch.int32, device=device).view(3, 2) if page else None
    old = torch.randn(3, 8, 2, 16, device=device)
    wanted = old.clone()
    wanted[0, :2], wanted[2, 7] = new[0].transpose(0, 1), new[2, :, 0]
    for impl in ("reference", "triton"):
        caches = [old.clone().view(6, 4, 2, 16) if page else old.clone() for _ in "kv"]
        with NothingIsRead():
            flashproto.attention_with_kv_cache(
                given, *caches, lengths=lengths, k=given, v=given, page_table=table, cu_seqlens_q=cu,
                impl=impl,
            )  # fmt: skip
        for x in caches:
            torch.testing.assert_close(x.view(wanted.shape), wanted, rtol=0, atol=0)


@pytest.mark.parametrize("by_token", [False, True])
def test_the_reference_takes_caches_side_by_side_through_vmap(by_token: bool, device: str) -> None:
    """With tokens behind the last sequence, and sequences without one."""
    q, k = torch.randn(3, 5, 4, 16, device=device), torch.randn(3, 5, 2, 16, device=device)
    ints = {"dtype": torch.int32, "device": device}
    lengths = torch.randint(0, 3, (3, 2), **ints)
    cu = torch.tensor([[0, 2, 5], [0, 0, 4], [0, 0, 0]], **ints)
    cache = torch.randn(2, 3, 2, 9, 2, 16, device=device)
    scales = torch.ones(2, 3, 2, 9, 2, device=device)

    def call(q, k, lengths, cu, keys, values, k_scale, v_scale):
        given = {"lengths": lengths, "k": k, "v": -k, "cu_seqlens_q": cu, "impl": "reference"}
        given |= {"k_scale": k_scale, "v_scale": v_scale} if by_token else {}
        return flashproto.attention_with_kv_cache(q, keys, values, **given)

    def made() -> list[Tensor]:
        kept = cache.to(torch.float8_e4m3fn) if by_token else cache.clone()
        return [q, k, lengths, cu, *kept, *scales.clone()]

    batched, single = made(), made()
    out = torch.vmap(call)(*batched)
    want = torch.stack([call(*(x[i] for x in single)) for i in range(3)])
    torch.testing.assert_close(out, want)
    for x, y in zip(batched, single, strict=True):
        torch.testing.assert_close(x.float(), y.float(), rtol=0, atol=0)


@pytest.mark.parametrize("ragged", [False, True])
def test_tensors_without_memory_have_the_shapes_of_a_result(ragged: bool) -> None:
    q, k = torch.empty(2, 4, 3, 16, device="meta"), torch.empty(2, 2, 3, 16, device="meta")
    caches = [torch.empty(2, 8, 2, n, device="meta") for n in (16, 24)]
    given = {"lengths": torch.empty(2, dtype=torch.int32, device="meta"), "return_lse": True}
    v = k.new_empty(2, 2, 3, 24)
    if ragged:
        q, k, v = (x[0].transpose(0, 1) for x in (q, k, v))
        given["cu_seqlens_q"] = torch.empty(3, dtype=torch.int32, device="meta")
    out, lse = flashproto.attention_with_kv_cache(q, *caches, k=k, v=v, **given)
    assert out.shape == (*q.shape[:-1], 24) and out.dtype == q.dtype
    assert lse.shape == ((4, 3) if ragged else (2, 4, 3)) and lse.dtype == torch.float32


SHARED = {
    "cache_index is one that puts several new tokens into slot 3 of row 0": {
        "cache_index": [0, 0],
        "lengths": [3, 2],
    },
    "page_table is one that puts several new tokens into slot 1 of page 2": {
        "page_table": [[0, 2], [1, 2]],
        "lengths": [8, 9],
    },
    "k_scale is 0.0 at [1]": {"k_scale": [1.0, 0.0]},
    "v_scale is nan at [0]": {"v_scale": [math.nan, 1.0]},
}


@pytest.mark.parametrize("message", SHARED)
def test_what_new_tokens_cannot_have_is_refused_in_the_checked_mode(
    message: str, device: str, monkeypatch
) -> None:
    monkeypatch.setattr(reading, "CHECKED", True)
    q, k, v = (torch.randn(2, h, 2, 16, device=device) for h in (4, 2, 2))
    eight = "scale" in message
    cache = [torch.zeros(3, 8, 2, 16, device=device) for _ in "kv"]
    right: dict[str, Any] = {"lengths": [3, 5], "cache_index": [0, 2]}
    if "page" in message:  # shared, but not where new tokens are put
        right = {"page_table": [[0, 2], [0, 1]], "lengths": [8, 8]}
    if eight:
        cache = [x.to(torch.float8_e4m3fn) for x in cache]
        right |= {"k_scale": [1.0, 0.5], "v_scale": [2.0, 1.0]}

    def call(given: dict[str, Any], **new: Tensor) -> None:
        made = {
            n: torch.tensor(x, dtype=torch.float32 if "scale" in n else torch.int32, device=device)
            for n, x in given.items()
        }
        flashproto.attention_with_kv_cache(q, *cache, **made, **new)

    call(right, k=k, v=v)
    with pytest.raises(ValueError, match=re.escape(message)):
        call(right | SHARED[message], k=k, v=v)
    if not eight:
        call(right | SHARED[message])


@pytest.mark.parametrize("behind", ["", "a prefix"])
@pytest.mark.parametrize("impl", ["reference", "triton"])
def test_autocast_leaves_a_cache_of_float32_to_float32(impl: str, behind: str, device: str) -> None:
    q, k, v = (torch.randn(2, h, 1, 16, device=device) for h in (4, 2, 2))
    caches = [torch.randn(2, 8, 2, 16, device=device) for _ in "kv"]
    prefix = torch.randn(2, 5, 2, 16, device=device)
    lengths = torch.tensor([3, 5], dtype=torch.int32, device=device)

    def call(dtype: torch.dtype, **options: Any) -> Tensor:
        new = [x.to(dtype) for x in (q, *caches, k, v, *prefix)]
        given = {"k": new[3], "v": new[4], "prefix": new[5:] if behind else None} | options
        return flashproto.attention_with_kv_cache(*new[:3], lengths=lengths, **given)

    exact = call(torch.float64)
    with torch.autocast(device, torch.bfloat16):
        out = call(torch.float32, impl=impl)
        lse = flashproto.attention(q, k, v, return_lse=True, impl=impl)[1]
    torch.testing.assert_close(out.double(), exact, rtol=1e-5, atol=1e-5)
    low = [x.bfloat16().double() for x in (q, k, v)]
    torch.testing.assert_close(
        lse.double(), flashproto.attention(*low, return_lse=True)[1], rtol=1e-5, atol=1e-5
    )


@pytest.mark.parametrize("cache", [torch.float32, torch.float16])
def test_autocast_leaves_the_dtype_of_the_cache_to_torchs_operator(cache: torch.dtype) -> None:
    q, k, v = (torch.randn(2, h, 1, 16) for h in (4, 2, 2))
    caches = [torch.randn(2, 8, 2, 16).to(cache) for _ in "kv"]
    lengths = torch.tensor([3, 5], dtype=torch.int32)
    call = functools.partial(flashproto.attention_with_kv_cache, lengths=lengths, impl="torch")
    want = call(q.to(cache), *caches, k=k.to(cache), v=v.to(cache))
    with torch.autocast("cpu", torch.bfloat16):
        out = call(q, *caches, k=k, v=v)
    torch.testing.assert_close(out, want, rtol=0, atol=0)


@pytest.mark.parametrize("impl", ["reference", "triton"])
def test_autocast_gives_all_tensors_the_dtype_of_the_cache(impl: str, device: str) -> None:
    q, k, v = (torch.randn(2, h, 1, 16, device=device) for h in (4, 2, 2))
    caches = [torch.randn(2, 8, 2, 16, device=device).half() for _ in "kv"]
    given = {"lengths": torch.tensor([3, 5], dtype=torch.int32, device=device), "impl": impl}
    prefix = torch.randn(2, 5, 2, 16, device=device)
    call = flashproto.attention_with_kv_cache
    want = call(q.half(), *caches, k=k.half(), v=v.half(), prefix=[*prefix.half()], **given)
    with torch.autocast(device, torch.bfloat16):
        out = call(q, *caches, k=k, v=v, prefix=[*prefix], **given)
    torch.testing.assert_close(out, want, rtol=0, atol=0)


@pytest.mark.parametrize("by_token", [False, True])
def test_8_bits_take_queries_and_scales_that_float16_does_not_hold(by_token: bool, device: str) -> None:
    q = torch.randn(2, 4, 3, 16, device=device).bfloat16()
    k_cache, v_cache = (torch.randn(2, 150, 2, 16, device=device).to(torch.float8_e4m3fn) for _ in "kv")
    shape = (2, 150, 2) if by_token else (2,)
    k_scale = torch.rand(shape, device=device) + 0.1
    v_scale = 2.0 ** torch.randint(-60, 60, shape, device=device)
    lengths = torch.tensor([150, 70], dtype=torch.int32, device=device)
    given = {"lengths": lengths, "k_scale": k_scale, "v_scale": v_scale, "return_lse": True}
    call = flashproto.attention_with_kv_cache
    exact, exact_lse = call(q.float(), k_cache, v_cache, scale=0.25, impl="reference", **given)
    out, lse = call(q * 2.0**40, k_cache, v_cache, scale=0.25 * 2.0**-40, impl="triton", **given)
    torch.testing.assert_close(lse, exact_lse, rtol=1e-5, atol=1e-5)
    largest = exact.abs().amax(-1, keepdim=True)
    torch.testing.assert_close(out.float() / largest, exact / largest, rtol=0, atol=1e-2)


OUT_OF_RANGE = {
    "lengths is 40 at": {"lengths": [40]},
    "lengths is -1 at [0]; it takes 0 or more keys. Count": {"lengths": [-1]},
    "page_table is 9 at [0, 1]": {"page_table": [[0, 9, 99, 99]]},
    "page_table is -1 at [0, 0]": {"page_table": [[-1, 1, 99, 99]]},
    "cache_index is 1": {"cache_index": [1]},
    "starts is 20": {"starts": [20]},
}


@pytest.mark.parametrize("message", OUT_OF_RANGE)
def test_what_is_out_of_range_is_refused_in_the_checked_mode(
    message: str, device: str, monkeypatch
) -> None:
    monkeypatch.setattr(reading, "CHECKED", True)
    q, cache = torch.randn(1, 2, 1, 16, device=device), torch.randn(9, 8, 1, 16, device=device)
    right = {"lengths": [15], "page_table": [[3, 1, 99, 99]]}

    def call(given: dict[str, Any]) -> None:
        ints = {n: torch.tensor(x, dtype=torch.int32, device=device) for n, x in given.items()}
        flashproto.attention_with_kv_cache(q, cache, cache, **ints)

    call(right)
    with pytest.raises(ValueError, match=re.escape(message)):
        call(right | OUT_OF_RANGE[message])


@pytest.mark.parametrize("impl", ["reference", "triton"])
def test_a_pool_without_pages(impl: str, device: str) -> None:
    """Its table names pages that no sequence has a key in."""
    q, pool = torch.randn(2, 4, 3, 16, device=device), torch.empty(0, 16, 2, 16, device=device)
    table = torch.zeros(2, 5, dtype=torch.int32, device=device)
    out, lse = flashproto.attention_with_kv_cache(
        q, pool, pool, lengths=table[:, 0], page_table=table, return_lse=True, impl=impl
    )
    assert out.eq(0).all() and lse.eq(-math.inf).all()


@pytest.mark.parametrize("impl", ["triton", "reference"])
@pytest.mark.parametrize("paged", [False, True])
def test_adding_no_tokens_changes_nothing(impl: str, paged: bool, device: str) -> None:
    q, cache = torch.randn(2, 2, 1, 16, device=device), torch.randn(4, 8, 1, 16, device=device)
    given = {"lengths": torch.tensor([3, 0], dtype=torch.int32, device=device), "impl": impl}
    if paged:
        given["page_table"] = torch.tensor([[2], [1]], dtype=torch.int32, device=device)
    keys, values = (cache.clone()[: None if paged else 2] for _ in range(2))
    before, none = keys.clone(), torch.randn(2, 1, 0, 16, device=device)
    wanted = flashproto.attention_with_kv_cache(q, keys, values, **given)
    got = flashproto.attention_with_kv_cache(q, keys, values, k=none, v=none, **given)
    assert torch.equal(got, wanted)
    assert torch.equal(keys, before) and torch.equal(values, before)


# --- attention without a cache -----------------------------------------------------------------------

SPLIT = [n for n in FEATURES if n not in ("first_keys", "dropout", "max_score", "entropy")]
SETS = [("causal",), ("window", "sinks", "intervals"), ("top_left", "alibi", "softcap"), ("documents",)]


@pytest.mark.parametrize("index", range(60 if ON_GPU else len(SETS)))
def test_split_keys_give_attention(index: int, device: str, seed: int, monkeypatch) -> None:
    """Gradients included, of which the backward knows nothing of splits."""
    poison(monkeypatch)
    generator = random.Random(seed)
    names = SETS[index] if index < len(SETS) else ()
    while not compatible(names) or not names:
        names = tuple(n for n in SPLIT if generator.random() < 0.3)
    problem = replace(
        variant_draw(generator, 3000 if ON_GPU else 150, 8 if ON_GPU else 3), causal=False
    )
    if not ON_GPU:
        problem = replace(problem, Sq=min(problem.Sq, 9), Sk=150, D=16, Dv=24)
    monkeypatch.setattr(configs, "attention_splits_keys", lambda *_: True)
    call_cache.forget()
    call = drawn(generator, problem, names, device)
    made = make(call, device)
    exact, plain = exact_and_eager(call, *made)
    with launches() as seen:
        got = run(call, *made, "triton")
    assert any(x.kernel == "attention_decode_kernel" for x in seen)
    assert_within_bound(got, exact, plain, call)
    call_cache.forget()


def test_where_keys_are_split() -> None:
    """Few queries with long keys; not where tiles of queries fill the card, nor what is not written."""
    causal = Kind(CAUSAL=True)

    def splits(*shape: int, kind: Kind = causal) -> bool:
        return configs.attention_splits_keys(kind, *shape, 132)

    assert splits(1, 32, 8, 1, 131072) and splits(16, 32, 8, 16, 8192) and splits(1, 8, 1, 512, 131072)
    assert not splits(4, 32, 8, 4096, 4096) and not splits(1, 64, 8, 512, 131072)
    assert not splits(1, 32, 8, 1, 512) and not splits(1, 32, 8, 1, 8192, kind=Kind(ENTROPY=True))
