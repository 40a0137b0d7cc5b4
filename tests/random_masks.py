"""Mask functions of transformers at random, as its own create_*_mask put them together."""

from __future__ import annotations

import random
from typing import Any

import torch
from torch import Tensor
from transformers import masking_utils as mu


def random_padding(r: random.Random, B: int, tokens: int) -> Tensor:
    padding = torch.ones(B, tokens, dtype=torch.bool)
    for row in padding:
        if r.random() < 0.5:
            row[: r.randint(0, tokens - 1)] = False
        if r.random() < 0.3:
            row[r.randint(1, tokens) :] = False
        if r.random() < 0.2:
            row &= torch.tensor([r.random() < 0.5 for _ in row])
    return padding


def random_blocks(r: random.Random, B: int, tokens: int) -> Tensor:
    """-1, or the number of a block of tokens."""
    rows = []
    for _ in range(B):
        row: list[int] = []
        block = 0
        while len(row) < tokens:
            length, is_image = r.randint(1, 4), r.random() < 0.5
            row += [block if is_image else -1] * length
            block += is_image
        rows.append(row[:tokens])
    return torch.tensor(rows)


def random_mask(r: random.Random) -> tuple[str, dict[str, Any]]:
    """(what it is, arguments of sdpa_mask): alone, behind other tokens, or in a static cache."""
    B, q, past = r.randint(1, 3), r.randint(1, 9), r.choice([0, 0, 3, 6])
    packed = r.random() < 0.2
    past = 0 if packed else past
    static = r.random() < 0.3 and not packed
    keys = q + past + (r.randint(0, 4) if static else 0)
    offset = torch.tensor(past) if static and r.random() < 0.5 else past
    first_key = 0
    kind = r.choice(["causal", "window", "chunk", *([] if packed else ["both", "window both"])])
    w = r.randint(1, 6)
    padding = random_padding(r, B, q + past) if r.random() < 0.5 and not packed else None
    left = torch.zeros(B, dtype=torch.int64)
    if padding is not None:
        left = (padding.cumsum(-1) == 0).sum(-1)
    if kind == "window" and past and not static and r.random() < 0.5:  # a cache of the window alone
        first_key = max(0, past - w + 1)
        keys -= first_key
    function = {
        "causal": mu.causal_mask_function,
        "window": mu.sliding_window_causal_mask_function(w),
        "chunk": mu.chunked_causal_mask_function(w, left),
        "both": mu.bidirectional_mask_function,
        "window both": mu.sliding_window_bidirectional_mask_function(w),
    }[kind]
    words, documents = kind, None
    is_causal = "both" not in kind
    blocks = mu.blockwise_overlay(random_blocks(r, B, first_key + keys))
    image = is_causal and r.random() < 0.3
    early = image and r.random() < 0.3  # as or_mask_function, before documents
    if packed:
        cuts = [r.randint(0, q) for _ in range(B)]
        positions = torch.stack([torch.cat([torch.arange(c), torch.arange(q - c)]) for c in cuts])
        documents = mu.find_packed_sequence_indices(positions)
    if early and documents is None:
        function, words = mu.or_masks(function, blocks), f"{words} | images"
        if r.random() < 0.5:
            function, words = mu.and_masks(function, mu.sliding_window_overlay(w)), f"{words}, cut"
    if documents is not None:
        function = mu.remap_positions_for_packed_sequence(function, positions)
        words += ", packed"
    if image and not early:
        function, words = mu.or_masks(function, blocks), f"{words} | images"
    if documents is not None:
        function = mu.and_masks(function, mu.packed_sequence_mask_function(documents))
    arguments = {
        "batch_size": B,
        "q_length": q,
        "kv_length": keys,
        "q_offset": offset,
        "kv_offset": first_key,
        "mask_function": function,
        "attention_mask": padding,
        "allow_is_causal_skip": False,
    }
    return words, arguments
