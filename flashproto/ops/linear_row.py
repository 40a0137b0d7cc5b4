"""A linear layer of one row: the operator's recipe.

Legend: x, residual [..., K], one row in all; weight [N, K], or with `up` [2N, K], gates first; bias [N]
or [2N]; norm_weight, norm_bias [K]; y [..., N]; total = x + residual.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from .. import configs
from ..kernels.linear_row import linear_row_kernel
from .call import Operator
from .device import cdiv, has_dependent_launches, multiprocessors
from .recipe import Compute, New, Recipe
from .rows import contiguous

NO_GRADIENT = "flashproto: linear_row has no gradient; call it under torch.no_grad()"


class Settings(NamedTuple):
    """norm: before the layer, "layer", "rms" or "" for none; eps, casting: the norm's; activation: see
    kernels/glu.py, "" for none; up: whether it is multiplied by up; overlap: whether the launch before
    writes no weight, so that weights may be read while it runs."""

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
    x, weight, bias, residual, norm_weight, norm_bias = inputs
    y, total = outputs
    x, weight = x.rows(), weight.rows()
    bias, norm_weight, norm_bias = map(contiguous, (bias, norm_weight, norm_bias))
    N, K = y.shape[-1], x.shape[1]
    if residual is not None:
        residual = residual.rows()
        total = total or recipe.make(New.contiguous(residual.shape, y.dtype, y.device))
    row = configs.linear_row(N, K, settings.norm != "", settings.up, multiprocessors(x.device))
    chunks = cdiv(K, row.inner)
    copies = any(isinstance(step, Compute) for step in recipe.steps)  # of weights, say
    overlap = settings.overlap and not copies and has_dependent_launches(x.device)
    recipe.launch(
        linear_row_kernel, cdiv(N, row.columns),
        x, residual, norm_weight, norm_bias, weight, bias, y, total,
        weight.stride(0), N, K, settings.eps,
        NORM=settings.norm, CASTING=settings.casting, ACT=settings.activation, UP=settings.up,
        BLOCK_N=row.columns, C=row.inner, CHUNKS=chunks, WHOLE=chunks * row.inner == K, PDL=overlap,
        num_warps=row.num_warps, launch_pdl=overlap or None,
    )  # fmt: skip


linear_row = Operator(
    "linear_row",
    inputs="x, weight, bias?, residual?, norm_weight?, norm_bias?",
    outputs=2,
    settings=Settings,
    makes=makes,
    forward=forward,
    differentiable=2,
    no_gradient=NO_GRADIENT,
)
