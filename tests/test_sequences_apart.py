"""Sequences side by side: what is in one of them, or behind the last one, reaches no other."""

from __future__ import annotations

import math
import random
from collections.abc import Sequence

import pytest
import torch
from attention_problem import Problem
from torch import Tensor
from variant_problem import FEATURES, Call, drawn, outputs_of, starts

import flashproto
from flashproto import reference

GARBAGE = (math.nan, math.inf, -math.inf)
# Of queries and of keys, those behind the last sequence in the end.
LENGTHS = [(4, 4), (3, 7), (0, 2), (5, 5), (2, 0), (1, 1)]
SIZES = [*LENGTHS, (3, 2)]
BEHIND, WITH_TOKENS = len(LENGTHS), (0, 1, 3, 5)
HEADS = Problem(torch.float32, 1, 2, 1, 5, 5, 8, 6, causal=False)
# Of each result and gradient whose tokens it has, 0 for queries, 1 for keys; and in which dimension.
TOKENS = {"out": (0, 0), "lse": (0, 1), "max_score": (0, 1), "entropy": (0, 1)}
TOKENS |= {"dq": (0, 0), "dk": (1, 0), "dv": (1, 0)}


def sequences(x: Tensor, side: int, dim: int) -> tuple[Tensor, ...]:
    return x.movedim(dim, 0).split([n[side] for n in SIZES])


def results(call: Call, given: Sequence[Tensor], impl: str) -> dict[str, Tensor]:
    """What attention_varlen returns, and gradients; given: q, k, v, and gradients of out and lse."""
    inputs = [x.clone().requires_grad_() for x in given[:3]]
    if impl == "torch":  # which has no lse
        cu = starts(LENGTHS, str(inputs[0].device))
        made = {"out": flashproto.attention_varlen(*inputs, *cu, impl=impl, **call.options)}
    else:
        made = outputs_of(call, inputs, impl, LENGTHS)
    leaves = dict(zip(("dq", "dk", "dv"), inputs, strict=True)) | call.parameters
    outputs = [made[name] for name in ("out", "lse") if name in made]
    found = torch.autograd.grad(outputs, list(leaves.values()), list(given[3:])[: len(outputs)])
    return {n: x.detach() for n, x in made.items()} | dict(zip(leaves, found, strict=True))


def check(names: Sequence[str], impl: str, device: str, seed: int) -> None:
    """The bits of all results and gradients elsewhere are what they are without garbage; those of sinks
    and slopes, of which all sequences have a part, where it is behind the last one alone."""
    generator = random.Random(seed)
    call = drawn(generator, HEADS, names, device)
    T, Tk = (sum(n[side] for n in SIZES) for side in (0, 1))
    shapes = (T, 2, 8), (Tk, 1, 8), (Tk, 1, 6), (T, 2, 6), (2, T)
    clean = [torch.randn(shape, device=device) for shape in shapes]
    wanted = results(call, clean, impl)
    for spoilt in ([BEHIND], [BEHIND, generator.choice(WITH_TOKENS)]):
        given = [x.clone() for x in clean]
        for x, place in zip(given, ((0, 0), (1, 0), (1, 0), (0, 0), (0, 1)), strict=True):
            if place == (0, 1) and spoilt == [BEHIND] and "sinks" in names:
                continue  # the lse of a query without a key is the sink, and has its gradient
            for n in spoilt:
                sequences(x, *place)[n].fill_(generator.choice(GARBAGE))
        for name, x in results(call, given, impl).items():
            if name in call.parameters:
                assert spoilt != [BEHIND] or torch.equal(x, wanted[name]), name
                continue
            pairs = zip(*(sequences(y, *TOKENS[name]) for y in (x, wanted[name])), strict=True)
            for n, (got, of_clean) in enumerate(pairs):
                assert n in spoilt or torch.equal(got, of_clean), f"{name} of sequence {n}"


EACH = [(), *((name,) for name, feature in FEATURES.items() if feature.packed)]


@pytest.mark.parametrize("names", [*EACH, ("causal", "sinks", "alibi", "entropy")], ids="+".join)
def test_garbage_stays_where_it_is_on_reference(names: tuple[str, ...], seed: int) -> None:
    for other in range(5):
        check(names, "reference", "cpu", seed + other)


