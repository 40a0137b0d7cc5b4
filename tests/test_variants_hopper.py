"""Attention's variants on the Hopper kernels: the key tiles they visit, and results against float64."""

from __future__ import annotations

import dataclasses
import itertools
import math
import random
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from attention_problem import Problem
from hypothesis import given
from hypothesis import strategies as st
from rows import poison
from schedule_on_the_host import Pointer, blocks, load, ranges_on_the_host
from torch import Tensor
from variant_problem import (
    Call,
    assert_within_bound,
    drawn,
    eager,
    eager_packed,
    exact_and_eager,
    make,
    make_packed,
    run,
    starts,
)

import flashproto
from flashproto import backends, configs, masks
from flashproto.kernels import schedule
from flashproto.kernels.hopper import attention_forward_consumers as consumers
from flashproto.kernels.hopper import attention_forward_work as work
from flashproto.kernels.hopper import items as work_items
from flashproto.kernels.schedule import (
    LIST,
    intervals_kernel,
    order_lists_kernel,
    query_slots_kernel,
    visits_kernel,
)
from flashproto.kernels.scores import Given
from flashproto.reference.mask_table import TILE, packed
from flashproto.variant import Kind, Variant, backward_backend, reasons

# --- which key tiles are visited --------------------------------------------------------------------


def visited(config: configs.HopperForward, row: int, Sk: int, offset: int, given: Given) -> list[int]:
    """The key tiles of the work item with queries from `row` on, in the kernels' order."""
    _, _, _, end = schedule.key_ranges.fn(row, Sk, offset, given, config.BQ, config.BN, config.KIND)
    walk = work.walk_of.fn(0, 0, row, 0, Sk, offset, given, config)
    n = max(end - walk[1], 1)
    return [int(work.tile_at.fn(n - 1 - i, walk, config)) for i in range(n)]


@pytest.fixture
def host(monkeypatch: pytest.MonkeyPatch) -> None:
    ranges_on_the_host(monkeypatch)
    monkeypatch.setattr(work, "key_ranges", schedule.key_ranges.fn)
    monkeypatch.setattr(work, "first_tiles", schedule.first_tiles)
    monkeypatch.setattr(work, "gl", SimpleNamespace(where=lambda c, x, y: x if c else y))


@pytest.mark.parametrize("first", [0, 1, 130, 5000])
@pytest.mark.parametrize("left", [0, 100, 1024, 5000])
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize(("Sq", "Sk", "offset"), [(3000, 3000, 0), (700, 2100, 1400), (2100, 700, 40)])
def test_an_item_visits_the_tiles_in_its_range_from_right_to_left(
    Sq: int, Sk: int, offset: int, causal: bool, left: int, first: int, host: None
) -> None:
    kind = Kind(CAUSAL=causal, WINDOW=True, FIRST=first > 0)
    for D in (64, 128, 256):
        config = configs.attention_forward_hopper(D, Sk, kind, Sq)
        for row in range(0, Sq, config.BQ):
            begin, _, _, end = schedule.key_ranges.fn(
                row, Sk, offset, Given(left, first), config.BQ, config.BN, kind
            )
            early = schedule.first_tiles(begin, Given(left, first), config.BN, kind)
            tiles = visited(config, row, Sk, offset, Given(left, first))
            assert tiles == [*range(end - 1, begin - 1, -1), *range(early - 1, -1, -1)] or (
                begin == end and early == 0 and len(tiles) == 1
            )


def test_a_window_visits_no_more_tiles_than_it_needs(host: None) -> None:
    S, left = 16384, 1023
    for D, most in ((64, 11), (128, 9), (256, 18)):
        kind = Kind(CAUSAL=True, WINDOW=True)
        config = configs.attention_forward_hopper(D, S, kind)
        for row in range(0, S, config.BQ):
            assert len(visited(config, row, S, 0, Given(left))) <= most


