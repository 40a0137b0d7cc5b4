"""What a mask is: a band around the diagonal, which is a few numbers, and for each key the interval of
queries that may see it, which is two vectors; made by the functions of masks.py."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, NoReturn

import torch
from torch import Tensor

from .checks import check_integer, described, refuse

ALWAYS = 2**31 - 1  # the end of an interval behind all queries
MOST_TABLES = 64  # of one mask: for each length, window, tile shape and stream
TILE = 128  # for the share of tiles that a mask visits
EXAMPLE = 4096  # the length for which a mask without one says that share


class Band(NamedTuple):
    """Keys from position - left to position + right, None for no bound, and the first keys as far as
    `right` lets them be seen.  top_left: query i stands at position i."""

    left: int | None
    right: int | None
    first: int
    top_left: bool

    def __str__(self) -> str:
        if self == Band(None, 0, 0, self.top_left):
            return "causal(top_left=True)" if self.top_left else "causal()"
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

    def vectors(self, Sq: int, Sk: int) -> tuple[Tensor, Tensor]:
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

    def vectors(self, Sq: int, Sk: int) -> tuple[Tensor, Tensor]:
        key = torch.arange(Sk, dtype=torch.int32, device=self.lengths.device)
        early = key < self.lengths[..., None]
        zero = torch.zeros_like(key)
        if self.prefix:
            begin = torch.where(early, zero, key - (Sk - Sq))
            return begin, torch.full_like(begin, ALWAYS)
        return zero.expand(early.shape), torch.where(early, ALWAYS, zero)


class Diagonals(NamedTuple):
    """The bands of a mask for given lengths: j <= i + high, and j >= i + low or j < first."""

    high: int | None
    low: int | None
    first: int


class Mask:
    """What a query may see; see the functions of this module, which make masks.

    `a & b`: what both let it see; there is no `|`, `^` and `~`, and a mask is neither true nor false
    (TypeError).  print(mask): what it is, and the share of tiles that it visits.

    Example:
        >>> masks.causal() & masks.window(1023)
        causal() & window(1023, 0)
    """

    __slots__ = ("__weakref__", "bands", "form", "parts", "tensors")

    def __init__(
        self, bands: tuple[Band, ...] = (), parts: tuple[Intervals | Lengths, ...] = ()
    ) -> None:
        self.bands = bands
        self.parts = parts
        # For the call cache: all but its tensors, and these.
        self.form = bands, *[part.form for part in parts]
        self.tensors = tuple([getattr(part, name) for part in parts for name in part.held])

    def __and__(self, other: Mask) -> Mask:
        if not isinstance(other, Mask):
            name, takes = f"the other side of {self!r} &", "a mask of flashproto.masks"
            do = "A boolean tensor is scaled_dot_product_attention's attn_mask."
            refuse("masks", name, described(other), takes, do, TypeError)
        return Mask(self.bands + other.bands, self.parts + other.parts)

    __rand__ = __and__

    def __bool__(self) -> bool:
        takes, do = "&, which joins masks", "Write a & b for `a and b`, `mask is None` for `not mask`."
        refuse("masks", repr(self), "used as true or false", takes, do, TypeError)

    def __or__(self, other: object = None) -> NoReturn:
        """Refuse |, ^ and ~, and say which masks there are in their place."""
        refuse(
            "masks",
            repr(self),
            "used with |, ^ or ~",
            "&, which lets a query see what both masks let it see",
            "masks.window(left, first=n) keeps the first keys beside a window, masks.prefix beside"
            " causal(); masks.intervals(begin, end) takes others.",
            TypeError,
        )

    __ror__ = __xor__ = __rxor__ = __invert__ = __or__

    def __repr__(self) -> str:
        return " & ".join(map(str, (*self.bands, *self.parts))) or "everything"

    def __str__(self) -> str:
        Sq, Sk, known = self._lengths()
        try:
            share = f"visits {self.share(Sq, Sk):.1%} of the tiles of {TILE} x {TILE}"
        except (ValueError, RuntimeError) as error:  # parts that do not go together, or have no values
            return f"{self!r}: {error}"
        return f"{self!r}: {share}, {'' if known else 'say '}of {Sq} queries and {Sk} keys"

    def _lengths(self) -> tuple[int, int, bool]:
        parts = [part for part in self.parts if isinstance(part, Intervals)]
        if not parts:
            return EXAMPLE, EXAMPLE, False
        Sk = parts[0].begin.shape[-1]
        return next((x.queries for x in parts if x.queries is not None), Sk), Sk, True

    # --- for given lengths; operator: whom errors name ---

    def diagonals(self, Sq: int, Sk: int, operator: str = "masks") -> Diagonals:
        """All bands as one."""
        return joined(operator, self.bands, Sk - Sq)

    def intervals(self, Sq: int, Sk: int, operator: str = "masks") -> tuple[Tensor, Tensor] | None:
        """(begin, end) of all parts, int32 [B | 1, H | 1, Sk]; None without one."""
        found: tuple[Tensor, Tensor] | None = None
        for part in self.parts:
            check_lengths(operator, part, Sq, Sk)
            begin, end = part.vectors(Sq, Sk)
            if found is not None:
                check_together(operator, found[0], begin)
                begin, end = torch.maximum(begin, found[0]), torch.minimum(end, found[1])
            found = begin, end
        return found

    def is_intervals(self, Sq: int, Sk: int) -> bool:
        """Whether `tensors` are what `intervals` gives."""
        part = self.parts[0] if len(self.parts) == 1 else None
        return isinstance(part, Intervals) and (not part.by_position or Sq == Sk)

    def computation(self, Sq: int, Sk: int) -> Callable[[Sequence[Tensor]], tuple[Tensor, Tensor]]:
        """intervals(Sq, Sk) as a function of `tensors`, of which it keeps none."""
        parts: Any = self.parts
        bare = [part._replace(**dict.fromkeys(part.held)) for part in parts]

        def computed(tensors: Sequence[Tensor]) -> Any:
            rest = iter(tensors)
            parts = [part._replace(**{name: next(rest) for name in part.held}) for part in bare]
            return Mask(parts=tuple(parts)).intervals(Sq, Sk)

        return computed

    def visible(self, Sq: int, Sk: int, rows: range | None = None) -> Tensor:
        """Boolean, True where query i sees key j: [Sq, Sk], or [B | 1, H | 1, Sq, Sk] with intervals;
        to look at, and for small tests.  rows: these queries alone.  ValueError, TypeError: lengths
        that are no numbers of tokens, or not the mask's."""
        for name, n in (("Sq", Sq), ("Sk", Sk)):
            check_integer("Mask.visible", name, n, 0, ALWAYS, "an integer from 0", "Pass 32, say.")
        high, low, first = self.diagonals(Sq, Sk)
        found = self.intervals(Sq, Sk)
        device = None if found is None else found[0].device
        rows = range(Sq) if rows is None else rows
        i = torch.arange(rows.start, rows.stop, device=device)[:, None]
        j = torch.arange(Sk, device=device)[None, :]
        seen = (i >= 0) & (j >= 0)
        if high is not None:
            seen = seen & (j <= i + high)
        if low is not None:
            seen = seen & ((j >= i + low) | (j < first))
        if found is not None:
            begin, end = found
            seen = seen & (begin[..., None, :] <= i) & (i < end[..., None, :])
        return seen

    def share(self, Sq: int, Sk: int, tile: int = TILE) -> float:
        """The share of tiles of tile x tile pairs in which a query sees a key."""
        seen = total = 0
        for start in range(0, Sq, tile):
            keys = self.visible(Sq, Sk, range(start, min(start + tile, Sq))).any(-2)
            met = torch.nn.functional.pad(keys, (0, -Sk % tile)).unflatten(-1, (-1, tile)).any(-1)
            seen += int(met.sum())
            total += met.numel()
        return seen / max(total, 1)


def check_lengths(operator: str, part: Intervals | Lengths, Sq: int, Sk: int) -> None:
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
            "& of masks for the same batch entries and heads, or 1, on one device",
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
