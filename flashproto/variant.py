"""What kind of attention a call is: one object, made once in functional/attention.py and passed whole
to the launches of every backend; and FEATURES, a row for each option of attention.

What an option does to scores is in kernels/scores.py, which tiles it skips in kernels/schedule.py.
"""

from __future__ import annotations

import functools
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .backends import Reason

# --- the options ----------------------------------------------------------------------------------


class Number(NamedTuple):
    """What a variable is: a float from low to high."""

    low: float
    high: float

    @property
    def takes(self) -> str:
        return f"a number from {self.low:g} to {self.high:g}, or None".replace("e+", "e")


FLAG = "no variable"
INTEGER = "an integer"
BY_HEAD = "[Hq]"
VECTORS = "int32"
STATISTIC = "[B, Hq, Sq], returned"

# Where an option can run.  "decode" is kernels/attention_decode.py: caches, and split keys on backend
# "triton".  "split" is split keys on backend "hopper".
KERNELS = ("triton", "hopper", "decode", "split")
BACKENDS = ("reference", "triton", "hopper")
FUNCTIONS = (
    "attention",
    "attention_varlen",
    "attention_qkv",
    "attention_with_kv_cache",
    "ring_attention",
    "scaled_dot_product_attention",
)
OWN_FUNCTIONS = FUNCTIONS[:-1]  # whose signatures are not torch's


class Feature(NamedTuple):
    """An option of attention.

    field: of Kind.  option: how calls ask for it.  variables: the names of its numbers and tensors, as
    Given of kernels/scores.py has them; what: what these are.
    functions: those that take it.  forward: where it runs.  backward: the backends whose kernels of dQ,
    dK and dV have it; None if these need nothing of it but lse.  gradients: the backends that have
    gradients of its variables; none if it is not differentiable.
    rescales: what `modified` makes of scores with it is in base 2, with the scale in it.  curved: it
    changes scores with another derivative than 1, see `modified_gradient`.  unhides: it can make a
    score of -inf finite, so that the mask has to come after it.
    """

    field: str
    option: str
    what: str | Number = FLAG
    variables: tuple[str, ...] = ()
    functions: Collection[str] = OWN_FUNCTIONS
    forward: Collection[str] = ("reference", *KERNELS)
    backward: Collection[str] | None = BACKENDS
    gradients: Collection[str] = ()
    rescales: bool = False
    curved: bool = False
    unhides: bool = False


FEATURES = (
    Feature("CAUSAL", "causal", functions=FUNCTIONS,
            forward=("reference", "torch", *KERNELS), backward=("torch", *BACKENDS)),
    Feature("WINDOW", "window", INTEGER, ("left",)),
    Feature("FIRST", "masks.window(first=n)", INTEGER, ("first",),
            functions=("attention", "attention_varlen", "attention_qkv", "ring_attention"),
            forward=("reference", "triton", "hopper", "split")),
    Feature("SOFTCAP", "softcap", Number(1e-30, 1e30), ("softcap",),
            rescales=True, curved=True, unhides=True),
    Feature("SINKS", "sinks", BY_HEAD, ("sinks",), backward=None, gradients=BACKENDS),
    Feature("ALIBI", "alibi_slopes", BY_HEAD, ("alibi_slopes",),
            functions=("attention", "attention_varlen", "attention_with_kv_cache", "ring_attention"),
            gradients=("reference", "triton"), rescales=True),
    Feature("INTERVALS", "masks.intervals(begin, end)", VECTORS, ("begin", "end"),
            functions=("attention", "attention_qkv", "ring_attention", "scaled_dot_product_attention")),
    Feature("VARLEN", "cu_seqlens_q", VECTORS, ("cu_seqlens_q", "cu_seqlens_k"),
            functions=("attention_varlen", "attention_with_kv_cache"), forward=BACKENDS),
    Feature("MAX_SCORE", "max_score", STATISTIC, functions=("attention", "attention_varlen"),
            forward=BACKENDS, backward=None),
    Feature("ENTROPY", "entropy", STATISTIC, functions=("attention", "attention_varlen"),
            forward=("reference", "triton"), backward=None),
)  # fmt: skip

# Of each variable the field of Kind, in the order in which functions pass them on.
VARIABLES = {name: row.field for row in FEATURES for name in row.variables}
DIFFERENTIABLE = tuple(name for row in FEATURES if row.gradients for name in row.variables)
NUMBERS = {row.option: row.what for row in FEATURES if isinstance(row.what, Number)}
# In the order of the operator's outputs behind lse.
AUX = tuple(row.option for row in FEATURES if row.what == STATISTIC)
NO_GRADIENT = "flashproto: {} has no gradient; call .detach() on it"


def fields_on(place: str, backward: bool = False) -> tuple[str, ...]:
    """The fields of Kind that kernels of this place have, those of the forward or of dQ, dK and dV."""
    return tuple(r.field for r in FEATURES if place in ((r.backward or ()) if backward else r.forward))


