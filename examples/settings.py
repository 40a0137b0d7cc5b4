"""The options of train_gpt.py: their defaults, their checks, and which may change on --resume."""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import os
import re
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from difflib import get_close_matches
from pathlib import Path
from typing import Any, NoReturn

import torch
from errors import CheckpointError, OptionError

from flashproto.backends import BACKENDS, device_reasons
from flashproto.nn import PRESETS, GPTConfig
from flashproto.nn.gpt import SHORT_NAMES


@dataclass(frozen=True)
class Settings:
    """The options with their defaults, as kept in the checkpoint."""

    data: str | None = None
    level: str = "char"
    preset: str = "toy"
    n_layers: int | None = None
    n_heads: int | None = None
    n_kv_heads: int | None = None
    d_model: int | None = None
    d_ff: int | None = None
    window: int | None = None
    window_pattern: str | None = None
    softcap: float | None = None
    sinks: bool | None = None
    dropout: float = 0.0
    context: int = 128
    documents: bool = False
    batch_size: int = 16
    accumulate: int = 1
    steps: int = 1200
    learning_rate: float = 4e-3
    schedule: str = "cosine"
    warmup: float = 0.1
    decay: float = 0.2
    clip: float = 1.0
    seed: int = 0
    parallel: str = "ddp"
    context_parallel: int = 1
    device: str = "auto"
    dtype: str = "auto"
    impl: str | None = None
    deterministic: bool = False
    compile: bool = False
    minutes: float | None = None
    save_every: int = 100
    validate_every: int = 300
    validate_tokens: int = 131072
    init_from: str | None = None
    log_max_score: bool = False
    profile: bool = False
    skip_checksums: bool = False

    def resolved(self) -> Settings:
        """With "auto" replaced: a GPU where there is one, and bfloat16 on it; OptionError for one that
        is not there."""
        device, dtype = check_device(self.device), self.dtype
        if dtype == "auto":
            dtype = "bfloat16" if device == "cuda" else "float32"
        return dataclasses.replace(self, device=device, dtype=dtype)

    def resumed(self, given: dict, step: int) -> Settings:
        """With the options given now, at `step`; OptionError for one that the run cannot change."""
        if given.get("dtype") == "auto":
            given = given | {"dtype": self.dtype}
        for name in sorted(FIXED & given.keys()):
            if given[name] != getattr(self, name):
                began = getattr(self, name)
                raise OptionError(
                    f"{option(name)} is {given[name]!r}; a resumed run takes what it began with, "
                    f"{'nothing' if began is None else repr(began)}. Leave it out, or start a new run."
                )
        if given.get("steps", step) < step:
            raise OptionError(
                f"--steps is {given['steps']}, and the run has made {step}; it takes the number of all "
                f"its steps, {step} or more. Leave it out, or pass a larger one."
            )
        return dataclasses.replace(self, **{"minutes": None, "profile": False, **given}).resolved()

    @classmethod
    def from_run(cls, given: dict, source: Settings, config: GPTConfig) -> Settings:
        """The options given for a new run that begins with the model of another one, whose settings
        and shape those are; OptionError for one that does not fit it."""
        has = {name: getattr(source, name) for name in ("preset", "level")}
        has |= {name: getattr(config, name) for name in SHAPE}
        has |= {"n_kv_heads": config.kv_heads, "d_ff": config.hidden}
        for name, value in has.items():
            # None: not given, in what a run has noted that died before its first checkpoint.
            if given.get(name) is not None and given[name] != value:
                raise OptionError(
                    f"{option(name)} is {given[name]!r}; with --init-from it takes what that run has, "
                    f"{value!r}. Leave it out."
                )
        if config.positions == "learned" and given.get("context", 0) > config.context:
            raise OptionError(
                f"--context is {given['context']}; with --init-from a run with learned positions it "
                f"takes at most that run's, {config.context}. Leave it out, or pass a smaller one."
            )
        inherited = {name: getattr(source, name) for name in ("preset", "level", "context", *SHAPE)}
        return cls(**inherited | given).resolved()

    def model(self, vocab_size: int) -> GPTConfig:
        """The preset with what was given for its shape; OptionError where that does not fit."""
        given = {name: getattr(self, name) for name in SHAPE if getattr(self, name) is not None}
        given |= {"context": self.context, "dropout": self.dropout}
        try:
            return GPTConfig.preset(self.preset, vocab_size=vocab_size, **given)
        except ValueError as error:
            text = str(error).removeprefix("GPTConfig: ")
            for name in SHAPE:
                text = re.sub(rf"\b{name}\b", option(name), text)
            raise OptionError(f"--preset {self.preset}: {text}") from None

    def check_machine(self) -> None:
        """Raise OptionError for what this machine does not have."""
        check_backend(self.impl, self.device)
        if self.compile and self.device == "cpu" and not any(map(shutil.which, ("g++", "clang++"))):
            raise OptionError(
                "--compile on the CPU takes a C++ compiler, and there is no g++ or clang++. "
                "Leave --compile out."
            )

    def check_context_parallel(self) -> None:
        """Raise OptionError for what does not go with sequences that processes share."""
        n = self.context_parallel
        if n == 1:
            return
        if self.context % (2 * n):
            raise OptionError(
                f"--context is {self.context}; with --context-parallel {n} it takes a multiple of "
                f"{2 * n}. Pass {-(-self.context // (2 * n)) * 2 * n}, or another --context-parallel."
            )
        for name in ("compile", "log_max_score", "dropout"):
            if getattr(self, name):
                raise OptionError(
                    f"--context-parallel is {n}; with {option(name)} it takes 1. Leave one of them out."
                )

    def autocast(self) -> torch.autocast:
        return torch.autocast(self.device, torch.bfloat16, enabled=self.dtype == "bfloat16")

    def eager(self) -> contextlib.AbstractContextManager:
        """For shapes that are seen once, which it does not pay to compile for."""
        return torch.compiler.set_stance("force_eager") if self.compile else contextlib.nullcontext()

    @classmethod
    def from_json(cls, saved: object, where: Path) -> Settings:
        """Those that a run kept in `where`; CheckpointError where they are not of this version."""
        try:
            return cls(**saved)  # type: ignore[arg-type]
        except TypeError as error:
            raise CheckpointError(
                f"the settings in {str(where)!r} do not fit this version of the script ({error}). "
                "Use the version that wrote them, or start a new run."
            ) from None


