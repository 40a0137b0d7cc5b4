"""Attention's options in modules: windows, softcap, sinks, ALiBi, masks, sequences side by side, and
documents, in Attention, TransformerBlock and GPT."""

from __future__ import annotations

import copy
import dataclasses
import itertools
import math
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from flashproto import backends, masks, nn
from flashproto.nn import GPTConfig
from flashproto.nn.attention import alibi_slopes

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
IMPLS = [b for b in ("triton", "reference") if not backends.device_reasons(b, DEVICE)]
TINY = GPTConfig(vocab_size=61, context=24, n_layers=3, n_heads=4, d_model=32)
LLAMA: dict[str, Any] = {
    "norm": "rms",
    "mlp": "swiglu",
    "positions": "rope",
    "bias": False,
    "n_kv_heads": 2,
}
GPT_OSS = LLAMA | {"window": 3, "window_pattern": "SL", "softcap": 2.0, "sinks": True}


def close(a: Tensor, b: Tensor, tolerance: float = 1e-5) -> None:
    torch.testing.assert_close(a, b, rtol=tolerance, atol=tolerance)


# --- Attention ------------------------------------------------------------------------------------

S, HEADS, KV_HEADS, D = 13, 4, 2, 8
CU_SEQLENS = torch.tensor([0, 5, 5, S], dtype=torch.int32)  # of 5, 0 and 8 tokens
IDS = torch.tensor([0] * 4 + [1] * 7 + [0] * 2)  # of three documents

# Of each option: arguments of the layer, and of its forward.
OPTIONS: dict[str, tuple[dict, dict]] = {
    "window": ({"window": (3, 0)}, {}),
    "both sides": ({"causal": False, "window": (2, 3)}, {}),
    "softcap": ({"softcap": 0.3}, {}),
    "sinks": ({"sinks": True}, {}),
    "alibi": ({"alibi": True}, {}),
    "documents": ({}, {"mask": masks.documents(IDS)}),
    "padding": ({}, {"mask": masks.window(None, None) & masks.padding(torch.tensor([9]))}),
    "cu_seqlens": ({}, {"cu_seqlens": CU_SEQLENS}),
    "rope": ({}, {"rope": True}),
    "positions": ({}, {"rope": True, "positions": torch.arange(S).flip(0)}),
    "QK norm": ({"qk_norm": True}, {}),
    "max_score": ({}, {"record": True}),
}
APART = [
    {"window", "both sides"},
    {"documents", "padding"},
    {"documents", "cu_seqlens"},
    {"padding", "cu_seqlens"},
    {"alibi", "rope"},
    {"alibi", "positions"},
]


