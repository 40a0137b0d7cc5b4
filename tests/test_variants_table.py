"""The tables of docs/attention.md, which flashproto/bench/features.py makes: each cell is a test of its
name.  On a GPU all are run, elsewhere those of the reference and a sample of the others."""

from __future__ import annotations

import itertools
import os
import random
from typing import Any

import pytest
import torch
from attention_problem import Problem
from operators import launches
from variant_problem import (
    FEATURES,
    Call,
    assert_within_bound,
    drawn,
    exact_and_eager,
    make,
    make_packed,
    outputs_of,
    run,
)

import flashproto
from flashproto.bench import features
from flashproto.bench.features import BY_NAME, SIZES, Feature
from flashproto.functional.attention_request import Request

ON_GPU = torch.cuda.is_available()
CELLS = ["-".join(x) for x in itertools.product(BY_NAME, features.BACKENDS, features.COLUMNS)]
ANSWERS = {cell: features.answer(BY_NAME[cell.split("-")[0]], *cell.split("-")[1:]) for cell in CELLS}
# What draws the rows that are no feature of variant_problem.py.
DRAWN = {
    "full": (),
    "alibi_gradient": ("alibi",),
    **dict.fromkeys(("grouped", "lengths", "head_dims", "float32", "float64"), ("causal",)),
}
BACKWARD = {"triton": "attention_backward_keys_kernel", "hopper": "attention_backward_kernel"}


def call_of(feature: Feature, sizes: dict[str, int], device: str, seed: int) -> Call:
    problem = Problem(feature.dtype, causal=False, **sizes)
    names = DRAWN.get(feature.name, (feature.name,))
    call = drawn(random.Random(seed), problem, names, device)
    if "alibi_slopes" in call.options:
        call.options["alibi_slopes"].requires_grad_("alibi_slopes" in feature.wanted)
    return call


def compiled(attend: Any, backend: str) -> Any:
    """Inductor would make kernels of the reference, which is not what is tested."""
    torch.compiler.reset()
    compiler = "inductor" if ON_GPU and backend != "reference" else "aot_eager"
    return torch.compile(lambda *x, **o: attend(*x, **o), fullgraph=True, backend=compiler)


