"""Two kernels that prove the harness: one that fits in registers and one that cannot."""

from __future__ import annotations

import triton
import triton.language as tl
from compile_case import Case


@triton.jit
def square_kernel(x, y, BLOCK: tl.constexpr):
    row = tl.arange(0, BLOCK)
    tile = row[:, None] * BLOCK + row[None, :]
    a = tl.load(x + tile)
    tl.store(y + tile, tl.dot(a, a))


def selftest_cases() -> list[Case]:
    arguments = {"x": "*bf16", "y": "*fp32"}
    return [
        Case("fits", square_kernel, arguments, {"BLOCK": 32}, ("x", "y")),
        Case("spills", square_kernel, arguments, {"BLOCK": 128}, ("x", "y"), num_warps=1),
    ]
