"""The training and sampling scripts, run as a user runs them.

Runs that are killed are processes of their own; what ends by itself runs in this process.
"""

from __future__ import annotations

# ruff: noqa: F401, F811  (fixtures are imported)
import contextlib
import dataclasses
import importlib
import json
import math
import os
import re
import resource
import shutil
import signal
import time
import warnings
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from example_scripts import (
    BEST,
    CHECKPOINT,
    LOG,
    PLOT,
    SETTINGS,
    TINY,
    books,
    called,
    content,
    environment,
    examples_path,
    fingerprint,
    refused,
    rows,
    run,
    send_when,
    start,
    text,
    tiny,
    tokens,
)

from flashproto.backends import device_reasons

# Some seconds of training on one core; long enough to be stopped on the way.
SMALL = [
    "--steps",
    "240",
    "--batch-size",
    "2",
    "--context",
    "32",
    "--save-every",
    "20",
    "--validate-every",
    "80",
    "--seed",
    "3",
]
STOPPING = "stopping after this step, press again to quit without saving"


# --- a run from start to end ---------------------------------------------------------------------


@pytest.mark.slow
def test_training_beats_the_bigram_on_text_it_never_saw(tmp_path):
    out = run(
        "train_gpt.py",
        "--device",
        "cpu",
        "--steps",
        200,
        "--batch-size",
        8,
        "--context",
        64,
        "--validate-every",
        100,
        cwd=tmp_path,
    )
    folder = tmp_path / "runs" / "gpt-1"
    log = rows(folder)
    assert [r["step"] for r in log] == list(range(1, 201))
    assert log[-1]["validation"] < log[99]["validation"]
    bigram = float(out.split("bigram")[1].split()[0])
    assert bigram == pytest.approx(2.32, abs=0.05)
    assert log[-1]["validation"] < bigram
    for said in (
        "SHA-256",
        "attention torch",
        "sample before",
        "sample after",
        "bits per byte",
        "\nmore text   ",
        "tokens/s (median step)",
        "parameters",
    ):
        assert said in out
    smoothed = sum(r["loss"] for r in log[-50:]) / 50
    assert f"loss={smoothed:.3f}, validation={log[-1]['validation']:.3f}" in out
    assert out.endswith("train_gpt.py --resume --out runs/gpt-1 --steps 400\n")
    assert (folder / PLOT).read_bytes().startswith(b"\x89PNG")
    assert {p.name for p in folder.iterdir()} == {BEST, CHECKPOINT, LOG, PLOT, SETTINGS}

    sampled = run(
        "generate.py",
        "--prompt",
        "The ",
        "--tokens",
        40,
        "--top-k",
        5,
        "--seed",
        1,
        "--device",
        "cpu",
        cwd=tmp_path,
    )
    assert sampled.startswith("The ")
    assert len(sampled) == 4 + 40 + 1


@pytest.mark.slow
def test_killed_and_stopped_run_goes_on_to_the_same_losses(tmp_path, text):
    whole, folder = tmp_path / "whole", tmp_path / "run"
    called("train_gpt", "--data", text, "--device", "cpu", *SMALL, "--out", whole)
    first = start(
        "train_gpt.py", "--data", text.name, "--device", "cpu", *SMALL, "--out", folder, cwd=text.parent
    )
    send_when(first, (folder / SETTINGS).exists, signal.SIGKILL)  # before the first checkpoint, mostly

    def reached(step: int) -> bool:
        return (folder / LOG).exists() and (folder / LOG).read_text().count("\n") >= step

    for number, step in ((signal.SIGKILL, 40), (signal.SIGINT, 60), (signal.SIGTERM, 100)):
        again = start("train_gpt.py", "--resume", "--out", folder, cwd=tmp_path)
        out, err = send_when(again, lambda step=step: reached(step), number)
        if number == signal.SIGKILL:
            assert again.returncode == -number
            assert len(rows(folder)) < 240
            continue
        assert again.returncode == 128 + number, out + err
        last = rows(folder)[-1]["step"]
        assert step <= last < 240
        assert STOPPING in err
        assert f"stopped at step {last} ({number.name}) and saved" in out
        assert "Traceback" not in err

    called("train_gpt", "--resume", "--out", folder)
    assert rows(folder) == rows(whole)
    assert content(folder / CHECKPOINT) == content(whole / CHECKPOINT)


@pytest.mark.slow
def test_minutes_ends_early_and_a_torn_log_is_mended(tmp_path, monkeypatch, capsys, text, tiny):
    monkeypatch.chdir(tmp_path)
    folder = tmp_path / "runs" / "gpt-1"
    called("train_gpt", "--data", text, *TINY, "--minutes", "1e-6")
    assert "stopped at step 1 (--minutes 1e-06) and saved" in capsys.readouterr().out
    with open(folder / LOG, "a") as file:
        file.write('{"step": 2, "loss": 9.0}\n{"step": 3, "lo')
    called("train_gpt", "--resume")
    assert rows(folder) == rows(tiny)
    assert "no readable line" not in capsys.readouterr().out


