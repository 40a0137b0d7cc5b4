"""Decoding, GB/s of keys and values read: one to sixteen queries on long keys, with a cache of this
library's and without, beside peers; chunked prefill, TFLOP/s; and what pages, 8 bits, appending, room
in the cache and a shared prefix cost.  FlashAttention-3 is the wheel on PyPI, which has no backward.

Every query sees all keys, for peers align a causal mask in other ways.  The ceiling of a cell is a copy
of as many bytes, in the same run.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

import flashproto

from .. import reference
from .measure import OURS, Prepared, Work, compare
from .peers import attention_peers, flash_attn_3_cached, has_flash_attn_3

# B, query heads, key heads, keys
SHAPES = (
    (1, 32, 8, 131072),
    (16, 32, 8, 8192),
    (64, 32, 8, 8192),
    (1, 32, 32, 16384),
    (128, 32, 8, 1024),
    (1, 16, 2, 131072),
    (1, 8, 1, 131072),
)
QUERIES = (1, 2, 4, 8, 16)
PREFILLS = ((1, 64, 8, 131072), (1, 16, 2, 131072), (1, 8, 1, 131072))
CHUNKS = (512, 64, 4096)  # queries of a prefill, the others on the first shape alone
FEATURES = ((1, 32, 8, 131072), (16, 32, 8, 8192), (64, 32, 8, 8192))
PAGED = ((1, 32, 8, 131072), (16, 32, 8, 8192), (1, 32, 32, 16384), (128, 32, 8, 1024))
PAGES = (16, 64)
ROOM = 131072  # of the cache in which a sequence is short
MIB = 2**20


@dataclass(frozen=True)
class Problem:
    """kind: "decode", "prefill", "cache" (with 8 bits, appending), "pages", "room" or "prefix", whose
    length is P."""

    kind: str
    B: int
    Hq: int
    Hkv: int
    S: int
    Sq: int
    D: int
    dtype: torch.dtype
    P: int = 0

    @property
    def key(self) -> str:
        prefix = f" P{self.P}" if self.P else ""
        return f"{self.kind} B{self.B} H{self.Hq}/{self.Hkv} S{self.S} Sq{self.Sq}{prefix}"

    @property
    def nbytes(self) -> int:
        """Of all keys and values that queries see."""
        return 2 * self.B * (self.S + self.P) * self.Hkv * self.D * self.dtype.itemsize


def problems(quick: bool, device: torch.device) -> list[Problem]:
    if device.type != "cuda":
        made = [
            Problem(kind, 2, 4, 2, 128, Sq, 16, torch.float32, P)
            for kind, Sq, P in (
                *(("decode", 1, 0), ("decode", 4, 0), ("pages", 4, 0)),
                *(("cache", 1, 0), ("prefix", 1, 64)),
            )
        ]
        return made[:1] if quick else made
    if quick:
        return [Problem("decode", 16, 32, 8, 8192, Sq, 128, torch.bfloat16) for Sq in (1, 4)]
    half = 128, torch.bfloat16
    return [
        *(Problem("decode", *shape, Sq, *half) for shape in SHAPES for Sq in QUERIES),
        *(Problem("prefill", *shape, CHUNKS[0], *half) for shape in PREFILLS),
        *(Problem("prefill", *PREFILLS[0], Sq, *half) for Sq in CHUNKS[1:]),
        *(Problem("pages", *shape, Sq, *half) for shape in PAGED for Sq in (1, 4, 16)),
        *(Problem("cache", *shape, 1, *half) for shape in FEATURES),
        *(Problem("room", B, 32, 8, 1024, 1, *half) for B in (1, 8)),
        Problem("prefix", 64, 32, 8, 256, 1, *half, 8192),
    ]


def family(p: Problem) -> str:
    """Cells whose kernels differ at most by length."""
    return f"{p.kind} {p.Hq // p.Hkv} {p.Sq}"


def work(p: Problem) -> Work:
    if p.kind == "prefill":
        flops = 4 * p.B * p.Hq * p.Sq * p.S * p.D
        return Work("TFLOP/s", flops / 1e9, None, forward_only=True, no_grad=True)
    return Work("GB/s", p.nbytes / 1e6, None, forward_only=True, no_grad=True, copied=p.nbytes // 2)


# --- contenders --------------------------------------------------------------------------------------


class Sampled:
    """The exact output for the first and the last key head, in float32."""

    def __init__(self, p: Problem, q: Tensor, k: Tensor, v: Tensor) -> None:
        """q [B, Hq, Sq, D], k and v [B, S, Hkv, D], of any dtype that holds them."""
        self.p, self.given = p, (q, k, v)
        self.want: list[Tensor] | None = None

    def parts(self) -> list[tuple[int, int]]:
        return list(dict.fromkeys([(0, 0), (self.p.B - 1, self.p.Hkv - 1)]))

    def exact(self) -> list[Tensor]:
        q, k, v = self.given
        group = self.p.Hq // self.p.Hkv
        made = []
        for b, h in self.parts():
            heads = q[b : b + 1, h * group : (h + 1) * group].float()
            keys, values = (x[b : b + 1, :, h : h + 1].float().transpose(1, 2) for x in (k, v))
            outs = [reference.attention(part, keys, values)[0] for part in heads.split(64, 2)]
            made.append(torch.cat(outs, 2))
        return made

    def check(self, out: Tensor, grads: Sequence[Tensor] | None) -> str | None:
        """What is wrong with out [B, Hq, Sq, D]; None if nothing."""
        if not bool(out.isfinite().all()):
            return "wrong result: out is not finite"
        self.want = self.want or self.exact()
        group = self.p.Hq // self.p.Hkv
        for (b, h), want in zip(self.parts(), self.want, strict=True):
            got = out[b : b + 1, h * group : (h + 1) * group]
            complaint = compare({"out": got}, {"out": want})
            if complaint:
                return complaint
        return None


def contenders(
    p: Problem, device: torch.device, impls: Sequence[str], with_compile: bool
) -> dict[str, Callable[[], Prepared]]:
    """Ours with a cache, and FlashAttention-3's; but for "pages" also without, and peers."""
    q = torch.randn(p.B, p.Hq, p.Sq, p.D, device=device, dtype=p.dtype)
    k, v = (torch.randn(p.B, p.S, p.Hkv, p.D, device=device, dtype=p.dtype) for _ in range(2))
    sampled = Sampled(p, q, k, v)

    def prepared(call: Callable[[], Any], checked: Sampled = sampled) -> Prepared:
        return Prepared(call, (q,), None, checked.check)

    def cached(impl: str) -> Prepared:
        lengths = torch.full((p.B,), p.S, dtype=torch.int32, device=device)
        return prepared(
            partial(
                flashproto.attention_with_kv_cache, q, k, v, lengths=lengths, causal=False, impl=impl
            )
        )

    def fa3(page_size: int) -> Prepared:
        heads = q.transpose(1, 2)
        lengths = torch.full((p.B,), p.S, dtype=torch.int32, device=device)
        caches: Sequence[Tensor] = (k, v)
        table = None
        if page_size:
            caches, table = in_pages((k, v), page_size)
        function = flash_attn_3_cached(heads.shape, caches[0], lengths, table)
        return Prepared(
            lambda: function(heads, *caches),
            (q,),
            None,
            lambda out, grads: sampled.check(out.transpose(1, 2), grads),
        )

    def paged(impl: str, page_size: int) -> Prepared:
        lengths = torch.full((p.B,), p.S, dtype=torch.int32, device=device)
        caches, table = in_pages((k, v), page_size)
        given: dict[str, Any] = {"lengths": lengths, "page_table": table, "causal": False, "impl": impl}
        return prepared(partial(flashproto.attention_with_kv_cache, q, *caches, **given))

    with_cache = [impl for impl in impls if impl in ("hopper", "triton", "reference")]
    if p.kind == "cache":
        return cache_contenders(p, q, k, v, with_cache, prepared)
    if p.kind == "room":
        return room_contenders(p, q, k, v, with_cache, prepared)
    if p.kind == "prefix":
        with_prefix = [impl for impl in with_cache if impl != "hopper"]  # which takes none
        return prefix_contenders(p, q, k, v, with_prefix)
    if p.kind == "prefill" and p.Sq > CHUNKS[0]:
        with_cache = [impl for impl in with_cache if impl != "triton"]  # it takes a second a call
    made: dict[str, Callable[[], Prepared]] = {
        f"{OURS}[{impl}]": partial(cached, impl) for impl in with_cache
    }
    if p.kind in ("pages", "prefill"):
        made |= {
            f"{OURS}[{impl}]-pages{size}": partial(paged, impl, size)
            for impl in with_cache
            for size in PAGES
        }
    if has_flash_attn_3(device):
        made["fa3"] = partial(fa3, 0)
        if p.kind != "decode":
            made |= {f"fa3-pages{size}": partial(fa3, size) for size in PAGES}
    if p.kind == "pages":
        return made

    def plain(make: Callable[[], Callable[..., Any]], layout: str) -> Prepared:
        function = make()
        tensors = [q, k.transpose(1, 2), v.transpose(1, 2)]
        if layout == "BSHD":
            tensors = [q.transpose(1, 2), k, v]
        tensors = [x.contiguous() for x in tensors]

        def check(out: Tensor, grads: Sequence[Tensor] | None) -> str | None:
            return sampled.check(out if layout == "BHSD" else out.transpose(1, 2), grads)

        return Prepared(partial(function, *tensors), (q,), None, check)

    def ours(impl: str) -> Callable[..., Any]:
        return partial(flashproto.attention, impl=impl)

    for impl in impls:
        made[f"{OURS}[{impl}]-attention"] = partial(plain, partial(ours, impl), "BHSD")
    peers = attention_peers(False, p.S, p.Hq != p.Hkv, device, with_compile)
    for name, (make, layout) in peers.items():
        if name != "sdpa-efficient":
            made[name] = partial(plain, make, layout)
    return made


