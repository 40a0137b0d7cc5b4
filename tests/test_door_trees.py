"""Rollouts packed as trees of their prefixes, against each rollout alone."""

from __future__ import annotations

import dataclasses
import doctest
import importlib
import inspect
import re
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from door_calls import Calls, counted, run_examples, section
from example_scripts import EXAMPLES
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

import flashproto
from flashproto import backends, masks, nn
from flashproto.integrations import trees

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
V = 16
PROMPT = [3, 1, 4, 1, 5]
TURN = [*PROMPT, 9, 2]
# Branches behind a prompt and a turn, the same twice, a prefix of another, another tree, one and none.
ROLLOUTS = [[*TURN, 6, 5], [*TURN, 3], [*PROMPT, 8, 9, 7], [*TURN, 3], PROMPT, [2, 7, 1], [2], []]
LENGTHS = [len(x) for x in ROLLOUTS]
LONGEST = max(LENGTHS)
LLAMA = {"norm": "rms", "mlp": "swiglu", "positions": "rope", "bias": False, "n_kv_heads": 2}
MODELS: dict[str, dict[str, Any]] = {
    "learned": {},
    "rope": LLAMA,
    "softcap and sinks": LLAMA | {"softcap": 2.0, "sinks": True},
}
CONFIG = nn.GPTConfig(vocab_size=V, context=LONGEST, n_layers=2, n_heads=4, d_model=32)
short = st.lists(st.lists(st.integers(0, 2), max_size=7), max_size=8)


def gpt(parts: dict[str, Any], impl: str | None, dtype: torch.dtype) -> nn.GPT:
    """A model far from its initialisation, whose context is the longest rollout, less than the row."""
    torch.manual_seed(0)
    model = nn.GPT(dataclasses.replace(CONFIG, **parts), impl=impl, dtype=dtype, device=DEVICE)
    with torch.no_grad():
        for p in model.parameters():
            p.add_(0.1 * torch.randn_like(p))
    return model


def of_trees(model: nn.GPT, packed: trees.PackedTree) -> Tensor:
    logits, _ = model(packed.tokens[None], mask=packed.mask, positions=packed.positions)
    return packed.by_rollout(packed.logprobs(logits))


def alone(logits_of: Callable[[Tensor], Tensor], rollouts: list[list[int]]) -> Tensor:
    """The log probabilities [R, L] of each rollout in a call of its own."""
    rows = []
    for ids in rollouts:
        row = torch.zeros(max(map(len, rollouts)), dtype=torch.float64, device=DEVICE)
        if len(ids) > 1:
            x = torch.tensor(ids, device=DEVICE)
            found = logits_of(x[None])[0, :-1].log_softmax(-1).gather(-1, x[1:, None])[:, 0]
            row = torch.cat((row[:1], found.double(), row[len(ids) :]))
        rows.append(row)
    return torch.stack(rows)


def difference(loss: Tensor, other: Tensor, model: torch.nn.Module) -> float:
    """The largest relative difference of a parameter's gradient, by norms."""
    leaves = list(model.parameters())
    pairs = zip(*(torch.autograd.grad(x, leaves) for x in (loss, other)), strict=True)
    return max(float((a - b).norm() / b.norm()) for a, b in pairs)


@pytest.fixture
def default() -> Iterator[None]:
    """Kernels where there is a GPU, not Triton's interpreter."""
    before = backends.get_default()
    backends.set_default(None if DEVICE.type == "cuda" else "torch")
    yield
    backends.set_default(before)


# --- the tree -------------------------------------------------------------------------------------


@given(short)
@settings(max_examples=100)
def test_a_prefix_is_there_once_and_sees_itself(rollouts: list[list[int]]) -> None:
    packed = trees.pack(rollouts)
    prefixes = {tuple(x[: n + 1]) for x in rollouts for n in range(len(x))}
    T = packed.tokens.shape[0]
    assert T == packed.used == len(prefixes)
    assert packed.saved == sum(map(len, rollouts)) - T
    assert packed.paths.shape == (len(rollouts), max(map(len, rollouts), default=0))
    sees = torch.zeros(T, T, dtype=torch.bool)
    for ids, path, n in zip(rollouts, packed.paths, packed.lengths.tolist(), strict=True):
        rows, rest = path[:n], path[n:]
        assert packed.tokens[rows].tolist() == ids
        assert packed.positions[rows].tolist() == list(range(n))
        assert packed.parents[rows].tolist() == [-1, *rows[:-1].tolist()][:n]
        assert (rest == -1).all()
        sees[rows[:, None], rows] = torch.ones(n, n).tril().bool()
    assert torch.equal(packed.mask.visible(T, T).view(T, T), sees)
    root = packed.parents < 0
    assert torch.equal(packed.targets, packed.tokens.masked_fill(root, -100))


