"""Split keys in the Hopper forward: which part visits which key tiles, the merge, and results."""

from __future__ import annotations

import contextlib
import dataclasses
import math
import random
from collections import Counter
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from attention_problem import Problem
from hopper_attention import CAUSAL, FULL
from hypothesis import given, settings
from hypothesis import strategies as st
from operators import launches
from rows import poison
from schedule_on_the_host import Pointer, load, ranges_on_the_host
from torch import Tensor
from variant_problem import assert_within_bound, drawn, exact_and_eager, make, run

import flashproto
from flashproto import configs, reference
from flashproto.configs import hopper_forward as hopper_configs
from flashproto.configs.hopper import MULTIPROCESSORS
from flashproto.kernels import schedule
from flashproto.kernels.hopper import attention_forward_work as work
from flashproto.kernels.hopper import items as work_items
from flashproto.kernels.schedule import LIST
from flashproto.kernels.scores import Given
from flashproto.ops import attention as attention_op
from flashproto.ops import attention_hopper, call_cache, recipe
from flashproto.variant import Kind, Variant

# --- which part visits which key tiles ---------------------------------------------------------------


@contextlib.contextmanager
def on_the_host() -> Iterator[None]:
    """Let device code of work items run as Python, on tensors where it wants int64."""
    with pytest.MonkeyPatch.context() as patch:
        ranges_on_the_host(patch)
        patch.setattr(work, "key_ranges", schedule.key_ranges.fn)
        patch.setattr(work, "first_tiles", schedule.first_tiles)
        for name in ("walk_of", "line_of"):
            patch.setattr(work, name, getattr(work, name).fn)
        patch.setattr(work, "LIST", LIST.value)
        patch.setattr(work, "part_of", work.part_of.fn)
        patch.setattr(work, "quotient", lambda a, b: torch.as_tensor(a) // b)
        language = {
            "minimum": min,
            "maximum": max,
            "where": lambda c, x, y: x if c else y,
            "cdiv": lambda a, b: -(-a // b),
            "load": load,
            "int64": torch.int64,
        }
        patch.setattr(work, "gl", SimpleNamespace(**language))
        patch.setattr(work_items, "gl", work.gl)
        item_of_lists = work_items.item_of_lists.fn
        patch.setattr(work, "item_of_lists", lambda *given: map(torch.as_tensor, item_of_lists(*given)))
        yield


def visits(generator: random.Random, rows: int, query_tiles: int, key_tiles: int) -> Tensor:
    """What visits_kernel and order_lists_kernel leave of random intervals: which query tile is next and
    how many tiles it visits; how many, and these, each with a bit; one at least.  What they do not
    write is past the end of everything."""
    made = torch.full((rows, query_tiles, LIST.value + key_tiles), 10**8, dtype=torch.int32)
    for line in made.flatten(0, 1):
        tiles = sorted(generator.sample(range(key_tiles), generator.randint(0, key_tiles))) or [0]
        line[2] = len(tiles)
        line[3 : 3 + len(tiles)] = torch.tensor([2 * t + generator.randrange(2) for t in tiles])
    made[..., 1], made[..., 0] = made[..., 2].sort(dim=-1, descending=True, stable=True)
    return made.view(-1)


KINDS = (
    FULL,
    CAUSAL,
    Kind(CAUSAL=True, WINDOW=True),
    Kind(WINDOW=True, FIRST=True),
    Kind(CAUSAL=True, INTERVALS=True),
    Kind(INTERVALS=True),
)


@settings(max_examples=60)
@given(
    D=st.sampled_from((64, 128, 256)),
    kind=st.sampled_from(KINDS),
    B=st.integers(1, 3),
    Hkv=st.integers(1, 3),
    group=st.sampled_from((1, 4)),
    Sq=st.integers(1, 700),
    Sk=st.integers(1, 5000),
    shift=st.one_of(st.just(0), st.integers(-800, 800)),
    left=st.integers(0, 3000),
    first=st.integers(1, 600),
    parts=st.integers(1, 40),
    seed=st.integers(0, 2**31),
)
def test_parts_visit_each_key_tile_of_an_item_once(
    D: int, kind: Kind, B: int, Hkv: int, group: int, Sq: int, Sk: int, shift: int, left: int,
    first: int, parts: int, seed: int,
) -> None:  # fmt: skip
    """From right to left, as the whole item does, in parts of nearly one length.  Each part's results
    have a place of their own, and one without keys visits a tile of its item."""
    config = configs.attention_forward_hopper(D, Sk, kind, Sq, B * Hkv, group)
    heads = Hkv if config.PACK > 1 else Hkv * group
    whole = dataclasses.replace(config, SPLIT=False)
    split = dataclasses.replace(config, SPLIT=True, IDLE=False)
    offset = Sk - Sq + shift if kind.CAUSAL or kind.WINDOW else Sk
    query_tiles, key_tiles = -(-Sq // config.BQ), -(-Sk // config.BN)
    rows = random.Random(seed)
    given = Given(left, first)
    if kind.INTERVALS:
        work_of_all = Pointer(visits(rows, B * heads, query_tiles, key_tiles))
        given = given._replace(work=work_of_all, row_of_batch=heads, row_of_head=1)
    items = query_tiles * B * heads

    def tiles(
        t: int, config: configs.HopperForward, HG: int = 1
    ) -> tuple[tuple[int, ...], int, list[int], int]:
        """The item, the place of its results, its key tiles in the kernels' order, how many count."""
        b, h, row, n, (entry, skipped) = work.tile_of.fn(
            t, query_tiles, heads, B * heads, HG, parts, Sk, offset, given, config
        )
        walk = work.walk_of(b, h, row, query_tiles, Sk, offset, given, config, skipped)
        found = [int(work.tile_at.fn(n - 1 - i, walk, config)) for i in range(n)]
        entry, n = int(entry), int(n)
        return (int(b), int(h), int(row)), max(entry, ~entry), found, n if entry >= 0 else 0

    wanted: dict[tuple[int, ...], list[int]] = {}
    lengths_of: dict[tuple[int, ...], list[int]] = {}
    of_items: dict[tuple[int, ...], list[tuple[int, list[int], int]]] = {}
    places: Counter[tuple[int, ...]] = Counter()
    with on_the_host():
        for t in range(items):
            item, _, found, n = tiles(t, whole, B * heads)
            assert n == len(found)
            wanted[item] = found
            lengths_of.setdefault(item[:2], []).append(n)
        for t in range(items * parts):
            item, entry, found, n = tiles(t, split)
            of_items.setdefault(item, []).append((entry, found, n))
            places[entry, item[1], item[2]] += 1
    if kind.INTERVALS:
        assert all(of == sorted(of, reverse=True) for of in lengths_of.values())
    assert len(wanted) == items
    assert len(places) == items * parts and set(places.values()) == {1}
    assert {entry for entry, _, _ in places} == set(range(parts * B))
    assert of_items.keys() == wanted.keys()
    for item, own in of_items.items():
        own.sort(reverse=True)  # from right to left
        assert [entry for entry, _, _ in own] == [item[0] * parts + p for p in reversed(range(parts))]
        assert [tile for _, found, n in own for tile in found[:n]] == wanted[item]
        lengths = [n for _, _, n in own]
        assert max(lengths) - min(lengths) <= 1
        assert {tile for _, found, _ in own for tile in found} == set(wanted[item])


# --- the merge -----------------------------------------------------------------------------------


@pytest.mark.parametrize("sinks", [False, True])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize(("parts", "D"), [(1, 64), (3, 40), (5, 256), (70, 128)])
def test_merge_against_float64(
    parts: int, D: int, dtype: torch.dtype, sinks: bool, device: str
) -> None:
    """Parts without keys have an out that is not read; a row may have no keys at all."""
    B, H, Sq = 2, 3, 4
    outs = torch.randn(parts, B, H, Sq, D, device=device)
    lses = 30 * torch.randn(parts, B, H, Sq, device=device)
    lses[torch.rand(lses.shape, device=device) < 0.3] = -math.inf
    lses[:, 1, 2, 3] = -math.inf
    outs[lses == -math.inf] = math.nan
    sink = torch.randn(H, device=device) * 30 if sinks else None
    exact_outs = [x.nan_to_num(0.0).double() for x in outs]
    exact_lses = [x.double() for x in lses]
    if sink is not None:
        exact_outs.append(torch.zeros_like(exact_outs[0]))
        exact_lses.append(sink.double()[:, None].expand(B, H, Sq))
    exact, exact_lse = reference.merge_attention(exact_outs, exact_lses)
    states = [x.transpose(0, 1).flatten(0, 1).contiguous() for x in (outs, lses)]
    out = torch.full((B, Sq, H, D), math.nan, dtype=dtype, device=device).transpose(1, 2)
    lse = torch.full((B, H, Sq), math.nan, device=device)
    made = recipe.Recipe(out.device)
    given = [made.input(x) for x in (*states, out, lse, sink)]
    attention_hopper.merge(made, *given)
    made.execute(*states, out, lse, sink)
    torch.testing.assert_close(out, exact.to(dtype))
    torch.testing.assert_close(lse, exact_lse.float(), rtol=1e-6, atol=1e-6)


# --- where keys are split --------------------------------------------------------------------------


# (B, Hq, Hkv, Sq, Sk) of which keys are split: tiles with rows for all consumers and for some, few
# queries of grouped heads, packed, and more parts than run at once
SHAPES = {
    "a chunk": (1, 4, 2, 256, 3000),
    "a ragged chunk": (2, 3, 1, 333, 2501),
    "a few queries": (1, 6, 2, 17, 5003),
    "one query": (2, 8, 2, 1, 6100),
    "many items": (2, 6, 6, 500, 6000),
}


def parts_of(
    Hq: int, Hkv: int, Sq: int, Sk: int, kind: Kind = CAUSAL, D: int = 128, B: int = 1, **seen
) -> int:
    """Into how many parts a call splits its keys."""
    group = Hq // Hkv
    config = configs.attention_forward_hopper(D, Sk, kind, Sq, B * Hkv, group, **seen)
    heads = B * (Hkv if config.PACK > 1 else Hq)
    if not config.SPLIT:
        return 1
    parts = configs.forward_parts(config, heads, Sq, seen.get("seen", Sk), MULTIPROCESSORS)
    assert parts > 1
    return parts


def test_keys_are_split_where_items_do_not_fill_the_card() -> None:
    assert parts_of(16, 2, 512, 131072) == 2  # 64 items, of which 132 run at once
    assert parts_of(8, 1, 512, 131072) == 4
    assert parts_of(64, 8, 512, 131072) == 1  # 256
    assert parts_of(40, 8, 512, 131072) == 3  # 160, in two rounds: 480 parts in four
    assert parts_of(16, 2, 512, 131072, FULL) == 2
    assert parts_of(16, 2, 2048, 131072) == 1
    assert parts_of(16, 2, 512, 2047) == 1
    assert parts_of(4, 4, 512, 131072, seen=1500) == 1
    assert parts_of(4, 4, 512, 131072, seen=0) == 1
    for kind in (Kind(CAUSAL=True, MAX_SCORE=True), Kind(CAUSAL=True, VARLEN=True)):
        assert parts_of(16, 2, 512, 131072, kind) == 1
    assert parts_of(16, 2, 512, 131072, Kind(True, True, True, True, 1, True, True)) == 2


@pytest.mark.parametrize("kind", [FULL, CAUSAL], ids=lambda kind: kind.name)
def test_parts_reach_more_multiprocessors_than_small_items(kind: Kind) -> None:
    """So that 68 rows have two consumers, where whole items would be of one each."""
    for seen, W in ((2000, 1), (8192, 2)):
        config = configs.attention_forward_hopper(128, 8192, kind, 17, 8, 4, MULTIPROCESSORS, seen)
        assert (4, W, W == 2) == (config.PACK, config.W, config.SPLIT)


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("kind", [FULL, CAUSAL], ids=lambda kind: kind.name)
def test_shapes_below_are_split(kind: Kind, shape: str) -> None:
    B, Hq, Hkv, Sq, Sk = SHAPES[shape]
    for D in (64, 128, 256):
        assert parts_of(Hq, Hkv, Sq, Sk, kind, D, B) > 1


@given(
    D=st.sampled_from((64, 128, 256)),
    causal=st.booleans(),
    B=st.integers(1, 9),
    Hkv=st.integers(1, 20),
    group=st.integers(1, 8),
    Sq=st.integers(1, 1100),
    Sk=st.integers(1, 300000),
)
def test_parts_are_not_short_and_save_time(
    D: int, causal: bool, B: int, Hkv: int, group: int, Sq: int, Sk: int
) -> None:
    """Of so many keys and more; in few rounds of programs, so that what they write is bounded; keys a
    program takes are an eighth less, or nothing is split."""
    kind = Kind(causal)
    parts = parts_of(Hkv * group, Hkv, Sq, Sk, kind, D, B)
    config = configs.attention_forward_hopper(D, Sk, kind, Sq, B * Hkv, group)
    if parts == 1:
        return
    assert Sq <= hopper_configs.SPLIT_QUERIES and not config.IDLE and not config.HAS_WORK_TABLE
    assert config.PROGRAMS == 1
    items = B * Hkv * (1 if config.PACK > 1 else group) * -(-Sq // config.BQ)
    rounds, before = (-(-n // MULTIPROCESSORS) for n in (items * parts, items))
    assert Sk // parts >= hopper_configs.SPLIT_KEYS
    assert rounds <= hopper_configs.SPLIT_ROUNDS
    assert rounds * Sk / parts <= 7 / 8 * before * Sk


@given(
    causal=st.booleans(),
    window=st.booleans(),
    Sq=st.integers(1, 30),
    Sk=st.integers(1, 60),
    offset=st.integers(-40, 80),
    left=st.integers(0, 50),
    first=st.integers(0, 70),
)
def test_keys_that_queries_see_are_counted(
    causal: bool, window: bool, Sq: int, Sk: int, offset: int, left: int, first: int
) -> None:
    named = {"left": left} | ({"first": first} if first else {}) if window else {}
    kind = Kind(CAUSAL=causal, WINDOW=window, FIRST=window and first > 0)
    i, j = torch.arange(Sq)[:, None], torch.arange(Sk)
    seen = torch.ones(Sq, Sk, dtype=torch.bool)
    if causal:
        seen &= j <= i + offset
    if window:
        seen &= (j >= i + offset - left) | (j < first)
    assert attention_hopper.keys_seen(Variant(kind, offset, named), Sq, Sk) == seen.any(0).sum()


@pytest.fixture
def steps(monkeypatch: pytest.MonkeyPatch) -> Callable[..., list[recipe.Launch]]:
    """The forward's launches for q, k and a variant."""
    monkeypatch.setattr(attention_hopper, "multiprocessors", lambda device: MULTIPROCESSORS)

    def made(q: Tensor, k: Tensor, variant: Variant) -> list[recipe.Launch]:
        made = recipe.Recipe(q.device)
        operands = [made.input(x) for x in (q, k, k)]
        kind = variant.kind
        settings = attention_op.Settings(Variant(kind).form, 0.125, "hopper")
        out, lse, top, *_ = (
            None if x is None else made.make(x) for x in attention_op.makes(settings, *operands)
        )
        attention_hopper.forward(made, *operands, out, lse, variant, 0.125, top)
        return [step for step in made.steps if isinstance(step, recipe.Launch)]

    return made


def test_launches_of_split_keys(steps: Callable[..., list[recipe.Launch]]) -> None:
    """States of the parts side by side, and the merge of them."""
    qkv = torch.empty(2, 300, 3, 6, 96, dtype=torch.bfloat16)
    q, k = qkv[:, :, 0].transpose(1, 2), torch.empty(2, 3, 9000, 96, dtype=torch.bfloat16)
    main, merge = steps(q, k, Variant(CAUSAL, 8700))
    given, config = main.arguments, main.arguments["CFG"]
    assert config.SPLIT and (config.BM, config.PACK) == (128, 2) and given["parts"] == 4
    names = ("total", "NT", "H", "GROUP", "BH")
    assert [given[name] for name in names] == [4 * 30, 5, 3, 2, 6]
    assert main.programs == 4 * 30
    assert given["o_ptr"].shape == (8, 6, 300, 96) and given["o_ptr"].dtype == torch.float32
    assert given["lse_ptr"].shape == (8, 6, 300)
    assert [given[f"so_{x}"] * 8 for x in "bhs"] == [6 * 300 * 96, 300 * 96, 96]
    assert merge.programs == 12 * 300 and merge.arguments["parts"] == 4
    out = merge.arguments["out_ptr"]
    assert out.dtype == torch.bfloat16 and out.strides == (6 * 300 * 96, 96, 6 * 96, 1)
    assert merge.arguments["lse_ptr"].shape == (2, 6, 300)


def test_launches_where_keys_are_not_split(steps: Callable[..., list[recipe.Launch]]) -> None:
    """Where a mask lets few keys be seen, or the largest score is asked for."""
    q, k = (torch.empty(1, 2, n, 64, dtype=torch.bfloat16) for n in (200, 9000))

    def kernels(offset: int, named: dict[str, Any], **kind: bool) -> list[str]:
        variant = Variant(Kind(True, **kind), offset, named if kind else {})
        return [x.kernel.__name__ for x in steps(q, k, variant)]

    split = ["attention_forward_kernel", "attention_merge_kernel"]
    assert kernels(8800, {}) == split
    assert kernels(0, {}) == split[:1]  # the first 200 keys
    assert kernels(-900, {}) == split[:1]
    assert kernels(8800, {"left": 1000}, WINDOW=True) == split[:1]
    assert kernels(8800, {"left": 5000}, WINDOW=True) == split
    assert kernels(8800, {"left": 1000, "first": 3000}, WINDOW=True, FIRST=True) == split
    assert kernels(8800, {}, MAX_SCORE=True) == split[:1]


# --- on the device -----------------------------------------------------------------------------------

HALF, BRAIN = torch.float16, torch.bfloat16
SETS: tuple[tuple[str, ...], ...] = (
    (),
    ("causal",),
    ("top_left",),
    ("left_window",),
    ("causal", "left_window", "softcap"),
    ("first_keys", "sinks"),
    ("causal", "sinks", "alibi"),
    ("causal", "documents"),
    ("padding", "sinks"),
    ("intervals", "causal", "alibi"),
    ("causal", "first_keys", "softcap", "sinks", "alibi", "intervals"),
)


def problem(shape: tuple[int, ...], D: int, dtype: torch.dtype = BRAIN, **others: Any) -> Problem:
    return Problem(dtype, *shape, D, D, causal=False, **others)


def check(generator: random.Random, p: Problem, names: tuple[str, ...], split: bool = True) -> None:
    """All results and gradients against float64, that of lse included."""
    call = drawn(generator, p, names, "cuda")
    print(call)
    made = make(call, "cuda")
    with launches() as seen:
        got = run(call, *made, "hopper")
    assert split == any(x.kernel == "attention_merge_kernel" for x in seen)
    assert_within_bound(got, *exact_and_eager(call, *made), call)


@pytest.fixture
def split_into(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[int], None]]:
    """Let all calls be split into so many parts, however few keys they have."""
    chosen = configs.attention_forward_hopper

    def split(parts: int) -> None:
        def forced(head_dim: int, Sk: int, kind: Kind, *others: int) -> configs.HopperForward:
            assert not kind.unsupported_by("split")
            config = chosen(head_dim, 8192, kind, *others)
            overlap = config.OVERLAP and config.D < 256
            return dataclasses.replace(config, SPLIT=True, IDLE=False, OVERLAP=overlap)

        monkeypatch.setattr(configs, "attention_forward_hopper", forced)
        monkeypatch.setattr(configs, "forward_parts", lambda *_: parts)
        call_cache.forget()

    yield split
    call_cache.forget()


@pytest.mark.gpu
@pytest.mark.parametrize("D", [64, 128, 256])
@pytest.mark.parametrize("parts", [1, 2, 3])
def test_a_few_tiles_in_parts(
    parts: int, D: int, hopper: None, split_into, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The smallest call first: one item for each part, and a part without keys."""
    poison(monkeypatch)
    split_into(parts)
    for Sq, Sk in ((64, 256), (100, 300), (5, 40)):
        q, k, v = (torch.randn(1, 1, S, D, device="cuda").bfloat16() for S in (Sq, Sk, Sk))
        for causal in (False, True):
            exact = reference.attention(q.double(), k.double(), v.double(), causal=causal)
            out, lse = flashproto.attention(q, k, v, causal=causal, return_lse=True, impl="hopper")
            torch.testing.assert_close(out.double(), exact[0], rtol=2e-2, atol=2e-2)
            torch.testing.assert_close(lse.double(), exact[1], rtol=1e-4, atol=1e-3)


@pytest.mark.gpu
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("D", [64, 128, 256])
@pytest.mark.parametrize("causal", [False, True])
def test_calls_that_are_split(
    causal: bool, D: int, shape: str, seed: int, hopper: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    poison(monkeypatch)
    p = problem(SHAPES[shape], D, HALF if D == 64 else BRAIN, strides="tokens first")
    check(random.Random(seed), p, ("causal",) if causal else ())


@pytest.mark.gpu
@pytest.mark.parametrize("names", SETS[2:], ids="+".join)
@pytest.mark.parametrize("parts", [2, 7])
@pytest.mark.parametrize("D", [64, 128, 256])
def test_features_in_parts(
    D: int,
    parts: int,
    names: tuple[str, ...],
    seed: int,
    hopper: None,
    split_into,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Of a random shape, some parts without keys, and rows without keys."""
    poison(monkeypatch)
    split_into(parts)
    generator = random.Random(seed)
    Hkv, group = generator.choice((1, 2, 3)), generator.choice((1, 2, 4))
    shape = (
        generator.choice((1, 2)),
        Hkv * group,
        Hkv,
        generator.choice((generator.randint(1, 70), generator.randint(1, 600))),
        generator.choice((generator.randint(1, 200), generator.randint(1, 1500))),
    )
    p = problem(shape, D, strides=generator.choice(("contiguous", "tokens first", "packed")))
    check(generator, p, names)


@pytest.mark.gpu
@pytest.mark.parametrize("case", range(60))
def test_random_calls_in_parts(
    case: int, seed: int, hopper: None, split_into, monkeypatch: pytest.MonkeyPatch
) -> None:
    poison(monkeypatch)
    generator = random.Random(seed)
    split_into(generator.choice((1, 2, 3, 5, 8, 30, 150)))
    Hkv, group = generator.choice((1, 2, 5)), generator.choice((1, 2, 3, 8))
    shape = (
        generator.choice((1, 2, 9)),
        Hkv * group,
        Hkv,
        generator.randint(1, 400),
        generator.randint(1, 900),
    )
    D = generator.choice((64, 72, 96, 128, 256))
    check(generator, problem(shape, D, generator.choice((HALF, BRAIN))), generator.choice(SETS))


@pytest.mark.gpu
def test_keys_that_no_query_sees_are_not_met(hopper: None, split_into) -> None:
    """Not by parts without keys either."""
    split_into(7)
    q, k, v = (torch.randn(1, 2, S, 128, device="cuda").bfloat16() for S in (100, 900, 900))
    mask = flashproto.masks.causal(top_left=True)
    wanted = flashproto.attention(q, k[:, :, :128], v[:, :, :128], mask=mask, impl="hopper")
    k[:, :, 128:], v[:, :, 128:] = math.nan, math.inf
    assert torch.equal(flashproto.attention(q, k, v, mask=mask, impl="hopper"), wanted)


@pytest.mark.gpu
@pytest.mark.parametrize("causal", [False, True])
def test_the_same_bits_again_and_in_a_graph(causal: bool, hopper: None) -> None:
    """Of a shape that never ran before it is captured, and of other data."""
    seen, q = (torch.randn(1, 4, n, 128, device="cuda").bfloat16() for n in (300, 310))
    k, v = (torch.randn(1, 2, 9000, 128, device="cuda").bfloat16() for _ in range(2))

    def call(q: Tensor) -> Tensor:
        return flashproto.attention(q, k, v, causal=causal, impl="hopper")

    call(seen)  # compiles
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = call(q)
    for _ in range(2):
        q.copy_(torch.randn_like(q))
        graph.replay()
        with launches() as made:
            found = [call(q) for _ in range(20)]
        assert any(x.kernel == "attention_merge_kernel" for x in made)
        assert all(torch.equal(captured, x) for x in found)


@pytest.mark.gpu
@pytest.mark.gib(8)
@pytest.mark.parametrize(("Hq", "Hkv"), [(16, 2), (8, 1)])
def test_a_chunk_of_a_long_prompt(Hq: int, Hkv: int, hopper: None) -> None:
    """As the sum of parts of its keys that are not split."""
    Sq, Sk = 512, 131072
    q = torch.randn(1, Hq, Sq, 128, device="cuda").bfloat16()
    k, v = (torch.randn(1, Hkv, Sk, 128, device="cuda").bfloat16() for _ in range(2))
    with launches() as seen:
        out, lse = flashproto.attention(q, k, v, causal=True, return_lse=True, impl="hopper")
    assert any(x.kernel == "attention_merge_kernel" for x in seen)
    outs, lses = [], []
    for part in range(0, Sk, 2048):
        last = part == Sk - 2048
        k_part, v_part = (x[:, :, part : part + 2048] for x in (k, v))
        made = flashproto.attention(q, k_part, v_part, causal=last, return_lse=True, impl="triton")
        outs.append(made[0].float())
        lses.append(made[1])
    wanted, wanted_lse = flashproto.merge_attention(outs, lses)
    torch.testing.assert_close(out.float(), wanted, rtol=2**-7, atol=1e-4)
    torch.testing.assert_close(lse, wanted_lse, rtol=0, atol=2e-4)
