"""Folders in transformers' layout: models of theirs give the same logits here and come back bit for
bit; what is unknown, damaged or of another model is refused by its name, before memory is taken."""

from __future__ import annotations

import dataclasses
import json
import math
import shutil
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from flashproto import backends, nn
from flashproto.nn import GPT, GPTConfig, RopeScaling, pretrained

safetensors = pytest.importorskip("safetensors.torch", reason="safetensors is not installed")

CONFIG, WEIGHTS, INDEX = pretrained.CONFIG, pretrained.WEIGHTS, pretrained.INDEX
SCALING = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
LLAMA3 = {"rope_type": "llama3", **SCALING, "original_max_position_embeddings": 16}
GPT2 = GPTConfig(64, 48, 2, 4, 32)
LLAMA = GPTConfig(
    *(64, 48, 2, 4, 32),
    n_kv_heads=2,
    d_ff=48,
    norm="rms",
    mlp="swiglu",
    positions="rope",
    bias=False,
    tie_weights=False,
    rope_scaling=RopeScaling(**SCALING, original_context=16),
)
MODELS = {
    "gpt2": GPT2,
    "gpt2, untied": dataclasses.replace(GPT2, tie_weights=False, d_ff=48, norm_eps=1e-6),
    "llama": LLAMA,
    "llama, tied": dataclasses.replace(LLAMA, tie_weights=True, rope_scaling=None, rope_theta=5e5),
    "llama, biases": dataclasses.replace(LLAMA, bias=True, n_kv_heads=None, d_head=16),
}


@pytest.fixture(autouse=True)
def on_torch() -> Iterator[None]:
    before = backends.get_default()
    backends.set_default("torch")
    yield
    backends.set_default(before)


def drawn(config: GPTConfig, dtype: torch.dtype = torch.float32) -> GPT:
    """A model all of whose parameters matter."""
    torch.manual_seed(0)
    model = GPT(config, dtype=dtype)
    with torch.no_grad():
        for p in model.parameters():
            p.copy_(torch.randn(p.shape) * (p.shape[-1] ** -0.5 if p.ndim > 1 else 1.0))
    return model


def saved(folder: Path, config: GPTConfig = LLAMA) -> Path:
    drawn(config).save_pretrained(folder)
    return folder


def changed(folder: Path, **values: Any) -> None:
    """config.json with other values; ... takes one out."""
    path = folder / CONFIG
    whole = json.loads(path.read_text()) | values
    path.write_text(json.dumps({key: x for key, x in whole.items() if x is not ...}))


def rewritten(folder: Path, change: Callable[[dict[str, Tensor]], Any]) -> None:
    tensors = safetensors.load_file(folder / WEIGHTS)
    change(tensors)
    safetensors.save_file(tensors, folder / WEIGHTS)


def sharded(folder: Path, n: int = 3) -> dict[str, str]:
    """The tensors in n files and an index, in the place of one; returns which is where."""
    tensors = safetensors.load_file(folder / WEIGHTS)
    (folder / WEIGHTS).unlink()
    names = [f"model-{i + 1:05}-of-{n:05}.safetensors" for i in range(n)]
    where = {name: names[i % n] for i, name in enumerate(sorted(tensors))}
    for file in names:
        held = {name: x for name, x in tensors.items() if where[name] == file}
        safetensors.save_file(held, folder / file, {"format": "pt"})
    indexed(folder, where)
    return where


def indexed(folder: Path, where: object) -> None:
    (folder / INDEX).write_text(json.dumps({"metadata": {"total_size": 1}, "weight_map": where}))


# --- ours, out and in -----------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", MODELS)
def test_what_is_saved_comes_back_bit_for_bit(tmp_path: Path, name: str, dtype: torch.dtype) -> None:
    model = drawn(MODELS[name], dtype)
    model.save_pretrained(tmp_path / "new" / "folder")
    assert {path.name for path in (tmp_path / "new" / "folder").iterdir()} == {CONFIG, WEIGHTS}
    same = GPT.from_pretrained(str(tmp_path / "new" / "folder"))
    mine, theirs = model.state_dict(), same.state_dict()
    assert mine.keys() == theirs.keys()
    for key, x in mine.items():
        assert x.dtype == theirs[key].dtype == dtype
        assert torch.equal(x, theirs[key]), key
    for field in ("kv_heads", "head_dim", "hidden", "rope_scaling", "rope_theta", "norm_eps", "bias"):
        assert getattr(same.config, field) == getattr(model.config, field), field
    tokens = torch.randint(64, (2, 20))
    assert torch.equal(model(tokens)[0], same(tokens)[0])
    _, loss = same(tokens, tokens)
    loss.backward()
    assert all(p.is_leaf and p.grad is not None for p in same.parameters())


