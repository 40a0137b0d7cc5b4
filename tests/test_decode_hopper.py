"""Attention with a cache on the Hopper kernels."""

from __future__ import annotations

import random
from dataclasses import replace
from typing import Any

import pytest
import torch
from decode_problem import Problem, Sequences, draw, next_call, play
from rows import poison
from test_decode import reference_of

import flashproto
from flashproto import backends
from flashproto.variant import Kind

pytest.importorskip("triton")

from flashproto.kernels.hopper.attention_cache_slots import cache_slots_kernel
from flashproto.kernels.scores import Given
from flashproto.ops.attention_hopper_reasons import hopper_cache_reasons

# --- slots -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("ragged", [False, True])
@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize(
    "kind", [Kind(), Kind(CAUSAL=True), Kind(CAUSAL=True, WINDOW=True)], ids=lambda kind: kind.name
)
def test_slots_come_longest_first(
    kind: Kind, padded: bool, ragged: bool, seed: int, device: str
) -> None:
    """Each tile of each sequence's queries once, with what its sequence is, and as many key tiles as
    lie between the first and the last key that one of its queries sees."""
    generator = random.Random(seed)
    BM, BN, left, B, room, offset = 16, 32, 70, 4, 400, generator.choice((0, 0, -3))
    queries = [generator.choice((0, 1, 40)) for _ in range(B)] if ragged else [37] * B
    held = [generator.choice((0, 1, 100, 300)) for _ in range(B)]
    first = [generator.randrange(n + 2) if padded else 0 for n in held]
    index = generator.sample(range(9), B)
    behind = generator.choice((0, 20)) if ragged else 0
    new = generator.choice((0, 1))
    keys = [n + new * m for n, m in zip(held, queries, strict=True)]

    def ints(x: list[int]) -> torch.Tensor:
        return torch.tensor(x, dtype=torch.int32, device=device)

    cu = ints([0, *queries]).cumsum(0).int() if ragged else None
    tokens = sum(queries) + behind if ragged else 37
    slots = tokens // BM + B + 1 if ragged else B * -(-37 // BM)
    rolls = kind.WINDOW
    ordered = torch.full((1 + slots, 8), -7, dtype=torch.int32, device=device)
    cache_slots_kernel[(slots,)](
        ordered,
        ints(held),
        cu,
        ints(index),
        ints(first) if padded else None,
        B,
        tokens,
        new if ragged else 37 * new,
        room,
        offset,
        slots,
        Given(left=left if kind.WINDOW else None),
        BLOCK=4,
        BLOCK_M=BM,
        BLOCK_N=BN,
        KIND=kind,
        ROLLS=rolls,
    )
    wanted, token = [], 0
    all_of = [*zip(queries, keys, first, index, range(B), strict=True), (behind, 0, 0, 0, 0)]
    for Sq, Sk, low, row, b in all_of:
        for i0 in range(0, Sq, BM):
            diagonal = offset + Sk - Sq
            end = -(-max(min(Sk, i0 + BM + diagonal) if kind.CAUSAL else Sk, 0) // BN)
            begin = min(max(i0 + diagonal - left, 0), Sk) // BN if kind.WINDOW else 0
            tiles = max(end - max(min(begin, end), low // BN), 1)
            wanted.append((tiles, i0, token, Sq, row, Sk, 0 if ragged else b, low))
        token += Sq if ragged else 0
    count = int(ordered[0, 0])
    found = [tuple(x) for x in ordered[1:].tolist()]
    assert sorted(found[:count]) == sorted(wanted)
    tiles = [x[0] for x in found]
    assert tiles == sorted(tiles, reverse=True) and not any(tiles[count:])


# --- results -----------------------------------------------------------------------------------------


def drawn(generator: random.Random, most: int = 900) -> Problem:
    """A random one that these kernels take; many new tokens at first, then few."""
    p = draw(generator, most, 16, (64,))
    D = generator.choice((64, 64, 128, 128, 128, 256, 40, 96))
    page = generator.choice((0, 0, 16, 16, 32, 64, 128, 256))
    size = max(page, 128)
    room = -(-p.room // size) * size
    return replace(
        p,
        dtype=generator.choice((torch.bfloat16, torch.float16)),
        D=D,
        Dv=D,
        page=page,
        room=room,
        eight=0,
        prefix=0,
        options=p.options | ({} if p.options["scale"] is None else {"scale": 0.5 * D**-0.5}),
    )


@pytest.mark.gpu
@pytest.mark.parametrize("index", range(120))
def test_the_kernels_follow_the_definition(index: int, hopper: None, seed: int, monkeypatch) -> None:
    poison(monkeypatch)
    generator = random.Random(seed)
    play(drawn(generator), "cuda", generator, "hopper")


@pytest.mark.gpu
@pytest.mark.gib(8)
@pytest.mark.parametrize("page", [0, 16, 64])
@pytest.mark.parametrize("ragged", [False, True])
@pytest.mark.parametrize("D", [64, 128, 256])
def test_parts_of_long_sequences(
    D: int, ragged: bool, page: int, hopper: None, seed: int, monkeypatch
) -> None:
    """A few heads, whose keys are split; some sequences are short or have no token."""
    poison(monkeypatch)
    counts = ((9000, 700), (512, 40), (70, 70)) if ragged else ((5000, 5000), (512, 512), (64, 64))
    options: dict[str, Any] = {"causal": True, "scale": None, "sinks": True}
    p = Problem(
        torch.bfloat16, 2, 4, 1, D, D, 16384, page, counts, ragged=ragged, padded=True, options=options
    )
    play(p, "cuda", random.Random(seed), "hopper")


@pytest.mark.gpu
@pytest.mark.parametrize("page", [0, 16, 128])
@pytest.mark.parametrize("queries", [1, 16, 200])
@pytest.mark.parametrize("window", [None, (300, None)], ids=str)
def test_one_graph_serves_all_lengths(
    window: Any, queries: int, page: int, hopper: None, seed: int
) -> None:
    generator = random.Random(seed)
    options: dict[str, Any] = {"causal": True, "scale": None} | ({"window": window} if window else {})
    counts = ((queries,) * 3,) * 2
    p = Problem(torch.bfloat16, 3, 8, 2, 128, 128, 2048, page, counts, rope="halves", options=options)
    state = Sequences(p, "cuda", generator)
    made = next_call(state, counts[0])
    lengths = state.options["lengths"]
    options = state.options | {"lengths": lengths, "k": made.k, "v": made.v, "return_lse": True}

    def call() -> Any:
        return flashproto.attention_with_kv_cache(made.q, *state.caches, **options, impl="hopper")

    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        replayed = call()
    for x in state.caches:
        x.normal_()
    most = p.room - queries
    for _ in range(12):
        wanted = [generator.choice((0, 1, 63, 64, generator.randrange(most), most)) for _ in range(3)]
        lengths.copy_(torch.tensor(wanted))
        for x in (made.q, made.k, made.v):
            x.normal_()
        graph.replay()
        got = [x.clone() for x in replayed]
        for x, want in zip(got, reference_of(made, state, options), strict=True):
            torch.testing.assert_close(x.double(), want.double(), rtol=2e-2, atol=2e-2)


def test_reasons() -> None:
    def against(page: int = 0, slots: int = 1024, rolls: bool = False, **others: Any) -> list[str]:
        q = torch.empty(*others.get("q", (2, 8, 64, 64)), dtype=torch.bfloat16, device="meta")
        cache = torch.empty(2, page or slots, 2, 64, dtype=others.get("dtype", q.dtype), device="meta")
        table = torch.empty(2, 4, dtype=torch.int32, device="meta") if page else None
        any_of, prefix, n = (others.get(x, False) for x in ("any_of", "prefix", "sequences"))
        reasons = hopper_cache_reasons(q, cache, table, n or len(q), prefix, rolls, any_of)
        return backends.texts(reasons)

    assert against() == against(16) == against(256) == against(16, rolls=True) == []
    assert against(rolls=True, slots=1000) == [
        "the cache rolls in 1000 slots; the kernels take multiples of 128"
    ]
    assert against(24) == ["page_size is 24; the kernels take powers of 2 from 16 on"]
    assert against(8) == ["page_size is 8; the kernels take powers of 2 from 16 on"]
    assert against(prefix=True) == ["it takes no prefix"]
    (why,) = against(dtype=torch.float8_e4m3fn)
    assert "one dtype" in why
    # Where nothing is asked for, many rows of a key head are taken, or many key heads.
    assert against(any_of=True) == against(any_of=True, q=(64, 8, 1, 64)) == []
    assert against(any_of=True, q=(1, 8, 700, 64), sequences=40) == []
    (why,) = against(any_of=True, q=(2, 8, 16, 64))
    assert why.startswith("64 query rows of each of 4 key heads are few")
    (why,) = against(any_of=True, q=(1, 8, 400, 64), sequences=40)
    assert why.startswith("40 query rows of each of 80 key heads are few")


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("B", "Sq", "chosen"), [(2, 64, "hopper"), (2, 1, "triton"), (64, 1, "hopper")]
)
def test_what_is_chosen(B: int, Sq: int, chosen: str, hopper: None) -> None:
    like: dict[str, Any] = {"device": "cuda", "dtype": torch.bfloat16}
    q, cache = torch.randn(B, 8, Sq, 64, **like), torch.randn(B, 128, 2, 64, **like)
    lengths = torch.full((B,), 100, dtype=torch.int32, device="cuda")
    told: list[str] = []
    with backends.watch_choices(lambda operator, backend, against: told.append(backend)):
        flashproto.attention_with_kv_cache(q, cache, cache, lengths=lengths)
    assert told == [chosen]
