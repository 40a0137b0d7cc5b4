"""The loss of a language model: what its forward does behind the hidden states, in one operator."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.utils import logging

from ... import functional
from .probing import Left, close, linear, own_forward, quiet, twin_of

logger = logging.get_logger(__name__)

WIDTH, LARGE = 4, 1e6
APART = ("labels", "logits_to_keep", "output_router_logits")


class Loss(NamedTuple):
    """base, head: names of the children that make hidden states and logits; softcap: of the logits;
    result: the class of what forward returns, and which of its fields come from the base; function: the
    model's loss_function then."""

    base: str
    head: str
    softcap: float | None
    result: type
    fields: tuple[str, ...]
    function: Callable[..., Any]

    def __str__(self) -> str:
        cap = "" if self.softcap is None else f", softcap {self.softcap:g}"
        return f"linear_cross_entropy{cap}"


class Base:
    """Stands in for a model without its head: gives hidden states and keeps what it was called with."""

    def __init__(self, h: Tensor) -> None:
        self.last_hidden_state = h
        self.args: tuple[Any, ...] = ()
        self.given: dict[str, Any] = {}

    def __call__(self, *args: Any, **options: Any) -> Base:
        self.args, self.given = args, options
        return self

    def __getattr__(self, name: str) -> str:
        if name.startswith("__"):
            raise AttributeError(name)
        return f"the base's {name}"

    def __getitem__(self, index: int) -> Tensor:
        if index != 0:
            raise IndexError(index)
        return self.last_hidden_state


def head_of(model: PreTrainedModel) -> str | None:
    """The name of the child that makes logits."""
    head = model.get_output_embeddings()
    return next((n for n, child in model._modules.items() if head is not None and child is head), None)


def looks_like_model(module: nn.Module) -> bool:
    return isinstance(module, PreTrainedModel) and head_of(module) is not None


def loss_of(model: Any) -> Loss:
    """What lies between hidden states and loss, found by running the model's own forward around a
    stand-in for its base; raises Left if linear_cross_entropy is something else."""
    head = head_of(model)
    bases = [n for n, child in model._modules.items() if isinstance(child, PreTrainedModel)]
    if head is None or len(bases) != 1:
        raise Left(f"hidden states come from {bases or 'no model'}")
    (base,) = bases
    config = model.config.get_text_config()
    V = config.vocab_size
    parameters = inspect.signature(type(model).forward).parameters
    with quiet() as generator:
        random = functools.partial(torch.randn, generator=generator, dtype=torch.float32)
        h, weight = random(2, 5, WIDTH), random(V, WIDTH)
        every = torch.randint(V, (2, 5), generator=generator)
        some = every.clone()
        some[0, 2] = -100

        def own(h: Tensor, **options: Any) -> tuple[Any, Base]:
            if "output_router_logits" in parameters:
                options["output_router_logits"] = False
            stand_in = Base(h)
            children = {**model._modules, base: stand_in, head: linear(weight)}
            return own_forward(twin_of(model, _modules=children), **options), stand_in

        far = own(LARGE * h)[0].logits
        softcap = None
        if not close(LARGE * h @ weight.T, far):
            softcap = far.abs().max().item()
        h = h if softcap is None else h * softcap
        logits = h @ weight.T
        logits = logits if softcap is None else softcap * torch.tanh(logits / softcap)
        if not close(logits, own(h)[0].logits):
            raise Left("its logits are not the head's, capped or not")
        names = [n for n in parameters if n not in (*APART, "self", "args", "kwargs")]
        given = {name: f"given {name}" for name in names}
        out, stand_in = own(h, labels=some)
        wanted = [x for x in out if out[x] is not None and x not in ("loss", "logits")]
        if any(out[x] != f"the base's {x}" for x in wanted):
            raise Left("what it returns is not what its base returns")
        found = Loss(base, head, softcap, type(out), tuple(wanted), model.loss_function)
        cases: list[tuple[Tensor, dict[str, Any]]] = [
            (some, {}),
            (some, {"num_items_in_batch": 7}),
            (every, {"num_items_in_batch": torch.tensor(7), "shift_labels": some.flip(0)}),
            (every, {"ignore_index": int(every[0, 1])}),
        ]
        for labels, options in cases:
            out, stand_in = own(h, labels=labels, **given, **options)
            passed = dict(zip(names, stand_in.args, strict=False))
            passed |= stand_in.given
            if any(passed.get(name) is not x for name, x in (given | options).items()):
                raise Left("it passes its base other things than it is given")
            if not close(linear_loss(found, h, weight, None, labels, options, "reference"), out.loss):
                raise Left("its loss is not the cross entropy of the logits")
    return found