def plain(a: nn.Attention, x: Tensor, given: dict[str, Any]) -> tuple[Tensor, Tensor]:
    """What the layer gives for x [B, S, C], and its max_score, with all scores in memory."""
    q, k, v = (
        t.unflatten(-1, (-1, D)).transpose(1, 2)
        for t in a.qkv(x).split([n * D for n in (HEADS, KV_HEADS, KV_HEADS)], -1)
    )
    q, k = (t if norm is None else norm(t) for t, norm in ((q, a.q_norm), (k, a.k_norm)))
    i, j = torch.arange(S)[:, None], torch.arange(S)[None, :]
    seen = (j <= i) if a.causal else torch.ones(S, S, dtype=torch.bool)
    at = torch.arange(S)
    if a.window is not None:
        seen = seen & (j >= i - a.window[0]) & (j <= i + a.window[1])
    if "cu_seqlens" in given:
        own = torch.tensor([0] * 5 + [2] * 8)
        seen = seen & (own[:, None] == own)
        at = torch.cat((torch.arange(5), torch.arange(8)))
    if "mask" in given:
        seen = seen & given["mask"].visible(S, S)[0, 0]
    if "rope" in given:
        turn = torch.complex(*nn.rope_tables(S, D)).to(torch.complex128)[given.get("positions", at)]

        def turned(t: Tensor) -> Tensor:
            z = torch.complex(*t.chunk(2, -1)) * turn
            return torch.cat((z.real, z.imag), -1)

        q, k = turned(q), turned(k)
    k, v = (t.repeat_interleave(HEADS // KV_HEADS, 1) for t in (k, v))
    s = q @ k.mT / math.sqrt(D)
    top = s.masked_fill(~seen, -math.inf).amax((0, 2, 3))
    if a.softcap is not None:
        s = a.softcap * torch.tanh(s / a.softcap)
    if a.alibi:
        slopes = torch.tensor([1 / 4, 1 / 16, 1 / 64, 1 / 256])
        s = s - slopes[:, None, None] * (i - j).abs()
    s = s.masked_fill(~seen, -math.inf)
    if a.sinks is not None:
        s = torch.cat((s, a.sinks[:, None, None].expand(*s.shape[:3], 1)), -1)
    p = s.softmax(-1)[..., :S].nan_to_num(0.0)  # a query without a key
    return a.out((p @ v).transpose(1, 2).flatten(2)), top


def layer_of(names: tuple[str, ...], **more: Any) -> tuple[nn.Attention, dict[str, Any]]:
    made: dict[str, Any] = dict(more)
    given: dict[str, Any] = {}
    for name in names:
        made |= OPTIONS[name][0]
        given |= OPTIONS[name][1]
    a = nn.Attention(24, HEADS, KV_HEADS, D, **made)
    with torch.no_grad():
        for p in a.parameters():
            p.normal_(std=0.5)
    return a, given


def called(a: nn.Attention, x: Tensor, given: dict[str, Any]) -> Tensor:
    options = {name: t for name, t in given.items() if name not in ("rope", "record")}
    a.record_max_score = "record" in given
    rope = tuple(t.to(x) for t in nn.rope_tables(S, D)) if "rope" in given else None
    return a(x, rope, **options)


PAIRS = [p for p in itertools.combinations(OPTIONS, 2) if set(p) not in APART]


@pytest.mark.parametrize("names", [*((name,) for name in OPTIONS), *PAIRS], ids=" and ".join)
def test_attention_with_options_is_the_definition(names):
    """Output, gradients of x and of every parameter, and max_score, in float64."""
    a, given = layer_of(names, dtype=torch.float64)
    x = torch.randn(1 if "cu_seqlens" in names else 2, S, 24, dtype=torch.float64, requires_grad=True)
    y, (want, top) = called(a, x, given), plain(a, x, given)
    close(y, want, 1e-12)
    dy = torch.randn_like(y)
    leaves = dict(x=x, **dict(a.named_parameters()))
    assert ("sinks" in leaves) == ("sinks" in names)
    got, wanted = (torch.autograd.grad(t, list(leaves.values()), dy) for t in (y, want))
    for name, mine, definition in zip(leaves, got, wanted, strict=True):
        torch.testing.assert_close(
            mine, definition, rtol=1e-10, atol=1e-12, msg=lambda m, n=name: n + m
        )
    if "max_score" in names:
        close(a.max_score, top, 1e-12)


@pytest.mark.parametrize("impl", IMPLS)
@pytest.mark.parametrize(
    "names",
    [("window", "softcap", "sinks", "rope", "documents"), ("window", "sinks", "alibi", "cu_seqlens")],
    ids=["documents", "cu_seqlens"],
)
def test_many_options_on_each_backend(names, impl):
    a, given = layer_of(names, impl=impl)
    exact = copy.deepcopy(a).double()
    exact.impl = None
    x = torch.randn(1, S, 24, requires_grad=True)
    wide = x.detach().double().requires_grad_()
    want = plain(exact, wide, given)[0]
    dy = torch.randn_like(x)
    wanted = torch.autograd.grad(want, [wide, *exact.parameters()], dy.double())
    a, mine = a.to(DEVICE), x.detach().to(DEVICE).requires_grad_()
    given = {n: t.to(DEVICE) if isinstance(t, Tensor) else t for n, t in given.items()}
    if "mask" in given:
        given["mask"] = masks.documents(IDS.to(DEVICE))
    y = called(a, mine, given)
    close(y.cpu().double(), want, 1e-4)
    got = torch.autograd.grad(y, [mine, *a.parameters()], dy.to(DEVICE))
    for one, other in zip(got, wanted, strict=True):
        close(one.cpu().double(), other, 1e-3)


def test_options_reach_the_fused_projection_and_keep_it(monkeypatch):
    seen: dict[str, Any] = {}

    def record(qkv, n_heads, n_kv_heads, **options):
        seen.update(options)
        return qkv.new_zeros(2, n_heads, S, D)

    monkeypatch.setattr("flashproto.functional.attention_qkv", record)
    a, given = layer_of(("window", "softcap", "sinks", "documents"))
    called(a, torch.randn(2, S, 24), given)
    assert seen["window"] == (3, 0)
    assert seen["softcap"] == 0.3
    assert seen["sinks"] is a.sinks
    assert seen["mask"] is given["mask"]
    assert seen["causal"] is True


def test_sequences_side_by_side_in_both_shapes():
    a, given = layer_of(("cu_seqlens", "rope", "max_score"))
    x = torch.randn(S, 24)
    y = called(a, x, given)
    assert y.shape == (S, 24)
    top = a.max_score
    assert torch.equal(called(a, x[None], given), y[None])
    assert torch.equal(a.max_score, top)
    tables = nn.rope_tables(8, D)  # rows for the longest alone
    a.record_max_score = False
    close(a(x, tables, cu_seqlens=CU_SEQLENS), y)  # another backend without the statistic
    for start, stop in ((0, 5), (5, S)):
        close(a(x[None, start:stop], tables)[0], y[start:stop])


@pytest.mark.parametrize("heads", [1, 2, 4, 6, 8, 12, 16])
def test_slopes_of_alibi_are_the_papers(heads):
    """Press et al., footnote: a geometric sequence from 2^(-8/n) on; else of the power of 2 below, and
    every other one of the power above."""
    below = 2 ** int(math.log2(heads))
    want = [2.0 ** (-8 * (h + 1) / below) for h in range(below)]
    want += [2.0 ** (-8 * (h + 1) / (2 * below)) for h in range(0, 2 * (heads - below), 2)]
    close(alibi_slopes(heads, torch.device("cpu")), torch.tensor(want), 1e-6)
    assert alibi_slopes(heads, torch.device("meta")).dtype == torch.float32


def test_sinks_are_a_parameter_and_slopes_are_none():
    a = nn.Attention(24, HEADS, KV_HEADS, D, sinks=True, dtype=torch.bfloat16)
    assert torch.equal(a.sinks, torch.zeros(HEADS, dtype=torch.bfloat16))
    assert a.sinks.requires_grad and "sinks" in a.state_dict()
    torch.nn.init.ones_(a.sinks)
    assert torch.equal(copy.deepcopy(a).sinks, a.sinks)
    a.reset_parameters()
    assert torch.equal(a.sinks, torch.zeros_like(a.sinks))
    same, alibi = nn.Attention(24, 4), nn.Attention(24, 4, alibi=True)
    assert list(same.state_dict()) == list(alibi.state_dict())
    assert not list(alibi.buffers())
    told = repr(nn.Attention(24, 4, window=[3, 0]))
    assert "window=(3, 0), softcap=None, dropout=0.0, alibi=False" in told


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (lambda: nn.Attention(16, 2, window=3), "Attention: window is 3"),
        (lambda: nn.Attention(16, 2, window=(-1, 0)), "Attention: window is -1"),
        (lambda: nn.TransformerBlock(16, 2, window=(1, 2.5)), "Attention: window is 2.5"),
        (lambda: nn.Attention(16, 2, softcap=0.0), "Attention: softcap is 0.0"),
        (lambda: nn.Attention(16, 2, softcap="3"), "Attention: softcap is '3'"),
        (lambda: nn.Attention(16, 2, softcap=1e35), r"Attention: softcap is 1e\+35"),
        (lambda: nn.Attention(16, 2, sinks=torch.zeros(2)), "Attention: sinks is a tensor"),
        (lambda: nn.Attention(16, 2, alibi="yes"), "Attention: alibi is 'yes'"),
        (
            lambda: nn.Attention(16, 2, alibi=True)(torch.zeros(1, 3, 16), nn.rope_tables(3, 8)),
            "Attention: rope is given",
        ),
        (
            lambda: nn.Attention(16, 2)(torch.zeros(2, 3, 16), cu_seqlens=torch.tensor([0, 3]).int()),
            r"Attention: x is of shape \[2, 3, 16\]",
        ),
        (
            lambda: nn.Attention(16, 2)(torch.zeros(3, 16), cu_seqlens=torch.tensor([0, 3])),
            r"Attention: cu_seqlens is of torch.int64, a tensor of shape \[2\]",
        ),
        (
            lambda: nn.Attention(16, 2)(torch.zeros(3, 16), cu_seqlens=[0, 3]),
            r"Attention: cu_seqlens is \[0, 3\]",
        ),
        (
            lambda: nn.Attention(16, 2)(torch.zeros(1, 3, 16), mask=torch.ones(3, 3).bool()),
            "attention_qkv: mask is a tensor of shape",
        ),
        (
            lambda: nn.Attention(16, 2)(torch.zeros(1, 3, 16), positions=torch.arange(3)),
            r"Attention: positions is a tensor of shape \[3\]",
        ),
        (lambda: dataclasses.replace(TINY, window=0), "GPTConfig: window is 0"),
        (lambda: dataclasses.replace(TINY, window=2.5), "GPTConfig: window is 2.5"),
        (lambda: dataclasses.replace(TINY, window_pattern="SL"), "GPTConfig: window_pattern is 'SL'"),
        (
            lambda: dataclasses.replace(TINY, window=1, window_pattern=""),
            "GPTConfig: window_pattern is",
        ),
        (lambda: dataclasses.replace(TINY, window=1, window_pattern="SX"), "GPTConfig: window_pattern"),
        (
            lambda: dataclasses.replace(TINY, window=1, window_pattern=3),
            "GPTConfig: window_pattern is 3",
        ),
        (lambda: dataclasses.replace(TINY, softcap=-1.0), "GPTConfig: softcap is -1.0"),
        (lambda: dataclasses.replace(TINY, softcap=1e-35), "GPTConfig: softcap is 1e-35"),
        (lambda: dataclasses.replace(TINY, sinks="yes"), "GPTConfig: sinks is 'yes'"),
    ],
)
def test_options_that_do_not_fit_are_named(make, said):
    with pytest.raises((ValueError, TypeError), match=rf"^{said}.*; it takes ") as e:
        make()
    assert len(str(e.value)) < 300


