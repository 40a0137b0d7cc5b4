"""The training and sampling scripts, run as a user runs them.

A run that goes through is started in a process of its own; bad input, which ends before any
training, is given to main() in this process.
"""

from __future__ import annotations

import hashlib
import importlib
import json
import math
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

import flashproto
from flashproto.backends import device_reasons

EXAMPLES = Path(__file__).resolve().parents[1] / "examples"
CHECKPOINT = "checkpoint.safetensors"
# Some seconds of training on one core; long enough to be stopped on the way.
SMALL = [
    "--steps", "240", "--batch-size", "2", "--context", "32", "--save-every", "20",
    "--validate-every", "80", "--seed", "3",
]  # fmt: skip


@pytest.fixture(scope="module", autouse=True)
def examples_path():
    sys.path.insert(0, str(EXAMPLES))
    yield
    sys.path.remove(str(EXAMPLES))


@pytest.fixture(scope="module")
def text(tmp_path_factory) -> Path:
    """The first 30 KB of the language reference: short, so that validation takes no time."""
    from pydoc_data.topics import topics

    path = tmp_path_factory.mktemp("text") / "text.txt"
    path.write_text("".join(topics[name] for name in sorted(topics))[:30000], encoding="utf-8")
    return path


def environment() -> dict[str, str]:
    env = {k: v for k, v in os.environ.items() if k not in ("TRITON_INTERPRET", "FLASHPROTO_IMPL")}
    package = str(Path(flashproto.__file__).resolve().parents[1])
    path = [package, *filter(None, [env.get("PYTHONPATH")])]
    return env | {"OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(path)}


def start(script: str, *arguments: object, cwd: Path) -> subprocess.Popen:
    return subprocess.Popen(
        [sys.executable, str(EXAMPLES / script), *map(str, arguments)],
        cwd=cwd, env=environment(), text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
    )  # fmt: skip


def run(script: str, *arguments: object, cwd: Path, code: int = 0) -> str:
    """Run to the end; returns stdout."""
    process = start(script, *arguments, cwd=cwd)
    out, err = process.communicate(timeout=600)
    assert process.returncode == code, out + err
    assert "Traceback" not in err
    return out


def rows(folder: Path) -> list[dict]:
    return [json.loads(line) for line in (folder / "log.jsonl").read_text().splitlines()]


def losses(folder: Path) -> list[tuple]:
    return [(r["step"], r["loss"], r.get("validation")) for r in rows(folder)]


def interrupt(process: subprocess.Popen, folder: Path, step: int, number: int) -> tuple[str, str]:
    """Send the signal once the log on disk has reached `step`; returns stdout and stderr."""
    end = time.monotonic() + 120
    log = folder / "log.jsonl"
    while not (log.exists() and log.read_text().count("\n") >= step):
        assert process.poll() is None, process.communicate()
        assert time.monotonic() < end
        time.sleep(0.01)
    process.send_signal(number)
    return process.communicate(timeout=120)


# --- a run from start to end ---------------------------------------------------------------------


@pytest.mark.slow
def test_training_beats_the_bigram_on_text_it_never_saw(tmp_path):
    out = run(
        "train_gpt.py", "--device", "cpu", "--steps", 200, "--batch-size", 8, "--context", 64,
        "--validate-every", 100, cwd=tmp_path,
    )  # fmt: skip
    folder = tmp_path / "runs" / "gpt-1"
    log = rows(folder)
    assert [r["step"] for r in log] == list(range(1, 201))
    assert log[-1]["validation"] < log[99]["validation"]
    bigram = float(out.split("bigram")[1].split()[0])
    assert bigram == pytest.approx(2.32, abs=0.05)
    assert log[-1]["validation"] < bigram
    for said in ("SHA-256", "attention torch", "sample before", "sample after", "bits per byte",
                 "tokens/s (median step)", "parameters"):  # fmt: skip
        assert said in out
    assert (folder / "loss.png").read_bytes().startswith(b"\x89PNG")
    assert {p.name for p in folder.iterdir()} == {CHECKPOINT, "log.jsonl", "loss.png"}

    sampled = run(
        "generate.py", "--prompt", "The ", "--tokens", 40, "--top-k", 5, "--seed", 1,
        "--device", "cpu", cwd=tmp_path,
    )  # fmt: skip
    assert sampled.startswith("The ")
    assert len(sampled) == 4 + 40 + 1


@pytest.fixture(scope="module")
def finished(tmp_path_factory, text) -> Path:
    """The folder of a small run that nothing interrupted."""
    folder = tmp_path_factory.mktemp("finished") / "run"
    run("train_gpt.py", "--data", text, "--device", "cpu", *SMALL, "--out", folder, cwd=text.parent)
    return folder


def test_killed_and_stopped_run_goes_on_to_the_same_losses(tmp_path, text, finished):
    folder = tmp_path / "run"
    first = start(
        "train_gpt.py", "--data", text.name, "--device", "cpu", *SMALL, "--out", folder,
        cwd=text.parent,
    )  # fmt: skip
    interrupt(first, folder, 40, signal.SIGKILL)
    assert first.returncode == -signal.SIGKILL
    assert len(rows(folder)) < 240

    for number, step in ((signal.SIGINT, 60), (signal.SIGTERM, 100)):
        again = start("train_gpt.py", "--resume", "--out", folder, cwd=tmp_path)
        out, err = interrupt(again, folder, step, number)
        assert again.returncode == 128 + number, out + err
        last = rows(folder)[-1]["step"]
        assert step <= last < 240
        assert f"stopped at step {last} ({number.name}) and saved" in out
        assert "Traceback" not in err

    run("train_gpt.py", "--resume", "--out", folder, cwd=tmp_path)
    assert losses(folder) == losses(finished)
    ours, theirs = ((f / CHECKPOINT).read_bytes() for f in (folder, finished))
    header = slice(8 + int.from_bytes(ours[:8], "little"), None)
    assert ours[header] == theirs[header]  # weights, optimizer and generator, bit for bit


def test_minutes_ends_early_and_a_torn_log_is_mended(tmp_path, text, finished):
    folder = tmp_path / "runs" / "gpt-1"
    out = run(
        "train_gpt.py", "--data", text, "--device", "cpu", *SMALL, "--minutes", "1e-6",
        cwd=tmp_path,
    )  # fmt: skip
    assert "stopped at step 1 (--minutes 1e-06) and saved" in out
    with open(folder / "log.jsonl", "a") as file:
        file.write('{"step": 2, "loss": 9.0}\n{"step": 3, "lo')
    run("train_gpt.py", "--resume", cwd=tmp_path)
    assert losses(folder) == losses(finished)


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


@pytest.mark.gpu
def test_deterministic_run_resumes_to_the_same_losses_on_a_gpu(tmp_path, text):
    common = ["--data", text, "--device", "cuda", "--deterministic", *SMALL, "--out"]
    run("train_gpt.py", *common, tmp_path / "whole", cwd=tmp_path)
    killed = start("train_gpt.py", *common, tmp_path / "parts", cwd=tmp_path)
    interrupt(killed, tmp_path / "parts", 40, signal.SIGKILL)
    run("train_gpt.py", "--resume", "--out", tmp_path / "parts", cwd=tmp_path)
    assert losses(tmp_path / "parts") == losses(tmp_path / "whole")


# --- bad input -----------------------------------------------------------------------------------


def refused(capsys, script: str, *arguments: object) -> str:
    """main() with bad input: exit code 2 and one line on stderr, which is returned."""
    main = importlib.import_module(script).main
    try:
        code = main([str(a) for a in arguments])
    except SystemExit as leaving:
        code = leaving.code
    err = capsys.readouterr().err
    assert code == 2, err
    assert err.count("\n") == 1, err
    return err


def fingerprint(folder: Path) -> dict[str, str]:
    files = (p for p in folder.rglob("*") if p.is_file())
    return {str(p): hashlib.sha256(p.read_bytes()).hexdigest() for p in files}


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--no-such-option"], "--no-such-option"),
        (["--impl", "cuda"], "invalid choice: 'cuda' (choose from"),
        (["--impl", "hopper", "--device", "cpu"], "backend 'hopper' cannot run"),
        (["--preset", "gpt9"], "invalid choice: 'gpt9'"),
        (["--steps", "0"], "--steps: 0 is not above 0"),
        (["--steps", "many"], "--steps: invalid positive int value: 'many'"),
        (["--learning-rate", "nan"], "nan is not above 0"),
        (["--seed", "-1"], "-1 is not from 0"),
        (["--data", "missing.txt"], "missing.txt', which cannot be read (No such file"),
        (["--data", "."], "cannot be read (Is a directory)"),
        (["--data", "empty.txt"], "empty.txt', which is empty"),
        (["--data", "short.txt"], "has 24 chars; with --context 128 it takes at least 146"),
        (["--data", "binary.dat"], "not UTF-8 (byte 0xff at offset 0)"),
        (["--resume"], "there is no run under runs/"),
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


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
@pytest.mark.parametrize("script", ["train_gpt", "generate"])
def test_a_gpu_that_is_not_there_is_refused(tmp_path, monkeypatch, capsys, finished, script):
    monkeypatch.chdir(tmp_path)
    arguments = ["--run", finished] if script == "generate" else []
    assert "torch sees no GPU" in refused(capsys, script, "--device", "cuda", *arguments)


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
def test_damaged_checkpoint_is_refused_and_left_alone(tmp_path, capsys, finished, damage, said):
    folder = tmp_path / "run"
    shutil.copytree(finished, folder)
    damage(folder / CHECKPOINT)
    before = fingerprint(folder)
    assert said in refused(capsys, "train_gpt", "--resume", "--out", folder)
    assert said in refused(capsys, "generate", "--run", folder)
    assert fingerprint(folder) == before


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--steps", "500"], "--steps is 500; a resumed run takes what it began with, 240"),
        (["--preset", "toy-llama"], "--preset is 'toy-llama'; a resumed run takes"),
        (["--data", "other.txt"], "has SHA-256"),
    ],
)
def test_resume_refuses_what_would_change_the_run(
    tmp_path, monkeypatch, capsys, finished, arguments, said
):
    monkeypatch.chdir(tmp_path)
    Path("other.txt").write_text("Another text. " * 1000)
    before = fingerprint(finished)
    assert said in refused(capsys, "train_gpt", "--resume", "--out", finished, *arguments)
    assert fingerprint(finished) == before


