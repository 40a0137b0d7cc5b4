"""From hidden states to the loss over a vocabulary, milliseconds, and the memory it takes.

Forward is the loss alone, under torch.no_grad() for every contender.  Forward and backward give the
gradients of the hidden states and of the output matrix; memory is the peak of such a pass beyond the
inputs, both gradients counted.

Liger has two functions for Hopper GPUs in its cutedsl kernels: of the mean loss, for vocabularies of
whole tiles, and "scaled" of each token's loss, whose mean torch takes.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

import flashproto

from ..env import is_importable
from .measure import OURS, Prepared, Work, compare
from .peers import Function, compiled, has_liger_cutedsl

# Tokens, width, vocabulary; the last is that of GPT-2, an odd number.
SHAPES = ((32768, 768, 50304), (16384, 4096, 128256), (32768, 768, 50257))
STEP = "forward+backward"
# Wanted by shape: GiB, and GiB of the low-memory mode.
MEMORY = {SHAPES[0]: (0.6, None), SHAPES[1]: (3.6, 2.5)}
SLOWER, LOW_MEMORY_SLOWER = 1.05, 1.3  # times torch.compile's time that are allowed


@dataclass(frozen=True)
class Problem:
    M: int
    C: int
    V: int
    dtype: torch.dtype

    @property
    def key(self) -> str:
        return f"linear_cross_entropy {self.M}x{self.C}x{self.V}"


def problems(quick: bool, device: torch.device) -> list[Problem]:
    if device.type != "cuda":
        return [Problem(64, 32, 1000, torch.float32)]
    return [Problem(*shape, torch.bfloat16) for shape in (SHAPES[:1] if quick else SHAPES)]


def work(p: Problem) -> Work:
    return Work("ms", None, None, step=True, no_grad=True)


def conclusion(data: dict[str, Any]) -> str:
    """Time against torch.compile's with the logits in memory, and the peak memory of everyone."""
    lines = []
    for key, cell in data["cells"].items():
        results = cell["passes"][STEP]
        reference = results.get("compile", {}).get("ms")
        for name, result in results.items():
            if "ms" not in result:
                lines.append(f"{key} {name}: {result.get('error')}")
                continue
            text = f"{key} {name}: {result['ms']:.2f} ms, {result.get('peak_gib', 0):.2f} GiB"
            if reference and name.startswith(OURS):
                text += f", {result['ms'] / reference:.3f} of compile's time"
            lines.append(text)
    return "\n".join(lines)


def goals(data: dict[str, Any]) -> str:
    """What of conclusion's figures is wanted of ours."""
    lines = []
    for key, cell in data["cells"].items():
        limits = next((m for s, m in MEMORY.items() if key.endswith("x".join(map(str, s)))), None)
        for name in filter(lambda name: name.startswith(OURS), cell["passes"][STEP]):
            low = "low" in name
            text = f"{key} {name}: wanted {LOW_MEMORY_SLOWER if low else SLOWER} of compile's time"
            lines.append(text + (f", {limits[low]} GiB" if limits and limits[low] else ""))
    return "\n".join(lines)


def materialised(h: Tensor, weight: Tensor, targets: Tensor) -> Tensor:
    return F.cross_entropy(F.linear(h, weight).float(), targets)


def exact(h: Tensor, weight: Tensor, targets: Tensor) -> dict[str, Tensor]:
    """loss [1], dh [M, C], dweight [V, C] in float32, in pieces of the tokens."""
    dweight, dh, total = torch.zeros_like(weight, dtype=torch.float32), [], 0.0
    wide = weight.detach().float()
    for part, wanted in zip(h.split(2048), targets.split(2048), strict=True):
        logits = part.float() @ wide.t()
        total += float(F.cross_entropy(logits, wanted, reduction="sum"))
        dlogits = torch.softmax(logits, -1)
        dlogits[torch.arange(len(wanted), device=h.device), wanted] -= 1
        dh.append(dlogits @ wide / len(h))
        dweight += dlogits.t() @ part.float() / len(h)
    loss = torch.tensor([total / len(h)], device=h.device)
    return {"loss": loss, "dh": torch.cat(dh), "dweight": dweight}


def contenders(
    p: Problem, device: torch.device, impls: Sequence[str], with_compile: bool
) -> dict[str, Callable[[], Prepared]]:
    """flashproto's backends and every peer, all on the same hidden states, matrix and targets."""
    h = torch.randn(p.M, p.C, device=device).to(p.dtype)
    weight = (torch.randn(p.V, p.C, device=device) * 2 * p.C**-0.5).to(p.dtype)
    targets = torch.randint(p.V, (p.M,), device=device)
    want: dict[str, Tensor] = {}

    def check(loss: Tensor, grads: Sequence[Tensor] | None) -> str | None:
        if not want:
            want.update(exact(h, weight, targets))
        if grads is None:
            return compare({"loss": loss.reshape(1)}, want)
        return compare({"dh": grads[0], "dweight": grads[1]}, want)

    def prepare(make: Callable[[], Function]) -> Prepared:
        leaves, function = [t.clone().requires_grad_() for t in (h, weight)], make()
        return Prepared(lambda: function(*leaves, targets), leaves, None, check)

    def ours(impl: str, **options: Any) -> Function:
        return partial(flashproto.linear_cross_entropy, impl=impl, **options)

    made: dict[str, Callable[[], Prepared]] = {}
    for impl in impls:
        made[f"flashproto[{impl}]"] = partial(prepare, partial(ours, impl))
        if impl == "triton":
            made["flashproto[triton]-low"] = partial(prepare, partial(ours, impl, low_memory=True))
    made["torch"] = partial(prepare, lambda: materialised)
    if with_compile:
        made["compile"] = partial(prepare, lambda: compiled(materialised))
    for name, make in (("liger", liger), ("quack", quack), ("cut-cross-entropy", cut_cross_entropy)):
        module = {"liger": "liger_kernel", "quack": "quack"}.get(name, "cut_cross_entropy")
        if device.type == "cuda" and is_importable(module):
            made[name] = partial(prepare, make)
    if device.type == "cuda" and has_liger_cutedsl():
        made |= {name: partial(prepare, make) for name, make in LIGER_CUTEDSL.items()}
    return made


def liger() -> Function:
    from liger_kernel.ops.fused_linear_cross_entropy import LigerFusedLinearCrossEntropyFunction

    return lambda h, weight, targets: LigerFusedLinearCrossEntropyFunction.apply(h, weight, targets)[0]


def liger_cutedsl() -> Function:
    from liger_kernel.ops.cutedsl.ops import fused_linear_cross_entropy_sm90 as sm90

    return sm90.LigerFusedLinearCrossEntropySM90Function.apply


def liger_cutedsl_scaled() -> Function:
    from liger_kernel.ops.cutedsl.ops import fused_scaled_cross_entropy_sm90 as sm90

    losses = sm90.LigerFusedScaledCrossEntropySM90Function.apply
    return lambda h, weight, targets: losses(h, weight, targets).mean()


LIGER_CUTEDSL = {"liger-cutedsl": liger_cutedsl, "liger-cutedsl-scaled": liger_cutedsl_scaled}


def quack() -> Function:
    from quack.linear_cross_entropy import chunked_linear_cross_entropy

    # Not tuned: its tuning would take minutes.
    return partial(chunked_linear_cross_entropy, tuned=False)


def cut_cross_entropy() -> Function:
    from cut_cross_entropy import linear_cross_entropy

    return partial(linear_cross_entropy, filter_eps=None)  # exact gradients, as everyone's here
