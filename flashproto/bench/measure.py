"""One cell of a benchmark: make every contender ready, check its results, then time them in turn.

A contender that raises, or whose output or gradients are wrong, is reported with its error and
without a time.  One that is far behind in the first repeat may be left out of the others.
"""

from __future__ import annotations

import gc
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from .timing import Timer, interleaved

OURS = "flashproto"  # how our contenders' names start
PLAIN = "(plain"  # and those of ours on a plainer problem, there to compare with
DETERMINISTIC = "-deterministic"  # ends the name of a contender that is
VARLEN = " varlen"  # ends the name of ours where it is attention_varlen beside attention
TOLERANCE = {torch.bfloat16: 0.05, torch.float16: 0.01, torch.float32: 1e-3}


@dataclass(frozen=True)
class Prepared:
    """A contender made ready on one cell.

    call: one forward pass, returning the output, or several.
    inputs: the leaves whose gradients the backward pass gives.
    grad: the output's gradient, or several.
    check: what is wrong with the output and the gradients (None: forward only); None if nothing.
    deterministic: whether the backward pass, the only one timed then, runs under
        torch.use_deterministic_algorithms(True).
    share: its work over the cell's, where it does another.
    forward_only: whether it has no backward pass.
    """

    call: Callable[[], Any]
    inputs: Sequence[Tensor]
    grad: Any
    check: Callable[[Any, Sequence[Tensor] | None], str | None]
    deterministic: bool = False
    share: float = 1.0
    forward_only: bool = False


@dataclass(frozen=True)
class Work:
    """What a call counts as: forward / ms and backward / ms give `unit`; None reports plain ms."""

    unit: str
    forward: float | None
    backward: float | None
    step: bool = False  # the second pass is forward and backward together
    no_grad: bool = False  # the first pass is under torch.no_grad(); only with `step`
    forward_only: bool = False
    copied: int | None = None  # bytes of a tensor whose copy is the ceiling of the cell
    flops: float | None = None  # of a step, by the convention of MFU


def is_peer(name: str) -> bool:
    return not name.startswith((OURS, PLAIN))


def compare(
    got: Mapping[str, Tensor], want: Mapping[str, Tensor], rounding: Mapping[str, Tensor] | None = None
) -> str | None:
    """The first of `got` that has a row further from `want` than its dtype allows, None if none has.

    A row may be off by TOLERANCE of its norm and a tenth of the rows' mean norm or, where that is more,
    by its entry of `rounding`: how far a right computation in the dtype rounds that row.
    """
    for name, value in got.items():
        value, exact = (t.detach().float().reshape(-1, t.shape[-1]) for t in (value, want[name]))
        tolerance = TOLERANCE[got[name].dtype]
        size = exact.norm(dim=1)
        unit = (size + 0.1 * size.mean()).clamp(min=1e-30)
        error = (value - exact).norm(dim=1) / unit
        allowed = torch.full_like(unit, tolerance)
        if rounding is not None and name in rounding:
            allowed = torch.maximum(allowed, rounding[name].reshape(-1) / unit)
        excess = (error / allowed).nan_to_num(nan=torch.inf)
        row = int(excess.argmax())
        if excess[row] > 1:
            return (
                f"wrong result: {name} is off by {float(error[row]):.2g} of a row's norm, "
                f"allowed {float(allowed[row]):.2g} (row {row})"
            )
    return None


def one_line(error: Exception) -> str:
    text = str(error).strip().splitlines()
    return f"{type(error).__name__}: {text[0][:200] if text else ''}"


