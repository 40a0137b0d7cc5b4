"""Attention, TFLOP/s: 16,384 tokens in all and H = 2048 / D, forward and backward.

FLOPs are 4 B H S^2 D forward (half of it when causal) and 2.5 times that backward.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import cast

import torch
from torch import Tensor

import flashproto

from .. import reference
from .measure import Prepared, Work, compare
from .peers import Function, attention_peers

TOKENS = 16384
WIDTH = 2048
LENGTHS = (1024, 2048, 4096, 8192, 16384)


@dataclass(frozen=True)
class Problem:
    B: int
    Hq: int
    Hkv: int
    S: int
    D: int
    causal: bool
    dtype: torch.dtype

    @property
    def key(self) -> str:
        heads = f" GQA {self.Hq}/{self.Hkv} B{self.B}" if self.Hq != self.Hkv else ""
        return f"D{self.D} S{self.S} {'causal' if self.causal else 'full'}{heads}"


def problems(quick: bool, device: torch.device) -> list[Problem]:
    """The cells: a square grid of head dims and lengths, then GQA; a small one on a CPU."""
    if device.type != "cuda":
        sizes = [(64, 128), (64, 512)] if quick else [(64, 128), (64, 512), (128, 512), (64, 1024)]
        return [
            Problem(1, 4, 4, S, D, causal, torch.float32) for D, S in sizes for causal in (False, True)
        ]
    dims, lengths = ((64, 128), (4096,)) if quick else ((64, 128, 256), LENGTHS)
    grid = [
        Problem(TOKENS // S, WIDTH // D, WIDTH // D, S, D, causal, torch.bfloat16)
        for D in dims
        for S in lengths
        for causal in (False, True)
    ]
    gqa = [
        Problem(1, 64, 8, S, 128, causal, torch.bfloat16)
        for S in (4096, 8192, 16384, 32768)
        for causal in (False, True)
    ]
    return grid if quick else grid + gqa


def work(p: Problem) -> Work:
    flops = 4 * p.B * p.Hq * p.S**2 * p.D * (0.5 if p.causal else 1.0)
    return Work("TFLOP/s", flops / 1e9, 2.5 * flops / 1e9)


class Sampled:
    """The exact result of the first and the last key head's group, in float32, to check against."""

    def __init__(self, p: Problem, q: Tensor, k: Tensor, v: Tensor, grad: Tensor) -> None:
        group = p.Hq // p.Hkv
        self.parts = [
            (slice(b, b + 1), slice(h * group, (h + 1) * group), slice(h, h + 1))
            for b, h in {(0, 0), (p.B - 1, p.Hkv - 1)}
        ]
        self.want = [
            self._exact(p, q[b, hq], k[b, hkv], v[b, hkv], grad[b, hq]) for b, hq, hkv in self.parts
        ]

    @staticmethod
    def _exact(p: Problem, q: Tensor, k: Tensor, v: Tensor, grad: Tensor) -> dict[str, Tensor]:
        """out, dq [1, group, S, D] and dk, dv [1, 1, S, D], one query head at a time for memory."""
        results = []
        for h in range(q.shape[1]):
            leaves = [t.detach().float().requires_grad_() for t in (q[:, h : h + 1], k, v)]
            out, _ = reference.attention(*leaves, causal=p.causal)
            grads = torch.autograd.grad(out, leaves, grad[:, h : h + 1].float())
            results.append((out.detach(), *grads))
        out, dq, dk, dv = (torch.cat(part, 1) for part in zip(*results, strict=True))
        return {"out": out, "dq": dq, "dk": dk.sum(1, keepdim=True), "dv": dv.sum(1, keepdim=True)}

    def check(self, out: Tensor, grads: Sequence[Tensor] | None) -> str | None:
        """What is wrong with out and (dq, dk, dv), all [B, H, S, D]; None if nothing."""
        for (b, hq, hkv), want in zip(self.parts, self.want, strict=True):
            got = {"out": out[b, hq]}
            if grads is not None:
                dq, dk, dv = grads
                got |= {"dq": dq[b, hq], "dk": dk[b, hkv], "dv": dv[b, hkv]}
            complaint = compare(got, want)
            if complaint:
                return complaint
        return None


def contenders(
    p: Problem, device: torch.device, impls: Sequence[str], with_compile: bool
) -> dict[str, Callable[[], Prepared]]:
    """flashproto's backends and every peer, all on the same random q, k, v and output gradient."""
    q = torch.randn(p.B, p.Hq, p.S, p.D, device=device, dtype=p.dtype)
    k, v = (torch.randn(p.B, p.Hkv, p.S, p.D, device=device, dtype=p.dtype) for _ in range(2))
    grad = torch.randn_like(q)
    sampled = Sampled(p, q, k, v, grad)

    def prepare(make: Callable[[], Function], layout: str) -> Prepared:
        def to_layout(t: Tensor) -> Tensor:
            return t if layout == "BHSD" else t.transpose(1, 2)

        leaves = [to_layout(t).detach().clone(memory_format=torch.contiguous_format)
                  .requires_grad_() for t in (q, k, v)]  # fmt: skip
        function = make()

        def check(out: Tensor, grads: Sequence[Tensor] | None) -> str | None:
            return sampled.check(to_layout(out), grads and [to_layout(t) for t in grads])

        return Prepared(lambda: function(*leaves), leaves, to_layout(grad).contiguous(), check)

    def ours(impl: str) -> Function:
        return cast(Function, partial(flashproto.attention, causal=p.causal, impl=impl))

    made: dict[str, Callable[[], Prepared]] = {}
    for impl in impls:
        made[f"flashproto[{impl}]"] = partial(prepare, partial(ours, impl), "BHSD")
    gqa = p.Hq != p.Hkv
    for name, (make, layout) in attention_peers(p.causal, p.S, gqa, device, with_compile).items():
        made[name] = partial(prepare, make, layout)
    return made
