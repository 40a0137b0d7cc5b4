"""Counts of this library's own calls behind a door, forward and backward: a door that passes its test
because something else ran is no door."""

from __future__ import annotations

import functools
import re
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

FUNCTIONS = (
    "attention",
    "attention_qkv",
    "attention_varlen",
    "attention_with_kv_cache",
    "attention_gradients",
    "scaled_dot_product_attention",
)

ACTIVATIONS = ("swiglu", "geglu", "reglu")  # of patch(), whose backward pass makes them again


class Calls:
    """forward: how often each function was called, without activations that a backward pass
    makes again; backward: how often a gradient came to its result; options: of the last call."""

    def __init__(self) -> None:
        self.forward: Counter[str] = Counter()
        self.backward: Counter[str] = Counter()
        self.options: dict[str, Any] = {}

    def counting(self, function: Callable[..., Any]) -> Callable[..., Any]:
        name = function.__name__

        @functools.wraps(function)
        def counted(*args: Any, **options: Any) -> Any:
            made = function(*args, **options)
            in_backward = torch._C._current_graph_task_id() != -1
            if name in ACTIVATIONS and in_backward and not torch.is_grad_enabled():
                return made  # what checkpointing runs once more has gradients, and counts
            self.forward[name] += 1
            self.options = options
            out = made[0] if isinstance(made, tuple) else made
            if out.requires_grad:
                assert torch.is_grad_enabled()
                out.register_hook(lambda _: self.backward.update([name]))
            return made

        return counted

    def assert_one(self, name: str, backward: bool = True) -> None:
        """One call of this function alone since the last time, and one gradient."""
        assert self.forward == {name: 1}
        assert self.backward == ({name: 1} if backward else {})
        self.forward.clear()
        self.backward.clear()


def counted(monkeypatch: pytest.MonkeyPatch, *modules: ModuleType) -> Calls:
    """Of what these modules of a door call."""
    calls = Calls()
    for module in modules:
        for name in FUNCTIONS:
            if hasattr(module, name):
                monkeypatch.setattr(module, name, calls.counting(getattr(module, name)))
    return calls


def section(heading: str) -> str:
    """Of docs/doors.md."""
    page = (Path(__file__).parent.parent / "docs" / "doors.md").read_text()
    (found,) = re.findall(rf"^## {heading}\n(.*?)(?=^## |\Z)", page, re.MULTILINE | re.DOTALL)
    return found


def run_examples(heading: str) -> dict[str, Any]:
    """What the section's example leaves behind."""
    (code,) = re.findall(r"^```python\n(.*?)^```$", section(heading), re.MULTILINE | re.DOTALL)
    names: dict[str, Any] = {}
    exec(code, names)
    return names
