"""Turn text into files of tokens, for train_gpt.py --data.

    python examples/prepare_data.py books               every file of the folder, into books-tokens
    python examples/prepare_data.py book.txt --vocab-size 4096
    python examples/prepare_data.py more --tokenizer books-tokens      the same tokens again
    python examples/train_gpt.py --data books-tokens

A byte-level BPE tokenizer is trained on the text (or taken from --tokenizer), and the text is written
in its tokens, two bytes each (four, where there are more than 65536 of them).  A document is a file, or
what is in a file between lines `<|endoftext|>`; some are put aside to validate on, or the end of one
where all are too large for that.  The same text and options give the same files, byte for byte.
index.json is written last: a folder without it is not finished, and the same command begins it again.

Exit codes: 0 finished, 1 a file could not be written, 2 bad input, 130 stopped by Ctrl-C.
"""

from __future__ import annotations

if __name__ == "__main__":
    import start

import argparse
import json
import os
import shlex
import sys
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import checkpoint
from bars import bar
from errors import AGAIN, EXPECTED, DataError, OptionError, program, tell
from folder_lock import LOCK, locked, refuse_taken
from settings import OneLineParser, positive
from shards import (
    FORMAT,
    INDEX,
    SPLITS,
    TOKENIZER,
    UNFINISHED,
    ShardWriter,
    left_over,
    token_dtype,
)
from text_folder import Chunk, Source, Split, changed, chunks, find_sources, note
from vocabulary import BPE, END_OF_TEXT, vocabulary_of

VOCABULARY, SMALLEST, LARGEST = 32768, 257, 1 << 24  # of ids; each byte is one, and END_OF_TEXT
BATCH = 1 << 20  # bytes of text that are encoded together


