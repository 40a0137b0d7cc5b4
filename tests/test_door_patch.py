"""patch(model): logits, losses and gradients equal the model's own; each test counts this library's
calls, forward and backward, and undo leaves nothing behind.

`pytest -m matrix tests/test_door_patch.py` runs every model in every case.
"""

from __future__ import annotations

import copy
import functools
import io
import os
import re
import warnings
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from functorch.compile import make_boxed_func
from torch import Tensor, nn
from torch._dynamo.backends.common import aot_autograd
from torch.utils._pytree import tree_leaves

from flashproto import backends, functional

transformers = pytest.importorskip("transformers", reason="transformers is not installed")

from door_calls import Calls  # noqa: E402
from tiny_models import DECODERS, TOKENS, VOCABULARY, tiny_model  # noqa: E402
from torch.nn.modules.module import register_module_forward_hook  # noqa: E402
from transformers.models.gemma2.modeling_gemma2 import Gemma2RMSNorm  # noqa: E402
from transformers.models.llama.modeling_llama import LlamaAttention, LlamaMLP, LlamaRMSNorm  # noqa: E402
from transformers.models.olmo2.modeling_olmo2 import Olmo2RMSNorm  # noqa: E402
from transformers.models.t5.modeling_t5 import T5LayerNorm  # noqa: E402

from flashproto.integrations.transformers import Cache, patch, register  # noqa: E402
from flashproto.integrations.transformers import loss as door_loss  # noqa: E402

NORMS = ("rms_norm", "layer_norm")
DOOR = (*NORMS, "swiglu", "geglu", "reglu", "rope", "linear_cross_entropy", "attention")
LOSS = "linear_cross_entropy"
LLAMA = {"rms_norm": 5, "swiglu": 2, "rope": 2, LOSS: 1}
# What is called in a step of training, of 2 layers.
CALLS: dict[str, dict[str, int]] = {
    "llama": LLAMA,
    "mistral": LLAMA,
    "qwen3": {**LLAMA, "rms_norm": 9},
    "olmo2": {**LLAMA, "rms_norm": 9},
    "phi3": LLAMA,
    "gemma2": {"rms_norm": 9, "geglu": 2, "rope": 2, LOSS: 1},
    "gemma3": {"rms_norm": 13, "geglu": 2, "rope": 2, LOSS: 1},
    "gpt-oss": {"rms_norm": 5, "rope": 2, LOSS: 1},
    "llama4": {"rms_norm": 5, "swiglu": 2, LOSS: 1},
    "deepseek-v3": {**LLAMA, "rms_norm": 9},
    "gpt2": {"layer_norm": 5, LOSS: 1},
    "gpt-neox": {"layer_norm": 5, "rope": 2, LOSS: 1},
    "modernbert-decoder": {"layer_norm": 6, "geglu": 2, "rope": 2},
}
OPTIONS = {"gpt2": dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), 0.0)}
NEAR, GRADIENTS = 1e-5, 1e-4  # of the largest value


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> Calls:
    """Counts, and lets calls on a CPU run in PyTorch."""
    counting = Calls()
    for name in DOOR:
        monkeypatch.setattr(functional, name, counting.counting(getattr(functional, name)))
    monkeypatch.setattr(backends, "INTERPRETED", False)
    return counting


def patched(calls: Calls, model: nn.Module) -> Any:
    report = patch(model)
    calls.forward.clear()  # of probes
    return report


def assert_calls(calls: Calls, forward: dict[str, int], backward: dict[str, int] | None = None) -> None:
    assert calls.forward == forward
    assert calls.backward == (forward if backward is None else backward)
    calls.forward.clear()
    calls.backward.clear()


# --- inputs and steps -------------------------------------------------------------------------------

IDS = torch.randint(3, VOCABULARY, (2, TOKENS), generator=torch.Generator().manual_seed(0))
LEFT = torch.ones_like(IDS)
LEFT[0, :3] = 0
LABELS = IDS.masked_fill(LEFT == 0, -100)
LABELS[0, 3] = -100  # predicted by a row of padding
PACKED = torch.tensor([[*range(5), *range(7)], [*range(3), *range(9)]])
BATCH = {"input_ids": IDS, "attention_mask": LEFT, "labels": LABELS, "use_cache": False}


def made(name: str, **options: Any) -> Any:
    return tiny_model(name, **{**OPTIONS.get(name, {}), **options})


def step(model: Any, run: Any = None, **more: Any) -> tuple[Tensor, dict[str, Tensor], Any]:
    """(loss, gradients, output) in training."""
    model.train()
    model.zero_grad()
    out = (model if run is None else run)(**{**BATCH, **more})
    out.loss.backward()
    return out.loss.detach(), gradients_of(model), out


def gradients_of(model: nn.Module) -> dict[str, Tensor]:
    return {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}


def logits(model: Any) -> Tensor:
    model.eval()
    with torch.no_grad():
        return model(input_ids=IDS, attention_mask=LEFT, use_cache=False).logits[LEFT.bool()]


def assert_near(got: Tensor, wanted: Tensor, bar: float = NEAR) -> None:
    assert (got - wanted).abs().max() <= bar * wanted.abs().max()


