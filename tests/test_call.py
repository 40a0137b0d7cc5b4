"""A call is one thing: the same the first and every later time, whatever was called before, and whole
under each mode, transform and trace of torch.  Every public function, by the table in operators.py.

Shapes are new to the process where a test is about the first calls of a kind.
"""

from __future__ import annotations

import copy
import functools
import gc
import itertools
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import pytest
import torch
from operators import (
    CASES,
    DIFFERENTIABLE,
    MAIN,
    OPERATORS,
    Case,
    Inputs,
    Results,
    assert_near,
    assert_one_op,
    assert_same,
    assert_same_results,
    backward,
    bf16,
    bits,
    copy_of,
    default_backend,
    deterministic,
    f32,
    first_of_each,
    launches,
    layout,
    no_launch,
    own_ops,
    parameters,
    run,
    saved,
    upstream,
    watch,
)
from torch import Tensor, nn
from torch._dynamo import compiled_autograd
from torch._dynamo.testing import CompileCounterWithBackend, EagerAndRecordGraphs
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.autograd import forward_ad
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

import flashproto
from flashproto import BackendError
from flashproto.nn import GPT, GPTConfig

pytest.importorskip("triton")

MAIN_DIFFERENTIABLE = [case for case in MAIN if case.differentiable]
BY_OP_DIFFERENTIABLE = [case for case in first_of_each(lambda case: case.op) if case.differentiable]


def test_every_public_function_is_in_the_table() -> None:
    public = {
        n
        for n in flashproto.__all__
        if getattr(flashproto, n).__module__.startswith("flashproto.functional")
    }
    assert {case.function for case in CASES} == public - {"dropout_mask"}  # which has no operator
    assert len({case.name for case in CASES}) == len(CASES)


def inputs_of(case: Case, impl: str, device: str) -> Inputs:
    return case.inputs(device, bf16 if impl == "hopper" else None)


# --- the first call and every later one -----------------------------------------------------------


@pytest.mark.parametrize(("case", "impl"), parameters(CASES))
def test_five_calls_are_alike(case: Case, impl: str, device: str) -> None:
    inputs = inputs_of(case, impl, device)
    results, kept = [], []
    with deterministic():
        for _ in range(5):
            with saved() as seen:
                results.append(run(case, inputs, impl))
            kept.append(seen)
    assert kept[1:] == kept[:1] * 4
    for others in results[1:]:
        assert_same_results(others, results[0])
    with torch.no_grad():
        leaves = case.leaves(inputs)
        assert_same(case(leaves, impl), results[0].outputs)


@pytest.mark.parametrize(("case", "impl"), parameters(CASES))
def test_five_calls_are_one_op_each(case: Case, impl: str, device: str) -> None:
    """While a TorchDispatchMode watches; one that begins after calls without it included."""
    inputs = inputs_of(case, impl, device)
    with deterministic():
        first, second = watch(case, inputs, impl), watch(case, inputs, impl)
        alone = run(case, inputs, impl)
        others = [second, watch(case, inputs, impl), watch(case, inputs, impl)]
    for watched in (first, *others):
        assert_one_op(case, watched)
        assert (watched.forward, watched.backward) == (first.forward, first.backward)
        assert_same_results(watched.results, alone)


# --- the facts that a call depends on -------------------------------------------------------------


class Base(NamedTuple):
    """What calls of a case gave that were made before others were tried."""

    case: Case
    impl: str
    device: str
    inputs: Inputs
    results: Results

    def again(self, impl: str | None, mode: Any = None, **changed: Tensor) -> Results:
        return run(self.case, {**self.inputs, **changed}, impl, mode)

    def assert_equal(self, got: list[Tensor], wanted: list[Tensor]) -> None:
        """Of calls that may take other kernels on a GPU, and lie in memory in another way."""
        if self.device == "cpu" and self.case.op != "linear_cross_entropy":  # of torch's products
            assert [(t.dtype, t.shape) for t in got] == [(t.dtype, t.shape) for t in wanted]
            assert all(torch.equal(bits(a), bits(b)) for a, b in zip(got, wanted, strict=True))
        else:
            assert_near(got, wanted, 1e-2 if self.impl == "hopper" else 1e-5)

    def assert_restored(self) -> None:
        got = self.again(self.impl)
        assert_same(got.outputs, self.results.outputs)
        if self.impl == "hopper":  # whose sums are of no fixed order
            assert_near(got.gradients, self.results.gradients, 1e-2)
        else:
            assert_same(got.gradients, self.results.gradients)

    def floats(self) -> dict[str, Tensor]:
        return {n: t for n, t in self.inputs.items() if t.is_floating_point()}


@functools.cache
def base_of(case: Case, impl: str, device: str) -> Base:
    inputs = inputs_of(case, impl, device)
    for _ in range(3 if case in OPERATORS else 1):
        results = run(case, inputs, impl)
    return Base(case, impl, device, inputs, results)


UNIT_16 = 3e-2  # by which results may differ, relative to the largest, where there are 16 bits


def unit_of(*tensors: Tensor) -> float:
    return UNIT_16 if any(t.dtype.itemsize < 4 for t in tensors) else 1e-4


def assert_as_reference(got: Results, wanted: Results, unit: float) -> None:
    """Dtypes, and elements within roundings, are those of the definition."""
    for a, b in zip(got, wanted, strict=True):
        assert [t.dtype for t in a] == [t.dtype for t in b]
        wide = [i for i, t in enumerate(b) if t.is_floating_point() and t.dtype.itemsize > 1]
        assert_near([a[i] for i in wide], [b[i] for i in wide], unit)


def default_backend_changes(base: Base) -> None:
    with default_backend(base.impl):
        for _ in range(3):
            base.again(None)
    with default_backend("reference"), no_launch():
        assert_same_results(base.again(None), base.again("reference"))
    with default_backend(base.impl), launches() as seen:
        assert_same(base.again(None).outputs, base.results.outputs)
    assert seen


