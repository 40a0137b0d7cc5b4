"""Linear layers of few rows: the operator's recipe.

Legend: x, residual [..., K], M rows in all; weight [N, K], or with `up` [2N, K], gates first; bias [N]
or [2N]; norm_weight, norm_bias [K]; counters int32, zeros, which are zeros again behind the call;
y [..., N]; total = x + residual.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch

from .. import configs
from ..kernels.linear_rows import linear_row_kernel, linear_rows_kernel
from .call import Operator
from .device import cdiv, has_dependent_launches, multiprocessors
from .norm_types import sizes
from .recipe import New, Operand, Recipe
from .rows import contiguous

NO_GRADIENT = "flashproto: linear_rows has no gradient; call it under torch.no_grad()"


class Settings(NamedTuple):
    """norm: of one row before the layer, "layer", "rms" or "" for none; eps, casting: the norm's;
    activation: see kernels/glu.py, "" for none; up: whether it is multiplied by up; overlap: whether
    the launch before writes no weight, so that weights may be read while it runs."""

    norm: str = ""
    eps: float = 0.0
    casting: str = "torch"
    activation: str = ""
    up: bool = False
    overlap: bool = False


def makes(
    settings: Settings, x: Any, weight: Any, bias: Any, residual: Any, *_: Any
) -> list[New | None]:
    """y, total."""
    N = weight.shape[0] // (1 + settings.up)
    y = New.contiguous((*x.shape[:-1], N), x.dtype, x.device)
    return [y, None if residual is None else New.contiguous(x.shape, x.dtype, x.device)]


def forward(recipe: Recipe, settings: Settings, inputs: Any, outputs: Any) -> None:
    x, weight, bias, residual, norm_weight, norm_bias, counters = inputs
    y, total = outputs
    (M, K), N = sizes(x, 1), y.shape[-1]
    if M == 0 or N == 0:
        return
    x, weight, bias = x.rows(), weight.rows(), contiguous(bias)
    count = multiprocessors(x.device)
    overlap = settings.overlap and has_dependent_launches(x.device)
    launched: dict[str, Any] = {"PDL": overlap, "launch_pdl": overlap or None}
    if M == 1:
        if residual is not None:
            residual = residual.rows()
            total = total or recipe.make(New.contiguous(residual.shape, y.dtype, y.device))
        row = configs.linear_row(N, K, settings.norm != "", settings.up, count)
        chunks = cdiv(K, row.inner)
        recipe.launch(
            linear_row_kernel, cdiv(N, row.columns),
            x, residual, contiguous(norm_weight), contiguous(norm_bias), weight, bias, y, total,
            weight.stride(0), N, K, settings.eps,
            NORM=settings.norm, CASTING=settings.casting, ACT=settings.activation, UP=settings.up,
            BLOCK_N=row.columns, C=row.inner, CHUNKS=chunks, WHOLE=chunks * row.inner == K,
            num_warps=row.num_warps, **launched,
        )  # fmt: skip
        return
    most = 0 if counters is None else counters.numel()
    tile = configs.linear_rows(M, N, K, settings.up, count, most)
    partials: Operand | None = None
    if tile.splits > 1:
        shape = tile.splits, 1 + settings.up, M, N
        partials = recipe.make(New.contiguous(shape, torch.float32, x.device))
    recipe.launch(
        linear_rows_kernel, cdiv(N, tile.columns) * tile.splits,
        x, weight, bias, y, partials, counters if tile.splits > 1 else None,
        x.stride(0), weight.stride(0), M, N, K,
        ACT=settings.activation, UP=settings.up, BLOCK_M=tile.rows, BLOCK_N=tile.columns,
        BLOCK_K=tile.inner, STEPS=tile.steps, SPLITS=tile.splits, WHOLE=K % tile.inner == 0,
        num_warps=tile.num_warps, num_stages=tile.num_stages, **launched,
    )  # fmt: skip


linear_rows = Operator(
    "linear_rows",
    inputs="x, weight, bias?, residual?, norm_weight?, norm_bias?, counters?",
    outputs=2,
    settings=Settings,
    makes=makes,
    forward=forward,
    differentiable=2,
    no_gradient=NO_GRADIENT,
)
