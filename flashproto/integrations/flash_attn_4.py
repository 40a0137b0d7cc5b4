"""flash-attn-4's functions (flash_attn.cute) on this library's kernels: the same names, arguments and
defaults, as of 4.0.0b36.

    from flashproto.integrations.flash_attn_4 import flash_attn_func  # was: flash_attn.cute

Tensors lie as there, [B, S, H, D], and [T, H, D] where sequences lie side by side.  What is not taken
is refused by its name; docs/doors.md has the list.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ..checks.errors import refuse
from ..checks.options import check_flag
from ..functional import attention_varlen, attention_with_kv_cache
from .flash_attn_options import (
    Window,
    attend,
    check_int32,
    check_layout,
    check_not_taken,
    check_window,
    options_of,
    tokens_first,
    with_own_names,
)

Made = tuple[Tensor, Tensor | None]


@with_own_names
def flash_attn_func(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    qv: Tensor | None = None,
    gather_kv_indices: Tensor | None = None,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: Window = (None, None),
    learnable_sink: Tensor | None = None,
    softcap: float = 0.0,
    num_splits: int = 1,
    pack_gqa: bool | None = None,
    deterministic: bool = False,
    score_mod: Any = None,
    score_mod_bwd: Any = None,
    mask_mod: Any = None,
    aux_tensors: Any = None,
    aux_scalars: Any = None,
    block_sparse_tensors: Any = None,
    block_sparse_tensors_bwd: Any = None,
    return_lse: bool = False,
    gather_bwd_recompute_p: bool = False,
    gather_bwd_token_chunk: int | None = None,
) -> Made:
    """flash_attn.cute.flash_attn_func.  Query i is at position i + Sk - Sq.

    Args:
        q: [B, Sq, Hq, D], float16, bfloat16 or float32; k: [B, Sk, Hkv, D], where Hkv divides Hq; v:
            [B, Sk, Hkv, Dv].
        softmax_scale: 1 / sqrt(D) where it is None.
        causal: a query sees the keys up to its position.
        window_size: (left, right): the keys from position - left to position + right, both included;
            None for no bound.
        learnable_sink: [Hq], one more score for each row of a head, without a value.
        softcap: a scaled score s becomes softcap * tanh(s / softcap); 0.0 for none.
        num_splits: into how many parts keys are split at most; 1: never; 0 lets flashproto choose.
        pack_gqa: has no part in the result, and is not read.
        deterministic: gradients of this call are the same bits every time.
        return_lse: also return lse.
        qv, gather_kv_indices, score_mod, mask_mod, aux_tensors, block_sparse_tensors and the others:
            their defaults.

    Returns: (out, lse): out [B, Sq, Hq, Dv]; lse [B, Hq, Sq], float32, the sink in it, -inf for a query
        that sees no key and has no sink, or None without return_lse.  Both have gradients.
    Raises: TypeError, ValueError: an argument does not fit; NotImplementedError: it is not taken.
    Source: flash-attn-4, https://github.com/Dao-AILab/flash-attention, flash_attn/cute.

    Example:
        >>> q, k, v = torch.randn(2, 8, 4, 16), torch.randn(2, 8, 2, 16), torch.randn(2, 8, 2, 16)
        >>> out, lse = flash_attn_4.flash_attn_func(q, k, v, causal=True, learnable_sink=torch.zeros(4))
        >>> out.shape, lse
        (torch.Size([2, 8, 4, 16]), None)
    """
    name = "flash_attn_func"
    check_not_taken(
        name,
        qv=qv,
        gather_kv_indices=gather_kv_indices,
        score_mod=score_mod,
        score_mod_bwd=score_mod_bwd,
        mask_mod=mask_mod,
        aux_tensors=aux_tensors,
        aux_scalars=aux_scalars,
        block_sparse_tensors=block_sparse_tensors,
        block_sparse_tensors_bwd=block_sparse_tensors_bwd,
        gather_bwd_recompute_p=gather_bwd_recompute_p,
        gather_bwd_token_chunk=gather_bwd_token_chunk,
    )
    options = _options(
        name, softmax_scale, causal, window_size, softcap, learnable_sink, return_lse, num_splits
    )
    check_layout(name, "BSHD", q=q, k=k, v=v)
    deterministic = check_flag(name, "deterministic", deterministic)
    return attend(q, k, v, options | {"deterministic": deterministic})


@with_own_names
def flash_attn_varlen_func(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    qv: Tensor | None = None,
    cu_seqlens_q: Tensor | None = None,
    cu_seqlens_k: Tensor | None = None,
    max_seqlen_q: Any = None,
    max_seqlen_k: Any = None,
    min_seqlen_k: Any = None,
    seqused_q: Tensor | None = None,
    seqused_k: Tensor | None = None,
    gather_kv_indices: Tensor | None = None,
    page_table: Tensor | None = None,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: Window = (None, None),
    learnable_sink: Tensor | None = None,
    softcap: float = 0.0,
    num_splits: int = 1,
    pack_gqa: bool | None = None,
    deterministic: bool = False,
    score_mod: Any = None,
    score_mod_bwd: Any = None,
    mask_mod: Any = None,
    block_sparse_tensors: Any = None,
    aux_tensors: Any = None,
    aux_scalars: Any = None,
    return_lse: bool = False,
    scheduler_metadata: Any = None,
    seqlen_k_per_split: int | None = None,
    disable_scheduler_metadata: bool = False,
    gather_bwd_recompute_p: bool = False,
    gather_bwd_token_chunk: int | None = None,
) -> Made:
    """flash_attn.cute.flash_attn_varlen_func: flash_attn_func of sequences side by side.

    Args:
        q: [T, Hq, D]; k: [Tk, Hkv, D]; v: [Tk, Hkv, Dv].  Without cu_seqlens they are as
            flash_attn_func takes them.
        cu_seqlens_q, cu_seqlens_k: int32 [n + 1], both or neither: sequence s has the tokens from
            cu_seqlens[s] to cu_seqlens[s + 1] - 1.
        page_table: int32 [n, m], the pages of each sequence, where k is [pages, page_size, Hkv, D] and
            v alike, of which it has the first seqused_k (int32 [n]) keys; q as without it.  There is no
            gradient then.
        max_seqlen_q, max_seqlen_k, min_seqlen_k, pack_gqa, scheduler_metadata,
            disable_scheduler_metadata: have no part in the result, and are not read.
        seqused_q, seqused_k: int32 [n], how many of each sequence's tokens count, of [B, S, H, D] too;
            those behind them are not read, and their out and gradients are 0.  Beside page_table
            seqused_q is None.
        Others: as flash_attn_func.

    Returns: (out, lse): out [T, Hq, Dv]; lse [Hq, T], or None without return_lse.
    Raises: as flash_attn_func.

    Example:
        >>> x, cu = torch.randn(12, 4, 16), torch.tensor([0, 5, 12], dtype=torch.int32)
        >>> out, lse = flash_attn_4.flash_attn_varlen_func(
        ...     x, x, x, cu_seqlens_q=cu, cu_seqlens_k=cu, causal=True, return_lse=True
        ... )
        >>> out.shape, lse.shape
        (torch.Size([12, 4, 16]), torch.Size([4, 12]))
    """
    name = "flash_attn_varlen_func"
    check_not_taken(
        name,
        qv=qv,
        gather_kv_indices=gather_kv_indices,
        score_mod=score_mod,
        score_mod_bwd=score_mod_bwd,
        mask_mod=mask_mod,
        block_sparse_tensors=block_sparse_tensors,
        aux_tensors=aux_tensors,
        aux_scalars=aux_scalars,
        seqlen_k_per_split=seqlen_k_per_split,
        gather_bwd_recompute_p=gather_bwd_recompute_p,
        gather_bwd_token_chunk=gather_bwd_token_chunk,
    )
    options = _options(
        name, softmax_scale, causal, window_size, softcap, learnable_sink, return_lse, num_splits
    )
    deterministic = check_flag(name, "deterministic", deterministic)
    check_layout(name, "BSHD" if cu_seqlens_q is None else "THD", q=q)
    if page_table is not None:
        if seqused_q is not None:
            takes = "None beside page_table"
            refuse(name, "seqused_q", seqused_q, takes, "Pack the queries.")
        check_layout(name, "PSHD", k=k, v=v)
        return _paged(name, q, k, v, cu_seqlens_q, cu_seqlens_k, seqused_k, page_table, options)
    if (cu_seqlens_q is None) != (cu_seqlens_k is None):
        missing = "cu_seqlens_q" if cu_seqlens_q is None else "cu_seqlens_k"
        do = "Put the tokens of all sequences side by side."
        refuse(name, missing, None, "int32 [n + 1] beside the other", do)
    options["deterministic"] = deterministic
    if cu_seqlens_q is not None and cu_seqlens_k is not None:
        return _varlen((q, k, v, cu_seqlens_q, cu_seqlens_k), seqused_q, seqused_k, options)
    check_layout(name, "BSHD", k=k, v=v)
    if seqused_q is None and seqused_k is None:
        return attend(q, k, v, options)
    packed = [x.flatten(0, 1) for x in (q, k, v)]
    for x in q, k:
        starts = torch.arange(x.shape[0] + 1, dtype=torch.int32, device=q.device)
        packed.append(starts * x.shape[1])
    out, lse = _varlen(packed, seqused_q, seqused_k, options)
    lse = None if lse is None else lse.unflatten(1, q.shape[:2]).transpose(0, 1)
    return out.unflatten(0, q.shape[:2]), lse


def _varlen(
    packed: Sequence[Tensor],
    seqused_q: Tensor | None,
    seqused_k: Tensor | None,
    options: dict[str, Any],
) -> Made:
    """packed: q, k, v and cu_seqlens."""
    q, k, v, cu_seqlens_q, cu_seqlens_k = packed
    made: Any = attention_varlen(
        q, k, v, cu_seqlens_q, cu_seqlens_k, seqused_q=seqused_q, seqused_k=seqused_k, **options
    )
    out, lse = made if options["return_lse"] else (made, None)
    return out.contiguous(), lse


def _paged(
    operator: str,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor | None,
    cu_seqlens_k: Tensor | None,
    seqused_k: Tensor | None,
    page_table: Tensor,
    options: dict[str, Any],
) -> Made:
    if cu_seqlens_k is not None:
        takes, do = "None beside page_table", "Pass the lengths as seqused_k."
        refuse(operator, "cu_seqlens_k", cu_seqlens_k, takes, do)
    if cu_seqlens_q is not None:
        check_int32(operator, "cu_seqlens_q", cu_seqlens_q, (None,), q.device)
    B = q.shape[0] if cu_seqlens_q is None else cu_seqlens_q.shape[0] - 1
    check_int32(operator, "page_table", page_table, (B, None), q.device)
    check_int32(operator, "seqused_k", seqused_k, (B,), q.device)
    assert seqused_k is not None
    made: Any = attention_with_kv_cache(
        q if cu_seqlens_q is not None else q.transpose(1, 2),
        k,
        v,
        lengths=seqused_k,
        page_table=page_table,
        cu_seqlens_q=cu_seqlens_q,
        **options,
    )
    out, lse = made if options["return_lse"] else (made, None)
    return tokens_first(out) if cu_seqlens_q is None else out.contiguous(), lse


def _options(
    operator: str,
    softmax_scale: float | None,
    causal: bool,
    window_size: Window,
    softcap: float,
    learnable_sink: Tensor | None,
    return_lse: bool,
    num_splits: int,
) -> dict[str, Any]:
    return options_of(
        operator,
        softmax_scale=softmax_scale,
        causal=causal,
        window=_window_of(operator, causal, window_size),
        softcap=softcap,
        sinks=learnable_sink,
        return_lse=return_lse,
        return_name="return_lse",
        num_splits=num_splits,
    )


def _window_of(operator: str, causal: bool, window_size: Any) -> Window | None:
    """(left, right), None for no bound.  There, bounds whose sum is negative are none, as (-1, -1), and
    causal puts 0 in the place of right."""
    left, right = check_window(operator, window_size)
    right = 0 if causal else right
    if left is not None and right is not None and left + right < 0:
        return None
    for n in (left, right):
        if n is not None and n < 0:
            takes, do = "bounds of 0 or more, or None", "Pass None for no bound."
            refuse(operator, "window_size", window_size, takes, do)
    return None if left is None and right is None else (left, right)


__all__ = ["flash_attn_func", "flash_attn_varlen_func"]
