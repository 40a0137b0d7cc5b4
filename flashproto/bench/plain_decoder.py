"""A GPT in plain PyTorch, with flashproto.nn.GPT's weights, that decodes as fast as torch.compile can.

Keys and values lie in rows with room for all tokens, where a step writes its own.  The step, from a
token to the likeliest next one, is one graph for torch.compile(mode="reduce-overhead"), which replays
it as a CUDA graph.  Heads of queries that share keys read them where they are: nothing is repeated.

Legend: B batch, n tokens, R room, C width, Hq and Hkv heads, D head_dim.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention.flex_attention import BlockMask, flex_attention

from ..nn import GPT, GPTConfig, rope_tables

BLOCK = 128  # keys that FlexAttention takes or leaves together


class PlainRoom(nn.Module):
    """Attention of a layer to its own keys and values [B, Hkv, R, D]."""

    keys: Tensor
    values: Tensor

    def __init__(self, c: GPTConfig, batch: int, room: int, kind: str) -> None:
        super().__init__()
        self.kind, self.sizes = kind, (c.n_heads, c.kv_heads, c.head_dim)
        self.qkv = nn.Linear(c.d_model, (c.n_heads + 2 * c.kv_heads) * c.head_dim, bias=c.bias)
        self.out = nn.Linear(c.n_heads * c.head_dim, c.d_model, bias=c.bias)
        for name in ("keys", "values"):
            memory = torch.zeros(batch, c.kv_heads, room, c.head_dim)
            self.register_buffer(name, memory, persistent=False)

    def forward(self, x: Tensor, at: Tensor, rope: tuple[Tensor, Tensor] | None, seen: Any) -> Tensor:
        """x [B, n, C] at positions `at` [n]; seen: what a step's one token sees, None for a prompt."""
        (Hq, Hkv, D), (B, n, _) = self.sizes, x.shape
        heads = self.qkv(x).view(B, n, Hq + 2 * Hkv, D).transpose(1, 2)
        q, k, v = heads.split((Hq, Hkv, Hkv), 1)
        if rope is not None:
            q, k = turned(q, *rope), turned(k, *rope)
        self.keys[:, :, at] = k
        self.values[:, :, at] = v
        if seen is None:
            y = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=Hq != Hkv)
        elif self.kind == "flex":
            y = flex_attention(q, self.keys, self.values, block_mask=seen, enable_gqa=Hq != Hkv)
        else:  # the heads that share keys as so many queries, which all see the same
            rows = q.reshape(B, Hkv, Hq // Hkv, D)
            y = F.scaled_dot_product_attention(rows, self.keys, self.values, attn_mask=seen)
            y = y.view(B, Hq, 1, D)
        return self.out(y.transpose(1, 2).reshape(B, n, Hq * D))


class PlainMLP(nn.Module):
    def __init__(self, c: GPTConfig) -> None:
        super().__init__()
        self.gated = c.mlp == "swiglu"
        self.up = nn.Linear(c.d_model, c.hidden * (1 + self.gated), bias=c.bias)
        self.down = nn.Linear(c.hidden, c.d_model, bias=c.bias)

    def forward(self, x: Tensor) -> Tensor:
        x = self.up(x)
        if self.gated:
            gate, x = x.chunk(2, -1)
            return self.down(F.silu(gate) * x)
        return self.down(F.gelu(x, approximate="tanh"))


class PlainLayer(nn.Module):
    def __init__(self, c: GPTConfig, batch: int, room: int, kind: str) -> None:
        super().__init__()
        self.norm1, self.norm2 = norm_of(c), norm_of(c)
        self.attention, self.mlp = PlainRoom(c, batch, room, kind), PlainMLP(c)

    def forward(self, x: Tensor, *about: Any) -> Tensor:
        x = x + self.attention(self.norm1(x), *about)
        return x + self.mlp(self.norm2(x))


class PlainDecoder(nn.Module):
    """kind: "sdpa", scaled_dot_product_attention with a row of a mask, or "flex", FlexAttention, which
    leaves out the blocks of keys behind the token."""

    bias: Tensor
    cos: Tensor
    sin: Tensor

    def __init__(self, model: GPT, batch: int, room: int, kind: str) -> None:
        super().__init__()
        self.config, self.kind = c, kind = model.config, kind
        with torch.device("meta"):
            self.embedding = nn.Embedding(c.vocab_size, c.d_model)
            learned = c.positions == "learned"
            self.positions = nn.Embedding(c.context, c.d_model) if learned else None
            self.blocks = nn.ModuleList(PlainLayer(c, batch, room, kind) for _ in range(c.n_layers))
            self.norm = norm_of(c)
            self.head = None if c.tie_weights else nn.Linear(c.d_model, c.vocab_size, bias=False)
        self.load_state_dict(model.state_dict(), assign=True)  # the same memory
        weight = self.embedding.weight
        for block in self.blocks:
            for name in ("keys", "values"):
                memory = torch.zeros_like(getattr(block.attention, name), device=weight.device)
                memory = memory.to(weight.dtype)
                torch._dynamo.mark_static_address(memory)  # a CUDA graph writes there
                setattr(block.attention, name, memory)
        hidden = torch.ones(room, room, dtype=torch.bool, device=weight.device).triu(1)
        bias = torch.zeros(room, room, dtype=weight.dtype, device=weight.device)
        self.register_buffer("bias", bias.masked_fill(hidden, -torch.inf), persistent=False)
        tables = (None, None) if learned else rope_tables(room, c.head_dim, c.rope_theta, weight.device)
        for name, x in zip(("cos", "sin"), tables, strict=True):
            self.register_buffer(name, x, persistent=False)

    def forward(self, tokens: Tensor, at: Tensor, is_step: bool) -> tuple[Tensor, Tensor]:
        """The likeliest token [B, 1] behind tokens [B, n], and its position [1]."""
        x, rope, seen = self.embedding(tokens), None, None
        if self.positions is not None:
            x = x + self.positions(at)
        else:
            rope = self.cos[at], self.sin[at]
        if is_step:
            seen = self.blocks_seen(at) if self.kind == "flex" else self.bias[at]
        for block in self.blocks:
            x = block(x, at, rope, seen)
        x = self.norm(x[:, -1:])
        logits = F.linear(x, self.embedding.weight) if self.head is None else self.head(x)
        return logits.argmax(-1), at[-1:] + 1

    def blocks_seen(self, at: Tensor) -> BlockMask:
        """The blocks up to a token, the last of which it sees in part."""
        room = self.bias.shape[0]
        numbers = torch.arange(-(-room // BLOCK), dtype=torch.int32, device=at.device)

        def up_to(b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
            return j <= at[0]

        return BlockMask.from_kv_blocks(
            (at.to(torch.int32) // BLOCK + 1)[None, None],
            numbers[None, None, None],
            BLOCK_SIZE=BLOCK,
            mask_mod=up_to,
            seq_lengths=(1, room),
            compute_q_blocks=False,
        )


def norm_of(c: GPTConfig) -> nn.Module:
    return nn.RMSNorm(c.d_model, c.norm_eps) if c.norm == "rms" else nn.LayerNorm(c.d_model, c.norm_eps)


def turned(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    a, b = x.float().chunk(2, -1)
    return torch.cat([a * cos - b * sin, b * cos + a * sin], -1).to(x.dtype)


def writer(
    model: GPT, prompts: Tensor, room: int, kind: str, is_compiled: bool
) -> Callable[[int], Tensor]:
    """A function of how many tokens to add to prompts [B, n], which gives all of them."""
    decoder = PlainDecoder(model, len(prompts), room, kind).eval()
    step: Callable[..., Any] = decoder
    if is_compiled:
        step = torch.compile(decoder, mode="reduce-overhead", dynamic=False, fullgraph=True)

    @torch.no_grad()
    def write(new: int) -> Tensor:
        token, at = decoder(prompts, torch.arange(prompts.shape[1], device=prompts.device), False)
        made = [token]
        for _ in range(new - 1):
            token, at = (x.clone() for x in step(token, at, True))  # a graph's results are its memory
            made.append(token)
        return torch.cat([prompts, *made], 1)

    return write
