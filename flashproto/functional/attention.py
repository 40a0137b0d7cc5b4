"""Attention: the public functions."""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

# As it is before anybody puts flashproto's in its place.
from torch.nn.functional import scaled_dot_product_attention as torch_attention

from .. import backends, masks, reference
from ..backends import KERNELS, Reason
from ..checks import (
    check_attention,
    check_aux,
    check_by_head,
    check_flag,
    check_head_counts,
    check_number,
    check_on,
    check_packed,
    check_scale,
    check_varlen,
    refuse,
    spreads,
)
from ..mask_values import Band, joined
from ..masks import check_bands, check_mask
from ..ops.attention_hopper_reasons import hopper_attention_reasons
from ..variant import (
    AUX,
    DIFFERENTIABLE,
    NO_GRADIENT,
    Variant,
    pack,
    reasons,
    variant_of,
)
from .autocast import autocast_low_precision, without_autocast
from .cached import cached

if backends.HAS_TRITON:
    from ..ops import attention as attention_op

# Backend "hopper" takes tensors that start at multiples of 16 bytes.
by_alignment = functools.partial(cached, alignment=True)


def uncached(function: Any) -> Any:
    """A function of `by_alignment` without its look into the cache: for one that has looked itself."""
    return getattr(function, "__wrapped__", function)


SMALLEST_SCALE = torch.finfo(torch.float32).tiny
# Numbers of variants, in the order in which functions here pass them on: what they may be.
NUMBERS = {
    "softcap": (1e-30, 1e30, "a number from 1e-30 to 1e30, or None"),
}


@by_alignment
def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    causal: bool = False,
    window: Sequence[int | None] | None = None,
    softcap: float | None = None,
    sinks: Tensor | None = None,
    alibi_slopes: Tensor | None = None,
    mask: masks.Mask | None = None,
    scale: float | None = None,
    return_lse: bool = False,
    return_aux: Sequence[str] = (),
    impl: str | None = None,
) -> Tensor | tuple[Tensor, ...]:
    """softmax(scale * q k^T) v without ever writing the scores to memory.

    Query i stands at position i + Sk - Sq, so that the last query is at the last key (bottom-right
    alignment, as in flash-attn; torch's is_causal is top-left, see scaled_dot_product_attention).  A
    query sees the keys that causal, window and mask all let it see.  What happens to a score, in this
    order: scale, softcap, ALiBi, mask; then the softmax with the sinks.

    Args:
        q: [B, Hq, Sq, D], float16, bfloat16, float32 (float64 on the torch and reference backends),
            any strides.
        k: [B, Hkv, Sk, D]; Hkv divides Hq (GQA, MQA): query head h reads key head h // (Hq // Hkv).
        v: [B, Hkv, Sk, Dv]; Dv may differ from D.
        causal: a query sees the keys up to its position.
        window: (left, right): it sees the keys from position - left to position + right, both
            included; None is no bound.  masks.window also keeps the first keys in sight.
        softcap: a scaled score s becomes softcap * tanh(s / softcap); of float16 and bfloat16 on a GPU
            by the card's own tanh, which is off by 5e-4 of its value.  1e-30 to 1e30.
        sinks: [Hq], one more score for each row of a head, after scaling, without a value.
        alibi_slopes: [Hq]; -slope * |position - j| is added to the score of key j.
        mask: a value of flashproto.masks.
        scale: multiplies the scores; 1 / sqrt(D) by default.
        return_lse: also return the rows' logsumexp.
        return_aux: names of statistics to return too: "max_score", the largest scale * q k^T of a row,
            before softcap, among the keys that it sees (QK-clip), and "entropy", of the probabilities
            of the keys, the sink left out, in nats.
        impl: the backend by name; None chooses.

    Returns:
        out [B, Hq, Sq, Dv] in q's dtype; with return_lse behind it lse [B, Hq, Sq], float32 (float64
        for float64 inputs), natural logarithm, of the sink too; then each of return_aux, as lse.
        Of out and lse there are gradients for q, k, v, sinks and alibi_slopes.  A query that sees no
        key gives 0, lse -inf or its sink, max_score -inf and entropy 0.

    Raises:
        TypeError, ValueError: an argument does not fit; BackendError: `impl` cannot run this call;
        NotImplementedError: a gradient of what return_aux gives, which has none, is asked for (under
        torch.compile they are constants, as after .detach()).

    Source: Dao, "FlashAttention-2" (2023), algorithms 1 and 2; Milakov and Gimelshein (2018).  Press et
    al., "Train Short, Test Long" (2021, ALiBi); Xiao et al., "Efficient Streaming Language Models with
    Attention Sinks" (2023).

    Example:
        >>> q, k, v = torch.randn(2, 4, 8, 16), torch.randn(2, 2, 8, 16), torch.randn(2, 2, 8, 16)
        >>> out, lse = flashproto.attention(q, k, v, causal=True, return_lse=True)
        >>> out.shape, lse.shape
        (torch.Size([2, 4, 8, 16]), torch.Size([2, 4, 8]))
        >>> same = flashproto.attention(q, k, v, causal=True, window=(7, 0), mask=masks.causal())
        >>> torch.allclose(same, out, atol=1e-6)
        True
    """
    name = "attention"
    q, k, v = autocast_low_precision(q, k, v)
    check_attention(name, q, k, v)
    causal = check_flag(name, "causal", causal)
    return_lse = check_flag(name, "return_lse", return_lse)
    band = _band(name, causal, window, mask, q.shape[2], k.shape[2])
    if mask is None:
        run, begin, end = uncached(_attention_of_parts), None, None
    else:
        run, (begin, end) = _attention_of_parts, _intervals(name, mask, q, k)
    return run(
        q, k, v, sinks, alibi_slopes, begin, end,
        operator=name, band=band, numbers=(softcap,), scale=scale,
        return_lse=return_lse, return_aux=return_aux, impl=impl,
    )  # fmt: skip