def test_each_row_of_the_log_has_its_seconds_and_share_of_the_peak(tmp_path, monkeypatch, text):
    monkeypatch.setattr(importlib.import_module("train_gpt"), "peak_flops", lambda settings: 1e12)
    called("train_gpt", "--data", text, *TINY, "--out", tmp_path / "run")
    lines = [json.loads(line) for line in (tmp_path / "run" / LOG).read_text().splitlines()]
    assert len(lines) > 2
    assert all(0 < row["seconds"] < 60 and 0 < row["mfu"] < 1 for row in lines)


@pytest.mark.slow
@pytest.mark.parametrize("compiles", [True, False])
def test_the_bar_says_when_it_compiles_and_warnings_are_lines_of_their_own(
    tmp_path, monkeypatch, capsys, text, compiles
):
    script = importlib.import_module("train_gpt")
    step = script.train_step

    def warning(run, forward, wanted):
        if run.step == 0:
            warnings.warn("from torch", stacklevel=1)
        return step(run, forward, wanted)

    monkeypatch.setattr(script, "compiles", lambda settings: compiles)
    monkeypatch.setattr(script, "train_step", warning)
    before = warnings.showwarning
    called("train_gpt", "--data", text, *TINY, "--out", tmp_path / "run")
    out, err = capsys.readouterr()
    assert ("compiling ..." in out) == compiles
    assert "compiling" not in out.splitlines()[-1] and "\ufffd" not in out
    assert "UserWarning: from torch\n" in err and ".py:" not in err
    assert warnings.showwarning is before


def test_steps_that_take_minutes_are_told_before_they_begin(capsys):
    module = importlib.import_module("machine")
    settings = SimpleNamespace(device="cpu", compile=False)
    module.warn_of_long_steps(1e6, settings)
    assert not capsys.readouterr().out
    module.warn_of_long_steps(1e18, settings)
    assert re.match(r"note: a step will take \d+ minutes or more on this CPU;", capsys.readouterr().out)


@pytest.mark.gpu
@pytest.mark.slow
def test_backends_reach_the_same_loss_on_a_gpu(tmp_path):
    reached = {}
    for impl in ("reference", "triton", "hopper"):
        if not device_reasons(impl, torch.device("cuda")):
            out = run("train_gpt.py", "--impl", impl, "--out", tmp_path / impl, cwd=tmp_path)
            assert f"attention {impl}" in out
            reached[impl] = rows(tmp_path / impl)[-1]["validation"]
    assert len(reached) > 1
    assert list(reached.values()) == pytest.approx([reached["reference"]] * len(reached), abs=0.02)
    assert max(reached.values()) < 1.4


@pytest.mark.gpu
def test_deterministic_run_resumes_to_the_same_losses_on_a_gpu(tmp_path, text):
    common = ["--data", text, "--device", "cuda", "--deterministic", *SMALL, "--out"]
    run("train_gpt.py", *common, tmp_path / "whole", cwd=tmp_path)
    killed = start("train_gpt.py", *common, tmp_path / "parts", cwd=tmp_path)
    log = tmp_path / "parts" / LOG
    send_when(killed, lambda: log.exists() and log.read_text().count("\n") >= 40, signal.SIGKILL)
    run("train_gpt.py", "--resume", "--out", tmp_path / "parts", cwd=tmp_path)
    assert rows(tmp_path / "parts") == rows(tmp_path / "whole")


# --- begun again, gone further, begun with weights ------------------------------------------------


def leave(folder: Path, *files: str) -> None:
    """What a run leaves that is killed before its first checkpoint."""
    for name in files:
        (folder / name).write_bytes(b"" if name == LOG else b"half of a f")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("how", "files"),
    [
        ("--resume", []),
        ("--resume", [f"{CHECKPOINT}.partial", LOG]),
        ("--resume auto", [f"{CHECKPOINT}.partial"]),
        ("the same command", [f"{CHECKPOINT}.partial", LOG]),
    ],
)
def test_a_run_that_died_before_its_first_checkpoint_begins_again(tmp_path, text, tiny, how, files):
    run_folder, settings = map(importlib.import_module, ("run_folder", "settings"))
    folder = tmp_path / "run"
    given = ["--data", str(text), *TINY]
    folder.mkdir()
    run_folder.begin(folder, settings.Settings(**settings.parse(given, None)).resolved())
    leave(folder, *files)
    options = given if how == "the same command" else how.split()
    called("train_gpt", *options, "--out", folder)
    assert rows(folder) == rows(tiny)
    assert content(folder / CHECKPOINT) == content(tiny / CHECKPOINT)
    assert {p.name for p in folder.iterdir()} == {BEST, CHECKPOINT, LOG, PLOT, SETTINGS}


