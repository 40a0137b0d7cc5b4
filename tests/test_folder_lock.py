"""One process at a time writes to a folder: runs and preparations that meet in one."""

from __future__ import annotations

# ruff: noqa: F401, F811  (fixtures are imported)
import contextlib
import errno
import importlib
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch.distributed as dist
import torchrun
from example_scripts import (
    BEST,
    CHECKPOINT,
    EXAMPLES,
    LOG,
    PLOT,
    PREPARED,
    SETTINGS,
    TINY,
    books,
    called,
    environment,
    examples_path,
    fingerprint,
    refused,
    rows,
    start,
    text,
    tiny,
    tokens,
)

LOCK = ".lock"
FILES = {BEST, CHECKPOINT, LOG, PLOT, SETTINGS}
SMALL = [*TINY, "--n-layers", "1", "--d-model", "16", "--n-heads", "2"]
ENDLESS = [*SMALL, "--steps", "1000000", "--save-every", "5", "--validate-every", "1000000"]

# Claims the folder that a line [out, resume] asks for, until the next line.
CLAIMS = """
import json, sys
import run_folder
for line in sys.stdin:
    try:
        with run_folder.claimed(*json.loads(line)) as folder:
            print(folder, flush=True)
            sys.stdin.readline()
    except run_folder.OptionError as error:
        print(error, flush=True)
        sys.stdin.readline()
    print("free", flush=True)
"""

# Holds the lock, and so long has a child that another program is not run in.
FORKS = """
import os, sys, time
from pathlib import Path
from folder_lock import locked
with locked(Path(sys.argv[1]), ""):
    if child := os.fork():
        print(child, flush=True)
    time.sleep(100)
"""


def folder_lock():
    return importlib.import_module("folder_lock")


def python(code: str, *arguments: object, cwd: Path) -> subprocess.Popen:
    path = {"PYTHONPATH": os.pathsep.join([str(EXAMPLES), environment()["PYTHONPATH"]])}
    return subprocess.Popen(
        [sys.executable, "-c", code, *map(str, arguments)],
        cwd=cwd,
        env=environment(**path),
        text=True,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    )


@contextlib.contextmanager
def ended(*processes: subprocess.Popen) -> Iterator[None]:
    try:
        yield
    finally:
        for process in processes:
            process.kill()
            process.communicate()


def tell(process: subprocess.Popen, what: object) -> None:
    process.stdin.write(json.dumps(what) + "\n")
    process.stdin.flush()


def until(ready: Callable[[], bool], process: subprocess.Popen) -> None:
    end = time.monotonic() + 120
    while not ready():
        assert process.poll() is None, process.communicate()
        assert time.monotonic() < end
        time.sleep(0.01)


def steps(folder: Path) -> int:
    return (folder / LOG).read_text().count("\n") if (folder / LOG).exists() else 0


# --- who has the folder ---------------------------------------------------------------------------


def test_of_two_that_choose_at_once_each_has_its_own_folder_or_one_is_refused(tmp_path):
    """Ten times without --out, ten times with it; no file is left of those that wrote nothing."""
    pair = [python(CLAIMS, cwd=tmp_path) for _ in range(2)]
    with ended(*pair):
        for n in range(20):
            out = None if n % 2 else "deep/run"
            for process in pair:
                tell(process, [out, None])
            said = sorted(process.stdout.readline().strip() for process in pair)
            if out is None:
                assert said == ["runs/gpt-1", "runs/gpt-2"]
            else:
                assert said[0].startswith("another process is writing to 'deep/run'; a folder")
                assert said[1] == out
            for process in pair:
                tell(process, "end")
                assert process.stdout.readline() == "free\n"
            # Of two that make deep/run at once the one that is refused may have been first.
            assert [p for p in tmp_path.glob("*/*") if p.name != "run"] == []
            assert [p for p in tmp_path.rglob("*") if not p.is_dir()] == []
            shutil.rmtree(tmp_path / "deep", ignore_errors=True)


def test_a_folder_that_was_there_stays(tmp_path):
    (tmp_path / "mine").mkdir()
    with folder_lock().locked(tmp_path / "mine", ""):
        assert [p.name for p in (tmp_path / "mine").iterdir()] == [LOCK]
    assert list((tmp_path / "mine").iterdir()) == []
    with pytest.raises(FileExistsError), folder_lock().locked(tmp_path / "mine", "", new=True):
        pass
    assert (tmp_path / "mine").is_dir()


