"""Text to files of tokens: what is in them, and what happens when one is damaged."""

from __future__ import annotations

# ruff: noqa: F401, F811  (fixtures are imported)
import hashlib
import importlib
import io
import json
import os
import resource
import shutil
import signal
import socket
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
    assert "note: validation" not in capsys.readouterr().out


def split_of(texts: list[str], share: float) -> dict[str, list[str]]:
    """The documents of each split."""
    text_folder = module("text_folder")
    sources = [text_folder.Topic(f"{i}", text) for i, text in enumerate(texts)]
    split = text_folder.Split.of(share, text_folder.chunks(sources, "-"))
    split.check()
    found: dict[str, list[str]] = {"train": [""], "validation": [""]}
    for name, part, ends in split.parts(text_folder.chunks(sources, "-")):
        found[name][-1] += part
        found[name] += [""] * ends
    return {name: [text for text in documents if text] for name, documents in found.items()}


@pytest.mark.parametrize(
    "lengths",
    [[100] * 2, [100] * 4, [100, 101, 102, 103], [40, 200, 200], [100] * 10, [2**13] * 3],
    ids=str,
)
@pytest.mark.parametrize("copies", [1, 2])
def test_documents_larger_than_the_share_are_split(lengths, copies):
    """One of them, the smallest, or its copies at the same place."""
    texts = [f"{i} is its number\n" * n for i, n in enumerate(lengths)] * copies
    found = split_of(texts, 0.05)
    whole = "".join(texts)
    assert 0.04 < len("".join(found["validation"])) / len(whole) <= 0.05
    assert len({*found["validation"]}) == 1 and len(found["validation"]) == copies
    assert len(found["train"]) == len(texts)
    assert sorted("".join(found["train"] + found["validation"])) == sorted(whole)
    rest = {*found["train"]} - {*texts}
    assert {a + b for a in rest for b in found["validation"]} <= {*texts} and len(rest) == 1


@pytest.mark.parametrize("lengths", [[1, 200, 200], [1, 1, 500], [3, 9, 99, 100]], ids=str)
def test_few_small_documents_are_not_all_of_the_validation(lengths):
    texts = [f"{i} is its number\n" * n for i, n in enumerate(lengths)]
    found = split_of(texts, 0.05)
    assert 0.03 < len("".join(found["validation"])) / len("".join(texts)) < 0.075
    assert sorted("".join(found["train"] + found["validation"])) == sorted("".join(texts))


@given(st.lists(st.text("a\n\u2603", min_size=1, max_size=9), min_size=2), st.floats(0.001, 0.99))
def test_documents_of_any_lengths_come_back(texts, share):
    texts = [text if text.strip() else "a" for text in texts]
    if len({*texts}) == 1:
        return
    found = split_of(texts, share)
    assert found["train"] and found["validation"]
    assert sorted("".join(found["train"] + found["validation"])) == sorted("".join(texts))


def test_a_share_that_whole_documents_do_not_make_is_told(tmp_path, capsys):
    (tmp_path / "texts").mkdir()
    for i in range(10):
        (tmp_path / "texts" / f"{i}.txt").write_text(f"{i}\n")
    called("prepare_data", tmp_path / "texts", "--out", tmp_path / "out", "--vocab-size", "300")
    said = (
        "note: validation has 10% of the bytes, not 5%: it takes whole documents, or the end of one, "
    )
    assert said + "and there are 10; pass another" in capsys.readouterr().out


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


@given(st.text(alphabet="a\n\u2603", min_size=2, max_size=6), st.floats(0.01, 0.99))
def test_both_parts_of_a_single_document_have_text(text, share):
    text_folder = module("text_folder")
    text += "a" if not text.strip() else ""
    source = [text_folder.Topic("x", text)]
    split = text_folder.Split.of(share, text_folder.chunks(source, "-"))
    split.check()
    parts = list(split.parts(text_folder.chunks(source, "-")))
    assert [name for name, _, _ in parts] == ["train", "validation"]
    assert all(ends and part for _, part, ends in parts)
    assert "".join(part for _, part, _ in parts) == text


# --- odd texts ------------------------------------------------------------------------------------