# --- TransformerBlock -----------------------------------------------------------------------------


@pytest.mark.parametrize("packed", [True, False])
def test_a_block_passes_options_on(packed):
    block = nn.TransformerBlock(32, 4, 2, window=(3, 0), softcap=0.5, sinks=True, impl="reference")
    with torch.no_grad():
        for p in block.parameters():
            p.normal_(std=0.5)
    assert block.attention.window == (3, 0) and block.attention.softcap == 0.5
    rope = nn.rope_tables(S, 8)
    options: dict[str, Any] = {"mask": masks.documents(IDS), "positions": torch.arange(S).flip(0)}
    if packed:
        options = {"cu_seqlens": CU_SEQLENS, "mask": masks.window(2)}
    x = torch.randn(*(() if packed else (2,)), S, 32, requires_grad=True)
    h = x + block.attention(block.norm1(x), rope, **options)
    want = h + block.mlp(block.norm2(h))
    got = sum(block(x, None, rope, **options))
    close(got, want)
    leaves, dy = [x, *block.parameters()], torch.randn_like(x)
    for a, b in zip(*(torch.autograd.grad(t, leaves, dy) for t in (got, want)), strict=True):
        close(a, b, 1e-4)


# --- GPT ------------------------------------------------------------------------------------------


def gpt(parts: dict[str, Any], **options: Any) -> nn.GPT:
    """A model far from its initialisation, where every token has a part in the loss."""
    model = nn.GPT(dataclasses.replace(TINY, **parts), **{"impl": "reference", **options})
    with torch.no_grad():
        for p in model.parameters():
            p.add_(0.1 * torch.randn_like(p))
    return model


