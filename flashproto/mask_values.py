"""What a mask is: a band around the diagonal, which is a few numbers, and for each key the interval of
queries that may see it, which is two vectors; and any other rule, of which a table of tiles is made.
Made by the functions of masks.py."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, NoReturn

import torch
from torch import Tensor
from torch.compiler import is_compiling

from .checks.errors import described, refuse
from .checks.options import check_integer

ALWAYS = 2**31 - 1  # the end of an interval behind all queries
MOST_TABLES = 64  # of one mask: for each length, window, tile shape and stream
TILE = 128  # for the share of tiles that a mask visits
EXAMPLE = 4096  # the length for which a mask without one says that share


class Band(NamedTuple):
    """Keys from position - left to position + right, None for no bound, and the first keys as far as
    `right` lets them be seen.  top_left: query i is at position i."""

    left: int | None
    right: int | None
    first: int
    top_left: bool

    def __str__(self) -> str:
        if self == Band(None, 0, 0, self.top_left):
            return "causal(top_left=True)" if self.top_left else "causal()"
        if self.right is not None and self.right < 0:
            return f"~{Band(-self.right - 1, None, 0, self.top_left)}"
        if self.left is not None and self.left < 0:
            return f"~{Band(None, -self.left - 1, 0, self.top_left)}"
        first = f", first={self.first}" if self.first else ""
        return f"window({self.left}, {self.right}{first})"


class Tables(dict[Any, Any]):
    """What kernels make of intervals, as `begin.tables`: kept with them, since nobody writes to these
    later, by what it is and by stream.  A copy of the intervals has none."""

    def __setitem__(self, key: Any, made: Any) -> None:
        if len(self) >= MOST_TABLES:
            self.clear()
        super().__setitem__(key, made)

    def __deepcopy__(self, memo: object) -> Tables:
        return Tables()

    def __reduce__(self) -> tuple[type, tuple[()]]:
        return Tables, ()


class Intervals(NamedTuple):
    """Key j is seen by the queries begin[j] ... end[j] - 1; int32 [B | 1, H | 1, Sk].

    by_position: queries are counted by position, not by their rows.
    queries: for how many queries it was made, None if for any number.
    """

    words: str
    begin: Tensor
    end: Tensor
    by_position: bool
    queries: int | None

    def __str__(self) -> str:
        return self.words

    @property
    def form(self) -> tuple[Any, ...]:
        return self.by_position, self.queries

    @property
    def held(self) -> tuple[str, ...]:
        return "begin", "end"

    def vectors(self, Sq: int, Sk: int, device: Any) -> tuple[Tensor, Tensor]:
        if not self.by_position or Sq == Sk:
            return self.begin, self.end
        return self.begin - (Sk - Sq), self.end - (Sk - Sq)


class Lengths(NamedTuple):
    """padding: keys below lengths [B | 1, 1] are seen by all, others by none; prefix: others by the
    queries from their position on."""

    lengths: Tensor
    prefix: bool

    def __str__(self) -> str:
        return f"{'prefix' if self.prefix else 'padding'}({described(self.lengths[:, 0])})"

    @property
    def form(self) -> tuple[Any, ...]:
        return (self.prefix,)

    @property
    def held(self) -> tuple[str, ...]:
        return ("lengths",)

    def vectors(self, Sq: int, Sk: int, device: Any) -> tuple[Tensor, Tensor]:
        key = torch.arange(Sk, dtype=torch.int32, device=self.lengths.device)
        early = key < self.lengths[..., None]
        zero = torch.zeros_like(key)
        if self.prefix:
            begin = torch.where(early, zero, key - (Sk - Sq))
            return begin, torch.full_like(begin, ALWAYS)
        return zero.expand(early.shape), torch.where(early, ALWAYS, zero)


class Blocks(NamedTuple):
    """chunks: tokens are cut into chunks of `size`, and a query sees the keys of its own; else the
    first `size` tokens are seen by all and see all.  Intervals that follow from numbers alone."""

    size: int
    chunks: bool

    def __str__(self) -> str:
        return f"{'chunks' if self.chunks else 'global_tokens'}({self.size})"

    @property
    def form(self) -> tuple[Any, ...]:
        return self.size, self.chunks

    @property
    def held(self) -> tuple[str, ...]:
        return ()

    def vectors(self, Sq: int, Sk: int, device: Any) -> tuple[Tensor, Tensor]:
        key = torch.arange(Sk, dtype=torch.int32, device=device)
        behind = Sk - Sq  # a query's row is its position less this
        if self.chunks:
            begin = key - key % self.size
            begin, end = begin - behind, begin + self.size - behind
        else:
            begin = torch.where(key < self.size, 0, -behind).to(key.dtype)
            end = torch.where(key < self.size, ALWAYS, self.size - behind).to(key.dtype)
        return begin[None, None], end[None, None]


Part = Intervals | Lengths | Blocks


class Places(NamedTuple):
    """Pairs of queries and keys to be looked at: batch entries b [B, 1, 1, 1], heads h [1, H, 1, 1],
    queries i [1, 1, n, 1] by their rows and keys j [1, 1, 1, m], which are those of `queries` and
    `keys`, of Sq and Sk."""

    b: Tensor
    h: Tensor
    i: Tensor
    j: Tensor
    queries: slice
    keys: slice
    Sq: int
    Sk: int


def places(
    Sq: int,
    Sk: int,
    device: Any,
    B: int = 1,
    H: int = 1,
    queries: slice | None = None,
    keys: slice | None = None,
) -> Places:
    """All, or those of slices with a start and a stop."""
    queries, keys = queries or slice(0, Sq), keys or slice(0, Sk)
    b, h = torch.arange(B, device=device), torch.arange(H, device=device)
    i, j = (torch.arange(x.start, x.stop, device=device) for x in (queries, keys))
    at = b[:, None, None, None], h[None, :, None, None], i[None, None, :, None], j[None, None, None]
    return Places(*at, queries, keys, Sq, Sk)


@dataclass(frozen=True, eq=False)
class Rule:
    """Which pairs see each other where neither a band nor intervals say it.

    seen(places): boolean, of a shape that broadcasts to [B, H, n, m].
    tensors: what it reads, beside what a user's function does.  dense: the tensor that it is.
    queries, keys: for how many it was made, None if for any number.
    """

    words: str
    seen: Callable[[Places], Tensor]
    tensors: tuple[Tensor, ...] = ()
    dense: Tensor | None = None
    queries: int | None = None
    keys: int | None = None
    masks: tuple[Mask, ...] = ()

    def __str__(self) -> str:
        return self.words

    @property
    def form(self) -> Any:
        """For the call cache: what rules of tensors have in common; of others itself, which has no
        place there."""
        return self if self.dense is None else ("boolean", self.dense.ndim)

    def check(self, operator: str, Sq: int, Sk: int) -> None:
        """That it is for Sq queries and Sk keys."""
        do = "Make it for these lengths."
        if self.queries is not None and self.queries != Sq:
            got = f"{self.words}, of {self.queries} queries"
            refuse(operator, "mask", got, lambda: f"one of {Sq} queries", do)
        if self.keys is not None and self.keys != Sk:
            got = f"{self.words}, of {self.keys} keys"
            refuse(operator, "mask", got, lambda: f"one of {Sk} keys", do)
        for mask in self.masks:
            mask.check(operator, Sq, Sk)

    def visible(self, at: Places) -> Tensor:
        """[B | 1, H | 1, n, m]."""
        seen = self.seen(at)
        shape = torch.broadcast_shapes(seen.shape, (1, 1, at.i.shape[-2], at.j.shape[-1]))
        return seen.expand(shape)


def rule_of_tensor(x: Tensor) -> Rule:
    """Of a boolean tensor that broadcasts to [B, Hq, Sq, Sk]."""
    queries, keys = (None if n == 1 else n for n in (*(1,) * (2 - x.ndim), *x.shape[-2:]))
    words = f"boolean({described(x)})"
    return Rule(words, functools.partial(of_tensor, x), (x,), x, queries, keys)


def of_tensor(x: Tensor, at: Places) -> Tensor:
    x = x[(None,) * (4 - x.ndim)]
    queries = at.queries if x.shape[2] > 1 else slice(None)
    return x[:, :, queries, at.keys if x.shape[3] > 1 else slice(None)]


def joined_rule(words: str, function: Callable[..., Tensor], *masks: Mask) -> Rule:
    """function(*seen) of what masks let see."""
    tensors = tuple(x for mask in masks for x in mask.all_tensors)
    return Rule(words, functools.partial(of_masks, function, masks), tensors, masks=masks)


def of_masks(function: Callable[..., Tensor], masks: tuple[Mask, ...], at: Places) -> Tensor:
    seen = [mask.seen(at) for mask in masks]
    for x in seen[1:]:
        check_together("masks", seen[0], x)
    return function(*seen)


class Diagonals(NamedTuple):
    """The bands of a mask for given lengths: j <= i + high, and j >= i + low or j < first."""

    high: int | None
    low: int | None
    first: int


class Mask:
    """What a query may see; see the functions of this module, which make masks.

    `a & b`: what both let it see; `a | b`: what one of them does; `~a`: what a does not.  A mask is
    neither true nor false (TypeError).  print(mask): what it is, and the share of tiles that it visits.

    Example:
        >>> masks.causal() & masks.window(1023)
        causal() & window(1023, 0)
    """

    __slots__ = ("__weakref__", "bands", "form", "parts", "rule", "tensors")

    def __init__(
        self,
        bands: tuple[Band, ...] = (),
        parts: tuple[Part, ...] = (),
        rule: Rule | None = None,
    ) -> None:
        self.bands = bands
        self.parts = parts
        self.rule = rule
        # For the call cache: all but its tensors, and these.
        self.form = bands, *[part.form for part in parts], *([] if rule is None else [rule.form])
        held = [getattr(part, name) for part in parts for name in part.held]
        self.tensors = (*held, *([] if rule is None or rule.dense is None else [rule.dense]))

    @property
    def all_tensors(self) -> tuple[Tensor, ...]:
        """`tensors`, and those that a rule of masks reads."""
        return self.tensors if self.rule is None else (*self.tensors, *self.rule.tensors)

    def __and__(self, other: Mask) -> Mask:
        self._check(other, "&")
        rule = self.rule if other.rule is None else other.rule
        if self.rule is not None and other.rule is not None:
            both = [Mask(rule=x) for x in (self.rule, other.rule)]
            rule = joined_rule(f"{self.rule} & {other.rule}", torch.logical_and, *both)
        return Mask(self.bands + other.bands, self.parts + other.parts, rule)

    def __or__(self, other: Mask) -> Mask:
        self._check(other, "|")
        if not self.conditions or not other.conditions:
            return Mask()
        if (band := wider(self, other)) is not None:
            return Mask((band,))
        words = f"({self._within()} | {other._within()})"
        return Mask(rule=joined_rule(words, torch.logical_or, self, other))

    def __invert__(self) -> Mask:
        if (band := self._side()) is not None:
            left = None if band.right is None else -band.right - 1
            right = None if band.left is None else -band.left - 1
            return Mask((Band(left, right, 0, band.top_left),))
        return Mask(rule=joined_rule(f"~{self._within()}", torch.logical_not, self))

    __rand__ = __and__
    __ror__ = __or__

    @property
    def conditions(self) -> int:
        """How many masks it is the & of."""
        return len(self.bands) + len(self.parts) + (self.rule is not None)

    def _check(self, other: object, sign: str) -> None:
        if not isinstance(other, Mask):
            name, takes = f"the other side of {self!r} {sign}", "a mask of flashproto.masks"
            refuse(
                "masks", name, described(other), takes, "Pass masks.boolean(x) of a tensor.", TypeError
            )

    def _within(self) -> str:
        if is_compiling():  # which puts no such text together
            return "..."
        return repr(self) if self.conditions == 1 else f"({self!r})"

    def _side(self) -> Band | None:
        """The band that it is, bounded on one side."""
        band = self.bands[0] if self.bands and self.conditions == 1 else None
        if band is None or band.first or (band.left is None) == (band.right is None):
            return None
        return band

    def __bool__(self) -> bool:
        takes, do = "&, | and ~", "Write a & b for `a and b`, `mask is None` for `not mask`."
        refuse("masks", repr(self), "used as true or false", takes, do, TypeError)

    def __xor__(self, other: object) -> NoReturn:
        """Refuse ^, and say what to write in its place."""
        do = "Write (a | b) & ~(a & b) for `a ^ b`."
        refuse("masks", repr(self), "used with ^", "&, | and ~", do, TypeError)

    __rxor__ = __xor__

    def __repr__(self) -> str:
        rule = () if self.rule is None else (self.rule,)
        return " & ".join(map(str, (*self.bands, *self.parts, *rule))) or "everything"

    def __str__(self) -> str:
        Sq, Sk, known = self._lengths()
        try:
            share = f"visits {self.share(Sq, Sk):.1%} of the tiles of {TILE} x {TILE}"
        except (ValueError, RuntimeError) as error:  # parts that do not go together, or have no values
            return f"{self!r}: {error}"
        return f"{self!r}: {share}, {'' if known else 'say '}of {Sq} queries and {Sk} keys"

    def _lengths(self) -> tuple[int, int, bool]:
        made_for = [x for x in self.made_for() if any(n is not None for n in x)]
        if not made_for:
            return EXAMPLE, EXAMPLE, False
        Sq = next((n for n, _ in made_for if n is not None), None)
        Sk = next((n for _, n in made_for if n is not None), None)
        lengths = Sq if Sq is not None else Sk, Sk if Sk is not None else Sq
        return *lengths, True  # type: ignore[return-value]

    def made_for(self) -> list[tuple[int | None, int | None]]:
        """For how many queries and keys each of its conditions was made, None if for any number."""
        parts = [x for x in self.parts if isinstance(x, Intervals)]
        found: list[tuple[int | None, int | None]] = [(x.queries, x.begin.shape[-1]) for x in parts]
        if self.rule is not None:
            found += [(self.rule.queries, self.rule.keys)]
            found += [x for mask in self.rule.masks for x in mask.made_for()]
        return found

    # --- for given lengths; operator: whom errors name ---

    def diagonals(self, Sq: int, Sk: int, operator: str = "masks") -> Diagonals:
        """All bands as one."""
        return joined(operator, self.bands, Sk - Sq)

    def check(self, operator: str, Sq: int, Sk: int) -> None:
        """That it is for Sq queries and Sk keys."""
        for part in self.parts:
            check_lengths(operator, part, Sq, Sk)
        if self.rule is not None:
            self.rule.check(operator, Sq, Sk)

    def intervals(
        self, Sq: int, Sk: int, operator: str = "masks", device: Any = None
    ) -> tuple[Tensor, Tensor] | None:
        """(begin, end) of all parts, int32 [B | 1, H | 1, Sk]; None without one.  device: of those that
        no tensor of the mask says."""
        if device is None:
            device = next((x.device for x in self.all_tensors), None)
        found: tuple[Tensor, Tensor] | None = None
        for part in self.parts:
            check_lengths(operator, part, Sq, Sk)
            begin, end = part.vectors(Sq, Sk, device)
            if found is not None:
                check_together(operator, found[0], begin)
                begin, end = torch.maximum(begin, found[0]), torch.minimum(end, found[1])
            found = begin, end
        return found

    def is_intervals(self, Sq: int, Sk: int) -> bool:
        """Whether `tensors` are what `intervals` gives."""
        part = self.parts[0] if len(self.parts) == 1 else None
        if self.rule is not None or not isinstance(part, Intervals):
            return False
        return not part.by_position or Sq == Sk

    def computation(
        self, Sq: int, Sk: int, device: Any = None
    ) -> Callable[[Sequence[Tensor]], tuple[Tensor, Tensor]]:
        """intervals(Sq, Sk) as a function of `tensors`, of which it keeps none."""
        parts: Any = self.parts
        bare = [part._replace(**dict.fromkeys(part.held)) for part in parts]

        def computed(tensors: Sequence[Tensor]) -> Any:
            rest = iter(tensors)
            parts = [part._replace(**{name: next(rest) for name in part.held}) for part in bare]
            return Mask(parts=tuple(parts)).intervals(Sq, Sk, device=device)

        return computed

    def visible(self, Sq: int, Sk: int, rows: range | None = None) -> Tensor:
        """Boolean, True where query i sees key j: [Sq, Sk], or [B | 1, H | 1, Sq, Sk] of what is no
        band; to look at, and for small tests.  rows: these queries alone.  A function is asked for
        batch entry 0 and head 0.  ValueError, TypeError: lengths that are no numbers of tokens, or not
        the mask's."""
        for name, n in (("Sq", Sq), ("Sk", Sk)):
            check_integer("Mask.visible", name, n, 0, ALWAYS, "an integer from 0", "Pass 32, say.")
        self.check("masks", Sq, Sk)
        device = next((x.device for x in self.all_tensors), None)
        queries = None if rows is None else slice(rows.start, rows.stop)
        seen = self.seen(places(Sq, Sk, device, queries=queries))
        return seen if self.parts or self.rule is not None else seen[0, 0]

    def seen(self, at: Places) -> Tensor:
        """Which of these pairs see each other, [B | 1, H | 1, n, m]."""
        high, low, first = self.diagonals(at.Sq, at.Sk)
        i, j = at.i, at.j
        seen = (i >= 0) & (j >= 0)
        if high is not None:
            seen = seen & (j <= i + high)
        if low is not None:
            seen = seen & ((j >= i + low) | (j < first))
        found = self.intervals(at.Sq, at.Sk, device=j.device)
        if found is not None:
            begin, end = (x[..., None, at.keys] for x in found)
            seen = seen & (begin <= i) & (i < end)
        if self.rule is None:
            return seen
        by_rule = self.rule.visible(at)
        check_together("masks", seen, by_rule)
        return seen & by_rule

    def share(self, Sq: int, Sk: int, tile: int = TILE) -> float:
        """The share of tiles of tile x tile pairs in which a query sees a key."""
        seen = total = 0
        for start in range(0, Sq, tile):
            keys = self.visible(Sq, Sk, range(start, min(start + tile, Sq))).any(-2)
            met = torch.nn.functional.pad(keys, (0, -Sk % tile)).unflatten(-1, (-1, tile)).any(-1)
            seen += int(met.sum())
            total += met.numel()
        return seen / max(total, 1)


