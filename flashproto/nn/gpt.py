"""GPT: a decoder-only Transformer language model, GPT-2-like or Llama-like by its configuration.

Legend: B batch, S tokens, C = d_model, V vocabulary; tokens [B, S] int64, logits [B, S, V].
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..checks import refuse
from ..functional import cross_entropy, linear_cross_entropy
from .attention import beside_attention, check_heads, rope_tables
from .block import TransformerBlock
from .mlp import default_d_ff
from .norm import make_norm, norm_before_linear


@dataclass(frozen=True)
class GPTConfig:
    """The shape of a GPT; raises ValueError when its parts do not fit together.

    n_kv_heads=None is n_heads; d_ff=None is default_d_ff(d_model, mlp).  context is the longest
    input; with positions="learned" it is also the length of the position table.
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

    def __post_init__(self) -> None:
        for name in ("vocab_size", "context", "n_layers", "n_heads", "d_model"):
            self._check_positive(name)
        for name in ("n_kv_heads", "d_ff"):
            if getattr(self, name) is not None:
                self._check_positive(name)
        for name, choices in _CHOICES.items():
            if getattr(self, name) not in choices:
                takes = " or ".join(map(repr, choices))
                do = f"Pass {name}={choices[0]!r}."
                refuse("GPTConfig", name, repr(getattr(self, name)), takes, do)
        check_heads("GPTConfig", self.d_model, self.n_heads, self.kv_heads, None)
        if self.positions == "rope" and self.head_dim % 2:
            refuse(
                "GPTConfig", "head_dim", f"{self.head_dim} (d_model / n_heads)",
                "an even number with positions='rope'", "Change n_heads, or use learned positions.",
            )  # fmt: skip

    def _check_positive(self, name: str) -> None:
        value = getattr(self, name)
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            refuse("GPTConfig", name, repr(value), "an integer of at least 1", "Pass one.")

    @property
    def kv_heads(self) -> int:
        return self.n_heads if self.n_kv_heads is None else self.n_kv_heads

    @property
    def head_dim(self) -> int:
        return self.d_model // self.n_heads

    @property
    def hidden(self) -> int:
        """The MLP's inner width."""
        return default_d_ff(self.d_model, self.mlp) if self.d_ff is None else self.d_ff

    @classmethod
    def preset(cls, name: str, **changes: Any) -> GPTConfig:
        """The preset called `name`, with some fields changed."""
        if name not in PRESETS:
            names = ", ".join(map(repr, PRESETS))
            refuse("GPTConfig.preset", "name", repr(name), f"one of {names}", "Pass one of them.")
        return dataclasses.replace(PRESETS[name], **changes)


_CHOICES = {"norm": ("layer", "rms"), "mlp": ("gelu", "swiglu"), "positions": ("learned", "rope")}

_LLAMA: dict[str, Any] = {"norm": "rms", "mlp": "swiglu", "positions": "rope", "bias": False}

PRESETS = {
    "toy": GPTConfig(256, 128, 4, 4, 128, positions="rope", bias=False),
    "toy-llama": GPTConfig(256, 128, 4, 4, 128, n_kv_heads=2, **_LLAMA),
    "gpt2-124m": GPTConfig(50257, 1024, 12, 12, 768),
    "gpt2-350m": GPTConfig(50257, 1024, 24, 16, 1024),
    "llama-1b": GPTConfig(
        128256, 8192, 16, 32, 2048, n_kv_heads=8, d_ff=8192, rope_theta=500000.0, **_LLAMA
    ),
}


