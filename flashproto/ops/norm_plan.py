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
from .autograd import differentiates, recorder, wants_grad
from .launch import Memory, cdiv, takes_addresses
from .norm import NormBackwardFunction, Settings, backward, norm, settings
from .norm_launch import (
    How,
    backward_launches,
    empty_gradients,
    forward_config,
    forward_launch,
    launch_backward,
    needed_outputs,
    norm_backward,
    shared_config,
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


class Norm(NamedTuple):
    """A plan's parts.

    compute: (x, residual, weight, bias) to (y, total, statistics); gradients: see plan_gradients.
    """

    compute: Callable[..., tuple[Tensor, Tensor | None, Tensor]]
    gradients: Callable[..., tuple[Tensor | None, ...]]
    statistics: Statistics
    settings: Settings


class PlannedNormFunction(torch.autograd.Function):
    """For calls that follow a plan, see `plan`: `record` is all that such a call takes."""

    @staticmethod
    def forward(ctx, x, residual, weight, bias, plan):
        y, total, statistics = plan.compute(x, residual, weight, bias)
        ctx.plan = plan
        if residual is None:
            ctx.save_for_backward(x, weight, statistics)
            return y
        ctx.save_for_backward(total, weight, statistics)
        ctx.set_materialize_grads(False)
        return y, total

    @staticmethod
    def backward(ctx, dy, dtotal=None):
        _, gradients, layout, settings = ctx.plan
        x, weight, statistics = ctx.saved_tensors
        statistics, needs = statistics.contiguous(), ctx.needs_input_grad
        if dy is None or differentiates():
            saved, launch = (x, weight, *layout.views(statistics)), NormBackwardFunction.apply
            return backward(saved, needs, launch, settings, dy, dtotal)[:5]
        return gradients(x, weight, statistics, dy, dtotal, needs)


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

    if x.numel() == 0 or not takes_addresses(x.device):
        return anyhow
    M, N = sizes(x, normalized_ndim)
    inputs, how = (x, residual, weight, bias), How(normalized_ndim, eps, centered, casting)
    # Words are new at each call, and rows in shared memory have to be aligned.
    shared = shared_config(x, residual, N, how) is not None
    if shared or forward_config(x, residual, N, how).split:
        return anyhow
    y, total, _, _ = needed_outputs(x, residual, normalized_ndim, centered)
    floats = Memory(0, torch.float32, x.get_device())
    bound = []
    for mean, rstd in ((floats if centered else None, floats), (None, None)):
        outputs: Any = y, total, mean, rstd
        launch = forward_launch(inputs, outputs, how).bind(*inputs, *outputs)
        if launch is None:
            return anyhow
        bound.append(launch)
    fill, fill_without_statistics = bound
    new_y, new_total = plans.maker(y, x), plans.maker(total, x)
    layout, device = Statistics(M, centered), x.device
    words, to_mean = layout.words, layout.to_mean

    def compute(x, residual, weight, bias):
        y, total = new_y(x), new_total(x)
        statistics = torch.empty(words, dtype=torch.float32, device=device)
        at_rstd = statistics.data_ptr()
        at_mean = at_rstd + to_mean if centered else None
        fill(x, residual, weight, bias, y, total, at_mean, at_rstd)
        return y, total, statistics

    kept = settings(x, residual, bias, normalized_ndim, centered, casting)
    parts = Norm(compute, plan_gradients(how, layout, kept), layout, kept)

    def planned(x, residual, weight, bias):
        if wants_grad(x, residual, weight, bias):
            return record(x, residual, weight, bias, parts)
        y, total = new_y(x), new_total(x)
        fill_without_statistics(x, residual, weight, bias, y, total, None, None)
        return y if residual is None else (y, total)

    return planned


def plan_gradients(
    how: How, layout: Statistics, settings: Settings
) -> Callable[..., tuple[Tensor | None, ...]]:
    """The backward of PlannedNormFunction as a function of (x, weight, statistics, dy, dtotal, which of
    its arguments need a gradient), for tensors of one shape, dtype and device; strides may differ, as
    hooks of saved tensors do not keep them, but for those of statistics."""
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
    need_x, need_residual, need_dweight, need_dbias, _ = needs
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
            dweight if need_dweight else None, dbias if need_dbias else None, None,
        )  # fmt: skip

    made = empty_gradients(x, weight, *dtypes, normalized_ndim, *wanted)
    given = dy, dtotal, x, None, weight, None
    saved = x, None, weight, None, *layout.views(statistics)
    first, *sums = backward_launches(dy, dtotal, saved, made, how)
    if first.launch is not launch_backward:
        return anyhow
    dx, dresidual, dweight, dbias = (t if t.numel() else None for t in made)
    floats = Memory(0, torch.float32, x.get_device())
    has_dweight, has_dbias = (t is not None for t in first.arguments[10:12])
    partials = floats if has_dweight else None, floats if has_dbias else None
    mean = floats if centered else None
    arguments = (
        *first.arguments[:6], mean, floats, *first.arguments[8:10], *partials, *first.arguments[12:]
    )  # fmt: skip
    fill = first._replace(arguments=arguments).bind(*given)
    if fill is None:
        return anyhow
    add_up, words = None, 0
    if sums:
        total = sums[0].arguments
        words = padded(max(t.numel() for t in total[:2] if t is not None))
        add_up = sums[0]._replace(arguments=(*partials, *total[2:])).bound()
    parameter = x if weight is None else weight
    new_dx, new_dresidual = plans.maker(dx, x), plans.maker(dresidual, x)
    new_dweight, new_dbias = plans.maker(dweight, parameter), plans.maker(dbias, parameter)
    to_mean, to_dbias = layout.to_mean, 4 * words * has_dweight
    memory = words * (has_dweight + has_dbias)

    def planned(x, weight, statistics, dy, dtotal):
        dx, dresidual = new_dx(x), new_dresidual(x)
        at_rstd = statistics.data_ptr()
        at_mean = at_rstd + to_mean if centered else None
        if add_up is None:
            fill(dy, dtotal, x, None, weight, None, at_mean, at_rstd, dx, dresidual, None, None)
            return pick(dx, dresidual, None, None)
        sums = statistics.new_empty(memory)
        at_sums = sums.data_ptr()
        at_dweight = at_sums if has_dweight else None
        at_dbias = at_sums + to_dbias if has_dbias else None
        sums_at = at_dweight, at_dbias
        fill(dy, dtotal, x, None, weight, None, at_mean, at_rstd, dx, dresidual, *sums_at)
        parameter = x if weight is None else weight
        dweight, dbias = new_dweight(parameter), new_dbias(parameter)
        add_up(*sums_at, dweight, dbias)
        return pick(dx, dresidual, dweight, dbias)

    return planned
