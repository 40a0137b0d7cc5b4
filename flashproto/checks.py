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
    for name, x in (("q", q), ("k", k), ("v", v)):
        check_tensor(operator, name, x)
        if x.ndim != 4:
            refuse(
                operator, name, f"of shape {list(x.shape)}", "4 dimensions [B, H, S, D]",
                f"Reshape it; {name}[None, None] adds batch and heads to [S, D].",
            )  # fmt: skip
    device, dtype = q.device, q.dtype
    if k.device != device or v.device != device or k.dtype != dtype or v.dtype != dtype:
        check_same(operator, {"q": q, "k": k, "v": v})
    (B, Hq, _, D), (Bk, Hkv, Sk, Dk), (Bv, Hv, Sv, Dv) = q.shape, k.shape, v.shape
    for name, batch in (("k", Bk), ("v", Bv)):
        if batch != B:
            refuse(
                operator, name, f"of batch size {batch}", f"that of q, {B}",
                f"Expand it: {name}.expand({B}, -1, -1, -1).",
            )  # fmt: skip
    if Hv != Hkv or Sv != Sk:
        refuse(
            operator, "v", f"of heads and length {[Hv, Sv]}", f"those of k, {[Hkv, Sk]}",
            "Pass k and v of the same tokens.",
        )  # fmt: skip
    if Dk != D:
        refuse(
            operator, "k", f"of head_dim {Dk}", f"that of q, {D}",
            "Only v may have a head_dim of its own.",
        )  # fmt: skip
    if D == 0 or Dv == 0:
        refuse(operator, "head_dim", 0, "at least 1", "Pass q, k and v of shape [B, H, S, D].")
    if (Hkv == 0) != (Hq == 0):
        refuse(
            operator, "k", f"of {Hkv} heads", f"a divisor of q's {Hq} heads",
            "Pass as many key heads as query heads.",
        )  # fmt: skip
    if Hkv and Hq % Hkv:
        refuse(
            operator, "q", f"of {Hq} heads", f"a multiple of k's {Hkv} heads",
            "GQA needs the same number of query heads for each key head.",
        )  # fmt: skip


def finite(x: float) -> bool:
    """math.isfinite, for numbers too that torch.compile has made symbols."""
    return -math.inf < x < math.inf


def check_scale(operator: str, scale: float | None) -> None:
    """A finite number, or None."""
    if scale is not None and not finite(scale):
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
    check_tensor(operator, "x", x)
    device, shape = x.device, tuple(normalized_shape)
    if not shape or x.shape[-len(shape) :] != shape:
        refuse(
            operator, "normalized_shape", list(shape),
            f"trailing dimensions of x, whose shape is {list(x.shape)}",
            f"Pass normalized_shape={list(x.shape[-1:])} to normalize the last dimension.",
        )  # fmt: skip
    for name, t in (("weight", weight), ("bias", bias), ("residual", residual)):
        if t is None:
            continue
        check_tensor(operator, name, t)
        if t.device != device:
            check_same(operator, {"x": x, name: t}, dtype=False)
        if name == "residual":
            if t.shape != x.shape:
                refuse(
                    operator, "residual", f"of shape {list(t.shape)}",
                    f"the shape of x, {list(x.shape)}", "Expand it to the shape of x.",
                )  # fmt: skip
        elif t.shape != shape:
            refuse(
                operator, name, f"of shape {list(t.shape)}", f"normalized_shape, {list(shape)}",
                f"Pass {name}=None for none.",
            )  # fmt: skip


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
    if up is not None and up.shape != gate.shape:
        refuse(
            operator, "up", f"of shape {list(up.shape)}", f"the shape of gate, {list(gate.shape)}",
            "Expand it to the shape of gate.",
        )  # fmt: skip
    if operator != "gelu" and gate.ndim == 0:
        refuse(operator, "gate", "a scalar", "at least one dimension", "Pass gate[None].")
    if halves and gate.shape[-1] % 2:
        refuse(
            operator, "gate", f"of {gate.shape[-1]} columns",
            "an even number of them without up: the halves are gate and up",
            "Pass gate and up of one shape, or torch.cat((gate, up), -1).",
        )  # fmt: skip


