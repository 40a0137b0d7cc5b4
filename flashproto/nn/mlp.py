"""The two position-wise networks of a Transformer block: GELU and SwiGLU.

Legend: x [..., C], C = d_model, F = d_ff.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..checks import refuse


def default_d_ff(d_model: int, kind: str) -> int:
    """4 C for GELU; for SwiGLU, whose three matrices replace two, 8/3 C rounded up to 64."""
    return 4 * d_model if kind == "gelu" else 64 * -(-8 * d_model // (3 * 64))


class MLP(nn.Module):
    """down(gelu(up(x))), or down(silu(gate(x)) * up(x)) with gate and up in one matrix.

    Args:
        d_model: width C of the input and the output.
        d_ff: inner width F; default_d_ff(d_model, kind) by default.
        kind: "gelu" (tanh form, as in GPT-2) or "swiglu" (Shazeer, "GLU Variants", 2020).
        bias: whether the projections have one.

    forward(x [..., C]) returns [..., C].  Raises ValueError for an unknown kind.
    """

    def __init__(
        self,
        d_model: int,
        d_ff: int | None = None,
        kind: str = "gelu",
        *,
        bias: bool = True,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        if kind not in ("gelu", "swiglu"):
            refuse("MLP", "kind", repr(kind), "'gelu' or 'swiglu'", "Pass kind='gelu'.")
        d_ff = default_d_ff(d_model, kind) if d_ff is None else d_ff
        self.kind = kind
        inner = d_ff if kind == "gelu" else 2 * d_ff
        self.up = nn.Linear(d_model, inner, bias=bias, device=device, dtype=dtype)
        self.down = nn.Linear(d_ff, d_model, bias=bias, device=device, dtype=dtype)

    def forward(self, x: Tensor) -> Tensor:
        if self.kind == "gelu":
            return self.down(F.gelu(self.up(x), approximate="tanh"))
        gate, up = self.up(x).chunk(2, dim=-1)
        return self.down(F.silu(gate) * up)

    def extra_repr(self) -> str:
        return f"kind={self.kind!r}"
