"""Contenders that each have a process of their own, so that neither patches nor memory meet."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Sequence
from typing import Any


def command_of(tool: str, work: Sequence[Any], arguments: Sequence[str]) -> list[str]:
    """The command line of a worker: its last argument is its work."""
    line = [sys.executable, "-m", "flashproto.bench", tool, *arguments]
    return [*line, "--worker", json.dumps(list(work))]


def in_process(tool: str, work: Sequence[Any], arguments: Sequence[str], limit: float) -> Any:
    """What a worker of python -m flashproto.bench TOOL prints in its last line, or its error."""
    command = command_of(tool, work, arguments)
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=limit, check=False)
    except subprocess.TimeoutExpired:
        return {"error": f"took longer than {limit:.0f} s"}
    if done.returncode:
        return {"error": (done.stderr.strip().splitlines() or ["it ended without a word"])[-1]}
    return json.loads(done.stdout.splitlines()[-1])
