"""One way to call: an operator is two recipes, and everything else that a call needs follows from them.

An Operator says what a call makes (`makes`), how that is filled (`forward`), what the backward reads
(`saves`), which gradients there are (`gradients`) and how they are filled (`backward`).  All of it
follows from metadata and settings.  Made of that, here and once for all operators:

 -  the eager call: a function written for the recipe (recipe.py), found again by metadata;
 -  the autograd.Function that records it, and the one for transforms of torch.func;
 -  the ops torch.ops.flashproto.NAME and NAME_backward: schemas, fakes, autograd;
 -  errors where there is no derivative: forward mode, and a second time.

A call goes through its op, the first and the hundredth alike, while anything wants to see it: while
torch.compile or make_fx traces, under a TorchDispatchMode (a FLOP counter, selective checkpointing,
FakeTensorMode), and for subclasses of Tensor.  What is saved for the backward is always the same.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from operator import itemgetter
from typing import Any, NamedTuple

import torch
from torch import Tensor, is_grad_enabled
from torch._C._functorch import unwrap_if_dead
from torch.autograd.graph import increment_version
from torch.compiler import is_dynamo_compiling
from torch.nn import Parameter

from .. import backends
from . import private
from .library import NO_SECOND_DERIVATIVE, first, own_ops, packed, plain_values, register
from .private import (
    BATCHED_GRADIENTS,
    PRE_DISPATCH,
    dispatch_modes,
    key_is_on,
    transforms_active,
    watched,
)
from .recipe import New, Operand, Recipe, is_aligned, is_lazy
from .written import runner

CAPACITY = 4096  # what an operator keeps of calls, some KiB each

Gradient = New | int | None
"""Of an input: memory for it, the number of the input whose gradient is the same, or none."""

OPERATORS: dict[str, Operator] = {}
watchers = backends.Watchers()
"""Told (operator, inputs, settings, returns) before each call that torch.compile does not make."""
watchers_of_steps = backends.Watchers()
"""Told the recipe of each call of `steps`."""
_forgotten = 0  # how often `forget` was called


def forget() -> None:
    """All recipes; for who changes at run time what they follow from."""
    global _forgotten
    _forgotten += 1
    _steps.clear()
    for operator in OPERATORS.values():
        operator.kept.clear()


@dataclass(frozen=True, eq=False)
class Operator:
    """An operator.  Its functions get Operands or, for fakes, tensors, and read no element.

    inputs: names of the tensors: "x, residual?, *operands"; `?` may be None, `*` is any number.
    outputs: how many tensors the forward makes; the first `differentiable` of them have gradients.
    settings: a NamedTuple of plain values.
    makes(settings, *inputs): a New for each output, None for one that this call has not.
    forward(recipe, settings, inputs, outputs): adds the steps that fill the outputs, of which those are
        None that nobody asks for.
    saved: names of what the backward reads, as `inputs`; None for an operator without a backward.
    saves(settings, inputs, outputs): these tensors.
    context(settings, inputs): the plain values that the backward knows beside, a NamedTuple of the type
        `context_type`; by default the settings.
    gradients(context, grads, saved, needs): a Gradient for each input; needs: which are asked for.
    backward(recipe, context, grads, saved, made): adds the steps that fill the gradients `made`; may
        return others in their place.  grads: of the differentiable outputs, None for one without.
    seldom: how many of these, the last ones, have none in most calls: explain expects none.
    gives_away: the number of what is saved that the first backward may write over; others get None.
    no_gradient: why there is no backward, for the error.
    backward_name: of the backward's op, by default NAME_backward.
    writes: names of inputs that are written in place, of an operator without outputs.
    again(context, grads, saved): the gradients by calls that have gradients themselves, for an operator
        that can be differentiated more than once.
    """

    name: str
    inputs: str
    outputs: int
    settings: type
    makes: Callable[..., Sequence[New | None]]
    forward: Callable[..., None]
    saved: str | None = None
    saves: Callable[..., Sequence[Any]] = lambda settings, inputs, outputs: ()
    context: Callable[..., Any] = lambda settings, inputs: settings
    context_type: type | None = None
    gradients: Callable[..., Sequence[Gradient]] = lambda *_: ()
    backward: Callable[..., Sequence[Operand | None] | None] = lambda *_: None
    differentiable: int = 1
    seldom: int = 0
    gives_away: int | None = None
    no_gradient: str = ""
    backward_name: str = ""
    writes: tuple[str, ...] = ()
    again: Callable[..., tuple[Tensor | None, ...]] | None = None
    kept: dict[Any, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        OPERATORS[self.name] = self
        if not self.backward_name:
            object.__setattr__(self, "backward_name", f"{self.name}_backward")
        register(self)

    def bind(
        self,
        inputs: Sequence[Tensor | None],
        settings: Any,
        returns: tuple[int, ...] = (0,),
        names: Sequence[str] | None = None,
    ) -> Any:
        """The outputs numbered `returns`, one or a tuple: a Call, to be made; or where the call goes
        through the op or a transform of torch.func, the results themselves.

        names: what the caller calls the inputs that are given; None: it has the same, in this order.
        """
        if not torch.compiler.is_compiling():
            for watcher in watchers.all:
                watcher(self, inputs, settings, returns)
        if through_op(inputs) or (self.writes and transforms_active()):
            op = getattr(own_ops(), self.name)
            results = op(*packed(self.inputs, inputs), *plain_values(settings))
            return picked((results,) if self.outputs == 1 else results, returns)
        if transforms_active() or private.forward_mode():
            return picked(OperatorFunction.apply(self, settings, *inputs), returns)
        there = [x is not None for x in inputs]

        def function(recording: bool, *tensors: Tensor) -> Callable[..., Any]:
            given = iter(tensors)
            inputs = [next(given) if x else None for x in there]
            return self.function(inputs, settings, returns, recording)

        return Call(names, [x.dtype for x in inputs if x is not None], function)

    def __call__(
        self, inputs: Sequence[Tensor | None], settings: Any, returns: tuple[int, ...] = (0,)
    ) -> Any:
        """`bind`, and made."""
        made = self.bind(inputs, settings, returns)
        return made(*[x for x in inputs if x is not None]) if type(made) is Call else made

    def function(
        self,
        inputs: Sequence[Tensor | None],
        settings: Any,
        returns: tuple[int, ...],
        recording: bool,
    ) -> Callable[..., Any]:
        """The outputs numbered `returns` as a function of those inputs that are given, for inputs of
        this metadata; recording: for autograd to record."""
        key = "call", settings, returns, recording, metadata(inputs), facts()
        if (found := self.kept.get(key)) is not None:
            return found
        given, count = [i for i, x in enumerate(inputs) if x is not None], len(inputs)
        if recording and self.saved is not None:
            return self.keep(key, recorded(self, inputs, settings, returns, given))
        plain = self.run(inputs, settings, returns, False).function
        if len(given) < count or self.writes:
            names = self.inputs.replace("?", "").split(", ")
            written = [i for i in given if self.writes and names[i] in self.writes]
            plain = of_given(plain, count, given, written)
        return self.keep(key, refusing(self, plain) if recording and self.no_gradient else plain)

    def keep(self, key: Any, made: Any) -> Any:
        if len(self.kept) >= CAPACITY:
            self.kept.clear()
        self.kept[key] = made
        return made

    # --- recipes ---

    def forward_recipe(
        self,
        inputs: Sequence[Tensor | None],
        settings: Any,
        returns: tuple[int, ...],
        saving: bool,
        op: bool = False,
    ) -> tuple[Recipe, list[Operand | None]]:
        """The recipe of the forward, or of its op.  It returns the outputs numbered `returns`, and if
        `saving` those behind them that are saved alone; with all that is saved."""
        recipe = Recipe(first(inputs).device)
        recipe.asked_for, recipe.functional = returns, op
        operands = recipe.all_inputs(inputs)
        news = self.makes(settings, *operands)
        outputs = [None if new is None else recipe.make(new) for new in news]
        saves = list(self.saves(settings, operands, outputs)) if saving else []
        wanted = [
            x if i in returns or any(x is s for s in saves) else None for i, x in enumerate(outputs)
        ]
        self.forward(recipe, settings, operands, wanted)
        recipe.returns = [wanted[i] for i in returns]
        recipe.returns += [x for i, x in enumerate(wanted) if x is not None and i not in returns]
        return recipe.finish(), saves

    def backward_recipe(
        self, tensors: Sequence[Tensor | None], context: Any, needs: tuple[bool, ...], op: bool
    ) -> Recipe:
        """The recipe of the backward: of the gradients of the outputs and what is saved, to those of
        the inputs, None for one that is not needed; for the op each that is made, but none twice."""
        recipe = Recipe(first(tensors).device)
        recipe.functional = op
        operands = recipe.all_inputs(tensors)
        grads, saved = operands[: self.differentiable], operands[self.differentiable :]
        wanted = list(self.gradients(context, grads, saved, needs))
        made = [recipe.make(x) if isinstance(x, New) else None for x in wanted]
        made = list(self.backward(recipe, context, grads, saved, made) or made)
        if not op:
            made = [
                (made[w] if isinstance(w, int) else m) if need else None
                for w, m, need in zip(wanted, made, needs, strict=True)
            ]
        recipe.returns = made
        return recipe.finish()

    def run(
        self,
        inputs: Sequence[Tensor | None],
        settings: Any,
        returns: tuple[int, ...],
        saving: bool,
        op: bool = False,
    ) -> Forward:
        """The forward of inputs like these."""
        key = "forward", settings, returns, saving, op, metadata(inputs), facts()
        if (found := self.kept.get(key)) is not None:
            return found
        recipe, saves = self.forward_recipe(inputs, settings, returns, saving, op)

        def elsewhere(*inputs: Tensor | None) -> Any:
            return self.run(inputs, settings, returns, saving, op).function(*inputs)

        return self.keep(key, Forward(runner(recipe, elsewhere), recipe, saves))

    def run_backward(
        self, tensors: Sequence[Tensor | None], context: Any, needs: tuple[bool, ...], op: bool = False
    ) -> Callable[..., Any]:
        """The backward as a function of gradients and what is saved, for such as are like these."""
        key = "backward", context, needs, op, metadata(tensors), facts()
        if (found := self.kept.get(key)) is not None:
            return found
        recipe = self.backward_recipe(tensors, context, needs, op)

        def elsewhere(*tensors: Tensor | None) -> Any:
            return self.run_backward(tensors, context, needs, op)(*tensors)

        return self.keep(key, runner(recipe, elsewhere))

    def gradients_visibly(
        self, context: Any, needs: tuple[bool, ...], tensors: Sequence[Tensor | None]
    ) -> tuple[Tensor | None, ...]:
        """The gradients of all inputs: by the op where something wants to see it, or a Function; of a
        batch of gradients those of each."""
        return private.one_by_one(lambda *one: self._gradients(context, needs, one), tensors)

    def _gradients(
        self, context: Any, needs: tuple[bool, ...], tensors: Sequence[Tensor | None]
    ) -> tuple[Tensor | None, ...]:
        if self.gives_away is not None:  # what may be written over is for eager calls alone
            tensors = without(tensors, self.differentiable + self.gives_away)
        tensors, n = alive(tensors), self.differentiable
        grads, saved = tensors[:n], tensors[n:]
        if self.again is not None:
            return self.again(context, grads, saved)
        if not through_op(tensors):
            return FirstDerivative.apply(backward_now, self, context, needs, *tensors)
        op = getattr(own_ops(), self.backward_name)
        assert self.saved is not None
        results = op(*grads, *packed(self.saved, saved), *plain_values(context), needs)
        made = list(results) if isinstance(results, (tuple, list)) else [results]
        wanted = self.gradients(context, grads, saved, needs)
        return tuple(
            (made[w] if isinstance(w, int) else None if w is None else m) if need else None
            for w, m, need in zip(wanted, made, needs, strict=True)
        )


class Forward(NamedTuple):
    """The forward of an operator as a function of its inputs; its recipe; which operands it saves."""

    function: Callable[..., Any]
    recipe: Recipe
    saves: list[Operand | None]


def steps(
    build: Callable[..., None], tensors: Sequence[Tensor | None], settings: tuple[Any, ...]
) -> None:
    """Take the steps that build(recipe, operands, *settings) adds for tensors like these, which they
    fill: for an operator that is more than a recipe."""
    key = build, settings, metadata(tensors), facts()
    found = _steps.get(key)
    if found is None:
        recipe = Recipe(first(tensors).device)
        build(recipe, recipe.all_inputs(tensors), *settings)
        if len(_steps) >= CAPACITY:
            _steps.clear()
        found = recipe, runner(recipe, lambda *others: steps(build, others, settings))
        _steps[key] = found
    recipe, run = found
    for watcher in watchers_of_steps.all:
        watcher(recipe)
    run(*tensors)


_steps: dict[Any, tuple[Recipe, Callable[..., Any]]] = {}


# --- what a call depends on -----------------------------------------------------------------------


def through_op(tensors: Sequence[Tensor | None]) -> bool:
    """Whether a call with these tensors goes through its op."""
    if torch.compiler.is_compiling() or watched():
        return True
    return any(x is not None and type(x) is not Tensor and type(x) is not Parameter for x in tensors)


def wants_grad(tensors: Sequence[Tensor | None]) -> bool:
    """Whether a call with these tensors is to be recorded."""
    if is_grad_enabled():
        for x in tensors:
            if x is not None and x.requires_grad:
                return True
    return False


def facts() -> tuple[bool, bool]:
    """What recipes follow from beside metadata and settings: whether products of float32 may be rounded
    to tf32, and whether results have to be the same bits in each run."""
    return private.allows_tf32(), private.deterministic()


def metadata(tensors: Sequence[Tensor | None]) -> tuple[Any, ...]:
    return tuple(
        None if x is None else (x.dtype, x.shape, x.stride(), x.device, is_aligned(x), is_lazy(x))
        for x in tensors
    )


# --- eager calls ----------------------------------------------------------------------------------


def picked(results: Sequence[Any], returns: tuple[int, ...]) -> Any:
    return results[returns[0]] if len(returns) == 1 else tuple(results[i] for i in returns)


@dataclass(frozen=True, slots=True)
class Call:
    """A call whose checks are done, as a function of its tensors.

    names: of these, None: those of the public function, in its order.  function(recording, *tensors):
    what gives the results for tensors like these; recording: for autograd to record.
    """

    names: Sequence[str] | None
    dtypes: Sequence[torch.dtype]
    function: Callable[..., Callable[..., Any]]

    def __call__(self, *tensors: Tensor) -> Any:
        return self.function(wants_grad(tensors), *tensors)(*tensors)

    def after(
        self, names: Sequence[str], tensors: Sequence[Tensor], prepare: Callable[..., Sequence[Tensor]]
    ) -> Call:
        """The call of tensors of these names, of which `prepare` makes this one's."""

        def function(recording: bool, *tensors: Tensor) -> Callable[..., Any]:
            run = self.function(recording, *prepare(*tensors))
            return lambda *tensors: run(*prepare(*tensors))

        return Call(names, [x.dtype for x in tensors], function)

    def checked(self, names: Sequence[str], check: Callable[..., None]) -> Call:
        """The call behind check(*tensors of these names), of what no metadata says."""
        assert self.names is not None
        pick = itemgetter(*map(self.names.index, names))

        def function(recording: bool, *tensors: Tensor) -> Callable[..., Any]:
            run = self.function(recording, *tensors)

            def checked(*tensors: Tensor) -> Any:
                check(*pick(tensors))
                return run(*tensors)

            return checked

        return replace(self, function=function)

    def behind(self, first: Call) -> Call:
        """This call, once another one is made, as a call of the tensors of both."""
        assert self.names is not None and first.names is not None
        dtypes = dict(zip((*first.names, *self.names), (*first.dtypes, *self.dtypes), strict=True))
        names = list(dtypes)
        picks = [itemgetter(*map(names.index, call.names or ())) for call in (first, self)]

        def function(recording: bool, *tensors: Tensor) -> Callable[..., Any]:
            (pick_first, pick), found = picks, zip((first, self), picks, strict=True)
            run_first, run = (call.function(recording, *pick(tensors)) for call, pick in found)

            def both(*tensors: Tensor) -> Any:
                run_first(*pick_first(tensors))
                return run(*pick(tensors))

            return both

        return Call(names, list(dtypes.values()), function)

    def of(self, names: Sequence[str], tensors: Sequence[Tensor]) -> Call:
        """The call of tensors of these names, from which autocast may have made this one's."""
        order = list(range(len(tensors)) if self.names is None else map(names.index, self.names))
        dtypes = [tensors[i].dtype for i in order]
        if order == [*range(len(tensors))] and dtypes == self.dtypes:
            return self
        wanted = [*zip(order, self.dtypes, strict=True)]
        return self.after(names, tensors, lambda *given: [given[i].to(dtype) for i, dtype in wanted])


