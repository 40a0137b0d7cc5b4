"""docs/speed.md from the result files in docs/results: its text; docs.py writes it.

A result file is what a run of a benchmark writes: --out docs/results/NAME, a folder for each machine.
Every ratio compares contenders of one run.
"""

from __future__ import annotations

import datetime
import json
import re
import statistics
from collections.abc import Iterator, Sequence
from importlib import import_module
from pathlib import Path
from typing import Any

from . import doors, first_calls, generate, parallel, report, ring
from .measure import is_peer
from .plots import title

SECTIONS = {
    "attention": "Attention",
    "decode": "Decoding",
    "merge": "Attention in parts",
    "variants": "Attention's variants",
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
    "fa3": "flash_attn_3._C",
    "quack": "quack",
    "liger": "liger_kernel",
    "cut-cross-entropy": "cut_cross_entropy",
    "cudnn-flex": "cudnn.flex_attention",
    "ffpa": "ffpa_attn",
}
# What compiles with its DSL.
BY_CUTLASS = ("fa4", "flex-flash", "quack", "liger-cutedsl", "cudnn-flex", "ffpa-cutedsl")

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
    if any(name in BY_CUTLASS for name in names):
        versions["CUTLASS DSL"] = found.get("cutlass")
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
    count = run["protocol"].get("ranks", 1)
    where = f"one {card(run)}" if count == 1 else f"{count} {card(run)}s"
    parts = [f"Measured {days} on {where}", software(run), peers(run, names)]
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
    timed = {n: r for n, r in results.items() if "ms" in r and is_peer(n)}
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


def titled(rows: list[list[str]]) -> str:
    """Rows whose first one names contenders as a table of Markdown, with their titles."""
    (heading, *names), *rest = rows
    return markdown([[heading, *map(title, names)], *rest])


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

Peers that are left out: FlashInfer, which compiles its kernels on the machine, with an nvcc that these
machines lack; FlashAttention-3's backward, which its wheel on PyPI lacks. A peer whose CUTLASS
DSL is another version than the others' is measured in a process of its own, with flashproto once more
beside it, in a table of its own; so are peers that were added later.

How to read it: figures of one table compare, those of different runs do not, since machines and clocks
differ. "Times the fastest peer" is the fastest peer's time over that of the fastest flashproto; below 1
the peer is faster. `flashproto[hopper]` is the backend of that name, which attention takes on an H100
or H200 if none is named; `flashproto[triton]` is the portable one. \\* marks a single repeat, of a
contender far behind. "error": the peer does not run that shape; the file has its message.
"""


def prose(module: Any) -> str:
    """A module's docstring as Markdown."""
    return re.sub(r"(?m)^ +", "", module.__doc__).strip().replace("*", "\\*")


def section(subject: str, files: Sequence[dict[str, Any]]) -> Iterator[str]:
    """The tables of a subject's files, each of which compares other contenders."""
    yield f"## {SECTIONS.get(subject, subject)}: `{subject}`"
    yield prose(import_module(f".{subject}", __package__))
    for number, data in enumerate(files):
        if number:
            yield "Beside other peers, in a run of their own:"
        yield from tables(subject, data)


