"""LayerNorm and RMSNorm into 8-bit floats with a scale for each row: the public functions."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from .. import backends, hooks, reference
from ..checks.calls import told
from ..checks.errors import described, refuse
from ..checks.options import check_eps
from ..checks.rows import check_casting
from .norm import Options, checked_shape, hook_reasons, in_reference

if backends.HAS_TRITON:
    from ..ops.hook_arguments import with_hooks
    from ..ops.norm import HookedSettings
    from ..ops.quantized_norm import quantized_norm


@told
def layer_norm_fp8(
    x: Tensor,
    normalized_shape: int | Sequence[int],
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float = 1e-5,
    *,
    residual: Tensor | None = None,
    dtype: torch.dtype = torch.float8_e4m3fn,
    casting: str = "torch",
    prologue: hooks.Call | None = None,
    epilogue: hooks.Call | None = None,
    impl: str | None = None,
) -> tuple[Tensor, Tensor] | tuple[Tensor, Tensor, Tensor]:
    """layer_norm(x), quantized with a scale for each row that is found in the same pass.

    Args:
        residual: of x's shape, added to x first, as in add_layer_norm.
        dtype: torch.float8_e4m3fn or torch.float8_e5m2.
        The others as layer_norm.

    Returns: (out, scale), or with a residual (out, scale, x + residual).  out has x's shape; scale,
    float32, has it with the normalized dimensions replaced by ones, so that out.float() * scale is y:
    that of every row is max |y| / torch.finfo(dtype).max, at least 2^-126, where y is not rounded
    before.  For a scale that is known beforehand: layer_norm with dtype=torch.float8_e4m3fn and
    epilogue=hooks.call("quantize_e4m3", scale), or the same of e5m2.
    Raises: TypeError, ValueError: an argument does not fit, or is differentiated, which out is not;
    BackendError: `impl` cannot run; the kernels need compute capability 8.9.
    Source: Micikevicius et al., "FP8 Formats for Deep Learning" (2022).

    Example:
        >>> x = torch.randn(4, 64)
        >>> out, scale = flashproto.layer_norm_fp8(x, 64)
        >>> out.dtype, scale.shape
        (torch.float8_e4m3fn, torch.Size([4, 1]))
        >>> torch.allclose(out.float() * scale, flashproto.layer_norm(x, 64), rtol=0.07, atol=1e-4)
        True
    """
    options = Options(casting, prologue, epilogue, dtype, False, False, impl)
    return _norm("layer_norm_fp8", x, residual, normalized_shape, weight, bias, eps, True, options)


@told
def rms_norm_fp8(
    x: Tensor,
    normalized_shape: int | Sequence[int],
    weight: Tensor | None = None,
    eps: float | None = None,
    *,
    bias: Tensor | None = None,
    residual: Tensor | None = None,
    dtype: torch.dtype = torch.float8_e4m3fn,
    casting: str = "torch",
    prologue: hooks.Call | None = None,
    epilogue: hooks.Call | None = None,
    impl: str | None = None,
) -> tuple[Tensor, Tensor] | tuple[Tensor, Tensor, Tensor]:
    """rms_norm(x), quantized with a scale for each row; otherwise as layer_norm_fp8.

    Example:
        >>> x, residual = torch.randn(4, 64), torch.randn(4, 64)
        >>> out, scale, total = flashproto.rms_norm_fp8(x, 64, residual=residual)
        >>> out.shape, scale.shape, torch.equal(total, x + residual)
        (torch.Size([4, 64]), torch.Size([4, 1]), True)
    """
    options = Options(casting, prologue, epilogue, dtype, False, False, impl)
    return _norm("rms_norm_fp8", x, residual, normalized_shape, weight, bias, eps, False, options)


def _norm(operator, x, residual, normalized_shape, weight, bias, eps, centered, options):
    casting, prologue, epilogue, dtype, *_, impl = options
    shape = checked_shape(operator, x, residual, normalized_shape, weight, bias)
    check_casting(operator, casting)
    tensors = [t for t in (x, weight, bias, residual) if t is not None]
    tensors += hooks.check_both(operator, prologue, epilogue, x)
    check_quantized(operator, dtype, tensors)
    eps = check_eps(operator, eps, x.dtype)
    facts = tensors, dtype, prologue, epilogue
    backend = backends.choose(operator, impl, tensors, lambda b: hook_reasons(b, *facts))
    if backend == "triton":
        operands, named = with_hooks(prologue, epilogue)
        how = len(shape), eps, centered, casting, False, dtype, False, *named
        returns = (0, 1) if residual is None else (0, 1, 2)
        return quantized_norm((x, residual, weight, bias, *operands), HookedSettings(*how), returns)
    parameters, compute = (shape, weight, bias, eps), reference.compute_dtype(x.dtype)
    y, total = in_reference(x, residual, parameters, centered, compute, options)
    results = reference.quantized(y, len(shape), dtype)
    return results if residual is None else (*results, total)


def check_quantized(operator: str, dtype: torch.dtype, tensors: Sequence[Tensor]) -> None:
    """A dtype of 8 bits, and no tensor that is differentiated."""
    if not isinstance(dtype, torch.dtype) or dtype not in hooks.FLOAT8:
        refuse(
            operator,
            "dtype",
            described(dtype),
            "torch.float8_e4m3fn or torch.float8_e5m2",
            "For wider ones call the norm without _fp8.",
            TypeError,
        )
    differentiated = torch.is_grad_enabled() and any(t.requires_grad for t in tensors)
    if differentiated or backends.has_tangents(tensors):
        refuse(
            operator,
            "an argument",
            "a tensor that is differentiated",
            "constants: it has no gradient",
            "Call it under torch.no_grad(), or pass tensors.detach().",
        )
