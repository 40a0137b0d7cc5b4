"""Gradients of the statistics of attention's rows.  Random problems of all variants have that of the
entropy too: variant_problem.py."""

from __future__ import annotations

import random
from dataclasses import replace
from typing import Any

import pytest
import torch
from attention_problem import Problem
from torch import Tensor
from torch.autograd import gradcheck, gradgradcheck
from variant_problem import assert_within_bound, drawn, exact_and_eager, make, make_packed, run

import flashproto
from flashproto.variant import AUX

PLAIN = Problem(torch.float32, 2, 4, 2, 37, 45, 16, 24, causal=False)


def leaves(*shapes: tuple[int, ...]) -> list[Tensor]:
    return [torch.randn(s, dtype=torch.float64, requires_grad=True) for s in shapes]


OPTIONS: dict[str, dict[str, Any]] = {
    "causal": {"causal": True},
    "window and softcap": {"window": (2, 0), "softcap": 1.5},
    "more": {"causal": True, "sinks": True, "alibi_slopes": True},
}


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
def test_the_reference_by_differences(options: dict[str, Any]) -> None:
    """Of rows that see no key too; and once more."""
    q, k, v = leaves((1, 2, 6, 4), (1, 1, 5, 4), (1, 1, 5, 3))
    by_head = leaves(*[(2,) for name in ("sinks", "alibi_slopes") if name in options])
    names = [name for name in ("sinks", "alibi_slopes") if name in options]

    def statistics(*x: Tensor) -> tuple[Tensor, ...]:
        named = options | dict(zip(names, x[3:], strict=True))
        _, top, entropy = flashproto.attention(*x[:3], **named, return_aux=AUX, impl="reference")
        return top.masked_fill(top.isinf(), 0.0), entropy

    assert gradcheck(statistics, (q, k, v, *by_head))
    assert gradgradcheck(statistics, (q, k, v, *by_head))


def test_keys_that_are_both_the_largest_share_the_gradient() -> None:
    q, k = torch.ones(1, 1, 1, 2, dtype=torch.float64), torch.ones(1, 1, 3, 2, dtype=torch.float64)
    k[0, 0, 2] = -1
    k.requires_grad_()
    _, top = flashproto.attention(q, k, k, return_aux=("max_score",), scale=1.0, impl="reference")
    (dk,) = torch.autograd.grad(top.sum(), k)
    assert dk[0, 0].tolist() == [[0.5, 0.5], [0.5, 0.5], [0, 0]]


VARIANTS = ((), ("sinks",), ("sinks", "softcap", "alibi"), ("window", "bias"), ("dropout", "boolean"),
            ("relative_bias", "documents"))  # fmt: skip


@pytest.mark.few(3)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("names", VARIANTS, ids=lambda names: "+".join(names) or "plain")
def test_the_kernels_against_float64(
    names: tuple[str, ...], dtype: torch.dtype, device: str, seed: int
) -> None:
    call = drawn(random.Random(seed), replace(PLAIN, dtype=dtype), (*names, "entropy"), device)
    inputs, gradients = make(call, device)
    exact, plain = exact_and_eager(call, inputs, gradients)
    assert_within_bound(run(call, inputs, gradients, "triton"), exact, plain, call)


@pytest.mark.parametrize("names", [("causal",), ("sinks", "window"), ("relative_bias",)])
def test_sequences_side_by_side(names: tuple[str, ...], device: str, seed: int) -> None:
    lengths = [(5, 5), (0, 3), (33, 40), (2, 9), (3, 0)]
    call = drawn(random.Random(seed), PLAIN, (*names, "entropy"), device)
    inputs, gradients = make_packed(call, lengths, (2, 3), device)
    exact, plain = exact_and_eager(call, inputs, gradients, lengths)
    assert_within_bound(run(call, inputs, gradients, "triton", lengths), exact, plain, call)


@pytest.mark.parametrize("impl", ["triton", "reference"])
def test_the_entropy_of_equal_scores_does_not_change(impl: str, device: str) -> None:
    """It is the largest there is; nor does that of one key."""
    for Sk in (7, 1):
        q, k = (torch.zeros(1, 1, S, 16, device=device, requires_grad=True) for S in (5, Sk))
        _, entropy = flashproto.attention(q, k, k, return_aux=("entropy",), impl=impl)
        dq, dk = torch.autograd.grad(entropy.sum(), (q, k))
        assert dq.abs().max() == 0 and dk.abs().max() < 1e-6