@by_alignment
def _attention_of_parts(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    sinks: Tensor | None,
    alibi_slopes: Tensor | None,
    begin: Tensor | None = None,
    end: Tensor | None = None,
    cu_seqlens_q: Tensor | None = None,
    cu_seqlens_k: Tensor | None = None,
    *,
    operator: str,
    band: tuple[bool, int, int | None, int],
    numbers: Sequence[float | None],
    scale: float | None,
    return_lse: bool,
    return_aux: Sequence[str],
    impl: str | None,
) -> Any:
    """attention whose mask is numbers and tensors, so that the call can be kept."""
    aux = check_aux(operator, return_aux)
    tensors = {
        "sinks": sinks,
        "alibi_slopes": alibi_slopes,
        "begin": begin,
        "end": end,
        "cu_seqlens_q": cu_seqlens_q,
        "cu_seqlens_k": cu_seqlens_k,
    }
    check_dtensors(operator, q, {"k": k, "v": v} | tensors)
    variant = _variant(operator, q, band, numbers, tensors, aux)
    return _attention(operator, q, k, v, variant, scale, return_lse, impl, aux, ready=True)


@by_alignment
def attention_qkv(
    qkv: Tensor,
    n_heads: int,
    n_kv_heads: int,
    *,
    causal: bool = False,
    window: Sequence[int | None] | None = None,
    softcap: float | None = None,
    sinks: Tensor | None = None,
    mask: masks.Mask | None = None,
    scale: float | None = None,
    impl: str | None = None,
) -> Tensor:
    """attention on the heads of a fused projection, read where they are; the gradient of qkv is written
    once, where splitting would have three gradients put together.

    Args: qkv [B, S, (n_heads + 2 n_kv_heads) D], the heads of q, then k, then v; others as attention.
    Returns: out [B, n_heads, S, D], in memory [B, S, n_heads, D].  Errors as attention.

    Example:
        >>> qkv = torch.randn(2, 8, (4 + 2 * 2) * 16)
        >>> flashproto.attention_qkv(qkv, 4, 2, causal=True, window=(3, 0)).shape
        torch.Size([2, 4, 8, 16])
    """
    name = "attention_qkv"
    (qkv,) = autocast_low_precision(qkv)
    n_heads, n_kv_heads = check_head_counts(name, n_heads, n_kv_heads)
    check_packed(name, qkv, n_heads, n_kv_heads)
    causal = check_flag(name, "causal", causal)
    S = qkv.shape[1]
    band = _band(name, causal, window, mask, S, S)
    if mask is None:
        run, begin, end = uncached(_attention_qkv_of_parts), None, None
    else:
        q, k, _ = reference.split_heads(qkv, n_heads, n_kv_heads)
        run, (begin, end) = _attention_qkv_of_parts, _intervals(name, mask, q, k)
    return run(
        qkv, sinks, begin, end,
        n_heads=n_heads, n_kv_heads=n_kv_heads, band=band, numbers=(softcap,), scale=scale, impl=impl,
    )  # fmt: skip