def of_given(
    run: Callable[..., Any], count: int, given: list[int], written: list[int]
) -> Callable[..., Any]:
    """run(*inputs) as a function of the given ones, None for the others of the `count`; autograd is
    told of those that are written."""
    names = [f"t{i}" if i in given else "None" for i in range(count)]
    made = f"run({', '.join(names)})"
    if written:
        made = f"({made}, mark(({', '.join(f't{i}' for i in written)},)))[0]"
    text = f"lambda {', '.join(f't{i}' for i in given)}: {made}"
    return eval(text, {"run": run, "mark": increment_version})


RECORDED = """
def forward(ctx, {given}):
    {results}, = made = run({inputs})
    ctx.save_for_backward({saves})
    {marks}
    return {returned}
"""


def recorded(
    operator: Operator,
    inputs: Sequence[Tensor | None],
    settings: Any,
    returns: tuple[int, ...],
    given: list[int],
) -> Callable[..., Any]:
    """What records a call: apply of a Function of its own, whose forward is written for it, since what
    a small call takes is Python between torch and the launch."""
    run, recipe, saves = operator.run(inputs, settings, returns, True)
    results = [f"r{i}" for i in range(len(recipe.returns))]
    by_operand = {id(x): r for x, r in zip(recipe.returns, results, strict=True) if x is not None}
    names = [f"t{i}" if i in given else "None" for i in range(len(inputs))]
    by_operand |= {id(recipe.operands[i]): names[i] for i in given}
    marks = []
    if len(returns) > 1 or operator.differentiable > 1:
        marks.append("ctx.set_materialize_grads(False)")
    stopped = [results[k] for k, i in enumerate(returns) if i >= operator.differentiable]
    stopped = [
        r for r, x in zip(results, recipe.returns, strict=False) if r in stopped and x is not None
    ]
    if stopped:
        marks.append(f"ctx.mark_non_differentiable({', '.join(stopped)})")
    if operator.gives_away is not None:
        marks.append("ctx.gave_away = False")
    text = RECORDED.format(
        given=", ".join(f"t{i}" for i in given),
        inputs=", ".join(names),
        results=", ".join(results),
        saves=", ".join("None" if x is None else by_operand[id(x)] for x in saves),
        marks="; ".join(marks) or "pass",
        returned=", ".join(results[: len(returns)]),
    )
    if len(results) == 1:
        text = text.replace("r0, = made = ", "r0 = ")
    scope: dict[str, Any] = {"run": run}
    exec(text, scope)
    backward = backward_of(operator, operator.context(settings, inputs), returns, given, len(inputs))
    body = {"forward": staticmethod(scope["forward"]), "backward": staticmethod(backward)}
    return private.recorder(type(f"{operator.name}_recorded", (torch.autograd.Function,), body))


