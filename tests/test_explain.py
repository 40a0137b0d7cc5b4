"""explain: what a call does, as text."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils.flop_counter import FlopCounterMode

import flashproto

pytest.importorskip("triton")
from flashproto.ops import call


def test_tells_backend_kernels_tiles_and_why_no_other(device: str, capsys) -> None:
    x, w = torch.randn(4, 64, device=device, requires_grad=True), torch.randn(64, device=device)
    for _ in range(3):  # also of a call that is kept
        flashproto.rms_norm(x, 64, w, impl="triton")
        text = flashproto.explain(flashproto.rms_norm, x, 64, w, impl="triton")
        assert capsys.readouterr().out == text + "\n"
        lines = text.split("\n")
        assert lines[0] == "rms_norm: backend triton"
        assert "  not hopper: " in text and "not written for this operator" in text
        assert "  not torch: it can run this call, but it comes behind 'triton'" in lines
        forward, backward = (
            [line for line in lines if line.startswith(f"  {direction}: ")]
            for direction in ("forward", "backward")
        )
        assert len(forward) == 1 and "norm_forward_kernel" in forward[0] and " programs: " in forward[0]
        assert "R=" in forward[0] and "num_warps=" in forward[0]
        assert "norm_backward_kernel" in backward[0]
    with torch.no_grad():
        assert "backward" not in flashproto.explain(flashproto.rms_norm, x, 64, w, impl="triton")


def test_tells_what_is_on(device: str) -> None:
    q = torch.randn(1, 1, 16, 16, device=device)
    for options, kind in (({}, "full"), ({"causal": True, "softcap": 3.0}, "causal+softcap=2")):
        text = flashproto.explain(flashproto.attention, q, q, q, **options, impl="triton")
        assert f" KIND={kind}, " in text, text


@pytest.mark.parametrize("with_lse", [False, True])
def test_backward_is_that_of_the_gradients_of_what_is_returned(
    device: str, with_lse, monkeypatch
) -> None:
    q = torch.randn(1, 2, 16, 16, device=device, requires_grad=True)
    logits, targets = (
        torch.randn(4, 33, device=device, requires_grad=True),
        torch.arange(4, device=device),
    )

    def attend() -> list[torch.Tensor]:
        made = flashproto.attention(q, q, q, return_lse=with_lse, impl="triton")
        return list(made) if with_lse else [made]

    def lose() -> list[torch.Tensor]:  # the part of the z loss, without a gradient, is behind lse
        return list(
            flashproto.cross_entropy(
                logits,
                targets,
                reduction="none",
                z_loss=0.1,
                impl="triton",
                return_lse=with_lse,
                return_z_loss=True,
            )
        )

    plain, given = call.Operator.backward_recipe, []

    def noted(self, tensors, *others):
        given.append([x is not None for x in tensors])
        return plain(self, tensors, *others)

    for function in attend, lose:
        call.forget()
        given.clear()
        with monkeypatch.context() as patch:
            patch.setattr(call.Operator, "backward_recipe", noted)
            flashproto.explain(function)
            told = list(given)
            given.clear()
            sum(x.sum() for x in function() if x.requires_grad).backward()
        assert told == given and len(given) == 1


def test_tells_what_is_copied(device: str) -> None:
    x = torch.randn(64, 4, device=device).t()
    text = flashproto.explain(flashproto.softmax, x, impl="triton")
    assert "  forward: contiguous_copy of [4, 64], torch.float32" in text
    assert "copy" not in flashproto.explain(flashproto.softmax, x.contiguous(), impl="triton")


def test_tells_of_every_operator_of_a_function(device: str) -> None:
    x = torch.randn(2, 3, 8, 16, device=device)

    def layer(x: torch.Tensor) -> torch.Tensor:
        return flashproto.swiglu(flashproto.attention(x, x, x, causal=True, impl="reference"))

    text = flashproto.explain(layer, x)
    assert text.index("attention: backend reference") < text.index("swiglu: backend")
    assert "  not triton: it can run this call, but 'reference' was asked for" in text.split("\n")
    assert flashproto.explain(torch.relu, x) == NOTHING


def test_tells_of_attention_with_statistics_and_of_each_choice_once(device: str) -> None:
    q = torch.randn(1, 2, 16, 16, device=device, requires_grad=True)
    qkv, keys = torch.randn(1, 8, 6 * 16, device=device), torch.ones(1, 16, device=device).bool()
    for text in (
        flashproto.explain(flashproto.attention, q, q, q, return_aux=("entropy",), impl="triton"),
        flashproto.explain(flashproto.scaled_dot_product_attention, q, q, q, keys),
    ):
        assert text.count(": backend triton") == 1 and "  backward: attention_backward" in text
    text = flashproto.explain(flashproto.attention_qkv, qkv, 4, 1, impl="reference")
    assert text.count(": backend reference") == 1


NOTHING = "No operator of flashproto was called outside of torch.compile."


def test_kernels_are_told_whoever_else_watches(device: str) -> None:
    x = torch.randn(4, 44, device=device)
    f = lambda x: flashproto.softmax(x, impl="triton").square().sum()  # noqa: E731
    alone = flashproto.explain(f, x.clone().requires_grad_())
    assert "  forward: softmax_forward_kernel" in alone
    assert "  backward: softmax_backward_kernel" in alone
    with FlopCounterMode(display=False):
        assert flashproto.explain(f, x.clone().requires_grad_()) == alone
    assert flashproto.explain(torch.func.grad(f), x) == alone
    with FakeTensorMode() as mode:
        assert "forward: " not in flashproto.explain(f, mode.from_tensor(x))


def test_kernels_of_a_linear_layer_and_its_loss(device: str) -> None:
    h, weight = (torch.randn(n, 16, device=device, requires_grad=True) for n in (6, 40))
    targets = torch.arange(6, device=device)

    def f(reduction: str) -> None:
        options = {"reduction": reduction, "chunk_size": 2, "impl": "triton"}
        flashproto.linear_cross_entropy(h, weight, targets, **options).sum().backward()

    text = flashproto.explain(f, "none")
    assert text.count("  forward: cross_entropy_forward_kernel") == 1
    # On a GPU autograd has a thread of its own for it.
    assert device == "cuda" or "  backward: cross_entropy_backward_kernel" in text
    assert "  forward: cross_entropy_total_kernel" in flashproto.explain(f, "mean")


def test_compiled_code_and_other_threads_are_not_told(device: str) -> None:
    x = torch.randn(4, 44, device=device)
    compiled = torch.compile(lambda x: flashproto.softmax(x), backend="eager")
    assert flashproto.explain(compiled, x) == NOTHING
    with ThreadPoolExecutor(1) as pool:
        assert flashproto.explain(lambda: pool.submit(flashproto.softmax, x).result()) == NOTHING


def test_what_is_no_function_is_refused() -> None:
    with pytest.raises(TypeError, match=r"^explain: function is 3; it takes a function or a module\."):
        flashproto.explain(3)


def test_errors_are_those_of_the_call(device: str) -> None:
    with pytest.raises(ValueError, match="swiglu: gate is"):
        flashproto.explain(flashproto.swiglu, torch.randn(3, device=device))
    q = torch.randn(1, 1, 4, 8, device=device, dtype=torch.float64)
    with pytest.raises(flashproto.BackendError, match="float64"):
        flashproto.explain(flashproto.attention, q, q, q, impl="triton")
