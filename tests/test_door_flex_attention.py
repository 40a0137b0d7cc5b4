"""FlexAttention's BlockMasks as masks, against mask_mod itself and a dense definition in float64."""

from __future__ import annotations

import doctest
import inspect
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from door_calls import Calls, run_examples, section
from torch import Tensor
from torch.nn.attention.flex_attention import (
    BlockMask,
    and_masks,
    create_block_mask,
    create_mask,
    flex_attention,
    or_masks,
)

import flashproto
from flashproto import backends, masks
from flashproto.integrations import flex_attention as door

MaskMod = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]
S, BLOCK = 300, 32
DOCUMENTS = torch.arange(S) // 70
PADDING = torch.tensor([S, 211])
IMAGES = torch.where((torch.arange(S) % 100 >= 40) & (torch.arange(S) % 100 < 75), DOCUMENTS + 1, 0)


def causal(b: Tensor, h: Tensor, q: Tensor, kv: Tensor) -> Tensor:
    return kv <= q


def window(n: int) -> MaskMod:
    return lambda b, h, q, kv: q - kv <= n


def documents(b: Tensor, h: Tensor, q: Tensor, kv: Tensor) -> Tensor:
    return DOCUMENTS.to(q.device)[q] == DOCUMENTS.to(q.device)[kv]


def image(b: Tensor, h: Tensor, q: Tensor, kv: Tensor) -> Tensor:
    ids = IMAGES.to(q.device)
    return (ids[q] == ids[kv]) & (ids[q] > 0)


def first_keys(b: Tensor, h: Tensor, q: Tensor, kv: Tensor) -> Tensor:
    return (kv < 4) & (kv <= q)


