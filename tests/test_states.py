"""The two states of the device code: merged in any order and any tree they give the direct result.

Kernels of a few lines expose the states of kernels/online_softmax.py and kernels/moments.py; the
same trees are also merged with the states of flashproto.reference, in float64.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from flashproto import reference

pytest.importorskip("triton")

import triton
import triton.language as tl

from flashproto.kernels.moments import (
    average_by_reciprocal,
    moments_corrected,
    moments_finish,
    moments_join,
    moments_join_equals,
    moments_merge,
    moments_merge_equals,
    moments_of_tile,
    moments_start,
)
from flashproto.kernels.online_softmax import (
    LOG2E,
    online_softmax_finish,
    online_softmax_join,
    online_softmax_merge,
    online_softmax_start,
    online_softmax_update,
)

R, C = 8, 16  # rows, and columns of the widest tile
GROUPS = 8  # states joined at once, the missing ones empty
INF, NAN = math.inf, math.nan


@triton.jit
def load_tile(x_ptr, N, R: tl.constexpr, C: tl.constexpr, other: tl.constexpr):
    """x [R, N] as a tile [R, C]."""
    cols = tl.arange(0, C)[None, :]
    return tl.load(x_ptr + tl.arange(0, R)[:, None] * N + cols, mask=cols < N, other=other), cols < N


@triton.jit
def softmax_update_kernel(
    x_ptr,
    state_ptr,
    p_ptr,
    N,
    R: tl.constexpr,
    C: tl.constexpr,
    START: tl.constexpr,
    EXACT: tl.constexpr,
):
    """state [2, R] = (m, l), from the empty one if START, takes in x [R, N]; p [R, C]."""
    row = tl.arange(0, R)
    x, _ = load_tile(x_ptr, N, R, C, -float("inf"))
    if START:
        m, l = online_softmax_start(R)
    else:
        m, l = tl.load(state_ptr + row), tl.load(state_ptr + R + row)
    m, l, p, _ = online_softmax_update(m, l, x, LOG2E, EXACT)
    tl.store(state_ptr + row, m)
    tl.store(state_ptr + R + row, l)
    tl.store(p_ptr + row[:, None] * C + tl.arange(0, C)[None, :], p)


@triton.jit
def softmax_merge_kernel(a_ptr, b_ptr, out_ptr, weights_ptr, R: tl.constexpr):
    row = tl.arange(0, R)
    m, l, w1, w2 = online_softmax_merge(
        tl.load(a_ptr + row),
        tl.load(a_ptr + R + row),
        tl.load(b_ptr + row),
        tl.load(b_ptr + R + row),
        LOG2E,
    )
    tl.store(out_ptr + row, m)
    tl.store(out_ptr + R + row, l)
    tl.store(weights_ptr + row, w1)
    tl.store(weights_ptr + R + row, w2)


@triton.jit
def softmax_join_kernel(states_ptr, out_ptr, R: tl.constexpr, G: tl.constexpr):
    """states [G, 2, R]: (m, l) of each; all joined at once."""
    row = tl.arange(0, R)
    at = tl.arange(0, G)[None, :] * (2 * R) + row[:, None]
    m, l = online_softmax_join(tl.load(states_ptr + at), tl.load(states_ptr + at + R), LOG2E)
    tl.store(out_ptr + row, m)
    tl.store(out_ptr + R + row, l)


@triton.jit
def softmax_finish_kernel(state_ptr, out_ptr, R: tl.constexpr):
    row = tl.arange(0, R)
    lse, normaliser = online_softmax_finish(
        tl.load(state_ptr + row), tl.load(state_ptr + R + row), LOG2E
    )
    tl.store(out_ptr + row, lse)
    tl.store(out_ptr + R + row, normaliser)


@triton.jit
def moments_tile_kernel(x_ptr, state_ptr, N, R: tl.constexpr, C: tl.constexpr, CENTERED: tl.constexpr):
    """state [3, R] = (n, mean, M2) of x [R, N], merged with the empty one."""
    row = tl.arange(0, R)
    x, mask = load_tile(x_ptr, N, R, C, 0.0)
    n, mean, M2 = moments_of_tile(x, mask, tl.full([R], 0.0, tl.float32) + N, CENTERED)
    n0, mean0, M2_0 = moments_start(R)
    n, mean, M2 = moments_merge(n0, mean0, M2_0, n, mean, M2)
    tl.store(state_ptr + row, n)
    tl.store(state_ptr + R + row, mean)
    tl.store(state_ptr + 2 * R + row, M2)


@triton.jit
def moments_merge_kernel(a_ptr, b_ptr, out_ptr, R: tl.constexpr):
    row = tl.arange(0, R)
    n, mean, M2 = moments_merge(
        tl.load(a_ptr + row),
        tl.load(a_ptr + R + row),
        tl.load(a_ptr + 2 * R + row),
        tl.load(b_ptr + row),
        tl.load(b_ptr + R + row),
        tl.load(b_ptr + 2 * R + row),
    )
    tl.store(out_ptr + row, n)
    tl.store(out_ptr + R + row, mean)
    tl.store(out_ptr + 2 * R + row, M2)


@triton.jit
def moments_join_kernel(states_ptr, out_ptr, R: tl.constexpr, G: tl.constexpr):
    """states [G, 3, R]: (n, mean, M2) of each; all joined at once."""
    row = tl.arange(0, R)
    at = tl.arange(0, G)[None, :] * (3 * R) + row[:, None]
    n, mean, M2 = moments_join(
        tl.load(states_ptr + at), tl.load(states_ptr + at + R), tl.load(states_ptr + at + 2 * R)
    )
    tl.store(out_ptr + row, n)
    tl.store(out_ptr + R + row, mean)
    tl.store(out_ptr + 2 * R + row, M2)


@triton.jit
def moments_finish_kernel(state_ptr, out_ptr, eps, R: tl.constexpr):
    row = tl.arange(0, R)
    n, M2 = tl.load(state_ptr + row), tl.load(state_ptr + 2 * R + row)
    tl.store(out_ptr + row, moments_finish(n, M2, eps))


@triton.jit
def moments_join_equals_kernel(means_ptr, M2_ptr, out_ptr, count, n, reciprocal, G: tl.constexpr):
    """out [2]: mean and M2 of `count` states of n elements each, both float32."""
    lane = tl.arange(0, G)
    here = lane < count
    means = tl.load(means_ptr + lane, mask=here, other=0.0)
    M2 = tl.load(M2_ptr + lane, mask=here, other=0.0)
    mean, M2 = moments_join_equals(means, M2, here, n, count, reciprocal)
    tl.store(out_ptr, mean)
    tl.store(out_ptr + 1, M2)


@triton.jit
def moments_merge_equals_kernel(shares_ptr, out_ptr, G: tl.constexpr):
    """shares [2, 2, G]: (s, q) of G pairs of states; out [2, G]."""
    lane = tl.arange(0, G)
    s, q = moments_merge_equals(
        tl.load(shares_ptr + lane),
        tl.load(shares_ptr + 2 * G + lane),
        tl.load(shares_ptr + G + lane),
        tl.load(shares_ptr + 3 * G + lane),
    )
    tl.store(out_ptr + lane, s)
    tl.store(out_ptr + G + lane, q)


@triton.jit
def moments_corrected_kernel(x_ptr, mean_ptr, out_ptr, N, R: tl.constexpr, C: tl.constexpr):
    """out [2, R]: what a mean of x [R, N] is off by, and M2 about the right one."""
    row = tl.arange(0, R)
    x, mask = load_tile(x_ptr, N, R, C, 0.0)
    mean = tl.load(mean_ptr + row)
    deviation = tl.where(mask, x - mean[:, None], 0.0)
    rest, M2 = tl.sum(deviation, 1), tl.sum(deviation * deviation, 1)
    low, M2 = moments_corrected(tl.zeros([R], tl.float32) + N, rest, M2)
    tl.store(out_ptr + row, low)
    tl.store(out_ptr + R + row, M2)


@triton.jit
def average_kernel(total_ptr, out_ptr, n, reciprocal, C: tl.constexpr):
    at = tl.arange(0, C)
    tl.store(out_ptr + at, average_by_reciprocal(tl.load(total_ptr + at), n, reciprocal))


# --- the same on the host ------------------------------------------------------------------------


class Softmax:
    """The device's (m, l) as a tensor [2, R]."""

    def __init__(self, exact: bool) -> None:
        self.exact = exact

    def update(self, state: Tensor | None, x: Tensor) -> tuple[Tensor, Tensor]:
        start = state is None
        state = x.new_empty(2, R) if state is None else state.clone()
        p = x.new_empty(R, C)
        softmax_update_kernel[(1,)](x, state, p, x.shape[1], R=R, C=C, START=start, EXACT=self.exact)
        return state, p[:, : x.shape[1]]

    def of(self, x: Tensor) -> Tensor:
        return self.update(None, x)[0]

    def merge(self, a: Tensor, b: Tensor) -> Tensor:
        out, self.weights = torch.empty_like(a), torch.empty_like(a)
        softmax_merge_kernel[(1,)](a, b, out, self.weights, R=R)
        return out

    def join(self, states: list[Tensor]) -> Tensor:
        empty = self.of(states[0].new_empty(R, 0))
        states = torch.stack(states + [empty] * (GROUPS - len(states)))
        out = torch.empty_like(empty)
        softmax_join_kernel[(1,)](states, out, R=R, G=GROUPS)
        return out

    def finish(self, state: Tensor) -> tuple[Tensor, Tensor]:
        out = torch.empty_like(state)
        softmax_finish_kernel[(1,)](state, out, R=R)
        return out[0], out[1]


