"""What a run computes on, and what is said of it before it begins."""

from __future__ import annotations

import contextlib
import logging
import time

import torch
from parallel import World
from settings import Settings
from text_data import Corpus
from torch import Tensor
from watch import MaxScores

from flashproto import env
from flashproto.nn import GPT

LONG_STEP = 60  # seconds of which a run warns


def device_name(device: str) -> str:
    if device == "cuda":
        return torch.cuda.get_device_name()
    return f"{torch.get_num_threads()} threads"


def processes(settings: Settings, world: World) -> str:
    shared = f", {world.context} to a sequence" * (world.context > 1)
    return f"{world.size} processes ({settings.parallel}{shared})"


def machine(settings: Settings, world: World) -> str:
    """What the last bits of the losses depend on."""
    many = "" if world.size == 1 else f"{processes(settings, world)}, each "
    return f"{many}{settings.device} ({device_name(settings.device)}), torch {torch.__version__}"


def peak_flops(settings: Settings) -> float | None:
    """Of the device with the run's dtype; None where that is not known."""
    if settings.dtype != "bfloat16":
        return None
    return env.peak_flops(device_name(settings.device))


def compiles(settings: Settings) -> bool:
    """Whether a first step compiles: kernels of a GPU, or what torch.compile makes."""
    return settings.compile or settings.device != "cpu"


def warn_of_long_steps(flops: float, settings: Settings) -> None:
    """Say so where a step of so many floating-point operations will take LONG_STEP seconds or more, at
    the speed at which a CPU multiplies matrices."""
    if settings.device != "cpu" or settings.compile:
        return
    x, times = torch.ones(512, 512), []
    for _ in range(4):
        began = time.perf_counter()
        x @ x
        times.append(time.perf_counter() - began)
    seconds = flops * min(times) / (2 * 512**3)
    if seconds >= LONG_STEP:
        print(
            f"note: a step will take {seconds / 60:.0f} minutes or more on this CPU; "
            "a smaller --preset, --batch-size or --context makes it shorter"
        )


def backends_in_use(model: GPT, corpus: Corpus, settings: Settings, world: World) -> str:
    """Run the model once on a token and listen to what flashproto logs about its choices."""
    chosen: dict[str, str] = {}

    class Listener(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            if isinstance(record.args, tuple):
                operator, backend = map(str, record.args[:2])
                chosen[operator] = backend

    log, listener = logging.getLogger("flashproto"), Listener()
    level = log.level
    log.addHandler(listener)
    log.setLevel(logging.INFO)
    try:
        watched = MaxScores(model) if settings.log_max_score else contextlib.nullcontext()
        with torch.no_grad(), settings.autocast(), watched:
            token = corpus.train[:1][None].to(settings.device)
            ids = corpus.documents(token, world)
            model(world.tokens(token, 0), group=world.group, documents=ids)
    finally:
        log.removeHandler(listener)
        log.setLevel(level)
    return ", ".join(f"{operator} {backend}" for operator, backend in chosen.items())


def describe(
    model: GPT, corpus: Corpus, settings: Settings, bigram: tuple[float, float], world: World
) -> None:
    """Print what is trained, on what, and what to compare its loss with."""
    unit, config = corpus.unit, model.config
    options = {
        "window": f"window {config.window} ({config.window_pattern or 'S'})",
        "softcap": f"softcap {config.softcap}",
        "sinks": "sinks",
        "dropout": f"dropout {config.dropout}",
    }
    total, last = len(corpus.train) + len(corpus.validation), len(corpus.validation)
    predicted = len(corpus.targets)
    counted = "the training part"
    if corpus.counted < len(corpus.train):
        counted = f"its first {corpus.counted} {unit}s"
    ids = corpus.train  # those in files have no unknown ones
    unknown = corpus.vocabulary.unseen(ids) if isinstance(ids, Tensor) else 0
    lines = {
        "text": f"{corpus.name}: {total} {unit}s, SHA-256 {corpus.sha256}"
        + f"; {unknown} of the training part are not in the vocabulary" * (unknown > 0),
        "validation": f"{predicted} of {last} {unit}s: {corpus.unseen} unseen in training; "
        f"{corpus.share_seen():.0%} of passages of 64 are in {counted} too",
        "bigram": f"{bigram[0]:.4f} nats per {unit}, {bigram[1]:.4f} bits per byte"
        + f", from {counted}" * (corpus.counted < len(corpus.train)),
        "device": f"{settings.device} ({device_name(settings.device)}), {settings.dtype}"
        + ", compiled" * settings.compile
        + f", {processes(settings, world)}" * (world.size > 1),
        "backends": backends_in_use(model, corpus, settings, world),
        "model": f"{settings.preset}: {model.parameter_count():,} parameters, {config.n_layers} "
        f"layers, d_model {config.d_model}, context {config.context}, {config.vocab_size} ids"
        + "".join(f", {words}" for name, words in options.items() if getattr(config, name)),
    }
    if settings.documents and corpus.separator is None:
        lines["documents"] = "one: --data is one text; prepare_data.py makes tokens of several"
    elif settings.documents:
        lines["documents"] = "attention stays within each, and positions begin anew"
    for name, line in lines.items():
        print(f"{name:<12}{line}")
