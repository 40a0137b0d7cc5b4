"""GPT.generate: with its cache what the model gives without one, and what is drawn."""

from __future__ import annotations

import dataclasses
import gc
import math
import weakref
from typing import Any

import numpy as np
import pytest
import torch
from test_kv_cache import CACHES, KINDS, filled, model_of
from torch import Tensor

from flashproto import nn
from flashproto.nn import generation, kv_cache
from flashproto.nn.generation import Lookup
from flashproto.nn.sampling import Sampling, exponentials, filtered, nucleus, penalized, sample

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")


@pytest.fixture(autouse=True)
def nothing_is_written(monkeypatch: pytest.MonkeyPatch) -> None:
    """Caches begin with NaN."""
    make = nn.KVCache.__init__

    def made(self: nn.KVCache, *args: Any, **options: Any) -> None:
        make(self, *args, **options)
        filled(self)

    monkeypatch.setattr(nn.KVCache, "__init__", made)


@pytest.fixture(scope="module")
def model() -> nn.GPT:
    return model_of("gpt")


def prompts_of(*lengths: int) -> list[Tensor]:
    return [torch.randint(61, (n,), device=DEVICE) for n in lengths]


def check_greedy(model: nn.GPT, text: Tensor, prompt: int, room: int = 24) -> None:
    """text [S] is what the model without a cache takes for the likeliest behind text[:prompt], or its
    logit is within 1e-4 of the likeliest's."""
    begin = max(prompt - room, 0)
    for end in range(prompt, len(text)):
        if end - begin > room:
            begin = end - room // 2
        logits = model(text[None, begin:end])[0][0, -1]
        assert logits[text[end]] >= logits.max() - 1e-4


@pytest.mark.parametrize("options", CACHES.values(), ids=CACHES)
@pytest.mark.parametrize("kind", KINDS)
def test_greedy_tokens_are_those_without_a_cache(kind, options):
    model, prompts = model_of(kind), prompts_of(6, 1, 24, 40)
    texts = model.generate(prompts, 26, temperature=0, cache=model.make_cache(4, **options))
    assert [len(x) for x in texts] == [32, 27, 50, 66]
    for text, prompt in zip(texts, prompts, strict=True):
        assert torch.equal(text[: len(prompt)], prompt)
        check_greedy(model, text, len(prompt))


def test_a_cache_with_less_room_takes_the_place_of_the_context():
    model, prompts = model_of("llama"), prompts_of(3, 11)
    texts = model.generate(prompts, 20, temperature=0, cache=model.make_cache(2, 10))
    for text, prompt in zip(texts, prompts, strict=True):
        check_greedy(model, text, len(prompt), 10)


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_a_list_comes_back_as_a_list_and_a_tensor_as_a_tensor(model, dtype):
    prompt = torch.stack(prompts_of(4, 4)).to(dtype)
    text = model.generate(prompt, 5, temperature=0)
    listed = model.generate(list(prompt), 5, temperature=0)
    assert text.dtype == listed[0].dtype == dtype
    assert torch.equal(text, torch.stack(listed))
    assert model.generate([], 5) == []
    assert model.generate(prompt[:0], 5).shape[0] == 0


def test_stop_tokens_end_a_sequence(model):
    torch.manual_seed(3)
    prompts = prompts_of(4, 4, 4)
    drawing: dict[str, Any] = {"temperature": 2.0, "seeds": [1, 2, 3]}
    whole = model.generate(prompts, 12, **drawing)
    stop = [int(whole[0][6]), int(whole[1][9])]
    want = []
    for text in whole:
        at = next((i for i in range(4, 16) if int(text[i]) in stop), 15)
        want.append(text[: at + 1])
    assert len({len(x) for x in want}) > 1
    for options in ({}, {"prompt_lookup": 3}, {"cache": model.make_cache(3, page_size=2, pages=24)}):
        got = model.generate(prompts, 12, stop_tokens=stop, **drawing, **options)
        assert all(map(torch.equal, got, want))
    tensor = model.generate(torch.stack(prompts), 12, stop_tokens=stop, **drawing)
    longest = max(map(len, want))
    for row, text in zip(tensor, want, strict=True):
        assert torch.equal(row, torch.cat([text, text[-1:].expand(longest - len(text))]))