def test_a_run_on_tokens_that_died_before_its_first_checkpoint_begins_again(tmp_path, tokens):
    """What it took tokens for is in its settings, and no option of who resumes it."""
    run_folder, settings = map(importlib.import_module, ("run_folder", "settings"))
    folder = tmp_path / "run"
    given = ["--data", str(tokens), *TINY]
    folder.mkdir()
    begun = settings.Settings(**settings.parse(given, None)).resolved()
    run_folder.begin(folder, dataclasses.replace(begun, level="bpe"))
    called("train_gpt", "--resume", "--minutes", "1e-6", "--out", folder)
    assert (folder / CHECKPOINT).is_file()


@pytest.mark.slow
@pytest.mark.parametrize("files", [[], [f"{SETTINGS}.partial"]])
def test_a_run_that_died_before_it_wrote_anything_begins_again(tmp_path, capsys, text, tiny, files):
    folder = tmp_path / "run"
    folder.mkdir()
    leave(folder, *files)
    said = refused(capsys, "train_gpt", "--resume", "--out", folder)
    assert "no run has begun in that folder" in said
    assert "the same command without --resume" in said
    called("train_gpt", "--data", text, *TINY, "--resume", "auto", "--out", folder)
    assert rows(folder) == rows(tiny)


@pytest.mark.slow
def test_resume_takes_the_newest_run_also_one_without_a_checkpoint(tmp_path, monkeypatch, text, tiny):
    monkeypatch.chdir(tmp_path)
    shutil.copytree(tiny, "runs/gpt-1")
    run_folder = importlib.import_module("run_folder")
    settings = run_folder.Settings(**json.loads((tiny / SETTINGS).read_text()))
    time.sleep(0.01)
    Path("runs/gpt-2").mkdir()
    run_folder.begin(Path("runs/gpt-2"), settings)
    before = fingerprint(Path("runs/gpt-1"))
    called("train_gpt", "--resume")
    assert rows(Path("runs/gpt-2")) == rows(tiny)
    assert fingerprint(Path("runs/gpt-1")) == before


@pytest.mark.slow
def test_resume_auto_is_one_command_for_all_of_a_runs_life(tmp_path, monkeypatch, text, tiny):
    monkeypatch.chdir(tmp_path)
    command = ["--data", text, *TINY, "--resume", "auto"]
    called("train_gpt", *command, "--minutes", "1e-6")
    assert len(rows(Path("runs/gpt-1"))) == 1
    for _ in range(2):
        called("train_gpt", *command)
        assert rows(Path("runs/gpt-1")) == rows(tiny)
    assert [p.name for p in Path("runs").iterdir()] == ["gpt-1"]


@pytest.mark.slow
def test_a_full_disk_is_named_and_leaves_a_run_that_can_go_on(tmp_path, capsys, text, tiny):
    """At the first checkpoint, which is the largest file."""
    folder = tmp_path / "run"
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, hard))
    try:
        said = refused(capsys, "train_gpt", "--data", text, *TINY, "--out", folder, code=1)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert f"{folder / CHECKPOINT} could not be written (File too large)" in said
    assert "Make room, then go on with --resume" in said
    called("train_gpt", "--resume", "--out", folder)
    assert rows(folder) == rows(tiny)


def test_more_steps_and_another_learning_rate_on_resume(tmp_path, capsys, tiny):
    train_gpt, checkpoint = map(importlib.import_module, ("train_gpt", "checkpoint"))
    folder = tmp_path / "run"
    shutil.copytree(tiny, folder)
    options = ["--steps", "30", "--learning-rate", "1e-3"]
    called("train_gpt", "--resume", "--out", folder, *options, "--minutes", "1e-6")
    out = capsys.readouterr().out
    assert "note: --steps is 30, and was 24: the learning rate follows the new schedule" in out
    assert "note: --learning-rate is 0.001, and was 0.004" in out
    called("train_gpt", "--resume", "--out", folder)  # what was given once holds
    log = rows(folder)
    assert log[:24] == rows(tiny)
    assert [r["step"] for r in log] == list(range(1, 31))
    _, facts = checkpoint.load(folder / CHECKPOINT)
    settings = train_gpt.Settings(**facts["settings"])
    want = [train_gpt.learning_rate(step, settings) for step in range(24, 30)]
    assert [r["learning_rate"] for r in log[24:]] == want
    assert want[-1] < 1e-3
    said = refused(capsys, "train_gpt", "--resume", "--out", folder, "--steps", "29")
    assert "--steps is 29, and the run has made 30" in said


