"""The Hopper backend: what it refuses, its configurations and schedules, graphs and compilation."""

from __future__ import annotations

import contextlib
import dataclasses
import random
from collections import Counter
from collections.abc import Iterator
from types import SimpleNamespace

import pytest
import torch
from attention_problem import Problem, assert_within_bound, exact_and_eager, lay_out, make, results
from torch import Tensor

import flashproto
from flashproto import backends, configs
from flashproto.functional.attention import hopper_attention_reasons
from flashproto.kernels.hopper import attention_backward_work as work
from flashproto.ops import attention_hopper

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
    found = hopper_attention_reasons(*REFUSED[reason])
    assert any(reason in text for text in found), found


@pytest.mark.parametrize("strides", ["contiguous", "tokens first", "packed"])
@pytest.mark.parametrize("D", [8, 64, 96, 128, 192, 256])
def test_takes_whatever_tma_takes(D: int, strides: str) -> None:
    q = lay_out(half(2, 3, 5, D), strides)
    assert hopper_attention_reasons(q, q, q) == []
    one = lay_out(half(1, 1, 5, D), "expanded")  # strides of single entries are never used
    assert hopper_attention_reasons(one, one, one) == []


def test_takes_calls_when_asked_for_determinism(deterministic: None) -> None:
    assert hopper_attention_reasons(FITS, FITS, FITS) == []


@pytest.mark.parametrize("dynamic", [False, True])
def test_reasons_are_found_while_compiling(dynamic: bool) -> None:
    def count(q: Tensor) -> Tensor:
        return q + len(hopper_attention_reasons(q, q, q))

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
@pytest.mark.parametrize("Sk", [1, 1024, 4096, 16384])
@pytest.mark.parametrize("causal", [False, True])
def test_forward_configurations_fit(D: int, Sk: int, causal: bool) -> None:
    config = configs.attention_forward_hopper(D, Sk, causal)
    tiles = config.BM + (config.KS + config.VS) * config.BN
    shuffled = 64 * config.D * 2  # one consumer's output on its way to wide stores
    assert tiles * config.D * 2 + shuffled <= SHARED_LIMIT
    assert config.D >= D and config.BM == 64 * config.W
    assert config.PB >= 2 + config.W, "Triton uses the lowest named barriers itself"


@pytest.mark.parametrize(
    ("D", "Sk", "causal", "W", "KS", "VS"),
    [
        (64, 1024, False, 3, 3, 2),
        (64, 1024, True, 2, 4, 4),
        (64, 2048, True, 3, 3, 2),
        (64, 16384, True, 3, 3, 2),
        (128, 1024, False, 2, 2, 2),
        (128, 4096, False, 2, 3, 2),
        (128, 4096, True, 2, 2, 2),
        (128, 16384, True, 2, 2, 2),
        (256, 4096, True, 2, 2, 2),
        (256, 16384, False, 2, 2, 2),
    ],
)
def test_forward_takes_what_was_measured_fastest(D, Sk, causal, W, KS, VS) -> None:
    config = configs.attention_forward_hopper(D, Sk, causal)
    assert (config.W, config.KS, config.VS) == (W, KS, VS)


@pytest.mark.parametrize(("D", "DQ"), [(64, 2), (96, 1), (128, 1), (192, 0), (256, 0)])
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("ordered", [False, True])
@pytest.mark.parametrize("Sk", [1024, 4096, 16384])
def test_backward_configurations(D: int, DQ: int, causal: bool, ordered: bool, Sk: int) -> None:
    config = configs.attention_backward_hopper(D, Sk, causal, ordered)
    assert (DQ, ordered) == (config.DQ, config.ORDERED)
    assert (config.DOWN and config.FIRST) or not ordered
    queries, keys = 4 * config.BM * config.D, 2 * config.KV * config.BN * config.D
    halves = queries + keys + config.TILES * config.BN * config.BM
    parts = {0: 0, 1: 2, 2: 1}[config.DQ] * 128 * 32 * 4
    assert halves * 2 + parts + 4 * config.BM * 4 <= SHARED_LIMIT


