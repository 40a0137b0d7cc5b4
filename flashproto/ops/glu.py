"""Gated linear units: the operator's recipes.

Legend: gate, up, y, dy [..., N]; with `halves` gate is x [..., 2N], whose halves are gate and up, and
its gradient is one tensor [..., 2N].
"""

from __future__ import annotations

from typing import Any, NamedTuple

from .. import configs
from ..kernels.glu import glu_backward_kernel, glu_forward_kernel
from .call import Operator
from .device import cdiv
from .recipe import New, Operand, Recipe
from .rows import needed_like


class Settings(NamedTuple):
    activation: str
    halves: bool


def makes(settings: Settings, gate: Any, up: Any) -> tuple[New]:
    shape = (*gate.shape[:-1], gate.shape[-1] // 2) if settings.halves else gate.shape
    return (New.contiguous(shape, gate.dtype, gate.device),)


def forward(recipe: Recipe, settings: Settings, inputs: list[Operand], outputs: list[Operand]) -> None:
    (gate, up), (y,) = inputs, outputs
    if y.numel() > 0:
        gate, up, y = one_row(*parts_of(gate, up, settings.halves), y)
        strides = gate.stride(0), 0 if up is None else up.stride(0)
        launch(recipe, glu_forward_kernel, gate, (gate, up, y, *strides), settings)


def saves(settings: Settings, inputs: list[Any], outputs: list[Any]) -> list[Any]:
    return inputs


def gradients(settings, grads, saved, needs) -> list[New | None]:
    return needed_like(saved, needs)


def backward(recipe: Recipe, settings: Settings, grads, saved, made) -> None:
    (dy,), (gate, up), (dgate, dup) = grads, saved, made
    if dy.numel() == 0 or (dgate is None and dup is None):
        return
    inputs, halves = parts_of(gate, up, settings.halves), settings.halves
    outputs = parts_of(dgate, None, True) if halves else (dgate and dgate.rows(), dup and dup.rows())
    dy, gate, up, dgate, dup = tensors = one_row(dy.rows(), *inputs, *outputs)
    strides = (
        dy.stride(0),
        gate.stride(0),
        0 if up is None else up.stride(0),
        (dup if dgate is None else dgate).stride(0),
    )
    launch(recipe, glu_backward_kernel, gate, (*tensors, *strides), settings)


def parts_of(gate: Operand, up: Operand | None, halves: bool) -> tuple[Operand, Operand | None]:
    """(gate, up) [M, N] of unit column stride."""
    if not halves:
        return gate.rows(), None if up is None else up.rows()
    x = gate.rows()
    N = x.shape[1] // 2
    return x.narrow(1, 0, N), x.narrow(1, N, N)


def one_row(*matrices: Operand | None) -> Any:
    """The matrices, each as one row where all of them are contiguous."""
    if all(x is None or x.is_contiguous() for x in matrices):
        return [None if x is None else x.reshape(1, x.numel()) for x in matrices]
    return matrices


def launch(
    recipe: Recipe, kernel: Any, like: Operand, arguments: tuple[Any, ...], settings: Settings
) -> None:
    """The launch of a kernel that goes over matrices like this one by tiles."""
    M, N = like.shape
    config = configs.glu(N, like.element_size())
    programs = cdiv(M, config.rows) * cdiv(N, config.columns)
    tile = {"R": config.rows, "C": config.columns, "num_warps": config.num_warps}
    recipe.launch(kernel, programs, *arguments, M, N, ACT=settings.activation, **tile)


glu = Operator(
    "glu",
    inputs="gate, up?",
    outputs=1,
    settings=Settings,
    makes=makes,
    forward=forward,
    saved="gate, up?",
    saves=saves,
    gradients=gradients,
    backward=backward,
)
