"""Plans of calls of wide rows, whose launches want more than tensors: words that are zero, where rows
are split over programs, and rows that begin at multiples of 16 bytes, where they are in shared memory.

Launches that clear the words of the launch before (flashproto/ops/words.py) are given other rows each
time: with words that are not zero, a row has the statistics of another.
"""

from __future__ import annotations

import random
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

import flashproto
from flashproto import plans

pytest.importorskip("triton")

from flashproto.ops import norm_plan, softmax_plan, words

# On Hopper: rows in registers of a cluster or of split programs, and in shared memory of one or more.
WIDTHS = [16_400, 40_008, 50_257, 65_544, 131_072]
ROWS = 37

Call = Callable[..., Tensor | tuple[Tensor, Tensor]]
CALLS: dict[str, tuple[Call, str]] = {
    "rms_norm": (lambda x, w: flashproto.rms_norm(x, x.shape[1], w, impl="triton"), "xw"),
    "rms_norm alone": (lambda x: flashproto.rms_norm(x, x.shape[1], impl="triton"), "x"),
    "layer_norm": (lambda x, w: flashproto.layer_norm(x, x.shape[1], w, w, impl="triton"), "xw"),
    "add_rms_norm": (
        lambda x, r, w: flashproto.add_rms_norm(x, r, x.shape[1], w, impl="triton"), "xxw",
    ),
    "softmax": (lambda x: flashproto.softmax(x, impl="triton"), "x"),
    "log_softmax": (lambda x: flashproto.log_softmax(x, impl="triton"), "x"),
    "softmax in float32": (lambda x: flashproto.softmax(x, dtype=torch.float32, impl="triton"), "x"),
}  # fmt: skip


@pytest.fixture(autouse=True)
def no_plans() -> Iterator[None]:
    plans.forget()
    yield
    plans.forget()


def tensors_of(
    kinds: str, N: int, device: str, dtype: torch.dtype = torch.bfloat16, rows: int = ROWS
) -> list[Tensor]:
    shapes = ((rows, N) if kind == "x" else (N,) for kind in kinds)
    return [torch.randn(shape, device=device).to(dtype) for shape in shapes]


def results(call: Call, tensors: list[Tensor], grad: bool = True) -> list[Tensor]:
    """Outputs, and gradients of some function of them."""
    if not grad:
        outputs = call(*tensors)
        return [outputs] if isinstance(outputs, Tensor) else list(outputs)
    leaves = [t.detach().requires_grad_() for t in tensors]
    outputs = results(call, leaves, False)
    upstream = [y.detach().flip(0).contiguous() for y in outputs]
    return [*outputs, *torch.autograd.grad(outputs, leaves, upstream)]


