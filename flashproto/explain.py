"""What a call does: its backend, kernels and tiles, and why other backends do not run it."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

from torch import Tensor
from torch.nn import Parameter

from . import backends
from .checks.errors import described, refuse
from .variant import Kind

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
    of how a tensor lies in memory; and why each other backend does not run this call.  Not what other
    threads call meanwhile, nor compiled code, nor products of torch's, which linear_cross_entropy is
    made of beside its kernels; of a call on fake tensors the backend alone.

    Raises: TypeError: `function` cannot be called; what the call raises.

    Example:
        >>> text = flashproto.explain(flashproto.softmax, torch.zeros(2, 8), impl="reference")
        softmax: backend reference
        ...
    """
    if not callable(function):
        takes, do = "a function or a module", "The arguments come behind it: explain(softmax, x)."
        refuse("explain", "function", described(function), takes, do, TypeError)
    lines: list[str] = []
    with watched(lines):
        function(*args, **options)
    text = "\n".join(lines) or "No operator of flashproto was called outside of torch.compile."
    print(text)
    return text


@contextlib.contextmanager
def watched(lines: list[str]) -> Iterator[None]:
    """Adds lines for each choice of a backend and each call of an operator meanwhile.  Calls that are
    kept are set aside, so that each is looked at anew."""

    start = [0]  # of the lines of the last choice

    def choice(operator: str, chosen: str, against: dict[str, list[str]]) -> None:
        start[0] = len(lines)
        lines.append(f"{operator}: backend {chosen}")
        lines.extend(f"  not {backend}: {'; '.join(why)}" for backend, why in against.items())

    def made(operator: Any, inputs: Any, settings: Any, returns: tuple[int, ...]) -> None:
        needs = tuple(x is not None and x.requires_grad for x in inputs)
        recorded = operator.saved is not None and call.wants_grad(inputs)
        inputs = [None if x is None else backends.unwrapped(x) for x in inputs]
        if not all(x is None or type(x) in (Tensor, Parameter) for x in inputs):
            return
        recipe, saves = operator.run(inputs, settings, returns, recorded)[1:]
        lines.extend(lines_of("forward", recipe))
        if recorded:
            returned = {
                i: recipe.whole[x.variable] for i, x in zip(returns, recipe.returns, strict=False)
            }
            asked = range(operator.differentiable - operator.seldom)
            grads = [*map(returned.get, asked), *[None] * operator.seldom]
            tensors = (*grads, *saves)
            context = operator.context(settings, inputs)
            lines.extend(lines_of("backward", operator.backward_recipe(tensors, context, needs, False)))

    def stepped(recipe: Recipe) -> None:
        direction = "backward" if call.private.in_backward() else "forward"
        lines.extend(x for x in lines_of(direction, recipe) if x not in lines[start[0] :])

    with contextlib.ExitStack() as stack:
        stack.enter_context(backends.watch_choices(choice))
        if backends.HAS_TRITON:
            stack.enter_context(call_cache.set_aside())
            stack.enter_context(call.watchers.add(made))
            stack.enter_context(call.watchers_of_steps.add(stepped))
        yield


def lines_of(direction: str, recipe: Recipe) -> Iterator[str]:
    """A line for each step of a recipe that takes time."""
    for step in recipe.steps:
        if isinstance(step, Launch):
            constants = {n: x for n, x in step.arguments.items() if n.isupper()} | step.options
            kinds = {n: x.name for n, x in constants.items() if isinstance(x, Kind)}
            told = ", ".join(f"{name}={value}" for name, value in (constants | kinds).items())
            yield f"  {direction}: {step.kernel.__name__}, {step.programs} programs: {told}"
        elif isinstance(step, Compute) and step.variable is not None:
            made = recipe.whole[step.variable]
            assert made is not None
            name = getattr(step.function, "__name__", "") or step.function.func.__name__  # type: ignore[attr-defined]
            yield f"  {direction}: {name} of {list(made.shape)}, {made.dtype}"
