"""Training: schedules, batches and their parts, what is watched, checkpoints, runs on tokens."""

from __future__ import annotations

# ruff: noqa: F401, F811  (fixtures are imported)
import contextlib
import dataclasses
import importlib
import json
import math
import re
import shlex
from pathlib import Path
from types import ModuleType

import pytest
import torch
from example_scripts import (
    BEST,
    CHECKPOINT,
    EXAMPLES,
    TINY,
    books,
    called,
    content,
    examples_path,
    fingerprint,
    refused,
    rows,
    text,
    tokens,
)

from flashproto import nn

SMALL = ["--n-layers", "1", "--n-heads", "2", "--d-model", "16"]


def module(name: str) -> ModuleType:
    return importlib.import_module(name)


def prepared(*arguments: object):
    """The run that train_gpt.py makes of its options, before its first step."""
    train_gpt = module("train_gpt")
    with contextlib.ExitStack() as held:
        return train_gpt.prepare(train_gpt.parse([str(a) for a in arguments], None), held)


def settings(**changes: object):
    return module("settings").Settings(**changes)


# --- the learning rate ----------------------------------------------------------------------------


def test_cosine_climbs_and_falls():
    schedule = module("schedule")
    s = settings(steps=100, learning_rate=2.0, warmup=0.1)
    rates = [schedule.learning_rate(step, s) for step in range(101)]
    assert rates[:10] == pytest.approx([0.2 * n for n in range(1, 11)])
    assert rates[10] == 2.0
    assert rates[55] == pytest.approx(2 * (0.05 + 0.95 / 2))
    assert rates[100] == pytest.approx(0.1)
    assert rates[10:] == sorted(rates[10:], reverse=True)


def test_wsd_is_stable_until_it_decays():
    schedule = module("schedule")
    s = settings(steps=100, learning_rate=2.0, schedule="wsd", warmup=0.05, decay=0.25)
    rates = [schedule.learning_rate(step, s) for step in range(101)]
    assert rates[:5] == pytest.approx([0.4 * n for n in range(1, 6)])
    assert rates[4:76] == [2.0] * 72
    assert rates[84] == pytest.approx(2 * (0.05 + 0.95 * (1 - math.sqrt(9 / 25))))
    assert rates[100] == pytest.approx(0.1)
    longer = dataclasses.replace(s, steps=200, warmup=0.025)
    assert [schedule.learning_rate(step, longer) for step in range(76)] == rates[:76]


# --- batches --------------------------------------------------------------------------------------


