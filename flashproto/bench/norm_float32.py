"""LayerNorm and RMSNorm of float32 rows, GB/s over widths; otherwise as `norm`, without its goals."""

from __future__ import annotations

from dataclasses import replace

import torch

from . import norm
from .norm import Problem, contenders, work

__all__ = ["contenders", "problems", "work"]


def problems(quick: bool, device: torch.device) -> list[Problem]:
    return [replace(p, dtype=torch.float32) for p in norm.problems(quick, device)]
