"""Whether values of tensors can be looked at without waiting for a GPU, and checks of them."""

from __future__ import annotations

import os

import torch
from torch import Tensor
from torch._C import _are_functorch_transforms_active as transforms_active
from torch._C import _dispatch_key_parse as key_named
from torch._C import _dispatch_tls_is_dispatch_key_included as key_is_on
from torch._C import _len_torch_dispatch_stack as dispatch_modes
from torch.compiler import is_compiling
from torch.nn import Parameter

from .errors import refuse

# Keys of torch's dispatcher that are on during make_fx(pre_dispatch=True), while torch.autograd takes
# gradients of a batch by its own vmap, and during torch.jit.trace.
PRE_DISPATCH, BATCHED_GRADIENTS, JIT_TRACE = map(key_named, ("PreDispatch", "VmapMode", "Tracer"))

# The checked mode: lengths and pages are looked at on a GPU too, which makes each call wait for it, and
# ranks compare their calls.
CHECKED = os.environ.get("FLASHPROTO_CHECKED", "0") == "1"


def watched() -> bool:
    """Whether something beside torch.compile and torch.func wants to see each call: a dispatch mode, or
    what has one of these keys."""
    return bool(
        dispatch_modes()
        or key_is_on(PRE_DISPATCH)
        or key_is_on(BATCHED_GRADIENTS)
        or key_is_on(JIT_TRACE)
    )


def is_readable(x: Tensor) -> bool:
    """Whether the values of x can be looked at for nothing: of a plain tensor on the CPU, where neither
    torch.compile, torch.func, a dispatch mode nor a trace sees it."""
    return not (
        is_compiling()
        or not x.is_cpu
        or (type(x) is not Tensor and type(x) is not Parameter)
        or transforms_active()
        or watched()
    )


def can_be_read(x: Tensor) -> bool:
    """Whether x's values may be looked at: for nothing, or in the checked mode at the price of waiting
    for the GPU."""
    if is_readable(x):
        return True
    if not CHECKED or is_compiling() or not x.is_cuda or type(x) is not Tensor or watched():
        return False
    return not transforms_active() and not torch.cuda.is_current_stream_capturing()


def check_values(operator: str, argument: str, x: Tensor, wrong: Tensor, takes: str, do: str) -> None:
    """Refuse elements of x where `wrong` is True; both can be read."""
    if wrong.any():
        where = wrong.nonzero()[0].tolist()
        at = f" at {where}" if where else ""
        refuse(operator, argument, f"{int(x[tuple(where)])}{at}", takes, do)
