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

from . import hooks
from .backends import Reason
from .checks.reading import is_readable

# --- the options ----------------------------------------------------------------------------------


class Number(NamedTuple):
    """What a variable is: a float from low to high, and that in words."""

    low: float
    high: float
    takes: str


def number(low: float, high: float) -> Number:
    """In words now: of the bounds, symbols to torch.compile(dynamic=True), it makes no text."""
    return Number(low, high, f"a number from {low:g} to {high:g}, or None".replace("e+", "e"))


FLAG = "no variable"
INTEGER = "an integer"
BY_HEAD = "[Hq]"
BY_PAIR = "[B|1, Hq|1, Sq|1, Sk|1], any strides"
BY_DISTANCE = "[Hq|1, R], and an integer"
USER_FUNCTION = "a call of a hook of scores, operands [B|1, Hq|1, Sq|1, Sk|1] of any strides"
VECTORS = "int32"
TABLE = "int32 and int8, made of a mask"
STATISTIC = "[B, Hq, Sq], returned"
SHARE = "a number from 0 to 1, and an int64 seed"

# Where an option can run.  "decode" is kernels/attention_decode.py: caches, and split keys on backend
# "triton".  "split" is split keys on backend "hopper".
KERNELS = ("triton", "hopper", "decode", "split")
BACKENDS = ("reference", "triton", "hopper")
TORCH_TOO = ("torch", *BACKENDS)
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
    dK and dV have it; None if these need nothing of it but lse.  gradients: the backends that have the
    gradient of its first variable or of the statistic; none if it is not differentiable.
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
            forward=(*TORCH_TOO, "decode", "split"), backward=TORCH_TOO),
    Feature("WINDOW", "window", INTEGER, ("left",),
            forward=(*TORCH_TOO, "decode", "split"), backward=TORCH_TOO),
    Feature("FIRST", "masks.window(first=n)", INTEGER, ("first",),
            functions=("attention", "attention_varlen", "attention_qkv", "ring_attention"),
            forward=(*TORCH_TOO, "split"), backward=TORCH_TOO),
    Feature("SOFTCAP", "softcap", number(1e-30, 1e30), ("softcap",),
            rescales=True, curved=True, unhides=True),
    Feature("SINKS", "sinks", BY_HEAD, ("sinks",), backward=None, gradients=BACKENDS),
    Feature("ALIBI", "alibi_slopes", BY_HEAD, ("alibi_slopes",),
            functions=("attention", "attention_varlen", "attention_with_kv_cache", "ring_attention"),
            gradients=("reference", "triton"), rescales=True),
    Feature("BIAS", "bias", BY_PAIR, ("bias",),
            functions=("attention", "attention_qkv", "scaled_dot_product_attention"),
            forward=("reference", "triton"), backward=("reference", "triton"),
            gradients=("reference", "triton"), rescales=True),
    Feature("RELATIVE_BIAS", "relative_bias", BY_DISTANCE, ("relative_bias", "relative_offset"),
            functions=("attention", "attention_varlen", "attention_qkv"),
            forward=("reference", "triton"), backward=("reference", "triton"),
            gradients=("reference", "triton"), rescales=True),
    Feature("SCORE_MOD", "score_mod", USER_FUNCTION, ("score_mod",),
            functions=("attention", "attention_qkv"),
            forward=("reference", "triton"), backward=("reference", "triton"),
            gradients=("reference", "triton"), rescales=True, curved=True, unhides=True),
    Feature("DROPOUT", "dropout_p", SHARE, ("dropout_p", "dropout_seed"),
            functions=("attention", "attention_qkv", "attention_varlen",
                       "scaled_dot_product_attention"),
            forward=("reference", "triton"), backward=("reference", "triton")),
    Feature("INTERVALS", "masks.intervals(begin, end)", VECTORS, ("begin", "end"),
            functions=("attention", "attention_qkv", "ring_attention", "scaled_dot_product_attention"),
            forward=(*TORCH_TOO, "decode", "split"), backward=TORCH_TOO),
    Feature("TABLE", "masks.boolean(x)", TABLE, ("bits", "table"),
            functions=("attention", "attention_qkv", "scaled_dot_product_attention"),
            forward=TORCH_TOO, backward=TORCH_TOO),
    Feature("VARLEN", "cu_seqlens_q", VECTORS,
            ("cu_seqlens_q", "cu_seqlens_k", "seqused_q", "seqused_k"),
            functions=("attention_varlen", "attention_with_kv_cache"),
            forward=TORCH_TOO, backward=TORCH_TOO),
    Feature("MAX_SCORE", "max_score", STATISTIC, functions=("attention", "attention_varlen"),
            forward=BACKENDS, backward=None, gradients=("reference",)),
    Feature("ENTROPY", "entropy", STATISTIC, functions=("attention", "attention_varlen"),
            forward=("reference", "triton"), backward=None, gradients=("reference", "triton")),
)  # fmt: skip

