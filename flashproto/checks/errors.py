"""The one form of errors about arguments: what was passed, what is accepted, one thing to do."""

from __future__ import annotations

import difflib
from collections.abc import Callable, Iterable, Sequence
from typing import NoReturn

import torch
from torch import Tensor


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


def nearest(name: object, names: Iterable[str]) -> str | None:
    """The one of `names` that may have been meant."""
    close = difflib.get_close_matches(name, list(names), 1) if isinstance(name, str) else []
    return close[0] if close else None


def shortened(words: str, length: int = 100) -> str:
    return words if len(words) <= length else f"{words[: length - 3]}..."