def test_options_given_to_resume_hold_after_a_kill(tmp_path, monkeypatch, tiny):
    """They are in the checkpoint before the first step that follows them."""
    train_gpt, checkpoint = map(importlib.import_module, ("train_gpt", "checkpoint"))
    folder = tmp_path / "run"
    shutil.copytree(tiny, folder)

    def killed(*_: object) -> None:
        raise MemoryError

    monkeypatch.setattr(train_gpt, "train_step", killed)
    with pytest.raises(MemoryError):
        called("train_gpt", "--resume", "--out", folder, "--steps", "30")
    _, facts = checkpoint.load(folder / CHECKPOINT)
    assert (facts["step"], facts["settings"]["steps"]) == (24, 30)


@pytest.mark.slow
def test_init_from_begins_with_the_weights_of_a_run(tmp_path, monkeypatch, capsys, tiny):
    monkeypatch.chdir(tmp_path)
    train_gpt, checkpoint = map(importlib.import_module, ("train_gpt", "checkpoint"))
    Path("other.txt").write_text("some other text, with a \u2603. " * 60, encoding="utf-8")
    options = [*TINY, "--data", "other.txt", "--context", "24", "--init-from", str(tiny)]
    with contextlib.ExitStack() as held:
        prepared = train_gpt.prepare(train_gpt.parse(options, None), held)
    tensors, facts = checkpoint.load(tiny / CHECKPOINT)
    for name, value in prepared.model.state_dict().items():
        assert torch.equal(value, tensors[f"model.{name}"])
    assert prepared.step == 0
    assert prepared.optimizer.state_dict()["state"] == {}
    assert (prepared.model.config.context, facts["config"]["context"]) == (24, 16)
    assert list(prepared.corpus.vocabulary.symbols) == facts["vocabulary"]["symbols"]

    # Killed and resumed, to the same losses; the other run is not needed any more, and never written.
    before = fingerprint(tiny)
    called("train_gpt", *options, "--out", "whole")
    assert "54 of the training part are not in the vocabulary" in capsys.readouterr().out
    called("train_gpt", *options, "--out", "parts", "--minutes", "1e-6")
    called("train_gpt", "--resume", "--out", "parts")
    assert rows(Path("parts")) == rows(Path("whole"))
    Path("died").mkdir()  # before its first checkpoint
    importlib.import_module("run_folder").begin(Path("died"), prepared.settings)
    called("train_gpt", "--resume", "--out", "died")
    assert rows(Path("died")) == rows(Path("whole"))
    assert fingerprint(tiny) == before
    said = refused(capsys, "train_gpt", "--resume", "--out", "parts", "--init-from", "elsewhere")
    assert "--init-from is" in said
    for option, value in (("--preset", "toy-llama"), ("--level", "byte")):
        said = refused(capsys, "train_gpt", *options, option, value)
        assert f"{option} is {value!r}; with --init-from it takes what that run has" in said
    assert "there is no checkpoint" in refused(capsys, "train_gpt", "--init-from", "nowhere")


# --- stopped --------------------------------------------------------------------------------------


@pytest.mark.slow
def test_a_validation_that_was_interrupted_is_made_up_for(tmp_path, monkeypatch, capfd, text, tiny):
    """Ctrl-C in each of the validations, the last one too: none of them is lost."""
    train_gpt = importlib.import_module("train_gpt")
    validate = train_gpt.validate

    def interrupted(*arguments: object) -> dict | None:
        signal.raise_signal(signal.SIGINT)
        return validate(*arguments)

    folder = tmp_path / "run"
    options = ["--data", text, *TINY]
    for step in (8, 16, 24):
        with monkeypatch.context() as patched:
            patched.setattr(train_gpt, "validate", interrupted)
            called("train_gpt", *options, "--out", folder, code=130)
        assert rows(folder)[-1].keys() == {"step", "loss", "learning_rate", "gradient_norm"}
        assert rows(folder)[-1]["step"] == step
        assert f"stopped at step {step} (SIGINT) and saved" in capfd.readouterr().out
        options = ["--resume"]
        if step < 24:  # a resumed run validates first, then trains
            called("train_gpt", "--resume", "--out", folder, "--minutes", "1e-6")
            assert rows(folder)[-2] == rows(tiny)[step - 1]
    called("train_gpt", "--resume", "--out", folder)
    assert rows(folder) == rows(tiny)


