"""Merging attention in parts: the operator's recipes.

Legend: states: outs [..., D] of parts, then as many lses [...], of any strides; or one tensor of each,
stacked [n, ..., D] and [n, ...].  out [..., D] and lse [...] are those of all keys.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch

from .. import configs
from ..kernels.attention_merge import Rows, merge_parts_backward_kernel, merge_parts_kernel
from .call import Operator
from .device import cdiv
from .recipe import New, Operand, Recipe, contiguous_strides
from .rope import unit_columns

DIMENSIONS = 3  # in which kernels count rows


class Settings(NamedTuple):
    """stacked: whether the parts are in one tensor.  dtype: of out."""

    stacked: bool
    dtype: torch.dtype


# --- rows in memory --------------------------------------------------------------------------------


def parts_of(settings: Settings, states: Sequence[Any], n: int = 0) -> tuple[list[Any], list[Any]]:
    """(outs, lses) of the states, or of their gradients, of which some are None, of n parts."""
    if settings.stacked:
        n = n or states[0].shape[0]
        states = [None if x is None else x.select(0, i) for x in states for i in range(n)]
    half = len(states) // 2
    return list(states[:half]), list(states[half:])


def lying_like(x: Any, dtype: torch.dtype, columns: int) -> New:
    """Memory of x's shape, in which the last `columns` dimensions, 1 or 0, are contiguous, and rows are
    in the order that they have in x."""
    order = list(range(x.ndim - columns))
    if len(order) <= DIMENSIONS and all(x.stride(d) > 0 for d in order):
        order.sort(key=lambda d: -x.stride(d))
    order += range(x.ndim - columns, x.ndim)
    dense = contiguous_strides([x.shape[d] for d in order])
    strides = tuple(dense[order.index(d)] for d in range(x.ndim))
    return New(tuple(x.shape), strides, dtype, x.device)


def together(
    lead: Sequence[int], strides: Sequence[Sequence[int]]
) -> tuple[list[int], list[list[int]]]:
    """(sizes, strides of each tensor) of rows [*lead], in as few dimensions as all tensors allow.

    The order is that of the first tensor in memory.
    """
    order = sorted((d for d, n in enumerate(lead) if n != 1), key=lambda d: -strides[0][d])
    sizes: list[int] = []
    found: list[list[int]] = [[] for _ in strides]
    for d in order:
        if sizes and all(own[-1] == x[d] * lead[d] for own, x in zip(found, strides, strict=True)):
            sizes[-1] *= lead[d]
            found = [[*own[:-1], x[d]] for own, x in zip(found, strides, strict=True)]
        else:
            sizes.append(lead[d])
            found = [[*own, x[d]] for own, x in zip(found, strides, strict=True)]
    return sizes, found


def launch(
    recipe: Recipe,
    kernel: Any,
    wide: Sequence[Operand | None],
    narrow: Sequence[Operand | None],
    arguments: Callable[[list[Any], list[Any]], Sequence[Any]],
    **constants: Any,
) -> None:
    """Launch a kernel for tensors [..., D] and [...], the first of which is given.

    arguments: of the Rows of both, those of the kernel in front of the number of rows.
    """
    wide = [None if x is None else unit_columns(x) for x in wide]
    given = [x for x in (*wide, *narrow) if x is not None]
    *lead, D = given[0].shape
    if 0 in lead:
        return
    sizes, strides = together(lead, [x.stride() for x in given])
    if len(sizes) > DIMENSIONS:  # all that is made is contiguous then, see lying_like
        given = [x.contiguous() for x in given]
        sizes, strides = together(lead, [x.stride() for x in given])
    fill = DIMENSIONS - len(sizes)
    rows = iter([Rows(x, *own, *[0] * fill) for x, own in zip(given, strides, strict=True)])
    of_wide, of_narrow = ([None if x is None else next(rows) for x in xs] for xs in (wide, narrow))
    aligned = all(is_aligned(x) for x in of_wide if x is not None)
    itemsize = max(x.element_size() for x in wide if x is not None)
    config = configs.merge_parts(D, itemsize, aligned)
    recipe.launch(
        kernel,
        cdiv(math.prod(lead), config.rows),
        *arguments(of_wide, of_narrow),
        math.prod(lead),
        *[*sizes, *[1] * fill][1:],
        D=D,
        BLOCK_D=config.columns,
        ROWS=config.rows,
        ALIGNED=aligned,
        num_warps=config.num_warps,
        **constants,
    )


def is_aligned(rows: Rows) -> bool:
    """Whether each begins at a multiple of 16 bytes."""
    x, *strides = rows
    return x.aligned and not any(n * x.element_size() % 16 for n in strides)


# --- recipes ----------------------------------------------------------------------------------------


def makes(settings: Settings, *states: Any) -> tuple[New, New]:
    outs, lses = parts_of(settings, states)
    return lying_like(outs[0], settings.dtype, 1), lying_like(lses[0], torch.float32, 0)


def forward(recipe: Recipe, settings: Settings, states: Any, outputs: Any) -> None:
    outs, lses = parts_of(settings, states)
    out, lse = outputs

    def arguments(wide: list[Any], narrow: list[Any]) -> Sequence[Any]:
        return tuple(wide[:-1]), tuple(narrow[:-1]), wide[-1], narrow[-1]

    launch(recipe, merge_parts_kernel, [*outs, out], [*lses, lse], arguments)


def saves(settings: Settings, states: Any, outputs: Any) -> Sequence[Any]:
    return states


def gradients(settings: Settings, grads: Any, states: Any, needs: Sequence[bool]) -> list[New | None]:
    """Without a gradient of out there is none of outs."""
    half = len(states) // 2
    return [
        lying_like(x, x.dtype, int(i < half)) if need and (i >= half or grads[0] is not None) else None
        for i, (x, need) in enumerate(zip(states, needs, strict=True))
    ]


def backward(recipe: Recipe, settings: Settings, grads: Any, states: Any, made: Any) -> None:
    outs, lses = parts_of(settings, states)
    douts, dlses = parts_of(settings, made, len(outs))
    n = len(outs)

    def arguments(wide: list[Any], narrow: list[Any]) -> Sequence[Any]:
        parts = (tuple(x[i : i + n]) for i in (0, n) for x in (wide, narrow))
        return wide[-1], narrow[-1], *parts

    dout, dlse = grads
    if any(x is not None for x in made):
        asked = any(x is not None for x in dlses)
        launch(
            recipe,
            merge_parts_backward_kernel,
            [*outs, *douts, dout],
            [*lses, *dlses, dlse],
            arguments,
            LSES=asked,
        )


attention_merge = Operator(
    "attention_merge",
    inputs="*states",
    outputs=2,
    settings=Settings,
    makes=makes,
    forward=forward,
    saved="*states",
    saves=saves,
    gradients=gradients,
    backward=backward,
    differentiable=2,
)