def tables(subject: str, data: dict[str, Any]) -> Iterator[str]:
    """When and with what a file was measured, its tables, and what they come to."""
    cells = data["cells"]
    yield provenance(data["runs"], report.contenders(cells))
    for unit in dict.fromkeys(cell["unit"] for cell in cells.values()):
        of_unit = {key: cell for key, cell in cells.items() if cell["unit"] == unit}
        less = "less" if unit == "ms" else "more"
        yield f"{unit}, {' / '.join(report.passes(of_unit))}; {less} is better."
        yield cells_table(of_unit)
    yield "\n".join(summary(cells))
    memory, mfu = report.memory(cells), report.mfu(cells)
    if subject in WITH_MEMORY and memory:
        kept = " kept from forward to backward, and" if "kept" in memory[0][0] else ""
        yield f"Memory{kept} at the peak of a pass, beyond what was there before it:"
        yield titled(memory)
    if mfu:
        yield "The share of the card's dense bfloat16 peak (MFU), by the model's `flops_per_token`:"
        yield titled(mfu)


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
            if name.startswith("flashproto."):
                entries = [f"{t[0]:.1f} (lowest {t[1]:.1f})" if t else "none" for t in (ours, theirs)]
                rows.append([name.removeprefix("flashproto."), *entries])
        yield markdown(rows)
        yield (
            f"`import flashproto` takes {figures['import_ratio']:.2f} times as long as `import torch`."
            f" The first attention of `{figures['impl']}`, with an empty cache and compiled, takes "
            + ", ".join(f"{seconds:.1f} s {which}" for which, seconds in first.items())
            + "."
        )


def first_calls_section(data: dict[str, Any]) -> Iterator[str]:
    """Seconds of first calls, and what others compile."""
    yield "## First calls of attention's variants: `variants --first-calls`"
    yield prose(first_calls)
    yield provenance(data["runs"])
    rows = [["variant", "backend", "forward, s", "backward, s", "other values", "other lengths"]]
    for found in data["first_calls"]:
        row = [found["variant"], found["impl"]]
        if "error" in found:
            rows.append([*row, "error", "", "", ""])
            continue
        row += [f"{found[which]:.1f}" for which in first_calls.LIMITS]
        counts = [len(names) for names in found["anew"].values()]
        rows.append([*row, *(f"{n} compiled" if n else "none compiled" for n in counts)])
    yield markdown(rows)


def ring_section(data: dict[str, Any]) -> Iterator[str]:
    """One long sequence on several GPUs, beside all of it on one of them."""
    yield "## Long sequences on several GPUs: `ring`"
    yield prose(ring)
    yield provenance(data["runs"])
    ranks = data["runs"][-1]["protocol"]["ranks"]
    passes = [(n, which, p) for n, cell in data["cells"].items() for which, p in cell["passes"].items()]
    theirs = [name for name in ring.TORCH if any(name in p["ms"] for _, _, p in passes)]
    head = ["tokens", "pass", "one GPU, TFLOP/s", f"{ranks} GPUs, TFLOP/s", f"of {ranks} times one"]
    rows = [[*head, *theirs]]
    for tokens, which, found in passes:
        rates = {n: f"{rate:.0f}" for n, rate in found["tflop_s"].items()}
        ours = rates["one"], rates["all"], f"{found['share']:.3f}"
        others = (rates.get(n, "error") for n in theirs)
        rows.append([tokens, which.replace("+", " and "), *ours, *others])
    yield markdown(rows)


def parallel_section(data: dict[str, Any]) -> Iterator[str]:
    """The trainer in several processes, beside one."""
    yield "## Training on several GPUs: `parallel`"
    yield prose(parallel)
    yield provenance(data["runs"])
    ranks = data["runs"][-1]["protocol"]["ranks"]
    rows = [["case", "how", "GPUs", "tokens/s", f"of {ranks} times one", "MFU", "GiB on the first"]]
    for case, cell in data["cells"].items():
        for way, found in cell.items():
            if "error" in found:
                rows.append([case, way, "", "error", "", "", ""])
                continue
            how = "one GPU" if way == "one" else f"--parallel {way}"
            share = f"{found['share']:.3f}" if "share" in found else ""
            mfu = f"{found['mfu']:.1%}" if found["mfu"] else ""
            gib = f"{found['gib']:.1f}" if found["gib"] else ""
            row = [case, how, str(found["processes"]), f"{found['tokens_s']:,.0f}", share, mfu, gib]
            rows.append(row)
    yield markdown(rows)


