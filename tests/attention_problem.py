"""What the attention tests share: random problems, eager attention, and the bound on errors."""

from __future__ import annotations

import math
import random
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from flashproto import reference

# |ours - float64| <= 2 |eager - float64| + ATOL, for the output, lse and every gradient.  The absolute
# part is one unit in the last place at 1 for the half types; it is needed where eager is exact by
# luck: one key makes its dq exactly 0.
ATOL = {torch.float32: 2e-5, torch.float16: 2.0**-10, torch.bfloat16: 2.0**-7}
HEAD_DIMS = (16, 24, 32, 40, 64, 72, 80, 96, 128, 160, 192, 256)
STRIDES = (
    "contiguous",
    "tokens first",
    "packed",
    "expanded",
    "every other",
    "offset",
    "transposed",
)


@dataclass(frozen=True)
class Problem:
    """One call of attention; `strides` says how q, k and v lie in memory, and dout unless dout_strides
    does."""

    dtype: torch.dtype
    B: int
    Hq: int
    Hkv: int
    Sq: int
    Sk: int
    D: int
    Dv: int
    causal: bool
    scale: float | None = None
    strides: str = "contiguous"
    lse_gradient: bool = True
    dout_strides: str | None = None

    @property
    def offset(self) -> int:
        return self.Sk - self.Sq


def draw(generator: random.Random, longest: int, most_heads: int) -> Problem:
    """A random problem with lengths log-uniform from 1 to `longest`."""

    def length() -> int:
        return round(math.exp(generator.uniform(0, math.log(longest))))

    group = generator.choice((1, 1, 2, 3, 4, 8))
    Hkv = generator.choice((1, 2, 3)) if group * 3 <= most_heads else 1
    D = generator.choice(HEAD_DIMS)
    Sq = length()
    return Problem(
        dtype=generator.choice(tuple(ATOL)),
        B=generator.choice((1, 2)),
        Hq=Hkv * group,
        Hkv=Hkv,
        Sq=Sq,
        Sk=Sq if generator.random() < 0.4 else length(),
        D=D,
        Dv=D if generator.random() < 0.6 else generator.choice(HEAD_DIMS),
        causal=generator.random() < 0.5,
        scale=generator.choice((None, None, None, 0.5 * D**-0.5, -(D**-0.5), 0.0)),
        strides=generator.choice(STRIDES),
        lse_gradient=generator.random() < 0.5,
    )


def accepted(problem: Problem, impl: str) -> Problem:
    """The nearest problem that backend `impl` takes; only dout keeps its strides."""
    if impl != "hopper":
        return problem
    return replace(
        problem,
        dtype=torch.bfloat16 if problem.dtype == torch.float32 else problem.dtype,
        Dv=problem.D,
        strides=problem.strides if problem.strides in STRIDES[:3] else "packed",
        dout_strides=problem.strides,
    )


def lay_out(x: Tensor, strides: str) -> Tensor:
    """The values of x [B, H, S, D] in memory as `strides` says."""
    B, H, S, D = x.shape
    if strides == "tokens first":
        return x.transpose(1, 2).contiguous().transpose(1, 2)
    if strides == "packed":  # a slice of a wider projection [B, S, 3, H, D]
        return torch.stack([x.transpose(1, 2)] * 3, 2)[:, :, 1].transpose(1, 2)
    if strides == "expanded":
        return x[:1].expand(B, H, S, D)
    if strides == "every other":
        return torch.stack([x, x], -1).flatten(3)[..., ::2]
    if strides == "offset":
        return torch.cat([x.new_zeros(3), x.flatten()])[3:].view(B, H, S, D)
    if strides == "transposed":
        return x.mT.contiguous().mT
    return x


def make(problem: Problem, device: str) -> tuple[list[Tensor], list[Tensor]]:
    """Random q, k, v, laid out and requiring gradients, and random gradients of out and lse."""
    p = problem
    shapes = ((p.B, p.Hq, p.Sq, p.D), (p.B, p.Hkv, p.Sk, p.D), (p.B, p.Hkv, p.Sk, p.Dv))
    inputs = [
        lay_out(torch.randn(s, device=device).to(p.dtype), p.strides).detach().requires_grad_()
        for s in shapes
    ]
    dout = torch.randn(p.B, p.Hq, p.Sq, p.Dv, device=device).to(p.dtype)
    dout = lay_out(dout, p.dout_strides or p.strides)
    dlse = torch.randn(p.B, p.Hq, p.Sq, device=device) * p.lse_gradient
    return inputs, [dout, dlse]


def eager(q: Tensor, k: Tensor, v: Tensor, problem: Problem) -> tuple[Tensor, Tensor]:
    """Attention as PyTorch computes it operator by operator in the dtype of q."""
    group = problem.Hq // problem.Hkv
    k, v = (t.repeat_interleave(group, 1) for t in (k, v))
    s = (q @ k.mT) * (problem.D**-0.5 if problem.scale is None else problem.scale)
    if problem.causal:
        visible = reference.causal_mask(problem.Sq, problem.Sk, problem.offset, q.device)
        s = s.masked_fill(~visible, -math.inf)
        keyless = ~visible.any(-1)
        p = torch.softmax(s.masked_fill(keyless[:, None], 0.0), -1).masked_fill(keyless[:, None], 0.0)
        lse = torch.logsumexp(s.masked_fill(keyless[:, None], 0.0), -1)
        return p @ v, lse.masked_fill(keyless, -math.inf)
    return torch.softmax(s, -1) @ v, torch.logsumexp(s, -1)


def results(outputs: tuple[Tensor, Tensor], inputs: list[Tensor], gradients: list[Tensor]) -> dict:
    """out, lse and the three gradients; rows without a key give lse no gradient."""
    out, lse = outputs
    dout, dlse = gradients
    dlse = torch.where(lse.isinf(), 0.0, dlse).to(lse.dtype)
    grads = torch.autograd.grad([out, lse], inputs, [dout.to(out.dtype), dlse])
    return dict(zip(("out", "lse", "dq", "dk", "dv"), (out, lse, *grads), strict=True))


def exact_and_eager(problem: Problem, inputs: list[Tensor], gradients: list[Tensor]) -> tuple:
    """The float64 reference and eager attention in the problem's dtype."""
    doubled = [t.detach().double().requires_grad_() for t in inputs]
    exact = reference.attention(*doubled, causal=problem.causal, scale=problem.scale)
    plain = [t.detach().requires_grad_() for t in inputs]
    return results(exact, doubled, gradients), results(eager(*plain, problem), plain, gradients)


def error(a: Tensor, b: Tensor) -> float:
    """Largest difference, equal infinities counting as none; NaN stays NaN."""
    difference = torch.where(a.double() == b.double(), 0.0, a.double() - b.double())
    return difference.abs().max().item() if difference.numel() else 0.0


def assert_within_bound(got: dict, exact: dict, plain: dict, dtype: torch.dtype) -> None:
    for name, value in got.items():
        assert value.shape == exact[name].shape, name
        ours, allowed = error(value, exact[name]), 2 * error(plain[name], exact[name]) + ATOL[dtype]
        assert ours <= allowed, f"{name}: error {ours:.3g}, allowed {allowed:.3g}"
