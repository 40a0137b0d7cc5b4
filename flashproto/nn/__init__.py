"""Modules: norms, attention, MLP, the Transformer block, and GPT."""

from .attention import Attention, apply_rope, rope_tables
from .block import TransformerBlock
from .gpt import GPT, PRESETS, GPTConfig
from .mlp import MLP
from .norm import LayerNorm, RMSNorm

__all__ = [
    "GPT",
    "MLP",
    "PRESETS",
    "Attention",
    "GPTConfig",
    "LayerNorm",
    "RMSNorm",
    "TransformerBlock",
    "apply_rope",
    "rope_tables",
]