def test_a_step_has_the_same_sequences_at_any_number_of_parts_and_processes():
    batches, ids = module("batches"), torch.arange(1000)
    s = settings(batch_size=12, context=7, seed=5)
    whole = batches.Batches(ids, s)
    for step in (0, 1, 8):
        (want,) = (whole(step, micro) for micro in range(1))
        assert want.shape == (12, 8)
        assert torch.equal(want, want[:, :1] + torch.arange(8))
        for parts, world in ((3, 1), (1, 4), (2, 3), (6, 2)):
            divided = dataclasses.replace(s, accumulate=parts)
            ranks = [batches.Batches(ids, divided, rank, world) for rank in range(world)]
            found = [rank(step, micro) for micro in range(parts) for rank in ranks]
            assert all(len(x) == 12 // parts // world for x in found)
            assert torch.equal(torch.cat(found), want)
    starts = torch.stack([whole(step, 0)[:, 0] for step in range(200)])
    assert len({tuple(x.tolist()) for x in starts}) == 200
    assert (starts.min(), starts.max()) == (0, 992)  # 2400 draws of 993 places: all but surely
    with pytest.raises(module("errors").OptionError, match=r"--accumulate 5 and 3 processes it takes"):
        batches.Batches(ids, dataclasses.replace(s, accumulate=5), 0, 3)


def test_accumulated_gradients_are_those_of_the_large_batch(text):
    options = ["--data", text, *TINY, *SMALL, "--batch-size", "6", "--impl", "reference"]
    found = []
    for parts in (1, 3):
        run = prepared(*options, "--accumulate", parts)
        run.model.double()
        loss = module("train_gpt").gradients(run, run.model)
        found.append([loss, *(p.grad for p in run.model.parameters())])
    for whole, accumulated in zip(*found, strict=True):
        torch.testing.assert_close(accumulated, whole, rtol=1e-12, atol=1e-14)


def test_clipping_bounds_the_step(text):
    train_gpt = module("train_gpt")
    norms = []
    for clip in ("0", "0.01"):
        run = prepared("--data", text, *TINY, "--clip", clip)
        seen = []
        run.optimizer.register_step_pre_hook(
            lambda *_, seen=seen, run=run: seen.append(
                torch.nn.utils.get_total_norm([p.grad for p in run.model.parameters()]).item()
            )
        )
        row = train_gpt.train_step(run, run.model)
        norms.append((row["gradient_norm"], seen[0]))
    assert norms[0][0] == norms[1][0] == pytest.approx(norms[0][1])
    assert norms[0][0] > 0.01
    assert norms[1][1] == pytest.approx(0.01, rel=1e-3)


# --- what is watched ------------------------------------------------------------------------------


@pytest.mark.slow
def test_a_gradient_that_is_not_finite_is_named(tmp_path, monkeypatch, capsys, text):
    """Of two parameters, at step 15; the checkpoint is kept, and goes on as if nothing had been."""
    train_gpt, folder = module("train_gpt"), tmp_path / "run"
    options = ["--data", text, *TINY, *SMALL, "--n-layers", "3"]
    called("train_gpt", *options, "--out", tmp_path / "whole")
    gradients = train_gpt.gradients

    def poisoned(run, forward):
        loss = gradients(run, forward)
        if run.step == 14:
            grads = dict(run.model.named_parameters())
            grads["blocks.2.mlp.up.weight"].grad[3, 4] = math.inf
            grads["blocks.1.norm1.weight"].grad[5] = math.nan
        return loss

    monkeypatch.setattr(train_gpt, "gradients", poisoned)
    said = refused(capsys, "train_gpt", *options, "--out", folder, code=1)
    assert "the loss of step 15 is" in said
    assert "the gradient of blocks.2.mlp.up.weight has 0 NaN and 1 infinite of 1024" in said
    assert ", and 1 parameters before it have some" in said
    assert "The checkpoint of step 12 is kept; try a lower --learning-rate" in said
    assert module("checkpoint").load(folder / CHECKPOINT)[1]["step"] == 12
    monkeypatch.undo()
    called("train_gpt", "--resume", "--out", folder)
    assert rows(folder) == rows(tmp_path / "whole")


def test_a_loss_that_is_not_finite_stops_the_run_before_the_weights_change(text):
    train_gpt, run = module("train_gpt"), prepared("--data", text, *TINY)
    with torch.no_grad():
        run.model.blocks[1].mlp.down.weight[0, 0] = math.nan
    before = [p.clone() for p in run.model.parameters()]
    with pytest.raises(module("errors").TrainingError, match="the loss of step 1 is nan, and"):
        train_gpt.train_step(run, run.model)
    for was, p in zip(before, run.model.parameters(), strict=True):
        assert torch.equal(was, p) or was.isnan().any()
    assert run.step == 0


def test_a_norm_that_overflows_is_named(text):
    run = prepared("--data", text, *TINY)

    def forward(x, y, **options):
        (p, *_) = run.model.parameters()
        return None, (p * 1e30).sum()

    with pytest.raises(module("errors").TrainingError, match="the norm of its gradient is inf"):
        module("train_gpt").train_step(run, forward)


@pytest.mark.parametrize("preset", ["toy-llama", "gpt2-124m"])
def test_max_scores_are_those_of_the_layers(preset):
    watch = module("watch")
    config = nn.GPTConfig.preset(preset, vocab_size=50, context=8, n_layers=2, d_model=32, n_heads=4)
    model = nn.GPT(config, impl="reference").double()
    with torch.no_grad():
        for p in model.parameters():
            p.add_(torch.randn_like(p) * 0.3)
    ids, want = torch.randint(50, (3, 8)), []
    heads = nn.Attention._heads

    def noted(self, *given):
        q, k, v = heads(self, *given)
        scores = q @ k.repeat_interleave(q.shape[1] // k.shape[1], 1).mT / math.sqrt(q.shape[-1])
        want.append(scores.masked_fill(torch.ones(8, 8).triu(1).bool(), -math.inf).max().item())
        return q, k, v

    found = watch.MaxScores(model)
    plain = model(ids)[0]
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(nn.Attention, "_heads", noted)
        with found:
            logits, _ = model(ids)
        with found:
            model(ids[:1])
    torch.testing.assert_close(logits, plain)
    assert found.take() == pytest.approx([max(want[0::2]), max(want[1::2])])
    assert not any(m.record_max_score for m in model.modules() if isinstance(m, nn.Attention))


# --- what is written ------------------------------------------------------------------------------


@pytest.mark.slow
def test_the_best_checkpoint_is_that_of_the_least_validation_loss(tmp_path, monkeypatch, text):
    """Also over a stop: the run remembers the best so far, of validations of as many tokens."""
    train_gpt, checkpoint = module("train_gpt"), module("checkpoint")
    folder, losses = tmp_path / "run", iter([3.0, 2.0, 2.5, 2.2, 1.5, 1.8])
    seen = {}

    def validate(model, *_):
        loss = next(losses)
        seen[loss] = {name: x.clone() for name, x in model.state_dict().items()}
        return {"validation": loss, "bits_per_byte": loss}

    monkeypatch.setattr(train_gpt, "validate", validate)
    given = ["--data", text, *TINY, *SMALL]
    for options, step, best in (
        ([*given, "--steps", "16"], 16, 2.0),
        (["--resume", "--steps", "32"], 16, 2.0),
        (["--resume", "--steps", "33"], 33, 1.5),
        (["--resume", "--steps", "34", "--validate-tokens", "50"], 34, 1.8),
    ):
        called("train_gpt", *options, "--out", folder)
        tensors, facts = checkpoint.load(folder / BEST)
        assert (facts["step"], facts["best"]) == (step, best)
        assert tensors.keys() == {f"model.{name}" for name in seen[best]}
        assert all(torch.equal(tensors[f"model.{name}"], x) for name, x in seen[best].items())
    called("generate", "--run", folder / BEST, "--tokens", "3", "--device", "cpu")
    run = prepared("--data", text, *TINY, "--init-from", folder / BEST)
    assert torch.equal(run.model.state_dict()["norm.weight"], seen[1.8]["norm.weight"])


@pytest.mark.slow
def test_profile_and_max_scores_are_written(tmp_path, capsys, text):
    folder = tmp_path / "run"
    shape = {"n_layers": 3, "d_model": 32, "n_heads": 4, "n_kv_heads": 2, "d_ff": 48}
    options = [*TINY, "--steps", "6", "--accumulate", "2", "--log-max-score", "--profile"]
    options += [f"--{name.replace('_', '-')}={value}" for name, value in shape.items()]
    options += ["--preset", "tiny", "--impl", "reference", "--out", folder]
    called("train_gpt", "--data", text, *options)
    trace = json.loads((folder / "trace.json").read_text())
    names = [event.get("name", "") for event in trace["traceEvents"]]
    assert sum(name.startswith("Optimizer.step") for name in names) >= 3
    assert all(len(row["max_score"]) == 3 for row in rows(folder))
    assert all(math.isfinite(x) for row in rows(folder) for x in row["max_score"])
    config = module("checkpoint").load(folder / CHECKPOINT)[1]["config"]
    assert {name: config[name] for name in shape} == shape
    capsys.readouterr()
    called("train_gpt", "--resume", "--out", folder, "--steps", "8", "--profile")
    assert "note: trace.json takes more than 2 steps" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--n-kv-heads", "3"], "--preset toy: --n-kv-heads is 3; it takes a divisor of --n-heads, 4"),
        (
            ["--accumulate", "3"],
            "--batch-size is 2; with --accumulate 3 it takes a multiple",
        ),
        (["--warmup", "1.5"], "--warmup: 1.5 is not from 0 to 1"),
        (
            ["--level", "byte", "--data", "tokens"],
            "--level is 'byte', and --data is a folder of tokens",
        ),
    ],
)
def test_options_that_do_not_fit_are_refused(monkeypatch, capsys, text, tokens, arguments, said):
    monkeypatch.chdir(tokens.parent)
    before = fingerprint(tokens.parent)
    assert said in refused(capsys, "train_gpt", "--data", text, *TINY, *arguments)
    assert fingerprint(tokens.parent) == before


