"""The tables of docs/determinism.md: which results are the same bits every time, and in another batch.

CASES has a call of each function, and what is claimed of it.  tests/test_determinism.py checks every
claim on the machine where it runs, so they say no more than what was tried.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor

import flashproto
from flashproto import hooks, masks

from .measure import DETERMINISTIC, OURS, VARLEN
from .speed import Results, card, markdown

KERNELS = ("triton", "hopper")
BACKENDS = ("reference", *KERNELS)
HOPPER, TRITON = OURS + "[hopper]", OURS + "[triton]"
ORDERED = ("sinks",)  # cells of variants whose parts "hopper" adds in order
HEADS, DIM, COLUMNS = 2, 64, 256


@dataclass(frozen=True)
class Case:
    """A call, and what is claimed of its bits.

    name: of the function.  options: in words, "" for none.  inputs: of B samples of S tokens; those in
    `of_all` have no dimension of samples, all others have it first.  call: of the inputs, and impl.
    unordered: the inputs whose gradients are summed in no fixed order, by backend.
    alone: the backends on which a sample's outputs, and the gradients of its own inputs, are the same
    bits in any batch; but: what has to be so for that.
    """

    name: str
    inputs: Callable[[int, int], dict[str, Tensor]]
    call: Callable[..., Any]
    options: str = ""
    of_all: tuple[str, ...] = ()
    backends: tuple[str, ...] = BACKENDS
    unordered: dict[str, tuple[str, ...]] = field(default_factory=dict)
    alone: tuple[str, ...] = ("triton",)
    but: str = ""

    @property
    def title(self) -> str:
        return f"`{self.name}`" + (f", {self.options}" if self.options else "")


# --- attention ------------------------------------------------------------------------------------

TILES = "with `num_splits=1`"
DQ_IN_ANY_ORDER: dict[str, tuple[str, ...]] = {"hopper": ("q",)}


def qkv(B: int, S: int) -> dict[str, Tensor]:
    return {name: torch.randn(B, HEADS, S, DIM) for name in "qkv"}


def attention(
    options: str, impl: Sequence[str] = BACKENDS, given: dict[str, Tensor] | None = None, **fixed: Any
) -> Case:
    """given: tensors of all samples, by the names of arguments; fixed: other arguments, or functions
    of q that make them."""

    def inputs(B: int, S: int) -> dict[str, Tensor]:
        return qkv(B, S) | {name: x.clone() for name, x in (given or {}).items()}

    def call(q: Tensor, k: Tensor, v: Tensor, impl: str, **more: Any) -> Any:
        made = {n: x(q) if callable(x) else x for n, x in fixed.items()}
        return flashproto.attention(q, k, v, num_splits=1, impl=impl, **made, **more)

    unordered = DQ_IN_ANY_ORDER if "hopper" in impl else {}
    of_all = tuple(given or ())
    return Case("attention", inputs, call, options, of_all, tuple(impl), unordered, but=TILES)


def tokens(q: Tensor) -> Tensor:
    return torch.arange(q.shape[2], device=q.device)


def of_documents(q: Tensor) -> masks.Mask:
    return masks.documents((tokens(q) // 25).int())


def of_bits(q: Tensor) -> masks.Mask:
    i = tokens(q)
    return masks.boolean((i[:, None] * 7 + i * 3) % 5 < 3)


def heads_and_heat(B: int, S: int) -> dict[str, Tensor]:
    return qkv(B, S) | {"heat": torch.linspace(0.5, 2, HEADS).view(HEADS, 1, 1)}


def with_score_mod(q: Tensor, k: Tensor, v: Tensor, heat: Tensor, impl: str) -> Any:
    mod = hooks.call("multiply_score", heat)
    return flashproto.attention(q, k, v, causal=True, score_mod=mod, num_splits=1, impl=impl)


def packed(B: int, S: int) -> dict[str, Tensor]:
    return {name: torch.randn(B, S, HEADS, DIM) for name in "qkv"}


def attention_varlen(q: Tensor, k: Tensor, v: Tensor, impl: str) -> Any:
    """Samples are sequences."""
    B, S = q.shape[:2]
    cu = torch.arange(B + 1, device=q.device, dtype=torch.int32) * S
    q, k, v = (x.flatten(0, 1) for x in (q, k, v))
    out: Any = flashproto.attention_varlen(q, k, v, cu, cu, S, S, causal=True, impl=impl)
    return out.unflatten(0, (B, S))


def cache_of(B: int, S: int) -> dict[str, Tensor]:
    caches = {f"{name}_cache": torch.randn(B, S, HEADS, DIM) for name in "kv"}
    return {"q": torch.randn(B, HEADS, 3, DIM), **caches}


def attention_with_kv_cache(q: Tensor, k_cache: Tensor, v_cache: Tensor, impl: str) -> Any:
    lengths = torch.full(q.shape[:1], k_cache.shape[1] - 1, device=q.device, dtype=torch.int32)
    options: Any = {"lengths": lengths, "num_splits": 1, "impl": impl}
    return flashproto.attention_with_kv_cache(q, k_cache, v_cache, **options)


def parts(B: int, S: int) -> dict[str, Tensor]:
    outs = {name: torch.randn(B, HEADS, S, DIM) for name in ("out1", "out2")}
    return outs | {name: torch.randn(B, HEADS, S) for name in ("lse1", "lse2")}


def merge_attention(out1: Tensor, out2: Tensor, lse1: Tensor, lse2: Tensor, impl: str) -> Any:
    return flashproto.merge_attention([out1, out2], [lse1, lse2], impl=impl)[0]


# --- rows -----------------------------------------------------------------------------------------

FEW_ROWS = "where both calls have enough rows for a GPU; few wide rows are split"


def rows(B: int, S: int) -> dict[str, Tensor]:
    return {"x": torch.randn(B, S, COLUMNS)}


def weighted(B: int, S: int) -> dict[str, Tensor]:
    return {**rows(B, S), "weight": torch.randn(COLUMNS)}


def norm(function: Callable[..., Any], x: Tensor, weight: Tensor, impl: str) -> Any:
    return function(x, COLUMNS, weight, impl=impl)


def softmax(x: Tensor, impl: str) -> Any:
    return flashproto.softmax(x, impl=impl)


def classes(x: Tensor) -> Tensor:
    return torch.arange(x.shape[1], device=x.device).repeat(x.shape[0]) % 240


def cross_entropy(x: Tensor, impl: str) -> Any:
    losses: Any = flashproto.cross_entropy(x.flatten(0, 1), classes(x), reduction="none", impl=impl)
    return losses.unflatten(0, x.shape[:2])


def linear_cross_entropy(x: Tensor, weight: Tensor, impl: str) -> Any:
    return flashproto.linear_cross_entropy(x.flatten(0, 1), weight, classes(x), impl=impl)


def of_linear(B: int, S: int) -> dict[str, Tensor]:
    return {**rows(B, S), "weight": torch.randn(240, COLUMNS)}


def halves(B: int, S: int) -> dict[str, Tensor]:
    return {name: torch.randn(B, S, COLUMNS) for name in ("gate", "up")}


def swiglu(gate: Tensor, up: Tensor, impl: str) -> Any:
    return flashproto.swiglu(gate, up, impl=impl)


ALIKE = ("reference", "triton")
SHARED = ("weight",)
CASES = (
    attention("full"),
    attention("causal", causal=True),
    attention("window", causal=True, window=(20, 0)),
    attention("documents as mask", mask=of_documents),
    attention("softcap", causal=True, softcap=20.0),
    attention("sinks", given={"sinks": torch.linspace(-1, 1, HEADS)}, causal=True),
    attention("ALiBi", ALIKE, {"alibi_slopes": torch.linspace(0.1, 0.5, HEADS)}, causal=True),
    attention("bias", ALIKE, {"bias": torch.linspace(-1, 1, HEADS).view(1, HEADS, 1, 1)}),
    attention("relative_bias", ALIKE, {"relative_bias": torch.linspace(-1, 1, 2 * 33).view(HEADS, 33)}),
    attention("`masks.boolean`", ALIKE, mask=of_bits),
    Case("attention", heads_and_heat, with_score_mod, "score_mod", ("heat",), ALIKE, but=TILES),
    Case("attention_varlen", packed, attention_varlen, "causal", unordered=DQ_IN_ANY_ORDER, alone=()),
    Case("attention_with_kv_cache", cache_of, attention_with_kv_cache, but=TILES),
    Case("merge_attention", parts, merge_attention, backends=ALIKE),
    Case("rms_norm", weighted, partial(norm, flashproto.rms_norm), "", SHARED, ALIKE, but=FEW_ROWS),
    Case("layer_norm", weighted, partial(norm, flashproto.layer_norm), "", SHARED, ALIKE, but=FEW_ROWS),
    Case("softmax", rows, softmax, backends=ALIKE, but=FEW_ROWS),
    Case("cross_entropy", rows, cross_entropy, backends=ALIKE, but=FEW_ROWS),
    Case("linear_cross_entropy", of_linear, linear_cross_entropy, "", SHARED, ALIKE, alone=()),
    Case("swiglu", halves, swiglu, backends=ALIKE),
)  # fmt: skip


# --- the tables -------------------------------------------------------------------------------------


def gradients_of(case: Case, backend: str) -> str:
    if case.name == "attention_with_kv_cache":
        return "no gradient"
    unordered = case.unordered.get(backend, ())
    if not unordered:
        return "the same bits"
    named = ", ".join(f"d{name}" for name in unordered)
    return f"the same bits but {named}; all with `deterministic=True`"


def in_another_batch(case: Case, backend: str) -> str:
    if backend not in case.alone:
        return "may differ"
    return "the same bits" + (f" {case.but}" if case.but else "")


def table() -> str:
    made = [["function", "backend", "run to run: outputs", "gradients", "a sample in another batch"]]
    for case in CASES:
        for backend in case.backends:
            if backend in KERNELS:
                same = gradients_of(case, backend), in_another_batch(case, backend)
                made.append([case.title, f'`"{backend}"`', "the same bits", *same])
    return markdown(made)


def cost(results: Results) -> list[str]:
    """A row for each head_dim and mask: the ordered backward, in times of the other's speed."""
    found: dict[tuple[str, str], list[float]] = {}
    for key, cell in results.get("attention", {}).get("cells", {}).items():
        timed = cell["passes"].get("backward", {})
        plain, ordered = timed.get(HOPPER, {}), timed.get(HOPPER + DETERMINISTIC, {})
        if "ms" in plain and "ms" in ordered:
            D, _, mask = key.split(maxsplit=2)
            found.setdefault((D.removeprefix("D"), mask), []).append(plain["ms"] / ordered["ms"])
    rows = [["head_dim", "mask", "lengths measured", "mean", "least", "most"]]
    for (D, mask), ratios in found.items():
        mean = statistics.geometric_mean(ratios)
        rows.append(
            [D, mask, str(len(ratios)), *(f"{x:.2f}" for x in (mean, min(ratios), max(ratios)))]
        )
    return [markdown(rows)] if found else []


def elsewhere(results: Results) -> dict[str, float]:
    """Of each variant whose ordered backward is that of "triton", see variant.backward_backend: its
    speed, in times of "hopper"'s."""
    found: dict[str, float] = {}
    for key, cell in results.get("variants", {}).get("cells", {}).items():
        timed = cell["passes"].get("backward", {})
        for ends, named in (("", ""), (VARLEN, ", `attention_varlen`")):
            plain, ordered = timed.get(HOPPER + ends, {}), timed.get(TRITON + ends, {})
            if "ms" in plain and "ms" in ordered and key.partition(" D")[0] not in ORDERED:
                found[key + named] = plain["ms"] / ordered["ms"]
    return found


def costs(found: Sequence[Results]) -> str:
    texts = []
    for results in found:
        for made in cost(results):
            texts += [f"On one {card(results['attention']['runs'][-1])}:", made]
        if variants := elsewhere(results):
            where = card(results["variants"]["runs"][-1])
            least, most = min(variants.values()), max(variants.values())
            rows = [["variant", "speed"], *([name, f"{x:.2f}"] for name, x in variants.items())]
            texts += [f"Variants, on one {where}, {least:.2f} to {most:.2f}:", markdown(rows)]
    return "\n\n".join(texts) or "Not measured."
