"""Bands and masks on backend "torch" of a CPU: values, and which boolean tensors are kept."""

from __future__ import annotations

import gc
import random
import threading
from dataclasses import replace

import numpy as np
import pytest
import torch
from attention_problem import Problem
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils.flop_counter import FlopCounterMode
from variant_problem import FEATURES, PAIRS, drawn, make, make_packed, starts

import flashproto
from flashproto import backends, masks
from flashproto.functional import attention_torch as mask_tensors
from flashproto.variant import fields_on

SCORES = {"softcap", "sinks", "alibi", "bias", "relative_bias", "score_mod", "dropout"}
SCORES |= {"max_score", "entropy"}
MASKS = [name for name in FEATURES if name not in SCORES]
PLAIN = Problem(torch.float64, 2, 4, 2, 19, 19, 8, 8, causal=False)
SHAPES = {
    "square": PLAIN,
    "more keys": replace(PLAIN, Sk=31, Dv=12),
    "more queries": replace(PLAIN, Sq=27, Sk=9, Hkv=4),
    "one query": replace(PLAIN, Sq=1, Sk=7),
}


def outcomes(function, inputs, gradient, impl: str, **options) -> list[Tensor]:
    """out and the gradients of inputs."""
    out = function(*inputs, impl=impl, **options)
    return [out, *torch.autograd.grad(out, inputs[:3], gradient)]


@pytest.fixture(autouse=True)
def makes(monkeypatch: pytest.MonkeyPatch) -> list[Tensor]:
    """The boolean tensors that are made, from an empty store on."""
    made: list[Tensor] = []
    visible = mask_tensors.visible

    def counted(*arguments):
        made.append(visible(*arguments))
        return made[-1]

    monkeypatch.setattr(mask_tensors, "visible", counted)
    mask_tensors.kept.clear()
    return made


def room() -> int:
    return sum(mask_tensors.room_of(x) for own in mask_tensors.kept.values() for x in own.values())


def tensors(Sq: int, Sk: int, B: int = 2, **options) -> list[Tensor]:
    shapes = (B, 4, Sq, 8), (B, 2, Sk, 8), (B, 2, Sk, 8)
    return [torch.randn(shape, **options) for shape in shapes]


def attend(qkv: list[Tensor], **options) -> Tensor:
    return flashproto.attention(*qkv, impl="torch", **options)


# --- values --------------------------------------------------------------------------------------


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize(
    "names",
    [*((name,) for name in MASKS), *(pair for pair in PAIRS if SCORES.isdisjoint(pair))],
    ids="+".join,
)
def test_masks_are_those_of_the_reference(names: tuple[str, ...], shape: str, seed: int) -> None:
    """With gradients, and again from what was kept."""
    call = drawn(random.Random(seed), SHAPES[shape], names, "cpu")
    inputs, (gradient, _) = make(call, "cpu")
    options = {n: x for n, x in call.options.items() if n != "scale"}
    for scale in (None, -0.7):
        wanted = outcomes(flashproto.attention, inputs, gradient, "reference", scale=scale, **options)
        got = outcomes(flashproto.attention, inputs, gradient, "torch", scale=scale, **options)
        torch.testing.assert_close(got, wanted, rtol=1e-9, atol=1e-10)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
@pytest.mark.parametrize("Dv", [16, 24])
def test_rows_without_a_key_are_0_and_have_no_gradient(dtype: torch.dtype, Dv: int) -> None:
    """In torch's fused kernel, of Dv = D, and in its other one; a whole sequence sees none."""
    mask = masks.padding(torch.tensor([0, 33])) & masks.window(3)
    q, k, v = (torch.randn(2, 4, n, d, dtype=dtype) for n, d in ((70, 16), (41, 16), (41, Dv)))
    inputs = [x.requires_grad_() for x in (q, k, v)]
    gradient = torch.randn(2, 4, 70, Dv, dtype=dtype)
    found = outcomes(flashproto.attention, inputs, gradient, "torch", mask=mask)
    unseen = ~mask.visible(70, 41).any(-1, keepdim=True).expand(2, 4, -1, -1)
    assert all(x.isfinite().all() for x in found)
    assert not any(x.masked_select(unseen).any() for x in found[:2])  # out and dq
    # Elements of 16 bits can cancel to 0, rows of them do not.
    assert (found[0].any(-1, keepdim=True) | unseen).all()
    assert not found[2][0].any() and not found[3][0].any()
    exact = [x.detach().double().requires_grad_() for x in inputs]
    wanted = outcomes(flashproto.attention, exact, gradient.double(), "reference", mask=mask)
    bound = {torch.float64: 1e-12, torch.float32: 1e-5, torch.float16: 1e-2}.get(dtype, 0.06)
    for x, y in zip(found, wanted, strict=True):
        torch.testing.assert_close(x.double(), y, rtol=bound, atol=bound)


LENGTHS = {
    "sequences": [(5, 5), (0, 3), (11, 4), (2, 9), (3, 0)],
    "no sequence": [],
    "empty ones": [(0, 0), (7, 7), (0, 0)],
}


