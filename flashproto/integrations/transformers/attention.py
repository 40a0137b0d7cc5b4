"""The attention function that transformers' modules call."""

from __future__ import annotations

from collections.abc import MutableMapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.weak import WeakTensorKeyDictionary
from transformers.utils import logging

from ... import functional, masks
from ...checks.errors import described, refuse
from ...functional.mask_tables import can_be_kept
from .cache import layer_of, refuse_keys
from .masks import DO_CACHE, OPERATOR, Carrier, Given, Padding, refuse_layers
from .positions import relative
from .reading import FAR

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
    Dv]; a mask of make_mask, or the user's own of 4 dimensions, boolean or what is added to scores;
    position_bias, which is added to scores too.

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
    mask, bias = mask_of(attention_mask, Sq, Sk)
    if attention_mask is None:
        causal = bool(getattr(module, "is_causal", True) if is_causal is None else is_causal)
    else:
        causal = mask is not None and mask.form in (TOP_LEFT, *([CAUSAL] if Sq == Sk else []))
    causal, mask = causal and Sq > 1, None if causal else mask
    table, position_bias = relative(position_bias)
    if position_bias is not None:
        bias = position_bias if bias is None else position_bias + bias
    if causal and Sk > Sq:  # the first tokens in a static cache
        key, value = (x[:, :, :Sq] for x in (key, value))
        bias = bias if bias is None or bias.shape[-1] == 1 else bias[..., :Sq]
    if query.shape[0] != key.shape[0]:  # queries that are learned
        query = query.expand(key.shape[0], -1, -1, -1)
    out = functional.attention(
        query,
        key,
        value,
        causal=causal,
        softcap=softcap,
        sinks=s_aux,
        bias=bias,
        relative_bias=table,
        relative_offset=0 if table is None else table.shape[1] - key.shape[2],
        dropout_p=dropout,
        mask=mask,
        scale=scaling,
    )
    return out.transpose(1, 2).contiguous(), None


def mask_of(
    given: Carrier | Tensor | None, Sq: int, Sk: int
) -> tuple[masks.Mask | None, Tensor | None]:
    """(mask, bias): one of this library, or what is added to scores; None for none."""
    if isinstance(given, Padding):
        refuse_keys()
    if isinstance(given, Carrier):
        if given.shape[2:] != (Sq, Sk):
            got = f"of {given.shape[2]} queries and {given.shape[3]} keys"
            takes = f"one of {Sq} and {Sk}, to which the model attends"
            refuse(OPERATOR, "the mask", got, takes, DO_OTHER, NotImplementedError)
        form = given.mask.form
        return (None if form == EVERYTHING or (form == CAUSAL and Sq == 1) else given.mask), None
    if given is None or given.is_floating_point():
        return None, given
    if given.dtype == torch.int32 and given.shape[2] == 2:
        return masks.intervals(given[:, :, 0], given[:, :, 1]), None
    found = intervals_of(given)
    return masks.boolean(given) if found is None else found, None


runs_of: MutableMapping[Tensor, tuple[int, masks.Mask | None]] = WeakTensorKeyDictionary()


def intervals_of(seen: Tensor) -> masks.Mask | None:
    """A boolean tensor [B | 1, H | 1, Sq | 1, Sk] as masks.intervals, if one run of queries sees each
    key.  It waits for the device, so all layers of a model ask once; where nothing can be kept, none
    does."""
    if seen.shape[2] == 1:
        end = torch.where(seen[:, :, 0], FAR, 0)
        return masks.intervals(torch.zeros_like(end), end)
    if seen.dtype != torch.bool or seen.numel() == 0 or not can_be_kept((seen,), seen.device):
        return None
    version, found = runs_of.get(seen, (None, None))
    if version != seen._version:
        bits = seen.view(torch.uint8)
        begin, count = bits.argmax(2), seen.sum(2)
        last = seen.shape[2] - 1 - bits.flip(2).argmax(2)
        in_one = ((last - begin + 1 == count) | (count == 0)).all()
        found = masks.intervals(begin, begin + count) if bool(in_one) else None
        runs_of[seen] = seen._version, found
    return found
