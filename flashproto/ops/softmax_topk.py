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
    config = configs.softmax_topk(N, x.element_size(), k)
    if not config.split:
        recipe.launch(
            softmax_topk_kernel,
            cdiv(M, config.rows),
            x,
            *outputs,
            x.stride(0),
            M,
            N,
            k,
            settings.renormalize,
            R=config.rows,
            C=config.columns,
            W=config.block,
            PART=config.part,
            KP=KP,
            SORT=config.sort,
            num_warps=config.num_warps,
        )
        return
    span = configs.softmax_topk_span(N, k)
    splits = cdiv(N, span)
    keys = recipe.make(New.contiguous((M, splits, k), torch.int64, x.device))
    words = recipe.make(New.contiguous((M, splits), torch.int64, x.device))
    recipe.launch(
        softmax_topk_split_kernel,
        M * splits,
        x,
        keys,
        words,
        x.stride(0),
        M,
        N,
        k,
        SPAN=span,
        C=config.columns,
        KP=KP,
        num_warps=config.num_warps,
    )
    config = configs.softmax_topk_join(splits, k)
    recipe.launch(
        softmax_topk_join_kernel,
        M,
        x,
        keys,
        words,
        *outputs,
        M,
        k,
        splits,
        settings.renormalize,
        LANES=configs.power_of_two(splits),
        C=config.columns,
        KP=KP,
        SORT=config.sort,
        num_warps=config.num_warps,
    )


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
    recipe.launch(
        softmax_topk_backward_kernel,
        cdiv(M, config.rows) * cdiv(N, config.columns),
        dvalues.contiguous(),
        indices.contiguous(),
        x,
        states.contiguous(),
        dx,
        x.stride(0),
        M,
        N,
        k,
        settings.renormalize,
        R=config.rows,
        C=config.columns,
        KP=configs.power_of_two(k),
        num_warps=config.num_warps,
    )


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
