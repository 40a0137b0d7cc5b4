"""merge_attention against its definition in float64, in memory of every kind."""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from operators import launches
from rows import assert_no_worse, poison
from torch import Tensor

import flashproto
from flashproto import BackendError, configs, reference

pytest.importorskip("triton")

from flashproto.functional.decode import LARGEST_MERGED, MOST_PARTS
from flashproto.ops import attention_merge as op

f16, bf16, f32 = torch.float16, torch.bfloat16, torch.float32
KERNELS = ["merge_parts_kernel", "merge_parts_backward_kernel"]

# --- merging -----------------------------------------------------------------------------------------


def parts_of(
    n: int, dtype: torch.dtype, device: str
) -> tuple[list[Tensor], list[Tensor], list[Tensor]]:
    """q, k and v [2, 4 | 2, 5 | 23, 8], and k and v cut into n parts, some of no key."""
    q, k, v = (
        torch.randn(2, h, s, 8, device=device).to(dtype).requires_grad_()
        for h, s in ((4, 5), (2, 23), (2, 23))
    )
    cuts = [0, *sorted(random.randrange(24) for _ in range(n - 1)), 23]
    pieces = [(k[:, :, a:b], v[:, :, a:b]) for a, b in itertools.pairwise(cuts)]
    return [q, k, v], *map(list, zip(*pieces, strict=True))


@pytest.mark.parametrize("n", [1, 2, 5])
@pytest.mark.parametrize("stacked", [False, True])
def test_merged_parts_are_attention_to_all_keys(n: int, stacked: bool, device: str) -> None:
    """In float64, with gradients of both results."""
    inputs, ks, vs = parts_of(n, torch.float64, device)
    whole = reference.attention(*inputs)
    made = [reference.attention(inputs[0], k, v) for k, v in zip(ks, vs, strict=True)]
    outs, lses = ([x[i] for x in made] for i in (0, 1))
    if stacked:
        outs, lses = torch.stack(outs), torch.stack(lses)
    merged = flashproto.merge_attention(outs, lses)
    upstream = [torch.randn_like(x) for x in whole]
    for results in zip(merged, whole, strict=True):
        torch.testing.assert_close(*results, rtol=1e-12, atol=1e-12)
    got = torch.autograd.grad(merged, inputs, upstream, retain_graph=True)
    torch.testing.assert_close(
        got, torch.autograd.grad(whole, inputs, upstream), rtol=1e-10, atol=1e-11
    )


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_merging_is_in_float32(dtype: torch.dtype, device: str) -> None:
    outs = [torch.randn(3, 7, 8, device=device).to(dtype) for _ in range(4)]
    lses = [torch.randn(3, 7, device=device) * 20 for _ in range(4)]
    out, lse = flashproto.merge_attention(outs, lses)
    exact = reference.merge_attention([x.double() for x in outs], [x.double() for x in lses])
    assert out.dtype == dtype and lse.dtype == torch.float32
    torch.testing.assert_close(out, exact[0].to(dtype))
    torch.testing.assert_close(lse, exact[1].float())
    mixed, _ = flashproto.merge_attention([outs[0].float(), *outs[1:]], lses)
    torch.testing.assert_close(mixed, exact[0].float())


def test_rows_without_a_key_stay_so(device: str) -> None:
    outs = torch.zeros(3, 2, 4, device=device, requires_grad=True)
    lses = torch.full((3, 2), -math.inf, device=device)
    lses[1, 1] = 1.5
    lses.requires_grad_()
    out, lse = flashproto.merge_attention(outs, lses)
    assert lse.tolist() == [-math.inf, 1.5] and not out.any()
    gradients = torch.autograd.grad([out.sum() + lse[1]], [outs, lses])
    assert all(x.isfinite().all() for x in gradients)
    assert gradients[0][1, 1].tolist() == [1.0] * 4 and not gradients[0][:, 0].any()


