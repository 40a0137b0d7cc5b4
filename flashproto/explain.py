"""What a call does: its backend, kernels and tiles, and why other backends do not run it."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

from . import backends

if backends.HAS_TRITON:
    from .ops import call, call_cache
    from .ops.recipe import Compute, Launch, Recipe


def explain(function: Callable[..., Any], *args: Any, **options: Any) -> str:
    """Make a call, print what ran it and why, and return the text.

    Args:
        function: a function of flashproto, or any other that calls some: a module, a training step.
        args, options: what it is called with.

    For each operator, in the order of their calls: the backend and how it was chosen; each kernel with
    the number of its programs, its constants (tiles among them, in capitals) and options, for the
    forward and, where gradients are wanted, the backward; copies that are made before a launch because
    of how a tensor lies in memory; and why each other backend does not run this call.

    Raises: what the call raises.

    Example:
        >>> text = flashproto.explain(flashproto.softmax, torch.zeros(2, 8), impl="reference")
        softmax: backend reference
        ...
    """
    lines: list[str] = []
    with watched(lines):
        function(*args, **options)
    text = "\n".join(lines) or "No operator of flashproto was called."
    print(text)
    return text


@contextlib.contextmanager
def watched(lines: list[str]) -> Iterator[None]:
    """Adds lines for each choice of a backend and each call of an operator meanwhile.  Calls that are
    kept are set aside, so that each is looked at anew."""

    def choice(operator: str, chosen: str, against: dict[str, list[str]]) -> None:
        lines.append(f"{operator}: backend {chosen}")
        lines.extend(f"  not {backend}: {'; '.join(why)}" for backend, why in against.items())

    def made(operator: Any, inputs: Any, settings: Any, returns: tuple[int, ...]) -> None:
        recorded = operator.saved is not None and call.wants_grad(inputs)
        recipe, saves = operator.run(inputs, settings, returns, recorded)[1:]
        lines.extend(lines_of("forward", recipe))
        if recorded:
            returned = {
                i: recipe.whole[x.variable] for i, x in zip(returns, recipe.returns, strict=False)
            }
            grads = [returned.get(i) for i in range(operator.differentiable)]
            needs = tuple(x is not None and x.requires_grad for x in inputs)
            tensors = (*grads, *saves)
            context = operator.context(settings, inputs)
            lines.extend(lines_of("backward", operator.backward_recipe(tensors, context, needs, False)))

    with contextlib.ExitStack() as stack:
        stack.enter_context(backends.watch_choices(choice))
        if backends.HAS_TRITON:
            stack.enter_context(call_cache.set_aside())
            stack.enter_context(call.watch_calls(made))
        yield


def lines_of(direction: str, recipe: Recipe) -> Iterator[str]:
    """A line for each step of a recipe that takes time."""
    for step in recipe.steps:
        if isinstance(step, Launch):
            constants = {n: x for n, x in step.arguments.items() if n.isupper()} | step.options
            told = ", ".join(f"{name}={value}" for name, value in constants.items())
            yield f"  {direction}: {step.kernel.__name__}, {step.programs} programs: {told}"
        elif isinstance(step, Compute) and step.variable is not None:
            made = recipe.whole[step.variable]
            assert made is not None
            name = getattr(step.function, "__name__", "") or step.function.func.__name__  # type: ignore[attr-defined]
            yield f"  {direction}: {name} of {list(made.shape)}, {made.dtype}"