def check_approximate(operator: str, approximate: str) -> None:
    """The name of a form of GELU."""
    if approximate not in ("none", "tanh"):
        refuse(
            operator, "approximate", repr(approximate), "'none' or 'tanh'",
            "Pass 'none' for the exact function.",
        )  # fmt: skip


def check_heads_of(operator: str, q: Tensor, k: Tensor | None) -> None:
    """q [B, Hq, S, D] and k [B, Hkv, S, D] of one dtype, or q alone."""
    tensors = {"q": q} | ({} if k is None else {"k": k})
    for name, x in tensors.items():
        check_tensor(operator, name, x)
        if x.ndim != 4:
            refuse(
                operator, name, f"of shape {list(x.shape)}", "4 dimensions [B, H, S, D]",
                f"Reshape it; {name}[None, None] adds batch and heads to [S, D].",
            )  # fmt: skip
    check_same(operator, tensors)
    if k is not None and (k.shape[0], *k.shape[2:]) != (q.shape[0], *q.shape[2:]):
        refuse(
            operator, "k", f"of shape {list(k.shape)}",
            f"that of q, {list(q.shape)}, but for the number of heads",
            "Call it twice for q and k of different tokens, each time with k=None.",
        )  # fmt: skip


def check_packed(operator: str, qkv: Tensor, n_heads: int, n_kv_heads: int) -> int:
    """head_dim D of qkv [B, S, (n_heads + 2 n_kv_heads) D]."""
    check_tensor(operator, "qkv", qkv)
    if qkv.ndim != 3:
        refuse(
            operator, "qkv", f"of shape {list(qkv.shape)}", "3 dimensions [B, S, heads * D]",
            "Flatten heads and D: qkv.flatten(2).",
        )  # fmt: skip
    for name, n in (("n_heads", n_heads), ("n_kv_heads", n_kv_heads)):
        if n < 1:
            refuse(operator, name, n, "at least 1", "Pass the number of heads.")
    heads = n_heads + 2 * n_kv_heads
    if qkv.shape[2] % heads:
        refuse(
            operator, "qkv", f"{qkv.shape[2]} wide",
            f"a multiple of n_heads + 2 n_kv_heads, {heads}", "Pass the heads that it was made of.",
        )  # fmt: skip
    return qkv.shape[2] // heads


def check_head_weights(operator: str, D: int, device: torch.device, *weights: Tensor | None) -> None:
    """q_weight and k_weight [D], each or none."""
    for name, weight in zip(("q_weight", "k_weight"), weights, strict=True):
        if weight is None:
            continue
        check_tensor(operator, name, weight)
        check_on(operator, name, weight, device)
        if list(weight.shape) != [D]:
            refuse(
                operator, name, f"of shape {list(weight.shape)}", f"one value a dimension, [{D}]",
                f"Pass {name}=None for none.",
            )  # fmt: skip


def check_on(operator: str, name: str, x: Tensor, device: torch.device) -> None:
    if x.device != device:
        refuse(operator, name, f"on {x.device}", f"the inputs' device, {device}", "Move it there.")


