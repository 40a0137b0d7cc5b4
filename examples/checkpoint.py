"""Checkpoints of the examples: one safetensors file each, written whole or not at all.

The file holds the model and the optimizer as tensors; step, settings, model configuration, vocabulary
and the hash of the data as JSON in its header; and a SHA-256 of all that.  That of the best validation
so far is the same without the optimizer.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
from pathlib import Path

import torch
from errors import CheckpointError, WriteError
from safetensors import SafetensorError, safe_open
from safetensors.torch import save as to_bytes
from torch import Tensor
from vocabulary import AnyVocabulary, vocabulary_of

from flashproto.nn import GPT, GPTConfig

NAME, BEST = "checkpoint.safetensors", "best.safetensors"
LATEST, FOLDERS = "latest", ("checkpoint-a", "checkpoint-b")  # of several processes, see sharded.py
FORMAT = "flashproto-gpt-2"


RESUME = "go on with --resume"


def write_atomically(path: Path, content: bytes, then: str = RESUME) -> None:
    """Write the file so that a crash at any moment leaves the old or the new one."""
    partial = path.with_name(path.name + ".partial")
    try:
        with open(partial, "wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        os.replace(partial, path)
        folder = os.open(path.parent, os.O_RDONLY)
        try:
            os.fsync(folder)
        finally:
            os.close(folder)
    except OSError as error:
        with contextlib.suppress(OSError):
            partial.unlink(missing_ok=True)
        raise WriteError(path, error, "; what it held before is unchanged", then) from None


def save(path: Path, tensors: dict[str, Tensor], facts: dict) -> None:
    """Write tensors and JSON-able facts to `path`; CheckpointError where that fails."""
    tensors = {name: x.detach().cpu().contiguous() for name, x in tensors.items()}
    text = json.dumps(facts)
    header = {"format": FORMAT, "facts": text, "sha256": _digest(tensors, text)}
    write_atomically(path, to_bytes(tensors, header))


def load(path: Path) -> tuple[dict[str, Tensor], dict]:
    """The tensors, on the CPU, and the facts; CheckpointError for a missing or damaged file."""
    if not path.is_file():
        raise CheckpointError(
            f"there is no checkpoint {str(path)!r}; it takes a folder that train_gpt.py wrote. "
            f"Name one that holds {NAME}, or a folder of transformers' weights (docs/training.md)."
        )
    try:
        with safe_open(path, "pt") as file:
            header = file.metadata() or {}
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    except (SafetensorError, OSError, ValueError) as error:
        raise CheckpointError(_damaged(path, f"is not a whole safetensors file: {error}")) from None
    if header.get("format") != FORMAT:
        raise CheckpointError(_damaged(path, f"was not written by train_gpt.py as {FORMAT}"))
    if header.get("sha256") != _digest(tensors, header.get("facts", "")):
        raise CheckpointError(_damaged(path, "does not have the content that its SHA-256 says"))
    return tensors, json.loads(header["facts"])


def _damaged(path: Path, what: str) -> str:
    return f"the checkpoint {str(path)!r} {what}. Use another copy, or start a new run."


def _digest(tensors: dict[str, Tensor], facts: str) -> str:
    sha = hashlib.sha256(facts.encode())
    for name in sorted(tensors):
        x = tensors[name]
        sha.update(f"{name} {x.dtype} {list(x.shape)}".encode())
        sha.update(x.reshape(-1).view(torch.uint8).numpy().data)
    return sha.hexdigest()


def path_of(run: str | Path) -> Path:
    """The checkpoint that an option names: a run's folder, or a file in one."""
    return Path(run) if Path(run).is_file() else Path(run) / NAME


def model_tensors(model: GPT) -> dict[str, Tensor]:
    """The weights, under the prefix model."""
    return {f"model.{name}": x for name, x in model.state_dict().items()}


def training_tensors(model: GPT, optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
    """What a run needs to go on, under the prefixes model. and optimizer."""
    tensors = model_tensors(model)
    for i, state in optimizer.state_dict()["state"].items():
        tensors |= {f"optimizer.{i}.{key}": x for key, x in state.items()}
    return tensors


def restore_training(tensors: dict[str, Tensor], model: GPT, optimizer: torch.optim.Optimizer) -> None:
    """The inverse of training_tensors; CheckpointError where the shapes do not fit."""
    restore_model(tensors, model)
    state: dict[int, dict[str, Tensor]] = {}
    for name, x in tensors.items():
        if name.startswith("optimizer."):
            _, i, key = name.split(".")
            state.setdefault(int(i), {})[key] = x
    optimizer.load_state_dict(optimizer.state_dict() | {"state": state})


def restore_model(tensors: dict[str, Tensor], model: GPT) -> None:
    """Load the weights; CheckpointError where names or shapes differ from the model's."""
    prefix = "model."
    weights = {n.removeprefix(prefix): x for n, x in tensors.items() if n.startswith(prefix)}
    try:
        model.load_state_dict(weights)
    except RuntimeError as error:
        reason = " ".join(str(error).split())
        raise CheckpointError(
            f"the checkpoint does not fit this version of flashproto: {reason}. "
            "Use the version that wrote it, or start a new run."
        ) from None


def model_parts(facts: dict) -> tuple[GPTConfig, AnyVocabulary]:
    """The configuration and the vocabulary of a checkpoint's model."""
    try:
        return GPTConfig(**facts["config"]), vocabulary_of(facts["vocabulary"])
    except (KeyError, TypeError, ValueError) as error:
        raise CheckpointError(
            f"the checkpoint's configuration does not fit this version of flashproto ({error!r}). "
            "Use the version that wrote it, or start a new run."
        ) from None
