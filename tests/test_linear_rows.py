"""Linear layers of few rows against float64, with eager PyTorch as the yardstick; and the decoding step
that is made of them beside that of the modules."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from operators import launches
from rows import LAYOUTS, assert_no_worse, in_memory, patched, poison
from torch import Tensor

import flashproto
from flashproto import configs, nn
from flashproto.nn import GPTConfig, few_rows

pytest.importorskip("triton")

from flashproto.functional.linear_rows import linear_rows
from flashproto.ops import linear_rows as op

f16, bf16, f32 = torch.float16, torch.bfloat16, torch.float32
# Columns of the result and of x: odd ones, and such that fill tiles.
SIZES = ((1, 1), (17, 100), (40, 129), (32, 256))
ROWS = (1, 2, 7, 16, 33, 64)
ACTIVATIONS = ("", "gelu", "swiglu", "geglu")


def random(*shape: int, dtype: torch.dtype, device: str) -> Tensor:
    return torch.randn(shape, device=device).to(dtype)


def layer(N: int, K: int, activation: str, dtype: torch.dtype, device: str) -> tuple[Tensor, Tensor]:
    rows = 2 * N if activation.endswith("glu") else N
    weight = random(rows, K, dtype=dtype, device=device) / K**0.5
    return weight, random(rows, dtype=dtype, device=device)


def eager(x: Tensor, weight: Tensor, bias: Tensor | None, activation: str) -> Tensor:
    x = F.linear(x, weight, bias)
    if activation == "":
        return x
    if activation == "gelu":
        return F.gelu(x, approximate="tanh")
    gate, up = x.chunk(2, -1)
    return (F.silu(gate) if activation == "swiglu" else F.gelu(gate, approximate="tanh")) * up


def check(x: Tensor, weight: Tensor, bias: Tensor | None, activation: str, **options: Any) -> Tensor:
    y = linear_rows(x, weight, bias, activation=activation, **options)
    assert isinstance(y, Tensor) and y.is_contiguous()
    exact = eager(*(None if t is None else t.double() for t in (x, weight, bias)), activation)
    # Both round what the linear layer gives before the activation.
    assert_no_worse("y", y, eager(x, weight, bias, activation), exact)
    return y


@pytest.fixture
def many_multiprocessors() -> Iterator[None]:
    """So many that the interpreter, too, splits the inner dimension."""
    with patched(op, multiprocessors=lambda device: 132):
        yield


# --- the function ---------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [bf16, f16])
@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize("M", ROWS)
def test_against_float64(device, monkeypatch, M, activation, dtype) -> None:
    poison(monkeypatch)
    for N, K in SIZES:
        x = random(M, K, dtype=dtype, device=device)
        weight, bias = layer(N, K, activation, dtype, device)
        check(x, weight, bias, activation)
        check(x[None], weight, None, activation)


@pytest.mark.parametrize("activation", ["", "swiglu"])
@pytest.mark.parametrize("M", ROWS)
def test_parts_of_the_inner_dimension(device, monkeypatch, many_multiprocessors, M, activation) -> None:
    """Counters are zeros again, and rows get the same bits whichever others there are in the tile."""
    poison(monkeypatch)
    counters = torch.zeros(64, dtype=torch.int32, device=device)
    for N, K in ((40, 1100), (17, 2048)):
        x = random(M, K, dtype=bf16, device=device)
        weight, bias = layer(N, K, activation, bf16, device)
        with launches() as seen:
            y = check(x, weight, bias, activation, counters=counters)
            again = linear_rows(x, weight, bias, activation=activation, counters=counters)
        assert torch.equal(again, y) and not counters.any()
        if M > 1 and seen[0].arguments:
            assert all(x.arguments["SPLITS"] > 1 for x in seen)
            few = linear_rows(x[:2], weight, bias, activation=activation, counters=counters)
            assert M > 16 or torch.equal(few, y[:2])


def test_parts_are_added_in_their_order(device, many_multiprocessors) -> None:
    """1 + 2^-24 is 1 in float32, whose sum keeps both small parts only where they come first."""
    counters = torch.zeros(1, dtype=torch.int32, device=device)
    x = torch.ones(2, 768, dtype=bf16, device=device)
    weight = torch.zeros(1, 768, dtype=bf16, device=device)
    for places, wanted in (((0, 256, 512), 2.0**-23), ((512, 256, 0), 0.0)):
        small, other, one = places
        weight.zero_()
        weight[0, [small, other]] = 2.0**-24
        weight[0, one] = 1.0
        minus_one = torch.tensor([-1.0], dtype=bf16, device=device)
        with launches() as seen:
            y = linear_rows(x, weight, minus_one, counters=counters)
        assert all(x.arguments.get("SPLITS", 3) == 3 for x in seen)
        assert y.flatten().tolist() == [wanted] * 2


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("M", [1, 7])
def test_any_strides(device, monkeypatch, M, layout) -> None:
    poison(monkeypatch)
    weight, bias = layer(24, 40, "swiglu", bf16, device)
    x = in_memory(random(M, 40, dtype=bf16, device=device), layout)
    apart = torch.stack([bias, bias], 1)[:, 0]
    check(x, in_memory(weight, layout), apart, "swiglu")


@pytest.mark.parametrize("shape", [(0, 40), (3, 0, 40)])
def test_no_rows(device, shape) -> None:
    weight, bias = layer(24, 40, "", bf16, device)
    x = random(*shape, dtype=bf16, device=device)
    assert linear_rows(x, weight, bias).shape == (*shape[:-1], 24)
    assert linear_rows(random(2, 40, dtype=bf16, device=device), weight[:0]).shape == (2, 0)


@pytest.mark.parametrize("casting", ["torch", "llama", "gemma"])
@pytest.mark.parametrize("norm", ["layer", "rms"])
@pytest.mark.parametrize("K", [1, 100, 768, 2100])
def test_the_norm_of_one_row(device, monkeypatch, K, norm, casting) -> None:
    """What the norm alone and then the layer give, but for the order of the norm's sums."""
    poison(monkeypatch)
    weight, bias = layer(40, K, "gelu", bf16, device)
    x, residual = (3 * random(1, 1, K, dtype=bf16, device=device) + 1 for _ in range(2))
    scale, shift = (random(K, dtype=dtype, device=device) for dtype in (bf16, f32))
    options: dict[str, Any] = {"eps": 1e-5, "casting": casting}
    alone, added = (getattr(flashproto, f"{add}{norm}_norm") for add in ("", "add_"))
    for given in ((None, None, None), (residual, scale, None), (residual, scale, shift)):
        got = linear_rows(x, weight, bias, *given, activation="gelu", norm=norm, **options)
        y, total = got if isinstance(got, tuple) else (got, x)
        of: dict[str, Any] = {"weight": given[1], "bias": given[2], "impl": "triton", **options}
        wanted = alone(x + residual if isinstance(got, tuple) else x, K, **of)
        if isinstance(got, tuple):
            assert torch.equal(total, added(x, residual, K, **of)[1])
        exact = eager(wanted.double(), weight.double(), bias.double(), "gelu")
        one_off = torch.finfo(bf16).eps * (wanted.abs().double() @ weight.abs().double().T).max()
        assert (y.double() - exact).abs().max() <= torch.finfo(bf16).eps * exact.abs().max() + one_off
        assert y.shape == (1, 1, 40)


