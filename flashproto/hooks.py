"""Hooks: element-wise functions fused into norms and softmax, before the row's statistics or after, and
into attention, between the scores and their softmax.

    @triton.jit
    def shifted(x, index, shift):            # a tile, its elements' positions, the operands
        return x + shift

    @triton.jit
    def shifted_backward(dy, x, index, shift):
        return dy, dy                        # the gradients of x and of each operand

    flashproto.hooks.register(
        "shifted", forward=shifted, backward=shifted_backward,
        reference=lambda x, index, shift: x + shift, operands=1,
    )
    y = flashproto.rms_norm(x, N, weight, prologue=flashproto.hooks.call("shifted", shift))

A hook has a name, since the schema of an operator takes no functions, and its definition in PyTorch,
which the reference backend uses and the kernels are tested against.  One without `backward` is forward
only: a call that needs a gradient through it is refused.  Conventions of the device functions:
kernels/hooks.py; they see float32 tiles, so PyTorch's definition is given float32 (or float64) too.
Their file imports triton.language, which Triton's interpreter asks for, and is a file: Triton reads the
source of its functions there.

Operands are tensors that broadcast to x, each loaded as it is: one value a row, one a column, one for
all, or one an element.  Scalars are numbers.

The other signature is "score", of attention's score_mod.  There the element is the score of a query and
a key, after scale, softcap and biases and before the mask, and its place four integers:

    @triton.jit
    def warmer(score, b, h, i, j, heat):     # the indices of batch entry, query head, query and key
        return score * heat

    @triton.jit
    def warmer_backward(dscore, score, b, h, i, j, heat):
        return dscore * heat, dscore * score

    flashproto.hooks.register(
        "warmer", signature="score", forward=warmer, backward=warmer_backward,
        reference=lambda score, b, h, i, j, heat: score * heat, operands=1,
    )
    mod = flashproto.hooks.call("warmer", heat)  # [Hq, 1, 1], a number for each head
    out = flashproto.attention(q, k, v, score_mod=mod)

Its operands broadcast to [B, Hq, Sq, Sk].

Built in for rows: "multiply" (by an operand: one value a row, a column or an element), "silu_gate" (by
silu(z)), "dropout" (an int64 seed and the scalar p), "quantize_e4m3" and "quantize_e5m2" (divide by a
scale, given for all or for each row, and clamp to what float8_e4m3fn or float8_e5m2 holds; forward
only).
Built in for scores: see score_hooks.py.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import silu

from . import backends
from .checks.attention import check_by_pair
from .checks.errors import described, nearest, refuse
from .checks.options import check_choice, check_number, fixed, is_number
from .checks.tensors import FLOATS, check_broadcasts
from .reference.philox import WORD, philox

if backends.HAS_TRITON:
    from .kernels import hooks as device


__all__ = ["Call", "Hook", "call", "dropout", "get", "names", "register"]

SIGNATURES = ("row", "score")
FLOAT8 = (torch.float8_e4m3fn, torch.float8_e5m2)


@dataclass(frozen=True)
class Hook:
    """An element-wise function in both languages; see the head of this module.  `register` makes one.

    name: its own, in settings of operators; another one for each definition that a name was given.
    forward, backward: @triton.jit functions, see kernels/hooks.py; backward None: forward only.
    reference(x, index, *operands, *scalars): the same in PyTorch, differentiable if backward is given.
    signature: one of SIGNATURES.  "score" has (b, h, i, j) for the index.
    operands, scalars: how many of each it takes.
    needs_value: whether backward reads x.  If it does not, a prologue need not keep x in memory.

    Example:
        >>> hook = hooks.get("dropout")
        >>> hook.operands, hook.scalars, hook.needs_value
        (1, 1, False)
    """

    name: str
    forward: Any
    backward: Any
    reference: Callable[..., Tensor]
    operands: int
    scalars: int
    needs_value: bool
    signature: str = "row"

    def __reduce__(self) -> tuple[Any, ...]:
        return defined, (self.name,)  # functions in Triton have no pickles


@dataclass(frozen=True)
class Call:
    """A hook with its arguments, as operators take it; made by `call`.

    Example:
        >>> hooks.call("multiply", torch.ones(3)).hook.name
        'multiply'
    """

    hook: Hook
    operands: tuple[Tensor, ...] = ()
    scalars: tuple[float, ...] = ()


_hooks: dict[str, Hook] = {}  # by their own names; none is replaced
_newest: dict[str, str] = {}  # the own name of each name's newest definition


def register(
    name: str,
    *,
    forward: Any,
    reference: Callable[..., Tensor],
    backward: Any = None,
    operands: int = 0,
    scalars: int = 0,
    needs_value: bool = True,
    signature: str = "row",
    replace: bool = False,
) -> None:
    """Make a hook known under `name`.

    Args:
        name: how `call` finds it.
        forward, backward: @triton.jit functions, as at the head of this module; backward None: forward
            only; forward None: for backend "reference" only.
        reference: reference(x, index, *operands, *scalars) in PyTorch, or of a score
            reference(score, b, h, i, j, *operands, *scalars), of tensors that broadcast to it;
            differentiable if there is a backward.
        operands, scalars: how many tensors and how many numbers it takes.
        needs_value: whether backward reads x.
        signature: "row", for norms and softmax, or "score", for attention.
        replace: whether the name may have had another definition, as an edited function in a notebook
            has.  Calls made from now on have this one.  The backward of those made before keeps theirs.

    Raises: ValueError: the name is taken, or there is no such signature; TypeError: a forward or
        backward that is not decorated with @triton.jit.

    Example:
        >>> hooks.register("square", forward=None, reference=lambda x, index: x * x)
        >>> x = torch.tensor([1.0, 2.0, 3.0])
        >>> y = flashproto.softmax(x, prologue=hooks.call("square"), impl="reference")
        >>> torch.allclose(y, torch.softmax(x * x, -1))
        True
    """
    check_choice("hooks.register", "signature", signature, SIGNATURES, "Pass 'score' for attention.")
    for argument, function in (("forward", forward), ("backward", backward)):
        if function is not None and not hasattr(function, "fn"):  # as what @triton.jit makes has
            got, takes = described(function), "a function with @triton.jit, or None"
            refuse("hooks.register", argument, got, takes, "Decorate it with @triton.jit.", TypeError)
    if not isinstance(name, str) or not name or "#" in name:
        takes, do = "a name without #", "Choose another."
        refuse("hooks.register", "name", described(name), takes, do)
    own = name
    if name in _newest:
        if not replace:
            do = "Choose another, or pass replace=True."
            refuse("hooks.register", "name", f"{name!r}, which is taken", "a new name", do)
        own = f"{name}#{len(_hooks)}"  # what is kept by the name of the other one is not found
    arguments = forward, backward, reference, operands, scalars, needs_value, signature
    _hooks[own], _newest[name] = Hook(own, *arguments), own


def names(signature: str | None = None) -> list[str]:
    """Of all hooks, or of those of one signature.

    Example:
        >>> hooks.names("score")[:2]
        ['forget', 'multiply_score']
    """
    return sorted(n for n, own in _newest.items() if signature in (None, _hooks[own].signature))


def get(name: str) -> Hook:
    """The hook of that name.

    Raises: ValueError: there is none.

    Example:
        >>> hooks.get("multiply").operands
        1
    """
    return found("hooks.get", name)


def found(operator: str, name: str) -> Hook:
    if name not in _newest:
        known, close = ", ".join(map(repr, names())), nearest(name, names())
        do = "Call hooks.register first." if close is None else f"Pass {close!r}, if that is meant."
        refuse(operator, "name", described(name), f"one of {known}", do)
    return _hooks[_newest[name]]


def defined(name: str) -> Hook:
    """The definition with this own name, Hook.name, by which operators keep it.  A later one that took
    the place of its name does not take its own."""
    return _hooks[name] if name in _hooks else found("hooks.get", name)


def call(name: str, *arguments: Tensor | float) -> Call:
    """The hook `name` with its operands and then its scalars.

    Raises: ValueError: there is no such hook; TypeError: it takes other arguments.

    Example:
        >>> x, gate = torch.randn(4, 64), torch.randn(4, 64)
        >>> y = flashproto.rms_norm(x, 64, epilogue=hooks.call("silu_gate", gate))
        >>> expected = flashproto.rms_norm(x, 64) * torch.nn.functional.silu(gate)
        >>> torch.allclose(y, expected, atol=1e-5)
        True
    """
    hook = found("hooks.call", name)
    operands = tuple(a for a in arguments[: hook.operands] if isinstance(a, Tensor))
    scalars = tuple(a for a in arguments[hook.operands :] if isinstance(a, bool) or is_number(a))
    if (len(operands), len(scalars)) != (hook.operands, hook.scalars) or len(arguments) != len(
        operands
    ) + len(scalars):
        refuse(
            f"hook {name!r}",
            "arguments",
            [type(a).__name__ for a in arguments],
            f"{hook.operands} tensors, then {hook.scalars} numbers",
            "Pass these.",
            TypeError,
        )
    return Call(hook, operands, tuple(float(fixed(a)) for a in scalars))


def check(operator: str, argument: str, made: Call | None, x: Tensor) -> None:
    """Refuse a call whose operands do not fit x, or that needs a derivative the hook does not have."""
    if made is None:
        return
    check_call(operator, argument, made, "row", (x,))
    for i, operand in enumerate(made.operands):
        check_broadcasts(operator, f"{argument} operand {i}", operand, x)


def check_score_mod(
    operator: str, made: Call, scores: Sequence[int], device: torch.device, tensors: Sequence[Tensor]
) -> None:
    """The same of attention's score_mod, for scores [B, Hq, Sq, Sk] of these tensors."""
    check_call(operator, "score_mod", made, "score", tensors)
    do = "Reshape it: x[:, None, None] is one for each head."
    for i, operand in enumerate(made.operands):
        check_by_pair(operator, f"score_mod operand {i}", operand, scores, device, do)


