"""Train a small GPT on a text, on the CPU or the GPU at hand.

    python examples/train_gpt.py                        Python's language reference, a few minutes
    python examples/train_gpt.py --data book.txt        any UTF-8 text
    python examples/train_gpt.py --resume               go on with the newest run under runs/
    python examples/train_gpt.py --resume --steps 3000  and further than it was to go
    python examples/train_gpt.py --init-from runs/gpt-1 --data book.txt    begin with its weights
    python examples/generate.py --prompt "The "         sample from it

A run is a folder (runs/gpt-N, or --out): settings.json, checkpoint.safetensors, log.jsonl with the
loss of every step, and loss.png.  A run that was stopped, by Ctrl-C or by kill -9, goes on with
--resume to the same losses, bit for bit: on the CPU always, on a GPU with --deterministic.

Exit codes: 0 finished (or --minutes are over), 1 training failed or a file could not be written, 2 bad
input, 130 and 143 stopped by Ctrl-C (SIGINT) or SIGTERM after saving.
"""

from __future__ import annotations

if __name__ == "__main__":
    import start

import dataclasses
import itertools
import math
import os
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import checkpoint
import run_folder
import torch
from errors import EXPECTED, CheckpointError, TrainingError, tell
from machine import describe, machine, peak_flops
from run_folder import Log
from sampling import show, stream
from settings import Settings, option, parse
from stop import StopSignal
from text_data import Corpus
from torch import Tensor
from tqdm import tqdm
from validation import validate
from vocabulary import Vocabulary, code_points

from flashproto.nn import GPT, GPTConfig

BETAS, WEIGHT_DECAY, MAX_GRADIENT_NORM = (0.9, 0.95), 0.1, 1.0
WARMUP_SHARE, FINAL_LEARNING_RATE = 0.1, 0.05  # of the steps; of the peak
SMOOTHED = 50  # steps whose mean loss the bar shows


# --- the parts of a step ------------------------------------------------------------------------


def learning_rate(step: int, settings: Settings) -> float:
    """Linear warm-up, then half a cosine: of the step alone, so that a resumed run agrees."""
    warmup = max(1, round(WARMUP_SHARE * settings.steps))
    if step < warmup:
        return settings.learning_rate * (step + 1) / warmup
    progress = (step - warmup) / max(1, settings.steps - warmup)
    cosine = 0.5 * (1 + math.cos(math.pi * progress))
    return settings.learning_rate * (FINAL_LEARNING_RATE + (1 - FINAL_LEARNING_RATE) * cosine)


def draw_batch(ids: Tensor, settings: Settings, generator: torch.Generator) -> Tensor:
    """[B, context + 1] ids from random places: the inputs, and one more for the last target."""
    B, T = settings.batch_size, settings.context
    starts = torch.randint(len(ids) - T, (B, 1), generator=generator)
    return ids[starts + torch.arange(T + 1)]


