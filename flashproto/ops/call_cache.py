"""The call cache: public functions find a call that they have made ready before by their arguments.

    @cached
    def rms_norm(x: Tensor, normalized_shape: int, weight: Tensor | None = None, ..., impl=None):
        check(...)
        ...
        return operator.ready((x, weight), settings)

Which checks a call passes, its backend, its tiles and all numbers of its launch follow from its
options, from the metadata of its tensors and from a few facts (`facts`), never from what is in the
tensors.  So the function below `cached` runs once for each set of these, and returns a Call (call.py)
of its tensors as they were given, or as autocast converts them, in their order.  What is no Call is the
result itself, and nobody keeps it: as where another backend runs, or where something wants to see the
call's op.

The key is written by `cached`, from the function's signature: no function writes one by hand, and none
can forget an argument.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
from collections.abc import Callable, Hashable, Iterator, Sequence
from typing import Any, ParamSpec, TypeVar

import torch
from torch import Tensor, is_grad_enabled
from torch.compiler import is_dynamo_compiling
from torch.nn import Parameter

from .. import backends
from ..backends import autocast_dtype
from . import call, exchange_buffers, private
from .call import Call, wants_grad
from .private import TensorGuards, deterministic, dispatch_modes, forward_ad, transforms_active, watched
from .recipe import is_lazy

CAPACITY = 4096  # calls, of some KiB each
RECENT = 4

Parameters = ParamSpec("Parameters")
Result = TypeVar("Result")

_calls: dict[Hashable, Call] = {}
_recent: dict[Hashable, Recent] = {}


class Recent:
    """The last calls found of one kind, up to RECENT of them, the last one first: each a function that
    says whether tensors are like those it was found for (which of them need gradients included), and
    the call's function of these."""

    __slots__ = ("found", "missed")

    def __init__(self) -> None:
        self.found: list[tuple[Callable[..., bool], Callable[..., Any]]] = []
        self.missed: Call | None = None

    def add(self, call: Call, tensors: Sequence[Tensor]) -> None:
        """Take in a call that was not among these: the second time in a row, so that calls of many
        shapes in turn do not push each other out.  A check passes no tensor twice."""
        if self.missed is not call:
            self.missed = call
        elif len(set(map(id, tensors))) == len(tensors):
            sizes, strides = [list(x.shape) for x in tensors], [list(x.stride()) for x in tensors]
            made = TensorGuards(*tensors, dynamic_dims_sizes=sizes, dynamic_dims_strides=strides)
            function = call.function(wants_grad(tensors), tensors)
            self.found = [(made.check, function), *self.found[: RECENT - 1]]


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
    """The function of `tensors` for a call of this kind, if one was kept."""
    if is_dynamo_compiling() or forward_ad._current_level >= 0 or dispatch_modes():
        return None
    try:
        kind = kind, facts(tensors[0])
        recent = _recent.get(kind)
        if recent is not None:
            for fits, function in recent.found:
                if fits(*tensors):  # none does under torch.func, nor in a trace
                    return function
        key = key_of(kind, tensors)
    except (AttributeError, RuntimeError, TypeError):  # of no tensor, or an option that has no hash
        return None
    found = None if key is None else _calls.get(key)
    if found is not None and private.GUARDED:
        if recent is None:
            recent = _recent[kind] = Recent()
        recent.add(found, tensors)
    return found


def key_of(kind: Hashable, tensors: Sequence[Tensor]) -> Hashable | None:
    """Under which a call is kept; None for one that is not, as of what are no plain tensors."""
    if transforms_active() or watched():
        return None
    key: list[Hashable] = [kind]
    for x in tensors:
        if (type(x) is not Tensor and type(x) is not Parameter) or is_lazy(x):
            return None
        key += (x.dtype, x.shape, x.stride(), x.device, x.requires_grad)
    return tuple(key)


def resolve(
    kind: Hashable,
    tensors: tuple[Tensor, ...],
    function: Callable[..., Any],
    *args: Any,
    **options: Any,
) -> Any:
    """function(*args, **options), and where that is a call made ready, the call, which is kept."""
    made = function(*args, **options)
    if type(made) is not Call:
        return made
    made = made.after_casts(tensors)
    key = key_of((kind, facts(tensors[0])), tensors)
    if key is not None and is_plain(kind):
        if len(_calls) >= CAPACITY:
            forget()
        _calls[key] = made
    return made(*tensors)