# Of the model, beside the preset: fields of GPTConfig.
SHAPE = (
    *("n_layers", "n_heads", "n_kv_heads", "d_model", "d_ff"),
    *("window", "window_pattern", "softcap", "sinks"),
)

# What a run keeps to its end: what decides its losses, but for the learning rate's schedule, and for
# the text, which is known by its hash.
FIXED = frozenset(
    [
        *("level", "preset", *SHAPE, "dropout", "context", "documents"),
        *("batch_size", "clip", "seed", "dtype", "init_from"),
    ]
)
SCHEDULE = ("steps", "learning_rate", "schedule", "warmup", "decay")


def option(name: str) -> str:
    """How the command line spells a field."""
    return "--" + name.replace("_", "-")


def check_device(device: str) -> str:
    """--device with "auto" replaced; OptionError for a GPU that is not there."""
    gpu = torch.cuda.is_available()
    if device == "cuda" and not gpu:
        raise OptionError(
            "--device is 'cuda', and torch sees no GPU; it takes 'cpu' here. Pass --device cpu."
        )
    return ("cuda" if gpu else "cpu") if device == "auto" else device


def check_backend(impl: str | None, device: str) -> None:
    """Raise OptionError for a backend that does not run on the device, however it is called."""
    reasons = device_reasons(impl, torch.device(device)) if impl is not None else ()
    if reasons:
        raise OptionError(
            f"--impl is {impl!r}, which cannot run on {device!r}: {'; '.join(reasons)}. Leave --impl "
            "out to let flashproto choose, or see python -m flashproto.env."
        )


# What other trainers call their options, where that is not close to the name here.
OTHER_NAMES = {
    "--lr": "--learning-rate",
    "--max-iters": "--steps",
    "--block-size": "--context",
    "--seq-len": "--context",
    "--n-embd": "--d-model",
    "--gradient-accumulation-steps": "--accumulate",
    "--grad-clip": "--clip",
    "--max-grad-norm": "--clip",
    "--eval-interval": "--validate-every",
    "--output-dir": "--out",
    "--out-dir": "--out",
    "--max-new-tokens": "--tokens",
}


class OneLineParser(argparse.ArgumentParser):
    """An argument parser whose errors are one line and exit code 2."""

    def error(self, message: str) -> NoReturn:
        own = [name for action in self._actions for name in action.option_strings]
        given = re.findall(r"(?<!\S)--[\w-]+", message) if message.startswith("unrecognized") else []
        for name in given:
            plain = name.replace("_", "-")
            close = (
                [OTHER_NAMES[plain]] if plain in OTHER_NAMES else get_close_matches(plain, own, 1, 0.8)
            )
            message += "".join(f". Write {x} for {name}" for x in close if x in own)
        self.exit(2, f"{self.prog}: error: {message}. See --help.\n")


def positive(kind: type[int] | type[float]) -> Callable[[str], float]:
    """An argparse type: a number above 0."""

    def number(text: str) -> float:
        value = kind(text)
        if not 0 < value < float("inf"):
            raise argparse.ArgumentTypeError(f"{text} is not above 0")
        return value

    number.__name__ = f"positive {kind.__name__}"
    return number


def absolute(path: str) -> str:
    """An argparse type: a path that --resume finds from any folder."""
    return os.path.abspath(path)


def integer_seed(text: str) -> int:
    """An argparse type: what torch takes as a seed."""
    value = int(text)
    if not 0 <= value < 2**63:
        raise argparse.ArgumentTypeError(f"{text} is not from 0 to 2^63 - 1")
    return value