def autocast_changes(base: Base) -> None:
    for dtype in (bf16, torch.float16):
        on = functools.partial(torch.autocast, base.device, dtype)
        got, wanted = base.again(base.impl, on()), base.again("reference", on())
        assert_as_reference(got, wanted, UNIT_16)
    with on(), torch.autocast(base.device, enabled=False):
        assert_same(base.again(base.impl).outputs, base.results.outputs)


def determinism_changes(base: Base) -> None:
    with deterministic():
        first, second = base.again(base.impl), base.again(base.impl)
    assert_same_results(first, second)
    assert_same(first.outputs, base.results.outputs)
    base.assert_equal(first.gradients, base.results.gradients)


def alignment_changes(base: Base) -> None:
    """Of each tensor by itself: a start at no multiple of 16 bytes."""
    for name, t in base.floats().items():
        memory = torch.empty(t.numel() + 1, dtype=t.dtype, device=t.device)
        late = memory[1:].view(t.shape).copy_(t)
        if base.impl == "hopper":
            with pytest.raises(BackendError):
                base.again("hopper", **{name: late})
            with launches() as seen:
                got = base.again(None, **{name: late})
            with launches() as seen_aligned:
                base.again(None)
            # Backend "triton" has kernels of its own for rows of the backward.
            names = [{launch.kernel for launch in each} for each in (seen, seen_aligned)]
            assert names[0] != names[1]
        else:
            got = base.again(base.impl, **{name: late})
        base.assert_equal(got.outputs, base.results.outputs)
        base.assert_equal(got.gradients, base.results.gradients)


def need_of_gradients_changes(base: Base) -> None:
    case = base.case
    names = case.gradients(base.inputs)
    for wanted in ([], *([n] for n in names)):
        leaves = {n: copy_of(t).requires_grad_(n in wanted) for n, t in base.inputs.items()}
        outputs = case(leaves, base.impl)
        assert any(y.requires_grad for y in outputs) == bool(wanted)
        base.assert_equal([y.detach() for y in outputs], base.results.outputs)
        if wanted:
            got = backward(outputs, [leaves[n] for n in wanted])
            base.assert_equal(got, [base.results.gradients[names.index(n)] for n in wanted])


def learned_tables_change(base: Base) -> None:
    """The kernels give rope's tables no gradient: asked for by name they raise, else others run."""
    if "cos" not in base.case.constants:
        pytest.skip("takes no tables of rope")
    leaves = base.case.leaves(base.inputs)
    leaves["cos"].requires_grad_()
    with pytest.raises(BackendError, match="cos or sin needs a gradient"):
        base.case(leaves, base.impl)
    (got,) = backward(base.case(leaves, None), [leaves["cos"]])
    (wanted,) = backward(base.case(leaves, "reference"), [leaves["cos"]])
    assert_near([got], [wanted])


def grad_mode_changes(base: Base) -> None:
    for mode in (torch.no_grad, torch.inference_mode):
        leaves = base.case.leaves(base.inputs)
        written = base.case.writes.split() if not base.case.differentiable else []
        with mode(), saved() as seen:
            outputs = base.case(leaves, base.impl)
        assert not seen and not any(y.requires_grad for y in outputs)
        if not written:
            assert all(y.is_inference() == (mode is torch.inference_mode) for y in outputs)
        assert_same(outputs, base.results.outputs)


def strides_change(base: Base) -> None:
    many = {n: t for n, t in base.floats().items() if t.ndim > 1}
    ways: list[Callable[[Tensor], Tensor]] = [
        lambda t: t.mT.contiguous().mT,
        lambda t: torch.stack([t, t], -1)[..., 0],
    ]
    for way in ways:
        # TMA takes no such memory: there the portable kernels do.
        impl = None if base.impl == "hopper" else base.impl
        got = base.again(impl, **{n: way(t) for n, t in many.items()})
        base.assert_equal(got.outputs, base.results.outputs)
        base.assert_equal(got.gradients, base.results.gradients)


def dtype_changes(base: Base) -> None:
    constants = base.case.constants.split()
    other = {f32: bf16, bf16: f32 if base.impl != "hopper" else torch.float16}
    changed = {n: t.to(other[t.dtype]) for n, t in base.floats().items() if n not in constants}
    got, wanted = (base.again(impl, **changed) for impl in (base.impl, "reference"))
    assert_as_reference(got, wanted, UNIT_16)


def a_mode_watches(base: Base) -> None:
    watched = watch(base.case, base.inputs, base.impl)
    assert_one_op(base.case, watched)
    assert_same(watched.results.outputs, base.results.outputs)
    base.assert_equal(watched.results.gradients, base.results.gradients)


def what_is_saved_is_packed(base: Base) -> None:
    with saved() as seen:
        base.assert_restored()
    assert bool(seen) == base.case.differentiable


def tensors_are_parameters(base: Base) -> None:
    case = base.case
    names = case.gradients(base.inputs)
    if not names:
        pytest.skip("has no gradients")
    parameters = {n: nn.Parameter(copy_of(base.inputs[n])) for n in names}
    for given in (parameters, copy.deepcopy(parameters)):
        outputs = case({n: given.get(n, t) for n, t in base.inputs.items()}, base.impl)
        base.assert_equal([y.detach() for y in outputs], base.results.outputs)
        if case.writes:
            break
    base.assert_equal(backward(outputs, list(given.values())), base.results.gradients)


def tensors_are_views(base: Base) -> None:
    case = base.case
    names = case.gradients(base.inputs)
    leaves = case.leaves(base.inputs)
    outputs = case({n: t[None][0] if t.ndim else t for n, t in leaves.items()}, base.impl)
    base.assert_equal([y.detach() for y in outputs], base.results.outputs)
    if names:
        got = backward(outputs, [leaves[n] for n in names])
        base.assert_equal(got, base.results.gradients)


def negative(x: Tensor) -> Tensor:
    """x as the negatives of what its memory holds, as the imaginary part of a conjugate is."""
    return torch._neg_view(-x) if x.dtype in (f32, bf16, torch.float16) else x


