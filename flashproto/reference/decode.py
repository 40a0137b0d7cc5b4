"""Attention in parts, and attention whose keys and values are kept from call to call."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from .states import compute_dtype


def merge_attention(outs: Sequence[Tensor], lses: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
    """Attention over the union of sets of keys from what attention over each of them gave.

    outs [..., Dv] are averages of values by weights that sum to exp(lse), lses [...]:

        lse = log(sum_i exp(lse_i))         out = sum_i exp(lse_i - lse) out_i

    It is online_softmax_merge with l = 1 in each state.  States are taken in as they come, in float32
    (float64 if one of them is).  Rows without a key anywhere (lse -inf in all) give 0 and -inf.
    """
    dtype = compute_dtype(outs[0].dtype)
    for x in (*outs[1:], *lses):
        dtype = torch.promote_types(dtype, x.dtype)
    logs = torch.stack([x.to(dtype) for x in lses])
    # The result does not depend on the shift, which is a constant to every derivative.
    m = logs.detach().amax(0)
    shift = torch.where(m == -math.inf, 0.0, m)
    weights = torch.exp(logs - shift)
    l = weights.sum(0)
    empty = l == 0
    divisor = torch.where(empty, 1.0, l)
    weights = weights / divisor
    out = weights[0, ..., None] * outs[0]
    for weight, x in zip(weights[1:], outs[1:], strict=True):
        out = out + weight[..., None] * x
    own = outs[0].dtype
    for x in outs[1:]:
        own = torch.promote_types(own, x.dtype)
    return out.to(own), torch.where(empty, -math.inf, shift + torch.log(divisor))
