"""Cross entropy of logits: the plans of eager calls, see plans.py.

What a call needs beside its results (the losses of the rows, the state that its gradient is computed
from, the denominator) lies in one piece of memory, float32:

    loss, z, lse, m, l: [M] each, padded to whole 16 bytes; the sum of z; the denominator

Legend: cross_entropy.py.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from .. import plans
from .autograd import differentiates, recorder
from .cross_entropy import (
    CrossEntropyBackwardFunction,
    Options,
    backward_launch,
    constants,
    cross_entropy,
    forward_launch,
    total_launch,
    total_programs,
)
from .launch import cdiv, takes_addresses
from .memory import Memory, maker
from .rows import as_rows

Results = tuple[Tensor, Tensor | None, Tensor | None]
"""(loss, z, lse), of which the last two may not be asked for"""


class Layout(NamedTuple):
    """Where the numbers of M rows are, in bytes."""

    rows: int

    @property
    def stride(self) -> int:
        return 16 * cdiv(self.rows, 4)

    @property
    def words(self) -> int:
        return 5 * self.stride // 4 + 8

    def at(self, address: int) -> tuple[int, ...]:
        """Addresses of loss, z, lse, m, l, the sum of z, the denominator."""
        ends = (5 * self.stride, 5 * self.stride + 16)
        return *(address + i * self.stride for i in range(5)), *(address + end for end in ends)

    def state(self, memory: Tensor, shape: torch.Size) -> tuple[Tensor, ...]:
        """lse, m, l and the denominator."""
        rows = memory[: 5 * self.stride // 4].view(5, -1)[2:, : self.rows]
        return *(row.view(shape) for row in rows), memory[-4]


class CrossEntropy(NamedTuple):
    """A plan's parts.

    compute: (logits, targets, weight, whether to record) to (loss, z, lse, memory, dlogits), of which
    dlogits is None unless it is written at once; gradients: see plan_gradients.
    """

    compute: Callable[..., tuple[Tensor, Tensor | None, Tensor | None, Tensor, Tensor | None]]
    gradients: Callable[..., Tensor]
    layout: Layout
    options: Options
    mean: bool


class PlannedCrossEntropyFunction(torch.autograd.Function):
    """For calls that follow a plan, see `plan`: `record` is all that such a call takes."""

    @staticmethod
    def forward(ctx, logits, targets, weight, plan):
        loss, z, lse, memory, done = plan.compute(logits, targets, weight, True)
        ctx.save_for_backward(logits, targets, weight, memory, lse, done)
        ctx.plan, ctx.at_once = plan, done is not None
        ctx.set_materialize_grads(False)
        if z is None and lse is None:
            return loss
        if z is not None:
            ctx.mark_non_differentiable(z)
        return loss, z, lse

    @staticmethod
    def backward(ctx, dloss, dz=None, dlse=None):
        logits, targets, weight, memory, lse, done = ctx.saved_tensors
        if not ctx.at_once:
            done = None
        ctx.at_once = False  # what the forward pass wrote can be given away once
        _, gradients, layout, options, mean = ctx.plan
        memory = memory.contiguous()
        if dloss is not None and not differentiates():
            dlogits = gradients(logits, targets, weight, memory, lse, done, dloss, dlse)
        else:
            in_memory, m, l, denominator = layout.state(memory, targets.shape)
            dlogits = CrossEntropyBackwardFunction.apply(
                dloss, dlse, logits, targets, weight, in_memory if lse is None else lse, m, l,
                denominator if mean else denominator.new_empty(0), *options, done, False,
            )  # fmt: skip
        return dlogits, None, None, None


record = recorder(PlannedCrossEntropyFunction)


def plan(
    logits: Tensor,
    targets: Tensor,
    weight: Tensor | None,
    options: Options,
    reduction: str,
    need_lse: bool,
    inplace_backward: bool,
    need_z: bool,
) -> plans.Plan:
    """cross_entropy as a function of (logits, targets, weight), for such as are like these."""

    def anyhow(logits, targets, weight):
        targets = targets.contiguous()
        arguments = (options, reduction, need_lse, inplace_backward)
        return cross_entropy(logits, targets, weight, *arguments)

    x, (M, V) = as_rows(logits), (targets.numel(), logits.shape[-1])
    one_number, mean = reduction != "none", reduction == "mean"
    several = one_number and total_programs(targets) > 1
    copied = x.data_ptr() != logits.data_ptr()
    if logits.numel() == 0 or inplace_backward or several or copied:
        return anyhow
    if not takes_addresses(logits.device):
        return anyhow
    at_once = one_number and not need_lse and logits.dtype != torch.float16
    ignore_index, smoothing, _, _ = options
    device, layout = logits.device, Layout(M)
    floats = Memory(0, torch.float32, logits.get_device())
    weights = constants(weight, smoothing)
    dlogits = logits.new_empty(logits.shape)

    def launch_rows(at_once: bool) -> Callable[..., None]:
        denominator, dx = (floats if mean else None, as_rows(dlogits)) if at_once else (None, None)
        losses = (floats,) * 5
        launch = forward_launch(x, targets, weights, denominator, losses, dx, options, need_lse)
        return launch.bound()

    def launch_total(losses: tuple[Memory, Memory] | None) -> Callable[..., None]:
        sums = floats, floats, floats
        return total_launch(targets, weights[0], losses, sums, V, ignore_index, mean).bound()

    fill, fill_at_once = launch_rows(False), launch_rows(True) if at_once else None
    count, add_up = launch_total(None), launch_total((floats, floats))
    losses = torch.empty(() if one_number else targets.shape, dtype=torch.float32, device=device)
    lse = torch.empty(targets.shape, dtype=torch.float32, device=device)
    memory = torch.empty(layout.words, dtype=torch.float32, device=device)
    new_loss, new_lse, new_memory, new_dlogits = map(maker, (losses, lse, memory, dlogits))

    def compute(logits, targets, weight, recorded):
        targets, weights = targets.contiguous(), constants(weight, smoothing)
        memory, loss = new_memory(), new_loss()
        z = new_loss() if need_z else None
        lse = new_lse() if need_lse else None
        at_loss, at_z, at_lse, at_m, at_l, at_total_z, at_denominator = layout.at(memory.data_ptr())
        at_total = loss.data_ptr()
        if z is not None:
            at_total_z = z.data_ptr()
        if lse is not None:
            at_lse = lse.data_ptr()
        if not one_number:
            at_loss, at_z = at_total, at_z if z is None else at_total_z
        dlogits = None
        if recorded and fill_at_once is not None:
            dlogits = new_dlogits()
            above = None
            if mean:
                above = at_denominator
                count(targets, weights[0], None, None, at_total, at_total_z, at_denominator)
            fill_at_once(logits, targets, *weights, above, at_loss, at_z, at_lse, at_m, at_l, dlogits)
        else:
            fill(logits, targets, *weights, None, at_loss, at_z, at_lse, at_m, at_l, None)
        if one_number:
            add_up(targets, weights[0], at_loss, at_z, at_total, at_total_z, at_denominator)
        return loss, z, lse, memory, dlogits

    gradients = plan_gradients(layout, options, mean)
    parts = CrossEntropy(compute, gradients, layout, options, mean)

    def recorded(logits, targets, weight):
        results = record(logits, targets, weight, parts)
        return results if need_z or need_lse else (results, None, None)

    def plain(logits, targets, weight):
        return compute(logits, targets, weight, False)[:3]

    return plans.ByGrad(recorded, plain)


def plan_gradients(layout: Layout, options: Options, mean: bool) -> Callable[..., Tensor]:
    """The backward of PlannedCrossEntropyFunction as a function of (logits, targets, weight, memory,
    lse or None for that in memory, done, dloss, dlse), for tensors of one shape, dtype and device;
    strides may differ, as hooks of saved tensors do not keep them.  done becomes the result."""
    kinds: dict[tuple[object, ...], tuple[Callable[..., None], bool]] = {}
    _, smoothing, _, _ = options

    def like(logits, targets, weights, done, dloss, dlse, dlogits):
        """The launch for tensors like these, and whether it takes a copy of the logits."""
        x, V = as_rows(logits), logits.shape[-1]
        floats = Memory(0, torch.float32, logits.get_device())
        launch = backward_launch(
            dloss, dlse, x, targets, weights, floats if mean else None, (floats,) * 3,
            as_rows(dlogits), options, V, 0, done,
        )  # fmt: skip
        return launch.bound(), x.data_ptr() != logits.data_ptr()

    def gradients(logits, targets, weight, memory, lse, done, dloss, dlse):
        targets, weights, dloss = targets.contiguous(), constants(weight, smoothing), dloss.contiguous()
        dlse = None if dlse is None else dlse.contiguous()
        # Without its version: what is done to the gradient is no matter of the graph that saved `done`.
        dlogits = logits.new_empty(logits.shape) if done is None else done.contiguous().data
        key = logits.stride(), dlse is None, done is None
        if key not in kinds:
            kinds[key] = like(logits, targets, weights, done is not None, dloss, dlse, dlogits)
        fill, copies = kinds[key]
        x = as_rows(logits) if copies else logits
        _, _, at_lse, at_m, at_l, _, at_denominator = layout.at(memory.data_ptr())
        if lse is not None:
            lse = lse.contiguous()
            at_lse = lse.data_ptr()
        denominator = at_denominator if mean else None
        fill(dloss, dlse, x, targets, *weights, denominator, at_lse, at_m, at_l, dlogits)
        return dlogits

    return gradients
