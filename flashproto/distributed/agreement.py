"""In the checked mode the ranks of a group compare their calls before anything travels.

Each rank says what it is given, and what its own checks refuse.  All ranks know both then, so that all
raise the same error, or none does.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Hashable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, cuda
from torch.compiler import is_compiling

from ..backends import autocast_dtype
from ..checks import reading
from ..checks.errors import described, refuse, shortened
from ..checks.options import is_number
from ..checks.reading import can_be_read
from ..masks import Mask
from .group import Group, group_of

BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
CHUNK = 2**20  # elements that are digested at a time
ROOM = 95  # characters for two answers, of the 100 that an error shows of what it got


def agreed(
    call: str,
    check: Callable[..., Any],
    given: dict[str, Any],
    own: Collection[str] = (),
    uneven: bool = False,
) -> Any:
    """check(**given), which refuses arguments and makes of them what a call is made of.

    given: all arguments by name, with the group.  own: tensors whose values are a rank's own; others
    have the same values on all.  uneven: the last dimensions may differ.
    """
    if not is_compared():
        return check(**given)
    ranks, error = group_of(call, given["group"]), None
    try:
        made = check(**given)
    except Exception as refused:
        made, error = None, refused
    first = next((x for x in given.values() if isinstance(x, Tensor)), None)
    facts = {n: facts_of(x, n not in own, uneven) for n, x in given.items() if n != "group"}
    facts["torch.autocast"] = [str(None if first is None else autocast_dtype(first))]
    compare(call, ranks, facts, error, first)
    return made


def all_in_backward(call: str, ranks: Group, like: Tensor) -> None:
    """That all ranks run this backward pass now."""
    if is_compared():
        compare(f"backward of {call}", ranks, {}, None, like)


def is_compared() -> bool:
    if not reading.CHECKED or is_compiling():
        return False
    return not (cuda.is_initialized() and cuda.is_current_stream_capturing())


def compare(
    call: str, ranks: Group, facts: dict[str, list[str]], error: Exception | None, like: Tensor | None
) -> None:
    """Raise the same error on all ranks where calls, facts or errors are not the same on all."""
    own = {"the call": [call], **facts}, None if error is None else (type(error), str(error))
    given, errors = zip(*gathered(own, ranks, like), strict=True)
    for argument in given[0]:
        for words in zip(*(facts[argument] for facts in given), strict=False):
            if len(set(words)) > 1:
                operator = "flashproto.distributed" if argument == "the call" else call
                takes, do = "the same on all ranks of the group", "Make the same call on every rank."
                refuse(operator, argument, differing(words), takes, do)
    if error is not None and len(set(errors)) == 1:
        raise error
    for kind, words in filter(None, errors):
        raise kind(f"{words} (on {numbers_of(errors, (kind, words))} of the group)") from error


def gathered(own: Any, ranks: Group, like: Tensor | None) -> list[Any]:
    """`own` of each rank, by a thread that no transform, mode or trace of this one reaches."""
    found: list[Any] = [None] * ranks.size
    device = cuda.current_device() if cuda.is_initialized() else -1
    if like is not None and like.is_cuda:
        device = like.get_device()

    def gather() -> None:
        with cuda.device(device):  # whose memory NCCL takes
            dist.all_gather_object(found, own, ranks.group)

    with ThreadPoolExecutor(1) as thread:
        thread.submit(gather).result()
    return found


def differing(words: Sequence[str]) -> str:
    """Which ranks say what, for the first two of their answers."""
    answers = list(dict.fromkeys(words))
    where = [f" on {numbers_of(words, x)}" for x in answers[:2]]
    room = (ROOM - sum(map(len, where))) // 2
    return " and ".join(shortened(x, room) + at for x, at in zip(answers, where, strict=False))


def numbers_of(answers: Sequence[object], answer: object) -> str:
    ranks = [str(rank) for rank, x in enumerate(answers) if x == answer]
    words = ", ".join(ranks if len(ranks) < 4 else [*ranks[:3], "..."])
    return f"rank {words}" if len(ranks) == 1 else f"ranks {words}"


def facts_of(x: Any, alike: bool, uneven: bool) -> list[str]:
    """What has to be the same of an argument, the most telling first; values last, where they can be
    read.  It never raises: a rank that does leaves the others waiting."""
    try:
        if isinstance(x, Tensor):
            sizes = [*x.shape[:-1], "..."] if uneven else x.shape
            needed = torch.is_grad_enabled() and x.requires_grad
            facts = [f"[{', '.join(map(str, sizes))}]", str(x.dtype).removeprefix("torch.")]
            facts += [f"of device {x.device.type}", f"{'' if needed else 'not '}differentiated"]
            return [*facts, f"of values {digest(x)}"] if alike and can_be_read(x.detach()) else facts
        if isinstance(x, Mask):
            parts = [*x.bands, *x.parts]
            values = [fact for part in x.parts for y in part for fact in facts_of(y, True, False)]
            return [f"a mask of {len(parts)} part{'s'[: len(parts) != 1]}", *map(str, parts), *values]
        if isinstance(x, (list, tuple)):
            return [f"[{', '.join(facts_of(y, alike, uneven)[0] for y in x)}]"]
        if is_number(x):
            return [repr(float(x)).removesuffix(".0")]
        if isinstance(x, Hashable) and x in (False, True):
            return [str(bool(x))]
        return [described(x)]
    except Exception:
        return [f"of type {type(x).__name__}"]


def digest(x: Tensor) -> str:
    """A number of the values of x, in their order; of other values it is another one."""
    bits = x.detach().contiguous().flatten().view(BITS[x.element_size()])
    weights = torch.randint(2**62, (CHUNK,), generator=torch.Generator().manual_seed(0))
    weights, total = weights[: len(bits)].to(x.device), 0
    for part in bits.split(CHUNK):
        total = (3 * total + int((part * weights[: len(part)]).sum())) % 2**64
    return f"{total:016x}"