def assert_same(ours: tuple[Any, ...], own: tuple[Any, ...]) -> None:
    """Two steps."""
    assert_near(ours[0], own[0])
    assert ours[1].keys() == own[1].keys()
    largest = max(g.abs().max() for g in own[1].values())
    for name, wanted in own[1].items():
        # The exact gradient of a bias of all keys is 0, of which rounding is left.
        bar = largest if name.endswith(("k_proj.bias", "c_attn.bias")) else wanted.abs().max()
        bar = bar.clamp(min=1e-3 * largest)
        assert (ours[1][name] - wanted).abs().max() <= GRADIENTS * bar, name


def attributes(model: nn.Module) -> dict[str, set[str]]:
    return {name: {*vars(module)} for name, module in model.named_modules()}


def some(names: list[str], sample: set[str]) -> list[Any]:
    assert sample <= {*names}
    return [pytest.param(n, marks=[] if n in sample else [pytest.mark.matrix]) for n in names]


# --- models -----------------------------------------------------------------------------------------

SAMPLE = {"llama", "qwen3", "olmo2", "gemma2", "gpt-oss", "deepseek-v3", "gpt2"}


@pytest.mark.parametrize("name", some([*DECODERS], SAMPLE))
def test_models(calls: Calls, name: str) -> None:
    """Logits, loss (mean, by num_items_in_batch, packed), gradients; state_dict; undo."""
    model, wanted = made(name), CALLS[name]
    before, state = attributes(model), {k: v.clone() for k, v in model.state_dict().items()}
    more = [{}, {"num_items_in_batch": torch.tensor(7)}, {"num_items_in_batch": 7}]
    more += [{"position_ids": PACKED, "attention_mask": None}] if name != "gpt-oss" else []
    own_logits, own = logits(model), [step(model, **options) for options in more]
    assert not calls.forward
    report = patched(calls, model)
    assert_near(logits(model), own_logits)
    assert_calls(calls, {n: count for n, count in wanted.items() if n != LOSS}, {})
    for options, expected in zip(more, own, strict=True):
        ours = step(model, **options)
        assert_same(ours, expected)
        assert (ours[2].logits is None) == (LOSS in wanted)
        assert type(ours[2]) is type(expected[2])
        assert_calls(calls, wanted)
    assert {*model.state_dict()} == {*state}
    assert all(torch.equal(v, state[k]) for k, v in model.state_dict().items())
    assert len(report.replaced) == sum(wanted.values())
    report.undo()
    assert attributes(model) == before
    again = step(model)
    assert torch.equal(again[0], own[0][0]) and again[2].logits is not None
    assert all(torch.equal(g, own[0][1][n]) for n, g in again[1].items())
    assert not calls.forward


@pytest.mark.parametrize("name", some([*DECODERS], {"llama", "gemma2"}))
def test_generates(calls: Calls, name: str) -> None:
    """With rotations of one token in a cache."""
    model = made(name)
    options = {"max_new_tokens": 4, "do_sample": False, "pad_token_id": 0, "eos_token_id": None}
    options["attention_mask"] = LEFT
    expected = model.generate(IDS, **options)
    patched(calls, model)
    assert torch.equal(model.generate(IDS, **options), expected)
    assert_calls(calls, {n: 4 * count for n, count in CALLS[name].items() if n != LOSS}, {})


@pytest.mark.parametrize("name", some([*DECODERS], {"olmo2"}))
def test_half_precision(calls: Calls, name: str) -> None:
    """In bfloat16, as far from float32 as the model itself."""
    exact = logits(made(name))
    model = made(name).bfloat16()
    own = (logits(model).float() - exact).norm()
    own_step = step(model)
    patched(calls, model)
    assert (logits(model).float() - exact).norm() <= 1.5 * own
    calls.forward.clear()
    ours = step(model)
    assert (ours[0] - own_step[0]).abs() <= 0.02 * own_step[0]
    assert_calls(calls, CALLS[name])


def test_kernels(calls: Calls, monkeypatch: pytest.MonkeyPatch, device: str) -> None:
    """All on Triton, RoPE by tables of each sequence too."""
    pytest.importorskip("triton")
    monkeypatch.setattr(backends, "INTERPRETED", not torch.cuda.is_available())
    ran: list[str] = []
    model = made("gemma2", num_hidden_layers=1).to(device)
    more = {n: x.to(device) for n, x in BATCH.items() if isinstance(x, Tensor)}
    more |= {"position_ids": PACKED.to(device)}
    own = step(model, **more)
    patched(calls, model)
    with backends.watch_choices(lambda operator, backend, against: ran.append(backend)):
        assert_same(step(model, **more), own)
    assert ran and {*ran} <= {"triton", "hopper"}
    assert_calls(calls, {"rms_norm": 5, "geglu": 1, "rope": 1, LOSS: 1})


# --- roundings, and what is left --------------------------------------------------------------------


class Elsewhere(nn.Module):
    """A norm that none here is: it rounds what it divides by."""

    def __init__(self, n: int) -> None:
        super().__init__()
        self.weight, self.eps = nn.Parameter(torch.ones(n)), 1e-6

    def forward(self, x: Tensor) -> Tensor:
        mean = (x.float().pow(2).mean(-1, keepdim=True) + self.eps).rsqrt()
        return self.weight * x * mean.to(x.dtype)


