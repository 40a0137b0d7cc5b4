"""What the documentation says by itself: docs/speed.md, its pictures and README's table from the result
files in docs/results, and docs/api.md from the docstrings.

    python -m flashproto.bench docs             # write them all, in a checkout
    python -m flashproto.bench docs --check     # write nothing; exit code 1 where a text is stale

A result file is what a run of a benchmark writes: --out docs/results/NAME, a folder for each machine.
Every ratio compares contenders of one run.
"""

from __future__ import annotations

import argparse
import datetime
import json
import re
import statistics
import sys
from collections.abc import Iterator, Sequence
from importlib import import_module
from pathlib import Path
from typing import Any, NamedTuple

from . import api, plots, report
from .measure import OURS
from .plots import title

ROOT = Path(__file__).resolve().parents[2]
BEGIN = "<!-- speed table: python -m flashproto.bench docs -->"
END = "<!-- end of speed table -->"

SECTIONS = {
    "attention": "Attention",
    "views": "Attention inside a block",
    "norm": "LayerNorm and RMSNorm",
    "add_norm": "A residual added in the norm",
    "softmax": "Softmax",
    "softmax_topk": "Softmax and the largest of it",
    "cross_entropy": "Cross entropy",
    "linear_cross_entropy": "Linear layer and cross entropy",
    "glu": "Gated linear units, GELU, RoPE, QK norm",
    "block": "A Transformer block",
    "gpt": "Training GPT-2",
    "oneflow": "OneFlow's tables",
    "online_softmax": "The online-softmax paper's benchmark",
    "rms_norm_article": "An article's RMSNorm",
}
WITH_MEMORY = ("linear_cross_entropy", "block", "gpt")
PACKAGES = {  # of contenders, as a run's environment names them
    "fa4": "flash_attn.cute",
    "quack": "quack",
    "liger": "liger_kernel",
    "cut-cross-entropy": "cut_cross_entropy",
}


class Row(NamedTuple):
    """A row of README's table: all cells of a subject whose names match, and one of them in figures."""

    title: str
    subject: str
    cells: str
    example: str


ROWS = (
    Row("attention, head_dim 64 to 256", "attention", "", "D128 S8192 causal"),
    Row("attention inside a block", "views", "", "views d2048 T4096 B4"),
    Row("`rms_norm`", "norm", "^RMSNorm", "RMSNorm 49152x4096"),
    Row("`layer_norm`", "norm", "^LayerNorm", "LayerNorm 49152x4096"),
    Row("`softmax`", "softmax", "", "softmax 49152x4096"),
    Row("`cross_entropy`", "cross_entropy", "", "cross_entropy 8192x128256"),
    Row("`linear_cross_entropy`", "linear_cross_entropy", "", "linear_cross_entropy 16384x4096x128256"),
    Row("`swiglu`, `geglu`, `gelu`", "glu", "glu |gelu ", "swiglu 16384x5632"),
    Row("`rope`, `qk_norm`", "glu", "^rope|^qk_norm", "rope B4 S4096 H16/16 D128"),
    Row("Transformer block, d_model 2048", "block", "", "block d2048 T4096 B4"),
    Row("GPT-2 124M and 350M, loss and gradients", "gpt", "", "gpt2-124m T1024 B16"),
)

Results = dict[str, dict[str, Any]]  # by subject


def load(folder: Path) -> Results:
    """The result files of one machine."""
    return {path.stem: json.loads(path.read_text()) for path in sorted(folder.glob("*.json"))}


def machines(root: Path) -> list[Results]:
    """The results of each machine, that with the most cells first."""
    folders = [path for path in sorted((root / "docs" / "results").iterdir()) if path.is_dir()]
    found = [results for results in map(load, folders) if results]
    return sorted(found, key=lambda results: -sum(len(d.get("cells", {})) for d in results.values()))


# --- what a run was of ---------------------------------------------------------------------------


def card(run: dict[str, Any]) -> str:
    machine = run["environment"]
    return machine["gpus"][0]["name"] if machine["gpus"] else machine["machine"]["cpu"]


