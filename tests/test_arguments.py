"""What the public functions and modules refuse: one table, a wrong value for every argument of each.

A message names the function and the argument, says what is taken, and is short whatever was passed.
"""

from __future__ import annotations

import importlib
import inspect
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

import flashproto
from flashproto import backends, hooks, nn, reference

pytest.importorskip("triton")


class Ambiguous:
    """What compares element by element, as an array of numpy."""

    def __eq__(self, other: object) -> Any:
        return torch.tensor([True, False])

    __hash__ = None  # type: ignore[assignment]


X, W = torch.randn(4, 64), torch.randn(64)
Q, QKV = torch.randn(1, 2, 8, 16), torch.randn(1, 8, 4 * 16)
COS = torch.randn(12, 8)
TARGETS = torch.arange(4)
LONG = torch.randn(5000)
FLAGS: list[Any] = ["no", LONG, [True], None, 2, 0.5]
NUMBERS: list[Any] = ["1", LONG, True, math.nan, [1.0]]
FINITE = [*NUMBERS, math.inf, -math.inf]
EPS = [*FINITE, -1e-5]
INTEGERS: list[Any] = ["1", LONG, True, 1.0, [1]]
NAMES: list[Any] = ["other", LONG, 1, ["mean"], Ambiguous()]
TENSORS: list[Any] = ["x", [1.0], 1.0, torch.zeros(4, dtype=torch.complex64)]
DTYPES: list[Any] = ["float32", LONG, float, torch.int32]
CALLS = ["relu", LONG, torch.relu]
SHAPES = [W, LONG, "64", 64.0, None, [], [3], 3, [W], ["64"], [10**9] * 500, list(range(5000)), (64.0,)]

NORM = {
    "x": TENSORS,
    "normalized_shape": SHAPES,
    "weight": [*TENSORS, LONG],
    "bias": [*TENSORS, LONG],
    "eps": EPS,
    "casting": NAMES,
    "prologue": CALLS,
    "epilogue": CALLS,
    "dtype": DTYPES,
}
FP8 = {**NORM, "residual": [*TENSORS, LONG], "dtype": [*DTYPES, torch.float16, None]}
NORM = {**NORM, "memory_efficient": FLAGS, "split_rows": FLAGS, "impl": NAMES}
ADD_NORM = {**NORM, "residual": [*TENSORS, LONG, None]}
SOFTMAX = {
    "x": [*TENSORS, torch.tensor(1.0)],
    "scale": FINITE,
    "mask": [*TENSORS, LONG],
    "causal": FLAGS,
    "prologue": CALLS,
    "epilogue": CALLS,
    "split_rows": FLAGS,
    "dtype": DTYPES,
    "impl": NAMES,
}
LOSS = {
    "targets": [None, 0, [0, 1, 2, 3], TARGETS.float(), TARGETS[:3], X],
    "ignore_index": [*INTEGERS, 2**70],
    "label_smoothing": [*FINITE, -0.1, 1.1],
    "z_loss": FINITE,
    "softcap": [*FINITE, 0, 0.0, -1.0],
    "reduction": [*NAMES, None],
    "return_lse": FLAGS,
    "return_z_loss": FLAGS,
    "impl": NAMES,
}
ROPE = {
    "cos": [*TENSORS, LONG, COS[:3], None],
    "sin": [*TENSORS, LONG, COS[:3], None],
    "positions": [3, "0", list(range(8)), LONG, torch.arange(3)],
    "interleaved": FLAGS,
    "impl": NAMES,
    "offset": ["1", True, 1.0, None, 5, -1, LONG, torch.arange(3), 10**30],
}
QK_NORM = {
    **ROPE,
    "eps": EPS,
    "casting": NAMES,
    "q_weight": [*TENSORS, LONG],
    "k_weight": [*TENSORS, LONG],
}
HEADS = {"n_heads": [*INTEGERS, 0, -1, 5], "n_kv_heads": [*INTEGERS, 0, -1, 5]}
SEED = torch.tensor([3])
ATTENTION = {
    "causal": FLAGS,
    "scale": FINITE,
    "impl": NAMES,
    "softcap": [*NUMBERS, 0.0, -1.0],
    "window": [3, LONG, "no", (1,), (1, 2, 3), (-1, 0), (True, 0), (0, 1.0), (None, "1")],
    "sinks": [*TENSORS, LONG],
    "bias": [*TENSORS, LONG, torch.ones(1, 1, 1, 8, 8)],
    "relative_bias": [*TENSORS, LONG, torch.ones(3, 4), torch.ones(2, 0)],
    "relative_offset": [*INTEGERS, 2**31, 3],
    "score_mod": ["forget", LONG, hooks.call("multiply", X), hooks.call("multiply_score", X)],
    "mask": ["causal", LONG, True, torch.ones(8, 8)],
    "deterministic": FLAGS,
    "dropout_p": [*NUMBERS, -0.1, 1.1],
    "dropout_seed": [*TENSORS, LONG, LONG[0], SEED.int(), SEED.to("meta")],
}
NOT_CACHED = ("mask", "deterministic", "bias", "relative_bias", "relative_offset")
NOT_CACHED += ("score_mod", "dropout_p", "dropout_seed")
SPLITS = [0, -1, 1.5, True, "1", LONG, 2**31]
VARIANTS = ATTENTION | {
    "num_splits": SPLITS,
    "alibi_slopes": [*TENSORS, LONG],
    "return_lse": FLAGS,
    "return_aux": ["entropy", LONG, None, ("lse",), [1], ("entropy", "entropy")],
}
CU = torch.tensor([0, 3, 8], dtype=torch.int32)
CUS: list[Any] = [*TENSORS, LONG, CU.long(), CU[None], CU[:0], CU[:2], CU + 1, CU.flip(0), CU * 9]
USED: list[Any] = [*TENSORS, LONG, CU[:2].long(), CU, CU[:1], CU[1:] - 4, CU[:2] + 4]
TOKENS = torch.randn(8, 2, 16)
CACHED, CACHE = torch.randn(2, 4, 1, 16), torch.randn(2, 8, 2, 16)
INTS = torch.tensor([3, 8], dtype=torch.int32)
QKVS = {"qkv": [*TENSORS, QKV[0]]}
GLU = {"gate": [*TENSORS, torch.tensor(1.0)], "up": [*TENSORS, LONG], "impl": NAMES}

