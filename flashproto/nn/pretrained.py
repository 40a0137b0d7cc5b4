"""Models of transformers' folders, config.json and safetensors, in and out: GPT-2 and Llama.

A folder is read as what a stranger wrote.  Only JSON and safetensors are opened.  What config.json
says is taken, known to change nothing, or refused by its name.  Tensors are compared with it by the
headers of their files, before any is made.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from itertools import accumulate, pairwise
from pathlib import Path
from typing import Any, NoReturn, TypeVar

import torch
from torch import Tensor, nn

from ..checks.errors import described, refuse
from .pretrained_config import (
    ANOTHER,
    CONFIG,
    DTYPES,
    ELSEWHERE,
    KINDS,
    LOAD,
    NAMES,
    SAVE,
    read_config,
    write_config,
)

WEIGHTS, INDEX = "model.safetensors", "model.safetensors.index.json"
HEAD = "lm_head.weight"
MOST_JSON = 1 << 26  # bytes of a JSON file

Model = TypeVar("Model", bound=nn.Module)
Config = TypeVar("Config")


# --- tensors --------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Part:
    """Rows of a parameter here, all of a tensor there."""

    name: str  # there, without the family's prefix
    rows: slice
    transposed: bool

    def of(self, x: Tensor) -> Tensor:
        """What the tensor there holds, as it lies there: a view of the parameter here."""
        x = x[self.rows]
        return x.T if self.transposed else x


def parts(name: str, config: Any, parameter: str) -> list[Part]:
    """Those of a parameter of a GPT with this config; [] for one that such a GPT has not."""
    kind = KINDS[name]
    module, _, leaf = parameter.rpartition(".")
    layer = re.match(r"blocks\.(\d+)\.", module)
    begin = f"{kind.layers}.{layer[1]}." if layer else ""
    module = module[layer.end() :] if layer else module
    theirs = kind.modules.get(module, ())
    transposed = leaf == "weight" and module in kind.transposed
    if len(theirs) <= 1:
        return [Part(f"{begin}{there}.{leaf}", slice(None), transposed) for there in theirs]
    q, kv = config.n_heads * config.head_dim, config.kv_heads * config.head_dim
    sizes = (q, kv, kv) if module == "attention.qkv" else (config.hidden,) * len(theirs)
    rows = pairwise(accumulate(sizes, initial=0))
    return [
        Part(f"{begin}{there}.{leaf}", slice(*between), transposed)
        for there, between in zip(theirs, rows, strict=True)
    ]


@dataclass(frozen=True)
class Header:
    """What a file says of a tensor, and the open file."""

    file: Any
    path: Path
    name: str  # in the file
    shape: list[int]
    dtype: str

    def refuse(self, got: str, takes: str, do: str = ANOTHER) -> NoReturn:
        refuse(LOAD, f"the tensor {self.name} in {self.path}", got, takes, do)

    def read(self) -> Tensor:
        return self.file.get_tensor(self.name)


class Folder:
    """A folder in transformers' layout: config.json as fields of GPTConfig, and the headers of its
    tensors by their names without the family's prefix.

    dtype: that of the model to be made, None for that of the files.
    """

    def __init__(self, folder: str | os.PathLike[str], dtype: torch.dtype | None = None) -> None:
        self.path = checked_path(LOAD, folder)
        if dtype is not None and dtype not in NAMES.values():
            takes = f"None or torch.{', torch.'.join(NAMES)}"
            refuse(LOAD, "dtype", described(dtype), takes, "Pass None.", TypeError)
        if not self.path.is_dir():
            do = "Nothing is downloaded: download it first, and pass where it lies."
            refuse(LOAD, "folder", repr(str(self.path)), "a folder that is there", do)
        values = read_json(self.path / CONFIG)
        try:
            self.kind, self.fields, self.said = read_config(values)
        except TypeError as error:  # of a value, not of an argument
            raise ValueError(*error.args) from None
        self.tensors = self._headers()
        if self.fields["n_layers"] > len(self.tensors):
            got = f"{self.fields['n_layers']} layers in {CONFIG} and {len(self.tensors)} tensors"
            refuse(LOAD, "the folder", got, "all tensors of all layers", ANOTHER)
        self.dtype = self._checked_dtype(dtype)

    def config(self, make: Callable[..., Config]) -> Config:
        """The fields as a GPTConfig."""
        try:
            return make(**self.fields)
        except (TypeError, ValueError) as error:
            path = self.path / CONFIG
            raise ValueError(f"{LOAD}: {path} is of no such model: {error}") from None

    def _headers(self) -> dict[str, Header]:
        kind, found = KINDS[self.kind], dict[str, Header]()
        for path, names in self._files().items():
            file = opened(path)
            held = set(file.keys())
            for name in sorted((names or held) ^ held):
                got = f"{'in' if name in held else 'missing from'} {path.name}"
                takes = f"what {INDEX} says"
                refuse(LOAD, f"the tensor {name}", got, takes, ANOTHER)
            for name in sorted(held):
                key = name.removeprefix(kind.prefix)
                header = file.get_slice(name)
                shape, dtype = header.get_shape(), header.get_dtype()
                made = Header(file, path, name, shape, dtype)
                if key in found:
                    made.refuse(f"there beside {found[key].name}", "one of them")
                if re.fullmatch(kind.skipped, key) is None:
                    found[key] = made
        return found

    def _files(self) -> dict[Path, set[str] | None]:
        """The files with the weights, and the tensors that the index says they hold."""
        if (self.path / WEIGHTS).is_file():
            return {self.path / WEIGHTS: None}
        index = self.path / INDEX
        if not index.is_file():
            pickled = sorted(path.name for path in self.path.glob("*.bin"))
            got = f"with {pickled[0]}, which is pickle, alone" if pickled else f"without {WEIGHTS}"
            do = "Write it with transformers: model.save_pretrained(folder)."
            refuse(LOAD, "folder", got, f"{WEIGHTS}, or {INDEX} and what that names", do)
        names = read_json(index).get("weight_map")
        if not isinstance(names, dict) or not names:
            refuse(LOAD, f"weight_map in {index}", described(names), "an object", ANOTHER)
        files: dict[Path, set[str] | None] = {}
        for name, file in names.items():
            named = isinstance(file, str) and re.fullmatch(r"[\w.-]+\.safetensors", file, re.ASCII)
            if not named or ".." in file:
                takes = "names of .safetensors files, without '/' and '..'"
                refuse(LOAD, f"the file of {name} in {INDEX}", file, takes, ANOTHER)
            if not (self.path / file).is_file():
                do = "Download it too."
                refuse(LOAD, f"the file {file} of {INDEX}", "missing", "all of its files", do)
            held = files.setdefault(self.path / file, set())
            assert held is not None
            held.add(name)
        return files

    def _checked_dtype(self, wanted: torch.dtype | None) -> torch.dtype:
        do = "Pass dtype=torch.float32, say, which converts them all."
        one = self.said
        for header in self.tensors.values():
            dtype = DTYPES.get(header.dtype)
            if dtype is None:
                header.refuse(f"of dtype {header.dtype}", ", ".join(DTYPES), ELSEWHERE)
            one = one or dtype
            if wanted is None and dtype != one:
                where = f"dtype in {CONFIG}" if self.said else "the other tensors"
                header.refuse(f"of {dtype}", f"{one}, that of {where}, where dtype is None", do)
        return wanted or one or torch.float32

    def fill(self, model: Model, config: Any, device: torch.device | str | None) -> Model:
        """`model`, which is on the device meta, with memory on `device` that holds the tensors."""
        left, places = dict(self.tensors), []
        for parameter, x in model.named_parameters():
            found = parts(self.kind, config, parameter)
            if not found:
                takes = f"parameters of a {self.kind}"
                refuse(LOAD, f"the parameter {parameter}", "there", takes, "Load a plain nn.GPT.")
            for part in found:
                header = left.pop(part.name, None)
                if header is None:
                    name = f"the tensor {part.name}"
                    refuse(LOAD, name, f"missing from {self.path}", "every tensor", ANOTHER)
                wanted = list(part.of(x).shape)
                if header.shape != wanted:
                    header.refuse(f"of shape {header.shape}", f"{wanted}, by {CONFIG}")
                places.append((parameter, part, header))
        if config.tie_weights and HEAD in left:
            self._check_tied(left.pop(HEAD))
        for header in left.values():
            header.refuse("there", f"tensors of a {self.kind} with this {CONFIG}", ELSEWHERE)
        model.to_empty(device=torch.get_default_device() if device is None else device)
        filled = dict(model.named_parameters())
        with torch.no_grad():
            for parameter, part, header in places:
                part.of(filled[parameter]).copy_(header.read())
        return model

    def _check_tied(self, head: Header) -> None:
        (part,) = parts(self.kind, None, "embedding.weight")
        embedding = self.tensors[part.name]
        same = head.shape == embedding.shape and head.dtype == embedding.dtype
        if not same or not torch.equal(head.read(), embedding.read()):
            takes = f"{embedding.name} again, where tie_word_embeddings in {CONFIG} is true"
            head.refuse("another tensor", takes)


# --- files ----------------------------------------------------------------------------------------


def checked_path(operator: str, folder: object) -> Path:
    if not isinstance(folder, (str, os.PathLike)) or isinstance(os.fspath(folder), bytes):
        refuse(operator, "folder", described(folder), "a path", "Pass a str or a Path.", TypeError)
    return Path(folder)


def safetensors(operator: str) -> Any:
    """The package, which is an extra."""
    try:
        import safetensors.torch

        return safetensors
    except ModuleNotFoundError as error:
        if error.name != "safetensors":
            raise
        takes, do = "it, which reads and writes weights", "Run: pip install safetensors."
        refuse(operator, "the package safetensors", "not installed", takes, do, ModuleNotFoundError)


def opened(path: Path) -> Any:
    """A safetensors file, whose header is then read and checked, and no tensor."""
    package = safetensors(LOAD)
    try:
        return package.safe_open(path, "pt")
    except package.SafetensorError as error:
        do = ANOTHER
        refuse(LOAD, str(path), f"damaged: {error}", "a whole safetensors file", do)


def read_json(path: Path) -> dict[str, Any]:
    do = ANOTHER
    if not path.is_file():
        refuse(LOAD, str(path), "missing", f"a folder with {CONFIG}", do)
    size = path.stat().st_size
    if size > MOST_JSON:
        refuse(LOAD, str(path), f"of {size} bytes", f"at most {MOST_JSON}", do)
    try:
        values = json.loads(path.read_bytes())
    except (ValueError, RecursionError) as error:
        refuse(LOAD, str(path), f"no JSON: {error}", "JSON", do)
    if not isinstance(values, dict):
        refuse(LOAD, str(path), described(values), "an object", do)
    return values


def save(model: nn.Module, made: nn.Module, config: Any, folder: str | os.PathLike[str]) -> None:
    """Write the two files.  made: a model of `config` on the device meta, to compare with."""
    path = checked_path(SAVE, folder)
    package = safetensors(SAVE)
    parameters = dict(model.named_parameters())
    check_as_made(parameters, made)
    dtypes = {p.dtype for p in parameters.values()}
    dtype = dtypes.pop()
    if dtypes or dtype not in NAMES.values():
        got = ", ".join(map(str, sorted({dtype, *dtypes}, key=str)))
        takes, do = f"one of {', '.join(NAMES)} for all", "Call model.to(torch.float32), say."
        refuse(SAVE, "the dtype of the parameters", got, takes, do)
    values = write_config(config, dtype)
    for name in (CONFIG, WEIGHTS, INDEX):
        if (path / name).exists():
            refuse(SAVE, "folder", f"one with a {name}", "one without", "Pass a new one.")
    kind = KINDS[values["model_type"]]
    tensors = {}
    for parameter, p in parameters.items():
        for part in parts(values["model_type"], config, parameter):
            name = part.name if part.name == HEAD else kind.prefix + part.name
            tensors[name] = part.of(p.detach()).cpu().contiguous()
    path.mkdir(parents=True, exist_ok=True)
    partial = path / f"{WEIGHTS}.partial"
    try:
        package.torch.save_file(tensors, partial, {"format": "pt"})
        os.replace(partial, path / WEIGHTS)
    except package.SafetensorError as error:
        raise OSError(f"{SAVE}: {path / WEIGHTS} could not be written: {error}") from None
    finally:
        partial.unlink(missing_ok=True)
    (path / CONFIG).write_text(json.dumps(values, indent=2) + "\n", encoding="utf-8")


def check_as_made(parameters: dict[str, nn.Parameter], made: nn.Module) -> None:
    """Refuse a model that an adapter, quantization, sharding or a new size has changed."""
    wanted = {name: p.shape for name, p in made.named_parameters()}
    changed: Iterable[str] = sorted(parameters.keys() ^ wanted.keys())
    for name in [*changed, *wanted]:
        p = parameters.get(name)
        plain = type(p) is nn.Parameter and not p.is_meta
        if not plain or p is None or p.shape != wanted.get(name):
            got = "missing" if p is None else f"of shape {list(p.shape)} on {p.device}"
            takes = f"a plain one of shape {list(wanted[name])}" if name in wanted else "none"
            do = "Merge adapters, gather shards, or keep a state_dict."
            refuse(SAVE, f"the parameter {name}", got, f"{takes}, by the model's config", do)
