"""What transformers' mask functions say, as a band around the diagonal and intervals of queries.

A mask function f(batch, head, query, key) says whether a query sees a key.  transformers puts it
together from closures, which torch.compile cannot look into.  But it can call them: with objects in
place of the indices, which write down what they are compared with.  In every mask that transformers
makes itself the queries that see one key are an interval.  What else a function asks of its indices is
Unreadable.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NoReturn

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

FAR = 2**30  # more than there are tokens


class Unreadable(AttributeError):
    """A mask function that is no band and no intervals.  hasattr(index, ..) is False by it."""


class Recorder:
    """What is asked of it, and is nothing that it knows, makes its mask function Unreadable."""

    def __getattr__(self, name: str) -> NoReturn:
        raise Unreadable(name)

    def unknown(self, *others: Any) -> Any:
        raise Unreadable("an operator")

    __bool__ = __abs__ = __neg__ = __invert__ = unknown
    __lt__ = __le__ = __eq__ = __ne__ = __ge__ = __gt__ = unknown
    __and__ = __rand__ = __or__ = __ror__ = __xor__ = __rxor__ = unknown
    __add__ = __radd__ = __sub__ = __rsub__ = __mul__ = __rmul__ = unknown
    __floordiv__ = __rfloordiv__ = __truediv__ = __rtruediv__ = __mod__ = __rmod__ = unknown


# --- indices ----------------------------------------------------------------------------------------


class Batch(Recorder):
    """In place of the batch index and the head index."""


class ByBatch(Recorder):
    """A number for each batch entry, table[batch], with table [B]."""

    def __init__(self, table: Tensor) -> None:
        self.table = table


class Index(Recorder):
    """A number for each query or key: its token's own number, or table[batch, token].

    shift: is added.  less [B]: is taken off.  size: the number is divided by it and rounded down.
    """

    def __init__(
        self,
        of_keys: bool,
        table: Tensor | None = None,
        shift: int = 0,
        less: Tensor | None = None,
        size: int | None = None,
    ) -> None:
        self.of_keys, self.table, self.shift, self.less, self.size = of_keys, table, shift, less, size

    def is_bare(self) -> bool:
        """Whether it is a token's number or an entry, and nothing else."""
        return self.shift == 0 and self.less is None and self.size is None

    def looked_up(self, table: Tensor) -> Index | Seen:
        """table[batch, self]."""
        if self.table is not None or not self.is_bare():
            raise Unreadable("a table in a table")
        if table.dtype != torch.bool:
            return Index(self.of_keys, table)
        if not self.of_keys:
            raise Unreadable("padding of queries")
        return Seen((Listed(table),))

    def new_ones(self, *size: object, **options: object) -> Seen:
        return Seen(())

    def new_zeros(self, *size: object, **options: object) -> Seen:
        return Seen((Nothing(),))

    def __add__(self, other: Any) -> Index:
        if not is_whole(other) or self.size is not None:
            raise Unreadable("+")
        return Index(self.of_keys, self.table, self.shift + other, self.less)

    def __sub__(self, other: Any) -> Any:
        if isinstance(other, Index):
            return Distance(self, other)
        if not isinstance(other, ByBatch):
            return self + -other if is_whole(other) else self + other
        if self.less is not None or self.size is not None:
            raise Unreadable("-")
        return Index(self.of_keys, self.table, self.shift, other.table)

    def __floordiv__(self, size: Any) -> Index:
        if not is_whole(size) or self.size is not None or self.shift != 0:
            raise Unreadable("//")
        return Index(self.of_keys, self.table, 0, self.less, size)

    def __le__(self, other: Any) -> Seen:
        return Distance(self, other) <= 0

    def __lt__(self, other: Any) -> Seen:
        return Distance(self, other) <= -1

    def __ge__(self, other: Any) -> Seen:
        if is_whole(other) and other == 0 and self.is_bare():
            return Seen(()) if self.table is None else Seen((NotNegative(self.table),))
        return Distance(other, self) <= 0

    def __gt__(self, other: Any) -> Seen:
        return Distance(other, self) <= -1

    def __eq__(self, other: Any) -> Seen:  # type: ignore[override]
        if not isinstance(other, Index) or self.of_keys is other.of_keys:
            raise Unreadable("==")
        if self.table is not other.table or self.less is not other.less or self.size != other.size:
            raise Unreadable("==")
        if self.shift != 0 or other.shift != 0:
            raise Unreadable("==")
        if self.size is not None:
            return Seen((Chunk(self.table, self.less, self.size),), moved=self.table is not None)
        if self.table is None or self.less is not None:
            raise Unreadable("==")
        return Seen((Together(self.table),), packed=True)