def check_call(
    operator: str, argument: str, made: object, signature: str, tensors: Sequence[Tensor]
) -> None:
    """Refuse what is no call of a hook of this signature, or one without the derivative that `tensors`
    and its operands need."""
    if not isinstance(made, Call):
        refuse(
            operator,
            argument,
            described(made),
            "what flashproto.hooks.call returns",
            how_to_call(made, signature),
            TypeError,
        )
    if made.hook.signature != signature:
        got = f"{made.hook.name!r}, of signature {made.hook.signature!r}"
        takes = f"a hook of signature {signature!r}"
        refuse(operator, argument, got, takes, f"Register one with signature={signature!r}.")
    wanted = torch.is_grad_enabled() and any(t.requires_grad for t in (*tensors, *made.operands))
    if wanted and made.hook.backward is None:
        refuse(
            operator,
            argument,
            f"{made.hook.name!r}, which has no derivative",
            "a hook with one where a gradient is wanted",
            "Register it with backward=, or call under torch.no_grad().",
        )


def without_kernel(*made: Call | None) -> Iterator[str]:
    """Reasons of these calls against backend "triton"."""
    for each in made:
        if each is not None and each.hook.forward is None:
            yield f"hook {each.hook.name!r} has no @triton.jit function"


def how_to_call(made: object, signature: str) -> str:
    known = names(signature)
    if isinstance(made, str) and made in known:
        return f"Pass hooks.call({made!r}, *arguments)."
    of = f"register one with hooks.register(name, signature={signature!r}, ...)"
    return f"Pass hooks.call(name, *arguments) of {', '.join(map(repr, known))}, or {of} first."


