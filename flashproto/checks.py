"""Argument checks of the public functions: what was passed, what is accepted, one thing to do."""

from __future__ import annotations

import math
import os
import sys
from collections.abc import Callable, Hashable, Sequence
from numbers import Integral, Real
from typing import Any, NoReturn

import torch
from torch import Tensor
from torch._C import _are_functorch_transforms_active as transforms_active
from torch._C import _dispatch_key_parse as key_named
from torch._C import _dispatch_tls_is_dispatch_key_included as key_is_on
from torch._C import _len_torch_dispatch_stack as dispatch_modes
from torch.compiler import is_compiling, is_dynamo_compiling
from torch.nn import Parameter

# Keys of torch's dispatcher that are on during make_fx(pre_dispatch=True), while torch.autograd takes
# gradients of a batch by its own vmap, and during torch.jit.trace.
PRE_DISPATCH, BATCHED_GRADIENTS, JIT_TRACE = map(key_named, ("PreDispatch", "VmapMode", "Tracer"))

FLOATS = (torch.float16, torch.bfloat16, torch.float32, torch.float64)

# The checked mode: lengths and pages are looked at on a GPU too, which makes each call wait for it, and
# ranks compare their calls.
CHECKED = os.environ.get("FLASHPROTO_CHECKED", "0") == "1"


def spreads(n: int, size: int) -> bool:
    """Whether a dimension of n entries broadcasts to one of `size`.  `n in (1, size)` is False under
    torch.compile for a number n beside a symbol that is equal to it."""
    return n == 1 or n == size


def matches(shape: Sequence[int], wanted: Sequence[int]) -> bool:
    """Whether two shapes are equal, symbols in them too."""
    return len(shape) == len(wanted) and all(a == b for a, b in zip(shape, wanted, strict=True))


def refuse(
    operator: str,
    argument: str,
    got: object,
    takes: str | Callable[[], str],
    do: str,
    kind: type[Exception] = ValueError,
) -> NoReturn:
    """Raise `kind` with the one form that every message of the library has.

    got: words, or a value, which is described.  takes: words, or a function that makes them, where they
    have sizes in them: torch.compile fixes a size that is written down.
    """
    words = shortened(got) if isinstance(got, str) else described(got)
    takes = takes if isinstance(takes, str) else takes()
    raise kind(f"{operator}: {argument} is {words}; it takes {takes}. {do}")


def refuse_shape(
    operator: str, name: str, x: Tensor, takes: str | Callable[[], str], do: str
) -> NoReturn:
    """Refuse x for its shape."""
    refuse(operator, name, f"of shape {list(x.shape)}", takes, do)


def described(x: object) -> str:
    """A value in a message: numbers, strings and the like as they are written; of what may be long, or
    on another device, the type alone."""
    if isinstance(x, Tensor):
        return f"a tensor of shape {list(x.shape)}"
    if x is None or isinstance(x, (str, bool, int, float, complex, torch.dtype, torch.device)):
        return shortened(repr(x))
    if type(x) in (list, tuple):
        words = [described(a) for a in x[:8]]  # type: ignore[index]
        return shortened(f"[{', '.join(words)}]")
    return f"of type {type(x).__name__}"


def shortened(words: str, length: int = 100) -> str:
    return words if len(words) <= length else f"{words[: length - 3]}..."


# --- options --------------------------------------------------------------------------------------

SCALARS = (int, float, torch.SymInt, torch.SymFloat)
LARGEST, SMALLEST = sys.float_info.max, math.ulp(0.0)  # of finite and of positive numbers


def is_integer(x: object) -> bool:
    """Whether x is an integer of Python, numpy or torch.compile; True and False are not."""
    return isinstance(x, (int, torch.SymInt, Integral)) and not isinstance(x, bool)


def is_number(x: object) -> bool:
    """Whether x is a real number of Python, numpy or torch.compile; True and False are not."""
    return (isinstance(x, (float, torch.SymFloat, Real)) and not isinstance(x, bool)) or is_integer(x)


def untraced(x: Any) -> Any:
    """x, as an integer where it is a size that torch.jit.trace has made a tensor."""
    return int(x) if isinstance(x, Tensor) and x.ndim == 0 and key_is_on(JIT_TRACE) else x


