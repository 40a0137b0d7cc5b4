"""What the eager autograd.Functions and the torch.library ops of the operators have in common."""

from __future__ import annotations

import functools
import sys
import warnings
from collections.abc import Callable
from typing import Any, ClassVar

import torch
from torch import _C, Tensor, is_grad_enabled
from torch._C import _are_functorch_transforms_active as transforms_active
from torch._C._functorch import unwrap_if_dead
from torch._library.autograd import make_autograd_impl
from torch._library.utils import get_layout_constraint_tag
from torch.autograd import forward_ad

NO_TANGENT = (
    "flashproto: the kernels have no forward-mode derivative (jvp); "
    "use impl='reference', which has one, or reverse mode"
)

# Before 2.13, Inductor writes down the arguments of an op that it meets for the first time, for a log
# that is seldom on (pytorch/pytorch#185937): all that they are computed from, and twice what is used
# twice.  Behind the twelve layers of a GPT that has no end.
WRITES_ARGUMENTS = tuple(map(int, torch.__version__.split(".")[:2])) < (2, 13)

DEVICES = _C.DispatchKey.CPU, _C.DispatchKey.CUDA


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


def kernel_op(
    name: str, function: Callable[..., Any], schema: str, mutates_args: tuple[str, ...] = ()
) -> torch.library.CustomOpDef:
    """torch.library.custom_op of a function that launches kernels, with two differences, if it changes
    no argument: the op raises on inputs that carry tangents, which torch.library would drop, and a
    call that `goes_straight` skips the second way through the dispatcher that torch.library takes to
    the function, and its Python: 10 of the 20 microseconds by which an op's call is longer than that.
    """
    op = torch.library.custom_op(name, function, mutates_args=mutates_args, schema=schema)
    if mutates_args:
        return op
    differentiate = make_autograd_impl(op._opoverload, op)

    def autograd(keyset, *args, **kwargs):
        if forward_ad._current_level >= 0 and any(map(_has_tangent, args)):
            raise NotImplementedError(NO_TANGENT)
        if goes_straight(keyset) and not (is_grad_enabled() and _C._any_requires_grad(*args)):
            return op._backend_fns[None](*args, **kwargs)
        return differentiate(keyset, *args, **kwargs)

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the override is meant
        op._lib.impl(op._name, autograd, "Autograd", with_keyset=True, allow_override=True)
    return op


def goes_straight(keyset: torch._C.DispatchKeySet) -> bool:
    """Whether behind autograd a call would come to the kernel of a device at once: nothing in between,
    as a mode, a subclass of Tensor, a transform of torch.func or a trace, wants to see it."""
    return (keyset & _C._after_ADInplaceOrView_keyset).highestPriorityTypeId() in DEVICES


def fake_of(op: torch.library.CustomOpDef) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Decorator: op.register_fake, of a fake that also tells Inductor of the op before it meets it."""

    def register(fake: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(fake)
        def telling(*args):
            if WRITES_ARGUMENTS:
                tell_inductor(op._opoverload)
            return fake(*args)

        return op.register_fake(telling)

    return register


def tell_inductor(op: torch._ops.OpOverload) -> None:
    """Make Inductor call the op as it does by itself once it has met it; nothing where it is not
    loaded, as it is by the time that AOTAutograd, before it, asks for fakes."""
    lowering: Any = sys.modules.get("torch._inductor.lowering")
    if lowering is not None and op not in lowering.lowerings:
        constraint = lowering.tag_to_layout_constraint(get_layout_constraint_tag(op))
        lowering.make_fallback(op, layout_constraint=constraint, warn=False)


def _has_tangent(x: object) -> bool:
    return isinstance(x, Tensor) and forward_ad.unpack_dual(x).tangent is not None


class KernelFunction(torch.autograd.Function):
    """Base of the Functions of eager calls.  forward takes no ctx, setup_context is separate, and there
    is no jvp, so that forward-mode differentiation raises.

    Calling `apply` costs what the call needs: torch's own binds the arguments to forward's signature at
    each call (15 microseconds), though no argument here is ever left out or named.
    """

    @classmethod
    def apply(cls, *args):
        if forward_ad._current_level >= 0 or transforms_active():
            return super().apply(*args)
        if is_grad_enabled():
            for x in args:
                if isinstance(x, Tensor) and x.requires_grad:
                    return cls._record(*args)
        return cls.forward(*args)

    _record: ClassVar[Callable[..., Any]]

    def __init_subclass__(cls) -> None:
        # What torch.autograd.Function.apply ends in where no transform of torch.func is active.
        cls._record = super(torch.autograd.Function, cls).apply  # type: ignore[misc]


def recorder(function: type[torch.autograd.Function]) -> Callable[..., Any]:
    """apply of a Function whose forward takes ctx, for where no transform of torch.func is active."""
    apply: Callable[..., Any] = super(torch.autograd.Function, function).apply  # type: ignore[misc]
    return apply


def wants_grad(*tensors: Tensor | None) -> bool:
    """Whether a call with these tensors is to be recorded."""
    if is_grad_enabled():
        for x in tensors:
            if x is not None and x.requires_grad:
                return True
    return False


def differentiates() -> bool:
    """Whether gradients may be differentiated themselves, or come from a transform of torch.func: then
    a backward goes through a FirstDerivative, else it may launch."""
    return is_grad_enabled() or transforms_active()


class FirstDerivative(KernelFunction):
    """Base of the Functions that launch backward kernels: differentiating once more raises.

    They are Functions, not plain launches, so that torch.func hands them plain tensors.
    """

    @classmethod
    def launch(cls, *args):
        """apply, for tensors saved where no transform of torch.func was active: the launch alone, where
        the gradients are plain too and nobody differentiates them."""
        return cls.apply(*args) if differentiates() else cls.forward(*args)

    @classmethod
    def apply(cls, *args):
        # A pullback of torch.func.vjp that is called late finds tensors of a transform that has ended.
        return super().apply(*[unwrap_if_dead(x) if isinstance(x, Tensor) else x for x in args])

    @staticmethod
    def setup_context(ctx, inputs, output):
        """Keeps nothing: there is no derivative.  torch wants it where forward has no ctx."""

    @staticmethod
    def backward(ctx, *grads):
        raise NotImplementedError("flashproto: the kernels have no second derivative")
