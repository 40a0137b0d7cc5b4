"""Modules: norms, attention, MLP, the Transformer block, and GPT."""

from .attention import Attention, RopeScaling, apply_rope, rope_tables
from .block import TransformerBlock
from .gpt import GPT, PRESETS, GPTConfig
from .kv_cache import KVCache
from .loss import CrossEntropyLoss
from .mlp import MLP
from .norm import GatedRMSNorm, LayerNorm, RMSNorm

__all__ = [
    "GPT",
    "MLP",
    "PRESETS",
    "Attention",
    "CrossEntropyLoss",
    "GPTConfig",
    "GatedRMSNorm",
    "KVCache",
    "LayerNorm",
    "RMSNorm",
    "RopeScaling",
    "TransformerBlock",
    "apply_rope",
    "rope_tables",
]
