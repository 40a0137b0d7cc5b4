"""The learning rate: a function of the step alone, so that a resumed run agrees with one that never
stopped."""

from __future__ import annotations

import math

from settings import Settings

FINAL = 0.05  # the last learning rate, as a share of the peak


def learning_rate(step: int, settings: Settings) -> float:
    """Of step 0, 1, ...: a linear warm-up over --warmup of the steps, then --schedule down to FINAL.

    "cosine" is half a cosine.  "wsd" (warm-up, stable, decay) stays at the peak until the last --decay
    of the steps and falls there by 1 - sqrt.
    Source: Loshchilov and Hutter, "SGDR" (2017); Hägele et al., "Scaling Laws and Compute-Optimal
    Training Beyond Fixed Training Durations" (2024).
    """
    s = settings
    warmup = max(1, round(s.warmup * s.steps))
    if step < warmup:
        return s.learning_rate * (step + 1) / warmup
    if s.schedule == "cosine":
        progress = (step - warmup) / max(1, s.steps - warmup)
        share = 0.5 * (1 + math.cos(math.pi * progress))
    else:
        decay = max(1, round(s.decay * s.steps))
        share = 1 - math.sqrt(max(0, step - (s.steps - decay)) / decay)
    return s.learning_rate * (FINAL + (1 - FINAL) * share)
