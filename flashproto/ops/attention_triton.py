"""Attention on the portable kernels, backend "triton": launches.

Legend: q [B, Hq, Sq, D], k [B, Hkv, Sk, D], v [B, Hkv, Sk, Dv]; out [B, Hq, Sq, Dv]; lse [B, Hq, Sq].
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from .. import configs
from ..kernels.attention_backward import (
    attention_backward_keys_kernel,
    attention_backward_queries_kernel,
    attention_backward_rows_kernel,
)
from ..kernels.attention_forward import attention_forward_kernel
from ..variant import Kind, Variant
from .launch import Launch, allows_tf32, capability, cdiv, launcher

LOG2E = math.log2(math.e)
# Scores times this are 0 in float32: a scale of 0 means a uniform softmax, and stays positive.
SMALLEST_SCALE = 2.0**-100
ROWS_BLOCK_M = 64


def is_wide(*tensors: Tensor) -> bool:
    """Whether offsets inside the matrix of one batch entry and head, tiles' overhang included, can
    pass 2^31 elements."""
    for t in tensors:
        _, _, token, element = t.stride()
        if (t.shape[2] + 256) * token + 512 * element >= 2**31:
            return True
    return False


def tf32(q: Tensor) -> bool:
    """Whether products of q's elements may be rounded to tf32."""
    return q.dtype is torch.float32 and allows_tf32()


# Launchers and their constants are kept by the plain facts that they follow from.  `variables` count as
# a number, since no variant has tensors: launcher(tuples=("variables",)) takes these too, and longer.


@functools.lru_cache(1024)
def forward_launcher(
    capability: tuple[int, int], dtype: torch.dtype, D: int, Dv: int, kind: Kind, tf32: bool
) -> tuple[int, Callable[..., None]]:
    """(queries a program, launcher)."""
    config = configs.attention_forward(capability, dtype.itemsize, D, Dv)
    constants = attention_constants(config, D, Dv, kind, tf32)
    exact = dtype == torch.float32
    return config.block_m, launcher(attention_forward_kernel, tensors=5, EXACT=exact, **constants)


@functools.lru_cache(1024)
def backward_launchers(
    capability: tuple[int, int], dtype: torch.dtype, D: int, Dv: int, kind: Kind, tf32: bool
) -> tuple[Callable[..., None], int, Callable[..., None], int, Callable[..., None]]:
    """(launch over rows, keys a program, launch over keys, queries a program, launch over queries)."""
    keys, queries = configs.attention_backward(capability, dtype.itemsize, D, Dv, kind)
    rows: dict[str, Any] = {
        "DV": Dv, "BLOCK_DV": configs.padded_head_dim(Dv), "BLOCK_M": ROWS_BLOCK_M, "num_warps": 4
    }  # fmt: skip
    keys_constants = attention_constants(keys, D, Dv, kind, tf32)
    queries_constants = attention_constants(queries, D, Dv, kind, tf32)
    return (
        launcher(attention_backward_rows_kernel, tensors=6, **rows),
        keys.block_n,
        launcher(attention_backward_keys_kernel, tensors=8, **keys_constants),
        queries.block_m,
        launcher(attention_backward_queries_kernel, tensors=7, **queries_constants),
    )


def attention_constants(
    config: configs.AttentionConfig, D: int, Dv: int, kind: Kind, tf32: bool
) -> dict[str, Any]:
    """The constants that the kernels share, and the options."""
    return {
        "D": D,
        "DV": Dv,
        "BLOCK_D": configs.padded_head_dim(D),
        "BLOCK_DV": configs.padded_head_dim(Dv),
        "BLOCK_M": config.block_m,
        "BLOCK_N": config.block_n,
        "KIND": kind,
        "TF32": tf32,
        "num_warps": config.num_warps,
        "num_stages": config.num_stages,
    }


def forward_launch(
    q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, variant: Variant, scale: float
) -> Launch:
    """The launch of the portable kernel that fills out and lse, of some elements."""
    B, Hq, Sq, D = q.shape
    _, Hkv, Sk, Dv = v.shape
    block_m, launch = forward_launcher(capability(q.device), q.dtype, D, Dv, variant.kind, tf32(q))
    arguments = (
        q, k, v, out, lse, *q.stride(), *k.stride(), *v.stride(), *out.stride(),
        Hq, Hq // Hkv, Sq, Sk, variant.offset, max(scale, SMALLEST_SCALE) * LOG2E, variant.variables,
    )  # fmt: skip
    return Launch(launch, cdiv(Sq, block_m) * B * Hq, arguments, {"WIDE": is_wide(q, k, v, out)})


def launch_backward(
    q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, dout: Tensor, dlse: Tensor | None,
    dq: Tensor, dk: Tensor, dv: Tensor,
    variant: Variant, scale: float, need_dq: bool, need_dkv: bool,
) -> None:  # fmt: skip
    """Fill the gradients that are needed, of some elements; lse is contiguous, dk and dv have the same
    strides."""
    B, Hq, Sq, D = q.shape
    _, Hkv, Sk, Dv = v.shape
    lse2, delta = torch.empty_like(lse), torch.empty_like(lse)
    launch_rows, block_n, launch_keys, block_m, launch_queries = backward_launchers(
        capability(q.device), q.dtype, D, Dv, variant.kind, tf32(q)
    )
    sizes = (
        Hq, Hq // Hkv, Sq, Sk, variant.offset, max(scale, SMALLEST_SCALE) * LOG2E, scale,
        variant.variables,
    )  # fmt: skip
    strides = (*q.stride(), *k.stride(), *v.stride(), *dout.stride())
    wide = is_wide(q, k, v, out, dout, dq, dk, dv)
    launch_rows(
        cdiv(Sq, ROWS_BLOCK_M) * B * Hq,
        out, dout, lse, dlse, lse2, delta, *out.stride(), *dout.stride(),
        *((0, 0, 0) if dlse is None else dlse.stride()),
        Hq, Sq, HAS_DLSE=dlse is not None, WIDE=wide,
    )  # fmt: skip
    if need_dkv:
        launch_keys(
            cdiv(Sk, block_n) * B * Hkv,
            q, k, v, dout, lse2, delta, dk, dv, *strides, *dk.stride(), *dv.stride(), *sizes,
            WIDE=wide,
        )  # fmt: skip
    if need_dq:
        launch_queries(
            cdiv(Sq, block_m) * B * Hq,
            q, k, v, dout, lse2, delta, dq, *strides, *dq.stride(), *sizes,
            WIDE=wide,
        )  # fmt: skip
