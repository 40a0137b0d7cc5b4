"""Training on several GPUs of one host beside one of them: examples/train_gpt.py, in a checkout.

    python -m flashproto.bench parallel --processes 4

Each case is trained for some steps by one process, without --parallel, and by torchrun with
several, with as many sequences for each process.  One GPU cannot hold the long sequence, so several
alone train it.  The text is random letters, so the vocabulary is small.  Tokens/s are those of the
median step in the second half of the steps.  The share is tokens/s over N times those of one GPU.
Memory is what torch holds at the peak on the first GPU, the optimizer's state included.  MFU counts
attention of all pairs of tokens, as is usual, and a causal mask leaves half of them: over 131072
tokens it says nearly twice what was computed.  On a CPU, where processes share the cores, figures
say nothing but that it works.  A file that is there is added to.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import re
import shlex
import shutil
import statistics
import string
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from . import report

ROOT = Path(__file__).resolve().parents[2]
SCRIPT = ROOT / "examples" / "train_gpt.py"
LETTERS = string.ascii_letters + string.digits + " .,\n"
MEMORY, ENOUGH = Path("/dev/shm"), 2**35  # bytes: checkpoints need no disk where there are so many
GRACE = 45.0  # seconds
# What torchrun says beside its processes.
TORCHRUN = re.compile(r"elastic|error_file|traceback +: To enable|distributed/run.py|ChildFailedError")


@dataclass(frozen=True)
class Case:
    """arguments: of train_gpt.py; {n} is the number of processes.
    sequences: of a step for each process; 0: one for all, which one process alone does not train.
    goals: the wanted share on four GPUs, by what --parallel is.
    """

    arguments: str
    sequences: int
    goals: dict[str, float | None]


CASES = {
    "GPT-2 124M, B32 T1024 a GPU": Case(
        "--preset gpt2-124m --context 1024", 32, {"ddp": 3.8 / 4, "fsdp": 3.4 / 4}
    ),
    "Llama 1B, B4 T4096 a GPU": Case(
        "--preset llama-1b --context 4096", 4, {"ddp": None, "fsdp": 3.7 / 4}
    ),
    "Llama 1B, one sequence of 131072": Case(
        "--preset llama-1b --context 131072 --context-parallel {n}", 0, {"fsdp": None}
    ),
}


def parse(arguments: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m flashproto.bench parallel",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add("--processes", type=int, metavar="N", help="default: as many as there are GPUs, else 2")
    add("--cases", metavar="REGEX", help=f"only those whose names match: {'; '.join(CASES)}")
    add("--train", metavar="ARGUMENTS", help="a case of your own instead: --train='--preset ...'")
    add("--sequences", type=int, default=4, help="with --train: for each process (default 4)")
    add("--steps", type=int, default=24)
    add("--limit", type=float, default=300.0, help="seconds of one run (default 300)")
    add("--device", choices=("cuda", "cpu"), help="default: cuda where there is one")
    add("--out", type=Path, default=Path("runs/bench"), metavar="DIR", help="default: runs/bench")
    options = parser.parse_args(arguments)
    options.device = options.device or ("cuda" if torch.cuda.is_available() else "cpu")
    found = torch.cuda.device_count() if options.device == "cuda" else 2
    if options.processes is None:
        options.processes = found
    if options.device == "cuda" and options.processes > found:
        parser.error(f"--processes is {options.processes}; this machine has {found} GPUs")
    for name, least in (("processes", 2), ("sequences", 1), ("steps", 4)):
        given = getattr(options, name)
        if given < least:
            parser.error(f"--{name} is {given}; it takes {least} or more")
    try:
        shlex.split(options.train or "")
        if not chosen(options):
            parser.error(f"--cases is {options.cases}, which none has; there are {'; '.join(CASES)}")
    except re.error as error:
        parser.error(f"--cases is no regular expression: {error}")
    except ValueError as error:
        parser.error(f"--train is no command line: {error}")
    if not SCRIPT.exists():
        parser.error(f"there is no {SCRIPT.name} beside this package; run it in a checkout")
    return options


def chosen(options: argparse.Namespace) -> dict[str, Case]:
    if options.train is not None:
        return {options.train: Case(options.train, options.sequences, {"ddp": None, "fsdp": None})}
    return {name: case for name, case in CASES.items() if re.search(options.cases or "", name)}


def command(case: Case, way: str | None, options: argparse.Namespace, folder: Path) -> list[str]:
    """The command line that trains in one process or, in a way to share, in several."""
    n = options.processes if way else 1
    start = [sys.executable]
    if way:
        start += ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(n)]
    never = 10 * options.steps
    given = {
        "--batch-size": max(case.sequences * n, 1),
        "--steps": options.steps,
        "--save-every": never,
        "--validate-every": never,
        "--validate-tokens": 1000,
        "--data": folder / "text.txt",
        "--device": options.device,
        "--out": folder / "run",
    }
    if way:
        given["--parallel"] = way
    line = [*start, str(SCRIPT), *shlex.split(case.arguments.replace("{n}", str(n)))]
    return [*line, *(str(x) for pair in given.items() for x in pair)]


def room() -> Path | None:
    """Where runs are written: in memory, where that has room for their checkpoints."""
    there = MEMORY.is_dir() and shutil.disk_usage(MEMORY).free > ENOUGH
    return MEMORY if there else None


def trained(case: Case, way: str | None, options: argparse.Namespace) -> dict[str, Any]:
    """Tokens/s, MFU and GiB of a run, or its error."""
    with tempfile.TemporaryDirectory(dir=room()) as name:
        folder = Path(name)
        letters = random.Random(0).choices(LETTERS, k=2 << 20)
        (folder / "text.txt").write_text("".join(letters))
        line = command(case, way, options, folder)
        path = os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH"))))
        done = subprocess.Popen(
            line,
            env=os.environ | {"PYTHONPATH": path},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        try:
            out, err = done.communicate(timeout=options.limit)
        except subprocess.TimeoutExpired:
            done.terminate()  # torchrun ends what it started, by force after half a minute
            try:
                done.communicate(timeout=GRACE)
            except subprocess.TimeoutExpired:
                done.kill()
                done.communicate()
            return {"error": f"took longer than {options.limit:.0f} s"}
        if done.returncode:
            return {"error": reason(err)}
        rows = [json.loads(text) for text in (folder / "run" / "log.jsonl").read_text().splitlines()]
        settings = json.loads((folder / "run" / "settings.json").read_text())
    seconds = [row["seconds"] for row in rows]
    behind = seconds[len(seconds) // 2 :]
    step = statistics.median(behind)
    tokens = settings["batch_size"] * settings["context"]
    memory = re.search(r"^memory +([\d.]+) GiB", out, re.MULTILINE)
    return {
        "processes": options.processes if way else 1,
        "tokens_s": tokens / step,
        "step_ms": step * 1e3,
        "low_ms": min(behind) * 1e3,
        "high_ms": max(behind) * 1e3,
        "mfu": rows[-1].get("mfu") and rows[-1]["mfu"] * seconds[-1] / step,
        "gib": float(memory[1]) if memory else None,
        "loss": rows[-1]["loss"],
    }


def reason(err: str) -> str:
    """The line of standard error that says why a run failed; torchrun's own come last."""
    lines = [line.strip() for line in err.splitlines() if line.strip() and not TORCHRUN.search(line)]
    said = [line for line in lines if re.search(r"error", line, re.IGNORECASE)]
    return (said or lines or ["it ended without a word"])[-1][:300]


