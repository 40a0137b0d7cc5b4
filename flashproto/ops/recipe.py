"""Recipes: what a call does for tensors of given metadata, as data.

    recipe = Recipe(device)
    x = recipe.input(tensor)                           # an Operand: metadata, no tensor
    y = recipe.make(New.contiguous(x.shape, x.dtype, x.device))    # memory that each run makes
    rows = x.rows()                                    # [M, N]: a view, or a step that copies
    recipe.launch(kernel, programs, rows, y, rows.stride(0), C=1024, num_warps=4)
    recipe.returns = [y]

A recipe follows from metadata alone: shapes, strides, dtypes, device, alignment and settings.  So it
is made once for all calls that have these in common.  `execute` runs it step by step with Triton's own
launches; it says what a recipe means, and it is all there is under the interpreter.  written.py
makes the same steps one Python function.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Hashable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from . import exchange_buffers
from .device import on_device

OPTIONS = ("num_warps", "num_stages", "maxnreg", "num_ctas", "launch_pdl")
LARGEST_KEPT = 2**22  # elements
PLAIN = (int, float, bool, type(None))  # arguments that kernels are handed as they are


# --- what a recipe is made of ---------------------------------------------------------------------


class New(NamedTuple):
    """Memory that each run makes, uninitialised.  Sizes may be symbolic."""

    shape: tuple[int, ...]
    strides: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device

    @classmethod
    def contiguous(cls, shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> New:
        return cls(tuple(shape), contiguous_strides(shape), dtype, device)

    def tensor(self) -> Tensor:
        return torch.empty_strided(self.shape, self.strides, dtype=self.dtype, device=self.device)


class Operand:
    """What a recipe knows of a tensor: its metadata, and where in which of the recipe's variables its
    first element is.  It has those methods of a tensor that recipes use.

    offset: bytes from the start of the variable.
    """

    __slots__ = ("device", "dtype", "offset", "recipe", "shape", "strides", "variable")

    def __init__(
        self,
        recipe: Recipe,
        variable: int,
        shape: Sequence[int],
        strides: Sequence[int],
        dtype: torch.dtype,
        device: torch.device,
        offset: int = 0,
    ) -> None:
        self.recipe, self.variable, self.offset = recipe, variable, offset
        self.shape, self.strides = tuple(shape), tuple(strides)
        self.dtype, self.device = dtype, device

    @property
    def ndim(self) -> int:
        return len(self.shape)

    @property
    def aligned(self) -> bool:
        """Whether it starts at a multiple of 16 bytes."""
        return self.recipe.aligned[self.variable] and self.offset % 16 == 0

    def stride(self, dim: int | None = None) -> Any:
        return self.strides if dim is None else self.strides[dim]

    def numel(self) -> int:
        return math.prod(self.shape)

    def data_ptr(self) -> int:
        """An address that is none, but a multiple of 16 where it would be one."""
        return 0 if self.aligned else 1

    def is_neg(self) -> bool:
        """False: a recipe knows values as they are in memory."""
        return False

    _is_zerotensor = is_neg

    def element_size(self) -> int:
        return self.dtype.itemsize

    def is_contiguous(self) -> bool:
        wanted = contiguous_strides(self.shape)
        return (
            all(
                n == 1 or have == want
                for n, have, want in zip(self.shape, self.strides, wanted, strict=True)
            )
            or 0 in self.shape
        )

    # --- views ---

    def as_strided(self, shape: Sequence[int], strides: Sequence[int], elements: int = 0) -> Operand:
        """A view that starts `elements` behind this one's first element."""
        offset = self.offset + elements * self.dtype.itemsize
        return Operand(self.recipe, self.variable, shape, strides, self.dtype, self.device, offset)

    def part(self, offset: int, dtype: torch.dtype, *shape: int) -> Operand:
        """The contiguous [*shape] of `dtype` that starts `offset` bytes behind the first element."""
        strides = contiguous_strides(shape)
        return Operand(
            self.recipe, self.variable, shape, strides, dtype, self.device, self.offset + offset
        )

    def narrow(self, dim: int, start: int, length: int) -> Operand:
        shape = (*self.shape[:dim], length, *self.shape[dim + 1 :])
        return self.as_strided(shape, self.strides, start * self.strides[dim])

    def select(self, dim: int, index: int) -> Operand:
        shape, strides = (x[:dim] + x[dim + 1 :] for x in (self.shape, self.strides))
        return self.as_strided(shape, strides, index * self.strides[dim])

    def transpose(self, a: int, b: int) -> Operand:
        order = list(range(self.ndim))
        order[a], order[b] = order[b], order[a]
        return self.as_strided([self.shape[i] for i in order], [self.strides[i] for i in order])

    def expand(self, *shape: int) -> Operand:
        """To `shape`, of as many dimensions as it has or more; new ones come first."""
        lead = len(shape) - self.ndim
        own = (*(1,) * lead, *self.shape), (*(0,) * lead, *self.strides)
        strides = [0 if have != want else s for have, s, want in zip(*own, shape, strict=True)]
        return self.as_strided(shape, strides)

    def reshape(self, *shape: int) -> Operand:
        """A view where the strides allow one, else of a copy, as torch's."""
        strides = view_strides(self.shape, self.strides, shape)
        if strides is None:
            copy = self.clone()
            return copy.as_strided(shape, contiguous_strides(shape))
        return self.as_strided(shape, strides)

    def rows(self, ndim: int = 1) -> Operand:
        """[..., *trailing] as [M, N], N the product of the last `ndim` dimensions: columns of stride 1,
        rows of any one stride.  A view where the strides allow one, else of a copy."""
        lead = self.ndim - ndim
        M, N = math.prod(self.shape[:lead]), math.prod(self.shape[lead:])
        matrix = self.reshape(M, N)
        return matrix if N <= 1 or matrix.strides[1] == 1 else matrix.clone()

    # --- steps ---

    def contiguous(self) -> Operand:
        return self if self.is_contiguous() else self.clone()

    def clone(self) -> Operand:
        """A contiguous copy."""
        like = New.contiguous(self.shape, self.dtype, self.device)
        return self.recipe.compute(contiguous_copy, self, like=like)

    def to(self, dtype: torch.dtype) -> Operand:
        if dtype == self.dtype:
            return self
        like = New.contiguous(self.shape, dtype, self.device)
        return self.recipe.compute(functools.partial(converted_copy, dtype=dtype), self, like=like)

    def fill_(self, value: float) -> Operand:
        self.recipe.compute(functools.partial(torch.fill_, value=value), self)
        return self

    def zero_(self) -> Operand:
        return self.fill_(0)