def check_tables(
    operator: str,
    B: int,
    S: int,
    D: int,
    device: torch.device,
    cos: Tensor,
    sin: Tensor,
    positions: Tensor | None,
    offset: int | Tensor,
) -> None:
    """cos, sin [length, R], 2 R <= D; positions [S] or [B, S] or none; offset a number or [B]."""
    for name, table in (("cos", cos), ("sin", sin)):
        check_tensor(operator, name, table)
        check_on(operator, name, table, device)
        if table.ndim != 2 or 2 * table.shape[1] > D:
            refuse(
                operator, name, f"of shape {list(table.shape)}",
                f"[length, R] with 2 R at most head_dim, {D}", "flashproto.nn.rope_tables makes it.",
            )  # fmt: skip
    if cos.shape != sin.shape:
        refuse(
            operator, "sin", f"of shape {list(sin.shape)}", f"the shape of cos, {list(cos.shape)}",
            "Pass tables of one shape.",
        )  # fmt: skip
    shapes = {"positions": ((S,), (B, S)), "offset": ((B,),)}
    for name, x in (("positions", positions), ("offset", offset)):
        if not isinstance(x, Tensor):
            continue
        check_on(operator, name, x, device)
        if x.is_floating_point() or x.dtype == torch.bool or tuple(x.shape) not in shapes[name]:
            takes = " or ".join(str(list(shape)) for shape in shapes[name])
            refuse(
                operator, name, f"{x.dtype} of shape {list(x.shape)}", f"integers of shape {takes}",
                "Pass rows of the tables, as torch.arange gives them.",
            )  # fmt: skip
    if isinstance(offset, Tensor):
        if positions is not None:
            refuse(
                operator, "offset", "a tensor", "a number beside positions",
                "Add it to positions.",
            )  # fmt: skip
    elif positions is None and not 0 <= offset <= cos.shape[0] - S and S:
        refuse(
            operator, "offset", offset,
            f"0 to {cos.shape[0] - S}, for {S} tokens and tables of {cos.shape[0]} rows",
            "Make longer tables.",
        )  # fmt: skip


REDUCTIONS = ("mean", "sum", "none")


def check_cross_entropy(
    operator: str,
    targets: object,
    shape: Sequence[int],
    V: int,
    device: torch.device,
    weight: Tensor | None,
    weight_name: str,
    label_smoothing: float,
    z_loss: float,
    softcap: float | None,
    reduction: str,
) -> None:
    """targets are integers of `shape`, weight [V], on `device`; the options are in their ranges."""
    if not isinstance(targets, Tensor) or targets.dtype not in (torch.int64, torch.int32):
        got = f"of dtype {targets.dtype}" if isinstance(targets, Tensor) else type(targets).__name__
        refuse(
            operator, "targets", got, "an int64 or int32 tensor of class indices",
            "Convert it: targets.long().", TypeError,
        )  # fmt: skip
    if targets.device != device:
        refuse(
            operator, "targets", f"on {targets.device}", f"the device of the logits, {device}",
            f"Move it: targets.to({str(device)!r}).",
        )  # fmt: skip
    if targets.shape != torch.Size(shape):
        refuse(
            operator, "targets", f"of shape {list(targets.shape)}",
            f"one class index for each row, {list(shape)}", "Classes are the last dimension of logits.",
        )  # fmt: skip
    if V == 0:
        refuse(operator, "the number of classes", 0, "at least 1", "Pass logits [..., V].")
    if weight is not None:
        check_tensor(operator, weight_name, weight)
        check_on(operator, weight_name, weight, device)
        if weight.shape != (V,):
            refuse(
                operator, weight_name, f"of shape {list(weight.shape)}", f"a weight a class, [{V}]",
                f"Pass {weight_name}=None to weigh all classes alike.",
            )  # fmt: skip
        if weight.requires_grad and torch.is_grad_enabled():
            refuse(
                operator, weight_name, "a tensor that requires grad", "constants",
                f"Pass {weight_name}.detach().",
            )  # fmt: skip
    if not 0.0 <= label_smoothing <= 1.0:
        refuse(operator, "label_smoothing", label_smoothing, "0 to 1", "Pass 0.0 for none.")
    if not finite(z_loss):
        refuse(operator, "z_loss", z_loss, "a finite number", "Pass 0.0 for none.")
    if softcap is not None and not 0.0 < softcap < math.inf:
        refuse(operator, "softcap", softcap, "a positive number, or None", "Pass None for none.")
    if reduction not in REDUCTIONS:
        refuse(
            operator, "reduction", repr(reduction), "'mean', 'sum' or 'none'",
            "Pass one of them.",
        )  # fmt: skip


def check_casting(operator: str, casting: str) -> None:
    """How a norm multiplies by its weight."""
    if casting not in ("torch", "llama", "gemma"):
        refuse(
            operator, "casting", repr(casting), "'torch', 'llama' or 'gemma'",
            "Pass 'torch' for what torch's norms do.",
        )  # fmt: skip
