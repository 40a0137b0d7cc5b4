"""transformers' models on flashproto: logits, gradients and tokens equal those of transformers' own
eager attention; and every test counts this library's calls, forward and backward.

`pytest -m matrix tests/test_door_transformers.py` runs every model in every case.
"""

from __future__ import annotations

import ast
import itertools
import random
import re
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from functorch.compile import make_boxed_func
from torch import Tensor
from torch._dynamo.backends.common import aot_autograd
from torch.utils._python_dispatch import TorchDispatchMode

from flashproto import backends, functional, masks

transformers = pytest.importorskip("transformers", reason="transformers is not installed")

from random_masks import random_mask  # noqa: E402
from tiny_models import (  # noqa: E402
    DECODER,
    DECODERS,
    ENCODER_DECODERS,
    ENCODERS,
    TOKENS,
    VOCABULARY,
    WINDOW,
    tiny_model,
)
from transformers import AttentionInterface, AttentionMaskInterface, masking_utils  # noqa: E402
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS  # noqa: E402
from transformers.models.t5.modeling_t5 import T5Attention  # noqa: E402

from flashproto.integrations.transformers import Cache, patch, register  # noqa: E402
from flashproto.integrations.transformers.attention import attend, mask_of, runs_of  # noqa: E402
from flashproto.integrations.transformers.cache import NAMES  # noqa: E402
from flashproto.integrations.transformers.masks import Carrier, make_mask  # noqa: E402
from flashproto.integrations.transformers.reading import Unreadable, read  # noqa: E402

NAME = register()
LOGITS, GRADIENTS = 1e-5, 1e-4  # of the largest value
DOOR = ("attention", "attention_with_kv_cache")
# How many attentions a model has, if not one in each of 2 layers.
ATTENTIONS = {"modernbert": 4, "t5": 6, "mt5": 6, "umt5": 6, "bart": 6, "whisper": 6}


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
            if torch.compiler.is_compiling():  # then graphs are looked at
                return out
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
NEW["disable_compile"] = True  # on a GPU; what is compiled is not counted


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
    model: Any, implementation: str, inputs: dict[str, Any], real: Tensor, compiled: Any = None
) -> tuple[Tensor, dict[str, Tensor]]:
    """Results at real positions, and all gradients of a random sum of them."""
    model.set_attn_implementation(implementation)
    model.zero_grad()
    out = (model if compiled is None else compiled)(**inputs)
    y = (out.logits if "logits" in out else out.last_hidden_state)[real.to(model.device)]
    weights = torch.randn(y.shape, generator=torch.Generator().manual_seed(2)).to(y)
    (y * weights).sum().backward()
    return y.detach(), {n: p.grad for n, p in model.named_parameters() if p.grad is not None}


def assert_same(ours: tuple[Any, Any], eager: tuple[Any, Any]) -> None:
    (y, gradients), (expected, of_eager) = ours, eager
    assert (y - expected).abs().max() <= LOGITS * expected.abs().max()
    # A compiled graph gives 0 to what has no part in y, as BERT's pooler.
    assert of_eager.keys() <= gradients.keys()
    assert not any(gradients[name].any() for name in gradients.keys() - of_eager.keys())
    largest = max(g.abs().max() for g in of_eager.values())
    for name, wanted in of_eager.items():
        gradient = gradients[name]
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
    n = ATTENTIONS.get(name, 2)
    assert (calls.forward, calls.backward) == ({"attention": n}, {"attention": n})
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
    assert calls.forward.keys() == {"attention"}
    assert calls.forward.total() == once + 8 * (ATTENTIONS.get(name, 2) - once)


@pytest.mark.matrix
@pytest.mark.parametrize("options", [{}, {"num_beams": 2}, {"cache_implementation": "static"}])
def test_whisper_generates(calls: Calls, device: str, options: dict[str, Any]) -> None:
    model = tiny_model("whisper").to(device)
    sound = inputs_of("whisper", "plain")[0]["input_features"].to(device)
    options = {**options, "max_new_tokens": 6, "do_sample": False}
    expected = model.generate(sound, **options)
    assert not calls.forward
    model.set_attn_implementation(NAME)
    assert torch.equal(model.generate(sound, **options), expected)
    # Its encoder has 2, and each step 2 to words and 2 to sound.
    assert calls.forward.keys() == {"attention"} and calls.forward["attention"] % 4 == 2


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
GENERATE += [
    (name, case) for name in ENCODER_DECODERS for case in ("dynamic", "dynamic, left", "static")
]
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


ROOT = Path(__file__).resolve().parents[1]


def samples(name: str) -> list[str]:
    found = re.findall(r"^```python\n(.*?)^```$", (ROOT / name).read_text(), re.MULTILINE | re.DOTALL)
    return [sample for sample in found if "integrations.transformers" in sample]


@pytest.mark.parametrize("name", ["README.md", "docs/doors.md"])
def test_samples(calls: Calls, name: str) -> None:
    """The lines for a user's model, and its inputs."""
    assert samples(name)
    for sample in samples(name):
        model = tiny_model("llama")
        inputs = {"input_ids": IDS, "attention_mask": LEFT}
        expected = model.generate(**inputs, **NEW)
        for setting, value in NEW.items():
            setattr(model.generation_config, setting, value)
        calls.clear()
        names = {"model": model, "inputs": inputs}
        exec(sample, names)
        if "generate" in sample:
            assert torch.equal(names["tokens"], expected) and calls.forward == {
                "attention_with_kv_cache": 16
            }
        else:
            assert torch.equal(model.generate(**inputs, **NEW), expected)
            assert calls.forward == {"attention": 16}


# --- the kernels, and torch.compile -------------------------------------------------------------------


