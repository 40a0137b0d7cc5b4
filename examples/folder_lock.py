"""One process at a time writes to a folder: it holds a lock on a file in it for as long as it runs.

The lock belongs to the process (fcntl.lockf), not to the descriptor of the file (flock), which children
inherit.  The system frees it when the process ends, by kill -9 too.  Where there are no locks (Windows,
some network file systems) nothing keeps a second process out.
"""

from __future__ import annotations

import contextlib
import errno
import os
from collections.abc import Iterable, Iterator
from pathlib import Path

from errors import OptionError, WriteError
from stop import raise_for_sigterm

try:
    import fcntl
except ImportError:  # Windows
    fcntl = None  # type: ignore[assignment]

LOCK = ".lock"
ATTEMPTS = 100  # while other processes make the folder and remove it
READ_ONLY = (errno.EROFS, errno.EACCES, errno.EPERM)


@contextlib.contextmanager
def locked(folder: Path, then: str, *, new: bool = False, writes: bool = True) -> Iterator[None]:
    """Make the folder, and keep other processes from writing to it.  What was made and is still empty
    at the end is removed, where SIGTERM ends the process too.

    then: what to do after a WriteError.
    new: FileExistsError where the folder is there.
    writes: False where a folder that cannot be written to will do; it needs no lock.

    OptionError where another process writes to the folder.
    """
    raise_for_sigterm()
    with contextlib.ExitStack() as at_end:
        missing = [path for path in (folder, *folder.parents) if not os.path.lexists(path)]
        at_end.callback(_remove_empty, missing)
        try:
            descriptor = _acquire(folder, new)
        except OSError as error:
            if new and os.path.lexists(folder):
                missing.clear()  # another process has made it
                raise FileExistsError from None
            if writes or error.errno not in READ_ONLY:
                raise WriteError(folder, error, then=then) from None
        else:
            at_end.callback(_release, folder / LOCK, descriptor)
        yield


def _acquire(folder: Path, new: bool) -> int:
    """The descriptor of the folder's lock file, which is locked."""
    for attempt in range(ATTEMPTS):
        try:
            folder.mkdir(parents=True, exist_ok=not new)
            descriptor = os.open(folder / LOCK, os.O_RDWR | os.O_CREAT, 0o666)
        except FileNotFoundError:  # the process that made the folder has removed it
            if attempt == ATTEMPTS - 1:
                raise
            continue
        if not _lock(descriptor, folder):
            os.close(descriptor)
            break
        with contextlib.suppress(FileNotFoundError):
            if os.path.samestat(os.fstat(descriptor), os.stat(folder / LOCK)):
                return descriptor
        os.close(descriptor)  # the process that held it has removed it
    raise _taken(folder)


def refuse_taken(folder: Path) -> None:
    """OptionError where another process writes to the folder, whatever is in it.  Not for a process
    that has locked it itself: its lock would be gone."""
    try:
        descriptor = os.open(folder / LOCK, os.O_RDWR)
    except OSError:  # there is no such file, or folder
        return
    free = _lock(descriptor, folder)
    os.close(descriptor)
    if not free:
        raise _taken(folder)


def _taken(folder: Path) -> OptionError:
    return OptionError(
        f"another process is writing to {str(folder)!r}; a folder takes one at a time. "
        "Wait until that has ended, or pass another --out."
    )


def _lock(descriptor: int, folder: Path) -> bool:
    """Whether no other process has the lock."""
    if fcntl is None:
        return True
    try:
        fcntl.lockf(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        if error.errno in (errno.EAGAIN, errno.EACCES):
            return False
        print(
            f"note: the file system of {folder} has no locks ({error.strerror}): see to it that no "
            "other process writes there"
        )
    return True


def _release(path: Path, descriptor: int) -> None:
    """Remove the file while it is locked: who has opened it before looks whether it is still there."""
    with contextlib.suppress(OSError):
        path.unlink()
    os.close(descriptor)


def _remove_empty(folders: Iterable[Path]) -> None:
    """Of folders that lie in one another, the innermost first."""
    for path in folders:
        with contextlib.suppress(OSError):
            path.rmdir()
