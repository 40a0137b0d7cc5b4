"""flash-attn 2.8's functions on this library's kernels: the same names, arguments and defaults.

    from flashproto.integrations.flash_attn import flash_attn_func  # was: from flash_attn import ...

Tensors lie as there, [B, S, H, D], and [T, H, D] where sequences lie side by side.  More is taken than
there: float32, any head_dim up to 512, and on a CPU.  What is not taken is refused by its name;
docs/doors.md has the list.  flash_attn_4.py has the functions of flash-attn-4.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from ..checks.errors import refuse
from ..checks.options import check_flag
from ..functional import attention_qkv, attention_varlen, attention_with_kv_cache
from .flash_attn_kvcache import flash_attn_with_kvcache
from .flash_attn_options import (
    Window,
    attend,
    check_int32,
    check_layout,
    options_of,
    taking_later_names,
    tokens_first,
    window_of,
    with_infinity,
)
from .refusals import refuse_not_yet

Made = Tensor | tuple[Tensor, Tensor, None]


@taking_later_names
def flash_attn_func(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: Window = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
    *,
    num_splits: int = 0,
) -> Made:
    """flash_attn.flash_attn_func.  Query i is at position i + Sk - Sq.

    Args:
        q: [B, Sq, Hq, D], float16, bfloat16 or float32; k: [B, Sk, Hkv, D], where Hkv divides Hq; v:
            [B, Sk, Hkv, Dv].
        dropout_p: the share of probabilities that are dropped, by a seed of torch's generator; the
            others are divided by 1 - dropout_p.
        softmax_scale: 1 / sqrt(D) where it is None.
        causal: a query sees the keys up to its position.
        window_size: (left, right): the keys from position - left to position + right, both included;
            -1 for no bound.
        softcap: a scaled score s becomes softcap * tanh(s / softcap); 0.0 and below for none.
        alibi_slopes: [Hq], float32: -slope * |position - j| is added to the score of key j.
        deterministic: gradients of this call are the same bits every time.
        return_attn_probs: also return lse, and None in the place of probabilities.
        num_splits: of version 3: into how many parts keys are split at most; 1: never; 0 lets
            flashproto choose.

    Returns: out [B, Sq, Hq, Dv]; or (out, lse, None) with lse [B, Hq, Sq], float32, which is +inf for a
        query that sees no key, whose out is 0.  lse has a gradient, unlike there.
    Raises: TypeError, ValueError: an argument does not fit; NotImplementedError: it is not taken.
    Source: flash-attn 2.8, https://github.com/Dao-AILab/flash-attention.

    Example:
        >>> q, k, v = torch.randn(2, 8, 4, 16), torch.randn(2, 8, 2, 16), torch.randn(2, 8, 2, 16)
        >>> out = flash_attn.flash_attn_func(q, k, v, causal=True, window_size=(3, 0))
        >>> out.shape
        torch.Size([2, 8, 4, 16])
    """
    name = "flash_attn_func"
    own = dropout_p, softmax_scale, causal, window_size, softcap, alibi_slopes, return_attn_probs
    options = _options(name, *own, num_splits)
    check_layout(name, "BSHD", q=q, k=k, v=v)
    return _dense(name, (q, k, v), options, deterministic)


@taking_later_names
def flash_attn_kvpacked_func(
    q: Tensor,
    kv: Tensor,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: Window = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
) -> Made:
    """flash_attn.flash_attn_kvpacked_func: flash_attn_func of kv [B, Sk, 2, Hkv, D], keys and values.

    Args, Returns and Raises: as flash_attn_func; the gradient of kv is one tensor too.

    Example:
        >>> q, kv = torch.randn(2, 8, 4, 16), torch.randn(2, 8, 2, 2, 16, requires_grad=True)
        >>> flash_attn.flash_attn_kvpacked_func(q, kv, causal=True).sum().backward()
        >>> kv.grad.shape
        torch.Size([2, 8, 2, 2, 16])
    """
    name = "flash_attn_kvpacked_func"
    options = _options(
        name, dropout_p, softmax_scale, causal, window_size, softcap, alibi_slopes, return_attn_probs
    )
    check_layout(name, "BSHD", q=q)
    return _dense(name, (q, *_unpacked(name, "kv", kv, "BS2HD")), options, deterministic)


@taking_later_names
def flash_attn_qkvpacked_func(
    qkv: Tensor,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: Window = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
) -> Made:
    """flash_attn.flash_attn_qkvpacked_func: flash_attn_func of qkv [B, S, 3, H, D], queries, keys and
    values of as many heads.

    Args, Returns and Raises: as flash_attn_func; the gradient of qkv is one tensor too, which kernels
    write where it belongs if there are neither alibi_slopes nor return_attn_probs.

    Example:
        >>> qkv = torch.randn(2, 8, 3, 4, 16, requires_grad=True)
        >>> flash_attn.flash_attn_qkvpacked_func(qkv, causal=True).sum().backward()
        >>> qkv.grad.shape
        torch.Size([2, 8, 3, 4, 16])
    """
    name = "flash_attn_qkvpacked_func"
    options = _options(
        name, dropout_p, softmax_scale, causal, window_size, softcap, alibi_slopes, return_attn_probs
    )
    heads = _unpacked(name, "qkv", qkv, "BS3HD")
    apart = "alibi_slopes", "return_lse", "num_splits"  # what a fused projection does not take
    if any(options[name] for name in apart[1:]) or alibi_slopes is not None:
        return _dense(name, heads, options, deterministic)
    H = qkv.shape[3]
    fused = {n: x for n, x in options.items() if n not in apart}
    return tokens_first(attention_qkv(qkv.flatten(2), H, H, deterministic=deterministic, **fused))


@taking_later_names
def flash_attn_varlen_func(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: Any,
    max_seqlen_k: Any,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: Window = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
    block_table: Tensor | None = None,
    *,
    seqused_q: Tensor | None = None,
    seqused_k: Tensor | None = None,
    num_splits: int = 0,
) -> Made:
    """flash_attn.flash_attn_varlen_func: flash_attn_func of sequences side by side.

    Args:
        q: [T, Hq, D], the tokens of all sequences; k: [Tk, Hkv, D]; v: [Tk, Hkv, Dv].
        cu_seqlens_q, cu_seqlens_k: int32 [n + 1]: sequence s has the tokens from cu_seqlens[s] to
            cu_seqlens[s + 1] - 1.
        max_seqlen_q, max_seqlen_k: results do not depend on them, and they are not read.
        dropout_p, ... return_attn_probs, num_splits: as flash_attn_func, for each sequence by itself;
            keys that are not in pages are never split.
        block_table: int32 [n, m]: the pages of each sequence, where k is [pages, page_size, Hkv, D] and
            v alike; pages of any size.  There is no gradient and no dropout then.
        seqused_q, seqused_k: of version 3: int32 [n], how many of each sequence's tokens count; those
            behind them are not read, and their out and gradients are 0.  Beside block_table seqused_k
            is how many keys a sequence has, and seqused_q None.

    Returns: out [T, Hq, Dv]; or (out, lse, None) with lse [Hq, T].
    Raises: as flash_attn_func.

    Example:
        >>> x, cu = torch.randn(12, 4, 16), torch.tensor([0, 5, 12], dtype=torch.int32)
        >>> flash_attn.flash_attn_varlen_func(x, x, x, cu, cu, 7, 7, causal=True).shape
        torch.Size([12, 4, 16])
    """
    name = "flash_attn_varlen_func"
    own = dropout_p, softmax_scale, causal, window_size, softcap, alibi_slopes, return_attn_probs
    options = _options(name, *own, num_splits)
    check_layout(name, "THD", q=q)
    if block_table is None:
        options |= {"seqused_q": seqused_q, "seqused_k": seqused_k}
        return _varlen(name, (q, k, v), cu_seqlens_q, cu_seqlens_k, options, deterministic)
    if seqused_q is not None:
        takes = "None beside block_table"
        refuse(name, "seqused_q", seqused_q, takes, "Pack the queries.")
    if "dropout_p" in options:
        refuse_not_yet(name, "dropout_p", dropout_p, "dropout_of_a_cache")
    check_layout(name, "PSHD", k=k, v=v)
    check_int32(name, "cu_seqlens_q", cu_seqlens_q, (None,), q.device)
    n = cu_seqlens_q.shape[0]
    check_int32(name, "cu_seqlens_k", cu_seqlens_k, (n,), q.device)
    check_int32(name, "block_table", block_table, (n - 1, None), q.device)
    if seqused_k is not None:
        check_int32(name, "seqused_k", seqused_k, (n - 1,), q.device)
    made = attention_with_kv_cache(
        q,
        k,
        v,
        lengths=cu_seqlens_k.diff() if seqused_k is None else seqused_k,
        page_table=block_table,
        cu_seqlens_q=cu_seqlens_q,
        **options,
    )
    return _returned(made, options)


@taking_later_names
def flash_attn_varlen_kvpacked_func(
    q: Tensor,
    kv: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: Any,
    max_seqlen_k: Any,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: Window = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
) -> Made:
    """flash_attn.flash_attn_varlen_kvpacked_func: flash_attn_varlen_func of kv [Tk, 2, Hkv, D].

    Args, Returns and Raises: as flash_attn_varlen_func; the gradient of kv is one tensor too.

    Example:
        >>> q, kv = torch.randn(12, 4, 16), torch.randn(12, 2, 2, 16)
        >>> cu = torch.tensor([0, 5, 12], dtype=torch.int32)
        >>> flash_attn.flash_attn_varlen_kvpacked_func(q, kv, cu, cu, 7, 7, causal=True).shape
        torch.Size([12, 4, 16])
    """
    name = "flash_attn_varlen_kvpacked_func"
    options = _options(
        name, dropout_p, softmax_scale, causal, window_size, softcap, alibi_slopes, return_attn_probs
    )
    check_layout(name, "THD", q=q)
    heads = (q, *_unpacked(name, "kv", kv, "T2HD"))
    return _varlen(name, heads, cu_seqlens_q, cu_seqlens_k, options, deterministic)


@taking_later_names
def flash_attn_varlen_qkvpacked_func(
    qkv: Tensor,
    cu_seqlens: Tensor,
    max_seqlen: Any,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: Window = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
) -> Made:
    """flash_attn.flash_attn_varlen_qkvpacked_func: flash_attn_varlen_func of qkv [T, 3, H, D].

    Args, Returns and Raises: as flash_attn_varlen_func; the gradient of qkv is one tensor too.

    Example:
        >>> qkv, cu = torch.randn(12, 3, 4, 16), torch.tensor([0, 5, 12], dtype=torch.int32)
        >>> flash_attn.flash_attn_varlen_qkvpacked_func(qkv, cu, 7, causal=True).shape
        torch.Size([12, 4, 16])
    """
    name = "flash_attn_varlen_qkvpacked_func"
    options = _options(
        name, dropout_p, softmax_scale, causal, window_size, softcap, alibi_slopes, return_attn_probs
    )
    heads = _unpacked(name, "qkv", qkv, "T3HD")
    check_int32(name, "cu_seqlens", cu_seqlens, (None,), qkv.device)
    return _varlen(name, heads, cu_seqlens, cu_seqlens, options, deterministic)


# --- what they share ------------------------------------------------------------------------------


def _options(
    operator: str,
    dropout_p: float,
    softmax_scale: float | None,
    causal: bool,
    window_size: Window,
    softcap: float,
    alibi_slopes: Tensor | None,
    return_attn_probs: bool,
    num_splits: int = 0,
) -> dict[str, Any]:
    return options_of(
        operator,
        dropout_p=dropout_p,
        softmax_scale=softmax_scale,
        causal=causal,
        window=window_of(operator, window_size),
        softcap=softcap,
        alibi_slopes=alibi_slopes,
        return_lse=return_attn_probs,
        return_name="return_attn_probs",
        num_splits=num_splits,
    )


def _unpacked(operator: str, argument: str, x: Tensor, dims: str) -> tuple[Tensor, ...]:
    """q, k and v, or k and v, of dims such as BS3HD, whose gradient is one stack."""
    check_layout(operator, dims, **{argument: x})
    n, takes = int(dims[-3]), f"[{', '.join(dims)}]"
    if x.shape[-3] != n:
        refuse(operator, argument, f"of shape {list(x.shape)}", takes, "Stack them in dimension -3.")
    return x.unbind(-3)


def _dense(
    operator: str, heads: tuple[Tensor, ...], options: dict[str, Any], deterministic: bool
) -> Made:
    q, k, v = heads
    deterministic = check_flag(operator, "deterministic", deterministic)
    out, lse = attend(q, k, v, options | {"deterministic": deterministic})
    return out if lse is None else (out, with_infinity(lse), None)


def _varlen(
    operator: str,
    heads: tuple[Tensor, ...],
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    options: dict[str, Any],
    deterministic: bool,
) -> Made:
    q, k, v = heads
    deterministic = check_flag(operator, "deterministic", deterministic)
    made = attention_varlen(q, k, v, cu_seqlens_q, cu_seqlens_k, deterministic=deterministic, **options)
    return _returned(made, options)


def _returned(made: Any, options: dict[str, Any]) -> Made:
    if not options["return_lse"]:
        return made.contiguous()
    return made[0].contiguous(), with_infinity(made[1]), None


__all__ = [
    "flash_attn_func",
    "flash_attn_kvpacked_func",
    "flash_attn_qkvpacked_func",
    "flash_attn_varlen_func",
    "flash_attn_varlen_kvpacked_func",
    "flash_attn_varlen_qkvpacked_func",
    "flash_attn_with_kvcache",
]
