"""The options of train_gpt.py: their defaults, their checks, and which may change on --resume."""

from __future__ import annotations

import argparse
import dataclasses
import os
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NoReturn

import torch

from flashproto.backends import BACKENDS
from flashproto.nn import PRESETS


class OptionError(Exception):
    """An option cannot be used; the message is for the person who gave it."""


@dataclass(frozen=True)
class Settings:
    """The options with their defaults, as kept in the checkpoint."""

    data: str | None = None
    level: str = "char"
    preset: str = "toy"
    context: int = 128
    batch_size: int = 16
    steps: int = 1200
    learning_rate: float = 4e-3
    seed: int = 0
    device: str = "auto"
    dtype: str = "auto"
    impl: str | None = None
    deterministic: bool = False
    compile: bool = False
    minutes: float | None = None
    save_every: int = 100
    validate_every: int = 300

    def resolved(self) -> Settings:
        """With "auto" replaced: a GPU where there is one, and bfloat16 on it."""
        device = self.device
        if device == "auto":
            device = "cuda" if torch.cuda.is_available() else "cpu"
        dtype = self.dtype
        if dtype == "auto":
            dtype = "bfloat16" if device == "cuda" else "float32"
        return dataclasses.replace(self, device=device, dtype=dtype)

    def resumed(self, given: dict) -> Settings:
        """With the options given now; OptionError for one that would change the run's losses."""
        for name in sorted(FIXED & given.keys()):
            if given[name] != getattr(self, name):
                raise OptionError(
                    f"--{name.replace('_', '-')} is {given[name]!r}; a resumed run takes what it "
                    f"began with, {getattr(self, name)!r}. Leave it out, or start a new run."
                )
        return dataclasses.replace(self, **{"minutes": None, **given}).resolved()

    def check_machine(self) -> None:
        """Raise OptionError for what this machine does not have."""
        if self.device == "cuda" and not torch.cuda.is_available():
            raise OptionError(
                "--device is 'cuda', and torch sees no GPU; it takes 'cpu' here. Pass --device cpu."
            )
        if self.compile and self.device == "cpu" and not any(map(shutil.which, ("g++", "clang++"))):
            raise OptionError(
                "--compile on the CPU takes a C++ compiler, and there is no g++ or clang++. "
                "Leave --compile out."
            )


# What decides the losses of a run, with the text, which is known by its hash.
FIXED = frozenset(
    ["level", "preset", "context", "batch_size", "steps", "learning_rate", "seed", "dtype"]
)


class OneLineParser(argparse.ArgumentParser):
    """An argument parser whose errors are one line and exit code 2."""

    def error(self, message: str) -> NoReturn:
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


def parse(argv: list[str] | None, description: str | None) -> dict:
    """The options given on the command line, and only those; exits with code 2 for a bad one."""
    p = OneLineParser(
        "train_gpt.py", description=description, allow_abbrev=False,
        argument_default=argparse.SUPPRESS, formatter_class=argparse.RawDescriptionHelpFormatter,
    )  # fmt: skip
    defaults = Settings()

    def add(name: str, help: str, **how: Any) -> None:
        default = getattr(defaults, name.removeprefix("--").replace("-", "_"), None)
        shown = "" if default is None or default is False else f" ({default})"
        p.add_argument(name, help=help + shown, **how)

    add("--data", "text to train on (Python's language reference)", type=absolute, metavar="FILE")
    add("--level", "what a token is", choices=("char", "byte"))
    add("--preset", "shape of the model", choices=tuple(PRESETS))
    add("--context", "tokens the model sees", type=positive(int), metavar="N")
    add("--batch-size", "sequences a step", type=positive(int), metavar="N")
    add("--steps", "training steps", type=positive(int), metavar="N")
    add("--learning-rate", "at its peak", type=positive(float), metavar="X")
    add("--seed", "of weights and batches", type=integer_seed, metavar="N")
    add("--device", "cuda where there is a GPU", choices=("auto", "cpu", "cuda"))
    add("--dtype", "bfloat16 is autocast; auto: on a GPU", choices=("auto", "float32", "bfloat16"))
    add("--impl", "backend (the best that runs); hopper: of attention alone", choices=BACKENDS)
    add("--deterministic", "the same losses on a GPU every time", action="store_true")
    add("--compile", "use torch.compile", action="store_true")
    add("--minutes", "save and stop after so long", type=positive(float), metavar="X")
    add("--save-every", "steps between checkpoints", type=positive(int), metavar="N")
    add("--validate-every", "steps between validations", type=positive(int), metavar="N")
    add("--out", "folder of the run (runs/gpt-N, the next free N)", metavar="FOLDER")
    add("--resume", "go on with the run in --out (the newest under runs/)", action="store_true")
    return vars(p.parse_args(argv))
