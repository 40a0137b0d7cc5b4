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
from dataclasses import asdict, dataclass
from itertools import accumulate, pairwise
from pathlib import Path
from typing import Any, NoReturn, TypeVar

import torch
from torch import Tensor, nn

from ..checks import LARGEST, check_flag, check_integer, check_number, described, refuse

CONFIG, WEIGHTS, INDEX = "config.json", "model.safetensors", "model.safetensors.index.json"
LOAD, SAVE = "GPT.from_pretrained", "GPT.save_pretrained"
MOST_JSON = 1 << 26  # bytes of a JSON file
LARGEST_SIZE, MOST_LAYERS = 1 << 24, 1 << 12  # a parameter then has fewer than 2^63 bytes
DTYPES = {"F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
NAMES = {str(dtype).removeprefix("torch."): dtype for dtype in DTYPES.values()}
ANOTHER = "Use another copy."
ELSEWHERE = "Load the model with transformers, and see docs/doors.md."

Model = TypeVar("Model", bound=nn.Module)
Config = TypeVar("Config")


@dataclass(frozen=True)
class Kind:
    """A family of models: what its config.json and its tensors are called, and what it is here.

    sizes, options: keys of config.json and fields of GPTConfig; options may be missing there.
    eps, flags: keys of a number and of True or False, and what is meant where they are missing.
    only: keys of which some values alone are taken, first what is meant where they are missing.
    is_here: what GPTConfig has for all models of the family.
    modules: the names of a module here and there; several, where its rows are those of several there.
    """

    classes: tuple[str, str]
    sizes: dict[str, str]
    options: dict[str, str]
    eps: tuple[str, float]
    flags: dict[str, bool]
    only: dict[str, tuple[Any, ...]]
    is_here: dict[str, Any]
    prefix: str
    layers: str
    modules: dict[str, tuple[str, ...]]
    skipped: str  # tensors of old versions that are computed
    transposed: tuple[str, ...] = ()  # modules whose matrices lie the other way there


EVERYWHERE = {"window": None, "softcap": None, "sinks": False}
KINDS = {
    "gpt2": Kind(
        classes=("GPT2LMHeadModel", "GPT2Model"),
        sizes={
            "vocab_size": "vocab_size",
            "n_positions": "context",
            "n_embd": "d_model",
            "n_layer": "n_layers",
            "n_head": "n_heads",
        },
        options={"n_inner": "d_ff"},
        eps=("layer_norm_epsilon", 1e-5),
        flags={"tie_word_embeddings": True},
        only={
            "activation_function": ("gelu_new", "gelu_pytorch_tanh"),
            "scale_attn_weights": (True,),
            "scale_attn_by_inverse_layer_idx": (False,),
            "reorder_and_upcast_attn": (False,),
        },
        is_here={"norm": "layer", "mlp": "gelu", "positions": "learned", "bias": True} | EVERYWHERE,
        prefix="transformer.",
        layers="h",
        modules={
            "embedding": ("wte",),
            "positions": ("wpe",),
            "norm1": ("ln_1",),
            "attention.qkv": ("attn.c_attn",),
            "attention.out": ("attn.c_proj",),
            "norm2": ("ln_2",),
            "mlp.up": ("mlp.c_fc",),
            "mlp.down": ("mlp.c_proj",),
            "norm": ("ln_f",),
            "head": ("lm_head",),
        },
        skipped=r"h\.\d+\.attn\.(masked_)?bias",
        transposed=("attention.qkv", "attention.out", "mlp.up", "mlp.down"),
    ),
    "llama": Kind(
        classes=("LlamaForCausalLM", "LlamaModel"),
        sizes={
            "vocab_size": "vocab_size",
            "max_position_embeddings": "context",
            "hidden_size": "d_model",
            "num_hidden_layers": "n_layers",
            "num_attention_heads": "n_heads",
            "intermediate_size": "d_ff",
        },
        options={"num_key_value_heads": "n_kv_heads", "head_dim": "d_head"},
        eps=("rms_norm_eps", 1e-6),
        flags={"tie_word_embeddings": False, "attention_bias": False, "mlp_bias": False},
        only={
            "hidden_act": ("silu", "swish"),
            "partial_rotary_factor": (1.0,),
            "rope_interleaved": (False,),
        },
        is_here={"norm": "rms", "mlp": "swiglu", "positions": "rope"} | EVERYWHERE,
        prefix="model.",
        layers="layers",
        modules={
            "embedding": ("embed_tokens",),
            "norm1": ("input_layernorm",),
            "attention.qkv": ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
            "attention.out": ("self_attn.o_proj",),
            "norm2": ("post_attention_layernorm",),
            "mlp.up": ("mlp.gate_proj", "mlp.up_proj"),
            "mlp.down": ("mlp.down_proj",),
            "norm": ("norm",),
            "head": ("lm_head",),
        },
        skipped=r"layers\.\d+\.self_attn\.rotary_emb\.inv_freq",
    ),
}
RESOLVED = {"n_kv_heads": "kv_heads", "d_ff": "hidden", "d_head": "head_dim"}
HEAD = "lm_head.weight"

# Of RoPE as in Llama 3.1: keys of config.json and fields of RopeScaling.
LLAMA3 = {
    "factor": "factor",
    "low_freq_factor": "low_freq_factor",
    "high_freq_factor": "high_freq_factor",
    "original_max_position_embeddings": "original_context",
}

# Of every family: keys that have to be off.
OFF = {
    "is_encoder_decoder": (False,),
    "add_cross_attention": (False,),
    "pruned_heads": ({},),
    "chunk_size_feed_forward": (0,),
}

# What changes no logits: training, generation, labels, history.
NO_EFFECT = """
_attn_implementation_autoset _name_or_path _num_labels attention_dropout attn_implementation
attn_pdrop bad_words_ids begin_suppress_tokens bos_token_id decoder_start_token_id diversity_penalty
do_sample early_stopping embd_pdrop encoder_no_repeat_ngram_size eos_token_id
exponential_decay_length_penalty finetuning_task forced_bos_token_id forced_eos_token_id
gradient_checkpointing id2label initializer_range is_decoder is_llama_config label2id length_penalty
max_length min_length model_type n_ctx no_repeat_ngram_size num_beam_groups num_beams num_labels
num_return_sequences output_attentions output_hidden_states output_past output_scores pad_token_id
predict_special_tokens prefix pretraining_tp problem_type remove_invalid_values repetition_penalty
resid_pdrop return_dict return_dict_in_generate sep_token_id summary_activation
summary_first_dropout summary_proj_to_labels summary_type summary_use_proj suppress_tokens
task_specific_params temperature tf_legacy_loss tie_encoder_decoder tokenizer_class top_k top_p
torchscript transformers.js_config transformers_version typical_p unsloth_fixed unsloth_version
use_bfloat16 use_cache
"""


# --- config.json ----------------------------------------------------------------------------------


class Values:
    """Those of config.json, of which `take` gives a value once; `finish` refuses what was not taken."""

    def __init__(self, values: dict[str, Any]) -> None:
        self.left = dict(values)

    def refuse(self, key: str, got: object, takes: str, do: str = ELSEWHERE) -> NoReturn:
        refuse(LOAD, f"{key} in {CONFIG}", got, takes, do)

    def take(self, key: str, default: Any = None) -> Any:
        value = self.left.pop(key, None)
        return default if value is None else value

    def size(self, key: str, largest: int = LARGEST_SIZE) -> int:
        takes, where = f"an integer from 1 to {largest}", f"{key} in {CONFIG}"
        return check_integer(LOAD, where, self.take(key), 1, largest, takes, ANOTHER)

    def flag(self, key: str, default: bool) -> bool:
        return check_flag(LOAD, f"{key} in {CONFIG}", self.take(key, default))

    def only(self, key: str, values: tuple[Any, ...]) -> None:
        value = self.take(key, values[0])
        if value not in values:
            self.refuse(key, described(value), " or ".join(map(repr, values)))

    def finish(self) -> None:
        for key, value in self.left.items():
            if value is not None and key not in NO_EFFECT.split():
                self.refuse(key, described(value), "nothing of that name for such a model")


def read_config(values: dict[str, Any]) -> tuple[str, dict[str, Any], torch.dtype | None]:
    """The kind of config.json's model, its fields of GPTConfig, and the dtype that it names."""
    config = Values(values)
    name = values.get("model_type")
    if not isinstance(name, str) or name not in KINDS:
        config.refuse("model_type", described(name), " or ".join(map(repr, KINDS)))
    kind = KINDS[name]
    classes = config.take("architectures", [kind.classes[0]])
    if not isinstance(classes, list) or len(classes) != 1 or classes[0] not in kind.classes:
        config.refuse("architectures", described(classes), f"[{kind.classes[0]!r}]")
    fields = dict(kind.is_here)
    for key, field in kind.sizes.items():
        fields[field] = config.size(key, MOST_LAYERS if field == "n_layers" else LARGEST_SIZE)
    for key, field in kind.options.items():
        if values.get(key) is not None:
            most = LARGEST_SIZE // fields["n_heads"] if field == "d_head" else LARGEST_SIZE
            fields[field] = config.size(key, most)
    key, usual = kind.eps
    takes = "a finite number, 0 or more"
    eps = config.take(key, usual)
    fields["norm_eps"] = check_number(LOAD, f"{key} in {CONFIG}", eps, 0, LARGEST, takes, ELSEWHERE)
    flags = {key: config.flag(key, usual) for key, usual in kind.flags.items()}
    fields["tie_weights"] = flags["tie_word_embeddings"]
    if name == "llama":
        fields["bias"] = flags["attention_bias"]
        if flags["mlp_bias"] != fields["bias"]:
            config.refuse("mlp_bias", flags["mlp_bias"], f"that of attention_bias, {fields['bias']}")
        fields |= read_rope(config)
    for key, taken in (kind.only | OFF).items():
        config.only(key, taken)
    said = [(key, x) for key in ("torch_dtype", "dtype") if (x := config.take(key)) is not None]
    for key, x in said:
        if not isinstance(x, str) or x.removeprefix("torch.") not in NAMES:
            config.refuse(key, described(x), ", ".join(NAMES))
    config.finish()
    return name, fields, NAMES[said[-1][1].removeprefix("torch.")] if said else None


def read_rope(config: Values) -> dict[str, Any]:
    """rope_theta and rope_scaling, which stand by themselves or, since transformers 5, together in
    rope_parameters."""
    found: dict[str, Any] = {}
    theta = config.take("rope_theta")
    parts = [(key, config.take(key, {})) for key in ("rope_parameters", "rope_scaling")]
    for key, part in [*parts, ("rope_theta", {} if theta is None else {"rope_theta": theta})]:
        if not isinstance(part, dict):
            config.refuse(key, described(part), "an object")
        for inner, x in part.items():
            inner = "rope_type" if inner == "type" else inner
            if found.setdefault(inner, x) != x:
                takes = f"what stands there too, {described(found[inner])}"
                config.refuse(key, f"{inner} {described(x)}", takes, ANOTHER)
    inner = Values(found)
    kind = inner.take("rope_type", "default")
    if kind not in ("default", "llama3"):
        config.refuse("rope_scaling", f"of rope_type {described(kind)}", "'default' or 'llama3'")
    inner.only("partial_rotary_factor", (1.0,))
    fields = {"rope_theta": inner.take("rope_theta", 10000.0), "rope_scaling": None}
    if kind == "llama3":
        missing = [key for key in LLAMA3 if found.get(key) is None]
        if missing:
            got = f"without {missing[0]}"
            config.refuse("rope_scaling", got, "it with rope_type 'llama3'", ANOTHER)
        fields["rope_scaling"] = {field: inner.take(key) for key, field in LLAMA3.items()}
    for key, x in inner.left.items():
        if x is not None:
            got, takes = f"with {key} {described(x)}", f"nothing of that name for {kind!r}"
            config.refuse("rope_scaling", got, takes)
    return fields


def write_config(config: Any, dtype: torch.dtype) -> dict[str, Any]:
    """The inverse of read_config, of a GPTConfig; ValueError where it is of no kind."""
    name = "gpt2" if config.positions == "learned" else "llama"
    kind, do = KINDS[name], "Keep it as a state_dict."
    wanted = dict(kind.is_here)
    if name == "gpt2":
        wanted |= {"kv_heads": config.n_heads, "head_dim": config.d_model // config.n_heads}
    for field, value in wanted.items():
        if getattr(config, field) != value:
            got = described(getattr(config, field))
            refuse(SAVE, f"config.{field}", got, f"{value!r} in a {name}", do)
    keys = {
        key: getattr(config, RESOLVED.get(field, field))
        for key, field in (kind.sizes | kind.options).items()
    }
    values = {"architectures": [kind.classes[0]], "model_type": name} | keys
    values |= {kind.eps[0]: config.norm_eps, "tie_word_embeddings": config.tie_weights}
    if name == "llama":
        values |= {"attention_bias": config.bias, "mlp_bias": config.bias}
        values |= {"rope_theta": config.rope_theta, "rope_scaling": None}
        if config.rope_scaling is not None:
            numbers = asdict(config.rope_scaling)
            scaling = {key: numbers[field] for key, field in LLAMA3.items()}
            values["rope_scaling"] = {"rope_type": "llama3"} | scaling
    # transformers has tokens of its own where these are missing.
    tokens = dict.fromkeys(("bos_token_id", "eos_token_id", "pad_token_id"))
    return values | tokens | {"dtype": str(dtype).removeprefix("torch.")}


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
            for part in parts(self.kind, config, parameter):
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
