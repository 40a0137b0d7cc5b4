"""LayerNorm and RMSNorm into 8-bit floats with a scale for each row: the operator's recipe.

Legend and settings: norm.py, dtype being out's; out of x's shape, scale [..., 1, ...] one number a row.
"""

from __future__ import annotations

from typing import Any

import torch

from .. import configs
from ..kernels.norm_quantize import norm_quantize_kernel, norm_quantize_split_kernel
from .call import Operator
from .device import capability
from .norm import HookedSettings, settings_of_launch
from .norm_launch import forward_arguments, launch_of_rows, outputs_like
from .norm_types import sizes
from .recipe import New, Operand, Recipe

SMALLEST_SCALE = 2.0**-126


def makes(settings: HookedSettings, x: Any, residual: Any, *_: Any) -> list[New | None]:
    """out, scale, total."""
    out, total = outputs_like(x, residual, settings.dtype)
    ndim = settings.normalized_ndim
    rows = (*x.shape[: x.ndim - ndim], *(1,) * ndim)
    return [out, New.contiguous(rows, torch.float32, x.device), total]


def forward(
    recipe: Recipe, settings: HookedSettings, inputs: Any, outputs: list[Operand | None]
) -> None:
    x, residual, weight, bias, *operands = inputs
    out, scale, total = outputs
    assert out is not None and scale is not None
    if x.numel() == 0:
        scale.fill_(SMALLEST_SCALE)
        return
    M, N = sizes(x, settings.normalized_ndim)
    how = settings_of_launch(settings, x.shape, operands)
    rows, numbers = forward_arguments((x, residual, weight, bias), how)
    # The whole row waits for its scale in float32, which takes as much room as a residual.
    config = configs.norm_forward(N, 4, True, settings.centered, capability(x.device))
    kernels = norm_quantize_kernel, norm_quantize_split_kernel
    tensors, numbers = (*rows, out, total, scale), (*numbers, torch.finfo(settings.dtype).max)
    launch_of_rows(recipe, kernels, config, M, N, tensors, numbers, exchanges=2)


quantized_norm = Operator(
    "quantized_norm",
    inputs="x, residual?, weight?, bias?, *operands",
    outputs=3,
    settings=HookedSettings,
    makes=makes,
    forward=forward,
    differentiable=3,
    no_gradient="flashproto: norms into 8-bit floats have no gradient",
)
