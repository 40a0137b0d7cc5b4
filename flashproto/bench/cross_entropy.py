"""Cross entropy of logits, GB/s: one read forward; two reads and a write forward and backward.

Forward is the loss alone, as an evaluation computes it: every contender runs it under torch.no_grad().
Where gradients are recorded, some contenders do part of the backward pass's work in the forward pass
already (flashproto all of it: two passes over the logits' memory where the count above is three), so
that only forward and backward together compare like with like.

Liger's cutedsl kernel writes the gradient over the logits: the first of its calls is checked, and later
ones are timed on what it has left there, which is as much work.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

import flashproto

from ..env import is_importable
from . import report
from .measure import Prepared, Work, compare
from .peers import Function, compiled, has_liger_cutedsl, liger_cutedsl

SHAPES = ((32768, 50304), (8192, 128256), (8192, 32768))


@dataclass(frozen=True)
class Problem:
    M: int
    V: int
    dtype: torch.dtype

    @property
    def key(self) -> str:
        return f"cross_entropy {self.M}x{self.V}"


def problems(quick: bool, device: torch.device) -> list[Problem]:
    if device.type != "cuda":
        return [Problem(64, 1000, torch.float32)]
    return [Problem(M, V, torch.bfloat16) for M, V in (SHAPES[2:] if quick else SHAPES)]


def work(p: Problem) -> Work:
    nbytes = p.M * p.V * p.dtype.itemsize
    return Work("GB/s", nbytes / 1e6, 3 * nbytes / 1e6, step=True, no_grad=True, copied=nbytes // 2)


def goals(data: dict[str, Any]) -> str:
    """The passes against their goal, the best peer's speed."""
    return "\n\n".join(
        report.targets(data["cells"], which, 1.0) for which in ("forward", "forward+backward")
    )


def in_float32(x: Tensor, targets: Tensor) -> Tensor:
    return F.cross_entropy(x.float(), targets)


def contenders(
    p: Problem, device: torch.device, impls: Sequence[str], with_compile: bool
) -> dict[str, Callable[[], Prepared]]:
    """flashproto's backends and every peer, but Liger's Triton kernel."""
    x = torch.randn(p.M, p.V, device=device, dtype=p.dtype)
    targets = torch.randint(p.V, (p.M,), device=device)
    one = torch.ones((), device=device)
    rows = torch.cat((torch.tensor([0, p.M - 1]), torch.randint(p.M, (30,)))).to(device)
    total = sum(
        float(in_float32(a, b)) * len(b)
        for a, b in zip(x.split(1024), targets.split(1024), strict=True)
    )
    leaf = x[rows].float().requires_grad_()
    (dx,) = torch.autograd.grad(F.cross_entropy(leaf, targets[rows], reduction="sum") / p.M, leaf)
    want = {"loss": one[None] * total / p.M, "dx": dx}

    def check(loss: Tensor, grads: Sequence[Tensor] | None) -> str | None:
        return compare({"loss": loss[None]} if grads is None else {"dx": grads[0][rows]}, want)

    def prepare(make: Callable[[], Function]) -> Prepared:
        leaf, function = x.clone().requires_grad_(), make()
        return Prepared(lambda: function(leaf, targets), [leaf], None, check)

    def ours(impl: str) -> Function:
        return partial(flashproto.cross_entropy, impl=impl)

    def quack() -> Function:
        from quack import cross_entropy

        return cross_entropy

    def liger() -> Function:
        loss = liger_cutedsl("cross_entropy")
        # It looks at the leaf alone for whether a gradient is wanted.
        return lambda x, targets: loss(x if torch.is_grad_enabled() else x.detach(), targets)[0]

    made: dict[str, Callable[[], Prepared]] = {}
    for impl in impls:
        made[f"flashproto[{impl}]"] = partial(prepare, partial(ours, impl))
    made["torch"] = partial(prepare, lambda: F.cross_entropy)
    if with_compile:
        made["compile"] = partial(prepare, lambda: compiled(in_float32))
    if is_importable("quack"):
        made["quack"] = partial(prepare, quack)
    if has_liger_cutedsl():
        made["liger-cutedsl"] = partial(prepare, liger)
    return made
