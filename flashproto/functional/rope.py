"""Rotary position embedding: the public functions."""

from __future__ import annotations

from collections.abc import Iterator
from typing import overload

import torch
from torch import Tensor

from .. import backends, reference
from ..backends import Reason, float64_reasons, refuses_values
from ..checks.calls import told
from ..checks.errors import refuse
from ..checks.heads import check_heads_of, check_packed, check_table_rows, check_tables
from ..checks.options import check_flag

if backends.HAS_TRITON:
    from ..ops import rope as rope_op
    from ..ops.library import own_ops


@overload
def rope(
    q: Tensor,
    k: Tensor,
    cos: Tensor,
    sin: Tensor,
    *,
    positions: Tensor | None = ...,
    offset: int | Tensor = ...,
    interleaved: bool = ...,
    inplace: bool = ...,
    impl: str | None = ...,
) -> tuple[Tensor, Tensor]: ...
@overload
def rope(
    q: Tensor,
    k: None,
    cos: Tensor,
    sin: Tensor,
    *,
    positions: Tensor | None = ...,
    offset: int | Tensor = ...,
    interleaved: bool = ...,
    inplace: bool = ...,
    impl: str | None = ...,
) -> Tensor: ...
@told
def rope(
    q: Tensor,
    k: Tensor | None,
    cos: Tensor,
    sin: Tensor,
    *,
    positions: Tensor | None = None,
    offset: int | Tensor = 0,
    interleaved: bool = False,
    inplace: bool = False,
    impl: str | None = None,
) -> Tensor | tuple[Tensor, Tensor]:
    """Rotate pairs of dimensions of q and k by the angles of their positions, in one launch.

        y1 = x1 cos - x2 sin        y2 = x2 cos + x1 sin

    Args:
        q: [B, Hq, S, D], any floating dtype and strides: views of a fused projection are read as they
            are.
        k: [B, Hkv, S, D] of q's dtype, any number of heads; None for none.
        cos, sin: [length, R] with 2 R <= D, any floating dtype (float32 is right: nn.rope_tables);
            dimensions from 2 R on are left as they are.
        positions: integers [S] or [B, S], each token's row of the tables; None is 0 to S - 1.
        offset: added to it: a number, or integers [B], one a sequence (tokens that a cache holds).  A
            row that the tables do not have is refused where numbers say so.  Where tensors say so it
            gives NaN; on a CPU it raises, with the exceptions that cross_entropy makes for targets.
        interleaved: pair i is dimensions (2i, 2i + 1), as in GPT-J; otherwise (i, i + R), as in Llama.
        inplace: write into q and k, which must not need a gradient, and return them.
        impl: the backend by name; None chooses.

    Returns: (q, k) rotated, or q alone where k is None; of their shapes and dtypes, computed in
    float32 (float64 for float64).  Differentiable in q and k, as often as wanted; in cos and sin too
    on impl="reference", which is chosen where they need a gradient.
    Raises: TypeError, ValueError: an argument does not fit; BackendError: `impl` cannot run.
    Source: Su et al., "RoFormer" (2021), equation 34.

    Example:
        >>> q, k = torch.randn(2, 4, 8, 16), torch.randn(2, 2, 8, 16)
        >>> cos, sin = nn.rope_tables(32, 16)
        >>> q1, k1 = flashproto.rope(q, k, cos, sin)
        >>> last = flashproto.rope(q[:, :, -1:], None, cos, sin, offset=7)
        >>> torch.equal(last, q1[:, :, -1:])
        True
    """
    name = "rope"
    check_heads_of(name, q, k)
    B, _, S, D = q.shape
    offset = check_tables(name, B, S, D, q.device, cos, sin, positions, offset)
    interleaved = check_flag(name, "interleaved", interleaved)
    inplace = check_flag(name, "inplace", inplace)
    given = [q] if k is None else [q, k]
    if inplace and torch.is_grad_enabled() and any(t.requires_grad for t in given):
        refuse(name, "inplace", True, "False where q or k needs a gradient", "Pass inplace=False.")
    backend = choose_with_tables(name, impl, given, cos, sin)
    if refuses_values(impl, backend):
        check_table_rows(name, cos.shape[0], q.shape[2], positions, offset)
    if backend != "triton":
        out = [reference.rope(t, cos, sin, positions, offset, interleaved=interleaved) for t in given]
        if inplace:
            for t, rotated in zip(given, out, strict=True):
                t.copy_(rotated)
            out = given
    elif inplace:
        positions, rows = table_rows(positions, offset)
        own_ops().rope_(q, k, cos, sin, positions, *rows, interleaved)
        out = given
    else:
        positions, rows = table_rows(positions, offset)
        settings = rope_op.Settings(*rows, interleaved)
        returns = (0,) if k is None else (0, 1)
        return rope_op.rope((q, k, cos, sin, positions), settings, returns)
    return out[0] if len(out) == 1 else (out[0], out[1])


