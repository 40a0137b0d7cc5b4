"""What the Hopper attention kernels compute."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Iterator
from unittest import mock

import pytest
import torch
from attention_problem import Problem, assert_within_bound, exact_and_eager, make, results
from hopper_attention import FULL, determinism
from torch import Tensor

import flashproto
from flashproto import configs
from flashproto.kernels.hopper import attention_backward_work as work
from flashproto.kernels.hopper.attention_backward_rows import preprocess_kernel
from flashproto.ops import attention_hopper, call_cache
from flashproto.variant import Kind


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("scale", [2.0**-100, 0.125, 3.0])
def test_lse_and_delta_of_the_preprocess(device: str, dtype: torch.dtype, scale: float) -> None:
    """Three numbers each add up to -lse / scale and -delta in float32; rows that see no key and rows
    past the end have finite ones, for which no probability is left."""
    Sq, Sp, H, D = 40, 64, 2, 64
    out, dout = (torch.randn(1, H, Sq, D, device=device).to(dtype) for _ in range(2))
    lse, dlse = (torch.randn(1, H, Sq, device=device) for _ in range(2))
    lse *= 50
    lse[0, 1, 5] = -torch.inf
    ld = torch.full((H * Sp, attention_hopper.LD), torch.nan, dtype=torch.bfloat16, device=device)
    sums = torch.ones(H * Sp * D, device=device)
    before, behind = 4, work.FIRST_TURN.value + H * Sp // 64
    counters = torch.ones(before + behind, dtype=torch.int32, device=device)
    strides = [n // 8 for n in out.stride()[:3]]
    preprocess_kernel[(H * Sp // 32,)](
        out,
        dout,
        lse,
        dlse,
        ld,
        sums,
        counters[before:],
        Sq,
        Sp,
        Sp,
        H,
        D,
        *strides,
        *strides,
        scale,
        HAS_DLSE=True,
        FIRST=False,
        D=D,
        R=32,
        BM=64,
    )
    ld = ld.view(H, Sp, -1).double()
    assert ld.isfinite().all()
    assert not ld[:, Sq:, 3:].any()
    assert not ld[..., 6:].any()
    assert (ld[:, Sq:, :3].sum(-1) * scale < -1e6).all()
    assert ld[1, 5, :3].sum() * scale < -1e6
    seen = lse[0].isfinite()
    delta = (out.double() * dout.double()).sum(-1)[0] - dlse[0]
    for first, want in ((0, -lse[0].double() / scale), (3, -delta)):
        got = ld[:, :Sq, first : first + 3].sum(-1)
        tolerance = {0: 0.0, 3: 1e-5}[first]  # delta is a sum
        torch.testing.assert_close(got[seen], want[seen], rtol=1e-6, atol=tolerance)
    assert not sums.any()
    assert counters[before] == 0
    assert not counters[before - H : before].any()
    assert not counters[before + work.FIRST_TURN.value :].any()


# (B, Hq, Hkv, Sq, Sk): whole tiles, ragged ones, GQA with more programs than fit on the device, few
# queries, and more queries than keys (causal: tiles that no key tile visits)
ORDERED_SHAPES = [
    (4, 8, 8, 1024, 1024),
    (1, 3, 1, 777, 1301),
    (2, 16, 2, 1500, 4500),
    (3, 4, 2, 5, 900),
    (2, 4, 4, 1100, 300),
]


@pytest.fixture
def choose(monkeypatch: pytest.MonkeyPatch) -> Iterator[mock.Mock]:
    """What configs chooses for every backward is its return_value."""
    chosen = mock.Mock()
    monkeypatch.setattr(configs, "attention_backward_hopper", chosen)
    call_cache.forget()
    yield chosen
    chosen.assert_called()
    call_cache.forget()


@pytest.mark.gpu
@pytest.mark.parametrize("shape", ORDERED_SHAPES)
@pytest.mark.parametrize(
    ("D", "length"),
    [(64, 1024), (64, 16384), (96, 1024), (128, 1024), (128, 16384), (256, 1024), (256, 16384)],
)
@pytest.mark.parametrize("causal", [False, True])
def test_deterministic_backward_gives_the_same_bits_100_times(
    shape: tuple[int, ...],
    D: int,
    length: int,
    causal: bool,
    hopper: None,
    monkeypatch: pytest.MonkeyPatch,
    request: pytest.FixtureRequest,
) -> None:
    """By the configuration of such a length: long rows have key tiles of 256 at head_dim 64, and walk
    in waves at others, here of few programs, if heads are grouped."""
    _, Hq, Hkv, _, _ = shape
    config = configs.attention_backward_hopper(D, length, Kind(causal), True, group=Hq // Hkv)
    assert (D == 64 and (length == 16384 or not causal)) == config.PAIRS
    assert (D > 64 and length == 16384 and causal and Hq > Hkv) == config.WAVES
    if config.WAVES:
        monkeypatch.setattr(attention_hopper, "multiprocessors", lambda _: 20)
    request.getfixturevalue("choose").return_value = config
    problem = Problem(torch.bfloat16, *shape, D, D, causal)
    inputs, gradients = make(problem, "cuda")

    def run() -> dict[str, Tensor]:
        with determinism():
            outputs = flashproto.attention(*inputs, causal=causal, return_lse=True, impl="hopper")
            return results(outputs, inputs, gradients)

    first = run()
    assert_within_bound(first, *exact_and_eager(problem, inputs, gradients), problem.dtype)
    different = torch.zeros((), dtype=torch.int64, device="cuda")
    for _ in range(99):
        different += sum((value != first[name]).sum() for name, value in run().items())
    assert different.item() == 0


# (head_dim, keys, heads, query heads of a key head) of rows for which the backward takes, causal: pairs
# and zeros, the same of few keys with the first tile's store, zeros, and alternate walks; waves
BACKWARDS = [
    (24, 16384, 1024, 1),
    (64, 2048, 1024, 1),
    (96, 16384, 1024, 1),
    (128, 1024, 1024, 1),
    (64, 4096, 1, 8),
    (96, 1024, 1024, 8),
    (128, 4096, 1, 8),
    (192, 1024, 1, 8),
]


@pytest.mark.gpu
@pytest.mark.parametrize(
    "shape", [*ORDERED_SHAPES, (1, 1, 1, 1, 3000), (2, 6, 3, 300, 300), (9, 40, 40, 70, 257)]
)
@pytest.mark.parametrize("how", BACKWARDS)
@pytest.mark.parametrize("causal", [False, True])
def test_backward_by_the_configuration_of_other_rows(
    shape: tuple[int, ...],
    how: tuple[int, int, int, int],
    causal: bool,
    hopper: None,
    monkeypatch: pytest.MonkeyPatch,
    request: pytest.FixtureRequest,
) -> None:
    """What rows of other lengths and groups take, in items of one and of many steps; waves by few
    programs, so that there are rounds of them."""
    D, length, heads, group = how
    config = configs.attention_backward_hopper(D, length, Kind(causal), False, heads, group)
    assert (heads > 1 and D <= 64) == config.PAIRS
    assert (group > 1 and causal) == config.WAVES
    assert (D == 192 or length < 3072 or (D == 64 and causal)) == config.FIRST
    if group == 1:
        assert (causal and length < 3072) == config.ALTERNATE
    if config.WAVES:
        monkeypatch.setattr(attention_hopper, "multiprocessors", lambda _: 7)
    request.getfixturevalue("choose").return_value = config
    problem = Problem(torch.bfloat16, *shape, D, D, causal)
    inputs, gradients = make(problem, "cuda")
    exact, eager = exact_and_eager(problem, inputs, gradients)
    for _ in range(3):
        outputs = flashproto.attention(*inputs, causal=causal, return_lse=True, impl="hopper")
        assert_within_bound(results(outputs, inputs, gradients), exact, eager, problem.dtype)


@pytest.mark.gpu
@pytest.mark.parametrize("group", [1, 2])
@pytest.mark.parametrize("steps", [1, 2, 5, 6, 7, 12])  # of an item, if group is 1
@pytest.mark.parametrize(
    ("D", "Sk"), [(64, 400), (64, 1024), (64, 4096), (128, 1024), (128, 2048), (192, 512)]
)
def test_sums_are_complete_before_they_are_converted(
    D: int, Sk: int, steps: int, group: int, hopper: None
) -> None:
    """Without a mask the postprocess begins while the last items run, which are counted if they have
    LEAST_STEPS; all memory is NaN before."""
    heads = 40
    config = configs.attention_backward_hopper(D, Sk, FULL, False, heads, group)
    assert config.COUNTED
    Sq = steps * config.BM - 5
    problem = Problem(torch.bfloat16, 1, heads * group, heads, Sq, Sk, D, D, causal=False)
    inputs, gradients = make(problem, "cuda")
    exact, eager = exact_and_eager(problem, inputs, gradients)
    for _ in range(5):
        outputs = flashproto.attention(*inputs, return_lse=True, impl="hopper")
        unused = [torch.full((1 << n,), torch.nan, device="cuda") for n in range(12, 27)]
        del unused
        assert_within_bound(results(outputs, inputs, gradients), exact, eager, problem.dtype)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("D", [64, 128, 256])
@pytest.mark.parametrize("shift", [-1, 1])
def test_scores_far_from_zero(shift: int, D: int, dtype: torch.dtype, hopper: None) -> None:
    """lse and delta reach the backward's products as three halves each: they are as good as float32."""
    B, H, S = 2, 3, 700
    q, k, v = (torch.randn(B, H, S, D, device="cuda") for _ in range(3))
    q[..., 0], k[..., 0] = 48.0, 48.0 * shift
    v[..., 0] += 100.0
    leaves = [t.to(dtype).requires_grad_() for t in (q, k, v)]
    dout = torch.randn(B, H, S, D, device="cuda").to(dtype)
    dlse = 100 * torch.randn(B, H, S, device="cuda")

    def gradients(like: Tensor, impl: str) -> list[Tensor]:
        given = [t.detach().to(like.dtype).requires_grad_() for t in leaves]
        outputs = flashproto.attention(*given, causal=True, return_lse=True, impl=impl)
        upstream = [dout.to(like.dtype), dlse.to(outputs[1].dtype)]
        return [g.double() for g in torch.autograd.grad(outputs, given, upstream)]

    exact = gradients(dlse.double(), "reference")
    ours, portable = gradients(dout, "hopper"), gradients(dout, "triton")
    for a, b, want in zip(ours, portable, exact, strict=True):
        unit = want.norm()
        assert (a - want).norm() <= 1.5 * (b - want).norm() + 1e-3 * unit


