"""Options of attention in train_gpt.py: windows, softcap, sinks and documents."""

from __future__ import annotations

# ruff: noqa: F401, F811  (fixtures are imported)
import contextlib
import importlib
import itertools
import json
import math
from pathlib import Path
from types import ModuleType

import pytest
import torch
from example_scripts import (
    CHECKPOINT,
    PREPARED,
    SETTINGS,
    TINY,
    called,
    content,
    examples_path,
    refused,
    rows,
    text,
)
from torch import Tensor

from flashproto import nn

SMALL = ["--n-layers", "3", "--n-heads", "2", "--n-kv-heads", "1", "--d-model", "16"]
OPTIONS = {"window": 3, "window_pattern": "SL", "softcap": 20.0, "sinks": True}
GIVEN = ["--window", "3", "--window-pattern", "SL", "--softcap", "20", "--sinks"]
LATER = {*OPTIONS, "dropout"}
EVERYWHERE = ["--impl", "reference"]


def module(name: str) -> ModuleType:
    return importlib.import_module(name)


def prepared(*arguments: object):
    """The run that train_gpt.py makes of its options, before its first step."""
    train_gpt = module("train_gpt")
    with contextlib.ExitStack() as held:
        return train_gpt.prepare(train_gpt.parse([str(a) for a in arguments], None), held)


@pytest.fixture(scope="module")
def windowed(tmp_path_factory: pytest.TempPathFactory, text: Path) -> Path:
    """The folder of a finished run with all options."""
    folder = tmp_path_factory.mktemp("windowed") / "run"
    called("train_gpt", "--data", text, *TINY, *SMALL, *GIVEN, *EVERYWHERE, "--out", folder)
    return folder


@pytest.mark.slow
def test_options_are_part_of_the_models_shape(tmp_path, capsys, text, windowed):
    """Kept with the run; a stopped one goes on to the same bits, sinks included; text comes from it."""
    tensors, facts = module("checkpoint").load(windowed / CHECKPOINT)
    assert {name: facts["config"][name] for name in OPTIONS} == OPTIONS
    assert {name: facts["settings"][name] for name in OPTIONS} == OPTIONS
    sinks = [x for name, x in tensors.items() if name.startswith("model.") and "sinks" in name]
    assert len(sinks) == 3
    assert all(x.abs().amax() > 0 for x in sinks)
    folder = tmp_path / "run"
    options = ["--data", text, *TINY, *SMALL, *GIVEN, *EVERYWHERE, "--out", folder]
    called("train_gpt", *options, "--minutes", "1e-6")
    called("train_gpt", "--resume", "--out", folder)
    assert rows(folder) == rows(windowed)
    assert content(folder / CHECKPOINT) == content(windowed / CHECKPOINT)
    capsys.readouterr()
    called("train_gpt", "--resume", "--out", folder)
    assert "3 layers, d_model 16, context 16, 91 ids, window 3 (SL), softcap 20.0, sinks\n" in (
        capsys.readouterr().out
    )
    generate = ["generate", "--run", folder, "--tokens", "5", "--device", "cpu", *EVERYWHERE]
    called(*generate)
    first = capsys.readouterr().out
    called(*generate)
    assert capsys.readouterr().out == first
    for option, value in (("--window", 4), ("--window-pattern", "L"), ("--softcap", 3.0)):
        said = refused(capsys, "train_gpt", "--resume", "--out", folder, option, value)
        assert f"{option} is {value!r}; a resumed run takes what it began with, " in said


def test_a_run_takes_the_options_of_the_one_that_it_begins_with(capsys, text, tiny_of, windowed):
    begin = ["--data", text, *TINY, *EVERYWHERE, "--init-from"]
    run = prepared(*begin, windowed)
    assert {name: getattr(run.settings, name) for name in OPTIONS} == OPTIONS
    assert [b.attention.window for b in run.model.blocks] == [(3, 0), None, (3, 0)]
    tensors, _ = module("checkpoint").load(windowed / CHECKPOINT)
    assert all(torch.equal(x, tensors[f"model.{n}"]) for n, x in run.model.state_dict().items())
    assert prepared(*begin, windowed, *GIVEN).model.config == run.model.config
    for option, value, has in (("--window", 4, 3), ("--softcap", 3.0, 20.0)):
        said = refused(capsys, "train_gpt", *begin, windowed, option, value)
        assert f"{option} is {value!r}; with --init-from it takes what that run has, {has!r}" in said
    said = refused(capsys, "train_gpt", *begin, tiny_of(), "--sinks")
    assert "--sinks is True; with --init-from it takes what that run has, False" in said


