"""flashproto.distributed in several processes, against one process in float64.

A case is one function that all processes run (tests/processes.py).  Shards are made of a whole problem
that all of them draw alike; what they give is put together again, and the first process compares it.
"""

from __future__ import annotations

import itertools
import json
import os
import random
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import processes
import pytest
import torch
import torch.distributed as dist
import variant_problem
from attention_problem import ATOL, Problem, error
from hypothesis import given, settings
from hypothesis import strategies as st
from operators import launches
from torch import Tensor
from torch.utils.checkpoint import checkpoint

import flashproto
from flashproto import backends, distributed, masks, reference
from flashproto.bench import ring
from flashproto.distributed.order import WHOLE, parts, pieces, ranges
from flashproto.distributed.sums import Merged, Sum
from flashproto.mask_values import Diagonals

Case = Callable[[], Any]
DEVICES = {"gloo": "cpu", "nccl": "cuda"}


def device() -> str:
    return DEVICES[dist.get_backend()]


# --- which queries meet which keys, without processes -------------------------------------------------


def positions_of(held: list[tuple[int, int]]) -> Tensor:
    return torch.cat([torch.arange(*at) for at in held])


def seen_by(band: Diagonals, i: Tensor, j: Tensor) -> Tensor:
    i, j = i[:, None], j[None, :]
    seen = (i >= 0) & (j >= 0)
    if band.high is not None:
        seen = seen & (j - i <= band.high)
    if band.low is not None:
        seen = seen & ((j - i >= band.low) | (j < band.first))
    return seen


def seen_in(part: Any) -> Tensor:
    """What a part's own band lets its queries see."""
    causal, offset, left, first = part.band
    Sq, Sk = (stop - start for start, stop in (part.queries, part.keys))
    low = None if left is None else offset - left
    return seen_by(Diagonals(offset if causal else None, low, first), *map(torch.arange, (Sq, Sk)))


bounds = st.one_of(st.none(), st.integers(0, 40))


@settings(max_examples=200)
@given(st.integers(1, 5), st.integers(1, 5), bounds, bounds, st.integers(0, 30))
def test_parts_have_each_visible_pair_once(
    size: int, chunk: int, right: int | None, left: int | None, first: int
) -> None:
    length = 2 * chunk
    band = Diagonals(right, None if left is None else -left, first if left is not None else 0)
    held = [ranges(rank, size, length) for rank in range(size)]
    assert sorted(torch.cat([positions_of(x) for x in held]).tolist()) == list(range(length * size))
    whole = [(0, length * size)]
    for own, keys in itertools.product(held, [*held, whole]):
        i, j = positions_of(own), positions_of(keys)
        times = torch.zeros(len(i), len(j), dtype=torch.int)
        for part in parts(own, keys, band):
            times[slice(*part.queries), slice(*part.keys)] += seen_in(part).int()
            assert part.band[2] is None or part.band[2] >= 0
            assert positions_of(pieces(keys, *part.keys)).tolist() == j[slice(*part.keys)].tolist()
        assert torch.equal(times, seen_by(band, i, j).int())


@pytest.mark.parametrize("size", [2, 3, 4, 8])
def test_causal_work_is_balanced_in_one_call_a_step(size: int) -> None:
    held = [ranges(rank, size, 12) for rank in range(size)]
    for step in range(size):
        works = []
        for rank in range(size):
            (part,) = parts(held[rank], held[(rank - step) % size], Diagonals(0, None, 0))
            assert (part.band == WHOLE) == (step > 0)
            works.append(int(seen_in(part).sum()))
        assert len(set(works)) == 1


@given(st.integers(2, 8), st.integers(1, 4), bounds, bounds)
def test_first_transfer_takes_in_every_rank(
    size: int, chunk: int, right: int | None, left: int | None
) -> None:
    """NCCL wants all ranks of a group in the first batch of sends that it makes."""
    band = Diagonals(right, None if left is None else -left, 0)
    held = [ranges(rank, size, 2 * chunk) for rank in range(size)]
    for step in range(1, size):
        pairs = [
            (rank, (rank - step) % size)
            for rank in range(size)
            if parts(held[rank], held[(rank - step) % size], band)
        ]
        if pairs:
            assert {rank for pair in pairs for rank in pair} == set(range(size))
            return


# --- sums, without processes -------------------------------------------------------------------------


