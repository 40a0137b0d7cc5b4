"""Checks of attention's arguments."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from .errors import described, refuse, refuse_shape, spreads
from .options import check_integer
from .reading import check_values, is_readable
from .tensors import check_4d, check_on, check_same, check_shape, check_tensor


def check_attention(
    operator: str, q: Tensor, k: Tensor, v: Tensor, names: Sequence[str] = ("q", "k", "v")
) -> None:
    """Ranks, devices, dtypes, heads and head dims of q [B, Hq, Sq, D], k [B, Hkv, Sk, D] and
    v [B, Hkv, Sk, Dv], of which messages say `names`."""
    q_name, k_name, v_name = names
    for name, x in ((q_name, q), (k_name, k), (v_name, v)):
        check_4d(operator, name, x)
    device, dtype = q.device, q.dtype
    if k.device != device or v.device != device or k.dtype != dtype or v.dtype != dtype:
        check_same(operator, {q_name: q, k_name: k, v_name: v})
    (B, Hq, _, D), (Bk, Hkv, Sk, Dk), (Bv, Hv, Sv, Dv) = q.shape, k.shape, v.shape
    for name, batch in ((k_name, Bk), (v_name, Bv)):
        if batch != B:
            refuse(
                operator,
                name,
                f"of batch size {batch}",
                f"that of {q_name}, {B}",
                f"Expand it: {name}.expand({B}, -1, -1, -1).",
            )
    if Hv != Hkv or Sv != Sk:
        refuse(
            operator,
            v_name,
            f"of heads and length {[Hv, Sv]}",
            f"those of {k_name}, {[Hkv, Sk]}",
            f"Pass {k_name} and {v_name} of the same tokens.",
        )
    if Dk != D:
        refuse(
            operator,
            k_name,
            f"of head_dim {Dk}",
            f"that of {q_name}, {D}",
            f"Only {v_name} may have a head_dim of its own.",
        )
    if D == 0 or Dv == 0:
        name = q_name if D == 0 else v_name
        refuse(operator, name, "of head_dim 0", "at least 1", "The last dimension is the head_dim.")
    if (Hkv == 0) != (Hq == 0):
        refuse(
            operator,
            k_name,
            f"of {Hkv} heads",
            f"a divisor of {q_name}'s {Hq} heads",
            "Pass as many key heads as query heads.",
        )
    if Hkv and Hq % Hkv:
        refuse(
            operator,
            q_name,
            f"of {Hq} heads",
            f"a multiple of {k_name}'s {Hkv} heads",
            "GQA needs the same number of query heads for each key head.",
        )


def check_by_head(operator: str, name: str, x: object, heads: int, device: torch.device) -> None:
    """x [heads], floating-point."""
    check_tensor(operator, name, x)
    assert isinstance(x, Tensor)
    check_on(operator, name, x, device)
    do = f"Pass {name}.expand(Hq), say, of one number for all."
    check_shape(operator, name, x, [heads], "a number for each query head", do)


def check_bias(operator: str, x: object, scores: Sequence[int], device: torch.device) -> None:
    """x broadcasts to scores [B, Hq, Sq, Sk], floating-point."""
    check_tensor(operator, "bias", x)
    assert isinstance(x, Tensor)
    do = "Reshape it: x[:, None] is one for each batch entry, x[:, None, None] for each head."
    check_by_pair(operator, "bias", x, scores, device, do)


def check_by_pair(
    operator: str, name: str, x: Tensor, scores: Sequence[int], device: torch.device, do: str
) -> None:
    """x broadcasts to scores [B, Hq, Sq, Sk]."""
    check_on(operator, name, x, device)
    sizes = zip(x.shape[::-1], scores[::-1], strict=False)
    if x.ndim > len(scores) or not all(spreads(n, size) for n, size in sizes):
        takes = f"a shape that broadcasts to [B, Hq, Sq, Sk], {list(scores)}"
        refuse(operator, name, f"of shape {list(x.shape)}", takes, do)


def check_relative_bias(
    operator: str, x: object, offset: object, heads: int, device: torch.device
) -> int | None:
    """x None, or [heads or 1, R] of one column or more; returns the offset, None without a table."""
    name, do = "relative_offset", "Pass R // 2 for a table of as many keys before as after."
    offset = check_integer(operator, name, offset, -(2**30), 2**30, "an integer from -2^30 to 2^30", do)
    if x is None:
        if offset:
            refuse(operator, name, f"{offset} without relative_bias", "0 there", "Pass relative_bias.")
        return None
    name = "relative_bias"
    check_tensor(operator, name, x)
    assert isinstance(x, Tensor)
    check_on(operator, name, x, device)
    if x.ndim != 2 or not spreads(x.shape[0], heads) or x.shape[1] == 0:
        takes = f"[{heads} or 1, R], a row for each query head"
        refuse_shape(operator, name, x, takes, "Reshape it: x[None] is one row for all heads.")
    return offset


def check_aux(operator: str, names: object) -> tuple[str, ...]:
    """Names of statistics that attention returns, as a tuple."""
    known = ("max_score", "entropy")
    if not isinstance(names, (tuple, list)) or any(x not in known for x in names):
        takes = f"some of {', '.join(map(repr, known))}"
        got = described(names)
        refuse(operator, "return_aux", got, takes, 'Pass ("max_score",), say.', TypeError)
    if len(set(names)) != len(names):
        refuse(operator, "return_aux", names, "each name once", "Leave the second one out.")
    return tuple(names)


def converted(name: str, x: object, method: str, dtype: str, takes: str) -> tuple[str, str, str]:
    """(got, takes, do) of what is no tensor of the dtype that a method of that name makes."""
    if isinstance(x, Tensor):
        return f"of dtype {x.dtype}", takes, f"Call {name}.{method}()."
    return described(x), takes, f"Make one of {dtype} on the device of q."


def check_varlen(
    operator: str,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: object,
    cu_seqlens_k: object,
    max_seqlen_q: object,
    max_seqlen_k: object,
    seqused_q: object = None,
    seqused_k: object = None,
) -> None:
    """q [T, Hq, D], k [Tk, Hkv, D] and v [Tk, Hkv, Dv], where in them sequences start, and how many of
    each one's tokens count."""
    for name, x in (("q", q), ("k", k), ("v", v)):
        check_tensor(operator, name, x)
        if x.ndim != 3:
            do = "Put the tokens of all sequences side by side."
            refuse_shape(operator, name, x, "3 dimensions [T, H, D]", do)
    heads = [x.transpose(0, 1)[None] for x in (q, k, v)]
    check_attention(operator, heads[0], heads[1], heads[2])
    shapes = []
    given: tuple[Any, Any] = cu_seqlens_q, cu_seqlens_k
    for name, x, tokens in zip(("cu_seqlens_q", "cu_seqlens_k"), given, (q, k), strict=True):
        if not isinstance(x, Tensor) or x.dtype != torch.int32:
            words = converted(name, x, "int", "torch.int32", "an int32 tensor [n + 1]")
            refuse(operator, name, *words, TypeError)
        check_on(operator, name, x, q.device)
        if x.ndim != 1 or x.shape[0] == 0:
            do = "Begin with 0, and add the length of each sequence."
            refuse_shape(operator, name, x, "[n + 1] for n sequences", do)
        shapes.append(x.shape[0])
        check_boundaries(operator, name, x, tokens.shape[0])
    if shapes[0] != shapes[1]:
        refuse(
            operator,
            "cu_seqlens_k",
            f"of shape [{shapes[1]}]",
            lambda: f"as many sequences as cu_seqlens_q, [{shapes[0]}]",
            "Pass both of the same ones.",
        )
    used: tuple[Any, Any] = seqused_q, seqused_k
    for name, x, starts in zip(("seqused_q", "seqused_k"), used, given, strict=True):
        if x is None:
            continue
        if not isinstance(x, Tensor) or x.dtype != torch.int32:
            words = converted(name, x, "int", "torch.int32", "an int32 tensor [n], or None")
            refuse(operator, name, *words, TypeError)
        check_on(operator, name, x, q.device)
        if x.shape != (shapes[0] - 1,):
            do = "Pass how many of its tokens count."
            refuse_shape(operator, name, x, f"[{shapes[0] - 1}], a number for each sequence", do)
        check_used(operator, name, x, starts)
    for name, n in (("max_seqlen_q", max_seqlen_q), ("max_seqlen_k", max_seqlen_k)):
        if n is not None:
            takes = "an integer of 0 or more, or None"
            check_integer(operator, name, n, 0, 2**31 - 1, takes, "Pass None for any length.")