def fixed(x: Any) -> Any:
    """x as a number of Python's where it is one of numpy's or a symbol of torch.compile, which compiles
    anew for another number.

    A symbol would be fixed later, for the op that takes it, where AOTAutograd's cache does not see it
    and hands later calls the number of an earlier one (pytorch/pytorch#197889).
    """
    if not isinstance(x, SCALARS):
        return float(x)
    return torch.fx.experimental.symbolic_shapes.guard_scalar(x) if is_dynamo_compiling() else x


def check_number(
    operator: str, argument: str, x: Any, low: float, high: float, takes: str, do: str
) -> float:
    """x, a number from `low` to `high`, as `fixed` makes it."""
    if not is_number(x):
        refuse(operator, argument, described(x), takes, do, TypeError)
    number = x if isinstance(x, SCALARS) else float(x)  # numpy would make its own kind of low and high
    if not low <= number <= high:
        refuse(operator, argument, x, takes, do)
    return fixed(number)


def check_integer(
    operator: str, argument: str, x: Any, low: int, high: int, takes: str | Callable[[], str], do: str
) -> int:
    """x, an integer from `low` to `high`, as one of Python's where it is one of numpy's."""
    x = untraced(x)
    if not is_integer(x):
        refuse(operator, argument, described(x), takes, do, TypeError)
    if not low <= x <= high:
        refuse(operator, argument, x, takes, do)
    return x if isinstance(x, SCALARS) else int(x)  # type: ignore[return-value]


def check_flag(operator: str, argument: str, x: object) -> bool:
    """x as a bool: True or False, numpy's too, or a number that equals one of them."""
    if isinstance(x, (bool, torch.SymBool)):
        return x  # type: ignore[return-value]
    # Not a tensor: reading its value would wait for the GPU.
    if isinstance(x, Tensor) or not isinstance(x, Hashable) or x not in (0, 1):
        do = f"Pass {argument}=True."
        refuse(operator, argument, described(x), "True or False", do, TypeError)
    return bool(x)


def check_choice(operator: str, argument: str, x: object, choices: Sequence[str], do: str) -> None:
    """One of a few names."""
    if not isinstance(x, str) or x not in choices:
        takes = f"{', '.join(map(repr, choices[:-1]))} or {choices[-1]!r}"
        refuse(operator, argument, described(x), takes, do)


def check_dtype(operator: str, dtype: object) -> None:
    """The floating-point dtype of a result, or None."""
    if dtype is not None and not (isinstance(dtype, torch.dtype) and dtype in FLOATS):
        refuse(
            operator,
            "dtype",
            described(dtype),
            "torch.float16, bfloat16, float32, float64 or None",
            "Pass None for that of x.",
            TypeError,
        )


def check_scale(
    operator: str, scale: float | None, do: str = "Pass None for 1 / sqrt(head_dim)."
) -> float | None:
    """scale, a finite number or None."""
    if scale is None:
        return None
    takes = "a finite number, or None"
    return check_number(operator, "scale", scale, -LARGEST, LARGEST, takes, do)


def check_eps(operator: str, eps: float | None, dtype: torch.dtype) -> float:
    """eps, a finite number that is not negative; None is what torch's rms_norm takes for `dtype`."""
    if eps is None:
        return torch.finfo(dtype).eps
    takes, do = "a finite number, 0 or more", "Pass 1e-5, say."
    return float(check_number(operator, "eps", eps, 0, LARGEST, takes, do))


# --- values ---------------------------------------------------------------------------------------


def watched() -> bool:
    """Whether something beside torch.compile and torch.func wants to see each call: a dispatch mode, or
    what has one of these keys."""
    return bool(
        dispatch_modes()
        or key_is_on(PRE_DISPATCH)
        or key_is_on(BATCHED_GRADIENTS)
        or key_is_on(JIT_TRACE)
    )


def is_readable(x: Tensor) -> bool:
    """Whether the values of x can be looked at for nothing: of a plain tensor on the CPU, where neither
    torch.compile, torch.func, a dispatch mode nor a trace sees it."""
    return not (
        is_compiling()
        or not x.is_cpu
        or (type(x) is not Tensor and type(x) is not Parameter)
        or transforms_active()
        or watched()
    )


def can_be_read(x: Tensor) -> bool:
    """Whether x's values may be looked at: for nothing, or in the checked mode at the price of waiting
    for the GPU."""
    if is_readable(x):
        return True
    if not CHECKED or is_compiling() or not x.is_cuda or type(x) is not Tensor or watched():
        return False
    return not transforms_active() and not torch.cuda.is_current_stream_capturing()


