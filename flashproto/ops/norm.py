"""LayerNorm and RMSNorm: launches of the kernels, their autograd.Function and torch.library ops.

Legend: x, residual, y, total [..., *normalized_shape], seen as [M, N]; weight, bias [N] once
flattened; mean, rstd [M] float32.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .. import backends, configs, plans
from ..kernels.norm import norm_forward_kernel, norm_forward_split_kernel
from ..kernels.norm_backward import (
    column_sums_kernel,
    norm_backward_kernel,
    norm_backward_split_kernel,
)
from .autograd import (
    FirstDerivative,
    KernelFunction,
    recorder,
    refuse_tangents,
    use_op,
    wants_grad,
)
from .launch import Launch, capability, cdiv, launcher, multiprocessors, on_device
from .rows import as_rows

launch_forward = launcher(norm_forward_kernel, tensors=8)
launch_forward_split = launcher(norm_forward_split_kernel, tensors=9)
launch_backward = launcher(norm_backward_kernel, tensors=12)
launch_backward_split = launcher(norm_backward_split_kernel, tensors=13)
launch_column_sums = launcher(column_sums_kernel, tensors=4)

# How often a program looks for the others of its row, about a microsecond each, before it does their
# work.  The interpreter runs one program after another: there is nothing to wait for.
POLLS = 1 if backends.INTERPRETED else 1024


def norm(
    x: Tensor,
    residual: Tensor | None,
    weight: Tensor | None,
    bias: Tensor | None,
    normalized_ndim: int,
    eps: float,
    centered: bool,
    casting: str = "torch",
) -> Tensor | tuple[Tensor, Tensor]:
    """Returns y, or with a residual (y, total); all of them differentiable.

    y is the norm of x over its last `normalized_ndim` dimensions, or that of total = x + residual
    as rounded to the wider of the two dtypes.  centered is LayerNorm, otherwise RMSNorm.  casting:
    see kernels/norm.py.
    """
    apply = torch.ops.flashproto.norm if use_op() else NormFunction.apply
    y, total, _, _ = apply(x, residual, weight, bias, normalized_ndim, eps, centered, casting)
    return y if residual is None else (y, total)


# --- launches ------------------------------------------------------------------------------------


def sizes(x: Tensor, normalized_ndim: int) -> tuple[int, int]:
    """(M, N): how many rows, how many elements in each."""
    lead = x.ndim - normalized_ndim
    if lead == normalized_ndim == 1:
        return x.shape  # type: ignore[return-value]
    return math.prod(x.shape[:lead]), math.prod(x.shape[lead:])


def empty_outputs(
    x: Tensor, residual: Tensor | None, normalized_ndim: int, centered: bool
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """(y, total, mean, rstd), uninitialised; one without a part to play is of no elements."""
    y, total, mean, rstd = needed_outputs(x, residual, normalized_ndim, centered)
    total = x.new_empty(0) if total is None else total
    return y, total, x.new_empty(0, dtype=torch.float32) if mean is None else mean, rstd


def needed_outputs(
    x: Tensor, residual: Tensor | None, normalized_ndim: int, centered: bool
) -> tuple[Tensor, Tensor | None, Tensor | None, Tensor]:
    """empty_outputs, but None for one without a part to play, which eager calls need not pay for."""
    M, _ = sizes(x, normalized_ndim)
    y = torch.empty_like(x) if x.is_contiguous() else x.new_empty(x.shape)
    total = None
    if residual is not None:
        total = x.new_empty(x.shape, dtype=torch.promote_types(x.dtype, residual.dtype))
    mean = x.new_empty(M, dtype=torch.float32) if centered else None
    return y, total, mean, x.new_empty(M, dtype=torch.float32)


class HookArguments(NamedTuple):
    """What the kernels take for one hook, see kernels/hooks.py; gradients only in the backward."""

    forward: Any = None
    backward: Any = None
    arguments: tuple[Any, Any] | None = None
    gradients: tuple[Tensor | None, ...] | None = None


NO_HOOK = HookArguments()


def launch_either(fast: Callable[..., None], kernel: Any, hooked: bool) -> Callable[..., None]:
    """The launcher of a kernel, or Triton's own way where hooks bring tuples of operands."""
    if not hooked:
        return fast

    def launch(programs: int, x: Tensor, *arguments: Any, **constants: Any) -> None:
        with on_device(x.device):
            kernel[(programs,)](x, *arguments, **constants)

    return launch


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
    outputs = empty_outputs(x, residual, normalized_ndim, centered)
    run_forward(x, residual, weight, bias, *outputs, normalized_ndim, eps, centered, casting)
    return outputs


