"""Launching kernels, and what every launch needs to know about the device.

    launch_norm_forward = launcher(norm_forward_kernel, tensors=3)           # once, at import
    launch_norm_forward(programs, x, weight, y, M, N, eps, R=4, C=1024, num_warps=4)

is norm_forward_kernel[(programs,)](x, ..., num_warps=4) in about 2 microseconds before the driver
instead of 30: Triton derives anew at each call how the arguments specialize the kernel, through
several layers; a launcher is one generated function that derives the same facts inline, finds the
compiled kernel under them and hands the arguments to Triton's own entry point in C.

    again = launch_norm_forward.bind(programs, x, weight, y, M, N, eps, R=4, C=1024, num_warps=4)
    again(x, weight, y)

takes a microsecond, where calls differ in nothing but the addresses of their tensors; less where it is
given the addresses themselves, see Memory.

    make = launch_norm_forward.making(programs, x, weight, New.like(y), M, N, eps, R=4, ...)
    y = make(x, weight)

also makes its results, without a step of Python between.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Collection, Sequence
from functools import partial
from types import NoneType
from typing import Any, NamedTuple, Protocol, cast

import torch
import triton
from torch import Tensor

from .. import backends
from . import memory, triton_entry
from .memory import Memory, New, Part
from .words import with_new, with_pairs

# Under the interpreter there is no device; kernels get the tiles of the smallest GPU that is supported.
INTERPRETER_CAPABILITY = (8, 0)
OPTIONS = ("num_warps", "num_stages", "maxnreg", "num_ctas", "launch_pdl")
KEPT_NUMBERS = 4096  # sets of numbers whose specialization a launcher keeps


@functools.cache
def capability(device: torch.device) -> tuple[int, int]:
    """Compute capability (major, minor)."""
    if device.type == "cpu":
        return INTERPRETER_CAPABILITY
    return torch.cuda.get_device_capability(device)


@functools.cache
def multiprocessors(device: torch.device) -> int:
    """Number of streaming multiprocessors; 1 under the interpreter."""
    if device.type == "cpu":
        return 1
    return torch.cuda.get_device_properties(device).multi_processor_count


@functools.cache
def has_hopper_kernels(device: torch.device) -> bool:
    """Whether `device` takes the kernels of kernels/hopper."""
    return not backends.device_reasons("hopper", device)


@functools.cache
def has_dependent_launches(device: torch.device) -> bool:
    """Whether a launch with launch_pdl begins as soon as every program of the one before has ended or
    said that it may; what that has written its programs have to wait for themselves."""
    return not backends.INTERPRETED and capability(device)[0] >= 9


def on_device(device: torch.device) -> contextlib.AbstractContextManager[object]:
    """Make `device` current, where it is not already.  Launchers do so themselves."""
    if device.type == "cpu" or device.index in (None, torch.cuda.current_device()):
        return contextlib.nullcontext()
    return torch.cuda.device(device)


def allows_tf32() -> bool:
    """Whether the user allowed tf32 products through torch's own switch."""
    return torch.backends.cuda.matmul.fp32_precision == "tf32"