def check_values(operator: str, argument: str, x: Tensor, wrong: Tensor, takes: str, do: str) -> None:
    """Refuse elements of x where `wrong` is True; both can be read."""
    if wrong.any():
        where = wrong.nonzero()[0].tolist()
        at = f" at {where}" if where else ""
        refuse(operator, argument, f"{int(x[tuple(where)])}{at}", takes, do)


# --- tensors --------------------------------------------------------------------------------------


def check_tensor(operator: str, name: str, x: object) -> None:
    """A strided floating-point tensor."""
    if not isinstance(x, Tensor):
        got = described(x) if x is None else type(x).__name__
        refuse(operator, name, got, "a torch.Tensor", "Pass a tensor.", TypeError)
    if x.dtype not in FLOATS:
        refuse(
            operator,
            name,
            f"of dtype {x.dtype}",
            "float16, bfloat16, float32 or float64",
            f"Convert it, say {name}.to(torch.float32).",
            TypeError,
        )
    if x.layout != torch.strided:
        refuse(operator, name, f"of layout {x.layout}", "a strided tensor", "Call .to_dense().")


def check_mask_tensor(operator: str, name: str, mask: object) -> None:
    """A boolean tensor, or a floating-point one that is added to scores."""
    if isinstance(mask, Tensor) and mask.dtype == torch.bool:
        return
    if isinstance(mask, Tensor) and mask.dtype not in FLOATS:
        takes = "bool, True where a score counts, or a floating-point dtype, which is added to scores"
        do = f"Pass {name}.bool() where other numbers than 0 count."
        refuse(operator, name, f"of dtype {mask.dtype}", takes, do, TypeError)
    check_tensor(operator, name, mask)


def check_same(operator: str, tensors: dict[str, Tensor], *, dtype: bool = True) -> None:
    """All on one device and, if asked, of one dtype; the first tensor sets which."""
    first, *others = tensors
    a = tensors[first]
    for name in others:
        b = tensors[name]
        if b.device != a.device:
            refuse(
                operator,
                name,
                f"on {b.device}",
                f"the device of {first}, {a.device}",
                f"Move it: {name}.to({first}.device).",
            )
        if dtype and b.dtype != a.dtype:
            refuse(
                operator,
                name,
                f"of dtype {b.dtype}",
                f"the dtype of {first}, {a.dtype}",
                f"Convert it, say {name}.to({first}.dtype), or use torch.autocast.",
                TypeError,
            )


def check_shape(operator: str, name: str, x: Tensor, wanted: Sequence[int], what: str, do: str) -> None:
    """x of the shape `wanted`, which is, in words, `what`."""
    if x.shape != tuple(wanted):
        refuse_shape(operator, name, x, lambda: f"{what}, {list(wanted)}", do)


def check_broadcasts(operator: str, name: str, t: Tensor, x: Tensor) -> None:
    """t on x's device, of a shape that broadcasts to x's."""
    check_same(operator, {"x": x, name: t}, dtype=False)
    shape = [1] * (x.ndim - t.ndim) + list(t.shape)
    if len(shape) != x.ndim or not all(map(spreads, shape, x.shape)):
        takes = f"a shape that broadcasts to that of x, {list(x.shape)}"
        refuse_shape(operator, name, t, takes, "Reshape it.")


def check_4d(operator: str, name: str, x: Tensor) -> None:
    """x [B, H, S, D]."""
    check_tensor(operator, name, x)
    if x.ndim != 4:
        do = f"Reshape it; {name}[None] adds the batch to [H, S, D]."
        refuse_shape(operator, name, x, "4 dimensions [B, H, S, D]", do)


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
    check_shape(operator, name, x, [heads], "a number for each query head", "Pass None for none.")


def check_bias(operator: str, x: object, scores: Sequence[int], device: torch.device) -> None:
    """x broadcasts to scores [B, Hq, Sq, Sk], floating-point."""
    check_tensor(operator, "bias", x)
    assert isinstance(x, Tensor)
    check_by_pair(operator, "bias", x, scores, device, "Pass None for none.")


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
        refuse(operator, name, f"of shape {list(x.shape)}", takes, "Pass None for none.")
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


