"""The shape of a GPT, and the presets."""

from __future__ import annotations

import dataclasses
import re
from dataclasses import dataclass
from typing import Any

from ..checks.errors import described, nearest, refuse
from ..checks.options import LARGEST, SMALLEST, check_flag, check_number, is_integer
from .attention import (
    RopeScaling,
    check_heads,
    check_options,
    check_scaling,
)
from .mlp import default_d_ff


@dataclass(frozen=True)
class GPTConfig:
    """The shape of a GPT.

    n_kv_heads=None is n_heads; d_ff=None is 4 d_model, or 8/3 of it with mlp="swiglu".  context is the
    longest input; with positions="learned" it is also the length of the position table.

    window=n lets a token see itself and the n tokens before it, as masks.window(n) does (a model of
    transformers with sliding_window=n has window=n - 1).  window_pattern says in which layers, a letter
    each, repeated over them: S has the window, L sees everything; "SSSL" is three layers with it and
    one without.  None is every layer.  softcap and sinks are those of every layer: see Attention.

    rope_scaling is an nn.RopeScaling, or a dict of its fields, for rotary positions; d_head=None, the
    width of a head, is d_model / n_heads.

    dropout is the share of attention's probabilities that every layer drops while training: see
    Attention.  Nothing else is dropped.

    Raises: ValueError: its parts do not fit together; TypeError: a number or a flag is something else.

    Example:
        >>> config = nn.GPTConfig(vocab_size=256, context=128, n_layers=2, n_heads=4, d_model=64)
        >>> config.head_dim, config.kv_heads, config.hidden
        (16, 4, 256)
        >>> nn.GPTConfig.preset("toy", window=31, window_pattern="SSSL").windows
        [31, 31, 31, None]
    """

    vocab_size: int
    context: int
    n_layers: int
    n_heads: int
    d_model: int
    n_kv_heads: int | None = None
    d_ff: int | None = None
    norm: str = "layer"  # or "rms"
    mlp: str = "gelu"  # or "swiglu"
    positions: str = "learned"  # or "rope"
    rope_theta: float = 10000.0
    norm_eps: float = 1e-5
    bias: bool = True
    tie_weights: bool = True
    window: int | None = None
    window_pattern: str | None = None
    softcap: float | None = None
    sinks: bool = False
    rope_scaling: RopeScaling | None = None
    d_head: int | None = None
    dropout: float = 0.0

    def __post_init__(self) -> None:
        sizes = ("vocab_size", "context", "n_layers", "n_heads", "d_model")
        for name in (*sizes, "n_kv_heads", "d_ff", "d_head", "window"):
            value = getattr(self, name)
            if value is None and name not in sizes:
                continue
            if not is_integer(value) or value < 1:
                refuse("GPTConfig", name, described(value), "an integer of at least 1", "Pass one.")
        for name, choices in _CHOICES.items():
            value = getattr(self, name)
            if not isinstance(value, str) or value not in choices:
                takes = " or ".join(map(repr, choices))
                refuse("GPTConfig", name, described(value), takes, f"Pass {name}={choices[0]!r}.")
        theta, eps, do = self.rope_theta, self.norm_eps, "Leave it out for what is usual."
        check_number("GPTConfig", "rope_theta", theta, SMALLEST, LARGEST, "a positive number", do)
        check_number("GPTConfig", "norm_eps", eps, 0.0, LARGEST, "a finite number, 0 or more", do)
        for name in ("bias", "tie_weights", "sinks"):
            check_flag("GPTConfig", name, getattr(self, name))
        pattern = self.window_pattern
        if pattern is not None and (self.window is None or not re.fullmatch("[SL]+", str(pattern))):
            takes = "None without window" if self.window is None else "letters S and L"
            do = "Pass window=127, say." if self.window is None else 'Pass "SL", say.'
            refuse("GPTConfig", "window_pattern", described(pattern), takes, do)
        check_options("GPTConfig", self.window and (self.window, 0), self.softcap, self.dropout)
        do = "Change d_model or n_heads."
        check_heads("GPTConfig", self.d_model, self.n_heads, self.kv_heads, self.d_head, do)
        if isinstance(self.rope_scaling, dict):  # as a checkpoint's JSON has it
            object.__setattr__(self, "rope_scaling", RopeScaling(**self.rope_scaling))
        check_scaling("GPTConfig", "rope_scaling", self.rope_scaling)
        if self.rope_scaling is not None and self.positions != "rope":
            takes, do = "None with positions='learned'", "Leave it out, or use positions='rope'."
            refuse("GPTConfig", "rope_scaling", "given", takes, do)
        if self.positions == "rope" and self.head_dim % 2:
            refuse(
                "GPTConfig",
                "head_dim",
                f"{self.head_dim}" + " (d_model / n_heads)" * (self.d_head is None),
                "an even number with positions='rope'",
                "Change n_heads, or use learned positions.",
            )

    @property
    def kv_heads(self) -> int:
        return self.n_heads if self.n_kv_heads is None else self.n_kv_heads

    @property
    def head_dim(self) -> int:
        return self.d_model // self.n_heads if self.d_head is None else self.d_head

    @property
    def hidden(self) -> int:
        """The MLP's inner width."""
        return default_d_ff(self.d_model, self.mlp) if self.d_ff is None else self.d_ff

    @property
    def windows(self) -> list[int | None]:
        """Of each layer its window, None for none."""
        pattern = self.window_pattern or "S"
        letters = (pattern[i % len(pattern)] for i in range(self.n_layers))
        return [self.window if letter == "S" else None for letter in letters]

    @classmethod
    def preset(cls, name: str, **changes: Any) -> GPTConfig:
        """The preset called `name`, one of PRESETS or of SHORT_NAMES ("124m" is "gpt2-124m"), with some
        fields changed: any field by its name.

        Raises: ValueError: there is no such preset; TypeError: there is no such field.

        Example:
            >>> nn.GPTConfig.preset("toy", n_layers=2).n_layers
            2
        """
        found = PRESETS.get(SHORT_NAMES.get(name, name)) if isinstance(name, str) else None
        if found is None:
            names = ", ".join(map(repr, PRESETS))
            refuse("GPTConfig.preset", "name", described(name), f"one of {names}", "Pass one of them.")
        known = [f.name for f in dataclasses.fields(cls)]
        for field in changes:
            if field not in known:
                close = nearest(field, known)
                do = "Leave it out." if close is None else f"Pass {close}, if that is meant."
                takes = f"one of {', '.join(known)}"
                refuse("GPTConfig.preset", "a field", repr(field), takes, do, TypeError)
        return dataclasses.replace(found, **changes)


_CHOICES = {"norm": ("layer", "rms"), "mlp": ("gelu", "swiglu"), "positions": ("learned", "rope")}

_LLAMA: dict[str, Any] = {"norm": "rms", "mlp": "swiglu", "positions": "rope", "bias": False}

PRESETS = {
    "toy": GPTConfig(256, 128, 4, 4, 128, positions="rope", bias=False),
    "toy-llama": GPTConfig(256, 128, 4, 4, 128, n_kv_heads=2, **_LLAMA),
    "gpt-oss-toy": GPTConfig(
        256, 128, 4, 4, 128, n_kv_heads=2, window=31, window_pattern="SL", sinks=True, **_LLAMA
    ),
    "gpt2-124m": GPTConfig(50257, 1024, 12, 12, 768),
    "gpt2-350m": GPTConfig(50257, 1024, 24, 16, 1024),
    "llama-1b": GPTConfig(
        128256, 8192, 16, 32, 2048, n_kv_heads=8, d_ff=8192, rope_theta=500000.0, **_LLAMA
    ),
}
SHORT_NAMES = {"tiny": "toy", "124m": "gpt2-124m", "350m": "gpt2-350m", "1b": "llama-1b"}
