"""The object that says what kind of attention a call is, and the ranges of tiles that follow."""

from __future__ import annotations

import random
from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from attention_problem import Problem
from hypothesis import given, reject, settings
from hypothesis import strategies as st
from schedule_on_the_host import Pointer, ranges_on_the_host
from torch import Tensor
from variant_problem import drawn

from flashproto import configs, masks, variant
from flashproto.functional.attention_request import attention_request
from flashproto.kernels import schedule, scores
from flashproto.kernels.scores import Given, Head, Variables
from flashproto.variant import Form, Kind, Variant, variant_of

FULL, CAUSAL = Kind(), Kind(CAUSAL=True)


@dataclass(frozen=True)
class MoreKind(Kind):
    """As a Kind will be with another variant in it."""

    CAPPED: bool = False
    WIDTHS: int = 0


@pytest.mark.parametrize(
    ("kind", "text"),
    [
        (MoreKind(), "full"),
        (MoreKind(CAUSAL=True), "causal"),
        (MoreKind(CAPPED=True, WIDTHS=2), "capped+widths=2"),
        (MoreKind(CAUSAL=True, CAPPED=True, WIDTHS=1), "causal+capped+widths=1"),
    ],
)
def test_kinds_are_read_as_they_are_printed(
    kind: Kind, text: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(variant, "Kind", MoreKind)
    variant.kind_of.cache_clear()
    assert kind.name == text
    assert variant.kind_of(text) == kind
    variant.kind_of.cache_clear()


def test_kinds_are_keys() -> None:
    assert len({FULL, CAUSAL, Kind(), Kind(CAUSAL=True)}) == 2
    assert FULL.PLAIN and CAUSAL.PLAIN
    assert not MoreKind(CAUSAL=True, CAPPED=True).PLAIN and not MoreKind(WIDTHS=1).PLAIN


@pytest.mark.parametrize("kind", [FULL, CAUSAL])
@pytest.mark.parametrize(
    ("named", "names"),
    [
        ({}, "//"),
        ({"left": 3, "softcap": 2.5, "sinks": torch.zeros(2)}, "left/softcap/sinks"),
        (
            {"left": -1, "first": 7, "begin": torch.zeros(1), "end": torch.ones(1)},
            "left,first//begin,end",
        ),
    ],
)
def test_what_is_flat_comes_back(kind: Kind, named: dict[str, Any], names: str) -> None:
    """Each number of its type, by its name, and each tensor in its place."""
    given = Variant(kind, -4, named)
    ints, floats, text = given.form.flat()
    assert all(type(x) is int for x in ints) and all(type(x) is float for x in floats)
    assert text == f"{kind.name}/{names}"
    form = Form.of(ints, floats, text)
    assert form == given.form and hash(form) == hash(given.form)
    found = form.variant(list(given.tensors.values()))
    assert found[:2] == (kind, -4) and found.named.keys() == named.keys()
    assert all(x is named[name] or x == named[name] for name, x in found.named.items())
    assert {type(x) for x in found.named.values()} == {type(x) for x in named.values()}


def test_what_is_given_makes_the_kind() -> None:
    x = torch.zeros(2)
    assert variant_of(True, 5, {"left": None, "sinks": None}) == Variant(CAUSAL, 5)
    named = {"left": 3, "softcap": 2.5, "begin": x, "end": x}
    made = variant_of(False, 0, named, ("entropy",), exact=True)
    assert made.kind == Kind(WINDOW=True, INTERVALS=True, SOFTCAP=2, ENTROPY=True)
    assert made.named == named and made.form.tensors == ("begin", "end")
    assert variant_of(False, 0, {"softcap": 1.0}).kind == Kind(SOFTCAP=1)
    assert not variant_of(False, 0, {}, ("max_score",)).named


def test_kernels_are_given_all_variables() -> None:
    assert variant.VARIABLES.keys() <= set(scores.Given._fields)


# --- ranges of tiles -----------------------------------------------------------------------------

SIZES = {
    "kind": st.builds(
        lambda causal, window, first: Kind(CAUSAL=causal, WINDOW=window, FIRST=window and first),
        *[st.booleans()] * 3,
    ),
    "tile": st.integers(0, 5),
    "S": st.integers(1, 200),
    "offset": st.integers(-250, 250),
    "left": st.integers(-20, 250),
    "first": st.integers(1, 100),
    "BLOCK_M": st.sampled_from((16, 64, 192)),
    "BLOCK_N": st.sampled_from((16, 64, 128)),
}


@pytest.fixture(autouse=True, scope="module")
def host() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as monkeypatch:
        ranges_on_the_host(monkeypatch)
        yield


def seen(
    kind: Kind, queries: range, keys: range, Sk: int, offset: int, variables: scores.Variables
) -> Tensor:
    """`visible` [queries, keys]."""
    i, j = torch.tensor(queries)[:, None], torch.tensor(keys)[None, :]
    return scores.visible.fn(i, j, 0, Sk, offset, variables, kind)


@given(**SIZES)
def test_ranges_of_keys(
    kind: Kind, tile: int, S: int, offset: int, left: int, first: int, BLOCK_M: int, BLOCK_N: int
) -> None:
    """No visible pair outside, no hidden one where it is clear, no tile more than needed at an edge."""
    i0, variables = tile * BLOCK_M, Variables(Given(left, first), Head())
    ranges = schedule.key_ranges.fn(i0, S, offset, variables.given, BLOCK_M, BLOCK_N, kind)
    begin, clear_begin, clear_end, end = ranges
    early = schedule.first_tiles(begin, variables.given, BLOCK_N, kind)
    assert 0 <= early <= begin <= clear_begin <= clear_end <= end <= -(-S // BLOCK_N)
    queries = range(i0, i0 + BLOCK_M)
    for t in range(-(-S // BLOCK_N) + 1):
        pairs = seen(kind, queries, range(t * BLOCK_N, (t + 1) * BLOCK_N), S, offset, variables)
        some, every = bool(pairs.any()), bool(pairs.all())
        visited, clear = begin <= t < end or t < early, clear_begin <= t < clear_end
        assert visited or not some
        assert every or not clear
        if not kind.WINDOW:
            assert (some, every) == (visited, clear)
        elif left >= 0 and begin < t < end - 1:
            assert some
        if not kind.FIRST and clear_begin < clear_end and every:
            assert clear


@given(**SIZES)
def test_ranges_of_queries(
    kind: Kind, tile: int, S: int, offset: int, left: int, first: int, BLOCK_M: int, BLOCK_N: int
) -> None:
    """No query that sees one of the keys outside, at most one tile more than needed at an edge."""
    j0, variables = tile * BLOCK_N, Variables(Given(left, first), Head())
    Sk = j0 + BLOCK_N
    begin, end = schedule.query_range.fn(j0, S, offset, variables.given, BLOCK_M, kind, BLOCK_N)
    tiles = -(-S // BLOCK_M)
    assert 0 <= begin <= end <= tiles
    for t in range(tiles):
        queries = range(t * BLOCK_M, (t + 1) * BLOCK_M)
        found = bool(seen(kind, queries, range(j0, Sk), Sk, offset, variables).any())
        assert begin <= t < end or not found
        if left >= 0 and begin < t < end - 1:
            assert found


# --- intervals -----------------------------------------------------------------------------------


def tiles_of(begin: Tensor, end: Tensor, BLOCK_N: int) -> Tensor:
    """What intervals_kernel writes for one row."""
    n_tiles = -(-begin.numel() // BLOCK_N)
    tiles = torch.full((4 * n_tiles,), -7)
    with pytest.MonkeyPatch.context() as monkeypatch:
        for t in range(n_tiles):
            ranges_again = {"program_id": lambda axis, t=t: torch.tensor(t)}
            for name, function in ranges_again.items():
                monkeypatch.setattr(schedule.tl, name, function, raising=False)
            schedule.intervals_kernel.fn(*map(Pointer, (begin, end, tiles)), begin.numel(), BLOCK_N)
    return tiles


@given(data=st.data(), **SIZES)
def test_runs_of_tiles_of_intervals_and_bands(
    data, kind: Kind, tile: int, S: int, offset: int, left: int, first: int, BLOCK_M: int, BLOCK_N: int
) -> None:
    """Runs come in order; no visible pair outside of them, no hidden one where they are clear; of
    documents no tile more than needed."""
    Sq = data.draw(st.integers(tile * BLOCK_M + 1, tile * BLOCK_M + 100))
    documents = data.draw(st.booleans())
    if documents:
        cuts = sorted(data.draw(st.lists(st.integers(0, max(Sq, S)), max_size=6)))
        ids = torch.bucketize(
            torch.arange(max(Sq, S)), torch.tensor(cuts, dtype=torch.int64), right=True
        )
        begin, end = masks.documents(ids[None, :Sq], ids[None, :S]).intervals(Sq, S)
        begin, end = begin.flatten().long(), end.flatten().long()
    else:
        numbers = st.lists(st.integers(-5, Sq + 5), min_size=S, max_size=S)
        begin, end = torch.tensor(data.draw(numbers)), torch.tensor(data.draw(numbers))
    kind = replace(kind, INTERVALS=True)
    pointers = map(Pointer, (begin, end, tiles_of(begin, end, BLOCK_N)))
    begin_, end_, tiles = pointers
    variables = Variables(Given(left, first), Head(begin=begin_, end=end_, tiles=tiles))
    i0, Sk = tile * BLOCK_M, torch.tensor(S)
    ranges = schedule.key_ranges.fn(i0, Sk, offset, variables.given, BLOCK_M, BLOCK_N, kind)
    found: dict[int, bool] = {}
    at = torch.tensor(0)
    while True:
        start, last, clear = schedule.next_run(
            at, i0, Sq, Sk, ranges, variables, BLOCK_M, BLOCK_N, kind
        )
        if start >= ranges[3]:
            break
        assert at <= start < last <= ranges[3]
        found |= dict.fromkeys(range(int(start), int(last)), bool(clear))
        at = last
    queries = range(i0, min(i0 + BLOCK_M, Sq))
    for t in range(-(-S // BLOCK_N)):
        pairs = seen(kind, queries, range(t * BLOCK_N, (t + 1) * BLOCK_N), S, offset, variables)
        assert t in found or not pairs.any()
        assert pairs.all() or not found.get(t, False)
        if documents and not kind.CAUSAL and not kind.WINDOW:
            whole = (end - begin > 0).all()  # each document has a query
            assert pairs.any() == (t in found) or not whole


# --- ranges of masks, from the argument of a call to the tiles --------------------------------------

# Tiles of the Hopper kernels, and of the portable ones.
TILES = ((192, 128), (256, 64), (64, 256), (128, 64), (64, 64), (16, 16), (16, 16), (32, 16), (16, 32))
ONE = Problem(torch.float32, 1, 1, 1, 9, 9, 8, 8, causal=False)


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
@pytest.mark.parametrize(("Sq", "Sk"), [(3, 5), (5, 3)])
def test_the_largest_numbers_stay_behind_all_queries(dtype: torch.dtype, Sq: int, Sk: int) -> None:
    limits = torch.iinfo(dtype)
    begin, end = (torch.full((Sk,), n, dtype=dtype) for n in (limits.min, limits.max))
    assert masks.intervals(begin, end).visible(Sq, Sk).all()
    assert masks.tree(begin, end).visible(Sq, Sk).all()
    assert masks.padding(end[:1]).visible(Sq, Sk).all()
    assert masks.prefix(end[:1]).visible(Sq, Sk).all()
    assert not masks.intervals(end, end).visible(Sq, Sk).any()
    assert not masks.padding(begin[:1]).visible(Sq, Sk).any()


PARTS = ("documents", "padding", "prefix", "tree", "intervals")


class Ranges:
    """What the device code says of a mask's tiles, of BLOCK_M queries and BLOCK_N keys."""

    def __init__(self, mask: masks.Mask, Sq: int, Sk: int, BLOCK_M: int, BLOCK_N: int) -> None:
        self.Sq, self.Sk, self.BLOCK_M, self.BLOCK_N = Sq, Sk, BLOCK_M, BLOCK_N
        q, k = (torch.empty(1, 1, n, 1, device="meta") for n in (Sq, Sk))
        bands = masks.Mask(mask.bands)
        variant = attention_request("attention", q, k, k, mask=bands).variant
        found, named, self.offset = mask.intervals(Sq, Sk), variant.named, variant.offset
        self.kind = replace(variant.kind, INTERVALS=found is not None)
        self.left, first = named.get("left", 0), named.get("first", 0)
        self.variables = Variables(Given(self.left, first), Head())
        if found is not None:
            begin, end = (x.flatten().long() for x in found)
            pointers = map(Pointer, (begin, end, tiles_of(begin, end, BLOCK_N)))
            begin_, end_, tiles = pointers
            self.variables = self.variables._replace(head=Head(begin=begin_, end=end_, tiles=tiles))

    def of_queries(self, i0: int) -> dict[int, bool]:
        """The key tiles that the queries from i0 on visit, and whether each is clear."""
        Sk, sizes = torch.tensor(self.Sk), (self.BLOCK_M, self.BLOCK_N, self.kind)
        ranges = schedule.key_ranges.fn(i0, Sk, self.offset, self.variables.given, *sizes)
        begin, clear_begin, clear_end, end = map(int, ranges)
        if not self.kind.INTERVALS:
            early = int(schedule.first_tiles(begin, self.variables.given, self.BLOCK_N, self.kind))
            assert 0 <= early <= begin <= clear_begin <= clear_end <= end
            return {t: clear_begin <= t < clear_end for t in (*range(early), *range(begin, end))}
        found: dict[int, bool] = {}
        at = torch.tensor(0)
        while True:
            first, last, clear = schedule.next_run(at, i0, self.Sq, Sk, ranges, self.variables, *sizes)
            if first >= end:
                return found
            assert at <= first < last <= end
            found |= dict.fromkeys(range(int(first), int(last)), bool(clear))
            at = last

    def of_keys(self, j0: int) -> range:
        """The query tiles that the keys from j0 on visit, as attention_backward_keys_kernel has it."""
        begin, end = schedule.query_range.fn(
            j0, self.Sq, self.offset, self.variables.given, self.BLOCK_M, self.kind, self.BLOCK_N
        )
        if self.kind.INTERVALS:
            low, high = schedule.queries_of_keys(j0, self.Sk, self.variables.head, self.BLOCK_N)
            begin = max(begin, schedule.clamp(low, 0, self.Sq) // self.BLOCK_M)
            end = max(min(end, -(-schedule.clamp(high, 0, self.Sq) // self.BLOCK_M)), begin)
        return range(int(begin), int(end))

    def by_band(self, queries: range, keys: range) -> bool:
        """Whether the band alone lets one of these see one; of queries behind the last one too."""
        band = replace(self.kind, INTERVALS=False)
        return bool(seen(band, queries, keys, self.Sk, self.offset, self.variables).any())


def at_ends(spare: Iterable[int], visited: Collection[int]) -> bool:
    """Whether each of these tiles is at an end of a run of what is visited: at most one at each."""
    return all(t - 1 not in visited or t + 1 not in visited for t in spare)


def about(unit: int) -> st.SearchStrategy[int]:
    """0 or more, often about a multiple of a tile."""
    near = st.builds(lambda n, more: max(n * unit + more, 0), st.integers(0, 4), st.integers(-2, 2))
    return st.one_of(near, st.integers(0, 5 * unit))


@settings(max_examples=250)
@given(data=st.data(), sizes=st.sampled_from(TILES), seed=st.integers(0, 2**32))
def test_ranges_of_masks(data: st.DataObject, sizes: tuple[int, int], seed: int) -> None:
    """Of random bands, intervals and their &, against their definitions: tiles outside hold no visible
    pair, clear ones no hidden one, and at an edge there is at most one tile more than needed; of the
    keys that a tile of queries visits, and of the queries that a tile of keys visits."""
    BM, BN = sizes
    length = about(max(sizes)).map(lambda n: min(max(n, 1), 600))
    Sq, Sk = data.draw(length), data.draw(length)
    names = data.draw(st.one_of(st.just([]), st.lists(st.sampled_from(PARTS), max_size=2, unique=True)))
    call = drawn(random.Random(seed), replace(ONE, Sq=Sq, Sk=Sk), names, "cpu")
    mask, pairs = call.options.get("mask", masks.Mask()), call.visible(torch.device("cpu"))[0, 0]
    i, j = torch.arange(Sq)[:, None], torch.arange(Sk)
    bound = st.one_of(st.none(), about(BN))
    for left, right, first, top_left in data.draw(
        st.lists(st.tuples(bound, bound, st.one_of(st.just(0), about(BN)), st.booleans()), max_size=3)
    ):
        band = masks.causal(top_left=True) if top_left else masks.window(left, right, first)
        left, right, first = (None, 0, 0) if top_left else (left, right, first)
        at = i if top_left else i + Sk - Sq
        if left is not None:
            pairs = pairs & ((j >= at - left) | (j < first))
        if right is not None:
            pairs = pairs & (j <= at + right)
        mask = mask & band
    try:
        ranges = Ranges(mask, Sq, Sk, BM, BN)
    except ValueError:
        reject()  # windows of which the narrower keeps more first keys
    exact = ranges.left >= 0 and not ranges.kind.INTERVALS
    for i0 in range(0, Sq, BM):
        visited, queries = ranges.of_queries(i0), range(i0, i0 + BM)
        spare = []
        for t in range(-(-Sk // BN)):
            keys = range(t * BN, (t + 1) * BN)
            own = pairs[i0 : i0 + BM, t * BN : (t + 1) * BN]
            assert t in visited or not own.any()
            assert not visited.get(t) or (own.all() and keys.stop <= Sk)
            if exact and t in visited and not ranges.by_band(queries, keys):
                spare.append(t)
        assert at_ends(spare, visited)
    for j0 in range(0, Sk, BN):
        found, keys = ranges.of_keys(j0), range(j0, j0 + BN)
        spare = []
        for t in range(-(-Sq // BM)):
            assert t in found or not pairs[t * BM : (t + 1) * BM, j0 : j0 + BN].any()
            if exact and t in found and not ranges.by_band(range(t * BM, (t + 1) * BM), keys):
                spare.append(t)
        assert at_ends(spare, found)


@given(
    lengths=st.lists(st.tuples(st.integers(0, 70), st.integers(0, 70)), max_size=9),
    behind=st.tuples(st.integers(0, 40), st.integers(0, 40)),
    gap=st.one_of(st.none(), st.tuples(st.integers(0, 40), st.integers(0, 40))),
    BLOCK=st.sampled_from((16, 32)),
)
def test_each_tile_of_each_sequence_has_one_program(lengths, behind, gap, BLOCK: int) -> None:
    """Tiles of queries and of keys alike; other programs have nothing to do; tokens behind the last
    sequence have programs, and nothing to see; those of gaps have none."""
    of_queries, of_keys = ([n[side] for n in lengths] for side in (0, 1))
    gaps = gap or (0, 0)
    cu_q, cu_k = (
        torch.tensor([0, *(x + more for x in n)]).cumsum(0)
        for n, more in zip((of_queries, of_keys), gaps, strict=True)
    )
    used = {f"seqused_{n}": Pointer(torch.tensor(x)) for n, x in (("q", of_queries), ("k", of_keys))}
    totals = [int(cu[-1]) + more for cu, more in zip((cu_q, cu_k), behind, strict=True)]
    names = "sequences", "queries", "keys"
    counts = {x: 2 * n + 1 for x, n in zip(names, (len(lengths), *totals), strict=True)}
    counts |= {} if gap is None else used
    given = Given(cu_seqlens_q=Pointer(cu_q), cu_seqlens_k=Pointer(cu_k), **counts)
    kind = Kind(VARLEN=True, CAUSAL=True)
    own = [
        ([*of_queries, behind[0]], [*of_keys, 0], cu_q, totals[0], schedule.problem_of_queries),
        ([*of_keys, behind[1]], [*of_queries, 0], cu_k, totals[1], schedule.problem_of_keys),
    ]
    for mine, other, cu, total, problem_of in own:
        slots = total // BLOCK + len(lengths) + 1
        wanted = {
            (1, s, int(cu[s]) + start, n, m)
            for s, (n, m) in enumerate(zip(mine, other, strict=True))
            for start in range(0, n, BLOCK)
        }
        found = []
        for program in range(slots, 2 * slots):
            with pytest.MonkeyPatch.context() as monkeypatch:
                at = torch.tensor(program)
                monkeypatch.setattr(schedule.tl, "program_id", lambda axis, at=at: at, raising=False)
                if problem_of is schedule.problem_of_queries:
                    made = problem_of.fn(4, 0, 0, 3, given, BLOCK, kind)
                    start, n, m = made.token + made.first, made.Sq, made.Sk
                    assert made.rows == total
                else:
                    made = problem_of.fn(0, 0, 3, given, BLOCK, kind)
                    start, n, m = made.key + made.first, made.Sk, made.Sq
            if made.first < n:
                assert made.offset == 3 + made.Sk - made.Sq
                found.append(tuple(map(int, (made.head, made.sequence, start, n, m))))
            else:
                assert m == 0
        assert sorted(found) == sorted(wanted)


# --- the Hopper backward -------------------------------------------------------------------------


@pytest.mark.parametrize("D", [64, 128, 256])
@pytest.mark.parametrize("Sk", [300, 2048, 16384])
@pytest.mark.parametrize("group", [1, 8])
@pytest.mark.parametrize("causal", [False, True])
def test_other_kinds_take_the_plain_walk(D: int, Sk: int, group: int, causal: bool) -> None:
    """Sums of zeros, head by head from the first query tile on, a mask asked for in each step."""
    kind = MoreKind(CAUSAL=causal, CAPPED=True)
    config = configs.attention_backward_hopper(D, Sk, kind, group=group)
    assert kind == config.KIND
    for name in ("DOWN", "FIRST", "ALTERNATE", "WAVES", "BOTH", "ROTATE", "ROUND", "COUNTED", "PEELED"):
        assert not getattr(config, name), name
    with pytest.raises(AssertionError, match="fixed order"):
        configs.attention_backward_hopper(D, Sk, kind, ordered=True, group=group)
