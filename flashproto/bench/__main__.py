"""python -m flashproto.bench: flashproto beside the peers found, with the ceilings of the same run.

Writes DIR/SUBJECT.json after every cell and DIR/SUBJECT.png at the end.

Results are checked first, against float32 references: a contender whose result is wrong, or that
fails, is listed with its error and gets no time.  Forward is timed with gradients wanted, as in
training; backward alone, on a graph kept for it (block: forward and backward together).
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
from importlib import import_module
from pathlib import Path
from typing import Any

import torch
import torch._functorch.config as functorch_config

from .. import backends
from ..env import environment, render
from . import report
from .ceilings import measure_ceilings
from .measure import measure_cell
from .timing import make_timer

SUBJECTS = ("attention", "norm", "softmax", "block")


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m flashproto.bench",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add("subject", choices=(*SUBJECTS, "launch"))
    add("--quick", action="store_true", help="few cells")
    add("--out", type=Path, default=Path("runs/bench"), metavar="DIR", help="default: runs/bench")
    add("--resume", action="store_true", help="keep the cells that DIR's JSON holds, add the rest")
    add("--cells", metavar="REGEX", help="only cells whose name matches, such as 'D128 .* causal'")
    add("--contenders", metavar="REGEX", help="only contenders whose name matches")
    add("--impl", metavar="NAME,...", help="flashproto's backends to time; default: those that run")
    add("--budget", type=float, metavar="SECONDS", help="start no new cell after that long")
    add("--repeats", type=int, default=5, help="interleaved repeats; the median counts (default 5)")
    add("--rep-ms", type=float, default=100.0, help="length of one repeat (default 100)")
    add("--compile", action="store_true", help="torch.compile as a peer on a CPU too")
    add("--peers-path", type=Path, metavar="DIR", help="a site directory that holds peers")
    add("--device", help="cuda, cuda:1 or cpu; default: cuda where there is one")
    options = parser.parse_args(arguments)
    if options.peers_path is not None and not options.peers_path.is_dir():
        parser.error(f"--peers-path is {options.peers_path}, which is no directory; unpack it first")
    if options.repeats < 1:
        parser.error("--repeats takes at least 1")
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
    if subject in ("norm", "softmax"):
        runs = [name for name in runs if name != "hopper"]  # which has attention alone
    kernels = [name for name in runs if name in ("hopper", "triton")]
    return kernels if kernels and device.type == "cuda" else [n for n in runs if n != "triton"]


def measure_subject(
    subject: str, options: argparse.Namespace, device: torch.device, impls: list[str]
) -> dict[str, Any]:
    """Run the cells of a subject that are wanted and not there yet; the JSON's content."""
    module = import_module(f".{subject}", __package__)
    path = options.out / f"{subject}.json"
    data: dict[str, Any] = {"subject": subject, "runs": [], "cells": {}}
    if options.resume and path.exists():
        data = report.load(path, subject)
    elif path.exists():
        raise ValueError(f"{path} exists; pass --resume to add to it, or another --out.")
    wanted = [p for p in module.problems(options.quick, device)
              if re.search(options.cells or "", p.key) and p.key not in data["cells"]]  # fmt: skip
    if not wanted:
        print("no cell left to measure")
        return data
    started = time.perf_counter()
    ceilings = measure_ceilings(device)
    print(report.ceilings_text(ceilings), flush=True)
    protocol = {"repeats": options.repeats, "rep_ms": options.rep_ms,
                "timer": "triton do_bench median" if device.type == "cuda" else "wall clock median",
                "statistic": "median of interleaved repeats"}  # fmt: skip
    data["runs"].append(report.describe_run(ceilings, protocol))
    timer = make_timer(device, options.rep_ms)
    with_compile = device.type == "cuda" or options.compile
    for index, problem in enumerate(wanted):
        elapsed = time.perf_counter() - started
        if options.budget is not None and elapsed > options.budget:
            print(f"stopped after {elapsed:.0f} s with {len(wanted) - index} cells left: --resume")
            break
        torch._dynamo.reset()  # compiled peers of the last cell, and their limit on recompilation
        made = module.contenders(problem, device, impls, with_compile)
        made = {n: m for n, m in made.items() if re.search(options.contenders or "", n)}
        work = module.work(problem)
        results = measure_cell(made, work, timer, options.repeats)
        data["cells"][problem.key] = {
            "run": len(data["runs"]) - 1,
            "unit": work.unit,
            "passes": results,
        }
        report.save(path, data)
        print_cell(problem.key, results, work.unit)
        del made
        gc.collect()
        if device.type == "cuda":
            torch.cuda.empty_cache()
    return data


def print_cell(key: str, results: dict[str, dict[str, Any]], unit: str) -> None:
    for which, by_name in results.items():
        text = "  ".join(f"{n} {report.entry(r, unit)}" for n, r in by_name.items())
        print(f"{key} {which} ({unit}): {text}", flush=True)


def main(arguments: Sequence[str] | None = None) -> None:
    options = parse(arguments)
    if options.peers_path is not None:
        site.addsitedir(str(options.peers_path))
    device = torch.device(options.device or ("cuda" if torch.cuda.is_available() else "cpu"))
    # A graph that is kept for several backward passes cannot give its buffers away.
    functorch_config.donated_buffer = False
    warnings.filterwarnings("ignore", category=UserWarning, module="torch")
    print(render(environment()), "\n")
    if device.type != "cuda":
        print("No NVIDIA GPU: small float32 shapes, wall clock; this says nothing of a GPU.\n")
    try:
        impls = chosen_impls(options.impl, device, options.subject)
        if options.subject == "launch":
            run_launch(options, device, impls)
            return
        data = measure_subject(options.subject, options, device, impls)
    except (ValueError, backends.BackendError) as error:
        sys.exit(f"flashproto.bench: {error}")
    if not data["cells"]:
        return
    for which in report.passes(data["cells"]):
        print("\n" + report.table(data["cells"], which))
    machine = data["runs"][-1]["environment"]
    where = machine["gpus"][0]["name"] if machine["gpus"] else machine["machine"]["cpu"]
    title = f"{options.subject}, {where}, torch {machine['versions']['torch']}"
    report.plot(data["cells"], title, options.out / f"{options.subject}.png")
    print(f"\nwrote {options.out / options.subject}.json and .png")


def run_launch(options: argparse.Namespace, device: torch.device, impls: list[str]) -> None:
    from .launch import launch_text, measure_launch

    figures = [measure_launch(impl, device) for impl in impls]
    print("\n\n".join(map(launch_text, figures)))
    run = report.describe_run({}, {"host": "median of 5 rounds of 300 calls"})
    report.save(options.out / "launch.json", {"subject": "launch", "runs": [run], "launch": figures})
    print(f"\nwrote {options.out / 'launch.json'}")


if __name__ == "__main__":
    main()