def contiguous_copy(x: Tensor) -> Tensor:
    return x.clone(memory_format=torch.contiguous_format)


def converted_copy(x: Tensor, dtype: torch.dtype) -> Tensor:
    return x.to(dtype, memory_format=torch.contiguous_format, copy=True)


class Boxed(NamedTuple):
    """As an argument: the TMA descriptor of an operand; tma_descriptors: see descriptors.py."""

    operand: Operand
    tma_descriptors: Any


class Table(NamedTuple):
    """As an argument: a tensor on the device that `make` returns, which keeps it."""

    make: Callable[[], Tensor]


class Exchange(NamedTuple):
    """As an argument: words through which the programs of a launch exchange partial results, all 0
    before it (exchange_buffers.py).

    used: instead the words of the launch before, for the kernel to clear, or None where there are none.
    """

    words: int
    used: bool = False


class Zeroed(NamedTuple):
    """As an argument: so many words, int32, that are 0 before the launch."""

    words: int


class Launch(NamedTuple):
    """One launch: `arguments`, one for each of the kernel's parameters, constants included.

    clears: whether it takes words of the launch before to clear.
    """

    kernel: Any
    programs: int
    arguments: dict[str, Any]
    options: dict[str, Any]
    clears: bool


class Make(NamedTuple):
    variable: int
    new: New


class Compute(NamedTuple):
    """Plain PyTorch: function(*tensors), whose result is `variable`, if that is not None."""

    variable: int | None
    function: Callable[..., Any]
    operands: tuple[Operand, ...]


class Keep(NamedTuple):
    """The next `steps` steps make `variable`, which follows from the input `of` and from `name`: a run
    that finds it kept with that input (mask_values.Tables) leaves them out."""

    variable: int
    of: Operand
    name: Hashable
    steps: int


_names: dict[Hashable, int] = {}


