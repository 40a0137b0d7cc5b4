"""transformers' models on flashproto.

    from flashproto.integrations.transformers import patch, register

    model.set_attn_implementation(register())  # attention
    patch(model)  # norms, MLPs, RoPE, position biases and the loss

See docs/doors.md.
"""

from __future__ import annotations

from transformers import AttentionInterface, AttentionMaskInterface

from ...checks.errors import refuse
from .attention import attend
from .cache import NAMES, Cache
from .masks import attention_mask, make_mask
from .patching import Patched, patch


def register(name: str = "proto") -> str:
    """Make flashproto an attention implementation of transformers, and return its name.

    Once is enough, and more do nothing.  Models keep theirs until they are told: when they are loaded,
    `from_pretrained(..., attn_implementation=register())`, or later, as below.

    Causal masks, windows to one side or both, padding, packed sequences (position_ids that begin
    again), chunks, blocks of images and static caches are bands and intervals for the kernels: no mask
    of queries times keys is made.  Any other mask is a tensor, as with sdpa, of which the kernels make
    bits and a table of tiles.  softcap, sinks (s_aux), a position bias, attention dropout in training
    and the model's scale go along.

    Args:
        name: what to call it; without "flash" and "/", which mean other things to transformers.

    Raises:
        ValueError: a name with them, or of another implementation.
        NotImplementedError: when a model runs, by what would change its result and is not taken: chosen
            keys (indices, block_indices), sinks that are keys, head_mask, cu_seq_lens_q.

    Example:
        >>> from flashproto.integrations.transformers import register
        >>> model.set_attn_implementation(register())
    """
    if not isinstance(name, str) or "flash" in name or "/" in name or "|" in name or not name:
        takes, do = "a name without 'flash', '/' and '|'", "Leave it out for 'proto'."
        refuse("register", "name", name, takes, do)
    if name not in NAMES and name in AttentionInterface().valid_keys():
        takes, do = "a name that is free", "Leave it out for 'proto'."
        refuse("register", "name", name, takes, do)
    AttentionInterface.register(name, attend)
    AttentionMaskInterface.register(name, make_mask)
    NAMES.add(name)
    return name


__all__ = ["Cache", "Patched", "attention_mask", "patch", "register"]