def test_memory_is_taken_once(tmp_path: Path) -> None:
    """On a device that is not meta: as much as the parameters take, and nothing to draw them."""

    class Watch(TorchDispatchMode):
        taken = 0
        ran: set[str]

        def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
            out = func(*args, **(kwargs or {}))
            if isinstance(out, Tensor) and not out.is_meta:
                name = func.overloadpacket.__name__
                self.ran.add(name)
                self.taken += out.numel() * out.element_size() * ("empty" in name)
            return out

    saved(tmp_path)
    with Watch() as watch:
        watch.ran = set()
        model = GPT.from_pretrained(tmp_path, dtype=torch.bfloat16)
    assert watch.taken == 2 * model.parameter_count()
    assert "copy_" in watch.ran
    assert watch.ran.isdisjoint({"normal_", "zero_", "zeros", "fill_", "clone", "_to_copy", "cat"})


def test_dtype_and_device(tmp_path: Path) -> None:
    model = saved(tmp_path, GPT2) and GPT.from_pretrained(tmp_path, dtype=torch.float64, device="cpu")
    assert {p.dtype for p in model.parameters()} == {torch.float64}
    assert GPT.from_pretrained(tmp_path, impl="reference").blocks[0].attention.impl == "reference"
    meta = GPT.from_pretrained(tmp_path, device="meta")
    assert all(p.is_meta for p in meta.parameters())
    wpe = "transformer.wpe.weight"
    rewritten(tmp_path, lambda t: t.update({wpe: t[wpe].half()}))
    with pytest.raises(ValueError, match=r"transformer.wpe.weight .* is of torch.float16; it takes "):
        GPT.from_pretrained(tmp_path)
    assert GPT.from_pretrained(tmp_path, dtype=torch.float32).positions.weight.dtype == torch.float32
    changed(tmp_path, dtype=None)
    with pytest.raises(ValueError, match=r"of the other tensors, where dtype is None\. Pass dtype="):
        GPT.from_pretrained(tmp_path)
    changed(tmp_path, torch_dtype="float16")
    with pytest.raises(ValueError, match=r"is of torch.float32; .* that of dtype in config.json"):
        GPT.from_pretrained(tmp_path)


def test_a_class_with_more_parameters_is_refused(tmp_path: Path) -> None:
    class Wider(GPT):
        def __init__(self, *args: Any, **options: Any) -> None:
            super().__init__(*args, **options)
            self.more = torch.nn.Linear(3, 3)

    saved(tmp_path)
    with pytest.raises(ValueError, match=r"the parameter more.weight is there; it takes parameters of"):
        Wider.from_pretrained(tmp_path)


def test_generate_continues_as_the_whole_forward_does(tmp_path: Path) -> None:
    """Through the cache, with scaled RoPE and heads of a width of their own."""
    config = dataclasses.replace(LLAMA, d_head=12)
    model = GPT.from_pretrained(saved(tmp_path, config))
    tokens = torch.randint(64, (2, 30))
    with torch.no_grad():
        text = model.generate(tokens, 10, temperature=0)
        want = model(text[:, :-1])[0][:, 29:].argmax(-1)
    assert torch.equal(text[:, 30:], want)


# --- what others have written ---------------------------------------------------------------------


def without_prefix(tensors: dict[str, Tensor]) -> None:
    for name in [*tensors]:
        tensors[name.removeprefix("transformer.").removeprefix("model.")] = tensors.pop(name)


OLD = {
    GPT2: {"attn.bias": torch.ones(1, 1, 4, 4, dtype=torch.bool), "attn.masked_bias": torch.ones(())},
    LLAMA: {"self_attn.rotary_emb.inv_freq": torch.ones(4)},
}


