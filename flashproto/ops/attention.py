"""Attention: the operators of the kernel backends "triton" and "hopper", whose launches are in
attention_triton.py and attention_hopper.py.

Legend: q [B, Hq, Sq, D], k [B, Hkv, Sk, D], v [B, Hkv, Sk, Dv]; out [B, Hq, Sq, Dv]; lse [B, Hq, Sq];
qkv [B, S, (Hq + 2 Hkv) D], every token's heads of q, k and v side by side, with one gradient.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from types import ModuleType
from typing import Any, NamedTuple

import torch

from ..variant import Variant, unpack
from . import attention_triton
from .call import Gradient, Operator
from .recipe import New, Operand, Recipe


class Settings(NamedTuple):
    """ints, floats, variant: of a packed Variant, whose tensors are the last inputs; scale >= 0."""

    ints: tuple[int, ...]
    floats: tuple[float, ...]
    variant: str
    scale: float
    backend: str

    @property
    def launches(self) -> ModuleType:
        """The module with the launches of the backend."""
        return attention_hopper() if self.backend == "hopper" else attention_triton

    def unpacked(self, tensors: Sequence[Any]) -> Variant:
        return unpack(tensors, self.ints, self.floats, self.variant)


class SettingsQkv(NamedTuple):
    """Settings, and how many heads lie side by side."""

    ints: tuple[int, ...]
    floats: tuple[float, ...]
    variant: str
    scale: float
    backend: str
    q_heads: int
    k_heads: int

    @property
    def of_heads(self) -> Settings:
        return Settings(*self[:5])


@functools.cache
def attention_hopper() -> ModuleType:
    """The launches of backend "hopper", which need Gluon: not every Triton has it."""
    from . import attention_hopper

    return attention_hopper


# --- memory -----------------------------------------------------------------------------------------


def like_heads(x: Any, head_dim: int) -> New:
    """A [B, H, S, head_dim] in the memory order of x's heads and tokens, so that what arrives as a
    transposed [B, S, H, D] leaves as one."""
    B, H, S, D = x.shape
    if head_dim == D and x.is_contiguous():
        return New.contiguous(x.shape, x.dtype, x.device)
    _, head, token, _ = x.stride()
    inner = (head_dim, H * head_dim) if head < token else (S * head_dim, head_dim)
    return New((B, H, S, head_dim), (H * S * head_dim, *inner, 1), x.dtype, x.device)


def split_heads(qkv: Any, q_heads: int, k_heads: int) -> tuple[Any, Any, Any]:
    """Views q [B, Hq, S, D], k and v [B, Hkv, S, D] of qkv."""
    B, S, width = qkv.shape
    D = width // (q_heads + 2 * k_heads)
    batch, token, element = qkv.stride()
    strides = batch, D * element, token, element
    starts = 0, q_heads * D * element, (q_heads + k_heads) * D * element
    q, k, v = (
        qkv.as_strided((B, heads, S, D), strides, start)
        for heads, start in zip((q_heads, k_heads, k_heads), starts, strict=True)
    )
    return q, k, v


# --- recipes ----------------------------------------------------------------------------------------


def makes(settings: Settings, q: Any, k: Any, v: Any, *tensors: Any) -> tuple[New, New]:
    """out, lse."""
    return like_heads(q, v.shape[3]), New.contiguous(q.shape[:3], torch.float32, q.device)


def forward(recipe: Recipe, settings: Settings, inputs: Any, outputs: Any) -> None:
    (q, k, v, *tensors), (out, lse) = inputs, outputs
    if q.numel() == 0 or v.shape[3] == 0:
        return
    if out is None:
        out = recipe.make(like_heads(q, v.shape[3]))
    if lse is None:
        lse = recipe.make(New.contiguous(q.shape[:3], torch.float32, q.device))
    variant = settings.unpacked(tensors)
    settings.launches.forward(recipe, q, k, v, out, lse, variant, settings.scale)


def saves(settings: Settings, inputs: Any, outputs: Any) -> list[Any]:
    q, k, v, *tensors = inputs
    return [q, k, v, *outputs, *tensors]


def gradients(settings: Settings, grads: Any, saved: Any, needs: Any) -> list[Gradient]:
    """dv lies in memory as dk does."""
    q, k, v, _, _, *tensors = saved
    dq = like_heads(q, q.shape[3]) if needs[0] else None
    need_dkv = needs[1] or needs[2]
    dk, dv = (like_heads(k, x.shape[3]) if need_dkv else None for x in (k, v))
    return [dq, dk, dv, *[None] * len(tensors)]


def backward(recipe: Recipe, settings: Settings, grads: Any, saved: Any, made: Any) -> None:
    (dout, dlse), (q, k, v, out, lse, *tensors) = grads, saved
    dq, dk, dv = made[:3]
    fill_gradients(recipe, settings, q, k, v, out, lse, dout, dlse, dq, dk, dv, tensors)


def fill_gradients(
    recipe: Recipe, settings: Settings, q: Operand, k: Operand, v: Operand, out: Operand, lse: Operand,
    dout: Operand | None, dlse: Operand | None, dq: Operand | None, dk: Operand | None,
    dv: Operand | None, tensors: Sequence[Operand],
) -> None:  # fmt: skip
    """Those of dq, dk and dv that are not None; dk and dv have the same strides."""
    if q.numel() == 0 or k.numel() == 0:
        for gradient in (dq, dk, dv):
            if gradient is not None:
                gradient.zero_()
        return
    if dout is None:
        dout = recipe.make(New.contiguous((), q.dtype, q.device)).zero_().expand(*out.shape)
    lse, dout = lse.contiguous(), dout.to(q.dtype)  # hooks of saved tensors need not keep strides
    settings.launches.backward(
        recipe, q, k, v, out, lse, dout, dlse, dq, dk, dv, settings.unpacked(tensors), settings.scale
    )


attention = Operator(
    "attention_forward", inputs="q, k, v, *tensors", outputs=2, settings=Settings, makes=makes,
    forward=forward, saved="q, k, v, out, lse, *tensors", saves=saves, gradients=gradients,
    backward=backward, differentiable=2, backward_name="attention_backward",
)  # fmt: skip


# --- the same on a fused projection -----------------------------------------------------------------


def makes_qkv(settings: SettingsQkv, qkv: Any, *tensors: Any) -> tuple[New, New]:
    q, k, v = split_heads(qkv, settings.q_heads, settings.k_heads)
    return makes(settings.of_heads, q, k, v)


def forward_qkv(recipe: Recipe, settings: SettingsQkv, inputs: Any, outputs: Any) -> None:
    qkv, *tensors = inputs
    heads = split_heads(qkv, settings.q_heads, settings.k_heads)
    forward(recipe, settings.of_heads, (*heads, *tensors), outputs)


def saves_qkv(settings: SettingsQkv, inputs: Any, outputs: Any) -> list[Any]:
    qkv, *tensors = inputs
    return [qkv, *outputs, *tensors]


def gradients_qkv(settings: SettingsQkv, grads: Any, saved: Any, needs: Any) -> list[Gradient]:
    qkv, _, _, *tensors = saved
    dqkv = New.contiguous(qkv.shape, qkv.dtype, qkv.device) if needs[0] else None
    return [dqkv, *[None] * len(tensors)]


def backward_qkv(recipe: Recipe, settings: SettingsQkv, grads: Any, saved: Any, made: Any) -> None:
    (dout, dlse), (qkv, out, lse, *tensors), (dqkv, *_) = grads, saved, made
    if dqkv is not None:
        heads = settings.q_heads, settings.k_heads
        (q, k, v), (dq, dk, dv) = split_heads(qkv, *heads), split_heads(dqkv, *heads)
        of_heads = settings.of_heads
        fill_gradients(recipe, of_heads, q, k, v, out, lse, dout, dlse, dq, dk, dv, tensors)


attention_qkv = Operator(
    "attention_qkv_forward", inputs="qkv, *tensors", outputs=2, settings=SettingsQkv, makes=makes_qkv,
    forward=forward_qkv, saved="qkv, out, lse, *tensors", saves=saves_qkv, gradients=gradients_qkv,
    backward=backward_qkv, differentiable=2, backward_name="attention_qkv_backward",
)  # fmt: skip
