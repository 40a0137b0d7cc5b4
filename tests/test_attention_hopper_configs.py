"""Configurations of the Hopper attention kernels: that they fit, and which are chosen."""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
from typing import get_args

import pytest
from hopper_attention import CAUSAL, FULL

from flashproto import configs
from flashproto.configs import hopper_forward as hopper_configs
from flashproto.configs.hopper_backward import Sums, Walk
from flashproto.variant import Kind

SHARED_LIMIT = 227 * 1024


@pytest.mark.parametrize("D", [8, 64, 96, 128, 192, 256])
@pytest.mark.parametrize("Sk", [1, 640, 1024, 4096, 16384])
@pytest.mark.parametrize("causal", [False, True])
def test_forward_configurations_fit(D: int, Sk: int, causal: bool) -> None:
    config = configs.attention_forward_hopper(D, Sk, Kind(causal))
    tiles = config.BM + (config.KS + config.VS) * config.BN
    shuffled = 64 * config.D * 2  # one consumer's output on its way to wide stores
    assert (tiles * config.D * 2 + shuffled) * config.PROGRAMS <= SHARED_LIMIT
    assert config.D >= D and config.BM == 64 * config.W
    threads = 128 * config.PROGRAMS
    assert threads * (config.W * config.REGISTERS + 24) <= 65536
    if config.max_registers is not None:
        assert (config.W + 1) * config.max_registers >= config.W * config.REGISTERS + 24
    assert config.PB >= 2 + config.W, "Triton uses the lowest named barriers itself"


@pytest.mark.parametrize(
    ("D", "Sk", "causal", "W", "KS", "VS", "options"),
    [
        (64, 640, False, 1, 3, 3, "overlap kept three one-warp"),
        (64, 1024, False, 4, 3, 3, "overlap"),
        (64, 1024, True, 1, 3, 3, "overlap kept three one-warp"),
        (64, 2048, True, 3, 3, 2, "skip"),
        (64, 4096, False, 4, 3, 3, "overlap"),
        (64, 8192, False, 3, 3, 2, "skip"),
        (64, 16384, True, 3, 3, 2, "skip"),
        (128, 1024, False, 2, 2, 2, "overlap one-warp"),
        (128, 1024, True, 2, 2, 2, "overlap one-warp"),
        (128, 2048, True, 2, 2, 2, "overlap one-warp"),
        (128, 4096, False, 3, 4, 4, "overlap"),
        (128, 4096, True, 2, 2, 2, "overlap kept one-warp"),
        (128, 16384, True, 3, 4, 4, "overlap"),
        (256, 1024, False, 2, 2, 2, ""),
        (256, 4096, True, 2, 2, 2, ""),
        (256, 16384, False, 2, 2, 2, "overlap"),
    ],
)
def test_forward_takes_what_was_measured_fastest(D, Sk, causal, W, KS, VS, options) -> None:
    config = configs.attention_forward_hopper(D, Sk, Kind(causal))
    assert (config.W, config.KS, config.VS) == (W, KS, VS)
    assert ("overlap" in options) == config.OVERLAP
    assert ({64: 64, 128: 96}[D] if "kept" in options else 0) == config.Q_IN_REGS
    assert (3 if "three" in options else 1) == config.PROGRAMS
    assert ("skip" in options) == config.SKIP
    assert (1 if "one-warp" in options else 4) == config.PRODUCERS


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize(
    ("Sq", "heads", "group", "three"),
    [
        (8192, 8, 8, "full causal"),  # 21 rounds of 192 rows, 32 of 128
        (8192, 32, 1, "causal"),  # 11, 16
        (8192, 16, 1, "causal"),  # 6, 8
        (8192, 4, 1, ""),  # 2, 2; causal, the last item would take longer than all others together
        (500, 1024, 1, ""),  # 24, 32
        (260, 1024, 1, "full causal"),  # 16, 24
        (256, 1024, 1, ""),  # 16, 16
    ],
)
def test_three_consumers_where_they_have_less_to_do(
    Sq: int, heads: int, group: int, three: str, causal: bool
) -> None:
    config = configs.attention_forward_hopper(128, 8192, Kind(causal), Sq, heads, group)
    assert (config.W == 3) == (("causal" if causal else "full") in three)
    assert (config.W == 2) == config.PINGPONG
    assert (0 if config.W == 3 else 96) == config.Q_IN_REGS
    for Sk in (1000, 2047 if not causal else 6143):
        assert configs.attention_forward_hopper(128, Sk, Kind(causal), Sq, heads, group).W == 2


