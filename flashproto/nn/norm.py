"""LayerNorm and RMSNorm: torch's modules with the kernels of this library and a fused residual add.

Legend: x, residual [..., *normalized_shape].
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import overload

import torch
from torch import Tensor

from .. import functional as F
from ..checks import refuse


class LayerNorm(torch.nn.LayerNorm):
    """Drop-in for torch.nn.LayerNorm: same constructor, parameters and state_dict.

    norm(x) is the norm of x.  norm(x, residual) returns (norm of x + residual, x + residual) in one
    pass over memory: what a pre-norm Transformer does between two layers.

    Args beyond torch's: impl, the backend by name; None chooses (see flashproto.backends).
    Shapes, dtypes, errors and source: flashproto.layer_norm and flashproto.add_layer_norm.
    """

    def __init__(
        self,
        normalized_shape: int | Sequence[int],
        eps: float = 1e-5,
        elementwise_affine: bool = True,
        bias: bool = True,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        *,
        impl: str | None = None,
    ) -> None:
        super().__init__(normalized_shape, eps, elementwise_affine, bias, device, dtype)
        self.impl = impl

    @overload
    def forward(self, x: Tensor, residual: None = None) -> Tensor: ...
    @overload
    def forward(self, x: Tensor, residual: Tensor) -> tuple[Tensor, Tensor]: ...
    def forward(self, x, residual=None):
        shape, weight, bias = self.normalized_shape, self.weight, self.bias
        if residual is None:
            return F.layer_norm(x, shape, weight, bias, self.eps, impl=self.impl)
        return F.add_layer_norm(x, residual, shape, weight, bias, self.eps, impl=self.impl)


class RMSNorm(torch.nn.RMSNorm):
    """Drop-in for torch.nn.RMSNorm: same constructor, parameters and state_dict.

    norm(x) and norm(x, residual) as in LayerNorm; eps=None is torch.finfo(x.dtype).eps.
    Shapes, dtypes, errors and source: flashproto.rms_norm and flashproto.add_rms_norm.
    """

    def __init__(
        self,
        normalized_shape: int | Sequence[int],
        eps: float | None = None,
        elementwise_affine: bool = True,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        *,
        impl: str | None = None,
    ) -> None:
        super().__init__(normalized_shape, eps, elementwise_affine, device, dtype)
        self.impl = impl

    @overload
    def forward(self, x: Tensor, residual: None = None) -> Tensor: ...
    @overload
    def forward(self, x: Tensor, residual: Tensor) -> tuple[Tensor, Tensor]: ...
    def forward(self, x, residual=None):
        if residual is None:
            return F.rms_norm(x, self.normalized_shape, self.weight, self.eps, impl=self.impl)
        return F.add_rms_norm(x, residual, self.normalized_shape, self.weight, self.eps, impl=self.impl)


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
    refuse("make_norm", "kind", repr(kind), "'layer' or 'rms'", "Pass 'layer' for LayerNorm.")
