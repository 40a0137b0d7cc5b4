"""What the doors of flash-attn's versions share: its options, and what it returns, in this library's
terms."""

from __future__ import annotations

import functools
import inspect
import math
import re
from collections.abc import Callable, Sequence
from typing import Any, ParamSpec, TypeVar

import torch
from torch import Tensor

from ..checks.errors import described, refuse
from ..checks.options import LARGEST, check_flag, check_integer, check_number, is_integer
from ..checks.tensors import check_on, check_tensor
from ..functional import attention
from ..masks import window_band
from .refusals import refuse_not_yet

Parameters = ParamSpec("Parameters")
Result = TypeVar("Result")
Window = Sequence[int | None]

# Arguments of versions 3 and 4 that change a result: their defaults, and rows of refusals.NOT_YET.
NOT_TAKEN: dict[str, tuple[Any, str]] = {
    "qv": (None, "second_product"),
    "q_descale": (None, "descale"),
    "k_descale": (None, "descale"),
    "v_descale": (None, "descale"),
    "attention_chunk": (0, "chunks"),
    "seqlen_k_per_split": (None, "keys_of_a_part"),
    "gather_kv_indices": (None, "chosen_keys"),
    "gather_bwd_recompute_p": (False, "chosen_keys"),
    "gather_bwd_token_chunk": (None, "chosen_keys"),
    "block_sparse_tensors": (None, "chosen_keys"),
    "block_sparse_tensors_bwd": (None, "chosen_keys"),
    "score_mod": (None, "user_functions"),
    "score_mod_bwd": (None, "user_functions"),
    "mask_mod": (None, "user_functions"),
    "aux_tensors": (None, "user_functions"),
    "aux_scalars": (None, "user_functions"),
    "rotary_seqlens": (None, "rotary_seqlens"),
    "num_heads_q": (None, "grouped_heads"),
}
# Those that say how a kernel of theirs does its work.
NO_PART = ("pack_gqa", "sm_margin", "scheduler_metadata")
RENAMED = {"page_table": "block_table"}
# The doors' names, the first that a function has, for those of what they call.
OWN_NAMES = {
    "q": ("q", "qkv"),
    "k": ("k", "kv", "qkv"),
    "v": ("v", "kv", "qkv"),
    "cu_seqlens_q": ("cu_seqlens_q", "cu_seqlens"),
    "lengths": ("cache_seqlens", "seqused_k", "cu_seqlens_k"),
    "starts": ("cache_leftpad",),
    "cache_index": ("cache_batch_idx",),
    "page_table": ("block_table", "page_table"),
    "sinks": ("learnable_sink",),
    "cos": ("rotary_cos",),
    "sin": ("rotary_sin",),
    "positions": ("cache_seqlens",),
    "offset": ("cache_seqlens",),
}


def check_not_taken(operator: str, **given: Any) -> None:
    """Refuse what differs from its default in NOT_TAKEN."""
    for argument, x in given.items():
        default, row = NOT_TAKEN[argument]
        if x is not None and not (x is default or (is_integer(x) and x == default)):
            refuse_not_yet(operator, argument, x, row)


def with_own_names(function: Callable[Parameters, Result]) -> Callable[Parameters, Result]:
    """The function, whose errors have its name and those of its arguments where what it calls refuses
    one."""
    operator, signature = function.__name__, inspect.signature(function)

    @functools.wraps(function)
    def door(*args: Parameters.args, **options: Parameters.kwargs) -> Result:
        def renamed(found: re.Match[str]) -> str:
            given = signature.bind(*args, **options).arguments
            names = [name for name in OWN_NAMES.get(found[1], ()) if name in signature.parameters]
            names.sort(key=lambda name: given.get(name) is None)  # of several the one that is given
            return f"{operator}: {(*names, found[1])[0]} is "

        try:
            return function(*args, **options)
        except (TypeError, ValueError, NotImplementedError) as error:
            text = re.sub(r"^\w+: (\w+) is ", renamed, str(error))
            if type(error) not in (TypeError, ValueError, NotImplementedError) or text == str(error):
                raise
            raise type(error)(text.replace("cache_index", "cache_batch_idx")) from None

    return door


def taking_later_names(function: Callable[Parameters, Result]) -> Callable[Parameters, Result]:
    """A function of version 2 that also takes the keywords of version 3: those that it has itself by
    keyword alone, which are not in its signature; others at their defaults, which are no change.  What
    else there is of version 3 is refused by its name."""
    operator, signature = function.__name__, inspect.signature(function)
    own = with_own_names(function)
    parameters = signature.parameters.values()
    listed = [p for p in parameters if p.kind is not inspect.Parameter.KEYWORD_ONLY]
    known = [p.name for p in listed]

    @functools.wraps(function)
    def door(*args: Parameters.args, **options: Parameters.kwargs) -> Result:
        for argument in [name for name in options if name not in signature.parameters]:
            x, name = options.pop(argument), RENAMED.get(argument)
            if name in known and name not in options:
                options[name] = x
            elif argument in NOT_TAKEN:
                check_not_taken(operator, **{argument: x})
            elif argument not in NO_PART:
                got = f"an unexpected keyword argument {argument!r}"
                raise TypeError(f"{operator}() got {got}; it takes {', '.join(known)}")
        return own(*args, **options)

    door.__signature__ = signature.replace(parameters=listed)  # type: ignore[attr-defined]
    return door