def software(run: dict[str, Any]) -> str:
    versions = run["environment"]["versions"]
    cuda = f", CUDA {versions['cuda']}, driver {versions['driver']}" if versions.get("cuda") else ""
    return f"torch {versions['torch']}, triton {versions['triton']}{cuda}"


def peers(run: dict[str, Any], names: Sequence[str]) -> str:
    """The packages that the contenders are of, with their versions."""
    found = run["environment"]["peers"]
    versions = {name: found.get(PACKAGES[name]) for name in names if name in PACKAGES}
    return ", ".join(f"{title(name)} {version}" for name, version in versions.items() if version)


def day(run: dict[str, Any]) -> str:
    return run["date"][:10]


def month(results: Results) -> str:
    last = max(run["date"] for data in results.values() for run in data["runs"])
    return datetime.datetime.fromisoformat(last).strftime("%B %Y")


def provenance(runs: list[dict[str, Any]], names: Sequence[str] = ()) -> str:
    """One line: when, on what, with what."""
    run = runs[-1]
    days = " and ".join(dict.fromkeys(map(day, runs)))
    parts = [f"Measured {days} on one {card(run)}", software(run), peers(run, names)]
    text = "; ".join(part for part in parts if part)
    ceilings = run["ceilings"]
    if ceilings:
        which = "the last of these runs" if len(runs) > 1 else "the same run"
        text += f". In {which} a copy reached {ceilings['copy_gb_s']:.0f} GB/s and a matmul of "
        text += f"{ceilings['matmul']} {ceilings['matmul_tflop_s']:.0f} TFLOP/s"
    return text + "."


# --- tables --------------------------------------------------------------------------------------


def markdown(rows: list[list[str]]) -> str:
    head, *rest = ["| " + " | ".join(row) + " |" for row in rows]
    return "\n".join([head, "|" + "---|" * len(rows[0]), *rest])


def best_peer(results: dict[str, Any]) -> str:
    timed = {n: r for n, r in results.items() if "ms" in r and not n.startswith(OURS)}
    return report.fastest(timed)


def cells_table(cells: report.Cells) -> str:
    """A row for each cell, a column for each contender and the ratio to the fastest peer; the passes
    are joined by slashes."""
    passes, names = report.passes(cells), report.contenders(cells)
    rows = [["", *map(title, names), "times the fastest peer"]]
    for key, cell in cells.items():
        row = [key]
        for name in names:
            entries = [report.entry(cell["passes"].get(w, {}).get(name), cell["unit"]) for w in passes]
            nowhere = not any(char.isdigit() for char in "".join(entries))
            row.append(entries[0] if nowhere and len(set(entries)) == 1 else " / ".join(entries))
        ratios = [report.ratio(cell["passes"].get(which, {})) for which in passes]
        rows.append([*row, " / ".join("-" if r is None else f"{r:.3f}" for r in ratios)])
    return markdown(rows)


def ratios(cells: report.Cells, which: str) -> dict[str, float]:
    found = {key: report.ratio(cell["passes"].get(which, {})) for key, cell in cells.items()}
    return {key: value for key, value in found.items() if value is not None}


def summary(cells: report.Cells) -> Iterator[str]:
    """For each pass the ratio to the fastest peer over all cells, and where a peer is faster."""
    for which in report.passes(cells):
        found = ratios(cells, which)
        if not found:
            continue
        text = f"- {which}: {statistics.geometric_mean(found.values()):.3f} times the fastest peer"
        if len(found) > 1:
            text += f" in geometric mean ({min(found.values()):.3f} to {max(found.values()):.3f})"
        slower = {key: value for key, value in found.items() if value < 1}
        if slower:
            text += f"; a peer is faster in {len(slower)} of {len(found)} cells: " + ", ".join(
                f"{key} ({title(best_peer(cells[key]['passes'][which]))}, {value:.3f})"
                for key, value in slower.items()
            )
        yield text


