"""Softmax over the last dimension, GB/s over widths: 2 passes forward, 3 backward (y, dy, dx)."""

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
from .norm import rows_for
from .peers import Function, softmax_peers

WIDTHS = (256, 512, 1024, 2048, 4096, 8192, 16384, 32768, 65536, 131072, 262144)
QUICK_WIDTHS = (1024, 4096, 32768)


@dataclass(frozen=True)
class Problem:
    M: int
    N: int
    dtype: torch.dtype

    @property
    def key(self) -> str:
        return f"softmax {self.M}x{self.N}"


def problems(quick: bool, device: torch.device) -> list[Problem]:
    if device.type != "cuda":
        return [Problem(512, N, torch.float32) for N in ((256, 1024) if quick else (256, 1024, 4096))]
    return [Problem(rows_for(N), N, torch.bfloat16) for N in (QUICK_WIDTHS if quick else WIDTHS)]


def work(p: Problem) -> Work:
    nbytes = p.M * p.N * p.dtype.itemsize
    return Work("GB/s", 2 * nbytes / 1e6, 3 * nbytes / 1e6, copied=nbytes)


def goals(data: dict[str, Any]) -> str:
    """The passes against their goal: the best peer's speed (2% allowed for noise) in every cell."""
    return "\n\n".join(report.targets(data["cells"], which, 0.98) for which in ("forward", "backward"))


def contenders(
    p: Problem, device: torch.device, impls: Sequence[str], with_compile: bool
) -> dict[str, Callable[[], Prepared]]:
    """flashproto's backends and every peer, all on the same x [M, N] and gradient."""
    x, grad = (torch.randn(p.M, p.N, device=device, dtype=p.dtype) for _ in range(2))
    random = torch.randint(p.M, (62,), device=device)
    rows = torch.cat((random.new_tensor([0, p.M - 1]), random))
    exact_x = x[rows].float().requires_grad_()
    exact_y = reference.softmax(exact_x)
    (exact_dx,) = torch.autograd.grad(exact_y, exact_x, grad[rows].float())
    want = {"y": exact_y.detach(), "dx": exact_dx}

    def check(y: Tensor, grads: Sequence[Tensor] | None) -> str | None:
        got = {"y": y[rows]} if grads is None else {"y": y[rows], "dx": grads[0][rows]}
        return compare(got, want)

    def prepare(make: Callable[[], Function]) -> Prepared:
        leaf = x.detach().clone().requires_grad_()
        function = make()
        return Prepared(lambda: function(leaf), [leaf], grad, check)

    def ours(impl: str) -> Function:
        return partial(flashproto.softmax, impl=impl)

    made: dict[str, Callable[[], Prepared]] = {}
    for impl in impls:
        made[f"flashproto[{impl}]"] = partial(prepare, partial(ours, impl))
    for name, make in softmax_peers(with_compile).items():
        made[name] = partial(prepare, make)
    return made
