"""Attention in parts, and with a cache of keys and values."""

from __future__ import annotations

import itertools
import math
import random
from dataclasses import replace

import pytest
import torch
from attention_problem import HEAD_DIMS
from decode_problem import Problem, draw, play
from rows import poison
from torch import Tensor

import flashproto
from flashproto import configs, reference
from flashproto.ops import call_cache

# --- merging -----------------------------------------------------------------------------------------


def parts_of(
    n: int, dtype: torch.dtype, device: str
) -> tuple[list[Tensor], list[Tensor], list[Tensor]]:
    """q, k and v [2, 4 | 2, 5 | 23, 8], and k and v cut into n parts, some of no key."""
    q, k, v = (
        torch.randn(2, h, s, 8, device=device).to(dtype).requires_grad_()
        for h, s in ((4, 5), (2, 23), (2, 23))
    )
    cuts = [0, *sorted(random.randrange(24) for _ in range(n - 1)), 23]
    pieces = [(k[:, :, a:b], v[:, :, a:b]) for a, b in itertools.pairwise(cuts)]
    return [q, k, v], *map(list, zip(*pieces, strict=True))


@pytest.mark.parametrize("n", [1, 2, 5])
@pytest.mark.parametrize("stacked", [False, True])
def test_merged_parts_are_attention_to_all_keys(n: int, stacked: bool, device: str) -> None:
    """In float64, with gradients of both results."""
    inputs, ks, vs = parts_of(n, torch.float64, device)
    whole = reference.attention(*inputs)
    made = [reference.attention(inputs[0], k, v) for k, v in zip(ks, vs, strict=True)]
    outs, lses = ([x[i] for x in made] for i in (0, 1))
    if stacked:
        outs, lses = torch.stack(outs), torch.stack(lses)
    merged = flashproto.merge_attention(outs, lses)
    upstream = [torch.randn_like(x) for x in whole]
    for results in zip(merged, whole, strict=True):
        torch.testing.assert_close(*results, rtol=1e-12, atol=1e-12)
    got = torch.autograd.grad(merged, inputs, upstream, retain_graph=True)
    torch.testing.assert_close(
        got, torch.autograd.grad(whole, inputs, upstream), rtol=1e-10, atol=1e-11
    )


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_merging_is_in_float32(dtype: torch.dtype, device: str) -> None:
    outs = [torch.randn(3, 7, 8, device=device).to(dtype) for _ in range(4)]
    lses = [torch.randn(3, 7, device=device) * 20 for _ in range(4)]
    out, lse = flashproto.merge_attention(outs, lses)
    exact = reference.merge_attention([x.double() for x in outs], [x.double() for x in lses])
    assert out.dtype == dtype and lse.dtype == torch.float32
    torch.testing.assert_close(out, exact[0].to(dtype))
    torch.testing.assert_close(lse, exact[1].float())
    mixed, _ = flashproto.merge_attention([outs[0].float(), *outs[1:]], lses)
    torch.testing.assert_close(mixed, exact[0].float())


def test_rows_without_a_key_stay_so(device: str) -> None:
    outs = torch.zeros(3, 2, 4, device=device, requires_grad=True)
    lses = torch.full((3, 2), -math.inf, device=device)
    lses[1, 1] = 1.5
    lses.requires_grad_()
    out, lse = flashproto.merge_attention(outs, lses)
    assert lse.tolist() == [-math.inf, 1.5] and not out.any()
    gradients = torch.autograd.grad([out.sum() + lse[1]], [outs, lses])
    assert all(x.isfinite().all() for x in gradients)
    assert gradients[0][1, 1].tolist() == [1.0] * 4 and not gradients[0][:, 0].any()


# --- a cache -----------------------------------------------------------------------------------------

ON_GPU = torch.cuda.is_available()


@pytest.mark.parametrize("index", range(24))
def test_the_reference_follows_the_definition(index: int, device: str, seed: int) -> None:
    """In float64; of 8 bits in float32, as they are."""
    generator = random.Random(seed)
    problem = draw(generator, 90, 8, (8, 16))
    if not problem.eight:
        problem = replace(problem, dtype=torch.float64)
    play(problem, device, generator, "reference")


SIZES = (700, 32, HEAD_DIMS) if ON_GPU else (150, 4, (16, 24))
FIRST = None if ON_GPU else "reference"  # the interpreter takes long for many queries


@pytest.mark.parametrize("index", range(300 if ON_GPU else 6))
def test_the_kernels_follow_the_definition(index: int, device: str, seed: int, monkeypatch) -> None:
    poison(monkeypatch)
    generator = random.Random(seed)
    play(draw(generator, *SIZES), device, generator, "triton", first=FIRST)


@pytest.mark.parametrize("ragged", [False, True])
def test_whole_tiles_of_queries(ragged: bool, device: str, seed: int, monkeypatch) -> None:
    """As in a prefill, where nothing is merged."""
    monkeypatch.setattr(configs, "splits_cache", lambda *_: False)
    call_cache.forget()
    poison(monkeypatch)
    counts = ((5, 9), (4, 0)) if ragged else ((9, 9), (1, 1))
    options = {"causal": True, "scale": None, "window": (6, None), "sinks": True}
    problem = Problem(
        torch.float16, 2, 4, 2, 16, 24, 32, 16, counts, ragged=ragged, rope="halves", options=options
    )
    play(problem, device, random.Random(seed), "triton")
    call_cache.forget()
