"""Attention's variants, TFLOP/s of the pairs that are visible: windows, sequences side by side, a tree
of branches, softcap, sinks, ALiBi, padded keys.

FLOPs are 4 D for each pair of a query and a key that it sees, in each head, and 2.5 times that
backward: what a tile computes of hidden pairs counts as nothing.  All is causal but padding's mask.
"flashproto[...]" is attention with a mask, of padding scaled_dot_product_attention; "varlen" is
attention_varlen, and flash-attn-4's function of that name where there are several sequences.
"(plain, ...)", the plainer problem, is flashproto, too: a batch of sequences of equal length with as
many tokens, causal attention instead of the tree, the same scores unchanged.  Masks, FlexAttention's
block mask and where sequences start are made outside the timing.  Slopes of ALiBi have no gradient
here, sinks have theirs.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache, partial
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend

import flashproto

from .. import backends
from ..mask_values import TILE
from . import peers, report
from .attention import Sampled
from .measure import OURS, PLAIN, VARLEN, Prepared
from .peers import Function
from .variant_problems import (
    SOFTCAP,
    Problem,
    numbers,
    options,
    pairs,
    plainer,
    problems,
    real_keys,
    slopes,
    starts,
    tiles,
    work,
)

__all__ = ["contenders", "family", "goals", "problems", "work"]

SDPA = {
    "sdpa-cudnn": SDPBackend.CUDNN_ATTENTION,
    "sdpa-efficient": SDPBackend.EFFICIENT_ATTENTION,
}


def family(p: Problem) -> str:
    """Each cell is compiled ahead by itself."""
    return p.key


# --- contenders ----------------------------------------------------------------------------------

Layout = tuple[Callable[[Tensor], Tensor], Callable[[Tensor], Tensor]]  # of [B, H, S, D], and back
LAYOUTS: dict[str, Layout] = {
    "BHSD": (lambda t: t, lambda t: t),
    "BSHD": (lambda t: t.transpose(1, 2), lambda t: t.transpose(1, 2)),
    "THD": (lambda t: t[0].transpose(0, 1), lambda t: t.transpose(0, 1)[None]),
}


def in_batch(n: int) -> Layout:
    """n sequences of equal length, from side by side to a batch of n."""
    return (
        lambda t: t[0].unflatten(1, (n, -1)).transpose(0, 1),
        lambda t: t.transpose(0, 1).flatten(1, 2)[None],
    )


def by_default(impl: str, function: Function) -> Function:
    """f(q, k, v) by a function whose backend has no argument."""

    def call(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        before = backends.get_default()
        backends.set_default(impl)
        try:
            return function(q, k, v)
        finally:
            backends.set_default(before)

    return call


def attention(impl: str, given: dict[str, Any]) -> Function:
    def call(q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None = None) -> Any:
        return flashproto.attention(q, k, v, sinks=sinks, impl=impl, **given)

    return call


def ours(p: Problem, device: torch.device, impl: str) -> dict[str, tuple[Function, Layout]]:
    """By what stands behind the name of flashproto[impl]."""
    if p.kind == "padding":
        sdpa = partial(flashproto.scaled_dot_product_attention, attn_mask=real_keys(p, device))
        return {"": (by_default(impl, sdpa), LAYOUTS["BHSD"])}
    made = {"": (attention(impl, options(p, device)), LAYOUTS["BHSD"])}
    if p.packed:
        cu, longest = starts(p, device), max(p.lengths)

        def varlen(q: Tensor, k: Tensor, v: Tensor) -> Any:
            return flashproto.attention_varlen(
                q, k, v, cu, cu, longest, longest, causal=True, impl=impl
            )

        made[VARLEN] = varlen, LAYOUTS["THD"]
    return made


def plain(p: Problem, device: torch.device, impl: str) -> tuple[Function, Layout]:
    """Of a problem that plainer() gives."""
    if p.packed:
        return attention(impl, {"causal": True}), in_batch(len(p.lengths))
    return attention(impl, options(p, device)), LAYOUTS["BHSD"]


def mask_mod(p: Problem, device: torch.device) -> Function:
    """FlexAttention's, as its users write it."""
    number = numbers(p, device)

    def mod(b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        if p.kind == "padding":
            return j < lengths[b]
        seen = i >= j
        if p.window:
            seen = seen & (i - j < p.window)
        if p.kind == "tree":
            return seen & ((number[j] == 0) | (number[i] == number[j]))
        return seen & (number[i] == number[j]) if p.packed else seen

    lengths = torch.tensor(p.lengths, device=device)
    return mod


def score_mod(p: Problem, device: torch.device) -> Function | None:
    slope = slopes(p, device)

    def softcap(score: Tensor, b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        return SOFTCAP * torch.tanh(score / SOFTCAP)

    def alibi(score: Tensor, b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        return score - slope[h] * (i - j)

    return {"softcap": softcap, "alibi": alibi}.get(p.score)


def others(
    p: Problem, device: torch.device, with_compile: bool
) -> dict[str, tuple[Callable[[], Function], str]]:
    """The peers that have the variant."""
    made: dict[str, tuple[Callable[[], Function], str]] = {}
    gqa = p.Hq != p.Hkv
    if p.kind == "padding":
        on_gpu = device.type == "cuda"
        for name, backend in SDPA.items() if on_gpu else [("sdpa", None)]:
            made[name] = partial(peers.sdpa, backend, attn_mask=real_keys(p, device)), "BHSD"
    if with_compile and p.score != "sinks":

        def flex() -> Function:
            batch = p.B if p.kind == "padding" else None
            mods = mask_mod(p, device), score_mod(p, device)
            return peers.flex_attention(*mods, batch, p.S, gqa, device)

        made["flex"] = flex, "BHSD"
    if peers.has_flash_attn_4(device) and p.kind == "sequences" and p.score != "alibi":
        given: dict[str, Any] = {"causal": True}
        if p.window:
            given["window_size"] = (p.window - 1, 0)
        if p.score == "softcap":
            given["softcap"] = SOFTCAP
        if p.packed:
            cu = starts(p, device)
            made["fa4"] = partial(peers.flash_attn_4_varlen, cu, max(p.lengths), **given), "THD"
        else:
            made["fa4"] = partial(peers.flash_attn_4, **given), "BSHD"
    return made


def contenders(
    p: Problem, device: torch.device, impls: Sequence[str], with_compile: bool
) -> dict[str, Callable[[], Prepared]]:
    """flashproto's backends, they on a plainer problem, and every peer, on the same random tensors."""
    q = torch.randn(p.B, p.Hq, p.S, p.D, device=device, dtype=p.dtype)
    k, v = (torch.randn(p.B, p.Hkv, p.S, p.D, device=device, dtype=p.dtype) for _ in range(2))
    grad = torch.randn_like(q)
    sinks = torch.randn(p.Hq, device=device)

    @cache
    def sampled(problem: Problem) -> Sampled:
        given = options(problem, device)
        variant: dict[str, Any] = {n: given[n] for n in ("softcap", "alibi_slopes") if n in given}
        if "window" in given:
            variant["left"] = given["window"][0]
        if "mask" in given:
            variant["begin"], variant["end"] = given["mask"].intervals(problem.S, problem.S)
        if problem.score == "sinks":
            variant["sinks"] = sinks
        return Sampled(problem, q, k, v, grad, **variant)

    def prepare(problem: Problem, make: Callable[[], Function], layout: Layout) -> Prepared:
        to, back = layout
        leaves = [
            to(t).detach().clone(memory_format=torch.contiguous_format).requires_grad_()
            for t in (q, k, v)
        ]
        if problem.score == "sinks":
            leaves.append(sinks.clone().requires_grad_())
        function = make()

        def check(out: Tensor, grads: Sequence[Tensor] | None) -> str | None:
            grads = grads and [*map(back, grads[:3]), *grads[3:]]
            return sampled(problem).check(back(out), grads)

        share = pairs(problem) / pairs(p)
        return Prepared(lambda: function(*leaves), leaves, to(grad).contiguous(), check, share=share)

    def made_outside(function: Function) -> Callable[[], Function]:
        return lambda: function

    # PyTorch's own attention has no variants.
    impls = [impl for impl in impls if impl != "torch"]
    simple = plainer(p)
    made: dict[str, Callable[[], Prepared]] = {}
    for impl in impls:
        for behind, (function, layout) in ours(p, device, impl).items():
            made[f"{OURS}[{impl}]{behind}"] = partial(prepare, p, made_outside(function), layout)
        if simple is not None:
            function, layout = plain(simple, device, impl)
            made[f"{PLAIN}, {impl})"] = partial(prepare, simple, made_outside(function), layout)
    for name, (make, form) in others(p, device, with_compile).items():
        made[name] = partial(prepare, p, make, LAYOUTS[form])
    return made


# --- goals ---------------------------------------------------------------------------------------


class Goal(NamedTuple):
    """cell: how its name begins.  ours: what stands behind flashproto[impl].  against: how the name of
    another contender begins.  forward, backward: how many times its TFLOP/s are wanted."""

    cell: str
    ours: str
    against: str
    forward: float
    backward: float


GOALS = (
    Goal("window 1024 D128 ", "", "fa4", 1.05, 1.0),
    *(Goal("8 documents of 2048 D128 ", how, "fa4", 1.05, 1.05) for how in ("", VARLEN)),
    *(Goal("8 documents of 2048 D128 ", how, PLAIN, 0.9, 0.9) for how in ("", VARLEN)),
    Goal("16 sequences of 128 to 4096 D128 ", VARLEN, PLAIN, 0.9, 0.9),
    Goal("tree of 8x1024 on 4096 D128 ", "", PLAIN, 0.85, 0.8),
    Goal("softcap 30 D128 ", "", "fa4", 1.5, 1.15),
    Goal("sinks D128 ", "", PLAIN, 0.95, 0.95),
    Goal("ALiBi D128 ", "", PLAIN, 0.95, 0.95),
)


def goals(data: dict[str, Any]) -> str:
    """The cells that have goals against them, and what their masks cost in whole tiles."""
    known = {p.key: p for p in problems(False, torch.device("cuda"))}
    rows, missed = [], 0
    for goal in GOALS:
        key = next((key for key in data["cells"] if key.startswith(goal.cell)), None)
        for which in ("forward", "backward"):
            wanted = getattr(goal, which)
            found = reached(data["cells"][key]["passes"].get(which, {}), goal) if key else None
            if found is None:
                rows.append(f"{goal.cell}{which}: not measured beside {goal.against}")
                missed += 1
                continue
            own, best, ratio = found
            missed += ratio < wanted
            rows.append(
                f"{key:<42} {which:<9} {own:<26} {ratio:6.3f} x {best:<16} wanted {wanted:<5}"
                f"{'yes' if ratio >= wanted else 'NO'}"
            )
    for key in data["cells"]:
        if key in known:
            p, simple = known[key], plainer(known[key])
            text = f"{key:<42} tiles of {TILE} hold {tiles(p):.3f} times the visible pairs"
            rows.append(text + (f", the plain ones {tiles(simple):.3f}" if simple else ""))
    return "\n".join([*rows, f"below a goal: {missed} of {2 * len(GOALS)}"])


def reached(results: dict[str, Any], goal: Goal) -> tuple[str, str, float] | None:
    """Of one pass our fastest contender that the goal is of, the one it is against, and the ratio of
    their TFLOP/s; None if either has no time."""
    timed = {n: r for n, r in results.items() if "ms" in r}
    own = {n: r for n, r in timed.items() if n.startswith(OURS) and n.partition("]")[2] == goal.ours}
    peer = {n: r for n, r in timed.items() if n.startswith(goal.against)}
    if not own or not peer:
        return None
    names = report.fastest(own), report.fastest(peer)
    return *names, own[names[0]]["value"] / peer[names[1]]["value"]
