"""LayerNorm and RMSNorm: launches of the kernels.

Legend: x, residual, y, total [..., *normalized_shape], seen as [M, N]; weight, bias [N] once
flattened; mean, rstd [M] float32.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple, TypeAlias

import torch
from torch import Tensor

from .. import backends, configs
from ..kernels.norm import norm_forward_kernel, norm_forward_split_kernel
from ..kernels.norm_backward import (
    column_sums_kernel,
    norm_backward_kernel,
    norm_backward_split_kernel,
)
from .exchange import POLLS, exchange_words, programs_at_once
from .hook_arguments import NO_HOOK, HookArguments, launchers
from .launch import (
    Launch,
    Launcher,
    capability,
    cdiv,
    has_dependent_launches,
    has_hopper_kernels,
    launcher,
)
from .rows import as_rows

launch_forward, launch_forward_hooked = launchers(norm_forward_kernel, tensors=8)
launch_forward_split, launch_forward_split_hooked = launchers(norm_forward_split_kernel, tensors=9)
launch_backward, launch_backward_hooked = launchers(norm_backward_kernel, tensors=12)
launch_backward_split, launch_backward_split_hooked = launchers(norm_backward_split_kernel, tensors=14)
launch_column_sums = launcher(column_sums_kernel, tensors=4)

Inputs: TypeAlias = tuple[Tensor, Tensor | None, Tensor | None, Tensor | None]
"""(x, residual, weight, bias)"""
Outputs: TypeAlias = tuple[Tensor, Tensor | None, Tensor | None, Tensor | None]
"""(y, total, mean, rstd); the statistics are None where nobody keeps them"""
Gradients: TypeAlias = tuple[Tensor, Tensor, Tensor, Tensor]
"""(dx, dresidual, dweight, dbias); one that is not asked for is of no elements"""


class How(NamedTuple):
    """All of a call but its tensors; see functional/norm.py.  The backward reads eps only where it is
    not given the statistics."""

    normalized_ndim: int
    eps: float
    centered: bool
    casting: str
    prologue: HookArguments = NO_HOOK
    epilogue: HookArguments = NO_HOOK
    split_rows: bool = False

    @property
    def hooked(self) -> bool:
        return self.prologue is not NO_HOOK or self.epilogue is not NO_HOOK


# --- forward -------------------------------------------------------------------------------------


def sizes(x: Tensor, normalized_ndim: int) -> tuple[int, int]:
    """(M, N): how many rows, how many elements in each."""
    lead = x.ndim - normalized_ndim
    if lead == normalized_ndim == 1:
        return x.shape  # type: ignore[return-value]
    return math.prod(x.shape[:lead]), math.prod(x.shape[lead:])


def empty_outputs(
    x: Tensor, residual: Tensor | None, normalized_ndim: int, centered: bool, kept: bool = True
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """(y, total, mean, rstd), uninitialised; one without a part to play is of no elements.

    kept: whether the statistics have one.
    """
    y, *others = needed_outputs(x, residual, normalized_ndim, centered, kept)
    dtypes = x.dtype, torch.float32, torch.float32
    total, mean, rstd = (
        x.new_empty(0, dtype=dtype) if t is None else t for t, dtype in zip(others, dtypes, strict=True)
    )
    return y, total, mean, rstd


def needed_outputs(
    x: Tensor, residual: Tensor | None, normalized_ndim: int, centered: bool, kept: bool = True
) -> Outputs:
    """empty_outputs, but None for one without a part to play, which eager calls need not pay for."""
    M, _ = sizes(x, normalized_ndim)
    y = torch.empty_like(x) if x.is_contiguous() else x.new_empty(x.shape)
    total = None
    if residual is not None:
        total = x.new_empty(x.shape, dtype=torch.promote_types(x.dtype, residual.dtype))
    mean = x.new_empty(M, dtype=torch.float32) if centered and kept else None
    return y, total, mean, x.new_empty(M, dtype=torch.float32) if kept else None


def keeps_statistics(x: Tensor, normalized_ndim: int) -> bool:
    """Whether the forward keeps mean and rstd, where there are no hooks."""
    return configs.norm_keeps_statistics(sizes(x, normalized_ndim)[1])


def norm_forward(
    x: Tensor,
    residual: Tensor | None,
    weight: Tensor | None,
    bias: Tensor | None,
    normalized_ndim: int,
    eps: float,
    centered: bool,
    casting: str = "torch",
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Launch the forward kernel; returns (y, total, mean, rstd) as empty_outputs describes them."""
    kept = keeps_statistics(x, normalized_ndim)
    outputs = empty_outputs(x, residual, normalized_ndim, centered, kept)
    filled = outputs if kept else (*outputs[:2], None, None)
    run_forward((x, residual, weight, bias), filled, How(normalized_ndim, eps, centered, casting))
    return outputs


