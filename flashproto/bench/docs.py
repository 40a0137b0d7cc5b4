"""What the documentation says by itself: docs/speed.md, its pictures and README's table from the result
files in docs/results, docs/api.md from the docstrings, the tables of docs/attention.md from what calls
take, those of docs/determinism.md from what is claimed of calls, and pictures from the masks.

    python -m flashproto.bench docs             # write them all, in a checkout
    python -m flashproto.bench docs --check     # write nothing; exit code 1 where a text is stale
"""

from __future__ import annotations

import argparse
import math
import re
import statistics
import sys
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from . import api, determinism, features, plots, report, speed
from .measure import OURS
from .plots import title
from .speed import Results, best_peer, card, machines, markdown, month, ratios

ROOT = Path(__file__).resolve().parents[2]
BEGIN = "<!-- speed table: python -m flashproto.bench docs -->"
END = "<!-- end of speed table -->"


# --- README's table ------------------------------------------------------------------------------


class Row(NamedTuple):
    """A row of README's table: all cells of a subject whose names match, and one of them in figures."""

    title: str
    subject: str
    cells: str
    example: str


VARIANTS = "window|8 documents|16 sequences|tree|softcap|sinks|ALiBi|key padding"
MASKS = "boolean|block diffusion|global tokens|causal D192"
ROWS = (
    Row("attention, head_dim 64 to 256", "attention", "", "D128 S8192 causal"),
    Row(
        "windows, documents, softcap, sinks, ALiBi",
        "variants",
        f"^({VARIANTS})",
        "8 documents of 2048 D128 S16384",
    ),
    Row(
        "masks of any kind; head_dim 192 with 128",
        "variants",
        f"^({MASKS})",
        "block diffusion 16 D128 S8192",
    ),
    Row("biases", "variants", "bias", "bias D128 S2048"),
    Row("decoding, 1 to 16 queries", "decode", "^decode ", "decode B16 H32/8 S8192 Sq4"),
    Row("`attention_qkv` in a block", "views", "", "views d2048 T4096 B4"),
    Row("`rms_norm`", "norm", "^RMSNorm", "RMSNorm 49152x4096"),
    Row("`layer_norm`", "norm", "^LayerNorm", "LayerNorm 49152x4096"),
    Row("`softmax`", "softmax", "", "softmax 49152x4096"),
    Row("`cross_entropy`", "cross_entropy", "", "cross_entropy 8192x128256"),
    Row("`linear_cross_entropy`", "linear_cross_entropy", "", "linear_cross_entropy 16384x4096x128256"),
    Row("`swiglu`, `geglu`, `gelu`", "glu", "glu |gelu ", "swiglu 16384x5632"),
    Row("`rope`, `qk_norm`", "glu", "^rope|^qk_norm", "rope B4 S4096 H16/16 D128"),
    Row("Transformer block, d_model 1024 to 4096", "block", "", "block d2048 T4096 B4"),
    Row("GPT-2 124M and 350M, loss and gradients", "gpt", "", "gpt2-124m T1024 B16"),
)


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
        beside = [d["cells"] for d in others(results, row.subject)]
        every = [chosen[key], *(found[key] for found in beside if key in found)]
        rows.append([row.title, *example(key, every), *columns(chosen, beside)])
    if run is None:
        raise ValueError("docs/results holds nothing for README's table; measure attention or a norm.")
    versions = run["environment"]["versions"]
    text = (
        f"On one {card(run)} (torch {versions['torch'].partition('+')[0]}, triton {versions['triton']},"
        f" {month(results)}): one shape's figures, forward / backward, and the fastest peer's time over"
        " flashproto's, each by its fastest way in a pass, over all shapes: geometric mean (range)."
        " Shapes are rows x columns, or D head_dim, S or T tokens, B sequences, H heads; f+b is both"
        " passes together."
    )
    return f"\n{text}\n\n{markdown(rows)}\n"


def others(results: Results, subject: str) -> list[dict[str, Any]]:
    """The files of a subject beside its first, in which it was measured with other peers."""
    return [d for name, d in results.items() if d["subject"] == subject and name != subject]


def example(key: str, cells: Sequence[dict[str, Any]]) -> list[str]:
    """The cell's name and, of each pass, the figures of our fastest contender and the fastest peer, by
    the file in which the peer is fastest."""
    ours, theirs = [], []
    names: list[str] = []
    for which in cells[0]["passes"]:
        made = [cell["passes"].get(which, {}) for cell in cells]
        results = min(made, key=lambda found: report.ratio(found) or math.inf)
        own = report.fastest({n: r for n, r in results.items() if "ms" in r and n.startswith(OURS)})
        best = best_peer(results)
        unit = cells[0]["unit"]
        ours.append(report.entry(results[own], unit).rstrip("*"))
        theirs.append(report.entry(results[best], unit).rstrip("*"))
        names.append(title(best).partition(",")[0])
    shape = key if key.startswith("block diffusion") else re.sub(r"^[A-Za-z_]+ ", "", key)
    named = ", ".join(dict.fromkeys(names))
    return [f"{shape}, {cells[0]['unit']}", " / ".join(ours), f"{' / '.join(theirs)} ({named})"]


