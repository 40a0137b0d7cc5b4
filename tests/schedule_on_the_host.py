"""Lets kernels/schedule.py run as Python, for tests of what it says."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from flashproto.kernels import schedule


def ranges_on_the_host(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the functions of a tile's range take plain numbers, as `schedule.key_ranges.fn`."""
    functions = {"minimum": min, "maximum": max, "cdiv": lambda a, b: -(-a // b)}
    monkeypatch.setattr(schedule, "tl", SimpleNamespace(**functions))
    monkeypatch.setattr(schedule, "clamp", schedule.clamp.fn)
