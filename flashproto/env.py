"""python -m flashproto.env [--json]: versions, devices, which backend runs where, or why not."""

from __future__ import annotations

import argparse
import contextlib
import importlib.metadata
import importlib.util
import json
import os
import platform
import subprocess
from typing import Any

import torch

from . import __version__, backends

PEERS = {  # import name: distribution
    "flash_attn.cute": "flash-attn-4",
    "flash_attn_3._C": "tokenspeed-fa3",
    "cudnn.flex_attention": "nvidia-cudnn-frontend",
    "ffpa_attn": "ffpa-attn",
    "quack": "quack-kernels",
    "liger_kernel": "liger-kernel",
    "cut_cross_entropy": "cut-cross-entropy",
    "cutlass": "nvidia-cutlass-dsl",  # no peer: several of them compile with it
}
# Dense bfloat16 tensor-core peak in FLOP/s by a part of the device's name, from the data sheets.
PEAK_FLOPS = {
    "GB200": 2500e12,
    "B200": 2250e12,
    "H200": 989e12,
    "H100 PCIe": 756e12,
    "H100 NVL": 835e12,
    "H100": 989e12,
    "A100": 312e12,
    "L40S": 362e12,
    "RTX 4090": 165e12,
}
VARIABLES = (
    "FLASHPROTO_IMPL",
    "FLASHPROTO_CHECKED",
    "TRITON_INTERPRET",
    "TRITON_CACHE_DIR",
    "CUDA_VISIBLE_DEVICES",
)


def version_of(distribution: str) -> str | None:
    """The installed version of a distribution, None if it is not installed."""
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return None


def is_importable(module: str) -> bool:
    """Whether `module` can be found, without importing it (its parents are imported)."""
    try:
        return importlib.util.find_spec(module) is not None
    except (ImportError, ValueError):
        return False


def peers() -> dict[str, str | None]:
    """Version of each library that the benchmarks compare with, None where it is not installed."""
    return {
        name: (version_of(distribution) or "unknown version") if is_importable(name) else None
        for name, distribution in PEERS.items()
    }


def cpu_name() -> str:
    """The processor's model name."""
    with contextlib.suppress(OSError), open("/proc/cpuinfo") as file:
        for line in file:
            if line.startswith("model name"):
                return line.split(":", 1)[1].strip()
    return platform.processor() or platform.machine()


def driver_version() -> str | None:
    """The NVIDIA driver's version, None where nvidia-smi is missing or silent."""
    command = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=20, check=True)
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.strip().splitlines()[0] if done.stdout.strip() else None


def peak_flops(name: str) -> float | None:
    """Dense bfloat16 peak in FLOP/s of a device by its name, None where that is not known."""
    return next((flops for part, flops in PEAK_FLOPS.items() if part in name), None)


def gpus() -> list[dict[str, Any]]:
    """Name, compute capability, memory and SM count of each visible CUDA device."""
    found = []
    for index in range(torch.cuda.device_count()):
        p = torch.cuda.get_device_properties(index)
        found.append(
            {
                "device": f"cuda:{index}",
                "name": p.name,
                "compute_capability": f"{p.major}.{p.minor}",
                "memory_gib": round(p.total_memory / 2**30, 1),
                "multiprocessors": p.multi_processor_count,
            }
        )
    return found


def backend_table() -> dict[str, dict[str, list[str]]]:
    """For each device: each backend's reasons against running there, none where it runs."""
    devices = ["cpu", *(gpu["device"] for gpu in gpus())]
    return {
        device: {
            name: list(backends.device_reasons(name, torch.device(device)))
            for name in backends.BACKENDS
        }
        for device in devices
    }


def default_backend(reasons: dict[str, list[str]]) -> str:
    """The backend that impl=None takes first on a device with these reasons."""
    return backends.get_default() or next(b for b in backends.BACKENDS if not reasons[b])


def environment() -> dict[str, Any]:
    """Everything the report shows, as plain data."""
    table = backend_table()
    return {
        "versions": {
            "flashproto": __version__,
            "python": platform.python_version(),
            "torch": torch.__version__,
            "triton": version_of("triton"),
            "einops": version_of("einops"),
            "cuda": torch.version.cuda,
            "driver": driver_version(),
        },
        "machine": {"system": platform.platform(), "cpu": cpu_name(), "cores": os.cpu_count()},
        "gpus": gpus(),
        "backends": table,
        "default": {device: default_backend(reasons) for device, reasons in table.items()},
        "peers": peers(),
        "variables": {name: os.environ[name] for name in VARIABLES if name in os.environ},
    }


def render(report: dict[str, Any]) -> str:
    """The report as text."""
    lines = [f"{name:<12}{value or '-'}" for name, value in report["versions"].items()]
    machine = report["machine"]
    lines += [f"{'system':<12}{machine['system']}"]
    lines += [f"{'cpu':<12}{machine['cpu']}, {machine['cores']} cores"]
    for gpu in report["gpus"]:
        lines.append(
            f"{gpu['device']:<12}{gpu['name']}, compute capability {gpu['compute_capability']}, "
            f"{gpu['memory_gib']} GiB, {gpu['multiprocessors']} SMs"
        )
    if not report["gpus"]:
        lines.append(f"{'gpu':<12}none that torch can use")
    for device, table in report["backends"].items():
        lines += ["", f"backends on {device} (default: {report['default'][device]})"]
        for name, reasons in table.items():
            lines.append(f"  {name:<10}{'runs' if not reasons else 'no: ' + '; '.join(reasons)}")
    lines += ["", "peers for the benchmarks"]
    lines += [f"  {name:<22}{version or 'not found'}" for name, version in report["peers"].items()]
    if report["variables"]:
        lines += ["", "environment variables"]
        lines += [f"  {name}={value}" for name, value in report["variables"].items()]
    return "\n".join(lines)


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m flashproto.env", description=__doc__)
    parser.add_argument("--json", action="store_true", help="print JSON")
    options = parser.parse_args(arguments)
    report = environment()
    print(json.dumps(report, indent=2) if options.json else render(report))


if __name__ == "__main__":
    main()
