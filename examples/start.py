"""How every script of this folder begins and ends.  Importing it has effects; it comes before torch:

if __name__ == "__main__":
    import start
...
if __name__ == "__main__":
    start.run(main)
"""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Callable
from typing import NoReturn

# Threads that spin while they wait can starve each other where other programs run on the same cores.
# Torch reads this when it is imported.  On two idle cores it costs a fifth of the speed.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

# Where a process of several has ended, torch's C++ warns of it in the others with stack traces, once a
# second; parallel.py says it in one line.
if "RANK" in os.environ:
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")

# While modules are imported Ctrl-C ends the process at once, as it does any program in C, instead of
# with a traceback out of whatever module is being read.
signal.signal(signal.SIGINT, signal.SIG_DFL)


def run(main: Callable[[], int | None]) -> NoReturn:
    """Exit with what main returns; with 130 for Ctrl-C, 143 for SIGTERM where that is raised (stop.py),
    and 141 for a reader that has gone (| head)."""
    code: int | None
    try:
        for stream in (sys.stdout, sys.stderr):
            stream.reconfigure(line_buffering=True, errors="replace")  # type: ignore[union-attr]
        signal.signal(signal.SIGINT, signal.default_int_handler)
        code = main()
        sys.stdout.flush()
    except KeyboardInterrupt as error:
        code = getattr(error, "code", 130)
        print(file=sys.stderr)
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # for the flush at exit
        code = 141
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    sys.exit(code)