# --- the kernels -------------------------------------------------------------------------------------


def states(
    generator: random.Random, n: int, shape: Sequence[int], dtype: torch.dtype, device: str, size: float
) -> tuple[list[Tensor], list[Tensor]]:
    """outs [*shape] and lses of n parts, lses of `size`.  A third of them has no key: lse -inf, and NaN
    or infinity in out."""
    outs, lses = [], []
    for _ in range(n):
        out, lse = torch.randn(*shape), torch.randn(shape[:-1]) * size
        empty = torch.rand(lse.shape) < 1 / 3
        out[empty] = generator.choice([math.nan, math.inf, -math.inf])
        lse[empty] = -math.inf
        outs.append(out.to(device, dtype))
        lses.append(lse.to(device))
    return outs, lses


def somewhere(generator: random.Random, x: Tensor, columns: int) -> Tensor:
    """Equal elements in other memory: rows in any order, at any place, and now and then the last
    `columns` dimensions with a stride."""
    order = list(range(x.ndim - columns))
    generator.shuffle(order)
    order += range(x.ndim - columns, x.ndim)
    shape = [x.shape[d] for d in order]
    last = generator.choice([1, 1, 1, 2]) if columns else 1
    pad, start = generator.choice([0, 1, 8]), generator.choice([0, 0, 1, 8])
    width = (shape[-1] if shape else 1) * last + pad
    memory = x.new_zeros(start + math.prod(shape[:-1]) * width)[start:]
    made = memory.view(*shape[:-1], width)[..., : width - pad : last] if shape else memory[0]
    made.copy_(x.permute(order))
    return made.permute([order.index(d) for d in range(x.ndim)])


def gradients(
    outs: Any, lses: Any, upstream: Sequence[Tensor | None], impl: str | None
) -> tuple[list[Tensor], list[Tensor]]:
    """out and lse, and the gradients of all states by those of out and lse; one may be None."""
    leaves = [
        x.detach().requires_grad_()
        for xs in (outs, lses)
        for x in ([xs] if isinstance(xs, Tensor) else xs)
    ]
    half = len(leaves) // 2
    given = leaves if isinstance(outs, Tensor) else (leaves[:half], leaves[half:])
    results = flashproto.merge_attention(*given, impl=impl)
    roots = [(y, g.to(y.dtype)) for y, g in zip(results, upstream, strict=True) if g is not None]
    ys, gs = zip(*roots, strict=True)
    found = torch.autograd.grad(ys, leaves, gs, allow_unused=True)
    zeros = [torch.zeros_like(x) if g is None else g for x, g in zip(leaves, found, strict=True)]
    return [y.detach() for y in results], zeros


def check(outs: Any, lses: Any, upstream: Sequence[Tensor | None]) -> None:
    """Both results and all gradients are no further from float64 than eager PyTorch in float32 is."""
    wide = [x.double() if isinstance(x, Tensor) else [y.double() for y in x] for x in (outs, lses)]
    got, eager = gradients(outs, lses, upstream, "triton"), gradients(outs, lses, upstream, "reference")
    exact = gradients(*wide, upstream, "reference")
    largest = max(
        (float(torch.nan_to_num(x, 0, 0, 0).abs().max()) for x in (*outs, *lses) if x.numel()),
        default=0.0,
    )
    steep = max((float(g.abs().max()) for g in upstream if g is not None and g.numel()), default=0.0)
    terms = [largest, largest], [largest * steep * outs[0].shape[-1]] * len(got[1])
    for which, values in zip(zip(got, eager, exact, strict=True), terms, strict=True):
        for a, b, c, magnitude in zip(*which, values, strict=True):
            assert torch.equal(a.isneginf(), c.isneginf())
            a, b, c = (x.masked_fill(c.isneginf(), 0.0) for x in (a, b, c))
            assert_no_worse("a result or gradient", a, b, c, magnitude)


