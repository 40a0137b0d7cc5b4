"""Query heads of a key head packed into one work item of the Hopper forward kernel."""

from __future__ import annotations

import itertools
import random
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, replace
from types import SimpleNamespace

import pytest
import torch
from attention_problem import Problem, assert_within_bound, eager, make, results
from schedule_on_the_host import ranges_on_the_host
from torch import Tensor

import flashproto
from flashproto import configs, reference
from flashproto.configs import hopper_forward as hopper_configs
from flashproto.kernels import schedule
from flashproto.kernels.hopper import attention_forward_work as work
from flashproto.ops import attention as ops
from flashproto.ops import attention_hopper, recipe
from flashproto.variant import Kind, Variant

FULL, CAUSAL = Kind(), Kind(CAUSAL=True)

MULTIPROCESSORS = 132
SHARED_LIMIT = 227 * 1024
WHOLE = 0  # keys that a query tile sees: so few that they are not split


# --- configurations ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("Sq", "heads", "group", "PACK", "W"),
    [
        (1, 8, 1, 1, 1),  # 64 rows or fewer: one consumer
        (64, 512, 1, 1, 1),
        (65, 512, 1, 1, 2),
        (1, 8, 4, 4, 1),
        (16, 512, 4, 4, 1),
        (17, 512, 4, 4, 2),
        (17, 8, 4, 4, 1),  # rows for 16 multiprocessors: two consumers would leave half of them
        (64, 512, 4, 4, 2),
        (96, 512, 4, 4, 2),
        (120, 512, 4, 1, 2),  # as many items as unpacked
        (128, 512, 8, 1, 2),
        (4096, 8, 8, 1, 2),
        (1025, 8, 8, 1, 3),  # 65 items for 72: not worth another kernel
        (1, 512, 7, 8, 1),  # padded
        (96, 512, 5, 1, 2),  # the padding costs more than it gains
        (1, 2, 64, 64, 1),
        (1, 2, 71, 1, 1),  # more than the rows of a consumer
    ],
)
def test_packs_where_that_leaves_fewer_work_items(
    Sq: int, heads: int, group: int, PACK: int, W: int
) -> None:
    config = configs.attention_forward_hopper(128, 8192, FULL, Sq, heads, group, MULTIPROCESSORS, WHOLE)
    assert (config.PACK, config.W) == (PACK, W)


@pytest.mark.parametrize(
    ("Sq", "group", "PACK", "W"),
    [
        (4, 16, 16, 1),
        (40, 8, 8, 2),
        (24, 9, 16, 1),  # two consumers would have more stack than is allowed
        (40, 16, 16, 1),
        (40, 32, 32, 1),
        (40, 33, 64, 2),
        (56, 16, 16, 1),
        (60, 16, 1, 1),  # as many items as unpacked
        (65, 16, 1, 2),
    ],
)
@pytest.mark.parametrize("causal", [False, True])
def test_many_heads_packed_at_head_dim_256_take_one_consumer(
    Sq: int, group: int, PACK: int, W: int, causal: bool
) -> None:
    config = configs.attention_forward_hopper(256, 8192, Kind(causal), Sq, 512, group, MULTIPROCESSORS)
    assert (config.PACK, config.W) == (PACK, W)