def gradients(loss: Tensor, model: nn.GPT) -> list[Tensor]:
    return list(torch.autograd.grad(loss, list(model.parameters())))


def test_window_pattern_repeats_over_the_layers():
    def windows(**changes: Any) -> list[int | None]:
        return dataclasses.replace(TINY, n_layers=5, **changes).windows

    assert windows() == [None] * 5
    assert windows(window=7) == [7] * 5
    assert windows(window=7, window_pattern="SSL") == [7, 7, None, 7, 7]
    assert windows(window=7, window_pattern="SLLLLLLL") == [7, None, None, None, None]
    model = nn.GPT(dataclasses.replace(TINY, **GPT_OSS), device="meta")
    assert [b.attention.window for b in model.blocks] == [(3, 0), None, (3, 0)]
    assert {b.attention.softcap for b in model.blocks} == {2.0}
    # A layer with a window computes so many pairs a token, and no more than there are.
    full = dataclasses.replace(model.config, window=None, window_pattern=None)
    less = nn.GPT(full, device="meta").flops_per_token() - model.flops_per_token()
    assert less == 12 * 32 * 2 * (24 - 4)
    assert model.flops_per_token(2) == nn.GPT(full, device="meta").flops_per_token(2)


def test_gpt_with_options_equals_a_loop_over_its_weights():
    model, tokens = gpt(GPT_OSS), torch.randint(61, (2, 11))
    h, rope = model.embedding(tokens), nn.rope_tables(11, 8)
    for block, window in zip(model.blocks, [(3, 0), None, (3, 0)], strict=True):
        a = block.attention
        q, k, v = (
            t.unflatten(-1, (-1, 8)).transpose(1, 2)
            for t in a.qkv(block.norm1(h)).split((32, 16, 16), -1)
        )
        q, k = nn.apply_rope(q, rope), nn.apply_rope(k, rope)
        k, v = (t.repeat_interleave(2, 1) for t in (k, v))
        s = 2.0 * torch.tanh(q @ k.mT / math.sqrt(8) / 2.0)
        far = torch.ones(11, 11).tril(-4).bool() if window else torch.zeros(11, 11).bool()
        s = s.masked_fill(torch.ones(11, 11).triu(1).bool() | far, -math.inf)
        p = torch.cat((s, a.sinks[:, None, None].expand(2, 4, 11, 1)), -1).softmax(-1)[..., :-1]
        h = h + a.out((p @ v).transpose(1, 2).flatten(2))
        h = h + block.mlp(block.norm2(h))
    close(model(tokens)[0], model.norm(h) @ model.embedding.weight.mT, 1e-4)


