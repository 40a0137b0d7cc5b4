"""Exchange buffers (flashproto/ops/exchange_buffers.py): whoever launches, in whatever order, finds
words that are 0.  Most kernels are played by functions on the CPU; the last tests have real ones."""

from __future__ import annotations

import functools
import random
import threading
import time
from collections.abc import Callable, Iterator

import pytest
import torch
from torch import Tensor

import flashproto

pytest.importorskip("triton")

from flashproto.ops import call_cache, exchange_buffers, recipe, written

COUNT = 12
DEVICES = torch.device("cuda", 0), torch.device("cuda", 1)


class Gpu:
    """What exchange_buffers.py asks torch for; a launch runs at once."""

    def __init__(self) -> None:
        self.stream, self.capturing = 7, False
        self.made = 0  # sets of zeros
        self.running = threading.Lock()
        self.launches = 0

    def zeros(self, device: torch.device, *shape: int, dtype: torch.dtype = torch.int64) -> Tensor:
        self.made += 1
        return torch.full(shape, 0, dtype=dtype)

    def kernel(self, fresh: Tensor, used: Tensor) -> None:
        """One that publishes in its words and clears those of the launch before."""
        with self.running:
            assert not fresh.any(), "words that are not 0"
            fresh.fill_(random.randrange(1, 2**62))
            used.zero_()
            self.launches += 1

    def launch(
        self, count: int = COUNT, device: int = 0, kernel: Callable[..., None] | None = None
    ) -> None:
        """As recipes launch."""
        pair = exchange_buffers.take(DEVICES[device], count)
        (kernel or self.kernel)(pair.fresh, pair.used)
        exchange_buffers.give(pair)


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> Iterator[Gpu]:
    gpu = Gpu()
    monkeypatch.setattr(exchange_buffers, "current_stream", lambda index: gpu.stream)
    monkeypatch.setattr(exchange_buffers, "is_capturing", lambda: gpu.capturing)
    monkeypatch.setattr(exchange_buffers, "outside_memory_pool", lambda make, device: make())
    monkeypatch.setattr(exchange_buffers, "zeros", gpu.zeros)
    exchange_buffers.forget()
    yield gpu
    exchange_buffers.forget()


def test_two_sets_serve_all_launches_of_a_stream(gpu) -> None:
    for _ in range(20):
        gpu.launch()
    assert (gpu.made, gpu.launches) == (2, 20)


def test_streams_devices_and_counts_have_their_own(gpu) -> None:
    for _ in range(60):
        gpu.stream = random.choice((0, 7))
        gpu.launch(random.choice((COUNT, COUNT + 1)), random.choice((0, 1)))
    kept = [t.data_ptr() for pair in exchange_buffers._pairs.values() for t in pair]
    assert len(kept) == len(set(kept)) == gpu.made


def test_a_launch_that_raises_drops_its_pair(gpu) -> None:
    def failing(fresh: Tensor, used: Tensor) -> None:
        fresh.fill_(5)
        raise KeyboardInterrupt

    gpu.launch()
    with pytest.raises(KeyboardInterrupt):
        gpu.launch(kernel=failing)
    assert not exchange_buffers._pairs
    gpu.launch()
    gpu.launch()
    assert gpu.made == 4


def test_the_stream_of_each_thread_keeps_no_pair(gpu) -> None:
    gpu.launch()
    before, gpu.made = dict(exchange_buffers._pairs), 0
    gpu.stream = exchange_buffers.PER_THREAD
    for _ in range(3):
        gpu.launch()
    assert gpu.made == 6
    assert exchange_buffers._pairs == before


@pytest.mark.parametrize("count", [1, 4, 593])
def test_zeroed_words_are_given_away(count: int, gpu) -> None:
    """Each to one launch, of a stream; made many at once, but in a graph."""
    given, many = [], exchange_buffers.TOGETHER
    for stream in (7, 0):
        gpu.stream = stream
        for _ in range(many + 1):
            x = exchange_buffers.zeroed(DEVICES[0], count)
            assert (x.shape, x.dtype) == ((count,), torch.int32) and not x.any()
            assert x.data_ptr() % 16 == 0
            given.append(x.fill_(1))
        assert gpu.made == 2
        gpu.made = 0
    assert len({x.data_ptr() for x in given}) == 2 * (many + 1)
    for gpu.capturing, gpu.stream in ((True, 7), (False, exchange_buffers.PER_THREAD)):
        exchange_buffers.zeroed(DEVICES[0], count)
    assert gpu.made == 2
    assert len(exchange_buffers._zeroed) == 2


