"""Train a small GPT on a text, on the CPU or the GPU at hand.

    python examples/train_gpt.py                        Python's language reference, a few minutes
    python examples/train_gpt.py --data book.txt        any UTF-8 text
    python examples/train_gpt.py --resume               go on with the newest run under runs/
    python examples/train_gpt.py --resume --steps 3000  and further than it was to go
    python examples/train_gpt.py --init-from runs/gpt-1 --data book.txt    begin with its weights
    python examples/train_gpt.py --init-from gpt2 --data book.txt    or a GPT-2's or Llama's
    python examples/generate.py --prompt "The "         sample from it
    torchrun --nproc-per-node 2 examples/train_gpt.py   the same on two GPUs; see parallel.py

A run is a folder (runs/gpt-N, or --out): settings.json, checkpoint.safetensors, log.jsonl with the
loss of every step, and loss.png.  A run that was stopped, by Ctrl-C or by kill -9, goes on with
--resume to the same losses, bit for bit: on the CPU always, on a GPU with --deterministic.

Exit codes: 0 finished (or --minutes are over), 1 training failed or a file could not be written, 2 bad
input, 130 and 143 stopped by Ctrl-C (SIGINT) or SIGTERM, after saving or before there was a step.
"""

from __future__ import annotations

if __name__ == "__main__":
    import start

import contextlib
import dataclasses
import math
import os
import shlex
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import checkpoint
import run_folder
import sharded
import torch
from bars import bar, messages_above_the_bar
from batches import Batches
from errors import EXPECTED, CheckpointError, OptionError, TrainingError, program, tell
from folder_lock import LOCK
from machine import compiles, describe, machine, peak_flops, warn_of_long_steps
from parallel import ALONE, World, joined, whole
from run_folder import SMOOTHED, Log
from sampling import Screen, stream
from schedule import learning_rate
from settings import SCHEDULE, Settings, option, parse
from sharded import Saved
from stop import StopSignal
from text_data import Corpus
from torch import Tensor
from torch.nn.utils import clip_grads_with_norm_
from tqdm import tqdm
from validation import evaluated, validate
from vocabulary import AnyVocabulary
from watch import TRACE, WARM_UP_STEPS, MaxScores, not_finite, profiler

from flashproto.nn import GPT, GPTConfig

BETAS, WEIGHT_DECAY = (0.9, 0.95), 0.1


# --- the run ------------------------------------------------------------------------------------


@dataclass
class Run:
    """Everything that changes while training."""

    folder: Path
    settings: Settings
    corpus: Corpus
    world: World
    model: GPT
    forward: torch.nn.Module  # the model as training calls it: compiled, for all processes
    optimizer: torch.optim.Optimizer
    batches: Batches
    step: int = 0
    saved: int = 0  # the step of the checkpoint
    best: float | None = None  # the least validation loss, that of best.safetensors
    stops: float = 0.0  # how many processes were to stop, as the sum of the last step found
    max_scores: MaxScores | None = None
    speed: float | None = None  # tokens/s of the median step

    def facts(self) -> dict:
        """What a checkpoint says beside its tensors."""
        return {
            "step": self.step,
            "best": self.best,
            "settings": dataclasses.asdict(self.settings),
            "config": dataclasses.asdict(self.model.config),
            "vocabulary": self.corpus.vocabulary.facts(),
            "data": {"name": self.corpus.name, "sha256": self.corpus.sha256},
            "machine": machine(self.settings, self.world),
        }

    def save(self) -> None:
        tensors = checkpoint.training_tensors(self.model, self.optimizer)
        sharded.save(self.folder, tensors, self.facts(), self.world)
        self.saved = self.step

    def save_best(self) -> None:
        tensors = {}
        for name, x in checkpoint.model_tensors(self.model).items():
            x = whole(x)
            if self.world.main:
                tensors[name] = x.cpu()
        if self.world.main:
            checkpoint.save(self.folder / checkpoint.BEST, tensors, self.facts())

    def validates(self) -> bool:
        """Whether this step ends with a validation."""
        return self.step == self.settings.steps or self.step % self.settings.validate_every == 0

    def sample(self, length: int, stop: StopSignal) -> None:
        """Print what the model writes, until it is asked to stop."""
        s, vocabulary, world = self.settings, self.corpus.vocabulary, self.world
        ids = vocabulary.opening()[1].to(s.device)
        screen = Screen(vocabulary, [""])

        def add(b: int, token: int) -> bool:
            if world.any(stop):
                return True
            screen.add(b, token)
            return False

        with s.autocast(), s.eager(), evaluated(self.model):
            stream(self.model, [ids], length, s.seed, add, self.corpus.separator, temperature=0.8)
        screen.close()


