"""softmax and log_softmax forward of wide rows on Hopper: launches of
kernels/hopper/softmax_forward.py.

Legend: x [M, N], y [..., N].
"""

from __future__ import annotations

from .. import configs
from ..kernels.hopper.softmax_forward import (
    softmax_forward_shared_kernel,
    softmax_forward_shared_split_kernel,
)
from .recipe import Operand, Recipe
from .rows import launch_splits, tile_of


def launch_forward_hopper(
    recipe: Recipe, x: Operand, y: Operand, log: bool, config: configs.RowConfig
) -> None:
    """Launch the kernel that fills y, which is not empty.

    Rows that do not start at multiples of 16 bytes are copied to where they do, so that a row's result
    does not depend on where it lies in memory.
    """
    per_unit = 16 // x.element_size()
    if not x.aligned or x.stride(0) % per_unit != 0:
        x = x.clone()
    M, N = x.shape
    numbers = x.stride(0) // per_unit, M, N // per_unit, log, N % config.columns == 0
    if config.split:
        kernel = softmax_forward_shared_split_kernel
        return launch_splits(recipe, kernel, config, (x, y), numbers, clears=True)
    recipe.launch(softmax_forward_shared_kernel, M, x, y, *numbers, **tile_of(config))
