"""What no door takes yet, in one list: each door refuses it by its own library's name for it."""

from __future__ import annotations

from typing import NoReturn

from ..checks import refuse

# What it is, what is taken, and what to do; by flashproto's names.
NOT_YET = {
    "dropout_p": ("0.0: attention has no dropout here yet", "Pass 0.0, or use another attention."),
    "num_splits": ("its default: the number of parts is chosen here", "Leave it out."),
    "seqused_k": ("None: sequences have no gaps between them", "Pack the tokens, or pass a mask."),
    "two_runs": (
        "a mask in which one run of queries sees each key",
        "Use this library's own attention for it.",
    ),
}


def refuse_not_yet(operator: str, argument: str, got: object, what: str) -> NoReturn:
    """Raise for `argument` of a door's function; what: a row of NOT_YET."""
    takes, do = NOT_YET[what]
    refuse(operator, argument, got, takes, do, NotImplementedError)
