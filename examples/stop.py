"""Stopping when a signal asks for it: between two steps, and before the first."""

from __future__ import annotations

import os
import signal
from typing import NoReturn


class Terminated(KeyboardInterrupt):
    """SIGTERM, as KeyboardInterrupt is SIGINT; so what is open is closed."""

    code = 128 + signal.SIGTERM  # the exit code


def raise_for_sigterm() -> None:
    """Make the first SIGTERM raise Terminated, where it would end the process at once."""
    if signal.getsignal(signal.SIGTERM) is signal.SIG_DFL:
        signal.signal(signal.SIGTERM, _terminate)


def _terminate(number: int, frame: object) -> NoReturn:
    signal.signal(number, signal.SIG_DFL)
    raise Terminated


class StopSignal:
    """Remembers the first SIGINT (Ctrl-C) or SIGTERM, so that the step can end and be saved; a second
    one ends the process at once."""

    def __init__(self) -> None:
        self.number: int | None = None
        self.text = "stopping after this step, press again to quit without saving"
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, self._remember)

    def __bool__(self) -> bool:
        return self.number is not None

    @property
    def name(self) -> str | None:
        return None if self.number is None else signal.Signals(self.number).name

    def _remember(self, number: int, frame: object) -> None:
        self.number = number
        for each in (signal.SIGINT, signal.SIGTERM):
            signal.signal(each, signal.SIG_DFL)
        # Not by print, which the signal may have interrupted.
        if self.text:
            os.write(2, f"\n{self.text}\n".encode())
