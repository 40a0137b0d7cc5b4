"""What no door takes yet, in one list: each door refuses it by its own library's name for it."""

from __future__ import annotations

from typing import NoReturn

from ..checks import refuse

# What it is, what is taken, and what to do; by flashproto's names.
NOT_YET = {
    "dropout_p": ("0.0: attention has no dropout here yet", "Pass 0.0, or use another attention."),
    "splits_of_version_2": (
        "version 3's default: functions of version 2 have no such argument",
        "Call the function of flash_attn_4, or flash_attn_with_kvcache.",
    ),
    "keys_of_a_part": ("None: parts are of equal numbers of keys", "Pass num_splits."),
    "seqused_k": ("None: sequences have no gaps between them", "Pack the tokens, or pass a mask."),
    "slopes_by_batch": (
        "[H], a slope for each head, the same for all batch entries",
        "Call it for each batch entry, or pass slopes [H].",
    ),
    "descale": (
        "None: tensors of 8 bits are caches alone, of flashproto.attention_with_kv_cache",
        "Pass tensors of 16 or 32 bits.",
    ),
    "second_product": (
        "None: scores are one product of queries and keys",
        "Put qv behind q and v behind k, side by side in the head dimension.",
    ),
    "chosen_keys": ("None: a query sees all keys that bands and masks leave", "Pass a mask."),
    "user_functions": (
        "None: what changes scores here is softcap, sinks, ALiBi, bands and masks",
        "Pass these, or use FlexAttention.",
    ),
    "side_by_side": (
        "None: sequences side by side are for the varlen functions",
        "Call flash_attn_varlen_func, with a block_table where there is a cache.",
    ),
    "rotary_seqlens": ("None: new keys begin at cache_seqlens", "Turn q and k before the call."),
    "grouped_heads": (
        "None: qkv has as many heads of queries as of keys",
        "Call flash_attn_func of q, k and v.",
    ),
    "chunks": (
        "its default: there are no chunks of positions here",
        "Pass flashproto.attention a mask.",
    ),
    "two_runs": (
        "a mask in which one run of queries sees each key",
        "Use the attention of the library that made it.",
    ),
}


def refuse_not_yet(operator: str, argument: str, got: object, what: str) -> NoReturn:
    """Raise for `argument` of a door's function; what: a row of NOT_YET."""
    takes, do = NOT_YET[what]
    refuse(operator, argument, got, takes, do, NotImplementedError)
