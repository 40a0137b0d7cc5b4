"""Dropout of attention's probabilities: which are dropped, and where the seed comes from.  What comes
out of it is in test_variants*.py, beside all other options."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from attention_problem import Problem
from operators import launches
from torch import Tensor
from torch.utils.checkpoint import checkpoint
from variant_problem import Call, starts

import flashproto
from flashproto import masks, nn
from flashproto.reference.philox import kept as kept_by_reference

pytest.importorskip("triton")

import triton
import triton.language as tl

from flashproto.kernels.philox import kept
from flashproto.ops import call_cache

ON_GPU = torch.cuda.is_available()
IMPLS = ("triton", "reference")


def seed_of(number: int, device: str = "cpu") -> Tensor:
    return torch.tensor([number], device=device)


# --- which are dropped ----------------------------------------------------------------------------


@triton.jit
def kept_kernel(
    seed_ptr, mask_ptr, head, i0, j0, threshold,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, ACROSS: tl.constexpr,
):  # fmt: skip
    """mask [BM, BN]."""
    keep = kept(tl.load(seed_ptr), head + i0 * 0, i0, j0, threshold + i0 * 0, BLOCK_M, BLOCK_N, ACROSS)
    i, j = tl.arange(0, BLOCK_M), tl.arange(0, BLOCK_N)
    if ACROSS:
        tl.store(mask_ptr + i[None, :] * BLOCK_N + j[:, None], keep.to(tl.int8))
    else:
        tl.store(mask_ptr + i[:, None] * BLOCK_N + j[None, :], keep.to(tl.int8))


@pytest.mark.parametrize("across", [False, True])
@pytest.mark.parametrize(
    ("shape", "place"), [((16, 16), (0, 0)), ((64, 32), (64, 96)), ((32, 128), (2**20, 2**25))]
)
def test_tiles_of_the_kernels_are_the_reference(
    shape: tuple[int, int], place: tuple[int, int], across: bool, device: str
) -> None:
    (M, N), (i0, j0) = shape, place
    seed = torch.randint(2**63 - 1, (1,), device=device)
    made = torch.empty(M, N, dtype=torch.int8, device=device)
    kept_kernel[(1,)](seed, made, 7, i0, j0, 20000, M, N, across)
    i, j = torch.arange(M, device=device) + i0, torch.arange(N, device=device) + j0
    head = torch.tensor(7, device=device)
    assert torch.equal(made.bool(), kept_by_reference(seed, head, i[:, None], j, 20000 / 65536))


def test_the_mask_is_the_one_written_down_in_the_tests() -> None:
    seed = torch.randint(2**63 - 1, (1,))
    call = Call(
        Problem(torch.float32, 3, 2, 1, 37, 50, 8, 8, False),
        (),
        {"dropout_seed": seed, "dropout_p": 0.3},
    )
    mask = flashproto.dropout_mask(0.3, seed, (3, 2, 37, 50))
    assert torch.equal(mask, call.kept(torch.device("cpu")) > 0)


@pytest.mark.few(1)
@pytest.mark.parametrize("impl", IMPLS)
@pytest.mark.parametrize(("Sq", "Sk", "dtype"), [(70, 100, torch.float32), (130, 64, torch.bfloat16)])
def test_a_call_keeps_what_the_mask_says(impl: str, Sq: int, Sk: int, dtype: Any, device: str) -> None:
    """Forward, and by the gradients of v and q; with tiles of other sizes and parts of the keys too."""
    seed = torch.randint(2**63 - 1, (1,), device=device)
    mask = flashproto.dropout_mask(0.4, seed, (2, 2, Sq, Sk))
    q = torch.zeros(2, 2, Sq, 16, dtype=dtype, device=device)
    k = torch.zeros(2, 1, Sk, 16, dtype=dtype, device=device)
    v = torch.eye(Sk, dtype=dtype, device=device).expand(2, 1, Sk, Sk).contiguous().requires_grad_()
    out = flashproto.attention(q, k, v, dropout_p=0.4, dropout_seed=seed, impl=impl)
    assert torch.equal(out > 0, mask)
    share = round(0.4 * 65536) / 65536
    torch.testing.assert_close(out.float().amax(), torch.tensor(1 / (1 - share) / Sk, device=device),
                               rtol=1e-2, atol=0)  # fmt: skip
    small = v.detach()[..., :8].contiguous().requires_grad_()
    dout = torch.randn(2, 2, Sq, 8, dtype=dtype, device=device)
    out = flashproto.attention(q, k, small, dropout_p=0.4, dropout_seed=seed, impl=impl)
    (dv,) = torch.autograd.grad(out, small, dout)
    p = mask.double() / (1 - share) / Sk
    wanted = (p.mT @ dout.double()).sum(1, keepdim=True)
    tolerance = (
        {"rtol": 2e-2, "atol": 2e-2} if dtype == torch.bfloat16 else {"rtol": 1e-4, "atol": 1e-5}
    )
    torch.testing.assert_close(dv.double(), wanted, **tolerance)


def test_sequences_have_the_masks_of_batch_entries(device: str) -> None:
    lengths = [(9, 40), (0, 3), (33, 17)]
    cu_q, cu_k = starts(lengths, device)
    seed = torch.randint(2**63 - 1, (1,), device=device)
    mask = flashproto.dropout_mask(0.5, seed, (3, 2, 33, 40))
    q, k = (torch.zeros(n, 2, 16, device=device) for n in (42, 60))
    v = torch.cat([torch.eye(n, 48, device=device) for _, n in lengths])[:, None].expand(-1, 2, -1)
    for impl in IMPLS:
        given = {"dropout_p": 0.5, "dropout_seed": seed, "impl": impl}
        out = flashproto.attention_varlen(q, k, v.contiguous(), cu_q, cu_k, **given)
        for s, (Sq, Sk) in enumerate(lengths):
            got = out[cu_q[s] : cu_q[s + 1], :, :Sk].transpose(0, 1) > 0
            assert torch.equal(got, mask[s, :, :Sq, :Sk])


def deviations(counts: Tensor, n: int, p: float) -> Tensor:
    """Of counts of n draws each, in standard deviations."""
    return (counts - n * p) / math.sqrt(n * p * (1 - p))


@pytest.mark.parametrize("p", [0.1, 0.5, 0.9])
def test_shares_are_what_they_should_be(p: float) -> None:
    """Of all, and of each head, query, key and place in a square of 16 x 16: none is 6 standard
    deviations off, of about 1,500."""
    B, H, S = 2, 4, 256
    kept = flashproto.dropout_mask(p, torch.randint(2**63 - 1, (1,)), (B, H, S, S)).double()
    n, q = kept.numel(), 1 - round(p * 65536) / 65536
    squares = kept.view(B * H, S // 16, 16, S // 16, 16).sum((0, 1, 3))
    for counts in (kept.sum(), kept.sum((2, 3)), kept.sum((0, 1, 3)), kept.sum((0, 1, 2)), squares):
        assert deviations(counts, n // counts.numel(), q).abs().max() < 6


def test_neighbours_are_independent() -> None:
    """Those that share a call of Philox or a word of it, that are near, and of other heads, batch
    entries and seeds."""
    seed = torch.randint(2**63 - 2, (1,))
    kept = flashproto.dropout_mask(0.5, seed, (2, 4, 256, 256)).double() * 2 - 1
    others = [flashproto.dropout_mask(0.5, seed + 1, (2, 4, 256, 256)).double() * 2 - 1]
    others += [kept.roll(1, 0), kept.roll(1, 1), kept.mT]
    steps = itertools.product((0, 1, 2, 4, 8, 16, 128), repeat=2)
    others += [kept.roll(step, (2, 3)) for step in steps if step != (0, 0)]
    for other in others:
        both = kept * other
        assert abs(both.sum().item()) < 6 * math.sqrt(2 * both.numel())  # of kept.mT half are twice
    # Of one word, one call and neighbouring calls: a run of signs as often as any other.
    runs = kept.unflatten(3, (-1, 4)).sum(-1)
    for signs, share in ((4, 1 / 16), (2, 4 / 16), (0, 6 / 16), (-2, 4 / 16), (-4, 1 / 16)):
        count = (runs == signs).sum()
        assert deviations(count, runs.numel(), share).abs() < 6


@pytest.mark.parametrize("impl", IMPLS)
@pytest.mark.parametrize(
    ("p", "share"), [(0.0, 0), (7e-6, 0), (8e-6, 1), (0.99999, 65535), (1.0, 65536)]
)
def test_p_is_rounded_to_16_bits(p: float, share: int, impl: str, device: str) -> None:
    """To nothing: the plain kernel.  To 1: zeros, and gradients of 0."""
    q = torch.randn(1, 1, 20, 16, device=device, requires_grad=True)
    given = {"dropout_seed": seed_of(5, device), "impl": impl}
    with launches() as seen:
        out = flashproto.attention(q, q, q, dropout_p=p, **given)
    if impl == "triton" and not ON_GPU:
        assert [x.arguments["KIND"].DROPOUT for x in seen] == [bool(share)]
    same = flashproto.attention(q, q, q, dropout_p=share / 65536, **given)
    assert torch.equal(out, same)
    (gradient,) = torch.autograd.grad(out.sum(), q)
    assert gradient.isfinite().all()
    if share == 65536:
        assert not out.any() and not gradient.any()
        assert not flashproto.dropout_mask(p, seed_of(5), (1, 1, 20, 20)).any()
    if share == 0:
        assert torch.equal(out, flashproto.attention(q, q, q, impl=impl))


# --- the seed -------------------------------------------------------------------------------------


def attend(q: Tensor, **options: Any) -> Tensor:
    return flashproto.attention(q, q, q, dropout_p=0.5, **options)


FUNCTIONS: dict[str, Callable[..., Tensor]] = {
    "attention": attend,
    "masked": lambda q, **o: attend(q, mask=masks.padding(torch.tensor([9], device=q.device)), **o),
    "negative scale": lambda q, **o: attend(q, scale=-0.5, **o),
    "qkv": lambda q, **o: flashproto.attention_qkv(q.flatten(2), 2, 1, dropout_p=0.5, **o),
    "varlen": lambda q, **o: flashproto.attention_varlen(
        *[q[0]] * 3, *[torch.tensor([0, 4, 12], dtype=torch.int32, device=q.device)] * 2,
        dropout_p=0.5, **o,
    ),
}  # fmt: skip


@pytest.mark.parametrize("impl", IMPLS)
@pytest.mark.parametrize("name", FUNCTIONS)
def test_seeds_are_of_torchs_generator(name: str, impl: str, device: str) -> None:
    """One draw a call, the first call of its kind and later ones alike; a seed that is given is used as
    it is."""
    call_cache.forget()
    q = torch.randn(2, 12, 4, 16, device=device)
    call = partial(FUNCTIONS[name], q, impl=impl)
    torch.manual_seed(3)
    drawn = [torch.randint(2**63 - 1, (1,), device=device) for _ in range(3)]
    torch.manual_seed(3)
    made = [call() for _ in range(3)]
    assert not torch.equal(made[0], made[1])
    for out, seed in zip(made, drawn, strict=True):
        assert torch.equal(out, call(dropout_seed=seed))


@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("impl", IMPLS)
def test_a_checkpoint_drops_the_same_again(impl: str, reentrant: bool, device: str) -> None:
    call_cache.forget()
    q = torch.randn(1, 2, 20, 16, device=device, requires_grad=True)
    found = []
    for wrap in (checkpoint, lambda f, *x, **_: f(*x)):
        torch.manual_seed(3)
        out = wrap(partial(attend, impl=impl), q, use_reentrant=reentrant)
        torch.randn(5, device=device)
        found.append((out.detach(), *torch.autograd.grad(out.square().sum(), q)) if not reentrant else
                     (out.detach(), gradient_of(out.square().sum(), q)))  # fmt: skip
    for a, b in zip(*found, strict=True):
        assert torch.equal(a, b)


def gradient_of(loss: Tensor, x: Tensor) -> Tensor:
    x.grad = None
    loss.backward()
    assert x.grad is not None
    return x.grad


@pytest.mark.parametrize("impl", IMPLS)
def test_compiles_in_one_graph_with_the_draw(impl: str, device: str) -> None:
    torch.compiler.reset()
    q = torch.randn(1, 2, 20, 16, device=device, requires_grad=True)
    compiled = torch.compile(partial(attend, impl=impl), fullgraph=True, backend="aot_eager")
    found = []
    for function in (compiled, partial(attend, impl=impl)):
        torch.manual_seed(3)
        outs = [function(q) for _ in range(2)]
        assert not torch.equal(*outs)
        found.append([*outs, *torch.autograd.grad(outs[1].square().sum(), q)])
    torch.testing.assert_close(*found, rtol=1e-5, atol=1e-5)


def test_masks_are_traced(device: str) -> None:
    seed = torch.randint(2**63 - 1, (1,), device=device)
    made = partial(flashproto.dropout_mask, 0.25, shape=(2, 3, 20, 17))
    compiled = torch.compile(made, backend="aot_eager", fullgraph=True)
    assert torch.equal(compiled(seed), made(seed))


def test_vmap_follows_its_randomness(device: str) -> None:
    q = torch.randn(3, 1, 2, 20, 16, device=device)[:1].expand(3, -1, -1, -1, -1)
    with pytest.raises(RuntimeError, match="randomness"):
        torch.func.vmap(attend)(q)
    same = torch.func.vmap(attend, randomness="same")(q)
    other = torch.func.vmap(attend, randomness="different")(q)
    assert torch.equal(same[0], same[1]) and not torch.equal(other[0], other[1])
    given = torch.func.vmap(partial(attend, dropout_seed=seed_of(4, device)))(q)
    torch.testing.assert_close(given[0], attend(q[0], dropout_seed=seed_of(4, device)))


@pytest.mark.gpu
def test_a_cuda_graph_drops_others_each_time() -> None:
    q = torch.randn(1, 2, 200, 64, device="cuda", dtype=torch.bfloat16)
    attend(q)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = attend(q)
    found = []
    for _ in range(2):
        graph.replay()
        found.append(out.clone())
    assert not torch.equal(*found)


# --- torch's signature ----------------------------------------------------------------------------


@pytest.mark.few(1)
@pytest.mark.skipif(ON_GPU, reason="on a CPU the default backend is the interpreted kernels")
@pytest.mark.parametrize("masked", [False, True])
def test_sdpa_drops_on_the_kernels(masked: bool) -> None:
    q, k, v = (torch.randn(2, 2, n, 16, requires_grad=True) for n in (20, 30, 30))
    keys = (torch.arange(30) < torch.tensor([[9], [30]]))[:, None, None] if masked else None
    for _ in range(2):
        torch.manual_seed(3)
        seed = torch.randint(2**63 - 1, (1,))
        mask = masks.causal(top_left=True)
        mask = mask & masks.padding(torch.tensor([9, 30])) if masked else mask
        wanted = flashproto.attention(q, k, v, mask=mask, dropout_p=0.3, dropout_seed=seed)
        torch.manual_seed(3)
        with launches() as seen:
            out = flashproto.scaled_dot_product_attention(q, k, v, keys, 0.3, True)
        assert [x.kernel for x in seen if "forward" in x.kernel] == ["attention_forward_kernel"]
        torch.testing.assert_close(out, wanted)
        got, of_wanted = (torch.autograd.grad(x.sum(), (q, k, v)) for x in (out, wanted))
        torch.testing.assert_close(got, of_wanted)


@pytest.mark.skipif(ON_GPU, reason="on a CPU")
def test_sdpa_drops_by_torch_where_that_is_the_backend(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("flashproto.backends._default", "torch", raising=True)
    q, k, v = (torch.randn(2, 2, 20, 16) for _ in range(3))
    found = []
    for function in (
        flashproto.scaled_dot_product_attention,
        torch.nn.functional.scaled_dot_product_attention,
    ):
        torch.manual_seed(3)
        found.append(function(q, k, v, None, 0.3, True))
    assert torch.equal(*found)


# --- modules --------------------------------------------------------------------------------------


@pytest.mark.parametrize("rope", [False, True])
def test_a_layer_drops_while_it_trains(rope: bool, device: str) -> None:
    layer = nn.Attention(32, 2, dropout=0.5, device=device)
    plain = nn.Attention(32, 2, device=device)
    plain.load_state_dict(layer.state_dict())
    x = torch.randn(2, 9, 32, device=device)
    tables = nn.rope_tables(9, 16, device=device) if rope else None
    assert not torch.equal(layer(x, tables), layer(x, tables))
    packed = {"cu_seqlens": torch.tensor([0, 4, 9], dtype=torch.int32, device=device)}
    assert not torch.equal(layer(x[:1], tables, **packed), layer(x[:1], tables, **packed))
    layer.eval()
    assert torch.equal(layer(x, tables), plain(x, tables))


def test_what_a_layer_refuses_beside_dropout() -> None:
    model = nn.GPT(nn.GPTConfig(16, 32, 1, 2, 32, dropout=0.1))
    assert model.blocks[0].attention.dropout == 0.1
    tokens = torch.zeros(1, 4, dtype=torch.int64)
    text = r"Attention: dropout is 0\.1; it takes 0\.0 or eval\(\) where {} is given"
    with pytest.raises(ValueError, match=text.format("cache")):
        model(tokens, cache=model.make_cache(1))
    with pytest.raises(ValueError, match=text.format("group")):
        model.blocks[0].attention(torch.zeros(1, 4, 32), group=object())
    model.eval()
    assert model.generate(tokens, 3).shape == (1, 7)
    with pytest.raises(ValueError, match=r"GPTConfig: dropout is 1\.5; it takes a number"):
        nn.GPTConfig(16, 32, 1, 2, 32, dropout=1.5)


@pytest.mark.parametrize("share", [torch.zeros(2), [0.1], "a", None, True, math.nan, 1.5])
def test_shares_that_are_no_numbers_are_named(share: Any) -> None:
    """Also where no seed is given, which the entry of a function draws before it checks anything."""
    q = torch.zeros(1, 2, 4, 16)
    with pytest.raises(
        (TypeError, ValueError), match=r"attention: dropout_p is .*; it takes a number from"
    ):
        flashproto.attention(q, q, q, dropout_p=share)


def test_functions_without_dropout_refuse_it() -> None:
    q, cache = torch.zeros(1, 2, 1, 16), torch.zeros(1, 8, 2, 16)
    lengths = torch.tensor([3], dtype=torch.int32)
    with pytest.raises(TypeError, match="unexpected keyword argument 'dropout_p'"):
        flashproto.attention_with_kv_cache(q, cache, cache, lengths=lengths, dropout_p=0.1)
    with pytest.raises(flashproto.BackendError, match="its kernels have no dropout"):
        flashproto.attention(q, q, q, dropout_p=0.1, impl="torch")
