"""Text from a model, token by token."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from vocabulary import AnyVocabulary

from flashproto.nn import GPT


def stream(
    model: GPT,
    prompts: Sequence[Tensor],
    tokens: int,
    seed: int,
    on_token: Callable[[int, int], object],
    separator: int | None = None,
    **options: Any,
) -> None:
    """on_token(b, id) for each id that model.generate adds to prompts [S], until it returns True.

    separator: the id that begins a document, where the model has seen each by itself.
    options: of model.generate.
    """
    left, generator = [tokens] * len(prompts), torch.Generator().manual_seed(seed)

    def add(sequences: Sequence[int], openings: Sequence[Tensor], most: int) -> None:
        def told(i: int, token: int) -> bool:
            b = sequences[i]
            left[b] = 0 if on_token(b, token) else left[b] - 1
            return left[b] == 0 or token == separator

        seeds = torch.randint(2**63 - 1, (len(openings),), generator=generator).tolist()
        model.generate(list(openings), most, seeds=seeds, on_token=told, **options)

    add(range(len(prompts)), prompts, tokens)
    for b, prompt in enumerate(prompts):
        while left[b]:  # what opens a document is all that the next one sees before it
            add([b], [prompt.new_tensor([separator])], left[b])


class Screen:
    """Prints texts one after the other, the first one as it comes; and counts their tokens.

    openings: what is printed before each text.
    """

    def __init__(self, vocabulary: AnyVocabulary, openings: Sequence[str]) -> None:
        self.ids: list[deque[int | None]] = [deque() for _ in openings]
        self.pieces = [vocabulary.pieces(iter(ids.popleft, None)) for ids in self.ids]
        self.texts = [[opening] for opening in openings]
        self.tokens, self.began, self.first = 0, time.perf_counter(), 0.0
        self._print(self.texts[0])

    def add(self, b: int, token: int) -> None:
        self.tokens += 1
        self.first = self.first or time.perf_counter()
        self.ids[b].append(token)
        self.texts[b].append(next(self.pieces[b]))
        if b == 0:
            self._print(self.texts[0])

    def close(self) -> None:
        for ids, pieces, text in zip(self.ids, self.pieces, self.texts, strict=True):
            ids.append(None)
            self._print([*text, *pieces, "\n"])

    def speed(self) -> str:
        """What it took, from when it was made on."""
        if not self.tokens:
            return "no tokens"
        seconds = time.perf_counter() - self.began
        return (
            f"{self.tokens} tokens, {self.tokens / seconds:.1f} tokens/s, "
            f"the first one after {1000 * (self.first - self.began):.0f} ms"
        )

    def _print(self, text: list[str]) -> None:
        # What is no character, as bytes that an untrained model draws: not every font has that sign.
        print("".join(text).replace("\ufffd", "?"), end="", flush=True)
        text.clear()