def test_gradients_add_up_in_float32() -> None:
    total = Sum(torch.empty(1, 1, 4, 1, dtype=torch.bfloat16))
    for count in range(257):  # of bfloat16 512 + 1 is 512
        total.add((0, 4) if count == 0 else (1, 3), torch.full((1, 1, 2 + 2 * (count == 0), 1), 2.0))
    assert total.finish().flatten().tolist() == [2, 514, 514, 2]


by_kernel = pytest.mark.parametrize(
    "by_kernel",
    [False, pytest.param(True, marks=pytest.mark.skipif(not backends.HAS_TRITON, reason="no Triton"))],
)


@by_kernel
def test_parts_merge_to_attention(by_kernel: bool, device: str) -> None:
    """Of all keys and of some rows alone; rows without a key; scores far from zero.

    Rounding the lse of parts to float32 moves the weights of their outputs by as much."""
    q, k, v = (torch.randn(1, 2, 6, 8, device=device).double() for _ in range(3))
    q[:, :, 4] *= 300
    sinks, merged = torch.randn(2, device=device), Merged(q.float(), v.float(), by_kernel)

    def add(rows: tuple[int, int], keys: tuple[int, int], offset: int = 0) -> None:
        part = q[:, :, slice(*rows)], k[:, :, slice(*keys)], v[:, :, slice(*keys)]
        out, lse = reference.attention(*part, causal=True, causal_offset=offset)
        merged.add(rows, out.float(), lse.float())

    add((0, 6), (0, 2))
    add((2, 6), (2, 4))
    add((3, 6), (4, 6), -1)
    out, lse = merged.finish(sinks, torch.float32)
    exact_out, exact_lse = reference.attention(q, k, v, causal=True, sinks=sinks)
    moved = torch.finfo(torch.float32).eps * exact_lse.abs()[..., None] * v.abs().max()
    assert ((out - exact_out).abs() <= 1e-6 * (1 + exact_out.abs()) + moved).all()
    assert ((lse - exact_lse).abs() <= 1e-6 * (1 + exact_lse.abs())).all()


@by_kernel
def test_parts_of_16_bits_merge_in_float32(by_kernel: bool, device: str) -> None:
    """And are rounded once, at the end; by one kernel for each range of queries; rows that no part has
    see no key."""
    x = torch.empty(2, 3, 5, 8, dtype=torch.bfloat16, device=device)
    merged = Merged(x, x, by_kernel)
    rows = [(1, 5), (2, 5), (1, 5)]
    outs = [torch.randn_like(x) for _ in rows]
    lses = [torch.randn(2, 3, 5, device=device) for _ in rows]
    with launches() as seen:
        for at, out, lse in zip(rows, outs, lses, strict=True):
            merged.add(at, out[:, :, slice(*at)], lse[:, :, slice(*at)])
        out, lse = merged.finish(None, torch.bfloat16)
    assert [launch.kernel for launch in seen] == ["merge_parts_kernel"] * (3 if by_kernel else 0)
    for (first, _), own in zip(rows, lses, strict=True):
        own[:, :, :first] = -torch.inf
    exact, exact_lse = reference.merge_attention([x.double() for x in outs], [x.double() for x in lses])
    assert out.dtype == torch.bfloat16 and (out[:, :, 0] == 0).all()
    torch.testing.assert_close(out, exact.float().to(torch.bfloat16))
    torch.testing.assert_close(lse, exact_lse.float())


@pytest.mark.parametrize("shape", [(1, 2, 0, 8), (0, 2, 4, 8), (1, 2, 5, 8)])
@pytest.mark.parametrize("method", ["ring", "all_gather"])
def test_one_rank_is_attention(shape: tuple[int, ...], method: str) -> None:
    """Without a token, without a batch, of odd lengths, without a key."""
    keyless = masks.padding(torch.zeros(shape[0], dtype=torch.int32))
    leaves = [torch.randn(shape, requires_grad=True) for _ in range(3)]
    for options in ({}, {"causal": True, "window": (1, 0)}, {"mask": keyless}):
        made = []
        with processes.alone():
            run = partial(distributed.ring_attention, method=method)
            for function in (run, flashproto.attention):
                out, lse = function(*leaves, return_lse=True, impl="reference", **options)
                made.append([out, lse, *torch.autograd.grad(out.square().sum(), leaves)])
        assert all(error(*pair) < ATOL[torch.float32] for pair in zip(*made, strict=True))


