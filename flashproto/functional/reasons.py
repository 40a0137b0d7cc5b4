"""Reasons against a backend that operators share; see backends.choose."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from .. import backends
from ..backends import Reason


def float64_reasons(backend: str, tensors: Sequence[Tensor]) -> Iterator[Reason]:
    if backend == "hopper":
        yield "not written for this operator"
    if backend == "triton" and any(t.dtype is torch.float64 for t in tensors):
        yield "dtype is float64; the kernels take float16, bfloat16 and float32"


def refuses_values(impl: str | None, backend: str) -> bool:
    """Whether a call on the CPU refuses indices that are out of range.

    A backend that makes NaN of them does so on a CPU too, where it was asked for by name.
    """
    return backend == "torch" or (impl is None and backends.get_default() is None)
