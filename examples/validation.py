"""The loss on the part of the text that is not trained on."""

from __future__ import annotations

import torch
from bars import bar
from settings import Settings
from stop import StopSignal
from text_data import Corpus

SMALLEST_BATCH = 4096  # tokens


@torch.inference_mode()
def validate(
    model: torch.nn.Module, corpus: Corpus, settings: Settings, stop: StopSignal | None = None
) -> dict[str, float] | None:
    """{"validation": nats per token, "bits_per_byte"} on the targets of the validation part (see
    text_data.Windows); None where `stop` came on the way."""
    windows, device = corpus.windows, settings.device
    batch = max(settings.batch_size, SMALLEST_BATCH // windows.length)
    places = torch.arange(windows.length + 1)
    total = 0.0
    with bar(0.5, total=len(windows), desc="validating", unit="window", leave=False) as shown:
        for starts, skipped in zip(
            windows.starts.split(batch), windows.skipped.split(batch), strict=True
        ):
            if stop:
                return None
            ids = corpus.validation[starts[:, None] + places]
            x, y = ids[:, :-1].to(device), ids[:, 1:]
            y = y.masked_fill(places[:-1] < skipped[:, None], -100)
            with settings.autocast():
                _, loss = model(x, y.to(device), return_logits=False)
            total += loss.item() * int((y != -100).sum())
            shown.update(len(starts))
    nats, bits = corpus.validation_loss(total / len(corpus.targets))
    return {"validation": nats, "bits_per_byte": bits}
