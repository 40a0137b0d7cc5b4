"""docs/attention.md's "Adding a variant": the diff that it shows makes a variant that works."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
TEXT = (ROOT / "docs" / "attention.md").read_text().split("\n## Adding a variant\n")[1]
(DIFF,) = re.findall(r"```diff\n(.*?)```", TEXT, re.DOTALL)
# Of the new variant: against float64 by the reference and the kernels, beside every other feature, its
# row of the table; and some that were there before.
TESTS = {
    "test_variants.py": "follows_the_definitions and score_floor and square or "
    "each_feature and (score_floor or softcap)",
    "test_variants_table.py": "score_floor and (reference or says_no or kinds) or every_feature",
    "test_variants_features.py": "SCORE_FLOOR or every_field or functions_take",
    "test_variant.py": "not ranges and not runs and not walk",
}


@pytest.mark.slow
def test_the_diff_makes_a_variant(tmp_path: Path) -> None:
    if shutil.which("git") is None:
        pytest.skip("git, which applies the diff, is not installed")
    for room in ("flashproto", "kernels", "tests"):
        shutil.copytree(
            ROOT / room, tmp_path / room, symlinks=True, ignore=shutil.ignore_patterns("__pycache__")
        )
    shutil.copy(ROOT / "pyproject.toml", tmp_path)
    outside = os.environ | {"GIT_CEILING_DIRECTORIES": str(tmp_path.parent)}
    subprocess.run(
        ["git", "apply", "-p0", "-"], input=DIFF, text=True, check=True, cwd=tmp_path, env=outside
    )
    environment = os.environ | {"PYTHONPATH": str(tmp_path)}
    environment.pop("PYTEST_XDIST_WORKER", None)
    command = [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider"]
    chosen = " or ".join(f"({name} and ({which}))" for name, which in TESTS.items())
    done = subprocess.run(
        [*command, *(f"tests/{name}" for name in TESTS), "-k", chosen],
        cwd=tmp_path,
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    passed = re.search(r"(\d+) passed", done.stdout)
    assert passed is not None and int(passed[1]) >= 30, done.stdout


def test_the_diff_is_one_edit_in_each_place() -> None:
    """In the files that the text names, and in no other."""
    named = re.findall(r"`((?:flashproto|kernels|tests)/[\w/]+\.py)`", TEXT.partition("```diff")[0])
    touched = re.findall(r"^\+\+\+ (.+)$", DIFF, re.MULTILINE)
    assert sorted(touched) == sorted(set(named) - {"kernels/schedule.py"})
    added = re.findall(r"^\+(?!\+\+ )", DIFF, re.MULTILINE)
    assert len(added) <= 55