class Recipe:
    """Steps over variables, which are numbered: inputs first, then what steps make."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.inputs = 0
        self.aligned: list[bool] = []  # by variable
        self.whole: list[Operand | None] = []  # by variable, None for an input that is not given
        self.operands: list[Operand | None] = []  # by input, what steps take for it
        self.steps: list[Make | Compute | Launch | Keep] = []
        self.returns: list[Operand | None] = []
        self.passed_first_launch = False
        self.asked_for: tuple[int, ...] = ()  # numbers of the outputs that a forward's caller gets
        self.functional = False  # whether results must not lie in the memory of inputs, as an op's

    # --- making one ---

    def input(self, x: Tensor | None) -> Operand | None:
        """The next input; None for one that is not given, which takes its place all the same."""
        self.inputs += 1
        if x is None:
            self.aligned.append(True)
            self.whole.append(None)
            return None
        return self._variable(x.shape, x.stride(), x.dtype, x.device, is_aligned(x))

    def all_inputs(self, tensors: Sequence[Tensor | None]) -> list[Operand | None]:
        """The inputs; copies of those whose memory does not hold their values."""
        inputs = [self.input(x) for x in tensors]
        self.operands = [
            operand.clone() if operand is not None and x is not None and is_lazy(x) else operand
            for operand, x in zip(inputs, tensors, strict=True)
        ]
        return self.operands

    def make(self, new: New) -> Operand:
        """Memory that each run makes."""
        made = self._variable(*new, True)
        self.steps.append(Make(made.variable, new))
        return made

    def keep(self, start: int, made: Operand, of: Operand, name: Hashable) -> None:
        """Let `made`, which the steps from number `start` on make, be kept with the input `of` under
        `name`; not for an op, whose memory may be a pool's."""
        if self.functional or of.variable >= self.inputs or made.numel() > LARGEST_KEPT:
            return
        name = _names.setdefault(name, len(_names))  # a number is found sooner
        self.steps.insert(start, Keep(made.variable, of, name, len(self.steps) - start))

    def compute(self, function: Callable[..., Any], *operands: Operand, like: New | None = None) -> Any:
        """function(*operands) of tensors; `like` says what it returns, None for nothing of use."""
        made = None if like is None else self._variable(*like, True)
        variable = None if made is None else made.variable
        self.steps.append(Compute(variable, function, operands))
        return made

    def launch(self, kernel: Any, programs: int, *arguments: Any, **named: Any) -> None:
        """kernel[(programs,)](*arguments, **named); options (OPTIONS) of None are not given."""
        names = [p.name for p in kernel.params] if hasattr(kernel, "params") else kernel.arg_names
        options = {name: named.pop(name) for name in OPTIONS if name in named}
        options = {name: value for name, value in options.items() if value is not None}
        given = dict(zip(names, arguments, strict=False)) | named
        clears = any(isinstance(x, Exchange) and x.used for x in given.values())
        self.steps.append(Launch(kernel, programs, given, options, clears))

    def _variable(
        self, shape: Any, strides: Any, dtype: torch.dtype, device: torch.device, aligned: bool
    ) -> Operand:
        operand = Operand(self, len(self.whole), shape, strides, dtype, device)
        self.aligned.append(aligned)
        self.whole.append(operand)
        return operand

    def finish(self) -> Recipe:
        """Leave out memory that nothing reads or writes."""
        used = {x.variable for x in self.returns if x is not None}
        for step in self.steps:
            if isinstance(step, Compute):
                used.update(x.variable for x in step.operands)
            elif isinstance(step, Launch):
                used.update(x.variable for x in operands_in(tuple(step.arguments.values())))
        self.steps = [s for s in self.steps if not isinstance(s, Make) or s.variable in used]
        return self

    @property
    def pattern(self) -> tuple[bool, ...]:
        """Which inputs start at multiples of 16 bytes."""
        return tuple(self.aligned[: self.inputs])

    # --- the plain way to run it ---

    def execute(
        self, *inputs: Tensor | None, entries: list[Any] | None = None, pairs: bool = False
    ) -> Any:
        """Run the steps one by one.

        entries: a list to which the compiled kernel of each launch is added.
        pairs: whether kernels that can clear the words of the launch before do so.
        """
        values: list[Any] = [*inputs, *[None] * (len(self.whole) - self.inputs)]
        with on_device(self.device):
            for step in self.steps:
                if isinstance(step, Make):
                    values[step.variable] = step.new.tensor()
                elif isinstance(step, Compute):
                    made = step.function(*(self._tensor(x, values) for x in step.operands))
                    if step.variable is not None:
                        values[step.variable] = made
                elif isinstance(step, Launch):  # nothing is kept here
                    compiled = self._launch(step, values, pairs and step.clears)
                    if entries is not None:
                        entries.append(compiled)
        results = [None if x is None else self._tensor(x, values) for x in self.returns]
        return results[0] if len(results) == 1 else tuple(results)

    def is_whole(self, x: Operand) -> bool:
        """Whether it is its variable, and no view of that."""
        own = self.whole[x.variable]
        assert own is not None
        return (x.offset, x.shape, x.strides, x.dtype) == (0, own.shape, own.strides, own.dtype)

    def _tensor(self, x: Operand, values: list[Any]) -> Tensor:
        value = values[x.variable]
        if x is self.whole[x.variable] or self.is_whole(x):
            return value
        if x.dtype != value.dtype:
            start = (value.storage_offset() * value.itemsize + x.offset) // x.dtype.itemsize
            view = torch.empty(0, dtype=x.dtype, device=value.device)
            return view.set_(value.untyped_storage(), start, x.shape, x.strides)
        start = value.storage_offset() + x.offset // x.dtype.itemsize
        return value.as_strided(x.shape, x.strides, start)

    def _launch(self, step: Launch, values: list[Any], pairs: bool) -> Any:
        count = next((x.words for x in step.arguments.values() if isinstance(x, Exchange)), 0)
        pair = exchange_buffers.take(self.device, count) if pairs else None
        words, used = None, None
        if pair is not None:
            words, used = pair.fresh, pair.used
        elif count:
            words = exchange_buffers.zeros(self.device, count)

        arguments = {
            name: x if type(x) in PLAIN else self._real(x, values, words, used)
            for name, x in step.arguments.items()
        }
        compiled = launch(step.kernel, step.programs, arguments, step.options)
        if pair is not None:
            exchange_buffers.give(pair)
        return compiled

    def _real(self, x: Any, values: list[Any], words: Any, used: Any) -> Any:
        """What a kernel is handed for an argument.

        A method: a nested function that calls itself is a cycle, which keeps the tensors of a run until
        the garbage collector comes.
        """
        if isinstance(x, Operand):
            return self._tensor(x, values)
        if isinstance(x, Boxed):
            return x.tma_descriptors[self._tensor(x.operand, values).data_ptr()]
        if isinstance(x, Table):
            return x.make()
        if isinstance(x, Zeroed):
            return exchange_buffers.zeroed(self.device, x.words)
        if isinstance(x, Exchange):
            return used if x.used else words
        if not isinstance(x, tuple):
            return x
        made = [y if type(y) in PLAIN else self._real(y, values, words, used) for y in x]
        return type(x)(*made) if hasattr(x, "_fields") else tuple(made)


