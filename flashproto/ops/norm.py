"""LayerNorm and RMSNorm, plain and with hooks, another dtype or split rows: the operators' recipes.

Legend: norm_types.py, hook_arguments.py.  y is the norm of x over its last `normalized_ndim`
dimensions, or that of total = x + residual as rounded to the wider of the two dtypes.  centered is
LayerNorm, otherwise RMSNorm.  casting: see kernels/norm.py.  Operands of hooks, the prologue's first,
broadcast to x.

There are two operators, since each argument of an op takes a call its time; their functions are the
same, and read what the plain one lacks in `options`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple, TypeAlias

import torch

from .. import configs, hooks
from ..kernels.norm_recover import recoverable_weight_kernel, recovered, recovered_unweighted
from .call import Gradient, Operator
from .device import cdiv
from .hook_arguments import HookArguments, hooks_of, operand_rows, stores_of, summed
from .norm_launch import gradients_like, launch_backward, launch_forward, outputs_like, through_sum
from .norm_types import NormSettings, sizes, statistics_in, statistics_like
from .recipe import New, Operand, Recipe
from .rows import needed_like


class Options(NamedTuple):
    """dtype: y's, None for that of x.  A hook is its name, "" for none, and its scalars."""

    dtype: torch.dtype | None = None
    split_rows: bool = False
    prologue: str = ""
    prologue_scalars: tuple[float, ...] = ()
    epilogue: str = ""
    epilogue_scalars: tuple[float, ...] = ()


PLAIN = Options()


class Settings(NamedTuple):
    """keeps_y: whether the backward reads y in place of x or total, see kernels/norm_recover.py."""

    normalized_ndim: int
    eps: float
    centered: bool
    casting: str
    keeps_y: bool = False

    @property
    def options(self) -> Options:
        return PLAIN


class Context(NamedTuple):
    """What the backward knows of a call beside the saved tensors: settings, and more."""

    normalized_ndim: int
    eps: float
    centered: bool
    casting: str
    keeps_y: bool
    has_residual: bool
    x_dtype: torch.dtype
    residual_dtype: torch.dtype
    bias_dtype: torch.dtype

    @property
    def options(self) -> Options:
        return PLAIN


class HookedSettings(NamedTuple):
    """With Options."""

    normalized_ndim: int
    eps: float
    centered: bool
    casting: str
    keeps_y: bool
    dtype: torch.dtype
    split_rows: bool
    prologue: str
    prologue_scalars: tuple[float, ...]
    epilogue: str
    epilogue_scalars: tuple[float, ...]

    @property
    def options(self) -> Options:
        return Options(*self[5:])


class HookedContext(NamedTuple):
    """With Options."""

    normalized_ndim: int
    eps: float
    centered: bool
    casting: str
    keeps_y: bool
    dtype: torch.dtype
    split_rows: bool
    prologue: str
    prologue_scalars: tuple[float, ...]
    epilogue: str
    epilogue_scalars: tuple[float, ...]
    has_residual: bool
    x_dtype: torch.dtype
    residual_dtype: torch.dtype
    bias_dtype: torch.dtype

    @property
    def options(self) -> Options:
        return Options(*self[5:11])


AnySettings: TypeAlias = Settings | HookedSettings
AnyContext: TypeAlias = Context | HookedContext


def settings_of_launch(
    of: AnySettings | AnyContext, shape: Sequence[int], operands: Any, stores: Any = ()
) -> NormSettings:
    """The settings of launches for x of `shape`; stores: for the gradients of the hooks' operands."""
    before, after = hooks_of(of.options, operands, shape, of.normalized_ndim, stores)
    return NormSettings(*of[:4], before, after, of.options.split_rows)


def makes(settings: AnySettings, x: Any, residual: Any, *_: Any) -> list[New | None]:
    """y, total, statistics; of plain norms of narrow rows the backward works them out again."""
    ndim, options, keeps_y = settings.normalized_ndim, settings.options, settings.keeps_y
    statistics = None
    if keeps_y or options is not PLAIN or configs.norm_keeps_statistics(sizes(x, ndim)[1]):
        statistics = statistics_like(x, ndim, settings.centered and not keeps_y)
    return [*outputs_like(x, residual, options.dtype or x.dtype), statistics]


def forward(recipe: Recipe, settings: AnySettings, inputs: Any, outputs: list[Operand | None]) -> None:
    x, residual, weight, bias, *operands = inputs
    y, total, statistics = outputs
    assert y is not None
    if y.numel() == 0:
        if statistics is not None:
            statistics.zero_()
        return
    how = settings_of_launch(settings, x.shape, operands)
    if settings.keeps_y and weight is not None:
        weight = recoverable_weight(recipe, weight, settings.casting)
        how = how._replace(casting="torch" if settings.casting == "gemma" else settings.casting)
    filled = y, total, *statistics_in(statistics, settings.centered and not settings.keeps_y)
    launch_forward(recipe, (x, residual, weight, bias), filled, how)


