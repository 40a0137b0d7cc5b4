"""The words of launches that follow a plan (flashproto/ops/words.py): whoever launches, in whatever
order, finds words that are 0.  Kernels are played by functions on the CPU; test_plans_wide.py has real
ones."""

from __future__ import annotations

import contextlib
import random
import threading
import time
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

import flashproto
from flashproto import plans

pytest.importorskip("triton")

from flashproto.ops import launch, words
from flashproto.ops.launch import Launch

COUNT = 12


class Gpu:
    """What words.py asks torch for; a launch runs at once."""

    def __init__(self) -> None:
        self.device, self.stream, self.capturing = 0, 7, False
        self.made = 0  # sets of zeros
        self.running = threading.Lock()
        self.log: list[tuple[object, ...]] = []

    def zeros(self, count: int, **_: Any) -> Tensor:
        self.made += 1
        return torch.full((count,), 0, dtype=torch.int64)

    @contextlib.contextmanager
    def on(self, index: int) -> Iterator[None]:
        before, self.device = self.device, index
        yield
        self.device = before

    def clearing(self, *arguments: Any) -> None:
        """The kernel that is given words to clear."""
        *tensors, fresh, used = arguments
        with self.running:
            assert not fresh.any(), "words that are not 0"
            fresh.fill_(random.randrange(1, 2**62))
            used.zero_()
            self.log.append((self.device, *tensors))

    def ordinary(self, *arguments: Any) -> None:
        *tensors, fresh, used = arguments
        assert not fresh.any() and used is None
        fresh.fill_(1)
        self.log.append(("ordinary", self.device, *tensors))

    def launch(self, count: int = COUNT, index: int = 0, clearing: Any = None) -> Callable[..., None]:
        like: Any = SimpleNamespace(
            numel=lambda: count, get_device=lambda: index, device=torch.device("cpu"), is_cuda=True
        )
        return words.with_pairs(clearing or self.clearing, self.ordinary, like, None)


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> Iterator[Gpu]:
    gpu = Gpu()
    monkeypatch.setattr(words, "current_device", lambda: gpu.device)
    monkeypatch.setattr(words, "current_stream", lambda index: gpu.stream)
    monkeypatch.setattr(words, "apart", lambda make, device: make())
    monkeypatch.setattr(words, "is_capturing", lambda: gpu.capturing)
    monkeypatch.setattr(torch.cuda, "device", gpu.on)
    monkeypatch.setattr(torch, "zeros", gpu.zeros)
    words.forget()
    yield gpu
    words.forget()


def test_two_sets_serve_all_launches_of_a_stream(gpu) -> None:
    launches = [gpu.launch(), gpu.launch()]  # of two kernels with as many words
    for i in range(20):
        launches[i % 2]("x", i)
    assert gpu.made == 2
    assert gpu.log == [(0, "x", i) for i in range(20)]


def test_streams_devices_and_counts_have_their_own(gpu) -> None:
    launches = [gpu.launch(), gpu.launch(COUNT + 1), gpu.launch(COUNT, 1)]
    for i in random.choices(range(3), k=60):
        gpu.stream = random.choice((0, 7))
        launches[i]("x")
    kept = [t.data_ptr() for pair in words._pairs.values() for t in pair]
    assert len(kept) == len(set(kept)) == gpu.made
    assert gpu.device == 0


def test_launches_on_the_device_of_its_words(gpu) -> None:
    gpu.launch(index=3)("x")
    assert gpu.log == [(3, "x")]


def test_a_launch_that_raises_drops_its_pair(gpu) -> None:
    def failing(*arguments: Any) -> None:
        arguments[-2].fill_(5)
        raise KeyboardInterrupt

    launch = gpu.launch()
    launch("x")
    with pytest.raises(KeyboardInterrupt):
        gpu.launch(clearing=failing)("x")
    assert not words._pairs
    launch("x")
    launch("x")
    assert gpu.made == 4


@pytest.mark.parametrize("what", ["capture", "stream of each thread"])
def test_takes_no_pair(gpu, what) -> None:
    launch = gpu.launch()
    launch("x")
    before, gpu.made = dict(words._pairs), 0
    gpu.capturing, gpu.stream = what == "capture", 7 if what == "capture" else words.PER_THREAD
    for _ in range(3):
        launch("y")
    assert gpu.made == 3
    assert gpu.log[1:] == [("ordinary", 0, "y")] * 3
    assert words._pairs == before


def test_a_launch_within_a_launch(gpu) -> None:
    def calling(*arguments: Any) -> None:
        inner("inner")
        gpu.clearing(*arguments)
        inner("inner")

    inner, outer = gpu.launch(), gpu.launch(clearing=calling)
    for _ in range(10):
        outer("outer")
    assert len(words._pairs) == 1


def test_threads_launch_on_one_stream(gpu) -> None:
    def slow(*arguments: Any) -> None:
        time.sleep(random.random() * 1e-4)
        gpu.clearing(*arguments)
        time.sleep(random.random() * 1e-4)

    launch, errors = gpu.launch(clearing=slow), []

    def work() -> None:
        try:
            for _ in range(100):
                launch("x")
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=work) for _ in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not errors
    assert len(gpu.log) == 600 and len(words._pairs) == 1


