"""Looking at a training step: numbers that are not finite, attention's largest scores, a trace."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from parallel import World, whole

from flashproto import nn

TRACE = "trace.json"
WARM_UP_STEPS, TRACED_STEPS = 2, 3


def not_finite(model: torch.nn.Module) -> str | None:
    """The parameter whose gradient has NaN or infinite numbers, in words; None where there is none.

    Of several it is the last one of the model, where the backward pass comes first: what is before it
    in the model has such numbers from there.
    """
    gradients = [(name, whole(p.grad)) for name, p in model.named_parameters() if p.grad is not None]
    bad = [(name, grad) for name, grad in gradients if not grad.isfinite().all()]
    if not bad:
        return None
    name, grad = bad[-1]
    nan, infinite = int(grad.isnan().sum()), int(grad.isinf().sum())
    others = f", and {len(bad) - 1} parameters before it have some" if len(bad) > 1 else ""
    return f"the gradient of {name} has {nan} NaN and {infinite} infinite of {grad.numel()}{others}"


class MaxScores:
    """The largest score of each layer's attention since they were last taken; see nn.Attention."""

    def __init__(self, model: torch.nn.Module) -> None:
        self.layers = [m for m in model.modules() if isinstance(m, nn.Attention)]
        for layer in self.layers:
            layer.record_max_score = True
        self.largest: torch.Tensor | None = None

    def add(self) -> None:
        """Those of the forward pass that has just been."""
        found = torch.stack([x.max_score.amax() for x in self.layers if x.max_score is not None])
        self.largest = found if self.largest is None else torch.maximum(self.largest, found)

    def take(self, world: World) -> list[float]:
        found, self.largest = self.largest, None
        each = world.gathered([] if found is None else found.tolist())
        return [max(layer) for layer in zip(*each, strict=True)]


def profiler(path: Path) -> Any:
    """A torch.profiler whose step() ends a training step: it writes a trace of TRACED_STEPS of them to
    `path`, behind WARM_UP_STEPS that are not in it.  chrome://tracing and ui.perfetto.dev show it."""
    return torch.profiler.profile(
        schedule=torch.profiler.schedule(wait=0, warmup=WARM_UP_STEPS, active=TRACED_STEPS, repeat=1),
        on_trace_ready=lambda found: found.export_chrome_trace(str(path)),
    )