# Right arguments of each public function, and wrong ones for each argument.
TABLE: dict[str, tuple[dict[str, Any], dict[str, list[Any]]]] = {
    "layer_norm": ({"x": X, "normalized_shape": 64, "weight": W}, NORM),
    "rms_norm": ({"x": X, "normalized_shape": 64, "weight": W}, NORM),
    "add_layer_norm": ({"x": X, "residual": X, "normalized_shape": 64}, ADD_NORM),
    "add_rms_norm": ({"x": X, "residual": X, "normalized_shape": 64}, ADD_NORM),
    "layer_norm_fp8": ({"x": X, "normalized_shape": 64}, FP8 | {"impl": NAMES}),
    "rms_norm_fp8": ({"x": X, "normalized_shape": 64}, FP8 | {"impl": NAMES}),
    "softmax": ({"x": X}, SOFTMAX),
    "log_softmax": ({"x": X}, SOFTMAX),
    "logsumexp": ({"x": X}, {"x": TENSORS, "impl": NAMES}),
    "softmax_topk": (
        {"x": X, "k": 4},
        {
            "x": TENSORS, "k": [*INTEGERS, 0, 65, None], "renormalize": FLAGS, "dtype": DTYPES,
            "impl": NAMES,
        },
    ),
    "cross_entropy": (
        {"logits": X, "targets": TARGETS},
        LOSS
        | {
            "logits": [*TENSORS, torch.tensor(1.0)], "weight": [*TENSORS, LONG],
            "inplace_backward": FLAGS, "class_dim": [*INTEGERS, 2, -3, None],
        },
    ),
    "linear_cross_entropy": (
        {"h": X, "weight": torch.randn(10, 64), "targets": TARGETS},
        LOSS
        | {
            "h": TENSORS, "weight": [*TENSORS, LONG], "bias": [*TENSORS, LONG],
            "class_weight": [*TENSORS, LONG], "chunk_size": [*INTEGERS, 0, -1], "low_memory": FLAGS,
        },
    ),
    "swiglu": ({"gate": X, "up": X}, GLU),
    "geglu": ({"gate": X, "up": X}, GLU | {"approximate": NAMES}),
    "reglu": ({"gate": X, "up": X}, GLU),
    "gelu": ({"x": X}, {"x": TENSORS, "approximate": NAMES, "impl": NAMES}),
    "rope": (
        {"q": Q, "k": Q, "cos": COS, "sin": COS},
        ROPE | {"q": TENSORS, "k": [*TENSORS, LONG], "inplace": FLAGS},
    ),
    "rope_qkv": (
        {"qkv": QKV, "n_heads": 2, "n_kv_heads": 1, "cos": COS, "sin": COS}, ROPE | HEADS | QKVS
    ),
    "qk_norm": (
        {"q": Q, "k": Q, "cos": COS, "sin": COS}, QK_NORM | {"q": TENSORS, "k": [*TENSORS, LONG]}
    ),
    "qk_norm_qkv": (
        {"qkv": QKV, "n_heads": 2, "n_kv_heads": 1, "cos": COS, "sin": COS}, QK_NORM | HEADS | QKVS
    ),
    "attention": (
        {"q": Q, "k": Q, "v": Q},
        VARIANTS | {"q": TENSORS, "k": [*TENSORS, LONG], "v": [*TENSORS, LONG]},
    ),
    "attention_varlen": (
        {"q": TOKENS, "k": TOKENS, "v": TOKENS, "cu_seqlens_q": CU, "cu_seqlens_k": CU},
        {n: x for n, x in VARIANTS.items() if n not in ("bias", "score_mod")} | {
            "q": [*TENSORS, LONG], "k": [*TENSORS, LONG], "v": [*TENSORS, LONG],
            "cu_seqlens_q": CUS, "cu_seqlens_k": CUS, "max_seqlen_q": [*INTEGERS, -1],
            "max_seqlen_k": [*INTEGERS, -1], "seqused_q": USED, "seqused_k": USED,
        },
    ),
    "attention_qkv": ({"qkv": QKV, "n_heads": 2, "n_kv_heads": 1}, ATTENTION | HEADS | QKVS),
    "attention_with_kv_cache": (
        {"q": CACHED[:, :2], "k_cache": CACHE, "v_cache": CACHE, "lengths": INTS, "rope": (COS, COS)},
        {n: x for n, x in ATTENTION.items() if n not in NOT_CACHED} | {
            "num_splits": SPLITS, "q": [*TENSORS, LONG, CACHED[0]],
            "k_cache": [*TENSORS, LONG, CACHE[:1], CACHE.half()],
            "v_cache": [*TENSORS, LONG, CACHE[:1], CACHE.half()],
            "lengths": [*TENSORS, None, LONG, INTS.long(), INTS[:1], INTS + 90, INTS - 90],
            "k": [*TENSORS, LONG, CACHED[:, :2]], "v": [*TENSORS, LONG, CACHED[:, :2]],
            "page_table": [*TENSORS, LONG, INTS, INTS[None]],
            "cache_index": [*TENSORS, LONG, INTS.long(), INTS + 9, INTS[:1]],
            "starts": [*TENSORS, LONG, INTS.long(), INTS + 90, INTS - 90, INTS[:1]],
            "cu_seqlens_q": [*TENSORS, LONG], "k_scale": [*TENSORS, INTS.float()],
            "v_scale": [*TENSORS, INTS.float()], "prefix": [*TENSORS, LONG, (Q,), (Q, Q)],
            "rope": [*TENSORS, LONG, (COS,), (COS[0], COS)],
            "interleaved": FLAGS, "alibi_slopes": [*TENSORS, LONG], "return_lse": FLAGS,
        },
    ),
    "dropout_mask": (
        {"dropout_p": 0.5, "dropout_seed": SEED, "shape": (1, 2, 8, 8)},
        {
            "dropout_p": [*NUMBERS, None, -0.1, 1.1],
            "dropout_seed": [None, *ATTENTION["dropout_seed"][:-1]],
            "shape": [None, 8, LONG, (8, 8), (1, 2, 8.0, 8), (1, 2, -1, 8)],
        },
    ),
    "merge_attention": (
        {"outs": [Q, Q], "lses": [Q[..., 0], Q[..., 0]]},
        {
            "outs": [Q, None, [], [Q], [Q, LONG], [Q, 1.0]],
            "lses": [None, [], LONG, [Q, Q], [Q[..., 0]]],
            "impl": NAMES,
        },
    ),
    "scaled_dot_product_attention": (
        {"query": Q, "key": Q, "value": Q},
        {
            "query": [*TENSORS, LONG], "key": [*TENSORS, LONG, Q[:, :, :, :3]],
            "value": [*TENSORS, LONG],
            "attn_mask": [*TENSORS, LONG, torch.ones(8, 7), torch.ones(7), torch.ones(5, 1, 8)],
            "dropout_p": [*NUMBERS, -0.1, 1.1], "is_causal": FLAGS, "scale": FINITE,
            "enable_gqa": FLAGS,
        },
    ),
}  # fmt: skip
# The argument that a message names, where another does not fit the one that is wrong.
ALSO = {
    "n_heads": "qkv",
    "n_kv_heads": "qkv",
    "cu_seqlens_q": "cu_seqlens_k",
    "gate": "up",
    "outs": "lses",
    "k": "v",
    "v": "k",
    "k_cache": "v_cache",
    "rope": "cos",
    "cos": "sin",
    "key": "query, key or value",
    "value": "query, key or value",
}

