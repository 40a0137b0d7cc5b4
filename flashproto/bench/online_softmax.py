"""The benchmark of the online-softmax paper: float32, batches of 4000 and of 10 rows, up to a million
columns, milliseconds; softmax alone, and the five largest of it.

naive: exp(x) over its sum; safe: less the maximum first; online: maximum and sum in one pass, which is
flashproto's.  naive and safe as torch.compile writes them, and safe as torch.softmax.  Source: Milakov
and Gimelshein, "Online normalizer calculation for softmax" (2018).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

import flashproto

from .measure import Prepared, Work, compare
from .peers import Function, compiled

BATCHES = (4000, 10)
WIDTHS = (1000, 10_000, 100_000, 1_000_000)
K = 5


@dataclass(frozen=True)
class Problem:
    top: bool
    M: int
    N: int

    @property
    def key(self) -> str:
        return f"{'softmax + top-5' if self.top else 'softmax'} batch {self.M} V {self.N}"


def problems(quick: bool, device: torch.device) -> list[Problem]:
    gpu = device.type == "cuda"
    widths = (10_000,) if quick and gpu else WIDTHS if gpu else (1000,)
    return [Problem(top, M, N) for top in (False, True) for M in BATCHES[not gpu :] for N in widths]


def work(p: Problem) -> Work:
    return Work("ms", None, None, forward_only=True)


def naive(x: Tensor) -> Tensor:
    e = torch.exp(x)
    return e / e.sum(-1, keepdim=True)


def safe(x: Tensor) -> Tensor:
    e = torch.exp(x - x.amax(-1, keepdim=True))
    return e / e.sum(-1, keepdim=True)


def contenders(
    p: Problem, device: torch.device, impls: Sequence[str], with_compile: bool
) -> dict[str, Callable[[], Prepared]]:
    """Ours against naive and safe; with top-5, against each followed by torch.topk."""
    x = torch.randn(p.M, p.N, device=device)
    exact = torch.softmax(x[-1:].double(), -1)
    want = exact.topk(K).values if p.top else exact

    def check(y: Any, grads: Sequence[Tensor] | None) -> str | None:
        if not p.top:
            return compare({"y": y[-1:]}, {"y": want})
        values, indices = y
        chosen = exact.gather(1, indices[-1:].long()).float()
        return compare({"values": values[-1:]}, {"values": want}) or compare(
            {"indices": chosen}, {"indices": want}
        )

    def prepare(make: Callable[[], Function]) -> Prepared:
        function = make()
        return Prepared(lambda: function(x), [x], None, check)

    def topped(function: Function) -> Function:
        def call(x: Tensor) -> Any:
            values, indices = torch.topk(function(x), K)
            return values, indices

        return call if p.top else function

    def ours(impl: str) -> Function:
        if p.top:
            return partial(flashproto.softmax_topk, k=K, impl=impl)
        return partial(flashproto.softmax, impl=impl)

    made: dict[str, Callable[[], Prepared]] = {}
    for impl in impls:
        made[f"flashproto[{impl}]"] = partial(prepare, partial(ours, impl))
    made["torch safe"] = partial(prepare, lambda: topped(partial(torch.softmax, dim=-1)))
    for name, function in (("naive", naive), ("safe", safe)):
        if with_compile:
            made[f"compile {name}"] = partial(prepare, partial(compiled, topped(function)))
        elif device.type != "cuda":
            made[name] = partial(prepare, partial(topped, function))
    return made
