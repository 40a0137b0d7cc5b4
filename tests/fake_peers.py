"""In place of the attention libraries that the benchmarks compare with: functions of their names and
arguments, written down plainly, that run on a CPU."""

from __future__ import annotations

import math
import sys
from collections.abc import Callable
from functools import partial
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from flashproto.bench import peers


def dense(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    left: int | None,
    softcap: float,
    sinks: Tensor | None,
    causal: bool = True,
) -> Tensor:
    """Attention of [B, S, H, D], written down plainly."""
    q, k, v = (t.transpose(1, 2) for t in (q, k, v))
    k, v = (t.repeat_interleave(q.shape[1] // k.shape[1], 1) for t in (k, v))
    i, j = torch.arange(q.shape[2])[:, None], torch.arange(k.shape[2])
    seen = ((j <= i) | (not causal)) & (j >= i - (len(j) if left is None else left))
    s = q @ k.mT / math.sqrt(q.shape[3])
    s = softcap * torch.tanh(s / softcap) if softcap else s
    s = s.masked_fill(~seen, -torch.inf)
    if sinks is not None:
        s = torch.cat([s, sinks[:, None, None].expand(*s.shape[:3], 1)], -1)
    return (torch.softmax(s, -1)[..., : len(j)] @ v).transpose(1, 2)


def flash_attn_func(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    causal: bool = False,
    window_size: tuple[int | None, int | None] = (None, None),
    learnable_sink: Tensor | None = None,
    softcap: float = 0.0,
) -> tuple[Tensor, None]:
    """In place of flash-attn-4's, whose arguments these are."""
    assert causal and window_size[1] in (None, 0)
    return dense(q, k, v, window_size[0], softcap, learnable_sink), None


def flash_attn_varlen_func(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    causal: bool = False,
) -> tuple[Tensor, None]:
    assert causal and cu_seqlens_q.dtype == torch.int32 and torch.equal(cu_seqlens_q, cu_seqlens_k)
    assert max_seqlen_q == max_seqlen_k == int(cu_seqlens_q.diff().max())
    parts = zip(*(x.split(cu_seqlens_q.diff().tolist()) for x in (q, k, v)), strict=True)
    made = [dense(*(x[None] for x in part), None, 0.0, None)[0] for part in parts]
    return torch.cat(made), None


def differentiable(
    flex: Callable[..., Tensor],
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    score_mod: Callable[..., Tensor] | None,
    block_mask: Any,
    enable_gqa: bool,
    kernel_options: dict[str, str] | None = None,
) -> Tensor:
    """FlexAttention by its own modifications, which on a CPU has no gradient itself."""
    assert kernel_options in (None, {"BACKEND": "FLASH"})
    options = {"score_mod": score_mod, "block_mask": block_mask, "enable_gqa": enable_gqa}
    with torch.no_grad():
        wanted = flex(*(t.detach() for t in (q, k, v)), **options)
    k, v = (t.repeat_interleave(q.shape[1] // k.shape[1], 1) for t in (k, v))
    sizes = (*q.shape[:3], k.shape[2])
    places = [
        torch.arange(n).view([-1 if d == i else 1 for d in range(4)]) for i, n in enumerate(sizes)
    ]
    s = q @ k.mT / math.sqrt(q.shape[3])
    s = s if score_mod is None else score_mod(s, *places)
    if block_mask is not None:
        s = s.masked_fill(~block_mask.mask_mod(*places), -torch.inf)
    out = torch.softmax(s, -1) @ v
    torch.testing.assert_close(out.detach(), wanted, rtol=1e-4, atol=1e-4)
    return out


# --- FlashAttention-3 ----------------------------------------------------------------------------


def fwd(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    softmax_scale: float,
    is_causal: bool,
    num_splits: int,
    window_size_left: int = -1,
    window_size_right: int = -1,
    sinks: Tensor | None = None,
    **sequences: Any,
) -> tuple[Tensor, None, None, None]:
    """torch.ops.flash_attn_3.fwd, which takes no gradients."""
    assert not torch.is_grad_enabled() and num_splits == 1
    assert softmax_scale == q.shape[-1] ** -0.5 and q.shape[-1] == v.shape[-1]
    assert window_size_right == (-1 if window_size_left < 0 else 0)
    if sequences:
        assert window_size_left < 0 and sinks is None
        return *flash_attn_varlen_func(q, k, v, causal=is_causal, **sequences), None, None
    left = None if window_size_left < 0 else window_size_left
    if sinks is not None:
        assert sinks.dtype == torch.bfloat16
        sinks = sinks.to(q.dtype)
    return dense(q, k, v, left, 0.0, sinks, is_causal), None, None, None


# --- cudnn.flex_attention ------------------------------------------------------------------------


def visible(F: Tensor, B: int, Sk: int) -> Tensor:
    """[B, Sq, Sk] of intervals [n, B * Sq], which cudnn wants in order and within the keys."""
    assert len(F) % 2 == 1 and (F >= 0).all() and (Sk >= F).all() and (F.diff(dim=0) >= 0).all()
    F = F.view(len(F), B, -1, 1)
    j = torch.arange(Sk)
    seen = j < F[0]
    for n in range(1, len(F), 2):
        seen = seen | ((j >= F[n]) & (j < F[n + 1]))
    return seen


def create_mask_plan(
    mask_func: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    cu_seqlens_q: Tensor | None = None,
    cu_seqlens_k: Tensor | None = None,
    max_seqlen_q: int | None = None,
    max_seqlen_k: int | None = None,
) -> Any:
    """What each batch entry, or each sequence, sees."""
    assert mask_func.dtype == torch.int32 and mask_func.is_contiguous() and len(mask_func) == 1
    if cu_seqlens_q is None:
        assert q.ndim == 4 and mask_func.shape[2] == q.shape[:2].numel()
        return SimpleNamespace(lengths=None, seen=visible(mask_func[0], len(q), k.shape[1]))
    assert cu_seqlens_k is not None and torch.equal(cu_seqlens_q, cu_seqlens_k)
    lengths = cu_seqlens_q.diff().tolist()
    assert q.ndim == 3 and max_seqlen_q == max_seqlen_k == max(lengths)
    parts = mask_func[0].split(lengths, 1)
    return SimpleNamespace(lengths=lengths, seen=[visible(F, 1, F.shape[1]) for F in parts])


def flex_attn_func(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    mask_plan: Any,
    return_lse: bool = False,
    return_max_logit: bool = False,
) -> Any:
    if mask_plan.lengths is not None:
        parts = zip(mask_plan.seen, *(x.split(mask_plan.lengths) for x in (q, k, v)), strict=True)
        return torch.cat([attended(seen, *(x[None] for x in part))[0][0] for seen, *part in parts])
    out, lse, largest = attended(mask_plan.seen, q, k, v)
    if return_lse:
        if lse.requires_grad:
            lse.register_hook(refuse_other_memory)
        return out, lse
    return (out, largest.amax((0, 2))) if return_max_logit else out


def refuse_other_memory(gradient: Tensor) -> None:
    if not gradient.is_contiguous():
        raise ValueError("dlse must use a native layout")


def attended(seen: Tensor, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """out [B, S, H, D], and lse and the largest score of each row [B, H, S]."""
    q, k, v = (t.transpose(1, 2) for t in (q, k, v))
    k, v = (t.repeat_interleave(q.shape[1] // k.shape[1], 1) for t in (k, v))
    s = (q @ k.mT / math.sqrt(q.shape[3])).masked_fill(~seen[:, None], -torch.inf)
    return (torch.softmax(s, -1) @ v).transpose(1, 2), torch.logsumexp(s, -1), s.amax(-1)


# --- ffpa-attn ---


def ffpa_attn_func(
    q: Tensor, k: Tensor, v: Tensor, *, is_causal: bool = False, backend: str = "triton"
) -> Tensor:
    assert is_causal and q.shape[3] > 256 and backend in ("triton", "cutedsl")
    return dense(*(t.transpose(1, 2) for t in (q, k, v)), None, 0.0, None).transpose(1, 2)


# --- all of them ---------------------------------------------------------------------------------


def module(name: str, *functions: Callable[..., Any]) -> ModuleType:
    made = ModuleType(name)
    for function in functions:
        setattr(made, function.__name__, function)
    return made


def install(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """Make them importable on a CPU, and FlexAttention not compiled; flash-attn-4 is returned."""
    fa4 = module("flash_attn.cute", flash_attn_func, flash_attn_varlen_func)
    cudnn = module("cudnn.flex_attention", create_mask_plan, flex_attn_func)
    monkeypatch.setitem(sys.modules, "ffpa_attn", module("ffpa_attn", ffpa_attn_func))
    for made in (fa4, cudnn, module("flash_attn_3._C")):
        parent = made.__name__.partition(".")[0]
        monkeypatch.setitem(sys.modules, parent, ModuleType(parent))
        monkeypatch.setitem(sys.modules, made.__name__, made)
    monkeypatch.setattr(torch.ops, "flash_attn_3", SimpleNamespace(fwd=fwd), raising=False)
    for name in ("flash_attn_4", "flash_attn_3", "cudnn_flex", "ffpa"):
        monkeypatch.setattr(peers, f"has_{name}", lambda device: True)
    monkeypatch.setattr(
        peers, "compiled", lambda f: f if f is peers.with_sinks else partial(differentiable, f)
    )
    return fa4