# Options that kernels of a place have, but not one beside the other.
APART = {"hopper": (("INTERVALS", "TABLE"), ("TABLE", "VARLEN"))}
# Of each variable the field of Kind, in the order in which functions pass them on.
VARIABLES = {name: row.field for row in FEATURES for name in row.variables}
DIFFERENTIABLE = tuple(row.variables[0] for row in FEATURES if row.gradients and row.variables)
OF_HEADS = tuple(name for row in FEATURES if row.what == BY_HEAD for name in row.variables)
# Tensors that kernels read as they lie in memory; they get others element behind element.
STRIDED = tuple(
    name for row in FEATURES if row.what in (BY_PAIR, USER_FUNCTION) for name in row.variables
)
NUMBERS = {row.option: row.what for row in FEATURES if isinstance(row.what, Number)}
# In the order of the operator's outputs behind lse.
AUX = tuple(row.option for row in FEATURES if row.what == STATISTIC)
NO_GRADIENT = (
    "flashproto: {} has no gradient on backend {!r}; pass impl='reference', or call .detach() on it"
)


def is_strided(name: str) -> bool:
    """Of a variable, or of a score_mod's operand."""
    return name.partition("[")[0] in STRIDED


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
    TABLE: only if its bit is 1; tiles without one are left out.
    SOFTCAP: scores s become softcap tanh(s / softcap); 1: by tanh.approx, 2: exact, as float32 wants.
    ALIBI: slope |i + Sk - Sq - j| is taken off.
    BIAS: bias[b, h, i, j] is added.
    RELATIVE_BIAS: relative_bias[h, i + Sk - Sq - j + relative_offset, or the nearest column] is added.
    SCORE_MOD: a user's function has the score after all these and before the mask; which one is a
        constant of its own beside the Kind.
    SINKS: one more score of each row, without a value.
    DROPOUT: probabilities are dropped, and the others multiplied by 1 / (1 - p).
    MAX_SCORE, ENTROPY: statistics of each row, returned beside lse.
    VARLEN: sequences side by side; i, j, Sq and Sk are those of a sequence, of which with seqused the
        first tokens alone count, and offset counts from its Sk - Sq.
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
    TABLE: bool = False
    BIAS: bool = False
    RELATIVE_BIAS: bool = False
    SCORE_MOD: bool = False
    DROPOUT: bool = False
    RESCALES: bool = field(default=False, init=False)
    CURVED: bool = field(default=False, init=False)
    UNHIDES: bool = field(default=False, init=False)

    def __post_init__(self) -> None:
        for row in FEATURES:
            if (row.rescales or row.curved or row.unhides) and getattr(self, row.field, False):
                object.__setattr__(self, "RESCALES", self.RESCALES or row.rescales)
                object.__setattr__(self, "CURVED", self.CURVED or row.curved)
                object.__setattr__(self, "UNHIDES", self.UNHIDES or row.unhides)

    @property
    def given(self) -> dict[str, Any]:
        """Its options that are set, by field."""
        names = [name for name in self.__dataclass_fields__ if name not in FILLED_IN]
        return {name: getattr(self, name) for name in names if getattr(self, name)}

    @property
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

    @property
    def LISTS(self) -> bool:
        """Whether Hopper's kernels take the tiles that meet from lists, which the device makes."""
        return self.INTERVALS or self.TABLE

    def unsupported_by(self, place: str, backward: bool = False) -> list[str]:
        """The names of its options that kernels of this place have not, see fields_on, and pairs of
        options that they have not together."""
        there = fields_on(place, backward)
        missing = [name.lower() for name in self.given if name not in there]
        apart = (pair for pair in APART.get(place, ()) if all(name in self.given for name in pair))
        return missing + [" beside ".join(pair).lower() for pair in apart if {*pair} <= {*there}]


