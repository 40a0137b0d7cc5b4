"""python -m flashproto.bench: flashproto beside the peers found, with the ceilings of the same run.

Writes DIR/SUBJECT.json after every cell and, with matplotlib, DIR/SUBJECT.png at the end; --budget and
--resume split a long run into parts.

Results are checked first, against float32 references: a contender whose result is wrong, or that
fails, is listed with its error and gets no time.  Forward is timed with gradients wanted, as in
training; backward alone, on a graph kept for it (views, block, gpt: forward and backward together).
"""

from __future__ import annotations

import argparse
import gc
import re
import site
import sys
import time
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any

import torch
import torch._functorch.config as functorch_config

from .. import backends
from ..env import environment, peak_flops, render
from . import first_calls, plots, report, warm
from .ceilings import copy_speed, measure_ceilings
from .measure import Work, measure_cell
from .timing import make_timer

SUBJECTS = (
    "attention",
    "variants",
    "views",
    "decode",
    "merge",
    "norm",
    "norm_float32",
    "add_norm",
    "softmax",
    "softmax_topk",
    "cross_entropy",
    "linear_cross_entropy",
    "oneflow",
    "rms_norm_article",
    "online_softmax",
    "glu",
    "block",
    "gpt",
)
DEVICE_TIMER = "device events, L2 flushed, launches of a call queued behind the flush"
# With command lines of their own.
TOOLS = ("sanitize", "search", "docs", "ring", "parallel", "doors", "generate")


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m flashproto.bench",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add(
        "subjects",
        nargs="+",
        metavar="SUBJECT",
        choices=(*SUBJECTS, "launch"),
        help=f"{', '.join(SUBJECTS)}, or launch alone; {', '.join(TOOLS)} have their own --help",
    )
    add("--quick", action="store_true", help="few cells")
    add("--out", type=Path, default=Path("runs/bench"), metavar="DIR", help="default: runs/bench")
    add("--suffix", metavar="NAME", help="write DIR/SUBJECT_NAME.json: a run of other contenders")
    add("--resume", action="store_true", help="keep the cells that DIR's JSON holds, add the rest")
    add("--cells", metavar="REGEX", help="only cells whose name matches, such as 'D128 .* causal'")
    add("--contenders", metavar="REGEX", help="only contenders whose name matches")
    add("--impl", metavar="NAME,...", help="flashproto's backends to time; default: those that run")
    add("--budget", type=float, metavar="SECONDS", help="start no new cell after that long")
    add("--repeats", type=int, default=5, help="interleaved repeats; the median counts (default 5)")
    add("--rep-ms", type=float, default=100.0, help="length of one repeat (default 100)")
    add(
        "--drop-slower",
        type=float,
        metavar="FACTOR",
        help="a contender that takes FACTOR times the "
        "fastest one's time in the first repeat takes part in no other, and is marked",
    )
    add("--goals", action="store_true", help="print what the developers aim at, and what falls short")
    add(
        "--first-calls",
        action="store_true",
        help="of variants, instead of cells: seconds of the first call, and what others compile",
    )
    add(
        "--beside",
        type=Path,
        metavar="DIR",
        help="of launch: the same calls in another source tree too, in turns; a tree without its git "
        "history is called by the folder's name",
    )
    add("--ahead", type=int, metavar="PROCESSES", help="compile in that many processes first")
    add("--compile-only", action="store_true", help="run every contender once and report nothing")
    add("--compile", action="store_true", help="torch.compile as a peer on a CPU too")
    add(
        "--peers-path",
        type=Path,
        action="append",
        default=[],
        metavar="DIR",
        help="a site directory that holds peers, taken before others of their names; may be repeated",
    )
    add("--device", help="cuda, cuda:1 or cpu; default: cuda where there is one")
    options = parser.parse_args(arguments)
    for path in options.peers_path:
        if not path.is_dir():
            parser.error(f"--peers-path is {path}, which is no directory; unpack it first")
    if options.repeats < 1:
        parser.error("--repeats takes at least 1")
    if options.drop_slower is not None and options.drop_slower < 1:
        parser.error("--drop-slower takes at least 1")
    if "launch" in options.subjects and len(options.subjects) > 1:
        parser.error("launch is measured alone")
    if options.first_calls and options.subjects != ["variants"]:
        parser.error("--first-calls takes the subject variants alone")
    if options.beside is not None:
        if options.subjects != ["launch"]:
            parser.error("--beside takes the subject launch alone")
        if not (options.beside / "flashproto" / "__init__.py").is_file():
            parser.error(f"--beside is {options.beside}, which holds no flashproto; pass a source tree")
    for name in ("cells", "contenders"):
        try:
            re.compile(getattr(options, name) or "")
        except re.error as error:
            parser.error(f"--{name} is no regular expression: {error}")
    return options


