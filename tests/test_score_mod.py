"""attention's score_mod: operands and their gradients, names and definitions, what is refused.

Beside other features, under transforms and against float64 it is tested as all of variant.FEATURES are.
"""

from __future__ import annotations

import contextlib
import copy
import itertools
import math
import os
import pickle
import subprocess
import sys

import pytest
import torch
from operators import Recorder, launches, sizes_made
from rows import poison
from score_mods import by_definition
from torch import Tensor

import flashproto
from flashproto import hooks, masks
from flashproto.functional.attention_request import attention_request
from flashproto.variant import Form

triton = pytest.importorskip("triton")
tl = triton.language

IMPLS = ("triton", "reference")
B, H, SQ, SK = 2, 2, 40, 45


def heads(device: str) -> list[Tensor]:
    shapes = ((H, SQ), (1, SK), (1, SK))
    return [torch.randn(B, h, n, 16, device=device, requires_grad=True) for h, n in shapes]


def results(inputs: list[Tensor], leaves: list[Tensor], mod: hooks.Call, **options) -> list[Tensor]:
    """out, and the gradients of inputs and leaves."""
    out = flashproto.attention(*inputs, score_mod=mod, **options)
    torch.manual_seed(1)
    return [out, *torch.autograd.grad(out, [*inputs, *leaves], torch.randn_like(out))]


# --- operands -------------------------------------------------------------------------------------

SHAPES = [
    tuple(n if own else 1 for n, own in zip((B, H, SQ, SK), dims, strict=True))
    for dims in itertools.product((False, True), repeat=4)
]