@pytest.mark.parametrize(
    ("make", "runs"),
    [
        (lambda: LlamaRMSNorm(48, 1e-5), "rms_norm, casting 'llama'"),
        (lambda: Olmo2RMSNorm(48, 1e-6), "rms_norm, casting 'torch'"),
        (lambda: Gemma2RMSNorm(48, 1e-3), "rms_norm, casting 'gemma'"),
        (lambda: T5LayerNorm(48, 1e-6), "rms_norm, casting 'llama'"),
        (lambda: nn.LayerNorm(48, 1e-5), "layer_norm"),
        (lambda: nn.LayerNorm(48, 1e-5, bias=False), "layer_norm"),
        (lambda: nn.RMSNorm(48, 1e-4), "rms_norm, casting 'torch'"),
        (lambda: Elsewhere(48), None),
        (lambda: nn.PReLU(48), None),
    ],
)
def test_roundings(calls: Calls, make: Any, runs: str | None) -> None:
    """In bfloat16 the same bits, but where sums of another order round apart; a float32 weight too."""
    module = make()
    with torch.no_grad():
        for p in module.parameters():
            p.copy_(torch.randn(48).bfloat16())
    holder = nn.Sequential(module)
    pairs = [(torch.float32, torch.float32), (torch.bfloat16, torch.bfloat16)]
    mixed = "RMSNorm" in type(module).__name__ or isinstance(module, T5LayerNorm)
    pairs += [(torch.bfloat16, torch.float32)] if mixed else []
    inputs = torch.randn(256, 48) * torch.logspace(-3, 1, 256)[:, None]
    own = [module.to(w)(inputs.to(x)) for x, w in pairs]
    module.float()
    report = patched(calls, holder)
    assert [row.runs for row in report.rows] == [runs]
    for (x, w), wanted in zip(pairs, own, strict=True):
        y = module.to(w)(inputs.to(x))
        assert y.dtype == wanted.dtype
        eps = torch.finfo(y.dtype).eps
        torch.testing.assert_close(y, wanted, rtol=4 * eps, atol=4 * eps)
        if x == torch.bfloat16:
            assert (y != wanted).float().mean() < 0.02
        if runs:
            y.sum().backward()
    # T5's does not round at all where the weight is wider.
    count = (len(pairs) - isinstance(module, T5LayerNorm)) if runs else 0
    assert_calls(calls, Counter({runs.split(",")[0]: count}) if runs else {})


def test_roundings_are_told_apart() -> None:
    """Another casting gives other bits of the same input, so that the test above can fail."""
    x, w = (torch.randn(64, 48) * 3).bfloat16(), torch.randn(48).bfloat16()
    made = [functional.rms_norm(x, 48, w, 1e-6, casting=c) for c in ("llama", "torch", "gemma")]
    for i in range(3):
        assert (made[i] != made[i - 1]).float().mean() > 0.1


class Dropping(LlamaMLP):
    """Dropout between, which a gated unit here has not."""

    def forward(self, x: Tensor) -> Tensor:
        y = self.act_fn(self.gate_proj(x)) * self.up_proj(x)
        return self.down_proj(nn.functional.dropout(y, 0.1, self.training))


class Clamping(LlamaMLP):
    """Limits that small inputs do not come to."""

    def forward(self, x: Tensor) -> Tensor:
        gate, up = self.gate_proj(x).clamp(max=500.0), self.up_proj(x).clamp(-500.0, 500.0)
        return self.down_proj(self.act_fn(gate) * up)


class ClampingNorm(LlamaRMSNorm):
    def forward(self, hidden_states: Tensor) -> Tensor:
        return super().forward(hidden_states.clamp(-500.0, 500.0))


@pytest.mark.parametrize("of", [0, 1])
def test_limits_are_seen(calls: Calls, of: int) -> None:
    module = Clamping(made("llama").config) if of == 0 else ClampingNorm(32)
    x = 1e4 * torch.randn(8, 32)
    own = module(x)
    (row,) = patched(calls, nn.Sequential(module)).rows
    assert row.runs is None and row.why.startswith("it is no")
    assert torch.equal(module(x), own)


def test_what_is_left(calls: Calls) -> None:
    """With the reason, in the table."""
    model = made("llama", num_hidden_layers=3)
    config = model.config
    model.model.layers[0].mlp = Dropping(config)
    config.hidden_act = "quick_gelu"
    model.model.layers[2].mlp = LlamaMLP(config)
    model.model.norm.forward = model.model.norm.forward  # accelerate does so
    report = patched(calls, model)
    assert {row.name: row.why for row in report.left} == {
        "model.layers.0.mlp": "it is no SwiGLU, GeGLU or ReGLU",
        "model.layers.2.mlp": "it is no SwiGLU, GeGLU or ReGLU",
        "model.norm": "another forward was bound to it before",
    }
    lines = str(report).split("\n")
    assert lines[0].split() == ["module", "number", "runs", "because"]
    assert re.search(r"^LlamaRMSNorm +6 +rms_norm, casting 'llama'$", str(report), re.MULTILINE)
    assert re.search(r"^Dropping +1 +its own forward +it is no SwiGLU", str(report), re.MULTILINE)
    step(model)
    assert_calls(calls, {"rms_norm": 6, "swiglu": 1, "rope": 3, LOSS: 1})
    report.undo()
    assert "forward" in vars(model.model.norm)  # it is not patch's