class Moments:
    """The device's (n, mean, M2) as a tensor [3, R]."""

    def __init__(self, centered: bool) -> None:
        self.centered = centered

    def of(self, x: Tensor) -> Tensor:
        state = x.new_empty(3, R)
        moments_tile_kernel[(1,)](x, state, x.shape[1], R=R, C=C, CENTERED=self.centered)
        return state

    def merge(self, a: Tensor, b: Tensor) -> Tensor:
        out = torch.empty_like(a)
        moments_merge_kernel[(1,)](a, b, out, R=R)
        return out

    def join(self, states: list[Tensor]) -> Tensor:
        empty = self.of(states[0].new_empty(R, 0))
        states = torch.stack(states + [empty] * (GROUPS - len(states)))
        out = torch.empty_like(empty)
        moments_join_kernel[(1,)](states, out, R=R, G=GROUPS)
        return out

    def finish(self, state: Tensor, eps: float) -> Tensor:
        out = torch.empty_like(state[0])
        moments_finish_kernel[(1,)](state, out, eps, R=R)
        return out


def merge_tree(states: list, merge: Callable, seed: int):
    """Merge two random states until one is left: a random order and a random tree."""
    states, choice = list(states), random.Random(seed)
    while len(states) > 1:
        a = states.pop(choice.randrange(len(states)))
        b = states.pop(choice.randrange(len(states)))
        states.append(merge(a, b))
    return states[0]