def backward_of(
    operator: Operator, context: Any, returns: tuple[int, ...], given: list[int], count: int
) -> Callable[..., Any]:
    """backward of a Function whose forward gets the inputs numbered `given` and returns the outputs
    numbered `returns`.

    What it runs is found by strides, since hooks of saved tensors do not keep them.
    """
    ways: dict[Any, Callable[..., Any]] = {}
    places = [returns.index(i) if i in returns else None for i in range(operator.differentiable)]
    direct = places == list(range(len(returns)))
    complete = len(given) == count

    def backward(ctx: Any, *received: Tensor | None) -> Any:
        grads = received if direct else tuple(None if at is None else received[at] for at in places)
        tensors = (*grads, *ctx.saved_tensors)
        if operator.gives_away is not None:
            if ctx.gave_away:
                tensors = without(tensors, operator.differentiable + operator.gives_away)
            ctx.gave_away = True
        needs = ctx.needs_input_grad
        if len(grads) > 1 and all(x is None for x in grads):
            return (None,) * len(needs)
        if (
            is_dynamo_compiling()
            or is_grad_enabled()
            or transforms_active()
            or dispatch_modes()
            or key_is_on(BATCHED_GRADIENTS)
            or key_is_on(PRE_DISPATCH)
        ):
            made = operator.gradients_visibly(context, all_needs(needs), tensors)
            return made if complete else tuple(made[i] for i in given)
        lazy = [x is not None and is_lazy(x) for x in grads]
        strides = [None if x is None else x.stride() for x in tensors]
        key = needs, facts(), _forgotten, *lazy, *strides
        run = ways.get(key)
        if run is None:
            run = operator.run_backward(tensors, context, all_needs(needs))
            if count > 1 and not complete:
                run = only(run, given)
            ways[key] = run
        return run(*tensors)

    def all_needs(needs: tuple[bool, ...]) -> tuple[bool, ...]:
        if complete:
            return needs
        by_input = dict(zip(given, needs, strict=True))
        return tuple(by_input.get(i, False) for i in range(count))

    return backward


