"""nn.KVCache: calls of modules with it are those without, whatever stands where no token is; room,
pages, and what goes back."""

from __future__ import annotations

import dataclasses
import gc
import weakref
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from flashproto import nn
from flashproto.nn import GPTConfig, KVCache

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
TINY = GPTConfig(vocab_size=61, context=24, n_layers=3, n_heads=4, d_model=32)
LLAMA: dict[str, Any] = {"norm": "rms", "mlp": "swiglu", "positions": "rope", "bias": False}
KINDS: dict[str, dict[str, Any]] = {
    "gpt": {},
    "llama": {**LLAMA, "n_kv_heads": 2},
    "windows": {"window": 3, "window_pattern": "SL", "softcap": 5.0},
    "sinks": {**LLAMA, "n_kv_heads": 1, "window": 4, "window_pattern": "SSL", "sinks": True},
}
CACHES: dict[str, dict[str, Any]] = {"rows": {}, "rolling": {"chunk": 5}, "pages": {"page_size": 4}}
CACHES["rolling and pages"] = {"chunk": 5, "page_size": 3}


def filled(cache: KVCache) -> KVCache:
    """With NaN where memory is as it was found."""
    for layer in cache.layers:
        for x in layer.memory:
            x.copy_(torch.full(x.shape, torch.nan))
    return cache


def model_of(kind: str, impl: str | None = None, scale: float = 4.0) -> nn.GPT:
    """On a CPU without the interpreter, unless `impl` says so; far from uniform."""
    torch.manual_seed(0)
    if impl is None and DEVICE.type == "cpu":
        impl = "torch" if {*KINDS[kind]}.isdisjoint(("softcap", "sinks")) else "reference"
    model = nn.GPT(dataclasses.replace(TINY, **KINDS[kind]), impl=impl, device=DEVICE)
    with torch.no_grad():
        for name, p in model.named_parameters():
            p.normal_() if name.endswith("sinks") else p.mul_(scale)
    return model.requires_grad_(False)


def tokens_of(*shape: int) -> Tensor:
    return torch.randint(61, shape, device=DEVICE)


def ends(*sizes: int) -> Tensor:
    return torch.tensor([0, *sizes], device=DEVICE).cumsum(0).int()


@pytest.mark.parametrize("options", CACHES.values(), ids=CACHES)
@pytest.mark.parametrize("kind", KINDS)
def test_tokens_in_parts_are_tokens_at_once(kind, options):
    """Prompts of their own lengths side by side, then the same number of tokens of each."""
    model, tokens = model_of(kind), tokens_of(3, 24)
    want = model(tokens)[0]
    cache = filled(model.make_cache(3, **options))
    lengths, made = [5, 0, 2], []
    prompt = torch.cat([row[:n] for row, n in zip(tokens, lengths, strict=True)])[None]
    packed = model(prompt, cache=cache, cu_seqlens=ends(*lengths))[0]
    assert cache.counts == cache.lengths.tolist() == lengths
    made = [[part] for part in packed[0].split(lengths)]
    for n in (1, 5, 3, 1, 1, 4, 4):
        new = torch.stack([row[i : i + n] for row, i in zip(tokens, cache.counts, strict=True)])
        for b, logits in enumerate(model(new, cache=cache)[0]):
            made[b].append(logits)
    for b, parts in enumerate(made):
        got = torch.cat(parts)
        torch.testing.assert_close(got, want[b, : len(got)], rtol=1e-4, atol=1e-4)
    assert cache.counts == cache.lengths.tolist() == [24, 19, 21]


