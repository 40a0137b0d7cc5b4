"""flash-attn's functions on this library's kernels, against a dense definition in float64."""

from __future__ import annotations

import doctest
import functools
import importlib
import inspect
import math
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from attention_problem import assert_within_bound
from door_calls import Calls, counted, run_examples, section
from torch import Tensor
from torch._dynamo.testing import CompileCounterWithBackend

from flashproto import backends
from flashproto.integrations import (
    flash_attn,
    flash_attn_4,
    flash_attn_kvcache,
    flash_attn_options,
)
from flashproto.integrations.refusals import NOT_YET

# --- the definition -------------------------------------------------------------------------------


def dense(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[Any, Any] = (None, None),
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    learnable_sink: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """(out, lse) of [B, S, H, D] with lse -inf where a query sees no key, in the dtype of q."""
    group = q.shape[2] // k.shape[2]
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    k, v = (x.repeat_interleave(group, 1) for x in (k, v))
    scores = q @ k.mT * (q.shape[3] ** -0.5 if softmax_scale is None else softmax_scale)
    if softcap > 0:
        scores = softcap * (scores / softcap).tanh()
    i = torch.arange(q.shape[2], device=q.device)[:, None] + k.shape[2] - q.shape[2]
    j = torch.arange(k.shape[2], device=q.device)
    if alibi_slopes is not None:
        scores = scores - alibi_slopes.to(q.dtype)[:, None, None] * (i - j).abs()
    left, right = window_size
    seen = torch.ones(q.shape[2], k.shape[2], dtype=torch.bool, device=q.device)
    if causal:
        seen &= j <= i
    if left is not None and left >= 0:
        seen &= j >= i - left
    if right is not None and right >= 0:
        seen &= j <= i + right
    scores = scores.masked_fill(~seen, -math.inf)
    if learnable_sink is not None:
        sink = learnable_sink.to(q.dtype)[:, None, None].expand(*scores.shape[:3], 1)
        scores = torch.cat([scores, sink], -1)
        seen = torch.nn.functional.pad(seen, (0, 1), value=True)
    empty = ~seen.any(-1, keepdim=True)
    lse = scores.masked_fill(empty, 0).logsumexp(-1, keepdim=True)
    p = (scores.masked_fill(empty, 0) - lse).exp().masked_fill(~seen, 0)
    out = p[..., : k.shape[2]] @ v
    return out.transpose(1, 2), lse.masked_fill(empty, -math.inf)[..., 0]


def turned(x: Tensor, cos: Tensor, sin: Tensor, at: Tensor, interleaved: bool) -> Tensor:
    """x [S, H, D] by rows `at` [S] of the tables [length, R]."""
    R = cos.shape[1]
    c, s = (t[at.long()][:, None].to(x.dtype) for t in (cos, sin))
    first, second = (x[..., : 2 * R : 2], x[..., 1 : 2 * R : 2]) if interleaved else (
        x[..., :R], x[..., R : 2 * R]
    )  # fmt: skip
    pair = first * c - second * s, second * c + first * s
    made = torch.stack(pair, -1).flatten(-2) if interleaved else torch.cat(pair, -1)
    return torch.cat([made, x[..., 2 * R :]], -1)


# --- where tests run ------------------------------------------------------------------------------


class Where(NamedTuple):
    device: str
    dtype: torch.dtype
    sizes: tuple[int, int, int]  # of queries, keys and a head

    def randn(self, *shape: int) -> Tensor:
        x = torch.randn(shape, device=self.device).to(self.dtype)
        return x.requires_grad_()


SMALL = (9, 13, 16)


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> Calls:
    return counted(monkeypatch, flash_attn, flash_attn_options, flash_attn_4, flash_attn_kvcache)


@pytest.fixture(
    params=["reference", pytest.param("bfloat16", marks=pytest.mark.gpu),
            pytest.param("float32", marks=pytest.mark.gpu)]
)  # fmt: skip
def where(request: pytest.FixtureRequest) -> Iterator[Where]:
    """On a CPU the reference; on a GPU what is chosen there."""
    if request.param != "reference":
        yield Where("cuda", getattr(torch, request.param), (150, 233, 64))
        return
    before = backends.get_default()
    backends.set_default("reference")
    try:
        yield Where("cpu", torch.float32, SMALL)
    finally:
        backends.set_default(before)


@pytest.fixture
def kernels(device: str) -> Where:
    """Triton's kernels, on a CPU under the interpreter."""
    pytest.importorskip("triton")
    return Where(device, torch.float32, SMALL)


# --- functions of sequences -----------------------------------------------------------------------

OPTIONS: dict[str, dict[str, Any]] = {
    "full": {},
    "causal": {"causal": True},
    "window": {"window_size": (3, 2)},
    "left": {"window_size": (4, -1)},
    "right": {"window_size": (-1, 1)},
    "itself": {"window_size": (0, 0)},
    "causal window": {"causal": True, "window_size": (2, 5)},
    "nanochat": {"causal": True, "window_size": (5, 0)},
    "softcap": {"softcap": 0.7, "causal": True},
    "no softcap": {"softcap": -1.0, "softmax_scale": 0.3},
    "alibi": {"alibi_slopes": (0.5, 0.25, 0.1, 0.0)},
    "all": {"causal": True, "window_size": (6, 0), "softcap": 3.0, "alibi_slopes": (0.3, 0, 0.2, 1)},
}


class Form(NamedTuple):
    """name: of the function.  leaves(where, B, Sq, Sk): tensors.  heads: q, k and v of them."""

    name: str
    leaves: Callable[..., list[Tensor]]
    heads: Callable[..., tuple[Tensor, ...]]
    runs: str = "attention"


def leaves_apart(where: Where, Sq: int, Sk: int, *batch: int) -> list[Tensor]:
    D = where.sizes[2]
    return [where.randn(*batch, S, H, D) for S, H in ((Sq, 4), (Sk, 2), (Sk, 2))]


def leaves_kv(where: Where, Sq: int, Sk: int, *batch: int) -> list[Tensor]:
    D = where.sizes[2]
    return [where.randn(*batch, Sq, 4, D), where.randn(*batch, Sk, 2, 2, D)]


def leaves_qkv(where: Where, Sq: int, Sk: int, *batch: int) -> list[Tensor]:
    return [where.randn(*batch, Sk, 3, 4, where.sizes[2])]


LAYOUTS = {
    "": (leaves_apart, lambda q, k, v: (q, k, v)),
    "kvpacked_": (leaves_kv, lambda q, kv: (q, *kv.unbind(-3))),
    "qkvpacked_": (leaves_qkv, lambda qkv: qkv.unbind(-3)),
}


def options_for(name: str, device: str) -> dict[str, Any]:
    options = dict(OPTIONS[name])
    if "alibi_slopes" in options:
        options["alibi_slopes"] = torch.tensor(options["alibi_slopes"], device=device)
    return options


def compared(
    where: Where,
    leaves: list[Tensor],
    run: Callable[..., tuple[Tensor, Tensor | None]],
    definition: Callable[..., tuple[Tensor, Tensor]],
    empty: float,
) -> None:
    """Results and gradients of run(*leaves), beside the definition's in float64 and in their own dtype;
    empty: lse of a row without keys."""
    doubled = [x.detach().double().requires_grad_() for x in leaves]
    single = [x.detach().requires_grad_() for x in leaves]
    exact, plain, made = definition(*doubled), definition(*single), run(*leaves)
    dout = torch.randn(exact[0].shape, device=where.device).to(where.dtype)
    dlse = torch.randn(exact[1].shape, device=where.device)

    def results(of: list[Tensor], out: Tensor, lse: Tensor | None) -> dict[str, Tensor]:
        loss = (out * dout.to(out.dtype)).sum()
        found = {"out": out}
        if lse is not None and made[1] is not None:
            loss = loss + torch.where(lse.isinf(), 0, lse * dlse.to(lse.dtype)).sum()
            found["lse"] = lse.masked_fill(lse == -math.inf, empty)
        gradients = torch.autograd.grad(loss, of)
        return found | {f"d{i}": x for i, x in enumerate(gradients)}

    got = results(leaves, *made)
    if made[1] is not None:
        assert made[1].dtype == torch.float32
        no_keys = exact[1].isinf()
        assert (made[1][no_keys] == empty).all() and not made[1][~no_keys].isinf().any()
    want, eager = results(doubled, *exact), results(single, *plain)
    assert made[0].is_contiguous() and made[0].dtype == where.dtype
    assert_within_bound(got, want, eager, where.dtype)


def run_dense(
    where: Where, calls: Calls, layout: str, options: dict[str, Any], probs: bool, swap: bool = False
) -> None:
    leaves_of, heads = LAYOUTS[layout]
    Sq, Sk, _ = where.sizes
    leaves = leaves_of(where, *((Sk, Sq) if swap else (Sq, Sk)), 2)
    name = f"flash_attn_{layout}func"

    def run(*leaves: Tensor) -> tuple[Tensor, Tensor | None]:
        made = getattr(flash_attn, name)(*leaves, **options, return_attn_probs=probs)
        if not probs:
            return made, None
        assert made[2] is None and len(made) == 3
        return made[:2]

    compared(where, leaves, run, lambda *x: dense(*heads(*x), **options), math.inf)
    fused = layout == "qkvpacked_" and not probs and "alibi_slopes" not in options
    calls.assert_one("attention_qkv" if fused else "attention")


@pytest.mark.parametrize("probs", [False, True])
@pytest.mark.parametrize("option", OPTIONS)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_dense(layout: str, option: str, probs: bool, where: Where, calls: Calls) -> None:
    run_dense(where, calls, layout, options_for(option, where.device), probs)


@pytest.mark.parametrize("option", ["causal", "window", "all"])
def test_more_queries_than_keys(option: str, where: Where, calls: Calls) -> None:
    """The first queries see no key."""
    run_dense(where, calls, "", options_for(option, where.device), True, swap=True)


@pytest.mark.parametrize(
    ("layout", "option"), [("", "all"), ("kvpacked_", "window"), ("qkvpacked_", "causal")]
)
def test_dense_by_kernels(layout: str, option: str, kernels: Where, calls: Calls) -> None:
    for probs in (False, True):
        run_dense(kernels, calls, layout, options_for(option, kernels.device), probs)


def test_dense_by_torch(calls: Calls) -> None:
    before = backends.get_default()
    backends.set_default("torch")
    try:
        for layout in LAYOUTS:
            for option in ("full", "causal", "window"):
                run_dense(Where("cpu", torch.float32, SMALL), calls, layout, OPTIONS[option], False)
    finally:
        backends.set_default(before)


LENGTHS = ((4, 0, 7, 1), (6, 3, 7, 0))  # of queries and of keys


def run_varlen(
    where: Where, calls: Calls, layout: str, options: dict[str, Any], probs: bool, module: Any = None
) -> None:
    leaves_of, heads = LAYOUTS[layout]
    lengths = LENGTHS if layout != "qkvpacked_" else (LENGTHS[0], LENGTHS[0])
    if where.device == "cuda":
        lengths = tuple(tuple(21 * n for n in own) for own in lengths)
    leaves = leaves_of(where, *map(sum, lengths))
    ends = [torch.tensor([0, *own], device=where.device).cumsum(0) for own in lengths]
    cu = [x.int() for x in ends]
    if layout == "qkvpacked_":
        places: tuple[Any, ...] = (cu[0], max(lengths[0]))
    else:
        places = (*cu, max(lengths[0]), torch.tensor(max(lengths[1])))

    def run(*leaves: Tensor) -> tuple[Tensor, Tensor | None]:
        function = getattr(flash_attn, f"flash_attn_varlen_{layout}func")
        made = function(*leaves, *places, **options, return_attn_probs=probs)
        if not probs:
            return made, None
        assert made[2] is None
        return made[:2]

    def definition(*leaves: Tensor) -> tuple[Tensor, Tensor]:
        q, k, v = heads(*leaves)
        rows = zip(q.split(lengths[0]), k.split(lengths[1]), v.split(lengths[1]), strict=True)
        parts = [dense(*(x[None] for x in row), **options) for row in rows]
        return torch.cat([out[0] for out, _ in parts]), torch.cat([lse[0] for _, lse in parts], 1)

    compared(where, leaves, run, definition, math.inf)
    calls.assert_one("attention_varlen")


@pytest.mark.parametrize("option", OPTIONS)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_varlen(layout: str, option: str, where: Where, calls: Calls) -> None:
    for probs in (False, True):
        run_varlen(where, calls, layout, options_for(option, where.device), probs)


@pytest.mark.parametrize(
    ("layout", "option"), [("", "nanochat"), ("kvpacked_", "softcap"), ("qkvpacked_", "all")]
)
def test_varlen_by_kernels(layout: str, option: str, kernels: Where, calls: Calls) -> None:
    run_varlen(kernels, calls, layout, options_for(option, kernels.device), True)


@pytest.mark.parametrize("version", [3, 4])
@pytest.mark.parametrize("layout", ["packed", "padded"])
def test_varlen_with_gaps(layout: str, version: int, where: Where, calls: Calls) -> None:
    """By version 3's keywords, and by version 4, of a batch of one length too; gaps hold no numbers."""
    if layout == "padded" and version == 3:
        pytest.skip("which has cu_seqlens")
    options: dict[str, Any] = {"causal": True, "window_size": (4, 0)}
    used = LENGTHS
    room = [[n + s for s, n in enumerate(own)] for own in LENGTHS]
    if layout == "padded":
        room = [[max(own)] * len(own) for own in LENGTHS]
    starts = [torch.tensor([0, *own]).cumsum(0) for own in room]
    places = [
        torch.cat([torch.arange(n) + at for n, at in zip(own, ends, strict=False)]).to(where.device)
        for own, ends in zip(used, starts, strict=True)
    ]
    cu = [x.int().to(where.device) for x in starts]
    given = {
        f"seqused_{name}": torch.tensor(own, dtype=torch.int32, device=where.device)
        for name, own in zip("qk", used, strict=True)
    }
    D = where.sizes[2]
    leaves = [where.randn(sum(used[min(i, 1)]), H, D) for i, H in enumerate((4, 2, 2))]

    def run(*leaves: Tensor) -> tuple[Tensor, Tensor]:
        sides = [min(i, 1) for i in range(3)]
        q, k, v = (
            x.new_full((int(starts[side][-1]), *x.shape[1:]), math.nan).index_copy(0, places[side], x)
            for side, x in zip(sides, leaves, strict=True)
        )
        if version == 3:
            out, lse, _ = flash_attn.flash_attn_varlen_func(
                q, k, v, *cu, 9, 9, return_attn_probs=True, **options, **given
            )
        elif layout == "packed":
            named = dict(zip(("cu_seqlens_q", "cu_seqlens_k"), cu, strict=True))
            out, lse = flash_attn_4.flash_attn_varlen_func(
                q, k, v, **named, return_lse=True, **options, **given
            )
        else:
            batch = (x.unflatten(0, (4, -1)) for x in (q, k, v))
            out, lse = flash_attn_4.flash_attn_varlen_func(*batch, return_lse=True, **options, **given)
            out, lse = out.flatten(0, 1), lse.transpose(0, 1).flatten(1)
        gaps = torch.ones(q.shape[0], dtype=torch.bool, device=q.device)
        gaps[places[0]] = False
        assert (out[gaps] == 0).all() and lse[:, gaps].isinf().all()
        return out[places[0]], lse[:, places[0]]

    def definition(*leaves: Tensor) -> tuple[Tensor, Tensor]:
        rows = zip(*(x.split(used[min(i, 1)]) for i, x in enumerate(leaves)), strict=True)
        parts = [dense(*(x[None] for x in row), **options) for row in rows]
        return torch.cat([out[0] for out, _ in parts]), torch.cat([lse[0] for _, lse in parts], 1)

    compared(where, leaves, run, definition, math.inf if version == 3 else -math.inf)
    calls.assert_one("attention_varlen")


def test_used_keys_of_pages(where: Where) -> None:
    """Beside block_table they are how many keys a sequence has."""
    table = torch.tensor([[4, 1, 6], [0, 7, 3]], dtype=torch.int32, device=where.device)
    k, v = (where.randn(8, 4, 2, where.sizes[2]).detach() for _ in range(2))
    q = where.randn(5, 4, where.sizes[2]).detach()
    cu, room, cu_k = (
        torch.tensor(x, dtype=torch.int32, device=where.device)
        for x in ([0, 3, 5], [0, 12, 24], [0, 9, 15])
    )
    function = functools.partial(flash_attn.flash_attn_varlen_func, q, k, v, cu, block_table=table)
    wanted = function(cu_k, 3, 9, causal=True)
    assert torch.equal(function(room, 3, 12, causal=True, seqused_k=cu_k.diff()), wanted)
    with pytest.raises(ValueError, match=r"seqused_q is .*; it takes None beside block_table\. "):
        function(room, 3, 12, seqused_q=cu.diff())


# --- flash-attn-4 ---------------------------------------------------------------------------------

OPTIONS_4: dict[str, dict[str, Any]] = {
    "full": {},
    "causal": {"causal": True},
    "window": {"window_size": (3, 2)},
    "left": {"window_size": (4, None)},
    "right": {"window_size": (None, 1)},
    "no bounds": {"window_size": (-1, -1), "causal": True},
    "causal, right hidden": {"window_size": (3, -1), "causal": True},
    "softcap": {"softcap": 0.7, "causal": True, "softmax_scale": 0.2},
    "sink": {"learnable_sink": True, "window_size": (2, 0)},
    "hints": {"pack_gqa": True, "num_splits": 1},
}


@pytest.mark.parametrize("varlen", [False, True])
@pytest.mark.parametrize("option", OPTIONS_4)
def test_version_4(option: str, varlen: bool, where: Where, calls: Calls) -> None:
    options = dict(OPTIONS_4[option])
    sink = options.pop("learnable_sink", False)
    Sq, Sk, _ = where.sizes
    # Of keys fewer than queries: some rows are empty.
    leaves = leaves_apart(where, Sk, Sq, *(() if varlen else (1,)))
    leaves += [where.randn(4)] if sink else []
    plain = {n: x for n, x in options.items() if n not in ("pack_gqa", "num_splits")}
    cu = [torch.tensor([0, n], dtype=torch.int32, device=where.device) for n in (Sk, Sq)]

    def definition(q: Tensor, k: Tensor, v: Tensor, sink: Tensor | None = None) -> Any:
        q, k, v = (x if x.ndim == 4 else x[None] for x in (q, k, v))
        out, lse = dense(q, k, v, **plain, learnable_sink=sink)
        return (out[0], lse[0]) if varlen else (out, lse)

    for return_lse in (False, True):

        def run(q: Tensor, k: Tensor, v: Tensor, sink: Tensor | None = None) -> Any:
            given: Any = options | {"learnable_sink": sink, "return_lse": return_lse}  # noqa: B023
            if not varlen:
                return flash_attn_4.flash_attn_func(q, k, v, **given)
            given |= {"cu_seqlens_q": cu[0], "cu_seqlens_k": cu[1], "max_seqlen_q": Sk}
            return flash_attn_4.flash_attn_varlen_func(q, k, v, **given)

        compared(where, leaves, run, definition, -math.inf)
        calls.assert_one("attention_varlen" if varlen else "attention")
    with torch.no_grad():
        assert run(*leaves)[1] is not None


def test_version_4_takes_batches_where_sequences_could_lie_side_by_side(calls: Calls) -> None:
    x = torch.randn(2, 5, 4, 16)
    out, lse = flash_attn_4.flash_attn_varlen_func(x, x, x, causal=True, return_lse=True)
    expected = flash_attn_4.flash_attn_func(x, x, x, causal=True, return_lse=True)
    assert torch.equal(out, expected[0]) and torch.equal(lse, expected[1])
    assert calls.forward == {"attention": 2}


# --- caches ---------------------------------------------------------------------------------------


class CacheCase(NamedTuple):
    """new, queries: how many tokens k and v have, None for none, and q.  pages, rows, padding, rotary:
    whether there is a block_table, cache_batch_idx, cache_leftpad, tables (and whether interleaved)."""

    new: int | None
    queries: int
    options: dict[str, Any]
    pages: bool = False
    rows: bool = False
    padding: bool = False
    rotary: bool | None = None  # interleaved or not
    seqlens: str = "tensor"


CACHES = {
    "read": CacheCase(None, 2, {}),
    "full": CacheCase(None, 2, {}, seqlens="none"),
    "number": CacheCase(1, 1, {"causal": True}, seqlens="number"),
    "step": CacheCase(1, 1, {"causal": True}),
    "prompt": CacheCase(4, 4, {"causal": True}),
    "prompt, window": CacheCase(4, 4, {"causal": True, "window_size": (3, 0)}),
    "more queries than new keys": CacheCase(2, 4, {"causal": True}),
    "pages": CacheCase(3, 3, {"causal": True, "softcap": 1.0}, pages=True),
    "pages, read": CacheCase(None, 3, {"window_size": (2, 1)}, pages=True),
    "rows": CacheCase(2, 2, {"causal": True, "alibi_slopes": (0.5, 0.25, 0.1, 0.0)}, rows=True),
    "padding": CacheCase(2, 2, {"causal": True}, padding=True),
    "rows, padding": CacheCase(1, 1, {"softmax_scale": 0.4}, rows=True, padding=True),
    "interleaved": CacheCase(3, 3, {"causal": True}, rotary=True),
    "halves": CacheCase(3, 3, {"causal": True}, rotary=False),
    "window, turned": CacheCase(3, 3, {"window_size": (3, 1)}, rotary=False),
    "all at the end of the cache": CacheCase(3, 3, {}, rotary=True),
    "one, not causal": CacheCase(1, 1, {}, rotary=True),
    "turned, more queries": CacheCase(2, 5, {"causal": True}, rotary=False),
    "turned, padding": CacheCase(2, 2, {"causal": True}, padding=True, rotary=True),
    "turned, pages": CacheCase(2, 2, {"causal": True}, pages=True, rotary=False),
}


def run_cache(where: Where, calls: Calls, case: CacheCase) -> None:
    B, room, size, D, device = 2, 12, 4, where.sizes[2], where.device
    options: Any = dict(case.options)
    if "alibi_slopes" in options:
        options["alibi_slopes"] = torch.tensor(options["alibi_slopes"], device=device)
    randn = lambda *shape: where.randn(*shape).detach()  # noqa: E731
    table = torch.tensor([[4, 1, 6], [0, 7, 3]], dtype=torch.int32, device=device)
    rows = torch.tensor([2, 0], dtype=torch.int32, device=device) if case.rows else None
    shape = (8, size) if case.pages else (3 if case.rows else B, room)
    k_cache, v_cache = randn(*shape, 2, D), randn(*shape, 2, D)
    q = randn(B, case.queries, 4, D)
    k, v = (None, None) if case.new is None else (randn(B, case.new, 2, D), randn(B, case.new, 2, D))
    given: Any = torch.tensor([7, 3], dtype=torch.int32, device=device)
    lengths = given.tolist()
    if case.seqlens != "tensor":
        given = {"number": 5, "none": None}[case.seqlens]
        lengths = [5 if given is not None else room] * B
    padding = torch.tensor([2, 1], dtype=torch.int32, device=device) if case.padding else None
    cos, sin = (torch.randn(20, D // 4, device=device) for _ in range(2))

    def definition(dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """out, lse and the caches."""
        caches = [x.detach().clone() for x in (k_cache, v_cache)]
        outs, lses = [], []
        for b in range(B):
            n, end = lengths[b], lengths[b] + (case.new or 0)
            row = b if rows is None else int(rows[b])
            slots = torch.arange(room, device=device)
            at: Any = (table[row].long()[slots // size], slots % size) if case.pages else (row, slots)
            places = tuple(x[n:end] if isinstance(x, Tensor) else x for x in at)
            own = q[b].to(dtype)
            local = options.get("causal") or options.get("window_size")
            if k is not None and v is not None:
                keys = k[b].to(dtype)
                if case.rotary is not None:
                    new = torch.arange(n, end, device=device)
                    keys = turned(keys, cos, sin, new, case.rotary)
                    queries = torch.arange(n, n + case.queries, device=device)
                    queries = queries if local else torch.full_like(queries, n)
                    own = turned(own, cos, sin, queries, case.rotary)
                for cache, x in zip(caches, (keys, v[b]), strict=True):
                    cache[places] = x.to(cache.dtype)
            seen = tuple(
                x[0 if padding is None else int(padding[b]) : end] if isinstance(x, Tensor) else x
                for x in at
            )
            heads = (own, *(x[seen].to(dtype) for x in caches))
            out, lse = dense(*(x[None] for x in heads), **options)
            outs.append(out[0])
            lses.append(lse[0])
        return torch.stack(outs), torch.stack(lses), *caches

    exact, plain = definition(torch.float64), definition(where.dtype)
    places = (k_cache.data_ptr(), v_cache.data_ptr())
    tables = {} if case.rotary is None else {
        "rotary_cos": cos, "rotary_sin": sin, "rotary_interleaved": case.rotary
    }  # fmt: skip
    with torch.no_grad():
        out, lse = flash_attn.flash_attn_with_kvcache(
            q, k_cache, v_cache, k, v, cache_seqlens=given, cache_batch_idx=rows,
            cache_leftpad=padding, block_table=table if case.pages else None, **tables, **options,
            return_softmax_lse=True,
        )  # fmt: skip
    calls.assert_one("attention_with_kv_cache", backward=False)
    assert places == (k_cache.data_ptr(), v_cache.data_ptr())
    assert out.is_contiguous() and out.dtype == where.dtype
    names = ("out", "lse", "k_cache", "v_cache")
    made = (out, lse, k_cache, v_cache)
    got, want, eager = (dict(zip(names, x, strict=True)) for x in (made, exact, plain))
    assert_within_bound(got, want, eager, where.dtype)


@pytest.mark.parametrize("name", CACHES)
def test_cache(name: str, where: Where, calls: Calls) -> None:
    run_cache(where, calls, CACHES[name])


@pytest.mark.parametrize("name", ["pages", "rows, padding", "interleaved", "turned, more queries"])
def test_cache_by_kernels(name: str, kernels: Where, calls: Calls) -> None:
    run_cache(kernels, calls, CACHES[name])


def test_interleaved_is_the_default_and_lse_of_an_empty_row_is_infinite(where: Where) -> None:
    q, cache = where.randn(1, 3, 4, 16).detach(), where.randn(1, 8, 4, 16).detach()
    cos, sin = (torch.randn(8, 4, device=where.device) for _ in range(2))
    made = []
    for interleaved in ({}, {"rotary_interleaved": True}, {"rotary_interleaved": False}):
        own = cache.clone()
        flash_attn.flash_attn_with_kvcache(q, own, own.clone(), q, q, cos, sin, 2, **interleaved)
        made.append(own)
    assert torch.equal(made[0], made[1]) and not torch.equal(made[0], made[2])
    out, lse = flash_attn.flash_attn_with_kvcache(
        q, cache, cache, cache_seqlens=2, causal=True, return_softmax_lse=True
    )
    assert (out[:, 0] == 0).all() and (lse[..., 0] == math.inf).all() and not lse[..., 1:].isinf().any()


@pytest.mark.parametrize("version", [2, 4])
def test_varlen_with_pages(version: int, where: Where, calls: Calls) -> None:
    """Queries of any number, keys in pages."""
    device, D = where.device, where.sizes[2]
    table = torch.tensor([[4, 1, 6], [0, 7, 3]], dtype=torch.int32, device=device)
    k, v = (where.randn(8, 4, 2, D).detach() for _ in range(2))
    q = where.randn(5, 4, D).detach()
    cu_q, cu_k = (torch.tensor(x, dtype=torch.int32, device=device) for x in ([0, 3, 5], [0, 9, 15]))
    options: Any = {"causal": True, "window_size": (4, 0)}
    if version == 2:
        out, lse, _ = flash_attn.flash_attn_varlen_func(
            q, k, v, cu_q, cu_k, 3, 9, block_table=table, return_attn_probs=True, **options
        )
    else:
        out, lse = flash_attn_4.flash_attn_varlen_func(
            q, k, v, cu_seqlens_q=cu_q, seqused_k=cu_k.diff(), page_table=table, return_lse=True,
            **options,
        )  # fmt: skip
    calls.assert_one("attention_with_kv_cache", backward=False)
    got, want, eager = {"out": out, "lse": lse}, {}, {}
    for found, dtype in ((want, torch.float64), (eager, where.dtype)):
        parts = []
        for b, queries in enumerate(q.split([3, 2])):
            keys, values = (x[table[b].long()].flatten(0, 1)[: [9, 6][b]] for x in (k, v))
            parts.append(dense(*(x[None].to(dtype) for x in (queries, keys, values)), **options))
        found["out"] = torch.cat([out[0] for out, _ in parts])
        found["lse"] = torch.cat([lse[0] for _, lse in parts], 1)
    assert_within_bound(got, want, eager, where.dtype)
    if version == 4:  # as many queries of each sequence
        batch = where.randn(2, 3, 4, D).detach()
        out, none = flash_attn_4.flash_attn_varlen_func(
            batch, k, v, seqused_k=cu_k.diff(), page_table=table, **options
        )
        assert none is None
        for b in range(2):
            heads = (x[table[b].long()].flatten(0, 1)[: [9, 6][b]] for x in (k, v))
            want = dense(*(x[None].double() for x in (batch[b], *heads)), **options)[0]
            torch.testing.assert_close(out[b : b + 1].double(), want, rtol=2e-2, atol=2e-2)


# --- deterministic, compiled ----------------------------------------------------------------------


@pytest.mark.parametrize("layout", LAYOUTS)
def test_deterministic_is_for_that_call(layout: str, where: Where, calls: Calls) -> None:
    """attention(deterministic=True), which test_attention_deterministic.py has the meaning of."""
    given = LAYOUTS[layout][0](where, 9, 9, 2)
    cu = torch.tensor([0, 4, 9], dtype=torch.int32, device=where.device)
    places = (cu, 5) if layout == "qkvpacked_" else (cu, cu, 5, 5)
    for deterministic in (True, False):
        dense_function: Any = getattr(flash_attn, f"flash_attn_{layout}func")
        dense_function(*given, deterministic=deterministic).sum().backward()
        assert calls.options["deterministic"] is deterministic
        function: Any = getattr(flash_attn, f"flash_attn_varlen_{layout}func")
        function(*(x[0] for x in given), *places, deterministic=deterministic).sum().backward()
        assert calls.options["deterministic"] is deterministic
        if layout == "":
            q, k, v = given
            flash_attn_4.flash_attn_func(q, k, v, deterministic=deterministic)[0].sum().backward()
            assert calls.options["deterministic"] is deterministic
            options: Any = {"cu_seqlens_q": cu, "cu_seqlens_k": cu, "deterministic": deterministic}
            flash_attn_4.flash_attn_varlen_func(q[0], k[0], v[0], **options)[0].sum().backward()
            assert calls.options["deterministic"] is deterministic
    assert sum(calls.forward.values()) == sum(calls.backward.values()) == (8 if layout == "" else 4)


def test_traces_as_modded_nanogpt_calls_it(kernels: Where) -> None:
    """torch.compile(fullgraph=True), by keywords, a max_seqlen that is a tensor, queries and keys that
    are slices; other lengths compile nothing."""
    torch.compiler.reset()
    counter = CompileCounterWithBackend("aot_eager")

    @torch.compile(fullgraph=True, backend=counter)
    def layer(qkv: Tensor, cu: Tensor, longest: Tensor, window: int) -> Tensor:
        q, k, v = qkv.view(1, 12, 12, 16).chunk(3, dim=-2)
        return flash_attn.flash_attn_varlen_func(
            q[0], k[0], v[0], cu_seqlens_q=cu, cu_seqlens_k=cu, max_seqlen_q=longest,
            max_seqlen_k=longest, causal=True, softmax_scale=0.1, window_size=(window, 0),
        )  # fmt: skip

    for ends in ([0, 5, 12, 12], [0, 1, 2, 12]):
        qkv = kernels.randn(12, 192)
        cu = torch.tensor(ends, dtype=torch.int32, device=kernels.device)
        out = layer(qkv, cu, torch.tensor(12), 4)
        q, k, v = qkv.view(1, 12, 12, 16).chunk(3, dim=-2)
        lengths = cu.diff().tolist()
        rows = zip(*(x[0].split(lengths) for x in (q, k, v)), strict=True)
        options: Any = {"causal": True, "softmax_scale": 0.1, "window_size": (4, 0)}
        want = torch.cat([dense(*(x[None] for x in row), **options)[0][0] for row in rows])
        torch.testing.assert_close(out, want, rtol=1e-4, atol=1e-5)
        dout = torch.randn_like(out)
        got, expected = (torch.autograd.grad(x, qkv, dout)[0] for x in (out, want))
        torch.testing.assert_close(got, expected, rtol=1e-4, atol=1e-5)
    assert counter.frame_count == 1


def test_every_kind_of_call_traces(where: Where) -> None:
    torch.compiler.reset()
    heads = [x.detach() for x in leaves_apart(where, 6, 6, 2)]
    packed = where.randn(2, 6, 3, 4, where.sizes[2])
    caches = [where.randn(2, 12, 2, where.sizes[2]).detach() for _ in range(2)]
    seqlens = torch.tensor([3, 5], dtype=torch.int32, device=where.device)
    table = torch.randn(12, 4, device=where.device)
    turns: Any = {"rotary_cos": table, "rotary_sin": table, "causal": True, "window_size": (4, 0)}

    def every() -> list[Tensor]:
        q, k, v = heads
        own = [x.clone() for x in caches]
        return [
            *flash_attn.flash_attn_func(
                q, k, v, causal=True, softcap=2.0, return_attn_probs=True, num_splits=1
            )[:2],
            flash_attn.flash_attn_qkvpacked_func(packed, window_size=(3, -1), deterministic=True),
            *flash_attn_4.flash_attn_func(q, k, v, causal=True, return_lse=True),
            *flash_attn.flash_attn_with_kvcache(
                q, *own, k, v, cache_seqlens=seqlens, return_softmax_lse=True, **turns
            ),
            flash_attn.flash_attn_with_kvcache(q, *own, cache_seqlens=4, causal=True),
            *own,
        ]

    expected = every()
    for x, y in zip(torch.compile(every, fullgraph=True, backend="eager")(), expected, strict=True):
        torch.testing.assert_close(x, y)


PACKED: dict[str, tuple[bool, dict[str, Any]]] = {  # whether keys are new
    "read": (False, {"causal": True, "num_splits": 2}),
    "all keys": (False, {"window_size": (4, 1)}),
    "appended": (True, {"causal": True, "softcap": 2.0}),
    "turned": (True, {"causal": True, "rotary_interleaved": False}),
    "turned, window": (True, {"window_size": (3, 0), "rotary_interleaved": True}),
    "all at the end of the cache": (True, {"rotary_interleaved": False}),
    "turned, padding": (True, {"causal": True, "rotary_interleaved": True, "cache_leftpad": True}),
    "pages": (True, {"causal": True, "block_table": True}),
}


def run_packed_cache(where: Where, case: str) -> None:
    """Sequences of other numbers of tokens, side by side, and each by itself."""
    is_new, options = PACKED[case][0], dict(PACKED[case][1])
    counts, T, D, device = [3, 0, 2, 1], 7, where.sizes[2], where.device  # and one token of nobody
    cu = torch.tensor([0, 3, 3, 5, 6], dtype=torch.int32, device=device)
    seqlens = torch.tensor([7, 3, 9, 2], dtype=torch.int32, device=device)
    q, k, v = (where.randn(T, heads, D).detach() for heads in (4, 2, 2))
    shape, table = (4, 12), None
    if options.pop("block_table", False):
        shape = (12, 4)
        table = torch.randperm(12, device=device).int().view(4, 3)
    caches = [where.randn(*shape, 2, D).detach() for _ in "kv"]
    padding = None
    if options.pop("cache_leftpad", False):
        padding = torch.tensor([2, 1, 0, 1], dtype=torch.int32, device=device)
    if "rotary_interleaved" in options:
        tables = (torch.randn(20, D // 4, device=device) for _ in range(2))
        options |= zip(("rotary_cos", "rotary_sin"), tables, strict=True)
    names: Any = {"cu_seqlens_q": cu, "max_seqlen_q": 3}
    names |= {"cu_seqlens_k_new": cu} if is_new else {}
    options |= {"return_softmax_lse": True}
    kept = [x.clone() for x in caches]
    out, lse = flash_attn.flash_attn_with_kvcache(
        q,
        *kept,
        *((k, v) if is_new else ()),
        cache_seqlens=seqlens,
        cache_leftpad=padding,
        page_table=table,
        **options,
        **names,
    )
    assert out.is_contiguous() and out.shape == (T, 4, D) and lse.shape == (4, T)
    for b, n in enumerate(counts):
        at, row = slice(int(cu[b]), int(cu[b]) + n), slice(b, b + 1)
        own_rows = caches if table is not None else [x[row] for x in caches]
        if n == 0:
            continue
        one, one_lse = flash_attn.flash_attn_with_kvcache(
            q[None, at],
            *own_rows,
            *((k[None, at], v[None, at]) if is_new else ()),
            cache_seqlens=seqlens[row],
            cache_leftpad=None if padding is None else padding[row],
            block_table=None if table is None else table[row],
            **options,
        )
        near = 1e-5 if q.dtype == torch.float32 else 1.6e-2
        torch.testing.assert_close(out[at], one[0], rtol=near, atol=near)
        torch.testing.assert_close(lse[:, at], one_lse[0], rtol=1e-5, atol=1e-5)
    for x, y in zip(kept, caches, strict=True):  # where the calls above put the same keys
        torch.testing.assert_close(x, y)


@pytest.mark.parametrize("case", PACKED)
def test_a_cache_of_sequences_side_by_side(case: str, where: Where) -> None:
    run_packed_cache(where, case)


@pytest.mark.parametrize("case", ["read", "turned", "pages"])
def test_a_cache_of_sequences_side_by_side_by_kernels(case: str, kernels: Where) -> None:
    run_packed_cache(kernels, case)


def test_generates_as_nanochat_does(where: Where, calls: Calls) -> None:
    """A prompt and then tokens with the cache, by keywords, against training's function of them all."""
    B, S, D = 2, 9, where.sizes[2]
    q, k, v = (where.randn(B, S, H, D).detach() for H in (4, 2, 2))
    caches = torch.zeros(2, 3, B, 16, 2, D, device=where.device, dtype=where.dtype)  # of three layers
    seqlens = torch.zeros(B, dtype=torch.int32, device=where.device)
    for window in ((-1, 0), (4, 0)):
        seqlens.zero_()
        parts = []
        for new in (slice(0, 6), slice(6, 7), slice(7, 9)):
            parts.append(
                flash_attn.flash_attn_with_kvcache(
                    q[:, new], caches[0, 1], caches[1, 1], k=k[:, new], v=v[:, new],
                    cache_seqlens=seqlens, causal=True, window_size=window,
                )
            )  # fmt: skip
            seqlens += parts[-1].shape[1]
        whole = flash_attn.flash_attn_func(q, k, v, causal=True, window_size=window)
        atol = 1e-5 if where.dtype == torch.float32 else 2e-2
        torch.testing.assert_close(torch.cat(parts, 1), whole, rtol=0, atol=atol)
    assert calls.forward == {"attention_with_kv_cache": 6, "attention": 2}


# --- signatures and refusals ----------------------------------------------------------------------

COMMON = (
    "dropout_p=0.0, softmax_scale=None, causal=False, window_size=(-1, -1), softcap=0.0, "
    "alibi_slopes=None, deterministic=False, return_attn_probs=False"
)
PLACES = "cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k"
SIGNATURES = {
    "flash_attn_func": f"q, k, v, {COMMON}",
    "flash_attn_kvpacked_func": f"q, kv, {COMMON}",
    "flash_attn_qkvpacked_func": f"qkv, {COMMON}",
    "flash_attn_varlen_func": f"q, k, v, {PLACES}, {COMMON}, block_table=None",
    "flash_attn_varlen_kvpacked_func": f"q, kv, {PLACES}, {COMMON}",
    "flash_attn_varlen_qkvpacked_func": f"qkv, cu_seqlens, max_seqlen, {COMMON}",
    "flash_attn_with_kvcache": (
        "q, k_cache, v_cache, k=None, v=None, rotary_cos=None, rotary_sin=None, cache_seqlens=None, "
        "cache_batch_idx=None, cache_leftpad=None, block_table=None, softmax_scale=None, causal=False, "
        "window_size=(-1, -1), softcap=0.0, rotary_interleaved=True, alibi_slopes=None, num_splits=0, "
        "return_softmax_lse=False"
    ),
}
SIGNATURES_4 = {
    "flash_attn_func": (
        "q, k, v, qv=None, gather_kv_indices=None, softmax_scale=None, causal=False, "
        "window_size=(None, None), learnable_sink=None, softcap=0.0, num_splits=1, pack_gqa=None, "
        "deterministic=False, score_mod=None, score_mod_bwd=None, mask_mod=None, aux_tensors=None, "
        "aux_scalars=None, block_sparse_tensors=None, block_sparse_tensors_bwd=None, return_lse=False, "
        "gather_bwd_recompute_p=False, gather_bwd_token_chunk=None"
    ),
    "flash_attn_varlen_func": (
        "q, k, v, qv=None, cu_seqlens_q=None, cu_seqlens_k=None, max_seqlen_q=None, max_seqlen_k=None, "
        "min_seqlen_k=None, seqused_q=None, seqused_k=None, gather_kv_indices=None, page_table=None, "
        "softmax_scale=None, causal=False, window_size=(None, None), learnable_sink=None, softcap=0.0, "
        "num_splits=1, pack_gqa=None, deterministic=False, score_mod=None, score_mod_bwd=None, "
        "mask_mod=None, block_sparse_tensors=None, aux_tensors=None, aux_scalars=None, "
        "return_lse=False, scheduler_metadata=None, seqlen_k_per_split=None, "
        "disable_scheduler_metadata=False, gather_bwd_recompute_p=False, gather_bwd_token_chunk=None"
    ),
}


def written(function: Any) -> str:
    """Names, order and defaults."""
    parameters = inspect.signature(function).parameters.values()
    assert all(p.kind is p.POSITIONAL_OR_KEYWORD for p in parameters)
    return ", ".join(str(p.replace(annotation=p.empty)) for p in parameters)


@pytest.mark.parametrize(
    ("module", "original", "table"),
    [(flash_attn, "flash_attn", SIGNATURES), (flash_attn_4, "flash_attn.cute", SIGNATURES_4)],
)
def test_signatures(module: Any, original: str, table: dict[str, str]) -> None:
    """flash-attn 2.8.3's and flash-attn-4 4.0.0b36's; the originals', where they are installed."""
    assert set(module.__all__) == set(table)
    for name, signature in table.items():
        assert written(getattr(module, name)) == signature, name
    try:
        there = importlib.import_module(original)
    except ImportError:
        return
    for name in table:
        assert written(getattr(there, name)) == table[name], name


X, KV, QKV = torch.zeros(1, 4, 2, 8), torch.zeros(1, 4, 2, 2, 8), torch.zeros(1, 4, 3, 2, 8)
CU = torch.tensor([0, 1, 4], dtype=torch.int32)
INTS = torch.tensor([1], dtype=torch.int32)
FIRST: dict[str, tuple[Any, ...]] = {
    "flash_attn_func": (X, X, X),
    "flash_attn_kvpacked_func": (X, KV),
    "flash_attn_qkvpacked_func": (QKV,),
    "flash_attn_varlen_func": (X[0], X[0], X[0], CU, CU, 3, 3),
    "flash_attn_varlen_kvpacked_func": (X[0], KV[0], CU, CU, 3, 3),
    "flash_attn_varlen_qkvpacked_func": (QKV[0], CU, 3),
    "flash_attn_with_kvcache": (X, X, X),
}
NOT_TAKEN: dict[str, Any] = {
    "alibi_slopes": torch.zeros(1, 2),
    "q_descale": torch.ones(1, 2),
    "k_descale": torch.ones(1, 2),
    "v_descale": torch.ones(1, 2),
    "qv": X,
    "attention_chunk": 128,
    "rotary_seqlens": INTS,
    "num_heads_q": 2,
}


@pytest.mark.parametrize("name", FIRST)
def test_refuses_by_name_what_is_not_taken(name: str, calls: Calls) -> None:
    function = getattr(flash_attn, name)
    for argument, x in NOT_TAKEN.items():
        with pytest.raises(NotImplementedError, match=rf"^{name}: {argument} is .*; it takes "):
            function(*FIRST[name], **{argument: x})
    assert not calls.forward
    # Version 3's keywords at its defaults, and hints for its kernels, change nothing.
    function(*FIRST[name], qv=None, k_descale=None, attention_chunk=0, pack_gqa=True, sm_margin=2)
    assert sum(calls.forward.values()) == 1
    with pytest.raises(TypeError, match=r"unexpected keyword argument 'no_such'; it takes q"):
        function(*FIRST[name], no_such=1)


@pytest.mark.parametrize("name", [n for n in FIRST if n != "flash_attn_with_kvcache"])
def test_dropout(name: str, calls: Calls) -> None:
    """Torch's generator says what is dropped; of a cache nothing is."""
    function = getattr(flash_attn, name)
    given = [
        torch.randn(x.shape) if x.is_floating_point() else x for x in map(torch.as_tensor, FIRST[name])
    ]
    outs = []
    for seed in (3, 3, 4):
        torch.manual_seed(seed)
        outs.append(function(*given, dropout_p=0.5))
    assert torch.equal(outs[0], outs[1]) and not torch.equal(outs[0], outs[2])
    assert sum(calls.forward.values()) == 3
    with pytest.raises(ValueError, match=rf"^{name}: dropout_p is 2; it takes a number from 0 to 1"):
        function(*given, dropout_p=2)
    if name == "flash_attn_varlen_func":
        table = {"block_table": torch.zeros(2, 1, dtype=torch.int32)}
        with pytest.raises(NotImplementedError, match=rf"^{name}: dropout_p is 0.5; .* block_table"):
            function(*given, dropout_p=0.5, **table)


@pytest.mark.parametrize("varlen", [False, True])
def test_dropout_beside_other_options(varlen: bool, calls: Calls) -> None:
    """A probability is left out, or divided by the share that is kept; version 4 has no dropout."""
    q, v = torch.randn(1, 8, 2, 8), torch.eye(8)[None, :, None].expand(1, 8, 2, 8).contiguous()
    cu = torch.tensor([0, 8], dtype=torch.int32)
    given = [x[0] for x in (q, q, v)] + [cu, cu, 8, 8] if varlen else [q, q, v]
    name = "flash_attn_varlen_func" if varlen else "flash_attn_func"
    function = getattr(flash_attn, name)
    for options in ({"softcap": 2.0}, {"alibi_slopes": torch.rand(2)}, {"window_size": (3, 0)}):
        options["causal"] = True
        p = function(*given, **options)
        torch.manual_seed(5)
        dropped = function(*given, dropout_p=0.5, **options)
        kept = dropped != 0
        torch.testing.assert_close(dropped, torch.where(kept, 2 * p, 0))
        assert 0 < kept.sum() < (p > 0).sum()


def test_takes_version_3s_keywords_of_a_cache(calls: Calls) -> None:
    """page_table is block_table; others are taken where they say nothing."""
    q, cache = torch.randn(1, 1, 2, 8), torch.randn(4, 4, 2, 8)
    table, names = torch.tensor([[3, 1]], dtype=torch.int32), ("cu_seqlens_q", "max_seqlen_q")
    own = (q, cache, cache)
    want = flash_attn.flash_attn_with_kvcache(*own, cache_seqlens=6, block_table=table)
    given: Any = dict.fromkeys((*names, "cu_seqlens_k_new", "rotary_seqlens"))
    out = flash_attn.flash_attn_with_kvcache(*own, cache_seqlens=6, page_table=table, **given)
    assert torch.equal(out, want)
    flash_attn.flash_attn_with_kvcache(q, cache[:1], cache[:1], page_table=None)
    with pytest.raises(TypeError, match="unexpected keyword argument 'page_table'; it takes q"):
        flash_attn.flash_attn_with_kvcache(*own, page_table=table, block_table=table)


def test_new_keys_are_of_the_queries_tokens() -> None:
    """cu_seqlens_k_new is cu_seqlens_q, or has the same numbers where they can be read."""
    q, cache, k = X[0], torch.zeros(2, 8, 2, 8), torch.randn(4, 2, 8)
    call = functools.partial(
        flash_attn.flash_attn_with_kvcache, q, cache, cache.clone(), cache_seqlens=0
    )
    call(k, k, cu_seqlens_q=CU, cu_seqlens_k_new=CU.clone())
    assert torch.equal(cache[1, :3], k[1:4])
    with pytest.raises(
        NotImplementedError, match=r"^flash_.*: cu_seqlens_k_new is .*cu_seqlens_q itself"
    ):
        call(k, k, cu_seqlens_q=CU, cu_seqlens_k_new=CU.clamp(max=2))
    with pytest.raises(ValueError, match=r"cu_seqlens_k_new is .*; it takes None without cu_seqlens_q"):
        flash_attn.flash_attn_with_kvcache(X, X, X, cu_seqlens_k_new=CU)
    with pytest.raises(ValueError, match=r"^flash_attn_with_kvcache: k is of shape \[3, 2, 8\]"):
        call(k[:3], k[:3], cu_seqlens_q=CU)
    with pytest.raises(ValueError, match=r"cu_seqlens_q is empty; it takes int32 \[B \+ 1\]"):
        call(cu_seqlens_q=CU[:0])
    with pytest.raises(TypeError, match=r"^flash_attn_with_kvcache: cu_seqlens_q is of dtype"):
        call(cu_seqlens_q=CU.long())


HOOKS = ("score_mod", "score_mod_bwd", "mask_mod", "aux_tensors", "aux_scalars", "block_sparse_tensors")


@pytest.mark.parametrize("name", SIGNATURES_4)
def test_version_4_refuses_by_name_what_is_not_taken(name: str, calls: Calls) -> None:
    function = getattr(flash_attn_4, name)
    given = dict.fromkeys(HOOKS, (1,)) | {"qv": X, "gather_kv_indices": INTS}
    given |= {"gather_bwd_recompute_p": True, "gather_bwd_token_chunk": 64}
    if name == "flash_attn_func":
        given |= {"block_sparse_tensors_bwd": (1,)}
    else:
        given |= {"seqlen_k_per_split": 64}
    for argument, x in given.items():
        with pytest.raises(NotImplementedError, match=rf"^{name}: {argument} is .*; it takes "):
            function(X, X, X, **{argument: x})
    with pytest.raises(ValueError, match=r"window_size is \[3, -1\]; it takes bounds of 0 or more"):
        function(X, X, X, window_size=(3, -1))
    assert not calls.forward


CACHE, FAR = torch.zeros(2, 8, 2, 8), torch.tensor([9, 0], dtype=torch.int32)
Y, WIDE = torch.zeros(2, 4, 2, 8), torch.zeros(9, 8)
CACHED = (Y, CACHE, CACHE)
WRONG: dict[str, tuple[str, tuple[Any, ...], dict[str, Any], type[Exception]]] = {
    "q": ("flash_attn_func", (X[0], X, X), {}, ValueError),
    "v": ("flash_attn_func", (X, X, None), {}, TypeError),
    "window_size": ("flash_attn_func", (X, X, X, 0.0, None, False, 3), {}, TypeError),
    "window_size ": ("flash_attn_func", (X, X, X), {"window_size": (0.5, 0)}, TypeError),
    "softcap": ("flash_attn_func", (X, X, X), {"softcap": "1"}, TypeError),
    "softmax_scale": ("flash_attn_func", (X, X, X), {"softmax_scale": math.inf}, ValueError),
    "causal": ("flash_attn_func", (X, X, X), {"causal": "yes"}, TypeError),
    "deterministic": ("flash_attn_func", (X, X, X), {"deterministic": 3}, TypeError),
    "return_attn_probs": ("flash_attn_func", (X, X, X), {"return_attn_probs": 2}, TypeError),
    "kv": ("flash_attn_kvpacked_func", (X, QKV), {}, ValueError),
    "qkv": ("flash_attn_qkvpacked_func", (KV,), {}, ValueError),
    "qkv ": ("flash_attn_varlen_qkvpacked_func", (QKV, CU, 3), {}, ValueError),
    "cu_seqlens": ("flash_attn_varlen_qkvpacked_func", (QKV[0], CU.long(), 3), {}, TypeError),
    "block_table": (
        "flash_attn_varlen_func", (X[0], CACHE, CACHE, CU, CU, 3, 3), {"block_table": CU}, ValueError
    ),
    "k_cache": ("flash_attn_with_kvcache", (X, CACHE[0], CACHE), {}, ValueError),
    "v ": ("flash_attn_with_kvcache", (X, CACHE, CACHE, X), {"cache_seqlens": 1}, TypeError),
    "cache_seqlens": ("flash_attn_with_kvcache", (X, CACHE, CACHE, X, X), {}, ValueError),
    "cache_seqlens ": ("flash_attn_with_kvcache", (X, CACHE, CACHE), {"cache_seqlens": 9}, ValueError),
    "cache_seqlens  ": (
        "flash_attn_with_kvcache", (X, CACHE, CACHE), {"cache_seqlens": INTS.long()}, TypeError
    ),
    "cache_leftpad": ("flash_attn_with_kvcache", (X, CACHE, CACHE), {"cache_leftpad": 1}, TypeError),
    "cache_batch_idx": (
        "flash_attn_with_kvcache", (X, CACHE, CACHE), {"cache_batch_idx": CU}, ValueError
    ),
    "block_table ": ("flash_attn_with_kvcache", (X, CACHE, CACHE), {"block_table": INTS}, ValueError),
    # What the functions below refuse has the doors' names.
    "cache_seqlens   ": ("flash_attn_with_kvcache", CACHED, {"cache_seqlens": FAR}, ValueError),
    "cache_leftpad ": ("flash_attn_with_kvcache", CACHED, {"cache_leftpad": FAR}, ValueError),
    "cache_batch_idx ": ("flash_attn_with_kvcache", CACHED, {"cache_batch_idx": FAR}, ValueError),
    "block_table  ": ("flash_attn_with_kvcache", CACHED, {"block_table": FAR[:, None]}, ValueError),
    "rotary_cos ": ("flash_attn_with_kvcache", (*CACHED, Y, Y, WIDE, WIDE, 1), {}, ValueError),
    "k ": ("flash_attn_with_kvcache", (*CACHED, Y.mT, Y), {"cache_seqlens": 1}, ValueError),
    "v  ": ("flash_attn_with_kvcache", (*CACHED, Y, Y[:, 1:]), {"cache_seqlens": 1}, ValueError),
    "kv ": ("flash_attn_kvpacked_func", (X, KV.half()), {}, TypeError),
    "cu_seqlens ": ("flash_attn_varlen_qkvpacked_func", (QKV[0], CU + 1, 3), {}, ValueError),
    "cu_seqlens_k": (
        "flash_attn_varlen_func", (X[0], *CACHED[1:], CU, 9 * CU.clamp(max=1), 3, 3),
        {"block_table": INTS[:, None].expand(2, 1)}, ValueError,
    ),
    "rotary_cos": (
        "flash_attn_with_kvcache", (X, CACHE[:1], CACHE[:1]), {"rotary_cos": X, "rotary_sin": X},
        ValueError,
    ),
    "rotary_sin": (
        "flash_attn_with_kvcache", (X, CACHE, CACHE, X, X), {"rotary_cos": X, "cache_seqlens": 1},
        ValueError,
    ),
}  # fmt: skip


@pytest.mark.parametrize("argument", WRONG)
def test_errors_name_the_argument(argument: str, calls: Calls) -> None:
    name, args, options, kind = WRONG[argument]
    with pytest.raises(kind, match=rf"^{name}: {argument.strip()} is .*; it takes .*\. .*\.$"):
        getattr(flash_attn, name)(*args, **options)
    assert not calls.forward


def test_advice_has_the_doors_names() -> None:
    with pytest.raises(ValueError, match=r"k_cache is of 2 rows; .* Pass cache_batch_idx to say which"):
        flash_attn.flash_attn_with_kvcache(X, CACHE, CACHE)
    with pytest.raises(ValueError, match=r"cache_batch_idx is .* takes an int32 tensor \[1\]\. "):
        flash_attn.flash_attn_with_kvcache(X, CACHE, CACHE, cache_batch_idx=FAR)
    with pytest.raises(ValueError, match=r"block_table is .* takes an int32 tensor \[1, n\]\. "):
        flash_attn.flash_attn_with_kvcache(X, CACHE, CACHE, block_table=FAR[:, None])


def test_version_4_names_the_argument() -> None:
    for options, argument in (
        ({"cu_seqlens_k": CU}, "cu_seqlens_q"),
        ({"page_table": INTS[None]}, "seqused_k"),
        ({"page_table": INTS[None], "seqused_k": INTS, "cu_seqlens_k": CU}, "cu_seqlens_k"),
        ({"page_table": INTS[None], "seqused_k": INTS}, "page_table"),
        ({"page_table": INTS[None] - 1, "seqused_k": INTS + 8}, "seqused_k"),
        ({"page_table": INTS[None], "seqused_k": INTS, "seqused_q": INTS}, "seqused_q"),
        ({"seqused_q": INTS + 8}, "seqused_q"),
        ({"learnable_sink": X[0, 0, 0]}, "learnable_sink"),
    ):
        with pytest.raises((TypeError, ValueError), match=rf"^flash_attn_varlen_func: {argument} is "):
            flash_attn_4.flash_attn_varlen_func(X, X, X, **options)


def test_a_cache_has_no_gradient() -> None:
    q = torch.zeros(1, 1, 2, 8, requires_grad=True)
    with pytest.raises(ValueError, match=r"q is a tensor that requires grad.* under torch.no_grad"):
        flash_attn.flash_attn_with_kvcache(q, CACHE[:1], CACHE[:1])


@pytest.mark.parametrize("module", [flash_attn, flash_attn_4])
def test_examples_run(module: Any) -> None:
    names = {"torch": torch, "flash_attn": flash_attn, "flash_attn_4": flash_attn_4}
    runner = doctest.DocTestRunner()
    for name in module.__all__:
        text = inspect.getdoc(getattr(module, name)) or ""
        example = doctest.DocTestParser().get_doctest(text, dict(names), name, None, None)
        assert example.examples, name
        runner.run(example)
    assert not runner.failures


def test_documentation(calls: Calls) -> None:
    """Its example runs, its lines import what there is, and it has all that is refused."""
    run_examples("flash-attn")
    assert calls.forward == {"attention": 1, "attention_with_kv_cache": 3}
    assert calls.backward == {"attention": 1}
    text = section("flash-attn")
    for line in re.findall(r"\| `(from flashproto[^`]*)` \|", text):
        exec(line, {})
    refused = {*flash_attn_options.NOT_TAKEN, "dropout_p", "alibi_slopes"}
    rows = re.findall(r"^\| (`.*?) \|", text.split("never ignored:")[1], re.MULTILINE)
    assert set(re.findall(r"`(\w+)`", " ".join(rows))) == refused
    assert all(f"`{name}`" in text for name in (*flash_attn_options.NO_PART, *SIGNATURES_4))


# --- parts of the keys --------------------------------------------------------------------------------


def test_num_splits_reaches_attention(monkeypatch: pytest.MonkeyPatch) -> None:
    """By version 2's function of a cache, version 3's keyword, and version 4's argument; 0 is None."""
    given: list[Any] = []

    def noting(function: Any) -> Any:
        def call(*args: Any, **options: Any) -> Any:
            given.append(options["num_splits"])
            return function(*args, **options)

        return call

    for module in (flash_attn_options, flash_attn_kvcache):
        for name in ("attention", "attention_with_kv_cache"):
            if hasattr(module, name):
                monkeypatch.setattr(module, name, noting(getattr(module, name)))
    q = torch.randn(1, 3, 2, 8)
    plain = flash_attn.flash_attn_func(q, q, q)
    for n in (0, 1, 4):
        assert torch.equal(flash_attn_4.flash_attn_func(q, q, q, num_splits=n)[0], plain)
        flash_attn.flash_attn_with_kvcache(q, q, q, num_splits=n)
        assert torch.equal(flash_attn.flash_attn_func(q, q, q, num_splits=n), plain)
    assert given == [None, None, None, None, 1, 1, 1, 4, 4, 4]
    with pytest.raises(ValueError, match=r"^flash_attn_func: num_splits is -1; it takes 0, to let"):
        flash_attn_4.flash_attn_func(q, q, q, num_splits=-1)
    with pytest.raises(TypeError, match=r"^flash_attn_func: num_splits is 1.5; it takes 0"):
        flash_attn_4.flash_attn_func(q, q, q, num_splits=1.5)


LIFTED = {"num_splits", "cu_seqlens_q", "cu_seqlens_k_new", "max_seqlen_q", "seqused_q", "seqused_k"}


def test_what_is_not_taken_yet_is_listed_once_and_refused_somewhere() -> None:
    """What attention learned is in no list: parts of keys, caches of sequences side by side, gaps."""
    assert not LIFTED & {*flash_attn_options.NOT_TAKEN, *NOT_YET}
    sources = Path(flash_attn.__file__).parent.rglob("*.py")
    text = "".join(path.read_text() for path in sources if path.name != "refusals.py")
    unused = [row for row in NOT_YET if f'"{row}"' not in text]
    assert not unused
    assert {row for _, row in flash_attn_options.NOT_TAKEN.values()} <= {*NOT_YET}
    taken = {"num_splits": 3, "cu_seqlens_q": None, "cu_seqlens_k_new": None, "max_seqlen_q": None}
    flash_attn.flash_attn_with_kvcache(X, X, X, **taken)
    flash_attn.flash_attn_func(X, X, X, num_splits=3)
    flash_attn.flash_attn_varlen_func(*FIRST["flash_attn_varlen_func"], num_splits=3)
