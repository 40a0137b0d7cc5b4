"""A linear layer of one row, for the modules of nn: not public."""

from __future__ import annotations

import torch
from torch import Tensor

from .. import backends, configs
from ..backends import float64_reasons
from ..checks.errors import described, refuse, refuse_shape
from ..checks.options import check_choice, check_eps
from ..checks.rows import check_casting
from ..checks.tensors import check_same, check_shape, check_tensor
from .cached import cached

if backends.HAS_TRITON:
    from ..ops.linear_row import Settings
    from ..ops.linear_row import linear_row as linear_row_op

NAME = "linear_row"
ACTIVATIONS = {"": ("", False), "gelu": ("gelu_tanh", False)}
ACTIVATIONS |= {"swiglu": ("silu", True), "geglu": ("gelu_tanh", True)}
DTYPES = (torch.bfloat16, torch.float16)


@cached
def linear_row(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    residual: Tensor | None = None,
    norm_weight: Tensor | None = None,
    norm_bias: Tensor | None = None,
    *,
    activation: str = "",
    norm: str = "",
    eps: float | None = None,
    casting: str = "torch",
    overlap: bool = False,
) -> Tensor | tuple[Tensor, Tensor]:
    """act(norm(x + residual) weight^T + bias), of which each part may be missing, in one launch.

    Args:
        x: [..., K], bfloat16 or float16, one row in all.
        weight: [N, K]; where the activation is gated [2N, K], gates first.  bias: [N] or [2N].
        residual: of x's shape, beside a norm; norm_weight, norm_bias: [K], of any floating dtype.
        activation: "", "gelu" (tanh form), "swiglu" or "geglu" (that form).
        overlap: whether the launch before on the stream writes none of weight, bias, norm_weight and
            norm_bias.  They may then be read while it runs (on Hopper and behind it).
        norm: "", "layer" or "rms"; eps, casting: see flashproto.rms_norm.

    Returns: y [..., N], or with a residual (y, x + residual).  The norm, the linear layer's result and
    the sum are rounded to x's dtype.  There is no gradient.
    Raises: TypeError, ValueError: an argument does not fit; BackendError: the kernels cannot run.
    """
    check_tensor(NAME, "x", x)
    if x.dtype not in DTYPES:
        refuse(NAME, "x", f"of dtype {x.dtype}", "bfloat16 or float16", "Convert it.", TypeError)
    if x.ndim == 0 or x.shape[-1] == 0 or x.shape[:-1].numel() != 1:
        do = "Call torch.nn.functional.linear."
        refuse_shape(NAME, "x", x, "[..., K], one row of some columns", do)
    tensors = {"x": x, "weight": weight} | ({} if bias is None else {"bias": bias})
    for name, t in tensors.items():
        check_tensor(NAME, name, t)
    check_same(NAME, tensors)
    check_choice(NAME, "activation", activation, tuple(ACTIVATIONS), "Leave it out for none.")
    act, up = ACTIVATIONS[activation]
    K = x.shape[-1]
    if weight.ndim != 2 or weight.shape[1] != K or weight.shape[0] % (1 + up) or not len(weight):
        takes = f"[{'2N' if up else 'N'}, {K}], N not 0"
        refuse_shape(NAME, "weight", weight, takes, "Pass that of the linear layer.")
    if bias is not None:
        check_shape(NAME, "bias", bias, weight.shape[:1], "one a row of weight", "Leave it out.")
    check_choice(NAME, "norm", norm, ("", "layer", "rms"), "Leave it out for none.")
    check_casting(NAME, casting)
    eps = check_eps(NAME, eps, x.dtype)
    if norm and configs.MOST_NORMALIZED < K:
        takes = f"'' for a row of more than {configs.MOST_NORMALIZED}"
        refuse(NAME, "norm", norm, takes, "Normalize before.")
    of_norm = {"residual": residual, "norm_weight": norm_weight, "norm_bias": norm_bias}
    if not norm:
        for name, part in of_norm.items():
            if part is not None:
                refuse(NAME, name, described(part), "None without a norm", "Leave it out.")
    for name, t in ((name, t) for name, t in of_norm.items() if t is not None):
        check_tensor(NAME, name, t)
        check_same(NAME, {"x": x, name: t}, dtype=name == "residual")
        if name == "residual":
            check_shape(NAME, name, t, x.shape, "the shape of x", "Expand it.")
        else:
            check_shape(NAME, name, t, (K,), "one a column of x", "Pass that of the norm.")
    given = x, weight, bias, residual, norm_weight, norm_bias
    there = [t for t in given if t is not None]
    backends.choose(NAME, "triton", there, lambda b: float64_reasons(b, there))
    settings = Settings(norm, eps, casting, act, up, overlap)
    return linear_row_op.bind(given, settings, (0,) if residual is None else (0, 1))