@pytest.mark.parametrize("config", [GPT2, LLAMA], ids=["gpt2", "llama"])
def test_names_of_old_versions_and_of_bare_models(tmp_path: Path, config: GPTConfig) -> None:
    saved(tmp_path, config)
    rewritten(tmp_path, without_prefix)

    def add(tensors: dict[str, Tensor], layer: str) -> None:
        for name, x in OLD[config].items():
            tensors |= {f"{layer}.{i}.{name}": x.clone() for i in range(2)}

    rewritten(tmp_path, lambda t: add(t, "h" if config is GPT2 else "layers"))
    changed(tmp_path, architectures=["GPT2Model" if config is GPT2 else "LlamaModel"])
    tokens = torch.randint(64, (1, 9))
    assert torch.equal(GPT.from_pretrained(tmp_path)(tokens)[0], drawn(config)(tokens)[0])


def test_a_head_beside_a_tied_embedding_is_the_same(tmp_path: Path) -> None:
    saved(tmp_path, GPT2)
    wte = safetensors.load_file(tmp_path / WEIGHTS)["transformer.wte.weight"]
    rewritten(tmp_path, lambda t: t.update({"lm_head.weight": wte.clone()}))
    assert torch.equal(GPT.from_pretrained(tmp_path).embedding.weight, wte)
    for other in (wte + 1, wte[:-1].clone(), wte.half()):
        rewritten(tmp_path, lambda t, x=other: t.update({"lm_head.weight": x}))
        with pytest.raises(ValueError, match=r"lm_head.weight .* tie_word_embeddings"):
            GPT.from_pretrained(tmp_path, dtype=torch.float32)


@pytest.mark.parametrize(
    "values",
    [
        {"rope_theta": 5e5, "rope_scaling": LLAMA3},
        {"rope_theta": 5e5, "rope_scaling": {"type": "llama3", **LLAMA3}},
        {"rope_theta": ..., "rope_scaling": ..., "rope_parameters": {"rope_theta": 5e5, **LLAMA3}},
        {"rope_theta": 5e5, "rope_scaling": None, "rope_parameters": {"rope_theta": 5e5, **LLAMA3}},
    ],
)
def test_rope_as_versions_write_it(tmp_path: Path, values: dict[str, Any]) -> None:
    changed(saved(tmp_path), **values)
    config = GPT.from_pretrained(tmp_path).config
    assert (config.rope_theta, config.rope_scaling) == (5e5, LLAMA.rope_scaling)


def test_defaults_of_missing_keys_are_those_of_transformers(tmp_path: Path) -> None:
    changed(saved(tmp_path / "2", GPT2), activation_function=..., layer_norm_epsilon=..., n_inner=...)
    config = GPT.from_pretrained(tmp_path / "2").config
    assert (config.norm_eps, config.hidden, config.tie_weights) == (1e-5, 128, True)
    folder = saved(tmp_path / "l", dataclasses.replace(LLAMA, n_kv_heads=None, rope_scaling=None))
    keys = ("num_key_value_heads", "head_dim", "rms_norm_eps", "rope_theta", "rope_scaling")
    flags = ("hidden_act", "tie_word_embeddings", "attention_bias", "mlp_bias")
    missing = dict.fromkeys(keys + flags, ...)
    changed(folder, architectures=..., **missing)
    config = GPT.from_pretrained(folder).config
    assert (config.norm_eps, config.kv_heads, config.head_dim, config.rope_theta) == (1e-6, 4, 8, 1e4)
    assert (config.tie_weights, config.bias, config.rope_scaling) == (False, False, None)


def test_shards_and_links(tmp_path: Path) -> None:
    """The hub's cache: a folder of links to files of other names."""
    folder, blobs, links = saved(tmp_path / "a"), tmp_path / "blobs", tmp_path / "links"
    sharded(folder)
    blobs.mkdir()
    links.mkdir()
    for i, path in enumerate(sorted(folder.iterdir())):
        shutil.move(path, blobs / f"{i}")
        (links / path.name).symlink_to(Path("..") / "blobs" / f"{i}")
    same = GPT.from_pretrained(links)
    for x, y in zip(same.parameters(), drawn(LLAMA).parameters(), strict=True):
        assert torch.equal(x, y)


# --- refused --------------------------------------------------------------------------------------