def test_a_sink_of_nothing() -> None:
    """A sink of -inf has no gradient, as in attention; also where a row sees no key."""
    q, k, v = (torch.randn(1, 2, 4, 8) for _ in range(3))
    sinks = torch.tensor([-torch.inf, 0.5], requires_grad=True)
    with processes.alone():
        for mask in (masks.padding(torch.tensor([0])), None):
            made, wanted = (
                torch.autograd.grad(function(q, k, v, sinks=sinks, mask=mask).square().sum(), sinks)[0]
                for function in (distributed.ring_attention, flashproto.attention)
            )
            torch.testing.assert_close(made, wanted)


def test_norms_of_one_dimension() -> None:
    x, w, b = (torch.randn(8, requires_grad=True) for _ in range(3))
    with processes.alone():
        made, wanted = (
            torch.autograd.grad(of.layer_norm(x, *shape, w, b).square().sum(), (x, w, b))
            for of, shape in ((distributed, ()), (flashproto, (8,)))
        )
    torch.testing.assert_close(made, wanted)


def test_torch_compile_breaks_the_graph() -> None:
    """It gives the same, and fullgraph=True says why it cannot."""
    q = torch.randn(1, 2, 24, 8).requires_grad_()

    def step(q: Tensor) -> Tensor:
        return 2 * distributed.ring_attention(q + 1, q, q, causal=True, impl="reference")

    with processes.alone():
        (plain,) = torch.autograd.grad(step(q).sum(), q)
        (made,) = torch.autograd.grad(torch.compile(step, backend="eager")(q).sum(), q)
        assert torch.equal(made, plain)
        torch.compiler.reset()
        with pytest.raises(Exception, match="not traced"):
            torch.compile(step, backend="eager", fullgraph=True)(q)


# --- attention ---------------------------------------------------------------------------------------


SMALL = Problem(torch.float32, 2, 4, 2, 48, 48, 16, 24, causal=False)


def of_shards(call: variant_problem.Call, inputs: Any, gradients: Any, **options: Any) -> dict:
    """All results of ring_attention, put together again."""
    shards = [distributed.shard(x.detach(), 2).requires_grad_() for x in inputs]
    parameters = {n: x.detach().requires_grad_() for n, x in call.parameters.items()}
    given = call.options | parameters | options
    out, lse = distributed.ring_attention(*shards, return_lse=True, **given)
    found = variant_problem.with_gradients(
        {"out": out, "lse": lse}, shards, parameters, [distributed.shard(x, 2) for x in gradients]
    )
    for name in parameters:
        dist.all_reduce(found[f"d{name}"])
    return {n: x if n[1:] in parameters else distributed.unshard(x, 2) for n, x in found.items()}


def attention_case(names: Sequence[str], p: Problem, impl: str | None, method: str) -> None:
    generator = random.Random(torch.initial_seed())
    call = variant_problem.drawn(generator, p, names, device())
    inputs, gradients = variant_problem.make(call, device())
    found = of_shards(call, inputs, gradients, method=method, impl=impl)
    if dist.get_rank() == 0:
        exact, eager = variant_problem.exact_and_eager(call, inputs, gradients)
        variant_problem.assert_within_bound(found, exact, eager, call)


# What is asked for, and what is not as in the problem that is given.
FEATURES: dict[str, tuple[tuple[str, ...], dict[str, Any]]] = {
    "full": ((), {}),
    "causal": (("causal",), {}),
    "scale": (("causal",), {"scale": -0.2, "strides": "tokens first"}),
    "bfloat16": (("causal",), {"dtype": torch.bfloat16}),
    "window": (("causal", "window"), {"Sq": 80, "Sk": 80}),
    "left_window": (("left_window", "sinks"), {}),
    "right_window": (("right_window", "softcap"), {}),
    "first_keys": (("causal", "first_keys"), {}),
    "documents": (("causal", "documents"), {}),
    "padding": (("padding", "documents"), {}),
    "prefix": (("prefix",), {}),
    "tree": (("causal", "tree"), {}),
    "intervals": (("intervals", "window"), {}),
    "sinks": (("causal", "sinks"), {"Hkv": 4}),
    "softcap": (("causal", "softcap", "sinks"), {"Hkv": 1}),
}