@pytest.mark.slow
def test_a_sample_that_is_interrupted_ends_and_all_is_saved(tmp_path, monkeypatch, capfd, text, tiny):
    """The one before training, then the one after it."""
    train_gpt = importlib.import_module("train_gpt")
    folder = tmp_path / "run"
    stream = train_gpt.stream

    def interrupted(model, prompts, tokens, seed, on_token, *more, **options):
        told: list[int] = []

        def tell(b: int, token: int) -> bool:
            if len(told) == 3:
                signal.raise_signal(signal.SIGINT)
            told.append(token)
            return on_token(b, token)

        stream(model, prompts, tokens, seed, tell, *more, **options)

    monkeypatch.setattr(train_gpt, "stream", interrupted)
    called("train_gpt", "--data", text, *TINY, "--out", folder, code=130)
    out = capfd.readouterr().out
    assert re.search(r"sample before training:\n...\n", out)
    assert "stopped at step 0 (SIGINT) and saved" in out
    monkeypatch.setattr(train_gpt, "stream", stream)
    called("train_gpt", "--resume", "--out", folder)
    assert rows(folder) == rows(tiny)
    monkeypatch.setattr(train_gpt, "stream", interrupted)
    capfd.readouterr()
    called("train_gpt", "--resume", "--out", folder, code=130)
    out, err = capfd.readouterr()
    assert re.search(r"sample after training:\n...\n", out)
    assert STOPPING not in err


@pytest.mark.parametrize(
    "script", ["train_gpt", "generate", "compare_losses", "time_layers", "rollouts"]
)
def test_ctrl_c_during_imports_is_no_traceback(tmp_path, script):
    """And each script sets how OpenMP waits before torch is imported, unless the user has."""
    (tmp_path / "torch.py").write_text(
        "import os, sys, time\nprint(os.environ['OMP_WAIT_POLICY'])\n"
        "open('importing', 'w').close()\ntime.sleep(60)\n"
    )
    for policy in ("PASSIVE", "ACTIVE"):
        given = {} if policy == "PASSIVE" else {"OMP_WAIT_POLICY": policy}
        path = os.pathsep.join([str(tmp_path), environment()["PYTHONPATH"]])
        paths = {"PYTHONPATH": path, "PYTHONUNBUFFERED": "1"}
        process = start(f"{script}.py", cwd=tmp_path, **paths, **given)
        out, err = send_when(process, (tmp_path / "importing").exists, signal.SIGINT)
        (tmp_path / "importing").unlink()
        assert process.returncode == -signal.SIGINT
        assert (out, err) == (f"{policy}\n", "")


# --- what is on the disk --------------------------------------------------------------------------


def read_only(monkeypatch: pytest.MonkeyPatch, folder: Path) -> None:
    """No file of the folder can be opened to write, or removed: permissions would not stop root."""
    checkpoint, run_folder = map(importlib.import_module, ("checkpoint", "run_folder"))
    by_descriptor, unlink = os.open, Path.unlink

    def check(path: Path, writes: bool = True) -> None:
        if folder in Path(path).parents and writes:
            raise OSError(30, "Read-only file system", str(path))

    def guarded(path: Path, mode: str = "r", **how: object):
        check(path, mode[0] in "wax")
        return open(path, mode, **how)

    def guarded_by_descriptor(path: Path, flags: int, *how: int) -> int:
        check(path, bool(flags & (os.O_WRONLY | os.O_RDWR)))
        return by_descriptor(path, flags, *how)

    def guarded_unlink(path: Path, missing_ok: bool = False) -> None:
        check(path)
        unlink(path, missing_ok)

    for module in (checkpoint, run_folder):
        monkeypatch.setattr(module, "open", guarded, raising=False)
    monkeypatch.setattr(os, "open", guarded_by_descriptor)
    monkeypatch.setattr(Path, "unlink", guarded_unlink)


def test_a_finished_run_in_a_read_only_folder_can_be_looked_at(monkeypatch, capsys, tiny):
    before = fingerprint(tiny)
    read_only(monkeypatch, tiny)
    called("train_gpt", "--resume", "--out", tiny)
    out = capsys.readouterr().out
    assert f"validation  {rows(tiny)[-1]['validation']:.4f} nats" in out
    assert "sample after training:" in out
    assert f"note: {tiny / PLOT} is not drawn (Read-only file system)" in out
    called("generate", "--run", tiny, "--tokens", "3", "--device", "cpu")
    assert fingerprint(tiny) == before
    said = refused(capsys, "train_gpt", "--resume", "--out", tiny, "--steps", "30", code=1)
    assert f"{tiny / SETTINGS} could not be written (Read-only file system)" in said
    assert fingerprint(tiny) == before


def delete(lines: list[bytes]) -> list[bytes]:
    return [*lines[:4], *lines[6:9], *lines[10:]]


def garble(lines: list[bytes]) -> list[bytes]:
    return [*lines[:4], b"\xff\xfe\x00\x01", b'{"step": 6}', *lines[6:9], b"[10]", *lines[10:]]