class GPT(nn.Module):
    """Token embedding, n_layers pre-norm blocks, a final norm, and logits over the vocabulary.

    The residual stream passes between blocks as a pair whose sum the next norm takes (see
    TransformerBlock).  With tie_weights the embedding is also the output matrix, and state_dict
    holds it once.  impl is the backend by name, see TransformerBlock; None chooses.
    """

    def __init__(
        self,
        config: GPTConfig,
        *,
        impl: str | None = None,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        self.config = c = config
        place: dict[str, Any] = {"device": device, "dtype": dtype}
        self.embedding = nn.Embedding(c.vocab_size, c.d_model, **place)
        learned = c.positions == "learned"
        self.positions = nn.Embedding(c.context, c.d_model, **place) if learned else None
        self.blocks = nn.ModuleList(
            TransformerBlock(
                c.d_model, c.n_heads, c.kv_heads, c.hidden,
                norm=c.norm, mlp=c.mlp, bias=c.bias, eps=c.norm_eps, impl=impl, **place,
            )
            for _ in range(c.n_layers)
        )  # fmt: skip
        self.impl = beside_attention(impl)
        self.norm = make_norm(c.norm, c.d_model, bias=c.bias, eps=c.norm_eps, impl=self.impl, **place)
        self.head = None if c.tie_weights else nn.Linear(c.d_model, c.vocab_size, bias=False, **place)
        self.reset_parameters()

    @torch.no_grad()
    def reset_parameters(self, generator: torch.Generator | None = None) -> None:
        """GPT-2's initialisation: normal(0, 0.02); projections into the residual stream divided by
        sqrt(2 n_layers), so that its variance does not grow with depth; biases 0."""
        for name, module in self.named_modules():
            if isinstance(module, (nn.Linear, nn.Embedding)):
                into_stream = name.endswith(("attention.out", "mlp.down"))
                std = 0.02 * ((2 * self.config.n_layers) ** -0.5 if into_stream else 1.0)
                module.weight.normal_(0.0, std, generator=generator)
                if isinstance(module, nn.Linear) and module.bias is not None:
                    module.bias.zero_()

    def forward(
        self, tokens: Tensor, targets: Tensor | None = None, *, return_logits: bool = True
    ) -> tuple[Tensor | None, Tensor | None]:
        """tokens [B, S] to (logits [B, S, V], loss).

        loss is the mean cross entropy of targets [B, S] in nats (float32), over those that are not
        -100; None without targets.  return_logits=False with targets gives (None, loss), and on a GPU
        the logits are never in memory together (see flashproto.linear_cross_entropy).  Raises
        ValueError for tokens that are not [B, S] integers or longer than the context.
        """
        self._check_tokens("GPT", tokens)
        S = tokens.shape[1]
        x, residual, rope = self.embedding(tokens), None, None
        if self.positions is not None:
            x = x + self.positions.weight[:S]
        else:
            rope = rope_tables(S, self.config.head_dim, self.config.rope_theta, tokens.device)
        for block in self.blocks:
            x, residual = block(x, residual, rope)
        x, _ = norm_before_linear(self.norm, x, cast(Tensor, residual))
        weight = self.embedding.weight if self.head is None else self.head.weight
        if targets is not None and not return_logits:
            return None, cast(Tensor, linear_cross_entropy(x, weight, targets, impl=self.impl))
        logits = F.linear(x, weight)
        if targets is None:
            return logits, None
        return logits, cast(Tensor, cross_entropy(logits, targets, impl=self.impl))

    def _check_tokens(self, name: str, tokens: Tensor) -> None:
        if tokens.ndim != 2:
            refuse(
                name, "tokens", f"of shape {list(tokens.shape)}", "[B, S]",
                "tokens[None] adds a batch dimension.",
            )  # fmt: skip
        if tokens.dtype not in (torch.int64, torch.int32):
            refuse(name, "tokens", f"of dtype {tokens.dtype}", "int64 or int32", "Pass token ids.")
        if name == "GPT" and tokens.shape[1] > self.config.context:
            refuse(
                name, "tokens", f"{tokens.shape[1]} long",
                f"at most context, {self.config.context}", "Crop them: tokens[:, -context:].",
            )  # fmt: skip

    @torch.inference_mode()
    def generate(
        self,
        tokens: Tensor,
        max_new_tokens: int,
        *,
        temperature: float = 1.0,
        top_k: int | None = None,
        generator: torch.Generator | None = None,
    ) -> Tensor:
        """Continue tokens [B, S] by max_new_tokens samples: [B, S + max_new_tokens].

        temperature divides the logits (0 takes the most likely token); top_k keeps that many of
        them.  Each step sees the last `context` tokens.  generator is of the model's device.
        Raises ValueError for an argument out of range.
        """
        name, V = "GPT.generate", self.config.vocab_size
        self._check_tokens(name, tokens)
        if tokens.shape[1] == 0:
            refuse(name, "tokens", "of length 0", "at least one token", "Begin with a separator.")
        if tokens.numel() and not 0 <= int(tokens.min()) <= int(tokens.max()) < V:
            refuse(
                name, "tokens", f"from {int(tokens.min())} to {int(tokens.max())}",
                f"ids from 0 to {V - 1}", "Encode the text with this model's vocabulary.",
            )  # fmt: skip
        if max_new_tokens < 0:
            refuse(name, "max_new_tokens", max_new_tokens, "0 or more", "Pass how many to add.")
        if not 0.0 <= temperature < float("inf"):
            refuse(name, "temperature", temperature, "a finite number, 0 or more", "Try 0.8.")
        if top_k is not None and top_k < 1:
            refuse(name, "top_k", top_k, "at least 1, or None", "Pass None to keep every token.")
        for _ in range(max_new_tokens):
            logits = self(tokens[:, -self.config.context :])[0][:, -1].float()
            if top_k is not None and top_k < V:
                kept = logits.topk(top_k).values[:, -1:]
                logits = logits.masked_fill(logits < kept, -torch.inf)
            if temperature == 0.0:
                new = logits.argmax(-1, keepdim=True)
            else:
                p = torch.softmax(logits / temperature, -1)
                new = torch.multinomial(p, 1, generator=generator)
            tokens = torch.cat((tokens, new.to(tokens.dtype)), dim=1)
        return tokens

    def parameter_count(self) -> int:
        """Every parameter, a tied one once."""
        return sum(p.numel() for p in self.parameters())

    def flops_per_token(self, length: int | None = None) -> int:
        """Floating-point operations of one training step per token, forward and backward.

        6 for each weight of a matrix product and 12 n_layers C S for attention over S = length
        (context by default) tokens, causal or not: the usual convention for MFU, from Chowdhery et
        al., "PaLM" (2022), appendix B.
        """
        c = self.config
        tables = 0 if self.positions is None else self.positions.weight.numel()
        if self.head is not None:
            tables += self.embedding.weight.numel()
        S = c.context if length is None else length
        return 6 * (self.parameter_count() - tables) + 12 * c.n_layers * c.d_model * S
