"""Who does what when in the Hopper attention kernels: work tables, and device code of the walks, run on
the host."""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Iterator
from types import SimpleNamespace

import pytest
import torch
from hopper_attention import CAUSAL, FULL
from schedule_on_the_host import ranges_on_the_host

from flashproto import configs
from flashproto.configs import hopper_forward as hopper_configs
from flashproto.configs.hopper import MULTIPROCESSORS
from flashproto.kernels import schedule
from flashproto.kernels.hopper import attention_backward_masks as masks
from flashproto.kernels.hopper import attention_backward_work as work
from flashproto.ops import attention_hopper
from flashproto.variant import Kind


@pytest.mark.parametrize(
    "shape", [(8, 2, 1024, 1024), (2, 2, 300, 70), (16, 16, 4096, 4096), (7, 3, 5, 900)]
)
def test_plan_holds_every_item_once_and_is_balanced(shape: tuple[int, int, int, int]) -> None:
    heads, together, Sq, Sk = shape
    config = configs.attention_forward_hopper(128, Sk, CAUSAL)
    programs = 132
    plan = configs.balanced_work(config, heads, together, Sq, Sk, Sk - Sq, programs)
    tiles = -(-Sq // config.BM)
    assert Counter(item for own in plan for item in own) == Counter(range(tiles * heads))
    if tiles * heads > 3 * programs:
        assert max(map(len, plan)) <= 2 * tiles * heads / programs + 1


@pytest.mark.parametrize(
    ("D", "S", "heads", "most"),
    [
        (64, 512, 1024, 1.02),
        (64, 1024, 512, 1.01),
        (64, 1024, 48, 1.04),
        (64, 1024, 96, 1.06),
        (64, 4096, 128, 1.01),
        (128, 1024, 256, 1.01),
        (128, 2048, 128, 1.015),
        (128, 16384, 16, 1.02),
    ],
)
def test_programs_of_a_plan_end_together(D: int, S: int, heads: int, most: float) -> None:
    """By what items cost: the last program's end over what each would take of work without gaps."""
    config = configs.attention_forward_hopper(D, S, CAUSAL, S, heads)
    together = configs.heads_together_forward(config, 1, heads, heads, S)
    programs = 132 * config.PROGRAMS
    plan = configs.balanced_work(config, heads, together, S, S, 0, programs)
    costs = hopper_configs.item_costs(config, S, S, 0)

    def cost(item: int) -> float:
        group, at = divmod(item, together * len(costs))
        return costs[at // min(together, heads - group * together)]

    ends = [sum(map(cost, items)) for items in plan]
    assert max(ends) <= most * sum(costs) * heads / programs
    assert Counter(item for own in plan for item in own) == Counter(range(heads * len(costs)))


@pytest.mark.parametrize(("S", "heads"), [(832, 512), (1856, 256)])
def test_plan_of_full_rows_fills_the_last_round(S: int, heads: int) -> None:
    """With 132 programs within half an item of the shortest time there could be, and in less than in
    turns, which take 20 whole items each."""
    config = configs.attention_forward_hopper(64, S, FULL, S)
    together = configs.heads_together_forward(config, 1, heads, heads, S)
    plan = configs.balanced_work(config, heads, together, S, S, S, 132)
    costs = hopper_configs.item_costs(config, S, S, S)
    tiles = len(costs)
    assert Counter(item for own in plan for item in own) == Counter(range(tiles * heads))
    assert heads % together == 0
    times = [sum(costs[item % (tiles * together) // together] for item in own) for own in plan]
    assert max(times) <= sum(costs) * heads / 132 + costs[0] / 2
    assert max(times) < -(-tiles * heads // 132) * costs[0]


@pytest.mark.parametrize("capturing", [False, True])
@pytest.mark.parametrize(("heads", "Sq", "programs"), [(1, 64, 1), (3, 300, 9), (16, 4096, 132)])
@pytest.mark.parametrize(("D", "causal"), [(128, True), (64, False)])
def test_table_holds_every_item_once(
    D: int,
    causal: bool,
    heads: int,
    Sq: int,
    programs: int,
    capturing: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: capturing)
    monkeypatch.setattr(attention_hopper, "outside_memory_pool", lambda make, device: make())
    config = configs.attention_forward_hopper(D, 8192, Kind(causal))
    assert config.W == 3
    order = attention_hopper.WorkTable(config, heads, 1, Sq, Sq, 0, programs, torch.device("cpu"))
    table = order.on_device()
    total = heads * -(-Sq // config.BM)
    assert table.dtype == torch.int32
    assert table.is_contiguous()
    assert Counter(table[table < total].tolist()) == Counter(range(total))
    for column in table.T.tolist():
        first = column.index(total)
        assert set(column[first:]) == {total}, "a program stops at the first end that it meets"
    assert (order.on_device() is table) == (not capturing)


def producer_walk(
    config: configs.HopperBackward, hk: int, m0: int, M: int, GROUP: int, n: int = 0, up: int = 0
) -> Iterator[tuple[int, int]]:
    """(query head, query tile) as the producer's device code steps through them for key tile n."""
    h0, col = hk * GROUP, n * config.BN
    h = began = work.first_head.fn(h0, col, GROUP, config)
    m = start = work.first_tile.fn(col, m0, M, up, config)
    for _ in range((M - m0) * GROUP):
        yield h, m
        h, m = work.next_tile.fn(h, m, h0, began, m0, M, start, up, GROUP, config)


def consumer_walk(
    config: configs.HopperBackward,
    h0: int,
    m0: int,
    M: int,
    GROUP: int,
    n: int,
    up: int,
    NB: int,
    offset: int = 0,
) -> Iterator[tuple[int, int, bool]]:
    """(number of the query tile, last_key, whether key tile n adds first) as the consumers' device code
    steps through them, last_key relative to key 0."""
    tile = h0 * M + work.first_tile.fn(n * config.BN, m0, M, up, config)
    low, high = m0 * config.BM + offset, M * config.BM + offset
    outer, begin, end, last_key = work.loops.fn(low, high, m0, M, up, GROUP, config)
    for i in range(outer):
        first = work.comes_first.fn(i, n * config.BN, m0, up, NB, M, offset, config)
        for index in range(begin, end, config.STEP):
            yield tile, work.last_visible_key.fn(index, last_key, config), first
            tile = work.inner_step.fn(tile, M, config)
        tile, last_key = work.outer_step.fn(tile, last_key, m0, M, M, up, GROUP, config)


def on_the_host(monkeypatch: pytest.MonkeyPatch, programs: int = 6) -> None:
    """Let device code of the schedule run as Python."""
    functions = {
        "minimum": min,
        "maximum": max,
        "where": lambda c, x, y: x if c else y,
        "num_programs": lambda _: programs,
    }
    monkeypatch.setattr(work, "gl", SimpleNamespace(**functions))
    monkeypatch.setattr(masks, "gl", SimpleNamespace(**functions))
    monkeypatch.setattr(masks, "first_clear", masks.first_clear.fn)
    monkeypatch.setattr(work, "opaque_zero", lambda: 0)
    monkeypatch.setattr(work, "dq_rank", work.dq_rank.fn)
    ranges_on_the_host(monkeypatch)
    monkeypatch.setattr(work, "query_range", schedule.query_range.fn)


@pytest.mark.parametrize("limit", [-5, 0, 62, 63, 500])
@pytest.mark.parametrize("tiles", [1, 2, 5])
@pytest.mark.parametrize("causal", [False, True])
def test_steps_without_a_mask(
    causal: bool, tiles: int, limit: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Those whose queries see all 64 keys, if there are so many: in one piece, and no others."""
    on_the_host(monkeypatch)
    config = configs.attention_backward_hopper(128, 4096, Kind(causal))
    for low in (-1000, -129, -128, -64, -63, -1, 0, 1, 62, 63, 64, 200):
        high = low + tiles * config.BM
        needs = [limit < 63 or (causal and last_key < 63) for last_key in range(low, high, config.BM)]
        clear = masks.first_clear(low, high, limit, config)
        assert needs == [last_key < clear for last_key in range(low, high, config.BM)]
        for both, up in ((False, 0), (True, 0), (True, 1)):
            if both and not causal:
                continue  # nothing goes up where there is no diagonal
            walk = dataclasses.replace(config, WALK="waves" if both else "down")
            begin, end = masks.clear_outer_steps.fn(low, high, limit, tiles, up, walk)
            ways = needs if up else needs[::-1]
            assert ways == [not begin <= trip < end for trip in range(tiles)]


@pytest.mark.parametrize("GROUP", [1, 3])
@pytest.mark.parametrize("down", [False, True])
def test_backward_walks(down: bool, GROUP: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Producer and consumers take the same way; downwards, what a key tile visits is the beginning of
    what the one before it visits."""
    on_the_host(monkeypatch)
    config = configs.attention_backward_hopper(128, 4096, CAUSAL)
    config = dataclasses.replace(config, WALK="down" if down else "by_head")
    M = 7
    longer = None
    for n, m0 in enumerate((0, 0, 2, 4, 6)):
        walk = list(producer_walk(config, 1, m0, M, GROUP, n))
        tiles = [(h * M + m, m * config.BM, n == 0) for h, m in walk]
        assert tiles == list(consumer_walk(config, GROUP, m0, M, GROUP, n, 0, 5))
        heads = range(GROUP, 2 * GROUP)
        assert Counter(walk) == Counter((h, m) for h in heads for m in range(m0, M))
        if down and longer is not None:
            assert longer[: len(walk)] == walk
        longer = walk


@pytest.mark.parametrize("M", [1, 7, 64])
@pytest.mark.parametrize("causal", [False, True])
def test_walks_of_paired_blocks(causal: bool, M: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every query tile of every head once; under a mask from the diagonal on, as consumers count."""
    on_the_host(monkeypatch)
    config = configs.attention_backward_hopper(64, 4096, Kind(causal))
    GROUP, starts = 3, set()
    for n in range(16):
        m0 = min(n, M - 1) if causal else 0
        walk = list(producer_walk(config, 1, m0, M, GROUP, n))
        every = [(h, m) for h in range(GROUP, 2 * GROUP) for m in range(m0, M)]
        assert Counter(walk) == Counter(every)
        assert [h for h, _ in walk] == [h for h, _ in every]
        if causal:
            assert walk == every
        starts.add(walk[0])
    assert len(starts) == min(16, M) or not causal
    assert len(starts) == 16 or M < 64, "programs that start together begin apart"


@pytest.mark.parametrize("zeros", [False, True])
@pytest.mark.parametrize("GROUP", [1, 4])
@pytest.mark.parametrize("offset", [0, -300, 500])
def test_walks_in_waves(zeros: bool, GROUP: int, offset: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every other round of programs goes up; every query tile of every head once, each key tile's from
    a head of its own on where nobody waits; consumers count along."""
    on_the_host(monkeypatch)
    config = configs.attention_backward_hopper(128, 16384 if zeros else 1024, CAUSAL, group=8)
    assert config.WAVES and zeros == config.ROTATE
    heads, NB, M = 5, 6, 12
    for together in (1, 2, 4):
        for t in range(NB * heads):
            _, hk, col, m0, _, up = work.key_tile.fn(
                t, NB, M, heads, GROUP, heads, together, offset, (), config
            )
            n, h0 = col // config.BN, hk * GROUP
            assert up == t % (together * NB) // 6 % 2
            walk = list(producer_walk(config, hk, m0, M, GROUP, n, up))
            tiles = range(m0, M) if up else range(M - 1, m0 - 1, -1)
            first = n % GROUP if zeros else 0
            order = [h0 + (first + i) % GROUP for i in range(GROUP)]
            assert walk == [(h, m) for m in tiles for h in order]
            consumed = list(consumer_walk(config, h0, m0, M, GROUP, n, up, NB, offset))
            assert [last_key for _, last_key, _ in consumed] == [
                m * config.BM + offset for _, m in walk
            ]
            assert {first for *_, first in consumed} == {n == 0}
            if not zeros:  # only there they need to know which tile it is
                assert [tile for tile, *_ in consumed] == [h * M + m for h, m in walk]


def fetches(config: configs.HopperBackward, NB: int, heads: int, together: int, room: int) -> int:
    """How many query tiles come from beyond a cache that has room for so many, if all take equally
    long: a tile of all heads of a group is a step."""
    M = NB * config.BN // config.BM
    steps: dict[int, list[tuple[int, int]]] = {}
    free = [0] * MULTIPROCESSORS
    for t in range(NB * heads):
        _, hk, col, m0, _, up = work.key_tile.fn(t, NB, M, heads, 1, heads, together, 0, (), config)
        program = free.index(min(free))
        for at in producer_walk(config, hk, m0, M, 1, col // config.BN, up):
            steps.setdefault(free[program], []).append(at)
            free[program] += 1
    cache: dict[tuple[int, int], None] = {}  # the one used last is last
    count = 0
    for step in sorted(steps):
        for at in steps[step]:
            count += at not in cache
            cache.pop(at, None)
            cache[at] = None
            if len(cache) > room:
                del cache[next(iter(cache))]
    return count


@pytest.mark.parametrize("S", [4096, 8192, 16384, 32768])
def test_waves_read_what_others_read(S: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """8 key heads of 8 query heads: of 64 queries' q, dout and sums of dq, L2 has room for 64 times
    all 8."""
    on_the_host(monkeypatch, MULTIPROCESSORS)
    waves = configs.attention_backward_hopper(128, S, CAUSAL, heads=8, group=8)
    together = configs.heads_together_backward(waves, 1, 64, 8, S, S, MULTIPROCESSORS)
    without = dataclasses.replace(waves, WALK="down")
    NB = S // waves.BN
    got, others = (fetches(config, NB, 8, together, 64) for config in (waves, without))
    least = 8 * S // waves.BM
    assert least <= got < 1.5 * least
    assert others > 2 * got


def test_walks_side_by_side(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without a mask: all down, each key tile from a head of its own on."""
    on_the_host(monkeypatch)
    config = configs.attention_backward_hopper(128, 4096, FULL, group=8)
    assert config.ROTATE and not config.ROUND
    GROUP, M = 4, 5
    for n in range(9):
        order = [GROUP + (n + i) % GROUP for i in range(GROUP)]
        walk = list(producer_walk(config, 1, 0, M, GROUP, n))
        assert walk == [(h, m) for m in reversed(range(M)) for h in order]


@pytest.mark.parametrize("M", [1, 7, 64])
@pytest.mark.parametrize("NB", [1, 20])
def test_walks_that_begin_apart(M: int, NB: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every query tile of every head once, from the one beside the key tile on; keys may be more."""
    on_the_host(monkeypatch)
    config = configs.attention_backward_hopper(128, 16384, FULL)
    assert config.ROUND
    GROUP = 3
    for n in range(NB):
        walk = list(producer_walk(config, 1, 0, M, GROUP, n))
        beside = n * config.BN // config.BM % M
        heads = range(GROUP, 2 * GROUP)
        assert walk == [(h, (beside + i) % M) for h in heads for i in range(M)]


@pytest.mark.parametrize("adds", [1, 2])
@pytest.mark.parametrize("more", [0, 1, 7])
def test_adds_behind_an_item_when_it_is_counted(adds: int, more: int) -> None:
    """The producer sends each step's dQ two steps later, in one or two bulk adds, and counts an item
    when it comes to the second one behind it: then all are sent, and enough others after them."""
    steps = work.LEAST_STEPS.value + more
    items = [g // steps for g in range(5 * steps)]
    sent: list[int] = []
    for g, item in enumerate(items):
        if g % steps == 0 and item >= 2:
            assert sent.count(item - 2) == steps * adds
            assert item - 2 not in sent[-work.PENDING.value :]
        if g >= 2:
            sent += [items[g - 2]] * adds


@pytest.mark.parametrize("ordered", [False, True])
@pytest.mark.parametrize("causal", [False, True])
def test_backward_items(causal: bool, ordered: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each key tile of each head once, none empty; a head's in increasing order, or upwards decreasing,
    which half of a group are."""
    on_the_host(monkeypatch)
    config = configs.attention_backward_hopper(128, 4096, Kind(causal), ordered)
    NB, M, Hk, B = 5, 4, 3, 2
    for together in (1, 2, 4, 6):
        for offset in (0, 384, -100):
            items = [
                work.key_tile.fn(t, NB, M, Hk, 1, B * Hk, together, offset, (), config)
                for t in range(NB * B * Hk)
            ]
            wanted = [(b, h, n * config.BN) for b in range(B) for h in range(Hk) for n in range(NB)]
            assert Counter(item[:3] for item in items) == Counter(wanted)
            assert all(0 <= m0 < m1 == M for *_, m0, m1, _ in items)
            ups = 0
            for b in range(B):
                for h in range(Hk):
                    own = [(item[2] // config.BN, item[5]) for item in items if item[:2] == (b, h)]
                    up = own[0][1]
                    assert own == [(NB - 1 - n if up else n, up) for n in range(NB)]
                    ups += up
            groups, left = divmod(B * Hk, together)
            assert ups == (groups * (together // 2) + left // 2 if config.ALTERNATE else 0)


@pytest.mark.parametrize(("D", "length"), [(64, 1024), (64, 4096), (128, 4096), (256, 8192)])
@pytest.mark.parametrize("GROUP", [1, 3])
@pytest.mark.parametrize("together", [1, 2, 5])
@pytest.mark.parametrize(
    "shape", [(512, 512), (777, 1301), (1301, 777), (60, 300), (90, 700), (1, 2000)]
)
def test_places_in_order(
    D: int,
    length: int,
    GROUP: int,
    together: int,
    shape: tuple[int, int],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """In the order of items, key tiles add to each query tile at the places 0, 1, ..., so that none
    waits for an item of a higher number; consumers agree with the producer on where they are."""
    on_the_host(monkeypatch)
    config = configs.attention_backward_hopper(D, length, CAUSAL, True, group=GROUP)
    assert (GROUP == 1) == config.ALTERNATE
    assert (D == 64 and length == 4096) == config.PAIRS
    assert (GROUP == 3 and D > 64) == config.WAVES
    Sq, Sk = shape
    heads, M, NB = 5, -(-Sq // config.BM), -(-Sk // config.BN)
    for offset in (Sk - Sq, 0, -200):
        places: dict[tuple[int, int], list[int]] = {}
        for t in range(NB * heads):
            _, hk, col, m0, _, up = work.key_tile.fn(
                t, NB, M, heads, GROUP, heads, together, offset, (), config
            )
            n = col // config.BN
            walk = []
            for h, m in producer_walk(config, hk, m0, M, GROUP, n, up):
                at = work.dq_rank(m, n, up, NB, M, offset, config)
                places.setdefault((h, m), []).append(at)
                walk.append((h * M + m, m * config.BM + offset, at == 0))
            h0 = hk * GROUP
            consumed = list(consumer_walk(config, h0, m0, M, GROUP, n, up, NB, offset))
            if config.PAIRS:  # whose consumers leave tiles to the producer
                assert [last_key for _, last_key, _ in consumed] == [
                    last_key for _, last_key, _ in walk
                ]
            else:
                assert walk == consumed
        assert all(at == list(range(len(at))) for at in places.values())
