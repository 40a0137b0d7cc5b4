"""The backward of attention as a plain function, for who calls it without autograd: an operator that
PyTorch's dispatcher calls below it.  Its forward is attention or attention_varlen with return_lse."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor

from .. import backends, reference
from ..backends import KERNELS
from .attention import by_alignment
from .attention_request import Call, Request, attention_request

if backends.HAS_TRITON:
    from ..ops import attention as attention_op


@by_alignment
def attention_gradients(
    dout: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    cu_seqlens_q: Tensor | None = None,
    cu_seqlens_k: Tensor | None = None,
    *,
    causal: bool = False,
    window: Sequence[int | None] | None = None,
    scale: float | None = None,
    impl: str | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """dq, dk and dv of attention(q, k, v, ...), or with cu_seqlens of attention_varlen.

    Args:
        dout, out, lse: the gradient of out, and what the forward returned; a row of lse that is inf or
            -inf is that of a query without keys.
        q, k, v, cu_seqlens_q, cu_seqlens_k, causal, window, impl: the forward's, whose checks they have
            passed; scale: not negative.

    Returns: tensors of the shapes of q, k and v; dk and dv lie in memory as k does.  Autograd records
        nothing.
    """
    varlen = cu_seqlens_q is not None
    request = attention_request(
        "attention_gradients",
        *((x.transpose(0, 1)[None] for x in (q, k, v)) if varlen else (q, k, v)),
        inputs={"q": q, "k": k, "v": v},
        lengths=(0, 0) if varlen else None,
        causal=causal,
        window=window,
        scale=scale,
        return_lse=True,
        cu_seqlens_q=cu_seqlens_q,
        cu_seqlens_k=cu_seqlens_k,
    )
    backend = request.choose(impl)
    if backend not in KERNELS:
        return by_reference(request, dout, out, lse)
    tensors = (dout, q, k, v, out, lse, *request.variant.tensors.values())
    names = ("dout", "q", "k", "v", "out", "lse", *request.variant.tensors)
    call = Call(names, [x.dtype for x in tensors], by_kernels(request, backend))
    return call  # type: ignore[return-value]


def by_kernels(request: Request, backend: str) -> Callable[..., Callable[..., Any]]:
    """A Call's function of the gradient, q, k, v, out, lse and the variant's tensors."""
    operator, settings = request._settings(backend)
    needs = (*(True,) * 3, *(False,) * len(request.variant.tensors))
    without_keys = request.variant.kind.VARLEN or request.q.shape[2] > request.k.shape[2]

    def given(
        dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, *tensors: Tensor
    ) -> tuple[Tensor | None, ...]:
        if without_keys:  # some queries may be
            lse = lse.masked_fill(lse == math.inf, -math.inf)
        return attention_op.backward_inputs((dout, None, out, lse), q, k, v, tensors)

    def function(recording: bool, *tensors: Tensor) -> Callable[..., Any]:
        run = operator.run_backward(given(*tensors), settings, needs)
        return lambda *tensors: run(*given(*tensors))[:3]

    return function


def by_reference(
    request: Request, dout: Tensor, out: Tensor, lse: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    q, k, v, variant = request.q, request.k, request.v, request.variant
    varlen = variant.kind.VARLEN
    if varlen:
        dout, out, lse = dout.transpose(0, 1)[None], out.transpose(0, 1)[None], lse[None]
    dq, dk, dv = reference.attention_gradients(
        dout,
        q,
        k,
        v,
        out,
        lse,
        causal=variant.kind.CAUSAL,
        causal_offset=variant.offset,
        scale=request.scale,
        **variant.named,
    )
    if varlen:
        dq, dk, dv = (x[0].transpose(0, 1) for x in (dq, dk, dv))
    return dq, dk, dv
