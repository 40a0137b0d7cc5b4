"""transformers' models behind flashproto's door, beside what they run without it.

    python -m flashproto.bench doors

Three parts, --parts: `intervals`, attention under one document's intervals beside plain causal
attention, which decides what packed sequences cost; `train`, a training step (bfloat16 weights, fused
AdamW) of a model with the shape of Llama 3.2 1B and random weights; `generate`, tokens behind a prompt.
Each contender has a process of its own, so that neither patches nor memory meet.
Of a step the median milliseconds, GiB at most and the kernels that attention ran; of generate the
wall's and the device's milliseconds a token behind the prompt.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import flashproto
from flashproto import masks

from . import report
from .timing import make_timer
from .workers import in_process

PARTS = ("intervals", "train", "generate")
# Attention's implementation, what is patched, and whether torch.compile is used.
TRAIN = {
    "flashproto": ("proto", "flashproto", False),
    "sdpa": ("sdpa", "", False),
    "liger": ("sdpa", "liger", False),
    "flashproto compiled": ("proto", "flashproto", True),
    "sdpa compiled": ("sdpa", "", True),  # with the dense mask that transformers makes then
    "sdpa is_causal compiled": ("causal_sdpa", "", True),
    "liger compiled": ("sdpa", "liger", True),
}
# The cache, and whether the model is patched.
GENERATE = {
    "flashproto Cache": ("proto", False),
    "flashproto Cache and patch": ("proto", True),
    "sdpa StaticCache": ("static", False),
    "sdpa DynamicCache": ("dynamic", False),
}
LLAMA_1B = {
    "hidden_size": 2048,
    "intermediate_size": 8192,
    "num_hidden_layers": 16,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "vocab_size": 128256,
    "tie_word_embeddings": True,
    "max_position_embeddings": 131072,
}
TINY = LLAMA_1B | {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2}
TINY |= {"num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 97}
STEPS, WARM = 10, 4
OF_ATTENTION = ("attention", "flash", "fmha", "sdpa", "softmax")  # in the names of kernels


def parse(arguments: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m flashproto.bench doors",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add("--parts", default=",".join(PARTS), metavar="NAME,...", help="default: all")
    add("--contenders", default="", metavar="NAME,...", help="of train and generate; default: all")
    add("--batch", type=int, default=4, help="of a training step")
    add("--tokens", type=int, default=4096, help="of a sequence in training and in `intervals`")
    add("--prompts", default="32,1", metavar="N,...", help="batches of generate")
    add("--prompt", type=int, default=2048, help="tokens of a prompt")
    add("--new", type=int, default=512, help="tokens to generate")
    add("--tiny", action="store_true", help="a model of two small layers, for a CPU")
    add("--seconds", type=float, default=300, help="for one contender; then it is left out")
    add("--out", type=Path, default=Path("runs/bench"), metavar="DIR", help="default: runs/bench")
    add("--worker", help=argparse.SUPPRESS)  # [part, contender, batch] in this process
    return parser.parse_args(arguments)


def device_of_this_machine() -> torch.device:
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


def wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize()


# --- intervals beside causal ----------------------------------------------------------------------


def intervals(options: argparse.Namespace) -> dict[str, Any]:
    """{head_dim, pass: milliseconds of causal, of causal & one document, of its intervals alone}."""
    device, S = device_of_this_machine(), options.tokens
    like: dict[str, Any] = {"device": device, "requires_grad": True}
    like["dtype"] = torch.bfloat16 if device.type == "cuda" else torch.float32
    ids = torch.zeros(S, dtype=torch.int32, device=device)
    key = torch.arange(S, device=device)
    ways = {
        "causal": None,
        "document": masks.causal() & masks.documents(ids),
        "intervals": masks.intervals(key, torch.full_like(key, S)),
    }
    timer, found = make_timer(device), {}
    for D in (64, 128):
        q, k, v = (torch.randn(options.batch, 2048 // D, S, D, **like) for _ in range(3))
        dout = torch.ones_like(q)

        attend = partial(flashproto.attention, q, k, v)
        forwards: dict[str, Callable[[], Any]]
        forwards = {n: partial(attend, causal=mask is None, mask=mask) for n, mask in ways.items()}
        differentiate = partial(torch.autograd.grad, grad_outputs=dout, retain_graph=True)
        backwards: dict[str, Callable[[], Any]]
        backwards = {n: partial(differentiate, run(), (q, k, v)) for n, run in forwards.items()}
        for which, calls in (("forward", forwards), ("backward", backwards)):
            times: dict[str, list[float]] = {name: [] for name in calls}
            for _ in range(3):
                for name, call in calls.items():
                    times[name].append(timer(call))
            found[f"D{D} {which}"] = {name: statistics.median(x) for name, x in times.items()}
    return found


# --- one contender, in a process of its own -------------------------------------------------------


def model_of(options: argparse.Namespace, device: torch.device, implementation: str) -> Any:
    from transformers import AttentionInterface, AttentionMaskInterface, LlamaConfig, LlamaForCausalLM
    from transformers.integrations.sdpa_attention import sdpa_attention_forward

    from ..integrations.transformers import register

    register()
    AttentionInterface.register("causal_sdpa", sdpa_attention_forward)
    AttentionMaskInterface.register("causal_sdpa", lambda *args, **kwargs: None)
    torch.manual_seed(0)
    config = LlamaConfig(**(TINY if options.tiny else LLAMA_1B), attn_implementation=implementation)
    with torch.device(device):
        model = LlamaForCausalLM(config)
    return model.to(torch.bfloat16) if device.type == "cuda" else model


def kernels_of(call: Callable[[], Any], device: torch.device) -> tuple[list[str], float]:
    """(names of attention's kernels, milliseconds of all kernels) of a call; nothing off a GPU."""
    if device.type != "cuda":
        return [], float("nan")
    kinds = [torch.profiler.ProfilerActivity.CPU, torch.profiler.ProfilerActivity.CUDA]
    with torch.profiler.profile(activities=kinds) as profile:
        call()
        torch.cuda.synchronize()
    on_device = torch.autograd.DeviceType.CUDA  # the ops that launch kernels have their time too
    events = [x for x in profile.key_averages() if x.device_type == on_device]
    names = [x.key for x in events if any(word in x.key.lower() for word in OF_ATTENTION)]
    return names, sum(x.self_device_time_total for x in events) / 1e3


def train(contender: str, options: argparse.Namespace) -> dict[str, Any]:
    implementation, patched, compiled = TRAIN[contender]
    device = device_of_this_machine()
    if patched == "liger":
        from liger_kernel.transformers import apply_liger_kernel_to_llama

        apply_liger_kernel_to_llama(cross_entropy=False, fused_linear_cross_entropy=True)
    model = model_of(options, device, implementation).train()
    if patched == "flashproto":
        from ..integrations.transformers import patch

        patch(model)
    forward = torch.compile(model) if compiled else model
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5, fused=device.type == "cuda")
    size = options.batch, options.tokens
    ids = torch.randint(model.config.vocab_size, size, device=device)

    def step() -> Tensor:
        loss = forward(input_ids=ids, labels=ids, use_cache=False).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return loss.detach()

    for _ in range(WARM):
        loss = step()
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats()
    times = []
    for _ in range(STEPS):
        wait(device)
        start = time.perf_counter()
        loss = step()
        wait(device)
        times.append((time.perf_counter() - start) * 1e3)
    peak = torch.cuda.max_memory_allocated() / 2**30 if device.type == "cuda" else float("nan")
    names, _ = kernels_of(step, device)
    return {"ms": statistics.median(times), "times": times, "gib": peak, "kernels": names} | {
        "loss": float(loss)
    }


