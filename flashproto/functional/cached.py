"""The front of public functions: a look into the call cache (ops/call_cache.py).  Without triton there
are no kernels, and nothing is cached.

`cached` writes a function from the signature of another one, as

    def relu(x=EMPTY, mask=default_mask, scale=default_scale, *extra, impl=default_impl, **others):
        if others or extra or x is EMPTY:
            refuse_call(inner, extra, others, {"x": x})
        if is_dynamo_compiling():
            return inner(x, mask, scale, impl=impl)
        tensors = (x,)
        if mask is not None:
            tensors += (mask,)
        kind = ("functional.relu", scale, scale.__class__, impl, mask is None)
        call = find(kind, tensors)
        if call is not None:
            return call(*tensors)
        made = inner(x, mask, scale, impl=impl)
        return resolve(kind, names(("x", "mask"), (x, mask)), tensors, made)
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Hashable, Sequence
from typing import Any, ParamSpec, TypeVar

from torch import Tensor
from torch.compiler import is_dynamo_compiling

from .. import backends, hooks
from ..checks.calls import front, scope_of
from ..mask_values import Mask
from .dropout import drawn_seed

if backends.HAS_TRITON:
    from ..ops.call_cache import find, resolve

Parameters = ParamSpec("Parameters")
Result = TypeVar("Result")

# Annotations of arguments that hold tensors.
HOLDERS = (
    "masks.Mask | None",
    "hooks.Call | None",
    "Sequence[Tensor] | None",
    "Tensor | Sequence[Tensor]",
)


def cached(
    function: Callable[Parameters, Result], *, alignment: bool = False
) -> Callable[Parameters, Result]:
    """The function, with a look into the cache first.

    alignment: whether its choice of a backend depends on where tensors start, modulo 16 bytes.
    """
    scope = scope_of(function) | {"is_dynamo_compiling": is_dynamo_compiling}
    scope["drawn_seed"] = drawn_seed
    if backends.HAS_TRITON:
        scope |= {"find": find, "resolve": resolve, "starts": starts, "held": held}
        scope |= {"names": named, "held_names": held_names}
    exec(source(function, alignment), scope)
    return functools.wraps(function)(scope[function.__name__])


def source(function: Callable[..., Any], alignment: bool) -> str:
    """The text of the function that looks into the cache.

    Numbers, those in sequences too, are told from others that are equal to them, as 1 from True, by
    their types.  Of a Mask, a hook's Call and a sequence of tensors the key has the form, and the call
    the tensors.
    """
    options = [repr(f"{function.__module__}.{function.__qualname__}")]
    tensors, optional, holders = [], [], []
    for p in inspect.signature(function).parameters.values():
        annotation = str(p.annotation)
        if annotation in ("Tensor", "Tensor | None"):
            tensors.append(p.name)
            if annotation != "Tensor":
                optional.append(p.name)
        elif annotation in HOLDERS:
            holders.append(p.name)
            options.append(f"form_{p.name}")
        else:
            elements = f"(*{p.name}, *map(type, {p.name})) if isinstance({p.name}, (list, tuple)) else "
            options.append((elements if "Sequence" in annotation else "") + p.name)
            if any(kind in annotation for kind in ("bool", "int", "float")):
                options.append(f"{p.name}.__class__")
    lines, called = front(function)
    if "dropout_seed" in optional:
        # Not by the default's name: dynamo has another one for this scope each time that it begins
        # again, and begins again for each number that it has not met by its name.
        lines.append("    if dropout_seed is None and (dropout_p.__class__ is not float or dropout_p):")
        lines.append(f"        dropout_seed = drawn_seed(dropout_p, {tensors[0]})")
    if not backends.HAS_TRITON:
        return "\n".join([*lines, f"    return {called}"])
    always = [x for x in tensors if x not in optional]
    names = f"names({tuple(always + optional)}, {together(always + optional)})"
    lines += ["    if is_dynamo_compiling():", f"        return {called}"]
    lines.append(f"    tensors = {together(always)}")
    for x in optional:
        lines += [f"    if {x} is not None:", f"        tensors += ({x},)"]
        options.append(f"{x} is None")
    for x in holders:
        lines += [f"    form_{x} = None", f"    if {x} is not None:"]
        lines += [f"        form_{x}, more = held({x})", "        tensors += more"]
        names = f"{names} + held_names({x!r}, {x})"
    return "\n".join(
        [
            *lines,
            f"    kind = ({', '.join(options)},)",
            *(["    kind = starts(kind, tensors)"] if alignment else []),
            "    call = find(kind, tensors)",
            "    if call is not None:",
            "        return call(*tensors)",
            f"    made = {called}",
            f"    return resolve(kind, {names}, tensors, made)",
        ]
    )


def together(names: Sequence[str]) -> str:
    """The text of a tuple of these."""
    return f"({', '.join(names)},)" if names else "()"


def named(names: Sequence[str], tensors: Sequence[Tensor | None]) -> tuple[str, ...]:
    return tuple(name for name, x in zip(names, tensors, strict=True) if x is not None)


def held(x: Any) -> tuple[Hashable, tuple[Tensor, ...]]:
    """(form, tensors) of what holds tensors: a Mask, a hook's Call, a sequence of tensors, or one that
    stacks them."""
    if isinstance(x, Mask):
        return x.form, x.tensors
    if isinstance(x, hooks.Call):
        return (x.hook.name, x.scalars), x.operands
    if isinstance(x, Tensor):
        return Tensor, (x,)
    return (len(x), tuple(x)) if isinstance(x, (list, tuple)) else (x, ())  # which is refused


def held_names(name: str, x: Any) -> tuple[str, ...]:
    """What the call cache calls these tensors."""
    return () if x is None else tuple(f"{name}[{i}]" for i in range(len(held(x)[1])))


def starts(kind: Hashable, tensors: Sequence[Tensor]) -> Hashable:
    """The kind with where in 8 elements tensors start."""
    try:
        return kind, *[x.storage_offset() & 7 for x in tensors]
    except (AttributeError, RuntimeError):  # what is no tensor, or has no memory
        return kind