def test_a_launch_within_a_launch(gpu) -> None:
    def calling(fresh: Tensor, used: Tensor) -> None:
        gpu.launch()
        gpu.kernel(fresh, used)
        gpu.launch()

    for _ in range(10):
        gpu.launch(kernel=calling)
    assert len(exchange_buffers._pairs) == 1


def test_threads_launch_on_one_stream(gpu) -> None:
    errors: list[BaseException] = []

    def slow(fresh: Tensor, used: Tensor) -> None:
        time.sleep(random.random() * 1e-4)
        gpu.kernel(fresh, used)
        time.sleep(random.random() * 1e-4)

    def work() -> None:
        try:
            for _ in range(100):
                gpu.launch(kernel=slow)
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=work) for _ in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not errors
    assert gpu.launches == 600 and len(exchange_buffers._pairs) == 1


def test_few_are_kept_and_can_be_forgotten(gpu) -> None:
    for count in range(1, 3 * exchange_buffers.CAPACITY):
        gpu.launch(count)
        assert len(exchange_buffers._pairs) <= exchange_buffers.CAPACITY
    call_cache.forget()
    assert not exchange_buffers._pairs


N = 16_400  # rows split over programs, which the interpreter takes too


def gradients(x: Tensor, dy: Tensor) -> list[Tensor]:
    x.requires_grad_()
    outputs = flashproto.rms_norm(x, N, impl="triton"), flashproto.softmax(x, impl="triton")
    return [*torch.autograd.grad(outputs[:1], x, dy), *torch.autograd.grad(outputs[1:], x, dy)]


def sets(device: str) -> list[list[Tensor]]:
    """Other rows for each call: with words that are not 0, a row has the sums of another."""
    return [[torch.randn(2, N, device=device) for _ in range(2)] for _ in range(3)]


@pytest.mark.slow
def test_kernels_clear_the_words_of_the_launch_before(device, monkeypatch) -> None:
    problems = sets(device)
    call_cache.forget()
    wanted = [gradients(*tensors) for tensors in problems]
    call_cache.forget()
    given: list[exchange_buffers.Pair] = []
    if device == "cpu":
        monkeypatch.setattr(exchange_buffers, "current_stream", lambda index: 7)
        monkeypatch.setattr(exchange_buffers, "outside_memory_pool", lambda make, device: make())
        execute = functools.partialmethod(recipe.Recipe.execute, pairs=True)
        monkeypatch.setattr(recipe.Recipe, "execute", execute)
    back = exchange_buffers.give

    def give(pair: exchange_buffers.Pair) -> None:
        if device != "cpu":
            torch.cuda.synchronize()
        assert pair.fresh.any() and not pair.used.any()
        given.append(pair)
        back(pair)

    monkeypatch.setattr(exchange_buffers, "give", give)
    monkeypatch.setattr(written, "_factory", functools.lru_cache(written._factory.__wrapped__))
    for i in (0, 0, 1, 2, 0, 1):
        for a, b in zip(gradients(*problems[i]), wanted[i], strict=True):
            torch.testing.assert_close(a, b, rtol=0, atol=0)
    assert len(given) >= 6
    call_cache.forget()


@pytest.mark.gpu
def test_streams_and_graphs(device) -> None:
    """Launches on several streams in turns, and in a CUDA graph that is replayed among them."""
    call_cache.forget()
    problems = sets(device)
    wanted = [gradients(*tensors) for tensors in problems]
    for tensors in problems * 2:
        gradients(*tensors)
    graph, (x, dy) = torch.cuda.CUDAGraph(), [t.detach().clone() for t in problems[0]]
    with torch.cuda.graph(graph):
        captured = gradients(x, dy)
    streams = [torch.cuda.Stream() for _ in range(3)]
    torch.cuda.synchronize()
    for trial in range(20):
        i = random.randrange(3)
        with torch.cuda.stream(streams[trial % 3]):
            for a, b in zip(gradients(*problems[i]), wanted[i], strict=True):
                torch.testing.assert_close(a, b, rtol=0, atol=0)
        torch.cuda.synchronize()
        with torch.no_grad():
            x.copy_(problems[i][0])
            dy.copy_(problems[i][1])
        graph.replay()
        torch.cuda.synchronize()
        for a, b in zip(captured, wanted[i], strict=True):
            torch.testing.assert_close(a, b, rtol=0, atol=0)
