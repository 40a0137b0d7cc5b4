"""Attention: launches of the Hopper kernels, for ops/attention.py.

Legend: q, out, dout, dq [B, Hq, Sq, D], k, v, dk, dv [B, Hkv, Sk, D]; lse, dlse [B, Hq, Sq] float32.
"""

from __future__ import annotations

import functools
import math
import threading

import torch
import triton
from torch import Tensor
from triton.experimental.gluon.language import NVMMASharedLayout, float32
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from .. import configs
from ..kernels.hopper.attention_backward import (
    attention_backward_kernel,
    postprocess_kernel,
    preprocess_kernel,
)
from ..kernels.hopper.attention_forward import attention_forward_kernel
from .launch import multiprocessors, on_device

LOG2E = math.log2(math.e)
# The stride of a dimension of one entry, which is never used: what it is may not be what TMA accepts.
UNUSED_STRIDE = 1 << 23
PREPROCESS_ROWS = 32


# --- descriptors ---------------------------------------------------------------------------------


@functools.cache
def half_layout(D: int) -> NVMMASharedLayout:
    """How TMA leaves a box [1, 1, rows, D] of a half type in shared memory."""
    return NVMMASharedLayout(swizzle_byte_width=min(128, 2 * D), element_bitwidth=16, rank=4)


@functools.cache
def float32_layout(*box: int) -> NVMMASharedLayout:
    """How TMA leaves a box of float32 in shared memory."""
    return NVMMASharedLayout.get_default_for(list(box), float32)


def heads_descriptor(x: Tensor, rows: int, D: int) -> TensorDescriptor:
    """Boxes [1, 1, rows, D] of x [B, H, S, head_dim], with zeros past its end."""
    strides = [
        stride if size > 1 else UNUSED_STRIDE
        for size, stride in zip(x.shape[:3], x.stride()[:3], strict=True)
    ]
    return TensorDescriptor(x, list(x.shape), [*strides, 1], [1, 1, rows, D], half_layout(D))


def float32_descriptor(x: Tensor, *box: int) -> TensorDescriptor:
    return TensorDescriptor(x, list(x.shape), list(x.stride()), list(box), float32_layout(*box))


def for_tma(x: Tensor) -> Tensor:
    """x if TMA can read it, else a contiguous copy: last dimension contiguous, other strides positive
    multiples of 16 bytes, the first element on one.

    The caller has checked the inputs, all but where they start: that is not known while torch.compile
    traces, nor of memory that is not PyTorch's.  A gradient comes as it comes.
    """
    strides = [s for n, s in zip(x.shape, x.stride(), strict=True) if n > 1]
    if x.stride(3) == 1 and x.data_ptr() % 16 == 0 and all(s > 0 and s % 8 == 0 for s in strides[:-1]):
        return x
    return x.clone(memory_format=torch.contiguous_format)


def eighths(x: Tensor) -> tuple[int, int, int]:
    """Strides in units of 8 elements, so that the compiler sees pieces of 16 bytes."""
    B, H, S, _ = x.stride()
    return B // 8, H // 8, S // 8


# --- the order of work ---------------------------------------------------------------------------


@functools.cache
def plan_on_device(
    config: configs.HopperForward,
    heads: int,
    together: int,
    Sq: int,
    Sk: int,
    offset: int,
    programs: int,
    device: torch.device,
) -> Tensor:
    """configs.balanced_plan as the kernel reads it: [rounds + 1, programs] int32, ended by the number
    of items.

    Made on the host, once for a shape, and kept: 4 bytes for a tile of a head.  Raises RuntimeError
    while a CUDA graph is captured, where nothing can be copied from the host.
    """
    if torch.cuda.is_current_stream_capturing():
        raise RuntimeError(
            f"attention: a causal call with Sq = {Sq} and Sk = {Sk} is captured in a CUDA graph before "
            "it ran once; its schedule comes from the host. Run it once before capturing it."
        )
    items = configs.balanced_plan(config, heads, together, Sq, Sk, offset, programs)
    rounds = max(map(len, items)) + 1
    total = sum(map(len, items))
    rows = [[*own, *[total] * (rounds - len(own))] for own in items]
    table = torch.tensor(rows, dtype=torch.int32).t().contiguous()
    # In a thread of its own, since a private memory pool of the calling thread (torch.compile's CUDA
    # graphs make one to warm up) would take this memory back.
    kept: list[Tensor] = []
    upload = threading.Thread(target=lambda: kept.append(table.to(device)))
    upload.start()
    upload.join()
    return kept[0]