def run_forward(inputs: Inputs, outputs: Outputs, how: How) -> None:
    """Fill the outputs, which empty_outputs or needed_outputs made."""
    y, _, *statistics = outputs
    if y.numel():
        forward_launch(inputs, outputs, how)()
        return
    for statistic in statistics:
        if statistic is not None:
            statistic.zero_()


def forward_launch(inputs: Inputs, outputs: Outputs, how: How) -> Launch:
    """The launch that fills the outputs, of some elements; the statistics may be None."""
    x, residual, _, _ = inputs
    y, total, mean, rstd = outputs
    M, N = sizes(x, how.normalized_ndim)
    shared = shared_config(inputs, N, how)
    if shared is not None:
        from .norm_hopper import forward_launch_hopper

        return forward_launch_hopper(inputs, outputs, how, shared)
    rows, numbers = forward_arguments(inputs, how)
    tensors = (*rows, y, None if residual is None else total, mean if how.centered else None, rstd)
    launches = launch_forward, launch_forward_split
    if how.hooked:
        launches = launch_forward_hooked, launch_forward_split_hooked
    return launch_of_rows(launches, forward_config(x, residual, N, how), M, N, tensors, numbers)


def forward_arguments(inputs: Inputs, how: How) -> tuple[Inputs, tuple[Any, ...]]:
    """The inputs as forward kernels take them, and the numbers and constants that come last."""
    x, residual, weight, bias = inputs
    normalized_ndim, eps, centered, casting, prologue, epilogue, _ = how
    M, N = sizes(x, normalized_ndim)
    x = as_rows(x, normalized_ndim)
    residual = None if residual is None else as_rows(residual, normalized_ndim)
    numbers = (
        x.stride(0), 0 if residual is None else residual.stride(0), M, N, eps,
        prologue.arguments, epilogue.arguments, centered, casting, prologue.forward, epilogue.forward,
    )  # fmt: skip
    return (x, residual, contiguous(weight), contiguous(bias)), numbers


def launch_of_rows(
    launches: tuple[Launcher, Launcher], config: configs.RowConfig, M: int, N: int,
    tensors: tuple[Tensor | None, ...], numbers: tuple[Any, ...], exchanges: int = 1,
) -> Launch:  # fmt: skip
    """The launch of a forward kernel: of `launches` the first, for whole rows, or the other, for split
    ones, whose programs meet `exchanges` times."""
    options: dict[str, Any] = {
        "C": config.columns, "num_warps": config.num_warps, "maxnreg": config.max_registers
    }  # fmt: skip
    whole, split = launches
    assert tensors[0] is not None
    if not config.split:
        options |= tile_options(config, N)
        return Launch(whole, cdiv(M, config.rows), (*tensors, *numbers), options)
    splits, words, lanes = exchange_words(tensors[0], exchanges * M, N, config)
    options |= {"WHOLE": N % config.columns == 0, "LANES": lanes, "POLLS": POLLS}
    return Launch(split, M * splits, (*tensors, words, *numbers), options, words)


def forward_config(x: Tensor, residual: Tensor | None, N: int, how: How) -> configs.RowConfig:
    # The operands of a hook take room beside x: fewer elements a thread, as for wider ones.
    dtype = x.dtype if residual is None else torch.promote_types(x.dtype, residual.dtype)
    itemsize = 4 if how.hooked else dtype.itemsize
    if how.split_rows:
        return configs.norm_split(N, itemsize)
    return configs.norm_forward(N, itemsize, residual is not None, how.centered, capability(x.device))


