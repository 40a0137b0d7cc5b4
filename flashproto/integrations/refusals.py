"""What no door takes yet, in one list: each door refuses it by its own library's name for it."""

from __future__ import annotations

from typing import NoReturn

from ..checks.errors import refuse

# What it is, what is taken, and what to do; by flashproto's names.
NOT_YET = {
    "dropout_of_a_cache": ("0.0 beside block_table: a cache is read without dropout", "Pass 0.0."),
    "keys_of_a_part": ("None: parts are of equal numbers of keys", "Pass num_splits."),
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
        "None: functions of scores are registered here, and called by flashproto.attention",
        "Call flashproto.hooks.register with signature='score', and pass that one score_mod.",
    ),
    "new_keys_apart": (
        "cu_seqlens_q itself, or None: new keys are those of the queries' tokens",
        "Pass the same tensor as both, or put the keys into the cache before.",
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
}


def refuse_not_yet(operator: str, argument: str, got: object, what: str) -> NoReturn:
    """Raise for `argument` of a door's function; what: a row of NOT_YET."""
    takes, do = NOT_YET[what]
    refuse(operator, argument, got, takes, do, NotImplementedError)
