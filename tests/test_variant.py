"""The object that says what kind of attention a call is, and the ranges of tiles that follow."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from schedule_on_the_host import ranges_on_the_host
from torch import Tensor

from flashproto import configs, variant
from flashproto.kernels import schedule, scores
from flashproto.variant import Kind, Variant, pack, unpack

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
    assert str(kind) == text
    assert variant.kind_of(text) == kind
    variant.kind_of.cache_clear()


def test_kinds_are_keys() -> None:
    assert len({FULL, CAUSAL, Kind(), Kind(CAUSAL=True)}) == 2
    assert FULL.TUNED and CAUSAL.TUNED
    assert not MoreKind(CAUSAL=True, CAPPED=True).TUNED and not MoreKind(WIDTHS=1).TUNED


def same(a: object, b: object) -> bool:
    return a is b if isinstance(a, Tensor) else type(a) is type(b) and a == b


@pytest.mark.parametrize("kind", [FULL, CAUSAL])
@pytest.mark.parametrize(
    ("numbers", "tensors"),
    [
        ((), ()),
        ((None,), (None, None)),
        ((3, None, 2.5, -1, 0.0), (torch.zeros(2), None, torch.ones(3))),
        ((0.5, 7), (None, torch.zeros(1))),
    ],
)
def test_what_is_packed_comes_back(kind: Kind, numbers, tensors) -> None:
    """Each number of its type, each tensor itself, None where it was; no None is packed."""
    packed = pack(Variant(kind, -4, numbers, tensors))
    assert all(x is not None for part in packed[:3] for x in part)
    assert all(type(x) is int for x in packed[1]) and all(type(x) is float for x in packed[2])
    found = unpack(*packed)
    assert (found.kind, found.offset) == (kind, -4)
    for got, wanted in ((found.numbers, numbers), (found.tensors, tensors)):
        assert len(got) == len(wanted) and all(map(same, got, wanted))
    assert len(found.variables) == len(numbers) + len(tensors)


# --- ranges of tiles -----------------------------------------------------------------------------

SIZES = {
    "kind": st.sampled_from((FULL, CAUSAL)),
    "first": st.integers(0, 5),
    "S": st.integers(1, 200),
    "offset": st.integers(-250, 250),
    "BLOCK_M": st.sampled_from((16, 64)),
    "BLOCK_N": st.sampled_from((16, 32, 64)),
}


def seen(kind: Kind, queries: range, keys: range, Sk: int, offset: int) -> Tensor:
    """`visible` [queries, keys]."""
    i, j = torch.tensor(queries)[:, None], torch.tensor(keys)[None, :]
    return scores.visible.fn(i, j, Sk, offset, (), kind)


@given(**SIZES)
def test_ranges_of_keys(
    kind: Kind, first: int, S: int, offset: int, BLOCK_M: int, BLOCK_N: int
) -> None:
    """No visible pair outside, no hidden one where it is clear, no tile more than needed at an edge."""
    i0 = first * BLOCK_M
    with pytest.MonkeyPatch.context() as monkeypatch:
        ranges_on_the_host(monkeypatch)
        begin, clear_begin, clear_end, end = schedule.key_ranges.fn(
            i0, S, offset, (), BLOCK_M, BLOCK_N, kind
        )
    assert 0 <= begin <= clear_begin <= clear_end <= end <= -(-S // BLOCK_N)
    queries = range(i0, i0 + BLOCK_M)
    for tile in range(-(-S // BLOCK_N) + 1):
        pairs = seen(kind, queries, range(tile * BLOCK_N, (tile + 1) * BLOCK_N), S, offset)
        assert pairs.any() == (begin <= tile < end)
        assert pairs.all() == (clear_begin <= tile < clear_end)


@given(**SIZES)
def test_ranges_of_queries(
    kind: Kind, first: int, S: int, offset: int, BLOCK_M: int, BLOCK_N: int
) -> None:
    """No query that sees one of the keys outside, at most the last tile more than needed."""
    j0, Sk = first * BLOCK_N, (first + 1) * BLOCK_N
    with pytest.MonkeyPatch.context() as monkeypatch:
        ranges_on_the_host(monkeypatch)
        begin, end = schedule.query_range.fn(j0, S, offset, (), BLOCK_M, kind)
    tiles = -(-S // BLOCK_M)
    assert begin >= 0 and end == tiles
    for tile in range(tiles):
        queries = range(tile * BLOCK_M, (tile + 1) * BLOCK_M)
        found = bool(seen(kind, queries, range(j0, Sk), Sk, offset).any())
        assert begin <= tile if found else tile < begin or tile == tiles - 1


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
