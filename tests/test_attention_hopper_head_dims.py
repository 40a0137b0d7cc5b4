"""Queries and keys of 192 columns with values of 128, as latent attention has them, on the Hopper
kernels: on the host what fits, is refused and launched; on a GPU everything against float64."""

from __future__ import annotations

import itertools
from collections.abc import Iterator

import pytest
import torch
from attention_problem import Problem, assert_within_bound, exact_and_eager, make, results
from hopper_attention import CAUSAL, FULL, determinism, half
from torch import Tensor

import flashproto
from flashproto import backends, configs, reference
from flashproto.kernels.hopper import attention_backward_work as work
from flashproto.kernels.hopper.attention_backward_rows import preprocess_kernel
from flashproto.ops import attention as attention_op
from flashproto.ops import attention_hopper
from flashproto.ops.attention_hopper_reasons import hopper_attention_reasons
from flashproto.ops.recipe import Compute, Launch
from flashproto.variant import Kind, Variant, backward_backend

SHARED_LIMIT = 227 * 1024
# (B, Hq, Hkv, Sq, Sk)
SHAPES = [
    (1, 2, 2, 512, 512),
    (2, 6, 2, 300, 1301),
    (1, 3, 1, 777, 777),
    (1, 1, 1, 1, 3000),
    (3, 4, 2, 5, 900),
    (2, 4, 4, 1100, 300),
    (1, 8, 1, 200, 200),
    (9, 20, 20, 70, 257),
    (1, 132, 132, 640, 640),
    (1, 1, 1, 1, 1),
]


# --- on the host ------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", [FULL, CAUSAL, Kind(CAUSAL=True, WINDOW=True), Kind(VARLEN=True)])
@pytest.mark.parametrize("Sk", [1, 640, 4096, 16384])
@pytest.mark.parametrize(
    ("Sq", "heads", "group"), [(1, 9, 1), (3, 999, 4), (384, 96, 1), (9999, 99, 1)]
)
def test_forward_configurations_fit(kind: Kind, Sk: int, Sq: int, heads: int, group: int) -> None:
    config = configs.attention_forward_hopper(192, Sk, kind, Sq, heads, group, head_dim_v=128)
    assert (config.D, config.MORE) == (128, 64)
    wide = (config.BM + config.KS * config.BN) * (config.D + config.MORE)
    shuffled = 64 * config.D  # one consumer's output on its way to wide stores
    assert 2 * (wide + config.VS * config.BN * config.D + shuffled) <= SHARED_LIMIT
    assert 128 * (config.W * config.REGISTERS + 24) <= 65536
    assert config.PB >= 2 + config.W, "Triton uses the lowest named barriers itself"
    narrow = configs.attention_forward_hopper(128, Sk, kind, Sq, heads, group, head_dim_v=128)
    assert narrow.MORE == 0 and narrow.name != config.name
    assert narrow == configs.attention_forward_hopper(128, Sk, kind, Sq, heads, group)


@pytest.mark.parametrize("kind", [FULL, CAUSAL, Kind(CAUSAL=True, WINDOW=True), Kind(VARLEN=True)])
@pytest.mark.parametrize("group", [1, 4])
def test_backward_configurations_fit(kind: Kind, group: int) -> None:
    config = configs.attention_backward_hopper(192, 4096, kind, False, 16, group, head_dim_v=128)
    assert (config.D, config.MORE, config.DQ, config.SUMS) == (128, 64, 0, "zeros")
    wide = (2 * config.BM + config.KV * config.BN) * (config.D + config.MORE)
    narrow = (2 * config.BM + config.KV * config.BN) * config.D
    exchanged = config.TILES * config.BN * config.BM
    terms = (2 * config.BM + 2 * 64) * 16  # lse and delta, selectors
    assert 2 * (wide + narrow + exchanged + terms) <= SHARED_LIMIT
    assert config.CHUNKS * config.NQ == config.D + config.MORE
    assert not (config.KV_IN_REGS or config.PEELED or config.ITEM_IN_SMEM or config.ROTATE)
    same = configs.attention_backward_hopper(128, 4096, kind, False, 16, group, head_dim_v=128)
    assert same == configs.attention_backward_hopper(128, 4096, kind, False, 16, group)
    assert (same.MORE, same.CHUNKS) == (0, 2)