REFUSED: dict[str, tuple[GPTConfig, dict[str, Any], str]] = {
    "model_type": (LLAMA, {"model_type": "mistral"}, "model_type in config.json is 'mistral'"),
    "no model_type": (LLAMA, {"model_type": ...}, "model_type in config.json is None"),
    "class": (
        *(LLAMA, {"architectures": ["LlamaForSequenceClassification"]}),
        r"architectures in config.json is \['LlamaForSeq",
    ),
    "unknown": (
        LLAMA,
        {"new_thing": 1},
        "new_thing in config.json is 1; it takes nothing of that name",
    ),
    "code": (LLAMA, {"auto_map": {"AutoModel": "m.M"}}, "auto_map in config.json"),
    "quantized": (LLAMA, {"quantization_config": {"bits": 4}}, "quantization_config in config.json"),
    "activation": (LLAMA, {"hidden_act": "gelu"}, "hidden_act in config.json is 'gelu'"),
    "exact gelu": (GPT2, {"activation_function": "gelu"}, "activation_function in config.json"),
    "gpt2 with rope": (GPT2, {"rope_theta": 1e4}, "rope_theta in config.json is 10000.0"),
    "scale": (GPT2, {"scale_attn_weights": False}, "scale_attn_weights in config.json is False"),
    "by layer": (GPT2, {"scale_attn_by_inverse_layer_idx": True}, "scale_attn_by_inverse_layer_idx"),
    "upcast": (GPT2, {"reorder_and_upcast_attn": True}, "reorder_and_upcast_attn in config.json"),
    "cross": (GPT2, {"add_cross_attention": True}, "add_cross_attention in config.json is True"),
    "pruned": (GPT2, {"pruned_heads": {"0": [1]}}, "pruned_heads in config.json is of type dict"),
    "one bias": (
        LLAMA,
        {"mlp_bias": True},
        "mlp_bias in config.json is True; .* attention_bias, False",
    ),
    "partial": (LLAMA, {"partial_rotary_factor": 0.5}, "partial_rotary_factor in config.json is 0.5"),
    "window": (LLAMA, {"sliding_window": 8}, "sliding_window in config.json is 8"),
    "yarn": (LLAMA, {"rope_scaling": {"rope_type": "yarn", "factor": 2.0}}, "rope_type 'yarn'"),
    "linear": (LLAMA, {"rope_scaling": {"type": "linear", "factor": 2.0}}, "rope_type 'linear'"),
    "llama3 half": (
        *(LLAMA, {"rope_scaling": {"rope_type": "llama3", **SCALING}}),
        "rope_scaling in config.json is without original_max_position_embeddings",
    ),
    "llama3 more": (LLAMA, {"rope_scaling": {**LLAMA3, "beta": 2}}, "rope_scaling .* is with beta 2"),
    "llama3 wrong": (
        *(LLAMA, {"rope_scaling": {**LLAMA3, "high_freq_factor": 1.0}}),
        "RopeScaling: high_freq_factor is 1.0",
    ),
    "llama3 text": (LLAMA, {"rope_scaling": {**LLAMA3, "factor": "8"}}, "RopeScaling: factor is '8'"),
    "two thetas": (LLAMA, {"rope_parameters": {"rope_theta": 5.0}}, "rope_theta in config.json is "),
    "rope": (LLAMA, {"rope_scaling": [8]}, r"rope_scaling in config.json is \[8\]"),
    "theta": (LLAMA, {"rope_theta": "x"}, "GPTConfig: rope_theta is 'x'"),
    "no size": (
        LLAMA,
        {"hidden_size": ...},
        "hidden_size in config.json is None; .* an integer from 1",
    ),
    "size": (LLAMA, {"vocab_size": 1 << 40}, "vocab_size in config.json is 1099511627776"),
    "size text": (LLAMA, {"vocab_size": "64"}, "vocab_size in config.json is '64'"),
    "size float": (GPT2, {"n_embd": 32.0}, "n_embd in config.json is 32.0"),
    "layers": (LLAMA, {"num_hidden_layers": 4096}, "4096 layers in config.json and 21 tensors"),
    "head_dim": (LLAMA, {"head_dim": 1 << 23}, "head_dim in config.json is 8388608"),
    "heads": (LLAMA, {"num_key_value_heads": 3}, "n_kv_heads is 3; it takes a divisor of n_heads, 4"),
    "eps": (LLAMA, {"rms_norm_eps": math.nan}, "rms_norm_eps in config.json is nan"),
    "flag": (LLAMA, {"tie_word_embeddings": "yes"}, "tie_word_embeddings in config.json is 'yes'"),
    "dtype": (LLAMA, {"dtype": "float8_e4m3fn"}, "dtype in config.json is 'float8_e4m3fn'"),
    "shape": (
        *(LLAMA, {"intermediate_size": 50}),
        r"model.layers.0.mlp.gate_proj.weight in .* is of shape \[48, 32\]; it takes \[50, 32\]",
    ),
    "kv shape": (LLAMA, {"num_key_value_heads": 4}, r"k_proj.weight in .* of shape \[16, 32\]"),
    "transposed": (
        GPT2,
        {"n_inner": 100},
        r"c_fc.weight .* is of shape \[32, 128\]; it takes \[32, 100\]",
    ),
    "fewer layers": (
        LLAMA,
        {"num_hidden_layers": 1},
        "model.layers.1.input_layernorm.weight .* there;",
    ),
    "more layers": (
        LLAMA,
        {"num_hidden_layers": 3},
        "layers.2.input_layernorm.weight is missing",
    ),
    "bias": (
        *(LLAMA, {"attention_bias": True, "mlp_bias": True}),
        "self_attn.q_proj.bias is missing from",
    ),
    "tied": (LLAMA, {"tie_word_embeddings": True}, "lm_head.weight in .* is another tensor"),
    "untied": (GPT2, {"tie_word_embeddings": False}, "lm_head.weight is missing"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_config_is_refused_by_name_before_memory_is_taken(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, case: str
) -> None:
    config, values, said = REFUSED[case]
    changed(saved(tmp_path, config), **values)
    monkeypatch.setattr(torch.nn.Module, "to_empty", None)
    with pytest.raises(ValueError, match=rf"^GPT.from_pretrained: .*{said}"):
        GPT.from_pretrained(tmp_path)


def test_values_that_change_nothing_are_taken(tmp_path: Path) -> None:
    values = {"bos_token_id": 1, "attention_dropout": 0.1, "use_cache": False, "sliding_window": None}
    changed(saved(tmp_path), **values)
    GPT.from_pretrained(tmp_path)


def dtype_of_bytes(tensors: dict[str, Tensor]) -> None:
    tensors["model.norm.weight"] = tensors["model.norm.weight"].to(torch.float8_e4m3fn)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda t: t.pop("model.norm.weight"), "norm.weight is missing from"),
        (
            lambda t: t.update({"model.a.weight": torch.ones(1)}),
            "model.a.weight in .* is there; it takes",
        ),
        (lambda t: t.update({"norm.weight": torch.ones(32)}), "is there beside model.norm.weight"),
        (lambda t: t.update({"model.norm.weight": torch.ones(1)}), r"shape \[1\]; it takes \[32\]"),
        (lambda t: t.update({"model.norm.weight": torch.ones(32, 1)}), r"shape \[32, 1\]"),
        (dtype_of_bytes, "model.norm.weight in .* is of dtype F8_E4M3; it takes F64, F32"),
    ],
)
def test_tensors_are_refused_by_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, change: Callable, said: str
) -> None:
    saved(tmp_path)
    rewritten(tmp_path, change)
    monkeypatch.setattr(torch.nn.Module, "to_empty", None)
    with pytest.raises(ValueError, match=rf"^GPT.from_pretrained: .*{said}"):
        GPT.from_pretrained(tmp_path, dtype=torch.float32)