def cases_of(p: Problem, impl: str | None) -> dict[str, Case]:
    made: dict[str, Case] = {}
    for (name, (names, changes)), method in itertools.product(FEATURES.items(), ("ring", "all_gather")):
        changed = replace(p, **changes)
        made[f"{name}, {method}"] = partial(attention_case, names, changed, impl, method)
    made["alibi"] = partial(attention_case, ("causal", "alibi"), p, impl, "all_gather")
    return made


def on_kernels(names: Sequence[str], p: Problem, method: str) -> None:
    """By the portable kernels, in Triton's interpreter."""
    import quick_interpreter  # which needs Triton

    quick_interpreter.install()
    attention_case(names, p, "triton", method)


KERNELS: dict[str, Case] = {
    "triton": partial(
        on_kernels,
        ("causal", "window", "documents", "softcap", "sinks"),
        replace(SMALL, dtype=torch.bfloat16, B=1, Hq=2, Hkv=1, Sq=24, Sk=24),
        "ring",
    ),
}
if os.environ.get("TRITON_INTERPRET") != "1" or not backends.HAS_TRITON:
    KERNELS = {}


def whole_documents() -> None:
    """Documents that lie in the chunks of one rank, and one that does not."""
    size = dist.get_world_size()
    p = replace(SMALL, Sq=16 * size, Sk=16 * size, causal=True)
    ids = torch.arange(2 * size, device=device()).repeat_interleave(8)
    ids[:12] = -1
    mask = masks.documents(ids)
    call = variant_problem.Call(p, (), {"causal": True, "mask": mask})
    inputs, gradients = variant_problem.make(call, device())
    found = of_shards(call, inputs, gradients, impl="reference")
    whole = [x.detach().double().requires_grad_() for x in inputs]
    exact = flashproto.attention(*whole, causal=True, mask=mask, return_lse=True, impl="reference")
    named = variant_problem.with_gradients(
        dict(zip(("out", "lse"), exact, strict=True)), whole, {}, gradients
    )
    for name, x in named.items():
        assert error(found[name], x) < ATOL[torch.float32], name


def narrow_window() -> None:
    """A window so narrow that most ranks have nothing for one another: what travels is what is seen."""
    size = dist.get_world_size()
    p = replace(SMALL, Sq=32 * size, Sk=32 * size, causal=True)
    sent = []
    send = dist.batch_isend_irecv

    def counted(operations: list[dist.P2POp]) -> Any:
        sent.extend(op.tensor.shape[2] for op in operations if op.op is dist.isend)
        return send(operations)

    call = variant_problem.drawn(random.Random(0), p, (), device())
    call = replace(
        call,
        options=call.options | {"window": (3, 0)},
        sees=(lambda o, b, h, i, j: (j <= i) & (j >= i - 3),),
    )
    inputs, gradients = variant_problem.make(call, device())
    dist.batch_isend_irecv = counted
    found = of_shards(call, inputs, gradients, impl="reference")
    dist.batch_isend_irecv = send
    # Keys and values of the two chunk ends, forward and backward, and their gradients.
    assert len(sent) <= 2 * 3 * 2
    assert set(sent) <= {3}
    if dist.get_rank() == 0:
        exact, eager = variant_problem.exact_and_eager(call, inputs, gradients)
        variant_problem.assert_within_bound(found, exact, eager, call)


def gradients_of_some() -> None:
    """Not all inputs want gradients; out has none, lse has one."""
    q, k, v = (distributed.shard(torch.randn(1, 2, 24, 8), 2) for _ in range(3))
    run = partial(distributed.ring_attention, causal=True, return_lse=True, impl="reference")
    results = []
    for wanted in ((0,), (1, 2), (0, 1, 2)):
        leaves = [x.clone().requires_grad_(i in wanted) for i, x in enumerate((q, k, v))]
        out, lse = run(*leaves)
        lse.sum().backward()
        assert all((x.grad is not None) == (i in wanted) for i, x in enumerate(leaves))
        results.append([x.grad for x in leaves])
    for part in results[:2]:
        for mine, all_of_them in zip(part, results[2], strict=True):
            assert mine is None or torch.equal(mine, all_of_them)
    assert not results[2][2].any()
    with torch.no_grad():
        assert torch.equal(run(q, k, v)[0], out)


