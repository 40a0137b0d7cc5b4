"""Progress bars, of all scripts the same: on standard output, seldom where that is no terminal."""

from __future__ import annotations

import sys
from typing import Any

from tqdm import tqdm


def bar(quick: float = 0.0, **how: Any) -> tqdm:
    """tqdm(**how); one that ends within `quick` seconds is not shown."""
    terminal = sys.stdout.isatty()
    times = {"mininterval": 0.5 if terminal else 10.0}
    if quick:
        times["delay"] = quick if terminal else 10.0
    return tqdm(file=sys.stdout, dynamic_ncols=True, **times, **how)