@by_alignment
def _attention_qkv_of_parts(
    qkv: Tensor,
    sinks: Tensor | None,
    begin: Tensor | None,
    end: Tensor | None,
    *,
    n_heads: int,
    n_kv_heads: int,
    band: tuple[bool, int, int | None, int],
    numbers: Sequence[float | None],
    scale: float | None,
    impl: str | None,
) -> Any:
    """attention_qkv whose mask is numbers and tensors, so that the call can be kept."""
    name = "attention_qkv"
    scale = check_scale(name, scale)
    q, k, v = reference.split_heads(qkv, n_heads, n_kv_heads)
    check_attention(name, q, k, v)
    tensors = {"sinks": sinks, "begin": begin, "end": end}
    check_dtensors(name, qkv, tensors, "qkv")
    variant = _variant(name, q, band, numbers, tensors, ())
    backend = backends.choose(
        name, impl, (qkv,), lambda b: _attention_reasons(b, variant, q, k, v, False)
    )
    if backend in KERNELS and (scale is None or scale >= 0):
        scale = q.shape[3] ** -0.5 if scale is None else float(scale)
        given, ints, floats, text = pack(variant)
        settings = attention_op.SettingsQkv(
            tuple(ints), tuple(floats), text, scale, backend, n_heads, n_kv_heads
        )
        return attention_op.attention_qkv.ready((qkv, *given), settings)
    out = attention_by(backend, q, k, v, variant, scale, False, ())
    return out.transpose(1, 2).contiguous().transpose(1, 2)


def attention_varlen(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int | None = None,
    max_seqlen_k: int | None = None,
    *,
    causal: bool = False,
    window: Sequence[int | None] | None = None,
    softcap: float | None = None,
    sinks: Tensor | None = None,
    alibi_slopes: Tensor | None = None,
    mask: masks.Mask | None = None,
    scale: float | None = None,
    return_lse: bool = False,
    return_aux: Sequence[str] = (),
    impl: str | None = None,
) -> Tensor | tuple[Tensor, ...]:
    """attention of sequences of any lengths that lie side by side, each on its own.

    Lengths are read on the device alone: nothing waits for the GPU, a CUDA graph may be replayed with
    other lengths, and other lengths compile nothing.  The time follows from the tokens that there are.

    Args:
        q: [T, Hq, D], the tokens of all sequences; k: [Tk, Hkv, D]; v: [Tk, Hkv, Dv].
        cu_seqlens_q, cu_seqlens_k: [n + 1] int32 on the same device, from 0 on, not decreasing:
            sequence s has the tokens cu_seqlens[s] to cu_seqlens[s + 1] - 1.  Lengths of 0 are fine.
        max_seqlen_q, max_seqlen_k: as in flash-attn; results do not depend on them.
        causal, window, ... impl: as attention, in each sequence by itself.  A mask is a band: causal,
            window; sequences are documents already.

    Returns: out [T, Hq, Dv]; with return_lse behind it lse [Hq, T]; then each of return_aux, as lse.
        Tokens behind the last sequence give what a query without a key gives.

    Raises: as attention.

    Example:
        >>> q, k, v = torch.randn(12, 4, 16), torch.randn(12, 2, 16), torch.randn(12, 2, 16)
        >>> cu = torch.tensor([0, 5, 5, 12], dtype=torch.int32)  # sequences of 5, 0 and 7 tokens
        >>> out = flashproto.attention_varlen(q, k, v, cu, cu, causal=True)
        >>> first = (x[:5].transpose(0, 1)[None] for x in (q, k, v))
        >>> expected = flashproto.attention(*first, causal=True)[0].transpose(0, 1)
        >>> torch.allclose(out[:5], expected, atol=1e-5)
        True
    """
    name = "attention_varlen"
    q, k, v = autocast_low_precision(q, k, v)
    check_varlen(name, q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k)
    causal = check_flag(name, "causal", causal)
    return_lse = check_flag(name, "return_lse", return_lse)
    if mask is not None:
        check_bands(name, mask)
    band = _band(name, causal, window, mask, 0, 0)
    q, k, v = (x.transpose(0, 1)[None] for x in (q, k, v))
    made = _attention_of_parts(
        q,
        k,
        v,
        sinks,
        alibi_slopes,
        None,
        None,
        cu_seqlens_q,
        cu_seqlens_k,
        operator=name,
        band=band,
        numbers=(softcap,),
        scale=scale,
        return_lse=return_lse,
        return_aux=return_aux,
        impl=impl,
    )
    # A squeeze is a view backward too; the gradient of made[0] is written into zeros.
    if isinstance(made, Tensor):
        return made.squeeze(0).transpose(0, 1)
    out, *rows = made
    return out.squeeze(0).transpose(0, 1), *[x.squeeze(0) for x in rows]


