"""Rotary position embedding of x [B, H, S, D]."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from .states import compute_dtype


def table_rows(S: int, positions: Tensor | None, offset: int | Tensor, like: Tensor) -> Tensor:
    """Row of the tables for every token, [S] or [B, S]: offset + s, or offset + positions; a tensor as
    `like`, a DTensor say."""
    rows = like.new_ones(S, dtype=torch.int64).cumsum(0) - 1 if positions is None else positions
    return rows + (offset[:, None] if isinstance(offset, Tensor) else offset)


def rope(
    x: Tensor,
    cos: Tensor,
    sin: Tensor,
    positions: Tensor | None = None,
    offset: int | Tensor = 0,
    *,
    interleaved: bool = False,
) -> Tensor:
    """Turn the pairs of the first 2 R dimensions of x by the angles of cos, sin [length, R].

    Pair i is (i, i + R), or (2i, 2i + 1) if interleaved; positions [S] or [B, S], offset a number or
    [B].  Computed in at least float32; returned in x's dtype.  NaN for rows that the tables have not.
    """
    dtype = compute_dtype(x.dtype)
    half = cos.shape[-1]
    rows = table_rows(x.shape[2], positions, offset, cos)
    known = (rows >= 0) & (rows < cos.shape[0])
    rows, unknown = torch.where(known, rows, 0), ~known[..., None]
    c, s = (t.to(dtype)[rows].masked_fill(unknown, math.nan) for t in (cos, sin))  # [S, R] or [B, S, R]
    if c.ndim == 3:
        c, s = c[:, None], s[:, None]
    turned, rest = x.to(dtype).split([2 * half, x.shape[-1] - 2 * half], -1)
    if interleaved:
        x1, x2 = turned.unflatten(-1, (half, 2)).unbind(-1)
    else:
        x1, x2 = turned.chunk(2, -1)
    pair = (x1 * c - x2 * s, x2 * c + x1 * s)
    turned = torch.stack(pair, -1).flatten(-2) if interleaved else torch.cat(pair, -1)
    return torch.cat((turned, rest), -1).to(x.dtype)


def split_heads(qkv: Tensor, n_heads: int, n_kv_heads: int) -> tuple[Tensor, Tensor, Tensor]:
    """q [B, n_heads, S, D], k and v [B, n_kv_heads, S, D] of qkv [B, S, (n_heads + 2 n_kv_heads) D]."""
    heads = (n_heads, n_kv_heads, n_kv_heads)
    q, k, v = qkv.unflatten(-1, (sum(heads), -1)).transpose(1, 2).split(heads, 1)
    return q, k, v
