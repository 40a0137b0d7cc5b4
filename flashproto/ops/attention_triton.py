"""Attention on the portable kernels, backend "triton": launches.

Legend: q [B, Hq, Sq, D], k [B, Hkv, Sk, D], v [B, Hkv, Sk, Dv]; out [B, Hq, Sq, Dv]; lse [B, Hq, Sq].
"""

from __future__ import annotations

import math
from typing import Any

import torch

from .. import configs
from ..kernels.attention_backward import (
    attention_backward_keys_kernel,
    attention_backward_queries_kernel,
    attention_backward_rows_kernel,
)
from ..kernels.attention_forward import attention_forward_kernel
from ..variant import Kind, Variant
from . import private
from .device import capability, cdiv
from .recipe import New, Operand, Recipe

LOG2E = math.log2(math.e)
# Scores times this are 0 in float32: a scale of 0 means a uniform softmax, and stays positive.
SMALLEST_SCALE = 2.0**-100
ROWS_BLOCK_M = 64


def is_wide(*tensors: Operand | None) -> bool:
    """Whether offsets inside the matrix of one batch entry and head, tiles' overhang included, can
    pass 2^31 elements."""
    for t in tensors:
        if t is not None:
            _, _, token, element = t.stride()
            if (t.shape[2] + 256) * token + 512 * element >= 2**31:
                return True
    return False


def constants(config: configs.AttentionConfig, q: Operand, Dv: int, kind: Kind) -> dict[str, Any]:
    """The constants that the kernels share, and the options."""
    D = q.shape[3]
    return {
        "D": D,
        "DV": Dv,
        "BLOCK_D": configs.padded_head_dim(D),
        "BLOCK_DV": configs.padded_head_dim(Dv),
        "BLOCK_M": config.block_m,
        "BLOCK_N": config.block_n,
        "KIND": kind,
        "TF32": q.dtype == torch.float32 and private.allows_tf32(),
        "num_warps": config.num_warps,
        "num_stages": config.num_stages,
    }


def forward(
    recipe: Recipe, q: Operand, k: Operand, v: Operand, out: Operand, lse: Operand, variant: Variant,
    scale: float,
) -> None:  # fmt: skip
    """Fill out and lse, of some elements."""
    B, Hq, Sq, D = q.shape
    _, Hkv, Sk, Dv = v.shape
    config = configs.attention_forward(capability(q.device), q.element_size(), D, Dv)
    recipe.launch(
        attention_forward_kernel, cdiv(Sq, config.block_m) * B * Hq,
        q, k, v, out, lse, *q.stride(), *k.stride(), *v.stride(), *out.stride(),
        Hq, Hq // Hkv, Sq, Sk, variant.offset, max(scale, SMALLEST_SCALE) * LOG2E, variant.variables,
        EXACT=q.dtype == torch.float32, WIDE=is_wide(q, k, v, out),
        **constants(config, q, Dv, variant.kind),
    )  # fmt: skip


def backward(
    recipe: Recipe, q: Operand, k: Operand, v: Operand, out: Operand, lse: Operand, dout: Operand,
    dlse: Operand | None, dq: Operand | None, dk: Operand | None, dv: Operand | None,
    variant: Variant, scale: float,
) -> None:  # fmt: skip
    """Fill those of the gradients that are not None; lse is contiguous, dk and dv have the same
    strides."""
    B, Hq, Sq, D = q.shape
    _, Hkv, Sk, Dv = v.shape
    for_keys, for_queries = configs.attention_backward(
        capability(q.device), q.element_size(), D, Dv, variant.kind
    )
    lse2, delta = (recipe.make(New.contiguous(lse.shape, lse.dtype, lse.device)) for _ in range(2))
    sizes = (
        Hq, Hq // Hkv, Sq, Sk, variant.offset, max(scale, SMALLEST_SCALE) * LOG2E, scale,
        variant.variables,
    )  # fmt: skip
    strides = (*q.stride(), *k.stride(), *v.stride(), *dout.stride())
    wide = is_wide(q, k, v, out, dout, dq, dk, dv)
    recipe.launch(
        attention_backward_rows_kernel, cdiv(Sq, ROWS_BLOCK_M) * B * Hq,
        out, dout, lse, dlse, lse2, delta, *out.stride(), *dout.stride(),
        *((0, 0, 0) if dlse is None else dlse.stride()),
        Hq, Sq, HAS_DLSE=dlse is not None, WIDE=wide,
        DV=Dv, BLOCK_DV=configs.padded_head_dim(Dv), BLOCK_M=ROWS_BLOCK_M, num_warps=4,
    )  # fmt: skip
    if dk is not None and dv is not None:
        recipe.launch(
            attention_backward_keys_kernel, cdiv(Sk, for_keys.block_n) * B * Hkv,
            q, k, v, dout, lse2, delta, dk, dv, *strides, *dk.stride(), *dv.stride(), *sizes,
            WIDE=wide, **constants(for_keys, q, Dv, variant.kind),
        )  # fmt: skip
    if dq is not None:
        recipe.launch(
            attention_backward_queries_kernel, cdiv(Sq, for_queries.block_m) * B * Hq,
            q, k, v, dout, lse2, delta, dq, *strides, *dq.stride(), *sizes,
            WIDE=wide, **constants(for_queries, q, Dv, variant.kind),
        )  # fmt: skip
