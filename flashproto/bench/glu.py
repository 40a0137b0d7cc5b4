"""What a block has beside its matrix products, GB/s: gated linear units, GELU, RoPE, QK norm.

Counted is what the operators have to move: each input read once, each result written once (in the
backward pass of rope the gradients alone; of the others the inputs of the forward pass too).  "qkv"
cells take q, k and v out of a fused projection; their peers split it, and autograd joins the gradients.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

import flashproto

from .. import reference
from ..env import is_importable
from ..nn import rope_tables
from .measure import Prepared, Work, compare
from .peers import Function, compiled

EPS = 1e-6
UNITS = ("swiglu", "geglu", "gelu")
HEADS = ("rope", "rope interleaved", "rope qkv", "qk_norm qkv")


@dataclass(frozen=True)
class Problem:
    """Units: rows x inner width; heads: (B, S, Hq, Hkv, D)."""

    kind: str  # one of UNITS or HEADS
    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def key(self) -> str:
        if self.kind in UNITS:
            return f"{self.kind} {self.shape[0]}x{self.shape[1]}"
        B, S, Hq, Hkv, D = self.shape
        return f"{self.kind} B{B} S{S} H{Hq}/{Hkv} D{D}"


def problems(quick: bool, device: torch.device) -> list[Problem]:
    if device.type != "cuda":
        units, heads, dtype = [(256, 352)], [(1, 128, 4, 2, 32)], torch.float32
    else:
        units = [(16384, 5632), (8192, 11008), (16384, 2816)]
        heads, dtype = [(4, 4096, 16, 16, 128), (2, 4096, 32, 8, 128)], torch.bfloat16
        if quick:
            units, heads = units[:1], heads[1:]
    cells = [Problem(kind, shape, dtype) for kind in UNITS for shape in units]
    return cells + [Problem(kind, shape, dtype) for kind in HEADS for shape in heads]


def work(p: Problem) -> Work:
    if p.kind in UNITS:
        nbytes = p.shape[0] * p.shape[1] * p.dtype.itemsize
        forward, backward = (2, 3) if p.kind == "gelu" else (3, 5)
        return Work("GB/s", forward * nbytes / 1e6, backward * nbytes / 1e6, copied=nbytes)
    B, S, Hq, Hkv, D = p.shape
    rotated, all_heads = (B * S * n * D * p.dtype.itemsize for n in (Hq + Hkv, Hq + 2 * Hkv))
    nbytes = all_heads if "qkv" in p.kind else rotated
    backward = 2 * nbytes + (rotated if p.kind == "qk_norm qkv" else 0)
    return Work("GB/s", 2 * nbytes / 1e6, backward / 1e6, copied=nbytes)


def contenders(
    p: Problem, device: torch.device, impls: Sequence[str], with_compile: bool
) -> dict[str, Callable[[], Prepared]]:
    """flashproto's backends and every peer on the same inputs, all results checked against float32."""
    inputs, grads, exact, ours, eager, peers = (units if p.kind in UNITS else heads)(p, device)
    leaves = [t.float().requires_grad_() for t in inputs]
    out = exact(*leaves)
    want = [*out, *torch.autograd.grad(out, leaves, [g.float() for g in grads])]
    named = {str(i): t.detach() for i, t in enumerate(want)}
    del leaves, out, want

    def check(out: Any, grads: Sequence[Tensor] | None) -> str | None:
        out = [out] if isinstance(out, Tensor) else list(out)
        return compare({str(i): t for i, t in enumerate([*out, *(grads or ())])}, named)

    def prepare(make: Callable[[], Function]) -> Prepared:
        leaves = [t.detach().clone().requires_grad_() for t in inputs]
        function = make()
        return Prepared(lambda: function(*leaves), leaves, tuple(grads), check)

    made = {f"flashproto[{impl}]": partial(prepare, partial(partial, ours, impl)) for impl in impls}
    made["torch"] = partial(prepare, lambda: eager)
    if with_compile:
        made["compile"] = partial(prepare, lambda: compiled(eager))
    return made | {name: partial(prepare, make) for name, make in peers.items()}


# --- gated linear units ----------------------------------------------------------------------------


