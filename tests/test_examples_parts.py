"""The parts of the example scripts, each alone: text, windows of validation, log, errors, signals."""

from __future__ import annotations

# ruff: noqa: F401, F811  (fixtures are imported)
import importlib
import math
import os
import signal
from functools import partial
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest
import torch
from example_scripts import LOG, examples_path, text
from hypothesis import given
from hypothesis import strategies as st

import flashproto
from flashproto.backends import BackendError, set_default


def module(name: str) -> ModuleType:
    return importlib.import_module(name)


# --- the text ------------------------------------------------------------------------------------


def load(path: Path, level: str, context: int, most: int | None = None):
    given = settings(data=str(path), level=level, context=context, validate_tokens=most)
    return module("text_data").Corpus.load(given)


def test_unseen_characters_are_counted_and_paid_for(tmp_path):
    path = tmp_path / "text.txt"
    path.write_text("ab" * 450 + "a\u2603" * 50, encoding="utf-8")
    corpus = load(path, "char", 8)
    assert corpus.vocabulary.symbols == (97, 98)
    assert corpus.unseen == 50
    assert corpus.validation_bytes == 49 + 3 * 50
    nats, bits = corpus.validation_loss(1.0)
    assert nats == pytest.approx(1.0 + 50 / 99 * math.log(0x110000 - 0x800 - 2))
    assert bits == pytest.approx(nats * 99 / math.log(2) / (49 + 150))
    decoded = "".join(corpus.vocabulary.pieces(corpus.validation[:4].tolist()))
    assert decoded == "a\ufffda\ufffd"


def test_a_bounded_validation_counts_what_it_predicts(tmp_path):
    path = tmp_path / "text.txt"
    path.write_text("ab" * 4500 + "a" * 500 + "\u2603" * 500, encoding="utf-8")
    corpus = load(path, "char", 16, 80)
    predicted = corpus.validation[corpus.targets]
    assert len(predicted) == 79  # ten windows of 8, the last of which has 7 to predict
    assert corpus.unseen == int((predicted == 2).sum()) == 39  # evenly spread
    assert corpus.validation_bytes == 40 + 3 * 39


def test_bytes_need_no_vocabulary(tmp_path):
    path = tmp_path / "text.txt"
    path.write_bytes(bytes(range(256)) * 4)
    corpus = load(path, "byte", 8)
    assert corpus.vocabulary.size == 256
    assert torch.cat((corpus.train, corpus.validation)).tolist() == list(range(256)) * 4
    assert corpus.unseen == 0
    nats, bits = corpus.bigram_loss()
    assert bits == pytest.approx(nats / math.log(2))


@given(st.text(max_size=20), st.sampled_from(["char", "byte"]))
def test_text_comes_back_from_its_ids_a_piece_at_a_time(written, level):
    vocabulary = module("vocabulary")
    codes = vocabulary.code_points(written.encode() or b"a", level)
    known = vocabulary.Vocabulary.of(level, codes)
    pieces = list(known.pieces(known.encode(codes).tolist()))
    assert "".join(pieces) == (written or "a")
    if level == "char":
        assert all(len(piece) == 1 for piece in pieces)


def test_half_a_character_is_marked():
    vocabulary = module("vocabulary").Vocabulary("byte", tuple(range(256)))
    assert "".join(vocabulary.pieces("a\u2603".encode()[:-1])) == "a\ufffd"


@pytest.mark.parametrize("most", [None, 96])
def test_bigram_is_that_of_the_pairs(monkeypatch, text, most):
    """Of the whole table of counts, on the ids that a validation predicts, and in chunks."""
    text_data = module("text_data")
    corpus = load(text, "char", 16, most)
    V = corpus.vocabulary.size
    pairs = corpus.train[:-1] * V + corpus.train[1:]
    counts = torch.bincount(pairs, minlength=V * V).view(V, V).double() + 1
    p = counts / counts.sum(1, keepdim=True)
    nats = -p[corpus.validation[corpus.targets - 1], corpus.validation[corpus.targets]].log().mean()
    want = corpus.validation_loss(float(nats))
    for chunk in (1 << 20, 1000, 999):
        monkeypatch.setattr(text_data, "CHUNK", chunk)
        assert corpus.bigram_loss() == pytest.approx(want)


