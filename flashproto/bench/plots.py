"""The plots of benchmarks: grouped bars, with one colour for a contender in all panels and plots."""

from __future__ import annotations

import itertools
import math
import textwrap
from collections.abc import Callable
from pathlib import Path
from typing import Any

from .measure import OURS
from .report import Cells, contenders, digits, passes

# The names that contenders have in prose.
TITLES = {
    "sdpa-flash": "SDPA flash",
    "sdpa-cudnn": "cuDNN",
    "sdpa-efficient": "SDPA efficient",
    "flex": "FlexAttention",
    "flex-flash": "FlexAttention FLASH",
    "cudnn-flex": "cudnn.flex_attention",
    "cudnn-flex varlen": "cudnn.flex_attention, varlen",
    "fa3": "FlashAttention-3",
    "ffpa": "ffpa-attn",
    "ffpa-cutedsl": "ffpa-attn's cutedsl",
    "fa4": "flash-attn-4",
    "fa4-packed": "flash-attn-4, packed gradient",
    "torch": "PyTorch",
    "compile": "torch.compile",
    "liger": "Liger",
    "liger-cutedsl": "Liger's cutedsl",
    "liger-cutedsl-scaled": "Liger's cutedsl, scaled",
    "(plain, hopper)": "flashproto[hopper] without the variant",
    "(plain, triton)": "flashproto[triton] without the variant",
}
# Each contender's place among the colours; those that are not named here take what is left.
PLACES = (
    OURS,
    "flashproto[hopper]",
    "flashproto[triton]",
    "fa4",
    "sdpa-cudnn",
    "flex",
    "sdpa-flash",
    "sdpa-efficient",
    "torch",
    "compile",
    "liger",
    "quack",
    "cut-cross-entropy",
    "fa3",
)
COLOURS = (
    "#d62728",
    "#d62728",
    "#ff7f0e",
    "#1f77b4",
    "#2ca02c",
    "#9467bd",
    "#7f7f7f",
    "#c7c7c7",
    "#7f7f7f",
    "#9467bd",
    "#2ca02c",
    "#1f77b4",
    "#8c564b",
    "#e377c2",
    "#bcbd22",
    "#17becf",
    "#aec7e8",
    "#ffbb78",
    "#98df8a",
    "#c5b0d5",
    "#ff9896",
    "#c49c94",
    "#f7b6d2",
    "#dbdb8d",
    "#9edae5",
)
WIDTH = 10.0  # inches
BARS = 56  # in one panel, at most
NUMBERED = 128  # characters of the values over bars, at most


def title(name: str) -> str:
    return TITLES.get(name, name)


def colours(names: list[str]) -> dict[str, str]:
    """The same for a name of PLACES in every plot; for others what the plot has left."""
    placed = {name: COLOURS[PLACES.index(name)] for name in names if name in PLACES}
    left = itertools.cycle([c for c in dict.fromkeys(COLOURS) if c not in placed.values()])
    return {name: placed.get(name) or next(left) for name in names}


def heights(results: dict[str, Any], unit: str) -> dict[str, float]:
    """A bar's height for each contender that has a time: its value, of which more is better; for times,
    of which less is better, the speed in which our fastest contender has 1."""
    timed = {name: r for name, r in results.items() if "ms" in r}
    if unit != "ms":
        return {name: r["value"] for name, r in timed.items()}
    one = min((r["ms"] for name, r in timed.items() if name.startswith(OURS)), default=None)
    one = one or min((r["ms"] for r in timed.values()), default=None)
    return {name: one / r["ms"] for name, r in timed.items() if one is not None}


def plot(cells: Cells, heading: str, path: Path, label: Callable[[str], str] = str) -> None:
    """Panels for each pass: the contenders' bars in each cell, as many cells in a row as are legible at
    the width of a page.  label: what is written below the bars of a cell."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    unit = next(iter(cells.values()))["unit"]
    names = contenders(cells)
    colour = colours(names)
    keys = list(cells)
    rows = math.ceil(len(keys) * len(names) / BARS)
    per_row = math.ceil(len(keys) / max(1, rows))
    panels = [
        (which, keys[i : i + per_row]) for which in passes(cells) for i in range(0, len(keys), per_row)
    ]
    size = (WIDTH, 1.0 + 2.5 * len(panels))
    figure, axes = plt.subplots(len(panels), 1, figsize=size, squeeze=False, layout="constrained")
    drawn: dict[str, Any] = {}
    for axis, (which, shown) in zip(axes[:, 0], panels, strict=True):
        by_cell = [heights(cells[key]["passes"].get(which, {}), unit) for key in shown]
        here = [name for name in names if any(name in by_name for by_name in by_cell)]
        width = 0.84 / max(1, len(here))
        longest = max((len(digits(x)) for by_name in by_cell for x in by_name.values()), default=0)
        for index, name in enumerate(here):
            offset = (index - (len(here) - 1) / 2) * width
            at = [x + offset for x, by_name in enumerate(by_cell) if name in by_name]
            values = [by_name[name] for by_name in by_cell if name in by_name]
            bars = axis.bar(at, values, width, color=colour[name], edgecolor="white", linewidth=0.4)
            drawn.setdefault(name, bars)
            if len(here) * per_row * longest <= NUMBERED:
                axis.bar_label(bars, list(map(digits, values)), fontsize=7, padding=1)
        axis.set_title(which, fontsize=10, loc="left")
        axis.set_ylabel("speed, flashproto = 1" if unit == "ms" else unit, fontsize=9)
        axis.set_ylim(bottom=0)
        axis.set_xlim(-0.5, per_row - 0.5)
        labels = ["\n".join(textwrap.wrap(label(key), max(8, 96 // per_row))) for key in shown]
        axis.set_xticks(range(len(shown)), labels, fontsize=8)
        axis.tick_params(axis="x", length=0)
        axis.tick_params(axis="y", labelsize=8)
        axis.spines[["top", "right"]].set_visible(False)
        axis.grid(alpha=0.3, axis="y")
        axis.set_axisbelow(True)
    figure.suptitle(heading, fontsize=11)
    named = [title(name) for name in drawn]
    figure.legend(
        list(drawn.values()), named, loc="outside lower center", ncols=5, fontsize=9, frameon=False
    )
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=130, metadata={"Software": None})
    plt.close(figure)