FILES = ["/etc/a.safetensors", "../a.safetensors", "a/b.safetensors", "..safetensors", "a..safetensors"]
FILES += ["a.bin", "", "a\\b.safetensors", "a\n.safetensors", None, 3]


@pytest.mark.parametrize("file", FILES, ids=repr)
def test_names_of_files_in_the_index(tmp_path: Path, file: object) -> None:
    where: dict[str, Any] = sharded(saved(tmp_path))
    indexed(tmp_path, where | {"model.norm.weight": file})
    with pytest.raises(ValueError, match=r"the file of model.norm.weight in model.safetensors.index"):
        GPT.from_pretrained(tmp_path)


def test_an_index_says_what_its_files_hold(tmp_path: Path) -> None:
    where = sharded(saved(tmp_path))
    one, other, _ = sorted(set(where.values()))
    norm = "model.norm.weight"
    for wrong, said in (
        ({**where, norm: one if where[norm] == other else other}, f"the tensor {norm} is "),
        ({**where, "model.more": one}, f"the tensor model.more is missing from {one}"),
        ({name: x for name, x in where.items() if name != norm}, f"the tensor {norm} is in "),
        ({**where, norm: "none.safetensors"}, "the file none.safetensors of .* is missing"),
        ({}, "weight_map in .* is of type dict"),
        ([], r"weight_map in .* is \[\]"),
    ):
        indexed(tmp_path, wrong)
        with pytest.raises(ValueError, match=rf"^GPT.from_pretrained: {said}"):
            GPT.from_pretrained(tmp_path)