@pytest.mark.parametrize("lookup", [0, 4])
def test_tokens_are_told_as_they_come(model, lookup):
    told: list[list[int]] = [[], [], []]
    prompts = prompts_of(2, 5, 3)
    texts = model.generate(
        prompts,
        9,
        seeds=[1, 2, 3],
        prompt_lookup=lookup,
        on_token=lambda b, token: told[b].append(token),
    )
    assert [x[len(p) :].tolist() for x, p in zip(texts, prompts, strict=True)] == told
    end = told[1][4]
    cut = model.generate(
        prompts, 9, seeds=[1, 2, 3], prompt_lookup=lookup, on_token=lambda b, token: token == end
    )
    for new, text, prompt in zip(told, cut, prompts, strict=True):
        assert text[len(prompt) :].tolist() == new[: new.index(end) + 1 if end in new else 9]


# --- what is drawn --------------------------------------------------------------------------------


@pytest.mark.parametrize("options", [{}, {"repetition_penalty": 1.3, "top_p": 0.9}])
def test_a_sequence_depends_on_its_own_seed_alone(options):
    model, prompts = model_of("windows"), prompts_of(4, 9, 2, 2)
    prompts[3] = prompts[2]
    texts = model.generate(prompts, 30, seeds=[5, -6, 7, 8], **options)
    assert not torch.equal(texts[2], texts[3])
    for b, seed in ((1, -6), (3, 8)):
        alone = model.generate([prompts[b]], 30, seeds=[seed], **options)[0]
        assert torch.equal(alone, texts[b])
    looked_up = model.generate(prompts, 30, seeds=[5, -6, 7, 8], prompt_lookup=2, **options)
    assert all(map(torch.equal, looked_up, texts))


def goodness(counts: Tensor, p: Tensor) -> float:
    """Standard deviations by which chi squared of counts is above what it should be."""
    expected = p * counts.sum()
    of = expected > 5
    chi = ((counts - expected)[of] ** 2 / expected[of]).sum() + (
        counts[~of].sum() - expected[~of].sum()
    ) ** 2 / expected[~of].sum().clamp_min(1.0)
    degrees = int(of.sum())
    return float((chi - degrees) / math.sqrt(2 * degrees))


def test_numbers_are_exponential_and_apart():
    seeds, index = torch.arange(64)[:, None], torch.arange(64)
    e = exponentials(seeds, index, 50).double()
    assert e.shape == (64, 64, 50)
    assert len(e.unique()) > 0.99 * e.numel()
    for dims in ((0, 1), (1, 2), (0, 2)):  # of each token, sequence and step
        mean, n = e.mean(dims), e.numel() / e.mean(dims).numel()
        assert (mean - 1).abs().max() < 5 / math.sqrt(n)
    shares = torch.bincount((e * 4).long().clamp(max=15).flatten(), minlength=16).double()
    edges = torch.exp(-torch.arange(17, dtype=torch.float64) / 4)
    edges[-1] = 0.0
    assert goodness(shares, edges[:-1] - edges[1:]) < 5
    for a, b in ((e[1:], e[:-1]), (e[:, 1:], e[:, :-1]), (e[..., 1:], e[..., :-1])):
        assert ((a - 1) * (b - 1)).mean().abs() < 5 / math.sqrt(a.numel())


def test_samples_have_the_probabilities():
    logits = torch.randn(30) * 3
    n = 40000
    got = sample(logits.expand(n, -1), torch.arange(n), torch.full((n,), 3), Sampling(0.7), None)
    p = torch.softmax(logits.double() / 0.7, -1)
    assert goodness(torch.bincount(got, minlength=30).double(), p) < 5


@pytest.mark.parametrize("top_p", [0.0, 0.3, 0.9, 0.999, 1.0])
def test_the_nucleus_is_that_of_a_sort(top_p):
    p = torch.softmax(3 * torch.randn(50, 200), -1)
    kept = nucleus(p, top_p)
    for row, mine in zip(p.double(), kept, strict=True):
        order = row.argsort(descending=True)
        before = row[order].cumsum(0) - row[order]
        exact = (before < top_p).sum().clamp_min(1)
        near = int(((before - top_p).abs() < 1e-6).sum())  # a sum in float32 may fall on either side
        assert abs(int(mine.sum()) - int(exact)) <= near
        assert mine[order[: int(mine.sum())]].all()


