"""What of attention runs where, and what does not go together: the tables of docs/attention.md, which
`python -m flashproto.bench docs` writes and whose cells tests/test_variants_table.py runs.

What a backend takes is asked of the checks that calls go through; it is not written down here.
"""

from __future__ import annotations

import functools
import itertools
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch

from .. import hooks, masks
from ..backends import texts
from ..functional import attention, attention_varlen
from ..functional.attention_request import Request
from ..variant import (
    BY_DISTANCE,
    BY_HEAD,
    BY_PAIR,
    DIFFERENTIABLE,
    FUNCTIONS,
    SHARE,
    STATISTIC,
    USER_FUNCTION,
    Kind,
    Number,
    Variant,
    backward_backend,
)
from ..variant import (
    FEATURES as OPTIONS,
)
from .speed import markdown

BACKENDS = ("reference", "triton", "hopper")
COLUMNS = ("forward", "backward", "compile", "varlen")
SIZES = {"B": 2, "Hq": 2, "Hkv": 2, "Sq": 300, "Sk": 300, "D": 64, "Dv": 64}


@dataclass(frozen=True)
class Feature:
    """A row of the table.

    name: also of the feature in the tests.  written: how a call asks for it.  kind: what its kernels
    are compiled for.  options: of a call of 2 heads and 8 keys.  sizes: others than SIZES.
    """

    name: str
    written: str
    kind: Kind = field(default_factory=Kind)
    options: dict[str, Any] = field(default_factory=dict)
    sizes: dict[str, int] = field(default_factory=dict)
    dtype: torch.dtype = torch.bfloat16

    @property
    def wanted(self) -> list[str]:
        """The tensors that are to have a gradient."""
        made = {n: x for n, x in self.options.items() if isinstance(x, torch.Tensor)}
        return [n for n in DIFFERENTIABLE if n in made and made[n].requires_grad]

    def of(self, column: str) -> Kind:
        return replace(self.kind, VARLEN=column == "varlen")


def mask(name: str, written: str, kind: Kind, made: masks.Mask) -> Feature:
    return Feature(name, f"`masks.{written}`", kind, {"mask": made})


def of_scores() -> Iterator[Feature]:
    """The rows of what variant.FEATURES has beside masks."""
    for row in OPTIONS:
        name, written, kind = row.field.lower(), f"`{row.option}`", Kind(**{row.field: True})
        if row.what == STATISTIC:
            yield Feature(name, written, kind, {"return_aux": (name,)})
        elif isinstance(row.what, Number):
            yield Feature(name, written, kind, {row.option: min(max(1.0, row.what.low), row.what.high)})
        elif row.what == SHARE:
            seed = torch.zeros(1, dtype=torch.int64)
            yield Feature(name, written, kind, {row.option: 0.5, "dropout_seed": seed})
        elif row.what == BY_HEAD:
            yield Feature(name, written, kind, {row.option: torch.ones(2)})
        elif row.what == BY_PAIR:
            yield Feature(name, written, kind, {row.option: torch.ones(8)})
        elif row.what == BY_DISTANCE:
            yield Feature(name, written, kind, {row.option: torch.ones(2, 3)})
        elif row.what == USER_FUNCTION:
            mod = hooks.call("multiply_score", torch.ones(2, 1, 1))
            yield Feature(name, written, kind, {row.option: mod})
        if (
            row.variables
            and "hopper" in row.forward
            and row.gradients
            and "hopper" not in row.gradients
        ):
            leaf = {row.option: torch.ones(2, requires_grad=True)}
            yield Feature(f"{name}_gradient", f"{written} with a gradient", kind, leaf)


def even(b: torch.Tensor, h: torch.Tensor, i: torch.Tensor, j: torch.Tensor) -> torch.Tensor:
    return (i - j) % 2 == 0