@pytest.mark.slow
@pytest.mark.parametrize("damage", [delete, garble])
def test_a_hole_in_the_log_is_reported(tmp_path, capsys, tiny, damage):
    folder = tmp_path / "run"
    shutil.copytree(tiny, folder)
    lines = damage((folder / LOG).read_bytes().splitlines())
    (folder / LOG).write_bytes(b"\n".join(lines) + b"\n")
    before = fingerprint(folder)
    note = f"note: {folder / LOG} has no readable line for step 5 to 6, 10;"
    capsys.readouterr()
    called("train_gpt", "--resume", "--out", folder)  # a finished run is looked at
    assert note in capsys.readouterr().out
    assert {k: v for k, v in fingerprint(folder).items() if PLOT not in k} == {
        k: v for k, v in before.items() if PLOT not in k
    }
    called("train_gpt", "--resume", "--out", folder, "--steps", "26")
    assert note in capsys.readouterr().out
    whole = rows(tiny)
    assert rows(folder)[:-2] == [*whole[:4], *whole[6:9], *whole[10:]]
    assert [r["step"] for r in rows(folder)[-2:]] == [25, 26]


def truncate(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-1000])


def flip_a_bit(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[-5000] ^= 1
    path.write_bytes(content)


def replace_by_text(path: Path) -> None:
    path.write_text("this is no checkpoint")


def replace_by_other_tensors(path: Path) -> None:
    from safetensors.torch import save_file

    save_file({"x": torch.zeros(3)}, path)


@pytest.mark.parametrize(
    ("damage", "said"),
    [
        (truncate, "is not a whole safetensors file"),
        (flip_a_bit, "does not have the content that its SHA-256 says"),
        (replace_by_text, "is not a whole safetensors file"),
        (replace_by_other_tensors, "was not written by train_gpt.py"),
        (Path.unlink, "there is no checkpoint"),
    ],
)
def test_damaged_checkpoint_is_refused_and_left_alone(tmp_path, capsys, tiny, damage, said):
    folder = tmp_path / "run"
    shutil.copytree(tiny, folder)
    damage(folder / CHECKPOINT)
    before = fingerprint(folder)
    for how in (["--resume"], ["--resume", "auto"]):
        assert said in refused(capsys, "train_gpt", *how, "--out", folder)
    assert said in refused(capsys, "train_gpt", "--init-from", folder)
    assert said in refused(capsys, "generate", "--run", folder)
    assert fingerprint(folder) == before


# --- bad input -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--no-such-option"], "unrecognized arguments: --no-such-option. See --help."),
        (["--lr", "1e-3"], "unrecognized arguments: --lr 1e-3. Write --learning-rate for --lr."),
        (["--learning_rate=1e-3"], ". Write --learning-rate for --learning_rate. See --help."),
        (["--batch_size", "4", "--n_layer", "2"], "for --batch_size. Write --n-layers for --n_layer."),
        (["--max_iters", "9"], "Write --steps for --max_iters."),
        (["--max-new-tokens", "9"], "unrecognized arguments: --max-new-tokens 9. See --help."),
        (["--impl", "cuda"], "invalid choice: 'cuda' (choose from"),
        (["--impl", "hopper", "--device", "cpu"], "--impl is 'hopper', which cannot run on 'cpu'"),
        (["--preset", "gpt9"], "invalid choice: 'gpt9'"),
        (["--n-heads", "3"], "takes a multiple of --n-heads, 3. Change --d-model or --n-heads."),
        (["--steps", "0"], "--steps: 0 is not above 0"),
        (["--steps", "many"], "--steps: invalid positive int value: 'many'"),
        (["--validate-tokens", "0"], "--validate-tokens: 0 is not above 0"),
        (["--learning-rate", "nan"], "nan is not above 0"),
        (["--seed", "-1"], "-1 is not from 0"),
        (["--data", "missing.txt"], "missing.txt', which cannot be read (No such file"),
        (["--data", "."], "without index.json: prepare_data.py did not write it. It takes a text file"),
        (["--data", "empty.txt"], "empty.txt', which is empty"),
        (
            ["--data", "short.txt"],
            "has 21 chars to train on and 3 to validate on; with --context 128 it takes at least 130",
        ),
        (
            ["--data", "binary.dat"],
            "binary.dat is not UTF-8 (byte 0xff at offset 0); it takes text in UTF-8. Convert it, with "
            "iconv -f utf-16 -t utf-8, or begin a run with --level byte.",
        ),
        (["--resume"], "there is no run under runs/"),
        (["--resume", "often"], "--resume: invalid choice: 'often'"),
        (["--resume", "--out", "nowhere"], "there is no checkpoint 'nowhere"),
        (["--out", "full"], "--out is 'full', which is there and not an empty folder"),
        (["--out", "short.txt"], "--out is 'short.txt', which is there"),
    ],
)
def test_train_refuses_bad_input_and_writes_nothing(tmp_path, monkeypatch, capsys, arguments, said):
    monkeypatch.chdir(tmp_path)
    Path("empty.txt").touch()
    Path("short.txt").write_text("not enough to train with")
    Path("binary.dat").write_bytes(b"\xff\xfe" * 1000)
    Path("full").mkdir()
    Path("full/mine.txt").write_text("keep me")
    before = fingerprint(tmp_path)
    assert said in refused(capsys, "train_gpt", *arguments)
    assert fingerprint(tmp_path) == before
    assert not Path("runs").exists()


