"""Everything private of torch and Triton that the quick path of a call relies on.

It differs between versions.  TRIED names those it was tried with, 3.8 and 2.14 only on a CPU.  With any
other torch, calls are found by their key alone; with any other Triton, every launch is Triton's own.
"""

from __future__ import annotations

import inspect
import sys
import warnings
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
import triton
from torch import _C
from torch._C import _are_functorch_transforms_active as transforms_active  # noqa: F401
from torch._C import _get_deterministic_algorithms as deterministic  # noqa: F401
from torch._C._dynamo import guards
from torch._C._functorch import is_legacy_batchedtensor as is_batched
from torch._library.autograd import make_autograd_impl
from torch._library.utils import get_layout_constraint_tag
from torch.autograd import forward_ad
from torch.compiler import is_dynamo_compiling
from triton import knobs

from ..checks.reading import (  # noqa: F401, private of torch too, and asked where triton is not installed
    BATCHED_GRADIENTS,
    PRE_DISPATCH,
    dispatch_modes,
    key_is_on,
    watched,
)

# --- torch ------------------------------------------------------------------------------------------

TORCH = tuple(map(int, torch.__version__.split(".")[:2]))
TRIED = {"torch": ((2, 11), (2, 13), (2, 14)), "triton": ((3, 6), (3, 8), (3, 9))}

# Looks in one call whether tensors have the metadata of others, which in Python takes three times as
# long.  torch.compile checks arguments with it.  It takes its own arguments on trust.
TensorGuards: Any = getattr(guards, "TensorGuards", None)
GUARDED = TORCH in TRIED["torch"] and TensorGuards is not None

# A torch without CUDA has no such functions, or none that work.
current_device: Any = getattr(_C, "_cuda_getDevice", None)
current_stream: Any = getattr(_C, "_cuda_getCurrentRawStream", None)
# Memory asked for where compiled code asks, past the dispatcher, on the current GPU.
empty_strided_cuda: Any = getattr(guards, "_empty_strided_cuda", None)
_capturing: Any = getattr(_C, "_cuda_isCurrentStreamCapturing", None)
_precision: Any = getattr(_C, "_get_fp32_precision_getter", None)

DEVICES = _C.DispatchKey.CPU, _C.DispatchKey.CUDA

# Before 2.13, Inductor writes down the arguments of an op that it meets for the first time, for a log
# that is seldom on (pytorch/pytorch#185937): all that they are computed from, and twice what is used
# twice.  For a 12-layer GPT this never finishes.
WRITES_ARGUMENTS = TORCH < (2, 13)


def is_capturing() -> bool:
    """Whether a CUDA graph captures what the current stream is given."""
    return torch.cuda.is_initialized() and bool(_capturing())


def several_devices() -> bool:
    """Whether another GPU than a tensor's can be the current one."""
    return torch.cuda.device_count() > 1


def allows_tf32() -> bool:
    """Whether the user allowed tf32 products through torch's own switch."""
    if _precision is not None:
        return _precision("cuda", "matmul") == "tf32"
    return torch.backends.cuda.matmul.fp32_precision == "tf32"


def in_backward() -> bool:
    """Whether autograd runs a backward pass in this thread."""
    return _C._current_graph_task_id() != -1


def forward_mode() -> bool:
    """Whether a level of forward-mode differentiation is open."""
    return forward_ad._current_level >= 0


def has_tangent(x: object) -> bool:
    if isinstance(x, (list, tuple)):
        return any(map(has_tangent, x))
    return isinstance(x, torch.Tensor) and forward_ad.unpack_dual(x).tangent is not None