def shared_config(inputs: Inputs, N: int, how: How) -> configs.RowConfig | None:
    """Tiles of the kernel that keeps rows in shared memory, for calls that it takes."""
    x, residual, *parameters = inputs
    if how.hooked or how.split_rows or (residual is not None and residual.dtype != x.dtype):
        return None
    kind = N, x.element_size(), residual is not None, how.centered
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


def contiguous(parameter: Tensor | None) -> Tensor | None:
    return None if parameter is None else parameter.contiguous()


# --- backward ------------------------------------------------------------------------------------


def empty_gradients(
    x: Tensor,
    weight: Tensor | None,
    x_dtype: torch.dtype,
    residual_dtype: torch.dtype,
    bias_dtype: torch.dtype,
    normalized_ndim: int,
    need_dweight: bool,
    need_dbias: bool,
) -> Gradients:
    """(dx, dresidual, dweight, dbias), uninitialised; one that is not asked for is of no elements.

    dresidual of the same dtype as dx is dx itself, hence not asked for.
    """
    shape = x.shape[x.ndim - normalized_ndim :]
    dx = x.new_empty(x.shape, dtype=x_dtype)
    dresidual = x.new_empty(x.shape if residual_dtype != x_dtype else 0, dtype=residual_dtype)
    dweight = x.new_empty(shape if need_dweight else 0, dtype=None if weight is None else weight.dtype)
    return dx, dresidual, dweight, x.new_empty(shape if need_dbias else 0, dtype=bias_dtype)


def norm_backward(
    dy: Tensor,
    dtotal: Tensor | None,
    x: Tensor,
    weight: Tensor | None,
    mean: Tensor | None,
    rstd: Tensor | None,
    normalized_ndim: int,
    eps: float,
    centered: bool,
    x_dtype: torch.dtype,
    residual_dtype: torch.dtype,
    bias_dtype: torch.dtype,
    need_dweight: bool,
    need_dbias: bool,
    casting: str = "torch",
) -> Gradients:
    """Launch the backward kernels; x is total where a residual was added, dtotal the gradient that
    reaches it from elsewhere; mean and rstd may be None where keeps_statistics says so.  Arguments
    otherwise and results as empty_gradients."""
    gradients = empty_gradients(
        x, weight, x_dtype, residual_dtype, bias_dtype, normalized_ndim, need_dweight, need_dbias
    )
    how = How(normalized_ndim, eps, centered, casting)
    if not keeps_statistics(x, normalized_ndim):
        mean = rstd = None
    run_backward(dy, dtotal, (x, None, weight, None, mean, rstd), gradients, how)
    return gradients


Saved: TypeAlias = tuple[
    Tensor, Tensor | None, Tensor | None, Tensor | None, Tensor | None, Tensor | None
]  # fmt: skip
"""(x, input, weight, bias, mean, rstd) of kernels/norm_backward.py; mean is None where x has mean 0,
both where the backward is to work them out again"""


def run_backward(
    dy: Tensor, dtotal: Tensor | None, saved: Saved, gradients: Gradients, how: How
) -> None:
    """Fill the gradients, which empty_gradients made."""
    if saved[0].numel():
        for launch in backward_launches(dy, dtotal, saved, gradients, how):
            launch()
        return
    for gradient in gradients:
        gradient.zero_()


