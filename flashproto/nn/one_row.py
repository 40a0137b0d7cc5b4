"""A block's decoding step in fewer launches: one row, a cache, no gradient.

TransformerBlock comes here where `takes` says so.  A layer is then [norm, qkv], append, attention, its
merge, [out], [norm, up, activation], [down].  Adding the residual is the norm's work, as ever.  Results
are rounded where the modules round theirs.

Legend: that of block.py, with B = S = 1.
"""

from __future__ import annotations

import functools
from typing import Any, cast

import torch
from torch import Tensor, nn

from .. import backends, configs
from ..backends import autocast_dtype
from ..functional.linear_row import ACTIVATIONS, DTYPES, linear_row
from .attention import Attention, Rope
from .kv_cache import KVLayer
from .layers import Linear, has_plain_call, is_as_made, is_unwatched
from .mlp import MLP
from .norm import LayerNorm, RMSNorm

ENABLED = True  # but where tests compare with the modules
DEVICES = ("cuda",)  # tests add the CPU, for the interpreter
PLAIN = {kind: kind.forward for kind in (Attention, MLP, LayerNorm, RMSNorm, Linear, nn.Linear)}


def takes(block: Any, x: Tensor, residual: Tensor | None) -> bool:
    """Whether `step` may stand in for the calls of the modules in `block` with a cache alone."""
    if not ENABLED or torch.is_grad_enabled() or torch.compiler.is_compiling():
        return False
    attention, mlp, norms = block.attention, block.mlp, (block.norm1, block.norm2)
    if not (
        type(x) is Tensor
        and x.device.type in DEVICES
        and x.dtype in DTYPES
        and x.ndim == 3
        and x.shape[:2] == (1, 1)
        and x.shape[2] <= configs.MOST_NORMALIZED
        and all(is_as_made(n, LayerNorm, RMSNorm) and fits(n, x.shape[2]) for n in norms)
        and (residual is None or residual.dtype == x.dtype)
        and autocast_dtype(x) is None
        and backends.misfit((x,)) is None
        and all(kind.forward is forward for kind, forward in PLAIN.items())
        and has_plain_call(attention, Attention)
        and has_plain_call(mlp, MLP)
        and mlp.kind in ACTIVATIONS
        and is_unwatched(attention)
        and is_unwatched(mlp)
    ):
        return False
    linears = attention.qkv, attention.out, mlp.up, mlp.down
    return (
        all(impl in (None, "triton") for impl in (backends.get_default(), *(n.impl for n in norms)))
        and all(impl in (None, *backends.KERNELS) for impl in (attention.impl, mlp.impl))
        and not backends.device_reasons("triton", x.device)
        and all(is_as_made(f, Linear, nn.Linear) for f in linears)
        and all(f.weight.dtype == x.dtype and f.weight.stride(1) == 1 for f in linears)
    )


def fits(norm: LayerNorm | RMSNorm, columns: int) -> bool:
    """Whether its parameters are what the kernel reads, of so many columns."""
    parameters = [p for p in (norm.weight, norm.bias) if p is not None]
    return all(p.shape == (columns,) and p.dtype in (*DTYPES, torch.float32) for p in parameters)


def step(
    block: Any, x: Tensor, residual: Tensor | None, rope: Rope | None, cache: KVLayer
) -> tuple[Tensor, Tensor]:
    """What block(x, residual, rope, cache=cache) returns.

    What is launched before the first linear layer is the caller's, and may write weights; before the
    others it is from here, and does not.
    """
    attention, mlp = block.attention, block.mlp

    def qkv_of(x: Tensor) -> Tensor:
        nonlocal residual
        qkv, residual = behind_norm(block.norm1, attention.qkv, x, residual)
        return qkv

    def linear(of: nn.Linear, x: Tensor) -> Tensor:
        return cast(Tensor, linear_row(x, of.weight, of.bias, overlap=True))

    x = attention._between(qkv_of, functools.partial(linear, attention.out), x, rope, cache=cache)
    x, residual = behind_norm(block.norm2, mlp.up, x, residual, activation=mlp.kind, overlap=True)
    return linear(mlp.down, x), residual


def behind_norm(
    norm: LayerNorm | RMSNorm, of: nn.Linear, x: Tensor, residual: Tensor | None, **options: Any
) -> tuple[Tensor, Tensor]:
    """(act(of(norm(x + residual))), x + residual), where residual None is 0."""
    options["norm"] = "layer" if isinstance(norm, LayerNorm) else "rms"
    options |= {"eps": norm.eps, "casting": norm.casting}
    made = linear_row(x, of.weight, of.bias, residual, norm.weight, norm.bias, **options)
    return made if isinstance(made, tuple) else (made, x)