def linear_loss(
    loss: Loss,
    h: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    labels: Tensor,
    options: dict[str, Any],
    impl: str | None = None,
) -> Any:
    """transformers' loss of causal models; options: what forward was given beside."""
    ignore = options.get("ignore_index", -100)
    items, targets = options.get("num_items_in_batch"), options.get("shift_labels")
    if targets is None:
        targets = nn.functional.pad(labels, (0, 1), value=ignore)[..., 1:]
    made: Any = functional.linear_cross_entropy(
        h,
        weight,
        targets.to(h.device),
        bias,
        ignore_index=ignore,
        softcap=loss.softcap,
        reduction="mean" if items is None else "sum",
        impl=impl,
    )
    if items is None:
        return made
    return made / (items.to(made.device) if isinstance(items, Tensor) else items)


def active_head(head: Any) -> Any:
    """The layer itself, where PEFT trains a copy of it (modules_to_save)."""
    if not hasattr(head, "modules_to_save"):
        return head
    if getattr(head, "disable_adapters", False):
        return head.original_module
    adapters = head.active_adapters
    if len(adapters) == 1 and adapters[0] in head.modules_to_save:
        return head.modules_to_save[adapters[0]]
    return head.original_module if not adapters else head


def against(name: str, head: Any) -> str | None:
    """Why a head's product may not be taken out of its hands; None: it may."""
    if type(head) is not nn.Linear:
        return f"{name} is a {type(head).__module__}.{type(head).__name__}"
    if "forward" in head.__dict__:
        return f"{name} has another forward"
    hooks = (head._forward_hooks, head._forward_pre_hooks, head._backward_hooks)
    if any(hooks) or head._backward_pre_hooks:
        return f"{name} has hooks"
    weight = head.weight
    if type(weight) not in (nn.Parameter, Tensor):
        return f"{name}.weight is a {type(weight).__name__}"
    if not weight.is_floating_point():
        return f"{name}.weight is quantized"
    if weight.numel() == 0:
        return f"{name}.weight is empty: it is elsewhere"
    return None


def why_not(model: Any, loss: Loss) -> str | None:
    """Why the model's own loss has to run now; None: it has not."""
    if "_loss_function" in model.__dict__ or model.loss_function is not loss.function:
        return "the model has a loss_function of its own"
    return against(loss.head, active_head(model._modules[loss.head]))


def loss_forward(model: Any, loss: Loss) -> Callable[..., Any]:
    original = type(model).forward
    names = [*inspect.signature(original).parameters][1:]

    def forward(self: Any, *args: Any, **options: Any) -> Any:
        given = {**dict(zip(names, args, strict=False)), **options}
        labels = given.pop("labels", None)
        if labels is None or not self.training or not whole(self, given):
            return original(self, *args, **options)
        reason = why_not(self, loss)
        if reason is not None:
            if not torch.compiler.is_compiling():
                words = f"flashproto: {type(self).__name__} computes its own loss, because {reason}."
                logger.warning_once(words)
            return original(self, *args, **options)
        for name in (*APART, "return_dict"):
            given.pop(name, None)
        made = self._modules[loss.base](**given)
        head = active_head(self._modules[loss.head])
        h = made.last_hidden_state
        value = linear_loss(loss, h, head.weight, head.bias, labels, given)
        return loss.result(loss=value, **{name: made.get(name) for name in loss.fields})

    functools.update_wrapper(forward, original)  # Trainer and generate read its signature
    forward.loss = loss  # type: ignore[attr-defined]
    return forward


def whole(model: Any, given: dict[str, Any]) -> bool:
    """Whether all logits are wanted, for the loss alone, and as an object."""
    keep, config = given.get("logits_to_keep", 0), model.config
    router = given.get("output_router_logits")
    router = getattr(config, "output_router_logits", False) if router is None else router
    as_object = given.get("return_dict")
    as_object = config.return_dict if as_object is None else as_object
    return isinstance(keep, int) and keep == 0 and not router and bool(as_object)