@pytest.mark.parametrize("lengths", LENGTHS)
@pytest.mark.parametrize("name", ["", *(n for n in MASKS if FEATURES[n].packed)])
def test_sequences_are_those_of_the_reference(name: str, lengths: str, seed: int) -> None:
    call = drawn(random.Random(seed), PLAIN, [name] if name else [], "cpu")
    inputs, (gradient, _) = make_packed(call, LENGTHS[lengths], (2, 3), "cpu")
    given = [*inputs, *starts(LENGTHS[lengths], "cpu")]
    wanted = outcomes(flashproto.attention_varlen, given, gradient, "reference", **call.options)
    got = outcomes(flashproto.attention_varlen, given, gradient, "torch", **call.options)
    torch.testing.assert_close(got, wanted, rtol=1e-9, atol=1e-10)


def test_a_neighbours_nan_stays_with_it() -> None:
    inputs = [torch.randn(12, 2, 8, requires_grad=True) for _ in range(3)]
    cu, gradient = torch.tensor([0, 4, 9], dtype=torch.int32), torch.randn(12, 2, 8)
    given = [*inputs, cu, cu]
    wanted = outcomes(flashproto.attention_varlen, given, gradient, "torch", window=(2, 0))
    for x in (*inputs, gradient):
        x.data[:4] = x.data[9:] = torch.nan
    found = outcomes(flashproto.attention_varlen, given, gradient, "torch", window=(2, 0))
    for x, y in zip(found, wanted, strict=True):  # out, dq, dk and dv
        assert torch.equal(x[4:9], y[4:9]) and x[:4].isnan().all() and not x[9:].any()


def test_a_cpu_without_the_interpreter_takes_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(backends, "INTERPRETED", False)
    q, k, v = tensors(9, 13)
    cu = torch.tensor([0, 9], dtype=torch.int32)
    packed = [x[0].transpose(0, 1) for x in (q, k, v)], cu, torch.tensor([0, 13], dtype=torch.int32)
    qkv = torch.randn(2, 9, 8 * 8)
    taken = {"causal": True}, {"window": (3, 0)}, {"mask": masks.padding(torch.tensor([3, 4]))}
    found: list[str] = []
    with backends.watch_choices(lambda operator, chosen, against: found.append(chosen)):
        for options in taken:
            flashproto.attention(q, k, v, **options)
            flashproto.attention_qkv(qkv, 4, 2, **options)
        flashproto.attention_varlen(*packed[0], *packed[1:], window=(3, 0))
        assert found == ["torch"] * 7
        for options in ({"softcap": 3.0}, {"sinks": torch.zeros(4)}, {"return_lse": True}):
            flashproto.attention(q, k, v, window=(3, 0), **options)
        flashproto.attention(*(x.to("meta") for x in (q, k, v)), window=(3, 0))
        assert found[7:] == ["reference"] * 4
    assert {"WINDOW", "FIRST", "INTERVALS", "VARLEN"} < set(fields_on("torch"))


@pytest.mark.parametrize("options", [{"window": (3, 1)}, {"causal": True}])
def test_transforms_give_the_same(options: dict) -> None:
    one = tensors(9, 13)
    many = [torch.stack([x, -x]) for x in one]
    found = torch.vmap(lambda *x: flashproto.attention(*x, **options))(*many)
    torch.testing.assert_close(
        found, torch.stack([attend([x[i] for x in many], **options) for i in (0, 1)])
    )
    with pytest.raises(flashproto.BackendError, match=r"torch\.func\.vmap"):
        torch.vmap(lambda *x: attend([*x], **options))(*many)
    one = [x.requires_grad_() for x in one]
    wanted = torch.autograd.grad(attend(one, **options).square().sum(), one)
    got = torch.func.grad(lambda *x: attend([*x], **options).square().sum(), (0, 1, 2))(*one)
    torch.testing.assert_close(got, wanted)
    assert room() == mask_tensors.LEAST  # of the plain calls


# --- what is kept --------------------------------------------------------------------------------


