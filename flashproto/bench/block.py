"""A Transformer's layers, milliseconds of a forward pass and of a whole step.

RMSNorm, attention, MLP and block are each compared with the same layer in plain PyTorch (fused
SDPA, torch.nn.RMSNorm), eager and under torch.compile, with the same weights, and with Liger's RMSNorm
and SwiGLU in it where liger_kernel is installed: projections without bias, causal attention, SwiGLU, no
rotary embedding.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..env import is_importable
from ..nn import MLP, Attention, RMSNorm, TransformerBlock
from .glu import liger_unit
from .measure import Prepared, Work, compare
from .peers import EPS, compiled, norm_peers
from .report import conclusion as conclusion  # memory

COMPILES_OURS = True  # contenders that torch.compile compiles around each of our backends
KINDS = ("norm", "attention", "mlp", "block")


@dataclass(frozen=True)
class Problem:
    kind: str  # one of KINDS
    C: int  # d_model
    heads: int
    S: int
    B: int
    dtype: torch.dtype

    @property
    def key(self) -> str:
        return f"{self.kind} d{self.C} T{self.S} B{self.B}"


def problems(quick: bool, device: torch.device) -> list[Problem]:
    """Blocks of the three sizes that nanoGPT-like models have on one card; a small one on a CPU."""
    if device.type != "cuda":
        sizes = [(128, 4, 128, 2)] if quick else [(128, 4, 256, 4), (256, 4, 512, 2)]
        return [Problem("block", *size, torch.float32) for size in sizes]
    sizes = (
        [(2048, 16, 4096, 4)]
        if quick
        else [(2048, 16, 4096, 4), (4096, 32, 4096, 2), (1024, 8, 16384, 1)]
    )
    return [Problem("block", *size, torch.bfloat16) for size in sizes]


def work(p: Problem) -> Work:
    return Work("ms", None, None, step=True)


# --- the same layers in plain PyTorch, with the parameter names of flashproto.nn -----------------


class PlainAttention(nn.Module):
    def __init__(self, C: int, heads: int, bias: bool = False) -> None:
        super().__init__()
        self.heads = heads
        self.qkv = nn.Linear(C, 3 * C, bias=bias)
        self.out = nn.Linear(C, C, bias=bias)

    def forward(self, x: Tensor) -> Tensor:
        B, S, C = x.shape
        qkv = self.qkv(x).view(B, S, 3, self.heads, C // self.heads)
        q, k, v = qkv.permute(2, 0, 3, 1, 4)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.out(y.transpose(1, 2).reshape(B, S, C))


class PlainMLP(nn.Module):
    def __init__(self, C: int, d_ff: int) -> None:
        super().__init__()
        self.up = nn.Linear(C, 2 * d_ff, bias=False)
        self.down = nn.Linear(d_ff, C, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        gate, up = self.up(x).chunk(2, -1)
        return self.down(F.silu(gate) * up)


class PlainBlock(nn.Module):
    def __init__(
        self, make_norm: Callable[[], nn.Module], attention: nn.Module, mlp: nn.Module
    ) -> None:
        super().__init__()
        self.norm1 = make_norm()
        self.attention = attention
        self.norm2 = make_norm()
        self.mlp = mlp

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.norm1(x))
        return x + self.mlp(self.norm2(x))


class Summed(nn.Module):
    """A TransformerBlock whose pair (x, residual) is added up, to compare with a plain block."""

    def __init__(self, block: TransformerBlock) -> None:
        super().__init__()
        self.block = block

    def forward(self, x: Tensor) -> Tensor:
        x, residual = self.block(x)
        return x + residual


def our_layer(p: Problem, impl: str | None) -> nn.Module:
    """flashproto's layer on backend `impl`; beside attention on "hopper" norms choose theirs."""
    if p.kind == "norm":
        layer: nn.Module = RMSNorm(p.C, EPS, impl=impl)
    elif p.kind == "attention":
        layer = Attention(p.C, p.heads, bias=False, impl=impl)
    elif p.kind == "mlp":
        layer = MLP(p.C, kind="swiglu", bias=False)
    else:
        layer = Summed(
            TransformerBlock(p.C, p.heads, norm="rms", mlp="swiglu", bias=False, eps=EPS, impl=impl)
        )
    for module in layer.modules():
        if isinstance(module, RMSNorm) and impl == "hopper":
            module.impl = None
    return layer


def plain_layer(p: Problem, d_ff: int) -> nn.Module:
    if p.kind == "norm":
        return nn.RMSNorm(p.C, EPS)
    if p.kind == "attention":
        return PlainAttention(p.C, p.heads)
    if p.kind == "mlp":
        return PlainMLP(p.C, d_ff)
    make_norm = partial(nn.RMSNorm, p.C, EPS)
    return PlainBlock(make_norm, PlainAttention(p.C, p.heads), PlainMLP(p.C, d_ff))


