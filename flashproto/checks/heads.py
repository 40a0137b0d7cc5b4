"""Checks of the arguments of RoPE and QK norm."""

from __future__ import annotations

import sys
from typing import Any

import torch
from torch import Tensor

from .errors import described, matches, refuse, refuse_shape
from .options import check_integer
from .reading import check_values, is_readable
from .tensors import check_4d, check_on, check_same, check_shape, check_tensor


def check_heads_of(operator: str, q: Tensor, k: Tensor | None) -> None:
    """q [B, Hq, S, D] and k [B, Hkv, S, D] of one dtype, or q alone."""
    tensors = {"q": q} | ({} if k is None else {"k": k})
    for name, x in tensors.items():
        check_4d(operator, name, x)
    check_same(operator, tensors)
    if k is not None and (k.shape[0], *k.shape[2:]) != (q.shape[0], *q.shape[2:]):
        takes = f"that of q, {list(q.shape)}, but for the number of heads"
        do = "Call it twice for q and k of different tokens, each time with k=None."
        refuse_shape(operator, "k", k, takes, do)


def check_packed(operator: str, qkv: Tensor, n_heads: int, n_kv_heads: int) -> tuple[int, int, int]:
    """(n_heads, n_kv_heads, D) of qkv [B, S, (n_heads + 2 n_kv_heads) D]."""
    check_tensor(operator, "qkv", qkv)
    if qkv.ndim != 3:
        do = "Flatten heads and D: qkv.flatten(2)."
        refuse_shape(operator, "qkv", qkv, "3 dimensions [B, S, heads * D]", do)
    n_heads, n_kv_heads = check_head_counts(operator, n_heads, n_kv_heads)
    heads = n_heads + 2 * n_kv_heads
    if qkv.shape[2] % heads:
        refuse(
            operator,
            "qkv",
            f"{qkv.shape[2]} wide",
            f"a multiple of n_heads + 2 n_kv_heads, {heads}",
            "Pass the heads that it was made of.",
        )
    return n_heads, n_kv_heads, qkv.shape[2] // heads


def check_head_counts(operator: str, n_heads: int, n_kv_heads: int) -> tuple[int, int]:
    """(n_heads, n_kv_heads), integers of at least 1."""
    how = 1, sys.maxsize, "an integer of at least 1", "Pass the number of heads."
    return (
        check_integer(operator, "n_heads", n_heads, *how),
        check_integer(operator, "n_kv_heads", n_kv_heads, *how),
    )


def check_head_weights(operator: str, D: int, device: torch.device, *weights: Tensor | None) -> None:
    """q_weight and k_weight [D], each or none."""
    for name, weight in zip(("q_weight", "k_weight"), weights, strict=True):
        if weight is None:
            continue
        check_tensor(operator, name, weight)
        check_on(operator, name, weight, device)
        check_shape(operator, name, weight, [D], "one value a dimension", f"Pass {name}=None for none.")


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
) -> int | Tensor:
    """offset, once cos, sin are [length, R], 2 R <= D; positions [S] or [B, S] or none; offset an
    integer or [B]."""
    for name, table in (("cos", cos), ("sin", sin)):
        check_tensor(operator, name, table)
        check_on(operator, name, table, device)
        if table.ndim != 2 or 2 * table.shape[1] > D:
            takes = f"[length, R] with 2 R at most head_dim, {D}"
            refuse_shape(operator, name, table, takes, "flashproto.nn.rope_tables makes it.")
    check_shape(operator, "sin", sin, cos.shape, "the shape of cos", "Pass tables of one shape.")
    shapes = {"positions": ((S,), (B, S)), "offset": ((B,),)}
    if not isinstance(offset, Tensor):
        how = -(2**63), 2**63 - 1, "an integer", "Pass a row of the tables."
        offset = check_integer(operator, "offset", offset, *how)
    if positions is not None and not isinstance(positions, Tensor):
        takes, do = "a tensor of integers, or None", "Pass rows of the tables."
        refuse(operator, "positions", described(positions), takes, do, TypeError)
    for name, x in (("positions", positions), ("offset", offset)):
        if not isinstance(x, Tensor):
            continue
        check_on(operator, name, x, device)
        if (
            x.is_floating_point()
            or x.dtype == torch.bool
            or not any(matches(x.shape, shape) for shape in shapes[name])
        ):
            takes = " or ".join(str(list(shape)) for shape in shapes[name])
            refuse(
                operator,
                name,
                f"{x.dtype} of shape {list(x.shape)}",
                f"integers of shape {takes}",
                "Pass rows of the tables, as torch.arange gives them.",
            )
    if isinstance(offset, Tensor) and positions is not None:
        refuse(operator, "offset", "a tensor", "a number beside positions", "Add it to positions.")
    rows, do = cos.shape[0], "Make longer tables: flashproto.nn.rope_tables."
    if rows < (S if positions is None else min(S, 1)):
        at = "" if isinstance(offset, Tensor) else f" where offset is {offset}"
        refuse(operator, "cos", f"of {rows} rows{at}", f"a row for each of {S} tokens", do)
    if positions is None and not isinstance(offset, Tensor) and S and not 0 <= offset <= rows - S:
        takes = f"0 to {rows - S}, for {S} tokens and tables of {rows} rows"
        refuse(operator, "offset", offset, takes, do)
    return offset


def check_table_rows(operator: str, length: int, S: int, positions: Any, offset: Any) -> None:
    """Check, where values can be read, that the tables have a row for every position."""
    name, x = ("positions", positions) if isinstance(positions, Tensor) else ("offset", offset)
    if not isinstance(x, Tensor) or not S or not is_readable(x):
        return
    first, last = (offset, 0) if name == "positions" else (0, S - 1)
    low, high = -first, length - 1 - first - last
    takes = f"rows from {low} to {high}, for tables of {length} rows"
    check_values(operator, name, x, (x < low) | (x > high), takes, "Make longer tables.")