on_the_cpu = pytest.mark.skipif(
    backends.HAS_TRITON and not backends.INTERPRETED, reason="needs kernels on the CPU: the interpreter"
)


def assert_one_line(message: str, function: str) -> None:
    assert message.startswith(f"{function}: "), message
    assert "; it takes " in message, message
    assert len(message) < 400, message
    assert "tensor(" not in message, message


CASES = [(function, argument) for function, (_, wrong) in TABLE.items() for argument in wrong]


def test_the_table_has_every_argument() -> None:
    functions = {
        n
        for n in flashproto.__all__
        if getattr(flashproto, n).__module__.startswith("flashproto.functional")
    }
    assert set(TABLE) == functions
    for name, (_, wrong) in TABLE.items():
        parameters = inspect.signature(getattr(flashproto, name)).parameters
        named = {p.name for p in parameters.values() if p.kind is not p.VAR_KEYWORD}
        assert named <= set(wrong), name


@pytest.mark.parametrize(("function", "argument"), CASES)
def test_a_wrong_argument_is_refused_by_name(function: str, argument: str) -> None:
    right, wrong = TABLE[function]
    call = getattr(flashproto, function)
    call(**right)
    named = {argument, ALSO.get(argument, argument)}
    for value in wrong[argument]:
        with pytest.raises((TypeError, ValueError)) as caught:
            call(**right | {argument: value})
        message = str(caught.value)
        assert_one_line(message, function)
        assert any(message.startswith(f"{function}: {name}") for name in named), (value, message)