# --- the same layers on Liger's kernels ------------------------------------------------------------


class LigerNorm(nn.Module):
    """A norm's parameters, under Liger's kernel."""

    def __init__(self, plain: nn.RMSNorm | nn.LayerNorm) -> None:
        super().__init__()
        self.weight, self.bias = plain.weight, getattr(plain, "bias", None)
        make, _ = norm_peers("rms" if isinstance(plain, nn.RMSNorm) else "layer", False)["liger"]
        self.function = make()

    def forward(self, x: Tensor) -> Tensor:
        return self.function(x, self.weight, self.bias)


class LigerMLP(nn.Module):
    """A SwiGLU MLP whose gate and up have projections of their own: Liger's kernel wants them apart."""

    def __init__(self, plain: PlainMLP) -> None:
        super().__init__()
        gate, up = plain.up.weight.detach().chunk(2)
        self.gate, self.up = nn.Parameter(gate.clone()), nn.Parameter(up.clone())
        self.down, self.function = plain.down, liger_unit("swiglu")

    def forward(self, x: Tensor) -> Tensor:
        return self.down(self.function(F.linear(x, self.gate), F.linear(x, self.up)))


def has_liger(device: torch.device) -> bool:
    return device.type == "cuda" and is_importable("liger_kernel")


def with_liger(layer: nn.Module) -> nn.Module:
    """A plain layer with Liger's norms and SwiGLU in the place of its own."""
    if isinstance(layer, (nn.RMSNorm, nn.LayerNorm)):
        return LigerNorm(layer)
    if isinstance(layer, PlainMLP):
        return LigerMLP(layer)
    for name, child in layer.named_children():
        setattr(layer, name, with_liger(child))
    return layer


# --- measuring -----------------------------------------------------------------------------------


def contenders(
    p: Problem, device: torch.device, impls: Sequence[str], with_compile: bool
) -> dict[str, Callable[[], Prepared]]:
    """flashproto's layer on each backend and the plain layer, both eager and compiled.

    Checked: the first sequence's output and input gradient, against the plain layer in float32
    (attention never crosses sequences), and the gradients of all parameters for being finite.
    """
    x = torch.randn(p.B, p.S, p.C, device=device, dtype=p.dtype)
    grad = torch.randn_like(x)
    first = our_layer(p, None)
    weights = {name.removeprefix("block."): t for name, t in first.state_dict().items()}
    d_ff = (
        weights[next(n for n in weights if n.endswith("down.weight"))].shape[1]
        if (p.kind in ("mlp", "block"))
        else 0
    )

    def plain(dtype: torch.dtype) -> nn.Module:
        layer = plain_layer(p, d_ff)
        layer.load_state_dict(weights)
        # Rounded to p.dtype first, so that every contender has the same weights.
        return layer.to(device, p.dtype).to(dtype)

    exact_x = x[:1].float().requires_grad_()
    exact_y = plain(torch.float32)(exact_x)
    (exact_dx,) = torch.autograd.grad(exact_y, exact_x, grad[:1].float())
    want = {"y": exact_y.detach(), "dx": exact_dx}

    def check(y: Tensor, grads: Sequence[Tensor] | None) -> str | None:
        if grads is None:
            return compare({"y": y[:1]}, want)
        if not all(bool(g.isfinite().all()) for g in grads):
            return "wrong result: a gradient is not finite"
        return compare({"y": y[:1], "dx": grads[0][:1]}, want)

    def prepare(make: Callable[[], nn.Module], is_compiled: bool) -> Prepared:
        layer = make()
        leaf = x.detach().clone().requires_grad_()
        call = compiled(layer) if is_compiled else layer
        return Prepared(lambda: call(leaf), [leaf, *layer.parameters()], grad, check)

    def ours(impl: str) -> nn.Module:
        layer = our_layer(p, impl)
        layer.load_state_dict(first.state_dict())
        return layer.to(device, p.dtype)

    made: dict[str, Callable[[], Prepared]] = {}
    for impl in impls:
        made[f"flashproto[{impl}]"] = partial(prepare, partial(ours, impl), False)
        if with_compile:
            made[f"flashproto[{impl}]+compile"] = partial(prepare, partial(ours, impl), True)
    made["torch"] = partial(prepare, partial(plain, p.dtype), False)
    if with_compile:
        made["compile"] = partial(prepare, partial(plain, p.dtype), True)
    if has_liger(device) and p.kind != "attention":  # which it has no kernel of
        made["liger"] = partial(prepare, lambda: with_liger(plain(p.dtype)), False)
    return made