def check_norm(
    operator: str,
    x: Tensor,
    normalized_shape: Sequence[int],
    weight: Tensor | None,
    bias: Tensor | None,
    residual: Tensor | None,
) -> None:
    """x [..., *normalized_shape]; weight and bias of normalized_shape; residual of x's shape, which the
    operators need that have it in their names."""
    check_tensor(operator, "x", x)
    if operator.startswith("add_"):
        check_tensor(operator, "residual", residual)
    device, shape = x.device, tuple(normalized_shape)
    if not shape or not all(map(is_integer, shape)) or x.shape[-len(shape) :] != shape:
        refuse(
            operator,
            "normalized_shape",
            list(shape),
            f"trailing dimensions of x, whose shape is {list(x.shape)}",
            f"Pass normalized_shape={list(x.shape[-1:])} to normalize the last dimension.",
        )
    for name, t in (("weight", weight), ("bias", bias), ("residual", residual)):
        if t is None:
            continue
        check_tensor(operator, name, t)
        if t.device != device:
            check_same(operator, {"x": x, name: t}, dtype=False)
        if name == "residual":
            do = "Expand it to the shape of x."
            check_shape(operator, name, t, x.shape, "the shape of x", do)
        else:
            do = f"Pass {name}=None for none."
            check_shape(operator, name, t, shape, "normalized_shape", do)


def as_shape(operator: str, normalized_shape: object) -> int | tuple[int, ...]:
    """normalized_shape as an int or a tuple."""
    if isinstance(normalized_shape, (tuple, list)):
        return tuple(map(untraced, normalized_shape))
    normalized_shape = untraced(normalized_shape)
    if is_integer(normalized_shape):
        return normalized_shape  # type: ignore[return-value]
    x = "x, residual" if operator.startswith("add_") else "x"
    refuse(
        operator,
        "normalized_shape",
        described(normalized_shape),
        "an int or a sequence of ints",
        f"The weight comes behind it: {operator}({x}, x.shape[-1], weight).",
        TypeError,
    )


def check_rows(operator: str, x: Tensor) -> None:
    """x [..., N], at least one dimension."""
    check_tensor(operator, "x", x)
    if x.ndim == 0:
        refuse(operator, "x", "a scalar", "at least one dimension", "Pass x[None].")


def check_glu(operator: str, gate: Tensor, up: Tensor | None, *, halves: bool) -> None:
    """gate and up [..., N]; or gate alone, with halves [..., 2N]."""
    tensors = {"gate" if operator != "gelu" else "x": gate} | ({} if up is None else {"up": up})
    for name, t in tensors.items():
        check_tensor(operator, name, t)
    check_same(operator, tensors)
    if up is not None:
        do = "Expand it to the shape of gate."
        check_shape(operator, "up", up, gate.shape, "the shape of gate", do)
    if operator != "gelu" and gate.ndim == 0:
        refuse(operator, "gate", "a scalar", "at least one dimension", "Pass gate[None].")
    if halves and gate.shape[-1] % 2:
        refuse(
            operator,
            "gate",
            f"of {gate.shape[-1]} columns",
            "an even number of them without up: the halves are gate and up",
            "Pass gate and up of one shape, or torch.cat((gate, up), -1).",
        )


def check_approximate(operator: str, approximate: str) -> None:
    """The name of a form of GELU."""
    do = "Pass 'none' for the exact function."
    check_choice(operator, "approximate", approximate, ("none", "tanh"), do)


def check_heads_of(operator: str, q: Tensor, k: Tensor | None) -> None:
    """q [B, Hq, S, D] and k [B, Hkv, S, D] of one dtype, or q alone."""
    tensors = {"q": q} | ({} if k is None else {"k": k})
    for name, x in tensors.items():
        check_4d(operator, name, x)
    check_same(operator, tensors)
    if k is not None and (k.shape[0], *k.shape[2:]) != (q.shape[0], *q.shape[2:]):
        takes = f"that of q, {list(q.shape)}, but for the number of heads"
        do = "Call it twice for q and k of different tokens, each time with k=None."
        refuse_shape(operator, "k", k, takes, do)