EQUAL = {
    "layer_norm": (
        {"x": X, "normalized_shape": 64, "eps": 1.0},
        {"eps": True, "normalized_shape": 64.0},
    ),
    "rms_norm": ({"x": X, "normalized_shape": 64, "eps": 0.0}, {"eps": False}),
    "cross_entropy": (
        {"logits": X, "targets": TARGETS, "softcap": 1.0, "ignore_index": 0},
        {"label_smoothing": False, "z_loss": False, "softcap": True, "ignore_index": False},
    ),
    "attention": ({"q": Q, "k": Q, "v": Q, "scale": 1.0}, {"scale": True}),
    "attention_qkv": (
        {"qkv": QKV, "n_heads": 2, "n_kv_heads": 1, "scale": 0.0},
        {"n_heads": 2.0, "n_kv_heads": True, "scale": False},
    ),
}


@pytest.mark.parametrize("function", EQUAL)
def test_a_value_of_a_wrong_type_is_refused_after_equal_right_ones(function: str) -> None:
    right, wrong = EQUAL[function]
    call = getattr(flashproto, function)
    for _ in range(4):
        call(**right)
    for argument, value in wrong.items():
        assert argument not in right or right[argument] == value
        with pytest.raises(TypeError, match=f"{function}: {argument} is"):
            call(**right | {argument: value})