# --- launches ------------------------------------------------------------------------------------


def attention_forward(
    q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor,
    causal: bool, offset: int, scale: float,
) -> None:  # fmt: skip
    """Fill out and lse; scale > 0, no tensor empty."""
    B, Hq, Sq, head_dim = q.shape
    Hkv, Sk = k.shape[1], k.shape[2]
    q, k, v = for_tma(q), for_tma(k), for_tma(v)
    config = configs.attention_forward_hopper(head_dim, Sk, causal)
    tiles = triton.cdiv(Sq, config.BM)
    programs = min(tiles * B * Hq, multiprocessors(q.device))
    together = configs.heads_together_forward(config, B, Hq, Hkv, Sk)
    plan = lse  # not read
    if causal:
        plan = plan_on_device(config, B * Hq, together, Sq, Sk, offset, programs, q.device)
    else:
        offset = Sk
    with on_device(q.device):
        attention_forward_kernel[(programs,)](
            heads_descriptor(q, 64, config.D),
            heads_descriptor(k, config.BN, config.D), heads_descriptor(v, config.BN, config.D),
            out, lse, plan, tiles * B * Hq, tiles, Hq, Hq // Hkv, B * Hq, together, Sq, Sk, offset,
            *eighths(out), head_dim, scale * LOG2E, config, num_warps=4,
        )  # fmt: skip


def attention_backward(
    q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, dout: Tensor, dlse: Tensor | None,
    dq: Tensor, dk: Tensor, dv: Tensor,
    causal: bool, offset: int, scale: float, positive_scale: float,
) -> None:  # fmt: skip
    """Fill dq, dk and dv, of which dk and dv have the same strides; one of no elements is not wanted.

    scale >= 0 multiplies the gradients, positive_scale > 0 the scores.
    """
    B, Hq, Sq, head_dim = q.shape
    Hkv, Sk = k.shape[1], k.shape[2]
    q, k, v, out, dout = (for_tma(x) for x in (q, k, v, out, dout))
    dq = dq if dq.numel() else torch.empty(q.shape, dtype=q.dtype, device=q.device)
    if not dk.numel():
        dk, dv = (torch.empty(k.shape, dtype=k.dtype, device=k.device) for _ in range(2))
    config = configs.attention_backward_hopper(head_dim, causal)
    D = config.D
    query_tiles, key_tiles = triton.cdiv(Sq, config.BM), triton.cdiv(Sk, config.BN)
    rows = B * Hq * query_tiles * config.BM
    sums = torch.empty(rows * D // 32, 32, dtype=torch.float32, device=q.device)
    lse_delta = torch.empty(rows * 2, dtype=torch.float32, device=q.device)
    together = configs.heads_together_backward(config, B, Hq, Hkv, Sq, Sk, multiprocessors(q.device))
    padded = query_tiles * config.BM
    with on_device(q.device):
        preprocess_kernel[(rows // PREPROCESS_ROWS,)](
            out, dout, lse, lse if dlse is None else dlse.contiguous(), lse_delta, sums,
            Sq, padded, Hq, head_dim, *eighths(out), *eighths(dout),
            HAS_DLSE=dlse is not None, D=D, R=PREPROCESS_ROWS, BM=config.BM, num_warps=4,
        )  # fmt: skip
        attention_backward_kernel[(key_tiles * B * Hkv,)](
            heads_descriptor(q, config.BM, D), heads_descriptor(dout, config.BM, D),
            heads_descriptor(k, config.BN, D), heads_descriptor(v, config.BN, D),
            float32_descriptor(lse_delta, 2 * config.BM), float32_descriptor(sums, 128, 32), sums,
            dk, dv, key_tiles, query_tiles, Hq, Hq // Hkv, B * Hkv, together, Sk,
            offset if causal else Sk, *eighths(dk), head_dim, scale, positive_scale * LOG2E, config,
            num_warps=4,
        )  # fmt: skip
        postprocess_kernel[(rows * D // (64 * config.NQ),)](
            sums, dq, Sq, padded // 64, Hq, head_dim, *eighths(dq), scale, D=D, N=config.NQ,
            num_warps=4,
        )  # fmt: skip