def nowhere(x: Tensor) -> Tensor:
    """Zeros like x without memory, as a gradient may be that torch knows to be zero."""
    return torch._efficientzerotensor(x.shape, dtype=x.dtype, device=x.device)


def memory_holds_other_values(base: Base) -> None:
    """Of all tensors and of the gradients that arrive, together and each kind alone; torch itself
    refuses an op that writes to several such tensors."""
    case, impl = base.case, base.impl
    names = case.gradients(base.inputs)
    written = [] if case.differentiable else case.writes.split()
    for given, arriving in itertools.product((negative, torch.clone), (negative, torch.clone, nowhere)):
        leaves = case.leaves(base.inputs)
        outputs = case({n: t if n in written else given(t) for n, t in leaves.items()}, impl)
        base.assert_equal([y.detach() for y in outputs], base.results.outputs)
        if names:
            roots = [y for y in outputs if y.requires_grad]
            grads = [arriving(upstream(y)) for y in roots]
            got = torch.autograd.grad(roots, [leaves[n] for n in names], grads, allow_unused=True)
            wanted = base.results.gradients
            if arriving is nowhere:
                wanted = [torch.zeros_like(w) for w in wanted]
                got = [None if g is None else g.abs() for g in got]  # of which some are -0
            got = [torch.zeros_like(w) if g is None else g for g, w in zip(got, wanted, strict=True)]
            base.assert_equal(got, wanted)


class Marked(Tensor):
    """A subclass of Tensor that does nothing."""


def tensors_are_of_a_subclass(base: Base) -> None:
    case = base.case
    leaves = case.leaves(base.inputs)
    outputs = case({n: t.as_subclass(Marked) for n, t in leaves.items()}, base.impl)
    plain = [y.detach().as_subclass(Tensor) for y in outputs]
    base.assert_equal(plain, base.results.outputs)


FACTS = [
    default_backend_changes,
    autocast_changes,
    determinism_changes,
    alignment_changes,
    need_of_gradients_changes,
    learned_tables_change,
    grad_mode_changes,
    strides_change,
    dtype_changes,
    a_mode_watches,
    what_is_saved_is_packed,
    tensors_are_parameters,
    tensors_are_views,
    memory_holds_other_values,
    tensors_are_of_a_subclass,
]


@pytest.mark.parametrize(("case", "impl"), parameters(OPERATORS))
@pytest.mark.parametrize("fact", FACTS, ids=lambda fact: fact.__name__)
def test_a_call_follows(fact: Callable[[Base], None], case: Case, impl: str, device: str) -> None:
    """Each fact as it is at the time of the call, and calls after it are as those before."""
    base = base_of(case, impl, device)
    fact(base)
    base.assert_restored()


@pytest.fixture
def precision() -> Iterator[Callable[[str], None]]:
    before = torch.backends.cuda.matmul.fp32_precision

    def set_precision(name: str) -> None:
        torch.backends.cuda.matmul.fp32_precision = name

    yield set_precision
    torch.backends.cuda.matmul.fp32_precision = before


PRODUCTS = [case for case in CASES if "attention" in case.op and case.function != "merge_attention"]


@pytest.mark.slow
@pytest.mark.parametrize("case", PRODUCTS, ids=lambda case: case.name)
def test_float32_products_follow_the_switch_of_torch(
    case: Case, device: str, precision: Callable[[str], None]
) -> None:
    """On a GPU it is seen in the numbers, under the interpreter in what a kernel is asked to do."""
    inputs = {n: t * 3 if t.is_floating_point() else t for n, t in case.inputs(device).items()}
    doubles = {n: t.double() if t.is_floating_point() else t for n, t in inputs.items()}
    exact = run(case, doubles, "reference")
    found: dict[str, list[list[Tensor]]] = {"tf32": [], "ieee": []}
    for name in ("tf32", "tf32", "tf32", "ieee", "ieee", "tf32", "ieee"):
        precision(name)
        with launches() as seen:
            got = run(case, inputs, "triton")
        found[name].append([*got.outputs, *got.gradients])
        if device == "cpu":
            asked = [launch.arguments["TF32"] for launch in seen if "TF32" in launch.arguments]
            assert asked and set(asked) == {name == "tf32"}
    for same in found.values():
        for again in same[1:]:
            assert_same(again, same[0])
    if device != "cpu":
        wanted = [*exact.outputs, *exact.gradients]
        rounded, full = (
            max(
                ((a.double() - b).abs().max() / b.abs().max()).item()
                for a, b in zip(x[0], wanted, strict=True)
            )
            for x in (found["tf32"], found["ieee"])
        )
        assert rounded > 4 * full


@pytest.mark.gpu
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
@pytest.mark.parametrize(("case", "impl"), parameters(OPERATORS))
def test_a_call_follows_the_device(case: Case, impl: str, device: str) -> None:
    base = base_of(case, impl, device)
    for _ in range(3):
        elsewhere = run(case, {n: t.to("cuda:1") for n, t in base.inputs.items()}, impl)
        assert all(y.device.index == 1 for y in (*elsewhere.outputs, *elsewhere.gradients))
        assert_near([y.to(device) for y in elsewhere.outputs], base.results.outputs)
        base.assert_restored()


# --- activation checkpointing ---------------------------------------------------------------------

Policy = Callable[[torch._ops.OpOverload], bool]  # whether the results of an op are kept


def contexts(keeps: Policy) -> Callable[[], Any]:
    def policy(ctx: Any, op: torch._ops.OpOverload, *args: Any, **kwargs: Any) -> CheckpointPolicy:
        return CheckpointPolicy.MUST_SAVE if keeps(op) else CheckpointPolicy.PREFER_RECOMPUTE

    return functools.partial(create_selective_checkpoint_contexts, policy)


def is_product(op: torch._ops.OpOverload) -> bool:
    return op is torch.ops.aten.mm.default


