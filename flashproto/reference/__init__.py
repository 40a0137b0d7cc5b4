"""Every operator in plain PyTorch: the definition of correct.

Nothing here is fast.  Everything is differentiable as often as wanted, in reverse and forward mode,
runs on any device, and computes in float64 when given float64 (half-precision inputs are computed in
float32 and rounded once at the end).  The kernels are tested against this file; both states below
carry the names they have in the device code.

Legend: q [B, Hq, Sq, D], k [B, Hkv, Sk, D], v [B, Hkv, Sk, Dv], lse [B, Hq, Sq]; x [..., N].
"""

from .attention import attention, attention_gradients, causal_mask, each_sequence
from .cross_entropy import cross_entropy, linear_cross_entropy
from .decode import attention_with_kv_cache, fill_kv_cache, merge_attention
from .glu import ACTIVATIONS, glu
from .norm import add_norm, norm, quantized, recoverable
from .qk_norm import qk_norm
from .rope import rope, split_heads
from .softmax import log_softmax, logsumexp, softmax, softmax_topk
from .states import (
    compute_dtype,
    moments_finish,
    moments_merge,
    moments_of_tile,
    online_softmax_finish,
    online_softmax_merge,
    online_softmax_start,
    online_softmax_update,
)