def found(root: Path, include: str = "*") -> list[str]:
    return [str(p.relative_to(root)) for p in module("text_folder").find_sources(str(root), include)]


def test_links_are_followed_and_no_folder_is_read_twice(tmp_path, capsys):
    """A link to a folder elsewhere, one to a folder of the text, one to the text itself, links to each
    other's folders, and one to a file."""
    root, elsewhere = tmp_path / "texts", tmp_path / "elsewhere"
    for folder in (root / "b" / "c", elsewhere / "deep"):
        folder.mkdir(parents=True)
    for file in (root / "b" / "c" / "1.txt", elsewhere / "2.txt", elsewhere / "deep" / "3.txt"):
        file.write_text(file.name)
    (root / "a").symlink_to(root / "b")
    (root / "linked").symlink_to(elsewhere)
    (root / "b" / "up").symlink_to("..")
    (elsewhere / "deep" / "back").symlink_to(root / "b")
    (root / "one.txt").symlink_to(elsewhere / "2.txt")
    files = ["b/c/1.txt", "linked/2.txt", "linked/deep/3.txt", "one.txt"]
    assert found(root) == files
    said = capsys.readouterr().out
    assert said == (
        f"note: read already under another name: {root}/a, {root}/b/up, {root}/linked/deep/back\n"
    )
    (tmp_path / "link").symlink_to(root)
    assert found(tmp_path / "link") == files


def test_what_holds_no_text_is_told(tmp_path, capsys, books, tokens):
    root = tmp_path / "texts"
    shutil.copytree(books, root)
    os.mkfifo(root / "pipe.txt")
    os.mkfifo(root / "pipe.other")
    with socket.socket(socket.AF_UNIX) as at:
        at.bind(os.path.relpath(root / "socket.txt"))
    (root / "empty.txt").touch()
    (root / "blank.txt").write_text(" \n\n")
    options = ["--include", "*.txt", "--tokenizer", tokens, *PREPARED[2:]]
    called("prepare_data", root, "--out", tmp_path / "out", *options)
    said = capsys.readouterr().out
    assert (
        "note: no file but a pipe, a socket or a device, left out: "
        f"{root}/pipe.txt, {root}/socket.txt\n"
        f"note: empty, or nothing but white space: {root}/blank.txt, {root}/empty.txt\n"
    ) in said
    assert files(tmp_path / "out") == files(tokens)


def test_many_are_told_by_the_first(capsys):
    module("text_folder").note("empty", [f"{n}" for n in range(7)])
    assert capsys.readouterr().out == "note: empty: 0, 1, 2, 3, 4, ...\n"


def closed(path: Path, monkeypatch) -> None:
    """It cannot be read: permissions would not stop root."""

    def guarded(before):
        def call(at, *arguments: object, **how: object):
            if Path(at) == path:
                raise PermissionError(13, "Permission denied", str(path))
            return before(at, *arguments, **how)

        return call

    monkeypatch.setattr(os, "scandir", guarded(os.scandir))
    monkeypatch.setattr(Path, "open", guarded(Path.open))


@pytest.mark.parametrize(
    ("make", "name", "said"),
    [
        (lambda path, m: (path.mkdir(), closed(path, m)), "closed", "which cannot be read (Permission"),
        (lambda path, m: (path.touch(), closed(path, m)), "closed.txt", "which cannot be read (Permi"),
        (
            lambda path, m: path.symlink_to("nowhere"),
            "linked",
            "a link that cannot be followed (No such",
        ),
        (lambda path, m: path.symlink_to(path), "loop", "a link that cannot be followed (Too many"),
    ],
)
def test_what_cannot_be_read_is_an_error(tmp_path, monkeypatch, capsys, books, make, name, said):
    """A folder or a link also where its name does not fit: what it should lead to may."""
    root = tmp_path / "texts"
    shutil.copytree(books, root)
    path = root / "more" / name
    make(path, monkeypatch)
    options = ["--include", "*.txt", "--out", tmp_path / "out"]
    out = refused(capsys, "prepare_data", root, *options, *PREPARED)
    assert f"the text has {str(path)!r}, {said}" in out
    assert "Mend it, or take it out of the text." in out
    assert not (tmp_path / "out").exists()


