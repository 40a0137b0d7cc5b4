"""Text to files of tokens: what is in them, and what happens when one is damaged."""

from __future__ import annotations

# ruff: noqa: F401, F811  (fixtures are imported)
import hashlib
import importlib
import io
import json
import resource
import shutil
import signal
from pathlib import Path

import numpy as np
import pytest
import torch
from example_scripts import (
    PREPARED,
    TINY,
    books,
    called,
    examples_path,
    fingerprint,
    refused,
    send_when,
    start,
    tokens,
)
from hypothesis import given
from hypothesis import strategies as st

pytest.importorskip("tokenizers", reason="BPE needs the package tokenizers")

SHARD = "train-00001.bin"


def module(name: str):
    return importlib.import_module(name)


def files(folder: Path) -> dict[str, bytes]:
    return {p.name: p.read_bytes() for p in folder.iterdir()}


def documents_of(books: Path) -> list[str]:
    several = (books / "more" / "several.txt").read_text()
    parts = [part.removeprefix("\n") for part in several.split("<|endoftext|>")]
    return [p.read_text() for p in sorted(books.glob("*.txt"))] + [p for p in parts if p]


def documents_in(ids: torch.Tensor, bpe) -> list[str]:
    """The documents of a split, from its tokens."""
    assert ids[-1] == bpe.end_of_text
    ends = (ids == bpe.end_of_text).nonzero().flatten().tolist()
    begins = [0, *(end + 1 for end in ends)]
    return ["".join(bpe.pieces(ids[a:b].tolist())) for a, b in zip(begins, ends, strict=False)]


# --- what is written ------------------------------------------------------------------------------


def test_the_same_text_gives_the_same_files(tmp_path, books, tokens):
    called("prepare_data", books, "--out", tmp_path / "again", *PREPARED)
    assert files(tmp_path / "again") == files(tokens)
    names = {"index.json", "tokenizer.json", "validation-00000.bin"}
    assert names | {f"train-{i:05}.bin" for i in range(3)} == files(tokens).keys()
    index = json.loads((tokens / "index.json").read_bytes())
    for split in ("train", "validation"):
        for shard in index[split]["shards"]:
            content = (tokens / shard["file"]).read_bytes()
            assert hashlib.sha256(content).hexdigest() == shard["sha256"]
            assert len(content) == 2 * shard["tokens"]
    sizes = [shard["tokens"] for shard in index["train"]["shards"]]
    assert sizes[:-1] == [10000] * 2
    assert 0 < sizes[-1] <= 10000


def test_every_document_is_in_one_part_and_comes_back(books, tokens):
    data = module("shards").TokenFolder.open(tokens)
    train, validation = (documents_in(x[:], data.vocabulary) for x in (data.train, data.validation))
    assert sorted(train + validation) == sorted(documents_of(books))
    share = len("".join(validation).encode()) / len("".join(train + validation).encode())
    assert 0.05 < share <= 0.1
    index = json.loads((tokens / "index.json").read_bytes())
    assert index["documents"] == 40
    assert index["validation"]["bytes"] == len("".join(validation).encode())


def test_copies_are_on_one_side_and_an_own_tokenizer_is_taken(tmp_path, books, tokens):
    folder = tmp_path / "twice"
    shutil.copytree(books, folder / "a")
    shutil.copytree(books, folder / "b")
    called("prepare_data", folder, "--out", tmp_path / "out", "--tokenizer", tokens)
    assert (tmp_path / "out/tokenizer.json").read_bytes() == (tokens / "tokenizer.json").read_bytes()
    data = module("shards").TokenFolder.open(tmp_path / "out")
    validation = documents_in(data.validation[:], data.vocabulary)
    assert len(validation) == 2 * len(set(validation)) > 0
    assert not set(validation) & set(documents_in(data.train[:], data.vocabulary))


def test_the_end_of_a_single_document_is_to_validate_on(tmp_path, capsys, books, tokens):
    book = books / "more" / "several.txt"
    options = ["--tokenizer", tokens / "tokenizer.json", "--validation-share", "0.2"]
    called("prepare_data", book, "--out", tmp_path / "out", "--separator", "-", *options)
    data = module("shards").TokenFolder.open(tmp_path / "out")
    (train,), (validation,) = (
        documents_in(x[:], data.vocabulary) for x in (data.train, data.validation)
    )
    assert train + validation == book.read_text()
    assert train.endswith("\n")
    assert 0.1 < len(validation) / len(train + validation) <= 0.2