def one_by_one(function: Callable[..., tuple[Any, ...]], tensors: Sequence[Any]) -> tuple[Any, ...]:
    """function(*tensors), some tensors, where torch.autograd takes gradients of a batch by its own vmap
    (is_grads_batched, jacobian(vectorize=True)): of one gradient after another."""
    batched = [] if is_dynamo_compiling() else [x for x in tensors if x is not None and is_batched(x)]
    if not batched:
        return function(*tensors)
    # The innermost of the vmaps, which a thread of autograd's own does not know: a tensor that is not
    # of a vmap is expanded to the number of rows that is asked for, here none.
    level = max(
        level
        for level in range(1, 65)
        if any(len(torch._remove_batch_dim(x, level, 0, 0)) for x in batched)
    )
    # [n, ...] each, or [1, ...] of those that this vmap has no batch of.
    batches = [None if x is None else torch._remove_batch_dim(x, level, 1, 0) for x in tensors]
    n = max(len(x) for x in batches if x is not None)
    rows = ([x if x is None else x[i if len(x) > 1 else 0] for x in batches] for i in range(n))
    columns = zip(*(one_by_one(function, row) for row in rows), strict=True)
    return tuple(
        None if x[0] is None else torch._add_batch_dim(torch.stack(x), 0, level) for x in columns
    )


def recorder(function: type[torch.autograd.Function]) -> Callable[..., Any]:
    """apply of a Function whose forward takes ctx, where no transform of torch.func is active: what
    torch's own ends in, which takes 15 microseconds to bind the arguments to forward's signature."""
    return super(torch.autograd.Function, function).apply  # type: ignore[misc]


def goes_straight(keyset: _C.DispatchKeySet) -> bool:
    """Whether behind autograd a call would come to the kernel of a device at once: nothing in between,
    as a mode, a subclass of Tensor, a transform of torch.func or a trace, wants to see it."""
    return (keyset & _C._after_ADInplaceOrView_keyset).highestPriorityTypeId() in DEVICES


def autograd_of(op: torch.library.CustomOpDef) -> Callable[..., Any]:
    """What torch.library puts under the key Autograd for an op."""
    return make_autograd_impl(op._opoverload, op)


def override_autograd(op: torch.library.CustomOpDef, function: Callable[..., Any]) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the override is meant
        op._lib.impl(op._name, function, "Autograd", with_keyset=True, allow_override=True)


def tell_inductor(op: torch.library.CustomOpDef) -> None:
    """Make Inductor call the op as it does by itself once it has met it; nothing where it is not
    loaded, as it is by the time that AOTAutograd, before it, asks for fakes."""
    lowering: Any = sys.modules.get("torch._inductor.lowering") if WRITES_ARGUMENTS else None
    if lowering is not None and op._opoverload not in lowering.lowerings:
        constraint = lowering.tag_to_layout_constraint(get_layout_constraint_tag(op._opoverload))
        lowering.make_fallback(op._opoverload, layout_constraint=constraint, warn=False)


# --- Triton -----------------------------------------------------------------------------------------

VERSION = tuple(map(int, triton.__version__.split(".")[:2]))
# Triton 3.9 has one entry point for all kernels, which takes a kernel's arguments as one tuple.
PACKED = VERSION == (3, 9)
# Whether kernels are entered in C, tensor descriptors encoded; else Triton's Python does that.
DIRECT = PACKED or VERSION == (3, 6)


def has_entry(kernel: Any) -> bool:
    """Whether a kernel is compiled, and its compiled form can be entered."""
    return isinstance(kernel, triton.runtime.JITFunction) and VERSION in TRIED["triton"]


class Entry(NamedTuple):
    """A compiled kernel is launched by

        launch(programs, 1, 1, stream, *middle, *arguments), or with a tuple of them if PACKED

    descriptors: what Triton wants known to encode each tensor descriptor among the arguments; None
    where it encodes them itself.
    """

    launch: Callable[..., None]
    middle: tuple[Any, ...]
    descriptors: tuple[dict[str, Any], ...] | None


def hooked() -> bool:
    """Whether someone listens to launches, or wants kernels built in another way."""
    runtime = knobs.runtime
    return bool(
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
