"""flashproto: fused attention, norms and softmax in Python alone (Triton and Gluon)."""

import importlib
from typing import TYPE_CHECKING, Any

from . import masks as masks
from .backends import BackendError
from .explain import explain
from .functional import *  # noqa: F403, the names that functional/__init__.py lists
from .functional import __all__ as _functions

if TYPE_CHECKING:
    from . import distributed as distributed
    from . import integrations as integrations
    from . import nn as nn

__version__ = "0.1.0"
__all__ = ["BackendError", "explain", *_functions]

_ON_FIRST_USE = "distributed", "integrations", "nn"


def __getattr__(name: str) -> Any:
    if name in _ON_FIRST_USE:
        return importlib.import_module(f".{name}", __name__)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *_ON_FIRST_USE})
