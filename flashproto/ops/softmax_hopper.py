"""softmax and log_softmax forward of wide rows on Hopper: launches of
kernels/hopper/softmax_forward.py.

Legend: x [M, N], y [..., N].
"""

from __future__ import annotations

import torch
from torch import Tensor

from .. import configs
from ..kernels.hopper.softmax_forward import (
    softmax_forward_shared_kernel,
    softmax_forward_shared_split_kernel,
)
from .launch import Launch, launcher
from .softmax import launch_of_splits

launch_forward_shared = launcher(softmax_forward_shared_kernel, tensors=2)
launch_forward_shared_split = launcher(softmax_forward_shared_split_kernel, tensors=4)


def forward_launch_hopper(x: Tensor, y: Tensor, log: bool, config: configs.RowConfig) -> Launch:
    """The launch that fills y, of some elements.

    Rows that do not start at multiples of 16 bytes are copied to where they do: what a row gives shall
    not depend on where it lies.
    """
    per_unit = 16 // x.element_size()
    if x.data_ptr() % 16 != 0 or x.stride(0) % per_unit != 0:
        x = x.clone(memory_format=torch.contiguous_format)
    M, N = x.shape
    numbers = x.stride(0) // per_unit, M, N // per_unit, log, N % config.columns == 0
    if config.split:
        split = launch_of_splits(launch_forward_shared_split, config, (x, y), (None, *numbers))
        return split._replace(aligned=True, clears=True)
    options = {
        "C": config.columns, "num_warps": config.num_warps, "maxnreg": config.max_registers
    }  # fmt: skip
    return Launch(launch_forward_shared, M, (x, y, *numbers), options, aligned=True)
