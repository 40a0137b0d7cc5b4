"""Text for the examples: loading, splitting, what is validated on, and a bigram to compare with."""

from __future__ import annotations

import hashlib
import math
from dataclasses import dataclass
from pathlib import Path

import torch
from errors import DataError
from torch import Tensor
from vocabulary import Vocabulary, code_points

CHUNK = 1 << 20  # ids at a time, where all of a long text are looked at


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
class Windows:
    """The windows of `length` ids in which the validation part is predicted.

    A window advances by half its length; each id is predicted once, with at least half a window before
    it except at the very beginning.  Where that are more than `most` ids, as many windows as make them
    (at least one) stand for all, evenly spread.
    """

    starts: Tensor  # [W]
    skipped: Tensor  # [W] leading targets, predicted in the window before
    length: int

    @classmethod
    def of(cls, n: int, context: int, most: int | None) -> Windows:
        """Of n predicted ids, that is n + 1 in all."""
        T = min(context, n)
        hop = max(1, T // 2)
        starts = torch.tensor([*range(0, n - T, hop), n - T])
        skipped = torch.cat((torch.zeros(1, dtype=torch.int64), starts[:-1] + T - starts[1:]))
        if most is not None and n > most and len(starts) > 1:
            kept = torch.linspace(1, len(starts) - 1, min(max(1, most // hop), len(starts) - 1)).long()
            starts, skipped = starts[kept], skipped[kept]
        return cls(starts, skipped, T)

    def __len__(self) -> int:
        return len(self.starts)

    def targets(self) -> Tensor:
        """Places of the predicted ids [N], in the order of the windows."""
        places = torch.arange(1, self.length + 1)
        return (self.starts[:, None] + places)[places > self.skipped[:, None]]


@dataclass(frozen=True)
class Corpus:
    """A text in ids: all but the last tenth to train on, the last tenth to validate on."""

    name: str
    sha256: str
    vocabulary: Vocabulary
    train: Tensor
    validation: Tensor
    windows: Windows
    targets: Tensor  # windows.targets(), the places in `validation` that are predicted
    validation_bytes: int  # of the targets

    @classmethod
    def load(
        cls,
        path: str | None,
        level: str,
        context: int,
        validate_tokens: int | None = None,
        vocabulary: Vocabulary | None = None,
    ) -> Corpus:
        """Read and split; DataError for a text too short for `context`.

        validate_tokens: the most ids that a validation predicts.
        vocabulary: that of an earlier run; None makes one of the training part.
        """
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
        vocabulary = vocabulary or Vocabulary.of(level, train)
        windows = Windows.of(len(validation) - 1, context, validate_tokens)
        targets = windows.targets()
        n_bytes, predicted = len(targets), validation[targets]
        if level == "char":
            n_bytes += sum(int((predicted >= limit).sum()) for limit in (0x80, 0x800, 0x10000))
        return cls(
            name,
            hashlib.sha256(text).hexdigest(),
            vocabulary,
            vocabulary.encode(train),
            vocabulary.encode(validation),
            windows,
            targets,
            n_bytes,
        )

    @property
    def unseen(self) -> int:
        """Predicted characters that the vocabulary does not have."""
        return self.vocabulary.unseen(self.validation[self.targets])

    def validation_loss(self, nats: float) -> tuple[float, float]:
        """(nats per token, bits per byte) of a model that predicts the ids in `nats` per token."""
        tokens = len(self.targets)
        nats += self.unseen * self.vocabulary.unknown_nats / tokens
        return nats, nats * tokens / (math.log(2) * self.validation_bytes)

    def bigram_loss(self) -> tuple[float, float]:
        """validation_loss of pair frequencies in the training part, one added to each count."""
        V = self.vocabulary.size
        before, after = self.validation[self.targets - 1], self.validation[self.targets]
        pairs, where = (before * V + after).unique(return_inverse=True)
        counts = torch.zeros(len(pairs), dtype=torch.int64)
        for i in range(0, len(self.train) - 1, CHUNK):
            ids = self.train[i : i + CHUNK + 1]
            counts += occurrences(pairs, ids[:-1] * V + ids[1:])
        firsts = torch.bincount(self.train[:-1], minlength=V)
        p = (counts[where] + 1).double() / (firsts[before] + V)
        return self.validation_loss(-float(p.log().mean()))

    def share_seen(self, width: int = 64, passages: int = 300) -> float:
        """Share of the validation part's passages of `width` ids, evenly spaced, that the training
        part has too: a text that repeats itself makes any model look better.

        width: a power of 2.  Passages are compared by a hash of 64 bits.
        """
        ids = self.validation
        if len(ids) < width:
            return 0.0
        starts = torch.arange(0, len(ids) - width + 1, max(width, len(ids) // passages))
        places = starts[:, None] + torch.arange(width)
        wanted, where = hashes(ids[places], width)[:, 0].unique(return_inverse=True)
        counts = torch.zeros(len(wanted), dtype=torch.int64)
        for i in range(0, len(self.train) - width + 1, CHUNK):
            counts += occurrences(wanted, hashes(self.train[i : i + CHUNK + width - 1], width))
        return (counts[where] > 0).double().mean().item()


def occurrences(wanted: Tensor, values: Tensor) -> Tensor:
    """[W]: how often each of wanted [W], sorted and distinct, stands in values [N]."""
    places = torch.searchsorted(wanted, values).clamp(max=len(wanted) - 1)
    return torch.bincount(places[wanted[places] == values], minlength=len(wanted))


def hashes(ids: Tensor, width: int) -> Tensor:
    """[..., N - width + 1] int64, a number for each `width` neighbours of ids [..., N]: the value of
    their polynomial at an odd number, modulo 2^64."""
    base, length, h = 0x2545F4914F6CDD1D, 1, ids
    while length < width:
        h = h[..., :-length] * base + h[..., length:]
        base = (base * base + 2**63) % 2**64 - 2**63  # as a signed number
        length *= 2
    return h
