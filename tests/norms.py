"""What the tests of norms share: the operator with its arguments one by one, and its launch alone."""

from __future__ import annotations

from torch import Tensor

from flashproto.ops import norm as ops
from flashproto.ops.norm_launch import launch_forward
from flashproto.ops.norm_types import NormSettings
from flashproto.ops.recipe import Recipe


def norm(
    x: Tensor,
    residual: Tensor | None,
    weight: Tensor | None,
    bias: Tensor | None,
    normalized_ndim: int,
    eps: float,
    centered: bool,
    casting: str = "torch",
):
    """y, or with a residual (y, total), by the kernels."""
    settings = ops.Settings(normalized_ndim, eps, centered, casting)
    returns = (0,) if residual is None else (0, 1)
    return ops.norm((x, residual, weight, bias), settings, returns)


def fill(x: Tensor, y: Tensor, mean: Tensor | None, rstd: Tensor, eps: float) -> None:
    """Launch the forward kernel of x [M, N]; mean: None for RMSNorm."""
    recipe = Recipe(x.device)
    tensors = x, y, mean, rstd
    x_, y_, mean_, rstd_ = map(recipe.input, tensors)
    settings = NormSettings(1, eps, mean is not None, "torch")
    launch_forward(recipe, (x_, None, None, None), (y_, None, mean_, rstd_), settings)
    recipe.execute(*tensors)
