"""transformers' models on flashproto: logits, gradients and tokens equal those of transformers' own eager
attention; and every test counts this library's calls, forward and backward.

`pytest -m matrix tests/test_door_transformers.py` runs every model in every case.
"""

from __future__ import annotations

import ast
import random
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._dynamo.backends.common import aot_autograd
from torch.utils._python_dispatch import TorchDispatchMode

from flashproto import backends, functional, masks

transformers = pytest.importorskip("transformers", reason="transformers is not installed")

from random_masks import random_mask  # noqa: E402
from tiny_models import (  # noqa: E402
    DECODERS,
    ENCODER_DECODERS,
    ENCODERS,
    TOKENS,
    VOCABULARY,
    WINDOW,
    tiny_model,
)
from transformers import AttentionInterface, AttentionMaskInterface, masking_utils  # noqa: E402

from flashproto.integrations.transformers import Cache, register  # noqa: E402
from flashproto.integrations.transformers.attention import attend, mask_of  # noqa: E402
from flashproto.integrations.transformers.masks import Carrier, make_mask  # noqa: E402
from flashproto.integrations.transformers.reading import Unreadable, read  # noqa: E402

NAME = register()
LOGITS, GRADIENTS = 1e-5, 1e-4  # of the largest value
DOOR = ("attention", "scaled_dot_product_attention", "attention_with_kv_cache")
# How many attentions a model has, if not one in each of 2 layers.
ATTENTIONS = {"modernbert": 4, "t5": 6, "bart": 6, "whisper": 6}


class Calls:
    """Calls of this library's functions, and how many of their results a gradient came to."""

    def __init__(self) -> None:
        self.forward: Counter[str] = Counter()
        self.backward: Counter[str] = Counter()

    def clear(self) -> None:
        self.forward.clear()
        self.backward.clear()

    def counted(self, name: str, function: Callable[..., Tensor]) -> Callable[..., Tensor]:
        def call(*args: Any, **options: Any) -> Tensor:
            out = function(*args, **options)
            self.forward[name] += 1
            if out.requires_grad:
                out.register_hook(lambda gradient: self.backward.update([name]))
            return out

        return call


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> Calls:
    """Counts, and lets calls on a CPU run in PyTorch: the kernels' interpreter is for one test."""
    counting = Calls()
    for name in DOOR:
        monkeypatch.setattr(functional, name, counting.counted(name, getattr(functional, name)))
    monkeypatch.setattr(backends, "INTERPRETED", False)
    return counting


# --- inputs -----------------------------------------------------------------------------------------

IDS = torch.randint(3, VOCABULARY, (2, TOKENS), generator=torch.Generator().manual_seed(0))
ALL = torch.ones_like(IDS)
LEFT, RIGHT = ALL.clone(), ALL.clone()
LEFT[0, :3], RIGHT[0, -3:] = 0, 0
PACKED = torch.tensor([[*range(5), *range(7)], [*range(3), *range(9)]])
NEW = {"max_new_tokens": 8, "do_sample": False, "pad_token_id": 0, "eos_token_id": None}


def inputs_of(name: str, case: str) -> tuple[dict[str, Any], Tensor]:
    """(inputs, which positions are real)."""
    padding = {"left": LEFT, "right": RIGHT}.get(case, ALL)
    if name == "vit":
        images = torch.randn(2, 3, 16, 16, generator=torch.Generator().manual_seed(1))
        return {"pixel_values": images}, torch.ones(2, 17, dtype=torch.bool)
    if name == "whisper":
        sound = torch.randn(2, 8, 32, generator=torch.Generator().manual_seed(1))
        words = {"decoder_input_ids": IDS[:, 5:], "use_cache": False}
        words |= {} if case == "plain" else {"decoder_attention_mask": padding[:, 5:]}
        return {"input_features": sound, **words}, padding[:, 5:].bool()
    given = {"input_ids": IDS}
    given |= {"attention_mask": padding} if case in ("left", "right") else {}
    given |= {"position_ids": PACKED} if case == "packed" else {}
    if name in ENCODER_DECODERS:
        return {**given, "decoder_input_ids": IDS[:, :7], "use_cache": False}, ALL[:, :7].bool()
    return {**given, **({} if name in ENCODERS else {"use_cache": False})}, padding.bool()


def run(
    model: Any, implementation: str, inputs: dict[str, Any], real: Tensor
) -> tuple[Tensor, dict[str, Tensor]]:
    """Results at real positions, and all gradients of a random sum of them."""
    model.set_attn_implementation(implementation)
    model.zero_grad()
    out = model(**inputs)
    y = (out.logits if "logits" in out else out.last_hidden_state)[real.to(model.device)]
    weights = torch.randn(y.shape, generator=torch.Generator().manual_seed(2)).to(y)
    (y * weights).sum().backward()
    return y.detach(), {n: p.grad for n, p in model.named_parameters() if p.grad is not None}