def make_optimizer(model: GPT) -> torch.optim.Optimizer:
    """AdamW, decaying the matrices but not norms and biases."""
    matrices = [p for p in model.parameters() if p.ndim >= 2]
    vectors = [p for p in model.parameters() if p.ndim < 2]
    groups = [
        {"params": matrices, "weight_decay": WEIGHT_DECAY},
        {"params": vectors, "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(groups, betas=BETAS, fused=True)


# --- the run ------------------------------------------------------------------------------------


@dataclass
class Run:
    """Everything that changes while training."""

    folder: Path
    settings: Settings
    corpus: Corpus
    model: GPT
    optimizer: torch.optim.Optimizer
    generator: torch.Generator
    step: int = 0
    speed: float | None = None  # tokens/s of the median step

    def save(self) -> None:
        facts = {
            "step": self.step,
            "settings": dataclasses.asdict(self.settings),
            "config": dataclasses.asdict(self.model.config),
            "vocabulary": dataclasses.asdict(self.corpus.vocabulary),
            "data": {"name": self.corpus.name, "sha256": self.corpus.sha256},
            "machine": machine(self.settings),
        }
        tensors = checkpoint.training_tensors(self.model, self.optimizer, [self.generator])
        checkpoint.save(self.folder / checkpoint.NAME, tensors, facts)

    def validates(self) -> bool:
        """Whether this step ends with a validation."""
        return self.step == self.settings.steps or self.step % self.settings.validate_every == 0

    def sample(self, length: int, stop: StopSignal) -> None:
        """Print what the model writes, until it is asked to stop."""
        s, vocabulary = self.settings, self.corpus.vocabulary
        ids = vocabulary.encode(code_points(vocabulary.opening().encode(), s.level)).to(s.device)
        generator = torch.Generator(s.device).manual_seed(s.seed)
        with s.autocast():
            drawn = stream(self.model, ids, length, 0.8, None, generator)
            show(vocabulary.pieces(itertools.takewhile(lambda _: not stop, drawn)))


def prepare(given: dict) -> Run:
    """Read the checkpoint to go on with or to begin with, and the text, and build the model; writes
    nothing."""
    resume, out = given.pop("resume", None), given.pop("out", None)
    folder = run_folder.find(out, resume)
    path = folder / checkpoint.NAME
    resumed = resume is not None and not run_folder.may_begin(folder)
    tensors: dict[str, Tensor] = {}
    facts: dict = {}
    config: GPTConfig | None = None
    vocabulary: Vocabulary | None = None
    if resumed:
        tensors, facts = checkpoint.load(path)
        config, vocabulary = checkpoint.model_parts(facts)
        began = Settings.from_json(facts["settings"], path)
        settings = began.resumed(given, facts["step"])
    else:
        earlier = run_folder.begun(folder) if resume else None
        if earlier is not None:
            given = dataclasses.asdict(earlier.resumed(given, 0))
        if given.get("init_from") is None:
            settings = Settings(**given).resolved()
        else:
            source = Path(given["init_from"]) / checkpoint.NAME
            tensors, facts = checkpoint.load(source)
            config, vocabulary = checkpoint.model_parts(facts)
            began = Settings.from_json(facts["settings"], source)
            settings = Settings.from_run(given, began, config)
            if config.positions == "rope":
                config = dataclasses.replace(config, context=settings.context)
    settings.check_machine()
    if settings.deterministic:
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
        torch.use_deterministic_algorithms(True)
    corpus = Corpus.load(
        settings.data, settings.level, settings.context, settings.validate_tokens, vocabulary
    )
    if resumed and facts["data"]["sha256"] != corpus.sha256:
        raise CheckpointError(
            f"the text {corpus.name!r} has SHA-256 {corpus.sha256}; the run in {folder} takes "
            f"the one it began with, {facts['data']['sha256']}. "
            "Restore that text, or start a new run."
        )
    if config is None:
        config = GPTConfig.preset(
            settings.preset, vocab_size=corpus.vocabulary.size, context=settings.context
        )
    torch.manual_seed(settings.seed)  # weights are drawn on the CPU: the same on every device
    model = GPT(config, impl=settings.impl).to(settings.device)
    generator = torch.Generator().manual_seed(settings.seed)
    run = Run(folder, settings, corpus, model, make_optimizer(model), generator)
    if resumed:
        checkpoint.restore_training(tensors, model, run.optimizer, [generator])
        run.step = facts["step"]
        note_changes(run, began, facts["machine"])
    elif tensors:
        checkpoint.restore_model(tensors, model)
    return run


def note_changes(run: Run, began: Settings, began_on: str) -> None:
    """Say in what a resumed run differs from the one that stopped."""
    for name in ("steps", "learning_rate"):
        before, now = getattr(began, name), getattr(run.settings, name)
        if before != now:
            print(
                f"note: {option(name)} is {now}, and was {before}: the learning rate follows the "
                f"new schedule from step {run.step + 1} on"
            )
    if began_on != machine(run.settings):
        print(
            f"note: this run began on {began_on} and goes on on {machine(run.settings)}: "
            f"its losses may differ in the last digits"
        )


def train_step(run: Run, forward: Callable) -> tuple[float, float]:
    """One step; returns its loss and its learning rate."""
    s = run.settings
    rate = learning_rate(run.step, s)
    for group in run.optimizer.param_groups:
        group["lr"] = rate
    batch = draw_batch(run.corpus.train, s, run.generator).to(s.device)
    with s.autocast():
        _, loss = forward(batch[:, :-1], batch[:, 1:], return_logits=False)
    loss.backward()
    torch.nn.utils.clip_grad_norm_(run.model.parameters(), MAX_GRADIENT_NORM)
    run.optimizer.step()
    run.optimizer.zero_grad(set_to_none=True)
    run.step += 1
    return loss.item(), rate


def unvalidated(run: Run, log: Log) -> dict | None:
    """The row of the last step, where that ends with a validation that something interrupted."""
    row = log.rows[-1] if log.rows else {}
    return row if row.get("step") == run.step and run.validates() and "validation" not in row else None


def train(run: Run, log: Log, stop: StopSignal) -> str | None:
    """Train to the last step; returns why it stopped before, if it did."""
    s, model = run.settings, run.model
    forward = torch.compile(model) if s.compile else model
    peak, flops, tokens = peak_flops(s), model.flops_per_token(), s.batch_size * s.context
    began, saved_at = time.monotonic(), run.step
    durations: list[float] = []
    bar = tqdm(
        total=s.steps,
        initial=run.step,
        unit="step",
        dynamic_ncols=True,
        file=sys.stdout,
        mininterval=0.5 if sys.stdout.isatty() else 10.0,
    )

    def check(row: dict) -> None:
        """Add the validation of its step to a row of the log."""
        row |= validate(model, run.corpus, s, stop) or {}
        if "validation" in row:
            bar.write(
                f"step {run.step}: validation {row['validation']:.4f} nats per {s.level}, "
                f"{row['bits_per_byte']:.4f} bits per byte",
                file=sys.stdout,
            )

    with bar:
        interrupted = unvalidated(run, log)
        if interrupted is not None:
            check(interrupted)
        log.begin()
        reason = stop.name
        while run.step < s.steps and reason is None:
            t = time.perf_counter()
            loss, rate = train_step(run, forward)
            if not math.isfinite(loss):
                raise TrainingError(
                    f"the loss of step {run.step} is {loss}; training takes a finite one. The "
                    f"checkpoint of step {saved_at} is kept; try a lower --learning-rate in a new run."
                )
            durations.append(time.perf_counter() - t)
            row = {"step": run.step, "loss": loss, "learning_rate": rate}
            if run.validates():
                check(row)
            log.write(row)
            speed = tokens / statistics.median(durations[-SMOOTHED:])
            shown = log.summary(SMOOTHED) | {"tokens/s": f"{speed:,.0f}"}
            if peak is not None:
                shown["MFU"] = f"{flops * speed / peak:.1%}"
            bar.set_postfix(shown, refresh=False)
            bar.update()
            done, reason = run.step == s.steps, stop.name
            if s.minutes is not None and time.monotonic() - began >= 60 * s.minutes and not done:
                reason = reason or f"--minutes {s.minutes:g}"
            if done or reason or run.step % s.save_every == 0:
                log.flush()
                run.save()
                saved_at = run.step
    if durations:
        run.speed = tokens / statistics.median(durations)
    return reason


def report(run: Run, log: Log, bigram: tuple[float, float], stop: StopSignal) -> None:
    """The end of a finished run: what it reached, the curve, a sample."""
    level = run.settings.level
    last = log.rows[-1] if log.rows else {}
    if "validation" not in last:
        last = validate(run.model, run.corpus, run.settings, stop) or {}
    if last:
        nats, bits = last["validation"], last["bits_per_byte"]
        print(f"validation  {nats:.4f} nats per {level}, {bits:.4f} bits per byte")
    print(f"bigram      {bigram[0]:.4f} nats per {level}, {bigram[1]:.4f} bits per byte")
    if run.speed is not None:
        print(f"speed       {run.speed:,.0f} tokens/s (median step)")
    print(f"files       {run.folder}: {', '.join(sorted(p.name for p in run.folder.iterdir()))}")
    print("\nsample after training:")
    run.sample(400, stop)


def main(argv: list[str] | None = None) -> int:
    try:
        run = prepare(parse(argv, __doc__))
        s, bigram = run.settings, run.corpus.bigram_loss()
        describe(run.model, run.corpus, s, bigram)
        print(
            f"run         {run.folder}, steps {run.step} to {s.steps} of {s.batch_size} x {s.context}"
        )
        log = Log(run.folder / run_folder.LOG, run.step)
        if log.holes():
            print(f"note: {log.holes()}; the run does not need them, the picture has a gap")
        finished = run.step == s.steps and unvalidated(run, log) is None
        stop = StopSignal()
        reason = None
        if not finished:  # else it is looked at, and nothing of it needs to be written
            run_folder.begin(run.folder, s)
            run.save()
            if run.step == 0:
                print("\nsample before training:")
                run.sample(100, stop)
            reason = train(run, log, stop)
        run_folder.plot(log.rows, bigram[0], run.folder / run_folder.PLOT)
        if reason is None:
            stop.text = "stopping"
            report(run, log, bigram, stop)
        else:
            print(
                f"stopped at step {run.step} ({reason}) and saved; go on with: "
                f"python {sys.argv[0]} --resume --out {run.folder}"
            )
        return 0 if stop.number is None else 128 + stop.number
    except EXPECTED as error:
        return tell("train_gpt.py", error)
    except KeyboardInterrupt:
        print("stopped before the first step; nothing was saved", file=sys.stderr)
        return 130


if __name__ == "__main__":
    start.run(main)
