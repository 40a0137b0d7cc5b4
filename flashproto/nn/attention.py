"""Multi-head attention as a module, with rotary position embedding and QK norm.

Legend: B batch, S tokens, C = d_model, Hq query heads, Hkv key/value heads, D head_dim.
"""

from __future__ import annotations

import functools
import math
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from einops import rearrange
from torch import Tensor, nn

from .. import functional as F
from .. import masks
from ..checks.errors import described, refuse
from ..checks.options import LARGEST, SMALLEST, check_flag, check_integer, check_number
from ..functional.attention_request import check_window
from ..variant import NUMBERS
from .kv_cache import KVLayer
from .layers import Linear, is_as_made
from .norm import RMSNorm

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

Rope = tuple[Tensor, Tensor]


@dataclass(frozen=True)
class RopeScaling:
    """RoPE's frequencies for longer texts than those that a model was first trained on, as in Llama 3.1
    ("llama3" in its config.json).

    A frequency turns so many times within original_context tokens.  One that turns high_freq_factor
    times or more stays; one that turns low_freq_factor times or less is divided by `factor`; between
    them it is a mean of both, with weights that are linear in the number of turns.

    Raises: ValueError: a number out of range; TypeError: one is no number.
    Source: the reference implementation of Llama 3.1.

    Example:
        >>> scaling = nn.RopeScaling(factor=8.0)
        >>> cos, sin = nn.rope_tables(32, 16, 500000.0, scaling=scaling)
    """

    factor: float
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_context: int = 8192

    def __post_init__(self) -> None:
        name, do = "RopeScaling", "Take those of the model's config.json."
        check_number(name, "factor", self.factor, 1.0, LARGEST, "a finite number, 1 or more", do)
        low = check_number(
            name, "low_freq_factor", self.low_freq_factor, SMALLEST, LARGEST, "a positive number", do
        )
        takes = f"a finite number above low_freq_factor, {low}"
        least = math.nextafter(low, math.inf)
        check_number(name, "high_freq_factor", self.high_freq_factor, least, LARGEST, takes, do)
        takes = "a number of tokens"
        check_integer(name, "original_context", self.original_context, 1, sys.maxsize, takes, do)

    def __call__(self, frequencies: Tensor) -> Tensor:
        """Those that take the place of frequencies, in radians a token."""
        low, high = self.low_freq_factor, self.high_freq_factor
        turns = frequencies * (self.original_context / (2 * math.pi))
        kept = ((turns - low) / (high - low)).clamp(0.0, 1.0)
        return frequencies * kept + frequencies / self.factor * (1.0 - kept)


def rope_tables(
    length: int,
    head_dim: int,
    theta: float = 10000.0,
    device: torch.device | str | None = None,
    *,
    scaling: RopeScaling | None = None,
) -> Rope:
    """(cos, sin), each [length, head_dim / 2] in float32, of the angles position * theta^(-2i / D),
    whose frequencies theta^(-2i / D) `scaling` changes.

    Always float32: rounded to bfloat16, neighbouring positions past 256 would be the same.
    Source: Su et al., "RoFormer" (2021), equation 34; dimension i is paired with i + D/2
    as in Llama.
    Raises: ValueError: head_dim is odd or a number out of range; TypeError: one is no number.

    Example:
        >>> cos, sin = nn.rope_tables(32, 16)
        >>> cos.shape, cos.dtype
        (torch.Size([32, 8]), torch.float32)
    """
    check_integer("rope_tables", "length", length, 0, sys.maxsize, "a number of tokens", "Pass it.")
    do = "Leave it out for what is usual."
    theta = check_number("rope_tables", "theta", theta, SMALLEST, LARGEST, "a positive number", do)
    do = "Rotate pairs of dimensions."
    check_integer("rope_tables", "head_dim", head_dim, 0, sys.maxsize, "an even number", do)
    if head_dim % 2:
        refuse("rope_tables", "head_dim", head_dim, "an even number", do)
    check_scaling("rope_tables", "scaling", scaling)
    positions = torch.arange(length, device=device, dtype=torch.float32)
    return rope_tables_at(positions, head_dim, theta, scaling)


def rope_tables_at(
    positions: Tensor, head_dim: int, theta: float, scaling: RopeScaling | None = None
) -> Rope:
    """The rows of rope_tables at positions [S], integers or float32."""
    dims = torch.arange(0, head_dim, 2, device=positions.device, dtype=torch.float32)
    frequencies = theta ** (-dims / head_dim)
    angles = positions[:, None] * (frequencies if scaling is None else scaling(frequencies))
    return angles.cos(), angles.sin()


