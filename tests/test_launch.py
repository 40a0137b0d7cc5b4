"""Launchers (flashproto/ops/launch.py): what they launch, and on a GPU what comes of it."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

import flashproto

triton = pytest.importorskip("triton")

from triton import knobs  # noqa: E402

from flashproto.ops import launch  # noqa: E402
from flashproto.ops.memory import Memory, New  # noqa: E402

WORKER = Path(__file__).with_name("launch_worker.py")


def test_launches_what_triton_would_launch(seed: int) -> None:
    environment = os.environ | {"TRITON_INTERPRET": "0", "PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run(
        [sys.executable, str(WORKER), str(seed)],
        env=environment, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    found, kernels, bound, made = map(int, done.stdout.split())
    assert found > 6000, "half the calls repeat the one before"
    assert kernels > 100
    assert bound > 6000, "all but the first of one kind"
    assert made > 6000


def test_interpreted_kernels_are_launched_ordinarily() -> None:
    calls = []

    class Kernel:
        def __getitem__(self, grid):
            return lambda *arguments, **named: calls.append((grid, arguments, named))

    launch.launcher(Kernel(), tensors=1, R=4)(3, "x", 5, C=64, maxnreg=None)
    assert calls == [((3,), ("x", 5), {"R": 4, "C": 64})]


def test_interpreted_kernels_fill_what_a_launch_makes() -> None:
    calls: list[tuple[Any, ...]] = []

    class Kernel:
        def __getitem__(self, grid):
            return lambda *arguments: calls.append(arguments)

    x, words = torch.zeros(3), torch.zeros(2)
    y, state = (New((n,), (1,), torch.float32, x.device) for n in (3, 12))
    make = launch.launcher(Kernel(), tensors=6).making(
        1, x, None, y, state.behind(8), state, Memory(0, torch.float32, -1), 7
    )
    made_y, made_state = make(x, words.data_ptr())
    ((given_x, nothing, given_y, behind, given_state, given_words, number),) = calls
    assert given_x is x and nothing is None
    assert given_y is made_y and given_state is made_state
    assert (made_y.shape, made_state.shape, behind.shape, number) == ((3,), (12,), (4,), 7)
    assert behind.data_ptr() == made_state[8:].data_ptr()
    assert given_words.data_ptr() == words.data_ptr()


def test_parts_of_memory_start_at_multiples_of_16_bytes() -> None:
    new = New((12,), (1,), torch.float32, torch.device("cpu"))
    assert new.behind(8).bytes == 32
    matrix = New((3, 4), (4, 1), torch.float32, torch.device("cpu"))
    for memory, elements in ((new, 6), (matrix, 4)):
        with pytest.raises(ValueError, match="elements is"):
            memory.behind(elements)


def test_divides_and_rounds_up() -> None:
    assert [launch.cdiv(a, 4) for a in (0, 1, 4, 5)] == [0, 1, 1, 2]


# --- on a GPU ------------------------------------------------------------------------------------


def calls(device: str) -> list[torch.Tensor]:
    """Results of calls that differ in alignment, strides, sizes of one, dtype and shape, in turn."""
    results = []
    torch.manual_seed(0)
    for dtype in (torch.bfloat16, torch.float32):
        for rows, columns, shift in (
            (8, 256, 0),
            (8, 256, 1),
            (1, 17, 0),
            (3, 1, 0),
            (8, 256, 8),
            (64, 4096, 0),
        ):
            memory = torch.randn(rows * (columns + 16) + 16, device=device).to(dtype)
            for stride in (columns, columns + 16, columns + 3):
                x = memory.as_strided((rows, columns), (stride, 1), shift)
                w = memory[: columns + shift][shift:]
                results += [flashproto.rms_norm(x, columns, w), flashproto.softmax(x)]
                q = x[None, None, :, :256]
                results += [
                    flashproto.attention(q, q, q, impl="triton"),
                    flashproto.layer_norm(x, columns, w, w),
                ]
    return results


@pytest.mark.gpu
def test_results_equal_those_of_the_ordinary_path() -> None:
    calls("cuda")  # so that all is compiled and kept
    fast = calls("cuda")
    seen: list[object] = []
    hooks, hook = knobs.runtime.launch_enter_hook, seen.append
    hooks.add(hook)
    try:
        ordinary = calls("cuda")
    finally:
        hooks.remove(hook)
    assert len(seen) >= len(ordinary), "launch hooks see every launch"
    for a, b in zip(fast, ordinary, strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=0, equal_nan=True)


@pytest.mark.gpu
def test_launches_on_the_current_stream() -> None:
    x = torch.randn(4096, 4096, device="cuda")
    expected = flashproto.softmax(x + 1)
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        torch.cuda._sleep(50_000_000)
        result = flashproto.softmax(x + 1)  # right only if it waits for the addition
    torch.cuda.current_stream().wait_stream(stream)
    torch.testing.assert_close(result, expected, rtol=0, atol=0)


@pytest.mark.gpu
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_launches_on_the_device_of_the_tensors() -> None:
    x = torch.randn(64, 256, device="cuda:1")
    with torch.cuda.device(0):
        for _ in range(4):
            result = flashproto.rms_norm(x, 256, impl="triton")
        assert torch.cuda.current_device() == 0
    assert result.device == x.device
    torch.testing.assert_close(result, flashproto.rms_norm(x, 256, impl="reference"))


@pytest.mark.gpu
def test_is_captured_in_a_cuda_graph() -> None:
    x = torch.randn(64, 256, device="cuda")
    for impl in ("triton", None):
        flashproto.rms_norm(x, 256, impl=impl)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            y = flashproto.rms_norm(x, 256, impl=impl)
        x.copy_(torch.randn_like(x))
        graph.replay()
        torch.testing.assert_close(y, flashproto.rms_norm(x, 256, impl=impl), rtol=0, atol=0)
