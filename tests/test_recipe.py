"""Recipes (flashproto/ops/recipe.py): views of operands, the plain way to run one, and the function
that is written for it, which is tried here without a GPU, with a kernel's compiled form played by a
function that notes what it is handed."""

from __future__ import annotations

import contextlib
import functools
import math
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

pytest.importorskip("triton")

from flashproto.ops import call, call_cache, private, recipe
from flashproto.ops.recipe import Boxed, Exchange, New, Operand, Recipe, Table

CPU = torch.device("cpu")

# --- views ------------------------------------------------------------------------------------------


@st.composite
def tensors(draw: Any) -> Tensor:
    """Of any small shape, permuted, cut, expanded."""
    shape = draw(st.lists(st.integers(1, 4), min_size=1, max_size=4))
    x = torch.arange(math.prod(shape) * 2 ** len(shape)).view([2 * n for n in shape])
    for dim, n in enumerate(shape):
        step = draw(st.sampled_from((1, 2)))
        x = x.narrow(dim, draw(st.integers(0, n * (3 - step) - n)), n * step if step == 2 else n)
        x = x[(slice(None),) * dim + (slice(None, None, step),)]
        if draw(st.booleans()):
            x = x.narrow(dim, 0, 1).expand(*x.shape[:dim], n, *x.shape[dim + 1 :])
    return x.permute(draw(st.permutations(range(len(shape)))))


def operand_of(x: Tensor) -> Operand:
    made = Recipe(CPU).input(x)
    assert made is not None
    return made


def value(view: Operand, x: Tensor) -> Tensor:
    """What the recipe of a view of x returns."""
    view.recipe.returns = [view]
    return view.recipe.finish().execute(x)