DOCUMENTS = ((5, 9, 7), (12, 8, 1))  # lengths; that of the first row's end, and others, are cut
POSITIONS = {"learned": {}, "rope": LLAMA, "gpt-oss": GPT_OSS}


def packed_documents() -> tuple[Tensor, Tensor, Tensor]:
    """tokens, targets and documents [2, 21]."""
    tokens, targets = torch.randint(61, (2, 2, 21))
    targets[1, 3] = -100
    rows = [torch.arange(3).repeat_interleave(torch.tensor(lengths)) for lengths in DOCUMENTS]
    ids = torch.stack(rows)
    ids[1] = torch.tensor([4, 9, 4])[ids[1]]  # a number that comes back is another document
    return tokens, targets, ids


def loss_of_each_alone(model: nn.GPT, tokens: Tensor, targets: Tensor) -> Tensor:
    """The loss of the documents in a batch of their own, each a row, filled up behind its end."""
    rows = [
        (row, start, start + length)
        for row, lengths in enumerate(DOCUMENTS)
        for start, length in zip(itertools.accumulate((0, *lengths)), lengths, strict=False)
    ]
    x, y = torch.zeros(len(rows), 12, dtype=torch.int64), torch.full((len(rows), 12), -100)
    for n, (row, start, stop) in enumerate(rows):
        x[n, : stop - start] = tokens[row, start:stop]
        y[n, : stop - start] = targets[row, start:stop]
    return model(x, y, return_logits=False)[1]


