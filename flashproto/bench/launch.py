"""What comes before a kernel: import time, the first call's, and the host time of later calls.

Limits, on the processor that drives an H200: microseconds of a later call (LIMITS), seconds of the
first one of the Hopper kernels, compilation included (FIRST_LIMITS).  Such processors differ, and one
does from hour to hour where it is shared.  So the microseconds are also given as on the one for which
the limits were set, which is known by what torch's own calls took there (TORCH_THERE).

The calls of attention's variants, of sequences of any length and of a cache are compared with attention
of as many tokens, and beside torch's call where it has one: it has none for a cache, nor has
FlexAttention.
"""

from __future__ import annotations

import inspect
import json
import os
import re
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention.varlen import varlen_attn

import flashproto
from flashproto import backends, masks

from .measure import one_line
from .timing import host_microseconds

LIMITS = {"rms_norm": 15, "layer_norm": 15, "softmax": 15, "attention": 25, "attention backward": 60}
TORCH_THERE = {"torch rms_norm": 7.4, "torch layer_norm": 8.3, "torch attention": 14}
CALLS_BEFORE = 2  # of equal kind: the first compiles, the second is the first of the quick path
LAYERS = 16  # calls in one graph
IN_ONE_GRAPH = f", each of {LAYERS} in one graph"
FIRST_LIMITS = {"forward": 6, "backward": 10}
BOTH = " forward and backward"  # ends the name of a row
KINDS = (BOTH, " with grad", "")  # of rows, each compared with attention's row of the same kind
VARLEN_CAUSAL: dict[str, Any] = (  # torch 2.10 has is_causal
    {"window_size": (-1, 0)}
    if "window_size" in inspect.signature(varlen_attn).parameters
    else {"is_causal": True}
)

FIRST_CALL = """
import json, sys, time, torch, flashproto
device, impl = sys.argv[1:]
dtype = torch.bfloat16 if device == "cuda" else torch.float32
S = 4096 if device == "cuda" else 64
like = {"device": device, "dtype": dtype, "requires_grad": True}
q, k, v = (torch.randn(1, 4, S, 64, **like) for _ in range(3))
def wait():
    if device == "cuda":
        torch.cuda.synchronize()
wait()
start = time.perf_counter()
out = flashproto.attention(q, k, v, causal=True, impl=impl)
wait()
forward = time.perf_counter() - start
start = time.perf_counter()
out.sum().backward()
wait()
print(json.dumps({"forward": forward, "backward": time.perf_counter() - start}))
"""


def import_seconds(module: str, repeats: int = 3) -> float:
    """Seconds that a fresh Python takes to import a module (best of several)."""
    best = float("inf")
    for _ in range(repeats):
        start = time.perf_counter()
        subprocess.run([sys.executable, "-c", f"import {module}"], check=True)
        best = min(best, time.perf_counter() - start)
    return best


def first_call_seconds(impl: str, device: torch.device) -> dict[str, float]:
    """Seconds of the first causal attention in a fresh process with an empty Triton cache."""
    with tempfile.TemporaryDirectory() as cache:
        done = subprocess.run(
            [sys.executable, "-c", FIRST_CALL, device.type, impl],
            env={**os.environ, "TRITON_CACHE_DIR": cache},
            capture_output=True,
            text=True,
            check=True,
        )
    seconds: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
    return seconds


class NoWork(torch.autograd.Function):
    """What a backward takes that computes nothing: on a GPU mostly the engine's handing over to its
    thread and back."""

    @staticmethod
    def forward(ctx, q, k, v):
        return torch.empty_like(q)

    @staticmethod
    def backward(ctx, dout):
        return dout, dout, dout


def in_one_thread(call: Callable[[], Any]) -> Any:
    """The call, without autograd's handing over to a thread of the device; anyone may ask for that."""
    with torch.autograd.set_multithreading_enabled(False):
        return call()


def in_one_graph(
    function: Callable[..., Any], q: Tensor, k: Tensor, v: Tensor
) -> Callable[[], tuple[Tensor, ...]]:
    """The gradients of LAYERS calls in a row, of keys and values of their own, as in a model."""
    q, leaves = q.detach().requires_grad_(), []
    out = q
    for _ in range(LAYERS):
        own = [t.detach().clone().requires_grad_() for t in (k, v)]
        out = function(out, *own)
        leaves += own
    return partial(torch.autograd.grad, out, [q, *leaves], torch.ones_like(out), retain_graph=True)


