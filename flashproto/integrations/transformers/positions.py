"""Position biases that depend on distances alone (T5's): a number for each distance, in the place of
one for each pair.

A model's first layer makes a tensor [1, H, Sq, Sk] of them, and the next ones are given it.  Here it
makes a table [H, Sq + Sk - 1], which goes the same way: what its own function gives one query, the last
one, for keys as far as any is, on both sides; those behind it come first.  A table without columns
is one of zeros.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from .cache import NAMES
from .probing import Left, close, quiet, twin_of
from .rotary import with_globals

MAKES = "compute_bias"  # the method of such models
TAKES = ("query_length", "key_length", "device", "past_seen_tokens")
INTERFACE = "ALL_ATTENTION_FUNCTIONS"
PROBED = (5, 5, 0), (2, 9, 7), (1, 40, 39), (3, 50, 2)  # queries, keys, and keys before the queries


class Bias(NamedTuple):
    """made: by the method, else the module has none of its own, and zeros in its place."""

    made: bool

    def __str__(self) -> str:
        return "relative_bias" if self.made else "no bias in the place of zeros"


def looks_like_biased(module: nn.Module) -> bool:
    """Its forward asks a method for a bias, and hands it to an attention of transformers."""
    function = inspect.unwrap(type(module).forward)
    names = getattr(getattr(function, "__code__", None), "co_names", ())
    return hasattr(type(module), MAKES) and {MAKES, INTERFACE} <= {*names}


class Interface:
    """Stands in for transformers' table of attentions: keeps the bias that one is called with."""

    given: Any = None

    def get_interface(self, *args: Any) -> Callable[..., Any]:
        return self.attend

    def attend(self, module: Any, q: Tensor, *args: Any, position_bias: Any, **options: Any) -> Any:
        self.given = position_bias
        return q.transpose(1, 2), None


def stand_in(child: Any) -> Callable[[Tensor], Tensor]:
    """For a layer: an embedding with weights of its own, or zeros as wide as the layer's results."""
    if hasattr(child, "embedding_dim"):
        weight = torch.linspace(-3, 5, child.num_embeddings * child.embedding_dim)
        weight = weight.sin().view(child.num_embeddings, child.embedding_dim)
        return lambda index: weight[index]
    return lambda x: x.new_zeros(*x.shape[:-1], child.out_features)


def bias_of(module: Any) -> Bias:
    """Whether a module's bias is one of distances, or none; raises Left if it is another one, or goes
    elsewhere than to attention."""
    original, interface = getattr(type(module), MAKES), Interface()
    if (*inspect.signature(original).parameters,)[1:] != TAKES:
        raise Left(f"{MAKES} takes other arguments")
    forward = with_globals(type(module).forward, {INTERFACE: interface})
    own = torch.ones(1, 3)
    with quiet():
        layers: dict[str, Any] = {n: stand_in(child) for n, child in module._modules.items()}
        twin = twin_of(module, _modules=layers, **{MAKES: lambda *args, **options: own})
        hidden = torch.zeros(1, 4, 8)
        made = forward(twin, hidden)
        if interface.given is own:
            del twin.__dict__[MAKES]
            for Sq, Sk, past in PROBED:
                wanted = original(twin, Sq, Sk, "cpu", past)
                table = table_of(original, twin, Sq, Sk, "cpu", past)
                distance = torch.arange(Sq)[:, None] + past - torch.arange(Sk)
                if not close(table[:, distance + Sk - 1 - past], wanted[0]):
                    raise Left("its bias is not one of distances")
        elif not isinstance(interface.given, Tensor) or interface.given.any():
            raise Left("its bias is another one")
        is_made = interface.given is own
        if "position_bias" in inspect.signature(type(module).forward).parameters:
            made = forward(twin, hidden, position_bias=own)
            if interface.given is not own or not any(x is own for x in made):
                raise Left("it does not hand on the bias that it is given")
        elif not is_made:
            raise Left("its forward is given no bias, and makes zeros")
    return Bias(is_made)


def table_of(
    original: Callable[..., Tensor], module: Any, Sq: int, Sk: int, device: Any, past: Any
) -> Tensor:
    """[H, Sq + Sk - 1]: column Sk - 1 - past + n is for the key that is n tokens before a query; past:
    how many keys are before the queries, which a static cache has as a tensor."""
    row = original(module, 1, Sq + Sk - 1, device=device, past_seen_tokens=past + Sq - 1)
    return row[0, :, 0].flip(-1)


def bias_forward(module: Any, bias: Bias) -> Callable[..., Any]:
    """What makes a table, in the place of the method; or the forward of one that has no bias."""
    if bias.made:
        method = getattr(type(module), MAKES)

        def compute_bias(
            self: Any, query_length: int, key_length: int, device: Any = None, past_seen_tokens: Any = 0
        ) -> Tensor:
            if is_ours(self):
                return table_of(method, self, query_length, key_length, device, past_seen_tokens)
            return method(self, query_length, key_length, device, past_seen_tokens)

        compute_bias.binds = MAKES  # type: ignore[attr-defined]
        return compute_bias
    original = type(module).forward
    names = [*inspect.signature(original).parameters][1:]

    def forward(self: Any, *args: Any, **options: Any) -> Any:
        given = {**dict(zip(names, args, strict=False)), **options}
        if given.get("position_bias") is None and is_ours(self):
            given["position_bias"] = given[names[0]].new_empty(1, 0)
        return original(self, **given)

    return forward


def is_ours(module: Any) -> bool:
    """Whether its attention is register()'s, which takes tables."""
    return module.config._attn_implementation in NAMES


def relative(position_bias: Tensor | None) -> tuple[Tensor | None, Tensor | None]:
    """(table, bias) of what a model hands on: a table has 2 dimensions, a bias of its own 4."""
    if position_bias is None or position_bias.ndim != 2:
        return None, position_bias
    return (position_bias if position_bias.shape[1] else None), None
