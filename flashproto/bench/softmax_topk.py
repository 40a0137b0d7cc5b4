"""Softmax and the K largest of it (a MoE gate), milliseconds, beside torch.softmax followed by
torch.topk."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

import flashproto

from . import report
from .measure import Prepared, Work, compare
from .norm import rows_for
from .peers import Function, compiled

SHAPES = ((256, 8), (1024, 8), (8192, 8), (32768, 32), (131072, 64))  # columns, K


@dataclass(frozen=True)
class Problem:
    M: int
    N: int
    K: int
    dtype: torch.dtype

    @property
    def key(self) -> str:
        return f"softmax_topk {self.M}x{self.N} K{self.K}"


def problems(quick: bool, device: torch.device) -> list[Problem]:
    if device.type != "cuda":
        return [Problem(64, 256, 8, torch.float32)]
    shapes = SHAPES[1:2] if quick else SHAPES
    return [Problem(rows_for(N), N, K, torch.bfloat16) for N, K in shapes]


def work(p: Problem) -> Work:
    return Work("ms", None, None)


def goals(data: dict[str, Any]) -> str:
    """Forward against its goal, three times the speed of the two operators."""
    return report.targets(data["cells"], "forward", 3.0, peer="torch")


def contenders(
    p: Problem, device: torch.device, impls: Sequence[str], with_compile: bool
) -> dict[str, Callable[[], Prepared]]:
    """Each returns values; indices are checked by what they select."""
    x = torch.randn(p.M, p.N, device=device, dtype=p.dtype)
    grad = torch.randn(p.M, p.K, device=device, dtype=p.dtype)
    rows = torch.cat((torch.tensor([0, p.M - 1]), torch.randint(p.M, (62,)))).to(device)
    exact = torch.softmax(x[rows].float(), -1)
    want = {"values": exact.topk(p.K).values}

    def check(out: Any, grads: Sequence[Tensor] | None) -> str | None:
        values, indices = out
        if grads is None:
            got, chosen = values[rows], exact.gather(1, indices[rows].long())
            selected = compare({"values": chosen.to(got.dtype)}, want)
            return compare({"values": got}, want) or (
                selected and selected.replace("values", "indices")
            )
        # Where values tie, other indices are right as well: the gradient follows those returned.
        leaf = x[rows].float().requires_grad_()
        chosen = torch.softmax(leaf, -1).gather(1, indices[rows].long())
        (dx,) = torch.autograd.grad(chosen, leaf, grad[rows].float())
        return compare({"dx": grads[0][rows]}, {"dx": dx})

    def prepare(make: Callable[[], Function]) -> Prepared:
        leaf, function = x.clone().requires_grad_(), make()
        held: list[Tensor] = []

        def call() -> Tensor:
            values, indices = function(leaf)
            held[:] = [indices]
            return values

        return Prepared(call, [leaf], grad, lambda out, grads: check((out, held[0]), grads))

    def eager(x: Tensor) -> tuple[Tensor, Tensor]:
        values, indices = torch.topk(torch.softmax(x, -1), p.K)
        return values, indices

    def ours(impl: str) -> Function:
        return partial(flashproto.softmax_topk, k=p.K, impl=impl)

    made: dict[str, Callable[[], Prepared]] = {}
    for impl in impls:
        made[f"flashproto[{impl}]"] = partial(prepare, partial(ours, impl))
    made["torch"] = partial(prepare, lambda: eager)
    if with_compile:
        made["compile"] = partial(prepare, lambda: compiled(eager))
    return made