def among_products(case: Case, impl: str, *tensors: Tensor) -> list[Tensor]:
    """The call of a case between matrix products, as in a model."""
    given = dict(zip(case.names, tensors, strict=True))
    first = case.gradients(given)[0]
    x = given[first]
    mixing = torch.eye(x.shape[-1], dtype=x.dtype, device=x.device) * 0.75
    given[first] = (x.reshape(-1, x.shape[-1]) @ mixing).view(x.shape)
    outputs = case(given, impl)
    return [
        (y.reshape(-1, 1) @ y.new_full((1, 1), 1.5)).view(y.shape) if y.requires_grad else y
        for y in outputs
    ]


def step_of_two(case: Case, inputs: Inputs, impl: str, wrap: Callable[..., list[Tensor]]) -> Results:
    """A step of two segments: the first of them is computed again when both have been called."""
    leaves = case.leaves(inputs)
    segment = functools.partial(among_products, case, impl)
    outputs = [y for _ in range(2) for y in wrap(segment, *leaves.values())]
    gradients = backward(outputs, [leaves[n] for n in case.gradients(inputs)])
    return Results([y.detach() for y in outputs], gradients)


def plainly(f: Callable[..., list[Tensor]], *tensors: Tensor) -> list[Tensor]:
    return f(*tensors)


plain_checkpoint = functools.partial(checkpoint, use_reentrant=False)


def selective_checkpoint(keeps: Policy) -> Callable[..., list[Tensor]]:
    return functools.partial(checkpoint, use_reentrant=False, context_fn=contexts(keeps))


@pytest.mark.slow
@pytest.mark.parametrize(("case", "impl"), parameters(DIFFERENTIABLE))
def test_checkpointing_from_the_first_step(case: Case, impl: str, device: str) -> None:
    inputs = inputs_of(case, impl, device)
    with deterministic():
        steps = [
            step_of_two(case, inputs, impl, plain_checkpoint) for _ in range(1 + (case in OPERATORS))
        ]
        wanted = step_of_two(case, inputs, impl, plainly)
    for got in steps:
        assert_same_results(got, wanted)


@pytest.mark.parametrize("kept", ["the op", "products"])
@pytest.mark.parametrize(("case", "impl"), parameters([c for c in OPERATORS if c.differentiable]))
def test_selective_checkpointing_from_the_first_step(
    case: Case, impl: str, kept: str, device: str
) -> None:
    inputs = inputs_of(case, impl, device)
    own = getattr(torch.ops.flashproto, case.op).default
    keeps: Policy = is_product if kept == "products" else lambda op: op is own
    met: set[torch._ops.OpOverload] = set()

    def noting(op: torch._ops.OpOverload) -> bool:
        met.add(op)
        return keeps(op)

    with deterministic():
        with launches() as seen:
            got = step_of_two(case, inputs, impl, selective_checkpoint(noting))
        with launches() as alone:
            wanted = step_of_two(case, inputs, impl, plainly)
    assert_same_results(got, wanted)
    assert own in met
    assert kept == "the op" or len(seen) > len(alone)


def checkpointed(model: GPT, wrap: Callable[..., Any]) -> GPT:
    for block in model.blocks:
        block.forward = functools.partial(wrap, block.forward)
    return model


def gradients_of_steps(model: GPT, tokens: Tensor, steps: int) -> list[Tensor]:
    """Losses and gradients of some steps of descent."""
    found: list[Tensor] = []
    for _ in range(steps):
        loss = model(tokens[:, :-1], tokens[:, 1:])[1]
        model.zero_grad()
        loss.backward()
        found += [loss.detach(), *(p.grad.clone() for p in model.parameters())]
        with torch.no_grad():
            for p in model.parameters():
                p -= 0.1 * p.grad
    return found


WRAPS: dict[str, Callable[..., Any]] = {
    "plain": plain_checkpoint,
    "attention is kept": selective_checkpoint(
        lambda op: (
            op
            in (
                torch.ops.flashproto.attention_forward.default,
                torch.ops.flashproto.attention_qkv_forward.default,
            )
        )
    ),
    "products are kept": selective_checkpoint(is_product),
}
# Norms of more than 768 columns keep statistics.
MODELS: dict[str, dict[str, Any]] = {
    "wide, learned positions": {"n_heads": 1, "d_ff": 24},
    "narrow, rotary": {
        "n_heads": 2,
        "n_kv_heads": 1,
        "norm": "rms",
        "mlp": "swiglu",
        "positions": "rope",
        "bias": False,
        "tie_weights": False,
    },
}
# Each test has a width that no other has.
WIDTHS = {kind: iter(range(first, 900, 4)) for kind, first in zip(MODELS, (784, 36), strict=True)}


@pytest.mark.parametrize("wrap", WRAPS)
@pytest.mark.parametrize("kind", MODELS)
def test_a_gpt_is_checkpointed_from_the_first_step(kind: str, wrap: str, device: str) -> None:
    config = GPTConfig(40, 16, 2, d_model=next(WIDTHS[kind]), **MODELS[kind])
    model = GPT(config, device=device)
    tokens = torch.randint(config.vocab_size, (1, 5), device=device)
    steps = 2 if wrap == "plain" else 1
    with deterministic():
        got = gradients_of_steps(checkpointed(copy.deepcopy(model), WRAPS[wrap]), tokens, steps)
        wanted = gradients_of_steps(model, tokens, steps)
    assert_same(got, wanted)


# --- tensors without memory, and traces -----------------------------------------------------------


def functional(case: Case, impl: str | None, names: list[str]) -> Callable[..., list[Tensor]]:
    """Results and gradients of tensors by position."""

    def f(*tensors: Tensor) -> list[Tensor]:
        named = zip(case.names, tensors, strict=True)
        given = {n: t.detach().requires_grad_(n in names) for n, t in named}
        outputs = case(given, impl)
        gradients = backward(outputs, [given[n] for n in names]) if names else []
        return [*(y.detach() for y in outputs), *gradients]

    return f