def test_filters_keep_what_they_say():
    logits = torch.tensor([[1.0, 3.0, 2.0, -1.0, 2.5]])
    p = torch.softmax(logits, -1)[0]

    def kept(**options: Any) -> list[int]:
        return filtered(logits, Sampling(**options))[0].isfinite().nonzero().flatten().tolist()

    assert kept() == [0, 1, 2, 3, 4]
    assert kept(top_k=2) == [1, 4]
    assert kept(top_p=float(p[1]) - 0.01) == [1]
    assert kept(top_p=float(p[1]) + 0.01) == [1, 4]
    assert kept(min_p=0.5) == [1, 4]
    assert kept(min_p=0.5, temperature=4.0) == [0, 1, 2, 4]
    assert kept(top_k=3, top_p=0.99, min_p=0.4) == [1, 4]
    assert kept(top_p=0.0) == kept(min_p=1.0) == kept(top_k=1) == [1]


def test_the_repetition_penalty_is_that_of_what_is_there(model):
    seen = torch.tensor([True, True, False, False])
    got = penalized(torch.tensor([2.0, -2.0, 2.0, -2.0]), seen, 4.0)
    assert got.tolist() == [0.5, -8.0, 2.0, -2.0]
    prompt = prompts_of(5)[0]
    text = model.generate([prompt], 15, temperature=0, repetition_penalty=1e30)[0].tolist()
    assert len({*text[5:]} | {*prompt.tolist()}) == 15 + len({*prompt.tolist()})
    # Of equal texts, whether the host reads them or not.
    looked_up = model.generate([prompt], 15, temperature=0, repetition_penalty=1e30, prompt_lookup=5)
    assert looked_up[0].tolist() == text


# --- guesses --------------------------------------------------------------------------------------


def test_guesses_are_what_came_before():
    lookup = Lookup([1, 2, 3, 9, 8, 7, 1, 2, 3])
    assert lookup.guess(3) == [9, 8, 7]
    lookup.add([4])
    assert lookup.guess(3) == []
    lookup.add([2])
    assert lookup.guess(2) == [3, 4]
    assert Lookup([5, 6, 5, 6]).guess(5) == [5, 6, 5, 6, 5]
    assert Lookup([5, 5]).guess(4) == [5, 5, 5, 5]
    assert Lookup([5]).guess(4) == []


class Calls:
    """The numbers of tokens of each call of a model with a cache."""

    def __init__(self, model: nn.GPT) -> None:
        self.sizes: list[int] = []
        self.handle = model.register_forward_pre_hook(
            lambda _, args, options: self.sizes.append(args[0].shape[1]), with_kwargs=True
        )


@pytest.mark.parametrize("lookup", [1, 3, 15])
@pytest.mark.parametrize("kind", ["windows", "llama"])
def test_guesses_spare_calls_and_change_nothing(kind, lookup):
    """Greedily, of texts that repeat themselves: no more calls, fewer in all."""
    model = model_of(kind)
    prompts = [torch.tensor([3, 1, 4, 1, 5, 9, 2] * 3, device=DEVICE), prompts_of(2)[0]]
    config = dataclasses.replace(model.config, context=80)
    longer = nn.GPT(config, impl=model.blocks[0].attention.impl, device=DEVICE).requires_grad_(False)
    torch.manual_seed(1)
    cache = longer.make_cache(2, chunk=16)
    want = longer.generate(prompts, 50, temperature=0, cache=cache)
    calls = Calls(longer)
    got = longer.generate(prompts, 50, temperature=0, prompt_lookup=lookup, cache=cache)
    calls.handle.remove()
    for text, other, prompt in zip(got, want, prompts, strict=True):
        if not torch.equal(text, other):
            check_greedy(longer, text, len(prompt), 80)
        assert len(text) == len(other)
    decoding = calls.sizes[-50:]
    assert lookup + 1 in decoding
    assert len([n for n in calls.sizes if n <= lookup + 1]) < 49


