"""Attention's variants, TFLOP/s of the pairs that are visible: windows, sequences side by side, a tree
of branches, softcap, sinks, ALiBi, padded keys.

FLOPs are 4 D for each pair of a query and a key that it sees, in each head, and 2.5 times that
backward: what a tile computes of hidden pairs counts as nothing.  All is causal but padding's mask.
"flashproto[...]" is attention with a mask, of padding scaled_dot_product_attention; "varlen" is
attention_varlen, and flash-attn-4 and "fa3" take several sequences in that way.
"without the variant", "(plain, ...)" in the files, is flashproto's causal attention alone: of a batch
of sequences of equal length with as many tokens, without the tree, with scores unchanged.  Masks,
FlexAttention's block mask and where sequences start are made outside the timing.  Slopes of ALiBi have
no gradient here, sinks have theirs.

"fa3" is FlashAttention-3 of PyPI's tokenspeed-fa3, which has no backward.  "cudnn-flex" is
cudnn.flex_attention of nvidia-cudnn-frontend, whose masks are intervals of keys for each query.  It has
sinks by its log-sum-exp, in a kernel that torch.compile makes, and its max_score is one number for each
head, which is not checked.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cache, partial
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend

import flashproto

from .. import backends
from ..reference.mask_table import packed
from . import peers
from .attention import Sampled
from .measure import OURS, PLAIN, VARLEN, Prepared
from .peers import CUDNN_FLEX, Function
from .variant_goals import goals
from .variant_problems import (
    BLOCK,
    DROPOUT,
    LEARNED,
    RULES,
    SOFTCAP,
    Problem,
    boolean,
    global_sizes,
    learned,
    mask_of,
    numbers,
    options,
    pairs,
    plainer,
    problems,
    real_keys,
    slopes,
    starts,
    work,
)
from .visible import keys_before, keys_of_queries

__all__ = ["contenders", "family", "goals", "problems", "work"]

SDPA = {
    "sdpa-cudnn": SDPBackend.CUDNN_ATTENTION,
    "sdpa-efficient": SDPBackend.EFFICIENT_ATTENTION,
    "sdpa-flash": SDPBackend.FLASH_ATTENTION,
}
SAMPLED = ("softcap", "alibi_slopes", "relative_offset", "dropout_p", "dropout_seed")
OF_FLASH_ATTN_4 = ("", "softcap", "sinks")  # scores
OF_FLASH_ATTN_3 = ("", "sinks")
OF_CUDNN_FLEX = ("", "sinks", "max_score")


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


def attention(impl: str, given: dict[str, Any], name: str | None = None) -> Function:
    """f(q, k, v), with what is learned, an argument of that name, behind them."""

    def call(q: Tensor, k: Tensor, v: Tensor, *more: Tensor) -> Any:
        added: dict[str, Any] = {} if name is None else dict(zip([name], more, strict=True))
        return flashproto.attention(q, k, v, impl=impl, **given, **added)

    return call


def ours(p: Problem, device: torch.device, impl: str) -> dict[str, tuple[Function, Layout]]:
    """By what is behind the name of flashproto[impl]."""
    if p.kind == "padding":
        sdpa = partial(flashproto.scaled_dot_product_attention, attn_mask=real_keys(p, device))
        return {"": (by_default(impl, sdpa), LAYOUTS["BHSD"])}
    call = attention(impl, options(p, device), LEARNED.get(p.score))
    made = {"": (call, LAYOUTS["BHSD"])}
    if p.packed:
        cu, longest = apart(p, device)

        def varlen(q: Tensor, k: Tensor, v: Tensor) -> Any:
            return flashproto.attention_varlen(
                q, k, v, cu, cu, longest, longest, causal=True, impl=impl
            )

        made[VARLEN] = varlen, LAYOUTS["THD"]
    return made


def apart(p: Problem, device: torch.device) -> tuple[Tensor, int]:
    """Of sequences side by side where each starts, and the length of the longest."""
    return starts(p, device), max(p.lengths)


def plain(p: Problem, device: torch.device, impl: str) -> tuple[Function, Layout]:
    """Of a problem that plainer() gives."""
    if p.packed:
        return attention(impl, {"causal": True}), in_batch(len(p.lengths))
    return attention(impl, options(p, device)), LAYOUTS["BHSD"]


def mask_mod(p: Problem, device: torch.device) -> Function | None:
    """FlexAttention's, as its users write it."""
    if p.kind == "full":
        return None
    if p.kind in RULES:
        return rule_mod(p, device)
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