@pytest.fixture
def kernels(calls: Calls, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Backends that are chosen; on a CPU the interpreter stands in for a GPU."""
    monkeypatch.setattr(backends, "INTERPRETED", not torch.cuda.is_available())
    pytest.importorskip("flashproto.ops.call_cache").forget()  # a call that it has chooses nothing
    return []


@pytest.mark.parametrize(("name", "case"), [("llama", "packed"), ("gpt-oss", "left"), ("t5", "left")])
def test_kernels(calls: Calls, kernels: list[str], device: str, name: str, case: str) -> None:
    """Bands beside intervals, windows and sinks, and a bias, forward and backward."""
    pytest.importorskip("triton")
    with backends.watch_choices(lambda operator, backend, against: kernels.append(backend)):
        check_forward(calls, device, name, case)
    assert "triton" in kernels and {*kernels} <= {"hopper", "triton"}


def longer(inputs: dict[str, Any]) -> dict[str, Any]:
    """With one more token in each sequence."""

    def grown(name: str, x: Tensor) -> Tensor:
        return torch.cat([x, x[:, -1:] + (name == "position_ids")], 1)

    return {n: grown(n, x) if isinstance(x, Tensor) else x for n, x in inputs.items()}


class Graphs:
    """A backend that runs graphs as they are and counts them, and this library's operators in them."""

    def __init__(self) -> None:
        self.graphs = 0
        self.operators: Counter[str] = Counter()

    def __call__(self, module: Any, inputs: Any) -> Any:
        self.graphs += 1
        return aot_autograd(fw_compiler=self.forward, bw_compiler=self.backward)(module, inputs)

    def forward(self, module: Any, inputs: Any) -> Any:
        return self.counted("forward", module)

    def backward(self, module: Any, inputs: Any) -> Any:
        return self.counted("backward", module)

    def counted(self, which: str, module: Any) -> Any:
        for node in module.graph.nodes:  # an operator that writes into its inputs is in a wrapper
            targets = node.target, *[x for x in node.args if isinstance(x, torch._ops.OpOverload)]
            self.operators[which] += "flashproto" in str(targets)
        return make_boxed_func(module)


COMPILED = [
    (name, case)
    for name in (*[*DECODERS][:10], *ENCODERS)
    for case in ("plain", "left", "packed")
    if name in DECODERS or case != "packed"
]


@pytest.mark.parametrize(("name", "case"), some(COMPILED, {("mistral", "packed")}))
def test_compiled(calls: Calls, kernels: list[str], device: str, name: str, case: str) -> None:
    """Two graphs for four lengths, a first one and any, with the kernels' operators in them."""
    pytest.importorskip("triton")
    layers = {"num_hidden_layers": 1} if name == "mistral" else {}  # the one that always runs
    model = tiny_model(name, **layers).to(device)
    inputs, real = inputs_of(name, case)
    inputs = {n: x.to(device) if isinstance(x, Tensor) else x for n, x in inputs.items()}
    torch._dynamo.reset()
    backend = Graphs()
    compiled = torch.compile(model, backend=backend, fullgraph=True)
    for _ in range(4):
        eager = run(model, "eager", inputs, real)
        assert_same(run(model, NAME, inputs, real, compiled), eager)
        inputs, real = longer(inputs), torch.cat([real, real[:, -1:]], 1)
    assert backend.graphs <= 2
    n = (1 if layers else ATTENTIONS.get(name, 2)) * backend.graphs
    assert backend.operators == {"forward": n, "backward": n}


# --- no tensor of queries times keys ----------------------------------------------------------------


class Largest(TorchDispatchMode):
    """How many elements the largest tensor has that is made."""

    numel = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        out = function(*args, **(kwargs or {}))
        for x in out if isinstance(out, (tuple, list)) else (out,):
            if isinstance(x, Tensor):
                self.numel = max(self.numel, x.numel())
        return out


LONG = 4096


def long_inputs(case: str) -> dict[str, Any]:
    given: dict[str, Any] = {"input_ids": torch.ones(1, LONG, dtype=torch.long), "use_cache": False}
    if case == "left":
        given["attention_mask"] = (torch.arange(LONG) >= 5).long()[None]
    if case == "packed":
        given["position_ids"] = torch.arange(LONG)[None] % 1000
    return given


@pytest.mark.parametrize("name", ["llama", "gemma3", "llama4"])
@pytest.mark.parametrize("case", ["plain", "left", "packed"])
def test_masks_are_small(calls: Calls, monkeypatch: pytest.MonkeyPatch, name: str, case: str) -> None:
    """Eager, with attention left out, which on a CPU may make anything."""
    model, given = tiny_model(name, max_position_embeddings=LONG), []

    def attention(q: Tensor, k: Tensor, v: Tensor, **options: Any) -> Tensor:
        given.append(options["mask"])
        return torch.zeros_like(q)

    monkeypatch.setattr(functional, "attention", attention)
    model.set_attn_implementation(NAME)
    with torch.no_grad(), Largest() as largest:
        model(**long_inputs(case))
    assert len(given) == 2
    assert all(mask is None or isinstance(mask, masks.Mask) for mask in given)
    assert largest.numel < LONG * LONG / 4  # logits and the like
    if name != "llama4" and case == "packed":  # a band beside documents, which skips tiles by numbers
        assert all(mask.bands and mask.parts for mask in given)


class Seen(Exception):
    """The graph was looked at."""


@pytest.mark.parametrize("case", ["packed", "left"])
def test_compiled_masks_are_small(calls: Calls, kernels: list[str], device: str, case: str) -> None:
    """The graph of a forward, with attention one operator in it, is made and not run."""
    pytest.importorskip("triton")
    model = tiny_model("mistral", num_hidden_layers=1, max_position_embeddings=LONG).to(device)
    model.set_attn_implementation(NAME)
    inputs = {n: x.to(device) if isinstance(x, Tensor) else x for n, x in long_inputs(case).items()}
    sizes = []

    def look(module: Any, inputs: Any) -> Any:
        values = [n.meta.get("val") for n in module.graph.nodes]
        sizes.extend(x.numel() for x in values if isinstance(x, Tensor))
        assert sum("flashproto.attention" in str(n.target) for n in module.graph.nodes) == 1
        raise Seen

    torch._dynamo.reset()
    backend = aot_autograd(fw_compiler=look)
    with torch.no_grad(), pytest.raises(torch._dynamo.exc.BackendCompilerFailed, match="Seen"):
        torch.compile(model, backend=backend, fullgraph=True)(**inputs)
    assert LONG * VOCABULARY <= max(sizes) < LONG * LONG / 4


# --- mask functions ---------------------------------------------------------------------------------


def attended(mask: Any, B: int, Sq: int, Sk: int, **options: Any) -> tuple[Tensor, ...]:
    """(out [B, Sq, H, D], q, k, v) of the attention function with a mask."""
    module = torch.nn.Module()
    module.is_causal = True
    q, k, v = torch.randn(B, 2, Sq, 8), torch.randn(B, 2, Sk, 8), torch.randn(B, 2, Sk, 8)
    return attend(module, q, k, v, mask, **options)[0], q, k, v


def check_mask(calls: Calls, arguments: dict[str, Any], mask: Any, words: str = "") -> None:
    """A mask of make_mask against sdpa_mask's: pair by pair, and what attention makes of it."""
    expected = masking_utils.sdpa_mask(**arguments)
    Sq, Sk = expected.shape[2:]
    found, dense = mask_of(mask, Sq, Sk)
    assert dense is None, words
    found = masks.Mask() if found is None else found
    assert torch.equal(found.visible(Sq, Sk).expand(expected.shape), expected), words
    out, q, k, v = attended(mask, expected.shape[0], Sq, Sk)
    assert calls.forward == {"attention": 1}
    calls.clear()
    of_torch = torch.nn.functional.scaled_dot_product_attention(q, k, v, expected).transpose(1, 2)
    seen = expected.any(-1).transpose(1, 2)
    torch.testing.assert_close(out[seen[..., 0]], of_torch[seen[..., 0]], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    "seeds", [range(100), pytest.param(range(100, 2100), marks=[pytest.mark.matrix, pytest.mark.slow])]
)
def test_mask_functions(calls: Calls, seeds: range) -> None:
    """What transformers puts together, at random: a change of its functions shows here."""
    kinds: Counter[str] = Counter()
    for seed in seeds:
        words, arguments = random_mask(random.Random(seed))
        check_mask(calls, arguments, make_mask(**arguments), f"seed {seed}: {words}")
        kinds[words] += 1
    assert len(kinds) >= 12


def of_image_and_text(positions: Tensor, blocks: Tensor) -> dict[str, Any]:
    """Packed documents in which blocks of an image see one another."""
    function = masking_utils.remap_positions_for_packed_sequence(
        masking_utils.causal_mask_function, positions
    )
    function = masking_utils.or_masks(function, masking_utils.blockwise_overlay(blocks))
    documents = masking_utils.find_packed_sequence_indices(positions)
    return of_function(
        masking_utils.and_masks(function, masking_utils.packed_sequence_mask_function(documents))
    )


def of_window_and_image(positions: Tensor, blocks: Tensor) -> dict[str, Any]:
    """As Gemma 3 puts it together, with or_mask_function and and_mask_function."""
    function = masking_utils.sliding_window_causal_mask_function(WINDOW)
    function = masking_utils.or_masks(function, masking_utils.blockwise_overlay(blocks))
    function = masking_utils.and_masks(function, masking_utils.sliding_window_overlay(WINDOW))
    return of_function(function, use_vmap=True)


def of_chunks(positions: Tensor, blocks: Tensor) -> dict[str, Any]:
    function = masking_utils.chunked_causal_mask_function(3, positions.argmax(-1))
    return of_function(function)


def of_own(positions: Tensor, blocks: Tensor) -> dict[str, Any]:
    """A function that is not of transformers: 3 tokens back, 1 ahead."""

    def near(batch: Any, head: Any, q: Any, k: Any) -> Any:
        return (q - k < 4) & (k - 1 <= q)

    return of_function(near, use_vmap=True)


def of_function(function: Callable[..., Any], **options: Any) -> dict[str, Any]:
    sizes = {"batch_size": 2, "q_length": TOKENS, "kv_length": TOKENS}
    return {**sizes, "mask_function": function, "allow_is_causal_skip": False, **options}


BLOCKS = torch.tensor(
    [[-1, 0, 0, 0, -1, -1, 1, 1, -1, -1, -1, -1], [0, 0, -1, -1, 1, 1, 1, 1, -1, 2, 2, 2]]
)


@pytest.mark.parametrize("make", [of_image_and_text, of_window_and_image, of_chunks, of_own])
@pytest.mark.parametrize("compiled", [False, True])
def test_mask_functions_are_read(calls: Calls, make: Callable[..., Any], compiled: bool) -> None:
    """Eager, and by torch.compile, where the function itself is made while it traces."""

    def both(positions: Tensor, blocks: Tensor) -> Any:
        return make_mask(**make(positions, blocks))

    torch._dynamo.reset()
    if compiled:
        both = torch.compile(both, backend="eager", fullgraph=True)
    check_mask(calls, make(PACKED, BLOCKS), both(PACKED, BLOCKS))


def every_second(batch: Any, head: Any, q: Any, k: Any) -> Any:
    return (k <= q) & ((q - k) % 2 == 0)


def defined(
    q: Tensor, k: Tensor, v: Tensor, seen: Any, bias: Any = 0, softcap: Any = None, s_aux: Any = None
) -> Tensor:
    """[B, Sq, H, D], as eager attention has it."""
    scores = q @ k.mT * q.shape[-1] ** -0.5
    scores = scores if softcap is None else softcap * torch.tanh(scores / softcap)
    scores = (scores + bias).masked_fill(~seen, -torch.inf)
    if s_aux is not None:
        scores = torch.cat([scores, s_aux[:, None, None].expand(*scores.shape[:3], 1)], -1)
    return (scores.softmax(-1)[..., : k.shape[2]] @ v).transpose(1, 2)


CURVED = [{}, {"softcap": 2.0}, {"s_aux": torch.tensor([0.5, -1.0])}]


@pytest.mark.parametrize("compiled", [False, True])
def test_other_functions_are_tables(calls: Calls, compiled: bool) -> None:
    def ours() -> Any:
        return make_mask(**of_function(every_second, use_vmap=True))

    with pytest.raises(Unreadable):
        read(every_second)
    torch._dynamo.reset()
    mask = (torch.compile(ours, backend="eager", fullgraph=True) if compiled else ours)()
    expected = masking_utils.sdpa_mask(**of_function(every_second, use_vmap=True))
    assert mask.dtype == torch.bool and torch.equal(mask, expected)
    found, _ = mask_of(mask, TOKENS, TOKENS)
    assert found is not None and found.rule is not None and found.rule.dense is mask
    for options in CURVED:
        out, q, k, v = attended(mask, 2, TOKENS, TOKENS, **options)
        assert calls.forward == {"attention": 1}
        calls.clear()
        wanted = defined(q, k, v, expected, **options)
        torch.testing.assert_close(out, wanted, rtol=1e-5, atol=1e-5)


def test_ids_that_come_back_are_a_table(calls: Calls) -> None:
    """Two runs of one id see each other in transformers."""
    ids = torch.tensor([[0, 0, 1, 1, 0, 0, 2, 2, 2, 2, 2, 2]]).expand(2, -1)
    function = masking_utils.and_masks(
        masking_utils.causal_mask_function, masking_utils.packed_sequence_mask_function(ids)
    )
    mask = make_mask(**of_function(function))
    assert mask.dtype == torch.bool and mask[0, 0, 5, 0]
    out, q, k, v = attended(mask, 2, TOKENS, TOKENS)
    torch.testing.assert_close(out, defined(q, k, v, mask), rtol=1e-5, atol=1e-5)
    assert calls.forward == {"attention": 1}


def test_tensors_that_are_intervals(calls: Calls) -> None:
    """Found once for a tensor, and anew where it was written to; one that has other runs is a table."""
    seen = torch.ones(2, 1, TOKENS, TOKENS, dtype=torch.bool).tril()
    seen[0, ..., :3], seen[1, ..., 4] = True, False
    found, bias = mask_of(seen, TOKENS, TOKENS)
    assert found is not None and bias is None and found.rule is None
    assert torch.equal(found.visible(TOKENS, TOKENS), seen)
    assert mask_of(seen, TOKENS, TOKENS)[0] is found
    seen[0, 0, 6, 2] = False
    changed, _ = mask_of(seen, TOKENS, TOKENS)
    assert changed is not None and changed.rule is not None
    assert torch.equal(changed.visible(TOKENS, TOKENS), seen)
    one, _ = mask_of(seen[:, :, -1:], 1, TOKENS)  # of one query, whatever it sees
    assert one is not None and one.rule is None
    assert torch.equal(one.visible(1, TOKENS), seen[:, :, -1:])
    with torch.inference_mode():  # nothing is kept, so nobody asks
        inferred, _ = mask_of(masks.causal().visible(TOKENS, TOKENS)[None, None], TOKENS, TOKENS)
    assert inferred is not None and inferred.rule is not None
    kept = len(runs_of)
    del seen, changed, one
    assert len(runs_of) == kept - 1


def test_no_mask_is_causal_from_the_top(calls: Calls) -> None:
    """In a static cache: the first query sees one key."""
    out, q, k, v = attended(None, 2, 3, 7)
    expected = torch.nn.functional.scaled_dot_product_attention(
        q, k[:, :, :3], v[:, :, :3], is_causal=True
    )
    torch.testing.assert_close(out, expected.transpose(1, 2), rtol=1e-5, atol=1e-5)
    out, q, k, v = attended(None, 2, 1, 7)
    expected = torch.nn.functional.scaled_dot_product_attention(q, k, v)
    torch.testing.assert_close(out, expected.transpose(1, 2), rtol=1e-5, atol=1e-5)
    out, q, k, v = attended(None, 2, 3, 7, is_causal=False)
    expected = torch.nn.functional.scaled_dot_product_attention(q, k, v)
    torch.testing.assert_close(out, expected.transpose(1, 2), rtol=1e-5, atol=1e-5)
    assert calls.forward == {"attention": 3}


@pytest.mark.parametrize("is_causal", [False, True])
def test_masks_decide_and_not_modules(calls: Calls, is_causal: bool) -> None:
    """Decoders whose modules say nothing of it, or the wrong (BigBird-Pegasus)."""
    module = torch.nn.Module()
    module.is_causal = is_causal
    functions = [masking_utils.causal_mask_function, masking_utils.bidirectional_mask_function]
    for function, n in itertools.product(functions, [(TOKENS, TOKENS), (1, TOKENS), (3, TOKENS)]):
        sizes = {"batch_size": 2, "q_length": n[0], "kv_length": n[1], "q_offset": n[1] - n[0]}
        mask = make_mask(**sizes, mask_function=function, allow_is_bidirectional_skip=True)
        expected = masking_utils.sdpa_mask(**sizes, mask_function=function, allow_is_causal_skip=False)
        q, k, v = torch.randn(2, 2, n[0], 8), torch.randn(2, 2, n[1], 8), torch.randn(2, 2, n[1], 8)
        of_torch = torch.nn.functional.scaled_dot_product_attention(q, k, v, expected)
        out = attend(module, q, k, v, mask)[0]
        torch.testing.assert_close(out, of_torch.transpose(1, 2), rtol=1e-5, atol=1e-5)
        assert calls.forward == {"attention": 1}
        calls.clear()


def test_masks_of_other_keys(calls: Calls) -> None:
    """Models that attend to more than their mask says (DeepSeek V4), or make other masks of it."""
    for more in (0, 3):
        mask = make_mask(**of_function(masking_utils.causal_mask_function))
        with pytest.raises(NotImplementedError, match=r"the mask is of 12 queries and 12 keys"):
            attended(mask, 2, TOKENS - 3 + more, TOKENS + more)
    for change in (
        lambda mask: mask[:, :, :, :5],
        lambda mask: 1.0 - mask,
        lambda mask: torch.zeros(2, 1, TOKENS, TOKENS) + mask,
        lambda mask: mask & True,
    ):
        with pytest.raises(NotImplementedError, match="the mask is cut or computed with"):
            change(mask)
    config = transformers.DogeConfig()
    with pytest.raises(NotImplementedError, match=r"config\.model_type is doge"):
        make_mask(**of_function(masking_utils.causal_mask_function), config=config)
    assert not calls.forward


def test_masks_go_where_models_send_them(calls: Calls) -> None:
    """A model in parts on several devices moves its masks; one that cuts them is told."""
    mask = Carrier(masks.causal() & masks.documents(BLOCKS.abs()), (2, 1, TOKENS, TOKENS))
    other = masks.boolean(BLOCKS[0] >= 0) | ~masks.documents(BLOCKS.abs())
    for more in (masks.boolean(BLOCKS[0] >= 0), other):
        both = Carrier(mask.mask & more, mask.shape).to("cpu")
        expected = (mask.mask & more).visible(TOKENS, TOKENS)
        assert torch.equal(both.mask.visible(TOKENS, TOKENS), expected)
        assert all(x.is_meta for x in both.to("meta").mask.all_tensors)
    moved = mask.to("cpu", non_blocking=True)
    assert len(moved.shape) == moved.ndim == 4 and isinstance(moved, masking_utils.BlockMask)
    assert torch.equal(attended(moved, 2, TOKENS, TOKENS)[0].isnan().any(), torch.tensor(False))
    assert moved.to("meta").mask.tensors[0].is_meta
    assert calls.forward == {"attention": 1}


# --- position biases of distances, by patch -----------------------------------------------------------

BIASED = ["t5", "mt5", "umt5"]


def patched(name: str, **options: Any) -> tuple[Any, Any]:
    """(a model whose position biases are tables, what patch did)."""
    model = tiny_model(name, **options)
    return model, patch(model, norms=False, mlps=False, rope=False, loss=False)


def attributes(model: torch.nn.Module) -> dict[str, set[str]]:
    return {name: {*vars(module)} for name, module in model.named_modules()}


def spied(monkeypatch: pytest.MonkeyPatch, answer: Any = None) -> list[dict[str, Any]]:
    """What attention is called with, from now on; answer: in its place."""
    given, own = [], functional.attention

    def attention(q: Tensor, k: Tensor, v: Tensor, **options: Any) -> Any:
        given.append(options | {"keys": k.shape[2], "queries": q.shape[2]})
        return own(q, k, v, **options) if answer is None else answer(q)

    monkeypatch.setattr(functional, "attention", attention)
    return given


@pytest.mark.parametrize("name", BIASED)
@pytest.mark.parametrize("case", ["plain", "left", "right"])
def test_patched_biases(
    calls: Calls, monkeypatch: pytest.MonkeyPatch, device: str, name: str, case: str
) -> None:
    """One table for all layers of T5's encoder, one for the decoder's, none for its cross-attention;
    with another attention and behind undo the model's own bias."""
    model, (inputs, real) = tiny_model(name).to(device), inputs_of(name, case)
    inputs = {n: x.to(device) if isinstance(x, Tensor) else x for n, x in inputs.items()}
    before = attributes(model)
    eager = run(model, "eager", inputs, real)
    assert any("relative_attention_bias" in n for n in eager[1])
    report = patch(model, norms=False, mlps=False, rope=False, loss=False)
    assert_same(run(model, "eager", inputs, real), eager)
    given = spied(monkeypatch)
    assert_same(run(model, NAME, inputs, real), eager)
    assert (calls.forward, calls.backward) == ({"attention": 6}, {"attention": 6})
    tables = [x["relative_bias"] for x in given]
    own = [x for x in tables if x is not None]
    assert len(own) == 4 and len({id(x) for x in own}) == (4 if name == "umt5" else 2)
    assert all(x.shape == (4, 2 * n - 1) for x, n in zip(own, (12, 12, 7, 7), strict=True))
    if name != "umt5":
        assert all(x["bias"] is None for x in given)
    report.undo()
    assert attributes(model) == before
    assert_same(run(model, NAME, inputs, real), eager)
    assert given[-6]["bias"].shape == (1, 4, 12, 12) and given[-6]["relative_bias"] is None


@pytest.mark.parametrize("name", BIASED)
@pytest.mark.parametrize("case", ["dynamic, left", "static", "beams"])
def test_patched_biases_generate(
    calls: Calls, monkeypatch: pytest.MonkeyPatch, name: str, case: str
) -> None:
    """With a cache: queries behind keys, and in a static cache before room for more."""
    options: dict[str, Any] = {**NEW, "attention_mask": LEFT if "left" in case else ALL}
    options |= {"cache_implementation": "static"} if "static" in case else {}
    options |= {"num_beams": 2} if "beams" in case else {}
    expected = tiny_model(name).generate(IDS, **options)
    model, _ = patched(name)
    model.set_attn_implementation(NAME)
    given = spied(monkeypatch)
    assert torch.equal(model.generate(IDS, **options), expected)
    of_steps = [x for x in given if x["queries"] == 1 and x["relative_bias"] is not None]
    # The encoder's 2, then in each step 2 of 4 have a table.
    assert len(given) == 2 + 8 * 4 and len(of_steps) == 8 * 2
    assert all(
        x["relative_bias"].shape[1] - x["relative_offset"] == x["keys"]
        for x in given
        if x["relative_bias"] is not None
    )


def test_a_prompt_of_a_static_cache(calls: Calls) -> None:
    """Several tokens at once, before room for more, and several behind others."""
    found = []
    for implementation in ("eager", NAME):
        model, _ = patched("t5")
        model.set_attn_implementation(implementation)
        config = model.config
        caches = [transformers.StaticCache(config, max_cache_len=n) for n in (10, TOKENS)]
        cache = transformers.EncoderDecoderCache(*caches)
        for part in (slice(0, 4), slice(4, 7), slice(7, 8)):
            with torch.no_grad():
                out = model(input_ids=IDS, decoder_input_ids=IDS[:, part], cache=cache)
            found.append(out.logits)
    for ours, eager in zip(found[3:], found[:3], strict=True):
        assert (ours - eager).abs().max() <= LOGITS * eager.abs().max()
    assert calls.forward == {"attention": 3 * 4 + 3 * 2}


@pytest.mark.parametrize("reentrant", [False, True])
def test_patched_biases_with_checkpointing(calls: Calls, reentrant: bool) -> None:
    inputs, real = inputs_of("t5", "left")
    expected = run(tiny_model("t5"), "eager", inputs, real)
    model, _ = patched("t5", dropout_rate=0.0)
    options = {"use_reentrant": reentrant}
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs=options)
    assert_same(run(model.train(), NAME, inputs, real), expected)
    assert calls.forward == {"attention": 12} and calls.backward == {"attention": 6}


