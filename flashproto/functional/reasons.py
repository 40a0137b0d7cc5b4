"""Reasons against a backend that operators share; see backends.choose."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


def float64_reasons(backend: str, tensors: Sequence[Tensor]) -> Sequence[str]:
    if backend == "hopper":
        return ("not written for this operator",)
    if backend == "triton":
        for t in tensors:
            if t.dtype is torch.float64:
                return ("dtype is float64; the kernels take float16, bfloat16 and float32",)
    return ()
