"""`cached` of ops/call_cache.py; without triton there are no kernels, and nothing to be kept."""

from __future__ import annotations

from typing import Any

from .. import backends

if backends.HAS_TRITON:
    from ..ops.call_cache import cached
else:

    def cached(function: Any, *, alignment: bool = False) -> Any:  # type: ignore[misc]
        return function