@pytest.mark.parametrize(
    ("Sq", "idle"),
    [
        (64, 0),
        (65, 1),
        (128, 1),
        (129, 0),
        (192, 0),
        (193, 2),
        (1023, 2),
        (1024, 2),
        (1025, 1),
        (1984, 2),
        (2048, 1),
        (2049, 0),
        (4096, 0),
        (16384, 0),
    ],
)
@pytest.mark.parametrize("Sk", [1000, 8000])
def test_consumers_without_rows_sit_out(Sq: int, idle: int, Sk: int) -> None:
    """At head_dim 64, without a mask, in rows that are not long; with few queries there is but one,
    and four where they have no more padding and keys are not many."""
    config = configs.attention_forward_hopper(64, Sk, FULL, Sq)
    pads_less = -(-Sq // 256) * 256 <= -(-Sq // 192) * 192
    assert (config.W == 4) == (Sk == 1000 and pads_less and Sq > 64)
    if config.W == 4:
        assert not config.IDLE and not config.HAS_WORK_TABLE
        return
    assert config.IDLE == (idle > 0) == config.HAS_WORK_TABLE
    assert not (config.IDLE and (config.KIND.CAUSAL or config.Q_IN_REGS or config.W < 3))
    costs = hopper_configs.item_costs(config, Sq, Sk, Sk)
    assert len(costs) == -(-Sq // config.BM)
    if config.W == 3:
        padding = len(costs) * config.BM - Sq
        assert idle in (0, padding // 64) and (idle or Sq > 2048 or padding < 64)
        assert costs == sorted(costs, reverse=True)
        assert costs[-1] == (-(-Sk // config.BN) + 1) * {0: 1, 1: 0.84, 2: 0.75}[padding // 64]
    for D, causal, group in ((64, True, 1), (128, False, 1), (256, False, 1)):
        assert not configs.attention_forward_hopper(D, Sk, Kind(causal), Sq, 8, group).IDLE


@pytest.mark.parametrize(("D", "DQ"), [(64, 2), (96, 1), (128, 1), (192, 0), (256, 0)])
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("ordered", [False, True])
@pytest.mark.parametrize("Sk", [512, 1024, 2048, 4096, 16384])
@pytest.mark.parametrize("heads", [1, 512])
@pytest.mark.parametrize("group", [1, 4])
def test_backward_configurations(
    D: int, DQ: int, causal: bool, ordered: bool, Sk: int, heads: int, group: int
) -> None:
    config = configs.attention_backward_hopper(D, Sk, Kind(causal), ordered, heads, group)
    assert ordered == config.ORDERED
    assert (1 if config.PAIRS else DQ) == config.DQ
    paired = D == 64 and heads == 512 and Sk >= (2048 if causal else 512)
    assert paired == config.PAIRS
    if config.WAVES:
        assert group > 1 and not paired
    assert (config.DOWN and not config.FIRST) == config.ROTATE
    barriers = [
        config.DONE,
        config.ODD,
        config.EMPTY,
        config.EMPTY + 1,
        config.FULL,
        config.FULL + 1,
        config.QB,
        config.QB + 1,
        config.OB,
        config.OB + 1,
        config.DS,
    ]
    assert len(set(barriers)) == len(barriers)
    assert min(barriers) >= 4, "Triton uses the lowest named barriers itself"
    assert max(barriers) == 15
    queries = 4 * config.BM * config.D
    keys = 2 * config.KV * config.BN * config.D
    halves = queries + keys + config.TILES * config.BN * config.BM
    parts = {0: 0, 1: 2, 2: 1}[config.DQ] * 128 * 32 * 4
    rows = 2 * config.BM + 2 * 64 * config.KV_IN_REGS  # of 16 halves: lse and delta, selectors
    assert halves * 2 + parts + rows * 32 <= SHARED_LIMIT
    half = 64 if D in (96, 128) else 0
    assert (half > 0 and not causal and config.FIRST and not config.ORDERED) == config.TERMS_FIRST
    assert ((half, 0) if causal or config.TERMS_FIRST else (0, half)) == (
        config.K_IN_REGS,
        config.V_IN_REGS,
    )
    assert config.DOWN or not (causal and D in (96, 128))
    assert (half > 0 and causal and config.ROTATE and not config.WAVES) == config.ITEM_IN_SMEM


def test_backward_walks_that_there_are() -> None:
    """Walks from the diagonal up need one, and the order of key tiles a walk that follows it."""
    causal = configs.attention_backward_hopper(128, 4096, CAUSAL)
    full = configs.attention_backward_hopper(128, 4096, FULL)
    assert (causal.DQ, full.DQ) == (1, 1)
    found = {}
    for sums, which in itertools.product(get_args(Sums), (causal, full)):
        found[sums, which.KIND.CAUSAL] = names = []
        for walk in get_args(Walk):
            with contextlib.suppress(ValueError):
                dataclasses.replace(which, WALK=walk, SUMS=sums)
                names.append(walk)
    assert found == {
        ("zeros", True): ["by_head", "down", "waves"],
        ("zeros", False): ["by_head", "round", "down"],
        ("store", True): ["by_head", "down", "waves", "alternate"],
        ("store", False): ["by_head", "down"],
        ("ordered", True): ["down", "waves", "alternate"],
        ("ordered", False): ["down"],
    }
    with pytest.raises(ValueError, match="'zeros' and DQ 0 has no walk 'round'"):
        dataclasses.replace(full, WALK="round", DQ=0)


@pytest.mark.parametrize(
    ("D", "Sk", "group", "schedule"),
    [
        (64, 1024, 1, "full-pairs; full-ordered-pairs; causal-alternate; causal-ordered-alternate"),
        (
            64,
            2048,
            1,
            "full-pairs; full-ordered-pairs; causal-alternate-pairs; causal-ordered-alternate-pairs",
        ),
        (64, 4096, 8, "full-zeros-pairs; full-ordered-pairs; causal-zeros-pairs; causal-ordered-pairs"),
        (128, 1024, 1, "full; full-ordered; causal-alternate; causal-ordered-alternate"),
        (128, 2048, 1, "full-zeros; full-ordered; causal-alternate; causal-ordered-alternate"),
        (128, 2048, 8, "full-zeros; full-ordered; causal-waves; causal-ordered"),
        (128, 8192, 1, "full-zeros; full-ordered; causal-zeros; causal-ordered-alternate"),
        (128, 8192, 8, "full-zeros-rotate; full-ordered; causal-waves-zeros; causal-ordered-waves"),
        (128, 16384, 1, "full-zeros; full-ordered; causal-zeros; causal-ordered-alternate"),
        (128, 16384, 8, "full-zeros; full-ordered; causal-waves-zeros; causal-ordered-waves"),
        (256, 1024, 1, "full; full-ordered; causal; causal-ordered-alternate"),
        (256, 16384, 8, "full; full-ordered; causal-waves; causal-ordered-waves"),
    ],
)
def test_backward_takes_what_was_measured_fastest(D: int, Sk: int, group: int, schedule: str) -> None:
    chosen = [
        configs.attention_backward_hopper(D, Sk, Kind(causal), ordered, 512, group)
        for causal, ordered in itertools.product((False, True), (False, True))
    ]
    assert [config.name for config in chosen] == [f"backward-{D}-{s}" for s in schedule.split("; ")]


@pytest.mark.parametrize(
    ("Sk", "causal", "group", "few", "more"),  # sequences of 8 key heads: zeros up to `few` of them
    [
        (256, False, 1, 32, 64),
        (1024, False, 1, 8, 16),
        (1024, False, 8, 8, 16),
        (4096, True, 1, 4, 8),
        (1024, True, 8, 4, 8),
        (2048, True, 8, 2, 4),
    ],
)
def test_backward_of_few_items_begins_with_zeros(
    Sk: int, causal: bool, group: int, few: int, more: int
) -> None:
    def chosen(sequences: int, ordered: bool = False) -> configs.HopperBackward:
        return configs.attention_backward_hopper(128, Sk, Kind(causal), ordered, 8 * sequences, group)

    assert not chosen(few).FIRST
    assert chosen(more).FIRST
    assert chosen(few, ordered=True) == chosen(more, ordered=True)
    one_tile = configs.attention_backward_hopper(128, 128, Kind(causal), False, 1, group)
    assert one_tile.FIRST, "one key tile stores, and none has to wait"
    alternate = configs.attention_backward_hopper(128, 1024, CAUSAL, False, 1)
    assert alternate.FIRST and alternate.ALTERNATE


def test_heads_together_split_evenly() -> None:
    config = configs.attention_forward_hopper(128, 4096, CAUSAL)
    for heads in (1, 7, 16, 48):
        together = configs.heads_together_forward(config, 1, heads, heads, 4096)
        assert 1 <= together <= heads
    for D, S, causal, mixed in (
        (64, 512, True, 16),
        (64, 1024, True, 16),
        (128, 1024, True, 16),
        (128, 4096, True, 16),
        (64, 256, True, 512),
        (64, 1024, False, 128),
        (64, 2048, False, 64),
    ):
        config = configs.attention_forward_hopper(D, S, Kind(causal), S)
        assert configs.heads_together_forward(config, 16, 32, 32, S) == mixed
        assert configs.heads_together_forward(config, 16, 128, 32, S) == 4 * mixed
    for S, heads, mixed in (
        (8192, 16, 8),
        (16384, 16, 4),
        (2048, 64, 32),
    ):  # four rounds of 132 programs
        listed = configs.attention_backward_hopper(128, S, Kind(TABLE=True))
        assert configs.heads_together_backward(listed, 1, heads, heads, S, S, 132) == mixed
    for ordered in (False, True):
        for causal in (False, True):
            shared = configs.attention_backward_hopper(128, 4096, Kind(causal), ordered, 8, 8)
            assert configs.heads_together_backward(shared, 1, 64, 8, 4096, 4096, 132) <= 8
            backward = configs.attention_backward_hopper(128, 4096, Kind(causal), ordered)
            for heads in (1, 7, 8, 16, 48, 256):
                for Sk in (100, 1024, 4096, 16384):
                    together = configs.heads_together_backward(backward, 1, heads, heads, Sk, Sk, 132)
                    assert 1 <= together <= heads
                    if heads in (8, 16, 256):
                        assert heads % together == 0, "no short last group"
