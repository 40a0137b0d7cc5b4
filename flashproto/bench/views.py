"""Attention as a block calls it, TFLOP/s: q, k and v are views of one projection [B, S, 3, H, D].

Causal, head_dim 128; the output is [B, S, H D] and the gradient one tensor [B, S, 3, H, D], as the
projections on both sides want them: whatever copies a contender needs for that are counted.  FLOPs as
in `attention`; the second pass is forward and backward together.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

import flashproto

from . import attention, report
from .attention import Sampled
from .measure import Prepared, Work
from .peers import Function, attention_peers, flash_attn_4_packed

# d_model, S, B of the blocks that `block` measures.
BLOCKS = ((2048, 4096, 4), (4096, 4096, 2), (1024, 16384, 1))
HEAD_DIM = 128


class Problem(attention.Problem):
    @property
    def key(self) -> str:
        return f"views d{self.Hq * self.D} T{self.S} B{self.B}"


def problems(quick: bool, device: torch.device) -> list[Problem]:
    if device.type != "cuda":
        return [Problem(2, 2, 2, 64, 32, True, torch.float32)]
    return [
        Problem(B, C // HEAD_DIM, C // HEAD_DIM, S, HEAD_DIM, True, torch.bfloat16)
        for C, S, B in (BLOCKS[:1] if quick else BLOCKS)
    ]


def work(p: Problem) -> Work:
    alone = attention.work(p)
    assert alone.forward is not None and alone.backward is not None
    return Work(alone.unit, alone.forward, alone.forward + alone.backward, step=True)


def goals(data: dict[str, Any]) -> str:
    """The step against its goal, 1.05 times the best peer's speed in every cell."""
    return report.targets(data["cells"], "forward+backward", 1.05)


def contenders(
    p: Problem, device: torch.device, impls: Sequence[str], with_compile: bool
) -> dict[str, Callable[[], Prepared]]:
    """flashproto's backends and every peer, all on views of the same projection."""
    qkv = torch.randn(p.B, p.S, 3, p.Hq, p.D, device=device, dtype=p.dtype)
    grad = torch.randn(p.B, p.S, p.Hq * p.D, device=device, dtype=p.dtype)

    def heads_first(x: Tensor) -> Tensor:
        return x.view(p.B, p.S, p.Hq, p.D).transpose(1, 2)

    q, k, v = (t.transpose(1, 2) for t in qkv.unbind(2))
    sampled = Sampled(p, q, k, v, heads_first(grad))

    def check(out: Tensor, grads: Sequence[Tensor] | None) -> str | None:
        parts = None if grads is None else [t.transpose(1, 2) for t in grads[0].unbind(2)]
        return sampled.check(heads_first(out), parts)

    def prepare(make: Callable[[], Function], layout: str) -> Prepared:
        leaf = qkv.clone().requires_grad_()
        function = make()

        def call() -> Tensor:
            if layout == "packed":
                return function(leaf).reshape(p.B, p.S, -1)
            q, k, v = leaf.unbind(2)
            if layout == "BSHD":
                return function(q, k, v).reshape(p.B, p.S, -1)
            out = function(q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2))
            return out.transpose(1, 2).reshape(p.B, p.S, -1)

        return Prepared(call, [leaf], grad, check)

    def ours(impl: str) -> Function:
        def call(leaf: Tensor) -> Tensor:
            out = flashproto.attention_qkv(leaf.flatten(2), p.Hq, p.Hq, causal=True, impl=impl)
            return out.transpose(1, 2)

        return call

    made: dict[str, Callable[[], Prepared]] = {}
    for impl in impls:
        made[f"flashproto[{impl}]"] = partial(prepare, partial(ours, impl), "packed")
    peers = attention_peers(True, p.S, False, device, with_compile)
    for name, (make, layout) in peers.items():
        made[name] = partial(prepare, make, layout)
    if "fa4" in peers:
        made["fa4-packed"] = partial(prepare, flash_attn_4_packed, "packed")
    return made