def test_patched_biases_compiled(calls: Calls, kernels: list[str], device: str) -> None:
    """Two graphs for three lengths, a first one and any."""
    pytest.importorskip("triton")
    model, _ = patched("t5", num_layers=1)
    model = model.to(device)
    inputs, real = inputs_of("t5", "left")
    inputs = {n: x.to(device) if isinstance(x, Tensor) else x for n, x in inputs.items()}
    torch._dynamo.reset()
    backend = Graphs()
    compiled = torch.compile(model, backend=backend, fullgraph=True)
    for _ in range(3):
        eager = run(model, "eager", inputs, real)
        assert_same(run(model, NAME, inputs, real, compiled), eager)
        inputs, real = longer(inputs), torch.cat([real, real[:, -1:]], 1)
    assert backend.graphs <= 2


def test_patched_biases_are_small(calls: Calls, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing of queries times keys: in the encoder, the decoder and between them."""
    model, _ = patched("t5")
    spied(monkeypatch, torch.zeros_like)
    model.set_attn_implementation(NAME)
    ids = torch.ones(1, LONG, dtype=torch.long)
    mask = (torch.arange(LONG) >= 5).long()[None]
    with torch.no_grad(), Largest() as largest:
        model(input_ids=ids, attention_mask=mask, decoder_input_ids=ids, use_cache=False)
    assert LONG * VOCABULARY <= largest.numel < LONG * LONG / 4


class Squared(T5Attention):
    """A bias that is not of distances."""

    def compute_bias(self, query_length, key_length, device=None, past_seen_tokens=0):
        made = super().compute_bias(query_length, key_length, device, past_seen_tokens)
        return made * (1 + torch.arange(key_length, device=device))


class OtherArguments(T5Attention):
    def compute_bias(self, block_length):
        return torch.zeros(1, 4, block_length, block_length)


class HandsOnAnother(T5Attention):
    def forward(self, hidden_states, mask=None, key_value_states=None, position_bias=None, **kwargs):
        q = self.q(hidden_states).unflatten(-1, (self.n_heads, -1)).transpose(1, 2)
        if position_bias is None:
            position_bias = self.compute_bias(q.shape[2], q.shape[2], q.device)
        interface = ALL_ATTENTION_FUNCTIONS.get_interface(self.config._attn_implementation, None)
        out, _ = interface(self, q, q, q, mask, position_bias=2 * position_bias)
        return self.o(out.flatten(2)), position_bias, None


@pytest.mark.parametrize(
    ("kind", "why"),
    [
        (Squared, "its bias is not one of distances"),
        (OtherArguments, "compute_bias takes other arguments"),
        (HandsOnAnother, "its bias is another one"),
    ],
)
def test_other_biases_are_left(calls: Calls, kind: Any, why: str) -> None:
    model = tiny_model("t5")
    layer = model.encoder.block[0].layer[0]
    layer.SelfAttention = kind(model.config, has_relative_attention_bias=True, layer_idx=0)
    before = attributes(layer)
    report = patch(model, norms=False, mlps=False, loss=False)
    assert {row.name: row.why for row in report.left} == {"encoder.block.0.layer.0.SelfAttention": why}
    assert attributes(layer) == before and len(report.replaced) == 5


# --- masks of the user's own, dropout, what is refused ------------------------------------------------


def random_tensor_mask() -> Tensor:
    seen = torch.rand(2, 1, TOKENS, TOKENS, generator=torch.Generator().manual_seed(3)) < 0.5
    return seen | torch.eye(TOKENS, dtype=torch.bool)


@pytest.mark.parametrize("name", ["llama", "gemma2", "gpt-oss"])
@pytest.mark.parametrize("kind", ["boolean", "added", "intervals"])
def test_masks_of_the_user(calls: Calls, name: str, kind: str) -> None:
    """A tensor of 4 dimensions, beside softcap and sinks too."""
    own = random_tensor_mask()
    if kind == "intervals":
        prefix = torch.ones(TOKENS, TOKENS, dtype=torch.bool).tril() | (torch.arange(TOKENS) < 3)
        own = prefix.expand(2, 1, -1, -1)
    added = torch.where(own, 0.0, torch.finfo(torch.float32).min)
    model, (inputs, real) = tiny_model(name), inputs_of(name, "plain")
    expected = run(model, "eager", {**inputs, "attention_mask": added}, real)
    given = added if kind == "added" else own
    assert_same(run(model, NAME, {**inputs, "attention_mask": given}, real), expected)
    assert (calls.forward, calls.backward) == ({"attention": 2}, {"attention": 2})


@pytest.mark.parametrize("options", CURVED)
def test_position_bias(calls: Calls, options: dict[str, Any]) -> None:
    """Beside softcap, sinks and masks of every kind, with its gradient."""
    bias = torch.randn(1, 2, TOKENS, TOKENS, requires_grad=True)
    causal, own = torch.ones(TOKENS, TOKENS, dtype=torch.bool).tril(), random_tensor_mask()
    added = torch.where(own, 0.0, -torch.inf)
    documents = masks.causal() & masks.documents(BLOCKS.abs())
    carrier = Carrier(documents, (2, 1, TOKENS, TOKENS))
    cases = (None, causal), (carrier, documents.visible(TOKENS, TOKENS)), (own, own), (added, own)
    for given, seen in cases:
        out, q, k, v = attended(given, 2, TOKENS, TOKENS, position_bias=bias, **options)
        assert calls.forward == {"attention": 1}
        wanted = defined(q, k, v, seen, bias, **options)
        torch.testing.assert_close(out, wanted, rtol=1e-5, atol=1e-5)
        of_ours, expected = (torch.autograd.grad(x.square().sum(), bias)[0] for x in (out, wanted))
        torch.testing.assert_close(of_ours, expected, rtol=1e-4, atol=1e-5)
        calls.clear()


def test_a_bias_is_handed_on(monkeypatch: pytest.MonkeyPatch) -> None:
    """As it is, with the mask beside it, in parts that are small."""
    given: dict[str, Any] = {}

    def attention(q: Tensor, k: Tensor, v: Tensor, **options: Any) -> Tensor:
        given.update(options)
        return torch.zeros_like(q)

    monkeypatch.setattr(functional, "attention", attention)
    bias = torch.randn(1, 2, TOKENS, TOKENS)
    carrier = Carrier(masks.causal() & masks.documents(BLOCKS.abs()), (2, 1, TOKENS, TOKENS))
    attended(carrier, 2, TOKENS, TOKENS, position_bias=bias)
    assert given["bias"] is bias and given["mask"] is carrier.mask


def test_dropout(calls: Calls) -> None:
    """In training alone; each probability is left out or doubled."""
    module = torch.nn.Module()
    module.is_causal = True
    q, k, v = torch.randn(1, 1, 8, 8), torch.randn(1, 1, 8, 8), torch.eye(8)[None, None]
    p = attend(module, q, k, v, None)[0]
    dropped = attend(module, q, k, v, None, dropout=0.5)[0]
    assert calls.forward == {"attention": 2}
    kept = dropped != 0
    torch.testing.assert_close(dropped, torch.where(kept, 2 * p, 0.0))
    assert 0 < (kept & (p > 0)).sum() < (p > 0).sum()
    calls.clear()
    inputs, real = inputs_of("mistral", "left")
    model = tiny_model("mistral", attention_dropout=0.5)
    run(model, NAME, inputs, real)
    assert calls.forward == {"attention": 2}
    calls.clear()
    y, gradients = run(model.train(), NAME, inputs, real)
    assert (calls.forward, calls.backward) == ({"attention": 2}, {"attention": 2})
    assert y.isfinite().all() and all(g.isfinite().all() for g in gradients.values())
    for name in ("gemma2", "gpt-oss"):
        model = tiny_model(name, attention_dropout=0.5).train()
        outs = [run(model, NAME, *inputs_of(name, "plain"))[0] for _ in range(2)]
        assert not torch.equal(*outs)


@pytest.mark.parametrize("reentrant", [False, True])
def test_gradient_checkpointing(calls: Calls, reentrant: bool) -> None:
    inputs, real = inputs_of("gemma3", "left")
    model = tiny_model("gemma3")
    expected = run(model, NAME, inputs, real)
    calls.clear()
    options = {"use_reentrant": reentrant}
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs=options)
    assert_same(run(model.train(), NAME, inputs, real), expected)
    assert calls.forward == {"attention": 4} and calls.backward == {"attention": 2}


def test_a_decoder_as_an_encoder(calls: Calls) -> None:
    model = tiny_model("llama")
    model.config.is_causal = False
    inputs, real = inputs_of("llama", "left")
    expected = run(model, "eager", inputs, real)
    assert_same(run(model, NAME, inputs, real), expected)
    assert calls.forward == {"attention": 2}


def passed_by_models() -> set[str]:
    """Names of all that any model of transformers passes to its attention function."""
    found: set[str] = set()
    for path in Path(transformers.__file__).parent.glob("models/*/modeling_*.py"):
        text = path.read_text()
        for start in re.finditer(r"\battention_interface\(", text):
            depth, end = 1, start.end()
            while depth:
                depth += {"(": 1, ")": -1}.get(text[end], 0)
                end += 1
            call = ast.parse(text[start.start() : end], mode="eval").body
            assert isinstance(call, ast.Call)
            found |= {keyword.arg for keyword in call.keywords if keyword.arg is not None}
    return found


# Windows and positions come as masks too; the others say how flash-attn takes cu_seq_lens_q, or what is
# returned beside the result.
APART = {
    "sliding_window",
    "position_ids",
    "cu_seq_lens_k",
    "max_length_q",
    "max_length_k",
    "deterministic",
    "output_attentions",
}
TAKEN = {"query", "key", "value", "attention_mask", "dropout", "scaling", "is_causal"}
TAKEN |= {"softcap", "s_aux", "position_bias"}


def test_what_models_pass_is_taken_or_refused(calls: Calls) -> None:
    found = passed_by_models()
    assert found >= {"indices", "block_indices", "s_aux", "position_bias", "softcap"}
    refused = found - APART - TAKEN
    assert refused >= {"indices", "block_indices", "sinks", "cu_seq_lens_q"}
    for name in sorted(refused | {"head_mask"}):
        with pytest.raises(NotImplementedError, match=rf"^flashproto in transformers: {name} is given"):
            attended(None, 1, 2, 2, **{name: torch.zeros(1)})
    assert not calls.forward


def test_names(calls: Calls) -> None:
    assert register() == NAME == "proto" and register() == NAME
    assert AttentionInterface().valid_keys().count(NAME) == 1
    for name in ("flashproto", "me/proto", "paged|proto", "", "sdpa", 3):
        with pytest.raises(ValueError, match="register: name is"):
            register(name)
    try:
        model = tiny_model("llama")
        model.set_attn_implementation(register("kept_in_flight"))
        model(input_ids=IDS, use_cache=False)
        assert calls.forward == {"attention": 2}
    finally:
        for interface in (AttentionInterface, AttentionMaskInterface):
            interface._global_mapping.pop("kept_in_flight")
        NAMES.discard("kept_in_flight")


# --- Cache ------------------------------------------------------------------------------------------

CACHED = [name for name in DECODERS if name not in ("llama4", "deepseek-v3")]
CACHED_CASES = [(name, case) for name in CACHED for case in ("plain", "left", "beams")]
CACHED_SAMPLE = {("llama", "plain"), ("gemma2", "left"), ("gpt-oss", "beams"), ("phi3", "left")}
CALL = "attention_with_kv_cache"


@pytest.mark.parametrize(("name", "case"), some(CACHED_CASES, CACHED_SAMPLE))
def test_cache(calls: Calls, device: str, name: str, case: str) -> None:
    """Greedy tokens of transformers' own cache; and each attention is one call, prompt and steps."""
    model, ids = tiny_model(name).to(device), IDS.to(device)
    options = {**NEW, "attention_mask": (ALL if case == "plain" else LEFT).to(device)}
    options |= {"num_beams": 2} if case == "beams" else {}
    expected = model.generate(ids, **options)
    assert not calls.forward
    model.set_attn_implementation(NAME)
    found = model.generate(ids, cache=Cache(model.config, TOKENS + 8), **options)
    assert torch.equal(found, expected)
    assert calls.forward == {CALL: 2 * 8}


def test_cache_on_kernels(calls: Calls, kernels: list[str], device: str) -> None:
    pytest.importorskip("triton")
    model, ids = tiny_model("gpt-oss").to(device), IDS.to(device)
    options = {**NEW, "attention_mask": LEFT.to(device), "max_new_tokens": 3}
    expected = model.generate(ids, **options)
    model.set_attn_implementation(NAME)
    with backends.watch_choices(lambda operator, backend, against: kernels.append(backend)):
        found = model.generate(ids, cache=Cache(model.config, 16), **options)
    assert torch.equal(found, expected)
    assert calls.forward == {CALL: 2 * 3} and {*kernels} == {"triton"}


def test_cache_that_goes_on(calls: Calls) -> None:
    """A second prompt behind the first answer, padded rows with it; then from the start again."""
    model = tiny_model("mistral")
    more = torch.cat([IDS[:, :5], IDS[:, 3:6]], 1)
    answers = []
    cache = Cache(model.config, 40)
    for implementation, own in (("eager", {}), (NAME, {"cache": cache}), (NAME, {"cache": cache})):
        model.set_attn_implementation(implementation)
        calls.clear()
        options = {**NEW, "return_dict_in_generate": True, **own}
        first = model.generate(IDS, attention_mask=LEFT, **options)
        both = torch.cat([first.sequences, more], 1)
        real = torch.cat([LEFT, torch.ones(2, both.shape[1] - TOKENS, dtype=torch.long)], 1)
        options["cache"] = first.cache
        second = model.generate(both, attention_mask=real, **options)
        answers.append(second.sequences)
        cache.reset()
    assert torch.equal(answers[1], answers[0]) and torch.equal(answers[2], answers[0])
    assert calls.forward == {CALL: 2 * 2 * 8}


def test_cache_with_guesses(calls: Calls) -> None:
    """Tokens that were guessed wrong are taken out again."""
    model = tiny_model("gemma3")
    ids = torch.cat([IDS[:1, :6]] * 3, 1)
    options = {**NEW, "attention_mask": torch.ones_like(ids), "prompt_lookup_num_tokens": 3}
    expected = model.generate(ids, **options)
    model.set_attn_implementation(NAME)
    cache = Cache(model.config, 48)
    cropped = []
    crop = cache.crop
    cache.crop = lambda n: (cropped.append(n), crop(n))
    assert torch.equal(model.generate(ids, cache=cache, **options), expected)
    assert min(cropped) < 0 and calls.forward.keys() == {CALL} and calls.forward.total() < 2 * 12
    with pytest.raises(ValueError, match=r"crop is 3; it takes 0 or a negative"):
        crop(3)


def test_rows_of_a_cache(calls: Calls) -> None:
    """Kept, repeated and put in another order: as if the model had read them so."""
    model = tiny_model("llama")
    model.set_attn_implementation(NAME)
    ids, padding = IDS[[1, 1, 0, 0]], LEFT[[1, 1, 0, 0]]

    def after(cache: Any, ids: Tensor, padding: Tensor) -> Tensor:
        step = {"position_ids": padding.sum(-1, keepdim=True), "cache": cache}
        real = torch.cat([padding, padding[:, -1:]], 1)
        return model(ids[:, :1], attention_mask=real, **step).logits

    def read_in(ids: Tensor, padding: Tensor) -> Any:
        cache = Cache(model.config, 16)
        positions = (padding.cumsum(-1) - 1).clamp(min=0)
        model(ids, attention_mask=padding, position_ids=positions, cache=cache)
        return cache

    with torch.no_grad():
        expected = after(read_in(ids, padding), ids, padding)
        cache = read_in(IDS, LEFT)
        cache.batch_repeat_interleave(2)
        cache.reorder_cache(torch.tensor([2, 3, 0, 1]))
        torch.testing.assert_close(after(cache, ids, padding), expected, rtol=1e-5, atol=1e-5)
        cache = read_in(IDS, LEFT)
        cache.batch_select_indices(torch.tensor([1]))
        found = after(cache, ids[:1], padding[:1])
        torch.testing.assert_close(found, expected[:1], rtol=1e-5, atol=1e-5)
    assert calls.forward == {CALL: 2 * 6}


def read_on(model: Any, cache: Any, parts: list[tuple[int, Tensor | None]], ids: Tensor) -> Tensor:
    """Logits of parts of ids, one behind the other, each of some tokens and with an attention mask."""
    found, at = [], 0
    with torch.no_grad():
        for n, mask in parts:
            positions = torch.arange(at, at + n).expand(len(ids), -1)
            given = {"attention_mask": mask, "position_ids": positions, "cache": cache}
            found.append(model(ids[:, at : at + n], **given).logits)
            at += n
    return torch.cat(found, 1)


def test_padding_that_changes(calls: Calls) -> None:
    """Each part's mask counts; one without it has no padding; rows of padding alone give anything."""
    of_none = LEFT.clone()
    of_none[0] = 0
    cases = [(8, None), (2, LEFT[:, :10]), (2, None)], [(8, None), (2, LEFT[:, :10]), (2, ALL)]
    for parts in (*cases, [(12, of_none)]):
        own, model = tiny_model("llama"), tiny_model("llama")
        expected = read_on(own, transformers.DynamicCache(config=own.config), parts, IDS)
        model.set_attn_implementation(NAME)
        found = read_on(model, Cache(model.config, 16), parts, IDS)
        real = slice(1, 2) if len(parts) == 1 else slice(0, 2)
        torch.testing.assert_close(found[real], expected[real], rtol=1e-4, atol=1e-4)
        assert found.isfinite().all()


@pytest.mark.parametrize("n", [1, 2])
def test_holes_in_later_steps(calls: Calls, n: int) -> None:
    """Of one token too, as of rows that are finished."""
    model = tiny_model("llama")
    model.set_attn_implementation(NAME)
    grown = torch.ones(2, TOKENS, dtype=torch.long)
    finished, hole = grown.clone(), grown.clone()
    finished[0, -1], hole[0, 5] = 0, 0
    for mask in (finished, hole):
        with pytest.raises(NotImplementedError, match="attention_mask is with holes"):
            read_on(model, Cache(model.config, 16), [(TOKENS - n, None), (n, mask)], IDS)
    with pytest.raises(ValueError, match=rf"attention_mask is of {n} tokens; it takes one of all 12"):
        read_on(model, Cache(model.config, 16), [(TOKENS - n, None), (n, grown[:, :n])], IDS)


def test_a_cache_of_other_sequences(calls: Calls) -> None:
    """Emptied, it takes other numbers of them and dtypes; with tokens in it, it says so."""
    model = tiny_model("llama")
    alone = model.generate(IDS[:1], **NEW)
    model.set_attn_implementation(NAME)
    cache = Cache(model.config, 32)
    model.generate(IDS, cache=cache, **NEW)
    with torch.no_grad(), pytest.raises(ValueError, match=r"Cache is of 2 sequences in torch\.float32"):
        model(IDS[:1], cache=cache)
    cache.reset()
    assert torch.equal(model.generate(IDS[:1], cache=cache, **NEW), alone)
    cache.reset()
    model.bfloat16().generate(IDS, cache=cache, **NEW)
    assert cache.layers[0].k_cache.dtype == torch.bfloat16
    cache.crop(-64)
    assert cache.get_seq_length() == 0 and not cache.layers[0].lengths.any()


def test_cache_under_autocast(calls: Calls) -> None:
    """Queries and keys that RoPE made float32 beside values in bfloat16."""
    model = tiny_model("llama")
    with torch.no_grad(), torch.autocast("cpu", dtype=torch.bfloat16):
        expected = model(IDS, attention_mask=LEFT).logits[LEFT.bool()]
        model.set_attn_implementation(NAME)
        cache = Cache(model.config, 16)
        found = read_on(model, cache, [(8, LEFT[:, :8]), (1, LEFT[:, :9]), (3, LEFT)], IDS)
    assert cache.layers[0].k_cache.dtype == torch.bfloat16
    assert calls.forward == {CALL: 6}
    assert (found[LEFT.bool()] - expected).abs().max() < 0.05 * expected.abs().max()


def test_room(calls: Calls) -> None:
    """Tokens that have no place are an error before anything is written."""
    model = tiny_model("llama")
    model.set_attn_implementation(NAME)
    cache = Cache(model.config, room=TOKENS + 2)
    with torch.no_grad():
        for new in (slice(0, TOKENS), slice(0, 2)):
            model(IDS[:, new], cache=cache)
        before = [(x.k_cache.clone(), x.lengths.clone()) for x in cache.layers]
        calls.clear()
        with pytest.raises(ValueError, match=r"room for 14 tokens; it takes at least 15 .* max_new"):
            model(IDS[:, :1], cache=cache)
    assert not calls.forward and cache.get_seq_length() == TOKENS + 2 == cache.get_max_length()
    for layer, (keys, lengths) in zip(cache.layers, before, strict=True):
        assert torch.equal(layer.k_cache, keys) and torch.equal(layer.lengths, lengths)


@pytest.mark.parametrize("name", ["llama", pytest.param("gemma3", marks=pytest.mark.matrix)])
def test_compiled_step(calls: Calls, kernels: list[str], device: str, name: str) -> None:
    """Two graphs for all steps, as the padding grows; the device tells of tokens without room."""
    pytest.importorskip("triton")
    model = tiny_model(name).to(device)
    steps, room = 4, TOKENS + 3
    options = {**NEW, "attention_mask": LEFT.to(device), "max_new_tokens": steps + 1}
    expected = model.generate(IDS.to(device), **options)[:, TOKENS:]
    model.set_attn_implementation(NAME)
    torch._dynamo.reset()
    backend = Graphs()
    step = torch.compile(model.forward, backend=backend, fullgraph=True)
    cache, padding, ids, found = Cache(model.config, room), LEFT.to(device), IDS.to(device), []
    with torch.no_grad():
        for n in range(steps + (device == "cpu")):  # on a GPU such an error ends its use
            positions = (padding.cumsum(-1) - 1).clamp(min=0)[:, -ids.shape[1] :]
            given = {"attention_mask": padding, "position_ids": positions, "cache": cache}
            if n == steps:
                with pytest.raises(RuntimeError, match="more tokens than Cache has room for"):
                    step(ids, **given)
                break
            ids = (step if n else model)(ids, **given).logits[:, -1:].argmax(-1)
            found.append(ids)
            padding = torch.cat([padding, padding[:, -1:]], 1)
    assert torch.equal(torch.cat(found, 1), expected[:, :steps])
    assert [x.tokens for x in cache.layers] == [room] * 2
    assert calls.forward == {CALL: 2} and backend.graphs <= 2
    assert backend.operators["forward"] == backend.graphs * 2 * 2  # to append, and to attend


def test_generate_compiles_its_steps(calls: Calls) -> None:
    """transformers does so on GPUs, where a cache says that it can be."""
    model = tiny_model("gpt-oss", num_hidden_layers=1, layer_types=["sliding_attention"])
    options = {**NEW, "attention_mask": LEFT, "disable_compile": False}
    expected = model.generate(IDS, **options)
    model.set_attn_implementation(NAME)
    compiling = transformers.CompileConfig(backend="aot_eager", fullgraph=True, mode=None)
    compiling._compile_all_devices = True
    cache = Cache(model.config, 32)
    torch._dynamo.reset()
    found = model.generate(IDS, cache=cache, compile_config=compiling, **options)
    assert torch.equal(found, expected)
    assert calls.forward == {CALL: 1} and cache.layers[0].counted is None  # the prompt; steps compiled


def test_generate_compiles_steps_of_patched_models(calls: Calls, device: str) -> None:
    """Keys are then a result of an operator with several, which torch 2.11 treats in its own way."""
    model, ids = tiny_model("llama").to(device), IDS.to(device)
    options = {**NEW, "attention_mask": LEFT.to(device), "disable_compile": False}
    expected = model.generate(ids, **options)
    model.set_attn_implementation(NAME)
    patch(model)
    compiling = transformers.CompileConfig(backend="aot_eager", fullgraph=True, mode=None)
    compiling._compile_all_devices = True
    torch._dynamo.reset()
    found = model.generate(ids, cache=Cache(model.config, 32), compile_config=compiling, **options)
    assert torch.equal(found, expected)


def refused_by_cache(config: Any, match: str, room: Any = 16, error: Any = NotImplementedError) -> None:
    with pytest.raises(error, match=match):
        Cache(config, room)


def test_what_a_cache_refuses(calls: Calls) -> None:
    refused_by_cache(tiny_model("llama4").config, "layers of 'chunked_attention'")
    refused_by_cache(tiny_model("deepseek-v3").config, r"caches latents \(MLA\)")
    for name in ("t5", "bart", "whisper"):
        refused_by_cache(tiny_model(name).config, "is an encoder-decoder")
    model = tiny_model("llama")
    for room in (0, -1):
        refused_by_cache(model.config, "room is", room, ValueError)
    refused_by_cache(model.config, "room is", "16", TypeError)
    for other in ("eager", "sdpa"):
        model.set_attn_implementation(other)
        match = rf"attn_implementation is {other}; it takes .*: proto"
        with pytest.raises(ValueError, match=match):
            model.generate(IDS, attention_mask=LEFT, cache=Cache(model.config, 32), **NEW)
    model.set_attn_implementation(NAME)
    holes = ALL.clone()
    holes[0, 4] = 0
    for padding in (RIGHT, holes):
        with pytest.raises(NotImplementedError, match="attention_mask is with holes"):
            model.generate(IDS, attention_mask=padding, cache=Cache(model.config, 32), **NEW)
    with torch.no_grad():
        with pytest.raises(NotImplementedError, match="attention_mask is a tensor of shape"):
            model(IDS, attention_mask=random_tensor_mask(), cache=Cache(model.config, 32))
        with pytest.raises(NotImplementedError, match=r"dropout is 0\.5"):
            dropping = tiny_model("llama", attention_dropout=0.5).train()
            dropping.set_attn_implementation(NAME)
            dropping(IDS, cache=Cache(model.config, 32))
        with pytest.raises(NotImplementedError, match="the model's mask is a mask of its own"):
            sizes = {"batch_size": 2, "q_length": TOKENS}
            length, offset = Cache(model.config, 32).get_mask_sizes(TOKENS, 0)
            own = of_function(every_second, kv_length=length, kv_offset=offset)
            make_mask(**{**own, **sizes, "kv_length": length, "kv_offset": offset})
        with pytest.raises(NotImplementedError, match="offloading"):
            Cache(model.config, 32).layers[0].offload()
    cache = Cache(model.config, 32)
    with pytest.raises(ValueError, match="q is a tensor that requires grad"):
        model(IDS, cache=cache)
    assert not calls.forward and cache.get_seq_length() == 0


def test_a_model_that_changes_its_keys_is_told(calls: Calls) -> None:
    """What is attended to is not what was cached: seen by the prompt's mask, or at the next call."""
    model = tiny_model("llama")
    model.set_attn_implementation(NAME)
    cache = Cache(model.config, 32)
    update = cache.update
    cache.update = lambda *args, **options: tuple(x * 1 for x in update(*args, **options))
    with torch.no_grad():
        for _ in range(2):
            with pytest.raises(NotImplementedError, match="not to the keys that it caches"):
                model(IDS, cache=cache, attention_mask=LEFT)
    assert not calls.forward


def test_keys_are_put_there_once(calls: Calls) -> None:
    """Models that attend to the same keys twice (DiffLlama's)."""
    config = transformers.DiffLlamaConfig(**DECODER)
    model = transformers.DiffLlamaForCausalLM._from_config(config, attn_implementation=NAME)
    cache = Cache(config, 32)
    with torch.no_grad(), pytest.raises(NotImplementedError, match="not to the keys that it caches"):
        model(IDS, cache=cache)
    assert calls.forward == {CALL: 1}


def test_models_with_other_masks(calls: Calls) -> None:
    """Masks without the window that the config has (Moshi's), and layers that read keys (Mllama's)."""
    options = {"sliding_window": WINDOW, "ffn_dim": 64, "num_codebooks": 1}
    config = transformers.MoshiConfig(**DECODER, **options)
    model = transformers.MoshiForCausalLM._from_config(config, attn_implementation=NAME)
    match = "lets a query see is all tokens back; it takes 3 tokens back"
    for mask in (None, LEFT):
        with torch.no_grad(), pytest.raises(NotImplementedError, match=match):
            model(IDS, attention_mask=mask, cache=Cache(config, 32))
    with pytest.raises(NotImplementedError, match="not to the keys that it caches"):
        assert Cache(config, 32).layers[0].keys
    assert not calls.forward