def is_plain(kind: Hashable) -> bool:
    """Whether there is nothing in it but plain values: an option that is a tensor, say, may hold
    another number at the next call."""
    if isinstance(kind, tuple):
        return all(map(is_plain, kind))
    return kind is None or isinstance(kind, (int, float, str, torch.dtype, torch.device, type))


@contextlib.contextmanager
def set_aside() -> Iterator[None]:
    """Calls meanwhile find none of those that are kept, which come back afterwards."""
    calls, recent = dict(_calls), dict(_recent)
    _calls.clear()
    _recent.clear()
    try:
        yield
    finally:
        _calls.clear()
        _recent.clear()
        _calls.update(calls)
        _recent.update(recent)


def forget() -> None:
    """All calls, recipes and exchange buffers; for who changes at run time what they follow from, as
    tests do."""
    _calls.clear()
    _recent.clear()
    call.forget()
    exchange_buffers.forget()


# --- the decorator --------------------------------------------------------------------------------


def cached(
    function: Callable[Parameters, Result], *, alignment: bool = False
) -> Callable[Parameters, Result]:
    """The function, with a look into the cache first.

    alignment: whether its choice of a backend depends on where tensors start, modulo 16 bytes.
    """
    text = source(function, alignment)
    scope: dict[str, Any] = {"function": function, "find": find, "resolve": resolve, "starts": starts}
    parameters = inspect.signature(function).parameters.values()
    scope |= {f"default_{p.name}": p.default for p in parameters}
    exec(text, scope)
    return functools.wraps(function)(scope[function.__name__])


def starts(kind: Hashable, tensors: Sequence[Tensor]) -> Hashable:
    """The kind with where in 8 elements tensors start."""
    if is_dynamo_compiling():
        return kind
    try:
        return kind, *[x.storage_offset() & 7 for x in tensors]
    except (AttributeError, RuntimeError):  # what is no tensor, or has no memory
        return kind


def source(function: Callable[..., Any], alignment: bool) -> str:
    """The text of the function that looks into the cache, as

    def relu(x, scale=default_scale, *, impl=default_impl):
        which, tensors = 0, (x,)
        kind = ("functional.relu", scale, scale.__class__, impl, which)
        call = find(kind, tensors)
        if call is not None:
            return call(*tensors)
        return resolve(kind, tensors, function, x, scale, impl=impl)

    Numbers, those in sequences too, are told from others that are equal to them, as 1 from True, by
    their types.
    """
    parameters = list(inspect.signature(function).parameters.values())
    head, passed, options = [], [], [repr(f"{function.__module__}.{function.__qualname__}")]
    given, optional = [], []
    for p in parameters:
        keyword = p.kind is p.KEYWORD_ONLY
        if keyword and "*" not in head:
            head.append("*")
        head.append(p.name if p.default is p.empty else f"{p.name}=default_{p.name}")
        passed.append(f"{p.name}={p.name}" if keyword else p.name)
        annotation = str(p.annotation)
        if annotation == "Tensor":
            given.append(p.name)
        elif annotation == "Tensor | None":
            optional.append(p.name)
        else:
            elements = f"(*{p.name}, *map(type, {p.name})) if isinstance({p.name}, (list, tuple)) else "
            options.append((elements if "Sequence" in annotation else "") + p.name)
            if any(kind in annotation for kind in ("bool", "int", "float")):
                options.append(f"{p.name}.__class__")
    order = [p.name for p in parameters if p.name in (*given, *optional)]

    def tree(left: list[str], without: list[str], indent: str) -> list[str]:
        """The lines that set `which` and `tensors`, by which of the optional ones are there."""
        if not left:
            there = [name for name in order if name not in without]
            number = sum(1 << i for i, name in enumerate(optional) if name in without)
            return [f"{indent}which, tensors = {number}, ({', '.join(there)},)"]
        name, *rest = left
        return [
            f"{indent}if {name} is None:",
            *tree(rest, [*without, name], indent + "    "),
            f"{indent}else:",
            *tree(rest, without, indent + "    "),
        ]

    return "\n".join(
        [
            f"def {function.__name__}({', '.join(head)}):",
            *tree(optional, [], "    "),
            f"    kind = ({', '.join(options)}, which)",
            *(["    kind = starts(kind, tensors)"] if alignment else []),
            "    call = find(kind, tensors)",
            "    if call is not None:",
            "        return call(*tensors)",
            f"    return resolve(kind, tensors, function, {', '.join(passed)})",
        ]
    )
