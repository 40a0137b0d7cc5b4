"""Attention, TFLOP/s: 16,384 tokens in all and H = 2048 / D, forward and backward.

FLOPs are 4 B H S^2 D forward (half of it when causal) and 2.5 times that backward.  "fa3" is
FlashAttention-3 of PyPI's tokenspeed-fa3, which has no backward; "cudnn-flex" is cudnn.flex_attention
of nvidia-cudnn-frontend.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any

import torch
from torch import Tensor

import flashproto

from .. import reference
from . import peers, report
from .measure import DETERMINISTIC, Prepared, Work, compare
from .peers import Function
from .visible import keys_before

TOKENS = 16384
WIDTH = 2048
LENGTHS = (1024, 2048, 4096, 8192, 16384)
PIECE = 2**26  # scores of the exact result that are in memory at once
OF_THE_MEAN = 0.02  # that much of the exact result may be missing, or too much
LEARNED = ("sinks", "bias", "relative_bias")  # whose gradients are sums over the batch
OF_QUERIES = ("out", "dq", "max_score")


@dataclass(frozen=True)
class Problem:
    B: int
    Hq: int
    Hkv: int
    S: int
    D: int
    causal: bool
    dtype: torch.dtype

    @property
    def key(self) -> str:
        heads = f" GQA {self.Hq}/{self.Hkv} B{self.B}" if self.Hq != self.Hkv else ""
        return f"D{self.D} S{self.S} {'causal' if self.causal else 'full'}{heads}"


def problems(quick: bool, device: torch.device) -> list[Problem]:
    """The cells: a square grid of head dims and lengths, then GQA; a small one on a CPU."""
    if device.type != "cuda":
        sizes = [(64, 128), (64, 512)] if quick else [(64, 128), (64, 512), (128, 512), (64, 1024)]
        return [
            Problem(1, 4, 4, S, D, causal, torch.float32) for D, S in sizes for causal in (False, True)
        ]
    dims, lengths = ((64, 128), (4096,)) if quick else ((64, 128, 256), LENGTHS)
    grid = [
        Problem(TOKENS // S, WIDTH // D, WIDTH // D, S, D, causal, torch.bfloat16)
        for D in dims
        for S in lengths
        for causal in (False, True)
    ]
    gqa = [
        Problem(1, 64, 8, S, 128, causal, torch.bfloat16)
        for S in (4096, 8192, 16384, 32768)
        for causal in (False, True)
    ]
    return grid if quick else grid + gqa


def family(p: Problem) -> str:
    """Cells whose kernels differ at most by length."""
    return f"{p.D} {p.causal} {p.Hq // p.Hkv}"


def work(p: Problem) -> Work:
    flops = 4 * p.B * p.Hq * p.S**2 * p.D * (0.5 if p.causal else 1.0)
    return Work("TFLOP/s", flops / 1e9, 2.5 * flops / 1e9)


def goals(data: dict[str, Any]) -> str:
    """The passes against their goals: 1.05 times the best peer in every cell (1.0 where it is at the
    matmul ceiling) and 1.10 in geometric mean.  Determinism may cost a quarter (see conclusion)."""
    return "\n\n".join(
        report.targets(data["cells"], which, 1.05, 1.10, at_ceiling=1.0)
        for which in ("forward", "backward")
    )


def conclusion(data: dict[str, Any]) -> str:
    """What determinism costs."""
    costs = {}
    for key, cell in data["cells"].items():
        timed = {n: r["ms"] for n, r in cell["passes"]["backward"].items() if "ms" in r}
        for name, ms in timed.items():
            if name.endswith(DETERMINISTIC) and name.removesuffix(DETERMINISTIC) in timed:
                costs[key] = ms / timed[name.removesuffix(DETERMINISTIC)] - 1
    cells = "; ".join(f"{key} {cost:+.0%}" for key, cost in costs.items())
    most = f", at most {max(costs.values()):.0%}" if costs else ""
    return f"cost of a deterministic backward{most}: {cells or 'not measured'}"


class Sampled:
    """The exact result of the first and the last key head's group, in float32, to check against: of the
    first and the last entry of the batch, of a bias of all; where there are sinks, whose gradients are
    sums that may cancel in one head, of all heads too.

    variant: see `exact`; LEARNED and alibi_slopes of all heads, begin, end and bits [B | 1, 1, ...].
    """

    def __init__(self, p: Any, q: Tensor, k: Tensor, v: Tensor, grad: Tensor, **variant: Any) -> None:
        self.p, self.variant = p, variant
        self.learned = next((name for name in LEARNED if name in variant), None)
        self.given = [t.detach() for t in (q, k, v, grad)]
        group = p.Hq // p.Hkv
        heads = [*range(p.Hkv)] if self.learned == "sinks" else [*dict.fromkeys((0, p.Hkv - 1))]
        ends = dict.fromkeys([(0, 0), (p.B - 1, p.Hkv - 1)])
        every = [(b, h) for b in range(p.B) for h in heads]
        self.parts = [
            (slice(b, b + 1), slice(h * group, (h + 1) * group), slice(h, h + 1))
            for b, h in (every if self.learned else ends)
        ]

    @cached_property
    def want(self) -> list[dict[str, Tensor]]:
        q, k, v, grad = self.given
        return [
            exact(
                *(q[b, hq], k[b, hkv], v[b, hkv], grad[b, hq]),
                self.p.causal,
                b.start * self.p.Hq + hq.start,
                **{name: self._part(name, x, b, hq) for name, x in self.variant.items()},
            )
            for b, hq, hkv in self.parts
        ]

    @staticmethod
    def _part(name: str, x: Any, b: slice, hq: slice) -> Any:
        """Of one entry of the batch and a group of heads."""
        if name in ("begin", "end", "bits"):
            return x[b] if x.shape[0] > 1 else x
        return x.detach()[hq] if name in (*LEARNED, "alibi_slopes") else x

    def check(
        self, out: Tensor, grads: Sequence[Tensor] | None, max_score: Tensor | None = None
    ) -> str | None:
        """What is wrong with out, with (dq, dk, dv), behind which one of LEARNED has its gradient, and
        with max_score [B, H, S]; None if nothing."""
        names = ("dq", "dk", "dv", *([f"d{self.learned}"] if self.learned else []))
        got = {"out": out} if grads is None else dict(zip(names, grads, strict=True))
        if max_score is not None:
            got["max_score"] = max_score
        for name, value in got.items():
            if not bool(value.isfinite().all()):
                return f"wrong result: {name} is not finite"
        learned = got.pop(f"d{self.learned}", None)
        for part, want in self._pairs(got):
            complaint = compare(part, want, {"dq": want["rounding"]})
            if complaint:
                return complaint
        return None if learned is None else self._check_learned(f"d{self.learned}", learned)

    def _pairs(self, got: dict[str, Tensor]) -> Iterator[tuple[dict[str, Tensor], dict[str, Tensor]]]:
        """The parts of what is got, and what is wanted there."""
        for (b, hq, hkv), want in zip(self.parts, self.want, strict=True):
            yield {n: t[b, hq if n in OF_QUERIES else hkv] for n, t in got.items()}, want

    def _check_learned(self, name: str, got: Tensor) -> str | None:
        by_heads: dict[int, list[Tensor]] = {}
        for (_, hq, _), want in zip(self.parts, self.want, strict=True):
            by_heads.setdefault(hq.start, []).append(want[name])
        exact = torch.cat([torch.stack(parts).sum(0) for parts in by_heads.values()])
        group = self.p.Hq // self.p.Hkv
        got = torch.cat([got[h : h + group] for h in by_heads])
        # They are sums in float32 of what is rounded to the tensors' dtype.
        return compare({name: got.to(self.given[0].dtype)}, {name: exact})

    def check_mean(self, out: Tensor, grads: Sequence[Tensor] | None) -> str | None:
        """The same of what has random zeros and is right in the mean: by how much of the exact result
        it has, within OF_THE_MEAN and five standard errors, rows being independent.  The first ones
        count for nothing, whose few probabilities have no mean."""
        got = {"out": out} if grads is None else dict(zip(("dq", "dk", "dv"), grads, strict=True))
        for part, want in self._pairs(got):
            for name, value in part.items():
                rows = slice(value.shape[2] // 8, None)
                exact = want[name][:, :, rows]
                own = (value.detach()[:, :, rows].float() * exact).sum(-1)
                whole = exact.square().sum(-1)
                share = own.sum() / whole.sum()
                deviation = (own - share * whole).norm() / whole.sum()
                if not abs(share - 1) <= OF_THE_MEAN + 5 * deviation:
                    return f"wrong result: {name} has {share:.3f} of the exact one in the mean"
        return None


def rounding_of_dq(
    q: Tensor,
    k: Tensor,
    out: Tensor,
    dout: Tensor,
    dtype: torch.dtype,
    causal: bool,
    offset: int | None = None,
    **variant: Any,
) -> Tensor:
    """How far a right backward in `dtype` may round each row of dq, [B, H, S], from float32 tensors.

    A row's gradient is scale * sum_j P_j (dP_j - delta) k_j with delta = sum_d dout_d out_d, and every
    fused kernel takes `out` from memory, rounded.  Roundings are independent errors of standard
    deviation at most eps / sqrt(12) of the value, eps = torch.finfo(dtype).eps, so that delta's has
    at most eps / sqrt(12) |dout * out| and dq's that times scale |sum_j P_j k_j|.  This is nothing
    beside dq where many keys share a row, but no share of dq bounds it where dP_j - delta cancels: in
    the first rows under a causal mask, which see few keys (PyTorch's eager bfloat16 is off by as much
    there).  Here are four standard deviations.  A softcap makes it less.
    """
    mean_key, _ = reference.attention(q, k, k, causal=causal, causal_offset=offset, **variant)
    return rounding_of_delta(mean_key, out, dout, dtype)


def rounding_of_delta(mean_key: Tensor, out: Tensor, dout: Tensor, dtype: torch.dtype) -> Tensor:
    """`rounding_of_dq` of mean_key, each row's sum_j P_j k_j."""
    deviation = torch.finfo(dtype).eps / math.sqrt(12)
    scale = mean_key.shape[-1] ** -0.5
    return 4 * deviation * (dout * out).norm(dim=-1) * scale * mean_key.norm(dim=-1)


