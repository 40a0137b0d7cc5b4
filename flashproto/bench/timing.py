"""Timers: what one call takes, and several calls' times taken in turn."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

Timer = Callable[[Callable[[], Any]], float]


def make_timer(device: torch.device, milliseconds: float = 100.0) -> Timer:
    """A function that returns the median milliseconds of a call: of the device on a GPU, elsewhere of
    the wall clock.  `milliseconds` is about how long it measures."""
    if device.type == "cuda":
        return lambda fn: device_clock(fn, milliseconds)
    return lambda fn: wall_clock(fn, milliseconds)


def device_clock(fn: Callable[[], Any], milliseconds: float = 100.0) -> float:
    """Median device milliseconds of a call, measured as triton.testing.do_bench does: an event on each
    side of it, the L2 cache flushed before.

    One call warms up and says how many to measure; where it alone takes `milliseconds`, it counts.
    """
    from triton.runtime import driver

    flush = driver.active.get_empty_cache_for_benchmark()

    def times(calls: int) -> list[float]:
        events = [[torch.cuda.Event(enable_timing=True) for _ in range(2)] for _ in range(calls)]
        for start, end in events:
            driver.active.clear_cache(flush)
            start.record()
            fn()
            end.record()
        torch.cuda.synchronize()
        return [start.elapsed_time(end) for start, end in events]

    (first,) = times(1)
    if first >= milliseconds:
        return first
    return statistics.median(times(max(3, round(milliseconds / first))))


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
    functions: Mapping[str, Callable[[], Any]],
    timer: Timer,
    repeats: int,
    drop: Callable[[Mapping[str, float]], Sequence[str]] | None = None,
) -> dict[str, list[float]]:
    """`repeats` times of each function, every round in turn: drifting clocks hit all alike.

    drop: given the first round's times, the names that take part in no further one.
    """
    times: dict[str, list[float]] = {name: [] for name in functions}
    left = dict(functions)
    for round_ in range(repeats):
        for name, fn in left.items():
            times[name].append(timer(fn))
        if round_ == 0 and drop is not None:
            dropped = drop({name: first for name, (first,) in times.items()})
            left = {name: fn for name, fn in left.items() if name not in dropped}
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
