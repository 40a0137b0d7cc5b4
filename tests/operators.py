"""Every public function as a table of calls, and what is watched while they are made: the ops that are
dispatched, the kernels that are launched and the tensors that are saved.

A Case is one way to call one function.  `Case.inputs` draws tensors of a shape that no call of the case
had before, so that a test sees the first call of a kind, whatever other tests have called.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map

import flashproto as fp
from flashproto import backends, hooks

bf16, f32 = torch.bfloat16, torch.float32
# Norms keep statistics of wider rows than 768 columns, see configs/rows.py.
NARROW, WIDE = 44, 776
E4M3 = torch.float8_e4m3fn

Inputs = dict[str, Tensor]


@dataclass(frozen=True)
class Case:
    """call(impl, *tensors) of the tensors that draw(n) makes, n being what makes their shapes new.

    op: the torch.library op that the call is while somebody watches, in the namespace flashproto.
    constants: names of floating-point tensors that are given no gradient.
    backward: how many ops of flashproto a backward pass may be.  It is one, but where the forward pass
        leaves gradients of a loss that is one number: scaling them may be products of torch.
    differentiable: False where all is forward only.
    writes: names of tensors that a call or its backward pass writes into.
    hopper: whether backend "hopper" takes the call, in bfloat16.
    """

    name: str
    op: str
    call: Callable[..., Any]
    draw: Callable[[int], Sequence[Tensor]]
    constants: str = ""
    backward: tuple[int, ...] = (1,)
    differentiable: bool = True
    writes: str = ""
    hopper: bool = False
    counter: Iterator[int] = field(default_factory=lambda: itertools.count(3), compare=False)

    @property
    def function(self) -> str:
        """The public function's name."""
        return self.name.split(",")[0]

    @functools.cached_property
    def names(self) -> list[str]:
        return list(inspect.signature(self.call).parameters)[1:]

    def inputs(self, device: str, dtype: torch.dtype | None = None) -> Inputs:
        """Tensors of new shapes; those in float32 of `dtype`, if one is given."""
        drawn = zip(self.names, self.draw(next(self.counter)), strict=True)
        return {
            name: t.to(device, dtype if t.dtype == f32 and name not in self.constants.split() else None)
            for name, t in drawn
        }

    def leaves(self, inputs: Inputs) -> Inputs:
        """Copies that lie in memory as the inputs do, those with a gradient needing one."""
        wanted = self.gradients(inputs)
        return {n: copy_of(t).requires_grad_(n in wanted) for n, t in inputs.items()}

    def gradients(self, inputs: Inputs) -> list[str]:
        """The names of the tensors that have gradients."""
        if not self.differentiable:
            return []
        constants = self.constants.split()
        return [n for n, t in inputs.items() if t.is_floating_point() and n not in constants]

    def __call__(self, inputs: Inputs, impl: str | None) -> list[Tensor]:
        """The results that the call gives."""
        made = self.call(impl, *(inputs[n] for n in self.names))
        return [made] if isinstance(made, Tensor) else list(made)


def R(*shape: int) -> Tensor:
    return torch.randn(shape)


def classes(n: int, V: int = 40) -> Tensor:
    targets = torch.arange(n) * 7 % V
    targets[1] = -100
    return targets


def tables(n: int, half: int = 4) -> tuple[Tensor, Tensor]:
    angles = torch.linspace(0, 3, n * half).view(n, half)
    return angles.cos(), angles.sin()


def heads(n: int, *counts: int, D: int = 16) -> list[Tensor]:
    """[1, H, n, D] each, tokens first in memory."""
    return [R(1, n, h, D).transpose(1, 2) for h in counts]


