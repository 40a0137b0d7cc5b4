"""An activation that the layer behind it does not keep.

Of a gated MLP autograd keeps gate and up, for the activation's backward, and the activation h itself,
for the gradient of the layer behind: a third of what the MLP keeps.  Here that layer's backward makes h
again of gate and up, by the same kernel, so that gradients have the same bits.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

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

    def pack(x: Tensor) -> Any:
        # x shares h's counter of versions: a hook of layer's can have changed h.
        same = x.untyped_storage().data_ptr() == memory and x.dtype == dtype and x._version == version
        return (x.size(), x.stride(), x.storage_offset()) if same else x

    def unpack(kept: Any) -> Tensor:
        if isinstance(kept, Tensor):
            return kept
        with torch.no_grad():
            return activation(*(x for x in node.saved_tensors if x is not None)).as_strided(*kept)

    with saved_tensors_hooks(pack, unpack):
        return layer(h)


def saving_is_taken() -> bool:
    """Whether something else than autograd's default decides what is kept, or sees each call."""
    return (
        is_compiling()
        or transforms_active()
        or watched()
        or not _autograd._saved_tensors_hooks_is_enabled()
        or _autograd._top_saved_tensors_default_hooks(True) is not None
    )
