"""Words that a reader stumbles over: texts for users have plainer ones."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
FILES = [
    ROOT / "README.md",
    ROOT / "AGENTS.md",
    *sorted((ROOT / "docs").glob("*.md")),
    *sorted((ROOT / "flashproto").glob("*/**/*.py")),
    *sorted((ROOT / "flashproto").glob("*.py")),
    *sorted((ROOT / "examples").glob("*.py")),
]
# What is written, and what to write.
PLAINER = {
    r"\bst(ands?|ood)\b(?!-| in for| in the place of)": "is",
    r"\bturns? .*\bby RoPE\b|\bturned by\b|\bRoPE turns\b|\balready turned\b": "rotated by RoPE",
    r"\bmended\b": "fixed",
    r"\b(is|are) of (\d+ (heads|keys|queries|tokens|layers|bits)|the dtype)\b": "has",
}


@pytest.mark.parametrize("pattern", PLAINER)
def test_plain_words(pattern: str) -> None:
    found = [
        f"{path.relative_to(ROOT)}:{number}: {line.strip()}"
        for path in FILES
        if "kernels" not in path.parts  # the flashproto/kernels of a link, for whoever reads a kernel
        for number, line in enumerate(path.read_text().splitlines(), 1)
        if re.search(pattern, line, re.IGNORECASE)
    ]
    assert not found, f"write {PLAINER[pattern]!r}:\n" + "\n".join(found)


def test_what_is_found() -> None:
    (stands, *others) = PLAINER
    assert re.search(stands, "query i stands at i") and re.search(stands, "what stands there")
    assert not re.search(stands, "it stands in for a module, a stand-in")
    for pattern, text in zip(others, ("turned by RoPE", "Mended", "q is of 8 heads"), strict=False):
        assert re.search(pattern, text, re.IGNORECASE)
