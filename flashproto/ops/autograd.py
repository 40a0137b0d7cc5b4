"""What the eager autograd.Functions and the torch.library ops of the operators have in common."""

from __future__ import annotations

import warnings

import torch
from torch._library.autograd import make_autograd_impl
from torch.autograd import forward_ad

NO_TANGENT = (
    "flashproto: the kernels have no forward-mode derivative (jvp); "
    "use impl='reference', which has one, or reverse mode"
)


def use_op() -> bool:
    """Whether a call goes through its torch.library op: while torch.compile traces it.

    Raises NotImplementedError when that happens under forward-mode differentiation (torch.func.jvp
    inside torch.compile): an op without a formula for tangents would return zeros without a word,
    where an autograd.Function raises.
    """
    if not torch.compiler.is_compiling():
        return False
    if forward_ad._current_level >= 0:
        raise NotImplementedError(NO_TANGENT)
    return True


def refuse_tangents(op: torch.library.CustomOpDef) -> None:
    """Make the op itself raise on inputs that carry tangents, however it is called; torch.library
    would drop them.  To be called after op.register_autograd."""
    differentiate = make_autograd_impl(op._opoverload, op)

    def autograd(keyset, *args, **kwargs):
        if forward_ad._current_level >= 0 and any(map(_has_tangent, args)):
            raise NotImplementedError(NO_TANGENT)
        return differentiate(keyset, *args, **kwargs)

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the override is meant
        op._lib.impl(op._name, autograd, "Autograd", with_keyset=True, allow_override=True)


def _has_tangent(x: object) -> bool:
    return isinstance(x, torch.Tensor) and forward_ad.unpack_dual(x).tangent is not None


class FirstDerivative(torch.autograd.Function):
    """Base of the Functions that launch backward kernels: differentiating once more raises.

    They are Functions, not plain launches, so that torch.func hands them plain tensors.
    """

    @staticmethod
    def setup_context(ctx, inputs, output):
        pass

    @staticmethod
    def backward(ctx, *grads):
        raise NotImplementedError("flashproto: the kernels have no second derivative")