def run_forward(
    x: Tensor,
    residual: Tensor | None,
    weight: Tensor | None,
    bias: Tensor | None,
    y: Tensor,
    total: Tensor | None,
    mean: Tensor | None,
    rstd: Tensor,
    normalized_ndim: int,
    eps: float,
    centered: bool,
    casting: str,
    prologue: HookArguments = NO_HOOK,
    epilogue: HookArguments = NO_HOOK,
) -> None:
    """Fill y, total, mean and rstd, which empty_outputs or needed_outputs made."""
    if y.numel() == 0:
        for statistic in (mean, rstd):
            if statistic is not None:
                statistic.zero_()
        return
    forward_launch(
        x, residual, weight, bias, y, total, mean, rstd, normalized_ndim, eps, centered, casting,
        prologue, epilogue,
    )()  # fmt: skip


def forward_launch(
    x: Tensor,
    residual: Tensor | None,
    weight: Tensor | None,
    bias: Tensor | None,
    y: Tensor,
    total: Tensor | None,
    mean: Tensor | None,
    rstd: Tensor | None,
    normalized_ndim: int,
    eps: float,
    centered: bool,
    casting: str,
    prologue: HookArguments = NO_HOOK,
    epilogue: HookArguments = NO_HOOK,
) -> Launch:
    """The launch that fills y, total, mean and rstd, of some elements; statistics may be None."""
    M, N = sizes(x, normalized_ndim)
    x = as_rows(x, normalized_ndim)
    residual = None if residual is None else as_rows(residual, normalized_ndim)
    tensors = (
        x, residual, contiguous(weight), contiguous(bias),
        y, None if residual is None else total, mean if centered else None, rstd,
    )  # fmt: skip
    numbers = (
        x.stride(0), 0 if residual is None else residual.stride(0), M, N, eps,
        prologue.arguments, epilogue.arguments, centered, casting, prologue.forward, epilogue.forward,
    )  # fmt: skip
    hooked = prologue is not NO_HOOK or epilogue is not NO_HOOK
    # The operands of a hook take room beside x: fewer elements a thread, as for wider ones.
    itemsize = 4 if hooked else (x if total is None or residual is None else total).element_size()
    config = configs.norm_forward(N, itemsize, residual is not None, centered, capability(x.device))
    options: dict[str, Any] = {
        "C": config.columns, "num_warps": config.num_warps, "maxnreg": config.max_registers
    }  # fmt: skip
    if config.split:
        splits, words, lanes = exchange(x, M, N, config)
        launch = launch_either(launch_forward_split, norm_forward_split_kernel, hooked)
        options |= {"WHOLE": N % config.columns == 0, "LANES": lanes, "POLLS": POLLS}
        return Launch(launch, M * splits, (*tensors, words, *numbers), options)
    launch = launch_either(launch_forward, norm_forward_kernel, hooked)
    whole = config.columns * config.chunks == N
    options |= {"R": config.rows, "K": config.chunks, "WHOLE": whole}
    return Launch(launch, cdiv(M, config.rows), (*tensors, *numbers), options)


def exchange(x: Tensor, M: int, N: int, config: configs.RowConfig) -> tuple[int, Tensor, int]:
    """(splits, words, LANES) of kernels/exchange.py for rows split by `config`."""
    splits = cdiv(N, config.columns)
    words = x.new_zeros((M, splits), dtype=torch.int64)
    return splits, words, configs.power_of_two(splits)


def contiguous(parameter: Tensor | None) -> Tensor | None:
    return None if parameter is None else parameter.contiguous()


