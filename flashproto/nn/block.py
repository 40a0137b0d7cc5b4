"""The pre-norm Transformer block, with each residual add fused into the norm that follows it.

Legend: B batch, S tokens, C = d_model; x, residual [B, S, C].
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from .. import masks
from . import one_row
from .attention import Attention, Rope, beside_attention, check_heads
from .kv_cache import KVLayer
from .layers import given
from .mlp import MLP
from .norm import make_norm, norm_before_linear

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup


class TransformerBlock(nn.Module):
    """h = h + attention(norm1(h)); h = h + mlp(norm2(h)), with the stream h kept as a pair.

    A block is given (x, residual), where h = x + residual, and returns such a pair: the add that
    ends one block is done by the first norm of the next, in the same pass over memory.

        x, residual = embedding, None
        for block in blocks:
            x, residual = block(x, residual)
        y, h = final_norm(x, residual)

    Args:
        d_model, n_heads, n_kv_heads, head_dim, causal: see Attention.
        d_ff: see MLP.
        window, softcap, sinks, dropout: see Attention, whose alibi is its own.
        norm: "layer" or "rms".
        mlp: "gelu", "swiglu" or "geglu": the kind of MLP.
        bias: whether the projections (and LayerNorm) have one.
        eps: epsilon of the norms.
        impl: the backend of attention, norms and MLP by name; None chooses.  With "hopper", which has
            attention alone, norms and MLP choose, and that is "triton" on such a GPU.
        device, dtype: of the parameters.

    forward(x [B, S, C], residual=None, rope=None, group=None, *, mask=None, cu_seqlens=None,
    positions=None, cache=None) returns (x, residual), both [B, S, C]; for rope and what follows see
    Attention.

    Raises: ValueError: widths and heads do not fit or a name is unknown; TypeError: an argument is of
    another type.

    Example:
        >>> block = nn.TransformerBlock(64, n_heads=4, norm="rms", mlp="swiglu", bias=False)
        >>> x, residual = block(torch.randn(2, 8, 64), None, nn.rope_tables(8, 16))
        >>> (x + residual).shape
        torch.Size([2, 8, 64])
    """

    def __init__(
        self,
        d_model: int,
        n_heads: int,
        n_kv_heads: int | None = None,
        d_ff: int | None = None,
        *,
        head_dim: int | None = None,
        norm: str = "layer",
        mlp: str = "gelu",
        bias: bool = True,
        causal: bool = True,
        window: Sequence[int | None] | None = None,
        softcap: float | None = None,
        sinks: bool = False,
        dropout: float = 0.0,
        eps: float = 1e-5,
        impl: str | None = None,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        kv_heads = n_heads if n_kv_heads is None else n_kv_heads
        check_heads("TransformerBlock", d_model, n_heads, kv_heads, head_dim)
        place: dict[str, Any] = {"bias": bias, "device": device, "dtype": dtype}
        others = beside_attention(impl)
        self.norm1 = make_norm(norm, d_model, eps=eps, impl=others, **place)
        options: dict[str, Any] = {"window": window, "softcap": softcap, "sinks": sinks}
        options["dropout"] = dropout
        self.attention = Attention(
            d_model, n_heads, n_kv_heads, head_dim, causal=causal, impl=impl, **options, **place
        )
        self.norm2 = make_norm(norm, d_model, eps=eps, impl=others, **place)
        self.mlp = MLP(d_model, d_ff, mlp, impl=others, **place)

    def forward(
        self,
        x: Tensor,
        residual: Tensor | None = None,
        rope: Rope | None = None,
        group: ProcessGroup | None = None,
        *,
        mask: masks.Mask | None = None,
        cu_seqlens: Tensor | None = None,
        positions: Tensor | None = None,
        cache: KVLayer | None = None,
    ) -> tuple[Tensor, Tensor]:
        others = group, mask, cu_seqlens, positions
        if cache is not None and others == (None,) * 4 and one_row.takes(self, x, residual):
            return one_row.step(self, x, residual, rope, cache)
        if residual is None:
            x, residual = self.norm1(x), x
        else:
            x, residual = norm_before_linear(self.norm1, x, residual)
        options: dict[str, Any] = {"group": group, "mask": mask, "cu_seqlens": cu_seqlens}
        options |= {"positions": positions, "cache": cache}
        x = self.attention(x, rope, **given(options))
        x, residual = norm_before_linear(self.norm2, x, residual)
        return self.mlp(x), residual
