"""The folder of a training run: where it is, and what it holds beside the checkpoint.

settings.json is written first, then the checkpoint of step 0, then log.jsonl.  A folder without a
checkpoint thus holds nothing that training made, and the run can begin in it again.
"""

from __future__ import annotations

import contextlib
import dataclasses
import io
import json
import math
import os
import statistics
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path

from checkpoint import FOLDERS, LATEST, NAME, write_atomically
from errors import AGAIN, CheckpointError, OptionError, WriteError
from folder_lock import LOCK, locked, refuse_taken
from settings import Settings

SETTINGS, LOG, PLOT = "settings.json", "log.jsonl", "loss.png"
SMOOTHED = 50  # steps whose mean loss the bar shows, and the picture


@contextlib.contextmanager
def claimed(out: str | None, resume: bool | str | None) -> Iterator[Path]:
    """The folder to train in, which is made if need be; no other process trains in it meanwhile.

    out: --out.  resume: None for a new run, True to go on with one, "auto" for either.
    """
    if out is not None:
        refuse_taken(Path(out))
    found = find(out, resume)
    folder, writes = found or numbered(), found is None or may_begin(found)
    with contextlib.ExitStack() as held:
        while True:
            try:
                held.enter_context(locked(folder, AGAIN, new=found is None, writes=writes))
                break
            except FileExistsError:  # another run has just taken the number
                folder = numbered()
        find(str(folder), resume)  # a run may have begun and ended in it before it was locked
        yield folder


def numbered() -> Path:
    """runs/gpt-N with the next free N."""
    taken = [p.name.removeprefix("gpt-") for p in Path("runs").glob("gpt-*")]
    return Path("runs") / f"gpt-{max([0, *(int(n) for n in taken if n.isdigit())]) + 1}"


def new_folder(out: str) -> Path:
    """`out`; OptionError where something would be lost in it."""
    folder = Path(out)
    if not may_begin(folder):
        raise OptionError(
            f"--out is {out!r}, which is there and not an empty folder; it takes a new or an empty "
            "one. Add --resume to go on with the run in it, or name another."
        )
    return folder


def newest_folder(*files: str) -> Path | None:
    """The run under runs/ of whose `files` one was written last; None where there is none."""
    found = [path for name in files for path in Path("runs").glob(f"gpt-*/{name}")]
    return max(found, key=lambda path: path.stat().st_mtime).parent if found else None


def no_run(option: str) -> OptionError:
    return OptionError(
        f"{option} is not given, and there is no run under runs/ here; it takes the folder of "
        f"one. Pass {option} FOLDER, or train first."
    )


def find(out: str | None, resume: bool | str | None) -> Path | None:
    """The folder that the options name, see `claimed`; None for a new one under runs/."""
    if resume is None:
        return None if out is None else new_folder(out)
    folder = Path(out) if out else newest_folder(NAME, LATEST, SETTINGS)
    if resume == "auto" and folder is None:
        return None
    if folder is None:
        raise no_run("--out")
    if resume != "auto" and may_begin(folder) and begun(folder) is None:
        raise CheckpointError(
            f"there is no checkpoint {str(folder / NAME)!r}, and no run has begun in that folder. Name "
            "another, or begin one: the same command without --resume."
        )
    return folder


def may_begin(folder: Path) -> bool:
    """Whether the folder is new or empty, or a run ended in it before its first checkpoint."""
    if not folder.exists():
        return True
    if not folder.is_dir():
        return False
    partial = {f"{name}.partial" for name in (SETTINGS, NAME, LATEST, LOG)}
    ours = {LOCK, SETTINGS, *FOLDERS} | partial
    return all(p.name in ours or (p.name == LOG and not p.stat().st_size) for p in folder.iterdir())


def begin(folder: Path, settings: Settings) -> None:
    """Note in the folder what the run is."""
    content = json.dumps(dataclasses.asdict(settings), indent=1) + "\n"
    write_atomically(folder / SETTINGS, content.encode())


def begun(folder: Path) -> Settings | None:
    """The settings of a run that ended before its first checkpoint; None where there is none."""
    path = folder / SETTINGS
    if not path.is_file() or not may_begin(folder):
        return None
    try:
        saved = json.loads(path.read_bytes())
    except (OSError, ValueError) as error:
        raise CheckpointError(
            f"the settings {str(path)!r} cannot be read ({error}). "
            "Start the run again with its options."
        ) from None
    return Settings.from_json(saved, path)