def measure_cell(
    contenders: Mapping[str, Callable[[], Prepared]],
    work: Work,
    timer: Timer,
    repeats: int,
    drop_slower: float | None = None,
) -> dict[str, dict[str, Any]]:
    """{pass: {contender: {"ms", "value", "low_ms", "high_ms"} or {"error"}}} of one cell.

    drop_slower: a contender that takes more than so many times the fastest one's time in the first
    repeat takes part in no other and says "dropped"; ours are compared with ours, peers with peers.
    """
    second = "forward+backward" if work.step else "backward"
    amounts = {"forward": work.forward} | ({} if work.forward_only else {second: work.backward})
    results: dict[str, dict[str, Any]] = {which: {} for which in amounts}
    calls: dict[str, dict[str, Callable[[], Any]]] = {which: {} for which in amounts}
    shares: dict[str, float] = {}
    for name, make in contenders.items():
        try:
            prepared = make()
            shares[name] = prepared.share
            forward = forward_call(prepared, work)
            out = forward()
            complaint = prepared.check(out, None)
        except Exception as error:
            complaint = one_line(error)
        if complaint:
            for by_name in results.values():
                by_name[name] = {"error": complaint}
            continue
        if not prepared.deterministic:  # which changes the backward pass alone
            calls["forward"][name] = forward
        if work.forward_only or prepared.forward_only:
            continue
        try:
            backward = backward_call(prepared, out, work.step)
            complaint = prepared.check(out, backward())
        except Exception as error:
            complaint = one_line(error)
        if complaint:
            results[second][name] = {"error": complaint}
        else:
            calls[second][name] = backward
            results[second][name] = memory(prepared)
    drop = partial(far_behind, factor=drop_slower) if drop_slower is not None else None
    for which, amount in amounts.items():
        for name, times in interleaved(calls[which], timer, repeats, drop).items():
            result = results[which].setdefault(name, {})
            result |= summary(times, None if amount is None else amount * shares[name])
            if len(times) < repeats:
                result["dropped"] = True
    del calls
    gc.collect()
    return results


def far_behind(times: Mapping[str, float], factor: float) -> list[str]:
    """The names whose time is more than `factor` times the least of their kind: ours, ours on a plainer
    problem, peers, or what is deterministic or varlen: one repeat does not say what that costs."""
    kinds: dict[tuple[bool, ...], dict[str, float]] = {}
    for name, ms in times.items():
        kind = name.startswith(OURS), name.startswith(PLAIN), name.endswith((DETERMINISTIC, VARLEN))
        kinds.setdefault(kind, {})[name] = ms
    return [
        name for kind in kinds.values() for name, ms in kind.items() if ms > factor * min(kind.values())
    ]


def forward_call(prepared: Prepared, work: Work) -> Callable[[], Any]:
    """The forward pass as it is timed."""
    return torch.no_grad()(prepared.call) if work.no_grad else prepared.call


def backward_call(prepared: Prepared, out: Any, step: bool) -> Callable[[], Sequence[Tensor]]:
    """The backward pass alone, on a graph kept for it; with `step`, after a new forward pass."""

    def alone() -> Sequence[Tensor]:
        return torch.autograd.grad(out, prepared.inputs, prepared.grad, retain_graph=True)

    def after_forward() -> Sequence[Tensor]:
        return torch.autograd.grad(prepared.call(), prepared.inputs, prepared.grad)

    call = after_forward if step else alone
    return deterministically(call) if prepared.deterministic else call


def deterministically(call: Callable[[], Any]) -> Callable[[], Any]:
    """The call under torch.use_deterministic_algorithms(True), without the filling of new memory that
    comes with it."""

    def run() -> Any:
        torch.use_deterministic_algorithms(True)
        try:
            return call()
        finally:
            torch.use_deterministic_algorithms(False)

    torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]
    return run


def memory(prepared: Prepared) -> dict[str, float]:
    """GiB beyond what is allocated before: "kept_gib" after a forward pass (its output, and what
    backward needs) and "peak_gib" of a forward and backward pass; nothing off a GPU."""
    if prepared.inputs[0].device.type != "cuda":
        return {}
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    out = prepared.call()
    kept = torch.cuda.memory_allocated() - before
    torch.autograd.grad(out, prepared.inputs, prepared.grad)
    peak = torch.cuda.max_memory_allocated() - before
    return {"kept_gib": kept / 2**30, "peak_gib": peak / 2**30}


def summary(times: list[float], amount: float | None) -> dict[str, Any]:
    """The median and the extremes of a call's times; value is in the unit of Work."""
    ms = statistics.median(times)
    value = ms if amount is None else amount / ms
    return {"ms": ms, "low_ms": min(times), "high_ms": max(times), "value": value}