class Distance(Recorder):
    """One index less another one, both in the same measure."""

    def __init__(self, of: Any, to: Any) -> None:
        if not isinstance(of, Index) or not isinstance(to, Index) or of.of_keys is to.of_keys:
            raise Unreadable("a distance")
        if of.table is not to.table or of.size is not None or to.size is not None:
            raise Unreadable("a distance")
        if of.less is not None or to.less is not None:
            raise Unreadable("a distance")
        self.of, self.to = of, to

    def __abs__(self) -> Length:
        return Length(self)

    def __le__(self, most: Any) -> Seen:
        """of - to <= most."""
        if not is_whole(most):
            raise Unreadable("<=")
        bound = most + self.to.shift - self.of.shift
        moved = self.of.table is not None
        return Seen((Reach(None, bound) if self.of.of_keys else Reach(bound, None),), moved=moved)

    def __lt__(self, more: Any) -> Seen:
        return self <= (more - 1 if is_whole(more) else more)

    def __ge__(self, least: Any) -> Seen:
        return Distance(self.to, self.of) <= (-least if is_whole(least) else least)

    def __gt__(self, less: Any) -> Seen:
        return Distance(self.to, self.of) <= (-less - 1 if is_whole(less) else less)


class Length(Recorder):
    """abs() of a distance."""

    def __init__(self, distance: Distance) -> None:
        self.distance = distance

    def __le__(self, most: Any) -> Seen:
        return (self.distance <= most) & (Distance(self.distance.to, self.distance.of) <= most)

    def __lt__(self, more: Any) -> Seen:
        return self <= (more - 1 if is_whole(more) else more)


def is_whole(x: object) -> bool:
    return isinstance(x, (int, torch.SymInt)) and not isinstance(x, bool)


