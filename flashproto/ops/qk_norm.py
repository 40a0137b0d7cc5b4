"""QK norm with rotary embedding: the operators' recipes.

Legend: ops/rope.py; q_weight, k_weight [D]; without cos and sin nothing is rotated.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from torch import float32

from .. import configs
from ..kernels.qk_norm import qk_norm_backward_kernel, qk_norm_forward_kernel
from .attention import split_heads
from .call import Gradient, Operator
from .column_sums import column_sums
from .device import multiprocessors
from .recipe import New, Operand, Recipe
from .rope import (
    Heads,
    groups_of,
    heads_in,
    heads_like,
    packed_like,
    strides_of,
    table_strides,
    unit_columns,
    zeros_for_none,
)
from .rows import needed_like


class Settings(NamedTuple):
    """offset, count_up: see Rows."""

    offset: int
    count_up: bool
    interleaved: bool
    eps: float
    casting: str


class PackedSettings(NamedTuple):
    q_heads: int
    k_heads: int
    offset: int
    count_up: bool
    interleaved: bool
    eps: float
    casting: str

    @property
    def of_heads(self) -> Settings:
        return Settings(*self[2:])


# --- launches ---------------------------------------------------------------------------------------

Others = Sequence[Operand | None]
"""q_weight, k_weight, cos, sin, positions."""


def arguments(others: Others, D: int) -> tuple[list[Operand | None], int, int]:
    """(the others as kernels take them, rotary_dim, rows of the tables); without tables the pairs are
    those of the whole head."""
    q_weight, k_weight, cos, sin, positions = others
    weights = [None if w is None else w.contiguous() for w in (q_weight, k_weight)]
    if cos is None or sin is None:
        return [*weights, None, None, positions], D - D % 2, 0
    tables = unit_columns(cos), unit_columns(sin)
    return [*weights, *tables, positions], 2 * cos.shape[1], cos.shape[0]


def launch_forward(
    recipe: Recipe, settings: Settings, inputs: Heads, outputs: Heads, others: Others
) -> None:
    """Normalize and rotate q and k, copy v: of `inputs` to `outputs`."""
    q, k, v = inputs
    assert q is not None
    B, q_heads, S, D = q.shape
    k_heads = 0 if k is None else k.shape[1]
    given, rotary_dim, length = arguments(others, D)
    config = configs.heads(D, rotary_dim, S, max(q_heads, k_heads), q.element_size())
    programs = groups_of(config, B, S, q_heads, k_heads, 0 if v is None else k_heads)
    if programs == 0 or D == 0:
        return
    recipe.launch(
        qk_norm_forward_kernel, programs,
        *inputs, *given, *outputs, *strides_of(*inputs, *outputs), *table_strides(*given[2:]),
        S, q_heads, k_heads, settings.offset, length, settings.eps,
        D=D, HALF=rotary_dim // 2, INTERLEAVED=settings.interleaved, COUNT=settings.count_up,
        CASTING=settings.casting, T=config.tokens, H=config.heads, STEPS=config.steps, C=config.pairs,
        REST=config.rest, WHOLE=config.whole, num_warps=config.num_warps,
    )  # fmt: skip


def launch_backward(
    recipe: Recipe,
    settings: Settings,
    grads: Heads,
    inputs: tuple[Operand, Operand | None],
    outputs: Heads,
    others: Others,
    weights: Sequence[Operand | None],
) -> None:
    """Write the gradients of q, k and v into `outputs`, from those of the results, `grads`, and make
    those of the weights that are wanted; v is None or copied."""
    q, k = inputs
    B, q_heads, S, D = q.shape
    k_heads = 0 if k is None else k.shape[1]
    given, rotary_dim, length = arguments(others, D)
    config = configs.qk_norm_backward(D, rotary_dim, S, max(q_heads, k_heads), q.element_size())
    tiles = groups_of(config, B, S, max(q_heads, k_heads))
    if tiles == 0 or D == 0:
        for weight in weights:
            if weight is not None:
                weight.zero_()
        return
    P = min(tiles, config.programs * multiprocessors(q.device))
    partials = [
        None if w is None else recipe.make(New.contiguous((P, D), float32, q.device)) for w in weights
    ]
    recipe.launch(
        qk_norm_backward_kernel, P,
        *grads, q, k, *given, *outputs, *partials, *strides_of(*grads, q, k, *outputs),
        *table_strides(*given[2:]), B, S, q_heads, k_heads, settings.offset, length, settings.eps,
        D=D, HALF=rotary_dim // 2, INTERLEAVED=settings.interleaved, COUNT=settings.count_up,
        CASTING=settings.casting, T=config.tokens, H=config.heads, C=config.pairs, REST=config.rest,
        WHOLE=config.whole, num_warps=config.num_warps,
    )  # fmt: skip
    column_sums(recipe, (partials[0], partials[1]), (weights[0], weights[1]))


# --- the operators ----------------------------------------------------------------------------------


def makes(settings: Settings, q: Any, k: Any, *others: Any) -> list[New | None]:
    """q and k, in memory laid out as q and k are."""
    return [heads_like(q), None if k is None else heads_like(k)]


def forward(recipe: Recipe, settings: Settings, inputs: Any, outputs: Any) -> None:
    (q, k, *others), (q_out, k_out) = inputs, outputs
    given = unit_columns(q), None if k is None else unit_columns(k), None
    launch_forward(recipe, settings, given, (q_out, k_out, None), others)


def saves(settings: Any, inputs: Any, outputs: Any) -> list[Any]:
    return list(inputs)


def gradients(settings: Settings, grads: Any, saved: Any, needs: Any) -> list[Gradient]:
    q, k, *weights = saved[:4]
    heads = [heads_like(q), None if k is None else heads_like(k)]
    return [*heads, *needed_like(weights, needs[2:4]), None, None, None]


def backward(recipe: Recipe, settings: Settings, grads: Any, saved: Any, made: Any) -> None:
    (q, k, *others), (dq, dk, *weights) = saved, made[:4]
    if k is None:
        (given,) = zeros_for_none(recipe, grads[:1], [heads_like(q)])
        heads: Heads = given, None, None
    else:
        given, given_k = zeros_for_none(recipe, grads, [heads_like(q), heads_like(k)])
        heads = given, given_k, None
    inputs = unit_columns(q), None if k is None else unit_columns(k)
    launch_backward(recipe, settings, heads, inputs, (dq, dk, None), others, weights)


OTHERS = "q_weight?, k_weight?, cos?, sin?, positions?"

qk_norm = Operator(
    "qk_norm",
    inputs=f"q, k?, {OTHERS}",
    outputs=2,
    settings=Settings,
    makes=makes,
    forward=forward,
    saved=f"q, k?, {OTHERS}",
    saves=saves,
    gradients=gradients,
    backward=backward,
    differentiable=2,
)


def makes_packed(settings: PackedSettings, qkv: Any, *others: Any) -> list[New]:
    return heads_in(qkv, *settings[:2])


def forward_packed(recipe: Recipe, settings: PackedSettings, inputs: Any, outputs: Any) -> None:
    qkv, *others = inputs
    heads = split_heads(unit_columns(qkv), *settings[:2])
    launch_forward(recipe, settings.of_heads, heads, outputs, others)


def gradients_packed(settings: PackedSettings, grads: Any, saved: Any, needs: Any) -> list[Gradient]:
    weights = needed_like(saved[1:3], needs[1:3])
    return [packed_like(grads, *settings[:2]), *weights, None, None, None]


def backward_packed(
    recipe: Recipe, settings: PackedSettings, grads: Any, saved: Any, made: Any
) -> None:
    (qkv, *others), (dqkv, *weights), counts = saved, made[:3], settings[:2]
    dq, dk, dv = zeros_for_none(recipe, grads, heads_in(dqkv, *counts))
    q, k, _ = split_heads(unit_columns(qkv), *counts)
    outputs = split_heads(dqkv, *counts)
    launch_backward(recipe, settings.of_heads, (dq, dk, dv), (q, k), outputs, others, weights)


qk_norm_packed = Operator(
    "qk_norm_packed",
    inputs=f"qkv, {OTHERS}",
    outputs=3,
    settings=PackedSettings,
    makes=makes_packed,
    forward=forward_packed,
    saved=f"qkv, {OTHERS}",
    saves=saves,
    gradients=gradients_packed,
    backward=backward_packed,
    differentiable=3,
)
