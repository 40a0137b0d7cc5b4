"""LayerNorm and RMSNorm of a hidden dimension that lies in shards on several ranks."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor

from .. import reference
from ..checks.errors import refuse
from ..checks.options import check_eps
from ..checks.rows import check_norm, check_rows
from ..functional.autocast import autocast_float32
from .agreement import agreed, all_in_backward
from .group import NOT_TRACED, Group, check_plain, check_untransformed, group_of, once


@torch.compiler.disable(reason=NOT_TRACED)
def layer_norm(
    x: Tensor,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    group: dist.ProcessGroup | None = None,
    *,
    eps: float = 1e-5,
) -> Tensor:
    """flashproto.layer_norm over a hidden dimension of which each rank of a group holds a shard.

    Each rank has the state (n, mean, M2) of its own elements of a row.  One all-gather of these, four
    numbers a row, and Chan's merge give that of the whole row; the backward pass gathers two more sums
    a row.  Every rank of the group makes the same call: of as many rows, with the same dtypes, eps and
    parameters.  Otherwise the process ends, waits, or returns wrong numbers; with FLASHPROTO_CHECKED=1
    in the environment all ranks raise an error that says what differs.  torch.compile does not trace
    it: it breaks the graph there, and fullgraph=True raises.

    Args:
        x: [..., N_r], this rank's elements of rows of N, any floating dtype and strides; other ranks
            may have more or fewer.
        weight, bias: [N_r], this rank's, of any floating dtype, or None.
        group: the ranks; None is the default group.
        eps: added to the (biased) variance.

    Returns: y of x's shape and dtype, computed in at least float32 and rounded once.  There are
        gradients for x, weight and bias, those of the sum of all ranks' losses.
    Raises: TypeError, ValueError: an argument does not fit; RuntimeError: there is no group;
        NotImplementedError: a second derivative is asked for.
    Source: Chan, Golub and LeVeque (1979) for the merge.

    Example:
        >>> x, weight, bias = torch.randn(4, 64), torch.randn(64), torch.randn(64)
        >>> y = distributed.layer_norm(x, weight, bias)  # of one rank
        >>> torch.allclose(y, flashproto.layer_norm(x, 64, weight, bias), atol=1e-5)
        True
    """
    return _norm(True, name="layer_norm", x=x, weight=weight, bias=bias, group=group, eps=eps)


@torch.compiler.disable(reason=NOT_TRACED)
def rms_norm(
    x: Tensor,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    group: dist.ProcessGroup | None = None,
    *,
    eps: float | None = None,
) -> Tensor:
    """flashproto.rms_norm over a hidden dimension of which each rank of a group holds a shard.

    Arguments, result and errors as layer_norm; eps=None is torch.finfo(x.dtype).eps, as in torch.

    Example:
        >>> x, weight = torch.randn(4, 64), torch.randn(64)
        >>> y = distributed.rms_norm(x, weight, eps=1e-6)  # of one rank
        >>> torch.allclose(y, flashproto.rms_norm(x, 64, weight, eps=1e-6), atol=1e-5)
        True
    """
    return _norm(False, name="rms_norm", x=x, weight=weight, bias=bias, group=group, eps=eps)


def _norm(centered, **given):
    own = "x", "weight", "bias"
    return ShardedNorm.apply(*agreed(given["name"], call_of, given, own, uneven=True), centered)


def call_of(name, x, weight, bias, group, eps):
    """What ShardedNorm takes, of arguments that fit; nothing travels here."""
    ranks = group_of(name, group)
    check_plain(name, x=x, weight=weight, bias=bias)
    check_rows(name, x)
    check_untransformed(name, x=x, weight=weight, bias=bias)
    if x.shape[-1] == 0:
        refuse(name, "x", "of no columns", "at least 1 on each rank", "Shard fewer ways.")
    check_norm(name, x, [x.shape[-1]], weight, bias, None)
    x, weight, bias = autocast_float32(name, x, weight, bias)
    eps = check_eps(name, eps, x.dtype)
    return x, weight, bias, ranks, eps


def moments(x: Tensor, centered: bool, ranks: Group) -> tuple[Tensor, Tensor, Tensor]:
    """(n, mean, M2) of whole rows, in float64, from this rank's x [..., N_r].

    A mean is rounded, and where it is large beside the deviations, its last digit counts: so what it
    lacks, the mean of the deviations from it, travels beside it, and M2 is about both.
    """
    n, mean, M2 = reference.moments_of_tile(x, centered)
    rest = (x - mean[..., None]).sum(-1) / n if centered else torch.zeros_like(mean)
    states = ranks.all_gather(torch.stack([n, mean, rest, M2 - n * rest * rest]))
    n, mean, M2 = (torch.zeros_like(n, dtype=torch.float64) for _ in range(3))
    for n_r, mean_r, rest_r, M2_r in torch.stack(states).double():
        n, mean, M2 = reference.moments_merge(n, mean, M2, n_r, mean_r + rest_r, M2_r)
    return n, mean, M2


class ShardedNorm(torch.autograd.Function):
    """y of this rank's elements."""

    @staticmethod
    def forward(ctx, x, weight, bias, ranks, eps, centered):
        rows = x.to(reference.compute_dtype(x.dtype))
        n, mean, M2 = moments(rows, centered, ranks)
        rstd = reference.moments_finish(n, M2, eps).to(rows.dtype)
        high = mean.to(rows.dtype)
        low = (mean - high).to(rows.dtype)
        ctx.ranks, ctx.centered = ranks, centered
        ctx.save_for_backward(x, weight, bias, n.to(rows.dtype), high, low, rstd)
        y = normalized(rows, high, low, rstd)
        y = y if weight is None else y * weight.to(y.dtype)
        y = y if bias is None else y + bias.to(y.dtype)
        return y.to(x.dtype)

    @staticmethod
    def backward(ctx, dy):
        all_in_backward("a norm", ctx.ranks, dy)
        with torch.no_grad():
            made = gradients(dy, ctx.ranks, ctx.centered, *ctx.saved_tensors)
        return *once("a norm of shards", made), None, None, None


def normalized(x: Tensor, high: Tensor, low: Tensor, rstd: Tensor) -> Tensor:
    """(x - mean) * rstd, the mean being high + low."""
    return ((x - high[..., None]) - low[..., None]) * rstd[..., None]


def gradients(
    dy: Tensor,
    ranks: Group,
    centered: bool,
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    n: Tensor,
    high: Tensor,
    low: Tensor,
    rstd: Tensor,
) -> list[Tensor | None]:
    """Those of x, weight and bias; of g = dy * weight they take two means of whole rows."""
    xhat, dy = normalized(x.to(rstd.dtype), high, low, rstd), dy.to(rstd.dtype)
    g = dy if weight is None else dy * weight.to(dy.dtype)
    sums = torch.stack([(g * xhat).sum(-1), g.sum(-1) if centered else torch.zeros_like(n)])
    along, mean = (torch.stack(ranks.all_gather(sums)).sum(0) / n)[..., None]
    dx = (g - xhat * along - mean) * rstd[..., None]
    return [
        dx.to(x.dtype),
        None if weight is None else (dy * xhat).sum_to_size(weight.shape).to(weight.dtype),
        None if bias is None else dy.sum_to_size(bias.shape).to(bias.dtype),
    ]