def assert_same(ours: tuple[Any, Any], eager: tuple[Any, Any]) -> None:
    (y, gradients), (expected, of_eager) = ours, eager
    assert (y - expected).abs().max() <= LOGITS * expected.abs().max()
    assert gradients.keys() == of_eager.keys()
    largest = max(g.abs().max() for g in of_eager.values())
    for name, gradient in gradients.items():
        wanted = of_eager[name]
        # The exact gradient of a bias of all keys is 0, of which rounding is left.
        bar = largest if "k_proj.bias" in name or "key.bias" in name else wanted.abs().max()
        assert (gradient - wanted).abs().max() <= GRADIENTS * bar, name


def check_forward(calls: Calls, device: str, name: str, case: str, **options: Any) -> None:
    model = tiny_model(name, **options).to(device)
    inputs, real = inputs_of(name, case)
    inputs = {n: x.to(device) if isinstance(x, Tensor) else x for n, x in inputs.items()}
    eager = run(model, "eager", inputs, real)
    assert not calls.forward
    ours = run(model, NAME, inputs, real)
    kind = "scaled_dot_product_attention" if name == "t5" else "attention"
    n = ATTENTIONS.get(name, 2)
    assert (calls.forward, calls.backward) == ({kind: n}, {kind: n})
    assert_same(ours, eager)


def check_generate(calls: Calls, device: str, name: str, case: str) -> None:
    model = tiny_model(name).to(device)
    padding = LEFT if "left" in case or "beams" in case else ALL
    options: dict[str, Any] = {**NEW, "attention_mask": padding.to(device)}
    options |= {"cache_implementation": "static"} if "static" in case else {}
    options |= {"num_beams": 2} if "beams" in case else {}
    expected = model.generate(IDS.to(device), **options)
    assert not calls.forward
    model.set_attn_implementation(NAME)
    found = model.generate(IDS.to(device), **options)
    assert torch.equal(found, expected)
    once = 2 if name in ENCODER_DECODERS else 0  # the encoder
    kinds = {"scaled_dot_product_attention" if name == "t5" else "attention"}
    assert calls.forward.keys() == kinds
    assert calls.forward.total() == once + 8 * (ATTENTIONS.get(name, 2) - once)


FORWARD = [
    *[(name, case) for name in [*DECODERS][:10] for case in ("plain", "left", "right", "packed")],
    *[(n, case) for n in (*ENCODERS, *ENCODER_DECODERS) for case in ("plain", "left", "right")],
    ("vit", "plain"),
    ("whisper", "plain"),
    ("whisper", "right"),
]
# transformers itself does not keep packed documents apart in GPT-OSS: it hands on no positions.
GENERATE = [
    (name, case)
    for name in [*DECODERS][:10]
    for case in ("dynamic", "dynamic, left", "static", "static, left", "beams")
]
GENERATE += [(name, case) for name in ENCODER_DECODERS for case in ("dynamic", "dynamic, left", "static")]
# Each model once, and each kind of mask, softcap, sinks, bias and latents.
FORWARD_SAMPLE = {
    ("llama", "packed"),
    ("mistral", "left"),
    ("qwen3", "plain"),
    ("olmo2", "right"),
    ("phi3", "packed"),
    ("gemma2", "left"),
    ("gemma3", "packed"),
    ("gpt-oss", "left"),
    ("llama4", "left"),
    ("llama4", "packed"),
    ("deepseek-v3", "right"),
    ("t5", "left"),
    ("bert", "right"),
    ("modernbert", "left"),
    ("bart", "right"),
    ("vit", "plain"),
    ("whisper", "right"),
}
GENERATE_SAMPLE = {
    ("llama", "static, left"),
    ("gemma3", "dynamic, left"),
    ("gemma3", "static, left"),
    ("gpt-oss", "beams"),
    ("llama4", "static, left"),
    ("deepseek-v3", "dynamic"),
    ("t5", "static"),
    ("bart", "dynamic, left"),
}


def some(cases: list[tuple[str, str]], sample: set[tuple[str, str]]) -> list[Any]:
    """All cases, of which those outside the sample are of the matrix."""
    assert sample <= {*cases}
    return [pytest.param(*x, marks=[] if x in sample else [pytest.mark.matrix]) for x in cases]


@pytest.mark.parametrize(("name", "case"), some(FORWARD, FORWARD_SAMPLE))
def test_logits_and_gradients(calls: Calls, device: str, name: str, case: str) -> None:
    check_forward(calls, device, name, case)


@pytest.mark.parametrize(("name", "case"), some(GENERATE, GENERATE_SAMPLE))
def test_generate(calls: Calls, device: str, name: str, case: str) -> None:
    check_generate(calls, device, name, case)
