"""The loss on the part of the text that is not trained on."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch
from bars import bar
from parallel import ALONE, World
from settings import Settings
from stop import StopSignal
from text_data import Corpus

SMALLEST_BATCH = 4096  # tokens


@contextlib.contextmanager
def evaluated(model: torch.nn.Module) -> Iterator[None]:
    """The model drops nothing meanwhile."""
    training = model.training
    model.eval()
    try:
        yield
    finally:
        model.train(training)


@torch.no_grad()
def validate(
    model: torch.nn.Module,
    corpus: Corpus,
    settings: Settings,
    stop: StopSignal | None = None,
    world: World = ALONE,
) -> dict[str, float] | None:
    """{"validation": nats per token, "bits_per_byte"} on the targets of the validation part (see
    text_data.Windows); None where `stop` came on the way.

    The processes of `world` share the windows, and the tokens of each as in training.  All call the
    model as often: for a sharded one that is something they do together.
    """
    windows, device = corpus.windows, settings.device
    batch = max(settings.batch_size, SMALLEST_BATCH // windows.length)
    places = torch.arange(windows.length + 1)
    total = 0.0
    parts = list(zip(windows.starts.split(batch), windows.skipped.split(batch), strict=True))
    with bar(0.5, total=len(windows), desc="validating", unit="window", leave=False) as shown:
        for first in range(0, len(parts), world.data_size):
            if world.any(stop):
                return None
            mine = first + world.data_rank
            starts, skipped = parts[mine if mine < len(parts) else 0]
            ids = corpus.validation[starts[:, None] + places]
            x, y = ids[:, :-1].to(device), ids[:, 1:]
            y = y.masked_fill(places[:-1] < skipped[:, None], -100)
            own = corpus.documents(x, world)
            x, y = world.tokens(x, 0), world.tokens(y, -100)
            with settings.autocast(), settings.eager(), evaluated(model):
                y = y.to(device)
                _, loss = model(x, y, return_logits=False, group=world.group, documents=own)
            count = int((y != -100).sum())
            if mine < len(parts) and count:  # the mean of none is NaN
                total += loss.item() * count
            shown.update(sum(len(starts) for starts, _ in parts[first : first + world.data_size]))
    total = world.sum(torch.tensor(total, dtype=torch.float64)).item()
    nats, bits = corpus.validation_loss(total / len(corpus.targets))
    return {"validation": nats, "bits_per_byte": bits}
