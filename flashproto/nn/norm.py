"""LayerNorm and RMSNorm: torch's modules with the kernels of this library and a fused residual add.

Legend: x, residual [..., *normalized_shape].
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, overload

import torch
from torch import Tensor

from .. import functional as F
from .. import hooks
from ..backends import autocast_dtype
from ..checks.errors import described, refuse
from .layers import is_as_made


class FusedNorm(torch.nn.Module):
    """What LayerNorm and RMSNorm have in common beyond torch's: how weights begin, and calls.

    operators: names of the norm, that of a sum, and the one into 8-bit floats.
    """

    operators: tuple[str, str, str]
    normalized_shape: tuple[int, ...]
    eps: Any
    weight: Any
    bias: Any
    casting: str
    memory_efficient: bool
    split_rows: bool
    impl: str | None

    def reset_parameters(self) -> None:
        super().reset_parameters()  # type: ignore[misc]  # of torch's norm
        if self.casting == "gemma" and self.weight is not None:
            torch.nn.init.zeros_(self.weight)

    @overload
    def forward(
        self,
        x: Tensor,
        residual: None = None,
        *,
        prologue: hooks.Call | None = None,
        epilogue: hooks.Call | None = None,
    ) -> Tensor: ...
    @overload
    def forward(
        self,
        x: Tensor,
        residual: Tensor,
        *,
        prologue: hooks.Call | None = None,
        epilogue: hooks.Call | None = None,
    ) -> tuple[Tensor, Tensor]: ...
    def forward(self, x, residual=None, *, prologue=None, epilogue=None):
        inputs = (x,) if residual is None else (x, residual)
        norm, add_norm, _ = self.operators
        return getattr(F, norm if residual is None else add_norm)(
            *inputs,
            self.normalized_shape,
            self.weight,
            bias=self.bias,
            eps=self.eps,
            casting=self.casting,
            prologue=prologue,
            epilogue=epilogue,
            memory_efficient=self.memory_efficient,
            split_rows=self.split_rows,
            impl=self.impl,
        )

    def fp8(
        self, x: Tensor, residual: Tensor | None = None, dtype: torch.dtype = torch.float8_e4m3fn
    ) -> tuple[Tensor, ...]:
        """(out, scale), or (out, scale, x + residual), of flashproto.layer_norm_fp8 or rms_norm_fp8."""
        return getattr(F, self.operators[2])(
            x,
            self.normalized_shape,
            self.weight,
            bias=self.bias,
            eps=self.eps,
            residual=residual,
            dtype=dtype,
            casting=self.casting,
            impl=self.impl,
        )


class LayerNorm(FusedNorm, torch.nn.LayerNorm):
    """Drop-in for torch.nn.LayerNorm: same constructor, parameters and state_dict.

    norm(x) is the norm of x.  norm(x, residual) returns (norm of x + residual, x + residual) in one
    pass over memory: what a pre-norm Transformer does between two layers.

    Args beyond torch's:
        casting: how the weight is applied, as in flashproto.layer_norm; with "gemma", which multiplies
            by 1 + weight, it starts at zero.
        memory_efficient, split_rows: as in flashproto.layer_norm; the former takes bias=False.
        impl: the backend by name; None chooses.

    forward also takes prologue and epilogue, see flashproto.hooks.  Shapes, dtypes, errors and source:
    flashproto.layer_norm and flashproto.add_layer_norm.

    Example:
        >>> norm, x = nn.LayerNorm(64), torch.randn(2, 8, 64)
        >>> torch.allclose(norm(x), torch.nn.LayerNorm(64)(x), atol=1e-5)
        True
        >>> y, total = norm(x, torch.randn(2, 8, 64))
    """

    operators = "layer_norm", "add_layer_norm", "layer_norm_fp8"

    def __init__(
        self,
        normalized_shape: int | Sequence[int],
        eps: float = 1e-5,
        elementwise_affine: bool = True,
        bias: bool = True,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        *,
        casting: str = "torch",
        memory_efficient: bool = False,
        split_rows: bool = False,
        impl: str | None = None,
    ) -> None:
        self.casting = casting
        self.memory_efficient, self.split_rows = memory_efficient, split_rows
        super().__init__(normalized_shape, eps, elementwise_affine, bias, device, dtype)
        self.impl = impl


class RMSNorm(FusedNorm, torch.nn.RMSNorm):
    """Drop-in for torch.nn.RMSNorm: same constructor, parameters and state_dict.

    norm(x) and norm(x, residual) as in LayerNorm, with its arguments beyond torch's, and with bias, a
    learned bias that starts at zero; eps=None is torch.finfo(x.dtype).eps.
    Shapes, dtypes, errors and source: flashproto.rms_norm and flashproto.add_rms_norm.

    Example:
        >>> norm, x = nn.RMSNorm(64, eps=1e-6, casting="llama"), torch.randn(2, 8, 64)
        >>> norm(x).shape
        torch.Size([2, 8, 64])
    """

    operators = "rms_norm", "add_rms_norm", "rms_norm_fp8"
    bias: torch.nn.Parameter | None

    def __init__(
        self,
        normalized_shape: int | Sequence[int],
        eps: float | None = None,
        elementwise_affine: bool = True,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        *,
        bias: bool = False,
        casting: str = "torch",
        memory_efficient: bool = False,
        split_rows: bool = False,
        impl: str | None = None,
    ) -> None:
        self.casting = casting
        self.memory_efficient, self.split_rows = memory_efficient, split_rows
        super().__init__(normalized_shape, eps, elementwise_affine, device, dtype)
        self.impl = impl
        shift = torch.zeros(self.normalized_shape, device=device, dtype=dtype) if bias else None
        self.register_parameter("bias", None if shift is None else torch.nn.Parameter(shift))

    def reset_parameters(self) -> None:
        super().reset_parameters()
        bias = getattr(self, "bias", None)  # there is none yet at the first call
        if bias is not None:
            torch.nn.init.zeros_(bias)


class GatedRMSNorm(RMSNorm):
    """RMSNorm with a gate, as in Mamba-2: norm(x, gate) is norm(x) * silu(gate), or with
    gate_first=True the norm of x * silu(gate); in one pass over memory.

    Args beyond RMSNorm's:
        gate_first: whether the gate comes before the norm.

    Shapes: x, gate and the result [..., *normalized_shape].
    Source: Dao and Gu, "Transformers are SSMs" (2024).

    Example:
        >>> norm, x, gate = nn.GatedRMSNorm(64), torch.randn(2, 64), torch.randn(2, 64)
        >>> expected = flashproto.rms_norm(x, 64, eps=1e-5) * torch.nn.functional.silu(gate)
        >>> torch.allclose(norm(x, gate), expected, atol=1e-5)
        True
    """

    def __init__(
        self,
        normalized_shape: int | Sequence[int],
        eps: float | None = 1e-5,
        *,
        gate_first: bool = False,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        impl: str | None = None,
    ) -> None:
        super().__init__(normalized_shape, eps, device=device, dtype=dtype, impl=impl)
        self.gate_first = gate_first

    def forward(self, x: Tensor, gate: Tensor) -> Tensor:  # type: ignore[override]
        made = hooks.call("silu_gate", gate)
        before, after = (made, None) if self.gate_first else (None, made)
        return super().forward(x, prologue=before, epilogue=after)


def norm_before_linear(norm: LayerNorm | RMSNorm, x: Tensor, residual: Tensor) -> tuple[Tensor, Tensor]:
    """(norm(x + residual), x + residual), of which linear layers take the first; in one pass where the
    norm is as it was made, else by calling the norm as any module of torch, with one tensor.

    Under torch.autocast a norm takes and gives float32, though x comes from a linear layer in
    autocast's dtype and the next one takes that dtype.  Here x stays as it is, and the norm is rounded
    to its dtype at once: the same results (up to the order in which a kernel adds, which may follow the
    dtypes), residual and arithmetic in float32, without casts of whole activations.
    """
    if not is_as_made(norm, LayerNorm, RMSNorm):
        total = x + residual
        return norm(total), total
    same_rounding = norm.casting == "torch" and norm.eps is not None and not norm.memory_efficient
    if same_rounding and residual.dtype == torch.float32 != x.dtype == autocast_dtype(x):
        with torch.autocast(x.device.type, enabled=False):
            return norm(x, residual)
    return norm(x, residual)


def make_norm(
    kind: str,
    width: int,
    *,
    bias: bool = True,
    eps: float = 1e-5,
    impl: str | None = None,
    device: torch.device | str | None = None,
    dtype: torch.dtype | None = None,
) -> LayerNorm | RMSNorm:
    """The norm called "layer" or "rms" over the last dimension, of `width` elements."""
    if kind == "layer":
        return LayerNorm(width, eps, bias=bias, device=device, dtype=dtype, impl=impl)
    if kind == "rms":
        return RMSNorm(width, eps, device=device, dtype=dtype, impl=impl)
    refuse("make_norm", "kind", described(kind), "'layer' or 'rms'", "Pass 'layer' for LayerNorm.")
