"""The k largest of a softmax over the last dimension: the operator's recipes.

Legend: x, dx [..., N], seen as [M, N]; values, indices, dvalues [..., k]; states [2, ...] float32, the
rows' m and l.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch

from .. import configs
from ..kernels.softmax_topk import (
    softmax_topk_backward_kernel,
    softmax_topk_join_kernel,
    softmax_topk_kernel,
    softmax_topk_split_kernel,
)
from .call import Operator
from .device import cdiv
from .recipe import New, Recipe
from .rows import tile_of

MAX_K = 64


class Settings(NamedTuple):
    """dtype: that of the values."""

    k: int
    renormalize: bool
    dtype: torch.dtype


def makes(settings: Settings, x: Any) -> tuple[New, New, New]:
    shape = (*x.shape[:-1], settings.k)
    return (
        New.contiguous(shape, settings.dtype, x.device),
        New.contiguous(shape, torch.int64, x.device),
        New.contiguous((2, *x.shape[:-1]), torch.float32, x.device),
    )


def forward(recipe: Recipe, settings: Settings, inputs, outputs) -> None:
    (x,), k = inputs, settings.k
    if x.numel() == 0:
        return
    outputs = [
        recipe.make(new) if made is None else made
        for made, new in zip(outputs, makes(settings, x), strict=True)
    ]
    x = x.rows()
    M, N = x.shape
    KP = configs.power_of_two(k)
    config, renormalize = configs.softmax_topk(N, x.element_size(), k), settings.renormalize
    if not config.split:
        whole = x.stride(0), M, N, k, renormalize
        options = {"R": config.rows, "W": config.block, "PART": config.part, "SORT": config.sort}
        programs, tile = cdiv(M, config.rows), tile_of(config)
        recipe.launch(softmax_topk_kernel, programs, x, *outputs, *whole, KP=KP, **options, **tile)
        return
    span = configs.softmax_topk_span(N, k)
    splits = cdiv(N, span)
    keys = recipe.make(New.contiguous((M, splits, k), torch.int64, x.device))
    words = recipe.make(New.contiguous((M, splits), torch.int64, x.device))
    tensors, numbers = (x, keys, words), (x.stride(0), M, N, k)
    options = {"SPAN": span, "KP": KP, **tile_of(config)}
    recipe.launch(softmax_topk_split_kernel, M * splits, *tensors, *numbers, **options)
    config = configs.softmax_topk_join(splits, k)
    lanes = configs.power_of_two(splits)
    options = {"LANES": lanes, "KP": KP, "SORT": config.sort, **tile_of(config)}
    joined = M, k, splits, renormalize
    recipe.launch(softmax_topk_join_kernel, M, *tensors, *outputs, *joined, **options)


def saves(settings: Settings, inputs: list[Any], outputs: list[Any]) -> list[Any]:
    _, indices, states = outputs
    return [indices, *inputs, states]


def gradients(settings: Settings, grads, saved, needs) -> tuple[New]:
    _, x, _ = saved
    return (New.contiguous(x.shape, x.dtype, x.device),)


def backward(recipe: Recipe, settings: Settings, grads, saved, made) -> None:
    (dvalues,), (indices, x, states), (dx,), k = grads, saved, made, settings.k
    if dx.numel() == 0:
        return
    x = x.rows()
    M, N = x.shape
    config = configs.softmax_topk_backward(N, x.element_size())
    programs = cdiv(M, config.rows) * cdiv(N, config.columns)
    tensors = dvalues.contiguous(), indices.contiguous(), x, states.contiguous(), dx
    numbers = x.stride(0), M, N, k, settings.renormalize
    options = {"R": config.rows, "KP": configs.power_of_two(k), **tile_of(config)}
    recipe.launch(softmax_topk_backward_kernel, programs, *tensors, *numbers, **options)


softmax_topk = Operator(
    "softmax_topk",
    inputs="x",
    outputs=3,
    settings=Settings,
    makes=makes,
    forward=forward,
    saved="indices, x, states",
    saves=saves,
    gradients=gradients,
    backward=backward,
)
