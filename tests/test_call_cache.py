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

from flashproto import backends, masks
from flashproto.functional.cached import cached, named, source
from flashproto.ops import call, call_cache, private


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


def kept_calls() -> int:
    return sum(len(kind.functions) for kind in call_cache._kinds.values())


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
def sample(x=EMPTY, shape=EMPTY, w=default_w, eps=default_eps, *extra, on=default_on, \
impl=default_impl, **others):
    if others or extra or x is EMPTY or shape is EMPTY:
        refuse_call(inner, extra, others, {{'x': x, 'shape': shape}})
    if is_dynamo_compiling():
        return inner(x, shape, w, eps, on=on, impl=impl)
    tensors = (x,)
    if w is not None:
        tensors += (w,)
    kind = ({name}, shape, shape.__class__, eps, eps.__class__, on, on.__class__, impl, w is None,)
    call = find(kind, tensors)
    if call is not None:
        return call(*tensors)
    made = inner(x, shape, w, eps, on=on, impl=impl)
    return resolve(kind, names(('x', 'w'), (x, w,)), tensors, made)"""
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
    scope |= {"resolve": lambda *_, **__: None, "inner": sample, "names": named}
    scope |= {"is_dynamo_compiling": lambda: False, "EMPTY": inspect.Parameter.empty}
    scope |= {f"default_{p.name}": p.default for p in inspect.signature(sample).parameters.values()}
    exec(source(sample, False), scope)
    for given, options in calls:
        scope["sample"](*given, **options)
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
    (kind,) = call_cache._kinds.values()
    assert len(kind.functions) == 1 and len(kind.recent) == int(private.GUARDED)


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
    assert all(not kind.recent for kind in call_cache._kinds.values())


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
    monkeypatch.setattr(call_cache, "CAPACITY", 5)
    monkeypatch.setattr(call, "CAPACITY", 5)
    for n in range(1, 30):
        x = torch.randn(2, 2 * n, device=device)
        for _ in range(3):
            flashproto.swiglu(x, impl="triton")
        assert kept_calls() <= 5
        assert all(len(operator.kept) <= 5 for operator in call.OPERATORS.values())
        assert all(len(kind.recent) <= call_cache.RECENT for kind in call_cache._kinds.values())


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
                kept = kept_calls()
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


# --- values -----------------------------------------------------------------------------------------


def test_the_text_grows_with_the_number_of_optional_tensors() -> None:
    def lines(n: int) -> int:
        scope: dict[str, Any] = {"Tensor": Tensor}
        options = ", ".join(f"x{i}: Tensor | None = None" for i in range(n))
        exec(f"from __future__ import annotations\ndef many(x: Tensor, {options}): ...", scope)
        return len(source(scope["many"], True).splitlines())

    assert lines(12) - lines(2) == 2 * 10 and lines(2) <= 20
    longest = source(inspect.unwrap(flashproto.attention_with_kv_cache), True)
    assert len(longest.splitlines()) <= 50


def varlen(**given: Tensor) -> Any:
    x = torch.randn(12, 2, 16)
    cu = {"cu_seqlens_q": torch.tensor([0, 5, 12]), "cu_seqlens_k": torch.tensor([0, 5, 12])}
    cu = {name: x.int() for name, x in cu.items()} | given
    return lambda: flashproto.attention_varlen(x, x, x, **cu, impl="triton")


def cache(**given: Tensor) -> Any:
    paged = "page_table" in given
    k_cache, v_cache = (torch.zeros(4, 8, 2, 16) for _ in range(2))
    options = {"lengths": torch.tensor([3, 5], dtype=torch.int32)}
    options["cache_index"] = torch.tensor([1, 0], dtype=torch.int32)
    if paged:
        options["page_table"] = torch.tensor([[2, 3], [1, 0]], dtype=torch.int32)
    options |= given
    side_by_side = "cu_seqlens_q" in given
    shape = (3, 2, 16) if side_by_side else (2, 2, 1, 16)
    q, k, v = (torch.randn(shape) for _ in range(3))
    if "k_scale" in given:
        k_cache, v_cache = (x.to(torch.float8_e4m3fn) for x in (k_cache, v_cache))
        options["v_scale"] = torch.ones(2)

    def call() -> None:
        flashproto.attention_with_kv_cache(q, k_cache, v_cache, k=k, v=v, **options, impl="triton")

    return call


@pytest.mark.slow
@pytest.mark.skipif(torch.cuda.is_available(), reason="a GPU's tensors are not looked at")
@pytest.mark.parametrize(
    "make, name, right, wrong",
    [
        (varlen, "cu_seqlens_q", [0, 5, 12], [0, 5, 13]),
        (varlen, "cu_seqlens_k", [0, 5, 12], [0, 7, 6]),
        (varlen, "seqused_q", [5, 0], [6, 0]),
        (varlen, "seqused_k", [3, 7], [3, -1]),
        (cache, "lengths", [3, 5], [3, 8]),
        (cache, "starts", [1, 2], [1, 9]),
        (cache, "cache_index", [1, 0], [1, 4]),
        (cache, "page_table", [[2, 3], [1, 0]], [[2, 3], [4, 0]]),
        (cache, "cu_seqlens_q", [0, 1, 3], [0, 4, 3]),
        (cache, "k_scale", [1.0, 2.0], [1.0, 0.0]),
    ],
)
def test_values_are_checked_at_every_call(
    make: Callable[..., Any], name: str, right: Any, wrong: Any
) -> None:
    x = torch.tensor(right, dtype=torch.float32 if name == "k_scale" else torch.int32)
    call = make(**{name: x})
    for _ in range(10):
        call()
    assert kept_calls() == 1
    x.copy_(torch.tensor(wrong))
    for _ in range(2):
        with pytest.raises(ValueError, match=f"{name} is "):
            call()
    x.copy_(torch.tensor(right))
    call()


def test_what_is_written_lies_apart_at_every_call(device: str) -> None:
    q, k, v = (torch.randn(1, 2, 1, 16, device=device) for _ in range(3))
    memory = torch.zeros(2, 1, 8, 2, 16, device=device)
    lengths = torch.zeros(1, dtype=torch.int32, device=device)

    def call(v_cache: Tensor) -> None:
        flashproto.attention_with_kv_cache(
            q, memory[0], v_cache, lengths=lengths, k=k, v=v, impl="triton"
        )

    for _ in range(5):
        call(memory[1])
    with pytest.raises(ValueError, match="v_cache is in the memory of k_cache"):
        call(memory[0])


def test_what_is_written_in_place_is_known_to_autograd(device: str) -> None:
    q, k, v = (torch.randn(1, 2, 1, 16, device=device) for _ in range(3))
    k_cache, v_cache = (torch.zeros(1, 8, 2, 16, device=device) for _ in range(2))
    lengths = torch.zeros(1, dtype=torch.int32, device=device)
    for n in range(1, 6):
        flashproto.attention_with_kv_cache(
            q, k_cache, v_cache, lengths=lengths, k=k, v=v, impl="triton"
        )
        assert (k_cache._version, v_cache._version) == (n, n)


def test_masks_are_told_apart_and_follow_their_tensors(device: str) -> None:
    """By their forms and tensors: of other objects alike one call is kept."""
    q, k, v = (torch.randn(2, 2, 8, 16, device=device) for _ in range(3))
    lengths = torch.tensor([3, 5], device=device)
    ids = torch.tensor([0, 0, 0, 1, 1, 1, 1, 2], device=device)
    enter, leave = torch.arange(8, device=device), torch.full((8,), 8, device=device)
    made = {
        "documents": lambda: masks.documents(ids),
        "causal documents": lambda: masks.causal() & masks.documents(ids),
        "window": lambda: masks.window(2, first=1),
        "padding": lambda: masks.padding(lengths),
        "prefix": lambda: masks.prefix(lengths),
        "tree": lambda: masks.tree(enter, leave),
        "padded documents": lambda: masks.documents(ids) & masks.padding(lengths),
    }
    for n in range(6):
        lengths.copy_(torch.tensor([1 + n % 3, 7 - n % 3]))
        ids.copy_(ids.roll(n % 2))
        for mask in made.values():
            got, wanted = (
                flashproto.attention(q, k, v, mask=mask(), impl=i) for i in ("triton", "reference")
            )
            torch.testing.assert_close(got, wanted, rtol=1e-5, atol=1e-5)
    assert kept_calls() == len(made)


OTHERS = {"attn_mask": "mask", "is_causal": "causal", "softmax_scale": "scale", "window_size": "window"}


@pytest.mark.parametrize("name", OTHERS)
def test_names_of_other_libraries_get_a_hint(name: str) -> None:
    x = torch.zeros(1, 1, 2, 4)
    with pytest.raises(TypeError, match=rf"attention\(\) got .* '{name}'; .* is {OTHERS[name]}"):
        flashproto.attention(x, x, x, **{name: None})
    with pytest.raises(TypeError, match="unexpected keyword argument 'nonsense'; it takes q, k, v"):
        flashproto.attention(x, x, x, nonsense=1)
    with pytest.raises(TypeError, match="did you mean 'causal'\\? It takes q, k, v"):
        flashproto.attention(x, x, x, casual=True)
    with pytest.raises(TypeError, match="name for it is is_causal"):
        flashproto.scaled_dot_product_attention(x, x, x, causal=True)
    with pytest.raises(TypeError, match="it takes x, normalized_shape"):  # which has no such argument
        flashproto.rms_norm(x, 4, attn_mask=None)


X = torch.zeros(1, 1, 2, 4)
MISFITS = {
    r"softmax\(\) got .* 'dim'; leave it out: it is the last": lambda: flashproto.softmax(X, dim=-1),
    r"rms_norm\(\) got .*; call add_layer_norm or add_rms_norm": lambda: flashproto.rms_norm(
        X, 4, residual=X
    ),
    r"softmax\(\) takes 1 positional argument but 2 .*as scale=": lambda: flashproto.softmax(X, -1),
    r"attention\(\) takes 3 positional arguments but 4 .*as causal=": lambda: flashproto.attention(
        X, X, X, True
    ),
    r"attention\(\) got .* 'query'; it takes q, k, v": lambda: flashproto.attention(query=X, key=X),
    r"attention\(\) needs v; it takes q, k, v": lambda: flashproto.attention(X, X),
    r"name for it is lengths": lambda: flashproto.attention_with_kv_cache(X, X, X, cache_seqlens=X),
    r"attention_with_kv_cache\(\) needs lengths": lambda: flashproto.attention_with_kv_cache(X, X, X),
    r"did you mean 'ignore_index'": lambda: flashproto.linear_cross_entropy(X, X, X, ignore_indx=1),
    r"rope\(\) needs cos and sin": lambda: flashproto.rope(X, X),
    r"did you mean 'first'": lambda: masks.window(5, frst=3),
    r"window\(\) needs left; it takes left, right, first": lambda: masks.window(),
    r"window\(\) takes 3 positional arguments but 4 were given; it": lambda: masks.window(5, 0, 0, 0),
    r"from_function\(\) needs function": lambda: masks.from_function(),
}


@pytest.mark.parametrize("said", MISFITS)
def test_calls_that_do_not_fit_say_what_is_taken(said: str) -> None:
    with pytest.raises(TypeError, match=said):
        MISFITS[said]()
    assert masks.window(None).visible(1, 2).all()  # None is a number of keys there