def saves(settings: AnySettings, inputs: list[Any], outputs: list[Any]) -> list[Any]:
    """input is x, where there is a total to be saved as x, and the prologue's derivative reads it."""
    x, residual, weight, bias, *operands = inputs
    y, total, statistics = outputs
    options = settings.options
    if options is PLAIN:
        return [y if settings.keeps_y else x if residual is None else total, weight, statistics]
    reads = residual is not None and options.prologue and hooks.defined(options.prologue).needs_value
    bias = bias if options.epilogue else None
    x, input = x if residual is None else total, x if reads else None
    return [x, weight, statistics, input, bias, *operands]


def context(settings: AnySettings, inputs: Any) -> AnyContext:
    x, residual, _, bias, *_ = inputs
    dtypes = [x.dtype if t is None else t.dtype for t in (x, residual, bias)]
    kind: Any = Context if settings.options is PLAIN else HookedContext
    return kind(*settings, residual is not None, *dtypes)


def gradients(context: AnyContext, grads: Any, saved: Any, needs: Any) -> list[Gradient]:
    """With a prologue the gradient of the residual differs from that of x."""
    (x, weight, *_), (dy, dtotal), options = saved, grads, context.options
    if dy is None and (options is not PLAIN or context.keeps_y):
        dy = x  # it is 0, and the hooks have gradients, too
    made = gradients_like(x, weight, context, (dy, dtotal), needs[:4], apart=bool(options.prologue))
    return [*made, *needed_like(saved[5:], needs[4:])]


def backward(recipe: Recipe, context: AnyContext, grads: Any, saved: Any, made: Any) -> Any:
    (dy, dtotal), (x, weight, statistics, *others), options = grads, saved, context.options
    dtotal = dtotal if context.has_residual else None
    if dy is None and options is PLAIN and not context.keeps_y:
        return None if dtotal is None else [*through_sum(dtotal, made), None, None]
    if dy is None:
        dy = recipe.make(New.contiguous(x.shape, context.x_dtype, x.device)).zero_()
    input, bias, *operands = others or (None, None)
    stores = stores_of(made[4:], x.shape)
    how = settings_of_launch(context, x.shape, operands, stores)
    mean, rstd = statistics_in(statistics, context.centered and not context.keeps_y)
    if context.keeps_y:
        assert rstd is not None
        how = how._replace(prologue=recovery(context, x, weight, rstd))
    elif context.has_residual and options is not PLAIN:
        how = how._replace(prologue=how.prologue._replace(forward=None))  # total holds its result
    elif options.prologue and hooks.defined(options.prologue).needs_value:
        input = x
    launch_backward(recipe, dy, dtotal, (x, input, weight, bias, mean, rstd), made[:4], how)
    if x.numel() == 0:
        for store in stores:
            if store is not None:
                store.zero_()
    return [*made[:4], *summed(stores, made[4:])]


# --- y kept in place of x: see kernels/norm_recover.py --------------------------------------------


def weight_shift(casting: str) -> float:
    """What casting adds to the weight."""
    return 1.0 if casting == "gemma" else 0.0


def recoverable_weight(recipe: Recipe, weight: Operand, casting: str) -> Operand:
    """What xhat is multiplied by, float32."""
    weight = weight.contiguous()
    out = recipe.make(New.contiguous(weight.shape, torch.float32, weight.device))
    N = out.numel()
    shift = weight_shift(casting)
    recipe.launch(recoverable_weight_kernel, cdiv(N, 1024), weight, out, N, shift, C=1024)
    return out


def recovery(context: AnyContext, y: Operand, weight: Operand | None, rstd: Operand) -> HookArguments:
    """The prologue that makes of y what xhat is made of."""
    ndim = context.normalized_ndim
    rstd = rstd.reshape(*y.shape[: y.ndim - ndim], *(1,) * ndim)
    rows = tuple(operand_rows(t, y.shape, ndim) for t in (rstd, weight) if t is not None)
    if weight is None:
        return HookArguments(forward=recovered_unweighted, arguments=(rows, ()))
    return HookArguments(forward=recovered, arguments=(rows, (weight_shift(context.casting),)))


# --- the operators --------------------------------------------------------------------------------

SHARED: dict[str, Any] = {
    "outputs": 3,
    "makes": makes,
    "forward": forward,
    "saves": saves,
    "context": context,
    "gradients": gradients,
    "backward": backward,
    "differentiable": 2,
}
norm = Operator(
    "norm",
    inputs="x, residual?, weight?, bias?",
    settings=Settings,
    saved="x, weight?, statistics?",
    context_type=Context,
    **SHARED,
)
hooked_norm = Operator(
    "hooked_norm",
    inputs="x, residual?, weight?, bias?, *operands",
    settings=HookedSettings,
    saved="x, weight?, statistics, input?, bias?, *operands",
    context_type=HookedContext,
    **SHARED,
)