def apply_rope(x: Tensor, rope: Rope) -> Tensor:
    """Rotate x [B, H, S, D] by the tables (cos, sin), each [length, D/2] with length >= S, from
    position 0 on; x's shape and dtype.  flashproto.rope does more, and raises what this raises.

    Example:
        >>> x = torch.randn(2, 4, 8, 16)
        >>> y = nn.apply_rope(x, nn.rope_tables(8, 16))
        >>> torch.allclose(y.norm(dim=-1), x.norm(dim=-1), atol=1e-5)
        True
    """
    return F.rope(x, None, *rope)


def alibi_slopes(n_heads: int, device: torch.device) -> Tensor:
    """[Hq] float32: 2^(-8/n), 2^(-16/n), ... 2^-8 for a power of 2, n; other numbers of heads have
    those of the power below, and then every other one of the power above."""
    below = 1 << (n_heads.bit_length() - 1)
    i = torch.arange(n_heads, device=device, dtype=torch.float32)
    return torch.exp2(
        torch.where(i < below, (i + 1) * (-8 / below), (2 * (i - below) + 1) * (-4 / below))
    )


def check_cu_seqlens(name: str, x: object) -> None:
    """int32 [n + 1]; attention_varlen checks the numbers in it."""
    if not isinstance(x, Tensor) or x.dtype != torch.int32 or x.ndim != 1:
        got = f"of {x.dtype}, {described(x)}" if isinstance(x, Tensor) else described(x)
        takes, do = "an int32 tensor [n + 1] for n sequences", "Pass where they begin, and the end."
        refuse(name, "cu_seqlens", got, takes, do, TypeError)


def positions_of(cu_seqlens: Tensor, tokens: int) -> Tensor:
    """[tokens]: the position of each in its own sequence."""
    at = torch.arange(tokens, device=cu_seqlens.device, dtype=torch.int32)
    return at - cu_seqlens[torch.searchsorted(cu_seqlens, at, right=True) - 1]


def beside_attention(impl: str | None) -> str | None:
    """The backend of the other operators in a module whose attention runs on `impl`.

    Backend "hopper" has attention alone: beside it they choose, which on such a GPU is "triton".
    """
    return None if impl == "hopper" else impl


