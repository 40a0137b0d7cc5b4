"""The table of an article on a fused RMSNorm kernel: float32 [200, 2048], milliseconds and the largest
difference from the operator written out in PyTorch.

There, on an older card: 0.586 ms for the composite, 0.063 ms for its CUDA kernel.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

import flashproto

from . import norm
from .measure import Prepared, Work, compare
from .norm import Problem
from .peers import EPS, Function, norm_peers


def problems(quick: bool, device: torch.device) -> list[Problem]:
    return [Problem("rms", 200, 2048, torch.float32)]


def work(p: Problem) -> Work:
    return Work("ms", None, None, forward_only=True)


def composite(x: Tensor, weight: Tensor, bias: None = None) -> Tensor:
    return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + EPS) * weight


differences: dict[str, float] = {}  # of the contenders that this process has checked


def conclusion(data: dict[str, Any]) -> str:
    """Time and largest difference of each contender."""
    lines = ["microseconds, largest difference from the composite"]
    for cell in data["cells"].values():
        for name, result in cell["passes"]["forward"].items():
            if "ms" in result:
                lines.append(
                    f"{name:<24}{1e3 * result['ms']:8.2f}  {differences.get(name, math.nan):.2e}"
                )
    return "\n".join(lines)


def contenders(
    p: Problem, device: torch.device, impls: Sequence[str], with_compile: bool
) -> dict[str, Callable[[], Prepared]]:
    """The composite, flashproto's backends and the peers of `norm`."""
    x, grad = (torch.randn(p.M, p.N, device=device) for _ in range(2))
    weight = torch.rand(p.N, device=device) + 0.5
    sampled = norm.Sampled(p, x, weight, None, grad)

    def prepare(name: str, make: Callable[[], Function]) -> Prepared:
        function = make()

        def check(y: Tensor, grads: Sequence[Tensor] | None) -> str | None:
            differences[name] = float((y - composite(x, weight)).abs().max())
            return compare({"y": y[sampled.rows]}, sampled.of_rows)

        return Prepared(lambda: function(x, weight, None), [x], grad, check)

    def ours(impl: str) -> Function:
        return lambda x, w, b: flashproto.rms_norm(x, p.N, w, EPS, impl=impl)

    made: dict[str, Callable[[], Prepared]] = {}
    for impl in impls:
        name = f"flashproto[{impl}]"
        made[name] = partial(prepare, name, partial(ours, impl))
    made["composite"] = partial(prepare, "composite", lambda: composite)
    for name, (make, _) in norm_peers("rms", with_compile).items():
        made[name] = partial(prepare, name, make)
    return made