def test_other_trainers_names_of_options_lead_to_ours(capsys):
    for other, name in importlib.import_module("settings").OTHER_NAMES.items():
        script = "generate" if name == "--tokens" else "train_gpt"
        assert f"Write {name} for {other}." in refused(capsys, script, other, "1")


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
@pytest.mark.parametrize("script", ["train_gpt", "generate"])
def test_a_gpu_that_is_not_there_is_refused(tmp_path, monkeypatch, capsys, tiny, script):
    monkeypatch.chdir(tmp_path)
    arguments = ["--run", tiny] if script == "generate" else []
    assert "torch sees no GPU" in refused(capsys, script, "--device", "cuda", *arguments)


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--steps", "23"], "--steps is 23, and the run has made 24; it takes"),
        (["--preset", "toy-llama"], "--preset is 'toy-llama'; a resumed run takes"),
        (["--batch-size", "3"], "--batch-size is 3; a resumed run takes what it began with, 2"),
        (["--init-from", "other"], "a resumed run takes what it began with, nothing"),
        (["--data", "other.txt"], "has SHA-256"),
    ],
)
def test_resume_refuses_what_would_change_the_run(tmp_path, monkeypatch, capsys, tiny, arguments, said):
    monkeypatch.chdir(tmp_path)
    Path("other.txt").write_text("Another text. " * 1000)
    before = fingerprint(tiny)
    assert said in refused(capsys, "train_gpt", "--resume", "--out", tiny, *arguments)
    assert fingerprint(tiny) == before


def test_new_run_does_not_touch_a_finished_one(capsys, tiny):
    before = fingerprint(tiny)
    assert "Add --resume" in refused(capsys, "train_gpt", "--out", tiny)
    assert fingerprint(tiny) == before


@pytest.mark.parametrize(
    "script", ["train_gpt", "generate", "compare_losses", "time_layers", "rollouts"]
)
def test_command_lines_speak_of_options(capsys, script):
    module = importlib.import_module(script)
    with pytest.raises(SystemExit) as leaving:
        module.main(["--help"])
    assert leaving.value.code == 0
    assert "=None" not in capsys.readouterr().out


# --- sampling ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--prompt", "caf\u2603"], "--prompt has '\u2603'"),
        (["--prompt", ""], "--prompt is empty"),
        (["--tokens", "-1"], "--tokens: -1 is not 0 or above"),
        (["--temperature", "-1"], "--temperature: -1 is not 0 or above"),
        (["--temperature", "nan"], "--temperature: nan is not 0 or above"),
        (["--top-k", "0"], "--top-k: 0 is not above 0"),
        (["--prompt-lookup", "16"], "--prompt-lookup: invalid choice: 16"),
        (["--impl", "cuda"], "invalid choice: 'cuda'"),
        (["--impl", "hopper", "--device", "cpu"], "--impl is 'hopper', which cannot run on 'cpu'"),
        (["--run", "nowhere"], "there is no checkpoint"),
    ],
)
def test_generate_refuses_bad_input(capsys, tiny, arguments, said):
    assert said in refused(capsys, "generate", "--run", tiny, *arguments)


def test_generate_names_the_option_that_is_missing(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert "--run is not given, and there is no run" in refused(capsys, "generate")


def test_generate_repeats_itself_from_a_seed(capsys, tiny):
    def sampled(*arguments: str) -> str:
        capsys.readouterr()
        common = ["--run", tiny, "--device", "cpu", "--impl", "torch", "--tokens", "30"]
        called("generate", *common, *arguments)
        return capsys.readouterr().out

    assert sampled("--seed", "1") == sampled("--seed", "1") != sampled("--seed", "2")
    greedy = sampled("--temperature", "0")
    assert greedy == sampled("--top-k", "1", "--seed", "5")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("line", "opening"),
    [("two words\n", "\n"), ("two words ", " "), ("baab", "a"), ("\u597d\u4f60", "\u4f60")],
)
def test_the_default_prompt_is_in_any_text(tmp_path, monkeypatch, capsys, line, opening):
    monkeypatch.chdir(tmp_path)
    Path("text.txt").write_text(line * 200, encoding="utf-8")
    called("train_gpt", "--data", "text.txt", *TINY, "--steps", "1")
    capsys.readouterr()
    called("generate", "--tokens", "5", "--device", "cpu")
    out = capsys.readouterr().out
    assert out.startswith(opening)
    assert len(out) == 1 + 5 + 1


