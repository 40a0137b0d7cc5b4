"""Reasons against a backend that operators share; see backends.choose."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from ..backends import Reason


def float64_reasons(backend: str, tensors: Sequence[Tensor]) -> Iterator[Reason]:
    if backend == "hopper":
        yield "not written for this operator"
    if backend == "triton" and any(t.dtype is torch.float64 for t in tensors):
        yield "dtype is float64; the kernels take float16, bfloat16 and float32"