def test_guesses_leave_the_distribution_as_it_is():
    """Of pairs of tokens behind a prompt that makes guesses, against the model's own probabilities."""
    torch.manual_seed(2)
    config = nn.GPTConfig(vocab_size=6, context=16, n_layers=1, n_heads=2, d_model=16)
    model = nn.GPT(config, impl="torch" if DEVICE.type == "cpu" else None, device=DEVICE)
    with torch.no_grad():
        for p in model.parameters():
            p.mul_(6)
    prompt = torch.tensor([0, 1, 2, 0, 1, 2, 0], device=DEVICE)
    n = 3000
    calls = Calls(model)
    texts = model.generate([prompt] * n, 3, seeds=range(n), prompt_lookup=3)
    assert 4 in calls.sizes
    calls.handle.remove()
    pairs = torch.stack(texts)[:, 7:]
    first = torch.softmax(model(prompt[None])[0][0, -1].double(), -1)
    behind = torch.stack([torch.cat([prompt, torch.tensor([a], device=DEVICE)]) for a in range(6)])
    second = torch.softmax(model(behind)[0][:, -1].double(), -1)
    both = (first[:, None] * second).flatten().detach()
    counts = torch.bincount(pairs[:, 0] * 6 + pairs[:, 1], minlength=36).double()
    assert goodness(counts, both) < 5


# --- graphs ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("page_size", [None, 2])
def test_steps_of_a_graph_are_those_without(model, monkeypatch, page_size):
    """A stand-in for CUDA graphs: a capture keeps the call and does nothing, a replay makes it, while
    the host counts nothing by itself."""
    inside: list[bool] = []
    made: list[Any] = []

    class Graph:
        def __init__(self, run: Any) -> None:
            self.run, self.replays = run, 0
            made.append(self)

        def replay(self) -> None:
            self.replays += 1
            inside.append(True)
            self.run()
            inside.pop()

    monkeypatch.setattr(generation, "captured", lambda device, run: Graph(run))
    monkeypatch.setattr(generation, "on_another_stream", lambda device, run: run())
    monkeypatch.setattr(generation, "wants_graph", lambda model, cache, asked: asked is None)
    monkeypatch.setattr(kv_cache, "is_capturing", lambda x: bool(inside))
    prompts = prompts_of(3, 6)
    cache = model.make_cache(2, page_size=page_size)
    options: dict[str, Any] = {"seeds": [3, 4], "repetition_penalty": 1.1}
    for lookup in (0, 3):
        plain = model.generate(prompts, 40, cuda_graph=False, **options)
        for _ in range(2):
            got = model.generate(prompts, 40, cache=cache, prompt_lookup=lookup, **options)
            assert all(map(torch.equal, got, plain))
            assert cache.counts == cache.lengths.tolist()
    assert 1 < len(made) <= 2  # one for each number of tokens, kept with the cache
    assert made[0].replays > 30
    with torch.no_grad():
        model.norm.weight.mul_(1.5)  # where it lies
        again = model.generate(prompts, 12, cache=cache, **options)
        plain = model.generate(prompts, 12, cuda_graph=False, **options)
        assert all(map(torch.equal, again, plain))
        assert len(made) <= 2
        model.norm.weight.data = model.norm.weight.data / 1.5  # elsewhere
    model.generate(prompts, 12, cache=cache, **options)
    assert len(made) == 3


def test_graphs_go_with_their_cache(model, monkeypatch):
    """At once, and not when the collector comes, in another capture say."""
    monkeypatch.setattr(generation, "on_another_stream", lambda device, run: run())
    monkeypatch.setattr(generation, "wants_graph", lambda model, cache, asked: True)
    cache = model.make_cache(2)
    model.generate(prompts_of(3, 6), 1 + generation.WARM, cache=cache)
    step = weakref.ref(cache.decoder[1].step(1))
    assert step().calls == generation.WARM
    del cache
    assert step() is None


@pytest.mark.gpu
def test_no_garbage_is_collected_in_a_capture(model):
    """A graph that the collector alone finds goes before or behind a capture."""
    prompts, threshold = prompts_of(3, 6), gc.get_threshold()
    want = model.generate(prompts, 8, cuda_graph=False, temperature=0)
    try:
        for _ in range(5):
            gc.set_threshold(2)
            cache: Any = model.make_cache(2)
            assert all(map(torch.equal, model.generate(prompts, 8, cache=cache, temperature=0), want))
            cache.itself = cache
    finally:
        gc.set_threshold(*threshold)


@pytest.mark.gpu
@pytest.mark.parametrize("lookup", [0, 3])
@pytest.mark.parametrize("options", CACHES.values(), ids=CACHES)
@pytest.mark.parametrize("kind", KINDS)
def test_replays_give_the_tokens_of_calls(kind, options, lookup):
    model, prompts = model_of(kind), prompts_of(3, 1, 6)
    drawn: dict[str, Any] = {"seeds": [3, 4, 5], "repetition_penalty": 1.1}
    plain = model.generate(prompts, 40, cuda_graph=False, cache=model.make_cache(3, **options), **drawn)
    cache = model.make_cache(3, **options)
    for _ in range(2):
        got = model.generate(prompts, 40, cuda_graph=True, cache=cache, prompt_lookup=lookup, **drawn)
        assert all(map(torch.equal, got, plain))
        assert cache.counts == cache.lengths.tolist()