@on_the_cpu
def test_flags_may_be_numbers_that_equal_them() -> None:
    numpy = pytest.importorskip("numpy")
    for yes, no in ((1, 0), (numpy.True_, numpy.False_)):
        for impl in ("triton", "torch", "reference"):
            for _ in range(3):
                for given, causal in ((yes, True), (no, False)):
                    got = flashproto.attention(Q, Q, Q, causal=given, impl=impl)
                    assert torch.equal(got, flashproto.attention(Q, Q, Q, causal=causal, impl=impl))
        got = flashproto.softmax(X, causal=yes, split_rows=no)
        assert torch.equal(got, flashproto.softmax(X, causal=True))


@on_the_cpu
@pytest.mark.filterwarnings("error:overflow encountered in cast:RuntimeWarning")
def test_numbers_of_numpy_are_numbers() -> None:
    numpy = pytest.importorskip("numpy")
    half, four = numpy.float32(0.5), numpy.int64(4)
    for impl in ("triton", "torch", "reference"):
        pairs = [
            (flashproto.attention(Q, Q, Q, scale=s, impl=impl) for s in (half, 0.5)),
            (flashproto.rms_norm(X, n, None, e, impl=impl) for n, e in ((four * 16, half), (64, 0.5))),
            (flashproto.softmax_topk(X, k, impl=impl)[0] for k in (four, 4)),
            (
                flashproto.cross_entropy(
                    X, TARGETS, z_loss=s, label_smoothing=s, softcap=s, ignore_index=i, impl=impl
                )
                for s, i in ((half, four), (0.5, 4))
            ),
            (
                flashproto.linear_cross_entropy(
                    X, X[:, :64], TARGETS, z_loss=s, softcap=s, ignore_index=i, chunk_size=i, impl=impl
                )
                for s, i in ((half, four), (0.5, 4))
            ),
            (flashproto.attention_qkv(QKV, n, 1, impl=impl) for n in (numpy.int64(2), 2)),
            (flashproto.rope(Q, None, COS, COS, offset=n, impl=impl) for n in (four, 4)),
            (flashproto.qk_norm(Q, None, eps=e, impl=impl) for e in (half, 0.5)),
        ]
        for got, wanted in pairs:
            assert torch.equal(got, wanted)


def test_options_of_norms_are_named_parameters() -> None:
    options = {"casting", "prologue", "epilogue", "dtype", "impl"}
    for name in ("layer_norm", "rms_norm", "add_layer_norm", "add_rms_norm"):
        named = options | {"memory_efficient", "split_rows"}
        assert named <= inspect.signature(getattr(flashproto, name)).parameters.keys()
    for name in ("layer_norm_fp8", "rms_norm_fp8"):
        assert options <= inspect.signature(getattr(flashproto, name)).parameters.keys()
        with pytest.raises(TypeError, match=f"{name}.*'foo'"):
            getattr(flashproto, name)(X, 64, foo=1)


def test_other_libraries_order_of_arguments_is_shown_ours() -> None:
    for call, shown in (
        (lambda: flashproto.rms_norm(X, W), r"rms_norm\(x, x.shape\[-1\], weight\)"),
        (lambda: flashproto.layer_norm(X, W, W), r"layer_norm\(x, x.shape\[-1\], weight\)"),
        (
            lambda: flashproto.add_rms_norm(X, X, W),
            r"add_rms_norm\(x, residual, x.shape\[-1\], weight\)",
        ),
    ):
        with pytest.raises(TypeError, match=shown):
            call()


def test_integers_are_refused_under_autocast_too() -> None:
    with torch.autocast("cpu", torch.bfloat16):
        for call in (
            lambda: flashproto.attention(Q.int(), Q.int(), Q.int()),
            lambda: flashproto.attention([Q], Q, Q),
            lambda: flashproto.attention_qkv(QKV.int(), 2, 1),
            lambda: flashproto.scaled_dot_product_attention(Q.int(), Q.int(), Q.int()),
            lambda: flashproto.rms_norm(X.int(), 64),
            lambda: flashproto.softmax(X.int()),
            lambda: flashproto.cross_entropy(X.int(), TARGETS),
        ):
            with pytest.raises(TypeError, match=r"(torch\.int32|list); it takes"):
                call()


SWAPPED = (
    r"linear_cross_entropy: h is of shape \[9, 64\], and weight .* Pass the hidden states first\.$"
)


