"""LayerNorm (weight, bias) and RMSNorm (weight), GB/s over widths: 2 passes forward, 3 backward."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

import flashproto

from .. import reference
from .measure import Prepared, Work, compare
from .peers import EPS, Function, norm_peers

ROWS = 49152
WIDTHS = (256, 512, 1024, 1536, 2048, 4096, 5120, 7168, 8192, 12288, 16384, 32768, 65536, 131072)
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
    return Work("GB/s", 2 * nbytes / 1e6, 3 * nbytes / 1e6)


class Sampled:
    """The exact y and dx of some rows, and dweight and dbias of all, in float32."""

    def __init__(
        self, p: Problem, x: Tensor, weight: Tensor, bias: Tensor | None, grad: Tensor
    ) -> None:
        random = torch.randint(p.M, (62,), device=x.device)
        self.rows = torch.cat((random.new_tensor([0, p.M - 1]), random))
        self.want = self._exact(p, x[self.rows], weight, bias, grad[self.rows])
        step = max(1, 2**24 // p.N)
        for start in range(0, p.M, step):
            part = slice(start, start + step)
            exact = self._exact(p, x[part], weight, bias, grad[part])
            for name in ("dweight", "dbias") if bias is not None else ("dweight",):
                self.want[name] = exact[name] + (self.want[name] if start else 0)

    @staticmethod
    def _exact(
        p: Problem, x: Tensor, weight: Tensor, bias: Tensor | None, grad: Tensor
    ) -> dict[str, Tensor]:
        given = [x, weight] if bias is None else [x, weight, bias]
        leaves = [t.detach().float().requires_grad_() for t in given]
        y = reference.norm(
            leaves[0], [p.N], leaves[1], None if bias is None else leaves[2], EPS,
            centered=p.kind == "layer",
        )  # fmt: skip
        grads = torch.autograd.grad(y, leaves, grad.float())
        return dict(zip(("y", "dx", "dweight", "dbias"), (y.detach(), *grads), strict=False))

    def check(self, y: Tensor, grads: Sequence[Tensor] | None) -> str | None:
        got = {"y": y[self.rows]}
        if grads is not None:
            got |= dict(zip(("dx", "dweight", "dbias"), grads, strict=False))
            got["dx"] = got["dx"][self.rows]
        return compare(got, self.want)


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