def check_packed(operator: str, qkv: Tensor, n_heads: int, n_kv_heads: int) -> tuple[int, int, int]:
    """(n_heads, n_kv_heads, D) of qkv [B, S, (n_heads + 2 n_kv_heads) D]."""
    check_tensor(operator, "qkv", qkv)
    if qkv.ndim != 3:
        do = "Flatten heads and D: qkv.flatten(2)."
        refuse_shape(operator, "qkv", qkv, "3 dimensions [B, S, heads * D]", do)
    n_heads, n_kv_heads = check_head_counts(operator, n_heads, n_kv_heads)
    heads = n_heads + 2 * n_kv_heads
    if qkv.shape[2] % heads:
        refuse(
            operator,
            "qkv",
            f"{qkv.shape[2]} wide",
            f"a multiple of n_heads + 2 n_kv_heads, {heads}",
            "Pass the heads that it was made of.",
        )
    return n_heads, n_kv_heads, qkv.shape[2] // heads


def check_head_counts(operator: str, n_heads: int, n_kv_heads: int) -> tuple[int, int]:
    """(n_heads, n_kv_heads), integers of at least 1."""
    how = 1, sys.maxsize, "an integer of at least 1", "Pass the number of heads."
    return (
        check_integer(operator, "n_heads", n_heads, *how),
        check_integer(operator, "n_kv_heads", n_kv_heads, *how),
    )


def check_head_weights(operator: str, D: int, device: torch.device, *weights: Tensor | None) -> None:
    """q_weight and k_weight [D], each or none."""
    for name, weight in zip(("q_weight", "k_weight"), weights, strict=True):
        if weight is None:
            continue
        check_tensor(operator, name, weight)
        check_on(operator, name, weight, device)
        check_shape(operator, name, weight, [D], "one value a dimension", f"Pass {name}=None for none.")


def check_on(operator: str, name: str, x: Tensor, device: torch.device) -> None:
    if x.device != device:
        refuse(operator, name, f"on {x.device}", f"the inputs' device, {device}", "Move it there.")


def check_tables(
    operator: str,
    B: int,
    S: int,
    D: int,
    device: torch.device,
    cos: Tensor,
    sin: Tensor,
    positions: Tensor | None,
    offset: int | Tensor,
) -> int | Tensor:
    """offset, once cos, sin are [length, R], 2 R <= D; positions [S] or [B, S] or none; offset an
    integer or [B]."""
    for name, table in (("cos", cos), ("sin", sin)):
        check_tensor(operator, name, table)
        check_on(operator, name, table, device)
        if table.ndim != 2 or 2 * table.shape[1] > D:
            takes = f"[length, R] with 2 R at most head_dim, {D}"
            refuse_shape(operator, name, table, takes, "flashproto.nn.rope_tables makes it.")
    check_shape(operator, "sin", sin, cos.shape, "the shape of cos", "Pass tables of one shape.")
    shapes = {"positions": ((S,), (B, S)), "offset": ((B,),)}
    if not isinstance(offset, Tensor):
        how = -(2**63), 2**63 - 1, "an integer", "Pass a row of the tables."
        offset = check_integer(operator, "offset", offset, *how)
    if positions is not None and not isinstance(positions, Tensor):
        takes, do = "a tensor of integers, or None", "Pass rows of the tables."
        refuse(operator, "positions", described(positions), takes, do, TypeError)
    for name, x in (("positions", positions), ("offset", offset)):
        if not isinstance(x, Tensor):
            continue
        check_on(operator, name, x, device)
        if (
            x.is_floating_point()
            or x.dtype == torch.bool
            or not any(matches(x.shape, shape) for shape in shapes[name])
        ):
            takes = " or ".join(str(list(shape)) for shape in shapes[name])
            refuse(
                operator,
                name,
                f"{x.dtype} of shape {list(x.shape)}",
                f"integers of shape {takes}",
                "Pass rows of the tables, as torch.arange gives them.",
            )
    if isinstance(offset, Tensor) and positions is not None:
        refuse(operator, "offset", "a tensor", "a number beside positions", "Add it to positions.")
    rows, do = cos.shape[0], "Make longer tables: flashproto.nn.rope_tables."
    if rows < (S if positions is None else min(S, 1)):
        at = "" if isinstance(offset, Tensor) else f" where offset is {offset}"
        refuse(operator, "cos", f"of {rows} rows{at}", f"a row for each of {S} tokens", do)
    if positions is None and not isinstance(offset, Tensor) and S and not 0 <= offset <= rows - S:
        takes = f"0 to {rows - S}, for {S} tokens and tables of {rows} rows"
        refuse(operator, "offset", offset, takes, do)
    return offset


