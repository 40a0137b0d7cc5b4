"""The call cache (flashproto/ops/call_cache.py): what a call's key tells apart, what is kept, and that
nothing depends on it.  tests/test_call.py has what all operators have in common."""

from __future__ import annotations

import gc
import inspect
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

import flashproto

pytest.importorskip("triton")

from flashproto import backends
from flashproto.ops import call, call_cache, private
from flashproto.ops.call_cache import cached, source


@pytest.fixture(autouse=True)
def forgotten() -> Iterator[None]:
    call_cache.forget()
    yield
    call_cache.forget()


@pytest.fixture
def looks(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """For each look into the cache, whether it found a call."""
    seen: list[bool] = []
    for function in (flashproto.swiglu, flashproto.rms_norm, flashproto.attention):
        scope = function.__globals__
        find = scope["find"]

        def looking(*asked: Any, find: Callable[..., Any] = find) -> Any:
            found = find(*asked)
            seen.append(found is not None)
            return found

        monkeypatch.setitem(scope, "find", looking)
    return seen


# --- keys -------------------------------------------------------------------------------------------


def sample(
    x: Tensor,
    shape: int | list[int],
    w: Tensor | None = None,
    eps: float = 1.0,
    *,
    on: bool = True,
    impl: str | None = None,
) -> Any:
    """A signature."""


def test_the_text_that_is_written() -> None:
    name = repr(f"{__name__}.sample")
    assert (
        source(sample, False)
        == f"""\
def sample(x, shape, w=default_w, eps=default_eps, *, on=default_on, impl=default_impl):
    if w is None:
        which, tensors = 1, (x,)
    else:
        which, tensors = 0, (x, w,)
    kind = ({name}, shape, shape.__class__, eps, eps.__class__, on, on.__class__, impl, which)
    call = find(kind, tensors)
    if call is not None:
        return call(*tensors)
    return resolve(kind, tensors, function, x, shape, w, eps, on=on, impl=impl)"""
    )


def test_help_shows_the_function() -> None:
    wrapped = cached(sample)
    assert inspect.signature(wrapped) == inspect.signature(sample)
    assert wrapped.__doc__ == "A signature."
    for name in ("rms_norm", "swiglu", "attention", "cross_entropy", "softmax"):
        assert "options" not in inspect.signature(getattr(flashproto, name)).parameters


def kinds_of(calls: list[tuple[tuple[Any, ...], dict[str, Any]]]) -> list[Any]:
    seen: list[Any] = []
    scope: dict[str, Any] = {"find": lambda kind, tensors: seen.append((kind, tensors))}
    scope |= {"resolve": lambda *_, **__: None, "function": sample}
    scope |= {f"default_{p.name}": p.default for p in inspect.signature(sample).parameters.values()}
    exec(source(sample, False), scope)
    for given, named in calls:
        scope["sample"](*given, **named)
    return seen


def test_arguments_that_differ_have_keys_that_differ() -> None:
    x, w = torch.zeros(2), torch.zeros(2)
    calls = [
        ((x, shape, weight, eps), {"on": on, "impl": impl})
        for shape in (2, 2.0, True, 1, (2,))
        for weight in (None, w)
        for eps in (1, 1.0, True, 0.5)
        for on in (True, 1, False, 0)
        for impl in (None, "triton")
    ]
    keys = {repr(kind) for kind, _ in kinds_of(calls)}
    assert len(keys) == len(calls)
    (kind, tensors), (same, _) = kinds_of(
        [((x, 2), {}), ((x, 2, None, 1.0), {"on": True, "impl": None})]
    )
    assert kind == same and tensors == (x,)


@pytest.mark.parametrize("eps", ["1e-5", True, -1.0, float("nan")])
def test_errors_are_raised_every_time(device: str, eps: Any) -> None:
    """Also where an equal number was right before."""
    x = torch.randn(4, 16, device=device)
    for _ in range(3):
        flashproto.rms_norm(x, 16, eps=1.0, impl="triton")
        with pytest.raises((TypeError, ValueError), match="rms_norm: eps is"):
            flashproto.rms_norm(x, 16, eps=eps, impl="triton")


def test_numbers_in_sequences_are_told_apart(device: str) -> None:
    x = torch.randn(4, 1, device=device)
    for _ in range(3):
        for right in (1, (1,), [1]):
            flashproto.rms_norm(x, right, impl="triton")
        for wrong in ((True,), [True]):
            with pytest.raises(ValueError, match="normalized_shape is"):
                flashproto.rms_norm(x, wrong, impl="triton")


def test_what_no_gradient_can_have_is_refused_after_calls_without(device: str) -> None:
    x, targets = torch.randn(3, 5, device=device), torch.ones(3, dtype=torch.int64, device=device)
    weight = torch.ones(5, device=device, requires_grad=True)
    for _ in range(5):
        with torch.no_grad():
            flashproto.cross_entropy(x, targets, weight=weight, impl="triton")
        with pytest.raises(ValueError, match="weight is "):
            flashproto.cross_entropy(x, targets, weight=weight, impl="triton")


def test_lists_and_tensors_as_options(device: str) -> None:
    x = torch.randn(4, 16, device=device)
    wanted = flashproto.rms_norm(x, 16, impl="triton")
    for shape in ([16], (16,), torch.Size([16])):
        for _ in range(3):
            assert torch.equal(flashproto.rms_norm(x, shape, impl="triton"), wanted)
    scale = torch.tensor(2.0, device=device)
    for _ in range(3):
        with pytest.raises(TypeError, match="softmax: scale is a tensor"):
            flashproto.softmax(x, scale=scale, impl="triton")


# --- what is kept -----------------------------------------------------------------------------------


def test_the_second_call_is_found_and_the_guards_find_the_fourth(
    device: str, looks: list[bool]
) -> None:
    x = torch.randn(4, 16, device=device)
    for _ in range(5):
        flashproto.swiglu(x, x.clone(), impl="triton")
    assert looks == [False, True, True, True, True]
    (recent,) = call_cache._recent.values()
    assert len(recent.found) == int(private.GUARDED)


def test_by_key_alone_all_is_the_same(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The plain path, for versions of torch that were not tried."""
    monkeypatch.setattr(private, "GUARDED", False)
    x, u = (torch.randn(4, 16, device=device, requires_grad=True) for _ in range(2))
    found = []
    for _ in range(4):
        y = flashproto.swiglu(x, u, impl="triton")
        found.append([y, *torch.autograd.grad(y.sum(), (x, u))])
    for again in found[1:]:
        assert all(map(torch.equal, again, found[0]))
    assert all(not recent.found for recent in call_cache._recent.values())


def test_keeps_no_tensor(device: str) -> None:
    gone = []

    def calls() -> None:
        x, u, w = (torch.randn(s, device=device, requires_grad=True) for s in ((4, 16), (4, 16), (16,)))
        for _ in range(4):
            y = flashproto.swiglu(x, u, impl="triton")
            z = flashproto.rms_norm(y, 16, w, impl="triton")
            grads = torch.autograd.grad(z.sum(), (x, u, w))
            loss = flashproto.cross_entropy(
                z, torch.zeros(4, dtype=torch.int64, device=device), impl="triton"
            )
        gone.extend(map(weakref.ref, (x, u, w, y, z, *grads, loss)))

    calls()
    gc.collect()
    assert all(ref() is None for ref in gone)


def test_is_bounded(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(call_cache, "KEPT", 5)
    monkeypatch.setattr(call, "KEPT", 5)
    for n in range(1, 30):
        x = torch.randn(2, 2 * n, device=device)
        for _ in range(3):
            flashproto.swiglu(x, impl="triton")
        assert len(call_cache._calls) <= 5
        assert all(len(operator.kept) <= 5 for operator in call.OPERATORS.values())
        assert all(len(recent.found) <= call_cache.RECENT for recent in call_cache._recent.values())


def test_follows_what_is_in_the_tensors_and_where_they_start(device: str) -> None:
    memory = torch.randn(4 * 16 + 8, device=device)
    for start in (0, 1, 4, 0, 3, 1):
        x = memory[start : start + 64].view(4, 16)
        x.normal_()
        wanted = flashproto.swiglu(x, impl="reference")
        torch.testing.assert_close(flashproto.swiglu(x, impl="triton"), wanted)


def test_the_default_backend_may_change(device: str) -> None:
    x = torch.randn(4, 16, device=device)
    for impl in ("triton", "reference", "triton", None, "torch"):
        backends.set_default(impl)
        try:
            for _ in range(3):
                flashproto.swiglu(x)
                kept = len(call_cache._calls)
        finally:
            backends.set_default(None)
        assert kept >= (impl in ("triton", None))


def test_only_some_inputs_require_grad(device: str) -> None:
    shapes = (4, 16), (4, 16)
    for needs in ((True, False), (False, True), (True, True), (False, False), (True, False)) * 3:
        tensors = [
            torch.randn(s, device=device, requires_grad=n) for s, n in zip(shapes, needs, strict=True)
        ]
        y = flashproto.swiglu(*tensors, impl="triton")
        assert y.requires_grad == any(needs)
        if any(needs):
            wanted = flashproto.swiglu(*tensors, impl="reference")
            leaves = [t for t in tensors if t.requires_grad]
            got = torch.autograd.grad(y.sum(), leaves)
            for a, b in zip(got, torch.autograd.grad(wanted.sum(), leaves), strict=True):
                torch.testing.assert_close(a, b)


def test_gradients_of_other_memory(device: str) -> None:
    """Transposed, expanded and unaligned ones, after calls with contiguous ones."""
    x = torch.randn(6, 16, device=device, requires_grad=True)
    dy = torch.randn(6, 16, device=device)
    late = torch.empty(6 * 16 + 1, device=device)[1:].view(6, 16).copy_(dy)
    for _ in range(2):
        for gradient in (dy, dy.t().contiguous().t(), dy[:1].expand(6, 16), late, dy):
            for name in ("gelu", "softmax"):
                f = getattr(flashproto, name)
                (got,) = torch.autograd.grad(f(x, impl="triton"), x, gradient)
                (wanted,) = torch.autograd.grad(f(x, impl="reference"), x, gradient)
                torch.testing.assert_close(got, wanted)


def test_export_keeps_the_op(device: str) -> None:
    class Model(torch.nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return flashproto.swiglu(x, impl="triton")

    x = torch.randn(4, 16, device=device)
    for _ in range(3):
        flashproto.swiglu(x, impl="triton")
    exported = torch.export.export(Model(), (x,))
    assert any("flashproto" in str(node.target) for node in exported.graph.nodes)


# --- private entry points ---------------------------------------------------------------------------


def test_what_is_private_was_tried_with_these_versions() -> None:
    """Where this fails, look at what ops/private.py relies on, and add the version."""
    assert private.TRIED["torch"] == ((2, 11), (2, 13), (2, 14))
    assert private.TRIED["triton"] == ((3, 6), (3, 8), (3, 9))
    if private.GUARDED:
        x, y = torch.zeros(2, 3), torch.zeros(2, 3)
        guards = private.TensorGuards(x, dynamic_dims_sizes=[[2, 3]], dynamic_dims_strides=[[3, 1]])
        assert guards.check(y)
        for other in (
            y.double(),
            y.t(),
            torch.zeros(3, 3),
            y.requires_grad_(),
            torch.zeros(2, 6)[:, ::2],
        ):
            assert not guards.check(other)
    assert private.dispatch_modes() == 0 and not private.transforms_active()
    assert private.allows_tf32() == (torch.backends.cuda.matmul.fp32_precision == "tf32")