@given(st.text(alphabet="ab \n\u2603\U0001d11e", max_size=60), st.integers(15, 30))
def test_chunks_are_whole_characters_of_all_of_a_document(text, size):
    text_folder = module("text_folder")
    before = text_folder.CHUNK
    text_folder.CHUNK = size
    try:
        source = text_folder.Topic("x", text + "\n<|endoftext|>\nmore")
        found = list(text_folder.chunks([source], "<|endoftext|>"))
    finally:
        text_folder.CHUNK = before
    first = [chunk for chunk in found if chunk.document == found[0].document]
    if not text.strip():
        first = []
    assert "".join(chunk.decode() for chunk in first) == (text + "\n" if first else "")
    assert "".join(chunk.decode() for chunk in found[len(first) :]) == "more"
    assert [chunk.last for chunk in found].count(True) == 1 + bool(first)
    for chunk in found:
        assert len(chunk.text) <= 3 * size + 4
        assert source.text.encode()[chunk.offset :].startswith(chunk.text)


@given(st.lists(st.integers(0, 12), min_size=1), st.data())
def test_ids_in_several_files_are_one_array(lengths, data):
    whole = np.arange(sum(lengths), dtype="<u2")
    tokens = module("shards").Tokens(np.split(whole, np.cumsum(lengths)[:-1]))
    assert len(tokens) == len(whole)
    a, b = data.draw(st.integers(0, 150)), data.draw(st.integers(0, 150))
    assert tokens[a:b].tolist() == whole[a:b].tolist()
    assert tokens[:].dtype == torch.int64
    if len(whole):
        places = torch.randint(len(whole), (3, 4))
        assert torch.equal(tokens[places], places)


def test_more_ids_than_two_bytes_hold_take_four(tmp_path):
    shards = module("shards")
    assert shards.token_dtype(65536).itemsize == 2
    writer = shards.ShardWriter(tmp_path, "train", shards.token_dtype(65537), 3)
    for part in ([65536, 1], [2, 3, 4, 5], [6]):
        writer.write(part)
    writer.close()
    assert [entry["tokens"] for entry in writer.entries] == [3, 3, 1]
    found = [shards.map_file(tmp_path / e["file"], shards.token_dtype(65537)) for e in writer.entries]
    assert shards.Tokens(found)[:].tolist() == [65536, 1, 2, 3, 4, 5, 6]


@given(st.text(max_size=20))
def test_text_comes_back_from_its_tokens(tokens, text):
    bpe = module("vocabulary").BPE((tokens / "tokenizer.json").read_text())
    text += "<|endoftext|> \u2603"  # as text, not as the token
    ids = bpe.codes(text.encode())
    assert bpe.end_of_text not in ids
    assert "".join(bpe.pieces(ids.tolist())) == text
    assert bpe.n_bytes(ids) == len(text.encode())


# --- damage ---------------------------------------------------------------------------------------


def shorten(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-2])


