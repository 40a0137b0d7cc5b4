"""Recipes (flashproto/ops/recipe.py): views of operands, the plain way to run one, and the function
that is written for it, which is tried here without a GPU, with a kernel's compiled form played by a
function that notes what it is handed, and with all operators, whose kernels the interpreter runs on
the addresses that an entry is handed."""

from __future__ import annotations

import contextlib
import functools
import inspect
import math
import weakref
from collections.abc import Iterator
from copy import deepcopy
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

pytest.importorskip("triton")

import triton
import triton.language as tl
from operators import OPERATORS, Case, assert_same, assert_same_results, run

import flashproto
from flashproto import backends
from flashproto.mask_values import MOST_TABLES
from flashproto.ops import call, call_cache, exchange_buffers, private, recipe, written
from flashproto.ops.recipe import (
    Boxed,
    Compute,
    Exchange,
    Launch,
    Make,
    New,
    Operand,
    Recipe,
    Table,
    Zeroed,
)

CPU = torch.device("cpu")

# --- views ------------------------------------------------------------------------------------------


@st.composite
def memories(draw: Any) -> Tensor:
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


@given(memories(), st.data())
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


@given(memories())
def test_rows_have_columns_of_stride_1(x: Tensor) -> None:
    for ndim in range(1, x.ndim + 1):
        rows = operand_of(x).rows(ndim)
        N = math.prod(x.shape[x.ndim - ndim :])
        assert rows.shape == (x.numel() // N, N) and (N == 1 or rows.stride(1) == 1)
        assert torch.equal(value(rows, x), x.reshape(rows.shape))


@given(memories(), st.data())
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


@given(memories(), st.data())
def test_expands_as_torch(x: Tensor, data: Any) -> None:
    more = data.draw(st.lists(st.integers(1, 3), max_size=2))
    shape = more + [n if n > 1 else data.draw(st.integers(1, 3)) for n in x.shape]
    got, wanted = operand_of(x).expand(*shape), x.expand(*shape)
    steps = [m for n, m in zip(shape, got.strides, strict=True) if n > 1]
    assert steps == [m for n, m in zip(shape, wanted.stride(), strict=True) if n > 1]
    assert torch.equal(value(got, x), wanted)


@given(st.lists(st.integers(0, 3), max_size=5))
def test_contiguous_strides_are_torchs(shape: list[int]) -> None:
    x = torch.empty(shape)
    assert recipe.contiguous_strides(shape) == x.stride()
    assert operand_of(x).is_contiguous()


@pytest.mark.parametrize(
    ("shape", "wanted"),
    [((), (1, 1)), ((1,), ()), ((2, 0), (0, 5)), ((0,), (3, 0, 2)), ((3, 1), (1, 3))],
)
def test_views_of_one_element_or_none(shape: tuple[int, ...], wanted: tuple[int, ...]) -> None:
    x = torch.ones(shape)
    got = operand_of(x).reshape(*wanted)
    assert (got.shape, got.strides) == (x.view(wanted).shape, x.view(wanted).stride())
    assert torch.equal(value(got, x), x.view(wanted))
    assert not got.recipe.steps, "no copy"


def test_a_view_has_as_many_elements() -> None:
    with pytest.raises(ValueError, match="has not as many elements"):
        operand_of(torch.ones(2, 3)).reshape(7)


@given(memories())
def test_copies_are_contiguous_and_aligned(x: Tensor) -> None:
    for copy, wanted in ((operand_of(x).clone(), x), (operand_of(x).to(torch.float32), x.float())):
        assert copy.strides == recipe.contiguous_strides(x.shape) and copy.aligned
        got = value(copy, x)
        assert (got.stride(), got.dtype) == (copy.strides, wanted.dtype)
        assert torch.equal(got, wanted) and got.data_ptr() % 16 == 0
    same = operand_of(x)
    assert same.to(x.dtype) is same
    assert (same.contiguous() is same) == x.is_contiguous()


def test_alignment_follows_from_where_a_tensor_starts() -> None:
    memory, made = torch.zeros(40), Recipe(CPU)
    for start in range(9):
        x = made.input(memory[start:])
        assert x is not None
        for elements in range(5):
            wanted = start % 4 == 0 and elements % 4 == 0
            assert x.narrow(0, elements, 4).aligned == wanted
            assert x.part(4 * elements, torch.float16, 2).aligned == wanted
    made.input(None)
    assert made.make(New.contiguous((4,), torch.float32, CPU)).aligned
    assert made.pattern == (*(start % 4 == 0 for start in range(9)), True)


# --- running one --------------------------------------------------------------------------------------


@triton.jit
def add_kernel(x_ptr, y_ptr, out_ptr, total_ptr, n, y_stride, WIDTH: tl.constexpr):
    """out = x + y, total += sum(out)."""
    at = tl.program_id(0) * WIDTH + tl.arange(0, WIDTH)
    out = tl.load(x_ptr + at, at < n, 0.0) + tl.load(y_ptr + at * y_stride, at < n, 0.0)
    tl.store(out_ptr + at, out, at < n)
    tl.atomic_add(total_ptr, tl.sum(out))


@given(st.integers(1, 40), st.integers(1, 3))
def test_what_the_steps_mean(n: int, stride: int) -> None:
    """By a real kernel; memory that nothing uses is not made."""
    device = torch.device("cuda", 0) if torch.cuda.is_available() else CPU
    x, y = torch.randn(n, device=device), torch.randn(n * stride, device=device)[::stride]
    made = Recipe(device)
    a, b = made.input(x), made.input(y)
    assert a is not None and b is not None
    made.make(New.contiguous((5,), torch.float32, device))
    state = made.make(New.contiguous((64,), torch.uint8, device))
    total, out = state.part(16, torch.float32, 1), made.make(New.contiguous((n,), a.dtype, device))
    made.compute(Tensor.zero_, state)
    made.launch(add_kernel, -(-n // 16), a, b, out, total, n, b.stride(0), WIDTH=16, num_warps=1)
    half = made.compute(lambda t: t.half(), out, like=New.contiguous((n,), torch.float16, device))
    made.returns = [out, total, None, half]
    assert sum(isinstance(step, Make) for step in made.steps) == 3
    got, total, nothing, half = made.finish().execute(x, y)
    assert sum(isinstance(step, Make) for step in made.steps) == 2
    assert torch.equal(got, x + y) and torch.equal(half, got.half()) and nothing is None
    torch.testing.assert_close(total, (x + y).sum()[None])


@pytest.mark.parametrize("start", [0, 4])
def test_parts_of_another_dtype_are_of_the_same_memory(start: int) -> None:
    """Of memory that is a view itself, and not contiguous, too."""
    memory = torch.zeros(64, dtype=torch.int32)
    for x in (memory[start:], memory[start:].view(-1, 2)[:, 0]):
        made = Recipe(CPU)
        operand = made.input(x)
        assert operand is not None
        part = operand.part(16, torch.int16, 2, 3)
        made.compute(lambda t: t.fill_(7), part)
        made.returns = [part]
        got = made.finish().execute(x)
        assert got.data_ptr() == x.data_ptr() + 16 and got.shape == (2, 3)
        assert torch.equal(memory.view(torch.int16)[2 * start + 8 :][:6], torch.full((6,), 7).short())
        memory.zero_()


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
    monkeypatch.setattr(private, "DIRECT", True)
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
    monkeypatch.setattr(written, "_factory", functools.lru_cache(written._factory.__wrapped__))
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
    run = written.runner(made.finish(), lambda *inputs: "elsewhere")
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
    run = written.runner(made.finish(), lambda *inputs: "elsewhere")
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
    run = written.runner(made.finish(), lambda *inputs: "elsewhere")
    for _ in range(3):
        run(x)
    for each in card.calls:
        at = x.data_ptr()
        assert handed(card, each)[1] == (1, "first", at, "second", at + 16, at, 7)


def test_words_that_no_kernel_clears_are_new(card: Card, monkeypatch: pytest.MonkeyPatch) -> None:
    made_words: list[Tensor] = []

    def zeros(device: torch.device, count: int) -> Tensor:
        made_words.append(torch.full((count,), 0, dtype=torch.int64))
        return made_words[-1]

    monkeypatch.setattr(exchange_buffers, "zeros", zeros)
    x, made, kernel = torch.randn(8), Recipe(torch.device("cuda", 0)), Kernel("x_ptr", "words")
    made.launch(kernel, 1, made.input(x), words=Exchange(6))
    run = written.runner(made.finish(), lambda *inputs: "elsewhere")
    for _ in range(3):
        run(x)
    assert [words.shape for words in made_words] == [(6,)] * 3
    given = [handed(card, each)[1] for each in card.calls]
    assert given == [(1, x.data_ptr(), words.data_ptr(), 7) for words in made_words[1:]]


def test_a_launch_that_raises_drops_its_words(card: Card, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(exchange_buffers, "current_stream", lambda index: card.stream)
    monkeypatch.setattr(exchange_buffers, "outside_memory_pool", lambda make, device: make())
    monkeypatch.setattr(
        exchange_buffers, "zeros", lambda device, count: torch.full((count,), 0, dtype=torch.int64)
    )
    exchange_buffers.forget()
    x, made, kernel = torch.randn(8), Recipe(torch.device("cuda", 0)), Kernel("x_ptr", "words", "used")
    # By name, they are words to clear too.
    made.launch(kernel, 1, made.input(x), words=Exchange(6), used=Exchange(6, used=True))
    run = written.runner(made.finish(), lambda *inputs: "elsewhere")
    for _ in range(3):
        run(x)
    assert len(card.calls) == 1 and len(exchange_buffers._pairs) == 1

    class Interrupted(list[Any]):
        def append(self, call: Any) -> None:
            raise KeyboardInterrupt

    card.calls = Interrupted()
    with pytest.raises(KeyboardInterrupt):
        run(x)
    assert not exchange_buffers._pairs


def test_zeroed_words_live_until_the_launch(card: Card, monkeypatch: pytest.MonkeyPatch) -> None:
    given: list[weakref.ref[Tensor]] = []

    def zeroed(device: torch.device, count: int) -> Tensor:
        made = torch.full((count,), 0, dtype=torch.int32)
        given.append(weakref.ref(made))
        return made

    monkeypatch.setattr(exchange_buffers, "zeroed", zeroed)
    x, made, kernel = torch.randn(8), Recipe(torch.device("cuda", 0)), Kernel("a", "words", "n")
    made.launch(kernel, 1, made.input(x), Zeroed(5), 3)
    run = written.runner(made.finish(), lambda *inputs: "elsewhere")
    seen = []
    note = card.calls.append
    card.calls = SimpleNamespace(append=lambda call: (seen.append(given[-1]()), note(call)))  # type: ignore
    for _ in range(3):
        run(x)
    assert len(given) == 3 and all(x is not None and x.shape == (5,) for x in seen)


def test_tables_of_one_launch_are_told_apart(card: Card) -> None:
    tables = [torch.ones(3), torch.ones(5)]
    x, made, kernel = torch.randn(8), Recipe(torch.device("cuda", 0)), Kernel("a", "b", "c", "t")
    first, second = (Table(lambda t=t: t) for t in tables)
    made.launch(kernel, 1, first, made.input(x), second, 3)
    run = written.runner(made.finish(), lambda *inputs: "elsewhere")
    for _ in range(2):
        run(x)
    wanted = (1, tables[0].data_ptr(), x.data_ptr(), tables[1].data_ptr(), 3, 7)
    assert handed(card, card.calls[0])[1] == wanted


def test_goes_the_plain_way_where_another_device_is_current(
    card: Card, monkeypatch: pytest.MonkeyPatch
) -> None:
    current = [3]
    monkeypatch.setattr(private, "several_devices", lambda: True)
    monkeypatch.setattr(private, "current_device", lambda: current[0])
    x, made, kernel = torch.randn(8), Recipe(torch.device("cuda", 3)), Kernel("x_ptr")
    made.launch(kernel, 1, made.input(x))
    run = written.runner(made.finish(), lambda *inputs: "elsewhere")
    run(x), run(x)
    assert (len(kernel.launches), len(card.calls)) == (1, 1)
    current[0] = 0
    run(x)
    assert (len(kernel.launches), len(card.calls)) == (2, 1)


@pytest.mark.parametrize("late_first", [False, True])
def test_inputs_that_start_elsewhere_have_a_recipe_of_their_own(card: Card, late_first: bool) -> None:
    x, y = torch.randn(8), torch.randn(8)
    x = late(x) if late_first else x
    made, kernel = Recipe(torch.device("cuda", 0)), Kernel("x_ptr", "none_ptr", "y_ptr")
    made.launch(kernel, 1, *(made.input(t) for t in (x, None, y)))
    run = written.runner(made.finish(), lambda *inputs: [*inputs])
    run(x, None, y)
    for a, b in ((x.clone(), y), (late(x), y), (x, late(y)), (late(x), late(y))):
        result = run(a, None, b)
        same = (a.data_ptr() % 16 == 0, b.data_ptr() % 16 == 0) == (not late_first, True)
        assert result == (() if result is None or same else [a, None, b]) or result is None
        assert (result is None) == same


def test_a_recipe_without_launches_and_one_that_returns_nothing(card: Card) -> None:
    x, made = torch.randn(3, 4).t(), Recipe(torch.device("cuda", 0))
    operand = made.input(x)
    assert operand is not None
    made.returns = [operand.contiguous().narrow(0, 1, 2), operand, None]
    run = written.runner(made.finish(), lambda *inputs: "elsewhere")
    for _ in range(3):
        got, same, nothing = run(x)
        assert torch.equal(got, x[1:3]) and got.is_contiguous() and same is x and nothing is None


# --- every operator by the function that is written for it ------------------------------------------


class Compiled:
    """A kernel that was launched once, with these arguments by name."""

    def __init__(self, kernel: Any, arguments: dict[str, Any], options: dict[str, Any]) -> None:
        self.kernel, self.arguments, self.options = kernel, arguments, options


class Played:
    """A GPU that is none: an entry finds the tensors that begin at the addresses that it is handed, and
    the interpreter runs the kernel on them."""

    stream, capturing = 7, False

    def __init__(self) -> None:
        self.launched = 0
        self.tensors: list[Tensor] = []  # whose memory may be addressed

    def seen(self, x: Any) -> Any:
        if isinstance(x, Tensor):
            self.tensors.append(x)
        return x

    def launch(
        self, kernel: Any, programs: int, arguments: dict[str, Any], options: dict[str, Any]
    ) -> Compiled:
        kernel[(programs,)](**arguments, **options)
        return Compiled(kernel, arguments, options)

    def entry(self, compiled: Compiled) -> private.Entry:
        def run(programs: int, y: int, z: int, stream: int, *handed: Any) -> None:
            assert (y, z, stream) == (1, 1, self.stream)
            handed = handed[0] if private.PACKED else handed
            names = [p.name for p in compiled.kernel.params]
            defaults = {p.name: p.default for p in compiled.kernel.params}
            like = [compiled.arguments.get(name, defaults[name]) for name in names]
            given = [self.real(a, b) for a, b in zip(handed, like, strict=True)]
            arguments = dict(zip(names, given, strict=True))
            self.launched += 1
            compiled.kernel[(programs,)](**arguments, **compiled.options)

        return private.Entry(run, (), ())

    def real(self, x: Any, like: Any) -> Any:
        """The argument that x stands for, where `like` was given when the kernel was compiled: it is
        one that Triton takes the same compiled kernel for."""
        if isinstance(like, Tensor):
            assert type(x) is int and (x % 16 == 0) == (like.data_ptr() % 16 == 0)
            return self.at(x, like.dtype)
        if isinstance(like, tuple):
            assert isinstance(x, tuple)
            made = [self.real(a, b) for a, b in zip(x, like, strict=True)]
            return type(like)(*made) if hasattr(like, "_fields") else tuple(made)
        assert type(x) is type(like) and x == like
        return x

    def at(self, address: int, dtype: torch.dtype) -> Tensor:
        for t in reversed(self.tensors):
            storage = t.untyped_storage()
            behind = address - storage.data_ptr()
            if 0 <= behind < max(storage.nbytes(), 1):
                assert behind % dtype.itemsize == 0
                count = (storage.nbytes() - behind) // dtype.itemsize
                return torch.empty(0, dtype=dtype).set_(storage, behind // dtype.itemsize, (count,))
        raise AssertionError("an address in no tensor's memory")


@pytest.fixture
def played(monkeypatch: pytest.MonkeyPatch) -> Iterator[Played]:
    if not backends.INTERPRETED:
        pytest.skip("needs Triton's interpreter")
    played = Played()
    write = written.runner

    def runner(made: Recipe, elsewhere: Any) -> Any:
        """Of a recipe that says it is for a GPU, and whose steps show the memory that they make."""
        made.device = torch.device("cuda", 0)
        for i, step in enumerate(made.steps):
            if isinstance(step, Compute):
                made.steps[i] = step._replace(function=checked(made, step))
            elif isinstance(step, Launch) and not hasattr(step.kernel, "params"):
                signature = inspect.signature(step.kernel.fn).parameters.values()
                monkeypatch.setattr(step.kernel, "params", [*signature], raising=False)
        run = write(made, elsewhere)
        return lambda *inputs: run(*map(played.seen, inputs))

    def checked(made: Recipe, step: Compute) -> Any:
        def function(*given: Tensor) -> Any:
            result = step.function(*given)
            if step.variable is not None:
                said = made.whole[step.variable]
                assert said is not None
                assert (result.shape, result.dtype) == (said.shape, said.dtype)
                assert operand_of(result).is_contiguous() == said.is_contiguous()
                assert result.data_ptr() % 16 == 0 or not said.aligned
            return played.seen(result)

        return function

    def empty_strided(shape: Any, strides: Any, dtype: torch.dtype) -> Tensor:
        made = torch.empty_strided(shape, strides, dtype=dtype)
        return played.seen(made.fill_(float("nan")) if made.is_floating_point() else made)

    def zeros(device: torch.device, count: int) -> Tensor:
        return played.seen(torch.full((count,), 0, dtype=torch.int64))

    call_cache.forget()
    monkeypatch.setattr(call, "runner", runner)
    monkeypatch.setattr(recipe, "launch", played.launch)
    monkeypatch.setattr(recipe, "on_device", lambda device: contextlib.nullcontext())
    monkeypatch.setattr(written, "_factory", functools.lru_cache(written._factory.__wrapped__))
    monkeypatch.setattr(private, "has_entry", lambda kernel: True)
    monkeypatch.setattr(private, "entry", played.entry)
    monkeypatch.setattr(private, "is_capturing", lambda: played.capturing)
    monkeypatch.setattr(private, "current_stream", lambda index: played.stream)
    monkeypatch.setattr(private, "several_devices", lambda: False)
    monkeypatch.setattr(private, "empty_strided_cuda", empty_strided)
    monkeypatch.setattr(exchange_buffers, "zeros", zeros)
    monkeypatch.setattr(exchange_buffers, "current_stream", lambda index: played.stream)
    monkeypatch.setattr(exchange_buffers, "outside_memory_pool", lambda make, device: make())
    yield played
    call_cache.forget()


@pytest.mark.slow
@pytest.mark.parametrize("case", OPERATORS, ids=lambda case: case.name)
def test_every_operator_by_the_function_that_is_written(case: Case, played: Played) -> None:
    """Later calls give the bits of the first, which is Triton's own launches; an entry is handed what
    its kernel was compiled for, wherever tensors start."""
    inputs = case.inputs("cpu")
    moved = {n: late(t) if t.is_contiguous() else t for n, t in inputs.items()}
    for tensors in (inputs, moved):
        wanted = run(case, tensors, "triton")
        run(case, tensors, "triton")  # which is Triton's too where words are cleared
        before = played.launched
        for _ in range(2):
            assert_same_results(run(case, tensors, "triton"), wanted)
        assert played.launched > before


@pytest.mark.slow
def test_words_are_cleared_by_the_function_that_is_written(
    played: Played, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By the backward of rows split over programs.  Calls are given other rows each time: with words
    that are not 0, a row has the sums of another."""
    N, pairs = 16_400, []
    back = exchange_buffers.give

    def give(pair: exchange_buffers.Pair) -> None:
        assert pair.fresh.any() and not pair.used.any()
        pairs.append(pair)
        back(pair)

    monkeypatch.setattr(exchange_buffers, "give", give)
    for name, function in (
        ("rms_norm", lambda x: flashproto.rms_norm(x, N, impl="triton")),
        ("softmax", lambda x: flashproto.softmax(x, impl="triton")),
    ):
        problems = [(torch.randn(2, N, requires_grad=True), torch.randn(2, N)) for _ in range(2)]
        wanted = []
        for i in (0, 1, 0, 1, 0):
            x, dy = problems[i]
            wanted.append(torch.autograd.grad(function(x), x, dy)[0])
        assert torch.equal(wanted[0], wanted[2]) and torch.equal(wanted[2], wanted[4]), name
        assert torch.equal(wanted[1], wanted[3]), name
    assert len(pairs) == 2 * 4, "all but the first of each kind"
    assert len(exchange_buffers._pairs) <= 2


@pytest.mark.slow
def test_what_follows_from_a_mask_is_made_once(played: Played) -> None:
    """For each stream, of intervals that nobody writes to; not in a graph, nor by an op."""
    q, dout = (torch.randn(1, 2, 70, 16) for _ in range(2))
    q.requires_grad_()
    mask = flashproto.masks.documents(torch.arange(70) // 30)
    tables = mask.tensors[0].tables  # type: ignore[attr-defined]

    def call() -> tuple[Tensor, ...]:
        out = flashproto.attention(q, q, q, mask=mask, impl="triton")
        return out, *torch.autograd.grad(out, q, dout)

    wanted = call()
    assert not tables, "Triton's own launches keep nothing"
    assert_same(call(), wanted)
    made = dict(tables)
    assert len(made) == 2, "one forward, one backward"
    launched = played.launched
    assert_same(call(), wanted)
    assert {n: id(x) for n, x in tables.items()} == {n: id(x) for n, x in made.items()}
    kept = played.launched - launched
    played.capturing = True
    assert_same(call(), wanted)
    played.capturing, played.stream = False, 8
    assert_same(call(), wanted)
    assert len(tables) == 4 and tables.items() >= made.items()
    for x in tables.values():
        x.zero_()  # no query sees a key
    assert not call()[0].any()
    tables.clear()
    launched = played.launched
    assert_same(call(), wanted)
    assert played.launched - launched == kept + 2 and len(tables) == 2
    for i in range(3 * MOST_TABLES):
        tables[i] = None
        assert i in tables and len(tables) <= MOST_TABLES
    assert not deepcopy(mask.tensors[0]).tables  # type: ignore[attr-defined]


@pytest.mark.slow
def test_the_columns_of_a_table_are_made_once(played: Played) -> None:
    """By the first backward with a band, beside the table of a boolean mask."""
    q, dout = (torch.randn(1, 2, 70, 16) for _ in range(2))
    q.requires_grad_()
    mask = flashproto.masks.boolean(torch.rand(70, 70) > 0.3)

    def call(causal: bool) -> tuple[Tensor, ...]:
        out = flashproto.attention(q, q, q, mask=mask, causal=causal, impl="triton")
        return out, *torch.autograd.grad(out, q, dout)

    wanted = {}
    for causal in (False, True):
        wanted[causal] = call(causal)  # Triton's own launches
        assert_same(call(causal), wanted[causal])
    for causal in (False, True):
        launched = played.launched
        assert_same(call(causal), wanted[causal])
        assert played.launched - launched == 4, "forward, rows, keys and queries"


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