def memory_table(cells: report.Cells) -> str:
    """The peak of memory of the last pass, GiB."""
    which = report.passes(cells)[-1]
    by_cell = {key: cell["passes"][which] for key, cell in cells.items()}
    names = [n for n, r in next(iter(by_cell.values())).items() if "peak_gib" in r]
    names.sort(key=lambda name: not name.startswith(OURS))
    rows = [[f"{which}, GiB", *map(title, names)]]
    for key, results in by_cell.items():
        peaks = [results.get(name, {}).get("peak_gib") for name in names]
        rows.append([key, *("-" if peak is None else f"{peak:.2f}" for peak in peaks)])
    return markdown(rows)


# --- docs/speed.md -------------------------------------------------------------------------------

HEAD = """# Speed

Written by `python -m flashproto.bench docs` from the files in [docs/results](results), which hold
every figure, its spread, the machine, the versions and the commit. `python -m flashproto.bench SUBJECT`
measures again on your machine; the heading of each section ends with its SUBJECT.

How it is measured: every contender's result is checked against a float32 reference first, and a wrong
one gets no time. Contenders take turns on one machine in one process; a figure is the median of repeats
that are medians themselves. On a GPU device time counts, with the L2 cache flushed before each call,
except where a section says otherwise. Forward is timed with gradients wanted, as in training. Tensors
are bfloat16 where nothing else is said.

How to read it: figures of one table compare, those of different runs do not, since machines and clocks
differ. "Times the fastest peer" is the fastest peer's time over that of the fastest flashproto; below 1
the peer is faster. `flashproto[hopper]` is the backend of that name, which attention takes on an H100
or H200 if none is named; `flashproto[triton]` is the portable one. \\* marks a single repeat, of a
contender far behind. "error": the peer does not run that shape; the file has its message.
"""


def prose(module: Any) -> str:
    """A module's docstring as Markdown."""
    return re.sub(r"(?m)^ +", "", module.__doc__).strip().replace("*", "\\*")


def section(subject: str, data: dict[str, Any]) -> Iterator[str]:
    cells = data["cells"]
    unit = next(iter(cells.values()))["unit"]
    less = "less" if unit == "ms" else "more"
    yield f"## {SECTIONS.get(subject, subject)}: `{subject}`"
    yield prose(import_module(f".{subject}", __package__))
    yield provenance(data["runs"], report.contenders(cells))
    yield f"{unit}, {' / '.join(report.passes(cells))}; {less} is better."
    yield cells_table(cells)
    yield "\n".join(summary(cells))
    if subject in WITH_MEMORY:
        yield "Memory at the peak of a pass, beyond what was there before it:"
        yield memory_table(cells)


def launch_section(data: dict[str, Any]) -> Iterator[str]:
    """The host's time of a call, beside the same call of torch."""
    yield "## Time on the host: `launch`"
    yield (
        "What a call takes on the host before the kernel starts, on a tiny input, in microseconds: the"
        " median and the lowest of rounds of calls."
    )
    yield provenance(data["runs"])
    for figures in data["launch"]:
        first = figures["first_attention_s"]
        rows = [["call", f"flashproto[{figures['impl']}]", "torch"]]
        pairs = figures["host_us"]
        for name, ours in pairs.items():
            theirs = pairs.get(name.replace("flashproto.", "torch "))
            if name.startswith("flashproto.") and theirs is not None:
                entries = [f"{us:.1f} (lowest {low:.1f})" for us, low in (ours, theirs)]
                rows.append([name.removeprefix("flashproto."), *entries])
        yield markdown(rows)
        yield (
            f"`import flashproto` takes {figures['import_ratio']:.2f} times as long as `import torch`."
            f" The first attention of `{figures['impl']}`, with an empty cache and compiled, takes "
            + ", ".join(f"{seconds:.1f} s {which}" for which, seconds in first.items())
            + "."
        )


