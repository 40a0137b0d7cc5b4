"""What is wanted of `variants`: how many times a peer's TFLOP/s, or those of the plainer problem."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, NamedTuple

import torch

from ..mask_values import TILE
from . import report
from .measure import OURS, PLAIN, VARLEN
from .peers import CUDNN_FLEX
from .variant_problems import plainer, problems, tiles

OWN = "(plain, own)"  # the plainer problem by the backend that is compared


class Goal(NamedTuple):
    """cell: how its name begins.  ours: what is behind flashproto[impl].  against: another contender,
    PLAIN for the fastest of these, or OWN.  forward, backward: how many times its TFLOP/s are wanted,
    None to be told alone.  impl: the backend, by default the fastest; a goal of hopper is none in cells
    that it does not take, and one of triton is one there alone."""

    cell: str
    ours: str
    against: str
    forward: float | None
    backward: float | None
    impl: str = ""


GOALS = (
    Goal("window 1024 D128 ", "", "fa4", 1.05, 1.0),
    *(Goal("8 documents of 2048 D128 ", how, "fa4", 1.05, 1.05) for how in ("", VARLEN)),
    *(Goal("8 documents of 2048 D128 ", how, PLAIN, 0.9, 0.9) for how in ("", VARLEN)),
    Goal("16 sequences of 128 to 4096 D128 ", VARLEN, PLAIN, 0.9, 0.9),
    Goal("tree of 8x1024 on 4096 D128 ", "", PLAIN, 0.85, 0.8),
    Goal("softcap 30 D128 ", "", "fa4", 1.5, 1.15),
    Goal("sinks D128 ", "", PLAIN, 0.95, 0.95),
    Goal("ALiBi D128 ", "", PLAIN, 0.95, 0.95),
    Goal("bias D128 ", "", "flex", 1.2, 1.2, "hopper"),
    Goal("bias D128 ", "", OWN, 0.8, 0.65, "triton"),
    Goal("relative bias 257 D128 ", "", OWN, 0.85, 0.7),
    *(Goal(f"boolean {how} D128 ", "", "flex", 1.3, 1.2) for how in ("0.9", "tiles")),
    Goal("block diffusion 16 D128 ", "", "flex-flash", 1.1, 1.1),
    Goal("global tokens D128 ", "", "flex-flash", 1.1, 1.1),
    Goal("dropout 0.1 D128 ", "", PLAIN, 0.75, 0.75, "hopper"),
    Goal("dropout 0.1 D128 ", "", OWN, 0.7, 0.7, "triton"),
    Goal("causal D192/128 ", "", "flex", None, None),
    Goal("max_score D128 ", "", PLAIN, None, None),
    Goal("16 sequences of 128 to 4096 D128 ", VARLEN, "fa4", None, 1.0),
    Goal("8 documents of 2048 D128 ", "", CUDNN_FLEX, 1.0, None),
    *(
        Goal(f"{what} D128 ", VARLEN, f"{CUDNN_FLEX}{VARLEN}", None, 1.02)
        for what in ("8 documents of 2048", "16 sequences of 128 to 4096")
    ),
    Goal("key padding D128 ", "", CUDNN_FLEX, 1.0, None),
    *(Goal("window 128, sinks D64 ", "", peer, 1.0, None) for peer in ("fa4", CUDNN_FLEX)),
    Goal("causal D192/128 ", "", CUDNN_FLEX, 0.95, 0.85),
    Goal("max_score D128 ", "", CUDNN_FLEX, 1.0, None),
)


def goals(data: dict[str, Any]) -> str:
    """The cells that have goals against them, and what their masks cost in whole tiles.  Goals against
    what no cell was measured beside are not counted."""
    known = {p.key: p for p in problems(False, torch.device("cuda"))}
    names = report.contenders(data["cells"])
    rows, missed, wanted_in_all = [], 0, 0
    absent: dict[str, None] = {}
    for goal in GOALS:
        against = PLAIN if goal.against == OWN else goal.against
        if not rivals(against, names):
            absent[f"{PLAIN} problem)" if against == PLAIN else against] = None
            continue
        key = next((key for key in data["cells"] if key.startswith(goal.cell)), None)
        for which in ("forward", "backward"):
            wanted = getattr(goal, which)
            results = data["cells"][key]["passes"].get(which, {}) if key else {}
            found = reached(results, goal)
            if not is_goal(results, goal) or (found is None and wanted is None):
                continue
            wanted_in_all += wanted is not None
            if found is None:
                rows.append(f"{goal.cell}{which}: not measured beside {goal.against}")
                missed += 1
                continue
            own, best, ratio = found
            text = f"{key:<42} {which:<9} {own:<26} {ratio:6.3f} x {best:<16} "
            if wanted is not None:
                text += f"wanted {wanted:<5}{'yes' if ratio >= wanted else 'NO'}"
                missed += ratio < wanted
            rows.append(text.rstrip())
    for key in data["cells"]:
        if key in known:
            p, simple = known[key], plainer(known[key])
            text = f"{key:<42} tiles of {TILE} hold {tiles(p):.3f} times the visible pairs"
            rows.append(text + (f", the plain ones {tiles(simple):.3f}" if simple else ""))
    if absent:
        rows.append(f"not counted are goals against {', '.join(absent)}, which no cell has")
    return "\n".join([*rows, f"below a goal: {missed} of {wanted_in_all}"])


def rivals(against: str, names: Iterable[str]) -> list[str]:
    """The contenders among these that a goal against this one is of."""
    return [name for name in names if against in (name, name[: len(PLAIN)])]


def is_goal(results: dict[str, Any], goal: Goal) -> bool:
    """Whether it is one of a pass with these results: of hopper where it takes the cell, of triton
    where hopper does not."""
    error = results.get(f"{OURS}[hopper]", {"error": "BackendError"}).get("error", "")
    taken = not error.startswith("BackendError")
    return {"hopper": taken, "triton": not taken}.get(goal.impl, True)


def reached(results: dict[str, Any], goal: Goal) -> tuple[str, str, float] | None:
    """Of one pass our fastest contender that the goal is of, the one it is against, and the ratio of
    their TFLOP/s; None if either has no time."""
    timed = {n: r for n, r in results.items() if "ms" in r}
    own = {n: r for n, r in timed.items() if n.startswith(f"{OURS}[{goal.impl}")}
    own = {n: r for n, r in own.items() if n.partition("]")[2] == goal.ours}
    if not own:
        return None
    name = report.fastest(own)
    impl = name[len(OURS) + 1 :].partition("]")[0]
    against = f"{PLAIN}, {impl})" if goal.against == OWN else goal.against
    found = {n: timed[n] for n in rivals(against, timed)}
    if not found:
        return None
    best = report.fastest(found)
    return name, best, own[name]["value"] / found[best]["value"]
