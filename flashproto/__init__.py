"""flashproto: fused attention, norms and softmax in Python alone (Triton and Gluon)."""

from .backends import BackendError
from .functional import (
    add_layer_norm,
    add_rms_norm,
    attention,
    layer_norm,
    log_softmax,
    logsumexp,
    rms_norm,
    scaled_dot_product_attention,
    softmax,
)

__version__ = "0.1.0"
__all__ = [
    "BackendError",
    "add_layer_norm",
    "add_rms_norm",
    "attention",
    "layer_norm",
    "log_softmax",
    "logsumexp",
    "rms_norm",
    "scaled_dot_product_attention",
    "softmax",
]
