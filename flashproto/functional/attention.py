"""Attention: the public functions."""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from .. import backends, plans, reference
from ..backends import Reason
from ..checks import check_attention, check_packed, check_scale, refuse
from .autocast import autocast_low_precision

if backends.HAS_TRITON:
    from ..ops import attention as attention_op
    from ..ops import attention_qkv as attention_qkv_op
    from ..ops.launch import allows_tf32


def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    causal: bool = False,
    scale: float | None = None,
    return_lse: bool = False,
    impl: str | None = None,
) -> Tensor | tuple[Tensor, Tensor]:
    """softmax(scale * q k^T) v without ever writing the scores to memory.

    Args:
        q: [B, Hq, Sq, D], float16, bfloat16, float32 (float64 on the torch and reference backends),
            any strides.
        k: [B, Hkv, Sk, D]; Hkv divides Hq (GQA, MQA): query head h reads key head h // (Hq // Hkv).
        v: [B, Hkv, Sk, Dv]; Dv may differ from D.
        causal: query i sees key j only if j <= i + Sk - Sq, so that the last query sees every key
            (bottom-right alignment, as in flash-attn; torch's is_causal is top-left, see
            scaled_dot_product_attention).
        scale: multiplies the scores; 1 / sqrt(D) by default.
        return_lse: also return the rows' logsumexp.
        impl: the backend by name; None chooses.

    Returns:
        out [B, Hq, Sq, Dv] in q's dtype; with return_lse also lse [B, Hq, Sq], float32 (float64 for
        float64 inputs), natural logarithm.  Both are differentiable.  A query that sees no key gives
        0 and -inf.

    Raises:
        TypeError, ValueError: an argument does not fit; BackendError: `impl` cannot run this call.

    Source: Dao, "FlashAttention-2" (2023), algorithms 1 and 2; Milakov and Gimelshein (2018).
    """
    key = None
    if plans.followed() and (starts := _starts(q, k, v)) is not None:
        kind = "attention", bool(causal), scale, bool(return_lse), impl, starts
        if (plan := plans.find(kind, (q, k, v))) is not None:
            return plan(q, k, v)
        key = plans.key(kind, (q, k, v))
    given, (q, k, v) = (q, k, v), autocast_low_precision(q, k, v)
    check_attention("attention", q, k, v)
    offset = k.shape[2] - q.shape[2]
    out, lse = _attention("attention", q, k, v, causal, offset, scale, return_lse, impl, key, given)
    return (out, lse) if return_lse else out


def _starts(q: Tensor, k: Tensor, v: Tensor) -> tuple[Hashable, ...] | None:
    """What a plan follows from beside the tensors' metadata: where they start in their memory, modulo 8
    elements, and whether tf32 is allowed where it counts; None of what has no such memory."""
    try:
        starts = q.storage_offset() % 8, k.storage_offset() % 8, v.storage_offset() % 8
        return *starts, backends.HAS_TRITON and q.dtype is torch.float32 and allows_tf32()
    except (AttributeError, RuntimeError):  # what is no tensor, or sparse
        return None


def attention_qkv(
    qkv: Tensor,
    n_heads: int,
    n_kv_heads: int,
    *,
    causal: bool = False,
    scale: float | None = None,
    impl: str | None = None,
) -> Tensor:
    """attention on the heads of a fused projection, read where they are; the gradient of qkv is written
    once, where splitting would have three gradients put together.

    Args: qkv [B, S, (n_heads + 2 n_kv_heads) D], the heads of q, then k, then v; others as attention.
    Returns: out [B, n_heads, S, D], in memory [B, S, n_heads, D].  Errors as attention.
    """
    name, causal = "attention_qkv", bool(causal)
    kind = name, n_heads, n_kv_heads, causal, scale, impl
    if (plan := plans.find(kind, (qkv,))) is not None:
        return plan(qkv)
    key = plans.key(kind, (qkv,))
    given, (qkv,) = qkv, autocast_low_precision(qkv)
    check_packed(name, qkv, n_heads, n_kv_heads)
    q, k, v = reference.split_heads(qkv, n_heads, n_kv_heads)
    check_attention(name, q, k, v)
    check_scale(name, scale)
    backend = backends.choose(
        name, impl, (qkv,), lambda b: _attention_reasons(b, q, k, v, causal, 0, False)
    )
    scale = q.shape[3] ** -0.5 if scale is None else float(scale)
    if backend in ("hopper", "triton") and scale >= 0:
        arguments = (qkv, n_heads, n_kv_heads, causal, scale, backend)
        plans.keep(key, lambda: plans.after_casts(attention_qkv_op.plan(*arguments), [given], [qkv]))
        return attention_qkv_op.attention_qkv(*arguments)[0]
    return _attention(name, q, k, v, causal, 0, scale, False, backend)[0]


def _attention(operator, q, k, v, causal, offset, scale, return_lse, impl, key=None, given=()):
    """Dispatch attention with the causal mask j <= i + offset; returns (out, lse or None).

    key: under which to keep a plan, of the tensors that autocast made q, k and v from.
    """
    check_scale(operator, scale)
    backend = backends.choose(
        operator, impl, (q, k, v), lambda b: _attention_reasons(b, q, k, v, causal, offset, return_lse)
    )
    if backend == "torch":
        return _torch_attention(q, k, v, causal, scale), None
    if backend == "reference":
        return reference.attention(q, k, v, causal=causal, causal_offset=offset, scale=scale)
    scale = q.shape[3] ** -0.5 if scale is None else float(scale)
    arguments = (q, k, v, causal, offset, scale, backend)
    plans.keep(
        key, lambda: plans.after_casts(attention_op.plan(*arguments, return_lse), given, (q, k, v))
    )
    return attention_op.attention(*arguments)


