"""The host's time of a call in this source tree and in another one, in turns: launch --beside DIR.

Each tree has a worker: a process that imports flashproto from the tree, and the rows and the clock from
this bench, so that both trees run the same calls.  Once both have compiled, they are pinned to one core
and take turns, row by row, in an order that changes each round.  The lowest time of a few calls counts:
few, so that some are timed without a break where other processes want the core.  Workers are started
several times: processes of one tree differ too.  The rows of torch show what the comparison is worth:
they are the same code in both workers.
"""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import torch

import flashproto

from .launch import attention_row, calls_in, running_rows
from .timing import host_round

BENCH = Path(__file__).parent
STARTS, ROUNDS, TIMES, CALLS = 3, 11, 10, 10
SLOWER_US, SLOWER_RATIO = 0.5, 1.03  # a row that exceeds both is marked
WORKER = """
import sys
import flashproto.bench
flashproto.bench.__path__[:] = [sys.argv[1]]
from flashproto.bench.launch_beside import serve
serve(*sys.argv[2:])
"""


def serve(impl: str, device: str, names: str) -> None:
    """A worker's side: says which rows run, then reads lines [row, times, calls] and answers each with
    the lowest of so many times of so many calls, in microseconds of a call."""
    answers, sys.stdout = sys.stdout, sys.stderr
    running, errors = running_rows(impl, torch.device(device), names)
    ready = {"package": flashproto.__file__, "rows": list(running), "errors": errors}
    print(json.dumps(ready), file=answers, flush=True)
    for line in sys.stdin:
        name, times, calls = json.loads(line)
        us = min(host_round(running[name], calls) for _ in range(times))
        print(json.dumps(us / calls_in(name)), file=answers, flush=True)


class Worker:
    """The process that runs a tree's calls."""

    def __init__(self, tree: Path, *arguments: str) -> None:
        self.tree = tree.resolve()
        path = os.pathsep.join([str(self.tree), os.environ.get("PYTHONPATH", "")]).rstrip(os.pathsep)
        self.process = subprocess.Popen(
            [sys.executable, "-P", "-c", WORKER, str(BENCH), *arguments],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env=os.environ | {"PYTHONPATH": path, "OMP_NUM_THREADS": "1"},
            text=True,
        )

    def answer(self) -> Any:
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        if not line:
            raise RuntimeError(f"the worker of {self.tree} ended with {self.process.wait()}")
        return json.loads(line)

    def ready(self) -> dict[str, Any]:
        """What runs, once all of it is compiled."""
        told: dict[str, Any] = self.answer()
        if not Path(told["package"]).is_relative_to(self.tree):
            raise RuntimeError(f"the worker of {self.tree} imported {told['package']}")
        return told

    def pin(self, core: int) -> None:
        for thread in os.listdir(f"/proc/{self.process.pid}/task"):
            with contextlib.suppress(ProcessLookupError):  # one that has just ended
                os.sched_setaffinity(int(thread), {core})

    def microseconds(self, *asked: str | int) -> float:
        assert self.process.stdin is not None
        print(json.dumps(asked), file=self.process.stdin, flush=True)
        return float(self.answer())

    def stop(self) -> None:
        self.process.kill()
        self.process.communicate()


def take_turns(workers: list[Worker], rows: list[str], lowest: dict[str, list[float]]) -> None:
    """Note the lowest microseconds of each row by each worker."""
    core = max(os.sched_getaffinity(0))
    for worker in workers:
        worker.pin(core)
    for round_ in range(ROUNDS):
        for name in rows:
            times = lowest.setdefault(name, [float("inf")] * len(workers))
            for which in (0, 1) if round_ % 2 else (1, 0):
                us = workers[which].microseconds(name, TIMES, max(1, CALLS // calls_in(name)))
                times[which] = min(us, times[which])


def measure_beside(impl: str, device: torch.device, other: Path, names: str = "") -> dict[str, Any]:
    """{row: [microseconds of a call in the other tree, in this one]}, and which rows fail in either."""
    lowest: dict[str, list[float]] = {}
    told: list[dict[str, Any]] = []
    for _ in range(STARTS):
        workers: list[Worker] = []
        try:
            for tree in (other, BENCH.parents[1]):
                workers.append(Worker(tree, impl, str(device), names))
            told = [worker.ready() for worker in workers]
            take_turns(workers, [x for x in told[1]["rows"] if x in told[0]["rows"]], lowest)
        finally:
            for worker in workers:
                worker.stop()
    return {"impl": impl, "host_us": lowest, "errors": [each["errors"] for each in told]}


def beside_text(figures: dict[str, Any], trees: tuple[str, str]) -> str:
    """The table; `trees`: what the other and this one are called."""
    host, other, this = figures["host_us"], *trees
    lines = [
        f"backend {figures['impl']}, microseconds of a call on the host, lowest of rounds in turns: "
        f"{other}, {this}, their ratio; {this} in times of {other}'s attention"
    ]
    width, count = max(map(len, host), default=0), 0
    for name, (before, after) in host.items():
        unit, _ = host.get(attention_row(name), (None, None))
        times = f"{after / unit:8.2f}x" if unit else " " * 9
        slower = is_slower(before, after)
        count += slower
        ratio = f" {before:8.2f} {after:8.2f}{after / before:8.3f}{times}"
        lines.append(f"  {name:<{width}}{ratio}{'  slower' * slower}")
    for which, tree in enumerate(trees):
        others = figures["errors"][1 - which]
        for name, error in figures["errors"][which].items():
            if others.get(name) != error:
                lines.append(f"  {name} in {tree}: {error}")
            elif which == 1:
                lines.append(f"  {name}: {error}")
    limit = f"more than {SLOWER_US} us and {SLOWER_RATIO - 1:.0%}"
    return "\n".join([*lines, f"rows slower by {limit}: {count} of {len(host)}"])


def is_slower(before: float, after: float) -> bool:
    return after > max(before + SLOWER_US, before * SLOWER_RATIO)
