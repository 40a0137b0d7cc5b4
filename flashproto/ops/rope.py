"""Rotary position embedding: the operators' recipes.

Legend: q [B, Hq, S, D], k, v [B, Hkv, S, D]; qkv [B, S, (Hq + 2 Hkv) D], every token's heads of q, k
and v side by side; cos, sin [length, R], 2 R the dimensions that are rotated.  positions and Rows say
which rows of the tables are used.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .. import configs
from ..configs import HeadConfig
from ..kernels.rope import rope_kernel
from .attention import split_heads
from .call import Gradient, Operator, steps
from .device import cdiv
from .library import kernel_op
from .recipe import New, Operand, Recipe

Heads = tuple[Operand | None, Operand | None, Operand | None]
"""q, k and v, None for one that is not there."""


class Rows(NamedTuple):
    """Token s of sequence b has row offset + s of the tables, or offset + positions[b, s], or if
    `count_up` offset + positions[b, 0] + s; a positions of one row or column serves all."""

    offset: int
    count_up: bool


class Settings(NamedTuple):
    """Rows, and: inverse, whether to rotate back."""

    offset: int
    count_up: bool
    interleaved: bool
    inverse: bool = False

    @property
    def rows(self) -> Rows:
        return Rows(self.offset, self.count_up)


class PackedSettings(NamedTuple):
    q_heads: int
    k_heads: int
    offset: int
    count_up: bool
    interleaved: bool

    @property
    def rows(self) -> Rows:
        return Rows(self.offset, self.count_up)


# --- heads in memory -------------------------------------------------------------------------------


def heads_like(x: Any) -> New:
    """Memory of x's shape [B, H, S, D], heads or tokens first as in x."""
    B, H, S, D = x.shape
    if x.stride(1) < x.stride(2):
        return New((B, H, S, D), (S * H * D, D, H * D, 1), x.dtype, x.device)
    return New.contiguous(x.shape, x.dtype, x.device)


def heads_in(qkv: Any, q_heads: int, k_heads: int) -> list[New]:
    """q, k and v, each in memory of its own, tokens first."""
    B, S, width = qkv.shape
    D = width // (q_heads + 2 * k_heads)
    return [
        New((B, H, S, D), (S * H * D, D, H * D, 1), qkv.dtype, qkv.device)
        for H in (q_heads, k_heads, k_heads)
    ]


def packed_like(grads: Sequence[Any], q_heads: int, k_heads: int) -> New:
    """The gradient of qkv from the gradients of its heads; None for heads that have none."""
    x = next(g for g in grads if g is not None)
    B, _, S, D = x.shape
    return New.contiguous((B, S, (q_heads + 2 * k_heads) * D), x.dtype, x.device)


def zeros_for_none(recipe: Recipe, grads: Sequence[Any], like: Sequence[New]) -> list[Operand]:
    """The gradients, unit_columns; zeros for one that is None."""
    return [
        recipe.make(new).zero_() if g is None else unit_columns(g)
        for g, new in zip(grads, like, strict=True)
    ]


def unit_columns(x: Operand) -> Operand:
    return x if x.stride(-1) == 1 or x.shape[-1] == 1 else x.contiguous()


def strides_of(*tensors: Operand | None) -> list[int]:
    """The strides over batch, heads and tokens of each, zeros for None."""
    return [n for t in tensors for n in ((0, 0, 0) if t is None else t.stride()[:3])]


def table_strides(cos: Operand | None, sin: Operand | None, positions: Operand | None) -> list[int]:
    """Row strides of cos and sin, and strides of positions over batch and tokens, 0 along one of 1."""
    over = [0, 0]
    if positions is not None:
        over = [0 if n == 1 else m for n, m in zip(positions.shape, positions.stride(), strict=True)]
    return [*(0 if t is None else t.stride(0) for t in (cos, sin)), *over]


def groups_of(config: HeadConfig, B: int, S: int, *heads: int) -> int:
    """How many groups of tiles there are of tensors with so many heads each."""
    return B * cdiv(S, config.tokens) * sum(cdiv(n, config.heads * config.steps) for n in heads)


# --- recipes ----------------------------------------------------------------------------------------


def launch(
    recipe: Recipe,
    inputs: Heads,
    outputs: Heads,
    tables: Sequence[Operand | None],
    rows: Rows,
    interleaved: bool,
    inverse: bool,
) -> None:
    """Rotate q and k, copy v: of `inputs` to `outputs`, all of unit column stride; tables: cos, sin,
    positions."""
    cos, sin, positions = tables
    q, k, v = inputs
    assert q is not None and cos is not None and sin is not None
    B, q_heads, S, D = q.shape
    k_heads = 0 if k is None else k.shape[1]
    cos, sin = unit_columns(cos), unit_columns(sin)
    rotary_dim = 2 * cos.shape[1]
    config = configs.heads(D, rotary_dim, S, max(q_heads, k_heads), q.element_size())
    programs = groups_of(config, B, S, q_heads, k_heads, 0 if v is None else k_heads)
    if programs == 0 or D == 0:
        return
    recipe.launch(
        rope_kernel, programs,
        q, k, v, cos, sin, positions, *outputs, *strides_of(*inputs, *outputs),
        *table_strides(cos, sin, positions), S, q_heads, k_heads, rows.offset, cos.shape[0],
        D=D, HALF=rotary_dim // 2, INTERLEAVED=interleaved, INVERSE=inverse, COUNT=rows.count_up,
        T=config.tokens, H=config.heads, STEPS=config.steps, C=config.pairs, REST=config.rest,
        WHOLE=config.whole, num_warps=config.num_warps,
    )  # fmt: skip


