"""LayerNorm (weight, bias) and RMSNorm (weight), GB/s over widths: 2 passes forward, 3 backward.

Liger's cutedsl kernels take a LayerNorm of at most 8192 columns and an RMSNorm of at most 32768.  Where
Liger would then take its Triton kernels, "liger-cutedsl" has an error.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any

import torch
from torch import Tensor

import flashproto

from .. import reference
from . import report
from .measure import Prepared, Work, compare
from .peers import EPS, Function, norm_peers

ROWS = 49152
WIDTHS = (
    256,
    512,
    1024,
    1536,
    2048,
    4096,
    5120,
    7168,
    8192,
    12288,
    16384,
    32768,
    50257,
    65536,
    131072,
    262144,
)
QUICK_WIDTHS = (2048, 4096, 8192)


@dataclass(frozen=True)
class Problem:
    kind: str  # "layer" or "rms"
    M: int
    N: int
    dtype: torch.dtype

    @property
    def key(self) -> str:
        return f"{'LayerNorm' if self.kind == 'layer' else 'RMSNorm'} {self.M}x{self.N}"


def rows_for(width: int) -> int:
    """49152 rows up to 8192 columns, as in OneFlow's table; fewer for wider ones."""
    return ROWS if width <= 8192 else ROWS * 1024 // width


def problems(quick: bool, device: torch.device) -> list[Problem]:
    if device.type != "cuda":
        small = (256, 1024) if quick else (256, 1024, 4096)
        return [Problem(k, 512, N, torch.float32) for k in ("rms", "layer") for N in small]
    widths = QUICK_WIDTHS if quick else WIDTHS
    return [Problem(k, rows_for(N), N, torch.bfloat16) for k in ("rms", "layer") for N in widths]


def work(p: Problem) -> Work:
    nbytes = p.M * p.N * p.dtype.itemsize
    return Work("GB/s", 2 * nbytes / 1e6, 3 * nbytes / 1e6, copied=nbytes)


MEANS = {"RMSNorm": (1.03, 1.3), "LayerNorm": (1.1, 1.3)}  # wanted in geometric mean, each pass


def floor(which: str, key: str) -> float | None:
    """The share of a copy's speed wanted at the width of a cell."""
    width = int(key.rpartition("x")[2])
    if width % 8:  # rows that are not 16-byte aligned
        return None
    if which == "forward":
        return 0.92 if width >= 1024 else None
    return None if width < 2048 else 0.8 if width <= 16384 else 0.65


def goals(data: dict[str, Any]) -> str:
    """The passes against their goals: the best peer's speed (2% allowed for noise) in every cell."""
    texts = []
    for kind, means in MEANS.items():
        cells = {key: cell for key, cell in data["cells"].items() if key.startswith(kind)}
        for which, mean in zip(("forward", "backward"), means, strict=True):
            texts.append(report.targets(cells, which, 0.98, mean, floor=partial(floor, which)))
    return "\n\n".join(texts)


class Sampled:
    """The exact y and dx of some rows, and dweight and dbias of all, in float32."""

    def __init__(
        self, p: Problem, x: Tensor, weight: Tensor, bias: Tensor | None, grad: Tensor
    ) -> None:
        random = torch.randint(p.M, (62,), device=x.device)
        self.rows = torch.cat((random.new_tensor([0, p.M - 1]), random))
        self.p, self.given = p, (x, weight, bias, grad)

    @cached_property
    def of_rows(self) -> dict[str, Tensor]:
        x, weight, bias, grad = self.given
        return self._exact(self.p, x[self.rows], weight, bias, grad[self.rows])

    @cached_property
    def of_parameters(self) -> dict[str, Tensor]:
        x, weight, bias, grad = self.given
        sums: dict[str, Tensor] = {}
        step = max(1, 2**24 // self.p.N)
        for start in range(0, self.p.M, step):
            part = slice(start, start + step)
            exact = self._exact(self.p, x[part], weight, bias, grad[part])
            for name in ("dweight", "dbias") if bias is not None else ("dweight",):
                sums[name] = exact[name] + sums.get(name, 0)
        return sums

    @staticmethod
    def _exact(
        p: Problem, x: Tensor, weight: Tensor, bias: Tensor | None, grad: Tensor
    ) -> dict[str, Tensor]:
        given = [x, weight] if bias is None else [x, weight, bias]
        leaves = [t.detach().float().requires_grad_() for t in given]
        y = reference.norm(
            leaves[0],
            [p.N],
            leaves[1],
            None if bias is None else leaves[2],
            EPS,
            centered=p.kind == "layer",
        )
        grads = torch.autograd.grad(y, leaves, grad.float())
        return dict(zip(("y", "dx", "dweight", "dbias"), (y.detach(), *grads), strict=False))

    def check(self, y: Tensor, grads: Sequence[Tensor] | None) -> str | None:
        if grads is None:
            return compare({"y": y[self.rows]}, self.of_rows)
        dx, *parameters = grads
        return compare({"dx": dx[self.rows]}, self.of_rows) or compare(
            dict(zip(("dweight", "dbias"), parameters, strict=False)), self.of_parameters
        )


def contenders(
    p: Problem, device: torch.device, impls: Sequence[str], with_compile: bool
) -> dict[str, Callable[[], Prepared]]:
    """flashproto's backends and every peer, all on the same x [M, N], parameters and gradient."""
    x, grad = (torch.randn(p.M, p.N, device=device, dtype=p.dtype) for _ in range(2))
    weight = torch.rand(p.N, device=device, dtype=p.dtype) + 0.5
    bias = torch.randn(p.N, device=device, dtype=p.dtype) if p.kind == "layer" else None
    sampled = Sampled(p, x, weight, bias, grad)

    def prepare(make: Callable[[], Function], dtype: torch.dtype | None) -> Prepared:
        leaf_x = x.detach().clone().requires_grad_()
        parameters = [
            None if t is None else t.detach().clone().to(dtype or p.dtype).requires_grad_()
            for t in (weight, bias)
        ]
        function = make()
        inputs = [t for t in (leaf_x, *parameters) if t is not None]
        return Prepared(lambda: function(leaf_x, *parameters), inputs, grad, sampled.check)

    def ours(impl: str) -> Function:
        if p.kind == "layer":
            return lambda x, w, b: flashproto.layer_norm(x, p.N, w, b, EPS, impl=impl)
        return lambda x, w, b: flashproto.rms_norm(x, p.N, w, EPS, impl=impl)

    made: dict[str, Callable[[], Prepared]] = {}
    for impl in impls:
        made[f"flashproto[{impl}]"] = partial(prepare, partial(ours, impl), None)
    for name, (make, dtype) in norm_peers(p.kind, with_compile).items():
        made[name] = partial(prepare, make, dtype)
    return made