def test_folders_that_hold_no_such_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(said: str, folder: Any = tmp_path, kind: type[Exception] = ValueError) -> None:
        with pytest.raises(kind, match=rf"^GPT.from_pretrained: {said}"):
            GPT.from_pretrained(folder)

    refused("folder is 'gpt2'; .* Nothing is downloaded", "gpt2")
    refused("folder is None; it takes a path", None, TypeError)
    refused("folder is of type bytes", b"x", TypeError)
    refused(".*config.json is missing")
    saved(tmp_path)
    with pytest.raises(TypeError, match=r"dtype is torch.int8; it takes None or torch.float64"):
        GPT.from_pretrained(tmp_path, dtype=torch.int8)
    whole = (tmp_path / WEIGHTS).read_bytes()
    for damaged in (b"", b"x", whole[:-1], whole[:100], b"\xff" * 8 + whole[8:]):
        (tmp_path / WEIGHTS).write_bytes(damaged)
        refused(".*model.safetensors is damaged")
    (tmp_path / WEIGHTS).unlink()
    refused("folder is without model.safetensors")
    (tmp_path / "pytorch_model.bin").write_bytes(b"")
    refused(r"folder is with pytorch_model.bin, which is pickle, alone; .*save_pretrained")
    (tmp_path / WEIGHTS).write_bytes(whole)
    GPT.from_pretrained(tmp_path)  # the other file is not looked at
    monkeypatch.setattr(pretrained, "MOST_JSON", 100)
    refused(r".*config.json is of \d+ bytes; it takes at most 100")
    monkeypatch.undo()
    for text in ("[1]", "no", "[" * 100_000, "\udc80"):
        (tmp_path / CONFIG).write_bytes(text.encode(errors="surrogateescape"))
        refused(r".*config.json is (no JSON|\[1\])")


def test_without_safetensors(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    saved(tmp_path)
    monkeypatch.setitem(sys.modules, "safetensors", None)
    for call in (lambda: GPT.from_pretrained(tmp_path), lambda: drawn(GPT2).save_pretrained(tmp_path)):
        with pytest.raises(ModuleNotFoundError, match=r"safetensors is not installed.* pip install"):
            call()


# --- refused to save ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("config", "said"),
    [
        (GPTConfig.preset("toy"), "config.norm is 'layer'; it takes 'rms' in a llama"),
        (dataclasses.replace(LLAMA, window=8), "config.window is 8; it takes None in a llama"),
        (dataclasses.replace(LLAMA, softcap=8.0), "config.softcap is 8.0"),
        (dataclasses.replace(LLAMA, sinks=True), "config.sinks is True"),
        (dataclasses.replace(GPT2, bias=False), "config.bias is False; it takes True in a gpt2"),
        (dataclasses.replace(GPT2, n_kv_heads=2), "config.kv_heads is 2; it takes 4 in a gpt2"),
        (dataclasses.replace(GPT2, d_head=16), "config.head_dim is 16; it takes 8 in a gpt2"),
        (dataclasses.replace(GPT2, mlp="swiglu"), "config.mlp is 'swiglu'"),
    ],
)
def test_what_transformers_has_no_name_for(tmp_path: Path, config: GPTConfig, said: str) -> None:
    with pytest.raises(ValueError, match=rf"^GPT.save_pretrained: {said}"):
        drawn(config).save_pretrained(tmp_path / "new")
    assert not (tmp_path / "new").exists()