class Attention(nn.Module):
    """Multi-head attention with one matrix for q, k and v.

    The kernels read the heads in the fused projection's output [B, S, (Hq + 2 Hkv) D], where they are,
    and write its gradient as one tensor.  With RoPE or QK norm one pass reads
    that output and writes q, k and v anew, and its gradient is one tensor written once.

    Args:
        d_model: width C of the input and the output.
        n_heads: query heads Hq.
        n_kv_heads: key and value heads Hkv, a divisor of Hq (GQA; 1 is MQA); Hq by default.
        head_dim: D; d_model / n_heads by default.
        bias: whether the two projections have one.
        causal: a token sees itself and the ones before it.
        qk_norm: RMSNorm over the D dimensions of every head of q and k (Henry et al., "Query-Key
            Normalization", 2020), before RoPE; its weights are q_norm.weight and k_norm.weight.
        eps: epsilon of QK norm; None is torch.finfo's of the dtype.
        interleaved: RoPE rotates dimensions (2i, 2i + 1), as in GPT-J, not (i, i + D/2), as in Llama.
        window, softcap: as flashproto.attention takes them: window=(1023, 0), softcap=30.0.
        sinks: a learned sink for each query head, the parameter `sinks` [Hq].  They begin at 0, which
            reset_parameters() sets, and are scores, not weights: keep them out of weight decay.
        dropout: the share of attention's probabilities that is dropped while training, see
            flashproto.attention; 0 after eval().
        alibi: ALiBi with the slopes of Press et al., "Train Short, Test Long" (2021), which are fixed,
            in the place of rope.  Blocks and models have no such option.
        impl: the backend by name, None chooses; of RoPE and QK norm too, which choose beside "hopper".
        device, dtype: of the parameters.

    forward(x [B, S, C], rope=None, group=None, *, mask=None, cu_seqlens=None, positions=None,
    cache=None) returns [B, S, C].

    - rope: what rope_tables(S, D) returned (of any length from S on; of fewer than D dimensions to
      rotate only those), or None for no rotation.
    - positions: integers [S] or [B, S], the row of rope's tables for each token; None is 0 to S - 1.
    - mask: a value of flashproto.masks, beside causal and window.
    - cu_seqlens: int32 [n + 1], where n sequences side by side begin, and the end of the last one, as
      attention_varlen takes it.  x is then [T, C] or [1, T, C], of all tokens, and so is the result.
      Positions begin anew in each sequence: rope needs rows for the longest one alone.
    - group: a process group.  x is this rank's shard of each sequence and `rope` the rows at its
      positions, as flashproto.distributed has them, mask is of the whole sequence, and ring_attention
      takes the place of attention.  Gradients of parameters, sinks too, are those of this rank's
      tokens: sum them over the group, once.  No cu_seqlens, alibi, record_max_score and, while
      training, dropout beside it.

    - cache: one of nn.KVCache's layers, which has the keys before x and gets those of x.  `rope` then
      has rows for all positions that it has room for.  Call the KVCache's advance() behind the last
      layer.  There is no gradient, and no group, mask, positions, record_max_score and, while training,
      dropout beside it.

    With the attribute record_max_score = True a call leaves the largest scaled score of each head, of
    the keys that are seen, in max_score [Hq], float32.

    Raises: ValueError: heads and widths do not fit, or options do not go together; TypeError: an
    argument is of another type.

    Example:
        >>> layer = nn.Attention(64, n_heads=4, n_kv_heads=2, qk_norm=True, window=(3, 0), sinks=True)
        >>> x, rope = torch.randn(2, 8, 64), nn.rope_tables(8, 16)
        >>> layer(x, rope).shape
        torch.Size([2, 8, 64])
        >>> packed = layer(x.view(1, 16, 64), rope, cu_seqlens=torch.tensor([0, 8, 16]).int())
        >>> torch.allclose(packed.view(2, 8, 64), layer(x, rope), atol=1e-5)
        True
    """

    def __init__(
        self,
        d_model: int,
        n_heads: int,
        n_kv_heads: int | None = None,
        head_dim: int | None = None,
        *,
        bias: bool = True,
        causal: bool = True,
        qk_norm: bool = False,
        eps: float | None = None,
        interleaved: bool = False,
        window: Sequence[int | None] | None = None,
        softcap: float | None = None,
        sinks: bool = False,
        dropout: float = 0.0,
        alibi: bool = False,
        impl: str | None = None,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        n_kv_heads = n_heads if n_kv_heads is None else n_kv_heads
        check_heads("Attention", d_model, n_heads, n_kv_heads, head_dim)
        flags = {"bias": bias, "causal": causal, "qk_norm": qk_norm, "interleaved": interleaved}
        for name, flag in (flags | {"sinks": sinks, "alibi": alibi}).items():
            check_flag("Attention", name, flag)
        check_options("Attention", window, softcap, dropout)
        self.n_heads = n_heads
        self.n_kv_heads = n_kv_heads
        self.head_dim = d_model // n_heads if head_dim is None else head_dim
        self.causal = causal
        self.interleaved = interleaved
        self.window = None if window is None else tuple(window)
        self.softcap = softcap
        self.dropout = dropout
        self.alibi = alibi
        self.impl = impl
        self.record_max_score = False
        self.max_score: Tensor | None = None
        width = (n_heads + 2 * n_kv_heads) * self.head_dim
        place: dict[str, Any] = {"bias": bias, "device": device, "dtype": dtype}
        self.qkv = Linear(d_model, width, **place)
        self.out = Linear(n_heads * self.head_dim, d_model, **place)
        made = torch.zeros(n_heads, device=device, dtype=dtype)
        self.sinks = nn.Parameter(made) if sinks else None
        self.q_norm, self.k_norm = (
            RMSNorm(self.head_dim, eps, device=device, dtype=dtype, impl=beside_attention(impl))
            if qk_norm
            else None
            for _ in range(2)
        )

    def reset_parameters(self) -> None:
        """Set sinks to 0; the other parameters are those of its layers."""
        if self.sinks is not None:
            nn.init.zeros_(self.sinks)

    def forward(
        self,
        x: Tensor,
        rope: Rope | None = None,
        group: ProcessGroup | None = None,
        *,
        mask: masks.Mask | None = None,
        cu_seqlens: Tensor | None = None,
        positions: Tensor | None = None,
        cache: KVLayer | None = None,
    ) -> Tensor:
        others = group, mask, cu_seqlens, positions, cache
        return self._between(self.qkv, self.out, x, rope, *others)

    def _between(
        self,
        qkv_of: Callable[[Tensor], Tensor],
        out_of: Callable[[Tensor], Tensor],
        x: Tensor,
        rope: Rope | None,
        group: ProcessGroup | None = None,
        mask: masks.Mask | None = None,
        cu_seqlens: Tensor | None = None,
        positions: Tensor | None = None,
        cache: KVLayer | None = None,
    ) -> Tensor:
        """forward with other functions in the place of the two projections."""
        options: dict[str, Any] = {
            "causal": self.causal,
            "window": self.window,
            "softcap": self.softcap,
            "sinks": self.sinks,
            "mask": mask,
            "impl": self.impl,
        }
        dropped = {"dropout_p": self.dropout} if self.dropout and self.training else {}
        more: dict[str, Any] = {}  # what attention_qkv does not take
        if self.alibi:
            if rope is not None:
                do = "Leave one of them out."
                refuse("Attention", "rope", "given", "None where alibi=True, which takes its place", do)
            more["alibi_slopes"] = alibi_slopes(self.n_heads, x.device)
        if self.record_max_score:
            more["return_aux"] = ("max_score",)
        attend: Callable[..., Any] = F.attention
        tokens_alone = x.ndim == 2
        if cache is not None:
            if not isinstance(cache, KVLayer):
                takes, do = "a layer of an nn.KVCache", "Pass cache.layers[i] to layer i."
                refuse("Attention", "cache", described(cache), takes, do, TypeError)
            others: dict[str, Any] = {"group": group, "mask": mask, "positions": positions}
            others["dropout"] = dropped.get("dropout_p")
            refuse_beside("cache", others | {"record_max_score": self.record_max_score})
            if cu_seqlens is not None:
                check_cu_seqlens("Attention", cu_seqlens)
                x = as_packed(x)
            options["impl"] = beside_attention(self.impl)
            del options["mask"]
            more |= {"rope": rope, "interleaved": self.interleaved, "cu_seqlens": cu_seqlens}
            attend, rope = cache.attend, None
        elif group is not None:
            others = {"alibi": self.alibi, "record_max_score": self.record_max_score}
            others["dropout"] = dropped.get("dropout_p")
            attend = of_shards(group, cu_seqlens=cu_seqlens, **others)
        elif cu_seqlens is not None:
            check_cu_seqlens("Attention", cu_seqlens)
            x, attend = as_packed(x), side_by_side(cu_seqlens)
            if rope is not None and positions is None:
                positions = positions_of(cu_seqlens, x.shape[1])
        if positions is not None and rope is None:
            takes, do = "None without rope, whose rows they are", "Pass rope, or leave it out."
            refuse("Attention", "positions", described(positions), takes, do)
        qkv = qkv_of(x)
        options |= dropped
        as_it_is = rope is None and self.q_norm is None and self.k_norm is None
        if as_it_is and attend is F.attention and not more:
            y = F.attention_qkv(qkv, self.n_heads, self.n_kv_heads, **options)
        else:
            y = attend(*self._heads(qkv, rope, positions), **options, **more)
        if self.record_max_score:
            y, largest = y
            self.max_score = largest.detach().amax((0, 2))
        y = out_of(rearrange(y, "b h s d -> b s (h d)"))
        return y.squeeze(0) if tokens_alone else y

    def _heads(
        self, qkv: Tensor, rope: Rope | None, positions: Tensor | None = None
    ) -> tuple[Tensor, Tensor, Tensor]:
        """q [B, Hq, S, D], k and v [B, Hkv, S, D] of qkv, q and k normalized and rotated."""
        heads = (self.n_heads, self.n_kv_heads)
        options: dict[str, Any] = {
            "positions": None if rope is None else positions,
            "interleaved": self.interleaved,
            "impl": beside_attention(self.impl),
        }
        q_norm, k_norm = self.q_norm, self.k_norm
        if q_norm is None and k_norm is None and rope is not None:
            return F.rope_qkv(qkv, *heads, *rope, **options)
        if q_norm is not None and k_norm is not None and _one_pass(q_norm, k_norm):
            return F.qk_norm_qkv(
                qkv,
                *heads,
                q_norm.weight,
                k_norm.weight,
                *(rope or (None, None)),
                eps=q_norm.eps,
                casting=q_norm.casting,
                **options,
            )
        q, k, v = (
            rearrange(part, "b s (h d) -> b h s d", d=self.head_dim)
            for part in qkv.split([n * self.head_dim for n in (heads[0], heads[1], heads[1])], dim=-1)
        )
        q = q if q_norm is None else q_norm(q)
        k = k if k_norm is None else k_norm(k)
        if rope is not None:
            q, k = F.rope(q, k, *rope, **options)
        return q, k, v

    def extra_repr(self) -> str:
        return (
            f"n_heads={self.n_heads}, n_kv_heads={self.n_kv_heads}, head_dim={self.head_dim}, "
            f"causal={self.causal}, interleaved={self.interleaved}, window={self.window}, "
            f"softcap={self.softcap}, dropout={self.dropout}, alibi={self.alibi}, impl={self.impl!r}"
        )


# --- functions in the place of flashproto.attention ------------------------------------------------


def of_shards(group: ProcessGroup, **others: Any) -> Callable[..., Any]:
    """ring_attention of a group's shards; `others`: options of a layer that it does not take."""
    refuse_beside("group", others)
    from ..distributed import ring_attention  # torch may be built without process groups

    return functools.partial(ring_attention, group=group)


def refuse_beside(given: str, others: dict[str, Any]) -> None:
    """Refuse `others` that are there beside what is given."""
    for name, x in others.items():
        if x is not None and x is not False:
            none = "False" if x is True else "0.0 or eval()" if name == "dropout" else "None"
            takes = f"{none} where {given} is given"
            refuse("Attention", name, described(x), takes, "Leave one of them out.")


def side_by_side(cu_seqlens: Tensor) -> Callable[..., Any]:
    """attention_varlen of sequences that lie side by side in q [1, Hq, T, D], k and v alike."""

    def attend(q: Tensor, k: Tensor, v: Tensor, **options: Any) -> Any:
        q, k, v = (x.squeeze(0).transpose(0, 1) for x in (q, k, v))
        made = F.attention_varlen(q, k, v, cu_seqlens, cu_seqlens, **options)
        out, *rows = made if isinstance(made, tuple) else (made,)
        out = out.transpose(0, 1)[None]
        return (out, *(x[None] for x in rows)) if rows else out

    return attend


def as_packed(x: Tensor) -> Tensor:
    """[1, T, C] of [T, C] or [1, T, C]."""
    if x.ndim == 2:
        return x[None]
    if x.ndim != 3 or x.shape[0] != 1:
        takes, do = "[T, C] or [1, T, C] where cu_seqlens is given", "Put all tokens side by side."
        refuse("Attention", "x", f"of shape {list(x.shape)}", takes, do)
    return x


def _one_pass(q_norm: RMSNorm, k_norm: RMSNorm) -> bool:
    """Whether qk_norm_qkv may stand in for the calls of both."""
    return (
        is_as_made(q_norm, RMSNorm)
        and is_as_made(k_norm, RMSNorm)
        and q_norm.bias is None
        and k_norm.bias is None
        and (q_norm.eps, q_norm.casting) == (k_norm.eps, k_norm.casting)
    )


def check_options(name: str, window: Any, softcap: Any, dropout: Any) -> None:
    """What attention would refuse at each call."""
    check_number(name, "dropout", dropout, 0, 1, "a number from 0 to 1", "Pass 0.0 for none.")
    if window is not None:
        check_window(name, window)
    if softcap is not None:
        check_number(name, "softcap", softcap, *NUMBERS["softcap"], "Pass None for none.")


def check_scaling(name: str, argument: str, x: object) -> None:
    if x is not None and not isinstance(x, RopeScaling):
        takes, do = "an nn.RopeScaling or None", "Pass nn.RopeScaling(factor=8.0), say."
        refuse(name, argument, described(x), takes, do, TypeError)


def check_heads(
    name: str,
    d_model: int,
    n_heads: int,
    n_kv_heads: int,
    head_dim: int | None,
    do: str = "Pass head_dim to set the width of a head apart from d_model.",
) -> None:
    """Raise ValueError where Hq does not divide d_model (and sets D), which `do` mends, or Hkv does not
    divide Hq, and TypeError where one of them is no integer."""
    sizes = {"d_model": d_model, "n_heads": n_heads, "n_kv_heads": n_kv_heads, "head_dim": head_dim}
    for argument, size in sizes.items():
        if argument != "head_dim" or size is not None:
            check_integer(name, argument, size, 1, sys.maxsize, "an integer of at least 1", "Pass one.")
    if n_heads % n_kv_heads:
        refuse(
            name,
            "n_kv_heads",
            n_kv_heads,
            f"a divisor of n_heads, {n_heads}",
            "Leave it out for as many key heads as query heads.",
        )
    if head_dim is None and d_model % n_heads:
        refuse(name, "d_model", d_model, f"a multiple of n_heads, {n_heads}", do)