@pytest.mark.few(6)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_gradients_have_the_shapes_of_operands(
    shape: tuple[int, ...], device: str, monkeypatch
) -> None:
    """Against the definition in float64."""
    poison(monkeypatch)
    inputs, causal = heads(device), shape.count(1) % 2 == 1
    operands = [torch.rand(shape, device=device, requires_grad=True) for _ in range(2)]
    mod = hooks.call("test_bent", *operands, 0.1)
    got = results(inputs, operands, mod, causal=causal, impl="triton")
    leaves = [x.detach().double().requires_grad_() for x in (*inputs, *operands)]
    q, k, v = (x.expand(-1, H, -1, -1) for x in leaves[:3])
    places = torch.meshgrid(*(torch.arange(n, device=device) for n in (B, H, SQ, SK)), indexing="ij")
    s = by_definition(q @ k.mT * 16**-0.5, *places, *leaves[3:], 0.1)
    seen = torch.ones(SQ, SK, dtype=torch.bool, device=device).tril(SK - SQ if causal else SK)
    wanted = torch.softmax(s.masked_fill(~seen, -math.inf), -1) @ v
    torch.manual_seed(1)
    dout = torch.randn_like(got[0]).double()
    exact = [wanted, *torch.autograd.grad(wanted, leaves, dout)]
    for a, b in zip(got, exact, strict=True):
        assert a.shape == b.shape
        torch.testing.assert_close(a.double(), b, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("how", ["transposed", "expanded", "no dimension", "bfloat16", "int32", "bool"])
def test_operands_of_any_strides_and_dtype(how: str, device: str) -> None:
    x = torch.rand(H, SQ, SK, device=device) + 0.5
    operand = {
        "transposed": lambda: x.mT.contiguous().mT,
        "expanded": lambda: x.expand(B, H, SQ, SK),
        "no dimension": lambda: x[0, 0, 0].clone(),
        "bfloat16": x.bfloat16,
        "int32": lambda: (4 * x).int(),
        "bool": lambda: x > 1,
    }[how]()
    leaves = [operand.detach().requires_grad_()] if operand.is_floating_point() else []
    mod = hooks.call("multiply_score", leaves[0] if leaves else operand)
    inputs = heads(device)
    got, wanted = (results(inputs, leaves, mod, impl=impl) for impl in IMPLS)
    for a, b in zip(got, wanted, strict=True):
        rounded = {"rtol": 2e-2, "atol": 2e-2} if a.dtype == torch.bfloat16 else {}
        torch.testing.assert_close(a, b, **(rounded or {"rtol": 1e-4, "atol": 1e-4}))


def test_nothing_of_the_size_of_the_scores_is_made(device: str, monkeypatch) -> None:
    """Neither for gates by query and key, nor for their gradients."""
    made = sizes_made(monkeypatch)
    q = torch.randn(1, 1, 150, 16, device=device, requires_grad=True)
    c = torch.randn(150, device=device, requires_grad=True)
    mod = hooks.call("forget", c[:, None], c)
    out = flashproto.attention(q, q, q, causal=True, score_mod=mod, impl="triton")
    torch.autograd.grad(out.square().sum(), [q, c])
    assert made and max(made) <= 150 * 16


def test_forgetting_attention(device: str) -> None:
    """As its paper has it: weights are probabilities times the gates between a key and the query."""
    q, k, v = (torch.randn(1, 2, 30, 16, device=device) for _ in range(3))
    gates = torch.rand(1, 2, 30, device=device, requires_grad=True)
    c = gates.log().cumsum(-1)
    mod = hooks.call("forget", c[..., None], c[:, :, None])
    out = flashproto.attention(q, k, v, causal=True, score_mod=mod, impl="triton")
    weights = torch.zeros(1, 2, 30, 30, device=device)
    for i, j in itertools.combinations_with_replacement(range(30), 2):
        weights[..., j, i] = gates.detach()[..., i + 1 : j + 1].prod(-1)
    weights = weights * torch.exp(q @ k.mT / 4)
    torch.testing.assert_close(out, (weights / weights.sum(-1, keepdim=True)) @ v, rtol=1e-4, atol=1e-5)
    assert torch.autograd.grad(out.sum(), gates)[0].isfinite().all()


@pytest.mark.parametrize("shape", [(1, 1), (H, SQ, 1)], ids=str)
def test_gradients_do_not_feel_that_out_is_rounded(shape: tuple[int, ...], device: str) -> None:
    """What is added to all scores of a row changes nothing: its terms cancel, in 16 bits too."""
    inputs = [x.detach().bfloat16().requires_grad_() for x in heads(device)]
    c = torch.randn(shape, device=device, requires_grad=True)
    mod = hooks.call("forget", c, torch.zeros((), device=device))
    *_, dc = results(inputs, [c], mod, impl="triton")
    torch.testing.assert_close(dc, torch.zeros_like(dc), rtol=0, atol=1e-4)


def test_a_fused_projection(device: str) -> None:
    qkv = torch.randn(B, SQ, (H + 2) * 16, device=device, requires_grad=True)
    heat = torch.rand(H, 1, 1, device=device, requires_grad=True)
    mod, found = hooks.call("multiply_score", heat), []
    for impl in IMPLS:
        out = flashproto.attention_qkv(qkv, H, 1, causal=True, score_mod=mod, scale=-0.3, impl=impl)
        found.append([out, *torch.autograd.grad(out.square().sum(), [qkv, heat])])
    for a, b in zip(*found, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("by", ["bias", "mask"])
def test_hidden_pairs_have_no_part(by: str, device: str) -> None:
    """Where the function or its derivative is infinite or NaN."""
    q, k, v = (x.detach().abs() for x in heads(device))
    k[:, :, -1] = 0  # of which each score has an infinite derivative
    q, k, v = (x.requires_grad_() for x in (q, k, v))
    bias = torch.zeros(SK, device=device)
    bias[-1] = -math.inf
    hiding = (
        {"bias": bias} if by == "bias" else {"mask": masks.padding(torch.tensor([SK - 1]).to(device))}
    )
    out = flashproto.attention(q, k, v, score_mod=hooks.call("test_root"), **hiding, impl="triton")
    grads = torch.autograd.grad(out.sum(), [q, k])
    leaves = [x.detach()[:, :, :-1].requires_grad_() for x in (k, v)]
    wanted = flashproto.attention(q, *leaves, score_mod=hooks.call("test_root"), impl="reference")
    torch.testing.assert_close(out, wanted, rtol=1e-4, atol=1e-5)
    dq, dk = torch.autograd.grad(wanted.sum(), [q, leaves[0]])
    torch.testing.assert_close(
        grads, (dq, torch.nn.functional.pad(dk, (0, 0, 0, 1))), rtol=1e-4, atol=1e-4
    )


@triton.jit
def root(score, b, h, i, j):
    return tl.sqrt(score)


@triton.jit
def root_backward(dscore, score, b, h, i, j):
    return (dscore * 0.5 / tl.sqrt(score),)


hooks.register(
    "test_root", signature="score", forward=root, backward=root_backward,
    reference=lambda score, b, h, i, j: score.sqrt(),
)  # fmt: skip


@triton.jit
def divide(score, b, h, i, j, by):
    return score / by


@triton.jit
def divide_backward(dscore, score, b, h, i, j, by):
    return dscore / by, -dscore * score / (by * by)


hooks.register(
    "test_divide", signature="score", forward=divide, backward=divide_backward,
    reference=lambda score, b, h, i, j, by: score / by, operands=1,
)  # fmt: skip


@pytest.mark.parametrize("shape", [(SQ, 1), (SK,), (H, 1, 1)], ids=str)
def test_tokens_behind_the_last_have_no_part(shape: tuple[int, ...], device: str) -> None:
    """Where an operand is 0 and the function no number."""
    inputs = heads(device)
    by = (torch.rand(shape, device=device) + 0.5).requires_grad_()
    bias = torch.zeros(SK, device=device, requires_grad=True)
    mod = hooks.call("test_divide", by)
    found = [results(inputs, [by, bias], mod, bias=bias, impl=impl) for impl in IMPLS]
    torch.testing.assert_close(*found, rtol=1e-3, atol=1e-4)


# --- names and definitions ------------------------------------------------------------------------


@triton.jit
def twice(score, b, h, i, j):
    return 2.0 * score


@triton.jit
def twice_backward(dscore, score, b, h, i, j):
    return (2.0 * dscore,)


@triton.jit
def thrice(score, b, h, i, j):
    return 3.0 * score


@triton.jit
def thrice_backward(dscore, score, b, h, i, j):
    return (3.0 * dscore,)


@triton.jit
def fourfold(score, b, h, i, j):
    return 4.0 * score


@triton.jit
def fourfold_backward(dscore, score, b, h, i, j):
    return (4.0 * dscore,)


TIMES = {
    2: (twice, twice_backward),
    3: (thrice, thrice_backward),
    4: (fourfold, fourfold_backward),
}


def define(name: str, times: int) -> None:
    forward, backward = TIMES[times]
    hooks.register(
        name,
        signature="score",
        forward=forward,
        backward=backward,
        reference=lambda score, b, h, i, j: times * score,
        replace=True,
    )


@pytest.mark.parametrize(
    "how", ["eager", *(pytest.param(x, marks=pytest.mark.slow) for x in ("op", "compile"))]
)
def test_another_definition_of_a_name_is_what_runs(how: str, device: str) -> None:
    """In calls that are cached, as ops, and compiled; the backward of a call is that of its forward."""
    name = f"test_edited_{how}"
    q, k, v = heads(device)

    def attend(q: Tensor) -> Tensor:
        return flashproto.attention(q, k, v, score_mod=hooks.call(name), scale=0.1, impl="triton")

    def wanted(times: int) -> list[Tensor]:
        out = flashproto.attention(q, k, v, scale=0.1 * times, impl="reference")
        return [out, *torch.autograd.grad(out.square().sum(), q)]

    torch.compiler.reset()
    run = torch.compile(attend, fullgraph=True, backend="aot_eager") if how == "compile" else attend
    watched = Recorder() if how == "op" else contextlib.nullcontext()
    kept = []
    for times in (2, 3, 4):
        define(name, times)
        for _ in range(2):
            with watched:
                out = run(q)
            torch.testing.assert_close(out, wanted(times)[0], rtol=1e-4, atol=1e-5)
        kept.append((times, out))
    for times, out in kept:
        dq = torch.autograd.grad(out.square().sum(), q)[0]
        torch.testing.assert_close(dq, wanted(times)[1], rtol=1e-4, atol=1e-4)


def test_calls_keep_their_definition(device: str) -> None:
    """As they are used again, copied and pickled."""
    q, k, v = heads(device)
    for times in (2, 3):
        define("test_kept", times)
        if times == 2:
            first = hooks.call("test_kept")
    wanted = flashproto.attention(q, k, v, scale=0.2, impl="reference")
    for mod in (first, copy.deepcopy(first), pickle.loads(pickle.dumps(first))):
        for impl in ("triton", "reference"):
            got = flashproto.attention(q, k, v, score_mod=mod, scale=0.1, impl=impl)
            torch.testing.assert_close(got, wanted, rtol=1e-4, atol=1e-5)
    assert hooks.get("test_kept") is hooks.call("test_kept").hook is not first.hook


KEYS = """
import triton, triton.language as tl
from triton._C.libtriton import native_specialize_impl
from triton.backends.nvidia.compiler import CUDABackend
from flashproto.kernels.attention_forward import attention_forward_kernel as forward
from flashproto.kernels.attention_backward import attention_backward_keys_kernel as keys
import importlib.util, pathlib, tempfile
texts, found = ("score + 1.0", "score + 2.0"), []
for n, text in enumerate(texts):
    path = pathlib.Path(tempfile.mkdtemp()) / "mods.py"
    path.write_text(f'''import triton
@triton.jit
def mod(score, b, h, i, j):
    return {text}
''')
    spec = importlib.util.spec_from_file_location("mods", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    found.append(native_specialize_impl(CUDABackend, module.mod, False, True, True))
assert found[0] != found[1], found
for kernel in (forward, keys):
    (p,) = (p for p in kernel.params if p.name == "SCORE_MOD")
    assert p.is_constexpr
"""


@pytest.mark.slow
def test_an_edited_source_is_another_key_of_triton(tmp_path) -> None:
    """Of two functions of one name, in a process without the interpreter."""
    environment = os.environ | {"TRITON_INTERPRET": "0", "PYTHONPATH": os.pathsep.join(sys.path)}
    command = [sys.executable, "-c", KEYS]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_the_name_is_in_the_text_of_an_op(device: str) -> None:
    """With the scalars behind the other floats."""
    q, k, v = heads(device)
    x = torch.rand(H, 1, 1, device=device)
    mod = hooks.call("test_bent", x, x[0], 0.25)
    request = attention_request("attention", q, k, v, softcap=3.0, score_mod=mod, sinks=x[:, 0, 0])
    ints, floats, text = request.variant.form.flat()
    assert text == "softcap=2+sinks+score_mod//softcap/sinks,score_mod[0],score_mod[1]/test_bent"
    assert floats == [3.0, 0.25]
    form = Form.of(ints, floats, text)
    assert form == request.variant.form and hash(form) == hash(request.variant.form)
    found = form.variant([*request.variant.tensors.values()]).score_mod
    assert found is not None and found == mod


def test_calls_with_other_numbers_are_other_calls(device: str) -> None:
    """Operands are tensors of the call; numbers and names are in its key."""
    inputs = [x.detach() for x in heads(device)]
    x = torch.rand(H, 1, 1, device=device)
    for scale, step in itertools.product((1.0, 2.0), (0.1, 0.3)):
        for _ in range(3):
            mod = hooks.call("test_bent", x * scale, x, step)
            a, b = (flashproto.attention(*inputs, score_mod=mod, impl=impl) for impl in IMPLS)
            torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)


@pytest.mark.slow
def test_other_values_compile_nothing(device: str) -> None:
    """Constants of launches stay the same."""
    inputs, each = heads(device), []
    for scale in (0.5, 1.0):
        seen = set()
        x = torch.rand(H, SQ, 1, device=device, requires_grad=True)
        with launches() as launched:
            results(inputs, [x], hooks.call("test_bent", x, x, scale), impl="triton")
        for launch in launched:
            constants = {n: v for n, v in launch.arguments.items() if n.isupper()}
            seen.add((launch.kernel, str(sorted(constants.items()))))
        each.append(seen)
    assert {kernel for kernel, _ in seen} >= {
        "attention_forward_kernel",
        "attention_backward_bias_kernel",
    }
    if device == "cpu":  # where launches tell their constants
        assert each[0] == each[1]


# --- what is refused ------------------------------------------------------------------------------


def test_what_does_not_fit_is_refused(device: str) -> None:
    inputs = heads(device)
    x = torch.rand(H, 1, 1, device=device)

    def attend(mod: object, **options) -> None:
        flashproto.attention(*inputs, score_mod=mod, **options)

    with pytest.raises(ValueError, match=r"name is 'nothing'; it takes one of .*'forget'"):
        attend(hooks.call("nothing"))
    with pytest.raises(TypeError, match=r"score_mod is 'multiply_score'; it takes what flashproto"):
        attend("multiply_score")
    with pytest.raises(
        ValueError, match="score_mod is 'multiply', of signature 'row'; it takes a hook"
    ):
        attend(hooks.call("multiply", x))
    with pytest.raises(ValueError, match="epilogue is 'multiply_score', of signature 'score'"):
        flashproto.softmax(x, epilogue=hooks.call("multiply_score", x))
    with pytest.raises(ValueError, match=r"score_mod operand 0 is of shape \[3, 1, 1\]; it takes a sh"):
        attend(hooks.call("multiply_score", torch.rand(3, 1, 1, device=device)))
    with pytest.raises(ValueError, match="score_mod operand 0 is on"):
        attend(hooks.call("multiply_score", x.to("meta")))
    with pytest.raises(ValueError, match="name is 'forget', which is taken"):
        hooks.register("forget", signature="score", forward=None, reference=lambda s, *_: s)
    with pytest.raises(ValueError, match="signature is 'column'; it takes 'row' or 'score'"):
        hooks.register("test_column", signature="column", forward=None, reference=lambda s, *_: s)
    mod = hooks.call("multiply_score", x)
    for wrong, do in (
        (lambda score, b, h, i, j: score, r"Pass hooks.call\(name, .*signature='score'"),
        ("forget", r"Pass hooks.call\('forget', "),
    ):
        with pytest.raises(TypeError, match=do):
            attend(wrong)
    for impl, why in (("hopper", "its kernels have no score_mod"), ("torch", "no score_mod")):
        with pytest.raises(flashproto.BackendError, match=why):
            attend(mod, impl=impl)


def test_a_definition_may_lack_a_part(device: str) -> None:
    """A derivative, or the function in Triton."""
    inputs = heads(device)
    hooks.register(
        "test_forward_only",
        signature="score",
        forward=twice,
        reference=lambda s, *_: 2 * s,
        replace=True,
    )
    hooks.register(
        "test_reference", signature="score", forward=None, reference=lambda s, *_: 2 * s, replace=True
    )
    mod = hooks.call("test_forward_only")
    with pytest.raises(
        ValueError, match=r"score_mod is 'test_forward_only.*', which has no derivative"
    ):
        flashproto.attention(*inputs, score_mod=mod)
    with torch.no_grad():
        wanted = flashproto.attention(*inputs, scale=0.5, impl="reference")
        got = flashproto.attention(*inputs, score_mod=mod, impl="triton")
        torch.testing.assert_close(got, wanted, rtol=1e-4, atol=1e-5)
        mod = hooks.call("test_reference")
        torch.testing.assert_close(
            flashproto.attention(*inputs, score_mod=mod, impl="reference"), wanted
        )
        with pytest.raises(flashproto.BackendError, match=r"hook .* has no @triton\.jit function"):
            flashproto.attention(*inputs, score_mod=mod, impl="triton")


def test_no_elements(device: str) -> None:
    for Sq, Sk in ((0, 5), (5, 0)):
        inputs = [torch.randn(1, 2, n, 16, device=device, requires_grad=True) for n in (Sq, Sk, Sk)]
        c = torch.randn(2, Sq, 1, device=device, requires_grad=True)
        d = torch.randn(1, 1, Sk, device=device, requires_grad=True)
        for impl in IMPLS:
            out, *grads = results(inputs, [c, d], hooks.call("forget", c, d), impl=impl)
            assert not out.any() and not any(x.any() for x in grads)
