"""The layers that models are made of, and when a fusion may take their parameters."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.module import _has_any_global_hook


class Drawn(nn.Module):
    """A layer whose model says how its weight is drawn: reset_parameters draws it from normal(0, std)
    and sets a bias to 0; where std is None it does what torch's layer does."""

    std: float | None = None
    weight: Tensor

    @torch.no_grad()
    def reset_parameters(self, generator: torch.Generator | None = None) -> None:
        if self.std is None:
            super().reset_parameters()  # type: ignore[misc]  # of torch's layer
            return
        self.weight.normal_(0.0, self.std, generator=generator)
        bias = getattr(self, "bias", None)
        if bias is not None:
            bias.zero_()


class Linear(Drawn, nn.Linear):
    """torch.nn.Linear, see Drawn."""


class Embedding(Drawn, nn.Embedding):
    """torch.nn.Embedding, see Drawn."""


def is_plain(module: nn.Module, *kinds: type[nn.Module]) -> bool:
    """Whether `module` computes what its class says from parameters that lie there as they are.

    It is exactly of one of `kinds`: not an adapter, nor of a subclass, as fully_shard and
    parametrizations make one.  Its forward is its class's.  Its parameters are plain (or tensors, from
    functional_call), not DTensors or quantized, and weight is one of them, not made by a hook.
    """
    return "weight" in module._parameters and has_plain_call(module, *kinds)


def has_plain_call(module: nn.Module, *kinds: type[nn.Module]) -> bool:
    """is_plain of a module that need not have a weight, as of modules in it."""
    return (
        type(module) in kinds
        and "forward" not in module.__dict__
        and all(p is None or type(p) in (nn.Parameter, Tensor) for p in module._parameters.values())
    )


def is_as_made(module: nn.Module, *kinds: type[nn.Module]) -> bool:
    """Whether a fusion may stand in for a call of `module`: it is plain, nothing compiled it by itself,
    and no hook, its own or a global one, waits for the call."""
    return is_plain(module, *kinds) and is_unwatched(module)


def is_unwatched(module: nn.Module) -> bool:
    """Whether nothing compiled `module` by itself, and no hook waits for its call."""
    return not (
        module._forward_pre_hooks
        or module._forward_hooks
        or module._backward_pre_hooks
        or module._backward_hooks
        or module._compiled_call_impl is not None
        or _has_any_global_hook()
    )


def given(options: dict[str, Any]) -> dict[str, Any]:
    """Those that are not None: a module put in the place of another may not know the rest."""
    return {name: x for name, x in options.items() if x is not None}
