"""Attention by torch's signature."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from .. import backends
from ..backends import Reason
from ..checks.attention import check_attention
from ..checks.errors import refuse, spreads
from ..checks.options import check_flag, check_scale
from ..checks.tensors import check_mask_tensor, check_on, check_tensor
from ..mask_values import ALWAYS, Band, Mask, rule_of_tensor
from .attention import by_alignment
from .attention_request import (
    Call,
    attention_request,
    check_dtensors,
)
from .attention_torch import torch_attention, with_positive_scale
from .autocast import autocast_low_precision
from .dropout import check_share, drawn_seed


@by_alignment
def scaled_dot_product_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """torch.nn.functional.scaled_dot_product_attention, on flashproto's kernels where they apply.

    Same signature and meaning: query [..., Hq, L, E], key [..., H, S, E], value [..., H, S, Ev], with
    broadcast leading dimensions; is_causal is aligned top-left (query i sees keys 0 to i), unlike
    attention(causal=True) when L != S.  A boolean attn_mask runs on the kernels, beside is_causal too,
    which torch does not take: one that is the same for all queries, [..., 1, S] or expanded from it, as
    an interval for each key; any other as masks.boolean, whose table is kept as long as the tensor, for
    the next layer.  So does a floating-point attn_mask of any shape that torch takes, with its
    gradient; nothing of the size of the scores is made where it is broadcast.  Dropout is attention's,
    with a seed from torch's generator; on backend "torch" it is torch's own.

    Raises: TypeError, ValueError: an argument does not fit.

    Example:
        >>> q, k, v = (torch.randn(2, 4, 8, 16) for _ in range(3))
        >>> is_real = torch.arange(8) < torch.tensor([[8], [5]])
        >>> mask = is_real[:, None, None, :]
        >>> out = flashproto.scaled_dot_product_attention(q, k, v, mask)
        >>> expected = torch.nn.functional.scaled_dot_product_attention(q, k, v, mask)
        >>> torch.allclose(out, expected, atol=1e-5)
        True
    """
    name = "scaled_dot_product_attention"
    for argument, x in (("query", query), ("key", key), ("value", value)):
        check_tensor(name, argument, x)
    if min(query.ndim, key.ndim, value.ndim) < 2:
        refuse(name, "query, key or value", "of fewer than 2 dimensions", "[..., L, E]", "Reshape it.")
    share = check_share(name, dropout_p)
    is_causal = check_flag(name, "is_causal", is_causal)
    enable_gqa = check_flag(name, "enable_gqa", enable_gqa)
    if isinstance(scale, Tensor) and scale.ndim == 0 and not scale.requires_grad:
        scale = scale.item()  # as torch takes it
    scale = check_scale(name, scale)
    q, k, v = autocast_low_precision(query, key, value)
    q_heads, k_heads, v_heads = (t.shape[-3] if t.ndim > 2 else 1 for t in (q, k, v))
    heads = q_heads if enable_gqa else max(q_heads, k_heads, v_heads)
    if not enable_gqa and not all(spreads(n, heads) for n in (q_heads, k_heads)):
        refuse(
            name,
            "key",
            f"of {k_heads} heads",
            f"query's {q_heads} heads",
            "Pass enable_gqa=True when groups of query heads share a key head.",
        )
    lead = q.shape[:-3]
    for argument, x in (("key", k), ("value", v)):
        sizes = zip(lead[::-1], x.shape[:-3][::-1], strict=False)
        if any(a != b and a != 1 and b != 1 for a, b in sizes):
            refuse(
                name,
                argument,
                f"of shape {list(x.shape)}",
                f"leading dimensions that broadcast to {list(lead)}",
                "Expand it.",
            )
        lead = torch.broadcast_shapes(lead, x.shape[:-3])
    of_keys = k_heads if k_heads > 1 or v_heads == 0 or heads % v_heads else v_heads  # 1 for several
    given_heads = (heads, of_keys, of_keys) if enable_gqa else (heads,) * 3
    q, k, v = (_as_4d(t, lead, n) for t, n in zip((q, k, v), given_heads, strict=True))
    check_attention(name, q, k, v, ("query", "key", "value"))
    check_dtensors(name, {"query": query}, {"key": key, "value": value, "attn_mask": attn_mask})
    keys = None
    if attn_mask is not None:
        keys = _check_mask(name, attn_mask, q, k, lead)
    added = attn_mask is not None and attn_mask.dtype != torch.bool
    given = {"query": query, "key": key, "value": value}
    options: dict[str, Any] = {}
    if attn_mask is not None:
        given["attn_mask"] = attn_mask
    if attn_mask is not None and added:
        options = {"bias": _bias_of(attn_mask, lead)}
    elif keys is not None:
        options = dict(zip(("begin", "end"), _intervals_of(keys), strict=True))
    elif attn_mask is not None:
        options = {"mask": Mask(rule=rule_of_tensor(_pairs_of(attn_mask, lead)))}
    make_request = functools.partial(
        attention_request,
        name,
        q,
        k,
        v,
        inputs={"query": q, "key": k, "value": v},
        bands=(Band(None, 0, 0, True),) if is_causal else (),
        scale=scale,
        dropout_p=share,
        **options,
    )
    request = make_request()
    if attn_mask is not None or share:
        backend = backends.choose(name, None, (q, k, v), lambda b: _mask_reasons(b, request))
        if backend == "torch":
            if is_causal and attn_mask is not None:
                is_causal, shape = False, (q.shape[2], k.shape[2])
                seen = torch.ones(shape, dtype=torch.bool, device=q.device).tril()
                attn_mask = attn_mask.masked_fill(~seen, -math.inf) if added else attn_mask & seen
            return _by_torch(query, key, value, attn_mask, dropout_p, is_causal, scale, enable_gqa)
    else:
        backend = request.choose(None)
    if share:
        request = make_request(dropout_seed=drawn_seed(share, q))
    made: Any
    if share or q.shape != query.shape or k.shape != key.shape or v.shape != value.shape:
        made = request.made_by(backend)
        of_heads = (heads,) if max(query.ndim, key.ndim, value.ndim) > 2 else ()
        return made.reshape((*lead, *of_heads, *made.shape[-2:]))
    made = request.run_by(backend)
    if not isinstance(made, Call):
        return made
    if attn_mask is None or added:
        return replace(made, names=list(given)) if added else made  # type: ignore[return-value]
    prepare = None if keys is None else _quick_intervals(attn_mask, keys)
    if prepare is None:
        S, by_keys = k.shape[2], keys is not None

        def prepare(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> tuple[Tensor, ...]:
            if by_keys:
                return q, k, v, *_intervals_of(_keys_of(mask, q, S, lead))
            return q, k, v, _pairs_of(mask, lead)

    return made.after(list(given), (q, k, v, attn_mask), prepare)  # type: ignore[return-value]


def _by_torch(query, key, value, attn_mask, dropout_p, is_causal, scale, enable_gqa):
    query, scale = with_positive_scale(query, scale)
    return torch_attention(
        query, key, value, attn_mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa
    )


def _intervals_of(keys: Any) -> tuple[Tensor, Tensor]:
    """begin and end for keys [B | 1, H | 1, S] that all queries see, or none does."""
    end = torch.where(keys, ALWAYS, 0).to(torch.int32)
    return torch.zeros_like(end), end


@functools.lru_cache(64)
def _always(device: torch.device, shape: tuple[int, ...]) -> tuple[Tensor, Tensor]:
    """begin of keys that are seen by all or by none, zeros, and the end of one that is seen."""
    with torch.inference_mode(False):  # a backward may keep them later
        end = torch.tensor(ALWAYS, dtype=torch.int32, device=device)
        return torch.zeros(shape, dtype=end.dtype, device=device), end


def _quick_intervals(mask: Tensor, keys: Any) -> Callable[..., tuple[Tensor, ...]] | None:
    """_intervals_of the keys of masks like this one, behind q, k and v, by one product, where they are
    a view of it; None where they are not, or while a CUDA graph is captured."""
    capturing = mask.is_cuda and torch.cuda.is_current_stream_capturing()
    if capturing or keys.data_ptr() != mask.data_ptr():
        return None
    shape, strides = keys.shape, keys.stride()
    begin, end = _always(mask.device, shape)

    def prepare(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> tuple[Tensor, ...]:
        return q, k, v, begin, mask.as_strided(shape, strides) * end

    return prepare


def _check_mask(
    operator: str,
    mask: Tensor,
    q: Tensor,
    k: Tensor,
    lead: Sequence[int],
) -> Tensor | None:
    """A boolean or floating-point tensor for scores [..., Sq, Sk].  Returns which keys are seen,
    [B | 1, H | 1, Sk], of a boolean one that is the same for all queries."""
    if isinstance(mask, Mask):
        takes, do = "a tensor, as torch's does", "Call flashproto.attention(q, k, v, mask=...)."
        refuse(operator, "attn_mask", "one of flashproto.masks", takes, do, TypeError)
    check_mask_tensor(operator, "attn_mask", mask)
    check_on(operator, "attn_mask", mask, q.device)
    H, L, S = q.shape[1], q.shape[2], k.shape[2]
    scores = zip(mask.shape[::-1], (S, L), strict=False)
    outer = zip(mask.shape[:-2][::-1], (H, *lead[::-1]), strict=False)
    if (
        not 1 <= mask.ndim <= 3 + len(lead)
        or any(not spreads(n, size) for n, size in scores)
        or any(not spreads(n, size) for n, size in outer)
    ):
        refuse(
            operator,
            "attn_mask",
            f"of shape {list(mask.shape)}",
            f"a shape that broadcasts to {[*lead, H, L, S]}",
            "Pass a mask [L, S] of queries and keys.",
        )
    return _keys_of(mask, q, S, lead)


def _pairs_of(mask: Tensor, lead: Sequence[int]) -> Tensor:
    """A boolean mask as [B | 1, H | 1, L | 1, S | 1], a view where it can be."""
    x = _bias_of(mask, lead)
    return x[(None,) * (4 - x.ndim)]


def _bias_of(mask: Tensor, lead: Sequence[int]) -> Tensor:
    """A mask of up to 4 dimensions, which broadcasts to scores [B, H, Sq, Sk]."""
    batch = mask.shape[:-3]
    if len(batch) == 0 or len(lead) == 1:
        return mask
    whole = mask if all(n == 1 for n in batch) else mask.expand(*lead, *mask.shape[-3:])
    return whole.flatten(0, -4)


def _keys_of(mask: Tensor, q: Tensor, S: int, lead: Sequence[int]) -> Tensor | None:
    """A boolean mask that is the same for all queries, as [B | 1, H | 1, S]; None for any other."""
    if mask.dtype != torch.bool or not 2 <= mask.ndim <= len(lead) + 3:
        return None
    if mask.shape[-2] != 1 and (mask.shape[-2] == 0 or mask.stride(-2) != 0):
        return None
    keys = mask[..., 0, :]
    keys = keys if keys.ndim > 1 else keys[None]
    heads, batch = keys.shape[-2], keys.shape[:-2]
    if not spreads(heads, q.shape[1]):
        return None
    if not all(map(spreads, batch[::-1], lead[::-1])):
        return None
    if all(n == 1 for n in batch):
        return keys.reshape(1, heads, keys.shape[-1]).expand(1, heads, S)
    return keys.expand(*lead, heads, S).reshape(q.shape[0], heads, S)


def _mask_reasons(backend, request) -> Iterator[Reason]:
    """Of dropout and masks, which torch's own operator takes too."""
    if backend != "torch":
        yield from request.reasons(backend)


def _as_4d(x: Tensor, lead: Sequence[int], heads: int) -> Tensor:
    """[..., S, D] to [B, H, S, D], leading dimensions broadcast to `lead`, one head to `heads`."""
    x = x if x.ndim > 2 else x[None]
    H = heads if x.shape[-3] == 1 else x.shape[-3]
    x = x.expand(*lead, H, *x.shape[-2:])
    return x[None] if len(lead) == 0 else x.flatten(0, len(lead) - 1)