def backward_rows(
    name: str, function: Callable[..., Any], tensors: tuple[Tensor, Tensor, Tensor]
) -> dict[str, Callable[[], Any]]:
    """The gradients of a function by torch.autograd.grad, by that in one thread, by its node alone,
    called in this thread (all of the backward where that is one node, as of a kernel), and of several
    calls in one graph."""
    *_, out = (function(*tensors) for _ in range(CALLS_BEFORE))
    dout = torch.ones_like(out)
    node = getattr(out.grad_fn, "apply", out.grad_fn)  # of a Function in Python, or torch's own
    grad = partial(torch.autograd.grad, out, tensors, dout, retain_graph=True)
    return {
        f"{name} backward": grad,
        f"{name} backward, in one thread": partial(in_one_thread, grad),
        f"{name} backward, its node": torch.no_grad()(partial(node, dout)),
        f"{name} backward{IN_ONE_GRAPH}": in_one_graph(function, *tensors),
    }


def torch_swiglu(gate: Tensor, up: Tensor) -> Tensor:
    return F.silu(gate) * up


def torch_attention_qkv(qkv: Tensor, heads: int) -> Tensor:
    """Causal, on views [B, H, S, D] of qkv [B, S, 3 H D]."""
    q, k, v = (x.unflatten(2, (heads, -1)).transpose(1, 2) for x in qkv.chunk(3, 2))
    return F.scaled_dot_product_attention(q, k, v, is_causal=True)


def forward_and_backward(
    function: Callable[..., Any], leaves: Sequence[Tensor], dout: Tensor
) -> tuple[Tensor, ...]:
    return torch.autograd.grad(function(*leaves), leaves, dout)


def both_rows(
    functions: Mapping[str, Callable[..., Any]], tensors: tuple[Tensor, Tensor, Tensor]
) -> dict[str, Callable[[], Any]]:
    """The calls of q, k, v and, where they want gradients, the same forward and backward."""
    if not tensors[0].requires_grad:
        return {name: partial(function, *tensors) for name, function in functions.items()}
    dout = torch.ones_like(tensors[0])
    rows: dict[str, Callable[[], Any]] = {}
    for name, function in functions.items():
        rows[f"{name} with grad"] = partial(function, *tensors)
        rows[f"{name}{BOTH}"] = partial(forward_and_backward, function, tensors, dout)
    return rows


