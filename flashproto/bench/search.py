"""Search the configurations of the Hopper attention kernels on a GPU; print what to put into configs.

    python -m flashproto.bench search forward --head-dim 128 --lengths 4096 16384 --mask causal
    python -m flashproto.bench search backward --head-dim 64 --vary BM=64,128 DQ=0,1,2

Candidates are the present configuration with every combination of the varied fields, those that do
not fit left out.  Each is compiled (--ahead: in several processes), checked against a float32
reference, and timed in turn with the others; shapes as in the attention benchmark.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import fields, replace
from functools import partial
from typing import Any, get_args

import torch
from torch import Tensor

import flashproto

from .. import backends, configs
from ..configs.hopper_backward import Sums, Walk
from ..variant import Kind
from .attention import TOKENS, WIDTH, Problem, Sampled, work
from .measure import far_behind, one_line
from .timing import interleaved, make_timer

if backends.HAS_TRITON:
    from ..ops import call_cache

SHARED = 227 * 1024  # bytes a program may have
CHOOSERS = {"forward": "attention_forward_hopper", "backward": "attention_backward_hopper"}
VARIED: dict[str, dict[str, Sequence[Any]]] = {
    "forward": {
        "BN": (64, 128),
        "W": (2, 3),
        "KS": (2, 3),
        "VS": (2, 3),
        "OVERLAP": (False, True),
    },
    "backward": {"BM": (64, 128), "BN": (64, 128), "DQ": (0, 1, 2)},
}


def present(which: str, p: Problem) -> Any:
    """The configuration that configs has for the problem."""
    heads, group, kind = p.B * p.Hkv, p.Hq // p.Hkv, Kind(CAUSAL=p.causal)
    if which == "forward":
        return configs.attention_forward_hopper(p.D, p.S, kind, p.S, heads, group)
    return configs.attention_backward_hopper(p.D, p.S, kind, heads=heads, group=group)


def fits(config: Any) -> bool:
    """Whether the tiles fit in shared memory; forward, the named barriers leave Triton its own, and the
    kernel can keep so many columns of queries; backward, pairs of blocks have what they need."""
    D = config.D
    if isinstance(config, configs.HopperForward):
        tiles = config.BM + (config.KS + config.VS) * config.BN + 64
        more = config.Q_IN_REGS - 64  # columns that are a piece of their own
        kept = config.Q_IN_REGS == 0 or (0 <= more <= D - 64 and more & (more - 1) == 0)
        return kept and tiles * D * 2 * config.PROGRAMS <= SHARED and config.PB >= 2 + config.W
    if config.PAIRS and config.DQ != 1:
        return False
    halves = 4 * config.BM * D + 2 * config.KV * config.BN * D + config.TILES * config.BN * config.BM
    sums = {0: 0, 1: 2, 2: 1}[config.DQ] * 128 * 32  # floats of dQ on their way
    rows = 2 * config.BM + 2 * 64 * config.KV_IN_REGS  # of 16 halves: lse and delta, selectors
    return halves * 2 + sums * 4 + rows * 32 <= SHARED


def candidates(config: Any, varied: Mapping[str, Sequence[Any]]) -> list[Any]:
    """`config` first, then it with every combination of the varied fields that fits."""
    named = {f.name for f in fields(config)}
    unknown = set(varied) - named
    if unknown:
        raise ValueError(f"--vary names {', '.join(sorted(unknown))}; it takes {', '.join(named)}.")
    found = [config]
    for values in itertools.product(*varied.values()):
        try:
            candidate = replace(config, **dict(zip(varied, values, strict=True)))
        except ValueError:  # values that do not go together
            continue
        if candidate not in found and fits(candidate):
            found.append(candidate)
    return found


def difference(config: Any, base: Any) -> str:
    """The fields in which a candidate differs from the present configuration."""
    changed = [f.name for f in fields(base) if getattr(config, f.name) != getattr(base, f.name)]
    return " ".join(f"{name}={getattr(config, name)}" for name in changed) or "present"


class Chosen:
    """Makes every launch take one configuration whatever the shape; `with` puts things back.

    asked: whether a launch asked for a configuration since it was last set.
    """

    def __init__(self, which: str) -> None:
        self.name = CHOOSERS[which]
        self.config, self.asked = None, False

    def choose(self, *_: Any, **__: Any) -> Any:
        self.asked = True
        return self.config

    def set(self, config: Any) -> None:
        if config is not self.config:
            # Calls keep what they worked out for a shape, the configuration among it.
            self.config, self.asked = config, False
            call_cache.forget()

    def __enter__(self) -> Chosen:
        self.kept = getattr(configs, self.name)
        setattr(configs, self.name, self.choose)
        return self

    def __exit__(self, *_: object) -> None:
        setattr(configs, self.name, self.kept)
        call_cache.forget()


class Cell:
    """One problem's tensors, and the call of a candidate on them."""

    def __init__(self, p: Problem, which: str) -> None:
        self.p, self.which = p, which
        q, self.grad, k, v = (
            torch.randn(p.B, heads, p.S, p.D, device="cuda").to(p.dtype)
            for heads in (p.Hq, p.Hq, p.Hkv, p.Hkv)
        )
        self.leaves = [t.requires_grad_() for t in (q, k, v)]
        self.sampled = Sampled(p, q, k, v, self.grad)

    def attend(self) -> Tensor:
        out = flashproto.attention(*self.leaves, causal=self.p.causal, impl="hopper")
        assert isinstance(out, Tensor)
        return out

    def call(self, config: Any, chosen: Chosen) -> Callable[[], Any]:
        """What is timed: a forward pass, or a backward pass of a graph kept for it."""
        out = self.attend() if self.which == "backward" else None

        def run() -> Any:
            chosen.set(config)
            if out is None:
                return self.attend()
            return torch.autograd.grad(out, self.leaves, self.grad, retain_graph=True)

        return run

    def complaint(self, config: Any, chosen: Chosen) -> str | None:
        """What is wrong with a candidate's results, None if nothing."""
        try:
            chosen.set(config)
            out = self.attend()
            grads = None
            if self.which == "backward":
                grads = torch.autograd.grad(out, self.leaves, self.grad)
            if not chosen.asked:
                return "the launch did not ask for a configuration"
            return self.sampled.check(out, grads)
        except Exception as error:
            return one_line(error)