def test_other_logits_are_left(calls: Calls, monkeypatch: pytest.MonkeyPatch) -> None:
    """Models that scale what the head gives, or add to the loss."""
    kind = type(made("llama"))

    class Scaled(kind):  # type: ignore[misc,valid-type]
        def forward(self, input_ids: Any = None, labels: Any = None, **options: Any) -> Any:
            out = super().forward(input_ids, labels=None, **options)
            out.logits = out.logits / 3
            if labels is not None:
                out.loss = self.loss_function(out.logits, labels, self.vocab_size)
            return out

    class Regularized(kind):  # type: ignore[misc,valid-type]
        def forward(self, input_ids: Any = None, labels: Any = None, **options: Any) -> Any:
            out = super().forward(input_ids, labels=labels, **options)
            if labels is not None:
                out.loss = out.loss + 0.01 * out.logits.square().mean()
            return out

    config = made("llama").config
    for other in (Scaled, Regularized):
        model = other._from_config(config)
        own = step(model)
        report = patched(calls, model)
        assert [row.kind for row in report.left] == [other.__name__]
        assert_same(step(model), own)
        assert_calls(calls, {n: c for n, c in LLAMA.items() if n != LOSS})


def test_rotations(calls: Calls) -> None:
    """Interleaved, behind one another, half tables, part of a head, tokens before heads."""
    from transformers.models.cohere import modeling_cohere as cohere
    from transformers.models.deepseek_v3 import modeling_deepseek_v3 as deepseek
    from transformers.models.gpt_oss import modeling_gpt_oss as gpt_oss
    from transformers.models.phi3 import modeling_phi3 as phi3

    from flashproto.integrations.transformers import rotary

    cases = [
        (phi3.apply_rotary_pos_emb, "twice", "halves", True),
        (gpt_oss.apply_rotary_pos_emb, "once", "halves", False),
        (deepseek.apply_rotary_pos_emb_interleave, "twice", "to halves", False),
        (cohere.apply_rotary_pos_emb, "each twice", "neighbours", False),
    ]
    for original, table, pairs, partial in cases:
        kind = rotary.rotation_of(original)
        assert kind == (table, pairs, partial)
        ours = rotary.rotating(original, kind)
        calls.forward.clear()
        for rows in (1, 2):
            cos, sin = rotary.tables(kind, torch.randn(rows, 5, 4))
            q, k = torch.randn(2, 4, 5, 8), torch.randn(2, 1, 5, 8)
            for x, y in zip(ours(q, k, cos, sin), original(q, k, cos, sin), strict=True):
                torch.testing.assert_close(x, y)
            q, k = q.transpose(1, 2), k.transpose(1, 2)
            turned = ours(q, k, cos, sin, unsqueeze_dim=2)
            for x, y in zip(turned, original(q, k, cos, sin, unsqueeze_dim=2), strict=True):
                torch.testing.assert_close(x, y)
        assert_calls(calls, {"rope": 4}, {})
        with pytest.raises(Exception):  # noqa: B017 - as the original does
            ours(q[..., :3], k, cos, sin)
    assert rotary.rotation_of(lambda q, k, cos, sin: (q * cos, k * sin)) is None


def oddly(function: Any) -> Any:
    """A decorator that holds what it decorates where nobody looks."""
    held = {"function": function}

    @functools.wraps(function)
    def call(*args: Any, **options: Any) -> Any:
        return held["function"](*args, **options)

    return call


class OddAttention(LlamaAttention):
    forward = oddly(LlamaAttention.forward)


def test_unknown_decorators_are_left(calls: Calls) -> None:
    """Their function cannot be given another rotation."""
    model = made("llama")
    model.model.layers[0].self_attn.__class__ = OddAttention
    own = step(model)
    report = patched(calls, model)
    why = ["its forward is decorated in an unknown way"]
    assert [row.why for row in report.left] == why
    assert_same(step(model), own)
    assert_calls(calls, {**LLAMA, "rope": 1})


def test_names_of_arguments(calls: Calls) -> None:
    model = made("llama")
    norm, mlp, x = model.model.norm, model.model.layers[0].mlp, torch.randn(2, 32)
    own = norm(hidden_states=x), mlp(x=x)
    patched(calls, model)
    torch.testing.assert_close((norm(hidden_states=x), mlp(x=x)), own)
    assert calls.forward == {"rms_norm": 1, "swiglu": 1}


def test_decorators_stay(calls: Calls) -> None:
    """The attention's forward still takes names that are deprecated."""
    model = made("llama")
    attention = model.model.layers[0].self_attn
    x, positions = torch.randn(2, TOKENS, 32), torch.arange(TOKENS)[None]
    angles = model.model.rotary_emb(x, positions)

    def run() -> tuple[Any, Any]:
        cache = transformers.DynamicCache(config=model.config)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", FutureWarning)
            out = attention(x, angles, None, past_key_values=cache)[0]
        return out, cache.get_seq_length()

    wanted, length = run()
    patched(calls, model)
    out, ours = run()
    assert length == ours == TOKENS
    assert_near(out, wanted)
    assert calls.forward == {"rope": 1}