@given(short, st.integers(0, 5))
@settings(max_examples=30)
def test_padding_is_behind_the_tokens_and_sees_itself(rollouts: list[list[int]], more: int) -> None:
    packed = trees.pack(rollouts)
    used = packed.used
    padded = trees.pack(rollouts, pad_to=used + more)
    assert (padded.used, padded.saved) == (used, packed.saved)
    for name, value in (("tokens", 0), ("positions", 0), ("parents", -1), ("targets", -100)):
        row = getattr(padded, name)
        assert torch.equal(row[:used], getattr(packed, name))
        assert row[used:].tolist() == [value] * more
    assert torch.equal(padded.paths, packed.paths)
    seen = padded.mask.visible(used + more, used + more)[0, 0]
    assert torch.equal(seen[used:], torch.eye(used + more)[used:].bool())
    assert not seen[:used, used:].any()


@given(short.filter(bool))
@settings(max_examples=30)
def test_sums_are_the_transpose(rollouts: list[list[int]]) -> None:
    packed = trees.pack(rollouts)
    x = torch.randn(packed.used, 3, dtype=torch.float64, requires_grad=True)
    w = torch.randn(*packed.paths.shape, 3, dtype=torch.float64)
    spread = packed.by_rollout(x)
    for row, path in zip(spread, packed.paths.tolist(), strict=True):
        for y, at in zip(row, path, strict=True):
            assert torch.equal(y, x[at] if at >= 0 else torch.zeros(3).double())
    summed = packed.by_token(w)
    torch.testing.assert_close((spread * w).sum(), (x * summed).sum())
    torch.testing.assert_close(torch.autograd.grad((spread * w).sum(), x)[0], summed)
    assert torch.equal(packed.by_rollout(x[None]), spread)


def test_tensors_and_their_device() -> None:
    want = trees.pack(ROLLOUTS)
    given = [torch.tensor(x, dtype=torch.int32, device=DEVICE) for x in ROLLOUTS]
    for packed in (trees.pack(given), trees.pack(ROLLOUTS, device=DEVICE), trees.pack(iter(given))):
        for name in ("tokens", "positions", "parents", "targets", "paths", "lengths"):
            x = getattr(packed, name)
            assert x.dtype == torch.int64 and x.device.type == DEVICE.type
            assert torch.equal(x.cpu(), getattr(want, name))
    assert repr(want) == f"PackedTree(8 rollouts, {sum(LENGTHS)} tokens in 16 rows: 26 saved, 61.9%)"


# --- losses and gradients -------------------------------------------------------------------------

# Under the interpreter kernels take seconds: a model with everything is enough.
CASES = [("reference", name) for name in MODELS]
CASES += [("torch", "learned"), ("torch", "rope"), ("triton", "softcap and sinks")]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("impl", "name"), [case for case in CASES if not backends.device_reasons(case[0], DEVICE)]
)
def test_gradients_are_those_of_each_rollout_alone(impl: str, name: str) -> None:
    """Of a sum in which each token of each rollout has a weight of its own."""
    dtype = torch.float64 if impl == "reference" else torch.float32
    model, packed = gpt(MODELS[name], impl, dtype), trees.pack(ROLLOUTS, device=DEVICE, pad_to=18)
    got, want = of_trees(model, packed), alone(lambda x: model(x)[0], ROLLOUTS)
    tolerance = 1e-12 if dtype == torch.float64 else 1e-5
    torch.testing.assert_close(got.double(), want, rtol=tolerance, atol=tolerance)
    weights = torch.randn(len(ROLLOUTS), LONGEST, dtype=torch.float64, device=DEVICE)
    assert difference((got * weights).sum(), (want * weights).sum(), model) < tolerance


