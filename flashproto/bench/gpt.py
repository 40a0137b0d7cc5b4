"""A GPT as it is trained, thousand tokens a second by the wall clock: the loss, and its gradients.

The whole of GPT-2 from tokens to the loss, weights in float32 under autocast to bfloat16, beside the
same model in plain PyTorch (fused SDPA, torch.nn.LayerNorm, cross_entropy of all logits), eager and
under torch.compile, with the same weights, and with Liger's LayerNorm and fused linear cross entropy
in it where liger_kernel is installed.  Every call is waited for, as a training step is that
prints its loss, so that what the host takes counts where the device waits for it; the optimizer's
step, which is torch's for all, does not.  The loss alone is computed under torch.no_grad().
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..nn import GPT, GPTConfig
from . import linear_cross_entropy
from .block import PlainAttention, PlainBlock, has_liger, with_liger
from .linear_cross_entropy import materialised
from .measure import Prepared, Work, compare
from .peers import Function, compiled
from .report import conclusion as conclusion  # memory and MFU

WALL_CLOCK = True  # see bench/__main__.py
COMPILES_OURS = True  # contenders that torch.compile compiles around each of our backends
TINY = GPTConfig(64, 32, 2, 2, 32)


@dataclass(frozen=True)
class Problem:
    preset: str  # of flashproto.nn, or "tiny"
    S: int
    B: int
    dtype: torch.dtype  # of autocast, which is off where this is float32

    @property
    def key(self) -> str:
        return f"{self.preset} T{self.S} B{self.B}"

    @property
    def config(self) -> GPTConfig:
        return TINY if self.preset == "tiny" else GPTConfig.preset(self.preset)


def problems(quick: bool, device: torch.device) -> list[Problem]:
    if device.type != "cuda":
        return [Problem("tiny", 32, 2, torch.float32)]
    sizes = [("gpt2-124m", 1024, 16)] if quick else [("gpt2-124m", 1024, 16), ("gpt2-350m", 1024, 8)]
    return [Problem(*size, torch.bfloat16) for size in sizes]


def work(p: Problem) -> Work:
    tokens = p.B * p.S  # over milliseconds
    flops = tokens * GPT(p.config, device="meta").flops_per_token(p.S)
    return Work("ktokens/s", tokens, tokens, step=True, no_grad=True, flops=flops)


# --- the same model in plain PyTorch, with the parameters of flashproto.nn ------------------------


class PlainMLP(nn.Module):
    def __init__(self, C: int, d_ff: int) -> None:
        super().__init__()
        self.up = nn.Linear(C, d_ff)
        self.down = nn.Linear(d_ff, C)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(F.gelu(self.up(x), approximate="tanh"))


class PlainGPT(nn.Module):
    def __init__(self, c: GPTConfig, loss: Function = materialised) -> None:
        super().__init__()
        self.loss = loss
        self.embedding = nn.Embedding(c.vocab_size, c.d_model)
        self.positions = nn.Embedding(c.context, c.d_model)
        make_norm = partial(nn.LayerNorm, c.d_model, c.norm_eps)
        self.blocks = nn.ModuleList(
            PlainBlock(
                make_norm,
                PlainAttention(c.d_model, c.n_heads, bias=True),
                PlainMLP(c.d_model, c.hidden),
            )
            for _ in range(c.n_layers)
        )
        self.norm = make_norm()

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        x = self.embedding(tokens) + self.positions.weight[: tokens.shape[1]]
        for block in self.blocks:
            x = block(x)
        return self.loss(self.norm(x).flatten(0, 1), self.embedding.weight, targets.flatten())


class Loss(nn.Module):
    """flashproto.nn.GPT as a function of tokens and targets, to the loss alone."""

    def __init__(self, config: GPTConfig, impl: str | None) -> None:
        super().__init__()
        self.gpt = GPT(config, impl=impl)

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        _, loss = self.gpt(tokens, targets, return_logits=False)
        assert loss is not None
        return loss


# --- measuring -----------------------------------------------------------------------------------


def contenders(
    p: Problem, device: torch.device, impls: Sequence[str], with_compile: bool
) -> dict[str, Callable[[], Prepared]]:
    """flashproto's GPT on each backend and the plain one, both eager and compiled.

    Checked: the loss, and the gradient of every parameter as a whole, against the plain model in
    float32.
    """
    c = p.config
    tokens = torch.randint(c.vocab_size, (p.B, p.S + 1), device=device)
    tokens, targets = tokens[:, :-1], tokens[:, 1:]
    first = PlainGPT(c)
    weights = GPT(c).state_dict()
    first.load_state_dict(weights)
    names = [name for name, _ in first.named_parameters()]
    first.to(device)
    loss = first(tokens, targets)
    exact = {"loss": loss.detach()[None]}
    gradients = torch.autograd.grad(loss, list(first.parameters()))
    exact |= {name: g.flatten() for name, g in zip(names, gradients, strict=True)}
    del first, loss, gradients

    def check(loss: Tensor, grads: Sequence[Tensor] | None) -> str | None:
        got = {"loss": loss[None]}
        if grads is not None:  # as exact as p.dtype
            got |= {name: g.flatten().to(p.dtype) for name, g in zip(names, grads, strict=True)}
        return compare(got, exact)

    def prepare(make: Callable[[], nn.Module], is_compiled: bool) -> Prepared:
        model = make().to(device)
        run: Any = compiled(model) if is_compiled else model

        def call() -> Tensor:
            with torch.autocast(device.type, torch.bfloat16, enabled=p.dtype == torch.bfloat16):
                return run(tokens, targets)

        return Prepared(call, list(model.parameters()), torch.ones((), device=device), check)

    def ours(impl: str) -> nn.Module:
        model = Loss(c, impl)
        model.gpt.load_state_dict(weights)
        return model

    def plain(loss: Function = materialised) -> nn.Module:
        model = PlainGPT(c, loss)
        model.load_state_dict(weights)
        return model

    def liger() -> nn.Module:
        function = linear_cross_entropy.liger()

        # Cast once, as autocast casts operands of a matrix product: in there it would for each chunk.
        def loss(h: Tensor, weight: Tensor, targets: Tensor) -> Tensor:
            return function(h.to(p.dtype), weight.to(p.dtype), targets)

        return with_liger(plain(loss))

    made: dict[str, Callable[[], Prepared]] = {}
    for impl in impls:
        made[f"flashproto[{impl}]"] = partial(prepare, partial(ours, impl), False)
        if with_compile:
            made[f"flashproto[{impl}]+compile"] = partial(prepare, partial(ours, impl), True)
    made["torch"] = partial(prepare, plain, False)
    if with_compile:
        made["compile"] = partial(prepare, plain, True)
    if has_liger(device):
        made["liger"] = partial(prepare, liger, False)
    return made