# --- what a probe leaves alone ----------------------------------------------------------------------


def test_probing_is_not_seen(calls: Calls) -> None:
    """Random states, hooks, buffers, gradients, training, autocast, default dtype and device."""
    model = made("gemma3").train()
    step(model)
    model.model.layers[1].eval()
    model.model.norm.weight.requires_grad_(False)
    fired: list[Any] = []
    handles = [register_module_forward_hook(lambda *args: fired.append(args))]
    for module in model.modules():
        handles += [module.register_forward_hook(lambda *args: fired.append(args))]
        handles += [module.register_forward_pre_hook(lambda *args: fired.append(args))]

    def state() -> list[Any]:
        tensors = [*model.named_parameters(), *model.named_buffers()]
        values = [(n, x, x._version, x.clone(), x.requires_grad) for n, x in tensors]
        gradients = [(n, g.clone()) for n, g in gradients_of(model).items()]
        training = [module.training for module in model.modules()]
        return [values, gradients, training, torch.get_rng_state(), torch.is_grad_enabled()]

    before = state()
    torch.set_default_dtype(torch.bfloat16)
    try:
        with torch.autocast("cpu", dtype=torch.bfloat16), torch.device("meta"):
            report = patched(calls, model)
            assert torch.is_autocast_enabled("cpu") and torch.empty(1).is_meta
    finally:
        torch.set_default_dtype(torch.float32)
        for handle in handles:
            handle.remove()
    assert not fired
    assert len(report.replaced) == sum(CALLS["gemma3"].values())
    flat = [tree_leaves(x) for x in (before, state())]
    for x, y in zip(*flat, strict=True):
        assert torch.equal(x, y) if isinstance(x, Tensor) else x == y


def test_hooks_fire_as_before(calls: Calls) -> None:
    model = made("llama")
    fired: Counter[str] = Counter()
    for name, module in model.named_modules():
        if name != "lm_head":  # whose product is taken out of its hands
            module.register_forward_hook(lambda m, a, o, name=name: fired.update([name]))
    step(model)
    own = dict(fired)
    patched(calls, model)
    fired.clear()
    step(model)
    assert fired == {n: c for n, c in own.items() if not n.endswith("act_fn")}
    assert_calls(calls, LLAMA)


def test_meta(calls: Calls) -> None:
    """A model without weights yet."""
    whole = made("qwen3")
    with torch.device("meta"):
        model = type(whole)._from_config(whole.config, attn_implementation="eager")
    report = patched(calls, model)
    assert len(report.replaced) == sum(CALLS["qwen3"].values())
    model.load_state_dict(whole.state_dict(), assign=True)
    model.model.rotary_emb = copy.deepcopy(whole.model.rotary_emb)
    assert_same(step(model), step(whole))
    assert_calls(calls, CALLS["qwen3"])


class Quantized(nn.Linear):
    """8 bits and a scale in place of a weight, as such layers are."""

    def __init__(self, layer: nn.Linear) -> None:
        nn.Module.__init__(self)
        self.in_features, self.out_features, self.bias = layer.in_features, layer.out_features, None
        scale = layer.weight.detach().abs().max() / 127
        self.register_buffer("scale", scale)
        self.register_buffer("weight", (layer.weight.detach() / scale).round().to(torch.int8))

    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.linear(x, self.weight * self.scale)


def test_quantized(calls: Calls) -> None:
    model = made("llama")
    for module in [*model.modules()]:
        for name, child in [*module.named_children()]:
            if type(child) is nn.Linear:
                setattr(module, name, Quantized(child))
    own = step(model)
    report = patched(calls, model)
    assert "linear_cross_entropy       now its own: lm_head is a test_door_patch.Quantized" in str(
        report
    )
    ours = step(model)
    assert_same(ours, own)
    assert ours[2].logits is not None
    assert_calls(calls, {n: c for n, c in LLAMA.items() if n != LOSS})


@contextmanager
def one_process(tmp_path: Path) -> Iterator[Any]:
    """A process group of one."""
    distributed = torch.distributed
    store = distributed.FileStore(str(tmp_path / "store"), 1)
    distributed.init_process_group("gloo", store=store, rank=0, world_size=1)
    try:
        yield distributed.device_mesh.init_device_mesh("cpu", (1,))
    finally:
        distributed.destroy_process_group()


@pytest.mark.parametrize("first", ["patch", "shard"])
def test_sharded(calls: Calls, tmp_path: Path, first: str) -> None:
    """FSDP's weights are whole while a module runs; a head of its own unit is not, and says so."""
    from torch.distributed.fsdp import fully_shard

    own = step(made("llama"))
    for head in (False, True):
        with one_process(tmp_path) as mesh:
            model = made("llama")
            if first == "patch":
                patched(calls, model)
            for module in (*model.model.layers, *([model.lm_head] if head else []), model):
                fully_shard(module, mesh=mesh)
            report = patched(calls, model)
            if first == "shard":
                why = (
                    "lm_head is a torch.distributed.*FSDPLinear"
                    if head
                    else "lm_head.weight is a DTensor"
                )
                assert re.search(f"linear_cross_entropy +now its own: {why}", str(report))
            loss, gradients, out = step(model)
            gradients = {n: g.full_tensor() for n, g in gradients.items()}
            assert_same((loss, gradients), own)
            assert (out.logits is None) == (not head)
            (tmp_path / "store").unlink(missing_ok=True)
        assert_calls(calls, {n: c for n, c in LLAMA.items() if n != LOSS or not head})


