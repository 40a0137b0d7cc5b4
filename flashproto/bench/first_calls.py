"""The first call of each of attention's variants, and what later ones compile.

Each variant has a fresh process with an empty Triton cache: the seconds of its first forward and
backward, compilation included, and the kernels that are compiled for other values (of a mask's tensors,
lengths of sequences, sinks, slopes) and for other numbers of tokens.  Some processes run at once.
"""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

import flashproto

from .. import backends, masks
from . import report

LIMITS = {"forward": 8, "backward": 12}  # seconds
# It ends at once: a thread of autograd's that asks for Python while the interpreter ends aborts the
# process, though its figures are written (pytorch/pytorch#38228).
CODE = """
import os, sys
from flashproto.bench import first_calls
first_calls.one(*{arguments!r})
sys.stdout.flush()
os._exit(0)
"""
TIMEOUT = 200.0


class Sizes(NamedTuple):
    """Heads, head dim, and numbers of tokens for which the tiles are the same."""

    H: int
    D: int
    tokens: tuple[int, ...]


SIZES = {
    "cuda": Sizes(4, 128, (4096, 4096, 3840, 3803, 3797)),
    "cpu": Sizes(2, 16, (32, 32, 48, 27, 29)),
}
# What changes in steps 1 to 4 from the one before.
CHANGES = ("values", "lengths", "lengths", "lengths")
VALUES_ALONE = ("intervals", "varlen")
Step = tuple[Callable[[], Any], Sequence[Tensor]]  # a call, and what has gradients


