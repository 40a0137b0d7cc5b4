"""Gated linear units and GELU: the public functions."""

from __future__ import annotations

from torch import Tensor

from .. import backends, reference
from ..backends import float64_reasons
from ..checks.rows import check_approximate, check_glu
from .cached import cached

if backends.HAS_TRITON:
    from ..ops.glu import Settings
    from ..ops.glu import glu as glu_op


@cached
def swiglu(gate: Tensor, up: Tensor | None = None, *, impl: str | None = None) -> Tensor:
    """silu(gate) * up, one pass over memory each way.

    Args:
        gate: [..., N], any floating dtype and strides; or x [..., 2N], where up is None, whose first
            half is gate and whose second is up: read in place, and its gradient is one tensor.
        up: [..., N], of gate's shape and dtype, or None.
        impl: the backend by name; None chooses.

    Returns: y [..., N] in gate's dtype, computed in float32 (float64 for float64) and rounded once.
    Backward keeps gate and up alone and computes the activation again.
    Raises: TypeError, ValueError: an argument does not fit; BackendError: `impl` cannot run.
    Source: Shazeer, "GLU Variants Improve Transformer" (2020).

    Example:
        >>> gate, up = torch.randn(4, 32), torch.randn(4, 32)
        >>> y = flashproto.swiglu(gate, up)
        >>> torch.allclose(y, torch.nn.functional.silu(gate) * up, atol=1e-6)
        True
        >>> torch.equal(flashproto.swiglu(torch.cat((gate, up), -1)), y)
        True
    """
    return _glu("swiglu", gate, up, "silu", impl)


@cached
def geglu(
    gate: Tensor, up: Tensor | None = None, *, approximate: str = "none", impl: str | None = None
) -> Tensor:
    """gelu(gate) * up; approximate as in gelu, other arguments, result, errors and source as swiglu.

    Example:
        >>> gate, up = torch.randn(4, 32), torch.randn(4, 32)
        >>> y = flashproto.geglu(gate, up, approximate="tanh")
        >>> torch.allclose(y, torch.nn.functional.gelu(gate, approximate="tanh") * up, atol=1e-6)
        True
    """
    check_approximate("geglu", approximate)
    return _glu("geglu", gate, up, _gelu(approximate), impl)


@cached
def reglu(gate: Tensor, up: Tensor | None = None, *, impl: str | None = None) -> Tensor:
    """relu(gate) * up; arguments, result, errors and source as swiglu.

    Example:
        >>> flashproto.reglu(torch.tensor([-1.0, 2.0]), torch.tensor([3.0, 3.0]))
        tensor([0., 6.])
    """
    return _glu("reglu", gate, up, "relu", impl)


@cached
def gelu(x: Tensor, *, approximate: str = "none", impl: str | None = None) -> Tensor:
    """x Phi(x), Phi the normal distribution, as torch.nn.functional.gelu.

    Args:
        x: [...], any floating dtype and strides.
        approximate: "none", or "tanh" for x (1 + tanh(sqrt(2 / pi) (x + 0.044715 x^3))) / 2.
        impl: the backend by name; None chooses.

    Returns: [...] in x's shape and dtype, computed in float32 (float64 for float64), rounded once.
    Raises: TypeError, ValueError: an argument does not fit; BackendError: `impl` cannot run.
    Source: Hendrycks and Gimpel, "Gaussian Error Linear Units" (2016).

    Example:
        >>> x = torch.randn(4, 32)
        >>> torch.allclose(flashproto.gelu(x), torch.nn.functional.gelu(x), atol=1e-6)
        True
    """
    check_approximate("gelu", approximate)
    return _glu("gelu", x, None, _gelu(approximate), impl)


def _gelu(approximate: str) -> str:
    return "gelu_tanh" if approximate == "tanh" else "gelu"


def _glu(operator: str, gate: Tensor, up: Tensor | None, activation: str, impl: str | None) -> Tensor:
    halves = up is None and operator != "gelu"
    tensors = (gate,) if up is None else (gate, up)
    check_glu(operator, gate, up, halves=halves)
    backend = backends.choose(operator, impl, tensors, lambda b: float64_reasons(b, tensors))
    if backend == "triton":
        return glu_op.bind((gate, up), Settings(activation, halves))
    if halves:
        gate, up = gate.chunk(2, -1)
    if backend == "reference":
        return reference.glu(gate, up, activation)
    act = reference.ACTIVATIONS[activation](gate)
    return act if up is None else act * up