@pytest.mark.parametrize("options", [{}, {"chunk": 9, "page_size": 3}])
def test_kernels_read_nothing_that_no_token_wrote(options):
    model, tokens = model_of("sinks", "triton"), tokens_of(2, 9)
    cache = filled(model.make_cache(2, **options))
    packed = model(tokens.flatten()[None, :11], cache=cache, cu_seqlens=ends(9, 2))[0]
    cache.truncate([5, 2])
    one = model(torch.stack([tokens[0, 5:6], tokens[1, 2:3]]), cache=cache)[0]
    want = model(tokens)[0]
    torch.testing.assert_close(packed[0, :9], want[0], rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(one[:, 0], torch.stack([want[0, 5], want[1, 2]]), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("kind", ["gpt", "windows"])
def test_logits_of_the_last_tokens(kind):
    model, tokens = model_of(kind), tokens_of(2, 8)
    whole = model(tokens)[0]
    last = model(tokens, return_logits="last")[0]
    torch.testing.assert_close(last, whole[:, -1], rtol=1e-4, atol=1e-4)
    packed = tokens.flatten()[None, :13]
    last = model(packed, cu_seqlens=ends(8, 5), return_logits="last")[0]
    torch.testing.assert_close(last, torch.stack([whole[0, 7], whole[1, 4]]), rtol=1e-4, atol=1e-4)
    with pytest.raises(ValueError, match="GPT: return_logits is 'last'; it takes True or False"):
        model(tokens, tokens, return_logits="last")
    with pytest.raises(
        ValueError, match=r"GPT: tokens is of shape \[2, 0\]; it takes at least one token"
    ):
        model(tokens[:, :0], return_logits="last")
    with pytest.raises(ValueError, match="GPT: return_logits is 'all'; it takes True, False or 'last'"):
        model(tokens, return_logits="all")


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float8_e4m3fn])
@pytest.mark.parametrize("page_size", [None, 5])
def test_memory_of_fewer_bits(dtype, page_size):
    model, tokens = model_of("sinks", "reference", scale=2.0), tokens_of(2, 20)
    cache = filled(model.make_cache(2, chunk=7, page_size=page_size, dtype=dtype))
    parts = [model(part, cache=cache)[0] for part in tokens.split([7, 7, 1, 5], 1)]
    got, want = torch.cat(parts, 1), model(tokens)[0]
    assert got.dtype == torch.float32
    error = (got - want).norm() / want.norm()
    assert 1e-5 < error < (0.02 if dtype == torch.bfloat16 else 0.15)


@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("options", [{"qk_norm": True}, {"alibi": True}, {"window": (2, 0)}])
def test_a_layer_by_itself(options, interleaved):
    impl = "reference" if "alibi" in options else None
    layer = nn.Attention(32, 4, 2, **options, interleaved=interleaved, impl=impl, device=DEVICE)
    layer = layer.requires_grad_(False)
    tables = None if "alibi" in options else nn.rope_tables(16, 8, device=DEVICE)
    cache = KVCache(
        2, 16, 1, 2, 8, windows=[2] if "window" in options else None, chunk=6, device=DEVICE
    )
    x = torch.randn(2, 16, 32, device=DEVICE)
    filled(cache)
    made = []
    for part in x.split([6, 1, 4, 1, 4], 1):
        made.append(layer(part, tables, cache=cache.layers[0]))
        cache.advance()
    torch.testing.assert_close(torch.cat(made, 1), layer(x, tables), rtol=1e-5, atol=1e-5)


def test_autocast_has_its_own_dtype():
    model, tokens = model_of("llama"), tokens_of(2, 9)
    with torch.autocast(DEVICE.type, torch.bfloat16):
        cache = filled(model.make_cache(2))
        got = torch.cat([model(part, cache=cache)[0] for part in tokens.split([8, 1], 1)], 1)
        want = model(tokens)[0]
    assert cache.dtype == got.dtype == torch.bfloat16
    assert (got - want).norm() / want.norm() < 0.02


# --- room -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("options", CACHES.values(), ids=CACHES)
def test_what_has_no_room_changes_nothing(options):
    model, tokens = model_of("windows"), tokens_of(2, 24)
    cache = filled(model.make_cache(2, 8, **options))
    model(tokens[:, :5], cache=cache)
    model(tokens[:, 5:7], cache=cache)
    before = [x.clone() for layer in cache.layers for x in layer.memory]
    with pytest.raises(
        ValueError, match="KVCache: new is 2 tokens for sequence 0, which has 7; it takes at"
    ):
        model(tokens[:, 7:9], cache=cache)
    for x, y in zip([x for layer in cache.layers for x in layer.memory], before, strict=True):
        assert torch.equal(x.view(torch.int32), y.view(torch.int32))
    assert cache.counts == cache.lengths.tolist() == [7, 7]
    want = model(tokens[:, :8])[0][:, 7:]
    torch.testing.assert_close(model(tokens[:, 7:8], cache=cache)[0], want, rtol=1e-4, atol=1e-4)
    with pytest.raises(ValueError, match=r"2 tokens for sequence 0, .* at most 0, for 8 in all"):
        model(tokens[0][None, :3], cache=cache, cu_seqlens=ends(2, 1))


