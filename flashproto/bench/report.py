"""Tables and the JSON file of a benchmark; its plot: plots.py."""

from __future__ import annotations

import datetime
import json
import os
import statistics
import subprocess
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from ..env import environment
from .measure import OURS, is_peer

Cells = dict[str, dict[str, Any]]


# --- where the figures come from -----------------------------------------------------------------


def commit(other: Path | None = None) -> tuple[str | None, bool | None]:
    """The git commit of this source tree, or of another one, and whether it has changes.

    A copy of this tree without its history, or with another one, says so in FLASHPROTO_COMMIT, whose
    word is taken; None where neither is there.
    """
    unknown = None if other else os.environ.get("FLASHPROTO_COMMIT"), None
    if unknown[0]:
        return unknown
    root = other or Path(__file__).resolve().parents[2]

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


def contenders(cells: Cells) -> list[str]:
    """All contenders, ours first, then ours on plainer problems."""
    names = {
        n: None for which in passes(cells) for c in cells.values() for n in c["passes"].get(which, {})
    }
    return sorted(names, key=lambda name: (not name.startswith(OURS), is_peer(name)))


def ratio(results: dict[str, Any], peer: str | None = None) -> float | None:
    """A peer's time (the fastest peer's by default) over our fastest; None if either is missing."""
    timed = {name: r["ms"] for name, r in results.items() if "ms" in r}
    ours = [ms for name, ms in timed.items() if name.startswith(OURS)]
    peers = [ms for name, ms in timed.items() if is_peer(name) and peer in (None, name)]
    return min(peers) / min(ours) if ours and peers else None


def entry(result: dict[str, Any] | None, unit: str) -> str:
    """A contender's figure, or why there is none."""
    if result is None:
        return "-"
    if "value" not in result:
        return "wrong" if "wrong result" in result["error"] else "error"
    value, mark = result["value"], "*" if result.get("dropped") else ""
    return (f"{value:#.3g}".rstrip(".") if unit == "ms" else digits(value)) + mark


def digits(value: float) -> str:
    """Three digits, or all of those before the point."""
    return f"{value:.0f}" if value >= 100 else f"{value:#.3g}".rstrip(".")


def table(cells: Cells, which: str, against: Sequence[str | None] = (None,)) -> str:
    """One pass as text: a row for each cell, a column for each contender, and how many times faster
    ours is than each peer of `against` (None: than the fastest peer of the cell)."""
    chosen = {key: cell for key, cell in cells.items() if which in cell["passes"]}
    names = list(dict.fromkeys(n for cell in chosen.values() for n in cell["passes"][which]))
    unit = next(iter(chosen.values()))["unit"]
    rows = [[f"{which}, {unit}", *names, *(f"times {peer or 'best peer'}" for peer in against)]]
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
    errors = {
        f"  {name}: {result['error']}"
        for cell in chosen.values()
        for name, result in cell["passes"][which].items()
        if "error" in result
    }
    notes = ["  * one repeat: far behind the fastest in it"]
    if not any("*" in text for row in rows[1:] for text in row[1:]):
        notes = []
    return "\n".join([aligned(rows), *notes, *sorted(errors)])


def aligned(rows: Sequence[Sequence[str]]) -> str:
    """Rows of as many texts each, as lines of a table."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return "\n".join(
        "  ".join(
            text.ljust(w) if i == 0 else text.rjust(w)
            for i, (text, w) in enumerate(zip(row, widths, strict=True))
        )
        for row in rows
    )


def memory(cells: Cells) -> list[list[str]]:
    """Rows of the last pass's memory, GiB: kept between forward and backward where that was measured,
    and at the peak; none where nothing was measured."""
    which = passes(cells)[-1]
    results = [r for cell in cells.values() for r in cell["passes"].get(which, {}).values()]
    shown = ["kept", "peak"] if any("kept_gib" in result for result in results) else ["peak"]

    def text(cell: dict[str, Any], result: dict[str, Any]) -> str | None:
        if "peak_gib" not in result:
            return None
        found = [result.get(f"{name}_gib") for name in shown]
        return " / ".join("-" if gib is None else f"{gib:.2f}" for gib in found)

    return beside_time(cells, f"{' / '.join(shown)}, GiB" if len(shown) > 1 else "GiB", text)


def mfu(cells: Cells) -> list[list[str]]:
    """Rows of the last pass's share of the card's dense bfloat16 peak; none where that is not known."""

    def text(cell: dict[str, Any], result: dict[str, Any]) -> str | None:
        known = "peak" in cell and "value" in result
        return f"{result['value'] / cell['peak']:.1%}" if known else None

    return beside_time(cells, "MFU", text)


def beside_time(
    cells: Cells, heading: str, text: Callable[[dict[str, Any], dict[str, Any]], str | None]
) -> list[list[str]]:
    """A row for each cell, a column for each contender for which `text` says something of a cell and
    its result in the last pass; none where it says nothing."""
    which = passes(cells)[-1]
    found = {
        key: {name: text(cell, result) for name, result in cell["passes"].get(which, {}).items()}
        for key, cell in cells.items()
    }
    names = [name for name in contenders(cells) if any(row.get(name) for row in found.values())]
    rows = [[key, *(row.get(name) or "-" for name in names)] for key, row in found.items()]
    return [[f"{which}, {heading}", *names], *rows] if names else []


def conclusion(data: dict[str, Any]) -> str:
    """Memory and MFU of a subject's cells as text, as far as they were measured."""
    tables = (memory(data["cells"]), mfu(data["cells"]))
    return "\n\n".join(aligned(rows) for rows in tables if rows)


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
        best = peer or fastest({n: r for n, r in timed.items() if is_peer(n)})
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