def search_cell(p: Problem, options: argparse.Namespace) -> str:
    """Check and time the candidates of one problem; the table, and the best candidate."""
    cell, base = Cell(p, options.which), present(options.which, p)
    calls, wrong = {}, []
    by_name = {difference(c, base): c for c in candidates(base, options.vary)}
    timer = make_timer(torch.device("cuda"), options.rep_ms)
    drop = partial(far_behind, factor=options.drop_slower)
    with Chosen(options.which) as chosen:
        for name, config in by_name.items():
            complaint = cell.complaint(config, chosen)
            if complaint:
                wrong.append(f"  {name}: {complaint}")
            else:
                calls[name] = cell.call(config, chosen)
        times = interleaved(calls, timer, options.repeats, drop) if calls else {}
    if not times:
        return "\n".join([f"{p.key} {options.which}: no candidate runs", *wrong])
    flops = getattr(work(p), options.which)
    medians = {name: sorted(found)[len(found) // 2] for name, found in times.items()}
    order = sorted(medians, key=lambda name: medians[name])
    lines = [f"{p.key} {options.which}, TFLOP/s (* one repeat: far behind)"]
    for name in order:
        mark = "*" if len(times[name]) < options.repeats else " "
        lines.append(f"  {flops / medians[name]:7.1f}{mark} {name}")
    lines += wrong
    lines.append(f"  best at D {p.D}, S {p.S}, causal={p.causal}: {by_name[order[0]]}")
    return "\n".join(lines)


def compile_part(problems: Sequence[Problem], options: argparse.Namespace) -> None:
    """Run this process's share of all candidates once; errors show again when they are checked."""
    share, of = options.compile_part
    for p in problems:
        cell, base = Cell(p, options.which), present(options.which, p)
        with Chosen(options.which) as chosen:
            for config in candidates(base, options.vary)[share::of]:
                with contextlib.suppress(Exception):
                    cell.call(config, chosen)()
                    torch.cuda.synchronize()


def compile_ahead(arguments: Sequence[str], processes: int) -> None:
    base = [sys.executable, "-m", "flashproto.bench", "search", *arguments]
    lines = [[*base, "--compile-part", str(share), str(processes)] for share in range(processes)]
    with ThreadPoolExecutor(processes) as pool:
        list(pool.map(partial(subprocess.run, check=False, stdout=subprocess.DEVNULL), lines))


def variation(text: str) -> tuple[str, list[Any]]:
    """NAME=VALUE,... with integers, true and false, or the names of walks and sums."""
    name, _, values = text.partition("=")
    constants: dict[str, Any] = {"true": True, "false": False}
    constants |= {name: name for kind in (Walk, Sums) for name in get_args(kind)}
    try:
        listed = [constants[v] if v in constants else int(v) for v in values.lower().split(",")]
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is not NAME=VALUE,VALUE") from None
    return name, listed


def main(arguments: Sequence[str] | None = None) -> None:
    arguments = list(sys.argv[1:] if arguments is None else arguments)
    parser = argparse.ArgumentParser(
        prog="python -m flashproto.bench search",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add("which", choices=tuple(CHOOSERS))
    add("--head-dim", type=int, default=128)
    add("--lengths", type=int, nargs="+", default=[4096], help="default: 4096")
    add("--mask", choices=("full", "causal", "both"), default="both")
    add("--vary", type=variation, nargs="+", metavar="FIELD=VALUE,...", help="default: the tiles")
    add("--repeats", type=int, default=3)
    add("--rep-ms", type=float, default=25.0)
    add("--drop-slower", type=float, default=1.15, metavar="FACTOR")
    add("--ahead", type=int, default=0, metavar="PROCESSES", help="compile in that many first")
    add("--compile-part", type=int, nargs=2, help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    options.vary = dict(options.vary) if options.vary else VARIED[options.which]
    masks = {"full": [False], "causal": [True], "both": [False, True]}[options.mask]
    problems = [
        Problem(max(TOKENS // S, 1), WIDTH // D, WIDTH // D, S, D, causal, torch.bfloat16)
        for D in [options.head_dim]
        for S in options.lengths
        for causal in masks
    ]
    try:
        for p in problems:
            candidates(present(options.which, p), options.vary)
    except ValueError as error:
        parser.error(str(error))
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    reasons = backends.device_reasons("hopper", device)
    if reasons:
        sys.exit(f"flashproto.bench search: {'; '.join(reasons)}")
    if options.compile_part:
        compile_part(problems, options)
        return
    if options.ahead:
        compile_ahead(arguments, options.ahead)
    for p in problems:
        print(search_cell(p, options), flush=True)
