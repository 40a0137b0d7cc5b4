"""Attention: the operators of the kernel backends "triton" and "hopper", whose launches are in
attention_triton.py and attention_hopper.py.

Legend: q [B, Hq, Sq, D], k [B, Hkv, Sk, D], v [B, Hkv, Sk, Dv]; out [B, Hq, Sq, Dv]; lse, max_score and
entropy [B, Hq, Sq].  Of sequences side by side q [T, Hq, D], k [Tk, Hkv, D], v [Tk, Hkv, Dv], out
[T, Hq, Dv], lse [Hq, T]: launches get views of them as heads, with B = 1.  qkv
[B, S, (Hq + 2 Hkv) D], every token's heads of q, k and v side by side, with one gradient.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from types import ModuleType
from typing import Any, NamedTuple

import torch

from ..reference.attention import OF_GAPS
from ..variant import (
    AUX,
    DIFFERENTIABLE,
    NO_GRADIENT,
    Form,
    Variant,
    backward_backend,
    has_gradient,
    is_strided,
)
from . import attention_triton
from .call import Gradient, Operator
from .recipe import New, Operand, Recipe


class Settings(NamedTuple):
    """form: of the variant, whose tensors are the last inputs; scale >= 0.  deterministic: the backward
    adds in a fixed order, as torch.use_deterministic_algorithms(True) has it for all calls.
    num_splits: of the keys at most, in the forward; 0, as many as are best."""

    form: Form
    scale: float
    backend: str
    deterministic: bool = False
    num_splits: int = 0

    @property
    def launches(self) -> ModuleType:
        """The module with the launches of the forward."""
        return module_of(self.backend)

    def variant(self, tensors: Sequence[Any]) -> Variant:
        """With tensors as kernels read them."""
        named = zip(self.form.tensors, tensors, strict=True)
        return self.form.variant([x if is_strided(name) else x.contiguous() for name, x in named])


class SettingsQkv(NamedTuple):
    """Settings, and how many heads lie side by side."""

    form: Form
    scale: float
    backend: str
    deterministic: bool
    q_heads: int
    k_heads: int

    @property
    def of_heads(self) -> Settings:
        return Settings(*self[:4])


def module_of(backend: str) -> ModuleType:
    return attention_hopper() if backend == "hopper" else attention_triton


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


def as_heads(x: Any) -> Any:
    """A view [1, H, T, D] of [T, H, D]; what has 4 dimensions as it is."""
    if x is None or x.ndim == 4:
        return x
    (T, H, D), (token, head, element) = x.shape, x.stride()
    return x.as_strided((1, H, T, D), (H * head, head, token, element))


def as_rows(x: Any) -> Any:
    """A view [1, H, T] of [H, T]; what has 3 dimensions as it is."""
    return x if x is None or x.ndim == 3 else x.as_strided((1, *x.shape), (x.shape[0], *x.stride()))


def like_tensor(x: Any, head_dim: int) -> New:
    """like_heads in x's dimensions, 4 or 3."""
    new = like_heads(as_heads(x), head_dim)
    if x.ndim == 4:
        return new
    (_, H, T, D), (_, head, token, element) = new.shape, new.strides
    return new._replace(shape=(T, H, D), strides=(token, head, element))


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


def makes(settings: Settings, q: Any, k: Any, v: Any, *tensors: Any) -> tuple[New | None, ...]:
    """out, lse, the statistics of variant.AUX and what rounding took (attention_backward.py says
    why): with dropout to 16 bits from out, [B, Hq, Sq, Dv] int16; in float32 from the lse of changed
    scores, a tensor like lse."""
    shape = q.shape[:3] if q.ndim == 4 else (q.shape[1], q.shape[0])
    rows = New.contiguous(shape, torch.float32, q.device)
    kind = settings.form.kind
    aux = (rows if wanted else None for wanted in (kind.MAX_SCORE, kind.ENTROPY))
    rest = None
    if kind.DROPOUT and q.dtype.itemsize == 2:
        rest = New.contiguous((*shape, v.shape[-1]), torch.int16, q.device)
    elif kind.RESCALES and q.dtype == torch.float32:
        rest = rows
    return like_tensor(q, v.shape[-1]), rows, *aux, rest