@pytest.mark.skipif(not hasattr(os, "fork"), reason="there is no fork")
def test_a_child_does_not_keep_the_lock_of_a_process_that_was_killed(tmp_path):
    folder = tmp_path / "run"
    process = python(FORKS, folder, cwd=tmp_path)
    with ended(process):
        child = int(process.stdout.readline())
        with pytest.raises(folder_lock().OptionError), folder_lock().locked(folder, ""):
            pass
        process.kill()
        process.wait()
        try:
            os.kill(child, 0)  # it is there
            assert (folder / LOCK).exists()
            with folder_lock().locked(folder, ""):
                pass
            assert not (folder / LOCK).exists()
        finally:
            os.kill(child, signal.SIGKILL)


def test_a_lock_on_a_file_that_its_holder_has_removed_is_none(tmp_path, monkeypatch):
    lock, seen = folder_lock()._lock, []

    def late(descriptor: int, folder: Path) -> bool:
        """As where another process ends between the opening and the locking."""
        if not seen:
            (folder / LOCK).unlink()
        seen.append(descriptor)
        return lock(descriptor, folder)

    monkeypatch.setattr(folder_lock(), "_lock", late)
    with folder_lock().locked(tmp_path, ""):
        assert len(seen) == 2
        assert os.path.samestat(os.fstat(seen[1]), os.stat(tmp_path / LOCK))


def test_without_locks_there_is_a_note(tmp_path, monkeypatch, capsys):
    def none(*_: object) -> None:
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(folder_lock().fcntl, "lockf", none)
    with folder_lock().locked(tmp_path, ""):
        pass
    assert f"note: the file system of {tmp_path} has no locks (No locks" in capsys.readouterr().out


def test_without_fcntl_a_folder_is_made_and_removed(tmp_path):
    code = (
        "import sys; sys.modules['fcntl'] = None\n"
        "from pathlib import Path\nfrom folder_lock import locked\n"
        "with locked(Path('a/run'), '', new=True): print(*Path('a/run').iterdir())"
    )
    out, _ = python(code, cwd=tmp_path).communicate()
    assert out == f"a/run/{LOCK}\n"
    assert list(tmp_path.iterdir()) == []


def test_a_folder_that_cannot_be_made_is_named(tmp_path, monkeypatch, capsys, text):
    """And no number is looked for without end."""
    monkeypatch.chdir(tmp_path)
    Path("runs").symlink_to("nowhere")
    said = refused(capsys, "train_gpt", "--data", text, *TINY, code=1)
    assert "runs/gpt-1 could not be written (File exists)" in said
    assert "run the same command again" in said


# Sends itself the signal where a script has its folder and has written nothing yet.
SIGNALLED = """
import importlib, signal, sys
import start
name, holder, attribute, number, *sys.argv[1:] = sys.argv[1:]
script = importlib.import_module(name)
place = getattr(script, holder) if holder else script
setattr(place, attribute, lambda *_: signal.raise_signal(int(number)))
start.run(script.main)
"""


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
@pytest.mark.parametrize("script", ["train_gpt", "prepare_data"])
def test_a_signal_before_anything_is_written_leaves_nothing(tmp_path, script, number, text, books):
    if script == "train_gpt":
        told = "Corpus", "load", int(number), "--data", text, *TINY, "--out", "deep/run"
    else:
        told = "", "write", int(number), books, *PREPARED, "--out", "deep/run"
    process = python(SIGNALLED, script, *told, cwd=tmp_path)
    process.communicate(timeout=120)
    assert process.returncode == 128 + number
    assert list(tmp_path.iterdir()) == []


# --- runs -----------------------------------------------------------------------------------------


@pytest.mark.slow
def test_two_runs_that_begin_at_once_have_a_folder_each(tmp_path, text):
    runs = [
        start("train_gpt.py", "--data", text, *SMALL, "--seed", seed, cwd=tmp_path) for seed in (1, 2)
    ]
    for run in runs:
        out, err = run.communicate(timeout=300)
        assert run.returncode == 0, out + err
        assert LOCK not in out
    folders = sorted((tmp_path / "runs").iterdir())
    assert [folder.name for folder in folders] == ["gpt-1", "gpt-2"]
    seeds = {json.loads((folder / SETTINGS).read_text())["seed"] for folder in folders}
    assert seeds == {1, 2}
    for folder in folders:
        assert {p.name for p in folder.iterdir()} == FILES
        assert [row["step"] for row in rows(folder)] == list(range(1, 25))


