"""The linear layer of one row against float64, with eager PyTorch as the yardstick; and the decoding
step that is made of it beside that of the modules."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from operators import launches
from rows import LAYOUTS, assert_no_worse, in_memory, poison
from torch import Tensor

import flashproto
from flashproto import configs, nn
from flashproto.nn import GPTConfig, one_row

pytest.importorskip("triton")

from flashproto.functional.linear_row import linear_row
from flashproto.ops import linear_row as op
from flashproto.ops.recipe import New, Recipe

f16, bf16, f32 = torch.float16, torch.bfloat16, torch.float32
# Columns of the result and of x: odd ones, and such that fill tiles.
SIZES = ((1, 1), (17, 100), (40, 129), (32, 256))
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
    y = linear_row(x, weight, bias, activation=activation, **options)
    assert isinstance(y, Tensor) and y.is_contiguous()
    exact = eager(*(None if t is None else t.double() for t in (x, weight, bias)), activation)
    # Both round what the linear layer gives before the activation.
    assert_no_worse("y", y, eager(x, weight, bias, activation), exact)
    return y


# --- the function ---------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [bf16, f16])
@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_against_float64(device, monkeypatch, activation, dtype) -> None:
    poison(monkeypatch)
    for N, K in SIZES:
        x = random(K, dtype=dtype, device=device)
        weight, bias = layer(N, K, activation, dtype, device)
        check(x, weight, bias, activation)
        check(x[None, None], weight, None, activation)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_any_strides(device, monkeypatch, layout) -> None:
    poison(monkeypatch)
    weight, bias = layer(24, 40, "swiglu", bf16, device)
    x = in_memory(random(1, 40, dtype=bf16, device=device), layout)
    apart = torch.stack([bias, bias], 1)[:, 0]
    check(x, in_memory(weight, layout), apart, "swiglu")


@pytest.mark.parametrize("casting", ["torch", "llama", "gemma"])
@pytest.mark.parametrize("norm", ["layer", "rms"])
@pytest.mark.parametrize("K", [1, 100, 768, 2100])
def test_the_norm(device, monkeypatch, K, norm, casting) -> None:
    """What the norm alone and then the layer give, but for the order of the norm's sums."""
    poison(monkeypatch)
    weight, bias = layer(40, K, "gelu", bf16, device)
    x, residual = (3 * random(1, 1, K, dtype=bf16, device=device) + 1 for _ in range(2))
    scale, shift = (random(K, dtype=dtype, device=device) for dtype in (bf16, f32))
    options: dict[str, Any] = {"eps": 1e-5, "casting": casting}
    alone, added = (getattr(flashproto, f"{add}{norm}_norm") for add in ("", "add_"))
    for given in ((None, None, None), (residual, scale, None), (residual, scale, shift)):
        got = linear_row(x, weight, bias, *given, activation="gelu", norm=norm, **options)
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
    y = linear_row(random(1, 40, dtype=bf16, device=device).requires_grad_(), weight)
    assert isinstance(y, Tensor)
    with pytest.raises(NotImplementedError, match="has no gradient"):
        y.sum().backward()