def test_a_tensor_is_made_once(makes: list[Tensor]) -> None:
    """For a mask, lengths and the band beside it; of numbers alone without a mask; never expanded."""
    mask = masks.documents(torch.arange(12) // 5)
    for _ in range(3):
        attend(tensors(12, 12), mask=mask)
        attend(tensors(12, 12, B=1), mask=mask, causal=True)
        attend(tensors(9, 12), window=(4, 0))
        attend(tensors(9, 12), mask=masks.causal() & masks.window(4))
        attend(tensors(9, 12), causal=True)
        attend(tensors(12, 12), causal=True)  # torch's is_causal
        attend(tensors(7, 12), causal=True, mask=masks.causal(top_left=True))  # as well
        flashproto.attention_qkv(torch.randn(2, 12, 64), 4, 2, mask=mask, impl="torch")
    assert [tuple(x.shape) for x in makes] == [(1, 1, 12, 12)] * 2 + [(9, 12)] * 2
    padding = masks.padding(torch.tensor([3, 9]))
    attend(tensors(8, 12), mask=padding)
    assert makes[-1].shape == (2, 1, 8, 12) and makes[-1].untyped_storage().nbytes() == 2 * 8 * 12


@pytest.mark.parametrize("make_mask", [masks.padding, masks.prefix])
def test_changed_lengths_are_followed(make_mask, makes: list[Tensor]) -> None:
    """Those too that torch does not see, through memory that numpy has."""
    numbers = np.array([3, 9])
    mask = make_mask(torch.from_numpy(numbers)) & masks.window(None, 1)
    qkv = tensors(12, 12)
    first = attend(qkv, mask=mask)
    for changed in ([4, 2], [3, 9], [0, 12]):
        numbers[:] = changed
        got = attend(qkv, mask=mask)
        torch.testing.assert_close(got, flashproto.attention(*qkv, mask=mask, impl="reference"))
        assert torch.equal(got, first) == (changed == [3, 9])
        assert torch.equal(attend(qkv, mask=mask), got)
    assert len(makes) == 4 and room() == mask_tensors.LEAST


def test_it_goes_with_its_mask() -> None:
    mask, other = masks.documents(torch.arange(700) // 5), masks.documents(torch.arange(12) // 5)
    for heads in (1, 2):
        attend([torch.randn(1, heads, 700, 8)] * 3, mask=mask)
    attend(tensors(12, 12), mask=other)
    assert room() == 700 * 700 + 2 * 4 * 700 + mask_tensors.LEAST
    del mask
    gc.collect()
    assert room() == mask_tensors.LEAST and [*mask_tensors.kept] == [other]


def test_the_bound_of_bytes_holds(monkeypatch: pytest.MonkeyPatch, makes: list[Tensor]) -> None:
    monkeypatch.setattr(mask_tensors, "BYTES", 1000)
    monkeypatch.setattr(mask_tensors, "LEAST", 100)
    for i in range(20):
        attend(tensors(12, 13), window=(3, 0))  # 156 bytes, and used each time
        attend(tensors(7, 13 + i), window=(3, 0))
        assert room() <= 1000
    assert len(makes) == 21 and len(mask_tensors.kept[mask_tensors.NO_OBJECT]) > 3
    attend(tensors(32, 32), window=(3, 0))  # larger than all room: made, and others stay
    attend(tensors(12, 13), window=(3, 0))
    assert len(makes) == 22


def test_nothing_is_kept_where_it_is_seen_being_made(makes: list[Tensor]) -> None:
    mask = masks.padding(torch.tensor([3, 9]))
    qkv = tensors(12, 12)

    def both(*qkv: Tensor) -> Tensor:
        return attend([*qkv], mask=mask) + attend([*qkv], window=(3, 0))

    wanted = both(*qkv)
    kept = room()
    del makes[:]
    mask_tensors.kept.clear()
    for _ in range(2):
        compiled = torch.compile(both, backend="eager", fullgraph=True)(*qkv)
        torch.testing.assert_close(compiled, wanted)
        with FlopCounterMode(display=False):
            torch.testing.assert_close(both(*qkv), wanted)
        torch.testing.assert_close(torch.func.functionalize(both)(*qkv), wanted)
        assert not room()
    assert torch.equal(both(*qkv), wanted) and room() == kept
    del makes[:]
    with FakeTensorMode(allow_non_fake_inputs=True) as mode:
        fake = both(*[mode.from_tensor(x) for x in qkv])
    assert fake.shape == wanted.shape and len(makes) == 2 and room() == kept
    assert torch.equal(both(*qkv), wanted) and len(makes) == 2


def test_what_inference_keeps_serves_training() -> None:
    mask = masks.documents(torch.arange(12) // 5)
    qkv = tensors(12, 12)
    with torch.inference_mode():
        own = masks.padding(torch.tensor([3, 9]))
        wanted = [attend(qkv, mask=mask), attend(qkv, mask=own), attend(qkv, window=(3, 0))]
    inputs = [x.requires_grad_() for x in qkv]
    got = [attend(inputs, mask=mask), attend(inputs, mask=own), attend(inputs, window=(3, 0))]
    for x, y in zip(got, wanted, strict=True):
        assert torch.equal(x, y)
        assert all(g.isfinite().all() for g in torch.autograd.grad(x.sum(), inputs))


def test_threads_share_what_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mask_tensors, "BYTES", 4 * mask_tensors.LEAST)
    qkv = tensors(6, 9)
    wanted = [flashproto.attention(*qkv, window=(n, 0), impl="reference") for n in range(8)]
    wrong: list[object] = []

    def work() -> None:
        try:
            for n in [*range(8)] * 10:
                mask = masks.window(n) & masks.intervals(torch.zeros(9).int(), torch.full((9,), 6))
                for options in ({"window": (n, 0)}, {"mask": mask}):
                    torch.testing.assert_close(attend(qkv, **options), wanted[n])
        except Exception as error:
            wrong.append(error)

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong and room() <= 4 * mask_tensors.LEAST