@pytest.mark.parametrize("parts", MODELS.values(), ids=MODELS)
def test_a_loss_that_is_no_sum(parts: dict[str, Any]) -> None:
    """PPO's: the same token is clipped in one rollout and not in another."""
    model, packed = gpt(parts, "reference", torch.float64), trees.pack(ROLLOUTS, device=DEVICE)
    got, want = of_trees(model, packed), alone(lambda x: model(x)[0], ROLLOUTS)
    old = want.detach() + 0.3 * torch.randn_like(want)
    advantages = torch.randn(len(ROLLOUTS), 1, dtype=torch.float64, device=DEVICE)
    answer = torch.arange(LONGEST, device=DEVICE) < packed.lengths[:, None]

    def loss(logprobs: Tensor) -> Tensor:
        ratio = (logprobs - old).exp()
        gain = torch.minimum(ratio * advantages, ratio.clamp(0.8, 1.2) * advantages)
        return (gain * answer).sum() / answer.sum()

    assert difference(loss(got), loss(want), model) < 1e-12


def test_weights_of_tokens_and_targets_of_parents() -> None:
    """A weighted sum is one of rows, and linear_cross_entropy has it without the logits."""
    model, packed = gpt({}, "reference", torch.float32), trees.pack(ROLLOUTS, device=DEVICE, pad_to=18)
    hidden: list[Tensor] = []
    model.norm.register_forward_hook(lambda *x: hidden.append(x[-1]))
    logits, _ = model(packed.tokens[None], mask=packed.mask, positions=packed.positions)
    logprobs = packed.logprobs(logits)
    assert (logprobs[packed.parents < 0] == 0).all() and (logprobs[packed.parents >= 0] < 0).all()
    h = (hidden[0][0] if isinstance(hidden[0], tuple) else hidden[0])[0]
    fused = flashproto.linear_cross_entropy(
        h[packed.parents], model.embedding.weight, packed.targets, reduction="none"
    )
    torch.testing.assert_close(fused, -logprobs, rtol=1e-5, atol=1e-5)
    weights = torch.randn(len(ROLLOUTS), LONGEST, device=DEVICE)
    weights[:, : len(PROMPT)] = 0
    want = (alone(lambda x: model(x)[0], ROLLOUTS) * weights).sum()
    got = -(packed.by_token(weights) * fused).sum()
    assert got.item() == pytest.approx(want.item(), rel=1e-5)
    assert difference(got, want, model) < 1e-5


def test_log_probabilities_of_bfloat16_are_not_rounded() -> None:
    packed = trees.pack(ROLLOUTS, device=DEVICE)
    logits = (20 * torch.randn(1, packed.used, V, device=DEVICE)).bfloat16()
    got, want = packed.logprobs(logits), packed.logprobs(logits.double())
    assert got.dtype == torch.float32 and want.dtype == torch.float64
    torch.testing.assert_close(got.double(), want, rtol=1e-6, atol=1e-5)


@pytest.mark.parametrize("rollouts", [[], [[]], [[], []], [[5]], [[5], [5]]], ids=str)
def test_what_predicts_nothing(rollouts: list[list[int]]) -> None:
    model, packed = gpt({}, "reference", torch.float32), trees.pack(rollouts, device=DEVICE)
    got = of_trees(model, packed)
    assert torch.equal(got, torch.zeros(packed.paths.shape, device=DEVICE))
    for gradient in torch.autograd.grad(got.sum(), list(model.parameters())):
        assert not gradient.any()
    whole = trees.pack(rollouts, device=DEVICE, pad_to=4)
    assert torch.equal(of_trees(model, whole), got)


# --- what is refused ------------------------------------------------------------------------------

IDS = "it takes a list of token ids, or an integer tensor"