def wider(a: Mask, b: Mask) -> Band | None:
    """a | b, where both are bands that are bounded on the same side."""
    one, other = a._side(), b._side()
    if one is None or other is None or one.top_left != other.top_left:
        return None
    if one.left is not None and other.left is not None:
        return one._replace(left=max(one.left, other.left))
    if one.right is not None and other.right is not None:
        return one._replace(right=max(one.right, other.right))
    return None


def check_lengths(operator: str, part: Part, Sq: int, Sk: int) -> None:
    """A part of a mask for Sq queries and Sk keys."""
    if not isinstance(part, Intervals):
        return
    if part.begin.shape[-1] != Sk:
        got = f"{part.words}, of {part.begin.shape[-1]} keys"
        refuse(operator, "mask", got, lambda: f"one of {Sk} keys", "Make it for these keys.")
    if part.queries is not None and part.queries != Sq:
        got = f"{part.words}, of {part.queries} queries"
        do = "Pass documents(ids, ids_k) for queries that are not the keys' tokens."
        refuse(operator, "mask", got, lambda: f"one of {Sq} queries", do)


def check_together(operator: str, x: Tensor, y: Tensor) -> None:
    """Vectors [B | 1, H | 1, Sk] of two parts of a mask: of the same batch and heads, on one device."""
    pairs = zip(x.shape[:2], y.shape[:2], strict=True)
    if x.device != y.device or any(a != b and a != 1 and b != 1 for a, b in pairs):
        refuse(
            operator,
            "mask",
            " and ".join(f"{len(z)} batch entries, {z.shape[1]} heads on {z.device}" for z in (x, y)),
            "masks for the same batch entries and heads, or 1, on one device",
            "Expand or move what they are made of.",
        )


def joined(operator: str, bands: tuple[Band, ...], diagonal: Any) -> Diagonals:
    """The & of bands; diagonal: Sk - Sq."""
    high = None
    lows = []
    for band in bands:
        at = 0 if band.top_left else diagonal
        if band.right is not None:
            other = at + band.right
            high = other if high is None else min(high, other)
        if band.left is not None:
            lows.append((at - band.left, band.first))
    if not lows:
        return Diagonals(high, None, 0)
    low = max([x for x, _ in lows])
    first = min([n for x, n in lows if x == low])
    least = min([n for _, n in lows])
    if least < first:
        refuse(
            operator,
            "mask",
            f"& of windows, the narrower with first={first}",
            f"at most the {least} of the wider one",
            "Give both windows the same first.",
        )
    return Diagonals(high, low, first)
