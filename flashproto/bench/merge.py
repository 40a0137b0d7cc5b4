"""Attention in parts, merged: GB/s, out and lse of 32 heads of 8192 queries each.

Counted are the parts and the result, each once; in the backward pass the gradient of out, the parts,
and their gradients.  "tokens first" cells have heads behind tokens in memory.
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
from . import report
from .measure import Prepared, Work, compare
from .peers import Function, compiled

PARTS = (2, 4, 8)


@dataclass(frozen=True)
class Problem:
    n: int
    shape: tuple[int, int, int, int]  # [B, H, S, D]
    dtype: torch.dtype
    tokens_first: bool = False

    @property
    def key(self) -> str:
        B, H, S, D = self.shape
        return f"{self.n} parts B{B} H{H} S{S} D{D}{' tokens first' * self.tokens_first}"

    @property
    def nbytes(self) -> tuple[int, int]:
        """Of one out and one lse."""
        B, H, S, D = self.shape
        return B * H * S * D * self.dtype.itemsize, B * H * S * 4


def problems(quick: bool, device: torch.device) -> list[Problem]:
    if device.type != "cuda":
        return [Problem(2, (1, 4, 64, 32), torch.float32)]
    shape, dtype = (1, 32, 8192, 128), torch.bfloat16
    cells = [Problem(n, shape, dtype) for n in PARTS]
    return cells[:1] if quick else [*cells, Problem(2, shape, dtype, tokens_first=True)]


def work(p: Problem) -> Work:
    out, lse = p.nbytes
    forward = (p.n + 1) * (out + lse)
    return Work("GB/s", forward / 1e6, (forward + p.n * (out + lse)) / 1e6, copied=out)


def goals(data: dict[str, Any]) -> str:
    """The forward pass against its goals: the best peer's speed, and 0.9 of a copy's."""
    return report.targets(data["cells"], "forward", 1.0, floor=lambda key: 0.9)


def plain(outs: Sequence[Tensor], lses: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
    lse = torch.logsumexp(torch.stack(list(lses)), 0)
    parts = zip(outs, lses, strict=True)
    out = torch.stack([torch.exp(x - lse)[..., None] * out for out, x in parts]).sum(0)
    return out.to(outs[0].dtype), lse


def contenders(
    p: Problem, device: torch.device, impls: Sequence[str], with_compile: bool
) -> dict[str, Callable[[], Prepared]]:
    """Ours, and the plain expression of torch, each with gradients of both results."""
    B, H, S, D = p.shape

    def drawn() -> Tensor:
        shape = (B, S, H, D) if p.tokens_first else p.shape
        x = torch.randn(shape, device=device, dtype=p.dtype)
        return x.transpose(1, 2) if p.tokens_first else x

    outs, dout = [drawn() for _ in range(p.n)], drawn()
    *lses, dlse = (torch.randn(B, H, S, device=device) for _ in range(p.n + 1))
    rows = torch.tensor([0, S // 2, S - 1], device=device)
    leaves = [x[:, :, rows].float().requires_grad_() for x in (*outs, *lses)]
    exact = reference.merge_attention(leaves[: p.n], leaves[p.n :])
    upstream = dout[:, :, rows].float(), dlse[:, :, rows]
    want = [*exact, *torch.autograd.grad(exact, leaves, upstream)]
    named = {str(i): t.detach() for i, t in enumerate(want)}

    def check(made: Any, grads: Sequence[Tensor] | None) -> str | None:
        got = {str(i): t[:, :, rows] for i, t in enumerate([*made, *(grads or ())])}
        return compare(got, named)

    def prepare(make: Callable[[], Function]) -> Prepared:
        leaves = [x.detach().requires_grad_() for x in (*outs, *lses)]
        call = partial(make(), leaves[: p.n], leaves[p.n :])
        return Prepared(call, leaves, (dout, dlse), check)

    def ours(impl: str) -> Function:
        return partial(flashproto.merge_attention, impl=impl)

    made: dict[str, Callable[[], Prepared]] = {}
    for impl in impls:
        made[f"flashproto[{impl}]"] = partial(prepare, partial(ours, impl))
    made["torch"] = partial(prepare, lambda: plain)
    if with_compile:
        made["compile"] = partial(prepare, lambda: compiled(plain))
    return made
