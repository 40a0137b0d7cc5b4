"""Tiny random models of transformers, made in memory, for the tests of doors."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import transformers
from transformers import PreTrainedModel

transformers.logging.set_verbosity_error()

VOCABULARY, TOKENS, WINDOW, CHUNK = 64, 12, 4, 5
SIZES: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
}
SPECIAL: dict[str, Any] = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
DECODER = {**SIZES, **SPECIAL, "num_key_value_heads": 2, "max_position_embeddings": 128}
EXPERTS = {"num_local_experts": 4, "num_experts_per_tok": 2}
MIXED = {"head_dim": 8, "layer_types": ["sliding_attention", "full_attention"]}
IMAGE = {
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 64,
    "image_size": 16,
    "patch_size": 4,
}
LATENTS = {
    "num_key_value_heads": 4,
    "moe_intermediate_size": 16,
    "n_routed_experts": 4,
    "n_group": 1,
    "topk_group": 1,
    "num_experts_per_tok": 2,
    "kv_lora_rank": 8,
    "q_lora_rank": 8,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 16,
    "v_head_dim": 16,
}

# The class of a model, that of its config, and what the config has.
Model = tuple[str, str, dict[str, Any]]
DECODERS: dict[str, Model] = {
    "llama": ("LlamaForCausalLM", "LlamaConfig", DECODER),
    "mistral": ("MistralForCausalLM", "MistralConfig", {**DECODER, "sliding_window": WINDOW}),
    "qwen3": ("Qwen3ForCausalLM", "Qwen3Config", {**DECODER, "head_dim": 8}),
    "olmo2": ("Olmo2ForCausalLM", "Olmo2Config", DECODER),
    "phi3": ("Phi3ForCausalLM", "Phi3Config", {**DECODER, "sliding_window": WINDOW}),
    "gemma2": (
        "Gemma2ForCausalLM",
        "Gemma2Config",
        {**DECODER, "sliding_window": WINDOW, "head_dim": 8, "attn_logit_softcapping": 2.0},
    ),
    "gemma3": (
        "Gemma3ForCausalLM",
        "Gemma3TextConfig",
        {**DECODER, **MIXED, "sliding_window": WINDOW},
    ),
    "gpt-oss": (
        "GptOssForCausalLM",
        "GptOssConfig",
        {**DECODER, **MIXED, **EXPERTS, "sliding_window": WINDOW},
    ),
    "llama4": (
        "Llama4ForCausalLM",
        "Llama4TextConfig",
        {
            **DECODER,
            **EXPERTS,
            "head_dim": 8,
            "attention_chunk_size": CHUNK,
            "intermediate_size_mlp": 64,
            "no_rope_layers": [1, 0],
        },
    ),
    "deepseek-v3": (
        "DeepseekV3ForCausalLM",
        "DeepseekV3Config",
        {**DECODER, **LATENTS, "first_k_dense_replace": 1},
    ),
    "gpt2": (
        "GPT2LMHeadModel",
        "GPT2Config",
        {
            "vocab_size": VOCABULARY,
            "n_embd": 32,
            "n_layer": 2,
            "n_head": 4,
            "n_positions": 128,
            "bos_token_id": 1,
            "eos_token_id": 2,
        },
    ),
    "gpt-neox": (
        "GPTNeoXForCausalLM",
        "GPTNeoXConfig",
        {**SIZES, **SPECIAL, "max_position_embeddings": 128},
    ),
    "modernbert-decoder": (
        "ModernBertDecoderForCausalLM",
        "ModernBertDecoderConfig",
        {**SIZES, **SPECIAL, "local_attention": 6, "cls_token_id": 1, "sep_token_id": 2},
    ),
}
ENCODERS: dict[str, Model] = {
    "bert": ("BertModel", "BertConfig", SIZES),
    "modernbert": (
        "ModernBertModel",
        "ModernBertConfig",
        {**SIZES, "num_hidden_layers": 4, "pad_token_id": 0, "local_attention": 6},
    ),
}
BUCKETS = {
    "vocab_size": VOCABULARY,
    "d_model": 32,
    "d_kv": 8,
    "d_ff": 64,
    "num_layers": 2,
    "num_heads": 4,
    "relative_attention_num_buckets": 8,
    "relative_attention_max_distance": 10,
    "pad_token_id": 0,
    "decoder_start_token_id": 0,
}
ENCODER_DECODERS: dict[str, Model] = {
    "t5": ("T5ForConditionalGeneration", "T5Config", BUCKETS),
    # Of MT5's own gated MLPs float32 leaves less than the tests ask for, in eager attention too.
    "mt5": ("MT5ForConditionalGeneration", "MT5Config", {**BUCKETS, "feed_forward_proj": "relu"}),
    "umt5": ("UMT5ForConditionalGeneration", "UMT5Config", BUCKETS),
    "bart": (
        "BartForConditionalGeneration",
        "BartConfig",
        {
            **SPECIAL,
            "vocab_size": VOCABULARY,
            "d_model": 32,
            "encoder_layers": 2,
            "decoder_layers": 2,
            "encoder_attention_heads": 4,
            "decoder_attention_heads": 4,
            "encoder_ffn_dim": 64,
            "decoder_ffn_dim": 64,
            "max_position_embeddings": 64,
            "decoder_start_token_id": 2,
            "forced_eos_token_id": None,
        },
    ),
}
OTHERS: dict[str, Model] = {
    "vit": ("ViTModel", "ViTConfig", IMAGE),
    "whisper": (
        "WhisperForConditionalGeneration",
        "WhisperConfig",
        {
            **SPECIAL,
            "vocab_size": VOCABULARY,
            "d_model": 32,
            "encoder_layers": 2,
            "decoder_layers": 2,
            "encoder_attention_heads": 4,
            "decoder_attention_heads": 4,
            "encoder_ffn_dim": 64,
            "decoder_ffn_dim": 64,
            "num_mel_bins": 8,
            "max_source_positions": 16,
            "max_target_positions": 32,
            "decoder_start_token_id": 3,
            "suppress_tokens": None,
            "begin_suppress_tokens": None,
        },
    ),
}
MODELS = DECODERS | ENCODERS | ENCODER_DECODERS | OTHERS


def tiny_model(name: str, **options: Any) -> PreTrainedModel:
    """The model in eval mode, with weights that let attention matter; options: more of its config."""
    model_class, config_class, settings = MODELS[name]
    config = getattr(transformers, config_class)(**{**settings, **options})
    make: Callable[..., PreTrainedModel] = getattr(transformers, model_class)._from_config
    model = make(config, attn_implementation="eager")
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter_name, p in model.named_parameters():
            if p.ndim >= 2:
                p.copy_(torch.randn(p.shape, generator=generator) * 1.5 * p.shape[-1] ** -0.5)
            elif "sinks" in parameter_name:
                p.copy_(torch.randn(p.shape, generator=generator))
    return model.eval()