def check_table_rows(operator: str, length: int, S: int, positions: Any, offset: Any) -> None:
    """Check, where values can be read, that the tables have a row for every position."""
    name, x = ("positions", positions) if isinstance(positions, Tensor) else ("offset", offset)
    if not isinstance(x, Tensor) or not S or not is_readable(x):
        return
    first, last = (offset, 0) if name == "positions" else (0, S - 1)
    low, high = -first, length - 1 - first - last
    takes = f"rows from {low} to {high}, for tables of {length} rows"
    check_values(operator, name, x, (x < low) | (x > high), takes, "Make longer tables.")


REDUCTIONS = ("mean", "sum", "none")


def check_cross_entropy(
    operator: str,
    targets: object,
    shape: Sequence[int],
    V: int,
    device: torch.device,
    weight: Tensor | None,
    weight_name: str,
    logits_shape: Sequence[int] | None = None,
    class_dim: int = -1,
) -> None:
    """targets are integers of `shape`, weight [V], on `device`.

    logits_shape: where classes may lie in another dimension than the last, class_dim.
    """
    if not isinstance(targets, Tensor) or targets.dtype not in (torch.int64, torch.int32):
        got = f"of dtype {targets.dtype}" if isinstance(targets, Tensor) else described(targets)
        refuse(
            operator,
            "targets",
            got,
            "an int64 or int32 tensor of class indices",
            "Convert it: targets.long().",
            TypeError,
        )
    if targets.device != device:
        refuse(
            operator,
            "targets",
            f"on {targets.device}",
            f"the device of the logits, {device}",
            f"Move it: targets.to({str(device)!r}).",
        )
    if targets.shape != torch.Size(shape):
        do = "Pass one for each row."
        if logits_shape is not None:
            do = f"Classes are dimension class_dim of logits, {class_dim}."
            as_torch = len(logits_shape) > 2 and (logits_shape[0], *logits_shape[2:])
            if class_dim == -1 and targets.shape == as_torch:
                do = "Pass class_dim=1 for torch's layout [N, V, d1, ...]."
        refuse_shape(operator, "targets", targets, f"one class index for each row, {list(shape)}", do)
    if V == 0:
        refuse(operator, "the number of classes", 0, "at least 1", "Pass logits [..., V].")
    if weight is not None:
        check_tensor(operator, weight_name, weight)
        check_on(operator, weight_name, weight, device)
        do = f"Pass {weight_name}=None to weigh all classes alike."
        check_shape(operator, weight_name, weight, [V], "a weight a class", do)
        if weight.requires_grad and torch.is_grad_enabled():
            refuse(
                operator,
                weight_name,
                "a tensor that requires grad",
                "constants",
                f"Pass {weight_name}.detach().",
            )


def check_loss_options(
    operator: str,
    ignore_index: int,
    label_smoothing: float,
    z_loss: float,
    softcap: float | None,
    reduction: str,
) -> tuple[int, float, float, float | None]:
    """(ignore_index, label_smoothing, z_loss, softcap), once they and reduction are in their ranges."""
    do = "Pass -100, say, which is no class."
    ignore_index = check_integer(
        operator, "ignore_index", ignore_index, -(2**63), 2**63 - 1, "an int64 integer", do
    )
    do = "Pass 0.0 for none."
    label_smoothing = check_number(operator, "label_smoothing", label_smoothing, 0, 1, "0 to 1", do)
    z_loss = check_number(operator, "z_loss", z_loss, -LARGEST, LARGEST, "a finite number", do)
    if softcap is not None:
        takes, do = "a positive number, or None", "Pass None for none."
        softcap = check_number(operator, "softcap", softcap, SMALLEST, LARGEST, takes, do)
    check_choice(operator, "reduction", reduction, REDUCTIONS, "Pass one of them.")
    return ignore_index, label_smoothing, z_loss, softcap


def check_classes(operator: str, targets: Tensor, V: int, ignore_index: int) -> None:
    """Check, where values can be read, that every target is a class or ignore_index."""
    if is_readable(targets):
        wrong = ((targets < 0) | (targets >= V)) & (targets != ignore_index)
        takes = f"a class from 0 to {V - 1}, or ignore_index, {ignore_index}"
        do = "Make the head's width the number of classes, or mark such rows by ignore_index."
        check_values(operator, "targets", targets, wrong, takes, do)


def check_casting(operator: str, casting: str) -> None:
    """How a norm multiplies by its weight."""
    do = "Pass 'torch' for what torch's norms do."
    check_choice(operator, "casting", casting, ("torch", "llama", "gemma"), do)
