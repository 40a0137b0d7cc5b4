"""Several processes with torch.distributed on the CPU, in one test."""

from __future__ import annotations

import multiprocessing
import pickle
import sys
import tempfile
import traceback
from collections.abc import Callable
from datetime import timedelta
from multiprocessing.connection import Connection
from typing import Any

import torch
import torch.distributed as dist

# Processes are forked from one that has imported these and done nothing yet: to import them anew in
# each would take longer than most tests.
context = multiprocessing.get_context("forkserver")
context.set_forkserver_preload(["torch", "torch.distributed.tensor", "flashproto.nn"])


def spawn(size: int, target: Callable[..., Any], *arguments: Any, seconds: float = 120) -> list[Any]:
    """What target(*arguments) returns in each of `size` processes of a gloo group, by rank.

    target is a function of a module, and what it takes and returns can be pickled.  AssertionError
    with the traceback of the first rank that fails, or that takes longer than `seconds`.
    """
    with tempfile.TemporaryDirectory() as folder:
        started = []
        for rank in range(size):
            here, there = context.Pipe(duplex=False)
            where = (f"file://{folder}/store", rank, size, seconds, list(sys.path))
            process = context.Process(target=_run, args=(there, *where, target, arguments), daemon=True)
            process.start()
            there.close()
            started.append((process, here))
        try:
            results = [_received(rank, here, seconds) for rank, (_, here) in enumerate(started)]
        finally:
            for process, _ in started:
                process.join(5)
                process.kill()
    failures = [text for done, text in results if not done]
    assert not failures, "\n".join(failures)
    return [value for _, value in results]


def _received(rank: int, pipe: Connection, seconds: float) -> tuple[bool, Any]:
    try:
        if pipe.poll(seconds):
            return pickle.loads(pipe.recv_bytes())
    except EOFError:
        return False, f"rank {rank} ended without a result"
    return False, f"rank {rank} took longer than {seconds} s"


def _run(
    pipe: Connection,
    store: str,
    rank: int,
    size: int,
    seconds: float,
    path: list[str],
    target: Callable[..., Any],
    arguments: tuple,
) -> None:
    sys.path[:] = path
    torch.set_num_threads(1)
    try:
        dist.init_process_group(
            "gloo", init_method=store, rank=rank, world_size=size, timeout=timedelta(seconds=seconds)
        )
        result = True, target(*arguments)
        dist.destroy_process_group()
    except BaseException:
        result = False, f"rank {rank}:\n{traceback.format_exc()}"
    pipe.send_bytes(pickle.dumps(result))
