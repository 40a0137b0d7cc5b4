"""How many Python functions of this library a call enters, once calls of its kind are known.

The count stands for the host's time, and other than that is the same on every machine.  `STEADY` has
the most that each call may enter; a change that enters fewer lowers it.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
import torch

import flashproto
from flashproto import masks

pytest.importorskip("triton")

from flashproto.ops import recipe

STEADY = {
    "attention": 33,
    "attention, window": 33,
    "attention, mask=documents": 51,
    "attention_varlen": 55,
    "cache, read": 64,
    "cache, append": 89,
    "cache, append + RoPE": 103,
    "cache, paged": 68,
}
CALLS = 5  # of which the last is counted
PACKAGE = str(Path(flashproto.__file__).parent)
KERNELS = f"{PACKAGE}/kernels"
INSIDE = ("<genexpr>", "<listcomp>", "<dictcomp>", "<lambda>")


def frames(call: Callable[[], Any]) -> list[str]:
    """The functions that a call enters, as file:function: of the package, and those that it generated
    ("<string>").  What runs within a launch is the interpreter's."""
    entered: list[str] = []
    launching: FrameType | None = None

    def profile(frame: FrameType, event: str, _: object) -> None:
        nonlocal launching
        if launching is not None:
            if event == "return" and frame is launching:
                launching = None
            return
        code = frame.f_code
        if event != "call":
            return
        if code is recipe.launch.__code__:
            launching = frame
        ours = code.co_filename.startswith(PACKAGE) and not code.co_filename.startswith(KERNELS)
        if (ours or code.co_filename == "<string>") and code.co_name not in INSIDE:
            entered.append(f"{code.co_filename.removeprefix(PACKAGE)}:{code.co_name}")

    before = sys.getprofile()
    sys.setprofile(profile)
    try:
        call()
    finally:
        sys.setprofile(before)
    return entered


def calls() -> dict[str, Callable[[], Any]]:
    q, k, v = (torch.randn(1, 2, 8, 16, requires_grad=True) for _ in range(3))
    packed = [x.detach()[0].transpose(0, 1).contiguous().requires_grad_() for x in (q, k, v)]
    cu = torch.tensor([0, 3, 8], dtype=torch.int32)
    documents = masks.documents(torch.tensor([0, 0, 0, 1, 1, 1, 1, 1]))

    def attention(**options: Any) -> Callable[[], Any]:
        return lambda: flashproto.attention(q, k, v, causal=True, impl="triton", **options)

    lengths = torch.full((2,), 3, dtype=torch.int32)
    one, new_k, new_v = (torch.randn(2, heads, 1, 16) for heads in (4, 2, 2))
    caches = [torch.randn(2, 32, 2, 16) for _ in range(2)]
    pages = [x.view(4, 16, 2, 16) for x in caches]
    angles = torch.randn(32, 8)

    def cache(tensors: list[torch.Tensor], **options: Any) -> Callable[[], Any]:
        return lambda: flashproto.attention_with_kv_cache(
            one, *tensors, lengths=lengths, impl="triton", **options
        )

    new: dict[str, Any] = {"k": new_k, "v": new_v}
    table = torch.arange(4, dtype=torch.int32).view(2, 2)
    return {
        "attention": attention(),
        "attention, window": attention(window=(3, 0)),
        "attention, mask=documents": attention(mask=documents),
        "attention_varlen": lambda: flashproto.attention_varlen(
            *packed, cu, cu, causal=True, impl="triton"
        ),
        "cache, read": cache(caches),
        "cache, append": cache(caches, **new),
        "cache, append + RoPE": cache(caches, **new, rope=(angles.cos(), angles.sin())),
        "cache, paged": cache(pages, page_table=table),
    }


@pytest.mark.skipif(torch.cuda.is_available(), reason="counted under the interpreter")
@pytest.mark.parametrize("name", STEADY)
def test_a_steady_call_enters_few_functions(name: str) -> None:
    call = calls()[name]
    for _ in range(CALLS - 1):
        call()
    entered = frames(call)
    assert len(entered) <= STEADY[name], "\n".join(entered)


@pytest.mark.skipif(torch.cuda.is_available(), reason="counted under the interpreter")
def test_frames_are_counted_and_launches_left_out() -> None:
    x = torch.randn(4, 16)
    entered = frames(lambda: flashproto.checks.tensors.check_tensor("a", "x", x))
    assert entered[0] == "/checks/tensors.py:check_tensor"
    launches = [name for name in frames(calls()["attention"]) if name.endswith("recipe.py:launch")]
    assert len(launches) == 1