def only(run: Callable[..., Any], given: list[int]) -> Callable[..., Any]:
    """run, and of its results those of the inputs that are given."""

    def some(*tensors: Tensor | None) -> Any:
        made = run(*tensors)
        return tuple([made[i] for i in given])

    return some


def without(tensors: Sequence[Tensor | None], i: int) -> tuple[Tensor | None, ...]:
    return (*tensors[:i], None, *tensors[i + 1 :])


def refusing(operator: Operator, plain: Callable[..., Any]) -> Callable[..., Any]:
    """A forward whose backward raises."""

    def forward(ctx: Any, *tensors: Tensor) -> Any:
        return plain(*tensors)

    def backward(ctx: Any, *grads: Tensor | None) -> Any:
        raise NotImplementedError(operator.no_gradient)

    body = {"forward": staticmethod(forward), "backward": staticmethod(backward)}
    return private.recorder(type(f"{operator.name}_recorded", (torch.autograd.Function,), body))


def backward_now(
    operator: Operator, context: Any, needs: tuple[bool, ...], *tensors: Tensor | None
) -> tuple[Tensor | None, ...]:
    made = operator.run_backward(tensors, context, needs)(*tensors)
    return made if isinstance(made, tuple) else (made,)


# --- transforms of torch.func ---------------------------------------------------------------------