def parse(argv: list[str] | None) -> argparse.Namespace:
    p = OneLineParser(
        "prepare_data.py",
        description=__doc__,
        allow_abbrev=False,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = p.add_argument
    add("text", nargs="?", help="a folder of text or a file (Python's language reference)")
    add("--out", help="folder of the tokens, a new one (the name of the text, and -tokens)")
    add("--include", default="*", help="names of the files in a folder, '*.txt' say", metavar="PATTERN")
    add("--separator", default=END_OF_TEXT, help="line between documents (%(default)s)", metavar="LINE")
    add("--vocab-size", type=positive(int), help=f"ids of a new tokenizer ({VOCABULARY})", metavar="N")
    add("--tokenizer", help="a tokenizer.json, or a folder of tokens or of a run", metavar="PATH")
    add(
        "--tokenizer-bytes",
        type=positive(int),
        default=1 << 28,
        help="a new tokenizer sees at most so much text, evenly spread (%(default)s)",
        metavar="N",
    )
    add(
        "--validation-share",
        type=positive(float),
        default=0.05,
        help="of the text, to validate on (%(default)s)",
        metavar="X",
    )
    add("--shard-tokens", type=positive(int), default=1 << 27, help="of a file", metavar="N")
    options = p.parse_args(argv)
    if options.vocab_size is not None and options.tokenizer is not None:
        p.error("--vocab-size is of a new tokenizer; leave it out beside --tokenizer")
    options.vocab_size = options.vocab_size or VOCABULARY
    if not SMALLEST <= options.vocab_size <= LARGEST:
        p.error(f"--vocab-size is {options.vocab_size}; it takes from {SMALLEST} to {LARGEST}")
    if options.validation_share >= 1:
        p.error(f"--validation-share is {options.validation_share:g}; it takes a number below 1")
    options.include = options.include.removeprefix("**/")
    if not options.include or os.path.isabs(options.include) or "**" in options.include:
        p.error(f"--include is {options.include!r}; it takes the name of files, '*.txt' say")
    if options.out is None:
        options.out = f"{Path(options.text or 'reference').resolve().stem}-tokens"
    return options


def new_folder(out: str) -> Path:
    """A folder to write to; OptionError where something would be lost in it."""
    folder = Path(out)
    ours = {folder / LOCK, *left_over(folder)}
    if folder.exists() and (not folder.is_dir() or any(p not in ours for p in folder.iterdir())):
        finished = (folder / INDEX).is_file()
        what = "which is finished" if finished else "which is there and not an empty folder"
        raise OptionError(f"--out is {out!r}, {what}; it takes a new one. Remove it, or name another.")
    return folder


def with_bar(found: Iterable[Chunk], what: str, total: int | None = None) -> Iterator[Chunk]:
    with bar(0.5, total=total, desc=what, unit="B", unit_scale=True) as shown:
        for chunk in found:
            yield chunk
            shown.update(len(chunk.text))


def known_tokenizer(path: str) -> BPE:
    """The one that --tokenizer names."""
    file = Path(path) / TOKENIZER if Path(path).is_dir() else Path(path)
    run = checkpoint.path_of(path)
    shared = (Path(path) / checkpoint.LATEST).is_file()
    if shared or (run.suffix == ".safetensors" and run.is_file()):
        from sharded import find  # which takes a second

        vocabulary = vocabulary_of(find(path).facts["vocabulary"])
        if not isinstance(vocabulary, BPE):
            raise OptionError(
                f"--tokenizer is {path!r}, a run on {vocabulary.unit}s; it takes one on tokens. "
                "Pass the text itself to train_gpt.py --init-from."
            )
        return vocabulary
    try:
        return BPE(file.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise OptionError(
            f"--tokenizer is {path!r}, and {file} cannot be read ({error}); it takes a {TOKENIZER}, or "
            "a folder of tokens or of a run. Leave it out to train one."
        ) from None


def train_tokenizer(texts: Iterable[str], vocab_size: int) -> BPE:
    """Byte-level BPE: text is cut as by GPT-2, and bytes are merged, the commonest pair first.

    Source: Sennrich et al., "Neural Machine Translation of Rare Words with Subword Units" (2016);
    Radford et al., "Language Models are Unsupervised Multitask Learners" (2019).
    """
    BPE.needs_tokenizers()
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[END_OF_TEXT],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    return BPE(tokenizer.to_str())


def evenly(texts: Iterable[str], share: float) -> Iterator[str]:
    """Some of the texts, about `share` of their length."""
    seen = taken = 0
    for text in texts:
        seen += len(text)
        if taken < seen * share:
            taken += len(text)
            yield text


def write_tokens(
    parts: Iterable[tuple[str, str, bool]], bpe: BPE, writers: dict[str, ShardWriter]
) -> dict[str, int]:
    """Encode the parts and write them; returns how many bytes of text each split has."""
    n_bytes = dict.fromkeys(SPLITS, 0)
    batch: list[tuple[str, str, bool]] = []

    def flush() -> None:
        for (split, text, ends), ids in zip(batch, bpe.ids([t for _, t, _ in batch]), strict=True):
            writers[split].write([*ids, bpe.end_of_text] if ends else ids)
            n_bytes[split] += len(text.encode())
        batch.clear()

    size = 0
    for part in parts:
        batch.append(part)
        size += len(part[1])
        if size >= BATCH:
            flush()
            size = 0
    flush()
    for writer in writers.values():
        writer.close()
    return n_bytes


def prepare(options: argparse.Namespace) -> None:
    """Write the folder."""
    refuse_taken(Path(options.out))
    folder = new_folder(options.out)
    with locked(folder, AGAIN):
        new_folder(options.out)  # a preparation may have ended in it before it was locked
        write(folder, options)


def write(folder: Path, options: argparse.Namespace) -> None:
    """All that the folder is to hold."""
    bpe = None if options.tokenizer is None else known_tokenizer(options.tokenizer)
    BPE.needs_tokenizers()
    sources: Sequence[Source] = find_sources(options.text, options.include)

    def text(what: str, total: int | None = None) -> Iterator[Chunk]:
        return with_bar(chunks(sources, options.separator), what, total)

    with_text: set[Source] = set()

    def reading() -> Iterator[Chunk]:
        for chunk in text("reading"):
            with_text.add(chunk.source)
            yield chunk

    split = Split.of(options.validation_share, reading())
    if not len(split.digests):
        n, fit, do = len(sources), "", "another file"
        if not os.path.isfile(options.text):
            files = "1 file fits" if n == 1 else f"{n} files fit"
            fit, do = f" ({files} --include {options.include!r})", "another folder or --include"
        raise DataError(
            f"there is no text in {options.text!r}{fit}; it takes at least one document. Pass {do}."
        )
    note("empty, or nothing but white space", [s for s in sources if s not in with_text])
    split.check()
    total = split.n_bytes
    if bpe is None:
        share = min(1.0, options.tokenizer_bytes / total)
        training = (t for name, t, _ in split.parts(text("tokenizer", total)) if name == "train")
        bpe = train_tokenizer(evenly(training, share), options.vocab_size)
    dtype = token_dtype(bpe.size)
    for path in left_over(folder):
        path.unlink()
    checkpoint.write_atomically(folder / UNFINISHED, b"", AGAIN)
    checkpoint.write_atomically(folder / TOKENIZER, bpe.tokenizer.encode(), AGAIN)
    writers = {name: ShardWriter(folder, name, dtype, options.shard_tokens) for name in SPLITS}
    n_bytes = write_tokens(split.parts(text("encoding", total)), bpe, writers)
    if sum(n_bytes.values()) != total:
        raise changed()
    index: dict[str, Any] = {
        "format": FORMAT,
        "vocab_size": bpe.size,
        "tokenizer_sha256": bpe.sha256,
        "documents": len(split.digests),
    }
    for name, writer in writers.items():
        tokens = sum(entry["tokens"] for entry in writer.entries)
        index[name] = {"bytes": n_bytes[name], "tokens": tokens, "shards": writer.entries}
    content = json.dumps(index, indent=1) + "\n"
    checkpoint.write_atomically(folder / INDEX, content.encode(), AGAIN)
    (folder / UNFINISHED).unlink()
    for name in SPLITS:
        part = index[name]
        print(
            f"{name:<12}{part['bytes']:,} bytes in {part['tokens']:,} tokens, "
            f"{len(part['shards'])} files"
        )
    share, wanted = n_bytes["validation"] / total, options.validation_share
    if abs(share - wanted) >= wanted / 2:
        n = len(split.digests)
        print(
            f"note: validation has {100 * share:.3g}% of the bytes, not {100 * wanted:.3g}%: it takes "
            f"whole documents, or the end of one, and there {'is' if n == 1 else 'are'} {n}; pass "
            "another --validation-share, or more text"
        )
    print(f"{'tokenizer':<12}{bpe.size:,} ids, SHA-256 {bpe.sha256}")
    train = Path(sys.argv[0]).with_name("train_gpt.py")
    print(f"{'files':<12}{folder}: {program('python')} {train} --data {shlex.quote(str(folder))}")


def main(argv: list[str] | None = None) -> int:
    options = parse(argv)
    try:
        prepare(options)
        return 0
    except EXPECTED as error:
        return tell("prepare_data.py", error)


if __name__ == "__main__":
    start.run(main)
