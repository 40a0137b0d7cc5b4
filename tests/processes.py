"""Cases for several processes of torch.distributed: all of a world size in one start of its processes.

    def sums() -> None:  # in every process, a function of a module
        x = torch.ones(1)
        dist.all_reduce(x)
        assert x == dist.get_world_size()

    def test_them() -> None:
        processes.run({"sums": sums}, world_size=2)

Each case has a default group of its own, so that one that fails leaves nothing behind for the next one.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import time
import traceback
from collections.abc import Callable, Iterator, Mapping
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from typing import Any

import torch
import torch.distributed as dist

Case = Callable[[], Any]
# Imported once, by the process that the others are forked from.
PRELOADED = ["torch.distributed", "flashproto", "flashproto.distributed", "pytest", "hypothesis"]
CASE_SECONDS = 60.0  # the longest that a process waits for the others in one case


def run(
    cases: Mapping[str, Case],
    world_size: int,
    *,
    backend: str = "gloo",
    seconds: float = 240.0,
    case_seconds: float = CASE_SECONDS,
) -> dict[str, list[Any]]:
    """What each case returns, by its name, in the order of ranks.

    cases: functions of modules, or functools.partial of such; every process calls them in this order,
        with torch's random numbers seeded alike on all ranks.
    backend: of the process group; of "nccl" process r has GPU r.
    seconds: after that long the processes are killed.

    Raises: AssertionError: names each case that failed, and on which ranks, with their errors.
    """
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(PRELOADED)
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    seed = int(os.environ.get("FLASHPROTO_TEST_SEED", "0"))
    processes, pipes = [], []
    for rank in range(world_size):
        ours, theirs = context.Pipe(duplex=False)
        options = rank, world_size, store.port, backend, seed, case_seconds
        process = context.Process(target=work, args=(dict(cases), options, theirs), daemon=True)
        process.start()
        theirs.close()
        processes.append(process)
        pipes.append(ours)
    results: dict[str, list[Any]] = {name: [None] * world_size for name in cases}
    try:
        failures = collect(pipes, results, time.monotonic() + seconds)
    finally:
        for process in processes:
            process.kill()  # of those that are through, nothing is left to end
            process.join()
    assert not failures, f"of {world_size} processes:\n" + "\n".join(failures)
    return results


@contextlib.contextmanager
def alone() -> Iterator[None]:
    """A default group of this process alone."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        yield
    finally:
        dist.destroy_process_group()


def collect(pipes: list[Connection], results: dict[str, list[Any]], end: float) -> list[str]:
    """Fills results; returns what failed."""
    failures = []
    left = {pipe: [*results] for pipe in pipes}  # the cases that each has before it
    while left:
        ready = wait(list(left), max(0.0, end - time.monotonic()))
        for pipe in ready:
            assert isinstance(pipe, Connection)
            rank = pipes.index(pipe)
            try:
                name, result, error = pipe.recv()
            except EOFError:
                return [*failures, f"{left[pipe][0]} on rank {rank}: the process died"]
            results[name][rank] = result
            left[pipe].remove(name)
            if not left[pipe]:
                del left[pipe]
            if error is not None:
                failures.append(f"{name} on rank {rank}: {error}")
        if not ready:
            late = [f"{names[0]} on rank {pipes.index(pipe)}" for pipe, names in left.items()]
            return [*failures, f"killed, since they took too long: {', '.join(late)}"]
    return failures


def work(cases: dict[str, Case], options: tuple[Any, ...], pipe: Connection) -> None:
    """One process."""
    rank, world_size, port, backend, seed, case_seconds = options
    torch.set_num_threads(1)
    limit = timedelta(seconds=case_seconds)
    store = dist.TCPStore("127.0.0.1", port, is_master=False, timeout=limit)
    # What torchrun sets.
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(world_size)}
    if backend == "nccl":
        torch.cuda.set_device(rank)
    for number, (name, case) in enumerate(cases.items()):
        torch.manual_seed(seed + number)
        result, error = None, None
        own = dist.PrefixStore(name, store)
        try:
            dist.init_process_group(backend, None, limit, world_size, rank, own)
            result = case()
        except BaseException:
            error = traceback.format_exc()
        pipe.send((name, result, error))
        # Nobody leaves a group that another still uses.
        own.add("done", 1)
        end = time.monotonic() + case_seconds
        while own.add("done", 0) < world_size and time.monotonic() < end:
            time.sleep(0.002)
        if dist.is_initialized():
            dist.destroy_process_group()
