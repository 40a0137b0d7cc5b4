"""What calls with tensors of equal metadata have in common, worked out once.

Which checks a call passes, its backend, its tiles and all numbers of its launch follow from its options
and from the dtypes, shapes, strides and device of its tensors, never from what is in them.  A plan is
what is left: a function of the tensors.  The public functions of small operators, where all that
would take longer than the kernel, look for a plan first; a call without one goes its usual way, and the
second one of its kind leaves a plan for the next.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import Any

import torch
from torch import Tensor
from torch._C import _are_functorch_transforms_active as transforms_active
from torch._C import _is_any_autocast_enabled as autocasts
from torch.autograd import forward_ad
from torch.compiler import is_compiling
from torch.nn import Parameter

from . import backends

KEPT = 4096  # of about 2 KiB each; a key holds no tensor, a plan none either

Plan = Callable[..., Any]
_plans: dict[Hashable, Plan | None] = {}  # None for a key seen once


def key(options: tuple[Hashable, ...], *tensors: Tensor | None) -> Hashable | None:
    """Under which a call's plan is kept.

    None for a call that follows no plan: while torch.compile traces it, under autocast, torch.func or
    forward-mode differentiation, and of arguments that are no plain strided tensors.
    """
    if is_compiling() or autocasts() or transforms_active() or forward_ad._current_level >= 0:
        return None
    found: list[Hashable] = [options, backends.get_default()]
    try:
        for x in tensors:
            if x is None:
                found.append(None)
            elif type(x) is Tensor or type(x) is Parameter:
                found += (x.dtype, x.shape, x.stride(), x.device)
            else:
                return None
    except RuntimeError:  # sparse ones have no strides
        return None
    return tuple(found)


def find(key: Hashable | None) -> Plan | None:
    """The plan kept under `key`."""
    return None if key is None else _plans.get(key)


def keep(key: Hashable | None, make: Callable[[], Plan]) -> None:
    """Keep the plan that make() returns, if a call under this key came before."""
    if key is not None:
        if len(_plans) >= KEPT:
            _plans.clear()
        _plans[key] = make() if key in _plans else None


def forget() -> None:
    """All plans; for who changes at run time what plans follow from, as tests do."""
    _plans.clear()


def maker(made: Tensor | None, x: Tensor) -> Callable[[Tensor], Any]:
    """A function of tensors like x that returns uninitialised memory like `made`, on x's device; None
    where `made` is None."""
    if made is None:
        return lambda x: None
    shape, strides, dtype, device = made.shape, made.stride(), made.dtype, made.device
    like = torch.empty_like(x)
    if (like.shape, like.stride(), like.dtype) == (shape, strides, dtype):
        return torch.empty_like
    return lambda x: torch.empty_strided(shape, strides, dtype=dtype, device=device)
