"""Tile shapes, warps and pipeline stages, in plain Python: no torch, no triton."""

from .attention import (
    AttentionConfig,
    attention_backward,
    attention_forward,
    padded_head_dim,
    shared_bytes,
)
from .hopper import (
    HopperBackward,
    HopperForward,
    attention_backward_hopper,
    attention_forward_hopper,
    balanced_plan,
    heads_together_backward,
    heads_together_forward,
    hopper_head_dim,
)
from .rows import (
    RowConfig,
    column_sums,
    logsumexp,
    norm_backward,
    norm_forward,
    norm_weight_gradient,
    softmax_backward,
    softmax_forward,
)
from .sizes import (
    power_of_two,
)

__all__ = [
    "AttentionConfig",
    "HopperBackward",
    "HopperForward",
    "RowConfig",
    "attention_backward",
    "attention_backward_hopper",
    "attention_forward",
    "attention_forward_hopper",
    "balanced_plan",
    "column_sums",
    "heads_together_backward",
    "heads_together_forward",
    "hopper_head_dim",
    "logsumexp",
    "norm_backward",
    "norm_forward",
    "norm_weight_gradient",
    "padded_head_dim",
    "power_of_two",
    "shared_bytes",
    "softmax_backward",
    "softmax_forward",
]
