"""Random sequences in a cache, call after call, and what attention to them is by definition: from all
of their keys in order, kept beside the cache in plain lists."""

from __future__ import annotations

import math
import random
from dataclasses import dataclass, field
from typing import Any

import torch
from attention_problem import ATOL, error
from torch import Tensor

import flashproto

E4M3 = torch.float8_e4m3fn
ALLOWED = ATOL | {torch.float64: 1e-9}


@dataclass(frozen=True)
class Problem:
    """Calls of attention_with_kv_cache.

    room: how many keys a sequence has room for.  page: the page size, 0 for a cache without pages.
    counts: for each call, how many new tokens each sequence has.  ragged: whether they lie side by
    side.
    eight: 1, 8 bits with scales by head; 2, by token.  prefix: its length.  padded: whether sequences
    have starts; indexed, a cache_index.
    """

    dtype: torch.dtype
    B: int
    Hq: int
    Hkv: int
    D: int
    Dv: int
    room: int
    page: int
    counts: tuple[tuple[int, ...], ...]
    ragged: bool = False
    rope: str = ""
    eight: int = 0
    padded: bool = False
    indexed: bool = False
    prefix: int = 0
    heads_first: bool = False
    options: dict[str, Any] = field(default_factory=dict)


def draw(generator: random.Random, room: int, most_heads: int, heads: tuple[int, ...]) -> Problem:
    """A random one; sequences stay within the room, but where a window lets them roll."""
    B = generator.choice((1, 2, 3, 5))
    group = generator.choice((1, 2, 3, 4, 8))
    Hkv = generator.choice((1, 2)) if 2 * group <= most_heads else 1
    page = generator.choice((0, 1, 3, 16, 16, 64))
    room = max(page, room // max(page, 1) * max(page, 1))
    window = generator.choice((None, None, "left", "both"))
    D = generator.choice(heads)
    options: dict[str, Any] = {
        "causal": generator.random() < 0.8,
        "scale": generator.choice((None, None, 0.5 * D**-0.5, -(D**-0.5))),
    }
    left = None
    if window is not None:
        left = generator.randrange(room // 2)
        options["window"] = (left, generator.choice((None, 0, 3)) if window == "both" else None)
    if generator.random() < 0.3:
        options["softcap"] = generator.choice((0.5, 3.0, 30.0))
    ragged = generator.random() < 0.4
    counts = []
    total = [0] * B
    for call in range(3):
        longest = room // 2 if call == 0 else generator.choice((1, 1, 4, 17))
        limit = room - left if left is not None else room
        one = generator.randint(0 if ragged else 1, longest)
        n = [
            generator.choice((0, 1, generator.randint(0, longest))) if ragged else one for _ in range(B)
        ]
        n = [
            min(a, limit, room if left is not None else room - t) for a, t in zip(n, total, strict=True)
        ]
        n = n if ragged else [min(n)] * B
        total = [t + a for t, a in zip(total, n, strict=True)]
        counts.append(tuple(n))
    alibi = generator.random() < 0.3
    return Problem(
        generator.choice(tuple(ATOL)),
        B,
        Hkv * group,
        Hkv,
        D,
        D if generator.random() < 0.6 else generator.choice(heads),
        room,
        page,
        tuple(counts),
        ragged=ragged,
        rope=generator.choice(("", "", "halves", "neighbours")),
        eight=generator.choice((0, 0, 0, 1, 2)),
        padded=generator.random() < 0.3,
        indexed=generator.random() < 0.4,
        prefix=0 if left is not None or alibi else generator.choice((0, 0, 9)),
        heads_first=generator.random() < 0.3,
        options=options | {"alibi": alibi, "sinks": generator.random() < 0.3},
    )


class Sequences:
    """The cache, and beside it every key and value that was ever put in, by sequence, in order."""

    def __init__(self, p: Problem, device: str, generator: random.Random) -> None:
        self.p, self.device = p, device
        self.lengths = [0] * p.B
        self.keys = [torch.zeros(0, p.Hkv, p.D, device=device) for _ in range(p.B)]
        self.values = [torch.zeros(0, p.Hkv, p.Dv, device=device) for _ in range(p.B)]
        self.index = generator.sample(range(p.B + 2), p.B) if p.indexed else list(range(p.B))
        rows = p.B + 2 if p.indexed else p.B
        self.table = None
        pages, size = rows, p.room
        if p.page:
            n = p.room // p.page
            order = generator.sample(range(rows * n + 3), rows * n)
            self.table = torch.tensor(order, dtype=torch.int32, device=device).view(rows, n)
            pages, size = rows * n + 3, p.page
        dtype = E4M3 if p.eight else p.dtype
        # What nobody wrote is NaN.
        self.caches = [
            torch.full((pages, size, p.Hkv, n), math.nan, device=device).to(dtype) for n in (p.D, p.Dv)
        ]
        if p.heads_first:
            self.caches = [x.transpose(1, 2).contiguous().transpose(1, 2) for x in self.caches]
        self.scales: list[Tensor | None] = [None, None]
        if p.eight == 1:
            self.scales = [torch.rand(p.Hkv, device=device) * 0.01 + 0.005 for _ in "kv"]
        if p.eight == 2:
            self.scales = [torch.full((pages, size, p.Hkv), math.nan, device=device) for _ in "kv"]
        self.starts = [0] * p.B
        if p.padded:
            self.starts = [generator.randint(0, max(n, 0)) for n in p.counts[0]]
        self.sinks = torch.randn(p.Hq, device=device) if p.options.get("sinks") else None
        self.slopes = torch.rand(p.Hq, device=device) * 0.3 if p.options.get("alibi") else None
        self.prefix = None
        if p.prefix:
            self.prefix = [
                torch.randn(p.prefix, p.Hkv, n, device=device).to(p.dtype) for n in (p.D, p.Dv)
            ]
        self.tables = None
        if p.rope:
            half = generator.randint(1, p.D // 2)
            angles = torch.rand(p.room + 400 + p.prefix, half, device=device) * 6
            self.tables = angles.cos(), angles.sin()

    @property
    def options(self) -> dict[str, Any]:
        """Of attention_with_kv_cache, but for what is each call's own."""
        p, device = self.p, self.device

        def ints(x: list[int]) -> Tensor:
            return torch.tensor(x, dtype=torch.int32, device=device)

        return {n: x for n, x in p.options.items() if n not in ("alibi", "sinks")} | {
            "lengths": ints(self.lengths),
            "page_table": self.table,
            "cache_index": ints(self.index) if p.indexed else None,
            "starts": ints(self.starts) if p.padded else None,
            "k_scale": self.scales[0],
            "v_scale": self.scales[1],
            "prefix": self.prefix,
            "rope": self.tables,
            "interleaved": p.rope == "neighbours",
            "sinks": self.sinks,
            "alibi_slopes": self.slopes,
        }

    def turn(self, x: Tensor, first: int) -> Tensor:
        """x [n, H, D] from position `first` on, rounded to its dtype."""
        if self.tables is None:
            return x
        at = torch.arange(first, first + x.shape[0], device=x.device)
        # Padding is at no position.
        cos, sin = (
            torch.where((at < 0)[:, None], math.nan, t[self.p.prefix + at.clamp(min=0)])[
                :, None
            ].double()
            for t in self.tables
        )
        R, y = cos.shape[-1], x.double().clone()
        if self.p.rope == "neighbours":
            a, b = y[..., 0 : 2 * R : 2].clone(), y[..., 1 : 2 * R : 2].clone()
            y[..., 0 : 2 * R : 2], y[..., 1 : 2 * R : 2] = a * cos - b * sin, b * cos + a * sin
        else:
            a, b = y[..., :R].clone(), y[..., R : 2 * R].clone()
            y[..., :R], y[..., R : 2 * R] = a * cos - b * sin, b * cos + a * sin
        return y.to(x.dtype)

    def place(self, b: int, j: int) -> tuple[int, int]:
        slot = j % self.p.room
        row = self.index[b]
        if self.table is None:
            return row, slot
        return int(self.table[row, slot // self.p.page]), slot % self.p.page

    def held(self, which: int, b: int) -> Tensor:
        """[n, Hkv, D] float32 as the cache holds them in 8 bits, of a sequence; older ones that have
        rolled away 0."""
        n = (self.keys, self.values)[which][b].shape[0]
        rows = []
        for j in range(n):
            page, slot = self.place(b, j)
            x, scale = self.caches[which][page, slot].float(), self.scales[which]
            assert scale is not None
            x = x * (scale if scale.ndim == 1 else scale[page, slot])[:, None]
            rows.append(torch.zeros_like(x) if j < n - self.p.room else x)
        return torch.stack(rows) if rows else (self.keys, self.values)[which][b]


@dataclass
class Made:
    """One call: its tensors as they are given, and each sequence's own."""

    q: Tensor
    k: Tensor | None
    v: Tensor | None
    cu_seqlens_q: Tensor | None
    queries: list[Tensor]  # [n, Hq, D]


def next_call(state: Sequences, counts: tuple[int, ...], behind: int = 2) -> Made:
    """Random tokens, taken into the sequences' lists; new ones are appended but in the last call of
    three, which may only read."""
    p, device = state.p, state.device

    def tokens(n: int, heads: int, width: int) -> Tensor:
        return torch.randn(n, heads, width, device=device).to(p.dtype)

    parts = [[tokens(n, h, w) for n in counts] for h, w in ((p.Hq, p.D), (p.Hkv, p.D), (p.Hkv, p.Dv))]
    if p.ragged:
        q, k, v = (
            torch.cat([*x, torch.full_like(x[0][:1], math.nan).expand(behind, -1, -1)])
            if x[0].shape[0]
            else torch.cat([*x, tokens(behind, *x[0].shape[1:])])
            for x in parts
        )
        cu = torch.tensor([0, *counts], device=device).cumsum(0).int()
    else:
        q, k, v = (torch.stack(x).transpose(1, 2) for x in parts)
        cu = None
    for b, n in enumerate(counts):
        key = state.turn(parts[1][b], state.lengths[b] - state.starts[b])
        state.keys[b] = torch.cat([state.keys[b].to(p.dtype), key])
        state.values[b] = torch.cat([state.values[b].to(p.dtype), parts[2][b]])
        assert state.keys[b].shape[0] == state.lengths[b] + n
    return Made(q, k, v, cu, parts[0])


def definition(state: Sequences, b: int, q: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """(out [n, Hq, Dv], lse [Hq, n]) of sequence b's queries q [n, Hq, D] in `dtype`, operator by
    operator; from all keys in order."""
    p, o = state.p, state.p.options
    k, v = state.keys[b], state.values[b]
    N, n = k.shape[0], q.shape[0]
    if p.eight:
        k, v = state.held(0, b), state.held(1, b)
    q = state.turn(q, N - n - state.starts[b])
    i, j = torch.arange(n, device=q.device)[:, None] + N - n, torch.arange(N, device=q.device)
    seen = (j >= state.starts[b]) & (i > -1 - n)
    if o["causal"]:
        seen = seen & (j <= i)
    if o.get("window") is not None:
        left, right = o["window"]
        seen = seen & (j >= i - left)
        seen = seen & (j <= i + right) if right is not None else seen
    if p.eight:  # what the cache no longer holds is seen by nobody
        k, v = (x.masked_fill(~seen.any(0)[:, None, None], 0.0) for x in (k, v))
    distance = (i - j).abs()
    if state.prefix is not None:
        k, v = (torch.cat([x.to(y.dtype), y]) for x, y in zip(state.prefix, (k, v), strict=True))
        seen = torch.cat([seen.new_ones(n, p.prefix), seen], 1)
        distance = torch.cat([distance.new_zeros(n, p.prefix), distance], 1)
    group = p.Hq // p.Hkv
    q, k, v = (x.to(dtype).transpose(0, 1) for x in (q, k, v))
    k, v = (x.repeat_interleave(group, 0) for x in (k, v))
    s = q @ k.mT * (p.D**-0.5 if o["scale"] is None else o["scale"])
    if "softcap" in o:
        s = o["softcap"] * torch.tanh(s / o["softcap"])
    if state.slopes is not None:
        s = s - state.slopes.to(dtype)[:, None, None] * distance.to(dtype)
    s = s.masked_fill(~seen, -math.inf)
    if state.sinks is not None:
        s = torch.cat([s, state.sinks.to(dtype)[:, None, None].expand(-1, n, 1)], -1)
        v = torch.cat([v, v.new_zeros(p.Hq, 1, p.Dv)], 1)
    keyless = (s == -math.inf).all(-1, keepdim=True)
    weights = torch.softmax(s.masked_fill(keyless, 0.0), -1).masked_fill(keyless, 0.0)
    lse = torch.logsumexp(s.masked_fill(keyless, 0.0), -1).masked_fill(keyless[..., 0], -math.inf)
    if not s.shape[-1]:
        lse = torch.full(s.shape[:-1], -math.inf, device=s.device, dtype=dtype)
    return (weights @ v).transpose(0, 1), lse


def assert_right(
    state: Sequences, made: Made, out: Tensor, lse: Tensor, counts: tuple[int, ...]
) -> None:
    p = state.p
    times = 3 if "softcap" in p.options else 2
    at = 0
    for b, n in enumerate(counts):
        if p.ragged:
            got = out[at : at + n], lse[:, at : at + n]
            at += n
        else:
            got = out[b].transpose(0, 1), lse[b]
        exact = definition(state, b, made.queries[b], torch.float64)
        plain = definition(state, b, made.queries[b], p.dtype)
        padding = max(state.starts[b] - (state.keys[b].shape[0] - n), 0)  # at no position of RoPE
        got, exact, plain = ((x[padding:], y[:, padding:]) for x, y in (got, exact, plain))
        for name, x, want, eager in zip(("out", "lse"), got, exact, plain, strict=True):
            assert x.shape == want.shape, name
            size = max([1.0, *want[want.isfinite()].abs().tolist()])
            ours, allowed = error(x, want), times * error(eager, want) + ALLOWED[p.dtype] * size
            assert ours <= allowed, (
                f"{name} of sequence {b}: error {ours:.3g}, allowed {allowed:.3g}, {p}"
            )
    if p.ragged and out.shape[0] > at:
        assert not out[at:].any()
        empty = torch.full_like(lse[:, at:], -math.inf)
        empty = empty if state.sinks is None else state.sinks[:, None].to(lse.dtype).expand_as(empty)
        torch.testing.assert_close(lse[:, at:], empty)


def play(
    p: Problem,
    device: str,
    generator: random.Random,
    impl: str | None,
    call: Any = flashproto.attention_with_kv_cache,
    first: str | None = None,
) -> None:
    """All calls of a problem, each checked; the last one is made again without new tokens.  first: the
    backend of the first one, whose tokens are many, by default impl."""
    print(p)
    state = Sequences(p, device, generator)
    for counts in p.counts:
        made = next_call(state, counts)
        new = {"k": made.k, "v": made.v, "cu_seqlens_q": made.cu_seqlens_q}
        by = (first or impl) if counts is p.counts[0] else impl
        out, lse = call(made.q, *state.caches, **state.options, **new, return_lse=True, impl=by)
        state.lengths = [a + n for a, n in zip(state.lengths, counts, strict=True)]
        assert_right(state, made, out, lse, counts)
    again = state.options | {"cu_seqlens_q": made.cu_seqlens_q}
    out, lse = call(made.q, *state.caches, **again, return_lse=True, impl=impl)
    assert_right(state, made, out, lse, counts)
