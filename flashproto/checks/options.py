"""Checks of numbers, flags, names and dtypes."""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Hashable, Sequence
from numbers import Integral, Real
from typing import Any

import torch
from torch import Tensor
from torch._C import _dispatch_tls_is_dispatch_key_included as key_is_on
from torch.compiler import is_dynamo_compiling

from .errors import described, refuse
from .reading import JIT_TRACE
from .tensors import FLOATS

SCALARS = (int, float, torch.SymInt, torch.SymFloat)

LARGEST, SMALLEST = sys.float_info.max, math.ulp(0.0)  # of finite and of positive numbers


def is_integer(x: object) -> bool:
    """Whether x is an integer of Python, numpy or torch.compile; True and False are not."""
    return isinstance(x, (int, torch.SymInt, Integral)) and not isinstance(x, bool)


def is_number(x: object) -> bool:
    """Whether x is a real number of Python, numpy or torch.compile; True and False are not."""
    return (isinstance(x, (float, torch.SymFloat, Real)) and not isinstance(x, bool)) or is_integer(x)


def untraced(x: Any) -> Any:
    """x, as an integer where it is a size that torch.jit.trace has made a tensor."""
    return int(x) if isinstance(x, Tensor) and x.ndim == 0 and key_is_on(JIT_TRACE) else x


def fixed(x: Any) -> Any:
    """x as a number of Python's where it is one of numpy's or a symbol of torch.compile, which compiles
    anew for another number.

    A symbol would be fixed later, for the op that takes it, where AOTAutograd's cache does not see it
    and hands later calls the number of an earlier one (pytorch/pytorch#197889).
    """
    if not isinstance(x, SCALARS):
        return float(x)
    return torch.fx.experimental.symbolic_shapes.guard_scalar(x) if is_dynamo_compiling() else x


def check_number(
    operator: str, argument: str, x: Any, low: float, high: float, takes: str, do: str
) -> float:
    """x, a number from `low` to `high`, as `fixed` makes it."""
    if not is_number(x):
        refuse(operator, argument, described(x), takes, do, TypeError)
    number = x if isinstance(x, SCALARS) else float(x)  # numpy would make its own kind of low and high
    if not low <= number <= high:
        refuse(operator, argument, x, takes, do)
    return fixed(number)


def check_integer(
    operator: str, argument: str, x: Any, low: int, high: int, takes: str | Callable[[], str], do: str
) -> int:
    """x, an integer from `low` to `high`, as one of Python's where it is one of numpy's."""
    x = untraced(x)
    if not is_integer(x):
        refuse(operator, argument, described(x), takes, do, TypeError)
    if not low <= x <= high:
        refuse(operator, argument, x, takes, do)
    return x if isinstance(x, SCALARS) else int(x)  # type: ignore[return-value]


def check_flag(operator: str, argument: str, x: object) -> bool:
    """x as a bool: True or False, numpy's too, or a number that equals one of them."""
    if isinstance(x, (bool, torch.SymBool)):
        return x  # type: ignore[return-value]
    # Not a tensor: reading its value would wait for the GPU.
    if isinstance(x, Tensor) or not isinstance(x, Hashable) or x not in (0, 1):
        do = f"Pass {argument}=True."
        refuse(operator, argument, described(x), "True or False", do, TypeError)
    return bool(x)


def check_choice(operator: str, argument: str, x: object, choices: Sequence[str], do: str) -> None:
    """One of a few names."""
    if not isinstance(x, str) or x not in choices:
        takes = f"{', '.join(map(repr, choices[:-1]))} or {choices[-1]!r}"
        refuse(operator, argument, described(x), takes, do)


def check_dtype(operator: str, dtype: object) -> None:
    """The floating-point dtype of a result, or None."""
    if dtype is not None and not (isinstance(dtype, torch.dtype) and dtype in FLOATS):
        refuse(
            operator,
            "dtype",
            described(dtype),
            "torch.float16, bfloat16, float32, float64 or None",
            "Pass None for that of x.",
            TypeError,
        )


def check_scale(
    operator: str, scale: float | None, do: str = "Pass None for 1 / sqrt(head_dim)."
) -> float | None:
    """scale, a finite number or None."""
    if scale is None:
        return None
    takes = "a finite number, or None"
    return check_number(operator, "scale", scale, -LARGEST, LARGEST, takes, do)


def check_eps(operator: str, eps: float | None, dtype: torch.dtype) -> float:
    """eps, a finite number that is not negative; None is what torch's rms_norm takes for `dtype`."""
    if eps is None:
        return torch.finfo(dtype).eps
    takes, do = "a finite number, 0 or more", "Pass 1e-5, say."
    return float(check_number(operator, "eps", eps, 0, LARGEST, takes, do))