def forward(recipe: Recipe, settings: Settings, inputs: Any, outputs: Any) -> None:
    (q, k, v, *tensors), (out, lse, *aux, rest) = inputs, outputs
    if q.numel() == 0 or v.shape[-1] == 0:
        return
    *news, _ = makes(settings, q, k, v)
    out, *rows = (
        recipe.make(new) if x is None and new is not None else x
        for x, new in zip((out, lse, *aux), news, strict=True)
    )
    q, k, v, out = map(as_heads, (q, k, v, out))
    lse, *aux = map(as_rows, rows)
    if "seqused_q" in settings.form.tensors:  # kernels write nothing in gaps
        for x, of_gaps in zip((out, lse, *aux), OF_GAPS, strict=True):
            if x is not None:
                x.fill_(of_gaps)
        if rest is not None and q.dtype == torch.float32:  # of lse, which sums over all rows read
            rest.zero_()
    more = {name: x for name, x in zip((*AUX, "rest"), (*aux, rest), strict=True) if x is not None}
    variant = settings.variant(tensors)
    of_all = settings.scale, settings.num_splits
    settings.launches.forward(recipe, q, k, v, out, lse, variant, *of_all, **more)


def saves(settings: Settings, inputs: Any, outputs: Any) -> list[Any]:
    q, k, v, *tensors = inputs
    out, lse, _, entropy, rest = outputs
    return [q, k, v, out, lse, entropy, rest, *tensors]


def backward_inputs(
    rows: Sequence[Any], q: Any, k: Any, v: Any, tensors: Sequence[Any] = ()
) -> tuple[Any, ...]:
    """What the backward takes, for who calls it by itself: without gradients of statistics, and so
    without the entropy, and without what rounding took.  rows: gradients of out and lse, out
    and lse; tensors: the variant's."""
    dout, dlse, out, lse = rows
    return dout, dlse, *(None,) * len(AUX), q, k, v, out, lse, None, None, *tensors


def gradients(settings: Settings, grads: Any, saved: Any, needs: Any) -> list[Gradient]:
    """dv lies in memory as dk does."""
    q, k, v, _, _, _, _, *tensors = saved
    dq = like_tensor(q, q.shape[-1]) if needs[0] else None
    need_dkv = needs[1] or needs[2]
    dk, dv = (like_tensor(k, x.shape[-1]) if need_dkv else None for x in (k, v))
    return [dq, dk, dv, *gradients_by_head(tensors, needs[3:])]


def gradients_by_head(tensors: Sequence[Any], needs: Sequence[bool]) -> list[Gradient]:
    """Of a variant's tensors, of which those of floating-point numbers have gradients."""
    return [
        New.contiguous(x.shape, x.dtype, x.device) if need and x.dtype.is_floating_point else None
        for x, need in zip(tensors, needs, strict=True)
    ]


def backward(recipe: Recipe, settings: Settings, grads: Any, saved: Any, made: Any) -> None:
    (q, k, v, out, lse, entropy, rest, *tensors), (dq, dk, dv, *by_head) = saved, made
    q, k, v, out, dout, dq, dk, dv = map(as_heads, (q, k, v, out, grads[0], dq, dk, dv))
    grads, lse, entropy = (dout, *map(as_rows, grads[1:])), as_rows(lse), as_rows(entropy)
    of_rows = {"entropy": entropy, "rest": rest}
    fill_gradients(recipe, settings, grads, q, k, v, out, lse, dq, dk, dv, tensors, by_head, **of_rows)


