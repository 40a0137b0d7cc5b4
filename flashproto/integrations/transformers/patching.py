"""patch(model): the parts of a model that this library computes, on its functions."""

from __future__ import annotations

from collections.abc import Callable
from types import MethodType
from typing import Any, NamedTuple

from torch import nn

from ...checks.errors import refuse, shortened
from ...checks.options import check_flag
from .loss import looks_like_model, loss_forward, loss_of, why_not
from .positions import MAKES, bias_forward, bias_of, looks_like_biased
from .probing import (
    Left,
    likeness,
    looks_like_mlp,
    looks_like_norm,
    mlp_forward,
    mlp_of,
    norm_forward,
    norm_of,
)
from .rotary import looks_like_attention, rotary_forward, rotary_of

LABEL = "flashproto_runs"  # an attribute of what is bound


class Row(NamedTuple):
    """One module. runs: what computes it now, None for its own forward; why: what is against it."""

    name: str
    kind: str
    runs: str | None
    why: str


class Patched:
    """What patch did to a model; print it for a table.

    rows: one for each module that was looked at: its name, its class, what runs, and why not.
    undo(): give every module its own forward back.
    """

    def __init__(self, model: nn.Module, rows: list[Row]) -> None:
        self.model, self.rows = model, rows

    @property
    def replaced(self) -> list[Row]:
        return [row for row in self.rows if row.runs is not None]

    @property
    def left(self) -> list[Row]:
        return [row for row in self.rows if row.runs is None]

    def undo(self) -> None:
        """Take back what any patch did to this model, its copies by PEFT included.  Raises
        RuntimeError, before anything is changed, where a forward was replaced again since."""
        modules = dict(self.model.named_modules())
        for row in self.replaced:
            module = modules.get(row.name)
            if module is not None and labels_of(module) and label_of(module) is None:
                got = f"the forward of {row.name or 'the model'}, which was replaced again since"
                takes, do = "forwards as patch left them", "Undo what came later first."
                refuse("patch", "undo", got, takes, do, RuntimeError)
        for module in modules.values():
            for name, label in labels_of(module).items():
                if label is not None:
                    del module.__dict__[name]

    def __repr__(self) -> str:
        count: dict[tuple[str, ...], int] = {}
        for row in self.rows:
            key = (row.kind, row.runs or "its own forward", row.why)
            count[key] = count.get(key, 0) + 1
        lines = [("module", "number", "runs", "because")]
        lines += [(kind, str(n), runs, why) for (kind, runs, why), n in count.items()]
        widths = [max(len(line[i]) for line in lines) for i in range(4)]
        padded = (zip(line, widths, strict=True) for line in lines)
        return "\n".join("  ".join(x.ljust(n) for x, n in line).rstrip() for line in padded)


def labels_of(module: nn.Module) -> dict[str, str | None]:
    """Of the methods that a module has of its own, in the place of its class's: what of this library
    each is, None for something else."""
    own = (name for name in ("forward", MAKES) if name in module.__dict__)
    functions = ((name, getattr(module.__dict__[name], "__func__", None)) for name in own)
    return {name: getattr(function, LABEL, None) for name, function in functions}


def label_of(module: nn.Module) -> str | None:
    """What of this library computes a module, None for nothing."""
    return next((label for label in labels_of(module).values() if label is not None), None)


