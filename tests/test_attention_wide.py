"""Attention with head dims above 256, on the portable kernels, against float64."""

from __future__ import annotations

import random
from dataclasses import replace

import decode_problem
import pytest
import torch
import variant_problem
from attention_problem import ATOL, Problem
from rows import poison
from variant_problem import Call, assert_within_bound, drawn, exact_and_eager, make_packed, run

import flashproto
from flashproto import configs
from flashproto.backends import BackendError
from flashproto.integrations import flash_attn
from flashproto.integrations import torch as torch_door
from flashproto.variant import LARGEST_HEAD_DIM

pytest.importorskip("triton")

PLAIN = Problem(torch.float32, 1, 4, 2, 37, 45, 512, 512, causal=True)
HEAD_DIMS = ((320, 320), (512, 512), (512, 256), (96, 512), (300, 300))


def check(problem: Problem, names: tuple[str, ...], device: str, seed: int) -> None:
    call = drawn(random.Random(seed), problem, names, device)
    inputs, gradients = variant_problem.make(call, device)
    exact, plain = exact_and_eager(call, inputs, gradients)
    assert_within_bound(run(call, inputs, gradients, "triton"), exact, plain, call)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", list(ATOL))
@pytest.mark.parametrize(("D", "Dv"), HEAD_DIMS)
def test_gradients_of_grouped_heads(
    D: int, Dv: int, dtype: torch.dtype, device: str, seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    poison(monkeypatch)
    for causal in (True, False):
        check(replace(PLAIN, dtype=dtype, D=D, Dv=Dv, causal=causal), (), device, seed)


VARIANTS = (
    ("window", "softcap", "sinks"),
    ("first_keys", "alibi", "dropout"),
    ("documents", "softcap", "bias"),
    ("intervals", "relative_bias"),
    ("boolean", "bias", "softcap"),
    ("dilated", "alibi", "sinks"),
    ("max_score", "entropy", "window"),
)


@pytest.mark.few(3)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("names", VARIANTS, ids="+".join)
def test_variants(names: tuple[str, ...], dtype: torch.dtype, device: str, seed: int) -> None:
    D, Dv = random.Random(seed).choice(HEAD_DIMS)
    check(replace(PLAIN, dtype=dtype, D=D, Dv=Dv, causal=False), names, device, seed)


LENGTHS = [(5, 5), (0, 3), (33, 40), (2, 9), (3, 0)]


@pytest.mark.few(1)
@pytest.mark.parametrize("names", [("causal",), ("window", "alibi"), ("relative_bias",)])
def test_sequences_side_by_side(names: tuple[str, ...], device: str, seed: int) -> None:
    call: Call = drawn(random.Random(seed), replace(PLAIN, causal=False, Dv=256), names, device)
    inputs, gradients = make_packed(call, LENGTHS, (2, 3), device)
    exact, plain = exact_and_eager(call, inputs, gradients, LENGTHS)
    assert_within_bound(run(call, inputs, gradients, "triton", LENGTHS), exact, plain, call)


def test_qkv_and_sdpa_are_attention(device: str) -> None:
    qkv = torch.randn(1, 21, 4 * 320, device=device, requires_grad=True)
    q, k, v = (x.transpose(1, 2) for x in qkv.unflatten(2, (4, 320)).split([2, 1, 1], 2))
    want = flashproto.attention(q, k, v, causal=True, impl="triton")
    dout = torch.randn_like(want)
    (dqkv,) = torch.autograd.grad(want, qkv, dout, retain_graph=True)
    sdpa = flashproto.scaled_dot_product_attention
    for got in (
        flashproto.attention_qkv(qkv, 2, 1, causal=True, impl="triton"),
        sdpa(q, k, v, is_causal=True, enable_gqa=True),
    ):
        assert torch.equal(got, want)
        assert torch.equal(torch.autograd.grad(got, qkv, dout, retain_graph=True)[0], dqkv)


@pytest.mark.parametrize("page", [0, 16])
@pytest.mark.parametrize(("D", "Dv"), HEAD_DIMS[1:4])
def test_caches(D: int, Dv: int, page: int, device: str, seed: int) -> None:
    problem = decode_problem.Problem(
        torch.float32,
        2,
        4,
        2,
        D,
        Dv,
        64,
        page,
        ((30, 30), (1, 1)),
        options={"causal": True, "scale": None},
    )
    decode_problem.play(problem, device, random.Random(seed), "triton")


def test_doors_take_them(device: str) -> None:
    q, k = (torch.randn(1, 9, heads, 512, device=device) for heads in (4, 2))
    want = flashproto.attention(*(x.transpose(1, 2) for x in (q, k, k)), causal=True)
    got = flash_attn.flash_attn_func(q, k, k, causal=True)
    assert torch.equal(got.transpose(1, 2), want)
    q, k = q.transpose(1, 2), k.transpose(1, 2)
    assert torch_door.takes(q, k, k, 0.0, None, ())
    wider = q.new_zeros(1, 4, 9, 520)
    assert not torch_door.takes(wider, wider, wider, 0.0, None, ())


def test_what_is_wider_is_refused(device: str) -> None:
    x = torch.randn(1, 1, 4, LARGEST_HEAD_DIM + 8, device=device)
    y = x[..., :16]
    for q, k, v in ((x, x, x), (y, y, x)):
        with pytest.raises(BackendError, match="head_dim is 520; the kernels take up to 512"):
            flashproto.attention(q, k, v, impl="triton")


def test_tf32_keeps_to_the_card_s_shared_memory() -> None:
    """As operands of tensor cores the tiles of float32 take 160 KiB."""
    for capability, wide in (((8, 0), True), ((8, 6), False), ((9, 0), True), ((12, 0), False)):
        assert configs.attention_takes_tf32(capability, 512, 64) == wide
        assert configs.attention_takes_tf32(capability, 64, 256)