@pytest.mark.parametrize("automatic", [False, True], ids=["by name", "automatic"])
@pytest.mark.parametrize(("case", "impl"), parameters(CASES))
def test_fake_tensors_launch_nothing(case: Case, impl: str, automatic: bool, device: str) -> None:
    base = base_of(case, impl, device)
    f = functional(case, None if automatic else impl, case.gradients(base.inputs))
    with FakeTensorMode() as mode:
        fakes = [mode.from_tensor(t) for t in base.inputs.values()]
        with no_launch():
            made = f(*fakes)
    wanted = [*base.results.outputs, *base.results.gradients]
    assert [layout(t) for t in made] == [layout(t) for t in wanted]


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_meta_tensors(case: Case, device: str) -> None:
    base = base_of(case, "triton", device)
    f = functional(case, None, case.gradients(base.inputs))
    metas = [t.to("meta") for t in base.inputs.values()]
    with no_launch():
        made = f(*metas)
        with pytest.raises(BackendError, match="meta"):
            case(dict(zip(case.names, metas, strict=True)), "triton")
    wanted = [*base.results.outputs, *base.results.gradients]
    assert [(t.dtype, t.shape) for t in made] == [(t.dtype, t.shape) for t in wanted]
    assert all(t.device.type == "meta" for t in made)


@pytest.mark.parametrize("mode", ["real", "fake", "symbolic"])
@pytest.mark.parametrize(("case", "impl"), parameters(OPERATORS))
def test_make_fx_records_the_op(case: Case, impl: str, mode: str, device: str) -> None:
    base = base_of(case, impl, device)
    f = functional(case, impl, case.gradients(base.inputs))
    inputs = [copy_of(t) for t in base.inputs.values()]
    with launches(refused=lambda: mode != "real"):
        graph = make_fx(f, tracing_mode=mode)(*inputs)
    targets = [node.target for node in graph.graph.nodes]
    recorded = own_ops([t.name() for t in targets if isinstance(t, torch._ops.OpOverload)])
    assert recorded[0] == case.op
    assert len(recorded) - 1 in (case.backward if case.differentiable else (0,))
    got = graph(*(copy_of(t) for t in base.inputs.values()))
    base.assert_equal(got, [*base.results.outputs, *base.results.gradients])


@pytest.mark.parametrize(("case", "impl"), parameters(first_of_each(lambda case: case.op)))
def test_a_trace_before_dispatch_records_the_op(case: Case, impl: str, device: str) -> None:
    base = base_of(case, impl, device)
    if not case.writes:
        for _ in range(4):  # the guards of later calls see it too
            case(base.inputs, impl)
    graph = make_fx(functional(case, impl, []), pre_dispatch=True)(*map(copy_of, base.inputs.values()))
    targets = [node.target for node in graph.graph.nodes]
    assert own_ops([t.name() for t in targets if isinstance(t, torch._ops.OpOverload)]) == [case.op]
    base.assert_equal(graph(*map(copy_of, base.inputs.values())), base.results.outputs)


@pytest.mark.parametrize("case", MAIN, ids=lambda case: case.name)
def test_torchscript_records_the_op(case: Case, device: str) -> None:
    base = base_of(case, "triton", device)
    f = functional(case, "triton", [])
    traced = torch.jit.trace(f, tuple(map(copy_of, base.inputs.values())), check_trace=False)
    assert f"flashproto::{case.op}(" in str(traced.graph)
    base.assert_equal(list(traced(*map(copy_of, base.inputs.values()))), base.results.outputs)


@pytest.mark.parametrize(("case", "impl"), parameters(BY_OP_DIFFERENTIABLE))
def test_compiled_autograd_records_the_op(case: Case, impl: str, device: str) -> None:
    torch._dynamo.reset()
    base, compiler = base_of(case, impl, device), EagerAndRecordGraphs()
    leaves = case.leaves(base.inputs)
    outputs = case(leaves, impl)
    with compiled_autograd._enable(torch.compile(backend=compiler, fullgraph=True)):
        got = backward(outputs, [leaves[n] for n in case.gradients(base.inputs)])
    base.assert_equal(got, base.results.gradients)
    nodes = [str(node.target) for graph in compiler.graphs for node in graph.graph.nodes]
    assert len([n for n in nodes if "flashproto" in n]) == 1


@pytest.mark.parametrize(("case", "impl"), parameters(MAIN_DIFFERENTIABLE))
def test_gradients_of_a_batch(case: Case, impl: str, device: str) -> None:
    """By the vmap that torch.autograd has of its own, one in another too: each as it is alone."""
    base = base_of(case, impl, device)
    leaves = case.leaves(base.inputs)
    roots = [y for y in case(leaves, impl) if y.requires_grad]
    wanted = [leaves[n] for n in case.gradients(base.inputs)]

    def gradients(*upstream: Tensor, batched: bool) -> Sequence[Tensor]:
        return torch.autograd.grad(roots, wanted, upstream, retain_graph=True, is_grads_batched=batched)

    batch = [torch.stack([upstream(y) * (i - 1.5) for i in range(4)]) for y in roots]
    each = [gradients(*g, batched=False) for g in zip(*batch, strict=True)]
    alone = [torch.stack(x) for x in zip(*each, strict=True)]
    base.assert_equal(gradients(*batch, batched=True), alone)
    twice = torch._vmap_internals._vmap(functools.partial(gradients, batched=True))
    base.assert_equal([x.flatten(0, 1) for x in twice(*(g.unflatten(0, (2, 2)) for g in batch))], alone)


