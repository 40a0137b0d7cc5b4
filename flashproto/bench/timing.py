"""Timers: what one call takes, and several calls' times taken in turn."""

from __future__ import annotations

import math
import random
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import torch

Timer = Callable[[Callable[[], Any]], float]


def make_timer(
    device: torch.device, milliseconds: float = 100.0, on_device: bool | None = None
) -> Timer:
    """A function that returns the median milliseconds of a call: of the device, by default on a GPU, or
    of the wall clock until the device is done.  `milliseconds` is about how long it measures."""
    if device.type != "cuda":
        return lambda fn: wall_clock(fn, milliseconds)
    if on_device is None or on_device:
        return lambda fn: device_clock(fn, milliseconds)

    def done(fn: Callable[[], Any]) -> None:
        fn()
        torch.cuda.synchronize(device)

    return lambda fn: wall_clock(partial(done, fn), milliseconds)


def device_clock(fn: Callable[[], Any], milliseconds: float = 100.0) -> float:
    """Median device milliseconds of a call, measured nearly as triton.testing.do_bench does: an event
    on each side of it, the L2 cache flushed before.

    Unlike there, the flush is repeated for twice as long as the host takes to launch the call: the
    device then finds all launches waiting for it.  Else it would wait for the host between the events,
    as autograd takes the host longer than one flush takes the device.

    One call warms up and says how many to measure.  Where it alone takes `milliseconds`, one is enough,
    but not that one: a card at the limit of its power goes by the power of the last tenths of a second,
    so that a long call would be timed by what ran before it.
    """
    from triton.runtime import driver

    cache = driver.active.get_empty_cache_for_benchmark()

    def launch(flushes: int) -> tuple[list[torch.cuda.Event], float]:
        """A call's events, before the flushes and on each side of it, and the host's milliseconds."""
        before, start, end = (torch.cuda.Event(enable_timing=True) for _ in range(3))
        before.record()
        for _ in range(flushes):
            driver.active.clear_cache(cache)
        start.record()
        began = time.perf_counter()
        fn()
        end.record()
        return [before, start, end], (time.perf_counter() - began) * 1e3

    (before, start, end), host = launch(4)
    torch.cuda.synchronize()
    first, flush = start.elapsed_time(end), before.elapsed_time(start) / 4
    flushes = math.ceil(max(flush, min(2 * host, milliseconds)) / flush)
    calls = 1 if first >= milliseconds else max(3, round(milliseconds / first))
    launched = [launch(flushes)[0] for _ in range(calls)]
    torch.cuda.synchronize()
    return statistics.median(start.elapsed_time(end) for _, start, end in launched)


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
    """`repeats` times of each function, every round in turn: drifting clocks hit all alike.  Each round
    but the first has a random order, the same in every run, lest one function always follow the same
    other one, and find the card as warm and as short of power as that one leaves it.

    drop: given the first round's times, the names that take part in no further one.
    """
    times: dict[str, list[float]] = {name: [] for name in functions}
    left = dict(functions)
    for round_ in range(repeats):
        order = list(left) if round_ == 0 else random.Random(round_).sample(list(left), len(left))
        for name in order:
            times[name].append(timer(left[name]))
        if round_ == 0 and drop is not None:
            dropped = drop({name: first for name, (first,) in times.items()})
            left = {name: fn for name, fn in left.items() if name not in dropped}
    return times


def host_microseconds(
    functions: Mapping[str, Callable[[], Any]], rounds: int = 31, calls: int = 100
) -> dict[str, tuple[float, float]]:
    """Wall-clock microseconds of a call of each on the host, the device's work overlapping: (median,
    lowest) of so many rounds, in which the functions take turns, so that a slow phase of a shared host
    hits all alike."""
    times: dict[str, list[float]] = {name: [] for name in functions}
    for _ in range(rounds + 1):
        for name, fn in functions.items():
            times[name].append(host_round(fn, calls))
    return {name: (statistics.median(us[1:]), min(us[1:])) for name, us in times.items()}


def host_round(fn: Callable[[], Any], calls: int) -> float:
    """Wall-clock microseconds of a call on the host, of so many in a row on an idle device."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    start = time.perf_counter()
    for _ in range(calls):
        fn()
    return (time.perf_counter() - start) / calls * 1e6