def test_share_seen_is_that_of_the_passages(monkeypatch, tmp_path):
    text_data = module("text_data")
    path = tmp_path / "text.txt"
    generator = torch.Generator().manual_seed(0)
    letters = "".join(chr(97 + i) for i in torch.randint(26, (18000,), generator=generator))
    last = letters[5:645] + letters[:1360][::-1]
    path.write_text(letters + last)
    corpus = load(path, "char", 16)
    where, train = corpus.validation, "".join(map(chr, corpus.train + 97))
    starts = range(0, len(where) - 63, 64)
    found = ["".join(map(chr, where[i : i + 64] + 97)) in train for i in starts]
    assert 0 < sum(found) < len(found)
    for chunk in (1 << 20, 100, 64):
        monkeypatch.setattr(text_data, "CHUNK", chunk)
        assert corpus.share_seen() == pytest.approx(sum(found) / len(found))


def test_a_long_text_is_ready_in_bounded_memory_and_time(tmp_path):
    """Ids are looked at in chunks: no table of V x V counts, and none of passages by places."""
    path = tmp_path / "text.txt"
    generator = torch.Generator().manual_seed(0)
    symbols = torch.randint(0x4E00, 0x9E00, (60000,), generator=generator)
    path.write_text("".join(map(chr, symbols)), encoding="utf-8")
    corpus = load(path, "char", 16, 1000)
    assert corpus.vocabulary.size > 15000  # a table of pairs would take 2 GB
    assert math.isfinite(corpus.bigram_loss()[0])
    assert corpus.share_seen() == 0


# --- validation -----------------------------------------------------------------------------------


@given(
    n=st.integers(1, 300),
    context=st.integers(1, 40),
    most=st.one_of(st.none(), st.integers(1, 400)),
)
def test_windows_predict_each_id_once_from_half_a_window_or_more(n, context, most):
    windows = module("text_data").Windows.of(n, context, most)
    T = min(context, n)
    places = windows.targets().tolist()
    assert len(set(places)) == len(places)
    assert min(places) >= 1
    assert max(places) <= n
    assert all(0 <= start <= n - T for start in windows.starts.tolist())
    for start, skipped in zip(windows.starts.tolist(), windows.skipped.tolist(), strict=True):
        assert start == 0 or skipped >= T // 2
    if most is None or n <= most:
        assert sorted(places) == list(range(1, n + 1))
    else:
        assert len(places) <= max(most, T)  # one window, where that has more
        gaps = windows.starts.diff()
        assert len(gaps) < 2 or gaps.max() <= 2 * gaps.min() + T  # spread over all of it
        if len(gaps):
            assert windows.starts[-1] == n - T


def settings(**changes: object):
    return module("settings").Settings(device="cpu", dtype="float32", **changes)


@pytest.mark.parametrize("most", [None, 200])
def test_validation_predicts_the_targets(text, most):
    corpus = load(text, "char", 50, most)
    seen = torch.zeros(corpus.vocabulary.size, dtype=torch.int64)

    def model(x, y, return_logits, **options):
        assert not return_logits
        kept = y[y != -100]
        seen.add_(torch.bincount(kept, minlength=len(seen)))
        return None, (kept % 7).float().mean()

    model.training, model.eval, model.train = True, lambda: None, lambda mode: None
    got = module("validation").validate(model, corpus, settings(context=50))
    want = corpus.validation[corpus.targets]
    assert len(want) == (2999 if most is None else 199)
    assert torch.equal(seen, torch.bincount(want, minlength=len(seen)))
    mean = (want % 7).float().mean().item()
    nats, bits = corpus.validation_loss(mean)
    assert got == {"validation": pytest.approx(nats, rel=1e-5), "bits_per_byte": pytest.approx(bits)}


def test_validation_hears_a_stop_and_has_a_bar(monkeypatch, text):
    validation = module("validation")
    corpus = load(text, "char", 50)
    calls, bars = [], []
    stop = SimpleNamespace(number=None)
    monkeypatch.setattr(validation, "SMALLEST_BATCH", 100)

    class Stop:
        def __bool__(self) -> bool:
            return len(calls) == stop.number

    class Bar(module("bars").tqdm):
        def __init__(self, **how: object) -> None:
            super().__init__(**how)
            bars.append(self)

    def model(x, y, return_logits, **options):
        calls.append(len(x))
        return None, torch.tensor(1.0)

    modes = []
    model.training, model.eval, model.train = True, partial(modes.append, False), modes.append
    monkeypatch.setattr(module("bars"), "tqdm", Bar)
    assert validation.validate(model, corpus, settings(context=50, batch_size=2), Stop())
    assert sum(calls) == bars[0].n == bars[0].total == len(corpus.windows)
    assert max(calls) == 2
    calls.clear()
    stop.number = 3
    assert validation.validate(model, corpus, settings(context=50, batch_size=2), Stop()) is None
    assert len(calls) == 3
    assert not any(modes[::2]) and all(modes[1::2])