@pytest.mark.slow
@pytest.mark.parametrize(("case", "impl"), parameters(CASES))
def test_the_ops_themselves(case: Case, impl: str, device: str) -> None:
    """Their schemas, and what they make of tensors without memory, by the arguments of calls; of a
    backward pass also where only one gradient is needed."""
    watched = watch(case, base_of(case, impl, device).inputs, impl)
    assert watched.own
    # What is compared with the results of a compiled call has to be written, and written once.
    more = [] if case.writes or "dropout" in case.name else ["test_aot_dispatch_dynamic"]
    for op, arguments, outputs in watched.own:
        metas = [a.to("meta") if isinstance(a, Tensor) else a for a in arguments]
        made = op(*metas)
        made = [] if made is None else [made] if isinstance(made, Tensor) else made
        assert [layout(t)[:3] for t in made] == [layout(t)[:3] for t in outputs]
        *others, needs = arguments
        fewer = [[needs]]
        if isinstance(needs, list) and sum(needs) > 1 and all(isinstance(n, bool) for n in needs):
            wanted = [i for i, need in enumerate(needs) if need]
            fewer += [[[i == j for i in range(len(needs))]] for j in (wanted[0], wanted[-1])]
        for last in fewer:
            checks = ("test_schema", "test_faketensor", *more)
            torch.library.opcheck(op, (*others, *last), test_utils=checks)


@pytest.mark.slow
@pytest.mark.parametrize(("case", "impl"), parameters(CASES, hopper=False))
def test_sizes_and_numbers_may_be_symbols(case: Case, impl: str, device: str) -> None:
    """Under dynamic=True, a call is traced twice at most: torch makes constants of numbers and begins
    again, once for all of them."""
    torch.compiler.reset()
    count = CompileCounterWithBackend("aot_eager")
    symbols = torch.compile(
        lambda *tensors: case.call(impl, *tensors), dynamic=True, fullgraph=True, backend=count
    )
    inputs = inputs_of(case, impl, device)
    got, want = (
        call(*case.leaves(inputs).values()) for call in (symbols, functools.partial(case.call, impl))
    )
    got, want = ([y] if isinstance(y, Tensor) else [*y] for y in (got, want))
    assert_near(got, want)
    assert count.frame_count <= 2


# --- torch.func -----------------------------------------------------------------------------------


def of_gradients(
    case: Case, impl: str | None, inputs: Inputs
) -> tuple[Callable[..., Any], list[Tensor], list[Tensor]]:
    """(f, its arguments, gradients of its results): of the tensors that have a gradient to the results
    that have one, as functions of torch.func want it."""
    names = case.gradients(inputs)
    outputs = case(case.leaves(inputs), impl)
    roots = [i for i, y in enumerate(outputs) if y.requires_grad]

    def f(*tensors: Tensor) -> tuple[Tensor, ...]:
        others = {n: copy_of(t) for n, t in inputs.items() if n not in names}
        made = case(others | dict(zip(names, tensors, strict=True)), impl)
        return tuple(made[i] for i in roots)

    return f, [copy_of(inputs[n]) for n in names], [upstream(outputs[i]) for i in roots]


@pytest.mark.parametrize(("case", "impl"), parameters(MAIN_DIFFERENTIABLE))
def test_second_derivatives_raise(case: Case, impl: str, device: str) -> None:
    """But of rope, which is linear."""
    leaves = case.leaves(base_of(case, impl, device).inputs)
    wanted = [leaves[n] for n in case.gradients(leaves)]
    outputs = [y for y in case(leaves, impl) if y.requires_grad]
    squares = [y.square().sum() for y in outputs]
    gradients = torch.autograd.grad(squares, wanted, create_graph=True)
    total = torch.stack([g.square().sum() for g in gradients]).sum()
    if case.op == "rope":
        assert all(g is not None for g in torch.autograd.grad(total, wanted))
        return
    with pytest.raises(NotImplementedError, match="second derivative"):
        torch.autograd.grad(total, wanted)


@pytest.mark.parametrize(("case", "impl"), parameters(MAIN_DIFFERENTIABLE))
def test_grad_and_vjp(case: Case, impl: str, device: str) -> None:
    base = base_of(case, impl, device)
    f, tensors, gradients = of_gradients(case, impl, base.inputs)
    _, pullback = torch.func.vjp(f, *tensors)
    base.assert_equal(list(pullback(tuple(gradients))), base.results.gradients)

    def loss(*tensors: Tensor) -> Tensor:
        return sum((y * g).sum() for y, g in zip(f(*tensors), gradients, strict=True))

    f, tensors, gradients = of_gradients(case, impl, base.inputs)
    got = torch.func.grad(loss, argnums=tuple(range(len(tensors))))(*tensors)
    assert_near(list(got), base.results.gradients, unit_of(*base.inputs.values()))


@pytest.mark.slow
@pytest.mark.parametrize("case", [c for c in MAIN_DIFFERENTIABLE if not c.writes], ids=lambda c: c.name)
def test_jacrev(case: Case, device: str) -> None:
    """By whichever backend can; one that is asked for by name gives the same or says that it cannot."""
    base = base_of(case, "triton", device)

    def some(impl: str | None) -> tuple[Callable[[Tensor], Tensor], Tensor]:
        f, (x, *others), _ = of_gradients(case, impl, base.inputs)
        return (lambda x: f(x, *others)[0].flatten()[:3]), x

    f, x = some("reference")
    x.requires_grad_()
    wanted = torch.stack([torch.autograd.grad(y, x, retain_graph=True)[0] for y in f(x)])
    unit = unit_of(*base.inputs.values())
    f, x = some(None)
    assert_near([torch.func.jacrev(f)(x)], [wanted], unit)
    f, x = some("triton")
    try:
        got = torch.func.jacrev(f)(x)
    except BackendError:
        return
    assert_near([got], [wanted], unit)


def samples(case: Case, inputs: Inputs) -> tuple[list[Tensor], tuple[int | None, ...]]:
    """Two of every floating-point tensor but the constants, and which those are."""
    constants = case.constants.split()
    single = [n in constants or not t.is_floating_point() for n, t in inputs.items()]
    doubled = [
        copy_of(t) if one else torch.stack([t, t.flip(0) if t.ndim else t])
        for t, one in zip(inputs.values(), single, strict=True)
    ]
    return doubled, tuple(None if one else 0 for one in single)


def sample(tensors: list[Tensor], dims: tuple[int | None, ...], i: int) -> list[Tensor]:
    return [t if d is None else t[i].contiguous() for t, d in zip(tensors, dims, strict=True)]


