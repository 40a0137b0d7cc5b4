"""OneFlow's tables of LayerNorm and softmax: 49152 rows of 32 to 32768 columns, forward.

LayerNorm in half and in float precision, softmax in half: microseconds, and the effective bandwidth in
GB/s, one read and one write counted.  Sources: "How to implement an efficient LayerNorm CUDA kernel"
and "How to implement an efficient Softmax CUDA kernel" (OneFlow, 2021).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from . import norm, softmax
from .measure import Prepared, Work
from .norm import ROWS

DTYPES = {torch.float16: "half", torch.float32: "float"}
TABLES = (("LayerNorm", torch.float16), ("LayerNorm", torch.float32), ("softmax", torch.float16))


@dataclass(frozen=True)
class Problem:
    operator: str
    M: int
    N: int
    dtype: torch.dtype

    @property
    def key(self) -> str:
        return f"{self.operator} {DTYPES[self.dtype]} {self.M}x{self.N}"


def problems(quick: bool, device: torch.device) -> list[Problem]:
    gpu = device.type == "cuda"
    widths = (1024, 8192) if quick and gpu else [2**i for i in range(5, 16)] if gpu else (32, 256)
    rows = ROWS if gpu else 64
    tables = TABLES if gpu else (("LayerNorm", torch.float32), ("softmax", torch.float32))
    return [Problem(operator, rows, N, dtype) for operator, dtype in tables for N in widths]


def work(p: Problem) -> Work:
    nbytes = p.M * p.N * p.dtype.itemsize
    return Work("GB/s", 2 * nbytes / 1e6, None, forward_only=True, copied=nbytes)


def conclusion(data: dict[str, Any]) -> str:
    """The times, which the table gives as bandwidths."""
    lines = ["microseconds (effective GB/s); copy: the bandwidth of copying such a tensor"]
    for key, cell in data["cells"].items():
        timed = {n: r for n, r in cell["passes"]["forward"].items() if "ms" in r}
        figures = [f"{n} {1e3 * r['ms']:.1f} ({r['value']:.0f})" for n, r in timed.items()]
        lines.append(f"{key:<28}{'  '.join(figures)}  copy {cell.get('ceiling', 0):.0f}")
    return "\n".join(lines)


def contenders(
    p: Problem, device: torch.device, impls: Sequence[str], with_compile: bool
) -> dict[str, Callable[[], Prepared]]:
    """Those of the benchmarks `norm` and `softmax`."""
    if p.operator == "softmax":
        return softmax.contenders(softmax.Problem(p.M, p.N, p.dtype), device, impls, with_compile)
    return norm.contenders(norm.Problem("layer", p.M, p.N, p.dtype), device, impls, with_compile)