def ordinary(call: Call, tensors: list[Tensor], grad: bool = True) -> list[Tensor]:
    """The results of a call that follows no plan."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(plans, "find", lambda options, tensors: None)
        patch.setattr(plans, "keep", lambda key, make: None)
        return results(call, tensors, grad)


def planned(call: Call, tensors: list[Tensor], grad: bool = True) -> list[Tensor]:
    """The results of a call whose plan launches all that it launches."""

    def refuse(*arguments: Any) -> None:
        raise AssertionError("the plan went the ordinary way")

    with pytest.MonkeyPatch.context() as patch:
        for name in ("norm", "norm_backward"):
            patch.setattr(norm_plan, name, refuse)
        for name in ("softmax", "log_softmax", "softmax_backward"):
            patch.setattr(softmax_plan, name, refuse)
        return results(call, tensors, grad)


def assert_same(got: list[Tensor], wanted: list[Tensor]) -> None:
    for a, b in zip(got, wanted, strict=True):
        assert (a.dtype, a.shape, a.stride()) == (b.dtype, b.shape, b.stride())
        torch.testing.assert_close(a, b, rtol=0, atol=0)


def elsewhere(x: Tensor) -> Tensor:
    """x at an address that is no multiple of 16 bytes."""
    return torch.empty(x.numel() + 1, dtype=x.dtype, device=x.device)[1:].view(x.shape).copy_(x)


def make_plan(call: Call, tensors: list[Tensor]) -> None:
    for _ in range(2):
        results(call, tensors)


@pytest.mark.gpu
@pytest.mark.parametrize("name", CALLS)
@pytest.mark.parametrize("N", WIDTHS)
def test_bits_are_those_of_ordinary_calls(device, N, name) -> None:
    call, kinds = CALLS[name]
    sets = [tensors_of(kinds, N, device) for _ in range(3)]
    wanted = [ordinary(call, tensors) for tensors in sets]
    make_plan(call, sets[0])
    for _ in range(2):
        for tensors, expected in zip(sets, wanted, strict=True):
            for _ in range(2):
                assert_same(planned(call, tensors), expected)
                assert_same(planned(call, tensors, False), ordinary(call, tensors, False))


@pytest.mark.gpu
@pytest.mark.parametrize("name", CALLS)
@pytest.mark.parametrize("N", WIDTHS)
def test_rows_that_begin_anywhere(device, N, name) -> None:
    call, kinds = CALLS[name]
    tensors = tensors_of(kinds, N, device)
    moved = [elsewhere(t) for t in tensors]
    wanted = ordinary(call, tensors)
    make_plan(call, moved)  # which serves for those at multiples of 16 bytes
    for _ in range(2):
        assert_same(planned(call, tensors), wanted)
        assert_same(results(call, moved), ordinary(call, moved))


@pytest.mark.gpu
def test_shapes_in_turn(device) -> None:
    cases = [
        (CALLS[name][0], tensors_of(CALLS[name][1], N, device, dtype))
        for N in (256, 12_000, 16_400, 40_008, 65_544)
        for name in ("layer_norm", "add_rms_norm", "softmax")
        for dtype in (torch.bfloat16, torch.float32)
    ]
    wanted = [ordinary(*case) for case in cases]
    for _ in range(6):
        for i in random.sample(range(len(cases)), len(cases)):
            assert_same(results(*cases[i]), wanted[i])


@pytest.mark.gpu
@pytest.mark.parametrize("name", CALLS)
@pytest.mark.parametrize("N", [16_400, 65_544])
def test_is_captured_in_a_cuda_graph(device, N, name) -> None:
    call, kinds = CALLS[name]
    tensors = tensors_of(kinds, N, device)
    make_plan(call, tensors)
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        planned(call, tensors)
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = [planned(call, tensors) for _ in range(2)]
    for _ in range(3):
        for t in tensors:
            t.copy_(torch.randn_like(t))
        graph.replay()
        wanted = ordinary(call, tensors)
        for got in captured:
            assert_same(got, wanted)


@pytest.mark.gpu
@pytest.mark.parametrize("N", [768, 16_400, 65_544])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_is_replayed_by_torch_compile(device, N, dtype) -> None:
    torch.compiler.reset()

    def norms(x: Tensor, residual: Tensor, weight: Tensor) -> Tensor:
        for _ in range(4):  # enough for plans in the first run too, which torch warms up with
            x, residual = flashproto.add_rms_norm(x, residual, N, weight, impl="triton")
            x = flashproto.layer_norm(x, N, weight, weight, impl="triton")
        return x + residual

    def run(call: Callable[..., Tensor], tensors: list[Tensor]) -> list[Tensor]:
        y = call(*tensors)
        return [y.detach().clone(), *(g.clone() for g in torch.autograd.grad(y.sin().sum(), tensors))]

    compiled = torch.compile(norms, fullgraph=True, mode="reduce-overhead")
    for _ in range(8):  # of which torch records the second or third, and replays those behind it
        tensors = [torch.randn(n, N, device=device).to(dtype).requires_grad_() for n in (5, 5, 1)]
        tensors[2] = tensors[2].detach()[0].requires_grad_()
        torch.compiler.cudagraph_mark_step_begin()
        got, wanted = run(compiled, tensors), run(norms, tensors)
        for a, b in zip(got, wanted, strict=True):
            scale = b.float().abs().max().item()
            torch.testing.assert_close(a, b, rtol=2.0**-6, atol=scale * 2.0**-7)


@pytest.mark.gpu
@pytest.mark.parametrize("N", [40_008, 65_544])
def test_streams_share_no_words(device, N) -> None:
    call, kinds = CALLS["layer_norm"]
    sets = [tensors_of(kinds, N, device) for _ in range(4)]
    wanted = [ordinary(call, tensors, False) for tensors in sets]
    make_plan(call, sets[0])
    streams = [torch.cuda.Stream() for _ in sets]
    torch.cuda.synchronize()
    for _ in range(20):
        got = []
        for stream, tensors in zip(streams, sets, strict=True):
            with torch.cuda.stream(stream):
                got.append(planned(call, tensors, False))
        torch.cuda.synchronize()
        for a, b in zip(got, wanted, strict=True):
            assert_same(a, b)


@pytest.mark.gpu
@pytest.mark.parametrize("name", CALLS)
@pytest.mark.parametrize("N", WIDTHS)
def test_many_calls_in_a_row(device, N, name) -> None:
    call, kinds = CALLS[name]
    sets = [tensors_of(kinds, N, device) for _ in range(3)]
    wanted = [ordinary(call, tensors) for tensors in sets]
    make_plan(call, sets[0])
    got = [results(call, sets[i % 3]) for i in range(24)]
    for i, outputs in enumerate(got):
        assert_same(outputs, wanted[i % 3])


@pytest.mark.gpu
def test_kernels_with_as_many_words_in_turn(device) -> None:
    """One pair serves kernels of all kinds, where the rows of one are half as wide as those of another
    and twice as many."""
    cases = [
        (CALLS[name][0], tensors_of(CALLS[name][1], N, device, rows=rows))
        for N, rows in ((65_536, 16), (131_072, 8), (262_144, 4), (262_144, 8))
        for name in CALLS
    ]
    wanted = [ordinary(*case) for case in cases]
    for _ in range(6):
        order = random.sample(range(len(cases)), len(cases))
        got = [results(*cases[i]) for i in order]
        for i, outputs in zip(order, got, strict=True):
            assert_same(outputs, wanted[i])


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["rms_norm", "softmax"])
def test_two_streams_at_once(device, name) -> None:
    call, kinds = CALLS[name]
    sets = [tensors_of(kinds, 131_072, device) for _ in range(3)]
    wanted = [ordinary(call, tensors) for tensors in sets]
    make_plan(call, sets[0])
    streams = [torch.cuda.Stream(), torch.cuda.Stream()]
    torch.cuda.synchronize()
    got = []
    for i in range(30):
        for stream in streams:
            with torch.cuda.stream(stream):
                got.append((i % 3, results(call, sets[i % 3])))
    torch.cuda.synchronize()
    for i, outputs in got:
        assert_same(outputs, wanted[i])


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["layer_norm", "softmax"])
def test_threads_launch_on_one_stream(device, name) -> None:
    call, kinds = CALLS[name]
    sets = [tensors_of(kinds, 65_544, device) for _ in range(4)]
    wanted = [ordinary(call, tensors) for tensors in sets]
    make_plan(call, sets[0])
    torch.cuda.synchronize()
    got: list[list[list[Tensor]]] = [[] for _ in sets]

    def work(i: int) -> None:
        got[i] = [results(call, sets[i]) for _ in range(40)]

    threads = [threading.Thread(target=work, args=(i,)) for i in range(len(sets))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    torch.cuda.synchronize()
    for outputs, expected in zip(got, wanted, strict=True):
        assert len(outputs) == 40
        for output in outputs:
            assert_same(output, expected)


@pytest.mark.gpu
@pytest.mark.parametrize("name", CALLS)
def test_replays_and_calls_in_turn(device, name) -> None:
    call, kinds = CALLS[name]
    sets = [tensors_of(kinds, 65_544, device) for _ in range(3)]
    wanted = [ordinary(call, tensors) for tensors in sets]
    tensors = [t.clone() for t in sets[0]]
    make_plan(call, tensors)
    stream = torch.cuda.Stream()  # all on one, that of the capture too
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=stream):
            captured = planned(call, tensors)
        for i in range(20):
            for t, source in zip(tensors, sets[i % 3], strict=True):
                t.copy_(source)
            graph.replay()
            if i % 2:
                assert_same(planned(call, sets[(i + 1) % 3]), wanted[(i + 1) % 3])
            assert_same(captured, wanted[i % 3])
    torch.cuda.synchronize()


@pytest.mark.gpu
def test_calls_of_one_shape_keep_one_pair_of_words(device) -> None:
    call, kinds = CALLS["softmax"]
    tensors = tensors_of(kinds, 65_544, device)
    make_plan(call, tensors)
    for _ in range(3):
        planned(call, tensors, False)
    hopper = torch.cuda.get_device_capability() == (9, 0)
    assert len(words._pairs) == int(hopper)
    plans.forget()
    assert not words._pairs