@pytest.mark.parametrize(
    ("D", "Dv", "taken"),
    [
        (192, 128, True),
        (136, 64, True),
        (192, 8, True),
        (128, 64, False),
        (200, 128, False),
        (192, 136, False),
        (64, 128, False),
        (188, 128, False),
        (192, 12, False),
    ],
)
def test_which_are_taken(D: int, Dv: int, taken: bool) -> None:
    q, v = half(1, 2, 5, D), half(1, 2, 5, Dv)
    assert (not backends.texts(hopper_attention_reasons(q, q, v))) == taken


def test_gradients_that_triton_computes() -> None:
    for kind in (FULL, CAUSAL, Kind(CAUSAL=True, VARLEN=True), Kind(CAUSAL=True, WINDOW=True)):
        assert backward_backend("hopper", kind, wider_keys=True) == "hopper"
        assert backward_backend("hopper", kind, ordered=True, wider_keys=True) == "triton"
    assert backward_backend("hopper", Kind(SOFTCAP=1), wider_keys=True) == "triton"
    assert backward_backend("hopper", Kind(SOFTCAP=1)) == "hopper"


def launches(
    monkeypatch: pytest.MonkeyPatch, D: int, Dv: int, causal: bool
) -> Iterator[tuple[tuple[Tensor, ...], list[Launch]]]:
    """Tensors (q, k, v) and the launches of a forward, then of a backward; tokens before heads."""
    monkeypatch.setattr(attention_hopper, "multiprocessors", lambda device: 132)
    q, k, v = (half(2, 3000, *hd).transpose(1, 2) for hd in ((4, D), (2, D), (2, Dv)))
    settings = attention_op.Settings(Variant(Kind(CAUSAL=causal)).form, 0.125, "hopper")
    forward, _ = attention_op.attention.forward_recipe((q, k, v), settings, (0, 1), True)
    yield (q, k, v), [s for s in forward.steps if isinstance(s, Launch)]
    out, lse = half(2, 3000, 4, Dv).transpose(1, 2), torch.randn(2, 4, 3000)
    tensors = attention_op.backward_inputs((torch.randn_like(out), None, out, lse), q, k, v)
    backward = attention_op.attention.backward_recipe(tensors, settings, (True, True, True), False)
    assert not any(isinstance(s, Compute) for s in backward.steps)
    yield (q, k, v), [s for s in backward.steps if isinstance(s, Launch)]


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize(("D", "Dv"), [(192, 128), (160, 64)])
def test_what_is_launched(D: int, Dv: int, causal: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Boxes of 128 and of 64 columns of queries and keys, which see their whole rows."""
    (heads, (main,)), (_, (before, backward, after)) = launches(monkeypatch, D, Dv, causal)
    q, k, v = heads
    for arguments, rows in ((main.arguments, (64, 128)), (backward.arguments, (64, 128))):
        for name, x, columns in (
            ("q_desc", q, 128),
            ("k_desc", k, 128),
            ("v_desc", v, 128),
            ("more_q_desc", q, 64),
            ("more_k_desc", k, 64),
        ):
            found = arguments[name].tma_descriptors.first
            assert tuple(found.shape) == tuple(x.shape) and tuple(found.strides) == x.stride()
            assert found.block_shape[2:] == [rows["q" not in name], columns]
    assert main.arguments["CFG"].MORE == backward.arguments["CFG"].MORE == 64
    assert main.arguments["D_out"] == before.arguments["D_out"] == Dv
    assert backward.arguments["D_out"] == after.arguments["D_out"] == D
    assert backward.arguments["D_v"] == Dv
    dv, dk = backward.arguments["dv_ptr"], backward.arguments["dk_ptr"]
    assert [backward.arguments[n] for n in ("v_b", "v_h", "v_s")] == [n // 8 for n in dv.strides[:3]]
    assert [backward.arguments[n] for n in ("s_b", "s_h", "s_s")] == [n // 8 for n in dk.strides[:3]]
    assert tuple(dv.shape) == tuple(v.shape) and tuple(dk.shape) == tuple(k.shape)
    rows = 2 * 4 * 47 * 64  # of all heads, whole tiles
    assert after.programs == rows * 192 // (64 * 64)
    assert (before.arguments["D"], before.arguments["MORE"], after.arguments["D"]) == (128, 64, 192)
    assert backward.arguments["dq_ptr"].shape == (rows * 192 // 32, 32)


def test_sums_begin_with_zeros(device: str) -> None:
    """Of all columns, and nothing behind them."""
    Sq, H, D, MORE = 64, 2, 128, 64
    out, dout = (torch.randn(1, H, Sq, D, device=device).bfloat16() for _ in range(2))
    lse = torch.randn(1, H, Sq, device=device)
    terms = torch.zeros(H * Sq, attention_hopper.LD, dtype=torch.bfloat16, device=device)
    sums = torch.ones(H * Sq * (D + MORE) + 32, device=device)
    counters = torch.zeros(8 + work.FIRST_TURN.value + H, dtype=torch.int32, device=device)
    strides = [n // 8 for n in out.stride()[:3]]
    preprocess_kernel[(H * Sq // 32,)](
        out, dout, lse, lse, terms, sums, counters[4:], Sq, Sq, Sq, H, D, *strides, *strides, 0.5,
        HAS_DLSE=False, FIRST=False, D=D, R=32, BM=64, MORE=MORE,
    )  # fmt: skip
    assert not sums[:-32].any() and sums[-32:].all()
    delta = terms.view(H, Sq, -1)[..., 3:6].double().sum(-1)
    want = -(out.double() * dout.double()).sum(-1)[0]
    torch.testing.assert_close(delta, want, rtol=1e-6, atol=1e-4)


# --- on a GPU ---------------------------------------------------------------------------------------


@pytest.mark.gpu
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize(("D", "Dv"), [(192, 128), (136, 128), (160, 64), (192, 40)])
def test_against_float64(
    D: int, Dv: int, causal: bool, dtype: torch.dtype, shape: tuple[int, ...], hopper: None
) -> None:
    problem = Problem(dtype, *shape, D, Dv, causal)
    inputs, gradients = make(problem, "cuda")
    exact, eager = exact_and_eager(problem, inputs, gradients)
    for _ in range(2):
        outputs = flashproto.attention(*inputs, causal=causal, return_lse=True, impl="hopper")
        assert_within_bound(results(outputs, inputs, gradients), exact, eager, dtype)


@pytest.mark.gpu
@pytest.mark.parametrize("strides", ["tokens first", "packed"])
@pytest.mark.parametrize("causal", [False, True])
def test_in_any_memory(causal: bool, strides: str, hopper: None) -> None:
    problem = Problem(torch.bfloat16, 2, 6, 3, 500, 700, 192, 128, causal, strides=strides)
    inputs, gradients = make(problem, "cuda")
    outputs = flashproto.attention(*inputs, causal=causal, return_lse=True, impl="hopper")
    exact, eager = exact_and_eager(problem, inputs, gradients)
    assert_within_bound(results(outputs, inputs, gradients), exact, eager, problem.dtype)


@pytest.mark.gpu
@pytest.mark.parametrize("causal", [False, True])
def test_long_rows(causal: bool, hopper: None) -> None:
    """Items of many steps, more than there are programs, with sums of dQ from many key tiles."""
    problem = Problem(torch.bfloat16, 1, 8, 8, 4096, 4096, 192, 128, causal)
    inputs, gradients = make(problem, "cuda")
    outputs = flashproto.attention(*inputs, causal=causal, return_lse=True, impl="hopper")
    exact, eager = exact_and_eager(problem, inputs, gradients)
    assert_within_bound(results(outputs, inputs, gradients), exact, eager, problem.dtype)


@pytest.mark.gpu
@pytest.mark.parametrize("options", [{"window": (100, 0)}, {"window": (70, 50)}, {"softcap": 20.0}])
def test_other_kinds(options: dict, hopper: None) -> None:
    """Of which the softcap has its gradients by triton."""
    problem = Problem(torch.bfloat16, 2, 4, 2, 450, 450, 192, 128, causal=False)
    inputs, gradients = make(problem, "cuda")

    def run(dtype: torch.dtype, impl: str) -> dict[str, Tensor]:
        given = [x.detach().to(dtype).requires_grad_() for x in inputs]
        outputs = flashproto.attention(*given, return_lse=True, impl=impl, **options)
        return results(outputs, given, gradients)

    exact = run(torch.float64, "reference")
    assert_within_bound(
        run(problem.dtype, "hopper"), exact, run(problem.dtype, "triton"), problem.dtype
    )


@pytest.mark.gpu
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("lengths", [(1, 64, 65, 333), (700,), (128, 0, 256), (5,) * 40])
@pytest.mark.parametrize(("Hq", "Hkv"), [(2, 2), (6, 2)])
def test_sequences_side_by_side(
    Hq: int, Hkv: int, lengths: tuple[int, ...], causal: bool, hopper: None
) -> None:
    """Each is what it is alone, and rows of one do not reach another."""
    cu = torch.tensor([0, *itertools.accumulate(lengths)], dtype=torch.int32, device="cuda")
    T = sum(lengths)
    q, k, v = (
        torch.randn(T, H, D, device="cuda").bfloat16().requires_grad_()
        for H, D in ((Hq, 192), (Hkv, 192), (Hkv, 128))
    )
    dout, dlse = torch.randn(T, Hq, 128, device="cuda").bfloat16(), torch.randn(Hq, T, device="cuda")
    out, lse = flashproto.attention_varlen(
        q, k, v, cu, cu, causal=causal, return_lse=True, impl="hopper"
    )
    got = [out, lse, *torch.autograd.grad([out, lse], [q, k, v], [dout, dlse])]
    names = "out", "lse", "dq", "dk", "dv"
    start = 0
    for length in lengths:
        if length == 0:
            continue
        own = slice(start, start + length)
        start += length
        problem = Problem(torch.bfloat16, 1, Hq, Hkv, length, length, 192, 128, causal)
        inputs = [x.detach()[own].transpose(0, 1)[None].requires_grad_() for x in (q, k, v)]
        gradients = [dout[own].transpose(0, 1)[None], dlse[None, :, own]]
        exact, eager = exact_and_eager(problem, inputs, gradients)
        rows = [x[:, own][None] if x.ndim == 2 else x[own].transpose(0, 1)[None] for x in got]
        assert_within_bound(dict(zip(names, rows, strict=True)), exact, eager, problem.dtype)


@pytest.mark.gpu
def test_same_bits_under_determinism(hopper: None) -> None:
    """The forward is the same kernel; the gradients come from triton."""
    problem = Problem(torch.bfloat16, 1, 4, 4, 1000, 1000, 192, 128, causal=True)
    inputs, gradients = make(problem, "cuda")
    found = []
    for _ in range(5):
        with determinism():
            outputs = flashproto.attention(*inputs, causal=True, return_lse=True, impl="hopper")
            found.append(results(outputs, inputs, gradients))
    for other in found[1:]:
        assert all(torch.equal(value, found[0][name]) for name, value in other.items())


@pytest.mark.gpu
@pytest.mark.parametrize("parts", [None, 1, 5])
def test_split_keys(parts: int | None, hopper: None) -> None:
    q, k, v = (
        torch.randn(1, 2, S, D, device="cuda").bfloat16()
        for S, D in ((7, 192), (9000, 192), (9000, 128))
    )
    out, lse = flashproto.attention(q, k, v, num_splits=parts, return_lse=True, impl="hopper")
    want, want_lse = reference.attention(q.double(), k.double(), v.double())
    torch.testing.assert_close(out.double(), want, atol=2e-3, rtol=2e-2)
    torch.testing.assert_close(lse.double(), want_lse, atol=1e-3, rtol=1e-3)