def _attention_reasons(backend, q, k, v, causal, offset, return_lse) -> Iterator[Reason]:
    if backend == "hopper":
        yield from hopper_attention_reasons(q, k, v)
    elif backend == "torch":
        if return_lse:
            yield "torch's attention does not return lse"
        if causal and offset != 0:
            why = "torch's is_causal is aligned top-left, this call has Sq = {} and Sk = {}"
            yield why, q.shape[2], k.shape[2]
        if q.numel() == 0 or v.numel() == 0:
            yield "q or v is empty"
    elif backend == "triton":
        if q.dtype == torch.float64:
            yield "dtype is float64; the kernels take float16, bfloat16 and float32"
        if q.shape[3] > 256 or v.shape[3] > 256:
            yield "head_dim is {}; the kernels take up to 256", max(q.shape[3], v.shape[3])


def hopper_attention_reasons(q: Tensor, k: Tensor, v: Tensor) -> Iterator[Reason]:
    """What TMA and the tiles of kernels/hopper do not take."""
    D, Dv = q.shape[3], v.shape[3]
    if q.dtype not in (torch.bfloat16, torch.float16):
        yield f"dtype is {str(q.dtype)[6:]}; the kernels take bfloat16 and float16"
        return
    if Dv != D:
        yield "q and k have head_dim {} and v has {}; the kernels take one for all", D, Dv
    if D > 256 or D % 8:
        yield "head_dim is {}; the kernels take multiples of 8 up to 256", D
    if q.numel() == 0 or k.numel() == 0:
        yield "q or k is empty"
    if k.shape[1] * D >= 2**25:
        yield "{} key heads of {} are too many: a token's gradient passes 2^25", k.shape[1], D
    for name, x in (("q", q), ("k", k), ("v", v)):
        if x.stride(3) != 1:
            yield f"{name}'s last dimension has stride {{}}; TMA takes 1", x.stride(3)
        for dim in range(3):
            stride = x.stride(dim)
            if x.shape[dim] > 1 and (stride <= 0 or stride % 8 or stride >= 2**39):
                why = (
                    f"{name}'s stride {{}} of dimension {dim} is no positive multiple of 8 elements "
                    "(16 bytes) below 2^39; TMA takes no other"
                )
                yield why, stride
    # torch.compile neither traces nor guards offsets; the launch copies what does not start right.
    if not torch.compiler.is_compiling():
        late = [name for name, x in (("q", q), ("k", k), ("v", v)) if x.storage_offset() % 8]
        if late:
            yield f"{' and '.join(late)} does not start at a multiple of 16 bytes, as TMA wants"


def _torch_attention(q, k, v, causal, scale):
    gqa = True if q.shape[1] != k.shape[1] else False  # noqa: SIM210, a bool of sizes that are symbols
    return F.scaled_dot_product_attention(q, k, v, is_causal=causal, scale=scale, enable_gqa=gqa)


def scaled_dot_product_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """torch.nn.functional.scaled_dot_product_attention, on flashproto's kernels where they apply.

    Same signature and meaning: query [..., Hq, L, E], key [..., H, S, E], value [..., H, S, Ev], with
    broadcast leading dimensions; is_causal is aligned top-left (query i sees keys 0 to i), unlike
    attention(causal=True) when L != S.  attn_mask and dropout_p > 0 run on torch's own operator; where
    another backend was made the default by name they raise BackendError.

    Raises: TypeError, ValueError: an argument does not fit.
    """
    name = "scaled_dot_product_attention"
    if attn_mask is not None or dropout_p > 0.0:
        backends.choose(name, None, (query,), _mask_reasons)
        return F.scaled_dot_product_attention(
            query, key, value, attn_mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa
        )
    q, k, v = autocast_low_precision(query, key, value)
    if min(q.ndim, k.ndim, v.ndim) < 2:
        refuse(name, "query, key or value", "of fewer than 2 dimensions", "[..., L, E]", "Reshape it.")
    if not enable_gqa and q.ndim >= 3 and q.shape[-3] != k.shape[-3] and k.shape[-3] != 1:
        refuse(
            name, "key", f"of {k.shape[-3]} heads", f"query's {q.shape[-3]} heads",
            "Pass enable_gqa=True when groups of query heads share a key head.",
        )  # fmt: skip
    lead = torch.broadcast_shapes(q.shape[:-3], k.shape[:-3], v.shape[:-3])
    q, k, v = (
        _as_4d(t, lead, 1 if enable_gqa else q.shape[-3] if q.ndim > 2 else 1) for t in (q, k, v)
    )
    check_attention(name, q, k, v)
    out, _ = _attention(name, q, k, v, is_causal, 0, scale, False, None)
    shape = (*lead, *query.shape[-3:-1], out.shape[-1])
    return out.reshape(shape)


def _mask_reasons(backend: str) -> Iterator[Reason]:
    if backend != "torch":
        yield "attn_mask and dropout_p run on backend 'torch' only"


def _as_4d(x: Tensor, lead: Sequence[int], heads: int) -> Tensor:
    """[..., S, D] to [B, H, S, D], leading dimensions broadcast to `lead`, one head to `heads`."""
    x = x if x.ndim > 2 else x[None]
    H = heads if x.shape[-3] == 1 else x.shape[-3]
    x = x.expand(*lead, H, *x.shape[-2:])
    return x[None] if len(lead) == 0 else x.flatten(0, len(lead) - 1)