def launch(kernel: Any, programs: int, arguments: dict[str, Any], options: dict[str, Any]) -> Any:
    """Triton's own launch; returns the compiled kernel."""
    return kernel[(programs,)](**arguments, **options)


def operands_in(x: Any) -> list[Operand]:
    """All operands among arguments, those in tuples included."""
    if isinstance(x, Operand):
        return [x]
    if isinstance(x, Boxed):
        return [x.operand]
    if isinstance(x, tuple):
        return [operand for y in x for operand in operands_in(y)]
    return []


def is_lazy(x: Tensor) -> bool:
    """Whether its memory does not hold its values: they are the negatives of what is there, as of the
    imaginary part of a conjugate, or zeros that are nowhere."""
    return x.is_neg() or x._is_zerotensor()


def is_aligned(x: Tensor) -> bool:
    return x.is_neg() or x._is_zerotensor() or x.data_ptr() % 16 == 0


# --- strides --------------------------------------------------------------------------------------


def contiguous_strides(shape: Sequence[int]) -> tuple[int, ...]:
    strides, step = [], 1
    for n in reversed(shape):
        strides.append(step)
        step = step * max(n, 1) if isinstance(n, int) else step * n
    return tuple(reversed(strides))


def view_strides(
    shape: Sequence[int], strides: Sequence[int], wanted: Sequence[int]
) -> tuple[int, ...] | None:
    """The strides with which memory of `shape` and `strides` has the shape `wanted`; None where only a
    copy has.  Dimensions that follow one another in memory are taken together, then cut anew."""
    if math.prod(shape) != math.prod(wanted):
        raise ValueError(f"shape {list(shape)} has not as many elements as {list(wanted)}")
    if 0 in shape or not shape:
        return contiguous_strides(wanted)
    result = [0] * len(wanted)
    to = len(wanted) - 1
    step = strides[-1]
    together = cut = 1
    for d in reversed(range(len(shape))):
        together *= shape[d]
        if d > 0 and (shape[d - 1] == 1 or strides[d - 1] == together * step):
            continue
        while to >= 0 and (cut < together or wanted[to] == 1):
            result[to] = cut * step
            cut *= wanted[to]
            to -= 1
        if cut != together:
            return None
        if d > 0:
            step, together, cut = strides[d - 1], 1, 1
    return tuple(result) if to == -1 else None