def test_new_run_does_not_touch_a_finished_one(capsys, finished):
    before = fingerprint(finished)
    assert "Add --resume" in refused(capsys, "train_gpt", "--out", finished)
    assert fingerprint(finished) == before


def test_a_failed_write_keeps_the_checkpoint(tmp_path, monkeypatch):
    checkpoint = importlib.import_module("checkpoint")
    path = tmp_path / CHECKPOINT
    checkpoint.save(path, {"x": torch.arange(4.0)}, {"step": 1})

    def disk_full(descriptor: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(checkpoint.os, "fsync", disk_full)
    with pytest.raises(checkpoint.CheckpointError, match="No space left on device"):
        checkpoint.save(path, {"x": torch.zeros(4)}, {"step": 2})
    monkeypatch.undo()
    tensors, facts = checkpoint.load(path)
    assert torch.equal(tensors["x"], torch.arange(4.0))
    assert facts == {"step": 1}
    assert list(tmp_path.iterdir()) == [path]


# --- sampling ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--prompt", "caf\u2603"], "--prompt has '\u2603'"),
        (["--prompt", ""], "--prompt is empty"),
        (["--tokens", "-1"], "max_new_tokens is -1"),
        (["--temperature", "-1"], "temperature is -1.0"),
        (["--top-k", "0"], "top_k is 0"),
        (["--impl", "cuda"], "invalid choice: 'cuda'"),
        (["--run", "nowhere"], "there is no checkpoint"),
    ],
)
def test_generate_refuses_bad_input(capsys, finished, arguments, said):
    assert said in refused(capsys, "generate", "--run", finished, *arguments)