# --- options --------------------------------------------------------------------------------------


def test_a_run_with_learned_positions_gives_no_longer_context():
    modules = module("settings")
    config = flashproto.nn.GPTConfig(256, 64, 1, 2, 16)
    source = settings(context=64, preset="gpt2-124m")
    assert modules.Settings.from_run({"context": 32}, source, config).context == 32
    assert modules.Settings.from_run({}, source, config).preset == "gpt2-124m"
    with pytest.raises(modules.OptionError, match=r"--context is 65; .* at most that run's, 64"):
        modules.Settings.from_run({"context": 65}, source, config)


def test_dtype_auto_is_that_of_the_run():
    saved = settings()
    assert saved.resumed({"dtype": "auto"}, 0).dtype == "float32"
    with pytest.raises(module("settings").OptionError, match="--dtype is 'bfloat16'"):
        saved.resumed({"dtype": "bfloat16"}, 0)


# --- the log --------------------------------------------------------------------------------------


def test_a_full_disk_is_named_by_the_log(tmp_path):
    run_folder, errors = module("run_folder"), module("errors")
    log = run_folder.Log(tmp_path / LOG, 0)
    log.begin()
    log.file.close()
    log.file = open("/dev/full", "w")  # noqa: SIM115
    log.write({"step": 1, "loss": 1.0, "learning_rate": 0.1})
    with pytest.raises(errors.WriteError) as caught:
        log.flush()
    said = str(caught.value)
    assert said.startswith(f"{tmp_path / LOG} could not be written (No space left on device)")
    assert said.endswith("Make room, then go on with --resume.")
    assert log.file.closed  # or closing it, when the process ends, would fail with a traceback


def test_a_log_that_cannot_be_read_is_named(tmp_path):
    (tmp_path / LOG).mkdir()
    with pytest.raises(module("errors").CheckpointError, match=r"log\.jsonl cannot be read"):
        module("run_folder").Log(tmp_path / LOG, 3)


def test_holes_of_a_log_are_named(tmp_path):
    run_folder, path = module("run_folder"), tmp_path / LOG
    row = '{{"step": {}, "loss": {}, "learning_rate": 0.1}}\n'

    def holes(*lines: str) -> str | None:
        path.write_text("".join(lines))
        return run_folder.Log(path, 4).holes()

    whole = [row.format(n, 1.5) for n in (1, 2, 3, 4)]
    assert holes(*whole) is None
    assert holes(*whole, row.format(9, 1.0), '{"st') is None  # behind the checkpoint
    assert holes(*whole[1:]).endswith("for step 1")
    assert holes(*whole[:1], *whole[3:]).endswith("for step 2 to 3")
    assert holes(*whole[:3]).endswith("for step 4")
    assert holes().endswith("for step 1 to 4")
    for bad in ('"2"', "true", "2.0"):
        assert holes(whole[0], row.format(bad, 1.5), *whole[2:]).endswith("for step 2")
    for bad in ('"1.5"', "null", "[]"):
        assert holes(whole[0], row.format(2, bad), *whole[2:]).endswith("for step 2")
    validated = whole[1].replace("}", ', "validation": 1.0}')
    assert holes(whole[0], validated, *whole[2:]).endswith("for step 2")


def test_the_bar_shows_the_mean_loss_and_the_last_validation(tmp_path):
    run_folder = module("run_folder")
    log = run_folder.Log(tmp_path / LOG, 0)
    log.begin()
    for step, loss in enumerate((9.0, 1.0, 2.0), 1):
        log.write({"step": step, "loss": loss, "learning_rate": 0.1})
    assert log.summary(2) == {"loss": "1.500"}
    checked = {"validation": 1.25, "bits_per_byte": 1.0}
    log.write({"step": 4, "loss": 3.0, "learning_rate": 0.1} | checked)
    log.write({"step": 5, "loss": 5.0, "learning_rate": 0.1})
    assert log.summary(2) == {"loss": "4.000", "validation": "1.250"}
    log.flush()
    again = run_folder.Log(tmp_path / LOG, 5)
    again.begin()
    assert again.summary(2) == log.summary(2)


