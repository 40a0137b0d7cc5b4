"""Ring attention on the GPUs of one host beside the same attention on one of them, causal.

    torchrun --nproc-per-node 2 -m flashproto.bench ring

For each total length it prints the milliseconds of a call on one GPU and of the shards' call on all,
their TFLOP/s, and what share that is of as many GPUs each at the one's rate.  Calls on one and on all
take turns; the slowest rank's time counts, and of repeats the median.  Each rank's results are checked
first, at some of its own rows: out, lse and dq of queries, dk and dv of keys, against float64, beside
the same operator by operator in the dtype of the inputs.

Where it runs, "torch" is torch's own context_parallel as it is by default, which gathers all keys and
values, over its SDPA with flash or cuDNN kernels.  Its out and gradients are compared with those of
flashproto.
"""

from __future__ import annotations

import argparse
import contextlib
import math
import os
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

import flashproto

from .. import distributed
from . import report
from .measure import one_line

# Of n times the one-GPU rate, by GPUs and pass.
GOALS: dict[tuple[int, str], dict[int, float]] = {
    (2, "forward+backward"): {131072: 0.88, 262144: 0.93},
    (4, "forward+backward"): {131072: 0.85, 262144: 0.92, 524288: 0.92},
    (4, "forward"): {262144: 0.85, 524288: 0.90},
}
TORCH = {"torch, flash": SDPBackend.FLASH_ATTENTION, "torch, cudnn": SDPBackend.CUDNN_ATTENTION}
UNIT = {torch.bfloat16: 2.0**-7, torch.float16: 2.0**-10, torch.float32: 2e-5}  # at 1, see `worst`
PASSES = {"forward": 1.0, "forward+backward": 3.5}  # in the products of a forward pass

Inputs = Sequence[Tensor]  # q, k, v and dout, of the whole sequence
Calls = dict[str, Callable[[], Any]]  # by pass