def cache_of(kind: str, config: Any, room: int) -> Any:
    """A new cache; None for the one that generate makes by itself."""
    if kind == "proto":
        from ..integrations.transformers import Cache

        return Cache(config, room)
    if kind == "static":
        from transformers import StaticCache

        return StaticCache(config=config, max_cache_len=room)
    return None


def generate(contender: str, batch: int, options: argparse.Namespace) -> dict[str, Any]:
    (kind, patched), device = GENERATE[contender], device_of_this_machine()
    model = model_of(options, device, "proto" if kind == "proto" else "sdpa").eval()
    if patched:
        from ..integrations.transformers import patch

        patch(model)
    model.generation_config.eos_token_id = None
    prompts = torch.randint(model.config.vocab_size, (batch, options.prompt), device=device)
    given: dict[str, Any] = {"input_ids": prompts, "attention_mask": torch.ones_like(prompts)}
    given |= {"do_sample": False, "pad_token_id": 0}
    room = options.prompt + options.new

    def call(new: int) -> Callable[[], Tensor]:
        def run() -> Tensor:
            cache = cache_of(kind, model.config, room)
            caches = {} if cache is None else {"past_key_values": cache}
            with torch.no_grad():
                return model.generate(**given, **caches, max_new_tokens=new, min_new_tokens=new)

        return run

    def seconds(new: int) -> float:
        wait(device)
        start = time.perf_counter()
        call(new)()
        wait(device)
        return time.perf_counter() - start

    few = max(options.new // 8, 2)
    for new in (1, few, options.new):  # what is compiled and captured
        call(new)()
    first = min(seconds(1) for _ in range(3))
    whole = min(seconds(options.new) for _ in range(3))
    (_, one), (_, some) = (kernels_of(call(new), device) for new in (1, few))
    return {
        "first_ms": first * 1e3,
        "token_ms": (whole - first) * 1e3 / (options.new - 1),
        "device_token_ms": (some - one) / (few - 1),
        "tokens_s": batch * options.new / whole,
        "last": call(few)()[:, -4:].tolist(),
    }


# --- the run --------------------------------------------------------------------------------------


def text(part: str, found: dict[str, Any]) -> str:
    lines = []
    for name, x in found.items():
        if "error" in x:
            lines.append(f"  {name}: {x['error']}")
        elif part == "intervals":
            of = {n: f"{x['causal'] / ms:.3f}" for n, ms in x.items() if n != "causal"}
            lines.append(f"  {name}: causal {x['causal']:.3f} ms; of its rate: {of}")
        elif part == "train":
            kernels = ", ".join(sorted({n[:40] for n in x["kernels"]})[:4])
            lines.append(
                f"  {name}: {x['ms']:.1f} ms, {x['gib']:.1f} GiB, loss {x['loss']:.4f}; {kernels}"
            )
        else:
            lines.append(
                f"  {name}: first token {x['first_ms']:.1f} ms, then {x['token_ms']:.2f} ms a token "
                f"(device {x['device_token_ms']:.2f}), {x['tokens_s']:.0f} tokens/s"
            )
    return "\n".join([f"{part}:", *lines])


def main(arguments: Sequence[str]) -> None:
    options = parse(arguments)
    if options.worker is not None:
        part, contender, batch = json.loads(options.worker)
        workers = {
            "intervals": lambda: intervals(options),
            "train": lambda: train(contender, options),
            "generate": lambda: generate(contender, batch, options),
        }
        print(json.dumps(workers[part]()))
        return
    data: dict[str, Any] = {"subject": "doors", "runs": [], "parts": {}}
    told = {n: getattr(options, n) for n in ("batch", "tokens", "prompts", "prompt", "new", "tiny")}
    data["runs"].append(report.describe_run({}, told | {"steps": STEPS}))
    chosen = options.contenders.split(",") if options.contenders else [*TRAIN, *GENERATE]
    for part in options.parts.split(","):
        found: dict[str, Any] = {}
        if part == "intervals":
            found = in_process("doors", [part, "", 0], arguments, options.seconds)
            found = {part: found} if "error" in found else found
        elif part == "train":
            for name in filter(chosen.__contains__, TRAIN):
                found[name] = in_process("doors", [part, name, 0], arguments, options.seconds)
                print(text(part, {name: found[name]}), flush=True)
        elif part == "generate":
            for batch in map(int, options.prompts.split(",")):
                for name in filter(chosen.__contains__, GENERATE):
                    made = in_process("doors", [part, name, batch], arguments, options.seconds)
                    found[f"{name}, {batch} prompts"] = made
                    print(text(part, {f"{name}, {batch} prompts": made}), flush=True)
        else:
            raise SystemExit(f"flashproto.bench: --parts is {part!r}; it takes {', '.join(PARTS)}.")
        data["parts"][part] = found
        report.save(options.out / "doors.json", data)
    print("\n\n".join(text(part, found) for part, found in data["parts"].items()))
    print(f"\nwrote {options.out / 'doors.json'}")
