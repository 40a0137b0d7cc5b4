"""Attention's variants in the Hopper backward: the query tiles that a key tile visits, where gradients
are computed, and these against float64."""

from __future__ import annotations

import itertools
import random
from collections import Counter
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from attention_problem import Problem
from hopper_attention import determinism
from rows import poison
from schedule_on_the_host import Pointer, blocks, load, ranges_on_the_host
from torch import Tensor
from variant_problem import Call, assert_within_bound, drawn, exact_and_eager, make, run

from flashproto import configs
from flashproto.functional.attention_request import attention_request
from flashproto.kernels import schedule
from flashproto.kernels.hopper import attention_backward_masks as tile_masks
from flashproto.kernels.hopper import attention_backward_work as work
from flashproto.kernels.hopper import items as work_items
from flashproto.kernels.scores import Given, Variables
from flashproto.ops import attention as attention_op
from flashproto.reference.mask_table import TILE, packed
from flashproto.variant import (
    Kind,
    Variant,
    backward_backend,
    main_backward,
    variant_of,
)

BRAIN = torch.bfloat16

# --- which query tiles are visited ------------------------------------------------------------------


@pytest.fixture
def host(monkeypatch: pytest.MonkeyPatch) -> None:
    host_of(monkeypatch)


def host_of(monkeypatch: pytest.MonkeyPatch) -> None:
    """Device code of the schedule runs as Python."""
    ranges_on_the_host(monkeypatch)
    language = SimpleNamespace(
        minimum=lambda a, b: min(int(a), int(b)),
        maximum=lambda a, b: max(int(a), int(b)),
        where=lambda c, x, y: x if c else y,
        cdiv=lambda a, b: -(-a // b),
        load=lambda pointer: int(load(pointer)),
        int64=torch.int64,
    )
    monkeypatch.setattr(work, "gl", language)
    monkeypatch.setattr(work, "query_range", schedule.query_range.fn)
    monkeypatch.setattr(work, "clamp", schedule.clamp)
    for name in ("tile_of_intervals", "queries_of_tile", "list_of"):
        monkeypatch.setattr(work, name, getattr(work, name).fn)
    monkeypatch.setattr(work, "LIST", schedule.LIST.value)
    monkeypatch.setattr(work_items, "gl", language)
    monkeypatch.setattr(work, "item_of_lists", work_items.item_of_lists.fn)


def given_of(
    kind: Kind, left: int, first: int, begin: Tensor | None, end: Tensor | None, BN: int, heads: int
) -> Given:
    """What the kernel of this kind is given; begin, end: [B, H | 1, Sk]."""
    given = Given(left if kind.WINDOW else None, first if kind.FIRST else None)
    if begin is not None and end is not None:
        B, H, Sk = begin.shape
        n_tiles = -(-Sk // BN)
        tiles = torch.zeros(B * H, 4, n_tiles, dtype=torch.int64)
        for row, t in itertools.product(range(B * H), range(n_tiles)):
            own = slice(t * BN, (t + 1) * BN)
            b, e = (x.reshape(B * H, Sk)[row, own] for x in (begin, end))
            some = b < e
            tiles[row, 0, t] = torch.where(some, b, 2**31 - 1).min()
            tiles[row, 1, t] = torch.where(some, e, 0).max()
            tiles[row, 2, t], tiles[row, 3, t] = b.max(), e.min()
        rows = {"row_of_batch": H if B > 1 else 0, "row_of_head": 1 if H > 1 else 0}
        given = given._replace(work=Pointer(tiles.view(-1)), **rows)
    return given


def walks(
    config: configs.HopperBackward, t: int, sizes: tuple[int, ...], offset: int, given: Any
) -> tuple[tuple[int, int, int], list[tuple[int, int]], list[tuple[int, int]]]:
    """Of the t-th work item: (batch, key head, first key), and (query tile of all heads, place of its
    first query) in the order of the producer and of the consumers."""
    NB, M, Hk, GROUP, B = sizes
    t = work.numbered.fn(t, NB * B * Hk, NB, Hk, GROUP, B * Hk, 1, M, given, config)
    b, hk, col, m0, m1, up = work.key_tile.fn(t, NB, M, Hk, GROUP, B * Hk, 1, offset, given, config)
    b, hk, col, m0, m1 = map(int, (b, hk, col, m0, m1))
    H, h0 = Hk * GROUP, hk * GROUP
    start = work.first_tile.fn(col, m0, M, up, config)
    began = work.first_head.fn(h0, col, GROUP, config)
    h, m, n, has_lists = began, start, col // config.BN, config.KIND.TABLE
    produced = []
    steps = (m1 - m0) * GROUP
    if has_lists:
        steps = work.listed_steps.fn(b, h0, n, NB, M, GROUP, given)
    for _ in range(steps):
        at = m
        if has_lists:
            at, m1 = work.listed_tile.fn(b, h, n, m, NB, M, given)
        produced.append(((b * H + h) * M + at, at * config.BM + offset - col))
        h, m = work.next_tile.fn(h, m, h0, began, m0, m1, start, up, GROUP, config)
    assert not has_lists or (h, m) == (h0 + GROUP, 0)
    tile = (b * H + h0) * M + start
    low, high = m0 * config.BM + offset - col, m1 * config.BM + offset - col
    outer, begin, end, last_key = work.loops.fn(low, high, m0, m1, up, GROUP, config)
    consumed = []
    for i in range(outer):
        if has_lists:
            listed = work.list_of(b, h0 + i, n, NB, M, given)
            end = work.gl.load(listed - 1)
        for index in range(begin, end, config.STEP):
            place, to = index, tile
            if has_lists:
                place, to, _ = work.listed_step.fn(index, last_key, tile, listed, config)
            consumed.append((to, work.last_visible_key.fn(place, last_key, config)))
            tile = work.inner_step.fn(tile, M, config)
        tile, last_key = work.outer_step.fn(tile, last_key, m0, m1, M, up, GROUP, config)
    return (b, hk, col), produced, consumed


BANDS = (Kind(), Kind(True), Kind(WINDOW=True), Kind(True, True), Kind(True, True, True))


@pytest.mark.parametrize("per_head", [None, False, True])
@pytest.mark.parametrize("band", BANDS, ids=lambda kind: kind.name)
@pytest.mark.parametrize("D", [64, 128, 256])
def test_producer_and_consumers_visit_all_queries_that_see_a_key(
    D: int, band: Kind, per_head: bool | None, seed: int, host: None
) -> None:
    """Each key tile of each head once, with one step at least; both sides take the same steps, and no
    query that sees a key is left out.  Under a window alone at most one tile at each end more."""
    kind = Kind(band.CAUSAL, band.WINDOW, band.FIRST, INTERVALS=per_head is not None, ALIBI=True)
    config = configs.attention_backward_hopper(D, 4096, kind)
    assert config.WALK == "by_head" and not (config.FIRST or config.PEELED or config.COUNTED)
    generator = random.Random(seed)
    for _ in range(8):
        Sq, Sk = generator.randrange(1, 1500), generator.randrange(1, 1500)
        offset = generator.choice((Sk - Sq, 0, 300, -200))
        left, first = generator.randrange(600), generator.randrange(1, 600)
        B, Hk, GROUP = 2, 2, generator.choice((1, 3))
        begin = end = None
        if per_head is not None:
            shape = (generator.choice((1, B)), Hk * GROUP if per_head else 1, Sk)
            begin, end = (torch.randint(-1, Sq + 2, shape) for _ in range(2))
            few = torch.arange(Sk) // 100 % 3 == 0  # that no query sees
            end = torch.where(few, begin, end)
        given = given_of(kind, left, first, begin, end, config.BN, Hk * GROUP)
        NB, M = -(-Sk // config.BN), -(-Sq // config.BM)
        i, j = torch.arange(Sq)[:, None], torch.arange(Sk)[None, :]
        seen = torch.ones(Sq, Sk, dtype=torch.bool)
        if kind.CAUSAL:
            seen &= j <= i + offset
        if kind.WINDOW:
            seen &= (j >= i + offset - left) | (j < (first if kind.FIRST else 0))
        of_all = seen.expand(B, Hk * GROUP, Sq, Sk)
        if begin is not None and end is not None:
            of_all = of_all & (begin[:, :, None] <= i) & (i < end[:, :, None])
        items = []
        for t in range(NB * B * Hk):
            (b, hk, col), produced, consumed = walks(config, t, (NB, M, Hk, GROUP, B), offset, given)
            items.append((b, hk, col))
            assert produced == consumed and produced
            assert len(set(produced)) == len(produced)
            tiles = {tile for tile, _ in produced}
            keys = of_all[b, :, :, col : col + config.BN]
            for h, m in itertools.product(range(hk * GROUP, (hk + 1) * GROUP), range(M)):
                met = keys[h, m * config.BM : (m + 1) * config.BM].any()
                assert not met or (b * Hk * GROUP + h) * M + m in tiles
            if kind.WINDOW and kind.CAUSAL and not kind.FIRST:
                most = (config.BN + left - 1) // config.BM + 2
                assert len(produced) <= GROUP * most
        wanted = itertools.product(range(B), range(Hk), range(0, Sk, config.BN))
        assert Counter(items) == Counter(wanted)


@pytest.mark.parametrize("per_head", [False, True])
@pytest.mark.parametrize("band", BANDS, ids=lambda kind: kind.name)
@pytest.mark.parametrize("D", [64, 128, 256])
def test_producer_and_consumers_visit_what_a_table_lists(
    D: int, band: Kind, per_head: bool, device: str, seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each key tile of each head once, with one step for each head at least; both sides take the same
    steps, and no query that sees a key is left out.  Without a band no other tile is visited than those
    of which the table shows some, and those that are clear are marked."""
    kind = Kind(band.CAUSAL, band.WINDOW, band.FIRST, ALIBI=True, TABLE=True)
    config = configs.attention_backward_hopper(D, 4096, kind)
    BM, BN = config.BM, config.BN
    generator = random.Random(seed)
    problems = []
    for _ in range(2):
        Sq, Sk = generator.randrange(1, 600), generator.randrange(1, 600)
        offset = generator.choice((Sk - Sq, 0, 300, -200))
        left, first = generator.randrange(600), generator.randrange(1, 600)
        B, Hk, GROUP = 2, 2, generator.choice((1, 3))
        rows = generator.choice((1, B)), Hk * GROUP if per_head else 1
        shown = blocks(generator, (*rows, Sq, Sk))
        _, table = packed(shown)
        NB, M = -(-Sk // BN), -(-Sq // BM)
        lists = rows[0] * rows[1], NB, schedule.LIST.value + M
        columns = torch.full(lists, -7, dtype=torch.int32, device=device)
        given = Given(left if kind.WINDOW else None, first if kind.FIRST else None)
        constants = {"BLOCK_M": BM, "BLOCK_N": BN, "KIND": band, "MARKED": True}
        of_band = () if band.PLAIN else given
        schedule.columns_kernel[(rows[0] * rows[1] * NB,)](
            columns, table.to(device), Sq, Sk, offset, of_band, **constants
        )
        schedule.order_lists_kernel[(rows[0] * rows[1] * NB,)](columns, *lists[1:], BLOCK=256)
        given = given._replace(
            columns=Pointer(columns.cpu().long().flatten()),
            table_of_batch=torch.tensor(rows[1] if rows[0] > 1 else 0),
            table_of_head=torch.tensor(1 if per_head else 0),
        )
        problems.append((Sq, Sk, offset, left, first, (NB, M, Hk, GROUP, B), shown, table, given))
    host_of(monkeypatch)
    for Sq, Sk, offset, left, first, sizes, shown, table, given in problems:
        NB, M, Hk, GROUP, B = sizes
        H = Hk * GROUP
        i, j = torch.arange(Sq)[:, None], torch.arange(Sk)[None, :]
        seen = shown.expand(B, H, Sq, Sk).clone()
        if kind.CAUSAL:
            seen &= j <= i + offset
        if kind.WINDOW:
            seen &= (j >= i + offset - left) | (j < (first if kind.FIRST else 0))
        items = []
        for t in range(NB * B * Hk):
            (b, hk, col), produced, consumed = walks(config, t, sizes, offset, given)
            items.append((b, hk, col))
            assert produced == consumed and len(set(produced)) == len(produced)
            tiles = {tile for tile, _ in produced}
            for h, m in itertools.product(range(hk * GROUP, (hk + 1) * GROUP), range(M)):
                visited = (b * H + h) * M + m in tiles
                pairs = (b, h, slice(m * BM, (m + 1) * BM), slice(col, col + BN))
                assert visited or not seen[pairs].any()
                listed = work.list_of(b, h, col // BN, NB, M, given)
                places = range(work.gl.load(listed - 1))
                own = [work.listed_step.fn(n, 0, 0, listed, config)[1:] for n in places]
                assert own == sorted(own) and own
                assert (m, 1) not in own or shown.expand(B, H, Sq, Sk)[pairs].all()
                if band.PLAIN and not band.CAUSAL:
                    what = table.expand(B, H, -1, -1)[b, h, m * BM // TILE, col // TILE]
                    assert visited == (what > 0 or (own == [(0, 0)] and m == 0))
                    assert ((m, 1) in own) == (what == 2)
        wanted = itertools.product(range(B), range(Hk), range(0, Sk, BN))
        assert Counter(items) == Counter(wanted)
        of_first = [
            (b, hk, -int(work.listed_tile.fn(b, hk * GROUP, col // BN, 0, NB, M, given)[1]))
            for b, hk, col in items
        ]
        assert of_first[: B * Hk] == sorted(of_first[: B * Hk], key=lambda x: x[:2])
        assert of_first[B * Hk :] == sorted(of_first[B * Hk :])  # one head at a time


# --- what happens to a tile of scores ---------------------------------------------------------------


class Tile(Tensor):
    """A tensor as device code has it."""

    @property
    def type(self) -> Any:  # type: ignore[override]
        return SimpleNamespace(layout=None)


@pytest.mark.parametrize("other", ["", "intervals", "table"])
@pytest.mark.parametrize("band", BANDS, ids=lambda kind: kind.name)
@pytest.mark.parametrize("BM", [64, 128])
def test_masks_and_distances_of_a_tile(
    BM: int, band: Kind, other: str, seed: int, host: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As visible() and ALiBi are defined, for tiles at all places; what is not masked needs no mask."""
    intervals, has_table = other == "intervals", other == "table"
    language = SimpleNamespace(
        minimum=lambda a, b: min(int(a), int(b)),
        maximum=lambda a, b: max(int(a), int(b)),
        where=lambda c, x, y: torch.where(torch.as_tensor(c), x, torch.as_tensor(y)),
        arange=lambda start, stop, layout: torch.arange(start, stop),
        load=lambda pointer, mask=True, other=0: load(pointer, mask, other),
        convert_layout=lambda x, layout, assert_trivial: x.as_subclass(Tile),
        SliceLayout=lambda dim, parent: None,
        cdiv=lambda a, b: -(-a // b),
        float32=torch.float32,
        int64=torch.int64,
    )
    monkeypatch.setattr(tile_masks, "gl", language)
    monkeypatch.setattr(tile_masks, "accumulator", lambda N: None)
    monkeypatch.setattr(tile_masks, "along", lambda layout, dim, rank=6: None)
    monkeypatch.setattr(tile_masks, "TILE", TILE)
    monkeypatch.setattr(tile_masks, "list_of", lambda *_: 0)
    monkeypatch.setattr(tile_masks, "EVERYWHERE", tile_masks.EVERYWHERE.value)
    monkeypatch.setattr(tile_masks, "clamp", lambda x, low, high: torch.clamp(x, low, high))
    monkeypatch.setattr(tile_masks, "tile_of_intervals", work.tile_of_intervals)
    monkeypatch.setattr(
        tile_masks, "modified", lambda s, _, v, kind, i, j: s + (i - j + v.head.diagonal)
    )
    for name in ("mask", "mask_keys", "of_keys", "bits_of_keys"):
        monkeypatch.setattr(tile_masks, name, getattr(tile_masks, name).fn)
    kind = Kind(band.CAUSAL, band.WINDOW, band.FIRST, INTERVALS=intervals, ALIBI=True, TABLE=has_table)
    generator = random.Random(seed)
    whole = masked = 0
    for _ in range(60):
        Sq, Sk = generator.randrange(1, 700), generator.randrange(1, 700)
        offset = generator.choice((Sk - Sq, 0, 200, -100)) if kind.CAUSAL or kind.WINDOW else Sk
        left, first = generator.choice((10, 300, 700)), generator.randrange(1, 500)
        begin = end = None
        if intervals:
            short = generator.random() < 0.5
            begin = torch.randint(-1, Sq // 4 + 1, (1, 1, Sk))
            begin[..., generator.randrange(Sk)] = 2**31 - 1 if short else -(2**31)
            end = torch.randint(Sq // 2 if short else Sq, Sq + 2, (1, 1, Sk))
        config = configs.attention_backward_hopper(64 if BM == 128 else 128, 4096, kind)
        assert config.BM == BM
        given = given_of(kind, left, first, begin, end, config.BN, 1)
        if begin is not None and end is not None:
            given = given._replace(begin=Pointer(begin.view(-1)), end=Pointer(end.view(-1)))
        given = given._replace(alibi_slopes=Pointer(torch.tensor([0.5])), rows=2 * Sq + 1)
        row, i0 = generator.randrange(0, Sk, 64), generator.randrange(0, Sq, BM)
        clear = 0
        if has_table:
            shown = blocks(generator, (1, 2, Sq, Sk))
            bits, table = packed(shown)
            clear = int(table[0, 1, i0 // TILE, row // TILE] == 2)
            h = torch.tensor(1)
            given = given._replace(bits=Pointer(bits.flatten()), table_of_batch=0, table_of_head=h)
        NB = -(-Sk // config.BN)
        given = given._replace(row_of_batch=torch.tensor(0), row_of_head=torch.tensor(0))
        place_of_head = 1 if has_table else 0
        slopes = Pointer(torch.tensor([0.5, 0.5]))
        head = tile_masks.as_seen_from.fn(
            row,
            torch.tensor(0),
            place_of_head,
            given._replace(alibi_slopes=slopes),
            Sk,
            offset,
            0,
            NB,
            config,
        )
        seen = Variables(given, head)
        i, j = i0 + torch.arange(BM)[None, :], row + torch.arange(64)[:, None]
        wanted = (j < Sk) & (i > -1)
        if kind.CAUSAL:
            wanted = wanted & (j <= i + offset)
        if kind.WINDOW:
            wanted = wanted & ((j >= i + offset - left) | (kind.FIRST & (j < first)))
        if begin is not None and end is not None:
            b, e = (x.view(-1)[j.clamp(max=Sk - 1)] for x in (begin, end))
            wanted = wanted & (b <= i) & (i < e)
        if has_table:
            wanted = wanted & shown[0, 1][i.clamp(max=Sq - 1), j.clamp(max=Sk - 1)]
        x = torch.zeros(64, BM).as_subclass(Tile)
        place = i0 + offset - row
        for function, more in ((tile_masks.mask, ()), (tile_masks.mask_if_needed.fn, (clear,))):
            got = function(x, Sk - 1 - row, place, seen, kind, *more).as_subclass(Tensor) == 0
            there = (i < Sq).expand(64, BM)
            assert torch.equal(got & there, wanted & there)
        whole += bool(got.all())
        masked += not got.all()
        distance = tile_masks.modify.fn(x, place, 1.0, seen, kind).as_subclass(Tensor)
        assert torch.equal(distance, (i + (Sk - Sq) - j).float())
    assert masked > 5 and (whole > 0 or kind.WINDOW or has_table), (masked, whole)


# --- where gradients are computed -------------------------------------------------------------------


def test_the_main_kernel_sees_no_sinks() -> None:
    sinks, slopes = torch.zeros(2), torch.ones(2)
    variant = variant_of(True, 3, {"sinks": sinks}, ["max_score"])
    assert variant.kind == Kind(True, SINKS=True, MAX_SCORE=True)
    assert main_backward(variant) == Variant(Kind(True), 3)
    made = main_backward(variant_of(True, 3, {"left": 5, "sinks": sinks, "alibi_slopes": slopes}))
    assert made.kind == Kind(True, WINDOW=True, ALIBI=True)
    assert made.named == {"left": 5, "alibi_slopes": slopes}


def test_backends_of_gradients() -> None:
    for kind in (Kind(), Kind(True), Kind(True, SINKS=True), Kind(MAX_SCORE=True)):
        assert backward_backend("hopper", kind, ordered=True) == "hopper"
    lists = Kind(INTERVALS=True), Kind(TABLE=True)
    for kind in (Kind(True, True, True), Kind(SOFTCAP=1), Kind(ALIBI=True), *lists):
        assert backward_backend("hopper", kind) == "hopper"
        assert backward_backend("hopper", kind, ordered=True) == "triton"
        assert backward_backend("triton", kind) == "triton"
    assert backward_backend("hopper", Kind(ALIBI=True), wanted=["alibi_slopes"]) == "triton"


# --- gradients --------------------------------------------------------------------------------------


def variant_of_call(call: Call, q: Tensor, k: Tensor) -> Variant:
    options = call.options
    names = ("causal", "window", "mask", "softcap")
    options = {n: x for n, x in options.items() if n in names}
    options |= {n: x.detach() for n, x in call.parameters.items()}
    request = attention_request("attention", q, k, k, **options)
    return (request.with_table(True) if request.variant.kind.TABLE else request).variant


def backward_of(
    call: Call, inputs: list[Tensor], gradients: list[Tensor], impl: str
) -> dict[str, Tensor]:
    """out and lse of the forward on triton, and dq, dk, dv and the gradient of sinks by the backward of
    `impl`."""
    q, k, v = (x.detach() for x in inputs)
    variant = variant_of_call(call, q, k)
    tensors, names = variant.tensors.values(), list(variant.tensors)
    scale = q.shape[3] ** -0.5 if call.problem.scale is None else call.problem.scale
    settings = attention_op.Settings(variant.form, scale, "triton")
    out, lse, *_ = attention_op.attention((q, k, v, *tensors), settings, (0, 1))
    dout, dlse = gradients
    dlse = torch.where(lse.isinf(), 0.0, dlse)
    given = attention_op.backward_inputs((dout, dlse, out, lse), q, k, v, [*tensors])
    needs = (True, True, True, *(name == "sinks" for name in names))
    recipe = attention_op.attention.backward_recipe(
        given, settings._replace(backend=impl), needs, False
    )
    made = dict(zip(("q", "k", "v", *names), recipe.execute(*given), strict=True))
    found = {f"d{name}": x for name, x in made.items() if x is not None}
    return {"out": out, "lse": lse} | found


def compare(call: Call) -> None:
    print(call)
    inputs, gradients = make(call, "cuda")
    exact, plain = exact_and_eager(call, inputs, gradients)
    got = backward_of(call, inputs, gradients, "hopper")
    assert_within_bound(got, {n: exact[n] for n in got}, {n: plain[n] for n in got}, call)


SHAPES = {
    "a few tiles": (2, 4, 2, 300, 300),
    "more keys": (1, 3, 1, 777, 1301),
    "more queries": (1, 2, 2, 1100, 300),
    "few queries": (3, 4, 2, 5, 900),
    "more items than programs": (30, 4, 4, 400, 700),
}
SETS = (
    ("sinks",),
    ("causal", "sinks"),
    ("causal", "left_window"),
    ("window",),
    ("left_window", "sinks"),
    ("first_keys",),
    ("softcap",),
    ("causal", "softcap"),
    ("alibi",),
    ("causal", "alibi"),
    ("top_left", "alibi"),
    ("causal", "left_window", "softcap", "sinks"),
    ("causal", "first_keys", "softcap", "sinks", "alibi"),
    ("documents",),
    ("causal", "documents"),
    ("padding", "sinks"),
    ("prefix", "softcap"),
    ("tree", "alibi"),
    ("intervals",),
    ("documents", "first_keys", "softcap", "sinks", "alibi"),
    ("boolean",),
    ("from_function",),
    ("either", "sinks"),
    ("dilated", "softcap"),
    ("causal", "boolean"),
    ("boolean", "window"),
    ("from_function", "first_keys", "softcap", "sinks", "alibi"),
)


def problem(shape: tuple[int, ...], D: int, dtype: torch.dtype = BRAIN, **others: Any) -> Problem:
    return Problem(dtype, *shape, D, D, causal=False, **others)


@pytest.mark.gpu
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("names", SETS, ids="+".join)
@pytest.mark.parametrize("D", [64, 128, 256])
def test_gradients_against_float64(
    D: int, names: tuple[str, ...], shape: str, seed: int, hopper: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    poison(monkeypatch)
    compare(drawn(random.Random(seed), problem(SHAPES[shape], D), names, "cuda"))


@pytest.mark.gpu
@pytest.mark.parametrize("D", [40, 96, 192])
@pytest.mark.parametrize("names", [SETS[2], SETS[7], SETS[12], ("boolean", "causal")], ids="+".join)
def test_padded_head_dims_of_float16(
    D: int, names: tuple[str, ...], seed: int, hopper: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    poison(monkeypatch)
    p = problem((2, 6, 2, 333, 555), D, torch.float16, strides="packed")
    compare(drawn(random.Random(seed), p, names, "cuda"))


def window_call(p: Problem, left: int, first: int, right: int | None = 0) -> Call:
    from flashproto import masks

    def sees(o: int, b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        near = (i + o - left <= j) | (j < first)
        return near if right is None else near & (j <= i + o + right)

    options = {"causal": False, "mask": masks.window(left, right, first=first)}
    return Call(p, (), options, (sees,))


@pytest.mark.gpu
@pytest.mark.parametrize("D", [64, 128, 256])
@pytest.mark.parametrize("first", [0, 64, 129])
@pytest.mark.parametrize("left", [0, 1, 63, 64, 127, 128, 129, 500])
def test_windows_at_the_edges_of_tiles(left: int, first: int, D: int, hopper: None) -> None:
    compare(window_call(problem((1, 2, 1, 520, 520), D), left, first))


@pytest.mark.gpu
@pytest.mark.parametrize("D", [64, 128, 256])
def test_keys_that_no_query_sees_get_zeros(
    D: int, hopper: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Behind a window and before the first query of a short row of queries."""
    poison(monkeypatch)
    for p, left in ((problem((1, 2, 1, 100, 1500), D), 40), (problem((2, 2, 2, 900, 200), D), 10)):
        call = window_call(p, left, 0)
        inputs, gradients = make(call, "cuda")
        got = backward_of(call, inputs, gradients, "hopper")
        hidden = ~call.visible(torch.device("cuda")).any(2).any(1)  # [B, Sk]
        assert p.Sk == 200 or hidden.any()
        for name in ("dk", "dv"):
            assert not got[name].transpose(1, 2)[hidden].any()
    compare(window_call(problem((1, 2, 1, 100, 1500), D), 40, 0))


@pytest.mark.gpu
def test_the_gradient_of_alibi_slopes_comes_from_triton(
    seed: int, hopper: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    poison(monkeypatch)
    call = drawn(random.Random(seed), problem((2, 4, 2, 300, 500), 128), ("causal", "alibi"), "cuda")
    made = make(call, "cuda")
    assert_within_bound(run(call, *made, "hopper"), *exact_and_eager(call, *made), call)


@pytest.mark.gpu
@pytest.mark.parametrize("names", [("causal", "sinks"), ("causal", "left_window", "softcap")])
def test_deterministic_gradients_are_the_same_bits(
    names: tuple[str, ...], seed: int, hopper: None
) -> None:
    call = drawn(random.Random(seed), problem((2, 4, 2, 1300, 1300), 128), names, "cuda")
    inputs, gradients = make(call, "cuda")
    with determinism():
        first, again = (run(call, inputs, gradients, "hopper") for _ in range(2))
    for name, x in first.items():
        assert torch.equal(x, again[name]), name


@pytest.mark.gpu
@pytest.mark.gib(24)
@pytest.mark.parametrize("D", [64, 128, 256])
def test_a_window_in_long_rows(D: int, hopper: None) -> None:
    compare(window_call(problem((1, 2, 1, 8192, 8192), D), 1023, 4))