@pytest.mark.parametrize("case", [c for c in MAIN if not c.writes], ids=lambda case: case.name)
def test_vmap(case: Case, device: str) -> None:
    """The kernels do not run under it: others do, or the error says so."""
    inputs = case.inputs(device)
    tensors, dims = samples(case, inputs)

    def f(impl: str | None, *tensors: Tensor) -> list[Tensor]:
        return case(dict(zip(case.names, tensors, strict=True)), impl)

    with no_launch():
        got = torch.func.vmap(functools.partial(f, None), dims)(*tensors)
        with pytest.raises(BackendError, match="vmap"):
            torch.func.vmap(functools.partial(f, "triton"), dims)(*tensors)
    for i in range(2):
        wanted = f("reference", *sample(tensors, dims, i))
        assert_near([y[i] for y in got], wanted, unit_of(*wanted, *tensors))


@pytest.mark.parametrize("case", MAIN, ids=lambda case: case.name)
def test_functionalize(case: Case, device: str) -> None:
    base = base_of(case, "triton", device)

    def f(*tensors: Tensor, impl: str | None = None) -> list[Tensor]:
        return case(dict(zip(case.names, tensors, strict=True)), impl)

    with no_launch():
        got = torch.func.functionalize(f)(*map(copy_of, base.inputs.values()))
        with pytest.raises(BackendError, match=r"functionalize\.$"):
            torch.func.functionalize(functools.partial(f, impl="triton"))(*base.inputs.values())
    assert_near(got, base.results.outputs, unit_of(*base.inputs.values()))


@pytest.mark.parametrize("case", MAIN_DIFFERENTIABLE, ids=lambda case: case.name)
def test_forward_mode(case: Case, device: str) -> None:
    """By whichever backend can, in torch.func.jvp, by dual numbers, and over a gradient."""
    base = base_of(case, "triton", device)
    f, tensors, _ = of_gradients(case, None, base.inputs)
    tangents = [torch.linspace(-1, 1, t.numel(), device=device).view_as(t).to(t) for t in tensors]
    of_reference, *_ = of_gradients(case, "reference", base.inputs)
    by_name, *_ = of_gradients(case, "triton", base.inputs)
    _, wanted = torch.func.jvp(of_reference, tuple(tensors), tuple(tangents))
    unit = unit_of(*base.inputs.values())
    with no_launch():
        assert_near(torch.func.jvp(f, tuple(tensors), tuple(tangents))[1], wanted, unit)
        with forward_ad.dual_level():
            made = f(*map(forward_ad.make_dual, map(copy_of, tensors), tangents))
            assert_near([forward_ad.unpack_dual(y).tangent for y in made], wanted, unit)
        with pytest.raises(BackendError, match=r"\(jvp\).*impl='reference'"):
            torch.func.jvp(by_name, tuple(tensors), tuple(tangents))

    def slope(f: Callable[..., Any], x: Tensor) -> Tensor:
        loss = lambda x: sum(y.square().sum() for y in f(x, *tensors[1:]))  # noqa: E731
        return torch.func.jvp(torch.func.grad(loss), (x,), (tangents[0],))[1]

    with no_launch():
        assert_near([slope(f, tensors[0])], [slope(of_reference, tensors[0])], 10 * unit)


@pytest.mark.parametrize("case", [c for c in MAIN_DIFFERENTIABLE if not c.writes], ids=lambda c: c.name)
def test_gradients_of_every_sample(case: Case, device: str) -> None:
    inputs = case.inputs(device)
    tensors, dims = samples(case, inputs)
    first = case.names.index(case.gradients(inputs)[0])

    def loss(*tensors: Tensor) -> Tensor:
        made = case(dict(zip(case.names, tensors, strict=True)), None)
        return (made[0] * upstream(made[0])).sum()

    with no_launch():
        got = torch.func.vmap(torch.func.grad(loss, argnums=first), dims)(*tensors)
    with default_backend("reference"):
        for i in range(2):
            leaves = sample(tensors, dims, i)
            leaves[first] = leaves[first].detach().requires_grad_()
            (wanted,) = torch.autograd.grad(loss(*leaves), leaves[first])
            assert_near([got[i]], [wanted], unit_of(*tensors))


# --- DTensor --------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def mesh(device: str) -> Iterator[Any]:
    """Of this process alone."""
    dist = pytest.importorskip("torch.distributed")
    from torch.distributed.tensor import init_device_mesh

    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield init_device_mesh(device, (1,))
    dist.destroy_process_group()


def of_a_mask(case: Case) -> bool:
    """Whether a mask of tensors is made before the call: it takes no DTensors."""
    return "documents" in case.name or "tree" in case.name


# Torch has a rule for each operator that these are made of, on backend "torch" or "reference", and no
# tensor is made on the way, which would be no DTensor.
SHARDED = [
    case
    for case in DIFFERENTIABLE
    if (
        case.op.startswith(
            ("norm", "glu", "logsumexp", "linear", "cross", "memory", "rope", "qk_norm", "attention")
        )
        and not of_a_mask(case)
    )
    or case.op == "softmax"
]


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_kernels_refuse_dtensors(case: Case, device: str, mesh: Any) -> None:
    """Their address is not that of a tensor."""
    from torch.distributed.tensor import Replicate, distribute_tensor

    inputs = {n: distribute_tensor(t, mesh, [Replicate()]) for n, t in case.inputs(device).items()}
    # A call with a cache takes them on no backend.
    refused = of_a_mask(case) or case.op == "attention_kv_cache"
    error = TypeError if refused else BackendError
    with no_launch(), pytest.raises(error, match=r"to_local\(\)"):
        case(inputs, "triton")