def test_there_is_no_gradient(device) -> None:
    weight, _ = layer(24, 40, "", bf16, device)
    y = linear_rows(random(2, 40, dtype=bf16, device=device).requires_grad_(), weight)
    assert isinstance(y, Tensor)
    with pytest.raises(NotImplementedError, match="has no gradient"):
        y.sum().backward()


X, WEIGHT = torch.zeros(2, 8, dtype=bf16), torch.zeros(6, 8, dtype=bf16)
ROW = X[:1]
REFUSED: dict[str, tuple[Callable[[], object], str]] = {
    "float32": (lambda: linear_rows(X.float(), WEIGHT.float()), "x is of dtype torch.float32"),
    "dtypes": (lambda: linear_rows(X, WEIGHT.half()), "weight is of dtype torch.float16"),
    "no tensor": (lambda: linear_rows(X, [1.0]), "weight is list"),
    "devices": (lambda: linear_rows(X, WEIGHT.to("meta")), "weight is on meta"),
    "rows": (lambda: linear_rows(X[:1].expand(65, 8), WEIGHT), r"at most 64 rows"),
    "no columns": (lambda: linear_rows(X[:, :0], WEIGHT[:, :0]), "x is of shape"),
    "widths": (lambda: linear_rows(X, WEIGHT[:, 1:]), r"weight is of shape \[6, 7\]"),
    "halves": (lambda: linear_rows(X, WEIGHT[1:], activation="swiglu"), r"\[2N, 8\]"),
    "activation": (lambda: linear_rows(X, WEIGHT, activation="relu"), "activation is 'relu'"),
    "bias": (lambda: linear_rows(X, WEIGHT, WEIGHT[0]), "bias is of shape"),
    "norm": (lambda: linear_rows(ROW, WEIGHT, norm="batch"), "norm is 'batch'"),
    "norm of two rows": (
        lambda: linear_rows(X, WEIGHT, norm="rms"),
        "norm is rms; .* for one row",
    ),
    "no norm": (lambda: linear_rows(ROW, WEIGHT, None, ROW), "residual is .* None without a norm"),
    "residual": (lambda: linear_rows(ROW, WEIGHT, None, X, norm="rms"), "residual is of shape"),
    "norm_weight": (
        lambda: linear_rows(ROW, WEIGHT, None, None, WEIGHT[0, 1:], norm="rms"),
        "norm_weight is of shape",
    ),
    "eps": (lambda: linear_rows(ROW, WEIGHT, norm="rms", eps=-1.0), "eps is -1.0"),
    "casting": (lambda: linear_rows(ROW, WEIGHT, norm="rms", casting="numpy"), "casting is 'numpy'"),
    "counters": (lambda: linear_rows(X, WEIGHT, counters=torch.zeros(4)), "counters is a tensor"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_bad_input_is_refused(case: str) -> None:
    call, said = REFUSED[case]
    with pytest.raises((TypeError, ValueError), match=f"^linear_rows: .*{said}"):
        call()


@pytest.mark.parametrize("M", [1, 7])
def test_opcheck(device, many_multiprocessors, M) -> None:
    weight, bias = layer(24, 600, "swiglu", bf16, device)
    x, scale = (random(n, 600, dtype=bf16, device=device) for n in (M, 1))
    counters = torch.zeros(8, dtype=torch.int32, device=device)
    of_norm = (x + 1, scale[0], None) if M == 1 else (None, None, None)
    settings = op.Settings("rms" if M == 1 else "", 1e-5, "torch", "silu", True)
    torch.library.opcheck(
        torch.ops.flashproto.linear_rows, (x, weight, bias, *of_norm, counters, *settings)
    )


def test_tiles_fit_the_layers() -> None:
    """Of the models that are measured: enough programs, and none of parts without work."""
    for N, K in ((2304, 768), (768, 768), (3072, 768), (768, 3072), (11008, 4096), (4096, 11008)):
        for up in (False, True):
            row = configs.linear_row(N, K, True, up, 132)
            assert -(-N // row.columns) >= 264 or row.columns == 1
            assert row.columns * row.inner * (1 + up) <= 2048 * row.num_warps
            for M in ROWS[1:]:
                rows = configs.linear_rows(M, N, K, up, 132, 1024)
                assert M <= rows.rows <= max(2 * M, 16)
                assert (rows.splits - 1) * rows.steps * rows.inner < K
                assert rows.splits * rows.steps * rows.inner >= K
                assert configs.linear_rows(M, N, K, up, 132, 0).splits == 1


# --- a block's step -------------------------------------------------------------------------------

TINY = GPTConfig(vocab_size=61, context=24, n_layers=2, n_heads=4, d_model=32)
LLAMA: dict[str, Any] = {"norm": "rms", "mlp": "swiglu", "positions": "rope", "bias": False}
MODELS: dict[str, dict[str, Any]] = {
    "gpt": {},
    "gpt, no bias": {"bias": False},
    "llama": LLAMA,
    "llama, groups": {**LLAMA, "n_kv_heads": 2},
    "windows": {"norm": "rms", "window": 3, "softcap": 5.0},
    "sinks, wide heads": {**LLAMA, "bias": True, "sinks": True, "d_head": 16},
}


@pytest.fixture
def few(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(few_rows, "ENABLED", True)
    monkeypatch.setattr(few_rows, "DEVICES", ("cuda", "cpu"))


def model_of(kind: str, device: str, dtype: torch.dtype = bf16) -> nn.GPT:
    model = nn.GPT(dataclasses.replace(TINY, **MODELS[kind]), device=device).to(dtype).eval()
    with torch.no_grad():
        for p in model.parameters():
            p.mul_(4).add_(0.1 * torch.randn_like(p))
    return model.requires_grad_(False)


def steps(model: nn.GPT, tokens: Tensor, n: int) -> tuple[Tensor, list[str]]:
    """Logits of tokens behind a prompt of n, one at a time; and what the first of them launches."""
    cache, made, kernels = model.make_cache(len(tokens)), [], []
    with torch.no_grad():
        model(tokens[:, :n], cache=cache)
        for i in range(n, tokens.shape[1]):
            with launches() as seen:
                made.append(model(tokens[:, i : i + 1], cache=cache)[0])
            kernels = kernels or [x.kernel for x in seen]
    return torch.cat(made, 1), kernels


@pytest.mark.parametrize("B", [1, 3])
@pytest.mark.parametrize("kind", MODELS)
def test_steps_are_those_of_the_modules(device, monkeypatch, kind, B) -> None:
    """No further from float64 than the modules are, and few kernels."""
    dtype = f16 if kind == "llama, groups" else bf16
    model, tokens = model_of(kind, device, dtype), torch.randint(61, (B, 3), device=device)
    wanted, _ = steps(model, tokens, 2)
    exact = model_of(kind, device, torch.float64)
    exact.load_state_dict(model.state_dict())
    monkeypatch.setattr(few_rows, "ENABLED", True)
    monkeypatch.setattr(few_rows, "DEVICES", ("cuda", "cpu"))
    got, kernels = steps(model, tokens, 2)
    assert_no_worse("logits", got, wanted, exact(tokens)[0][:, 2:])
    own = "linear_row_kernel" if B == 1 else "linear_rows_kernel"
    assert kernels.count(own) == 2 * 4
    assert kernels.count("norm_forward_kernel") == (1 if B == 1 else 5)
    assert len(kernels) <= 2 * (7 if B == 1 else 9) + 1


def block_of(device: str, qk_norm: bool = False, **options: Any) -> nn.TransformerBlock:
    options |= {"mlp": "geglu" if qk_norm else "swiglu", "device": device, "dtype": bf16}
    block = nn.TransformerBlock(32, 4, 2, norm="rms", **options)
    if qk_norm:
        block.attention = nn.Attention(32, 4, 2, qk_norm=True, device=device, dtype=bf16)
    return block.requires_grad_(False)


def decode(block: nn.TransformerBlock, x: Tensor, residual: Tensor | None = None) -> Any:
    B = x.shape[0]
    cache = nn.KVCache(B, 24, 1, 2, 8, dtype=x.dtype, device=x.device)
    rope = nn.rope_tables(24, 8, device=x.device)
    with launches() as seen:
        made = block(x, residual, rope, cache=cache.layers[0])
    return (*made, [launch.kernel for launch in seen])


def is_fused(kernels: list[str]) -> bool:
    return any(k.startswith("linear_row") for k in kernels)


@pytest.mark.usefixtures("few")
@pytest.mark.parametrize("qk_norm", [False, True])
@pytest.mark.parametrize("shape", [(1, 1), (1, 5), (4, 16), (5, 13)])
def test_rows_of_a_block(device, monkeypatch, shape, qk_norm) -> None:
    """Several tokens of each sequence too; more than 64 rows are the modules' own."""
    block, x, residual = block_of(device, qk_norm), *torch.randn(2, *shape, 32, device=device).to(bf16)
    with torch.no_grad():
        for given in (None, residual):
            got = decode(block, x, given)
            monkeypatch.setattr(few_rows, "ENABLED", False)
            wanted = decode(block, x, given)
            monkeypatch.setattr(few_rows, "ENABLED", True)
            assert is_fused(got[2]) == (shape[0] * shape[1] <= 64) and not is_fused(wanted[2])
            for a, b in zip(got[:2], wanted[:2], strict=True):
                torch.testing.assert_close(a, b, rtol=2**-6, atol=2**-6)


def hooked(block: nn.TransformerBlock, name: str) -> None:
    block.get_submodule(name).register_forward_hook(lambda *_: None)


def replaced(block: nn.TransformerBlock, name: str) -> None:
    """By a subclass, as adapters are."""
    module = block.get_submodule(name)
    module.__class__ = type("Other", (type(module),), {})


PARTS = ("norm1", "norm2", "attention", "attention.qkv", "attention.out", "mlp", "mlp.up", "mlp.down")


@pytest.mark.usefixtures("few")
@pytest.mark.parametrize("name", PARTS)
@pytest.mark.parametrize("change", [hooked, replaced])
def test_what_is_changed_is_called(device, change, name) -> None:
    block, x = block_of(device), torch.randn(1, 1, 32, device=device).to(bf16)
    with torch.no_grad():
        assert is_fused(decode(block, x)[2])
        change(block, name)
        assert not is_fused(decode(block, x)[2])


@pytest.mark.usefixtures("few")
def test_what_else_is_the_modules_own(device, monkeypatch) -> None:
    block, x = block_of(device), torch.randn(1, 1, 32, device=device).to(bf16)
    with torch.no_grad():
        assert is_fused(decode(block, x)[2])
        if device == "cpu":  # lengths on a GPU cannot be read
            assert not is_fused(decode(block_of(device, impl="torch"), x)[2])
        assert not is_fused(decode(block.float(), x.float())[2])
        block.to(bf16)
        with torch.autocast(device, dtype=bf16):
            assert not is_fused(decode(block, x)[2])
        with launches() as seen:
            block(x)
        assert not is_fused([launch.kernel for launch in seen])
        monkeypatch.setattr(few_rows, "ENABLED", False)
        assert not is_fused(decode(block, x)[2])
        monkeypatch.setattr(few_rows, "ENABLED", True)
    assert not is_fused(decode(block, x)[2])  # gradients may be wanted


@pytest.mark.usefixtures("few")
@pytest.mark.parametrize("kind", ["gpt", "llama, groups"])
def test_greedy_text_is_that_of_the_modules(device, monkeypatch, kind) -> None:
    """A likely token: its logit is within two roundings of the likeliest's."""
    model = model_of(kind, device)
    text = model.generate(torch.randint(61, (2, 3), device=device), 3, temperature=0)
    monkeypatch.setattr(few_rows, "ENABLED", False)
    with torch.no_grad():
        logits = model(text)[0][:, 2:-1].float()
    taken = logits.gather(-1, text[:, 3:, None])[..., 0]
    assert (taken >= logits.amax(-1) - 2**-5 * logits.abs().amax()).all()


@pytest.mark.gpu
@pytest.mark.usefixtures("few")
@pytest.mark.parametrize("B", [1, 5, 64])
@pytest.mark.parametrize("kind", MODELS)
def test_replays_of_steps(device, kind, B) -> None:
    """In a CUDA graph: the same bits, again and again."""
    model, prompts = model_of(kind, device), torch.randint(61, (B, 5), device=device)
    cache = model.make_cache(B)
    plain = model.generate(prompts, 16, temperature=0, cache=cache, cuda_graph=False)
    for _ in range(3):
        assert torch.equal(model.generate(prompts, 16, temperature=0, cache=cache), plain)
    assert not cache.counters.any()
