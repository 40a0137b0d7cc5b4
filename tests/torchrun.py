"""train_gpt.py in several processes, as torchrun starts them, and how it is killed.

    python tests/torchrun.py --count 20 --processes 2 --parallel fsdp

kills a run so often at random times, resumes it each time, and compares its log with that of a run that
was left alone.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import random
import resource
import signal
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import example_scripts
from example_scripts import EXAMPLES, LOG, SETTINGS, environment, rows

SCRIPT = EXAMPLES / "train_gpt.py"
MINUTE = 60.0  # in which torchrun has to end
ROWS = [
    *("--batch-size", "4", "--context", "16", "--save-every", "6", "--validate-every", "8"),
    *("--validate-tokens", "160", "--seed", "3", "--device", "cpu"),
]


def start(
    processes: int, *arguments: object, cwd: Path, largest_file: int | None = None
) -> subprocess.Popen:
    def limit() -> None:
        if largest_file is not None:
            hard = resource.getrlimit(resource.RLIMIT_FSIZE)[1]
            resource.setrlimit(resource.RLIMIT_FSIZE, (largest_file, hard))

    torchrun = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", str(processes)]
    torchrun += ["--master-port", free_port()]
    return subprocess.Popen(
        [*torchrun, str(SCRIPT), *map(str, arguments)],
        cwd=cwd,
        env=environment(),
        preexec_fn=limit,
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )


def free_port() -> str:
    """A port that no one listens on; torchrun's default is one for all runs of a machine."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        return str(free.getsockname()[1])


def start_without(processes: int, *arguments: object, cwd: Path) -> list[subprocess.Popen]:
    """The processes by rank as other launchers start them: nobody ends those that are left."""
    of_all = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": free_port()}
    of_all |= dict.fromkeys(("WORLD_SIZE", "LOCAL_WORLD_SIZE"), str(processes))
    return [
        example_scripts.start(
            SCRIPT.name, *arguments, cwd=cwd, **of_all, RANK=str(rank), LOCAL_RANK=str(rank)
        )
        for rank in range(processes)
    ]


def ranks(torchrun: subprocess.Popen) -> dict[int, int]:
    """The processes of a torchrun by rank (Linux)."""
    found = {}
    for process in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):  # it has ended
            parent = (process / "stat").read_text().rpartition(")")[2].split()[1]
            variables = (process / "environ").read_bytes().split(b"\0")
            rank = next((x for x in variables if x.startswith(b"RANK=")), None)
            if int(parent) == torchrun.pid and rank is not None:
                found[int(rank.removeprefix(b"RANK="))] = int(process.name)
    return found


def written(torchrun: subprocess.Popen, path: Path, before: int) -> bool:
    """Wait until it writes the file anew; False where it ended before."""
    while not path.exists() or path.stat().st_mtime_ns == before:
        if torchrun.poll() is not None:
            return False
        time.sleep(0.01)
    return True


def kill(
    torchrun: subprocess.Popen, folder: Path, rank: int, seconds: float, after: str = SETTINGS
) -> str | None:
    """Kill a rank so many seconds after the run has written a file, the first one at its begin; returns
    what torchrun then says, None where the run was finished before."""
    path = folder / after
    if written(torchrun, path, path.stat().st_mtime_ns if path.exists() else 0):
        time.sleep(seconds)
        victims = ranks(torchrun)
        if rank in victims:
            os.kill(victims[rank], signal.SIGKILL)
    _, err = torchrun.communicate(timeout=MINUTE)
    if torchrun.returncode == 0:
        return None
    check_last_lines(err, rank, folder)
    return err


def last_lines(err: str) -> str:
    """What torchrun says last, of the process that failed first."""
    return err.split("Root Cause (first observed failure):")[-1]


def check_last_lines(err: str, rank: int, folder: Path) -> None:
    """They name the killed rank, why it ended, and how to go on."""
    cause = last_lines(err)
    assert f"rank      : {rank} " in cause, err
    assert f"exitcode  : {-signal.SIGKILL} " in cause, err
    assert f"rank {rank}: ended without a word: it was killed" in cause, err
    assert f"--resume --out {folder}" in cause, err


def kill_and_resume(
    options: list[object],
    folder: Path,
    count: int,
    processes: int,
    draw: random.Random,
    longest: float = 2.0,
) -> int:
    """Begin a run, kill it `count` times, each after at most `longest` seconds, and let it finish;
    returns how often it was killed."""
    given: list[object] = options
    for n in range(count + 1):
        torchrun = start(processes, *given, "--out", folder, cwd=folder.parent)
        given = ["--resume", "auto", *options]
        if n == count:
            out, err = torchrun.communicate(timeout=600)
            assert torchrun.returncode == 0, out + err
        elif kill(torchrun, folder, draw.randrange(processes), draw.uniform(0, longest)) is None:
            return n
        else:
            steps = len(rows(folder)) if (folder / LOG).exists() else 0
            print(f"kill {n + 1}: {steps} steps", flush=True)
    return count


def main() -> None:
    p = argparse.ArgumentParser(description=__doc__)
    p.add_argument("--count", type=int, default=20)
    p.add_argument("--processes", type=int, default=2)
    p.add_argument("--parallel", default="fsdp")
    p.add_argument("--steps", type=int, default=400)
    p.add_argument("--longest", type=float, default=2.0, help="seconds until a kill, at most")
    p.add_argument("--seed", type=int, default=0)
    a = p.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        options = [*ROWS, "--steps", a.steps, "--parallel", a.parallel]
        draw = random.Random(a.seed)
        killed = kill_and_resume(options, folder / "killed", a.count, a.processes, draw, a.longest)
        kill_and_resume(options, folder / "whole", 0, a.processes, random.Random(0))
        want, got = rows(folder / "whole"), rows(folder / "killed")
        assert [r["step"] for r in got] == list(range(1, a.steps + 1))
        differing = [g["step"] for g, w in zip(got, want, strict=True) if g != w]
        print(f"killed {killed} times; {len(got)} steps; steps that differ: {differing}")
        print(json.dumps(got[-1]))
        sys.exit(bool(differing) or killed < a.count)


if __name__ == "__main__":
    main()
