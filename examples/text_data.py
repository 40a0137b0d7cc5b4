"""Text for the examples: loading, splitting, what is validated on, and a bigram to compare with."""

from __future__ import annotations

import hashlib
import math
from dataclasses import dataclass
from pathlib import Path

import torch
from batches import Ids
from errors import DataError
from parallel import ALONE, World
from settings import Settings
from shards import TokenFolder
from torch import Tensor
from vocabulary import AnyVocabulary, Vocabulary, code_points

CHUNK = 1 << 20  # ids at a time, where all of a long text are looked at
COUNTED = 1 << 26  # the most ids to count pairs and to look for passages in: some seconds


def read_text(path: str | None) -> tuple[str, bytes]:
    """(its name, the text in UTF-8): the file, or the language reference that Python carries."""
    if path is None:
        from pydoc_data.topics import topics

        return "pydoc_data.topics", "".join(topics[name] for name in sorted(topics)).encode()
    try:
        text = Path(path).read_bytes()
    except OSError as error:
        raise DataError(
            f"--data is {path!r}, which cannot be read ({error.strerror}); it takes a text file "
            "or a folder that prepare_data.py wrote. Leave --data out to train on Python's language "
            "reference."
        ) from None
    if not text:
        raise DataError(f"--data is {path!r}, which is empty; it takes a text file. Pass another.")
    return path, text


@dataclass(frozen=True)
class Windows:
    """The windows of `length` ids in which the validation part is predicted.

    A window advances by half its length; each id is predicted once, with at least half a window before
    it except at the very beginning.  Where that are more than `most` ids, as many windows as make them
    (at least one) are taken for all, evenly spread.
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
    """A text in ids: of a file, the last tenth is to validate on and the rest to train on."""

    name: str
    sha256: str
    vocabulary: AnyVocabulary
    train: Ids
    validation: Ids
    windows: Windows
    targets: Tensor  # windows.targets(), the places in `validation` that are predicted
    validation_bytes: int  # of the targets
    separator: int | None = None  # the id that begins a document, where attention stays within one

    @classmethod
    def load(
        cls, settings: Settings, vocabulary: AnyVocabulary | None = None, world: World = ALONE
    ) -> Corpus:
        """What --data names, a text or a folder of shards; DataError where it cannot be trained on, or
        is too short for --context.

        vocabulary: that of an earlier run; None makes one of the training part, or takes the folder's.
        world: the processes that load it; each looks at the checksums of its part of the shards.
        """
        s = settings
        if s.data is not None and Path(s.data).is_dir():
            part = slice(world.rank, None, world.size)
            shards = TokenFolder.open(Path(s.data), checksums=not s.skip_checksums, part=part)
            if vocabulary is not None and vocabulary != shards.vocabulary:
                raise DataError(
                    f"the tokens in {s.data!r} are of another vocabulary than the run's; it takes its "
                    "own. Prepare the text with --tokenizer and the run's folder, or pass the text."
                )
            known: AnyVocabulary = shards.vocabulary
            train: Ids = shards.train
            validation: Ids = shards.validation
            codes = validation
            name, sha256 = s.data, shards.sha256
            separator = shards.vocabulary.end_of_text if s.documents else None
        else:
            separator = None  # a text is one document
            name, text = read_text(s.data)
            sha256 = hashlib.sha256(text).hexdigest()
            whole = vocabulary.codes(text, name) if vocabulary else code_points(text, s.level, name)
            cut = len(whole) * 9 // 10
            codes = whole[cut:]
            known = vocabulary or Vocabulary.of(s.level, whole[: max(1, cut)])
            train, validation = known.encode(whole[:cut]), known.encode(whole[cut:])
        if len(train) <= s.context + 1 or len(validation) < 2:
            raise DataError(
                f"the text {name!r} has {len(train)} {known.unit}s to train on and {len(validation)} "
                f"to validate on; with --context {s.context} it takes at least {s.context + 2} and 2. "
                "Pass a longer text or a smaller --context."
            )
        windows = Windows.of(len(validation) - 1, s.context, s.validate_tokens)
        targets = windows.targets()
        n_bytes = known.n_bytes(codes[targets])
        if not n_bytes:
            raise DataError(
                f"the text {name!r} has {len(validation)} {known.unit}s to validate on, of which "
                f"{len(targets)} are predicted: ends of documents, with 0 bytes; it takes some text. "
                "Prepare it with a larger --validation-share, or pass a larger --validate-tokens."
            )
        return cls(name, sha256, known, train, validation, windows, targets, n_bytes, separator)

    def documents(self, tokens: Tensor, world: World = ALONE) -> Tensor | None:
        """The document of each of the tokens [B, S], of those of this process; None where all are one.

        The token behind a document opens the next one, as it opens a sample: so each token is predicted
        from its own document alone, and the first one from what opens it.
        """
        if self.separator is None:
            return None
        return world.tokens((tokens == self.separator).cumsum(1), -1)

    @property
    def unit(self) -> str:
        return self.vocabulary.unit

    @property
    def counted(self) -> int:
        """How many ids of the training part are counted, where all may be too many."""
        return min(len(self.train), COUNTED)

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
        counts, firsts = torch.zeros(len(pairs), dtype=torch.int64), torch.zeros(V, dtype=torch.int64)
        for i in range(0, self.counted - 1, CHUNK):
            ids = self.train[i : min(i + CHUNK + 1, self.counted)]
            counts += occurrences(pairs, ids[:-1] * V + ids[1:])
            firsts += torch.bincount(ids[:-1], minlength=V)
        p = (counts[where] + 1).double() / (firsts[before] + V)
        return self.validation_loss(-float(p.log().mean()))

    def share_seen(self, width: int = 64, passages: int = 300) -> float:
        """Share of the validation part's passages of `width` ids, evenly spaced, that the training
        part has too: a text that repeats itself makes any model look better.

        width: a power of 2.  Passages are compared by a hash of 64 bits.
        """
        n = len(self.validation)
        if n < width:
            return 0.0
        starts = torch.arange(0, n - width + 1, max(width, n // passages))
        places = starts[:, None] + torch.arange(width)
        wanted, where = hashes(self.validation[places], width)[:, 0].unique(return_inverse=True)
        counts = torch.zeros(len(wanted), dtype=torch.int64)
        for i in range(0, self.counted - width + 1, CHUNK):
            ids = self.train[i : min(i + CHUNK + width - 1, self.counted)]
            counts += occurrences(wanted, hashes(ids, width))
        return (counts[where] > 0).double().mean().item()


def occurrences(wanted: Tensor, values: Tensor) -> Tensor:
    """[W]: how often each of wanted [W], sorted and distinct, is in values [N]."""
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