def make_optimizer(model: torch.nn.Module) -> torch.optim.Optimizer:
    """AdamW, decaying the matrices but not norms and biases."""
    matrices = [p for p in model.parameters() if p.ndim >= 2]
    vectors = [p for p in model.parameters() if p.ndim < 2]
    groups = [
        {"params": matrices, "weight_decay": WEIGHT_DECAY},
        {"params": vectors, "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(groups, betas=BETAS, fused=True)


def claim(
    held: contextlib.ExitStack, out: str | None, resume: bool | str | None
) -> tuple[Path, bool, Settings | None]:
    """(the folder to train in, whether a run goes on in it, the settings of one that has yet to begin
    there).  Until `held` is closed no other process trains in it."""
    folder = held.enter_context(run_folder.claimed(out, resume))
    resumed = resume is not None and not run_folder.may_begin(folder)
    return folder, resumed, run_folder.begun(folder) if resume and not resumed else None


def prepare(given: dict, held: contextlib.ExitStack, world: World = ALONE) -> Run:
    """Claim the folder, read the checkpoint to go on with or to begin with, and the text, and build the
    model; writes nothing.

    held: to be closed when the run ends.
    """
    resume, out, level = given.pop("resume", None), given.pop("out", None), given.get("level")
    folder, resumed, earlier = world.from_main(lambda: claim(held, out, resume))
    world.begin(folder)
    saved: Saved | None = None
    config: GPTConfig | None = None
    vocabulary: AnyVocabulary | None = None
    if "parallel" in given:
        world.check_several(given["parallel"])
    if resumed:
        saved = sharded.find(folder, world)
        config, vocabulary = checkpoint.model_parts(saved.facts)
        began = Settings.from_json(saved.facts["settings"], folder)
        settings = began.resumed(given, saved.facts["step"])
    else:
        if earlier is not None:
            given = dataclasses.asdict(earlier.resumed(given, 0))
        if given.get("init_from") is None:
            settings = Settings(**given).resolved()
        else:
            source = Path(given["init_from"])
            saved = sharded.find(source, world)
            config, vocabulary = checkpoint.model_parts(saved.facts)
            began = Settings.from_json(saved.facts["settings"], source)
            settings = Settings.from_run(given, began, config)
            config = dataclasses.replace(config, dropout=settings.dropout)
            if config.positions == "rope":
                config = dataclasses.replace(config, context=settings.context)
    settings.check_machine()
    settings.check_context_parallel()
    world.check_device(settings.device)
    world.share_sequences(settings.context_parallel)
    if level is not None and settings.data is not None and Path(settings.data).is_dir():
        raise OptionError(
            f"--level is {level!r}, and --data is a folder of tokens; it takes a text there. "
            "Leave it out."
        )
    if settings.deterministic:
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
        torch.use_deterministic_algorithms(True)
    corpus = Corpus.load(settings, vocabulary, world)
    settings = dataclasses.replace(settings, level=corpus.vocabulary.level)
    if resumed and saved and saved.facts["data"]["sha256"] != corpus.sha256:
        raise CheckpointError(
            f"the text {corpus.name!r} has SHA-256 {corpus.sha256}; the run in {folder} takes "
            f"the one it began with, {saved.facts['data']['sha256']}. "
            "Restore that text, or start a new run."
        )
    if config is None:
        config = settings.model(corpus.vocabulary.size)
    batches = Batches(corpus.train, settings, world.data_rank, world.data_size)
    torch.manual_seed(settings.seed)  # weights are drawn on the CPU: the same on every device
    model = GPT(config, impl=settings.impl).to(settings.device)
    forward = world.wrap(
        model, settings.parallel, compile=settings.compile, bfloat16=settings.dtype == "bfloat16"
    )
    optimizer = make_optimizer(model)
    run = Run(folder, settings, corpus, world, model, forward, optimizer, batches)
    if settings.log_max_score:
        run.max_scores = MaxScores(model)
    if saved:
        tensors = saved.tensors(sharded.layout_of(model, optimizer))
        if resumed:
            checkpoint.restore_training(tensors, model, optimizer)
            run.step = run.saved = saved.facts["step"]
            if settings.validate_tokens == began.validate_tokens:  # else that is of another text
                run.best = saved.facts["best"]
            note_changes(run, began, saved.facts["machine"])
        else:
            checkpoint.restore_model(tensors, model)
    return run


def note_changes(run: Run, began: Settings, began_on: str) -> None:
    """Say in what a resumed run differs from the one that stopped."""
    for name in SCHEDULE:
        before, now = getattr(began, name), getattr(run.settings, name)
        if before != now:
            print(
                f"note: {option(name)} is {now}, and was {before}: the learning rate follows the "
                f"new schedule from step {run.step + 1} on"
            )
    now_on = machine(run.settings, run.world)
    if began_on != now_on:
        print(
            f"note: this run began on {began_on} and goes on on {now_on}: "
            f"its losses may differ in the last digits"
        )


# --- a step -------------------------------------------------------------------------------------


def gradients(run: Run, forward: Callable) -> Tensor:
    """Forward and backward of each part of a step; leaves the gradients, and returns the mean loss of
    this process, which has as many targets as any other."""
    s, world, losses = run.settings, run.world, []
    for micro in range(s.accumulate):
        batch = run.batches(run.step, micro).to(s.device)
        x, y = world.tokens(batch[:, :-1], 0), world.tokens(batch[:, 1:], -100)
        ids = run.corpus.documents(batch[:, :-1], world)
        if run.model.config.dropout:
            torch.manual_seed(run.batches.seed(run.step, micro))
        with world.accumulating(forward, last=micro == s.accumulate - 1):
            with s.autocast(), run.max_scores or contextlib.nullcontext():
                _, loss = forward(x, y, return_logits=False, group=world.group, documents=ids)
            loss = loss / s.accumulate
            loss.backward()
        losses.append(loss.detach())
    return torch.stack(losses).sum()


def train_step(
    run: Run, forward: Callable, wanted: Callable[[], str | None] = lambda: None
) -> dict[str, Any]:
    """One step; returns its row of the log.  TrainingError where a number is not finite, with the
    weights as they were before the step.

    wanted: why this process is to stop, if it is; run.stops then is true in all processes.
    """
    s = run.settings
    parameters = [p for group in run.optimizer.param_groups for p in group["params"]]
    rate = learning_rate(run.step, s)
    mean = gradients(run, forward)
    there = [p.grad for p in parameters if p.grad is not None]
    totals = run.world.of_step(mean, there, stop=wanted() is not None)
    loss, gradient_norm, run.stops = totals.tolist()  # waits for the device
    if not math.isfinite(loss) or not math.isfinite(gradient_norm):
        found = not_finite(run.model) or f"the norm of its gradient is {gradient_norm}"
        raise TrainingError(
            f"the loss of step {run.step + 1} is {loss}, and {found}; training takes finite numbers. "
            f"The checkpoint of step {run.saved} is kept; try a lower --learning-rate in a new run."
        )
    if s.clip and gradient_norm > s.clip:
        clip_grads_with_norm_(parameters, s.clip, totals[1])
    for group in run.optimizer.param_groups:
        group["lr"] = rate
    run.optimizer.step()
    run.optimizer.zero_grad(set_to_none=True)
    run.step += 1
    row = {"step": run.step, "loss": loss, "learning_rate": rate, "gradient_norm": gradient_norm}
    if run.max_scores is not None:
        row["max_score"] = run.world.largest(run.max_scores.take())
    return row


# --- training -----------------------------------------------------------------------------------


def unvalidated(run: Run, log: Log) -> dict | None:
    """The row of the last step, where that ends with a validation that something interrupted."""
    row = log.rows[-1] if log.rows else {}
    return row if row.get("step") == run.step and run.validates() and "validation" not in row else None


def check(run: Run, row: dict, stop: StopSignal) -> None:
    """Add the validation of its step to a row of the log; keep the weights that are the best so far."""
    row |= validate(run.model, run.corpus, run.settings, stop, run.world) or {}
    if "validation" in row:
        tqdm.write(
            f"step {run.step}: validation {row['validation']:.4f} nats per {run.corpus.unit}, "
            f"{row['bits_per_byte']:.4f} bits per byte",
            file=sys.stdout,
        )
        if run.best is None or row["validation"] < run.best:
            run.best = row["validation"]
            run.save_best()


def train(run: Run, log: Log, stop: StopSignal) -> str | None:
    """Train to the last step; returns why it stopped before, if it did."""
    s, world = run.settings, run.world
    peak, tokens = peak_flops(s), s.batch_size * s.context
    flops = run.model.flops_per_token() / world.size
    began = time.monotonic()
    durations: list[float] = []

    def wanted() -> str | None:
        """Why this process is to stop, if it is."""
        late = s.minutes is not None and time.monotonic() - began >= 60 * s.minutes
        over = late and run.step < s.steps
        return stop.name or (f"--minutes {s.minutes:g}" if over else world.left_alone())

    trace = profiler(run.folder / TRACE) if s.profile and world.main else None
    warn_of_long_steps(flops * tokens, s)
    with (
        bar(total=s.steps, initial=run.step, unit="step") as shown,
        messages_above_the_bar(),
        trace or contextlib.nullcontext(),
    ):
        interrupted = unvalidated(run, log)
        if interrupted is not None:
            check(run, interrupted, stop)
            run.save()  # it knows the best validation
        log.begin()
        world.settle(run.forward, s.autocast())
        reason = world.agreed(stop.name)
        shown.set_description("compiling ..." if compiles(s) else None)
        while run.step < s.steps and reason is None:
            t = time.perf_counter()
            row = train_step(run, run.forward, wanted)
            durations.append(time.perf_counter() - t)
            shown.set_description(None, refresh=False)
            row["seconds"] = round(durations[-1], 6)
            if peak is not None:
                row["mfu"] = round(flops * tokens / durations[-1] / peak, 4)
            if trace is not None:
                trace.step()
            if run.validates():
                check(run, row, stop)
            log.write(row)
            speed = tokens / statistics.median(durations[-SMOOTHED:])
            facts = log.summary(SMOOTHED) | {"tokens/s": f"{speed:,.0f}"}
            if peak is not None:
                facts["MFU"] = f"{flops * speed / peak:.1%}"
            shown.set_postfix(facts, refresh=False)
            shown.update()
            done = run.step == s.steps
            asks = world.size == 1 or run.stops or run.validates()  # a validation may be interrupted
            reason = world.agreed(wanted()) if asks else None
            if done or reason or run.step % s.save_every == 0:
                log.flush()
                run.save()
    if durations:
        run.speed = tokens / statistics.median(durations)
    if s.profile and len(durations) <= WARM_UP_STEPS:
        print(f"note: {TRACE} takes more than {WARM_UP_STEPS} steps, and was not written")
    return reason


def report(run: Run, log: Log, bigram: tuple[float, float], stop: StopSignal) -> None:
    """The end of a finished run: what it reached, the curve, a sample."""
    unit = run.corpus.unit
    last = log.rows[-1] if log.rows else {}
    if "validation" not in last:
        last = validate(run.model, run.corpus, run.settings, stop, run.world) or {}
    if last:
        nats, bits = last["validation"], last["bits_per_byte"]
        print(f"validation  {nats:.4f} nats per {unit}, {bits:.4f} bits per byte")
    print(f"bigram      {bigram[0]:.4f} nats per {unit}, {bigram[1]:.4f} bits per byte")
    if run.speed is not None:
        print(f"speed       {run.speed:,.0f} tokens/s (median step)")
    if run.settings.device != "cpu":
        where = " on the first GPU" if run.world.size > 1 else ""
        peak = torch.cuda.max_memory_allocated() / 2**30
        print(f"memory      {peak:.1f} GiB at the peak{where}")
    files = sorted(p.name for p in run.folder.iterdir() if p.name != LOCK)
    print(f"files       {run.folder}: {', '.join(files)}")
    print("\nsample after training:")
    run.sample(400, stop)
    generate = f"{program('python')} {Path(sys.argv[0]).with_name('generate.py')}"
    print(f"\nmore text   {generate} --run {shlex.quote(str(run.folder))}")
    print(f"more steps  {run.world.command()} --steps {2 * run.settings.steps}")


def whole_run(given: dict, world: World) -> int:
    """All that main does, in one of the processes of `world`; returns the exit code."""
    with contextlib.ExitStack() as held:
        return train_and_report(prepare(given, held, world))


def train_and_report(run: Run) -> int:
    """All that comes after `prepare`; returns the exit code."""
    world = run.world
    s, bigram = run.settings, run.corpus.bigram_loss()
    describe(run.model, run.corpus, s, bigram, world)
    print(f"run         {run.folder}, steps {run.step} to {s.steps} of {s.batch_size} x {s.context}")
    log = Log(run.folder / run_folder.LOG, run.step, writes=world.main)
    if log.holes():
        print(f"note: {log.holes()}; the run does not need them, the picture has a gap")
    finished = run.step == s.steps and unvalidated(run, log) is None
    stop = world.stop = StopSignal()
    if world.size > 1:  # torchrun hears the second Ctrl-C, and the main process alone talks
        stop.text = "stopping after this step" * world.main
    reason = None
    if not finished:  # else it is looked at, and nothing of it needs to be written
        if world.main:
            run_folder.begin(run.folder, s)
        run.save()
        if run.step == 0:
            print("\nsample before training:")
            run.sample(100, stop)
        reason = train(run, log, stop)
    if world.main:
        path, unit = run.folder / run_folder.PLOT, run.corpus.unit
        run_folder.plot(log.rows, bigram[0], path, unit, s.preset)
    if reason is None:
        stop.text = "stopping" * world.main
        report(run, log, bigram, stop)
    else:
        said = f"stopped at step {run.step} ({reason}) and saved; go on with: {world.command()}"
        print(said)
        world.note(said)
    return 0 if stop.number is None else 128 + stop.number


def main(argv: list[str] | None = None) -> int:
    try:
        given = parse(argv, __doc__)
        with joined() as world:
            return whole_run(given, world)
    except EXPECTED as error:
        return tell("train_gpt.py", error)
    except KeyboardInterrupt as error:
        print("stopped before the first step; nothing was saved", file=sys.stderr)
        return getattr(error, "code", 130)


if __name__ == "__main__":
    start.run(main)