def exact(
    q: Tensor, k: Tensor, v: Tensor, grad: Tensor, causal: bool, number: int = 0, **variant: Any
) -> dict[str, Tensor]:
    """out [1, group, S, Dv], dq [1, group, S, D], dk, dv [1, 1, S, ...], max_score and rounding
    [1, group, S] of one group of query heads, in float32 and in pieces of the queries; of one of
    LEARNED also its gradient.

    number: that of the first head among all of the batch, which dropout goes by.
    variant: left, softcap, sinks and alibi_slopes [group], bias [group, S, S], relative_bias
    [group, R], relative_offset, begin and end [1, 1, S], bits [1, 1, ...], dropout_p and dropout_seed
    of reference.attention.
    """
    S = q.shape[2]
    k, v = k.float(), v.float()
    like_q = torch.empty(q.shape, device=q.device)
    want = {
        "out": like_q.new_empty(grad.shape),
        "dq": torch.empty_like(like_q),
        "rounding": like_q.new_empty(q.shape[:3]),
        "max_score": like_q.new_empty(q.shape[:3]),
        "dk": torch.zeros_like(k),
        "dv": torch.zeros_like(v),
    }
    learned = [name for name in LEARNED if name in variant]
    want |= {f"d{name}": torch.zeros_like(variant[name], dtype=torch.float32) for name in learned}
    step = S if "dropout_p" in variant else max(1, PIECE // S)  # dropout counts queries from 0
    for h in range(q.shape[1]):
        for start in range(0, S, step):
            piece = slice(h, h + 1), slice(start, min(start + step, S))
            seen = piece[1].stop if causal else S
            dout = grad[:, *piece].float()
            queries, keys, values = (
                t.requires_grad_()
                for t in (q[:, *piece].float(), k[:, :, :seen].detach(), v[:, :, :seen].detach())
            )
            of_piece = {n: part_of(n, x, h, piece[1], seen) for n, x in variant.items()}
            dropout = {n: of_piece.pop(n) for n in ("dropout_p", "dropout_seed") if n in of_piece}
            added = [of_piece[name].requires_grad_() for name in learned]
            out, _, max_score, _ = reference.attention(
                queries,
                keys,
                values,
                causal=causal,
                causal_offset=start,
                sequence=number + h,
                return_aux=True,
                **of_piece,
                **dropout,
            )
            dq, dk, dv, *dadded = torch.autograd.grad(out, [queries, keys, values, *added], dout)
            with torch.no_grad():
                want["rounding"][:, *piece] = rounding_of_dq(
                    queries, keys, out, dout, q.dtype, causal, start, **of_piece
                )
            want["out"][:, *piece], want["dq"][:, *piece] = out.detach(), dq
            want["max_score"][:, *piece] = max_score.detach()
            want["dk"][:, :, :seen] += dk
            want["dv"][:, :, :seen] += dv
            for name, gradient in zip(learned, dadded, strict=True):
                part_of(name, want[f"d{name}"], h, piece[1], seen).add_(gradient)
    return want


def part_of(name: str, x: Any, h: int, rows: slice, seen: int) -> Any:
    """Of an entry of `variant` what these queries of head h and the first `seen` keys have."""
    if name in ("begin", "end"):
        return x[..., :seen] - rows.start
    if name == "bits":
        return x[..., rows, :]
    if name == "bias":
        x = x[:, rows, :seen]
    if name == "relative_offset":  # there the last query is at the last key's position
        return x + rows.stop - seen
    return x[h : h + 1].float().detach() if name in (*LEARNED, "alibi_slopes") else x


def contenders(
    p: Problem, device: torch.device, impls: Sequence[str], with_compile: bool
) -> dict[str, Callable[[], Prepared]]:
    """flashproto's backends and every peer, all on the same random q, k, v and output gradient."""
    q = torch.randn(p.B, p.Hq, p.S, p.D, device=device, dtype=p.dtype)
    k, v = (torch.randn(p.B, p.Hkv, p.S, p.D, device=device, dtype=p.dtype) for _ in range(2))
    grad = torch.randn_like(q)
    sampled = Sampled(p, q, k, v, grad)

    def prepare(make: Callable[[], Function], layout: str, **told: bool) -> Prepared:
        def to_layout(t: Tensor) -> Tensor:
            return t if layout == "BHSD" else t.transpose(1, 2)

        leaves = [
            to_layout(t).detach().clone(memory_format=torch.contiguous_format).requires_grad_()
            for t in (q, k, v)
        ]
        function = make()

        def check(out: Tensor, grads: Sequence[Tensor] | None) -> str | None:
            return sampled.check(to_layout(out), grads and [to_layout(t) for t in grads])

        return Prepared(lambda: function(*leaves), leaves, to_layout(grad).contiguous(), check, **told)

    def ours(impl: str) -> Function:
        return partial(flashproto.attention, causal=p.causal, impl=impl)

    made: dict[str, Callable[[], Prepared]] = {}
    for impl in impls:
        made[f"flashproto[{impl}]"] = partial(prepare, partial(ours, impl), "BHSD")
        if impl == "hopper":
            made[f"flashproto[{impl}]{DETERMINISTIC}"] = partial(
                prepare, partial(ours, impl), "BHSD", deterministic=True
            )
    for name, (make, layout) in others(p, device, with_compile).items():
        made[name] = partial(prepare, make, layout, forward_only=name in peers.FORWARD_ONLY)
    return made


def others(
    p: Problem, device: torch.device, with_compile: bool
) -> dict[str, tuple[Callable[[], Function], str]]:
    """The peers, as peers.attention_peers has them."""
    made = peers.attention_peers(p.causal, p.S, p.Hq != p.Hkv, device, with_compile)
    if peers.has_flash_attn_3(device):
        made["fa3"] = partial(peers.flash_attn_3, p.causal), "BSHD"
    if peers.has_cudnn_flex(device):

        def cudnn_flex() -> Function:
            keys = keys_before([p.S] * p.B)
            return peers.cudnn_flex((keys if p.causal else torch.full_like(keys, p.S)).to(device))

        made[peers.CUDNN_FLEX] = cudnn_flex, "BSHD"
    return made