def empty_gradients(
    x: Tensor,
    weight: Tensor | None,
    x_dtype: torch.dtype,
    residual_dtype: torch.dtype,
    bias_dtype: torch.dtype,
    normalized_ndim: int,
    need_dweight: bool,
    need_dbias: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
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
    mean: Tensor,
    rstd: Tensor,
    normalized_ndim: int,
    centered: bool,
    x_dtype: torch.dtype,
    residual_dtype: torch.dtype,
    bias_dtype: torch.dtype,
    need_dweight: bool,
    need_dbias: bool,
    casting: str = "torch",
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Launch the backward kernels; x is total where a residual was added, dtotal the gradient that
    reaches it from elsewhere.  Arguments otherwise and results as empty_gradients."""
    gradients = empty_gradients(
        x, weight, x_dtype, residual_dtype, bias_dtype, normalized_ndim, need_dweight, need_dbias
    )
    run_backward(
        dy, dtotal, x, None, weight, None, mean, rstd, *gradients, normalized_ndim, centered, casting
    )
    return gradients


def run_backward(
    dy: Tensor,
    dtotal: Tensor | None,
    x: Tensor,
    input: Tensor | None,
    weight: Tensor | None,
    bias: Tensor | None,
    mean: Tensor,
    rstd: Tensor,
    dx: Tensor,
    dresidual: Tensor,
    dweight: Tensor,
    dbias: Tensor,
    normalized_ndim: int,
    centered: bool,
    casting: str,
    prologue: HookArguments = NO_HOOK,
    epilogue: HookArguments = NO_HOOK,
) -> None:
    """Fill the gradients, which empty_gradients made; see kernels/norm_backward.py for the rest."""
    M, N = sizes(x, normalized_ndim)
    if x.numel() == 0:
        for gradient in (dx, dresidual, dweight, dbias):
            gradient.zero_()
        return
    dresidual_, dweight_, dbias_ = (t if t.numel() else None for t in (dresidual, dweight, dbias))
    x, dy = as_rows(x, normalized_ndim), as_rows(dy, normalized_ndim)
    dtotal = None if dtotal is None else as_rows(dtotal, normalized_ndim)
    input = None if input is None else as_rows(input, normalized_ndim)
    tensors = (
        dy, dtotal, x, input, contiguous(weight), contiguous(bias), mean if centered else None, rstd,
        dx, dresidual_,
    )  # fmt: skip
    numbers = (
        dy.stride(0), 0 if dtotal is None else dtotal.stride(0), x.stride(0),
        0 if input is None else input.stride(0), M, N,
    )  # fmt: skip
    hooks = (
        prologue.arguments, prologue.gradients, epilogue.arguments, epilogue.gradients,
        centered, casting, prologue.forward, prologue.backward, epilogue.backward,
    )  # fmt: skip
    sums = dweight_ is not None or dbias_ is not None
    hooked = prologue is not NO_HOOK or epilogue is not NO_HOOK
    config = configs.norm_backward(N, 4 if hooked else x.element_size(), sums)
    options = {"num_warps": config.num_warps, "maxnreg": config.max_registers}
    programs = config.programs * multiprocessors(x.device)
    if config.split:
        splits, words, lanes = exchange(x, M, N, config)
        P = min(max(programs // splits, 1), M)
        partials = partial_sums(P, N, dweight_, dbias_)
        launch = launch_either(launch_backward_split, norm_backward_split_kernel, hooked)
        launch(
            P * splits, *tensors, *partials, words, *numbers, P, *hooks,
            C=config.columns, WHOLE=N % config.columns == 0, LANES=lanes, POLLS=POLLS, **options,
        )  # fmt: skip
    else:
        tiles = cdiv(M, config.rows)
        P = min(tiles, programs) if sums else tiles
        partials = partial_sums(P, N, dweight_, dbias_)
        launch = launch_either(launch_backward, norm_backward_kernel, hooked)
        launch(
            P, *tensors, *partials, *numbers, *hooks, R=config.rows, C=config.columns,
            K=config.chunks, WHOLE=config.columns * config.chunks == N, STAGES=config.stages, **options,
        )  # fmt: skip
    if sums:
        column_sums(*partials, dweight_, dbias_)


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
    P, N = (dbias_partial if dweight_partial is None else dweight_partial).shape
    config = configs.column_sums(N)
    columns = 1024 if backends.INTERPRETED else config.columns  # it takes a millisecond a program
    launch_column_sums(
        cdiv(N, columns), dweight_partial, dbias_partial, dweight, dbias, P, N,
        R=config.rows, C=columns, num_warps=config.num_warps,
    )  # fmt: skip


# --- autograd ------------------------------------------------------------------------------------


class Settings(NamedTuple):
    """What backward knows of a call beside the saved tensors; dtypes: of x, residual and bias."""

    normalized_ndim: int
    centered: bool
    casting: str
    has_residual: bool
    dtypes: tuple[torch.dtype, ...]


def settings(x, residual, bias, normalized_ndim, centered, casting) -> Settings:
    dtypes = tuple(x.dtype if t is None else t.dtype for t in (x, residual, bias))
    return Settings(normalized_ndim, centered, casting, residual is not None, dtypes)


def setup_context(ctx, inputs, output) -> None:
    x, residual, weight, bias, normalized_ndim, _, centered, casting = inputs
    _, total, mean, rstd = output
    ctx.settings = settings(x, residual, bias, normalized_ndim, centered, casting)
    ctx.save_for_backward(x if residual is None else total, weight, mean, rstd)
    ctx.set_materialize_grads(False)


def backward(ctx, launch, dy: Tensor | None, dtotal: Tensor | None):
    """Gradients of norm's eight arguments; `launch` calls norm_backward."""
    x, weight, mean, rstd = ctx.saved_tensors
    need_x, need_residual, need_dweight, need_dbias = ctx.needs_input_grad[:4]
    normalized_ndim, centered, casting, has_residual, dtypes = ctx.settings
    dtotal = dtotal if has_residual else None
    x_dtype, residual_dtype, _ = dtypes
    if dy is not None:
        dx, dresidual, dweight, dbias = launch(
            dy, dtotal, x, weight, mean, rstd, normalized_ndim, centered, *dtypes,
            need_dweight, need_dbias, casting,
        )  # fmt: skip
        dresidual = dx if residual_dtype == x_dtype else dresidual
    elif dtotal is not None:
        dx, dresidual, dweight, dbias = dtotal.to(x_dtype), dtotal.to(residual_dtype), None, None
    else:
        return (None,) * 8
    return (
        dx if need_x else None,
        dresidual if need_residual else None,
        dweight if need_dweight else None,
        dbias if need_dbias else None,
        *(None,) * 4,
    )


class NormFunction(KernelFunction):
    """For eager calls.  It has no jvp: forward-mode differentiation raises."""

    @staticmethod
    def forward(x, residual, weight, bias, normalized_ndim, eps, centered, casting):
        outputs = needed_outputs(x, residual, normalized_ndim, centered)
        run_forward(x, residual, weight, bias, *outputs, normalized_ndim, eps, centered, casting)
        return outputs

    @staticmethod
    def setup_context(ctx, inputs, output):
        setup_context(ctx, inputs, output)
        ctx.mark_non_differentiable(*(t for t in output[2:] if t is not None))

    @staticmethod
    def backward(ctx, dy, dtotal, dmean, drstd):
        return backward(ctx, NormBackwardFunction.apply, dy, dtotal)


class NormBackwardFunction(FirstDerivative):
    """norm_backward."""

    @staticmethod
    def forward(*args):
        return norm_backward(*args)


class PlannedNormFunction(torch.autograd.Function):
    """For calls that follow a plan, see `plan`: `record` is all that such a call takes."""

    @staticmethod
    def forward(ctx, x, residual, weight, bias, compute, settings):
        y, total, mean, rstd = compute(x, residual, weight, bias)
        ctx.save_for_backward(x if residual is None else total, weight, mean, rstd)
        ctx.settings = settings
        ctx.set_materialize_grads(False)
        return y if residual is None else (y, total)

    @staticmethod
    def backward(ctx, dy, dtotal=None):
        return backward(ctx, NormBackwardFunction.launch, dy, dtotal)


record = recorder(PlannedNormFunction)


def plan(
    x: Tensor,
    residual: Tensor | None,
    weight: Tensor | None,
    bias: Tensor | None,
    normalized_ndim: int,
    eps: float,
    centered: bool,
    casting: str,
) -> plans.Plan:
    """norm as a function of its tensors, for such as are like these."""

    def anyhow(x, residual, weight, bias):
        return norm(x, residual, weight, bias, normalized_ndim, eps, centered, casting)

    if x.numel() == 0:
        return anyhow
    M, N = sizes(x, normalized_ndim)
    itemsize = max(t.element_size() for t in (x, residual) if t is not None)
    config = configs.norm_forward(N, itemsize, residual is not None, centered, capability(x.device))
    if config.split:
        return anyhow
    y, total, mean, rstd = needed_outputs(x, residual, normalized_ndim, centered)
    bound = []
    for means, rstds in ((mean, rstd), (None, None)):
        tensors = (x, residual, weight, bias, y, total, means, rstds)
        launch = forward_launch(*tensors, normalized_ndim, eps, centered, casting).bind(*tensors)
        if launch is None:
            return anyhow
        bound.append(launch)
    fill, fill_without_statistics = bound
    shape, contiguous = x.shape, x.is_contiguous()
    total_dtype = None if total is None else total.dtype
    options = settings(x, residual, bias, normalized_ndim, centered, casting)

    def outputs(x):
        y = torch.empty_like(x) if contiguous else x.new_empty(shape)
        return y, None if total_dtype is None else x.new_empty(shape, dtype=total_dtype)

    def compute(x, residual, weight, bias):
        y, total = outputs(x)
        mean = x.new_empty(M, dtype=torch.float32) if centered else None
        rstd = x.new_empty(M, dtype=torch.float32)
        fill(x, residual, weight, bias, y, total, mean, rstd)
        return y, total, mean, rstd

    def planned(x, residual, weight, bias):
        if wants_grad(x, residual, weight, bias):
            return record(x, residual, weight, bias, compute, options)
        y, total = outputs(x)
        fill_without_statistics(x, residual, weight, bias, y, total, None, None)
        return y if residual is None else (y, total)

    return planned


# --- compile: torch.library ops ------------------------------------------------------------------

norm_op = torch.library.custom_op(
    "flashproto::norm",
    norm_forward,
    mutates_args=(),
    schema="(Tensor x, Tensor? residual, Tensor? weight, Tensor? bias, int normalized_ndim, "
    'float eps, bool centered, str casting="torch") -> (Tensor, Tensor, Tensor, Tensor)',
)
norm_backward_op = torch.library.custom_op(
    "flashproto::norm_backward",
    norm_backward,
    mutates_args=(),
    schema="(Tensor dy, Tensor? dtotal, Tensor x, Tensor? weight, Tensor mean, Tensor rstd, "
    "int normalized_ndim, bool centered, ScalarType x_dtype, ScalarType residual_dtype, "
    'ScalarType bias_dtype, bool need_dweight, bool need_dbias, str casting="torch") '
    "-> (Tensor, Tensor, Tensor, Tensor)",
)


@norm_op.register_fake
def _(x, residual, weight, bias, normalized_ndim, eps, centered, casting="torch"):
    return empty_outputs(x, residual, normalized_ndim, centered)


@norm_backward_op.register_fake
def _(
    dy, dtotal, x, weight, mean, rstd, normalized_ndim, centered, x_dtype, residual_dtype, bias_dtype,
    need_dweight, need_dbias, casting="torch",
):  # fmt: skip
    return empty_gradients(
        x, weight, x_dtype, residual_dtype, bias_dtype, normalized_ndim, need_dweight, need_dbias
    )


def _backward(ctx, dy, dtotal, dmean, drstd):
    return backward(ctx, torch.ops.flashproto.norm_backward, dy, dtotal)


norm_op.register_autograd(_backward, setup_context=setup_context)
refuse_tangents(norm_op)
