"""flashproto: fused attention, norms and softmax in Python alone (Triton and Gluon)."""

from . import masks as masks
from .backends import BackendError
from .explain import explain
from .functional import *  # noqa: F403, the names that functional/__init__.py lists
from .functional import __all__ as _functions

__version__ = "0.1.0"
__all__ = ["BackendError", "explain", *_functions]
