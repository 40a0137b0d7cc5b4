"""Checks of tensors: dtypes, devices and shapes."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from .errors import described, refuse, refuse_shape, spreads

FLOATS = (torch.float16, torch.bfloat16, torch.float32, torch.float64)


def check_tensor(operator: str, name: str, x: object) -> None:
    """A strided floating-point tensor."""
    if not isinstance(x, Tensor):
        got = described(x) if x is None else type(x).__name__
        refuse(operator, name, got, "a torch.Tensor", "Pass a tensor.", TypeError)
    if x.dtype not in FLOATS:
        refuse(
            operator,
            name,
            f"of dtype {x.dtype}",
            "float16, bfloat16, float32 or float64",
            f"Convert it, say {name}.to(torch.float32).",
            TypeError,
        )
    if x.layout != torch.strided:
        refuse(operator, name, f"of layout {x.layout}", "a strided tensor", "Call .to_dense().")


def check_mask_tensor(operator: str, name: str, mask: object) -> None:
    """A boolean tensor, or a floating-point one that is added to scores."""
    if isinstance(mask, Tensor) and mask.dtype == torch.bool:
        return
    if isinstance(mask, Tensor) and mask.dtype not in FLOATS:
        takes = "bool, True where a score counts, or a floating-point dtype, which is added to scores"
        do = f"Pass {name}.bool() where other numbers than 0 count."
        refuse(operator, name, f"of dtype {mask.dtype}", takes, do, TypeError)
    check_tensor(operator, name, mask)


def check_same(operator: str, tensors: dict[str, Tensor], *, dtype: bool = True) -> None:
    """All on one device and, if asked, of one dtype; the first tensor sets which."""
    first, *others = tensors
    a = tensors[first]
    for name in others:
        b = tensors[name]
        if b.device != a.device:
            refuse(
                operator,
                name,
                f"on {b.device}",
                f"the device of {first}, {a.device}",
                f"Move it: {name}.to({first}.device).",
            )
        if dtype and b.dtype != a.dtype:
            refuse(
                operator,
                name,
                f"of dtype {b.dtype}",
                f"the dtype of {first}, {a.dtype}",
                f"Convert it, say {name}.to({first}.dtype), or use torch.autocast.",
                TypeError,
            )


def check_shape(operator: str, name: str, x: Tensor, wanted: Sequence[int], what: str, do: str) -> None:
    """x of the shape `wanted`, which is, in words, `what`."""
    if x.shape != tuple(wanted):
        refuse_shape(operator, name, x, lambda: f"{what}, {list(wanted)}", do)


def check_broadcasts(operator: str, name: str, t: Tensor, x: Tensor) -> None:
    """t on x's device, of a shape that broadcasts to x's."""
    check_same(operator, {"x": x, name: t}, dtype=False)
    shape = [1] * (x.ndim - t.ndim) + list(t.shape)
    if len(shape) != x.ndim or not all(map(spreads, shape, x.shape)):
        takes = f"a shape that broadcasts to that of x, {list(x.shape)}"
        refuse_shape(operator, name, t, takes, "Reshape it.")


def check_4d(operator: str, name: str, x: Tensor) -> None:
    """x [B, H, S, D]."""
    check_tensor(operator, name, x)
    if x.ndim != 4:
        do = f"Reshape it; {name}[None] adds the batch to [H, S, D]."
        refuse_shape(operator, name, x, "4 dimensions [B, H, S, D]", do)


def check_on(operator: str, name: str, x: Tensor, device: torch.device) -> None:
    if x.device != device:
        refuse(operator, name, f"on {x.device}", f"the inputs' device, {device}", "Move it there.")
