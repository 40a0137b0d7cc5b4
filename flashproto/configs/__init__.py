"""Tile shapes, warps and pipeline stages, in plain Python: no torch, no triton."""

from .attention import (
    AttentionConfig,
    attention_backward,
    attention_backward_bias,
    attention_backward_distances,
    attention_delta,
    attention_forward,
    attention_sums_ends,
    attention_takes_tf32,
    padded_head_dim,
    shared_bytes,
)
from .cross_entropy import (
    CrossEntropyConfig,
    StripConfig,
    classes_at_once,
    classes_summed,
    cross_entropy_backward,
    cross_entropy_forward,
    cross_entropy_forward_gradient,
    cross_entropy_total,
    gradient_scale,
    padded_classes,
    product_classes,
    tokens_at_once,
)
from .decode import (
    DecodeConfig,
    MergeConfig,
    attention_decode,
    attention_splits_keys,
    decode_merge,
    splits_cache,
)
from .elementwise import HeadConfig, TileConfig, glu, heads, merge_parts, qk_norm_backward
from .hopper import hopper_head_dim
from .hopper_backward import HopperBackward, attention_backward_hopper, heads_together_backward
from .hopper_forward import (
    HopperForward,
    attention_cache_hopper,
    attention_forward_hopper,
    attention_merge,
    balanced_work,
    forward_parts,
    heads_together_forward,
)
from .linear_row import MOST_NORMALIZED, linear_row
from .rows import (
    RowConfig,
    column_sums,
    logsumexp,
    norm_backward,
    norm_backward_shared,
    norm_forward,
    norm_forward_shared,
    norm_forward_unaligned,
    norm_keeps_statistics,
    norm_split,
    softmax_backward,
    softmax_forward,
    softmax_forward_shared,
    softmax_split,
    softmax_topk,
    softmax_topk_backward,
    softmax_topk_join,
    softmax_topk_span,
)
from .sizes import power_of_two