def parse(arguments: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m flashproto.bench ring",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    lengths = ",".join(map(str, GOALS[2, "forward+backward"]))
    add("--tokens", default=lengths, metavar="N,...", help=f"total lengths; default: {lengths}")
    add("--heads", type=int, default=16)
    add("--kv-heads", type=int, help="default: as many")
    add("--head-dim", type=int, default=128)
    add("--method", default="ring", choices=("ring", "all_gather"))
    add("--impl", metavar="NAME", help="flashproto's backend; default: what it chooses")
    add("--without-torch", action="store_true", help="leave torch's context_parallel out")
    add("--repeats", type=int, default=5)
    add("--rows", type=int, default=256, help="queries, and keys, of all ranks that are checked")
    add("--out", type=Path, default=Path("runs/bench"), metavar="DIR", help="default: runs/bench")
    return parser.parse_args(arguments)


# --- the two calls --------------------------------------------------------------------------------


def calls(run: Callable[..., Tensor], inputs: Inputs) -> Calls:
    """The passes of PASSES of a function of q, k and v."""
    *leaves, dout = (x.detach() for x in inputs)
    leaves = [x.requires_grad_() for x in leaves]

    def forward() -> Any:
        with torch.no_grad():
            return run(*leaves)

    return {
        "forward": forward,
        "forward+backward": lambda: torch.autograd.grad(run(*leaves), leaves, dout),
    }


def milliseconds(call: Callable[[], Any], device: torch.device) -> float:
    """Of one call, all ranks that make it having begun together."""
    if device.type != "cuda":
        start = time.perf_counter()
        call()
        return (time.perf_counter() - start) * 1e3
    before, behind = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    torch.cuda.synchronize()
    before.record()
    call()
    behind.record()
    behind.synchronize()
    return before.elapsed_time(behind)


def slowest(ms: float, device: torch.device) -> float:
    found = torch.tensor(ms, device=device)
    dist.all_reduce(found, dist.ReduceOp.MAX)
    return float(found)


def measured(
    one: Calls, shards: dict[str, Calls], device: torch.device, repeats: int
) -> dict[str, dict[str, list[float]]]:
    """{pass: {"one" or a name in shards: milliseconds}}; the first rank alone makes calls on one."""
    times: dict[str, dict[str, list[float]]] = {}
    for which in PASSES:
        times[which] = {name: [] for name in ("one", *shards)}
        for repeat in range(-1, repeats):  # the first is for what is compiled and allocated
            for name, found in times[which].items():
                dist.barrier()
                call = one if name == "one" else shards[name]
                makes = name != "one" or dist.get_rank() == 0
                ms = slowest(milliseconds(call[which], device) if makes else 0.0, device)
                if repeat >= 0:
                    found.append(ms)
    return times


# --- torch's own ----------------------------------------------------------------------------------


@contextlib.contextmanager
def torch_takes_shards(device: torch.device) -> Iterator[None]:
    """In here F.scaled_dot_product_attention and its gradient take shards as flashproto's: of 2N chunks
    of the sequence rank r has chunks r and 2N - 1 - r."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor.experimental import context_parallel

    size = dist.get_world_size()
    chunks = torch.zeros(2 * size, device=device)  # it wants something to deal out
    mesh = init_device_mesh(device.type, (size,))
    with context_parallel(mesh, buffers=[chunks], buffer_seq_dims=[0]):
        yield


def by_torch(backend: SDPBackend, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    with sdpa_kernel(backend):
        grouped = q.shape[1] != k.shape[1]
        return F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=grouped)


def of_torch(ours: Calls, inputs: Inputs) -> tuple[dict[str, Calls], dict[str, str]]:
    """The contenders of TORCH that give what ours gives on these shards, and what the others say; the
    same on all ranks."""
    made, errors = {}, {}
    wanted = ours["forward"](), *ours["forward+backward"]()
    allowed = 8 * UNIT[inputs[0].dtype]
    for name, backend in TORCH.items():
        theirs = calls(partial(by_torch, backend), inputs)
        said, off = "another rank failed", math.inf
        try:
            found = theirs["forward"](), *theirs["forward+backward"]()
            off = max(map(distance, found, wanted))
            said = f"of a chunk's largest it is off by {{:.2g}}, and {allowed:.2g} is allowed"
        except Exception as error:  # of any kind, as torch's API is a prototype
            said = one_line(error).replace("{", "{{").replace("}", "}}")
        most = slowest(off, inputs[0].device)
        if most <= allowed:
            made[name] = theirs
        else:
            errors[name] = said.format(most)
    return made, errors


def distance(a: Tensor, b: Tensor) -> float:
    """The largest difference of a chunk, of two, relative to its largest element; inf beside NaN."""
    worst = 0.0
    for x, y in zip(a.chunk(2, 2), b.chunk(2, 2), strict=True):
        off = float((x - y).abs().max() / y.abs().max())
        worst = max(worst, math.inf if math.isnan(off) else off)
    return worst


# --- some rows, by definition ---------------------------------------------------------------------


def queries_by_definition(inputs: Inputs, at: Tensor, dtype: torch.dtype) -> dict[str, Tensor]:
    """out, lse and dq of the queries `at`, [H, len(at), ...], one head after another."""
    made = []
    for head in range(inputs[0].shape[1]):
        q, k, v, dout = of_head(inputs, head, dtype)
        scale = q.shape[1] ** -0.5
        hidden = torch.arange(len(k), device=k.device) > at[:, None]
        s = ((q[at] @ k.T) * scale).masked_fill(hidden, -torch.inf)
        p = torch.softmax(s, -1)
        out = p @ v
        dp = dout[at] @ v.T - (dout[at] * out).sum(-1, keepdim=True)
        made.append((out, torch.logsumexp(s, -1), ((p * dp) @ k) * scale))
    return dict(zip(("out", "lse", "dq"), map(torch.stack, zip(*made, strict=True)), strict=True))


def keys_by_definition(
    inputs: Inputs, at: Tensor, dtype: torch.dtype, out: Tensor, lse: Tensor
) -> dict[str, Tensor]:
    """dk and dv of the keys `at` for each query head, given the whole sequence's out and lse."""
    made = []
    for head in range(inputs[0].shape[1]):
        q, k, v, dout = of_head(inputs, head, dtype)
        scale = q.shape[1] ** -0.5
        hidden = torch.arange(len(q), device=q.device)[:, None] < at
        s = ((q @ k[at].T) * scale).masked_fill(hidden, -torch.inf)
        p = torch.exp(s - lse[0, head, :, None].to(dtype))
        delta = (dout * out[0, head].to(dtype)).sum(-1, keepdim=True)
        ds = p * (dout @ v[at].T - delta)
        made.append(((ds.T @ q) * scale, p.T @ dout))
    dk, dv = map(torch.stack, zip(*made, strict=True))
    groups = inputs[1].shape[1], -1
    return {"dk": dk.unflatten(0, groups).sum(1), "dv": dv.unflatten(0, groups).sum(1)}


def of_head(inputs: Inputs, head: int, dtype: torch.dtype) -> list[Tensor]:
    """q, k, v and dout [S, D] of a query head."""
    group = inputs[0].shape[1] // inputs[1].shape[1]
    heads = head, head // group, head // group, head
    return [x[0, h].to(dtype) for x, h in zip(inputs, heads, strict=True)]


def worst(inputs: Inputs, impl: str | None, method: str, rows: int) -> dict[str, tuple[float, float]]:
    """{result: (largest error, what is allowed)} over rows of all ranks: twice the error of the same in
    the inputs' dtype and a unit in the last place at 1."""
    dtype = inputs[0].dtype
    shards = [distributed.shard(x, 2).requires_grad_() for x in inputs]
    *leaves, dout = shards
    out, lse = distributed.ring_attention(
        *leaves, causal=True, return_lse=True, method=method, impl=impl
    )
    gradients = torch.autograd.grad(out, leaves, dout)
    names = ("out", "lse", "dq", "dk", "dv")
    found = dict(zip(names, (x.detach() for x in (out, lse, *gradients)), strict=True))
    positions = distributed.positions(inputs[0].shape[2], device=dout.device)
    some = torch.randperm(len(positions), device=dout.device)[: max(rows // dist.get_world_size(), 1)]
    at = positions[some]
    whole = [distributed.unshard(found[name], 2) for name in ("out", "lse")]
    exact, plain = (
        queries_by_definition(inputs, at, d) | keys_by_definition(inputs, at, d, *whole)
        for d in (torch.float64, dtype)
    )
    errors = {}
    for name in names:
        ours, eager = (
            float((x.double() - exact[name]).abs().max())
            for x in (found[name][0].index_select(1, some), plain[name])
        )
        ours, eager = slowest(ours, dout.device), slowest(eager, dout.device)
        errors[name] = ours, 2 * eager + UNIT[dtype]
    return errors


# --- the run --------------------------------------------------------------------------------------


def cell(tokens: int, options: argparse.Namespace, device: torch.device) -> dict[str, Any]:
    """The figures of one length."""
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    torch.manual_seed(tokens)  # the same on all ranks
    kv_heads = options.kv_heads or options.heads
    heads = options.heads, kv_heads, kv_heads, options.heads
    inputs = [torch.randn(1, n, tokens, options.head_dim, device=device, dtype=dtype) for n in heads]
    errors = worst(inputs, options.impl, options.method, options.rows)

    def one(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        made = flashproto.attention(q, k, v, causal=True, impl=options.impl)
        assert isinstance(made, Tensor)
        return made

    def all_of_them(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        made = distributed.ring_attention(
            q, k, v, causal=True, method=options.method, impl=options.impl
        )
        assert isinstance(made, Tensor)
        return made

    shards = [distributed.shard(x, 2) for x in inputs]
    ours = calls(all_of_them, shards)
    left_out: dict[str, str] = {}
    together = {"all": ours}
    with contextlib.ExitStack() as stack:
        if not options.without_torch:
            try:
                stack.enter_context(torch_takes_shards(device))
            except Exception as error:  # as above
                left_out = dict.fromkeys(TORCH, one_line(error))
            else:
                of_theirs, left_out = of_torch(ours, shards)
                together |= of_theirs
        times = measured(calls(one, inputs), together, device, options.repeats)
    products = 4 * options.heads * options.head_dim * tokens * (tokens + 1) / 2
    passes = {}
    for which, found in times.items():
        ms = {n: statistics.median(x) for n, x in found.items()}
        passes[which] = {
            "ms": ms,
            "times": found,
            "tflop_s": {n: PASSES[which] * products / x / 1e9 for n, x in ms.items()},
            "share": ms["one"] / ms["all"] / dist.get_world_size(),
        }
    return {"passes": passes, "errors": errors, "left_out": left_out}


def text(tokens: int, found: dict[str, Any], size: int) -> str:
    lines = []
    for which, x in found["passes"].items():
        ms, rate = x["ms"], x["tflop_s"]
        line = (
            f"{tokens} tokens, {which}: one {ms['one']:.2f} ms ({rate['one']:.0f} TFLOP/s), "
            f"{size} ranks {ms['all']:.2f} ms ({rate['all']:.0f} TFLOP/s): {x['share']:.3f} of {size} "
            "times the rate of one"
        )
        goal = GOALS.get((size, which), {}).get(tokens)
        lines.append(line + (f", goal {goal}" if goal else ""))
        lines += [f"  {n} {ms[n]:.2f} ms ({rate[n]:.0f} TFLOP/s)" for n in TORCH if n in ms]
    for name, (ours, allowed) in found["errors"].items():
        verdict = "" if ours <= allowed else "  WRONG"
        lines.append(f"  {name}: largest error {ours:.2e}, allowed {allowed:.2e}{verdict}")
    lines += [f"  {name}: left out, {why}" for name, why in found["left_out"].items()]
    return "\n".join(lines)


def main(arguments: Sequence[str]) -> None:
    options = parse(arguments)
    rank = int(os.environ.get("LOCAL_RANK", "0"))
    ours = not dist.is_initialized()
    on_gpus = torch.cuda.is_available() if ours else dist.get_backend() == "nccl"
    device = torch.device("cuda", rank) if on_gpus else torch.device("cpu")
    if on_gpus:
        torch.cuda.set_device(device)
    if ours:
        dist.init_process_group("nccl" if on_gpus else "gloo")
    size = dist.get_world_size()
    data: dict[str, Any] = {"subject": "ring", "runs": [], "cells": {}}
    told = {
        name: getattr(options, name) for name in ("heads", "kv_heads", "head_dim", "method", "impl")
    }
    data["runs"].append(report.describe_run({}, told | {"ranks": size, "repeats": options.repeats}))
    wrong = False
    for tokens in map(int, options.tokens.split(",")):
        found = cell(tokens, options, device)
        data["cells"][str(tokens)] = found
        wrong |= not all(ours <= allowed for ours, allowed in found["errors"].values())
        if dist.get_rank() == 0:
            print(text(tokens, found, size), flush=True)
            report.save(options.out / "ring.json", data)
    if ours:
        dist.destroy_process_group()
    if wrong:
        raise SystemExit("flashproto.bench: a result of ring attention is wrong")
