"""Calls of the Hopper attention kernels: any memory, streams, CUDA graphs, compilation."""

from __future__ import annotations

import contextlib
import random

import pytest
import torch
from attention_problem import Problem, make, results
from hopper_attention import determinism, late, with_gaps
from torch import Tensor

import flashproto
from flashproto import configs, masks
from flashproto.functional.attention_request import attention_request
from flashproto.ops import attention as attention_op
from flashproto.ops import attention_hopper
from flashproto.ops.descriptors import tma_reads
from flashproto.ops.recipe import Compute, Keep, Launch
from flashproto.reference.mask_table import TILE
from flashproto.variant import Kind, Variant


def test_backward_takes_any_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """A recipe launches for the strides that it is given, all of them such as TMA reads; what TMA
    cannot read is copied, and nothing else."""
    q, k, v = (torch.randn(2, 30, heads, 64).bfloat16().transpose(1, 2) for heads in (4, 2, 2))
    out, lse = torch.randn_like(q), torch.randn(2, 4, 30)
    monkeypatch.setattr(attention_hopper, "multiprocessors", lambda device: 132)
    dout, one = torch.randn_like(q), torch.ones((), dtype=q.dtype)
    settings = attention_op.Settings(Variant(Kind(CAUSAL=True)).form, 0.125, "hopper")
    for copies, given in (
        (0, (q, k, v, out, lse, dout, None)),
        (1, (q, k, v, out, lse, dout.contiguous(), torch.randn(2, 30, 4).transpose(1, 2))),
        (1, (q, k, v, out, lse, one.expand(q.shape), None)),
        (1, (with_gaps(q), k.contiguous(), with_gaps(v), out, with_gaps(lse), with_gaps(dout), None)),
        (1, (late(q), k, v, out, lse, dout, None)),
    ):
        for ordered in (False, True):
            with determinism() if ordered else contextlib.nullcontext():
                *heads, out_given, lse_given, dout_given, dlse = given
                rows = dout_given, dlse, out_given, lse_given
                tensors = attention_op.backward_inputs(rows, *heads)
                needs = (True, True, True)
                recipe = attention_op.attention.backward_recipe(tensors, settings, needs, False)
            made = [s for s in recipe.steps if isinstance(s, Compute)]
            assert len(made) == copies
            launches = [s for s in recipe.steps if isinstance(s, Launch)]
            assert [x.kernel.__name__ for x in launches] == [
                "preprocess_kernel",
                "attention_backward_kernel",
                "postprocess_kernel",
            ]
            main = launches[1].arguments
            chosen = configs.attention_backward_hopper(64, 30, Kind(True), ordered, 4, 2)
            assert main["CFG"] == chosen
            boxed = [main[name] for name in ("q_desc", "do_desc", "k_desc", "v_desc")]
            assert all(tma_reads(x.operand) for x in boxed)
            for x in boxed:
                assert tuple(x.tma_descriptors.first.shape) == tuple(x.operand.shape)
            assert launches[0].arguments["HAS_DLSE"] == (dlse is not None)
            assert main["dk_ptr"].strides == main["dv_ptr"].strides


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("rows", [(1, 1), (2, 4)])
@pytest.mark.parametrize("D", [64, 128, 256])
def test_launches_of_masks_with_a_table(
    D: int, rows: tuple[int, int], causal: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The lists of tiles come before the kernel that reads them, have room for all, and are kept."""
    Sq, Sk = 300, 500
    q, k, v = (torch.randn(2, H, S, D).bfloat16() for H, S in ((4, Sq), (2, Sk), (2, Sk)))
    monkeypatch.setattr(attention_hopper, "multiprocessors", lambda device: 132)
    mask = masks.boolean(torch.rand(*rows, Sq, Sk) < 0.5)
    variant = (
        attention_request("attention", q, k, v, causal=causal, mask=mask).with_table(False).variant
    )
    settings = attention_op.Settings(variant.form, 0.125, "hopper")
    tensors = [*variant.tensors.values()]
    forward, _ = attention_op.attention.forward_recipe((q, k, v, *tensors), settings, (0, 1), False)
    out, lse = torch.randn_like(q), torch.randn(2, 4, Sq)
    inputs = attention_op.backward_inputs((torch.randn_like(q), None, out, lse), q, k, v, tensors)
    needs = True, True, True, *(False for _ in tensors)
    backward = attention_op.attention.backward_recipe(inputs, settings, needs, False)
    of_forward = configs.attention_forward_hopper(D, Sk, variant.kind, Sq, 4, 2, 132)
    of_backward = configs.attention_backward_hopper(D, Sk, variant.kind, False, 4, 2)
    assert TILE % of_forward.BQ == TILE % of_forward.BN == 0
    assert TILE % of_backward.BM == TILE % of_backward.BN == 0
    heads, M, NB = rows[0] * rows[1], -(-Sq // of_backward.BM), -(-Sk // of_backward.BN)
    lists = {
        "visits_kernel": ("work", (heads, -(-Sq // of_forward.BQ), 3 + -(-Sk // of_forward.BN))),
        "columns_kernel": ("columns", (heads, NB, 3 + M)),
    }
    for recipe, names, main in (
        (forward, ["visits_kernel", "order_lists_kernel", "attention_forward_kernel"], 2),
        (
            backward,
            [
                "columns_kernel",
                "order_lists_kernel",
                "preprocess_kernel",
                "attention_backward_kernel",
                "postprocess_kernel",
            ],
            3,
        ),
    ):
        launches = [s for s in recipe.steps if isinstance(s, Launch)]
        assert [x.kernel.__name__ for x in launches] == names
        assert sum(isinstance(s, Keep) for s in recipe.steps) == 1
        field, shape = lists[names[0]]
        given = launches[main].arguments["given"]
        assert getattr(given, field).shape == shape
        assert launches[0].programs == shape[0] * shape[1]
        assert (given.table_of_batch, given.table_of_head) == ((4, 1) if heads > 1 else (0, 0))


@pytest.mark.gpu
@pytest.mark.parametrize("D", [64, 128, 256])
def test_planned_calls_take_any_memory(D: int, hopper: None, deterministic: None) -> None:
    leaves = [
        torch.randn(2, 300, heads, D, device="cuda").bfloat16().transpose(1, 2).requires_grad_()
        for heads in (4, 2, 2)
    ]
    expected: dict[str, list[Tensor]] = {}
    for unpack in (Tensor.clone, Tensor.clone, Tensor.clone, with_gaps, late, Tensor.contiguous):
        with torch.autograd.graph.saved_tensors_hooks(Tensor.detach, unpack):
            outputs = flashproto.attention(*leaves, causal=True, return_lse=True, impl="hopper")
        out, lse = outputs
        dout = torch.linspace(-1, 2, out.numel(), device="cuda").view(out.shape).bfloat16()
        dlse = torch.linspace(1, -2, lse.numel(), device="cuda").view(lse.shape)
        ones = torch.ones((), dtype=out.dtype, device="cuda").expand(out.shape)
        for kind, upstream in (
            ("both", [dout, dlse]),
            ("both", [with_gaps(dout), with_gaps(dlse)]),
            ("both", [late(dout), late(dlse)]),
            ("ones", [ones, None]),
        ):
            given = outputs if upstream[1] is not None else outputs[:1]
            gradients = torch.autograd.grad(given, leaves, upstream[: len(given)], retain_graph=True)
            got = [*outputs, *gradients]
            for a, b in zip(got, expected.setdefault(kind, got), strict=True):
                torch.testing.assert_close(a, b, rtol=0, atol=0)


@pytest.mark.gpu
@pytest.mark.parametrize("D", [64, 128, 256])
def test_deterministic_backwards_on_two_streams_do_not_hold_each_other_up(
    D: int, hopper: None, deterministic: None
) -> None:
    problem = Problem(torch.bfloat16, 1, 4, 4, 8192, 8192, D, D, causal=False, lse_gradient=False)
    inputs, gradients = make(problem, "cuda")
    outputs = flashproto.attention(*inputs, return_lse=True, impl="hopper")
    expected = torch.autograd.grad(outputs, inputs, gradients, retain_graph=True)
    streams = [torch.cuda.Stream() for _ in range(3)]
    torch.cuda.synchronize()
    found = []  # kept to the end: memory given back may be written while another stream still reads it
    for i in range(30):
        with torch.cuda.stream(streams[i % 3]):
            found.append(torch.autograd.grad(outputs, inputs, gradients, retain_graph=True))
    torch.cuda.synchronize()
    for grads in found:
        for got, wanted in zip(grads, expected, strict=True):
            assert torch.equal(got, wanted)


@pytest.mark.gpu
@pytest.mark.parametrize("causal", [False, True])
def test_captures_a_shape_that_never_ran(causal: bool, hopper: None) -> None:
    """Whose order of work no table has yet."""
    seen, q = (torch.randn(1, H, S, 64, device="cuda").bfloat16() for H, S in ((2, 1600), (7, 1800)))
    configurations = {
        configs.attention_forward_hopper(64, x.shape[2], Kind(causal), x.shape[2]) for x in (seen, q)
    }
    assert len(configurations) == 1 and configurations.pop().HAS_WORK_TABLE
    flashproto.attention(seen, seen, seen, causal=causal, impl="hopper")  # compiles
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = flashproto.attention(q, q, q, causal=causal, impl="hopper")
    for _ in range(2):
        q.copy_(torch.randn_like(q))
        graph.replay()
        expected = flashproto.attention(q, q, q, causal=causal, impl="hopper")
        assert torch.equal(captured, expected), "another order of work, the same bits"


@pytest.mark.gpu
@pytest.mark.parametrize("D", [64, 128, 256])
@pytest.mark.parametrize("causal", [False, True])
def test_captures_a_backward(causal: bool, D: int, hopper: None) -> None:
    """With its dependent launches, and others of its own right behind."""
    leaves = [torch.randn(2, 9, 1100, D, device="cuda").bfloat16().requires_grad_() for _ in range(3)]
    dout = torch.randn(2, 9, 1100, D, device="cuda").bfloat16()

    def step() -> list[Tensor]:
        out = flashproto.attention(*leaves, causal=causal, impl="hopper")
        first = torch.autograd.grad(out, leaves, dout, retain_graph=True)
        return [a + b for a, b in zip(first, torch.autograd.grad(out, leaves, dout), strict=True)]

    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        step()  # compiles
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = step()
    for _ in range(5):
        for t in (*(x.detach() for x in leaves), dout):
            t.copy_(torch.randn_like(t))
        for t in captured:
            t.fill_(torch.nan)
        graph.replay()
        (dq, dk, dv), (dq_again, dk_again, dv_again) = captured, step()
        assert torch.equal(dk, dk_again) and torch.equal(dv, dv_again)
        assert (dq - dq_again).abs().max() <= 0.02 * dq_again.abs().max()


@pytest.mark.gpu
def test_ten_thousand_launches_on_two_streams(hopper: None, seed: int) -> None:
    shapes = [(1, 4, 2, 130, 200, 64), (2, 8, 8, 512, 512, 64), (1, 8, 1, 300, 1500, 128)]
    shapes += [(1, 2, 2, 70, 5000, 128), (1, 4, 4, 600, 600, 256), (1, 2, 1, 1024, 1024, 96)]
    problems = [
        Problem(dtype, *shape, shape[-1], causal)
        for dtype in (torch.bfloat16, torch.float16)
        for shape in shapes
        for causal in (False, True)
    ]

    def call(problem: Problem, inputs: list[Tensor]) -> tuple[Tensor, Tensor]:
        return flashproto.attention(*inputs, causal=problem.causal, return_lse=True, impl="hopper")

    cases = []
    for problem in problems:
        inputs, gradients = make(problem, "cuda")
        expected = results(call(problem, inputs), inputs, gradients)
        cases.append((problem, inputs, gradients, expected, 0.02 * expected["dq"].abs().max()))
    streams = [torch.cuda.Stream() for _ in range(2)]
    wrong = torch.zeros(2, device="cuda", dtype=torch.int64)
    torch.cuda.synchronize()
    generator = random.Random(seed)
    for i in range(10_000):
        problem, inputs, gradients, expected, tolerance = generator.choice(cases)
        with torch.cuda.stream(streams[i % 2]):
            outputs = call(problem, inputs)
            wrong[i % 2] += (outputs[0] != expected["out"]).sum()
            if i % 16 < 4:
                got = dict(
                    zip(
                        ("dq", "dk", "dv"), torch.autograd.grad(outputs, inputs, gradients), strict=True
                    )
                )
                wrong[i % 2] += sum((got[name] != expected[name]).sum() for name in ("dk", "dv"))
                # dq's sums are in no fixed order
                wrong[i % 2] += ((got["dq"] - expected["dq"]).abs() > tolerance).sum()
    torch.cuda.synchronize()
    assert wrong.tolist() == [0, 0]


@pytest.mark.gpu
@pytest.mark.parametrize("mode", ["aot_eager", "default", "reduce-overhead"])
def test_compiles_in_one_graph(mode: str, hopper: None) -> None:
    torch.compiler.reset()
    problem = Problem(torch.bfloat16, 2, 4, 2, 200, 300, 64, 64, causal=True, strides="packed")
    inputs, gradients = make(problem, "cuda")

    def attend(*inputs: Tensor) -> tuple[Tensor, Tensor]:
        return flashproto.attention(*inputs, causal=True, return_lse=True, impl="hopper")

    options = {"backend": mode} if mode == "aot_eager" else {"mode": mode}
    compiled = torch.compile(attend, fullgraph=True, **options)
    expected = results(attend(*inputs), inputs, gradients)
    for _ in range(4):  # the third call replays a CUDA graph where the mode makes one
        torch.compiler.cudagraph_mark_step_begin()
        got = results(compiled(*inputs), inputs, gradients)
        for name, value in got.items():
            torch.testing.assert_close(value, expected[name], rtol=2.0**-7, atol=1e-4)


@pytest.mark.gpu
@pytest.mark.parametrize("causal", [False, True])
def test_opcheck(causal: bool, hopper: None) -> None:
    problem = Problem(torch.bfloat16, 1, 2, 1, 90, 70, 64, 64, causal)
    inputs, (dout, dlse) = make(problem, "cuda")
    arguments = ([], *Variant(Kind(causal), -20).form.flat(), 0.125, "hopper", False, 0)
    torch.library.opcheck(torch.ops.flashproto.attention_forward.default, (*inputs, *arguments))
    out, lse, *_ = torch.ops.flashproto.attention_forward(*inputs, *arguments)
    rows = dout, dlse, out.detach(), lse.detach()
    saved = attention_op.backward_inputs(rows, *(t.detach() for t in inputs))
    backward = torch.ops.flashproto.attention_backward.default
    # dq differs in its last bits from run to run
    torch.library.opcheck(backward, (*saved, *arguments, [True] * 3), atol=1e-3, rtol=2.0**-6)
