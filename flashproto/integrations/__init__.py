"""Doors: flashproto in libraries that people use already, and rollouts as trees; docs/doors.md.

Each is imported by its own name, as `import flashproto.integrations.flash_attn`, or on first use.
"""

import importlib
from typing import Any

_ON_FIRST_USE = (
    "flash_attn",
    "flash_attn_4",
    "flex_attention",
    "kernels_hub",
    "torch",
    "transformers",
    "trees",
)


def __getattr__(name: str) -> Any:
    if name not in _ON_FIRST_USE:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    try:
        return importlib.import_module(f".{name}", __name__)
    except ModuleNotFoundError as error:  # so that hasattr and dir can be asked
        raise AttributeError(f"{__name__}.{name} needs {error.name}, which is not installed") from error


def __dir__() -> list[str]:
    return sorted({*globals(), *_ON_FIRST_USE})