def cdiv(a: int, b: int) -> int:
    """a / b rounded up; triton.cdiv takes a microsecond and more outside a kernel."""
    return -(-a // b)


# --- launchers -----------------------------------------------------------------------------------


def takes_addresses(device: torch.device) -> bool:
    """Whether launches may be bound to Memory: the interpreter copies tensors of a GPU to the CPU."""
    return device.type == "cpu" or not backends.INTERPRETED


class Launcher(Protocol):
    """What `launcher` returns.

    bind(programs, *arguments, **constants_and_options), descriptors and tensors by position, launches
    nothing and returns a function of descriptors and tensors that launches with all else as bound: of
    an address where a Memory was bound, of None where None was.  Those it is called with are of the
    types, dtypes and device of those bound; which of them start at multiples of 16 bytes may differ.
    It keeps no tensor.

    making(the same) returns a function of those alone that were bound as a tensor or as Memory; each of
    its calls makes what was bound as New, and returns that: one tensor, or a tuple in the order of the
    arguments.  Memory bound in Parts counts where the first of them is.
    """

    bind: Callable[..., Callable[..., None]]
    making: Callable[..., Callable[..., Any]]

    def __call__(self, *arguments: Any, **named: Any) -> None: ...


def launcher(
    kernel: Any, *, tensors: int, descriptors: int = 0, tuples: Collection[str] = (), **given: Any
) -> Launcher:
    """A function launch(programs, *arguments, **constants_and_options) that does what
    kernel[(programs,)](*arguments, **constants_and_options) does.

    The kernel's first `descriptors` parameters take descriptors of ops/descriptors.py, the next
    `tensors` tensors or None, the others numbers and constants.  The launch is on the current stream of
    the device of the first tensor.  Arguments are passed by name or position, options (OPTIONS) by
    name; an option of None is one not given.

    tuples: parameters among the others that take a tuple of tensors, numbers, None and tuples, or None;
    not for `bind`, which keeps what it is given.
    given: constants and options that are the same at every launch, and not passed there.  A function
    with most of them given is a microsecond faster; keep one for each set of them.

    Triton's ordinary path is taken under the interpreter, the first time that arguments specialize
    the kernel in some way, and while a launch hook or an instrumentation of Triton is on.
    """
    compiles = isinstance(kernel, triton.runtime.JITFunction)
    if not compiles or not triton_entry.KNOWN:
        ordinary: Any = functools.partial(_launch_ordinarily, kernel, **given)
        at = Memory.at if compiles else Memory.tensor_at
        bind = functools.partial(_bind_ordinarily, ordinary, at, descriptors + tensors)
        ordinary.bind, ordinary.making = partial(bind, False), partial(bind, True)
        return cast(Launcher, ordinary)
    entries: dict[tuple[object, ...], triton_entry.Entry] = {}

    def launch_first(
        key: tuple[object, ...], programs: int, arguments: tuple[Any, ...], options: dict[str, Any]
    ) -> None:
        compiled = _launch_ordinarily(kernel, programs, *arguments, **options)
        if compiled is not None and not (triton_entry.hooked() or kernel.pre_run_hooks):
            entry = triton_entry.entry(compiled)
            if entry is not None:
                entries[key] = entry

    others = [p for p in kernel.params[descriptors + tensors :] if not p.is_constexpr]
    numbers = [p for p in others if p.name not in tuples]
    defaults = {p.name: p.default for p in kernel.params if p.has_default}
    names = {
        "_entries": entries,
        "_launch_first": launch_first,
        "_hooked": triton_entry.hooked,
        "_current_device": getattr(torch._C, "_cuda_getDevice", None),
        "_current_stream": getattr(torch._C, "_cuda_getCurrentRawStream", None),
        "_on": torch.cuda.device,
        "_device_count": torch.cuda.device_count,
        "_memory": memory,
        "_part": _part,
        "_specialization": functools.lru_cache(KEPT_NUMBERS, typed=True)(
            functools.partial(triton_entry.specialization, numbers)
        ),
        "_specialization_of_tuples": functools.partial(
            triton_entry.specialization, [p for p in others if p.name in tuples]
        ),
        **dict.fromkeys(OPTIONS),
        **{f"default_{name}": value for name, value in defaults.items()},
        **given,
    }
    source = _source(
        [p.name for p in kernel.params], descriptors, tensors, [p.name for p in numbers],
        [p.name for p in others if p.name in tuples], defaults.keys(), given.keys(),
    )  # fmt: skip
    exec(source.launch, names)
    binders: dict[tuple[bool, tuple[_Kind, ...]], Callable[..., Callable[..., Any]]] = {}

    def bind_own(making: bool, programs: int, *arguments: Any, **named: Any) -> Callable[..., Any]:
        kinds = _kinds(arguments[: descriptors + tensors])
        if (making, kinds) not in binders:
            exec(source.binder(kinds, making), names)
            binders[making, kinds] = names["bind"]
        return binders[making, kinds](programs, *arguments, **named)

    names["launch"].bind, names["launch"].making = partial(bind_own, False), partial(bind_own, True)
    return cast(Launcher, names["launch"])


class _Kind(NamedTuple):
    """What a descriptor or tensor was bound as: its type, but Tensor for a descriptor too, and of New
    and Part which of the memory that the launch makes it is in."""

    type: type
    made: int = -1


def _kinds(arguments: Sequence[Any]) -> tuple[_Kind, ...]:
    made: list[New] = []

    def kind(x: Any) -> _Kind:
        if x is None or isinstance(x, Memory):
            return _Kind(type(x))
        if not isinstance(x, (New, Part)):
            return _Kind(Tensor)
        new = x.new
        if not any(new is other for other in made):
            made.append(new)
        return _Kind(type(x), next(i for i, other in enumerate(made) if other is new))

    return tuple(map(kind, arguments))


def _bind_ordinarily(
    launch: Callable[..., None], at: Callable[[Memory, int], Memory | Tensor], count: int,
    making: bool, programs: int, *arguments: Any, **named: Any,
) -> Callable[..., Any]:  # fmt: skip
    kinds, others = _kinds(arguments[:count]), arguments[count:]
    bound_as: list[Any] = [
        None if kind.type is Tensor else x for kind, x in zip(kinds, arguments, strict=False)
    ]
    news = {kind.made: x.new for kind, x in zip(kinds, bound_as, strict=True) if kind.made >= 0}

    def bound(*given: Any) -> Any:
        made, rest = [new.make() for new in news.values()], iter(given)
        tensors: list[Any] = []
        for kind, x in zip(kinds, bound_as, strict=True):
            if kind.made >= 0:
                tensors.append(_part(made[kind.made], x))
            elif kind.type is NoneType and making:
                tensors.append(None)
            else:
                tensor = next(rest)
                tensors.append(tensor if x is None else at(x, tensor))
        launch(programs, *tensors, *others, **named)
        return made[0] if len(made) == 1 else tuple(made) if making else None

    return bound


def _part(made: Tensor, x: New | Part) -> Tensor:
    return made[x.elements :] if isinstance(x, Part) else made


def _launch_ordinarily(kernel: Any, programs: int, *arguments: Any, **named: Any) -> Any:
    """Triton's own way; returns the compiled kernel, or None."""
    options = {name: value for name, value in named.items() if not (name in OPTIONS and value is None)}
    return kernel[(programs,)](*arguments, **options)


class Launch(NamedTuple):
    """A launch that waits to be made; `arguments` begin with the tensors.

    words: the last of them, where programs exchange partial results (kernels/exchange.py), all zero.
    aligned: whether the kernel takes only rows that begin at multiples of 16 bytes.
    clears: whether it takes, behind words, those of the launch before to clear, or None as here.
    """

    launch: Callable[..., None]
    programs: int
    arguments: tuple[Any, ...]
    options: dict[str, Any]
    words: Tensor | None = None
    aligned: bool = False
    clears: bool = False

    def __call__(self) -> None:
        self.launch(self.programs, *self.arguments, **self.options)

    def bound(self, making: bool = False) -> Callable[..., Any]:
        """The launch as a function of its descriptors and tensors, but for words: a launch leaves its
        own behind, so that each has others, see words.py.  making: see Launcher."""
        launcher = cast(Launcher, self.launch)
        bind = partial(launcher.making if making else launcher.bind, self.programs, **self.options)
        bound = bind(*self.arguments)
        if self.words is None:
            return bound
        if not self.clears:
            return with_new(bound, self.words)
        at = next(i for i, x in enumerate(self.arguments) if x is self.words) + 1
        clearing = bind(*self.arguments[:at], self.words, *self.arguments[at + 1 :])
        return with_pairs(clearing, bound, self.words, *(() if making else (None,)))

    def bind(self, *tensors: Tensor | None, making: bool = False) -> Callable[..., Any] | None:
        """`bound`, if its first tensors are `tensors` or views of these; None if one is a copy."""
        for given, own in zip(tensors, self.arguments, strict=False):
            if given is not own and (
                given is None or own is None or given.data_ptr() != own.data_ptr()
            ):
                return None
        return self.bound(making)


class _Source(NamedTuple):
    """launch: source of the function that `launcher` returns, and of find, which returns what is kept
    for its arguments; binder(kinds, making): source of Launcher.bind, or of making, for descriptors and
    tensors of these kinds."""

    launch: str
    binder: Callable[[tuple[_Kind, ...], bool], str]


def _source(
    parameters: list[str], descriptors: int, tensors: int, numbers: list[str], tuples: list[str],
    defaults: Collection[str], given: Collection[str],
) -> _Source:  # fmt: skip
    """All that a launch knows of its arguments goes into the key of the compiled kernel: a descriptor's
    type, a tensor's dtype and its address modulo 16, Triton's own specialization of the numbers and of
    what is in tuples, and the constants and options themselves.
    """
    described, pointed = parameters[:descriptors], parameters[descriptors:][:tensors]
    rest = parameters[descriptors + tensors :]
    passed = [x for x in parameters if x not in given]
    options = [x for x in OPTIONS if x not in given]
    signature = [f"{x}=default_{x}" if x in defaults else x for x in passed]
    keywords = ["*", *(f"{x}=None" for x in options)] if options else []
    head = f"(_programs, {', '.join(signature + keywords)}):"
    again = f"(_programs, {', '.join(passed + [f'{x}={x}' for x in options])})"
    *others, last = described + pointed
    device = (
        f"{''.join(f'{x}.get_device() if {x} is not None else ' for x in others)}{last}.get_device()"
    )
    key = [
        "_device",
        *(f"{x}.type" for x in described),
        *(f"{x}_dtype" for x in pointed),
        f"_late and ({''.join(f'{x}_address & 15, ' for x in pointed)})",
        f"_specialization({', '.join(numbers)})",
        *(["_specialization_of_tuples(" + ", ".join(tuples) + ")"] if tuples else ()),
        *(x for x in passed if x in rest and x not in numbers and x not in tuples),
        *options,
    ]
    find = []
    for x in pointed:
        find += [
            f"    if {x} is None:",
            f"        {x}_dtype, {x}_address = None, 0",
            "    else:",
            f"        {x}_dtype, {x}_address = {x}.dtype, {x}.data_ptr()",
        ]
    find += [
        f"    _late = ({' | '.join(f'{x}_address' for x in pointed)}) & 15",
        f"    _key = ({', '.join(key)})",
        "    _entry = _entries.get(_key)",
    ]

    def run(address: Callable[[str], str], rest: list[str]) -> list[str]:
        encode = [
            f"    if {x}.encoded is None: {x}.encode(_descriptors[{i}])"
            for i, x in enumerate(described)
        ]
        handed = [f"*{x}.encoded" if triton_entry.DIRECT else x for x in described]
        handed += [*map(address, pointed), *rest]
        arguments = f"({', '.join(handed)},)" if triton_entry.PACKED else ", ".join(handed)
        return [
            *(encode if triton_entry.DIRECT else ()),
            f"    _run(_programs, 1, 1, _current_stream(_device), *_middle, {arguments})",
        ]

    def binder(kinds: tuple[_Kind, ...], making: bool) -> str:
        kind = dict(zip(described + pointed, kinds, strict=True))
        tensors = [x for x in pointed if kind[x].type is Tensor]
        memory = [x for x in pointed if kind[x].type is Memory]
        made = [x for x in pointed if kind[x].made >= 0]
        first = {kind[x].made: x for x in reversed(made)}  # of each memory that is made, in order
        news, of_new = sorted(first), first.items()
        result = ", ".join(f"_made{i}" for i in news)

        quick = "_memory.empty_strided_cuda(_shape{i}, _strides{i}, _dtype{i})"

        def address(x: str) -> str:
            if kind[x].type is NoneType:
                return "0"
            if kind[x].made < 0:
                return f"{x}_address"
            return f"_address{kind[x].made}" + (f" + _bytes_{x}" if kind[x].type is Part else "")

        taken = [x for x in described + pointed if x not in made]
        if making:
            taken = [x for x in taken if kind[x].type is not NoneType]
        names = ", ".join(taken)
        signature = ", ".join(f"{x}_address" if x in memory else x for x in taken)
        addresses = " | ".join(f"{x}_address" for x in tensors + memory)
        bound = [
            *(f"    {x}_address = {x}.data_ptr()" for x in tensors),
            f"    _late = ({addresses}) & 15",
            "    if _run is None or _late or _elsewhere and _device != _current_device() or _hooked():",
            f"        return _bound_first(_late, {signature})",
            *(f"    _made{i} = {quick.format(i=i)} if _quick{i} else _make{i}()" for i in news),
            *(f"    _address{i} = _made{i}.data_ptr()" for i in news),
            *run(address, ["*_rest"]),
            f"    return {result}",
        ]
        ordinary = [
            *(f"    {x} = None" for x in pointed if x not in taken and x not in made),
            *(f"    {x} = _bound_{x}.at({x})" for x in memory),
            *(f"    _made{i} = _make{i}()" for i in news),
            *(f"    {x} = _part(_made{kind[x].made}, _bound_{x})" for x in made),
            f"    launch{again}",
            "    if not _late:",
            f"        _run, _middle, _descriptors = find{again} or (None, None, None)",
            f"        _device = {device}",
            f"    return {result}",
        ]
        nonlocals = "    nonlocal _run, _middle, _descriptors, _device"
        return "\n".join(
            [
                f"def bind{head}",
                "    _run = _middle = _descriptors = _device = None",
                "    _elsewhere = _device_count() > 1",  # else no other device can be current
                f"    _rest = ({''.join(f'{x}, ' for x in rest)})",
                *(f"    _bound_{x} = {x}" for x in memory + made),
                *(f"    _bytes_{x} = {x}.bytes" for x in made if kind[x].type is Part),
                *(f"    _make{i} = {x}.new.make" for i, x in of_new),
                *(f"    _quick{i} = {x}.new.past_dispatcher" for i, x in of_new),
                *(f"    _shape{i}, _strides{i}, _dtype{i} = {x}.new.layout" for i, x in of_new),
                f"    def _bound_first(_late, {names}):",
                *(f"    {line}" for line in [nonlocals, *ordinary]),
                f"    def bound({signature}):",
                *(f"    {line}" for line in bound),
                "    return bound",
            ]
        )

    launch = [
        f"def launch{head}",
        f"    _device = {device}",
        "    if _device != _current_device():",
        "        with _on(_device):",
        f"            return launch{again}",
        *find,
        "    if _entry is None or _hooked():",
        f"        _options = dict({', '.join(f'{x}={x}' for x in OPTIONS)})",
        f"        return _launch_first(_key, _programs, ({', '.join(parameters)}), _options)",
        "    _run, _middle, _descriptors = _entry",
        *run("{}_address".format, rest),
        f"def find{head}",
        f"    _device = {device}",
        *find,
        "    return _entry",
    ]
    return _Source("\n".join(launch), binder)
