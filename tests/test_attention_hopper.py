"""The Hopper backend: what it refuses, its configurations and schedules, graphs and compilation."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import itertools
import random
from collections import Counter
from collections.abc import Iterator
from types import SimpleNamespace
from unittest import mock

import pytest
import torch
from attention_problem import Problem, assert_within_bound, exact_and_eager, lay_out, make, results
from schedule_on_the_host import ranges_on_the_host
from torch import Tensor

import flashproto
from flashproto import backends, configs
from flashproto.configs import hopper_forward as hopper_configs
from flashproto.configs.hopper import MULTIPROCESSORS
from flashproto.kernels import schedule
from flashproto.kernels.hopper import attention_backward_masks as masks
from flashproto.kernels.hopper import attention_backward_work as work
from flashproto.kernels.hopper.attention_backward_rows import preprocess_kernel
from flashproto.ops import attention as attention_op
from flashproto.ops import attention_hopper, call_cache
from flashproto.ops.attention_hopper_reasons import hopper_attention_reasons
from flashproto.ops.descriptors import tma_reads
from flashproto.ops.recipe import Compute, Launch
from flashproto.variant import Kind, Variant, pack

FULL, CAUSAL = Kind(), Kind(CAUSAL=True)
SHARED_LIMIT = 227 * 1024


@pytest.fixture
def hopper() -> None:
    against = backends.device_reasons("hopper", torch.device("cuda"))
    if against:
        pytest.skip("; ".join(against))


@contextlib.contextmanager
def determinism() -> Iterator[None]:
    torch.use_deterministic_algorithms(True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(False)


@pytest.fixture
def deterministic() -> Iterator[None]:
    with determinism():
        yield


def half(*shape: int) -> Tensor:
    return torch.randn(shape).bfloat16()


# --- what it refuses -----------------------------------------------------------------------------

FITS = half(2, 3, 5, 64)
REFUSED = {
    "dtype is float32": (FITS.float(),) * 3,
    "one for all": (FITS, FITS, half(2, 3, 5, 32)),
    "head_dim is 264": (half(1, 1, 4, 264),) * 3,
    "head_dim is 12": (half(1, 1, 4, 12),) * 3,
    "q or k is empty": (FITS, FITS[:, :, :0], FITS[:, :, :0]),
    "k's last dimension has stride 5": (FITS, lay_out(FITS, "transposed"), FITS),
    "v's stride 0": (FITS, FITS, lay_out(FITS, "expanded")),
    "q's stride 68": (half(2, 3, 5, 68)[..., :64], FITS, FITS),
    "does not start at a multiple of 16 bytes": (lay_out(FITS, "offset"), FITS, FITS),
}


@pytest.mark.parametrize("reason", REFUSED)
def test_refuses_with_the_reason(reason: str) -> None:
    found = backends.texts(hopper_attention_reasons(*REFUSED[reason]))
    assert any(reason in text for text in found), found


@pytest.mark.parametrize("strides", ["contiguous", "tokens first", "packed"])
@pytest.mark.parametrize("D", [8, 64, 96, 128, 192, 256])
def test_takes_whatever_tma_takes(D: int, strides: str) -> None:
    q = lay_out(half(2, 3, 5, D), strides)
    assert list(hopper_attention_reasons(q, q, q)) == []
    one = lay_out(half(1, 1, 5, D), "expanded")  # strides of single entries are never used
    assert list(hopper_attention_reasons(one, one, one)) == []


def test_takes_calls_when_asked_for_determinism(deterministic: None) -> None:
    assert list(hopper_attention_reasons(FITS, FITS, FITS)) == []


@pytest.mark.parametrize("dynamic", [False, True])
def test_reasons_are_found_while_compiling(dynamic: bool) -> None:
    def count(q: Tensor) -> Tensor:
        return q + len(list(hopper_attention_reasons(q, q, q)))

    torch.compiler.reset()
    compiled = torch.compile(count, fullgraph=True, backend="eager", dynamic=dynamic)
    for x in (
        FITS,
        half(2, 3, 9, 64),
        half(2, 3, 5, 68)[..., :64],
        lay_out(FITS, "transposed"),
        FITS.float(),
    ):
        assert torch.equal(compiled(x), count(x))


def test_needs_a_device_of_capability_9_0(monkeypatch: pytest.MonkeyPatch) -> None:
    assert "capability 9.0" in backends.device_reasons("hopper", torch.device("cpu"))[0]
    for capability in ((8, 0), (10, 0)):
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device, c=capability: c)
        (reason,) = backends.device_reasons("hopper", torch.device("cuda"))
        assert f"{capability[0]}.{capability[1]}" in reason
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    monkeypatch.setattr(backends, "INTERPRETED", False)
    assert backends.device_reasons("hopper", torch.device("cuda")) == ()


# --- configurations ------------------------------------------------------------------------------


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
    assert ({64: 64, 128: 96}[D] if "kept" in options else 0) == config.KEPT
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
    assert (config.W == 2) == config.TURNS
    assert (0 if config.W == 3 else 96) == config.KEPT
    for Sk in (1000, 2047 if not causal else 6143):
        assert configs.attention_forward_hopper(128, Sk, Kind(causal), Sq, heads, group).W == 2


@pytest.mark.parametrize(
    ("Sq", "idle"),
    [(64, 0), (65, 1), (128, 1), (129, 0), (192, 0), (193, 2), (1023, 2), (1024, 2), (1025, 1),
     (1984, 2), (2048, 1), (2049, 0), (4096, 0), (16384, 0)],
)  # fmt: skip
@pytest.mark.parametrize("Sk", [1000, 8000])
def test_consumers_without_rows_sit_out(Sq: int, idle: int, Sk: int) -> None:
    """At head_dim 64, without a mask, in rows that are not long; with few queries there is but one,
    and four where they have no more padding and keys are not many."""
    config = configs.attention_forward_hopper(64, Sk, FULL, Sq)
    pads_less = -(-Sq // 256) * 256 <= -(-Sq // 192) * 192
    assert (config.W == 4) == (Sk == 1000 and pads_less and Sq > 64)
    if config.W == 4:
        assert not config.IDLE and not config.PLANNED
        return
    assert config.IDLE == (idle > 0) == config.PLANNED
    assert not (config.IDLE and (config.KIND.CAUSAL or config.KEPT or config.W < 3))
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
    assert (config.DOWN and config.FIRST) or not ordered
    assert (1 if config.PAIRS else DQ) == config.DQ
    paired = D == 64 and heads == 512 and Sk >= (2048 if causal else 512)
    assert paired == config.PAIRS
    assert not (config.ALTERNATE and config.WAVES)
    if config.BOTH:
        assert causal and config.DOWN
    assert config.ALTERNATE <= config.FIRST
    if config.WAVES:
        assert group > 1 and not paired
    assert (config.DOWN and not config.FIRST) == config.ROTATE
    barriers = [config.DONE, config.ODD, config.EMPTY, config.EMPTY + 1, config.FULL, config.FULL + 1,
                config.QB, config.QB + 1, config.OB, config.OB + 1, config.DS]  # fmt: skip
    assert len(set(barriers)) == len(barriers)
    assert min(barriers) >= 4, "Triton uses the lowest named barriers itself"
    assert max(barriers) == 15
    queries = 4 * config.BM * config.D
    keys = 2 * config.KV * config.BN * config.D
    halves = queries + keys + config.TILES * config.BN * config.BM
    parts = {0: 0, 1: 2, 2: 1}[config.DQ] * 128 * 32 * 4
    rows = 2 * config.BM + 2 * 64 * config.KEPT  # of 16 halves: lse and delta, and what chooses them
    assert halves * 2 + parts + rows * 32 <= SHARED_LIMIT
    half = 64 if D in (96, 128) else 0
    assert (half > 0 and not causal and config.FIRST and not config.ORDERED) == config.TERMS_FIRST
    assert ((half, 0) if causal or config.TERMS_FIRST else (0, half)) == (config.KEPT_K, config.KEPT_V)
    assert config.DOWN or not (causal and D in (96, 128))
    assert (half > 0 and causal and config.ROTATE and not config.WAVES) == config.NOTED


@pytest.mark.parametrize(
    ("D", "Sk", "group", "schedule"),
    [
        (64, 1024, 1, "full-pairs; full-ordered-pairs; causal-alternate; causal-ordered-alternate"),
        (64, 2048, 1, "full-pairs; full-ordered-pairs;"
         " causal-alternate-pairs; causal-ordered-alternate-pairs"),
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
)  # fmt: skip
def test_backward_takes_what_was_measured_fastest(D: int, Sk: int, group: int, schedule: str) -> None:
    chosen = [
        configs.attention_backward_hopper(D, Sk, Kind(causal), ordered, 512, group)
        for causal, ordered in itertools.product((False, True), (False, True))
    ]
    assert [config.name for config in chosen] == [f"backward-{D}-{s}" for s in schedule.split("; ")]


@pytest.mark.parametrize(
    ("Sk", "causal", "group", "few", "more"),  # sequences of 8 key heads: zeros up to `few` of them
    [
        (256, False, 1, 32, 64), (1024, False, 1, 8, 16), (1024, False, 8, 8, 16),
        (4096, True, 1, 4, 8), (1024, True, 8, 4, 8), (2048, True, 8, 2, 4),
    ],
)  # fmt: skip
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


@pytest.mark.parametrize(
    "shape", [(8, 2, 1024, 1024), (2, 2, 300, 70), (16, 16, 4096, 4096), (7, 3, 5, 900)]
)
def test_plan_holds_every_item_once_and_is_balanced(shape: tuple[int, int, int, int]) -> None:
    heads, together, Sq, Sk = shape
    config = configs.attention_forward_hopper(128, Sk, CAUSAL)
    programs = 132
    plan = configs.balanced_plan(config, heads, together, Sq, Sk, Sk - Sq, programs)
    tiles = -(-Sq // config.BM)
    assert Counter(item for own in plan for item in own) == Counter(range(tiles * heads))
    if tiles * heads > 3 * programs:
        assert max(map(len, plan)) <= 2 * tiles * heads / programs + 1


@pytest.mark.parametrize(
    ("D", "S", "heads", "most"),
    [(64, 512, 1024, 1.02), (64, 1024, 512, 1.01), (64, 1024, 48, 1.04), (64, 1024, 96, 1.06),
     (64, 4096, 128, 1.01), (128, 1024, 256, 1.01), (128, 2048, 128, 1.015), (128, 16384, 16, 1.02)],
)  # fmt: skip
def test_programs_of_a_plan_end_together(D: int, S: int, heads: int, most: float) -> None:
    """By what items cost: the last program's end over what each would take of work without gaps."""
    config = configs.attention_forward_hopper(D, S, CAUSAL, S, heads)
    together = configs.heads_together_forward(config, 1, heads, heads, S)
    programs = 132 * config.PROGRAMS
    plan = configs.balanced_plan(config, heads, together, S, S, 0, programs)
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
    plan = configs.balanced_plan(config, heads, together, S, S, S, 132)
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
    D: int, causal: bool, heads: int, Sq: int, programs: int, capturing: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: capturing)
    monkeypatch.setattr(attention_hopper, "outside_memory_pool", lambda make, device: make())
    config = configs.attention_forward_hopper(D, 8192, Kind(causal))
    assert config.W == 3
    order = attention_hopper.Order(config, heads, 1, Sq, Sq, 0, programs, torch.device("cpu"))
    table = order.on_device()
    total = heads * -(-Sq // config.BM)
    assert table.dtype == torch.int32
    assert table.is_contiguous()
    assert Counter(table[table < total].tolist()) == Counter(range(total))
    for column in table.T.tolist():
        first = column.index(total)
        assert set(column[first:]) == {total}, "a program stops at the first end that it meets"
    assert (order.on_device() is table) == (not capturing)


def apart(t: Tensor) -> Tensor:
    """t with something between its rows."""
    return torch.stack((t, t), 1)[:, 0]


def late(t: Tensor) -> Tensor:
    """t at an address that is no multiple of 16."""
    return torch.empty(t.numel() + 1, dtype=t.dtype, device=t.device)[1:].view(t.shape).copy_(t)


def test_backward_takes_any_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """A recipe launches for the strides that it is given, all of them such as TMA reads; what TMA
    cannot read is copied, and nothing else."""
    q, k, v = (torch.randn(2, 30, heads, 64).bfloat16().transpose(1, 2) for heads in (4, 2, 2))
    out, lse = torch.randn_like(q), torch.randn(2, 4, 30)
    monkeypatch.setattr(attention_hopper, "multiprocessors", lambda device: 132)
    dout, one = torch.randn_like(q), torch.ones((), dtype=q.dtype)
    settings = attention_op.Settings((0,), (), "causal//", 0.125, "hopper")
    for copies, given in (
        (0, (q, k, v, out, lse, dout, None)),
        (1, (q, k, v, out, lse, dout.contiguous(), torch.randn(2, 30, 4).transpose(1, 2))),
        (1, (q, k, v, out, lse, one.expand(q.shape), None)),
        (1, (apart(q), k.contiguous(), apart(v), out, apart(lse), apart(dout), None)),
        (1, (late(q), k, v, out, lse, dout, None)),
    ):
        for ordered in (False, True):
            with determinism() if ordered else contextlib.nullcontext():
                *saved, dout_given, dlse = given
                tensors = dout_given, dlse, None, None, *saved
                needs = (True, True, True)
                recipe = attention_op.attention.backward_recipe(tensors, settings, needs, False)
            made = [s for s in recipe.steps if isinstance(s, Compute)]
            assert len(made) == copies
            launches = [s for s in recipe.steps if isinstance(s, Launch)]
            assert [x.kernel.__name__ for x in launches] == [
                "preprocess_kernel", "attention_backward_kernel", "postprocess_kernel"
            ]  # fmt: skip
            main = launches[1].arguments
            chosen = configs.attention_backward_hopper(64, 30, Kind(True), ordered, 4, 2)
            assert main["CFG"] == chosen
            boxed = [main[name] for name in ("q_desc", "do_desc", "k_desc", "v_desc")]
            assert all(tma_reads(x.operand) for x in boxed)
            for x in boxed:
                assert tuple(x.boxes.first.shape) == tuple(x.operand.shape)
            assert launches[0].arguments["HAS_DLSE"] == (dlse is not None)
            assert main["dk_ptr"].strides == main["dv_ptr"].strides


def test_heads_together_split_evenly() -> None:
    config = configs.attention_forward_hopper(128, 4096, CAUSAL)
    for heads in (1, 7, 16, 48):
        together = configs.heads_together_forward(config, 1, heads, heads, 4096)
        assert 1 <= together <= heads
    for D, S, causal, mixed in (
        (64, 512, True, 16), (64, 1024, True, 16), (128, 1024, True, 16), (128, 4096, True, 16),
        (64, 256, True, 512),
        (64, 1024, False, 128), (64, 2048, False, 64),
    ):  # fmt: skip
        config = configs.attention_forward_hopper(D, S, Kind(causal), S)
        assert configs.heads_together_forward(config, 16, 32, 32, S) == mixed
        assert configs.heads_together_forward(config, 16, 128, 32, S) == 4 * mixed
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


def producer_walk(
    config: configs.HopperBackward, hk: int, m0: int, M: int, GROUP: int, n: int = 0, up: int = 0
) -> Iterator[tuple[int, int]]:
    """(query head, query tile) as the producer's device code steps through them for key tile n."""
    h0, col = hk * GROUP, n * config.BN
    h = began = work.first_head.fn(h0, col, GROUP, config)
    m = start = work.first_tile.fn(col, m0, M, up, config)
    for _ in range((M - m0) * GROUP):
        yield h, m
        h, m = work.next_tile.fn(h, m, h0, began, m0, start, up, GROUP, M, config)


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
    """(number of the query tile, dist, whether key tile n adds first) as the consumers' device code
    steps through them, dist relative to key 0."""
    tile = h0 * M + work.first_tile.fn(n * config.BN, m0, M, up, config)
    low, high = m0 * config.BM + offset, M * config.BM + offset
    outer, begin, end, dist = work.loops.fn(low, high, m0, M, up, GROUP, config)
    for i in range(outer):
        first = work.comes_first.fn(i, n * config.BN, m0, up, NB, M, offset, config)
        for index in range(begin, end, config.STEP):
            yield tile, work.distance.fn(index, dist, config), first
            tile = work.inner_step.fn(tile, M, config)
        tile, dist = work.outer_step.fn(tile, dist, m0, M, up, GROUP, config)


def on_the_host(monkeypatch: pytest.MonkeyPatch, programs: int = 6) -> None:
    """Let device code of the schedule run as Python."""
    functions = {"minimum": min, "maximum": max, "where": lambda c, x, y: x if c else y,
                 "num_programs": lambda _: programs}  # fmt: skip
    monkeypatch.setattr(work, "gl", SimpleNamespace(**functions))
    monkeypatch.setattr(masks, "gl", SimpleNamespace(**functions))
    monkeypatch.setattr(masks, "first_clear", masks.first_clear.fn)
    monkeypatch.setattr(work, "hidden_zero", lambda: 0)
    monkeypatch.setattr(work, "place", work.place.fn)
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
        needs = [limit < 63 or (causal and dist < 63) for dist in range(low, high, config.BM)]
        clear = masks.first_clear(low, high, limit, config)
        assert needs == [dist < clear for dist in range(low, high, config.BM)]
        for both, up in ((False, 0), (True, 0), (True, 1)):
            walk = dataclasses.replace(config, DOWN=True, WAVES=both, ALTERNATE=False)
            begin, end = masks.clear_trips.fn(low, high, limit, tiles, up, walk)
            ways = needs if up else needs[::-1]
            assert ways == [not begin <= trip < end for trip in range(tiles)]


@pytest.mark.parametrize("GROUP", [1, 3])
@pytest.mark.parametrize("down", [False, True])
def test_backward_walks(down: bool, GROUP: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Producer and consumers take the same way; downwards, what a key tile visits is the beginning of
    what the one before it visits."""
    on_the_host(monkeypatch)
    config = dataclasses.replace(configs.attention_backward_hopper(128, 4096, CAUSAL), DOWN=down)
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
            _, hk, col, m0, up = work.key_tile.fn(t, NB, M, heads, heads, together, offset, (), config)
            n, h0 = col // config.BN, hk * GROUP
            assert up == t % (together * NB) // 6 % 2
            walk = list(producer_walk(config, hk, m0, M, GROUP, n, up))
            tiles = range(m0, M) if up else range(M - 1, m0 - 1, -1)
            first = n % GROUP if zeros else 0
            order = [h0 + (first + i) % GROUP for i in range(GROUP)]
            assert walk == [(h, m) for m in tiles for h in order]
            consumed = list(consumer_walk(config, h0, m0, M, GROUP, n, up, NB, offset))
            assert [dist for _, dist, _ in consumed] == [m * config.BM + offset for _, m in walk]
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
        _, hk, col, m0, up = work.key_tile.fn(t, NB, M, heads, heads, together, 0, (), config)
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
    without = dataclasses.replace(waves, WAVES=False)
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


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("scale", [2.0**-100, 0.125, 3.0])
def test_lse_and_delta_of_the_preprocess(device: str, dtype: torch.dtype, scale: float) -> None:
    """Three numbers each add up to -lse / scale and -delta in float32; rows that see no key and rows
    past the end have finite ones, for which no probability is left."""
    Sq, Sp, H, D = 40, 64, 2, 64
    out, dout = (torch.randn(1, H, Sq, D, device=device).to(dtype) for _ in range(2))
    lse, dlse = (torch.randn(1, H, Sq, device=device) for _ in range(2))
    lse *= 50
    lse[0, 1, 5] = -torch.inf
    ld = torch.full((H * Sp, attention_hopper.LD), torch.nan, dtype=torch.bfloat16, device=device)
    sums = torch.ones(H * Sp * D, device=device)
    before, behind = 4, work.FIRST_TURN.value + H * Sp // 64
    counters = torch.ones(before + behind, dtype=torch.int32, device=device)
    strides = [n // 8 for n in out.stride()[:3]]
    preprocess_kernel[(H * Sp // 32,)](
        out, dout, lse, dlse, ld, sums, counters[before:], Sq, Sp, Sp, H, D, *strides, *strides, scale,
        HAS_DLSE=True, FIRST=False, D=D, R=32, BM=64,
    )  # fmt: skip
    ld = ld.view(H, Sp, -1).double()
    assert ld.isfinite().all()
    assert not ld[:, Sq:, 3:].any()
    assert not ld[..., 6:].any()
    assert (ld[:, Sq:, :3].sum(-1) * scale < -1e6).all()
    assert ld[1, 5, :3].sum() * scale < -1e6
    seen = lse[0].isfinite()
    delta = (out.double() * dout.double()).sum(-1)[0] - dlse[0]
    for first, want in ((0, -lse[0].double() / scale), (3, -delta)):
        got = ld[:, :Sq, first : first + 3].sum(-1)
        tolerance = {0: 0.0, 3: 1e-5}[first]  # delta is a sum
        torch.testing.assert_close(got[seen], want[seen], rtol=1e-6, atol=tolerance)
    assert not sums.any()
    assert counters[before] == 0
    assert not counters[before - H : before].any()
    assert not counters[before + work.FIRST_TURN.value :].any()


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
                work.key_tile.fn(t, NB, M, Hk, B * Hk, together, offset, (), config)
                for t in range(NB * B * Hk)
            ]
            wanted = [(b, h, n * config.BN) for b in range(B) for h in range(Hk) for n in range(NB)]
            assert Counter(item[:3] for item in items) == Counter(wanted)
            assert all(0 <= m0 < M for *_, m0, _ in items)
            ups = 0
            for b in range(B):
                for h in range(Hk):
                    own = [(item[2] // config.BN, item[4]) for item in items if item[:2] == (b, h)]
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
            _, hk, col, m0, up = work.key_tile.fn(t, NB, M, heads, heads, together, offset, (), config)
            n = col // config.BN
            walk = []
            for h, m in producer_walk(config, hk, m0, M, GROUP, n, up):
                at = work.place(m, n, up, NB, M, offset, config)
                places.setdefault((h, m), []).append(at)
                walk.append((h * M + m, m * config.BM + offset, at == 0))
            h0 = hk * GROUP
            consumed = list(consumer_walk(config, h0, m0, M, GROUP, n, up, NB, offset))
            if config.PAIRS:  # whose consumers leave tiles to the producer
                assert [dist for _, dist, _ in consumed] == [dist for _, dist, _ in walk]
            else:
                assert walk == consumed
        assert all(at == list(range(len(at))) for at in places.values())


# --- on the device -------------------------------------------------------------------------------


@pytest.mark.gpu
def test_is_chosen_where_it_applies(hopper: None, caplog: pytest.LogCaptureFixture) -> None:
    backends._logged.clear()
    with caplog.at_level("INFO", logger="flashproto"):
        flashproto.attention(*(FITS.cuda(),) * 3)
        flashproto.attention(*(FITS.cuda().float(),) * 3)
    said = [record.getMessage() for record in caplog.records]
    assert "'hopper'" in said[0] and "'triton'" in said[1]


def chosen_backend(caplog: pytest.LogCaptureFixture, *inputs: Tensor) -> str:
    backends._logged.clear()
    with caplog.at_level("INFO", logger="flashproto"):
        flashproto.attention(*inputs)
    return caplog.records[-1].getMessage()


@pytest.mark.gpu
def test_is_chosen_under_determinism(
    hopper: None, deterministic: None, caplog: pytest.LogCaptureFixture
) -> None:
    assert "'hopper'" in chosen_backend(caplog, *(FITS.cuda(),) * 3)


# (B, Hq, Hkv, Sq, Sk): whole tiles, ragged ones, GQA with more programs than fit on the device, few
# queries, and more queries than keys (causal: tiles that no key tile visits)
ORDERED_SHAPES = [
    (4, 8, 8, 1024, 1024),
    (1, 3, 1, 777, 1301),
    (2, 16, 2, 1500, 4500),
    (3, 4, 2, 5, 900),
    (2, 4, 4, 1100, 300),
]


@pytest.fixture
def choose(monkeypatch: pytest.MonkeyPatch) -> Iterator[mock.Mock]:
    """What configs chooses for every backward is its return_value."""
    chosen = mock.Mock()
    monkeypatch.setattr(configs, "attention_backward_hopper", chosen)
    call_cache.forget()
    yield chosen
    chosen.assert_called()
    call_cache.forget()


@pytest.mark.gpu
@pytest.mark.parametrize("shape", ORDERED_SHAPES)
@pytest.mark.parametrize(
    ("D", "length"),
    [(64, 1024), (64, 16384), (96, 1024), (128, 1024), (128, 16384), (256, 1024), (256, 16384)],
)
@pytest.mark.parametrize("causal", [False, True])
def test_deterministic_backward_gives_the_same_bits_100_times(
    shape: tuple[int, ...], D: int, length: int, causal: bool, hopper: None,
    monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest,
) -> None:  # fmt: skip
    """By the configuration of such a length: long rows have key tiles of 256 at head_dim 64, and walk
    in waves at others, here of few programs, if heads are grouped."""
    _, Hq, Hkv, _, _ = shape
    config = configs.attention_backward_hopper(D, length, Kind(causal), True, group=Hq // Hkv)
    assert (D == 64 and (length == 16384 or not causal)) == config.PAIRS
    assert (D > 64 and length == 16384 and causal and Hq > Hkv) == config.WAVES
    if config.WAVES:
        monkeypatch.setattr(attention_hopper, "multiprocessors", lambda _: 20)
    request.getfixturevalue("choose").return_value = config
    problem = Problem(torch.bfloat16, *shape, D, D, causal)
    inputs, gradients = make(problem, "cuda")

    def run() -> dict[str, Tensor]:
        with determinism():
            outputs = flashproto.attention(*inputs, causal=causal, return_lse=True, impl="hopper")
            return results(outputs, inputs, gradients)

    first = run()
    assert_within_bound(first, *exact_and_eager(problem, inputs, gradients), problem.dtype)
    different = torch.zeros((), dtype=torch.int64, device="cuda")
    for _ in range(99):
        different += sum((value != first[name]).sum() for name, value in run().items())
    assert different.item() == 0


# (head_dim, keys, heads, query heads of a key head) of rows for which the backward takes, causal: pairs
# and zeros, the same of few keys with the first tile's store, zeros, and alternate walks; waves
BACKWARDS = [
    (24, 16384, 1024, 1), (64, 2048, 1024, 1), (96, 16384, 1024, 1), (128, 1024, 1024, 1),
    (64, 4096, 1, 8), (96, 1024, 1024, 8), (128, 4096, 1, 8), (192, 1024, 1, 8),
]  # fmt: skip


@pytest.mark.gpu
@pytest.mark.parametrize(
    "shape", [*ORDERED_SHAPES, (1, 1, 1, 1, 3000), (2, 6, 3, 300, 300), (9, 40, 40, 70, 257)]
)
@pytest.mark.parametrize("how", BACKWARDS)
@pytest.mark.parametrize("causal", [False, True])
def test_backward_by_the_configuration_of_other_rows(
    shape: tuple[int, ...], how: tuple[int, int, int, int], causal: bool, hopper: None,
    monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest,
) -> None:  # fmt: skip
    """What rows of other lengths and groups take, in items of one and of many steps; waves by few
    programs, so that there are rounds of them."""
    D, length, heads, group = how
    config = configs.attention_backward_hopper(D, length, Kind(causal), False, heads, group)
    assert (heads > 1 and D <= 64) == config.PAIRS
    assert (group > 1 and causal) == config.WAVES
    assert (D == 192 or length < 3072 or (D == 64 and causal)) == config.FIRST
    if group == 1:
        assert (causal and length < 3072) == config.ALTERNATE
    if config.WAVES:
        monkeypatch.setattr(attention_hopper, "multiprocessors", lambda _: 7)
    request.getfixturevalue("choose").return_value = config
    problem = Problem(torch.bfloat16, *shape, D, D, causal)
    inputs, gradients = make(problem, "cuda")
    exact, eager = exact_and_eager(problem, inputs, gradients)
    for _ in range(3):
        outputs = flashproto.attention(*inputs, causal=causal, return_lse=True, impl="hopper")
        assert_within_bound(results(outputs, inputs, gradients), exact, eager, problem.dtype)


@pytest.mark.gpu
@pytest.mark.parametrize("group", [1, 2])
@pytest.mark.parametrize("steps", [1, 2, 5, 6, 7, 12])  # of an item, if group is 1
@pytest.mark.parametrize(
    ("D", "Sk"), [(64, 400), (64, 1024), (64, 4096), (128, 1024), (128, 2048), (192, 512)]
)
def test_sums_are_complete_before_they_are_converted(
    D: int, Sk: int, steps: int, group: int, hopper: None
) -> None:
    """Without a mask the postprocess begins while the last items run, which are counted if they have
    LEAST_STEPS; all memory is NaN before."""
    heads = 40
    config = configs.attention_backward_hopper(D, Sk, FULL, False, heads, group)
    assert config.COUNTED
    Sq = steps * config.BM - 5
    problem = Problem(torch.bfloat16, 1, heads * group, heads, Sq, Sk, D, D, causal=False)
    inputs, gradients = make(problem, "cuda")
    exact, eager = exact_and_eager(problem, inputs, gradients)
    for _ in range(5):
        outputs = flashproto.attention(*inputs, return_lse=True, impl="hopper")
        unused = [torch.full((1 << n,), torch.nan, device="cuda") for n in range(12, 27)]
        del unused
        assert_within_bound(results(outputs, inputs, gradients), exact, eager, problem.dtype)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("D", [64, 128, 256])
@pytest.mark.parametrize("shift", [-1, 1])
def test_scores_far_from_zero(shift: int, D: int, dtype: torch.dtype, hopper: None) -> None:
    """lse and delta reach the backward's products as three halves each: they are as good as float32."""
    B, H, S = 2, 3, 700
    q, k, v = (torch.randn(B, H, S, D, device="cuda") for _ in range(3))
    q[..., 0], k[..., 0] = 48.0, 48.0 * shift
    v[..., 0] += 100.0
    leaves = [t.to(dtype).requires_grad_() for t in (q, k, v)]
    dout = torch.randn(B, H, S, D, device="cuda").to(dtype)
    dlse = 100 * torch.randn(B, H, S, device="cuda")

    def gradients(like: Tensor, impl: str) -> list[Tensor]:
        given = [t.detach().to(like.dtype).requires_grad_() for t in leaves]
        outputs = flashproto.attention(*given, causal=True, return_lse=True, impl=impl)
        upstream = [dout.to(like.dtype), dlse.to(outputs[1].dtype)]
        return [g.double() for g in torch.autograd.grad(outputs, given, upstream)]

    exact = gradients(dlse.double(), "reference")
    ours, portable = gradients(dout, "hopper"), gradients(dout, "triton")
    for a, b, want in zip(ours, portable, exact, strict=True):
        unit = want.norm()
        assert (a - want).norm() <= 1.5 * (b - want).norm() + 1e-3 * unit


@pytest.mark.gpu
@pytest.mark.parametrize("D", [64, 128, 256])
def test_planned_calls_take_any_memory(D: int, hopper: None, deterministic: None) -> None:
    leaves = [
        torch.randn(2, 300, heads, D, device="cuda").bfloat16().transpose(1, 2).requires_grad_()
        for heads in (4, 2, 2)
    ]
    expected: dict[str, list[Tensor]] = {}
    for unpack in (Tensor.clone, Tensor.clone, Tensor.clone, apart, late, Tensor.contiguous):
        with torch.autograd.graph.saved_tensors_hooks(Tensor.detach, unpack):
            outputs = flashproto.attention(*leaves, causal=True, return_lse=True, impl="hopper")
        out, lse = outputs
        dout = torch.linspace(-1, 2, out.numel(), device="cuda").view(out.shape).bfloat16()
        dlse = torch.linspace(1, -2, lse.numel(), device="cuda").view(lse.shape)
        ones = torch.ones((), dtype=out.dtype, device="cuda").expand(out.shape)
        for kind, upstream in (
            ("both", [dout, dlse]),
            ("both", [apart(dout), apart(dlse)]),
            ("both", [late(dout), late(dlse)]),
            ("ones", [ones, None]),
        ):
            given = outputs if upstream[1] is not None else outputs[:1]
            gradients = torch.autograd.grad(given, leaves, upstream[: len(given)], retain_graph=True)
            got = [*outputs, *gradients]
            for a, b in zip(got, expected.setdefault(kind, got), strict=True):
                torch.testing.assert_close(a, b, rtol=0, atol=0)


@pytest.mark.gpu
@pytest.mark.parametrize("D", [64, 128, 256])
def test_deterministic_backwards_on_two_streams_do_not_hold_each_other_up(
    D: int, hopper: None, deterministic: None
) -> None:
    problem = Problem(torch.bfloat16, 1, 4, 4, 8192, 8192, D, D, causal=False, lse_gradient=False)
    inputs, gradients = make(problem, "cuda")
    outputs = flashproto.attention(*inputs, return_lse=True, impl="hopper")
    expected = torch.autograd.grad(outputs, inputs, gradients, retain_graph=True)
    streams = [torch.cuda.Stream() for _ in range(3)]
    torch.cuda.synchronize()
    found = []  # kept to the end: memory given back may be written while another stream still reads it
    for i in range(30):
        with torch.cuda.stream(streams[i % 3]):
            found.append(torch.autograd.grad(outputs, inputs, gradients, retain_graph=True))
    torch.cuda.synchronize()
    for grads in found:
        for got, wanted in zip(grads, expected, strict=True):
            assert torch.equal(got, wanted)


@pytest.mark.gpu
@pytest.mark.parametrize("Sq", [65, 128, 193, 1023, 1024, 1025, 3000])
@pytest.mark.parametrize(("B", "Hq", "Hkv", "Sk"), [(1, 2, 1, 1), (3, 60, 20, 333), (1, 40, 40, 2300)])
def test_rows_past_the_end_do_not_matter(
    Sq: int, B: int, Hq: int, Hkv: int, Sk: int, hopper: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With consumers that sit out, the same bits as without."""
    problem = Problem(torch.bfloat16, B, Hq, Hkv, Sq, Sk, 64, 64, causal=False)
    inputs, gradients = make(problem, "cuda")
    found = []
    for idle in (True, True, False):
        config = configs.attention_forward_hopper(64, 8192, FULL)
        assert config.W == 3
        config = dataclasses.replace(config, SKIP=Sk >= 2048, IDLE=idle)
        with monkeypatch.context() as patched:
            patched.setattr(configs, "attention_forward_hopper", lambda *_, config=config: config)
            call_cache.forget()
            outputs = flashproto.attention(*inputs, return_lse=True, impl="hopper")
        found.append([t.detach() for t in outputs])
    call_cache.forget()
    for again in found[1:]:
        for a, b in zip(found[0], again, strict=True):
            assert torch.equal(a, b)
    exact, eager = exact_and_eager(problem, inputs, gradients)
    got = results(tuple(outputs), inputs, gradients)
    assert_within_bound(got, exact, eager, problem.dtype)


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("D", "B", "Hq", "Hkv", "Sq", "Sk", "causal", "W", "kept", "programs"),
    [
        (64, 700, 3, 3, 49, 49, False, 1, 64, 3),
        (64, 3, 9, 9, 735, 735, False, 1, 64, 3),
        (64, 2, 40, 8, 1111, 1111, True, 1, 64, 3),
        (64, 5, 16, 2, 3, 300, True, 1, 64, 3),  # packed
        (64, 2, 30, 30, 2000, 77, False, 1, 64, 3),
        (64, 4, 50, 10, 1000, 1000, False, 4, 0, 1),
        (64, 1, 7, 7, 250, 4097, False, 4, 0, 1),
        (64, 1, 3, 1, 5001, 736, False, 4, 0, 1),
        (128, 1, 9, 3, 300, 2500, False, 2, 96, 1),
        (128, 2, 6, 6, 3001, 3101, True, 2, 96, 1),
        (128, 40, 16, 4, 33, 3100, True, 2, 96, 1),  # packed
        (128, 1, 40, 8, 1031, 2050, False, 3, 0, 1),
        (96, 1, 46, 23, 1150, 6150, True, 3, 0, 1),
        (128, 2, 4, 2, 6161, 6145, True, 3, 0, 1),
    ],
)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_any_number_of_consumers_and_queries_in_registers(
    D: int, B: int, Hq: int, Hkv: int, Sq: int, Sk: int, causal: bool, W: int, kept: int,
    programs: int, dtype: torch.dtype, hopper: None,
) -> None:  # fmt: skip
    """Where rows or heads are such that these are fastest; the same bits every time."""
    config = configs.attention_forward_hopper(D, Sk, Kind(causal), Sq, B * Hkv, Hq // Hkv)
    assert (W, kept, programs) == (config.W, config.KEPT, config.PROGRAMS)
    problem = Problem(dtype, B, Hq, Hkv, Sq, Sk, D, D, causal=causal)
    inputs, gradients = make(problem, "cuda")
    attend = functools.partial(flashproto.attention, causal=causal, return_lse=True, impl="hopper")
    found = [attend(*inputs) for _ in range(3)]
    for again in found[1:]:
        assert all(map(torch.equal, found[0], again))
    exact, eager = exact_and_eager(problem, inputs, gradients)
    got = results(found[-1], inputs, gradients)
    assert_within_bound(got, exact, eager, problem.dtype)


@pytest.mark.gpu
@pytest.mark.parametrize("causal", [False, True])
def test_captures_a_shape_that_never_ran(causal: bool, hopper: None) -> None:
    """Whose order of work no table has yet."""
    seen, q = (torch.randn(1, H, S, 64, device="cuda").bfloat16() for H, S in ((2, 1600), (7, 1800)))
    configurations = {
        configs.attention_forward_hopper(64, x.shape[2], Kind(causal), x.shape[2]) for x in (seen, q)
    }
    assert len(configurations) == 1 and configurations.pop().PLANNED
    flashproto.attention(seen, seen, seen, causal=causal, impl="hopper")  # compiles
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = flashproto.attention(q, q, q, causal=causal, impl="hopper")
    for _ in range(2):
        q.copy_(torch.randn_like(q))
        graph.replay()
        expected = flashproto.attention(q, q, q, causal=causal, impl="hopper")
        assert torch.equal(captured, expected), "another order of work, the same bits"


@pytest.mark.gpu
@pytest.mark.parametrize("D", [64, 128, 256])
@pytest.mark.parametrize("causal", [False, True])
def test_captures_a_backward(causal: bool, D: int, hopper: None) -> None:
    """With its dependent launches, and others of its own right behind."""
    leaves = [torch.randn(2, 9, 1100, D, device="cuda").bfloat16().requires_grad_() for _ in range(3)]
    dout = torch.randn(2, 9, 1100, D, device="cuda").bfloat16()

    def step() -> list[Tensor]:
        out = flashproto.attention(*leaves, causal=causal, impl="hopper")
        first = torch.autograd.grad(out, leaves, dout, retain_graph=True)
        return [a + b for a, b in zip(first, torch.autograd.grad(out, leaves, dout), strict=True)]

    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        step()  # compiles
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = step()
    for _ in range(5):
        for t in (*(x.detach() for x in leaves), dout):
            t.copy_(torch.randn_like(t))
        for t in captured:
            t.fill_(torch.nan)
        graph.replay()
        (dq, dk, dv), (dq_again, dk_again, dv_again) = captured, step()
        assert torch.equal(dk, dk_again) and torch.equal(dv, dv_again)
        assert (dq - dq_again).abs().max() <= 0.02 * dq_again.abs().max()


@pytest.mark.gpu
def test_ten_thousand_launches_on_two_streams(hopper: None, seed: int) -> None:
    shapes = [(1, 4, 2, 130, 200, 64), (2, 8, 8, 512, 512, 64), (1, 8, 1, 300, 1500, 128)]
    shapes += [(1, 2, 2, 70, 5000, 128), (1, 4, 4, 600, 600, 256), (1, 2, 1, 1024, 1024, 96)]
    problems = [
        Problem(dtype, *shape, shape[-1], causal)
        for dtype in (torch.bfloat16, torch.float16)
        for shape in shapes
        for causal in (False, True)
    ]

    def call(problem: Problem, inputs: list[Tensor]) -> tuple[Tensor, Tensor]:
        return flashproto.attention(*inputs, causal=problem.causal, return_lse=True, impl="hopper")

    cases = []
    for problem in problems:
        inputs, gradients = make(problem, "cuda")
        expected = results(call(problem, inputs), inputs, gradients)
        cases.append((problem, inputs, gradients, expected, 0.02 * expected["dq"].abs().max()))
    streams = [torch.cuda.Stream() for _ in range(2)]
    wrong = torch.zeros(2, device="cuda", dtype=torch.int64)
    torch.cuda.synchronize()
    generator = random.Random(seed)
    for i in range(10_000):
        problem, inputs, gradients, expected, tolerance = generator.choice(cases)
        with torch.cuda.stream(streams[i % 2]):
            outputs = call(problem, inputs)
            wrong[i % 2] += (outputs[0] != expected["out"]).sum()
            if i % 16 < 4:
                got = dict(
                    zip(
                        ("dq", "dk", "dv"), torch.autograd.grad(outputs, inputs, gradients), strict=True
                    )
                )
                wrong[i % 2] += sum((got[name] != expected[name]).sum() for name in ("dk", "dv"))
                # dq's sums are in no fixed order
                wrong[i % 2] += ((got["dq"] - expected["dq"]).abs() > tolerance).sum()
    torch.cuda.synchronize()
    assert wrong.tolist() == [0, 0]


@pytest.mark.gpu
@pytest.mark.parametrize("mode", ["aot_eager", "default", "reduce-overhead"])
def test_compiles_in_one_graph(mode: str, hopper: None) -> None:
    torch.compiler.reset()
    problem = Problem(torch.bfloat16, 2, 4, 2, 200, 300, 64, 64, causal=True, strides="packed")
    inputs, gradients = make(problem, "cuda")

    def attend(*inputs: Tensor) -> tuple[Tensor, Tensor]:
        return flashproto.attention(*inputs, causal=True, return_lse=True, impl="hopper")

    options = {"backend": mode} if mode == "aot_eager" else {"mode": mode}
    compiled = torch.compile(attend, fullgraph=True, **options)
    expected = results(attend(*inputs), inputs, gradients)
    for _ in range(4):  # the third call replays a CUDA graph where the mode makes one
        torch.compiler.cudagraph_mark_step_begin()
        got = results(compiled(*inputs), inputs, gradients)
        for name, value in got.items():
            torch.testing.assert_close(value, expected[name], rtol=2.0**-7, atol=1e-4)


@pytest.mark.gpu
@pytest.mark.parametrize("causal", [False, True])
def test_opcheck(causal: bool, hopper: None) -> None:
    problem = Problem(torch.bfloat16, 1, 2, 1, 90, 70, 64, 64, causal)
    inputs, (dout, dlse) = make(problem, "cuda")
    arguments = (*pack(Variant(Kind(causal), -20)), 0.125, "hopper")
    torch.library.opcheck(torch.ops.flashproto.attention_forward.default, (*inputs, *arguments))
    out, lse, *_ = torch.ops.flashproto.attention_forward(*inputs, *arguments)
    saved = [dout, dlse, None, None, *[t.detach() for t in (*inputs, out, lse)]]
    backward = torch.ops.flashproto.attention_backward.default
    # dq differs in its last bits from run to run
    torch.library.opcheck(backward, (*saved, *arguments, [True] * 3), atol=1e-3, rtol=2.0**-6)