def scores(widths: list[int], seed: int, device: str, special: bool) -> list[Tensor]:
    """Tiles [R, width] of random scores; with `special`, rows of -inf, NaN and tiles of -inf."""
    generator = torch.Generator().manual_seed(seed)
    tiles = [4 * torch.randn(R, width, generator=generator) for width in widths]
    if special:
        for tile in tiles:
            tile[0] = -INF  # a row with nothing in any tile
            tile[1, torch.rand(tile.shape[1], generator=generator) < 0.7] = -INF
        tiles[seed % len(tiles)][2:5] = -INF  # rows with nothing in one tile
        if tiles[0].shape[1]:
            tiles[0][5, 0] = NAN
    return [tile.to(device) for tile in tiles]


TREES = {
    "widths": st.lists(st.integers(0, C), min_size=1, max_size=5),
    "seed": st.integers(0, 2**31),
}
few = settings(max_examples=25)


def close(a: Tensor, b: Tensor, tolerance: float = 2e-6) -> None:
    torch.testing.assert_close(a.double(), b.double(), rtol=tolerance, atol=tolerance, equal_nan=True)


# --- online softmax ------------------------------------------------------------------------------


@few
@given(**TREES, special=st.booleans(), exact=st.booleans())
def test_softmax_tree_gives_the_direct_result(device, widths, seed, special, exact) -> None:
    tiles = scores(widths, seed, device, special)
    state = Softmax(exact)
    lse, normaliser = state.finish(merge_tree([state.of(x) for x in tiles], state.merge, seed))
    whole = torch.cat(tiles, 1).double()
    wanted = reference.logsumexp(whole)
    close(lse, wanted)
    m = whole.nan_to_num(nan=-INF, posinf=INF, neginf=-INF).amax(1) if whole.shape[1] else wanted
    sums = torch.exp(whole - torch.where(m == -INF, 0.0, m)[:, None]).sum(1)
    close(normaliser, torch.where(sums == 0, 0.0, 1 / sums))