def test_distributed_tensors_run_the_own_forward(calls: Calls, tmp_path: Path) -> None:
    """Tensor parallel norms and MLPs."""
    from torch.distributed.tensor import DTensor, Replicate, distribute_module

    with one_process(tmp_path) as mesh:
        for module in (LlamaRMSNorm(32), LlamaMLP(made("llama").config)):
            holder = nn.Sequential(module)
            x = torch.randn(3, 32)
            own = module(x)
            assert patched(calls, holder).replaced
            distribute_module(module, mesh)
            y = module(DTensor.from_local(x, mesh, [Replicate()])).full_tensor()
            torch.testing.assert_close(y, own)
            assert not calls.forward
        (tmp_path / "store").unlink(missing_ok=True)


# --- when the loss is the model's own ---------------------------------------------------------------


@pytest.fixture
def warned(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    told: list[str] = []
    monkeypatch.setattr(door_loss.logger, "warning_once", told.append)
    return told


NO_LOSS = {n: c for n, c in LLAMA.items() if n != LOSS}


def test_own_loss(calls: Calls, warned: list[str]) -> None:
    """Each call looks at the head."""
    model = made("llama")
    own = step(model)
    report = patched(calls, model)
    handle = model.lm_head.register_forward_hook(lambda *args: None)
    assert_same(step(model), own)
    assert_calls(calls, NO_LOSS)
    assert warned == ["flashproto: LlamaForCausalLM computes its own loss, because lm_head has hooks."]
    handle.remove()
    model.lm_head.forward = model.lm_head.forward
    step(model)
    del model.lm_head.forward
    assert "lm_head has another forward" in warned[-1]
    model.loss_function = lambda logits, labels, vocab_size, **options: logits.square().mean()
    assert step(model)[0] != own[0]
    del model._loss_function
    assert "loss_function of its own" in warned[-1]
    model.loss_type = "ForMaskedLM"
    assert step(model)[0] != own[0]
    assert "loss_function of its own" in warned[-1]
    model.loss_type = made("llama").loss_type
    assert_calls(calls, {n: 3 * c for n, c in NO_LOSS.items()})
    weight = model.lm_head.weight
    model.lm_head.weight = nn.Parameter(torch.empty(0))
    assert "lm_head.weight is empty: it is elsewhere" in str(patch(model))
    model.lm_head.weight = weight
    calls.forward.clear()
    assert_same(step(model), own)  # now as before
    assert_calls(calls, LLAMA)
    assert repr(patch(model)) == repr(report)


def test_who_wants_logits(calls: Calls) -> None:
    """In evaluation, without labels, of some tokens, as a tuple: the model's own forward."""
    model = made("llama")
    patched(calls, model)
    assert model(**BATCH).logits is not None
    model.train()
    assert model(input_ids=IDS).logits is not None
    assert model(**{**BATCH, "logits_to_keep": 4, "labels": LABELS[:, -4:]}).logits.shape[1] == 4
    loss, of_all, *_ = model(**BATCH, return_dict=False)
    assert loss.ndim == 0 and of_all.shape == (2, TOKENS, VOCABULARY)
    assert_calls(calls, {n: 4 * c for n, c in NO_LOSS.items()}, {})
    shifted = nn.functional.pad(LABELS, (0, 1), value=-100)[:, 1:]
    fused = model(**BATCH).loss
    torch.testing.assert_close(model(**BATCH, shift_labels=shifted).loss, fused)
    assert calls.forward[LOSS] == 2


def test_router_losses_are_kept(calls: Calls) -> None:
    """What is added to the loss for the router of experts."""
    model = made("gpt-oss")
    own = step(model, output_router_logits=True)
    patched(calls, model)
    assert_same(step(model, output_router_logits=True), own)
    assert_calls(calls, {n: c for n, c in CALLS["gpt-oss"].items() if n != LOSS})
    model.config.output_router_logits = True
    patched(calls, model).undo()
    assert {row.kind for row in patched(calls, model).left} == {"GptOssMLP"}
    assert_same(step(model), own)
    assert LOSS not in calls.forward


# --- with other things ------------------------------------------------------------------------------


KINDS_OF = {"norms": "rms_norm", "mlps": "swiglu", "rope": "rope", "loss": LOSS}


@pytest.mark.parametrize("kind", [*KINDS_OF])
def test_kinds(calls: Calls, kind: str) -> None:
    """All but one, then the rest."""
    model = made("llama")
    own = step(model)
    patch(model, **{kind: False})
    calls.forward.clear()
    ours = step(model)
    assert_same(ours, own)
    assert (ours[2].logits is None) == (kind != "loss")
    assert_calls(calls, {n: c for n, c in LLAMA.items() if n != KINDS_OF[kind]})
    patched(calls, model)
    step(model)
    assert_calls(calls, LLAMA)
    with pytest.raises(TypeError, match=f"patch: {kind} is 'no'"):
        patch(model, **{kind: "no"})


def test_again_and_undo(calls: Calls) -> None:
    model = made("llama")
    before = attributes(model)
    first = patched(calls, model)
    bound = [vars(module).get("forward") for module in model.modules()]
    second = patched(calls, model)
    assert repr(second) == repr(first) and second.rows == first.rows
    assert [vars(module).get("forward") for module in model.modules()] == bound
    second.undo()
    assert attributes(model) == before
    first.undo()  # nothing is left to do
    patched(calls, model)
    model.forward = lambda *args, **options: None  # as accelerate does for autocast
    changed = attributes(model)
    with pytest.raises(RuntimeError, match="undo is the forward of the model, which was replaced"):
        first.undo()
    assert attributes(model) == changed
    del model.forward
    first.undo()
    assert attributes(model) == before
    with pytest.raises(TypeError, match="patch: model is 3"):
        patch(3)  # type: ignore[arg-type]


def test_copies(calls: Calls, tmp_path: Path) -> None:
    """deepcopy, pickle, save_pretrained."""
    model = made("qwen3")
    patched(calls, model)
    own = step(model)
    twin = copy.deepcopy(model)
    calls.forward.clear()
    calls.backward.clear()
    with torch.no_grad():
        model.model.norm.weight.mul_(2)
    assert twin.model.norm.forward.__self__ is twin.model.norm
    assert_same(step(twin), own)
    assert_calls(calls, CALLS["qwen3"])
    patched(calls, twin).undo()
    assert "forward" not in vars(twin.model.norm) and "forward" in vars(model.model.norm)
    assert_same(step(twin), own)
    calls.backward.clear()
    buffer = io.BytesIO()
    torch.save(model, buffer)
    buffer.seek(0)
    assert_near(logits(torch.load(buffer, weights_only=False)), logits(model))
    model.save_pretrained(tmp_path)
    loaded = type(model).from_pretrained(tmp_path, attn_implementation="eager")
    assert all("forward" not in vars(module) for module in loaded.modules())
    assert_near(logits(loaded), logits(model))
    assert "flashproto" not in (tmp_path / "config.json").read_text()


@pytest.mark.parametrize("reentrant", [False, True])
def test_gradient_checkpointing(calls: Calls, reentrant: bool) -> None:
    model = made("llama")
    own = step(model)
    patched(calls, model)
    options = {"use_reentrant": reentrant}
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs=options)
    assert_same(step(model), own)
    assert calls.forward == {"rms_norm": 9, "swiglu": 4, "rope": 4, LOSS: 1}
    assert calls.backward == LLAMA


