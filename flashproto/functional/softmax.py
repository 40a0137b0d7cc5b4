"""softmax, log_softmax, logsumexp and softmax_topk: the public functions."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

# As they are before anybody puts flashproto's in their place.
from torch import log_softmax as torch_log_softmax
from torch import logsumexp as torch_logsumexp
from torch import softmax as torch_softmax

from .. import backends, hooks, reference, softmax_hooks
from ..backends import Reason, float64_reasons
from ..checks.errors import refuse
from ..checks.options import check_dtype, check_flag, check_integer
from ..checks.rows import check_rows
from .autocast import autocast_float32
from .cached import cached

if backends.HAS_TRITON:
    from ..ops import softmax as softmax_op
    from ..ops import softmax_topk as topk_op
    from ..ops.hook_arguments import with_hooks


@cached
def softmax(
    x: Tensor,
    *,
    scale: float | None = None,
    mask: Tensor | None = None,
    causal: bool = False,
    prologue: hooks.Call | None = None,
    epilogue: hooks.Call | None = None,
    split_rows: bool = False,
    dtype: torch.dtype | None = None,
    impl: str | None = None,
) -> Tensor:
    """exp(s_i) / sum_j exp(s_j) over the last dimension, of any width; s is scale * x, masked.

    Args:
        x: [..., N], any floating dtype and strides.
        scale: multiplies x.
        mask: broadcasts to x.  Boolean: True where an element takes part.  Floating point: added to
            scale * x; differentiable.
        causal: of x [..., S, N], row i takes part up to column i + N - S (bottom-right alignment).
        prologue: an element-wise function of x instead of these three, fused into the kernel.
        epilogue: one of the result.  Both are made by flashproto.hooks.call.
        split_rows: split every row over several programs even where it fits one, so that a few rows (of
            one step of decoding, say) keep more of the GPU busy.  Off unless asked for, since it costs
            time where rows are many, and since the last bits are those of another order of summation;
            they depend on the row and its width alone either way.
        dtype: the result's dtype, to which x is converted first, as in torch.softmax; next to any of
            the above, x is not: the result is computed in float32 and rounded once.
        impl: the backend by name; None chooses.

    Returns: y of x's shape; NaN in a row whose scores are all -inf, as in torch.
    Raises: TypeError, ValueError: an argument does not fit; BackendError: `impl` cannot run.
    Source: Milakov and Gimelshein, "Online normalizer calculation for softmax" (2018).

    Example:
        >>> x = torch.randn(2, 4, 4)
        >>> torch.allclose(flashproto.softmax(x), torch.softmax(x, -1), atol=1e-6)
        True
        >>> flashproto.softmax(torch.zeros(2, 2), causal=True)
        tensor([[1.0000, 0.0000],
                [0.5000, 0.5000]])
    """
    return _with_options("softmax", x, scale, mask, causal, prologue, epilogue, split_rows, dtype, impl)


@cached
def log_softmax(
    x: Tensor,
    *,
    scale: float | None = None,
    mask: Tensor | None = None,
    causal: bool = False,
    prologue: hooks.Call | None = None,
    epilogue: hooks.Call | None = None,
    split_rows: bool = False,
    dtype: torch.dtype | None = None,
    impl: str | None = None,
) -> Tensor:
    """s - logsumexp(s) over the last dimension; arguments, result, errors and source as softmax.

    Example:
        >>> x = torch.randn(4, 50)
        >>> torch.allclose(flashproto.log_softmax(x), torch.log_softmax(x, -1), atol=1e-5)
        True
    """
    return _with_options(
        "log_softmax", x, scale, mask, causal, prologue, epilogue, split_rows, dtype, impl
    )


@cached
def logsumexp(x: Tensor, *, impl: str | None = None) -> Tensor:
    """log(sum(exp(x))) over the last dimension: [..., N] to [...], in x's dtype.

    -inf for a row that is all -inf or of no elements.  Arguments, errors and source: as softmax.

    Example:
        >>> x = torch.randn(4, 50)
        >>> torch.allclose(flashproto.logsumexp(x), torch.logsumexp(x, -1), atol=1e-5)
        True
    """
    return _softmax("logsumexp", x, None, impl)


@cached
def softmax_topk(
    x: Tensor,
    k: int,
    *,
    renormalize: bool = False,
    dtype: torch.dtype | None = None,
    impl: str | None = None,
) -> tuple[Tensor, Tensor]:
    """The k largest of softmax(x) over the last dimension, without writing the others.

    Args:
        x: [..., N], any floating dtype and strides.
        k: from 1 to N; the kernels take up to 64.
        renormalize: divide the k values by their sum, as gates of mixtures of experts do.
        dtype: that of the values, x's by default; computed in float32 at least either way.
        impl: the backend by name; None chooses.

    Returns: (values, indices), both [..., k]; values descending, indices int64.  Equal scores come in
    the order of their indices (but on backend "torch", where torch.topk decides).  In a row that holds
    a NaN or +inf, or nothing but -inf, all values are NaN, as those of torch.softmax are; the indices
    are still k different ones of the row.  The values are differentiable.
    Raises: TypeError, ValueError: an argument does not fit; BackendError: `impl` cannot run.
    Source: Milakov and Gimelshein, "Online normalizer calculation for softmax" (2018), section 4.

    Example:
        >>> router = torch.tensor([[1.0, 4.0, 2.0, 3.0]])
        >>> gates, experts = flashproto.softmax_topk(router, 2, renormalize=True)
        >>> experts
        tensor([[1, 3]])
        >>> torch.allclose(gates, torch.softmax(torch.tensor([[4.0, 3.0]]), -1))
        True
    """
    check_rows("softmax_topk", x)
    N = x.shape[-1]
    takes = lambda: f"1 to the width of x, {N}"  # noqa: E731
    k = check_integer("softmax_topk", "k", k, 1, N, takes, "Pass a smaller k.")
    renormalize = check_flag("softmax_topk", "renormalize", renormalize)
    check_dtype("softmax_topk", dtype)
    if dtype is None:
        dtype = _autocast_dtype("softmax", x)
    backend = backends.choose("softmax_topk", impl, [x], lambda b: _topk_reasons(b, x, k, dtype))
    if backend == "triton":
        settings = topk_op.Settings(k, renormalize, dtype)
        return topk_op.softmax_topk.bind((x,), settings, (0, 1))
    if backend == "reference":
        return reference.softmax_topk(x, k, renormalize, dtype)
    values, indices = torch_softmax(x, -1, dtype=reference.compute_dtype(x.dtype)).topk(k)
    return (values / values.sum(-1, keepdim=True) if renormalize else values).to(dtype), indices


def _topk_reasons(backend, x, k, dtype) -> Iterator[Reason]:
    yield from float64_reasons(backend, [x])
    if backend == "triton" and dtype == torch.float64 != x.dtype:
        yield "the values' dtype is float64; the kernels compute in float32"
    if backend == "triton" and k > topk_op.MAX_K:
        yield "k is {}; the kernels keep up to {}", k, topk_op.MAX_K


def _softmax(operator, x, dtype, impl):
    check_rows(operator, x)
    check_dtype(operator, dtype)
    if dtype is None:
        dtype = _autocast_dtype(operator, x)
    elif dtype != x.dtype and (dtype != torch.float32 or x.dtype == torch.float64):
        x = x.to(dtype)  # only float32 holds whatever 16 bits hold
    backend = backends.choose(operator, impl, [x], lambda b: float64_reasons(b, [x]))
    if backend == "triton":
        if operator == "logsumexp":
            return softmax_op.logsumexp.bind((x,), softmax_op.LogsumexpSettings(dtype))
        return softmax_op.softmax.bind((x,), softmax_op.Settings(operator == "log_softmax", dtype))
    if backend == "reference":
        return getattr(reference, operator)(x.to(dtype))
    if operator == "logsumexp":
        return torch_logsumexp(x.to(dtype), -1)
    return (torch_softmax if operator == "softmax" else torch_log_softmax)(x, -1, dtype=dtype)


def _autocast_dtype(operator: str, x: Tensor) -> torch.dtype:
    """float32 where autocast computes torch's operator of that name in it, else x's."""
    if not torch._C._is_any_autocast_enabled():
        return x.dtype
    aten_name = operator if operator == "logsumexp" else f"{operator}.int"
    (cast,) = autocast_float32(aten_name, x.new_empty(0))
    return x.dtype if cast is None else cast.dtype


def _with_options(operator, x, scale, mask, causal, prologue, epilogue, split_rows, dtype, impl):
    if causal is not False or split_rows is not False:
        causal = check_flag(operator, "causal", causal)
        split_rows = check_flag(operator, "split_rows", split_rows)
    hooked = scale is not None or mask is not None or causal or prologue is not None
    if not (hooked or epilogue is not None or split_rows):
        return _softmax(operator, x, dtype, impl)
    check_rows(operator, x)
    as_given = not causal and prologue is None and epilogue is None
    if prologue is None:
        prologue = softmax_hooks.scores(operator, x, scale, mask, causal)
    elif scale is not None or mask is not None or causal:
        refuse(
            operator,
            "prologue",
            "given beside scale, mask or causal",
            "the place of these three",
            "Write them into the prologue, or leave it out.",
        )
    tensors = [x, *hooks.check_both(operator, prologue, epilogue, x)]
    if dtype is None:
        dtype = _autocast_dtype(operator, x)
    hooks.check_dtype(operator, dtype, tensors)
    facts = tensors, dtype, prologue, epilogue
    backend = backends.choose(operator, impl, tensors, lambda b: _hook_reasons(b, *facts))
    if backend == "triton":
        operands, named = with_hooks(prologue, epilogue)
        log, op = operator == "log_softmax", softmax_op.hooked_softmax
        settings = softmax_op.HookedSettings(log, dtype, split_rows, *named)
        # A call that is kept takes the tensors of this function.
        return (op.bind if as_given else op)((x, *operands), settings)
    x = hooks.define(prologue, x.to(reference.compute_dtype(x.dtype)))
    return hooks.define(epilogue, getattr(reference, operator)(x)).to(dtype)


def _hook_reasons(backend, tensors, dtype, *calls) -> Iterator[Reason]:
    if backend == "torch":
        yield "PyTorch fuses neither scale and mask nor hooks into softmax, and splits no rows"
    if backend == "triton":
        yield from hooks.without_kernel(*calls)
    if backend == "triton" and dtype == torch.float64:
        yield "the result's dtype is float64; the kernels take float16, bfloat16 and float32"
    yield from float64_reasons(backend, tensors)