def test_hidden_things_may_be_anything(tmp_path, monkeypatch):
    for folder in (".git", "more"):
        (tmp_path / folder).mkdir()
    closed(tmp_path / ".git", monkeypatch)
    (tmp_path / ".link").symlink_to("nowhere")
    (tmp_path / "more" / "a.txt").write_text("a")
    (tmp_path / "more" / "b.md").write_text("b")
    assert found(tmp_path) == ["more/a.txt", "more/b.md"]
    assert found(tmp_path, "*.txt") == found(tmp_path, "more/*.txt") == ["more/a.txt"]
    assert found(tmp_path, "other/*.txt") == []


def test_a_text_that_changes_while_it_is_read_is_refused(tmp_path, monkeypatch, capsys, books):
    """It grows by documents, or by a line, behind the first reading."""
    root = tmp_path / "texts"
    shutil.copytree(books, root)
    check = module("text_folder").Split.check

    for more in ("\n<|endoftext|>\nmore" * 3, " and more"):

        def grown(self, more: str = more) -> None:
            with open(root / "more" / "several.txt", "a") as file:
                file.write(more)
            check(self)

        monkeypatch.setattr(module("text_folder").Split, "check", grown)
        said = refused(capsys, "prepare_data", root, "--out", tmp_path / "out", *PREPARED)
        assert "the text has changed while it was read" in said


def test_a_validation_part_without_text_is_refused_before_training(tmp_path, capsys):
    """A document of one letter: what is predicted behind that is its end alone."""
    texts, out = tmp_path / "texts", tmp_path / "out"
    texts.mkdir()
    (texts / "long.txt").write_text("the cat sat on the mat and ran far away\n" * 500)
    (texts / "short.txt").write_text("a")
    sizes = ["--vocab-size", "300", "--validation-share", "0.00001"]
    called("prepare_data", texts, "--out", out, *sizes)
    said = refused(capsys, "train_gpt", "--data", out, "--out", tmp_path / "run", *TINY)
    assert "has 2 tokens to validate on, of which 1 are predicted: ends of documents, with 0 b" in said
    assert "Prepare it with a larger --validation-share" in said
    assert not (tmp_path / "run").exists()


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


@pytest.mark.slow
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
        (["empty"], "no text in 'empty' (1 file fits --include '*'); it takes at least one document."),
        (
            ["empty/nothing.txt"],
            "no text in 'empty/nothing.txt'; it takes at least one document. Pass another file.",
        ),
        (["books", "--include", "*.md"], "no text in 'books' (0 files fit --include '*.md'); it takes"),
        (["letter.txt"], "the text has one character; it takes two at least"),
        (["/dev/null"], "'/dev/null' is neither a file nor a folder"),
        (["gone"], "the text has 'gone', a link that cannot be followed (No such file or directory)"),
        (["books", "--include", "/x"], "--include is '/x'; it takes the name of files, '*.txt' say"),
        (["books", "--include", ""], "--include is ''; it takes the name of files"),
        (["books", "--include", "a/**/b"], "--include is 'a/**/b'; it takes the name of files"),
        (["latin"], "latin/a.txt is not UTF-8 (byte 0xe9 at offset 70003); it takes text"),
        (["latin/a.txt"], "Convert it, with iconv -f latin1 -t utf-8 say, or leave it out"),
        (["wide.txt"], "in UTF-8. Convert it, with iconv -f utf-16 -t utf-8, or leave it out"),
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
    Path("letter.txt").write_text("\u2603")
    Path("wide.txt").write_bytes("\ufefftext".encode("utf-16-be"))
    Path("gone").symlink_to("nowhere")
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


def test_a_tokenizer_whose_ids_have_gaps_is_refused(tmp_path, capsys, books, tokens):
    content = json.loads((tokens / "tokenizer.json").read_text())
    vocab = content["model"]["vocab"]
    last = max(vocab, key=vocab.get)
    vocab[last] = 600
    (tmp_path / "gaps.json").write_text(json.dumps(content))
    out = tmp_path / "out"
    said = refused(capsys, "prepare_data", books, "--tokenizer", tmp_path / "gaps.json", "--out", out)
    assert "the tokenizer has 512 tokens with ids up to 600; it takes ids without gaps, from 0" in said
    assert not out.exists()
