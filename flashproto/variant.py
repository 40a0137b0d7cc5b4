"""What kind of attention a call is: one object, made once in functional/attention.py and passed whole
to the launches of every backend.

A variant is a field of Kind and its number or tensor in VARIABLES; what it does to scores is in
kernels/scores.py, which tiles it skips in kernels/schedule.py.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .backends import Reason


@dataclass(frozen=True)
class Kind:
    """What an attention kernel is compiled for: plain bools and ints, one constexpr of the kernels and
    part of every key.

    A user's @triton.jit function must not be a field: Triton's key of a dataclass has the function's
    name and not its source, so that an edited one would find the old binary.

    CAUSAL: query i sees key j only if j <= i + offset.
    WINDOW: only if j >= i + offset - left; FIRST: or j < first.
    INTERVALS: only if begin[j] <= i < end[j].
    SOFTCAP: scores s become softcap tanh(s / softcap); 1: by tanh.approx, 2: exact, as float32 wants.
    ALIBI: slope |i + Sk - Sq - j| is taken off.
    SINKS: one more score of each row, without a value.
    MAX_SCORE, ENTROPY: statistics of each row, returned beside lse.
    VARLEN: sequences side by side; i, j, Sq and Sk are those of a sequence, and offset counts from its
        Sk - Sq.
    """

    CAUSAL: bool = False
    WINDOW: bool = False
    FIRST: bool = False
    INTERVALS: bool = False
    SOFTCAP: int = 0
    ALIBI: bool = False
    SINKS: bool = False
    MAX_SCORE: bool = False
    ENTROPY: bool = False
    VARLEN: bool = False

    @property
    def name(self) -> str:
        """Its fields that are set, "causal+window=2"; "full" if none is."""
        given = [(field.lower(), getattr(self, field)) for field in self.__dataclass_fields__]
        words = [word if value is True else f"{word}={value}" for word, value in given if value]
        return "+".join(words) or "full"

    def __str__(self) -> str:
        return self.name

    @property
    def TUNED(self) -> bool:
        """Whether it is causal or full and no more, for which schedules were measured."""
        return self == Kind(CAUSAL=self.CAUSAL)

    def beyond(self, fields: Sequence[str]) -> list[str]:
        """The names of its fields that are set and not among these."""
        return [
            name.lower()
            for name in self.__dataclass_fields__
            if name not in fields and getattr(self, name)
        ]


# What kinds take, numbers and tensors, each with the field of Kind that it belongs to; in the order in
# which kernels/scores.py has them, where a new one comes behind the others.
VARIABLES = {
    "left": "WINDOW",
    "first": "FIRST",
    "softcap": "SOFTCAP",
    "sinks": "SINKS",
    "alibi_slopes": "ALIBI",
    "begin": "INTERVALS",
    "end": "INTERVALS",
    "cu_seqlens_q": "VARLEN",
    "cu_seqlens_k": "VARLEN",
}
DIFFERENTIABLE = ("sinks", "alibi_slopes")
NO_GRADIENT = "flashproto: {} has no gradient; call .detach() on it"
AUX = ("max_score", "entropy")  # in the order of the operator's outputs behind lse

Variable = int | float | Tensor | None


class Variant(NamedTuple):
    """kind: see Kind.  offset: by how much the diagonal of a causal mask is moved to the right.

    variables: those of VARIABLES, as the kernels take them, None where this kind does not use it, which
    is no argument; empty where it uses none.
    """

    kind: Kind = Kind()
    offset: int = 0
    variables: tuple[Variable, ...] = ()

    @property
    def named(self) -> dict[str, Any]:
        """The variables by their names, those that are there."""
        pairs = zip(VARIABLES, self.variables, strict=len(self.variables) > 0)
        return {name: x for name, x in pairs if x is not None}

    def with_tensors(self, named: dict[str, Any]) -> Variant:
        """Itself with these in place of its own."""
        own = self.named | named
        return self._replace(variables=tuple(map(own.get, VARIABLES)) if own else ())


def variant_of(
    causal: bool, offset: int, named: dict[str, Any], aux: Sequence[str] = (), exact: bool = False
) -> Variant:
    """A Variant of what is there, not None, of VARIABLES, and of the statistics; exact: see SOFTCAP."""
    given = {name: x for name, x in named.items() if x is not None}
    fields: dict[str, Any] = {VARIABLES[name]: True for name in given}
    fields |= {name.upper(): True for name in aux}
    if "SOFTCAP" in fields:
        fields["SOFTCAP"] = 2 if exact else 1
    kind = Kind(CAUSAL=causal, **fields)
    return Variant(kind, offset, tuple(map(given.get, VARIABLES)) if given else ())


# --- in the schema of an operator ----------------------------------------------------------------

# A list with None in it would lose the gradients of its tensors: the text says which there are.
FLOATS = (float, torch.SymFloat)
SCHEMA = "Tensor[] tensors, SymInt[] ints, float[] floats, str variant"
Packed = tuple[list[Tensor], list[int], list[float], str]


def pack(variant: Variant) -> Packed:
    """A variant as the arguments of SCHEMA.  Its text has the kind and, behind the "/", a letter for
    each variable, of a tensor, an integer or a float: "causal/i-ft"; "-" is None."""
    kind, offset, variables = variant
    by_letter: dict[str, list[Any]] = {"t": [], "i": [offset], "f": [], "-": []}
    letters = ""
    for x in variables:
        if x is None:
            letter = "-"
        elif isinstance(x, FLOATS):
            letter = "f"
        else:  # under torch.jit.trace integers are tensors without dimensions
            letter = "t" if isinstance(x, Tensor) and x.ndim else "i"
        by_letter[letter].append(x)
        letters += letter
    return by_letter["t"], by_letter["i"], by_letter["f"], f"{kind.name}/{letters}"


def unpack(
    tensors: Sequence[Tensor], ints: Sequence[int], floats: Sequence[float], variant: str
) -> Variant:
    """What `pack` was given."""
    kind, letters = variant.split("/")
    offset, *whole = ints
    left: dict[str, list[Any]] = {"t": [*reversed(tensors)], "i": whole[::-1], "f": [*reversed(floats)]}
    variables = tuple(None if letter == "-" else left[letter].pop() for letter in letters)
    return Variant(kind_of(kind), offset, variables)


def tensors_of(variant: str) -> list[str]:
    """The names of the tensors in a text of `pack`, in their order."""
    return [
        name for name, letter in zip(VARIABLES, variant.split("/")[1], strict=False) if letter == "t"
    ]


@functools.cache
def kind_of(text: str) -> Kind:
    """The Kind that is printed so."""
    if text == "full":
        return Kind()
    given = (word.partition("=") for word in text.split("+"))
    fields: dict[str, Any] = {n.upper(): int(value) if value else True for n, _, value in given}
    return Kind(**fields)


# --- what runs where -----------------------------------------------------------------------------

# Fields of Kind that the kernels of kernels/hopper have.
HOPPER_FORWARD = (
    "CAUSAL",
    "WINDOW",
    "FIRST",
    "INTERVALS",
    "SOFTCAP",
    "ALIBI",
    "SINKS",
    "MAX_SCORE",
    "VARLEN",
)
HOPPER_BACKWARD = ("CAUSAL", "WINDOW", "FIRST", "INTERVALS", "SOFTCAP", "ALIBI", "VARLEN")


def main_backward(variant: Variant) -> Variant:
    """Of a backward, what dQ, dK and dV depend on beside lse: not sinks and statistics."""
    kind = replace(variant.kind, SINKS=False, MAX_SCORE=False, ENTROPY=False)
    if kind.TUNED or kind == variant.kind:
        return Variant(kind, variant.offset) if kind.TUNED else variant
    pairs = zip(VARIABLES, variant.variables, strict=False)
    return variant._replace(
        kind=kind, variables=tuple(None if name == "sinks" else x for name, x in pairs)
    )


def backward_backend(backend: str, kind: Kind, ordered: bool = False, slopes: bool = False) -> str:
    """Where the gradients of a forward on `backend` are computed; ordered: the same bits every time;
    slopes: those of alibi_slopes too."""
    kind = main_backward(Variant(kind)).kind
    missing = slopes or (ordered and not kind.TUNED) or kind.beyond(HOPPER_BACKWARD)
    return "triton" if backend == "hopper" and missing else backend


def reasons(
    backend: str, variant: Variant, q: Tensor, k: Tensor, v: Tensor, return_lse: bool
) -> Iterator[Reason]:
    """Why `backend` does not take such a call; what TMA asks of memory on "hopper" is in
    ops/attention_hopper_reasons.py."""
    kind = variant.kind
    if backend == "torch" and not kind.TUNED:
        yield f"its attention is causal or full, and this call is {kind}"
    if backend == "hopper" and (without := kind.beyond(HOPPER_FORWARD)):
        yield f"its kernels have no {' and no '.join(without)}"
    if backend == "torch":
        if return_lse:
            yield "torch's attention does not return lse"
        if variant.kind.CAUSAL and variant.offset != 0:
            why = "torch's is_causal is aligned top-left, this call has Sq = {} and Sk = {}"
            yield why, q.shape[2], k.shape[2]
        if q.numel() == 0 or v.numel() == 0:
            yield "q or v is empty"
    elif backend == "triton":
        if q.dtype == torch.float64:
            yield "dtype is float64; the kernels take float16, bfloat16 and float32"
        if q.shape[3] > 256 or v.shape[3] > 256:
            yield "head_dim is {}; the kernels take up to 256", max(q.shape[3], v.shape[3])
