"""Gaps between sequences, seqused_q and seqused_k: nothing reads them, and results are those of the
same sequences without gaps."""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from attention_problem import Problem
from rows import poison
from torch import Tensor
from variant_problem import (
    Call,
    assert_within_bound,
    drawn,
    exact_and_eager,
    make_packed,
    starts,
    tokens_of_gapped,
    with_gaps,
)

import flashproto
from flashproto import reference

# Of queries and of keys, those that count and those behind them.
USED = [(5, 3), (0, 7), (70, 90), (4, 0), (33, 20), (1, 1)]
GAPS = [(2, 4), (3, 0), (10, 30), (0, 5), (40, 1), (0, 0)]
NO_GAPS = [(0, 0)] * len(USED)
BEHIND = (3, 2)
GARBAGE = (math.nan, math.inf)
HEADS = Problem(torch.float32, 1, 4, 2, 70, 90, 16, 16, causal=False)
SIDES = {"both": (True, True), "queries": (True, False), "keys": (False, True)}
# Of each result and gradient whose tokens it has, 0 for queries, 1 for keys; in which dimension; and
# what it is in gaps.
OF_TOKENS = {
    "out": (0, 0, 0.0),
    "lse": (0, 1, -math.inf),
    "max_score": (0, 1, -math.inf),
    "entropy": (0, 1, 0.0),
    "dq": (0, 0, 0.0),
    "dk": (1, 0, 0.0),
    "dv": (1, 0, 0.0),
}
SETS = (
    (),
    ("causal",),
    ("window", "softcap", "sinks"),
    ("causal", "sinks", "alibi", "max_score", "entropy"),
    ("first_keys", "relative_bias"),
    ("causal", "dropout"),
)


def one_side(gaps: Sequence[tuple[int, int]], side: str) -> list[tuple[int, int]]:
    q, k = SIDES[side]
    return [(a * q, b * k) for a, b in gaps]


def results(
    call: Call,
    given: Sequence[Tensor],
    whole: Sequence[tuple[int, int]],
    used: dict[str, Tensor],
    impl: str | None,
) -> dict[str, Tensor]:
    """What attention_varlen returns, and gradients; given: q, k, v, and gradients of out, lse and
    the entropy."""
    inputs = [x.detach().clone().requires_grad_() for x in given[:3]]
    cu, device = starts(whole, str(inputs[0].device)), inputs[0].device
    used = {name: x.to(device) for name, x in used.items()}
    options = call.options | used | {"impl": impl, "return_lse": impl != "torch"}
    made = flashproto.attention_varlen(*inputs, *cu, **options)
    made = made if isinstance(made, tuple) else (made,)
    named = dict(zip(("out", "lse", *call.aux), made, strict=False))
    leaves = dict(zip(("dq", "dk", "dv"), inputs, strict=True))
    leaves |= {f"d{name}": x for name, x in call.parameters.items() if x.requires_grad}
    upstream = dict(zip(("out", "lse", "entropy"), given[3:], strict=False))
    outputs = [name for name in upstream if name in named]
    grads = torch.autograd.grad(
        [named[n] for n in outputs], [*leaves.values()], [upstream[n] for n in outputs]
    )
    return {n: x.detach() for n, x in named.items()} | dict(zip(leaves, grads, strict=True))


def check(
    names: Sequence[str], side: str, impl: str, device: str, seed: int, problem: Problem = HEADS
) -> None:
    """Beside gaps of garbage each token has the bits that it has without them, dq of "hopper" but for
    the order of its sums, dq and dk under the interpreter but for float32's rounding; in gaps there is
    what there should be; all is within the bound of float64."""
    generator = random.Random(seed)
    call, gaps = drawn(generator, problem, names, device), one_side(GAPS, side)
    inputs, (dout, dlse) = make_packed(call, USED, BEHIND, device)
    T = sum(n for n, _ in USED)
    dlse = dlse.clone()
    if "sinks" not in names:  # lse is -inf there, without a gradient
        dlse[:, T:] = 0
    with torch.no_grad():
        first = flashproto.attention_varlen(
            *inputs, *starts(USED, device), **call.options, return_lse=True, impl="reference"
        )
    dlse = torch.where(first[1].isinf(), 0.0, dlse)
    clean = [*inputs, dout, dlse, dlse.flip(-1)]  # as with_gradients of variant_problem.py has it
    wanted = results(call, clean, USED, {}, impl)
    at = [tokens_of_gapped(USED, gaps, BEHIND, n) for n in (0, 1)]
    places = ((0, 0), (1, 0), (1, 0), (0, 0), (0, 1), (0, 1))
    spread = [
        with_gaps(x.detach(), at[n].to(device), dim, generator.choice(GARBAGE))
        for x, (n, dim) in zip(clean, places, strict=True)
    ]
    whole = [(a + c, b + d) for (a, b), (c, d) in zip(USED, gaps, strict=True)]
    used = {
        f"seqused_{name}": torch.tensor([n[i] for n in USED], dtype=torch.int32)
        for i, name in enumerate("qk")
        if SIDES[side][i]
    }
    got = results(call, spread, whole, used, impl)
    assert got.keys() == wanted.keys()
    for name, x in wanted.items():
        if name not in OF_TOKENS:  # whose sums are over all rows, in another order
            torch.testing.assert_close(got[name], x, rtol=1e-2, atol=1e-3 * x.abs().max().item())
            continue
        n, dim, of_gaps = OF_TOKENS[name]
        own = got[name].index_select(dim, at[n].to(device))
        others = torch.ones(got[name].shape[dim], dtype=torch.bool)
        others[at[n]] = False
        assert (got[name].movedim(dim, 0)[others.to(device)] == of_gaps).all(), name
        if name == "dq" and impl == "hopper":
            torch.testing.assert_close(own, x, rtol=2e-2, atol=1e-2)
        elif name in ("dq", "dk") and impl == "triton" and device == "cpu":
            # Delta is a product of tiles of 16 rows, whose rows some processors' BLAS rounds by place.
            torch.testing.assert_close(own, x, rtol=1e-5, atol=1e-6)
        else:
            assert torch.equal(own, x), name
        got[name] = own
    if impl == "torch":
        return
    exact, plain = exact_and_eager(call, inputs, (dout, dlse), USED)
    assert_within_bound(got, {n: exact[n] for n in got}, {n: plain[n] for n in got}, call)