def test_the_picture_has_a_title_a_grid_a_smoothed_line_and_its_unit(tmp_path, monkeypatch):
    from matplotlib import pyplot

    figures = []
    monkeypatch.setattr(pyplot, "close", figures.append)
    losses = [4.0, 2.0, 3.0, 1.0, 2.0]
    lines = [{"step": n, "loss": x} for n, x in enumerate(losses, 1) if n != 4]
    module("run_folder").plot(lines, 2.0, tmp_path / "loss.png", "char", "toy")
    (axes,) = figures[0].axes
    assert axes.get_title() == "Loss of preset toy" and axes.get_ylabel() == "loss in nats per char"
    assert all(line.get_visible() for line in axes.get_xgridlines())
    each, smoothed, *_ = axes.lines
    assert smoothed.get_label() == "training, smoothed" and len(each.get_ydata()) == 5
    assert list(smoothed.get_ydata()) == [4.0, 3.0, 2.75, 2.5, 2.0]


def test_a_picture_that_cannot_be_written_is_a_note(tmp_path, capsys):
    path = tmp_path / "nowhere" / "loss.png"
    module("run_folder").plot([{"step": 1, "loss": 1.0}], 2.0, path, "char", "toy")
    assert capsys.readouterr().out == f"note: {path} is not drawn (No such file or directory)\n"


# --- checkpoints ----------------------------------------------------------------------------------


def test_a_failed_write_keeps_the_checkpoint(tmp_path, monkeypatch):
    checkpoint, errors = module("checkpoint"), module("errors")
    path = tmp_path / checkpoint.NAME
    checkpoint.save(path, {"x": torch.arange(4.0)}, {"step": 1})

    def disk_full(descriptor: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(checkpoint.os, "fsync", disk_full)
    with pytest.raises(errors.WriteError, match="No space left on device"):
        checkpoint.save(path, {"x": torch.zeros(4)}, {"step": 2})
    monkeypatch.undo()
    tensors, facts = checkpoint.load(path)
    assert torch.equal(tensors["x"], torch.arange(4.0))
    assert facts == {"step": 1}
    assert list(tmp_path.iterdir()) == [path]


def test_settings_that_cannot_be_read_are_named(tmp_path):
    run_folder, errors = module("run_folder"), module("errors")
    for bad in (b"\xff\xfe", b"{", b"[]", b'{"colour": 3}'):
        (tmp_path / run_folder.SETTINGS).write_bytes(bad)
        with pytest.raises(errors.CheckpointError, match=r"settings.*settings\.json"):
            run_folder.begun(tmp_path)


# --- errors and signals ---------------------------------------------------------------------------


@pytest.mark.parametrize("by_default", [False, True])
def test_errors_of_backends_speak_of_options(capsys, by_default):
    """The messages of flashproto itself, so that one that is put in other words is noticed here."""
    errors = module("errors")
    q = torch.randn(1, 1, 4, 8)
    try:
        set_default("hopper" if by_default else None)
        with pytest.raises(BackendError) as caught:
            flashproto.attention(q, q, q, impl=None if by_default else "hopper")
    finally:
        set_default("torch")
    assert errors.tell("train_gpt.py", caught.value) == 2
    said = capsys.readouterr().err
    assert said.startswith("train_gpt.py: attention: backend 'hopper' cannot run")
    assert ("Unset FLASHPROTO_IMPL" if by_default else "Leave --impl out") in said
    assert "impl=" not in said
    assert "set_default" not in said


def test_errors_without_a_file_say_where(capsys):
    tell = module("errors").tell
    assert tell("x.py", OSError(28, "No space left on device")) == 2
    assert "No space left on device, while printing" in capsys.readouterr().err
    assert tell("x.py", FileNotFoundError(2, "No such file or directory", "a.txt")) == 2
    assert "a.txt" in capsys.readouterr().err
    assert tell("x.py", torch.OutOfMemoryError("CUDA out of memory")) == 1


def test_the_second_signal_ends_the_process(capfd):
    handlers = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        stop = module("stop").StopSignal()
        assert not stop
        assert stop.name is None
        signal.raise_signal(signal.SIGTERM)
        assert stop
        assert stop.name == "SIGTERM"
        assert signal.getsignal(signal.SIGINT) == signal.getsignal(signal.SIGTERM) == signal.SIG_DFL
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)
    said = "stopping after this step, press again to quit without saving"
    assert capfd.readouterr().err == f"\n{said}\n"


def test_importing_an_example_changes_nothing():
    """Only running it does: `start` is behind `if __name__ == "__main__"`."""
    policy, handler = os.environ.get("OMP_WAIT_POLICY"), signal.getsignal(signal.SIGINT)
    for name in ("train_gpt", "generate", "compare_losses", "time_layers", "rollouts"):
        module(name)
    assert os.environ.get("OMP_WAIT_POLICY") == policy
    assert signal.getsignal(signal.SIGINT) == handler
