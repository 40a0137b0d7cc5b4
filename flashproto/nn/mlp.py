"""The position-wise networks of a Transformer block: GELU, SwiGLU and GEGLU.

Legend: x [..., C], C = d_model; d_ff the inner width.
"""

from __future__ import annotations

import sys

import torch
from torch import Tensor, nn

from .. import functional as F
from ..checks.errors import described, refuse
from ..checks.options import check_flag, check_integer
from .layers import Linear

KINDS = ("gelu", "swiglu", "geglu")


def default_d_ff(d_model: int, kind: str) -> int:
    """4 C for GELU; for the gated ones, whose three matrices replace two, 8/3 C rounded up to 64."""
    return 4 * d_model if kind == "gelu" else 64 * -(-8 * d_model // (3 * 64))


class MLP(nn.Module):
    """down(gelu(up(x))), or down(act(gate(x)) * up(x)) with gate and up in one matrix, whose output is
    read as it is and gets its gradient as one tensor.

    Args:
        d_model: width C of the input and the output.
        d_ff: inner width; default_d_ff(d_model, kind) by default.
        kind: "gelu" (tanh form, as in GPT-2), "swiglu" or "geglu" (silu, or that gelu, of the gate;
            Shazeer, "GLU Variants Improve Transformer", 2020).
        bias: whether the projections have one.
        impl: the backend of the activation by name; None chooses, and so does "hopper", which has none.
        device, dtype: of the parameters.

    forward(x [..., C]) returns [..., C].

    Raises: ValueError: the kind is unknown or a width below 1; TypeError: an argument of another type.

    Example:
        >>> nn.MLP(64, kind="swiglu", bias=False)(torch.randn(2, 8, 64)).shape
        torch.Size([2, 8, 64])
    """

    def __init__(
        self,
        d_model: int,
        d_ff: int | None = None,
        kind: str = "gelu",
        *,
        bias: bool = True,
        impl: str | None = None,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        if not isinstance(kind, str) or kind not in KINDS:
            takes = ", ".join(map(repr, KINDS[:-1])) + f" or {KINDS[-1]!r}"
            refuse("MLP", "kind", described(kind), takes, "Pass kind='gelu'.")
        takes, do = "an integer of at least 1", "Pass the width."
        check_integer("MLP", "d_model", d_model, 1, sys.maxsize, takes, do)
        d_ff = default_d_ff(d_model, kind) if d_ff is None else d_ff
        check_integer("MLP", "d_ff", d_ff, 1, sys.maxsize, takes, do)
        check_flag("MLP", "bias", bias)
        self.kind = kind
        self.impl = impl
        inner = d_ff if kind == "gelu" else 2 * d_ff
        self.up = Linear(d_model, inner, bias=bias, device=device, dtype=dtype)
        self.down = Linear(d_ff, d_model, bias=bias, device=device, dtype=dtype)

    def forward(self, x: Tensor) -> Tensor:
        impl = None if self.impl == "hopper" else self.impl
        x = self.up(x)
        if self.kind == "gelu":
            x = F.gelu(x, approximate="tanh", impl=impl)
        elif self.kind == "geglu":
            x = F.geglu(x, approximate="tanh", impl=impl)
        else:
            x = F.swiglu(x, impl=impl)
        return self.down(x)

    def extra_repr(self) -> str:
        return f"kind={self.kind!r}, impl={self.impl!r}"