def rule_mod(p: Problem, device: torch.device) -> Function:
    half, (side, first) = p.S // 2, global_sizes(p)

    def block_diffusion(b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        clean_i, clean_j = i >= half, j >= half
        block_i, block_j = i % half // BLOCK, j % half // BLOCK
        return ((block_i == block_j) & (clean_i == clean_j)) | (clean_j & (block_i > block_j))

    def global_tokens(b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        return ((i - j <= side) & (j - i <= side)) | (i < first) | (j < first)

    if p.kind in ("boolean", "tiles"):
        seen = boolean(p, device)
        return lambda b, h, i, j: seen[b, 0, i, j]
    return block_diffusion if p.kind == "block diffusion" else global_tokens


def score_mod(p: Problem, device: torch.device, *given: Tensor) -> Function | None:
    """given: what is learned."""
    slope, middle = slopes(p, device), p.columns // 2
    table = given[0] if given else slope

    def softcap(score: Tensor, b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        return SOFTCAP * torch.tanh(score / SOFTCAP)

    def alibi(score: Tensor, b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        return score - slope[h] * (i - j)

    def bias(score: Tensor, b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        return score + table[h, i, j]

    def relative_bias(score: Tensor, b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        return score + table[h, torch.clamp(i - j + middle, 0, 2 * middle)]

    made = {"softcap": softcap, "alibi": alibi, "bias": bias, "relative bias": relative_bias}
    return made.get(p.score)


def sdpa_peers(p: Problem, device: torch.device) -> tuple[tuple[str, ...], dict[str, Any]]:
    """torch's backends that have the variant, and what they are given beside q, k, v and a bias."""
    if p.kind == "padding":
        return ("sdpa-cudnn", "sdpa-efficient"), {"attn_mask": real_keys(p, device)}
    if p.kind in ("boolean", "tiles"):
        return ("sdpa-cudnn", "sdpa-efficient"), {"attn_mask": boolean(p, device)}
    if p.score == "bias":
        return ("sdpa-efficient",), {}
    if p.score == "dropout":
        return ("sdpa-flash",), {"is_causal": True, "dropout_p": DROPOUT}
    if p.D > 256:
        return ("sdpa-efficient",), {"is_causal": True}
    return ("sdpa-cudnn",) if p.Dv else (), {"is_causal": True}


def others(
    p: Problem, device: torch.device, with_compile: bool
) -> dict[str, tuple[Callable[[], Function], str]]:
    """The peers that have the variant."""
    made: dict[str, tuple[Callable[[], Function], str]] = {}
    gqa = p.Hq != p.Hkv
    names, given = sdpa_peers(p, device)
    for name in names:
        name, backend = (name, SDPA[name]) if device.type == "cuda" else ("sdpa", None)
        made[name] = partial(peers.sdpa, backend, **given), "BHSD"
    if with_compile and p.score not in ("sinks", "dropout", "max_score"):

        def flex(**options: Any) -> Function:
            batch = p.B if p.kind in ("padding", "boolean", "tiles") else None
            mods = mask_mod(p, device), partial(score_mod, p, device)
            return peers.flex_attention(*mods, batch, p.S, gqa, device, **options)

        made["flex"] = flex, "BHSD"
        if p.kind != "full" and not p.score and p.D <= 256 and peers.has_flex_flash(device):
            made["flex-flash"] = partial(flex, kernel_options={"BACKEND": "FLASH"}), "BHSD"
    if p.D > 256:
        if peers.has_ffpa(device):
            made["ffpa"] = peers.ffpa, "BHSD"
            made["ffpa-cutedsl"] = partial(peers.ffpa, backend="cutedsl"), "BHSD"
        return made
    if peers.has_cudnn_flex(device) and p.kind != "boolean" and p.score in OF_CUDNN_FLEX:
        made |= cudnn_flex(p, device)
    if p.kind != "sequences":
        return made
    if peers.has_flash_attn_3(device) and p.score in OF_FLASH_ATTN_3 and not p.Dv:
        given = dict(zip(("cu_seqlens", "longest"), apart(p, device), strict=True)) if p.packed else {}
        fa3 = partial(peers.flash_attn_3, causal=True, window=p.window, **given)
        made["fa3"] = fa3, "THD" if p.packed else "BSHD"
    if peers.has_flash_attn_4(device) and p.score in OF_FLASH_ATTN_4:
        given = {"causal": True}
        if p.window:
            given["window_size"] = (p.window - 1, 0)
        if p.score == "softcap":
            given["softcap"] = SOFTCAP
        if p.packed:
            made["fa4"] = partial(peers.flash_attn_4_varlen, *apart(p, device), **given), "THD"
        else:
            made["fa4"] = partial(peers.flash_attn_4, **given), "BSHD"
    return made


def cudnn_flex(p: Problem, device: torch.device) -> dict[str, tuple[Callable[[], Function], str]]:
    """By a mask and, of sequences side by side, by where they start."""

    def masked() -> Function:
        keys = keys_of_queries(mask_of(p), p.B, p.S, p.S).to(device)
        return peers.cudnn_flex(keys, max_score=p.score == "max_score")

    def varlen() -> Function:
        return peers.cudnn_flex(keys_before(p.lengths).to(device), *apart(p, device))

    made: dict[str, tuple[Callable[[], Function], str]] = {CUDNN_FLEX: (masked, "BSHD")}
    return made | ({f"{CUDNN_FLEX}{VARLEN}": (varlen, "THD")} if p.packed else {})


def contenders(
    p: Problem, device: torch.device, impls: Sequence[str], with_compile: bool
) -> dict[str, Callable[[], Prepared]]:
    """flashproto's backends, they on a plainer problem, and every peer, on the same random tensors.

    A peer draws what it drops itself: its results are checked in the mean alone.
    """
    q = torch.randn(p.B, p.Hq, p.S, p.D, device=device, dtype=p.dtype)
    k, v = (torch.randn(p.B, p.Hkv, p.S, D, device=device, dtype=p.dtype) for D in (p.D, p.Dv or p.D))
    grad = torch.randn(*q.shape[:3], v.shape[3], device=device, dtype=p.dtype)
    added = learned(p, device)

    @cache
    def sampled(problem: Problem) -> Sampled:
        given = options(problem, device)
        variant: dict[str, Any] = {n: given[n] for n in SAMPLED if n in given}
        if "window" in given:
            variant["left"] = given["window"][0]
        if problem.kind in RULES:
            seen = given["mask"].visible(problem.S, problem.S)
            variant["bits"] = packed(seen.to(device))[0]
        elif "mask" in given:
            variant["begin"], variant["end"] = given["mask"].intervals(problem.S, problem.S)
        if problem.score in LEARNED:
            variant[LEARNED[problem.score]] = added
        return Sampled(problem, q, k, v, grad, **variant)

    def prepare(
        problem: Problem,
        make: Callable[[], Function],
        layout: Layout,
        own_dropout: bool = False,
        forward_only: bool = False,
    ) -> Prepared:
        to, back = layout
        leaves = [
            to(t).detach().clone(memory_format=torch.contiguous_format).requires_grad_()
            for t in (q, k, v)
        ]
        if problem.score in LEARNED and added is not None:
            leaves.append(added.clone().requires_grad_())
        function = make()

        def check(made: Any, grads: Sequence[Tensor] | None) -> str | None:
            out, *aux = made if isinstance(made, tuple) else (made,)
            grads = grads and [*map(back, grads[:3]), *grads[3:]]
            if own_dropout:
                return sampled(replace(problem, score="")).check_mean(back(out), grads)
            return sampled(problem).check(back(out), grads, *aux)

        share = pairs(problem) / pairs(p)
        call = partial(function, *leaves)
        return Prepared(call, leaves, to(grad).contiguous(), check, False, share, forward_only)

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
        told = p.score == "dropout", name in peers.FORWARD_ONLY
        made[name] = partial(prepare, p, make, LAYOUTS[form], *told)
    return made
