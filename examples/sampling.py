"""Text from a model, token by token."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from flashproto.nn import GPT


def stream(
    model: GPT,
    ids: Tensor,
    tokens: int,
    temperature: float,
    top_k: int | None,
    generator: torch.Generator,
    separator: int | None = None,
) -> Iterator[int]:
    """What model.generate adds to ids [S], each id as soon as it is drawn.

    separator: the id that begins a document, where the model has seen each by itself.
    """
    window = ids[None]
    for _ in range(tokens):
        window = window[:, -model.config.context :]
        window = model.generate(window, 1, temperature=temperature, top_k=top_k, generator=generator)
        new = int(window[0, -1])
        yield new
        if new == separator:
            window = window[:, -1:]


def show(pieces: Iterator[str]) -> None:
    """Print text as it comes."""
    for piece in pieces:
        print(piece, end="", flush=True)
    print()
