"""The documents of a file or folder of text, a chunk at a time: memory does not grow with the text."""

from __future__ import annotations

import hashlib
import io
import os
import stat
from array import array
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path, PurePath
from typing import BinaryIO, NamedTuple

import numpy as np
from errors import DataError, not_utf8

CHUNK = 1 << 16  # bytes; a chunk has up to three times as many
CHARACTER = 4  # bytes at most


class Topic(NamedTuple):
    """A part of the language reference that Python carries."""

    name: str
    text: str

    def open(self, mode: str) -> BinaryIO:
        return io.BytesIO(self.text.encode())


Source = Path | Topic


def find_sources(path: str | None, include: str) -> Sequence[Source]:
    """The file, the files of the folder whose names fit `include`, or the language reference, in the
    order of their names.  Hidden ones are left out; a note tells what else is."""
    if path is None:
        from pydoc_data.topics import topics

        return [Topic(name, topics[name]) for name in sorted(topics)]
    root = Path(path)
    if not os.path.lexists(root):
        raise DataError(f"there is no {path!r}; it takes a text file or a folder. Pass another.")
    kind = stat.S_IFMT(status(root).st_mode)
    if kind == stat.S_IFREG:
        return [root]
    if kind != stat.S_IFDIR:
        raise DataError(
            f"{path!r} is neither a file nor a folder; it takes one of them, because a text is read "
            "several times. Write it to a file."
        )
    files, twice = walk(root)
    fitting = [file for file in files if PurePath("/", file.relative_to(root)).match(include)]
    regular = [file for file in fitting if stat.S_ISREG(files[file].st_mode)]
    note("read already under another name", twice)
    note("no file but a pipe, a socket or a device, left out", sorted({*fitting} - {*regular}))
    return sorted(regular, key=lambda file: file.parts)


def walk(root: Path) -> tuple[dict[Path, os.stat_result], list[Path]]:
    """(What is below the folder, but for folders and hidden things; the folders that are there once
    more, or within themselves, and were left out).  Links are followed.

    DataError where something cannot be looked at.
    """
    found: dict[Path, os.stat_result] = {}
    twice: list[Path] = []
    about = status(root)
    seen = {(about.st_dev, about.st_ino)}

    def refuse(error: OSError) -> None:
        raise unreadable(error.filename, error)

    for name, folders, others in os.walk(root, onerror=refuse, followlinks=True):
        inner = [Path(name, each) for each in folders if each[0] != "."]
        folders.clear()
        for path in sorted(inner, key=lambda path: (path.is_symlink(), path)):
            about = status(path)
            if (about.st_dev, about.st_ino) in seen:
                twice.append(path)
            else:
                seen.add((about.st_dev, about.st_ino))
                folders.append(path.name)
        # Also of what does not fit: what a link that is broken should lead to may be a folder.
        found |= {Path(name, each): status(Path(name, each)) for each in others if each[0] != "."}
    return found, twice


def status(path: Path) -> os.stat_result:
    """Of what it leads to, if it is a link; DataError where that cannot be looked at."""
    try:
        return path.stat()
    except OSError as error:
        raise unreadable(path, error) from None


def unreadable(path: str | Path, error: OSError) -> DataError:
    what = "a link that cannot be followed" if os.path.islink(path) else "which cannot be read"
    return DataError(
        f"the text has {str(path)!r}, {what} ({error.strerror}). Mend it, or take it out of the text."
    )


def changed() -> DataError:
    return DataError(
        "the text has changed while it was read; it takes one that does not. Run the same command "
        "again."
    )


def note(what: str, paths: Sequence[object]) -> None:
    """Tell what there is to say of some paths."""
    if paths:
        print(f"note: {what}: {', '.join(map(str, paths[:5]))}{', ...' * (len(paths) > 5)}")


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
            do = "leave it out of a folder with --include, '*.txt' say"
            raise not_utf8(self.source, error, self.offset, do) from None


def chunks(sources: Sequence[Source], separator: str) -> Iterator[Chunk]:
    """The text of all documents.  A document is a source, or what is in one between lines that are
    the separator; one without anything but white space is left out."""
    document, line_between = -1, separator.encode()
    for source in sources:
        held, offset, begun, whole = bytearray(), 0, False, True
        for line in lines(source):
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


