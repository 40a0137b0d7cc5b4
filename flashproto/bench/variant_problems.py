"""The cells of `variants`: what attention is computed, on how many tokens, and how many pairs see each
other.

Of values whose head dim is Dv, FLOPs are 2 (D + Dv) for each pair.  A bias has the dtype of q, a
table of relative biases float32; both have gradients.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cache, lru_cache
from typing import Any

import torch
from torch import Tensor

from .. import masks
from ..mask_values import TILE
from .measure import Work
from .visible import visible_pairs, visited_pairs

TOKENS = 16384
SOFTCAP = 30.0
BRANCHES = 8
# 16 lengths from 128 to 4096, of which few are multiples of a tile.
LENGTHS = (
    *(750, 128, 3000, 400, 1050, 500, 4096, 260),
    *(480, 1500, 300, 650, 2100, 250, 530, 390),
)
SCORES = {
    "": "",
    "softcap": f"softcap {SOFTCAP:.0f}",
    "sinks": "sinks",
    "alibi": "ALiBi",
    "bias": "bias",
    "relative bias": "relative bias {columns}",
    "dropout": "dropout 0.1",
    "max_score": "max_score",
}
DROPOUT = 0.1
LEARNED = {"sinks": "sinks", "bias": "bias", "relative bias": "relative_bias"}  # their arguments
SEEN = 0.9  # the probability of a pair
BLOCK = 16  # of BD3-LM's the longest
RULES = {
    "boolean": f"boolean {SEEN}",
    "tiles": "boolean tiles",
    "block diffusion": f"block diffusion {BLOCK}",
    "global tokens": "global tokens",
}
SEED = 0
CPU = torch.device("cpu")


@dataclass(frozen=True)
class Problem:
    """lengths: of what side by side makes up S tokens.
    kind: "sequences", one or several; "tree", of which they are the trunk and its branches; "padding",
        and they are the keys that count in each entry of the batch; "full", one that sees all of
        itself; or one of RULES.
    window: keys that a query sees, 0 for no bound.
    score: one of SCORES.
    columns: of the table of relative biases.
    Dv: of v, 0 for D.
    """

    B: int
    Hq: int
    Hkv: int
    lengths: tuple[int, ...]
    D: int
    dtype: torch.dtype
    kind: str = "sequences"
    window: int = 0
    score: str = ""
    columns: int = 0
    Dv: int = 0

    @property
    def S(self) -> int:
        return max(self.lengths) if self.kind == "padding" else sum(self.lengths)

    @property
    def causal(self) -> bool:
        return self.kind in ("sequences", "tree")

    @property
    def packed(self) -> bool:
        return self.kind == "sequences" and len(self.lengths) > 1

    @property
    def title(self) -> str:
        first, n, least, most = self.lengths[0], len(self.lengths), min(self.lengths), max(self.lengths)
        if self.kind == "tree":
            return f"tree of {n - 1}x{self.lengths[1]} on {first}"
        if self.kind == "padding":
            return "key padding"
        if self.kind in RULES:
            return RULES[self.kind]
        if self.packed:
            return (
                f"{n} documents of {first}" if least == most else f"{n} sequences of {least} to {most}"
            )
        window = f"window {self.window}" if self.window else ""
        score = SCORES[self.score].format(columns=self.columns)
        return ", ".join(filter(None, (window, score))) or ("causal" if self.causal else "full")

    @property
    def key(self) -> str:
        heads = f" GQA {self.Hq}/{self.Hkv}" if self.Hq != self.Hkv else ""
        dims = f"{self.D}/{self.Dv}" if self.Dv else f"{self.D}"
        return f"{self.title} D{dims} S{self.S}{heads}"


def problems(quick: bool, device: torch.device) -> list[Problem]:
    """The cells; those of goals alone with `quick`; on a CPU of few tokens."""
    if device.type == "cuda":
        size, heads, dtype = TOKENS, {64: 32, 128: 16, 192: 16, 512: 4}, torch.bfloat16
    else:
        size, heads, dtype = 512, {64: 2, 128: 2, 192: 2, 512: 2}, torch.float32
    part = size // 16
    lengths = tuple(n * size // TOKENS for n in LENGTHS)
    lengths = (*lengths[:-1], size - sum(lengths[:-1]))

    def problem(D: int, *lengths: int, B: int = 1, **others: Any) -> Problem:
        return Problem(B, heads[D], heads[D], lengths, D, dtype, **others)

    # Four sequences in a batch on a GPU, as of other benchmarks.
    batch = {"B": 4 if device.type == "cuda" else 1}
    several = {"B": max(batch["B"], 2)}
    short, both = size // 8, 2 * (size // 8) - 1
    cells = [
        problem(128, size, window=part),
        problem(128, *(size // 8,) * 8),
        problem(128, *lengths),
        problem(128, size // 4, *(part,) * BRANCHES, kind="tree"),
        *(problem(128, size // 4, score=score, **batch) for score in ("softcap", "sinks", "alibi")),
    ]
    if quick:
        return cells
    groups = (64, 8) if device.type == "cuda" else (4, 2)
    return [
        *cells,
        problem(64, size, window=part),
        problem(64, *(size // 8,) * 8),
        problem(64, size // 4, score="softcap", **batch),
        problem(128, size // 4, *(n * size // TOKENS for n in (3000, 2100, 1050)), B=4, kind="padding"),
        Problem(1, *groups, (size,), 64, dtype, window=part // 8, score="sinks"),
        problem(128, short, kind="full", score="bias", **several),
        *(
            problem(128, short, kind="full", score="relative bias", columns=n, **several)
            for n in (short // 8 + 1, both)  # to an eighth of all distances, and all
        ),
        *(problem(128, short, kind=kind, **several) for kind in ("boolean", "tiles")),
        *(problem(128, size // 2, kind=kind) for kind in ("block diffusion", "global tokens")),
        problem(128, size // 4, score="dropout", **several),
        problem(192, size // 4, Dv=128, **batch),
        problem(512, size // 4, **batch),
        problem(128, size, score="max_score"),
    ]


# --- what is computed ----------------------------------------------------------------------------


def numbers(p: Problem, device: torch.device) -> Tensor:
    """[S], of which of p.lengths each token is."""
    return torch.arange(len(p.lengths), device=device).repeat_interleave(
        torch.tensor(p.lengths, device=device), output_size=sum(p.lengths)
    )


def options(p: Problem, device: torch.device) -> dict[str, Any]:
    """What flashproto.attention is given beside q, k, v and sinks."""
    made: dict[str, Any] = {"causal": p.causal}
    if p.window:
        made["window"] = (p.window - 1, 0)
    if p.packed:
        made["mask"] = masks.documents(numbers(p, device))
    if p.kind == "padding":
        made["mask"] = masks.padding(torch.tensor(p.lengths, device=device))
    if p.kind == "tree":
        parents = torch.arange(p.S, device=device) - 1
        parents[sum(p.lengths[:1]) :: p.lengths[1]] = p.lengths[0] - 1
        made["mask"] = masks.tree(parents)
    if p.kind in ("boolean", "tiles"):
        made["mask"] = masks.boolean(boolean(p, device))
    if p.kind == "block diffusion":
        made["mask"] = masks.block_diffusion(BLOCK)
    if p.kind == "global tokens":
        side, first = global_sizes(p)
        made["mask"] = masks.window(side, side) | masks.global_tokens(first)
    if p.score == "softcap":
        made["softcap"] = SOFTCAP
    if p.score == "alibi":
        made["alibi_slopes"] = slopes(p, device)
    if p.score == "relative bias":
        made["relative_offset"] = p.columns // 2
    if p.score == "dropout":
        made["dropout_p"], made["dropout_seed"] = DROPOUT, torch.tensor([SEED], device=device)
    if p.score == "max_score":
        made["return_aux"] = ("max_score",)
    return made


@lru_cache(maxsize=1)
def boolean(p: Problem, device: torch.device) -> Tensor:
    """[B, 1, S, S], the same each time: each pair by itself, or tiles, as many whole as hidden in each
    row of tiles."""
    drawn = torch.Generator().manual_seed(SEED)
    if p.kind == "boolean":
        return (torch.rand(p.B, 1, p.S, p.S, generator=drawn) < SEEN).to(device)
    tile = min(TILE, p.S // 4)
    n = p.S // tile
    seen = torch.rand(p.B, 1, n, n, generator=drawn).argsort(-1) < n // 2
    return seen.repeat_interleave(tile, 2).repeat_interleave(tile, 3).to(device)


def global_sizes(p: Problem) -> tuple[int, int]:
    """To each side, and the tokens that see all and are seen by all: 128 and 64 of 8192."""
    return p.S // 64, p.S // 128


def learned(p: Problem, device: torch.device) -> Tensor | None:
    """What p.score adds with a gradient of its own: sinks [H], a bias [H, S, S] or a table [H, R]."""
    shapes = {"sinks": (p.Hq,), "bias": (p.Hq, p.S, p.S), "relative bias": (p.Hq, p.columns)}
    if p.score not in LEARNED:
        return None
    made = torch.randn(shapes[p.score], device=device)
    return made.to(p.dtype) if p.score == "bias" else made


def slopes(p: Problem, device: torch.device) -> Tensor:
    return 2.0 ** (-8.0 * torch.arange(1, p.Hq + 1, device=device) / p.Hq)


def real_keys(p: Problem, device: torch.device) -> Tensor:
    """Of padding, [B, 1, 1, S]."""
    seen = torch.arange(p.S, device=device) < torch.tensor(p.lengths, device=device)[:, None]
    return seen[:, None, None]


def starts(p: Problem, device: torch.device) -> Tensor:
    """cu_seqlens."""
    return torch.tensor([0, *p.lengths], device=device).cumsum(0, dtype=torch.int32)


def mask_of(p: Problem) -> masks.Mask:
    """All of what a query sees, on a CPU."""
    given = options(p, CPU)
    mask = given.get("mask", masks.Mask())
    if "window" in given:
        mask = masks.window(*given["window"]) & mask
    return masks.causal() & mask if p.causal else mask


@cache
def pairs(p: Problem) -> int:
    return visible_pairs(mask_of(p), p.B, p.Hq, p.S, p.S)


def tiles(p: Problem) -> float:
    """The pairs in tiles that hold a visible one, over the visible ones."""
    return visited_pairs(mask_of(p), p.B, 1, p.S, p.S) * p.Hq / pairs(p)


def work(p: Problem) -> Work:
    flops = 2 * pairs(p) * (p.D + (p.Dv or p.D))
    return Work("TFLOP/s", flops / 1e9, 2.5 * flops / 1e9, forward_only=p.score == "max_score")


def plainer(p: Problem) -> Problem | None:
    """What its contenders of that name compute."""
    if p.score:
        return replace(p, score="", columns=0)
    if p.kind == "tree":
        return replace(p, kind="sequences", lengths=(p.S,))
    if p.packed:
        return replace(p, lengths=(p.S // len(p.lengths),) * len(p.lengths))
    return None