@few
@given(**TREES)
def test_softmax_reference_and_device_merge_alike(device, widths, seed) -> None:
    tiles = scores(widths, seed, device, special=False)
    state = Softmax(True)

    def reference_of(x: Tensor) -> tuple[Tensor, Tensor]:
        m, l = reference.online_softmax_start(x.shape[:1], x.double())
        return reference.online_softmax_update(m, l, x.double())[:2]

    def reference_merge(a, b):
        return reference.online_softmax_merge(*a, *b)[:2]

    m, l = merge_tree([reference_of(x) for x in tiles], reference_merge, seed)
    got = merge_tree([state.of(x) for x in tiles], state.merge, seed)
    close(got[0], m)
    close(got[1], l)
    for a, b in zip(state.finish(got), reference.online_softmax_finish(m, l), strict=True):
        close(a, b)


@few
@given(**TREES, special=st.booleans())
def test_softmax_updates_in_turn_equal_merges(device, widths, seed, special) -> None:
    tiles = scores(widths, seed, device, special)
    state, running = Softmax(True), None
    for x in tiles:
        running, p = state.update(running, x)
        shift = torch.where(running[0] == -INF, 0.0, running[0])
        close(p, torch.exp(x.double() - shift[:, None]))
    for a, b in zip(
        state.finish(running),
        state.finish(merge_tree([state.of(x) for x in tiles], state.merge, seed)),
        strict=True,
    ):
        close(a, b)


@few
@given(**TREES, special=st.booleans())
def test_softmax_join_equals_merges(device, widths, seed, special) -> None:
    state = Softmax(True)
    states = [state.of(x) for x in scores(widths, seed, device, special)]
    m, l = state.join(states)
    merged = merge_tree(states, state.merge, seed)
    assert torch.equal(m, merged[0])
    close(l, merged[1])


def test_softmax_payload_takes_the_weights(device) -> None:
    """sum_j p_j v_j over two tiles, as attention carries it beside (m, l)."""
    x, v = torch.randn(R, 2 * C, device=device), torch.randn(2 * C, device=device)
    state = Softmax(True)
    (s1, p1), (s2, p2) = (state.update(None, t.contiguous()) for t in x.split(C, 1))
    merged = state.merge(s1, s2)
    w1, w2 = state.weights
    payload = w1 * (p1 @ v[:C]) + w2 * (p2 @ v[C:])
    close(payload * state.finish(merged)[1], torch.softmax(x.double(), 1) @ v.double())


@pytest.mark.parametrize("exact", [True, False])
def test_softmax_empty_states(device, exact) -> None:
    state = Softmax(exact)
    x = torch.randn(R, C, device=device)
    full, empty = state.of(x), state.of(torch.full_like(x, -INF))
    assert (empty[0] == -INF).all()
    assert not empty[1].any()
    assert torch.equal(state.of(x[:, :0].contiguous()), empty)
    assert torch.equal(state.merge(full, empty), full)
    assert torch.equal(state.merge(empty, full), full)
    assert torch.equal(state.merge(empty, empty), empty)
    assert torch.equal(state.update(full, torch.full_like(x, -INF))[0], full)
    lse, normaliser = state.finish(empty)
    assert (lse == -INF).all()
    assert not normaliser.any()


