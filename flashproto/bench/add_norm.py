"""A norm of a sum, GB/s, beside torch.add followed by the same norm of flashproto's.

Forward counts 4 passes over the tensor (x, residual, y, total), backward 4 (dy, dtotal, total, and dx,
which is the residual's gradient too): what the fused operators move.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

import flashproto

from .. import reference
from . import norm, report
from .measure import Prepared, Work, compare
from .norm import rows_for
from .peers import EPS

WIDTHS = (1024, 2048, 4096, 8192, 16384)


class Problem(norm.Problem):
    @property
    def key(self) -> str:
        return f"add {super().key}"


def problems(quick: bool, device: torch.device) -> list[Problem]:
    if device.type != "cuda":
        return [Problem(kind, 64, 256, torch.float32) for kind in ("rms", "layer")]
    widths = (4096,) if quick else WIDTHS
    return [Problem(k, rows_for(N), N, torch.bfloat16) for k in ("rms", "layer") for N in widths]


def work(p: Problem) -> Work:
    nbytes = p.M * p.N * p.dtype.itemsize
    return Work("GB/s", 4 * nbytes / 1e6, 4 * nbytes / 1e6, copied=nbytes)


def goals(data: dict[str, Any]) -> str:
    """The passes against their goals: 1.2 times the two operators' speed forward, 1.35 backward."""
    return "\n\n".join(
        report.targets(data["cells"], which, goal)
        for which, goal in (("forward", 1.2), ("backward", 1.35))
    )


def contenders(
    p: Problem, device: torch.device, impls: Sequence[str], with_compile: bool
) -> dict[str, Callable[[], Prepared]]:
    """The fused operator and the two, on each backend, with a gradient for both results."""
    x, residual, dy, dtotal = (torch.randn(p.M, p.N, device=device, dtype=p.dtype) for _ in range(4))
    weight = torch.rand(p.N, device=device, dtype=p.dtype) + 0.5
    bias = torch.randn(p.N, device=device, dtype=p.dtype) if p.kind == "layer" else None
    parameters = [t for t in (weight, bias) if t is not None]
    rows = torch.cat((torch.tensor([0, p.M - 1]), torch.randint(p.M, (62,)))).to(device)
    # Both round the sum to the dtype and normalize what was rounded.
    exact_total = (x[rows] + residual[rows]).float().requires_grad_()
    exact_y = reference.norm(
        exact_total,
        [p.N],
        weight.float(),
        None if bias is None else bias.float(),
        EPS,
        centered=p.kind == "layer",
    )
    (exact_dx,) = torch.autograd.grad(exact_y, exact_total, dy[rows].float())
    want = {"y": exact_y.detach(), "total": exact_total.detach(), "dx": exact_dx + dtotal[rows].float()}

    def check(out: Any, grads: Sequence[Tensor] | None) -> str | None:
        if grads is None:
            return compare({"y": out[0][rows], "total": out[1][rows]}, want)
        return compare({"dx": grads[0][rows]}, want) or compare({"dx": grads[1][rows]}, want)

    def prepare(function: Callable[..., Any]) -> Prepared:
        leaves = [t.clone().requires_grad_() for t in (x, residual, *parameters)]
        return Prepared(lambda: function(*leaves), leaves, (dy, dtotal), check)

    def fused(
        impl: str, x: Tensor, residual: Tensor, weight: Tensor, bias: Tensor | None = None
    ) -> Any:
        if p.kind == "layer":
            return flashproto.add_layer_norm(x, residual, p.N, weight, bias, EPS, impl=impl)
        return flashproto.add_rms_norm(x, residual, p.N, weight, EPS, impl=impl)

    def separate(
        impl: str, x: Tensor, residual: Tensor, weight: Tensor, bias: Tensor | None = None
    ) -> Any:
        total = torch.add(x, residual)
        if p.kind == "layer":
            return flashproto.layer_norm(total, p.N, weight, bias, EPS, impl=impl), total
        return flashproto.rms_norm(total, p.N, weight, EPS, impl=impl), total

    made: dict[str, Callable[[], Prepared]] = {}
    for impl in impls:
        made[f"flashproto[{impl}]"] = partial(prepare, partial(fused, impl))
        made[f"add, {impl}"] = partial(prepare, partial(separate, impl))
    return made