def backward_launches(
    dy: Tensor, dtotal: Tensor | None, saved: Saved, gradients: Gradients, how: How
) -> list[Launch]:
    """The launches that fill the gradients, of some elements: of partial sums, and of their sums where
    these are asked for."""
    x, input, weight, bias, mean, rstd = saved
    normalized_ndim, eps, centered, casting, prologue, epilogue, split_rows = how
    M, N = sizes(x, normalized_ndim)
    dx = gradients[0]
    dresidual, dweight, dbias = (t if t.numel() else None for t in gradients[1:])
    x, dy = as_rows(x, normalized_ndim), as_rows(dy, normalized_ndim)
    dtotal = None if dtotal is None else as_rows(dtotal, normalized_ndim)
    input = None if input is None else as_rows(input, normalized_ndim)
    tensors = (
        dy, dtotal, x, input, contiguous(weight), contiguous(bias),
        contiguous(mean) if centered else None, contiguous(rstd),
        dx, dresidual,
    )  # fmt: skip
    numbers = (
        dy.stride(0), 0 if dtotal is None else dtotal.stride(0), x.stride(0),
        0 if input is None else input.stride(0), M, N,
    )  # fmt: skip
    hooks = (
        prologue.arguments, prologue.gradients, epilogue.arguments, epilogue.gradients,
        centered, casting, prologue.forward, prologue.backward, epilogue.backward,
    )  # fmt: skip
    if dtotal is None and dresidual is None and not how.hooked and not split_rows:
        shared = configs.norm_backward_shared(N, x.element_size(), how.centered)
        if shared is not None and x.dtype == dy.dtype and has_hopper_kernels(x.device):
            from .norm_hopper import backward_launches_hopper

            return backward_launches_hopper(dy, saved, (dx, dweight, dbias), how, shared)
    sums = dweight is not None or dbias is not None
    hooked = how.hooked
    itemsize = 4 if hooked else x.element_size()
    config = configs.norm_backward(
        N, itemsize, sums, centered, capability(x.device), dtotal is not None, dbias is not None,
        rstd is not None,
    )  # fmt: skip
    if split_rows:
        config = configs.norm_split(N, itemsize)
    options: dict[str, Any] = {
        "C": config.columns, "num_warps": config.num_warps, "maxnreg": config.max_registers
    }  # fmt: skip
    if hooked and sums and not config.split:
        # What 512 threads a multiprocessor can have: without a cap the compiler aims lower, and spills.
        options["maxnreg"] = 128
    programs = programs_at_once(x.device, config)
    if config.split:
        splits, words, lanes = exchange_words(x, M, N, config)
        P = min(max(programs // splits, 1), M)
        partials = partial_sums(P, N, dweight, dbias)
        launch = launch_backward_split_hooked if hooked else launch_backward_split
        options |= {"WHOLE": N % config.columns == 0, "LANES": lanes, "POLLS": POLLS}
        arguments = (*tensors, *partials, words, None, *numbers, P, *hooks)
        first = Launch(launch, P * splits, arguments, options, words, clears=True)
    else:
        tiles = cdiv(M, config.rows)
        P = min(tiles, programs) if sums or config.cluster > 1 else tiles
        partials = partial_sums(P, N, dweight, dbias)
        launch = launch_backward_hooked if hooked else launch_backward
        options |= tile_options(config, N) | {"STAGES": config.stages, "CLUSTER": config.cluster}
        options["num_ctas"] = config.cluster if config.cluster > 1 else None
        eps_or_none = eps if rstd is None else None
        first = Launch(launch, P, (*tensors, *partials, *numbers, eps_or_none, *hooks), options)
    return [first, column_sums_launch(*partials, dweight, dbias)] if sums else [first]


def partial_sums(
    P: int, N: int, dweight: Tensor | None, dbias: Tensor | None
) -> tuple[Tensor | None, Tensor | None]:
    """Float32 [P, N] for either output that is asked for."""
    dweight, dbias = (
        None if t is None else torch.empty(P, N, dtype=torch.float32, device=t.device)
        for t in (dweight, dbias)
    )
    return dweight, dbias


def column_sums(dweight_partial, dbias_partial, dweight, dbias) -> None:
    """Add up the partial sums [P, N] in a fixed order."""
    column_sums_launch(dweight_partial, dbias_partial, dweight, dbias)()


def column_sums_launch(dweight_partial, dbias_partial, dweight, dbias) -> Launch:
    """The launch that adds up the partial sums [P, N] in a fixed order."""
    partial = dbias_partial if dweight_partial is None else dweight_partial
    P, N = partial.shape
    config = configs.column_sums(N)
    columns = 1024 if backends.INTERPRETED else config.columns  # it takes a millisecond a program
    dependent = has_dependent_launches(partial.device)
    options: dict[str, Any] = {
        "R": config.rows, "C": columns, "num_warps": config.num_warps,
        "PDL": dependent, "launch_pdl": dependent or None,
    }  # fmt: skip
    tensors = dweight_partial, dbias_partial, dweight, dbias
    programs = sum(t is not None for t in (dweight, dbias)) * cdiv(N, columns)
    return Launch(launch_column_sums, programs, (*tensors, P, N), options)