@pytest.mark.parametrize(
    ("call", "named"),
    [
        (lambda: hooks.dropout("0.5"), "hooks.dropout: p is '0.5'"),
        (lambda: hooks.dropout(math.nan), "hooks.dropout: p is nan"),
        (lambda: hooks.dropout(1), "hooks.dropout: p is 1"),
        (lambda: hooks.call("dropout", torch.tensor(1), "0.5"), "hook 'dropout': arguments is"),
        (lambda: nn.CrossEntropyLoss(reduction="max"), "CrossEntropyLoss: reduction is 'max'"),
        (lambda: nn.CrossEntropyLoss([1.0]), "CrossEntropyLoss: weight is list"),
        (lambda: nn.CrossEntropyLoss(W, -100), "CrossEntropyLoss: size_average is -100"),
        (lambda: nn.CrossEntropyLoss(reduce=False), "CrossEntropyLoss: reduce is False"),
        (lambda: nn.CrossEntropyLoss(ignore_index=1.5), "CrossEntropyLoss: ignore_index is 1.5"),
        (lambda: nn.CrossEntropyLoss(label_smoothing=2), "CrossEntropyLoss: label_smoothing is 2"),
        (lambda: nn.CrossEntropyLoss(class_dim="1")(X, TARGETS), "cross_entropy: class_dim is '1'"),
        (
            lambda: flashproto.cross_entropy(X[None], TARGETS[:1], class_dim=-3),
            r"\[4, 64\]. Classes are dimension class_dim of logits, -3",
        ),
        *(
            (lambda h=h, t=t, b=b: flashproto.linear_cross_entropy(W.new_ones(9, 64), h, t, b), SWAPPED)
            for h, t, b in (
                (X, TARGETS, None),
                (X, TARGETS, W[:9]),
                (X.view(2, 2, 64), TARGETS.view(2, 2), None),
            )
        ),
        (lambda: flashproto.softmax(X, scale="1"), r"softmax: scale is .* Pass None for 1\.$"),
        (
            lambda: flashproto.scaled_dot_product_attention(
                Q.expand(2, -1, -1, -1), Q.expand(3, -1, -1, -1), Q
            ),
            r"scaled_dot_product_attention: key is of shape \[3, 2, 8, 16\]",
        ),
    ],
)
def test_modules_hooks_and_pairs_of_arguments(call: Callable[[], object], named: str) -> None:
    with pytest.raises((TypeError, ValueError), match=named) as caught:
        call()
    assert_one_line(str(caught.value), str(caught.value).split(": ")[0])


# --- values that can be looked at ------------------------------------------------------------------

BAD = torch.tensor([0, 1, 2, 64])
OUT_OF_RANGE: dict[str, tuple[Callable[..., Tensor], str]] = {
    "cross_entropy": (
        lambda impl, **options: flashproto.cross_entropy(X, BAD, impl=impl, **options),
        r"cross_entropy: targets is 64 at \[3\]; it takes a class from 0 to 63, or ignore_index, -100",
    ),
    "negative": (
        lambda impl: flashproto.cross_entropy(X.view(2, 2, 64), -BAD.view(2, 2), impl=impl),
        r"cross_entropy: targets is -1 at \[0, 1\]",
    ),
    "one": (lambda impl: flashproto.cross_entropy(X[0], BAD[3], impl=impl), "targets is 64; it takes"),
    "linear_cross_entropy": (
        lambda impl: flashproto.linear_cross_entropy(X, X, BAD, impl=impl),
        r"linear_cross_entropy: targets is 64 at \[3\]; it takes a class from 0 to 3",
    ),
    "module": (lambda impl: nn.CrossEntropyLoss(impl=impl)(X, BAD), r"targets is 64 at \[3\]"),
    "positions": (
        lambda impl: flashproto.rope(Q, None, COS, COS, positions=torch.arange(8), offset=5, impl=impl),
        r"rope: positions is 7 at \[7\]; it takes rows from -5 to 6",
    ),
    "offset": (
        lambda impl: flashproto.rope(Q, None, COS, COS, offset=torch.tensor([5]), impl=impl),
        r"rope: offset is 5 at \[0\]; it takes rows from 0 to 4",
    ),
    "qk_norm": (
        lambda impl: flashproto.qk_norm(
            Q, None, cos=COS, sin=COS, positions=torch.arange(8) - 1, impl=impl
        ),
        r"qk_norm: positions is -1 at \[0\]",
    ),
    "rope_qkv": (
        lambda impl: flashproto.rope_qkv(QKV, 2, 1, COS, COS, offset=torch.tensor([-1]), impl=impl)[0],
        r"rope_qkv: offset is -1 at \[0\]",
    ),
    "qk_norm_qkv": (
        lambda impl: flashproto.qk_norm_qkv(
            QKV, 2, 1, cos=COS, sin=COS, offset=torch.tensor([-1]), impl=impl
        )[0],
        r"qk_norm_qkv: offset is -1 at \[0\]",
    ),
}