X, WEIGHT = torch.zeros(1, 8, dtype=bf16), torch.zeros(6, 8, dtype=bf16)
WIDE = torch.zeros(1, 4097, dtype=bf16)
REFUSED: dict[str, tuple[Callable[[], object], str]] = {
    "float32": (lambda: linear_row(X.float(), WEIGHT.float()), "x is of dtype torch.float32"),
    "dtypes": (lambda: linear_row(X, WEIGHT.half()), "weight is of dtype torch.float16"),
    "no tensor": (lambda: linear_row(X, [1.0]), "weight is list"),
    "devices": (lambda: linear_row(X, WEIGHT.to("meta")), "weight is on meta"),
    "two rows": (lambda: linear_row(X.expand(2, 8), WEIGHT), r"x is of shape \[2, 8\]; .* one row"),
    "no rows": (lambda: linear_row(X[None, :0], WEIGHT), r"x is of shape \[1, 0, 8\]; .* one row"),
    "no columns": (lambda: linear_row(X[:, :0], WEIGHT[:, :0]), "x is of shape"),
    "widths": (lambda: linear_row(X, WEIGHT[:, 1:]), r"weight is of shape \[6, 7\]"),
    "no result": (lambda: linear_row(X, WEIGHT[:0]), r"weight is of shape \[0, 8\]"),
    "halves": (lambda: linear_row(X, WEIGHT[1:], activation="swiglu"), r"\[2N, 8\]"),
    "activation": (lambda: linear_row(X, WEIGHT, activation="relu"), "activation is 'relu'"),
    "bias": (lambda: linear_row(X, WEIGHT, WEIGHT[0]), "bias is of shape"),
    "norm": (lambda: linear_row(X, WEIGHT, norm="batch"), "norm is 'batch'"),
    "norm of a wide row": (
        lambda: linear_row(WIDE, WIDE, norm="rms"),
        "norm is rms; .* more than 4096",
    ),
    "no norm": (lambda: linear_row(X, WEIGHT, None, X), "residual is .* None without a norm"),
    "residual": (lambda: linear_row(X, WEIGHT, None, X[0], norm="rms"), "residual is of shape"),
    "norm_weight": (
        lambda: linear_row(X, WEIGHT, None, None, WEIGHT[0, 1:], norm="rms"),
        "norm_weight is of shape",
    ),
    "eps": (lambda: linear_row(X, WEIGHT, norm="rms", eps=-1.0), "eps is -1.0"),
    "casting": (lambda: linear_row(X, WEIGHT, norm="rms", casting="numpy"), "casting is 'numpy'"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_bad_input_is_refused(case: str) -> None:
    call, said = REFUSED[case]
    with pytest.raises((TypeError, ValueError), match=f"^linear_row: .*{said}"):
        call()


def test_opcheck(device) -> None:
    weight, bias = layer(24, 600, "swiglu", bf16, device)
    x, residual, scale = random(3, 1, 600, dtype=bf16, device=device)
    settings = op.Settings("rms", 1e-5, "torch", "silu", True)
    torch.library.opcheck(
        torch.ops.flashproto.linear_row, (x, weight, bias, residual, scale[0], None, *settings)
    )


def test_tiles_fit_the_layers() -> None:
    """Of the models that are measured: enough programs."""
    for N, K in ((2304, 768), (768, 768), (3072, 768), (768, 3072), (11008, 4096), (4096, 11008)):
        for up in (False, True):
            row = configs.linear_row(N, K, True, up, 132)
            assert -(-N // row.columns) >= 264 or row.columns == 1
            assert row.columns * row.inner * (1 + up) <= 2048 * row.num_warps


def test_copies_are_waited_for(monkeypatch) -> None:
    """A copy of a weight is a launch that writes one, whatever the caller says of those before."""
    monkeypatch.setattr(op, "has_dependent_launches", lambda device: True)
    for weight, early in ((WEIGHT, True), (WEIGHT.T.contiguous().T, False)):
        recipe = Recipe(weight.device)
        inputs = recipe.all_inputs([X, weight, None, None, None, None])
        y = recipe.make(New.contiguous((1, 6), bf16, weight.device))
        op.forward(recipe, op.Settings(overlap=True), inputs, (y, None))
        assert recipe.steps[-1].arguments["PDL"] is early


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
def everywhere(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(one_row, "DEVICES", ("cuda", "cpu"))


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


@pytest.mark.slow
@pytest.mark.usefixtures("everywhere")
@pytest.mark.parametrize("kind", MODELS)
def test_steps_are_those_of_the_modules(device, monkeypatch, kind) -> None:
    """No further from float64 than the modules are, and few kernels."""
    dtype = f16 if kind == "llama, groups" else bf16
    model, tokens = model_of(kind, device, dtype), torch.randint(61, (1, 3), device=device)
    exact = model_of(kind, device, torch.float64)
    exact.load_state_dict(model.state_dict())
    got, kernels = steps(model, tokens, 2)
    monkeypatch.setattr(one_row, "ENABLED", False)
    wanted, _ = steps(model, tokens, 2)
    assert_no_worse("logits", got, wanted, exact(tokens)[0][:, 2:])
    assert kernels.count("linear_row_kernel") == 2 * 4
    assert kernels.count("norm_forward_kernel") == 1
    assert len(kernels) <= 2 * 7 + 1


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
    return "linear_row_kernel" in kernels


@pytest.mark.usefixtures("everywhere")
@pytest.mark.parametrize("qk_norm", [False, True])
@pytest.mark.parametrize("shape", [(1, 1), (1, 2), (2, 1)])
def test_rows_of_a_block(device, monkeypatch, shape, qk_norm) -> None:
    """More than one are the modules' own."""
    block, x, residual = block_of(device, qk_norm), *torch.randn(2, *shape, 32, device=device).to(bf16)
    with torch.no_grad():
        for given in (None, residual):
            got = decode(block, x, given)
            monkeypatch.setattr(one_row, "ENABLED", False)
            wanted = decode(block, x, given)
            monkeypatch.setattr(one_row, "ENABLED", True)
            assert is_fused(got[2]) == (shape == (1, 1)) and not is_fused(wanted[2])
            for a, b in zip(got[:2], wanted[:2], strict=True):
                torch.testing.assert_close(a, b, rtol=2**-6, atol=2**-6)


def hooked(block: nn.TransformerBlock, name: str) -> None:
    block.get_submodule(name).register_forward_hook(lambda *_: None)


def replaced(block: nn.TransformerBlock, name: str) -> None:
    """By a subclass, as adapters are."""
    module = block.get_submodule(name)
    module.__class__ = type("Other", (type(module),), {})


PARTS = ("norm1", "norm2", "attention", "attention.qkv", "attention.out", "mlp", "mlp.up", "mlp.down")


@pytest.mark.usefixtures("everywhere")
@pytest.mark.parametrize("name", PARTS)
@pytest.mark.parametrize("change", [hooked, replaced])
def test_what_is_changed_is_called(device, change, name) -> None:
    block, x = block_of(device), torch.randn(1, 1, 32, device=device).to(bf16)
    with torch.no_grad():
        assert is_fused(decode(block, x)[2])
        change(block, name)
        assert not is_fused(decode(block, x)[2])


@pytest.mark.usefixtures("everywhere")
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
        with monkeypatch.context() as patch:
            patch.setattr(configs, "MOST_NORMALIZED", 31)
            assert not is_fused(decode(block, x)[2])
        with monkeypatch.context() as patch:
            patch.setattr(block.mlp.up.weight, "data", block.mlp.up.weight.T.contiguous().T)
            assert not is_fused(decode(block, x)[2])  # the kernel would read a copy
    assert not is_fused(decode(block, x)[2])  # gradients may be wanted


@pytest.mark.usefixtures("everywhere")
def test_what_the_kernel_does_not_take_is_the_modules_own(device, monkeypatch) -> None:
    x = torch.randn(1, 1, 32, device=device).to(bf16)
    with torch.no_grad():
        block = block_of(device)
        block.norm1.double()
        assert not is_fused(decode(block, x)[2])
        block = block_of(device)
        block.norm1 = nn.RMSNorm((1, 32), device=device, dtype=bf16).requires_grad_(False)
        assert not is_fused(decode(block, x)[2])
        block = block_of(device)
        block.mlp = torch.nn.Identity()  # which has no kind
        assert not is_fused(decode(block, x)[2])
        block = block_of(device)
        with monkeypatch.context() as patch:
            patch.setattr(nn.MLP, "forward", lambda self, x: torch.zeros_like(x))
            y, _, kernels = decode(block, x)
            assert not is_fused(kernels) and not y.any()
        made = torch.func.functionalize(lambda x: decode(block, x)[0])(x)
        torch.testing.assert_close(made, decode(block, x)[0], rtol=0.1, atol=0.1)
        block.norm2.impl = "hopper"
        assert not one_row.takes(block, x, None)


@pytest.mark.slow
@pytest.mark.usefixtures("everywhere")
@pytest.mark.parametrize("kind", ["gpt", "llama, groups"])
def test_greedy_text_is_that_of_the_modules(device, kind) -> None:
    """A likely token: its logit is within two roundings of the likeliest's."""
    model = model_of(kind, device)
    text = model.generate(torch.randint(61, (1, 3), device=device), 3, temperature=0)
    with torch.no_grad():
        logits = model(text)[0][:, 2:-1].float()
    taken = logits.gather(-1, text[:, 3:, None])[..., 0]
    assert (taken >= logits.amax(-1) - 2**-5 * logits.abs().amax()).all()


@pytest.mark.gpu
@pytest.mark.parametrize("kind", MODELS)
def test_replays_of_steps(device, kind) -> None:
    """In a CUDA graph: the same bits, again and again."""
    model, prompts = model_of(kind, device), torch.randint(61, (1, 5), device=device)
    cache = model.make_cache(1)
    plain = model.generate(prompts, 16, temperature=0, cache=cache, cuda_graph=False)
    for _ in range(3):
        assert torch.equal(model.generate(prompts, 16, temperature=0, cache=cache), plain)
