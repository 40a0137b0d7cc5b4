"""A group of ranks, and what travels between them."""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C import _are_functorch_transforms_active as transforms_active

from ..backends import has_tangents, is_dtensor
from ..checks.errors import refuse

NOT_TRACED = "flashproto.distributed: what travels between ranks is not traced"


class Group(NamedTuple):
    """The ranks are counted in the group."""

    group: dist.ProcessGroup
    rank: int
    size: int

    def all_gather(self, x: Tensor) -> list[Tensor]:
        """x of each rank."""
        made = [x.new_empty(x.shape) for _ in range(self.size)]
        dist.all_gather(made, x.contiguous(), self.group)
        return made

    def exchange(
        self, sends: list[tuple[Tensor, int]], receives: list[tuple[Tensor, int]]
    ) -> list[dist.Work]:
        """Begin to send and receive tensors, to and from ranks; each Work is to be waited for.

        With NCCL a batch is one kernel on a stream of its own, which holds a multiprocessor for each
        of its channels while it lasts; NCCL_MAX_CTAS, or max_ctas in the group's options, bounds them.
        It finds none while attention holds all of them, hence transfers.AHEAD.  The Hopper backward
        loses no more than these: its programs take work as they come.  The order of the forward is
        fixed, so a program that finds no multiprocessor may end later by the length of the transfer.
        Copy engines would hold none; but NCCL has them copy for collectives on memory that is
        registered for it, not for sends.
        """
        operations = [dist.P2POp(dist.isend, x, group=self.group, group_peer=peer) for x, peer in sends]
        operations += [
            dist.P2POp(dist.irecv, x, group=self.group, group_peer=peer) for x, peer in receives
        ]
        return dist.batch_isend_irecv(operations) if operations else []

    def sum_of(self, pieces: list[Tensor]) -> Tensor:
        """What all ranks have for this one, added up in the order of ranks; pieces[r] is for rank r."""
        own = pieces[self.rank]
        others = [r for r in range(self.size) if r != self.rank]
        made = {r: torch.empty_like(own) if r != self.rank else own for r in range(self.size)}
        for work in self.exchange([(pieces[r], r) for r in others], [(made[r], r) for r in others]):
            work.wait()
        return torch.stack([made[r] for r in range(self.size)]).sum(0)


def group_of(operator: str, group: dist.ProcessGroup | None) -> Group:
    """What a public function was given as its group; None is the default group."""
    if not (dist.is_available() and dist.is_initialized()):
        refuse(
            operator,
            "group",
            group,
            "a group of torch.distributed, which is not initialised",
            "Call torch.distributed.init_process_group first, under torchrun.",
            RuntimeError,
        )
    group = dist.group.WORLD if group is None else group
    if not isinstance(group, dist.ProcessGroup):
        refuse(
            operator,
            "group",
            group,
            "a torch.distributed.ProcessGroup that this rank is in, or None for all ranks",
            "Pass mesh.get_group(name) of a DeviceMesh.",
            TypeError,
        )
    return Group(group, dist.get_rank(group), dist.get_world_size(group))


def check_plain(operator: str, **tensors: Tensor | None) -> None:
    """No DTensors: a shard is a plain tensor."""
    for name, x in tensors.items():
        if isinstance(x, Tensor) and is_dtensor(x):
            do = f"Pass {name}.to_local()."
            refuse(operator, name, "a DTensor", "this rank's shard as a plain tensor", do, TypeError)


def check_untransformed(operator: str, **tensors: Tensor | None) -> None:
    """Nothing of torch.func or of forward mode, which what travels between ranks knows nothing of."""
    given = {name: x for name, x in tensors.items() if isinstance(x, Tensor)}
    if transforms_active() or has_tangents(list(given.values())):
        got = "inside a transform of torch.func, or in forward mode"
        takes = "tensors outside of these: there is only .backward()"
        refuse(operator, next(iter(given)), got, takes, "Call it outside.", NotImplementedError)


def once(operator: str, gradients: list[Tensor | None]) -> list[Tensor | None]:
    """Gradients that raise where their own gradient is asked for, if that may be."""
    if not torch.is_grad_enabled():
        return gradients
    return [None if x is None else Once.apply(x.detach().requires_grad_(), operator) for x in gradients]


class Once(torch.autograd.Function):
    """x; there is no second derivative."""

    @staticmethod
    def forward(ctx, x, operator):
        ctx.operator = operator
        return x.view_as(x)

    @staticmethod
    def backward(ctx, gradient):
        raise NotImplementedError(f"flashproto: {ctx.operator} has no second derivative")