def test_a_call_that_layers_with_windows_cannot_keep_is_refused():
    model = model_of("windows")
    cache = model.make_cache(1, chunk=4)
    assert [layer.k_cache.shape[1] for layer in cache.layers] == [7, 24, 7]
    with pytest.raises(ValueError, match="5 tokens for sequence 0; it takes at most chunk, 4"):
        model(tokens_of(1, 5), cache=cache)
    assert not model.make_cache(1, 7, chunk=4).rolls


def test_a_window_that_the_cache_does_not_keep_is_refused():
    layer = nn.Attention(32, 4, window=(5, 0), device=DEVICE).requires_grad_(False)
    x = torch.randn(1, 2, 32, device=DEVICE)
    for windows, fits in (([4], False), ([5], True), ([None], True)):
        cache = KVCache(1, 24, 1, 4, 8, windows=windows, chunk=2, device=DEVICE)
        if fits:
            layer(x, cache=cache.layers[0])
        else:
            with pytest.raises(
                ValueError, match=r"Attention: window is \[5, 0\]; it takes one of at most 4"
            ):
                layer(x, cache=cache.layers[0])


def test_replays_are_counted_and_refused():
    """Of a stand-in: what a graph holds is done by the device alone."""
    model, tokens = model_of("gpt"), tokens_of(2, 24)
    cache = filled(model.make_cache(2, 6, page_size=2))
    model(tokens[:, :3], cache=cache)

    class Graph:
        replays = 0

        def replay(self) -> None:
            self.replays += 1
            cache.lengths += 1

    graph = Graph()
    for count in (4, 5, 6):
        cache.replay(graph)
        assert cache.counts == cache.lengths.tolist() == [count, count]
    with pytest.raises(ValueError, match="which has 6; it takes at most 0"):
        cache.replay(graph)
    assert graph.replays == 3


def test_memory_is_told_and_an_error_names_it():
    cache = KVCache(2, 64, 3, 2, 16, windows=[None, 7, 7], chunk=9, dtype=torch.bfloat16)
    held = [x for layer in cache.layers for x in layer.memory]
    assert cache.nbytes == sum(x.nbytes for x in held) == 2 * 2 * 2 * 2 * 16 * (64 + 16 + 16)
    assert repr(cache) == (
        "KVCache(2 x 64 tokens, 3 layers of 2 heads of 16, torch.bfloat16, 2.29e-05 GiB)"
    )
    eight = KVCache(2, 64, 1, 2, 16, page_size=16, pages=5, dtype=torch.float8_e4m3fn)
    assert eight.nbytes == sum(x.nbytes for x in eight.layers[0].memory) == 2 * 5 * 16 * 2 * (16 + 4)
    with pytest.raises(torch.OutOfMemoryError, match=r"^KVCache\(.*, 7\.55e\+07 GiB\) is memory that"):
        KVCache(2**20, 2**20, 12, 12, 64)


def test_a_cache_of_inference_mode_is_used_outside_of_it():
    with torch.inference_mode():
        cache = nn.KVCache(1, 8, 1, 2, 8)
    layer = nn.Attention(16, n_heads=2)
    with torch.no_grad():
        layer(torch.randn(1, 3, 16), cache=cache.layers[0])
        cache.advance()
    assert cache.counts == [3] and cache.lengths.tolist() == [3]


def test_memory_goes_with_the_cache():
    """At once, without a collection: a GPU has none to spare."""
    gc.disable()
    try:
        model = model_of("llama")
        cache = model.make_cache(1)
        model(tokens_of(1, 3), cache=cache)
        held = weakref.ref(cache.layers[0].k_cache)
        del cache
        assert held() is None
    finally:
        gc.enable()


