"""Argument checks of the public functions: what was passed, what is accepted, one thing to do."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NoReturn

import torch
from torch import Tensor

FLOATS = (torch.float16, torch.bfloat16, torch.float32, torch.float64)


def refuse(
    operator: str,
    argument: str,
    got: object,
    takes: str,
    do: str,
    kind: type[Exception] = ValueError,
) -> NoReturn:
    """Raise `kind` with the one form that every message of the library has."""
    raise kind(f"{operator}: {argument} is {got}; it takes {takes}. {do}")


def check_tensor(operator: str, name: str, x: object) -> None:
    """A strided floating-point tensor."""
    if not isinstance(x, Tensor):
        refuse(operator, name, type(x).__name__, "a torch.Tensor", "Pass a tensor.", TypeError)
    if x.dtype not in FLOATS:
        refuse(
            operator, name, f"of dtype {x.dtype}", "float16, bfloat16, float32 or float64",
            f"Convert it, say {name}.to(torch.float32).", TypeError,
        )  # fmt: skip
    if x.layout != torch.strided:
        refuse(operator, name, f"of layout {x.layout}", "a strided tensor", "Call .to_dense().")


def check_same(operator: str, tensors: dict[str, Tensor], *, dtype: bool = True) -> None:
    """All on one device and, if asked, of one dtype; the first tensor sets which."""
    first, *others = tensors
    a = tensors[first]
    for name in others:
        b = tensors[name]
        if b.device != a.device:
            refuse(
                operator, name, f"on {b.device}", f"the device of {first}, {a.device}",
                f"Move it: {name}.to({first}.device).",
            )  # fmt: skip
        if dtype and b.dtype != a.dtype:
            refuse(
                operator, name, f"of dtype {b.dtype}", f"the dtype of {first}, {a.dtype}",
                f"Convert it, say {name}.to({first}.dtype), or use torch.autocast.", TypeError,
            )  # fmt: skip


def check_attention(operator: str, q: Tensor, k: Tensor, v: Tensor) -> None:
    """Ranks, devices, dtypes, heads and head dims of q [B, Hq, Sq, D], k [B, Hkv, Sk, D] and
    v [B, Hkv, Sk, Dv]."""
    tensors = {"q": q, "k": k, "v": v}
    for name, x in tensors.items():
        check_tensor(operator, name, x)
        if x.ndim != 4:
            refuse(
                operator, name, f"of shape {list(x.shape)}", "4 dimensions [B, H, S, D]",
                f"Reshape it; {name}[None, None] adds batch and heads to [S, D].",
            )  # fmt: skip
    check_same(operator, tensors)
    for name in ("k", "v"):
        if tensors[name].shape[0] != q.shape[0]:
            refuse(
                operator, name, f"of batch size {tensors[name].shape[0]}",
                f"that of q, {q.shape[0]}", f"Expand it: {name}.expand({q.shape[0]}, -1, -1, -1).",
            )  # fmt: skip
    if v.shape[1:3] != k.shape[1:3]:
        refuse(
            operator, "v", f"of heads and length {list(v.shape[1:3])}",
            f"those of k, {list(k.shape[1:3])}", "Pass k and v of the same tokens.",
        )  # fmt: skip
    if k.shape[3] != q.shape[3]:
        refuse(
            operator, "k", f"of head_dim {k.shape[3]}", f"that of q, {q.shape[3]}",
            "Only v may have a head_dim of its own.",
        )  # fmt: skip
    if q.shape[3] == 0 or v.shape[3] == 0:
        refuse(operator, "head_dim", 0, "at least 1", "Pass q, k and v of shape [B, H, S, D].")
    if k.shape[1] == 0 if q.shape[1] else k.shape[1] != 0:
        refuse(
            operator, "k", f"of {k.shape[1]} heads", f"a divisor of q's {q.shape[1]} heads",
            "Pass as many key heads as query heads.",
        )  # fmt: skip
    if k.shape[1] and q.shape[1] % k.shape[1]:
        refuse(
            operator, "q", f"of {q.shape[1]} heads", f"a multiple of k's {k.shape[1]} heads",
            "GQA needs the same number of query heads for each key head.",
        )  # fmt: skip


def check_scale(operator: str, scale: float | None) -> None:
    """A finite number, or None."""
    if scale is not None and not math.isfinite(scale):
        refuse(operator, "scale", scale, "a finite number", "Pass None for 1 / sqrt(head_dim).")


def check_norm(
    operator: str,
    x: Tensor,
    normalized_shape: Sequence[int],
    weight: Tensor | None,
    bias: Tensor | None,
    residual: Tensor | None,
) -> None:
    """x [..., *normalized_shape]; weight and bias of normalized_shape; residual of x's shape."""
    given = {"x": x, "weight": weight, "bias": bias, "residual": residual}
    tensors = {name: t for name, t in given.items() if t is not None}
    for name, t in tensors.items():
        check_tensor(operator, name, t)
    check_same(operator, tensors, dtype=False)
    shape = list(normalized_shape)
    if not shape or list(x.shape[-len(shape) :]) != shape:
        refuse(
            operator, "normalized_shape", shape,
            f"trailing dimensions of x, whose shape is {list(x.shape)}",
            f"Pass normalized_shape={list(x.shape[-1:])} to normalize the last dimension.",
        )  # fmt: skip
    for name in ("weight", "bias"):
        if name in tensors and list(tensors[name].shape) != shape:
            refuse(
                operator, name, f"of shape {list(tensors[name].shape)}",
                f"normalized_shape, {shape}", f"Pass {name}=None for none.",
            )  # fmt: skip
    if residual is not None and residual.shape != x.shape:
        refuse(
            operator, "residual", f"of shape {list(residual.shape)}",
            f"the shape of x, {list(x.shape)}", "Expand it to the shape of x.",
        )  # fmt: skip


def check_rows(operator: str, x: Tensor) -> None:
    """x [..., N], at least one dimension."""
    check_tensor(operator, "x", x)
    if x.ndim == 0:
        refuse(operator, "x", "a scalar", "at least one dimension", "Pass x[None].")
