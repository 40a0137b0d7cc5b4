"""LayerNorm and RMSNorm of wide rows on Hopper: launches; see kernels/hopper/norm_forward.py,
norm_forward_unaligned.py and norm_backward.py.

Legend: norm_types.py.
"""

from __future__ import annotations

from typing import Any

from .. import configs
from ..kernels.hopper.norm_backward import norm_backward_shared_kernel
from ..kernels.hopper.norm_forward import norm_forward_shared_kernel, norm_forward_shared_split_kernel
from ..kernels.hopper.norm_forward_ring import norm_forward_ring_kernel
from ..kernels.hopper.norm_forward_unaligned import norm_forward_unaligned_kernel
from .column_sums import column_sums, partial_sums
from .device import cdiv, programs_at_once
from .norm_types import Inputs, NormSettings, Outputs, Saved, sizes
from .recipe import Exchange, Operand, Recipe
from .rows import POLLS, contiguous, exchange, tile_of

# Rows between one whose partial results are made known and the one that is written in the same step.
FORWARD_LAG, BACKWARD_LAG = 1, 2


def placed_rows(x: Operand, normalized_ndim: int) -> Operand:
    """x as [M, N] whose rows start as far behind multiples of 16 bytes as those of a contiguous tensor
    that starts at one: x itself or a copy.

    What a row gives shall not depend on where it lies.
    """
    x = x.rows(normalized_ndim)
    if not x.aligned or (x.stride(0) - x.shape[1]) * x.element_size() % 16 != 0:
        x = x.clone()
    return x


def launch_forward_hopper(
    recipe: Recipe, inputs: Inputs, outputs: Outputs, settings: NormSettings, config: configs.RowConfig
) -> None:
    """Add the launch that fills the outputs, of some elements; x and residual are of one dtype."""
    x, residual, weight, bias = inputs
    M, N = sizes(x, settings.normalized_ndim)
    x, residual_stride = placed_rows(x, settings.normalized_ndim), 0
    if residual is not None:
        residual = placed_rows(residual, settings.normalized_ndim)
        residual_stride = residual.stride(0)
    tensors = x, residual, contiguous(weight), contiguous(bias), *outputs
    per_unit = 16 // x.element_size()
    unaligned = N % per_unit != 0
    if unaligned:
        per_unit = 1
    numbers: tuple[int, ...] = (x.stride(0) // per_unit, residual_stride // per_unit, M, N // per_unit)
    constants: tuple[Any, ...] = (settings.eps, settings.centered, settings.casting)
    options = tile_of(config)
    tiles = cdiv(M, config.rows)
    if not unaligned:
        options["R"] = config.rows
        constants = (*constants, N % config.columns == 0)
    if not config.split:
        kernel: Any = norm_forward_shared_kernel
        recipe.launch(kernel, tiles, *tensors, *numbers, *constants, **options)
        return
    splits, words, lanes = exchange(N, config, M)
    options |= {"LANES": lanes, "POLLS": POLLS}
    groups = tiles
    if unaligned:
        kernel = norm_forward_unaligned_kernel
        options |= {"C": config.columns + 8, "LANES": max(lanes, 32)}
    elif config.stages > 1:
        kernel = norm_forward_ring_kernel
        options |= {"TURNS": config.stages, "LAG": FORWARD_LAG}
        groups = even_groups(tiles, programs_at_once(x.device, config) // splits)
        numbers = (*numbers, groups)
    else:
        kernel = norm_forward_shared_split_kernel
    pair = Exchange(words), Exchange(words, used=True)
    recipe.launch(kernel, groups * splits, *tensors, *pair, *numbers, *constants, **options)


def even_groups(tiles: int, most: int) -> int:
    """Into how many groups, at most `most` or one, tiles go so that the largest is as small as can be;
    no more than that takes."""
    return cdiv(tiles, cdiv(tiles, max(most, 1)))


def launch_backward_hopper(
    recipe: Recipe,
    dy: Operand,
    saved: Saved,
    gradients: tuple[Operand, Operand | None, Operand | None],
    settings: NormSettings,
    config: configs.RowConfig,
) -> None:
    """launch_backward of norm_launch.py; gradients: (dx, dweight, dbias); dy has the dtype of x."""
    x, _, weight, _, mean, rstd = saved
    dx, dweight, dbias = gradients
    M, N = sizes(x, settings.normalized_ndim)
    x, dy = (placed_rows(t, settings.normalized_ndim) for t in (x, dy))
    splits, words, lanes = exchange(N, config, M)
    P = min(max(programs_at_once(x.device, config) // splits, 1), M)
    partials = partial_sums(recipe, P, N, (dweight, dbias))
    per_unit = 16 // x.element_size()
    recipe.launch(
        norm_backward_shared_kernel, P * splits,
        dy, x, contiguous(weight), mean, rstd, dx, *partials,
        Exchange(words), Exchange(words, used=True),
        dy.stride(0) // per_unit, x.stride(0) // per_unit, M, N // per_unit, P,
        settings.centered, settings.casting,
        C=config.columns, WHOLE=N % config.columns == 0, TURNS=config.stages, LAG=BACKWARD_LAG,
        LANES=lanes, POLLS=POLLS, num_warps=config.num_warps, maxnreg=config.max_registers,
    )  # fmt: skip
    column_sums(recipe, partials, (dweight, dbias))