CAUSAL, WINDOW, INTERVALS = Kind(True), Kind(True, True), Kind(INTERVALS=True)
TABLE = Kind(TABLE=True)
KEYS, PARENTS = torch.arange(8), torch.tensor([-1, 0, 1, 2, 0, 4, 5, 6])
FEATURES = (
    Feature("full", "no mask"),
    Feature("causal", "`causal=True`", CAUSAL, {"causal": True}),
    mask("top_left", "causal(top_left=True)", CAUSAL, masks.causal(top_left=True)),
    Feature("window", "`window=(left, right)`", WINDOW, {"window": (5, 0)}),
    Feature("left_window", "`window=(left, None)`", Kind(WINDOW=True), {"window": (5, None)}),
    Feature("right_window", "`window=(None, right)`", CAUSAL, {"window": (None, 1)}),
    mask("first_keys", "window(left, right, first=n)", Kind(True, True, True), masks.window(2, 0, 3)),
    mask("documents", "documents(ids)", INTERVALS, masks.documents(KEYS // 3)),
    mask("padding", "padding(lengths)", INTERVALS, masks.padding(KEYS[5:6])),
    mask("prefix", "prefix(lengths)", INTERVALS, masks.prefix(KEYS[5:6])),
    mask("tree", "tree(parents)", INTERVALS, masks.tree(PARENTS)),
    mask("intervals", "intervals(begin, end)", INTERVALS, masks.intervals(KEYS, KEYS + 3)),
    mask("chunks", "chunks(size)", INTERVALS, masks.chunks(3)),
    mask("global_tokens", "global_tokens(n)", INTERVALS, masks.global_tokens(2)),
    mask("boolean", "boolean(x)", TABLE, masks.boolean(KEYS < 5)),
    mask("from_function", "from_function(f)", TABLE, masks.from_function(even)),
    Feature("either", "`a \\| b`, `~a`", TABLE, {"mask": masks.window(2) | masks.global_tokens(1)}),
    mask("dilated", "dilated(window, step)", TABLE, masks.dilated(6, 2)),
    *of_scores(),
    Feature("grouped", "Hkv < Hq", sizes={"Hq": 4}),
    Feature("lengths", "Sq != Sk", sizes={"Sq": 170}),
    Feature("head_dims", "Dv != D", sizes={"Dv": 32}),
    Feature("float32", "float32", dtype=torch.float32),
    Feature("float64", "float64", dtype=torch.float64),
)
BY_NAME = {feature.name: feature for feature in FEATURES}


# --- what runs where -----------------------------------------------------------------------------


def refusal(feature: Feature, column: str) -> str:
    """The error with which attention_varlen refuses it on every backend; "" where there is none."""
    if column == "varlen":
        try:
            call((feature,), varlen=True)
        except (TypeError, ValueError) as error:
            return str(error)
    return ""


def against(feature: Feature, backend: str, column: str) -> list[str]:
    """Why a backend does not take a feature, in the words of its error; empty where it does."""
    B, Hq, Hkv, Sq, Sk, D, Dv = (SIZES | feature.sizes).values()
    shapes = (B, Hq, Sq, D), (B, Hkv, Sk, D), (B, Hkv, Sk, Dv)
    q, k, v = (torch.empty(shape, dtype=feature.dtype, device="meta") for shape in shapes)
    inputs = {"q": q, "k": k, "v": v}
    request = Request("attention", q, k, v, Variant(feature.of(column)), None, (0, 1), inputs)
    return texts(request.reasons(backend))


def answer(feature: Feature, backend: str, column: str) -> str:
    """What a cell of the table says."""
    if refusal(feature, column) or against(feature, backend, column):
        return "no"
    gradients = backward_backend(backend, feature.of(column), wanted=feature.wanted)
    if gradients == backend or column not in ("backward", "varlen"):
        return "yes"
    return f"by {gradients}" if column == "backward" else f"backward by {gradients}"


def table() -> str:
    """Features by where they run, and why not elsewhere."""
    cells = list(itertools.product(BACKENDS, COLUMNS))
    head = [f'`"{b}"`: {column}' if column == COLUMNS[0] else column for b, column in cells]
    rows = [["", *head]]
    rows += [[feature.written, *(answer(feature, *cell) for cell in cells)] for feature in FEATURES]
    why: dict[tuple[str, str], list[str]] = {}
    for feature, backend in itertools.product(FEATURES, BACKENDS):
        for reason in against(feature, backend, "forward"):
            why.setdefault((reason, backend), []).append(feature.written)
    lines = [f'- `"{b}"`, {", ".join(which)}: {reason}' for (reason, b), which in why.items()]
    return "\n".join([markdown(rows), "", *lines])


def functions() -> str:
    """The options by the functions that take them."""
    rows = [["", *(f"`{name}`" for name in FUNCTIONS)]]
    rows += [
        [f"`{row.option}`", *("yes" if name in row.functions else "" for name in FUNCTIONS)]
        for row in OPTIONS
    ]
    return markdown(rows)


# --- what does not go together -------------------------------------------------------------------


def options_of(features: tuple[Feature, ...]) -> dict[str, Any]:
    """Of one call with all of them."""
    options: dict[str, Any] = {}
    for feature in features:
        for name, x in feature.options.items():
            if name in options:
                x = options[name] & x if name == "mask" else (*options[name], *x)
            options[name] = x
    return options


def call(features: tuple[Feature, ...], varlen: bool = False) -> None:
    """A small call with these features by the reference; raises what is refused."""
    Sq = 5 if any("Sq" in feature.sizes for feature in features) else 8
    q, k = (torch.zeros(1, 2, S, 16, dtype=torch.bfloat16) for S in (Sq, 8))
    options = options_of(features)
    if varlen:
        starts, ends = (torch.tensor([0, S], dtype=torch.int32) for S in (Sq, 8))
        q, k = (x[0].transpose(0, 1) for x in (q, k))
        attention_varlen(q, k, k, starts, ends, **options, impl="reference")
    else:
        attention(q, k, k, **options, impl="reference")


Together = tuple[str, str, Callable[[], None]]


def together() -> Iterator[Together]:
    """All pairs of features but two values of one argument, each with `attention_varlen` too: two
    names, and their call."""
    for one, other in itertools.combinations(FEATURES, 2):
        if one.options.keys() & other.options.keys() <= {"mask", "return_aux"}:
            yield one.written, other.written, functools.partial(call, (one, other))
    for one in FEATURES:
        yield one.written, "`attention_varlen`", functools.partial(call, (one,), varlen=True)


def refused() -> list[tuple[str, str, str]]:
    """Of these, what is refused, with the error."""
    found = []
    for one, other, make in together():
        try:
            make()
        except (TypeError, ValueError, NotImplementedError) as error:
            found.append((one, other, f"{type(error).__name__}: {error}"))
    return found


def pairs() -> str:
    """A row for each error, but for what the mask is in it."""
    rows: dict[tuple[str, str], tuple[list[str], set[str]]] = {}
    for one, other, error in refused():
        alike = re.sub("mask is .*; it takes", "mask is ...; it takes", error)
        names, errors = rows.setdefault((other, alike), ([], set()))
        names.append(one)
        errors.add(error)
    lines = [
        [", ".join(names), other, errors.pop() if len(errors) == 1 else alike]
        for (other, alike), (names, errors) in rows.items()
    ]
    return markdown([["", "beside", "error"], *lines])


# --- pictures of masks ---------------------------------------------------------------------------

RUNS = torch.tensor([0] * 5 + [1] * 8 + [2] * 11)
BRANCHES = torch.tensor(
    [-1, *range(7), *(7, 8, 9, 10, 11), *(7, 13, 14, 15, 16), *(7, 18, 19, 20, 21, 22)]
)
PICTURES = {
    "causal": (masks.causal(), 16, 24),
    "top-left": (masks.causal(top_left=True), 16, 24),
    "window": (masks.window(5), 24, 24),
    "both-sides": (masks.window(5, 3), 24, 24),
    "first": (masks.window(5, first=3), 24, 24),
    "documents": (masks.documents(RUNS), 24, 24),
    "causal-documents": (masks.causal() & masks.documents(RUNS), 24, 24),
    "padding": (masks.padding(torch.tensor([17])), 24, 24),
    "prefix": (masks.prefix(torch.tensor([9])), 24, 24),
    "tree": (masks.causal() & masks.tree(BRANCHES), 24, 24),
    "intervals": (masks.intervals(torch.arange(24) // 2, torch.arange(24) // 3 + 12), 24, 24),
    "chunks": (masks.causal() & masks.chunks(8), 24, 24),
    "global-tokens": (masks.global_tokens(3), 24, 24),
    "union": (masks.window(4, 4) | masks.global_tokens(3), 24, 24),
    "dilated": (masks.dilated(12, 3), 24, 24),
    "block-diffusion": (masks.block_diffusion(4), 24, 24),
    "neighbourhood": (masks.neighbourhood(4, 6, 3), 24, 24),
    "boolean": (masks.boolean(torch.arange(24)[:, None] * torch.arange(24) % 7 < 4), 24, 24),
    "from-function": (masks.from_function(even), 24, 24),
}


def draw(folder: Path) -> list[Path]:
    """mask-NAME.png of each of PICTURES."""
    written = []
    for name, (shown, Sq, Sk) in PICTURES.items():
        path = folder / f"mask-{name}.png"
        masks.draw(shown, Sq, Sk, path)
        written.append(path)
    return written


TABLES = {"table of features": table, "table of functions": functions, "table of pairs": pairs}
