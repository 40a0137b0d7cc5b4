"""Progress bars, of all scripts the same: on standard output, seldom where that is no terminal."""

from __future__ import annotations

import contextlib
import logging
import sys
import warnings
from collections.abc import Iterator
from typing import Any

from tqdm import tqdm
from tqdm.contrib.logging import logging_redirect_tqdm


def bar(quick: float = 0.0, **how: Any) -> tqdm:
    """tqdm(**how); one that ends within `quick` seconds is not shown."""
    terminal = sys.stdout.isatty()
    times = {"mininterval": 0.5 if terminal else 10.0}
    if quick:
        times["delay"] = quick if terminal else 10.0
    return tqdm(file=sys.stdout, dynamic_ncols=True, **times, **how)


@contextlib.contextmanager
def messages_above_the_bar() -> Iterator[None]:
    """Warnings, and what torch logs, are lines of their own on standard error, above a bar that goes on
    below them."""

    def show(message: Warning | str, category: type[Warning], *_: object, **__: object) -> None:
        tqdm.write(f"{category.__name__}: {message}", file=sys.stderr)

    # The value before comes back: catch_warnings would also reset which warnings have been shown.
    before, warnings.showwarning = warnings.showwarning, show
    try:
        with logging_redirect_tqdm([logging.getLogger(), logging.getLogger("torch")]):
            yield
    finally:
        warnings.showwarning = before
