"""An activation that the layer behind it does not keep.

Of a gated MLP autograd keeps gate and up, for the activation's backward, and the activation h itself,
for the gradient of the layer behind: a third of what the MLP keeps.  Here that layer's backward makes h
again of gate and up, by the same kernel, so that gradients have the same bits.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import _C, Tensor
from torch.autograd.function import BackwardCFunction
from torch.autograd.graph import saved_tensors_hooks
from torch.compiler import is_compiling

from ..checks.reading import transforms_active, watched

_autograd: Any = _C._autograd


def through_activation(
    layer: Callable[[Tensor], Tensor], activation: Callable[..., Tensor], *inputs: Tensor
) -> Tensor:
    """layer(activation(*inputs)), keeping `inputs` and what else layer keeps.

    activation: saves its inputs alone.  Where it is no kernel of this library, and where something else
    decides what autograd keeps, as checkpointing and offloading do, everything is kept as they say.
    """
    h = activation(*inputs)
    if saving_is_taken():
        return layer(h)
    node: Any = h.grad_fn  # of an autograd.Function, if the activation is one of this library's kernels
    if not (isinstance(node, BackwardCFunction) and h.is_contiguous()):
        return layer(h)
    memory, dtype, version = h.untyped_storage().data_ptr(), h.dtype, h._version
    given = [Kept.of(x) for x in inputs]

    def pack(x: Tensor) -> Any:
        # x shares h's counter of versions: a hook of layer's can have changed h.
        plain = type(x) is Tensor and x.layout is torch.strided and x.dtype == dtype
        same = plain and x.untyped_storage().data_ptr() == memory and x._version == version
        return (x.size(), x.stride(), x.storage_offset()) if same else Kept.of(x)

    def unpack(kept: Any) -> Tensor:
        if isinstance(kept, Kept):
            return kept.unchanged()
        with torch.no_grad():
            return activation(*(x.unchanged() for x in given)).as_strided(*kept)

    with saved_tensors_hooks(pack, unpack):
        return layer(h)


class Kept(NamedTuple):
    """A tensor that autograd would keep, and its version: autograd checks none where it has hooks."""

    tensor: Tensor
    version: int | None

    @staticmethod
    def of(x: Tensor) -> Kept:
        """Without its node, which would hold itself by what it keeps."""
        version = None if x.is_inference() else x._version
        return Kept(x if x.grad_fn is None else x.detach(), version)

    def unchanged(self) -> Tensor:
        x, version = self
        if version is not None and x._version != version:
            raise RuntimeError(
                "one of the variables needed for gradient computation has been modified by an inplace "
                f"operation: one of shape {list(x.shape)} is at version {x._version}, and was kept "
                f"at version {version}. Change it after the backward pass, or change a copy."
            )
        return x


def saving_is_taken() -> bool:
    """Whether something else than autograd's default decides what is kept, or sees each call."""
    return (
        is_compiling()
        or transforms_active()
        or watched()
        or not _autograd._saved_tensors_hooks_is_enabled()
        or _autograd._top_saved_tensors_default_hooks(True) is not None
    )
