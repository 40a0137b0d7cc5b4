"""What calls with tensors of equal metadata have in common, worked out once.

Which checks a call passes, its backend, its tiles and all numbers of its launch follow from its
options, from the dtypes, shapes, strides and device of its tensors and from torch.autocast, never from
what is in the tensors.  A plan is what is left: a function of the tensors.  The public functions of
small operators, where all that would take longer than the kernel, look for a plan first; a call without
one goes its usual way, and the second one of its kind leaves a plan for the next.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from typing import Any

import torch
from torch import Tensor, is_grad_enabled
from torch._C import _are_functorch_transforms_active as transforms_active
from torch._C._dynamo import guards
from torch.autograd import forward_ad
from torch.compiler import is_compiling, is_dynamo_compiling
from torch.nn import Parameter

from . import backends
from .backends import autocast_dtype
from .ops import words
from .ops.autograd import wants_grad

KEPT = 4096  # of about 4 KiB each, 10 of norms and softmax; a key holds no tensor, a plan none either
RECENT = 4

# Looks in one call whether tensors have the metadata of others, which in Python takes a third of one.
# torch.compile checks arguments with it.  It is not public, and takes its own arguments on trust: hence
# only of versions that were tried.
TensorGuards: Any = getattr(guards, "TensorGuards", None)
GUARDED = tuple(map(int, torch.__version__.split(".")[:2])) in ((2, 11), (2, 13))

Plan = Callable[..., Any]


class ByGrad:
    """A plan of two: `recorded` where autograd is to record the call, `plain` elsewhere."""

    __slots__ = ("plain", "recorded")

    def __init__(self, recorded: Plan, plain: Plan) -> None:
        self.recorded, self.plain = recorded, plain

    def __call__(self, *tensors: Tensor | None) -> Any:
        return (self.recorded if wants_grad(*tensors) else self.plain)(*tensors)


_plans: dict[Hashable, Plan | None] = {}  # None for a key seen once
_recent: dict[Hashable, Recent] = {}  # by options, default backend, number of tensors and autocast


class Recent:
    """The last plans found of calls with equal options, up to RECENT of them, the last one first; each
    behind a function that says whether tensors are like those it was found for, which need gradients
    included, in its two forms: where gradients are enabled, and elsewhere."""

    __slots__ = ("found", "missed")

    def __init__(self) -> None:
        self.found: list[tuple[Callable[..., bool], Plan, Plan]] = []
        self.missed: Plan | None = None

    def add(self, plan: Plan, tensors: Sequence[Tensor]) -> None:
        """Take in a plan that was not among these: the second time in a row, so that calls of many
        shapes in turn do not push each other out.  A check passes no tensor twice."""
        if self.missed is not plan:
            self.missed = plan
        elif len(set(map(id, tensors))) == len(tensors):
            sizes, strides = [list(x.shape) for x in tensors], [list(x.stride()) for x in tensors]
            made = TensorGuards(*tensors, dynamic_dims_sizes=sizes, dynamic_dims_strides=strides)
            with_grad = plain = plan
            if isinstance(plan, ByGrad):
                plain = plan.plain
                with_grad = plan.recorded if any(x.requires_grad for x in tensors) else plain
            self.found = [(made.check, with_grad, plain), *self.found[: RECENT - 1]]


def followed() -> bool:
    """Whether calls may follow plans now: not while torch.compile traces them, under torch.func or
    forward-mode differentiation."""
    return not (is_compiling() or transforms_active() or forward_ad._current_level >= 0)


def key(options: tuple[Hashable, ...], tensors: Sequence[Tensor]) -> Hashable | None:
    """Under which a call's plan is kept; the options say which of its tensors these are.

    None for a call that follows no plan, as of arguments that are no plain strided tensors.
    """
    if not followed():
        return None
    found: list[Hashable] = [options, backends.get_default()]
    try:
        for x in tensors:
            if type(x) is not Tensor and type(x) is not Parameter:
                return None
            found += (x.dtype, x.shape, x.stride(), x.device)
        found.append(autocast_dtype(tensors[0]))
    except RuntimeError:  # sparse ones have no strides, and not every device has autocast
        return None
    return tuple(found)


def find(options: tuple[Hashable, ...], tensors: Sequence[Tensor]) -> Plan | None:
    """The plan of a call, if one is kept under its `key`."""
    # Of what `followed` asks, this much: the rest are tensors of another kind.
    if is_dynamo_compiling() or forward_ad._current_level >= 0:
        return None
    try:
        kind = options, backends.get_default(), len(tensors), autocast_dtype(tensors[0])
        recent = _recent.get(kind)
    except (AttributeError, RuntimeError, TypeError):  # of no tensor, or an option that has no hash
        return None
    if recent is not None:
        for check, with_grad, plain in recent.found:
            if check(*tensors):  # none passes under torch.func
                return with_grad if is_grad_enabled() else plain
    found = key(options, tensors)
    kept = None if found is None else _plans.get(found)
    if kept is not None and GUARDED:
        if recent is None:
            recent = _recent[kind] = Recent()
        recent.add(kept, tensors)
    return kept


def keep(key: Hashable | None, make: Callable[[], Plan]) -> None:
    """Keep the plan that make() returns, if a call under this key came before.

    Nothing is kept, and so nothing found, under a key with something else than plain values in it: an
    option that is a tensor, say, may be another number at the next call.
    """
    if key is not None and _is_plain(key):
        if len(_plans) >= KEPT:
            _plans.clear()
            _recent.clear()
        _plans[key] = make() if key in _plans else None


def _is_plain(key: Hashable) -> bool:
    if isinstance(key, tuple):
        return all(map(_is_plain, key))
    return key is None or isinstance(key, (int, float, str, torch.dtype, torch.device))


def forget() -> None:
    """All plans; for who changes at run time what plans follow from, as tests do."""
    _plans.clear()
    _recent.clear()
    words.forget()


def after_casts(plan: Plan, given: Sequence[Tensor], cast: Sequence[Tensor]) -> Plan:
    """`plan`, which is of tensors like `cast`, for those that autocast made them from."""
    if isinstance(plan, ByGrad):
        return ByGrad(after_casts(plan.recorded, given, cast), after_casts(plan.plain, given, cast))
    dtypes = [x.dtype for x in cast]
    if dtypes == [x.dtype for x in given]:
        return plan
    return lambda *tensors: plan(*map(Tensor.to, tensors, dtypes))


def where_aligned(plan: Plan, otherwise: Plan) -> Plan:
    """`plan` for tensors that begin at multiples of 16 bytes, `otherwise` for others."""
    if isinstance(plan, ByGrad):
        return ByGrad(where_aligned(plan.recorded, otherwise), where_aligned(plan.plain, otherwise))

    def planned(*tensors: Tensor | None) -> Any:
        for x in tensors:
            if x is not None and x.data_ptr() % 16 != 0:
                return otherwise(*tensors)
        return plan(*tensors)

    return planned