@pytest.mark.parametrize("parts", POSITIONS.values(), ids=POSITIONS)
def test_documents_have_the_loss_of_a_batch_of_their_own(parts):
    """In float32, and so have their gradients."""
    model, (tokens, targets, ids) = gpt(parts), packed_documents()
    got = model(tokens, targets, return_logits=False, documents=ids)[1]
    want = loss_of_each_alone(model, tokens, targets)
    assert got.item() == pytest.approx(want.item(), rel=1e-5)
    assert abs(model(tokens, targets)[1].item() - want.item()) > 1e-3
    for a, b in zip(gradients(got, model), gradients(want, model), strict=True):
        close(a, b)
    same = model(tokens, targets, documents=torch.zeros_like(tokens))[1]
    close(same, model(tokens, targets)[1], 1e-6)


@pytest.mark.parametrize("parts", POSITIONS.values(), ids=POSITIONS)
def test_sequences_side_by_side_in_a_gpt_are_documents(parts):
    """Of cu_seqlens all together may be longer than the context."""
    model, (tokens, targets, ids) = gpt(parts), packed_documents()
    lengths = [n for row in DOCUMENTS for n in row]
    cu = torch.tensor([0, *itertools.accumulate(lengths)], dtype=torch.int32)
    got = model(tokens.view(1, -1), targets.view(1, -1), cu_seqlens=cu)
    want = model(tokens, targets, documents=ids)
    close(got[0].view_as(want[0]), want[0])
    close(got[1], want[1])


def test_a_mask_of_a_gpt_joins_its_own():
    model, (tokens, _, ids) = gpt(LLAMA), packed_documents()
    got = model(tokens, mask=masks.window(4))[0]
    model.config, windowed = model.config, gpt(LLAMA | {"window": 4})
    windowed.load_state_dict(model.state_dict())
    close(got, windowed(tokens)[0])
    both = model(tokens, mask=masks.window(4), documents=ids)[0]
    close(both, windowed(tokens, documents=ids)[0])
    assert (both - got).abs().amax() > 1e-3


def test_gpt_refuses_documents_that_do_not_fit():
    model, tokens = gpt({}), torch.zeros(2, 5, dtype=torch.int64)
    cu = torch.tensor([0, 26], dtype=torch.int32)
    for options, kind, said in (
        ({"documents": tokens[:1]}, ValueError, r"GPT: documents is a tensor of shape \[1, 5\]"),
        ({"documents": [[0]]}, ValueError, r"GPT: documents is \[\[0\]\]"),
        ({"documents": tokens.double()}, TypeError, "masks.documents: ids is of dtype"),
        ({"documents": tokens, "cu_seqlens": cu}, ValueError, "GPT: cu_seqlens is .* beside group and"),
        ({"cu_seqlens": cu[:1]}, ValueError, r"Attention: x is of shape \[2, 5, 32\]"),
        ({"cu_seqlens": [0, 5]}, TypeError, r"GPT: cu_seqlens is \[0, 5\]; it takes an int32 tensor"),
    ):
        with pytest.raises(kind, match=said):
            model(tokens, **options)
    with pytest.raises(ValueError, match="cu_seqlens is of a sequence of 26; it takes at most context"):
        model(torch.zeros(1, 26, dtype=torch.int64), cu_seqlens=cu)


# --- what any torch model can do ------------------------------------------------------------------


@pytest.mark.slow
def test_compiled_gpt_with_options_has_no_graph_break_and_equals_eager():
    model, (tokens, targets, ids) = gpt(GPT_OSS | {"n_layers": 2}), packed_documents()
    for options in ({}, {"documents": ids}):
        eager = model(tokens, targets, **options)[1]
        torch._dynamo.reset()
        run = torch.compile(model, fullgraph=True, backend="aot_eager")
        got = run(tokens, targets, **options)[1]
        close(got, eager)
        for a, b in zip(gradients(got, model), gradients(eager, model), strict=True):
            close(a, b)