def of_a_subgroup() -> None:
    """Ranks are those of the group, and other ranks have nothing to do with it."""
    rank, size = dist.get_rank(), dist.get_world_size()
    groups = [dist.new_group(range(start, start + size // 2)) for start in (0, size // 2)]
    own = groups[rank * 2 // size]
    torch.manual_seed(rank * 2 // size)
    q, k, v = (torch.randn(1, 2, 24, 8) for _ in range(3))
    shards = [distributed.shard(x, 2, own) for x in (q, k, v)]
    out = distributed.ring_attention(*shards, own, causal=True, impl="reference")
    exact = flashproto.attention(q, k, v, causal=True, impl="reference")
    assert error(distributed.unshard(out, 2, own), exact) < ATOL[torch.float32]


def checkpointed() -> None:
    """Activation checkpointing repeats the transfers."""
    leaves = [distributed.shard(torch.randn(1, 2, 24, 8), 2).requires_grad_() for _ in range(3)]
    run = partial(distributed.ring_attention, causal=True, impl="reference")

    def gradients(layer: Callable[..., Tensor]) -> list[Tensor | None]:
        for x in leaves:
            x.grad = None
        q, k, v = leaves
        layer(layer(q, k, v), k, v).square().sum().backward()
        return [x.grad for x in leaves]

    plain = gradients(run)
    for reentrant in (False, True):
        again = gradients(partial(checkpoint, run, use_reentrant=reentrant))
        assert all(map(torch.equal, again, plain))


def no_second_derivative() -> None:
    leaves = [distributed.shard(torch.randn(1, 2, 24, 8), 2).requires_grad_() for _ in range(3)]
    x = torch.randn(3, 8, requires_grad=True)
    for make, inputs in (
        (lambda: distributed.ring_attention(*leaves, impl="reference"), leaves),
        (lambda: distributed.layer_norm(x), [x]),
        (lambda: distributed.unshard(leaves[0], 2), leaves[:1]),
    ):
        gradients = torch.autograd.grad(make().square().sum(), inputs, create_graph=True)
        with pytest.raises(NotImplementedError, match="no second derivative"):
            sum(g.square().sum() for g in gradients).backward()


def refusals() -> None:
    """Errors come before anything travels."""
    size = dist.get_world_size()
    q, k, v = (torch.randn(1, 2, 6, 8) for _ in range(3))
    run = distributed.ring_attention
    slopes, odd = torch.ones(2), torch.randn(1, 2, 5, 8)
    for call, kind, words in (
        (lambda: run(odd, odd, odd), ValueError, f"a multiple of {2 * size}.*Pad the sequence to"),
        (lambda: run(q, odd, odd), ValueError, "k is of 5 tokens; it takes those of q, 6"),
        (lambda: run(q, k, v, alibi_slopes=slopes), ValueError, "method='all_gather'"),
        (lambda: run(q, k, v, method="star"), ValueError, "'ring' or 'all_gather'"),
        (lambda: run(q, k, v, mask=masks.documents(torch.zeros(6).int())), ValueError, "keys"),
        (lambda: run(q, k, v, impl="torch"), backends.BackendError, "does not return lse"),
        (lambda: run(q, k, v, "cp"), TypeError, "ProcessGroup"),
        (lambda: distributed.shard(odd, 2), ValueError, f"a multiple of {2 * size}"),
        (lambda: distributed.layer_norm(q, torch.ones(5)), ValueError, "weight"),
        (lambda: torch.vmap(lambda x: run(x, k, v))(q[None]), NotImplementedError, "q is inside a tr"),
        (lambda: torch.vmap(distributed.rms_norm)(q), NotImplementedError, "x is inside a transform"),
        (
            lambda: torch.func.jvp(lambda x: distributed.unshard(x, 2), (q,), (q,)),
            NotImplementedError,
            "in forward mode",
        ),
    ):
        with pytest.raises(kind, match=words):
            call()
    if size == 2:
        mine = dist.new_group([0])
        if dist.get_rank() == 1:
            with pytest.raises(TypeError, match="that this rank is in"):
                run(q, k, v, mine)


def order() -> None:
    size = dist.get_world_size()
    x = torch.arange(8 * size)[None].expand(3, -1)
    own = distributed.shard(x, -1)
    assert torch.equal(own[0], distributed.positions(8 * size))
    assert torch.equal(distributed.unshard(own, 1), x)
    leaf = torch.randn(2, 4).requires_grad_()
    weight = torch.randn(2, 4 * size)
    (distributed.unshard(leaf, 1) * weight).sum().backward()
    assert torch.allclose(leaf.grad, size * distributed.shard(weight, 1))


def bench() -> None:
    """python -m flashproto.bench ring, which raises where a result is wrong."""
    sizes = "--tokens=64 --heads=4 --kv-heads=2 --head-dim=16 --rows=16 --repeats=1 --impl=reference"
    with tempfile.TemporaryDirectory() as folder:
        ring.main([*sizes.split(), f"--out={folder}"])
        if dist.get_rank() == 0:
            cell = json.loads((Path(folder) / "ring.json").read_text())["cells"]["64"]
            assert set(cell["passes"]) == set(ring.PASSES)
            assert set(cell["errors"]) == {"out", "lse", "dq", "dk", "dv"}
            assert set(cell["left_out"]) == set(ring.TORCH)  # which has no such kernels for a CPU


def autocast() -> None:
    q = distributed.shard(torch.randn(1, 2, 24, 8), 2)
    with torch.autocast("cpu", torch.bfloat16):
        made = distributed.ring_attention(q, q, q, causal=True, impl="reference")
    low = q.bfloat16()
    assert torch.equal(made, distributed.ring_attention(low, low, low, causal=True, impl="reference"))


# --- norms -------------------------------------------------------------------------------------------


def columns(x: Tensor) -> Tensor:
    """This rank's; the first rank has fewer than the others."""
    rank, size, N = dist.get_rank(), dist.get_world_size(), x.shape[-1]
    edges = [0, *(N * r // size - 1 for r in range(1, size)), N]
    return x[..., edges[rank] : edges[rank + 1]]


def norm_case(centered: bool, dtype: torch.dtype, mean: float, affine: bool) -> None:
    N = 40
    x = (torch.randn(2, 3, N, dtype=torch.float64) + mean).to(dtype)
    x, dy, weight, bias = (
        t.to(device()) for t in (x, torch.randn(2, 3, N).to(dtype), *torch.randn(2, N))
    )
    tensors = [x, weight, bias] if affine else [x]
    whole = [t.double().requires_grad_() for t in tensors]
    own = [columns(t).clone().requires_grad_() for t in tensors]

    def results(y: Tensor, leaves: list[Tensor], dy: Tensor) -> dict[str, Tensor]:
        grads = torch.autograd.grad(y, leaves, dy.to(y.dtype))
        return {"y": y.detach(), **dict(zip(("dx", "dweight", "dbias"), grads, strict=False))}

    exact_norm = flashproto.layer_norm if centered else flashproto.rms_norm
    exact_x, *others = whole
    named: dict[str, Any] = dict(zip(("weight", "bias"), others, strict=False))
    exact = results(exact_norm(exact_x, N, eps=1e-5, impl="reference", **named), whole, dy)
    norm = distributed.layer_norm if centered else distributed.rms_norm
    found = results(norm(*own, eps=1e-5), own, columns(dy))
    for name, value in found.items():
        allowed = ATOL[dtype] * max(exact[name].abs().max().item(), 1.0)
        assert error(value, columns(exact[name])) <= allowed, name


NORMS: dict[str, Case] = {
    f"{'layer' if centered else 'rms'}_norm {dtype} {mean}": partial(
        norm_case, centered, dtype, mean, affine
    )
    for centered, dtype, mean, affine in (
        (True, torch.float32, 0.0, True),
        (True, torch.float32, 1e4, True),
        (True, torch.bfloat16, 1.0, True),
        (False, torch.float32, 3.0, True),
        (False, torch.float16, 0.0, False),
    )
}


# --- in processes ------------------------------------------------------------------------------------

CASES = cases_of(SMALL, "reference") | NORMS | {f.__name__: f for f in (whole_documents, narrow_window)}
OTHERS: dict[str, Case] = {
    case.__name__: case
    for case in (
        gradients_of_some,
        of_a_subgroup,
        checkpointed,
        no_second_derivative,
        refusals,
        order,
        bench,
        autocast,
    )
}


def test_two_processes() -> None:
    processes.run(CASES | KERNELS | OTHERS, 2)


@pytest.mark.slow
def test_four_processes() -> None:
    processes.run(CASES | OTHERS, 4)


@pytest.mark.gpu
def test_two_gpus() -> None:
    """On the backends that are chosen there."""
    if torch.cuda.device_count() < 2:
        pytest.skip("needs two GPUs")
    p = replace(SMALL, dtype=torch.bfloat16, Sq=512, Sk=512, D=64, Dv=64)
    processes.run(CASES | cases_of(p, None), 2, backend="nccl", seconds=500)