def test_what_wraps_a_block_copies_no_memory():
    """FSDP's mixed precision casts the tensors that it finds in arguments, also in tuples and lists."""
    (layer,) = KVCache(1, 8, 1, 1, 8).layers
    assert torch.utils._pytree.tree_leaves({"cache": layer}) == [layer]


# --- pages, and what goes back --------------------------------------------------------------------


def test_pages_are_handed_out_and_taken_back():
    model, tokens = model_of("llama"), tokens_of(3, 24)
    cache = filled(model.make_cache(3, page_size=4, pages=7))
    want = model(tokens)[0]
    model(tokens[:, :8], cache=cache)
    assert cache.free_pages == 1
    with pytest.raises(ValueError, match="need is 3 pages more; it takes the 1 of 7 that are free"):
        model(tokens[:, 8:9], cache=cache)
    assert (cache.free_pages, cache.counts) == (1, [8, 8, 8])
    cache.reset([1])
    assert (cache.free_pages, cache.counts) == (3, [8, 0, 8])
    new = torch.stack([tokens[0, 8], tokens[1, 0], tokens[2, 8]])[:, None]
    got = model(new, cache=cache)[0][:, 0]
    torch.testing.assert_close(
        got, torch.stack([want[0, 8], want[1, 0], want[2, 8]]), rtol=1e-4, atol=1e-4
    )
    assert cache.free_pages == 0
    used = [p for b, n in enumerate(cache.counts) for p in cache.page_table[b, : -(-n // 4)].tolist()]
    assert sorted(used) == list(range(7))
    cache.reset()
    assert (cache.free_pages, cache.counts, cache.lengths.tolist()) == (7, [0] * 3, [0] * 3)


@pytest.mark.parametrize("options", CACHES.values(), ids=CACHES)
def test_tokens_that_are_forgotten_come_again(options):
    model, tokens = model_of("sinks"), tokens_of(2, 20)
    want = model(tokens)[0]
    cache = filled(model.make_cache(2, **options))
    for part in tokens[:, :15].split(5, 1):
        model(part, cache=cache)
    cache.truncate([12, 13])
    new = torch.stack([tokens[0, 12:16], tokens[1, 13:17]])
    got = model(new, cache=cache)[0]
    torch.testing.assert_close(got, torch.stack([want[0, 12:16], want[1, 13:17]]), rtol=1e-4, atol=1e-4)
    if cache.rolls:
        with pytest.raises(
            ValueError, match=r"lengths is 10 of sequence 0, which has had 16; it takes 0"
        ):
            cache.truncate([10, 17])
    with pytest.raises(ValueError, match="lengths is 18 of sequence 1; it takes 0 to the 17"):
        cache.truncate([16, 18])


@pytest.mark.parametrize("options", CACHES.values(), ids=CACHES)
@pytest.mark.parametrize(("source", "target"), [([1, 1], [0, 2]), ([2, 0, 1], [0, 1, 2]), ([], [])])
def test_sequences_are_copied(options, source, target):
    model, tokens = model_of("windows"), tokens_of(3, 12)
    cache = filled(model.make_cache(3, 12, **options))
    sizes = [4, 5, 1]
    packed = torch.cat([row[:n] for row, n in zip(tokens, sizes, strict=True)])[None]
    model(packed, cache=cache, cu_seqlens=ends(*sizes))
    origin = list(range(3))
    for b, a in zip(target, source, strict=True):
        origin[b] = a
    cache.copy(source, target)
    assert cache.counts == cache.lengths.tolist() == [sizes[a] for a in origin]
    new = tokens_of(3, 3)
    got = model(new, cache=cache)[0]
    for b, a in enumerate(origin):
        whole = torch.cat([tokens[a, : sizes[a]], new[b]])
        torch.testing.assert_close(got[b], model(whole[None])[0][0, -3:], rtol=1e-4, atol=1e-4)
    if cache.page_table is not None:
        used = [page for own in cache._pages for page in own]
        assert len({*used}) == len(used) == cache.pages - cache.free_pages


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (lambda: KVCache(0.5, 8, 1, 1, 8), "KVCache: batch is 0.5"),
        (lambda: KVCache(1, 0, 1, 1, 8), "KVCache: room is 0"),
        (lambda: KVCache(1, 8, 1, 1, 8, dtype=torch.int8), "KVCache: dtype is torch.int8"),
        (lambda: KVCache(1, 8, 2, 1, 8, windows=[3]), "KVCache: windows is of length 1"),
        (lambda: KVCache(1, 8, 1, 1, 8, windows=3), "KVCache: windows is 3; it takes one for each"),
        (lambda: KVCache(1, 8, 1, 1, 8, windows=[-1]), "KVCache: windows is -1; it takes integers"),
        (lambda: KVCache(1, 8, 1, 1, 8, windows=[2.5]), "KVCache: windows is 2.5; it takes integers"),
        (lambda: KVCache(1, 8, 1, 1, 8, pages=3), "KVCache: pages is 3"),
        (lambda: KVCache(1, 8, 1, 1, 8).advance(), "KVCache.advance: the number of new tokens is None"),
        (lambda: KVCache(2, 8, 1, 1, 8).reserve([1]), "KVCache: new is of 1 numbers"),
        (lambda: KVCache(2, 8, 1, 1, 8).reserve(True), "KVCache: new is True; it takes integers"),
        (lambda: KVCache(2, 8, 1, 1, 8).reserve([1.0, 1]), "KVCache: new is 1.0; it takes integers"),
        (lambda: KVCache(2, 8, 1, 1, 8).truncate(0), "KVCache.truncate: lengths is 0; it takes"),
        (lambda: KVCache(2, 8, 1, 1, 8).truncate([0.0, 0]), "KVCache.truncate: lengths is 0.0"),
        (lambda: KVCache(2, 8, 1, 1, 8).reset(0), "KVCache: sequences is 0; it takes integers"),
        (lambda: KVCache(2, 8, 1, 1, 8).copy([0.0], [1]), "KVCache: source is 0.0; it takes integers"),
        (lambda: KVCache(2, 8, 1, 1, 8).truncate([0]), "KVCache.truncate: lengths is of 1 numbers"),
        (lambda: KVCache(2, 8, 1, 1, 8).reset([2]), r"KVCache: sequences is \[2\]"),
        (lambda: KVCache(2, 8, 1, 1, 8).copy([0, 1], [1, 1]), r"KVCache.copy: target is \[1, 1\]"),
        (lambda: nn.GPT(TINY).make_cache(1, 25), "GPT.make_cache: room is 25; it takes 1 to context"),
        (lambda: nn.GPT(TINY)(torch.zeros(1, 1).long(), cache=3), "GPT: cache is 3"),
        (
            lambda: nn.GPT(TINY)(torch.zeros(1, 1).long(), cache=KVCache(1, 25, 3, 4, 8)),
            r"GPT: cache is KVCache\(1 x 25 tokens, 3 layers .* takes one of 3 layers and room for",
        ),
        (
            lambda: nn.GPT(TINY)(torch.zeros(1, 1).long(), cache=KVCache(2, 8, 3, 4, 8)),
            "GPT: cache is of 2 sequences; it takes one for each of 1",
        ),
        (
            lambda: nn.GPT(TINY)(
                torch.zeros(1, 1).long(),
                cache=KVCache(1, 8, 3, 4, 8),
                documents=torch.zeros(1, 1).long(),
            ),
            "GPT: documents is a tensor",
        ),
        (
            lambda: nn.Attention(8, 1)(torch.zeros(1, 1, 8), cache=KVCache(1, 8, 1, 1, 8)),
            "Attention: cache is of type KVCache; it takes a layer of an nn.KVCache",
        ),
        (
            lambda: nn.Attention(8, 1)(
                torch.zeros(1, 1, 8), cache=KVCache(1, 8, 1, 1, 8).layers[0], positions=torch.zeros(1)
            ),
            "Attention: positions is a tensor .* takes None where cache is given",
        ),
    ],
)
def test_wrong_arguments_are_named(make, said):
    with pytest.raises((ValueError, TypeError), match=rf"^{said}"):
        make()


def test_numbers_may_be_of_any_kind():
    sizes = map(np.uint8, (2, 200, 1, 2, 64))
    cache = KVCache(*sizes, windows=[np.uint8(7)], chunk=np.uint8(250), page_size=np.uint8(100))
    assert cache.nbytes == sum(x.nbytes for layer in cache.layers for x in layer.memory)
    cache.reserve(np.array([3, 4]))
    cache.advance()
    cache.truncate(torch.tensor([3, 2]))
    cache.reset(b for b in [0])
    assert cache.counts == [0, 2]
    assert {*map(type, cache.counts)} == {int}


def test_a_device_that_is_not_there_is_no_lack_of_memory():
    with pytest.raises(RuntimeError, match="nowhere") as caught:
        KVCache(1, 8, 1, 1, 8, device="nowhere")
    assert not isinstance(caught.value, torch.OutOfMemoryError)


def test_models_that_share_a_cache_have_their_own_rope():
    models = [model_of("llama"), model_of("llama")]
    models[1].config = dataclasses.replace(models[1].config, rope_theta=100.0)
    cache, tokens = models[0].make_cache(2), tokens_of(2, 9)
    for model in models:
        cache.reset()
        got = model(tokens, cache=cache)[0]
        torch.testing.assert_close(got, model(tokens)[0], rtol=1e-4, atol=1e-4)


def test_a_call_that_fails_on_the_way_may_have_written():
    """Then a row that keys go round in has lost as many."""
    model, tokens = model_of("windows"), tokens_of(1, 20)
    cache = model.make_cache(1, chunk=4)
    for part in tokens[:, :16].split(4, 1):
        model(part, cache=cache)
    failing = model.blocks[-1].register_forward_hook(lambda *args: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        model(tokens[:, 16:], cache=cache)
    failing.remove()
    with pytest.raises(ValueError, match="lengths is 12 of sequence 0, which has had 20"):
        cache.truncate([12])
    got = model(tokens[:, 16:], cache=cache)[0]
    torch.testing.assert_close(got, model(tokens)[0][:, 16:], rtol=1e-4, atol=1e-4)


def test_pages_without_tokens_are_not_copied():
    model, tokens = model_of("gpt"), tokens_of(2, 6)
    cache = model.make_cache(2, page_size=4)
    model(tokens[:, :3], cache=cache)
    cache.reserve(9)
    cache.copy([0], [1])
    assert cache.counts == [3, 3]
    want = model(tokens[:1].expand(2, -1))[0][:, 3:]
    got = model(tokens[:1, 3:].expand(2, -1), cache=cache)[0]
    torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-4)


def test_a_call_of_other_sequences_takes_no_pages():
    model = model_of("gpt")
    cache = model.make_cache(2, page_size=4)
    with pytest.raises(ValueError, match="cache is of 2 sequences; it takes one for each of 3"):
        model(tokens_of(3, 9), cache=cache)
    assert cache.free_pages == cache.pages


def test_there_is_no_gradient():
    model = model_of("gpt").requires_grad_()
    with pytest.raises(ValueError, match=r"there is no gradient.*Call it under torch\.no_grad"):
        model(tokens_of(1, 3), cache=model.make_cache(1))


@pytest.mark.slow
def test_a_compiled_model_has_caches_too():
    model, tokens = model_of("windows"), tokens_of(2, 9)
    want = model(tokens)[0]
    torch._dynamo.reset()
    compiled = torch.compile(model, backend="eager")
    cache = filled(model.make_cache(2, 9, chunk=4))
    parts = [compiled(part, cache=cache)[0] for part in tokens.split([4, 1, 1, 1, 1, 1], 1)]
    torch.testing.assert_close(torch.cat(parts, 1), want, rtol=1e-4, atol=1e-4)
    with pytest.raises(ValueError, match="which has 9; it takes at most 0"):
        compiled(tokens[:, :1], cache=cache)