def lines(source: Source) -> Iterator[bytes]:
    """Its lines, long ones in pieces of CHUNK bytes; DataError where it cannot be read."""
    try:
        with source.open("rb") as file:
            while line := file.readline(CHUNK):
                yield line
    except OSError as error:
        assert isinstance(source, Path)
        raise unreadable(source, error) from None


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
    """Which documents are to validate on: about `share` of all bytes.

    They are those with the least SHA-256, so that copies of a document are on one side.  Where these
    are less than half of it, the smallest of the others goes with them; where that makes them too many
    by half or more, or nothing is left to train on, the end of it and of its copies, from the beginning
    of a line.
    """

    share: float
    digests: np.ndarray  # [documents] uint64
    lengths: np.ndarray  # [documents] int64, bytes
    characters: int  # in all

    @classmethod
    def of(cls, share: float, found: Iterable[Chunk]) -> Split:
        """Of all chunks; DataError where there is something that is not UTF-8."""
        digests, lengths, sha, length = array("Q"), array("q"), hashlib.sha256(), 0
        characters = 0
        for chunk in found:
            characters += len(chunk.decode())
            sha.update(chunk.text)
            length += len(chunk.text)
            if chunk.last:
                digests.append(int.from_bytes(sha.digest()[:8], "little"))
                lengths.append(length)
                sha, length = hashlib.sha256(), 0
        as_arrays = np.frombuffer(digests, np.uint64), np.frombuffer(lengths, np.int64)
        return cls(share, *as_arrays, characters)

    @property
    def n_bytes(self) -> int:
        return int(self.lengths.sum())

    def check(self) -> None:
        """DataError where there are no two parts."""
        if len(self.digests) == 1 and self.characters < 2:
            raise DataError(
                "the text has one character; it takes two at least, to train and to validate on. Pass "
                "a longer one."
            )
        self.cuts()

    def cuts(self) -> np.ndarray:
        """[documents] how many bytes of each, about, are to train on, -1 where all of it is to validate
        on; DataError where all documents are the same."""
        most, alone = self.share * self.n_bytes, len(self.digests) == 1
        _, which = np.unique(self.digests, return_inverse=True)
        sizes = np.bincount(which, self.lengths)  # of documents with their copies
        if len(sizes) == 1 and not alone:
            raise DataError(
                f"the {len(self.digests)} documents are the same; it takes different ones, to train "
                "and to validate on. Pass one of them alone, or more."
            )
        fit = np.flatnonzero(sizes <= most)
        taken = fit[: np.searchsorted(np.cumsum(sizes[fit]), most, side="right")]
        cuts = np.where(np.isin(which, taken), -1, self.lengths)
        missing = most - sizes[taken].sum()
        rest = np.setdiff1d(np.arange(len(sizes)), taken)
        if len(taken) and missing < most / 2:
            return cuts
        one = rest[sizes[rest].argmin()]
        size, smallest = sizes[one], which == one
        is_one_character = self.lengths[smallest].max() <= CHARACTER
        if len(rest) > 1 and (is_one_character or size < missing + most / 2):
            return np.where(smallest, -1, cuts)
        if is_one_character and not alone:
            return cuts
        kept = np.minimum(self.lengths * (1 - missing / size), self.lengths - 1)
        return np.where(smallest, kept.astype(np.int64), cuts)

    def parts(self, found: Iterable[Chunk]) -> Iterator[tuple[str, str, bool]]:
        """("train" or "validation", text, whether it ends there) of the same chunks."""
        cuts, document, place = self.cuts(), -1, 0
        for chunk in found:
            if chunk.document != document:
                document, place = chunk.document, 0
            text = chunk.text
            if document >= len(cuts) or place + len(text) > self.lengths[document]:
                raise changed()
            here = int(cuts[document]) - place
            if here < 0 or here >= len(text):
                yield "validation" if here < 0 else "train", chunk.decode(), chunk.last
            else:
                line = text.find(b"\n", here) + 1
                if line == len(text) and not chunk.last:  # the next chunk begins with one
                    yield "train", chunk.decode(), True
                    place += len(text)
                    continue
                if not 0 < line < len(text):  # no line begins behind it
                    line = here
                    while is_inside(text[line]):
                        line -= 1
                    if not line and not place:  # nothing would be trained on
                        line = next(i for i in range(1, len(text)) if not is_inside(text[i]))
                yield "train", text[:line].decode(), True
                yield "validation", text[line:].decode(), chunk.last
            place += len(text)