class Log:
    """log.jsonl: a line for each step, {"step", "loss", "learning_rate", "gradient_norm", "seconds"},
    with "mfu" where the device's peak is known, and with a validation {"validation", "bits_per_byte"}.
    `rows` are those that can be read, in order."""

    def __init__(self, path: Path, step: int, writes: bool = True) -> None:
        """Read the lines up to `step`, that of the checkpoint: later ones will be written again.

        writes: False in a process that keeps rows alone, beside the one that writes the file.
        """
        self.path, self.step, self.writes = path, step, writes
        try:
            lines = path.read_bytes().splitlines() if path.exists() else []
        except OSError as error:
            raise CheckpointError(
                f"{path} cannot be read ({error.strerror}). Make it readable, or move it away."
            ) from None
        rows = {row["step"]: row for row in map(row_of, lines) if row is not None}
        self.rows = [rows[n] for n in sorted(rows) if n <= step]

    def holes(self) -> str | None:
        """The steps up to the checkpoint's that have no line, in words."""
        steps = [0, *(row["step"] for row in self.rows), self.step + 1]
        missing = [(a + 1, b - 1) for a, b in pairwise(steps) if b - a > 1]
        if not missing:
            return None
        named = ", ".join(str(a) if a == b else f"{a} to {b}" for a, b in missing[:5])
        return f"{self.path} has no readable line for step {named}" + ", ..." * (len(missing) > 5)

    def summary(self, steps: int) -> dict[str, str]:
        """The mean loss of the last `steps`, and the last validation, for the bar."""
        found = {"loss": f"{statistics.fmean(row['loss'] for row in self.rows[-steps:]):.3f}"}
        if self.checked is not None:
            found["validation"] = f"{self.checked['validation']:.3f}"
        return found

    def begin(self) -> None:
        """Write the rows again, without what cannot be read or comes behind, and be ready for more."""
        self.checked = next((row for row in reversed(self.rows) if "validation" in row), None)
        if not self.writes:
            return
        content = "".join(json.dumps(row) + "\n" for row in self.rows)
        write_atomically(self.path, content.encode())
        self.file = open(self.path, "a", encoding="utf-8")  # noqa: SIM115

    def write(self, row: dict) -> None:
        self.rows.append(row)
        if "validation" in row:
            self.checked = row
        if not self.writes:
            return
        try:
            self.file.write(json.dumps(row) + "\n")
        except OSError as error:
            raise self._not_written(error) from None

    def flush(self) -> None:
        """Return when the lines are on the disk."""
        if not self.writes:
            return
        try:
            self.file.flush()
            os.fsync(self.file.fileno())
        except OSError as error:
            raise self._not_written(error) from None

    def _not_written(self, error: OSError) -> WriteError:
        with contextlib.suppress(OSError):
            self.file.close()  # which would try again when the process ends
        return WriteError(self.path, error, f"; {NAME} beside it is whole")


def row_of(line: bytes) -> dict | None:
    """A line of the log; None for one that a crash cut off, or that is something else."""
    try:
        row = json.loads(line)
        numbers = [row["loss"], row["learning_rate"]]
        if "validation" in row or "bits_per_byte" in row:
            numbers += [row["validation"], row["bits_per_byte"]]
        integer = type(row["step"]) is int and row["step"] > 0
    except (ValueError, KeyError, TypeError):
        return None
    return row if integer and all(type(x) in (int, float) for x in numbers) else None


def plot(rows: list[dict], bigram: float, path: Path, unit: str, preset: str) -> None:
    """Draw the loss of every step, their mean over SMOOTHED steps, validation and the bigram's,
    in nats per unit; a note where that fails, for a picture is not worth a run."""
    try:
        import matplotlib

        matplotlib.use("Agg")
        from matplotlib import pyplot as plt

        losses = {row["step"]: row["loss"] for row in rows}
        steps = range(min(losses, default=1), max(losses, default=0) + 1)
        figure, axes = plt.subplots(figsize=(8, 5), layout="constrained")
        each = [losses.get(n, math.nan) for n in steps]
        sides = [min(i, len(each) - 1 - i, SMOOTHED // 2) for i in range(len(each))]
        around = [each[i - side : i + side + 1] for i, side in enumerate(sides)]
        means = [statistics.fmean([x for x in part if x == x] or [math.nan]) for part in around]
        axes.plot(steps, each, lw=0.6, alpha=0.4, color="C0", label="training")
        axes.plot(steps, means, color="C0", label="training, smoothed")
        checked = [r for r in rows if "validation" in r]
        axes.plot(
            *([row[name] for row in checked] for name in ("step", "validation")),
            "o-",
            color="C1",
            label="validation",
        )
        axes.axhline(bigram, ls="--", color="gray", label=f"bigram, {bigram:.2f}")
        axes.set(xlabel="step", ylabel=f"loss in nats per {unit}", title=f"Loss of preset {preset}")
        axes.grid(alpha=0.3)
        axes.legend()
        image = io.BytesIO()
        figure.savefig(image, dpi=120)
        plt.close(figure)
        write_atomically(path, image.getvalue())
    except (ImportError, WriteError) as error:
        print(f"note: {path} is not drawn ({getattr(error, 'why', error)})")
