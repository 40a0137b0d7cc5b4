"""The attention function that transformers' modules call."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from transformers.utils import logging

from ... import functional, masks
from ...checks import described, refuse
from ..refusals import refuse_not_yet
from .cache import layer_of, refuse_keys
from .masks import DO_CACHE, OPERATOR, Carrier, Given, Padding, refuse_layers

# What models pass beside the arguments of `attend`, and what would be another result without it.
REFUSED = {
    "indices": "sees the keys that an indexer chose",
    "block_indices": "sees the blocks that an indexer chose",
    "sinks": "has keys beside those of the tokens",
    "head_mask": "weighs heads",
    "cu_seq_lens_q": "has sequences side by side",
}
DO_OTHER = "Use attn_implementation='eager' for this model."
DO_PACK = "Leave it out: position_ids that begin again at 0 keep packed sequences apart."

EVERYTHING, CAUSAL, TOP_LEFT = (
    mask.form for mask in (masks.Mask(), masks.causal(), masks.causal(top_left=True))
)

logger = logging.get_logger(__name__)


def attend(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Carrier | Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    is_causal: bool | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    position_bias: Tensor | None = None,
    **options: Any,
) -> tuple[Tensor, None]:
    """transformers' attention interface: query [B, Hq, Sq, D], key [B, Hkv, Sk, D], value [B, Hkv, Sk,
    Dv]; a mask of make_mask, or the user's own of 4 dimensions.

    Returns: (out [B, Sq, Hq, Dv], None), as sdpa without the weights.
    """
    for name, what in REFUSED.items():
        if options.get(name) is not None:
            do = DO_PACK if name == "cu_seq_lens_q" else DO_OTHER
            refuse(OPERATOR, name, "given", f"None: who passes it {what}", do, NotImplementedError)
    if options.get("output_attentions"):
        logger.warning_once("flashproto gives no attention weights; attn_implementation='eager' does.")
    out: Any
    layer = layer_of(key)
    if layer is not None:
        given = {"dropout": dropout or None, "position_bias": position_bias}
        for name, x in given.items():
            if x is not None:
                takes = "none beside Cache"
                refuse(OPERATOR, name, described(x), takes, DO_CACHE, NotImplementedError)
        if attention_mask is not None:
            layer.pad(attention_mask)
        out = layer.attend(query, key, value, scale=scaling, softcap=softcap, sinks=s_aux)
        return out.transpose(1, 2).contiguous(), None
    if isinstance(attention_mask, Given):
        refuse_layers(module, options.get("sliding_window"))
    Sq, Sk = query.shape[2], key.shape[2]
    mask, dense = mask_of(attention_mask, Sq, Sk)
    if attention_mask is None:
        causal = bool(getattr(module, "is_causal", True) if is_causal is None else is_causal)
    else:
        causal = mask is not None and mask.form in (TOP_LEFT, *([CAUSAL] if Sq == Sk else []))
    causal, mask = causal and Sq > 1, None if causal else mask
    if causal and Sk > Sq:  # the first tokens in a static cache
        key, value = (x[:, :, :Sq] for x in (key, value))
        position_bias = None if position_bias is None else position_bias[..., :Sq]
    if query.shape[0] != key.shape[0]:  # queries that are learned
        query = query.expand(key.shape[0], -1, -1, -1)
    curved = softcap is not None or s_aux is not None
    if dense is not None and curved:
        mask, dense = intervals_of(dense), None
    if not dropout and dense is None and position_bias is None:
        out = functional.attention(
            query, key, value, causal=causal, mask=mask, softcap=softcap, sinks=s_aux, scale=scaling
        )
        return out.transpose(1, 2).contiguous(), None
    if curved and dropout:
        refuse_not_yet(OPERATOR, "dropout", dropout, "dropout_p")
    if curved:
        takes, do = "None beside softcap and s_aux (sinks)", DO_OTHER
        refuse(OPERATOR, "position_bias", described(position_bias), takes, do, NotImplementedError)
    if mask is not None:
        dense = mask.visible(Sq, Sk)
        dense = dense[None, None] if dense.ndim == 2 else dense
    if position_bias is not None:
        dense, causal = biased(position_bias, dense, causal), False
    out = functional.scaled_dot_product_attention(
        query, key, value, dense, dropout, causal, scaling, enable_gqa=True
    )
    return out.transpose(1, 2).contiguous(), None


def mask_of(
    given: Carrier | Tensor | None, Sq: int, Sk: int
) -> tuple[masks.Mask | None, Tensor | None]:
    """(mask, dense): one of this library, None for no mask, or a tensor."""
    if isinstance(given, Padding):
        refuse_keys()
    if isinstance(given, Carrier):
        if given.shape[2:] != (Sq, Sk):
            got = f"of {given.shape[2]} queries and {given.shape[3]} keys"
            takes = f"one of {Sq} and {Sk}, to which the model attends"
            refuse(OPERATOR, "the mask", got, takes, DO_OTHER, NotImplementedError)
        form = given.mask.form
        return (None if form == EVERYTHING or (form == CAUSAL and Sq == 1) else given.mask), None
    if given is not None and given.dtype == torch.int32 and given.shape[2] == 2:
        return masks.intervals(given[:, :, 0], given[:, :, 1]), None
    return None, given


def intervals_of(dense: Tensor) -> masks.Mask:
    """A boolean tensor [B | 1, H | 1, Sq, Sk] in which one run of queries sees each key."""
    if torch.compiler.is_compiling() or dense.dtype != torch.bool:
        refuse_not_yet(OPERATOR, "attention_mask", described(dense), "two_runs")
    count = dense.sum(-2)
    begin = dense.int().argmax(-2)
    end = begin + count
    i = torch.arange(dense.shape[-2], device=dense.device)[:, None]
    runs = (begin[..., None, :] <= i) & (i < end[..., None, :])
    if not torch.equal(runs, dense):
        refuse_not_yet(OPERATOR, "attention_mask", described(dense), "two_runs")
    return masks.intervals(begin, end)


def biased(position_bias: Tensor, seen: Tensor | None, causal: bool) -> Tensor:
    """A bias, with the least number where a query does not see a key."""
    if seen is not None and seen.dtype != torch.bool:
        return position_bias + seen
    if causal:
        Sq, Sk = position_bias.shape[-2:]
        seen = torch.ones(Sq, Sk, dtype=torch.bool, device=position_bias.device).tril()
    if seen is None:
        return position_bias
    return torch.where(seen, position_bias, torch.finfo(position_bias.dtype).min)