class Tables(TorchFunctionMode):
    """While it is on, a tensor may be indexed by Batch and Index."""

    def __torch_function__(
        self, function: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if function is Tensor.__getitem__:
            table, at = args
            if isinstance(at, Batch):
                return ByBatch(table)
            if isinstance(at, tuple) and len(at) == 2 and isinstance(at[1], Index):
                return at[1].looked_up(table)
        for x in args:
            if isinstance(x, Recorder):
                raise Unreadable("an operator of torch")
        return function(*args, **(kwargs or {}))


# --- what queries see: parts that all have to hold ----------------------------------------------------

Span = tuple[
    Tensor, Tensor
]  # the first query that sees a key, and the one behind the last: [B | 1, Sk]


class Part:
    def span(self, keys: Keys) -> Span:
        raise NotImplementedError


class Keys:
    """The keys of a mask: their tokens' numbers, int64 [1, Sk], from `offset` on."""

    def __init__(self, offset: int, length: int, device: Any) -> None:
        self.offset, self.length = offset, length
        self.tokens = torch.arange(length, device=device)[None] + offset

    def of(self, table: Tensor) -> Tensor:
        """The keys' entries of a table [B, tokens]."""
        return table.to(self.tokens.device)[:, self.offset : self.offset + self.length]

    def all_or_none(self, seen: Tensor) -> Span:
        """Keys that all queries see, or none does."""
        return torch.where(seen, -FAR, FAR), torch.where(seen, FAR, -FAR)


class Reach(Part):
    """Query i sees the keys from i - left to i + right; None for no bound."""

    def __init__(self, left: int | None, right: int | None) -> None:
        self.left, self.right = left, right

    def span(self, keys: Keys) -> Span:
        far = torch.full_like(keys.tokens, FAR)
        low = -far if self.right is None else keys.tokens - self.right
        return low, far if self.left is None else keys.tokens + self.left + 1


class Together(Part):
    """A query sees the keys with the same number in a table: a run of tokens."""

    def __init__(self, table: Tensor) -> None:
        self.table = table

    def span(self, keys: Keys) -> Span:
        table = self.table.to(keys.tokens.device)
        runs = (table != table.roll(1, -1)).cumsum(-1)  # from 0 or from 1 on
        own = keys.of(runs).contiguous()
        return torch.searchsorted(runs, own), torch.searchsorted(runs, own, right=True)

    def check(self, least: int) -> None:
        """No number, of `least` or more, has several runs: tokens of two would see each other."""
        runs, distinct = (
            ((x.diff(prepend=x[:, :1] - 1) != 0) & (x >= least)).sum(-1)
            for x in (self.table, self.table.sort(-1).values)
        )
        demand((runs == distinct).all(), "a number with several runs")


class NotNegative(Part):
    """Beside Together with the same table: of tokens with no number of their own, -1, none is seen."""

    def __init__(self, table: Tensor) -> None:
        self.table = table

    def span(self, keys: Keys) -> Span:
        return keys.all_or_none(keys.of(self.table) >= 0)


class Chunk(Part):
    """A query sees the keys of its own chunk of `size` positions, counted from `less` on."""

    def __init__(self, table: Tensor | None, less: Tensor | None, size: int) -> None:
        self.table, self.less, self.size = table, less, size

    def span(self, keys: Keys) -> Span:
        position = keys.tokens if self.table is None else keys.of(self.table).long()
        first = 0 if self.less is None else self.less.to(position.device).long()[:, None]
        begin = torch.div(position - first, self.size, rounding_mode="floor") * self.size + first
        begin = begin - position + keys.tokens
        return begin, begin + self.size


class Listed(Part):
    """All queries see the keys that are True in a table."""

    def __init__(self, table: Tensor) -> None:
        self.table = table

    def span(self, keys: Keys) -> Span:
        return keys.all_or_none(keys.of(self.table))


class Nothing(Part):
    def span(self, keys: Keys) -> Span:
        return torch.full_like(keys.tokens, FAR), torch.full_like(keys.tokens, -FAR)


class Either(Part):
    """What one or the other says.  Both let a key be seen by its own query or by none: so the two
    intervals meet, or one is empty."""

    def __init__(self, one: Seen, other: Seen) -> None:
        self.both = one, other
        for seen in self.both:
            for part in seen.parts:
                if isinstance(part, Reach) and min(part.left or 0, part.right or 0) < 0:
                    raise Unreadable("|")

    def span(self, keys: Keys) -> Span:
        (low, high), (begin, end) = (seen.span(keys) for seen in self.both)
        empty, none = high <= low, end <= begin
        low, high = torch.where(empty, begin, low), torch.where(empty, end, high)
        begin, end = torch.where(none, low, begin), torch.where(none, high, end)
        return torch.minimum(low, begin), torch.maximum(high, end)


class Seen(Recorder):
    """What a mask function gives: all its parts hold.

    moved: a part of it compares positions out of a table, which are tokens' only within documents with
    positions one behind the other.  packed: documents are kept apart.
    """

    device = None

    def __init__(self, parts: tuple[Part, ...], moved: bool = False, packed: bool = False) -> None:
        self.parts, self.moved, self.packed = parts, moved, packed

    def to(self, device: object) -> Seen:
        return self

    def __and__(self, other: Any) -> Seen:
        if not isinstance(other, Seen):
            raise Unreadable("&")
        moved, packed = self.moved or other.moved, self.packed or other.packed
        return Seen(self.parts + other.parts, moved, packed)

    def __or__(self, other: Any) -> Seen:
        if not isinstance(other, Seen):
            raise Unreadable("|")
        if len(self.parts) == 1 and isinstance(self.parts[0], Nothing):
            return other
        return Seen((Either(self, other),), self.moved or other.moved, self.packed and other.packed)

    def span(self, keys: Keys, bands: bool = True) -> Span:
        """bands: with parts that are bands."""
        low, high = torch.full_like(keys.tokens, -FAR), torch.full_like(keys.tokens, FAR)
        tables = [part.table for part in self.parts if isinstance(part, NotNegative)]
        for part in self.parts:
            if isinstance(part, Together):
                hides = [table for table in tables if table is part.table]
                part.check(0 if hides else -FAR)
                tables = [table for table in tables if table is not part.table]
        if tables:
            raise Unreadable(">=")
        for part in self.parts:
            if bands or not isinstance(part, Reach):
                begin, end = part.span(keys)
                low, high = torch.maximum(low, begin), torch.minimum(high, end)
        return low, high

    def bands(self) -> list[Reach]:
        return [part for part in self.parts if isinstance(part, Reach)]

    def band(self) -> tuple[int | None, int | None] | None:
        """(left, right) of its bands, None for no bound; None where they hide their own diagonal."""
        left = right = None
        for part in self.bands():
            if part.left is not None:
                left = part.left if left is None else min(left, part.left)
            if part.right is not None:
                right = part.right if right is None else min(right, part.right)
        if (left is not None and left < 0) or (right is not None and right < 0):
            return None
        return left, right

    def is_band(self) -> bool:
        return len(self.bands()) == len(self.parts)


def read(function: Callable[..., Any]) -> Seen:
    """What a mask function says; Unreadable where it is no band and no intervals."""
    batch = Batch()
    with Tables():
        seen = function(batch, batch, Index(False), Index(True))
    if not isinstance(seen, Seen) or (seen.moved and not seen.packed):
        raise Unreadable("what it gives")
    return seen


def demand(fact: Tensor, what: str) -> None:
    """Unreadable where it can be told that it is not so; under torch.compile the device tells."""
    if torch.compiler.is_compiling():
        torch._assert_async(fact, f"flashproto: a mask function is no interval: {what}")
    elif not bool(fact):
        raise Unreadable(what)
