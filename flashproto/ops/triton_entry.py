"""The inside of Triton that launch.py relies on, which differs between its versions: the entry point in
C of a compiled kernel, the order of its arguments, and how a tensor descriptor is handed over.

Tried with Triton 3.6 and 3.9; other versions are entered one layer further out, through the function
that Triton itself calls, whose arguments have not changed between the two.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import triton
from triton import knobs
from triton.backends.compiler import BaseBackend

try:
    from triton.runtime.jit import native_specialize_impl
except ImportError:
    native_specialize_impl = None

VERSION = tuple(map(int, triton.__version__.split(".")[:2]))
# Triton 3.9 has one entry point for all kernels, which takes a kernel's arguments as one tuple.
PACKED = VERSION == (3, 9)
DIRECT = PACKED or VERSION == (3, 6)
KNOWN = native_specialize_impl is not None  # else every launch takes Triton's own way


class Entry(NamedTuple):
    """A compiled kernel is launched by

        launch(programs, 1, 1, stream, *middle, *arguments), or with a tuple of them if PACKED

    descriptors: what Triton wants known to encode each tensor descriptor among the arguments; None
    where it encodes them itself.
    """

    launch: Callable[..., None]
    middle: tuple[Any, ...]
    descriptors: tuple[dict[str, Any], ...] | None


def specialization(parameters: Sequence[Any], *numbers: object) -> tuple[object, ...]:
    """What Triton compiles a kernel anew for: the type of a number, and of an integer whether it is 1
    or a multiple of 16, where its parameter does not say otherwise."""
    return tuple(
        native_specialize_impl(
            BaseBackend, number, False, not p.do_not_specialize, not p.do_not_specialize_on_alignment
        )
        for p, number in zip(parameters, numbers, strict=True)
    )


def hooked() -> bool:
    """Whether someone listens to launches, or wants kernels built in another way."""
    runtime = knobs.runtime
    return (
        runtime.launch_enter_hook.calls
        or runtime.launch_exit_hook.calls
        or runtime.debug
        or knobs.compilation.instrumentation_mode
    )


def entry(compiled: Any) -> Entry | None:
    """How to launch a compiled kernel that has run once; None where each launch needs more."""
    run = compiled.run
    if run.global_scratch_size or run.profile_scratch_size or getattr(run, "gsan_enabled", False):
        return None  # memory to be allocated for every launch
    function, packed_metadata, no_hooks = compiled.function, compiled.packed_metadata, (None,) * 3
    if not DIRECT:
        return Entry(run, (function, packed_metadata, *no_hooks), None)
    launch = run.launch
    if inspect.isfunction(launch):  # Triton's wrapper that encodes descriptors
        launch = inspect.getclosurevars(launch).nonlocals["launcher"]
    middle: list[Any] = [function, run.launch_cooperative_grid, run.launch_pdl]
    no_scratch = (None, None)
    if PACKED:
        middle += [packed_metadata, *no_hooks, *no_scratch, run.arg_annotations, run.kernel_signature]
    else:
        middle += [*no_scratch, packed_metadata, *no_hooks]
    return Entry(launch, tuple(middle), tuple(compiled.metadata.tensordesc_meta or ()))


def encode_descriptor(descriptor: Any, wanted: dict[str, Any]) -> tuple[Any, ...]:
    """What the entry point takes for a tensor descriptor: its CUtensorMap, then shape and strides."""
    from triton.backends.nvidia import driver

    nothing = (None,) if PACKED else ()
    return tuple(driver.make_tensordesc_arg(descriptor, wanted, *nothing))
