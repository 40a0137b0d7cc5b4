"""Timers: what one call takes, and several calls' times taken in turn."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping
from typing import Any

import torch

Timer = Callable[[Callable[[], Any]], float]


def make_timer(device: torch.device, milliseconds: float = 100.0) -> Timer:
    """A function that returns the median milliseconds of a call.

    On a GPU this is triton.testing.do_bench, which flushes the L2 cache before each call and counts
    device time; elsewhere the wall clock.  `milliseconds` is about how long it measures.
    """
    if device.type == "cuda":
        from triton.testing import do_bench

        return lambda fn: do_bench(fn, warmup=25, rep=milliseconds, return_mode="median")
    return lambda fn: wall_clock(fn, milliseconds)


def wall_clock(fn: Callable[[], Any], milliseconds: float = 100.0, least: int = 3) -> float:
    """Median wall-clock milliseconds of a call, after one call to warm up."""
    fn()
    times: list[float] = []
    while len(times) < least or sum(times) < milliseconds:
        start = time.perf_counter()
        fn()
        times.append((time.perf_counter() - start) * 1e3)
    return statistics.median(times)


def interleaved(
    functions: Mapping[str, Callable[[], Any]], timer: Timer, repeats: int
) -> dict[str, list[float]]:
    """`repeats` times of each function, every round in turn: drifting clocks hit all alike."""
    times: dict[str, list[float]] = {name: [] for name in functions}
    for _ in range(repeats):
        for name, fn in functions.items():
            times[name].append(timer(fn))
    return times


def host_microseconds(fn: Callable[[], Any], calls: int = 300) -> float:
    """Wall-clock microseconds of a call on the host, the device's work overlapping."""
    rounds = []
    for _ in range(6):
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        start = time.perf_counter()
        for _ in range(calls):
            fn()
        rounds.append((time.perf_counter() - start) / calls * 1e6)
    return statistics.median(rounds[1:])