# --- options --------------------------------------------------------------------------------------


def options_of(
    operator: str,
    *,
    dropout_p: float = 0.0,
    softmax_scale: float | None,
    causal: bool,
    window: Window | None,
    softcap: float | None,
    alibi_slopes: Tensor | None = None,
    sinks: Tensor | None = None,
    return_lse: object,
    return_name: str,
    num_splits: object = None,
) -> dict[str, Any]:
    """The options of attention, attention_varlen and attention_with_kv_cache."""
    if num_splits is not None:
        takes, do = "0, to let flashproto choose, or how many at most", "Pass 1 for no parts."
        num_splits = check_integer(operator, "num_splits", num_splits, 0, 2**31 - 1, takes, do) or None
    if isinstance(alibi_slopes, Tensor) and alibi_slopes.ndim == 2:
        got = f"of shape {list(alibi_slopes.shape)}"
        refuse_not_yet(operator, "alibi_slopes", got, "slopes_by_batch")
    if softcap is not None:
        takes = "a number; 0.0 is none"
        softcap = check_number(operator, "softcap", softcap, -LARGEST, LARGEST, takes, "Pass 0.0.")
    if softmax_scale is not None:
        takes, do = "a finite number, or None", "Pass None for 1 / sqrt(head_dim)."
        softmax_scale = check_number(
            operator, "softmax_scale", softmax_scale, -LARGEST, LARGEST, takes, do
        )
    made = {
        "causal": check_flag(operator, "causal", causal),
        "window": window,
        "softcap": softcap if softcap is not None and softcap > 0 else None,
        "alibi_slopes": alibi_slopes,
        "sinks": sinks,
        "scale": softmax_scale,
        "return_lse": check_flag(operator, return_name, return_lse),
        "num_splits": num_splits,
    }
    # Where there is none it is left out: a cache has no such option.
    return made if dropout_p == 0 else made | {"dropout_p": dropout_p}


def window_of(operator: str, window_size: Any) -> Window | None:
    """(left, right) of version 2's, whose negative numbers are no bounds; None where there is none."""
    left, right = check_window(operator, window_size)
    left = None if left is None or left < 0 else left
    right = None if right is None or right < 0 else right
    if left is None and right is None:
        return None
    window_band(operator, left, right, 0, "window_size")
    return left, right


def check_window(operator: str, window_size: Any) -> tuple[Any, Any]:
    pair = isinstance(window_size, (tuple, list)) and len(window_size) == 2
    if not pair or not all(x is None or is_integer(x) for x in window_size):
        takes, do = "(left, right), integers or None", "Pass (-1, -1) for no bounds."
        refuse(operator, "window_size", window_size, takes, do, TypeError)
    return window_size[0], window_size[1]


# --- tensors --------------------------------------------------------------------------------------


def check_layout(operator: str, dims: str, **tensors: Any) -> None:
    """Tensors of as many dimensions as there are letters."""
    for argument, x in tensors.items():
        check_tensor(operator, argument, x)
        if x.ndim != len(dims):
            takes = f"[{', '.join(dims)}]"
            do = "Tokens come before heads; varlen functions take sequences side by side."
            refuse(operator, argument, f"of shape {list(x.shape)}", takes, do)


def check_int32(
    operator: str, argument: str, x: Any, shape: tuple[int | None, ...], device: torch.device
) -> None:
    """An int32 tensor of `shape`, None for any size."""

    def takes() -> str:
        return f"an int32 tensor [{', '.join('n' if n is None else str(n) for n in shape)}]"

    do = f"Pass {argument}.int()." if isinstance(x, Tensor) else "Make it a tensor."
    if not isinstance(x, Tensor) or x.dtype != torch.int32:
        got = f"of dtype {x.dtype}" if isinstance(x, Tensor) else described(x)
        refuse(operator, argument, got, takes, do, TypeError)
    check_on(operator, argument, x, device)
    fits = x.ndim == len(shape)
    if not fits or any(n is not None and n != m for n, m in zip(shape, x.shape, strict=True)):
        refuse(operator, argument, f"of shape {list(x.shape)}", takes, "Pass one for each sequence.")


def attend(q: Tensor, k: Tensor, v: Tensor, options: dict[str, Any]) -> tuple[Tensor, Tensor | None]:
    """(out, lse or None) of attention for q [B, Sq, H, D] and the like."""
    made: Any = attention(*(x.transpose(1, 2) for x in (q, k, v)), **options)
    out, lse = made if options["return_lse"] else (made, None)
    return tokens_first(out), lse


def tokens_first(out: Tensor) -> Tensor:
    """[B, S, H, D] of [B, H, S, D], which lies so where kernels make it."""
    return out.transpose(1, 2).contiguous()


def with_infinity(lse: Tensor) -> Tensor:
    """Version 2 has +inf where a query sees no key."""
    return lse.masked_fill(lse == -math.inf, math.inf)
