"""Sequences side by side in the Hopper backward: on the host what its launches are given, which tiles
meet and which memory they touch; on a GPU gradients against float64."""

from __future__ import annotations

import contextlib
import ctypes
import itertools
import random
from collections.abc import Callable, Iterator, Sequence
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from attention_problem import Problem
from rows import poison
from schedule_on_the_host import Pointer, load, ranges_on_the_host
from torch import Tensor
from variant_problem import (
    Call,
    Lengths,
    assert_within_bound,
    drawn,
    eager_packed,
    exact_and_eager,
    make_packed,
    starts,
    tokens_of_gapped,
    with_gaps,
    with_gradients,
)

import flashproto
from flashproto import configs
from flashproto.bench import first_calls
from flashproto.functional.attention_request import BOUNDARIES, attention_request
from flashproto.kernels import schedule, scores
from flashproto.kernels.hopper import attention_backward as main
from flashproto.kernels.hopper import attention_backward_masks as tile_masks
from flashproto.kernels.hopper import attention_backward_rows as rows
from flashproto.kernels.hopper import attention_backward_work as work
from flashproto.kernels.hopper.attention_backward_rows import DELTA, LSE
from flashproto.ops import attention as attention_op
from flashproto.ops import attention_hopper, recipe
from flashproto.variant import Kind, Variant, backward_backend

BRAIN = torch.bfloat16


def variant_of(call: Call, q: Tensor, cu: Sequence[Tensor | None]) -> Variant:
    """As attention_varlen has it; q [1, Hq, T, D]; cu: cu_seqlens, and seqused if it is given."""
    names = ("causal", "window", "mask", "softcap")
    options = {n: x for n, x in call.options.items() if n in names}
    options |= {n: x.detach() for n, x in call.parameters.items()}
    options |= zip(BOUNDARIES, cu, strict=False)
    options["lengths"] = 0, 0
    return attention_request("attention", q, q, q, **options).variant


def backward_recipe(
    variant: Variant, scale: float, impl: str, given: Sequence[Tensor | None]
) -> tuple[Any, tuple[Tensor | None, ...], list[str]]:
    """The backward's recipe of heads [1, H, T, D], its inputs, and the names of its results.

    given: dout, dlse, q, k, v, out and lse.
    """
    settings = attention_op.Settings(variant.form, scale, impl)
    dout, dlse, *heads, out, lse = given
    rows, tensors = (dout, dlse, out, lse), [*variant.tensors.values()]
    inputs = attention_op.backward_inputs(rows, *heads, tensors)
    names = list(variant.tensors)
    needs = (True, True, True, *(name == "sinks" for name in names))
    made = attention_op.attention.backward_recipe(inputs, settings, needs, False)
    return made, inputs, [f"d{name}" for name in ("q", "k", "v", *names)]


def gradients_of(
    variant: Variant, scale: float, impl: str, given: Sequence[Tensor | None]
) -> dict[str, Tensor]:
    """By the backward of `impl`, in the shapes that attention_varlen's tensors have."""
    made, inputs, names = backward_recipe(variant, scale, impl, given)
    found = dict(zip(names, made.execute(*inputs), strict=True))
    of_heads = {n: x[0].transpose(0, 1) for n, x in found.items() if n in ("dq", "dk", "dv")}
    return {n: x for n, x in found.items() if x is not None} | of_heads


# --- on the host ------------------------------------------------------------------------------------


