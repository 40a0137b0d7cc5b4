"""Masks that are neither bands nor intervals: their bits and tables, what kernels leave out by these,
and how long they are kept."""

from __future__ import annotations

import gc
import itertools
import random
import weakref
from dataclasses import replace
from typing import Any

import pytest
import torch
from attention_problem import Problem
from hypothesis import given, settings
from hypothesis import strategies as st
from operators import launches
from schedule_on_the_host import Pointer, blocks, ranges_on_the_host
from torch import Tensor
from variant_problem import assert_within_bound, drawn, exact_and_eager, make, run

import flashproto
from flashproto import masks
from flashproto.functional import mask_tables
from flashproto.functional.mask_tables import made_of, of_rules, of_tensors
from flashproto.kernels import schedule, scores
from flashproto.kernels.scores import Given, Head, Variables
from flashproto.mask_values import Places, Rule, rule_of_tensor
from flashproto.reference.mask_table import TILE, packed, unpacked
from flashproto.variant import Kind

pytest.importorskip("triton")
ON_GPU = torch.cuda.is_available()
MAKER = "mask_table_kernel"


# --- bits and tables --------------------------------------------------------------------------------

SHAPES = [(1, 1, 1, 1), (2, 1, 130, 128), (1, 3, 70, 260), (2, 2, 256, 131), (1, 1, 129, 31)]


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_bits_and_tables_are_what_they_say(shape: tuple[int, ...], seed: int) -> None:
    seen = blocks(random.Random(seed), shape)
    bits, table = packed(seen)
    assert torch.equal(unpacked(bits, *shape[2:]), seen)
    assert not unpacked(bits, bits.shape[2], 32 * bits.shape[3])[..., shape[2] :, :].any()
    for t, u in itertools.product(*map(range, table.shape[2:])):
        tile = seen[..., t * TILE : (t + 1) * TILE, u * TILE : (u + 1) * TILE].flatten(2)
        assert torch.equal(table[..., t, u], tile.any(-1).char() + tile.all(-1).char())


@pytest.mark.parametrize("how", ["plain", "transposed", "cut", "expanded", "odd"])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_the_kernel_makes_the_same(shape: tuple[int, ...], how: str, device: str, seed: int) -> None:
    B, H, Sq, Sk = shape
    x = blocks(random.Random(seed), (B, H, Sq + 8, Sk + 8), device)
    views = {
        "plain": x[:, :, :Sq, :Sk].contiguous(),
        "transposed": x[:, :, :Sq, :Sk].mT.contiguous().mT,
        "cut": x[:, :, 2 : 2 + Sq, 4 : 4 + Sk],
        "expanded": x[:, :1, :1, :Sk].expand(shape),
        "odd": x[:, :, 2 : 2 + Sq, 3 : 3 + Sk],
    }
    seen = views[how]
    with launches() as launched:
        got = made_of(rule_of_tensor(seen), Sq, Sk, B, H, seen.device, True)
    assert [x.kernel for x in launched] == [MAKER]
    for made, wanted in zip(got, packed(seen), strict=True):
        assert torch.equal(made, wanted)


def test_a_function_is_asked_for_all_pairs_in_parts(device: str, monkeypatch: Any) -> None:
    """Of more than one tile it sees no more than PAIRS together, each pair once; of batch entries and
    heads that it does not read there is one row."""
    monkeypatch.setattr(mask_tables, "PAIRS", 2 * 3 * TILE * TILE)
    asked: list[Places] = []

    def seen(at: Places) -> Tensor:
        asked.append(at)
        return (at.i + at.j + at.h) % 3 == 0

    Sq, Sk = 300, 700
    table = made_of(Rule("rule", seen), Sq, Sk, 2, 3, torch.device(device), True)
    assert table.bits.shape[:2] == table.table.shape[:2] == (1, 3)
    count = torch.zeros(Sq, Sk, dtype=torch.int64)
    for at in asked[1:]:  # the first one asks for the shape
        assert at.h.numel() * at.i.numel() * at.j.numel() <= mask_tables.PAIRS
        count[at.queries, at.keys] += 1
    assert (count == 1).all()
    h, i, j = (torch.arange(n) for n in (3, Sq, Sk))
    wanted = (i[:, None] + j + h[:, None, None]) % 3 == 0
    assert torch.equal(unpacked(table.bits, Sq, Sk)[0].cpu(), wanted)