# --- kinds ----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Kind:
    """What an attention kernel is compiled for: plain bools and ints, one constexpr of the kernels and
    part of every key.

    Triton's key of a dataclass is its text, where functions are names and properties are left out.  So
    a user's @triton.jit function must not be a field, since an edited one would find the old binary;
    and what kernels ask of FEATURES is a field, filled in from there.

    CAUSAL: query i sees key j only if j <= i + offset.
    WINDOW: only if j >= i + offset - left; FIRST: or j < first.
    INTERVALS: only if begin[j] <= i < end[j].
    SOFTCAP: scores s become softcap tanh(s / softcap); 1: by tanh.approx, 2: exact, as float32 wants.
    ALIBI: slope |i + Sk - Sq - j| is taken off.
    SINKS: one more score of each row, without a value.
    MAX_SCORE, ENTROPY: statistics of each row, returned beside lse.
    VARLEN: sequences side by side; i, j, Sq and Sk are those of a sequence, and offset counts from its
        Sk - Sq.
    RESCALES, CURVED, UNHIDES: whether one of its options is so, see Feature.
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
    RESCALES: bool = field(default=False, init=False)
    CURVED: bool = field(default=False, init=False)
    UNHIDES: bool = field(default=False, init=False)

    def __post_init__(self) -> None:
        rows = [row for row in FEATURES if getattr(self, row.field, False)]
        object.__setattr__(self, "RESCALES", any(row.rescales for row in rows))
        object.__setattr__(self, "CURVED", any(row.curved for row in rows))
        object.__setattr__(self, "UNHIDES", any(row.unhides for row in rows))

    @property
    def given(self) -> dict[str, Any]:
        """Its options that are set, by field."""
        names = [name for name, x in self.__dataclass_fields__.items() if x.init]
        return {name: value for name in names if (value := getattr(self, name))}

    @functools.cached_property
    def name(self) -> str:
        """Its fields that are set, "causal+window=2"; "full" if none is."""
        words = [
            x.lower() if value is True else f"{x.lower()}={value}" for x, value in self.given.items()
        ]
        return "+".join(words) or "full"

    @property
    def PLAIN(self) -> bool:
        """Whether it is causal or full and no more, for which schedules were measured."""
        return self == Kind(CAUSAL=self.CAUSAL)

    def unsupported_by(self, place: str, backward: bool = False) -> list[str]:
        """The names of its options that kernels of this place have not, see fields_on."""
        there = fields_on(place, backward)
        return [name.lower() for name in self.given if name not in there]


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


kind_with = functools.cache(Kind)


def variant_of(
    causal: bool, offset: int, named: dict[str, Any], aux: Sequence[str] = (), exact: bool = False
) -> Variant:
    """A Variant of what is there, not None, of VARIABLES, and of the statistics; exact: see SOFTCAP."""
    given = {name: x for name, x in named.items() if x is not None}
    on: dict[str, Any] = {VARIABLES[name]: True for name in given}
    on |= {name.upper(): True for name in aux}
    if "SOFTCAP" in on:
        on["SOFTCAP"] = 2 if exact else 1
    kind = kind_with(CAUSAL=causal, **on)
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


def main_backward(variant: Variant) -> Variant:
    """Of a backward, what dQ, dK and dV depend on beside lse: not sinks and statistics."""
    by_lse = [row for row in FEATURES if row.backward is None]
    kind = replace(variant.kind, **{row.field: False for row in by_lse})
    if kind.PLAIN or kind == variant.kind:
        return Variant(kind, variant.offset) if kind.PLAIN else variant
    out = {name for row in by_lse for name in row.variables}
    pairs = zip(VARIABLES, variant.variables, strict=False)
    return variant._replace(kind=kind, variables=tuple(None if name in out else x for name, x in pairs))


def backward_backend(
    backend: str, kind: Kind, ordered: bool = False, wanted: Collection[str] = ()
) -> str:
    """Where the gradients of a forward on `backend` are computed; ordered: the same bits every time;
    wanted: the variables that have one too."""
    kind = main_backward(Variant(kind)).kind
    elsewhere = any(
        backend not in row.gradients and not set(wanted).isdisjoint(row.variables) for row in FEATURES
    )
    missing = elsewhere or (ordered and not kind.PLAIN) or kind.unsupported_by(backend, backward=True)
    return "triton" if backend == "hopper" and missing else backend


def reasons(
    backend: str, variant: Variant, q: Tensor, k: Tensor, v: Tensor, return_lse: bool
) -> Iterator[Reason]:
    """Why `backend` does not take such a call; what TMA asks of memory on "hopper" is in
    ops/attention_hopper_reasons.py."""
    kind = variant.kind
    without = kind.unsupported_by(backend)
    if backend == "torch" and without:
        yield f"its attention is causal or full, and this call is {kind.name}"
    elif without:
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