def shapes_of(numel: int) -> list[tuple[int, ...]]:
    pairs = [(a, numel // a) for a in range(1, numel + 1) if numel % a == 0]
    return [(numel,), *pairs, *((a, b, 1) for a, b in pairs), *((1, a, b) for a, b in pairs)]


@given(tensors(), st.data())
def test_reshape_is_torchs(x: Tensor, data: Any) -> None:
    shape = data.draw(st.sampled_from(shapes_of(x.numel())))
    strides = recipe.view_strides(x.shape, x.stride(), shape)
    try:
        view = x.view(shape)
    except RuntimeError:
        assert strides is None
    else:
        assert strides == view.stride()
    assert torch.equal(value(operand_of(x).reshape(*shape), x), x.reshape(shape))


@given(tensors())
def test_rows_have_columns_of_stride_1(x: Tensor) -> None:
    for ndim in range(1, x.ndim + 1):
        rows = operand_of(x).rows(ndim)
        N = math.prod(x.shape[x.ndim - ndim :])
        assert rows.shape == (x.numel() // N, N) and (N == 1 or rows.stride(1) == 1)
        assert torch.equal(value(rows, x), x.reshape(rows.shape))


@given(tensors(), st.data())
def test_other_views_are_torchs(x: Tensor, data: Any) -> None:
    a, b = (data.draw(st.integers(0, x.ndim - 1)) for _ in range(2))
    start = data.draw(st.integers(0, x.shape[a] - 1))
    length = data.draw(st.integers(1, x.shape[a] - start))
    for got, wanted in (
        (operand_of(x).transpose(a, b), x.transpose(a, b)),
        (operand_of(x).narrow(a, start, length), x.narrow(a, start, length)),
        (operand_of(x).expand(2, *x.shape), x.expand(2, *x.shape)),
    ):
        assert (got.shape, got.strides) == (wanted.shape, wanted.stride())
        assert got.is_contiguous() == wanted.is_contiguous()
        assert torch.equal(value(got, x), wanted)


@pytest.mark.parametrize("shape", [(), (3,), (2, 0, 4), (1, 5, 1)])
def test_contiguous_strides_are_torchs(shape: tuple[int, ...]) -> None:
    assert recipe.contiguous_strides(shape) == torch.empty(shape).stride()


# --- running one --------------------------------------------------------------------------------------


def parameter(name: str) -> SimpleNamespace:
    return SimpleNamespace(name=name, default=7)


class Kernel:
    """`out` gets the sum of the others; notes what Triton's own launch is given."""

    def __init__(self, *names: str) -> None:
        self.params = [parameter(name) for name in (*names, "LAST")]
        self.launches: list[dict[str, Any]] = []

    def __getitem__(self, grid: tuple[int]) -> Any:
        def launch(**named: Any) -> Kernel:
            self.launches.append({"grid": grid, **named})
            return self

        return launch


def test_executes_step_by_step() -> None:
    x, made = torch.randn(3, 4).t(), Recipe(CPU)
    operand = made.input(x)
    assert operand is not None
    copy, scratch = operand.contiguous(), made.make(New.contiguous((10,), torch.float32, CPU))
    made.make(New.contiguous((5,), torch.float32, CPU))  # which nothing uses
    halves = scratch.part(16, torch.float16, 4)
    doubled = made.compute(lambda t: 2 * t, copy, like=New.contiguous((4, 3), x.dtype, CPU))
    kernel = Kernel("a_ptr", "b_ptr", "n")
    made.launch(kernel, 5, copy, halves, 6, LAST=1, num_warps=4, maxnreg=None)
    made.returns = [doubled, None, scratch]
    got, nothing, memory = made.finish().execute(x)
    assert torch.equal(got, 2 * x) and nothing is None and memory.shape == (10,)
    assert len([s for s in made.steps if isinstance(s, recipe.Make)]) == 1
    (launch,) = kernel.launches
    assert launch["grid"] == (5,) and (launch["n"], launch["LAST"], launch["num_warps"]) == (6, 1, 4)
    assert "maxnreg" not in launch
    assert torch.equal(launch["a_ptr"], x) and launch["a_ptr"].is_contiguous()
    assert launch["b_ptr"].dtype == torch.float16
    assert launch["b_ptr"].data_ptr() == memory.data_ptr() + 16


# --- the function that is written for it -----------------------------------------------------------


class Card:
    """A GPU that is none: its memory is the CPU's, and compiled kernels note what they are handed."""

    stream, capturing, hooked = 99, False, False

    def __init__(self) -> None:
        self.calls: list[tuple[Any, ...]] = []

    def entry(self, compiled: Kernel) -> private.Entry:
        number = [*dict.fromkeys(map(id, [*self.kernels, compiled]))].index(id(compiled))
        if all(compiled is not k for k in self.kernels):
            self.kernels.append(compiled)

        def run(*arguments: Any) -> None:
            self.calls.append((number, *arguments))

        return private.Entry(run, ("middle", number), ("first", "second"))  # type: ignore[arg-type]

    kernels: list[Kernel]


@pytest.fixture(params=[False, True], ids=["flat", "packed"])
def card(request: Any, monkeypatch: pytest.MonkeyPatch) -> Iterator[Card]:
    card = Card()
    card.kernels = []
    monkeypatch.setattr(private, "PACKED", request.param)
    monkeypatch.setattr(private, "ENCODES", True)
    monkeypatch.setattr(private, "has_entry", lambda kernel: True)
    monkeypatch.setattr(private, "entry", card.entry)
    monkeypatch.setattr(private, "hooked", lambda: card.hooked)
    monkeypatch.setattr(private, "is_capturing", lambda: card.capturing)
    monkeypatch.setattr(private, "current_stream", lambda index: card.stream)
    monkeypatch.setattr(private, "several_devices", lambda: False)

    def empty_strided(shape: Any, strides: Any, dtype: torch.dtype) -> Tensor:
        return torch.empty_strided(shape, strides, dtype=dtype)

    monkeypatch.setattr(private, "empty_strided_cuda", empty_strided)
    monkeypatch.setattr(recipe, "on_device", lambda device: contextlib.nullcontext())
    monkeypatch.setattr(recipe, "_factory", functools.lru_cache(recipe._factory.__wrapped__))
    yield card


def handed(card: Card, call: tuple[Any, ...]) -> tuple[int, tuple[Any, ...]]:
    """(which kernel, its arguments) of a call of an entry."""
    number, programs, one, another, stream, middle, again, *arguments = call
    assert (one, another, stream, middle, again) == (1, 1, card.stream, "middle", number)
    arguments = arguments[0] if private.PACKED else arguments
    return number, (programs, *arguments)


def late(x: Tensor) -> Tensor:
    return torch.empty(x.numel() + 1, dtype=x.dtype)[1:].view(x.shape).copy_(x)


def test_hands_over_what_tritons_launch_is_given(card: Card) -> None:
    """Addresses, parts, numbers, None, tuples of tensors, tables, two launches."""
    x, y = torch.randn(2, 8), torch.randn(16)
    made, table = Recipe(torch.device("cuda", 0)), torch.ones(3, dtype=torch.int32)
    a, b = (made.input(t) for t in (x, y))
    assert a is not None and b is not None
    out = made.make(New.contiguous((2, 8), x.dtype, CPU))
    scratch = made.make(New.contiguous((64,), x.dtype, CPU))
    first = Kernel("a_ptr", "none_ptr", "part_ptr", "n", "hook", "table")
    second = Kernel("out_ptr", "half_ptr", "b_ptr")
    hook = ((b, 1, None), (0.5,))
    made.launch(
        first,
        3,
        a.narrow(1, 4, 4),
        None,
        scratch.part(32, torch.int32, 4),
        11,
        hook,
        Table(lambda: table),
    )
    made.launch(second, 4, out, scratch.narrow(0, 32, 4), b, LAST=2)
    made.returns = [out, scratch]
    run = recipe.runner(made.finish(), lambda *inputs: "elsewhere")
    run(x, y)  # the first call is Triton's own
    assert not card.calls and len(first.launches) == len(second.launches) == 1
    out_tensor, memory = run(x, y)
    assert len(first.launches) == 1 and out_tensor.shape == (2, 8)
    (n1, given1), (n2, given2) = (handed(card, each) for each in card.calls)
    assert (n1, n2) == (0, 1)
    at = memory.data_ptr()
    programs, a_at, none, part, n, told, table_at, last = given1
    assert (programs, a_at, none, part, n) == (3, x.data_ptr() + 16, None, at + 32, 11)
    (tensor, one, nothing), scalars = told
    assert (tensor if isinstance(tensor, int) else tensor.data_ptr()) == y.data_ptr()
    assert (one, nothing, scalars) == (1, None, (0.5,))
    assert (table_at, last) == (table.data_ptr(), 7), "a parameter's default"
    assert given2 == (4, out_tensor.data_ptr(), at + 128, y.data_ptr(), 2)
    assert run(late(x), y) == "elsewhere"
    card.hooked = True
    run(x, y)
    assert len(first.launches) == 2 and len(card.calls) == 2, "while somebody listens, Triton's own"


def test_words_are_cleared_but_not_at_first_nor_in_a_graph(card: Card, monkeypatch) -> None:
    buffers = recipe.exchange_buffers
    monkeypatch.setattr(buffers, "current_stream", lambda index: card.stream)
    monkeypatch.setattr(buffers, "outside_memory_pool", lambda make, device: make())
    monkeypatch.setattr(buffers, "zeros", lambda device, count: torch.zeros(count, dtype=torch.int64))
    zeros = torch.zeros
    monkeypatch.setattr(torch, "zeros", lambda *a, device=None, **k: zeros(*a, **k))
    buffers.forget()
    x, made, kernel = torch.randn(8), Recipe(torch.device("cuda", 0)), Kernel("x_ptr", "words", "used")
    a = made.input(x)
    made.launch(kernel, 1, a, Exchange(6), Exchange(6, used=True))
    run = recipe.runner(made.finish(), lambda *inputs: "elsewhere")
    run(x)
    assert kernel.launches[0]["used"] is None and kernel.launches[0]["words"].numel() == 6
    run(x)
    assert kernel.launches[1]["used"] is not None
    run(x)
    run(x)
    (_, _, x1, words1, used1, _), (_, _, x2, words2, used2, _) = (
        (None, *handed(card, each)[1]) for each in card.calls
    )
    assert x1 == x2 == x.data_ptr() and (words1, used1) == (used2, words2), "the two change places"
    card.capturing = True
    run(x)
    assert kernel.launches[2]["used"] is None, "a graph has words of its own"
    buffers.forget()


def test_descriptors_are_encoded_once_for_an_address(card: Card) -> None:
    class Box:
        encoded: Any = None

        def __init__(self, address: int) -> None:
            self.address = address

        def encode(self, wanted: str) -> None:
            assert self.encoded is None
            self.encoded = (wanted, self.address)

    class Boxes(dict[int, Box]):
        def __missing__(self, address: int) -> Box:
            made = self[address] = Box(address)
            return made

    x, made, kernel = torch.randn(2, 8), Recipe(torch.device("cuda", 0)), Kernel("d1", "d2", "x_ptr")
    a = made.input(x)
    assert a is not None
    made.launch(kernel, 1, Boxed(a, Boxes()), Boxed(a.narrow(1, 4, 4), Boxes()), a)
    run = recipe.runner(made.finish(), lambda *inputs: "elsewhere")
    for _ in range(3):
        run(x)
    for each in card.calls:
        at = x.data_ptr()
        assert handed(card, each)[1] == (1, "first", at, "second", at + 16, at, 7)


def test_recipes_are_told_apart_by_what_triton_specialises_on() -> None:
    """Alignment, sizes and strides are constants of a recipe, so its key has them."""
    glu, settings = call.OPERATORS["glu"], ("silu", False)
    call_cache.forget()
    x = torch.randn(4, 16)
    kinds = [
        x,
        late(x),
        x.t().contiguous().t(),
        torch.randn(4, 32)[:, :16],
        x.half(),
        torch.randn(4, 1),
    ]
    for each in kinds:
        glu.run((each, each), glu.settings(*settings), (0,), False)
    assert len([key for key in glu.kept if key[0] == "forward"]) == len(kinds)
    call_cache.forget()