def measured(case: Case, options: argparse.Namespace) -> dict[str, dict[str, Any]]:
    """{"one" or the way to share: what was found}."""
    ways: list[str | None] = [None, *case.goals] if case.sequences else [*case.goals]
    made: dict[str, dict[str, Any]] = {}
    for way in ways:
        found = trained(case, way, options)
        one = made.get("one", {}).get("tokens_s")
        if way and one and "tokens_s" in found:
            found["share"] = found["tokens_s"] / one / options.processes
        made[way or "one"] = found
        print(text(way or "one", found, case.goals.get(way or "")), flush=True)
    return made


def text(way: str, found: dict[str, Any], goal: float | None) -> str:
    if "error" in found:
        return f"  {way}: error: {found['error']}"
    n = found["processes"]
    said = f"  {way}: {'one process' if way == 'one' else f'{n} processes'}"
    said += f", {found['tokens_s']:,.0f} tokens/s"
    said += f", {found['step_ms']:.1f} ms a step ({found['low_ms']:.1f} to {found['high_ms']:.1f})"
    if found["mfu"]:
        said += f", MFU {found['mfu']:.1%}"
    if found["gib"]:
        said += f", {found['gib']:.1f} GiB"
    if "share" in found:
        said += f", {found['share']:.3f} of {n} times one"
        said += f", goal {goal:.3f}" if goal and n == 4 else ""
    return said


def main(arguments: Sequence[str]) -> None:
    options = parse(arguments)
    told = {"ranks": options.processes, "steps": options.steps}
    path = options.out / "parallel.json"
    data: dict[str, Any] = {"subject": "parallel", "runs": [], "cells": {}}
    if path.exists():
        data = report.load(path, "parallel")
    data["runs"].append(report.describe_run({}, told))
    for name, case in chosen(options).items():
        print(name, flush=True)
        data["cells"][name] = found = measured(case, options)
        report.save(path, data)
        if all("error" in made for made in found.values()):
            raise SystemExit(f"flashproto.bench parallel: {name}: no run ended well")