def _band(operator, causal, window, mask, Sq, Sk):
    """(causal, offset, left, first) of the kernels, of all bands: j <= i + offset if causal, and
    j >= i + offset - left, if that is not None, or j < first."""
    if window is None and mask is None:
        return causal, Sk - Sq, None, 0
    bands = (Band(None, 0, 0, False),) if causal else ()
    if window is not None:
        bands += (check_window(operator, window),)
    if mask is not None:
        bands += check_mask(operator, mask).bands
    high, low, first = joined(operator, bands, Sk - Sq)
    offset = Sk - Sq if high is None else high
    return high is not None, offset, None if low is None else offset - low, first


def check_window(operator, window):
    if not isinstance(window, (tuple, list)) or len(window) != 2:
        refuse(
            operator,
            "window",
            window,
            "(left, right), integers of 0 or more, or None",
            "Pass (1023, 0), say, or None for no bound.",
            TypeError,
        )
    return masks.window_band(operator, *window, 0, "window")


def _intervals(operator, mask, q, k):
    """begin and end of a mask for q [B, Hq, Sq, D] and k; (None, None) where it is a band."""
    (B, Hq, Sq, _), Sk = q.shape, k.shape[2]
    found = mask.intervals(Sq, Sk, operator)
    if found is None:
        return None, None
    check_on(operator, "mask", found[0], q.device)
    batch, heads, _ = found[0].shape
    if not (spreads(batch, B) and spreads(heads, Hq)):
        refuse(
            operator,
            "mask",
            f"{mask!r}, for a batch of {batch} and {heads} heads",
            lambda: f"one for a batch of 1 or {B}, and 1 or {Hq} heads",
            "Expand what it is made of.",
        )
    return found


def check_dtensors(operator, q, others, name="q"):
    """That the others, of which some may be None, are DTensors if q is, whose name is `name`."""
    distributed = backends.has_dtensors((q,))
    for other, x in others.items():
        if x is None or backends.has_dtensors((x,)) == distributed:
            continue
        if not distributed:
            got = f"a DTensor beside a plain {name}"
            refuse(operator, other, got, "a plain tensor", f"Pass {other}.to_local().", TypeError)
        if other in ("begin", "end"):
            refuse(
                operator,
                "mask",
                f"made of plain tensors beside a DTensor {name}",
                "bands, causal() and window(...), beside DTensors",
                "Pass the .to_local() of all DTensors.",
                TypeError,
            )
        refuse(
            operator,
            other,
            f"a plain tensor beside a DTensor {name}",
            "a DTensor",
            f"Pass torch.distributed.tensor.distribute_tensor({other}, {name}.device_mesh).",
            TypeError,
        )