def test_a_run_that_goes_on_is_read_but_not_resumed_until_it_is_killed(
    tmp_path, monkeypatch, capsys, text
):
    monkeypatch.chdir(tmp_path)
    folder = Path("runs/gpt-1")
    run = start("train_gpt.py", "--data", text, *ENDLESS, cwd=tmp_path)
    with ended(run):
        until(lambda: steps(folder) > 6, run)
        where = ["--out", folder]
        for how in (["--resume"], ["--resume", "auto"], ["--resume", *where], where):
            said = refused(capsys, "train_gpt", *how)
            assert said.startswith("train_gpt.py: another process is writing to 'runs/gpt-1'; a folder")
        called("generate", "--run", folder, "--tokens", "3", "--device", "cpu")
        options = ["--data", text, "--steps", "1", "--device", "cpu", "--out", "other"]
        called("train_gpt", "--init-from", folder, *options)
        assert len(rows(Path("other"))) == 1
        assert run.poll() is None
        assert steps(folder) > 6
    assert run.returncode == -signal.SIGKILL
    assert (folder / LOCK).exists()
    called("train_gpt", "--resume", "--minutes", "1e-6", "--out", folder)
    assert {p.name for p in folder.iterdir()} - {BEST} == FILES - {BEST}
    assert [row["step"] for row in rows(folder)] == list(range(1, len(rows(folder)) + 1))


@pytest.mark.slow
def test_a_run_that_was_killed_before_it_wrote_leaves_nothing_that_hurts(
    tmp_path, monkeypatch, capsys, text, tiny
):
    monkeypatch.chdir(tmp_path)
    process = python(CLAIMS, cwd=tmp_path)
    with ended(process):
        tell(process, [None, None])
        assert process.stdout.readline() == "runs/gpt-1\n"
    assert [p.name for p in Path("runs/gpt-1").iterdir()] == [LOCK]
    assert "there is no run under runs/" in refused(capsys, "train_gpt", "--resume")
    assert "there is no run under runs/" in refused(capsys, "generate")
    said = refused(capsys, "train_gpt", "--resume", "--out", "runs/gpt-1")
    assert "no run has begun in that folder" in said
    called("train_gpt", "--data", text, *TINY)
    assert rows(Path("runs/gpt-2")) == rows(tiny)
    called("train_gpt", "--data", text, *TINY, "--out", "runs/gpt-1")
    assert {p.name for p in Path("runs/gpt-1").iterdir()} == FILES


@pytest.mark.slow
@pytest.mark.skipif(not dist.is_available(), reason="torch is built without it")
@pytest.mark.skipif(sys.platform != "linux", reason="finds the processes of torchrun in /proc")
def test_processes_of_torchrun_have_one_lock_and_one_refusal(tmp_path, capsys, text):
    folder = tmp_path / "run"
    options = ["--data", text, *torchrun.ROWS, "--steps", "1000000"]
    run = torchrun.start(2, *options, "--out", folder, cwd=tmp_path)
    with ended(run):
        until((folder / "latest").exists, run)
        assert "another process is writing" in refused(capsys, "train_gpt", "--resume", "--out", folder)
        second = torchrun.start(2, "--resume", "--out", folder, cwd=tmp_path)
        _, err = second.communicate(timeout=torchrun.MINUTE)
        assert second.returncode == 1
        said = [line for line in err.splitlines() if line.startswith("train_gpt.py: ")]
        assert 1 <= len(said) <= 2, err  # torchrun ends a process that has not said it yet
        for line in said:
            assert line.split(": ", 2)[2].startswith(f"another process is writing to {str(folder)!r};")
        assert "another process is writing" in torchrun.last_lines(err)
        assert "gloo" not in err  # no lost connection
        assert run.poll() is None
        os.kill(torchrun.ranks(run)[0], signal.SIGKILL)
        run.communicate(timeout=torchrun.MINUTE)
    called("train_gpt", "--resume", "--minutes", "1e-6", "--out", folder)


# --- preparations ---------------------------------------------------------------------------------


def test_two_preparations_in_one_folder(tmp_path, capsys, books, tokens):
    out = tmp_path / "out"
    process = python(CLAIMS, cwd=tmp_path)
    with ended(process):
        tell(process, [str(out), None])
        assert process.stdout.readline() == f"{out}\n"
        said = refused(capsys, "prepare_data", books, "--out", out, *PREPARED)
        assert said.startswith(f"prepare_data.py: another process is writing to {str(out)!r};")
    assert [p.name for p in out.iterdir()] == [LOCK]
    called("prepare_data", books, "--out", out, *PREPARED)
    assert {p.name: p.read_bytes() for p in out.iterdir()} == {
        p.name: p.read_bytes() for p in tokens.iterdir()
    }