def generate_section(data: dict[str, Any]) -> Iterator[str]:
    """Tokens/s of generation, and how much host and device have to do for a step of a token."""
    yield "## Text, token by token: `generate`"
    yield prose(generate)
    yield provenance(data["runs"])
    rows = [["case", "contender", "tokens/s", "first token, ms", "ms a token"]]
    for case, found in data["cells"].items():
        for name, made in found.items():
            if "token_ms" in made:
                times = (made[which] for which in ("first_ms", "token_ms"))
                rows.append([case, name, f"{made['tokens_s']:.0f}", *(f"{t:.2f}" for t in times)])
    yield markdown(rows)


def doors_section(data: dict[str, Any]) -> Iterator[str]:
    """Models of transformers on this library and without it."""
    yield "## Models of transformers: `doors`"
    yield prose(doors)
    yield provenance(data["runs"])
    rows = [["part", "contender", "ms a step", "GiB", "tokens/s", "first token, ms", "ms a token"]]
    for part in ("train", "generate"):
        found = data["parts"].get(part, {})
        for name, made in found.items() if len(found) > 1 else ():
            step = [f"{made['ms']:.1f}", f"{made['gib']:.1f}"] if "ms" in made else ["", ""]
            tokens = [f"{made['tokens_s']:.0f}"] if "tokens_s" in made else [""]
            times = [f"{made[n]:.2f}" if n in made else "" for n in ("first_ms", "token_ms")]
            rows.append([part, name, *step, *tokens, *times])
    yield markdown(rows)


APART = {  # subjects whose tables are no contenders' times of cells
    "launch": launch_section,
    "first_calls": first_calls_section,
    "ring": ring_section,
    "parallel": parallel_section,
    "generate": generate_section,
    "doors": doors_section,
}
LOSSES = """
## The same loss on every backend: `examples/compare_losses.py`

GPTs of `examples/train_gpt.py`, trained from the same weights on each backend; from several seeds, mean
and standard deviation.
"""


def losses_section(data: dict[str, Any]) -> Iterator[str]:
    """Losses of the example model by backend."""
    (run,) = data["runs"]
    options = list(run["protocol"]["train_gpt"])
    if "--data" in options:
        options[options.index("--data") + 1] = "TOKENS"
    yield f"`train_gpt.py {' '.join(options)}`" if options else "`train_gpt.py`, the toy GPT:"
    yield provenance([run])
    rows = [["backend", "seeds", "steps each", "validation loss", "mean loss of all steps"]]
    for impl in dict.fromkeys(run["impl"] for run in data["losses"]):
        runs = [run for run in data["losses"] if run["impl"] == impl]
        row = [impl, str(len(runs)), str(runs[0]["steps"])]
        for quantity in ("validation", "mean"):
            found = [run[quantity] for run in runs]
            spread = f" ± {statistics.stdev(found):.4f}" if len(found) > 1 else ""
            row.append(f"{statistics.mean(found):.4f}{spread}")
        rows.append(row)
    yield markdown(rows)


def page(found: list[Results], pictures: Sequence[str]) -> str:
    """docs/speed.md of these machines, with lines of Markdown that show pictures."""
    parts = [HEAD.strip(), *pictures]
    for results in found:
        if len(found) > 1:
            parts.append(f"# {card(next(iter(results.values()))['runs'][-1])}")
        files: dict[str, list[dict[str, Any]]] = {subject: [] for subject in SECTIONS}
        for name, data in results.items():
            if name not in APART and data.get("cells"):
                files.setdefault(data["subject"], []).append(data)
        for subject, found_there in files.items():
            if found_there:
                parts += section(subject, found_there)
        for subject, of_subject in APART.items():
            if subject in results:
                parts += of_subject(results[subject])
        losses = [data for data in results.values() if "losses" in data]
        parts += [LOSSES.strip()] if losses else []
        for data in losses:
            parts += losses_section(data)
    return "\n\n".join(part for part in parts if part) + "\n"