def test_autocast(calls: Calls) -> None:
    """Float32 weights; QK norm then has inputs of 16 bits."""
    model = made("qwen3")
    exact = step(model)[0]

    def under_autocast() -> tuple[Any, ...]:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            model.train()
            model.zero_grad()
            out = model(**BATCH)
        out.loss.backward()
        return out.loss.detach(), gradients_of(model)

    own = under_autocast()
    patched(calls, model)
    ours = under_autocast()
    assert (ours[0] - exact).abs() <= 0.02 * exact and (own[0] - exact).abs() <= 0.02 * exact
    assert all(g.dtype == own[1][n].dtype for n, g in ours[1].items())
    assert_calls(calls, CALLS["qwen3"])


def test_beside_register(calls: Calls) -> None:
    """And beside Cache."""
    model = made("gemma3")
    own = step(model)
    options = {"max_new_tokens": 4, "do_sample": False, "pad_token_id": 0, "eos_token_id": None}
    tokens = model.eval().generate(IDS, **options)
    model.set_attn_implementation(register())
    patched(calls, model)
    assert_same(step(model), own)
    assert_calls(calls, {**CALLS["gemma3"], "attention": 2})
    cache = Cache(model.config, room=TOKENS + 4)
    assert torch.equal(model.eval().generate(IDS, cache=cache, **options), tokens)
    assert_calls(calls, {n: 4 * c for n, c in CALLS["gemma3"].items() if n != LOSS}, {})


class Graphs:
    """A backend that runs graphs as they are, and counts them and the operators in them."""

    def __init__(self) -> None:
        self.graphs = 0
        self.operators: dict[str, Counter[str]] = {"forward": Counter(), "backward": Counter()}

    def __call__(self, module: Any, inputs: Any) -> Any:
        self.graphs += 1
        of = {which: self.compiler(which) for which in self.operators}
        return aot_autograd(fw_compiler=of["forward"], bw_compiler=of["backward"])(module, inputs)

    def compiler(self, which: str) -> Any:
        def counted(module: Any, inputs: Any) -> Any:
            for node in module.graph.nodes:  # an operator that writes into its inputs is in a wrapper
                targets = [node.target, *node.args]
                names = [str(x) for x in targets if isinstance(x, torch._ops.OpOverload)]
                self.operators[which].update(n.split(".")[1] for n in names if "flashproto" in n)
            return make_boxed_func(module)

        return counted