@pytest.mark.parametrize("side", SIDES)
@pytest.mark.parametrize("names", SETS, ids="+".join)
def test_gaps_on_reference(names: tuple[str, ...], side: str, seed: int) -> None:
    check(names, side, "reference", "cpu", seed)


@pytest.mark.parametrize("side", SIDES)
@pytest.mark.parametrize("names", [(), ("causal",), ("window",), ("first_keys",)], ids="+".join)
def test_gaps_on_torch(names: tuple[str, ...], side: str, seed: int) -> None:
    check(names, side, "torch", "cpu", seed)


CASES = [*itertools.product(SETS, ["both"]), (SETS[2], "queries"), (SETS[2], "keys")]


@pytest.mark.slow
@pytest.mark.parametrize(("names", "side"), CASES, ids=str)
def test_gaps_in_kernels(
    names: tuple[str, ...], side: str, device: str, seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whose memory begins as NaN: what they leave as it is shows."""
    poison(monkeypatch)
    check(names, side, "triton", device, seed)


@pytest.mark.slow
@pytest.mark.parametrize("names", [("causal", "sinks"), ("alibi",)], ids="+".join)
def test_gaps_in_kernels_of_16_bits(
    names: tuple[str, ...], device: str, seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    poison(monkeypatch)
    check(names, "both", "triton", device, seed, replace(HEADS, dtype=torch.bfloat16))


@pytest.mark.gpu
@pytest.mark.parametrize("side", SIDES)
@pytest.mark.parametrize(
    "names",
    [
        (),
        ("causal",),
        ("window", "softcap", "sinks"),
        ("causal", "sinks", "max_score"),
        ("first_keys",),
    ],
    ids="+".join,
)
@pytest.mark.parametrize("D", [64, 128, 256])
def test_gaps_on_hopper(
    D: int,
    names: tuple[str, ...],
    side: str,
    seed: int,
    hopper: None,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    poison(monkeypatch)
    problem = replace(HEADS, dtype=torch.bfloat16, D=D, Dv=D)
    check(names, side, "hopper", "cuda", seed, problem)


def check_all_gaps(impl: str, device: str, dtype: torch.dtype) -> None:
    """No token counts, of queries, of keys, or of both."""
    cu = starts([(70, 90), (5, 200)], device)
    none = torch.zeros(2, dtype=torch.int32, device=device)
    all_of = [x.diff() for x in cu]
    for used_q, used_k in ((none, none), (none, all_of[1]), (all_of[0], none)):
        q, k = (
            torch.randn(T, H, 64, device=device, dtype=dtype).requires_grad_()
            for T, H in ((75, 2), (290, 1))
        )
        used = {"seqused_q": used_q, "seqused_k": used_k}
        out, lse = flashproto.attention_varlen(
            q, k, k, *cu, **used, causal=True, return_lse=True, impl=impl
        )
        assert not out.any() and (lse == -math.inf).all()
        assert not any(x.any() for x in torch.autograd.grad(out, (q, k), torch.randn_like(out)))


@pytest.mark.parametrize("impl", ["reference", "triton"])
def test_nothing_but_gaps(impl: str, device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if impl == "triton":
        poison(monkeypatch)
    check_all_gaps(impl, device, torch.float32)


@pytest.mark.gpu
def test_nothing_but_gaps_on_hopper(hopper: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Programs find one slot, without tokens."""
    poison(monkeypatch)
    check_all_gaps("hopper", "cuda", torch.bfloat16)


@pytest.mark.few(2)
@pytest.mark.parametrize("impl", ["reference", "torch", "triton"])
def test_all_tokens_used_is_without(impl: str, device: str, seed: int) -> None:
    """The same bits of all results and gradients."""
    if impl == "torch" and device != "cpu":
        pytest.skip("off a CPU it takes no sequences under a mask")
    names = ("causal",) if impl == "torch" else ("causal", "softcap", "sinks", "alibi", "entropy")
    call = drawn(random.Random(seed), HEADS, names, device)
    inputs, gradients = make_packed(call, USED, BEHIND, device)
    dlse = gradients[1] if "sinks" in names else torch.zeros_like(gradients[1])
    given = [*inputs, gradients[0], dlse]
    used = {
        f"seqused_{name}": torch.tensor([n[i] for n in USED], dtype=torch.int32)
        for i, name in enumerate("qk")
    }
    wanted, got = (results(call, given, USED, more, impl) for more in ({}, used))
    assert all(torch.equal(got[name], x) for name, x in wanted.items())


@pytest.mark.parametrize(
    "names", [(), ("causal", "sinks", "alibi", "entropy"), ("window", "softcap")], ids="+".join
)
@pytest.mark.parametrize("side", SIDES)
def test_lengths_that_cannot_be_read(names: tuple[str, ...], side: str, seed: int) -> None:
    """One product of all sequences, as under torch.compile and torch.func, is each by itself."""
    generator = random.Random(seed)
    call = drawn(generator, HEADS, names, "cpu")
    parameters = {n: x.detach().double().requires_grad_() for n, x in call.parameters.items()}
    left, right = call.options.get("window", (None, None))
    options: dict[str, Any] = {"causal": "causal" in names or right is not None, "left": left}
    if right is not None:
        options |= {"causal_offset": right, "left": left + right}
    options |= {"softcap": call.options.get("softcap"), "return_aux": True, **parameters}
    gaps = one_side(GAPS, side)
    whole = [(a + c, b + d) for (a, b), (c, d) in zip(USED, gaps, strict=True)]
    cu = starts(whole, "cpu")
    T, Tk = (sum(n[side] for n in whole) + BEHIND[side] for side in (0, 1))
    shapes = (4, T, 16), (2, Tk, 16), (2, Tk, 16), (4, T, 16), (4, T)
    *inputs, dout, dlse = (torch.randn(1, *shape, dtype=torch.float64) for shape in shapes)
    at = [tokens_of_gapped(USED, gaps, BEHIND, n) for n in (0, 1)]
    for x, n in (*zip(inputs, (0, 1, 1), strict=True), (dout, 0), (dlse[..., None], 0)):
        others = torch.ones(x.shape[2], dtype=torch.bool)
        others[at[n]] = False
        x[:, :, others] = generator.choice(GARBAGE)
    used = [
        torch.tensor([n[i] for n in USED], dtype=torch.int32) if SIDES[side][i] else None
        for i in (0, 1)
    ]

    def apart(*x: Tensor) -> tuple[Tensor, ...]:
        moved = options.get("causal_offset", 0) + x[1].shape[2] - x[0].shape[2]
        return reference.attention(*x, **options | {"causal_offset": moved})

    lengths = [x if x is None else x.tolist() for x in (*cu, *used)]
    named = {"cu_seqlens_q": cu[0], "cu_seqlens_k": cu[1], "seqused_q": used[0], "seqused_k": used[1]}
    found = []
    for function in (
        lambda *x: reference.each_sequence(apart, *x, *lengths),
        lambda *x: reference.attention(*x, **named, **options),
    ):
        leaves = [x.clone().requires_grad_() for x in inputs]
        made = function(*leaves)
        own = torch.where(made[1].isinf() & ~dlse.isnan() & ~dlse.isinf(), 0.0, dlse)
        wrt = [*leaves, *parameters.values()]
        found.append([*made, *torch.autograd.grad(made[:2], wrt, (dout, own))])
    for x, y in zip(*found, strict=True):
        assert not y.isnan().any()
        torch.testing.assert_close(x, y)


def test_derivatives_beside_gaps(seed: int) -> None:
    """Backward and forward mode and second derivatives."""
    cu_q, cu_k = starts([(3, 2), (2, 2), (1, 3)], "cpu")
    used = {"seqused_q": torch.tensor([2, 0, 1]).int(), "seqused_k": torch.tensor([2, 1, 0]).int()}
    inputs = [torch.randn(s, dtype=torch.float64) for s in ((7, 2, 3), (8, 1, 3), (8, 1, 2))]
    inputs = [x.requires_grad_() for x in (*inputs, torch.randn(2, dtype=torch.float64))]

    def call(q: Tensor, k: Tensor, v: Tensor, sinks: Tensor) -> object:
        options = {"sinks": sinks, "return_lse": True, "impl": "reference"}
        out, lse = flashproto.attention_varlen(q, k, v, cu_q, cu_k, causal=True, **used, **options)
        return out, lse[:, [0, 1, 5, 6]]  # in gaps it is -inf

    assert torch.autograd.gradcheck(call, inputs, check_forward_ad=True)
    assert torch.autograd.gradgradcheck(call, inputs)
