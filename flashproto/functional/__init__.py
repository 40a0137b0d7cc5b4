"""The public functions: check the arguments, choose a backend, call it.

Every function takes impl=None | "hopper" | "triton" | "torch" | "reference" (see backends.py), works
under torch.compile(fullgraph=True), follows torch.autocast as PyTorch's function of that name does,
and raises TypeError or ValueError naming the argument when an input does not fit.
"""

from .. import backends
from .attention import (
    attention,
    attention_qkv,
    attention_varlen,
)
from .cross_entropy import (
    cross_entropy,
    linear_cross_entropy,
)
from .decode import (
    attention_with_kv_cache,
    merge_attention,
)
from .dropout import dropout_mask
from .glu import (
    geglu,
    gelu,
    reglu,
    swiglu,
)
from .norm import (
    add_layer_norm,
    add_rms_norm,
    layer_norm,
    rms_norm,
)
from .qk_norm import (
    qk_norm,
    qk_norm_qkv,
)
from .quantized_norm import (
    layer_norm_fp8,
    rms_norm_fp8,
)
from .rope import (
    rope,
    rope_qkv,
)
from .sdpa import scaled_dot_product_attention
from .softmax import (
    log_softmax,
    logsumexp,
    softmax,
    softmax_topk,
)

if backends.HAS_TRITON:
    from ..ops import flops as _  # noqa: F401, for torch.utils.flop_counter

__all__ = [
    "add_layer_norm",
    "add_rms_norm",
    "attention",
    "attention_qkv",
    "attention_varlen",
    "attention_with_kv_cache",
    "cross_entropy",
    "dropout_mask",
    "geglu",
    "gelu",
    "layer_norm",
    "layer_norm_fp8",
    "linear_cross_entropy",
    "log_softmax",
    "logsumexp",
    "merge_attention",
    "qk_norm",
    "qk_norm_qkv",
    "reglu",
    "rms_norm",
    "rms_norm_fp8",
    "rope",
    "rope_qkv",
    "scaled_dot_product_attention",
    "softmax",
    "softmax_topk",
    "swiglu",
]