def _variant(operator, q, band, numbers, tensors, aux) -> Variant:
    """What kind of attention it is; numbers: the first of NUMBERS; tensors: some of variant.VARIABLES,
    by name."""
    causal, offset, left, first = band
    for argument in DIFFERENTIABLE:
        if tensors.get(argument) is not None:
            check_by_head(operator, argument, tensors[argument], q.shape[1], q.device)
    named = {"left": left, "first": first if first else None, **tensors}
    for (argument, bounds), x in zip(NUMBERS.items(), numbers, strict=False):
        if x is not None:
            named[argument] = float(check_number(operator, argument, x, *bounds, "Pass None for none."))
    exact = q.dtype in (torch.float32, torch.float64)
    return variant_of(causal, offset, named, aux, exact)


def _attention(operator, q, k, v, variant, scale, return_lse, impl, aux, *, ready=False):
    """attention by the backend that is chosen for it; see attention_by."""
    scale = check_scale(operator, scale)
    backend = backends.choose(
        operator, impl, (q, k, v), lambda b: _attention_reasons(b, variant, q, k, v, return_lse)
    )
    return attention_by(backend, q, k, v, variant, scale, return_lse, aux, ready=ready)


def attention_by(backend, q, k, v, variant, scale, return_lse, aux, *, ready=False):
    """attention by a backend that can run it; ready: as a call of q, k and v made ready, where kernels
    run it."""
    if backend == "torch":
        return _torch_attention(q, k, v, variant, scale)
    if backend == "reference":
        return _reference_attention(q, k, v, variant, scale, return_lse, aux)
    scale = q.shape[3] ** -0.5 if scale is None else float(scale)
    if scale < 0:
        q, scale, ready = -q, -scale, False
    tensors, ints, floats, text = pack(variant)
    settings = attention_op.Settings(tuple(ints), tuple(floats), text, scale, backend)
    run = attention_op.attention.ready if ready else attention_op.attention
    returns = (0, 1) if return_lse else (0,)
    if aux:
        returns += tuple(2 + AUX.index(name) for name in aux)
    made = run((q, k, v, *tensors), settings, returns)
    if aux and torch.compiler.is_compiling():
        # What is traced has a gradient of everything that might have one: it may not raise.
        first = len(made) - len(aux)
        made = *made[:first], *[x.detach() for x in made[first:]]
    return made


def _attention_reasons(backend, variant, q, k, v, return_lse) -> Iterator[Reason]:
    yield from reasons(backend, variant, q, k, v, return_lse)
    if backend == "torch" and backends.has_tangents((q, k, v)):
        yield "PyTorch's kernels of attention have no forward-mode derivative (jvp)"
    if backend == "torch" and backends.has_dtensors((q, k, v)):
        fused = q.dtype in (torch.float16, torch.bfloat16) and q.shape[3] == v.shape[3]
        if q.device.type != "cuda" or not fused:
            yield "PyTorch shards its fused attention on a GPU alone, in 16 bits and with Dv = D"
    if backend == "hopper":
        yield from hopper_attention_reasons(q, k, v)


def _reference_attention(q, k, v, variant, scale, return_lse, aux):
    """The definition; what `aux` names has no gradient, as on other backends."""
    with without_autocast(q):
        made = reference.attention(
            q,
            k,
            v,
            causal=variant.kind.CAUSAL,
            causal_offset=variant.offset,
            scale=scale,
            return_aux=bool(aux),
            **variant.named,
        )
    results = made[: 1 + return_lse]
    for name in aux:
        x = made[2 + AUX.index(name)]
        results += (x.detach() if torch.compiler.is_compiling() else NoGradient.apply(x, name),)
    return results[0] if len(results) == 1 else results


class NoGradient(torch.autograd.Function):
    """x; whoever asks for its gradient is told that there is none."""

    generate_vmap_rule = True

    @staticmethod
    def forward(x, name):
        return x.view_as(x)

    @staticmethod
    def setup_context(ctx, inputs, output):
        ctx.name = inputs[1]
        ctx.set_materialize_grads(False)

    @staticmethod
    def backward(ctx, gradient):
        if gradient is not None:
            raise NotImplementedError(NO_GRADIENT.format(ctx.name))
        return None, None


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
