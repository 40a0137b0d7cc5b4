"""How long each layer of a Transformer takes, beside the same layer in plain PyTorch.

    python examples/time_layers.py             on a GPU where there is one, else small CPU shapes
    python examples/time_layers.py --d-model 4096 --length 8192 --batch 1

Times RMSNorm, attention, MLP and the whole block, forward and as a training step (forward and
backward), on flashproto's backends against PyTorch eager and torch.compile; checks every result
against float32 first; prints a table with ratios and draws runs/time_layers.png.
"""

from __future__ import annotations

if __name__ == "__main__":
    import start

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from flashproto.backends import BACKENDS, device_reasons
from flashproto.bench import block, plots, report
from flashproto.bench.measure import measure_cell
from flashproto.bench.peers import can_compile
from flashproto.bench.timing import make_timer
from flashproto.env import backend_table, default_backend


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    gpu = torch.cuda.is_available()
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--d-model", type=int, default=2048 if gpu else 128, help="width of the layers")
    add("--heads", type=int, help="attention heads; default: head_dim 128 (32 on a CPU)")
    add("--length", type=int, default=4096 if gpu else 256, help="tokens of a sequence")
    add("--batch", type=int, default=4 if gpu else 2, help="sequences")
    add("--impl", choices=BACKENDS, help="flashproto's backend; default: the best that runs")
    add("--no-compile", action="store_true", help="leave out torch.compile, which takes a while")
    add("--repeats", type=int, default=3, help="interleaved repeats; the median counts")
    add("--out", type=Path, default=Path("runs/time_layers.png"), help="the plot")
    options = parser.parse_args(arguments)
    options.device = torch.device("cuda" if gpu else "cpu")
    reasons = device_reasons(options.impl, options.device) if options.impl else ()
    if reasons:
        takes = "leave it out for the best that runs"
        parser.error(f"--impl is {options.impl}, which cannot run: {'; '.join(reasons)}; {takes}")
    if options.heads is None:
        options.heads = max(1, options.d_model // (128 if gpu else 32))
    for name in ("d_model", "heads", "length", "batch", "repeats"):
        if getattr(options, name) < 1:
            parser.error(f"--{name.replace('_', '-')} is {getattr(options, name)}; it takes at least 1")
    if options.d_model % options.heads:
        parser.error(f"--d-model is {options.d_model}; it takes a multiple of --heads {options.heads}")
    return options


def measure(options: argparse.Namespace) -> dict[str, dict[str, Any]]:
    """{layer: its results}, in the form that flashproto.bench.report takes."""
    device = options.device
    reasons = backend_table()["cuda:0" if device.type == "cuda" else "cpu"]
    impl = options.impl or default_backend(reasons)
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    with_compile = not options.no_compile and can_compile(device)
    timer = make_timer(device, 50.0)
    cells: dict[str, dict[str, Any]] = {}
    for kind in block.KINDS:
        print(f"timing {kind} ...", flush=True)
        problem = block.Problem(
            kind, options.d_model, options.heads, options.length, options.batch, dtype
        )
        torch._dynamo.reset()
        contenders = block.contenders(problem, device, [impl], with_compile)
        work = block.work(problem)
        results = measure_cell(contenders, work, timer, options.repeats)
        cells[kind] = {"unit": work.unit, "passes": results}
    return cells


def main(arguments: Sequence[str] | None = None) -> None:
    options = parse(arguments)
    tokens = f"{options.batch} x {options.length} tokens"
    shape = f"d_model {options.d_model}, {options.heads} heads, {tokens}"
    print(f"{options.device}, {shape}")
    cells = measure(options)
    for which in report.passes(cells):
        peers = ["torch"] if options.no_compile else ["torch", "compile"]
        print("\n" + report.table(cells, which, peers))
    print("\ntimes torch: how many times as fast flashproto is as the layer in plain PyTorch")
    if not options.no_compile:
        print("times compile: as that layer under torch.compile")
    plots.plot(cells, f"Layers on {options.device}: {shape}", options.out)
    print(f"wrote {options.out}")


if __name__ == "__main__":
    start.run(main)
