"""Attention by torch's signature."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from .. import backends
from ..backends import Reason
from ..checks import (
    check_attention,
    check_flag,
    check_mask_tensor,
    check_number,
    check_on,
    check_scale,
    check_tensor,
    refuse,
    spreads,
)
from ..mask_values import ALWAYS, Band
from .attention import by_alignment
from .attention_request import (
    Call,
    attention_request,
    check_dtensors,
)
from .attention_torch import torch_attention, with_positive_scale
from .autocast import autocast_low_precision


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
    attention(causal=True) when L != S.  A boolean attn_mask that is the same for all queries, [..., 1,
    S] or expanded from it (padding of any pattern), runs on the kernels, beside is_causal too, which
    torch does not take.  Other masks and dropout_p > 0 run on torch's own operator; where another
    backend was made the default by name they raise BackendError.

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
    do = "Pass 0.0 for none."
    dropout_p = check_number(name, "dropout_p", dropout_p, 0, 1, "0 to 1", do)
    is_causal = check_flag(name, "is_causal", is_causal)
    enable_gqa = check_flag(name, "enable_gqa", enable_gqa)
    scale = check_scale(name, scale)
    q, k, v = autocast_low_precision(query, key, value)
    q_heads, k_heads = (t.shape[-3] if t.ndim > 2 else 1 for t in (q, k))
    if not enable_gqa and q.ndim > 2 and k_heads != 1 and k_heads != q_heads:
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
    q, k, v = (_as_4d(t, lead, 1 if enable_gqa else q_heads) for t in (q, k, v))
    check_attention(name, q, k, v, ("query", "key", "value"))
    check_dtensors(name, {"query": query}, {"key": key, "value": value, "attn_mask": attn_mask})
    keys = None
    if attn_mask is not None:
        keys = _check_mask(name, attn_mask, is_causal, dropout_p, q, k, lead)
    if dropout_p > 0.0 or (attn_mask is not None and keys is None):
        backends.choose(name, None, (query,), _mask_reasons)
        return _by_torch(query, key, value, attn_mask, dropout_p, is_causal, scale, enable_gqa)
    given = {"query": query, "key": key, "value": value}
    options: dict[str, Any] = {}
    if attn_mask is not None:
        given["attn_mask"] = attn_mask
        options = dict(zip(("begin", "end"), _intervals_of(keys), strict=True))
    request = attention_request(
        name,
        q,
        k,
        v,
        inputs={"query": q, "key": k, "value": v},
        bands=(Band(None, 0, 0, True),) if is_causal else (),
        scale=scale,
        **options,
    )
    if attn_mask is not None:
        backend = backends.choose(name, None, (q, k, v), lambda b: _keys_reasons(b, request))
        if backend == "torch":
            if is_causal:
                shape = (q.shape[2], k.shape[2])
                attn_mask = attn_mask & torch.ones(shape, dtype=torch.bool, device=q.device).tril()
            return _by_torch(query, key, value, attn_mask, 0.0, False, scale, enable_gqa)
    else:
        backend = request.choose(None)
    made: Any = request.run_by(backend)
    if q.shape != query.shape or k.shape != key.shape or v.shape != value.shape:
        made = made(q, k, v, *options.values()) if isinstance(made, Call) else made
        return made.reshape((*lead, *query.shape[-3:-1], made.shape[-1]))
    if not isinstance(made, Call):
        return made
    if attn_mask is None:
        return made  # type: ignore[return-value]
    prepare = _quick_intervals(attn_mask, keys)
    if prepare is None:
        S = k.shape[2]

        def prepare(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> tuple[Tensor, ...]:
            return q, k, v, *_intervals_of(_keys_of(mask, q, S, lead))

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
    is_causal: bool,
    dropout_p: float,
    q: Tensor,
    k: Tensor,
    lead: Sequence[int],
) -> Tensor | None:
    """A boolean or floating-point tensor for scores [..., Sq, Sk], beside is_causal only if kernels
    take it.  Returns what they take, which keys are seen, [B | 1, H | 1, Sk]."""
    check_mask_tensor(operator, "attn_mask", mask)
    check_on(operator, "attn_mask", mask, q.device)
    H, L, S = q.shape[1], q.shape[2], k.shape[2]
    scores = zip(mask.shape[::-1], (S, L), strict=False)
    outer = zip(mask.shape[:-2][::-1], (H, *lead[::-1]), strict=False)
    if (
        mask.ndim < 2
        or any(not spreads(n, size) for n, size in scores)
        or any(not spreads(n, size) and size != 1 for n, size in outer)
    ):
        refuse(
            operator,
            "attn_mask",
            f"of shape {list(mask.shape)}",
            f"a shape that broadcasts to {[*lead, H, L, S]}",
            "Pass a mask [L, S] of queries and keys.",
        )
    keys = None if dropout_p > 0.0 else _keys_of(mask, q, S, lead)
    if is_causal and keys is None:
        refuse(
            operator,
            "attn_mask",
            "given beside is_causal=True",
            "the place of is_causal",
            "Write the causal mask into attn_mask.",
        )
    return keys


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


def _keys_reasons(backend, request) -> Iterator[Reason]:
    """Of a mask of keys, which torch's own operator takes as a tensor."""
    if backend != "torch":
        yield from request.reasons(backend)


def _mask_reasons(backend: str) -> Iterator[Reason]:
    if backend != "torch":
        yield "attn_mask and dropout_p run on backend 'torch' only"


def _as_4d(x: Tensor, lead: Sequence[int], heads: int) -> Tensor:
    """[..., S, D] to [B, H, S, D], leading dimensions broadcast to `lead`, one head to `heads`."""
    x = x if x.ndim > 2 else x[None]
    H = heads if x.shape[-3] == 1 else x.shape[-3]
    x = x.expand(*lead, H, *x.shape[-2:])
    return x[None] if len(lead) == 0 else x.flatten(0, len(lead) - 1)