def check_both(operator: str, prologue: Call | None, epilogue: Call | None, x: Tensor) -> list[Tensor]:
    """The operands of both, once these fit x."""
    check(operator, "prologue", prologue, x)
    check(operator, "epilogue", epilogue, x)
    return [t for made in (prologue, epilogue) if made is not None for t in made.operands]


def check_dtype(operator: str, dtype: torch.dtype, tensors: Sequence[Tensor]) -> None:
    """The dtype of a hooked operator's result: a float; one of 8 bits where no gradient is wanted."""
    if not isinstance(dtype, torch.dtype) or (dtype not in FLOATS and dtype not in FLOAT8):
        takes = "a floating-point dtype, or float8_e4m3fn, or float8_e5m2"
        refuse(operator, "dtype", described(dtype), takes, "Pass None for that of x.", TypeError)
    if dtype in FLOAT8 and torch.is_grad_enabled() and any(t.requires_grad for t in tensors):
        refuse(
            operator,
            "dtype",
            dtype,
            "a dtype of 16 bits or more where a gradient is wanted",
            "Call it under torch.no_grad().",
        )


def define(made: Call | None, x: Tensor) -> Tensor:
    """The hook in plain PyTorch on x, which has the dtype it is to be computed in."""
    if made is None:
        return x
    index = torch.arange(x.numel(), device=x.device).view(x.shape)
    operands = [t.to(x.dtype) if t.is_floating_point() else t for t in made.operands]
    return made.hook.reference(x, index, *operands, *made.scalars)