@pytest.mark.parametrize("index", range(30))
def test_against_float64(index: int, device: str, seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """One to five parts of any shape, dtype and layout, apart and stacked; either gradient or both."""
    poison(monkeypatch)
    generator = random.Random(seed)
    ndim, dtype = generator.randrange(1, 6), generator.choice([f16, bf16, f32])
    shape = [
        *(generator.choice([1, 2, 3, 5]) for _ in range(ndim - 1)),
        generator.choice([1, 7, 16, 80, 128]),
    ]
    size = generator.choice([1.0, 20.0, 1e4])
    outs, lses = states(generator, 1 + index % 5, shape, dtype, device, size)
    upstream: list[Tensor | None] = [torch.randn_like(outs[0]), torch.randn_like(lses[0])]
    if (missing := generator.choice([None, None, 0, 1])) is not None:
        upstream[missing] = None
    if generator.random() < 0.4:
        stacked = [somewhere(generator, torch.stack(x), i) for i, x in ((1, outs), (0, lses))]
        check(*stacked, upstream)
    else:
        check(
            [somewhere(generator, x, 1) for x in outs],
            [somewhere(generator, x, 0) for x in lses],
            upstream,
        )


@pytest.mark.parametrize("dtype", [f16, bf16, f32])
def test_a_part_without_keys_counts_for_nothing(dtype: torch.dtype, device: str) -> None:
    """To the bit, on both backends; its gradients are 0."""
    outs = torch.randn(3, 4, 5, 24, device=device).to(dtype)
    lses = torch.randn(3, 4, 5, device=device) * 9
    empty = torch.rand(3, 4, 5, device=device) < 0.5
    empty[:, 0, 0] = True
    lses[empty] = -math.inf
    upstream = [torch.randn_like(outs[0]), torch.randn_like(lses[0])]
    for impl in ("triton", "reference"):
        found = []
        for value in (0.0, math.nan, math.inf):
            outs[empty] = value
            results, made = gradients(list(outs), list(lses), upstream, impl)
            assert not any(x[empty].any() for x in (torch.stack(made[:3]), torch.stack(made[3:])))
            found.append([*results, *made])
        for other in found[1:]:
            assert all(map(torch.equal, other, found[0]))
        assert not results[0][0, 0].any() and results[1][0, 0] == -math.inf


def test_a_part_alone_stays_as_it_is(device: str) -> None:
    out, lse = torch.randn(3, 7, 16, device=device).to(bf16), torch.randn(3, 7, device=device) * 1e4
    with launches() as seen:
        merged = flashproto.merge_attention([out], [lse], impl="triton")
    assert [x.kernel for x in seen] == KERNELS[:1]
    assert torch.equal(merged[0], out) and torch.equal(merged[1], lse)


@pytest.mark.parametrize("n", [MOST_PARTS, MOST_PARTS + 1, 3 * MOST_PARTS])
@pytest.mark.parametrize("stacked", [False, True])
def test_many_parts(n: int, stacked: bool, device: str, seed: int) -> None:
    outs, lses = states(random.Random(seed), n, (2, 3, 20), bf16, device, 3.0)
    upstream = [torch.randn_like(outs[0]), torch.randn_like(lses[0])]
    check(*((torch.stack(x) if stacked else x) for x in (outs, lses)), upstream)


def test_one_tensor_beside_a_list(device: str) -> None:
    outs, lses = torch.randn(3, 4, 16, device=device), torch.randn(3, 4, device=device)
    wanted = flashproto.merge_attention(outs, lses, impl="triton")
    for _ in range(3):
        for given in ((outs, list(lses)), (list(outs), lses), (list(outs), tuple(lses)), (outs, lses)):
            assert all(map(torch.equal, flashproto.merge_attention(*given, impl="triton"), wanted))


@pytest.mark.parametrize("shape", [(0,), (4, 0), (0, 8), (2, 0, 3, 8)])
def test_nothing_to_merge(shape: tuple[int, ...], device: str) -> None:
    """Without columns there is an lse all the same."""
    outs, lses = torch.randn(2, *shape, device=device), torch.randn(2, *shape[:-1], device=device)
    check(
        list(outs),
        list(lses),
        [torch.ones(shape, device=device), torch.ones(shape[:-1], device=device)],
    )


def test_dtypes_that_differ(device: str) -> None:
    """out is of the widest; gradients are of their inputs'; lses may be of 16 bits."""
    outs = [torch.randn(5, 16, device=device).to(x) for x in (f16, bf16, f16)]
    lses = [torch.randn(5, device=device).to(x) for x in (f32, f16, bf16)]
    upstream = torch.randn(5, 16, device=device), torch.randn(5, device=device)
    results, made = gradients(outs, lses, upstream, "triton")
    assert [x.dtype for x in results] == [f32, f32]
    assert [x.dtype for x in made] == [f16, bf16, f16, f32, f16, bf16]
    check(outs, lses, upstream)


@pytest.mark.parametrize("wanted", [(0,), (1,), (3,), (0, 3), (1, 2)])
def test_gradients_that_are_asked_for(wanted: tuple[int, ...], device: str) -> None:
    """Of two outs, then of two lses; each is what it is beside the others, in one launch."""
    inputs = [torch.randn(5, 16, device=device) for _ in range(2)]
    inputs += [torch.randn(5, device=device) for _ in range(2)]
    upstream = [torch.randn(5, 16, device=device), torch.randn(5, device=device)]
    _, every = gradients(inputs[:2], inputs[2:], upstream, "triton")
    leaves = [x.detach().requires_grad_(i in wanted) for i, x in enumerate(inputs)]
    with launches() as seen:
        made = flashproto.merge_attention(leaves[:2], leaves[2:], impl="triton")
        found = torch.autograd.grad(made, [leaves[i] for i in wanted], upstream)
    assert [x.kernel for x in seen] == KERNELS
    assert all(torch.equal(x, every[i]) for i, x in zip(wanted, found, strict=True))


# --- memory ------------------------------------------------------------------------------------------


def test_heads_of_attention_are_read_where_they_are(device: str) -> None:
    """Tokens first, heads first, with space between rows, stacked: no copy, and results that lie as the
    first part; rows of 16 bytes each are read as such."""
    B, H, S, D = 2, 3, 5, 40
    heads_first, tokens_first = torch.randn(B, H, S, D), torch.randn(B, S, H, D).transpose(1, 2)
    apart = torch.randn(B, H, S, D + 8)[..., :D]
    of_varlen = torch.randn(S, H, D), torch.randn(H, S).mT
    for outs, lses in (
        ([heads_first, tokens_first], [torch.randn(B, H, S)] * 2),
        ([tokens_first, tokens_first], [torch.randn(B, H, S), torch.randn(B, S, H).mT]),
        ([tokens_first, apart, heads_first], [torch.randn(B, H, S)] * 3),
        ([of_varlen[0]] * 2, [of_varlen[1]] * 2),
        (torch.randn(2, B, H, S, D).to(bf16), torch.randn(2, B, H, S)),
        (torch.randn(B, 2, H, S, D).transpose(0, 1), torch.randn(B, 2, H, S).transpose(0, 1)),
    ):
        stacked = isinstance(outs, Tensor)
        inputs = [x.to(device) for x in ([outs, lses] if stacked else [*outs, *lses])]
        settings = op.Settings(stacked, inputs[0].dtype)
        forward, saves = op.attention_merge.forward_recipe(inputs, settings, (0, 1), True)
        tensors = [*forward.returns, *saves]
        backward = op.attention_merge.backward_recipe(tensors, settings, (True,) * len(inputs), False)
        for recipe in (forward, backward):
            kinds = [type(step).__name__ for step in recipe.steps]
            assert kinds == ["Make"] * (len(kinds) - 1) + ["Launch"]
            assert recipe.steps[-1].arguments["ALIGNED"]
        if not stacked:
            assert [x.strides for x in forward.returns] == [outs[0].stride(), lses[0].stride()]


def test_rows_that_are_one_sequence_are_counted_once() -> None:
    def rows(*tensors: Tensor) -> list[int]:
        return op.together(tensors[0].shape[:-1], [x.stride() for x in tensors])[0]

    x, lse = torch.randn(2, 3, 5, 8), torch.randn(2, 3, 5)
    tokens_first = torch.randn(2, 5, 3, 8).transpose(1, 2)
    assert rows(x, lse) == [30] and rows(x[:1], x[1:]) == [15]
    assert rows(x, tokens_first) == [2, 3, 5] and rows(tokens_first, tokens_first) == [30]
    assert rows(torch.randn(7, 2, 3, 5, 8)[:, :, 1:], torch.randn(7, 2, 2, 5, 8)) == [14, 10]


def test_a_tile_is_two_vectors_a_thread() -> None:
    for D, itemsize in itertools.product((1, 7, 64, 128, 256, 1000), (2, 4)):
        wide, narrow = (configs.merge_parts(D, itemsize, aligned) for aligned in (True, False))
        assert D <= wide.columns < 2 * D
        assert wide.rows * wide.columns * itemsize == wide.num_warps * 32 * 2 * 16
        assert narrow.rows == max(wide.rows * itemsize // 16, 1)


# --- ops and compilation -----------------------------------------------------------------------------


@pytest.mark.parametrize("stacked", [False, True])
def test_opcheck(stacked: bool, device: str) -> None:
    outs = torch.randn(2, 2, 6, 3, 8, device=device).transpose(2, 3)
    lses = torch.randn(2, 2, 3, 6, device=device)
    lses[0, 0] = -math.inf
    inputs = [outs, lses] if stacked else [*outs, *lses]
    leaves = [x.detach().requires_grad_() for x in inputs]
    merge = torch.ops.flashproto.attention_merge.default
    torch.library.opcheck(merge, (leaves, stacked, f32))
    grads = torch.randn(2, 3, 6, 8, device=device), torch.randn(2, 3, 6, device=device)
    backward = torch.ops.flashproto.attention_merge_backward.default
    for dout, dlse in (grads, (grads[0], None), (None, grads[1])):
        torch.library.opcheck(backward, (dout, dlse, inputs, stacked, f32, [True] * len(inputs)))


@pytest.mark.parametrize("stacked", [False, True])
def test_compiled_whole(stacked: bool, device: str) -> None:
    outs, lses = torch.randn(3, 5, 16, device=device), torch.randn(3, 5, device=device)
    given = (outs, lses) if stacked else (list(outs), list(lses))
    upstream = [torch.randn_like(outs[0]), torch.randn_like(lses[0])]
    wanted = gradients(*given, upstream, "triton")
    torch.compiler.reset()
    compiled = torch.compile(flashproto.merge_attention, backend="aot_eager", fullgraph=True)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(flashproto, "merge_attention", compiled)
        found = gradients(*given, upstream, "triton")
    torch.compiler.reset()
    for made, want in zip(found, wanted, strict=True):
        assert all(map(torch.equal, made, want))


def test_what_the_kernels_do_not_take(device: str) -> None:
    for width, dtype, why in ((LARGEST_MERGED + 1, f32, "head_dim"), (8, torch.float64, "float64")):
        outs = torch.zeros(2, 1, width, dtype=dtype, device=device)
        lses = torch.zeros(2, 1, device=device)
        with pytest.raises(BackendError, match=why):
            flashproto.merge_attention(outs, lses, impl="triton")
        assert flashproto.merge_attention(outs, lses)[0].shape == (1, width)