@pytest.mark.parametrize(
    "shape", [(8, 2, 1024, 1024), (2, 2, 300, 70), (16, 16, 4096, 4096), (7, 3, 5, 900)]
)
def test_plan_holds_every_item_once_and_is_balanced(shape: tuple[int, int, int, int]) -> None:
    heads, together, Sq, Sk = shape
    config = configs.attention_forward_hopper(128, Sk, True)
    programs = 132
    plan = configs.balanced_plan(config, heads, together, Sq, Sk, Sk - Sq, programs)
    tiles = -(-Sq // config.BM)
    assert Counter(item for own in plan for item in own) == Counter(range(tiles * heads))
    if tiles * heads > 3 * programs:
        assert max(map(len, plan)) <= 2 * tiles * heads / programs + 1


@pytest.mark.parametrize("capturing", [False, True])
@pytest.mark.parametrize(("heads", "Sq", "programs"), [(1, 64, 1), (3, 300, 9), (16, 4096, 132)])
def test_table_holds_every_item_once(
    heads: int, Sq: int, programs: int, capturing: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: capturing)
    monkeypatch.setattr(attention_hopper, "_tables", {})
    config = configs.attention_forward_hopper(128, Sq, True)
    arguments = (config, heads, 1, Sq, Sq, 0, programs, torch.device("cpu"))
    table = attention_hopper.order_on_device(*arguments)
    total = heads * -(-Sq // config.BM)
    assert table.dtype == torch.int32
    assert table.is_contiguous()
    assert Counter(table[table < total].tolist()) == Counter(range(total))
    for column in table.T.tolist():
        first = column.index(total)
        assert set(column[first:]) == {total}, "a program stops at the first end that it meets"
    assert (attention_hopper.order_on_device(*arguments) is table) == (not capturing)


def test_heads_together_split_evenly() -> None:
    config = configs.attention_forward_hopper(128, 4096, True)
    for heads in (1, 7, 16, 48):
        together = configs.heads_together_forward(config, 1, heads, heads, 4096)
        assert 1 <= together <= heads
    for ordered in (False, True):
        for causal in (False, True):
            backward = configs.attention_backward_hopper(128, 4096, causal, ordered)
            assert configs.heads_together_backward(backward, 1, 64, 8, 4096, 4096, 132) <= 8
            for heads in (1, 7, 8, 16, 48, 256):
                for Sk in (100, 1024, 4096, 16384):
                    together = configs.heads_together_backward(backward, 1, heads, heads, Sk, Sk, 132)
                    assert 1 <= together <= heads
                    if heads in (8, 16, 256):
                        assert heads % together == 0, "no short last group"


def producer_walk(config: configs.HopperBackward, b: int, hk: int, m0: int, H: int, M: int, GROUP: int):
    """(query head, query tile) as the producer's device code steps through them."""
    h, m = hk * GROUP, work.first_tile.fn(m0, M, config)
    for _ in range((M - m0) * GROUP):
        yield h, m
        h, m = work.next_tile.fn(h, m, hk * GROUP, m0, GROUP, M, config)


def consumer_walk(config: configs.HopperBackward, b: int, hk: int, m0: int, H: int, M: int, GROUP: int):
    """(number of the query tile, dist) as the consumers' device code steps through them."""
    tile = (b * H + hk * GROUP) * M + work.first_tile.fn(m0, M, config)
    low, high = m0 * config.BM, M * config.BM
    dist = high - config.BM
    outer, begin, end = work.loops.fn(low, high, m0, M, GROUP, config)
    for _ in range(outer):
        for index in range(begin, end, config.STEP):
            yield tile, work.distance.fn(index, dist, config)
            tile = work.inner_step.fn(tile, M, config)
        tile, dist = work.outer_step.fn(tile, dist, m0, M, GROUP, config)


@pytest.mark.parametrize("GROUP", [1, 3])
@pytest.mark.parametrize("down", [False, True])
def test_backward_walks(down: bool, GROUP: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Producer and consumers take the same way; downwards, what a key tile visits is the beginning of
    what the one before it visits."""
    monkeypatch.setattr(work, "gl", SimpleNamespace(where=lambda c, x, y: x if c else y))
    monkeypatch.setattr(work, "hidden_zero", lambda: 0)
    config = dataclasses.replace(configs.attention_backward_hopper(128, 4096, True), DOWN=down)
    b, H, M = 1, 2 * GROUP, 7
    longer = None
    for m0 in (0, 0, 2, 4, 6):
        walk = list(producer_walk(config, b, 1, m0, H, M, GROUP))
        tiles = [((b * H + h) * M + m, m * config.BM) for h, m in walk]
        assert tiles == list(consumer_walk(config, b, 1, m0, H, M, GROUP))
        heads = range(GROUP, 2 * GROUP)
        assert Counter(walk) == Counter((h, m) for h in heads for m in range(m0, M))
        if down and longer is not None:
            assert longer[: len(walk)] == walk
        longer = walk


@pytest.mark.parametrize("ordered", [False, True])
@pytest.mark.parametrize("causal", [False, True])
def test_backward_items(causal: bool, ordered: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each key tile of each head once, none empty, and the lower ones of a head first."""
    functions = {"minimum": min, "maximum": max, "where": lambda c, x, y: x if c else y}
    monkeypatch.setattr(work, "gl", SimpleNamespace(**functions))
    config = configs.attention_backward_hopper(128, 4096, causal, ordered)
    monkeypatch.setattr(work, "query_tiles", lambda col, Sq, offset, BM, masked: (
        min(max(col - offset, 0), Sq) // BM if masked else 0, Sq // BM
    ))  # fmt: skip
    NB, M, Hk, B = 5, 4, 3, 2
    for together in (1, 2, 4, 6):
        for offset in (0, 384, -100):
            items = [
                work.key_tile.fn(t, NB, M, Hk, B * Hk, together, offset, config)
                for t in range(NB * B * Hk)
            ]
            wanted = [(b, h, n * config.BN) for b in range(B) for h in range(Hk) for n in range(NB)]
            assert Counter(item[:3] for item in items) == Counter(wanted)
            assert all(0 <= m0 < M for *_, m0 in items)
            for b in range(B):
                for h in range(Hk):
                    assert [item[2] for item in items if item[:2] == (b, h)] == [
                        n * config.BN for n in range(NB)
                    ]


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


@pytest.mark.gpu
@pytest.mark.parametrize("shape", ORDERED_SHAPES)
@pytest.mark.parametrize("D", [64, 96, 128, 256])
@pytest.mark.parametrize("causal", [False, True])
def test_deterministic_backward_gives_the_same_bits_100_times(
    shape: tuple[int, ...], D: int, causal: bool, hopper: None
) -> None:
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
    found = []
    for i in range(30):
        with torch.cuda.stream(streams[i % 3]):
            grads = torch.autograd.grad(outputs, inputs, gradients, retain_graph=True)
            found.append(sum((a != b).sum() for a, b in zip(grads, expected, strict=True)))
    torch.cuda.synchronize()
    assert sum(x.item() for x in found) == 0


@pytest.mark.gpu
def test_captures_a_causal_shape_that_never_ran(hopper: None) -> None:
    seen, q = (torch.randn(1, H, S, 64, device="cuda").bfloat16() for H, S in ((2, 128), (7, 8191)))
    flashproto.attention(seen, seen, seen, causal=True, impl="hopper")  # compiles
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = flashproto.attention(q, q, q, causal=True, impl="hopper")
    for _ in range(2):
        q.copy_(torch.randn_like(q))
        graph.replay()
        expected = flashproto.attention(q, q, q, causal=True, impl="hopper")
        assert torch.equal(captured, expected), "another order of work, the same bits"


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
    arguments = (causal, -20, 0.125, "hopper")
    torch.library.opcheck(torch.ops.flashproto.attention_forward.default, (*inputs, *arguments))
    out, lse = torch.ops.flashproto.attention_forward(*inputs, *arguments)
    saved = [t.detach() for t in (*inputs, out, lse, dout, dlse)]
    backward = torch.ops.flashproto.attention_backward.default
    # dq differs in its last bits from run to run
    torch.library.opcheck(backward, (*saved, *arguments, True, True), atol=1e-3, rtol=2.0**-6)
