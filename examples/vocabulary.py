"""Token ids of a text: its bytes, or its characters."""

from __future__ import annotations

import codecs
import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import torch
from errors import DataError
from torch import Tensor

UNICODE_CHARACTERS = 0x110000 - 0x800  # code points that are not surrogates


@dataclass(frozen=True)
class Vocabulary:
    """The 256 bytes, or the characters of a training part.

    At character level the last id stands for every character that the training part does not have;
    `symbols` are the code points of the others, in order.
    """

    level: str  # "char" or "byte"
    symbols: tuple[int, ...]

    @classmethod
    def of(cls, level: str, codes: Tensor) -> Vocabulary:
        """Of code points or bytes [N], of which there is at least one."""
        used = range(256) if level == "byte" else torch.bincount(codes).nonzero().flatten().tolist()
        return cls(level, tuple(used))

    @property
    def size(self) -> int:
        return len(self.symbols) + (self.level == "char")

    @property
    def unknown_nats(self) -> float:
        """What it costs to say which unseen character the unknown id stands for, all being equally
        likely: without it a model would look better for being vague."""
        return math.log(UNICODE_CHARACTERS - len(self.symbols))

    def encode(self, codes: Tensor) -> Tensor:
        """Code points or bytes [N] to ids [N] int64."""
        if self.level == "byte":
            return codes.long()
        symbols = torch.tensor(self.symbols, dtype=codes.dtype)
        ids = torch.searchsorted(symbols, codes)
        known = symbols[ids.clamp(max=len(symbols) - 1)] == codes
        return torch.where(known, ids, len(symbols))

    def unseen(self, ids: Tensor) -> int:
        """How many of ids are characters that the training part does not have."""
        return 0 if self.level == "byte" else int((ids == len(self.symbols)).sum())

    def opening(self) -> str:
        """What a sample begins with: a newline, a space where there is none, else the first symbol."""
        return next((c for c in "\n " if ord(c) in self.symbols), chr(self.symbols[0]))

    def pieces(self, ids: Iterable[int]) -> Iterator[str]:
        """The text of ids, each as soon as it is whole: a character may be several bytes."""
        if self.level == "char":
            for i in ids:
                yield chr(self.symbols[i]) if i < len(self.symbols) else "\ufffd"
            return
        decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
        for i in ids:
            yield decoder.decode(bytes([i]))
        yield decoder.decode(b"", final=True)


def code_points(text: bytes, level: str) -> Tensor:
    """UTF-8 text to its bytes or code points [N]; DataError where it is not UTF-8."""
    if level == "byte":
        return torch.frombuffer(bytearray(text), dtype=torch.uint8)
    try:
        return torch.frombuffer(bytearray(text.decode().encode("utf-32-le")), dtype=torch.int32)
    except UnicodeDecodeError as error:
        raise DataError(
            f"the text is not UTF-8 (byte {text[error.start]:#04x} at offset {error.start}); "
            "--level char takes UTF-8. Pass --level byte."
        ) from None
