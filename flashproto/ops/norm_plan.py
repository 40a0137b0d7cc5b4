"""LayerNorm and RMSNorm: the plans of eager calls, see plans.py.

Legend: norm_launch.py.  The statistics of a call are one piece of memory, mean behind rstd, and so are
the partial sums of dweight and dbias: launches take addresses there, multiples of 16 bytes.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .. import plans
from .autograd import differentiates, recorder
from .launch import Memory, cdiv, takes_addresses
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
    """Where mean, if there is one, and rstd of M rows are in their memory."""

    rows: int
    centered: bool

    @property
    def words(self) -> int:
        return (1 + self.centered) * padded(self.rows)

    @property
    def to_mean(self) -> int:
        """Bytes from rstd to mean."""
        return 4 * padded(self.rows)

    def views(self, memory: Tensor) -> tuple[Tensor | None, Tensor]:
        """(mean, rstd)."""
        M, start = self.rows, padded(self.rows)
        return memory[start : start + M] if self.centered else None, memory[:M]


def recorder_of(
    compute: Callable[..., tuple[Tensor, Tensor | None, Tensor]],
    gradients: Callable[..., tuple[Tensor | None, ...]],
    layout: Statistics,
    settings: Settings,
) -> Callable[..., Any]:
    """What records a call (x, weight, bias, residual) of a plan; the last ones may be left out.

    compute: (x, residual, weight, bias) to (y, total, statistics); gradients: see plan_gradients.

    An argument takes time, None too, and so does an attribute of ctx: hence a Function of the plan's
    own (of 6 KiB), and last what is most often None.
    """

    class PlannedNormFunction(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x, weight, bias=None, residual=None):
            y, total, statistics = compute(x, residual, weight, bias)
            if residual is None:
                ctx.save_for_backward(x, weight, statistics)
                return y
            ctx.save_for_backward(total, weight, statistics)
            ctx.set_materialize_grads(False)
            return y, total

        @staticmethod
        def backward(ctx, dy, dtotal=None):
            x, weight, statistics = ctx.saved_tensors
            statistics = statistics.contiguous()
            need_x, need_dweight, need_dbias, need_residual = (*ctx.needs_input_grad, False, False)[:4]
            needs = need_x, need_residual, need_dweight, need_dbias
            if dy is None or differentiates():
                saved, launch = (x, weight, *layout.views(statistics)), NormBackwardFunction.apply
                made = backward(saved, needs, launch, settings, dy, dtotal)
            else:
                made = gradients(x, weight, statistics, dy, dtotal, needs)
            dx, dresidual, dweight, dbias = made[:4]
            return dx, dweight, dbias, dresidual

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
    """norm as a function of its tensors, for such as are like these."""

    def anyhow(x, residual, weight, bias):
        return norm(x, residual, weight, bias, normalized_ndim, eps, centered, casting)

    if x.numel() == 0 or not takes_addresses(x.device):
        return anyhow
    M, _ = sizes(x, normalized_ndim)
    how = How(normalized_ndim, eps, centered, casting)
    inputs: Any = tuple(t if t is None else plans.aligned(t) for t in (x, residual, weight, bias))
    y, total, _, _ = needed_outputs(x, residual, normalized_ndim, centered)
    floats = Memory(0, torch.float32, x.get_device())
    outputs: Any = y, total, floats if centered else None, floats
    launch = forward_launch(inputs, outputs, how)
    fill = launch.bind(*inputs, *outputs)
    if fill is None:
        return anyhow
    fill_without_statistics = None
    if launch.words is None and not launch.aligned:  # of wide rows they cost nothing
        without: Any = y, total, None, None
        fill_without_statistics = forward_launch(inputs, without, how).bound()
    layout = Statistics(M, centered)
    statistics, to_mean = x.new_empty(layout.words, dtype=torch.float32), layout.to_mean
    new_y, new_total, new_statistics = map(plans.maker, (y, total, statistics))

    def compute(x, residual, weight, bias):
        y, total, statistics = new_y(), new_total(), new_statistics()
        at_rstd = statistics.data_ptr()
        at_mean = at_rstd + to_mean if centered else None
        fill(x, residual, weight, bias, y, total, at_mean, at_rstd)
        return y, total, statistics

    kept = settings(x, residual, bias, normalized_ndim, centered, casting)
    record = recorder_of(compute, plan_gradients(how, layout, kept), layout, kept)

    def recorded_without_bias(x, residual, weight, bias):
        return record(x, weight)

    def recorded_with_bias(x, residual, weight, bias):
        return record(x, weight, bias)

    def recorded_with_residual(x, residual, weight, bias):
        return record(x, weight, bias, residual)

    def plain(x, residual, weight, bias):
        if fill_without_statistics is None:
            y, total, _ = compute(x, residual, weight, bias)
        else:
            y, total = new_y(), new_total()
            fill_without_statistics(x, residual, weight, bias, y, total, None, None)
        return y if residual is None else (y, total)

    recorded = recorded_with_residual
    if residual is None:
        recorded = recorded_without_bias if bias is None else recorded_with_bias
    planned = plans.ByGrad(recorded, plain)
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
    x: Tensor, weight: Tensor | None, statistics: Tensor, dy: Tensor, dtotal: Tensor | None,
    needs: tuple[bool, ...], how: How, layout: Statistics, settings: Settings,
) -> Callable[..., tuple[Tensor | None, ...]]:  # fmt: skip
    """plan_gradients of tensors like these: of their strides too."""
    need_x, need_residual, need_dweight, need_dbias = needs
    normalized_ndim, centered, casting, _, dtypes = settings
    same = dtypes[0] == dtypes[1]
    wanted = need_dweight, need_dbias

    def anyhow(x, weight, statistics, dy, dtotal):
        dx, dresidual, dweight, dbias = norm_backward(
            dy, dtotal, x, weight, *layout.views(statistics), normalized_ndim, centered,
            *dtypes, *wanted, casting,
        )  # fmt: skip
        return pick(dx, dresidual, dweight, dbias)

    def pick(dx, dresidual, dweight, dbias):
        dresidual = dx if same else dresidual
        return (
            dx if need_x else None, dresidual if need_residual else None,
            dweight if need_dweight else None, dbias if need_dbias else None,
        )  # fmt: skip

    made = empty_gradients(x, weight, *dtypes, normalized_ndim, *wanted)
    dy, x = plans.aligned(dy), plans.aligned(x)
    saved = x, None, weight, None, *layout.views(statistics)
    first, *sums = backward_launches(dy, dtotal, saved, made, how)
    dx, dresidual, dweight, dbias = (t if t.numel() else None for t in made)
    floats = Memory(0, torch.float32, x.get_device())
    has_dweight, has_dbias = dweight is not None, dbias is not None
    partials = floats if has_dweight else None, floats if has_dbias else None
    mean = floats if centered else None
    # The kernel of aligned rows takes neither what it has no use for nor gaps where it would be.
    given = (dy, x, weight) if first.aligned else (dy, dtotal, x, None, weight, None)
    results = (dx,) if first.aligned else (dx, dresidual)
    own = first.arguments[: len(given)]
    tensors = *own, mean, floats, *results, *partials
    launch = first._replace(arguments=(*tensors, *first.arguments[len(tensors) :])).bind(*given)
    if launch is None:
        return anyhow

    def fill_aligned(dy, dtotal, x, input, weight, bias, mean, rstd, dx, dresidual, dweight, dbias):
        launch(dy, x, weight, mean, rstd, dx, dweight, dbias)

    fill = fill_aligned if first.aligned else launch
    add_up, words = None, 0
    if sums:
        total = sums[0].arguments
        words = padded(max(t.numel() for t in total[:2] if t is not None))
        add_up = sums[0]._replace(arguments=(*partials, *total[2:])).bound()
    to_mean, to_dbias = layout.to_mean, 4 * words * has_dweight
    memory = statistics.new_empty(words * (has_dweight + has_dbias))
    new_dx, new_dresidual, new_dweight, new_dbias, new_sums = map(
        plans.maker, (dx, dresidual, dweight, dbias, memory)
    )

    def planned(x, weight, statistics, dy, dtotal):
        dx, dresidual = new_dx(), new_dresidual()
        at_rstd = statistics.data_ptr()
        at_mean = at_rstd + to_mean if centered else None
        if add_up is None:
            fill(dy, dtotal, x, None, weight, None, at_mean, at_rstd, dx, dresidual, None, None)
            return pick(dx, dresidual, None, None)
        sums = new_sums()
        at_sums = sums.data_ptr()
        at_dweight = at_sums if has_dweight else None
        at_dbias = at_sums + to_dbias if has_dbias else None
        sums_at = at_dweight, at_dbias
        fill(dy, dtotal, x, None, weight, None, at_mean, at_rstd, dx, dresidual, *sums_at)
        dweight, dbias = new_dweight(), new_dbias()
        add_up(*sums_at, dweight, dbias)
        return pick(dx, dresidual, dweight, dbias)

    return plans.where_aligned(planned, anyhow) if first.aligned else planned