@pytest.mark.gpu
@pytest.mark.parametrize("Sq", [65, 128, 193, 1023, 1024, 1025, 3000])
@pytest.mark.parametrize(("B", "Hq", "Hkv", "Sk"), [(1, 2, 1, 1), (3, 60, 20, 333), (1, 40, 40, 2300)])
def test_rows_past_the_end_do_not_matter(
    Sq: int, B: int, Hq: int, Hkv: int, Sk: int, hopper: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With consumers that sit out, the same bits as without."""
    problem = Problem(torch.bfloat16, B, Hq, Hkv, Sq, Sk, 64, 64, causal=False)
    inputs, gradients = make(problem, "cuda")
    found = []
    for idle in (True, True, False):
        config = configs.attention_forward_hopper(64, 8192, FULL)
        assert config.W == 3
        config = dataclasses.replace(config, SKIP=Sk >= 2048, IDLE=idle)
        with monkeypatch.context() as patched:
            patched.setattr(configs, "attention_forward_hopper", lambda *_, config=config: config)
            call_cache.forget()
            outputs = flashproto.attention(*inputs, return_lse=True, impl="hopper")
        found.append([t.detach() for t in outputs])
    call_cache.forget()
    for again in found[1:]:
        for a, b in zip(found[0], again, strict=True):
            assert torch.equal(a, b)
    exact, eager = exact_and_eager(problem, inputs, gradients)
    got = results(tuple(outputs), inputs, gradients)
    assert_within_bound(got, exact, eager, problem.dtype)


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("D", "B", "Hq", "Hkv", "Sq", "Sk", "causal", "W", "kept", "programs"),
    [
        (64, 700, 3, 3, 49, 49, False, 1, 64, 3),
        (64, 3, 9, 9, 735, 735, False, 1, 64, 3),
        (64, 2, 40, 8, 1111, 1111, True, 1, 64, 3),
        (64, 5, 16, 2, 3, 300, True, 1, 64, 3),  # packed
        (64, 2, 30, 30, 2000, 77, False, 1, 64, 3),
        (64, 4, 50, 10, 1000, 1000, False, 4, 0, 1),
        (64, 1, 7, 7, 250, 4097, False, 4, 0, 1),
        (64, 1, 3, 1, 5001, 736, False, 4, 0, 1),
        (128, 1, 9, 3, 300, 2500, False, 2, 96, 1),
        (128, 2, 6, 6, 3001, 3101, True, 2, 96, 1),
        (128, 40, 16, 4, 33, 3100, True, 2, 96, 1),  # packed
        (128, 1, 40, 8, 1031, 2050, False, 3, 0, 1),
        (96, 1, 46, 23, 1150, 6150, True, 3, 0, 1),
        (128, 2, 4, 2, 6161, 6145, True, 3, 0, 1),
    ],
)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_any_number_of_consumers_and_queries_in_registers(
    D: int,
    B: int,
    Hq: int,
    Hkv: int,
    Sq: int,
    Sk: int,
    causal: bool,
    W: int,
    kept: int,
    programs: int,
    dtype: torch.dtype,
    hopper: None,
) -> None:
    """Where rows or heads are such that these are fastest; the same bits every time."""
    config = configs.attention_forward_hopper(D, Sk, Kind(causal), Sq, B * Hkv, Hq // Hkv)
    assert (W, kept, programs) == (config.W, config.Q_IN_REGS, config.PROGRAMS)
    problem = Problem(dtype, B, Hq, Hkv, Sq, Sk, D, D, causal=causal)
    inputs, gradients = make(problem, "cuda")
    attend = functools.partial(flashproto.attention, causal=causal, return_lse=True, impl="hopper")
    found = [attend(*inputs) for _ in range(3)]
    for again in found[1:]:
        assert all(map(torch.equal, found[0], again))
    exact, eager = exact_and_eager(problem, inputs, gradients)
    got = results(found[-1], inputs, gradients)
    assert_within_bound(got, exact, eager, problem.dtype)