def not_negative(kind: type[int] | type[float]) -> Callable[[str], float]:
    """An argparse type: 0 or a number above it."""

    def number(text: str) -> float:
        value = kind(text)
        if not 0 <= value < float("inf"):
            raise argparse.ArgumentTypeError(f"{text} is not 0 or above")
        return value

    number.__name__ = kind.__name__
    return number


def share(text: str) -> float:
    """An argparse type: a number from 0 to 1."""
    value = float(text)
    if not 0 <= value <= 1:
        raise argparse.ArgumentTypeError(f"{text} is not from 0 to 1")
    return value


def parse(argv: list[str] | None, description: str | None) -> dict:
    """The options given on the command line, and only those; exits with code 2 for a bad one."""
    p = OneLineParser(
        "train_gpt.py",
        description=description,
        allow_abbrev=False,
        argument_default=argparse.SUPPRESS,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    defaults = Settings()

    def add(name: str, help: str, **how: Any) -> None:
        default = getattr(defaults, name.removeprefix("--").replace("-", "_"), None)
        shown = "" if default is None or default is False else f" ({default})"
        p.add_argument(name, help=help + shown, **how)

    add(
        "--data",
        "text to train on, or a folder that prepare_data.py wrote (Python's language reference)",
        type=absolute,
        metavar="PATH",
    )
    add("--level", "what a token is", choices=("char", "byte"))
    add(
        "--preset",
        f"shape of the model: {', '.join(PRESETS)}; or {', '.join(SHORT_NAMES)}",
        type=lambda name: SHORT_NAMES.get(name, name),
        choices=tuple(PRESETS),
        metavar="NAME",
    )
    add("--n-layers", "instead of the preset's", type=positive(int), metavar="N")
    add("--n-heads", "of the queries, instead of the preset's", type=positive(int), metavar="N")
    add("--n-kv-heads", "of keys and values, a divisor of --n-heads", type=positive(int), metavar="N")
    add("--d-model", "width, instead of the preset's", type=positive(int), metavar="N")
    add("--d-ff", "inner width of the MLP, instead of the preset's", type=positive(int), metavar="N")
    add("--window", "tokens before its own that attention sees", type=positive(int), metavar="N")
    add("--window-pattern", "a letter a layer, repeated: S with --window, L without", metavar="SSSL")
    add("--softcap", "of attention's scores", type=positive(float), metavar="X")
    add("--sinks", "a learned sink for each head of attention", action="store_true")
    add("--dropout", "share of attention's probabilities to drop", type=share, metavar="X")
    add("--context", "tokens the model sees", type=positive(int), metavar="N")
    add("--documents", "attention stays within a document of prepared tokens", action="store_true")
    add("--batch-size", "sequences a step, of all its parts", type=positive(int), metavar="N")
    add("--accumulate", "parts of a step, whose gradients are added", type=positive(int), metavar="N")
    add("--steps", "training steps", type=positive(int), metavar="N")
    add("--learning-rate", "at its peak", type=positive(float), metavar="X")
    add("--schedule", "of the learning rate", choices=("cosine", "wsd"))
    add("--warmup", "share of the steps in which the learning rate climbs", type=share, metavar="X")
    add("--decay", "share of the steps in which it falls, with wsd", type=share, metavar="X")
    add("--clip", "largest norm of the gradient; 0: any", type=not_negative(float), metavar="X")
    add("--seed", "of weights and batches", type=integer_seed, metavar="N")
    add("--parallel", "how the processes that torchrun starts share a model", choices=("ddp", "fsdp"))
    add(
        "--context-parallel",
        "processes that share each sequence, a divisor of their number",
        type=positive(int),
        metavar="N",
    )
    add("--device", "cuda where there is a GPU", choices=("auto", "cpu", "cuda"))
    add("--dtype", "bfloat16 is autocast; auto: on a GPU", choices=("auto", "float32", "bfloat16"))
    add("--impl", "backend (the best that runs); hopper: of attention alone", choices=BACKENDS)
    add("--deterministic", "the same losses on a GPU every time", action="store_true")
    add("--compile", "use torch.compile", action="store_true")
    add("--minutes", "save and stop after so long", type=positive(float), metavar="X")
    add("--save-every", "steps between checkpoints", type=positive(int), metavar="N")
    add("--validate-every", "steps between validations", type=positive(int), metavar="N")
    add(
        "--validate-tokens",
        "at most so many a validation, spread over the last tenth",
        type=positive(int),
        metavar="N",
    )
    add("--out", "folder of the run (runs/gpt-N, the next free N)", metavar="FOLDER")
    add(
        "--init-from",
        "begin with the weights of that run, or of a GPT-2 or Llama in transformers' layout",
        type=absolute,
        metavar="FOLDER",
    )
    add("--log-max-score", "log the largest attention score of each layer", action="store_true")
    add("--profile", "write a torch.profiler trace of a few steps", action="store_true")
    add("--skip-checksums", "of the shards in --data check the sizes alone", action="store_true")
    add(
        "--resume",
        "go on with the run in --out (the newest under runs/); auto: or begin it",
        nargs="?",
        const=True,
        choices=("auto",),
        metavar="auto",
    )
    return vars(p.parse_args(argv))