# --- a run on tokens ------------------------------------------------------------------------------

ON_TOKENS = [*TINY, "--accumulate", "2", "--schedule", "wsd", "--decay", "0.5", *SMALL]


@pytest.fixture(scope="module")
def on_tokens(tokens: Path) -> Path:
    """The folder of a finished run on tokens."""
    folder = tokens.with_name("run")
    called("train_gpt", "--data", tokens, *ON_TOKENS, "--out", folder)
    return folder


@pytest.mark.slow
def test_a_run_on_tokens_that_is_stopped_is_the_same(tmp_path, tokens, on_tokens):
    """In loss, learning rate and weights; its tokens may be in another place."""
    folder, moved = tmp_path / "run", tmp_path / "moved"
    called("train_gpt", "--data", tokens, *ON_TOKENS, "--out", folder, "--minutes", "1e-6")
    moved.symlink_to(tokens)
    for _ in range(2):
        called("train_gpt", "--resume", "--data", moved, "--out", folder, "--minutes", "1e-6")
    called("train_gpt", "--resume", "--out", folder)
    assert rows(folder) == rows(on_tokens)
    assert content(folder / CHECKPOINT) == content(on_tokens / CHECKPOINT)
    last = rows(folder)[-1]
    assert last["bits_per_byte"] < last["validation"] / math.log(2) / 2  # a token has some bytes


