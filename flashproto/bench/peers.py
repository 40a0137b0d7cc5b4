"""The libraries compared with, each behind one signature: PyTorch's operators, optional packages.

A peer that is not installed is left out; one that cannot run a cell reports its error there.
Attention peers take q, k, v in the layout they are made for; norms take (x, weight, bias or None).
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import os
import shutil
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from ..env import is_importable

EPS = 1e-5
FORWARD_ONLY = ("fa3",)  # contenders without a backward pass
CUDNN_FLEX = "cudnn-flex"
Function = Callable[..., Any]


def can_compile(device: torch.device) -> bool:
    """Whether torch.compile can build code for the device: on a CPU it needs a C++ compiler."""
    return device.type == "cuda" or any(shutil.which(c) for c in ("c++", "g++", "clang++"))


def compiled(function: Callable[..., Any]) -> Callable[..., Any]:
    return torch.compile(function, dynamic=False)


# --- attention: f(q, k, v) -----------------------------------------------------------------------


def attention_peers(
    causal: bool, length: int, gqa: bool, device: torch.device, with_compile: bool
) -> dict[str, tuple[Callable[[], Function], str]]:
    """{name: (a maker of f(q, k, v), "BHSD" or "BSHD")}; what is made outside is not timed."""

    def plain(backend: SDPBackend) -> Callable[[], Function]:
        return lambda: sdpa(backend, is_causal=causal, enable_gqa=gqa)

    def flex() -> Function:
        mods = is_before if causal else None, lambda: None
        return flex_attention(*mods, None, length, gqa, device)

    if device.type != "cuda":
        peers = {"sdpa": (plain(SDPBackend.FLASH_ATTENTION), "BHSD")}
        return peers | ({"flex": (flex, "BHSD")} if with_compile else {})
    peers = {
        "sdpa-flash": (plain(SDPBackend.FLASH_ATTENTION), "BHSD"),
        "sdpa-cudnn": (plain(SDPBackend.CUDNN_ATTENTION), "BHSD"),
        "sdpa-efficient": (plain(SDPBackend.EFFICIENT_ATTENTION), "BHSD"),
    }
    if with_compile:
        peers["flex"] = (flex, "BHSD")
    if has_flash_attn_4(device):
        peers["fa4"] = (lambda: flash_attn_4(causal=causal), "BSHD")
    return peers


def sdpa(backend: SDPBackend | None, **options: Any) -> Function:
    """f(q, k, v), or f(q, k, v, bias [H, S, S]), by one of torch's backends, None for the one that
    torch chooses."""

    def call(q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None = None) -> Tensor:
        given = dict(options)
        if bias is not None:
            given["attn_mask"] = bias.expand(len(q), *bias.shape)
        with sdpa_kernel(backend) if backend is not None else contextlib.nullcontext():
            return F.scaled_dot_product_attention(q, k, v, **given)

    return call


def is_before(b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
    """The causal mask_mod."""
    return i >= j


def flex_attention(
    mask_mod: Function | None,
    score_mod_of: Callable[..., Function | None],
    batch: int | None,
    length: int,
    gqa: bool,
    device: torch.device,
    **options: Any,
) -> Function:
    """f(q, k, v, what is learned), compiled; the block mask is made here.

    score_mod_of: makes the score_mod, of what is learned; once, for torch.compile to know it again.
    batch: None if its entries share the mask.
    """
    from torch.nn.attention import flex_attention

    mask = None
    if mask_mod is not None:
        mask = flex_attention.create_block_mask(
            mask_mod, batch, None, length, length, device=str(device)
        )
    flex = compiled(flex_attention.flex_attention)
    score_mod = functools.cache(score_mod_of)
    given = {"block_mask": mask, "enable_gqa": gqa, **options}
    return lambda q, k, v, *learned: flex(q, k, v, score_mod=score_mod(*learned), **given)


def has_flash_attn_4(device: torch.device) -> bool:
    return device.type == "cuda" and is_importable("flash_attn.cute")


def has_flex_flash(device: torch.device) -> bool:
    """Whether FlexAttention may be asked for flash-attn-4's kernels."""
    from torch.nn.attention import flex_attention

    options = getattr(flex_attention, "FlexKernelOptions", None)
    return has_flash_attn_4(device) and "BACKEND" in getattr(options, "__annotations__", {})


