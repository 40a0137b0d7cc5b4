"""Which implementation runs a call, why it was chosen, and why the others were not.

    hopper      kernels in Gluon for sm_90
    triton      portable Triton kernels, on a GPU or under Triton's interpreter (TRITON_INTERPRET=1)
    torch       PyTorch's own fused operators, where they compute the same thing
    reference   the plain definitions of flashproto.reference

impl=None takes the first of them, in this order, that can run the call.  impl="triton" (or the
environment variable FLASHPROTO_IMPL, or set_default) runs that one or raises BackendError with every
reason against it.  Nothing falls back silently.
"""

from __future__ import annotations

import functools
import importlib
import importlib.util
import logging
import os
from collections.abc import Callable, Sequence
from typing import TypeVar

import torch

from .checks import described

BACKENDS = ("hopper", "triton", "torch", "reference")
HAS_TRITON = importlib.util.find_spec("triton") is not None
INTERPRETED = os.environ.get("TRITON_INTERPRET", "0") == "1"
MIN_CAPABILITY = (8, 0)
HOPPER_CAPABILITY = (9, 0)

_log = logging.getLogger("flashproto")
_logged: set[tuple[str, str, str | torch.device]] = set()
_default: str | None = os.environ.get("FLASHPROTO_IMPL") or None


F = TypeVar("F", bound=Callable[..., object])


def constant_under_compile(function: F) -> F:
    """torch.compiler.assume_constant_result, which would import the whole compiler to set this mark."""
    function._dynamo_marked_constant = True  # type: ignore[attr-defined]
    return function


class BackendError(RuntimeError):
    """The backend that was asked for by name cannot run this call."""


def set_default(impl: str | None) -> None:
    """Make `impl` the backend of every call that names none; None restores the automatic choice."""
    global _default
    _check_name(impl)
    _default = impl


def get_default() -> str | None:
    """The backend set by FLASHPROTO_IMPL or set_default, None while the choice is automatic."""
    return _default


def _check_name(impl: str | None, source: str = "impl") -> None:
    if impl is not None and impl not in BACKENDS:
        raise ValueError(
            f"{source} is {described(impl)}; it takes one of "
            f"{', '.join(map(repr, BACKENDS))} or None. Pass impl=None to let flashproto choose."
        )


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
    capability = torch.cuda.get_device_capability(device)
    if capability < MIN_CAPABILITY:
        return (f"compute capability is {capability[0]}.{capability[1]}; the kernels need 8.0",)
    return ()


def _hopper_device_reasons(device: torch.device) -> tuple[str, ...]:
    if device.type != "cuda" or torch.version.hip is not None:
        where = device.type if torch.version.hip is None else "rocm"
        return (f"the tensors are on {where!r}; the kernels take cuda, of compute capability 9.0",)
    capability = torch.cuda.get_device_capability(device)
    if capability != HOPPER_CAPABILITY:
        return (f"compute capability is {capability[0]}.{capability[1]}; the kernels take 9.0 alone",)
    if INTERPRETED:
        return ("TRITON_INTERPRET is 1, and the interpreter does not run Gluon",)
    return _gluon_reasons()


@functools.cache
def _gluon_reasons() -> tuple[str, ...]:
    try:
        importlib.import_module("flashproto.kernels.hopper.gluon_names")
    except (ImportError, AttributeError) as missing:
        return (f"this version of triton lacks what the kernels need of Gluon ({missing})",)
    return ()


@functools.cache
def _usable(device: torch.device, interpreted: bool) -> tuple[str, ...]:
    """The backends that can run something on `device`, in the order of BACKENDS."""
    return tuple(b for b in BACKENDS if not device_reasons(b, device))


def choose(
    operator: str,
    impl: str | None,
    device: torch.device,
    call_reasons: Callable[[str], Sequence[str]],
) -> str:
    """The backend for one call of `operator` on `device`.

    call_reasons(backend) lists why that backend cannot run this particular call.  Raises ValueError
    for an unknown name and BackendError when the backend asked for by name cannot run.
    """
    compiling = torch.compiler.is_compiling()
    wanted = _default if impl is None else impl
    if wanted is None:
        if compiling:
            return next(b for b in BACKENDS if not device_reasons(b, device) and not call_reasons(b))
        for chosen in _usable(device, INTERPRETED):
            if not call_reasons(chosen):
                break
    else:
        _check_name(wanted)
        chosen = wanted
        if compiling or chosen not in _usable(device, INTERPRETED) or call_reasons(chosen):
            reasons = [*device_reasons(chosen, device), *call_reasons(chosen)]
            if reasons:
                raise BackendError(
                    f"{operator}: backend {chosen!r} cannot run this call: {'; '.join(reasons)}. "
                    "Pass impl=None to let flashproto choose, or see python -m flashproto.env."
                )
    if not compiling and (operator, chosen, device) not in _logged:
        _log_once(operator, chosen, device, wanted is None)
    return chosen


def _log_once(operator: str, backend: str, device: torch.device, automatic: bool) -> None:
    if (operator, backend, device.type) not in _logged:
        how = "chosen automatically" if automatic else "as asked"
        _log.info("%s runs on backend %r for %s tensors (%s)", operator, backend, device.type, how)
    _logged.update([(operator, backend, device.type), (operator, backend, device)])


_check_name(_default, "FLASHPROTO_IMPL")
