"""Text, token by token: nn.GPT.generate beside a plain model of the same weights under torch.compile.

    python -m flashproto.bench generate

Three parts, --parts: `decode`, greedy tokens behind a prompt, with a room of 1024 (on a GPU in bfloat16
with CUDA graphs on both sides: ours, and torch.compile(mode="reduce-overhead") of plain_decoder.py with
SDPA and with FlexAttention; prompts go through models that are not compiled); `lookup`, guesses from
the text that is there, for one sequence; `cpu`, the cache beside the whole text put through the model
for each token, float32 on the CPU, one sequence.

The model of `lookup` writes a text that is given: its positions hold the next token, and its layers add
nothing to the stream, though they are computed as ever.  The text `round` repeats 32 tokens, so that
all guesses are right; `quotes` has passages of 24 tokens of the prompt, each behind 8 new tokens.

Each contender has a process of its own.  Tokens/s are those behind the first token, but for `cpu`,
where they are those of the whole call.  Result files have host, until the call has launched everything,
and device, what kernels take.  A file that is there is added to, so contenders may be run one after
another.  FlexAttention, which skips what the room has beyond the text, was not run on the H200.

In result files of 28 November 2026 "by modules" is one sequence whose steps call the modules of a block
one by one, as steps of several still do, and "few rows" a design with fewer launches for several
sequences, which is gone.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import statistics
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor

from ..nn import GPT, GPTConfig
from . import report, warm
from .doors import device_of_this_machine, kernels_of, wait
from .plain_decoder import writer
from .workers import command_of, in_process

# Of each part its contenders, and how many of the first of them are compared with.
PARTS: dict[str, tuple[list[str], int]] = {
    "decode": (["sdpa", "flex", "flashproto"], 2),
    "lookup": (["plain", "4 guesses", "8 guesses", "15 guesses"], 1),
    "cpu": (["recomputed", "flashproto"], 1),
}
GOALS = {"decode B64": 1.3, "decode B1": 1.15, "lookup B1": 1.5, "cpu B1": 5.0}
TEXTS = ("round", "quotes")
ROOM = 1024
CPU_SIZES = 64, 128  # tokens of the prompt, and new ones
KEPT = 4, 32  # sequences and tokens of each that are written down
GUESSES = 15  # the most that are made

Write = Callable[[int], Tensor]


def parse(arguments: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m flashproto.bench generate",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add("--parts", default=",".join(PARTS), metavar="NAME,...", help="default: all")
    names = ", ".join(dict.fromkeys(name for listed, _ in PARTS.values() for name in listed))
    add("--contenders", default="", metavar="NAME,...", help=f"{names}; default: all")
    add("--models", default="124m,1b", metavar="NAME,...", help="of decode: presets; default: 124m,1b")
    add("--batches", default="64,1", metavar="N,...", help="of decode; default: 64,1")
    add("--prompt", type=int, default=128, help="tokens of a prompt (128)")
    add("--new", type=int, default=512, help="tokens to add (512)")
    add("--tiny", action="store_true", help="two small layers, for a CPU")
    add("--compile", action="store_true", help="torch.compile on a CPU too")
    add("--ahead", type=int, default=0, metavar="N", help="compile in N processes at a time first")
    add("--seconds", type=float, default=300, help="for one contender; then it is left out")
    add("--out", type=Path, default=Path("runs/bench"), metavar="DIR", help="default: runs/bench")
    add("--join", nargs="+", type=Path, metavar="FILE", help="only add what these files hold to DIR's")
    add("--compile-only", action="store_true", help=argparse.SUPPRESS)
    add("--worker", help=argparse.SUPPRESS)  # [part, model, batch or text, contender] in this process
    return parser.parse_args(arguments)


# --- one contender, in a process of its own -------------------------------------------------------


def config_of(name: str, options: argparse.Namespace, **changes: Any) -> GPTConfig:
    config = GPTConfig.preset(name, **changes)
    if not options.tiny:
        return config
    sizes: dict[str, Any] = {"vocab_size": 97, "n_layers": 2, "n_heads": 4, "d_model": 64, "d_ff": 96}
    heads = None if config.n_kv_heads is None else 2
    return dataclasses.replace(config, **sizes, n_kv_heads=heads)


def model_of(config: GPTConfig, device: torch.device) -> GPT:
    torch.manual_seed(0)
    return GPT(config, device=device).to(dtype_on(device)).eval()


def dtype_on(device: torch.device) -> torch.dtype:
    return torch.bfloat16 if device.type == "cuda" else torch.float32


def by_cache(model: GPT, prompts: Tensor, room: int, guesses: int = 0) -> Write:
    """Our own greedy tokens; the cache keeps its CUDA graph from call to call."""
    cache = model.make_cache(len(prompts), room)
    options: dict[str, Any] = {"cuda_graph": True} if prompts.is_cuda else {}

    def write(new: int) -> Tensor:
        return model.generate(
            prompts, new, temperature=0.0, cache=cache, prompt_lookup=guesses, **options
        )

    return write


def decode(model: str, batch: int, contender: str, options: argparse.Namespace) -> dict[str, Any]:
    device = device_of_this_machine()
    decoder = model_of(config_of(model, options), device)
    prompts = torch.randint(decoder.config.vocab_size, (batch, options.prompt), device=device)
    if contender == "flashproto":
        return measured(by_cache(decoder, prompts, ROOM), prompts, options)
    is_compiled = device.type == "cuda" or options.compile
    made = measured(writer(decoder, prompts, ROOM, contender, is_compiled), prompts, options)
    skips = torch._dynamo.utils.counters["inductor"]["cudagraph_skips"]
    return made | ({"cudagraph_skips": skips} if skips else {})


def measured(write: Write, prompts: Tensor, options: argparse.Namespace) -> dict[str, Any]:
    device, new = prompts.device, options.new
    few = max(new // 8, 2)
    for n in (1, few, new)[: 2 if options.compile_only else 3]:  # what is compiled and captured
        write(n)
    wait(device)
    if options.compile_only:
        return {}

    def seconds(n: int) -> tuple[float, float]:
        """Until all is launched, and until it is done."""
        wait(device)
        start = time.perf_counter()
        write(n)
        launched = time.perf_counter() - start
        wait(device)
        return launched, time.perf_counter() - start

    host_first, first = map(min, zip(*(seconds(1) for _ in range(3)), strict=True))
    host_whole, whole = map(min, zip(*(seconds(new) for _ in range(3)), strict=True))
    (_, one), (_, some) = (kernels_of(partial(write, n), device) for n in (1, few))
    sequences, tokens = KEPT
    return {
        "first_ms": first * 1e3,
        "token_ms": (whole - first) * 1e3 / (new - 1),
        "host_token_ms": (host_whole - host_first) * 1e3 / (new - 1),
        "device_token_ms": (some - one) / (few - 1),
        "tokens_s": len(prompts) * (new - 1) / (whole - first),
        "tokens": write(new)[:sequences, options.prompt : options.prompt + tokens].flatten().tolist(),
    }


def text_of(kind: str, options: argparse.Namespace, vocabulary: int) -> Tensor:
    """The prompt and all that is to follow."""
    generator, length = torch.Generator().manual_seed(0), options.prompt + options.new
    prompt = torch.randint(vocabulary, (options.prompt,), generator=generator)
    if kind == "round":
        return prompt[:32].repeat(-(-length // 32))[:length]
    parts, count = [prompt], options.prompt
    while count < length:
        first = int(torch.randint(max(options.prompt - 24, 1), (), generator=generator))
        parts += [torch.randint(vocabulary, (8,), generator=generator), prompt[first : first + 24]]
        count += sum(map(len, parts[-2:]))
    return torch.cat(parts)[:length]


def that_writes(text: Tensor, config: GPTConfig, device: torch.device) -> GPT:
    """A model whose likeliest token at position i is text[i + 1]."""
    model = model_of(config, device)
    assert model.positions is not None and model.head is not None
    with torch.no_grad():
        for block in cast(Any, model.blocks):
            for layer in (block.attention.out, block.mlp.down):
                layer.weight.zero_()
        model.embedding.weight.zero_()
        model.positions.weight[: len(text) - 1] = model.head.weight[text[1:].to(device)]
    return model


def lookup(model: str, kind: str, contender: str, options: argparse.Namespace) -> dict[str, Any]:
    device = device_of_this_machine()
    config = config_of(model, options, tie_weights=False)
    text = text_of(kind, options, config.vocab_size)
    prompts = text[None, : options.prompt].to(device)
    guesses = 0 if contender == "plain" else int(contender.split()[0])
    room = min(config.context, options.prompt + options.new + GUESSES)
    write = by_cache(that_writes(text, config, device), prompts, room, guesses)
    if not torch.equal(write(options.new)[0].cpu(), text):
        raise RuntimeError("the model wrote another text")
    return measured(write, prompts, options)


def cpu(model: str, _: int, contender: str, options: argparse.Namespace) -> dict[str, Any]:
    device, (n, new) = torch.device("cpu"), CPU_SIZES
    decoder = model_of(config_of(model, options), device)
    prompts = torch.randint(decoder.config.vocab_size, (1, n))

    @torch.no_grad()
    def recomputed(new: int) -> Tensor:
        text = prompts
        for _ in range(new):  # as generate did before it had a cache
            logits = decoder(text[:, -decoder.config.context :])[0][:, -1]
            text = torch.cat([text, logits.argmax(-1, keepdim=True)], 1)
        return text

    write = recomputed if contender == "recomputed" else by_cache(decoder, prompts, n + new)
    write(2)
    start = time.perf_counter()
    text = write(new)
    whole = time.perf_counter() - start
    return {
        "tokens_s": new / whole,
        "threads": torch.get_num_threads(),
        "tokens": text[0, n : n + KEPT[1]].tolist(),
    }


WORKERS: dict[str, Callable[..., dict[str, Any]]] = {"decode": decode, "lookup": lookup, "cpu": cpu}


# --- the run --------------------------------------------------------------------------------------


def cells_of(options: argparse.Namespace) -> dict[str, list[Any]]:
    """{a cell's name: what its workers are told}."""
    cells: dict[str, list[Any]] = {}
    for part in options.parts.split(","):
        if part not in PARTS:
            raise SystemExit(f"flashproto.bench: --parts is {part!r}; it takes {', '.join(PARTS)}.")
        if part == "lookup":
            cells |= {f"lookup B1 124m {text}": [part, "124m", text] for text in TEXTS}
        elif part == "cpu":
            cells["cpu B1 124m"] = [part, "124m", 1]
        else:
            for model in options.models.split(","):
                for batch in map(int, options.batches.split(",")):
                    cells[f"decode B{batch} {model}"] = [part, model, batch]
    return cells


def text(cell: str, found: dict[str, Any]) -> str:
    """Each contender's figures, and the best of ours over the best of the others."""
    names, others = PARTS[cell.split()[0]]
    lines, rates = [f"{cell}:"], {}
    ours = next((found[n] for n in names[others:] if "tokens" in found.get(n, {})), None)
    for name in filter(found.__contains__, names):
        x = found[name]
        if "error" in x:
            lines.append(f"  {name}: {x['error']}")
            continue
        rates[name] = x["tokens_s"], x["device"]
        line = f"  {name}: {x['tokens_s']:.1f} tokens/s"
        if "token_ms" in x:
            line += (
                f", first token {x['first_ms']:.2f} ms, then {x['token_ms']:.3f} ms a step of a token"
            )
            line += f" (host {x['host_token_ms']:.3f}, device {x['device_token_ms']:.3f})"
        if ours is not None and x is not ours:
            pairs = zip(x["tokens"], ours["tokens"], strict=True)
            line += f"; {statistics.mean(a == b for a, b in pairs):.0%} of the first tokens as ours"
        if "cudagraph_skips" in x:
            line += f"; WITHOUT CUDA GRAPHS {x['cudagraph_skips']} times"
        lines.append(line)
    if {*rates} & {*names[:others]} and {*rates} & {*names[others:]}:
        best, peer = (
            max(rates[n] for n in part if n in rates) for part in (names[others:], names[:others])
        )
        goal = GOALS.get(" ".join(cell.split()[:2]))
        said = f"  {best[0] / peer[0]:.2f} times the best other's tokens/s"
        said += f", wanted {goal}" if goal else ""
        lines.append(said + ("" if best[1] == peer[1] else "; NOT ON THE SAME CARD"))
    return "\n".join(lines)


def joined(data: dict[str, Any], other: dict[str, Any]) -> None:
    """Add another file's runs and cells, whose contenders take the place of those that are there."""
    before = len(data["runs"])
    data["runs"] += other["runs"]
    for cell, found in other["cells"].items():
        own = data["cells"].setdefault(cell, {})
        own.update({name: x | {"run": x["run"] + before} for name, x in found.items()})


def main(arguments: Sequence[str]) -> None:
    options = parse(arguments)
    if options.worker is not None:
        part, *about = json.loads(options.worker)
        made = WORKERS[part](*about, options)
        on_gpu = part != "cpu" and device_of_this_machine().type == "cuda"
        print(json.dumps(made | {"device": torch.cuda.get_device_name() if on_gpu else "cpu"}))
        return
    path = options.out / "generate.json"
    data: dict[str, Any] = {"subject": "generate", "runs": [], "cells": {}}
    if path.exists():
        data = report.load(path, "generate")
    for other in options.join or ():
        joined(data, report.load(other, "generate"))
    chosen = options.contenders.split(",") if options.contenders else None
    works = [
        (cell, [*about, name])
        for cell, about in ({} if options.join else cells_of(options)).items()
        for name in PARTS[about[0]][0]
        if chosen is None or name in chosen
    ]
    if works:
        told = {n: getattr(options, n) for n in ("prompt", "new", "tiny", "compile")}
        told |= {"room": ROOM, "cpu": CPU_SIZES}
        data["runs"].append(report.describe_run({}, told))
    if options.ahead:
        once = [*arguments, "--compile-only"]
        lines = [command_of("generate", work, once) for _, work in works if work[0] != "cpu"]
        warm.run_all(lines, options.ahead, options.seconds)
    for cell, work in works:
        made = in_process("generate", work, arguments, options.seconds)
        data["cells"].setdefault(cell, {})[work[-1]] = made | {"run": len(data["runs"]) - 1}
        report.save(path, data)
        print(text(cell, {work[-1]: made}), flush=True)
    report.save(path, data)
    print("\n" + "\n\n".join(text(cell, found) for cell, found in data["cells"].items()))
    print(f"\nwrote {path}")
