"""Tables, the JSON file and the plot of a benchmark."""

from __future__ import annotations

import datetime
import json
import math
import os
import statistics
import subprocess
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from ..env import environment
from .measure import OURS

Cells = dict[str, dict[str, Any]]


# --- where the figures come from -----------------------------------------------------------------


def commit() -> tuple[str | None, bool | None]:
    """The git commit of this source tree and whether it has changes.

    A copy of the tree without its history, or with another one, says so in FLASHPROTO_COMMIT, whose
    word is taken; None where neither is there.
    """
    unknown = os.environ.get("FLASHPROTO_COMMIT"), None
    if unknown[0]:
        return unknown
    root = Path(__file__).resolve().parents[2]

    def git(*arguments: str) -> str:
        command = ["git", "-C", str(root), *arguments]
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()

    try:
        if Path(git("rev-parse", "--show-toplevel")) != root:
            return unknown
        return git("rev-parse", "HEAD"), bool(git("status", "--porcelain"))
    except (OSError, subprocess.CalledProcessError):
        return unknown


def describe_run(ceilings: dict[str, Any], protocol: dict[str, Any]) -> dict[str, Any]:
    """What a reader needs to judge the figures of one run, as plain data."""
    head, dirty = commit()
    told = environment()
    told["variables"].pop("TRITON_CACHE_DIR", None)  # a path of that machine, no matter to its figures
    return {
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "commit": head,
        "dirty": dirty,
        "ceilings": ceilings,
        "protocol": protocol,
        "environment": told,
    }


# --- the JSON file -------------------------------------------------------------------------------


def load(path: Path, subject: str) -> dict[str, Any]:
    """What a file holds so far; raises ValueError when it is of another benchmark."""
    try:
        data: dict[str, Any] = json.loads(path.read_text())
        if data["subject"] != subject:
            raise ValueError(f"it holds {data['subject']!r}")
        return {"subject": subject, "runs": list(data["runs"]), "cells": dict(data["cells"])}
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ValueError(f"{path} cannot be resumed: {error}. Pass another --out.") from error


def save(path: Path, data: dict[str, Any]) -> None:
    """Write all of it or nothing."""
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_suffix(".json.partial")
    partial.write_text(json.dumps(data, indent=1) + "\n")
    os.replace(partial, path)


# --- tables --------------------------------------------------------------------------------------


def passes(cells: Cells) -> list[str]:
    """The timed passes, in order of appearance."""
    return list(dict.fromkeys(p for cell in cells.values() for p in cell["passes"]))


def ratio(results: dict[str, Any], peer: str | None = None) -> float | None:
    """A peer's time (the fastest peer's by default) over our fastest; None if either is missing."""
    timed = {name: r["ms"] for name, r in results.items() if "ms" in r}
    ours = [ms for name, ms in timed.items() if name.startswith(OURS)]
    peers = [ms for name, ms in timed.items() if not name.startswith(OURS) and peer in (None, name)]
    return min(peers) / min(ours) if ours and peers else None


def entry(result: dict[str, Any] | None, unit: str) -> str:
    """A contender's figure, or why there is none."""
    if result is None:
        return "-"
    if "value" not in result:
        return "wrong" if "wrong result" in result["error"] else "error"
    value, mark = result["value"], "*" if result.get("dropped") else ""
    text = f"{value:.0f}" if value >= 100 and unit != "ms" else f"{value:#.3g}".rstrip(".")
    return text + mark


def table(cells: Cells, which: str, against: Sequence[str | None] = (None,)) -> str:
    """One pass as text: a row for each cell, a column for each contender, and how many times faster
    ours is than each peer of `against` (None: than the fastest peer of the cell)."""
    chosen = {key: cell for key, cell in cells.items() if which in cell["passes"]}
    names = list(dict.fromkeys(n for cell in chosen.values() for n in cell["passes"][which]))
    unit = next(iter(chosen.values()))["unit"]
    rows = [[f"{which}, {unit}", *names, *(f"ours/{peer or 'best peer'}" for peer in against)]]
    ratios: list[list[float]] = [[] for _ in against]
    for key, cell in chosen.items():
        results = cell["passes"][which]
        row = [key, *(entry(results.get(name), unit) for name in names)]
        for found, peer in zip(ratios, against, strict=True):
            value = ratio(results, peer)
            row.append("-" if value is None else f"{value:.2f}")
            found += [] if value is None else [value]
        rows.append(row)
    if len(chosen) > 1:
        means = [f"{statistics.geometric_mean(found):.3f}" if found else "-" for found in ratios]
        rows.append(["geometric mean", *([""] * len(names)), *means])
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    lines = [
        "  ".join(
            text.ljust(w) if i == 0 else text.rjust(w)
            for i, (text, w) in enumerate(zip(row, widths, strict=True))
        )
        for row in rows
    ]
    errors = {
        f"  {name}: {result['error']}"
        for cell in chosen.values()
        for name, result in cell["passes"][which].items()
        if "error" in result
    }
    if any("*" in text for row in rows[1:] for text in row[1:]):
        lines.append("  * one repeat: far behind the fastest in it")
    return "\n".join([*lines, *sorted(errors)])


