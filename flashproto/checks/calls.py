"""Calls that do not fit a function's signature: which argument, what the function takes, what to do.

Python names an argument that it does not know, but not those that there are, nor which ones go by name.
So public functions get a front, written from their signature, which takes whatever comes:

    def relu(x=EMPTY, scale=default_scale, *extra, impl=default_impl, **others):
        if others or extra or x is EMPTY:
            refuse_call(inner, extra, others, {"x": x})
        return inner(x, scale, impl=impl)
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Sequence
from typing import Any, ParamSpec, TypeVar

from .errors import nearest

Parameters = ParamSpec("Parameters")
Result = TypeVar("Result")

# What options of other libraries are called here.
OTHER_NAMES = {
    "is_causal": "causal",
    "attn_mask": "mask, a value of flashproto.masks; scaled_dot_product_attention takes attn_mask",
    "attention_mask": "mask, a value of flashproto.masks",
    "block_mask": "mask, a value of flashproto.masks",
    "softmax_scale": "scale",
    "sm_scale": "scale",
    "scaling": "scale",
    "window_size": "window, (left, right) with None for no bound",
    "sliding_window": "window, (sliding_window - 1, 0)",
    "logits_soft_cap": "softcap",
    "learnable_sink": "sinks",
    "s_aux": "sinks",
    "return_attn_probs": "return_lse",
    "return_softmax_lse": "return_lse",
    "block_table": "page_table",
    "cache_seqlens": "lengths",
    "cache_leftpad": "starts",
    "cache_batch_idx": "cache_index",
    "k_descale": "k_scale",
    "v_descale": "v_scale",
    "rotary_cos": "rope, (cos, sin)",
    "rotary_sin": "rope, (cos, sin)",
    "rotary_interleaved": "interleaved",
    "variance_epsilon": "eps",
    "epsilon": "eps",
    "gamma": "weight",
    "beta": "bias",
    "causal": "is_causal",
    "bias": "attn_mask, a tensor of floats",
    "mask": "attn_mask, a tensor; attention takes masks of flashproto.masks",
    "attn_bias": "bias",
    "alibi": "alibi_slopes",
    "dropout": "dropout_p",
    "enable_gqa": "leave it out: q may have more heads than k and v",
    "cu_seqlens": "cu_seqlens_q and cu_seqlens_k",
    "input": "leave the name out: it is the first argument",
    "target": "targets",
    "labels": "targets",
    "backend": "impl",
    "dim": "leave it out: it is the last dimension; call x.movedim(dim, -1) for another one",
    "residual": "call add_layer_norm or add_rms_norm, which take it",
}
EMPTY = inspect.Parameter.empty
CALLS = ("leave", "call")  # how a hint begins that names no argument
# The functions that a hint is for, if not for all.
FOR = {
    "dim": ("softmax", "log_softmax", "logsumexp", "softmax_topk"),
    "residual": ("layer_norm", "rms_norm"),
}


def refuse_call(
    function: Callable[..., Any],
    extra: Sequence[Any],
    others: dict[str, Any],
    required: dict[str, Any],
) -> None:
    """Raise Python's own TypeError for an unknown argument, one too many or a missing one, with its
    name here where there is one.

    required: those without a default, EMPTY where they are missing.
    """
    operator = function.__name__
    parameters = inspect.signature(function).parameters
    known = list(parameters)
    takes = f"it takes {', '.join(known)}"
    if others:
        name = next(iter(others))
        hint, close = OTHER_NAMES.get(name), nearest(name, known)
        if operator not in FOR.get(name, (operator,)):
            hint = None
        if hint is not None and hint.startswith(CALLS):
            takes = hint
        elif hint is not None and hint.replace(",", " ").split()[0] in known:
            takes = f"flashproto's name for it is {hint}"
        elif close is not None:
            takes = f"did you mean {close!r}? It takes {', '.join(known)}"
        raise TypeError(f"{operator}() got an unexpected keyword argument {name!r}; {takes}")
    if extra:
        named = [name for name, p in parameters.items() if p.kind is p.KEYWORD_ONLY]
        count = len(known) - len(named)
        if named:
            takes = f"pass the others by name, as {named[0]}=...: {', '.join(named)}"
        raise TypeError(
            f"{operator}() takes {count} positional argument{'s' * (count != 1)} but "
            f"{count + len(extra)} were given; {takes}"
        )
    missing = [name for name, value in required.items() if value is EMPTY]
    raise TypeError(f"{operator}() needs {' and '.join(missing)}; {takes}")


def front(function: Callable[..., Any]) -> tuple[list[str], str]:
    """The text of the front's first lines, and of its call of the function, its `inner`."""
    head, passed, wrong, required = [], [], ["others", "extra"], []
    for p in inspect.signature(function).parameters.values():
        keyword = p.kind is p.KEYWORD_ONLY
        if keyword and "*extra" not in head:
            head.append("*extra")
        head.append(f"{p.name}=default_{p.name}")
        if p.default is p.empty:
            head[-1] = f"{p.name}=EMPTY"
            wrong.append(f"{p.name} is EMPTY")
            required.append(f"{p.name!r}: {p.name}")
        passed.append(f"{p.name}={p.name}" if keyword else p.name)
    head += ["**others"] if "*extra" in head else ["*extra", "**others"]
    lines = [
        f"def {function.__name__}({', '.join(head)}):",
        f"    if {' or '.join(wrong)}:",
        f"        refuse_call(inner, extra, others, {{{', '.join(required)}}})",
    ]
    return lines, f"inner({', '.join(passed)})"


def scope_of(function: Callable[..., Any]) -> dict[str, Any]:
    """What the front's text refers to."""
    defaults = inspect.signature(function).parameters.values()
    scope: dict[str, Any] = {f"default_{p.name}": p.default for p in defaults}
    return scope | {"inner": function, "refuse_call": refuse_call, "EMPTY": EMPTY}


def told(function: Callable[Parameters, Result]) -> Callable[Parameters, Result]:
    """The function behind its front."""
    lines, called = front(function)
    scope = scope_of(function)
    exec("\n".join([*lines, f"    return {called}"]), scope)
    return functools.wraps(function)(scope[function.__name__])
