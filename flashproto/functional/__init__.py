"""The public functions: check the arguments, choose a backend, call it.

Every function takes impl=None | "hopper" | "triton" | "torch" | "reference" (see backends.py), works
under torch.compile(fullgraph=True), follows torch.autocast as PyTorch's function of that name does,
and raises TypeError or ValueError naming the argument when an input does not fit.
"""

from .attention import (
    attention,
    scaled_dot_product_attention,
)
from .norm import (
    add_layer_norm,
    add_rms_norm,
    layer_norm,
    rms_norm,
)
from .softmax import (
    log_softmax,
    logsumexp,
    softmax,
)

__all__ = [
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