def starts(n: int) -> Tensor:
    """cu_seqlens of two sequences and an empty one, which leave a token behind them."""
    return torch.tensor([0, n // 2, n // 2, n - 1], dtype=torch.int32)


@contextlib.contextmanager
def default_backend(impl: str | None) -> Iterator[None]:
    before = backends.get_default()
    backends.set_default(impl)
    try:
        yield
    finally:
        backends.set_default(before)


def sdpa(impl: str | None, *tensors: Tensor, **options: Any) -> Tensor:
    """scaled_dot_product_attention, whose backend has no argument."""
    with default_backend(impl) if impl else contextlib.nullcontext():
        return fp.scaled_dot_product_attention(*tensors, **options)


def call(name: str, *arguments: Tensor, scalars: tuple[float, ...] = ()) -> hooks.Call:
    return hooks.call(name, *arguments, *scalars)


N, W = NARROW, WIDE
ATTENTION: dict[str, Any] = {"op": "attention_forward", "hopper": True}
LOSS: dict[str, Any] = {"op": "cross_entropy"}
LINEAR: dict[str, Any] = {"op": "linear_cross_entropy"}

CASES = [
    # --- norms
    Case("layer_norm, weight and bias", "norm",
         lambda impl, x, w, b: fp.layer_norm(x, N, w, b, impl=impl), lambda n: (R(n, N), R(N), R(N))),
    Case("layer_norm, nothing else", "norm", lambda impl, x: fp.layer_norm(x, (2, 22), impl=impl),
         lambda n: (R(n, 2, 22),)),
    Case("layer_norm, wide", "norm", lambda impl, x, w, b: fp.layer_norm(x, W, w, b, impl=impl),
         lambda n: (R(n, W), R(W), R(W))),
    Case("layer_norm, another dtype", "hooked_norm",
         lambda impl, x, w: fp.layer_norm(x, N, w, dtype=bf16, impl=impl), lambda n: (R(n, N), R(N))),
    Case("layer_norm, prologue", "hooked_norm",
         lambda impl, x, w, row: fp.layer_norm(x, N, w, prologue=call("multiply", row), impl=impl),
         lambda n: (R(n, N), R(N), R(n, 1))),
    Case("layer_norm, 8 bits", "hooked_norm",
         lambda impl, x, w, s: fp.layer_norm(
             x, N, w, dtype=E4M3, epilogue=call("quantize_e4m3", s), impl=impl
         ),
         lambda n: (R(n, N), R(N), torch.tensor(0.01)), differentiable=False),
    Case("rms_norm, weight", "norm", lambda impl, x, w: fp.rms_norm(x, N, w, impl=impl),
         lambda n: (R(n, N), R(N))),
    Case("rms_norm, nothing else", "norm", lambda impl, x: fp.rms_norm(x, N, impl=impl),
         lambda n: (R(2, n, N),)),
    Case("rms_norm, bias alone", "norm", lambda impl, x, b: fp.rms_norm(x, N, bias=b, impl=impl),
         lambda n: (R(n, N), R(N))),
    Case("rms_norm, wide", "norm", lambda impl, x, w: fp.rms_norm(x, W, w, impl=impl),
         lambda n: (R(n, W), R(W))),
    Case("rms_norm, wide, nothing else, 16 bits", "norm", lambda impl, x: fp.rms_norm(x, W, impl=impl),
         lambda n: (R(n, W).to(bf16),)),
    Case("rms_norm, llama", "norm",
         lambda impl, x, w: fp.rms_norm(x, N, w, casting="llama", impl=impl),
         lambda n: (R(n, N).to(bf16), R(N))),
    Case("rms_norm, epilogue", "hooked_norm",
         lambda impl, x, w, z: fp.rms_norm(x, N, w, epilogue=call("silu_gate", z), impl=impl),
         lambda n: (R(n, N), R(N), R(n, N))),
    Case("rms_norm, split rows", "hooked_norm",
         lambda impl, x, w: fp.rms_norm(x, W, w, split_rows=True, impl=impl),
         lambda n: (R(n, W), R(W))),
    Case("rms_norm, memory efficient", "norm",
         lambda impl, x, w: fp.rms_norm(x, N, w, memory_efficient=True, impl=impl),
         lambda n: (R(n, N), R(N) + 3)),
    Case("add_layer_norm, weight and bias", "norm",
         lambda impl, x, r, w, b: fp.add_layer_norm(x, r, N, w, b, impl=impl),
         lambda n: (R(n, N), R(n, N), R(N), R(N))),
    Case("add_layer_norm, wide, nothing else", "norm",
         lambda impl, x, r: fp.add_layer_norm(x, r, W, impl=impl), lambda n: (R(n, W), R(n, W))),
    Case("add_layer_norm, dropout", "hooked_norm",
         lambda impl, x, r, w, seed: fp.add_layer_norm(
             x, r, N, w, prologue=call("dropout", seed, scalars=(0.3,)), impl=impl
         ),
         lambda n: (R(n, N), R(n, N), R(N), torch.tensor(1234567))),
    Case("add_rms_norm, weight, 16 bits", "norm",
         lambda impl, x, r, w: fp.add_rms_norm(x, r, N, w, impl=impl),
         lambda n: (R(n, N).to(bf16), R(n, N), R(N))),
    Case("add_rms_norm, wide", "norm", lambda impl, x, r, w: fp.add_rms_norm(x, r, W, w, impl=impl),
         lambda n: (R(n, W), R(n, W), R(W))),
    Case("add_rms_norm, memory efficient, wide", "norm",
         lambda impl, x, r, w: fp.add_rms_norm(x, r, W, w, memory_efficient=True, impl=impl),
         lambda n: (R(n, W), R(n, W), R(W) + 3)),
    Case("layer_norm_fp8, weight and bias", "quantized_norm",
         lambda impl, x, w, b: fp.layer_norm_fp8(x, N, w, b, impl=impl),
         lambda n: (R(n, N), R(N), R(N)), differentiable=False),
    Case("rms_norm_fp8, residual, wide", "quantized_norm",
         lambda impl, x, w, r: fp.rms_norm_fp8(x, W, w, residual=r, impl=impl),
         lambda n: (R(n, W), R(W), R(n, W)), differentiable=False),
    # --- softmax
    Case("softmax, nothing else", "softmax", lambda impl, x: fp.softmax(x, impl=impl),
         lambda n: (R(n, N),)),
    Case("softmax, wide, float32 of 16 bits", "softmax",
         lambda impl, x: fp.softmax(x, dtype=f32, impl=impl), lambda n: (R(n, W).to(bf16),)),
    Case("softmax, mask", "hooked_softmax",
         lambda impl, x, mask: fp.softmax(x, mask=mask, scale=0.5, impl=impl),
         lambda n: (R(2, n, N), R(n, N))),
    Case("softmax, causal", "hooked_softmax", lambda impl, x: fp.softmax(x, causal=True, impl=impl),
         lambda n: (R(n, N),)),
    Case("softmax, split rows", "hooked_softmax",
         lambda impl, x: fp.softmax(x, split_rows=True, impl=impl), lambda n: (R(n, W),)),
    Case("log_softmax, nothing else", "softmax", lambda impl, x: fp.log_softmax(x, impl=impl),
         lambda n: (R(n, N),)),
    Case("log_softmax, scale and epilogue", "hooked_softmax",
         lambda impl, x, z: fp.log_softmax(x, scale=0.5, epilogue=call("multiply", z), impl=impl),
         lambda n: (R(n, N), R(n, 1))),
    Case("logsumexp, nothing else", "logsumexp", lambda impl, x: fp.logsumexp(x, impl=impl),
         lambda n: (R(n, N),)),
    Case("softmax_topk, renormalized", "softmax_topk",
         lambda impl, x: fp.softmax_topk(x, 3, renormalize=True, impl=impl), lambda n: (R(n, N),)),
    # --- losses
    Case("cross_entropy, nothing else", call=lambda impl, x, t: fp.cross_entropy(x, t, impl=impl),
         draw=lambda n: (R(n, 40), classes(n)), **LOSS),
    Case("cross_entropy, weighted sum",
         call=lambda impl, x, t, w: fp.cross_entropy(
             x, t, weight=w, label_smoothing=0.1, softcap=3.0, z_loss=0.1, reduction="sum", impl=impl
         ),
         draw=lambda n: (R(n, 40), classes(n), R(40).square()), constants="w", **LOSS),
    Case("cross_entropy, every row",
         call=lambda impl, x, t: fp.cross_entropy(x, t, reduction="none", impl=impl),
         draw=lambda n: (R(2, n, 40), torch.stack([classes(n)] * 2)), **LOSS),
    Case("cross_entropy, lse and z_loss",
         call=lambda impl, x, t: fp.cross_entropy(
             x, t, z_loss=0.1, return_lse=True, return_z_loss=True, impl=impl
         ),
         draw=lambda n: (R(n, 40), classes(n)), **LOSS),
    Case("cross_entropy, 16 bits", call=lambda impl, x, t: fp.cross_entropy(x, t, impl=impl),
         draw=lambda n: (R(n, 40).to(bf16), classes(n)), **LOSS),
    Case("cross_entropy, in place",
         call=lambda impl, x, t: fp.cross_entropy(x, t, inplace_backward=True, impl=impl),
         draw=lambda n: (R(n, 40), classes(n)), writes="x", **LOSS),
    Case("linear_cross_entropy, nothing else",
         call=lambda impl, h, w, t: fp.linear_cross_entropy(h, w, t, impl=impl),
         draw=lambda n: (R(n, 24), R(40, 24), classes(n)), backward=(0, 1), **LINEAR),
    Case("linear_cross_entropy, bias and z_loss, 16 bits, little memory",
         call=lambda impl, h, w, t, b: fp.linear_cross_entropy(
             h, w, t, b, z_loss=0.1, return_z_loss=True, low_memory=True, impl=impl
         ),
         draw=lambda n: (R(n, 24).to(bf16), R(40, 24).to(bf16), classes(n), R(40).to(bf16)),
         backward=(0, 1), **LINEAR),
    Case("linear_cross_entropy, every row and lse",
         call=lambda impl, h, w, t, c: fp.linear_cross_entropy(
             h, w, t, class_weight=c, reduction="none", return_lse=True, impl=impl
         ),
         draw=lambda n: (R(n, 24), R(40, 24), classes(n), R(40).square()), constants="c", **LINEAR),
    # --- element-wise
    Case("swiglu, two tensors", "glu", lambda impl, gate, up: fp.swiglu(gate, up, impl=impl),
         lambda n: (R(n, N), R(n, N))),
    Case("swiglu, halves", "glu", lambda impl, x: fp.swiglu(x, impl=impl), lambda n: (R(n, N),)),
    Case("geglu, tanh", "glu", lambda impl, gate, up: fp.geglu(gate, up, approximate="tanh", impl=impl),
         lambda n: (R(n, N), R(n, 2 * N)[:, :N])),
    Case("reglu, halves, 16 bits", "glu", lambda impl, x: fp.reglu(x, impl=impl),
         lambda n: (R(n, N).to(bf16),)),
    Case("gelu, nothing else", "glu", lambda impl, x: fp.gelu(x, impl=impl), lambda n: (R(n, N),)),
    # --- positions and norms of heads
    Case("rope, two tensors", "rope", lambda impl, q, k, cos, sin: fp.rope(q, k, cos, sin, impl=impl),
         lambda n: (*heads(n, 2, 1), *tables(n, 8)), "cos sin"),
    Case("rope, positions", "rope",
         lambda impl, q, cos, sin, at: fp.rope(
             q, None, cos, sin, positions=at, offset=2, interleaved=True, impl=impl
         ),
         lambda n: (R(1, 2, n, 16), *tables(n + 2), torch.arange(n).flip(0)), "cos sin"),
    Case("rope, offsets", "rope",
         lambda impl, q, k, cos, sin, offset: fp.rope(q, k, cos, sin, offset=offset, impl=impl),
         lambda n: (*heads(n, 2, 1), *tables(n + 2), torch.tensor([2])), "cos sin"),
    Case("rope, in place", "rope_",
         lambda impl, q, k, cos, sin: fp.rope(q, k, cos, sin, inplace=True, impl=impl),
         lambda n: (*heads(n, 2, 1), *tables(n)), differentiable=False, writes="q k"),
    Case("rope_qkv, nothing else", "rope_packed",
         lambda impl, qkv, cos, sin: fp.rope_qkv(qkv, 2, 1, cos, sin, impl=impl),
         lambda n: (R(1, n, 64), *tables(n)), "cos sin"),
    Case("qk_norm, weights", "qk_norm",
         lambda impl, q, k, qw, kw: fp.qk_norm(q, k, qw, kw, impl=impl),
         lambda n: (*heads(n, 2, 1), R(16), R(16))),
    Case("qk_norm, rope, one tensor", "qk_norm",
         lambda impl, q, qw, cos, sin: fp.qk_norm(q, None, qw, None, cos, sin, impl=impl),
         lambda n: (R(1, 2, n, 16), R(16), *tables(n)), "cos sin"),
    Case("qk_norm_qkv, weights and rope", "qk_norm_packed",
         lambda impl, qkv, qw, kw, cos, sin: fp.qk_norm_qkv(qkv, 2, 1, qw, kw, cos, sin, impl=impl),
         lambda n: (R(1, n, 64), R(16), R(16), *tables(n)), "cos sin"),
    # --- attention
    Case("attention, causal, groups of heads",
         call=lambda impl, q, k, v: fp.attention(q, k, v, causal=True, impl=impl),
         draw=lambda n: heads(n, 2, 1, 1), **ATTENTION),
    Case("attention, other keys, lse",
         call=lambda impl, q, k, v: fp.attention(q, k, v, causal=True, return_lse=True, impl=impl),
         draw=lambda n: (R(1, 1, n, 16), R(1, 1, n + 5, 16), R(1, 1, n + 5, 16)), **ATTENTION),
    Case("attention, negative scale, other width of v", "attention_forward",
         lambda impl, q, k, v: fp.attention(q, k, v, scale=-0.5, impl=impl),
         lambda n: (R(1, 1, n, 16), R(1, 1, n, 16), R(1, 1, n, 24))),
    Case("attention, window, softcap, sinks, slopes", "attention_forward",
         lambda impl, q, k, v, sinks, slopes: fp.attention(
             q, k, v, window=(3, 1), softcap=2.0, sinks=sinks, alibi_slopes=slopes, impl=impl
         ),
         lambda n: (*heads(n, 2, 1, 1), R(2), R(2))),
    Case("attention, biases", "attention_forward",
         lambda impl, q, k, v, bias, table: fp.attention(
             q, k, v, causal=True, bias=bias, relative_bias=table, relative_offset=1, impl=impl
         ),
         lambda n: (*heads(n, 2, 1, 1), R(2, 1, n), R(1, 4))),
    Case("attention, score_mod", "attention_forward",
         lambda impl, q, k, v, c, d: fp.attention(
             q, k, v, causal=True, score_mod=call("forget", c, d), impl=impl
         ),
         lambda n: (*heads(n, 2, 1, 1), R(2, n, 1), R(1, 1, n).transpose(1, 2).mT)),
    Case("attention, documents, first keys", "attention_forward",
         lambda impl, q, k, v, ids: fp.attention(
             q, k, v, mask=fp.masks.documents(ids) & fp.masks.window(2, first=1), impl=impl
         ),
         lambda n: (*heads(n, 2, 1, 1), torch.arange(n) // 3)),
    Case("attention, statistics", "attention_forward",
         lambda impl, q, k, v, sinks: [
             x.detach() if i > 2 else x
             for i, x in enumerate(fp.attention(
                 q, k, v, causal=True, sinks=sinks, return_lse=True,
                 return_aux=("entropy", "max_score"), impl=impl,
             ))
         ],
         lambda n: (*heads(n, 2, 1, 1), R(2))),
    Case("attention_varlen, causal, sinks, lse", "attention_forward",
         lambda impl, q, k, v, sinks, cu: fp.attention_varlen(
             q, k, v, cu, cu, causal=True, sinks=sinks, return_lse=True, impl=impl
         ),
         lambda n: (R(n, 2, 16), R(n, 1, 16), R(n, 1, 16), R(2), starts(n))),
    Case("attention_varlen, gaps, lse", "attention_forward",
         lambda impl, q, k, v, cu, used: fp.attention_varlen(
             q, k, v, cu, cu, seqused_q=used, seqused_k=(used + 1) // 2, return_lse=True, impl=impl
         ),
         lambda n: (R(n, 2, 16), R(n, 1, 16), R(n, 1, 16), starts(n), starts(n).diff() // 2)),
    Case("attention_with_kv_cache, window, pages, rope", "attention_kv_cache",
         lambda impl, q, k, v, lengths, table, cos, sin: fp.attention_with_kv_cache(
             q, k, v, lengths=lengths, page_table=table, window=(9, None), rope=(cos, sin),
             return_lse=True, impl=impl,
         ),
         lambda n: (*heads(n, 2), R(6, 8, 1, 16), R(6, 8, 1, 16), torch.tensor([11]).int(),
                    torch.tensor([[4, 0, 2]]).int(), *tables(32)), differentiable=False),
    Case("merge_attention, three parts, tokens first, 16 bits", "attention_merge",
         lambda impl, a, b, c, s, t, u: fp.merge_attention((a, b, c), [s, t, u], impl=impl),
         lambda n: (*heads(n, 2, 2), R(1, 2, n, 16).to(bf16), R(1, 2, n), R(1, n, 2).mT, R(1, 2, n))),
    Case("merge_attention, stacked", "attention_merge",
         lambda impl, outs, lses: fp.merge_attention(outs, lses, impl=impl),
         lambda n: (R(2, n, 3, 12), R(2, n, 3))),
    Case("attention_qkv, window, sinks, tree", "attention_qkv_forward",
         lambda impl, qkv, sinks, parents: fp.attention_qkv(
             qkv, 2, 1, window=(5, None), sinks=sinks, mask=fp.masks.tree(parents), impl=impl
         ),
         lambda n: (R(1, n, 64), R(2), torch.arange(-1, n - 1))),
    Case("attention_qkv, causal, groups of heads", "attention_qkv_forward",
         lambda impl, qkv: fp.attention_qkv(qkv, 2, 1, causal=True, impl=impl),
         lambda n: (R(1, n, 64),), hopper=True),
    Case("attention_qkv, negative scale", "attention_forward",
         lambda impl, qkv: fp.attention_qkv(qkv, 1, 1, scale=-0.5, impl=impl),
         lambda n: (R(1, n, 48),)),
    Case("scaled_dot_product_attention, causal, groups of heads",
         call=lambda impl, q, k, v: sdpa(impl, q, k, v, is_causal=True, enable_gqa=True),
         draw=lambda n: heads(n, 2, 1, 1), **ATTENTION),
]  # fmt: skip


def first_of_each(key: Callable[[Case], object]) -> list[Case]:
    found: dict[object, Case] = {}
    for case in CASES:
        found.setdefault(key(case), case)
    return list(found.values())


DIFFERENTIABLE = [case for case in CASES if case.differentiable]
# One for every function, and for every op that a function ends in.
MAIN = first_of_each(lambda case: (case.function, case.op))
# One for every op; of attention every function, whose checks read strides and starts of tensors.
OPERATORS = first_of_each(lambda case: (case.op, case.function if "attention" in case.op else ""))


def parameters(cases: Sequence[Case], hopper: bool = True) -> list[Any]:
    """For pytest.mark.parametrize("case, impl", ...): the portable kernels, and those for Hopper."""
    return [pytest.param(case, "triton", id=case.name) for case in cases] + [
        pytest.param(case, "hopper", id=f"{case.name}, hopper", marks=pytest.mark.gpu)
        for case in cases
        if hopper and case.hopper
    ]


# --- calls -----------------------------------------------------------------------------------------


def copy_of(t: Tensor) -> Tensor:
    """A tensor of equal elements, metadata and place in a memory of its own, expanded ones too."""
    memory = t.untyped_storage().nbytes() // t.element_size()
    made = t.detach().as_strided((memory,), (1,), 0).clone()
    return made.as_strided(t.shape, t.stride(), t.storage_offset())


def upstream(y: Tensor) -> Tensor:
    """A gradient for a result, the same for the same shape."""
    values = torch.linspace(-1, 2, y.numel(), device=y.device)
    return values.view(y.shape).to(y.dtype)


def backward(outputs: Sequence[Tensor], leaves: Sequence[Tensor]) -> list[Tensor]:
    """Gradients of the results that have one."""
    roots = [y for y in outputs if y.requires_grad]
    gradients = torch.autograd.grad(roots, leaves, [upstream(y) for y in roots], allow_unused=True)
    return [torch.zeros_like(x) if g is None else g for g, x in zip(gradients, leaves, strict=True)]


class Results(NamedTuple):
    outputs: list[Tensor]
    gradients: list[Tensor]


def run(
    case: Case,
    inputs: Inputs,
    impl: str | None,
    mode: contextlib.AbstractContextManager[object] | None = None,
) -> Results:
    """One call, in `mode` if given, and one backward pass where there is one."""
    leaves = case.leaves(inputs)
    with mode or contextlib.nullcontext():
        outputs = case(leaves, impl)
    wanted = [leaves[n] for n in case.gradients(inputs)]
    gradients = backward(outputs, wanted) if wanted else []
    return Results([y.detach() for y in outputs], gradients)


def metadata(t: Tensor) -> tuple[object, ...]:
    return t.dtype, tuple(t.shape), t.stride(), t.device.type


def layout(t: Tensor) -> tuple[object, ...]:
    """metadata, less the strides over dimensions of one, which mean nothing."""
    strides = [m for m, n in zip(t.stride(), t.shape, strict=True) if n != 1]
    return t.dtype, tuple(t.shape), strides, t.device.type


def bits(t: Tensor) -> Tensor:
    """So that NaN and 8-bit floats can be compared."""
    return t.detach().contiguous().view(-1).view(torch.uint8)


def assert_same(got: Sequence[Tensor], wanted: Sequence[Tensor]) -> None:
    """Equal metadata and equal bits."""
    assert [metadata(t) for t in got] == [metadata(t) for t in wanted]
    for a, b in zip(got, wanted, strict=True):
        assert torch.equal(bits(a), bits(b)), (a.double() - b.double()).abs().max()


def assert_same_results(got: Results, wanted: Results) -> None:
    assert_same(got.outputs, wanted.outputs)
    assert_same(got.gradients, wanted.gradients)


def assert_near(got: Sequence[Tensor], wanted: Sequence[Tensor], unit: float = 1e-5) -> None:
    """Equal shapes, dtypes and, but for roundings in between, elements."""
    for a, b in zip(got, wanted, strict=True):
        assert (a.dtype, a.shape) == (b.dtype, b.shape)
        a, b = a.double(), b.double()
        largest = max(b.nan_to_num().abs().amax().item(), 1)
        torch.testing.assert_close(a, b, rtol=unit, atol=unit * largest)


# --- what is watched -------------------------------------------------------------------------------


@contextlib.contextmanager
def deterministic() -> Iterator[None]:
    """torch.use_deterministic_algorithms; a warning, not an error, where torch's own are not."""
    torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(False)


class Launch(NamedTuple):
    kernel: str
    arguments: dict[str, Any]  # those passed by name; under the interpreter alone


def sizes_made(patch: pytest.MonkeyPatch) -> list[int]:
    """To which each recipe that is made from now on adds the elements of each tensor that it makes."""
    from flashproto.ops.recipe import Recipe

    made: list[int] = []
    finish = Recipe.finish

    def noting(recipe: Recipe) -> Recipe:
        made.extend(x.numel() for x in recipe.whole[recipe.inputs :] if x is not None)
        return finish(recipe)

    patch.setattr(Recipe, "finish", noting)
    return made


@contextlib.contextmanager
def launches(refused: Callable[[], bool] = lambda: False) -> Iterator[list[Launch]]:
    """The kernels that are launched meanwhile; one raises, before it runs, while refused() is true."""
    seen: list[Launch] = []

    def note(kernel: str, arguments: dict[str, Any]) -> None:
        if refused():
            raise AssertionError(f"{kernel} was launched")
        seen.append(Launch(kernel, arguments))

    if backends.INTERPRETED:
        from triton.runtime.interpreter import GridExecutor

        ordinary = GridExecutor.__call__

        def noting(self: Any, *arguments: Any, **named: Any) -> Any:
            note(self.fn.__name__, named)
            return ordinary(self, *arguments, **named)

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(GridExecutor, "__call__", noting)
            yield seen
        return
    from triton import knobs

    def entered(about: Any) -> None:
        note(about.get()["name"], {})

    knobs.runtime.launch_enter_hook.add(entered)
    try:
        yield seen
    finally:
        knobs.runtime.launch_enter_hook.remove(entered)


def no_launch() -> contextlib.AbstractContextManager[list[Launch]]:
    return launches(refused=lambda: True)


@contextlib.contextmanager
def saved() -> Iterator[list[tuple[object, ...]]]:
    """The metadata of the tensors that are saved meanwhile, in their order."""
    seen: list[tuple[object, ...]] = []

    def pack(t: Tensor) -> Tensor:
        seen.append(metadata(t))
        return t

    with saved_tensors_hooks(pack, lambda t: t):
        yield seen


class Dispatched(NamedTuple):
    """One call of an op: copies of what it was given and of what it made, as they were then."""

    op: torch._ops.OpOverload
    arguments: tuple[Any, ...]
    outputs: list[Tensor]


class Recorder(TorchDispatchMode):
    """Notes the ops that are dispatched, and all about those of flashproto."""

    def __init__(self) -> None:
        super().__init__()
        self.ops: list[str] = []
        self.own: list[Dispatched] = []
        self.depth = 0  # of calls inside an op

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        own = func.namespace == "flashproto"
        self.ops.append(func.name())
        given = tree_map(lambda x: copy_of(x) if isinstance(x, Tensor) else x, args) if own else ()
        self.depth += 1
        try:
            made = func(*args, **(kwargs or {}))
        finally:
            self.depth -= 1
        if own:
            assert not kwargs
            outputs = [copy_of(t) for t in tree_leaves(made) if isinstance(t, Tensor)]
            self.own.append(Dispatched(func, given, outputs))
        return made


class Watched(NamedTuple):
    """One call under a TorchDispatchMode: what it gave, and what was dispatched each way."""

    results: Results
    forward: list[str]
    backward: list[str]
    own: list[Dispatched]


def watch(case: Case, inputs: Inputs, impl: str | None) -> Watched:
    """`run` under a mode that records; a kernel that no op launches raises."""
    leaves, recorder = case.leaves(inputs), Recorder()
    wanted = [leaves[n] for n in case.gradients(inputs)]
    with launches(refused=lambda: recorder.depth == 0), recorder:
        outputs = case(leaves, impl)
        forward = len(recorder.ops)
        gradients = backward(outputs, wanted) if wanted else []
    results = Results([y.detach() for y in outputs], gradients)
    return Watched(results, recorder.ops[:forward], recorder.ops[forward:], recorder.own)


def own_ops(ops: Sequence[str]) -> list[str]:
    """Those of flashproto, by their names in it."""
    return [name.removeprefix("flashproto::") for name in ops if name.startswith("flashproto::")]


def assert_one_op(case: Case, watched: Watched) -> None:
    """A call is its op, a backward pass another; nothing else is launched (see `watch`)."""
    assert own_ops(watched.forward) == [case.op]
    if case.differentiable:
        assert len(own_ops(watched.backward)) in case.backward