def fill_gradients(
    recipe: Recipe,
    settings: Settings,
    grads: Sequence[Operand | None],
    q: Operand,
    k: Operand,
    v: Operand,
    out: Operand,
    lse: Operand,
    dq: Operand | None,
    dk: Operand | None,
    dv: Operand | None,
    tensors: Sequence[Operand],
    by_head: Sequence[Operand | None],
    entropy: Operand | None = None,
    rest: Operand | None = None,
) -> None:
    """Those of dq, dk, dv and by_head that are not None; dk and dv have the same strides.

    grads: of out, lse and the statistics.  by_head: for each of `tensors`.  rest: see `makes`.
    """
    dout, dlse, *aux = grads
    of_aux = {name: x for name, x in zip(AUX, aux, strict=True) if x is not None}
    for name in of_aux:
        if not has_gradient(name, settings.backend):
            raise NotImplementedError(NO_GRADIENT.format(name, settings.backend))
    if q.numel() == 0:
        for gradient in (dq, dk, dv, *by_head):
            if gradient is not None:
                gradient.zero_()
        return
    if dout is None:
        dout = recipe.make(New.contiguous((), q.dtype, q.device)).zero_().expand(*out.shape)
    for name, x in (("seqused_q", dq), ("seqused_k", dk), ("seqused_k", dv)):
        if name in settings.form.tensors and x is not None:
            x.zero_()
    lse, dout = lse.contiguous(), dout.to(q.dtype)  # hooks of saved tensors need not keep strides
    variant = settings.variant(tensors)
    wanted = dict(zip(settings.form.tensors, by_head, strict=True))
    dheads: dict[str, Any] = {name: x for name in DIFFERENTIABLE if (x := wanted.get(name)) is not None}
    operands = [wanted[name] for name in variant.operand_names]
    if any(x is not None for x in operands):
        dheads["score_mod"] = operands
    ordered = settings.deterministic or torch.are_deterministic_algorithms_enabled()
    wider_keys = q.shape[-1] != v.shape[-1]
    backend = backward_backend(settings.backend, variant.kind, ordered, dheads, wider_keys)
    if "entropy" in of_aux:
        dheads["entropy"] = entropy, of_aux["entropy"].contiguous()
    if rest is not None:
        dheads["rest"] = rest.contiguous()
    module_of(backend).backward(
        recipe, q, k, v, out, lse, dout, dlse, dq, dk, dv, variant, settings.scale, ordered, **dheads
    )


attention = Operator(
    "attention_forward",
    inputs="q, k, v, *tensors",
    outputs=5,
    settings=Settings,
    makes=makes,
    forward=forward,
    saved="q, k, v, out, lse, entropy?, rest?, *tensors",
    saves=saves,
    gradients=gradients,
    backward=backward,
    differentiable=4,
    seldom=len(AUX),
    backward_name="attention_backward",
)


# --- the same on a fused projection -----------------------------------------------------------------


def makes_qkv(settings: SettingsQkv, qkv: Any, *tensors: Any) -> tuple[New | None, ...]:
    q, k, v = split_heads(qkv, settings.q_heads, settings.k_heads)
    out, lse, *_, rest = makes(settings.of_heads, q, k, v)
    return out, lse, rest


def forward_qkv(recipe: Recipe, settings: SettingsQkv, inputs: Any, outputs: Any) -> None:
    (qkv, *tensors), (out, lse, rest) = inputs, outputs
    heads = split_heads(qkv, settings.q_heads, settings.k_heads)
    forward(recipe, settings.of_heads, (*heads, *tensors), (out, lse, None, None, rest))


def saves_qkv(settings: SettingsQkv, inputs: Any, outputs: Any) -> list[Any]:
    qkv, *tensors = inputs
    return [qkv, *outputs, *tensors]


def gradients_qkv(settings: SettingsQkv, grads: Any, saved: Any, needs: Any) -> list[Gradient]:
    qkv, _, _, _, *tensors = saved
    dqkv = New.contiguous(qkv.shape, qkv.dtype, qkv.device) if needs[0] else None
    return [dqkv, *gradients_by_head(tensors, needs[1:])]


def backward_qkv(recipe: Recipe, settings: SettingsQkv, grads: Any, saved: Any, made: Any) -> None:
    (qkv, out, lse, rest, *tensors), (dqkv, *by_head) = saved, made
    heads = settings.q_heads, settings.k_heads
    q, k, v = split_heads(qkv, *heads)
    dq, dk, dv = (None, None, None) if dqkv is None else split_heads(dqkv, *heads)
    grads, gradients = (*grads, None, None), (dq, dk, dv)
    of_heads = settings.of_heads
    fill_gradients(recipe, of_heads, grads, q, k, v, out, lse, *gradients, tensors, by_head, rest=rest)


attention_qkv = Operator(
    "attention_qkv_forward",
    inputs="qkv, *tensors",
    outputs=3,
    settings=SettingsQkv,
    makes=makes_qkv,
    forward=forward_qkv,
    saved="qkv, out, lse, rest?, *tensors",
    saves=saves_qkv,
    gradients=gradients_qkv,
    backward=backward_qkv,
    differentiable=2,
    backward_name="attention_qkv_backward",
)
