"""Checkpoints that several processes write together, with torch.distributed.checkpoint.

A folder holds the tensors of one save, each process's part in a file of its own; its facts.json holds
the same facts as a checkpoint of one process, and the SHA-256 of every file.  A run has two such
folders and writes to them in turn.  The file `latest` names the one that is whole, with the SHA-256 of
its facts.json.  It is written last, so that a run that is killed while it saves keeps the checkpoint
before.

Any number of processes can read it, one alone as well.  Like all that torch pickles, read it only from
where you trust.
"""

from __future__ import annotations

import hashlib
import json
import shutil
import warnings
from collections.abc import Callable, Mapping
from pathlib import Path

import torch
import torch.distributed.checkpoint as dcp
from checkpoint import FORMAT, write_atomically
from errors import CheckpointError, WriteError
from parallel import World, laid_out_as
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.futures import Future

from flashproto.nn import GPT

LATEST, FACTS = "latest", "facts.json"
FOLDERS = ("checkpoint-a", "checkpoint-b")


def save(run: Path, tensors: Mapping[str, Tensor], facts: dict, world: World) -> None:
    """Write tensors (whole or sharded) and JSON-able facts as the latest checkpoint in folder `run`.

    Called by every process; WriteError where that fails in one.
    """
    folder = run / world.from_main(lambda: _next(run))
    try:
        dcp.save(dict(tensors), storage_writer=_Writer(folder))
    except CheckpointException as error:
        raise _not_written(folder, error) from None
    names = world.from_main(lambda: sorted(p.name for p in folder.iterdir()))
    digests = {name: _sha256(folder / name) for name in names[world.rank :: world.size]}
    files = {name: digest for part in world.gathered(digests) for name, digest in part.items()}
    if world.main:
        write_atomically(
            folder / FACTS, json.dumps({"format": FORMAT, "facts": facts, "files": files}).encode()
        )
        write_atomically(run / LATEST, f"{folder.name} {_sha256(folder / FACTS)}".encode())


Layout = Callable[[str, torch.Size], Tensor | None]


def whole(name: str, shape: torch.Size) -> None:
    """The layout of tensors that are whole, on the CPU."""


def layout_of(model: GPT, optimizer: torch.optim.Optimizer) -> Layout:
    """For the name and the shape of a checkpoint's tensor the parameter that it lies in memory as; None
    for one that every process has."""
    parameters = {f"model.{name}": p for name, p in model.named_parameters()}
    of_state = [p for group in optimizer.param_groups for p in group["params"]]

    def layout(name: str, shape: torch.Size) -> Tensor | None:
        kind, number, *_ = name.split(".")
        p = of_state[int(number)] if kind == "optimizer" else parameters.get(name)
        return p if p is not None and p.shape == shape else None

    return layout


def laid_out(tensors: dict[str, Tensor], layout: Layout) -> dict[str, Tensor]:
    """Whole tensors, each sharded as its layout is."""
    return {name: laid_out_as(x, layout(name, x.shape)) for name, x in tensors.items()}


def load(run: Path, world: World, layout: Layout = whole) -> tuple[dict[str, Tensor], dict]:
    """The tensors and the facts of the latest checkpoint; CheckpointError for a damaged one."""
    folder, content = _read_facts(run)
    files = sorted(content["files"].items())
    for name, digest in files[world.rank :: world.size]:
        path = folder / name
        if not path.is_file():
            raise CheckpointError(_damaged(path, "is missing"))
        if _sha256(path) != digest:
            raise CheckpointError(_damaged(path, "does not have the content that its SHA-256 says"))
    world.gathered(None)  # all are whole
    try:
        reader = dcp.FileSystemReader(folder)
        saved = reader.read_metadata().state_dict_metadata
        tensors = {}
        for name, what in saved.items():
            assert isinstance(what, TensorStorageMetadata)
            other = layout(name, what.size)
            dtype = what.properties.dtype
            tensors[name] = (
                torch.empty(what.size, dtype=dtype)
                if other is None
                else torch.empty_like(other, dtype=dtype)
            )
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "torch.distributed is disabled")
            dcp.load(tensors, storage_reader=reader)
    except (CheckpointException, ImportError, AttributeError, AssertionError) as error:
        reason = " ".join(str(error).split())[-200:]
        raise CheckpointError(
            f"the checkpoint {str(folder)!r} does not fit torch {torch.__version__}: {reason}. "
            "Use the version that wrote it, or start a new run."
        ) from None
    return tensors, content["facts"]


def _read_facts(run: Path) -> tuple[Path, dict]:
    latest = run / LATEST
    try:
        name, digest = latest.read_text().split()
        folder = run / name
        if name not in FOLDERS:
            raise ValueError(f"it names {name!r}")
        if _sha256(folder / FACTS) != digest:
            raise ValueError(f"{folder / FACTS} does not have the content that its SHA-256 says")
        content = json.loads((folder / FACTS).read_bytes())
        if content["format"] != FORMAT:
            raise ValueError(f"its format is {content['format']!r}, not {FORMAT!r}")
        return folder, content
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise CheckpointError(
            _damaged(latest, f"names no checkpoint that can be read: {error}")
        ) from None


def _next(run: Path) -> str:
    """The folder that is not the latest, without what a killed run left in it."""
    latest = run / LATEST
    name = FOLDERS[latest.is_file() and latest.read_text().startswith(FOLDERS[0])]
    try:
        if (run / name).exists():
            shutil.rmtree(run / name)
    except OSError as error:
        raise WriteError(run / name, error) from None
    return name


class _Writer(dcp.FileSystemWriter):
    """Raises the error of the file system, which torch.save hides behind its own: what other processes
    are told of an error does not hold those behind it."""

    def write_data(self, plan: dcp.SavePlan, planner: dcp.SavePlanner) -> Future:
        try:
            return super().write_data(plan, planner)
        except Exception as error:
            cause: BaseException | None = error
            while cause is not None and not isinstance(cause, OSError):
                cause = cause.__cause__ or cause.__context__
            raise cause or error from None


def _not_written(folder: Path, error: CheckpointException) -> Exception:
    """What went wrong in the first process that failed."""
    rank, (reason, _) = min(error.failures.items())
    if isinstance(reason, OSError):
        return WriteError(folder, reason, f" in rank {rank}; the checkpoint before is whole")
    return RuntimeError(f"rank {rank} could not write {folder}: {reason!r}")


def _sha256(path: Path) -> str:
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _damaged(path: Path, what: str) -> str:
    return f"the file {str(path)!r} of a checkpoint {what}. Use another copy, or start a new run."