@pytest.mark.parametrize(
    ("call", "kind", "said"),
    [
        (lambda: trees.pack(3), TypeError, "pack: sequences is 3; it takes an iterable"),
        (lambda: trees.pack([3]), TypeError, rf"pack: sequences\[0\] is 3; {IDS}"),
        (lambda: trees.pack([[1], [1.5]]), TypeError, rf"pack: sequences\[1\] is \[1.5\]; {IDS}"),
        (lambda: trees.pack([[True]]), TypeError, rf"sequences\[0\] is \[True\]; {IDS}"),
        (lambda: trees.pack(["ab"]), TypeError, rf"sequences\[0\] is 'ab'; {IDS}"),
        (lambda: trees.pack([[[1], [2, 3]]]), TypeError, rf"sequences\[0\] is .*; {IDS}"),
        (lambda: trees.pack(torch.ones(2, 2)), TypeError, r"sequences\[0\] is of dtype torch.float32"),
        (
            lambda: trees.pack([[1, 2]], pad_to=1),
            ValueError,
            "pad_to is 1; it takes at least the 2 tok",
        ),
        (lambda: trees.pack([[1, 2]], pad_to=2.0), TypeError, "pack: pad_to is 2.0; it takes"),
    ],
)
def test_what_are_no_rollouts(call: Callable[[], Any], kind: type[Exception], said: str) -> None:
    with pytest.raises(kind, match=said):
        call()


def test_tensors_of_other_shapes() -> None:
    packed = trees.pack([[1, 2], [1, 3, 4]])
    for call, x, kind in (
        ("logprobs", torch.zeros(2, 4, V), ValueError),
        ("logprobs", torch.zeros(3, V), ValueError),
        ("logprobs", torch.zeros(4), ValueError),
        ("logprobs", torch.zeros(4, V).long(), TypeError),
        ("logprobs", None, TypeError),
        ("by_rollout", torch.zeros(3), ValueError),
        ("by_rollout", torch.tensor(0.0), ValueError),
        ("by_token", torch.zeros(4), ValueError),
        ("by_token", torch.zeros(2, 4), ValueError),
        ("by_token", [[0.0]], TypeError),
    ):
        with pytest.raises(kind, match=rf"^PackedTree.{call}: (x|logits) is .*; it takes "):
            getattr(packed, call)(x)


def test_windows_are_refused() -> None:
    """A window counts rows: one as long as the longest rollout would hide some of the prompt."""
    packed = trees.pack(ROLLOUTS, device=DEVICE)
    for pattern in (None, "LS"):
        model = gpt(LLAMA | {"window": 3, "window_pattern": pattern}, None, torch.float32)
        with pytest.raises(ValueError, match="None in a model with windows, which count tokens of the"):
            of_trees(model, packed)
    prompt, T = packed.paths[0, : len(PROMPT)], packed.used
    seen = (packed.mask & masks.window(LONGEST)).visible(T, T)[0, 0]
    last = packed.paths[0, LENGTHS[0] - 1]
    assert packed.mask.visible(T, T)[0, 0, last, prompt].all() and not seen[last, prompt].all()


def test_positions_of_a_gpt() -> None:
    """[S] and [B, S]; 0 to S - 1 are those that it has without."""
    tokens = torch.randint(V, (2, 7), device=DEVICE)
    rows = torch.arange(7, device=DEVICE)
    for parts in MODELS.values():
        model = gpt(parts, "reference", torch.float64)
        want = model(tokens)[0]
        for positions in (rows, rows.int(), rows.expand(2, 7)):
            torch.testing.assert_close(model(tokens, positions=positions)[0], want)
        back = model(tokens, positions=torch.stack((rows, rows.flip(0))))[0]
        torch.testing.assert_close(back[0], want[0])
        assert (back[1] - want[1]).abs().max() > 1e-3


def test_positions_that_do_not_fit() -> None:
    model = gpt({}, None, torch.float32)
    tokens, at = torch.zeros(2, 5, dtype=torch.int64, device=DEVICE), torch.arange(5, device=DEVICE)
    cu = torch.tensor([0, 5], dtype=torch.int32, device=DEVICE)
    for options, kind, said in (
        ({"positions": [0] * 5}, TypeError, r"positions is \[0, 0, 0, 0, 0\]; it takes an int32 or"),
        ({"positions": at.float()}, TypeError, "positions is of dtype torch.float32"),
        ({"positions": at[:4]}, ValueError, r"positions is of shape \[4\]; it takes \[S\] or \[B, S\]"),
        ({"positions": at.expand(3, 5)}, ValueError, r"positions is of shape \[3, 5\]"),
        ({"positions": at, "documents": tokens}, ValueError, "documents is .* None where positions is"),
        ({"positions": at, "cu_seqlens": cu}, ValueError, "cu_seqlens is .* None where positions is"),
        ({"positions": at, "cache": model.make_cache(2)}, ValueError, "positions is .* where cache is"),
    ):
        with pytest.raises(kind, match=f"^GPT: {said}"):
            model(tokens, **options)
    if DEVICE.type == "cpu":
        for shift in (-1, LONGEST - 4):
            with pytest.raises(ValueError, match=rf"positions is from {shift} to .*1, {LONGEST - 1}"):
                model(tokens, positions=at + shift)