@pytest.fixture
def tiny_of(tmp_path, text):
    """Makes a run of another version: without the options, in its settings and its shape."""

    def make() -> Path:
        checkpoint, folder = module("checkpoint"), tmp_path / "older"
        options = ["--data", text, *TINY, *SMALL, "--out", folder]
        called("train_gpt", *options, "--steps", "12", "--minutes", "1e-6")
        tensors, facts = checkpoint.load(folder / CHECKPOINT)
        for part in ("settings", "config"):
            facts[part] = {name: x for name, x in facts[part].items() if name not in LATER}
        checkpoint.save(folder / CHECKPOINT, tensors, facts)
        kept = json.loads((folder / SETTINGS).read_text())
        content = {name: x for name, x in kept.items() if name not in LATER}
        (folder / SETTINGS).write_text(json.dumps(content))
        return folder

    return make


@pytest.mark.slow
def test_a_run_of_before_the_options_goes_on(tmp_path, text, tiny_of):
    called("train_gpt", "--data", text, *TINY, *SMALL, "--steps", "12", "--out", tmp_path / "whole")
    older = tiny_of()
    called("train_gpt", "--resume", "--out", older)
    assert rows(older) == rows(tmp_path / "whole")
    assert content(older / CHECKPOINT) == content(tmp_path / "whole" / CHECKPOINT)
    called("generate", "--run", older, "--tokens", "3", "--device", "cpu")


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--window-pattern", "SL"], "--window-pattern is 'SL'; it takes None without --window"),
        (["--window", "3", "--window-pattern", "SX"], "--window-pattern is 'SX'; it takes letters S"),
        (["--window", "0"], "--window: 0 is not above 0"),
        (["--softcap", "-1"], "--softcap: -1 is not above 0"),
        (["--sinks", "--impl", "torch"], "backend 'torch' cannot run this call: "),
    ],
)
def test_options_of_attention_that_do_not_fit_are_refused(tmp_path, capsys, text, arguments, said):
    out = tmp_path / "run"
    assert said in refused(capsys, "train_gpt", "--data", text, *TINY, *arguments, "--out", out)
    assert not out.exists()


@pytest.mark.slow
def test_dropout(tmp_path, capsys, text):
    """A stopped run goes on to the same bits; nothing is dropped in a validation or a sample; a run
    that begins with another one has its own."""
    options = ["--data", text, *TINY, *SMALL, "--dropout", "0.3", *EVERYWHERE]
    whole, stopped = tmp_path / "whole", tmp_path / "stopped"
    called("train_gpt", *options, "--out", whole)
    called("train_gpt", *options, "--out", stopped, "--minutes", "1e-6")
    capsys.readouterr()
    called("train_gpt", "--resume", "--out", stopped)
    assert "91 ids, dropout 0.3\n" in capsys.readouterr().out
    assert rows(stopped) == rows(whole)
    assert content(stopped / CHECKPOINT) == content(whole / CHECKPOINT)
    begin = ["--data", text, *TINY, *EVERYWHERE, "--init-from", whole]
    assert prepared(*begin).model.config.dropout == 0.0
    run = prepared(*begin, "--dropout", "0.5")
    assert [b.attention.dropout for b in run.model.blocks] == [0.5] * 3
    validate, settings = module("validation").validate, run.settings
    first, again = (validate(run.model, run.corpus, settings) for _ in range(2))
    assert first == again and run.model.training
    seeds = {run.batches.seed(step, micro) for step in range(20) for micro in range(3)}
    assert len(seeds) == 60
    called("generate", "--run", whole, "--tokens", "3", "--device", "cpu")
    said = refused(capsys, "train_gpt", "--resume", "--out", whole, "--dropout", "0.1")
    assert "--dropout is 0.1; a resumed run takes what it began with, 0.3" in said
    for given, why in (("1.5", "1.5 is not from 0 to 1"), ("x", "invalid share value")):
        assert why in refused(capsys, "train_gpt", "--data", text, "--dropout", given)
    several = ["--context", "16", "--context-parallel", "2", "--dropout", "0.1"]
    said = refused(capsys, "train_gpt", "--data", text, *TINY, *several, "--out", tmp_path / "new")
    assert "--context-parallel is 2; with --dropout it takes 1" in said