@on_the_cpu
@pytest.mark.parametrize("case", OUT_OF_RANGE)
def test_indices_out_of_range_are_refused_on_a_cpu(case: str) -> None:
    """The first time and the fourth; a backend that makes NaN of them does so where it is named."""
    call, message = OUT_OF_RANGE[case]
    for _ in range(4):
        for impl in (None, "torch"):
            with pytest.raises(ValueError, match=message):
                call(impl)
    for impl in ("triton", "reference"):
        assert call(impl).isnan().any()
        backends.set_default(impl)
        try:
            assert call(None).isnan().any()
        finally:
            backends.set_default(None)


def test_right_targets_after_which_a_plan_is_kept_do_not_hide_wrong_ones() -> None:
    for _ in range(4):
        flashproto.cross_entropy(X, TARGETS)
    with pytest.raises(ValueError, match="targets is 64"):
        flashproto.cross_entropy(X, BAD)
    assert flashproto.cross_entropy(X, BAD, ignore_index=64).isfinite()
    flashproto.cross_entropy(X[:0], BAD[:0])


class Names(TorchDispatchMode):
    """Notes what is called."""

    def __init__(self) -> None:
        super().__init__()
        self.names: set[str] = set()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.names.add(func.name())
        return func(*args, **(kwargs or {}))


def test_values_are_not_looked_at_where_that_would_show(monkeypatch: pytest.MonkeyPatch) -> None:
    """Not on another device, of fake tensors, in a compiled call, under vmap, or seen by a mode."""

    def f(x: Tensor, t: Tensor) -> Tensor:
        return flashproto.cross_entropy(x, t, reduction="none")

    monkeypatch.setattr(backends, "_default", "reference")
    module = importlib.import_module("flashproto.functional.cross_entropy")
    monkeypatch.setattr(module, "refuses_values", lambda impl, backend: True)
    assert f(X.to("meta"), BAD.to("meta")).shape == (4,)
    with FakeTensorMode() as fake:
        assert f(fake.from_tensor(X), fake.from_tensor(BAD)).shape == (4,)
    assert torch.compile(f, fullgraph=True, backend="eager")(X, BAD).isnan().tolist() == [False] * 3 + [
        True
    ]
    assert torch.func.vmap(f)(X, BAD).isnan().tolist() == [False] * 3 + [True]
    with Names() as seen:
        f(X, BAD)
    assert "aten::nonzero" not in seen.names
    with pytest.raises(ValueError, match="targets is 64"):
        f(X, BAD)


# --- functions of torch that a user replaces -------------------------------------------------------