def units(p: Problem, device: torch.device) -> Any:
    """(inputs, gradients of the results, exact, ours(impl, ...), eager, peers) of a cell."""
    M, N = p.shape
    columns = N if p.kind == "gelu" else 2 * N
    x = torch.randn(M, columns, device=device, dtype=p.dtype)
    dy = torch.randn(M, N, device=device, dtype=p.dtype)
    activation = "silu" if p.kind == "swiglu" else "gelu_tanh"
    act = reference.ACTIVATIONS[activation]

    def exact(x: Tensor) -> list[Tensor]:
        gate, up = (x, None) if p.kind == "gelu" else x.chunk(2, -1)
        return [reference.glu(gate, up, activation)]

    def ours(impl: str, x: Tensor) -> Tensor:
        if p.kind == "swiglu":
            return flashproto.swiglu(x, impl=impl)
        function = flashproto.gelu if p.kind == "gelu" else flashproto.geglu
        return function(x, approximate="tanh", impl=impl)

    def eager(x: Tensor) -> Tensor:
        if p.kind == "gelu":
            return F.gelu(x, approximate="tanh")
        gate, up = x.chunk(2, -1)
        return act(gate) * up

    peers = {}
    if p.kind != "gelu" and is_importable("liger_kernel"):
        peers["liger"] = partial(_liger_unit, p.kind)
    return [x], [dy], exact, ours, eager, peers


def liger_unit(kind: str) -> Function:
    """f(gate, up), which wants both contiguous; its backward writes into them."""
    if kind == "swiglu":
        function = importlib.import_module("liger_kernel.ops.swiglu").LigerSiLUMulFunction
    else:
        function = importlib.import_module("liger_kernel.ops.geglu").LigerGELUMulFunction
    return function.apply


def _liger_unit(kind: str) -> Function:
    function = liger_unit(kind)

    def call(x: Tensor) -> Tensor:
        gate, up = x.chunk(2, -1)
        return function(gate.contiguous(), up.contiguous())  # copies are part of its call

    return call


# --- heads -----------------------------------------------------------------------------------------


def heads(p: Problem, device: torch.device) -> Any:
    """As units."""
    B, S, Hq, Hkv, D = p.shape
    cos, sin = rope_tables(S, D, device=device)
    qkv = torch.randn(B, S, (Hq + 2 * Hkv) * D, device=device, dtype=p.dtype)
    weights = [torch.rand(D, device=device, dtype=p.dtype) + 0.5 for _ in range(2)]
    tensors = reference.split_heads(qkv, Hq, Hkv)
    grads = [torch.randn(B, S, t.shape[1], D, device=device, dtype=p.dtype) for t in tensors]
    grads = [g.transpose(1, 2) for g in grads]
    if p.kind.startswith("rope") and "qkv" not in p.kind:
        interleaved = p.kind == "rope interleaved"
        inputs = [t.transpose(1, 2).contiguous().transpose(1, 2) for t in tensors[:2]]

        def exact(q: Tensor, k: Tensor) -> list[Tensor]:
            return [reference.rope(t, cos, sin, interleaved=interleaved) for t in (q, k)]

        def ours(impl: str, q: Tensor, k: Tensor) -> Any:
            return flashproto.rope(q, k, cos, sin, interleaved=interleaved, impl=impl)

        peers = {}
        if not interleaved and is_importable("liger_kernel"):
            peers["liger"] = partial(_liger_rope, cos, sin)
        return inputs, grads[:2], exact, ours, exact, peers

    if p.kind == "rope qkv":

        def exact_qkv(qkv: Tensor) -> list[Tensor]:
            q, k, v = reference.split_heads(qkv, Hq, Hkv)
            return [reference.rope(q, cos, sin), reference.rope(k, cos, sin), v]

        def ours_qkv(impl: str, qkv: Tensor) -> Any:
            return flashproto.rope_qkv(qkv, Hq, Hkv, cos, sin, impl=impl)

        return [qkv], grads, exact_qkv, ours_qkv, exact_qkv, {}

    def exact_norm(qkv: Tensor, q_weight: Tensor, k_weight: Tensor) -> list[Tensor]:
        q, k, v = reference.split_heads(qkv, Hq, Hkv)
        q, k = F.rms_norm(q, (D,), q_weight, EPS), F.rms_norm(k, (D,), k_weight, EPS)
        return [reference.rope(q, cos, sin), reference.rope(k, cos, sin), v]

    def ours_norm(impl: str, qkv: Tensor, q_weight: Tensor, k_weight: Tensor) -> Any:
        weights = (q_weight, k_weight)
        return flashproto.qk_norm_qkv(qkv, Hq, Hkv, *weights, cos, sin, eps=EPS, impl=impl)

    return [qkv, *weights], grads, exact_norm, ours_norm, exact_norm, {}


def _liger_rope(cos: Tensor, sin: Tensor) -> Function:
    function = importlib.import_module("liger_kernel.ops.rope").LigerRopeFunction
    # It takes a column for every dimension and rotates q and k where they are, which is not undone:
    # its first result is checked, later ones take as long.
    tables = [torch.cat((t, t), -1)[None].to(torch.bfloat16) for t in (cos, sin)]

    def call(q: Tensor, k: Tensor) -> Any:
        return function.apply(q, k, *tables)

    return call