# --- transformers ---------------------------------------------------------------------------------


@pytest.mark.usefixtures("default")
def test_a_model_of_transformers(monkeypatch: pytest.MonkeyPatch) -> None:
    """Log probabilities and gradients, on the kernels' mask; layers with windows refuse it."""
    pytest.importorskip("transformers")
    tiny_models = importlib.import_module("tiny_models")
    door = importlib.import_module("flashproto.integrations.transformers")
    attention = importlib.import_module("flashproto.integrations.transformers.attention")
    calls: Calls = counted(monkeypatch, attention.functional)
    packed = trees.pack(ROLLOUTS, device=DEVICE)

    def made(name: str) -> Any:
        model = tiny_models.tiny_model(name).to(DEVICE)
        model.set_attn_implementation(door.register())
        return model

    def logits(model: Any) -> Tensor:
        seen = door.attention_mask(packed.mask, packed.used)
        ids, at = packed.tokens[None], packed.positions[None]
        return model(ids, attention_mask=seen, position_ids=at, use_cache=False).logits

    for name in ("llama", "qwen3"):
        model = made(name)
        calls.forward.clear()
        got = packed.by_rollout(packed.logprobs(logits(model)))
        assert calls.forward == {"attention": 2}
        want = alone(lambda x, model=model: model(x, use_cache=False).logits, ROLLOUTS)
        torch.testing.assert_close(got.double(), want, rtol=1e-5, atol=1e-5)
        weights = torch.randn_like(want)
        assert difference((got * weights).sum(), (want * weights).sum(), model) < 1e-5
    for name in ("mistral", "gemma2"):
        with pytest.raises(
            NotImplementedError, match="attention_mask is beside layers of type sliding"
        ):
            logits(made(name))
    with pytest.raises(TypeError, match=r"^attention_mask: mask is a tensor"):
        door.attention_mask(torch.ones(2, 2), 2)
    with pytest.raises(ValueError, match=r"^attention_mask: length is 0; it takes a positive"):
        door.attention_mask(packed.mask, 0)


# --- examples -------------------------------------------------------------------------------------


def test_examples_run() -> None:
    runner = doctest.DocTestRunner()
    for thing in (trees.pack, trees.PackedTree.by_rollout, trees.PackedTree.by_token):
        names = {"torch": torch, "trees": trees}
        text = inspect.getdoc(thing) or ""
        example = doctest.DocTestParser().get_doctest(text, names, "example", None, None)
        assert example.examples
        runner.run(example)
    assert not runner.failures


@pytest.mark.usefixtures("default")
def test_documentation() -> None:
    made = run_examples("Trees of rollouts")
    assert f"# {made['packed']!r}" in section("Trees of rollouts")
    want = alone(lambda x: made["model"](x)[0], made["rollouts"])
    torch.testing.assert_close(made["logprobs"].double(), want, rtol=1e-5, atol=1e-5)
    assert all(p.grad is not None for p in made["model"].parameters())


@pytest.mark.usefixtures("default")
def test_the_example_says_what_is_saved(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.syspath_prepend(str(EXAMPLES))
    script = importlib.import_module("rollouts")
    script.main(["--prompt", "20", "--turn", "4"])
    saved, _, last = capsys.readouterr().out.splitlines()
    numbers = re.match(r"PackedTree\(12 rollouts, (\d+) tokens in (\d+) rows: (\d+) saved", saved)
    assert numbers is not None
    tokens, rows, less = map(int, numbers.groups())
    assert tokens - rows == less >= 10 * 20  # of 12 prompts there are 2
    scale, most = map(float, re.findall(r"(?:gradient|difference) ([\d.e+-]+)", last))
    assert 0 <= most < 1e-5 * scale
    with pytest.raises(SystemExit):
        script.main(["--branches", "2", "0"])
    assert "--branches is 0; it takes at least 1" in capsys.readouterr().err
