"""LayerNorm and RMSNorm: launches of the kernels, and their memory.

The launches on Hopper are imported where they are used: they need Gluon, which takes time to import.

Legend: norm_types.py.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from .. import configs
from ..kernels.norm import norm_forward_kernel, norm_forward_split_kernel
from ..kernels.norm_backward import norm_backward_kernel, norm_backward_split_kernel
from .call import Gradient
from .column_sums import column_sums, partial_sums
from .device import capability, cdiv, has_hopper_kernels, programs_at_once
from .norm_types import (
    Gradients,
    Inputs,
    NormSettings,
    Outputs,
    Saved,
    sizes,
    statistics_in,
    statistics_like,
)
from .recipe import Exchange, New, Operand, Recipe
from .rows import POLLS, contiguous, exchange, tile_of

# --- forward -------------------------------------------------------------------------------------


def outputs_like(x: Any, residual: Any, dtype: torch.dtype) -> tuple[New, New | None]:
    """(y, total); no total without a residual."""
    y, total = New.contiguous(x.shape, dtype, x.device), None
    if residual is not None:
        wider = torch.promote_types(x.dtype, residual.dtype)
        total = New.contiguous(x.shape, wider, x.device)
    return y, total


def launch_forward(recipe: Recipe, inputs: Inputs, outputs: Outputs, settings: NormSettings) -> None:
    """Add the launch that fills the outputs, of some elements."""
    x, residual, _, _ = inputs
    M, N = sizes(x, settings.normalized_ndim)
    shared = shared_config(inputs, N, settings)
    if shared is not None:
        outputs = with_statistics(recipe, outputs, settings)
        from .norm_hopper import launch_forward_hopper

        return launch_forward_hopper(recipe, inputs, outputs, settings, shared)
    config = forward_config(x, residual, N, settings)
    if config.split:
        outputs = with_statistics(recipe, outputs, settings)
    rows, numbers = forward_arguments(inputs, settings)
    kernels = norm_forward_kernel, norm_forward_split_kernel
    launch_of_rows(recipe, kernels, config, M, N, (*rows, *outputs), numbers)


def with_statistics(recipe: Recipe, outputs: Outputs, settings: NormSettings) -> Outputs:
    """The outputs with statistics, which kernels of wide rows always write: it costs them nothing, and
    calls with and without a backward share one compiled kernel."""
    y, total, mean, rstd = outputs
    memory = recipe.make(statistics_like(y, settings.normalized_ndim, settings.centered))
    own_mean, own_rstd = statistics_in(memory, settings.centered)
    return y, total, mean or own_mean, rstd or own_rstd


def forward_arguments(inputs: Inputs, settings: NormSettings) -> tuple[Inputs, tuple[Any, ...]]:
    """The inputs as forward kernels take them, and the numbers and constants that come last."""
    x, residual, weight, bias = inputs
    normalized_ndim, eps, centered, casting, prologue, epilogue, _ = settings
    M, N = sizes(x, normalized_ndim)
    x = x.rows(normalized_ndim)
    residual = None if residual is None else residual.rows(normalized_ndim)
    numbers = (
        x.stride(0),
        0 if residual is None else residual.stride(0),
        M,
        N,
        eps,
        prologue.arguments,
        epilogue.arguments,
        centered,
        casting,
        prologue.forward,
        epilogue.forward,
    )
    return (x, residual, contiguous(weight), contiguous(bias)), numbers


def launch_of_rows(
    recipe: Recipe,
    kernels: tuple[Any, Any],
    config: configs.RowConfig,
    M: int,
    N: int,
    tensors: tuple[Operand | None, ...],
    numbers: tuple[Any, ...],
    exchanges: int = 1,
) -> None:
    """Add the launch of a forward kernel: of `kernels` the first, for whole rows, or the other, for
    split ones, whose programs meet `exchanges` times."""
    options = tile_of(config)
    whole, split = kernels
    if not config.split:
        options |= tile_options(config, N)
        recipe.launch(whole, cdiv(M, config.rows), *tensors, *numbers, **options)
        return
    splits, words, lanes = exchange(N, config, exchanges * M)
    options |= {"WHOLE": N % config.columns == 0, "LANES": lanes, "POLLS": POLLS}
    recipe.launch(split, M * splits, *tensors, Exchange(words), *numbers, **options)


def forward_config(
    x: Operand, residual: Operand | None, N: int, settings: NormSettings
) -> configs.RowConfig:
    # The operands of a hook take room beside x: fewer elements a thread, as for wider ones.
    dtype = x.dtype if residual is None else torch.promote_types(x.dtype, residual.dtype)
    itemsize = 4 if settings.hooked else dtype.itemsize
    if settings.split_rows:
        return configs.norm_split(N, itemsize)
    return configs.norm_forward(
        N, itemsize, residual is not None, settings.centered, capability(x.device)
    )


def shared_config(inputs: Inputs, N: int, settings: NormSettings) -> configs.RowConfig | None:
    """Tiles of the kernel that keeps rows in shared memory, for calls that it takes."""
    x, residual, *parameters = inputs
    if settings.hooked or settings.split_rows or (residual is not None and residual.dtype != x.dtype):
        return None
    kind = N, x.element_size(), residual is not None, settings.centered
    if N % 8:
        config = configs.norm_forward_unaligned(*kind)
    else:
        held = sum(p.element_size() for p in parameters if p is not None)
        config = configs.norm_forward_shared(*kind, held)
    return config if config is not None and has_hopper_kernels(x.device) else None


def tile_options(config: configs.RowConfig, N: int) -> dict[str, Any]:
    """How kernels cut rows that are not split into tiles."""
    held = config.columns * config.chunks * config.cluster
    return {"R": max(config.rows, config.cluster), "K": config.chunks, "WHOLE": held == N}


# --- backward ------------------------------------------------------------------------------------


def gradients_like(
    x: Any, weight: Any, context: Any, grads: Sequence[Any], needs: Sequence[bool], apart: bool = False
) -> list[Gradient]:
    """Memory for (dx, dresidual, dweight, dbias).

    context: with normalized_ndim, has_residual, and the dtypes x_dtype, residual_dtype, bias_dtype;
    grads: (dy, dtotal).  Kernels always write dx; dresidual of the same dtype is dx itself, unless they
    are `apart`.  Without a dy there are only these two.
    """
    dy, dtotal = grads
    need_x, need_residual, need_dweight, need_dbias = needs
    if dy is None and (dtotal is None or not context.has_residual):
        return [None] * 4
    same = need_residual and context.residual_dtype == context.x_dtype and not apart
    dx = dresidual = None
    if dy is not None or need_x or same:
        dx = New.contiguous(x.shape, context.x_dtype, x.device)
    if need_residual and not same:
        dresidual = New.contiguous(x.shape, context.residual_dtype, x.device)
    if dy is None:
        return [dx, 0 if same else dresidual, None, None]
    shape = x.shape[x.ndim - context.normalized_ndim :]
    return [
        dx,
        0 if same else dresidual,
        New.contiguous(shape, weight.dtype, x.device) if need_dweight else None,
        New.contiguous(shape, context.bias_dtype, x.device) if need_dbias else None,
    ]


def through_sum(dtotal: Operand, made: Sequence[Operand | None]) -> list[Operand | None]:
    """The gradients of x and residual where nothing reaches y, in place of those made."""
    return [None if x is None else converted(dtotal, x.dtype) for x in made[:2]]


def converted(x: Operand, dtype: torch.dtype) -> Operand:
    """In this dtype, and for an op in other memory."""
    return x.clone() if x.dtype == dtype and x.recipe.functional else x.to(dtype)


def launch_backward(
    recipe: Recipe,
    dy: Operand,
    dtotal: Operand | None,
    saved: Saved,
    gradients: Gradients,
    settings: NormSettings,
) -> None:
    """Add the launches that fill the gradients: of partial sums, and of their sums where these are
    asked for.  x is total where a residual was added, dtotal the gradient that reaches it from
    elsewhere."""
    x, input, weight, bias, mean, rstd = saved
    normalized_ndim, eps, centered, casting, prologue, epilogue, split_rows = settings
    if x.numel() == 0:
        for gradient in gradients:
            if gradient is not None:
                gradient.zero_()
        return
    M, N = sizes(x, normalized_ndim)
    dx, dresidual, dweight, dbias = gradients
    if dtotal is None and dresidual is None and not settings.hooked and not split_rows:
        shared = configs.norm_backward_shared(N, x.element_size(), centered)
        if shared is not None and x.dtype == dy.dtype and has_hopper_kernels(x.device):
            from .norm_hopper import launch_backward_hopper

            made = dx, dweight, dbias
            return launch_backward_hopper(recipe, dy, saved, made, settings, shared)
    x, dy = x.rows(normalized_ndim), dy.rows(normalized_ndim)
    dtotal = None if dtotal is None else dtotal.rows(normalized_ndim)
    input = None if input is None else input.rows(normalized_ndim)
    tensors = (dy, dtotal, x, input, contiguous(weight), contiguous(bias), mean, rstd, dx, dresidual)
    numbers = (
        dy.stride(0),
        0 if dtotal is None else dtotal.stride(0),
        x.stride(0),
        0 if input is None else input.stride(0),
        M,
        N,
    )
    hooks = (
        prologue.arguments,
        prologue.gradients,
        epilogue.arguments,
        epilogue.gradients,
        centered,
        casting,
        prologue.forward,
        prologue.backward,
        epilogue.backward,
    )
    sums = dweight, dbias
    any_sums = dweight is not None or dbias is not None
    itemsize = 4 if settings.hooked else x.element_size()
    config = configs.norm_backward(
        N,
        itemsize,
        any_sums,
        centered,
        capability(x.device),
        dtotal is not None,
        dbias is not None,
        rstd is not None,
    )
    if split_rows:
        config = configs.norm_split(N, itemsize)
    options = tile_of(config)
    if settings.hooked and any_sums and not config.split:
        # What 512 threads a multiprocessor can have: without a cap the compiler aims lower, and spills.
        options["maxnreg"] = 128
    programs = programs_at_once(x.device, config)
    if config.split:
        splits, words, lanes = exchange(N, config, M)
        P = min(max(programs // splits, 1), M)
        partials = partial_sums(recipe, P, N, sums)
        options |= {"WHOLE": N % config.columns == 0, "LANES": lanes, "POLLS": POLLS}
        pair = Exchange(words), Exchange(words, used=True)
        recipe.launch(
            norm_backward_split_kernel,
            P * splits,
            *tensors,
            *partials,
            *pair,
            *numbers,
            P,
            *hooks,
            **options,
        )
    else:
        tiles = cdiv(M, config.rows)
        P = min(tiles, programs) if any_sums or config.cluster > 1 else tiles
        partials = partial_sums(recipe, P, N, sums)
        options |= tile_options(config, N) | {"STAGES": config.stages, "CLUSTER": config.cluster}
        options["num_ctas"] = config.cluster if config.cluster > 1 else None
        eps_or_none = eps if rstd is None else None
        recipe.launch(
            norm_backward_kernel, P, *tensors, *partials, *numbers, eps_or_none, *hooks, **options
        )
    column_sums(recipe, partials, sums)
