"""Multi-head attention as a module, with rotary position embedding and QK norm.

Legend: B batch, S tokens, C = d_model, Hq query heads, Hkv key/value heads, D head_dim.
"""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any

import torch
from einops import rearrange
from torch import Tensor, nn

from .. import functional as F
from ..checks import LARGEST, SMALLEST, check_flag, check_integer, check_number, refuse
from .layers import Linear, is_as_made
from .norm import RMSNorm

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

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
    Raises: ValueError: head_dim is odd or a number out of range; TypeError: one is no number.

    Example:
        >>> cos, sin = nn.rope_tables(32, 16)
        >>> cos.shape, cos.dtype
        (torch.Size([32, 8]), torch.float32)
    """
    check_integer("rope_tables", "length", length, 0, sys.maxsize, "a number of tokens", "Pass it.")
    do = "Leave it out for what is usual."
    check_number("rope_tables", "theta", theta, SMALLEST, LARGEST, "a positive number", do)
    do = "Rotate pairs of dimensions."
    check_integer("rope_tables", "head_dim", head_dim, 0, sys.maxsize, "an even number", do)
    if head_dim % 2:
        refuse("rope_tables", "head_dim", head_dim, "an even number", do)
    return rope_tables_at(torch.arange(length, device=device, dtype=torch.float32), head_dim, theta)


def rope_tables_at(positions: Tensor, head_dim: int, theta: float) -> Rope:
    """The rows of rope_tables at positions [S], integers or float32."""
    dims = torch.arange(0, head_dim, 2, device=positions.device, dtype=torch.float32)
    angles = positions[:, None] * theta ** (-dims / head_dim)
    return angles.cos(), angles.sin()


def apply_rope(x: Tensor, rope: Rope) -> Tensor:
    """Rotate x [B, H, S, D] by the tables (cos, sin), each [length, D/2] with length >= S, from
    position 0 on; x's shape and dtype.  flashproto.rope does more, and raises what this raises.

    Example:
        >>> x = torch.randn(2, 4, 8, 16)
        >>> y = nn.apply_rope(x, nn.rope_tables(8, 16))
        >>> torch.allclose(y.norm(dim=-1), x.norm(dim=-1), atol=1e-5)
        True
    """
    return F.rope(x, None, *rope)


def beside_attention(impl: str | None) -> str | None:
    """The backend of the other operators in a module whose attention runs on `impl`.

    Backend "hopper" has attention alone: beside it they choose, which on such a GPU is "triton".
    """
    return None if impl == "hopper" else impl


class Attention(nn.Module):
    """Multi-head attention with one matrix for q, k and v.

    The kernels read the heads in the fused projection's output [B, S, (Hq + 2 Hkv) D], where they are,
    and write its gradient as one tensor.  With RoPE or QK norm one pass reads
    that output and writes q, k and v anew, and its gradient is one tensor written once.

    Args:
        d_model: width C of the input and the output.
        n_heads: query heads Hq.
        n_kv_heads: key and value heads Hkv, a divisor of Hq (GQA; 1 is MQA); Hq by default.
        head_dim: D; d_model / n_heads by default.
        bias: whether the two projections have one.
        causal: a token sees itself and the ones before it.
        qk_norm: RMSNorm over the D dimensions of every head of q and k (Henry et al., "Query-Key
            Normalization", 2020), before RoPE; its weights are q_norm.weight and k_norm.weight.
        eps: epsilon of QK norm; None is torch.finfo's of the dtype.
        interleaved: RoPE turns dimensions (2i, 2i + 1), as in GPT-J, not (i, i + D/2), as in Llama.
        impl: the backend by name, None chooses; of RoPE and QK norm too, which choose beside "hopper".
        device, dtype: of the parameters.

    forward(x [B, S, C], rope=None, group=None) returns [B, S, C]; `rope` is what rope_tables(S, D)
    returned (of any length from S on; of fewer than D dimensions to rotate only those), or None for no
    rotation.  With a process group, x is this rank's shard of each sequence and `rope` the rows at its
    positions, as flashproto.distributed has them, and ring_attention takes the place of attention.
    With the attribute record_max_score = True a call leaves the largest scaled score of each head, of
    the keys that are seen, in max_score [Hq], float32; not with a group.

    Raises: ValueError: heads and widths do not fit; TypeError: an argument is of another type.

    Example:
        >>> layer = nn.Attention(64, n_heads=4, n_kv_heads=2, qk_norm=True)
        >>> layer(torch.randn(2, 8, 64), nn.rope_tables(8, 16)).shape
        torch.Size([2, 8, 64])
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
        qk_norm: bool = False,
        eps: float | None = None,
        interleaved: bool = False,
        impl: str | None = None,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        n_kv_heads = n_heads if n_kv_heads is None else n_kv_heads
        check_heads("Attention", d_model, n_heads, n_kv_heads, head_dim)
        flags = {"bias": bias, "causal": causal, "qk_norm": qk_norm, "interleaved": interleaved}
        for name, flag in flags.items():
            check_flag("Attention", name, flag)
        self.n_heads = n_heads
        self.n_kv_heads = n_kv_heads
        self.head_dim = d_model // n_heads if head_dim is None else head_dim
        self.causal = causal
        self.interleaved = interleaved
        self.impl = impl
        self.record_max_score = False
        self.max_score: Tensor | None = None
        width = (n_heads + 2 * n_kv_heads) * self.head_dim
        place: dict[str, Any] = {"bias": bias, "device": device, "dtype": dtype}
        self.qkv = Linear(d_model, width, **place)
        self.out = Linear(n_heads * self.head_dim, d_model, **place)
        self.q_norm, self.k_norm = (
            RMSNorm(self.head_dim, eps, device=device, dtype=dtype, impl=beside_attention(impl))
            if qk_norm
            else None
            for _ in range(2)
        )

    def forward(self, x: Tensor, rope: Rope | None = None, group: ProcessGroup | None = None) -> Tensor:
        qkv = self.qkv(x)
        options: dict[str, Any] = {"causal": self.causal, "impl": self.impl}
        if group is not None:
            from ..distributed import ring_attention  # torch may be built without process groups

            if self.record_max_score:
                do = "Set it to False."
                refuse("Attention", "record_max_score", True, "False where group is given", do)
            y = ring_attention(*self._heads(qkv, rope), group, **options)
        elif self.record_max_score:
            heads = self._heads(qkv, rope)
            y, largest = F.attention(*heads, return_aux=("max_score",), **options)
            self.max_score = largest.detach().amax((0, 2))
        elif rope is None and self.q_norm is None and self.k_norm is None:
            y = F.attention_qkv(qkv, self.n_heads, self.n_kv_heads, **options)
        else:
            y = F.attention(*self._heads(qkv, rope), **options)
        return self.out(rearrange(y, "b h s d -> b s (h d)"))

    def _heads(self, qkv: Tensor, rope: Rope | None) -> tuple[Tensor, Tensor, Tensor]:
        """q [B, Hq, S, D], k and v [B, Hkv, S, D] of qkv, q and k normalized and rotated."""
        heads = (self.n_heads, self.n_kv_heads)
        options: dict[str, Any] = {
            "interleaved": self.interleaved,
            "impl": beside_attention(self.impl),
        }
        q_norm, k_norm = self.q_norm, self.k_norm
        if q_norm is None and k_norm is None and rope is not None:
            return F.rope_qkv(qkv, *heads, *rope, **options)
        if q_norm is not None and k_norm is not None and _one_pass(q_norm, k_norm):
            return F.qk_norm_qkv(
                qkv,
                *heads,
                q_norm.weight,
                k_norm.weight,
                *(rope or (None, None)),
                eps=q_norm.eps,
                casting=q_norm.casting,
                **options,
            )
        q, k, v = (
            rearrange(part, "b s (h d) -> b h s d", d=self.head_dim)
            for part in qkv.split([n * self.head_dim for n in (heads[0], heads[1], heads[1])], dim=-1)
        )
        q = q if q_norm is None else q_norm(q)
        k = k if k_norm is None else k_norm(k)
        if rope is not None:
            q, k = F.rope(q, k, *rope, **options)
        return q, k, v

    def extra_repr(self) -> str:
        return (
            f"n_heads={self.n_heads}, n_kv_heads={self.n_kv_heads}, head_dim={self.head_dim}, "
            f"causal={self.causal}, interleaved={self.interleaved}, impl={self.impl!r}"
        )


def _one_pass(q_norm: RMSNorm, k_norm: RMSNorm) -> bool:
    """Whether qk_norm_qkv may stand in for the calls of both."""
    return (
        is_as_made(q_norm, RMSNorm)
        and is_as_made(k_norm, RMSNorm)
        and q_norm.bias is None
        and k_norm.bias is None
        and (q_norm.eps, q_norm.casting) == (k_norm.eps, k_norm.casting)
    )


def check_heads(name: str, d_model: int, n_heads: int, n_kv_heads: int, head_dim: int | None) -> None:
    """Raise ValueError where Hq does not divide d_model (and sets D) or Hkv does not divide Hq, and
    TypeError where one of them is no integer."""
    sizes = {"d_model": d_model, "n_heads": n_heads, "n_kv_heads": n_kv_heads, "head_dim": head_dim}
    for argument, size in sizes.items():
        if argument != "head_dim" or size is not None:
            check_integer(name, argument, size, 1, sys.maxsize, "an integer of at least 1", "Pass one.")
    if n_heads % n_kv_heads:
        refuse(
            name,
            "n_kv_heads",
            n_kv_heads,
            f"a divisor of n_heads, {n_heads}",
            "Leave it out for as many key heads as query heads.",
        )
    if head_dim is None and d_model % n_heads:
        refuse(
            name,
            "d_model",
            d_model,
            f"a multiple of n_heads, {n_heads}",
            "Pass head_dim to set the width of a head apart from d_model.",
        )
