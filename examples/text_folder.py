"""The documents of a folder of text, a chunk at a time: memory does not grow with the text."""

from __future__ import annotations

import hashlib
import io
from array import array
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO, NamedTuple

import numpy as np
from errors import DataError

CHUNK = 1 << 16  # bytes; a chunk has up to three times as many


class Topic(NamedTuple):
    """A part of the language reference that Python carries."""

    name: str
    text: str

    def open(self, mode: str) -> BinaryIO:
        return io.BytesIO(self.text.encode())


Source = Path | Topic


def find_sources(path: str | None, include: str) -> Sequence[Source]:
    """The file, the files of the folder whose names fit `include`, or the language reference, in the
    order of their names.  Hidden ones are left out."""
    if path is None:
        from pydoc_data.topics import topics

        return [Topic(name, topics[name]) for name in sorted(topics)]
    root = Path(path)
    if root.is_file():
        return [root]
    if not root.is_dir():
        raise DataError(f"there is no {path!r}; it takes a text file or a folder. Pass another.")
    files = {p.relative_to(root).parts: p for p in root.rglob(include) if p.is_file()}
    return [files[parts] for parts in sorted(files) if not any(x[0] == "." for x in parts)]


class Chunk(NamedTuple):
    document: int  # 0, 1, ...
    text: bytes  # of whole characters, where possible of whole lines
    last: bool  # of its document
    source: Source
    offset: int  # in the source

    def decode(self) -> str:
        try:
            return self.text.decode()
        except UnicodeDecodeError as error:
            where = self.offset + error.start
            raise DataError(
                f"{self.source} is not UTF-8 (byte {self.text[error.start]:#04x} at offset {where}); "
                "it takes text. Convert it, or leave it out with --include, '*.txt' say."
            ) from None


def chunks(sources: Sequence[Source], separator: str) -> Iterator[Chunk]:
    """The text of all documents.  A document is a source, or what stands in one between lines that are
    the separator; one without anything but white space is left out."""
    document, line_between = -1, separator.encode()
    for source in sources:
        with source.open("rb") as file:
            held, offset, begun, whole = bytearray(), 0, False, True
            while line := file.readline(CHUNK):
                at_its_begin, whole = whole, line.endswith(b"\n")
                if at_its_begin and line.strip() == line_between:
                    if begun or held.strip():
                        document += not begun
                        yield Chunk(document, bytes(held), True, source, offset)
                    offset += len(held) + len(line)
                    held, begun = bytearray(), False
                    continue
                # Before a line that begins with white space a text would have other tokens.
                if len(held) >= (CHUNK if line.strip() and not line[:1].isspace() else 2 * CHUNK):
                    cut = whole_characters(held, line)
                    document += not begun
                    yield Chunk(document, bytes(held[:cut]), False, source, offset)
                    del held[:cut]
                    offset, begun = offset + cut, True
                held += line
            if begun or held.strip():
                document += not begun
                yield Chunk(document, bytes(held), True, source, offset)


def is_inside(byte: int) -> bool:
    """Whether a byte of UTF-8 goes on with a character."""
    return byte & 0xC0 == 0x80


def whole_characters(held: bytearray, behind: bytes) -> int:
    """How many bytes of `held` are whole characters, where `behind` comes next."""
    cut = len(held)
    if is_inside(behind[0]):
        while cut and is_inside(held[cut - 1]):
            cut -= 1
        cut -= 1
    return cut if cut > 0 else len(held)


@dataclass(frozen=True)
class Split:
    """Which documents are to validate on: `share` of all bytes at most, but at least a document.

    They are those with the least SHA-256, so that copies of a document are on one side.  Of a document
    that is alone it is the last `share`, from the beginning of a line.
    """

    share: float
    digests: np.ndarray  # [documents] uint64
    lengths: np.ndarray  # [documents] int64, bytes

    @classmethod
    def of(cls, share: float, found: Iterable[Chunk]) -> Split:
        """Of all chunks; DataError where there is something that is not UTF-8."""
        digests, lengths, sha, length = array("Q"), array("q"), hashlib.sha256(), 0
        for chunk in found:
            chunk.decode()
            sha.update(chunk.text)
            length += len(chunk.text)
            if chunk.last:
                digests.append(int.from_bytes(sha.digest()[:8], "little"))
                lengths.append(length)
                sha, length = hashlib.sha256(), 0
        return cls(share, np.frombuffer(digests, np.uint64), np.frombuffer(lengths, np.int64))

    @property
    def n_bytes(self) -> int:
        return int(self.lengths.sum())

    def validates(self) -> np.ndarray:
        """[documents] bool; DataError where all documents are the same."""
        most = max(self.share * self.n_bytes, self.lengths.min())
        order = np.argsort(self.digests, kind="stable")
        order = order[self.lengths[order] <= most]
        n = np.searchsorted(np.cumsum(self.lengths[order]), most, side="right")
        validates = np.isin(self.digests, self.digests[order[: max(1, n)]])
        if validates.all():
            raise DataError(
                f"the {len(self.digests)} documents are the same; it takes different ones, to train "
                "and to validate on. Pass one of them alone, or more."
            )
        return validates

    def parts(self, found: Iterable[Chunk]) -> Iterator[tuple[str, str, bool]]:
        """("train" or "validation", text, whether it ends there) of the same chunks."""
        if len(self.digests) > 1:
            validates = self.validates()
            for chunk in found:
                split = "validation" if validates[chunk.document] else "train"
                yield split, chunk.decode(), chunk.last
            return
        place, cut = 0, int(self.n_bytes * (1 - self.share))
        for chunk in found:
            text, here = chunk.text, cut - place
            place += len(text)
            if here >= len(text):
                yield "train", chunk.decode(), False
                continue
            if here >= 0:
                line = text.find(b"\n", here) + 1
                if not 0 < line < len(text):  # no line begins behind it
                    line = here
                    while is_inside(text[line]):
                        line -= 1
                yield "train", text[:line].decode(), True
                text = text[line:]
            yield "validation", text.decode(), chunk.last