def test_sinks_have_no_weight_decay(text):
    run = prepared("--data", text, *TINY, "--preset", "gpt-oss-toy", *EVERYWHERE)
    names = {p: name for name, p in run.model.named_parameters()}
    decayed, others = ([names[p] for p in g["params"]] for g in run.optimizer.param_groups)
    assert [g["weight_decay"] for g in run.optimizer.param_groups] == [0.1, 0.0]
    assert sum(name.endswith("sinks") for name in others) == 4
    assert not any("sinks" in name or "norm" in name for name in decayed)


@pytest.mark.slow
def test_the_toy_of_gpt_oss_is_trained(tmp_path, text):
    folder, small = tmp_path / "run", ["--d-model", "32", "--d-ff", "64", "--steps", "60"]
    options = [*TINY, "--preset", "gpt-oss-toy", "--context", "48", *small, *EVERYWHERE]
    called("train_gpt", "--data", text, *options, "--validate-every", "60", "--out", folder)
    losses = [row["loss"] for row in rows(folder)]
    assert losses[0] == pytest.approx(math.log(91), rel=0.05)  # of 91 characters, all alike
    assert sum(losses[-10:]) < 0.85 * sum(losses[:10])
    assert rows(folder)[-1]["validation"] < 3.5


# --- documents ------------------------------------------------------------------------------------

ON_DOCUMENTS = [*TINY, *SMALL, "--context", "40", *EVERYWHERE]
KINDS = {  # where positions come from
    "rope": ["--preset", "gpt-oss-toy", "--window", "7"],
    "learned": ["--preset", "gpt2-124m", "--d-ff", "32"],
}


