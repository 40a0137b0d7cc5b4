"""Train a small GPT on a text, on the CPU or the GPU at hand.

    python examples/train_gpt.py                        Python's language reference, a few minutes
    python examples/train_gpt.py --data book.txt        any UTF-8 text
    python examples/train_gpt.py --resume               go on with the newest run under runs/
    python examples/generate.py --prompt "The "         sample from it

A run is a folder (runs/gpt-N, or --out): checkpoint.safetensors, log.jsonl with the loss of every
step, and loss.png.  A run that was stopped, by Ctrl-C or by kill -9, goes on with --resume to the
same losses, bit for bit: on the CPU always, on a GPU with --deterministic.

Exit codes: 0 finished (or --minutes are over), 1 training failed, 2 bad input, 130 and 143 stopped
by Ctrl-C (SIGINT) or SIGTERM after saving.
"""

from __future__ import annotations

import dataclasses
import logging
import math
import os
import signal
import statistics
import sys
import time
from collections import deque
from dataclasses import dataclass
from pathlib import Path

# Threads that spin while they wait can starve each other where other programs run on the same cores.
# Set before torch starts them; on two idle cores it costs a fifth of the speed.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

import checkpoint
import torch
from checkpoint import CheckpointError
from run_log import Log, new_folder, newest_folder, plot
from settings import OptionError, Settings, parse
from text_data import Corpus, DataError
from torch import Tensor
from tqdm import tqdm

from flashproto import BackendError
from flashproto.nn import GPT, GPTConfig

BETAS, WEIGHT_DECAY, MAX_GRADIENT_NORM = (0.9, 0.95), 0.1, 1.0
WARMUP_SHARE, FINAL_LEARNING_RATE = 0.1, 0.05  # of the steps; of the peak

# Dense bfloat16 tensor-core peak in FLOP/s by a part of the device's name, from the data sheets.
PEAK_FLOPS = {
    "GB200": 2500e12, "B200": 2250e12, "H200": 989e12, "H100 PCIe": 756e12, "H100 NVL": 835e12,
    "H100": 989e12, "A100": 312e12, "L40S": 362e12, "RTX 4090": 165e12,
}  # fmt: skip


class TrainingError(Exception):
    """Training cannot go on."""


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


def autocast(settings: Settings) -> torch.autocast:
    return torch.autocast(settings.device, torch.bfloat16, enabled=settings.dtype == "bfloat16")


