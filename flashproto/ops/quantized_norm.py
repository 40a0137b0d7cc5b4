"""LayerNorm and RMSNorm into 8-bit floats with a scale for each row: the operator's recipe.

Legend: norm_types.py, hook_arguments.py; out of x's shape, scale [..., 1, ...] one number a row.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch

from .. import configs
from ..kernels.norm_quantize import norm_quantize_kernel, norm_quantize_split_kernel
from .call import Operator
from .device import capability
from .hook_arguments import hook_arguments, parts_of
from .norm_launch import forward_arguments, launch_of_rows, outputs_like
from .norm_types import NormSettings, sizes
from .recipe import New, Operand, Recipe

SMALLEST_SCALE = 2.0**-126


class Settings(NamedTuple):
    """dtype: out's.  A hook is its name, "" for none, and its scalars."""

    normalized_ndim: int
    eps: float
    centered: bool
    casting: str
    dtype: torch.dtype
    prologue: str
    prologue_scalars: tuple[float, ...]
    epilogue: str
    epilogue_scalars: tuple[float, ...]


def makes(settings: Settings, x: Any, residual: Any, *_: Any) -> list[New | None]:
    """out, scale, total."""
    out, total = outputs_like(x, residual, settings.dtype)
    ndim = settings.normalized_ndim
    rows = (*x.shape[: x.ndim - ndim], *(1,) * ndim)
    return [out, New.contiguous(rows, torch.float32, x.device), total]


def forward(recipe: Recipe, settings: Settings, inputs: Any, outputs: list[Operand | None]) -> None:
    x, residual, weight, bias, *operands = inputs
    out, scale, total = outputs
    assert out is not None and scale is not None
    if x.numel() == 0:
        scale.fill_(SMALLEST_SCALE)
        return
    ndim, eps, centered, casting, dtype, prologue, scalars, epilogue, after_scalars = settings
    before, after = parts_of(prologue, operands)
    how = NormSettings(
        ndim,
        eps,
        centered,
        casting,
        hook_arguments(prologue, before, scalars, x.shape, ndim),
        hook_arguments(epilogue, after, after_scalars, x.shape, ndim),
    )
    M, N = sizes(x, ndim)
    rows, numbers = forward_arguments((x, residual, weight, bias), how)
    # The whole row waits for its scale in float32, which takes as much room as a residual.
    config = configs.norm_forward(N, 4, True, centered, capability(x.device))
    kernels = norm_quantize_kernel, norm_quantize_split_kernel
    tensors, numbers = (*rows, out, total, scale), (*numbers, torch.finfo(dtype).max)
    launch_of_rows(recipe, kernels, config, M, N, tensors, numbers, exchanges=2)


quantized_norm = Operator(
    "quantized_norm",
    inputs="x, residual?, weight?, bias?, *operands",
    outputs=3,
    settings=Settings,
    makes=makes,
    forward=forward,
    differentiable=3,
    no_gradient="flashproto: norms into 8-bit floats have no gradient",
)
