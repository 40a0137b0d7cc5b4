"""Checkpoints of a run in one process or several: written by all together, read by any number.

One process writes the file of checkpoint.py.  Several write a folder with torch.distributed.checkpoint:
each its part of the tensors in a file of its own, and facts.json with the same facts and the SHA-256 of
every file.  A run has two such folders and writes to them in turn.  The file `latest` names the whole
one, with the SHA-256 of its facts.json.  It is written last: a run that is killed while it saves keeps
the checkpoint before.

Like all that torch pickles, read such a folder only from where you trust.
"""

from __future__ import annotations

import hashlib
import json
import shutil
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

import checkpoint
import pretrained_folder
import torch
import torch.distributed.checkpoint as dcp
from checkpoint import FOLDERS, FORMAT, LATEST, NAME, write_atomically
from errors import CheckpointError, WriteError
from parallel import ALONE, World, laid_out_as
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.futures import Future

from flashproto.nn import GPT

FACTS = "facts.json"

# The tensor that the one of a name and a shape in a checkpoint is to lie in memory as; None: whole.
Layout = Callable[[str, torch.Size], Tensor | None]


def whole_tensors(name: str, shape: torch.Size) -> None:
    """The layout in which every process has all of every tensor, on the CPU."""


def layout_of(model: GPT, optimizer: torch.optim.Optimizer) -> Layout:
    """The layout of a model's parameters, and of the optimizer's state that is of their shape."""
    parameters = {f"model.{name}": p for name, p in model.named_parameters()}
    optimized = [p for group in optimizer.param_groups for p in group["params"]]

    def layout(name: str, shape: torch.Size) -> Tensor | None:
        kind, number, *_ = name.split(".")
        p = optimized[int(number)] if kind == "optimizer" else parameters.get(name)
        return p if p is not None and p.shape == shape else None

    return layout


@dataclass(frozen=True)
class Saved:
    """A checkpoint that is whole: its facts, and its tensors in the layout that is wanted."""

    facts: dict
    tensors: Callable[[Layout], dict[str, Tensor]]


def find(source: str | Path, world: World = ALONE) -> Saved:
    """What an option names: a run's folder or a file in it, or a folder in transformers' layout;
    CheckpointError where it is damaged.

    Called by every process: each looks at its part of the files.
    """
    source = Path(source)
    if not (source / LATEST).is_file():
        if pretrained_folder.is_pretrained(source):
            tensors, facts = pretrained_folder.load(source)
        else:
            tensors, facts = checkpoint.load(checkpoint.path_of(source))

        def laid_out(layout: Layout) -> dict[str, Tensor]:
            return {name: laid_out_as(x, layout(name, x.shape)) for name, x in tensors.items()}

        return Saved(facts, laid_out)
    folder, written, content = _facts(source)
    files = sorted(content["files"].items())
    for name, digest in files[world.rank :: world.size]:
        path = folder / name
        if not path.is_file():
            raise CheckpointError(_damaged(path, "is missing"))
        if _sha256(path) != digest:
            raise CheckpointError(_damaged(path, "does not have the content that its SHA-256 says"))
    world.gathered(None)  # the others' are whole too

    def read(layout: Layout) -> dict[str, Tensor]:
        try:
            return _read(folder, layout)
        finally:
            if not (folder / FACTS).is_file() or _sha256(folder / FACTS) != written:
                raise CheckpointError(
                    f"the checkpoint {str(folder)!r} was written anew while it was read: its run goes "
                    "on. Run the same command again."
                )

    return Saved(content["facts"], read)


def save(run: Path, tensors: dict[str, Tensor], facts: dict, world: World) -> None:
    """Write tensors (whole or sharded) and JSON-able facts as the checkpoint of the folder `run`, in
    the place of the one before.

    Called by every process; WriteError where one cannot write.
    """
    if world.size == 1:
        checkpoint.save(run / NAME, tensors, facts)
        for name in (LATEST, *FOLDERS):  # in this order: what `latest` names is whole
            _remove(run / name)
    else:
        save_together(run, tensors, facts, world)
        if world.main:
            _remove(run / NAME)


def save_together(run: Path, tensors: Mapping[str, Tensor], facts: dict, world: World) -> None:
    """`save` to a folder that the processes share."""
    folder = run / world.from_main(lambda: _next(run))
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "torch.distributed is disabled")
            dcp.save(dict(tensors), storage_writer=_Writer(folder))
    except CheckpointException as error:
        raise _not_written(folder, error) from None
    names = world.from_main(lambda: sorted(p.name for p in folder.iterdir()))
    digests = {name: _sha256(folder / name) for name in names[world.rank :: world.size]}
    files = {name: digest for part in world.gathered(digests) for name, digest in part.items()}
    if world.main:
        content = {"format": FORMAT, "facts": facts, "files": files}
        write_atomically(folder / FACTS, json.dumps(content).encode())
        write_atomically(run / LATEST, f"{folder.name} {_sha256(folder / FACTS)}".encode())


def _read(folder: Path, layout: Layout) -> dict[str, Tensor]:
    try:
        reader = dcp.FileSystemReader(folder)
        tensors = {}
        for name, what in reader.read_metadata().state_dict_metadata.items():
            assert isinstance(what, TensorStorageMetadata)
            other, dtype = layout(name, what.size), what.properties.dtype
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
    return tensors


def _facts(run: Path) -> tuple[Path, str, dict]:
    """The latest folder of a run, and the SHA-256 and the content of its facts.json."""
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
        return folder, digest, content
    except (OSError, ValueError, KeyError, TypeError) as error:
        what = f"names no checkpoint that can be read: {error}"
        raise CheckpointError(_damaged(latest, what)) from None


def _next(run: Path) -> str:
    """The folder that is not the latest, without what a killed run left in it."""
    latest = run / LATEST
    name = FOLDERS[latest.is_file() and latest.read_text().startswith(FOLDERS[0])]
    _remove(run / name)
    return name


def _remove(path: Path) -> None:
    try:
        if path.is_dir():
            shutil.rmtree(path)
        else:
            path.unlink(missing_ok=True)
    except OSError as error:
        raise WriteError(path, error) from None


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
        return WriteError(folder, reason, f" in rank {rank}; what was saved before is whole")
    return RuntimeError(f"rank {rank} could not write {folder}: {reason!r}")


def _sha256(path: Path) -> str:
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _damaged(path: Path, what: str) -> str:
    return f"the file {str(path)!r} of a checkpoint {what}. Use another copy, or start a new run."