def losses_section(data: dict[str, Any]) -> Iterator[str]:
    """Validation losses of the example model by backend."""
    yield "## The same loss on every backend: `examples/compare_losses.py`"
    yield (
        "The toy GPT of `examples/train_gpt.py`, trained from several seeds on each backend: mean and"
        " standard deviation of the validation loss at the end."
    )
    yield provenance(data["runs"])
    rows = [["backend", "seeds", "steps each", "validation loss"]]
    for impl in dict.fromkeys(run["impl"] for run in data["losses"]):
        runs = [run for run in data["losses"] if run["impl"] == impl]
        found = [run["validation"] for run in runs]
        spread = f" ± {statistics.stdev(found):.4f}" if len(found) > 1 else ""
        rows.append(
            [impl, str(len(runs)), str(runs[0]["steps"]), f"{statistics.mean(found):.4f}{spread}"]
        )
    yield markdown(rows)


def speed_page(found: list[Results]) -> str:
    drawn = [(name, picture) for name, picture in PICTURES.items() if picture.taken(found[0])]
    parts = [HEAD.strip(), *(f"![{picture.heading}](pictures/{name}.png)" for name, picture in drawn)]
    for results in found:
        if len(found) > 1:
            parts.append(f"# {card(next(iter(results.values()))['runs'][-1])}")
        known = [subject for subject in SECTIONS if subject in results]
        others = [subject for subject in results if subject not in SECTIONS]
        for subject in [*known, *others]:
            if results[subject].get("cells"):
                parts += section(subject, results[subject])
        if "launch" in results:
            parts += launch_section(results["launch"])
        if "losses" in results:
            parts += losses_section(results["losses"])
    return "\n\n".join(part for part in parts if part) + "\n"


# --- README's table ------------------------------------------------------------------------------


def readme_table(results: Results) -> str:
    """The lines between BEGIN and END."""
    rows = [["", "example", "flashproto", "fastest peer", "forward", "backward"]]
    run = None
    for row in ROWS:
        cells = results.get(row.subject, {}).get("cells", {})
        chosen = {key: cell for key, cell in cells.items() if re.search(row.cells, key)}
        if not chosen:
            continue
        run = run or results[row.subject]["runs"][-1]
        key = row.example if row.example in chosen else next(iter(chosen))
        rows.append([row.title, *example(key, chosen[key]), *columns(chosen)])
    if run is None:
        raise ValueError("docs/results holds nothing for README's table; measure attention or a norm.")
    versions = run["environment"]["versions"]
    text = (
        f"On one {card(run)} (torch {versions['torch'].partition('+')[0]}, triton {versions['triton']},"
        f" {month(results)}): an example, forward / backward; then how many times as fast flashproto is"
        " as the fastest peer of the same run, geometric mean (range) over all shapes. Below 1 the peer"
        " is faster; f+b is forward and backward together. Shapes: rows x columns, or D head_dim, S or"
        " T tokens, B sequences, H heads."
    )
    return f"\n{text}\n\n{markdown(rows)}\n"


def example(key: str, cell: dict[str, Any]) -> list[str]:
    """The cell's name, our figures of it, and those of each pass's fastest peer."""
    ours, theirs = [], []
    names: list[str] = []
    for results in cell["passes"].values():
        timed = {n: r for n, r in results.items() if "ms" in r}
        own = report.fastest({n: r for n, r in timed.items() if n.startswith(OURS)})
        best = best_peer(results)
        ours.append(report.entry(timed[own], cell["unit"]).rstrip("*"))
        theirs.append(report.entry(timed[best], cell["unit"]).rstrip("*"))
        names.append(title(best))
    shape = re.sub(r"^[A-Za-z_]+ ", "", key)
    named = ", ".join(dict.fromkeys(names))
    return [f"{shape}, {cell['unit']}", " / ".join(ours), f"{' / '.join(theirs)} ({named})"]


def columns(cells: report.Cells) -> list[str]:
    """The ratios to the fastest peer: forward, and what else was timed."""
    texts = []
    for which in report.passes(cells):
        found = list(ratios(cells, which).values())
        text = f"{statistics.geometric_mean(found):.2f}"
        text += f" ({min(found):.2f}-{max(found):.2f})" if len(found) > 1 else ""
        texts.append(text + (" f+b" if "+" in which else ""))
    return [*texts, "-"][:2]