@pytest.mark.parametrize("D", [64, 128, 256])
@pytest.mark.parametrize("causal", [False, True])
def test_packed_work_items_never_take_more_rounds(D: int, causal: bool) -> None:
    """All of them take as long as their keys are many; of one consumer less, alone in one round."""
    for Sq, heads, group, Sk in itertools.product(
        (1, 5, 16, 33, 64, 100, 200, 1000), (1, 8, 100, 512), (1, 2, 3, 4, 7, 8, 16, 64), (512, 8192)
    ):
        config = configs.attention_forward_hopper(
            D, Sk, Kind(causal), Sq, heads, group, MULTIPROCESSORS, WHOLE
        )
        usual = configs.attention_forward_hopper(D, Sk, Kind(causal), 4096, 64)
        assert usual.PACK == 1
        items = heads * -(-Sq // config.BQ) * (group if config.PACK == 1 else 1)
        unpacked = heads * -(-Sq // usual.BM) * group
        assert config.PACK in (1, 1 << (group - 1).bit_length())
        assert config.CQ * config.PACK == 64
        three = D == 128 and config.W == 3
        if three:
            assert usual.W == 2 and config.PACK == 1 and Sk == 8192
        elif (config.W, config.PROGRAMS) != (usual.W, usual.PROGRAMS):
            alone = D == 256 and config.PACK in (16, 32)
            assert config.W == config.PROGRAMS == usual.PROGRAMS == 1
            assert alone or Sq * config.PACK <= 64 or items <= MULTIPROCESSORS
        else:
            assert replace(config, PACK=1, IDLE=False) == usual
        rounds, usual_rounds = (-(-n // MULTIPROCESSORS) for n in (items, unpacked))
        if three and causal:
            rounds, usual_rounds = items, unpacked
        assert rounds * (192 * 0.97 if three else 1) <= usual_rounds * (128 if three else 1)
        tiles = config.BM + (config.KS + config.VS) * config.BN
        assert (tiles + 64) * config.D * 2 * config.PROGRAMS <= SHARED_LIMIT
        assert config.PB >= 2 + config.W, "Triton uses the lowest named barriers itself"


# --- which rows hold what ------------------------------------------------------------------------


@pytest.fixture
def on_the_host(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let device code of rows and work items run as Python."""
    functions = {
        "minimum": min,
        "maximum": max,
        "arange": lambda first, end, layout: torch.arange(first, end),
        "where": torch.where,
    }
    monkeypatch.setattr(work, "gl", SimpleNamespace(**functions))
    monkeypatch.setattr(work, "opaque_zero", lambda: 0)
    monkeypatch.setattr(work, "quotient", lambda a, b: a // b)

    ranges_on_the_host(monkeypatch)
    monkeypatch.setattr(work, "key_ranges", schedule.key_ranges.fn)


def box(q: Tensor, corner: tuple[int, ...], shape: tuple[int, ...]) -> Tensor:
    """What TMA reads of q: zeros past the ends."""
    read = q.new_zeros(shape)
    inside = q[tuple(slice(at, at + n) for at, n in zip(corner, shape, strict=True))]
    read[tuple(slice(n) for n in inside.shape)] = inside
    return read


@pytest.mark.parametrize(("causal", "idle"), [(False, False), (True, False), (False, True)])
@pytest.mark.parametrize("group", [2, 3, 8, 64])
@pytest.mark.parametrize(("W", "Sq"), [(1, 1), (2, 5), (2, 33), (3, 70)])
def test_rows_are_queries_and_heads(
    W: int, Sq: int, group: int, causal: bool, idle: bool, on_the_host
) -> None:
    """Each query of each head is in one row of one work item, the row that TMA brings it to; a row
    visits all keys that its query sees."""
    B, Hkv, D, Sk, offset, together = 2, 3, 8, 300, 17, 2
    config = configs.attention_forward_hopper(64, Sk, Kind(causal))
    config = replace(config, W=W, PACK=1 << (group - 1).bit_length(), IDLE=idle)
    q = torch.randn(B, Hkv * group, Sq, D)
    boxed = q.unflatten(1, (Hkv, group)).transpose(2, 3)  # [B, Hkv, Sq, group, D]
    tiles = -(-Sq // config.BQ)
    found: Counter[tuple[int, int, int]] = Counter()
    for t in range(tiles * B * Hkv):
        item = work.tile_of.fn(t, tiles, Hkv, B * Hkv, together, None, Sk, offset, (), config)
        b, h, row0, n, _ = item
        for c in range(W):
            row = row0 + config.CQ * c
            queries = work.query_of_row.fn(row, None, config)
            heads = work.head_of_row.fn(h, group, None, config)
            ends = work.end_of_row.fn(group, Sq, None, config)
            loaded = box(boxed, (b, h, row, 0, 0), (1, 1, config.CQ, config.PACK, D)).reshape(64, D)
            for r in torch.nonzero(queries < ends).flatten().tolist():
                head, query = int(heads[r]), int(queries[r])
                assert torch.equal(loaded[r], q[b, head, query])
                assert n * config.BN >= (min(query + offset + 1, Sk) if causal else Sk)
                found[b, head, query] += 1
    assert found == Counter(itertools.product(range(B), range(Hkv * group), range(Sq)))


@pytest.mark.parametrize(("D", "causal"), [(64, False), (64, True), (128, True)])
@pytest.mark.parametrize(("Sq", "Sk"), [(70, 1000), (800, 800), (1088, 1500), (1600, 1024)])
def test_plan_knows_what_items_cost(D: int, causal: bool, Sq: int, Sk: int, on_the_host) -> None:
    """Items of a number are the same for balanced_work and the kernel."""
    heads, together = 5, 2
    config = configs.attention_forward_hopper(D, Sk, Kind(causal), Sq)
    assert config.HAS_WORK_TABLE and causal != config.IDLE
    costs = hopper_configs.item_costs(config, Sq, Sk, Sk - Sq)
    numbered = iter(range(heads * len(costs)))
    for first in range(0, heads, together):
        for cost in costs:
            for head in range(first, min(first + together, heads)):
                t, offset = next(numbered), Sk - Sq if causal else Sk
                _, h, row, n, _ = work.tile_of.fn(
                    t, len(costs), heads, heads, together, None, Sk, offset, (), config
                )
                assert h == head and 0 <= row < Sq
                active = sum(row + 64 * c < Sq for c in range(config.W))
                assert cost == (n + 1) * (1 if causal else hopper_configs.IDLE_SHARES[active])


# --- launches ------------------------------------------------------------------------------------

Planned = Callable[[Tensor, Tensor, bool], recipe.Launch]


@pytest.fixture
def planned(monkeypatch: pytest.MonkeyPatch) -> Planned:
    """The forward's launch for given q and k, also v."""
    monkeypatch.setattr(attention_hopper, "multiprocessors", lambda device: MULTIPROCESSORS)

    def plan(q: Tensor, k: Tensor, causal: bool) -> recipe.Launch:
        variant = Variant(Kind(causal), k.shape[2] - q.shape[2])
        made = recipe.Recipe(q.device)
        operands = [made.input(x) for x in (q, k, k)]
        settings = ops.Settings(Variant().form, 0.125, "hopper")
        out, lse = map(made.make, ops.makes(settings, *operands)[:2])
        attention_hopper.forward(made, *operands, out, lse, variant, 0.125)
        (launch,) = [step for step in made.steps if isinstance(step, recipe.Launch)]
        return launch

    return plan


@pytest.mark.parametrize("causal", [False, True])
def test_launch_of_packed_heads(causal: bool, planned: Planned) -> None:
    B, Hq, Hkv, Sq, Sk, D = 20, 24, 8, 60, 700, 96
    group = Hq // Hkv
    qkv = torch.empty(B, Sq, 3, Hq, D, dtype=torch.bfloat16)
    q, k = qkv[:, :, 1].transpose(1, 2), torch.empty(B, Hkv, Sk, D, dtype=torch.bfloat16)
    launch = planned(q, k, causal)
    given, config = launch.arguments, launch.arguments["CFG"]
    assert (config.PACK, config.W, config.BQ) == (4, 2, 32)
    assert launch.programs == MULTIPROCESSORS
    counts = [given[name] for name in ("total", "NT", "H", "GROUP", "BH")]
    assert counts == [2 * B * Hkv, 2, Hkv, group, B * Hkv]
    assert given["HG"] == configs.heads_together_forward(config, B, Hq, Hkv, Sk) <= B * Hkv
    box = given["q_desc"].tma_descriptors.first
    assert tuple(box.block_shape) == (1, 1, 16, 4, 128)
    view = torch.as_strided(qkv, tuple(box.shape), tuple(box.strides), q.storage_offset())
    expected = q.unflatten(1, (Hkv, group)).transpose(2, 3)
    assert (view.shape, view.stride()) == (expected.shape, expected.stride())


def test_launch_of_many_queries_is_not_packed(planned: Planned) -> None:
    q, k = (torch.empty(2, H, 1024, 128, dtype=torch.bfloat16) for H in (8, 2))
    given = planned(q, k, True).arguments
    assert given["CFG"] == configs.attention_forward_hopper(128, 1024, CAUSAL)
    counts = [given[name] for name in ("total", "NT", "H", "GROUP", "BH")]
    assert counts == [8 * 16, 8, 8, 4, 16]
    assert len(given["q_desc"].tma_descriptors.first.shape) == 4


def test_launch_where_consumers_sit_out(planned: Planned) -> None:
    """The order of work is a table of int32, kept for the shape; elsewhere none is made."""
    for S, idle in ((1088, True), (960, False)):
        q = torch.empty(2, 6, S, 64, dtype=torch.bfloat16)
        given = planned(q, q, False).arguments
        assert given["CFG"] == configs.attention_forward_hopper(64, S, FULL, S)
        assert idle == given["CFG"].IDLE
        assert isinstance(given["work_table"], recipe.Table) == idle
        tiles = -(-S // 192)
        names = ("total", "NT", "H", "GROUP", "BH", "HG", "Sq", "Sk", "offset")
        assert [given[name] for name in names] == [12 * tiles, tiles, 6, 1, 12, 12, S, S, S]


@pytest.mark.parametrize(("together", "Sq"), [(1, 33), (3, 64), (5, 1)])
def test_plan_holds_every_packed_item_once(together: int, Sq: int) -> None:
    config = configs.attention_forward_hopper(128, 900, CAUSAL, Sq, 20, 8, MULTIPROCESSORS)
    assert config.PACK == 8
    plan = configs.balanced_work(config, 20, together, Sq, 900, 900 - Sq, MULTIPROCESSORS)
    items = Counter(item for own in plan for item in own)
    assert items == Counter(range(20 * -(-Sq // config.BQ)))


# --- on the device -------------------------------------------------------------------------------


@dataclass(frozen=True)
class Aligned(Problem):
    """A problem whose causal mask is aligned top-left where Problem's is bottom-right."""

    top_left: bool = False

    @property
    def offset(self) -> int:
        return 0 if self.top_left else self.Sk - self.Sq


def draw(generator: random.Random) -> Aligned:
    group = generator.choice((1, 2, 3, 4, 5, 8, 16, 64))
    Hkv = generator.choice((1, 2, 3))
    D = generator.choice((64, 96, 128, 256))
    most = 4096 if group <= 16 else 512
    return Aligned(
        dtype=generator.choice((torch.float16, torch.bfloat16)),
        B=generator.choice((1, 2, 40)) if most == 4096 and generator.random() < 0.3 else 1,
        Hq=Hkv * group,
        Hkv=Hkv,
        Sq=generator.randint(1, 96),
        Sk=generator.choice((generator.randint(1, 200), generator.randint(1, most))),
        D=D,
        Dv=D,
        causal=generator.random() < 0.6,
        strides=generator.choice(("contiguous", "tokens first", "packed")),
        top_left=generator.random() < 0.5,
    )


def check(problem: Aligned) -> dict[str, Tensor]:
    """Forward and backward within the bound; returns what was found."""
    inputs, gradients = make(problem, "cuda")
    scale = problem.D**-0.5
    doubled = [t.detach().double().requires_grad_() for t in inputs]
    exact = reference.attention(*doubled, causal=problem.causal, causal_offset=problem.offset)
    plain = [t.detach().requires_grad_() for t in inputs]
    form = Variant(Kind(problem.causal), problem.offset).form
    outputs = ops.attention(inputs, ops.Settings(form, scale, "hopper"), (0, 1))
    got = results(outputs, inputs, gradients)
    assert_within_bound(
        got,
        results(exact, doubled, gradients),
        results(eager(*plain, problem), plain, gradients),
        problem.dtype,
    )
    return got


@pytest.mark.gpu
@pytest.mark.parametrize("case", range(100))
def test_few_queries_against_float64(case: int, seed: int, hopper: None) -> None:
    check(draw(random.Random(f"{seed} {case}")))


@pytest.mark.gpu
@pytest.mark.parametrize("D", [64, 128, 256])
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("Sq", [1, 16, 40])
def test_a_row_has_the_same_bits_in_any_batch(D: int, causal: bool, Sq: int, hopper: None) -> None:
    """Few sequences and many take different configurations; beside NaN too."""
    shapes = (70, 8, Sq, D), (70, 2, 777, D), (70, 2, 777, D)
    inputs = [torch.randn(shape, device="cuda").bfloat16() for shape in shapes]
    out, lse = flashproto.attention(*inputs, causal=causal, return_lse=True, impl="hopper")
    for n in (1, 20):
        few = [t[:n] for t in inputs]
        same, same_lse = flashproto.attention(*few, causal=causal, return_lse=True, impl="hopper")
        assert torch.equal(same, out[:n]) and torch.equal(same_lse, lse[:n])
    inputs[0][:, 1::2, Sq // 2] = float("nan")
    beside, beside_lse = flashproto.attention(*inputs, causal=causal, return_lse=True, impl="hopper")
    wrong = torch.zeros(8, Sq, dtype=torch.bool, device="cuda")
    wrong[1::2, Sq // 2] = True
    assert beside[:, wrong].isnan().all() and beside_lse[:, wrong].isnan().all()
    assert torch.equal(beside[:, ~wrong], out[:, ~wrong])
    assert torch.equal(beside_lse[:, ~wrong], lse[:, ~wrong])


@pytest.mark.gpu
@pytest.mark.parametrize("causal", [False, True])
def test_packed_heads_of_a_fused_projection_in_a_graph(causal: bool, hopper: None) -> None:
    Hq, Hkv, D = 16, 4, 128
    qkv = torch.randn(3, 21, (Hq + 2 * Hkv) * D, device="cuda").bfloat16()

    def call() -> Tensor:
        return flashproto.attention_qkv(qkv, Hq, Hkv, causal=causal, impl="hopper")

    call()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = call()
    for _ in range(3):
        qkv.copy_(torch.randn_like(qkv))
        graph.replay()
        q, k, v = (
            t.unflatten(-1, (-1, D)).transpose(1, 2) for t in qkv.split([Hq * D, Hkv * D, Hkv * D], -1)
        )
        expected = flashproto.attention(q, k, v, causal=causal, impl="hopper")
        assert torch.equal(captured, expected)


# --- windows -----------------------------------------------------------------------------------------


def test_short_windows_pack_the_heads_of_a_group() -> None:
    kind = Kind(CAUSAL=True, WINDOW=True)

    def chosen(D: int = 64, group: int = 8, left: int = 127, Sq: int = 4096, **fields: bool) -> int:
        given = D, 4096, replace(kind, **fields), Sq, 8, group
        return configs.attention_forward_hopper(*given, left=left).PACK

    assert chosen() == chosen(SINKS=True) == chosen(left=1023) == chosen(group=7) == 8
    assert chosen(group=2) == 2
    for others in ({"D": 128}, {"group": 1}, {"group": 5}, {"left": 1024}, {"Sq": 64}):
        assert chosen(**others) == 1
    for field in ("ALIBI", "SOFTCAP", "FIRST", "INTERVALS", "VARLEN", "MAX_SCORE"):
        assert chosen(**{field: True}) == 1


@pytest.mark.gpu
@pytest.mark.parametrize(("Hq", "Hkv"), [(16, 2), (14, 2), (4, 2)])
@pytest.mark.parametrize(("Sq", "Sk"), [(1000, 1000), (130, 700), (700, 300)])
@pytest.mark.parametrize("left", [0, 5, 127, 1023])
@pytest.mark.parametrize("with_sinks", [False, True])
def test_packed_windows_follow_the_definition(
    with_sinks: bool, left: int, Sq: int, Sk: int, Hq: int, Hkv: int, hopper: None
) -> None:
    q, dout = (torch.randn(2, Hq, Sq, 64, device="cuda", dtype=torch.bfloat16) for _ in "qo")
    k, v = (torch.randn(2, Hkv, Sk, 64, device="cuda", dtype=torch.bfloat16) for _ in "kv")
    sinks = torch.randn(Hq, device="cuda") if with_sinks else None
    found = []
    for impl, kind in (("hopper", torch.bfloat16), ("reference", torch.float64)):
        given = [x.to(kind).requires_grad_() for x in (q, k, v)]
        own = None if sinks is None else sinks.to(torch.float32 if impl == "hopper" else kind)
        out, lse = flashproto.attention(
            *given, causal=True, window=(left, 0), sinks=own, return_lse=True, impl=impl
        )
        found.append((out, lse, *torch.autograd.grad(out, given, dout.to(kind))))
    for got, want in zip(*found, strict=True):
        torch.testing.assert_close(got.double(), want.double(), rtol=2e-2, atol=3e-2)