@told
def rope_qkv(
    qkv: Tensor,
    n_heads: int,
    n_kv_heads: int,
    cos: Tensor,
    sin: Tensor,
    *,
    positions: Tensor | None = None,
    offset: int | Tensor = 0,
    interleaved: bool = False,
    impl: str | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """q, k and v of a fused projection, q and k rotated, in one pass; the gradient of qkv is written
    once, where splitting would have three gradients put together.

    Args:
        qkv: [B, S, (n_heads + 2 n_kv_heads) D], the heads of q, then k, then v.
        n_heads, n_kv_heads: the numbers of query heads and of key heads.
        cos, sin, positions, offset, interleaved, impl: as in rope.

    Returns: q [B, n_heads, S, D], k and v [B, n_kv_heads, S, D] in memory of their own, so that qkv is
    not kept for the backward pass.
    Raises: what rope raises.

    Example:
        >>> qkv = torch.randn(2, 8, (4 + 2 * 2) * 16)
        >>> q, k, v = flashproto.rope_qkv(qkv, 4, 2, *nn.rope_tables(8, 16))
        >>> torch.equal(v, qkv[..., -2 * 16 :].view(2, 8, 2, 16).transpose(1, 2))
        True
    """
    name = "rope_qkv"
    n_heads, n_kv_heads, D = check_packed(name, qkv, n_heads, n_kv_heads)
    offset = check_tables(name, qkv.shape[0], qkv.shape[1], D, qkv.device, cos, sin, positions, offset)
    interleaved = check_flag(name, "interleaved", interleaved)
    backend = choose_with_tables(name, impl, [qkv], cos, sin)
    if refuses_values(impl, backend):
        check_table_rows(name, cos.shape[0], qkv.shape[1], positions, offset)
    if backend == "triton":
        positions, rows = table_rows(positions, offset)
        settings = rope_op.PackedSettings(n_heads, n_kv_heads, *rows, interleaved)
        return rope_op.rope_packed((qkv, cos, sin, positions), settings, (0, 1, 2))
    q, k, v = reference.split_heads(qkv, n_heads, n_kv_heads)
    q, k = (reference.rope(t, cos, sin, positions, offset, interleaved=interleaved) for t in (q, k))
    return q, k, v


def choose_with_tables(
    operator: str, impl: str | None, tensors: list[Tensor], cos: Tensor | None, sin: Tensor | None
) -> str:
    """backends.choose; the kernels give cos and sin no gradient."""
    learned = torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in (cos, sin))

    def reasons(backend: str) -> Iterator[Reason]:
        if backend == "triton" and learned:
            yield "cos or sin needs a gradient, and the kernels give them none"
        yield from float64_reasons(backend, tensors)

    tables = [] if cos is None or sin is None else [cos, sin]
    return backends.choose(operator, impl, [*tensors, *tables], reasons)


def table_rows(
    positions: Tensor | None, offset: int | Tensor
) -> tuple[Tensor | None, tuple[int, bool]]:
    """(positions, Rows of ops/rope.py): what the kernels know of positions and offset."""
    if isinstance(offset, Tensor):
        return offset[:, None], (0, True)
    if positions is not None and positions.ndim == 1:
        positions = positions[None]
    return positions, (offset, False)