@pytest.mark.parametrize("band", [Kind(), Kind(CAUSAL=True), Kind(True, True), Kind(True, True, True)])
@pytest.mark.parametrize(("Sq", "Sk"), [(300, 300), (90, 700), (500, 130)])
def test_lists_of_the_tiles_that_intervals_visit(
    Sq: int, Sk: int, band: Kind, device: str, seed: int
) -> None:
    """In order, each tile that some query sees, and no clear one that intervals hide from some query;
    of documents no other."""
    generator = random.Random(seed)
    BM, BN, rows, left, first, offset = 64, 32, 2, 70, 40, Sk - Sq
    kind = dataclasses.replace(band, INTERVALS=True)
    ids = torch.tensor([runs_of(generator, Sk) for _ in range(rows)])
    mask = (
        masks.documents(ids[:, -Sq:], ids)
        if Sq <= Sk
        else masks.documents(ids.new_zeros(rows, Sq), ids)
    )
    vectors = [x.view(rows, Sk).to(device).contiguous() for x in mask.intervals(Sq, Sk)]
    query_tiles, key_tiles = -(-Sq // BM), -(-Sk // BN)
    tiles = torch.zeros(rows, 4, key_tiles, dtype=torch.int32, device=device)
    intervals_kernel[(rows * key_tiles,)](*vectors, tiles, Sk, BLOCK_N=BN)
    made = torch.full((rows, query_tiles, LIST.value + key_tiles), -7, dtype=torch.int32, device=device)
    given = Given(left if kind.WINDOW else None, first if kind.FIRST else None, work=tiles)
    constants = {"BLOCK_M": BM, "BLOCK_N": BN, "KIND": kind}
    visits_kernel[(rows * query_tiles,)](made, Sq, Sk, offset, given, **constants)
    check_order(made)
    i, j = torch.arange(Sq)[:, None], torch.arange(Sk)
    begin, end = (x.cpu()[:, None] for x in vectors)
    between = (begin <= i) & (i < end)
    seen = between.clone()
    if kind.CAUSAL:
        seen &= j <= i + offset
    if kind.WINDOW:
        seen &= (j >= i + offset - left) | (j < (first if kind.FIRST else 0))
    for row, m in itertools.product(range(rows), range(query_tiles)):
        _, _, count, *found = made[row, m].tolist()
        found = found[:count]
        assert found == sorted(found) and count >= 1
        of_tile, clear = (x[row, m * BM : (m + 1) * BM].split(BN, 1) for x in (seen, between))
        needed = [t for t, pairs in enumerate(of_tile) if pairs.any()]
        assert {x // 2 for x in found} >= set(needed)
        assert all(clear[x // 2].all() for x in found if x % 2)
        if kind == Kind(INTERVALS=True):
            assert [x // 2 for x in found] == (needed or [0])


@pytest.mark.parametrize("band", [Kind(), Kind(CAUSAL=True), Kind(True, True), Kind(True, True, True)])
@pytest.mark.parametrize(("Sq", "Sk"), [(300, 300), (90, 700), (500, 130)])
@pytest.mark.parametrize(("BM", "BN"), [(128, 128), (64, 128), (128, 64)])
def test_lists_of_the_tiles_that_tables_visit(
    BM: int, BN: int, Sq: int, Sk: int, band: Kind, device: str, seed: int
) -> None:
    """In order, each tile that some query sees, and no clear one of which the table hides a key or that
    has too few; without a band no other tile than those of which the table shows some."""
    generator = random.Random(seed)
    rows, left, first, offset = 3, 70, 40, Sk - Sq
    kind = dataclasses.replace(band, TABLE=True)
    shown = blocks(generator, (rows, 1, Sq, Sk))
    bits, table = (x.to(device) for x in packed(shown))
    query_tiles, key_tiles = -(-Sq // BM), -(-Sk // BN)
    made = torch.full((rows, query_tiles, LIST.value + key_tiles), -7, dtype=torch.int32, device=device)
    given = Given(left if kind.WINDOW else None, first if kind.FIRST else None, bits=bits, table=table)
    constants = {"BLOCK_M": BM, "BLOCK_N": BN, "KIND": kind}
    visits_kernel[(rows * query_tiles,)](made, Sq, Sk, offset, given, **constants)
    check_order(made)
    i, j = torch.arange(Sq)[:, None], torch.arange(Sk)
    seen = shown[:, 0].clone()
    if kind.CAUSAL:
        seen &= j <= i + offset
    if kind.WINDOW:
        seen &= (j >= i + offset - left) | (j < (first if kind.FIRST else 0))
    for row, m in itertools.product(range(rows), range(query_tiles)):
        _, _, count, *found = made[row, m].tolist()
        found = found[:count]
        assert found == sorted(found) and count >= 1
        of_tile, of_table = (
            x[row, ..., m * BM : (m + 1) * BM, :].split(BN, -1) for x in (seen, shown[:, 0])
        )
        needed = {t for t, pairs in enumerate(of_tile) if pairs.any()}
        assert {x // 2 for x in found} >= needed
        for x in found:
            assert not x % 2 or (of_table[x // 2].all() and of_table[x // 2].shape[1] == BN)
        if kind == Kind(TABLE=True):
            own = table[row, 0].cpu()[m * BM // TILE]
            some = [t for t in range(key_tiles) if own[t * BN // TILE] > 0]
            clear = [t for t in some if own[t * BN // TILE] > 1 and (t + 1) * BN <= Sk]
            assert found == ([2 * t + (t in clear) for t in some] or [0])


def check_order(made: Tensor) -> None:
    """Each row has all of its query tiles, those that visit more key tiles first, in blocks of counts
    as in one."""
    rows, query_tiles, _ = made.shape
    wanted = [sorted((-n, tile) for tile, n in enumerate(row)) for row in made[..., 2].tolist()]
    for BLOCK in (2, 256):
        ordered = made.clone()
        order_lists_kernel[(rows * query_tiles,)](ordered, *made.shape[1:], BLOCK=BLOCK)
        assert [[(-n, tile) for tile, n in row] for row in ordered[..., :2].tolist()] == wanted
        assert torch.equal(ordered[..., 2:], made[..., 2:])


@pytest.mark.parametrize(("BH", "HG"), [(1, 1), (6, 1), (6, 4), (6, 6), (7, 16)])
@pytest.mark.parametrize("NT", [1, 2, 5])
def test_items_of_lists(NT: int, BH: int, HG: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each place of each head once: the first of all heads, then the others in order, of HG heads
    side by side."""
    language = SimpleNamespace(minimum=min, maximum=max, where=lambda c, x, y: x if c else y)
    monkeypatch.setattr(work_items, "gl", language)
    found = [work_items.item_of_lists.fn(t, NT, BH, HG) for t in range(NT * BH)]
    first, others = found[:BH], found[BH:]
    assert first == [(head, 0) for head in range(BH)]
    wanted = itertools.product(range(BH), range(1, NT))
    assert others == sorted(wanted, key=lambda x: (x[0] // HG, x[1], x[0]))


class Tile(Tensor):
    """A tensor as device code has it."""

    @property
    def type(self) -> Any:  # type: ignore[override]
        return SimpleNamespace(layout=None)


class Bits(Pointer):
    """To words of 32 bits, or as `to` has it of 64."""

    def to(self, dtype: Any) -> Pointer:
        assert dtype == torch.int64 and self.at % 2 == 0
        return Pointer(self.memory.view(torch.int64), self.at // 2)


@pytest.mark.parametrize("BN", [64, 128])
def test_a_tile_is_hidden_where_its_bits_are_0(
    BN: int, seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """At all places of a mask, rows and keys that do not exist among them."""
    language = SimpleNamespace(
        arange=lambda start, stop, layout: torch.arange(start, stop),
        full=lambda shape, value, dtype, layout: torch.full(shape, value, dtype=dtype),
        where=lambda c, x, y: torch.where(c, x, torch.tensor(y)),
        convert_layout=lambda x, layout, assert_trivial: x,
        cdiv=lambda a, b: -(-a // int(b)),
        pointer_type=lambda dtype: dtype,
        load=load,
        SliceLayout=lambda dim, parent: None,
        int64=torch.int64,
    )
    monkeypatch.setattr(consumers, "gl", language)
    monkeypatch.setattr(consumers, "along", lambda layout, dim, rank: None)
    generator = random.Random(seed)
    for _ in range(5):
        Sq, Sk = generator.randrange(1, 400), generator.randrange(1, 400)
        seen = blocks(generator, (1, 2, Sq, Sk))
        memory, _ = packed(seen)
        for h, row, col in itertools.product(range(2), range(0, Sq, 64), range(0, Sk, BN)):
            bits = Bits(memory.flatten(), h * memory[0, 0].numel())
            x = torch.randn(64, BN).as_subclass(Tile)
            got = consumers.mask_by_bits.fn(x, row, col, Sk, bits).as_subclass(Tensor)
            own = seen[0, h, row : row + 64, col : col + BN]
            wanted = torch.full((64, BN), -math.inf)
            wanted[: own.shape[0], : own.shape[1]] = torch.where(
                own, x.as_subclass(Tensor)[: own.shape[0], : own.shape[1]], -math.inf
            )
            assert torch.equal(got, wanted)


@pytest.mark.parametrize(
    ("lengths", "behind"),
    [
        ([(70, 70), (0, 5), (200, 90), (33, 300), (64, 0)], (9, 2)),
        ([], (40, 0)),
        ([(1, 1)], (0, 0)),
        ([(0, 0), (0, 3)], (0, 0)),
    ],
)
@pytest.mark.parametrize("gap", [None, (0, 3), (150, 40)])
@pytest.mark.parametrize(
    "kind", [Kind(VARLEN=True), Kind(True, True, True, VARLEN=True)], ids=lambda kind: kind.name
)
def test_slots_of_sequences_come_longest_first(
    lengths: list[tuple[int, int]],
    behind: tuple[int, int],
    kind: Kind,
    gap: tuple[int, int] | None,
    device: str,
) -> None:
    """Each tile of each sequence once, with what its sequence is, and of the key tiles it visits as
    many as key_ranges says; tokens behind the last sequence see none, and gaps have no tile."""
    if not any(n for n, _ in lengths) and not behind[0] and not (gap and gap[0]):
        pytest.skip("no query")
    BM, BN, left, first = 64, 32, 70, 40
    used = [torch.tensor([n[side] for n in lengths], dtype=torch.int32) for side in (0, 1)]
    of_gap = gap or (0, 0)
    cu = starts([(Sq + of_gap[0], Sk + of_gap[1]) for Sq, Sk in lengths], device)
    totals = [int(x[-1]) + more for x, more in zip(cu, behind, strict=True)]
    sequences, queries, keys = (2 * n + 1 for n in (len(lengths), *totals))
    given = Given(
        left=left if kind.WINDOW else None,
        first=first if kind.FIRST else None,
        cu_seqlens_q=cu[0],
        cu_seqlens_k=cu[1],
        seqused_q=None if gap is None or gap[0] == 0 else used[0].to(device),
        seqused_k=None if gap is None else used[1].to(device),
        sequences=sequences,
        queries=queries,
        keys=keys,
    )
    slots = totals[0] // BM + len(lengths) + 1
    ordered = torch.full((1 + slots, 8), -7, dtype=torch.int32, device=device)
    constants = {"BLOCK": 4, "BLOCK_M": BM, "BLOCK_N": BN, "KIND": kind}
    query_slots_kernel[(slots,)](ordered, 0, given, slots, **constants)
    wanted = []
    at = [0, 0]
    for Sq, Sk in (*lengths, (behind[0], 0)):
        for i0 in range(0, Sq, BM):
            high = min(i0 + BM + Sk - Sq, Sk) if kind.CAUSAL else Sk
            end = -(-max(high, 0) // BN)
            begin, early = 0, 0
            if kind.WINDOW:
                begin = min(max(i0 + Sk - Sq - left, 0) // BN, end)
                early = min(-(-first // BN), begin)
            wanted.append((max(end - begin + early, 1), i0, at[0], Sq, at[1], Sk))
        at = [at[0] + Sq + of_gap[0], at[1] + Sk + of_gap[1]]
    count = int(ordered[0, 0])
    found = [tuple(x[:6]) for x in ordered[1:].tolist()]
    if not wanted:  # a slot without queries, since programs take one at least
        assert count == 1 and found[0][:1] == (0,) and found[0][1] >= found[0][3]
        wanted = found[:1]
    assert sorted(found[:count]) == sorted(wanted)
    tiles = [x[0] for x in found]
    assert tiles == sorted(tiles, reverse=True) and not any(tiles[count:])


def runs_of(generator: random.Random, length: int) -> list[int]:
    """Numbers of documents, one behind the other."""
    made: list[int] = []
    while len(made) < length:
        made += [len(made)] * generator.randrange(1, length)
    return made[:length]


LENGTH = st.integers(1, 3000)


@given(Sq=LENGTH, Sk=LENGTH, offset=st.integers(-500, 500), left=LENGTH, D=st.sampled_from((64, 128)))
def test_costs_of_items_under_a_window_are_their_tiles(
    Sq: int, Sk: int, offset: int, left: int, D: int
) -> None:
    """One for each item, from the last query tile to the first: its key tiles, and one more."""
    kind = Kind(CAUSAL=True, WINDOW=True)
    config = configs.attention_forward_hopper(D, Sk, kind, Sq)
    costs = configs.hopper_forward.item_costs(config, Sq, Sk, offset, left)
    assert len(costs) == -(-Sq // config.BQ)
    with pytest.MonkeyPatch.context() as monkeypatch:
        ranges_on_the_host(monkeypatch)
        for tile, cost in enumerate(reversed(costs)):
            begin, _, _, end = schedule.key_ranges.fn(
                tile * config.BQ, Sk, offset, Given(left), config.BQ, config.BN, kind
            )
            assert cost == max(end - begin, 1) + 1


# --- what runs where --------------------------------------------------------------------------------


def test_kinds_that_the_kernels_have_and_those_they_have_not() -> None:
    q = torch.zeros(1, 1, 4, 64, dtype=torch.bfloat16)
    have = Kind(True, True, True, True, 1, True, True, True, VARLEN=True)
    assert list(reasons("hopper", Variant(have), q, q, q, True)) == []
    table = dataclasses.replace(have, INTERVALS=False, VARLEN=False, TABLE=True)
    assert list(reasons("hopper", Variant(table), q, q, q, True)) == []
    for kind, text in (
        (Kind(ENTROPY=True), "no entropy"),
        (Kind(INTERVALS=True, TABLE=True), "no intervals beside table"),
    ):
        (reason,) = reasons("hopper", Variant(kind), q, q, q, True)
        assert isinstance(reason, str) and text in reason
    for kind in (Kind(), Kind(CAUSAL=True)):
        assert backward_backend("hopper", kind) == "hopper"
    for kind in (have, Kind(ENTROPY=True)):
        assert backward_backend("triton", kind) == "triton"


# --- results ----------------------------------------------------------------------------------------

HALF, BRAIN = torch.float16, torch.bfloat16
SHAPES = {
    "a few tiles": (2, 4, 2, 300, 300),
    "more keys": (1, 3, 1, 777, 1301),
    "more queries": (1, 2, 2, 1100, 300),
    "few queries": (3, 4, 2, 5, 900),
    "more items than programs": (30, 4, 4, 400, 700),
}
TABLES = (
    ("boolean",),
    ("from_function",),
    ("either", "sinks"),
    ("dilated", "softcap"),
    ("boolean", "causal"),
    ("boolean", "window", "max_score"),
    ("from_function", "first_keys", "softcap", "sinks", "alibi", "max_score"),
)
SETS = (
    ("causal", "left_window"),
    ("window", "softcap"),
    ("left_window", "sinks"),
    ("first_keys", "alibi", "max_score"),
    ("softcap", "max_score"),
    ("sinks", "alibi"),
    ("causal", "softcap", "sinks"),
    ("causal", "max_score"),
    ("causal", "first_keys", "softcap", "sinks", "alibi", "max_score"),
    ("causal", "alibi"),
    ("right_window", "alibi"),
    ("window", "softcap", "sinks", "alibi"),
    ("documents", "causal", "alibi"),
    ("causal", "documents"),
    ("padding", "sinks"),
    ("prefix", "softcap"),
    ("tree",),
    ("intervals", "causal", "max_score"),
    ("documents", "first_keys", "softcap", "sinks", "alibi", "max_score"),
    *TABLES,
)


def problem(shape: tuple[int, ...], D: int, dtype: torch.dtype = BRAIN, **others: Any) -> Problem:
    return Problem(dtype, *shape, D, D, causal=False, **others)


def compare(call: Call, device: str = "cuda") -> None:
    """The forward's results against float64."""
    print(call)
    inputs, _ = make(call, device)
    inputs = [x.detach() for x in inputs]
    with torch.no_grad():
        made = flashproto.attention(*inputs, **call.options, return_lse=True, impl="hopper")
        got = dict(zip(("out", "lse", *call.aux), made, strict=True))
        exact, plain = (
            eager(*(x.to(dtype) for x in inputs), parameters_of(call, dtype), call)
            for dtype in (torch.float64, call.problem.dtype)
        )
    assert_within_bound(got, {n: exact[n] for n in got}, {n: plain[n] for n in got}, call)


def parameters_of(call: Call, dtype: torch.dtype) -> dict[str, Tensor]:
    keep = torch.float64 if dtype == torch.float64 else torch.float32
    return {name: x.detach().to(keep) for name, x in call.parameters.items()}


@pytest.mark.gpu
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("names", SETS, ids="+".join)
def test_features_against_float64(
    names: tuple[str, ...], shape: str, seed: int, hopper: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    poison(monkeypatch)
    compare(drawn(random.Random(seed), problem(SHAPES[shape], 128), names, "cuda"))


@pytest.mark.gpu
@pytest.mark.parametrize("shape", ["more keys", "more queries", "few queries"])
@pytest.mark.parametrize("D", [64, 96, 256])
@pytest.mark.parametrize(
    "names", [SETS[0], SETS[8], SETS[18], TABLES[0], TABLES[4], TABLES[6]], ids="+".join
)
def test_features_at_other_head_dims(
    names: tuple[str, ...], D: int, shape: str, seed: int, hopper: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    poison(monkeypatch)
    dtype = HALF if D == 96 else BRAIN
    call = drawn(random.Random(seed), problem(SHAPES[shape], D, dtype, strides="packed"), names, "cuda")
    compare(call)


@pytest.mark.gpu
@pytest.mark.parametrize("first", [0, 64, 129])
@pytest.mark.parametrize("left", [0, 1, 63, 64, 127, 128, 129, 500])
def test_windows_at_the_edges_of_tiles(left: int, first: int, hopper: None) -> None:
    p = problem((1, 2, 1, 520, 520), 128)
    mask = masks.window(left, 0, first=first)

    def sees(o: int, b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        return ((i + o - left <= j) | (j < first)) & (j <= i + o)

    compare(Call(p, ("causal",), {"mask": mask}, (sees,)))


@pytest.mark.gpu
def test_rows_that_see_no_key(hopper: None) -> None:
    """They give 0, and -inf or the sink; rows before the first key, and behind a window."""
    q = torch.randn(1, 2, 700, 128, device="cuda", dtype=BRAIN)
    k = torch.randn(1, 2, 200, 128, device="cuda", dtype=BRAIN)
    sinks = torch.randn(2, device="cuda")
    for options in ({"causal": True}, {"causal": True, "window": (50, 0)}):
        out, lse, top = flashproto.attention(
            q, k, k, **options, return_lse=True, return_aux=("max_score",), impl="hopper"
        )
        assert not out[:, :, :500].any() and out[:, :, 500:].any(-1).all()
        assert (lse[:, :, :500] == -math.inf).all() and (top[:, :, :500] == -math.inf).all()
        out, lse = flashproto.attention(q, k, k, **options, sinks=sinks, return_lse=True, impl="hopper")
        assert not out[:, :, :500].any()
        torch.testing.assert_close(lse[0, :, :500], sinks[:, None].expand(-1, 500))


@pytest.mark.gpu
@pytest.mark.gib(24)
@pytest.mark.parametrize("first", [0, 4])
def test_a_window_in_long_rows(first: int, hopper: None) -> None:
    p = problem((1, 2, 1, 8192, 8192), 128)
    mask = masks.window(1023, 0, first=first)

    def sees(o: int, b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        return ((i - 1023 <= j) | (j < first)) & (j <= i)

    compare(Call(p, (), {"mask": mask}, (sees,)))


@pytest.mark.gpu
@pytest.mark.gib(24)
def test_documents_in_long_rows(hopper: None) -> None:
    """Documents of 1000 tokens, which are no multiples of tiles."""
    p = problem((1, 2, 1, 8192, 8192), 128)
    ids = torch.arange(8192, device="cuda") // 1000

    def sees(o: int, b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        return (ids[i] == ids[j]) & (j <= i)

    compare(Call(p, (), {"causal": True, "mask": masks.documents(ids)}, (sees,)))


LENGTHS: dict[str, list[tuple[int, int]]] = {
    "a few": [(300, 300), (0, 7), (1, 1), (129, 129), (40, 0), (700, 400)],
    "none": [],
    "many": [(n, n) for n in (128, 4000, 17, 256, 90, 1, 1000, 300, 64, 65) * 4],
    "a short one": [(5, 900)],
}


@pytest.mark.gpu
@pytest.mark.parametrize("behind", [(0, 0), (33, 20)])
@pytest.mark.parametrize("lengths", LENGTHS)
@pytest.mark.parametrize(
    "names",
    [(), ("causal",), ("causal", "first_keys", "softcap", "sinks", "alibi", "max_score")],
    ids="+".join,
)
@pytest.mark.parametrize("D", [64, 128, 256])
def test_sequences_against_float64(
    D: int,
    names: tuple[str, ...],
    lengths: str,
    behind: tuple[int, int],
    seed: int,
    hopper: None,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """What is behind the last sequence is no number, and must not be met."""
    if lengths == "none" and behind == (0, 0):
        pytest.skip("no token")
    poison(monkeypatch)
    given = LENGTHS[lengths]
    call = drawn(random.Random(seed), problem((1, 4, 2, 300, 300), D), names, "cuda")
    print(call, lengths, behind)
    inputs, _ = make_packed(call, given, behind, "cuda")
    q, k, v = (x.detach() for x in inputs)
    T, Tk = (sum(n[side] for n in given) for side in (0, 1))
    with torch.no_grad():
        exact, plain = (
            eager_packed(*(x.to(dtype) for x in (q, k, v)), parameters_of(call, dtype), call, given)
            for dtype in (torch.float64, BRAIN)
        )
        k[Tk:], v[Tk:], q[T:] = (torch.nan,) * 3
        if k.shape[0] == 0:
            pytest.skip("no key")
        made = flashproto.attention_varlen(
            q, k, v, *starts(given, "cuda"), **call.options, return_lse=True, impl="hopper"
        )
    got = dict(zip(("out", "lse", *call.aux), made, strict=True))
    assert_within_bound(got, {n: exact[n] for n in got}, {n: plain[n] for n in got}, call)


@pytest.mark.gpu
def test_values_of_other_sequences_are_not_met(hopper: None) -> None:
    q, k, v = (torch.randn(500, 2, 128, device="cuda", dtype=BRAIN) for _ in range(3))
    cu = torch.tensor([0, 100, 330, 500], dtype=torch.int32, device="cuda")
    wanted = flashproto.attention_varlen(q, k, v, cu, cu, impl="hopper")
    k[100:330], v[100:330] = torch.nan, torch.inf
    got = flashproto.attention_varlen(q, k, v, cu, cu, impl="hopper")
    assert torch.equal(got[:100], wanted[:100]) and torch.equal(got[330:], wanted[330:])
    assert got[100:330].isnan().all()


@pytest.mark.gpu
def test_other_lengths_in_a_graph(hopper: None) -> None:
    q, k, v = (torch.randn(600, 4, 64, device="cuda", dtype=BRAIN) for _ in range(3))
    lengths = [[0, 100, 330, 600], [0, 0, 600, 600], [0, 64, 128, 599]]
    cu = torch.tensor(lengths[0], dtype=torch.int32, device="cuda")

    def call() -> Tensor:
        return flashproto.attention_varlen(q, k, v, cu, cu, causal=True, impl="hopper")

    call()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = call()
    for own in lengths:
        cu.copy_(torch.tensor(own))
        graph.replay()
        assert torch.equal(out, call())


@pytest.mark.gpu
def test_gradients_come_from_where_there_are_some(
    seed: int, hopper: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    poison(monkeypatch)
    names = ("causal", "left_window", "softcap", "sinks", "alibi")
    call = drawn(random.Random(seed), problem((2, 4, 2, 300, 500), 64), names, "cuda")
    made = make(call, "cuda")
    assert_within_bound(run(call, *made, "hopper"), *exact_and_eager(call, *made), call)


@pytest.mark.gpu
def test_variants_are_chosen_to_run_on_hopper(hopper: None) -> None:
    q = torch.randn(1, 2, 100, 64, device="cuda", dtype=BRAIN)
    chosen = []
    with backends.watch_choices(lambda operator, backend, against: chosen.append(backend)):
        flashproto.attention(q, q, q, causal=True, window=(30, 0), softcap=20.0)
        flashproto.attention(q, q, q, return_aux=("entropy",))
    assert chosen == ["hopper", "triton"]


@pytest.mark.gpu
def test_the_same_bits_again_and_in_a_graph(hopper: None) -> None:
    """Other data in a captured graph."""
    q, k, v = (torch.randn(2, 4, 900, 128, device="cuda", dtype=BRAIN) for _ in range(3))
    options: dict[str, Any] = {"window": (200, 0), "softcap": 20.0, "impl": "hopper"}
    wanted = flashproto.attention(q, k, v, **options)
    static = torch.zeros_like(q)
    flashproto.attention(static, k, v, **options)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = flashproto.attention(static, k, v, **options)
    static.copy_(q)
    graph.replay()
    assert torch.equal(out, wanted)