def check_boundaries(operator: str, name: str, x: Tensor, tokens: int) -> None:
    """The values of cu_seqlens x, where they can be looked at for nothing."""
    if is_readable(x):
        wrong = torch.cat([x[:1] != 0, x.diff() < 0]) | (x > tokens)
        takes = f"0 first, not less than before, at most the {tokens} tokens"
        check_values(operator, name, x, wrong, takes, "Pass the cumulative sum of lengths.")


def check_used(operator: str, name: str, x: Tensor, starts: Tensor) -> None:
    """The values of seqused x beside those of cu_seqlens, where both can be looked at for nothing."""
    if is_readable(x) and is_readable(starts):
        takes = "from 0 to the number of the sequence's tokens"
        wrong = (x < 0) | (x > starts.diff())
        check_values(operator, name, x, wrong, takes, "Pass None to use all.")


def check_states(operator: str, outs: object, lses: object) -> None:
    """outs, tensors [..., Dv] of one shape on one device, and as many lses [...]; or each stacked."""
    for name, states in (("outs", outs), ("lses", lses)):
        listed = isinstance(states, (tuple, list)) or (isinstance(states, Tensor) and states.ndim > 0)
        if not listed or len(states) == 0:  # type: ignore[arg-type]
            got = "empty" if listed else described(states)
            takes, do = "tensors, one or more, or one [n, ...]", "Pass those of each part."
            refuse(operator, name, got, takes, do, ValueError if listed else TypeError)
        for x in states:  # type: ignore[attr-defined]
            check_tensor(operator, name, x)
    given: Any = list(outs), list(lses)  # type: ignore[call-overload]
    if len(given[0]) != len(given[1]):
        takes = f"one for each of outs, {len(given[0])}"
        refuse(operator, "lses", f"{len(given[1])} tensors", takes, "Pass both of each part.")
    first = given[0][0]
    if first.ndim == 0:
        refuse(operator, "outs", "scalars", "tensors [..., Dv]", "Pass what attention returns.")
    for name, states, shape in (("outs", given[0], first.shape), ("lses", given[1], first.shape[:-1])):
        for x in states:
            check_on(operator, name, x, first.device)
            if x.shape != shape:
                takes = f"{list(shape)}, for outs of shape {list(first.shape)}"
                do = "Pass what attention returns; of attention_varlen lse.mT."
                refuse_shape(operator, name, x, takes, do)