def flash_attn_4(**options: Any) -> Function:
    """f(q, k, v [B, S, H, D], sinks [H] or None)."""
    from flash_attn.cute import flash_attn_func

    def call(q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None = None) -> Tensor:
        out = flash_attn_func(q, k, v, learnable_sink=sinks, **options)
        return out[0] if isinstance(out, tuple) else out

    return call


def flash_attn_4_varlen(cu_seqlens: Tensor, longest: int, **options: Any) -> Function:
    """f(q, k, v [T, H, D]) of sequences side by side."""
    from flash_attn.cute import flash_attn_varlen_func

    def call(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        out = flash_attn_varlen_func(
            q,
            k,
            v,
            cu_seqlens_q=cu_seqlens,
            cu_seqlens_k=cu_seqlens,
            max_seqlen_q=longest,
            max_seqlen_k=longest,
            **options,
        )
        return out[0] if isinstance(out, tuple) else out

    return call


def has_flash_attn_3(device: torch.device) -> bool:
    """Whether its forward is there: the operators of PyPI's tokenspeed-fa3, which have no backward."""
    return device.type == "cuda" and is_importable("flash_attn_3._C")


def flash_attn_3(
    causal: bool = False, window: int = 0, cu_seqlens: Tensor | None = None, longest: int | None = None
) -> Function:
    """f(q, k, v [B, S, H, D], or [T, H, D] of sequences side by side, sinks [H] or None).

    window: keys that a query sees, 0 for no bound.
    """
    importlib.import_module("flash_attn_3._C")
    ops = torch.ops.flash_attn_3
    given: dict[str, Any] = {"is_causal": causal, "num_splits": 1}
    if window:
        given |= {"window_size_left": window - 1, "window_size_right": 0}
    if cu_seqlens is not None:
        given |= {"cu_seqlens_q": cu_seqlens, "cu_seqlens_k": cu_seqlens}
        given |= {"max_seqlen_q": longest, "max_seqlen_k": longest}
    in_bfloat16 = functools.cache(lambda sinks: sinks.detach().bfloat16())  # what its kernels take

    @torch.no_grad()
    def call(q: Tensor, k: Tensor, v: Tensor, *sinks: Tensor) -> Tensor:
        more = {"sinks": in_bfloat16(*sinks)} if sinks else {}
        return ops.fwd(q, k, v, softmax_scale=q.shape[-1] ** -0.5, **given, **more)[0]

    return call


def flash_attn_3_cached(
    shape: Sequence[int],
    k: Tensor,
    lengths: Tensor | None,
    table: Tensor | None = None,
    causal: bool = False,
) -> Function:
    """f(q, k, v): q of this shape [B, S, H, D], with a cache k [B, S, Hkv, D], or pages of it with an
    int32 table [B, n].  The order of work is made here, as once for all layers of a model."""
    importlib.import_module("flash_attn_3._C")
    ops, scale = torch.ops.flash_attn_3, shape[-1] ** -0.5
    B, Sq, Hq, D = shape
    given: dict[str, Any] = {"is_causal": causal, "num_splits": 0}
    metadata = None
    if lengths is not None:
        page = k.shape[1] if table is not None else None
        room = k.shape[1] if table is None else table.shape[1] * k.shape[1]
        sizes = B, Sq, room, Hq, k.shape[2], D, D, k.dtype, lengths
        metadata = ops.get_scheduler_metadata(*sizes, page_size=page, **given)

    def call(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return ops.fwd(
            q,
            k,
            v,
            seqused_k=lengths,
            page_table=table,
            softmax_scale=scale,
            scheduler_metadata=metadata,
            **given,
        )[0]

    return call


def has_ffpa(device: torch.device) -> bool:
    return device.type == "cuda" and is_importable("ffpa_attn")


def ffpa(**options: Any) -> Function:
    """Causal f(q, k, v) of ffpa-attn, whose own kernels are for head dims above 256."""
    from ffpa_attn import ffpa_attn_func

    return lambda q, k, v: ffpa_attn_func(q, k, v, is_causal=True, **options)


def has_cudnn_flex(device: torch.device) -> bool:
    return device.type == "cuda" and is_importable("cudnn.flex_attention")


def cudnn_flex(
    keys: Tensor,
    cu_seqlens: Tensor | None = None,
    longest: int | None = None,
    max_score: bool = False,
) -> Function:
    """f(q, k, v [B, S, H, D], or [T, H, D] of sequences side by side, sinks [H] or None); the plan of
    the mask is made in the first call.

    keys: as visible.keys_of_queries has them.
    max_score: whether each head's largest score is computed, too; it is not returned.
    """
    flex = importlib.import_module("cudnn.flex_attention")
    given: dict[str, Any] = {}
    if cu_seqlens is not None:
        given = {"cu_seqlens_q": cu_seqlens, "cu_seqlens_k": cu_seqlens}
        given |= {"max_seqlen_q": longest, "max_seqlen_k": longest}
    plans: list[Any] = []
    sunk = compiled(with_sinks)

    def call(q: Tensor, k: Tensor, v: Tensor, *sinks: Tensor) -> Tensor:
        if not plans:
            plans.append(flex.create_mask_plan(keys, q, k, v, **given))
        attend = functools.partial(flex.flex_attn_func, q, k, v, mask_plan=plans[0])
        if sinks:
            out, lse = attend(return_lse=True)
            return sunk(out, ContiguousGradient.apply(lse), *sinks)
        return attend(return_max_logit=True)[0] if max_score else attend()

    return call


class ContiguousGradient(torch.autograd.Function):
    """x, for whose gradient cudnn.flex_attention wants contiguous memory."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        return grads[0].contiguous()


def with_sinks(out: Tensor, lse: Tensor, sinks: Tensor) -> Tensor:
    """out [B, S, H, D], whose softmaxes have this lse [B, H, S], with sinks [H] as one more score."""
    share = torch.sigmoid(lse - sinks[:, None])
    return (out * share.transpose(1, 2)[..., None]).to(out.dtype)


def flash_attn_4_packed() -> Function:
    """Causal f(qkv [B, S, 3, H, D]), whose backward writes the three gradients where they belong."""
    interface = importlib.import_module("flash_attn.cute.interface")

    class Packed(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, qkv: Tensor) -> Tensor:
            q, k, v = qkv.unbind(2)
            out, lse, *_ = interface._flash_attn_fwd(q, k, v, causal=True, return_lse=True)
            ctx.save_for_backward(qkv, out, lse)
            return out

        @staticmethod
        def backward(ctx: Any, *grads: Tensor) -> Any:
            qkv, out, lse = ctx.saved_tensors
            dqkv = torch.empty_like(qkv)
            dq, dk, dv = dqkv.unbind(2)
            interface._flash_attn_bwd(
                *qkv.unbind(2), out, grads[0], lse, causal=True, dq=dq, dk=dk, dv=dv
            )
            return dqkv

    return Packed.apply


# --- norms: f(x, weight, bias); the dtype that the parameters must have, None for x's -------------


def norm_peers(
    kind: str, with_compile: bool
) -> dict[str, tuple[Callable[[], Function], torch.dtype | None]]:
    """{name: (a maker of f(x [M, N], weight [N], bias [N] or None), dtype of the parameters)}."""
    eager = _eager_layer_norm if kind == "layer" else _eager_rms_norm
    peers: dict[str, tuple[Callable[[], Function], torch.dtype | None]] = {
        "torch": (lambda: eager, None)
    }
    if with_compile:
        peers["compile"] = (lambda: compiled(eager), None)
    if is_importable("liger_kernel"):
        peers["liger"] = (_liger_layer_norm if kind == "layer" else _liger_rms_norm, None)
    if has_liger_cutedsl():
        peers["liger-cutedsl"] = (functools.partial(_liger_cutedsl_norm, kind), None)
    if is_importable("quack"):
        if kind == "layer":
            peers["quack"] = (_quack_layer_norm, torch.float32)
        else:
            peers["quack"] = (_quack_rms_norm, None)
    return peers


def _eager_layer_norm(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    return F.layer_norm(x, x.shape[-1:], weight, bias, EPS)


def _eager_rms_norm(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    return F.rms_norm(x, x.shape[-1:], weight, EPS)


def _liger_layer_norm() -> Function:
    from liger_kernel.ops.layer_norm import LigerLayerNormFunction

    return lambda x, weight, bias: LigerLayerNormFunction.apply(x, weight, bias, EPS)


def _liger_rms_norm() -> Function:
    from liger_kernel.ops.rms_norm import LigerRMSNormFunction

    # Not in place: the backward pass would overwrite the gradient that the next call needs.
    return lambda x, weight, bias: LigerRMSNormFunction.apply(x, weight, EPS, 0.0, "llama", False)


def has_liger_cutedsl() -> bool:
    """Whether Liger is there with its second set of kernels, and what compiles these."""
    return is_importable("liger_kernel.backends.dispatch") and is_importable("cutlass.cute")


def liger_cutedsl(name: str) -> Function:
    """A function of liger_kernel.functional by kernels of CuTe DSL, an error where it has none."""
    os.environ["LIGER_KERNEL_STRICT"] = "1"  # else Triton's, with a warning
    functional = importlib.import_module("liger_kernel.functional")
    return functools.partial(getattr(functional, name), impl="nvidia-cutedsl")


def _liger_cutedsl_norm(kind: str) -> Function:
    norm = liger_cutedsl(f"{kind}_norm")
    if kind == "layer":
        return lambda x, weight, bias: norm(x, weight, bias, EPS)
    return lambda x, weight, bias: norm(x, weight, EPS)


def _quack_rms_norm() -> Function:
    from quack import rmsnorm

    return lambda x, weight, bias: rmsnorm(x, weight, eps=EPS)


def _quack_layer_norm() -> Function:
    quack = importlib.import_module("quack.rmsnorm")  # `from quack import` gives the function

    class QuackLayerNorm(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
            y, rstd, mean = quack.layernorm_fwd(
                x, weight, bias, EPS, return_rstd=True, return_mean=True
            )
            ctx.save_for_backward(x, weight, rstd, mean)
            return y

        @staticmethod
        def backward(ctx: Any, *grads: Tensor) -> Any:
            x, weight, rstd, mean = ctx.saved_tensors
            return quack.layernorm_bwd(x, weight, grads[0], rstd, mean)

    return QuackLayerNorm.apply


# --- softmax: f(x) -------------------------------------------------------------------------------


def softmax_peers(with_compile: bool) -> dict[str, Callable[[], Function]]:
    """{name: a maker of f(x [M, N])}."""
    peers: dict[str, Callable[[], Function]] = {"torch": lambda: _eager_softmax}
    if with_compile:
        peers["compile"] = lambda: compiled(_eager_softmax)
    if is_importable("liger_kernel"):
        peers["liger"] = _liger_softmax
    if is_importable("quack"):
        peers["quack"] = _quack_softmax
    return peers


def _eager_softmax(x: Tensor) -> Tensor:
    return torch.softmax(x, -1)


def _liger_softmax() -> Function:
    from liger_kernel.ops.softmax import LigerSoftmaxFunction

    return LigerSoftmaxFunction.apply


def _quack_softmax() -> Function:
    from quack import softmax

    return softmax
