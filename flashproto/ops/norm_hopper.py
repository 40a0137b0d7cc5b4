"""LayerNorm and RMSNorm of wide rows on Hopper: launches; see kernels/hopper/norm_forward.py,
norm_forward_unaligned.py and norm_backward.py.

Legend: norm_launch.py.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from .. import configs
from ..kernels.hopper.norm_backward import norm_backward_shared_kernel
from ..kernels.hopper.norm_forward import norm_forward_shared_kernel, norm_forward_shared_split_kernel
from ..kernels.hopper.norm_forward_ring import norm_forward_ring_kernel
from ..kernels.hopper.norm_forward_unaligned import norm_forward_unaligned_kernel
from .exchange import POLLS, exchange_words, programs_at_once
from .launch import Launch, cdiv, launcher
from .norm_launch import (
    How,
    Inputs,
    Outputs,
    Saved,
    column_sums_launch,
    contiguous,
    partial_sums,
    sizes,
)
from .rows import as_rows

launch_forward_shared = launcher(norm_forward_shared_kernel, tensors=8)
launch_forward_shared_split = launcher(norm_forward_shared_split_kernel, tensors=10)
launch_forward_ring = launcher(norm_forward_ring_kernel, tensors=10)
launch_forward_unaligned = launcher(norm_forward_unaligned_kernel, tensors=10)
launch_backward_shared = launcher(norm_backward_shared_kernel, tensors=10)

# Rows between one whose partial results are made known and the one that is written in the same step.
FORWARD_LAG, BACKWARD_LAG = 1, 2


def placed_rows(x: Tensor, normalized_ndim: int) -> Tensor:
    """x as [M, N] whose rows start as far behind multiples of 16 bytes as those of a contiguous tensor
    that starts at one: x itself or a copy.

    What a row gives shall not depend on where it lies.
    """
    x = as_rows(x, normalized_ndim)
    if x.data_ptr() % 16 != 0 or (x.stride(0) - x.shape[1]) * x.element_size() % 16 != 0:
        x = x.clone(memory_format=torch.contiguous_format)
    return x


def forward_launch_hopper(
    inputs: Inputs, outputs: Outputs, how: How, config: configs.RowConfig
) -> Launch:
    """The launch that fills the outputs, of some elements; x and residual are of one dtype."""
    x, residual, weight, bias = inputs
    y, total, mean, rstd = outputs
    M, N = sizes(x, how.normalized_ndim)
    x, residual_stride = placed_rows(x, how.normalized_ndim), 0
    if residual is None:
        total = None
    else:
        residual = placed_rows(residual, how.normalized_ndim)
        residual_stride = residual.stride(0)
    tensors = (
        x, residual, contiguous(weight), contiguous(bias),
        y, total, mean if how.centered else None, rstd,
    )  # fmt: skip
    per_unit = 16 // x.element_size()
    unaligned = N % per_unit != 0
    if unaligned:
        per_unit = 1
    numbers: tuple[int, ...] = (x.stride(0) // per_unit, residual_stride // per_unit, M, N // per_unit)
    constants: tuple[Any, ...] = (how.eps, how.centered, how.casting)
    options: dict[str, Any] = {
        "C": config.columns, "num_warps": config.num_warps, "maxnreg": config.max_registers,
    }  # fmt: skip
    tiles = cdiv(M, config.rows)
    if not unaligned:
        options["R"] = config.rows
        constants = (*constants, N % config.columns == 0)
    if not config.split:
        arguments = (*tensors, *numbers, *constants)
        return Launch(launch_forward_shared, tiles, arguments, options, aligned=True)
    splits, words, lanes = exchange_words(x, M, N, config)
    options |= {"LANES": lanes, "POLLS": POLLS}
    groups = tiles
    if unaligned:
        launch = launch_forward_unaligned
        options |= {"C": config.columns + 8, "LANES": max(lanes, 32)}
    elif config.stages > 1:
        launch = launch_forward_ring
        options |= {"TURNS": config.stages, "LAG": FORWARD_LAG}
        groups = even_groups(tiles, programs_at_once(x.device, config) // splits)
        numbers = (*numbers, groups)
    else:
        launch = launch_forward_shared_split
    arguments = (*tensors, words, None, *numbers, *constants)
    return Launch(launch, groups * splits, arguments, options, words, aligned=True, clears=True)


def even_groups(tiles: int, most: int) -> int:
    """Into how many groups, at most `most` or one, tiles go so that the largest is as small as can be;
    no more than that takes."""
    return cdiv(tiles, cdiv(tiles, max(most, 1)))


def backward_launches_hopper(
    dy: Tensor, saved: Saved, gradients: tuple[Tensor, Tensor | None, Tensor | None], how: How,
    config: configs.RowConfig,
) -> list[Launch]:  # fmt: skip
    """backward_launches of norm_launch.py; gradients: (dx, dweight, dbias); dy is of the dtype of x."""
    x, _, weight, _, mean, rstd = saved
    dx, dweight, dbias = gradients
    M, N = sizes(x, how.normalized_ndim)
    x, dy = (placed_rows(t, how.normalized_ndim) for t in (x, dy))
    splits, words, lanes = exchange_words(x, M, N, config)
    P = min(max(programs_at_once(x.device, config) // splits, 1), M)
    partials = partial_sums(P, N, dweight, dbias)
    tensors = (
        dy, x, contiguous(weight),
        contiguous(mean) if how.centered else None, contiguous(rstd), dx, *partials,
    )  # fmt: skip
    per_unit = 16 // x.element_size()
    whole = N % config.columns == 0
    numbers = (dy.stride(0) // per_unit, x.stride(0) // per_unit, M, N // per_unit, P)
    arguments = (*tensors, words, None, *numbers, how.centered, how.casting)
    options: dict[str, Any] = {
        "C": config.columns, "WHOLE": whole, "TURNS": config.stages, "LAG": BACKWARD_LAG,
        "LANES": lanes, "POLLS": POLLS,
        "num_warps": config.num_warps, "maxnreg": config.max_registers,
    }  # fmt: skip
    first = Launch(
        launch_backward_shared, P * splits, arguments, options,
        words, aligned=True, clears=True,
    )  # fmt: skip
    if dweight is None and dbias is None:
        return [first]
    return [first, column_sums_launch(*partials, dweight, dbias)]