Made = dict[str, Callable[[], Prepared]]


def in_pages(tensors: Sequence[Tensor], size: int) -> tuple[list[Tensor], Tensor]:
    """Tensors [B, S, H, D] in pages of `size`, in random order, and the table [B, S / size]."""
    B, S, H, D = tensors[0].shape
    order = torch.randperm(B * S // size, device=tensors[0].device)
    caches = []
    for x in tensors:
        cache = torch.empty(len(order), size, H, D, dtype=x.dtype, device=x.device)
        cache[order] = x.view(-1, size, H, D)
        caches.append(cache)
    return caches, order.view(B, -1).int()


def cache_contenders(
    p: Problem, q: Tensor, k: Tensor, v: Tensor, impls: Sequence[str], prepared: Callable[..., Prepared]
) -> Made:
    """In one row of memory; in pages; 8 bits with scales by head and by token; and with the last token
    appended, and turned, in the same call."""
    device = q.device
    lengths = torch.full((p.B,), p.S, dtype=torch.int32, device=device)

    def attend(impl: str, caches: Sequence[Tensor], **options: Any) -> Callable[[], Any]:
        given: dict[str, Any] = {"lengths": lengths, "impl": impl} | options
        return partial(flashproto.attention_with_kv_cache, q, *caches, **given)

    def plain(impl: str) -> Prepared:
        return prepared(attend(impl, (k, v)))

    def paged(impl: str, size: int) -> Prepared:
        caches, table = in_pages((k, v), size)
        return prepared(attend(impl, caches, page_table=table))

    def eight(impl: str, by_token: bool) -> Prepared:
        caches, scales, exact = [], [], []
        for x in (k, v):
            largest = x.float().abs().amax(-1) if by_token else x.float().abs().amax((0, 1, 3))
            scale = largest / 448
            cache = (x.float() / scale[..., None]).to(torch.float8_e4m3fn)
            caches.append(cache)
            scales.append(scale)
            exact.append(cache[:, :, [0, -1]].float() * scale[..., [0, -1], None])
        two = Problem(p.kind, p.B, 2 * (p.Hq // p.Hkv), 2, p.S, p.Sq, p.D, p.dtype)
        group = p.Hq // p.Hkv
        rows = [*range(group), *range(p.Hq - group, p.Hq)]
        checked = Sampled(two, q[:, rows], *exact)

        def check(out: Tensor, grads: Sequence[Tensor] | None) -> str | None:
            return checked.check(out[:, rows], grads)

        call = attend(impl, caches, k_scale=scales[0], v_scale=scales[1])
        return Prepared(call, (q,), None, check)

    def appending(impl: str) -> Prepared:
        """The token that is there already: rotated by angles of 0."""
        caches = [x.clone() for x in (k, v)]
        new = [x[:, -1:].transpose(1, 2).contiguous() for x in (k, v)]
        angles = torch.zeros(p.S, p.D // 2, device=device)
        tables = angles.cos(), angles.sin()
        options = {"lengths": lengths - 1, "k": new[0], "v": new[1], "rope": tables}
        return prepared(attend(impl, caches, **options))

    made: Made = {}
    for impl in impls:
        name = f"{OURS}[{impl}]"
        made[name] = partial(plain, impl)
        for size in PAGES:
            made[f"{name}-pages{size}"] = partial(paged, impl, size)
        made[f"{name}-append"] = partial(appending, impl)
        if impl == "hopper":
            continue  # it takes no cache of 8 bits
        made[f"{name}-e4m3"] = partial(eight, impl, False)
        made[f"{name}-e4m3-token"] = partial(eight, impl, True)
    return made


def room_contenders(
    p: Problem, q: Tensor, k: Tensor, v: Tensor, impls: Sequence[str], prepared: Callable[..., Prepared]
) -> Made:
    """As long sequences in a cache with as much room, and with ROOM; each a CUDA graph."""

    def graphed(impl: str, room: int) -> Prepared:
        caches = []
        for x in (k, v):
            cache = x.new_zeros(p.B, room, p.Hkv, p.D)
            cache[:, : p.S] = x
            caches.append(cache)
        # Captured with other lengths than it is replayed with.
        lengths = torch.full((p.B,), 1, dtype=torch.int32, device=q.device)
        call = partial(flashproto.attention_with_kv_cache, q, *caches, lengths=lengths, impl=impl)
        with torch.no_grad():
            call()
            torch.cuda.synchronize()
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                out = call()
        lengths.fill_(p.S)

        def replay(_reads: Any = call) -> Any:  # whose tensors the graph does not keep alive
            graph.replay()
            return out

        return prepared(replay)

    return {
        f"{OURS}[{impl}]{name}": partial(graphed, impl, room)
        for impl in impls
        for name, room in (("", p.S), (f"-room{ROOM}", ROOM))
    }


def prefix_contenders(p: Problem, q: Tensor, k: Tensor, v: Tensor, impls: Sequence[str]) -> Made:
    """Sequences that share their first P keys: these read once, and kept by each sequence."""
    shared = [torch.randn(p.P, p.Hkv, p.D, device=q.device, dtype=p.dtype) for _ in range(2)]
    whole = [
        torch.cat([x.expand(p.B, -1, -1, -1), own], 1) for x, own in zip(shared, (k, v), strict=True)
    ]
    sampled = Sampled(p, q, *whole)
    attend = partial(flashproto.attention_with_kv_cache, q)

    def lengths(n: int) -> Tensor:
        return torch.full((p.B,), n, dtype=torch.int32, device=q.device)

    def once(impl: str) -> Prepared:
        call = partial(attend, k, v, lengths=lengths(p.S), prefix=shared, impl=impl)
        return Prepared(call, (q,), None, sampled.check)

    def each(impl: str) -> Prepared:
        call = partial(attend, *whole, lengths=lengths(p.P + p.S), impl=impl)
        return Prepared(call, (q,), None, sampled.check)

    made: Made = {}
    for impl in impls:
        made[f"{OURS}[{impl}]"] = partial(each, impl)
        made[f"{OURS}[{impl}]-prefix"] = partial(once, impl)
        if impl == "triton":
            made[f"{OURS}-prefix"] = partial(once, None)  # type: ignore[arg-type]
    return made


# --- goals -------------------------------------------------------------------------------------------


def goals(data: dict[str, Any]) -> str:
    """Each figure with the developers' goal, and which fall short."""
    cells = data["cells"]
    lines: list[str] = []
    short = 0

    def line(what: str, value: float | None, goal: float) -> None:
        nonlocal short
        fits = value is not None and value >= goal
        short += not fits
        shown = "not measured" if value is None else f"{value:.3f}"
        lines.append(f"{what:<64} {shown:>12}, wanted {goal:.2f}{'' if fits else '  SHORT'}")

    def timed(key: str) -> dict[str, dict[str, Any]]:
        results = cells.get(key, {"passes": {"forward": {}}})["passes"]["forward"]
        return {n: r for n, r in results.items() if "ms" in r}

    def best(key: str, ours: bool) -> float | None:
        values = [r["value"] for n, r in timed(key).items() if n.startswith(OURS) == ours]
        return max(values) if values else None

    def over(a: float | None, b: float | None) -> float | None:
        return a / b if a and b else None

    def best_of(found: dict[str, dict[str, Any]], end: str) -> float | None:
        return max((r["value"] for n, r in found.items() if n.endswith(end)), default=None)

    for problem in problems(False, torch.device("cuda")):
        p, key = problem, problem.key
        if key not in cells:
            continue
        found, mib = timed(key), problem.nbytes / MIB
        ours = best(key, True)
        ceiling = cells[key].get("ceiling")
        by_name: dict[str, dict[str, Any]] = {}
        for n, r in found.items():
            end = n.partition("]")[2]
            if n.startswith(OURS) and r["value"] > by_name.get(end, {}).get("value", 0.0):
                by_name[end] = r
        alone = by_name.get("", {}).get("value")
        if p.kind == "decode":
            line(f"{key}: of the best peer", over(ours, best(key, False)), 0.98)
            if p.Sq == 1:
                share = 0.88 if mib >= 512 else 0.84 if mib >= 256 else 0.0
                line(f"{key}: of copy", over(ours, ceiling), share)
            else:
                one = best(Problem("decode", p.B, p.Hq, p.Hkv, p.S, 1, p.D, p.dtype).key, True)
                rows = p.Hq // p.Hkv * p.Sq
                goal = 0.75 if rows > 64 else 0.92 if mib >= 256 else 0.85
                line(f"{key}: of Sq 1", over(ours, one), goal)
        elif p.kind == "prefill" and p.Sq == CHUNKS[0]:
            attention = best_of(found, "-attention")
            line(f"{key}: contiguous, of attention", over(best_of(found, "]"), attention), 0.95)
            for size, goal in ((64, 1.0), (16, 0.9)):
                value = over(best_of(found, f"]-pages{size}"), best_of(found, f"fa3-pages{size}"))
                line(f"{key}: pages of {size}, of FlashAttention-3's", value, goal)
        elif p.kind == "pages":
            for end in ("", *(f"-pages{size}" for size in PAGES)):
                value = over(best_of(found, f"]{end}"), best_of(found, f"fa3{end}"))
                line(
                    f"{key}: {end[1:] or 'contiguous'}, of FlashAttention-3's",
                    value,
                    0.98 if end else 1.0,
                )
        elif p.kind == "cache":
            for size in (16, 64):
                value = by_name.get(f"-pages{size}", {}).get("value")
                line(f"{key}: pages of {size}, of contiguous", over(value, alone), 0.92)
            if mib > 512 or p.B == 1:
                value = by_name.get("-e4m3", {}).get("value")
                goal = 1.5 if mib > 512 else 1.4
                line(f"{key}: 8 bits, tokens/s of bf16's", over(value, alone), goal)
            if mib == 512:
                value = by_name.get("-append", {}).get("value")
                line(f"{key}: with appending, of attention alone", over(value, alone), 1 / 1.1)
        elif p.kind == "room":
            value = by_name.get(f"-room{ROOM}", {}).get("value")
            line(f"{key}: in room for {ROOM}, of room for {p.S}", over(value, alone), 1 / 1.25)
        elif p.kind == "prefix":
            prefixed = [r["value"] for n, r in found.items() if n.endswith("-prefix")]
            line(f"{key}: of the same without", over(max(prefixed, default=0.0), alone), 7.0)
            line(f"{key}: without, of copy", over(alone, ceiling), 0.88)
    return "\n".join([*lines, f"short of a goal: {short} of {len(lines)}"])
