"""Looking at a training step: numbers that are not finite, attention's largest scores, a trace."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from parallel import whole

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
    """The largest score of each layer's attention in the forward passes `with` it, see nn.Attention."""

    def __init__(self, model: torch.nn.Module) -> None:
        self.layers = [m for m in model.modules() if isinstance(m, nn.Attention)]
        self.found: list[torch.Tensor] = []

    def __enter__(self) -> None:
        for layer in self.layers:
            layer.record_max_score = True

    def __exit__(self, failure: object, *_: object) -> None:
        for layer in self.layers:
            layer.record_max_score = False
        if failure is None:
            scores = [x.max_score.amax() for x in self.layers if x.max_score is not None]
            self.found.append(torch.stack(scores))

    def take(self) -> list[float]:
        """[layers], since it was last asked."""
        found, self.found = torch.stack(self.found), []
        return found.amax(0).tolist()


def profiler(path: Path) -> Any:
    """A torch.profiler whose step() ends a training step: it writes a trace of TRACED_STEPS of them to
    `path`, behind WARM_UP_STEPS that are not in it.  chrome://tracing and ui.perfetto.dev show it."""
    return torch.profiler.profile(
        schedule=torch.profiler.schedule(wait=0, warmup=WARM_UP_STEPS, active=TRACED_STEPS, repeat=1),
        on_trace_ready=lambda found: found.export_chrome_trace(str(path)),
    )