def test_generate_prints_several_texts_and_what_they_took(capsys, tiny):
    common = ["--run", tiny, "--device", "cpu", "--impl", "torch", "--tokens", "20"]
    capsys.readouterr()
    called("generate", *common, "--prompt", "The ", "--seed", "3")
    alone, took = capsys.readouterr()
    assert re.fullmatch(r"20 tokens, [\d.]+ tokens/s, the first one after \d+ ms\n", took)
    several = ["--prompt", "The ", "--prompt", "a", "--samples", "2", "--seed", "3"]
    called("generate", *common, *several, "--top-p", "1", "--min-p", "0", "--prompt-lookup", "3")
    out, took = capsys.readouterr()
    texts = re.findall(r"--- (\d) of 4\n(.*?)(?=\n---|\Z)", out, re.DOTALL)
    assert [number for number, _ in texts] == ["1", "2", "3", "4"]
    assert texts[0][1] + "\n" == alone
    assert texts[0] != texts[1]
    assert [len(text.removesuffix("\n")) for _, text in texts] == [24, 24, 21, 21]
    assert took.startswith("80 tokens, ")


def test_generate_prints_as_it_goes(tmp_path, tiny):
    """More tokens than anyone waits for: the first ones are read, then Ctrl-C ends it."""
    process = start("generate.py", "--run", tiny, "--prompt", "The ", "--tokens", 10**9, cwd=tmp_path)
    assert process.stdout.read(8).startswith("The ")
    _, err = send_when(process, lambda: True, signal.SIGINT)
    assert process.returncode == 130
    assert err.strip() == ""


def test_a_reader_that_goes_ends_generate_without_a_traceback(tmp_path, tiny):
    process = start("generate.py", "--run", tiny, "--prompt", "The ", "--tokens", 10**9, cwd=tmp_path)
    assert process.stdout.read(5).startswith("The ")
    process.stdout.close()
    assert process.wait(timeout=120) == 141
    assert process.stderr.read() == ""


# --- losses of backends, compared -----------------------------------------------------------------


@pytest.mark.slow
def test_losses_of_backends_are_compared(tmp_path, text):
    """The table and the file say of two backends what their logs say."""
    out = tmp_path / "losses.json"
    options = ["--impl", "torch", "reference", "--seeds", "2", "--processes", "2", "--out", out]
    shape = ["--batch-size", "1", "--context", "16", "--device", "cpu", "--data", text]
    said = run("compare_losses.py", *options, "--", "--steps", "52", *shape, cwd=tmp_path)
    compare_losses = importlib.import_module("compare_losses")
    runs = json.loads(out.read_text())["losses"]
    assert [(r["impl"], r["seed"]) for r in runs] == [
        (impl, seed) for seed in (0, 1) for impl in ("torch", "reference")
    ]
    for r in runs:
        assert r["steps"] == 52
        assert len(r["windows"]) == 2
        assert r["mean"] == pytest.approx((50 * r["windows"][0] + 2 * r["windows"][1]) / 52)
        assert math.isfinite(r["validation"])
    assert runs[0]["windows"] != runs[2]["windows"]
    for ours, plain in ((runs[0], runs[1]), (runs[2], runs[3])):
        assert ours["windows"] == pytest.approx(plain["windows"], abs=0.1)
    found = compare_losses.differences(runs, "torch", "reference", "last")
    assert found == [runs[0]["last"] - runs[1]["last"], runs[2]["last"] - runs[3]["last"]]
    assert f"{sum(found) / 2:+.4f} +- {abs(found[0] - found[1]) / 2:.4f}" in said
    assert "tokens/s" not in said


def test_losses_of_windows_differ_by_the_largest():
    compare_losses = importlib.import_module("compare_losses")
    runs = [
        {"impl": "a", "seed": 0, "windows": [3.0, 2.0, 1.0]},
        {"impl": "b", "seed": 0, "windows": [3.5, 4.0, 0.0]},
    ]
    assert compare_losses.differences(runs, "a", "b", "windows") == [-2.0]
    assert compare_losses.differences(runs, "b", "a", "windows") == [2.0]


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--impl", "torch"], "two backends"),
        (["--impl", "torch", "triton", "--seeds", "0"], "--seeds is 0"),
        (["--impl", "torch", "fast"], "invalid choice: 'fast'"),
    ],
)
def test_compare_losses_refuses_bad_options(capsys, options, said):
    compare_losses = importlib.import_module("compare_losses")
    with pytest.raises(SystemExit) as error:
        compare_losses.main(options)
    assert error.value.code == 2
    assert said in capsys.readouterr().err
