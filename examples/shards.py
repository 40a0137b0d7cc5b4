"""Token ids in files: a folder that prepare_data.py wrote.

    train-00000.bin, ...        ids without a header, uint16 or (for more than 65536 of them) uint32
    validation-00000.bin, ...
    tokenizer.json
    index.json                  written last: how many ids each file has, and their SHA-256

The files are mapped into memory: what is not looked at is not read.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from bars import bar
from errors import AGAIN, DataError, WriteError
from torch import Tensor
from vocabulary import BPE

INDEX, TOKENIZER, FORMAT = "index.json", "tokenizer.json", "flashproto-tokens-1"
SPLITS = ("train", "validation")
UNFINISHED = "unfinished"  # an empty file, made before all others and removed after the index
BLOCK = 1 << 22  # bytes read at a time


def token_dtype(vocab_size: int) -> np.dtype:
    """Of the ids in the files, little-endian."""
    return np.dtype("<u2" if vocab_size <= 1 << 16 else "<u4")


class Tokens:
    """The ids of several files as one array [N]: a slice or a tensor of places gives them as int64."""

    def __init__(self, files: list[np.ndarray]) -> None:
        self.files = files
        self.ends = np.cumsum([len(ids) for ids in files])

    def __len__(self) -> int:
        return int(self.ends[-1]) if len(self.ends) else 0

    def __getitem__(self, where: slice | Tensor) -> Tensor:
        if isinstance(where, slice):
            where = torch.from_numpy(np.arange(*where.indices(len(self))))
        flat = where.reshape(-1).numpy()
        file_of = np.searchsorted(self.ends, flat, side="right")
        ids = np.empty(len(flat), np.int64)
        for i in np.unique(file_of):
            here = file_of == i
            ids[here] = self.files[i][flat[here] - (self.ends[i] - len(self.files[i]))]
        return torch.from_numpy(ids).view(where.shape)


@dataclass(frozen=True)
class TokenFolder:
    sha256: str  # of the index, which has those of the files
    vocabulary: BPE
    train: Tokens
    validation: Tokens

    @classmethod
    def open(cls, folder: Path, checksums: bool = True, part: slice = slice(None)) -> TokenFolder:
        """Map the files; DataError where one is missing, or where its size or (with checksums) its
        content is not what the index says.

        part: the files whose checksums this process looks at.
        """
        content = read(folder / INDEX, folder)
        try:
            index = json.loads(content)
            if index["format"] != FORMAT:
                raise ValueError(f"format {index['format']!r}")
            dtype = token_dtype(index["vocab_size"])
            entries: list[dict[str, Any]] = [e for split in SPLITS for e in index[split]["shards"]]
            sizes = {e["file"]: int(e["tokens"]) * dtype.itemsize for e in entries}
            sums = {e["file"]: str(e["sha256"]) for e in entries}
            sums[TOKENIZER] = index["tokenizer_sha256"]
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise DataError(
                f"{folder / INDEX} is not an index of this version ({error!r}). {again(folder)}"
            ) from None
        tokenizer = read(folder / TOKENIZER, folder)
        if hashlib.sha256(tokenizer).hexdigest() != sums.pop(TOKENIZER):
            raise DataError(f"{folder / TOKENIZER} is not the one of the shards. {again(folder)}")
        for name, expected in sizes.items():
            try:
                found = (folder / name).stat().st_size
            except OSError as error:
                raise DataError(
                    f"the shard {folder / name} cannot be read ({error.strerror}); {INDEX} says it has "
                    f"{expected} bytes. {again(folder)}"
                ) from None
            if found != expected:
                raise DataError(
                    f"the shard {folder / name} has {found} bytes; {INDEX} says {expected}. "
                    f"{again(folder)}"
                )
        if checksums:
            check_sums(folder, dict([*sums.items()][part]), sizes)
        train, validation = (
            Tokens([map_file(folder / e["file"], dtype) for e in index[split]["shards"]])
            for split in SPLITS
        )
        sha256 = hashlib.sha256(content).hexdigest()
        return cls(sha256, BPE(tokenizer.decode()), train, validation)


def again(folder: Path) -> str:
    return f"Restore it from a copy, or prepare the text again: prepare_data.py TEXT --out {folder}."


def read(path: Path, folder: Path) -> bytes:
    try:
        return path.read_bytes()
    except FileNotFoundError:
        begun = any(folder.glob("train-*.bin"))
        why = "its preparation did not end" if begun else "prepare_data.py did not write it"
        raise DataError(
            f"--data is the folder {str(folder)!r} without {path.name}: {why}. It takes a text file or "
            "a folder of tokens: python examples/prepare_data.py TEXT --out FOLDER makes one."
        ) from None
    except OSError as error:
        raise DataError(f"{path} cannot be read ({error.strerror}). Make it readable.") from None


def map_file(path: Path, dtype: np.dtype) -> np.ndarray:
    """numpy cannot map an empty file."""
    return np.memmap(path, dtype, "r") if path.stat().st_size else np.empty(0, dtype)


def check_sums(folder: Path, sums: dict[str, str], sizes: dict[str, int]) -> None:
    """Read every shard, several at a time; DataError for one whose SHA-256 is another."""
    size = sum(sizes[name] for name in sums)
    shown = bar(0.5, total=size, desc="checksums", unit="B", unit_scale=True, leave=False)

    def digest(name: str) -> str:
        sha = hashlib.sha256()
        with open(folder / name, "rb") as file:
            while block := file.read(BLOCK):
                sha.update(block)
                shown.update(len(block))
        return sha.hexdigest()

    with shown, ThreadPoolExecutor(min(8, os.cpu_count() or 1)) as pool:
        for name, found in zip(sums, pool.map(digest, sums), strict=True):
            if found != sums[name]:
                pool.shutdown(wait=False, cancel_futures=True)
                raise DataError(
                    f"the shard {folder / name} was altered: its SHA-256 is {found}; {INDEX} says "
                    f"{sums[name]}. {again(folder)}"
                )


class ShardWriter:
    """Writes the ids of one split to files of at most `most` ids."""

    def __init__(self, folder: Path, split: str, dtype: np.dtype, most: int) -> None:
        self.folder, self.split, self.dtype, self.most = folder, split, dtype, most
        self.entries: list[dict[str, Any]] = []
        self.file: Any = None

    def write(self, ids: list[int]) -> None:
        rest = np.asarray(ids, self.dtype)
        while len(rest):
            if self.file is None:
                self._begin()
            entry = self.entries[-1]
            part, rest = np.split(rest, [self.most - entry["tokens"]])
            self.sha.update(part.tobytes())
            try:
                self.file.write(part.tobytes())
            except OSError as error:
                raise self._not_written(error) from None
            entry["tokens"] += len(part)
            if entry["tokens"] == self.most:
                self.close()

    def close(self) -> None:
        """End the file: it is on the disk."""
        if self.file is not None:
            try:
                self.file.flush()
                os.fsync(self.file.fileno())
                self.file.close()
            except OSError as error:
                raise self._not_written(error) from None
            self.file = None
            self.entries[-1]["sha256"] = self.sha.hexdigest()

    @property
    def path(self) -> Path:
        """Of the file that is written."""
        return self.folder / self.entries[-1]["file"]

    def _begin(self) -> None:
        self.entries.append({"file": f"{self.split}-{len(self.entries):05}.bin", "tokens": 0})
        self.sha = hashlib.sha256()
        try:
            self.file = open(self.path, "wb")  # noqa: SIM115
        except OSError as error:
            raise WriteError(self.path, error, then=AGAIN) from None

    def _not_written(self, error: OSError) -> WriteError:
        with contextlib.suppress(OSError):
            self.file.close()  # which would try again when the process ends
        return WriteError(self.path, error, then=AGAIN)


def left_over(folder: Path) -> Iterator[Path]:
    """What a preparation that did not end has left in the folder; nothing where none began."""
    if not (folder / UNFINISHED).is_file():
        return
    shards = (f"{split}-?????.bin" for split in SPLITS)
    for pattern in (*shards, TOKENIZER, f"{TOKENIZER}.partial", f"{INDEX}.partial", UNFINISHED):
        yield from folder.glob(pattern)