def define_score(made: Call) -> Callable[..., Tensor]:
    """The hook of scores in plain PyTorch, as a function of (score, b, h, i, j)."""

    def score_mod(score: Tensor, *places: Tensor) -> Tensor:
        operands = [t.to(score.dtype) if t.is_floating_point() else t for t in made.operands]
        return made.hook.reference(score, *places, *operands, *made.scalars)

    return score_mod


# --- dropout ---------------------------------------------------------------------------------------


def dropout_mask(index: Tensor, seed: Tensor, p: float) -> Tensor:
    """Which elements dropout keeps: those whose uniform number is p or more."""
    zero = torch.zeros_like(index)
    word, *_ = philox(seed, index & WORD, (index >> 32) & WORD, zero, zero)
    word = torch.where(word > 0x7FFFFFFF, WORD - word, word)  # -x - 1 of a negative int32
    return word.to(torch.float32) * 4.6566127342e-10 >= torch.tensor(p, dtype=torch.float32)


def _dropout(x: Tensor, index: Tensor, seed: Tensor, p: float) -> Tensor:
    return torch.where(dropout_mask(index, seed, p), x * (1 / (1 - p) if p < 1 else 0.0), 0.0)


def dropout(p: float, seed: Tensor | None = None, device: torch.device | str | None = None) -> Call:
    """Dropout with a seed on the device, so that a CUDA graph can change it; drawn from torch's
    generator if None.  The mask depends on the seed and on each element's position alone.

    Args:
        p: the share of elements to drop, at least 0 and less than 1; the others are divided by 1 - p.
        seed: an int64 tensor of one element, or None.
        device: where a seed is drawn.

    Raises: TypeError, ValueError: p does not fit.
    Source: Salmon et al., "Parallel Random Numbers: As Easy as 1, 2, 3" (2011), for Philox.

    Example:
        >>> x, seed = torch.ones(4, 64), torch.tensor(7)
        >>> a, b = (flashproto.softmax(x, epilogue=hooks.dropout(0.5, seed)) for _ in range(2))
        >>> torch.equal(a, b), bool((a == 0).any())
        (True, True)
    """
    takes, do = "at least 0 and less than 1", "Pass the share to drop."
    check_number("hooks.dropout", "p", p, 0, math.nextafter(1, 0), takes, do)
    if seed is None:
        seed = torch.randint(2**63 - 1, (), device=device)
    return call("dropout", seed, p)


def _device(name: str) -> Any:
    return getattr(device, name) if backends.HAS_TRITON else None


register(
    "multiply",
    forward=_device("multiply"),
    backward=_device("multiply_backward"),
    reference=lambda x, index, factor: x * factor,
    operands=1,
)
register(
    "silu_gate",
    forward=_device("silu_gate"),
    backward=_device("silu_gate_backward"),
    reference=lambda x, index, z: x * silu(z),
    operands=1,
)
register(
    "dropout",
    forward=_device("dropout"),
    backward=_device("dropout_backward"),
    reference=_dropout,
    operands=1,
    scalars=1,
    needs_value=False,
)
register(
    "quantize_e4m3",
    forward=_device("quantize_e4m3"),
    reference=lambda x, index, scale: (x / scale).clamp(-448, 448),
    operands=1,
)
register(
    "quantize_e5m2",
    forward=_device("quantize_e5m2"),
    reference=lambda x, index, scale: (x / scale).clamp(-57344, 57344),
    operands=1,
)