def test_a_graph_that_cannot_be_is_refused():
    model = model_of("gpt")
    if DEVICE.type == "cpu":
        with pytest.raises(
            ValueError, match="cuda_graph is True; it takes None or False where tensors are"
        ):
            model.generate(prompts_of(2), 1, cuda_graph=True)
        return
    model.register_forward_hook(lambda *args: None)
    with pytest.raises(
        ValueError, match="cuda_graph is True; it takes None or False where modules have"
    ):
        model.generate(prompts_of(2), 1, cuda_graph=True)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"top_p": 1.5}, "top_p is 1.5"),
        ({"min_p": -0.1}, "min_p is -0.1"),
        ({"repetition_penalty": 0.0}, "repetition_penalty is 0.0"),
        ({"stop_tokens": 61}, "stop_tokens is 61; it takes ids from 0 to 60"),
        ({"stop_tokens": ["a"]}, "stop_tokens is 'a'"),
        ({"seeds": [1]}, "seeds is of 1 numbers"),
        ({"seeds": [1, 2], "generator": torch.Generator()}, "seeds is of 2 numbers"),
        ({"seeds": [1, 0.5]}, "seeds is 0.5"),
        ({"stop_tokens": None}, "stop_tokens is None; it takes ids"),
        ({"stop_tokens": True}, "stop_tokens is True; it takes ids"),
        ({"seeds": 5}, "seeds is 5; it takes 2 numbers"),
        ({"generator": 5}, r"generator is 5; it takes a torch\.Generator"),
        ({"prompt_lookup": 16}, "prompt_lookup is 16; it takes an integer from 0 to 15"),
        ({"on_token": 5}, "on_token is 5; it takes a function"),
        ({"cuda_graph": "no"}, "cuda_graph is 'no'; it takes True or False"),
        ({"cache": 3}, "cache is 3"),
        (
            {"cache": nn.KVCache(3, 8, 3, 4, 8)},
            r"cache is KVCache\(3 x 8 tokens.*; it takes a KVCache of 2 sequences",
        ),
        (
            {"cache": nn.KVCache(2, 24, 3, 4, 8, windows=[3] * 3, chunk=2), "prompt_lookup": 2},
            "prompt_lookup is 2; it takes less than chunk of the cache, 2",
        ),
        ({"tokens": [torch.zeros(1, 2).long(), torch.zeros(2).long()]}, r"tokens is of shape \[1, 2\]"),
        ({"tokens": [torch.zeros(0).long(), torch.zeros(2).long()]}, "tokens is of length 0"),
        ({"tokens": [torch.zeros(2).long(), torch.full((2,), 61)]}, "tokens is from 61 to 61"),
        ({"tokens": [torch.zeros(2), torch.zeros(2).long()]}, r"tokens is of dtype torch\.float32"),
    ],
)
def test_generate_names_what_does_not_fit(model, changes, said):
    arguments: dict[str, Any] = {"tokens": prompts_of(1, 2), "max_new_tokens": 1}
    with pytest.raises((TypeError, ValueError), match=rf"^GPT\.generate: {said}"):
        model.generate(**arguments | changes)


def test_numbers_may_be_of_any_kind(model):
    prompts = prompts_of(2, 5)
    want = model.generate(prompts, 3, seeds=[1, 2], top_k=4, prompt_lookup=2, stop_tokens=[0])
    numbers: Any = {"top_k": np.uint8(4), "prompt_lookup": np.uint8(2), "stop_tokens": np.array([0])}
    got = model.generate(prompts, np.uint8(3), seeds=np.array([1, 2]), **numbers)
    assert all(map(torch.equal, got, want))


@pytest.mark.slow
def test_a_compiled_model_generates_the_same():
    model, prompts = model_of("windows"), prompts_of(2, 5)
    want = model.generate(prompts, 6, temperature=0)
    torch._dynamo.reset()
    model.compile(backend="eager")
    assert all(map(torch.equal, model.generate(prompts, 6, temperature=0), want))