def fastest(timed: dict[str, Any]) -> str:
    return min(timed, key=lambda name: timed[name]["ms"])


def targets(
    cells: Cells,
    which: str,
    least: float,
    mean: float | None = None,
    *,
    at_ceiling: float | None = None,
    floor: Callable[[str], float | None] = lambda key: None,
    peer: str | None = None,
) -> str:
    """One pass against its goals: every cell's ratio to the best peer (or `peer`), and how much of the
    cell's ceiling ours reaches; then the geometric mean, and the cells below a goal.

    A cell's ceiling is what its run's matmul or its own copy reached, in the cell's unit.

    least, mean: the ratio wanted in every cell, and in geometric mean.
    at_ceiling: the ratio wanted where the best peer is above 95% of the ceiling.
    floor: the share of the ceiling wanted in the cell of that name; None for no floor.
    """
    lines: list[str] = []
    ratios: list[float] = []
    below: dict[str, list[str]] = {}
    for key, cell in cells.items():
        results = cell["passes"].get(which, {})
        value = ratio(results, peer)
        if value is None:
            below[key] = ["not measured"]
            continue
        timed = {n: r for n, r in results.items() if "ms" in r}
        own = fastest({n: r for n, r in timed.items() if n.startswith(OURS)})
        best = peer or fastest({n: r for n, r in timed.items() if not n.startswith(OURS)})
        ceiling, goal, share = cell.get("ceiling"), least, ""
        if ceiling is not None:
            reached, wanted = timed[own]["value"] / ceiling, floor(key)
            share = f"  {reached:4.0%} of the ceiling, {ceiling:.0f}"
            if at_ceiling is not None and timed[best]["value"] > 0.95 * ceiling:
                goal = at_ceiling
            if wanted is not None and reached < wanted:
                below.setdefault(key, []).append(f"{reached:.1%} of the ceiling")
        ratios.append(value)
        if value < goal:
            below.setdefault(key, []).append(f"{value:.3f} of {best}")
        lines.append(
            f"{key:<28} {entry(timed[own], cell['unit']):>6} {own:<20} {value:6.3f} x "
            f"{entry(timed[best], cell['unit']):>6} {best:<12}{share}"
        )
    if ratios and mean is not None:
        found = statistics.geometric_mean(ratios)
        lines.append(f"geometric mean {found:.3f}, wanted {mean}: {'yes' if found >= mean else 'NO'}")
    named = "; ".join(f"{key} ({', '.join(why)})" for key, why in below.items())
    lines.append(f"below a goal: {len(below)} of {len(cells)} cells: {named or '-'}")
    return "\n".join([f"{which}:", *lines])


def ceilings_text(ceilings: dict[str, Any]) -> str:
    return (
        f"ceilings of this run: copy {ceilings['copy_gb_s']:.0f} GB/s, "
        f"matmul {ceilings['matmul']} {ceilings['matmul_tflop_s']:.3g} TFLOP/s"
    )


# --- the plot ------------------------------------------------------------------------------------


BAR_CELLS = 6  # up to that many cells are drawn as bars, more as lines


def plot(cells: Cells, title: str, path: Path) -> None:
    """One panel for each pass: the contenders' values over the cells."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    panels = passes(cells)
    size = (min(40.0, 7.0 + 0.45 * len(cells)), 3.6 * len(panels))
    figure, axes = plt.subplots(len(panels), 1, figsize=size, squeeze=False, layout="constrained")
    keys = list(cells)
    places = range(len(keys))
    for axis, which in zip(axes[:, 0], panels, strict=True):
        by_cell = [cells[key]["passes"].get(which, {}) for key in keys]
        names = list(dict.fromkeys(name for results in by_cell for name in results))
        for index, name in enumerate(names):
            values = [results.get(name, {}).get("value", math.nan) for results in by_cell]
            ours = name.startswith(OURS)
            if len(keys) <= BAR_CELLS:
                width = 0.8 / len(names)
                offset = (index - (len(names) - 1) / 2) * width
                axis.bar([x + offset for x in places], values, width, label=name)
            else:
                axis.plot(
                    places, values, marker="o", markersize=5 if ours else 3, label=name,
                    linewidth=2.2 if ours else 1.1, zorder=3 if ours else 2,
                )  # fmt: skip
        axis.set_title(which)
        unit = next(iter(cells.values()))["unit"]
        axis.set_ylabel(unit)
        if unit == "ms":
            axis.set_yscale("log")  # layers of one block differ a hundredfold
        else:
            axis.set_ylim(bottom=0)
        tilted = {} if len(keys) <= BAR_CELLS else {"rotation": 60, "ha": "right"}
        axis.set_xticks(places, keys, fontsize=7, **tilted)
        axis.grid(alpha=0.3, axis="y")
        axis.legend(fontsize=7, loc="upper left", bbox_to_anchor=(1.0, 1.0))
    figure.suptitle(title)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=130)
    plt.close(figure)
