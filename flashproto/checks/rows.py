"""Checks of the arguments of what works on rows: norms, gated activations, losses."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from .errors import described, refuse, refuse_shape
from .options import LARGEST, SMALLEST, check_choice, check_integer, check_number, is_integer, untraced
from .reading import check_values, is_readable
from .tensors import check_on, check_same, check_shape, check_tensor


def check_norm(
    operator: str,
    x: Tensor,
    normalized_shape: Sequence[int],
    weight: Tensor | None,
    bias: Tensor | None,
    residual: Tensor | None,
) -> None:
    """x [..., *normalized_shape]; weight and bias of normalized_shape; residual of x's shape, which the
    operators need that have it in their names."""
    check_tensor(operator, "x", x)
    if operator.startswith("add_"):
        check_tensor(operator, "residual", residual)
    device, shape = x.device, tuple(normalized_shape)
    if not shape or not all(map(is_integer, shape)) or x.shape[-len(shape) :] != shape:
        refuse(
            operator,
            "normalized_shape",
            list(shape),
            f"trailing dimensions of x, whose shape is {list(x.shape)}",
            f"Pass normalized_shape={list(x.shape[-1:])} to normalize the last dimension.",
        )
    for name, t in (("weight", weight), ("bias", bias), ("residual", residual)):
        if t is None:
            continue
        check_tensor(operator, name, t)
        if t.device != device:
            check_same(operator, {"x": x, name: t}, dtype=False)
        if name == "residual":
            do = "Expand it to the shape of x."
            check_shape(operator, name, t, x.shape, "the shape of x", do)
        else:
            do = f"Pass {name}=None for none."
            check_shape(operator, name, t, shape, "normalized_shape", do)


def as_shape(operator: str, normalized_shape: object) -> int | tuple[int, ...]:
    """normalized_shape as an int or a tuple."""
    if isinstance(normalized_shape, (tuple, list)):
        return tuple(map(untraced, normalized_shape))
    normalized_shape = untraced(normalized_shape)
    if is_integer(normalized_shape):
        return normalized_shape  # type: ignore[return-value]
    x = "x, residual" if operator.startswith("add_") else "x"
    refuse(
        operator,
        "normalized_shape",
        described(normalized_shape),
        "an int or a sequence of ints",
        f"The weight comes behind it: {operator}({x}, x.shape[-1], weight).",
        TypeError,
    )


def check_rows(operator: str, x: Tensor) -> None:
    """x [..., N], at least one dimension."""
    check_tensor(operator, "x", x)
    if x.ndim == 0:
        refuse(operator, "x", "a scalar", "at least one dimension", "Pass x[None].")


def check_glu(operator: str, gate: Tensor, up: Tensor | None, *, halves: bool) -> None:
    """gate and up [..., N]; or gate alone, with halves [..., 2N]."""
    tensors = {"gate" if operator != "gelu" else "x": gate} | ({} if up is None else {"up": up})
    for name, t in tensors.items():
        check_tensor(operator, name, t)
    check_same(operator, tensors)
    if up is not None:
        do = "Expand it to the shape of gate."
        check_shape(operator, "up", up, gate.shape, "the shape of gate", do)
    if operator != "gelu" and gate.ndim == 0:
        refuse(operator, "gate", "a scalar", "at least one dimension", "Pass gate[None].")
    if halves and gate.shape[-1] % 2:
        refuse(
            operator,
            "gate",
            f"of {gate.shape[-1]} columns",
            "an even number of them without up: the halves are gate and up",
            "Pass gate and up of one shape, or torch.cat((gate, up), -1).",
        )


def check_approximate(operator: str, approximate: str) -> None:
    """The name of a form of GELU."""
    do = "Pass 'none' for the exact function."
    check_choice(operator, "approximate", approximate, ("none", "tanh"), do)


REDUCTIONS = ("mean", "sum", "none")


def check_cross_entropy(
    operator: str,
    targets: object,
    shape: Sequence[int],
    V: int,
    device: torch.device,
    weight: Tensor | None,
    weight_name: str,
    logits_shape: Sequence[int] | None = None,
    class_dim: int = -1,
) -> None:
    """targets are integers of `shape`, weight [V], on `device`.

    logits_shape: where classes may lie in another dimension than the last, class_dim.
    """
    if not isinstance(targets, Tensor) or targets.dtype not in (torch.int64, torch.int32):
        got = f"of dtype {targets.dtype}" if isinstance(targets, Tensor) else described(targets)
        refuse(
            operator,
            "targets",
            got,
            "an int64 or int32 tensor of class indices",
            "Convert it: targets.long().",
            TypeError,
        )
    if targets.device != device:
        refuse(
            operator,
            "targets",
            f"on {targets.device}",
            f"the device of the logits, {device}",
            f"Move it: targets.to({str(device)!r}).",
        )
    if targets.shape != torch.Size(shape):
        do = "Pass one for each row."
        if logits_shape is not None:
            do = f"Classes are dimension class_dim of logits, {class_dim}."
            as_torch = len(logits_shape) > 2 and (logits_shape[0], *logits_shape[2:])
            if class_dim == -1 and targets.shape == as_torch:
                do = "Pass class_dim=1 for torch's layout [N, V, d1, ...]."
        refuse_shape(operator, "targets", targets, f"one class index for each row, {list(shape)}", do)
    if V == 0:
        refuse(operator, "the number of classes", 0, "at least 1", "Pass logits [..., V].")
    if weight is not None:
        check_tensor(operator, weight_name, weight)
        check_on(operator, weight_name, weight, device)
        do = f"Pass {weight_name}=None to weigh all classes alike."
        check_shape(operator, weight_name, weight, [V], "a weight a class", do)
        if weight.requires_grad and torch.is_grad_enabled():
            refuse(
                operator,
                weight_name,
                "a tensor that requires grad",
                "constants",
                f"Pass {weight_name}.detach().",
            )


def check_loss_options(
    operator: str,
    ignore_index: int,
    label_smoothing: float,
    z_loss: float,
    softcap: float | None,
    reduction: str,
) -> tuple[int, float, float, float | None]:
    """(ignore_index, label_smoothing, z_loss, softcap), once they and reduction are in their ranges."""
    do = "Pass -100, say, which is no class."
    ignore_index = check_integer(
        operator, "ignore_index", ignore_index, -(2**63), 2**63 - 1, "an int64 integer", do
    )
    do = "Pass 0.0 for none."
    label_smoothing = check_number(operator, "label_smoothing", label_smoothing, 0, 1, "0 to 1", do)
    z_loss = check_number(operator, "z_loss", z_loss, -LARGEST, LARGEST, "a finite number", do)
    if softcap is not None:
        takes, do = "a positive number, or None", "Pass None for none."
        softcap = check_number(operator, "softcap", softcap, SMALLEST, LARGEST, takes, do)
    check_choice(operator, "reduction", reduction, REDUCTIONS, "Pass one of them.")
    return ignore_index, label_smoothing, z_loss, softcap


def check_classes(operator: str, targets: Tensor, V: int, ignore_index: int) -> None:
    """Check, where values can be read, that every target is a class or ignore_index."""
    if is_readable(targets):
        wrong = ((targets < 0) | (targets >= V)) & (targets != ignore_index)
        takes = f"a class from 0 to {V - 1}, or ignore_index, {ignore_index}"
        do = "Make the head's width the number of classes, or mark such rows by ignore_index."
        check_values(operator, "targets", targets, wrong, takes, do)


def check_casting(operator: str, casting: str) -> None:
    """How a norm multiplies by its weight."""
    do = "Pass 'torch' for what torch's norms do."
    check_choice(operator, "casting", casting, ("torch", "llama", "gemma"), do)