def test_the_validation_of_tokens_counts_their_bytes(tokens):
    run = prepared("--data", tokens, *ON_TOKENS)
    corpus = run.corpus
    predicted = corpus.validation[corpus.targets].tolist()
    written = "".join(corpus.vocabulary.pieces(predicted)).replace("<|endoftext|>", "")
    assert corpus.validation_bytes == pytest.approx(len(written.encode()), abs=6)  # cut characters
    nats, bits = corpus.validation_loss(1.0)
    assert (nats, bits) == (1.0, len(predicted) / math.log(2) / corpus.validation_bytes)


def test_a_run_on_tokens_writes_text(capsys, on_tokens):
    def written(*options: object) -> str:
        capsys.readouterr()
        called("generate", "--run", on_tokens, "--tokens", "5", "--device", "cpu", *options)
        return capsys.readouterr().out

    assert written("--prompt", "any \u2603 text").startswith("any \u2603 text")
    assert written("--seed", "1") == written("--seed", "1") != written("--seed", "2")


def test_a_run_begins_with_the_weights_of_one_on_tokens(
    tmp_path, capsys, text, books, tokens, on_tokens
):
    """On a text, and on a folder that has its tokens; not on one with others."""
    begin = [*TINY, "--init-from", on_tokens, "--out", tmp_path / "run"]
    run = prepared("--data", text, *begin)
    tensors, _ = module("checkpoint").load(on_tokens / CHECKPOINT)
    assert all(torch.equal(x, tensors[f"model.{n}"]) for n, x in run.model.state_dict().items())
    assert (run.step, run.best, run.settings.level, run.settings.d_model) == (0, None, "bpe", 16)
    written = "".join(run.corpus.vocabulary.pieces(run.corpus.train[:1000].tolist()))
    assert text.read_text().startswith(written)
    again = tmp_path / "again"
    called("prepare_data", books, "--out", again, "--tokenizer", on_tokens)
    assert prepared("--data", again, *begin).corpus.vocabulary == run.corpus.vocabulary
    other = tmp_path / "other"
    called("prepare_data", books, "--out", other, "--vocab-size", "300")
    for way in (begin, ["--resume", "--out", on_tokens]):
        said = refused(capsys, "train_gpt", "--data", other, *way)
        assert "are of another vocabulary than the run's" in said


def test_without_the_package_its_name_is_said(monkeypatch, capsys, tokens):
    vocabulary = module("vocabulary")
    monkeypatch.setattr(vocabulary.importlib.util, "find_spec", lambda name: None)
    for script, option in (("prepare_data", []), ("train_gpt", ["--data"])):
        said = refused(capsys, script, *option, tokens, "--out", "nowhere")
        assert "Run: pip install tokenizers." in said


# --- the documentation ----------------------------------------------------------------------------


def test_commands_of_the_documentation_are_commands():
    """Each line of docs/training.md and README that runs a script has options that it takes."""
    found = 0
    for page in (EXAMPLES.parent / "docs" / "training.md", EXAMPLES.parent / "README.md"):
        text = page.read_text().replace("\\\n", " ")
        for script, options in re.findall(r"python examples/(\w+)\.py([^#`\n]*)", text):
            if script == "train_gpt":
                module("settings").parse(shlex.split(options), None)
            else:
                module(script).parse(shlex.split(options))
            found += 1
    assert found >= 20