def makes(settings: Settings, q: Any, k: Any, cos: Any, sin: Any, positions: Any) -> list[New | None]:
    """q and k, in memory laid out as q and k are."""
    return [heads_like(q), None if k is None else heads_like(k)]


def forward(recipe: Recipe, settings: Settings, inputs: Any, outputs: Any) -> None:
    q, k, *tables = inputs
    rotate(recipe, settings, (q, k), outputs, tables, settings.inverse)


def rotate(
    recipe: Recipe, settings: Settings, given: Any, made: Any, tables: Any, inverse: bool
) -> None:
    """The one or two that are given and wanted."""
    pairs = [
        (unit_columns(x), y)
        for x, y in zip(given, made, strict=True)
        if x is not None and y is not None
    ]
    if pairs:
        (q, k), (q_out, k_out) = (([*x, None])[:2] for x in zip(*pairs, strict=True))
        sources, results = (q, k, None), (q_out, k_out, None)
        launch(recipe, sources, results, tables, settings.rows, settings.interleaved, inverse)


def saves(settings: Any, inputs: Any, outputs: Any) -> list[Any]:
    """The tables alone."""
    return list(inputs[-3:])


def gradients(settings: Settings, grads: Any, saved: Any, needs: Any) -> list[Gradient]:
    dq, dk = (
        heads_like(g) if g is not None and need else None
        for g, need in zip(grads, needs[:2], strict=True)
    )
    return [dq, dk, None, None, None]


def backward(recipe: Recipe, settings: Settings, grads: Any, saved: Any, made: Any) -> None:
    rotate(recipe, settings, grads, made[:2], saved, not settings.inverse)


def rotate_back(settings: Settings, grads: Any, saved: Any) -> tuple[Tensor | None, ...]:
    """The backward as calls of rope, which is linear."""
    back, (dq, dk) = settings._replace(inverse=not settings.inverse), grads
    if dq is None:
        return None, rope((dk, None, *saved), back), None, None, None
    if dk is None:
        return rope((dq, None, *saved), back), None, None, None, None
    return *rope((dq, dk, *saved), back, (0, 1)), None, None, None


rope = Operator(
    "rope",
    inputs="q, k?, cos, sin, positions?",
    outputs=2,
    settings=Settings,
    makes=makes,
    forward=forward,
    saved="cos, sin, positions?",
    saves=saves,
    gradients=gradients,
    backward=backward,
    differentiable=2,
    again=rotate_back,
)


# --- a fused projection -----------------------------------------------------------------------------


def makes_packed(settings: PackedSettings, qkv: Any, *tables: Any) -> list[New]:
    return heads_in(qkv, settings.q_heads, settings.k_heads)


def forward_packed(recipe: Recipe, settings: PackedSettings, inputs: Any, outputs: Any) -> None:
    qkv, *tables = inputs
    q, k, v = split_heads(unit_columns(qkv), *settings[:2])
    launch(recipe, (q, k, v), outputs, tables, settings.rows, settings.interleaved, False)


def gradients_packed(settings: PackedSettings, grads: Any, saved: Any, needs: Any) -> list[Gradient]:
    return [packed_like(grads, *settings[:2]) if needs[0] else None, None, None, None]


def backward_packed(
    recipe: Recipe, settings: PackedSettings, grads: Any, saved: Any, made: Any
) -> None:
    dqkv, counts = made[0], settings[:2]
    if dqkv is not None:
        dq, dk, dv = zeros_for_none(recipe, grads, heads_in(dqkv, *counts))
        outputs = split_heads(dqkv, *counts)
        launch(recipe, (dq, dk, dv), outputs, saved, settings.rows, settings.interleaved, True)


rope_packed = Operator(
    "rope_packed",
    inputs="qkv, cos, sin, positions?",
    outputs=3,
    settings=PackedSettings,
    makes=makes_packed,
    forward=forward_packed,
    saved="cos, sin, positions?",
    saves=saves,
    gradients=gradients_packed,
    backward=backward_packed,
    differentiable=3,
)


# --- in place ---------------------------------------------------------------------------------------


def rotate_in_place(
    q: Tensor,
    k: Tensor | None,
    cos: Tensor,
    sin: Tensor,
    positions: Tensor | None,
    offset: int,
    count_up: bool,
    interleaved: bool,
) -> None:
    """Rotate q and k where they are; they carry no gradient."""
    steps(_rotate_in_place, [q, k, cos, sin, positions], (offset, count_up, interleaved))


def _rotate_in_place(recipe, tensors, offset, count_up, interleaved):
    q, k, *tables = tensors
    rotated = [None if x is None else unit_columns(x) for x in (q, k)]
    heads = rotated[0], rotated[1], None
    launch(recipe, heads, heads, tables, Rows(offset, count_up), interleaved, False)
    for x, y in zip((q, k), rotated, strict=True):
        if y is not x:
            recipe.compute(torch.Tensor.copy_, x, y)


rope_inplace_op = kernel_op(
    "rope_",
    rotate_in_place,
    "(Tensor(a!) q, Tensor(b!)? k, Tensor cos, Tensor sin, Tensor? positions, SymInt offset, "
    "bool count_up, bool interleaved) -> ()",
    lambda *_: None,
    mutates_args=("q", "k"),
)