def chosen_impls(names: str | None, device: torch.device, subject: str) -> list[str]:
    """The backends to time: those named, or those with kernels of their own for the subject that run on
    the device (where none does, all that run)."""
    if names is not None:
        listed = names.split(",")
        for name in listed:
            if name not in backends.BACKENDS:
                takes = ", ".join(backends.BACKENDS)
                raise ValueError(f"--impl is {name!r}; it takes {takes}. Separate several by commas.")
        return listed
    runs = [name for name in backends.BACKENDS if not backends.device_reasons(name, device)]
    if subject not in ("attention", "variants", "views", "decode", "block", "gpt", "launch"):
        runs = [name for name in runs if name != "hopper"]  # which has attention alone
    kernels = [name for name in runs if name in ("hopper", "triton")]
    return kernels if kernels and device.type == "cuda" else [n for n in runs if n != "triton"]


@dataclass
class Plan:
    """A subject's cells that are wanted and not in its file yet."""

    subject: str
    module: Any
    impls: list[str]
    path: Path
    data: dict[str, Any]
    wanted: list[Any]


def plan(subject: str, options: argparse.Namespace, device: torch.device) -> Plan:
    module = import_module(f".{subject}", __package__)
    name = f"{subject}_{options.suffix}" if options.suffix else subject
    path = options.out / f"{name}.json"
    data: dict[str, Any] = {"subject": subject, "runs": [], "cells": {}}
    if options.resume and path.exists():
        data = report.load(path, subject)
    elif path.exists() and not options.compile_only:
        raise ValueError(f"{path} exists; pass --resume to add to it, or another --out.")
    wanted = [
        p
        for p in module.problems(options.quick, device)
        if re.search(options.cells or "", p.key) and p.key not in data["cells"]
    ]
    return Plan(subject, module, chosen_impls(options.impl, device, subject), path, data, wanted)


def contenders(
    plan: Plan, problem: Any, options: argparse.Namespace, device: torch.device
) -> dict[str, Any]:
    torch._dynamo.reset()  # compiled peers of the last cell, and their limit on recompilation
    # A graph that is kept for several backward passes cannot give its buffers away.
    functorch_config.donated_buffer = plan.module.work(problem).step
    with_compile = device.type == "cuda" or options.compile
    made = plan.module.contenders(problem, device, plan.impls, with_compile)
    return {n: m for n, m in made.items() if re.search(options.contenders or "", n)}


def measure(plan: Plan, options: argparse.Namespace, device: torch.device, started: float) -> None:
    """Measure the plan's cells, each saved when it is done; none is begun after --budget."""
    ceilings = measure_ceilings(device)
    print(report.ceilings_text(ceilings), flush=True)
    on_device = device.type == "cuda" and not getattr(plan.module, "WALL_CLOCK", False)
    protocol = {
        "repeats": options.repeats,
        "rep_ms": options.rep_ms,
        "drop_slower": options.drop_slower,
        "timer": DEVICE_TIMER if on_device else "wall clock, each call waited for",
        "statistic": "median of repeats in changing order, each a median",
    }
    cells, runs = plan.data["cells"], plan.data["runs"]
    runs.append(report.describe_run(ceilings, protocol))
    timer = make_timer(device, options.rep_ms, on_device)
    for index, problem in enumerate(plan.wanted):
        elapsed = time.perf_counter() - started
        if options.budget is not None and elapsed > options.budget:
            left = len(plan.wanted) - index
            print(f"stopped after {elapsed:.0f} s with {left} cells left: --resume")
            break
        work = plan.module.work(problem)
        made = contenders(plan, problem, options, device)
        results = measure_cell(made, work, timer, options.repeats, options.drop_slower)
        cell = {"run": len(runs) - 1, "unit": work.unit, "passes": results}
        if work.copied is not None:
            cell["ceiling"] = copy_speed(work.copied, device, timer)
        elif work.unit == "TFLOP/s":
            cell["ceiling"] = ceilings["matmul_tflop_s"]
        peak = value_at_peak(work, device)
        if peak is not None:
            cell["peak"] = peak
        cells[problem.key] = cell
        report.save(plan.path, plan.data)
        print_cell(problem.key, results, work.unit)
        del made
        gc.collect()
        if device.type == "cuda":
            torch.cuda.empty_cache()


def add_peers(path: Path) -> None:
    """Make importable what a site directory holds, its .pth files' folders too, before all else."""
    site.addsitedir(str(path))
    sys.path.sort(key=lambda entry: not Path(entry).is_relative_to(path))


def value_at_peak(work: Work, device: torch.device) -> float | None:
    """A step's value at the card's dense bfloat16 peak, which is an MFU of 1; None where either is not
    known."""
    peak = peak_flops(torch.cuda.get_device_name(device)) if device.type == "cuda" else None
    if peak is None or work.flops is None or work.backward is None:
        return None
    return work.backward / (work.flops / peak * 1e3)


