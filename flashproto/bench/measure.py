"""One cell of a benchmark: make every contender ready, check its results, then time them in turn.

A contender that raises, or whose output or gradients are wrong, is reported with its error and
without a time.
"""

from __future__ import annotations

import gc
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from .timing import Timer, interleaved

TOLERANCE = {torch.bfloat16: 0.05, torch.float16: 0.01, torch.float32: 1e-3}


@dataclass(frozen=True)
class Prepared:
    """A contender made ready on one cell.

    call: one forward pass, returning the output.
    inputs: the leaves whose gradients the backward pass gives.
    grad: the output's gradient.
    check: what is wrong with the output and the gradients (None: forward only); None if nothing.
    """

    call: Callable[[], Tensor]
    inputs: Sequence[Tensor]
    grad: Tensor
    check: Callable[[Tensor, Sequence[Tensor] | None], str | None]


@dataclass(frozen=True)
class Work:
    """What a call counts as: forward / ms and backward / ms give `unit`; None reports plain ms."""

    unit: str
    forward: float | None
    backward: float | None
    step: bool = False  # the second pass is forward and backward together


def row_error(got: Tensor, want: Tensor) -> float:
    """The largest relative error of a row: |got - want| / (|want| + a tenth of the mean |want|)."""
    got, want = (t.detach().to(torch.float32).reshape(-1, t.shape[-1]) for t in (got, want))
    size = want.norm(dim=1)
    error = (got - want).norm(dim=1) / (size + 0.1 * size.mean()).clamp(min=1e-30)
    return float(error.nan_to_num(nan=torch.inf).max())


def compare(got: Mapping[str, Tensor], want: Mapping[str, Tensor]) -> str | None:
    """The first of `got` that is further from `want` than its dtype allows, None if none is."""
    for name, value in got.items():
        error, allowed = row_error(value, want[name]), TOLERANCE[value.dtype]
        if error > allowed:
            return f"wrong result: {name} is off by {error:.2g} of a row's norm, allowed {allowed}"
    return None


def one_line(error: Exception) -> str:
    text = str(error).strip().splitlines()
    return f"{type(error).__name__}: {text[0][:200] if text else ''}"


def measure_cell(
    contenders: Mapping[str, Callable[[], Prepared]], work: Work, timer: Timer, repeats: int
) -> dict[str, dict[str, Any]]:
    """{pass: {contender: {"ms", "value", "low", "high"} or {"error"}}} of one cell."""
    second = "forward+backward" if work.step else "backward"
    results: dict[str, dict[str, Any]] = {"forward": {}, second: {}}
    calls: dict[str, dict[str, Callable[[], Any]]] = {"forward": {}, second: {}}
    for name, make in contenders.items():
        try:
            prepared = make()
            out = prepared.call()
            complaint = prepared.check(out, None)
        except Exception as error:
            complaint = one_line(error)
        if complaint:
            results["forward"][name] = results[second][name] = {"error": complaint}
            continue
        calls["forward"][name] = prepared.call
        try:
            backward = backward_call(prepared, out, work.step)
            complaint = prepared.check(out, backward())
        except Exception as error:
            complaint = one_line(error)
        if complaint:
            results[second][name] = {"error": complaint}
        else:
            calls[second][name] = backward
            memory = peak_memory(prepared)
            if memory is not None:
                results[second][name] = {"peak_gib": memory}
    for which, amount in (("forward", work.forward), (second, work.backward)):
        for name, times in interleaved(calls[which], timer, repeats).items():
            results[which].setdefault(name, {}).update(summary(times, amount))
    del calls
    gc.collect()
    return results


def backward_call(prepared: Prepared, out: Tensor, step: bool) -> Callable[[], Sequence[Tensor]]:
    """The backward pass alone, on a graph kept for it; with `step`, after a new forward pass."""
    if step:
        return lambda: torch.autograd.grad(prepared.call(), prepared.inputs, prepared.grad)
    return lambda: torch.autograd.grad(out, prepared.inputs, prepared.grad, retain_graph=True)


def peak_memory(prepared: Prepared) -> float | None:
    """GiB that a forward and backward pass take beyond what is allocated before; None off a GPU."""
    if prepared.grad.device.type != "cuda":
        return None
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    torch.autograd.grad(prepared.call(), prepared.inputs, prepared.grad)
    return (torch.cuda.max_memory_allocated() - before) / 2**30


def summary(times: list[float], amount: float | None) -> dict[str, Any]:
    """The median and the extremes of a call's times; value is in the unit of Work."""
    ms = statistics.median(times)
    value = ms if amount is None else amount / ms
    return {"ms": ms, "low_ms": min(times), "high_ms": max(times), "value": value}
