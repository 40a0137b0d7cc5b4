"""The ops torch.ops.flashproto.NAME and NAME_backward of an operator: schemas, fakes and autograd, all
of which follow from what the Operator says (call.py)."""

from __future__ import annotations

import functools
import typing
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, is_grad_enabled

from .. import variant
from ..variant import Form
from . import private
from .recipe import New

# Of the ops: "flashproto", or where it is part of another package that one's name too, so that two
# copies can live in one process.
NAMESPACE = __name__.removesuffix(".ops.library").replace(".", "_")


def own_ops() -> Any:
    """torch.ops.flashproto, see NAMESPACE."""
    return getattr(torch.ops, NAMESPACE)


NO_TANGENT = (
    "flashproto: the kernels have no forward-mode derivative (jvp); "
    "use impl='reference', which has one, or reverse mode"
)
NO_SECOND_DERIVATIVE = "flashproto: the kernels have no second derivative"
# A float is one number for torch.compile, which compiles anew for another.  As a Scalar it would be a
# symbol, but Inductor (torch 2.13) then hands an op the number of the first call.
SCHEMA_TYPES = {
    bool: "bool",
    int: "SymInt",
    float: "float",
    str: "str",
    torch.dtype: "ScalarType",
    tuple[float, ...]: "float[]",
    tuple[int, ...]: "SymInt[]",
    tuple[bool, ...]: "bool[]",
}


def schema_of_tensors(names: str, writes: Sequence[str] = ()) -> list[str]:
    """Arguments of a schema for "x, weight?, *operands", of which some are written in place."""
    arguments = []
    for name in filter(None, names.split(", ")):
        if name.startswith("*"):
            arguments.append(f"Tensor[] {name[1:]}")
            continue
        name, optional = name.rstrip("?"), "?" if name.endswith("?") else ""
        alias = f"({chr(ord('a') + writes.index(name))}!)" if name in writes else ""
        arguments.append(f"Tensor{alias}{optional} {name}")
    return arguments


types_of = functools.cache(typing.get_type_hints)


def schema_of_values(values: type) -> list[str]:
    arguments = (
        variant.SCHEMA if kind is Form else f"{SCHEMA_TYPES[kind]} {name}"
        for name, kind in types_of(values).items()
    )
    return ", ".join(arguments).split(", ")


def packed(names: str, tensors: Sequence[Tensor | None]) -> list[Any]:
    """Tensors as an op takes them: those of `*` as one list."""
    if "*" not in names:
        return list(tensors)
    n = names.count(",")
    return [*tensors[:n], list(tensors[n:])]


def unpacked(names: str, arguments: Sequence[Any]) -> tuple[list[Tensor | None], Sequence[Any]]:
    """(tensors, the arguments behind them) of an op's arguments."""
    n = names.count(",") + 1 if names else 0
    if "*" not in names:
        return list(arguments[:n]), arguments[n:]
    return [*arguments[: n - 1], *arguments[n - 1]], arguments[n:]


def plain_values(values: Any) -> list[Any]:
    """Values as an op takes them: sizes are tensors under torch.jit.trace."""

    def plain(x: Any) -> Any:
        return x.item() if isinstance(x, Tensor) else x

    flat = [y for x in values for y in (x.flat() if isinstance(x, Form) else (x,))]
    return [list(map(plain, x)) if isinstance(x, (list, tuple)) else plain(x) for x in flat]


def values_of(kind: type, arguments: Sequence[Any]) -> Any:
    rest = iter(arguments)
    values = (
        Form.of(next(rest), next(rest), next(rest)) if of is Form else next(rest)
        for of in types_of(kind).values()
    )
    return kind(*[tuple(x) if type(x) in (list, tuple) else x for x in values])