@pytest.mark.parametrize("exact", [True, False])
def test_softmax_nan_is_not_swallowed(device, exact) -> None:
    state = Softmax(exact)
    x = torch.full((R, C), -INF, device=device)
    x[:, 3] = NAN
    for other in (torch.randn(R, C, device=device), torch.full_like(x, -INF)):
        for merged in (
            state.merge(state.of(x), state.of(other)),
            state.merge(state.of(other), state.of(x)),
            state.update(state.of(x), other)[0],
            state.update(state.of(other), x)[0],
        ):
            lse, normaliser = state.finish(merged)
            assert lse.isnan().all()
            assert normaliser.isnan().all()


# --- moments -------------------------------------------------------------------------------------


@few
@given(**TREES, centered=st.booleans(), loc=st.sampled_from([0.0, 1e4]))
def test_moments_tree_gives_the_direct_result(device, widths, seed, centered, loc) -> None:
    tiles = [x + loc for x in scores(widths, seed, device, special=False)]
    state = Moments(centered)
    n, mean, M2 = merge_tree([state.of(x) for x in tiles], state.merge, seed)
    wanted = reference.moments_of_tile(torch.cat(tiles, 1).double(), centered)
    assert torch.equal(n.double(), wanted[0])
    close(mean, wanted[1])
    # A mean of 1e4 is itself rounded, to 5e-4; E[x^2] - E[x]^2 would be off by hundreds.
    rtol, atol = (1e-5, 1e-5) if loc == 0 else (1e-3, 0.1)
    torch.testing.assert_close(M2.double(), wanted[2], rtol=rtol, atol=atol)


@few
@given(width=st.integers(1, C), seed=st.integers(0, 2**31), loc=st.sampled_from([0.0, 3e3, -1e5]))
def test_moments_of_tile_far_from_zero(device, width, seed, loc) -> None:
    """The mean is the nearest float32 but for a few roundings of what it is off by, and M2 that about
    this mean; so are those of the reference's twin in float32."""
    x = scores([width], seed, device, special=False)[0] + loc
    wanted = reference.moments_of_tile(x.double())
    half_a_unit = 2.0**-24 * abs(loc)
    for _, mean, M2 in (Moments(True).of(x), reference.moments_of_tile(x)):
        off = (mean.double() - wanted[1]).abs()
        assert off.max() <= 1.01 * half_a_unit + 2e-6
        excess = (M2.double() - wanted[2] - width * off * off).abs() - 1e-5 * wanted[2]
        assert excess.max() <= width * (half_a_unit**2 + 1e-5) * 1e-3


@few
@given(width=st.integers(1, C), seed=st.integers(0, 2**31), units=st.integers(-20, 20))
def test_moments_corrected_puts_a_mean_right(device, width, seed, units) -> None:
    """However many units in its last place it is off, far from zero."""
    x = scores([width], seed, device, special=False)[0] + 3e3
    mean = x.mean(1) + units * 2.0**-12
    out = x.new_empty(2, R)
    moments_corrected_kernel[(1,)](x, mean, out, width, R=R, C=C)
    _, wanted, M2 = reference.moments_of_tile(x.double())
    close(mean.double() - 3e3 + out[0], wanted - 3e3)
    close(out[1], M2, 1e-5)


@few
@given(**TREES, centered=st.booleans(), loc=st.sampled_from([0.0, 1e4]))
def test_moments_join_equals_merges(device, widths, seed, centered, loc) -> None:
    state = Moments(centered)
    tiles = [x + loc for x in scores([*widths, 1], seed, device, special=False)]  # not all empty
    states = [state.of(x) for x in tiles]
    n, mean, M2 = state.join(states)
    merged = merge_tree(states, state.merge, seed)
    assert torch.equal(n, merged[0])
    close(mean, merged[1])
    rtol, atol = (1e-5, 1e-5) if loc == 0 else (1e-3, 0.1)
    torch.testing.assert_close(M2, merged[2], rtol=rtol, atol=atol)