@pytest.fixture(scope="module")
def documents(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Some hundred short documents in tokens, several of them in a context."""
    pytest.importorskip("tokenizers", reason="BPE needs the package tokenizers")
    from pydoc_data.topics import topics

    lines = [line.strip() for name in sorted(topics) for line in topics[name][:400].splitlines()]
    folder = tmp_path_factory.mktemp("documents")
    text = "\n<|endoftext|>\n".join(dict.fromkeys(line for line in lines if len(line) > 8))
    (folder / "lines.txt").write_text(text[:30000], encoding="utf-8")
    called("prepare_data", folder / "lines.txt", "--out", folder / "tokens", *PREPARED)
    return folder / "tokens"


def loss_of_each_alone(run, x: Tensor, y: Tensor) -> Tensor:
    """The mean loss of targets y [B, S], with the documents of x [B, S] in a batch of their own: each
    from the token that opens it on, a row of its own, filled up behind its end."""
    opens, pieces = run.corpus.vocabulary.end_of_text, []
    for tokens, targets in zip(x, y, strict=True):
        starts = [0, *((tokens[1:] == opens).nonzero().flatten() + 1).tolist(), len(tokens)]
        pieces += [(tokens[a:b], targets[a:b]) for a, b in itertools.pairwise(starts)]
    own, wanted = (
        torch.nn.utils.rnn.pad_sequence(rows, batch_first=True, padding_value=fill)
        for rows, fill in zip(zip(*pieces, strict=True), (0, -100), strict=True)
    )
    assert len(own) > 2 * len(x)  # there are several
    assert own.shape[1] < x.shape[1]
    return run.model(own, wanted, return_logits=False)[1]


@pytest.mark.parametrize("options", KINDS.values(), ids=KINDS)
def test_documents_train_as_in_a_batch_of_their_own(documents, options):
    """Loss and gradients of a step, in float32; and the validation, of other documents."""
    run = prepared("--data", documents, *ON_DOCUMENTS, *options, "--documents")
    with torch.no_grad():
        for p in run.model.parameters():
            p.add_(0.1 * torch.randn_like(p))
    batch = run.batches(0, 0)
    ends = run.corpus.vocabulary.end_of_text
    assert (batch[:, -1] != ends).all()  # the last document of a window is cut by its end
    want = loss_of_each_alone(run, batch[:, :-1], batch[:, 1:])
    wanted = torch.autograd.grad(want, list(run.model.parameters()))
    got = module("train_gpt").gradients(run, run.model)
    assert got.item() == pytest.approx(want.item(), rel=1e-5)
    for p, gradient in zip(run.model.parameters(), wanted, strict=True):
        torch.testing.assert_close(p.grad, gradient, rtol=1e-4, atol=1e-5)
    whole = run.model(batch[:, :-1], batch[:, 1:])[1]
    assert abs(whole.item() - want.item()) > 1e-3

    windows = run.corpus.windows
    ids = run.corpus.validation[windows.starts[:, None] + torch.arange(windows.length + 1)]
    y = ids[:, 1:].masked_fill(torch.arange(windows.length) < windows.skipped[:, None], -100)
    found = module("validation").validate(run.model, run.corpus, run.settings)
    want = loss_of_each_alone(run, ids[:, :-1], y)
    assert found["validation"] == pytest.approx(want.item(), rel=1e-5)


@pytest.mark.slow
def test_a_run_on_documents_goes_on_and_is_fixed(tmp_path, capsys, text, documents):
    """To the same bits; --documents may not change; a text is one document."""
    options = ["--data", documents, *ON_DOCUMENTS, *KINDS["rope"], "--documents"]
    called("train_gpt", *options, "--out", tmp_path / "whole")
    said = capsys.readouterr().out
    assert "\ndocuments   attention stays within each, and positions begin anew\n" in said
    folder = tmp_path / "run"
    called("train_gpt", *options, "--out", folder, "--minutes", "1e-6")
    called("train_gpt", "--resume", "--out", folder)
    assert rows(folder) == rows(tmp_path / "whole")
    assert content(folder / CHECKPOINT) == content(tmp_path / "whole" / CHECKPOINT)
    called("generate", "--run", folder, "--tokens", "5", "--device", "cpu", *EVERYWHERE)

    options = ["--data", text, *TINY, *SMALL, *EVERYWHERE]
    capsys.readouterr()
    for name, more in (("one", ["--documents"]), ("text", [])):
        called("train_gpt", *options, *more, "--out", tmp_path / name)
    assert capsys.readouterr().out.count("\ndocuments   one: --data is one text; ") == 1
    assert rows(tmp_path / "one") == rows(tmp_path / "text")
    said = refused(capsys, "train_gpt", "--resume", "--out", tmp_path / "text", "--documents")
    assert "--documents is True; a resumed run takes what it began with, False" in said


def test_what_opens_a_document_is_all_that_a_sample_sees_before_it():
    sampling, seen = module("sampling"), []

    class Model:
        config = nn.GPTConfig(9, 5, 1, 1, 8)

        def generate(self, prompts, n, on_token, **options):
            seen.append(([prompt.tolist() for prompt in prompts], n))
            going = {*range(len(prompts))}
            for new in ([3, 8], [7, 8], [4, 8])[:n]:
                going -= {b for b in going if on_token(b, new[b])}

    drawn: list[list[int]] = [[], []]
    prompts = [torch.tensor([1, 2]), torch.tensor([3])]
    sampling.stream(Model(), prompts, 3, 0, lambda b, token: drawn[b].append(token), 7)
    assert drawn == [[3, 7, 3], [8, 8, 8]]
    assert seen == [([[1, 2], [3]], 3), ([[7]], 1)]