def columns(cells: report.Cells, beside: Sequence[report.Cells]) -> list[str]:
    """The ratios to the fastest peer, of those beside too: forward, and what else was timed."""
    texts = []
    for which in report.passes(cells):
        least = ratios(cells, which)
        for key, value in (pair for more in beside for pair in ratios(more, which).items()):
            if key in least:
                least[key] = min(least[key], value)
        found = list(least.values())
        text = f"{statistics.geometric_mean(found):.2f}"
        text += f" ({min(found):.2f}-{max(found):.2f})" if len(found) > 1 else ""
        texts.append(text + (" f+b" if "+" in which else ""))
    return [*texts, "-"][:2]


def filled(page: str, table: str, begin: str = BEGIN, end: str = END) -> str | None:
    """The page with the table in its block; None where there is no block."""
    before, begin, rest = page.partition(begin)
    _, end, after = rest.partition(end)
    return f"{before}{begin}\n{table}\n{end}{after}" if begin and end else None


def filled_with(page: str, tables: dict[str, Callable[[], str]], name: str) -> str:
    """The page of this name with each table in its block."""
    for what, table in tables.items():
        begin, end = (line.replace("speed table", what) for line in (BEGIN, END))
        made = filled(page, f"\n{table()}\n", begin, end)
        if made is None:
            raise ValueError(f"docs/{name} lacks the lines {begin} and {end}")
        page = made
    return page


# --- pictures ------------------------------------------------------------------------------------


class Picture(NamedTuple):
    """Some cells of a subject, by what is written below their bars, and the peers beside ours."""

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
        ("fa3", "fa4", "sdpa-cudnn", "flex"),
    ),
    "variants": Picture(
        "Attention's variants, forward and backward",
        "variants",
        {
            "window 1024 D128 S16384": "window of 1024",
            "8 documents of 2048 D128 S16384": "8 documents of 2048",
            "16 sequences of 128 to 4096 D128 S16384": "16 sequences of 128 to 4096",
            "tree of 8x1024 on 4096 D128 S12288": "tree of 8 branches",
            "softcap 30 D128 S4096": "softcap",
            "sinks D128 S4096": "sinks",
            "ALiBi D128 S4096": "ALiBi",
        },
        ("fa3", "fa4", "flex-flash", "flex"),
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


def drawable(found: Sequence[Results]) -> Iterator[tuple[str, Picture, Results]]:
    """Each picture for which there are results, by the first machine that has some."""
    for name, picture in PICTURES.items():
        for results in found:
            if picture.taken(results):
                yield name, picture, results
                break


def shown(found: Sequence[Results]) -> list[str]:
    """The pictures in Markdown, from docs/."""
    return [f"![{picture.heading}](pictures/{name}.png)" for name, picture, _ in drawable(found)]


def draw(found: Sequence[Results], folder: Path) -> list[Path]:
    written = []
    for name, picture, results in drawable(found):
        run = results[picture.subject]["runs"][-1]
        heading = f"{picture.heading}, bfloat16, {card(run)} (more is better)"
        path = folder / f"{name}.png"
        plots.plot(picture.taken(results), heading, path, picture.cells.__getitem__)
        written.append(path)
    return written


# --- the command ---------------------------------------------------------------------------------


def tables_of(found: Sequence[Results]) -> dict[str, dict[str, Callable[[], str]]]:
    """Of each page that is not written by its tables alone."""
    bits: dict[str, Callable[[], str]] = {
        "table of bits": determinism.table,
        "table of costs": partial(determinism.costs, found),
    }
    return {"attention.md": features.TABLES, "determinism.md": bits}


def texts(root: Path) -> dict[Path, str | None]:
    """Each file that is written, with its text; README's is None where it has no block."""
    found = machines(root)
    readme = root / "README.md"
    made = {
        root / "docs" / "speed.md": speed.page(found, shown(found)),
        root / "docs" / "api.md": api.page(),
        readme: filled(readme.read_text(), readme_table(found[0])),
    }
    for name, tables in tables_of(found).items():
        path = root / "docs" / name
        if path.exists():
            made[path] = filled_with(path.read_text(), tables, name)
    return made


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
    pictures = ROOT / "docs" / "pictures"
    for path in (*draw(machines(ROOT), pictures), *features.draw(pictures)):
        print(f"wrote {path.relative_to(ROOT)}")