def test_compiled_blocks_take_a_mask():
    """As those of a sharded model, which are compiled one by one."""
    model, (tokens, targets, ids) = gpt(GPT_OSS | {"n_layers": 2}), packed_documents()
    want = model(tokens, targets, documents=ids)[1]
    torch._dynamo.reset()
    for block in model.blocks:
        block.compile(backend="aot_eager")
    close(model(tokens, targets, documents=ids)[1], want)


def test_checkpointed_blocks_have_the_same_gradients():
    model, (tokens, targets, ids) = gpt(GPT_OSS), packed_documents()
    want = gradients(model(tokens, targets, documents=ids)[1], model)
    for block in model.blocks:
        plain_forward = block.forward
        block.forward = lambda *a, f=plain_forward, **o: checkpoint(f, *a, use_reentrant=False, **o)
    got = gradients(model(tokens, targets, documents=ids)[1], model)
    assert all(map(torch.equal, got, want))


def test_autocast_is_close_and_leaves_sinks_in_float32():
    model, (tokens, targets, ids) = gpt(GPT_OSS), packed_documents()
    exact = model(tokens, targets, documents=ids)[1]
    with torch.autocast("cpu", torch.bfloat16):
        loss = model(tokens, targets, documents=ids)[1]
    assert loss.dtype == torch.float32
    assert loss.item() == pytest.approx(exact.item(), rel=0.02)
    loss.backward()
    sinks = model.blocks[0].attention.sinks
    assert sinks.grad.dtype == torch.float32 and sinks.grad.abs().amax() > 0


def test_vmap_over_rows_of_documents():
    model, (tokens, _, ids) = gpt(GPT_OSS), packed_documents()
    got = torch.func.vmap(lambda t: model(t[None])[0][0])(tokens)
    close(got, model(tokens)[0])
    state = {name: p.detach() for name, p in model.named_parameters()}
    called = torch.func.functional_call(model, state, (tokens,), {"documents": ids})[0]
    close(called, model(tokens, documents=ids)[0])


def test_a_module_in_attentions_place_is_given_what_it_knows():
    class Mean(torch.nn.Module):
        def forward(self, x: Tensor, rope: object) -> Tensor:
            return x.mean(1, keepdim=True).expand_as(x)

    model, tokens = gpt(GPT_OSS), torch.randint(61, (1, 7))
    for block in model.blocks:
        block.attention = Mean()
    assert model(tokens)[0].shape == (1, 7, 61)


def test_weight_decay_and_the_model_without_options_leave_out_sinks():
    assert all(p.ndim == 1 for n, p in gpt(GPT_OSS).named_parameters() if n.endswith("sinks"))
    assert not any("sinks" in name for name in gpt(LLAMA).state_dict())


def test_generate_with_windows_and_sinks_goes_on_past_the_context():
    model = gpt(GPT_OSS)
    want = prompt = torch.randint(61, (2, 20))
    for i in range(8):
        new = model(want if i < 5 else want[:, 13:])[0][:, -1].argmax(-1, keepdim=True)
        want = torch.cat((want, new), 1)
    assert torch.equal(model.generate(prompt, 8, temperature=0.0), want)


def test_the_toy_of_gpt_oss_learns():
    """Windows in every other layer, sinks in all; its loss falls far below that of single letters."""
    torch.manual_seed(0)
    config = GPTConfig.preset("gpt-oss-toy", vocab_size=16, context=64, d_model=32, d_ff=64)
    assert [w is None for w in config.windows] == [False, True] * 2
    assert config.sinks and config.kv_heads < config.n_heads
    assert (config.norm, config.mlp, config.positions) == ("rms", "swiglu", "rope")
    model = nn.GPT(config, impl="reference")
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    text = torch.randint(16, (8, 33)).repeat(1, 2)[:, :65]  # its second half repeats the first
    losses = []
    for _ in range(40):
        loss = model(text[:, :-1], text[:, 1:], return_logits=False)[1]
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    assert losses[0] == pytest.approx(math.log(16), rel=0.1)
    assert losses[-1] < 0.5 * losses[0]
    assert all(b.attention.sinks.abs().amax() > 0 for b in model.blocks)
    assert F.cross_entropy(model(text[:, :-1])[0].flatten(0, 1), text[:, 1:].flatten()) < losses[0]
