"""The call cache: public functions find a call that they have bound before by their arguments.

    @cached
    def rms_norm(x: Tensor, normalized_shape: int, weight: Tensor | None = None, ..., impl=None):
        check(...)
        ...
        return operator.bind((x, weight), settings)

Which checks a call passes, its backend, its tiles and all numbers of its launch follow from its
options, from the metadata of its tensors and from a few facts (`facts`), never from what is in the
tensors.  So the function below `cached` runs once for each set of these, and returns a Call (call.py)
of its tensors.  Anything else is the result itself and is not cached: as where another backend runs, or
where something wants to see the call's op.

The key is written by `cached` (functional/cached.py), from the function's signature: no function writes
one by hand, and none can forget an argument.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Hashable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, is_grad_enabled
from torch.nn import Parameter

from .. import backends
from ..backends import autocast_dtype
from . import call, exchange_buffers, private
from .call import Call, wants_grad
from .private import TensorGuards, deterministic, dispatch_modes, forward_ad, transforms_active, watched
from .recipe import is_lazy

CAPACITY = 4096  # calls, of some KiB each
RECENT = 4

_kinds: dict[Hashable, Kind] = {}


class Kind:
    """The cached calls of one kind, whose tensors have other metadata each.

    functions: by that metadata.  recent: the last ones found, up to RECENT, the last one first: each
    with a function that says whether tensors are like those it was found for, which of them need
    gradients included.
    """

    __slots__ = ("functions", "missed", "recent")

    def __init__(self) -> None:
        self.functions: dict[Hashable, Callable[..., Any]] = {}
        self.recent: list[tuple[Callable[..., bool], Callable[..., Any]]] = []
        self.missed: Callable[..., Any] | None = None

    def add_recent(self, function: Callable[..., Any], tensors: Sequence[Tensor]) -> None:
        """Take in a call that was not among the recent ones: the second time in a row, so that calls of
        many shapes in turn do not push each other out."""
        if self.missed is not function:
            self.missed = function
        else:
            self.recent = [(likeness(tensors), function), *self.recent[: RECENT - 1]]


def likeness(tensors: Sequence[Tensor]) -> Callable[..., bool]:
    """Whether tensors have the metadata of these; guards take no tensor twice, as cu_seqlens of queries
    and keys."""
    places = {id(x): i for i, x in reversed([*enumerate(tensors)])}
    own = sorted(places.values())
    first = [tensors[i] for i in own]
    sizes, strides = [list(x.shape) for x in first], [list(x.stride()) for x in first]
    check = TensorGuards(*first, dynamic_dims_sizes=sizes, dynamic_dims_strides=strides).check
    if len(own) == len(tensors):
        return check
    twins = [(i, places[id(x)]) for i, x in enumerate(tensors) if places[id(x)] != i]

    def fits(*tensors: Tensor) -> bool:
        return all(tensors[i] is tensors[j] for i, j in twins) and check(*[tensors[i] for i in own])

    return fits


def facts(x: Tensor) -> tuple[Hashable, ...]:
    """All that a call depends on beside its arguments: whether gradients are wanted, the default
    backend, the dtype of autocast, whether products of float32 may be rounded to tf32, whether results
    have to be deterministic."""
    return (
        is_grad_enabled(),
        backends.get_default(),
        autocast_dtype(x),
        x.dtype is torch.float32 and private.allows_tf32(),
        deterministic(),
    )


def find(kind: Hashable, tensors: tuple[Tensor, ...]) -> Callable[..., Any] | None:
    """The function of `tensors` for a call of this kind, if one is cached."""
    if forward_ad._current_level >= 0 or dispatch_modes():
        return None
    try:
        found = _kinds.get((kind, facts(tensors[0])))
        if found is None:
            return None
        for fits, run in found.recent:
            if fits(*tensors):  # none does under torch.func, nor in a trace
                return run
        key = key_of(tensors)
    except (AttributeError, IndexError, RuntimeError, TypeError):  # no tensor, or what has no hash
        return None
    function = None if key is None else found.functions.get(key)
    if function is not None and private.GUARDED:
        found.add_recent(function, tensors)
    return function


def key_of(tensors: Sequence[Tensor]) -> Hashable | None:
    """The metadata under which a call is cached; None for one that is not, as of subclasses."""
    if transforms_active() or watched():
        return None
    key: list[Hashable] = []
    for x in tensors:
        if (type(x) is not Tensor and type(x) is not Parameter) or is_lazy(x):
            return None
        key += (x.dtype, x.shape, x.stride(), x.device, x.requires_grad)
    return tuple(key)


def resolve(kind: Hashable, names: Sequence[str], tensors: tuple[Tensor, ...], made: Any) -> Any:
    """The result of a function that made `made`: where that is a Call, its function of the tensors of
    these names, which is cached, is called."""
    if type(made) is not Call:
        return made
    function = made.of(names, tensors).function(wants_grad(tensors), *tensors)
    key = key_of(tensors)
    if key is not None and is_plain(kind):
        if sum(len(x.functions) for x in _kinds.values()) >= CAPACITY:
            forget()
        _kinds.setdefault((kind, facts(tensors[0])), Kind()).functions[key] = function
    return function(*tensors)


def is_plain(kind: Hashable) -> bool:
    """Whether there is nothing in it but plain values: an option that is a tensor, say, may hold
    another number at the next call."""
    if isinstance(kind, tuple):
        return all(map(is_plain, kind))
    return kind is None or isinstance(kind, (int, float, str, torch.dtype, torch.device, type))


@contextlib.contextmanager
def set_aside() -> Iterator[None]:
    """Calls meanwhile find none of those that are cached, which come back afterwards."""
    kinds = dict(_kinds)
    _kinds.clear()
    try:
        yield
    finally:
        _kinds.clear()
        _kinds.update(kinds)


def forget() -> None:
    """All calls, recipes and exchange buffers; for who changes at run time what they follow from, as
    tests do."""
    _kinds.clear()
    call.forget()
    exchange_buffers.forget()