FILLED_IN = ("RESCALES", "CURVED", "UNHIDES")  # fields that are no options


class Variant(NamedTuple):
    """kind: see Kind.  offset: by how much the diagonal of a causal mask is moved to the right.  named:
    those of VARIABLES that this kind uses, in their order; score_mod is a hooks.Call."""

    kind: Kind = Kind()
    offset: int = 0
    named: dict[str, Any] = {}  # noqa: RUF012, nobody writes to it

    @property
    def tensors(self) -> dict[str, Tensor]:
        # Under torch.jit.trace integers are tensors without dimensions.
        made: dict[str, Tensor] = {}
        for n, x in self.named.items():
            if isinstance(x, Tensor) and (x.ndim or n == "bias"):
                made[n] = x
            elif n == "score_mod":
                made |= zip(self.operand_names, self.operands, strict=True)
        return made

    @property
    def score_mod(self) -> hooks.Call | None:
        return self.named.get("score_mod")

    @property
    def operands(self) -> tuple[Any, ...]:
        """Of its score_mod."""
        return () if self.score_mod is None else self.score_mod.operands

    @property
    def dense(self) -> bool:
        """Whether its score_mod reads a number for each pair."""
        return any(x.ndim > 1 and x.shape[-2] > 1 and x.shape[-1] > 1 for x in self.operands)

    @property
    def operand_names(self) -> tuple[str, ...]:
        return tuple(f"score_mod[{i}]" for i in range(len(self.operands)))

    @property
    def top_left(self) -> bool:
        """Whether it is full, or torch's is_causal, and no more."""
        return self.kind.PLAIN and not (self.kind.CAUSAL and self.offset != 0)

    @property
    def form(self) -> Form:
        """What it is beside the values of its tensors."""
        tensors, mod = self.tensors, self.score_mod
        numbers = tuple((n, x) for n, x in self.named.items() if n not in tensors and x is not mod)
        named = None if mod is None else (mod.hook.name, mod.scalars)
        return Form(self.kind, self.offset, numbers, tuple(tensors), named)


class Form(NamedTuple):
    """A variant in the settings of an operator, whose last inputs are its tensors, here by their
    names; the numbers by theirs; a score_mod by its hook's name, with its scalars.

    An op takes it as a text, "causal+window+softcap=1+sinks/left/softcap/sinks": the kind, the names of
    integers, floats and tensors, and behind these that of a score_mod, whose scalars are the last
    floats.  A list of optional tensors would lose their gradients.
    """

    kind: Kind
    offset: int
    numbers: tuple[tuple[str, Any], ...]
    tensors: tuple[str, ...]
    score_mod: tuple[str, tuple[float, ...]] | None = None

    def variant(self, tensors: Sequence[Any]) -> Variant:
        named = dict(self.numbers) | dict(zip(self.tensors, tensors, strict=True))
        if self.score_mod is not None:
            name, scalars = self.score_mod
            operands = [named.pop(n) for n in self.tensors if n.startswith("score_mod")]
            named["score_mod"] = hooks.Call(hooks.defined(name), tuple(operands), scalars)
        return Variant(self.kind, self.offset, named)

    def flat(self) -> tuple[list[int], list[float], str]:
        """As the arguments of SCHEMA."""
        floats: dict[str, Any] = {
            n: x for n, x in self.numbers if isinstance(x, (float, torch.SymFloat))
        }
        ints = {n: x for n, x in self.numbers if n not in floats}
        names = "/".join(map(",".join, (ints, floats, self.tensors)))
        name, scalars = ("", ()) if self.score_mod is None else self.score_mod
        text = f"{self.kind.name}/{names}" + (name and f"/{name}")
        return [self.offset, *ints.values()], [*floats.values(), *scalars], text

    @staticmethod
    def of(ints: Sequence[int], floats: Sequence[float], variant: str) -> Form:
        """What `flat` made these of."""
        kind, *lists = variant.split("/", 4)
        whole, real, tensors = ([*filter(None, names.split(","))] for names in lists[:3])
        offset, *values = ints
        numbers = (*zip(whole, values, strict=True), *zip(real, floats, strict=False))
        mod = (lists[3], tuple(floats[len(real) :])) if len(lists) > 3 else None
        return Form(kind_of(kind), offset, numbers, tuple(tensors), mod)