def patch(
    model: nn.Module,
    *,
    norms: bool = True,
    mlps: bool = True,
    rope: bool = True,
    loss: bool = True,
    position_bias: bool = True,
) -> Patched:
    """Let a model's norms, gated MLPs, RoPE, position biases and loss run on this library.

    No list of models: a module is replaced where its own forward, on a small random input, gives what a
    function here gives: in 16 bits too, which tells the roundings of norms apart.  What is not the same
    is left, and the result says why.  Replaced is one method, on each module itself: classes, other
    models, parameters, hooks and state_dict stay as they are.  More calls find nothing new to do.

    - RMSNorm (QK norms too) and LayerNorm: rms_norm, layer_norm
    - SwiGLU, GeGLU and ReGLU: one operator between the model's own layers, so that LoRA and quantized
      weights stay; the backward pass makes its result again
    - RoPE: rope, in the attention's own forward
    - position biases of distances (T5's): attention's relative_bias, while attention is register()'s;
      no tensor of queries times keys is made
    - the loss, in training with labels: linear_cross_entropy, with the model's softcap and
      num_items_in_batch.  Logits are then None.  Each call looks at the head: where it has adapters or
      hooks, or its weight is sharded, quantized or elsewhere, the model computes its own loss, and a
      warning says why

    For attention see register.

    Args:
        model: of transformers, or a PeftModel; in any dtype, on any device, meta included, in training
            or not.  Wrap it later: accelerate, FSDP, DDP, torch.compile.
        norms, mlps, rope, loss, position_bias: False leaves all of that kind; loss=False where logits
            are read in training.

    Returns: a Patched, whose text is a table, with undo().

    Raises:
        TypeError: not a module; an option that is neither True nor False.

    Example:
        >>> from flashproto.integrations.transformers import patch, register
        >>> model.set_attn_implementation(register())
        >>> patched = patch(model)
        >>> print(patched)
        >>> patched.undo()
    """
    if not isinstance(model, nn.Module):
        refuse("patch", "model", model, "a torch.nn.Module", "Pass the model itself.", TypeError)
    wanted = {"norms": norms, "mlps": mlps, "rope": rope, "loss": loss, "position_bias": position_bias}
    kinds = [kind for kind in KINDS if check_flag("patch", kind.argument, wanted[kind.argument])]
    known: dict[Any, Any] = {}
    found = (patch_one(name, module, kinds, known) for name, module in model.named_modules())
    return Patched(model, [row for row in found if row is not None])


class Kind(NamedTuple):
    """A kind of module: patch's argument for it, which look like one, what tells what it is, the
    method for that (forward, or the one that it `binds`), and what modules have in common that share
    it."""

    argument: str
    looks_like: Callable[[nn.Module], bool]
    probe: Callable[[Any], Any]
    forward: Callable[[Any, Any], Any]
    alike: Callable[[Any], object] = likeness


KINDS = [
    Kind("loss", looks_like_model, loss_of, loss_forward, id),
    Kind("norms", looks_like_norm, norm_of, norm_forward),
    Kind("position_bias", looks_like_biased, bias_of, bias_forward),
    Kind("rope", looks_like_attention, rotary_of, rotary_forward, type),
    Kind("mlps", looks_like_mlp, mlp_of, mlp_forward),
]


def patch_one(name: str, module: nn.Module, kinds: list[Kind], known: dict[Any, Any]) -> Row | None:
    """Its row, None for a module that is of no kind; known: forwards for modules like it."""
    what = type(module).__name__
    if label_of(module) is not None:
        return Row(name, what, label_of(module), note_of(module))
    kind = next((kind for kind in kinds if kind.looks_like(module)), None)
    if kind is None:
        return None
    if labels_of(module):
        return Row(name, what, None, "another forward was bound to it before")
    key = kind.probe, kind.alike(module)
    if key not in known:
        try:
            found = kind.probe(module)
            known[key] = kind.forward(module, found)
            setattr(known[key], LABEL, str(found))
        except Left as left:
            known[key] = str(left)
        except Exception as error:
            known[key] = shortened(f"its forward on a small input: {type(error).__name__}: {error}")
    if isinstance(known[key], str):
        return Row(name, what, None, known[key])
    setattr(module, getattr(known[key], "binds", "forward"), MethodType(known[key], module))
    return Row(name, what, label_of(module), note_of(module))


def note_of(module: nn.Module) -> str:
    """Of a model whose loss is replaced: why its own runs as it is now."""
    loss = getattr(module.forward, "loss", None)
    reason = None if loss is None else why_not(module, loss)
    return "" if reason is None else f"now its own: {reason}"
