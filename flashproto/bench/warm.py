"""Compile ahead: every contender of the wanted cells runs once, in several processes at a time.

The caches on disk (Triton's, Inductor's, flash-attn-4's where its environment variables turn it on)
then hold what the measuring process needs.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch

from .measure import Prepared, Work, backward_call, forward_call, one_line

BY_INDUCTOR = "compile|flex"  # in the names of contenders whose code depends on every length


def commands(
    arguments: Sequence[str],
    families: Mapping[Any, Sequence[str]],
    contenders: str | None,
    inductor_impls: Sequence[str] = (),
) -> list[list[str]]:
    """The command lines that compile: one for each family of cells (their keys) and kind of contender.

    arguments: a command line of this package, to which each adds what it restricts.
    inductor_impls: backends of ours that torch.compile compiles around, which takes so long that each
        is a kind of its own.
    """
    base = [sys.executable, "-m", "flashproto.bench", *arguments, "--compile-only"]
    chosen = f"(?=.*({contenders or ''}))"
    kinds = [rf"(?=flashproto\[{impl}\].*compile)" for impl in inductor_impls]
    kinds += [f"(?={BY_INDUCTOR})", f"(?!.*({BY_INDUCTOR}))"]
    made = []
    for keys in families.values():
        cells = f"^({'|'.join(map(re.escape, keys))})$"
        for kind in kinds:
            made.append([*base, "--cells", cells, "--contenders", f"^{chosen}{kind}"])
    return made


def run_all(lines: Sequence[Sequence[str]], processes: int, limit: float = 300.0) -> None:
    """Run the commands, `processes` at a time, and print what each took and complained of."""
    threads = max((os.cpu_count() or 1) // max(min(processes, len(lines)), 1), 1)

    def run(line: Sequence[str]) -> str:
        start = time.perf_counter()
        environment = os.environ | {"TORCHINDUCTOR_COMPILE_THREADS": str(threads)}
        try:
            done = subprocess.run(
                line, env=environment, capture_output=True, text=True, check=False, timeout=limit
            )
            said = [text for text in done.stdout.splitlines() if text.startswith("error")]
            if done.returncode:
                said.append((done.stderr.strip().splitlines() or ["no output"])[-1][:200])
        except subprocess.TimeoutExpired:
            said = ["took too long"]
        seconds = time.perf_counter() - start
        return f"compiled ahead in {seconds:.0f} s: {' '.join(line[-4:])} {'; '.join(said)}"

    with ThreadPoolExecutor(processes) as pool:
        for text in pool.map(run, lines):
            print(text, flush=True)


def compile_once(contenders: Mapping[str, Callable[[], Prepared]], work: Work) -> None:
    """Run every contender once, forward and backward; print the errors."""
    for name, make in contenders.items():
        try:
            prepared: Any = make()
            out = forward_call(prepared, work)()
            if not (work.forward_only or prepared.forward_only):
                backward_call(prepared, out, work.step)()
        except Exception as error:
            print(f"error of {name}: {one_line(error)}", flush=True)
    if torch.cuda.is_available():
        torch.cuda.synchronize()