def test_models_that_are_not_as_made_are_not_saved(tmp_path: Path) -> None:
    def refused(model: GPT, said: str) -> None:
        with pytest.raises(ValueError, match=rf"^GPT.save_pretrained: {said}"):
            model.save_pretrained(tmp_path / "new")
        assert not (tmp_path / "new").exists()

    model = drawn(LLAMA)
    model.embedding = torch.nn.Embedding(70, 32)
    refused(model, r"the parameter embedding.weight is of shape \[70, 32\] on cpu; .* \[64, 32\]")
    model = drawn(LLAMA)
    torch.nn.utils.parametrizations.weight_norm(model.blocks[0].mlp.up)
    refused(model, "the parameter blocks.0.mlp.up.parametrizations.weight.original0 is ")
    model = drawn(LLAMA)
    model.blocks[0].mlp.up.bias = torch.nn.Parameter(torch.zeros(96))
    refused(model, "the parameter blocks.0.mlp.up.bias is .* takes none")
    refused(GPT(LLAMA, device="meta"), "the parameter embedding.weight is .* on meta")
    model = drawn(LLAMA)
    model.norm.bfloat16()
    refused(model, "the dtype of the parameters is torch.bfloat16, torch.float32; it takes one")


def test_nothing_is_written_over(tmp_path: Path) -> None:
    model = drawn(GPT2)
    for name in (CONFIG, WEIGHTS, INDEX):
        folder = tmp_path / name
        folder.mkdir()
        (folder / name).write_text("mine")
        with pytest.raises(ValueError, match=rf"folder is one with a {name}"):
            model.save_pretrained(folder)
        assert [path.read_text() for path in folder.iterdir()] == ["mine"]
    (tmp_path / "file").write_text("")
    with pytest.raises(OSError):
        model.save_pretrained(tmp_path / "file")


# --- GPTConfig and RoPE ---------------------------------------------------------------------------


def test_scaling_by_its_definition() -> None:
    scaling = RopeScaling(factor=8.0, original_context=8192)
    theta, D = 500000.0, 128
    cos, sin = nn.rope_tables(2, D, theta, scaling=scaling)
    for i, got in enumerate(torch.atan2(sin[1].double(), cos[1].double()).tolist()):
        frequency = theta ** (-2 * i / D)
        turns = 8192 * frequency / (2 * math.pi)
        if turns < 1:
            frequency /= 8
        elif turns < 4:
            share = (turns - 1) / 3
            frequency = (1 - share) * frequency / 8 + share * frequency
        assert got == pytest.approx(frequency, rel=1e-5)
    plain = nn.rope_tables(2, D, theta)[0][1]
    assert (cos[1] == plain).sum() > 20
    with pytest.raises(TypeError, match="rope_tables: scaling is of type dict"):
        nn.rope_tables(2, D, theta, scaling={})  # type: ignore[arg-type]
    for values, said in (
        ({"factor": 0.5}, "factor is 0.5"),
        ({"factor": math.inf}, "factor is inf"),
        ({"factor": 2.0, "low_freq_factor": 0.0}, "low_freq_factor is 0.0"),
        (
            {"factor": 2.0, "low_freq_factor": 4.0},
            "high_freq_factor is 4.0; .* above low_freq_factor, 4",
        ),
        ({"factor": 2.0, "original_context": 0}, "original_context is 0"),
    ):
        with pytest.raises(ValueError, match=rf"^RopeScaling: {said}"):
            RopeScaling(**values)  # type: ignore[arg-type]


@pytest.mark.parametrize("name", MODELS)
def test_config_goes_through_json(name: str) -> None:
    facts = json.loads(json.dumps(dataclasses.asdict(MODELS[name])))
    same = GPTConfig(**facts)
    assert same == MODELS[name]
    assert hash(same) == hash(MODELS[name])
    old = {key: x for key, x in facts.items() if key not in ("rope_scaling", "d_head")}
    assert GPTConfig(**old).rope_scaling is None  # of a checkpoint from before


def test_config_refuses_scaling_and_width_that_do_not_fit() -> None:
    for kind, values, said in (
        (ValueError, {"positions": "learned"}, "rope_scaling is given; it takes None"),
        (TypeError, {"rope_scaling": 8.0}, "rope_scaling is 8.0; it takes an nn.RopeScaling"),
        (ValueError, {"d_head": 0}, "d_head is 0"),
        (ValueError, {"d_head": 9}, "head_dim is 9; it takes an even number"),
    ):
        with pytest.raises(kind, match=rf"^GPTConfig: {said}"):
            dataclasses.replace(LLAMA, **values)
    narrow, wide = (GPT(dataclasses.replace(LLAMA, d_head=d), device="meta") for d in (8, 16))
    attention = 12 * 2 * 4 * 8 * 48
    more = 6 * (wide.parameter_count() - narrow.parameter_count())
    assert wide.flops_per_token() - narrow.flops_per_token() == attention + more


