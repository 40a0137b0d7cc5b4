"""The folder of a training run: where it is, and what it holds beside the checkpoint."""

from __future__ import annotations

import json
import os
from pathlib import Path

from checkpoint import NAME, write_atomically
from settings import OptionError


def new_folder(out: str | None) -> Path:
    """`out`, or runs/gpt-N with the next free N; OptionError where there is something already."""
    if out is None:
        taken = [p.name.removeprefix("gpt-") for p in Path("runs").glob("gpt-*")]
        return Path("runs") / f"gpt-{max([0, *(int(n) for n in taken if n.isdigit())]) + 1}"
    folder = Path(out)
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise OptionError(
            f"--out is {out!r}, which is there and not an empty folder; it takes a new or an empty "
            "one. Add --resume to go on with the run in it, or name another."
        )
    return folder


def newest_folder(option: str) -> Path:
    """The run under runs/ whose checkpoint was written last; OptionError, naming the option to use,
    where there is none."""
    found = sorted(Path("runs").glob(f"gpt-*/{NAME}"), key=lambda p: p.stat().st_mtime)
    if not found:
        raise OptionError(
            f"{option} is not given, and there is no run under runs/ here; it takes the folder of "
            f"one. Pass {option} FOLDER, or train first."
        )
    return found[-1].parent


class Log:
    """log.jsonl: a line for each step, {"step", "loss", "learning_rate"}, and with a validation
    {"validation", "bits_per_byte"}."""

    def __init__(self, path: Path, step: int) -> None:
        """Keep the lines up to `step`, that of the checkpoint: later ones will be written again."""
        self.rows: list[dict] = []
        for line in path.read_text().splitlines() if path.exists() else []:
            try:
                row = json.loads(line)
                if row["step"] <= step:
                    self.rows.append(row)
            except (json.JSONDecodeError, KeyError, TypeError):
                break  # a crash cut it off
        write_atomically(path, "".join(json.dumps(row) + "\n" for row in self.rows).encode())
        self.file = open(path, "a")  # noqa: SIM115

    def write(self, row: dict) -> None:
        self.rows.append(row)
        self.file.write(json.dumps(row) + "\n")

    def flush(self) -> None:
        """Return when the lines are on the disk."""
        self.file.flush()
        os.fsync(self.file.fileno())


def plot(rows: list[dict], bigram: float, path: Path) -> None:
    """Draw the loss of every step, the validation loss and the bigram's, in nats per token."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    figure, axes = plt.subplots(figsize=(8, 5), layout="constrained")
    axes.plot([r["step"] for r in rows], [r["loss"] for r in rows], lw=0.8, label="training")
    checked = [r for r in rows if "validation" in r]
    losses = [r["validation"] for r in checked]
    axes.plot([r["step"] for r in checked], losses, "o-", label="validation")
    axes.axhline(bigram, ls="--", color="gray", label=f"bigram, {bigram:.2f}")
    axes.set(xlabel="step", ylabel="loss in nats per token")
    axes.legend()
    figure.savefig(path, dpi=120)
    plt.close(figure)
