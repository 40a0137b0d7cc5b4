"""Kernels that prove the harness: one that fits in registers and one that cannot; sums over lanes that
are neighbours, and over such as are not."""

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


@triton.jit
def sums_kernel(x, y, MAXIMA: tl.constexpr):
    """Sums along the lanes of maxima that lie in every second lane (MAXIMA) or in all."""
    cube = tl.reshape(tl.load(x + tl.arange(0, 512)), [2] * 9)
    if MAXIMA:
        cube = tl.max(cube, 4, keep_dims=True)
    rows = tl.reshape(cube, [4, cube.numel // 4])
    tl.store(y + tl.arange(0, 4), tl.sum(rows, 1).to(tl.float32))


@triton.jit
def columns_kernel(x, y):
    """Sums along a dimension of a lane bit, between those of another dimension, and of a warp bit."""
    cube = tl.permute(tl.reshape(tl.load(x + tl.arange(0, 512)), [2] * 9), (0, 4, 1, 2, 3, 5, 6, 7, 8))
    columns = tl.reshape(cube, [4, 128])
    tl.store(y + tl.arange(0, 128), tl.sum(columns, 0).to(tl.float32))


def selftest_cases() -> list[Case]:
    arguments = {"x": "*bf16", "y": "*fp32"}
    sums = [
        Case(name, sums_kernel, arguments, {"MAXIMA": name == "lanes-apart"}, ("x", "y"))
        for name in ("neighbours", "lanes-apart")
    ]
    return [
        Case("fits", square_kernel, arguments, {"BLOCK": 32}, ("x", "y")),
        Case("spills", square_kernel, arguments, {"BLOCK": 128}, ("x", "y"), num_warps=1),
        *sums,
        Case("apart-across-warps", columns_kernel, arguments, {}, ("x", "y")),
    ]