@pytest.mark.parametrize("names", [(), ("causal",), ("window",), ("first_keys",)], ids="+".join)
def test_garbage_stays_where_it_is_on_torch(names: tuple[str, ...], seed: int) -> None:
    for other in range(5):
        check(names, "torch", "cpu", seed + other)


@pytest.mark.slow
@pytest.mark.parametrize(
    "names",
    [
        ("causal", "entropy"),
        ("sinks",),
        ("alibi", "max_score"),
        ("window", "sinks", "alibi", "softcap"),
    ],
    ids="+".join,
)
def test_garbage_stays_where_it_is_in_kernels(names: tuple[str, ...], device: str, seed: int) -> None:
    check(names, "triton", device, seed)


@pytest.mark.parametrize(
    "names", [("causal",), ("left_window", "sinks", "alibi", "softcap", "entropy")]
)
def test_one_product_of_all_sequences_is_each_by_itself(names: tuple[str, ...], seed: int) -> None:
    """What lengths that cannot be read take; garbage behind the last sequence changes nothing there."""
    call = drawn(random.Random(seed), HEADS, names, "cpu")
    T, Tk = (sum(n[side] for n in SIZES) for side in (0, 1))
    q, k, v = (torch.randn(1, *s) for s in ((2, T, 8), (1, Tk, 8), (1, Tk, 6)))
    parameters = call.parameters
    left = call.options.get("window", (None, None))[0]
    options = {"causal": "causal" in names, "left": left, "softcap": call.options.get("softcap")}
    options |= {"return_aux": True, **parameters}
    cu = starts(LENGTHS, "cpu")
    dout, dlse = torch.randn(1, 2, T, 6), torch.randn(1, 2, T)
    if not parameters:
        dlse[..., -3:] = 0  # there lse is -inf, without a gradient

    def gradients(made: tuple[Tensor, ...], inputs: Sequence[Tensor], dout: Tensor) -> list[Tensor]:
        leaves = [*inputs, *parameters.values()]
        return [*made, *torch.autograd.grad(made[:2], leaves, (dout, dlse))]

    inputs = [x.clone().requires_grad_() for x in (q, k, v)]
    apart = reference.each_sequence(
        lambda *x: reference.attention(*x, **options), *inputs, *(x.tolist() for x in cu)
    )
    wanted = gradients(apart, inputs, dout)
    together = reference.attention(*inputs, cu_seqlens_q=cu[0], cu_seqlens_k=cu[1], **options)
    made = gradients(together, inputs, dout)
    for x, y in zip(made, wanted, strict=True):
        torch.testing.assert_close(x, y)
    for x, n in ((q, 3), (k, 2), (v, 2), (dout, 3)):
        x[:, :, -n:] = random.Random(seed).choice(GARBAGE)
    inputs = [x.clone().requires_grad_() for x in (q, k, v)]
    spoilt = reference.attention(*inputs, cu_seqlens_q=cu[0], cu_seqlens_k=cu[1], **options)
    for x, y in zip(gradients(spoilt, inputs, dout), made, strict=True):
        assert torch.equal(x, y)


def test_derivatives_of_sequences_apart(seed: int) -> None:
    """Backward and forward mode and second derivatives."""
    cu_q, cu_k = starts([(2, 2), (0, 1), (1, 2)], "cpu")
    inputs = [torch.randn(s, dtype=torch.float64) for s in ((4, 2, 3), (6, 1, 3), (6, 1, 2))]
    inputs = [x.requires_grad_() for x in (*inputs, torch.randn(2, dtype=torch.float64))]

    def call(q: Tensor, k: Tensor, v: Tensor, sinks: Tensor) -> object:
        options = {"sinks": sinks, "return_lse": True, "impl": "reference"}
        return flashproto.attention_varlen(q, k, v, cu_q, cu_k, causal=True, **options)

    assert torch.autograd.gradcheck(call, inputs, check_forward_ad=True)
    assert torch.autograd.gradgradcheck(call, inputs)