class OperatorFunction(torch.autograd.Function):
    """A call under a transform of torch.func.  It has no jvp: forward-mode differentiation raises."""

    @classmethod
    def apply(cls, *args):
        return super().apply(*alive(args))

    @staticmethod
    def vmap(info, in_dims, *arguments):
        return one_after_another(OperatorFunction, info, in_dims, arguments)

    @staticmethod
    def forward(operator, settings, *inputs):
        made = operator.run(inputs, settings, tuple(range(operator.outputs)), True).function(*inputs)
        return (made,) if operator.outputs == 1 else made

    @staticmethod
    def setup_context(ctx, inputs, output):
        ctx.operator, settings, *tensors = inputs
        ctx.context = ctx.operator.context(settings, tensors)
        ctx.save_for_backward(*ctx.operator.saves(settings, tensors, output))
        ctx.mark_non_differentiable(
            *[x for x in output[ctx.operator.differentiable :] if x is not None]
        )
        ctx.set_materialize_grads(False)

    @staticmethod
    def backward(ctx, *grads):
        operator, needs = ctx.operator, ctx.needs_input_grad[2:]
        if operator.saved is None:
            raise NotImplementedError(operator.no_gradient)
        grads = grads[: operator.differentiable]
        if all(x is None for x in grads):
            return (None,) * (2 + len(needs))
        made = operator.gradients_visibly(ctx.context, needs, (*grads, *ctx.saved_tensors))
        return None, None, *made