@pytest.mark.parametrize("case", SHARDED, ids=lambda case: case.name)
def test_dtensors_take_another_backend(case: Case, device: str, mesh: Any) -> None:
    from torch.distributed.tensor import DTensor, Replicate, distribute_tensor

    def distributed(t: Tensor) -> DTensor:
        return distribute_tensor(t, mesh, [Replicate()])

    base = base_of(case, "triton", device)
    names = case.gradients(base.inputs)
    leaves = {n: distributed(t).requires_grad_(n in names) for n, t in base.inputs.items()}
    with no_launch():
        outputs = case(leaves, None)
        roots = [y for y in outputs if y.requires_grad]
        gradients = [distributed(upstream(y.full_tensor())) for y in roots]
        got = torch.autograd.grad(roots, [leaves[n] for n in names], gradients)
    assert all(isinstance(y, DTensor) for y in (*outputs, *got))
    unit = unit_of(*base.inputs.values())
    assert_near([y.full_tensor().detach() for y in outputs], base.results.outputs, unit)
    assert_near([g.full_tensor() for g in got], base.results.gradients, unit)


@pytest.mark.parametrize("dim", [0, 1], ids=["batch", "heads"])
@pytest.mark.parametrize(
    "options", [{}, {"causal": True}, {"window": (2, 1)}, {"causal": True, "softcap": 2.0}], ids=str
)
def test_attention_of_shards(options: dict[str, Any], dim: int, device: str, mesh: Any) -> None:
    from torch.distributed.tensor import Shard, distribute_tensor

    shapes = (2, 4, 5, 8), (2, 2, 7, 8), (2, 2, 7, 8)
    inputs = [torch.randn(s, device=device).requires_grad_() for s in shapes]
    shards = [distribute_tensor(x.detach(), mesh, [Shard(dim)]).requires_grad_() for x in inputs]
    try:
        torch.matmul(shards[0].detach(), shards[0].detach().mT)
    except RuntimeError:
        pytest.skip("this torch multiplies no tensors whose heads are shared out")
    out = flashproto.attention(*shards, **options)
    assert out.placements == (Shard(dim),)
    wanted = flashproto.attention(*inputs, **options, impl="reference")
    for got, want in zip(
        (out, *torch.autograd.grad(out.sum(), shards)),
        (wanted, *torch.autograd.grad(wanted.sum(), inputs)),
        strict=True,
    ):
        torch.testing.assert_close(got.full_tensor(), want)


def test_attention_refuses_dtensors_beside_plain_ones(device: str, mesh: Any) -> None:
    from torch.distributed.tensor import Replicate, distribute_tensor

    q, sinks = torch.randn(2, 2, 4, 16, device=device), torch.randn(2, device=device)
    mask = flashproto.masks.padding(torch.tensor([2, 3], device=device))
    t, cu = q[0].transpose(0, 1), torch.tensor([0, 4], dtype=torch.int32, device=device)
    Q, T, of_dtensors = (
        *(distribute_tensor(x, mesh, [Replicate()]) for x in (q, t)),
        "distribute_tensor",
    )
    for call, argument, do in (
        (lambda: flashproto.attention(Q, Q, q), "v", of_dtensors),
        (lambda: flashproto.attention(q, Q, q), "k", r"Pass k\.to_local\(\)\."),
        (lambda: flashproto.attention(Q, Q, Q, sinks=sinks), "sinks", of_dtensors),
        (lambda: flashproto.attention(Q, Q, Q, mask=mask), "mask", r"to_local\(\)"),
        (lambda: flashproto.attention_varlen(T, T, T, cu, cu), "cu_seqlens_q", of_dtensors),
        (
            lambda: flashproto.scaled_dot_product_attention(Q, Q, Q, q[0, 0] > 0),
            "attn_mask",
            of_dtensors,
        ),
    ):
        with (
            no_launch(),
            pytest.raises(TypeError, match=rf": {argument} is .*DTensor.*; it takes .*{do}"),
        ):
            call()
    seed = torch.zeros(1, dtype=torch.int64, device=device)
    for given in ({}, {"dropout_seed": seed}):
        with no_launch(), pytest.raises(ValueError, match=r"dropout_p is 0\.5; it takes 0.0 beside DT"):
            flashproto.attention(Q, Q, Q, dropout_p=0.5, **given)


# --- what is left behind ----------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize(("case", "impl"), parameters(OPERATORS))
def test_no_tensor_waits_for_the_garbage_collector(case: Case, impl: str, device: str) -> None:
    """From the first call on, its op's included.  What a cycle of references keeps is memory in use for
    torch, whose CUDA graphs then refuse to be recorded."""
    inputs = inputs_of(case, impl, device)
    gc.freeze()  # what is there already, which takes long to look through
    gc.set_debug(gc.DEBUG_SAVEALL)
    try:
        run(case, inputs, impl)
        watch(case, inputs, impl)
        gc.collect()
        left = [tuple(x.shape) for x in gc.garbage if isinstance(x, Tensor)]
    finally:
        gc.set_debug(0)
        gc.garbage.clear()
        gc.unfreeze()
    assert not left


@pytest.mark.gpu
@pytest.mark.parametrize(("case", "impl"), parameters(BY_OP_DIFFERENTIABLE))
def test_trains_in_cuda_graphs_of_compile(case: Case, impl: str, device: str) -> None:
    """From the first call on, without cudagraph_mark_step_begin."""
    torch.compiler.reset()
    inputs = inputs_of(case, impl, device)
    leaves = case.leaves(inputs)
    wanted = [leaves[n] for n in case.gradients(inputs)]
    compiled = torch.compile(lambda *tensors: case.call(impl, *tensors), mode="reduce-overhead")
    gc.collect()
    gc.disable()  # what it frees by chance is a call's to free
    try:
        for _ in range(4):
            made = compiled(*leaves.values())
            outputs = [made] if isinstance(made, Tensor) else list(made)
            gradients = [g.clone() for g in backward(outputs, wanted)]
            outputs = [y.detach().clone() for y in outputs]
    finally:
        gc.enable()
    expected = run(case, inputs, impl)
    assert_near(outputs, expected.outputs, 1e-2)
    assert_near(gradients, expected.gradients, 1e-2)
