"""RMSNorm of every head x [B, H, S, D], then rotary position embedding."""

from __future__ import annotations

from torch import Tensor

from .rope import rope
from .states import compute_dtype


def qk_norm(
    x: Tensor,
    weight: Tensor | None,
    cos: Tensor | None,
    sin: Tensor | None,
    positions: Tensor | None,
    offset: int | Tensor,
    eps: float,
    *,
    interleaved: bool = False,
    casting: str = "torch",
) -> Tensor:
    """rope(x / sqrt(mean(x^2) + eps) * weight), rounded once at the end.

    casting: "llama" rounds x / sqrt(...) to x's dtype before the weight; "gemma" multiplies by
    1 + weight.  No rotation where cos is None.
    """
    dtype = compute_dtype(x.dtype)
    y = x.to(dtype)
    y = y * (y.square().mean(-1, keepdim=True) + eps).rsqrt()
    if casting == "llama":
        y = y.to(x.dtype).to(dtype)
    if weight is not None:
        y = y * (weight.to(dtype) + (1 if casting == "gemma" else 0))
    if cos is not None and sin is not None:
        y = rope(y, cos, sin, positions, offset, interleaved=interleaved)
    return y.to(x.dtype)