@contextlib.contextmanager
def device_code_as_python() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        ranges_on_the_host(patch)
        language = SimpleNamespace(
            minimum=lambda a, b: min(int(a), int(b)),
            maximum=lambda a, b: max(int(a), int(b)),
            where=lambda c, x, y: x if c else y,
            cdiv=lambda a, b: -(-a // b),
            load=lambda pointer: (
                load(pointer) if pointer.memory.is_floating_point() else int(load(pointer))
            ),
            float32=torch.float32,
        )
        patch.setattr(work, "gl", language)
        patch.setattr(work, "RECORD", work.RECORD.value)
        patch.setattr(work, "key_tiles", work.key_tiles.fn)
        patch.setattr(tile_masks, "gl", language)
        patch.setattr(main, "BOUND", main.BOUND.value)
        patch.setattr(main, "tma_load", lambda descriptor, at, full, to: to.append((descriptor, at)))
        for name in ("sequence_of", "tokens_of"):
            patch.setattr(rows, name, getattr(schedule, name))
        patch.setattr(rows, "counts", scores.counts.fn)
        yield


def pointers(given: scores.Given) -> scores.Given:
    return scores.Given(*(Pointer(x.view(-1)) if isinstance(x, Tensor) else x for x in given))


def box(descriptor: Any, at: Sequence[int], memory: Sequence[tuple[int, int]]) -> Tensor:
    """What TMA brings of a box [..., R, D] of bfloat16: addresses modulo 2^64, which must lie within
    memory, [start, end) in bytes of each piece, and zeros past the bounds of the shape."""
    *_, R, D = descriptor.block_shape
    made = torch.zeros(R, D, dtype=BRAIN)
    at = [int(x) for x in at]
    assert all(-(2**31) <= x < 2**31 for x in at)
    assert all(0 < n < 2**32 for n in descriptor.shape)
    assert all(0 < 2 * s < 2**40 and s % 8 == 0 for s in descriptor.strides[:-1])
    for row in range(R):
        place = [*at[:-2], at[-2] + row, at[-1]]
        if all(0 <= x < n for x, n in zip(place, descriptor.shape, strict=True)):
            offset = sum(x * s for x, s in zip(place, descriptor.strides, strict=True))
            address = (descriptor.base.address + 2 * offset) % 2**64
            count = min(D, descriptor.shape[-1])
            assert any(low <= address and address + 2 * count <= high for low, high in memory)
            found = (ctypes.c_int16 * count).from_address(address)
            made[row, :count] = torch.frombuffer(found, dtype=torch.int16).view(BRAIN)
    return made.double()


class Item:
    """What the producer and the consumers make of work item t of the main kernel's arguments."""

    def __init__(self, t: int, given: dict[str, Any]) -> None:
        config, variables = given["CFG"], given["given"]
        NB, M, H, GROUP, BH, HG = (given[n] for n in ("NB", "M", "H", "GROUP", "BH", "HG"))
        place, hk, col, m0, m1, up = work.key_tile.fn(
            t, NB, M, H // GROUP, GROUP, BH, HG, given["offset"], variables, config
        )
        self.hk, self.col, self.config = hk, col, config
        b, self.key, self.keys, self.diagonal = work.keys_at.fn(
            place, given["Sk"], given["offset"], variables, config
        )
        b, *of_queries, stop, count = work.rows_at.fn(place, variables, config)
        self.of_queries, self.of_keys = of_queries, (stop, count)
        assert b == 0 and stop == self.key + self.keys and count in (0, self.keys)
        h0 = hk * GROUP
        began = h = work.first_head.fn(h0, col, GROUP, config)
        start = m = work.first_tile.fn(col, m0, M, up, config)
        produced = []
        for _ in range((m1 - m0) * GROUP):
            produced.append((h * M + m, m * config.BM + self.diagonal - col))
            h, m = work.next_tile.fn(h, m, h0, began, m0, m1, start, up, GROUP, config)
        tile = h0 * M + start
        low, high = m0 * config.BM + self.diagonal - col, m1 * config.BM + self.diagonal - col
        outer, begin, end, last_key = work.loops.fn(low, high, m0, m1, up, GROUP, config)
        self.steps = []
        for _ in range(outer):
            for index in range(begin, end, config.STEP):
                self.steps.append((tile, work.last_visible_key.fn(index, last_key, config)))
                tile = work.inner_step.fn(tile, M, config)
            tile, last_key = work.outer_step.fn(tile, last_key, m0, m1, M, up, GROUP, config)
        assert self.steps == produced and len(set(produced)) == len(produced) > 0

    def coordinates(self, descriptor: Any, h: int, row: int, ends: Sequence[int]) -> Any:
        """(descriptor, where its box is), as the producer asks for it."""
        asked: list[Any] = []
        main.load_rows.fn(descriptor, 0, h, row, *ends, None, asked, self.config)
        return asked[0]


def with_room(lengths: Lengths, gaps: Lengths) -> list[tuple[int, int]]:
    """The lengths of sequences with the gaps behind them."""
    return [(a + c, b + d) for (a, b), (c, d) in zip(lengths, gaps, strict=True)]


def used_of(lengths: Lengths) -> list[Tensor]:
    return [torch.tensor([n[side] for n in lengths], dtype=torch.int32) for side in (0, 1)]


def unwritten(x: Tensor, gaps: bool) -> bool:
    """Whether no kernel has written it: memory begins as NaN, that beside gaps as zeros."""
    return not x.any() if gaps else bool(x.isnan().all())


class Host:
    """Launches of the backward on the CPU: kernels of rows under the interpreter, the main kernel item
    by item, and the sums of dQ in the order of rows."""

    def __init__(self, inputs: Sequence[Tensor | None], numbers: bool) -> None:
        """numbers: whether gradients are worked out, or only which tiles meet."""
        self.numbers = numbers
        self.memory = [(x.data_ptr(), x.data_ptr() + x.nbytes) for x in inputs if x is not None]
        self.launched: list[str] = []
        self.met: list[tuple[int, int, int, int, int]] = []

    def launch(self, kernel: Any, programs: int, given: dict[str, Any], options: Any) -> None:
        name = kernel.__name__
        self.launched.append(name)
        if name == "attention_backward_kernel":
            with device_code_as_python():
                given = given | {"given": pointers(given["given"])}
                self.total = int(work.key_tiles(given["NB"], given["given"], given["CFG"]))
                self.total *= given["BH"]
                assert 0 < self.total <= given["NB"] * given["BH"] and programs >= 1
                for t in range(self.total):
                    self.work_on(Item(t, given), given)
        elif name == "postprocess_kernel":
            if self.numbers:
                with device_code_as_python():
                    self.store(given)
        elif self.numbers or "slots" in name or "order" in name:
            kernel[(programs,)](**given | ({"PDL": False} if "PDL" in given else {}))

    def work_on(self, item: Item, given: dict[str, Any]) -> None:
        config, M, kind = item.config, given["M"], item.config.KIND
        BM, BN = config.BM, config.BN
        there = min(item.keys - item.col, BN)
        assert there > 0 or (item.col == 0 and given["given"].seqused_k is not None)
        for tile, place in item.steps:
            self.met.append((tile // M, tile % M * BM, item.key + item.col, there, place))
        if not self.numbers:
            return
        k, v = (
            box(*item.coordinates(given[n], item.hk, item.col, item.of_keys), self.memory)
            for n in ("k_desc", "v_desc")
        )
        assert not k[there:].any() and not v[there:].any()
        dk, dv = torch.zeros_like(k), torch.zeros_like(v)
        scale, GROUP = given["scale"], given["GROUP"]
        sums = given["dq_ptr"].view(-1, BM, config.D)
        scratch = given["dq_ptr"].untyped_storage()
        made_here = [(scratch.data_ptr(), scratch.data_ptr() + scratch.nbytes())]
        for tile, place in item.steps:
            h, m = tile // M, tile % M
            assert item.hk == h // GROUP
            q, do = (
                box(*item.coordinates(given[n], h, m * BM, item.of_queries), self.memory)
                for n in ("q_desc", "do_desc")
            )
            terms = box(given["lse_delta_desc"], (tile * BM, 0), made_here)
            lse, delta = (terms[:, first : first + 3].sum(-1) for first in (LSE.value, DELTA.value))
            i, j = place + torch.arange(BM)[:, None], torch.arange(BN)[None, :]
            x = (q @ k.mT + lse[:, None]) * scale
            head = tile_masks.as_seen_from.fn(
                item.col, 0, h, given["given"], item.keys, item.diagonal, given["offset"], 0, config
            )
            if kind.ALIBI:
                x = x - head.slope * (i + head.diagonal - j).abs()
            mask = j < there
            if kind.CAUSAL:
                mask = mask & (j <= i)
            if kind.WINDOW:
                near = j >= i - given["given"].left
                mask = mask & (near | (j < head.first) if kind.FIRST else near)
            p = torch.exp(x).masked_fill(~mask, 0.0)
            ds = p * (do @ v.mT + delta[:, None])
            dv += p.mT @ do
            dk += ds.mT @ q * scale
            sums[tile] += (ds @ k).to(sums.dtype)
        for made, into in ((dk, given["dk_ptr"]), (dv, given["dv_ptr"])):
            own = into[0, item.hk, item.key + item.col : item.key + item.col + there]
            assert unwritten(own, given["given"].seqused_k is not None)
            own.copy_(made[:there, : own.shape[1]])

    def store(self, given: dict[str, Any]) -> None:
        BM, out = given["BM"], given["out_ptr"]
        variables = pointers(given["given"])
        sums = given["dq_ptr"].view(given["H"], given["tiles"], 64, -1)
        for tile in range(given["tiles"]):
            first = tile * 64
            r, there, _ = rows.rows_of_sequence.fn(first, first + torch.arange(64), variables, BM)
            for h in range(given["H"]):
                assert unwritten(out[0, h, r[there]], variables.seqused_q is not None)
                out[0, h, r[there]] = (sums[h, tile][there, : out.shape[3]] * given["scale"]).to(BRAIN)


def on_the_host(
    monkeypatch: pytest.MonkeyPatch,
    variant: Variant,
    scale: float,
    given: Sequence[Tensor | None],
    numbers: bool = True,
) -> tuple[Host, dict[str, Tensor]]:
    poison(monkeypatch)
    monkeypatch.setattr(attention_hopper, "multiprocessors", lambda device: 132)
    host = Host(given, numbers)
    monkeypatch.setattr(recipe, "launch", host.launch)
    return host, gradients_of(variant, scale, "hopper", given)


BANDS = (Kind(), Kind(True), Kind(WINDOW=True), Kind(True, True), Kind(True, True, True))


def random_lengths(generator: random.Random) -> list[tuple[int, int]]:
    """Some sequences of the sides' own lengths, of one token and of none."""
    sizes = (0, 0, 1, 5, 63, 64, 65, 128, 200, 300, generator.randrange(700))
    return [
        (generator.choice(sizes), generator.choice(sizes)) for _ in range(generator.randrange(1, 9))
    ]


@pytest.mark.parametrize("gaps", [False, True])
@pytest.mark.parametrize("band", BANDS, ids=lambda kind: kind.name)
@pytest.mark.parametrize("D", [64, 128, 256])
def test_each_tile_of_queries_meets_each_tile_of_keys_that_it_sees_once(
    D: int, band: Kind, gaps: bool, seed: int, device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each key tile of each head is one item, of one sequence; the steps of the producer and of the
    consumers are the same, each pair of tokens that see each other meets once, and none meets that of
    another sequence."""
    if device != "cpu":
        pytest.skip("the interpreter's kernels take the CPU's memory")
    generator = random.Random(seed)
    for _ in range(2):
        lengths, (more, more_k) = random_lengths(generator), (generator.choice((0, 70)), 1)
        whole = lengths
        if gaps:
            sizes = 0, 1, 60, 130
            own = [(generator.choice(sizes), generator.choice(sizes)) for _ in lengths]
            whole = with_room(lengths, own)
        T, Tk = (sum(n[side] for n in whole) for side in (0, 1))
        Hkv, GROUP = generator.choice(((1, 1), (2, 1), (2, 3)))
        shapes = ((1, Hkv * GROUP, T + more + 1, D), (1, Hkv, Tk + more_k, D))
        q, k = (torch.zeros(shape, dtype=BRAIN) for shape in shapes)
        left, first, moved = generator.randrange(200), generator.randrange(1, 200), 0
        if band.CAUSAL:
            moved = generator.choice((0, 0, 40))
        kind = Kind(band.CAUSAL, band.WINDOW, band.FIRST, VARLEN=True)
        named: dict[str, Any] = {"left": left} if kind.WINDOW else {}
        named |= {"first": first} if kind.FIRST else {}
        cu = starts(whole, "cpu")
        named |= zip(BOUNDARIES, [*cu, *(used_of(lengths) if gaps else ())], strict=False)
        variant = Variant(kind, moved, named)
        lse = torch.zeros(q.shape[:3])
        given = (q, None, q, k, k, q, lse)
        with monkeypatch.context() as patch:
            host, _ = on_the_host(patch, variant, 1.0, given, numbers=False)
        BM, BN = (getattr(configs.attention_backward_hopper(D, 1, kind), n) for n in ("BM", "BN"))
        slots_k = [n // BN + s for s, n in enumerate(cu[1].tolist())]
        tiles = sum(-(-Sk // BN) for _, Sk in (*lengths, (0, more_k)))
        if gaps and lengths[0][1] == 0:  # whose slot is taken, so that there is one
            tiles += 1
        assert host.total == tiles * Hkv and tiles <= slots_k[-1] + 1
        assert host.launched[:2] == ["key_slots_kernel", "order_kernel"]
        met = torch.zeros(Hkv * GROUP, T, Tk + more_k, dtype=torch.int32)
        slots = [n // BM + s for s, n in enumerate(cu[0].tolist())]
        for h, row, key, there, place in host.met:
            if there == 0:
                continue
            s = max(s for s, slot in enumerate(slots) if slot * BM <= row)
            of_keys = max(s for s, n in enumerate(cu[1].tolist()) if n <= key)
            while of_keys < len(lengths) and cu[1][of_keys + 1] == cu[1][of_keys]:
                of_keys += 1
            assert s == of_keys
            if s < len(lengths):
                Sq, Sk = lengths[s]
                i0 = row - slots[s] * BM
                j0 = key - int(cu[1][s])
                assert place == i0 + Sk - Sq + moved - j0
                i = int(cu[0][s]) + i0
                met[h, i : int(cu[0][s]) + min(i0 + BM, Sq), key : key + there] += 1
        wanted = torch.zeros(T, Tk + more_k, dtype=torch.bool)
        for s, (Sq, Sk) in enumerate(lengths):
            i, j = torch.arange(Sq)[:, None], torch.arange(Sk)[None, :]
            o = Sk - Sq + moved
            seen = (j <= i + o) if kind.CAUSAL else (j >= 0).expand(Sq, Sk)
            if kind.WINDOW:
                seen = seen & ((j >= i + o - left) | (j < (first if kind.FIRST else 0)))
            wanted[cu[0][s] : cu[0][s] + Sq, cu[1][s] : cu[1][s] + Sk] = seen
        assert not (met > 1).any() and met.bool()[:, wanted].all()


FEW = [(0, 3), (70, 90), (5, 0), (0, 0), (1, 1), (64, 128)]
NO_GAPS = [(0, 0)] * len(FEW)
GAPS = [(3, 2), (90, 10), (1, 4), (2, 3), (0, 70), (0, 0)]


@pytest.mark.parametrize("gaps", [NO_GAPS, GAPS], ids=["", "gaps"])
@pytest.mark.parametrize(
    ("names", "D"),
    [((), 64), (("causal", "sinks"), 128), (("window", "alibi"), 40), (("first_keys", "sinks"), 256)],
    ids=str,
)
def test_launches_on_the_host_give_the_gradients(
    names: tuple[str, ...],
    D: int,
    gaps: Lengths,
    seed: int,
    device: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """All that is done with sequences, from the launches' arguments to the boxes that TMA is asked for:
    gradients are those of float64, what is behind a sequence is not met and gets zeros, and each number
    is written once."""
    if device != "cpu":
        pytest.skip("the interpreter's kernels take the CPU's memory")
    p = Problem(BRAIN, 1, 2, 1, 100, 100, D, D, causal=False)
    call = drawn(random.Random(seed), p, names, "cpu")
    inputs, gradients = make_packed(call, FEW, (33, 20), "cpu")
    T, Tk = (sum(n[side] for n in FEW) for side in (0, 1))
    leaves = [x.detach().double().requires_grad_() for x in inputs]
    parameters = {n: x.detach().double().requires_grad_() for n, x in call.parameters.items()}
    exact = eager_packed(*leaves, parameters, call, FEW)
    dout, dlse = gradients
    dlse = torch.where(exact["lse"].isinf(), 0.0, dlse)
    wanted = with_gradients(
        {n: exact[n] for n in ("out", "lse")}, leaves, parameters, (dout.double(), dlse)
    )
    q, k, v = (x.detach().clone() for x in inputs)
    dout[T:] = torch.nan  # out is 0 there; with sinks they have an lse, whose gradient counts
    q[T:], k[Tk:], v[Tk:] = (torch.nan,) * 3
    out, lse = (exact[name].detach().float() for name in ("out", "lse"))
    boundaries: list[Tensor] = starts(FEW, "cpu")
    at, at_k = (tokens_of_gapped(FEW, gaps, (33, 20), side) for side in (0, 1))
    if gaps is GAPS:
        boundaries = [*starts(with_room(FEW, gaps), "cpu"), *used_of(FEW)]
        dout, q = (with_gaps(x, at, 0, torch.nan) for x in (dout, q))
        k, v = (with_gaps(x, at_k, 0, torch.nan) for x in (k, v))
        out, dlse = with_gaps(out, at, 0, 0.0), with_gaps(dlse, at, 1, torch.nan)
        lse = with_gaps(lse, at, 1, -torch.inf)
    heads = [x.transpose(0, 1)[None] for x in (dout, q, k, v, out)]
    given = (heads[0], dlse[None], *heads[1:4], heads[4].to(BRAIN), lse[None])
    variant = variant_of(call, heads[1], boundaries)
    host, got = on_the_host(monkeypatch, variant, D**-0.5, given)
    assert host.launched[:5] == [
        "key_slots_kernel",
        "order_kernel",
        "preprocess_kernel",
        "attention_backward_kernel",
        "postprocess_kernel",
    ]
    for name, own in (("dq", at), ("dk", at_k), ("dv", at_k)):
        others = torch.ones(got[name].shape[0], dtype=torch.bool)
        others[own] = False
        assert not got[name][others].any()
        got[name] = got[name][own]
    for name in got.keys() - (set() if names == ("causal", "sinks") else {"dsinks"}):
        torch.testing.assert_close(got[name].double(), wanted[name].double(), rtol=0.03, atol=0.03)
    assert not got["dq"][T:].any() and not got["dk"][Tk:].any() and not got["dv"][Tk:].any()


def test_sequences_that_are_all_gaps(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """There is an item, of no keys, and all gradients are zeros."""
    if device != "cpu":
        pytest.skip("the interpreter's kernels take the CPU's memory")
    call = drawn(random.Random(0), Problem(BRAIN, 1, 2, 1, 9, 9, 64, 64, causal=False), (), "cpu")
    q, k = (torch.full((1, H, T, 64), torch.nan, dtype=BRAIN) for H, T in ((2, 75), (1, 290)))
    out, lse = torch.zeros_like(q), torch.full((1, 2, 75), -torch.inf)
    boundaries = [*starts([(70, 90), (5, 200)], "cpu"), *used_of([(0, 0), (0, 0)])]
    variant = variant_of(call, q, boundaries)
    host, got = on_the_host(monkeypatch, variant, 0.125, (q, None, q, k, k, out, lse))
    assert host.total == 1 and host.met == [(0, 0, 0, 0, 0), (1, 0, 0, 0, 0)]
    assert not any(x.any() for x in got.values())


def test_where_gradients_of_sequences_are_computed() -> None:
    for kind in (Kind(VARLEN=True), Kind(True, True, True, False, 1, True, True, True, VARLEN=True)):
        assert backward_backend("hopper", kind) == "hopper"
        assert backward_backend("hopper", kind, ordered=True) == "triton"
    assert (
        backward_backend("hopper", Kind(ALIBI=True, VARLEN=True), wanted=["alibi_slopes"]) == "triton"
    )


def test_the_producer_waits_before_it_reads_how_many_tiles_there_are(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The launch begins before the one in front of it has ended: what was written before is visible to
    those alone who have waited."""

    class Read(Exception):
        pass

    waited = []

    def read(*given: Any) -> None:
        raise Read

    for name in ("make_mbarriers", "store_selector", "fence_async_shared", "static_sync"):
        monkeypatch.setattr(main, name, lambda *given: None)
    monkeypatch.setattr(main, "wait_for_launch_before", lambda: waited.append(True))
    monkeypatch.setattr(main, "key_tiles", read)
    monkeypatch.setattr(main, "first_item", read)
    config = configs.attention_backward_hopper(128, 1, Kind(True, VARLEN=True))
    with pytest.raises(Read):
        main.producer.fn((1,) * 26, config)
    assert waited


@pytest.mark.parametrize("tokens", [1, 2, 700])
def test_boxes_of_one_token_and_of_many(tokens: int) -> None:
    """Of each row of each sequence, whatever lies around it and whatever stride one token has."""
    memory = torch.randn(tokens, 3, 64).to(BRAIN)
    x = memory.transpose(0, 1)[None] if tokens > 1 else memory.as_strided((1, 3, 1, 64), (1, 64, 5, 1))
    shape, strides, sizes = attention_hopper.boxes_of_heads(x.shape, x.stride(), 32, 64, True)
    kept = [s if n > 1 else 2**23 for n, s in zip(shape, strides, strict=True)]
    descriptor = SimpleNamespace(
        shape=shape, strides=kept, block_shape=sizes, base=SimpleNamespace(address=x.data_ptr())
    )
    bounds = [(memory.data_ptr(), memory.data_ptr() + memory.nbytes)]
    bound = work.BOUND.value
    for start, stop in ((0, tokens), (tokens // 3, tokens // 2), (tokens, tokens)):
        for h, row in itertools.product(range(3), (0, 17, 320)):
            at = (bound, stop, h, bound - (stop - start) + row, 0)
            wanted = torch.zeros(32, 64, dtype=torch.float64)
            own = memory[start:stop, h][row : row + 32]
            wanted[: own.shape[0]] = own.double()
            assert torch.equal(box(descriptor, at, bounds), wanted)


# --- on a GPU ---------------------------------------------------------------------------------------

SETS = (
    (),
    ("causal",),
    ("causal", "sinks"),
    ("left_window", "softcap"),
    ("window", "sinks"),
    ("first_keys",),
    ("alibi",),
    ("right_window", "alibi"),
    ("causal", "softcap"),
    ("causal", "first_keys", "softcap", "sinks", "alibi"),
)
LENGTHS: dict[str, list[tuple[int, int]]] = {
    "a few": [(300, 300), (0, 7), (1, 1), (129, 129), (40, 0), (700, 400), (0, 0), (100, 1000)],
    "none": [],
    "whole tiles": [(n, n) for n in (128, 512, 256, 1024)],
    "many": [(n, n) for n in (128, 2000, 17, 256, 90, 1, 1000, 300, 64, 65) * 3],
    "windows of 49": [(49, 49)] * 200,
    "a short one": [(5, 900)],
    "a long one": [(900, 5)],
}


def packed_problem(D: int, Hq: int = 4, Hkv: int = 2, dtype: torch.dtype = BRAIN) -> Problem:
    return Problem(dtype, 1, Hq, Hkv, 300, 300, D, D, causal=False)


def compare(
    call: Call, lengths: Lengths, behind: tuple[int, int], rearranged: Callable[[Tensor], Tensor]
) -> None:
    """The backward's gradients against float64, of the forward on triton.  What is behind the last
    sequence is no number.

    rearranged: the same numbers in other memory.
    """
    print(call, lengths, behind)
    inputs, gradients = make_packed(call, lengths, behind, "cuda")
    dout, dlse = gradients
    exact, plain = exact_and_eager(call, inputs, gradients, lengths)
    T, Tk = (sum(n[side] for n in lengths) for side in (0, 1))
    q, k, v = (x.detach().clone() for x in inputs)
    if "sinks" not in call.names:
        dout[T:] = torch.nan  # with sinks they have an lse, and so a part in the sinks' gradient
    q[T:], k[Tk:], v[Tk:] = (torch.nan,) * 3
    dout, q, k, v = (rearranged(x.transpose(0, 1)[None]) for x in (dout, q, k, v))
    variant = variant_of(call, q, starts(lengths, "cuda"))
    scale = q.shape[3] ** -0.5
    settings = attention_op.Settings(variant.form, scale, "triton")
    inputs = (q, k, v, *variant.tensors.values())
    out, lse, *_ = attention_op.attention(inputs, settings, (0, 1))
    dlse = torch.where(lse.isinf(), 0.0, dlse[None])
    got = gradients_of(variant, scale, "hopper", (dout, dlse, q, k, v, out, lse))
    got.pop("dalibi_slopes", None)
    got |= {"out": out[0].transpose(0, 1), "lse": lse[0]}
    for name, more in (("dq", T), ("dk", Tk), ("dv", Tk)):
        assert not got[name][more:].any(), name
    assert_within_bound(got, {n: exact[n] for n in got}, {n: plain[n] for n in got}, call)


@pytest.mark.gpu
@pytest.mark.parametrize("behind", [(0, 0), (33, 20)])
@pytest.mark.parametrize("lengths", LENGTHS)
@pytest.mark.parametrize("names", SETS, ids="+".join)
@pytest.mark.parametrize("D", [64, 128, 256])
def test_gradients_of_sequences_against_float64(
    D: int,
    names: tuple[str, ...],
    lengths: str,
    behind: tuple[int, int],
    seed: int,
    hopper: None,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    if lengths == "none" and behind == (0, 0):
        pytest.skip("no token")
    poison(monkeypatch)
    call = drawn(random.Random(seed), packed_problem(D), names, "cuda")
    compare(call, LENGTHS[lengths], behind, lambda x: x)


@pytest.mark.gpu
@pytest.mark.parametrize("heads", [(1, 1), (6, 2), (8, 1), (40, 40)])
@pytest.mark.parametrize("D", [40, 96, 192])
def test_sequences_of_other_heads_and_padded_head_dims(
    D: int, heads: tuple[int, int], seed: int, hopper: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In float16, heads outside of tokens in memory; one query head has items of one step."""
    poison(monkeypatch)
    p = packed_problem(D, *heads, torch.float16)
    call = drawn(random.Random(seed), p, ("causal",), "cuda")
    compare(call, LENGTHS["a few"], (3, 1), Tensor.contiguous)
    compare(call, [(1, 1)], (0, 0), Tensor.contiguous)


@pytest.mark.gpu
@pytest.mark.parametrize("names", [("causal", "sinks"), ("causal", "left_window", "alibi")])
def test_gradients_of_sequences_through_the_function(
    names: tuple[str, ...], seed: int, hopper: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Those of slopes come from triton."""
    poison(monkeypatch)
    call = drawn(random.Random(seed), packed_problem(128), names, "cuda")
    lengths = LENGTHS["a few"]
    inputs, gradients = make_packed(call, lengths, (5, 3), "cuda")
    outputs = flashproto.attention_varlen(
        *inputs, *starts(lengths, "cuda"), **call.options, return_lse=True, impl="hopper"
    )
    got = with_gradients(
        dict(zip(("out", "lse"), outputs, strict=True)), inputs, call.parameters, gradients
    )
    assert_within_bound(got, *exact_and_eager(call, inputs, gradients, lengths), call)


@pytest.mark.gpu
@pytest.mark.parametrize("D", [64, 128, 256])
def test_gradients_of_one_sequence_do_not_meet_others(D: int, hopper: None) -> None:
    """Numbers that are none stay within theirs, and dk and dv are the same bits beside others."""
    q, k, v = (torch.randn(500, 2, D, device="cuda", dtype=BRAIN).requires_grad_() for _ in "qkv")
    dout = torch.randn_like(q)
    cu = torch.tensor([0, 100, 330, 500], dtype=torch.int32, device="cuda")

    def gradients() -> tuple[Tensor, ...]:
        out = flashproto.attention_varlen(q, k, v, cu, cu, causal=True, impl="hopper")
        return torch.autograd.grad(out, (q, k, v), dout)

    wanted = gradients()
    with torch.no_grad():
        q[100:330], k[100:330], v[100:330] = torch.nan, torch.inf, torch.nan
        dout[100:330] = -torch.inf
    got = gradients()
    for index, (a, b) in enumerate(zip(got, wanted, strict=True)):
        for own in (slice(0, 100), slice(330, 500)):
            if index:
                assert torch.equal(a[own], b[own])
            torch.testing.assert_close(a[own], b[own], atol=1e-2, rtol=2e-2)


@pytest.mark.gpu
@pytest.mark.parametrize("names", [(), ("causal", "left_window", "softcap")], ids="+".join)
@pytest.mark.parametrize("D", [64, 128, 256])
def test_the_same_bits_of_dk_and_dv_a_hundred_times(
    D: int, names: tuple[str, ...], seed: int, hopper: None
) -> None:
    """With programs that have no item, and with many items for each; dq differs by its last bits."""
    call = drawn(random.Random(seed), packed_problem(D), names, "cuda")
    for lengths in (LENGTHS["many"], LENGTHS["a short one"], [(700, 700)] * 30):
        inputs, gradients = make_packed(call, lengths, (5, 3), "cuda")
        cu = starts(lengths, "cuda")
        out = flashproto.attention_varlen(*inputs, *cu, **call.options, impl="hopper")
        first = torch.autograd.grad(out, inputs, gradients[0], retain_graph=True)
        for _ in range(100):
            again = torch.autograd.grad(out, inputs, gradients[0], retain_graph=True)
            assert torch.equal(first[1], again[1]) and torch.equal(first[2], again[2])
            torch.testing.assert_close(first[0], again[0], atol=1e-2, rtol=2e-2)


@pytest.mark.gpu
@pytest.mark.parametrize("D", [64, 128, 256])
def test_a_graph_of_gradients_is_replayed_with_other_lengths(D: int, hopper: None) -> None:
    """Nothing of the lengths is on the host, and other lengths compile nothing."""
    T, Hq, Hkv = 1500, 4, 2
    inputs = [torch.randn(T, H, D, device="cuda", dtype=BRAIN).requires_grad_() for H in (Hq, Hkv, Hkv)]
    dout = torch.randn_like(inputs[0])
    cu, cu_k = (torch.tensor([0, 100, 100, 400, 650], device="cuda", dtype=torch.int32) for _ in "qk")

    def step() -> tuple[Tensor, ...]:
        out = flashproto.attention_varlen(*inputs, cu, cu_k, causal=True, impl="hopper")
        return out, *torch.autograd.grad(out, inputs, dout)

    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        step()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = step()
    with first_calls.compiled_meanwhile() as compiled:
        for lengths, lengths_k in (
            ([1, 2, 3, 4], [1, 2, 3, 4]),
            ([0, 0, 0, 1500], [700, 0, 0, 800]),
            ([300, 0, 17, 200], [300, 5, 400, 0]),
            ([0, 0, 0, 0], [0, 0, 0, 0]),
        ):
            cu[1:] = torch.tensor(lengths, device="cuda").cumsum(0)
            cu_k[1:] = torch.tensor(lengths_k, device="cuda").cumsum(0)
            graph.replay()
            torch.cuda.synchronize()
            torch.cuda.set_sync_debug_mode("error")
            try:
                wanted = step()
            finally:
                torch.cuda.set_sync_debug_mode("default")
            for name, a, b in zip(("out", "dq", "dk", "dv"), captured, wanted, strict=True):
                if name != "dq":
                    assert torch.equal(a, b), name
                torch.testing.assert_close(a, b, atol=1e-2, rtol=2e-2)
    assert not compiled


@pytest.mark.gpu
@pytest.mark.gib(24)
@pytest.mark.parametrize("D", [64, 128, 256])
def test_gradients_of_sequences_are_those_of_a_batch(D: int, hopper: None) -> None:
    """8 sequences of 2048, packed and as a batch: dk and dv are within a rounding of each other."""
    B, S, H = 8, 2048, 4
    q, k, v, dout = (torch.randn(B, H, S, D, device="cuda", dtype=BRAIN) for _ in range(4))
    leaves = [x.requires_grad_() for x in (q, k, v)]
    out = flashproto.attention(q, k, v, causal=True, impl="hopper")
    wanted = torch.autograd.grad(out, leaves, dout)
    packed = [x.detach().transpose(1, 2).reshape(B * S, H, D).requires_grad_() for x in (q, k, v)]
    cu = torch.arange(0, B * S + 1, S, device="cuda", dtype=torch.int32)
    of_packed = flashproto.attention_varlen(*packed, cu, cu, causal=True, impl="hopper")
    got = torch.autograd.grad(of_packed, packed, dout.transpose(1, 2).reshape(B * S, H, D))
    for a, b in zip(got, wanted, strict=True):
        torch.testing.assert_close(a.view(B, S, H, D).transpose(1, 2), b, atol=2e-2, rtol=2e-2)