SCHEMA = "SymInt[] ints, float[] floats, str variant"


def variant_of(
    causal: bool, offset: int, named: dict[str, Any], aux: Sequence[str] = (), exact: bool = False
) -> Variant:
    """A Variant of what is there, not None, of VARIABLES, and of the statistics; exact: see SOFTCAP."""
    given = {name: named[name] for name in VARIABLES if named.get(name) is not None}
    on: dict[str, Any] = {VARIABLES[name]: True for name in given}
    on |= {name.upper(): True for name in aux}
    if "SOFTCAP" in on:
        on["SOFTCAP"] = 2 if exact else 1
    return Variant(Kind(CAUSAL=causal, **on), offset, given)


@functools.cache
def kind_of(text: str) -> Kind:
    """The Kind that is printed so."""
    if text == "full":
        return Kind()
    given = (word.partition("=") for word in text.split("+"))
    options: dict[str, Any] = {n.upper(): int(value) if value else True for n, _, value in given}
    return Kind(**options)


# --- what runs where -----------------------------------------------------------------------------

LARGEST_HEAD_DIM = 512  # of the portable kernels, which hold whole rows


def main_backward(variant: Variant) -> Variant:
    """Of a backward, what dQ, dK and dV depend on beside lse: not sinks and statistics."""
    by_lse = [row for row in FEATURES if row.backward is None]
    kind = replace(variant.kind, **{row.field: False for row in by_lse})
    out = {name for row in by_lse for name in row.variables}
    return variant._replace(kind=kind, named={n: x for n, x in variant.named.items() if n not in out})


def has_gradient(statistic: str, backend: str) -> bool:
    """Whether its gradient is computed there."""
    return any(row.option == statistic and backend in row.gradients for row in FEATURES)


def backward_backend(
    backend: str,
    kind: Kind,
    ordered: bool = False,
    wanted: Collection[str] = (),
    wider_keys: bool = False,
) -> str:
    """Where the gradients of a forward on `backend` are computed; ordered: the same bits every time;
    wanted: the variables and statistics that have one too; wider_keys: their head_dim is not that of
    values."""
    kind = main_backward(Variant(kind)).kind
    elsewhere = any(
        backend not in row.gradients and not set(wanted).isdisjoint((row.option, *row.variables))
        for row in FEATURES
    )
    in_order = ordered and (wider_keys or not kind.PLAIN)
    missing = kind.unsupported_by(backend, backward=True)
    lacks = elsewhere or in_order or bool(missing) or (wider_keys and kind.CURVED)
    return "triton" if backend == "hopper" and lacks else backend


def reasons(
    backend: str, variant: Variant, q: Tensor, k: Tensor, v: Tensor, return_lse: bool
) -> Iterator[Reason]:
    """Why `backend` does not take such a call; what TMA asks of memory on "hopper" is in
    ops/attention_hopper_reasons.py."""
    kind = variant.kind
    without = kind.unsupported_by(backend)
    if without:
        yield f"its kernels have no {' and no '.join(without)}"
    if backend == "torch":
        if return_lse:
            yield "torch's attention does not return lse"
        if q.device.type != "cpu" and not variant.top_left:
            why = (
                "off a CPU its masks are causal and aligned top-left, and this is {}, Sq = {}, Sk = {}"
            )
            yield why, kind.name, q.shape[2], k.shape[2]
        elif kind.VARLEN and not all(map(is_readable, variant.tensors.values())):
            yield "it takes sequences one by one, and their lengths cannot be read here"
        if q.numel() == 0 or v.numel() == 0:
            yield "q or v is empty"
    elif backend == "triton":
        yield from hooks.without_kernel(variant.score_mod)
        if q.dtype == torch.float64:
            yield "dtype is float64; the kernels take float16, bfloat16 and float32"
        if q.shape[3] > LARGEST_HEAD_DIM or v.shape[3] > LARGEST_HEAD_DIM:
            why = "head_dim is {}; the kernels take up to {}"
            yield why, max(q.shape[3], v.shape[3]), LARGEST_HEAD_DIM
