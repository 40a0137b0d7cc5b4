"""Token ids of a text: its bytes, its characters, or tokens of a byte-level BPE.

Codes of a text are what ids are made of: bytes, code points, or the ids of BPE themselves.
"""

from __future__ import annotations

import codecs
import dataclasses
import functools
import hashlib
import importlib.util
import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from errors import DataError, not_utf8
from torch import Tensor

UNICODE_CHARACTERS = 0x110000 - 0x800  # code points that are not surrogates
END_OF_TEXT = "<|endoftext|>"  # the token of BPE that is put behind each document
ENDS = (END_OF_TEXT, "<|end_of_text|>")  # the second is Llama 3's
SAMPLE = "a B\n\n  c\u00e9"  # comes back from its tokens, unless a tokenizer changes what it is given


@dataclass(frozen=True)
class Vocabulary:
    """The 256 bytes, or the characters of a training part.

    At character level the last id is that of every character that the training part does not have;
    `symbols` are the code points of the others, in order.
    """

    level: str  # "char" or "byte"
    symbols: tuple[int, ...]
    end_of_text = None  # there is no id between documents

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
        """What it costs to say which unseen character the unknown id is, all being equally
        likely: without it a model would look better for being vague."""
        return math.log(UNICODE_CHARACTERS - len(self.symbols))

    @property
    def unit(self) -> str:
        """What a token is called."""
        return self.level

    def facts(self) -> dict:
        """Itself in JSON: the inverse of vocabulary_of."""
        return dataclasses.asdict(self)

    def codes(self, text: bytes, name: str = "the text") -> Tensor:
        return code_points(text, self.level, name)

    def n_bytes(self, codes: Tensor) -> int:
        """The length in UTF-8 of the text that has these codes."""
        longer = (0x80, 0x800, 0x10000) if self.level == "char" else ()
        return len(codes) + sum(int((codes >= limit).sum()) for limit in longer)

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

    def opening(self) -> tuple[str, Tensor]:
        """What a sample begins with, and its ids: a newline, a space where the text has none, else its
        first symbol."""
        text = next((c for c in "\n " if ord(c) in self.symbols), chr(self.symbols[0]))
        return text, self.encode(self.codes(text.encode()))

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


@dataclass(frozen=True)
class BPE:
    """Byte-level BPE with a token of ENDS: any text has ids, and they give it back.

    tokenizer: the content of a tokenizer.json, as prepare_data.py trains one, or GPT-2's or Llama 3's.
    """

    tokenizer: str
    level = "bpe"
    unit = "token"
    unknown_nats = 0.0

    @staticmethod
    def needs_tokenizers() -> None:
        """DataError where the package tokenizers is not installed."""
        if importlib.util.find_spec("tokenizers") is None:
            raise DataError(
                "tokens of BPE need the package tokenizers, which is not installed. "
                "Run: pip install tokenizers."
            )

    @functools.cached_property
    def engine(self) -> Any:
        """tokenizers.Tokenizer; DataError where that cannot be had."""
        self.needs_tokenizers()
        import tokenizers

        try:
            engine = tokenizers.Tokenizer.from_str(self.tokenizer)
        except Exception as error:  # its own class is Exception
            raise DataError(f"the tokenizer cannot be read ({error}). Use another copy.") from None
        engine.no_truncation()
        engine.no_padding()
        alphabet = set(tokenizers.pre_tokenizers.ByteLevel.alphabet())
        back = engine.decode(engine.encode(SAMPLE, add_special_tokens=False).ids)
        known = engine.get_vocab().keys()
        if known.isdisjoint(ENDS) or not alphabet <= known or back != SAMPLE:
            raise DataError(
                f"the tokenizer is not a byte-level BPE with a token {' or '.join(ENDS)}, from which a "
                "text comes back as it was. Take one that prepare_data.py trained."
            )
        ids = engine.get_vocab().values()
        if len(ids) <= max(ids):
            raise DataError(
                f"the tokenizer has {len(ids)} tokens with ids up to {max(ids)}; it takes ids without "
                "gaps, from 0. Take one that prepare_data.py trained."
            )
        engine.encode_special_tokens = True  # what a text has in their form is text
        return engine

    @property
    def size(self) -> int:
        return self.engine.get_vocab_size()

    @property
    def end_of_text(self) -> int:
        return next(i for end in ENDS if (i := self.engine.token_to_id(end)) is not None)

    @functools.cached_property
    def sha256(self) -> str:
        return hashlib.sha256(self.tokenizer.encode()).hexdigest()

    @functools.cached_property
    def lengths(self) -> Tensor:
        """[size]: the bytes of each token; in the vocabulary each byte is a character."""
        pieces = [self.engine.id_to_token(i) for i in range(self.size)]
        return torch.tensor([0 if piece in ENDS else len(piece) for piece in pieces])

    def facts(self) -> dict:
        return {"level": self.level, "tokenizer": self.tokenizer}

    def codes(self, text: bytes, name: str = "the text") -> Tensor:
        return torch.tensor(self.ids([decoded(text, name)])[0], dtype=torch.int64)

    def ids(self, texts: list[str]) -> list[list[int]]:
        """Of each text, on all cores."""
        return [x.ids for x in self.engine.encode_batch_fast(texts, add_special_tokens=False)]

    def n_bytes(self, codes: Tensor) -> int:
        return int(self.lengths[codes].sum())

    def encode(self, codes: Tensor) -> Tensor:
        return codes

    def unseen(self, ids: Tensor) -> int:
        return 0

    def prompt(self, text: str) -> Tensor:
        """[S] ids of what is to be continued, behind what the tokenizer itself puts before a text."""
        return torch.tensor(self.engine.encode(text).ids, dtype=torch.int64)

    def opening(self) -> tuple[str, Tensor]:
        ids = self.prompt("")
        return "", ids if len(ids) else torch.tensor([self.end_of_text])

    def pieces(self, ids: Iterable[int]) -> Iterator[str]:
        from tokenizers.decoders import DecodeStream

        stream = DecodeStream(skip_special_tokens=False)
        for i in ids:
            yield stream.step(self.engine, i) or ""


AnyVocabulary = Vocabulary | BPE


def vocabulary_of(facts: dict) -> AnyVocabulary:
    """The vocabulary that a checkpoint names."""
    if facts["level"] == "bpe":
        return BPE(facts["tokenizer"])
    return Vocabulary(facts["level"], tuple(facts["symbols"]))


def decoded(text: bytes, name: str) -> str:
    """UTF-8 text; DataError where it is something else.  name: what the text is called there."""
    try:
        return text.decode()
    except UnicodeDecodeError as error:
        raise not_utf8(name, error, 0, "begin a run with --level byte") from None


def code_points(text: bytes, level: str, name: str = "the text") -> Tensor:
    """UTF-8 text to its bytes or code points [N]; DataError where it is not UTF-8."""
    if level == "byte":
        return torch.frombuffer(bytearray(text), dtype=torch.uint8)
    return torch.frombuffer(bytearray(decoded(text, name).encode("utf-32-le")), dtype=torch.int32)
