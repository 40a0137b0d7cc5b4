"""generate.py and train_gpt.py with a folder in transformers' layout in the place of a run's."""

from __future__ import annotations

# ruff: noqa: F401, F811  (fixtures are imported)
import importlib
import json
from contextlib import ExitStack
from pathlib import Path

import pytest
import torch
from example_scripts import TINY, books, called, examples_path, refused, rows, text, tokens

from flashproto.nn import GPT, GPTConfig, RopeScaling

tokenizers = pytest.importorskip("tokenizers", reason="BPE needs the package tokenizers")

LLAMA = GPTConfig(
    *(520, 96, 2, 4, 32),
    n_kv_heads=2,
    norm="rms",
    mlp="swiglu",
    positions="rope",
    bias=False,
    rope_scaling=RopeScaling(8.0, original_context=32),
)
BEGIN = "<|begin_of_text|>"


@pytest.fixture(scope="module")
def gpt2(tmp_path_factory: pytest.TempPathFactory, tokens: Path) -> Path:
    """A GPT-2 with more rows than the tokenizer has ids."""
    folder = tmp_path_factory.mktemp("gpt2")
    torch.manual_seed(0)
    GPT(GPTConfig(520, 24, 2, 2, 16)).save_pretrained(folder)
    (folder / "tokenizer.json").write_text((tokens / "tokenizer.json").read_text())
    return folder


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory, tokens: Path) -> Path:
    """A Llama in bfloat16, whose tokenizer puts a token before a text and ends one as Llama 3's."""
    folder = tmp_path_factory.mktemp("llama")
    torch.manual_seed(0)
    GPT(LLAMA, dtype=torch.bfloat16).save_pretrained(folder)
    written = (tokens / "tokenizer.json").read_text().replace("<|endoftext|>", "<|end_of_text|>")
    tokenizer = tokenizers.Tokenizer.from_str(written)
    tokenizer.add_special_tokens([BEGIN])
    special = [(BEGIN, tokenizer.token_to_id(BEGIN))]
    tokenizer.post_processor = tokenizers.processors.TemplateProcessing(
        single=f"{BEGIN} $A", special_tokens=special
    )
    (folder / "tokenizer.json").write_text(tokenizer.to_str())
    return folder


def vocabulary_of(folder: Path):
    return importlib.import_module("vocabulary").BPE((folder / "tokenizer.json").read_text())


def test_generate_continues_a_prompt(gpt2, llama, capsys):
    for folder, before in ((gpt2, []), (llama, [512])):
        bpe, prompt = vocabulary_of(folder), "the first words"
        ids = bpe.prompt(prompt)
        assert ids.tolist() == before + bpe.codes(prompt.encode()).tolist()
        model = GPT.from_pretrained(folder)
        want = model.generate(ids[None], 8, temperature=0)[0, len(ids) :].tolist()
        options = ["--tokens", "8", "--temperature", "0", "--device", "cpu"]
        capsys.readouterr()
        called("generate", "--run", folder, "--prompt", prompt, *options)
        text = "".join(bpe.pieces(want)).replace("\ufffd", "?")
        assert capsys.readouterr().out == prompt + text + "\n"
        called("generate", "--run", folder, *options)  # from what opens a text
        assert "note:" not in capsys.readouterr().err
        called("generate", "--run", folder, "--prompt", f"{prompt} ", *options)
        assert "note: --prompt ends with a space" in capsys.readouterr().err


def test_opening_and_end_are_the_tokenizers_own(gpt2, llama):
    ends = "<|endoftext|>", "<|end_of_text|>"
    for folder, opens, end in ((gpt2, ends[0], ends[0]), (llama, BEGIN, ends[1])):
        bpe = vocabulary_of(folder)
        assert bpe.opening()[1].tolist() == [bpe.engine.token_to_id(opens)]
        assert bpe.end_of_text == bpe.engine.token_to_id(end)
        assert bpe.lengths[bpe.end_of_text] == 0


def test_a_run_begins_with_its_weights(llama, text, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    train_gpt = importlib.import_module("train_gpt")
    options = [*TINY, "--data", str(text), "--init-from", str(llama)]
    with ExitStack() as held:
        prepared = train_gpt.prepare(train_gpt.parse(options, None), held)
    for x, y in zip(prepared.model.parameters(), GPT.from_pretrained(llama).parameters(), strict=True):
        assert x.dtype == torch.float32
        assert torch.equal(x, y.float())
    assert prepared.model.config.rope_scaling == LLAMA.rope_scaling
    assert (prepared.model.config.context, prepared.settings.level) == (16, "bpe")
    sample = train_gpt.Run.sample
    monkeypatch.setattr(train_gpt.Run, "sample", lambda run, length, stop: sample(run, 2, stop))
    called("train_gpt", *options, "--out", "whole")
    called("train_gpt", *options, "--out", "parts", "--minutes", "1e-6")
    called("train_gpt", "--resume", "--out", "parts")
    assert rows(Path("parts")) == rows(Path("whole"))
    assert rows(Path("whole"))[-1]["loss"] < rows(Path("whole"))[0]["loss"]
    Path("died").mkdir()  # before its first checkpoint
    importlib.import_module("run_folder").begin(Path("died"), prepared.settings)
    called("train_gpt", "--resume", "--out", "died")
    assert rows(Path("died")) == rows(Path("whole"))
    called("generate", "--run", "whole", "--tokens", "4", "--device", "cpu", "--prompt", "a")
    for option, value in (("--preset", "toy"), ("--d-model", 64), ("--level", "char")):
        said = refused(capsys, "train_gpt", *options, option, value)
        assert f"{option} is {value!r}; with --init-from it takes what that run has" in said


def test_learned_positions_have_an_end(gpt2, text, capsys):
    options = [*TINY, "--data", text, "--init-from", gpt2, "--context"]
    assert "learned positions it takes at most" in refused(capsys, "train_gpt", *options, 25)


def test_the_default_context_is_bounded(gpt2, llama):
    find = importlib.import_module("sharded").find
    assert find(gpt2).facts["settings"]["context"] == 24
    assert find(llama).facts["settings"]["context"] == 96


def test_folders_that_do_not_fit_are_refused_in_a_line(gpt2, tmp_path, capsys):
    for name in ("config.json", "model.safetensors"):
        (tmp_path / name).write_bytes((gpt2 / name).read_bytes())
    calls = (("generate", "--device", "cpu", "--run"), ("train_gpt", "--device", "cpu", "--init-from"))
    for call in calls:
        assert "Download it too" in refused(capsys, *call, tmp_path)
    whole = json.loads((gpt2 / "tokenizer.json").read_text())
    whole["added_tokens"] += [
        dict(whole["added_tokens"][0], id=512 + i, content=f"<{i}>") for i in range(9)
    ]
    (tmp_path / "tokenizer.json").write_text(json.dumps(whole))
    for call in calls:
        assert "has 521 ids, and the model beside it 520" in refused(capsys, *call, tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    for values, said in (
        ({"n_embd": "16"}, "n_embd in config.json is '16'"),
        ({"x": 1}, "x in config"),
    ):
        (tmp_path / "config.json").write_text(json.dumps(config | values))
        for call in calls:
            assert said in refused(capsys, *call, tmp_path)
    (tmp_path / "config.json").write_text(json.dumps(config))
    (tmp_path / "model.safetensors").rename(tmp_path / "pytorch_model.bin")
    for call in calls:
        assert "which is pickle" in refused(capsys, *call, tmp_path)
