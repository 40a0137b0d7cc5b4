"""Attention: the public functions."""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

# As it is before anybody puts flashproto's in its place.
from torch.nn.functional import scaled_dot_product_attention as torch_attention

from .. import backends, reference
from ..backends import KERNELS, Reason
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
from ..ops.attention_hopper_reasons import hopper_attention_reasons
from ..variant import Kind, Variant, pack, reasons
from .autocast import autocast_low_precision
from .cached import cached

if backends.HAS_TRITON:
    from ..ops import attention as attention_op

# Backend "hopper" takes tensors that start at multiples of 16 bytes.
by_alignment = functools.partial(cached, alignment=True)

SMALLEST_SCALE = torch.finfo(torch.float32).tiny


@by_alignment
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

    Example:
        >>> q, k, v = torch.randn(2, 4, 8, 16), torch.randn(2, 2, 8, 16), torch.randn(2, 2, 8, 16)
        >>> out, lse = flashproto.attention(q, k, v, causal=True, return_lse=True)
        >>> out.shape, lse.shape
        (torch.Size([2, 4, 8, 16]), torch.Size([2, 4, 8]))
    """
    q, k, v = autocast_low_precision(q, k, v)
    check_attention("attention", q, k, v)
    causal = check_flag("attention", "causal", causal)
    return_lse = check_flag("attention", "return_lse", return_lse)
    variant = Variant(Kind(CAUSAL=causal), k.shape[2] - q.shape[2])
    return _attention("attention", q, k, v, variant, scale, return_lse, impl, ready=True)


@by_alignment
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

    Example:
        >>> qkv = torch.randn(2, 8, (4 + 2 * 2) * 16)
        >>> flashproto.attention_qkv(qkv, 4, 2, causal=True).shape
        torch.Size([2, 4, 8, 16])
    """
    name = "attention_qkv"
    (qkv,) = autocast_low_precision(qkv)
    n_heads, n_kv_heads = check_head_counts(name, n_heads, n_kv_heads)
    check_packed(name, qkv, n_heads, n_kv_heads)
    causal = check_flag(name, "causal", causal)
    scale = check_scale(name, scale)
    q, k, v = reference.split_heads(qkv, n_heads, n_kv_heads)
    check_attention(name, q, k, v)
    variant = Variant(Kind(CAUSAL=causal))
    backend = backends.choose(
        name, impl, (qkv,), lambda b: _attention_reasons(b, variant, q, k, v, False)
    )
    if backend in KERNELS and (scale is None or scale >= 0):
        scale = q.shape[3] ** -0.5 if scale is None else float(scale)
        tensors, ints, floats, text = pack(variant)
        settings = attention_op.SettingsQkv(
            tuple(ints), tuple(floats), text, scale, backend, n_heads, n_kv_heads
        )
        return attention_op.attention_qkv.ready((qkv, *tensors), settings)
    out = _attention(name, q, k, v, variant, scale, False, backend)
    return out.transpose(1, 2).contiguous().transpose(1, 2)


def _attention(operator, q, k, v, variant, scale, return_lse, impl, *, ready=False):
    """attention by a backend; ready: as a call of q, k and v made ready, where kernels run it."""
    scale = check_scale(operator, scale)
    backend = backends.choose(
        operator, impl, (q, k, v), lambda b: _attention_reasons(b, variant, q, k, v, return_lse)
    )
    if backend == "torch":
        return _torch_attention(q, k, v, variant, scale)
    if backend == "reference":
        causal, offset = variant.kind.CAUSAL, variant.offset
        out, lse = reference.attention(q, k, v, causal=causal, causal_offset=offset, scale=scale)
        return (out, lse) if return_lse else out
    scale = q.shape[3] ** -0.5 if scale is None else float(scale)
    if scale < 0:
        q, scale, ready = -q, -scale, False
    tensors, ints, floats, text = pack(variant)
    settings = attention_op.Settings(tuple(ints), tuple(floats), text, scale, backend)
    run = attention_op.attention.ready if ready else attention_op.attention
    return run((q, k, v, *tensors), settings, (0, 1) if return_lse else (0,))


def _attention_reasons(backend, variant, q, k, v, return_lse) -> Iterator[Reason]:
    yield from reasons(backend, variant, q, k, v, return_lse)
    if backend == "torch" and backends.has_tangents((q, k, v)):
        yield "PyTorch's kernels of attention have no forward-mode derivative (jvp)"
    if backend == "hopper":
        yield from hopper_attention_reasons(q, k, v)


def _torch_attention(q, k, v, variant, scale):
    gqa = True if q.shape[1] != k.shape[1] else False  # noqa: SIM210, a bool of sizes that are symbols
    q, scale = _with_positive_scale(q, scale)
    return torch_attention(q, k, v, is_causal=variant.kind.CAUSAL, scale=scale, enable_gqa=gqa)


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

    Example:
        >>> q, k, v = (torch.randn(2, 4, 8, 16) for _ in range(3))
        >>> out = flashproto.scaled_dot_product_attention(q, k, v, is_causal=True)
        >>> expected = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        >>> torch.allclose(out, expected, atol=1e-5)
        True
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
        backends.choose(name, None, (query,), _mask_reasons)
        query, scale = _with_positive_scale(query, scale)
        return torch_attention(
            query, key, value, attn_mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa
        )
    variant = Variant(Kind(CAUSAL=is_causal))
    out = _attention(name, q, k, v, variant, scale, False, None)
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


def _mask_reasons(backend: str) -> Iterator[Reason]:
    if backend != "torch":
        yield "attn_mask and dropout_p run on backend 'torch' only"


def _as_4d(x: Tensor, lead: Sequence[int], heads: int) -> Tensor:
    """[..., S, D] to [B, H, S, D], leading dimensions broadcast to `lead`, one head to `heads`."""
    x = x if x.ndim > 2 else x[None]
    H = heads if x.shape[-3] == 1 else x.shape[-3]
    x = x.expand(*lead, H, *x.shape[-2:])
    return x[None] if len(lead) == 0 else x.flatten(0, len(lead) - 1)