@pytest.mark.parametrize("name", some([*DECODERS], {"gemma3"}))
def test_compiled(monkeypatch: pytest.MonkeyPatch, device: str, name: str) -> None:
    """One graph, with the kernels' operators in it."""
    pytest.importorskip("triton")
    if name == "llama4":
        pytest.skip("its own rotation and experts are not one graph")
    monkeypatch.setattr(backends, "INTERPRETED", not torch.cuda.is_available())
    layers = {"num_hidden_layers": 1, "layer_types": ["full_attention"]} if name == "gemma3" else {}
    model = made(name, **layers).to(device)
    more = {n: x.to(device) for n, x in BATCH.items() if isinstance(x, Tensor)}
    own = step(model, **more)
    patch(model)
    torch._dynamo.reset()
    backend = Graphs()
    ours = step(model, torch.compile(model, backend=backend, fullgraph=True), **more)
    assert_same(ours, own)
    assert backend.graphs == 1
    wanted = sum(CALLS[name].values()) if not layers else 7 + 1 + 1 + 1
    assert backend.operators["forward"].total() == wanted, backend.operators
    assert backend.operators["backward"].total() >= wanted - 1, backend.operators


def lora(**options: Any) -> Any:
    peft = pytest.importorskip("peft")
    return peft.LoraConfig(r=2, init_lora_weights=False, **options)


@pytest.mark.parametrize("first", ["patch", "peft"])
def test_peft(calls: Calls, first: str) -> None:
    """LoRA in attention and MLP, and whole copies of the head and a norm."""
    peft = pytest.importorskip("peft")
    options = {"target_modules": ["q_proj", "gate_proj"], "modules_to_save": ["lm_head", "norm"]}

    def adapted(model: Any) -> Any:
        torch.manual_seed(3)
        return peft.get_peft_model(model, lora(**options))

    own = step(adapted(made("llama")))
    model = made("llama")
    if first == "patch":
        patched(calls, model)
    model = adapted(model)
    if first == "peft":
        patched(calls, model)
    ours = step(model)
    assert_same(ours, own)
    assert ours[2].logits is None
    assert_calls(calls, LLAMA)
    with model.disable_adapter():
        assert_near(model(**BATCH).loss, made("llama").train()(**BATCH).loss)
    patched(calls, model).undo()
    assert_same(step(model), own)
    assert not calls.forward
    assert all("forward" not in vars(module) for module in model.modules())


def test_peft_on_the_head(calls: Calls, warned: list[str]) -> None:
    """LoRA on lm_head: the weight alone is not the head."""
    peft = pytest.importorskip("peft")
    model = made("llama")
    torch.manual_seed(3)
    model = peft.get_peft_model(model, lora(target_modules=["q_proj", "lm_head"]))
    own = step(model)
    report = patched(calls, model)
    assert "lm_head is a peft.tuners.lora.layer.Linear" in str(report)
    assert_same(step(model), own)
    assert_calls(calls, NO_LOSS, {**NO_LOSS, "rms_norm": 4})  # what comes first has no gradient
    assert "because lm_head is a peft.tuners.lora.layer.Linear." in warned[0]
    merged = model.merge_and_unload()
    step(merged.requires_grad_(True))
    assert calls.forward[LOSS] == 1


class Data(torch.utils.data.Dataset):
    def __len__(self) -> int:
        return 24

    def __getitem__(self, i: int) -> dict[str, Tensor]:
        x = torch.randint(3, VOCABULARY, (TOKENS,), generator=torch.Generator().manual_seed(i))
        return {"input_ids": x, "labels": x.masked_fill(torch.arange(TOKENS) < i % 5, -100)}


@pytest.mark.slow
def test_trainer(calls: Calls, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """3 steps of 2 parts, whose losses are divided by the labels of both; then evaluation."""
    pytest.importorskip("accelerate")
    monkeypatch.setattr(os, "environ", {**os.environ, "CUDA_VISIBLE_DEVICES": ""})

    def trained(model: Any) -> list[float]:
        args = transformers.TrainingArguments(
            str(tmp_path),
            max_steps=3,
            per_device_train_batch_size=2,
            gradient_accumulation_steps=2,
            logging_steps=1,
            report_to=[],
            save_strategy="no",
            use_cpu=True,
            learning_rate=1e-2,
            seed=0,
            disable_tqdm=True,
        )
        trainer = transformers.Trainer(model, args, train_dataset=Data(), eval_dataset=Data())
        trainer.train()
        losses = [x["loss"] for x in trainer.state.log_history if "loss" in x]
        return [*losses, trainer.evaluate()["eval_loss"]]

    own = trained(made("llama"))
    model = made("llama")
    patched(calls, model)
    ours = trained(model)
    assert len(ours) == 4 and ours == pytest.approx(own, rel=1e-4)
    assert calls.backward == {n: 6 * c for n, c in LLAMA.items()}


def test_samples(calls: Calls) -> None:
    """docs/doors.md's lines."""
    page = (Path(__file__).parent.parent / "docs" / "doors.md").read_text()
    found = re.findall(r"^```python\n(.*?)^```$", page, re.MULTILINE | re.DOTALL)
    (sample,) = [sample for sample in found if "import patch" in sample]
    model = made("llama")
    names = {"model": model}
    exec(sample, names)
    assert "LlamaForCausalLM" in str(names["patched"])
    calls.forward.clear()
    step(model)
    assert_calls(calls, {**LLAMA, "attention": 2})
