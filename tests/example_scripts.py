"""Running the scripts of examples/, in a process of their own or in this one."""

from __future__ import annotations

import hashlib
import importlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

import flashproto
from flashproto.backends import get_default, set_default

EXAMPLES = Path(__file__).resolve().parents[1] / "examples"
CHECKPOINT, LOG, SETTINGS, PLOT = "checkpoint.safetensors", "log.jsonl", "settings.json", "loss.png"
BEST = "best.safetensors"
PREPARED = ["--vocab-size", "512", "--validation-share", "0.1", "--shard-tokens", "10000"]
# A second of training on one core.
TINY = [
    "--steps",
    "24",
    "--batch-size",
    "2",
    "--context",
    "16",
    "--save-every",
    "6",
    "--validate-every",
    "8",
    "--validate-tokens",
    "160",
    "--seed",
    "3",
    "--device",
    "cpu",
]


@pytest.fixture(scope="module", autouse=True)
def examples_path() -> Iterator[None]:
    """The scripts can be imported; in this process they run on torch, not on Triton's interpreter."""
    before = get_default()
    set_default("torch")
    sys.path.insert(0, str(EXAMPLES))
    yield
    sys.path.remove(str(EXAMPLES))
    set_default(before)


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The first 30 KB of the language reference: short, so that validation takes no time."""
    from pydoc_data.topics import topics

    path = tmp_path_factory.mktemp("text") / "text.txt"
    path.write_text("".join(topics[name] for name in sorted(topics))[:30000], encoding="utf-8")
    return path


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory, text: Path) -> Path:
    """The folder of a finished run with the options TINY."""
    folder = tmp_path_factory.mktemp("tiny") / "run"
    called("train_gpt", "--data", text, *TINY, "--out", folder)
    return folder


@pytest.fixture(scope="module")
def books(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of 40 documents, in files of one and of several; 100 KB in all."""
    from pydoc_data.topics import topics

    folder = tmp_path_factory.mktemp("books") / "books"
    (folder / "more").mkdir(parents=True)
    texts = [topics[name][:2500] for name in sorted(topics)[:40]]
    for i, text in enumerate(texts[:30]):
        (folder / f"{i:02}.txt").write_text(text, encoding="utf-8")
    several = "\n<|endoftext|>\n".join(texts[30:]) + "\n<|endoftext|>\n"
    (folder / "more" / "several.txt").write_text(several, encoding="utf-8")
    (folder / ".hidden").write_bytes(b"\xff")
    return folder


@pytest.fixture(scope="module")
def tokens(books: Path) -> Path:
    """The books in tokens of a vocabulary of 512, in several files."""
    pytest.importorskip("tokenizers", reason="BPE needs the package tokenizers")
    folder = books.with_name("tokens")
    called("prepare_data", books, "--out", folder, *PREPARED)
    return folder


def environment(**more: str) -> dict[str, str]:
    env = {k: v for k, v in os.environ.items() if k not in ("TRITON_INTERPRET", "FLASHPROTO_IMPL")}
    package = str(Path(flashproto.__file__).resolve().parents[1])
    path = [package, *filter(None, [env.get("PYTHONPATH")])]
    return env | {"OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(path)} | more


def start(script: str, *arguments: object, cwd: Path, **more: str) -> subprocess.Popen:
    return subprocess.Popen(
        [sys.executable, str(EXAMPLES / script), *map(str, arguments)],
        cwd=cwd,
        env=environment(**more),
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )


def run(script: str, *arguments: object, cwd: Path, code: int = 0) -> str:
    """Run to the end; returns stdout."""
    process = start(script, *arguments, cwd=cwd)
    out, err = process.communicate(timeout=600)
    assert process.returncode == code, out + err
    assert "Traceback" not in err
    return out


def send_when(process: subprocess.Popen, ready: Callable[[], bool], number: int) -> tuple[str, str]:
    """Send the signal as soon as it is ready; returns stdout and stderr."""
    end = time.monotonic() + 120
    while not ready():
        assert process.poll() is None, process.communicate()
        assert time.monotonic() < end
        time.sleep(0.005)
    process.send_signal(number)
    return process.communicate(timeout=120)


def called(script: str, *arguments: object, code: int = 0) -> None:
    """main() in this process, whose handlers of signals it leaves as they were."""
    handlers = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        assert importlib.import_module(script).main([str(a) for a in arguments]) == code
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)


def refused(capsys: pytest.CaptureFixture[str], script: str, *arguments: object, code: int = 2) -> str:
    """main() with bad input: its exit code and one line on stderr, which is returned."""
    main = importlib.import_module(script).main
    capsys.readouterr()
    try:
        got = main([str(a) for a in arguments])
    except SystemExit as leaving:
        got = leaving.code
    err = capsys.readouterr().err
    assert got == code, err
    assert err.count("\n") == 1, err
    return err


def rows(folder: Path) -> list[dict]:
    """Lines of the log, without what another run of the same steps has otherwise."""
    lines = [json.loads(line) for line in (folder / LOG).read_text().splitlines()]
    return [{name: x for name, x in line.items() if name not in ("seconds", "mfu")} for line in lines]


def content(path: Path) -> bytes:
    """Weights, optimizer and generator of a checkpoint, without its header, which names the machine."""
    whole = path.read_bytes()
    return whole[8 + int.from_bytes(whole[:8], "little") :]


def fingerprint(folder: Path) -> dict[str, str]:
    files = (p for p in folder.rglob("*") if p.is_file())
    return {str(p): hashlib.sha256(p.read_bytes()).hexdigest() for p in files}