class FirstDerivative(torch.autograd.Function):
    """function(*arguments), a tuple of gradients; differentiating once more raises.

    It is a Function so that torch.func hands it plain tensors.
    """

    @classmethod
    def apply(cls, *args):
        return super().apply(*alive(args))

    @staticmethod
    def forward(function, *arguments):
        return function(*arguments)

    @staticmethod
    def setup_context(ctx, inputs, output):
        """Keeps nothing: there is no derivative.  torch wants it where forward has no ctx."""

    @staticmethod
    def backward(ctx, *grads):
        raise NotImplementedError(NO_SECOND_DERIVATIVE)

    @staticmethod
    def vmap(info, in_dims, *arguments):
        return one_after_another(FirstDerivative, info, in_dims, arguments)


def alive(arguments: Sequence[Any]) -> list[Any]:
    """A pullback of torch.func.vjp that is called late finds tensors of a transform that has ended."""
    return [unwrap_if_dead(x) if isinstance(x, Tensor) else x for x in arguments]


def one_after_another(
    function: Any, info: Any, in_dims: Sequence[int | None], arguments: Sequence[Any]
) -> tuple[Any, Any]:
    """A rule for torch.func.vmap, which torch.func.jacrev takes for the rows of a Jacobian."""
    rows = [
        function.apply(
            *[
                x.select(d, i) if isinstance(x, Tensor) and d is not None else x
                for x, d in zip(arguments, in_dims, strict=True)
            ]
        )
        for i in range(info.batch_size)
    ]
    columns = list(zip(*rows, strict=True))
    made = tuple(None if column[0] is None else torch.stack(column) for column in columns)
    return made, tuple(None if x is None else 0 for x in made)
