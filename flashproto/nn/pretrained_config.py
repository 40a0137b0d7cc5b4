"""config.json of transformers' GPT-2 and Llama, to fields of GPTConfig and back.

Each key is taken, known to change nothing, or refused by its name.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any, NoReturn

import torch

from ..checks.errors import described, refuse
from ..checks.options import LARGEST, check_flag, check_integer, check_number

CONFIG = "config.json"
LOAD, SAVE = "GPT.from_pretrained", "GPT.save_pretrained"
LARGEST_SIZE, MOST_LAYERS = 1 << 24, 1 << 12  # a parameter then has fewer than 2^63 bytes
DTYPES = {"F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
NAMES = {str(dtype).removeprefix("torch."): dtype for dtype in DTYPES.values()}
ANOTHER = "Use another copy."
ELSEWHERE = "Load the model with transformers, and see docs/doors.md."


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
    """rope_theta and rope_scaling, which are by themselves or, since transformers 5, together in
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
                takes = f"what is there too, {described(found[inner])}"
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