@on_the_cpu
def test_flashproto_may_take_the_place_of_torchs_functions(monkeypatch: pytest.MonkeyPatch) -> None:
    """As in code that was written for torch, on every backend: none looks up what was replaced."""

    def calls(impl: str) -> list[Tensor]:
        mask = torch.ones(8, 8, dtype=torch.bool).tril()
        gated = hooks.call("silu_gate", X)
        out = [
            flashproto.scaled_dot_product_attention(Q, Q, Q),
            flashproto.scaled_dot_product_attention(Q, Q, Q, is_causal=True),
            flashproto.scaled_dot_product_attention(Q, Q, Q, mask),
            flashproto.attention(Q, Q, Q, causal=True, impl=impl),
            flashproto.layer_norm(X, 64, W, impl=impl),
            flashproto.rms_norm(X, 64, W, impl=impl),
            flashproto.rms_norm(X, 64, W, prologue=gated),
            flashproto.softmax(X, impl=impl),
            flashproto.log_softmax(X, impl=impl),
            flashproto.logsumexp(X, impl=impl),
            flashproto.softmax_topk(X, 4, impl=impl)[0],
            flashproto.cross_entropy(X, TARGETS, impl=impl),
            flashproto.cross_entropy(X, TARGETS, z_loss=0.1, impl=impl),
            flashproto.linear_cross_entropy(X, X, TARGETS, impl=impl),
            flashproto.gelu(X, impl=impl),
            flashproto.geglu(X, X, approximate="tanh", impl=impl),
            flashproto.swiglu(X, X, impl=impl),
            flashproto.reglu(X, X, impl=impl),
        ]
        return [y for y in out if isinstance(y, Tensor)]

    def fails(*_: object, **__: object) -> None:
        raise AssertionError("a replaced function of torch was called")

    impls = ("triton", "torch", "reference")
    wanted = {impl: calls(impl) for impl in impls}
    for module, names in (
        (F, "layer_norm rms_norm softmax log_softmax cross_entropy gelu silu relu linear"),
        (torch, "layer_norm rms_norm softmax log_softmax logsumexp relu"),
    ):
        for name in names.split():
            monkeypatch.setattr(module, name, fails)
    own = F.scaled_dot_product_attention
    monkeypatch.setattr(F, "scaled_dot_product_attention", flashproto.scaled_dot_product_attention)
    for impl in impls:
        torch.testing.assert_close(calls(impl), wanted[impl], rtol=0, atol=0)
    for options in ({}, {"is_causal": True}, {"attn_mask": torch.ones(8, 8)}):
        got = F.scaled_dot_product_attention(Q, Q, Q, **options)
        torch.testing.assert_close(got, own(Q, Q, Q, **options))
    assert F.scaled_dot_product_attention(Q, Q, Q, dropout_p=0.5).shape == Q.shape


# --- another default dtype, and scales that are not positive ---------------------------------------


@on_the_cpu
@pytest.mark.parametrize("default", [torch.float64, torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("impl", ["triton", "torch", "reference"])
def test_results_do_not_follow_torchs_default_dtype(impl: str, default: torch.dtype) -> None:
    """Dtypes and bits, of the reference itself too."""

    def results() -> list[Tensor]:
        x, t = X.detach().requires_grad_(), TARGETS.clone()
        t[0] = -100
        options = {"weight": W.abs(), "label_smoothing": 0.1, "z_loss": 0.1, "softcap": 3.0}
        out = [
            flashproto.cross_entropy(x, t, impl=impl, return_lse=True),
            flashproto.cross_entropy(x, t, impl=impl, reduction="none", return_z_loss=True, **options),
            flashproto.linear_cross_entropy(x, x, TARGETS, impl=impl, z_loss=0.1),
            reference.cross_entropy(x, t, **options),
            reference.cross_entropy(x, BAD, reduction="none"),
            flashproto.attention(Q, Q, Q, causal=True, impl=impl),
            flashproto.softmax(x, causal=True, mask=X > 0),
            flashproto.softmax_topk(x, 4, renormalize=True, impl=impl),
            flashproto.logsumexp(x, impl=impl),
            flashproto.add_layer_norm(x, x, 64, W, impl=impl),
            flashproto.rms_norm(x, 64, W, memory_efficient=True),
            flashproto.rms_norm_fp8(X, 64, W)[1],
            flashproto.gelu(x, impl=impl),
            flashproto.qk_norm(Q, Q, cos=COS, sin=COS, offset=torch.tensor([1]), impl=impl),
        ]
        flat = [y for y in torch.utils._pytree.tree_leaves(out) if isinstance(y, Tensor)]
        loss = sum(y.sum() for y in flat if y.requires_grad and not y.isnan().any())
        return [*flat, *torch.autograd.grad(loss, x)]

    wanted = results()
    before = torch.get_default_dtype()
    torch.set_default_dtype(default)
    try:
        got = results()
    finally:
        torch.set_default_dtype(before)
    assert [y.dtype for y in got] == [y.dtype for y in wanted]
    torch.testing.assert_close(got, wanted, rtol=0, atol=0, equal_nan=True)
