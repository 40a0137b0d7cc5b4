"""Plans (flashproto/plans.py): calls that follow one give what the calls before gave, and no call
follows one that was made for another."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import Parameter

import flashproto
from flashproto import backends, plans
from flashproto.ops.memory import aligned
from flashproto.ops.norm_launch import norm_backward, norm_forward

pytest.importorskip("triton")

f32, bf16 = torch.float32, torch.bfloat16
WIDE = 16_400  # rows of as many columns are split over programs, or in shared memory on Hopper


@pytest.fixture(autouse=True)
def followed(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[bool]]:
    """Whether each call so far found a plan."""
    plans.forget()
    seen: list[bool] = []
    find = plans.find

    def seeing(*call: Any) -> Any:
        plan = find(*call)
        seen.append(plan is not None)
        return plan

    monkeypatch.setattr(plans, "find", seeing)
    yield seen
    plans.forget()


def rows(device: str, dtype: torch.dtype = f32, *shape: int) -> Tensor:
    return torch.randn(*(shape or (6, 40)), device=device).to(dtype)


def heads(device: str, dtype: torch.dtype) -> list[Tensor]:
    return [torch.randn(1, 20, h, 16, device=device).to(dtype).transpose(1, 2) for h in (2, 1, 1)]


def everything(device: str, dtype: torch.dtype) -> dict[str, tuple[Callable[..., Any], list[Tensor]]]:
    """Calls on the portable kernels and the tensors that they take."""
    x, r = rows(device, dtype), rows(device, f32)
    w, b = rows(device, f32, 40), rows(device, dtype, 40)
    classes, factors = torch.tensor([3, 39, -100, 0, 3, 8], device=device), w.square()
    triton: dict[str, Any] = {"impl": "triton"}
    return {
        "rms_norm": (lambda x, w: flashproto.rms_norm(x, 40, w, **triton), [x, w]),
        "rms_norm alone": (lambda x: flashproto.rms_norm(x, (6, 40), **triton), [x]),
        "layer_norm": (lambda x, w, b: flashproto.layer_norm(x, [40], w, b, **triton), [x, w, b]),
        "rms_norm with a bias alone": (
            lambda x, b: flashproto.rms_norm(x, 40, bias=b, **triton),
            [x, b],
        ),
        "add_layer_norm with all": (
            lambda *t: flashproto.add_layer_norm(t[0], t[1], 40, *t[2:], **triton),
            [x, r, w, b],
        ),
        "add_rms_norm": (
            lambda x, r, w: flashproto.add_rms_norm(x, r, 40, w, casting="llama", **triton),
            [x, r, w],
        ),
        "add_layer_norm": (lambda x, r: flashproto.add_layer_norm(x, r, 40, **triton), [x, r]),
        "layer_norm of wide rows": (
            lambda x, w: flashproto.layer_norm(x, WIDE, w, w, **triton),
            [rows(device, dtype, 1, WIDE), rows(device, dtype, WIDE)],
        ),
        "softmax of wide rows": (
            lambda x: flashproto.softmax(x, **triton),
            [rows(device, dtype, 2, WIDE // 2)],
        ),
        "softmax": (lambda x: flashproto.softmax(x, **triton), [x]),
        "softmax in float32": (lambda x: flashproto.softmax(x, dtype=f32, **triton), [x]),
        "log_softmax": (lambda x: flashproto.log_softmax(x[:, ::2], **triton), [x]),
        "cross_entropy": (lambda x: flashproto.cross_entropy(x, classes, **triton), [x]),
        "cross_entropy, weighted sum": (
            lambda x: flashproto.cross_entropy(
                x[:, :20],
                classes // 2,
                weight=factors[::2],
                label_smoothing=0.1,
                softcap=3.0,
                ignore_index=-50,
                reduction="sum",
                **triton,
            ),
            [x],
        ),
        "cross_entropy and lse": (
            lambda x: flashproto.cross_entropy(x, classes, z_loss=0.1, return_lse=True, **triton),
            [x],
        ),
        "cross_entropy of each row": (
            lambda x: flashproto.cross_entropy(
                x.view(2, 3, 40), classes.view(3, 2).t(), reduction="none", **triton
            ),
            [x],
        ),
        "gelu": (lambda x: flashproto.gelu(x, approximate="tanh", **triton), [x]),
        "geglu": (
            lambda x, up: flashproto.geglu(x, up, **triton),
            [x, rows(device, dtype, 6, 80)[:, :40]],
        ),
        "swiglu of halves": (lambda x: flashproto.swiglu(x, **triton), [x]),
        "reglu of odd halves": (lambda x: flashproto.reglu(x[:, :14], **triton), [x]),
        "attention": (
            lambda q, k, v: flashproto.attention(q, k, v, causal=True, **triton),
            heads(device, dtype),
        ),
        "attention and lse": (
            lambda q, k, v: flashproto.attention(q, k, v, return_lse=True, **triton),
            heads(device, dtype),
        ),
        "attention_qkv": (
            lambda qkv: flashproto.attention_qkv(qkv, 2, 1, causal=True, **triton),
            [rows(device, dtype, 2, 20, 128)[..., :64]],
        ),
        "attention of a negative scale": (
            lambda q, k, v: flashproto.attention(q, k, v, scale=-0.5, **triton),
            heads(device, dtype),
        ),
    }


NAMES = list(everything("cpu", f32))


def results(call: Callable[..., Any], tensors: list[Tensor]) -> list[Tensor]:
    """Outputs and gradients."""
    leaves = [t.detach().requires_grad_() for t in tensors]
    outputs = call(*leaves)
    outputs = [outputs] if isinstance(outputs, Tensor) else list(outputs)
    weights = [torch.linspace(-1, 2, o.numel(), device=o.device).view(o.shape) for o in outputs]
    loss = sum((o * w).sum() for o, w in zip(outputs, weights, strict=True))
    return [*outputs, *torch.autograd.grad(loss, leaves)]


@pytest.mark.parametrize("name", NAMES)
def test_gives_what_the_calls_before_gave(device, followed, name) -> None:
    call, tensors = everything(device, bf16)[name]
    first, second, third = (results(call, tensors) for _ in range(3))
    assert followed == [False, False, True]
    for a, b, c in zip(first, second, third, strict=True):
        assert a.dtype == c.dtype and a.stride() == c.stride()
        torch.testing.assert_close(b, a, rtol=0, atol=0)
        torch.testing.assert_close(c, a, rtol=0, atol=0)
    plain = call(*tensors)
    plain = [plain] if isinstance(plain, Tensor) else list(plain)
    for a, b in zip(plain, first, strict=False):
        assert not a.requires_grad
        torch.testing.assert_close(a, b.detach(), rtol=0, atol=0)


@pytest.mark.parametrize("name", NAMES)
def test_memory_that_starts_anywhere(device, followed, name) -> None:
    call, tensors = everything(device, bf16)[name]
    expected = call(*tensors)
    for start in (0, 0, 1, 8, 0):
        moved = []
        for t in tensors:
            size = t.untyped_storage().nbytes() // t.element_size()
            memory = torch.empty(size + start, dtype=t.dtype, device=device)
            moved.append(memory[start:].as_strided(t.shape, t.stride(), start).copy_(t))
        torch.testing.assert_close(call(*moved), expected, rtol=0, atol=0)


@pytest.mark.parametrize("name", NAMES)
def test_follows_what_is_in_the_tensors(device, followed, name) -> None:
    call, tensors = everything(device, bf16)[name]
    others = [
        torch.empty_strided(t.shape, t.stride(), dtype=t.dtype, device=device).copy_(t.flip(0) / 2 + 1)
        for t in tensors
    ]
    expected = results(call, others)
    plans.forget()
    for given in (tensors, tensors, tensors, others):
        got = results(call, given)
    assert followed == [False, False, False, True, True]
    for a, b in zip(got, expected, strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=0)


def test_options_that_are_tensors_are_refused_after_equal_numbers_too(device) -> None:
    """To read one at each call would wait for the GPU."""
    x, (q, _, _), (qkv,) = rows(device), heads(device, f32), everything(device, f32)["attention_qkv"][1]
    calls = {
        "layer_norm: eps": lambda o: flashproto.layer_norm(x, 40, eps=o, impl="triton"),
        "rms_norm: eps": lambda o: flashproto.rms_norm(x, 40, eps=o, impl="triton"),
        "attention: scale": lambda o: flashproto.attention(q, q, q, scale=o, impl="triton"),
        "attention_qkv: scale": lambda o: flashproto.attention_qkv(qkv, 2, 1, scale=o, impl="triton"),
        "attention_qkv: causal": lambda o: flashproto.attention_qkv(qkv, 2, 1, causal=o, impl="triton"),
    }
    array = pytest.importorskip("numpy").array
    for name, call in calls.items():
        for _ in range(3):
            call(1)
        for option in (torch.tensor(1), torch.tensor(1.0), torch.tensor(True), array(1.0), [1.0]):
            with pytest.raises(TypeError, match=f"{name} is "):
                call(option)


def test_where_aligned() -> None:
    plan = plans.where_aligned(lambda *tensors: True, lambda *tensors: False)
    memory = torch.zeros(20)
    for start in range(9):
        assert plan(memory, None, memory[start:]) == (start % 4 == 0)
        like = aligned(memory[start:][:10].view(2, 5).t())
        assert like.data_ptr() % 16 == 0
        assert (like.shape, like.stride()) == ((5, 2), (1, 5))


def test_only_some_inputs_require_grad(device, followed) -> None:
    x, w = rows(device), rows(device, f32, 40).requires_grad_()
    for _ in range(3):
        (dw,) = torch.autograd.grad(flashproto.rms_norm(x, 40, w, impl="triton").sum(), w)
        torch.testing.assert_close(dw, (x * (x.square().mean(-1, True) + 1.1920929e-07).rsqrt()).sum(0))
    r, b = rows(device), rows(device, f32, 40)
    for leaf in (x, r, b):
        other = leaf.clone().requires_grad_()
        given = [other if t is leaf else t for t in (x, r, None, b)]
        for _ in range(3):
            y, _ = flashproto.add_layer_norm(given[0], given[1], 40, *given[2:], impl="triton")
            (got,) = torch.autograd.grad((y * x).sum(), other)
            y = torch.layer_norm(given[0] + given[1], (40,), *given[2:])
            torch.testing.assert_close(got, torch.autograd.grad((y * x).sum(), other)[0])
    q, k, v = heads(device, f32)
    v.requires_grad_()
    for _ in range(3):
        out, lse = flashproto.attention(q, k, v, return_lse=True, impl="triton")
        assert lse.requires_grad
        (dv,) = torch.autograd.grad(out.sum(), v)
        assert dv.shape == v.shape
    gate, up = rows(device), rows(device)
    for leaf in (gate, up):
        other = leaf.clone().requires_grad_()
        given = [other if t is leaf else t for t in (gate, up)]
        for _ in range(3):
            (got,) = torch.autograd.grad((flashproto.reglu(*given, impl="triton") * x).sum(), other)
            expected = torch.where(gate > 0, gate if leaf is up else up, 0) * x
            torch.testing.assert_close(got, expected)
    three = False, False, True
    assert followed == [*three, *three, *[True] * 6, *three, *three, *[True] * 3]


@pytest.mark.parametrize("name", NAMES)
def test_gradients_of_other_memory(device, followed, name) -> None:
    """Backward finds saved tensors and upstream gradients with strides that it did not see before."""
    call, tensors = everything(device, bf16)[name]

    def apart(t: Tensor) -> Tensor:  # rows with something between them
        return torch.stack((t, t), 1)[:, 0] if t.ndim else t.clone()

    leaves = [t.detach().requires_grad_() for t in tensors]
    expected: dict[Any, Any] = {}
    for unpack in (Tensor.clone, Tensor.clone, Tensor.clone, apart, apart):
        with torch.autograd.graph.saved_tensors_hooks(Tensor.detach, unpack):
            outputs = call(*leaves)
        outputs = [outputs] if isinstance(outputs, Tensor) else list(outputs)
        given = [
            torch.linspace(-1, 2, o.numel(), device=device).view(o.shape).to(o.dtype) for o in outputs
        ]
        all_one = [torch.ones((), dtype=o.dtype, device=device).expand(o.shape) for o in outputs]
        for kind, upstream in (("given", given), ("apart", [*map(apart, given)]), ("one", all_one)):
            gradients = torch.autograd.grad(outputs, leaves, upstream, retain_graph=True)
            # The same bits from the same strides; other strides may load, and so sum, in another order.
            same_kind = expected.setdefault((kind, unpack), gradients)
            same_values = expected["one" if kind == "one" else "given", Tensor.clone]
            for a, b, c in zip(gradients, same_kind, same_values, strict=True):
                torch.testing.assert_close(a, b, rtol=0, atol=0)
                torch.testing.assert_close(a, c)
    assert followed == [False, False, True, True, True]


@pytest.mark.parametrize("name", NAMES)
def test_second_derivatives_raise(device, followed, name) -> None:
    call, tensors = everything(device, f32)[name]
    for _ in range(3):
        leaves = [t.detach().requires_grad_() for t in tensors]
        outputs = call(*leaves)
        y = outputs if isinstance(outputs, Tensor) else outputs[0]
        gradients = torch.autograd.grad(y.square().sum(), leaves, create_graph=True)
        with pytest.raises(NotImplementedError, match="second derivative"):
            gradients[0].sum().backward()


def test_cross_entropy_returns_what_is_asked_for(device, followed) -> None:
    x, t = rows(device), torch.tensor([3, 39, -100, 0, 3, 8], device=device)
    for reduction in ("none", "mean", "sum"):
        for names in ((), ("z_loss",), ("lse",), ("lse", "z_loss")):
            options: dict[str, Any] = {"z_loss": 0.1, "reduction": reduction}
            options |= {f"return_{name}": True for name in names}
            expected = flashproto.cross_entropy(x, t, **options, impl="reference")
            for grad in (False, True, False, True):
                leaf = x.clone().requires_grad_(grad)
                got = flashproto.cross_entropy(leaf, t, **options, impl="triton")
                torch.testing.assert_close(got, expected)
                if names:
                    wants = [grad, *(grad and name == "lse" for name in names)]
                    assert [y.requires_grad for y in got] == wants
    assert followed == [False, False, False, True, True] * 12


def test_cross_entropy_refuses_a_weight_that_requires_grad(device, followed) -> None:
    x, t, w = rows(device), torch.zeros(6, dtype=torch.int64, device=device), rows(device, f32, 40)
    for _ in range(3):
        flashproto.cross_entropy(x, t, weight=w, impl="triton")
    with pytest.raises(ValueError, match="weight"):
        flashproto.cross_entropy(x, t, weight=w.requires_grad_(), impl="triton")
    with torch.no_grad():
        flashproto.cross_entropy(x, t, weight=w, impl="triton")


def test_narrow_rows_keep_no_statistics(device, followed) -> None:
    for N, kept in ((768, 0), (769, 1)):
        x, w = rows(device, bf16, 3, N).requires_grad_(), rows(device, bf16, N).requires_grad_()
        for function in (flashproto.rms_norm, flashproto.layer_norm):
            for _ in range(3):
                y = function(x, N, w, impl="triton")
            assert y.grad_fn is not None
            assert len(y.grad_fn.saved_tensors) == 2 + kept  # type: ignore[attr-defined]
    assert followed == [False, False, True] * 4


def test_transforms_follow_none(device, followed) -> None:
    x = rows(device)
    for _ in range(3):
        expected = torch.func.grad(lambda x: torch.softmax(x, -1).square().sum())(x)
        y = torch.func.grad(lambda x: flashproto.softmax(x, impl="triton").square().sum())(x)
        torch.testing.assert_close(y, expected)
        flashproto.softmax(x, impl="triton")
    with pytest.raises(RuntimeError):  # no jvp
        torch.func.jvp(lambda x: flashproto.softmax(x, impl="triton"), (x,), (x,))
    with torch.autograd.forward_ad.dual_level():
        dual = torch.autograd.forward_ad.make_dual(x, x)
        with pytest.raises(RuntimeError):
            flashproto.softmax(dual, impl="triton")


def test_export_keeps_the_op(device, followed) -> None:
    """Also of a constant, for which a plan was found before."""
    constant, x = rows(device), rows(device)

    class Model(torch.nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x + flashproto.softmax(constant, impl="triton")

    for _ in range(6):
        expected = Model()(x)
    assert followed[-1]
    exported = torch.export.export(Model(), (x,), strict=False)
    assert any("flashproto.softmax" in str(node.target) for node in exported.graph.nodes)
    torch.testing.assert_close(exported.module()(x), expected, rtol=0, atol=0)


def test_autocast_has_plans_of_its_own(device, followed) -> None:
    x, (q, k, v) = rows(device, bf16), heads(device, f32)
    for _ in range(6):
        assert flashproto.softmax(x, impl="triton").dtype == bf16
        assert flashproto.attention(q, k, v, impl="triton").dtype == f32
        for dtype in (bf16, torch.float16):
            with torch.autocast(device, dtype):
                expected = torch.softmax(x, -1).dtype
                assert flashproto.softmax(x, impl="triton").dtype == expected
                assert flashproto.attention(q, k, v, impl="triton").dtype == dtype
                with torch.autocast(device, enabled=False):
                    assert flashproto.attention(q, k, v, impl="triton").dtype == f32
    assert sum(followed) == len(followed) - 2 * 6  # of two calls of each of six kinds


@pytest.mark.parametrize("dtype", [f32, bf16], ids=str)
@pytest.mark.parametrize("name", NAMES)
def test_under_autocast_as_well(device, followed, name, dtype) -> None:
    """Beside the plans of calls without it; the casts of tensors that need them are recorded too."""
    call, tensors = everything(device, dtype)[name]
    for _ in range(5):
        without = results(call, tensors)
    followed.clear()
    with torch.autocast(device, bf16):
        first, *others = (results(call, tensors) for _ in range(5))
        plain = call(*tensors)
    assert followed == [False, False, *[True] * 4]
    for got in (*others, [plain] if isinstance(plain, Tensor) else plain):
        for a, b in zip(got, first, strict=False):
            assert a.dtype == b.dtype and a.stride() == b.stride()
            torch.testing.assert_close(a, b, rtol=0, atol=0)
    for a, b in zip(results(call, tensors), without, strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=0)


def test_the_default_backend_may_change(device, followed) -> None:
    x = rows(device)
    before = backends.get_default()
    try:
        for impl in ("triton", "reference", None) * 3:
            backends.set_default(impl)
            torch.testing.assert_close(flashproto.softmax(x), torch.softmax(x, -1))
    finally:
        backends.set_default(before)


def test_errors_are_raised_every_time(device, followed) -> None:
    x = rows(device)
    for _ in range(4):
        with pytest.raises(ValueError, match="normalized_shape"):
            flashproto.rms_norm(x, 41)
        with pytest.raises(TypeError, match=r"torch\.Tensor"):
            flashproto.softmax([1.0, 2.0])  # type: ignore[arg-type]
        with pytest.raises(ValueError, match="layout"):
            flashproto.softmax(x.to_sparse())
        with pytest.raises(backends.BackendError):
            flashproto.softmax(x.double(), impl="triton")
    assert not any(followed)


def test_keeps_no_tensor(device, followed) -> None:
    references = []
    norms = "add_layer_norm", "layer_norm of wide rows"
    for name in (*norms, "softmax", "cross_entropy", "geglu", "swiglu of halves", "attention"):
        call, tensors = everything(device, f32)[name]
        for _ in range(3):
            results(call, tensors)
        references += [weakref.ref(t) for t in tensors]
        del call, tensors
    gc.collect()
    assert not any(r() is not None for r in references)


# --- the last plans found -------------------------------------------------------------------------


@pytest.fixture
def keys(monkeypatch: pytest.MonkeyPatch) -> list[object]:
    """Every key that a call asked for so far: none where one of the last plans was found."""
    if not plans.GUARDED:
        pytest.skip(f"torch {torch.__version__}: its check of tensors was not tried, see plans.GUARDED")
    asked: list[object] = []
    key = plans.key

    def asking(*call: Any) -> Any:
        asked.append(key(*call))
        return asked[-1]

    monkeypatch.setattr(plans, "key", asking)
    return asked


@pytest.mark.parametrize("name", NAMES)
def test_last_plans_are_found_without_a_key(device, keys, name) -> None:
    call, tensors = everything(device, bf16)[name]
    *_, wanted = (results(call, tensors) for _ in range(4))
    keys.clear()
    got = results(call, tensors)
    assert bool(keys) == (name == "layer_norm of wide rows")  # whose weight is its bias too
    for a, b in zip(got, wanted, strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=0)


@pytest.mark.parametrize("name", NAMES)
def test_last_plans_record_where_gradients_are_enabled(device, keys, name) -> None:
    call, tensors = everything(device, bf16)[name]

    def recorded(*leaves: Tensor) -> bool:
        y = call(*leaves)
        return (y if isinstance(y, Tensor) else y[0]).requires_grad

    leaves = [t.detach().requires_grad_() for t in tensors]
    assert all(recorded(*leaves) for _ in range(4))
    assert not any(recorded(*tensors) for _ in range(4))
    keys.clear()
    for enabled in (False, True, False, True):
        with torch.set_grad_enabled(enabled):
            assert recorded(*leaves) == enabled
            assert not recorded(*tensors)
    assert bool(keys) == (name == "layer_norm of wide rows")


def test_last_plans_are_those_of_such_tensors(device, keys) -> None:
    def call(x: Tensor) -> Tensor:
        return flashproto.rms_norm(x, 40, weight, impl="triton")

    x, weight = rows(device), rows(device, f32, 40)
    for _ in range(4):
        call(x)
    others = {
        "fewer": x[:3], "more dimensions": x.view(2, 3, 40), "strides": x.repeat(1, 2)[:, ::2],
        "dtype": x.to(bf16), "gradient": x.clone().requires_grad_(), "parameter": Parameter(x),
    }  # fmt: skip
    for name, other in others.items():
        keys.clear()
        got = call(other)
        assert keys, name
        plans.forget()
        assert torch.equal(got, call(other)), name
        for _ in range(4):
            call(x)
    keys.clear()
    call(x + 1)
    assert not keys
    for found in (False, False, False, False, True):
        keys.clear()
        with torch.autocast(device, bf16):
            call(x)
        assert bool(keys) != found
    keys.clear()
    torch.func.grad(lambda z: (call(x) * z).sum())(x)
    assert keys and not any(keys)


def test_few_last_plans(device, keys) -> None:
    shapes = [rows(device, f32, n, 40) for n in range(1, 7)]
    calls = [partial(flashproto.softmax, x, impl="triton") for x in shapes]
    for _ in range(5):
        for call in calls:  # in turn: none of them twice in a row
            call()
    assert all(not recent.found for recent in plans._recent.values())
    for call in calls:
        call(), call()
    (recent,) = plans._recent.values()
    assert len(recent.found) == plans.RECENT
    keys.clear()
    for call in calls[-plans.RECENT :]:
        call()
    assert not keys


def test_is_bounded(monkeypatch: pytest.MonkeyPatch, followed) -> None:
    monkeypatch.setattr(plans, "KEPT", 4)
    for i in range(10):
        plans.keep(i, lambda: None)
        assert len(plans._plans) <= 4


@pytest.mark.parametrize("dtype", [f32, bf16])
@pytest.mark.parametrize(
    ("columns", "given", "centered"),
    [
        (40, "x", False),
        (40, "weight bias", True),
        (5, "residual weight", False),
        (5, "residual weight bias", True),
        (WIDE, "weight", False),
    ],
)
def test_the_norm_ops_of_compiled_calls_follow_plans(
    device: str, followed: list[bool], dtype: torch.dtype, columns: int, given: str, centered: bool
) -> None:
    ops, how = torch.ops.flashproto, (1, 1e-5, centered, "llama" if dtype == bf16 else "torch")
    for _ in range(5):
        x = rows(device, dtype, 3, columns)
        residual = rows(device, f32, 3, columns) if "residual" in given else None
        weight = rows(device, f32, columns) if "weight" in given else None
        bias = rows(device, dtype, columns) if "bias" in given else None
        arguments = x, residual, weight, bias, *how
        made, expected = ops.norm(*arguments), norm_forward(*arguments)
        torch.testing.assert_close(made, expected, rtol=0, atol=0)
        y, total, mean, rstd = made
        dy, dtotal = torch.randn_like(y), None if residual is None else torch.randn_like(total)
        arguments = (
            dy, dtotal, x if residual is None else total, weight, mean, rstd, *how[:3],
            dtype, f32 if residual is not None else dtype, dtype,
            weight is not None, bias is not None, how[3],
        )  # fmt: skip
        made, expected = ops.norm_backward(*arguments), norm_backward(*arguments)
        torch.testing.assert_close(made, expected, rtol=0, atol=0)
    assert followed == [False] * 4 + [True] * 6


def test_the_norm_ops_copy_what_no_plan_takes(device: str, followed: list[bool]) -> None:
    ops = torch.ops.flashproto
    memory = rows(device, bf16, 1, 401)[0]
    for x in (memory[1:].view(10, 40), memory[:400].view(40, 10).t(), memory[:0].view(0, 40)):
        for _ in range(4):
            made = ops.norm(x, None, None, None, 1, 1e-5, True)
            expected = norm_forward(x, None, None, None, 1, 1e-5, True)
            torch.testing.assert_close(made, expected, rtol=0, atol=0)
            y, _, mean, rstd = made
            arguments = y, None, x, None, mean, rstd, 1, 1e-5, True, bf16, bf16, bf16, False, False
            made, expected = ops.norm_backward(*arguments), norm_backward(*arguments)
            torch.testing.assert_close(made, expected, rtol=0, atol=0)
    assert any(followed)