def test_generate_repeats_itself_from_a_seed(capsys, finished):
    main = importlib.import_module("generate").main

    def sampled(*arguments: str) -> str:
        common = ["--run", str(finished), "--device", "cpu", "--impl", "torch", "--tokens", "30"]
        assert main([*common, *arguments]) == 0
        return capsys.readouterr().out

    assert sampled("--seed", "1") == sampled("--seed", "1") != sampled("--seed", "2")
    greedy = sampled("--temperature", "0")
    assert greedy == sampled("--top-k", "1", "--seed", "5")


# --- the text ------------------------------------------------------------------------------------


def test_unseen_characters_are_counted_and_paid_for(tmp_path):
    text_data = importlib.import_module("text_data")
    path = tmp_path / "text.txt"
    path.write_text("ab" * 450 + "a\u2603" * 50, encoding="utf-8")
    corpus = text_data.Corpus.load(str(path), "char", 8)
    assert corpus.vocabulary.symbols == (97, 98)
    assert corpus.unseen == 50
    assert corpus.validation_bytes == 49 + 3 * 50
    nats, bits = corpus.validation_loss(1.0)
    assert nats == pytest.approx(1.0 + 50 / 99 * math.log(0x110000 - 0x800 - 2))
    assert bits == pytest.approx(nats * 99 / math.log(2) / (49 + 150))
    assert corpus.vocabulary.decode(corpus.validation[:4]) == "a\ufffda\ufffd"


def test_bytes_need_no_vocabulary(tmp_path):
    text_data = importlib.import_module("text_data")
    path = tmp_path / "text.txt"
    path.write_bytes(bytes(range(256)) * 4)
    corpus = text_data.Corpus.load(str(path), "byte", 8)
    assert corpus.vocabulary.size == 256
    assert torch.cat((corpus.train, corpus.validation)).tolist() == list(range(256)) * 4
    assert corpus.unseen == 0
    nats, bits = corpus.bigram_loss()
    assert bits == pytest.approx(nats / math.log(2))


def test_validation_predicts_each_id_once(text):
    train_gpt = importlib.import_module("train_gpt")
    corpus = train_gpt.Corpus.load(str(text), "char", 50)
    settings = train_gpt.Settings(context=50, device="cpu", dtype="float32")
    seen = torch.zeros(corpus.vocabulary.size, dtype=torch.int64)

    def model(x, y, return_logits):
        assert not return_logits
        kept = y[y != -100]
        seen.add_(torch.bincount(kept, minlength=len(seen)))
        return None, (kept % 7).float().mean()

    nats, _ = train_gpt.validate(model, corpus, settings)
    want = corpus.validation[1:]
    assert torch.equal(seen, torch.bincount(want, minlength=len(seen)))
    mean = (want % 7).float().mean().item()
    assert nats == pytest.approx(corpus.validation_loss(mean)[0], rel=1e-5)