@few
@given(**TREES, centered=st.booleans())
def test_moments_reference_and_device_merge_alike(device, widths, seed, centered) -> None:
    tiles = scores(widths, seed, device, special=False)
    state = Moments(centered)
    wanted = merge_tree(
        [reference.moments_of_tile(x.double(), centered) for x in tiles],
        lambda a, b: reference.moments_merge(*a, *b),
        seed,
    )
    got = merge_tree([state.of(x) for x in tiles], state.merge, seed)
    for a, b in zip(got, wanted, strict=True):
        torch.testing.assert_close(a.double(), b, rtol=1e-5, atol=1e-5)
    if sum(widths):
        close(state.finish(got, 1e-5), reference.moments_finish(wanted[0], wanted[2], 1e-5), 1e-5)


@few
@given(count=st.integers(1, GROUPS), width=st.integers(1, C), seed=st.integers(0, 2**31))
def test_moments_join_of_equal_counts(device, count, width, seed) -> None:
    x = scores([width], seed, device, special=False)[0][:count]
    _, means, M2 = reference.moments_of_tile(x)
    out = x.new_empty(2)
    reciprocal = (1 / torch.tensor(float(count))).item()
    moments_join_equals_kernel[(1,)](means, M2, out, float(count), float(width), reciprocal, G=GROUPS)
    close(out, torch.stack(reference.moments_of_tile(x.double().flatten())[1:]), 1e-5)


@few
@given(width=st.integers(1, C), seed=st.integers(0, 2**31))
def test_moments_merge_of_equal_counts(device, width, seed) -> None:
    x = scores([width], seed, device, special=False)[0]
    _, means, M2 = reference.moments_of_tile(x)
    N = x.numel()
    shares = torch.stack([means * width / N, M2 * width / N**2])  # [2, R]
    while shares.shape[1] > 1:
        pairs = shares.shape[1] // 2
        out = shares.new_empty(2, pairs)
        moments_merge_equals_kernel[(1,)](shares, out, G=pairs)
        shares = out
    _, mean, wanted = reference.moments_of_tile(x.double().flatten())
    close(shares[:, 0], torch.stack([mean, wanted / N]), 1e-5)


@few
@given(n=st.integers(1, 2**20), seed=st.integers(0, 2**31))
def test_average_by_reciprocal_is_a_division(device, n, seed) -> None:
    total = torch.randn(256, generator=torch.Generator().manual_seed(seed)) * 10.0 ** (seed % 30 - 10)
    total[:5] = torch.tensor([0.0, INF, -INF, NAN, 1.0])
    out = torch.empty(256, device=device)
    average_kernel[(1,)](total.to(device), out, float(n), (1 / torch.tensor(float(n))).item(), C=256)
    # The interpreter rounds within an fma; and by a number torch divides on the CPU alone.
    rtol = 0 if out.is_cuda else 2**-23
    torch.testing.assert_close(out.cpu(), total / n, rtol=rtol, atol=0, equal_nan=True)


@pytest.mark.parametrize("centered", [True, False])
def test_moments_empty_states_and_nan(device, centered) -> None:
    state = Moments(centered)
    # 1e20 squared passes float32's range: an empty state must not turn it into NaN.
    for x in (torch.randn(R, C, device=device), torch.full((R, C), 1e20, device=device)):
        full, empty = state.of(x), state.of(x[:, :0].contiguous())
        assert not empty.any()
        assert torch.equal(state.merge(full, empty), full)
        assert torch.equal(state.merge(empty, full), full)
    x = torch.randn(R, C, device=device)
    bad = x.clone()
    bad[:, 2] = NAN
    for merged in (
        state.merge(state.of(x), state.of(bad)),
        state.merge(state.of(bad), state.of(x)),
    ):
        assert merged[2].isnan().all()
        assert state.finish(merged, 1e-5).isnan().all()
