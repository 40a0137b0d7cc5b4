"""A folder in transformers' layout, with its tokenizer.json, in the place of a run's folder."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import torch
from errors import CheckpointError
from settings import Settings
from torch import Tensor
from vocabulary import BPE

from flashproto.nn import GPT, GPTConfig

CONFIG, TOKENIZER = "config.json", "tokenizer.json"
CONTEXT = 1024  # of training, where the model may see more


def is_pretrained(path: Path) -> bool:
    return (path / CONFIG).is_file()


def vocabulary_in(folder: Path, config: GPTConfig) -> BPE:
    """That of its tokenizer.json; CheckpointError where there is none, or one of another model."""
    path = folder / TOKENIZER
    try:
        vocabulary = BPE(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise CheckpointError(
            f"{str(path)!r} cannot be read ({error}); a folder in transformers' layout takes one. "
            "Download it too."
        ) from None
    if vocabulary.size > config.vocab_size:
        raise CheckpointError(
            f"{str(path)!r} has {vocabulary.size} ids, and the model beside it {config.vocab_size}; it "
            "takes as many or fewer. Use the model's own."
        )
    return vocabulary


def load(folder: Path) -> tuple[dict[str, Tensor], dict]:
    """The weights, in float32, and facts of such a folder as a checkpoint has them."""
    model = GPT.from_pretrained(folder, device="cpu", dtype=torch.float32)
    config = model.config
    preset = "gpt2" if config.positions == "learned" else "llama"
    settings = Settings(level="bpe", preset=preset, context=min(config.context, CONTEXT))
    facts = {
        "settings": dataclasses.asdict(settings),
        "config": dataclasses.asdict(config),
        "vocabulary": vocabulary_in(folder, config).facts(),
    }
    return {f"model.{name}": x for name, x in model.state_dict().items()}, facts