# --- transformers ---------------------------------------------------------------------------------

SIZES = {"vocab_size": 64, "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": None}
GPT2_SIZES = {**SIZES, "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 128}
LLAMA_SIZES = {
    **SIZES,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 128,
}
THEIRS: dict[str, tuple[str, dict[str, Any]]] = {
    "gpt2": ("GPT2", GPT2_SIZES),
    "gpt2, untied": ("GPT2", {**GPT2_SIZES, "n_inner": 48, "tie_word_embeddings": False}),
    "llama": ("Llama", LLAMA_SIZES),
    "gqa": ("Llama", {**LLAMA_SIZES, "num_key_value_heads": 2, "rms_norm_eps": 1e-5}),
    "llama3": (
        "Llama",
        {**LLAMA_SIZES, "rope_parameters": {"rope_theta": 500.0, **LLAMA3}, "num_key_value_heads": 1},
    ),
    "tied": ("Llama", {**LLAMA_SIZES, "tie_word_embeddings": True}),
    "biases": ("Llama", {**LLAMA_SIZES, "attention_bias": True, "mlp_bias": True, "head_dim": 16}),
}


def their_model(name: str, dtype: torch.dtype = torch.float32) -> Any:
    transformers = pytest.importorskip("transformers", reason="transformers is not installed")
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    family, sizes = THEIRS[name]
    make = getattr(transformers, {"GPT2": "GPT2LMHeadModel", "Llama": "LlamaForCausalLM"}[family])
    torch.manual_seed(0)
    model = make(getattr(transformers, f"{family}Config")(**sizes)).eval()
    with torch.no_grad():
        for p in model.parameters():
            p.copy_(torch.randn(p.shape) * (1.5 * p.shape[-1] ** -0.5 if p.ndim > 1 else 1.0))
    return model.to(dtype)


@pytest.mark.parametrize("name", THEIRS)
def test_logits_are_those_of_transformers(tmp_path: Path, name: str) -> None:
    theirs = their_model(name)
    theirs.save_pretrained(tmp_path / "theirs")
    ours = GPT.from_pretrained(tmp_path / "theirs")
    tokens = torch.randint(64, (2, 100))
    with torch.no_grad():
        want, got = theirs(tokens).logits, ours(tokens)[0]
    assert (got - want).abs().max() <= 1e-5 * want.abs().max()
    if name == "llama3":
        plain = GPT(dataclasses.replace(ours.config, rope_scaling=None))
        plain.load_state_dict(ours.state_dict())
        assert (plain(tokens)[0] - want).abs().max() > 1e-2 * want.abs().max()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", THEIRS)
def test_theirs_through_ours_and_back_bit_for_bit(
    tmp_path: Path, name: str, dtype: torch.dtype
) -> None:
    theirs = their_model(name, dtype)
    theirs.save_pretrained(tmp_path / "theirs", max_shard_size="10KB")
    assert (tmp_path / "theirs" / INDEX).is_file()
    GPT.from_pretrained(tmp_path / "theirs").save_pretrained(tmp_path / "ours")
    files = (tmp_path / "theirs").glob("*.safetensors")
    want = {key: x for file in files for key, x in safetensors.load_file(file).items()}
    got = safetensors.load_file(tmp_path / "ours" / WEIGHTS)
    assert got.keys() == want.keys()
    assert all(torch.equal(x, want[key]) and x.dtype == dtype for key, x in got.items())
    back, again = (type(theirs).from_pretrained(tmp_path / x).eval() for x in ("ours", "theirs"))
    tokens = torch.randint(64, (2, 100))
    assert torch.equal(back(tokens).logits, again(tokens).logits)
    for key in ("rope_parameters", "tie_word_embeddings", "head_dim", "n_inner", "hidden_act"):
        if key != "n_inner" or "untied" in name:  # None is 4 times the width
            assert getattr(back.config, key, None) == getattr(theirs.config, key, None), key