def variant_rows(impl: str | None, q: Tensor, k: Tensor, v: Tensor) -> dict[str, Callable[[], Any]]:
    """A mask of documents, the same documents as sequences, and a mask of keys; q, k, v [B, H, S, D].
    scaled_dot_product_attention has no `impl`: it runs on the default backend."""
    S, device = q.shape[2], q.device
    ids = torch.arange(S, device=device) // (S // 2)
    seen = (ids[:, None] == ids).tril()
    keys = (torch.arange(S, device=device) < S - 4)[None, None, None]
    cu = torch.tensor([0, S // 2, S], dtype=torch.int32, device=device)
    packed = [x.detach()[0].transpose(0, 1).contiguous() for x in (q, k, v)]
    q_, k_, v_ = (x.requires_grad_(q.requires_grad) for x in packed)
    sequences = cu, cu, S // 2, S // 2

    def varlen(function: Callable[..., Any], **options: Any) -> Callable[..., Any]:
        return lambda q, k, v: function(q, k, v, *sequences, **options)

    documents = masks.documents(ids)
    attention = partial(flashproto.attention, causal=True, mask=documents, impl=impl)
    torch_attention = F.scaled_dot_product_attention
    return both_rows(
        {
            "flashproto.attention mask=documents": attention,
            "torch attention mask=documents": partial(torch_attention, attn_mask=seen),
            "flashproto.scaled_dot_product_attention key mask": partial(
                flashproto.scaled_dot_product_attention, attn_mask=keys
            ),
            "torch scaled_dot_product_attention key mask": partial(torch_attention, attn_mask=keys),
        },
        (q, k, v),
    ) | both_rows(
        {
            "flashproto.attention_varlen": varlen(flashproto.attention_varlen, causal=True, impl=impl),
            "torch attention_varlen": varlen(varlen_attn, **VARLEN_CAUSAL),
        },
        (q_, k_, v_),
    )


def cache_rows(impl: str | None, q: Tensor, k: Tensor, v: Tensor) -> dict[str, Callable[[], Any]]:
    """One query, all keys: of tensors, and of a cache that is read, appended to, or in pages.  q [B, H,
    1, D]; k, v [B, H, S, D], S even."""
    B, H, S, D = k.shape
    caches = [x.transpose(1, 2).contiguous() for x in (k, v)]
    pages = [x.view(2 * B, S // 2, H, D) for x in caches]
    table = torch.arange(2 * B, dtype=torch.int32, device=q.device).view(B, 2)
    lengths = torch.full((B,), S, dtype=torch.int32, device=q.device)
    angles = torch.arange(S * D // 2, device=q.device).view(S, D // 2) / S
    tables = angles.cos(), angles.sin()
    new = {"k": k[:, :, :1].contiguous(), "v": v[:, :, :1].contiguous()}
    cached = partial(flashproto.attention_with_kv_cache, q, impl=impl)
    name = "flashproto.attention_with_kv_cache"
    return {
        "flashproto.attention one query": partial(flashproto.attention, q, k, v, impl=impl),
        "torch attention one query": partial(F.scaled_dot_product_attention, q, k, v),
        f"{name} read": partial(cached, *caches, lengths=lengths),
        f"{name} paged": partial(cached, *pages, lengths=lengths, page_table=table),
        f"{name} append + RoPE": partial(
            cached, *(x.clone() for x in caches), lengths=lengths - 1, rope=tables, **new
        ),
    }


def host_rows(impl: str | None, device: torch.device) -> dict[str, Callable[[], Any]]:
    """Calls on tiny inputs, without and with gradients, beside PyTorch's own; of attention alone on
    backend "hopper", which has no other.  The public functions alone are called, so that the rows can
    be those of another commit (launch_beside.py)."""
    like: dict[str, Any] = {
        "device": device,
        "dtype": torch.bfloat16 if device.type == "cuda" else torch.float32,
    }
    rows: dict[str, Callable[[], Any]] = {}
    for suffix, wants in (("", False), (" with grad", True)):

        def randn(*shape: int, wants: bool = wants) -> Tensor:
            return torch.randn(shape, **like).requires_grad_(wants)

        for columns in (256, 4096):
            x, w, b = randn(8, columns), randn(columns), randn(columns)
            ending = suffix if columns == 256 else f", {columns} columns{suffix}"
            rows |= {
                f"flashproto.rms_norm{ending}": partial(flashproto.rms_norm, x, columns, w, impl=impl),
                f"torch rms_norm{ending}": partial(F.rms_norm, x, (columns,), w),
                f"flashproto.layer_norm{ending}": partial(
                    flashproto.layer_norm, x, columns, w, b, impl=impl
                ),
                f"torch layer_norm{ending}": partial(F.layer_norm, x, (columns,), w, b),
            }
        x, up = randn(8, 256), randn(8, 256)
        targets = torch.randint(256, (8,), device=device)
        q, k, v, qkv = *(randn(1, 2, 16, 64) for _ in range(3)), randn(1, 16, 6 * 64)
        attention = partial(flashproto.attention, causal=True, impl=impl)
        torch_attention = partial(F.scaled_dot_product_attention, is_causal=True)
        rows |= {
            f"flashproto.softmax{suffix}": partial(flashproto.softmax, x, impl=impl),
            f"torch softmax{suffix}": partial(torch.softmax, x, -1),
            f"flashproto.swiglu{suffix}": partial(flashproto.swiglu, x, up, impl=impl),
            f"torch swiglu{suffix}": partial(torch_swiglu, x, up),
            f"flashproto.cross_entropy{suffix}": partial(
                flashproto.cross_entropy, x, targets, impl=impl
            ),
            f"torch cross_entropy{suffix}": partial(F.cross_entropy, x, targets),
            **both_rows(
                {"flashproto.attention": attention, "torch attention": torch_attention}, (q, k, v)
            ),
            f"flashproto.attention_qkv{suffix}": partial(
                flashproto.attention_qkv, qkv, 2, 2, causal=True, impl=impl
            ),
            f"torch attention_qkv{suffix}": partial(torch_attention_qkv, qkv, 2),
        }
        rows |= variant_rows(impl, q, k, v)
        if not wants:
            rows |= cache_rows(impl, q[:, :, :1].contiguous(), k, v)
        else:
            for name, function in (
                ("flashproto.attention", attention),
                ("torch attention", torch_attention),
                ("torch attention of no work", NoWork.apply),
            ):
                rows |= backward_rows(name, function, (q, k, v))
    return {name: call for name, call in rows.items() if impl != "hopper" or "attention" in name}


def running_rows(
    impl: str, device: torch.device, names: str = ""
) -> tuple[dict[str, Callable[[], Any]], dict[str, str]]:
    """The rows whose names match the expression and which run, each called before, and the errors of
    those that do not.  The backend becomes the default one."""
    backends.set_default(impl)
    running, errors = {}, {}
    for name, call in host_rows(impl, device).items():
        if re.search(names, name):
            try:
                for _ in range(CALLS_BEFORE):
                    call()
                running[name] = call
            except Exception as error:
                errors[name] = one_line(error)
    return running, errors


def calls_in(name: str) -> int:
    """The calls of which a row's time is."""
    return LAYERS if name.endswith(IN_ONE_GRAPH) else 1


def measure_launch(impl: str, device: torch.device, names: str = "") -> dict[str, Any]:
    """Every figure of this file for one backend, of the rows whose names match."""
    plain, ours = import_seconds("torch"), import_seconds("flashproto")
    before = backends.get_default()
    try:
        running, errors = running_rows(impl, device, names)
        host = host_microseconds(running)
    finally:
        backends.set_default(before)
    for name, (median, lowest) in host.items():
        host[name] = median / calls_in(name), lowest / calls_in(name)
    return {
        "impl": impl,
        "import_torch_s": plain,
        "import_flashproto_s": ours,
        "import_ratio": ours / plain,
        "first_attention_s": first_call_seconds(impl, device),
        "host_us": host,
        "errors": errors,
    }


def launch_text(figures: dict[str, Any], goals: bool = False) -> str:
    """The figures in words; `goals` adds the limits, and times as on the host that they are of."""
    first = figures["first_attention_s"]
    most = FIRST_LIMITS if goals and figures["impl"] == "hopper" else {}
    lines = [
        f"backend {figures['impl']}",
        f"import torch {figures['import_torch_s']:.2f} s, import flashproto "
        f"{figures['import_flashproto_s']:.2f} s, ratio {figures['import_ratio']:.2f}",
        "first causal attention with an empty cache: "
        + ", ".join(f"{name} {first[name]:.2f} s{_limit(most.get(name))}" for name in first),
        "host time of a call on a tiny input, microseconds: median and lowest of rounds in turn"
        + "; then the lowest as on the host for which the limits were set" * goals
        + "; last the lowest in times of attention's",
    ]
    host = figures["host_us"]
    there, width = speed_there(host), max(map(len, host))
    for name, (us, lowest) in host.items():
        operator = name.removeprefix("flashproto.").removesuffix(" with grad").partition(",")[0]
        ours = name.startswith("flashproto.") and figures["impl"] in ("hopper", "triton")
        most_us = LIMITS.get(operator) if ours else None
        limit = f"{_limit(most_us):<13}{lowest * there:8.1f}" if goals else ""
        _, unit = host.get(attention_row(name), (None, None))
        times = f"{lowest / unit:8.2f}x" if unit else ""
        lines.append(f"  {name:<{width}}{us:8.1f}{lowest:8.1f}{limit}{times}")
    lines += [f"  {name}: {error}" for name, error in figures.get("errors", {}).items()]
    return "\n".join(lines)


def attention_row(name: str) -> str | None:
    """The row with which one of attention is compared; None for others, and of a backward alone."""
    if "attention" not in name or " backward" in name.removesuffix(BOTH):
        return None
    return "flashproto.attention" + next(kind for kind in KINDS if name.endswith(kind))


def speed_there(host_us: Mapping[str, tuple[float, float]]) -> float:
    """What to multiply the lowest times by to have those on the host that the limits are of, by the
    geometric mean of torch's own calls; NaN where none was timed."""
    ratios = [us / host_us[name][1] for name, us in TORCH_THERE.items() if name in host_us]
    return statistics.geometric_mean(ratios) if ratios else float("nan")


def _limit(most: float | None) -> str:
    return "" if most is None else f" (at most {most})"
