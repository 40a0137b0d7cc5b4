"""LayerNorm and RMSNorm: the plans of eager calls, see plans.py.

Legend: norm_launch.py.  The statistics of a call, if it keeps any, are one piece of memory, mean behind
rstd, and so are the partial sums of dweight and dbias: launches take addresses there, multiples of 16
bytes.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .. import configs, plans
from .autograd import differentiates, recorder
from .launch import cdiv, takes_addresses
from .memory import Memory, New, aligned, maker
from .norm import NormBackwardFunction, Settings, backward, norm, settings
from .norm_launch import (
    How,
    backward_launches,
    empty_gradients,
    forward_launch,
    needed_outputs,
    norm_backward,
    sizes,
)


def padded(count: int) -> int:
    """float32 of whole 16 bytes that hold `count` of them."""
    return 4 * cdiv(count, 4)


class Statistics(NamedTuple):
    """Where mean, if there is one, and rstd of M rows are in their memory; there is none where the
    backward works them out again."""

    rows: int
    centered: bool

    @property
    def words(self) -> int:
        return (1 + self.centered) * padded(self.rows)

    @property
    def to_mean(self) -> int:
        """Bytes from rstd to mean."""
        return 4 * padded(self.rows)

    def views(self, memory: Tensor | None) -> tuple[Tensor | None, Tensor | None]:
        """(mean, rstd)."""
        if memory is None:
            return None, None
        M, start = self.rows, padded(self.rows)
        return memory[start : start + M] if self.centered else None, memory[:M]

    def parts(self, device: torch.device) -> tuple[Any, Any]:
        """(mean, rstd) for a launch that makes them."""
        memory = New((self.words,), (1,), torch.float32, device)
        return memory.behind(padded(self.rows)) if self.centered else None, memory


def recorder_of(
    fill: Callable[..., Any],
    gradients: Callable[..., tuple[Tensor | None, ...]],
    has_weight: bool,
    has_statistics: bool,
    layout: Statistics,
    settings: Settings,
) -> Callable[..., Any]:
    """What records a call of a plan.

    fill: x, then what is given of residual, weight and bias, to y, then what there is of total and
    statistics; gradients: see plan_gradients.

    What a small call takes is Python between torch and the launch.  Hence a Function of the plan's own
    (of 6 KiB) with no argument that is None, and two ways forward: starred arguments take time too.
    """
    has_residual = settings.has_residual
    others_kept = slice(has_residual, has_residual + has_weight)

    def forward_with_weight(ctx, x, weight, bias=None):
        made = fill(x, weight) if bias is None else fill(x, weight, bias)
        if not has_statistics:
            ctx.save_for_backward(x, weight)
            return made
        y, statistics = made
        ctx.save_for_backward(x, weight, statistics)
        return y

    def forward_anyhow(ctx, x, *others):
        made = fill(x, *others)
        if not has_residual:
            y, *statistics = made if has_statistics else (made,)
            ctx.save_for_backward(x, *others[others_kept], *statistics)
            return y
        y, total, *statistics = made
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(total, *others[others_kept], *statistics)
        return y, total

    class PlannedNormFunction(torch.autograd.Function):
        forward = staticmethod(
            forward_with_weight if has_weight and not has_residual else forward_anyhow
        )

        @staticmethod
        def backward(ctx, dy, dtotal=None):
            x, *kept = ctx.saved_tensors
            weight = kept[0] if has_weight else None
            statistics = kept[-1].contiguous() if has_statistics else None
            need_x, *needed = ctx.needs_input_grad
            need_residual = has_residual and needed[0]
            need_dweight = has_weight and needed[has_residual]
            need_dbias = len(needed) > has_residual + has_weight and needed[-1]
            needs = need_x, need_residual, need_dweight, need_dbias
            if dy is None or differentiates():
                saved, launch = (x, weight, *layout.views(statistics)), NormBackwardFunction.apply
                made = backward(saved, needs, launch, settings, dy, dtotal)
            else:
                made = gradients(x, weight, statistics, dy, dtotal, needs)
            dx, dresidual, dweight, dbias = made[:4]
            between = ((dresidual,) if has_residual else ()) + ((dweight,) if has_weight else ())
            return dx, *between, dbias

    return recorder(PlannedNormFunction)


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
    """norm as a function of x and what is given of residual, weight and bias, for such as are like
    these."""
    given = [t is not None for t in (x, residual, weight, bias)]

    def anyhow(*tensors):
        rest = iter(tensors)
        inputs = (next(rest) if there else None for there in given)
        return norm(*inputs, normalized_ndim, eps, centered, casting)

    if x.numel() == 0 or not takes_addresses(x.device):
        return anyhow
    M, N = sizes(x, normalized_ndim)
    how = How(normalized_ndim, eps, centered, casting)
    inputs: Any = tuple(t if t is None else aligned(t) for t in (x, residual, weight, bias))
    results = needed_outputs(x, residual, normalized_ndim, centered, False)[:2]
    y, total = (t if t is None else New.like(t) for t in results)
    layout = Statistics(M, centered)
    outputs: Any = y, total, *layout.parts(x.device)
    launch = forward_launch(inputs, outputs, how)
    fill = launch.bind(*inputs, making=True)
    if fill is None:
        return anyhow
    plain: Callable[..., Any] | None = None
    if launch.words is None and not launch.aligned:  # of wide rows statistics cost nothing
        without: Any = y, total, None, None
        plain = forward_launch(inputs, without, how).bound(making=True)
    has_statistics = configs.norm_keeps_statistics(N)
    if not has_statistics:
        assert plain is not None
        fill = plain
    kept = settings(x, residual, bias, normalized_ndim, eps, centered, casting)
    gradients = plan_gradients(how, layout, kept)
    record = recorder_of(fill, gradients, weight is not None, has_statistics, layout, kept)

    def without_statistics(*tensors):
        made = fill(*tensors)
        return made[0] if residual is None else made[:2]

    planned = plans.ByGrad(record, without_statistics if plain is None else plain)
    return plans.where_aligned(planned, anyhow) if launch.aligned else planned


def plan_gradients(
    how: How, layout: Statistics, settings: Settings
) -> Callable[..., tuple[Tensor | None, ...]]:
    """(dx, dresidual, dweight, dbias) as a function of (x, weight, statistics, dy, dtotal, which of the
    four are needed; the others are None), for tensors of one shape, dtype and device; strides may
    differ, as hooks of saved tensors do not keep them, but for those of statistics."""
    kinds: dict[tuple[object, ...], Callable[..., tuple[Tensor | None, ...]]] = {}

    def gradients(x, weight, statistics, dy, dtotal, needs):
        key = (
            x.stride(), None if weight is None else weight.stride(), dy.stride(),
            None if dtotal is None else dtotal.stride(), needs,
        )  # fmt: skip
        tensors = x, weight, statistics, dy, dtotal
        if key not in kinds:
            kinds[key] = plan_gradients_like(*tensors, needs, how, layout, settings)
        return kinds[key](*tensors)

    return gradients


def plan_gradients_like(
    x: Tensor, weight: Tensor | None, statistics: Tensor | None, dy: Tensor, dtotal: Tensor | None,
    needs: tuple[bool, ...], how: How, layout: Statistics, settings: Settings,
) -> Callable[..., tuple[Tensor | None, ...]]:  # fmt: skip
    """plan_gradients of tensors like these: of their strides too."""
    need_x, need_residual, need_dweight, need_dbias = needs
    normalized_ndim, eps, centered, casting, _, dtypes = settings
    same = dtypes[0] == dtypes[1]
    wanted = need_dweight, need_dbias

    def pick(dx, dresidual, dweight, dbias):
        dresidual = dx if same else dresidual
        return (
            dx if need_x else None, dresidual if need_residual else None,
            dweight if need_dweight else None, dbias if need_dbias else None,
        )  # fmt: skip

    def anyhow(x, weight, statistics, dy, dtotal):
        made = norm_backward(
            dy, dtotal, x, weight, *layout.views(statistics), normalized_ndim, eps, centered,
            *dtypes, *wanted, casting,
        )  # fmt: skip
        return pick(*made)

    bound = bind_gradients(x, weight, *layout.views(statistics), dy, dtotal, wanted, how, dtypes)
    if bound is None:
        return anyhow
    compute, to_mean = bound.compute, layout.to_mean

    def planned(x, weight, statistics, dy, dtotal):
        at_rstd = at_mean = None
        if statistics is not None:
            at_rstd = statistics.data_ptr()
            at_mean = at_rstd + to_mean if centered else None
        return pick(*compute(x, weight, at_mean, at_rstd, dy, dtotal))

    return plans.where_aligned(planned, anyhow) if bound.aligned else planned


class BoundGradients(NamedTuple):
    """compute: (x, weight, address of mean, of rstd, dy, dtotal) to (dx, dresidual, dweight, dbias),
    None for one that is not asked for; aligned: see Launch."""

    compute: Callable[..., tuple[Tensor | None, ...]]
    aligned: bool


def bind_gradients(
    x: Tensor, weight: Tensor | None, mean: Tensor | None, rstd: Tensor | None, dy: Tensor,
    dtotal: Tensor | None, wanted: tuple[bool, bool], how: How,
    dtypes: tuple[torch.dtype, torch.dtype, torch.dtype],
) -> BoundGradients | None:  # fmt: skip
    """norm_backward for tensors like these, of their strides too; None where it copies one.

    wanted: whether dweight and dbias are; dtypes: of x, residual and bias.
    """
    made = empty_gradients(x, weight, *dtypes, how.normalized_ndim, *wanted)
    dy, x = aligned(dy), aligned(x)
    first, *sums = backward_launches(dy, dtotal, (x, None, weight, None, mean, rstd), made, how)
    dx, dresidual, dweight, dbias = (t if t.numel() else None for t in made)
    floats = Memory(0, torch.float32, x.get_device())
    has_dweight, has_dbias = dweight is not None, dbias is not None
    partials = floats if has_dweight else None, floats if has_dbias else None
    at_rstd = None if rstd is None else floats
    at_mean = at_rstd if how.centered else None
    # The kernel of aligned rows takes neither what it has no use for nor gaps where it would be.
    given = (dy, x, weight) if first.aligned else (dy, dtotal, x, None, weight, None)
    results = (dx,) if first.aligned else (dx, dresidual)
    own = first.arguments[: len(given)]
    tensors = *own, at_mean, at_rstd, *results, *partials
    launch = first._replace(arguments=(*tensors, *first.arguments[len(tensors) :])).bind(*given)
    if launch is None:
        return None

    def fill_aligned(dy, dtotal, x, input, weight, bias, mean, rstd, dx, dresidual, dweight, dbias):
        launch(dy, x, weight, mean, rstd, dx, dweight, dbias)

    fill = fill_aligned if first.aligned else launch
    add_up, words = None, 0
    if sums:
        total = sums[0].arguments
        words = padded(max(t.numel() for t in total[:2] if t is not None))
        add_up = sums[0]._replace(arguments=(*partials, *total[2:])).bound()
    to_dbias = 4 * words * has_dweight
    memory = x.new_empty(words * (has_dweight + has_dbias), dtype=torch.float32)
    new_dx, new_dresidual, new_dweight, new_dbias, new_sums = map(
        maker, (dx, dresidual, dweight, dbias, memory)
    )

    def compute(x, weight, at_mean, at_rstd, dy, dtotal):
        dx, dresidual = new_dx(), new_dresidual()
        if add_up is None:
            fill(dy, dtotal, x, None, weight, None, at_mean, at_rstd, dx, dresidual, None, None)
            return dx, dresidual, None, None
        sums = new_sums()
        at_sums = sums.data_ptr()
        at_dweight = at_sums if has_dweight else None
        at_dbias = at_sums + to_dbias if has_dbias else None
        sums_at = at_dweight, at_dbias
        fill(dy, dtotal, x, None, weight, None, at_mean, at_rstd, dx, dresidual, *sums_at)
        dweight, dbias = new_dweight(), new_dbias()
        add_up(*sums_at, dweight, dbias)
        return dx, dresidual, dweight, dbias

    return BoundGradients(compute, first.aligned)
