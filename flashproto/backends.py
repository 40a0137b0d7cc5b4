"""Which implementation runs a call, why it was chosen, and why the others were not.

    hopper      kernels in Gluon for sm_90
    triton      portable Triton kernels, on a GPU or under Triton's interpreter (TRITON_INTERPRET=1)
    torch       PyTorch's own fused operators, where they compute the same thing
    reference   the plain definitions of flashproto.reference

impl=None takes the first of them, in this order, that can run the call.  impl="triton" (or the
environment variable FLASHPROTO_IMPL, or set_default) runs that one or raises BackendError with every
reason against it.  Nothing falls back silently.

A reason is a text, or a format and its arguments.  The text is made only for an error: in a traced
call, a size that is written down becomes fixed, and every other length would compile again.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import importlib.util
import logging
import os
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NoReturn, TypeVar

import torch
from torch import Tensor
from torch._C import _are_functorch_transforms_active as transforms_active
from torch._C import _functorch
from torch._C import _is_any_autocast_enabled as autocasts
from torch.autograd import forward_ad
from torch.nn import Parameter

from .checks.errors import described

__all__ = ["BACKENDS", "BackendError", "get_default", "set_default"]

BACKENDS = ("hopper", "triton", "torch", "reference")
HAS_TRITON = importlib.util.find_spec("triton") is not None
if HAS_TRITON and not os.path.isdir(os.path.join(os.path.dirname(__file__), "kernels")):
    raise ImportError(
        "flashproto/kernels is no link to the folder kernels/; git on Windows leaves a file there. "
        "Run: git config core.symlinks true && git checkout flashproto/kernels"
    )
INTERPRETED = os.environ.get("TRITON_INTERPRET", "0") == "1"
if HAS_TRITON and INTERPRETED and importlib.util.find_spec("numpy") is None:
    raise ImportError(
        "TRITON_INTERPRET is 1, and Triton's interpreter needs numpy, which is not installed. "
        "Run: pip install numpy, or unset TRITON_INTERPRET"
    )
MIN_CAPABILITY = (8, 0)
HOPPER_CAPABILITY = (9, 0)
KERNELS = ("hopper", "triton")

Reason = str | tuple[Any, ...]

_log = logging.getLogger("flashproto")
_logged: set[tuple[str, str, str | torch.device]] = set()
_default: str | None = os.environ.get("FLASHPROTO_IMPL") or None


class Watchers(threading.local):
    """Functions that are told of something that happens in this thread."""

    def __init__(self) -> None:
        self.all: list[Callable[..., None]] = []

    @contextlib.contextmanager
    def add(self, watcher: Callable[..., None]) -> Iterator[None]:
        self.all.append(watcher)
        try:
            yield
        finally:
            self.all.remove(watcher)


_choices = Watchers()

F = TypeVar("F", bound=Callable[..., object])


def constant_under_compile(function: F) -> F:
    """As torch.compiler.assume_constant_result, which would import the whole compiler to set a mark."""
    function._dynamo_marked_constant = True  # type: ignore[attr-defined]
    return function


class BackendError(RuntimeError):
    """The backend that was asked for by name cannot run this call.

    Example:
        >>> flashproto.softmax(torch.zeros(4), impl="hopper")
        Traceback (most recent call last):
            ...
        flashproto.backends.BackendError: softmax: backend 'hopper' cannot run this call: ...
    """


def set_default(impl: str | None) -> None:
    """Make `impl` the backend of every call that names none; None restores the automatic choice.

    Raises: ValueError: there is no backend of that name.

    Example:
        >>> backends.set_default("torch")
        >>> backends.get_default()
        'torch'
        >>> backends.set_default(None)
    """
    global _default
    _check_name(impl)
    _default = impl


def get_default() -> str | None:
    """The backend set by FLASHPROTO_IMPL or set_default, None while the choice is automatic.

    Example:
        >>> backends.get_default() in (None, *backends.BACKENDS)
        True
    """
    return _default


def is_any(impl: str | None) -> bool:
    """Whether no backend was asked for."""
    return impl is None and _default is None


def _check_name(impl: object, source: str = "impl") -> None:
    if impl is not None and not (isinstance(impl, str) and impl in BACKENDS):
        names, do = ", ".join(map(repr, BACKENDS)), "Pass impl=None to let flashproto choose."
        if source == "FLASHPROTO_IMPL":
            do = "Unset it to let flashproto choose."
        raise ValueError(f"{source} is {described(impl)}; it takes one of {names} or None. {do}")


@constant_under_compile
def device_reasons(backend: str, device: torch.device) -> tuple[str, ...]:
    """Why `backend` can run nothing at all on `device`; empty where it can."""
    if backend in ("torch", "reference"):
        return ()
    if not HAS_TRITON:
        return ("the package triton is not installed (pip install triton; Linux only)",)
    if backend == "hopper":
        return _hopper_device_reasons(device)
    if device.type == "cpu":
        if INTERPRETED:
            return ()
        return (
            "the tensors are on the CPU, where Triton runs only under its interpreter "
            "(set TRITON_INTERPRET=1 before Python starts)",
        )
    if device.type != "cuda":
        return (f"the tensors are on {device.type!r}; the kernels take cuda",)
    if torch.version.hip is not None:
        return ("the kernels are tested on NVIDIA GPUs only",)
    capability = capability_of(device)
    if capability is None:
        return ("there is no such GPU",)
    if capability < MIN_CAPABILITY:
        return (f"compute capability is {capability[0]}.{capability[1]}; the kernels need 8.0",)
    return ()


def capability_of(device: torch.device) -> tuple[int, int] | None:
    """None of a GPU that is not there, as that of a fake tensor need not be."""
    try:
        return torch.cuda.get_device_capability(device)
    except (AssertionError, RuntimeError):  # the former from torch without CUDA
        return None


def _hopper_device_reasons(device: torch.device) -> tuple[str, ...]:
    if device.type != "cuda" or torch.version.hip is not None:
        where = device.type if torch.version.hip is None else "rocm"
        return (f"the tensors are on {where!r}; the kernels take cuda, of compute capability 9.0",)
    capability = capability_of(device)
    if capability is None:
        return ("there is no such GPU",)
    if capability != HOPPER_CAPABILITY:
        return (f"compute capability is {capability[0]}.{capability[1]}; the kernels take 9.0 alone",)
    if INTERPRETED:
        return ("TRITON_INTERPRET is 1, and the interpreter does not run Gluon",)
    return _gluon_reasons()


@functools.cache
def _gluon_reasons() -> tuple[str, ...]:
    try:
        importlib.import_module(".kernels.hopper.gluon_names", __package__)
    except (ImportError, AttributeError) as missing:
        return (f"this version of triton lacks what the kernels need of Gluon ({missing})",)
    return ()


@functools.cache
def _usable(device: torch.device, interpreted: bool) -> tuple[str, ...]:
    """The backends that can run something on `device`, in the order of BACKENDS."""
    return tuple(b for b in BACKENDS if not device_reasons(b, device))


def misfit(tensors: Sequence[Tensor]) -> tuple[str, str] | None:
    """Why no kernel can run on `tensors`, whatever the operator, and what to do; None where one can.

    Fake and traced tensors fit: their calls go through the operators' fakes.
    """
    if has_tangents(tensors):
        why = "the kernels have no forward-mode derivative (jvp)"
        return why, "Pass impl='reference', which has one, or use reverse mode."
    if transforms_active():
        for transform in ("vmap", "functionalize"):
            if is_inside(transform):
                why = f"it is inside torch.func.{transform}, for which the kernels have no rule"
                return why, f"Call it outside of {transform}."
    if has_dtensors(tensors):
        return "a tensor is a DTensor, and the kernels know of no mesh", "Pass its .to_local()."
    return None


def has_dtensors(tensors: Sequence[Tensor]) -> bool:
    """Whether one of them is a DTensor, or wrapped around one by the transforms of torch.func."""
    if transforms_active() and not torch.compiler.is_compiling():
        tensors = [unwrapped(x) for x in tensors]
    return any(is_dtensor(x) for x in tensors)


def has_tangents(tensors: Sequence[Tensor]) -> bool:
    """Whether forward-mode differentiation concerns one of them; inside torch.func.jvp, and while
    torch.compile traces, whether it is on."""
    return forward_ad._current_level >= 0 and (
        torch.compiler.is_compiling()
        or is_inside("jvp")
        or any(forward_ad.unpack_dual(x).tangent is not None for x in tensors)
    )


@constant_under_compile
def is_inside(transform: str) -> bool:
    """Whether it is among the transforms of torch.func that are on."""
    levels = _functorch.get_interpreter_stack() or ()
    return any(level.key().name.lower() == transform for level in levels)


def unwrapped(x: Tensor) -> Tensor:
    """What the transforms of torch.func wrap."""
    while _functorch.is_functorch_wrapped_tensor(x):
        x = _functorch.get_unwrapped(x)
    return x


def is_dtensor(x: Tensor) -> bool:
    return type(x) is not Tensor and type(x) is not Parameter and _is_dtensor(type(x))


@constant_under_compile
def _is_dtensor(kind: type) -> bool:
    """By its name, since torch.distributed need not be imported, nor be there."""
    return any(
        base.__name__ == "DTensor" and base.__module__.startswith("torch.distributed.")
        for base in kind.__mro__
    )


def texts(reasons: Iterable[Reason]) -> list[str]:
    """Reasons as an error gives them."""
    return [reason if isinstance(reason, str) else reason[0].format(*reason[1:]) for reason in reasons]


def choose(
    operator: str,
    impl: str | None,
    tensors: Sequence[Tensor],
    call_reasons: Callable[[str], Iterable[Reason]],
) -> str:
    """The backend for one call of `operator` with `tensors`, all on the device of the first.

    call_reasons(backend) gives why that backend cannot run this particular call.  Only the first reason
    is asked for, except for an error's message.  Raises ValueError for an unknown name and BackendError
    when the backend asked for by name cannot run.
    """
    device = tensors[0].device
    compiling = torch.compiler.is_compiling()
    wanted = _default if impl is None else impl
    if wanted is not None:
        _check_name(wanted, f"{operator}: impl")
    unfit = misfit(tensors)
    for chosen in BACKENDS if wanted is None else (wanted,):
        if unfit is not None and chosen in KERNELS:
            continue
        if device_reasons(chosen, device) if compiling else chosen not in _usable(device, INTERPRETED):
            continue
        if not _any(call_reasons(chosen)):
            break
    else:
        assert wanted is not None  # the reference runs everything
        _raise(operator, wanted, impl is None, device, unfit, call_reasons)
    if not compiling and _choices.all:
        _tell(operator, chosen, device, unfit, call_reasons)
    if not compiling and (operator, chosen, device) not in _logged:
        _log_once(operator, chosen, device, wanted is None)
    return chosen


def _any(reasons: Iterable[Reason]) -> bool:
    for _ in reasons:
        return True
    return False


def _tell(
    operator: str,
    chosen: str,
    device: torch.device,
    unfit: tuple[str, str] | None,
    call_reasons: Callable[[str], Iterable[Reason]],
) -> None:
    """Tell the watchers of a choice, with the reasons against the other backends."""
    against = {}
    for backend in BACKENDS:
        if backend != chosen:
            misfits = [unfit[0]] if unfit is not None and backend in KERNELS else []
            reasons = [*misfits, *device_reasons(backend, device), *texts(call_reasons(backend))]
            earlier = BACKENDS.index(backend) < BACKENDS.index(chosen)
            why = f"{chosen!r} was asked for" if earlier else f"it comes behind {chosen!r}"
            against[backend] = reasons or [f"it can run this call, but {why}"]
    for watcher in _choices.all:
        watcher(operator, chosen, against)


def watch_choices(
    watcher: Callable[[str, str, dict[str, list[str]]], None],
) -> contextlib.AbstractContextManager[None]:
    """watcher(operator, chosen backend, reasons against each other one) at each choice meanwhile."""
    return _choices.add(watcher)


def _raise(
    operator: str,
    backend: str,
    by_default: bool,
    device: torch.device,
    unfit: tuple[str, str] | None,
    call_reasons: Callable[[str], Iterable[Reason]],
) -> NoReturn:
    """BackendError with every reason against `backend`, and one thing to do."""
    reasons: list[Reason] = [*device_reasons(backend, device), *call_reasons(backend)]
    do = "Pass impl=None to let flashproto choose, or see python -m flashproto.env."
    if by_default:
        do = "Call flashproto.backends.set_default(None) to let flashproto choose."
    if unfit is not None and backend in KERNELS:
        why, do = unfit
        reasons.insert(0, why)
    raise BackendError(
        f"{operator}: backend {backend!r} cannot run this call: {'; '.join(texts(reasons))}. {do}"
    )


def autocast_dtype(x: Tensor) -> torch.dtype | None:
    """What autocast converts to on x's device; None where it is off there, or there is none."""
    if not autocasts():
        return None
    device = x.device.type
    if not _has_autocast(device) or not torch.is_autocast_enabled(device):
        return None
    return torch.get_autocast_dtype(device)


@constant_under_compile
def _has_autocast(device: str) -> bool:
    return torch.amp.is_autocast_available(device)


def _log_once(operator: str, backend: str, device: torch.device, automatic: bool) -> None:
    if (operator, backend, device.type) not in _logged:
        how = "chosen automatically" if automatic else "as asked"
        _log.info("%s runs on backend %r for %s tensors (%s)", operator, backend, device.type, how)
    _logged.update([(operator, backend, device.type), (operator, backend, device)])


# --- reasons that operators share -----------------------------------------------------------------


def float64_reasons(backend: str, tensors: Sequence[Tensor]) -> Iterator[Reason]:
    """Reasons against a backend for an operator that has only portable kernels, without float64."""
    if backend == "hopper":
        yield "not written for this operator"
    if backend == "triton" and any(t.dtype is torch.float64 for t in tensors):
        yield "dtype is float64; the kernels take float16, bfloat16 and float32"


def refuses_values(impl: str | None, backend: str) -> bool:
    """Whether a call on the CPU refuses indices that are out of range.

    A backend that makes NaN of them does so on a CPU too, where it was asked for by name.
    """
    return backend == "torch" or (impl is None and get_default() is None)


_check_name(_default, "FLASHPROTO_IMPL")