def filled(readme: str, table: str) -> str | None:
    """README with the table in its block; None where there is no block."""
    before, begin, rest = readme.partition(BEGIN)
    _, end, after = rest.partition(END)
    return f"{before}{begin}\n{table}\n{end}{after}" if begin and end else None


# --- pictures ------------------------------------------------------------------------------------


class Picture(NamedTuple):
    """Some cells of a subject, by what stands below their bars, and the peers beside ours."""

    heading: str
    subject: str
    cells: dict[str, str]
    peers: tuple[str, ...]

    def taken(self, results: Results) -> report.Cells:
        cells = results.get(self.subject, {}).get("cells", {})
        return {key: best_of_ours(cells[key], self.peers) for key in self.cells if key in cells}


PICTURES = {
    "speed": Picture(
        "Causal attention, forward and backward",
        "attention",
        {
            f"D{D} S{S} causal": f"head_dim {D}, {S} tokens"
            for D in (64, 128, 256)
            for S in (4096, 16384)
        },
        ("fa4", "sdpa-cudnn", "flex"),
    ),
    "norm": Picture(
        "Norms of rows x columns, forward and backward",
        "norm",
        {
            f"{kind} {shape}": f"{kind} {shape}"
            for kind in ("RMSNorm", "LayerNorm")
            for shape in ("49152x1024", "49152x4096", "3072x16384", "768x65536")
        },
        ("torch", "compile", "liger", "quack"),
    ),
}


def best_of_ours(cell: dict[str, Any], shown: Sequence[str]) -> dict[str, Any]:
    """The cell with our fastest contender, under the library's name, and the peers that are shown."""
    passes: dict[str, Any] = {}
    for which, results in cell["passes"].items():
        timed = {n: r for n, r in results.items() if "ms" in r}
        own = report.fastest({n: r for n, r in timed.items() if n.startswith(OURS)})
        passes[which] = {OURS: timed[own]} | {n: timed[n] for n in shown if n in timed}
    return cell | {"passes": passes}


def draw(results: Results, folder: Path) -> list[Path]:
    """The pictures for which there are results."""
    written = []
    for name, picture in PICTURES.items():
        cells = picture.taken(results)
        if cells:
            run = results[picture.subject]["runs"][-1]
            heading = f"{picture.heading}, bfloat16, {card(run)} (more is better)"
            path = folder / f"{name}.png"
            plots.plot(cells, heading, path, picture.cells.__getitem__)
            written.append(path)
    return written


# --- the command ---------------------------------------------------------------------------------


def texts(root: Path) -> dict[Path, str | None]:
    """Each file that is written, with its text; README's is None where it has no block."""
    found = machines(root)
    readme = root / "README.md"
    return {
        root / "docs" / "speed.md": speed_page(found),
        root / "docs" / "api.md": api.page(),
        readme: filled(readme.read_text(), readme_table(found[0])),
    }


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        prog="python -m flashproto.bench docs",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--check", action="store_true", help="write nothing; say what is stale")
    options = parser.parse_args(arguments)
    if not (ROOT / "docs" / "results").is_dir():
        sys.exit("flashproto.bench docs: there is no docs/results here; run it in a checkout.")
    stale = []
    for path, text in texts(ROOT).items():
        name = path.relative_to(ROOT)
        if text is None:
            print(f"{name} has no block for the table: put these two lines into it\n{BEGIN}\n{END}")
        elif not path.exists() or path.read_text() != text:
            stale.append(str(name))
            if not options.check:
                path.write_text(text)
                print(f"wrote {name}")
        else:
            print(f"{name} is up to date")
    if options.check:
        sys.exit(f"stale: {', '.join(stale)}; run python -m flashproto.bench docs" if stale else 0)
    for path in draw(machines(ROOT)[0], ROOT / "docs" / "pictures"):
        print(f"wrote {path.relative_to(ROOT)}")