def test_few_are_kept_and_plans_forget_them(gpu) -> None:
    for count in range(1, 3 * words.KEPT):
        gpu.launch(count)("x")
        assert len(words._pairs) <= words.KEPT
    plans.forget()
    assert not words._pairs


def test_on_the_cpu_words_are_new(gpu) -> None:
    own = torch.empty(COUNT, dtype=torch.int64)
    launch = words.with_pairs(gpu.clearing, gpu.ordinary, own, None)
    launch("x")
    assert gpu.log == [("ordinary", 0, "x")] and not words._pairs


def test_returns_what_the_launch_makes(gpu) -> None:
    """Of a launch that makes its results; the ordinary one is then bound to no used words."""

    def clearing(*arguments: Any) -> str:
        gpu.clearing(*arguments)
        return "cleared"

    def ordinary(x: str, fresh: Tensor) -> str:
        gpu.ordinary(x, fresh, None)
        return "ordinary"

    like: Any = SimpleNamespace(
        numel=lambda: COUNT, get_device=lambda: 0, device=torch.device("cpu"), is_cuda=True
    )
    launch = words.with_pairs(clearing, ordinary, like)
    assert [launch("x"), launch("y")] == ["cleared", "cleared"]
    gpu.capturing = True
    assert launch("z") == "ordinary"
    assert words.with_new(ordinary, torch.empty(COUNT, dtype=torch.int64))("x") == "ordinary"


@pytest.mark.parametrize("making", [False, True])
@pytest.mark.parametrize("clears", [False, True])
def test_a_bound_launch_passes_words_behind_its_tensors(gpu, monkeypatch, clears, making) -> None:
    """What is bound, and what the bound function is then called with."""
    calls: list[tuple[object, ...]] = []
    own, x = torch.full((COUNT,), 0, dtype=torch.int64), torch.ones(1)

    class Launcher:
        @staticmethod
        def bind(programs: int, *arguments: Any, **options: Any) -> Callable[..., None]:
            assert programs == 3 and options == {"num_warps": 4}
            kinds = tuple("words" if a is own else a for a in arguments)
            return lambda *given: calls.append((kinds, given))

        making = bind

    arguments = (x, own, None, 5, 6) if clears else (x, own, 5, 6)
    bound = Launch(Launcher, 3, arguments, {"num_warps": 4}, own, clears=clears).bound(making)
    y = torch.ones(1)
    bound(y)
    ((kinds, given),) = calls
    if clears:  # on the CPU, where there are no pairs
        assert kinds == (x, "words", None, 5, 6)
        assert given[2:] == (() if making else (None,))  # what is made takes nothing for a None
    else:
        assert kinds == (x, "words", 5, 6)
    assert given[0] is y and given[1] is not own and not given[1].any()
    if clears:
        calls.clear()
        monkeypatch.setattr(words, "current_device", lambda: -1)
        monkeypatch.setattr(Tensor, "is_cuda", True)
        Launch(Launcher, 3, arguments, {"num_warps": 4}, own, clears=True).bound(making)(y)
        ((kinds, given),) = calls
        assert kinds == (x, "words", "words", 5, 6)
        assert given[0] is y and given[1] is not given[2] and not given[1].any()


def test_kernels_clear_the_words_of_the_launch_before(device, monkeypatch) -> None:
    """Real ones, of what the interpreter takes: backward of rows split over programs.  Calls are given
    other rows each time: with words that are not 0, a row has the sums of another."""
    made = []

    def always(clearing: Any, ordinary: Any, like: Tensor, *no_used: None) -> Callable[..., Any]:
        pair: list[Tensor] = [torch.zeros_like(like), torch.zeros_like(like)]
        made.append(pair)

        def bound(*tensors: Any) -> Any:
            results = clearing(*tensors, *pair)
            assert pair[0].all() and not pair[1].any()
            pair.reverse()
            return results

        return bound

    N = 16_400
    sets = [[torch.randn(2, N, device=device) for _ in range(2)] for _ in range(3)]

    def gradients(x: Tensor, dy: Tensor) -> list[Tensor]:
        x.requires_grad_()
        outputs = flashproto.rms_norm(x, N, impl="triton"), flashproto.softmax(x, impl="triton")
        return [*torch.autograd.grad(outputs[:1], x, dy), *torch.autograd.grad(outputs[1:], x, dy)]

    plans.forget()
    wanted = [gradients(*tensors) for tensors in sets]
    plans.forget()
    monkeypatch.setattr(launch, "with_pairs", always)
    for i in (0, 0, 1, 2, 0):  # the first two make the plans
        for a, b in zip(gradients(*sets[i]), wanted[i], strict=True):
            torch.testing.assert_close(a, b, rtol=0, atol=0)
    assert len(made) == 2 or device != "cpu"  # other kernels there
    plans.forget()
