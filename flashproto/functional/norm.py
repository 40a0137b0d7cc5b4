"""LayerNorm and RMSNorm, with and without a residual: the public functions."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any, TypedDict, Unpack

import torch
from torch import Tensor

# As they are before anybody puts flashproto's in their place.
from torch import layer_norm as torch_layer_norm
from torch import rms_norm as torch_rms_norm

from .. import backends, hooks, plans, reference
from ..backends import Reason
from ..checks import (
    as_shape,
    check_casting,
    check_eps,
    check_flag,
    check_known,
    check_norm,
    refuse,
)
from .autocast import autocast_float32
from .reasons import float64_reasons

if backends.HAS_TRITON:
    from ..ops import hooked_norm as hooked_norm_op
    from ..ops import memory_efficient_norm as memory_efficient_op
    from ..ops import norm_op as _  # noqa: F401, for compiled calls
    from ..ops import norm_plan
    from ..ops.norm import norm as kernel_norm


INT = (int, torch.SymInt)


class NormOptions(TypedDict, total=False):
    """What all norms take by name.

    casting: how xhat = (x - mean) / sqrt(...) meets the weight: "torch", the default, rounds nothing
        before the result, "llama" rounds xhat to x's dtype first, "gemma" multiplies by 1 + weight.
    prologue, epilogue: element-wise functions of x (before all else) and of y (after all else), fused
        into the kernel; made by flashproto.hooks.call.
    dtype: y's, x's by default; one of 8 bits is forward only.
    memory_efficient: keep y for the backward pass, not x or total, so that x may be freed, and y is
        kept but once where its consumer keeps it too.  The gradients then carry the rounding of y; they
        are right however small the weight is, since none counts as smaller than 2^-64.  Not with a
        bias, which takes digits of y away, nor with float16, which does not go down so far, nor with
        hooks, another dtype or split_rows.
    split_rows: split every row over several programs even where it fits one, so that a few rows (of one
        step of decoding, say) keep more of the GPU busy.  Off unless asked for, since it costs time
        where rows are many, and since the last bits are those of another order of summation; they
        depend on the row and its width alone either way.
    """

    casting: str
    prologue: hooks.Call | None
    epilogue: hooks.Call | None
    dtype: torch.dtype | None
    memory_efficient: bool
    split_rows: bool


OPTIONS = tuple(NormOptions.__annotations__)


def layer_norm(
    x: Tensor,
    normalized_shape: int | Sequence[int],
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float = 1e-5,
    *,
    impl: str | None = None,
    **options: Unpack[NormOptions],
) -> Tensor:
    """(x - mean) / sqrt(variance + eps) * weight + bias over the trailing `normalized_shape`.

    Args:
        x: [..., *normalized_shape], any floating dtype and strides; any width.
        normalized_shape: trailing dimensions to normalize over, an int for the last one.
        weight, bias: of shape normalized_shape, of any floating dtype, or None.
        eps: added to the (biased) variance.
        impl: the backend by name; None chooses.
        options: casting, prologue, epilogue, dtype, memory_efficient, split_rows: see NormOptions.

    Returns: y of x's shape, computed in float32 (float64 for float64) and rounded once.
    Raises: TypeError, ValueError: an argument does not fit; BackendError: `impl` cannot run.
    Source: Ba, Kiros and Hinton, "Layer Normalization" (2016); Chan et al. (1979) for the moments.
    """
    return _norm("layer_norm", x, None, normalized_shape, weight, bias, eps, True, impl, options)


def rms_norm(
    x: Tensor,
    normalized_shape: int | Sequence[int],
    weight: Tensor | None = None,
    eps: float | None = None,
    *,
    bias: Tensor | None = None,
    impl: str | None = None,
    **options: Unpack[NormOptions],
) -> Tensor:
    """x / sqrt(mean(x^2) + eps) * weight + bias over the trailing `normalized_shape`.

    Arguments, result and errors as layer_norm; eps=None is torch.finfo(x.dtype).eps, as in torch.
    Source: Zhang and Sennrich, "Root Mean Square Layer Normalization" (2019).
    """
    return _norm("rms_norm", x, None, normalized_shape, weight, bias, eps, False, impl, options)


def add_layer_norm(
    x: Tensor,
    residual: Tensor,
    normalized_shape: int | Sequence[int],
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float = 1e-5,
    *,
    impl: str | None = None,
    **options: Unpack[NormOptions],
) -> tuple[Tensor, Tensor]:
    """layer_norm(x + residual) and the sum, in one pass.

    residual has x's shape and may have a wider dtype.  Returns (y in x's dtype, total in the wider of
    the two dtypes); the norm is that of the total as stored, so the pair equals the two operators one
    after the other; a prologue acts on x alone, before the sum, which is rounded once.  Arguments and
    errors otherwise as layer_norm.
    """
    return _norm(
        "add_layer_norm", x, residual, normalized_shape, weight, bias, eps, True, impl, options
    )


def add_rms_norm(
    x: Tensor,
    residual: Tensor,
    normalized_shape: int | Sequence[int],
    weight: Tensor | None = None,
    eps: float | None = None,
    *,
    bias: Tensor | None = None,
    impl: str | None = None,
    **options: Unpack[NormOptions],
) -> tuple[Tensor, Tensor]:
    """rms_norm(x + residual) and the sum, in one pass; otherwise as add_layer_norm."""
    return _norm("add_rms_norm", x, residual, normalized_shape, weight, bias, eps, False, impl, options)


def _norm(
    operator, x, residual, normalized_shape, weight, bias, eps, centered, impl, options
):  # fmt: skip
    """A plan if there is one, before the options are looked at one by one."""
    if residual is None and weight is not None:  # as is usual: looking at all four takes twice as long
        tensors = (x, weight) if bias is None else (x, weight, bias)
    else:
        tensors = tuple(t for t in (x, residual, weight, bias) if t is not None)
    trailing = normalized_shape
    if type(trailing) is not int and type(trailing) is not tuple:
        trailing = as_shape(operator, trailing)
    if eps is not None and type(eps) is not float:  # True == 1.0, whose plan it would find
        check_eps(operator, eps)
    kind = operator, trailing, eps, weight is None, impl
    if options:
        kind += tuple(options.items())
    if (plan := plans.find(kind, tensors)) is not None:
        return plan(*tensors)
    check_known(operator, options, OPTIONS)
    return _norm_anew(
        operator, x, residual, trailing, weight, bias, eps, centered, impl, kind, tensors, **options
    )


def _norm_anew(
    operator, x, residual, trailing, weight, bias, eps, centered, impl, kind, tensors, *,
    casting="torch", prologue=None, epilogue=None, dtype=None, memory_efficient=False, split_rows=False,
):  # fmt: skip
    memory_efficient = check_flag(operator, "memory_efficient", memory_efficient)
    split_rows = check_flag(operator, "split_rows", split_rows)
    hooked = prologue is not None or epilogue is not None or split_rows
    plain = not hooked and dtype is None and not memory_efficient
    key = plans.key(kind, tensors) if plain else None
    shape = list(trailing) if isinstance(trailing, tuple) else [trailing]
    check_norm(operator, x, shape, weight, bias, residual, eps)
    shape = list(x.shape[x.ndim - len(shape) :])  # of ints, where 64.0 was given
    if dtype is not None:
        hooks.check_dtype(operator, dtype, ())
    aten = "layer_norm" if centered else "rms_norm"
    x, residual, weight, bias = autocast_float32(aten, x, residual, weight, bias)
    eps = torch.finfo(x.dtype).eps if eps is None else float(eps)
    given, tensors = tensors, [t for t in (x, residual, weight, bias) if t is not None]
    if memory_efficient:
        check_memory_efficient(operator, x, bias, hooked or dtype not in (None, x.dtype))
    elif hooked or dtype not in (None, x.dtype):
        return _hooked_norm(
            operator, x, residual, shape, weight, bias, eps, centered, impl, casting, split_rows,
            prologue, epilogue, x.dtype if dtype is None else dtype, tensors,
        )  # fmt: skip
    if casting != "torch":
        check_casting(operator, casting)
    backend = backends.choose(
        operator, impl, tensors, lambda b: _reasons(b, tensors, casting, memory_efficient)
    )
    if backend == "triton":
        if memory_efficient:
            return memory_efficient_op.memory_efficient_norm(
                x, residual, weight, len(shape), eps, centered, casting
            )
        arguments = (x, residual, weight, bias, len(shape), eps, centered, casting)
        plans.keep(key, lambda: plans.after_casts(norm_plan.plan(*arguments), given, tensors))
        return kernel_norm(*arguments)
    if backend == "torch":
        total = x if residual is None else x + residual
        y = _torch_norm(total, shape, weight, bias, eps, centered).to(x.dtype)
        return y if residual is None else (y, total)
    if memory_efficient and weight is not None:
        weight, casting = reference.recoverable(weight, casting)
    if residual is None:
        return reference.norm(x, shape, weight, bias, eps, centered=centered, casting=casting)
    return reference.add_norm(x, residual, shape, weight, bias, eps, centered=centered, casting=casting)


def _reasons(
    backend: str, tensors: Sequence[Tensor], casting: str, memory_efficient: bool
) -> Iterator[Reason]:
    if backend == "torch" and casting != "torch":
        yield f"PyTorch's norms have no casting {casting!r}"
    if backend == "torch" and memory_efficient:
        yield "PyTorch's norms keep their input"
    yield from float64_reasons(backend, tensors)


def check_memory_efficient(operator: str, x: Tensor, bias: Tensor | None, more: bool) -> None:
    """What a norm that keeps its output for the backward pass cannot get its input back from."""
    if bias is not None:
        refuse(
            operator, "bias", "given", "None where memory_efficient=True: it takes digits of y away",
            "Add the bias to the result, or to that of the linear layer behind it.",
        )  # fmt: skip
    if x.dtype == torch.float16:
        refuse(
            operator, "x", "of dtype torch.float16",
            "bfloat16 or float32 where memory_efficient=True, which need not drop small weights",
            "Convert it.", TypeError,
        )  # fmt: skip
    if more:
        refuse(
            operator, "memory_efficient", True,
            "False with a prologue, an epilogue, another dtype or split_rows", "Leave one of them out.",
        )  # fmt: skip


def _hooked_norm(
    operator, x, residual, shape, weight, bias, eps, centered, impl, casting, split_rows,
    prologue, epilogue, dtype, tensors,
):  # fmt: skip
    check_casting(operator, casting)
    for argument, made in (("prologue", prologue), ("epilogue", epilogue)):
        hooks.check(operator, argument, made, x)
        tensors = [*tensors, *(() if made is None else made.operands)]
    hooks.check_dtype(operator, dtype, tensors)
    backend = backends.choose(operator, impl, tensors, lambda b: hook_reasons(b, tensors, dtype))
    if backend == "triton":
        return hooked_norm_op.hooked_norm(
            x, residual, weight, bias, len(shape), eps, centered, casting, dtype, split_rows,
            prologue, epilogue,
        )  # fmt: skip
    options: dict[str, Any] = {
        "centered": centered, "casting": casting, "dtype": dtype,
        "before": partial(hooks.define, prologue), "after": partial(hooks.define, epilogue),
    }  # fmt: skip
    if residual is None:
        return reference.norm(x, shape, weight, bias, eps, **options)
    return reference.add_norm(x, residual, shape, weight, bias, eps, **options)


def hook_reasons(backend: str, tensors: Sequence[Tensor], dtype: torch.dtype) -> Iterator[Reason]:
    """Reasons against a backend for a norm with hooks whose result is of `dtype`."""
    if backend == "torch":
        yield "PyTorch's norms take no hooks and no dtype"
    device = tensors[0].device
    if backend == "triton" and dtype.itemsize == 1 and device.type == "cuda":
        capability = backends.capability_of(device)
        if capability is not None and capability < (8, 9):
            yield f"compute capability is {capability[0]}.{capability[1]}; 8-bit floats need 8.9"
    yield from float64_reasons(backend, tensors)


def _torch_norm(x, shape, weight, bias, eps, centered):
    if any(t is not None and t.dtype != x.dtype for t in (weight, bias)):
        dtype = reference.compute_dtype(x.dtype)
        x, weight, bias = (None if t is None else t.to(dtype) for t in (x, weight, bias))
    if centered:
        return torch_layer_norm(x, shape, weight, bias, eps)
    y = torch_rms_norm(x, shape, weight, eps)
    return y if bias is None else y + bias