def block_diffusion(b: Tensor, h: Tensor, q: Tensor, kv: Tensor) -> Tensor:
    half, block = S // 2, 10
    own = (q % half // block == kv % half // block) & (q // half == kv // half)
    return own | ((kv >= half) & (q % half // block > kv % half // block))


def of_one_number(b: Tensor, h: Tensor, q: Tensor, kv: Tensor) -> Tensor:
    """FlexAttention calls it with single numbers, of which a stack is one of four."""
    return torch.stack((q, kv, b * 7, b)).sum() % 3 == 0


# Those that are intervals, with the batch and heads of their tables.
INTERVALS: dict[str, tuple[MaskMod, int | None, int | None]] = {
    "everything": (lambda b, h, q, kv: q >= 0, None, None),
    "nothing": (lambda b, h, q, kv: q < 0, None, None),
    "causal": (causal, None, None),
    "window": (and_masks(causal, window(50)), None, None),
    "both sides": (lambda b, h, q, kv: (q - kv).abs() <= 40, None, None),
    "documents": (and_masks(causal, documents), None, None),
    "prefix": (or_masks(causal, lambda b, h, q, kv: kv < 90), None, None),
    "padding": (and_masks(causal, lambda b, h, q, kv: kv < PADDING.to(q.device)[b]), 2, None),
    "chunks": (and_masks(causal, lambda b, h, q, kv: q // 64 == kv // 64), None, None),
    "images": (or_masks(causal, image), None, None),
    "window by head": (lambda b, h, q, kv: (kv <= q) & (q - kv <= 20 * h), None, 4),
    "batch and head": (lambda b, h, q, kv: kv + 9 * b <= q + 5 * h, 2, 4),
    "first keys": (or_masks(and_masks(causal, window(50)), first_keys), None, None),
    "row of keys": (lambda b, h, q, kv: (kv % 16 == 0) | (kv == q), None, None),
}  # fmt: skip
# Those with a key that two runs of queries see.
TWO_RUNS: dict[str, tuple[MaskMod, int | None, int | None]] = {
    "dilated": (lambda b, h, q, kv: (kv <= q) & ((q - kv) % 2 == 0), None, None),
    "global tokens": (lambda b, h, q, kv: (q == 0) | ((q - kv).abs() <= 3), None, None),
    "one head": (
        lambda b, h, q, kv: (kv <= q) & ((h == 0) | (b == 0) | (q != 200) | (kv != 77)), 2, 4
    ),
    "block diffusion": (block_diffusion, None, None),
    "of one number": (of_one_number, 2, None),
}  # fmt: skip


def block_mask_of(
    mod: MaskMod, B: int | None, H: int | None, device: str, block: int = BLOCK
) -> BlockMask:
    return create_block_mask(mod, B, H, S, S, device=device, BLOCK_SIZE=block)


@pytest.mark.parametrize("name", INTERVALS)
def test_masks_are_exact(name: str, device: str) -> None:
    mod, B, H = INTERVALS[name]
    expected = create_mask(mod, B, H, S, S, device=device)
    for block in (BLOCK, 128):
        mask = door.from_block_mask(block_mask_of(mod, B, H, device, block))
        assert torch.equal(mask.visible(S, S), expected), block


@pytest.mark.parametrize(("Sq", "Sk"), [(1, 300), (100, 37), (37, 100), (257, 129)])
def test_lengths_that_are_no_multiple_of_blocks(Sq: int, Sk: int, device: str) -> None:
    def mod(b: Tensor, h: Tensor, q: Tensor, kv: Tensor) -> Tensor:
        return (kv <= q + Sk - Sq) & (q + Sk - Sq - kv <= 60)

    for block in (16, (16, 32), (64, 16)):
        block_mask = create_block_mask(mod, None, None, Sq, Sk, device=device, BLOCK_SIZE=block)
        mask = door.from_block_mask(block_mask)
        assert torch.equal(mask.visible(Sq, Sk)[0, 0], create_mask(mod, 1, 1, Sq, Sk, device)[0, 0])


@pytest.mark.parametrize("name", TWO_RUNS)
def test_two_runs_are_tables(name: str, device: str) -> None:
    mod, B, H = TWO_RUNS[name]
    expected = create_mask(mod, B, H, S, S, device=device)
    for block in (BLOCK, 128):
        mask = door.from_block_mask(block_mask_of(mod, B, H, device, block))
        assert mask.rule is not None
        assert torch.equal(mask.visible(S, S), expected), block
    with pytest.raises(ValueError, match=rf"mask is from_block_mask\(.*\), of {S} queries"):
        mask.visible(S - 1, S)


def test_only_partial_blocks_are_looked_at(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """In tiles of a bounded size."""
    block_mask = block_mask_of(causal, None, None, device)
    looked_at = []

    def counting(mod: Any, B: int, H: int, rows: int, keys: int, device: str) -> Tensor:
        looked_at.append(B * H * rows * keys)
        return create_mask(mod, B, H, rows, keys, device)

    monkeypatch.setattr(door, "create_mask", counting)
    door.from_block_mask(block_mask)
    partial = int(block_mask.kv_num_blocks.sum())
    assert block_mask.full_kv_num_blocks is not None and int(block_mask.full_kv_num_blocks.sum()) > 0
    # Whole ones on the diagonal, and the last row of blocks, which ends within them.
    assert partial == 19 and sum(looked_at) == 9 * BLOCK**2 + 12 * S
    looked_at.clear()
    monkeypatch.setattr(door, "PAIRS", 2 * BLOCK**2)
    mask = door.from_block_mask(block_mask_of(*INTERVALS["row of keys"], device))
    assert len(looked_at) >= 50 and max(looked_at) <= 2 * BLOCK**2
    mod, *_ = INTERVALS["row of keys"]
    assert torch.equal(mask.visible(S, S), create_mask(mod, 1, 1, S, S, device))


def test_tables_made_by_hand(device: str) -> None:
    """Full blocks are taken from the table, whatever mask_mod says; with as many columns as are needed,
    in any order, and none of full blocks."""
    count = torch.tensor([[[1, 1, 2]]], dtype=torch.int32, device=device)
    index = torch.tensor([[[[0, 9], [1, 9], [2, 0]]]], dtype=torch.int32, device=device)
    full = torch.tensor([[[0, 1, 1]]], dtype=torch.int32, device=device)
    places = torch.tensor([[[[9], [0], [1]]]], dtype=torch.int32, device=device)
    lengths: Any = {"BLOCK_SIZE": 16, "seq_lengths": (40, 40)}
    block_mask = BlockMask.from_kv_blocks(count, index, full, places, mask_mod=causal, **lengths)
    seen = door.from_block_mask(block_mask).visible(40, 40)[0, 0]
    assert torch.equal(seen, masks.causal().visible(40, 40).to(device))
    expected = masks.causal().visible(40, 40).to(device)
    expected[16:32, :16] = expected[32:, 16:32] = False  # blocks that are not in the table
    block_mask = BlockMask.from_kv_blocks(count, index, mask_mod=causal, **lengths)
    mask = door.from_block_mask(block_mask)
    assert mask.rule is not None and torch.equal(mask.visible(40, 40)[0, 0], expected)
    expected[:16, 16:32] = True  # a full block, of which mask_mod says otherwise
    full, places = full.new_tensor([[[1, 0, 0]]]), places.new_tensor([1, 9, 9])
    block_mask = BlockMask.from_kv_blocks(
        count, index, full, places[None, None, :, None], mask_mod=causal, **lengths
    )
    mask = door.from_block_mask(block_mask)
    assert mask.rule is not None and torch.equal(mask.visible(40, 40)[0, 0], expected)


@pytest.mark.parametrize("name", ["documents", "window by head", "padding", "images", *TWO_RUNS])
def test_attention_and_gradients(name: str, device: str) -> None:
    mod, B, H = (INTERVALS | TWO_RUNS)[name]
    block_mask = block_mask_of(mod, B, H, device)
    calls = Calls()
    attention = calls.counting(flashproto.attention)
    q, k, v = (torch.randn(2, heads, S, 16, device=device, requires_grad=True) for heads in (4, 2, 2))
    dout = torch.randn(2, 4, S, 16, device=device)
    wide = [x.detach().double().requires_grad_() for x in (q, k, v)]
    keys, values = (x.repeat_interleave(2, 1) for x in wide[1:])
    seen = create_mask(mod, B or 1, H or 1, S, S, device=device)
    scores = (wide[0] @ keys.mT / 4).masked_fill(~seen, -math.inf)
    exact = scores.softmax(-1).nan_to_num(0) @ values
    want = exact, *torch.autograd.grad(exact, wide, dout.double())
    impl = "reference" if device == "cpu" else None
    out: Any = attention(q, k, v, mask=door.from_block_mask(block_mask), impl=impl)
    got = out, *torch.autograd.grad(out, (q, k, v), dout)
    for x, y in zip(got, want, strict=True):
        torch.testing.assert_close(x.double(), y, rtol=1e-4, atol=2e-5)
    calls.assert_one("attention")


# --- score functions ------------------------------------------------------------------------------


def capped(score: Tensor, b: Tensor, h: Tensor, q: Tensor, kv: Tensor) -> Tensor:
    return 2.0 * torch.tanh(score / 2.0)


def with_alibi(score: Tensor, b: Tensor, h: Tensor, q: Tensor, kv: Tensor) -> Tensor:
    return score + (kv - q) * torch.exp2(-(h + 1) * 8.0 / 4)


HEAT = torch.rand(4, 1, 1) + 0.5


def heated(score: Tensor, b: Tensor, h: Tensor, q: Tensor, kv: Tensor) -> Tensor:
    return score * HEAT[h, 0, 0]


@pytest.mark.parametrize(
    ("mod", "name", "argument"),
    [(capped, "softcap", 2.0), (with_alibi, "alibi", 4), (heated, "multiply_score", HEAT)],
)
def test_score_mods_by_name(mod: Any, name: str, argument: Any) -> None:
    """As FlexAttention itself gives it, on a CPU."""
    q, k, v = (torch.randn(1, heads, S, 16) for heads in (4, 2, 2))
    block_mask = block_mask_of(causal, None, None, "cpu")
    want: Any = flex_attention(q, k, v, score_mod=mod, block_mask=block_mask, enable_gqa=True)
    calls = Calls()
    before = backends.get_default()
    backends.set_default("reference")
    try:
        got = calls.counting(flashproto.attention)(
            q, k, v, mask=door.from_block_mask(block_mask), **door.score_mod(name, argument)
        )
    finally:
        backends.set_default(before)
    torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-5)
    calls.assert_one("attention", backward=False)


@pytest.mark.parametrize("name", ["dilated", "one head"])
def test_tables_under_compile(name: str, device: str) -> None:
    """Of a mask that was made outside of what is compiled."""
    mod, B, H = TWO_RUNS[name]
    mask = door.from_block_mask(block_mask_of(mod, B, H, device))
    q, k, v = (torch.randn(2, 4, S, 16, device=device) for _ in range(3))
    impl = "reference" if device == "cpu" else None

    def run(q: Tensor, k: Tensor, v: Tensor) -> Any:
        return flashproto.attention(q, k, v, mask=mask, impl=impl)

    torch.compiler.reset()
    compiled = torch.compile(run, backend="aot_eager", fullgraph=True)
    torch.testing.assert_close(compiled(q, k, v), run(q, k, v))


def test_slopes_are_given_or_made() -> None:
    slopes = torch.rand(3)
    assert door.score_mod("alibi", slopes) == {"alibi_slopes": slopes}
    made = door.alibi(8)["alibi_slopes"]
    assert torch.equal(made, torch.tensor([2.0**-n for n in range(1, 9)]))


def test_errors(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(NotImplementedError, match=r"name is 'tail', none of softcap, alibi; it takes"):
        door.score_mod("tail")
    monkeypatch.setitem(door.SCORE_MODS, "tail", lambda n: {"softcap": n})
    assert door.score_mod("tail", 3.0) == {"softcap": 3.0}
    with pytest.raises(TypeError, match=r"^alibi: slopes is 0.5; it takes a number of heads"):
        door.alibi(0.5)  # type: ignore[arg-type]
    with pytest.raises(
        TypeError, match=r"^from_block_mask: block_mask is a tensor .*; it takes a BlockMask"
    ):
        door.from_block_mask(torch.ones(2, 2))  # type: ignore[arg-type]
    count, index = torch.ones(1, 1, 2, dtype=torch.int32), torch.zeros(1, 1, 2, 1, dtype=torch.int32)
    both = BlockMask.from_kv_blocks(count, index, count, index, BLOCK_SIZE=16, mask_mod=causal)
    with pytest.raises(ValueError, match="a table with a block that is both"):
        door.from_block_mask(both)
    flat = BlockMask.from_kv_blocks(count[0, 0], index[0, 0], BLOCK_SIZE=16, mask_mod=causal)
    with pytest.raises(ValueError, match=r"block_mask is of kv_indices \[2, 1\]; it takes tables"):
        door.from_block_mask(flat)


def test_examples_run() -> None:
    names = {"torch": torch, "flashproto": flashproto, "masks": masks, "flex_attention": door}
    runner = doctest.DocTestRunner()
    for function in (door.from_block_mask, door.score_mod):
        text = inspect.getdoc(function) or ""
        example = doctest.DocTestParser().get_doctest(text, dict(names), "example", None, None)
        assert example.examples
        runner.run(example)
    assert not runner.failures


def test_documentation() -> None:
    made = run_examples("FlexAttention")
    i, j = torch.arange(512)[:, None], torch.arange(512)
    expected = (j <= i) & (i // 200 == j // 200)
    assert torch.equal(made["mask"].visible(512, 512)[0, 0], expected)
    assert made["out"].shape == (1, 4, 512, 64)
    assert all(f'score_mod("{name}"' in section("FlexAttention") for name in door.SCORE_MODS)
