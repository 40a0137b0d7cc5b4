"""LayerNorm and RMSNorm, with and without a residual: the public functions."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

# As they are before anybody puts flashproto's in their place.
from torch import layer_norm as torch_layer_norm
from torch import rms_norm as torch_rms_norm

from .. import backends, hooks, reference
from ..backends import Reason, float64_reasons
from ..checks.errors import refuse
from ..checks.options import check_eps, check_flag
from ..checks.rows import as_shape, check_casting, check_norm
from .autocast import autocast_float32
from .cached import cached

if backends.HAS_TRITON:
    from ..ops import norm as norm_op
    from ..ops.hook_arguments import with_hooks


@cached
def layer_norm(
    x: Tensor,
    normalized_shape: int | Sequence[int],
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float = 1e-5,
    *,
    casting: str = "torch",
    prologue: hooks.Call | None = None,
    epilogue: hooks.Call | None = None,
    dtype: torch.dtype | None = None,
    memory_efficient: bool = False,
    split_rows: bool = False,
    impl: str | None = None,
) -> Tensor:
    """(x - mean) / sqrt(variance + eps) * weight + bias over the trailing `normalized_shape`.

    Args:
        x: [..., *normalized_shape], any floating dtype and strides; any width.
        normalized_shape: trailing dimensions to normalize over, an int for the last one.
        weight, bias: of shape normalized_shape, of any floating dtype, or None.
        eps: added to the (biased) variance.
        casting: how xhat = (x - mean) / sqrt(...) meets the weight: "torch" rounds nothing before the
            result, "llama" rounds xhat to x's dtype first, "gemma" multiplies by 1 + weight.
        prologue, epilogue: element-wise functions of x (before all else) and of y (after all else),
            fused into the kernel; made by flashproto.hooks.call.
        dtype: y's, x's by default; one of 8 bits is forward only.
        memory_efficient: keep y for the backward pass, not x or total, so that x may be freed, and y is
            kept but once where its consumer keeps it too.  The gradients then carry the rounding of y;
            they are right however small the weight is, since none counts as smaller than 2^-64.  Not
            with a bias, which takes digits of y away, nor with float16, which does not go down so far,
            nor with hooks, another dtype or split_rows.
        split_rows: split every row over several programs even where it fits one, so that a few rows (of
            one step of decoding, say) keep more of the GPU busy.  Off unless asked for, since it costs
            time where rows are many, and since the last bits are those of another order of summation;
            they depend on the row and its width alone either way.
        impl: the backend by name; None chooses.

    Returns: y of x's shape, computed in float32 (float64 for float64) and rounded once.
    Raises: TypeError, ValueError: an argument does not fit; BackendError: `impl` cannot run.
    Source: Ba, Kiros and Hinton, "Layer Normalization" (2016); Chan et al. (1979) for the moments.

    Example:
        >>> x, weight, bias = torch.randn(4, 64), torch.ones(64), torch.zeros(64)
        >>> y = flashproto.layer_norm(x, 64, weight, bias)
        >>> torch.allclose(y, torch.nn.functional.layer_norm(x, [64], weight, bias), atol=1e-5)
        True
    """
    options = Options(casting, prologue, epilogue, dtype, memory_efficient, split_rows, impl)
    return _norm("layer_norm", x, None, normalized_shape, weight, bias, eps, True, options)


@cached
def rms_norm(
    x: Tensor,
    normalized_shape: int | Sequence[int],
    weight: Tensor | None = None,
    eps: float | None = None,
    *,
    bias: Tensor | None = None,
    casting: str = "torch",
    prologue: hooks.Call | None = None,
    epilogue: hooks.Call | None = None,
    dtype: torch.dtype | None = None,
    memory_efficient: bool = False,
    split_rows: bool = False,
    impl: str | None = None,
) -> Tensor:
    """x / sqrt(mean(x^2) + eps) * weight + bias over the trailing `normalized_shape`.

    Arguments, result and errors as layer_norm; eps=None is torch.finfo(x.dtype).eps, as in torch.

    Source: Zhang and Sennrich, "Root Mean Square Layer Normalization" (2019).

    Example:
        >>> x, weight = torch.randn(4, 64), torch.ones(64)
        >>> y = flashproto.rms_norm(x, 64, weight, eps=1e-6, casting="llama")
        >>> torch.allclose(y, x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-6), atol=1e-5)
        True
    """
    options = Options(casting, prologue, epilogue, dtype, memory_efficient, split_rows, impl)
    return _norm("rms_norm", x, None, normalized_shape, weight, bias, eps, False, options)


@cached
def add_layer_norm(
    x: Tensor,
    residual: Tensor,
    normalized_shape: int | Sequence[int],
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float = 1e-5,
    *,
    casting: str = "torch",
    prologue: hooks.Call | None = None,
    epilogue: hooks.Call | None = None,
    dtype: torch.dtype | None = None,
    memory_efficient: bool = False,
    split_rows: bool = False,
    impl: str | None = None,
) -> tuple[Tensor, Tensor]:
    """layer_norm(x + residual) and the sum, in one pass.

    residual has x's shape and may have a wider dtype.  Returns (y in x's dtype, total in the wider of
    the two dtypes); the norm is that of the total as stored, so the pair equals the two operators one
    after the other; a prologue acts on x alone, before the sum, which is rounded once.  Arguments and
    errors otherwise as layer_norm.

    Example:
        >>> x, residual = torch.randn(4, 64), torch.randn(4, 64)
        >>> y, total = flashproto.add_layer_norm(x, residual, 64)
        >>> torch.equal(total, x + residual)
        True
        >>> torch.allclose(y, flashproto.layer_norm(total, 64), atol=1e-6)
        True
    """
    options = Options(casting, prologue, epilogue, dtype, memory_efficient, split_rows, impl)
    return _norm("add_layer_norm", x, residual, normalized_shape, weight, bias, eps, True, options)


@cached
def add_rms_norm(
    x: Tensor,
    residual: Tensor,
    normalized_shape: int | Sequence[int],
    weight: Tensor | None = None,
    eps: float | None = None,
    *,
    bias: Tensor | None = None,
    casting: str = "torch",
    prologue: hooks.Call | None = None,
    epilogue: hooks.Call | None = None,
    dtype: torch.dtype | None = None,
    memory_efficient: bool = False,
    split_rows: bool = False,
    impl: str | None = None,
) -> tuple[Tensor, Tensor]:
    """rms_norm(x + residual) and the sum, in one pass; otherwise as add_layer_norm.

    Example:
        >>> x, residual = torch.randn(4, 64, dtype=torch.bfloat16), torch.randn(4, 64)
        >>> y, total = flashproto.add_rms_norm(x, residual, 64)
        >>> y.dtype, total.dtype
        (torch.bfloat16, torch.float32)
    """
    options = Options(casting, prologue, epilogue, dtype, memory_efficient, split_rows, impl)
    return _norm("add_rms_norm", x, residual, normalized_shape, weight, bias, eps, False, options)


class Options(NamedTuple):
    """What all norms take by name, see layer_norm."""

    casting: str
    prologue: hooks.Call | None
    epilogue: hooks.Call | None
    dtype: torch.dtype | None
    memory_efficient: bool
    split_rows: bool
    impl: str | None


def _norm(operator, x, residual, normalized_shape, weight, bias, eps, centered, options):
    casting, prologue, epilogue, dtype, memory_efficient, split_rows, impl = options
    memory_efficient = check_flag(operator, "memory_efficient", memory_efficient)
    split_rows = check_flag(operator, "split_rows", split_rows)
    shape = checked_shape(operator, x, residual, normalized_shape, weight, bias)
    if dtype is not None:
        hooks.check_dtype(operator, dtype, ())
    aten = "layer_norm" if centered else "rms_norm"
    x, residual, weight, bias = autocast_float32(aten, x, residual, weight, bias)
    eps = check_eps(operator, eps, x.dtype)
    dtype = x.dtype if dtype is None else dtype
    hooked = prologue is not None or epilogue is not None or split_rows or dtype != x.dtype
    if memory_efficient:
        check_memory_efficient(operator, x, bias, hooked)
    check_casting(operator, casting)
    tensors = [t for t in (x, residual, weight, bias) if t is not None]
    tensors += hooks.check_both(operator, prologue, epilogue, x)
    hooks.check_dtype(operator, dtype, tensors)

    def reasons(backend: str) -> Iterator[Reason]:
        if hooked:
            return hook_reasons(backend, tensors, dtype, prologue, epilogue)
        return _reasons(backend, tensors, casting, memory_efficient)

    backend = backends.choose(operator, impl, tensors, reasons)
    if backend == "triton":
        inputs = x, residual, weight, bias
        how = len(shape), eps, centered, casting, memory_efficient
        returns = (0,) if residual is None else (0, 1)
        if not hooked:
            return norm_op.norm.bind(inputs, norm_op.Settings(*how), returns)
        operands, named = with_hooks(prologue, epilogue)
        settings = norm_op.HookedSettings(*how, dtype, split_rows, *named)
        # What is kept is found before a look at hooks, and at which gradients are wanted.
        at_once = prologue is not None or epilogue is not None or dtype in hooks.FLOAT8
        call = norm_op.hooked_norm if at_once else norm_op.hooked_norm.bind
        return call((*inputs, *operands), settings, returns)
    if backend == "torch":
        total = x if residual is None else x + residual
        y = _torch_norm(total, shape, weight, bias, eps, centered).to(x.dtype)
    else:
        if memory_efficient and weight is not None:
            weight, casting = reference.recoverable(weight, casting)
        parameters, options = (shape, weight, bias, eps), options._replace(casting=casting)
        y, total = in_reference(x, residual, parameters, centered, dtype, options)
    return y if residual is None else (y, total)


def checked_shape(operator, x, residual, normalized_shape, weight, bias) -> list[int]:
    """The sizes of the dimensions to normalize over, once tensors fit."""
    trailing = as_shape(operator, normalized_shape)
    shape = list(trailing) if isinstance(trailing, tuple) else [trailing]
    check_norm(operator, x, shape, weight, bias, residual)
    return list(x.shape[x.ndim - len(shape) :])  # of ints, where 64.0 was given


def in_reference(
    x: Tensor,
    residual: Tensor | None,
    parameters: tuple[Any, ...],
    centered: bool,
    dtype: torch.dtype,
    options: Options,
) -> tuple[Tensor, Tensor]:
    """(y in `dtype`, total) by the reference; parameters: shape, weight, bias, eps."""
    given: dict[str, Any] = {
        "centered": centered,
        "casting": options.casting,
        "dtype": dtype,
        "before": partial(hooks.define, options.prologue),
        "after": partial(hooks.define, options.epilogue),
    }
    if residual is None:
        return reference.norm(x, *parameters, **given), x
    return reference.add_norm(x, residual, *parameters, **given)


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
            operator,
            "bias",
            "given",
            "None where memory_efficient=True: it takes digits of y away",
            "Add the bias to the result, or to that of the linear layer behind it.",
        )
    if x.dtype == torch.float16:
        refuse(
            operator,
            "x",
            "of dtype torch.float16",
            "bfloat16 or float32 where memory_efficient=True, which need not drop small weights",
            "Convert it.",
            TypeError,
        )
    if more:
        refuse(
            operator,
            "memory_efficient",
            True,
            "False with a prologue, an epilogue, another dtype or split_rows",
            "Leave one of them out.",
        )


def hook_reasons(
    backend: str, tensors: Sequence[Tensor], dtype: torch.dtype, *calls: hooks.Call | None
) -> Iterator[Reason]:
    """Reasons against a backend for a norm with hooks whose result is of `dtype`."""
    if backend == "torch":
        yield "PyTorch's norms take no hooks and no dtype"
    if backend == "triton":
        yield from hooks.without_kernel(*calls)
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