def check(cell: str, device: str, seed: int) -> None:
    """Against float64, on the kernels that the table says."""
    name, backend, column = cell.split("-")
    feature = BY_NAME[name]
    sizes, lengths = SIZES | feature.sizes, [(70, 70), (0, 5), (130, 130), (33, 90)]
    if not ON_GPU:
        sizes = {n: x if x < 10 else x // 4 for n, x in sizes.items()}
        lengths = [(9, 9), (0, 3), (5, 12)]
    call = call_of(feature, sizes, device, seed)
    print(call)
    packed = lengths if column == "varlen" else None
    inputs, gradients = make_packed(call, lengths, (3, 2), device) if packed else make(call, device)
    exact, plain = exact_and_eager(call, inputs, gradients, packed)

    def wrap(attend: Any) -> Any:
        return compiled(attend, backend) if column == "compile" else attend

    with launches() as seen:
        if column == "forward":
            with torch.no_grad():
                got = outputs_of(call, inputs, backend)
            exact = {n: x for n, x in exact.items() if n in ("out", "lse", *call.aux)}
        else:
            got = run(call, inputs, gradients, backend, packed, wrap)
    if feature.dtype == torch.float64:
        for n, x in exact.items():
            torch.testing.assert_close(got[n], x, rtol=1e-9, atol=1e-10)
    else:
        assert_within_bound(got, exact, plain, call)
    kernels = {launch.kernel for launch in seen}
    assert bool(kernels) == (backend != "reference")
    if backend != "reference":
        wanted = ANSWERS[f"{name}-{backend}-{'backward' if column == 'compile' else column}"]
        by = {"triton"} if wanted.endswith("by triton") else {backend}
        by = set() if column == "forward" else by
        assert {b for b, kernel in BACKWARD.items() if kernel in kernels} == by


@pytest.mark.gpu
@pytest.mark.parametrize("cell", [cell for cell in CELLS if ANSWERS[cell] != "no"])
def test_cell(cell: str, seed: int, request: pytest.FixtureRequest) -> None:
    if "-hopper-" in cell:
        request.getfixturevalue("hopper")
    check(cell, "cuda", seed)


def quick() -> list[str]:
    """The reference's cells, and a few that take longer, other ones in each run."""
    chosen, others = [], []
    for cell in CELLS:
        _, backend, column = cell.split("-")
        if ANSWERS[cell] != "no" and backend != "hopper":
            quickly = backend == "reference" and column != "compile"
            (chosen if quickly else others).append(cell)
    return chosen + random.Random(os.environ["FLASHPROTO_TEST_SEED"]).sample(others, 8)


@pytest.mark.skipif(ON_GPU, reason="test_cell runs them all")
@pytest.mark.parametrize("cell", quick())
def test_cell_without_a_gpu(cell: str, seed: int) -> None:
    check(cell, "cpu", seed)


@pytest.mark.parametrize("cell", [cell for cell in CELLS if ANSWERS[cell] == "no"])
def test_cell_that_says_no(cell: str, device: str, seed: int) -> None:
    """The error has all that the table has against it."""
    name, backend, column = cell.split("-")
    feature = BY_NAME[name]
    call = call_of(feature, SIZES | feature.sizes, device, seed)
    refusal = features.refusal(feature, column).partition("; it takes ")[2]
    reasons = [refusal] if refusal else features.against(feature, backend, column)
    lengths = [(150, 150)] if column == "varlen" else None
    inputs, _ = make_packed(call, lengths, (0, 0), device) if lengths else make(call, device)
    with pytest.raises((TypeError, ValueError) if refusal else flashproto.BackendError) as caught:
        outputs_of(call, inputs, backend, lengths)
    for reason in reasons:
        assert reason in str(caught.value)


def test_every_feature_has_a_row() -> None:
    assert FEATURES.keys() | DRAWN.keys() == BY_NAME.keys()


@pytest.mark.parametrize("column", ["forward", "varlen"])
@pytest.mark.parametrize("name", BY_NAME)
def test_kinds_are_those_of_calls(
    name: str, column: str, seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of the feature as the table has it, and as tests draw it."""
    feature, seen = BY_NAME[name], []

    def note(request: Request, backend: str) -> list[str]:
        seen.append(request.variant.kind)
        return []

    monkeypatch.setattr(Request, "reasons", note)
    if features.refusal(feature, column):
        pytest.skip("attention_varlen does not take it")
    features.call((feature,), varlen=column == "varlen")
    if name in FEATURES:
        call = call_of(feature, SIZES | {"Sq": 9, "Sk": 9}, "cpu", seed)
        lengths = [(5, 5), (4, 4)] if column == "varlen" else None
        inputs, _ = make_packed(call, lengths, (0, 0), "cpu") if lengths else make(call, "cpu")
        outputs_of(call, inputs, "reference", lengths)
    assert set(seen) == {feature.of(column)}


# --- what does not go together ----------------------------------------------------------------------

MASKS = (
    "documents(ids)",
    "padding(lengths)",
    "prefix(lengths)",
    "tree(parents)",
    "intervals(begin, end)",
    "chunks(size)",
    "global_tokens(n)",
    "boolean(x)",
    "from_function(f)",
    "dilated(window, step)",
)
FIRST = "`masks.window(left, right, first=n)`"
REFUSED = {
    ("`window=(left, right)`", FIRST),
    ("`window=(left, None)`", FIRST),
    ("`masks.documents(ids)`", "Sq != Sk"),
    *((f"`masks.{mask}`", "`attention_varlen`") for mask in MASKS),
    ("`bias`", "`attention_varlen`"),
    ("`score_mod`", "`attention_varlen`"),
    ("`a \\| b`, `~a`", "`attention_varlen`"),
    ("`masks.causal(top_left=True)`", "`attention_varlen`"),
}


def test_no_other_pairs_are_refused() -> None:
    found = features.refused()
    assert {(one, other) for one, other, _ in found} == REFUSED
    assert len(found) == len(REFUSED)
    for *_, message in found:
        kind, _, text = message.partition(": ")
        assert "; it takes " in text or kind == "NotImplementedError"
