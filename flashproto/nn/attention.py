"""Multi-head attention as a module, and rotary position embedding.

Legend: B batch, S tokens, C = d_model, Hq query heads, Hkv key/value heads, D head_dim.
"""

from __future__ import annotations

from typing import Any

import torch
from einops import rearrange
from torch import Tensor, nn

from .. import functional as F
from ..checks import refuse

Rope = tuple[Tensor, Tensor]


def rope_tables(
    length: int,
    head_dim: int,
    theta: float = 10000.0,
    device: torch.device | str | None = None,
) -> Rope:
    """(cos, sin), each [length, head_dim / 2] in float32, of the angles position * theta^(-2i / D).

    Always float32: rounded to bfloat16, neighbouring positions past 256 would be the same.
    Source: Su et al., "RoFormer" (2021), equation 34; dimension i is paired with i + D/2
    as in Llama.
    Raises ValueError for an odd head_dim.
    """
    if head_dim % 2:
        refuse("rope_tables", "head_dim", head_dim, "an even number", "Rotate pairs of dimensions.")
    dims = torch.arange(0, head_dim, 2, device=device, dtype=torch.float32)
    positions = torch.arange(length, device=device, dtype=torch.float32)
    angles = positions[:, None] * theta ** (-dims / head_dim)
    return angles.cos(), angles.sin()


def apply_rope(x: Tensor, rope: Rope) -> Tensor:
    """Rotate x [B, H, S, D] by the tables (cos, sin), each [S, D/2]; x's shape and dtype."""
    cos, sin = rope
    x1, x2 = x.float().chunk(2, dim=-1)
    return torch.cat((x1 * cos - x2 * sin, x2 * cos + x1 * sin), dim=-1).to(x.dtype)


class Attention(nn.Module):
    """Multi-head attention with one matrix for q, k and v.

    The heads are views [B, H, S, D] of the fused projection's output [B, S, (Hq + 2 Hkv) D]: the
    kernels take any strides, so nothing is copied on the way in (RoPE writes q and k anew).

    Args:
        d_model: width C of the input and the output.
        n_heads: query heads Hq.
        n_kv_heads: key and value heads Hkv, a divisor of Hq (GQA; 1 is MQA); Hq by default.
        head_dim: D; d_model / n_heads by default.
        bias: whether the two projections have one.
        causal: a token sees itself and the ones before it.
        impl: the backend of flashproto.attention by name; None chooses.

    forward(x [B, S, C], rope=None) returns [B, S, C]; `rope` is what rope_tables(S, D) returned, or
    None for no rotation.  Raises ValueError where heads and widths do not fit.
    """

    def __init__(
        self,
        d_model: int,
        n_heads: int,
        n_kv_heads: int | None = None,
        head_dim: int | None = None,
        *,
        bias: bool = True,
        causal: bool = True,
        impl: str | None = None,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        n_kv_heads = n_heads if n_kv_heads is None else n_kv_heads
        check_heads("Attention", d_model, n_heads, n_kv_heads, head_dim)
        self.n_heads = n_heads
        self.n_kv_heads = n_kv_heads
        self.head_dim = d_model // n_heads if head_dim is None else head_dim
        self.causal = causal
        self.impl = impl
        width = (n_heads + 2 * n_kv_heads) * self.head_dim
        place: dict[str, Any] = {"bias": bias, "device": device, "dtype": dtype}
        self.qkv = nn.Linear(d_model, width, **place)
        self.out = nn.Linear(n_heads * self.head_dim, d_model, **place)

    def forward(self, x: Tensor, rope: Rope | None = None) -> Tensor:
        heads = (self.n_heads, self.n_kv_heads, self.n_kv_heads)
        q, k, v = (
            rearrange(part, "b s (h d) -> b h s d", d=self.head_dim)
            for part in self.qkv(x).split([n * self.head_dim for n in heads], dim=-1)
        )
        if rope is not None:
            q, k = apply_rope(q, rope), apply_rope(k, rope)
        y = F.attention(q, k, v, causal=self.causal, impl=self.impl)
        return self.out(rearrange(y, "b h s d -> b s (h d)"))

    def extra_repr(self) -> str:
        return (
            f"n_heads={self.n_heads}, n_kv_heads={self.n_kv_heads}, head_dim={self.head_dim}, "
            f"causal={self.causal}, impl={self.impl!r}"
        )


def check_heads(name: str, d_model: int, n_heads: int, n_kv_heads: int, head_dim: int | None) -> None:
    """Raise ValueError where Hq does not divide d_model (and sets D) or Hkv does not divide Hq."""
    if n_heads < 1:
        refuse(name, "n_heads", n_heads, "at least 1", "Pass the number of query heads.")
    if n_kv_heads < 1 or n_heads % n_kv_heads:
        refuse(
            name, "n_kv_heads", n_kv_heads, f"a divisor of n_heads, {n_heads}",
            "Pass None for as many key heads as query heads.",
        )  # fmt: skip
    if head_dim is None and d_model % n_heads:
        refuse(
            name, "d_model", d_model, f"a multiple of n_heads, {n_heads}",
            "Pass head_dim to set the width of a head apart from d_model.",
        )  # fmt: skip
    if head_dim is not None and head_dim < 1:
        refuse(name, "head_dim", head_dim, "at least 1", "Pass None for d_model / n_heads.")