def register(operator: Any) -> None:
    """Make torch.ops.flashproto.NAME and, where there is a backward, NAME_backward."""
    names, everything = operator.inputs, tuple(range(operator.outputs))
    arguments = [*schema_of_tensors(names, operator.writes), *schema_of_values(operator.settings)]
    results = ", ".join(["Tensor"] * operator.outputs)
    results = results if operator.outputs == 1 else f"({results})"

    def tensors_or_empty(made: Sequence[Any], like: Tensor) -> Any:
        made = [
            like.new_empty(0) if x is None else x.tensor() if isinstance(x, New) else x for x in made
        ]
        return made[0] if len(made) == 1 else tuple(made)

    def forward(*args: Any) -> Any:
        inputs, values = unpacked(names, args)
        settings = values_of(operator.settings, values)
        made = operator.run(inputs, settings, everything, True, op=True).function(*inputs)
        return tensors_or_empty(made if operator.outputs > 1 else (made,), first(inputs))

    def fake(*args: Any) -> Any:
        inputs, values = unpacked(names, args)
        made = operator.makes(values_of(operator.settings, values), *inputs)
        return tensors_or_empty(made, first(inputs))

    schema = f"({', '.join(arguments)}) -> {results}"
    if operator.writes:

        def write(*args: Any) -> None:
            inputs, values = unpacked(names, args)
            operator.run(inputs, values_of(operator.settings, values), (), False).function(*inputs)

        kernel_op(operator.name, write, schema, lambda *_: None, operator.writes)
        return
    op = kernel_op(operator.name, forward, schema, fake)

    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        tensors, values = unpacked(names, inputs)
        settings = values_of(operator.settings, values)
        news = operator.makes(settings, *tensors)
        results = (output,) if operator.outputs == 1 else output
        outputs = [None if new is None else x for new, x in zip(news, results, strict=True)]
        ctx.context, ctx.values = operator.context(settings, tensors), plain_values(settings)
        ctx.save_for_backward(*operator.saves(settings, tensors, outputs))
        # An output that this call has not is an empty tensor, whose gradient means nothing.
        ctx.differentiable = [x is not None for x in outputs[: operator.differentiable]]
        stopped = zip(results, [*ctx.differentiable, *[False] * operator.outputs], strict=False)
        ctx.mark_non_differentiable(*[x for x, differentiable in stopped if not differentiable])
        ctx.set_materialize_grads(False)

    def autograd(ctx: Any, *grads: Any) -> Any:
        if operator.saved is None:
            raise NotImplementedError(operator.no_gradient)
        needs: Any = unpacked(names, ctx.needs_input_grad)[0]
        grads = tuple(g if there else None for g, there in zip(grads, ctx.differentiable, strict=False))
        made: Sequence[Any] = (None,) * len(needs)
        if any(x is not None for x in grads):
            made = operator.gradients_visibly(ctx.context, tuple(needs), (*grads, *ctx.saved_tensors))
        # torch takes a list of no numbers for one of no tensors, which wants no gradients back.
        return *packed(names, made), *[[] if x == [] else None for x in ctx.values]

    op.register_autograd(autograd, setup_context=setup_context)
    if operator.saved is not None:
        register_backward(operator, tensors_or_empty)


def register_backward(operator: Any, tensors_or_empty: Callable[..., Any]) -> None:
    assert operator.saved is not None
    context_type = operator.context_type or operator.settings
    grads = [f"grad{i}" for i in range(operator.differentiable)]
    names = ", ".join([*(f"{x}?" for x in grads), *filter(None, [operator.saved])])
    arguments = [*schema_of_tensors(names), *schema_of_values(context_type), "bool[] needs"]
    count = operator.inputs.count(",") + 1
    results = f"({', '.join(['Tensor'] * count)})" if count > 1 else "Tensor"
    results = "Tensor[]" if "*" in operator.inputs else results

    def parts(args: Any) -> tuple[list[Tensor | None], Any, tuple[bool, ...]]:
        tensors, (*values, needs) = unpacked(names, args)
        return tensors, values_of(context_type, values), tuple(needs)

    def finished(made: Sequence[Any], like: Tensor) -> Any:
        made = [None if isinstance(x, int) else x for x in made]
        results = tensors_or_empty(made, like)
        if "*" not in operator.inputs:
            return results
        return [results] if isinstance(results, Tensor) else list(results)

    def backward(*args: Any) -> Any:
        tensors, context, needs = parts(args)
        made = operator.run_backward(tensors, context, needs, op=True)(*tensors)
        return finished(made if isinstance(made, tuple) else (made,), first(tensors))

    def fake(*args: Any) -> Any:
        tensors, context, needs = parts(args)
        n = operator.differentiable
        return finished(operator.gradients(context, tensors[:n], tensors[n:], needs), first(tensors))

    def refuse(ctx: Any, *grads: Any) -> Any:
        raise NotImplementedError(NO_SECOND_DERIVATIVE)

    schema = f"({', '.join(arguments)}) -> {results}"
    op = kernel_op(operator.backward_name, backward, schema, fake)
    op.register_autograd(refuse)


def first(tensors: Sequence[Tensor | None]) -> Tensor:
    return next(x for x in tensors if x is not None)


def kernel_op(
    name: str,
    function: Callable[..., Any],
    schema: str,
    fake: Callable[..., Any],
    mutates_args: tuple[str, ...] = (),
) -> torch.library.CustomOpDef:
    """torch.library.custom_op, in NAMESPACE, of a function that launches kernels, with two
    differences, if it changes no argument: the op raises on inputs that carry tangents, which
    torch.library would drop, and a call that `goes_straight` skips the second way through the
    dispatcher that torch.library takes to the function, and its Python: 10 of the 20 microseconds by
    which an op's call is longer than that.
    """
    name = f"{NAMESPACE}::{name}"
    op = torch.library.custom_op(name, function, mutates_args=mutates_args, schema=schema)

    def telling(*args: Any) -> Any:
        private.tell_inductor(op)
        return fake(*args)

    op.register_fake(telling)
    if mutates_args:
        return op
    differentiate = private.autograd_of(op)

    def autograd(keyset: Any, *args: Any, **kwargs: Any) -> Any:
        if private.forward_mode() and private.has_tangent(args):
            raise NotImplementedError(NO_TANGENT)
        if private.goes_straight(keyset) and not (
            is_grad_enabled() and torch._C._any_requires_grad(*args)
        ):
            return function(*args, **kwargs)
        return differentiate(keyset, *args, **kwargs)

    private.override_autograd(op, autograd)
    return op
