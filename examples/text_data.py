"""Text for the examples: loading, splitting, the vocabulary, and a bigram to compare with."""

from __future__ import annotations

import hashlib
import math
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

UNICODE_CHARACTERS = 0x110000 - 0x800  # code points that are not surrogates


class DataError(Exception):
    """The text cannot be used; the message is for the person who named it."""


def read_text(path: str | None) -> tuple[str, bytes]:
    """(its name, the text in UTF-8): the file, or the language reference that Python carries."""
    if path is None:
        from pydoc_data.topics import topics

        return "pydoc_data.topics", "".join(topics[name] for name in sorted(topics)).encode()
    try:
        text = Path(path).read_bytes()
    except OSError as error:
        raise DataError(
            f"--data is {path!r}, which cannot be read ({error.strerror}); it takes a text file. "
            "Leave --data out to train on Python's language reference."
        ) from None
    if not text:
        raise DataError(f"--data is {path!r}, which is empty; it takes a text file. Pass another.")
    return path, text


@dataclass(frozen=True)
class Vocabulary:
    """Token ids of a text: its bytes, or the characters of its training part.

    At character level the last id stands for every character that the training part does not have;
    `symbols` are the code points of the others, in order.
    """

    level: str  # "char" or "byte"
    symbols: tuple[int, ...]

    @classmethod
    def of(cls, level: str, codes: Tensor) -> Vocabulary:
        return cls(level, tuple(range(256) if level == "byte" else codes.unique().tolist()))

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

    def decode(self, ids: Tensor) -> str:
        if self.level == "byte":
            return bytes(ids.tolist()).decode(errors="replace")
        return "".join(chr(self.symbols[i]) if i < len(self.symbols) else "\ufffd" for i in ids)


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


@dataclass(frozen=True)
class Corpus:
    """A text in ids: all but the last tenth to train on, the last tenth to validate on."""

    name: str
    sha256: str
    vocabulary: Vocabulary
    train: Tensor
    validation: Tensor
    validation_bytes: int  # of the predicted ids: all but the first

    @classmethod
    def load(cls, path: str | None, level: str, context: int) -> Corpus:
        """Read and split; DataError for a text too short for `context`."""
        name, text = read_text(path)
        codes = code_points(text, level)
        cut = len(codes) * 9 // 10
        if cut <= context + 1 or len(codes) - cut < 2:
            raise DataError(
                f"the text {name!r} has {len(codes)} {level}s; with --context {context} it takes "
                f"at least {math.ceil((context + 2) / 0.9) + 1}. "
                "Pass a longer text or a smaller --context."
            )
        train, validation = codes[:cut], codes[cut:]
        vocabulary = Vocabulary.of(level, train)
        predicted = validation[1:]
        n_bytes = len(predicted)
        if level == "char":
            n_bytes += sum(int((predicted >= limit).sum()) for limit in (0x80, 0x800, 0x10000))
        return cls(
            name, hashlib.sha256(text).hexdigest(), vocabulary,
            vocabulary.encode(train), vocabulary.encode(validation), n_bytes,
        )  # fmt: skip

    @property
    def unseen(self) -> int:
        """Predicted characters of the validation part that the training part does not have."""
        if self.vocabulary.level == "byte":
            return 0
        return int((self.validation[1:] == self.vocabulary.size - 1).sum())

    def validation_loss(self, nats: float) -> tuple[float, float]:
        """(nats per token, bits per byte) of a model that predicts the ids in `nats` per token."""
        tokens = len(self.validation) - 1
        nats += self.unseen * self.vocabulary.unknown_nats / tokens
        return nats, nats * tokens / (math.log(2) * self.validation_bytes)

    def bigram_loss(self) -> tuple[float, float]:
        """validation_loss of pair frequencies in the training part, one added to each count."""
        V = self.vocabulary.size
        pairs = self.train[:-1] * V + self.train[1:]
        counts = torch.bincount(pairs, minlength=V * V).view(V, V).double() + 1
        log_p = (counts / counts.sum(1, keepdim=True)).log()
        return self.validation_loss(-float(log_p[self.validation[:-1], self.validation[1:]].mean()))

    def share_seen(self, width: int = 64, passages: int = 300) -> float:
        """Share of the validation part's passages of `width` ids, evenly spaced, that the training
        part has too: a text that repeats itself makes any model look better."""
        where, train = (x.to(torch.int32).numpy() for x in (self.validation, self.train))
        haystack = train.tobytes()
        step = max(width, len(where) // passages)
        starts = range(0, len(where) - width + 1, step)
        return sum(where[i : i + width].tobytes() in haystack for i in starts) / max(len(starts), 1)