# --- which tiles are visited ------------------------------------------------------------------------


TILES = ((16, 16), (64, 64), (64, 128), (128, 64), (32, 16), (128, 128))


@settings(max_examples=60)
@given(data=st.data(), sizes=st.sampled_from(TILES), seed=st.integers(0, 2**32))
def test_tiles_of_tables(data: st.DataObject, sizes: tuple[int, int], seed: int) -> None:
    """Beside bands and intervals: no visible pair in a tile that is left out, no hidden one in a clear
    one, neither of those that queries visit nor of those that keys do; and `visible` says which."""
    BM, BN = sizes
    Sq, Sk = (data.draw(st.integers(1, 400)) for _ in range(2))
    generator = random.Random(seed)
    seen = blocks(generator, (1, 1, Sq, Sk))
    bits, table = (Pointer(x.flatten()) for x in packed(seen))
    kind = Kind(data.draw(st.booleans()), data.draw(st.booleans()), INTERVALS=data.draw(st.booleans()))
    kind = replace(kind, TABLE=True)
    offset, left = data.draw(st.integers(-200, 200)), data.draw(st.integers(0, 300))
    given_ = Given(left=left, bits=bits, table=table, table_of_batch=0, table_of_head=0)
    begin = torch.tensor([generator.randrange(-5, Sq) for _ in range(Sk)])
    end = begin + generator.randrange(Sq + 5)
    i, j = torch.arange(Sq)[:, None], torch.arange(Sk)[None, :]
    pairs = seen[0, 0].clone()
    if kind.CAUSAL:
        pairs &= j <= i + offset
    if kind.WINDOW:
        pairs &= j >= i + offset - left
    if kind.INTERVALS:
        pairs &= (begin <= i) & (i < end)
    with pytest.MonkeyPatch.context() as monkeypatch:
        ranges_on_the_host(monkeypatch)
        monkeypatch.setattr(schedule, "query_range", schedule.query_range.fn)

        def program(t: int) -> None:
            at = torch.tensor(t)
            monkeypatch.setattr(schedule.tl, "program_id", lambda axis: at, raising=False)

        of_intervals = torch.zeros(4 * -(-Sk // BN), dtype=torch.int64)
        for t in range(-(-Sk // BN)):
            monkeypatch.setattr(
                schedule.tl, "program_id", lambda axis, t=t: torch.tensor(t), raising=False
            )
            schedule.intervals_kernel.fn(*map(Pointer, (begin, end, of_intervals)), Sk, BN)
        head = Head(
            begin=Pointer(begin),
            end=Pointer(end),
            diagonal=Sk - Sq,
            tiles=Pointer(of_intervals),
            bits=bits,
            table=table,
        )
        variables = Variables(given_, head)
        for j0 in range(0, Sk, BN):
            keys = torch.arange(j0, j0 + BN)[None, :]
            got = scores.visible.fn(i, keys, j0, Sk, offset, variables, kind)
            assert (
                torch.equal(got[:, : Sk - j0], pairs[:, j0 : j0 + BN]) and not got[:, Sk - j0 :].any()
            )
        for i0 in range(0, Sq, BM):
            found: dict[int, bool] = {}
            ranges = schedule.key_ranges.fn(i0, torch.tensor(Sk), offset, given_, BM, BN, kind)
            at = torch.tensor(0)
            while True:
                first, last, clear = schedule.next_run(
                    at, i0, Sq, torch.tensor(Sk), ranges, variables, BM, BN, kind
                )
                if first >= ranges[3]:
                    break
                found |= dict.fromkeys(range(int(first), int(last)), bool(clear))
                at = last
            for t in range(-(-Sk // BN)):
                tile = pairs[i0 : i0 + BM, t * BN : (t + 1) * BN]
                assert t in found or not tile.any()
                assert not found.get(t) or (tile.all() and (t + 1) * BN <= Sk)
                table_of_tile = table.memory.view(-1, -(-Sk // TILE))[i0 // TILE, t * BN // TILE]
                assert t not in found or table_of_tile > 0
        columns = torch.full((-(-Sk // BN) * (1 + -(-Sq // BM)),), -7)
        bands = replace(kind, INTERVALS=False, TABLE=False)
        for t in range(-(-Sk // BN)):
            monkeypatch.setattr(
                schedule.tl, "program_id", lambda axis, t=t: torch.tensor(t), raising=False
            )
            schedule.columns_kernel.fn(Pointer(columns), table, Sq, Sk, offset, given_, BM, BN, bands)
        given_ = given_._replace(columns=Pointer(columns))
        for j0 in range(0, Sk, BN):
            count, behind = schedule.listed_queries(-(-Sq // BM), 0, 0, j0, Sq, Sk, given_, BM, BN)
            assert behind >= Sq
            listed = [
                int(schedule.listed_queries(n, 0, 0, j0, Sq, Sk, given_, BM, BN)[1])
                for n in range(int(count))
            ]
            assert listed == sorted(set(listed))
            for i0 in range(0, Sq, BM):
                assert i0 in listed or not pairs[i0 : i0 + BM, j0 : j0 + BN].any()
                whole = table.memory.view(-1, -(-Sk // TILE))[i0 // TILE, j0 // TILE]
                assert i0 not in listed or whole > 0


# --- attention --------------------------------------------------------------------------------------

SMALL = Problem(torch.float32, 2, 4, 2, 140, 270, 16, 16, causal=False)


@pytest.mark.few(2)
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("rows", [(1, 1), (2, 1), (1, 4), (2, 4)], ids=str)
def test_tiles_of_all_kinds_against_float64(
    rows: tuple[int, int], causal: bool, device: str, seed: int
) -> None:
    """Of each head and of all together; query heads of a group have other tiles each."""
    p = SMALL
    x = blocks(random.Random(seed), (*rows, p.Sq, p.Sk), device)
    call = drawn(random.Random(seed), p, ["causal"] if causal else [], device)
    call.options["mask"] = masks.boolean(x)
    every = x.expand(p.B, p.Hq, p.Sq, p.Sk)
    call = replace(call, sees=(*call.sees, lambda o, b, h, i, j: every[b, h, i, j]))
    made = make(call, device)
    assert_within_bound(run(call, *made, "triton"), *exact_and_eager(call, *made), call)


COPIES = {
    "block_diffusion": (masks.block_diffusion(16), 130),
    "neighbourhood": (masks.neighbourhood(10, 14, (3, 5)), 140),
    "tokens beside a window": (masks.window(9) | masks.global_tokens(3), 150),
    "what a window hides": (~masks.window(9, 20), 150),
    "what two hide": (~(masks.causal() & masks.window(30)), 150),
}


@pytest.mark.parametrize("name", COPIES)
def test_other_masks_against_float64(name: str, device: str, seed: int) -> None:
    mask, S = COPIES[name]
    call = drawn(random.Random(seed), replace(SMALL, B=1, Hq=2, Hkv=1, Sq=S, Sk=S), [], device)
    call.options["mask"] = mask
    seen = mask.visible(S, S).to(device).view(S, S)
    call = replace(call, sees=(lambda o, b, h, i, j: seen[i, j],))
    made = make(call, device)
    assert_within_bound(run(call, *made, "triton"), *exact_and_eager(call, *made), call)


def test_what_neighbourhoods_and_copies_are() -> None:
    """By loops over places, and by the three parts of BD3-LM's mask."""
    height, width, kernel = 5, 6, (3, 4)
    seen = masks.neighbourhood(height, width, kernel).visible(30, 30)[0, 0]
    assert (seen.sum(-1) == 12).all()
    for r, c in itertools.product(range(height), range(width)):
        top = min(max(r - 1, 0), height - 3)
        start = min(max(c - 2, 0), width - 4)
        inside = [(a, b) for a in range(top, top + 3) for b in range(start, start + 4)]
        found = [divmod(int(x), width) for x in seen[r * width + c].nonzero()]
        assert found == inside
    n, block = 7, 3
    noisy, clean = range(n), range(n, 2 * n)
    seen = masks.block_diffusion(block).visible(2 * n, 2 * n)[0, 0]
    for i, j in itertools.product(range(2 * n), repeat=2):
        a, b = i % n // block, j % n // block
        diagonal = i in noisy and j in noisy and a == b
        offset = i in noisy and j in clean and a > b
        causal = i in clean and j in clean and a >= b
        assert bool(seen[i, j]) == (diagonal or offset or causal)


def test_unions_and_complements_that_are_bands_stay_bands(device: str) -> None:
    everything = masks.window(None, None)
    for mask, same in (
        (masks.causal() | masks.window(None, 3), masks.window(None, 3)),
        (masks.window(2, None) | masks.window(5, None), masks.window(5, None)),
        (~~masks.causal(), masks.causal()),
        (masks.Mask() | masks.boolean(torch.ones(2, 2) > 0), masks.Mask()),
    ):
        assert mask.bands == same.bands and mask.rule is None and not mask.parts
    assert (~masks.causal()).rule is None and (~masks.window(3, None)).rule is None
    assert everything.rule is None
    for mask in (~masks.causal(), ~masks.window(3, None), ~masks.causal(top_left=True)):
        assert torch.equal(mask.visible(6, 9), ~(~mask).visible(6, 9))
        q, k = (torch.randn(1, 1, n, 16, device=device) for n in (6, 9))
        got, wanted = (
            flashproto.attention(q, k, k, mask=mask, impl=x) for x in ("triton", "reference")
        )
        torch.testing.assert_close(got, wanted)


@pytest.mark.parametrize("impl", ["triton", "reference"])
def test_intervals_that_meet_a_table(impl: str, device: str) -> None:
    """The first call and those that find it."""
    ids = torch.arange(40, device=device) // 13
    for _ in range(3):
        seen = torch.rand(40, 40, device=device) < 0.7
        q, k, v = (torch.randn(1, 2, 40, 16, device=device) for _ in range(3))
        both = seen & (ids[:, None] == ids)
        got, want = (
            flashproto.attention(q, k, v, mask=mask, impl=x)
            for mask, x in (
                (masks.documents(ids) & masks.boolean(seen), impl),
                (masks.boolean(both), "reference"),
            )
        )
        torch.testing.assert_close(got, want, rtol=1e-3, atol=1e-3)


# --- what is kept -----------------------------------------------------------------------------------


def inputs(device: str, S: int = 40) -> list[Tensor]:
    return [torch.randn(1, 2, S, 16, device=device, requires_grad=True) for _ in "qkv"]


def made_by(call: Any) -> int:
    """How many tables a call makes."""
    with launches() as launched:
        call()
    return [x.kernel for x in launched].count(MAKER)


WAYS = {
    "boolean": lambda x: masks.boolean(x),
    "with a band": lambda x: masks.boolean(x) & masks.window(20),
    "union": lambda x: masks.boolean(x) | masks.window(0),
    "complement": lambda x: ~masks.boolean(x),
}


@pytest.mark.slow
@pytest.mark.parametrize("way", WAYS)
def test_a_table_is_made_once_for_layers_and_steps(way: str, device: str) -> None:
    """And anew when its tensor was written to, forward and backward the same."""
    q, k, v = inputs(device)
    x = torch.rand(40, 40, device=device) > 0.5
    mask = WAYS[way](x)

    def step() -> Tensor:
        y = q
        for layer in range(12):
            beside = masks.causal() if layer % 2 else masks.window(None, None)
            y = flashproto.attention(y, k, v, mask=mask & beside, impl="triton")
        y.sum().backward()
        return y

    assert made_by(step) == 1
    assert made_by(step) == 0
    before = flashproto.attention(q, k, v, mask=mask, impl="triton")
    x.logical_not_()
    assert made_by(step) == 1
    after = flashproto.attention(q, k, v, mask=mask, impl="triton")
    torch.testing.assert_close(
        after, flashproto.attention(q, k, v, mask=WAYS[way](x), impl="reference")
    )
    assert not torch.equal(before, after)


@pytest.mark.slow
def test_a_table_of_attn_mask_is_made_once(device: str) -> None:
    """Of the tensor, and of views that are cut from it anew."""
    q, k, v = inputs(device)
    x = torch.rand(1, 1, 48, 48, device=device) > 0.3
    whole = x[..., :40, :40].clone()

    def step(cut: bool) -> list[Tensor]:
        given = (x[..., :40, :40] if cut else whole for _ in range(12))
        made = [flashproto.scaled_dot_product_attention(q, k, v, mask) for mask in given]
        sum(made).sum().backward()
        return made

    for cut in (False, True):
        assert made_by(lambda: step(cut)) == 1  # noqa: B023
        assert made_by(lambda: step(cut)) == 0  # noqa: B023
    torch.testing.assert_close(step(False)[0], step(True)[0])
    whole.fill_(True)
    assert made_by(lambda: step(False)) == 1
    wanted = torch.nn.functional.scaled_dot_product_attention(q, k, v)
    torch.testing.assert_close(step(False)[0], wanted, rtol=1e-4, atol=1e-5)


def test_neither_tensors_nor_masks_are_kept_alive(device: str) -> None:
    q, k, v = inputs(device)
    x = torch.rand(40, 40, device=device) > 0.3
    y = torch.rand(40, 40, device=device) > 0.3
    mask = masks.boolean(y)
    function = masks.from_function(lambda b, h, i, j: (i + j) % 2 == 0)
    others = function & mask, mask | function
    out = flashproto.scaled_dot_product_attention(q, k, v, x)
    for one in (mask, function, *others):
        out = out + flashproto.attention(q, k, v, mask=one, impl="triton")
    gc.collect()
    counts = len(of_tensors), len(of_rules)
    dead = [weakref.ref(z) for z in (x, y, mask.rule, function.rule)]
    del x, y, mask, function, others, one
    gc.collect()
    assert [ref() for ref in dead] == [None] * 4
    assert len(of_tensors) == counts[0] - 2 and len(of_rules) == counts[1] - 3
    out.sum().backward()  # which has what it needs
    assert q.grad is not None and q.grad.isfinite().all()


def test_few_tables_of_one_mask_are_kept(device: str) -> None:
    mask = masks.dilated(9, 2)
    for S in range(20, 40):
        flashproto.attention(*inputs(device, S), mask=mask, impl="triton")
        assert mask.rule is not None and len(of_rules[mask.rule]) <= mask_tables.MOST


def test_tables_of_inference_are_followed_and_serve_training(device: str) -> None:
    """Tensors of inference mode have no version: nothing of them is kept."""
    q, k, v = inputs(device)
    mask = masks.from_function(lambda b, h, i, j: (i + j) % 2 == 0)
    with torch.inference_mode():
        x = torch.rand(40, 40, device=device) > 0.3
        own = masks.boolean(x)
        first = flashproto.attention(q, k, v, mask=own & mask, impl="triton")
        x.logical_not_()
        second = flashproto.attention(q, k, v, mask=own & mask, impl="triton")
    assert not torch.equal(first, second)
    out = flashproto.attention(q, k, v, mask=mask, impl="triton")
    assert all(g.isfinite().all() for g in torch.autograd.grad(out.sum(), (q, k, v)))


def test_other_masks_and_lengths_are_no_constants_of_a_kernel(device: str) -> None:
    """Nothing is compiled for another mask."""
    q, k, v = inputs(device)
    seen: list[set[Any]] = []
    for mask in (masks.dilated(9, 2), masks.boolean(torch.rand(40, 40, device=device) > 0.5)):
        with launches() as launched:
            flashproto.attention(q, k, v, mask=mask, impl="triton").sum().backward()
        if ON_GPU:
            pytest.skip("what a launch is given is seen under the interpreter")
        kernels = [x for x in launched if x.kernel != MAKER]
        seen.append(
            {
                (x.kernel, n, v)
                for x in kernels
                for n, v in x.arguments.items()
                if type(v) in (int, Kind)
            }
        )
    assert seen[0] == seen[1]


# --- compiled, and transforms -----------------------------------------------------------------------


def test_compiled_with_a_mask_made_outside_or_inside(device: str) -> None:
    x = torch.rand(40, 40, device=device) > 0.3
    outside = masks.boolean(x) | ~masks.window(5)
    q, k, v = inputs(device)

    def attend(q: Tensor, k: Tensor, v: Tensor, x: Tensor) -> Tensor:
        inside = masks.boolean(x) & masks.from_function(lambda b, h, i, j: i != j)
        y = flashproto.attention(q, k, v, mask=outside, causal=True, impl="triton")
        y = flashproto.attention(y, k, v, mask=inside, impl="triton")
        return flashproto.scaled_dot_product_attention(y, k, v, x)

    torch.compiler.reset()
    compiled = torch.compile(attend, fullgraph=True, backend="inductor" if ON_GPU else "aot_eager")
    results = []
    for function in (attend, compiled):
        out = function(q, k, v, x)
        results.append((out, *torch.autograd.grad(out.square().sum(), (q, k, v))))
    for got, wanted in zip(*results, strict=True):
        torch.testing.assert_close(got, wanted, rtol=1e-5, atol=1e-5)


def test_under_vmap_masks_may_be_batched(device: str) -> None:
    q, k, v = (torch.randn(3, 1, 2, 20, 16, device=device) for _ in "qkv")
    x = torch.rand(3, 20, 20, device=device) > 0.3

    def attend(q: Tensor, k: Tensor, v: Tensor, x: Tensor) -> Tensor:
        return flashproto.attention(q, k, v, mask=masks.boolean(x))

    got = torch.func.vmap(attend)(q, k, v, x)
    one_by_one = [
        flashproto.attention(*given, mask=masks.boolean(y), impl="reference")
        for *given, y in zip(q, k, v, x, strict=True)
    ]
    torch.testing.assert_close(got, torch.stack(one_by_one))


@pytest.mark.gpu
def test_a_graph_makes_the_table_of_what_the_tensor_holds() -> None:
    """Nothing is read on the host, in a graph or elsewhere; a replay follows the tensor."""
    q, k, v = (torch.randn(1, 2, 300, 64, device="cuda", dtype=torch.bfloat16) for _ in "qkv")
    leaves = [x.requires_grad_() for x in (q, k, v)]
    x = torch.rand(300, 300, device="cuda") > 0.3
    mask = masks.boolean(x) | masks.window(3)

    def step() -> tuple[Tensor, ...]:
        out = flashproto.attention(*leaves, mask=mask, impl="triton")
        out = out + flashproto.scaled_dot_product_attention(*leaves, x)
        return out, *torch.autograd.grad(out, leaves, torch.ones_like(out))

    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        step()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = step()
    for density in (0.1, 0.9):
        x.copy_(torch.rand(300, 300, device="cuda") < density)
        graph.replay()
        torch.cuda.synchronize()
        torch.cuda.set_sync_debug_mode("error")
        try:
            wanted = step()
        finally:
            torch.cuda.set_sync_debug_mode("default")
        for a, b in zip(captured, wanted, strict=True):
            assert torch.equal(a, b)


# --- what is refused --------------------------------------------------------------------------------

Q = torch.zeros(2, 4, 8, 16)
TRUE = torch.ones(8, 8, dtype=torch.bool)
REFUSED = {
    "a tensor of numbers": (lambda: masks.boolean(Q), "x is of dtype torch.float32"),
    "a list": (lambda: masks.boolean([True]), r"x is \[True\]"),
    "five dimensions": (lambda: masks.boolean(TRUE[None, None, None]), "x is of shape"),
    "no function": (lambda: masks.from_function(3), "function is 3"),
    "a function of numbers": (
        lambda: flashproto.attention(Q, Q, Q, mask=masks.from_function(lambda b, h, i, j: i - j)),
        "function is one that returns",
    ),
    "a function of one number": (
        lambda: flashproto.attention(Q, Q, Q, mask=masks.from_function(lambda b, h, i, j: True)),
        "function is one that returns",
    ),
    "other keys": (
        lambda: flashproto.attention(Q, Q[:, :, :5], Q[:, :, :5], mask=masks.boolean(TRUE)),
        "attention: mask is boolean.*, of 8 keys; it takes one of 5 keys",
    ),
    "other queries within a union": (
        lambda: flashproto.attention(Q[:, :, :5], Q, Q, mask=masks.boolean(TRUE) | masks.window(1)),
        "attention: mask is boolean.*, of 8 queries; it takes one of 5 queries",
    ),
    "another batch": (
        lambda: flashproto.attention(Q, Q, Q, mask=masks.boolean(TRUE.expand(3, 1, 8, 8))),
        "for a batch of 3 and 1 heads",
    ),
    "two batches": (
        lambda: flashproto.attention(
            Q,
            Q,
            Q,
            mask=masks.boolean(TRUE.expand(2, 1, 8, 8)) | masks.boolean(TRUE.expand(3, 1, 8, 8)),
        ),
        "masks: mask is",
    ),
    "another device": (
        lambda: flashproto.attention(Q, Q, Q, mask=~masks.boolean(TRUE.to("meta"))),
        "mask is on meta",
    ),
    "a copy and a half": (
        lambda: flashproto.attention(
            Q[:, :, :7], Q[:, :, :7], Q[:, :, :7], mask=masks.block_diffusion(2)
        ),
        r"mask is block_diffusion\(2\), for 7 queries and 7 keys",
    ),
    "another grid": (
        lambda: flashproto.attention(Q, Q, Q, mask=masks.neighbourhood(3, 3, 3)),
        "neighbourhood.*, of 9 queries; it takes one of 8 queries",
    ),
    "a window larger than the grid": (lambda: masks.neighbourhood(3, 9, 5), "kernel is 5"),
    "a kernel of three": (lambda: masks.neighbourhood(9, 9, (3, 3, 3)), "kernel is"),
    "a function of two": (lambda: masks.from_function(lambda i, j: i >= j), r"takes \(i, j\); .* four"),
    "a function as a mask": (
        lambda: flashproto.attention(Q, Q, Q, mask=lambda b, h, i, j: i >= j),
        r"Pass masks.from_function\(f\)",
    ),
    "a bias as a mask": (lambda: flashproto.attention(Q, Q, Q, mask=Q), "Pass bias= what is added"),
    "a boolean tensor as a mask": (
        lambda: flashproto.attention(Q, Q, Q, mask=TRUE),
        r"Pass masks.boolean\(x\)",
    ),
    "a tokenizer's mask": (lambda: masks.padding(TRUE), r"attention_mask.sum\(-1\)"),
    "no chunk": (lambda: masks.chunks(0), "size is 0"),
    "half a chunk": (lambda: masks.chunks(1.5), "size is 1.5"),
    "no token": (lambda: masks.global_tokens(0), "n is 0"),
    "no step": (lambda: masks.dilated(3, 0), "step is 0"),
    "no block": (lambda: masks.block_diffusion(0), "block is 0"),
    "sequences": (
        lambda: flashproto.attention_varlen(
            Q[0], Q[0], Q[0], *[torch.tensor([0, 4], dtype=torch.int32)] * 2, mask=masks.boolean(TRUE)
        ),
        "attention_varlen: mask is boolean",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_does_not_fit_is_refused(case: str) -> None:
    call, text = REFUSED[case]
    with pytest.raises((TypeError, ValueError), match=text) as caught:
        call()
    message = str(caught.value)
    assert "; it takes " in message and message.endswith(".") and "tensor(" not in message


def test_a_ring_refuses_tables_by_name() -> None:
    import torch.distributed as dist

    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        with pytest.raises(ValueError, match=r"ring_attention: mask is boolean.*; it takes bands and"):
            flashproto.distributed.ring_attention(Q, Q, Q, mask=masks.causal() & masks.boolean(TRUE))
    finally:
        dist.destroy_process_group()