@torch.inference_mode()
def validate(model: torch.nn.Module, corpus: Corpus, settings: Settings) -> tuple[float, float]:
    """Loss on the last tenth in (nats per token, bits per byte).

    Windows of `context` ids advance by half of that; each id is predicted once, with at least half
    a context before it except at the very beginning.
    """
    ids = corpus.validation
    n = len(ids) - 1
    T = min(settings.context, n)
    starts = [*range(0, n - T, max(1, T // 2)), n - T]
    windows = ids[torch.tensor(starts)[:, None] + torch.arange(T + 1)]
    inputs, targets = windows[:, :-1], windows[:, 1:].clone()
    for i in range(1, len(starts)):
        targets[i, : starts[i - 1] + T - starts[i]] = -100  # predicted in the window before
    total = 0.0
    for x, y in zip(inputs.split(64), targets.split(64), strict=True):
        with autocast(settings):
            _, loss = model(x.to(settings.device), y.to(settings.device), return_logits=False)
        total += loss.item() * int((y != -100).sum())
    return corpus.validation_loss(total / n)


def sample(model: GPT, corpus: Corpus, settings: Settings, length: int = 400) -> str:
    """What the model writes after a newline, or after the text's first id where it has none."""
    newline = torch.tensor([10], dtype=torch.int32)
    ids = corpus.vocabulary.encode(newline)
    if int(ids) == corpus.vocabulary.size - 1:
        ids = corpus.train[:1]
    generator = torch.Generator(settings.device).manual_seed(settings.seed)
    with autocast(settings):
        tokens = model.generate(
            ids[None].to(settings.device), length, temperature=0.8, generator=generator
        )
    return corpus.vocabulary.decode(tokens[0, 1:].cpu())


# --- the run ------------------------------------------------------------------------------------


class StopSignal:
    """Remembers the first SIGINT or SIGTERM, so that the step can end and be saved; a second one
    ends the process at once."""

    def __init__(self) -> None:
        self.number: int | None = None
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, self._remember)

    def _remember(self, number: int, frame: object) -> None:
        self.number = number
        for each in (signal.SIGINT, signal.SIGTERM):
            signal.signal(each, signal.SIG_DFL)


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


def prepare(given: dict) -> Run:
    """Read the checkpoint if there is one to go on with, the data, and build the model; writes
    nothing."""
    resume, out = given.pop("resume", False), given.pop("out", None)
    tensors: dict[str, Tensor] = {}
    facts: dict = {}
    if resume:
        folder = Path(out) if out else newest_folder("--out")
        tensors, facts = checkpoint.load(folder / checkpoint.NAME)
        settings = saved_settings(facts).resumed(given)
    else:
        folder = new_folder(out)
        settings = Settings(**given).resolved()
    settings.check_machine()
    if settings.deterministic:
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
        torch.use_deterministic_algorithms(True)
    corpus = Corpus.load(settings.data, settings.level, settings.context)
    if resume:
        if facts["data"]["sha256"] != corpus.sha256:
            raise CheckpointError(
                f"the text {corpus.name!r} has SHA-256 {corpus.sha256}; the run in {folder} takes "
                f"the one it began with, {facts['data']['sha256']}. "
                "Restore that text, or start a new run."
            )
        config, _ = checkpoint.model_parts(facts)
    else:
        config = GPTConfig.preset(
            settings.preset, vocab_size=corpus.vocabulary.size, context=settings.context
        )
    torch.manual_seed(settings.seed)  # weights are drawn on the CPU: the same on every device
    model = GPT(config, impl=settings.impl).to(settings.device)
    generator = torch.Generator().manual_seed(settings.seed)
    run = Run(folder, settings, corpus, model, make_optimizer(model), generator)
    if resume:
        checkpoint.restore_training(tensors, model, run.optimizer, [generator])
        run.step = facts["step"]
        if facts["machine"] != machine(settings):
            print(f"note: this run began on {facts['machine']} and goes on on {machine(settings)}: "
                  f"its losses may differ in the last digits")  # fmt: skip
    return run


def saved_settings(facts: dict) -> Settings:
    try:
        return Settings(**facts["settings"])
    except (KeyError, TypeError) as error:
        raise CheckpointError(
            f"the checkpoint's settings do not fit this version of the script ({error}). "
            "Use the version that wrote it, or start a new run."
        ) from None


def backends_in_use(run: Run) -> str:
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
    with torch.no_grad(), autocast(run.settings):
        run.model(run.corpus.train[None, :1].to(run.settings.device))
    log.removeHandler(listener)
    log.setLevel(level)
    return ", ".join(f"{operator} {backend}" for operator, backend in chosen.items())


def machine(settings: Settings) -> str:
    """What the last bits of the losses depend on."""
    return f"{settings.device} ({device_name(settings.device)}), torch {torch.__version__}"


def device_name(device: str) -> str:
    if device == "cuda":
        return torch.cuda.get_device_name()
    return f"{torch.get_num_threads()} threads"


def banner(run: Run, bigram: tuple[float, float]) -> None:
    s, corpus, config = run.settings, run.corpus, run.model.config
    total, last = len(corpus.train) + len(corpus.validation), len(corpus.validation)
    lines = {
        "text": f"{corpus.name}: {total} {s.level}s, SHA-256 {corpus.sha256}",
        "validation": f"the last {last} {s.level}s: {corpus.unseen} unseen in training; "
        f"{corpus.share_seen():.0%} of passages of 64 also stand in the training part",
        "bigram": f"{bigram[0]:.4f} nats per {s.level}, {bigram[1]:.4f} bits per byte",
        "device": f"{s.device} ({device_name(s.device)}), {s.dtype}" + ", compiled" * s.compile,
        "backends": backends_in_use(run),
        "model": f"{s.preset}: {run.model.parameter_count():,} parameters, {config.n_layers} "
        f"layers, d_model {config.d_model}, context {config.context}, {config.vocab_size} ids",
        "run": f"{run.folder}, steps {run.step} to {s.steps} of {s.batch_size} x {s.context}",
    }
    for name, line in lines.items():
        print(f"{name:<12}{line}")


def train(run: Run, log: Log, stop: StopSignal) -> str | None:
    """Train to the last step; returns why it stopped before, if it did."""
    s, model, device = run.settings, run.model, run.settings.device
    forward = torch.compile(model) if s.compile else model
    peak = next((f for n, f in PEAK_FLOPS.items() if n in device_name(device)), None)
    flops = model.flops_per_token() if s.dtype == "bfloat16" else 0
    tokens = s.batch_size * s.context
    began, saved_at = time.monotonic(), run.step
    recent: deque[float] = deque(maxlen=50)
    durations: list[float] = []
    bar = tqdm(
        total=s.steps, initial=run.step, unit="step", dynamic_ncols=True, file=sys.stdout,
        mininterval=0.5 if sys.stdout.isatty() else 10.0,
    )  # fmt: skip
    reason = None
    while run.step < s.steps and reason is None:
        t = time.perf_counter()
        rate = learning_rate(run.step, s)
        for group in run.optimizer.param_groups:
            group["lr"] = rate
        batch = draw_batch(run.corpus.train, s, run.generator).to(device)
        with autocast(s):
            _, loss = forward(batch[:, :-1], batch[:, 1:], return_logits=False)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), MAX_GRADIENT_NORM)
        run.optimizer.step()
        run.optimizer.zero_grad(set_to_none=True)
        value = loss.item()
        if not math.isfinite(value):
            bar.close()
            raise TrainingError(
                f"the loss of step {run.step + 1} is {value}; training takes a finite one. The "
                f"checkpoint of step {saved_at} is kept; try a lower --learning-rate in a new run."
            )
        run.step += 1
        durations.append(time.perf_counter() - t)
        recent.append(durations[-1])
        speed = tokens / statistics.median(recent)
        row = {"step": run.step, "loss": value, "learning_rate": rate}
        done = run.step == s.steps
        if done or run.step % s.validate_every == 0:
            row["validation"], row["bits_per_byte"] = validate(model, run.corpus, s)
            bar.write(f"step {run.step}: validation {row['validation']:.4f} nats per {s.level}, "
                      f"{row['bits_per_byte']:.4f} bits per byte", file=sys.stdout)  # fmt: skip
        log.write(row)
        mfu = {"MFU": f"{flops * speed / peak:.1%}"} if flops and peak else {}
        bar.set_postfix({"loss": f"{value:.3f}", "tokens/s": f"{speed:,.0f}"} | mfu, refresh=False)
        bar.update()
        if stop.number is not None:
            reason = signal.Signals(stop.number).name
        elif s.minutes is not None and time.monotonic() - began >= 60 * s.minutes and not done:
            reason = f"--minutes {s.minutes:g}"
        if done or reason or run.step % s.save_every == 0:
            log.flush()
            run.save()
            saved_at = run.step
    bar.close()
    if durations:
        run.speed = tokens / statistics.median(durations)
    return reason


