"""torch's own functions of attention on this library's kernels, against a definition in float64.

On a CPU torch has no kernels of these operators.  Here it gets some that count their calls, and
scaled_dot_product_attention calls the operators that it calls on a GPU.
"""

from __future__ import annotations

import contextlib
import doctest
import importlib
import math
import sys
import types
import unittest
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import pytest
import torch
from attention_problem import assert_within_bound
from door_calls import Calls, counted, run_examples, section
from torch import Tensor
from torch._dynamo.testing import CompileCounterWithBackend
from torch._inductor.utils import fresh_cache
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn import attention as torch_attention
from torch.nn.attention import varlen
from torch.nn.attention.bias import causal_lower_right
from torch.utils.checkpoint import checkpoint
from torch.utils.flop_counter import FlopCounterMode

from flashproto import backends
from flashproto.integrations import torch as door

sdpa = torch.nn.functional.scaled_dot_product_attention
aten = torch.ops.aten
SDPA, SDPA_BACKWARD, FLASH, FLASH_INTO, FLASH_BACKWARD = door.OPERATORS
GQA = {"enable_gqa": True}
# torch 2.11 has neither, and takes grouped heads of varlen_attn by their shapes.
HAS_INTO = hasattr(aten, FLASH_INTO)
VARLEN_GQA = GQA if HAS_INTO else {}


# --- torch on a CPU -------------------------------------------------------------------------------


class Own:
    """torch's kernels at the dispatcher of a CPU: calls counts those of each operator."""

    def __init__(self) -> None:
        self.calls: Counter[str] = Counter()
        self.library = torch.library.Library("aten", "IMPL", "CPU")
        cpu = f"{SDPA}_for_cpu"
        self.forward, self.backward = (
            torch.library.get_kernel(f"aten::{cpu}{way}", "CPU") for way in ("", "_backward")
        )
        for name in door.OPERATORS:
            if hasattr(aten, name):
                self.library.impl(name, self.kernel(name), "CPU", with_keyset=True, allow_override=True)

    def kernel(self, name: str) -> Callable[..., Any]:
        def run(keys: Any, *args: Any, **options: Any) -> Any:
            self.calls[name] += 1
            return getattr(self, name)(keys, *args, **options)

        return run

    def _scaled_dot_product_flash_attention(
        self, keys, q, k, v, dropout_p=0.0, is_causal=False, debug=False, *, scale=None
    ):
        assert q.shape[2] == k.shape[2] or not is_causal
        out, lse = self.forward.call_boxed(keys, q, k, v, dropout_p, is_causal, scale=scale)
        lengths = q.shape[2], k.shape[2]
        return out, lse.contiguous(), None, None, *lengths, *door.random_state(q)

    def _scaled_dot_product_flash_attention_backward(
        self, keys, dout, q, k, v, out, lse, *others, scale=None
    ):
        dropout_p, is_causal = others[4:6]
        given = dout, q, k, v, out, lse, dropout_p, is_causal
        return self.backward.call_boxed(keys, *given, scale=scale)

    def _flash_attention_forward(self, keys, q, *args, **options):
        shape = q.shape[1::-1] if q.ndim == 3 else (q.shape[0], q.shape[2], q.shape[1])
        return torch.full_like(q, 7.0), torch.zeros(shape), *door.random_state(q)

    def _flash_attention_forward_no_dropout_inplace(self, keys, out, q, *args, **options):
        out.fill_(7.0)
        return torch.zeros(q.shape[1::-1])

    def _flash_attention_backward(self, keys, dout, q, k, v, *args, **options):
        return tuple(torch.full_like(x, 5.0) for x in (q, k, v))


def sdpa_of_a_gpu() -> torch.library.Library:
    """scaled_dot_product_attention of a CPU calls the operators of a GPU where that would."""
    library = torch.library.Library("aten", "IMPL", "CPU")
    name = f"{SDPA}_for_cpu"
    own, own_backward = (
        torch.library.get_kernel(f"aten::{name}{way}", "CPU") for way in ("", "_backward")
    )

    def stays(q: Tensor, k: Tensor, is_causal: bool, options: dict[str, Any]) -> bool:
        return options.get("attn_mask") is not None or (is_causal and q.shape[2] != k.shape[2])

    def forward(keys, q, k, v, dropout_p=0.0, is_causal=False, **options):
        if stays(q, k, is_causal, options):
            return own.call_boxed(keys, q, k, v, dropout_p, is_causal, **options)
        scale = options.get("scale")
        out, lse = getattr(aten, SDPA)(q, k, v, dropout_p, is_causal, scale=scale)[:2]
        there = lse.new_empty(lse.transpose(1, 2).shape).transpose(1, 2)
        return out, there.copy_(lse)

    def backward(keys, dout, q, k, v, out, lse, dropout_p, is_causal, **options):
        if stays(q, k, is_causal, options):
            given = dout, q, k, v, out, lse, dropout_p, is_causal
            return own_backward.call_boxed(keys, *given, **options)
        sizes = None, None, q.shape[2], k.shape[2], dropout_p, is_causal, lse[:0], lse[:0]
        scale = options.get("scale")
        grads = getattr(aten, SDPA_BACKWARD)(dout, q, k, v, out, lse.contiguous(), *sizes, scale=scale)
        there = (torch.empty_permuted(x.shape, (0, 2, 1, 3), dtype=x.dtype) for x in grads)
        return tuple(x.copy_(y) for x, y in zip(there, grads, strict=True))

    library.impl(name, forward, "CPU", with_keyset=True, allow_override=True)
    library.impl(f"{name}_backward", backward, "CPU", with_keyset=True, allow_override=True)
    return library


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> Calls:
    return counted(monkeypatch, door)


def count(calls: Calls) -> tuple[int, int]:
    """Of forward and backward since the last time."""
    backward = calls.forward.pop("attention_gradients", 0)
    forward = sum(calls.forward.values())
    calls.forward.clear()
    return forward, backward


class Where(NamedTuple):
    """size: what lengths are multiplied by.  own: of torch's kernels on a CPU."""

    device: str
    dtype: torch.dtype
    size: int = 1
    own: Own | None = None

    def randn(self, *shape: int) -> Tensor:
        x = torch.randn(shape, device=self.device).to(self.dtype)
        return x.requires_grad_()

    def int32(self, *values: int) -> Tensor:
        return torch.tensor(values, dtype=torch.int32, device=self.device)

    @property
    def compiler(self) -> str:
        return "inductor" if self.device == "cuda" else "aot_eager"