def calls(
    impl: str, device: torch.device, sizes: Sizes, dtype: torch.dtype
) -> dict[str, Callable[[int], Step]]:
    """By variant, the steps n = 0 ... 4, of which those behind the first are to compile nothing."""
    H, D, tokens = sizes
    most = tokens[0]

    def random(*shape: int) -> list[Tensor]:
        return [torch.randn(shape, device=device, dtype=dtype).requires_grad_() for _ in range(3)]

    def attention(S: int, **options: Any) -> Step:
        leaves = random(1, H, S, D)
        call = partial(flashproto.attention, *leaves, causal=True, impl=impl, **options)
        return call, [*leaves, *(options[name] for name in ("sinks",) if name in options)]

    def window(n: int) -> Step:
        return attention(tokens[n], window=(most // 4 - 1, 0))

    def intervals(n: int) -> Step:
        key = torch.arange(most, device=device)
        mask = (
            masks.documents(key // (most // 8)),
            masks.documents(key // (most // 3)),
            masks.tree(key - 1),
            masks.intervals(key // 2, key + 7),
            masks.documents(key // 5) & masks.tree(key, key + most // 2),
        )[n]
        return attention(most, mask=mask)

    def varlen(n: int) -> Step:
        parts = ((8, 8, 8, 8), (7, 0, 20), (1, 13, 2, 5, 3), (16,), (3, 4))[n]
        lengths = [x * most // 32 + n for x in parts]
        cu = torch.tensor([0, *lengths], device=device).cumsum(0, dtype=torch.int32)
        leaves, longest = random(sum(lengths) + n, H, D), max(lengths)
        varlen = partial(flashproto.attention_varlen, causal=True, impl=impl)
        return partial(varlen, *leaves, cu, cu, longest, longest), leaves

    def softcap(n: int) -> Step:
        return attention(tokens[n], softcap=30.0 + n)

    def sinks(n: int) -> Step:
        return attention(tokens[n], sinks=torch.randn(H, device=device).requires_grad_())

    def alibi(n: int) -> Step:
        return attention(tokens[n], alibi_slopes=torch.rand(H, device=device))

    found = window, intervals, varlen, softcap, sinks, alibi
    return {function.__name__: function for function in found}


NAMES = tuple(calls("", torch.device("cpu"), SIZES["cpu"], torch.float32))


def one(name: str, impl: str, kind: str) -> None:
    """Measure one variant in this process, and print the figures."""
    device = torch.device(kind)
    dtype = torch.bfloat16 if kind == "cuda" else torch.float32
    make = calls(impl, device, SIZES[kind], dtype)[name]

    def wait() -> None:
        if kind == "cuda":
            torch.cuda.synchronize()

    def step(n: int) -> dict[str, float]:
        call, leaves = make(n)
        wait()
        start = time.perf_counter()
        out = call()
        wait()
        middle = time.perf_counter()
        torch.autograd.grad(out, leaves, torch.ones_like(out))
        wait()
        return {"forward": middle - start, "backward": time.perf_counter() - middle}

    with compiled_meanwhile() as first:
        seconds = step(0)
    anew: dict[str, list[str]] = {"values": [], "lengths": []}
    for n, what in enumerate(CHANGES, 1):
        with compiled_meanwhile() as names:
            step(n)
        anew["values" if name in VALUES_ALONE else what] += names
    print(json.dumps(seconds | {"compiled": first, "anew": anew}))


@contextlib.contextmanager
def compiled_meanwhile() -> Iterator[list[str]]:
    """The names of the kernels that Triton compiles meanwhile, or loads from its cache on disk."""
    names: list[str] = []
    if not backends.HAS_TRITON:
        yield names
        return
    from triton import knobs

    compilation, before = knobs.compilation, knobs.compilation.listener
    compilation.listener = lambda **about: names.append(about["src"].name)
    try:
        yield names
    finally:
        compilation.listener = before


def figures(name: str, impl: str, device: torch.device) -> dict[str, Any]:
    """Of `one` in a fresh process; "error" where it fails."""
    told = {"variant": name, "impl": impl}
    with tempfile.TemporaryDirectory() as cache:
        code = CODE.format(arguments=(name, impl, device.type))
        try:
            done = subprocess.run(
                [sys.executable, "-c", code],
                env={**os.environ, "TRITON_CACHE_DIR": cache},
                capture_output=True,
                text=True,
                check=False,
                timeout=TIMEOUT,
            )
        except subprocess.TimeoutExpired:
            return told | {"error": f"took longer than {TIMEOUT:.0f} s"}
    if done.returncode:
        last = done.stderr.strip().splitlines()[-4:] or ["no output"]  # a C++ library may speak last
        return told | {"error": " | ".join(x.strip() for x in last)[:600]}
    return told | json.loads(done.stdout.splitlines()[-1])


def text(found: dict[str, Any], goals: bool = False) -> str:
    """One line; `goals` adds what is wanted."""
    start = f"{found['variant']:<10}{found['impl']:<10}"
    if "error" in found:
        return f"{start}error: {found['error']}"
    seconds = [
        f"{which} {found[which]:5.2f} s"
        + (f" (at most {most}: {'yes' if found[which] <= most else 'NO'})" if goals else "")
        for which, most in LIMITS.items()
    ]
    anew = "; ".join(
        f"{', '.join(names) or 'nothing'} compiled for other {what}"
        for what, names in found["anew"].items()
    )
    return f"{start}{', '.join(seconds)}; {len(found['compiled'])} kernels; {anew}"


def measure(impls: Sequence[str], device: torch.device, at_once: int) -> Iterator[dict[str, Any]]:
    """The figures of each variant on each backend, in their order."""
    jobs = [(name, impl) for impl in impls if impl != "torch" for name in NAMES]
    with ThreadPoolExecutor(at_once) as pool:
        yield from pool.map(lambda job: figures(job[0], job[1], device), jobs)


def run(impls: Sequence[str], device: torch.device, folder: Path, goals: bool) -> None:
    """Measure, print each, and write folder/first_calls.json."""
    at_once = max(1, (os.cpu_count() or 1) // 4)
    protocol = {"processes": at_once, "seconds": "wall clock of one call, its kernels compiled"}
    data: dict[str, Any] = {"subject": "first_calls", "first_calls": []}
    data["runs"] = [report.describe_run({}, protocol)]
    for found in measure(impls, device, at_once):
        print(text(found, goals), flush=True)
        data["first_calls"].append(found)
        report.save(folder / "first_calls.json", data)
    print(f"\nwrote {folder / 'first_calls.json'}")
