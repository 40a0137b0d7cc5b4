"""Train the same GPT on several backends, from several seeds, and compare their losses.

    python examples/compare_losses.py --impl hopper triton --seeds 12
    python examples/compare_losses.py --impl torch reference --seeds 2 -- --steps 100 --context 64

What is behind `--` goes to train_gpt.py, each run of which is a process.  A seed decides weights
and batches, so that runs of one seed differ in rounding alone; training makes more of it step by step.
So differences are given in the mean over the seeds too, with its standard error: whether one backend
trains better is what that says.  Tokens/s are of runs that have the machine to themselves, with
--processes 1.
"""

from __future__ import annotations

if __name__ == "__main__":
    import start

import argparse
import itertools
import json
import math
import re
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from flashproto.backends import BACKENDS
from flashproto.bench import report

STEPS = 500
WINDOW = 50  # steps whose losses are averaged
QUANTITIES = {
    "validation": "validation loss at the end",
    "mean": "mean loss of all steps",
    "last": f"mean loss of the last {WINDOW} steps",
    "windows": f"mean loss of {WINDOW} steps, where it differs most",
}


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--impl", nargs="+", choices=BACKENDS, required=True, metavar="NAME", help=", ".join(BACKENDS))
    add("--seeds", type=int, default=4, help="seeds 0, 1, ... (4)")
    add("--processes", type=int, default=1, help="runs at a time (1)")
    add("--out", type=Path, default=Path("runs/losses.json"), help="runs/losses.json")
    add("train_gpt", nargs="*", metavar="-- OPTION", help=f"of train_gpt.py; --steps is {STEPS} there")
    options = parser.parse_args(arguments)
    for name in ("seeds", "processes"):
        if getattr(options, name) < 1:
            parser.error(f"--{name} is {getattr(options, name)}; it takes at least 1")
    if len(set(options.impl)) < 2:
        parser.error(f"--impl is {' '.join(options.impl)}; it takes two backends at least to compare")
    return options


def train(impl: str, seed: int, given: Sequence[str]) -> dict[str, Any]:
    """One run: mean losses of all steps, the last WINDOW and every WINDOW, validation loss, tokens/s of
    the median step."""
    with tempfile.TemporaryDirectory() as folder:
        out, script = Path(folder) / "run", Path(__file__).with_name("train_gpt.py")
        command = [
            sys.executable,
            str(script),
            "--steps",
            str(STEPS),
            *given,
            "--impl",
            impl,
            "--seed",
            str(seed),
            "--out",
            str(out),
        ]
        done = subprocess.run(command, capture_output=True, text=True)
        if done.returncode:
            sys.exit(f"compare_losses.py: {impl}, seed {seed}: {done.stderr.strip()}")
        rows = [json.loads(line) for line in (out / "log.jsonl").read_text().splitlines()]
    losses = [row["loss"] for row in rows]
    means = [statistics.fmean(losses[i : i + WINDOW]) for i in range(0, len(losses), WINDOW)]
    speed = re.search(r"^speed +([\d,]+) tokens/s", done.stdout, re.MULTILINE)
    return {
        "impl": impl,
        "seed": seed,
        "steps": len(losses),
        "windows": means,
        "mean": statistics.fmean(losses),
        "last": statistics.fmean(losses[-WINDOW:]),
        "validation": rows[-1]["validation"],
        "tokens_s": int(speed[1].replace(",", "")) if speed else None,
    }


def differences(runs: Sequence[dict[str, Any]], a: str, b: str, quantity: str) -> list[float]:
    """Of backend a from backend b, one for each seed; of windows that of the one that differs most."""
    of = {(run["impl"], run["seed"]): run[quantity] for run in runs}
    pairs = [(of[a, seed], of[b, seed]) for impl, seed in of if impl == a]
    if quantity != "windows":
        return [x - y for x, y in pairs]
    return [max((x - y for x, y in zip(*pair, strict=True)), key=abs) for pair in pairs]


def table(runs: Sequence[dict[str, Any]], impls: Sequence[str], with_speed: bool) -> str:
    lines = []
    for a, b in itertools.combinations(impls, 2):
        lines.append(f"{a} less {b}: mean over the seeds, its standard error; largest of a seed")
        for quantity, text in QUANTITIES.items():
            found = differences(runs, a, b, quantity)
            error = statistics.stdev(found) / math.sqrt(len(found)) if len(found) > 1 else math.nan
            lines.append(
                f"  {text:<50}{statistics.fmean(found):+9.4f} +- {error:.4f}{max(map(abs, found)):9.4f}"
            )
    if with_speed:
        for impl in impls:
            speeds = [run["tokens_s"] for run in runs if run["impl"] == impl and run["tokens_s"]]
            lines.append(f"{impl}: {statistics.median(speeds):,.0f} tokens/s")
    return "\n".join(lines)


def main(arguments: Sequence[str] | None = None) -> None:
    options = parse(arguments)
    impls = list(dict.fromkeys(options.impl))
    wanted = [(impl, seed, options.train_gpt) for seed in range(options.seeds) for impl in impls]
    with ThreadPoolExecutor(options.processes) as pool:
        runs = list(pool.map(lambda one: train(*one), wanted))
    alone = options.processes == 1
    protocol = {"train_gpt": options.train_gpt, "window": WINDOW, "processes": options.processes}
    print(table(runs, impls, alone))
    described = report.describe_run({}, protocol)
    report.save(options.out, {"subject": "losses", "runs": [described], "losses": runs})
    print(f"wrote {options.out}")


if __name__ == "__main__":
    start.run(main)