@contextlib.contextmanager
def cpu(monkeypatch: pytest.MonkeyPatch, default: str | None) -> Iterator[Where]:
    """With a default backend, and the door on a CPU, but not active."""
    monkeypatch.setattr(door, "DEVICE", "cpu")
    monkeypatch.setattr(door, "FLASH_DTYPES", (torch.float32, torch.bfloat16))
    before = backends.get_default()
    backends.set_default(default)
    own, routed = Own(), sdpa_of_a_gpu()
    try:
        yield Where("cpu", torch.float32, own=own)
    finally:
        door.restore()
        backends.set_default(before)
        del own.library, routed


@pytest.fixture
def on_cpu(monkeypatch: pytest.MonkeyPatch) -> Iterator[Where]:
    with cpu(monkeypatch, "reference") as where:
        yield where


@pytest.fixture(params=["reference", "kernels", pytest.param("bfloat16", marks=pytest.mark.gpu)])
def where(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[Where]:
    """With the door active: on a CPU by the reference, and by Triton's interpreter; on a GPU."""
    if request.param == "bfloat16":
        with door.activate():
            yield Where("cuda", torch.bfloat16, 16)
        return
    if request.param == "kernels":
        pytest.importorskip("triton")
        if not backends.INTERPRETED:
            pytest.skip("needs TRITON_INTERPRET=1")
    default = "reference" if request.param == "reference" else None
    with cpu(monkeypatch, default) as found, door.activate():
        yield found


@pytest.fixture
def gpu() -> Iterator[Where]:
    with door.activate():
        yield Where("cuda", torch.bfloat16, 16)


# --- the definition -------------------------------------------------------------------------------


def dense(q: Tensor, k: Tensor, v: Tensor, seen: Tensor | None, scale: float | None) -> Tensor:
    """[..., H, S, D], in the dtype of q; seen: which keys [Sq, Sk] a query sees."""
    group = q.shape[-3] // k.shape[-3]
    k, v = (x.repeat_interleave(group, -3) for x in (k, v))
    scores = q @ k.mT * (q.shape[-1] ** -0.5 if scale is None else scale)
    if seen is None:
        return scores.softmax(-1) @ v
    empty = ~seen.any(-1, keepdim=True)
    p = scores.masked_fill(~seen, -math.inf).masked_fill(empty, 0).softmax(-1)
    return p.masked_fill(empty, 0) @ v


def band(Sq: int, Sk: int, left: int, right: int, device: str) -> Tensor:
    """Around the diagonal that ends at the last query and key; a bound below 0 is none."""
    i = torch.arange(Sq, device=device)[:, None] + Sk - Sq
    j = torch.arange(Sk, device=device)
    return ((j >= i - left) | (left < 0)) & ((j <= i + right) | (right < 0))


def compared(
    leaves: list[Tensor], run: Callable[..., Tensor], definition: Callable[..., Tensor]
) -> None:
    """The result and gradients of run, beside the definition's in float64 and in the leaves' dtype."""
    doubled = [x.detach().double().requires_grad_() for x in leaves]
    single = [x.detach().requires_grad_() for x in leaves]
    outs = run(*leaves), definition(*doubled), definition(*single)
    dout = torch.randn_like(outs[0])
    found = []
    for out, of in zip(outs, (leaves, doubled, single), strict=True):
        grads = torch.autograd.grad(out, of, dout.to(out.dtype))
        found.append({"out": out} | {f"d{i}": x for i, x in enumerate(grads)})
    assert outs[0].dtype == leaves[0].dtype
    assert_within_bound(*found, leaves[0].dtype)


# --- scaled_dot_product_attention -----------------------------------------------------------------


class Case(NamedTuple):
    """lengths: of queries and keys.  order: of [B, H, S, D] in memory, outermost first; "fused": all
    three side by side in one projection."""

    heads: tuple[int, int] = (4, 4)
    lengths: tuple[int, int] = (9, 9)
    D: int = 16
    order: tuple[int, ...] | str = (0, 1, 2, 3)
    options: dict[str, Any] = {}  # noqa: RUF012


CASES = {
    "plain": Case(),
    "causal": Case(options={"is_causal": True}),
    "scale": Case(options={"is_causal": True, "scale": 0.3}),
    "no scale": Case(options={"scale": 0.0}),
    "more keys": Case(lengths=(5, 12)),
    "more queries": Case(lengths=(12, 5)),
    "one query": Case(lengths=(1, 9)),
    "GQA": Case((4, 2), options={"is_causal": True, **GQA}),
    "MQA": Case((4, 1), options=GQA),
    "tokens before heads": Case((4, 2), order=(0, 2, 1, 3), options=GQA),
    "tokens before batch": Case(order=(2, 0, 1, 3), options={"is_causal": True}),
    "heads before batch": Case((4, 2), order=(1, 0, 2, 3), options=GQA),
    "fused projection": Case((4, 2), order="fused", options={"is_causal": True, **GQA}),
    "odd head_dim": Case(D=13, options={"is_causal": True}),
    "even head_dim": Case((4, 2), D=18, order=(0, 2, 1, 3), options=GQA),
}


def leaves_of(case: Case, where: Where, *, D: int | None = None) -> list[Tensor]:
    """q, k and v of two batch entries."""
    (Hq, Hkv), D = case.heads, case.D if D is None else D
    Sq, Sk = (where.size * S for S in case.lengths)
    if case.order == "fused":
        x = where.randn(2, Sq, Hq + 2 * Hkv, D).detach().transpose(1, 2)
        return [part.requires_grad_() for part in x.split((Hq, Hkv, Hkv), 1)]
    assert not isinstance(case.order, str)
    back = [case.order.index(i) for i in range(4)]
    made = []
    for shape in ((2, Hq, Sq, D), (2, Hkv, Sk, D), (2, Hkv, Sk, D)):
        x = where.randn(*(shape[i] for i in case.order)).detach()
        made.append(x.permute(back).requires_grad_())
    return made


def run_sdpa(
    case: Case, where: Where, calls: Calls, leaves: list[Tensor], function: Any = sdpa
) -> None:
    causal, scale = case.options.get("is_causal", False), case.options.get("scale")
    seen = band(*(x.shape[2] for x in leaves[:2]), -1, 0, where.device) if causal else None
    compared(
        leaves,
        lambda q, k, v: function(q, k, v, **case.options),
        lambda q, k, v: dense(q, k, v, seen, scale),
    )
    assert count(calls) == (1, 1)
    assert where.own is None or not where.own.calls


@pytest.mark.parametrize("name", CASES)
def test_sdpa(name: str, where: Where, calls: Calls) -> None:
    case = CASES[name]
    run_sdpa(case, where, calls, leaves_of(case, where))


@pytest.mark.gpu
@pytest.mark.parametrize("D", [64, 96, 100, 128, 192, 250, 256])
def test_head_dims(D: int, gpu: Where, calls: Calls) -> None:
    """Those that are no multiple of 8 come padded to one."""
    where = gpu._replace(dtype=torch.float16 if D == 64 else torch.bfloat16)
    for name in ("causal", "GQA", "tokens before heads"):
        run_sdpa(CASES[name], where, calls, leaves_of(CASES[name], where, D=D))


@pytest.mark.gpu
def test_flash_is_first(gpu: Where) -> None:
    x = gpu.randn(2, 4, 64, 64)
    assert torch._fused_sdp_choice(x, x, x) == torch_attention.SDPBackend.FLASH_ATTENTION.value


@pytest.mark.parametrize("name", ["causal", "GQA", "tokens before batch", "fused projection"])
def test_compiled(name: str, where: Where, calls: Calls) -> None:
    """In one graph; what is around the operators relies on how their results lie."""
    torch.compiler.reset()
    case, counter = CASES[name], CompileCounterWithBackend(where.compiler)

    def function(q: Tensor, k: Tensor, v: Tensor, **options: Any) -> Tensor:
        return 2 * sdpa(q * 0.5, k, v * 0.5, **options)

    def eager(q: Tensor, k: Tensor, v: Tensor, is_causal: bool = False, enable_gqa: bool = False):
        seen = band(q.shape[2], k.shape[2], -1, 0, where.device) if is_causal else None
        return dense(q * 0.5, k, v, seen, None)

    compiled = torch.compile(function, backend=counter, fullgraph=True)
    leaves = leaves_of(case, where)
    compared(leaves, lambda *x: compiled(*x, **case.options), lambda *x: eager(*x, **case.options))
    assert count(calls) == (1, 1)
    assert counter.frame_count == 1


@pytest.mark.slow
def test_functions_that_torch_keeps(on_cpu: Where, calls: Calls) -> None:
    """Compiled for another backend before, and found again by torch's cache if it is not told."""
    leaves = leaves_of(CASES["plain"], on_cpu)
    with fresh_cache(), torch.no_grad():
        for active in (False, True):
            torch.compiler.reset()
            torch.backends.cuda.enable_flash_sdp(active)
            try:
                with door.activate() if active else contextlib.nullcontext():
                    torch.compile(lambda q, k, v: sdpa(q, k, v))(*leaves)
            finally:
                torch.backends.cuda.enable_flash_sdp(True)
            assert count(calls) == ((1, 0) if active else (0, 0))


@pytest.mark.parametrize("name", ["causal", "GQA", "tokens before batch", "fused projection"])
def test_results_lie_as_torchs_fakes(name: str, where: Where) -> None:
    case = CASES[name]
    q, k, v = (x.detach() for x in leaves_of(case, where))
    sdpa_made = alike(SDPA, q, k, v, 0.0, "is_causal" in case.options)
    sizes = None, None, q.shape[2], k.shape[2], 0.0, "is_causal" in case.options
    dout = torch.randn_like(q)
    alike(SDPA_BACKWARD, dout, q, k, v, *sdpa_made[:2], *sizes, *sdpa_made[6:8])
    cu = where.int32(0, q.shape[2])
    for given, starts in (
        ([x.transpose(1, 2) for x in (q, k, v, dout)], (None, None)),
        ([x[0].transpose(0, 1) for x in (q, k, v, dout)], (cu, cu)),
    ):
        *heads, dout_there = given
        middle = *starts, q.shape[2], k.shape[2], 0.0, False
        made = alike(FLASH, *heads, *middle, False)
        alike(FLASH_BACKWARD, dout_there, *heads, *made[:2], *middle, *made[2:4])


def alike(name: str, *args: Any) -> tuple[Any, ...]:
    """What the operator gives, once it is compared with what its fake does."""
    op = getattr(aten, name)
    made = op(*args)
    with FakeTensorMode() as mode:
        fakes = op(*(mode.from_tensor(x) if isinstance(x, Tensor) else x for x in args))
    assert len(made) == len(fakes)
    for x, fake in zip(made, fakes, strict=True):
        if not isinstance(x, Tensor):
            assert x == fake
            continue
        assert (x.shape, x.dtype) == (fake.shape, fake.dtype)
        strides = zip(x.shape, x.stride(), fake.stride(), strict=True)
        assert all(n == 1 or own == wanted for n, own, wanted in strides)
    return made


def test_causal_ends_at_the_last_key(where: Where, calls: Calls) -> None:
    """As causal_lower_right of torch.nn.attention.bias counts on."""
    for lengths in ((5, 12), (12, 5)):
        leaves = leaves_of(Case((4, 2), lengths), where)
        seen = band(*(x.shape[2] for x in leaves[:2]), -1, 0, where.device)

        def run(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            return getattr(aten, SDPA)(q, k, v, 0.0, True)[0]

        compared(leaves, run, lambda q, k, v: dense(q, k, v, seen, None))  # noqa: B023
        assert count(calls) == (1, 1)
        with torch.no_grad():
            lse = getattr(aten, SDPA)(*leaves, 0.0, True)[1]
        assert torch.equal(lse == math.inf, ~seen.any(-1).expand(lse.shape))
        assert count(calls) == (1, 0)


@pytest.mark.gpu
def test_lower_right_bias(gpu: Where, calls: Calls) -> None:
    leaves = leaves_of(Case((4, 4), (5, 12), 64), gpu)
    lengths = [x.shape[2] for x in leaves[:2]]
    bias = causal_lower_right(*lengths)
    seen = band(*lengths, -1, 0, gpu.device)
    compared(leaves, lambda q, k, v: sdpa(q, k, v, bias), lambda q, k, v: dense(q, k, v, seen, None))
    assert count(calls) == (1, 1)


def test_without_gradients(where: Where, calls: Calls) -> None:
    leaves = leaves_of(CASES["causal"], where)
    for context in (torch.no_grad(), torch.inference_mode()):
        with context:
            sdpa(*leaves, is_causal=True)
        assert count(calls) == (1, 0)
    q, k, v = leaves[0], *(x.detach() for x in leaves[1:])
    seen = band(q.shape[2], k.shape[2], -1, 0, where.device)
    compared(
        [q],
        lambda q: sdpa(q, k, v, is_causal=True),
        lambda q: dense(q, k.to(q.dtype), v.to(q.dtype), seen, None),
    )
    assert count(calls) == (1, 1)


@pytest.mark.filterwarnings("ignore:There is a performance drop")
def test_transforms(where: Where, calls: Calls) -> None:
    """Those of torch.func end above the operators; under vmap torch may choose another backend."""
    heads = [x.detach() for x in leaves_of(CASES["plain"], where)]
    over = [x.unsqueeze(1) for x in heads]

    def mapped(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return torch.func.vmap(sdpa)(q, k, v).squeeze(1)

    made = mapped(*over)
    assert count(calls) == (2, 0) or where.device == "cuda"  # on a CPU for each entry of the batch
    torch.testing.assert_close(made, sdpa(*heads))
    assert count(calls) == (1, 0)
    leaves = [x.requires_grad_() for x in heads]
    dout = torch.randn_like(leaves[0])
    wanted = torch.autograd.grad(sdpa(*leaves), leaves, dout)
    _, pullback = torch.func.vjp(sdpa, *heads)
    for x, y in zip(pullback(dout), wanted, strict=True):
        torch.testing.assert_close(x, y)
    assert count(calls) == (2, 2)


def test_checkpointed(where: Where, calls: Calls) -> None:
    case = CASES["causal"]
    leaves = leaves_of(case, where)
    seen = band(*(x.shape[2] for x in leaves[:2]), -1, 0, where.device)

    def run(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return checkpoint(lambda *x: sdpa(*x, is_causal=True), q, k, v, use_reentrant=False)

    compared(leaves, run, lambda q, k, v: dense(q, k, v, seen, None))
    assert count(calls) == (2, 1)


def test_autocast(where: Where, calls: Calls) -> None:
    """scaled_dot_product_attention casts before it comes here; who calls the operators does not."""
    x = where.randn(2, 9, 4, 16).detach()
    with torch.autocast(where.device, torch.bfloat16):
        heads = [x.float().transpose(1, 2).requires_grad_() for _ in range(3)]
        out = sdpa(*heads, is_causal=True)
        out.sum().backward()
        assert out.dtype == torch.bfloat16 and heads[0].grad.dtype == torch.float32
        assert count(calls) == (1, 1)
        made = getattr(aten, FLASH)(*[x.half()] * 3, None, None, 9, 9, 0.0, True, False)
    assert made[0].dtype == torch.float16
    assert count(calls) == (1, 0)


def test_flops_are_counted(where: Where, calls: Calls) -> None:
    leaves = leaves_of(CASES["plain"], where)
    with FlopCounterMode(display=False) as flops:
        getattr(aten, SDPA)(*leaves)[0].sum().backward()
    B, H, S, D = leaves[0].shape
    assert flops.get_total_flops() == (4 + 10) * B * H * S * S * D
    assert count(calls) == (1, 1)


def test_modules(where: Where, calls: Calls) -> None:
    options = {"device": where.device, "dtype": where.dtype, "batch_first": True}
    layer = torch.nn.TransformerEncoderLayer(64, 4, 64, dropout=0.0, **options)
    x = where.randn(2, 9, 64)
    mask = torch.nn.Transformer.generate_square_subsequent_mask(9, where.device, where.dtype)
    out = layer(x, mask, is_causal=True)
    dout = torch.randn_like(out)
    out.backward(dout)
    assert count(calls) == (1, 1)
    door.restore()
    grads = [p.grad.clone() for p in layer.parameters()]
    layer.zero_grad()
    wanted = layer(x, mask, is_causal=True)
    wanted.backward(dout)
    tolerance = 1e-4 if where.dtype == torch.float32 else 0.1
    torch.testing.assert_close(out, wanted, rtol=tolerance, atol=tolerance)
    for grad, parameter in zip(grads, layer.parameters(), strict=True):
        size = parameter.grad.abs().max()
        assert (grad - parameter.grad).abs().max() <= tolerance * size.clamp(min=1)
    assert count(calls) == (0, 0)


@pytest.fixture
def samples(monkeypatch: pytest.MonkeyPatch) -> Any:
    """PyTorch's OpInfo of scaled_dot_product_attention."""
    try:
        importlib.import_module("expecttest")
    except ImportError:  # of which torch.testing needs a name here
        stub = types.SimpleNamespace(TestCase=unittest.TestCase)
        monkeypatch.setitem(sys.modules, "expecttest", stub)  # type: ignore[arg-type]
    flag = "__allow_nonbracketed_mutation_flag"  # which the import takes away from later tests
    before = getattr(torch.backends, flag)
    try:
        found = importlib.import_module("torch.testing._internal.common_methods_invocations")
    finally:
        setattr(torch.backends, flag, before)
    (info,) = [x for x in found.op_db if x.name == "nn.functional.scaled_dot_product_attention"]
    return info


@pytest.mark.slow
def test_samples_of_opinfo(samples: Any, where: Where, calls: Calls) -> None:
    """25, of 3 and 4 dimensions, with masks, causal of other lengths, dropout.  Their values go up to
    9: here to 1, so that a softmax has more than one key."""
    ran = 0
    for sample in samples.sample_inputs(where.device, where.dtype, requires_grad=True):
        leaves = [(x.detach() / 9).requires_grad_() for x in (sample.input, *sample.args)]
        options = dict(sample.kwargs)
        ran += 1
        if options["dropout_p"]:
            out = sdpa(*leaves, **options)
            out.sum().backward()
            assert out.isfinite().all() and all(x.grad.isfinite().all() for x in leaves)
            assert count(calls) == (1, 0)
            continue
        seen = band(leaves[0].shape[-2], leaves[1].shape[-2], -1, -1, where.device)
        bias = options.get("attn_mask", torch.zeros_like(seen, dtype=torch.double)).detach()
        seen = seen.tril() if options["is_causal"] else seen

        def definition(
            q: Tensor, k: Tensor, v: Tensor, seen: Tensor = seen, bias: Tensor = bias
        ) -> Tensor:
            scores = (q @ k.mT * q.shape[-1] ** -0.5 + bias.to(q.dtype)).masked_fill(~seen, -math.inf)
            return scores.softmax(-1) @ v

        compared(leaves, lambda *x, options=options: sdpa(*x, **options), definition)
        assert count(calls) in ((1, 0), (1, 1))
    assert ran == 25
    assert where.own is None or not where.own.calls


# --- masks, dropout and the rest ------------------------------------------------------------------


class Other(NamedTuple):
    """shapes: of query, key and value; mask: of what is added to scores [..., S, S], "boolean" of one
    that hides a half of them.  Lengths are those of a CPU, where S is 9."""

    shapes: tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...]]
    mask: tuple[int, ...] | None = None
    kind: str = "added"
    options: dict[str, Any] = {}  # noqa: RUF012


ALIKE = ((2, 4, 9, 16),) * 3
OTHERS = {
    "boolean": Other(ALIKE, (9, 9), "boolean"),
    "boolean by head": Other(ALIKE, (4, 9, 9), "boolean"),
    "boolean of keys": Other(ALIKE, (2, 1, 1, 9), "boolean"),
    "added": Other(ALIKE, (9, 9)),
    "added by batch": Other(ALIKE, (2, 1, 9, 9)),
    "added to keys": Other(ALIKE, (2, 1, 1, 9)),
    "added to queries": Other(ALIKE, (4, 9, 1)),
    "grouped heads": Other(((2, 4, 9, 16), *((2, 2, 9, 16),) * 2), (4, 9, 9), "added", GQA),
    "one head of queries": Other(((2, 1, 9, 16), *((2, 4, 9, 16),) * 2), (2, 4, 9, 9)),
    "one head of keys": Other(((2, 4, 9, 16), *((2, 1, 9, 16),) * 2), (9, 9), "boolean"),
    "one batch entry": Other(((1, 4, 9, 16), *((2, 4, 9, 16),) * 2)),
    "3 dimensions": Other(((4, 9, 16),) * 3, (9, 9)),
    "2 dimensions": Other(((9, 16),) * 3, (9, 9), "boolean"),
    "5 dimensions": Other(((3, 2, 4, 9, 16),) * 3, (2, 1, 9, 9)),
    "another Dv": Other(((2, 4, 9, 16), (2, 4, 9, 16), (2, 4, 9, 8))),
    "causal from the top": Other(((4, 9, 16), *((4, 12, 16),) * 2), None, "", {"is_causal": True}),
    "negative scale": Other(ALIKE, None, "", {"scale": -0.3}),
    "scale of 0 dimensions": Other(ALIKE, (9, 9), "added", {"scale": torch.tensor(0.3)}),
}  # fmt: skip


def problem_of(of: Other, where: Where) -> tuple[list[Tensor], Tensor | None]:
    leaves = [where.randn(*shape) for shape in of.shapes]
    if of.mask is None:
        return leaves, None
    if of.kind == "boolean":
        return leaves, torch.rand(of.mask, device=where.device) < 0.6
    leaves.append(where.randn(*of.mask))
    return leaves, leaves[3]


def other_definition(of: Other, boolean: Tensor | None) -> Callable[..., Tensor]:
    scale = of.options.get("scale")

    def definition(q: Tensor, k: Tensor, v: Tensor, added: Tensor | None = None) -> Tensor:
        if of.options.get("enable_gqa"):
            k, v = (x.repeat_interleave(q.shape[-3] // x.shape[-3], -3) for x in (k, v))
        scores = q @ k.mT * (q.shape[-1] ** -0.5 if scale is None else float(scale))
        scores = scores if added is None else scores + added
        seen = torch.ones_like(scores, dtype=torch.bool) if boolean is None else boolean
        seen = seen.tril() if of.options.get("is_causal") else seen
        empty = ~seen.any(-1, keepdim=True)
        p = scores.masked_fill(~seen, -math.inf).masked_fill(empty, 0).softmax(-1)
        return p.masked_fill(empty, 0) @ v

    return definition


@pytest.mark.parametrize("name", OTHERS)
def test_what_flash_does_not_take(name: str, where: Where, calls: Calls) -> None:
    """With the gradient of what is added; torch's kernels are not called."""
    of = OTHERS[name]
    leaves, mask = problem_of(of, where)
    boolean = mask if of.kind == "boolean" else None

    def run(q: Tensor, k: Tensor, v: Tensor, added: Tensor | None = None) -> Tensor:
        return sdpa(q, k, v, boolean if added is None else added, **of.options)

    compared(leaves, run, other_definition(of, boolean))
    assert count(calls) == (1, 0)
    assert where.own is None or not where.own.calls
    with torch.inference_mode():
        torch.testing.assert_close(run(*leaves), run(*leaves))
    assert count(calls) == (2, 0)


@pytest.mark.parametrize("name", ["boolean", "added", "grouped heads", "causal from the top"])
def test_what_flash_does_not_take_compiled(name: str, where: Where, calls: Calls) -> None:
    torch.compiler.reset()
    of, counter = OTHERS[name], CompileCounterWithBackend(where.compiler)
    leaves, mask = problem_of(of, where)
    boolean = mask if of.kind == "boolean" else None

    def run(q: Tensor, k: Tensor, v: Tensor, added: Tensor | None = None) -> Tensor:
        return 2 * sdpa(q, k, v, boolean if added is None else added, **of.options)

    of_eager = other_definition(of, boolean)
    compiled = torch.compile(run, backend=counter, fullgraph=True)
    compared(leaves, compiled, lambda *x: 2 * of_eager(*x))
    assert counter.frame_count == 1
    assert calls.forward["scaled_dot_product_attention"] >= 1
    assert where.own is None or not where.own.calls


@pytest.mark.parametrize("active", [True, False])
def test_compiled_before_and_after(active: bool, on_cpu: Where, calls: Calls) -> None:
    """A function compiled now runs here if the door is active now, whatever one before it ran on."""
    of = OTHERS["added"]
    leaves, _ = problem_of(of, on_cpu)

    def compiled() -> None:
        torch.compiler.reset()
        run = torch.compile(lambda q, k, v, m: sdpa(q, k, v, m), backend="aot_eager", fullgraph=True)
        compared(leaves, run, other_definition(of, None))

    with door.activate() if not active else contextlib.nullcontext():
        compiled()
    assert bool(calls.forward) is not active
    calls.forward.clear()
    with door.activate() if active else contextlib.nullcontext():
        compiled()
    assert bool(calls.forward) is active


def test_dropout(where: Where, calls: Calls) -> None:
    """torch's generator repeats it; each probability is left out or divided by what is kept."""
    q, k, v = leaves_of(CASES["causal"], where, D=where.size * 9)
    eye = torch.eye(v.shape[2], device=where.device, dtype=where.dtype).expand_as(v).contiguous()
    p = sdpa(q, k, eye, is_causal=True).detach()
    count(calls)
    outs = []
    for seed in (1, 1, 2):
        torch.manual_seed(seed)
        outs.append(sdpa(q, k, eye, is_causal=True, dropout_p=0.5))
    assert torch.equal(outs[0], outs[1]) and not torch.equal(outs[0], outs[2])
    kept = outs[0] != 0
    tolerance = 1e-5 if where.dtype == torch.float32 else 1e-2
    torch.testing.assert_close(outs[0], torch.where(kept, 2 * p, 0), rtol=tolerance, atol=tolerance)
    assert 0.3 < kept.sum() / (p > 0).sum() < 0.7
    outs[0].sum().backward()
    assert q.grad.isfinite().all() and q.grad.any()
    assert count(calls) == (3, 0)


@pytest.mark.filterwarnings("ignore:There is a performance drop")
def test_the_rest_goes_on_to_torch(on_cpu: Where, calls: Calls) -> None:
    """Transforms, subclasses, backends that the user chose, and what no kernel here takes."""
    leaves = [x.detach() for x in leaves_of(CASES["plain"], on_cpu)]
    q, k, v = leaves
    mask = torch.randn(9, 9)
    wanted = sdpa(q, k, v, mask)
    with door.activate():
        with torch_attention.sdpa_kernel(torch_attention.SDPBackend.MATH):
            torch.testing.assert_close(sdpa(q, k, v, mask), wanted)
        grad = torch.func.grad(lambda q: sdpa(q, k, v, mask).sum())(q)
        torch.testing.assert_close(torch.func.vmap(lambda q: sdpa(q, k, v, mask))(q[None])[0], wanted)

        class Own(Tensor):
            pass

        assert type(sdpa(q.as_subclass(Own), k, v, mask)) is Own
        backends.set_default("torch")
        torch.testing.assert_close(sdpa(q, k, v, mask), wanted)
        assert count(calls) == (0, 0)
        backends.set_default(None)
        with pytest.raises(RuntimeError):  # in torch's words
            sdpa(q, k, v, torch.randn(5, 9))
        doubles = [x.double() for x in (q, k, v, mask)]
        torch.testing.assert_close(sdpa(*doubles).float(), wanted)
    q.requires_grad_()
    torch.testing.assert_close(torch.autograd.grad(sdpa(q, k, v, mask).sum(), q)[0], grad)


# --- varlen_attn ----------------------------------------------------------------------------------

WINDOWS = {
    "full": (-1, -1),
    "causal": (-1, 0),
    "sliding": (3, 0),
    "both": (3, 2),
    "left": (4, -1),
    "right": (-1, 1),
}
LENGTHS = ((4, 0, 7, 1), (6, 3, 7, 0))  # of queries and of keys


class Sequences(NamedTuple):
    """Of queries and keys, side by side."""

    lengths: tuple[tuple[int, ...], tuple[int, ...]]
    leaves: list[Tensor]
    places: tuple[Any, ...]  # cu_seq and max of each

    def each(self, function: Callable[..., Tensor], heads: tuple[Tensor, ...]) -> list[Tensor]:
        parts = [x.transpose(0, 1).split(self.lengths[min(i, 1)], 1) for i, x in enumerate(heads)]
        return [function(*part) for part in zip(*parts, strict=True)]


def sequences(where: Where, heads: tuple[int, int], D: int, lengths: Any = LENGTHS) -> Sequences:
    lengths = tuple(tuple(where.size * n for n in own) for own in lengths)
    cu = [where.int32(0, *own).cumsum(0).int() for own in lengths]
    (Tq, Tk), (Hq, Hkv) = map(sum, lengths), heads
    leaves = [where.randn(T, H, D) for T, H in ((Tq, Hq), (Tk, Hkv), (Tk, Hkv))]
    return Sequences(lengths, leaves, (*cu, *map(max, lengths)))


def varlen_definition(of: Sequences, window: tuple[int, int], scale: float | None, device: str) -> Any:
    def one(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return dense(q, k, v, band(q.shape[1], k.shape[1], *window, device), scale)

    return lambda *heads: torch.cat(of.each(one, heads), 1).transpose(0, 1)


@pytest.mark.parametrize("window", WINDOWS)
@pytest.mark.parametrize("heads", [(4, 4), (4, 2)])
def test_varlen(heads: tuple[int, int], window: str, where: Where, calls: Calls) -> None:
    of = sequences(where, heads, 16 if where.device == "cpu" else 64)
    options: dict[str, Any] = {"window_size": WINDOWS[window], "scale": 0.3 if heads[1] == 2 else None}
    definition = varlen_definition(of, options["window_size"], options["scale"], where.device)
    options |= VARLEN_GQA if heads[1] == 2 else {}
    compared(of.leaves, lambda *x: varlen.varlen_attn(*x, *of.places, **options), definition)
    assert count(calls) == (1, 1)
    assert where.own is None or not where.own.calls


def test_lse_of_varlen(where: Where, calls: Calls) -> None:
    """[H, T], and +inf of a query without keys, as by torch's kernels."""
    of = sequences(where, (4, 4), 16)
    aux = varlen.AuxRequest(lse=True)
    with torch.no_grad():
        options = {"window_size": (-1, 0), "return_aux": aux}
        out, lse = varlen.varlen_attn(*of.leaves, *of.places, **options)
        assert count(calls) == (1, 0)

        def one(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            seen = band(q.shape[1], k.shape[1], -1, 0, where.device)
            scores = q.double() @ k.double().mT * q.shape[2] ** -0.5
            made = scores.masked_fill(~seen, -math.inf).logsumexp(-1)
            return made.masked_fill(made == -math.inf, math.inf)

        wanted = torch.cat(of.each(one, tuple(of.leaves)), 1)
    assert wanted.isinf().any() and not wanted.isinf().all()
    torch.testing.assert_close(lse.double(), wanted, rtol=1e-4, atol=1e-4)
    assert (out[wanted[0].isinf()] == 0).all()


def test_varlen_with_gaps(where: Where, calls: Calls) -> None:
    """Keys behind the first seqused_k of a sequence, which may be no numbers, have no part."""
    of = sequences(where, (4, 2), 16)
    used = [n * 2 // 3 for n in of.lengths[1]]
    starts, (q, k, v) = of.places[1], (x.detach() for x in of.leaves)
    for s, n in enumerate(used):
        k[int(starts[s]) + n : int(starts[s + 1])] = math.nan
        v[int(starts[s]) + n : int(starts[s + 1])] = math.inf
    options = {"window_size_left": 3, "window_size_right": 0, "seqused_k": where.int32(*used)}
    with torch.no_grad():
        out = getattr(aten, FLASH)(q, k, v, *of.places, 0.0, False, False, **options)[0]

    def one(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        k, v = (x[:, : k.shape[1] * 2 // 3].double() for x in (k, v))
        return dense(q.double(), k, v, band(q.shape[1], k.shape[1], 3, 0, where.device), None)

    wanted = torch.cat(of.each(one, (q, k, v)), 1).transpose(0, 1)
    tolerance = 1e-4 if where.dtype == torch.float32 else 2e-2
    torch.testing.assert_close(out.double(), wanted, rtol=tolerance, atol=tolerance)
    assert count(calls) == (1, 0)
    assert where.own is None or not where.own.calls


@pytest.mark.skipif(not HAS_INTO, reason="this torch has no varlen_attn_out")
def test_varlen_into_memory(where: Where, calls: Calls) -> None:
    of = sequences(where, (4, 2), 16)
    options = {"window_size": (3, 0), **GQA}
    with torch.no_grad():
        wanted = varlen.varlen_attn(*of.leaves, *of.places, **options)
        out = torch.full_like(of.leaves[0], math.nan)
        made = varlen.varlen_attn_out(out, *of.leaves, *of.places, **options)
    assert made.data_ptr() == out.data_ptr() and torch.equal(out, wanted)
    assert count(calls) == (2, 0)


def test_varlen_compiled(where: Where, calls: Calls) -> None:
    torch.compiler.reset()
    of, counter = sequences(where, (4, 4), 16), CompileCounterWithBackend(where.compiler)

    @torch.compile(backend=counter, fullgraph=True)
    def run(*heads: Tensor) -> Tensor:
        return 2 * varlen.varlen_attn(*(x * 0.5 for x in heads), *of.places, window_size=(3, 0))

    eager = varlen_definition(of, (3, 0), None, where.device)
    compared(of.leaves, run, lambda *x: 2 * eager(*(y * 0.5 for y in x)))
    assert count(calls) == (1, 1)
    assert counter.frame_count == 1


# --- nested tensors -------------------------------------------------------------------------------


@pytest.mark.parametrize("causal", [False, True])
def test_jagged(causal: bool, where: Where, calls: Calls, monkeypatch: pytest.MonkeyPatch) -> None:
    if where.device == "cpu":  # where torch takes another backend for them
        flash = torch_attention.SDPBackend.FLASH_ATTENTION
        nested = importlib.import_module("torch.nested._internal.sdpa")
        monkeypatch.setattr(nested, "_select_sdp_backend", lambda *_: flash)
    of = sequences(where, (4, 4), 16, ((4, 7, 1), (4, 7, 1)))

    def run(*heads: Tensor) -> Tensor:
        parts = [
            torch.nested.nested_tensor_from_jagged(x, of.places[0].long()).transpose(1, 2)
            for x in heads
        ]
        return sdpa(*parts, is_causal=causal).transpose(1, 2).values()

    compared(of.leaves, run, varlen_definition(of, (-1, 0 if causal else -1), None, where.device))
    assert count(calls) == (1, 1)


@pytest.mark.gpu
def test_nested_of_strides(gpu: Where) -> None:
    of = sequences(gpu, (4, 4), 64, ((4, 7, 2), (4, 7, 2)))

    def run(*heads: Tensor) -> Tensor:
        parts = [
            torch.nested.as_nested_tensor(list(x.split(of.lengths[0]))).transpose(1, 2) for x in heads
        ]
        return torch.cat([x.transpose(0, 1) for x in sdpa(*parts).unbind()])

    compared(of.leaves, run, varlen_definition(of, (-1, -1), None, gpu.device))


# --- what goes on to torch's kernels --------------------------------------------------------------


def test_dropout_of_the_operators_stays_with_torch(on_cpu: Where, calls: Calls) -> None:
    words = "do not support dropout"  # a CPU's own
    with door.activate(), pytest.raises(RuntimeError, match=words):
        getattr(aten, SDPA)(*leaves_of(CASES["causal"], on_cpu), 0.4, True)
    assert on_cpu.own.calls == {SDPA: 1}
    assert count(calls) == (0, 0)


@pytest.mark.gpu
def test_masks_and_float32_run_here(gpu: Where, calls: Calls) -> None:
    q, k, v = leaves_of(CASES["plain"], gpu)
    mask = torch.ones(q.shape[2], k.shape[2], dtype=torch.bool, device="cuda").tril()
    sdpa(q, k, v, mask).sum().backward()
    sdpa(q.float(), k.float(), v.float()).sum().backward()
    assert count(calls) == (2, 0)


CHANGED = {
    "dropout": lambda given: given | {"dropout_p": 0.5},
    "negative scale": lambda given: given | {"scale": -0.3},
    "another Dv": lambda given: given | {"value": given["value"][..., :8]},
    "another D": lambda given: given | {"query": given["query"][..., :8]},
    "heads": lambda given: given | {"query": given["query"][:, :3]},
    "float64": lambda given: given | {n: given[n].double() for n in ("query", "key", "value")},
    "dtypes": lambda given: given | {"key": given["key"].half()},
    "int64": lambda given: given | {"cum_seq_q": given["cum_seq_q"].long()},
    "starts of queries alone": lambda given: given | {"cum_seq_k": None},
}
FORWARD_ALONE = {
    "debug": {"return_debug_mask": True},
    "alibi": {"alibi_slopes": torch.ones(4)},
    "seqused_k": {"seqused_k": torch.ones(4)},
    "block_table": {"block_table": torch.ones(4, 1, dtype=torch.int32)},
}


def flash_arguments(where: Where) -> dict[str, Any]:
    of = sequences(where, (4, 2), 16)
    names = "cum_seq_q", "cum_seq_k", "max_q", "max_k"
    given = dict(zip(("query", "key", "value"), of.leaves, strict=True))
    given |= dict(zip(names, of.places, strict=True))
    return given | {"dropout_p": 0.0, "is_causal": False, "return_debug_mask": False}


@pytest.mark.parametrize("change", CHANGED)
def test_forward_and_backward_go_on_together(change: str, on_cpu: Where, calls: Calls) -> None:
    with door.activate():
        given = CHANGED[change](flash_arguments(on_cpu))
        for name in ("query", "key", "value"):
            given[name] = given[name].detach().requires_grad_()
        own = on_cpu.own
        out = getattr(aten, FLASH)(**given)[0]
        assert (out == 7).all() and own.calls == {FLASH: 1}
        out.sum().backward()
        assert own.calls == {FLASH: 1, FLASH_BACKWARD: 1}
        assert all((given[name].grad == 5).all() for name in ("query", "key", "value"))
        if HAS_INTO:
            del given["cum_seq_q"], given["cum_seq_k"]
            given |= {"cum_seq_q": None, "cum_seq_k": on_cpu.int32(0, 3)}
            into = torch.empty_like(given["query"])
            with torch.no_grad():
                getattr(aten, FLASH_INTO)(out=into, **given)
            assert (into == 7).all() and own.calls[FLASH_INTO] == 1
    assert count(calls) == (0, 0)


@pytest.mark.parametrize("option", FORWARD_ALONE)
def test_options_of_the_forward(option: str, on_cpu: Where, calls: Calls) -> None:
    """Which the backward is not told of."""
    if option == "block_table" and not HAS_INTO:
        pytest.skip("this torch has no such option")
    with door.activate(), torch.no_grad():
        out = getattr(aten, FLASH)(**flash_arguments(on_cpu) | FORWARD_ALONE[option])[0]
    assert (out == 7).all()
    assert count(calls) == (0, 0)


def test_default_torch_leaves_all_calls_to_torch(on_cpu: Where, calls: Calls) -> None:
    backends.set_default("torch")
    with door.activate():
        case = CASES["causal"]
        sdpa(*leaves_of(case, on_cpu), **case.options).sum().backward()
    assert count(calls) == (0, 0)
    assert on_cpu.own.calls == {SDPA: 1, SDPA_BACKWARD: 1}


def test_default_by_name_runs(on_cpu: Where, calls: Calls) -> None:
    backends.set_default("hopper")
    with pytest.raises(backends.BackendError, match=r"no kernels for cpu: .* on 'cpu'"):
        door.activate()
    assert torch_attention.current_flash_attention_impl() is None


# --- on and off -----------------------------------------------------------------------------------


def run_all(where: Where) -> None:
    """Each operator once, forward and backward where it has one."""
    given = flash_arguments(where)
    getattr(aten, FLASH)(**given)[0].sum().backward()
    leaves = leaves_of(CASES["causal"], where)
    getattr(aten, SDPA)(*leaves)[0].sum().backward()
    if HAS_INTO:
        with torch.no_grad():
            getattr(aten, FLASH_INTO)(out=torch.empty_like(given["query"]), **given)


OPERATIONS = {name: 1 for name in door.OPERATORS if hasattr(aten, name)}


def test_restored(on_cpu: Where, calls: Calls) -> None:
    door.restore()  # nothing to undo
    for how in ("function", "block", "torch", "again"):
        on_cpu.own.calls.clear()
        active = door.activate()
        assert torch_attention.current_flash_attention_impl() == "flashproto"
        run_all(on_cpu)
        assert not on_cpu.own.calls
        assert count(calls) == (3 if HAS_INTO else 2, 2)
        if how == "function":
            door.restore()
        elif how == "torch":
            torch_attention.restore_flash_attention_impl()
        else:
            with active:
                if how == "again":
                    with door.activate() as inner:
                        assert not inner.undoes
                    run_all(on_cpu)  # the end of the inner block ended nothing
                    assert not on_cpu.own.calls
                    count(calls)
        assert torch_attention.current_flash_attention_impl() is None
        run_all(on_cpu)
        assert on_cpu.own.calls == OPERATIONS
        assert count(calls) == (0, 0)


@pytest.mark.gpu
def test_restored_on_a_gpu(calls: Calls) -> None:
    x = torch.randn(2, 4, 64, 64, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    before = torch._fused_sdp_choice(x, x, x), torch._C._get_sdp_priority_order()
    compiled = torch.compile(lambda x: sdpa(x, x, x, is_causal=True))
    for active in (True, False, True, False):
        door.activate() if active else door.restore()
        for function in (lambda x: sdpa(x, x, x, is_causal=True), compiled):
            torch.compiler.reset()  # what was compiled before keeps its backend
            function(x).sum().backward()
            assert count(calls) == ((1, 1) if active else (0, 0))
    assert (torch._fused_sdp_choice(x, x, x), torch._C._get_sdp_priority_order()) == before


def test_another_implementation_comes_back(on_cpu: Where, monkeypatch: pytest.MonkeyPatch) -> None:
    registry = importlib.import_module("torch.nn.attention._registry")
    monkeypatch.setattr(registry, "_FLASH_ATTENTION_IMPLS", dict(registry._FLASH_ATTENTION_IMPLS))
    seen = []

    class Other:
        def __init__(self) -> None:
            seen.append("on")

        def remove(self) -> None:
            seen.append("off")

    torch_attention.register_flash_attention_impl("other", register_fn=Other)
    torch_attention.activate_flash_attention_impl("other")
    with door.activate():
        assert seen == ["on", "off"]
    assert torch_attention.current_flash_attention_impl() == "other"
    assert seen == ["on", "off", "on"]
    torch_attention.restore_flash_attention_impl()
    # One that was chosen meanwhile stays.
    with door.activate():
        torch_attention.activate_flash_attention_impl("other")
    assert torch_attention.current_flash_attention_impl() == "other"
    torch_attention.restore_flash_attention_impl()


def test_order_of_backends(on_cpu: Where) -> None:
    config, before = torch.compiler.config, torch._C._get_sdp_priority_order()
    backend = torch_attention.SDPBackend
    flash, efficient = backend.FLASH_ATTENTION.value, backend.EFFICIENT_ATTENTION.value
    others = [x for x in before if x not in (flash, efficient)]
    given, later = [*others, efficient, flash], [efficient, *others, flash]
    try:
        torch._C._set_sdp_priority_order(given)
        tag = config.cache_key_tag
        with door.activate():
            assert torch._C._get_sdp_priority_order() == [flash, *others, efficient]
            assert config.cache_key_tag == f"{tag}+flashproto"
        assert torch._C._get_sdp_priority_order() == given
        assert config.cache_key_tag == tag
        with door.activate():
            torch._C._set_sdp_priority_order(later)  # by someone else
        assert torch._C._get_sdp_priority_order() == later
    finally:
        torch._C._set_sdp_priority_order(before)


@pytest.mark.parametrize("name", ["restore_flash_attention_impl", "activate_flash_attention_impl"])
def test_a_torch_without_the_registry(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(torch_attention, name)
    with pytest.raises(NotImplementedError, match=rf"without torch\.nn\.attention\.{name}; it takes"):
        door.activate()
    door.restore()


def test_a_torch_without_an_operator(on_cpu: Where, monkeypatch: pytest.MonkeyPatch) -> None:
    """varlen_attn_out's may be missing, as in torch 2.11; no other may."""
    there = door.is_there
    monkeypatch.setattr(door, "is_there", lambda name: not name.endswith(FLASH_INTO) and there(name))
    with door.activate():
        run_all(on_cpu)
        assert on_cpu.own.calls == ({FLASH_INTO: 1} if HAS_INTO else {})
    monkeypatch.setattr(door, "is_there", lambda name: not name.endswith(FLASH) and there(name))
    with pytest.raises(NotImplementedError, match=rf"without torch\.ops\.aten\.{FLASH}; it takes"):
        door.activate()


@pytest.mark.skipif(torch.cuda.is_available(), reason="of a machine without a GPU")
def test_without_a_gpu() -> None:
    said = (
        r"no kernels for cuda: there is no such GPU\. Call flashproto\.scaled_dot_product_attention, "
    )
    with pytest.raises(backends.BackendError, match=said):
        door.activate()


def test_a_torch_whose_kernels_are_missing_stays_as_it_was(monkeypatch: pytest.MonkeyPatch) -> None:
    """A failure half way leaves nothing behind."""
    monkeypatch.setattr(door, "DEVICE", "cpu")
    monkeypatch.setattr(backends, "_default", "reference")
    before = torch._C._get_sdp_priority_order()
    with pytest.raises(RuntimeError, match="no kernel for CPU"):
        door.activate()
    assert torch_attention.current_flash_attention_impl() is None
    assert torch._C._get_sdp_priority_order() == before


# --- documentation --------------------------------------------------------------------------------


def test_example_of_the_page(calls: Calls) -> None:
    names = run_examples("torch")
    assert count(calls) == ((2, 2) if torch.cuda.is_available() else (0, 0))
    assert names["loss"].isfinite()
    assert torch_attention.current_flash_attention_impl() is None


def test_examples_of_docstrings() -> None:
    tried = doctest.testmod(door)
    assert tried.attempted and not tried.failed


def test_page_names_the_operators() -> None:
    page = section("torch")
    assert all(f"`{name}`" in page for name in door.OPERATORS)