def ahead_of(plan: Plan, options: argparse.Namespace) -> list[list[str]]:
    """Command lines that compile what the plan's cells need: of cells alike together, where the
    module says which are, else of some cells each."""
    families: dict[Any, list[str]] = {}
    for index, problem in enumerate(plan.wanted):
        alike = getattr(plan.module, "family", None)
        family = alike(problem) if alike else index % max(1, options.ahead // 2)
        families.setdefault(family, []).append(problem.key)
    arguments = [plan.subject, "--impl", ",".join(plan.impls)]
    arguments += ["--quick"] * options.quick + ["--compile"] * options.compile
    for option, values in (("--device", [options.device]), ("--peers-path", options.peers_path)):
        arguments += [text for value in values if value is not None for text in (option, str(value))]
    compiled_ours = plan.impls if getattr(plan.module, "COMPILES_OURS", False) else ()
    return warm.commands(arguments, families, options.contenders, compiled_ours)


def conclude(plan: Plan, goals: bool = False) -> None:
    """The tables, the plot and, with `goals`, the goals of all cells that the subject's file holds."""
    cells = plan.data["cells"]
    for which in report.passes(cells):
        print("\n" + report.table(cells, which))
    said = plan.module.conclusion(plan.data) if hasattr(plan.module, "conclusion") else ""
    if said:
        print("\n" + said)
    if goals and hasattr(plan.module, "goals"):
        print("\n" + plan.module.goals(plan.data))
    machine = plan.data["runs"][-1]["environment"]
    where = machine["gpus"][0]["name"] if machine["gpus"] else machine["machine"]["cpu"]
    title = f"{plan.subject}, {where}, torch {machine['versions']['torch']}"
    drawn = "and .png"
    try:
        plots.plot(cells, title, plan.path.with_suffix(".png"))
    except ImportError as error:
        drawn = f'without a picture ({error}): pip install ".[bench]", and run it again with --resume'
    print(f"\nwrote {plan.path} {drawn}")


def print_cell(key: str, results: dict[str, dict[str, Any]], unit: str) -> None:
    for which, by_name in results.items():
        text = "  ".join(f"{n} {report.entry(r, unit)}" for n, r in by_name.items())
        print(f"{key} {which} ({unit}): {text}", flush=True)


def main(arguments: Sequence[str] | None = None) -> None:
    arguments = sys.argv[1:] if arguments is None else arguments
    if arguments and arguments[0] in TOOLS:
        import_module(f".{arguments[0]}", __package__).main(arguments[1:])
        return
    options = parse(arguments)
    for path in reversed(options.peers_path):
        add_peers(path.absolute())
    device = torch.device(options.device or ("cuda" if torch.cuda.is_available() else "cpu"))
    warnings.filterwarnings("ignore", category=UserWarning, module="torch")
    print(render(environment()), "\n")
    if device.type != "cuda":
        print("No NVIDIA GPU: small float32 shapes, wall clock; this says nothing of a GPU.\n")
    started = time.perf_counter()
    try:
        if options.subjects == ["launch"]:
            run_launch(options, device, chosen_impls(options.impl, device, "launch"))
            return
        if options.first_calls:
            impls = chosen_impls(options.impl, device, "variants")
            first_calls.run(impls, device, options.out, options.goals)
            return
        plans = [plan(subject, options, device) for subject in options.subjects]
    except (ValueError, backends.BackendError) as error:
        sys.exit(f"flashproto.bench: {error}")
    if options.compile_only:
        for each in plans:
            for problem in each.wanted:
                made = contenders(each, problem, options, device)
                warm.compile_once(made, each.module.work(problem))
        return
    if options.ahead:
        lines = [line for each in plans for line in ahead_of(each, options)]
        warm.run_all(lines, options.ahead)
    for each in plans:
        if each.wanted:
            measure(each, options, device, started)
        else:
            print(f"{each.subject}: no cell left to measure")
        if each.data["cells"]:
            conclude(each, options.goals)


def run_launch(options: argparse.Namespace, device: torch.device, impls: list[str]) -> None:
    names = options.contenders or ""
    if options.beside is None:
        from .launch import launch_text, measure_launch

        subject, protocol = "launch", "median and lowest of 31 rounds of 100 calls"
        figures = [measure_launch(impl, device, names) for impl in impls]
        texts = [launch_text(figure, options.goals) for figure in figures]
        told = {}
    else:
        from .launch_beside import CALLS, ROUNDS, TIMES, beside_text, measure_beside

        subject = "launch_beside"
        protocol = f"lowest of {ROUNDS} rounds of {TIMES} times of {CALLS} calls, in turns on one core"
        figures = [measure_beside(impl, device, options.beside, names) for impl in impls]
        (other, dirty), (this, _) = report.commit(options.beside.resolve()), report.commit()
        other = other or options.beside.resolve().name
        texts = [beside_text(figure, (other[:12], (this or "this tree")[:12])) for figure in figures]
        told = {"beside": {"commit": other, "dirty": dirty}}
    print("\n\n".join(texts))
    run = report.describe_run({}, {"host": protocol}) | told
    path = options.out / f"{subject}.json"
    report.save(path, {"subject": subject, "runs": [run], "launch": figures})
    print(f"\nwrote {path}")


if __name__ == "__main__":
    main()
