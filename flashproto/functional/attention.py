"""Attention: the public functions."""

from __future__ import annotations

import functools
from collections.abc import Hashable, Sequence

import torch
from torch import Tensor

# As it is before anybody puts flashproto's in its place.
from torch.nn.functional import scaled_dot_product_attention as torch_attention

from .. import backends, plans, reference
from ..checks import (
    check_attention,
    check_flag,
    check_head_counts,
    check_number,
    check_on,
    check_packed,
    check_scale,
    check_tensor,
    refuse,
)
from .autocast import autocast_low_precision

if backends.HAS_TRITON:
    from ..ops import attention as attention_op
    from ..ops import attention_qkv as attention_qkv_op
    from ..ops.launch import allows_tf32

SMALLEST_SCALE = torch.finfo(torch.float32).tiny


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
    if scale is not None and type(scale) is not float:  # True == 1.0, whose plan it would find
        scale = check_scale("attention", scale)
    key = None
    if plans.followed() and (starts := _starts(q, k, v)) is not None:
        kind = "attention", causal, scale, return_lse, impl, starts
        if (plan := plans.find(kind, (q, k, v))) is not None:
            return plan(q, k, v)
        key = plans.key(kind, (q, k, v))
    given, (q, k, v) = (q, k, v), autocast_low_precision(q, k, v)
    check_attention("attention", q, k, v)
    causal = check_flag("attention", "causal", causal)
    return_lse = check_flag("attention", "return_lse", return_lse)
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
    name = "attention_qkv"
    if scale is not None and type(scale) is not float:
        scale = check_scale(name, scale)
    if type(n_heads) is not int or type(n_kv_heads) is not int:
        n_heads, n_kv_heads = check_head_counts(name, n_heads, n_kv_heads)
    kind = name, n_heads, n_kv_heads, causal, scale, impl
    if (plan := plans.find(kind, (qkv,))) is not None:
        return plan(qkv)
    key = plans.key(kind, (qkv,))
    given, (qkv,) = qkv, autocast_low_precision(qkv)
    check_packed(name, qkv, n_heads, n_kv_heads)
    causal = check_flag(name, "causal", causal)
    q, k, v = reference.split_heads(qkv, n_heads, n_kv_heads)
    check_attention(name, q, k, v)
    check_scale(name, scale)
    backend = backends.choose(
        name, impl, q.device, lambda b: _attention_reasons(b, q, k, v, causal, 0, False)
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
        operator, impl, q.device, lambda b: _attention_reasons(b, q, k, v, causal, offset, return_lse)
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


def _attention_reasons(backend, q, k, v, causal, offset, return_lse) -> list[str]:
    if backend == "hopper":
        return hopper_attention_reasons(q, k, v)
    reasons = []
    if backend == "torch":
        if return_lse:
            reasons.append("torch's attention does not return lse")
        if causal and offset != 0:
            reasons.append(
                f"torch's is_causal is aligned top-left, this call has Sq = {q.shape[2]} and another Sk"
            )
        if q.numel() == 0 or v.numel() == 0:
            reasons.append("q or v is empty")
    elif backend == "triton":
        if q.dtype == torch.float64:
            reasons.append("dtype is float64; the kernels take float16, bfloat16 and float32")
        if max(q.shape[3], v.shape[3]) > 256:
            reasons.append(f"head_dim is {max(q.shape[3], v.shape[3])}; the kernels take up to 256")
    return reasons


def hopper_attention_reasons(q, k, v) -> list[str]:
    """What TMA and the tiles of kernels/hopper do not take."""
    compiling = torch.compiler.is_compiling()
    memory_reasons = _hopper_memory_reasons.__wrapped__ if compiling else _hopper_memory_reasons
    reasons = memory_reasons(
        q.dtype, q.shape, k.shape, v.shape, q.stride(), k.stride(), v.stride()
    )  # fmt: skip
    # torch.compile neither traces nor guards offsets; the launch copies what does not start right.
    if not compiling and (q.storage_offset() | k.storage_offset() | v.storage_offset()) % 8:
        late = [name for name, x in (("q", q), ("k", k), ("v", v)) if x.storage_offset() % 8]
        names = " and ".join(late)
        reasons = [*reasons, f"{names} does not start at a multiple of 16 bytes, as TMA wants"]
    return reasons


@functools.lru_cache(1024)
def _hopper_memory_reasons(dtype, q_shape, k_shape, v_shape, *strides) -> list[str]:
    """The part that follows from dtype, shapes and strides."""
    reasons = []
    D, Dv = q_shape[3], v_shape[3]
    if dtype not in (torch.bfloat16, torch.float16):
        return [f"dtype is {str(dtype)[6:]}; the kernels take bfloat16 and float16"]
    if Dv != D:
        reasons.append(f"q and k have head_dim {D} and v has {Dv}; the kernels take one for all")
    if D > 256 or D % 8:
        reasons.append(f"head_dim is {D}; the kernels take multiples of 8 up to 256")
    if 0 in q_shape or 0 in k_shape:
        reasons.append("q or k is empty")
    if k_shape[1] * D >= 2**25:
        reasons.append(f"{k_shape[1]} key heads of {D} are too many: a token's gradient passes 2^25")
    for name, shape, stride in zip("qkv", (q_shape, k_shape, v_shape), strides, strict=True):
        if stride[3] != 1:
            reasons.append(f"{name}'s last dimension has stride {stride[3]}; TMA takes 1")
        for dim in range(3):
            if shape[dim] > 1 and (stride[dim] <= 0 or stride[dim] % 8 or stride[dim] >= 2**39):
                reasons.append(
                    f"{name}'s stride {stride[dim]} of dimension {dim} is no positive multiple of 8 "
                    "elements (16 bytes) below 2^39; TMA takes no other"
                )
    return reasons


def _torch_attention(q, k, v, causal, scale):
    gqa = q.shape[1] != k.shape[1]
    q, scale = _with_positive_scale(q, scale)
    return torch_attention(q, k, v, is_causal=causal, scale=scale, enable_gqa=gqa)


def _with_positive_scale(q: Tensor, scale: float | None) -> tuple[Tensor, float | None]:
    """(q, scale) with the same scores: on a CPU torch multiplies the -inf of its causal mask by scale,
    in float32."""
    if scale is None or scale >= SMALLEST_SCALE:
        return q, scale
    return (-q, -scale) if scale <= -SMALLEST_SCALE else (q * scale, 1.0)


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
    for argument, x in (("query", query), ("key", key), ("value", value)):
        check_tensor(name, argument, x)
    if min(query.ndim, key.ndim, value.ndim) < 2:
        refuse(name, "query, key or value", "of fewer than 2 dimensions", "[..., L, E]", "Reshape it.")
    check_number(name, "dropout_p", dropout_p, 0, 1, "0 to 1", "Pass 0.0 for none.")
    is_causal = check_flag(name, "is_causal", is_causal)
    enable_gqa = check_flag(name, "enable_gqa", enable_gqa)
    scale = check_scale(name, scale)
    q, k, v = autocast_low_precision(query, key, value)
    q_heads, k_heads = (t.shape[-3] if t.ndim > 2 else 1 for t in (q, k))
    if not enable_gqa and q.ndim > 2 and k_heads not in (1, q_heads):
        refuse(
            name, "key", f"of {k_heads} heads", f"query's {q_heads} heads",
            "Pass enable_gqa=True when groups of query heads share a key head.",
        )  # fmt: skip
    lead = q.shape[:-3]
    for argument, x in (("key", k), ("value", v)):
        sizes = zip(lead[::-1], x.shape[:-3][::-1], strict=False)
        if any(a != b and a != 1 and b != 1 for a, b in sizes):
            refuse(
                name, argument, f"of shape {list(x.shape)}",
                f"leading dimensions that broadcast to {list(lead)}", "Expand it.",
            )  # fmt: skip
        lead = torch.broadcast_shapes(lead, x.shape[:-3])
    q, k, v = (_as_4d(t, lead, 1 if enable_gqa else q_heads) for t in (q, k, v))
    check_attention(name, q, k, v, ("query", "key", "value"))
    if attn_mask is not None:
        _check_mask(name, attn_mask, is_causal, q, k)
    if attn_mask is not None or dropout_p > 0.0:
        backends.choose(name, None, query.device, _mask_reasons)
        query, scale = _with_positive_scale(query, scale)
        return torch_attention(
            query, key, value, attn_mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa
        )
    out, _ = _attention(name, q, k, v, is_causal, 0, scale, False, None)
    shape = (*lead, *query.shape[-3:-1], out.shape[-1])
    return out.reshape(shape)


def _check_mask(operator: str, mask: Tensor, is_causal: bool, q: Tensor, k: Tensor) -> None:
    """A boolean or floating-point tensor for scores [..., Sq, Sk], not beside is_causal."""
    if not isinstance(mask, Tensor) or mask.dtype != torch.bool:
        check_tensor(operator, "attn_mask", mask)
    check_on(operator, "attn_mask", mask, q.device)
    L, S = q.shape[2], k.shape[2]
    if any(n not in (1, size) for n, size in zip(mask.shape[-2:][::-1], (S, L), strict=False)):
        refuse(
            operator, "attn_mask", f"of shape {list(mask.shape)}",
            f"a shape that broadcasts to [..., {L}, {S}]", "Pass a mask [L, S] of queries and keys.",
        )  # fmt: skip
    if is_causal:
        refuse(
            operator, "attn_mask", "given beside is_causal=True", "the place of is_causal",
            "Write the causal mask into attn_mask.",
        )  # fmt: skip


def _mask_reasons(backend: str) -> list[str]:
    return [] if backend == "torch" else ["attn_mask and dropout_p run on backend 'torch' only"]


def _as_4d(x: Tensor, lead: Sequence[int], heads: int) -> Tensor:
    """[..., S, D] to [B, H, S, D], leading dimensions broadcast to `lead`, one head to `heads`."""
    x = x if x.ndim > 2 else x[None]
    H = heads if x.shape[-3] == 1 else x.shape[-3]
    x = x.expand(*lead, H, *x.shape[-2:])
    return x[None] if len(lead) == 0 else x.flatten(0, len(lead) - 1)