def alter(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[777] ^= 1
    path.write_bytes(content)


@pytest.mark.parametrize(
    ("name", "damage", "said"),
    [
        (SHARD, shorten, f"{SHARD} has 19998 bytes; index.json says 20000. Restore it"),
        (SHARD, Path.unlink, f"{SHARD} cannot be read (No such file or directory); index.json says"),
        (SHARD, alter, f"{SHARD} was altered: its SHA-256 is"),
        ("tokenizer.json", alter, "tokenizer.json is not the one of the shards"),
        ("tokenizer.json", Path.unlink, "without tokenizer.json"),
        ("index.json", shorten, "index.json is not an index of this version"),
        ("index.json", Path.unlink, "without index.json: its preparation did not end"),
    ],
)
def test_damaged_tokens_are_found_at_the_start(tmp_path, capsys, tokens, name, damage, said):
    folder = tmp_path / "tokens"
    shutil.copytree(tokens, folder)
    damage(folder / name)
    before = fingerprint(tmp_path)
    for way in ([], ["--skip-checksums"]) if damage != alter else ([],):
        out = refused(capsys, "train_gpt", "--data", folder, "--out", tmp_path / "run", *TINY, *way)
        assert said in out
        assert "prepare_data.py TEXT --out" in out
    assert fingerprint(tmp_path) == before


def test_checksums_can_be_left_out(tmp_path, tokens):
    folder = tmp_path / "tokens"
    shutil.copytree(tokens, folder)
    alter(folder / SHARD)
    assert len(module("shards").TokenFolder.open(folder, checksums=False).train) > 20000


def test_a_preparation_that_is_killed_is_not_finished_and_begins_again(tmp_path, capsys, books, tokens):
    """Killed for good, with a file written; and at the last moment, before the index has its name."""
    big, out = tmp_path / "big", tmp_path / "out"
    big.mkdir()
    text = (books / "more" / "several.txt").read_text().replace("<|endoftext|>", "")
    (big / "a.txt").write_text(text * 100)
    (big / "b.txt").write_text(text[:2000])
    options = ["--tokenizer", tokens, "--shard-tokens", "10000", "--out", out]
    process = start("prepare_data.py", big, *options, cwd=tmp_path)
    send_when(process, (out / SHARD).exists, signal.SIGKILL)
    assert process.returncode == -signal.SIGKILL
    (out / "index.json.partial").write_bytes(b"{")
    assert "its preparation did not end" in refused(capsys, "train_gpt", "--data", out)
    called("prepare_data", books, "--out", out, *PREPARED)
    assert files(out) == files(tokens)
    said = refused(capsys, "prepare_data", books, "--out", out)
    assert "which is finished; it takes a new one" in said


@pytest.mark.parametrize("name", ["tokenizer.json", SHARD, "index.json.partial"])
def test_files_of_others_are_not_written_over(tmp_path, capsys, books, name):
    (tmp_path / name).write_bytes(b"mine")
    said = refused(capsys, "prepare_data", books, "--out", tmp_path, *PREPARED)
    assert "which is there and not an empty folder" in said
    assert files(tmp_path) == {name: b"mine"}


def test_a_full_disk_is_named(tmp_path, capsys, books):
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (40000, hard))
    options = ["--out", tmp_path / "out", "--vocab-size", "300"]
    try:
        said = refused(capsys, "prepare_data", books, *options, code=1)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert "train-00000.bin could not be written (File too large)" in said
    assert "Make room, then run the same command again." in said
    called("prepare_data", books, *options)


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["nowhere"], "there is no 'nowhere'; it takes a text file or a folder"),
        (["empty"], "there is no text in 'empty' (1 files fit --include '*')"),
        (["books", "--include", "*.md"], "there is no text in 'books' (0 files fit --include '*.md')"),
        (["latin"], "latin/a.txt is not UTF-8 (byte 0xe9 at offset 70003); it takes text"),
        (["same"], "the 2 documents are the same"),
        (["books", "--out", "latin"], "--out is 'latin', which is there and not an empty folder"),
        (["books", "--vocab-size", "256"], "--vocab-size is 256; it takes from 257 to"),
        (["books", "--validation-share", "1"], "--validation-share is 1; it takes a number below 1"),
        (["books", "--tokenizer", "x", "--vocab-size", "300"], "leave it out beside --tokenizer"),
        (["books", "--tokenizer", "nowhere.json"], "nowhere.json cannot be read"),
        (["books", "--tokenizer", "latin/a.txt"], "latin/a.txt cannot be read"),
        (["books", "--tokenizer", "other.json"], "the tokenizer cannot be read"),
    ],
)
def test_bad_input_is_refused_and_nothing_written(
    tmp_path, monkeypatch, capsys, books, arguments, said
):
    monkeypatch.chdir(tmp_path)
    Path("books").symlink_to(books)
    for folder in ("empty", "latin", "same"):
        Path(folder).mkdir()
    Path("empty/nothing.txt").write_text(" \n")
    Path("latin/a.txt").write_bytes(b"a line\n" * 10000 + "caf\u00e9".encode("latin-1"))
    for name in "ab":
        Path(f"same/{name}.txt").write_text("the same")
    Path("other.json").write_text("{}")
    before = fingerprint(tmp_path)
    assert said in refused(capsys, "prepare_data", *arguments)
    assert fingerprint(tmp_path) == before


def test_tokenizers_that_lose_something_are_refused(tokens):
    vocabulary = module("vocabulary")
    content = json.loads((tokens / "tokenizer.json").read_text())
    for change in ({"normalizer": {"type": "Lowercase"}}, {"added_tokens": []}):
        changed = content | change
        if not changed["added_tokens"]:
            del changed["model"]["vocab"]["<|endoftext|>"]
        with pytest.raises(module("errors").DataError, match="not a byte-level BPE"):
            vocabulary.BPE(json.dumps(changed)).opening()
