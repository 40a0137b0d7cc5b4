"""Errors whose message is for the person at the command line: one line, and what to do."""

from __future__ import annotations

import errno
import shlex
import shutil
import sys
from pathlib import Path

import torch

from flashproto import BackendError

AGAIN = "run the same command again"  # what to do when a file could not be written


def program(name: str) -> str:
    """python or torchrun as a shell finds it: its path, where the name alone is not what runs here."""
    own = Path(sys.executable).with_name(name)
    if not own.exists() or Path(shutil.which(name) or "") == own:
        return name
    return shlex.quote(str(own.relative_to(Path.cwd()) if own.is_relative_to(Path.cwd()) else own))


class UserError(Exception):
    """Something given cannot be used."""

    code = 2  # the exit code


class OptionError(UserError):
    """An option cannot be used."""


class DataError(UserError):
    """The text cannot be used."""


def not_utf8(name: object, error: UnicodeDecodeError, offset: int, do: str) -> DataError:
    """Of the text `name`, from whose `offset` on bytes were decoded; do: what else helps."""
    text, where = error.object, offset + error.start
    convert = "Repair it there, where it is UTF-8 before that"
    if where == 0 and text[:2] in (b"\xff\xfe", b"\xfe\xff"):
        convert = "Convert it, with iconv -f utf-16 -t utf-8"
    elif text[: error.start].isascii():
        convert = "Convert it, with iconv -f latin1 -t utf-8 say"
    return DataError(
        f"{name} is not UTF-8 (byte {text[error.start]:#04x} at offset {where}); it takes text in "
        f"UTF-8. {convert}, or {do}."
    )


class CheckpointError(UserError):
    """A checkpoint cannot be read or used."""


class TrainingError(UserError):
    """Training cannot go on."""

    code = 1


class WriteError(TrainingError):
    """A file cannot be written."""

    def __init__(
        self, path: Path, error: OSError, kept: str = "", then: str = "go on with --resume"
    ) -> None:
        self.why = error.strerror
        full = error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
        do = "Make room" if full else "Make it writable"
        super().__init__(f"{path} could not be written ({error.strerror}){kept}. {do}, then {then}.")


# What main() of a script catches and gives to `tell`.
EXPECTED = (UserError, BackendError, torch.OutOfMemoryError, OSError, ValueError)

# What flashproto's messages advise in Python, as an option says it.
OPTIONS = {
    "Pass impl=None to let": "Leave --impl out to let",
    "Call flashproto.backends.set_default(None) to let": "Unset FLASHPROTO_IMPL to let",
}


def tell(script: str, error: Exception) -> int:
    """Print the message; returns the exit code, 1 where a run failed and 2 for bad input."""
    text = str(error)
    if isinstance(error, BrokenPipeError):
        raise error  # start.run
    if isinstance(error, OSError) and error.filename is None:
        text = f"{error.strerror or text}, while printing or in a file of a library"
    for python, option in OPTIONS.items():
        text = text.replace(python, option)
    print(f"{script}: {text}", file=sys.stderr)
    if isinstance(error, torch.OutOfMemoryError):
        return 1
    return getattr(error, "code", 2)