def report(run: Run, log: Log, bigram: tuple[float, float]) -> None:
    """The end of a finished run: what it reached, a sample, the curve."""
    level = run.settings.level
    last = log.rows[-1] if log.rows else {}
    if "validation" in last:
        nats, bits = last["validation"], last["bits_per_byte"]
    else:
        nats, bits = validate(run.model, run.corpus, run.settings)
    print(f"\nsample after training:\n{sample(run.model, run.corpus, run.settings)}\n")
    print(f"validation  {nats:.4f} nats per {level}, {bits:.4f} bits per byte")
    print(f"bigram      {bigram[0]:.4f} nats per {level}, {bigram[1]:.4f} bits per byte")
    print(f"files       {run.folder}: {checkpoint.NAME}, log.jsonl, loss.png")
    plot(log.rows, bigram[0], run.folder / "loss.png")
    if run.speed is not None:
        print(f"speed       {run.speed:,.0f} tokens/s (median step)")


def main(argv: list[str] | None = None) -> int:
    sys.stdout.reconfigure(  # type: ignore[union-attr]
        line_buffering=True, errors="replace"
    )
    try:
        run = prepare(parse(argv, __doc__))
        bigram = run.corpus.bigram_loss()
        banner(run, bigram)
        stop = StopSignal()
        run.folder.mkdir(parents=True, exist_ok=True)
        log = Log(run.folder / "log.jsonl", run.step)
        if run.step == 0:
            text = sample(run.model, run.corpus, run.settings, length=100)
            print(f"\nsample before training:\n{text}\n")
            run.save()
        reason = train(run, log, stop)
        if reason is None:
            report(run, log, bigram)
            return 0
        plot(log.rows, bigram[0], run.folder / "loss.png")
        print(f"stopped at step {run.step} ({reason}) and saved; go on with: "
              f"python {sys.argv[0]} --resume --out {run.folder}")  # fmt: skip
        return 0 if stop.number is None else 128 + stop.number
    except (BackendError, CheckpointError, DataError, OptionError, OSError, ValueError) as error:
        print(f"train_gpt.py: {error}", file=sys.stderr)
        return 2
    except (TrainingError, torch.OutOfMemoryError) as error:
        print(f"train_gpt.py: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("stopped before the first step; nothing was saved", file=sys.stderr)
        return 130


if __name__ == "__main__":
    sys.exit(main())
